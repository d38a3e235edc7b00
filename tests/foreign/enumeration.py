"""Brute force: a plain run of the model for every joint state of its discrete latents, and sums of log probabilities.

Nothing here uses the library. The discrete latents are found while the model runs, so supports and even the presence of a site may depend
on the values of others. All members of the data plates get the same state in a run: they are independent given everything else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import constraints


@dataclasses.dataclass(frozen=True)
class Site:
    """What one run has seen of a discrete latent: its value for one data point (inner plates, then event), kind and lowest value."""

    value: Tensor
    kind: str
    low: int


@dataclasses.dataclass(frozen=True)
class Enumeration:
    """Log joints ``(T, N)`` of all states, the states, and the log probability of what lies outside of the data plates."""

    log_joint: Tensor
    states: list[dict[str, Site]]
    outside: Tensor
    scale: float

    def evidence(self) -> Tensor:
        """Scaled log evidence of all data, with the densities of given continuous latents."""
        return self.scale * self.log_joint.logsumexp(0).sum() + self.outside

    def marginals(self) -> dict[str, Tensor]:
        """Probability of 1 at Boolean sites ``(N, *shape)``, of each value at others ``(N, *shape, V)``."""
        weights = self.log_joint.detach().softmax(0)
        found = {}
        for name, first in self.states[0].items():
            values = torch.stack([state[name].value for state in self.states]).double()
            if first.kind == "integer":
                levels = (values - first.low).long()
                values = torch.nn.functional.one_hot(levels, int(levels.max()) + 1).double()
            found[name] = torch.tensordot(weights.T.double(), values, 1)
        return found


class _Choose(Messenger):
    """Gives the discrete latents the values that a list of positions picks, and the others those that are given."""

    def __init__(self, positions: Sequence[int], plates: Sequence[str], max_count: Mapping[str, int], given: Mapping[str, Any]) -> None:
        super().__init__()
        self.positions, self.plates, self.max_count, self.given = positions, plates, max_count, given
        self.counts: list[int] = []
        self.sites: dict[str, Site] = {}

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if name in self.given and not msg["is_observed"]:
            msg["value"] = self.given[name]
        elif not msg["is_observed"] and not _is_subsample(msg) and fn.support.is_discrete:
            step = len(self.counts)
            kind, low, entries = _entries(msg, self.plates, self.max_count)
            self.counts.append(math.prod(map(len, entries)))
            position = self.positions[step] if step < len(self.positions) else 0
            value = torch.stack(_pick(entries, position))
            self.sites[name] = Site(value.reshape(_inner_shape(msg, self.plates, kind)), kind, low)
            msg["value"] = value.reshape(_shape(msg, self.plates)).expand(fn.shape()).clone().to(_dtype(fn))


def _pick(entries: Sequence[list[Tensor]], position: int) -> list[Tensor]:
    """The ``position``-th element of the product of the entries' values."""
    chosen = []
    for values in reversed(entries):
        position, remainder = divmod(position, len(values))
        chosen.append(values[remainder])
    return chosen[::-1]


def _entries(msg: Any, plates: Sequence[str], max_count: Mapping[str, int]) -> tuple[str, int, list[list[Tensor]]]:
    """Kind, lowest value, and for each entry of a site (of one data point) its possible values."""
    support, shape = msg["fn"].support, _shape(msg, plates)
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if support is constraints.one_hot:
        return "one_hot", 0, [list(torch.eye(shape[-1]))] * math.prod(shape[:-1])
    if support is constraints.boolean:
        low, high, kind = torch.tensor(0), torch.tensor(1), "boolean"
    else:
        low, kind = torch.as_tensor(getattr(support, "lower_bound", 0)), "integer"
        high = torch.as_tensor(getattr(support, "upper_bound", max_count.get(msg["name"], -1))).long()
        assert bool((high >= 0).all()), f"the brute force needs a bound of site {msg['name']}"
        high = high.clamp(max=max_count.get(msg["name"], int(high.max())))
    full = high.expand(msg["fn"].shape())
    for dim in _data_dims(msg, plates):
        full = full.amax(dim - len(msg["fn"].event_shape), keepdim=True)
    lowest = int(low.min())
    return kind, lowest, [[torch.tensor(v) for v in range(lowest, int(top) + 1)] for top in full.flatten()]


def _is_subsample(msg: Any) -> bool:
    return type(msg["fn"]).__name__ == "_Subsample"


def _is_discrete_latent(node: Any) -> bool:
    return not node["is_observed"] and bool(node["fn"].support.is_discrete)


def _data_dims(msg: Any, plates: Sequence[str]) -> list[int]:
    return sorted(frame.dim for frame in msg["cond_indep_stack"] if frame.name in plates)


def _shape(msg: Any, plates: Sequence[str]) -> list[int]:
    """Shape of a site's value with size one at the data plates."""
    shape = list(msg["fn"].shape())
    for dim in _data_dims(msg, plates):
        shape[dim - len(msg["fn"].event_shape)] = 1
    return shape


