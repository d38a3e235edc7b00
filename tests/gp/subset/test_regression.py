"""Sparse regression: objectives and gradients, predictions, learning, saving, and agreement with Pyro's sparse regression."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from pyro import poutine
from pyro.contrib.gp import models

from pyro_truncated.gp import (
    AllNoiseWarning,
    CountKernel,
    FunctionKernel,
    InducingSubset,
    PrecomputedKernel,
    RandomSearch,
    SubsetGPRegression,
    SumKernel,
    smooth_rbf,
    spectrum,
)
from pyro_truncated.gp.subset.alternation import sample_rows
from pyro_truncated.gp.subset.objectives import Basis, FreeBasis, SparsePosterior, backward, noise_from_log
from pyro_truncated.utils.budget import memory_budget
from tests.gp.subset.subset_reference import dense_objective, matrix, nystrom, problem_and_index, toy
from tests.papers.baselines.cholqr import CholQRSearch
from tests.papers.baselines.greedy import GreedyVarianceSearch, TitsiasSearch

LOG_2PI = math.log(2 * math.pi)


def dense_value(kernel, index, Y, log_noise, objective):
    """The objective by automatic differentiation of its definition."""
    K = kernel.columns(torch.arange(kernel.num_data))
    approximate, noise, H = nystrom(K, index), noise_from_log(log_noise), Y.shape[1]
    missing = K.diagonal() - approximate.diagonal()
    S = approximate + (torch.diag(noise + missing) if objective == "fitc" else noise * torch.eye(len(K), dtype=K.dtype))
    value = (Y * torch.linalg.solve(S, Y)).sum() + H * torch.logdet(S)
    return 0.5 * (value + (H * missing.sum() / noise if objective == "vfe" else 0.0))


@pytest.mark.parametrize("objective", ["vfe", "pp", "fitc"])
@pytest.mark.parametrize("H", [1, 2])
def test_value_and_gradient(objective, H):
    kernel, Y = toy(60, H)
    index = torch.arange(0, 60, 5)
    log_noise = torch.tensor(-3.0, dtype=torch.float64, requires_grad=True)
    leaves = [*kernel.parameters(), log_noise]
    value = dense_value(kernel, index, Y, log_noise, objective)
    expected = torch.autograd.grad(value, leaves)
    assert backward(Basis(kernel, index), Y, log_noise, objective) == pytest.approx(float(value.detach()), rel=1e-11)
    for leaf, slope in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, slope, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("objective", ["vfe", "pp", "fitc"])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_frozen_kernels_leave_the_slope_of_the_noise(objective, in_blocks):
    kernel, Y = toy(60)
    for parameter in kernel.parameters():
        parameter.requires_grad_(False)
    index, log_noise = torch.arange(0, 60, 5), torch.tensor(-3.0, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(dense_value(kernel, index, Y, log_noise, objective), log_noise)[0]
    with memory_budget(16 * 12 * 25 if in_blocks else None):
        backward(Basis(kernel, index), Y, log_noise, objective)
    torch.testing.assert_close(log_noise.grad, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("objective", ["vfe", "pp"])
def test_gradient_in_blocks_and_in_inducing_inputs(objective):
    kernel, Y = toy(60)
    Z = kernel.inputs[:7].clone().requires_grad_()
    log_noise = torch.tensor(-3.0, dtype=torch.float64, requires_grad=True)
    leaves = [*kernel.parameters(), log_noise, Z]

    def slopes():
        for leaf in leaves:
            leaf.grad = None
        backward(FreeBasis(kernel, Z), Y, log_noise, objective)
        return [leaf.grad.clone() for leaf in leaves]

    whole = slopes()
    step = 1e-6
    for place in ((0, 0), (6, 2)):
        ends = []
        for sign in (1, -1):
            moved = Z.detach().clone()
            moved[place] += sign * step
            ends.append(backward(FreeBasis(kernel, moved), Y, log_noise, objective))
        assert whole[-1][place] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5)
    with memory_budget(16 * 7 * 13):
        in_blocks = slopes()
    for one, many in zip(whole, in_blocks, strict=True):
        torch.testing.assert_close(one, many, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("objective", ["vfe", "pp", "fitc"])
def test_dependent_inducing_inputs_change_nothing(objective):
    kernel, Y = toy(40)
    doubled = type(kernel)(kernel.kernel, torch.cat([kernel.inputs, kernel.inputs[:3]]))
    Y = torch.cat([Y, Y[:3]])
    log_noise = torch.tensor(-3.0, dtype=torch.float64, requires_grad=True)
    found = []
    for index in (torch.tensor([0, 1, 2, 9]), torch.tensor([0, 40, 1, 41, 2, 42, 9])):
        log_noise.grad = None
        doubled.zero_grad()
        value = backward(Basis(doubled, index), Y, log_noise, objective)
        found.append(torch.stack([torch.tensor(value), log_noise.grad, *(p.grad for p in doubled.parameters())]))
        torch.testing.assert_close(
            SparsePosterior(Basis(doubled, index), Y, 0.1).marginals(kernel.inputs[:5])[0],
            SparsePosterior(Basis(doubled, torch.tensor([0, 1, 2, 9])), Y, 0.1).marginals(kernel.inputs[:5])[0],
        )
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-8)


def test_predictions():
    problem, index, K = problem_and_index(H=2)
    posterior = SparsePosterior(Basis(problem.kernel, index), problem.targets, 0.02)
    new = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    cross, square = problem.kernel.cross(new, index).detach(), K[index][:, index]
    Sigma = K[index] @ K[:, index] + 0.02 * square
    mean = cross @ torch.linalg.solve(Sigma, K[index] @ problem.targets)
    variance = (
        1.2 - (cross * torch.linalg.solve(square, cross.mT).mT).sum(1) + 0.02 * (cross * torch.linalg.solve(Sigma, cross.mT).mT).sum(1)
    )
    found = posterior.marginals(new)
    torch.testing.assert_close(found[0], mean, rtol=0, atol=1e-10)
    torch.testing.assert_close(found[1], variance, rtol=0, atol=1e-10)


@pytest.mark.parametrize("fitc", [False, True])
def test_leave_one_out_is_what_leaving_out_gives(fitc):
    problem, index, K = problem_and_index(H=2, n=40, m=8)
    C = nystrom(K, index) + 0.02 * torch.eye(40, dtype=K.dtype)
    if fitc:
        C = C + torch.diag((K - nystrom(K, index)).diagonal())
    mean, variance = SparsePosterior(Basis(problem.kernel, index), problem.targets, 0.02, "fitc" if fitc else "vfe").leave_one_out()
    for i in (0, 17, int(index[0])):
        rest = torch.arange(40) != i
        weights = torch.linalg.solve(C[rest][:, rest], C[rest, i])
        torch.testing.assert_close(mean[i], weights @ problem.targets[rest], rtol=0, atol=1e-9)
        torch.testing.assert_close(variance[i], C[i, i] - weights @ C[rest, i], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("objective", "approx"), [("vfe", "VFE"), ("fitc", "FITC"), ("pp", "DTC")])
def test_equals_the_sparse_regression_of_pyro(objective, approx):
    kernel, Y = toy(80)
    index = torch.arange(0, 80, 8)
    theirs = models.SparseGPRegression(
        kernel.inputs,
        Y[:, 0],
        kernel.kernel,
        kernel.inputs[index],
        noise=torch.tensor(0.05, dtype=torch.float64),
        approx=approx,
        jitter=1e-10,
    )
    log_density = poutine.trace(theirs.model).get_trace().log_prob_sum()
    ours = backward(Basis(kernel, index), Y, torch.tensor(0.05 - 1e-6, dtype=torch.float64).log().requires_grad_(), objective)
    assert -float(log_density.detach()) == pytest.approx(ours + 40 * LOG_2PI, rel=1e-6)
    new = torch.randn(9, 3, dtype=torch.float64)
    # The projected process as published keeps all of the prior variance, as the free energy does; ours calibrates it (below).
    mean, variance = SparsePosterior(Basis(kernel, index), Y, 0.05, "fitc" if objective == "fitc" else "vfe").marginals(new)
    with torch.no_grad():
        their_mean, their_variance = theirs(new)
    torch.testing.assert_close(mean[:, 0], their_mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(variance, their_variance, rtol=0, atol=1e-6)


def test_all_inputs_give_the_exact_process():
    kernel, Y = toy(30, lengthscale=0.6)
    K = matrix(kernel)
    subset = InducingSubset(kernel, Y[:, 0], num_inducing=30, noise=0.05)
    mean, _ = subset.predict(kernel.inputs)
    torch.testing.assert_close(mean, K @ torch.linalg.solve(K + 0.05 * torch.eye(30, dtype=K.dtype), Y), rtol=0, atol=1e-8)


class TestInducingSubset:
    def test_never_rises_and_is_what_it_says(self):
        kernel, Y = toy(100)
        subset = InducingSubset(kernel, Y, num_inducing=10, noise=0.02, generator=torch.Generator().manual_seed(0))
        values = [subset.objective_value] + [subset.optimize(max_attempts=5) for _ in range(4)]
        assert all(b <= a for a, b in itertools.pairwise(values))
        assert values[-1] < values[0]
        assert values[-1] == pytest.approx(dense_objective(matrix(kernel), Y, 0.02, subset.index), rel=1e-9)
        assert subset.history[0][1] == 0

    @pytest.mark.parametrize(
        "algorithm", [CholQRSearch(), RandomSearch(), TitsiasSearch(4), GreedyVarianceSearch()], ids=lambda a: str(a)[:12]
    )
    def test_algorithms(self, algorithm):
        kernel, Y = toy(60)
        subset = InducingSubset(kernel, Y, num_inducing=6, noise=0.02, algorithm=algorithm)
        before = subset.objective_value
        assert subset.optimize(max_attempts=10) <= before
        assert len(subset.index.unique()) == 6

    def test_new_targets_and_hyper_parameters(self):
        kernel, Y = toy(60)
        subset = InducingSubset(kernel, Y, num_inducing=6, noise=0.02)
        kernel.kernel.lengthscale = torch.tensor(0.5, dtype=torch.float64)
        value = subset.update(noise=0.1, targets=Y.flip(0))
        assert value == pytest.approx(dense_objective(matrix(kernel), Y.flip(0), 0.1, subset.index), rel=1e-9)

    def test_bad_input(self):
        kernel, Y = toy(20)
        with pytest.raises(ValueError, match=r"num_inducing must lie in 1 \.\. 20, the number of inputs; got 21"):
            InducingSubset(kernel, Y, num_inducing=21, noise=0.1)
        with pytest.raises(ValueError, match='algorithm must be "exchange" or a SubsetSearch'):
            InducingSubset(kernel, Y, num_inducing=2, noise=0.1, algorithm="greedy")
        with pytest.raises(TypeError, match="algorithm must be a name or a SubsetSearch"):
            InducingSubset(kernel, Y, num_inducing=2, noise=0.1, algorithm=3)
        with pytest.raises(ValueError, match="index must not hold a position twice"):
            InducingSubset(kernel, Y, num_inducing=2, noise=0.1, index=torch.tensor([1, 1]))
        with pytest.raises(ValueError, match=r"index must be positions \(n,\), integers from 0 to 19"):
            InducingSubset(kernel, Y, num_inducing=2, noise=0.1, index=torch.tensor([1, 20]))


def test_sample_of_rows():
    kernel, Y = toy(30)
    index = torch.tensor([4, 29, 0])
    sample = sample_rows(kernel, Y, index, 12, torch.Generator().manual_seed(0))
    assert len(sample.rows.unique()) == 12
    assert torch.equal(sample.among_all(sample.inducing), index)
    torch.testing.assert_close(sample.kernel.columns(sample.inducing), matrix(kernel)[sample.rows][:, index])
    assert torch.equal(sample.targets, Y[sample.rows])
    assert sample_rows(kernel, Y, index, 30).rows is None


def regression_data(n: int = 200):
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    y = 5 + 2 * torch.sin(2 * X[:, 0]) + 0.2 * torch.randn(n, generator=generator, dtype=torch.float64)
    return X, y


class TestRegression:
    @pytest.mark.slow
    def test_learns_and_predicts(self):
        X, y = regression_data()
        model = SubsetGPRegression(smooth_rbf(X[:150]), y[:150], num_inducing=15, generator=torch.Generator().manual_seed(0))
        value = model.fit(max_epochs=12)
        mean, variance = model.predict(X[150:])
        assert ((mean - y[150:]).square().mean() / y[150:].var()) < 0.05
        assert mean.shape == variance.shape == (50,)
        # The standard deviation of the noise is 0.2: of 50 standardised errors the mean square lies in here but for 1 of 1e5 data sets.
        assert 0.4 < ((mean - y[150:]).square() / variance).mean() < 2.2
        best = math.inf
        for _, phase, objective in model.history:
            if phase != "subset":
                best = min(best, objective)
        assert value == best == model.objective_value
        noiseless = model.predict(X[150:], noiseless=True)[1]
        torch.testing.assert_close(variance - noiseless, torch.full_like(variance, model.noise * float(y[:150].var())))
        loo = model.leave_one_out()[0]
        assert ((loo - y[:150]).square().mean() / y[:150].var()) < 0.05

    @pytest.mark.slow
    def test_both_phases_lower_the_objective(self):
        X, y = regression_data()
        model = SubsetGPRegression(smooth_rbf(X), y, num_inducing=10, generator=torch.Generator().manual_seed(0))
        model.fit(max_epochs=6)
        values = [objective for _, _, objective in model.history]
        assert all(b <= a + 1e-6 for a, b in itertools.pairwise(values))

    @pytest.mark.slow
    @pytest.mark.parametrize("objective", ["vfe", "fitc"])
    def test_some_rows_at_a_time_never_raise_the_objective_of_all(self, objective):
        X, y = regression_data(400)
        model = SubsetGPRegression(smooth_rbf(X), y, num_inducing=10, objective=objective, generator=torch.Generator().manual_seed(0))
        value = model.fit(max_epochs=8, max_rows=60)
        log_noise = model.log_noise.detach().requires_grad_()
        assert value == pytest.approx(backward(Basis(model.kernel, model.subset), model.targets, log_noise, objective), rel=1e-9)
        assert value == min(objective for _, _, objective in model.history)
        # 60 of 400 data points tell most of what all of them do: the noise is 1 % of the variance.
        assert ((model.predict(X)[0] - y).square().mean() / y.var()) < 0.05
        assert len(model.subset.unique()) == 10

    @pytest.mark.slow
    def test_some_rows_become_all(self):
        X, y = regression_data(100)
        model = SubsetGPRegression(smooth_rbf(X), y, num_inducing=10, generator=torch.Generator().manual_seed(0))
        model.fit(max_epochs=40, max_rows=20)
        # Phases "subset" are recorded where all rows take part.
        assert "subset" in {phase for _, phase, _ in model.history}

    @pytest.mark.slow
    @pytest.mark.parametrize("objective", ["pp", "fitc"])
    def test_other_objectives(self, objective):
        X, y = regression_data(100)
        model = SubsetGPRegression(smooth_rbf(X), y, num_inducing=10, objective=objective)
        model.fit(max_epochs=4)
        assert ((model.predict(X)[0] - y).square().mean() / y.var()) < 0.1

    @pytest.mark.slow
    def test_several_outputs(self):
        X, y = regression_data(100)
        model = SubsetGPRegression(smooth_rbf(X), torch.stack([y, 3 * y - 7], 1), num_inducing=10)
        model.fit(max_epochs=4)
        mean, variance = model.predict(X[:6])
        torch.testing.assert_close(mean[:, 1], 3 * mean[:, 0] - 7)
        torch.testing.assert_close(variance[:, 1], 9 * variance[:, 0])

    @pytest.mark.slow
    def test_free_inputs_go_on_from_the_subset(self):
        X, y = regression_data(120)
        model = SubsetGPRegression(smooth_rbf(X), y, num_inducing=5, generator=torch.Generator().manual_seed(0))
        subset_value = model.fit(max_epochs=6)
        model.fit(free_inputs=True, max_epochs=1, free_input_evaluations=40)
        assert model.objective_value < subset_value - 1
        assert model.inducing_inputs is not None
        assert not torch.equal(model.inducing_inputs, X[model.subset])
        assert model.history[-1][1] == "free"

    @pytest.mark.slow
    def test_saved_and_loaded(self, tmp_path):
        X, y = regression_data(80)
        for free_inputs in (False, True):
            model = SubsetGPRegression(smooth_rbf(X), y, num_inducing=6)
            model.fit(max_epochs=2, free_inputs=free_inputs, free_input_evaluations=5)
            model.save(tmp_path / "model.pt")
            again = SubsetGPRegression(smooth_rbf(X), y, num_inducing=6).load(tmp_path / "model.pt")
            for one, other in zip(model.predict(X[:7]), again.predict(X[:7]), strict=True):
                assert torch.equal(one, other)
            assert again.objective_value == model.objective_value
            assert torch.equal(again.subset, model.subset)

    def test_strings(self):
        words = ["ab" * k + "c" * j for k in range(1, 8) for j in range(6)]
        y = torch.tensor([float(word.count("c")) for word in words])
        features = spectrum(words, 2, shorter=True)
        train, test = torch.arange(0, 42, 2), torch.arange(1, 42, 2)
        model = SubsetGPRegression(CountKernel(features[train], "inner"), y[train], num_inducing=12, noise=0.1)
        model.fit(max_epochs=6)
        mean, _ = model.predict(features[test])
        assert ((mean - y[test]).square().mean() / y[test].var()) < 0.2
        with pytest.raises(TypeError, match="free_inputs=True needs a kernel of numeric inputs"):
            model.fit(free_inputs=True)

    @pytest.mark.slow
    def test_irrelevant_kernels_of_a_sum_fade(self):
        generator = torch.Generator().manual_seed(0)
        X, y = regression_data(120)
        good = torch.exp(-0.5 * torch.cdist(X, X).square())
        junk = torch.randn(120, 4, generator=generator, dtype=torch.float64)
        bad = torch.exp(-0.5 * torch.cdist(junk, junk).square())
        kernel = SumKernel([PrecomputedKernel(good), PrecomputedKernel(bad)], redundant_sum=True, identity=True)
        SubsetGPRegression(kernel, y, num_inducing=25).fit(max_epochs=15)
        assert kernel.relevance[0] > 5 * kernel.relevance[1]

    @pytest.mark.slow
    def test_all_noise_warns(self):
        generator = torch.Generator().manual_seed(0)
        y = torch.randn(80, generator=generator, dtype=torch.float64)
        kernel = FunctionKernel(lambda x, z: float(x == z), list(range(80)))
        model = SubsetGPRegression(kernel, y, num_inducing=4)
        with pytest.warns(AllNoiseWarning, match="as noise"):
            model.fit(max_epochs=3)
        X, y = regression_data(80)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            SubsetGPRegression(smooth_rbf(X), y, num_inducing=10).fit(max_epochs=2)

    @pytest.mark.slow
    def test_all_noise_warns_where_the_prior_variance_is_carried_but_nothing_explained(self):
        """Noise for targets, and a kernel that has become a constant: the inducing inputs carry all of its variance."""
        generator = torch.Generator().manual_seed(0)
        X, y = torch.randn(300, 2, generator=generator, dtype=torch.float64), torch.randn(300, generator=generator, dtype=torch.float64)
        model = SubsetGPRegression(smooth_rbf(X), y, num_inducing=8)
        with pytest.warns(AllNoiseWarning, match="as noise"):
            model.fit(max_epochs=20)

    @pytest.mark.slow
    @pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
    def test_inputs_of_any_unit_start_alike(self, unit):
        X, y = regression_data(80)
        values = [
            SubsetGPRegression(smooth_rbf(x), y, num_inducing=10, generator=torch.Generator().manual_seed(0)).fit(max_epochs=2)
            for x in (X, unit * X)
        ]
        assert values[1] == pytest.approx(values[0], rel=1e-6)

    def test_time_limit(self):
        X, y = regression_data(80)
        ticks = itertools.count()
        model = SubsetGPRegression(smooth_rbf(X), y, num_inducing=6)
        model.fit(max_seconds=40, clock=lambda: float(next(ticks)))
        assert model.history[-1][0] < 60

    def test_single_precision_inputs(self):
        X, y = regression_data(80)
        model = SubsetGPRegression(smooth_rbf(X.float()), y.float(), num_inducing=8)
        model.fit(max_epochs=3)
        assert ((model.predict(X.float())[0] - y).square().mean() / y.var()) < 0.2

    def test_bad_input(self):
        X, y = regression_data(20)
        kernel = smooth_rbf(X)
        cases = [
            ({"y": y[:5]}, r"targets, must be finite and of shape \(20,\) or \(20, H\)"),
            ({"y": torch.full((20,), math.nan)}, "targets, must be finite"),
            ({"noise": -1.0}, "noise must be a variance above"),
            ({"objective": "elbo"}, "objective must be one of"),
        ]
        for changed, message in cases:
            with pytest.raises(ValueError, match=message):
                SubsetGPRegression(**({"X": kernel, "y": y, "num_inducing": 5} | changed))
        with pytest.raises(ValueError, match="max_rows must be at least num_inducing=5"):
            SubsetGPRegression(kernel, y, num_inducing=5).fit(max_rows=4)
        with pytest.raises(RuntimeError, match="call fit"):
            SubsetGPRegression(kernel, y, num_inducing=5).predict(X)
