"""Networks that decode states: data in parts, and a refit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer import SVI
from torch import Tensor
from torch.distributions import constraints
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import is_parametrized

from pyro_truncated import ops
from pyro_truncated.em.variable_projection import Decoder, fit_unit_by_unit, make_targets
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.multistart.profile import Profile
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.sites import is_masked
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.utils.parameter_store import load_snapshot, snapshot, spare_random_numbers

Call = tuple[torch.nn.Module, Any, Any]
# Rows of a part; most parts, each of which has a guide.
_ROWS_PER_PART, _MAX_PARTS = 150, 32
# Rounding error of equal log joints; of scaled and shifted outputs.
_SCORE_RTOL, _OUTPUT_RTOL = 1e-3, 1e-4


class Parts:
    """A model's data in parts, each with a guide, trained in turn.

    Rows of a part lie as far apart as there are parts: data are often in some order.

    Args:
        y: all data.
        guide: that of all data, which says what the parts begin with, and gets what they have found.
        rows: the parts.
        guides: one for each of them.
        elbo: the loss, whose search and temperature are theirs.
    """

    def __init__(
        self, y: Tensor, guide: AutoTruncated, rows: Sequence[Tensor], guides: Sequence[AutoTruncated], elbo: Truncated_ELBO
    ) -> None:
        self._y, self._guide, self._rows, self._guides, self._elbo = y, guide, rows, guides, elbo
        self._elbos = [Truncated_ELBO(elbo.search, temperature=elbo.temperature) for _ in guides]
        self.number, self._have_begun = len(guides), False

    def step(self, svi: SVI) -> float:
        """Passes over all parts; returns the summed loss before each step."""
        if not self._have_begun:
            population = self._guide.population()
            for first, guide in enumerate(self._guides):
                words, log_joint = (self._part(value, first).clone() for value in (population.words, population.log_joint))
                guide.populations.store_(log_joint, None, words)
            self._have_begun = True
        loss = 0.0
        for rows, guide, elbo in zip(self._rows, self._guides, self._elbos, strict=True):
            elbo.search = self._elbo.search
            loss += float(SVI(svi.model, guide, svi.optim, elbo).step(rows))
        return loss

    @torch.no_grad()
    def collect(self) -> None:
        """Collects all states, with log joints under the present model."""
        if not self._have_begun:
            return
        population = self._guide.population()
        words, log_joint = population.words.clone(), population.log_joint.clone()
        for first, guide in enumerate(self._guides):
            found = guide.population()
            self._part(words, first).copy_(found.words)
            self._part(log_joint, first).copy_(found.log_joint)
        self._guide.populations.store_(log_joint, None, words)
        self._guide.refresh_(self._y)

    def _part(self, rows: Tensor, first: int) -> Tensor:
        return rows[first :: self.number]


def split_data(profile: Profile, guide: Any, elbo: Any) -> Parts | None:
    """Returns the parts of a network's data, ``None`` for other models.

    Data points must share no latents, and lie in one process.

    Programs whose parts differ from all data are trained on all at once. They hold other data beside these rows, look at neighbours, or
    observe something of no data point, which would count once for each part.
    """
    y = profile.y
    if not profile.is_network or not profile.is_by_gradients or profile.has_companion or profile.is_conditional or profile.is_product:
        return None
    number = min(_MAX_PARTS, len(y) // _ROWS_PER_PART)
    is_whole = guide.layout.num_data == len(y) == profile.num_data and getattr(y, "file", None) is None
    if number < 2 or not is_whole:
        return None
    with spare_random_numbers(), poutine.block(), torch.no_grad():
        guide.populations.seed_()
        whole = guide.make_batch(y)
        words = whole.population().words[:, :1]
        scores = whole.scorer.score(words)
        if float(whole.outside().detach()) != 0.0:
            return None
        parts, guides = [y.as_subclass(Tensor)[first::number].contiguous() for first in range(number)], []
        for first, rows in enumerate(parts):
            own = profile.make_guide()
            own.populations.seed = ops.mix_bits(guide.populations.seed, first)
            try:
                own.setup(rows)
            except Exception:  # any error of a program that takes all rows only
                return None
            is_alike = own.layout.num_data == len(rows) and own.space.cardinalities == guide.space.cardinalities
            if not is_alike or own.num_states != guide.num_states:
                return None
            guides.append(own)
        for first, (rows, own) in enumerate(zip(parts, guides, strict=True)):
            # The states of a part keep their log joints.
            expected, found = scores[first::number], own.make_scorer(rows).score(words[first::number])
            if found.shape != expected.shape or not torch.allclose(found, expected, rtol=_SCORE_RTOL, atol=_SCORE_RTOL):
                return None
    return Parts(y, guide, parts, guides, elbo)


def observed_numbers(model: Any, y: Tensor, layout: Layout) -> tuple[Any, dict[str, Any]] | None:
    """Returns a run's nodes and its one observed site of real numbers."""
    with spare_random_numbers(), poutine.block(), torch.no_grad():
        trace = poutine.trace(model).get_trace(y)
    observed = [trace.nodes[name] for name in trace.observation_nodes if name not in layout.sites]
    if len(observed) != 1:
        return None
    fn, mask, value = (observed[0][key] for key in ("fn", "mask", "value"))
    if not (mask is None or mask is True) or is_masked(fn) or not _is_real(fn):
        return None
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
    if found is None or not _has_one_scale(found[1]):
        return False
    nodes, observed = found
    (state,), mean, value = (nodes[name]["value"] for name in layout.sites), observed["fn"].mean, observed["value"]
    for position, (network, arguments, decoded) in enumerate(calls):
        if not _is_decoded(arguments, decoded, state, mean):
            continue
        decoder = _decoder_in(network, decoded, calls[:position])
        if decoder is None or not (unit := _output_scale(mean, decoded)) or not _are_apart(network, arguments[0], decoded):
            continue
        means = (value.as_subclass(Tensor).double() - (mean - unit * decoded).double().mean(0)) / unit
        before = snapshot(network.parameters())
        is_fitted = fit_unit_by_unit(decoder, make_targets(guide.population(), means, arguments[0].dtype))
        with spare_random_numbers(), poutine.block():
            is_better = is_fitted and bool(guide.posterior(y).free_energy().sum() >= guide.population().free_energy().sum())
        if is_fitted and not is_better:
            load_snapshot(network.parameters(), before)
        return is_better
    return False


