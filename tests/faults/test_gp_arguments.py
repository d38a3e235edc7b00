"""Bad arguments of Gaussian processes that :mod:`tests.faults.fuzz` does not try, and what good ones give."""

from __future__ import annotations

import math

import pytest
import torch

from pyro_truncated import gp, gplvm
from pyro_truncated.gp.cholesky import NotPositiveDefiniteError
from tests.faults.more_calls import data_kernel, rbf

DOUBLE = torch.float64
X = torch.linspace(-1.0, 1.0, 12, dtype=DOUBLE).reshape(6, 2)
ONES = torch.ones(6, 2, dtype=DOUBLE)
HUGE = torch.full_like(ONES, 1e308)


def spoiled(value: float) -> torch.Tensor:
    """Ones but for the first entry."""
    return torch.cat([torch.tensor([value], dtype=DOUBLE), ONES.flatten()[1:]]).view_as(ONES)


def test_restricted_kernel_takes_positions():
    for rows in (torch.ones(3, dtype=torch.bool), torch.tensor([0, 12]), torch.tensor([0, -1]), torch.zeros(0, dtype=torch.int64)):
        with pytest.raises(ValueError, match="rows must be positions"):
            gp.RestrictedKernel(data_kernel(), rows)


def test_uncertain_inputs_are_finite_and_in_range():
    given = {"loc": ONES, "variance": ONES, "probability": ONES, "prior_share": torch.ones(2, dtype=DOUBLE)}
    gp.SpikeSlabInputs(**given | {"loc": spoiled(-1.0), "variance": spoiled(1.5)})
    for name, values in {"loc": (math.inf,), "variance": (-1.0,), "probability": (-1.0, 1.5), "prior_share": (-1.0, 1.5)}.items():
        for value in (math.nan, *values):
            bad = torch.tensor([value, 1.0], dtype=DOUBLE) if name == "prior_share" else spoiled(value)
            with pytest.raises(ValueError, match=f"{name} must be"):
                gp.SpikeSlabInputs(**given | {name: bad})


def test_covariances_that_overflow_make_no_factor():
    with torch.no_grad(), pytest.raises(ValueError, match="kernel must be finite at the inputs"):
        gp.pivoted_cholesky(rbf(), HUGE, 3)


def test_linear_weights_are_finite_and_not_negative():
    for weight in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="variance must be finite and not negative"):
            gp.LinearARD(2, torch.tensor([1.0, weight]))


@pytest.mark.parametrize("of_inputs", [torch.float32, DOUBLE])
@pytest.mark.parametrize("of_weights", [torch.float32, DOUBLE])
def test_linear_kernel_takes_the_finer_of_two_types(of_inputs, of_weights):
    kernel, x = gp.LinearARD(2, torch.tensor([1.0, 4.0], dtype=of_weights)), X.to(of_inputs)
    expected = x.double() @ torch.diag(torch.tensor([1.0, 4.0], dtype=DOUBLE)) @ x.double().mT
    found = kernel(x, X.float())
    assert found.dtype == torch.promote_types(of_inputs, of_weights)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(kernel(x, diag=True).double(), expected.diagonal(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan])
@pytest.mark.parametrize("make", [lambda noise: gp.LowRankCovariance(ONES, noise), lambda noise: gp.DenseCovariance(-torch.eye(6), noise)])
def test_covariances_say_what_their_noise_is(make, noise):
    with pytest.raises(NotPositiveDefiniteError, match=f"noise, which must be positive, is from {noise:g} to {noise:g}"):
        make(torch.tensor(noise, dtype=DOUBLE))


@pytest.mark.parametrize("method", ["log_likelihood", "leave_one_out", "solve", "quadratic"])
def test_targets_have_the_rows_of_a_low_rank_factor(method):
    covariance = gp.LowRankCovariance(ONES, torch.tensor(1.0, dtype=DOUBLE))
    for targets in (ONES[:5], ONES[:, 0]):
        with pytest.raises(ValueError, match=r"targets must have shape \(6, P\), a row for each row of factor"):
            getattr(covariance, method)(targets)


@pytest.mark.parametrize("batched", [False, True])
def test_new_objects_of_a_function_kernel_are_a_sequence(batched):
    kernel = gp.FunctionKernel(lambda x, z: torch.ones(len(x), len(z)) if batched else 1.0, [1, 2, 3], batched=batched)
    for new in (torch.ones(3), torch.ones(()), 3, "abc", None):
        for call in (lambda new=new: kernel.cross(new, torch.arange(2)), lambda new=new: kernel.diag_new(new)):
            with pytest.raises(TypeError, match="new must be a Sequence"):
                call()
        with pytest.raises(TypeError, match="new must be a Sequence"):
            kernel.among(new)


