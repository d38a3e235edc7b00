"""Which supports of a model depend on which of its latents."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyro
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch.distributions import constraints

from pyro_truncated.program.call import Call
from pyro_truncated.program.provenance import FollowLatents
from pyro_truncated.program.sites import family, latent_nodes, sample_nodes, site_shapes, unwrap
from pyro_truncated.program.supports import HUGE, Bounds, elementwise, get_support, is_discrete, value_bounds
from pyro_truncated.utils.parameter_store import Assign, isolate, spare_random_numbers

_LOG = logging.getLogger(__name__)
# The most joint values of what Python reads that are run, and where there are more, the most values of all latents one by one.
_MAX_JOINT_VALUES, _MAX_VALUES = 16, 64


class Dependencies:
    """Which supports of a model depend on which latents.

    Attributes:
        parents: by site, the latents that the bounds of its support are computed from.
        leaked: by site, the latents whose values Python code has read before (``if z == 1``, ``range(k)``); shapes may depend on these.
        observed: by site, the latents that its observed value is computed from.
        masked: by site, the latents that its mask is computed from.
        read: the latents whose values Python code reads anywhere.
        shapes: those of the latents in its runs of the model.
        scopes: by sample site, the latents that its log density is computed from; ``None`` where the model cannot be followed.
    """

    def __init__(self, call: Call, max_count: int | Mapping[str, int] | None = None) -> None:
        self.call, self._max_count = call, max_count
        self.parents: dict[str, frozenset[str]] = {}
        self.leaked: dict[str, frozenset[str]] = {}
        self.observed: dict[str, frozenset[str]] = {}
        self.masked: dict[str, frozenset[str]] = {}
        self.lower_varies: set[str] = set()
        self.shapes: list[Mapping[str, Any]] = []
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
            for other in self._other_values(self._compare_runs(), is_read=True):
                with contextlib.suppress(Exception):
                    self._run(other)
            return
        self.shapes = [site_shapes(trace)]
        names = {node["name"] for node in latent_nodes(trace)}
        self.read = read & names
        scopes = {name: scope & names for name, scope in scopes.items()}
        self.scopes = scopes if self._are_complete(scopes, sample_nodes(trace)) else None
        for name, leaked in seen.items():
            node: Any = trace.nodes[name]
            self.observed[name] = latents.sources(node["value"]) & names if node["is_observed"] else frozenset()
            self.masked[name] = latents.sources([node["mask"], *(mask for mask, _ in unwrap(node["fn"])[1])]) & names
            self.parents[name] = latents.sources(supports[name]) & names
            self.leaked[name] = leaked & names
            if latents.sources(getattr(elementwise(supports[name]), "lower_bound", 0)) & names:
                self.lower_varies.add(name)

    def _are_complete(self, scopes: Mapping[str, frozenset[str]], nodes: Mapping[str, Any]) -> bool:
        """Whether densities do not change with latents outside of their scopes.

        Python code that reads values hides what depends on them, and so does code that reads memory without torch. So runs are compared on
        other values of what was read, or of all latents where a density seems to depend on none. They show sites that change, too.
        """
        latents = {name: node for name, node in nodes.items() if not node["is_observed"] and name in scopes}
        # A latent's density changes with its own value.
        own = {name: scope | (latents.keys() & {name}) for name, scope in scopes.items()}
        if not self.read and all(own.values()):
            return True
        values, is_complete = {name: node["value"] for name, node in latents.items()}, True
        num_random = 16 if self.read and not all(scope >= latents.keys() for scope in own.values()) else 0
        # All sites have values, so that a model draws its own random numbers alike, as those of dropout.
        first = self._run(values) if num_random or not self.read else {}
        changed = [latents[name] for name in latents if name in (self.read or latents)]
        for other in self._other_values(changed, is_read=bool(self.read), num_random=num_random):
            try:
                again = self._run(values | other)
                rest = [name for name, scope in own.items() if is_complete and not scope & other.keys()]
                if differing := [name for name in rest if not _equal(first[name], again[name])]:
                    # What differs between runs of the same values says nothing.
                    once_more = self._run(values)
                    is_complete = not any(_equal(once_more[name], first[name]) for name in differing)
            except Exception:
                # Values that exclude each other, or sites that change.
                _LOG.debug("the model cannot run on these values of its latents", exc_info=True)
                with contextlib.suppress(Exception):
                    self._run(other)
        return is_complete

    def _run(self, values: Mapping[str, Any]) -> Any:
        with torch.no_grad(), pyro.validation_enabled(False), spare_random_numbers():
            torch.manual_seed(0)
            trace = self.call.run(values)
        self.shapes.append(site_shapes(trace))
        return trace.nodes

    def _other_values(self, nodes: Sequence[Mapping[str, Any]], is_read: bool, num_random: int = 0) -> Iterator[dict[str, torch.Tensor]]:
        """Yields values of discrete latents, and then draws of the others.

        Of what Python may read they are joint values, with all entries of a site alike, then random ones. Too many are the values of
        each latent by itself. Of latents that nothing reads they are the lowest and the highest.
        """
        discrete = {node["name"]: node for node in nodes if is_discrete(node["fn"])}
        most = max(_MAX_JOINT_VALUES, _MAX_VALUES // max(1, len(discrete)))
        levels = {name: self._levels(node, most) for name, node in discrete.items()}
        chosen: Iterable[Mapping[str, int]] = ({name: own[end] for name, own in levels.items()} for end in (0, -1))
        if is_read and math.prod(map(len, levels.values())) <= _MAX_JOINT_VALUES:
            chosen = (dict(zip(levels, combination, strict=True)) for combination in itertools.product(*levels.values()))
        elif is_read:
            chosen = ({name: level} for name, own in levels.items() for level in own)
        generator = torch.Generator().manual_seed(0)
        if discrete:
            yield from ({name: self._with_level(discrete[name], level) for name, level in alike.items()} for alike in chosen)
            for _ in range(num_random):
                yield {name: self._random_value(node, generator) for name, node in discrete.items()}
        for seed in range(4 if len(discrete) < len(nodes) else 0):
            drawn = {}
            # What a distribution raises, the first use of the guide shall say.
            with contextlib.suppress(Exception), spare_random_numbers():
                torch.manual_seed(1 + seed)
                drawn = {node["name"]: node["fn"].sample() for node in nodes if node["name"] not in discrete}
            yield drawn

    def _bounds(self, node: Mapping[str, Any]) -> Bounds:
        """Lowest and highest kept values of a discrete latent, by entry."""
        low, high = value_bounds(node["fn"])
        limit = self._max_count.get(node["name"]) if isinstance(self._max_count, Mapping) else self._max_count
        # What is no bound is refused with the layout.
        return low, torch.maximum(low, high.clamp(max=limit)) if hasattr(limit, "__index__") else high

    def _levels(self, node: Mapping[str, Any], most: int) -> list[int]:
        """Values of a discrete latent, in equal steps up to the highest."""
        low, high = self._bounds(node)
        first, last = int(low.min()), int(high.max())
        if last >= HUGE:
            return list(range(first, first + _MAX_JOINT_VALUES - 1))
        return torch.linspace(first, last, min(most, last - first + 1), dtype=torch.float64).round().long().tolist()

    def _with_level(self, node: Mapping[str, Any], level: int) -> torch.Tensor:
        """One value for all entries, or their highest."""
        value, (_, high) = torch.as_tensor(node["value"]), self._bounds(node)
        if elementwise(get_support(node["fn"])) is constraints.one_hot:
            return torch.nn.functional.one_hot(torch.tensor(level), value.shape[-1]).to(value).expand(value.shape)
        return torch.full_like(value, level).minimum(high.to(value))

    def _random_value(self, node: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
        """A random value: half of its entries are drawn."""
        value, (low, high) = torch.as_tensor(node["value"]), self._bounds(node)
        drawn = value
        with contextlib.suppress(Exception), spare_random_numbers():
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            drawn = node["fn"].sample()
        if elementwise(get_support(node["fn"])) is constraints.one_hot:
            return drawn[..., torch.randperm(value.shape[-1], generator=generator)]
        if bool((high >= HUGE).any()):
            return drawn.minimum(high.to(value))
        anywhere = low + torch.randint(2**31, value.shape, generator=generator).to(value.device) % (high - low + 1)
        is_drawn = torch.rand(value.shape, generator=generator).to(value.device) < 0.5
        return torch.where(is_drawn, drawn.minimum(high.to(value)), anywhere.to(value))

    def _compare_runs(self) -> list[Any]:
        """Makes supports that differ between runs depend on all earlier latents.

        Returns the latents of the first run.
        """
        runs: list[dict[str, Any]] = []
        subsamples: dict[str, Any] = {}
        for seed in range(2):
            with torch.no_grad(), spare_random_numbers(), isolate(), Assign(subsamples):
                torch.manual_seed(seed)
                trace = self.call.trace()
            self.shapes.append(site_shapes(trace))
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
        return [node for node in runs[0].values() if not node["is_observed"]]

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


def _equal(node: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a site has the same log density in two runs."""
    first, second = (
        scale_and_mask(one["fn"].log_prob(one["value"], *one["args"], **one["kwargs"]), one["scale"], one["mask"]) for one in (node, other)
    )
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
