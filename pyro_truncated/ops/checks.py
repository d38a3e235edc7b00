"""Checks of values that are looked at together: on a device, every look waits for all that was asked of it before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from pyro_truncated.ops.backend import is_vectorised

_Pending = list[tuple[Tensor, Callable[[], None]]]
_pending: ContextVar[_Pending | None] = ContextVar("pyro_truncated_pending_checks", default=None)


def refuse(problem: Tensor, complain: Callable[[], None]) -> None:
    """Complains if there is a problem: at once, or, on a device and within :func:`together`, at the end of that context.

    Args:
        problem: a Boolean scalar.
        complain: raises an error.
    """
    pending = _pending.get()
    if pending is not None and is_vectorised(problem):
        pending.append((problem, complain))
    elif bool(problem):
        complain()


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A context at whose end all checks are looked at, in order and in one go; nothing that depends on them may be kept before it.

    What fails in it may do so because of what a check would have found: then the check complains.
    """
    if _pending.get() is not None:
        yield
        return
    pending: _Pending = []
    token = _pending.set(pending)
    try:
        yield
    finally:
        _pending.reset(token)
        _look(pending)


def _look(pending: _Pending) -> None:
    if not pending:
        return
    found = torch.stack([problem for problem, _ in pending]).tolist()
    for is_problem, (_, complain) in zip(found, pending, strict=True):
        if is_problem:
            complain()
