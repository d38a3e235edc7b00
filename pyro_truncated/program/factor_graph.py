"""The factor graph of a Pyro program.

Its discrete latents are nodes, and the densities that touch them are factors.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from pyro_truncated.program.entries import Entries
from pyro_truncated.program.sites import DiscreteSite, density_nodes, sample_nodes
from pyro_truncated.utils.console import readable_count, shorten_names

# A plate as a program opens it: its name, dimension and size.
Plate = tuple[str, int, int]
# Largest number of joint states of a clique, for each member of its plates.
CLIQUE_LIMIT = 2**18
# Joint states of one density up to which its sites stay apart, however few states a node keeps.
DENSITY_LIMIT = 2**10


@dataclasses.dataclass(frozen=True)
class Node:
    """A variable of the graph: discrete sites decided together."""

    sites: tuple[str, ...]  # names of the sites
    plates: tuple[Plate, ...]  # the plates whose members are independent given all other nodes, by dimension from left to right

    @property
    def plate_names(self) -> set[str]:
        """Names of the plates."""
        return {name for name, _, _ in self.plates}

    @property
    def num_members(self) -> int:
        """The number of joint members of the plates."""
        return math.prod(size for _, _, size in self.plates)


@dataclasses.dataclass(frozen=True)
class FactorGraph:
    r"""Nodes, factors, and an elimination order that leaves every clique small.

    The joint density of the discrete latents, given all that is continuous or observed, is

    .. math:: p(s, y) = \prod_f \psi_f(s_{v \in f}), \qquad \psi_f \text{ the density of a sample site.}

    Nodes are eliminated leaves first, those in more plates before those in fewer (Obermeyer et al., *Tensor Variable Elimination for
    Plated Factor Graphs*, 2019).
    """

    nodes: tuple[Node, ...]  # the variables
    factors: Mapping[str, tuple[int, ...]]  # by sample site, the positions of the nodes that its density depends on, ascending
    order: tuple[int, ...]  # the positions of the nodes in the order of their elimination
    separators: tuple[tuple[int, ...], ...]  # by node, the nodes that share a clique with it when it is eliminated
    colours: tuple[int, ...]  # by node, a number that the other members of its cliques do not have
    components: tuple[tuple[int, ...], ...]  # positions of the nodes that are connected, a tuple for each component
    # By observed site, its entries where they depend on different nodes; one factor is of all of
    # them.
    entries: Mapping[str, Entries] = dataclasses.field(default_factory=dict)
    coupling_sites: tuple[str, ...] = ()  # the observed sites with several entries that join latents to nodes of which few states are kept
    # What is kept as whole states: a sentence for each component without small cliques, or each
    # site whose members are joined.
    whole: tuple[str, ...] = ()

    @property
    def num_colours(self) -> int:
        """The number of different colours: the size of the largest clique."""
        return max(self.colours) + 1

    def scopes(self, name: str) -> Sequence[tuple[int, ...]]:
        """Returns the nodes of a site's factors."""
        if (entries := self.entries.get(name)) is None:
            return [self.factors[name]]
        place = {site: number for number, node in enumerate(self.nodes) for site in node.sites}
        return [tuple(sorted({place[site] for site in scope})) for scope in entries.scopes]


def build_graph(
    trace: Any,
    scopes: Mapping[str, frozenset[str]],
    sites: Mapping[str, DiscreteSite],
    num_states: int,
    entries: Mapping[str, Entries] | None = None,
) -> FactorGraph:
    """The factor graph of a program.

    Sites at one place on which one observation depends are one node if they are all of a component.
    So are at least three of them that a node can hold in full, or whose table would be too large.
    A component without small cliques becomes one node, in the plates that all of it lies in.
    """
    entries = entries or {}
    factors, plates = _factors(trace, scopes, sites, entries)
    builder = _Builder(factors, plates, sites, num_states)
    return dataclasses.replace(builder.explain(builder.build(), trace), entries=entries)


