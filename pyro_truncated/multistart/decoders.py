"""Networks that decode states: their refit, and start by a linear model."""

from __future__ import annotations

import copy
from typing import Any, Self

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from torch import Tensor
from torch.distributions import constraints
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import is_parametrized

from pyro_truncated.distributions.linear import LinearSuperposition
from pyro_truncated.em.closed_form import Statistics
from pyro_truncated.em.variable_projection import Decoder, fit_unit_by_unit, make_targets
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.multistart.profile import Profile
from pyro_truncated.program.sites import unwrap
from pyro_truncated.program.supports import get_support
from pyro_truncated.utils.devices import generator_device
from pyro_truncated.utils.parameter_store import load_snapshot, snapshot, spare_random_numbers

Call = tuple[torch.nn.Module, Any, Any]
# Rounding error of scaled and shifted outputs.
_OUTPUT_RTOL = 1e-4
# Of a linear model: least noise in units of the data, least probability, and relative ridge of the M-step.
_SCALE_FLOOR, _PRIOR_FLOOR, _RIDGE = 1e-3, 1e-6, 1e-10


def observed_numbers(guide: AutoTruncated, y: Tensor) -> tuple[Any, dict[str, Any]] | None:
    """Returns a run's nodes and its one observed site of real numbers."""
    with spare_random_numbers(), poutine.block(), torch.no_grad():
        trace: Any = poutine.trace(guide.model).get_trace(y)
    observed = [trace.nodes[name] for name in trace.observation_nodes if name not in guide.layout.sites]
    if len(observed) != 1:
        return None
    fn, mask, value = (observed[0][key] for key in ("fn", "mask", "value"))
    support = get_support(fn)
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    if not (mask is None or mask is True) or unwrap(fn)[1] or support is not constraints.real:
        return None
    return (trace.nodes, observed[0]) if value.dim() > 1 and len(value) == len(y) and bool(value.isfinite().all()) else None


def fit_decoder(guide: AutoTruncated, y: Tensor) -> bool:
    r"""Refits a neural decoder to the present posteriors, unit by unit.

    This is a part of the M-step. The likelihood is normal with one noise, :math:`y \sim \mathcal N(a + b f(s), \sigma^2)`. The network
    :math:`f` minimises :math:`\sum_{ns} q_n(s) \|y_n - a - b f(s)\|^2`. It is fitted to one mean for each distinct state, which is cheap
    beside steps on all data points.

    A program may use the weights elsewhere, as in a prior or a noise, which one run does not show. So the free energy is evaluated
    afterwards, and all weights are restored if it has fallen. Says whether the network has changed.
    """
    layout = guide.layout
    if len(layout.sites) > 1 or layout.other_latents or not layout.space.is_binary or layout.num_data != len(y):
        return False
    calls: list[Call] = []
    handle = register_module_forward_hook(lambda module, arguments, result: calls.append((module, arguments, result)))
    try:
        run = observed_numbers(guide, y)
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
    """The network of the last call, if it decodes states alone."""
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


# --- warm starts by the codes of a linear model ---


def decoder_targets(profile: Profile) -> Tensor | None:
    """Returns the real numbers ``(N, D)`` that a network decodes states into.

    They are in units of their deviation. ``None`` for other models: those with ``draw_start``, shared or continuous latents, several
    discrete sites, frozen networks, counts or missing values, and data in files or several processes.
    """
    y = profile.y
    if not profile.has_decoder or profile.initializer is not None or profile.is_large or profile.has_companion:
        return None
    guide = profile.set_up_guide()
    layout = guide.layout
    is_trainable = bool(profile.layers & profile.parameters.trainable().keys())
    is_whole = profile.num_data == len(y) == layout.num_data and getattr(y, "file", None) is None
    is_one_site = len(layout.sites) == 1 and layout.space.is_binary and layout.space.num_latents > 1
    if not is_trainable or not is_whole or not is_one_site or layout.other_latents:
        return None
    run = observed_numbers(guide, y)
    if run is None:
        return None
    value = run[1]["value"].detach().as_subclass(Tensor).flatten(1).float()
    value = value - value.mean(0)
    unit = value.std(correction=0)
    return value / unit if bool(unit > 0) else None


