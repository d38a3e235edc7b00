"""Kernels bound to data: adapters, sums, features, graphs and strings, each against its definition."""

from __future__ import annotations

import math

import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.gp import kernels
from pyro.nn import PyroSample

from pyro_truncated.gp import (
    CountKernel,
    FunctionKernel,
    GPyTorchKernel,
    Graphs,
    HashedCounts,
    HistogramIntersectionKernel,
    IdentityKernel,
    MinMaxKernel,
    PrecomputedKernel,
    PyroKernel,
    RestrictedKernel,
    SubsetGPRegression,
    SumKernel,
    as_data_kernel,
    shortest_path,
    smooth_rbf,
    spectrum,
    weisfeiler_lehman,
)
from pyro_truncated.gp.data_kernels.protocol import ProtocolKernel

N, NEW = 12, 5
INDEX, ROWS = torch.tensor([3, 0, 7]), torch.tensor([1, 3, 11, 2])


def counts(num: int, seed: int) -> torch.Tensor:
    return torch.poisson(torch.full((num, 9), 0.8), generator=torch.Generator().manual_seed(seed)).double()


def hashed(table: torch.Tensor) -> HashedCounts:
    rows, columns = table.nonzero().unbind(1)
    return HashedCounts.from_occurrences(len(table), rows, columns * 977, table[rows, columns])


def build(name: str):
    """A kernel on N inputs, NEW new inputs for it, and the full matrix of all of them."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(N + NEW, 2, generator=generator, dtype=torch.float64)
    table = counts(N + NEW, 1)
    inner, sizes = table @ table.mT, table.square().sum(1)
    rbf = torch.exp(-0.5 * torch.cdist(X, X).square() / 1.44)
    wiggle = kernels.RBF(2, torch.tensor(1.0, dtype=torch.float64), torch.tensor(1.2, dtype=torch.float64))
    low = torch.minimum(table[:, None], table).sum(-1)
    train, new = torch.arange(N), torch.arange(N, N + NEW)
    made = {
        "pyro": lambda: (PyroKernel(wiggle, X[:N]), X[N:], rbf),
        "precomputed": lambda: (PrecomputedKernel(rbf, train, 2.0), new, 2 * rbf),
        "protocol": lambda: (ProtocolKernel(Columns(rbf)), new, rbf),
        "restricted": lambda: (RestrictedKernel(PyroKernel(wiggle, X.flip(0)), torch.arange(N + NEW - 1, NEW - 1, -1)), X[N:], rbf),
        "function": lambda: (FunctionKernel(lambda x, z: math.cos(x - z), list(range(N))), list(range(N, N + NEW)), cosine()),
        "batched": lambda: (FunctionKernel(batch_cosine, list(range(N)), batched=True), list(range(N, N + NEW)), cosine()),
        "inner": lambda: (CountKernel(hashed(table[:N]), "inner"), hashed(table[N:]), inner / sizes[:N].mean()),
        "cosine": lambda: (CountKernel(hashed(table[:N]), "cosine"), hashed(table[N:]), inner / (sizes[:, None] * sizes).sqrt()),
        "tanimoto": lambda: (CountKernel(hashed(table[:N])), hashed(table[N:]), inner / (sizes[:, None] + sizes - inner)),
        "matrix": lambda: (CountKernel(table[:N]), table[N:].long(), inner / (sizes[:, None] + sizes - inner)),
        "minmax": lambda: (MinMaxKernel(hashed(table[:N])), hashed(table[N:]), low / torch.maximum(table[:, None], table).sum(-1)),
        "histogram": lambda: (HistogramIntersectionKernel(table[:N], 1.5), table[N:], 1.5 * low / table[:N].sum(1).mean()),
        "sum": lambda: (SumKernel([PrecomputedKernel(rbf, train), PrecomputedKernel(inner, train)]), new, rbf + inner),
    }
    return made[name]()


def cosine() -> torch.Tensor:
    x = torch.arange(N + NEW, dtype=torch.float64)
    return torch.cos(x[:, None] - x)


def batch_cosine(first: list[int], second: list[int]) -> torch.Tensor:
    return torch.cos(torch.tensor(first, dtype=torch.float64)[:, None] - torch.tensor(second, dtype=torch.float64))


class Columns:
    """The least that a kernel needs to offer, and the variances of new inputs."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix

    def diag(self):
        return self.matrix.diagonal()[:N]

    def columns(self, index):
        return self.matrix[:N, index]

    def cross(self, new, index):
        return self.matrix[new[:, None], index]

    def diag_new(self, new):
        return self.matrix.diagonal()[new]


