"""Which supports of a model depend on which of its latents."""

from __future__ import annotations

import itertools
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import pyro
import torch
from pyro.infer.inspect import TrackProvenance
from pyro.ops.provenance import detach_provenance, extract_provenance, get_provenance, track_provenance
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch.distributions import constraints
from torch.overrides import TorchFunctionMode

from pyro_truncated.program.call import Call
from pyro_truncated.program.sites import family
from pyro_truncated.program.supports import HUGE, elementwise, get_support, value_bounds
from pyro_truncated.utils.parameter_store import Assign, isolate, spare_random_numbers

_LOG = logging.getLogger(__name__)
_READS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"}
_LEAKS = _READS | {"ones", "zeros", "full", "nonzero"}
# Functions that take of their other arguments the shape or type alone: a distribution's parameters are broadcast against each other.
_KEEP_OWN_VALUES = {"broadcast_tensors", "type_as", "expand_as", "view_as", "reshape_as"}
# Operators that write into their first argument; methods that do end with an underscore.
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITES = {"__setitem__"} | {f"__i{name}__" for name in _OPERATORS}


class Dependencies:
    """Which supports of a model depend on which latents.

    Attributes:
        parents: by site, the latents that the bounds of its support are computed from.
        leaked: by site, the latents whose values Python code has read before (``if z == 1``, ``range(k)``); shapes may depend on these.
        observed: by site, the latents that its observed value is computed from.
        read: the latents whose values Python code reads anywhere.
        scopes: by sample site, the latents that its log density is computed from; ``None`` where the model cannot be followed.

    Args:
        call: the model and its arguments.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.parents: dict[str, frozenset[str]] = {}
        self.leaked: dict[str, frozenset[str]] = {}
        self.observed: dict[str, frozenset[str]] = {}
        self.lower_varies: set[str] = set()
        self.read: frozenset[str] = frozenset()
        self.scopes: dict[str, frozenset[str]] | None = None
        reader = PythonReads()
        try:
            with torch.no_grad(), spare_random_numbers(), isolate(), pyro.validation_enabled(False), reader, _Marks(reader) as marks:
                trace = call.with_program(TrackProvenance()(call.model)).trace()
            with torch.no_grad(), pyro.validation_enabled(False):
                scopes = _scopes(trace, reader)
        except Exception:
            # Code that cannot follow tensors that carry their provenance.
            _LOG.debug("dependencies of the model cannot be followed, so runs are compared", exc_info=True)
            self._compare_runs()
            return
        sites = {name: node for name, node in trace.nodes.items() if node["type"] == "sample" and not site_is_subsample(node)}
        latents = {name for name, node in sites.items() if not node["is_observed"]}
        self.read = reader.read & latents
        # Whatever Python code has read may be anywhere in what comes after it.
        self.scopes = {name: (scope | marks.read.get(name, frozenset())) & latents for name, scope in scopes.items()}
        self._add_lost(trace, latents)
        for name, leaked in marks.seen.items():
            node: Any = trace.nodes[name]
            self.observed[name] = reader.sources(node["value"]) & latents if node["is_observed"] else frozenset()
            support = get_support(node["fn"])
            self.parents[name] = constraint_sites(support) & latents
            self.leaked[name] = leaked & latents
            if get_provenance(getattr(elementwise(support), "lower_bound", 0)) & latents:
                self.lower_varies.add(name)

    def _add_lost(self, trace: Any, latents: set[str]) -> None:
        """Adds all earlier latents to scopes that lack one.

        Functions that torch does not show, such as compiled ones and ``vmap``, lose the provenance. So runs are compared that differ in
        latents outside of a scope: that of no latents, and those of two sites.

        Args:
            trace: a run.
            latents: its latents.
        """
        assert self.scopes is not None
        scopes = {name: scope | latents & {name} for name, scope in self.scopes.items()}
        others = list(dict.fromkeys(scope for scope in scopes.values() if scope and scope < latents))
        compared = {
            scope: {name for name, own in scopes.items() if own <= scope} for scope in [frozenset(), *others[:: 1 + len(others) // 2]]
        }
        compared = {scope: names for scope, names in compared.items() if names and scope < latents}
        if not compared:
            return
        nodes = [node for node in trace.nodes.values() if node["type"] == "sample" and not node["is_observed"]]
        values = {node["name"]: detach_provenance(node["value"]) for node in nodes}
        try:
            with torch.no_grad(), pyro.validation_enabled(False), spare_random_numbers():
                # All sites have values, so that a model draws its own random numbers alike, as those of dropout.
                first = self._run(values)
                other = {name: _another_value(first[name]) for name in latents & values.keys()}
                for scope, names in compared.items():
                    again = self._run(values | {name: other[name] for name in other.keys() - scope})
                    for name in names:
                        if not torch.allclose(_log_prob(first[name]), _log_prob(again[name]), rtol=1e-5, equal_nan=True):
                            self.scopes[name] |= latents.intersection(itertools.takewhile(name.__ne__, scopes))
        except Exception:
            _LOG.debug("runs with other values of the latents cannot be compared", exc_info=True)

    def _run(self, values: Mapping[str, Any]) -> Any:
        torch.manual_seed(0)
        return self.call.run(values).nodes

    def _compare_runs(self) -> None:
        """Makes supports that differ between runs depend on all earlier latents."""
        runs: list[dict[str, Any]] = []
        subsamples: dict[str, Any] = {}
        for seed in range(2):
            with torch.no_grad(), spare_random_numbers(), isolate(), Assign(subsamples):
                torch.manual_seed(seed)
                trace = self.call.trace()
            sites = {name: node for name, node in trace.nodes.items() if node["type"] == "sample"}
            subsamples = {name: node["value"] for name, node in sites.items() if site_is_subsample(node)}
            runs.append({name: node for name, node in sites.items() if name not in subsamples})
        before: set[str] = set()
        for name, node in runs[0].items():
            other = runs[1].get(name)
            bounds = [value_bounds(one["fn"]) for one in (node, other) if one is not None and get_support(one["fn"]) is not None]
            same = len(bounds) < 2 or all(torch.equal(*pair) for pair in zip(*bounds, strict=True))
            self.parents[name], self.leaked[name] = frozenset() if same else frozenset(before), frozenset()
            self.observed[name] = frozenset()
            if not same and not torch.equal(bounds[0][0], bounds[1][0]):
                self.lower_varies.add(name)
            if not node["is_observed"]:
                before.add(name)
            elif other is None or not torch.equal(torch.as_tensor(node["value"]), torch.as_tensor(other["value"])):
                self.observed[name] = frozenset(before)

    def dependents(self, names: set[str]) -> set[str]:
        """Returns sites downstream of the named ones.

        Paths have any length. If the model cannot be followed, all later sites count.
        """
        if self.scopes is None:
            sites = list(self.parents)
            return set(sites[min(map(sites.index, names)) :]) - names
        below = set(names)
        for name, scope in self.scopes.items():  # a site comes after all that it depends on
            if scope & below:
                below.add(name)
        return below - names

    def upstream(self, name: str) -> set[str]:
        """Returns the latents that a site's support depends on.

        They are found directly or through the supports of others, as far as possible.
        """
        sites: set[str] = set()
        new = {name}
        while new:
            new = set().union(*(self.parents[site] | self.leaked[site] for site in new)) - sites
            sites |= new
        return sites

    def conditional(self, discrete: set[str]) -> set[str]:
        """The sites whose supports depend on discrete latents."""
        return {name for name, parents in self.parents.items() if (parents | self.leaked[name]) & discrete}


def _scopes(trace: Any, reader: PythonReads) -> dict[str, frozenset[str]]:
    """Returns the sites that each sample site's log density depends on.

    For a point mass they are those that its value depends on.

    Args:
        trace: a run of the model.
        reader: what was read and written in it.
    """
    scopes: dict[str, frozenset[str]] = {}
    places: dict[str, frozenset[str]] = {}
    for name, node in trace.nodes.items():
        if node["type"] != "sample" or site_is_subsample(node):
            continue
        if family(node["fn"]) == "Delta" and not node["is_observed"]:
            places[name] = _resolve_points(reader.sources(_point(node["fn"])), places)
        with PythonReads(reader.written) as density:
            sources = get_provenance(node["fn"].log_prob(node["value"], *node["args"], **node["kwargs"]))
        scopes[name] = _resolve_points(sources | density.names, places)
    return scopes


def _log_prob(node: Mapping[str, Any]) -> torch.Tensor:
    log_prob: torch.Tensor = node["fn"].log_prob(node["value"], *node["args"], **node["kwargs"])
    return log_prob


def _another_value(node: Mapping[str, Any]) -> torch.Tensor:
    """Returns the next value of finite supports, else a draw."""
    fn, value = node["fn"], torch.as_tensor(node["value"])
    if elementwise(fn.support) is constraints.one_hot:
        return value.roll(1, -1)
    if fn.support.is_discrete:
        low, high = value_bounds(fn)
        if bool((high < HUGE).all()):
            return (low + (value - low + 1) % (high - low + 1)).to(value.dtype)
    draw: torch.Tensor = fn.sample()
    return draw


def _point(fn: Any) -> Any:
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn.v


def _resolve_points(names: frozenset[str], places: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Replaces point masses by the sites that they follow from."""
    return frozenset().union(*(places.get(name, {name}) for name in names))


