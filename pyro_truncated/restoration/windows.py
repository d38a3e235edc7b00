"""Overlapping patches of arrays, and arrays put together from them."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.utils.arguments import check_count, names_arguments
from pyro_truncated.utils.arrays import as_tensors


class Patches:
    r"""The overlapping windows of an array.

    It may be a signal, an image or a volume, with or without channels.

    Windows start at every ``stride``-th position along each dimension, and at the last one that fits, so that every entry is covered.
    A patch is a window as a vector, with the channels of its entries, if there are any, side by side.

    Example:
        >>> patches = Patches((8, 8), 4)
        >>> image = torch.randn(8, 8)
        >>> torch.allclose(patches.assemble(patches.extract(image)), image, atol=1e-6)  # averaged where they overlap
        True

    Args:
        shape: sizes of the array without channels, such as ``(height, width)``.
        size: side of the windows, one number or one per dimension.
        stride: distance of neighbouring windows.
        channels: number of channels, the array's last dimension; ``None`` for an array without.

    Raises:
        ValueError: if a window is larger than the array, or the stride larger than a window (which would leave entries out).
    """

    @names_arguments
    def __init__(self, shape: Sequence[int], size: int | Sequence[int], stride: int = 1, *, channels: int | None = None) -> None:
        self.shape = tuple(check_count("shape", n) for n in shape)
        if not self.shape:
            raise ValueError("shape must have one dimension or more; got ()")
        sizes: Sequence[Any] = [size] * len(self.shape) if isinstance(size, numbers.Number) else size  # type: ignore[assignment]
        self.size = tuple(check_count("size", n) for n in sizes)
        self.stride = check_count("stride", stride)
        self.channels = None if channels is None else check_count("channels", channels)
        if len(self.size) != len(self.shape) or any(side > n for side, n in zip(self.size, self.shape, strict=True)):
            raise ValueError(f"size must give a side for each dimension of {self.shape}, none larger than the array; got {self.size}")
        if self.stride > min(self.size):
            raise ValueError(
                f"stride must not exceed the side of a patch, {min(self.size)}, or entries would be left out; got {self.stride}"
            )
        self._starts = [_starts(n - side + 1, self.stride) for n, side in zip(self.shape, self.size, strict=True)]

    def __len__(self) -> int:
        return math.prod(len(starts) for starts in self._starts)

    @property
    def num_observed(self) -> int:
        """Number of entries of a patch, ``D``."""
        return math.prod(self.size) * (self.channels or 1)

    def places(self) -> Tensor:
        """Returns indices ``(N, P)`` of the first entries of patches.

        There are ``P`` dimensions without channels.
        """
        return torch.stack(self._grid(self._starts), -1).flatten(0, -2)

    @names_arguments
    def extract(self, array: Tensor) -> Tensor:
        """Returns the patches ``(N, D)`` of an array.

        It is ``(*shape)`` or ``(*shape, channels)``. Missing entries (NaN) stay missing.

        Raises:
            ValueError: for an array of another shape.
        """
        windows: Tensor = as_tensors(array)
        expected = self.shape if self.channels is None else (*self.shape, self.channels)
        if tuple(windows.shape) != expected:
            raise ValueError(f"the array must have shape {expected}; got {tuple(windows.shape)}")
        for dim, side in enumerate(self.size):
            windows = windows.unfold(dim, side, 1)
        if self.channels is not None:
            windows = windows.movedim(len(self.shape), -1)
        return windows[self._grid(self._starts)].flatten(0, len(self.shape) - 1).flatten(1)

    @names_arguments
    def assemble(self, patches: Tensor, weights: Tensor | None = None) -> Tensor:
        """Averages overlapping patches to an array.

        Args:
            patches: ``(N, D)``.
            weights: of the patches ``(N,)`` or ``(N, 1)``, or of their entries ``(N, D)``, finite and not negative; default: equal
                ones.

        Returns:
            The array ``(*shape)`` or ``(*shape, channels)``, in the type of the patches, of integers in floating point; NaN where no
            patch has weight.

        Raises:
            ValueError: if there are more or fewer patches, entries or weights than the array has, or weights that are negative, infinite
                or NaN.
        """
        patches = as_tensors(patches)
        patches = patches if patches.is_floating_point() else patches.to(torch.get_default_dtype())
        number, entries = len(self), self.num_observed
        if patches.shape != (number, entries):
            raise ValueError(f"patches must have shape {(number, entries)}; got {tuple(patches.shape)}")
        weight = patches.new_ones(number) if weights is None else as_tensors(weights)
        if weight.shape not in ((number,), (number, 1), (number, entries)) or not bool(((weight >= 0) & weight.isfinite()).all()):
            least, most = (float(weight.min()), float(weight.max())) if weight.numel() else (math.nan, math.nan)
            shapes = f"{(number,)} or {(number, entries)}"
            given = f"shape {tuple(weight.shape)}, between {least:g} and {most:g}"
            raise ValueError(f"weights must have shape {shapes}, finite and not negative; got {given}")
        weight = (weight if weight.dim() == 2 else weight.unsqueeze(-1)).double().expand(patches.shape)
        counts = [len(starts) for starts in self._starts]
        window = (*self.size, *([] if self.channels is None else [self.channels]))
        values = (weight * patches.double()).reshape(*counts, *window)
        weight = weight.reshape(*counts, *window)
        full = (*self.shape, *window[len(self.shape) :])
        total, share = (torch.zeros(full, dtype=torch.float64, device=patches.device) for _ in range(2))
        inner = (slice(None),) * len(self.shape)
        # One entry of all windows at a time: these are different entries of the array, which can be added at once.
        for offset in itertools.product(*(range(side) for side in self.size)):
            place = self._grid([starts + shift for starts, shift in zip(self._starts, offset, strict=True)])
            entry: Any = (*inner, *offset)
            total[place] += values[entry]
            share[place] += weight[entry]
        return (total / share).to(patches.dtype)

    @staticmethod
    def _grid(starts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.meshgrid(*starts, indexing="ij")


def _starts(count: int, stride: int) -> Tensor:
    """Every ``stride``-th of so many positions, and the last."""
    return torch.tensor(sorted({*range(0, count, stride), count - 1}))
