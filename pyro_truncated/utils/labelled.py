"""Arrays that name their axes and entries: pandas' ``DataFrame`` and ``Series``, xarray's ``DataArray``. Neither package is imported."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

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
    """Whether a value is of one of the types above; what is one was made by a package that has been imported."""
    return _is(value, "pandas", "DataFrame", "Series") or _is(value, "xarray", "DataArray")


def axes_of(value: Any) -> tuple[Axis, ...]:
    """The axes of a labelled array, one per dimension.

    Labels are numbers, times or strings, which files can hold: any others, and the entries of a ``MultiIndex``, become strings.
    """
    if _is(value, "xarray", "DataArray"):
        return tuple(Axis(*_named(dim, value.indexes.get(dim))) for dim in value.dims)
    return tuple(Axis(*_named(index.name, index)) for index in value.axes)


def array_of(value: Any) -> np.ndarray:
    """The numbers of a labelled array, NaN where they are missing.

    Raises:
        TypeError: if there is anything but numbers and truth values in it.
    """
    if _is(value, "xarray", "DataArray"):
        array = np.asarray(value.values)
        others = [] if array.dtype.kind in "biuf" else [array.dtype.name]
    else:
        types = {str(name): dtype for name, dtype in (value.dtypes.items() if value.ndim == 2 else [(value.name, value.dtype)])}
        others = [f"{name} ({dtype})" for name, dtype in types.items() if getattr(dtype, "kind", "O") not in "biuf"]
        array = np.empty(0) if others else _numbers(value)
    if others:
        raise TypeError(f"a {type(value).__name__} of data must hold numbers; got also {', '.join(others)}")
    return array


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
