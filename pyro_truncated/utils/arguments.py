"""Checks of arguments: counts, kinds, and errors that name them."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import linecache
import math
import numbers
import operator
import re
import traceback
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def check_count(name: str, value: Any, least: int = 1, most: int | None = None, limit: str = "") -> int:
    """A count up to ``most``, the ``limit``: what has ``__index__``, no Boolean."""
    try:
        count = None if isinstance(value, bool) or (torch.is_tensor(value) and value.dtype == torch.bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{name} must be {kind}; got {describe(value)}")
    if most is not None and count > most:
        raise ValueError(f"{name} must lie in {least} .. {most}{limit and f', {limit}'}; got {count}")
    return count


@contextmanager
def naming_empty_plates() -> Iterator[None]:
    """Explains that a plate has no members, where Pyro divides by zero."""
    try:
        yield
    except ZeroDivisionError as error:
        raise ValueError(
            f"the model divides by zero ({error}); most likely a plate has no members: no data points (N = 0), or an empty minibatch"
        ) from error


def check_learning_rate(learning_rate: float) -> None:
    """Refuses what is no learning rate of Adam.

    Its steps are about as long, in latents of unit variance and in logarithms.
    """
    if not 0 < learning_rate <= 10:
        raise ValueError(f"learning_rate must be a positive number of at most 10; got {learning_rate!r}")


def check_counts(**counts: Any) -> tuple[int, ...]:
    """Positive counts by the names of their arguments, see :func:`check_count`.

    Example:
        >>> check_counts(num_observed=16, num_latents=8)
        (16, 8)
        >>> check_counts(num_latents=0)
        Traceback (most recent call last):
            ...
        ValueError: num_latents must be a positive integer; got 0
    """
    return tuple(check_count(name, value) for name, value in counts.items())


P = ParamSpec("P")
T = TypeVar("T")

_FROM_BELOW = (AssertionError, AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError, ZeroDivisionError)
# These say what they mean.
_UNTOUCHED = (NotImplementedError, RecursionError, torch.OutOfMemoryError)
# Of a kernel that there is for other types of numbers only, torch says the same as of what nobody has written yet.
_OF_TORCH = " not implemented for '"

_HERE = __name__.partition(".")[0] + "."
_KINDS: dict[Any, str] = {Tensor: "a tensor", float: "a number", int: "an integer", bool: "True or False", str: "a string", None: "None"}


def names_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function's errors name the argument that caused them.

    An error that already names an argument, or that this library raises itself, stays as it is. Others become a ``TypeError`` that names
    the argument that is not of its annotated kind, or a ``ValueError`` that describes shapes or values. Not for functions that run what
    users have written.

    Example:
        >>> @names_arguments
        ... def largest(data: torch.Tensor) -> torch.Tensor:
        ...     return data.max()
        >>> largest([1.0, 2.0])
        Traceback (most recent call last):
            ...
        TypeError: ...data...
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        """The function, with its errors explained."""
        try:
            return function(*args, **kwargs)
        except _FROM_BELOW as error:
            if (complaint := _complaint(function, signature, args, kwargs, error)) is None:
                raise
            raise complaint from error

    return wrapper


def leaves_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates what passes no gradients, but takes some inside or keeps tensors.

    It does in :func:`torch.inference_mode` what it does elsewhere. Arguments that were made there are copied.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        """The function, on ordinary tensors."""
        with torch.inference_mode(False), torch.no_grad():
            args, kwargs = tree_map_only(Tensor, lambda value: value.clone() if value.is_inference() else value, (args, kwargs))
            return function(*args, **kwargs)

    return wrapper


def check_kinds(function: Callable[..., Any], /, **arguments: Any) -> None:
    """Refuses arguments of other kinds than annotated, before any work."""
    signature = inspect.signature(function)
    for name, value in arguments.items():
        hint = _hint(function, signature, name)
        if not _fits(value, hint):
            kind = ValueError if isinstance(value, float) and math.isnan(value) and hint is not bool else TypeError
            raise kind(f"{name} must be {_kind(hint)}; got {describe(value)}")


def _complaint(
    function: Callable[..., Any], signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> Exception | None:
    """Returns the message that replaces an error; ``None`` keeps the error."""
    try:
        values = _flat(signature, signature.bind(*args, **kwargs).arguments)
    except TypeError:
        # Arguments are missing or unknown, and Python says which.
        return None
    if isinstance(error, _UNTOUCHED) and _OF_TORCH not in str(error):
        return None
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    # This library says it, by the name of the module: in a checkout the models are not in the folder of the package.
    is_ours = str(frame.f_globals.get("__name__")).startswith(_HERE)
    if is_ours and linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise"):
        return None
    is_named = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(error)) for name in values)
    if isinstance(error, (TypeError, ValueError)) and is_named:
        return None
    try:
        check_kinds(function, **{name: value for name, value in values.items() if name in signature.parameters})
    except (TypeError, ValueError) as complaint:
        return complaint
    description = ", ".join(f"{name}: {describe(value)}" for name, value in values.items())
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{function.__qualname__.removesuffix('.__init__')} cannot take these arguments together ({description}): {reason}")


def _flat(signature: inspect.Signature, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments by name, without ``self``, with keyword arguments expanded."""
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            values |= value
        elif name not in ("self", "cls"):
            values[name] = value
    return values