class LinearCauses(torch.nn.Module):
    r"""Binary sparse coding with an offset, :math:`s_h \sim \mathrm{Bernoulli}(\pi)`, :math:`y \sim \mathcal N(W s + b, \sigma^2 I)`.

    A minimal model for :class:`~pyro_truncated.multistart.multi_start.MultiStart`. Its data are complete, of size one about zero,
    and in one process.
    """

    weight: Tensor  # W, (D, H)
    bias: Tensor  # b, (D,)
    scale: Tensor
    prior: Tensor

    def __init__(self, num_observed: int, num_latents: int) -> None:
        super().__init__()
        self.num_latents = num_latents
        self.register_buffer("weight", torch.zeros(num_observed, num_latents))
        self.register_buffer("bias", torch.zeros(num_observed))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("prior", torch.tensor(min(0.5, 2 / num_latents)))

    def forward(self, y: Tensor) -> None:
        """The model of data ``y (N, D)``."""
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(self.prior).expand([self.num_latents]).to_event(1))
            pyro.sample("y", LinearSuperposition(s, self.weight, self.scale, self.bias), obs=y)

    @torch.no_grad()
    def initialize(self, y: Tensor, generator: torch.Generator | None = None) -> Self:
        """Initialises elements by the shared parts of random data points.

        A part counts if as many data points have it as have a latent active at first. A whole one may explain no other data point.
        """
        prior = min(0.5, 2 / self.num_latents)
        order = torch.randperm(len(y), generator=generator, device=generator_device(generator)).to(y.device)
        rows = y[order.repeat(-(-self.num_latents // len(y)))[: self.num_latents]]
        parts = y @ rows.mT / rows.square().sum(1).clamp(min=torch.finfo(y.dtype).tiny)
        # Not of the first one: that may be the data point itself.
        part = parts.topk(min(len(y), 1 + max(1, round(prior * len(y)))), 0).values[1:].mean(0).nan_to_num()
        # Least share of a data point in an initial element.
        self.weight.copy_(rows.mT * part.clamp(0.1, 1.0))
        self.bias.zero_()
        self.scale.copy_(y.std(correction=0).clamp(min=_SCALE_FLOOR))
        self.prior.fill_(prior)
        return self

    def with_latents(self, index: Tensor) -> Self:
        """Returns a model whose latent ``i`` copies latent ``index[i]``."""
        other = copy.deepcopy(self)
        other.num_latents = len(index)
        other.weight = self.weight[:, index.to(self.weight.device)].clone()
        other.prior = (self.prior * self.num_latents / len(index)).clamp(max=0.5)
        return other

    sufficient_statistics = staticmethod(LinearSuperposition.statistics)

    @torch.no_grad()
    def maximize(self, statistics: Statistics) -> None:
        """Solves least squares, with the offset as an always active element."""
        number, often = statistics["num_data"], statistics["states"]
        moments = torch.cat([torch.cat([statistics["pairs"], often.unsqueeze(1)], 1), torch.cat([often, number.view(1)]).unsqueeze(0)])
        cross = torch.cat([statistics["cross"], statistics["sums"].unsqueeze(1)], 1)
        before = torch.cat([self.weight, self.bias.unsqueeze(1)], 1).to(moments)
        ridge = _RIDGE * moments.diagonal().mean() * torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
        solution = before + torch.linalg.solve(moments + ridge, cross - before @ moments, left=False)
        self.weight.copy_(solution[:, :-1])
        self.bias.copy_(solution[:, -1])
        errors = LinearSuperposition(often, solution[:, :-1], 1.0, solution[:, -1], validate_args=False).square_error(statistics)
        self.scale.copy_((errors.sum() / statistics["observed"].sum()).clamp(min=0.0).sqrt().clamp(min=_SCALE_FLOOR))
        self.prior.copy_((often.mean() / number).clamp(_PRIOR_FLOOR, 1 - _PRIOR_FLOOR))
