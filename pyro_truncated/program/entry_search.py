"""Finds which entries of an observed site depend on which latents.

Latents are changed one by one in a run of the model, and members of their plates by the bits of their positions, in logarithmically many
runs. What does not depend on a latent does not change with it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor

from pyro_truncated.ops.elimination import IMPOSSIBLE
from pyro_truncated.program.densities import coarsest_dtype
from pyro_truncated.program.entries import Entries, flatten, with_entries
from pyro_truncated.program.layout import SiteLayout
from pyro_truncated.program.product_scorer import ProductScorer, generic_parameters
from pyro_truncated.program.sites import is_subsampled, strip_events
from pyro_truncated.utils.arrays import rounding_tolerance

# Densities of one site on states of all its nodes up to which its entries are told apart.
MOST_ENTRIES = 2**26


class Pattern(NamedTuple):
    """Which entries of one latent change, to see what depends on them."""

    site: str  # the latent
    # A plate of which some members change, with dimension and size; None for all entries of the
    # latent.
    plate: tuple[str, int, int] | None = None
    bit: int = 0  # number of a bit of the members' positions
    is_set: bool = True  # whether members with the bit change, or those without


def find_entries(scorer: ProductScorer, scopes: Mapping[str, frozenset[str]]) -> dict[str, Entries]:
    """Returns what the entries of observed sites depend on."""
    graph = scorer.product.graph
    places = list(dict.fromkeys(graph.factors[name] for name in graph.coupling_sites))
    # Where there are many nodes, as many steps, the first two tell whether to look at all of them.
    first = [name for name in graph.coupling_sites if graph.factors[name] in places[:2]]
    found = _find_entries(scorer, scopes, first)
    rest = [name for name in graph.coupling_sites if name not in first]
    return found | _find_entries(scorer, scopes, rest) if found and rest else found


def _find_entries(scorer: ProductScorer, scopes: Mapping[str, frozenset[str]], names: Sequence[str]) -> dict[str, Entries]:
    sites = {name: scopes[name] & scorer.product.layout.sites.keys() for name in names}
    searches = [search for name, own in sites.items() if (search := _EntrySearch(scorer, name, own)).is_possible]
    if not searches:
        return {}
    changes = _Changes(scorer, searches)
    generator = torch.Generator().manual_seed(0)
    with generic_parameters(scorer, [search.name for search in searches], generator), torch.no_grad(), pyro.validation_enabled(False):
        for run in range(changes.count_runs()):
            if all(search.joins_members() for search in searches):
                break
            with contextlib.suppress(Exception):
                changes.look(run, generator)
    return {search.name: entries for search in searches if (entries := search.read()) is not None}


class _EntrySearch:
    """The search for the parts of one site's entries."""

    def __init__(self, scorer: ProductScorer, name: str, scope: frozenset[str]) -> None:
        self._scorer, self.name, self._node = scorer, name, scorer.nodes[name]
        self._sites = [site for site in scorer.layout.sites if site in scope]
        frames = [frame for frame in self._node["cond_indep_stack"] if frame.vectorized]
        latent_frames = {frame.name: frame for site in self._sites for frame in scorer.layout.sites[site].frames if frame.vectorized}
        self._dims = tuple(sorted(frame.dim for frame in frames if frame.name not in latent_frames))
        self._event_dim = strip_events(self._node["fn"])[1]
        own = {frame.name for frame in frames}
        self._plates = {(f.name, f.dim, f.size) for f in latent_frames.values() if f.name not in own}
        scales = [scorer.nodes[site]["scale"] for site in self._sites]
        has_one_scale = all(scale is scales[0] or bool(torch.as_tensor(scale == scales[0]).all()) for scale in scales)
        self.is_possible = has_one_scale and len(self._plates) < 2
        self.is_possible &= not any(is_subsampled(frame) for frame in frames if frame.name not in latent_frames)
        self.size = max(1, self._node["fn"].shape().numel())
        self.patterns = [pattern for site in self._sites for pattern in self._patterns(site)] if self.is_possible else []
        self._changes: dict[Pattern, Tensor] = {}

    def count_wanted(self) -> tuple[int, int]:
        """Returns the fewest runs that tell something, and how many are enough.

        These meet most pairs of values. A row that looks up a member sees one member of a run; others see a state of each data point.
        """
        most = max(max(self._scorer.layout.sites[site].cardinalities) for site in self._sites)
        num_rows = 1 if self._plates else max(1, self._scorer.num_data)
        return -(-16 // num_rows), -(-min(256, max(16, 8 * most)) // num_rows)

    def _patterns(self, site: str) -> list[Pattern]:
        names = {frame.name for frame in self._scorer.layout.sites[site].frames if frame.vectorized}
        plates = [plate for plate in self._plates if plate[0] in names]
        if not plates:
            return [Pattern(site)]
        bits = range(max(1, math.ceil(math.log2(plates[0][2]))))
        return [Pattern(site, plates[0], bit, is_set) for bit in bits for is_set in (True, False)]

    def look(self, nodes: Mapping[str, Any], node: int, patterns: Sequence[Pattern]) -> None:
        """Notes which entries differ in a run with changes of a node."""
        own_node = with_entries(nodes[self.name], self._event_dim)
        fn = own_node["fn"]
        while isinstance(fn, MaskedDistribution):
            fn = fn.base_dist
        dim = self._scorer.product.tree.dim(node) - self._event_dim
        values = [own_node["value"]]
        with contextlib.suppress(NotImplementedError):
            # What is observed may hide a dependence that other values show.
            drawn, place = fn.sample(), dim - len(fn.event_shape)
            values.append(drawn.narrow(place, 0, 1) if drawn.dim() >= -place else drawn)
        changes = torch.stack([self._differs(fn, value, node, len(patterns)) for value in values]).any(0)
        wanted = set(self.patterns)
        for pattern, change in zip(patterns, changes, strict=True):
            if pattern in wanted:
                self._changes[pattern] = self._changes[pattern] | change if pattern in self._changes else change

    def _differs(self, fn: Any, value: Tensor, node: int, number: int) -> Tensor:
        """Which entries differ between the first state and each other one, ``(R, E)``."""
        tree = self._scorer.product.tree
        table = flatten(fn.log_prob(value), self._dims, self._event_dim, tree.num_dims)
        table = table.movedim(tree.dim(node) - 1, 0).nan_to_num(nan=IMPOSSIBLE, neginf=IMPOSSIBLE)
        if len(table) != 1 + number:
            return torch.zeros(number, table.shape[-1], dtype=torch.bool)
        possible = table[table > IMPOSSIBLE / 2]
        is_other = (table[1:] - table[:1]).abs() > rounding_tolerance(possible, table.dtype, coarsest_dtype(self._node))
        return is_other.reshape(number, -1, is_other.shape[-1]).any(1).cpu()

    def joins_members(self) -> bool:
        """Whether an entry depends on several members of a plate."""
        twins = ((pattern, pattern._replace(is_set=False)) for pattern in self._changes if pattern.plate is not None and pattern.is_set)
        return any(bool((self._changes[own] & self._changes[twin]).any()) for own, twin in twins if twin in self._changes)

    def read(self) -> Entries | None:
        """Returns the parts of the entries, from what has changed them.

        It is ``None`` if some depend on several members of a plate, if nothing depends on one of the latents, or if all are alike.
        """
        patterns = self.patterns
        if not patterns or self._changes.keys() != set(patterns):
            return None
        changes = torch.stack([self._changes[pattern] for pattern in patterns])
        depends = torch.zeros(len(self._sites), changes.shape[1], dtype=torch.bool)
        member = torch.full((changes.shape[1],), -1)
        for number, site in enumerate(self._sites):
            own = [row for row, pattern in enumerate(patterns) if pattern.site == site]
            depends[number] = changes[own].any(0)
            if patterns[own[0]].plate is None:
                continue
            # One member has each bit or has it not.
            is_set, is_unset = changes[own[0::2]], changes[own[1::2]]
            position = (is_set.long() << torch.arange(len(is_set)).unsqueeze(-1)).sum(0)
            is_single = ((is_set ^ is_unset) == depends[number]).all(0)
            if not bool(is_single.all()) or bool((depends[number] & (member >= 0) & (member != position)).any()):
                return None
            member = torch.where(depends[number], position, member)
        kinds, part = depends.unique(dim=1, return_inverse=True)
        is_whole = len(kinds.T) == 1 and not self._plates and bool(depends.all())
        # Of several entries, some depend on each latent.
        if is_whole or not bool(depends.any(1).all() if depends.shape[1] > 1 else depends.any()):
            return None
        # Entries that no latent changes may go with any others.
        is_kept = kinds.any(0)
        part = (is_kept.cumsum(0) - 1).clamp(min=0)[part]
        scopes = [frozenset(site for site, is_own in zip(self._sites, kind, strict=True) if is_own) for kind in kinds.T[is_kept].tolist()]
        plate = next(iter(self._plates), None)
        return Entries(tuple(scopes), part, self._dims, self._event_dim, plate, member.clamp(min=0), ~depends.any(0))


class _Changes:
    """Runs of a model in which latents of one node change."""

    def __init__(self, scorer: ProductScorer, searches: Sequence[_EntrySearch]) -> None:
        self._scorer, self._searches = scorer, searches
        patterns = list(dict.fromkeys(pattern for search in searches for pattern in search.patterns))
        graph = scorer.product.graph
        self._patterns = {node: [own for own in patterns if own.site in graph.nodes[node].sites] for node in range(len(graph.nodes))}
        self._size = sum(search.size for search in searches) + len(scorer.layout.sites) * max(1, scorer.num_data)

    def count_runs(self) -> int:
        """How many runs there are: none if the fewest are too many."""
        number = sum(map(len, self._patterns.values()))
        if not number:
            return 0
        fewest, wanted = map(max, zip(*(search.count_wanted() for search in self._searches), strict=True))
        affordable = 4 * MOST_ENTRIES // (number * self._size)
        return 0 if affordable < fewest else min(affordable, wanted)

    def look(self, run: int, generator: torch.Generator) -> None:
        """Shows the sites one run with each pattern.

        The first two runs change all values from the lowest to the highest, and back. Others change random ones, by the number of the run.
        """
        scorer, product = self._scorer, self._scorer.product
        base = []
        for place, group in enumerate(product.groups):
            cardinalities = torch.tensor(group.space.cardinalities)
            levels = torch.randint(2**31, (scorer.num_rows(place), 1, len(cardinalities)), generator=generator) % cardinalities
            if run < 2:
                levels = (run * (cardinalities - 1)).expand_as(levels)
            base.append(group.space.pack(levels))
        size = max(1, MOST_ENTRIES // 4 // self._size)
        for node, patterns in self._patterns.items():
            for start in range(0, len(patterns), size):
                part = patterns[start : start + size]
                nodes = scorer.run_sets([words.to(scorer.device) for words in self._sets(node, part, base, run)])
                for search in self._searches:
                    if node in product.graph.factors[search.name]:
                        search.look(nodes, node, part)

    def _sets(self, node: int, patterns: Sequence[Pattern], base: Sequence[Tensor], run: int) -> list[Tensor]:
        """Sets of states, of which those of one node hold its changes."""
        scorer, product = self._scorer, self._scorer.product
        number, position = product.place[node]
        group, layout = product.groups[number], product.node_layouts[node]
        sets = list(base)
        parts = [rows.expand(-1, 1 + len(patterns), -1).clone() for rows in scorer.split_nodes(base[number], number)]
        levels = group.space.unpack(parts[position], torch.int64)
        cardinalities = torch.tensor(group.space.cardinalities)
        others = (levels[:, 0] + 1 + run % (cardinalities - 1).clamp(min=1)) % cardinalities
        if run < 2:
            others = cardinalities - 1 - levels[:, 0]
        for row, pattern in enumerate(patterns, 1):
            own, is_changed = _positions(layout, pattern)
            levels[:, row, own] = torch.where(is_changed, others[:, own], levels[:, row, own])
        parts[position] = group.space.pack(levels)
        sets[number] = torch.cat(parts)
        return sets


def _positions(layout: SiteLayout, pattern: Pattern) -> tuple[slice, Tensor]:
    """Where the latents of a pattern's site are, and which change."""
    site = layout.sites[pattern.site]
    is_changed = torch.ones(site.shape, dtype=torch.bool)
    if pattern.plate is not None:
        _, dim, size = pattern.plate
        place = [own for own, _ in site.plates].index(dim)
        is_chosen = ((torch.arange(size) >> pattern.bit) & 1 == 1) == pattern.is_set
        is_changed &= is_chosen.view(*(-1 if at == place else 1 for at in range(len(site.shape))))
    return layout.slices[pattern.site], is_changed.flatten()
