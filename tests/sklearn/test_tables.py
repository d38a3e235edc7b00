"""Tables as users hold them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import xarray

from pyro_truncated.sklearn import (
    ActiveSetGPLVM,
    SparseCoding,
    SpikeSlabGPLVMTransformer,
    SpikeSlabRegressor,
    SubsetGPRegressor,
    TruncatedMixture,
)


def test_missing_entries_among_objects_of_a_table_are_missing():
    values = np.random.RandomState(0).randn(20, 2)
    values[3, 0] = np.nan
    table = pd.DataFrame(values, columns=["a", "b"]).astype(object).where(~np.isnan(values), pd.NA)
    coder = SparseCoding(2, max_iter=2, n_init=1, random_state=0)
    np.testing.assert_array_equal(coder.fit_transform(table), coder.fit_transform(values))


@pytest.mark.parametrize("regressor", [SpikeSlabRegressor(), SubsetGPRegressor()])
def test_missing_targets_are_refused_in_lists_too(regressor):
    y = np.arange(20.0)
    for targets in ([None, *y[1:]], [np.nan, *y[1:]], np.ma.masked_equal(y, 0)):
        with pytest.raises(ValueError, match="y contains NaN"):
            regressor.fit(y[:, None], targets)


def test_times_are_named():
    days = np.arange(20).reshape(10, 2).astype("datetime64[D]")
    for times in (days, days - days[0]):
        with pytest.raises(TypeError, match=r"X must hold numbers; got times"):
            TruncatedMixture(2).fit(times)


DAYS = pd.date_range("2020", periods=20)


@pytest.mark.parametrize(
    ("column", "dtype"),
    [
        (DAYS, "datetime64"),
        (DAYS.tz_localize("UTC"), "datetime64"),
        (DAYS - DAYS[0], "timedelta64"),
        (DAYS.to_period(), r"period\[D\]"),
        (list("ab") * 10, "(str|object)"),
        (pd.Categorical(list("ab") * 10), "category"),
    ],
)
@pytest.mark.parametrize("is_alone", [True, False])
def test_columns_that_are_no_numbers_are_named(column, dtype, is_alone):
    table = pd.DataFrame({"born": column} if is_alone else {"born": column, "height": np.arange(20.0)})
    rows = np.arange(20.0)[:, None]
    coder = SparseCoding(2, max_iter=1, n_init=1, random_state=0).fit(np.eye(20, 2))
    for call in (TruncatedMixture(2).fit, coder.inverse_transform, lambda X: SubsetGPRegressor().fit(X, rows[:, 0])):
        with pytest.raises(TypeError, match=rf"^X, a DataFrame, must hold numbers; got also born \({dtype}.*\): leave"):
            call(table)
    with pytest.raises(TypeError, match=rf"^y, a DataFrame, must hold numbers; got also born \({dtype}.*\): leave"):
        SubsetGPRegressor().fit(rows, table)


def test_dates_are_categories():
    days = np.array(["2020-01-01", "2021-01-01"], dtype="datetime64[D]")[np.random.RandomState(0).randint(0, 2, (40, 2))]
    mixtures = [TruncatedMixture(2, family="categorical", n_init=1, random_state=0).fit(X) for X in (days, days.astype(str))]
    np.testing.assert_array_equal(*(mixture.weights_ for mixture in mixtures))


@pytest.mark.nightly(keep="values")
@pytest.mark.parametrize("covariance_type", ["full", "tied", "diag", "spherical"])
@pytest.mark.parametrize("offset", [1e8, 1e12, 2.0**53])
def test_mixtures_of_columns_far_from_zero_are_those_of_columns_at_zero(covariance_type, offset):
    X = np.random.RandomState(0).randn(60, 3) * [200, 300, 400]
    X[:30] += 800
    options = {"covariance_type": covariance_type, "n_init": 2, "max_iter": 20, "random_state": 0}
    near, far = TruncatedMixture(2, **options).fit(X), TruncatedMixture(2, **options).fit(X + offset)
    np.testing.assert_allclose(far.score_samples(X + offset), near.score_samples(X), atol=0.05)
    np.testing.assert_allclose(far.means_ - offset, near.means_, atol=4.0)


ESTIMATORS = [
    SubsetGPRegressor(max_epochs=2, random_state=0),
    SpikeSlabRegressor(random_state=0),
    TruncatedMixture(2, n_init=1, max_iter=2, random_state=0),
    SparseCoding(2, n_init=1, max_iter=2, random_state=0),
    SpikeSlabGPLVMTransformer(2, n_inducing=5, max_iter=2, random_state=0),
    ActiveSetGPLVM(2, max_iter=2, random_state=0),
]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("container", [pd.DataFrame, lambda table: xarray.DataArray(table, dims=("n", "d"))])
def test_estimators_refuse_tables_with_other_columns(estimator, container):
    values = np.random.RandomState(0).randn(30, 3)
    table = pd.DataFrame(values, columns=list("abc"))
    estimator.fit(container(table), values[:, 0])
    assert list(estimator.feature_names_in_) == list("abc")
    answer = getattr(estimator, "predict", None) or estimator.transform
    answer(container(table))
    for other in (table[["b", "a", "c"]], table.rename(columns={"a": "z"})):
        with pytest.raises(ValueError, match="feature names should match"):
            answer(container(other))


@pytest.mark.parametrize("transformer", [estimator for estimator in ESTIMATORS if hasattr(estimator, "inverse_transform")])
def test_codes_in_another_order_are_refused(transformer):
    codes = pd.DataFrame(transformer.fit_transform(np.random.RandomState(0).randn(30, 3)), columns=transformer.get_feature_names_out())
    expected = transformer.inverse_transform(codes.to_numpy())
    np.testing.assert_array_equal(transformer.inverse_transform(codes), expected)
    np.testing.assert_array_equal(transformer.inverse_transform(codes.set_axis(["u", "v"], axis=1)), expected)
    with pytest.raises(ValueError, match=r"X must have the columns of transform, in their order: \['.*0', '.*1'\]; got"):
        transformer.inverse_transform(codes[codes.columns[::-1]])


@pytest.mark.parametrize("unit", [1e-200, 1e200])
@pytest.mark.parametrize(
    ("fit", "name"),
    [
        (lambda rows, unit: TruncatedMixture(2, random_state=0).fit(rows * [1, unit]), "X"),
        (lambda rows, unit: SpikeSlabRegressor(random_state=0).fit(rows * [1, unit], rows[:, 0]), "X"),
        (lambda rows, unit: SpikeSlabRegressor(random_state=0).fit(rows, unit * rows[:, 0]), "y"),
        (lambda rows, unit: SubsetGPRegressor(random_state=0).fit(rows * [1, unit], rows[:, 0]), "inputs"),
        (lambda rows, unit: SubsetGPRegressor(random_state=0).fit(rows, unit * rows[:, 0]), "y, the targets,"),
    ],
)
def test_units_whose_squares_are_no_numbers_are_refused(fit, name, unit):
    with pytest.raises(ValueError, match=f"^{name} must .*got"):
        fit(np.random.RandomState(0).randn(20, 2), unit)


def test_tables_of_sparse_columns_say_how_to_make_them_dense():
    """Scikit-learn names ``toarray``, which a table does not have."""
    table = pd.DataFrame({"a": [1.0, 0.0, 3.0] * 5, "b": [0.0, 0.0, 1.0] * 5}).astype(pd.SparseDtype(float, 0.0))
    for estimator in (TruncatedMixture(2, family="poisson"), SparseCoding(2), SpikeSlabGPLVMTransformer(1)):
        with pytest.raises(TypeError, match=r"^X must be dense; got a table of sparse columns: call its sparse\.to_dense\(\)"):
            estimator.fit(table)
