"""Small training runs of every kind, each from a seed, for what shall happen to them."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, GibbsEM, GibbsGuide, Preselection, Truncated_ELBO
from pyro_truncated.gplvm import Analytic_ELBO, SASDecoder, SpikeSlabGPLVM
from pyro_truncated.models import BinarySparseCoding, MaxSpikeSlabSparseCoding
from pyro_truncated.search import Singletons
from pyro_truncated.utils.parameter_store import relative_names

Run = tuple[SVI, tuple[Any, ...]]


def data(num_data: int = 40, num_observed: int = 9, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sums of a few of six patterns, and noise."""
    generator = torch.Generator().manual_seed(1)
    patterns = 10 * torch.rand(6, num_observed, generator=generator)
    active = torch.rand(num_data, 6, generator=generator) < 0.3
    return (active.float() @ patterns + torch.randn(num_data, num_observed, generator=generator)).to(dtype)


def _em(minibatch: str | None, batch_size: int | None, dtype: torch.dtype) -> Run:
    y = data(dtype=dtype)
    model = BinarySparseCoding(9, 6, dtype=dtype).initialize(y)
    temperature = 1.0 if minibatch == "incremental" else _falling
    elbo = Truncated_ELBO(EvolutionarySearch(parents=3, children=3), temperature=temperature)
    return SVI(model, AutoTruncated(model, num_states=8), ClosedForm(model, minibatch=minibatch), elbo), (y, batch_size)


@functools.cache
def _folder() -> Path:
    """Where populations of runs one after the other lie; forked children leave it to the process that has made it."""
    folder = Path(tempfile.mkdtemp(prefix="populations-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def files() -> Run:
    y = data(dtype=torch.float64)
    model = BinarySparseCoding(9, 6, dtype=y.dtype).initialize(y)
    guide = AutoTruncated(model, num_states=8, store=_folder())
    return SVI(model, guide, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(parents=3, children=3))), (y, 10)


def _falling(step: int) -> float:
    return 1 + 3 / (1 + step)


def full() -> Run:
    return _em(None, None, torch.float32)


def incremental() -> Run:
    return _em("incremental", 10, torch.float64)


def online() -> Run:
    return _em("online", 10, torch.float32)


def _with_a_continuous_latent(y: Tensor, batch_size: int | None = None) -> None:
    weight = pyro.param("weight", lambda: y[:6].mT.clone())
    offset = pyro.sample("offset", dist.Normal(torch.zeros(y.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(y), subsample_size=batch_size) as index:
        s = pyro.sample("s", dist.Bernoulli(torch.full((6,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(offset + s @ weight.mT, 2.0).to_event(1), obs=y[index])


def gradients() -> Run:
    guide = AutoGuideList(_with_a_continuous_latent)
    guide.append(AutoNormal(poutine.block(_with_a_continuous_latent, hide=["s"])))
    guide.append(AutoTruncated(_with_a_continuous_latent, num_states=8))
    elbo = Truncated_ELBO(EvolutionarySearch(parents=3, children=3))
    return SVI(_with_a_continuous_latent, guide, Adam({"lr": 0.05}), elbo), (data(), 10)


def gibbs() -> Run:
    model, y = MaxSpikeSlabSparseCoding(9, 6), data()
    model.initialize(y)
    own = torch.Generator().manual_seed(5)
    elbo = GibbsEM(Preselection(Singletons(), 3), temperature=_falling, batch_size=10, generator=own)
    return SVI(model, GibbsGuide(model), ClosedForm(model), elbo), (y,)


def gplvm() -> Run:
    y = data().double()
    model = SpikeSlabGPLVM(len(y), y.shape[1], 2, num_inducing=4)
    return SVI(model.model, model.guide, Adam({"lr": 0.02}), Analytic_ELBO()), (y,)


def decoder() -> Run:
    x = data()
    decoder = SASDecoder(len(x), x.shape[1], num_active=10, batch_size=20, bayesian=True).initialize(x)
    return SVI(decoder.model, decoder.guide, Adam(decoder.learning_rates(0.02)), Trace_ELBO()), (x,)


MODES: dict[str, Callable[[], Run]] = {run.__name__: run for run in (full, incremental, online, files, gradients, gibbs, gplvm, decoder)}


def make(mode: str) -> Run:
    """A run of that kind, the same in every process."""
    pyro.clear_param_store()
    pyro.set_rng_seed(7)
    return MODES[mode]()


def state(svi: SVI) -> dict[str, Tensor]:
    """All that was learned: parameters and buffers by name."""
    modules = {owner for part in (svi.model, svi.guide) if isinstance(owner := getattr(part, "__self__", part), torch.nn.Module)}
    named = [item for module in sorted(modules, key=lambda module: type(module).__name__) for item in module.state_dict().items()]
    owned = {id(parameter) for module in modules for parameter in module.parameters()}
    # What modules own is in the store too as soon as a step has been taken, but not where a finished run was merely loaded.
    stored = {name: value for name, value in pyro.get_param_store().named_parameters() if id(value) not in owned}
    loose = relative_names(stored, svi.model, svi.guide)
    return {name: value.detach().clone() for name, value in [*named, *loose.items()] if isinstance(value, Tensor)}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Compares bit by bit; NaN, which marks what was never computed, equals itself."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
