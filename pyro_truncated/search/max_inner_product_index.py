"""Approximate maximum inner products: the largest of many linear functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from pyro_truncated.ops.components import as_integers, check_below
from pyro_truncated.ops.max_inner_products import follow_neighbours, max_inner_products, max_inner_products_in_groups
from pyro_truncated.utils.arguments import check_count

# Values and numbers of functions, ``(N, S)`` both.
TopProducts = tuple[Tensor, Tensor]
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much :class:`MaxInnerProductIndex` looks at."""

    max_exhaustive: int = 3000  # number of functions up to which all are looked at
    rows_per_function: int = 10  # data points per function below which all are looked at
    first_groups: int = 2  # groups that are looked at first
    groups: int = 16  # groups that are looked at for data points whose largest function is low
    neighbours: int = 32  # functions that are largest where a function belongs, of each
    depth: int = 2  # how many of the best functions have their neighbours looked at
    known_depth: int = 1  # the same where the best function is known
    parts: int = 32  # parts of a block of data points that look further in turn
    smallest_part: int = 256  # data points of a part at least
    min_gaining_share: float = 0.02  # share of a part that must gain, for the next one to look further
    first_part: int = 8  # the first data points are this part of a block
    max_looking_share: float = 0.5  # share of these that look further above which all others look at all groups at once
    groups_for_neighbours: int = 60  # groups in which neighbours are looked for
    max_group_share: float = 0.3  # share of all groups above which neighbours are looked for everywhere


