"""The factors behind the exchange of inducing inputs, and the searches, against dense computations."""

from __future__ import annotations

import itertools

import pytest
import torch

from pyro_truncated.gp import ExchangeSearch, FunctionKernel
from pyro_truncated.gp.cholesky import independent_cholesky
from pyro_truncated.gp.subset.objectives import SubsetProblem
from pyro_truncated.gp.subset.subset_search import (
    Budget,
    CandidatePool,
    ExchangeFactors,
    approximate_gains,
    draw,
    removal_costs,
    removal_plan,
)
from tests.gp.subset.subset_reference import dense_objective, matrix, nystrom, problem_and_index, toy


def others(index, n):
    return torch.tensor([j for j in range(n) if j not in set(index.tolist())])


def check_factors(factors, K, tolerance):
    index, L = factors.index, factors.factor
    torch.testing.assert_close(L @ L.mT, nystrom(K, index), rtol=0, atol=tolerance)
    torch.testing.assert_close(factors.inverse @ L[index], torch.eye(len(index), dtype=K.dtype), rtol=0, atol=100 * tolerance)
    torch.testing.assert_close(factors.gram, L.mT @ L, rtol=0, atol=100 * tolerance)
    torch.testing.assert_close(factors.moment, L.mT @ factors.problem.targets, rtol=0, atol=100 * tolerance)
    torch.testing.assert_close(factors.residual, (K - L @ L.mT).diagonal(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("objective", ["vfe", "pp"])
@pytest.mark.parametrize("H", [1, 3])
class TestExactChanges:
    def test_objective(self, objective, H):
        problem, index, K = problem_and_index(objective, H)
        assert ExchangeFactors(problem, 20, index).value() == pytest.approx(
            dense_objective(K, problem.targets, 0.02, index, objective), abs=1e-9
        )

    def test_addition_of_every_candidate(self, objective, H):
        problem, index, K = problem_and_index(objective, H)
        factors = ExchangeFactors(problem, 20, index)
        candidates = others(index, 120)
        gains = CandidatePool(factors, candidates).gains()
        before = factors.value()
        expected = [before - dense_objective(K, problem.targets, 0.02, torch.cat([index, j[None]]), objective) for j in candidates]
        torch.testing.assert_close(gains, torch.tensor(expected, dtype=gains.dtype), rtol=0, atol=1e-9)
        # The printed sign of algorithm 1, F + dF, is off by twice as much.
        assert gains.max() > 1

    def test_removal_of_every_member(self, objective, H):
        problem, index, K = problem_and_index(objective, H)
        factors = ExchangeFactors(problem, 20, index)
        before = factors.value()
        expected = [
            dense_objective(K, problem.targets, 0.02, torch.cat([index[:i], index[i + 1 :]]), objective) - before for i in range(20)
        ]
        torch.testing.assert_close(removal_costs(factors), torch.tensor(expected, dtype=K.dtype), rtol=0, atol=1e-9)

    def test_removal_plan_is_greedy_and_exact(self, objective, H):
        problem, index, K = problem_and_index(objective, H)
        factors = ExchangeFactors(problem, 20, index)
        places, costs = removal_plan(factors, 4)
        left, value = index.tolist(), factors.value()
        for place, cost in zip(places.tolist(), costs.tolist(), strict=True):
            tried = {
                i: dense_objective(K, problem.targets, 0.02, torch.tensor([j for j in left if j != i]), objective) - value for i in left
            }
            cheapest = min(tried, key=tried.get)
            assert int(index[place]) == cheapest
            assert cost == pytest.approx(tried[cheapest], abs=1e-9)
            left.remove(cheapest)
            value += tried[cheapest]

    def test_block_choice_is_greedy_and_exact(self, objective, H):
        problem, index, K = problem_and_index(objective, H)
        factors = ExchangeFactors(problem, 30, index)
        candidates = others(index, 120)[:25]
        pool = CandidatePool(factors, candidates)
        places, gains = pool.choose(4)
        members, value = index, factors.value()
        for place, gain in zip(places.tolist(), gains.tolist(), strict=True):
            tried = {
                int(j): value - dense_objective(K, problem.targets, 0.02, torch.cat([members, j[None]]), objective)
                for j in candidates
                if j not in members
            }
            best = max(tried, key=tried.get)
            assert int(candidates[place]) == best
            assert gain == pytest.approx(tried[best], abs=1e-9)
            members, value = torch.cat([members, torch.tensor([best])]), value - tried[best]
        factors.append(candidates[places], pool.residuals[:, places])
        assert factors.value() == pytest.approx(value, abs=1e-9)

    def test_ranking_with_all_candidates_as_pivots_is_exact(self, objective, H):
        # Short length-scales, so that no candidate depends on the others.
        problem, index, _ = problem_and_index(objective, H, lengthscale=0.4)
        factors = ExchangeFactors(problem, 20, index)
        candidates = others(index, 120)
        approximate = approximate_gains(factors, candidates)
        torch.testing.assert_close(approximate[candidates], CandidatePool(factors, candidates).gains(), rtol=0, atol=1e-9)
        assert bool((approximate[index] == -torch.inf).all())


@pytest.mark.slow
def test_factors_hold_after_thousands_of_swaps():
    problem, index, K = problem_and_index(lengthscale=0.7)
    factors = ExchangeFactors(problem, 24, index)
    generator = torch.Generator().manual_seed(2)
    for _ in range(700):
        new = draw(factors.candidates().double(), 3, generator)
        factors.append(new)
        factors.move_to_end(torch.randperm(factors.size, generator=generator)[: factors.size - 20])
        factors.forget(factors.size - 20)
    assert len(factors.index.unique()) == 20
    check_factors(factors, K, 1e-11)
    expected = dense_objective(K, problem.targets, 0.02, factors.index)
    assert abs(factors.value() - expected) < 1e-9 * abs(expected)


def test_moving_and_forgetting_is_taken_back():
    problem, index, K = problem_and_index()
    factors = ExchangeFactors(problem, 20, index)
    value = factors.value()
    factors.move_to_end(torch.tensor([3, 11, 0]))
    check_factors(factors, K, 1e-12)
    assert factors.index[-3:].tolist() == index[[3, 11, 0]].tolist()
    before = factors.forget(3)
    check_factors(factors, K, 1e-12)
    factors.recall(3, before)
    check_factors(factors, K, 1e-12)
    assert factors.value() == pytest.approx(value, abs=1e-10)


def test_duplicates_are_masked():
    kernel, Y = toy(60)
    X = torch.cat([kernel.inputs, kernel.inputs[:30]])
    doubled = type(kernel)(kernel.kernel, X)
    problem = SubsetProblem(doubled, torch.cat([Y, Y[:30]]), 0.02)
    factors = ExchangeFactors(problem, 12, torch.tensor([0, 60, 1, 61, 2]))
    assert factors.index.tolist() == [0, 1, 2]
    assert not factors.candidates()[[60, 61, 62]].any()
    assert factors.append(torch.tensor([5, 65])) == 1
    assert CandidatePool(factors, torch.tensor([60])).gains()[0] == -torch.inf
    found = ExchangeSearch().improve(problem, 20, None, Budget(max_attempts=20))
    assert len(found) == 20
    assert len(X[found].unique(dim=0)) == 20


def test_fewer_inputs_where_the_kernel_has_no_more_rank():
    kernel = FunctionKernel(lambda x, z: 1.0 + x * z, list(range(30)))
    problem = SubsetProblem(kernel, torch.randn(30, 1, dtype=torch.float64), 0.1)
    for index in (None, torch.arange(10)):
        assert len(ExchangeSearch().improve(problem, 10, index, Budget(max_attempts=5))) == 2


@pytest.mark.parametrize("objective", ["vfe", "pp"])
@pytest.mark.parametrize("m", [1, 3, 16])
def test_exchange_never_raises_the_objective(objective, m):
    problem, index, K = problem_and_index(objective, m=m)
    budget = Budget(max_attempts=60)
    found = ExchangeSearch(information_pivots=8, pool=8).improve(problem, m, index, budget, torch.Generator().manual_seed(0))
    values = [value for _, _, value in budget.history]
    assert all(b <= a + 1e-9 * abs(a) for a, b in itertools.pairwise(values))
    assert values[-1] < values[0]
    assert values[-1] == pytest.approx(dense_objective(K, problem.targets, 0.02, found, objective), rel=1e-9)
    assert len(found.unique()) == m


def test_exchange_finds_the_best_pair():
    problem, _, K = problem_and_index(n=25)
    best = min(dense_objective(K, problem.targets, 0.02, torch.tensor(pair)) for pair in itertools.combinations(range(25), 2))
    found = ExchangeSearch().improve(problem, 2, None, Budget(), torch.Generator().manual_seed(0))
    assert dense_objective(K, problem.targets, 0.02, found) == pytest.approx(best, abs=1e-9)


def test_all_inputs_as_inducing_inputs_give_the_exact_regression():
    problem, _, K = problem_and_index(n=30, lengthscale=0.5)
    found = ExchangeSearch().improve(problem, 30, None, Budget())
    exact = torch.distributions.MultivariateNormal(torch.zeros(30, dtype=K.dtype), K + 0.02 * torch.eye(30)).log_prob(problem.targets.mT)
    constant = 15 * torch.log(torch.tensor(2 * torch.pi, dtype=K.dtype))
    assert dense_objective(K, problem.targets, 0.02, found) == pytest.approx(-float(exact + constant), abs=1e-8)


def test_budget_limits():
    problem, index, _ = problem_and_index()
    budget = Budget(max_swaps=3)
    ExchangeSearch().improve(problem, 20, index, budget)
    assert budget.swaps == 3
    ticks = itertools.count()
    budget = Budget(max_seconds=5, clock=lambda: float(next(ticks)))
    ExchangeSearch().improve(problem, 20, index, budget)
    assert budget.attempts < 5
    with pytest.raises(ValueError, match="max_swaps must be an integer of at least 0; got -1"):
        Budget(max_swaps=-1)


def test_same_seed_same_subset():
    problem, _, _ = problem_and_index()
    found = [ExchangeSearch().improve(problem, 9, None, Budget(max_attempts=9), torch.Generator().manual_seed(4)) for _ in range(2)]
    assert torch.equal(*found)


@pytest.mark.slow
def test_weighted_draws():
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0])
    drawn = torch.stack([draw(weights, 1, generator) for _ in range(4000)])
    assert set(drawn.unique().tolist()) == {1, 2}
    # Six standard deviations: a false alarm once in 5e8 runs.
    assert abs((drawn == 2).double().mean() - 0.75) < 6 * (0.75 * 0.25 / 4000) ** 0.5
    assert sorted(draw(weights, 4, generator).tolist()) == [1, 2]


def test_cholesky_without_dependent_rows():
    A = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kept, triangle = independent_cholesky(A @ A.mT)
    assert kept.tolist() == [0, 1, 2]
    torch.testing.assert_close(triangle @ triangle.mT, (A @ A.mT)[:3, :3])


def test_problem_is_checked():
    kernel, Y = toy(30)
    with pytest.raises(ValueError, match=r"targets must be finite and of shape \(30, H\)"):
        SubsetProblem(kernel, Y[:20], 0.1)
    with pytest.raises(ValueError, match="noise must be a positive variance; got 0"):
        SubsetProblem(kernel, Y, 0.0)
    with pytest.raises(ValueError, match="objective must be one of vfe, pp; got 'elbo'"):
        SubsetProblem(kernel, Y, 0.1, "elbo")
    assert matrix(kernel).shape == (30, 30)


@pytest.mark.parametrize("value", [-1, 1.5, True, "x"])
def test_limits_of_searches(value):
    with pytest.raises(ValueError, match="max_swaps must be an integer of at least 0; got"):
        Budget(max_swaps=value)
    with pytest.raises(ValueError, match="max_seconds must be a number of at least 0; got nan"):
        Budget(max_seconds=float("nan"))
    assert Budget(max_attempts=0).is_exhausted
