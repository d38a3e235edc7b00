"""An offset is the element of a latent that is always on: its M-step, its start, and what a background does with and without it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI, Predictive
from torch import Tensor

from pyro_truncated import (
    AutoTruncated,
    ClosedForm,
    ExhaustiveSearch,
    GibbsEM,
    GibbsGuide,
    GPSelect,
    LearnConfig,
    Truncated_ELBO,
    learn,
    models,
)
from pyro_truncated.datasets import linear_bars, matched_bars, noisy_or_bars
from pyro_truncated.models import BinarySparseCoding, DiscreteSparseCoding, MaximalCauses, MaxSpikeSlabSparseCoding, SpikeSlabSparseCoding
from pyro_truncated.models.dictionary import BackgroundWarning, best_dictionary_and_offset, lies_on_background
from tests.models.configurations import CONFIGURATIONS, D64, D, H

FAMILIES: dict[str, Callable[..., Any]] = {
    "binary": lambda **options: BinarySparseCoding(D, H, **options),
    "spike-slab": lambda **options: SpikeSlabSparseCoding(D, H, **options),
    "ternary": lambda **options: DiscreteSparseCoding(D, H, **options),
}
ROWS = {"binary": "BinarySparseCoding", "spike-slab": "SpikeSlabSparseCoding", "ternary": "DiscreteSparseCoding"}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data(with_missing: bool = False) -> Tensor:
    y = 3 * torch.randn(60, D, dtype=D64) ** 2
    if with_missing:
        y[torch.rand(y.shape) < 0.3] = math.nan
        y[3] = math.nan
    return y


def energies(family: str, y: Tensor, steps: int = 10, **options: Any) -> Tensor:
    """Free energies of EM with exact posteriors, from the model's own start."""
    pyro.clear_param_store()
    model = FAMILIES[family](dtype=y.dtype, **options).initialize(y, generator())
    svi = SVI(model, AutoTruncated(model, num_states=27), ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    return torch.tensor([-svi.step(y) for _ in range(steps)], dtype=D64)


# --- the M-step ---


@pytest.mark.parametrize("with_missing", [False, True])
def test_dictionary_and_offset_are_the_least_squares_of_a_latent_that_is_always_on(with_missing: bool) -> None:
    y, states = data(with_missing), torch.randn(60, H, dtype=D64)
    seen = (~y.isnan()).double()
    statistics = {
        "observed": seen.sum(0),
        "sums": y.nansum(0),
        "trials": seen.mT @ states,
        "cross": y.nan_to_num().mT @ states,
        "pairs": torch.einsum("nd,nh,ni->dhi", seen, states, states) if with_missing else states.mT @ states,
    }
    weight, bias = best_dictionary_and_offset(torch.zeros(D, H, dtype=D64), torch.zeros(D, dtype=D64), statistics)
    design = torch.cat([states, torch.ones(60, 1, dtype=D64)], 1)
    for d in range(D):
        rows = seen[:, d] > 0
        best = torch.linalg.lstsq(design[rows], y[rows, d]).solution
        torch.testing.assert_close(torch.cat([weight[d], bias[d, None]]), best, rtol=1e-7, atol=1e-7)


def test_latents_that_are_always_or_never_on_and_dimensions_without_data_stay() -> None:
    states, old = torch.randn(20, H, dtype=D64), torch.randn(D, H, dtype=D64)
    states[:, 0], states[:, 1] = 1.0, 0.0
    y, offset = torch.randn(20, D, dtype=D64), torch.randn(D, dtype=D64)
    seen = torch.ones(20, D, dtype=D64)
    seen[:, 2] = 0.0
    statistics = {
        "observed": seen.sum(0),
        "sums": (seen * y).sum(0),
        "trials": seen.mT @ states,
        "cross": (seen * y).mT @ states,
        "pairs": torch.einsum("nd,nh,ni->dhi", seen, states, states),
    }
    weight, bias = best_dictionary_and_offset(old, offset, statistics)
    torch.testing.assert_close(weight[:, :2], old[:, :2], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weight[2], old[2])
    assert bias[2] == offset[2]
    assert not torch.isclose(bias[[0, 1, 3, 4]], offset[[0, 1, 3, 4]]).any()


@pytest.mark.nightly
@pytest.mark.parametrize("with_missing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_evidence_is_stationary_where_em_stands_still(family: str, with_missing: bool) -> None:
    row = CONFIGURATIONS[f"{ROWS[family]}-offset"]
    model = row.make(D64)
    model.bias = 5 * torch.randn(D, dtype=D64)
    model.weight = 4 * model.weight.detach()
    y = model(num_data=40).detach()
    if with_missing:
        y[torch.rand(y.shape) < 0.2] = math.nan

    def steepness() -> float:
        evidence = row.log_joint(model, y).logsumexp(-1).sum()
        gradients = torch.autograd.grad(evidence, [model.bias_unconstrained, model.weight_unconstrained, model.scale_unconstrained])
        return max(gradient.abs().max().item() for gradient in gradients)

    model.bias = torch.zeros(D, dtype=D64)
    at_first = steepness()
    for _ in range(400):
        model.maximize(model.sufficient_statistics(row.population(model, y), y))
    assert steepness() < 1e-3 * at_first


# --- what does not matter: backgrounds and units ---


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("background", [30.0, -1e5])
@pytest.mark.parametrize("with_missing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_free_energies_know_no_background(family: str, with_missing: bool, background: float) -> None:
    y = data(with_missing)
    torch.testing.assert_close(energies(family, y + background), energies(family, y), rtol=1e-9, atol=1e-6)
    per_dimension = background * torch.rand(D, generator=generator(), dtype=D64)
    torch.testing.assert_close(energies(family, y + per_dimension), energies(family, y), rtol=1e-9, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_free_energies_on_a_background_know_no_unit(family: str) -> None:
    y = data(with_missing=True) + 1e3
    observed = (~y.isnan()).sum().item()
    found = energies(family, 1e-6 * y) + observed * math.log(1e-6)
    torch.testing.assert_close(found, energies(family, y), rtol=1e-8, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_single_precision_on_a_background_of_1e5_loses_less_than_its_rounding(family: str) -> None:
    # The data themselves are rounded by up to 0.004, the offset as much; noise of one.
    y = data() + 1e5
    double, single = energies(family, y), energies(family, y.float())
    assert bool((single.diff() > -0.01 * y.numel()).all())
    assert single[-1].item() == pytest.approx(double[-1].item(), abs=0.02 * y.numel())


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_were_never_initialised_have_the_same_steps(family: str) -> None:
    y, found = data(), []
    for background in (0.0, 1e4):
        torch.manual_seed(1)
        model = FAMILIES[family](dtype=D64)
        model.bias = model.bias.detach() + background
        row = CONFIGURATIONS[ROWS[family]]
        for _ in range(3):
            model.maximize(model.sufficient_statistics(row.population(model, y + background), y + background))
        found.append((model.weight.detach(), model.scale.detach(), model.bias.detach() - background))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


# --- what a user sees ---


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_and_reconstructions_hold_the_offset(family: str) -> None:
    model = FAMILIES[family](dtype=D64)
    model.bias = torch.arange(D).double() + 1e4
    assert (Predictive(model, num_samples=3)(num_data=4)["y"] > 9e3).all()
    if family == "ternary":
        return
    row, y = CONFIGURATIONS[ROWS[family]], data() + 1e4
    population = row.population(model, y)
    shifted = model.reconstruct(population, y)
    model.bias = model.bias.detach() - 1e4
    y = y - 1e4
    torch.testing.assert_close(shifted, model.reconstruct(row.population(model, y), y) + 1e4, rtol=1e-9, atol=1e-6)
    if family == "spike-slab":
        drawn = pyro.poutine.trace(model.with_slabs).get_trace(num_data=5).nodes["y"]["fn"]
        torch.testing.assert_close(drawn.bias, model.bias)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_without_an_offset_are_what_they_were(family: str) -> None:
    model, other = FAMILIES[family](offset=False), FAMILIES[family]()
    assert model.bias is None
    assert set(other.state_dict()) - set(model.state_dict()) == {"bias_unconstrained", "center"}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*bias_unconstrained"):
        model.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*bias_unconstrained"):
        other.load_state_dict(model.state_dict())


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bars_on_a_background_are_found_with_an_offset_only(dtype: torch.dtype) -> None:
    bars = linear_bars(300, 5, mean_active=2.0, generator=generator(9000))
    y, found = (bars.data.double() + 1e5).to(dtype), []
    for offset in (True, False):
        pyro.clear_param_store()
        pyro.set_rng_seed(9000)
        model = BinarySparseCoding(25, 10, offset=offset, dtype=dtype)
        learn(model, y, num_states=32, steps=10, restarts=2, progress=False, generator=generator(1))
        found.append(matched_bars(model.weight, bars.components))
    assert found == [10, 0]


@pytest.mark.parametrize("family", [MaximalCauses, MaxSpikeSlabSparseCoding])
def test_positive_models_say_that_data_lie_on_a_background(family: Any) -> None:
    y = linear_bars(100, 3, mean_active=1.0, generator=generator()).data.abs()
    model = family(9, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.initialize(y)
        model.initialize(y[:3] + 100)
    y[0, 0] = math.nan
    with pytest.warns(BackgroundWarning, match=f"{family.__name__} has no offset"):
        model.initialize(y + 100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            family(9, 6).initialize(y + 100)
    assert len(caught) == 1
    assert isinstance(models.NoisyOr(16, 4).initialize(noisy_or_bars(50, 4).data), models.NoisyOr)


def test_a_background_is_large_beside_the_noise_not_beside_the_causes() -> None:
    for noise in (0.1, 2.0):
        y = linear_bars(500, 5, mean_active=2.0, noise=noise, generator=generator()).data
        for level in (-100, -10, -5, 6, 10, 100):
            assert lies_on_background(y + noise * level), (noise, level)
        assert not any(lies_on_background(y + noise * level) for level in (-1, 0, 1))
    noise = torch.randn(500, 25, generator=generator())
    assert not any(lies_on_background(y) for y in (noise.abs(), noise.exp(), noise.square(), (3 * noise.abs()).round()))
    # Of many rows some are looked at, and not every second one.
    assert not lies_on_background(noise.abs().repeat(40, 1) + 9 * (torch.arange(1, 20_001) % 2).unsqueeze(1))


@pytest.mark.nightly
@pytest.mark.parametrize("family", [MaximalCauses, MaxSpikeSlabSparseCoding])
def test_whoever_trains_a_positive_model_is_told_of_a_background_once(family: Any) -> None:
    y = linear_bars(30, 3, mean_active=1.0, generator=generator()).data.abs()
    is_sampled = family is MaxSpikeSlabSparseCoding

    def first_steps(data: Tensor) -> None:
        model = family(9, 6)
        guide, elbo = (GibbsGuide(model), GibbsEM(GPSelect(3))) if is_sampled else (AutoTruncated(model, num_states=8), Truncated_ELBO())
        svi = SVI(model, guide, ClosedForm(model), elbo)
        for _ in range(2):
            svi.step(data)

    def short_learn(data: Tensor) -> None:
        learn(family(9, 6), data, restarts=2, steps=1, config=LearnConfig(restart_steps=1, tolerance=1e6), num_states=8, progress=False)

    for train in (first_steps, short_learn):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(y)
        assert not caught
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            train(y + 100)
        assert [warning.category for warning in caught] == [BackgroundWarning]
