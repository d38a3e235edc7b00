"""Masked arrays, nulls and fill values are missing entries wherever arrays go in."""

from __future__ import annotations

import decimal
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from PIL import Image
from scipy import sparse
from torch import Tensor

from pyro_truncated import LearnConfig, SASDecoder, SubsetGPRegression, best_start, distributed, gplvm, learn, models
from pyro_truncated.extend import takes_arrays
from pyro_truncated.gp import CoregionalizedGPRegression, smooth_rbf
from pyro_truncated.restoration import denoise, inpaint
from pyro_truncated.search import EvolutionarySearch
from pyro_truncated.sklearn import (
    ActiveSetGPLVM,
    SparseCoding,
    SpikeSlabGPLVMTransformer,
    SpikeSlabRegressor,
    SubsetGPRegressor,
    TruncatedMixture,
)
from pyro_truncated.utils.arrays import as_data, as_tensors

FILL = -32767.0
RANDOM = np.random.default_rng(0)
DATA = RANDOM.normal(size=(24, 4))
HIDDEN = RANDOM.random(DATA.shape) < 0.15
NAN = np.where(HIDDEN, np.nan, DATA)
FILLED = np.where(HIDDEN, FILL, DATA)


def nullable(values: np.ndarray, hidden: np.ndarray, dtype: str) -> pd.DataFrame:
    return pd.DataFrame({str(d): pd.array(values[:, d], dtype=dtype) for d in range(values.shape[1])}).mask(hidden)


CONTAINERS = {
    "masked": np.ma.masked_array(FILLED, HIDDEN),
    "masked everywhere": np.ma.masked_array(FILLED.astype(np.float32), HIDDEN, fill_value=FILL),
    "nullable": nullable(DATA, HIDDEN, "Float64"),
    "attributes": xr.DataArray(FILLED, attrs={"_FillValue": FILL}),
    "two fill values": xr.DataArray(np.where(HIDDEN & (DATA > 0), -1e20, FILLED), attrs={"_FillValue": FILL, "missing_value": [-1e20]}),
    "encoding": xr.DataArray(FILLED).assign_attrs(units="K"),
    "fill values in double precision": xr.DataArray(np.where(HIDDEN, -999.99, DATA).astype(np.float32), attrs={"_FillValue": -999.99}),
    "text": xr.DataArray(FILLED, attrs={"missing_value": str(FILL)}),
    "variable": xr.Variable(("row", "column"), FILLED, {"_FillValue": FILL}),
}
CONTAINERS["encoding"].encoding = {"_FillValue": FILL}


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_is_missing_becomes_nan(container):
    found = as_tensors(CONTAINERS[container])
    torch.testing.assert_close(found.double(), torch.from_numpy(NAN), equal_nan=True, rtol=1e-6, atol=0)
    assert as_tensors([CONTAINERS[container], 3])[0].isnan().any()
    assert torch.equal(distributed.shard(CONTAINERS[container]).isnan(), found.isnan())
    assert as_tensors({"y": CONTAINERS[container]}, torch.zeros(1))["y"].dtype == torch.float32


NONE = [[None if hidden else float(value) for value, hidden in zip(*rows, strict=True)] for rows in zip(DATA, HIDDEN, strict=True)]
ROWS = {
    "lists": NONE,
    "tuples": tuple(map(tuple, NONE)),
    "objects": np.array(NONE, dtype=object),
    "frame of objects": pd.DataFrame(NONE, dtype=object),
    "frame of several types": pd.DataFrame(NONE).astype({0: object, 1: "Float64"}),
    "decimals": [[None if entry is None else decimal.Decimal(entry) for entry in row] for row in NONE],
    "rows of masked arrays": [np.ma.masked_array(*row) for row in zip(FILLED, HIDDEN, strict=True)],
    "tensors": list(torch.from_numpy(NAN)),
    "series": [pd.Series(row) for row in NAN],
    "long doubles": NAN.astype(np.longdouble),
    "other bytes": NAN.astype(NAN.dtype.newbyteorder("S")),
    "buffer": memoryview(NAN),
}


