"""The published swap algorithm: its factors, its exact and approximate costs, its variants; and the baselines."""

from __future__ import annotations

import itertools

import pytest
import torch

from pyro_truncated.gp import FunctionKernel, RandomSearch
from pyro_truncated.gp.subset.objectives import SubsetProblem
from pyro_truncated.gp.subset.subset_search import Budget, CandidatePool, ExchangeFactors
from tests.gp.subset.subset_reference import dense_objective, nystrom, problem_and_index
from tests.papers.baselines.cholqr import CholQRFactors, CholQRSearch
from tests.papers.baselines.greedy import (
    GreedyVarianceSearch,
    InformativeVectorSearch,
    KMeansSearch,
    TitsiasSearch,
)


def check_factors(factors, K, tolerance):
    m, noise = factors.size, factors.problem.noise
    L, Q, R = factors.L[:, :m], factors.Q[:, :m], factors.R[:m, :m]
    augmented = torch.cat([L, torch.zeros(len(factors.Q) - len(L), m, dtype=L.dtype)])
    augmented[len(L) : len(L) + m] = noise**0.5 * torch.eye(m, dtype=L.dtype)
    close = {"rtol": 0, "atol": tolerance}
    torch.testing.assert_close(L @ L.mT, nystrom(K, factors.index), **close)
    torch.testing.assert_close(Q @ R, augmented, **close)
    torch.testing.assert_close(Q.mT @ Q, torch.eye(m, dtype=L.dtype), **close)
    torch.testing.assert_close(factors.residual, (K - L @ L.mT).diagonal(), **close)
    assert torch.equal(L[factors.index].triu(1), torch.zeros_like(L[factors.index]))
    assert torch.equal(R.tril(-1), torch.zeros_like(R))
    assert torch.equal(factors.order.sort().values, torch.arange(len(L)))


@pytest.mark.parametrize("objective", ["vfe", "pp"])
def test_costs(objective):
    problem, index, K = problem_and_index(objective, H=2, lengthscale=0.4)
    factors = CholQRFactors(problem, index)
    check_factors(factors, K, 1e-13)
    value = factors.value()
    assert value == pytest.approx(dense_objective(K, problem.targets, 0.02, index, objective), abs=1e-9)
    candidates = torch.tensor([j for j in range(120) if j not in index])
    exact = ExchangeFactors(problem, 20, index)
    gains = CandidatePool(exact, candidates).gains()
    found = torch.tensor([factors.decrease(int(j)) for j in candidates], dtype=K.dtype)
    torch.testing.assert_close(found, gains, rtol=0, atol=1e-9)
    approximate = factors.approximate_decreases(factors.partial_cholesky(candidates))
    torch.testing.assert_close(approximate[candidates], gains, rtol=0, atol=1e-9)


@pytest.mark.nightly
def test_factors_after_moves_removals_and_two_thousand_swaps():
    problem, index, K = problem_and_index(m=8, lengthscale=0.7, n=60)
    factors = CholQRFactors(problem, index)
    generator = torch.Generator().manual_seed(0)
    for step in range(2000):
        place = int(torch.randint(8, (), generator=generator))
        factors.move_to_right(place)
        if step == 0:
            check_factors(factors, K, 1e-12)
        factors.remove_last()
        if step == 0:
            check_factors(factors, K, 1e-12)
        outside = factors.order[8:]
        factors.append(int(outside[torch.randint(len(outside), (), generator=generator)]))
    check_factors(factors, K, 1e-11)
    assert factors.value() == pytest.approx(dense_objective(K, problem.targets, 0.02, factors.index), rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"pivots": "optimized"}, {"adaptive": True}, {"information_pivots": 4, "redraw": 1.0}], ids=str)
def test_search_never_raises_the_objective(options):
    problem, index, K = problem_and_index(n=80, m=10)
    budget = Budget(max_attempts=60)
    found = CholQRSearch(**options).improve(problem, 10, index, budget, torch.Generator().manual_seed(0))
    values = [value for _, _, value in budget.history]
    assert values[-1] < values[0]
    assert all(b < a for a, b in itertools.pairwise(values))
    assert values[-1] == pytest.approx(dense_objective(K, problem.targets, 0.02, found), rel=1e-9)


def test_dependent_members_make_room():
    problem, _, _ = problem_and_index(n=40)
    kernel = problem.kernel
    doubled = type(kernel)(kernel.kernel, torch.cat([kernel.inputs, kernel.inputs]))
    twice = SubsetProblem(doubled, problem.targets.repeat(2, 1), 0.02)
    found = CholQRSearch().improve(twice, 6, torch.tensor([0, 40, 1, 41, 2, 42]), Budget(max_attempts=0))
    assert len(found) == 6
    assert len((found % 40).unique()) == 6


def test_options_are_checked():
    with pytest.raises(ValueError, match='pivots must be "random" or "optimized"'):
        CholQRSearch(pivots="best")
    with pytest.raises(ValueError, match="redraw must be a probability; got 2"):
        CholQRSearch(redraw=2)


@pytest.mark.parametrize(
    "search", [RandomSearch(), TitsiasSearch(5), GreedyVarianceSearch(), InformativeVectorSearch(), KMeansSearch(), CholQRSearch()]
)
def test_baselines_return_distinct_inputs(search):
    problem, _, _ = problem_and_index(n=60)
    found = search.improve(problem, 12, None, Budget(max_attempts=2), torch.Generator().manual_seed(0))
    assert len(found.unique()) == 12


def test_titsias_with_all_candidates_is_greedy_brute_force():
    problem, _, K = problem_and_index(n=30)
    found = TitsiasSearch(30).improve(problem, 3, None, Budget())
    members: list[int] = []
    for _ in range(3):
        tried = {j: dense_objective(K, problem.targets, 0.02, torch.tensor([*members, j])) for j in range(30) if j not in members}
        members.append(min(tried, key=tried.get))
    assert found.tolist() == members


@pytest.mark.parametrize(("search", "noise"), [(GreedyVarianceSearch(), 0.0), (InformativeVectorSearch(), 0.02)])
def test_greedy_variance(search, noise):
    problem, _, K = problem_and_index(n=40)
    found = search.improve(problem, 5, None, Budget())
    for k in range(1, 5):
        known = found[:k]
        block = K[known][:, known] + noise * torch.eye(k, dtype=K.dtype)
        variance = (K - K[:, known] @ torch.linalg.solve(block, K[known])).diagonal().clone()
        variance[known] = -1
        assert int(variance.argmax()) == int(found[k])


def test_k_means_needs_numbers():
    problem = SubsetProblem(FunctionKernel(lambda x, z: float(x == z), list("abc")), torch.zeros(3, 1, dtype=torch.float64), 0.1)
    with pytest.raises(TypeError, match="k-means needs a kernel of numeric inputs"):
        KMeansSearch().improve(problem, 2, None, Budget())
