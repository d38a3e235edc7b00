"""Arrays of other packages: pandas, polars, xarray, Pillow. None of them is imported."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

_FILL_VALUES = ("_FillValue", "missing_value")
_UNNAMED = re.compile(r"dim_\d+")


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of an array.

    Attributes:
        name: what it is called; ``None`` if it has no name.
        labels: the names of its entries; ``None`` if they have none.
    """

    name: str | None
    labels: np.ndarray | None


def is_labelled(value: Any) -> bool:
    """Whether a value is an array of pandas, polars, xarray or Pillow; what is one was made by a package that has been imported."""
    return _is_pandas(value) or _is_polars(value) or _is_image(value) or _is(value, "xarray", "DataArray")


def axes_of(value: Any) -> tuple[Axis, ...]:
    """The axes of a labelled array, one per dimension.

    Labels are numbers, times or strings, which files can hold: any others, and the entries of a ``MultiIndex``, become strings.
    """
    if _is(value, "xarray", "DataArray"):
        return tuple(Axis(*_named(dim, value.indexes.get(dim))) for dim in value.dims)
    if _is(value, "polars", "DataFrame"):
        return (Axis(None, None), Axis(None, _labels(value.columns)))
    if _is(value, "polars", "Series"):
        return (Axis(value.name or None, None),)
    if not hasattr(value, "axes"):
        return tuple(Axis(None, None) for _ in np.shape(value))
    return tuple(Axis(*_named(index.name, index)) for index in value.axes)


def array_of(value: Any) -> np.ndarray:
    """The numbers of an array of another package, NaN where they are missing: null, ``pandas.NA``, or the ``_FillValue`` of xarray.

    Raises:
        TypeError: if there is anything but numbers and truth values in it.
    """
    if not _is_pandas(value):
        array = _plain(value)
        others = [] if array.dtype.kind in "biuf" else [array.dtype.name]
    else:
        columns = value.dtypes.items() if value.ndim == 2 else [(getattr(value, "name", None), value.dtype)]
        types = {str(name): dtype for name, dtype in columns}
        others = [f"{name} ({dtype})" for name, dtype in types.items() if getattr(dtype, "kind", "O") not in "biuf"]
        array = np.empty(0) if others else _numbers(value)
    if others:
        raise TypeError(f"a {type(value).__name__} of data must hold numbers; got also {', '.join(others)}")
    return array


def _is_pandas(value: Any) -> bool:
    return _is(value, "pandas", "DataFrame", "Series") or _is(value, "pandas.api.extensions", "ExtensionArray")


def _is_polars(value: Any) -> bool:
    return _is(value, "polars", "DataFrame", "Series")


def _is_image(value: Any) -> bool:
    return _is(value, "PIL.Image", "Image")


def _plain(value: Any) -> np.ndarray:
    """The numbers of an array that has one type."""
    if _is(value, "xarray", "DataArray"):
        return _without_fill_values(value)
    return np.asarray(value.to_numpy() if _is_polars(value) else value)


def _without_fill_values(array: Any) -> np.ndarray:
    """The numbers of a ``DataArray``, NaN where they are the fill value that its attributes, or its encoding without scale, name."""
    values = np.asarray(array.values)
    kept = {} if array.encoding.keys() & {"scale_factor", "add_offset"} else array.encoding
    fills = [np.ravel(source[name]) for source in (array.attrs, kept) for name in _FILL_VALUES if source.get(name) is not None]
    if not fills or values.dtype.kind not in "biuf":
        return values
    is_fill = np.isin(values, np.concatenate(fills))
    return with_missing(values, is_fill) if is_fill.any() else values


def with_missing(values: np.ndarray, is_missing: np.ndarray) -> np.ndarray:
    """A floating point copy with NaN where entries are missing; integers and truth values become double precision."""
    found = values.astype(values.dtype if values.dtype.kind == "f" else np.float64)
    found[is_missing] = np.nan
    return found


def _is(value: Any, package: str, *names: str) -> bool:
    module = sys.modules.get(package)
    return module is not None and any(isinstance(value, getattr(module, name, ())) for name in names)


def _numbers(frame: Any) -> np.ndarray:
    """Columns of one type as they are; columns with missing values, and of several types, in double precision."""
    array = np.asarray(frame.to_numpy())
    return array if array.dtype.kind in "biuf" else np.asarray(frame.to_numpy(dtype=float, na_value=np.nan))


def _named(name: Any, index: Any) -> tuple[str | None, np.ndarray | None]:
    named = None if name is None or _UNNAMED.fullmatch(str(name)) else str(name)
    return named, None if index is None else _labels(index)


def _labels(index: Sequence[Any]) -> np.ndarray:
    labels = np.asarray(index)
    if labels.dtype.kind in "biufmMU":
        return labels
    return np.array([", ".join(map(str, label)) if isinstance(label, tuple) else str(label) for label in labels], dtype=str)
