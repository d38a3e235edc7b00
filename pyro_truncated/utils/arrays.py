"""Arrays of NumPy and other packages where tensors are expected: converted once, where they come in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.utils.labelled import array_of, is_labelled, with_missing

P = ParamSpec("P")
T = TypeVar("T")


def as_tensors(value: Any, like: Tensor | None = None) -> Any:
    """The value with arrays in it, or in its lists, tuples and dictionaries, made tensors; anything else is as it was.

    Arrays are NumPy's, and those of pandas, polars, xarray and Pillow that hold numbers. What is masked, null, ``pandas.NA`` or the
    ``_FillValue`` of xarray becomes NaN, which marks missing entries everywhere.

    Args:
        value: any value.
        like: floating point arrays take its type, and all arrays its device; without it they keep their own type.

    Raises:
        TypeError: if an array of another package holds something other than numbers.
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
    """Arrays of other packages and masked ones as NumPy arrays, NaN where entries are missing; anything else is as it was."""
    if is_labelled(value):
        value = array_of(value)
    if isinstance(value, np.ma.MaskedArray):
        is_masked = np.ma.getmaskarray(value)
        return with_missing(value.data, is_masked) if is_masked.any() and value.dtype.kind in "biuf" else value.data
    return value


def as_data(name: str, value: Any) -> Tensor:
    """Returns the tensor of numbers that an argument holds: a tensor, an array, or a list of numbers.

    Args:
        name: of the argument.
        value: what was given.

    Raises:
        TypeError: naming the argument, if it holds no numbers, or lists of unlike lengths.
    """
    found = value if isinstance(value, (list, tuple)) else as_tensors(value)
    if not isinstance(found, Tensor):
        try:
            found = torch.stack([as_data(name, part) for part in value]) if _holds_array(value) else as_tensors(np.asarray(value))
        except (ValueError, RuntimeError):  # of unlike lengths
            found = value
    if not isinstance(found, Tensor):
        kind = f"an array of {found.dtype}" if isinstance(found, np.ndarray) else f"a {type(value).__name__}"
        raise TypeError(f"{name} must be a tensor, an array or a list of numbers; got {kind}")
    return found


class ArrayResult:
    """A result that is one of its tensors to NumPy, matplotlib and torch, ``array_field``."""

    array_field: ClassVar[str]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The array."""
        tensor: Tensor = getattr(self, self.array_field)
        array = tensor.detach().cpu().numpy()
        return array.astype(array.dtype if dtype is None else dtype, copy=bool(copy))


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
