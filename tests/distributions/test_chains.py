"""Binary chains as a distribution, against products of their factors."""

from __future__ import annotations

import itertools
import math

import pyro
import pyro.poutine as poutine
import pytest
import torch

from pyro_truncated.distributions import BinaryChains
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