class PythonReads(TorchFunctionMode):
    """Records latents whose values leave tensors, where provenance ends.

    It also keeps the provenance correct there, and in tensors that are written into (``x[..., 0] = z``).

    Attributes:
        names: the latents that have left it so far.
        read: those of them whose values Python code has looked at.
        stack: where that was so first; empty if nowhere.
        written: by address, memory that latents were written into, and their names. While it is held nothing else gets its address.

    Args:
        written: what another one has noted of writes.
    """

    def __init__(self, written: Mapping[int, tuple[torch.UntypedStorage, frozenset[str]]] | None = None) -> None:
        super().__init__()
        self.written = dict(written or {})
        self.names: frozenset[str] = frozenset()
        self.read: frozenset[str] = frozenset()
        self.stack: Sequence[traceback.FrameSummary] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        sources: set[str] = set()
        plain, keywords = self._strip_provenance(args, sources), self._strip_provenance(kwargs or {}, sources)
        if name in _LEAKS:
            self._note(frozenset(sources), name in _READS)
        results = func(*plain, **keywords)
        if sources and (name in _WRITES or (name.endswith("_") and not name.endswith("__"))):
            self._note_write(plain[0], frozenset(sources))
        elif sources and keywords.get("out") is not None:
            self._note_write(keywords["out"], frozenset(sources))
        if name == "new":
            return results
        if name not in _KEEP_OWN_VALUES:
            return track_provenance(results, frozenset(sources)) if sources else results
        if isinstance(results, (tuple, list)):
            own = args[0] if isinstance(args[0], (tuple, list)) else args
            return type(results)(track_provenance(value, get_provenance(one)) for value, one in zip(results, own, strict=True))
        return track_provenance(results, get_provenance(args[0]))

    def _note(self, names: frozenset[str], is_read: bool) -> None:
        self.names |= names
        if is_read and names:
            self.stack = self.stack or traceback.extract_stack()
            self.read |= names

    def _note_write(self, target: Any, names: frozenset[str]) -> None:
        for tensor in target if isinstance(target, (tuple, list)) else [target]:
            storage = tensor.untyped_storage()
            self.written[storage.data_ptr()] = (storage, names)

    def sources(self, value: Any) -> frozenset[str]:
        """Returns the sites that a value is computed from."""
        names: set[str] = set()
        self._strip_provenance(value, names)
        return frozenset(names)

    def _strip_provenance(self, value: Any, sources: set[str]) -> Any:
        """Returns arguments without their provenance, which is added to a set."""
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self._strip_provenance(part, sources) for part in value])
        if kind is dict:
            return {key: self._strip_provenance(part, sources) for key, part in value.items()}
        # A shape stays one: torch takes a tuple in its place for numbers.
        if kind is torch.Size or not isinstance(value, (torch.Tensor, tuple, list, dict, set, frozenset)):
            return value
        plain, names = (value, frozenset()) if kind is torch.Tensor else extract_provenance(value)
        sources |= names
        if self.written and isinstance(plain, torch.Tensor):
            sources |= self.written.get(plain.untyped_storage().data_ptr(), (None, frozenset()))[1]
        return plain


class _Marks(Messenger):
    """Notes what Python has read when each sample site is reached."""

    def __init__(self, reader: PythonReads) -> None:
        super().__init__()
        self.reader = reader
        self.seen: dict[str, frozenset[str]] = {}
        self.read: dict[str, frozenset[str]] = {}

    def _pyro_post_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg):
            self.seen[msg["name"]], self.read[msg["name"]] = self.reader.names, self.reader.read


def constraint_sites(constraint: Any) -> frozenset[str]:
    """Returns the sites that a constraint's bounds depend on."""
    sites: frozenset[str] = frozenset()
    for part in vars(constraint).values() if constraint is not None else ():
        inner = part if isinstance(part, (list, tuple)) else [part]
        sites |= get_provenance(part)
        sites = sites.union(*(constraint_sites(item) for item in inner if isinstance(item, constraints.Constraint)))
    return sites
