"""Models whose dimensions have units of their own are learned alike from data whose columns are scaled one by one."""

from __future__ import annotations

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.models import ExponentialFamilyMaximalCauses, GaussianMixture

D64 = torch.float64
UNITS = [torch.tensor(units, dtype=D64) for units in ([1e-6, 1.0, 1e6], [1e6, 1e-6, 1e-3], [1e-6, 1e-6, 1e-6])]


def clusters() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    places = torch.tensor([[0.0, 0.0, 0.0], [8.0, 0.0, 3.0], [0.0, 9.0, 6.0]], dtype=D64)
    return places[torch.randint(3, (90,), generator=generator)] + torch.randn(90, 3, generator=generator, dtype=D64) + 2.0


def free_energies(model: torch.nn.Module, y: Tensor, num_states: int) -> list[float]:
    pyro.clear_param_store()
    model.initialize(y, torch.Generator().manual_seed(1))
    svi = SVI(model, AutoTruncated(model, num_states), ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    return [-svi.step(y) for _ in range(8)]


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("covariance", ["full", "diag", "tied"])
@pytest.mark.parametrize("pseudo_data", [0.0, None])
@pytest.mark.parametrize("dtype", [D64, torch.float32])
def test_gaussian_mixtures_know_no_units_of_columns(covariance, pseudo_data, dtype):
    y = clusters()

    def trained(units: Tensor) -> tuple[list[float], Tensor]:
        model = GaussianMixture(3, 3, covariance=covariance, pseudo_data=pseudo_data, dtype=dtype)
        energies = free_energies(model, (units * y).to(dtype), 3)
        return [energy + len(y) * float(units.log().sum()) for energy in energies], model.loc.detach().double() / units

    expected, loc = trained(torch.ones(3, dtype=D64))
    for units in UNITS:
        energies, scaled = trained(units)
        # Logarithms of densities are of the order of ten per data point in single precision.
        assert energies == pytest.approx(expected, rel=1e-9 if dtype == D64 else 1e-4)
        torch.testing.assert_close(scaled, loc, rtol=1e-6 if dtype == D64 else 1e-3, atol=1e-8 if dtype == D64 else 1e-3)


@pytest.mark.parametrize("units", UNITS)
def test_one_component_is_the_exact_maximum(units):
    # Two of the columns are nearly one, so that a floor in another unit would widen the covariance.
    y = clusters()
    y[:, 2] = y[:, 1] + 0.01 * y[:, 2]
    energy = free_energies(GaussianMixture(3, 1, pseudo_data=0, dtype=D64), units * y, 1)[-1]
    normal = torch.distributions.MultivariateNormal(y.mean(0), y.mT.cov(correction=0))
    assert energy == pytest.approx(float(normal.log_prob(y).sum() - len(y) * units.log().sum()), rel=1e-9)


@pytest.mark.parametrize("units", UNITS)
def test_gamma_causes_know_no_units_of_columns(units):
    y = torch.distributions.Gamma(3.0, 1.0).sample((60, 3)).to(D64) + 0.1

    def trained(units: Tensor) -> tuple[list[float], Tensor]:
        model = ExponentialFamilyMaximalCauses(3, 3, family="gamma", dtype=D64)
        energies = free_energies(model, units * y, 8)
        return [energy + len(y) * float(units.log().sum()) for energy in energies], model.weight.detach() / units.unsqueeze(-1)

    torch.manual_seed(0)
    expected, weight = trained(torch.ones(3, dtype=D64))
    energies, scaled = trained(units)
    assert energies == pytest.approx(expected, rel=1e-7)
    torch.testing.assert_close(scaled, weight, rtol=1e-5, atol=1e-8)
