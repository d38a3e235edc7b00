"""Data that lie on a background, which a model without an offset cannot explain: they are told, once."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

# With fewer data points than this the smallest one says little.
_FEWEST = 10
_FAR = 3.0


class BackgroundWarning(UserWarning):
    """The data of a model that has no offset lie on a background."""


def lies_on_background(y: Tensor) -> bool:
    """Whether in most dimensions the smallest observed entry lies above zero by more than three of the entries' standard deviations.

    Args:
        y: data ``(N, D)``; NaN where missing.
    """
    rows, seen = y.double(), (~y.isnan()).sum(0)
    smallest = rows.nan_to_num(torch.inf).amin(0)
    deviation = (rows - rows.nanmean(0)).square().nanmean(0).sqrt()
    return bool(((seen >= _FEWEST) & (smallest > 0) & (smallest > _FAR * deviation)).double().mean() > 0.5)


def warn_of_background(model: object, y: Tensor) -> None:
    """Warns if the data lie on a background.

    The text and its place are the same every time, so that Python's own filter shows it once, however often a model is started.
    """
    if lies_on_background(y):
        warnings.warn(
            f"the data lie on a background: most dimensions never come near zero, and {type(model).__name__} has no offset, so causes are "
            "spent on it. Subtract it, for instance y - y.quantile(0.05, 0).",
            BackgroundWarning,
            stacklevel=1,
        )
