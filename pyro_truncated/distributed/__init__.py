"""Data-parallel training: several processes, each on its rows of the data.

The same script runs alone, under ``torchrun --nproc_per_node=4 script.py``, and on several machines::

    distributed.start()
    y = distributed.shard(np.load("y.npy", mmap_mode="r"))
    model = BinarySparseCoding(D, H).initialize(y)
    guide = AutoTruncated(model, num_states=64)
    training = fit(SVI(model, guide, ClosedForm(model), Truncated_ELBO(search)), y, steps=200)
"""

import warnings
from typing import Any

from pyro_truncated.distributed.collectives import OtherProcessError, add, agree, gather, rank, size
from pyro_truncated.distributed.launch import AllReduced, SummedELBO, UnsharedDataWarning, start
from pyro_truncated.distributed.shards import (
    Batches,
    Portion,
    RowBatch,
    Shard,
    global_positions,
    rows_at,
    shard,
    shard_sum,
    some_rows,
    total_rows,
)

__all__ = [
    "AllReduced",
    "Batches",
    "OtherProcessError",
    "Portion",
    "RowBatch",
    "Shard",
    "SummedELBO",
    "UnsharedDataWarning",
    "add",
    "agree",
    "gather",
    "global_positions",
    "rank",
    "rows_at",
    "shard",
    "shard_sum",
    "size",
    "some_rows",
    "start",
    "total_rows",
]

_RENAMED = {"positions_of": "global_positions", "sums_of": "shard_sum"}  # until version 0.4


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"distributed.{name} has a new name: use distributed.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return globals()[_RENAMED[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
