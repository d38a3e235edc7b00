"""The door of the estimators: scikit-learn's checks, with missing entries as NaN."""

from __future__ import annotations

from typing import Any

from sklearn.utils.validation import check_array, validate_data

from pyro_truncated.utils.arrays import as_plain_array


def validated_data(estimator: Any, X: Any, y: Any = "no_validation", **options: Any) -> Any:
    """Returns data as scikit-learn checks them, NaN where missing.

    Args:
        estimator: whose features are counted and named.
        X: data ``(n_samples, n_features)``.
        y: targets, ``None`` where they are missing; by default there are none to look at.
        **options: of :func:`sklearn.utils.validation.validate_data`.

    Raises:
        ValueError: for what scikit-learn refuses, as NaN where an estimator takes none.
    """
    return validate_data(estimator, _with_nan(X), y=as_plain_array(y), **options)


def validated_array(X: Any, **options: Any) -> Any:
    """Returns an array as scikit-learn checks it, NaN where missing."""
    return check_array(_with_nan(X), **options)


def _with_nan(X: Any) -> Any:
    # Tables stay as they are: scikit-learn reads the names of their columns, and takes their nulls for NaN.
    return X if hasattr(X, "columns") else as_plain_array(X)
