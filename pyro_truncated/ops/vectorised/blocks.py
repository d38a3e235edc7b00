"""States unpacked a block at a time, under the memory budget."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_truncated.ops.vectorised.latent_values import unpack_bits
from pyro_truncated.utils.budget import rows_per_block

# Of the size of a block's states that are held at once: bits on the way, states, a product with them, and a product of both.
_TENSORS = 4


def state_blocks(words: Tensor, num_latents: int, width: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yields blocks of candidates: their places and states ``(N, c, H)``.

    There is at least one block, empty if need be.

    Args:
        words: packed states, ``(N, C, W)``.
        num_latents: number of binary latents ``H``.
        width: a block holds a few tensors ``(N, c, max(H, width))``.
        dtype: of the states.
    """
    size = rows_per_block(_TENSORS * 8 * words.shape[0] * max(num_latents, width))
    for start in range(0, max(1, words.shape[1]), size):
        where = slice(start, start + size)
        yield where, unpack_bits(words[:, where], num_latents, dtype)
