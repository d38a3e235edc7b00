"""The largest of very many linear functions of some features, of which most are not looked at."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_truncated.ops.component_sums import as_integers, check_below
from pyro_truncated.ops.largest import largest_of_all, largest_of_groups, walked
from pyro_truncated.utils.counts import check_count

# Up to so many functions, and for fewer data points per function, all are looked at.
_FEW, _ROWS_PER_FUNCTION = 3000, 10
# Of the rest: the groups that are looked at, the neighbours of the best functions then, and of how many.
_LOOKED_AT, _NEIGHBOURS, _DEPTH = 12, 32, 2
# The groups that are looked at first where large functions are known.
_FIRST = 4
# Neighbours are looked for in more groups: once, for all data.
_LOOKED_AT_FOR_NEIGHBOURS = 60
_ROWS = 2**14
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class LinearFunctions:
    """Finds the largest of very many linear functions of some features.

    Up to three thousand functions, and for fewer than ten data points per function, all are looked at. Of more first the groups of
    functions that are large on average, then the neighbours of the best ones found there: those functions that are largest where these
    belong. Some of the largest are missed.

    Example:
        >>> places = torch.randn(40, 2)
        >>> coefficients = torch.cat([-0.5 * places.square().sum(1, keepdim=True), places], 1)
        >>> features = torch.cat([torch.ones(40, 1), places], 1)
        >>> nearest = LinearFunctions(coefficients, features, lambda: torch.arange(40) // 8, 40).largest(features, 3)
        >>> nearest[:, 0].equal(torch.arange(40))
        True

    Args:
        coefficients: of the functions, ``(K, F)``.
        features: where the functions belong, ``(K, F)``.
        group: asked for when it is needed: a group of similar functions for each, ``(K,)``, numbered from 0, none empty.
        num_data: of how many data points the largest functions will be looked for.

    Attributes:
        are_few: whether all are looked at, so that it is no use to know large ones.

    Raises:
        ValueError: if there are no functions, coefficients and features have different shapes, or the number of data points is negative.
    """

    def __init__(self, coefficients: Tensor, features: Tensor, group: Callable[[], Tensor], num_data: int) -> None:
        if coefficients.dim() != 2 or not len(coefficients) or coefficients.shape != features.shape:
            shapes = f"{tuple(coefficients.shape)} and {tuple(features.shape)}"
            raise ValueError(f"coefficients and features must have the same shape (K, F), K positive; got {shapes}")
        num_data = check_count("num_data", num_data, least=0)
        self.coefficients, self.features = coefficients, features
        self._find_group = group
        self.are_few = len(coefficients) <= _FEW or num_data < _ROWS_PER_FUNCTION * len(coefficients)

    def largest(self, features: Tensor, number: int, known: Tensor | None = None) -> Tensor:
        """The ``number`` largest functions of each of some features ``(N, F)``, largest first, ``(N, number)``.

        Args:
            features: of the data points, ``(N, F)``.
            number: how many functions.
            known: functions that may be large, different ones, ``(N, A)``. Where the best one of four groups is among them no more groups
                are looked at.

        Raises:
            ValueError: if features have another shape, there are not as many functions, or groups that are asked for are not numbers
                ``(K,)`` from 0 of which none is left out; or for known functions that do not exist, or not of each data point.
        """
        if features.dim() != 2 or features.shape[1] != self.coefficients.shape[1]:
            raise ValueError(f"features must have shape (N, {self.coefficients.shape[1]}); got {tuple(features.shape)}")
        if check_count("number", number) > len(self.coefficients):
            raise ValueError(f"number must be at most {len(self.coefficients)}, as there are functions; got {number}")
        known = None if known is None else self._checked(known, features)
        if self.are_few or not self._are_apart(number):
            return largest_of_all(features, self.coefficients, number)[1]
        if known is None or self._sizes.sort().values[:_FIRST].sum() < number:
            value, index = self._of_groups(features, number, _LOOKED_AT)
        else:
            value, index = self._of_fewer_groups(features, number, known)
        return walked(features, self.coefficients, self._neighbours, value, index, _DEPTH, known)

    def _checked(self, known: Tensor, features: Tensor) -> Tensor:
        if known.dim() != 2 or len(known) != len(features):
            raise ValueError(f"known must have shape ({len(features)}, A); got {tuple(known.shape)}")
        known = as_integers(known)
        check_below(known, len(self.coefficients))
        return known

    def _of_fewer_groups(self, features: Tensor, number: int, known: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of the first groups; of all that are looked at where what is known lacks the best of these."""
        value, index = self._of_groups(features, number, _FIRST)
        lacking = (known != index[:, :1]).all(1).nonzero()[:, 0]
        rows, beside = features[lacking], (value[lacking], index[lacking])
        asked = self._asked(rows, _LOOKED_AT)
        value[lacking], index[lacking] = self._of_these(rows, asked[:, _FIRST:], number, beside)
        # Where fewer are above minus infinity, both parts may have been filled up with the same ones.
        is_few = value[lacking, -1] == -torch.inf
        value[lacking[is_few]], index[lacking[is_few]] = self._of_these(rows[is_few], asked[is_few], number)
        return value, index

    def _are_apart(self, number: int) -> bool:
        """Whether the groups that are looked at leave most functions out, and have as many as are asked for."""
        sizes = self._sizes.sort().values
        looked_at = min(_LOOKED_AT, len(sizes))
        return bool((looked_at * sizes[-1] < len(self.coefficients)) & (sizes[:looked_at].sum() >= max(number, _NEIGHBOURS)))

    def _of_groups(self, features: Tensor, number: int, looked_at: int) -> tuple[Tensor, Tensor]:
        return self._of_these(features, self._asked(features, looked_at), number)

    def _asked(self, features: Tensor, looked_at: int) -> Tensor:
        """The groups to look at, those that are largest on average first."""
        return largest_of_all(features, self._mean, min(looked_at, len(self._sizes)))[1]

    def _of_these(self, features: Tensor, asked: Tensor, number: int, beside: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        return largest_of_groups(features, self.coefficients, self._group, len(self._sizes), asked, number, beside)

    @functools.cached_property
    def _group(self) -> Tensor:
        group, number = self._find_group(), len(self.coefficients)
        if group.shape != (number,) or group.dtype not in _INTEGERS:
            raise ValueError(f"group must be integers of shape ({number},); got {group.dtype}, {tuple(group.shape)}")
        used = group.unique()
        if not used.equal(torch.arange(len(used)).to(used)):
            raise ValueError(f"groups must be numbered from 0, none left out; got {len(used)} from {int(used[0])} to {int(used[-1])}")
        return group.long()

    @functools.cached_property
    def _sizes(self) -> Tensor:
        return torch.bincount(self._group)

    @functools.cached_property
    def _mean(self) -> Tensor:
        """The functions of the groups on average, ``(G, F)``."""
        total = self.coefficients.new_zeros(len(self._sizes), self.coefficients.shape[1]).index_add_(0, self._group, self.coefficients)
        return total / self._sizes.unsqueeze(-1)

    @functools.cached_property
    def _neighbours(self) -> Tensor:
        """What is largest where each function belongs, ``(K, W)``."""
        parts = self.features.split(_ROWS)
        return torch.cat([self._of_groups(some, _NEIGHBOURS, _LOOKED_AT_FOR_NEIGHBOURS)[1] for some in parts])
