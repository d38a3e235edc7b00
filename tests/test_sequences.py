"""Sets of states at every step of binary chains, against sums over all joint states."""

from __future__ import annotations

import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated import EvolutionarySearch
from pyro_truncated.distributions import BinaryChains, CategoricalChains
from pyro_truncated.ops.binary_chains import Transitions
from pyro_truncated.search import ConditionalSearch
from pyro_truncated.sequences import BlockSearch, ChainPosterior, LinearGaussianSteps, ObservedSteps
from pyro_truncated.states import StateSpace

DOUBLE = torch.float64
BIAS = torch.arange(5.0, dtype=DOUBLE)


def problem(
    num_latents: int = 6, num_steps: int = 40, noise: float = 1.0, lengths: Tensor | None = None, missing: bool = False
) -> tuple[LinearGaussianSteps, BinaryChains, Tensor]:
    """Likelihood, chains and observations ``(N, T, D)``."""
    weight = torch.randn(5, num_latents, dtype=DOUBLE)
    table = torch.tensor([[0.95, 0.05], [0.1, 0.9]], dtype=DOUBLE).expand(num_latents, 2, 2)
    prior = BinaryChains(torch.full((num_latents,), 0.3, dtype=DOUBLE), table, num_steps, lengths)
    prior = prior.expand([2]) if lengths is None else prior
    y = BIAS + prior.sample() @ weight.mT + noise * torch.randn(2, num_steps, 5, dtype=DOUBLE)
    if missing:
        y[torch.rand(y.shape) < 0.2] = math.nan
    return LinearGaussianSteps(y, weight, torch.tensor(noise), BIAS), prior, y


@pytest.mark.parametrize("missing", [False, True])
def test_likelihood_of_steps(missing: bool) -> None:
    likelihood, _, y = problem(missing=missing)
    space = StateSpace([2] * 6)
    words = space.random((2, 40, 3), 0.5)
    mean = BIAS + space.unpack(words, DOUBLE) @ likelihood.weight.mT
    expected = torch.where(y.isnan().unsqueeze(2), 0.0, dist.Normal(mean, 1.0).log_prob(y.nan_to_num().unsqueeze(2))).sum(-1)
    torch.testing.assert_close(likelihood(words), expected)
    flipped = (words.unsqueeze(3) ^ (1 << torch.arange(6)).view(1, 1, 1, 6, 1)).flatten(2, 3)
    gains = (likelihood(flipped).view(2, 40, 3, 6) - likelihood(words).unsqueeze(-1)).flatten(0, 1)
    torch.testing.assert_close(likelihood.flip_gains(words.flatten(0, 1)[10:50], slice(10, 50)), gains[10:50])
    block = torch.tensor([[4, 1], [0, 5]])
    scores = likelihood.block_scores(words[:, :, 0], block)
    for n, c in ((0, 1), (0, 2), (1, 3)):
        cleared = words[n, :, :1] & ~((1 << block[n]).sum())
        state = cleared | ((c >> torch.arange(2) & 1) << block[n]).sum()
        at = [likelihood(states.expand(2, -1, -1, -1))[n, :, 0] for states in (cleared, state)]
        torch.testing.assert_close(scores[n, :, c] - scores[n, :, 0], at[1] - at[0])


@pytest.mark.slow
def test_all_states_are_exact_and_sets_lie_below() -> None:
    likelihood, prior, _ = problem()
    exact = ChainPosterior(likelihood, prior.transitions(), 64)
    assert exact.is_complete
    evidence = exact.free_energy()
    for size in (1, 4, 16):
        some = ChainPosterior(likelihood, prior.transitions(), size)
        before = some.free_energy()
        after = some.improve_().free_energy()
        assert bool((before <= after + 1e-9).all())
        assert bool((after <= evidence + 1e-9).all())
        certificate = some.certificate()
        assert bool((certificate >= after - 1e-9).all())
        assert bool((certificate <= evidence + 1e-9).all())
        assert bool((some.best_additions() >= 0).all())
    assert bool((evidence - after < 0.05).all())
    # The total variation between the posteriors is the mass outside of the sets.
    outside = float(-torch.expm1(after - evidence).min())
    torch.testing.assert_close(some.marginals(), exact.marginals(), rtol=0, atol=outside + 1e-9)
    assert bool((some.mode() == exact.mode()).all())
    frequency = some.sample(2000, torch.Generator().manual_seed(0)).mean(0)
    # Five standard deviations of 480 means of 2000 draws.
    assert bool(((frequency - some.marginals()).abs() < 5 * 0.5 / math.sqrt(2000)).all())


