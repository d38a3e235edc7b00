"""Labelled graphs, such as molecules, as bags of subtrees or shortest paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.gp.data_kernels.hashed_counts import HashedCounts, combine, mix
from pyro_truncated.utils.arguments import check_count, names_arguments
from pyro_truncated.utils.budget import rows_per_block


@dataclasses.dataclass(frozen=True)
class Graphs:
    """Undirected graphs with integer labels of nodes and edges, side by side.

    Example:
        >>> atoms, bonds = torch.tensor([6, 6, 8, 6, 8]), torch.tensor([[0, 1, 3], [1, 2, 4]])  # C-C-O and C-O
        >>> graphs = Graphs(2, torch.tensor([0, 0, 0, 1, 1]), atoms, bonds, torch.tensor([1, 1, 1]))
        >>> kernel = CountKernel(shortest_path(graphs))

    Attributes:
        num: number of graphs.
        graph: graph of each node, ``(V,)`` int64, ascending.
        node_label: ``(V,)`` int64.
        edges: both ends of each edge, ``(2, E)`` int64 positions among all nodes. Each edge is listed once.
        edge_label: ``(E,)`` int64.
    """

    num: int
    graph: Tensor
    node_label: Tensor
    edges: Tensor
    edge_label: Tensor

    def __post_init__(self) -> None:
        if self.edges.numel() and not bool((self.graph[self.edges[0]] == self.graph[self.edges[1]]).all()):
            raise ValueError("edges must join nodes of the same graph")

    @staticmethod
    def from_molecules(arrays: Mapping[str, Any], labels: str = "atom") -> Graphs:
        """Molecular graphs from the arrays of a stored molecule file.

        Args:
            arrays: holds ``atom_ptr``, ``atom_Z``, ``atom_degree``, ``atom_charge``, ``atom_aromatic``, ``atom_nH``, ``bond_ptr``,
                ``bond_i``, ``bond_j`` and ``bond_type``.
            labels: ``"atom"`` (all that is known of an atom, and the bond type), ``"element"``
                (element and bond type), ``"degree"`` (number of neighbours) or ``"none"``.

        Raises:
            ValueError: for other labels.
        """
        atom_ptr, bond_ptr, ends_i, ends_j = (torch.as_tensor(arrays[name]).long() for name in ("atom_ptr", "bond_ptr", "bond_i", "bond_j"))
        element, degree, charge, aromatic, hydrogens = (
            torch.as_tensor(arrays[f"atom_{name}"]).long() for name in ("Z", "degree", "charge", "aromatic", "nH")
        )
        known = {
            "atom": combine(element, degree, charge, aromatic, hydrogens),
            "element": element,
            "degree": degree,
            "none": torch.zeros_like(element),
        }
        if labels not in known:
            raise ValueError(f"labels must be one of {', '.join(known)}; got {labels!r}")
        num = len(atom_ptr) - 1
        bond_type = torch.as_tensor(arrays["bond_type"]).long()
        bond_label = bond_type if labels in ("atom", "element") else torch.zeros_like(bond_type)
        offset = torch.repeat_interleave(atom_ptr[:-1], bond_ptr.diff())
        graph = torch.repeat_interleave(torch.arange(num), atom_ptr.diff())
        return Graphs(num, graph, known[labels], torch.stack([ends_i + offset, ends_j + offset]), bond_label)


@names_arguments
def weisfeiler_lehman(graphs: Graphs, iterations: int) -> HashedCounts:
    """Counts of rooted subtrees.

    They are node labels, and labels refined up to ``iterations`` times by those of neighbours and
    edges.

    Inner products of these counts are the Weisfeiler-Lehman subtree kernel.

    Example:
        >>> atoms, bonds = torch.tensor([6, 6, 8, 6, 8]), torch.tensor([[0, 1, 3], [1, 2, 4]])  # C-C-O and C-O
        >>> graphs = Graphs(2, torch.tensor([0, 0, 0, 1, 1]), atoms, bonds, torch.tensor([1, 1, 1]))
        >>> weisfeiler_lehman(graphs, 0).squared_norms  # labels only: 2^2 + 1 and 1 + 1
        tensor([5., 2.], dtype=torch.float64)

    Raises:
        ValueError: if ``iterations`` is negative.

    Reference:
        Shervashidze, Schweitzer, van Leeuwen, Mehlhorn and Borgwardt, "Weisfeiler-Lehman graph kernels", JMLR 12 (2011).
    """
    iterations = check_count("iterations", iterations, least=0)
    label = mix(graphs.node_label)
    source = torch.cat([graphs.edges[0], graphs.edges[1]])
    target = torch.cat([graphs.edges[1], graphs.edges[0]])
    edge = graphs.edge_label.repeat(2)
    keys = [combine(label, 0)]
    for step in range(iterations):
        # A sum of scrambled words is a hash of the multiset of neighbours: their order does not matter.
        around = torch.zeros_like(label).index_add_(0, target, combine(label[source], edge))
        label = combine(label, around)
        keys.append(combine(label, step + 1))
    return HashedCounts.of(graphs.num, graphs.graph.repeat(iterations + 1), torch.cat(keys))


@names_arguments
def shortest_path(graphs: Graphs) -> HashedCounts:
    """Counts of pairs of nodes by labels and shortest path.

    The path is the number of edges; pairs without a connection do not count.

    Inner products of these counts are the shortest-path kernel.

    Example:
        >>> atoms, bonds = torch.tensor([6, 6, 8, 6, 8]), torch.tensor([[0, 1, 3], [1, 2, 4]])  # C-C-O and C-O
        >>> graphs = Graphs(2, torch.tensor([0, 0, 0, 1, 1]), atoms, bonds, torch.tensor([1, 1, 1]))
        >>> shortest_path(graphs).squared_norms  # CC, CO at one edge, CO at two; CO at one edge
        tensor([3., 1.], dtype=torch.float64)

    Reference:
        Borgwardt and Kriegel, "Shortest-path kernels on graphs", ICDM 2005.
    """
    sizes = torch.bincount(graphs.graph, minlength=graphs.num)
    first = sizes.cumsum(0) - sizes
    order = sizes.argsort()
    rows, keys = [], []
    begin = 0
    while begin < graphs.num:
        # Graphs of similar size share a batch, so that little is padded.
        largest = int(sizes[order[min(begin + 63, graphs.num - 1)]])
        batch = order[begin : begin + max(64, rows_per_block(64 * largest**2))]
        batch = batch[sizes[batch] <= max(largest, 1)]
        begin += len(batch)
        found = _paths(graphs, batch, sizes, first)
        rows.append(found[0])
        keys.append(found[1])
    return HashedCounts.of(graphs.num, torch.cat(rows), torch.cat(keys))


def _paths(graphs: Graphs, batch: Tensor, sizes: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Returns graphs and hashes of all connected pairs of nodes.

    A hash is that of (label, label, distance), for nodes in some of the graphs.
    """
    width = max(1, int(sizes[batch].max()))
    place = torch.full((graphs.num,), -1, dtype=torch.int64)
    place[batch] = torch.arange(len(batch))
    chosen = place[graphs.graph[graphs.edges[0]]] >= 0
    edges = graphs.edges[:, chosen]
    owner = graphs.graph[edges[0]]
    a, b = edges - first[owner]
    # Int16 keeps batches small; no path is longer than a graph.
    infinity = width + 1
    distance = torch.full((len(batch), width, width), infinity, dtype=torch.int16)
    distance[place[owner], a, b] = 1
    distance[place[owner], b, a] = 1
    for node in range(width):
        torch.minimum(distance, distance[:, :, node : node + 1] + distance[:, node : node + 1, :], out=distance)
    graph, left, right = ((distance < infinity) & torch.ones(width, width, dtype=torch.bool).triu(1)).nonzero().unbind(1)
    label = mix(graphs.node_label)
    ends = torch.stack([label[first[batch[graph]] + left], label[first[batch[graph]] + right]])
    keys = combine(ends.min(0).values, ends.max(0).values, distance[graph, left, right].long())
    return batch[graph], keys
