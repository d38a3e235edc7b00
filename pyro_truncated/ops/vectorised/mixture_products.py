"""Products of Gaussian bumps beside constants in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_truncated.utils.budget import rows_per_block

Factors = tuple[Tensor, ...]


def products(factors: Factors, num_sharp: int, sum_rows: bool) -> Tensor:
    """See :func:`pyro_truncated.ops.mixture_products.mixture_products`; ``(N, P)``, or ``(P,)`` if ``sum_rows``."""
    del num_sharp  # A constant part of weight zero costs nothing extra here.
    out = factors[0].new_zeros(*(() if sum_rows else (len(factors[0]),)), factors[4].shape[1])
    for rows, columns, block in _blocks(factors):
        found = _factor(block)[0].prod(0)
        if sum_rows:
            out[columns] += found.sum(0)
        else:
            out[rows, columns] = found
    return out


def gradients(factors: Factors, num_sharp: int, weight: Tensor) -> tuple[Tensor, ...]:
    """Returns gradients of ``sum(weight * products)`` in all seven factors."""
    del num_sharp
    found = tuple(torch.zeros_like(factor) for factor in factors)
    weight = weight.reshape(-1, weight.shape[-1])
    for rows, columns, block in _blocks(factors):
        part = _gradients(block, weight[rows if len(weight) > 1 else slice(None), columns])
        for index, value in enumerate(part):
            found[index][rows if index < 4 else slice(None), columns if index >= 4 else slice(None)] += value
    return found


def _blocks(factors: Factors) -> Iterator[tuple[slice, slice, Factors]]:
    """Yields rows and columns within the budget, with their factors."""
    (num_rows, num_dims), num_columns = factors[0].shape, factors[4].shape[1]
    entries = rows_per_block(8 * factors[0].element_size() * max(1, num_dims))
    width = min(num_columns, entries)
    height = max(1, entries // max(1, width))
    for row in range(0, num_rows, height):
        for column in range(0, num_columns, max(1, width)):
            rows, columns = slice(row, row + height), slice(column, column + width)
            yield rows, columns, (*(f[rows] for f in factors[:4]), *(f[:, columns] for f in factors[4:]))


def _factor(block: Factors) -> tuple[Tensor, Tensor, Tensor]:
    """Factors, bumps and distances to the centres, each ``(Q, rows, columns)``."""
    height, center, rate, share = (f.mT.unsqueeze(-1) for f in block[:4])
    point, decay, base = (f.unsqueeze(1) for f in block[4:])
    distance = center - point
    bump = torch.exp(-(rate * distance.square() + decay))
    return height * bump + share * base, bump, distance


def _gradients(block: Factors, weight: Tensor) -> tuple[Tensor, ...]:
    height, _, rate, share = (f.mT.unsqueeze(-1) for f in block[:4])
    base = block[6].unsqueeze(1)
    factor, bump, distance = _factor(block)
    one = torch.ones_like(factor[:1])
    before = torch.cat([one, factor[:-1]]).cumprod(0)
    behind = torch.cat([factor[1:], one]).flip(0).cumprod(0).flip(0)
    others = before * behind * weight
    grown = others * bump
    bumped = grown * height
    slope = 2 * rate * bumped * distance
    rows = (grown, -slope, -bumped * distance.square(), others * base)
    columns = (slope, -bumped, others * share)
    return (*(value.sum(2).mT for value in rows), *(value.sum(1) for value in columns))
