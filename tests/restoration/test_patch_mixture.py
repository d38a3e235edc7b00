"""Mixtures of patches against dense formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal

from pyro_truncated.restoration import PatchMixture
from pyro_truncated.restoration.patch_mixture import Responsibilities, cosines, k_means

NUM_DATA, NUM_OBSERVED, NUM_COMPONENTS, SCALE = 60, 5, 3, 0.7


def draw() -> tuple[torch.Tensor, torch.Tensor, Responsibilities]:
    generator = torch.Generator().manual_seed(0)
    patches = (
        torch.randn(NUM_DATA, NUM_OBSERVED, generator=generator, dtype=torch.float64) @ torch.randn(5, 5, generator=generator).double()
    )
    places = torch.randint(20, (NUM_DATA, 2), generator=generator).double()
    components = torch.rand(NUM_DATA, NUM_COMPONENTS, generator=generator).argsort(1)[:, :2]
    return patches, places, Responsibilities(components, torch.rand(NUM_DATA, 2, generator=generator).double().softmax(1))


def mixture() -> PatchMixture:
    patches, places, responsibilities = draw()
    return PatchMixture.of(patches, places, responsibilities, NUM_COMPONENTS, SCALE)


def covariance(model: PatchMixture, k: int) -> torch.Tensor:
    return model.directions[k] * model.variances[k] @ model.directions[k].mT


def noisy() -> tuple[torch.Tensor, torch.Tensor]:
    patches, places, _ = draw()
    return patches + SCALE * torch.randn(patches.shape, generator=torch.Generator().manual_seed(1)).double(), places


def dense_log_joint(model: PatchMixture, y: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    identity = torch.eye(NUM_OBSERVED, dtype=torch.float64)
    terms = [
        model.weights[k].log()
        + MultivariateNormal(model.loc[k], covariance(model, k) + SCALE**2 * identity).log_prob(y)
        + 0.5 * Normal(model.places[k], model.spreads[k].sqrt()).log_prob(places).sum(1)
        for k in range(NUM_COMPONENTS)
    ]
    return torch.stack(terms, 1)


def test_parameters_are_weighted_moments() -> None:
    patches, places, responsibilities = draw()
    model = mixture()
    shares = torch.zeros(NUM_DATA, NUM_COMPONENTS, dtype=torch.float64).scatter(1, responsibilities.components, responsibilities.weights)
    torch.testing.assert_close(model.weights, shares.mean(0))
    for k, share in enumerate((shares / shares.sum(0)).unbind(1)):
        torch.testing.assert_close(model.loc[k], share @ patches)
        torch.testing.assert_close(model.places[k], share @ places)
        torch.testing.assert_close(model.spreads[k], share @ (places - model.places[k]).square().mean(1) + 4.0)
        centred = patches - model.loc[k]
        values, basis = torch.linalg.eigh((centred * share.unsqueeze(1)).mT @ centred)
        values = torch.where(values > 0.05 * SCALE**2, values, 0.0)
        torch.testing.assert_close(covariance(model, k), basis * values @ basis.mT)


def test_responsibilities_are_those_of_dense_covariances() -> None:
    model, (y, places) = mixture(), noisy()
    exact = dense_log_joint(model, y, places)
    found = model.responsibilities(y, places, NUM_COMPONENTS)
    torch.testing.assert_close(found.weights, exact.softmax(1).gather(1, found.components))
    assert bool((found.weights.diff(dim=1) <= 0).all())
    two = model.responsibilities(y, places, 2)
    torch.testing.assert_close(two.weights, exact.gather(1, two.components).softmax(1))
    torch.testing.assert_close(found.most_probable(2).weights, two.weights)
    among = model.among(y, places, Responsibilities(two.components.flip(1), two.weights))
    assert torch.equal(among.components, two.components)
    torch.testing.assert_close(among.weights, two.weights)


@pytest.mark.parametrize("share_missing", [0.0, 0.4])
def test_posterior_means_are_conditional_expectations_of_what_is_observed(share_missing: float) -> None:
    model, (y, places) = mixture(), noisy()
    posterior = model.responsibilities(y, places, 2)
    y = torch.where(torch.rand(y.shape, generator=torch.Generator().manual_seed(2)) < share_missing, math.nan, y)
    means, errors, seen_errors = model.posterior_means(y, posterior)
    for n, row in enumerate(y):
        seen = ~row.isnan()
        mean, error, seen_error = torch.zeros(NUM_OBSERVED, dtype=torch.float64), 0.0, 0.0
        for k, weight in zip(posterior.components[n].tolist(), posterior.weights[n], strict=True):
            prior = covariance(model, k)
            noisy_part = prior[seen][:, seen] + SCALE**2 * torch.eye(int(seen.sum()), dtype=torch.float64)
            gain = torch.linalg.solve(noisy_part, prior[seen]).mT
            variances = (prior - gain @ prior[seen]).diagonal()
            mean += weight * (model.loc[k] + gain @ (row - model.loc[k])[seen])
            error, seen_error = error + weight * variances.sum(), seen_error + weight * variances[seen].sum()
        torch.testing.assert_close(means[n], mean)
        torch.testing.assert_close(errors[n], torch.as_tensor(error))
        torch.testing.assert_close(seen_errors[n], torch.as_tensor(seen_error))


def test_clusters_are_those_of_the_nearest_means_and_components_without_data_are_never_taken() -> None:
    points = torch.cat([torch.zeros(10, 2), torch.full((10, 2), 9.0)]) + torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    found = k_means(points, 2, 10, 5, torch.Generator().manual_seed(3))
    assert found.weights.tolist() == 20 * [[1.0, 0.0]]
    assert bool((found.components.sum(1) == 1).all())
    means = torch.stack([points[found.components[:, 0] == k].mean(0) for k in range(2)])
    assert torch.equal(torch.cdist(points, means).argsort(1), found.components)
    model = PatchMixture.of(points, torch.zeros(20, 2), found.most_probable(1), 4, 1.0)
    assert bool((model.responsibilities(points, torch.zeros(20, 2), 2).components < 2).all())


def test_cosines_are_orthonormal_and_begin_with_the_constant() -> None:
    basis = cosines((4, 3, 2), torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(basis @ basis.mT, torch.eye(24, dtype=torch.float64))
    torch.testing.assert_close(basis[0], torch.full((24,), 24**-0.5, dtype=torch.float64))