def test_rows_of_the_population() -> None:
    lengths = torch.tensor([40, 7])
    likelihood, prior, _ = problem(lengths=lengths)
    posterior = ChainPosterior(likelihood, prior.transitions(), 8).improve_()
    population = posterior.population()
    bound = population.free_energy().view(2, 40)
    torch.testing.assert_close(bound.sum(1), posterior.free_energy())
    assert bool((bound[1, 7:] == 0).all())
    torch.testing.assert_close(population.weights(), posterior.messages.log_weights().exp().flatten(0, 1))
    assert bool((posterior.marginals()[1, 7:] == 0).all())
    assert bool((posterior.mode()[1, 7:] == 0).all())
    assert float(posterior.effective_states()[1, 8]) == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("search", [ConditionalSearch(32), EvolutionarySearch(4, 3, 1, crossover=True)])
def test_any_search_proposes(search: ConditionalSearch | EvolutionarySearch) -> None:
    likelihood, prior, _ = problem(noise=2.0)
    moves = prior.transitions()
    posterior = ChainPosterior(likelihood, moves, 8)
    bounds = [posterior.free_energy()]
    for _ in range(4):
        bounds.append(posterior.search_(search).free_energy())
        assert bool((bounds[-1] >= bounds[-2] - 1e-9).all())
    assert bool((bounds[-1] > bounds[0]).all())


@pytest.mark.slow
def test_likelihoods_that_only_score() -> None:
    """Counts of independent rates: neither gains of flips nor scores of blocks have a short cut."""
    space, prior = StateSpace([2] * 5), problem(5, 20)[1]
    rate = torch.rand(5, 3, dtype=DOUBLE) * 4
    y = dist.Poisson(0.5 + prior.sample() @ rate).sample()

    def score(words: Tensor) -> Tensor:
        return dist.Poisson(0.5 + space.unpack(words, DOUBLE) @ rate).log_prob(y.unsqueeze(2)).sum(-1)

    evidence = ChainPosterior(score, prior.transitions(), 32).free_energy()
    posterior = ChainPosterior(score, prior.transitions(), 16).improve_()
    before = posterior.free_energy()
    posterior.search_(BlockSearch(3, 4), 3).improve_()
    assert bool((posterior.free_energy() >= before - 1e-9).all())
    assert bool((evidence - posterior.free_energy()).abs().max() < 0.5)
    with pytest.raises(ValueError, match="log_likelihood"):
        ChainPosterior(lambda words: score(words)[..., :1], prior.transitions(), 8)


def appliances(num: int, noise: float, num_steps: int) -> tuple[LinearGaussianSteps, Transitions]:
    """A meter that sees only the sum of two-state appliances, 60 to 2400 W."""
    power = 60 * 40 ** torch.rand(1, num, dtype=DOUBLE)
    end, share = 1 / (5 * 24 ** torch.rand(num, dtype=DOUBLE)), 0.1 + 0.3 * torch.rand(num, dtype=DOUBLE)
    begin = end * share / (1 - share)
    table = torch.stack([torch.stack([1 - begin, begin], -1), torch.stack([end, 1 - end], -1)], -2)
    prior = BinaryChains(share, table, num_steps)
    y = prior.expand([1]).sample() @ power.mT + noise * torch.randn(1, num_steps, 1, dtype=DOUBLE)
    return LinearGaussianSteps(y, power, torch.tensor(noise)), prior.transitions()


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_blocks_find_what_flips_do_not(seed: int) -> None:
    torch.manual_seed(seed)
    likelihood, moves = appliances(8, 30.0, 500)
    exact = float(ChainPosterior(likelihood, moves, 256).free_energy())
    posterior = ChainPosterior(likelihood, moves, 32).improve_()
    search, bound = BlockSearch(8, 32), float(posterior.free_energy())
    for _ in range(8):
        posterior.search_(search)
        now = float(posterior.free_energy())
        assert now >= bound - 1e-7
        bound = now
    posterior.anneal_(9.0, search, steps=50, num_paths=2).search_(search, 8).improve_()
    assert exact - 0.01 < float(posterior.free_energy()) < exact + 1e-6


@pytest.mark.slow
def test_steps_without_observations_are_passed_by() -> None:
    """Bound and marginals against chains with all steps, where a missing step has no likelihood."""
    likelihood, prior, y = problem(3, 12)
    y[0, [2, 3, 7]] = math.nan
    y[1, [0, 1]] = math.nan
    y[1, 9:] = math.nan
    whole = LinearGaussianSteps(y, likelihood.weight, torch.tensor(1.0), BIAS)
    lengths = torch.tensor([12, 9])
    exact = ChainPosterior(whole, BinaryChains(prior.initial[0], prior.transition[0], 12, lengths).transitions(), 8)
    steps = ObservedSteps.from_mask(~y.isnan().all(-1))
    rows = y.gather(1, steps.position.unsqueeze(-1).expand(-1, -1, 5)).masked_fill((steps.kind < 0).unsqueeze(-1), math.nan)
    chains = prior.initial[0], prior.transition[0]
    some = ChainPosterior(LinearGaussianSteps(rows, likelihood.weight, torch.tensor(1.0), BIAS), steps.transitions(*chains), 8)
    torch.testing.assert_close(some.free_energy(), exact.free_energy())
    torch.testing.assert_close(steps.marginals(some, *chains, lengths, 12), exact.marginals())
    first, counts = steps.expected_transitions(*chains, some.expected_transitions())
    expected = exact.expected_transitions()
    torch.testing.assert_close(first, expected[0, :, 0])
    torch.testing.assert_close(counts, expected[1])


