"""Which supports of a model depend on which of its latents."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyro
import torch
from pyro.poutine.util import site_is_subsample
from torch.distributions import constraints

from pyro_truncated.program.call import Call
from pyro_truncated.program.provenance import FollowLatents
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
        traces: of its runs of the model.
        scopes: by sample site, the latents that its log density is computed from; ``None`` where the model cannot be followed.
    """

    def __init__(self, call: Call, max_count: int | Mapping[str, int] | None = None) -> None:
        self.call, self._max_count = call, max_count
        self.parents: dict[str, frozenset[str]] = {}
        self.leaked: dict[str, frozenset[str]] = {}
        self.observed: dict[str, frozenset[str]] = {}
        self.masked: dict[str, frozenset[str]] = {}
        self.lower_varies: set[str] = set()
        self.traces: list[Any] = []
        self.read: frozenset[str] = frozenset()
        self.scopes: dict[str, frozenset[str]] | None = None
        try:
            latents = FollowLatents()
            with torch.no_grad(), spare_random_numbers(), isolate(), pyro.validation_enabled(False), latents:
                trace = call.trace()
                read, seen = latents.read, dict(latents.seen)
                scopes = _scopes(trace, latents)
                supports = {name: get_support(trace.nodes[name]["fn"]) for name in seen}
        except Exception:
            # Code that takes no modes of torch.
            _LOG.debug("dependencies of the model cannot be followed, so runs are compared", exc_info=True)
            self._compare_runs()
            return
        self.traces = [trace]
        names = {node["name"] for node in latent_nodes(trace)}
        self.read = read & names
        scopes = {name: scope & names for name, scope in scopes.items()}
        self.scopes = scopes if self._are_complete(scopes, trace) else None
        for name, leaked in seen.items():
            node: Any = trace.nodes[name]
            self.observed[name] = latents.sources(node["value"]) & names if node["is_observed"] else frozenset()
            self.masked[name] = latents.sources([node["mask"], *(mask for mask, _ in unwrap(node["fn"])[1])]) & names
            self.parents[name] = latents.sources(supports[name]) & names
            self.leaked[name] = leaked & names
            if latents.sources(getattr(elementwise(supports[name]), "lower_bound", 0)) & names:
                self.lower_varies.add(name)

    def _are_complete(self, scopes: Mapping[str, frozenset[str]], trace: Any) -> bool:
        """Whether densities do not change with latents outside of their scopes.

        Python code that reads values hides what depends on them, and so does code that reads memory without torch. So runs are compared
        in which some latents differ. All do, where a density seems to depend on none; and those that were read, outside of the scopes of
        some sites, or a random half of them. Many values are represented by the lowest and the highest, too.
        """
        nodes = {name: node for name, node in trace.nodes.items() if node["type"] == "sample" and not node["is_observed"]}
        values = {name: node["value"] for name, node in nodes.items()}
        latents = frozenset(nodes.keys() & scopes.keys())
        # A latent's density changes with its own value.
        own = {name: scope | (latents & {name}) for name, scope in scopes.items()}
        if all(scope >= latents if self.read else scope for scope in own.values()):
            return True
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad(), pyro.validation_enabled(False), spare_random_numbers():
            # All sites have values, so that a model draws its own random numbers alike, as those of dropout.
            first = self._run(values)
            shifts = [0, _LOWEST, _HIGHEST] if any(_spans_many(first[name], self._limit(name)) for name in latents) else [0]
            for changed, shift in _changes(latents, own, self.read, generator, shifts):
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
            self.traces.append(trace)
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


def _scopes(trace: Any, latents: FollowLatents) -> dict[str, frozenset[str]]:
    """Returns the sites that each sample site's log density depends on.

    For a point mass they are those that its value depends on.
    """
    scopes: dict[str, frozenset[str]] = {}
    places: dict[str, frozenset[str]] = {}
    for name, node in sample_nodes(trace).items():
        if family(node["fn"]) == "Delta" and not node["is_observed"]:
            places[name] = _resolve_points(latents.sources(_point(node["fn"])), places)
        latents.names = frozenset()
        sources = latents.sources(node["fn"].log_prob(node["value"], *node["args"], **node["kwargs"]))
        sources |= latents.sources([node["mask"], node["scale"]]) | latents.names
        scopes[name] = _resolve_points(sources - {name}, places)
    return scopes


def _changes(
    latents: frozenset[str], scopes: Mapping[str, frozenset[str]], read: frozenset[str], generator: torch.Generator, shifts: Sequence[int]
) -> Iterator[tuple[frozenset[str], int]]:
    """Yields sets of latents that change, and by how much.

    0 stands for random changes.
    """
    yield from ((latents, shift) for shift in shifts)
    outside = list(dict.fromkeys(read - scope for scope in scopes.values() if not read <= scope))[:4]
    yield from itertools.product(outside, [*shifts, *range(1, 9)])
    for _ in range(6 if read else 0):
        is_changed = (torch.rand(len(read), generator=generator) < 0.5).tolist()
        yield frozenset(itertools.compress(sorted(read), is_changed)), 0


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
