"""Which supports of a model depend on which of its latents."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyro
import torch
from pyro.ops.provenance import detach_provenance, get_provenance
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch.distributions import constraints

from pyro_truncated.program.call import Call
from pyro_truncated.program.provenance import FollowLatents, PythonReads
from pyro_truncated.program.sites import family, latent_nodes, sample_nodes, unwrap
from pyro_truncated.program.supports import HUGE, Bounds, elementwise, get_support, is_discrete, value_bounds
from pyro_truncated.utils.parameter_store import Assign, isolate, spare_random_numbers

_LOG = logging.getLogger(__name__)


class Dependencies:
    """Which supports of a model depend on which latents.

    Attributes:
        parents: by site, the latents that the bounds of its support are computed from.
        leaked: by site, the latents whose values Python code has read before (``if z == 1``, ``range(k)``); shapes may depend on these.
        observed: by site, the latents that its observed value is computed from.
        masked: by site, the latents that its mask is computed from.
        read: the latents whose values Python code reads anywhere.
        scopes: by sample site, the latents that its log density is computed from; ``None`` where the model cannot be followed.
    """

    def __init__(self, call: Call, max_count: int | Mapping[str, int] | None = None) -> None:
        self.call, self._max_count = call, max_count
        self.parents: dict[str, frozenset[str]] = {}
        self.leaked: dict[str, frozenset[str]] = {}
        self.observed: dict[str, frozenset[str]] = {}
        self.masked: dict[str, frozenset[str]] = {}
        self.lower_varies: set[str] = set()
        self.read: frozenset[str] = frozenset()
        self.scopes: dict[str, frozenset[str]] | None = None
        reader = PythonReads()
        try:
            with torch.no_grad(), spare_random_numbers(), isolate(), pyro.validation_enabled(False), reader, _Marks(reader) as marks:
                trace = call.with_program(FollowLatents()(call.model)).trace()
            with torch.no_grad(), pyro.validation_enabled(False):
                scopes = _scopes(trace, reader)
        except Exception:
            # Code that cannot follow tensors that carry their provenance.
            _LOG.debug("dependencies of the model cannot be followed, so runs are compared", exc_info=True)
            self._compare_runs()
            return
        latents = {node["name"] for node in latent_nodes(trace)}
        self.read = reader.read & latents
        scopes = {name: scope & latents for name, scope in scopes.items()}
        self.scopes = scopes if self._are_complete(scopes, trace) else None
        for name, leaked in marks.seen.items():
            node: Any = trace.nodes[name]
            self.observed[name] = reader.sources(node["value"]) & latents if node["is_observed"] else frozenset()
            self.masked[name] = reader.sources([node["mask"], *(mask for mask, _ in unwrap(node["fn"])[1])]) & latents
            support = get_support(node["fn"])
            self.parents[name] = constraint_sites(support) & latents
            self.leaked[name] = leaked & latents
            if get_provenance(getattr(elementwise(support), "lower_bound", 0)) & latents:
                self.lower_varies.add(name)

    def _are_complete(self, scopes: Mapping[str, frozenset[str]], trace: Any) -> bool:
        """Whether densities do not change with latents outside of their scopes.

        Functions that torch does not show, such as compiled ones and ``vmap``, lose the provenance, and so does Python code that
        reads values. So runs are compared in which some latents differ: all, those outside of the scopes of some sites, random halves,
        and those that were read. Of latents with many values the lowest and the highest are among them, as functions may differ there only.
        Long programs, whose sites are alike, are run less often.
        """
        nodes = {name: node for name, node in trace.nodes.items() if node["type"] == "sample" and not node["is_observed"]}
        values = {name: detach_provenance(node["value"]) for name, node in nodes.items()}
        latents = frozenset(nodes.keys() & scopes.keys())
        # A latent's density changes with its own value.
        own = {name: scope | (latents & {name}) for name, scope in scopes.items()}
        if all(scope >= latents for scope in own.values()):
            return True
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad(), pyro.validation_enabled(False), spare_random_numbers():
            # All sites have values, so that a model draws its own random numbers alike, as those of dropout.
            first = self._run(values)
            shifts = [0, _LOWEST, _HIGHEST] if any(_spans_many(first[name], self._limit(name)) for name in latents) else [0]
            for changed, shift in _changes(sorted(latents), own, self.read, generator, shifts):
                try:
                    other = {name: _another_value(first[name], shift, generator, self._limit(name)) for name in sorted(changed)}
                    again = self._run(values | other)
                    differing = [name for name, scope in own.items() if not scope & changed and not _equal(first[name], again[name])]
                except Exception:
                    # Values that exclude each other, or sites that change: other runs may tell.
                    _LOG.debug("the model cannot run on these values of its latents", exc_info=True)
                    continue
                # What differs between runs of the same values says nothing.
                if differing and any(_equal(node, first[name]) for name, node in self._run(values).items() if name in differing):
                    return False
        return True

    def _limit(self, name: str) -> int | None:
        limit = self._max_count.get(name) if isinstance(self._max_count, Mapping) else self._max_count
        # What is no bound is refused with the layout.
        return limit if hasattr(limit, "__index__") else None

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
            elif other is None or not _same_values(torch.as_tensor(node["value"]), torch.as_tensor(other["value"])):
                self.observed[name] = frozenset(before)

    def dependents(self, names: set[str]) -> set[str]:
        """Returns sites downstream of the named ones."""
        if self.scopes is None:
            sites = list(self.parents)
            return set(sites[min(map(sites.index, names)) :]) - names
        below = set(names)
        for name, scope in self.scopes.items():  # a site comes after all that it depends on
            if scope & below:
                below.add(name)
        return below - names

    def upstream(self, name: str) -> set[str]:
        """Returns the latents that a site's support depends on."""
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
    """
    scopes: dict[str, frozenset[str]] = {}
    places: dict[str, frozenset[str]] = {}
    for name, node in sample_nodes(trace).items():
        if family(node["fn"]) == "Delta" and not node["is_observed"]:
            places[name] = _resolve_points(reader.sources(_point(node["fn"])), places)
        with PythonReads(reader.written) as density:
            sources = get_provenance(node["fn"].log_prob(node["value"], *node["args"], **node["kwargs"]))
        sources |= reader.sources([node["mask"], node["scale"]])
        scopes[name] = _resolve_points(sources | density.names, places)
    return scopes


def _changes(
    latents: Sequence[str], scopes: Mapping[str, frozenset[str]], read: frozenset[str], generator: torch.Generator, shifts: Sequence[int]
) -> Iterator[tuple[frozenset[str], int]]:
    """Yields sets of latents that change, and by how much.

    0 stands for random changes. All latents, and those outside of a scope, change in all of the given ways.
    """
    every = frozenset(latents)
    number = max(1, min(6, 2000 // len(scopes)))
    distinct = list(dict.fromkeys(scope for scope in scopes.values() if scope < every))
    for changed in (every, *(every - scope for scope in distinct[:: 1 + len(distinct) // number])):
        yield from ((changed, shift) for shift in shifts)
    for _ in range(number):
        is_changed = (torch.rand(len(latents), generator=generator) < 0.5).tolist()
        yield frozenset(itertools.compress(latents, is_changed)), 0
    for changed in list(dict.fromkeys(read - scope for scope in scopes.values()))[:4]:
        yield from ((changed, shift) for shift in range(1, 9) if changed)


# Instead of a shift: the ends of a support.
_LOWEST, _HIGHEST = -1, -2


def _kept_bounds(fn: Any, limit: int | None) -> Bounds:
    """Returns lowest and highest kept values of a discrete latent."""
    low, high = value_bounds(fn)
    return low, high if limit is None else torch.maximum(low, high.clamp(max=limit))


def _spans_many(node: Mapping[str, Any], limit: int | None) -> bool:
    """Whether a latent has an order, bounds, and values eight apart."""
    if not is_discrete(node["fn"]) or elementwise(get_support(node["fn"])) is constraints.one_hot:
        return False
    low, high = _kept_bounds(node["fn"], limit)
    return bool((high < HUGE).all()) and int((high - low).max()) >= 8


def _another_value(node: Mapping[str, Any], shift: int, generator: torch.Generator, limit: int | None) -> torch.Tensor:
    """Returns other values of a latent.

    They are shifted in a finite support, by as much or at random, or one of its ends, and else drawn. Where there are many values, half
    of the random ones are drawn, too: the prior may reach few of them.
    """
    fn, value = node["fn"], torch.as_tensor(node["value"])
    support = get_support(fn)
    if elementwise(support) is constraints.one_hot:
        return value.roll(shift if shift > 0 else int(torch.randint(1, value.shape[-1] + 1, (), generator=generator)), -1)
    if is_discrete(fn):
        low, high = _kept_bounds(fn, limit)
        if bool((high < HUGE).all()):
            if shift < 0 and _spans_many(node, limit):
                return (low if shift == _LOWEST else high).to(value).expand(value.shape)
            steps: Any = torch.randint(2**31, value.shape, generator=generator).to(value.device) % (high - low + 1)
            # One entry at least.
            steps = shift if shift > 0 else steps if bool(steps.any()) else 1
            other: torch.Tensor = (low + (value - low + steps) % (high - low + 1)).to(value.dtype)
            if shift == 0 and _spans_many(node, limit):
                is_drawn = torch.rand(value.shape, generator=generator).to(value.device) < 0.5
                other = torch.where(is_drawn, torch.minimum(_draw(fn, generator), high.to(value)), other)
            return other
    return _draw(fn, generator)


def _draw(fn: Any, generator: torch.Generator) -> torch.Tensor:
    # Runs of the model, which come between, all start from one seed.
    torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
    draw: torch.Tensor = fn.sample()
    return draw


def _equal(node: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a site has the same log density in two runs."""
    first, second = (one["fn"].log_prob(one["value"], *one["args"], **one["kwargs"]) for one in (node, other))
    return torch.allclose(first, second, rtol=1e-5, equal_nan=True)


def _same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether values are the same, missing ones too."""
    return first.shape == second.shape and torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)


def _point(fn: Any) -> Any:
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn.v


def _resolve_points(names: frozenset[str], places: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Replaces point masses by the sites that they follow from."""
    return frozenset().union(*(places.get(name, {name}) for name in names))


class _Marks(Messenger):
    """Notes what Python has read when each sample site is reached."""

    def __init__(self, reader: PythonReads) -> None:
        super().__init__()
        self.reader = reader
        self.seen: dict[str, frozenset[str]] = {}

    def _pyro_post_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg):
            self.seen[msg["name"]] = self.reader.names


def constraint_sites(constraint: Any) -> frozenset[str]:
    """Returns the sites that a constraint's bounds depend on."""
    sites: frozenset[str] = frozenset()
    for part in vars(constraint).values() if constraint is not None else ():
        inner = part if isinstance(part, (list, tuple)) else [part]
        sites |= get_provenance(part)
        sites = sites.union(*(constraint_sites(item) for item in inner if isinstance(item, constraints.Constraint)))
    return sites
