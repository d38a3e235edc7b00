"""Kernels of counted features of objects, computed once.

Strings and labelled graphs, such as molecules, become counts of their parts, keyed by 64-bit hashes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.gp.data_kernels.protocol import PairwiseKernel, positive_parameter
from pyro_truncated.ops.streams import FINALISER, GOLDEN
from pyro_truncated.utils.arguments import Renamed, check_count, check_kinds, describe, names_arguments
from pyro_truncated.utils.arrays import as_data, as_tensors, check_column_names, remember_columns
from pyro_truncated.utils.budget import rows_per_block
from pyro_truncated.utils.constraints import as_signed


class FixedKernel(PairwiseKernel):
    """A learned variance times a kernel without parameters, cached by columns.

    When a GiB is full, columns that are unused for longest make room.
    """

    def __init__(self, num_data: int, variance: float, like: Tensor) -> None:
        super().__init__(num_data)
        self.variance: Tensor = positive_parameter(variance, like)
        self._capacity = max(1, min(num_data, 2**30 // (num_data * like.itemsize)))
        self._kept: dict[int, Tensor] = {}  # columns, the least recently used first
        self._diagonal: Tensor | None = None

    def base_between(self, first: Any, second: Any) -> Tensor:
        """Covariances ``(a, b)`` of points at variance one."""
        raise NotImplementedError

    def base_variances(self, points: Any) -> Tensor:
        """Variances ``(a,)`` of points at variance one."""
        raise NotImplementedError

    def between(self, first: Any, second: Any) -> Tensor:
        """Covariances ``(a, b)`` of points."""
        return self.variance * self.base_between(first, second).to(self.variance)

    def variances(self, points: Any) -> Tensor:
        """Variances ``(a,)`` of points."""
        return self.variance * self.base_variances(points).to(self.variance)

    def points(self, new: Any) -> Any:
        """New inputs, arrays as tensors."""
        check_column_names(self, "new", new)
        return as_tensors(new, self.variance, "new")

    def diag(self, rows: Tensor | None = None) -> Tensor:
        """Variances of the training inputs, ``(n,)``, or only those at ``rows``."""
        base = self._diagonal
        if base is None or (base.device, base.dtype) != (self.variance.device, self.variance.dtype):
            self._diagonal = base = self.base_variances(self.inputs).to(self.variance)
        return self.variance * (base if rows is None else base[rows])

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Covariances ``(n, b)`` with inputs at ``index``, of all or ``rows``."""
        base = self._kept_columns(index)
        return self.variance * (base if rows is None else base[rows])

    @torch.no_grad()
    def _kept_columns(self, index: Tensor) -> Tensor:
        index = index.to(self.variance.device)
        if len(index) > self._capacity:
            return self.base_between(self.inputs, self.take(index)).to(self.variance)
        kept, like = self._kept, next(iter(self._kept.values()), self.variance)
        if (like.device, like.dtype) != (self.variance.device, self.variance.dtype):
            kept.clear()
        wanted = index.tolist()
        missing = sorted(set(wanted) - kept.keys())
        for position in wanted:
            if position in kept:
                kept[position] = kept.pop(position)
        while len(kept) + len(missing) > self._capacity:
            del kept[next(iter(kept))]
        if missing:
            # Copies: a view of one column would keep them all.
            columns = self.base_between(self.inputs, self.take(index.new_tensor(missing))).to(self.variance).mT
            kept.update(zip(missing, (column.clone() for column in columns), strict=True))
        return torch.stack([kept[position] for position in wanted]).mT if wanted else self.variance.new_zeros(self.num_data, 0)


