"""Strings as bags of substrings."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pyro_truncated.gp.data_kernels.hashed_counts import HashedCounts, combine
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.counts import check_count


@names_arguments
def spectrum(strings: Sequence[str], length: int, *, shorter: bool = False) -> HashedCounts:
    """Counts of all substrings of a length; inner products of these counts are the spectrum kernel.

    Example:
        >>> counts = spectrum(["CCO", "CC"], 2)  # CC and CO; CC
        >>> counts.squared_norms
        tensor([2., 1.], dtype=torch.float64)

    Args:
        strings: the strings.
        length: number of characters ``k`` of a substring.
        shorter: whether substrings of 1 to ``k - 1`` characters count as well.

    Raises:
        ValueError: if ``length`` is not positive.

    Reference:
        Leslie, Eskin and Noble, "The spectrum kernel: a string kernel for SVM protein classification", PSB 2002.
    """
    length = check_count("length", length)
    text = "".join(strings)
    letters = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32).long() if text else torch.zeros(0, dtype=torch.int64)
    sizes = torch.tensor([len(string) for string in strings], dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(strings)), sizes)
    end = sizes.cumsum(0)[owner]
    position = torch.arange(len(letters))
    rows, keys = [], []
    for size in range(1 if shorter else length, length + 1):
        start = position[position + size <= end]
        windows = letters[start[:, None] + torch.arange(size)]
        rows.append(owner[start])
        keys.append(combine(*windows.unbind(1), size))
    return HashedCounts.of(len(strings), torch.cat(rows), torch.cat(keys))
