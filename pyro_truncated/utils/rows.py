"""Rows of data that a plate selects."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.utils.missing import missing_where

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def selected_rows(y: Tensor | None, index: Tensor | None) -> Tensor | None:
    """The data points that a plate selects: ``y[index]``, or ``y`` itself where these are all of them in order; see :func:`signed`.

    The data themselves need not be copied, and what is known of them (that nothing is missing, for example) need not be found out again,
    for which a device would have to be waited for.

    Example:
        >>> def model(y, batch_size=None):
        ...     with pyro.plate("data", len(y), batch_size) as index:
        ...         pyro.sample("y", dist.Normal(0.0, 1.0).expand([3]).to_event(1), obs=selected_rows(y, index))
        >>> pyro.poutine.trace(model).get_trace(torch.zeros(5, 3), 2).nodes["y"]["value"].shape
        torch.Size([2, 3])

    Args:
        y: all data points, in rows; without data there are no rows.
        index: positions of the selected ones; ``None`` of a plate without a size.
    """
    if y is None or index is None:
        return y if y is None else signed(y)
    if index.is_cpu and len(index) == len(y) and torch.equal(index, torch.arange(len(y), device="cpu")):
        return signed(y)
    return signed(missing_where(y[index.to(y.device, non_blocking=True)], y))


def signed(y: Tensor) -> Tensor:
    """The data, or a copy in signed integers of unsigned ones with more than eight bits, with which torch does not compute."""
    return y.long() if y.dtype in _UNSIGNED else y
