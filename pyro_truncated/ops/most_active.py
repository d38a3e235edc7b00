"""Bounds of the number of active latents.

They are known without reading values if states were made from others.

What kernels with small factors need of their states would make them wait for a device. Flips add at
most one latent, and selected states have no more than their sources. So the number is read once,
with the checks of a step, and updated from there. On the CPU, where to look is to wait for nobody,
nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Whatever is padded to a larger number than need be costs its square: so many flips are followed.
_MAX_FLIPS = 2

# By the tensor whose memory it is; of a tensor that has changed since nothing is known.
_counts: Any = WeakIdKeyDictionary()


class _Count:
    """The largest number of active latents among some states.

    It was read, or is bounded by their sources and some flips.

    Attributes:
        number: what has been seen, or the sources have. Of open sources nothing yet.
        flips: how many flips there have been since somebody looked.
        sources: those that nobody has looked at.
    """

    number: int
    flips: int
    sources: Sequence[_Count]

    def __init__(self, sources: Sequence[_Count] = (), flips: int = 0) -> None:
        self.sources: Sequence[_Count] = [source for source in sources if source.flips or source.sources]
        self.number = max((source.number for source in sources if source not in self.sources), default=0)
        self.flips = flips

    def see(self, number: int) -> None:
        """Somebody has looked."""
        self.number, self.flips, self.sources = number, 0, ()

    @property
    def most(self) -> int:
        """The number at most."""
        return max([self.number, *(source.most for source in self.sources)]) + self.flips

    @property
    def flips_unseen(self) -> int:
        """How many flips this number may be too large by."""
        return max([0, *(source.flips_unseen for source in self.sources)]) + self.flips


def most_active(words: Tensor, most_flips: int = _MAX_FLIPS) -> int | None:
    """Returns a bound of active latents of one state.

    ``None`` means that it is not known closely.

    Args:
        words: packed states, ``(..., W)``.
        most_flips: how many flips it may be too large by.
    """
    count = _count_of(words)
    return None if count is None or count.flips_unseen > most_flips else count.most


def note_most_active(words: Tensor, number: int) -> None:
    """Records what has been read of states on a device.

    It holds for all states in the same memory.
    """
    if not words.is_cpu:
        count = _count_of(words) or _keep(words, _Count())
        count.see(number)


def inherit_active_bound(words: Tensor, *sources: Tensor, flips: int = 0) -> Tensor:
    """Records that states were selected among others.

    They may have so many more latents.

    Args:
        words: the states.
        sources: those that they were selected among.
        flips: how many latents were switched on at most.

    Returns:
        The states.
    """
    if not words.is_cpu:
        counts = [_count_of(source) for source in sources]
        known = [count for count in counts if count is not None]
        if len(known) == len(counts):
            _keep(words, _Count(known, flips))
    return words


def _owner(words: Tensor) -> Tensor:
    return words if words._base is None else words._base


def _count_of(words: Tensor) -> _Count | None:
    version, count = _counts.get(_owner(words), (None, None))
    return count if version == _owner(words)._version else None


def _keep(words: Tensor, count: _Count) -> _Count:
    owner = _owner(words)
    _counts[owner] = owner._version, count
    return count