@pytest.mark.parametrize("rows", ROWS)
def test_missing_entries_of_lists_and_objects_become_nan(rows):
    torch.testing.assert_close(as_data("y", ROWS[rows]), torch.from_numpy(NAN), equal_nan=True, rtol=0, atol=0)
    if rows != "buffer":
        torch.testing.assert_close(distributed.shard(ROWS[rows]).as_subclass(Tensor).isnan(), torch.from_numpy(HIDDEN))

    class Reader(torch.nn.Linear):
        @takes_arrays
        def read(self, shape: list[int], y: Tensor) -> tuple[list[int], Tensor]:
            return shape, y

    shape, found = Reader(1, 1).read([3, 4], ROWS[rows])
    assert shape == [3, 4]
    torch.testing.assert_close(found, torch.from_numpy(NAN).float(), equal_nan=True, rtol=0, atol=0)


def test_columns_that_hold_no_numbers_are_named():
    frame = pd.DataFrame({"age": [3, None], "name": ["a", None], "born": pd.to_datetime(["2020-01-01", None])})
    with pytest.raises(
        TypeError, match=r"y, a DataFrame, must hold numbers; got also name \(\w+\), born \(datetime64\[\w+\]\): leave them out"
    ):
        as_data("y", frame)
    twice = pd.DataFrame([[1, "a"]], columns=["x", "x"])
    with pytest.raises(TypeError, match=r"got also x \(\w+\):"):
        as_tensors(twice)


@pytest.mark.parametrize("dtype", [np.int16, np.uint8, bool])
def test_masked_integers_become_floating_point(dtype):
    values = np.array([[0, 1], [1, 0]], dtype=dtype)
    found = as_tensors(np.ma.masked_array(values, [[True, False], [False, False]]))
    torch.testing.assert_close(found, torch.tensor([[torch.nan, 1.0], [1.0, 0.0]], dtype=torch.float64), equal_nan=True)
    assert as_tensors(np.ma.masked_array(values)).dtype == torch.from_numpy(values).dtype
    frame = pd.DataFrame({"a": pd.array([None, 1], dtype="Int64"), "b": pd.array([1, 0], dtype="Int64")})
    torch.testing.assert_close(as_tensors(frame), found, equal_nan=True)
    torch.testing.assert_close(as_tensors(frame["a"].array), found[:, 0], equal_nan=True)


def test_what_is_scaled_in_a_file_is_no_fill_value():
    decoded = xr.DataArray(np.zeros(3))
    decoded.encoding = {"_FillValue": 0, "scale_factor": 0.1}
    assert not bool(as_tensors(decoded).isnan().any())


