"""Models of real data know no unit: data in volts and in microvolts are learnt alike, and no start lies where an M-step may not go."""

from __future__ import annotations

import math
from collections.abc import Callable

import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, GibbsEM, GibbsGuide, Preselection, Truncated_ELBO
from pyro_truncated import models as library
from pyro_truncated.search.preselection import Cosine

D64 = torch.float64
FAMILIES: dict[str, Callable[[int, torch.dtype], torch.nn.Module]] = {
    "BinarySparseCoding": lambda d, dtype: library.BinarySparseCoding(d, 4, dtype=dtype),
    "SpikeSlabSparseCoding": lambda d, dtype: library.SpikeSlabSparseCoding(d, 4, dtype=dtype),
    "MaximalCauses": lambda d, dtype: library.MaximalCauses(d, 4, dtype=dtype),
    "DiscreteSparseCoding": lambda d, dtype: library.DiscreteSparseCoding(d, 3, dtype=dtype),
    "GaussianMixture-full": lambda d, dtype: library.GaussianMixture(d, 3, dtype=dtype),
    "GaussianMixture-diag": lambda d, dtype: library.GaussianMixture(d, 3, covariance="diag", dtype=dtype),
    "GaussianMixture-spherical": lambda d, dtype: library.GaussianMixture(d, 3, covariance="spherical", dtype=dtype),
    "GaussianMixture-tied": lambda d, dtype: library.GaussianMixture(d, 3, covariance="tied", dtype=dtype),
    "GaussianMixture-low-rank": lambda d, dtype: library.GaussianMixture(d, 3, covariance="low-rank", rank=1, dtype=dtype),
}


def bars_like(num_data: int = 60, dtype: torch.dtype = D64, generator: torch.Generator | None = None) -> Tensor:
    """Non-negative superpositions of three elements with a little noise."""
    generator = generator or torch.Generator().manual_seed(0)
    states = (torch.rand(num_data, 3, generator=generator) < 0.4).to(D64)
    elements = torch.rand(3, 5, generator=generator, dtype=D64) * 3
    return (states @ elements + 0.3 * torch.randn(num_data, 5, generator=generator, dtype=D64)).to(dtype)


def trained(family: str, y: Tensor, steps: int = 12) -> list[float]:
    """Free energies of EM with exact posteriors."""
    pyro.clear_param_store()
    model = FAMILIES[family](y.shape[1], y.dtype).initialize(y, torch.Generator().manual_seed(3))
    guide = AutoTruncated(model, 27 if family.startswith("Discrete") else 3 if family.startswith("Gaussian") else 16)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    return [-svi.step(y) for _ in range(steps)]


@pytest.mark.parametrize("unit", [1e-12, 1e12])
def test_units_of_maximal_slabs(unit):
    def after_em(unit: float) -> tuple[Tensor, float]:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        y = unit * bars_like()
        model = library.MaxSpikeSlabSparseCoding(5, 4, dtype=D64).initialize(y, torch.Generator().manual_seed(3))
        svi = SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(Preselection(Cosine(lambda: model.weight), 4)))
        for _ in range(4):
            svi.step(y)
        return model.weight.detach() / unit, model.scale.item() / unit

    (weight, scale), (other_weight, other_scale) = after_em(1.0), after_em(unit)
    torch.testing.assert_close(other_weight, weight, rtol=1e-9, atol=1e-9)
    assert other_scale == pytest.approx(scale, rel=1e-9)


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e-12, 1e12])
@pytest.mark.parametrize("hidden", [(), (6,)])
def test_binary_autoencoders_train_alike_in_any_unit(unit, hidden):
    def after_adam(unit: float) -> tuple[Tensor, float, Tensor]:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        y = unit * (bars_like() + 3)
        model = library.BinaryVAE(5, 4, hidden, dtype=D64).initialize(y)
        guide = AutoTruncated(model, 16)
        svi = SVI(model, guide, Adam({"lr": 0.02}), Truncated_ELBO(ExhaustiveSearch()))
        energies = torch.tensor([-svi.step(y) for _ in range(30)], dtype=D64)
        return energies + y.numel() * math.log(unit), model.scale.item() / unit, model.reconstruct(guide.population()) / unit

    (energies, scale, means), (other_energies, other_scale, other_means) = after_adam(1.0), after_adam(unit)
    assert energies[-1] > energies[0] + 10
    torch.testing.assert_close(other_energies, energies, rtol=1e-9, atol=1e-6)
    torch.testing.assert_close(other_means, means, rtol=1e-6, atol=1e-6)
    assert other_scale == pytest.approx(scale, rel=1e-6)


