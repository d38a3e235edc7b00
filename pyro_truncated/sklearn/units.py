"""Units of columns, for models with one noise for all."""

from __future__ import annotations

import dataclasses
from typing import Self

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ColumnUnits:
    r"""Means and standard deviations of columns, by which data are standardised.

    .. math:: x_d = (y_d - c_d) / u_d

    Attributes:
        center: :math:`c`, ``(D,)``.
        deviation: :math:`u`, ``(D,)``; one for columns that do not vary.
    """

    center: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, rows: Tensor, *, is_centred: bool = True) -> Self:
        """Returns the units of data ``(N, D)``, NaN where missing.

        Without centring all means are taken for zero.
        """
        center = rows.nanmean(0).nan_to_num(0.0)
        deviation = (rows - center).square().nanmean(0).nan_to_num(0.0).sqrt()
        # Rounding errors of a constant column are no deviation.
        varies = deviation > torch.finfo(rows.dtype).eps * center.abs()
        return cls(center if is_centred else torch.zeros_like(center), torch.where(varies, deviation, 1.0))

    @classmethod
    def none(cls, num_columns: int) -> Self:
        """Returns units that leave columns as they are."""
        return cls(torch.zeros(num_columns, dtype=torch.float64), torch.ones(num_columns, dtype=torch.float64))

    def standardised(self, rows: Tensor) -> Tensor:
        """Returns data ``(N, D)`` in these units."""
        return (rows - self.center.to(rows)) / self.deviation.to(rows)

    def restored(self, rows: Tensor) -> Tensor:
        """Returns data ``(N, D)`` that were in these units."""
        return rows * self.deviation.to(rows) + self.center.to(rows)

    def log_volume(self, rows: Tensor) -> Tensor:
        r"""Returns by how much log densities of rows fall, ``(N,)``.

        That is :math:`\sum_d \log u_d` over the columns that are observed.
        """
        return (~rows.isnan()).to(self.deviation) @ self.deviation.log()
