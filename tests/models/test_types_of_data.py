"""Data of any type of real numbers are what they are in floating point; complex ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import (
    AutoTruncated,
    ClosedForm,
    ClosedFormModel,
    ExhaustiveSearch,
    GibbsGuide,
    Preselection,
    Truncated_ELBO,
    learn,
    to_arviz,
)
from pyro_truncated.models import (
    BinarySparseCoding,
    BinaryVAE,
    DiscreteSparseCoding,
    ExponentialFamilyMaximalCauses,
    FactorialHMM,
    GatedDecoder,
    GaussianMixture,
    MaximalCauses,
    MaxSpikeSlabSparseCoding,
    NoisyOr,
    OcclusiveComponents,
    PoissonMixture,
    SpikeSlabSparseCoding,
)
from pyro_truncated.search import Singletons
from pyro_truncated.utils.arviz_compat import get_dataset

OF_BOOLEANS: dict[str, Callable[[], Any]] = {
    "noisy-OR": lambda: NoisyOr(5, 3),
    "bernoulli": lambda: ExponentialFamilyMaximalCauses(5, 3, family="bernoulli"),
}
OF_COUNTS: dict[str, Callable[[], Any]] = {
    "binary": lambda: BinarySparseCoding(5, 3),
    "slabs": lambda: SpikeSlabSparseCoding(5, 3),
    "discrete": lambda: DiscreteSparseCoding(5, 3),
    "maximal": lambda: MaximalCauses(5, 3),
    "poisson": lambda: ExponentialFamilyMaximalCauses(5, 3, family="poisson"),
    "gamma": lambda: ExponentialFamilyMaximalCauses(5, 3, family="gamma"),
    "normal mixture": lambda: GaussianMixture(5, 3),
    "poisson mixture": lambda: PoissonMixture(5, 3),
    "network": lambda: BinaryVAE(5, 3, hidden=(4,)),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "maximal slabs": lambda: MaxSpikeSlabSparseCoding(5, 3),
    "full covariances": lambda: GaussianMixture(5, 3, covariance="full"),
    "low rank": lambda: GaussianMixture(5, 3, covariance="low-rank", rank=1),
    "decoder": lambda: GatedDecoder(torch.rand(6, 5), torch.ones(6, 2), torch.randn(6, 2, 1)),
    "objects": lambda: OcclusiveComponents(2, (5, 5), (2, 2), num_channels=1),
}


def trained(make: Callable[[], Any], y: Any) -> tuple[float, Tensor]:
    """The loss after two steps, and the reconstructions."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = make().initialize(y)
    optimizer: Any = ClosedForm(model) if isinstance(model, ClosedFormModel) else pyro.optim.Adam({"lr": 0.01})
    guide = AutoTruncated(model, num_states=8)
    svi = SVI(model, guide, optimizer, Truncated_ELBO(ExhaustiveSearch()))
    losses = [svi.step(y) for _ in range(2)]
    return losses[-1], model.reconstruct(guide.population(), y)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [*enumerate([*OF_COUNTS, *OF_BOOLEANS])])
def test_types_of_numbers_make_no_difference(number: int, name: str) -> None:
    """Lists of each model; of the other types one, in turn."""
    is_boolean = name in OF_BOOLEANS
    make = {**OF_COUNTS, **OF_BOOLEANS}[name]
    y = torch.randint(2, (20, 5)) if is_boolean else 1 + torch.randint(9, (20, 5))
    loss, means = trained(make, y.float())
    assert means.frac().abs().max() > 0
    types = (bool, np.uint8, np.int64, np.uint16) if is_boolean else (np.uint8, np.int8, np.int64, np.uint16)
    for given in (y.tolist(), y.numpy().astype(types[number % len(types)])):
        found, reconstructed = trained(make, given)
        assert found == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(reconstructed, means)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [lambda: NoisyOr(5, 3), lambda: BinarySparseCoding(5, 3), lambda: FactorialHMM(5, 2)])
def test_models_in_half_precision_start_from_the_same_loss(dtype: torch.dtype, make: Callable[[], Any]) -> None:
    y = torch.randint(2, (6, 4, 5)).float() if isinstance(make(), FactorialHMM) else torch.randint(2, (20, 5)).float()
    losses = []
    for kind in (torch.float32, dtype):
        pyro.set_rng_seed(0)
        model = make().initialize(y).to(kind)
        guide = AutoTruncated(model, num_states=8)
        losses.append(Truncated_ELBO(ExhaustiveSearch()).loss(model, guide, y))
        converted = get_dataset(to_arviz(model, guide, y, num_samples=5), "posterior_predictive")["y"]
        assert bool(np.isfinite(converted).all())
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize("name", [*OF_COUNTS, *OF_BOOLEANS, *OTHERS])
@pytest.mark.parametrize("is_array", [False, True])
def test_complex_data_are_refused_where_they_are_seen_first(name: str, is_array: bool) -> None:
    make = {**OF_COUNTS, **OF_BOOLEANS, **OTHERS}[name]
    y: Any = torch.ones((20, 5, 5, 1) if name == "objects" else (20, 5)).to(torch.complex64)
    y = y.numpy() if is_array else y
    message = "^[xy] must hold real numbers; got (torch.)?complex64$"
    with pytest.raises(TypeError, match=message):
        make().initialize(y)
    model = make()
    guide = AutoTruncated(model, num_states=4, conditional=getattr(model, "default_conditional", lambda: None)())
    optimizer: Any = ClosedForm(model) if isinstance(model, ClosedFormModel) else pyro.optim.Adam({"lr": 0.01})
    with pytest.raises(TypeError, match=message):
        SVI(model, guide, optimizer, Truncated_ELBO(ExhaustiveSearch())).step(y)
    with pytest.raises(TypeError, match=message):
        learn(make(), y, progress=False)


def test_programs_may_split_complex_data_themselves() -> None:
    y = torch.fft.fft(torch.randn(20, 5))

    def model(y: Tensor) -> None:
        loc = pyro.param("loc", torch.randn(3, 10))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(3)))
            pyro.sample("y", dist.Normal(loc[z], 1.0).to_event(1), obs=torch.view_as_real(y).flatten(1))

    svi = SVI(model, AutoTruncated(model, num_states=3), pyro.optim.Adam({"lr": 0.1}), Truncated_ELBO())
    assert svi.step(y) > svi.step(y)


def test_means_of_draws_for_integers_are_none() -> None:
    model, y = MaxSpikeSlabSparseCoding(5, 3), 1 + torch.randint(9, (20, 5))
    model.initialize(y.float())
    draws = GibbsGuide(model).infer(y.float(), Preselection(Singletons(), 3), steps=2).draws()
    torch.testing.assert_close(model.reconstruct(draws, y), model.reconstruct(draws, y.float()))
