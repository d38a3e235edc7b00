"""Subsamples of plates at a cost independent of the data's size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_truncated.distributed.shards import current_batch


class SparseSubsamples(Messenger):
    """Effect handler for small subsamples of large plates.

    Pyro's plates shuffle all positions; this does not.

    In a minibatch (:class:`~pyro_truncated.distributed.Batches`) plates of as many members as there are data take its rows, unless they are
    inside of such a plate.
    """

    def __init__(self) -> None:
        super().__init__()
        self._data_plates: set[str] = set()

    def _lies_in_data_plate(self, msg: Any) -> bool:
        return any(frame.name in self._data_plates for frame in msg["cond_indep_stack"])

    def _pyro_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg):
            return
        fn, batch = msg["fn"], current_batch()
        if batch is not None and fn.size == batch.num_rows and not self._lies_in_data_plate(msg):
            self._data_plates.add(msg["name"])
            if fn.subsample_size is not None:
                raise ValueError(
                    f"plate '{msg['name']}' has subsample_size={fn.subsample_size}, but a minibatch of distributed.Batches chooses its "
                    "rows itself; leave subsample_size out"
                )
            if msg["value"] is None:
                msg["value"] = batch.rows.to(fn.device)
        # A permutation is as fast for a small plate, or one that is not much larger than its minibatch.
        elif msg["value"] is None and fn.subsample_size is not None and fn.size >= max(2**14, 32 * fn.subsample_size):
            msg["value"] = random_subset(fn.size, fn.subsample_size, fn.device)


class _Minibatch(SparseSubsamples):
    """Effect handler that scales sites for all processes' data."""

    def _pyro_sample(self, msg: Any) -> None:
        super()._pyro_sample(msg)
        batch = current_batch()
        if batch is not None and batch.weight != 1.0 and self._lies_in_data_plate(msg):
            msg["scale"] = msg["scale"] * batch.weight


def in_minibatch(program: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the program that takes its minibatch's rows."""
    handler: Callable[..., Any] = program if current_batch() is None else _Minibatch()(program)
    return handler


def random_subset(size: int, number: int, device: torch.device | str | None = None) -> Tensor:
    """Draws ``(number,)`` distinct positions below ``size``, for small ``number``.

    The sequence is uniformly distributed.

    Positions are drawn one after the other, and those that have been drawn before are left out.
    """
    positions = torch.empty(0, dtype=torch.int64, device=device)
    while len(positions) < number:
        positions = torch.cat([positions, torch.randint(size, (number + number // 8 + 8,), device=device)])
        in_order, order = positions.sort(stable=True)
        is_first = torch.ones_like(in_order, dtype=torch.bool)
        is_first[1:] = in_order[1:] != in_order[:-1]
        positions = positions[torch.empty_like(is_first).scatter_(0, order, is_first)]
    return positions[:number].clone()
