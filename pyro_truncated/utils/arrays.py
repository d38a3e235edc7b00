"""Arrays of NumPy, pandas, polars, xarray and Pillow where tensors are expected.

None of these packages but NumPy is imported.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
import inspect
import itertools
import numbers
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin
from torch import Tensor

OF_TIMES = "divide differences of times by a unit"
_FILL_VALUES = ("_FillValue", "missing_value")
_UNNAMED = re.compile(r"dim_\d+")


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of an array."""

    name: str | None  # what it is called
    labels: np.ndarray | None  # the names of its entries


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
    """The axes of a labelled array, one per dimension."""
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


def as_numpy(value: Any, name: str | None = None) -> np.ndarray:
    """The numbers of another package's array, NaN where null or ``_FillValue``."""
    array = _numbers(value)
    if array.dtype.kind in "biuf":
        return array
    columns = _columns(value)
    raise _not_numbers(value, name, [column for column in columns if _numbers(column[2]).dtype.kind not in "biuf"] or columns)


def check_columns(value: Any, name: str) -> None:
    """Refuses columns of a table that cannot become numbers."""
    if (
        hasattr(value, "columns")
        and find_package(value)
        and (others := [column for column in _columns(value) if _float_values(column[2]) is None])
    ):
        raise _not_numbers(value, name, others)


def column_names(value: Any) -> list[str] | None:
    """The names of a table's columns; ``None`` unless all are strings."""
    if not find_package(value) or len(np.shape(value)) != 2:
        return None
    labels = labelled_axes(value)[1].labels
    return None if labels is None or labels.dtype.kind != "U" else labels.tolist()


def remember_columns(owner: Any, name: str, value: Any) -> None:
    """Keeps the names of a table's columns for :func:`check_column_names`."""
    vars(owner)["_names_of_columns"] = {**vars(owner).get("_names_of_columns", {}), name: column_names(value)}


def check_column_names(owner: Any, name: str, value: Any) -> None:
    """Refuses tables whose columns are not those that an object remembers."""
    expected, names = getattr(owner, "_names_of_columns", {}).get(name), column_names(value)
    if expected is None or names is None or len(expected) != len(names):
        return
    for place, (old, new) in enumerate(zip(expected, names, strict=True)):
        if new != old:
            raise ValueError(
                f"{name} must have the columns of the training data, in their order: column {place} must be {old!r}; got {new!r}"
            )


def _float_values(column: Any) -> np.ndarray | None:
    """Returns a column as real numbers, ``None`` if it holds others."""
    array = _numbers(column)
    try:
        return None if array.dtype.kind in "mM" else array.astype(float)
    except (TypeError, ValueError):
        return None


def _not_numbers(value: Any, name: str | None, columns: Sequence[tuple[Any, Any, Any]]) -> TypeError:
    others = ", ".join(f"{label} ({textwrap.shorten(str(kind), 60)})" for label, kind, _ in columns[:5]) + (
        f" and {len(columns) - 5} more" if len(columns) > 5 else ""
    )
    subject = f"a {type(value).__name__} of data" if name is None else f"{name.rstrip(',')}, a {type(value).__name__},"
    return TypeError(f"{subject} must hold numbers; got also {others}: leave them out, or encode them as numbers")


def _numbers(value: Any) -> np.ndarray:
    """The entries of an array, as numbers if all of them are."""
    package = find_package(value)
    if package == "xarray":
        return _without_fill_values(value)
    if package == "Pillow" and value.mode in ("P", "PA"):
        # Else their numbers are places in a palette.
        value = value.convert("RGBA" if value.has_transparency_data else "RGB")
    array = np.asarray(value.to_numpy() if package in ("pandas", "polars") else value)
    if package == "pandas" and array.dtype == object:
        types = value.dtypes if value.ndim == 2 else [value.dtype]
        if all(getattr(dtype, "kind", "O") in "biuf" for dtype in types):
            return np.asarray(value.to_numpy(dtype=float, na_value=np.nan))
    return _from_objects(array)


