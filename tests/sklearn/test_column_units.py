"""Estimators find the same in data whose columns are scaled one by one."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone

from pyro_truncated.sklearn import (
    ActiveSetGPLVM,
    SparseCoding,
    SpikeSlabGPLVMTransformer,
    SpikeSlabRegressor,
    SubsetGPRegressor,
    TruncatedMixture,
)

UNITS = [np.array(units) for units in ([1e-6, 1.0, 1e6], [1e6, 1e-6, 1e-3], [1e-6, 1e-6, 1e-6], [1e6, 1e6, 1e6])]
QUICK = {"n_init": 1, "max_iter": 10, "random_state": 0}


def clusters(num: int = 60) -> np.ndarray:
    random = np.random.default_rng(0)
    places = np.array([[0.0, 0.0, 0.0], [8.0, 0.0, 3.0], [0.0, 9.0, 6.0]])
    return places[random.integers(3, size=num)] + random.normal(size=(num, 3)) + 2


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("covariance", ["full", "diag", "tied"])
def test_mixtures_know_no_units_of_columns(units, covariance):
    X = clusters()
    expected, found = (TruncatedMixture(3, covariance_type=covariance, **QUICK).fit(data) for data in (X, units * X))
    np.testing.assert_array_equal(found.predict(units * X), expected.predict(X))
    assert found.score(units * X) + np.log(units).sum() == pytest.approx(expected.score(X), rel=1e-7)
    np.testing.assert_allclose(found.means_ / units, expected.means_, rtol=1e-6)


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("family", ["spike_slab", "gaussian"])
@pytest.mark.parametrize("offset", [True, False])
def test_sparse_coding_knows_no_units_of_columns(units, family, offset):
    X = clusters()
    X[::7, 1] = np.nan
    expected, found = (SparseCoding(2, family=family, offset=offset, **QUICK).fit(data) for data in (X, units * X))
    np.testing.assert_allclose(found.transform(units * X), expected.transform(X), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.components_ / units, expected.components_, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        found.inverse_transform(found.transform(units * X)) / units, expected.inverse_transform(expected.transform(X)), rtol=1e-5
    )
    volume = (~np.isnan(X) * np.log(units)).sum(1)
    np.testing.assert_allclose(found.score_samples(units * X) + volume, expected.score_samples(X), rtol=1e-6)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("units", UNITS[:2])
@pytest.mark.parametrize(
    "space", [ActiveSetGPLVM(1, max_iter=2, random_state=0), SpikeSlabGPLVMTransformer(1, n_inducing=5, max_iter=2, random_state=0)]
)
def test_latent_spaces_know_no_units_of_columns(space, units):
    X = clusters(20)

    def restored(data: np.ndarray) -> tuple[Any, Any]:
        codes = space.fit(data).transform(data)
        return codes, space.inverse_transform(codes)

    (expected, data), (codes, scaled) = restored(X), restored(units * X)
    np.testing.assert_allclose(codes, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(scaled / units, data, rtol=1e-4)


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("regressor", [SubsetGPRegressor(max_epochs=3, random_state=0), SpikeSlabRegressor(random_state=0)])
def test_regressors_know_no_units_of_columns(regressor, units):
    X = clusters(40)
    y = X @ [1.0, -2.0, 0.5] + np.sin(X[:, 0])

    def predicted(data: np.ndarray, targets: np.ndarray) -> Any:
        return np.stack(regressor.fit(data, targets).predict(data, return_std=True))

    np.testing.assert_allclose(predicted(units * X, 1e6 * y) / 1e6, predicted(X, y), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_single_columns_do_not_decide_what_fills_the_others():
    # A column in thousands beside shares: what is missing is filled in as well as of columns in their deviations.
    X = clusters(120) * [1e4, 1e-2, 1.0]
    hidden = np.random.default_rng(1).random(X.shape) < 0.1
    coder = SparseCoding(3, **QUICK).fit(np.where(hidden, np.nan, X))
    filled = coder.inverse_transform(coder.transform(np.where(hidden, np.nan, X)))
    mean = np.broadcast_to(np.nanmean(np.where(hidden, np.nan, X), 0), X.shape)
    own, others = (np.sqrt((((some - X) / X.std(0))[hidden] ** 2).mean()) for some in (filled, mean))
    assert own < 0.8 * others


@pytest.mark.parametrize(("value", "number"), [(1e9, 1), (30.0, 0)])
@pytest.mark.parametrize("estimator", [SparseCoding(2, **QUICK), SpikeSlabGPLVMTransformer(1, **QUICK)])
def test_outliers_that_hide_their_column_are_named(estimator, value, number):
    X = clusters()
    X[7, 1] = value
    X[::9, 2] = np.nan
    with warnings.catch_warnings(record=True, action="always") as caught:
        estimator.fit(X)
    found = [str(warning.message) for warning in caught]
    assert [f"but an entry is {value:.3g}" in text for text in found if "column 1 of X has outliers" in text] == [True] * number


@pytest.mark.parametrize("value", [1e3, 1e6])
def test_an_input_far_from_all_others_hides_no_function(value):
    X = np.random.default_rng(0).normal(size=(100, 2))
    y = np.sin(X[:, 0])
    X[0, 0] = value
    found = SubsetGPRegressor(random_state=0).fit(X, y)
    np.testing.assert_allclose(found.predict(X)[1:], y[1:], atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "dtype"), [(1e-200, "f8"), (1e150, "f8"), (1e-30, "f4")])
def test_units_whose_squares_are_no_numbers_are_standardised(unit, dtype):
    X = clusters()
    expected, found = (SparseCoding(2, **QUICK).fit(data) for data in (X, (unit * X).astype(dtype)))
    assert found.score((unit * X).astype(dtype)) + 3 * np.log(unit) == pytest.approx(expected.score(X), rel=1e-4)


def test_constant_columns_of_single_precision_do_not_vary():
    with pytest.warns(UserWarning, match="X does not vary"):
        SparseCoding(2, **QUICK).fit(np.full((150, 3), 1e9 + 64, dtype=np.float32))


@pytest.mark.parametrize("estimator", [SparseCoding(2, **QUICK), ActiveSetGPLVM(1, max_iter=1), SpikeSlabGPLVMTransformer(1, max_iter=1)])
def test_constant_columns_beside_others_are_named(estimator):
    X = clusters(30)
    with warnings.catch_warnings(action="error", category=UserWarning):
        clone(estimator).fit(X)
    with pytest.warns(UserWarning, match="4 of the 7 columns of .*the data do not vary, and lower the noise that all columns share"):
        clone(estimator).fit(np.hstack([X, np.ones((30, 4))]))


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
@pytest.mark.parametrize("estimator", [SparseCoding(2, **QUICK), ActiveSetGPLVM(1, max_iter=1), SpikeSlabGPLVMTransformer(1, max_iter=1)])
def test_columns_that_are_all_missing_are_refused(estimator, family):
    X = np.where([True, True, False, True], np.random.default_rng(0).integers(0, 2, (20, 4)), np.nan)
    estimator = clone(estimator)
    if isinstance(estimator, SparseCoding):
        estimator.set_params(family=family)
    with pytest.raises(ValueError, match=r"columns \[2\] of X have no observed entry, only NaN; leave them out"):
        estimator.fit(X)
