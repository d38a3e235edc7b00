"""Sets of states for the nodes of a program's factor graph.

It says which nodes, in which plates, and what each set can hold.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from pyro.distributions.util import broadcast_shape
from torch import Tensor

from pyro_truncated.ops.elimination import BucketTree, Messages
from pyro_truncated.program.factor_graph import FactorGraph
from pyro_truncated.program.layout import Layout, SiteLayout
from pyro_truncated.states.space import StateSpace


@dataclasses.dataclass(frozen=True)
class NodeGroup:
    """Nodes with equal state spaces, plates and colour.

    Their sets are rows of one population.
    """

    nodes: tuple[int, ...]  # positions of the nodes in the graph
    layouts: tuple[SiteLayout, ...]  # their sites, as seen from one member of their plates

    @property
    def plates(self) -> tuple[str, ...]:
        """Names of the plates, by dimension from left to right."""
        return self.layouts[0].plates

    @property
    def space(self) -> StateSpace:
        """The space of a node's states."""
        return self.layouts[0].space

    @property
    def num_data(self) -> int:
        """Number of rows: nodes times members of the plates."""
        return len(self.nodes) * self.layouts[0].num_data

    @property
    def sites(self) -> list[str]:
        """Names of all sites of the nodes."""
        return [name for layout in self.layouts for name in layout.sites]


