"""SpikeSlabRegressor against integrals and enumeration, SubsetGPRegressor against the library and scikit-learn."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from pyro.contrib.gp.kernels import Matern52
from scipy import linalg, stats
from sklearn.datasets import load_diabetes
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel

from pyro_truncated.gp import LeaveOneOutRegression, SubsetGPRegression, smooth_rbf
from pyro_truncated.gplvm import SASDecoder
from pyro_truncated.sklearn import SparseCoding, SpikeSlabGPLVMTransformer, SpikeSlabRegressor, SubsetGPRegressor
from pyro_truncated.sklearn.variable_selection import LinearModels


def problem(n: int = 30, p: int = 4) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    X = generator.normal(size=(n, p)) * np.arange(1, p + 1) + 3
    return X, 2.0 * X[:, 1] - X[:, 2] + generator.normal(size=n) + 7


def standardised(X: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor((X - X.mean(0)) / X.std(0)), torch.tensor(y - y.mean())


@pytest.mark.slow
@pytest.mark.parametrize("is_zellner", [True, False])
def test_evidence_is_the_integral_over_coefficients_intercept_and_noise(is_zellner):
    """The flat intercept leaves the density of contrasts of the targets; given the noise they are Gaussian."""
    X, y = standardised(*problem(8, 3))
    n, g = len(y), 5.0
    models = LinearModels(X, y, g, is_zellner, 1.0)
    contrasts = linalg.null_space(np.ones((1, n))).T
    for s in itertools.product([0, 1], repeat=3):
        chosen = X[:, [bool(on) for on in s]].numpy()
        k = chosen.shape[1]
        prior = g * np.linalg.inv(chosen.T @ chosen) if is_zellner else g / n * np.eye(k)
        shape = contrasts @ (np.eye(n) + (chosen @ prior @ chosen.T if k else 0.0)) @ contrasts.T
        log_sigma = np.linspace(-4, 7, 4001)
        # The density of contrasts whose deviations are a multiple is that of the contrasts in this unit.
        normal = stats.multivariate_normal(np.zeros(n - 1), shape)
        logs = normal.logpdf(np.exp(-log_sigma)[:, None] * (contrasts @ y.numpy())) - (n - 1) * log_sigma - np.log(n) / 2
        # A prior 1 / variance of the variance is 2 for the logarithm of the deviation.
        integral = np.log(2 * np.trapezoid(np.exp(logs), log_sigma))
        assert float(models.log_evidence(torch.tensor([s]))[0]) == pytest.approx(integral, abs=1e-6)


def test_sizes_have_a_beta_binomial_prior():
    X, y = standardised(*problem(10, 5))
    states = torch.tensor(list(itertools.product([0, 1], repeat=5)))
    for size in (0.7, 2.5):
        prior = LinearModels(X, y, 10.0, True, size).log_prior(states).exp()
        by_size = [float(prior[states.sum(1) == k].sum()) for k in range(6)]
        np.testing.assert_allclose(by_size, stats.betabinom(5, 1, (5 - size) / size).pmf(range(6)), rtol=1e-10)
        assert float((prior * states.sum(1)).sum()) == pytest.approx(size)


@pytest.mark.parametrize("prior", ["zellner", "independent"])
def test_averages_are_those_over_all_models(prior):
    X, y = problem()
    regressor = SpikeSlabRegressor(prior=prior, g=20.0, expected_model_size=1.5).fit(X, y)
    rows, targets = standardised(X, y)
    states = torch.tensor(list(itertools.product([0, 1], repeat=4)))
    models = LinearModels(rows, targets, 20.0, prior == "zellner", 1.5)
    log_joint = models.log_joint(states)
    weights = log_joint.softmax(0).numpy()
    np.testing.assert_allclose(regressor.inclusion_probabilities_, weights @ states.double().numpy(), atol=1e-9)
    assert regressor.log_evidence_ == pytest.approx(float(log_joint.logsumexp(0)))
    new = X[:3] + 0.5
    means, variances = np.zeros((2, 16, 3))
    for c, s in enumerate(states.bool().numpy()):
        # Student's t of Bayesian linear regression with a normal-inverse-gamma prior, and a constant with a wide one.
        k, n = s.sum(), len(y)
        chosen, at = rows.numpy()[:, s], ((new - X.mean(0)) / X.std(0))[:, s]
        gram = chosen.T @ chosen
        precision = gram * (1 + 1 / 20.0) if prior == "zellner" else gram + n / 20.0 * np.eye(k)
        coefficients = np.linalg.solve(precision, chosen.T @ targets.numpy())
        rest = targets.numpy() @ targets.numpy() - coefficients @ chosen.T @ targets.numpy()
        means[c] = at @ coefficients + y.mean()
        variances[c] = rest / (n - 3) * (1 + 1 / n + np.einsum("ik,ki->i", at, np.linalg.solve(precision, at.T)))
    mean, deviation = regressor.predict(new, return_std=True)
    np.testing.assert_allclose(mean, weights @ means, rtol=1e-8)
    np.testing.assert_allclose(deviation**2, weights @ (variances + (means - weights @ means) ** 2), rtol=1e-7)


@pytest.mark.slow
def test_relevant_predictors_are_found_among_many():
    generator = np.random.default_rng(1)
    X = generator.normal(size=(80, 120))
    y = X[:, [5, 50, 100]] @ np.array([2.0, -1.5, 1.0]) + generator.normal(size=80)
    regressor = SpikeSlabRegressor(random_state=0, expected_model_size=3).fit(X, y)
    assert set(np.flatnonzero(regressor.inclusion_probabilities_ > 0.5)) == {5, 50, 100}
    assert regressor.models_[0].nonzero()[0].tolist() == [5, 50, 100]


def test_predictors_that_repeat_each_other_share_their_probability():
    X, y = problem()
    regressor = SpikeSlabRegressor().fit(np.column_stack([X, X[:, 1]]), y)
    assert regressor.inclusion_probabilities_[1] == pytest.approx(regressor.inclusion_probabilities_[4], rel=1e-4)
    assert np.isfinite(regressor.coef_).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior": "lasso"}, "prior must be one of .*'lasso'"),
        ({"g": -1.0}, "g must be a positive number; got -1.0"),
        ({"expected_model_size": 4}, "expected_model_size must lie between 0 and the number of predictors, 4; got 4"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        SpikeSlabRegressor(**options).fit(*problem())


@pytest.mark.parametrize(
    "estimator",
    [SpikeSlabRegressor(g="a"), SpikeSlabRegressor(expected_model_size="a"), SparseCoding(2, ridge="a"), SparseCoding(2, binarize="a")],
)
def test_parameters_that_are_no_numbers_are_refused_by_name(estimator):
    with pytest.raises(TypeError, match=r"(g|expected_model_size|ridge|binarize) must be a number or None; got 'a'"):
        estimator.fit(*problem())


@pytest.mark.slow
def test_predictions_are_those_of_the_librarys_regression():
    X, y = load_diabetes(return_X_y=True)
    ours = SubsetGPRegressor(n_inducing=15, max_epochs=3, random_state=0).fit(X[:150], y[:150])
    torch.manual_seed(np.random.RandomState(0).randint(np.iinfo(np.int32).max))
    theirs = SubsetGPRegression(smooth_rbf(torch.tensor(X[:150])), torch.tensor(y[:150]), num_inducing=15)
    theirs.fit(max_epochs=3)
    mean, variance = theirs.predict(torch.tensor(X[150:]))
    for found, expected in zip(ours.predict(X[150:], return_std=True), (mean, variance.sqrt()), strict=True):
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-9)
    assert len(ours.inducing_) == 15


def test_exact_regression_is_that_of_scikit_learn():
    X, y = load_diabetes(return_X_y=True)
    X, y = X[:120, :3], y[:120]
    ours = SubsetGPRegressor().fit(X, y)
    kernel = ours.regression_.kernel.kernel
    fixed = ConstantKernel(kernel.variance.item(), "fixed") * RBF(kernel.lengthscale.detach().numpy(), "fixed")
    fixed = fixed + WhiteKernel(ours.regression_.noise, "fixed")
    z = (y - y.mean()) / y.std(ddof=1)
    theirs = GaussianProcessRegressor(fixed, alpha=0.0).fit(X, z)
    mean, deviation = theirs.predict(X[:20] + 0.01, return_std=True)
    ours_mean, ours_deviation = ours.predict(X[:20] + 0.01, return_std=True)
    np.testing.assert_allclose(ours_mean, mean * y.std(ddof=1) + y.mean(), rtol=1e-6)
    np.testing.assert_allclose(ours_deviation, deviation * y.std(ddof=1), rtol=1e-5)
    np.testing.assert_allclose(-ours.objective_value_, theirs.log_marginal_likelihood_value_, rtol=1e-6)


def test_kernels_of_ones_own_and_unknown_ones():
    X, y = load_diabetes(return_X_y=True)
    regressor = SubsetGPRegressor(smooth_rbf, n_inducing=1000, max_epochs=2).fit(X[:40], y[:40])
    assert len(regressor.inducing_) == 40
    with pytest.raises(ValueError, match=r"kernel must be .*; got 'matern'"):
        SubsetGPRegressor("matern").fit(X[:40], y[:40])
    with pytest.raises(TypeError, match=r"kernel must be a DataKernel .*; got Tensor"):
        SubsetGPRegressor(lambda inputs: inputs @ inputs.mT).fit(X[:40], y[:40])


@pytest.mark.parametrize(
    ("kernel", "instead"),
    [
        (RBF(), r"RBF of scikit-learn: take pyro\.contrib\.gp\.kernels\.RBF, whose"),
        (RBF, r"RBF of scikit-learn: take pyro\.contrib\.gp\.kernels\.RBF, whose"),
        (Matern(nu=1.5), r"Matern of scikit-learn: take pyro\.contrib\.gp\.kernels\.Matern32"),
        (RBF() + WhiteKernel(), r"Sum of scikit-learn: take pyro\.contrib\.gp\.kernels\.Sum"),
        (WhiteKernel(), "WhiteKernel of scikit-learn: leave it out, as the noise is learned"),
        (Matern52, r"kernel must be made first: Matern52\(input_dim=...\); got the class"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda kernel, X: SubsetGPRegressor(kernel).fit(X, X[:, 0]),
        lambda kernel, X: SubsetGPRegression(X, X[:, 0], kernel),
        lambda kernel, X: LeaveOneOutRegression(X, kernel),
        lambda kernel, X: SpikeSlabGPLVMTransformer(2, kernel=kernel).fit(X),
        lambda kernel, X: SASDecoder(*X.shape, kernel=kernel),
    ],
)
def test_kernels_of_scikit_learn_say_what_to_take(use, kernel, instead):
    with pytest.raises(TypeError, match=instead):
        use(kernel, np.random.default_rng(0).normal(size=(12, 2)))


def test_kernels_of_more_columns_than_there_are_are_refused_and_integers_are_numbers():
    X = np.random.default_rng(0).integers(0, 9, size=(12, 2))
    message = "kernel must be of inputs with 2 columns; it reads column 2"
    for use in (lambda: SubsetGPRegression(X, X[:, 0], Matern52(3)), lambda: SpikeSlabGPLVMTransformer(2, kernel=Matern52(3)).fit(X)):
        with pytest.raises(ValueError, match=message):
            use()
    torch.testing.assert_close(*(SubsetGPRegression(x, X[:, 0], Matern52(2)).predict(X)[0] for x in (X, X.astype(float))))


def test_kernels_of_pyro_are_trained_as_copies():
    X, y = load_diabetes(return_X_y=True)
    kernel = Matern52(10, lengthscale=torch.tensor(0.1))
    regressor = SubsetGPRegressor(kernel, random_state=0).fit(X[:60], y[:60])
    assert kernel.lengthscale.item() == pytest.approx(0.1)
    assert regressor.regression_.kernel.kernel.lengthscale.item() != pytest.approx(0.1)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -1e9])
def test_constant_targets_are_predicted_without_an_alarm(value):
    X = np.random.default_rng(0).normal(size=(50, 2))
    with warnings.catch_warnings(action="error"):
        mean, deviation = SubsetGPRegressor(random_state=0).fit(X, np.full(50, value)).predict(X + 1, return_std=True)
    np.testing.assert_allclose(mean, value, rtol=1e-9)
    assert bool((deviation < 0.1).all())


@pytest.mark.parametrize("options", [{}, {"n_inducing": 15}, {"n_inducing": 15, "objective": "pp", "free_inputs": True}])
def test_targets_that_do_not_vary_have_no_part_in_learning(options):
    """Beside 25 of them the noise was a 26th, and intervals of 95 % held 30 % of new targets."""
    generator = np.random.default_rng(0)
    X = generator.uniform(-3, 3, (90, 2))
    y = np.sin(X[:, 0]) + 0.1 * generator.normal(size=90)
    alone = SubsetGPRegressor(random_state=0, **options).fit(X[:60], y[:60, None])
    beside = SubsetGPRegressor(random_state=0, **options).fit(X[:60], np.c_[np.full((60, 25), 7.0), y[:60]])
    assert beside.regression_.noise == pytest.approx(alone.regression_.noise, rel=0.1)
    assert beside.objective_value_ == pytest.approx(alone.objective_value_, abs=1.0)
    deviations = [estimator.predict(X[60:], return_std=True)[1][:, -1] for estimator in (beside, alone)]
    assert np.median(deviations[0]) == pytest.approx(np.median(deviations[1]), rel=0.05)
    np.testing.assert_allclose(beside.predict(X[60:])[:, :25], 7.0, rtol=1e-12)
