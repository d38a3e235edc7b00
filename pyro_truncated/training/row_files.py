"""Files of per-data-point rows in checkpoints of several processes."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.distributed.shards import Portion

_BLOCK = 2**22


def folder_of(path: Path) -> Path:
    """Where the files that belong to a checkpoint lie."""
    return path.with_name(f"{path.name}.rows")


def write_rows(folder: Path, values: Mapping[str, Tensor], portion: Portion) -> dict[str, Any]:
    """Writes tensors of this process's rows, a ``.npy`` file each.

    Returns what it has written.

    Raises:
        OSError: if a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sums = {}
    for name, value in values.items():
        file = folder / _file_name(name, portion.first, portion.size)
        with file.open("wb") as stream:
            np.save(stream, value.detach().cpu().numpy(), allow_pickle=False)
            stream.flush()
            os.fsync(stream.fileno())
        sums[name] = _checksum(file)
    return {"first": portion.first, "size": portion.size, "sums": sums}


def read_rows(folder: Path, written: list[dict[str, Any]], name: str, portion: Portion) -> Tensor:
    """Reads a process's rows of one tensor from the files of all.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file is damaged, or there are rows in none.
    """
    last, parts, reached = portion.first + portion.size, [], portion.first
    for piece in sorted(written, key=lambda piece: int(piece["first"])):
        first, end = piece["first"], piece["first"] + piece["size"]
        if end <= reached or first >= last:
            continue
        file = folder / _file_name(name, first, piece["size"])
        if _checksum(file) != piece["sums"][name]:
            raise ValueError(f"{file} is damaged: its content does not have the checksum that it was written with")
        # Mapped: only requested rows are read.
        rows = np.load(file, mmap_mode="r", allow_pickle=False)[reached - first : min(end, last) - first]
        parts.append(torch.from_numpy(np.array(rows)))
        reached = min(end, last)
    if reached < last or not parts:
        raise ValueError(f"{folder} holds no rows {reached} .. {last - 1}")
    return torch.cat(parts)


def remove_others(folder: Path, kept: str) -> None:
    """Removes rows of earlier and of unfinished checkpoints."""
    for other in folder.iterdir():
        if other.name != kept:
            with suppress(OSError):
                shutil.rmtree(other)


def _file_name(name: str, first: int, size: int) -> str:
    return f"{name}-{first:012d}-{first + size - 1:012d}.npy"


def _checksum(file: Path) -> int:
    found = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found