def test_batched_functions_return_matrices():
    kernel = gp.FunctionKernel(lambda x, z: torch.ones(len(z), len(x)), [1, 2, 3], batched=True)
    with pytest.raises(ValueError, match=r"function must return a matrix of shape \(3, 2\); got \(2, 3\)"):
        kernel.columns(torch.arange(2))


def test_numbers_are_named_beside_an_argument_called_function():
    with pytest.raises(TypeError, match="variance must be a number"):
        gp.FunctionKernel(lambda x, z: 1.0, [1, 2, 3], variance=torch.ones(2))


def test_functions_of_two_objects_return_numbers():
    kernel = gp.FunctionKernel(lambda x, z: torch.ones(2), [1, 2, 3])
    for evaluate in (kernel.diag, lambda: kernel.columns(torch.arange(2))):
        with pytest.raises(TypeError, match="function must return a number for two objects; got Tensor"):
            evaluate()


@pytest.mark.parametrize("targets", [torch.zeros(6, 2), torch.full((6, 2), -3.0), torch.ones(6, 2, dtype=torch.bool)])
@pytest.mark.parametrize("rank", [None, 6])
def test_constant_targets_leave_a_regression_as_it_is(targets, rank):
    regression = gp.LeaveOneOutRegression(X, "rbf", rank)
    before = {name: value.clone() for name, value in regression.parameters.items()}
    reached = regression.fit(targets)
    covariance = regression.kernel(regression.inputs) + regression.noise * torch.eye(6, dtype=DOUBLE)
    exact = torch.distributions.MultivariateNormal(torch.zeros(6, dtype=DOUBLE), covariance).log_prob(targets.double().mT).mean() / 6
    # A factor of full rank misses nothing but the jitter of its pivots.
    assert reached == pytest.approx(float(exact.detach()), rel=1e-10 if rank is None else 1e-6)
    assert all(torch.equal(value, before[name]) for name, value in regression.parameters.items())
    means, variances = regression.loo(targets)
    assert bool(means.isfinite().all())
    assert bool((variances > 0).all())


@pytest.mark.parametrize("scale", [1e-200, 1e140])
def test_a_fit_is_that_of_other_units(scale):
    targets = X.sin()
    expected = gp.LeaveOneOutRegression(X, "rbf").fit(targets, 3)
    found = gp.LeaveOneOutRegression(X, "rbf").fit(scale * targets, 3)
    assert found == pytest.approx(expected - math.log(scale), rel=1e-9)


def test_numbers_whose_squares_overflow_are_refused():
    regression, model = gp.LeaveOneOutRegression(X, "rbf"), gplvm.SpikeSlabGPLVM(6, 2, 1, num_inducing=2)
    calls = {
        "targets must be": lambda: regression.fit(HUGE),
        "new_inputs must be": lambda: regression.predict(HUGE, ONES),
        "inputs must be finite": lambda: gp.LeaveOneOutRegression(HUGE, "rbf"),
        "y must be finite": lambda: gplvm.switch_log_odds(model, HUGE),
        "y, the targets, must be finite": lambda: gp.SubsetGPRegression(X, HUGE, num_inducing=2),
        r"\by\b": lambda: gp.CoregionalizedGPRegression(X, HUGE),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_a_fit_to_nothing_is_refused():
    with pytest.raises(ValueError, match="targets must not be empty at rows"):
        gp.LeaveOneOutRegression(X, "rbf").fit(X, rows=torch.arange(0))


def test_flags_are_true_or_false():
    model = gp.SubsetGPRegression(X, X[:, 0], num_inducing=2)
    calls = {
        "free_inputs": model.fit,
        "fitc": lambda fitc: gp.LeaveOneOutRegression(X, "rbf", 3, fitc=fitc),
    }
    for name, call in calls.items():
        for flag in (math.nan, 1, "x", None):
            with pytest.raises(TypeError, match=f"{name} must be True or False"):
                call(**{name: flag})


def test_new_inputs_are_real():
    with pytest.raises(ValueError, match="new inputs must be real"):
        gp.smooth_rbf(X).cross(X + 0j, torch.arange(2))


def test_precomputed_kernels_take_positions():
    kernel = gp.PrecomputedKernel(torch.eye(6), torch.arange(4))
    message = r"train and new inputs must be positions \(n,\), integers from 0 to 5"
    for train in (torch.ones(3, dtype=torch.bool), torch.arange(3) + 0j, torch.tensor([0, 9])):
        with pytest.raises(ValueError, match=message):
            gp.SubsetGPRegression(gp.PrecomputedKernel(torch.eye(6), train), torch.arange(float(len(train))), num_inducing=2)
    for new in ("x", None, [[0], [1, 2]], [torch.ones(2), 1], object(), [0.5], [9], torch.zeros(1, 1).long()):
        for method in (kernel.diag_new, kernel.among, lambda new: kernel.cross(new, torch.arange(2))):
            with pytest.raises(ValueError, match=message):
                method(new)