def _decoder_in(network: torch.nn.Module, decoded: Tensor, calls: list[Call]) -> Decoder | None:
    """Finds a network that ends in two learned linear layers."""
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


def _output_scale(mean: Tensor, decoded: Tensor) -> float:
    """Returns the factor ``b`` of means ``a + b f(s)``, else zero."""
    parts = decoded - decoded.mean(0), mean - mean.mean(0)
    square = float(parts[0].square().sum())
    unit = float((parts[0] * parts[1]).sum()) / square if square > 0 else 0.0
    return unit if float((parts[1] - unit * parts[0]).square().sum()) <= _OUTPUT_RTOL**2 * unit**2 * square else 0.0


@torch.no_grad()
def _are_apart(network: torch.nn.Module, states: Tensor, decoded: Tensor) -> bool:
    """Whether a network decodes each state alone: no dropout, no batch normalisation."""
    half = len(states) // 2
    with spare_random_numbers():
        return torch.allclose(network(states[:half]), decoded[:half], rtol=_OUTPUT_RTOL, atol=_OUTPUT_RTOL * float(decoded.abs().max()))


def _has_one_scale(site: dict[str, Any]) -> bool:
    """Whether data are normal about their means with one deviation."""
    base = site["fn"]
    while hasattr(base, "base_dist") and not isinstance(base, torch.distributions.TransformedDistribution):
        base = base.base_dist
    is_normal = isinstance(base, torch.distributions.Normal) and float(base.scale.min()) == float(base.scale.max())
    return is_normal and torch.as_tensor(site["scale"]).numel() == 1


def _is_real(fn: Any) -> bool:
    """Whether a distribution says that it is one of real numbers."""
    try:
        support = fn.support
    except NotImplementedError:
        return False
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support is constraints.real
