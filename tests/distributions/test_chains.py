"""Binary chains as a distribution, against products of their factors."""

from __future__ import annotations

import itertools
import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch

from pyro_truncated import AutoTruncated, Truncated_ELBO
from pyro_truncated.distributions import BinaryChains, CategoricalChains
from pyro_truncated.ops import binary_chains as chains
from pyro_truncated.states import StateSpace


def parameters(num_chains: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    transition = torch.rand(num_chains, 2, 2, dtype=torch.float64)
    return torch.rand(num_chains, dtype=torch.float64), transition / transition.sum(-1, keepdim=True)


def sequences(num_steps: int, num_chains: int) -> torch.Tensor:
    bits = list(itertools.product((0.0, 1.0), repeat=num_steps * num_chains))
    return torch.tensor(bits, dtype=torch.float64).view(-1, num_steps, num_chains)


def test_log_prob_is_the_product_of_transitions() -> None:
    initial, transition = parameters()
    every = sequences(3, 2)
    actual = BinaryChains(initial, transition, 3).log_prob(every)
    torch.testing.assert_close(actual.logsumexp(0), torch.zeros((), dtype=torch.float64), rtol=0, atol=1e-12)
    for sequence, log_prob in zip(every, actual, strict=True):
        expected = 1.0
        for m in range(2):
            values = sequence[:, m].long().tolist()
            expected *= float(initial[m]) if values[0] else 1 - float(initial[m])
            for before, now in itertools.pairwise(values):
                expected *= float(transition[m, before, now])
        assert float(log_prob.exp()) == pytest.approx(expected, rel=1e-12)


def test_steps_beyond_the_end_hold_no_probability() -> None:
    initial, transition = parameters()
    lengths = torch.tensor([3, 1, 0])
    some = BinaryChains(initial, transition, 3, lengths)
    assert some.batch_shape == (3,)
    drawn = some.sample((50,))
    assert bool((drawn[:, 1, 1:] == 0).all())
    assert bool((drawn[:, 2] == 0).all())
    value = drawn[0]
    expected = [
        BinaryChains(initial, transition, n).log_prob(value[i, :n]) if n else torch.zeros(()).double() for i, n in enumerate([3, 1, 0])
    ]
    torch.testing.assert_close(some.log_prob(value), torch.stack(expected))
    with pytest.raises(ValueError, match="lengths"):
        BinaryChains(initial, transition, 3, torch.tensor([4]))


@pytest.mark.parametrize("number", [4, 20], ids=["all steps at once", "in turn"])
def test_draws_go_from_step_to_step(number: int) -> None:
    torch.manual_seed(0)
    initial, transition = torch.tensor([0.3, 1.0, 0.5]), torch.rand(3, 2, 2)
    # A chain that turns round in each step, and one that stays.
    transition[1], transition[2] = torch.eye(2).flip(0), torch.eye(2)
    transition[0] /= transition[0].sum(-1, keepdim=True)
    torch.manual_seed(1)
    drawn = BinaryChains(initial, transition, 30).sample((number,))
    torch.manual_seed(1)
    uniform, chance = torch.rand(number, 30, 3), initial
    for t in range(30):
        expected = uniform[:, t] < chance
        assert torch.equal(drawn[:, t] == 1, expected)
        chance = torch.where(expected, transition[:, 1, 1], transition[:, 0, 1])


def test_mean_is_that_of_all_sequences() -> None:
    initial, transition = parameters()
    chain, every = BinaryChains(initial, transition, 3), sequences(3, 2)
    weights = chain.log_prob(every).exp()
    torch.testing.assert_close(chain.mean, torch.einsum("k,ktm->tm", weights, every))
    # Three standard deviations of 4000 draws, twelve numbers.
    drawn = chain.expand([2]).sample((4000,))
    assert drawn.shape == (4000, 2, 3, 2)
    assert bool(((drawn.mean(0) - chain.mean).abs() < 5 * (chain.variance / 4000).sqrt()).all())


def test_gradients_and_forbidden_transitions() -> None:
    initial, transition = parameters()
    value = BinaryChains(initial, transition, 5).sample()
    assert torch.autograd.gradcheck(
        lambda a, b: BinaryChains(a, b, 5, validate_args=False).log_prob(value), (initial.requires_grad_(), transition.requires_grad_())
    )
    rigid = torch.eye(2, dtype=torch.float64).expand(2, 2, 2).clone().requires_grad_()
    log_prob = BinaryChains(initial, rigid, 2).log_prob(torch.tensor([[[0.0, 1.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 1.0]]]).double())
    assert log_prob[1] == -math.inf
    log_prob[0].backward()
    assert bool(rigid.grad.isfinite().all())


@pytest.mark.slow
def test_transitions_sum_like_the_distribution() -> None:
    initial, transition = parameters()
    lengths = torch.tensor([3, 2])
    chain = BinaryChains(initial, transition, 3, lengths)
    words = StateSpace([2, 2]).enumerate().expand(2, 3, -1, -1)
    unary = torch.randn(2, 3, 4, dtype=torch.float64)
    expected = []
    for n, length in enumerate(lengths.tolist()):
        every = sequences(length, 2)
        place = (every * torch.tensor([1, 2])).sum(-1).long()
        log_joint = BinaryChains(initial, transition, length).log_prob(every) + unary[n, torch.arange(length), place].sum(-1)
        expected.append(log_joint.logsumexp(0))
    torch.testing.assert_close(chains.free_energy(words, unary, chain.transitions()), torch.stack(expected))
    with pytest.raises(ValueError, match="share"):
        BinaryChains(torch.rand(2, 2), torch.full((2, 2, 2), 0.5), 3).transitions()


def test_in_a_plate() -> None:
    initial, transition = parameters()

    def model() -> None:
        with pyro.plate("sequences", 4):
            pyro.sample("s", BinaryChains(initial, transition, 3))

    trace = poutine.trace(model).get_trace()
    trace.compute_log_prob()
    alone = BinaryChains(initial, transition, 3)
    expected = torch.stack([alone.log_prob(states) for states in trace.nodes["s"]["value"]])
    torch.testing.assert_close(trace.nodes["s"]["log_prob"], expected)
    assert expected.shape == (4,)


def test_arguments_are_checked() -> None:
    initial, transition = parameters()
    with pytest.raises(ValueError, match="transition"):
        BinaryChains(initial, transition[:1], 3)
    with pytest.raises(ValueError, match="transition"):
        BinaryChains(initial, transition * 2, 3)
    with pytest.raises(ValueError, match="num_steps"):
        BinaryChains(initial, transition, 0)
    with pytest.raises(ValueError, match="support"):
        BinaryChains(initial, transition, 3).log_prob(torch.full((3, 2), 0.5, dtype=torch.float64))


def categories(num_chains: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random parameters of chains; one value never follows another one."""
    generator = torch.Generator().manual_seed(0)
    initial = torch.rand(num_chains, number, dtype=torch.float64, generator=generator)
    transition = torch.rand(num_chains, number, number, dtype=torch.float64, generator=generator)
    transition[..., 0, -1] = 0.0
    return initial / initial.sum(-1, keepdim=True), transition / transition.sum(-1, keepdim=True)


def test_categorical_chains_are_products_of_transitions() -> None:
    initial, transition = categories(2, 3)
    every = torch.tensor(list(itertools.product(range(3), repeat=6))).view(-1, 3, 2)
    actual = CategoricalChains(initial, transition, 3).log_prob(every).exp()
    expected = torch.ones(len(every), dtype=torch.float64)
    for m in range(2):
        first, second, third = every[..., m].unbind(-1)
        expected *= initial[m, first] * transition[m, first, second] * transition[m, second, third]
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)
    assert float(actual.sum()) == pytest.approx(1.0, abs=1e-12)


def test_draws_of_categorical_chains_follow_their_probabilities() -> None:
    """Frequencies of 20,000 draws: a false alarm, beyond five standard errors in one of 81, has a chance below one in ten thousand."""
    chains = CategoricalChains(*categories(1, 3), 4, torch.tensor([4, 2]))
    drawn = chains.sample((20_000,))
    assert bool((drawn[:, 1, 2:] == 0).all())
    code = (drawn[:, 0, :, 0] * 3 ** torch.arange(4)).sum(-1).bincount(minlength=81) / 20_000
    paths = torch.tensor([[number // 3**t % 3 for t in range(4)] for number in range(81)])
    chance = CategoricalChains(*categories(1, 3), 4).log_prob(paths.unsqueeze(-1)).exp()
    assert bool(((code - chance).abs() <= 5 * (chance * (1 - chance) / 20_000).sqrt()).all())


def test_shapes_of_categorical_chains_are_checked() -> None:
    initial, transition = categories(2, 3)
    with pytest.raises(ValueError, match=r"initial must have shape \(\*batch, M, V\)"):
        CategoricalChains(initial, transition[..., :2], 3)
    with pytest.raises(ValueError, match="lengths"):
        CategoricalChains(initial, transition, 3, torch.tensor([4]))
    larger = CategoricalChains(initial, transition, 3).expand([5])
    assert larger.log_prob(larger.sample()).shape == (5,)


@pytest.mark.parametrize("lengths", [None, torch.tensor([6, 2])], ids=["one length", "lengths"])
def test_a_guide_on_categorical_chains_sums_over_all_paths(lengths: torch.Tensor | None) -> None:
    """Loss and marginals by a forward pass, of which all steps of two chains have nine states."""
    initial, transition = categories(2, 3)
    y = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    is_part = torch.ones(2, 6, dtype=torch.bool) if lengths is None else torch.arange(6) < lengths.unsqueeze(-1)

    def model(y: torch.Tensor) -> None:
        with pyro.plate("sequences", 2):
            s = pyro.sample("s", CategoricalChains(initial, transition, 6, lengths))
            mean = (s * torch.tensor([1.0, -0.4], dtype=torch.float64)).sum(-1)
            pyro.sample("y", dist.Normal(mean, 0.7).mask(is_part).to_event(1), obs=y)

    guide = AutoTruncated(model, num_states=9)
    loss = Truncated_ELBO().loss(model, guide, y)
    first = (initial[0, :, None] * initial[1]).flatten()
    table = torch.kron(transition[0], transition[1])
    means = torch.tensor([a - 0.4 * b for a in range(3) for b in range(3)], dtype=torch.float64)
    total = 0.0
    for n in range(2):
        length = 6 if lengths is None else int(lengths[n])
        density = dist.Normal(means, 0.7).log_prob(y[n, :length].unsqueeze(-1)).exp()
        forward = [first * density[0]]
        for t in range(1, length):
            forward.append((forward[-1] @ table) * density[t])
        total += float(forward[-1].sum().log())
        last = (forward[-1] / forward[-1].sum()).view(3, 3)
        at_end = guide.marginals()["s"][n, length - 1]
        torch.testing.assert_close(at_end, torch.stack([last.sum(1), last.sum(0)]), rtol=1e-9, atol=1e-12)
    assert loss == pytest.approx(-total, rel=1e-9)
    assert guide.marginals()["s"].shape == (2, 6, 2, 3)
    assert guide.sample_posterior(4)["s"].shape == (4, 2, 6, 2)


def test_chains_by_steps_are_looked_at_once() -> None:
    """A step after the set-up runs the model a few times, as the structure is known."""
    initial, transition = categories(1, 3)
    runs = itertools.count()

    def model(y: torch.Tensor) -> None:
        next(runs)
        with pyro.plate("sequences", 2):
            s = pyro.sample("s", CategoricalChains(initial, transition, 6))
            pyro.sample("y", dist.Normal(1.0 * s.squeeze(-1), 0.7).to_event(1), obs=y)

    y = torch.randn(2, 6, dtype=torch.float64)
    guide = AutoTruncated(model, num_states=9)
    guide.setup(y)
    before = next(runs)
    Truncated_ELBO().loss(model, guide, y)
    assert next(runs) - before <= 4
