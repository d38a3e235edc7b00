"""Proposals that are coherent in time: exact posteriors of a few chains over all steps, given the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_truncated.ops.binary_chains import block_posteriors
from pyro_truncated.ops.fields import WORD_BITS
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.console import Described
from pyro_truncated.utils.counts import check_count
from pyro_truncated.utils.devices import device_of

if TYPE_CHECKING:
    from pyro_truncated.sequences.chain_posterior import ChainPosterior


class BlockSearch(Described):
    r"""Proposes the likeliest configurations of random blocks of chains at all steps of a sequence.

    Flips of single steps get stuck where several chains explain the same thing over a stretch of time. A step of this search takes the
    best path, chooses ``k`` chains, and computes the exact posterior of their :math:`2^k` joint configurations at every step, given the
    others on this path. The best configurations of each step become candidates.

    Example:
        >>> BlockSearch(num_chains=4)
        BlockSearch(num_chains=4, num_candidates=16)

    Args:
        num_chains: chains of a block, ``k``; a step costs :math:`k 2^k`.
        num_candidates: configurations proposed at each step.
        generator: source of randomness; default: torch's global generator.

    Raises:
        ValueError: if a number is not positive.
    """

    @names_arguments
    def __init__(self, num_chains: int = 8, num_candidates: int = 16, *, generator: torch.Generator | None = None) -> None:
        self.num_chains = check_count("num_chains", num_chains)
        self.num_candidates = check_count("num_candidates", num_candidates)
        self.generator = generator

    def propose(self, posterior: ChainPosterior) -> tuple[Tensor, Tensor]:
        """Candidates ``(N, T, C, W)`` and their log likelihoods ``(N, T, C)``."""
        path, num_latents = posterior.best_words(), posterior.space.num_latents
        size = min(self.num_chains, num_latents)
        chances = torch.rand(len(path), num_latents, generator=self.generator, device=device_of(self.generator))
        block = chances.topk(size, dim=1).indices.to(path.device)
        scores = _block_scores(posterior, path, block)
        likely = block_posteriors(scores / posterior.temperature, posterior.transitions, block)
        place = likely.topk(min(self.num_candidates, likely.shape[2]), dim=2).indices
        words = _with_block(path.unsqueeze(2), block, place)
        known = posterior.log_likelihood(path.unsqueeze(2))
        at_path = (
            posterior.space.unpack(path, torch.int64).gather(2, block.unsqueeze(1).expand(-1, path.shape[1], -1)) << _order(block)
        ).sum(2)
        return words, known + scores.gather(2, place) - scores.gather(2, at_path.unsqueeze(2))


def _order(block: Tensor) -> Tensor:
    return torch.arange(block.shape[1], device=block.device)


def _with_block(words: Tensor, block: Tensor, place: Tensor) -> Tensor:
    """States ``(N, T, 1, W)`` with the chains of a block in configurations ``(N, T, C)``."""
    bits = (place.unsqueeze(-1) >> _order(block)) & 1
    word, bit = block // WORD_BITS, torch.ones_like(block) << block % WORD_BITS
    parts = []
    for w in range(words.shape[-1]):
        own = torch.where(word == w, bit, 0)
        parts.append((words[..., w] & ~own.sum(1).view(-1, 1, 1)) | (bits * own.view(len(block), 1, 1, -1)).sum(-1))
    return torch.stack(parts, -1)


def _block_scores(posterior: ChainPosterior, path: Tensor, block: Tensor) -> Tensor:
    """Log likelihoods of all configurations of a block, by the likelihood's own way if it has one."""
    own = getattr(posterior.log_likelihood, "block_scores", None)
    if own is not None:
        scores: Tensor = own(path, block)
        return scores
    every = torch.arange(2 ** block.shape[1], device=path.device).expand(*path.shape[:2], -1)
    return posterior.log_likelihood(_with_block(path.unsqueeze(2), block, every))
