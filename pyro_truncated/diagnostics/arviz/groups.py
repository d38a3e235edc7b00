"""The groups of ArviZ data that one guide makes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr

from pyro_truncated.diagnostics.arviz.data_labels import LabelledTensor
from pyro_truncated.diagnostics.arviz.drawn import Draws
from pyro_truncated.diagnostics.arviz.draws import draw
from pyro_truncated.diagnostics.arviz.predictive_draws import affordable, conditional_likelihoods, posterior_draws, prior_draws
from pyro_truncated.diagnostics.arviz.site_values import is_discrete, variable_name
from pyro_truncated.diagnostics.arviz.writer import Coords, Dims, Writer

ON_DATA = (
    "observed_data",
    "prior_predictive",
    "posterior_predictive",
    "marginal_predictive",
    "log_likelihood",
    "log_likelihood_conditional",
)
_VALUES = ON_DATA[:4]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What :func:`~pyro_truncated.to_arviz` was asked for; see there."""

    num_samples: int
    num_chains: int
    num_predictive: int
    conditional_log_likelihood: bool
    dims: Dims
    coords: Coords
    memory_budget: int
    labelled: tuple[LabelledTensor, ...] = ()


def groups_of(
    model: Callable[..., Any], guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings
) -> dict[str, xr.Dataset]:
    """The groups of one guide, without empty ones."""
    draws = draw(model, guide, args, kwargs, settings.num_samples * settings.num_chains)
    arguments = _arguments(model, args, kwargs)
    writer = Writer(draws, settings.dims, settings.coords, settings.memory_budget, arguments, settings.num_chains, settings.labelled)
    datasets = {"posterior": writer.posterior(), "sample_stats": writer.sample_stats(), "log_likelihood": writer.log_likelihood()}
    if settings.conditional_log_likelihood:
        datasets["log_likelihood_conditional"] = writer.log_likelihood_conditional(conditional_likelihoods(model, draws, args, kwargs))
    datasets["log_prior"] = writer.log_prior()
    if settings.num_predictive:
        datasets |= _predictive(model, draws, writer, args, kwargs, settings)
    datasets["observed_data"] = writer.observed_data()
    datasets["constant_data"] = writer.constant_data(arguments)
    if draws.states is not None:
        size = draws.states.part.space.size
        # Of a space beyond the integers that files hold, the size does not matter.
        limits = {"num_states": draws.states.part.num_states} | ({"num_joint_states": size} if size < 2**31 else {})
        datasets["truncated_posterior"] = writer.truncated_posterior(draws.states).assign_attrs(limits)
    datasets = _without_unseen(datasets, draws, writer)
    attrs = {
        "point_estimates_only": int(not _has_parameters_drawn(draws)),
        "latents_of_data_points": ", ".join(sorted(map(variable_name, draws.local))),
    }
    return {name: data.assign_attrs(attrs) for name, data in datasets.items() if data.sizes or data.data_vars}


def _without_unseen(datasets: dict[str, xr.Dataset], draws: Draws, writer: Writer) -> dict[str, xr.Dataset]:
    """Drops data points without observations from the groups on data.

    Their likelihoods would be taken for observations.
    """
    seen = draws.observed()
    if seen is None:
        return datasets
    (plate,) = writer.datum
    chosen = {plate: seen.nonzero().squeeze(-1).numpy()}
    kept = {name: data.isel(chosen) if name in ON_DATA and plate in data.dims else data for name, data in datasets.items()}
    return _counted(kept, [variable_name(name) for name, node in draws.nodes.items() if is_discrete(node["fn"])])


def _counted(datasets: dict[str, xr.Dataset], names: Sequence[str]) -> dict[str, xr.Dataset]:
    """Returns counts as integers once hidden entries are gone."""
    data = datasets["observed_data"]
    whole = [name for name in names if name in data and data[name].dtype.kind == "f" and bool((data[name] == data[name].round()).all())]
    return {
        group: values.assign({name: values[name].astype(np.int32) for name in whole if name in values}) if group in _VALUES else values
        for group, values in datasets.items()
    }


def _has_parameters_drawn(draws: Draws) -> bool:
    """Whether some global latent has a posterior that is no point."""
    if draws.states is not None and not draws.states.part.layout.plates:
        return True
    return any(_varies(values) for name, values in draws.latents.items() if name not in draws.local)


def _varies(values: torch.Tensor) -> bool:
    return len(values) == 1 or bool((values != values[:1]).any())


def _predictive(
    model: Callable[..., Any], draws: Draws, writer: Writer, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings
) -> dict[str, xr.Dataset]:
    chains, wanted = settings.num_chains, settings.num_predictive
    count = max(1, affordable(wanted * chains, draws.nodes, settings.memory_budget) // chains)
    # The first draws of each chain.
    chosen = [chain * settings.num_samples + position for chain in range(chains) for position in range(count)]
    latents, observed = prior_draws(model, args, kwargs, len(chosen))
    results = {
        "prior": latents,
        "prior_predictive": observed,
        "posterior_predictive": posterior_draws(model, draws, args, kwargs, chosen, anew=False),
    }
    if draws.local:
        results["marginal_predictive"] = posterior_draws(model, draws, args, kwargs, chosen, anew=True)
    note = {"omitted": f"all but {count} of {wanted} draws per chain: over the memory budget"} if count < wanted else {}
    return {name: writer.sites(values).assign_attrs(note) for name, values in results.items()}


def _arguments(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The model's arguments by name."""
    called = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        return dict(inspect.signature(called).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {f"argument_{position}": value for position, value in enumerate(args)} | dict(kwargs)