def _factors(
    trace: Any, scopes: Mapping[str, frozenset[str]], sites: Mapping[str, DiscreteSite], entries: Mapping[str, Entries]
) -> tuple[dict[Any, frozenset[str]], dict[Any, set[Plate]]]:
    """Latents and plates of each density, or part of its entries."""
    # What follows from other sites has no density of its own.
    plates: dict[Any, set[Plate]] = {
        name: {(frame.name, frame.dim, frame.size) for frame in node["cond_indep_stack"] if frame.vectorized}
        for name, node in density_nodes(sample_nodes(trace)).items()
    }
    factors: dict[Any, frozenset[str]] = {name: frozenset((scopes[name] | {name}) & sites.keys()) for name in scopes if name in plates}
    for name, own in entries.items():
        del factors[name]
        factors |= {(name, number): scope for number, scope in enumerate(own.scopes)}
        plates |= {(name, number): plates[name] | own.plates for number in range(len(own.scopes))}
    return {name: scope for name, scope in factors.items() if scope}, plates


class _Builder:
    """Merges sites to nodes until cliques are small."""

    def __init__(
        self, scopes: Mapping[Any, frozenset[str]], plates: Mapping[Any, set[Plate]], sites: Mapping[str, DiscreteSite], num_states: int
    ) -> None:
        places = {name: set(plates[name]) for name in sites}
        self._scopes, self._places, self._num_states, self._joins = scopes, places, num_states, {}
        for name, scope in scopes.items():
            for site in scope:
                if beyond := places[site] - plates[name]:
                    self._joins[site] = name if isinstance(name, str) else name[0], min(beyond)[0]
                places[site] &= plates[name]
        self._sizes = {name: math.prod(site.in_plates({place[0] for place in places[name]}).cardinalities) for name, site in sites.items()}
        self._nodes: dict[str, frozenset[str]] = {site: frozenset({site}) for site in sites}
        self._order = {site: place for place, site in enumerate(sites)}
        # By site, plates whose members are one decision.
        self._joint_plates: dict[str, frozenset[Plate]] = dict.fromkeys(sites, frozenset())
        self._whole: list[str] = []

    def build(self) -> FactorGraph:
        """Merges discrete sites into nodes, and returns the graph of nodes."""
        for group in self._decisions():
            table = math.prod(self._node_limit(self._nodes[site]) for site in group)
            if self._node_size(group) <= self._num_states or table > self._density_limit:
                self._merge(group)
        for component in self._components():
            # All sites lie at one place, and one density that is not that of a discrete latent depends on
            # all of them: they are decided together.
            places = {frozenset(self._places[site]) for site in component}
            if len(places) == 1 and any(scope == component for name, scope in self._scopes.items() if name not in self._sizes):
                self._merge(component)
            elif len(component) > 1:
                self._merge_until_narrow(component)
        return self._graph()

    def explain(self, graph: FactorGraph, trace: Any) -> FactorGraph:
        """Adds which sites couple nodes, and what is kept as whole states."""
        factors, sizes, num_states = self._scopes, self._sizes, self._num_states
        joins = {site: join for site, join in self._joins.items() if sizes[site] > num_states}
        joined = [
            f"'{name}' depends on several members of the plate '{plate}' of '{site}': they are one decision, with {num_states} of "
            f"{readable_count(sizes[site])} states. "
            "Members stay apart where each entry depends on one of them, as by an index of one plate, u[group]."
            for site, (name, plate) in joins.items()
        ]
        observed = {name: scope for name, scope in factors.items() if isinstance(name, str) and name not in sizes}
        stacked, coupling_sites = [], [name for name, _ in joins.values() if name in observed]
        for node in graph.nodes:
            own, size = frozenset(node.sites), math.prod(sizes[name] for name in node.sites)
            if size <= num_states:
                continue
            near = {name: trace.nodes[name]["fn"].shape().numel() for name, scope in observed.items() if scope & own}
            divisible = [name for name, number in near.items() if number > node.num_members]
            coupling_sites += [name for name in divisible if len(observed[name] & own) > 1]
            # Sites that take entries of one stack all seem to depend on all of it.
            single = Counter(scope for name, scope in observed.items() if len(scope & own) > 1 and name not in divisible)
            coupling_sites += [name for name, scope in observed.items() if name not in divisible and single[scope] > 1]
            # Latents that depend on each other otherwise too, as the steps of a chain.
            is_sparse = any(factors[name] & own - {name} for name in own) and not any(factors[name] >= own for name in own)
            whole = [name for name in divisible if observed[name] == own]
            if is_sparse and whole:
                stacked.append(
                    f"'{whole[0]}' depends on all of the sites {shorten_names(node.sites)}: a population holds whole states, {num_states} "
                    f"of {readable_count(size)}. If each entry depends on few of them, as on one step, observe each by a site of its own."
                )
        # What holds of many steps is said of the first one.
        alike = [(kind[0], f" The same holds of {len(kind) - 1} more." if len(kind) > 1 else "") for kind in (joined, stacked) if kind]
        sentences = graph.whole or tuple(sentence + more for sentence, more in alike)
        return dataclasses.replace(graph, coupling_sites=tuple(dict.fromkeys(coupling_sites)), whole=sentences)

    # --- which sites are one node ---

    @property
    def _density_limit(self) -> int:
        """Returns how many joint states of a density keep sites apart."""
        return max(self._num_states**2, DENSITY_LIMIT)

    def _decisions(self) -> list[frozenset[str]]:
        """Returns groups of sites at one place that one density joins.

        There are at least three of them, and the density is not itself that of a discrete latent.

        Groups that overlap, as where an observation depends on the last three steps of a chain, are none.
        """
        groups = {
            frozenset(group)
            for name, scope in self._scopes.items()
            if name not in self._sizes
            for group in self._group_by_place(scope).values()
            if len(group) > 2
        }
        largest = [group for group in groups if not any(group < other for other in groups)]
        counts = Counter(site for group in largest for site in group)
        decisions = (group for group in largest if all(counts[site] == 1 for site in group))
        return sorted(decisions, key=lambda group: min(self._order[site] for site in group))

    def _group_by_place(self, sites: Iterable[str]) -> dict[frozenset[Plate], set[str]]:
        groups: dict[frozenset[Plate], set[str]] = defaultdict(set)
        for site in sites:
            groups[self._plates(self._nodes[site])].add(site)
        return groups

    def _merge_until_narrow(self, component: frozenset[str]) -> None:
        """Merges sites until there is a narrow elimination order."""
        while (wide := self._widest(component)) is not None:
            if not self._merge_at_one_place(wide):
                break
        if not self._decide_members_together(component):
            for group in self._decisions():
                if group <= component:
                    self._merge(group)
            self._decide_members_together(component)
        if len(self._current(component)) == 1 or self._eliminate(component) is None:
            names, size = [name for name in self._sizes if name in component], readable_count(self._node_size(component))
            self._whole.append(
                f"the {len(names)} sites {shorten_names(names)} depend on each other too densely for a set of states each: a population "
                f"holds whole states, {self._num_states} of {size}. Fewer sites in one density, or a larger num_states, would help."
            )
            self._merge(component)

    def _decide_members_together(self, component: frozenset[str]) -> bool:
        """Makes all members of some plates one decision, to keep cliques small.

        Returns whether cliques are small. Given all members of one of two plates that cross, those of the other are independent.
        """
        plates = set().union(*(self._places[site] for site in component)) - self._plates(component)

        def log_states(plate: Plate) -> float:
            return sum(plate[2] * math.log(self._sizes[site]) for site in component if plate in self._places[site])

        fewest = sorted(plates, key=lambda plate: (log_states(plate), plate))
        for subset in [[], *([plate] for plate in fewest), *(fewest[:number] for number in range(2, len(fewest) + 1)), []]:
            self._joint_plates |= dict.fromkeys(component, frozenset(subset))
            if self._eliminate(component) is not None:
                return True
        return False

    def _eliminate(self, component: frozenset[str]) -> dict[Any, set[Any]] | None:
        members = self._current(component)
        every, cliques = set(members), ({self._nodes[site] for site in scope} for scope in self._scopes.values())
        return eliminate(members, [clique for clique in cliques if clique <= every], self._plates, self._node_limit)

    def _merge_at_one_place(self, scope: Collection[str]) -> bool:
        """Merges a density's nodes at one place; returns whether any were."""
        before = {self._nodes[site] for site in scope}
        for group in self._group_by_place(scope).values():
            self._merge(frozenset().union(*(self._nodes[site] for site in group)))
        return {self._nodes[site] for site in scope} != before

    def _merge(self, sites: frozenset[str]) -> None:
        for site in sites:
            self._nodes[site] = sites

    def _widest(self, component: frozenset[str]) -> frozenset[str] | None:
        """Returns the scope of a density that is too wide."""
        for name, scope in self._scopes.items():
            if scope <= component:
                nodes = {self._nodes[site] for site in scope}
                if len(nodes) > 2 and math.prod(map(self._node_limit, nodes)) > self._density_limit:
                    own = {name} & self._sizes.keys()
                    if len({self._nodes[site] for site in scope - own}) > 1:
                        return scope - own
        return None

    # --- nodes as they are now ---

    def _plates(self, node: frozenset[str]) -> frozenset[Plate]:
        return frozenset(set.intersection(*(self._places[site] - self._joint_plates[site] for site in node)))

    def _node_size(self, node: frozenset[str]) -> int:
        """Returns how many states a node has."""
        common = self._plates(node)
        return math.prod(self._sizes[site] ** math.prod(size for _, _, size in self._places[site] - common) for site in node)

    def _node_limit(self, node: frozenset[str]) -> int:
        """The most states that a node keeps."""
        return min(self._num_states, self._node_size(node))

    def _components(self) -> list[frozenset[str]]:
        """Sites that are connected, in the order of the program."""
        parents = {site: site for site in self._sizes}

        def find(site: str) -> str:
            while parents[site] != site:
                parents[site] = site = parents[parents[site]]
            return site

        for scope in [*self._scopes.values(), *set(self._nodes.values())]:
            first, *others = map(find, scope)
            for other in others:
                parents[find(other)] = find(first)
        components: dict[str, set[str]] = defaultdict(set)
        for site in self._sizes:
            components[find(site)].add(site)
        return [frozenset(sites) for sites in components.values()]

    def _current(self, component: Collection[str]) -> list[frozenset[str]]:
        return list(dict.fromkeys(self._nodes[site] for site in sorted(component, key=self._order.__getitem__)))

    def _graph(self) -> FactorGraph:
        nodes = self._current(self._sizes)
        place = {node: position for position, node in enumerate(nodes)}
        order: list[frozenset[str]] = []
        separators: dict[frozenset[str], set[frozenset[str]]] = {}
        components = []
        by_site = {site: component for component in self._components() for site in component}
        for component in dict.fromkeys(by_site[next(iter(node))] for node in nodes):
            plan = self._eliminate(component)
            assert plan is not None
            order.extend(plan)
            separators |= plan
            components.append(tuple(place[node] for node in self._current(component)))
        # What stacks nodes broadcasts their states: in a dimension all have the same number.
        has_parts = any(not isinstance(name, str) for name in self._scopes)
        colours = _colour(order, separators, {node: self._node_limit(node) for node in order} if has_parts else None)
        # Factors of a site's entries have its name and a number.
        sites: dict[str, set[str]] = defaultdict(set)
        for name, scope in self._scopes.items():
            sites[name if isinstance(name, str) else name[0]] |= scope
        return FactorGraph(
            nodes=tuple(
                Node(tuple(site for site in self._sizes if site in node), tuple(sorted(self._plates(node), key=lambda plate: plate[1])))
                for node in nodes
            ),
            factors={name: tuple(sorted({place[self._nodes[site]] for site in scope})) for name, scope in sites.items()},
            order=tuple(place[node] for node in order),
            separators=tuple(tuple(sorted(place[other] for other in separators[node])) for node in nodes),
            colours=tuple(colours[node] for node in nodes),
            components=tuple(components),
            whole=tuple(self._whole),
        )


