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
