"""Tables as users hold them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from pyro_truncated.sklearn import SparseCoding, TruncatedMixture


def test_missing_entries_among_objects_of_a_table_are_missing():
    values = np.random.RandomState(0).randn(20, 2)
    values[3, 0] = np.nan
    table = pd.DataFrame(values, columns=["a", "b"]).astype(object).where(~np.isnan(values), pd.NA)
    coder = SparseCoding(2, max_iter=2, n_init=1, random_state=0)
    np.testing.assert_array_equal(coder.fit_transform(table), coder.fit_transform(values))


def test_times_are_named():
    days = np.arange(20).reshape(10, 2).astype("datetime64[D]")
    for times in (days, days - days[0]):
        with pytest.raises(TypeError, match=r"X must hold numbers; got times"):
            TruncatedMixture(2).fit(times)


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