def eliminate(
    nodes: Sequence[Any],
    cliques: Iterable[Collection[Any]],
    site_plates: Callable[[Any], frozenset[Plate]],
    size: Callable[[Any], int],
) -> dict[Any, set[Any]] | None:
    """Returns an elimination order by the fewest new edges.

    It comes with the separator of each node; it is ``None`` where cliques become too large.

    A node can be eliminated once all its neighbours lie in no other plates than it does.
    """
    neighbours: dict[Any, set[Any]] = {node: set() for node in nodes}
    for clique in cliques:
        if math.prod(map(size, clique)) > CLIQUE_LIMIT:
            return None
        for node in clique:
            neighbours[node] |= set(clique) - {node}
    place = {node: position for position, node in enumerate(nodes)}
    plates = {node: site_plates(node) for node in nodes}
    # Ordered pairs of neighbours of each node that are none of each other, kept as edges come and go.
    missing = {node: sum(len(around - neighbours[other]) - 1 for other in around) for node, around in neighbours.items()}

    def priority(node: Any) -> tuple[int, int, int]:
        is_ready = all(plates[other] <= plates[node] for other in neighbours[node])
        return (0 if is_ready else 1, missing[node], place[node])

    queue = [(priority(node), place[node]) for node in nodes]
    heapq.heapify(queue)
    separators: dict[Any, set[Any]] = {}
    while queue:
        rank, position = heapq.heappop(queue)
        node = nodes[position]
        if node in separators or rank[1] != missing[node] or rank != priority(node):
            continue
        around = neighbours.pop(node)
        if rank[0] or math.prod(map(size, [node, *around])) > CLIQUE_LIMIT:
            return None
        separators[node] = around
        for other in _join(node, around, neighbours, missing):
            heapq.heappush(queue, (priority(other), place[other]))
    return separators


