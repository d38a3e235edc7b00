"""Files that arrays are maps of: which they are, and how their memory is given back."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np


def file_of(array: Any) -> mmap.mmap | None:
    """The memory map that an array lies in, if it does, and if what is written to it reaches the file."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and array.mode == "c":
            return None
        array = array.base
    return array if isinstance(array, mmap.mmap) else None


def release(file: mmap.mmap | None) -> None:
    """Lets the system take the memory back of what has been read or written; the file keeps it."""
    if file is not None and hasattr(file, "madvise"):
        file.madvise(mmap.MADV_DONTNEED)
