"""Arrays where tensors are expected: NumPy's, pandas' ``DataFrame`` and ``Series``, xarray's ``DataArray``.

They are converted once, where they come in. Neither pandas nor xarray is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

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


P = ParamSpec("P")
T = TypeVar("T")


def as_tensors(value: Any, like: Tensor | None = None) -> Any:
    """The value with arrays in it, or in its lists, tuples and dictionaries, made tensors; anything else is as it was.

    Arrays are NumPy's, and pandas' and xarray's of numbers.

    Args:
        value: any value.
        like: floating point arrays take its type, and all arrays its device; without it they keep their own type.

    Raises:
        TypeError: if an array of pandas or xarray holds something other than numbers.
    """
    if is_labelled(value):
        value = array_of(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        tensor = torch.from_numpy(_torchable(value))
        if like is None:
            return tensor
        return tensor.to(device=like.device, dtype=like.dtype if tensor.is_floating_point() else None)
    if isinstance(value, (list, tuple)) and any(map(is_array, value)):
        return type(value)(as_tensors(part, like) for part in value)
    if isinstance(value, Mapping) and any(map(is_array, value.values())):
        return {name: as_tensors(part, like) for name, part in value.items()}
    return value


def is_array(value: Any) -> bool:
    """Whether a value is an array that :func:`as_tensors` makes a tensor."""
    return isinstance(value, np.ndarray) or is_labelled(value)


def _torchable(array: np.ndarray) -> np.ndarray:
    """The array itself where torch can share its memory, else a copy: of read-only arrays, reversed ones and foreign byte orders."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return native if native.flags.writeable and all(stride >= 0 for stride in native.strides) else native.copy()


def takes_arrays(method: Callable[P, T]) -> Callable[P, T]:
    """Lets a method, or a function of a ``model``, take NumPy arrays, DataFrames and DataArrays for tensors.

    Floating point ones take the type of the parameters.

    Example:
        >>> import numpy as np
        >>> class Centred(torch.nn.Linear):
        ...     @takes_arrays
        ...     def forward(self, x):
        ...         return super().forward(x - x.mean(0))
        >>> Centred(2, 1)(np.ones((3, 2))).dtype
        torch.float32
    """

    @functools.wraps(method)
    def converted(*args: P.args, **kwargs: P.kwargs) -> T:
        """The method with tensors in the place of arrays; called as it is where there are none."""
        if not any(_holds_array(value) for value in (*args[1:], *kwargs.values())):
            return method(*args, **kwargs)
        like = number_of(args[0] if args else kwargs.get("model"))
        taken = [as_tensors(value, like) for value in args[1:]]
        named = {name: as_tensors(value, like) for name, value in kwargs.items()}
        return method(*args[:1], *taken, **named)  # type: ignore[arg-type]

    return converted


def _holds_array(value: Any) -> bool:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,)
    return any(map(is_array, parts))


def number_of(module: Any) -> Tensor | None:
    """A tensor of the type and device of a module's numbers."""
    # In its constructor a module has no parameters to ask for yet.
    is_made = isinstance(module, torch.nn.Module) and "_parameters" in vars(module)
    tensors = (*module.parameters(), *module.buffers()) if is_made else ()
    return next((tensor for tensor in tensors if tensor.is_floating_point()), None)