def test_sets_that_no_path_crosses() -> None:
    """Chains that never change, and data that contradict them: no NaN anywhere, and the start connects what it can."""
    rigid = torch.eye(2, dtype=DOUBLE).expand(3, 2, 2)
    prior = BinaryChains(torch.full((3,), 0.5, dtype=DOUBLE), rigid, 6).expand([1])
    weight = 10 * torch.eye(3, dtype=DOUBLE)
    y = torch.tensor([1.0, 0.0, 1.0], dtype=DOUBLE).expand(1, 6, 3) * 10
    posterior = ChainPosterior(LinearGaussianSteps(y, weight, torch.tensor(1.0)), prior.transitions(), 2)
    assert bool(posterior.free_energy().isfinite().all())
    assert posterior.mode()[0, 3].tolist() == [1.0, 0.0, 1.0]
    moving = y.clone()
    moving[0, 3:] = 10 - moving[0, 3:]
    with pytest.warns(UserWarning, match="no path"):
        stuck = ChainPosterior(LinearGaussianSteps(moving, weight, torch.tensor(0.1)), prior.transitions(), 2)
    assert not bool(stuck.free_energy().isnan().any())
    assert not bool(stuck.marginals().isnan().any())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((torch.zeros(4, 3), torch.zeros(3, 2), 1.0), r"y must have shape \(N, T, D\) and weight \(D, M\); got \(4, 3\) and \(3, 2\)"),
        ((torch.zeros(1, 4, 3), torch.zeros(2, 3), 1.0), r"y must have shape .* got \(1, 4, 3\) and \(2, 3\)"),
        ((torch.zeros(1, 4, 3), torch.zeros(3, 2), torch.ones(2)), r"scale must have one of the shapes .*\(3,\)\]; got \(2,\)"),
        ((torch.zeros(1, 4, 3), torch.zeros(3, 2), -1.0), "scale must be positive"),
        (
            (torch.zeros(1, 4, 3), torch.zeros(3, 2), 1.0, torch.ones(2)),
            r"bias must have one of the shapes \[\(\), \(1,\), \(3,\)\]; got \(2,\)",
        ),
    ],
)
def test_observations_and_chains_fit_together(arguments, error):
    with pytest.raises(ValueError, match=error):
        LinearGaussianSteps(*arguments)


def test_likelihoods_of_other_sequences_or_chains_are_refused():
    """Of three chains of a dictionary the third was off in silence where the transitions were of two."""
    moves = BinaryChains([0.3, 0.3], [[[0.9, 0.1], [0.2, 0.8]]] * 2, 4).transitions()
    with pytest.raises(ValueError, match="log_likelihood and transitions must have as many chains; got 3 and 2"):
        ChainPosterior(LinearGaussianSteps(torch.zeros(1, 4, 3), torch.ones(3, 3), 1.0), moves)
    with pytest.raises(ValueError, match="states must be those of the 2 sequences of 4 steps; got"):
        ChainPosterior(LinearGaussianSteps(torch.zeros(2, 4, 3), torch.ones(3, 2), 1.0), moves)


def test_arrays_and_lists_are_taken():
    y, weight = np.random.default_rng(0).normal(size=(2, 4, 3)), np.ones((3, 2))
    switch = np.array([[[0.9, 0.1], [0.2, 0.8]]] * 2)
    found = []
    for kind, lengths in ((np.asarray, np.array([4, 2])), (np.ndarray.tolist, [4, 2]), (torch.tensor, torch.tensor([4, 2]))):
        moves = BinaryChains(kind(np.full(2, 0.3)), kind(switch), 4, lengths).transitions()
        found.append(ChainPosterior(LinearGaussianSteps(kind(y), kind(weight), 0.5), moves).marginals())
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2], atol=1e-6, rtol=1e-6)
    rows = [CategoricalChains([[0.5, 0.5]], switch[:1], 3, lengths).batch_shape for lengths in ([3, 1], np.array([3, 1]))]
    assert rows == [(2,), (2,)]
