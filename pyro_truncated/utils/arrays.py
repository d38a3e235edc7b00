"""Arrays of NumPy, pandas, polars, xarray and Pillow where tensors are expected.

None of these packages but NumPy is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

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


# Packages whose arrays have names, with the modules and classes of these arrays.
_PACKAGES = {
    "pandas": (("pandas", "DataFrame", "Series"), ("pandas.api.extensions", "ExtensionArray")),
    "polars": (("polars", "DataFrame", "Series"),),
    "xarray": (("xarray", "DataArray", "Variable"),),
    "Pillow": (("PIL.Image", "Image"),),
}


def find_package(value: Any) -> str | None:
    """The package whose labelled array a value is, if it is one."""
    return next((package for package, kinds in _PACKAGES.items() if any(_is(value, *kind) for kind in kinds)), None)


def labelled_axes(value: Any) -> tuple[Axis, ...]:
    """The axes of a labelled array, one per dimension.

    Labels are numbers, times or strings; any others become strings.
    """
    if find_package(value) == "xarray":
        indexes = getattr(value, "indexes", {})  # variables have none
        return tuple(Axis(*_label(dim, indexes.get(dim))) for dim in value.dims)
    if _is(value, "polars", "DataFrame"):
        return (Axis(None, None), Axis(None, _labels(value.columns)))
    if _is(value, "polars", "Series"):
        return (Axis(value.name or None, None),)
    if not hasattr(value, "axes"):
        return tuple(Axis(None, None) for _ in np.shape(value))
    return tuple(Axis(*_label(index.name, index)) for index in value.axes)


def as_numpy(value: Any) -> np.ndarray:
    """The numbers of another package's array, NaN where null or ``_FillValue``."""
    if find_package(value) != "pandas":
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


def _plain(value: Any) -> np.ndarray:
    """The numbers of an array that has one type."""
    package = find_package(value)
    if package == "xarray":
        return _without_fill_values(value)
    if package == "Pillow" and value.mode in ("P", "PA"):
        # Else their numbers are places in a palette.
        value = value.convert("RGBA" if value.has_transparency_data else "RGB")
    return np.asarray(value.to_numpy() if package == "polars" else value)


def _without_fill_values(array: Any) -> np.ndarray:
    """The numbers of a ``DataArray``, NaN where they are fill values."""
    values = np.asarray(array.values)
    kept = {} if array.encoding.keys() & {"scale_factor", "add_offset"} else array.encoding
    fills = [np.ravel(source[name]) for source in (array.attrs, kept) for name in _FILL_VALUES if source.get(name) is not None]
    if not fills or values.dtype.kind not in "biuf":
        return values
    is_fill = np.isin(values, np.concatenate(fills))
    return with_missing(values, is_fill) if is_fill.any() else values


def with_missing(values: np.ndarray, is_missing: np.ndarray) -> np.ndarray:
    """A floating point copy with NaN where entries are missing."""
    found = values.astype(values.dtype if values.dtype.kind == "f" else np.float64)
    found[is_missing] = np.nan
    return found


def _is(value: Any, package: str, *names: str) -> bool:
    module = sys.modules.get(package)
    return module is not None and any(isinstance(value, getattr(module, name, ())) for name in names)


def _numbers(frame: Any) -> np.ndarray:
    """Columns of one type as they are, others in double precision."""
    array = np.asarray(frame.to_numpy())
    return array if array.dtype.kind in "biuf" else np.asarray(frame.to_numpy(dtype=float, na_value=np.nan))


def _label(name: Any, index: Any) -> tuple[str | None, np.ndarray | None]:
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
    """Converts arrays in a value, or its lists and dictionaries, to tensors.

    Arrays are NumPy's, and those of pandas, polars, xarray and Pillow that hold numbers. What is masked or null becomes NaN.

    Floating point arrays take the type of ``like``, all arrays its device.
    """
    value = as_plain_array(value)
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


def as_plain_array(value: Any) -> Any:
    """Arrays of any package as NumPy arrays, NaN where missing."""
    if find_package(value):
        value = as_numpy(value)
    if isinstance(value, np.ma.MaskedArray):
        is_masked = np.ma.getmaskarray(value)
        return with_missing(value.data, is_masked) if is_masked.any() and value.dtype.kind in "biuf" else value.data
    return value


def as_data(name: str, value: Any) -> Tensor:
    """Returns the tensor of an argument: a tensor, array or list."""
    if _is(value, "xarray", "Dataset"):
        raise TypeError(f"{name} must be a tensor, an array or a list of numbers; got a Dataset: give one of its variables")
    found = value if isinstance(value, (list, tuple)) else as_tensors(value)
    if not isinstance(found, Tensor):
        try:
            found = torch.stack([as_data(name, part) for part in value]) if _holds_array(value) else as_tensors(_with_none(value))
        except (ValueError, RuntimeError):  # of unlike lengths
            found = value
    if not isinstance(found, Tensor):
        kind = f"an array of {found.dtype}" if isinstance(found, np.ndarray) else f"a {type(value).__name__}"
        raise TypeError(f"{name} must be a tensor, an array or a list of numbers; got {kind}")
    return found


def _with_none(value: Any) -> np.ndarray:
    """Returns numbers in lists as an array; ``None`` is NaN."""
    array = np.asarray(value)
    with contextlib.suppress(TypeError, ValueError):
        return array.astype(float) if array.dtype == object and isinstance(value, (list, tuple)) else array
    return array


class ArrayResult:
    """A result that is one array to others, ``array_field``."""

    array_field: ClassVar[str]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The array."""
        tensor: Tensor = getattr(self, self.array_field)
        array = tensor.detach().cpu().numpy()
        return array.astype(array.dtype if dtype is None else dtype, copy=bool(copy))

    def __dlpack__(self, **options: Any) -> Any:
        """The array, for torch and others."""
        return getattr(self, self.array_field).detach().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        """Where it is."""
        return getattr(self, self.array_field).__dlpack_device__()


def is_array(value: Any) -> bool:
    """Whether a value is an array that :func:`as_tensors` makes a tensor."""
    return isinstance(value, np.ndarray) or find_package(value) is not None


def _torchable(array: np.ndarray) -> np.ndarray:
    """The array, or a copy if torch cannot share its memory."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return native if native.flags.writeable and all(stride >= 0 for stride in native.strides) else native.copy()


def takes_arrays(method: Callable[P, T]) -> Callable[P, T]:
    """Lets a method take NumPy arrays, DataFrames and DataArrays for tensors.

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
        """Calls the method with tensors in place of arrays."""
        if not any(_holds_array(value) for value in (*args[1:], *kwargs.values())):
            return method(*args, **kwargs)
        like = module_number(args[0] if args else kwargs.get("model"))
        taken = [as_tensors(value, like) for value in args[1:]]
        named = {name: as_tensors(value, like) for name, value in kwargs.items()}
        return method(*args[:1], *taken, **named)  # type: ignore[arg-type]

    return converted


def _holds_array(value: Any) -> bool:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,)
    return any(map(is_array, parts))


def module_number(module: Any) -> Tensor | None:
    """A tensor of the type and device of a module's numbers."""
    # In its constructor a module has no parameters to ask for yet.
    is_made = isinstance(module, torch.nn.Module) and "_parameters" in vars(module)
    tensors = (*module.parameters(), *module.buffers()) if is_made else ()
    return next((tensor for tensor in tensors if tensor.is_floating_point()), None)