def _columns(value: Any) -> list[tuple[Any, Any, Any]]:
    """The columns of a table with their names and types."""
    if not _is(value, "pandas", "DataFrame") and not _is(value, "polars", "DataFrame"):
        dtype = getattr(value, "dtype", "?")
        return [(getattr(value, "name", None), dtype, value)]
    columns = [value[label] if list(value.columns).count(label) == 1 else value.iloc[:, d] for d, label in enumerate(value.columns)]
    return [(label, column.dtype, column) for label, column in zip(value.columns, columns, strict=True)]


def _from_objects(array: np.ndarray) -> np.ndarray:
    """Numbers and ``None`` among objects in double precision, NaN for ``None``."""
    if array.dtype != object:
        return array
    entries = array.ravel().tolist()
    present = [None if type(entry).__name__ == "NAType" else entry for entry in entries]
    if not all(entry is None or isinstance(entry, (numbers.Real, decimal.Decimal, np.bool_)) for entry in present):
        return array
    return np.array([np.nan if entry is None else float(entry) for entry in present]).reshape(array.shape)


def _without_fill_values(array: Any) -> np.ndarray:
    """The numbers of a ``DataArray``, NaN where they are fill values."""
    values = np.asarray(array.values)
    encoding = {} if array.encoding.keys() & {"scale_factor", "add_offset"} else array.encoding
    fills = [np.ravel(source[name]) for source in (array.attrs, encoding) for name in _FILL_VALUES if source.get(name) is not None]
    if not fills or values.dtype.kind not in "biuf":
        return _from_objects(values)
    # Fill values are written in other types than the data, as 1e20 beside single precision.
    is_fill = np.isin(values, [value for fill in fills for value in _in_type(fill, values.dtype)])
    return with_missing(values, is_fill) if is_fill.any() else values


