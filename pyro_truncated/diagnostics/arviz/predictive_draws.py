"""Predictive draws: prior, posterior, and of new data points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_truncated.diagnostics.arviz.drawn import Draws, Sites, likelihoods_given_all
from pyro_truncated.diagnostics.arviz.roles import FreeData, is_data, is_factor
from pyro_truncated.program.sites import sample_nodes
from pyro_truncated.utils.isolation import Assign, isolated


def affordable(num_samples: int, sites: Mapping[str, Any], memory_budget: int) -> int:
    """Returns how many draws of the largest site fit into the budget.

    At least one, at most ``num_samples``.
    """
    largest = max((torch.as_tensor(node["value"]).numel() for node in sites.values()), default=1)
    return max(1, min(num_samples, memory_budget // (4 * max(1, largest))))


def prior_draws(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], num_samples: int) -> tuple[Sites, Sites]:
    """Draws latents, computed values and observations ``(draws, *shape)``.

    Parameters are as they are.
    """
    latents: dict[str, list[Tensor]] = {}
    observed: dict[str, list[Tensor]] = {}
    for _ in range(num_samples):
        _sort(_free_run(model, {}, args, kwargs), latents, observed)
    return _stacked(latents), _stacked(observed)


def posterior_draws(
    model: Callable[..., Any], draws: Draws, args: tuple[Any, ...], kwargs: Mapping[str, Any], chosen: Sequence[int], *, anew: bool
) -> Sites:
    """Observations drawn given draws of the latents, ``(draws, *shape)`` by site.

    Args:
        model: the model.
        draws: of the latents.
        args: the model's arguments.
        kwargs: its keyword arguments.
        chosen: which of the draws.
        anew: keep only the global latents of the draws, and draw those of data points from their prior: predictions
            of unseen data points. Otherwise the data points that were inferred are repeated, which favours the model.
    """
    observed: dict[str, list[Tensor]] = {}
    left_out = draws.local if anew else frozenset()
    for position in chosen:
        values = {name: value for name, value in draws.values(position).items() if name not in left_out}
        _sort(_free_run(model, values, args, kwargs), {}, observed)
    return _stacked(observed)


def conditional_likelihoods(model: Callable[..., Any], draws: Draws, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sites:
    """Log likelihoods of the observations given all drawn latents, ``(draws, *batch shape)`` by site."""
    found: dict[str, list[Tensor]] = {}
    for position in range(len(draws.lp)):
        with isolated(), Assign(draws.values(position)):
            trace = poutine.trace(model).get_trace(*args, **kwargs)
        trace.compute_log_prob()
        for name, value in likelihoods_given_all(sample_nodes(trace)).items():
            found.setdefault(name, []).append(value.detach().cpu())
    return _stacked(found)


def _free_run(model: Callable[..., Any], values: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the model without observations, with some latents given."""
    with isolated(), Assign(values), FreeData():
        return sample_nodes(poutine.trace(model).get_trace(*args, **kwargs))


def _sort(nodes: Mapping[str, Any], latents: dict[str, list[Tensor]], observed: dict[str, list[Tensor]]) -> None:
    for name, node in nodes.items():
        if not is_factor(node):
            target = observed if is_data(node) else latents
            target.setdefault(name, []).append(torch.as_tensor(node["value"]).detach().cpu())


def _stacked(values: Mapping[str, list[Tensor]]) -> Sites:
    return {name: torch.stack(draws) for name, draws in values.items()}