def _inner_shape(msg: Any, plates: Sequence[str], kind: str) -> list[int]:
    """Shape of a site's value for one data point: inner plates, then the event (one-hot: the classes last)."""
    inner = sorted((f for f in msg["cond_indep_stack"] if f.vectorized and f.name not in plates), key=lambda f: f.dim)
    return [*(frame.size for frame in inner), *msg["fn"].event_shape]


def _dtype(fn: Any) -> torch.dtype:
    with torch.random.fork_rng(devices=[]):
        dtype: torch.dtype = fn.sample().dtype
    return dtype


def enumerate_states(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    plates: Sequence[str],
    max_count: Mapping[str, int] | None = None,
    given: Mapping[str, Any] | None = None,
    max_states: int = 5000,
) -> Enumeration:
    """All joint states of a model's discrete latents with their log joints, differentiable in parameters and given values."""
    columns, states, outsides = [], [], []
    positions: list[int] | None = []
    scale = 1.0
    while positions is not None:
        chooser = _Choose(positions, plates, max_count or {}, given or {})
        with pyro.validation_enabled(False), poutine.block(hide_fn=lambda msg: msg["type"] != "param"), chooser:
            trace = poutine.trace(model).get_trace(*args, **kwargs)
        nodes = [node for node in trace.nodes.values() if node["type"] == "sample" and not _is_subsample(node)]
        scale = next((float(node["scale"]) for node in nodes if node["name"] in chooser.sites), 1.0)
        inside, outside = _log_probs(nodes, plates, scale)
        columns.append(inside)
        states.append(chooser.sites)
        outsides.append(outside)
        positions = _next(positions, chooser.counts)
        assert len(columns) <= max_states, "too many states for the brute force"
    spread = torch.stack([outside.detach() for outside in outsides])
    assert bool((spread - spread[0]).abs().max() < 1e-9), "something outside of the data plates depends on the states"
    return Enumeration(torch.stack(torch.broadcast_tensors(*columns)), states, outsides[0], scale)


def _next(positions: Sequence[int], counts: Sequence[int]) -> list[int] | None:
    """The next combination, the last site turning fastest; ``None`` after the last."""
    full = [*positions, *[0] * (len(counts) - len(positions))]
    for step in reversed(range(len(counts))):
        if full[step] + 1 < counts[step]:
            return [*full[:step], full[step] + 1]
    return None


def _log_probs(nodes: Sequence[Any], plates: Sequence[str], scale: float) -> tuple[Tensor, Tensor]:
    inside, outside = torch.zeros(1), torch.zeros(())
    for node in nodes:
        # A latent that is summed out has a distribution whether masked or not.
        mask = None if _is_discrete_latent(node) else node["mask"]
        is_inside = set(plates) <= {frame.name for frame in node["cond_indep_stack"]}
        log_prob = scale_and_mask(_log_prob(node), node["scale"] / scale if is_inside else node["scale"], mask)
        if not is_inside:
            outside = outside + log_prob.sum()
            continue
        dims = _data_dims(node, plates)
        log_prob = log_prob.movedim(dims, tuple(range(-len(dims), 0))) if dims else log_prob.unsqueeze(-1)
        size = math.prod(log_prob.shape[log_prob.dim() - max(1, len(dims)) :])
        inside = inside + log_prob.reshape(-1, size).sum(0)
    return inside, outside


def _log_prob(node: Any) -> Tensor:
    """Log probability of a value; minus infinity if impossible, and where a count lies outside of its support."""
    fn, value = node["fn"], node["value"]
    log_prob: Tensor = fn.log_prob(value, *node["args"], **node["kwargs"])
    support = fn.support
    if support.is_discrete:
        log_prob = torch.where(_is_impossible(fn, value), -math.inf, log_prob)
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if isinstance(support, constraints.integer_interval):
        valid = fn.support.check(value)
        return torch.where(valid, log_prob, -math.inf)
    return log_prob


def _is_impossible(fn: Any, value: Tensor) -> Tensor:
    """Whether the probability is exactly zero, which torch replaces by the smallest step from one."""
    if isinstance(fn, torch.distributions.Independent):
        found, size = _is_impossible(fn.base_dist, value), fn.reinterpreted_batch_ndims
        return found.flatten(-size).any(-1) if size else found
    if isinstance(fn, torch.distributions.Bernoulli) and fn._param is fn.__dict__.get("probs"):
        return torch.where(value > 0, fn.probs, 1 - fn.probs) == 0
    if isinstance(fn, torch.distributions.Categorical) and fn._param is fn.__dict__.get("probs"):
        index, probs = torch.broadcast_tensors(value.long().unsqueeze(-1), fn.probs)
        return probs.gather(-1, index[..., :1]).squeeze(-1) == 0
    return torch.zeros_like(fn.log_prob(value), dtype=torch.bool)
