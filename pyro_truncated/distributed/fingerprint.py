"""What data are known by, however they are shared out to processes."""

from __future__ import annotations

import numpy as np
import torch

from pyro_truncated.distributed import world
from pyro_truncated.distributed.shards import Shard

_ENTRIES = 2**22
# The constants of splitmix64.
_STEP, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def fingerprint(shard: Shard) -> int:
    """Returns a 64-bit hash of all data and their positions.

    It is a sum over data points, and so does not depend on how processes share them.

    All processes that hold shards of the data must ask for it.
    """
    width = max(1, shard[:1].numel())
    rows = max(1, _ENTRIES // width)
    total = 0
    for start in range(0, len(shard), rows):
        total += _sum_of_hashes(shard[start : start + rows], shard.portion.first + start)
    parts = world.gather(total) if shard.portion.is_part else [total]
    return sum(parts) % 2**64


def _sum_of_hashes(rows: torch.Tensor, first: int) -> int:
    entries = rows.detach().cpu().contiguous().reshape(len(rows), -1).numpy()
    bits = entries.view(f"u{entries.itemsize}").astype(np.uint64)
    # Of every entry, mixed with its column; of every data point, mixed with its position.
    columns = _mixed(bits + np.arange(1, bits.shape[1] + 1, dtype=np.uint64) * _STEP).sum(1, dtype=np.uint64)
    positions = np.arange(first + 1, first + 1 + len(rows), dtype=np.uint64)
    return int(_mixed(columns + positions * _STEP).sum(dtype=np.uint64))


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
