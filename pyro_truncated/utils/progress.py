"""Progress bars that no other process can stop."""

from __future__ import annotations

import os
import threading
from typing import Any

from tqdm.auto import tqdm


class ProgressBar(tqdm):  # type: ignore[misc]
    """A bar of tqdm's with locks of this process alone.

    Those of tqdm are shared with forked children: of a run that is killed while it holds one, all its relatives would wait for ever, even
    where no bar is shown.
    """

    # The thread that looks after slow bars would hold the lock in what is forked meanwhile; with ``miniters=1`` nobody needs it.
    monitor_interval = 0

    total: float | None
    n: float

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Closes the bar, full unless an error ended it: what was planned is the most, and training may rest before."""
        if kind is None and self.total is not None:
            self.total = self.n
        super().__exit__(kind, error, trace)


def progress_bar(progress: bool | None, **options: Any) -> ProgressBar:
    """A bar on standard error.

    Args:
        progress: whether to show it; default: if standard error is a terminal.
        **options: of tqdm.
    """
    return ProgressBar(disable=None if progress is None else not progress, miniters=1, **options)


def _renew_lock() -> None:
    ProgressBar.set_lock(threading.RLock())


_renew_lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
