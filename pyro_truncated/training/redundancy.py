"""Which latents a model could do without."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.search.moves import Moves, moves_of
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace


@torch.no_grad()
def losses_without(population: Population, log_joint: LogJoint, depth: int = 2) -> Tensor:
    r"""What the best states of the data points would lose if a latent had to stay off, at zero, as far as ``depth`` others make up for it.

    .. math:: L_h = \sum_n \Big( \log p(s^*_n, y_n) - \max_{s} \log p(s, y_n) \Big), \qquad s^*_n = \arg\max_{s \in K_n} \log p(s, y_n),

    where the second maximum is over :math:`s^*_n` without :math:`h`, and with up to ``depth`` other latents that take values above zero,
    chosen greedily. A latent that repeats another one, or stands for two that are there as well, loses little; one that nothing else
    explains loses what it explained.

    Args:
        population: populations of a batch of data points.
        log_joint: scores their states.
        depth: number of latents that may replace one.

    Returns:
        The losses in nats, ``(H,)`` in float64.
    """
    space = population.space
    chosen = population.log_joint.argmax(-1, keepdim=True)
    words, top = population.take(chosen), population.log_joint.gather(1, chosen).double()
    positions, is_on = _active(space, words)
    moves = moves_of(space, words.device)
    losses = torch.zeros(space.num_latents, dtype=torch.float64, device=words.device)
    for rows in log_joint.row_blocks(positions.shape[1] * moves.count):
        reached = _replaced(_without(space, words[rows], positions[rows]), positions[rows], moves, depth, log_joint, rows)
        missed = torch.where(is_on[rows], (top[rows] - reached).clamp(min=0.0), 0.0)
        losses.scatter_add_(0, positions[rows].flatten(), missed.flatten())
    return losses


def losses_without_values(population: Population, latent: int, num_values: int) -> Tensor:
    """What the best states of the data points would lose if a latent could not have each of its values, ``(V,)`` in float64.

    Other states are those of the populations; of a data point that holds none without the value the loss is infinite.

    Args:
        population: populations of a batch of data points.
        latent: position of the latent.
        num_values: how many values it has.
    """
    levels, log_joint = population.states()[..., latent].long(), population.log_joint.double()
    has_value = torch.nn.functional.one_hot(levels, num_values).bool()
    without = log_joint.unsqueeze(-1).masked_fill(has_value, -torch.inf).amax(1)
    return (log_joint.amax(1, keepdim=True) - without).sum(0)


def is_spare(losses: Tensor, num_parameters: int, num_data: int) -> Tensor:
    """Which latents are spare, ``(H,)``: those missed by less than twice what the Bayesian information criterion asks for their parameters.

    Twice, because of two that share a component the one that stays would move half of the way to the other.

    Args:
        losses: what the data would lose without each latent, ``(H,)``, see :func:`losses_without`.
        num_parameters: how many parameters a latent has.
        num_data: number of data points.
    """
    return losses < num_parameters * math.log(num_data)


def gained_from_noise(losses: Tensor, num_parameters: int, num_data: int) -> float:
    """What spare latents may have gained where there is nothing to explain: half a nat per parameter, in nats per data point.

    Of two spare latents that share a component one has such parameters: half of them count.

    Args:
        losses: what the data would lose without each latent, ``(H,)``, see :func:`losses_without`.
        num_parameters: how many parameters a latent has.
        num_data: number of data points.
    """
    num_spare = int(is_spare(losses, num_parameters, num_data).sum())
    return (num_spare // 2) * 0.5 * num_parameters / num_data


def _without(space: StateSpace, words: Tensor, positions: Tensor) -> Tensor:
    """States ``(n, 1, W)``, each without one of the latents at ``positions (n, A)``: ``(n, A, W)``."""
    levels = space.unpack(words).repeat(1, positions.shape[1], 1)
    return space.pack(levels.scatter_(2, positions.unsqueeze(-1), 0))


def _replaced(states: Tensor, positions: Tensor, moves: Moves, depth: int, log_joint: LogJoint, rows: slice) -> Tensor:
    """Log joints ``(n, A)`` of states without the latents at ``positions (n, A)`` once others have been switched on greedily."""
    reached = log_joint.score(states, rows).double()
    is_out, every = positions.unsqueeze(-1) == moves.latent, torch.arange(moves.count, device=states.device)
    for _ in range(depth):
        candidates, value = moves.apply(states, every.expand(*states.shape[:2], -1))
        scores = log_joint.score(candidates.flatten(1, 2), rows).double().unflatten(1, candidates.shape[1:3])
        best, chosen = scores.masked_fill(is_out | (value == 0), -torch.inf).max(-1, keepdim=True)
        improved = torch.take_along_dim(candidates, chosen.unsqueeze(-1), 2).squeeze(2)
        states = torch.where(best > reached.unsqueeze(-1), improved, states)
        reached = torch.maximum(best.squeeze(-1), reached)
    return reached


def _active(space: StateSpace, words: Tensor) -> tuple[Tensor, Tensor]:
    """Positions ``(N, A)`` of the latents that are on in states ``(N, 1, num_words)``, filled up with others, and which of them are on."""
    levels = space.unpack(words).squeeze(1)
    value, positions = levels.float().topk(max(1, int((levels > 0).sum(-1).max())), dim=-1)
    return positions, value > 0