NAMES = [
    "pyro", "precomputed", "protocol", "restricted", "function", "batched", "inner", "cosine", "tanimoto", "matrix", "minmax", "histogram",
    "sum",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_contract(name):
    kernel, new, K = build(name)
    close = {"rtol": 1e-10, "atol": 1e-12, "check_dtype": False}
    assert kernel.num_data == N
    for _ in range(2):  # the second time from what is kept
        torch.testing.assert_close(kernel.columns(INDEX).detach(), K[:N, INDEX], **close)
    torch.testing.assert_close(kernel.columns(INDEX, ROWS).detach(), K[ROWS][:, INDEX], **close)
    torch.testing.assert_close(kernel.diag().detach(), K.diagonal()[:N], **close)
    torch.testing.assert_close(kernel.diag(ROWS).detach(), K.diagonal()[ROWS], **close)
    torch.testing.assert_close(kernel.cross(new, INDEX).detach(), K[N:, INDEX], **close)
    torch.testing.assert_close(kernel.diag_new(new).detach(), K.diagonal()[N:], **close)
    assert torch.linalg.eigvalsh(kernel.columns(torch.arange(N)).detach().double()).min() > -1e-10
    assert as_data_kernel(kernel) is kernel


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_the_parameters(name):
    kernel, _, _ = build(name)
    (kernel.columns(INDEX).square().sum() + kernel.diag().sum()).backward()
    slopes = [p.grad for p in kernel.parameters()]
    assert slopes
    assert all(slope is not None and slope.isfinite().all() and (slope != 0).any() for slope in slopes)


def test_squared_exponential_is_that_of_pyro():
    generator = torch.Generator().manual_seed(0)
    # Far from the origin, where squares of inputs lose digits.
    X = 100 + torch.randn(7, 3, generator=generator, dtype=torch.float64)
    Z = 100 + torch.randn(4, 3, generator=generator, dtype=torch.float64)
    weights = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    theirs = kernels.RBF(2, torch.tensor(1.7, dtype=torch.float64), torch.tensor([0.6, 1.9], dtype=torch.float64), active_dims=[0, 2])
    ours = PyroKernel(theirs, X)
    leaves = [*theirs.parameters(), X.requires_grad_(), Z.requires_grad_()]
    for one, other in ((theirs(X, Z), ours.between(X, Z)), (theirs(X), ours.between(X, X))):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-10)
        expected = torch.autograd.grad((one * weights[:, :1]).sum(), leaves, allow_unused=True)
        found = torch.autograd.grad((other * weights[:, :1]).sum(), leaves, allow_unused=True)
        for slope, value in zip(found, expected, strict=True):
            assert (slope is None) == (value is None)
            if slope is not None:
                torch.testing.assert_close(slope, value, rtol=0, atol=1e-8)


def test_random_parameters_are_drawn_once():
    X = torch.randn(5, 2, dtype=torch.float64)
    kernel = kernels.RBF(2)
    kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
    kernel.variance = PyroSample(dist.LogNormal(torch.zeros((), dtype=torch.float64), 1.0))
    ours = PyroKernel(kernel, X)
    trace = poutine.trace(lambda: ours.columns(torch.arange(5))).get_trace()
    nodes = {name: node["value"] for name, node in trace.nodes.items() if node["type"] == "sample"}
    assert set(nodes) == {"kernel.lengthscale", "kernel.variance"}
    expected = nodes["kernel.variance"] * torch.exp(
        -0.5 * torch.cdist(X / nodes["kernel.lengthscale"], X / nodes["kernel.lengthscale"]) ** 2
    )
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], expected)


def test_parameter_store_and_kernels_leave_each_other_alone():
    pyro.param("variance", torch.tensor(7.0))
    pyro.param("kernel.variance", torch.tensor(7.0))
    kernel, _, K = build("pyro")
    torch.testing.assert_close(kernel.columns(INDEX).detach(), K[:N, INDEX])
    assert set(pyro.get_param_store().keys()) == {"variance", "kernel.variance"}


