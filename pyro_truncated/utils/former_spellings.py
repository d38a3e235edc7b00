"""Spellings of earlier versions: understood, with a warning that says how it is written now."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def takes_former_order(
    names: tuple[str, ...], is_former: Callable[[tuple[Any, ...], Mapping[str, Any]], bool], renamed: Mapping[str, str] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Lets a constructor be called with the arguments of earlier versions.

    Args:
        names: what the positional arguments of before, but ``self``, are called now.
        is_former: whether positional arguments and keywords are those of before.
        renamed: present names of keywords by their former ones.
    """

    def decorate(init: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(init)
        def translated(*args: P.args, **kwargs: P.kwargs) -> T:
            """The constructor, called as it is now."""
            own, given = args[:1], args[1:]
            if not is_former(given, kwargs) or len(given) > len(names):
                return init(*args, **kwargs)
            by_name = dict(zip(names, given, strict=False)) | {(renamed or {}).get(name, name): value for name, value in kwargs.items()}
            spelling = ", ".join(f"{name}=..." for name in by_name)
            kind = init.__qualname__.removesuffix(".__init__")
            warnings.warn(f"{kind} has other arguments than before: write {kind}({spelling})", DeprecationWarning, stacklevel=2)
            return init(*own, **by_name)  # type: ignore[arg-type]

        return translated

    return decorate


def takes_noise(method: Callable[P, T]) -> Callable[P, T]:
    """Lets a prediction be asked for with ``noise=``, which is the opposite of ``noiseless=``."""

    @functools.wraps(method)
    def translated(*args: P.args, **kwargs: P.kwargs) -> T:
        """The method, called as it is now."""
        if "noise" in kwargs:
            warnings.warn("noise= is now noiseless=, its opposite, as in pyro.contrib.gp", DeprecationWarning, stacklevel=2)
            kwargs["noiseless"] = not kwargs.pop("noise")
        return method(*args, **kwargs)

    return translated
