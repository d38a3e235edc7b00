"""Compiles all kernels into the cache on disk.

After ``python -m pyro_truncated.warmup`` no later process waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_truncated import (
    AutoTruncated,
    ClosedForm,
    EvolutionarySearch,
    ExhaustiveSearch,
    GibbsEM,
    GibbsGuide,
    Preselection,
    SampledSearch,
    Search,
    StateSpace,
    Truncated_ELBO,
    models,
)
from pyro_truncated.ops.backend import compile_first
from pyro_truncated.ops.components import square_distances
from pyro_truncated.ops.max_inner_products import follow_neighbours, max_inner_products_in_groups
from pyro_truncated.ops.mixture_products import mixture_products
from pyro_truncated.scenes import PlacementCompletion, PlacementMoves, PlacementSelection, PlaceScan, RefinedPlaces
from pyro_truncated.search.preselection import Singletons
from pyro_truncated.sequences import BlockSearch
from pyro_truncated.utils.console import progress_bar

_LATENTS = 13

Task = Callable[[torch.dtype], None]


def warm_up(progress: bool | None = None) -> None:
    """Runs everything that is compiled, on little data, in both precisions.

    Pyro's parameter store and torch's generator are as before afterwards.

    Args:
        progress: whether to show a bar. Default: if standard error is a terminal.
    """
    tasks = [(name, task, dtype) for dtype in (torch.float32, torch.float64) for name, task in _TASKS.items()]
    with compile_first(), progress_bar(progress, iterable=tasks, unit="task") as bar:
        for name, task, dtype in bar:
            bar.set_description(f"{name}, {str(dtype).removeprefix('torch.')}")
            with torch.random.fork_rng(devices=[]), pyro.get_param_store().scope():
                torch.manual_seed(0)
                task(dtype)


def _data(dtype: torch.dtype) -> Tensor:
    return 1 + torch.rand(4, 9, dtype=dtype)


def _train(model: Any, y: Tensor, search: Search, *, closed_form: bool = False) -> AutoTruncated:
    guide = AutoTruncated(model, num_states=16)
    optimizer = ClosedForm(model) if closed_form else PyroOptim(torch.optim.Adam, {"lr": 1e-3})
    SVI(model, guide, optimizer, Truncated_ELBO(search)).step(y)
    return guide


def _any_model(dtype: torch.dtype) -> None:
    """Warms up a user's model with binary latents, and its posterior's functions."""

    def model(y: Tensor) -> None:
        weight = pyro.param("weight", lambda: torch.rand(_LATENTS, 9, dtype=dtype))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((_LATENTS,), 0.2, dtype=dtype)).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight, 1.0).to_event(1), obs=y)

    for search in (EvolutionarySearch(crossover=True), EvolutionarySearch(mutation="sparseflips"), SampledSearch(4)):
        guide = _train(model, _data(dtype), search)
    guide.marginals()
    guide.sample_posterior(2)
    guide.mode()
    # Torch unpacks fewer.
    StateSpace([2] * _LATENTS).unpack(torch.zeros(2**9, 1, dtype=torch.int64), dtype)


def _other_latents(dtype: torch.dtype) -> None:
    """A user's model with latents of several values."""

    def model(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            k = pyro.sample("k", dist.Categorical(torch.ones(3, 4, dtype=dtype)).to_event(1))
            b = pyro.sample("b", dist.Bernoulli(torch.tensor(0.5, dtype=dtype)))
            loc = (k.sum(-1) + b).unsqueeze(-1) + torch.zeros(9, dtype=dtype)
            pyro.sample("y", dist.Normal(loc, 1.0).to_event(1), obs=y)

    for search in (EvolutionarySearch(), EvolutionarySearch(mutation="sparseflips"), SampledSearch(4), ExhaustiveSearch()):
        guide = _train(model, _data(dtype), search)
    guide.marginals()


def _many_sites(dtype: torch.dtype) -> None:
    """A loop over sites."""

    def model(y: Tensor) -> None:
        for place in range(260):
            z = pyro.sample(f"z_{place}", dist.Bernoulli(torch.tensor(0.5, dtype=dtype)))
            pyro.sample(f"y_{place}", dist.Normal(z, 1.0), obs=y[0, 0])

    _train(model, _data(dtype), EvolutionarySearch())


def _causes(kind: Callable[..., Any], *, binary: bool = False) -> Task:
    """Warms up models with closed-form M-steps and with gradients."""

    def task(dtype: torch.dtype) -> None:
        y = (_data(dtype) > 1.5).to(dtype) if binary else _data(dtype)
        incomplete = y.clone()
        incomplete[0, 0] = torch.nan
        for data in (y, incomplete):
            model = kind(9, _LATENTS, dtype=dtype).initialize(y)
            _train(model, data, EvolutionarySearch(), closed_form=True)
            _train(model, data, EvolutionarySearch())

    return task


def _select(dtype: torch.dtype) -> None:
    # More latents than there are tables of all states for.
    model = models.BinarySparseCoding(9, 30, dtype=dtype).initialize(_data(dtype))
    _train(model, _data(dtype), Preselection(Singletons(), 3), closed_form=True)


def _gibbs(dtype: torch.dtype) -> None:
    model = models.MaxSpikeSlabSparseCoding(9, 5, dtype=dtype).initialize(_data(dtype))
    SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(Preselection(Singletons(), 3))).step(_data(dtype))


