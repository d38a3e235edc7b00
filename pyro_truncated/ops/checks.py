"""Deferred checks of values.

On a device, reading a value waits for all previous work, so that all values are read together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from pyro_truncated.ops.backend import is_vectorised

_Action = Callable[[], None]


class _Pending:
    """Deferred checks, and actions to take when they have passed."""

    def __init__(self) -> None:
        self.checks: list[tuple[Tensor, _Action]] = []
        self.actions: list[_Action] = []
        self.asked: list[_Asked] = []

    def look(self) -> None:
        """Complains, or runs deferred actions, with the requested numbers."""
        checks, actions, asked = self.checks, self.actions, self.asked
        self.checks, self.actions, self.asked = [], [], []
        answers = [torch.stack(_together([problem for problem, _ in checks]))] if checks else []
        if asked:
            answers = [answer.double() for answer in (*answers, *(one.values for one in asked))]
        found = torch.cat(_together(answers)).tolist() if answers else []
        for is_problem, (_, complain) in zip(found, checks, strict=False):
            if is_problem:
                complain()
        start = len(checks)
        for one in asked:
            one.known = found[start : start + len(one.values)]
            start += len(one.values)
        for act in actions:
            act()


def _together(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the tensors in one place.

    Host tensors move with those on a device.
    """
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
    return [tensor.to(device) for tensor in tensors]


class _Asked:
    """Numbers on a device, which come with the next look."""

    def __init__(self, value: Tensor, pending: _Pending) -> None:
        self.values, self._pending = value.detach().flatten(), pending
        self.known: list[float] = []
        pending.asked.append(self)

    def __call__(self) -> list[float]:
        if self in self._pending.asked:
            self._pending.look()
        return self.known


_pending: ContextVar[_Pending | None] = ContextVar("pyro_truncated_pending_checks", default=None)


def refuse(problem: Tensor, complain: _Action) -> None:
    """Complains about a problem, now or with the deferred checks.

    It is deferred on a device within :func:`together`.

    The M-step of a model is in such a context: however many checks it makes, a device is waited for once.

    Example:
        >>> def complain():
        ...     raise ValueError("the sum must be positive")
        >>> refuse(torch.ones(3).sum() <= 0, complain)

    Args:
        problem: a Boolean scalar.
        complain: raises an error.
    """
    pending = _pending.get()
    if pending is not None and is_vectorised(problem):
        pending.checks.append((problem, complain))
    elif bool(problem):
        complain()


def afterwards(act: _Action) -> None:
    """Runs an action after all checks have passed.

    It runs at once if no check is deferred.
    """
    pending = _pending.get()
    if pending is not None and (pending.checks or pending.asked or pending.actions):
        pending.actions.append(act)
    else:
        act()


def soon(value: Tensor) -> Callable[[], list[float]]:
    """Returns a function that reads a tensor's entries on demand.

    On a device within :func:`together` they are read with the next checks.
    """
    pending = _pending.get()
    if pending is None or not is_vectorised(value):
        known: list[float] = value.detach().flatten().tolist()
        return lambda: known
    return _Asked(value, pending)


def number(value: Tensor) -> float:
    """Returns a scalar's value, after all checks so far."""
    return soon(value)()[0]


def ask(conditions: Tensor) -> list[bool]:
    """Returns which conditions hold, for the next actions.

    On a device all checks so far are evaluated with them.

    Example:
        >>> ask(torch.tensor([1.0, -1.0]) > 0)
        [True, False]
    """
    return [bool(holds) for holds in soon(conditions)()]


def look() -> None:
    """Looks at all checks so far."""
    pending = _pending.get()
    if pending is not None:
        pending.look()


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A context that evaluates all its checks together at its end.

    They are evaluated in order. What depends on them is kept :func:`afterwards`.

    What fails in it may do so because of what a check would have found: then the check complains.
    """
    if _pending.get() is not None:
        yield
        return
    pending = _Pending()
    token = _pending.set(pending)
    try:
        yield
    except BaseException:
        pending.actions.clear()
        raise
    finally:
        _pending.reset(token)
        pending.look()


def cholesky(matrix: Tensor) -> Tensor:
    """Returns Cholesky factors, with deferred checks that they exist."""
    if not is_vectorised(matrix):
        return torch.linalg.cholesky(matrix)  # type: ignore[no-any-return]
    factor, info = torch.linalg.cholesky_ex(matrix)
    refuse((info != 0).any(), lambda: _complain_of(matrix))
    return factor  # type: ignore[no-any-return]


def _complain_of(matrix: Tensor) -> None:
    torch.linalg.cholesky(matrix)
