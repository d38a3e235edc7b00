"""How far the discrete sites of a model reach when their supports depend on other latents, and which values lie in a support."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyro
import torch
from pyro.distributions import ExtendedBinomial
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from pyro.infer.inspect import TrackProvenance
from pyro.ops.provenance import detach_provenance, get_provenance, track_provenance
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import Independent, constraints
from torch.overrides import TorchFunctionMode

from pyro_truncated.program.call import Call
from pyro_truncated.utils.isolation import Assign, isolated, spare_random_numbers

if TYPE_CHECKING:
    from pyro_truncated.program.sites import DiscreteSite

_MAX_COMBINATIONS = 4096
_MAX_SINGLE_RUNS = 64
_VERIFIED_RUNS = 8
_LEAKS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "ones", "zeros", "full", "nonzero"}
# Functions that take of their other arguments the shape or type alone: a distribution's parameters are broadcast against each other.
_KEEP_OWN_VALUES = {"broadcast_tensors", "type_as", "expand_as", "view_as", "reshape_as"}
HUGE = 2**62
# All integers: the support of distributions that give probability zero to what they do not reach (ExtendedBinomial).
INTEGER: Any = ExtendedBinomial.support

Bounds = tuple[Tensor, Tensor]


class Dependencies:
    """Which supports of a model depend on which latents.

    Attributes:
        parents: by site, the latents that the bounds of its support are computed from.
        leaked: by site, the latents whose values Python code has read before (``if z == 1``, ``range(k)``); shapes may depend on these.
        observed: by site, the latents that its observed value is computed from.

    Args:
        call: the model and its arguments.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.parents: dict[str, frozenset[str]] = {}
        self.leaked: dict[str, frozenset[str]] = {}
        self.observed: dict[str, frozenset[str]] = {}
        self.lower_varies: set[str] = set()
        reader = PythonReads()
        try:
            with torch.no_grad(), spare_random_numbers(), isolated(), pyro.validation_enabled(False), reader, _Marks(reader) as marks:
                trace = call.of(TrackProvenance()(call.model)).trace()
        except Exception:
            # Code that cannot follow tensors that carry their provenance.
            self._compare_runs()
            return
        sites = {name: node for name, node in trace.nodes.items() if node["type"] == "sample" and not site_is_subsample(node)}
        latents = {name for name, node in sites.items() if not node["is_observed"]}
        for name, leaked in marks.seen.items():
            node: Any = trace.nodes[name]
            self.observed[name] = get_provenance(node["value"]) & latents if node["is_observed"] else frozenset()
            support = _support_of(node["fn"])
            self.parents[name] = provenance_of(support) & latents
            self.leaked[name] = leaked & latents
            if get_provenance(getattr(elementwise(support), "lower_bound", 0)) & latents:
                self.lower_varies.add(name)

    def _compare_runs(self) -> None:
        """Takes supports that differ between two runs to depend on all latents before."""
        runs: list[dict[str, Any]] = []
        subsamples: dict[str, Any] = {}
        for seed in range(2):
            with torch.no_grad(), spare_random_numbers(), isolated(), Assign(subsamples):
                torch.manual_seed(seed)
                trace = self.call.trace()
            sites = {name: node for name, node in trace.nodes.items() if node["type"] == "sample"}
            subsamples = {name: node["value"] for name, node in sites.items() if site_is_subsample(node)}
            runs.append({name: node for name, node in sites.items() if name not in subsamples})
        before: set[str] = set()
        for name, node in runs[0].items():
            other = runs[1].get(name)
            bounds = [bounds_of(one["fn"]) for one in (node, other) if one is not None and _support_of(one["fn"]) is not None]
            same = len(bounds) < 2 or all(torch.equal(*pair) for pair in zip(*bounds, strict=True))
            self.parents[name], self.leaked[name] = frozenset() if same else frozenset(before), frozenset()
            self.observed[name] = frozenset()
            if not same and not torch.equal(bounds[0][0], bounds[1][0]):
                self.lower_varies.add(name)
            if not node["is_observed"]:
                before.add(name)
            elif other is None or not torch.equal(torch.as_tensor(node["value"]), torch.as_tensor(other["value"])):
                self.observed[name] = frozenset(before)

    def upstream(self, name: str) -> set[str]:
        """The latents that the support of a site depends on, as far as can be told, directly or through the supports of others."""
        found: set[str] = set()
        new = {name}
        while new:
            new = set().union(*(self.parents[site] | self.leaked[site] for site in new)) - found
            found |= new
        return found

    def conditional(self, discrete: set[str]) -> set[str]:
        """The sites whose supports depend on discrete latents."""
        return {name for name, parents in self.parents.items() if (parents | self.leaked[name]) & discrete}

    def reach(self, node: Mapping[str, Any], parents: Mapping[DiscreteSite, Tensor]) -> Bounds | None:
        """The widest support of a site over all joint values of other sites.

        Args:
            node: the site in a run of the model.
            parents: the sites that its support depends on, with their values in that run (for their shapes).

        Returns:
            Lowest and highest values, or ``None`` if there are too many joint values to look at.

        Raises:
            NotImplementedError: if for some of them the site is not sampled, or has another shape.
        """
        joint = _JointValues(node, parents)
        if joint.number > _MAX_COMBINATIONS:
            return None
        together = None
        with torch.no_grad(), spare_random_numbers(), isolated(), pyro.validation_enabled(False):
            leaked = self.leaked[node["name"]] & {site.name for site in parents}
            together = self._reach_together(node, joint) if joint.number > _MAX_SINGLE_RUNS and not leaked else None
            low, high = together or self._reach_singly(node, joint, range(joint.number))
        dims = len(node["fn"].batch_shape) + len(node["fn"].event_shape)
        return _last(low, dims), _last(high, dims)

    def _reach_together(self, node: Mapping[str, Any], joint: _JointValues) -> Bounds | None:
        """Of all joint values at once, in a new left-most dimension; ``None`` if single runs say something else."""
        try:
            found = self._stopped_at(node, joint.together()).bounds(joint.depth)
        except (RuntimeError, IndexError, ValueError):
            return None
        for number in range(0, joint.number, math.ceil(joint.number / _VERIFIED_RUNS)):
            single = self._reach_singly(node, joint, [number])
            for one, many in zip(single, found, strict=True):
                if not torch.equal(*torch.broadcast_tensors(one, many[min(number, len(many) - 1)])):
                    return None
        return found[0].amin(0), found[1].amax(0)

    def _reach_singly(self, node: Mapping[str, Any], joint: _JointValues, chosen: Sequence[int]) -> Bounds:
        low, high = torch.tensor(HUGE), torch.tensor(-HUGE)
        for number in chosen:
            bounds = self._stopped_at(node, joint.single(number)).bounds()
            low, high = torch.minimum(low, bounds[0]), torch.maximum(high, bounds[1])
        return low, high

    def _stopped_at(self, node: Mapping[str, Any], values: Mapping[str, Tensor]) -> _StopAt:
        stop = _StopAt(node, values)
        try:
            with stop, Assign(values):
                self.call()
        except _ReachedError:
            return stop
        raise NotImplementedError(
            f"discrete latent site '{node['name']}' is sampled only for some values of {sorted(values)}. Sample it always, and let it "
            "have no influence where it is not needed."
        )


