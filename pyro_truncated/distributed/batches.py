"""Minibatches of successive rows, the same for any number of processes."""

from __future__ import annotations

import dataclasses
import itertools
import mmap
from collections.abc import Iterator
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.distributed.shards import Portion, Shard, let_go, portion_of
from pyro_truncated.utils.counts import check_counts

_current: ContextVar[RowBatch | None] = ContextVar("pyro_truncated_batch", default=None)


@dataclasses.dataclass(eq=False)
class RowBatch:
    """A minibatch: a context in which the data plate takes these rows.

    Example:
        >>> batch: RowBatch = next(iter(Batches(torch.randn(10, 4), 5, block=1)))
        >>> len(batch.rows), batch.scale
        (5, 2.0)

    Attributes:
        rows: positions ``(n,)`` among the data points of this process. The first one, where none of the minibatch is here.
        num_rows: number of data points of this process.
        scale: number of data points of all processes per one in the minibatch.
        is_idle: whether none of the minibatch is here.
        data: what it is a minibatch of; what was read of it stays in memory only as long as the minibatch.
    """

    rows: Tensor
    num_rows: int
    scale: float
    is_idle: bool
    data: Any = None
    _token: Token[RowBatch | None] | None = None

    def __enter__(self) -> RowBatch:
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._token is not None
        _current.reset(self._token)
        let_go(self.data)


def current_batch() -> RowBatch | None:
    """The minibatch that the program is in."""
    return _current.get()


class Batches:
    """Minibatches that hold every data point once per epoch.

    They are made of blocks of successive rows in random order.

    Data on a disk are read in blocks. The data points of a minibatch depend on the seed and its number, not on the
    number of processes: each process takes those that it has. Within a minibatch call the model with all data, and
    without a size for its plate::

        for batch in itertools.islice(distributed.Batches(y, 1000), 30):
            with batch:
                svi.step(y)

    :func:`~pyro_truncated.fit` takes them as ``fit(svi, y, steps=500, batches=distributed.Batches(y, 1000))``.

    Args:
        y: data, or a shard of them.
        size: data points per minibatch, in all processes together. The last one of an epoch may have fewer.
        block: successive rows that stay together; 1 for minibatches of single rows. Data that are sorted want small blocks.
        seed: decides the order.

    Raises:
        ValueError: if a number is no positive integer.
    """

    def __init__(self, y: Any, size: int, *, block: int = 64, seed: int = 0) -> None:
        size, block = check_counts(size=size, block=block)
        self._y = y if isinstance(y, Shard) else None
        self._portion = portion_of(y) or Portion(0, len(y), len(y))
        self.size, self.block, self.seed = size, min(block, size), seed
        if isinstance(y, Shard) and y.file is not None and hasattr(y.file, "madvise"):
            # Blocks are read as they are; otherwise the system reads megabytes around each of them.
            y.file.madvise(mmap.MADV_RANDOM)
        self._blocks_each = size // self.block
        self._num_blocks = -(-self._portion.total // self.block)
        self._order: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        """The number of minibatches in an epoch."""
        return -(-self._num_blocks // self._blocks_each)

    def __iter__(self) -> Iterator[RowBatch]:
        """All minibatches from the first on, epoch after epoch, without an end."""
        return map(self.at, itertools.count())

    def at(self, step: int) -> RowBatch:
        """The minibatch of a step, counted from zero."""
        epoch, number = divmod(step, len(self))
        starts = self._shuffle(epoch)[number * self._blocks_each : (number + 1) * self._blocks_each] * self.block
        rows = (starts.sort().values.unsqueeze(-1) + torch.arange(self.block)).flatten()
        rows = rows[rows < self._portion.total]
        scale = self._portion.total / len(rows)
        own = rows[(rows >= self._portion.first) & (rows < self._portion.first + self._portion.size)] - self._portion.first
        is_idle = not len(own)
        return RowBatch(own.new_zeros(1) if is_idle else own, self._portion.size, scale, is_idle, self._y)

    def _shuffle(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(hash((self.seed, epoch)) % 2**63)
            self._order = epoch, torch.randperm(self._num_blocks, generator=generator)
        return self._order[1]