def _in_type(fills: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Fill values, in another type if that is one of real numbers."""
    try:
        return fills.astype(dtype if dtype.kind == "f" else float)
    except ValueError:  # no numbers
        return fills[:0]


def with_missing(values: np.ndarray, is_missing: np.ndarray) -> np.ndarray:
    """A copy with NaN where entries are missing."""
    kind = values.dtype.kind
    result = values.astype(np.float64 if kind in "biu" else values.dtype if kind in "fc" else object)
    result[is_missing] = np.nan
    return result


def _is(value: Any, package: str, *names: str) -> bool:
    module = sys.modules.get(package)
    return module is not None and any(isinstance(value, getattr(module, name, ())) for name in names)


def _label(name: Any, index: Any) -> tuple[str | None, np.ndarray | None]:
    label = None if name is None or _UNNAMED.fullmatch(str(name)) else str(name)
    return label, None if index is None else _labels(index)


def _labels(index: Sequence[Any]) -> np.ndarray:
    labels = np.asarray(index)
    if labels.dtype.kind in "biufmMU":
        return labels
    return np.array([", ".join(map(str, label)) if isinstance(label, tuple) else str(label) for label in labels], dtype=str)


P = ParamSpec("P")
T = TypeVar("T")


def as_tensors(value: Any, like: Tensor | None = None, name: str | None = None) -> Any:
    """Converts arrays in a value, or its lists and dictionaries, to tensors.

    Arrays are NumPy's, and those of pandas, polars, xarray and Pillow that hold numbers. What is masked or null becomes NaN.

    Floating point arrays take the type of ``like``, all arrays its device. Errors tell the argument's ``name``.
    """
    value = as_plain_array(value, name)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return _move(torch.from_numpy(_torchable(value)), like)
    if isinstance(value, (list, tuple)) and any(map(is_array, value)):
        return type(value)(as_tensors(part, like) for part in value)
    if isinstance(value, Mapping) and any(map(is_array, value.values())):
        return {name: as_tensors(part, like) for name, part in value.items()}
    return value


def _move(tensor: Tensor, like: Tensor | None) -> Tensor:
    """A tensor on another one's device, floating point numbers in its type."""
    if like is None:
        return tensor
    if tensor.is_floating_point():
        warn_if_rounded(tensor, like.dtype)
    return tensor.to(device=like.device, dtype=like.dtype if tensor.is_floating_point() else None)


def warn_if_rounded(data: Tensor, dtype: torch.dtype) -> None:
    """Warns if a type loses what varies within columns ``(N, ...)``."""
    if not data.numel() or not data.dim() or data.dtype.itemsize <= dtype.itemsize:
        return
    # About 256 rows are looked at.
    rows = data[:: max(1, len(data) // 256)].flatten(1) if data.dim() > 1 else data.unsqueeze(-1)
    exact = rows.detach().double()
    center = exact.nanmean(0)
    deviation = (exact - center).abs().nanmean(0)
    error = (rows.detach().to(dtype).double() - exact).abs().nan_to_num(0.0, posinf=torch.inf).amax(0)
    # A hundredth of the deviation is lost, but for columns that are constant but for rounding.
    is_lost = (deviation > 4 * torch.finfo(torch.float64).eps * center.abs()) & (error > 0.01 * deviation)
    if bool(is_lost.any()):
        column = int(is_lost.nonzero()[0, 0])
        warnings.warn(
            f"data of mean {float(center[column]):.3g} and deviation {float(deviation[column]):.3g} lose precision in {dtype}, the model's "
            "dtype. Standardise them, or take a model in float64 (dtype=torch.float64, or model.double()).",
            UserWarning,
            stacklevel=3,
        )


def warn_about_constants(name: str, varies: Tensor) -> None:
    """Warns if most columns lower a noise without varying."""
    number = len(varies) - int(varies.sum())
    if 2 * number > len(varies) > number:
        warnings.warn(
            f"{number} of the {len(varies)} columns of {name} do not vary, and lower the noise that all columns share: leave them out",
            UserWarning,
            stacklevel=3,
        )


def warn_about_units(name: str, deviation: Tensor, shared: str) -> None:
    """Warns if a column varies far more than half of them."""
    # Of images half of the pixels vary at least a fifth as much as any.
    if len(deviation) and bool(deviation.max() > 10 * deviation.median()):
        warnings.warn(
            f"columns of {name} share {shared}, and have standard deviations of up to {float(deviation.max()):.3g}, but half of them of at "
            f"most {float(deviation.median()):.3g}: standardise them if their units are unlike",
            UserWarning,
            stacklevel=3,
        )


def warn_about_noise_of_columns(name: str, center: Tensor, variance: Tensor) -> None:
    """Warns of columns that one noise does not suit."""
    # Rounding errors of a constant are no deviation.
    deviation = variance.sqrt()
    varies = deviation > 16 * torch.finfo(variance.dtype).eps * center.abs()
    warn_about_constants(name, varies)
    warn_about_units(name, deviation[varies], "one noise")


def check_units(name: str, rows: Tensor) -> None:
    """Refuses columns whose squared extents are zero or infinite in their type."""
    if not rows.numel() or not bool(rows.isfinite().all()):
        return
    extents = (rows.amax(0) - rows.amin(0)).reshape(-1)
    limits = torch.finfo(rows.dtype)
    # Variances are sums of squares, and are divided by.
    is_lost = (extents > 0) & ~((extents.square() > 1e6 * limits.tiny) & (extents.square() < 1e-12 * limits.max))
    if bool(is_lost.any()):
        column = int(is_lost.nonzero()[0, 0])
        least, most = (1e6 * limits.tiny) ** 0.5, (1e-12 * limits.max) ** 0.5
        raise ValueError(
            f"{name} must have columns of extents between {least:.0e} and {most:.0e}, as squares are taken in {rows.dtype}; got "
            f"{float(extents[column]):.3g} in column {column}: give them in another unit"
        )


def rounding_tolerance(values: Tensor, *dtypes: torch.dtype) -> float:
    """A thousand rounding errors of the largest finite value, or of one."""
    finite = values[values.isfinite()].abs()
    epsilon = max(torch.finfo(dtype).eps for dtype in dtypes or (values.dtype,))
    return 1e3 * epsilon * (1.0 + (float(finite.max()) if finite.numel() else 0.0))


def once(tensor: Tensor, start: int = 0, end: int = 0) -> Tensor:
    """Returns the tensor with one entry along expanded dimensions."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0 and start <= dim < tensor.dim() - end:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def as_plain_array(value: Any, name: str | None = None) -> Any:
    """Arrays of any package as NumPy arrays, NaN where missing."""
    if find_package(value):
        value = as_numpy(value, name)
    if isinstance(value, np.ma.MaskedArray):
        is_masked = np.ma.getmaskarray(value)
        return _from_objects(with_missing(value.data, is_masked) if is_masked.any() else value.data)
    return _from_objects(value) if isinstance(value, np.ndarray) else value


def as_data(name: str, value: Any, like: Tensor | None = None) -> Tensor:
    """Returns the tensor of an argument: a tensor, array or list.

    Lists hold numbers, ``None`` where one is missing, or arrays of one shape.
    """
    if isinstance(value, Tensor):
        return check_dense_real(name, value)
    if _is(value, "xarray", "Dataset"):
        raise TypeError(f"{name} must be a tensor, an array or a list of numbers; got a Dataset: give one of its variables")
    result = as_plain_array(value, name)
    try:
        if holds_arrays(result):
            result = torch.stack([as_data(name, part) for part in result])
        elif result is not None:
            result = as_tensors(_from_objects(np.asarray(result)))
    except (ValueError, RuntimeError) as error:
        kind = f"a {type(value).__name__} of unlike lengths: pad them, with NaN where missing entries are taken"
        raise TypeError(f"{name} must be a tensor, an array or a list of numbers; got {kind}") from error
    if isinstance(result, np.ndarray) and result.dtype.kind == "c":
        raise TypeError(f"{name} must hold real numbers; got {result.dtype}")
    if not isinstance(result, Tensor):
        kind = f"an array of {result.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        is_time = isinstance(result, np.ndarray) and result.dtype.kind in "mM"
        methods = [method for method in ("toarray", "collect", "compute") if hasattr(value, method)]
        advice = f": {OF_TIMES}" if is_time else "".join(f": call its {method}()" for method in methods[:1])
        raise TypeError(f"{name} must be a tensor, an array or a list of numbers; got {kind}{advice}")
    return _move(result, like)


def check_dense_real(name: str, value: Tensor) -> Tensor:
    """Returns a tensor that is neither sparse nor complex."""
    if value.is_complex():
        raise TypeError(f"{name} must hold real numbers; got {value.dtype}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be dense; got a tensor of layout {value.layout}: call its to_dense()")
    return value


def holds_arrays(value: Any) -> bool:
    """Whether a list holds arrays or tensors, at any depth."""
    return isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) or is_array(part) or holds_arrays(part) for part in value)


class ArrayResult(NDArrayOperatorsMixin):
    """A result that is one array to others, ``array_field``.

    NumPy's functions, operators and indices take it.
    """

    array_field: ClassVar[str]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The array."""
        tensor: Tensor = getattr(self, self.array_field)
        array = tensor.detach().cpu().numpy()
        return array.astype(array.dtype if dtype is None else dtype, copy=bool(copy))

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """What a function of NumPy makes of the array."""
        inputs, out = (
            tuple(np.asarray(value) if isinstance(value, ArrayResult | Tensor) else value for value in values)
            for values in (inputs, options.pop("out", ()))
        )
        return getattr(function, method)(*inputs, **options, **({"out": out} if out else {}))

    shape = property(lambda self: self.__array__().shape, doc="Its shape.")
    ndim = property(lambda self: self.__array__().ndim, doc="The number of its dimensions.")
    dtype = property(lambda self: self.__array__().dtype, doc="Its type, of NumPy.")

    def astype(self, dtype: Any, copy: bool = True) -> np.ndarray:
        """The array in another type."""
        return self.__array__(dtype, copy=copy)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.__array__())

    def __getitem__(self, index: Any) -> Any:
        """Some entries."""
        return self.__array__()[index]

    def __iter__(self) -> Iterator[Tensor]:
        """The rows, for pandas and others."""
        return iter(getattr(self, self.array_field))

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
    # Linear algebra of torch knows neither half nor extended precision.
    kinds = {np.dtype(np.float16): np.float32, np.dtype(np.longdouble): np.float64}
    kind = array.dtype.newbyteorder("=")
    native = array.astype(kinds.get(kind, kind), copy=False)
    return native if native.flags.writeable and all(stride >= 0 for stride in native.strides) else native.copy()


def takes_arrays(method: Callable[P, T]) -> Callable[P, T]:
    """Lets a method take NumPy arrays, DataFrames and DataArrays for tensors.

    Lists are taken for arguments that are annotated as tensors. Floating point numbers take the type of the parameters.

    Example:
        >>> import numpy as np
        >>> class Centred(torch.nn.Linear):
        ...     @takes_arrays
        ...     def forward(self, x):
        ...         return super().forward(x - x.mean(0))
        >>> Centred(2, 1)(np.ones((3, 2))).dtype
        torch.float32
    """
    parameters = inspect.signature(method).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_POSITIONAL]
    data = {parameter.name for parameter in parameters if parameter.annotation in _ANNOTATIONS_OF_DATA}

    def convert(name: str | None, value: Any, like: Tensor | None) -> Any:
        if name in data and (isinstance(value, _LISTS) or is_array(value)):
            return as_data(str(name), value, like)
        return as_tensors(value, like, name)

    @functools.wraps(method)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        """Calls the method with tensors in place of arrays."""
        others = [value for value in (*args[1:], *kwargs.values()) if not isinstance(value, Tensor)]
        if not any(isinstance(value, (*_LISTS, Mapping)) or is_array(value) for value in others):
            return method(*args, **kwargs)
        like = module_number(args[0] if args else kwargs.get("model"))
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            check_column_names(args[0] if args else None, name, value)
        positional = [convert(name, value, like) for name, value in itertools.zip_longest(names[1 : len(args)], args[1:])]
        keywords = {name: convert(name, value, like) for name, value in kwargs.items()}
        return method(*args[:1], *positional, **keywords)  # type: ignore[arg-type]

    return wrapper


def remembers_columns(argument: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Lets a method's owner remember the names of a table's columns."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        """Returns the method, wrapped."""

        @functools.wraps(method)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            """Forgets the names of earlier data, and keeps those of these."""
            table = args[1] if len(args) > 1 else kwargs.get(argument)
            remember_columns(args[0], argument, None)
            result = method(*args, **kwargs)
            remember_columns(args[0], argument, table)
            return result

        return wrapper

    return decorate


_LISTS = (list, tuple, memoryview)
_ANNOTATIONS_OF_DATA = (Tensor, "Tensor", "Tensor | None")


def module_number(module: Any) -> Tensor | None:
    """A tensor of the type and device of a module's numbers."""
    # In its constructor a module has no parameters to ask for yet.
    has_parameters = isinstance(module, torch.nn.Module) and "_parameters" in vars(module)
    tensors = (*module.parameters(), *module.buffers()) if has_parameters else ()
    return next((tensor for tensor in tensors if tensor.is_floating_point()), None)