def test_redundant_kernels():
    parts = [build(name)[0] for name in ("precomputed", "tanimoto")]
    kernel = SumKernel(parts, redundant_sum=True, identity=True)
    plain = sum(part.columns(INDEX) for part in parts)
    expected = 2 * plain
    expected[INDEX, torch.arange(3)] += 1
    torch.testing.assert_close(kernel.columns(INDEX), expected)
    torch.testing.assert_close(kernel.diag(), 2 * sum(part.diag() for part in parts) + 1)
    torch.testing.assert_close(kernel.relevance, torch.tensor([4.0, 2.0], dtype=torch.float64))
    new = (torch.arange(N, N + NEW), hashed(counts(N + NEW, 1)[N:]))
    torch.testing.assert_close(kernel.cross(new, INDEX), 2 * sum(p.cross(x, INDEX) for p, x in zip(parts, new, strict=True)))
    assert len(list(kernel.parameters())) == 4


def test_columns_that_do_not_fit_make_room():
    table = counts(40, 2)
    kernel = HistogramIntersectionKernel(table)
    kernel._capacity = 6
    expected = torch.minimum(table[:, None], table).sum(-1) / table.sum(1).mean()
    generator = torch.Generator().manual_seed(0)
    for size in (3, 5, 6, 2, 9, 6, 1, 4):
        index = torch.randperm(40, generator=generator)[:size]
        torch.testing.assert_close(kernel.columns(index).detach(), expected[:, index])
        assert len(kernel._kept) <= 6


def test_functions_are_called_once_per_pair():
    calls = []
    kernel = FunctionKernel(lambda x, z: calls.append((x, z)) or float(x == z), list("abcd"))
    kernel.columns(torch.tensor([1, 3]))
    kernel.columns(torch.tensor([3, 1, 1]))
    assert len(calls) == len(set(calls)) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_types(dtype):
    inputs = torch.randn(6, 4, dtype=dtype)
    inputs[:, 3] = 1.0
    kernel = smooth_rbf(inputs)
    assert kernel.columns(INDEX[:2]).dtype == dtype
    expected = torch.tensor([*(4 * inputs[:, :3].std(0, correction=0)), 4.0], dtype=dtype)
    torch.testing.assert_close(kernel.kernel.lengthscale.detach(), expected)
    histogram = HistogramIntersectionKernel(torch.rand(9, 4, dtype=dtype))
    assert histogram.columns(INDEX).dtype == dtype
    assert histogram.double().columns(INDEX).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_numbers_of_any_type_have_a_default_kernel(dtype):
    inputs = torch.tensor([[0, 1], [1, 1], [1, 0]]).to(dtype)
    found, expected = (smooth_rbf(one) for one in (inputs, inputs.double()))
    torch.testing.assert_close(found.columns(torch.arange(3)), expected.columns(torch.arange(3)))


def test_tables_of_inputs_are_named():
    table = pd.DataFrame({"height": [1.0, 2.0, 3.0], "colour": ["red", "blue", "red"]})
    for call in (lambda: smooth_rbf(table), lambda: smooth_rbf(torch.zeros(3, 2)).cross(table, INDEX[:1])):
        with pytest.raises(TypeError, match=r"inputs, a DataFrame, must hold numbers; got also colour"):
            call()
    with pytest.raises(TypeError, match=r"^X, a DataFrame, must hold numbers"):
        SubsetGPRegression(table, [0.0, 1.0, 2.0])


def molecule(atoms: list[int], bonds: list[tuple[int, int, int]]):
    return atoms, bonds


def graphs(molecules, order=None) -> Graphs:
    atoms, owner, ends, labels, start = [], [], [], [], 0
    for number, (names, bonds) in enumerate(molecules):
        atoms += names
        owner += [number] * len(names)
        ends += [(i + start, j + start) for i, j, _ in bonds]
        labels += [label for _, _, label in bonds]
        start += len(names)
    return Graphs(
        len(molecules), torch.tensor(owner), torch.tensor(atoms), torch.tensor(ends).reshape(-1, 2).mT, torch.tensor(labels).long()
    )