def _hint(function: Callable[..., Any], signature: inspect.Signature, name: str) -> Any:
    """The annotation of an argument, ``Any`` if unknown."""
    parameter = signature.parameters.get(name)
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={name: parameter.annotation})
    try:
        return typing.get_type_hints(holder, globalns=getattr(inspect.unwrap(function), "__globals__", {}))[name]
    except (NameError, TypeError, AttributeError):
        return Any


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated kind, checked quickly."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if hint in (None, type(None)):
        return value is None
    if hint is Tensor:
        return isinstance(value, (Tensor, np.ndarray)) and not (isinstance(value, Tensor) and value.is_complex())
    if hint is float:
        if isinstance(value, Tensor):
            return value.numel() == 1 and not value.is_complex() and not bool(value.isnan())
        return not isinstance(value, bool) and isinstance(value, (numbers.Real, np.generic)) and bool(value == value)
    if hint is int:
        return (hasattr(value, "__index__") and not isinstance(value, (bool, Tensor))) or (isinstance(value, Tensor) and value.dim() == 0)
    if origin is collections.abc.Callable:
        return callable(value)
    kind = origin if isinstance(origin, type) else hint
    try:
        return isinstance(value, kind) and not (kind is collections.abc.Sequence and isinstance(value, str))
    except TypeError:
        # ``Any``, protocols and the like.
        return True


def _kind(hint: Any) -> str:
    """An annotation in words."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(part) for part in typing.get_args(hint)))
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    if hint in (None, type(None)):
        return "None"
    if origin is collections.abc.Callable:
        return "callable"
    kind = origin if isinstance(origin, type) else hint
    # NumPy's are generators of random numbers, too.
    name = "torch.Generator" if kind is torch.Generator else getattr(kind, "__name__", kind)
    return _KINDS.get(kind) or f"a {name}"


def describe(value: Any) -> str:
    """Describes a value; of tensors, how many entries are not finite."""
    if isinstance(value, (Tensor, np.ndarray)):
        kind = str(value.dtype).removeprefix("torch.")
        real = value if isinstance(value, Tensor) and value.is_floating_point() else torch.empty(0)
        counts = {"NaN": int(real.isnan().sum()), "infinite": int(real.isinf().sum())}
        spoiled = " and ".join(f"{count} {name}" for name, count in counts.items() if count)
        return f"{kind} of shape {tuple(value.shape)}{spoiled and f', {spoiled}'}"
    if isinstance(value, torch.nn.Module):
        return type(value).__name__
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:120]}..."


def renames(*removed: str, **names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a function take arguments by their old names, too.

    Example:
        >>> from pyro_truncated.utils.arguments import renames
        >>> @renames(stretch="scale")
        ... def grow(length, *, scale=2):
        ...     return length * scale
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     length = grow(3, stretch=4)
        >>> length, str(caught[0].message)
        (12, 'stretch of grow has a new name: use scale')

    Args:
        removed: names of arguments that have no effect any more.
        names: the new name by the old one.

    Warns:
        DeprecationWarning: when an old name is used.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        """Returns the function, wrapped."""
        owner = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            """Calls the function by today's names."""
            for old in kwargs.keys() & {*removed, *names}:
                if names.get(old) in kwargs:
                    raise TypeError(f"{owner} takes {names[old]} or its old name {old}; got both")
                advice = f"has a new name: use {names[old]}" if old in names else "has no effect any more"
                warnings.warn(f"{old} of {owner} {advice}", DeprecationWarning, stacklevel=2)
                value = kwargs.pop(old)
                if old in names:
                    kwargs[names[old]] = value
            return function(*args, **kwargs)

        return wrapper

    return decorate


class Renamed:
    """The old name of a method, property or constructor.

    Example:
        >>> class Scale:
        ...     def weigh(self):
        ...         return 7
        ...
        ...     weight_of = Renamed("weigh")
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     found = Scale().weight_of()
        >>> found, str(caught[0].message)
        (7, 'weight_of has a new name: use weigh')

    Args:
        name: the new name.

    Warns:
        DeprecationWarning: when the old name is used.
    """

    def __init__(self, name: str) -> None:
        self._name, self._old = name, name

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            # A class or static method warns when it is called: whoever lists the names of a class looks at all of them.
            return functools.partial(self._call, owner)
        self._warn()
        return getattr(instance, self._name)

    def __set__(self, instance: Any, value: Any) -> None:
        self._warn()
        setattr(instance, self._name, value)

    def _call(self, owner: type, *args: Any, **kwargs: Any) -> Any:
        self._warn()
        return getattr(owner, self._name)(*args, **kwargs)

    def _warn(self) -> None:
        warnings.warn(f"{self._old} has a new name: use {self._name}", DeprecationWarning, stacklevel=3)


def goes_with(owner: Any, method: str, other: str) -> bool:
    """Whether no derived class overrides one method without the other.

    What a class computes from its density is inherited by classes that override the density alone. ``method`` may be the one that is newer.
    """
    kinds = type(owner).__mro__
    first, second = (next((place for place, kind in enumerate(kinds) if name in vars(kind)), len(kinds)) for name in (method, other))
    return first <= second
