"""All combinations of a few single-latent states."""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor

from pyro_truncated.ops.packed_checks import check_words

_MAX_STATES = 2**20


def combine(chosen: Tensor, max_active: int | None = None) -> Tensor:
    r"""Returns unions of at most ``max_active`` of each data point's singletons.

    These are its selected single-latent states.

    Every state but the first, all-zero one extends a state with one latent fewer by one
    single-latent state. So building a state takes one operation per word, and its latents are never
    unpacked.

    Args:
        chosen: packed states with one active latent each, of different latents, ``(N, K, W)``.
        max_active: largest number of active latents. Default: all.

    Returns:
        ``(N, S, W)``, :math:`S = \sum_{k \le \mathrm{max\_active}} \binom Kk`: fewer active latents first, in the same order for every data
        point.

    Raises:
        ValueError: if ``chosen`` are not packed states, or there were more than 2**20 states per data point.
    """
    check_words("chosen", chosen)
    num_selected = chosen.shape[1]
    limit = num_selected if max_active is None else min(max_active, num_selected)
    size = sum(math.comb(num_selected, k) for k in range(limit + 1))
    if size > _MAX_STATES:
        raise ValueError(
            f"{num_selected} selected latents with up to {limit} of them active make {size} states per data point, over {_MAX_STATES}; "
            "select fewer (num_selected) or lower max_active"
        )
    parent, last = _table(num_selected, limit, chosen.device)
    out = chosen.new_zeros(len(chosen), size, chosen.shape[2])
    start = 1
    for k in range(1, limit + 1):
        level = slice(start, start + math.comb(num_selected, k))
        out[:, level] = out[:, parent[level]] | chosen[:, last[level]]
        start = level.stop
    return out


@functools.lru_cache(maxsize=16)
def _table(num_selected: int, max_active: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the combination that each extends, and the added position.

    The empty combination comes first.
    """
    subsets = [subset for size in range(max_active + 1) for subset in itertools.combinations(range(num_selected), size)]
    position = {subset: i for i, subset in enumerate(subsets)}
    parent = torch.tensor([position[subset[:-1]] for subset in subsets], device=device)
    last = torch.tensor([subset[-1] if subset else 0 for subset in subsets], device=device)
    return parent, last
