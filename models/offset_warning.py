"""Warns once of data with a background, for models without offset."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

# Of fewer data points the smallest ones say little; so many say enough.
_MIN_ROWS, _MAX_ROWS = 20, 10_000


class BackgroundWarning(UserWarning):
    """The data of a model without offset have a background."""


def lies_on_background(y: Tensor) -> bool:
    """Whether most dimensions are far from zero without active causes.

    They may be on either side.

    If that is a quarter of the data points, the noise lies between the smallest hundredth of the
    entries and their lower quartile. The deviation of the data grows with the causes, too. Above
    zero the former must be nearer to the latter than to zero, as for a background of four
    deviations of normal noise. Below zero the latter is twice as far from zero as from the former,
    as for three.

    Args:
        y: data ``(N, D)``. NaN where missing.
    """
    smallest, quartile = row_quantile(y, 100), row_quantile(y, 4)
    spread = quartile - smallest
    is_far = (smallest > spread) | (quartile < -2 * spread)
    return bool((is_far & ((~y.isnan()).sum(0) >= _MIN_ROWS)).double().mean() > 0.5)


def row_quantile(y: Tensor, part: int) -> Tensor:
    """Returns each dimension's entry below which one in so many lies.

    It is approximate, ``(D,)``, from as many rows as needed.

    Where nothing is observed it is zero.
    """
    if len(y) > _MAX_ROWS:  # always the same, but no regular ones, which may be alike
        y = y[torch.randint(len(y), (_MAX_ROWS,), generator=torch.Generator().manual_seed(0)).to(y.device)]
    rows = y.double().sort(0).values
    position = ((~rows.isnan()).sum(0) - 1).clamp(min=0) // part
    return rows.gather(0, position.unsqueeze(0)).squeeze(0).nan_to_num()


def warn_about_background(model: object, y: Tensor) -> None:
    """Warns if the data lie on a background.

    The text and its place are the same every time, so that Python's own filter shows it once, however often a model is started.
    """
    if lies_on_background(y):
        warnings.warn(
            f"the data lie on a background, but {type(model).__name__} has no offset: most dimensions are far from zero without active "
            "causes. Subtract the background, for example y - y.nanquantile(0.05, 0).",
            BackgroundWarning,
            stacklevel=1,
        )
