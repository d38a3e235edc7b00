"""What a user sees in a terminal: progress bars, notes, representations."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm


class ProgressBar(tqdm):  # type: ignore[misc]
    """A bar of tqdm's with locks of this process alone.

    Forked children share tqdm's locks, and would wait for ever for one that a killed run held.
    """

    # The thread that looks after slow bars would hold the lock in what is forked meanwhile; with ``miniters=1`` nobody needs it.
    monitor_interval = 0

    total: float | None
    n: float

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Closes the bar, full unless an error ended it."""
        if kind is None and self.total is not None:
            self.total = self.n
        super().__exit__(kind, error, trace)


def progress_bar(progress: bool | None, **options: Any) -> ProgressBar:
    """A bar on standard error."""
    # Programs without a console have no standard error.
    is_shown = progress if sys.stderr is not None else False
    return ProgressBar(disable=None if is_shown is None else not is_shown, miniters=1, **options)


def _renew_lock() -> None:
    ProgressBar.set_lock(threading.RLock())


_renew_lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


_logger = logging.getLogger("pyro_truncated")


@functools.cache
def note_once(message: str) -> None:
    """Logs a line once per process, else writes it to standard error."""
    if _logger.hasHandlers():
        _logger.info(message)
    elif _logger.isEnabledFor(logging.INFO) or _logger.level == logging.NOTSET:
        print(f"pyro_truncated: {message}", file=sys.stderr)


class ReprFromArguments:
    """An object whose ``repr`` is the call that creates an equal one.

    Only arguments that the object keeps under their own names are shown.
    """

    def __repr__(self) -> str:
        arguments = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            if name not in vars(self):
                continue
            value, default = getattr(self, name), parameter.default
            is_default = value is default or (isinstance(value, (bool, int, float, str)) and value == default)
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD or not is_default:
                arguments.append(f"{name}={_text(value)}")
        return f"{type(self).__name__}({', '.join(arguments)})"


def _text(value: Any) -> str:
    if isinstance(value, torch.nn.Module):
        return type(value).__name__
    if isinstance(value, Tensor):
        return f"<tensor {tuple(value.shape)}>"
    if isinstance(value, torch.Generator):
        return "<generator>"
    if inspect.isroutine(value):
        return str(value.__qualname__)
    return repr(value)


def shorten_names(names: Sequence[str]) -> str:
    """At most four names, with dots where there are more."""
    return ", ".join([*names[:4], *(["..."] if len(names) > 4 else [])])


def readable_count(number: int) -> str:
    """Returns a count as text, if huge its order of magnitude."""
    return str(number) if number < 10**7 else f"about 10^{math.floor(math.log10(number))}"
