"""The neural decoder of a program, and its targets."""

from __future__ import annotations

from typing import Any

import pyro.poutine as poutine
import torch
from pyro.distributions import MaskedDistribution
from torch import Tensor
from torch.distributions import constraints
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import is_parametrized

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.layout import Layout
from pyro_truncated.states.population import Population
from pyro_truncated.training.hidden_units import Decoder, Targets, fit_unit_by_unit
from pyro_truncated.utils.isolation import spare_random_numbers
from pyro_truncated.utils.parameter_store import load_snapshot, snapshot

Call = tuple[torch.nn.Module, Any, Any]
# Rounding error of scaled and shifted outputs.
_EQUAL = 1e-4
# Expected data points of a state below which it does not count.
_RARE = 1e-3


def observed_numbers(model: Any, y: Tensor, layout: Layout) -> tuple[Any, dict[str, Any]] | None:
    """Returns a run's nodes and its only observed site, if real-valued.

    All its entries must count.
    """
    with spare_random_numbers(), poutine.block(), torch.no_grad():
        trace = poutine.trace(model).get_trace(y)
    observed = [trace.nodes[name] for name in trace.observation_nodes if name not in layout.sites]
    if len(observed) != 1 or _is_masked(observed[0]) or not _is_real(observed[0]["fn"]):
        return None
    value = observed[0]["value"]
    return (trace.nodes, observed[0]) if value.dim() > 1 and len(value) == len(y) and bool(value.isfinite().all()) else None


def fit_decoder(model: Any, y: Tensor, guide: AutoTruncated) -> bool:
    r"""Refits a neural decoder to the present posteriors, unit by unit.

    This is a part of the M-step. The likelihood is normal with one noise, :math:`y \sim \mathcal N(a + b f(s), \sigma^2)`. The network
    :math:`f` minimises :math:`\sum_{ns} q_n(s) \|y_n - a - b f(s)\|^2`. It is fitted to one mean for each distinct state, which is cheap
    beside steps on all data points.

    A program may use the weights elsewhere, as in a prior or a noise, which one run does not show. So the free energy is evaluated
    afterwards, and all weights are restored if it has fallen.

    Args:
        model: any model; those in which there is no such network stay as they are.
        y: its data, ``(N, ...)``.
        guide: its posteriors, with log joints under the model as it is.

    Returns:
        Whether the network has changed.
    """
    layout = guide.layout
    if len(layout.sites) > 1 or layout.other_latents or not layout.space.is_binary:
        return False
    calls: list[Call] = []
    handle = register_module_forward_hook(lambda module, arguments, result: calls.append((module, arguments, result)))
    try:
        found = observed_numbers(model, y, layout)
    finally:
        handle.remove()
    if found is None or not _has_one_noise(found[1]):
        return False
    nodes, observed = found
    (state,), mean, value = (nodes[name]["value"] for name in layout.sites), observed["fn"].mean, observed["value"]
    for position, (network, arguments, decoded) in enumerate(calls):
        if not _is_decoded(arguments, decoded, state, mean):
            continue
        decoder = _decoder_in(network, decoded, calls[:position])
        if decoder is None or not (unit := _unit_of(mean, decoded)) or not _are_apart(network, arguments[0], decoded):
            continue
        means = (value.as_subclass(Tensor).double() - (mean - unit * decoded).double().mean(0)) / unit
        before = snapshot(network.parameters())
        is_fitted = fit_unit_by_unit(decoder, targets_of(guide.population(), means, arguments[0].dtype))
        is_better = is_fitted and _free_energy(guide, y) >= float(guide.population().free_energy().sum())
        if is_fitted and not is_better:
            load_snapshot(network.parameters(), before)
        return is_better
    return False