class ProductLayout:
    r"""A factor graph with a set of states for each node.

    The truncated posterior lives on the product of the sets.

    .. math:: \mathcal F = \log \sum_{s_1 \in K_1} \cdots \sum_{s_V \in K_V} p(s, y)

    Attributes:
        graph: the factor graph.
        layout: the discrete sites of the program.
        node_layouts: by node, its sites as seen from one member of its plates.
        groups: nodes whose sets are rows of one population.
        tree: the order in which states are summed out.
        shares_sets: whether the model takes one value for all members of a plate.
        steps: by site of binary chains, the sites of its steps, which stand for it.
    """

    def __init__(self, graph: FactorGraph, layout: Layout) -> None:
        self.graph, self.layout = graph, layout
        self.node_layouts = tuple(layout.part(node.sites, node.plate_names) for node in graph.nodes)
        groups: dict[Any, list[int]] = defaultdict(list)
        for position, (node, own) in enumerate(zip(graph.nodes, self.node_layouts, strict=True)):
            groups[graph.colours[position], own.space.cardinalities, node.plates].append(position)
        self.groups = tuple(NodeGroup(tuple(nodes), tuple(self.node_layouts[node] for node in nodes)) for nodes in groups.values())
        plates = tuple(frozenset(own.dims) for own in self.node_layouts)
        self.shares_sets = False
        self.steps: Mapping[str, Sequence[str]] = {}
        self.tree = BucketTree(graph.order, graph.separators, graph.colours, plates, layout.depth)

    @property
    def all_steps(self) -> set[str]:
        """The sites of all steps of chains."""
        return {name for names in self.steps.values() for name in names}

    def join_steps(self, values: Mapping[str, Tensor], *, is_by_value: bool = False) -> dict[str, Tensor]:
        """Returns what is told by site, with steps of chains put together.

        Steps come before the chains, which are last, or before all values of a chain in what is told of each value.
        """
        steps = self.all_steps
        joined = {}
        for name, own in self.steps.items():
            has_values = is_by_value and self.layout.sites[own[0]].kind != "boolean"
            joined[name] = torch.stack(torch.broadcast_tensors(*(values[step] for step in own)), -3 if has_values else -2)
        return {name: value for name, value in values.items() if name not in steps} | joined

    @cached_property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Types of the sites' values in the prototype run."""
        return {name: site.dtype for name, site in self.layout.sites.items()}

    @cached_property
    def place(self) -> Mapping[int, tuple[int, int]]:
        """By node, its group and its position there."""
        return {node: (number, at) for number, group in enumerate(self.groups) for at, node in enumerate(group.nodes)}

    @cached_property
    def roots(self) -> list[int]:
        """The node of each component that is eliminated last."""
        return [max(component, key=self.tree.place.__getitem__) for component in self.graph.components]

    @cached_property
    def scopes(self) -> Mapping[str, Sequence[tuple[int, ...]]]:
        """By site, the nodes of its factors, as the graph has them."""
        return {name: self.graph.scopes(name) for name in self.graph.factors}

    def evidence_by_node(self, messages: Messages) -> dict[int, Tensor]:
        """Returns, by node, the evidence of its component."""
        return {node: messages.evidence(root) for node, root in self.tree.roots.items()}

    def count_inner(self, number: int) -> int:
        """Returns how many successive rows belong to one data point.

        Data points are the members of the left-most plate that all nodes share.
        """
        own = self.groups[number].layouts[0]
        return math.prod(own.full_sizes[own.plates.index(self.layout.plates[0]) + 1 :])

    def pack(self, levels: Tensor) -> list[Tensor]:
        """Returns whole states ``(N, S, L)`` as states of nodes, ``(rows, S, num_words)`` by group."""
        layout = self.layout
        values = [layout.site_values(state, layout.full_sizes) for state in levels.unbind(1)]
        words = []
        for group in self.groups:
            rows = [torch.stack([own.encode_values(value, own.full_sizes) for value in values], 1) for own in group.layouts]
            words.append(group.space.pack(torch.cat(rows)))
        return words

    def spread(self, node: int, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Spreads what belongs to a node's states, ``(rows, S)``."""
        own, tree = self.node_layouts[node], self.tree
        num_left = tree.num_dims - self.layout.depth - 1 - tree.colours[node]
        plates = own.spread(sizes, self.layout.depth)
        return rows.mT.reshape(*(1,) * num_left, rows.shape[-1], *(1,) * tree.colours[node], *plates)

    def rows(self, node: int, table: Tensor, sizes: Sequence[int]) -> Tensor:
        """Returns ``(rows, S)`` of a table: the inverse of :meth:`spread`."""
        return self._rows(node, table.unsqueeze(0), table.shape[self.tree.dim(node)], sizes)

    def group_rows(self, number: int, tables: Mapping[int, Tensor], sizes: Sequence[int]) -> Tensor:
        """Returns the :meth:`rows` of the tables of a group's nodes, concatenated."""
        nodes = self.groups[number].nodes
        dim = self.tree.dim(nodes[0])
        num_states = max(tables[node].shape[dim] for node in nodes)
        shapes = {tables[node].shape for node in nodes}
        shape = next(iter(shapes)) if len(shapes) == 1 else broadcast_shape(*shapes)
        return self._rows(nodes[0], torch.stack([tables[node].expand(shape) for node in nodes]), num_states, sizes)

    def _rows(self, node: int, tables: Tensor, num_states: int, sizes: Sequence[int]) -> Tensor:
        shape, dim = [1] * self.tree.num_dims, self.tree.dim(node)
        shape[dim] = num_states
        for plate, size in zip(self.node_layouts[node].dims, sizes, strict=True):
            shape[plate] = size
        return tables.expand(-1, *shape).movedim(dim, -1).reshape(-1, num_states)

    def values(self, number: int, words: Tensor, sizes: Sequence[int], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Returns site values of the states ``(rows, S, num_words)`` of a group's nodes.

        The states lie in the dimension of the group's colour. Nodes with sites of one kind are unpacked together. States that all members
        of the plates have are values of all of them, with ones in the place of the plates.
        """
        group = self.groups[number]
        site_values: dict[str, Tensor] = {}
        words = words.unflatten(0, (len(group.nodes), -1))
        if self.shares_sets and torch.equal(words, words[:, :1].expand_as(words)):
            words, sizes = words[:, :1], [1] * len(sizes)
        colour, plates = self.tree.colours[group.nodes[0]], group.layouts[0].spread(sizes, self.layout.depth)
        levels = group.space.unpack(words).transpose(1, 2)
        levels = levels.reshape(*levels.shape[:2], *(1,) * colour, *plates, levels.shape[-1])
        kinds: dict[Any, list[int]] = defaultdict(list)
        for place, own in enumerate(group.layouts):
            # How levels become values: equal for sites that are decoded together.
            sites = ((s.kind, s.plates, s.event_shape, s.low, s.cardinalities, dtypes[name]) for name, s in own.sites.items())
            kinds[tuple(sites)].append(place)
        for places in kinds.values():
            part = levels if len(places) == len(group.nodes) else levels[places]
            first = group.layouts[places[0]]
            by_site = first.decode(part, part.dim() - 1, dtypes)
            for position, values in enumerate(by_site.values()):
                names = (list(group.layouts[place].sites)[position] for place in places)
                site_values.update(zip(names, values.unbind(0), strict=True))
        return site_values

    def summary(self, num_states: int) -> list[str]:
        """Returns a line for each kind of node."""
        lines = []
        for group in self.groups:
            sites, count = group.sites, group.num_data
            names = ", ".join(sites) if len(sites) <= 4 else f"{sites[0]}, {sites[1]}, ..., {sites[-1]}"
            size = min(num_states, group.space.size)
            kind = "all" if size == group.space.size else f"{size} of"
            is_cut = not set(sites).isdisjoint(self.layout.cut_sites)
            exact = "" if size < group.space.size else " (up to max_count)" if is_cut else " (exact)"
            where = f" in {', '.join(group.plates)}" if group.plates else ""
            lines.append(f"{names}: {count} set{'s' * (count > 1)}{where}, {kind} {group.space.readable_size} states each{exact}")
        return lines