class FunctionKernel(FixedKernel):
    """A Python function ``k(x, z)`` of two objects, cached by columns.

    Example:
        >>> def common(a, b):
        ...     return len(a & b) / len(a | b)
        >>> kernel = FunctionKernel(common, [{1, 2}, {2, 3}, {4}])
        >>> kernel.columns(torch.tensor([0])).flatten()
        tensor([1.0000, 0.3333, 0.0000], dtype=torch.float64, grad_fn=<...>)

    Args:
        function: returns a number for two objects, or with ``batched`` a matrix ``(a, b)`` for two lists of objects.
        objects: the training inputs; new inputs are given as a sequence as well.
        batched: what the function takes.
        variance: a variance to start from, which multiplies the function.

    Raises:
        TypeError: if an argument is not of its kind, new inputs are no sequence, or the function has no number for two objects.
        ValueError: if with ``batched`` the matrix is of another shape.
    """

    @names_arguments
    def __init__(
        self, function: Callable[[Any, Any], Any], objects: Sequence[Any], *, batched: bool = False, variance: float = 1.0
    ) -> None:
        if not callable(function):
            raise TypeError(f"function must be callable; got {type(function).__name__}")
        check_kinds(FunctionKernel.__init__, objects=objects, batched=batched)
        super().__init__(len(objects), variance, torch.zeros((), dtype=torch.float64))
        self.function = function
        self.inputs = objects
        self.batched = batched

    def take(self, rows: Tensor | None) -> Sequence[Any]:
        """The objects, or those at ``rows``."""
        return self.inputs if rows is None else [self.inputs[i] for i in torch.as_tensor(rows).tolist()]

    def points(self, new: Sequence[Any]) -> Sequence[Any]:
        """New objects as they are."""
        new = super().points(new)
        check_kinds(FunctionKernel.points, new=new)
        return new

    def base_between(self, first: Sequence[Any], second: Sequence[Any]) -> Tensor:
        """Values ``(a, b)`` of the function."""
        if self.batched:
            values = torch.as_tensor(self.function(list(first), list(second)), dtype=torch.float64)
            if values.shape != (len(first), len(second)):
                raise ValueError(f"function must return a matrix of shape {(len(first), len(second))}; got {tuple(values.shape)}")
            return values
        rows = [[_number(self.function, x, z) for z in second] for x in first]
        return torch.tensor(rows, dtype=torch.float64).reshape(len(first), len(second))

    def base_variances(self, points: Sequence[Any]) -> Tensor:
        """Values ``(a,)`` of the function for equal objects."""
        if self.batched:
            return torch.tensor([float(torch.as_tensor(self.function([x], [x])).reshape(())) for x in points], dtype=torch.float64)
        return torch.tensor([_number(self.function, x, x) for x in points], dtype=torch.float64)


def _number(function: Callable[[Any, Any], Any], first: Any, second: Any) -> float:
    try:
        value = function(first, second)
    except Exception as error:
        kinds = f"{type(first).__name__} and {type(second).__name__}"
        raise TypeError(f"function fails on two objects, {kinds}: {type(error).__name__}: {error}") from error
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"function must return a number for two objects; got {type(value).__name__}: {error}") from error


def mix(words: Tensor) -> Tensor:
    """Scrambles 64-bit words one-to-one; sums are hashes of multisets."""
    words = (words ^ _logical_shift(words, 32)) * GOLDEN
    words = (words ^ _logical_shift(words, 29)) * FINALISER
    return words ^ _logical_shift(words, 32)


def combine(*parts: Tensor | int) -> Tensor:
    """A hash of several words, in their order."""
    total = torch.zeros((), dtype=torch.int64)
    for part in parts:
        total = mix(total * GOLDEN + part + 1)
    return total


def _logical_shift(words: Tensor, bits: int) -> Tensor:
    return (words >> bits) & ((1 << (64 - bits)) - 1)