def _join(node: Any, around: set[Any], neighbours: Mapping[Any, set[Any]], missing: dict[Any, int]) -> set[Any]:
    """Joins the neighbours of a node; returns whose missing pairs may change."""
    changed = set(around)
    for other in around:
        neighbours[other].discard(node)
        missing[other] -= 2 * len(neighbours[other] - around)
    for other, another in itertools.combinations(around, 2):
        if another not in neighbours[other]:
            common = neighbours[other] & neighbours[another]
            for own in common:
                missing[own] -= 2
            changed |= common
            missing[other] += 2 * (len(neighbours[other]) - len(common))
            missing[another] += 2 * (len(neighbours[another]) - len(common))
            neighbours[other].add(another)
            neighbours[another].add(other)
    return changed


def _colour(order: Sequence[Any], separators: Mapping[Any, set[Any]], sizes: Mapping[Any, int] | None = None) -> dict[Any, int]:
    """Returns by node a number that its separator does not have.

    It is, from the last node to the first, the smallest one that nodes of other sizes do not have either. Where all sizes are equal, there
    are as many as the largest clique has nodes.
    """
    sizes = dict.fromkeys(order, 1) if sizes is None else sizes
    colours: dict[Any, int] = {}
    colour_sizes: dict[int, int] = {}
    for node in reversed(order):
        taken = {colours[other] for other in separators[node]}
        taken |= {colour for colour, size in colour_sizes.items() if size != sizes[node]}
        colours[node] = next(colour for colour in range(len(taken) + 1) if colour not in taken)
        colour_sizes[colours[node]] = sizes[node]
    return colours
