"""Mixtures of patches against dense formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from pyro_truncated import AutoTruncated, ClosedFormModel, Population, StateSpace
from pyro_truncated.restoration import PatchMixture
from pyro_truncated.restoration.patch_mixture import cosines, most_probable
from pyro_truncated.testing import check_guide
from tests.models.mixture import sparse_pairs

NUM_DATA, NUM_OBSERVED, NUM_COMPONENTS, SCALE = 60, 5, 4, 0.7
Data = tuple[Tensor, Tensor, Tensor]


def draw() -> Data:
    """Noisy patches, patches without noise, and places."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_DATA, NUM_OBSERVED, generator=generator).double() @ torch.randn(5, 5, generator=generator).double()
    places = torch.randint(20, (NUM_DATA, 2), generator=generator).double()
    return x + SCALE * torch.randn(x.shape, generator=generator).double(), x, places


def some_population() -> Population:
    generator = torch.Generator().manual_seed(1)
    space = StateSpace([NUM_COMPONENTS])
    components = torch.rand(NUM_DATA, NUM_COMPONENTS, generator=generator).argsort(1)
    return Population(space, space.pack(components.unsqueeze(-1)), torch.randn(NUM_DATA, NUM_COMPONENTS, generator=generator).double())


def shares(population: Population) -> Tensor:
    """Responsibilities of the three best components, ``(N, K)``."""
    best = population.log_joint.topk(3, 1)
    components = population.states(torch.int64)[..., 0].gather(1, best.indices)
    return torch.zeros(NUM_DATA, NUM_COMPONENTS, dtype=torch.float64).scatter(1, components, best.values.softmax(1))


def learned(data: Data) -> PatchMixture:
    model = PatchMixture(NUM_OBSERVED, NUM_COMPONENTS, 2, SCALE, data[0])
    model.maximize(model.sufficient_statistics(some_population(), *data))
    return model


def covariance(model: PatchMixture, k: int) -> Tensor:
    return model.factor[k] @ model.factor[k].mT


def dense_log_joint(model: PatchMixture, y: Tensor, places: Tensor) -> Tensor:
    identity = torch.eye(NUM_OBSERVED, dtype=torch.float64)
    terms = [
        model.weights[k].log()
        + MultivariateNormal(model.loc[k], covariance(model, k) + SCALE**2 * identity).log_prob(y)
        + 0.5 * Normal(model.places[k], model.spreads[k]).log_prob(places).sum(1)
        for k in range(NUM_COMPONENTS)
    ]
    return torch.stack(terms, 1)


def test_parameters_are_weighted_moments() -> None:
    data = draw()
    _, x, places = data
    model = learned(data)
    model.maximize(model.sufficient_statistics(some_population(), *data))  # around other means: the same moments
    responsibilities = shares(some_population())
    torch.testing.assert_close(model.weights, responsibilities.mean(0))
    for k, share in enumerate((responsibilities / responsibilities.sum(0)).unbind(1)):
        torch.testing.assert_close(model.loc[k], share @ x)
        torch.testing.assert_close(model.places[k], share @ places)
        torch.testing.assert_close(model.spreads[k].square(), share @ (places - model.places[k]).square().mean(1) + 4.0)
        centred = x - model.loc[k]
        values, basis = torch.linalg.eigh((centred * share.unsqueeze(1)).mT @ centred)
        values = torch.where(values > 0.05 * SCALE**2, values, 0.0)
        torch.testing.assert_close(covariance(model, k), basis * values @ basis.mT)
        lengths = model.factor[k].norm(dim=0)
        assert bool((lengths.diff() <= 1e-12).all())


def test_statistics_of_parts_add_up() -> None:
    data, population = draw(), some_population()
    model = learned(data)
    assert isinstance(model, ClosedFormModel)
    whole = model.sufficient_statistics(population, *data)
    parts = [model.sufficient_statistics(part, *data) for part in population.split(25)]
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts), value)