ETHANOL = molecule([6, 6, 8], [(0, 1, 1), (1, 2, 1)])
RELABELLED = molecule([8, 6, 6], [(1, 0, 1), (2, 1, 1)])
ETHANAL = molecule([6, 6, 8], [(0, 1, 1), (1, 2, 2)])
RING = molecule([6] * 6, [(i, (i + 1) % 6, 4) for i in range(6)])
TRIANGLES = molecule([6] * 6, [(0, 1, 4), (1, 2, 4), (2, 0, 4), (3, 4, 4), (4, 5, 4), (5, 3, 4)])
WATER = molecule([8], [])


def inner(features: HashedCounts) -> torch.Tensor:
    return CountKernel(features, "inner").columns(torch.arange(len(features))).detach() * features.squared_norms.mean()


def test_weisfeiler_lehman_by_hand():
    K = inner(weisfeiler_lehman(graphs([ETHANOL, RELABELLED, ETHANAL, WATER]), 1))
    # Labels C, C, O; then C(C), C(C, O), O(C): counts 2, 1 and 1, 1, 1. A double bond changes two of the three.
    expected = torch.tensor([[8.0, 8, 6, 1], [8, 8, 6, 1], [6, 6, 8, 1], [1, 1, 1, 2]], dtype=torch.float64)
    torch.testing.assert_close(K, expected)


def test_weisfeiler_lehman_cannot_tell_a_ring_from_two_triangles_but_paths_can():
    both = graphs([RING, TRIANGLES])
    refined = inner(weisfeiler_lehman(both, 3))
    assert refined[0, 1] == refined[0, 0] == refined[1, 1]
    paths = inner(shortest_path(both))
    # Six pairs each at distances 1, 2; three at 3. Two triangles: six pairs at distance 1.
    torch.testing.assert_close(paths, torch.tensor([[81.0, 36], [36, 36]], dtype=torch.float64))


def test_shortest_paths_by_hand():
    K = inner(shortest_path(graphs([ETHANOL, RELABELLED, WATER, molecule([6, 6], [])])))
    # CC at 1, CO at 1, CO at 2; a single atom and unconnected ones have no pairs.
    expected = torch.zeros(4, 4, dtype=torch.float64)
    expected[:2, :2] = 3
    torch.testing.assert_close(K, expected)


def test_shortest_paths_of_random_graphs_of_all_sizes():
    generator = torch.Generator().manual_seed(0)
    made, expected = [], []
    for size in (1, 2, 7, 30, 4, 3, 12):
        adjacent = (torch.rand(size, size, generator=generator) < 1.5 / size).triu(1)
        made.append(molecule([6] * size, [(int(i), int(j), 1) for i, j in adjacent.nonzero()]))
        distance = torch.where(adjacent | adjacent.mT, 1.0, math.inf)
        for node in range(size):
            distance = torch.minimum(distance, distance[:, node : node + 1] + distance[node])
        pairs = distance[torch.ones(size, size).triu(1).bool()]
        values, number = pairs[pairs.isfinite()].unique(return_counts=True)
        expected.append(float((number**2).sum()) if len(values) else 0.0)
    torch.testing.assert_close(shortest_path(graphs(made)).squared_norms, torch.tensor(expected, dtype=torch.float64))


def test_molecules_of_a_file():
    arrays = {
        "atom_ptr": [0, 3, 4], "atom_Z": [6, 6, 8, 8], "atom_degree": [1, 2, 1, 0], "atom_charge": [0] * 4, "atom_aromatic": [0] * 4,
        "atom_nH": [3, 2, 1, 2], "bond_ptr": [0, 2, 2], "bond_i": [0, 1], "bond_j": [1, 2], "bond_type": [1, 1],
    }  # fmt: skip
    found = Graphs.from_molecules(arrays, "element")
    assert found.graph.tolist() == [0, 0, 0, 1]
    assert found.edges.tolist() == [[0, 1], [1, 2]]
    torch.testing.assert_close(inner(weisfeiler_lehman(found, 1)), inner(weisfeiler_lehman(graphs([ETHANOL, WATER]), 1)))
    assert len(weisfeiler_lehman(Graphs.from_molecules(arrays, "none"), 0).keys.unique()) == 1
    with pytest.raises(ValueError, match="labels must be one of atom, element, degree, none; got 'mass'"):
        Graphs.from_molecules(arrays, "mass")


