"""Notes: one line that tells what the library has chosen, where a user sees it."""

from __future__ import annotations

import functools
import logging
import sys

_logger = logging.getLogger("pyro_truncated")


@functools.cache
def note_once(message: str) -> None:
    """Logs a line at level INFO to the logger ``pyro_truncated``; where nobody has configured logging, writes it to standard error.

    Each line appears once per process.
    """
    if _logger.hasHandlers():
        _logger.info(message)
    elif _logger.isEnabledFor(logging.INFO) or _logger.level == logging.NOTSET:
        print(f"pyro_truncated: {message}", file=sys.stderr)
