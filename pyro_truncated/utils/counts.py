"""Checks counts that users give: whole numbers of any integer type."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def check_count(name: str, value: Any, least: int = 1) -> int:
    """A count as a Python integer.

    Python's, NumPy's and PyTorch's integers are accepted (whatever has ``__index__``); floats, even whole ones, and Booleans are not.

    Args:
        name: of the argument.
        value: what was given.
        least: the smallest count allowed.

    Raises:
        ValueError: if it is no integer, or too small.
    """
    try:
        count = None if isinstance(value, bool) or (torch.is_tensor(value) and value.dtype == torch.bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{name} must be {kind}; got {value!r}")
    return count


@contextmanager
def naming_empty_plates() -> Iterator[None]:
    """Explains that a plate has no members, where Pyro divides by zero.

    Raises:
        ValueError: in the place of that.
    """
    try:
        yield
    except ZeroDivisionError as error:
        raise ValueError(
            f"the model divides by zero ({error}); most likely a plate has no members: no data points (N = 0), or an empty minibatch"
        ) from error


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
