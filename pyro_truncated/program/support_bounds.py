"""Bounds of discrete sites whose support depends on other latents.

They are over all values of these latents.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyro
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_truncated.program.call import Call
from pyro_truncated.program.changing_sites import ChangingSitesError
from pyro_truncated.program.dependencies import Dependencies
from pyro_truncated.program.sites import DiscreteSite
from pyro_truncated.program.supports import HUGE, Bounds, possible_values, support_of, value_bounds
from pyro_truncated.utils.parameter_store import Assign, isolated, spare_random_numbers

_MAX_COMBINATIONS = 4096
_MAX_SINGLE_RUNS = 64
_VERIFIED_RUNS = 8


def widest_support(node: Mapping[str, Any], parents: Mapping[DiscreteSite, Tensor], dependencies: Dependencies) -> Bounds | None:
    """Returns a site's widest support over other sites' joint values.

    Args:
        node: the site in a run of the model.
        parents: the sites that its support depends on, with their values in that run.
        dependencies: of the model.

    Returns:
        Lowest and highest values, or ``None`` if there are too many joint values to look at.

    Raises:
        NotImplementedError: if for some of them the site is not sampled, or has another shape.
    """
    joint = _JointValues(node, parents)
    if joint.number > _MAX_COMBINATIONS:
        return None
    runs = _Runs(dependencies.call, node, joint)
    leaked = dependencies.leaked[node["name"]] & {site.name for site in parents}
    with torch.no_grad(), spare_random_numbers(), isolated(), pyro.validation_enabled(False):
        together = runs.together() if joint.number > _MAX_SINGLE_RUNS and not leaked else None
        low, high = together or runs.singly(range(joint.number))
    dims = len(node["fn"].batch_shape) + len(node["fn"].event_shape)
    return _last(low, dims), _last(high, dims)


@dataclasses.dataclass(frozen=True)
class _Runs:
    """Runs of a model up to a site, under joint values."""

    call: Call
    node: Mapping[str, Any]
    joint: _JointValues

    def together(self) -> Bounds | None:
        """Returns bounds over all joint values at once, or ``None``.

        They use a new left-most dimension. ``None`` means that single runs disagree.
        """
        joint = self.joint
        try:
            found = self._stopped(joint.together()).bounds(joint.depth)
        except (RuntimeError, IndexError, ValueError):
            return None
        for number in range(0, joint.number, math.ceil(joint.number / _VERIFIED_RUNS)):
            single = self.singly([number])
            for one, many in zip(single, found, strict=True):
                if not torch.equal(*torch.broadcast_tensors(one, many[min(number, len(many) - 1)])):
                    return None
        return found[0].amin(0), found[1].amax(0)

    def singly(self, chosen: Sequence[int]) -> Bounds:
        """Bounds over the chosen joint values, one after the other."""
        low, high = torch.tensor(HUGE), torch.tensor(-HUGE)
        for number in chosen:
            bounds = self._stopped(self.joint.single(number)).bounds()
            low, high = torch.minimum(low, bounds[0]), torch.maximum(high, bounds[1])
        return low, high

    def _stopped(self, values: Mapping[str, Tensor]) -> _StopAt:
        stop = _StopAt(self.node, values)
        try:
            with stop, Assign(values):
                self.call()
        except _ReachedError:
            return stop
        raise ChangingSitesError([self.node["name"]], sorted(values))


class _JointValues:
    """The joint values of sites that another site's support depends on.

    Members of a plate that holds both a site and the other one are independent, so that all get the same value.
    """

    def __init__(self, node: Mapping[str, Any], parents: Mapping[DiscreteSite, Tensor]) -> None:
        self.parents = parents
        shared = {frame.dim for frame in node["cond_indep_stack"] if frame.vectorized}
        self.own = {site: torch.tensor(site.cardinalities).reshape(site.shape) for site in parents}
        self.sizes = {}
        for site, cardinality in self.own.items():
            same = [position for position, (dim, _) in enumerate(site.plates) if dim in shared]
            self.sizes[site] = cardinality.amax(same, keepdim=True) if same else cardinality
        self.flat: list[int] = [int(size) for sizes in self.sizes.values() for size in sizes.flatten()]
        self.number = math.prod(self.flat)
        self.depth = max(
            [-frame.dim for frame in node["cond_indep_stack"] if frame.vectorized] + [site.depth for site in parents], default=0
        )

    def together(self) -> dict[str, Tensor]:
        """All of them, in the dimension left of all plates."""
        return self._values(torch.arange(self.number), self.depth)

    def single(self, number: int) -> dict[str, Tensor]:
        """One of them, in the shapes of the model's own values."""
        values = self._values(torch.tensor([number]), self.depth)
        return {site.name: _last(values[site.name], held.dim()).expand(held.shape) for site, held in self.parents.items()}

    def _values(self, numbers: Tensor, depth: int) -> dict[str, Tensor]:
        values, rest = {}, numbers
        for site, sizes in self.sizes.items():
            levels = []
            for size in sizes.flatten().tolist():
                levels.append(rest % size)
                rest = rest // size
            own = torch.stack(levels, -1).reshape(len(numbers), *sizes.shape)
            own = torch.minimum(own, self.own[site] - 1).to(next(iter(self.parents.values())).device)
            values[site.name] = site.decode(own, (len(numbers),) + (1,) * depth)
        return values


def _last(tensor: Tensor, dims: int) -> Tensor:
    """Drops left-most dimensions of size one above a given number."""
    return tensor.reshape(tensor.shape[max(0, tensor.dim() - dims) :])


class _ReachedError(Exception):
    """Ends a run of a model."""


class _StopAt(Messenger):
    """Ends a run at a site and keeps its distribution.

    It also keeps whether given values of other sites lie in their supports.
    """

    def __init__(self, node: Mapping[str, Any], values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.node, self.values = node, values
        self.fn: Any = None
        self.possible: list[Tensor] = []

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.values:
            self.possible.append(possible_values(msg["fn"], self.values[msg["name"]]))
        if msg["name"] == self.node["name"]:
            self.fn = msg["fn"]
            raise _ReachedError

    def bounds(self, depth: int | None = None) -> Bounds:
        """Returns the support's bounds, with plates by their left-most dimension.

        Impossible values do not count.
        """
        fn, expected = self.fn, self.node["fn"]
        if fn.event_shape != expected.event_shape or support_of(fn) is None:
            raise NotImplementedError(
                f"the shape of discrete latent site '{self.node['name']}' depends on {sorted(self.values)}: {tuple(fn.event_shape)} for "
                f"some values, {tuple(expected.event_shape)} for others. Make it as long as the longest and mask what is not used."
            )
        low, high = value_bounds(fn)
        possible = torch.ones((), dtype=torch.bool, device=high.device)
        for check in self.possible:
            # Possible for some data point, or some member of a plate.
            possible = possible & (check.any() if depth is None or check.dim() <= depth else check.flatten(1).any(1))
        if depth is not None:
            dims = 1 + depth + len(fn.event_shape)
            low, high = (bound.reshape((1,) * (dims - bound.dim()) + tuple(bound.shape)) for bound in (low, high))
            possible = possible.reshape(-1, *(1,) * (dims - 1))
        return torch.where(possible, low, HUGE), torch.where(possible, high, -HUGE)