@dataclasses.dataclass(frozen=True)
class HashedCounts:
    """Counts above zero of features in ``num`` objects, sorted by both.

    Example:
        >>> counts = HashedCounts.from_occurrences(2, rows=torch.tensor([0, 0, 1]), keys=torch.tensor([7, 7, 5]))  # 7 twice; 5 once
        >>> counts.squared_norms
        tensor([4., 1.], dtype=torch.float64)

    Attributes:
        num: number of objects.
        rows: object of each entry, ``(E,)`` int64.
        keys: feature of each entry, ``(E,)`` int64.
        counts: how often it occurs, ``(E,)`` float64.
    """

    num: int
    rows: Tensor
    keys: Tensor
    counts: Tensor

    def __len__(self) -> int:
        return self.num

    @staticmethod
    def from_occurrences(num: int, rows: Tensor, keys: Tensor, counts: Tensor | None = None) -> HashedCounts:
        """Adds up occurrences: entries of the same object and feature become one.

        Args:
            num: number of objects.
            rows: object of each occurrence, ``(E,)``.
            keys: feature of each occurrence, ``(E,)``.
            counts: weight of each occurrence, ``(E,)``. Default: one.
        """
        counts = torch.ones(len(rows), dtype=torch.float64, device=rows.device) if counts is None else counts.double()
        vocabulary, column = keys.unique(return_inverse=True)
        places, group = (rows.long() * len(vocabulary) + column).unique(return_inverse=True)
        total = counts.new_zeros(len(places)).index_add_(0, group, counts)
        return HashedCounts(num, places // len(vocabulary), vocabulary[places % len(vocabulary)], total)

    of = Renamed("from_occurrences")

    @staticmethod
    def from_csr(indptr: Tensor, indices: Tensor, data: Tensor) -> HashedCounts:
        """Counts from a compressed sparse row matrix, a row per object.

        Raises:
            ValueError: if the arrays do not fit each other or a count is not positive.
        """
        indptr, indices, data = as_tensors((indptr, indices, data))
        data = as_signed(data)
        if len(indices) != len(data) or int(indptr[-1]) != len(indices):
            raise ValueError(f"indptr ends at {int(indptr[-1])}, but there are {len(indices)} indices and {len(data)} counts")
        if bool((data <= 0).any()):
            raise ValueError(f"data must be positive counts; got {float(data.min()):g}")
        num = len(indptr) - 1
        rows = torch.repeat_interleave(torch.arange(num), indptr.long().diff())
        return HashedCounts.from_occurrences(num, rows, mix(indices.long()), data)

    @staticmethod
    def from_matrix(features: Tensor) -> HashedCounts:
        """Counts from a matrix ``(n, F)``, one row per object.

        Raises:
            TypeError: if it is no matrix of real numbers.
            ValueError: if a count is negative or not finite.
        """
        features = as_tensors(features)
        if not isinstance(features, Tensor) or features.dim() != 2 or features.is_complex():
            kind = f"{features.dtype} of shape {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
            raise TypeError(f"features must be a matrix (n, F) of real counts; got {kind}")
        features = as_signed(features)
        if not bool((features >= 0).all()) or not bool(features.isfinite().all()):
            least = float(features.min())
            raise ValueError(f"features must be counts, finite and not negative; got {describe(features)}, the least {least:g}")
        rows, columns = features.nonzero(as_tuple=True)
        return HashedCounts.from_occurrences(len(features), rows, mix(columns), features[rows, columns])

    def to(self, device: torch.device | str) -> HashedCounts:
        """The same counts on a device."""
        return HashedCounts(self.num, *(part.to(device) for part in (self.rows, self.keys, self.counts)))

    def __getitem__(self, index: Tensor) -> HashedCounts:
        """Returns the objects at distinct positions ``index`` ``(b,)``, in that order."""
        place = torch.full((self.num,), -1, dtype=torch.int64, device=self.rows.device)
        place[index] = torch.arange(len(index), device=self.rows.device)
        is_selected = place[self.rows] >= 0
        return HashedCounts.from_occurrences(len(index), place[self.rows[is_selected]], self.keys[is_selected], self.counts[is_selected])

    def __add__(self, other: HashedCounts) -> HashedCounts:
        """All features of both, of the same objects."""
        if self.num != other.num:
            raise ValueError(f"counts of {self.num} and of {other.num} objects cannot be joined")
        joined = ((getattr(self, name), getattr(other, name)) for name in ("rows", "keys", "counts"))
        return HashedCounts.from_occurrences(self.num, *(torch.cat(pair) for pair in joined))

    def unary(self) -> HashedCounts:
        r"""Replaces a count :math:`c` by ``c`` features of count one.

        Inner products of these are :math:`\sum_f \min(c_f, c'_f)`.

        Raises:
            ValueError: if a count is no integer.
        """
        repeats = self.counts.round().long()
        if not bool(torch.equal(repeats.double(), self.counts)):
            raise ValueError(f"counts must be integers; got {float(self.counts[repeats != self.counts][0]):g}")
        start = torch.repeat_interleave(repeats.cumsum(0) - repeats, repeats)
        level = torch.arange(int(repeats.sum()), device=self.rows.device) - start
        keys = mix(torch.repeat_interleave(self.keys, repeats) + level * GOLDEN)
        return HashedCounts.from_occurrences(self.num, torch.repeat_interleave(self.rows, repeats), keys)

    def matrix(self, vocabulary: Tensor) -> Tensor:
        """The sparse matrix ``(num, V)`` of counts by sorted vocabulary ``(V,)``."""
        column = torch.searchsorted(vocabulary, self.keys)
        is_known = (column < len(vocabulary)) & (torch.cat([vocabulary, vocabulary.new_zeros(1)])[column] == self.keys)
        index = torch.stack([self.rows[is_known], column[is_known]])
        # Entries are sorted by object and key, which is what a coalesced matrix needs.
        return torch.sparse_coo_tensor(index, self.counts[is_known], (self.num, len(vocabulary)), is_coalesced=True, check_invariants=False)

    @property
    def squared_norms(self) -> Tensor:
        """Sum of squared counts of each object, ``(num,)``."""
        return self.counts.new_zeros(self.num).index_add_(0, self.rows, self.counts.square())


@names_arguments
def spectrum(strings: Sequence[str], length: int, *, shorter: bool = False) -> HashedCounts:
    """Counts of substrings of a length: the spectrum kernel's features.

    Example:
        >>> counts = spectrum(["CCO", "CC"], 2)  # CC and CO; CC
        >>> counts.squared_norms
        tensor([2., 1.], dtype=torch.float64)

    Args:
        strings: the strings.
        length: number of characters ``k`` of a substring.
        shorter: whether substrings of 1 to ``k - 1`` characters count as well.

    Raises:
        ValueError: if ``length`` is not positive.

    Reference:
        Leslie, Eskin and Noble, "The spectrum kernel: a string kernel for SVM protein classification", PSB 2002.
    """
    length = check_count("length", length)
    text = "".join(strings)
    letters = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32).long() if text else torch.zeros(0, dtype=torch.int64)
    sizes = torch.tensor([len(string) for string in strings], dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(strings)), sizes)
    end = sizes.cumsum(0)[owner]
    position = torch.arange(len(letters))
    rows, keys = [], []
    for size in range(1 if shorter else length, length + 1):
        start = position[position + size <= end]
        windows = letters[start[:, None] + torch.arange(size)]
        rows.append(owner[start])
        keys.append(combine(*windows.unbind(1), size))
    return HashedCounts.from_occurrences(len(strings), torch.cat(rows), torch.cat(keys))


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
            first, second = self.edges[:, self.graph[self.edges[0]] != self.graph[self.edges[1]]][:, 0].tolist()
            raise ValueError(f"edges must join nodes of the same graph; got an edge from node {first} to node {second}")

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
        features = {
            "atom": combine(element, degree, charge, aromatic, hydrogens),
            "element": element,
            "degree": degree,
            "none": torch.zeros_like(element),
        }
        if labels not in features:
            raise ValueError(f"labels must be one of {', '.join(features)}; got {labels!r}")
        num = len(atom_ptr) - 1
        bond_type = torch.as_tensor(arrays["bond_type"]).long()
        bond_label = bond_type if labels in ("atom", "element") else torch.zeros_like(bond_type)
        offset = torch.repeat_interleave(atom_ptr[:-1], bond_ptr.diff())
        graph = torch.repeat_interleave(torch.arange(num), atom_ptr.diff())
        return Graphs(num, graph, features[labels], torch.stack([ends_i + offset, ends_j + offset]), bond_label)


