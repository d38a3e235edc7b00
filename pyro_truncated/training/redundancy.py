"""Which latents a model could do without."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.states.population import Population

# States that are scored for one step of the replacement.
_MAX_CANDIDATES = 2**20
_DEPTH = 2


@torch.no_grad()
def losses_without(population: Population, log_joint: LogJoint, depth: int = _DEPTH) -> Tensor:
    r"""What the best states of the data points would lose if a binary latent had to stay off, as far as ``depth`` others make up for it.

    .. math:: L_h = \sum_n \Big( \log p(s^*_n, y_n) - \max_{s} \log p(s, y_n) \Big), \qquad s^*_n = \arg\max_{s \in K_n} \log p(s, y_n),

    where the second maximum is over :math:`s^*_n` without :math:`h`, and with up to ``depth`` further latents that are switched on
    greedily. A latent that repeats another one, or stands for two that are there as well, loses little; one that nothing else explains
    loses what it explained. Data points at the end are left out where there are more than needed to tell.

    Args:
        population: populations of a batch of data points, of binary latents.
        log_joint: scores their states.
        depth: number of latents that may replace one.

    Returns:
        The losses in nats, ``(H,)`` in float64.

    Raises:
        ValueError: if a latent is not binary.
    """
    space = population.space
    if not space.is_binary:
        raise ValueError(f"only binary latents can be left out one by one; got {space}")
    num_latents = space.num_latents
    positions, is_on = _active(population, num_latents)
    rows = max(32, _MAX_CANDIDATES // (positions.shape[1] * num_latents))
    if log_joint.packed is None:
        rows = len(population)
    positions, is_on = positions[:rows], is_on[:rows]
    block = slice(0, len(positions))
    words, top = _best(population, block)
    single = space.pack(torch.eye(num_latents, device=words.device, dtype=torch.uint8))
    states = words.unsqueeze(1) & ~single[positions]
    reached = log_joint.score(states, block).double()
    for _ in range(depth):
        candidates = states.unsqueeze(2) | single
        scores = log_joint.score(candidates.flatten(1, 2), block).double().unflatten(1, candidates.shape[1:3])
        best, chosen = scores.scatter(2, positions.unsqueeze(-1), -torch.inf).max(-1)
        improved = candidates.gather(2, chosen[..., None, None].expand(-1, -1, 1, space.num_words)).squeeze(2)
        states = torch.where((best > reached).unsqueeze(-1), improved, states)
        reached = torch.maximum(best, reached)
    losses = torch.where(is_on, (top.unsqueeze(-1) - reached).clamp(min=0.0), 0.0)
    return losses.new_zeros(num_latents).scatter_add_(0, positions.flatten(), losses.flatten())


def _best(population: Population, block: slice) -> tuple[Tensor, Tensor]:
    """The best state of each data point, packed, and its log joint."""
    top, chosen = population.log_joint[block].double().max(-1)
    words = population.words[block]
    return words.gather(1, chosen[:, None, None].expand(-1, 1, words.shape[-1])).squeeze(1), top


def _active(population: Population, num_latents: int) -> tuple[Tensor, Tensor]:
    """Positions ``(N, A)`` of the latents that are on in the best states, filled up with others, and which of them are on."""
    words, _ = _best(population, slice(None))
    levels = population.space.unpack(words.unsqueeze(1)).squeeze(1)
    most = max(1, int(levels.sum(-1).max()))
    value, positions = levels.float().topk(min(most, num_latents), dim=-1)
    return positions, value > 0