@pytest.mark.slow
def test_the_guide_has_the_posteriors_of_dense_covariances() -> None:
    data = draw()
    model = learned(data)
    y, _, places = data
    exact = dense_log_joint(model, y, places)
    guide = AutoTruncated(model, 3, init=torch.arange(3).expand(NUM_DATA, 3))
    found = guide.refresh_(*data)
    torch.testing.assert_close(found.log_joint.double(), exact[:, :3])
    two = most_probable(found, 2)
    torch.testing.assert_close(two.log_joint.double(), exact[:, :3].topk(2).values)
    assert torch.equal(two.states(torch.int64)[..., 0], exact[:, :3].topk(2).indices)
    check_guide(AutoTruncated(model, 3), *data)


@pytest.mark.slow
@pytest.mark.parametrize("share_missing", [0.0, 0.4])
def test_posterior_means_are_conditional_expectations_of_what_is_observed(share_missing: float) -> None:
    data = draw()
    model, population = learned(data), some_population()
    y = torch.where(torch.rand(data[0].shape, generator=torch.Generator().manual_seed(2)) < share_missing, math.nan, data[0])
    means, errors = model.posterior_means(population, y)
    torch.testing.assert_close(model.reconstruct(population, y), means)
    for n, (row, weights) in enumerate(zip(y, shares(population), strict=True)):
        seen = ~row.isnan()
        mean, square = torch.zeros(2, NUM_OBSERVED, dtype=torch.float64)
        for k, weight in enumerate(weights):
            prior = covariance(model, k)
            noisy_part = prior[seen][:, seen] + SCALE**2 * torch.eye(int(seen.sum()), dtype=torch.float64)
            gain = torch.linalg.solve(noisy_part, prior[seen]).mT
            of_component = model.loc[k] + gain @ (row - model.loc[k])[seen]
            mean += weight * of_component
            square += weight * (of_component.square() + (prior - gain @ prior[seen]).diagonal())
        torch.testing.assert_close(means[n], mean)
        torch.testing.assert_close(errors[n], square - mean.square())


def test_components_without_data_keep_their_means_and_weigh_nothing() -> None:
    data = draw()
    model = PatchMixture(NUM_OBSERVED, NUM_COMPONENTS, 2, SCALE, data[0])
    model.loc = torch.randn(NUM_COMPONENTS, NUM_OBSERVED, generator=torch.Generator().manual_seed(3)).double()
    before, population = model.loc.clone(), some_population()
    log_joint = population.log_joint.masked_fill(population.states()[..., 0] == 1, -math.inf)
    model.maximize(model.sufficient_statistics(Population(population.space, population.words, log_joint), *data))
    assert torch.equal(model.loc[1], before[1])
    assert model.weights[1] == 0.0
    assert all(value.isfinite().all() for value in model.buffers())


@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_components_of_two_patches_have_one_direction(dtype: torch.dtype, scale: float) -> None:
    pairs = 100 * sparse_pairs(100, 64, dtype)
    x, space = pairs.flatten(0, 1), StateSpace([100])
    population = Population(space, space.pack(torch.arange(200).reshape(200, 1, 1) // 2), torch.zeros(200, 1, dtype=dtype))
    model = PatchMixture(64, 100, 2, scale, x)
    model.maximize(model.sufficient_statistics(population, x, x, torch.zeros(200, 2)))
    half = 0.5 * pairs.diff(dim=1)
    expected = half.mT @ half
    variances = expected.diagonal(dim1=1, dim2=2).sum(1)
    expected[variances <= 0.05 * scale**2] = 0.0
    rounding = 10 * torch.finfo(dtype).eps * float(variances.max())
    torch.testing.assert_close(model.factor @ model.factor.mT, expected, rtol=0.0, atol=rounding)


def test_cosines_are_orthonormal_and_begin_with_the_constant() -> None:
    basis = cosines((4, 3, 2), torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(basis @ basis.mT, torch.eye(24, dtype=torch.float64))
    torch.testing.assert_close(basis[0], torch.full((24,), 24**-0.5, dtype=torch.float64))