def test_edges_stay_within_a_graph():
    with pytest.raises(ValueError, match="same graph"):
        Graphs(2, torch.tensor([0, 1]), torch.zeros(2, dtype=torch.int64), torch.tensor([[0], [1]]), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("shorter", [False, True])
def test_spectrum(shorter):
    words = ["banana", "ananas", "", "né", "bandana"]
    found = inner(spectrum(words, 2, shorter=shorter))
    sizes = (1, 2) if shorter else (2,)
    bags = [[w[i : i + k] for k in sizes for i in range(len(w) - k + 1)] for w in words]
    expected = torch.tensor([[float(sum(a.count(x) * b.count(x) for x in set(a))) for b in bags] for a in bags], dtype=torch.float64)
    torch.testing.assert_close(found, expected)


def test_counts():
    table = counts(6, 3)
    features = hashed(table)
    torch.testing.assert_close(features.squared_norms, table.square().sum(1))
    kept = features[torch.tensor([4, 1])]
    torch.testing.assert_close(kept.squared_norms, table[[4, 1]].square().sum(1))
    torch.testing.assert_close(features.unary().squared_norms, table.sum(1))
    torch.testing.assert_close((features + features).squared_norms, 4 * table.square().sum(1))
    sparse = table.to_sparse_coo().coalesce()
    indptr = torch.cat([torch.zeros(1), (table > 0).sum(1).cumsum(0)]).long()
    again = HashedCounts.from_csr(indptr, sparse.indices()[1], sparse.values())
    torch.testing.assert_close(again.squared_norms, features.squared_norms)
    with pytest.raises(ValueError, match="counts must be integers"):
        HashedCounts.from_occurrences(1, torch.zeros(1).long(), torch.zeros(1).long(), torch.tensor([0.5])).unary()
    with pytest.raises(ValueError, match="indptr ends at 3"):
        HashedCounts.from_csr(torch.tensor([0, 3]), torch.tensor([1]), torch.tensor([1]))


def test_objects_without_features_are_equal():
    kernel = CountKernel(hashed(torch.tensor([[0.0, 0.0], [1.0, 0.0]])))
    torch.testing.assert_close(kernel.columns(torch.tensor([0, 1])).detach(), torch.eye(2, dtype=torch.float64))


def test_gpytorch_kernels():
    gpytorch = pytest.importorskip("gpytorch")
    _, new, K = build("pyro")
    X = torch.randn(N + NEW, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inside = gpytorch.kernels.RBFKernel().double()
    inside.lengthscale = 1.2
    kernel = GPyTorchKernel(inside, X[:N])
    torch.testing.assert_close(kernel.columns(INDEX).detach(), K[:N, INDEX])
    torch.testing.assert_close(kernel.cross(new, INDEX).detach(), K[N:, INDEX])
    torch.testing.assert_close(kernel.diag().detach(), K.diagonal()[:N])


class Duck(torch.nn.Module):
    """Behaves like a GPyTorch kernel as far as the adapter asks."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, first, second=None, diag=False):
        if diag:
            return self.raw.exp().expand(len(first))
        values = self.raw.exp() * torch.exp(-0.5 * torch.cdist(first, second).square())
        return type("Lazy", (), {"to_dense": lambda _: values})()


def test_gpytorch_adapter_is_duck_typed():
    X = torch.randn(7, 2, dtype=torch.float64)
    kernel = GPyTorchKernel(Duck(), X)
    torch.testing.assert_close(kernel.columns(INDEX[:2]).detach(), torch.exp(-0.5 * torch.cdist(X, X[INDEX[:2]]).square()))
    assert kernel.diag().shape == (7,)
    assert len(list(kernel.parameters())) == 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PyroKernel(torch.nn.Linear(2, 2), torch.randn(4, 2)), TypeError, "must be one of pyro.contrib.gp.kernels; got Linear"),
        (lambda: PyroKernel(kernels.RBF(2), torch.zeros(4, 2) + 0j), TypeError, "inputs must be real numbers of shape"),
        (lambda: PyroKernel(kernels.RBF(3), torch.zeros(4, 2)), ValueError, "of inputs with 2 columns; it reads column 2"),
        (lambda: PyroKernel(kernels.Sum(kernels.RBF(2), kernels.WhiteNoise(2)), torch.zeros(4, 2)), ValueError, "without WhiteNoise"),
        (lambda: SubsetGPRegression(torch.zeros(4, 2), torch.ones(4), kernels.RBF), TypeError, "kernel must be made first: RBF"),
        (lambda: PyroKernel(kernels.RBF(2), torch.full((4, 2), math.nan)), ValueError, "inputs must be finite"),
        (
            lambda: PyroKernel(kernels.RBF(2), torch.zeros(4, 2)).cross(torch.zeros(3, 5), INDEX),
            ValueError,
            "new inputs must be real and have shape",
        ),
        (lambda: PrecomputedKernel(torch.zeros(3, 4)), ValueError, "matrix must be square"),
        (lambda: PrecomputedKernel(torch.tensor([[1.0, 2.0], [0.0, 1.0]])), ValueError, "matrix must be symmetric"),
        (lambda: SumKernel([]), ValueError, "kernels on the same data"),
        (lambda: SumKernel([IdentityKernel(3), IdentityKernel(4)]), ValueError, "kernels on the same data"),
        (lambda: CountKernel(hashed(counts(3, 0)), "jaccard"), ValueError, "normalization must be"),
        (lambda: CountKernel(["CCO"]), TypeError, "features must be HashedCounts or a matrix"),
        (lambda: CountKernel(-torch.ones(3, 2)), ValueError, "features must be counts, finite and not negative"),
        (lambda: CountKernel(torch.full((3, 2), math.nan)), ValueError, r"features must be counts, finite and .*shape \(3, 2\), 6 NaN"),
        (lambda: PrecomputedKernel(torch.full((2, 2), math.nan)), ValueError, r"matrix must be square and finite; got .*\(2, 2\), 4 NaN"),
        (lambda: CountKernel(torch.full((3, 2), 1e300, dtype=torch.float64)), ValueError, "features must be counts whose squares"),
        (lambda: CountKernel(torch.ones(3, 2) + 0j), TypeError, "features must be a matrix"),
        (lambda: CountKernel(torch.ones(3, 2)).cross(torch.ones(3, 4), INDEX), ValueError, "features must have 2 columns"),
        (lambda: HistogramIntersectionKernel(-torch.ones(3, 2)), ValueError, "histograms must be finite, not negative"),
        (lambda: FunctionKernel(3, [1]), TypeError, "function must be callable"),
        (lambda: as_data_kernel(kernels.RBF(2)), TypeError, "no data yet"),
        (lambda: as_data_kernel(3), TypeError, "must be a DataKernel"),
        (lambda: weisfeiler_lehman(graphs([WATER]), -1), ValueError, "iterations must be an integer of at least 0"),
        (lambda: IdentityKernel(3, variance=0.0), ValueError, "variance must be positive"),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_training_inputs_without_any_feature_have_nothing_in_common_with_new_ones():
    kernel = CountKernel(torch.zeros(3, 2))
    torch.testing.assert_close(
        kernel.cross(torch.tensor([[0, 2], [0, 0]]), torch.arange(2)).detach(), torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
    )


def test_kernels_read_columns_of_warped_inputs():
    inputs = torch.linspace(0, 6, 5).double()[:, None]
    circular = kernels.Warping(kernels.RBF(2).double(), iwarping_fn=lambda x: torch.cat([x.cos(), x.sin()], -1))
    expected = torch.exp(-0.5 * (2 * ((inputs - inputs.mT) / 2).sin()).square())
    torch.testing.assert_close(PyroKernel(circular, inputs).columns(torch.arange(5)).detach(), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_rows_of_occurrences_may_be_short_integers(dtype):
    """Places in a table of rows and features are larger than they are."""
    rows, keys = torch.arange(3).repeat(100), torch.arange(300)
    short, wide = (HashedCounts.from_occurrences(3, own, keys) for own in (rows.to(dtype), rows))
    assert torch.equal(short.rows, wide.rows)
    assert torch.equal(short.keys, wide.keys)