class _JointValues:
    """The joint values of some sites that the support of another one depends on.

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
    """A tensor without its left-most dimensions, of size one, that leave it more than the given number."""
    return tensor.reshape(tensor.shape[max(0, tensor.dim() - dims) :])


class _ReachedError(Exception):
    """Ends a run of a model."""


class _StopAt(Messenger):
    """Ends a run at a site, and keeps its distribution and whether the values given to other sites lie in their supports."""

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
        """The bounds of the support, with the depth of the plates by the left-most dimension; impossible values reach nothing."""
        fn, expected = self.fn, self.node["fn"]
        if fn.event_shape != expected.event_shape or _support_of(fn) is None:
            raise NotImplementedError(
                f"the shape of discrete latent site '{self.node['name']}' depends on {sorted(self.values)}: {tuple(fn.event_shape)} for "
                f"some values, {tuple(expected.event_shape)} for others. Make it as long as the longest and mask what is not used."
            )
        low, high = bounds_of(fn)
        possible = torch.ones((), dtype=torch.bool, device=high.device)
        for check in self.possible:
            # Possible for some data point, or some member of a plate.
            possible = possible & (check.any() if depth is None or check.dim() <= depth else check.flatten(1).any(1))
        if depth is not None:
            dims = 1 + depth + len(fn.event_shape)
            low, high = (bound.reshape((1,) * (dims - bound.dim()) + tuple(bound.shape)) for bound in (low, high))
            possible = possible.reshape(-1, *(1,) * (dims - 1))
        return torch.where(possible, low, HUGE), torch.where(possible, high, -HUGE)


class PythonReads(TorchFunctionMode):
    """Notes the latents whose values leave the world of tensors, where their provenance is lost, and keeps it from being wrong there."""

    def __init__(self) -> None:
        super().__init__()
        self.names: frozenset[str] = frozenset()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _LEAKS:
            self.names |= get_provenance([args, kwargs or {}])
        if name == "new":
            # Pyro turns the shape, a torch.Size, into a tuple, which `new` takes for numbers (as in torch's Geometric).
            return func(_detached(args[0]), *args[1:], **(kwargs or {}))
        if name not in _KEEP_OWN_VALUES:
            return func(*args, **(kwargs or {}))
        plain = _detached([args, kwargs or {}])
        results = func(*plain[0], **plain[1])
        if isinstance(results, (tuple, list)):
            sources = args[0] if isinstance(args[0], (tuple, list)) else args
            return type(results)(track_provenance(value, get_provenance(own)) for value, own in zip(results, sources, strict=True))
        return track_provenance(results, get_provenance(args[0]))


class _Marks(Messenger):
    """Notes what Python has read when each sample site is reached."""

    def __init__(self, reader: PythonReads) -> None:
        super().__init__()
        self.reader = reader
        self.seen: dict[str, frozenset[str]] = {}

    def _pyro_post_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg):
            self.seen[msg["name"]] = self.reader.names


def provenance_of(constraint: Any) -> frozenset[str]:
    """Names of the sites that the bounds of a constraint were computed from."""
    found: frozenset[str] = frozenset()
    for part in vars(constraint).values() if constraint is not None else ():
        inner = part if isinstance(part, (list, tuple)) else [part]
        found |= get_provenance(part)
        found = found.union(*(provenance_of(item) for item in inner if isinstance(item, constraints.Constraint)))
    return found


def bounds_of(fn: Any) -> Bounds:
    """Lowest and highest value of the entries of a discrete distribution, int64; the highest is huge where there is none."""
    support = elementwise(_support_of(fn))
    if support is constraints.boolean:
        return torch.tensor(0), torch.tensor(1)
    if support is constraints.one_hot:
        return torch.tensor(0), torch.tensor(fn.event_shape[-1] - 1)
    low, high = getattr(support, "lower_bound", 0), getattr(support, "upper_bound", HUGE)
    return torch.as_tensor(low).long(), torch.as_tensor(high).long()


_detached: Callable[[Any], Any] = detach_provenance


def elementwise(support: Any) -> Any:
    """The constraint of single entries."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def possible_values(fn: Any, value: Tensor) -> Tensor:
    """Whether values lie in a distribution's support, by batch entry; what a distribution masks is possible."""
    if isinstance(fn, MaskedDistribution):
        return possible_values(fn.base_dist, value) | ~torch.as_tensor(fn._mask, device=value.device)
    if isinstance(fn, ExpandedDistribution):
        return possible_values(fn.base_dist, value)
    if isinstance(fn, Independent):
        entries = possible_values(fn.base_dist, value)
        entries = entries.expand(torch.broadcast_shapes(entries.shape, fn.base_dist.batch_shape))
        return entries.flatten(entries.dim() - fn.reinterpreted_batch_ndims).all(-1)
    check: Tensor = fn.support.check(value)
    # The support of a factor, which has no entries, is that of single entries.
    entry_dims = fn.event_dim - fn.support.event_dim
    return check.flatten(check.dim() - entry_dims).all(-1) if entry_dims > 0 else check


def supported_log_prob(fn: Any, value: Tensor) -> Tensor:
    """Log density of values that may lie outside of the support, where it is ``-inf`` whatever the formula says there."""
    possible = possible_values(fn, value)
    low = getattr(elementwise(_support_of(fn)), "lower_bound", None)
    if low is not None:
        # A value that is possible, so that nothing infinite gets into gradients.
        inside = possible.reshape(*possible.shape, *(1,) * fn.event_dim)
        value = torch.where(inside, value, torch.as_tensor(low, device=value.device).to(value.dtype))
    with pyro.validation_enabled(False):  # Nothing is possible where a total has become negative.
        log_prob: Tensor = fn.log_prob(value)
    return torch.where(possible, log_prob, -math.inf)


def _support_of(fn: Any) -> Any:
    try:
        return fn.support
    except NotImplementedError:
        return None