def _scenes(dtype: torch.dtype) -> None:
    y = torch.rand(4, 5, 5, 1, dtype=dtype)
    for order in ("exclusive", "depth"):
        model = models.OcclusiveComponents(3, (5, 5), (2, 2), 1, order=order, dtype=dtype)
        scan = PlaceScan(model.scene_parameters, model.canvas)
        moves = PlacementMoves(model.canvas.grid, parents=2, children=2)
        for affinity in (scan, RefinedPlaces(scan, scan, 2)):
            _train(model, y, PlacementSelection(affinity, 2) + moves, closed_form=True)
        _train(model, y, PlacementCompletion(scan, 2) + moves)


def _psi(dtype: torch.dtype) -> None:
    rows, columns = torch.rand(4, 6, 3, dtype=dtype), torch.rand(3, 3, 5, dtype=dtype)
    for summed in (False, True):
        factors = [factor.clone().requires_grad_() for factor in (*rows, *columns)]
        mixture_products(*factors, sum_rows=summed).sum().backward()


def _mixtures(dtype: torch.dtype) -> None:
    features, group = torch.rand(9, 5, dtype=dtype), torch.arange(9)
    value, index = max_inner_products_in_groups(features, features, group, 9, group.reshape(-1, 1), 1)
    follow_neighbours(features, features, index, value, index, 1)
    square_distances(features, group, group, features, torch.rand(9, 5, 5, dtype=dtype))


def _chains(dtype: torch.dtype) -> None:
    """Sums, sweeps, draws and searches of sets of states along chains."""
    y = _data(dtype).unsqueeze(0)
    for num_chains in (5, 2, 3):
        model = models.FactorialHMM(9, num_chains, dtype=dtype).initialize(y)
        num_states = min(2**num_chains, 8)
        SVI(model, AutoTruncated(model, num_states), ClosedForm(model), Truncated_ELBO()).step(y)
        posterior = model.posterior(y, num_states)
        posterior.search_(BlockSearch(2)).search_(EvolutionarySearch()).sample(1)
    posterior.mode()


_TASKS: dict[str, Task] = {
    "factorial hidden Markov models": _chains,
    "mixtures of many components": _mixtures,
    "models with binary latents": _any_model,
    "models with other latents": _other_latents,
    "models with many sites": _many_sites,
    "binary sparse coding": _causes(models.BinarySparseCoding),
    "preselection": _select,
    "spike-and-slab sparse coding": _causes(models.SpikeSlabSparseCoding),
    "spike-and-slab sparse coding, correlated slabs": _causes(partial(models.SpikeSlabSparseCoding, covariance="full")),
    "noisy-OR": _causes(models.NoisyOr, binary=True),
    "maximal causes": _causes(models.MaximalCauses),
    "maximal causes of counts": _causes(partial(models.ExponentialFamilyMaximalCauses, family="poisson"), binary=True),
    "maximum of slabs": _gibbs,
    "scenes of objects": _scenes,
    "Gaussian process latent variables": _psi,
}


def main() -> None:
    """The command."""
    # The bar says it already.
    logging.getLogger("pyro_truncated").setLevel(logging.ERROR)
    warm_up(progress=True)
    print("All kernels are compiled.")


if __name__ == "__main__":
    main()
