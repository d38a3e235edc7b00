"""Products of rows with the matrices of their groups.

Many small products are few large ones. So are square distances of data points from the means of components.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pyro_truncated.utils.budget import rows_per_block

# Blocks this long keep a matrix busy; longer ones hold more padding.
_SHORTEST, _LONGEST = 8, 256
# What a few temporaries of so many bytes hold stays in a processor's cache.
_CACHED = 2**22


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Entries sorted by group, in blocks of one group each.

    The last block of a group is filled up with other entries, which belong elsewhere and whose
    results are dropped. On a device, counting the blocks would wait for it. There are then as many
    blocks as there can be, and the last ones have no entries of their own.

    Example:
        >>> from pyro_truncated.ops.grouped import Grouped
        >>> grouped = Grouped.of(torch.tensor([2, 0, 2]), 3)
        >>> grouped.group.tolist()
        [0, 2]
        >>> grouped.gather([grouped.group.unsqueeze(1).expand_as(grouped.entry)]).tolist()
        [2, 0, 2]

    Attributes:
        group: of every block, ``(B,)``.
        entry: which entries a block holds, ``(B, T)``.
        is_own: which of them belong to the block's group, ``(B, T)``.
        place: where in the flattened table of blocks every entry is, ``(E,)``.
    """

    group: Tensor
    entry: Tensor
    is_own: Tensor
    place: Tensor

    @classmethod
    def of(cls, group: Tensor, num_groups: int) -> Grouped:
        """The entries of the groups ``(E,)``, numbers below ``num_groups``."""
        size = group.new_zeros(num_groups).index_add_(0, group, torch.ones_like(group))
        order = group.argsort(stable=True)
        length = min(_LONGEST, max(_SHORTEST, len(group) // (2 * max(1, num_groups))))
        count = (size + length - 1) // length
        last_block = count.cumsum(0)
        most = int(last_block[-1]) if group.is_cpu else min(len(group), len(group) // length + num_groups)
        block = torch.searchsorted(last_block, torch.arange(most, device=group.device), right=True).clamp_(max=num_groups - 1)
        first_block, first = last_block - count, size.cumsum(0) - size
        start = length * (torch.arange(len(block), device=group.device) - first_block[block])
        within = start.unsqueeze(1) + torch.arange(length, device=group.device)
        entry = order[(first[block].unsqueeze(1) + within).clamp_(max=max(0, len(group) - 1))]
        place = torch.empty_like(group)
        place[order] = torch.arange(len(group), device=group.device) + (length * first_block - first)[group[order]]
        return cls(block, entry, within < size[block].unsqueeze(1), place)

    def parts(self, bytes_per_entry: int) -> Iterator[Grouped]:
        """Yields some blocks at a time.

        Their entries of so many bytes stay in the cache and within the memory budget.
        """
        per_block = bytes_per_entry * self.entry.shape[1]
        rows = rows_per_block(per_block)
        if self.entry.is_cpu:
            rows = min(rows, rows_per_block(per_block, _CACHED))
        for group, entry, is_own in zip(self.group.split(rows), self.entry.split(rows), self.is_own.split(rows), strict=True):
            yield Grouped(group, entry, is_own, self.place)

    def gather(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the entries' values ``(E, ...)`` from parts ``(B, T, ...)``."""
        return torch.cat(list(values)).flatten(0, 1)[self.place]
