"""Data-parallel training: several processes, each on its rows of the data.

The same script runs alone, under ``torchrun --nproc_per_node=4 script.py``, and on several machines::

    distributed.start()
    y = distributed.shard(np.load("y.npy", mmap_mode="r"))
    model = BinarySparseCoding(D, H).initialize(y)
    guide = AutoTruncated(model, num_states=64)
    training = fit(SVI(model, guide, ClosedForm(model), Truncated_ELBO(search)), y, steps=200)
"""

from pyro_truncated.distributed.launch import AllReduced, SummedELBO, UnsharedDataWarning, start
from pyro_truncated.distributed.shards import (
    Batches,
    Portion,
    RowBatch,
    Shard,
    positions_of,
    rows_at,
    shard,
    some_rows,
    sums_of,
    total_rows,
)
from pyro_truncated.distributed.world import OtherProcessError, add, agree, gather, rank, size

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
    "positions_of",
    "rank",
    "rows_at",
    "shard",
    "size",
    "some_rows",
    "start",
    "sums_of",
    "total_rows",
]