# Powers of two: rounding, which decides between windows that lie equally alone, is the same.
@pytest.mark.slow
@pytest.mark.parametrize(("unit", "order"), [(2.0**-40, "exclusive"), (2.0**40, "depth")])
def test_units_of_occlusive_components(unit, order):
    def after_em(unit: float) -> tuple[Tensor, Tensor]:
        pyro.clear_param_store()
        generator = torch.Generator().manual_seed(1)
        y = 0.3 + 0.05 * torch.randn(20, 2, 4, 2, generator=generator, dtype=D64)
        y[:10, 0, 1:3] += torch.tensor([0.7, -0.2], dtype=D64)
        model = library.OcclusiveComponents(2, (2, 4), (1, 2), 2, order=order, min_scale=0.2, dtype=D64)
        model.initialize(unit * y, torch.Generator().manual_seed(3))
        svi = SVI(model, AutoTruncated(model, num_states=256), ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
        energies = torch.tensor([-svi.step(unit * y) for _ in range(6)], dtype=D64)
        learned = torch.stack([model.scale, model.background_scale, *model.background, *model.features.flatten()])
        return energies + y.numel() * math.log(unit), learned.detach() / unit

    (energies, learned), (other_energies, other_learned) = after_em(1.0), after_em(unit)
    assert bool((energies.diff() >= -1e-9).all())
    torch.testing.assert_close(other_energies, energies, rtol=1e-9, atol=1e-6)
    torch.testing.assert_close(other_learned, learned, rtol=1e-6, atol=1e-9)


def odd_data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(30, 5, generator=generator, dtype=D64)
    odd = {f"constant at {value:g}": torch.full((30, 5), value, dtype=D64) for value in (0.0, 1e-9, 1.0, 255.0, 1e6, -255.0)}
    odd |= {f"constant at {value:g} but for one entry": odd[f"constant at {value:g}"].clone() for value in (0.0, 255.0)}
    odd["constant at 0 but for one entry"][3, 2] = odd["constant at 255 but for one entry"][3, 2] = 1.0
    odd |= {f"offset {value:g}": value + noise for value in (255.0, -1e3, 1e6)}
    odd |= {
        "two rows": torch.where(noise[:, :1] > 0, noise[:1], noise[1:2]),
        "columns of constants": noise[:1].expand(30, 5).clone(),
        "one row": noise[:1],
        "one row of zeros": torch.zeros(1, 5, dtype=D64),
        "an outlier": torch.cat([noise, torch.full((1, 5), 1e6, dtype=D64)]),
        "tiny with an outlier": torch.cat([1e-8 * noise, torch.full((1, 5), 1.0, dtype=D64)]),
        "tiny with two outliers": torch.cat([1e-9 * noise, 3 + 0.7 * noise[:2]]),
        "integers": (noise * 2).round(),
        "negative": -noise.abs() - 3,
        "binary": (noise > 0).to(D64),
        "one-dimensional": noise[:, :1].expand(30, 5).clone(),
        "cubed": noise**9,
    }
    return odd


@pytest.mark.nightly(keep=5)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the data lie on a background")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", odd_data())
def test_free_energies_never_fall_whatever_the_data(name, dtype):
    y = odd_data()[name].to(dtype)
    for family in FAMILIES:
        energies = torch.tensor(trained(family, y, 6), dtype=D64)
        assert bool(energies.isfinite().all()), family
        # Parameters are rounded: their errors count in units of the deviation, which is a thousandth of the data at least.
        slack = (1e-9 if dtype == D64 else 1e-2) * y.numel() + (1e-12 if dtype == D64 else 1e-6) * float(energies.abs().max())
        if family == "GaussianMixture-tied" and name == "tiny with an outlier":
            # One covariance for all, whose moments have one digit beside an outlier at 1e8 deviations: it falls by 0.0018 nats.
            slack += 2e-5 * y.numel()
        assert bool((energies.diff() >= -slack).all()), (family, energies)


@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.startswith("Gaussian")])
def test_data_without_any_observed_entry_are_refused(family):
    y = torch.full((6, 5), torch.nan)
    with pytest.raises(ValueError, match="data must have at least one observed entry"):
        trained(family, y)
    model = FAMILIES[family](5, torch.float32)
    svi = SVI(model, AutoTruncated(model, 8), ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    with pytest.raises(ValueError, match="data must have at least one observed entry"):
        svi.step(y)


def test_gradients_know_no_unit_either():
    y = bars_like()
    losses = []
    for unit in (1.0, 1e-9):
        pyro.clear_param_store()
        model = library.BinarySparseCoding(5, 4, dtype=D64).initialize(unit * y, torch.Generator().manual_seed(3))
        loss = SVI(model, AutoTruncated(model, 16), Adam({"lr": 0.0}), Truncated_ELBO(ExhaustiveSearch())).step(unit * y)
        losses.append(loss - y.numel() * math.log(unit))
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
