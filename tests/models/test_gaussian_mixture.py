"""Gaussian mixtures: exact EM against scikit-learn, and the guards."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pyro
import pytest
import sklearn.mixture
import torch
from pyro.infer import SVI
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.models import GaussianMixture
from pyro_truncated.states import Population
from tests.models.enumeration import assert_never_falls
from tests.models.mixture import free_energies, full_population

NUM_DATA, NUM_OBSERVED, NUM_COMPONENTS = 150, 3, 4
COVARIANCES = ("full", "diag", "spherical", "tied")


def make_data() -> Tensor:
    centers = 2 * torch.randn(NUM_COMPONENTS, NUM_OBSERVED).double()
    spread = torch.randn(NUM_COMPONENTS, NUM_OBSERVED, NUM_OBSERVED).double()
    z = torch.randint(NUM_COMPONENTS, (NUM_DATA,))
    return centers[z] + (spread[z] @ torch.randn(NUM_DATA, NUM_OBSERVED, 1).double()).squeeze(-1)


def make_model(y: Tensor, covariance: str = "full", dtype: torch.dtype = torch.float64, **options: Any) -> GaussianMixture:
    return GaussianMixture(NUM_OBSERVED, NUM_COMPONENTS, covariance=covariance, dtype=dtype, **options).initialize(y)


def covariances(model: GaussianMixture) -> Tensor:
    """In scikit-learn's shapes."""
    scale = model.scale.detach()
    return scale @ scale.mT if model.covariance in ("full", "tied") else scale.square()


def fit_sklearn(model: GaussianMixture, y: Tensor, num_iterations: int) -> sklearn.mixture.GaussianMixture:
    precisions = covariances(model).inverse() if model.covariance in ("full", "tied") else 1 / covariances(model)
    theirs = sklearn.mixture.GaussianMixture(
        NUM_COMPONENTS,
        covariance_type=model.covariance,
        reg_covar=0.0,
        tol=0.0,
        max_iter=num_iterations,
        weights_init=model.weights.detach().numpy(),
        means_init=model.loc.detach().numpy(),
        precisions_init=precisions.numpy(),
        init_params="random",
        random_state=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return theirs.fit(y.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("covariance", COVARIANCES)
def test_exact_em_is_that_of_scikit_learn(covariance: str) -> None:
    y = make_data()
    model = make_model(y, covariance, pseudo_data=0)
    # Their bound after i iterations is that of the parameters before the last M-step.
    expected = [fit_sklearn(model, y, i).lower_bound_ * NUM_DATA for i in range(1, 16)]
    last = fit_sklearn(model, y, 15)
    values = free_energies(model, y, num_iterations=15)
    assert values[:-1] == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(model.weights.detach().numpy(), last.weights_, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(model.loc.detach().numpy(), last.means_, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(covariances(model).numpy(), last.covariances_, rtol=1e-7, atol=1e-7)
    assert values[-1] == pytest.approx(last.score(y.numpy()) * NUM_DATA, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("covariance", COVARIANCES)
def test_singular_components_stay_at_the_floor(covariance: str) -> None:
    # Half of the points coincide: without a floor the likelihood has no bound.
    y = make_data()
    y[: NUM_DATA // 2] = 7.0
    model = make_model(y, covariance, pseudo_data=0)
    model.loc = torch.cat([y[:1], y[-NUM_COMPONENTS + 1 :]])
    values = free_energies(model, y, num_iterations=40)
    assert_never_falls(values)
    variance = y.var(0, correction=0)
    if covariance in ("full", "tied"):
        sizes = torch.linalg.eigvalsh(covariances(model) / torch.outer(variance, variance).sqrt())
    else:
        sizes = covariances(model) / (variance if covariance == "diag" else variance.mean())
    assert sizes.min() > 0.999e-6
    if covariance != "tied":
        assert sizes.min() < 1.001e-6


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_components_without_data_stay(covariance: str) -> None:
    y = make_data()
    model = make_model(y, covariance)
    before = {name: getattr(model, name).detach().clone() for name in ("loc", "scale")}
    population = full_population(model, y)
    log_joints = population.log_joint.clone()
    log_joints[:, 1] = -math.inf
    model.maximize(model.sufficient_statistics(Population(population.space, population.words, log_joints), y))
    assert torch.equal(model.loc[1], before["loc"][1])
    if covariance != "tied":
        torch.testing.assert_close(model.scale[1], before["scale"][1], rtol=1e-14, atol=1e-14)
    assert model.weights[1].item() == pytest.approx(1e-6, rel=1e-3)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_data_far_from_the_origin(covariance: str) -> None:
    y = make_data()
    near = make_model(y, covariance).initialize(y, torch.Generator().manual_seed(1))
    far = GaussianMixture(NUM_OBSERVED, NUM_COMPONENTS, covariance=covariance, dtype=torch.float64)
    far.initialize(y + 1e7, torch.Generator().manual_seed(1))
    expected = free_energies(near, y, num_iterations=10)
    # The data themselves are rounded to 1e-9.
    assert free_energies(far, y + 1e7, num_iterations=10) == pytest.approx(expected, rel=1e-7)


@pytest.mark.slow
def test_trains_through_svi_in_minibatches() -> None:
    y = make_data()
    expected = free_energies(make_model(y).initialize(y, torch.Generator().manual_seed(1)), y, num_iterations=5)
    pyro.clear_param_store()
    model = make_model(y).initialize(y, torch.Generator().manual_seed(1))
    svi = SVI(model, AutoTruncated(model, NUM_COMPONENTS), ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    assert [svi.step(y) for _ in range(5)] == pytest.approx([-value for value in expected[:5]], rel=1e-9)
    pyro.clear_param_store()
    model = make_model(y).initialize(y, torch.Generator().manual_seed(1))
    svi = SVI(model, AutoTruncated(model, NUM_COMPONENTS), ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    for _ in range(20):
        svi.step(y, batch_size=30)
    assert full_population(model, y).free_energy().sum().item() > expected[1]


def test_generates_and_refuses_unknown_covariances() -> None:
    for covariance in COVARIANCES:
        pyro.clear_param_store()
        model = GaussianMixture(NUM_OBSERVED, NUM_COMPONENTS, covariance=covariance)
        assert model(num_data=8).shape == (8, NUM_OBSERVED)
    with pytest.raises(ValueError, match="covariance must be one of"):
        GaussianMixture(2, 2, covariance="round")