def test_lists_and_images_are_data_and_text_is_not():
    torch.testing.assert_close(as_data("y", [[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64))
    torch.testing.assert_close(as_data("y", [torch.ones(2), np.zeros(2, np.float32)]), torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    torch.testing.assert_close(as_data("y", [[1, None], [2.5, 3]]).isnan(), torch.tensor([[False, True], [False, False]]))
    assert as_data("y", Image.new("RGB", (5, 4), (1, 2, 3))).shape == (4, 5, 3)
    coloured = Image.new("RGB", (5, 4), (200, 10, 30))
    assert torch.equal(as_data("y", coloured.quantize(4)), as_data("y", coloured))
    for wrong in ("text", ["a"], [[1.0], [1.0, 2.0]], object(), None):
        with pytest.raises(TypeError, match="y must be a tensor, an array or a list of numbers"):
            as_data("y", wrong)
    with pytest.raises(TypeError, match="give one of its variables"):
        as_data("y", xr.Dataset({"a": xr.DataArray(np.zeros(3))}))


def test_polars_are_data():
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"a": [1, None, 3], "b": [0.5, 1.5, None]})
    expected = torch.tensor([[1.0, 0.5], [torch.nan, 1.5], [3.0, torch.nan]], dtype=torch.float64)
    torch.testing.assert_close(as_tensors(frame).double(), expected, equal_nan=True)
    torch.testing.assert_close(as_tensors(frame["a"]).double(), expected[:, 0], equal_nan=True)
    names = [f"category {number}" for number in range(1000)]
    with pytest.raises(TypeError, match=r"got also c \(Enum\(.{1,60}\): leave them out"):
        as_data("y", polars.DataFrame({"a": [1.0] * 1000, "c": polars.Series(names, dtype=polars.Enum(names))}))
    with pytest.raises(TypeError, match=r"got also s \(Struct"):
        as_data("y", polars.DataFrame({"s": [{"x": 1.0}, {"x": 2.0}]}))
    with pytest.raises(TypeError, match="got a LazyFrame: call its collect"):
        as_data("y", frame.lazy())


def test_types_of_columns_are_shortened_and_deferred_arrays_named():
    frame = pd.DataFrame({"a": [1.0, 2.0], "k": pd.Series(pd.arrays.SparseArray(["u", "v" * 500], fill_value="w" * 500))})
    with pytest.raises(TypeError, match=r"got also k \(.{1,70}\): leave them out") as caught:
        as_data("y", frame)
    assert len(str(caught.value)) < 200

    class Deferred:
        def compute(self):
            return np.zeros(3)

    with pytest.raises(TypeError, match=r"got a Deferred: call its compute\(\)"):
        as_data("y", Deferred())


# --- through the public face ---


@pytest.mark.slow
@pytest.mark.parametrize("container", ["masked", "attributes"])
def test_restoration_fills_what_is_masked(container):
    def filled(image):
        return inpaint(image, side=3, rounds=1, generator=torch.Generator().manual_seed(0), progress=False).image

    torch.testing.assert_close(filled(CONTAINERS[container]), filled(NAN))
    found = denoise(CONTAINERS[container], 1.0, side=3, rounds=1, generator=torch.Generator().manual_seed(0), progress=False).image
    assert float(found.abs().max()) < 10


@pytest.mark.slow
def test_models_learn_from_what_is_not_masked():
    def scale(y):
        torch.manual_seed(0)
        model = models.BinarySparseCoding(4, 3).double()
        learn(model, y, restarts=1, config=LearnConfig(restart_steps=3), steps=3, num_states=8, progress=False)
        best_start(model, y, EvolutionarySearch(2, 2, 1), num_starts=1, steps=2, num_states=4)
        return model.scale.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        expected = scale(NAN)
        for y in (CONTAINERS["masked"], NONE):
            torch.testing.assert_close(scale(y), expected)


@pytest.mark.parametrize("several", [(DATA, DATA), (torch.zeros(3, 4), torch.zeros(3)), {"x": DATA, "y": DATA}])
def test_learn_and_its_starts_take_one_array(several):
    model = models.BinarySparseCoding(4, 3)
    for train in (learn, best_start):
        with pytest.raises(TypeError, match=r"y must be one array of data; got a (tuple|dict) of 2\. A model of several arrays takes them"):
            train(model, several, EvolutionarySearch(2, 2, 1))


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("container", ["masked", "nullable", "attributes"])
def test_estimators_take_what_is_masked_for_missing(container):
    def codes(X):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            coder = SparseCoding(3, max_iter=3, n_init=1, random_state=0).fit(X)
        return coder.score_samples(X)

    expected = codes(NAN)
    for X in (CONTAINERS[container], ROWS["rows of masked arrays"]):
        np.testing.assert_allclose(codes(X), expected)
    for space in (ActiveSetGPLVM(1, max_iter=1, random_state=0), SpikeSlabGPLVMTransformer(1, n_inducing=5, max_iter=1, random_state=0)):
        np.testing.assert_allclose(space.fit(CONTAINERS[container]).embedding_, space.fit(NAN).embedding_)


@pytest.mark.parametrize("estimator", [TruncatedMixture(2), SubsetGPRegressor(), SpikeSlabRegressor()])
@pytest.mark.parametrize("container", ["masked", "nullable", "attributes"])
def test_estimators_that_take_no_missing_entries_refuse_them(estimator, container):
    with pytest.raises(ValueError, match="NaN"):
        estimator.fit(CONTAINERS[container], DATA[:, 0])
    if not isinstance(estimator, TruncatedMixture):
        with pytest.raises(ValueError, match="NaN"):
            estimator.fit(DATA, np.ma.masked_array(FILLED[:, 0], HIDDEN[:, 0]))


def test_gaussian_processes_refuse_masked_inputs_and_targets():
    x, hidden = torch.linspace(0, 6, 24, dtype=torch.float64)[:, None], HIDDEN[:, 0]
    with pytest.raises(ValueError, match="NaN"):
        SubsetGPRegression(smooth_rbf(x), np.ma.masked_array(FILLED[:, 0], hidden))
    with pytest.raises(ValueError, match="NaN"):
        SubsetGPRegression(np.ma.masked_array(x.numpy(), hidden[:, None]), DATA[:, 0])
    smooth = torch.cat([x.sin(), x.cos()], 1).numpy()
    several = CoregionalizedGPRegression(x, np.ma.masked_array(np.where(HIDDEN[:, :2], FILL, smooth), HIDDEN[:, :2]))
    several.fit(max_iterations=5)
    assert float(several.predict(x)[0].abs().max()) < 2


def test_decoders_infer_from_what_is_not_masked():
    decoder = SASDecoder(24, 4, 1, num_active=5, batch_size=12).double()
    decoder.fit(CONTAINERS["masked"], epochs=1, progress=False, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(decoder.infer(CONTAINERS["masked"]), decoder.infer(torch.from_numpy(NAN)))


def test_restored_arrays_are_arrays():
    restored = denoise(DATA, 1.0, channels=False, side=3, rounds=1, progress=False)
    for found in (np.asarray(restored), np.array(restored), as_data("y", restored), torch.as_tensor(restored), torch.from_dlpack(restored)):
        assert torch.equal(torch.as_tensor(found), restored.image)
    assert np.asarray(restored, dtype=np.float32).dtype == np.float32
    assert np.mean(restored) == pytest.approx(float(restored.image.mean()))
    # What measures of quality ask for, and arithmetic on either side.
    array = restored.image.numpy()
    assert (restored.shape, restored.ndim, restored.dtype) == (array.shape, array.ndim, array.dtype)
    assert restored.astype(np.float32).dtype == np.float32
    for found, expected in (
        (2 * restored, 2 * array),
        (restored**2, np.power(array, 2)),
        (restored - DATA, array - DATA),
        (DATA - restored, DATA - array),
    ):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(restored - torch.from_numpy(DATA), array - DATA)
    np.testing.assert_array_equal(restored[1:3, 0], array[1:3, 0])
    assert (restored == array).all()
    assert torch.equal(torch.stack(list(restored)), restored.image)
    np.testing.assert_array_equal(np.add(restored, 1, out=np.empty_like(array)), array + 1)


def test_sparse_matrices_are_no_data():
    with pytest.raises(TypeError, match=r"y must be a tensor, .* got a csr_array: call its toarray"):
        learn(models.BinarySparseCoding(3, 2), sparse.csr_array(np.eye(3)))


@pytest.mark.parametrize("times", [np.arange(3).astype("datetime64[D]"), [np.timedelta64(1, "h")] * 3])
def test_times_are_refused_with_what_to_do(times):
    with pytest.raises(TypeError, match=r"inputs must be a tensor, .* got .*: divide differences of times by a unit"):
        smooth_rbf(times)


def trained(table: pd.DataFrame) -> list:
    decoder = SASDecoder(len(table), table.shape[1], num_active=10, batch_size=20).fit(table, epochs=1)
    space = gplvm.SpikeSlabGPLVM(len(table), table.shape[1], num_latents=2)
    gplvm.fit(space, table, steps=1, warm_up=1, rounds=1)
    model = models.BinarySparseCoding(table.shape[1], 2, dtype=torch.float64)
    return [decoder.infer, decoder.reconstruct, decoder.condition_, gplvm.Posterior(space, table).infer, learn(model, table, steps=2).infer]


def test_models_refuse_tables_with_other_columns():
    table = pd.DataFrame(np.random.RandomState(0).randn(40, 3), columns=list("abc"))
    for infer in trained(table):
        infer(table)
        infer(table.to_numpy())
        for other, found in ((table[["b", "a", "c"]], "b"), (table.rename(columns={"a": "z"}), "z")):
            with pytest.raises(ValueError, match=f"in their order: column 0 must be 'a'; got '{found}'"):
                infer(other)


def test_a_decoder_that_learns_again_knows_the_new_columns_only():
    table = pd.DataFrame(np.random.RandomState(0).randn(40, 3), columns=list("abc"))
    decoder = SASDecoder(40, 3, num_active=10, batch_size=20).fit(table, epochs=1)
    decoder.fit(table[["c", "b", "a"]], epochs=1).infer(table[["c", "b", "a"]])
    with pytest.raises(ValueError, match="column 0 must be 'c'; got 'a'"):
        decoder.infer(table)
    decoder.fit(table.to_numpy(), epochs=1).infer(table)
