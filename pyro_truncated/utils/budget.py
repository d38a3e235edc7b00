"""One memory budget for all temporaries that are processed in blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

DEFAULT_BUDGET = 2**28
_budget: ContextVar[int] = ContextVar("pyro_truncated_memory_budget", default=DEFAULT_BUDGET)


@contextlib.contextmanager
def memory_budget(num_bytes: int | None) -> Iterator[None]:
    """A context that limits the bytes of temporaries, in this thread.

    Results differ by rounding only: sums are taken block by block.

    Args:
        num_bytes: the budget; ``None`` leaves it as it is. The default outside of any context is 2**28, 256 MiB.

    Raises:
        ValueError: if it is not positive.
    """
    if num_bytes is None:
        yield
        return
    if num_bytes < 1:
        raise ValueError(f"a memory budget must be a positive number of bytes; got {num_bytes}")
    token = _budget.set(num_bytes)
    try:
        yield
    finally:
        _budget.reset(token)


def free_memory(device: torch.device) -> int | None:
    """Free bytes of a CUDA device with torch's unused ones, or ``None``."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def budget_on(device: torch.device) -> int:
    """The default budget: an eighth of free memory, or 256 MiB."""
    free = free_memory(device)
    # What else an operation allocates, and what does not lie in one piece, must find room, too.
    return DEFAULT_BUDGET if free is None else max(1, free // 8)


def current_budget() -> int:
    """Returns the bytes for a block's temporaries, in this thread and task."""
    return _budget.get()


def rows_per_block(bytes_per_row: int, num_bytes: int | None = None) -> int:
    """Returns how many rows of temporaries fit the budget, at least one."""
    return max(1, (_budget.get() if num_bytes is None else num_bytes) // max(1, bytes_per_row))


def row_slices(num_rows: int, bytes_per_row: int, num_bytes: int | None = None) -> Iterator[slice]:
    """Yields slices of successive rows that fit the budget."""
    size = rows_per_block(bytes_per_row, num_bytes)
    return (slice(start, start + size) for start in range(0, num_rows, size))