class MaxInnerProductIndex:
    """Finds the largest of very many linear functions of some features.

    All are evaluated for up to three thousand functions, and for fewer than ten data points per function. For more
    functions the search has three stages. First come the two groups of functions that are largest on average. Then
    come the neighbours of the best functions found there. Last come sixteen more groups, and neighbours again, for
    data points whose largest function is low.

    The last stage takes a thirty-second part of the data points after another, lowest first, as long as 2 % of them
    gain. If most of the first data points gain, all others get sixteen groups at once. Some of the largest are
    missed.

    Example:
        >>> places = torch.randn(40, 2)
        >>> coefficients = torch.cat([-0.5 * places.square().sum(1, keepdim=True), places], 1)
        >>> features = torch.cat([torch.ones(40, 1), places], 1)
        >>> nearest = MaxInnerProductIndex(coefficients, features, lambda: torch.arange(40) // 8, 40).query(features, 3)
        >>> nearest[:, 0].equal(torch.arange(40))
        True

    Args:
        coefficients: of the functions, ``(K, F)``.
        features: where the functions belong, ``(K, F)``.
        group: asked for when it is needed: a group of similar functions for each, ``(K,)``, numbered from 0, none empty.
        num_data: of how many data points the largest functions will be looked for.
        offset: a function of features ``(N, F)`` that returns a shift ``(N,)`` of all functions' values. It makes
            values of different data points comparable. An example is the log density of the data under the component
            that fits each best.

    Attributes:
        are_few: whether all are looked at, so that it is no use to know large ones.
        EFFORT: how much is looked at, in numbers.

    Raises:
        ValueError: if there are no functions, coefficients and features have different shapes, or the number of data points is negative.
    """

    EFFORT: ClassVar[Effort] = Effort()

    def __init__(
        self,
        coefficients: Tensor,
        features: Tensor,
        group: Callable[[], Tensor],
        num_data: int,
        offset: Callable[[Tensor], Tensor | None] | None = None,
    ) -> None:
        if coefficients.dim() != 2 or not len(coefficients) or coefficients.shape != features.shape:
            shapes = f"{tuple(coefficients.shape)} and {tuple(features.shape)}"
            raise ValueError(f"coefficients and features must have the same shape (K, F), K positive; got {shapes}")
        num_data = check_count("num_data", num_data, least=0)
        self.coefficients, self.features = coefficients, features
        self._find_group, self.offset = group, offset or (lambda features: None)
        self._looks_at_all: bool | None = None
        self.are_few = len(coefficients) <= self.EFFORT.max_exhaustive or num_data < self.EFFORT.rows_per_function * len(coefficients)

    def query(self, features: Tensor, number: int, known: Tensor | None = None) -> Tensor:
        """Returns the ``number`` largest functions at features ``(N, F)``.

        The shape is ``(N, number)``, largest first.

        Args:
            features: of the data points, ``(N, F)``.
            number: how many functions.
            known: functions that may be large, different ones, ``(N, A)``. Where the best one of two groups is among them no more groups
                are looked at.

        Raises:
            ValueError: if features have another shape, there are too few functions, groups are not numbers ``(K,)``
                from 0 without gaps, or known functions do not exist.
        """
        if features.dim() != 2 or features.shape[1] != self.coefficients.shape[1]:
            raise ValueError(f"features must have shape (N, {self.coefficients.shape[1]}); got {tuple(features.shape)}")
        if check_count("number", number) > len(self.coefficients):
            raise ValueError(f"number must be at most {len(self.coefficients)}, as there are functions; got {number}")
        known = None if known is None else self._check(known, features)
        if self.are_few or not self._groups_suffice(number):
            return max_inner_products(features, self.coefficients, number)[1]
        if known is None:
            return self._search(features, number)
        first = self._search_first_groups(features, number)
        is_hit = (known == first[1][:, :1]).any(1)
        hits, misses, index = is_hit.nonzero()[:, 0], (~is_hit).nonzero()[:, 0], torch.empty_like(first[1])
        index[hits] = self._follow(features[hits], _select(first, hits), self.EFFORT.known_depth, known[hits])[1]
        index[misses], _ = self._search_in_stages(features[misses], _select(first, misses), known[misses])
        return index

    def _check(self, known: Tensor, features: Tensor) -> Tensor:
        if known.dim() != 2 or len(known) != len(features):
            raise ValueError(f"known must have shape ({len(features)}, A); got {tuple(known.shape)}")
        known = as_integers(known)
        check_below(known, len(self.coefficients))
        return known

    def _search(self, features: Tensor, number: int) -> Tensor:
        """Finds the largest functions; the first data points decide how to search."""
        if self._looks_at_all is None:
            some, rest = features.tensor_split([max(self.EFFORT.smallest_part, len(features) // self.EFFORT.first_part)])
            index, share = self._search_in_stages(some, self._search_first_groups(some, number))
            self._looks_at_all = share > self.EFFORT.max_looking_share if len(rest) else None
            return torch.cat([index, self._search(rest, number)]) if len(rest) else index
        if self._looks_at_all:
            return self._follow(features, self._search_groups(features, number, self.EFFORT.groups), self.EFFORT.depth)[1]
        return self._search_in_stages(features, self._search_first_groups(features, number))[0]

    def _search_in_stages(self, features: Tensor, first: TopProducts, known: Tensor | None = None) -> tuple[Tensor, float]:
        """Searches in stages; also returns the share that took more groups."""
        value, index = self._follow(features, first, self.EFFORT.depth, known)
        offset, num_rows = self.offset(features), 0
        order = (value[:, 0] if offset is None else value[:, 0] + offset).argsort()
        for rows in order.split(max(self.EFFORT.smallest_part, -(-len(order) // self.EFFORT.parts))):
            best, some = index[rows, 0], features[rows]
            more = self._search_groups(some, first[1].shape[1], self.EFFORT.groups)
            index[rows] = self._follow(some, more, self.EFFORT.depth, index[rows])[1]
            num_rows += len(rows)
            if (index[rows, 0] != best).sum() < self.EFFORT.min_gaining_share * len(rows):
                break
        return index, num_rows / max(1, len(order))

    def _follow(self, features: Tensor, products: TopProducts, depth: int, known: Tensor | None = None) -> TopProducts:
        return follow_neighbours(features, self.coefficients, self._neighbours, *products, depth, known)

    def _groups_suffice(self, number: int) -> bool:
        """Whether the searched groups leave most functions out, yet hold enough."""
        sizes = self._sizes.sort().values
        num_groups = min(self.EFFORT.groups, len(sizes))
        return bool((num_groups * sizes[-1] < len(self.coefficients)) & (sizes[:num_groups].sum() >= max(number, self.EFFORT.neighbours)))

    def _search_first_groups(self, features: Tensor, number: int) -> TopProducts:
        """Searches two groups, or as many as surely hold enough functions."""
        too_few = int((self._sizes.sort().values.cumsum(0) < number).sum())
        return self._search_groups(features, number, max(self.EFFORT.first_groups, too_few + 1))

    def _search_groups(self, features: Tensor, number: int, num_groups: int) -> TopProducts:
        """The largest of the groups that are largest on average."""
        groups = max_inner_products(features, self._mean, min(num_groups, len(self._sizes)))[1]
        return max_inner_products_in_groups(features, self.coefficients, self._group, len(self._sizes), groups, number)

    @functools.cached_property
    def _group(self) -> Tensor:
        group, number = self._find_group(), len(self.coefficients)
        if group.shape != (number,) or group.dtype not in _INTEGERS:
            raise ValueError(f"group must be integers of shape ({number},); got {group.dtype}, {tuple(group.shape)}")
        labels = group.unique()
        if not labels.equal(torch.arange(len(labels)).to(labels)):
            raise ValueError(f"groups must be numbered from 0, none left out; got {len(labels)} from {int(labels[0])} to {int(labels[-1])}")
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
        if self.EFFORT.max_group_share * len(self._sizes) < self.EFFORT.groups_for_neighbours:
            return max_inner_products(self.features, self.coefficients, self.EFFORT.neighbours)[1]
        parts = self.features.split(2**14)  # to bound memory
        return torch.cat([self._search_groups(some, self.EFFORT.neighbours, self.EFFORT.groups_for_neighbours)[1] for some in parts])


def _select(products: TopProducts, rows: Tensor) -> TopProducts:
    return products[0][rows], products[1][rows]
