"""Networks that decode states, refitted to them."""

from __future__ import annotations

from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor
from torch.distributions import constraints
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import is_parametrized

from pyro_truncated.em.variable_projection import Decoder, fit_unit_by_unit, make_targets
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.sites import is_masked
from pyro_truncated.program.supports import get_support
from pyro_truncated.utils.parameter_store import load_snapshot, snapshot, spare_random_numbers

Call = tuple[torch.nn.Module, Any, Any]
# Rounding error of scaled and shifted outputs.
_OUTPUT_RTOL = 1e-4


def observed_numbers(model: Any, y: Tensor, layout: Layout) -> tuple[Any, dict[str, Any]] | None:
    """Returns a run's nodes and its one observed site of real numbers."""
    with spare_random_numbers(), poutine.block(), torch.no_grad():
        trace = poutine.trace(model).get_trace(y)
    observed = [trace.nodes[name] for name in trace.observation_nodes if name not in layout.sites]
    if len(observed) != 1:
        return None
    fn, mask, value = (observed[0][key] for key in ("fn", "mask", "value"))
    support = get_support(fn)
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    if not (mask is None or mask is True) or is_masked(fn) or support is not constraints.real:
        return None
    return (trace.nodes, observed[0]) if value.dim() > 1 and len(value) == len(y) and bool(value.isfinite().all()) else None


def fit_decoder(model: Any, y: Tensor, guide: AutoTruncated) -> bool:
    r"""Refits a neural decoder to the present posteriors, unit by unit.

    This is a part of the M-step. The likelihood is normal with one noise, :math:`y \sim \mathcal N(a + b f(s), \sigma^2)`. The network
    :math:`f` minimises :math:`\sum_{ns} q_n(s) \|y_n - a - b f(s)\|^2`. It is fitted to one mean for each distinct state, which is cheap
    beside steps on all data points.

    A program may use the weights elsewhere, as in a prior or a noise, which one run does not show. So the free energy is evaluated
    afterwards, and all weights are restored if it has fallen.

    Returns:
        Whether the network has changed.
    """
    layout = guide.layout
    if len(layout.sites) > 1 or layout.other_latents or not layout.space.is_binary or layout.num_data != len(y):
        return False
    calls: list[Call] = []
    handle = register_module_forward_hook(lambda module, arguments, result: calls.append((module, arguments, result)))
    try:
        run = observed_numbers(model, y, layout)
    finally:
        handle.remove()
    if run is None:
        return False
    nodes, site = run
    base = site["fn"]
    while hasattr(base, "base_dist") and not isinstance(base, torch.distributions.TransformedDistribution):
        base = base.base_dist
    # Squared errors are the likelihood of normal data with one deviation.
    has_one_scale = isinstance(base, torch.distributions.Normal) and float(base.scale.min()) == float(base.scale.max())
    if not has_one_scale or torch.as_tensor(site["scale"]).numel() != 1:
        return False
    (state,), mean, value = (nodes[name]["value"] for name in layout.sites), site["fn"].mean, site["value"]
    for position, (network, arguments, output) in enumerate(calls):
        decoder = _find_decoder(calls[: position + 1], state, mean)
        if decoder is None or not (unit := _output_scale(mean, output)) or not _decodes_rows_alone(network, arguments[0], output):
            continue
        means = (value.as_subclass(Tensor).double() - (mean - unit * output).double().mean(0)) / unit
        before, energy = snapshot(network.parameters()), _rescore(guide, y)
        if not fit_unit_by_unit(decoder, make_targets(guide.population(), means, arguments[0].dtype)):
            return False
        is_better = _rescore(guide, y) >= energy
        if not is_better:
            load_snapshot(network.parameters(), before)
            _rescore(guide, y)
        return is_better
    return False


@torch.no_grad()
def _rescore(guide: AutoTruncated, y: Tensor) -> float:
    """Scores the stored states anew; returns their free energy."""
    with spare_random_numbers(), poutine.block():
        guide.refresh_(y)
        return float(guide.population().free_energy().sum())


def _find_decoder(calls: list[Call], state: Tensor, mean: Tensor) -> Decoder | None:
    """Returns the network of the last call, if it decodes states alone.

    It must end in two trainable linear layers, and its output must have the shape of the observed means.
    """
    *earlier, (network, arguments, output) = calls
    if len(arguments) != 1 or not isinstance(arguments[0], Tensor) or not isinstance(output, Tensor) or output.dim() != 2:
        return None
    states = arguments[0]
    if not states.is_floating_point() or output.shape != mean.shape or not torch.equal(states, state.to(states)):
        return None
    own = set(network.modules())
    layers = [(part, result) for part, _, result in earlier if part in own and isinstance(part, torch.nn.Linear)]
    if len(layers) < 2 or not torch.equal(layers[-1][1], output):
        return None
    (hidden, _), (last, _) = layers[-2:]
    are_trainable = all(value.requires_grad for layer in (hidden, last) for value in layer.parameters(recurse=False)) and not any(
        is_parametrized(layer) for layer in (hidden, last)
    )
    fits = hidden.out_features == last.in_features and [part for part, _ in layers].count(last) == 1
    return Decoder(network, hidden, last) if are_trainable and fits else None


def _output_scale(mean: Tensor, output: Tensor) -> float:
    """Returns the factor ``b`` of means ``a + b f(s)``, else zero."""
    parts = output - output.mean(0), mean - mean.mean(0)
    square = float(parts[0].square().sum())
    unit = float((parts[0] * parts[1]).sum()) / square if square > 0 else 0.0
    return unit if float((parts[1] - unit * parts[0]).square().sum()) <= _OUTPUT_RTOL**2 * unit**2 * square else 0.0


@torch.no_grad()
def _decodes_rows_alone(network: torch.nn.Module, states: Tensor, output: Tensor) -> bool:
    """Whether a network decodes each state alone: no dropout, no batch normalisation."""
    half = len(states) // 2
    with spare_random_numbers():
        return torch.allclose(network(states[:half]), output[:half], rtol=_OUTPUT_RTOL, atol=_OUTPUT_RTOL * float(output.abs().max()))