def targets_of(population: Population, values: Tensor, dtype: torch.dtype) -> Targets:
    """Returns distinct states and the mean values ``(N, D)`` of each.

    Of more states than data points these are the commonest: otherwise the fit would be dearer than the steps.
    """
    weights = population.weights(dtype=torch.float64)
    words, place = population.words.flatten(0, 1).unique(dim=0, return_inverse=True)
    number = values.new_zeros(len(words)).index_add_(0, place, weights.flatten())
    often = number.topk(min(len(number), len(population))).indices
    often = often[number[often] > _RARE]
    # By states: all values at once would be many times the data.
    place = place.new_full((len(words),), len(often)).index_copy_(0, often, torch.arange(len(often), device=often.device))[place]
    place, words, number = place.view(weights.shape), words[often], number[often]
    center = values.mean(0)
    values, sums = values - center, values.new_zeros(len(often) + 1, values.shape[1])
    for state in range(population.num_states):
        sums.index_add_(0, place[:, state], weights[:, state, None] * values)
    means, counted = sums[:-1] / number.unsqueeze(1), (weights * (place < len(often))).sum(1)
    rest = float(counted @ values.square().sum(1) - number @ means.square().sum(1))
    return Targets(population.space.unpack(words).to(dtype), number, means + center, max(rest, 0.0))


def _free_energy(guide: AutoTruncated, y: Tensor) -> float:
    """Returns the free energy of all data with present states."""
    with spare_random_numbers(), poutine.block():
        return float(guide.posterior(y).free_energy().sum())


def _decoder_in(network: torch.nn.Module, decoded: Tensor, calls: list[Call]) -> Decoder | None:
    """Finds a network that ends in two learned linear layers.

    It is found by the calls of its parts.
    """
    own = set(network.modules())
    layers = [(part, result) for part, _, result in calls if part in own and isinstance(part, torch.nn.Linear)]
    if len(layers) < 2 or not torch.equal(layers[-1][1], decoded):
        return None
    (hidden, _), (last, _) = layers[-2:]
    are_learned = all(value.requires_grad for layer in (hidden, last) for value in layer.parameters(recurse=False)) and not any(
        is_parametrized(layer) for layer in (hidden, last)
    )
    fits = hidden.out_features == last.in_features and [part for part, _ in layers].count(last) == 1
    return Decoder(network, hidden, last) if are_learned and fits else None


def _is_decoded(arguments: Any, decoded: Any, state: Tensor, mean: Tensor) -> bool:
    """Whether a call decoded states alone into the observed means."""
    if len(arguments) != 1 or not isinstance(arguments[0], Tensor) or not isinstance(decoded, Tensor) or decoded.dim() != 2:
        return False
    given = arguments[0]
    return given.is_floating_point() and given.shape == state.shape and decoded.shape == mean.shape and torch.equal(given, state.to(given))


def _unit_of(mean: Tensor, decoded: Tensor) -> float:
    """Returns the factor ``b`` of means ``a + b f(s)``, else zero."""
    parts = decoded - decoded.mean(0), mean - mean.mean(0)
    square = float(parts[0].square().sum())
    unit = float((parts[0] * parts[1]).sum()) / square if square > 0 else 0.0
    return unit if float((parts[1] - unit * parts[0]).square().sum()) <= _EQUAL**2 * unit**2 * square else 0.0


@torch.no_grad()
def _are_apart(network: torch.nn.Module, states: Tensor, decoded: Tensor) -> bool:
    """Whether a network decodes each state alone and deterministically.

    Batch normalisation and dropout do not.
    """
    half = len(states) // 2
    with spare_random_numbers():
        return torch.allclose(network(states[:half]), decoded[:half], rtol=_EQUAL, atol=_EQUAL * float(decoded.abs().max()))


def _has_one_noise(site: dict[str, Any]) -> bool:
    """Whether data are normal about their means with one deviation."""
    base = site["fn"]
    while hasattr(base, "base_dist") and not isinstance(base, torch.distributions.TransformedDistribution):
        base = base.base_dist
    is_normal = isinstance(base, torch.distributions.Normal) and float(base.scale.min()) == float(base.scale.max())
    return is_normal and torch.as_tensor(site["scale"]).numel() == 1


def _is_masked(site: dict[str, Any]) -> bool:
    """Whether some of what is observed does not count."""
    if not (site["mask"] is None or site["mask"] is True):
        return True
    fn = site["fn"]
    while hasattr(fn, "base_dist"):
        if isinstance(fn, MaskedDistribution):
            return True
        fn = fn.base_dist
    return False


def _is_real(fn: Any) -> bool:
    """Whether a distribution says that it is one of real numbers."""
    try:
        support = fn.support
    except NotImplementedError:
        return False
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support is constraints.real
