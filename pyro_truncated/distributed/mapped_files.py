"""Files behind memory maps, and release of their memory."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np


def file_of(array: Any) -> mmap.mmap | None:
    """Returns the shared memory map that an array lies in, or ``None``."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and array.mode == "c":
            return None
        array = array.base
    return array if isinstance(array, mmap.mmap) else None


def release(file: mmap.mmap | None) -> None:
    """Returns pages that have been read or written to the system."""
    if file is not None and hasattr(file, "madvise"):
        file.madvise(mmap.MADV_DONTNEED)