@names_arguments
def weisfeiler_lehman(graphs: Graphs, iterations: int) -> HashedCounts:
    """Counts of rooted subtrees: the Weisfeiler-Lehman kernel's features.

    They are node labels, and labels refined up to ``iterations`` times by those of neighbours and edges.

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
    return HashedCounts.from_occurrences(graphs.num, graphs.graph.repeat(iterations + 1), torch.cat(keys))


@names_arguments
def shortest_path(graphs: Graphs) -> HashedCounts:
    """Counts of pairs of nodes by labels and shortest path.

    Inner products of these counts are the shortest-path kernel; pairs without a connection do not count.

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
        paths = _paths(graphs, batch, sizes, first)
        rows.append(paths[0])
        keys.append(paths[1])
    return HashedCounts.from_occurrences(graphs.num, torch.cat(rows), torch.cat(keys))


def _paths(graphs: Graphs, batch: Tensor, sizes: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Graphs and hashes (label, label, distance) of connected pairs of nodes."""
    width = max(1, int(sizes[batch].max()))
    place = torch.full((graphs.num,), -1, dtype=torch.int64)
    place[batch] = torch.arange(len(batch))
    is_in_batch = place[graphs.graph[graphs.edges[0]]] >= 0
    edges = graphs.edges[:, is_in_batch]
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


class CountKernel(FixedKernel):
    r"""Inner products of counts, :math:`s_{ij} = \sum_f c_{if} c_{jf}`, as they are or normalised.

    ===============  ==================================================
    ``"inner"``      :math:`s_{ij}` over the mean of all :math:`s_{ii}`
    ``"cosine"``     :math:`s_{ij} / \sqrt{s_{ii} s_{jj}}`
    ``"tanimoto"``   :math:`s_{ij} / (s_{ii} + s_{jj} - s_{ij})`
    ===============  ==================================================

    Example:
        >>> kernel = CountKernel(spectrum(["CCO", "CCC", "NNN"], 1))
        >>> kernel.columns(torch.tensor([0])).flatten()  # Tanimoto: 5 common of 5, 6 of 8, none
        tensor([1.0000, 0.7500, 0.0000], dtype=torch.float64, grad_fn=<...>)

    Args:
        features: counts of the training inputs, as :class:`HashedCounts` or a matrix ``(n, F)``. New inputs are given the same way.
        normalization: one of the names above.
        variance: :math:`v` to start from.
        dtype: type of the covariances.
    """

    _vocabulary: Tensor
    _norms: Tensor
    _matrix: Tensor
    _scale: Tensor
    _num_features: int | None = None

    @names_arguments
    def __init__(
        self,
        features: HashedCounts | Tensor,
        normalization: str = "tanimoto",
        variance: float = 1.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        table, width, features = features, _width(features), self.prepare(features)
        super().__init__(len(features), variance, features.counts.to(dtype))
        remember_columns(self, "new", table)
        if normalization not in ("inner", "cosine", "tanimoto"):
            raise ValueError(f'normalization must be "inner", "cosine" or "tanimoto"; got {normalization!r}')
        self.normalization, self._num_features = normalization, width
        vocabulary, norms = features.keys.unique(), features.squared_norms
        if not bool(norms.sum().isfinite()):
            raise ValueError(f"features must be counts whose squares have a finite sum; got counts up to {float(features.counts.max()):g}")
        parts = {"_vocabulary": vocabulary, "_norms": norms, "_matrix": features.matrix(vocabulary)}
        for name, tensor in {**parts, "_scale": norms.mean().clamp(min=1e-30)}.items():
            self.register_buffer(name, tensor, persistent=False)

    def prepare(self, features: HashedCounts | Tensor) -> HashedCounts:
        """What is multiplied: the counts themselves."""
        if isinstance(features, HashedCounts):
            return features
        width, expected = _width(features), self._num_features
        if width is None:
            kind = type(features).__name__
            raise TypeError(f"features must be HashedCounts or a matrix (n, F) of counts, of new inputs as of training inputs; got {kind}")
        if expected not in (None, width):
            raise ValueError(f"features must have {expected} columns, as those of the training inputs; got {width}")
        return HashedCounts.from_matrix(features)

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """Sparse counts ``(n, V)`` and squared norms ``(n,)`` of the training inputs."""
        return self._matrix, self._norms

    def take(self, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """The training inputs, or those at ``rows``."""
        if rows is None:
            return self.inputs
        rows = torch.as_tensor(rows, device=self._norms.device)
        return self._matrix.index_select(0, rows), self._norms[rows]

    def points(self, new: Any, own_features: bool = False) -> tuple[Tensor, Tensor]:
        """Counts of new inputs, by the training inputs' or their own features."""
        counts = self.prepare(super().points(new)).to(self._vocabulary.device)
        return counts.matrix(counts.keys.unique() if own_features else self._vocabulary), counts.squared_norms

    def base_between(self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
        """Normalised products ``(a, b)``."""
        (matrix, left), (other, right) = first, second
        parts = torch.arange(len(right), device=right.device).split(rows_per_block(16 * other.shape[1]))
        products = torch.cat([torch.sparse.mm(matrix, other.index_select(0, part).to_dense().mT) for part in parts], 1)
        if self.normalization == "inner":
            return products / self._scale
        left = left[:, None]
        size = (left * right).sqrt() if self.normalization == "cosine" else left + right - products
        return torch.where(left + right > 0, products / size.clamp(min=1e-30), torch.ones_like(products))

    def base_variances(self, points: tuple[Tensor, Tensor]) -> Tensor:
        """Normalised products of counts with themselves, ``(a,)``."""
        return points[1] / self._scale if self.normalization == "inner" else torch.ones_like(points[1])

    def among(self, new: Any) -> Tensor:
        """Covariances ``(n_new, n_new)`` of new inputs with each other."""
        # New inputs may have features that no training input has.
        points = self.points(new, own_features=True)
        return self.between(points, points)


class MinMaxKernel(CountKernel):
    r""":math:`\sum_f \min(c_{if}, c_{jf}) / \sum_f \max(c_{if}, c_{jf})` of integer counts; of zeros and ones the same as Tanimoto.

    Example:
        >>> kernel = MinMaxKernel(spectrum(["CCO", "CCC", "NNN"], 1))
        >>> kernel.columns(torch.tensor([0])).flatten()
        tensor([1.0000, 0.5000, 0.0000], dtype=torch.float64, grad_fn=<...>)

    Args:
        features: counts of the training inputs, as those of :class:`CountKernel`.
        variance: :math:`v` to start from.
        dtype: type of the covariances.
    """

    @names_arguments
    def __init__(self, features: HashedCounts | Tensor, variance: float = 1.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(features, "tanimoto", variance, dtype)

    def prepare(self, features: HashedCounts | Tensor) -> HashedCounts:
        """Counts in unary, whose inner products are sums of minima."""
        return super().prepare(features).unary()


class HistogramIntersectionKernel(FixedKernel):
    r""":math:`v \sum_d \min(h_{id}, h_{jd})` of histograms, over the mean of their masses :math:`\sum_d h_{id}`.

    Example:
        >>> kernel = HistogramIntersectionKernel(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        >>> kernel.columns(torch.tensor([0])).flatten()
        tensor([1.0000, 0.5000], grad_fn=<...>)

    Args:
        histograms: ``(n, D)``, not negative.
        variance: :math:`v` to start from.
    """

    inputs: Tensor
    _mass: Tensor

    @names_arguments
    def __init__(self, histograms: Tensor, variance: float = 1.0) -> None:
        table, histograms = histograms, _as_histograms("histograms", histograms)
        histograms = histograms if histograms.is_floating_point() else histograms.double()
        super().__init__(len(histograms), variance, histograms)
        remember_columns(self, "new", table)
        mass = histograms.sum(1).mean()
        self.register_buffer("_mass", mass if bool(mass > 0) else torch.ones_like(mass), persistent=False)
        self.register_buffer("inputs", histograms / self._mass, persistent=False)

    def points(self, new: Any) -> Tensor:
        """New histograms ``(n_new, D)`` over the mean mass."""
        return _as_histograms("new", super().points(new), self.inputs.shape[1]).to(self.inputs) / self._mass

    def base_between(self, first: Tensor, second: Tensor) -> Tensor:
        r"""Intersections :math:`\sum_d \min(h_{id}, h_{jd})`, ``(a, b)``."""
        step = rows_per_block(16 * first.numel())
        return torch.cat([torch.minimum(first[:, None], part).sum(-1) for part in second.split(step)], 1)

    def base_variances(self, points: Tensor) -> Tensor:
        """Masses ``(a,)``."""
        return points.sum(1)


def _as_histograms(name: str, values: Any, width: int | None = None) -> Tensor:
    """Histograms of any or of a given number of bins."""
    histograms = as_signed(as_data(name, values))
    has_shape = histograms.dim() == 2 and width in (None, histograms.shape[1])
    if not has_shape or not bool((histograms >= 0).all()) or not bool(histograms.isfinite().all()):
        raise ValueError(f"{name} must be finite, not negative, and of shape (n, {width or 'D'}); got {describe(histograms)}")
    return histograms


def _width(features: Any) -> int | None:
    """Columns of a matrix of counts; ``None`` of anything else."""
    shape: tuple[int, ...] = getattr(features, "shape", ())
    return int(shape[1]) if len(shape) == 2 else None
