"""NumPy arrays give the numbers that tensors give, wherever there is data."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
import xarray
from pyro.contrib.gp import kernels, likelihoods
from torch import Tensor

from pyro_truncated import gp
from pyro_truncated.distributions import ActiveSetGaussianProcess, ActiveSetPosterior, GivenActiveSet

generator = torch.Generator().manual_seed(0)
X, NEW = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (40, 7))
Y = torch.stack([X.sum(1).sin(), X[:, 0]], 1)


def rbf():
    return kernels.RBF(3).double()


def fitted(x, y, **options):
    model = gp.SubsetGPRegression(x, y, num_inducing=6, generator=torch.Generator().manual_seed(0))
    model.fit(max_epochs=2, **options)
    return model


def coregionalized(x, y):
    model = gp.CoregionalizedGPRegression(x, y)
    model.fit(max_iterations=3)
    return model


def on_counts(x, new):
    model = gp.SubsetGPRegression(x, x.sum(1), gp.CountKernel, num_inducing=6, generator=torch.Generator().manual_seed(0))
    model.fit(max_epochs=2)
    return model.predict(new)


def leave_one_out(x, y):
    regression = gp.LeaveOneOutRegression(x, "rbf", 8)
    regression.fit(y, 3)
    return regression


def variational(x, y):
    return gp.SubsetVariationalGP(x, y, rbf(), likelihood=likelihoods.Gaussian().double(), num_inducing=3, index=torch.arange(3))


CALLS = {
    "regression": lambda x, y, new: fitted(x, y).predict(new),
    "regression with free inputs": lambda x, y, new: fitted(x, y[:, 0], free_inputs=True, free_input_evaluations=3).predict(new),
    "posterior with free inputs": lambda x, y, new: (
        fitted(x, y[:, 0], free_inputs=True, free_input_evaluations=3).posterior(new, joint=True).mean
    ),
    "posterior": lambda x, y, new: fitted(x, y).posterior(new).mean,
    "coregionalised": lambda x, y, new: coregionalized(x, y).predict(new),
    "subset": lambda x, y, new: gp.InducingSubset(x, y, num_inducing=3, noise=0.1, index=torch.arange(3)).predict(new),
    "leave one out": lambda x, y, new: (*leave_one_out(x, y).loo(y), *leave_one_out(x, y).predict(new)),
    "features": lambda x, y, new: (leave_one_out(x, y).features(new), leave_one_out(x, y).log_likelihood(y)),
    "sparse": lambda x, y, new: gp.SubsetSparseGPRegression(x, y[:, 0], rbf(), num_inducing=3, index=torch.arange(3))(new),
    "variational": lambda x, y, new: variational(x, y[:, 0])(new),
    "histograms": lambda x, y, new: gp.HistogramIntersectionKernel(abs(x)).cross(abs(new), torch.arange(3)),
    "counts": lambda x, y, new: gp.CountKernel(x.round() ** 2).cross(new.round() ** 2, torch.arange(3)),
    "minima of counts": lambda x, y, new: gp.MinMaxKernel(x.round() ** 2).cross(new.round() ** 2, torch.arange(3)),
    "regression on counts": lambda x, y, new: on_counts((4 * abs(x)).round(), (4 * abs(new)).round()),
    "precomputed": lambda x, y, new: gp.PrecomputedKernel(x @ x.T).diag(),
    "pivots": lambda x, y, new: gp.pivoted_cholesky(rbf(), x, 4).factor,
    "active set": lambda x, y, new: gp.ActiveSet(x, y, rbf(), 0.1).predict(new),
    "low rank": lambda x, y, new: gp.LowRankCovariance(x, torch.ones(()).double()).leave_one_out(y),
    "dense": lambda x, y, new: gp.DenseCovariance(x @ x.T, torch.ones(()).double()).log_likelihood(y),
    "dense, noise a number": lambda x, y, new: gp.DenseCovariance(x @ x.T, 1.0).log_likelihood(y),
    "low rank, noise of each data point": lambda x, y, new: gp.LowRankCovariance(x, 1 + x[:, 0] ** 2).leave_one_out(y),
    "active set's density": lambda x, y, new: ActiveSetGaussianProcess(x, rbf(), 0.1, 5, 2).log_prob(y),
    "functions' density": lambda x, y, new: ActiveSetPosterior(x, rbf(), 0.1, 5, y[:5], 0.2).log_prob(y),
    "given active set": lambda x, y, new: GivenActiveSet(gp.ActiveSet(x, y, rbf(), 0.1), x).log_prob(y),
    "uncertain": lambda x, y, new: gp.psi_statistics(rbf(), gp.SpikeSlabInputs(x, x**2), new).psi1,
    "linear": lambda x, y, new: gp.LinearARD(3, abs(new[0]))(X),
}


@pytest.mark.parametrize("name", CALLS)
def test_arrays_are_tensors(name):
    expected, found = CALLS[name](X, Y, NEW), CALLS[name](X.numpy(), Y.numpy(), NEW.numpy())
    pairs = [(expected, found)] if isinstance(expected, Tensor) else zip(expected, found, strict=True)
    for tensor, again in pairs:
        torch.testing.assert_close(again, tensor)


def test_counts_of_arrays():
    arrays = np.array([0, 2, 3]), np.array([1, 4, 1], dtype=np.uint16), np.array([1, 2, 1], dtype=np.uint32)
    found = gp.HashedCounts.from_csr(*arrays)
    expected = gp.HashedCounts.from_csr(*(torch.as_tensor(array.astype(np.int64)) for array in arrays))
    torch.testing.assert_close(gp.CountKernel(found).columns(torch.arange(2)), gp.CountKernel(expected).columns(torch.arange(2)))


def test_a_number_as_noise_is_a_tensor_of_the_matrix_type():
    K = (X @ X.mT).float()
    for make in (gp.DenseCovariance, gp.LowRankCovariance):
        found, expected = make(K, 0.5).log_determinant, make(K, torch.tensor(0.5)).log_determinant
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.uint16, np.float32])
def test_counts_and_histograms_of_integers(kind):
    table = np.array([[2, 0], [1, 3]], dtype=kind)
    of_counts = gp.CountKernel(table).cross(table, torch.arange(2))
    torch.testing.assert_close(of_counts, gp.CountKernel(table.astype(float)).cross(table.astype(float), torch.arange(2)))
    found = gp.HistogramIntersectionKernel(table).columns(torch.arange(2)).detach().double()
    torch.testing.assert_close(found, torch.tensor([[2.0, 1.0], [1.0, 4.0]]).double() / 3)


def test_new_histograms_have_the_bins_of_the_training_inputs():
    kernel = gp.HistogramIntersectionKernel(np.array([[2, 0], [1, 3]]))
    for new in (np.ones((3, 1)), np.ones((3, 3)), np.ones(2), np.array([[1.0, math.nan]]), np.array([[1.0, -1.0]])):
        with pytest.raises(ValueError, match=r"new must be finite, not negative, and of shape \(n, 2\)"):
            kernel.cross(new, torch.arange(2))


def kernel_cross(kernel):
    return lambda new: kernel.cross(new, torch.arange(3))


TABLES = {
    "regression": lambda x: fitted(x, Y).predict,
    "regression with a kernel": lambda x: gp.SubsetGPRegression(x, Y, rbf()).predict,
    "posterior": lambda x: fitted(x, Y).posterior,
    "coregionalised": lambda x: coregionalized(x, Y).predict,
    "subset": lambda x: gp.InducingSubset(x, Y, num_inducing=3, noise=0.1, index=torch.arange(3)).predict,
    "leave one out": lambda x: leave_one_out(x, Y).predict,
    "variational": lambda x: variational(x, Y[:, 0]),
    "histograms": lambda x: kernel_cross(gp.HistogramIntersectionKernel(x)),
    "counts": lambda x: kernel_cross(gp.CountKernel(x)),
    "regression on counts": lambda x: gp.SubsetGPRegression(x, Y, gp.CountKernel).predict,
    "sum": lambda x: kernel_cross(gp.SumKernel([gp.smooth_rbf(x), gp.PyroKernel(rbf(), x)])),
}


@pytest.mark.nightly(keep="values")
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("container", [pd.DataFrame, lambda x: xarray.DataArray(x, dims=("n", "d"), coords={"d": list(x)})])
def test_tables_with_other_columns_are_refused(name, container):
    table, new = (pd.DataFrame(abs(rows).round(), columns=list("abc")) for rows in (X.numpy(), NEW.numpy()))
    if name not in ("counts", "regression on counts", "histograms"):
        table, new = (pd.DataFrame(rows.numpy(), columns=list("abc")) for rows in (X, NEW))
    predict = TABLES[name](container(table))
    for same in (new, new.to_numpy(), new.set_axis(range(3), axis=1)):
        predict(same)
    for other, place, found in ((new[["a", "c", "b"]], 1, "c"), (new.rename(columns={"c": "z"}), 2, "z")):
        with pytest.raises(ValueError, match=rf"in their order: column {place} must be '[bc]'; got '{found}'"):
            predict(container(other))


LISTS = {
    "lists": lambda x: x.tolist(),
    "tuples": lambda x: tuple(map(tuple, x.tolist())),
    "arrays": lambda x: list(x.numpy()),
    "tensors": list,
}


@pytest.mark.nightly(keep="values")
@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("name", [name for name in TABLES if "counts" not in name and name != "sum"])
def test_lists_of_numbers_are_inputs(name, kind):
    rows, new = (abs(rows).round() if name == "histograms" else rows for rows in (X, NEW))
    expected, found = TABLES[name](rows)(new), TABLES[name](LISTS[kind](rows))(LISTS[kind](new))
    for tensor, again in zip(
        *((one if isinstance(one, tuple) else (getattr(one, "mean", one),)) for one in (expected, found)), strict=True
    ):
        if isinstance(tensor, Tensor):
            torch.testing.assert_close(again, tensor)


def test_one_input_may_come_without_an_axis():
    x, new = np.linspace(0, 6, 30), np.linspace(1, 5, 7)
    model = fitted(torch.from_numpy(x)[:, None], np.sin(x))
    expected = model.predict(torch.from_numpy(new)[:, None])[0]
    for container in (np.asarray, pd.Series, list, torch.as_tensor):
        for one in (model, fitted(container(x), np.sin(x))):
            torch.testing.assert_close(one.predict(container(new))[0], expected)


@pytest.mark.parametrize("shape", [(0, 3), (0,), (4, 0)])
def test_empty_inputs_are_named(shape):
    with pytest.raises(ValueError, match="inputs, must have a row and a column at least; got float64 of shape"):
        gp.SubsetGPRegression(np.zeros(shape), np.zeros(shape[0]))


def test_objects_stay_what_they_are_for_kernels_of_their_own():
    words = [[0.0, 1.0], [2.0, 3.0], [1.0]]
    model = gp.SubsetGPRegression(words, [0.0, 1.0, 2.0], lambda objects: gp.FunctionKernel(lambda a, b: float(len(a) == len(b)), objects))
    assert model.kernel.inputs is words
    with pytest.raises(TypeError, match="kernel is needed where X is neither"):
        gp.SubsetGPRegression(["CCO", "CC"], [0.0, 1.0])
