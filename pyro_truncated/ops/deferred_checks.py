"""Deferred checks of values, which on a device are read together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.ops.backend import is_vectorised

_Action = Callable[[], None]
# The message of a ValueError, or a function that returns it or raises an error itself.
_Complaint = str | Callable[[], Any]


class _PendingChecks:
    """Deferred checks, and actions to take when they have passed."""

    def __init__(self) -> None:
        self.checks: list[tuple[Tensor, _Complaint]] = []
        self.actions: list[_Action] = []
        self.lazy: list[_Lazy] = []

    def flush(self) -> None:
        """Reads all checks and numbers, then complains or runs deferred actions."""
        checks, actions, lazy = self.checks, self.actions, self.lazy
        self.checks, self.actions, self.lazy = [], [], []
        answers = [torch.stack(_on_one_device([problem for problem, _ in checks]))] if checks else []
        if lazy:
            answers = [answer.double() for answer in (*answers, *(one.values for one in lazy))]
        values = torch.cat(_on_one_device(answers)).tolist() if answers else []
        for is_problem, (_, complaint) in zip(values, checks, strict=False):
            if is_problem:
                _raise(complaint)
        start = len(checks)
        for one in lazy:
            one.known = values[start : start + len(one.values)]
            start += len(one.values)
        for act in actions:
            act()


def _raise(complaint: _Complaint) -> None:
    message = complaint if isinstance(complaint, str) else complaint()
    if isinstance(message, str):
        raise ValueError(message)


def _on_one_device(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors on one device, that of those not on the host."""
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
    return [tensor.to(device) for tensor in tensors]


class _Lazy:
    """Numbers on a device, which are read with the next checks."""

    def __init__(self, value: Tensor, checks: _PendingChecks) -> None:
        self.values, self._pending = value.detach().flatten(), checks
        self.known: list[float] = []
        checks.lazy.append(self)

    def __call__(self) -> list[float]:
        if self in self._pending.lazy:
            self._pending.flush()
        return self.known


_pending: ContextVar[_PendingChecks | None] = ContextVar("pyro_truncated_pending_checks", default=None)


def raise_if(problem: Tensor, complaint: _Complaint) -> None:
    """Complains if there is a problem, now or with the deferred checks.

    It is deferred on a device within :func:`defer_checks`, so that a device is waited for once.

    Example:
        >>> raise_if(torch.ones(3).sum() <= 0, "the sum must be positive")

    Args:
        problem: a Boolean scalar.
        complaint: the message of a ``ValueError``, or a function that returns it or raises an error itself.
    """
    pending = _pending.get()
    if pending is not None and is_vectorised(problem):
        pending.checks.append((problem, complaint))
    elif bool(problem):
        _raise(complaint)


def on_success(action: _Action) -> None:
    """Runs an action now, or after all deferred checks have passed."""
    pending = _pending.get()
    if pending is not None and (pending.checks or pending.lazy or pending.actions):
        pending.actions.append(action)
    else:
        action()


def lazy_values(value: Tensor) -> Callable[[], list[float]]:
    """Returns a function that reads a tensor's entries with the next checks."""
    pending = _pending.get()
    if pending is None or not is_vectorised(value):
        values: list[float] = value.detach().flatten().tolist()
        return lambda: values
    return _Lazy(value, pending)


def read_number(value: Tensor) -> float:
    """Returns a scalar's value, after all checks so far."""
    return lazy_values(value)()[0]


def read_conditions(conditions: Tensor) -> list[bool]:
    """Returns which conditions hold, after all checks so far.

    Example:
        >>> read_conditions(torch.tensor([1.0, -1.0]) > 0)
        [True, False]
    """
    return [bool(holds) for holds in lazy_values(conditions)()]


def flush_checks() -> None:
    """Evaluates all checks so far."""
    pending = _pending.get()
    if pending is not None:
        pending.flush()


@contextlib.contextmanager
def defer_checks() -> Iterator[None]:
    """A context that evaluates its checks together, in order, at its end.

    What depends on them goes into :func:`on_success`. What fails in it may do so because of what a check would have found: then the check
    complains.
    """
    if _pending.get() is not None:
        yield
        return
    pending = _PendingChecks()
    token = _pending.set(pending)
    try:
        yield
    except BaseException:
        pending.actions.clear()
        raise
    finally:
        _pending.reset(token)
        pending.flush()


def cholesky(matrix: Tensor) -> Tensor:
    """Returns Cholesky factors, with deferred checks that they exist."""
    if not is_vectorised(matrix):
        return torch.linalg.cholesky(matrix)
    factor, info = torch.linalg.cholesky_ex(matrix)
    raise_if((info != 0).any(), lambda: torch.linalg.cholesky(matrix))
    return factor
