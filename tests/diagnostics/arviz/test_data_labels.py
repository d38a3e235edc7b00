"""Names and labels that DataFrames and DataArrays bring into the groups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, Truncated_ELBO
from pyro_truncated.diagnostics import to_arviz
from pyro_truncated.models import BinarySparseCoding
from pyro_truncated.utils.arrays import as_tensors
from pyro_truncated.utils.arviz_compat import get_dataset

DAYS = pd.date_range("2024-03-01", periods=5, name="day")
GENES = pd.Index(["BRCA1", "TP53", "MYC"], name="gene")
LABELS = ["BRCA1", "TP53", "MYC"]


def model(y: Tensor, inputs: Tensor | None = None) -> None:
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((2,), 0.3)).to_event(1))
        loc = s.sum(-1, keepdim=True) if inputs is None else s.sum(-1, keepdim=True) + inputs.sum(-1, keepdim=True)
        pyro.sample("y", dist.Normal(loc.expand(*loc.shape[:-1], 3), 1.0).to_event(1), obs=y)


def two_plates(y: Tensor) -> None:
    columns = pyro.plate("columns", y.shape[1], dim=-1)
    with pyro.plate("rows", len(y), dim=-2):
        s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.4)))
        with columns:
            pyro.sample("y", dist.Normal(s, 1.0), obs=y)


@pytest.fixture
def frame() -> pd.DataFrame:
    return pd.DataFrame(np.random.default_rng(0).normal(size=(5, 3)), index=DAYS, columns=GENES)


def fitted(function: Any, *args: Tensor) -> AutoTruncated:
    guide = AutoTruncated(function, num_states=4)
    SVI(function, guide, pyro.optim.Adam({"lr": 0.01}), Truncated_ELBO()).step(*args)
    return guide


def tensor(values: Any) -> Tensor:
    return torch.from_numpy(np.array(values)).float()


def converted(frame: Any, *more: Any, function: Any = model, **options: Any) -> Any:
    guide = fitted(function, tensor(frame), *map(tensor, more))
    return to_arviz(function, guide, frame, *more, **{"num_samples": 2, "num_chains": 1, "seed": 0, **options})


def test_rows_and_columns_of_a_frame_name_and_label_all_groups(frame: pd.DataFrame) -> None:
    idata = converted(frame)
    observed = get_dataset(idata, "observed_data")["y"]
    assert observed.dims == ("day", "gene")
    np.testing.assert_array_equal(observed.sel(gene="TP53").values, frame["TP53"].to_numpy(np.float32))
    np.testing.assert_array_equal(observed["day"].values, DAYS.values)
    assert get_dataset(idata, "log_likelihood")["y"].dims == ("chain", "draw", "day")
    assert get_dataset(idata, "posterior")["s"].dims == ("chain", "draw", "day", "s_dim_0")
    assert get_dataset(idata, "truncated_posterior")["free_energy"].dims == ("day",)
    for group in ("posterior_predictive", "marginal_predictive", "prior_predictive"):
        predicted = get_dataset(idata, group)["y"]
        assert predicted.dims == ("chain", "draw", "day", "gene")
        assert predicted["gene"].values.tolist() == LABELS


def test_the_numbers_are_those_of_the_tensor(frame: pd.DataFrame) -> None:
    guide = fitted(model, tensor(frame))
    options = {"num_samples": 3, "num_chains": 2, "seed": 1}
    labelled, plain = to_arviz(model, guide, frame, **options), to_arviz(model, guide, tensor(frame), **options)
    for group in ("posterior", "sample_stats", "log_likelihood", "posterior_predictive", "observed_data", "truncated_posterior"):
        one, other = get_dataset(labelled, group), get_dataset(plain, group)
        assert set(one.data_vars) == set(other.data_vars)
        for name in one.data_vars:
            np.testing.assert_array_equal(one[name].values, other[name].values)
    assert get_dataset(plain, "observed_data")["y"].dims == ("data", "y_dim_0")


def test_axes_without_names_keep_the_default_and_have_labels(frame: pd.DataFrame) -> None:
    observed = get_dataset(converted(frame.rename_axis(index=None, columns=None)), "observed_data")["y"]
    assert observed.dims == ("data", "y_dim_0")
    assert observed["y_dim_0"].values.tolist() == LABELS
    np.testing.assert_array_equal(observed["data"].values, DAYS.values)


def test_what_is_given_by_hand_wins(frame: pd.DataFrame) -> None:
    observed = get_dataset(converted(frame, dims={"y": ["pixel"]}, coords={"data": list("abcde")}), "observed_data")["y"]
    assert observed.dims == ("data", "pixel")
    assert observed["data"].values.tolist() == list("abcde")
    assert observed["pixel"].values.tolist() == LABELS
    observed = get_dataset(converted(frame, coords={"gene": [3, 1, 2]}), "observed_data")["y"]
    assert observed["gene"].values.tolist() == [3, 1, 2]
    observed = get_dataset(converted(frame, coords={"y_dim_0": [3, 1, 2]}), "observed_data")["y"]
    assert observed.dims == ("day", "y_dim_0")


def test_data_arrays_and_their_dimensions(frame: pd.DataFrame) -> None:
    array = xr.DataArray(frame.to_numpy(), dims=("cell", "gene"), coords={"gene": LABELS})
    observed = get_dataset(converted(array), "observed_data")["y"]
    assert observed.dims == ("cell", "gene")
    assert observed["gene"].values.tolist() == LABELS
    assert observed["cell"].values.tolist() == [0, 1, 2, 3, 4]
    assert get_dataset(converted(xr.DataArray(frame.to_numpy())), "observed_data")["y"].dims == ("data", "y_dim_0")


def test_columns_may_be_a_plate(frame: pd.DataFrame) -> None:
    idata = converted(frame, function=two_plates)
    assert get_dataset(idata, "observed_data")["y"].dims == ("day", "gene")
    assert get_dataset(idata, "posterior_predictive")["y"]["gene"].values.tolist() == LABELS


def test_covariates_are_labelled_and_label_the_plate_of_plain_data(frame: pd.DataFrame) -> None:
    inputs = pd.DataFrame({"age": [1.0, 2, 3, 4, 5], "dose": [0.0, 1, 0, 1, 0]}, index=pd.Index(list("pqrst"), name="patient"))
    guide = fitted(model, tensor(frame), tensor(inputs))
    idata = to_arviz(model, guide, tensor(frame), inputs, num_samples=2, num_chains=1)
    constant = get_dataset(idata, "constant_data")["inputs"]
    assert constant.dims == ("patient", "inputs_dim_0")
    assert constant["inputs_dim_0"].values.tolist() == ["age", "dose"]
    assert get_dataset(idata, "log_likelihood")["patient"].values.tolist() == list("pqrst")
    # The data's own labels come first, and by keyword all is the same.
    constant = get_dataset(to_arviz(model, guide, frame, inputs=inputs, num_samples=2, num_chains=1), "constant_data")["inputs"]
    assert constant.dims == ("day", "inputs_dim_0")


@pytest.mark.parametrize("name", ["draw", "state", "weights", "s", "columns"])
def test_names_that_mean_something_else_are_not_taken(frame: pd.DataFrame, name: str) -> None:
    observed = get_dataset(converted(frame.rename_axis(index=name), function=two_plates), "observed_data")["y"]
    assert observed.dims == ("rows", "gene")
    assert observed["rows"].size == 5


def test_two_axes_of_one_name_are_two_dimensions(frame: pd.DataFrame) -> None:
    observed = get_dataset(converted(frame.rename_axis(index="gene")), "observed_data")["y"]
    assert observed.dims == ("gene", "y_dim_0")


@pytest.mark.slow
def test_labels_that_files_cannot_hold_become_strings(frame: pd.DataFrame, tmp_path: Path) -> None:
    frame.columns = pd.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1)])
    frame.index = DAYS.tz_localize("Europe/Berlin")
    idata = converted(frame)
    assert get_dataset(idata, "observed_data")["y_dim_0"].values.tolist() == ["a, 1", "a, 2", "b, 1"]
    assert get_dataset(idata, "observed_data")["day"].values[0] == "2024-03-01 00:00:00+01:00"
    idata.to_netcdf(str(tmp_path / "posterior.nc"))


def test_frames_are_converted_to_the_type_of_the_parameters(frame: pd.DataFrame) -> None:
    torch.manual_seed(0)
    shipped = BinarySparseCoding(3, 2, dtype=torch.float64)
    guide = fitted(shipped, torch.from_numpy(frame.to_numpy(copy=True)))
    observed = get_dataset(to_arviz(shipped, guide, frame, num_samples=2, num_chains=1), "observed_data")
    assert all(values.dtype == np.float64 for values in observed.data_vars.values())
    assert shipped.state_dict().keys()


def test_missing_entries_and_several_types_become_floats() -> None:
    frame = pd.DataFrame({"a": pd.array([1, None], dtype="Int64"), "b": [True, False], "c": [0.5, 1.5]})
    np.testing.assert_array_equal(as_tensors(frame), torch.tensor([[1, 1, 0.5], [torch.nan, 0, 1.5]], dtype=torch.float64))
    assert as_tensors(pd.DataFrame({"a": [1, 2]})).dtype == torch.int64
    assert as_tensors([pd.Series([1.0, 2.0])])[0].tolist() == [1.0, 2.0]


def test_columns_that_are_no_numbers_are_refused_by_name(frame: pd.DataFrame) -> None:
    guide = fitted(model, tensor(frame))
    with pytest.raises(TypeError, match=r"a DataFrame of data must hold numbers; got also name \(str|object\)"):
        to_arviz(model, guide, frame.assign(name="x"), num_samples=2)
    with pytest.raises(TypeError, match="a DataArray of data must hold numbers"):
        to_arviz(model, guide, xr.DataArray(np.array(["a", "b"])), num_samples=2)


def test_programs_that_read_columns_by_name_keep_the_table() -> None:
    def by_name(table: pd.DataFrame) -> None:
        with pyro.plate("data", len(table)):
            z = pyro.sample("z", dist.Bernoulli(0.3))
            loc = tensor(table["x"]) + z * tensor(table["kind"] == "b")
            pyro.sample("y", dist.Normal(loc, 1.0), obs=tensor(table["y"]))

    for table in (
        pd.DataFrame({"x": [0.0, 1.0], "y": [1.0, 0.5], "kind": ["a", "b"]}),
        pd.DataFrame({"x": [0.0, 1.0], "y": [1.0, 0.5], "kind": [0.0, 1.0]}),
    ):
        guide = AutoTruncated(by_name, num_states=2)
        Truncated_ELBO().loss(by_name, guide, table)
        observed = get_dataset(to_arviz(by_name, guide, table, num_samples=2), "observed_data")
        np.testing.assert_array_equal(observed["y"], table["y"])


def test_a_single_data_point_of_binary_latents() -> None:
    y = torch.tensor([[0.5, 1.0, -1.0]])
    states = get_dataset(to_arviz(model, fitted(model, y), y, num_samples=3, num_chains=2), "posterior")["s"]
    assert states.shape == (2, 3, 1, 2)
    assert set(np.unique(states)) <= {0, 1}


@pytest.mark.nightly
def test_neither_package_is_imported_with_the_library() -> None:
    code = "import sys, pyro_truncated.utils.arrays; assert not {'pandas', 'xarray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
