"""The tests of this folder hold for ArviZ 0.2x, which the pinned environment has, and for 1.x: `make arviz1 PYTHON=python3.13`."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import pytest
import xarray as xr

from pyro_truncated.utils import arviz_compat as compat


@pytest.fixture
def datasets() -> dict[str, xr.Dataset]:
    return {
        "posterior": xr.Dataset({"a": (("chain", "draw"), np.arange(6.0).reshape(1, 6))}),
        "truncated_posterior": xr.Dataset({"weights": (("data", "state"), np.ones((2, 3)) / 3)}, attrs={"note": "kept"}),
    }


def test_detects_the_installed_version() -> None:
    assert version("arviz").startswith("0.") != compat.ARVIZ_V1


def test_round_trip_on_the_installed_version(datasets: dict[str, xr.Dataset]) -> None:
    idata = compat.make_idata(**datasets)
    assert type(idata).__name__ == ("DataTree" if compat.ARVIZ_V1 else "InferenceData")
    assert compat.group_names(idata) == ["posterior", "truncated_posterior"]
    for name, data in datasets.items():
        xr.testing.assert_identical(compat.get_dataset(idata, name), data)


def test_data_tree_of_the_newer_version(datasets: dict[str, xr.Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "ARVIZ_V1", True)
    idata = compat.make_idata(**datasets)
    assert isinstance(idata, xr.DataTree)
    assert compat.group_names(idata) == ["posterior", "truncated_posterior"]
    for name, data in datasets.items():
        xr.testing.assert_identical(compat.get_dataset(idata, name), data)


def test_missing_group(datasets: dict[str, xr.Dataset]) -> None:
    with pytest.raises(ValueError, match="the data have no group"):
        compat.get_dataset(compat.make_idata(**datasets), "prior")
