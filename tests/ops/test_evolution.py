"""Genetic operators: what must hold exactly, and their distributions at a false-alarm rate of 2e-5 per statistical test or less."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.states import StateSpace

# Every test runs on both kinds of kernels.
pytestmark = pytest.mark.usefixtures("kind")

# Two-sided normal quantile of the false-alarm rate 2e-5, and what is left of it for each of 1000 comparisons in one test.
SIGMAS = 4.27
SIGMAS_OF_MANY = 5.7


def assert_frequency(hits: Tensor, probability: float | Tensor, trials: int) -> None:
    """Compares counts with their binomial distribution (a normal approximation, so counts must be in the hundreds)."""
    probability = torch.as_tensor(probability, dtype=torch.double)
    spread = (trials * probability * (1 - probability)).sqrt()
    assert ((hits - trials * probability).abs() <= SIGMAS_OF_MANY * spread + 1e-9).all()


class TestSelectParents:
    def frequencies(self, log_joint: list[float], num_parents: int, trials: int = 40000, **kwargs: bool) -> Tensor:
        chosen = ops.select_parents(torch.tensor([log_joint], dtype=torch.double).expand(trials, -1), num_parents, **kwargs)
        assert all(len(set(row)) == num_parents for row in chosen[:100].tolist())
        return torch.nn.functional.one_hot(chosen, len(log_joint)).sum(0).double()

    def test_first_parent_is_proportional_to_fitness(self) -> None:
        # Equation (7): F = log p - 2 min log p.
        log_joint = [-3.0, -10.0, -5.0, -1.0]
        fitness = torch.tensor(log_joint) + 20
        assert_frequency(self.frequencies(log_joint, 1)[0], fitness / fitness.sum(), 40000)

    def test_positive_log_joints_get_positive_fitness(self) -> None:
        fitness = torch.tensor([2.0, 5.0, 9.0])  # (log p - min) + |min|
        assert_frequency(self.frequencies([2.0, 5.0, 9.0], 1)[0], fitness / fitness.sum(), 40000)

    def test_second_parent_is_proportional_among_the_rest(self) -> None:
        fitness = torch.tensor([17.0, 10.0, 15.0, 19.0], dtype=torch.double)
        p = fitness / fitness.sum()
        second = torch.stack([sum(p[i] * p[j] / (1 - p[i]) for i in range(4) if i != j) for j in range(4)])
        assert_frequency(self.frequencies([-3.0, -10.0, -5.0, -1.0], 2)[1], second, 40000)

    def test_uniform_selection(self) -> None:
        assert_frequency(self.frequencies([-3.0, -10.0, -5.0, -1.0, 7.0], 2, by_fitness=False), torch.full((2, 5), 0.2), 40000)

    def test_equal_log_joints_are_drawn_uniformly(self) -> None:
        for value in (-2.0, 0.0, 3.0):
            assert_frequency(self.frequencies([value] * 4, 2), torch.full((2, 4), 0.25), 40000)

    def test_impossible_states_come_last(self) -> None:
        counts = self.frequencies([-math.inf, -4.0, -math.inf, -2.0], 3)
        fitness = torch.tensor([0.0, 4.0, 0.0, 6.0]) / 10
        assert_frequency(counts[0], fitness, 40000)
        assert counts[:2, [0, 2]].sum() == 0
        assert_frequency(counts[2], torch.tensor([0.5, 0.0, 0.5, 0.0]), 40000)

    def test_only_impossible_states(self) -> None:
        assert_frequency(self.frequencies([-math.inf] * 3, 1)[0], torch.full((3,), 1 / 3), 40000)

    def test_a_state_of_fitness_zero_is_the_last_resort(self) -> None:
        counts = self.frequencies([0.0, 1.0, 2.0], 3)  # the smallest log joint is zero, and so is its fitness
        assert counts[2].tolist() == [40000, 0, 0]

    def test_other_data_points_do_not_matter(self) -> None:
        # Fitness normalised over a batch would give the second data point's states next to equal chances.
        log_joint = torch.tensor([[-1e6, -1e5, -1e4], [-9.0, -1.0, -5.0]], dtype=torch.double).repeat(20000, 1)
        chosen = ops.select_parents(log_joint, 1)[1::2, 0]
        assert_frequency(torch.bincount(chosen, minlength=3).double(), torch.tensor([9.0, 17.0, 13.0]) / 39, 20000)

    def test_all_states_can_be_parents(self) -> None:
        chosen = ops.select_parents(torch.randn(50, 9), 9)
        assert torch.equal(chosen.sort(1).values, torch.arange(9).expand(50, 9))

    def test_too_many_parents(self) -> None:
        with pytest.raises(ValueError, match=r"cannot draw 4 distinct parents from log joints of shape \(2, 3\)"):
            ops.select_parents(torch.zeros(2, 3), 4)


@pytest.fixture(params=["binary", "two words", "categorical", "mixed"])
def space(request: pytest.FixtureRequest) -> StateSpace:
    """Spaces of one and of several words, of latents with one, two and more values."""
    return {
        "binary": StateSpace([2] * 6),
        "two words": StateSpace([2] * 70),
        "categorical": StateSpace([3, 5, 4, 7]),
        "mixed": StateSpace([2, 3, 1, 2, 17] * 8),
    }[request.param]


def draw(space: StateSpace, *shape: int) -> Tensor:
    return space.random(shape, 0.4)


class TestCross:
    def test_children_are_prefixes_and_suffixes_of_a_pair(self, space: StateSpace) -> None:
        parents = draw(space, 30, 4)
        children = space.unpack(ops.cross(parents, space.fields)).tolist()
        values = space.unpack(parents).tolist()
        for family, offspring in zip(values, children, strict=True):
            assert len(offspring) == 12
            for number, (a, b) in enumerate(itertools.combinations(family, 2)):
                pairs = [(a[:c] + b[c:], b[:c] + a[c:]) for c in range(1, space.num_latents)]
                assert (offspring[2 * number], offspring[2 * number + 1]) in pairs

    def test_cut_points_are_uniform(self) -> None:
        space = StateSpace([2] * 5)
        parents = space.pack(torch.tensor([[0] * 5, [1] * 5])).expand(40000, 2, 1)
        cuts = space.unpack(ops.cross(parents, space.fields)[:, 1]).long().sum(-1)  # the second child starts with ones up to the cut
        assert_frequency(torch.bincount(cuts, minlength=6).double(), torch.tensor([0, 0.25, 0.25, 0.25, 0.25, 0]), 40000)

    def test_one_latent_cannot_be_crossed(self) -> None:
        with pytest.raises(ValueError, match="crossover needs at least two latents and two parents; got 1 and 4"):
            ops.cross(torch.zeros(2, 4, 1, dtype=torch.long), StateSpace([9]))


class TestFlipRandom:
    def test_exactly_one_latent_changes(self, space: StateSpace) -> None:
        words = draw(space, 20, 30)
        before = words.clone()
        mutated = ops.flip_random(words, space.fields)
        assert torch.equal(words, before)
        values = space.unpack(mutated, torch.long)
        assert ((values != space.unpack(words, torch.long)).sum(-1) == 1).all()
        assert (values < space.cardinality).all()
        assert torch.equal(space.pack(values), mutated)

    def test_latents_and_values_are_uniform(self) -> None:
        space = StateSpace([2, 1, 4])
        words = space.pack(torch.tensor([1, 0, 2])).expand(100, 400, 1)
        values = space.unpack(ops.flip_random(words, space.fields), torch.long).flatten(0, 1)
        counts = torch.stack([(values == torch.tensor(state)).all(-1).sum() for state in ((0, 0, 2), (1, 0, 0), (1, 0, 1), (1, 0, 3))])
        assert_frequency(counts.double(), torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6]), 40000)

    def test_a_single_state_cannot_mutate(self) -> None:
        with pytest.raises(ValueError, match="single state has nothing to mutate"):
            ops.flip_random(torch.zeros(2, 4, 1, dtype=torch.long), StateSpace([1, 1]))


class TestSparseFlipProbabilities:
    def test_formulas_of_the_paper_where_they_apply(self) -> None:
        num_latents, target, mean = 20, 5.3, 0.1
        p0, p1 = ops.sparse_flip_probabilities(num_latents, target, mean)
        for k in (4, 5, 6, 7):
            total = num_latents * mean
            alpha = (num_latents - k) * (total - (target - k)) / ((target - k + total) * k)
            assert p0[k].item() == pytest.approx(total / (num_latents + (alpha - 1) * k), rel=1e-12)
            assert p1[k].item() == pytest.approx(alpha * p0[k].item(), rel=1e-12)

    @pytest.mark.parametrize("num_latents", [1, 2, 7, 40])
    @pytest.mark.parametrize("target", [0.0, 0.4, 1.0, 3.0, 6.7, 40.0])
    @pytest.mark.parametrize("mean", [0.01, 1 / 7, 0.5, 1.0])
    def test_activity_and_number_of_flips(self, num_latents: int, target: float, mean: float) -> None:
        p0, p1 = ops.sparse_flip_probabilities(num_latents, target, mean)
        k = torch.arange(num_latents + 1, dtype=torch.double)
        for p in (p0, p1):
            assert ((p >= 0) & (p <= 1)).all()
        raised, lowered = (num_latents - k) * p0, k * p1
        flips = num_latents * mean
        # As close to the target as `flips` flips lead, and never more flips than that.
        reachable = torch.maximum(k - flips, torch.zeros_like(k)), torch.minimum(k + flips, torch.full_like(k, num_latents))
        closest = torch.full_like(k, target).maximum(reachable[0]).minimum(reachable[1])
        torch.testing.assert_close(k + raised - lowered, closest, rtol=1e-12, atol=1e-12)
        assert (raised + lowered <= flips + 1e-12).all()
        # Exactly `flips` of them unless one kind of latent is too scarce.
        plenty = (raised < num_latents - k - 1e-9) & (lowered > 1e-9) & (raised > 1e-9) & (lowered < k - 1e-9)
        torch.testing.assert_close((raised + lowered)[plenty], torch.full_like(k, flips)[plenty], rtol=1e-12, atol=1e-12)

    def test_target_one_flip_away_from_the_parent(self) -> None:
        # The ratio of the paper is 0 / 0 or infinite here: |s| - target = H p_bf.
        p0, p1 = ops.sparse_flip_probabilities(10, 2.0, 0.1)
        assert p0[3].item() == 0.0
        assert p1[3].item() == pytest.approx(1 / 3)
        assert p0[0].item() == pytest.approx(1 / 10)
        assert p1[10].item() == pytest.approx(1 / 10)


class TestFlipSparse:
    # Every activity from none to all, several targets on both sides.
    @pytest.mark.nightly(keep="values")
    @pytest.mark.slow
    @pytest.mark.parametrize("target", [0.0, 1.5, 4.0, 11.0])
    @pytest.mark.parametrize("mean", [1 / 12, 0.3])
    def test_expected_flips_and_activity(self, target: float, mean: float) -> None:
        num_latents, trials = 12, 20000
        space = StateSpace([2] * num_latents)
        k = torch.arange(num_latents + 1)
        values = (torch.arange(num_latents) < k.unsqueeze(-1)).long()
        words = space.pack(values).expand(trials, -1, -1)
        mutated = space.unpack(ops.flip_sparse(words, space.fields, target, mean), torch.float64)
        flipped = (mutated != values).double()
        assert (flipped.sum(-1) > 0).all()
        p0, p1 = ops.sparse_flip_probabilities(num_latents, target, mean)
        probability = torch.where(values.bool(), p1.unsqueeze(-1), p0.unsqueeze(-1))
        none = (1 - probability).prod(-1, keepdim=True)
        # Where nothing flipped, one uniformly random latent did.
        probability = probability + none / num_latents
        assert_frequency(flipped.sum(0), probability, trials)
        # Totals: the mean of a sum of bounded terms of standard deviation at most sqrt(H).
        assert ((flipped.sum(-1).mean(0) - probability.sum(-1)).abs() < SIGMAS * (num_latents / trials) ** 0.5).all()
        expected = torch.where(values.bool(), 1 - probability, probability).sum(-1)
        assert ((mutated.sum(-1).mean(0) - expected).abs() < SIGMAS * (num_latents / trials) ** 0.5).all()

    @pytest.mark.slow
    def test_flips_are_independent(self) -> None:
        space = StateSpace([2] * 100)
        words = torch.zeros(40000, 1, 2, dtype=torch.long)
        flips = space.unpack(ops.flip_sparse(words, space.fields, 20.0, 0.2), torch.float64).squeeze(1)
        # Probability 0.2 each; correlations of 4950 pairs, each about normal with spread 1 / sqrt(40000).
        correlation = torch.corrcoef(flips.T) - torch.eye(100)
        assert correlation.abs().max() < 6.3 / 200

    def test_many_words(self) -> None:
        space = StateSpace([2] * 300)
        words = space.random((200, 50), 8 / 300)
        mutated = ops.flip_sparse(words, space.fields, 8.0, 1 / 300)
        flips = (space.unpack(words) != space.unpack(mutated)).sum(-1).double()
        assert (flips >= 1).all()
        assert torch.equal(space.pack(space.unpack(mutated)), mutated)
        active = space.unpack(words).long().sum(-1)
        p0, p1 = ops.sparse_flip_probabilities(300, 8.0, 1 / 300)
        expected = ((300 - active) * p0[active] + active * p1[active]) + (1 - p0[active]) ** (300 - active) * (1 - p1[active]) ** active
        assert (flips.mean() - expected.mean()).abs() < SIGMAS * (flips.var() / flips.numel()).sqrt()

    def test_other_latents_move_with_the_flip_probability(self) -> None:
        space = StateSpace([2, 5, 2, 1, 3])
        trials = 40000
        start = torch.tensor([0, 4, 1, 0, 1])
        words = space.pack(start).expand(trials, 1, 1)
        values = space.unpack(ops.flip_sparse(words, space.fields, 1.0, 0.3), torch.long).squeeze(1)
        p0, p1 = ops.sparse_flip_probabilities(2, 1.0, 0.3)
        probability = torch.tensor([p0[1], 0.3, p1[1], 0.0, 0.3], dtype=torch.double)
        none = (1 - probability).prod()
        probability = probability + torch.where(space.cardinality > 1, none / 4, 0.0)
        assert_frequency((values != start).sum(0).double(), probability, trials)
        fifths = torch.bincount(values[:, 1], minlength=5).double()[:4]
        assert_frequency(fifths, probability[1] / 4, trials)

    def test_certain_flips(self) -> None:
        space = StateSpace([2] * 8)
        everything = ops.flip_sparse(torch.zeros(3, 5, 1, dtype=torch.long), space.fields, 8.0, 1.0)
        assert (everything == 255).all()

    def test_bad_probability(self) -> None:
        with pytest.raises(ValueError, match=r"flip_probability must lie in \(0, 1\]; got 0"):
            ops.flip_sparse(torch.zeros(3, 5, 1, dtype=torch.long), StateSpace([2]), 1.0, 0.0)


def test_seeds_reproduce_and_the_global_generator_moves_on() -> None:
    space = StateSpace([2] * 30)
    words = space.random((40, 6), 0.2)

    def children(generator: torch.Generator | None) -> Tensor:
        chosen = ops.select_parents(torch.arange(240.0).reshape(40, 6), 4, generator=generator)
        crossed = ops.cross(words.gather(1, chosen.unsqueeze(-1)), space.fields, generator=generator)
        flipped = ops.flip_random(crossed, space.fields, generator=generator)
        return ops.flip_sparse(flipped, space.fields, 3.0, 0.05, generator=generator)

    first = children(torch.Generator().manual_seed(3))
    assert torch.equal(first, children(torch.Generator().manual_seed(3)))
    assert not torch.equal(first, children(torch.Generator().manual_seed(4)))
    torch.manual_seed(5)
    second, third = children(None), children(None)
    assert not torch.equal(second, third)
    torch.manual_seed(5)
    assert torch.equal(second, children(None))


def test_results_do_not_depend_on_the_number_of_threads(kind: str) -> None:
    if kind != "compiled":
        pytest.skip("concerns the compiled kernels")
    import numba

    space = StateSpace([2] * 30)
    words = space.random((300, 6), 0.2)
    threads = numba.get_num_threads()
    results = []
    try:
        for number in {1, threads}:
            numba.set_num_threads(number)
            results.append(ops.flip_sparse(words, space.fields, 3.0, 0.05, generator=torch.Generator().manual_seed(1)))
    finally:
        numba.set_num_threads(threads)
    assert all(torch.equal(results[0], result) for result in results)
