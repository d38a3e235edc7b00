"""Which latents a model could do without."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.search.conditional import Moves, single_changes
from pyro_truncated.states.population import Population

# Share of a latent's data points above which another one is its substitute.
_OFTEN = 0.1


def deletion_losses(population: Population, log_joint: LogJoint, depth: int = 2) -> Tensor:
    r"""Returns deletion losses: best log joints lost without each latent.

    Up to ``depth`` other latents may substitute for it.

    .. math:: L_h = \sum_n \Big( \log p(s^*_n, y_n) - \max_{s} \log p(s, y_n) \Big), \qquad s^*_n = \arg\max_{s \in K_n} \log p(s, y_n),

    where the second maximum is over :math:`s^*_n` without :math:`h`, with up to ``depth`` other latents switched on greedily. A latent
    that repeats another one, or stands for two others, has a small loss. One that nothing else explains loses what it explained.

    Args:
        population: populations of a batch of data points.
        log_joint: scores their states.
        depth: number of latents that may replace one.

    Returns:
        The losses in nats, ``(H,)`` in float64.
    """
    return losses_with_substitutes(population, log_joint, depth)[0]


@torch.no_grad()
def losses_with_substitutes(population: Population, log_joint: LogJoint, depth: int = 2) -> tuple[Tensor, Tensor]:
    """Returns :func:`deletion_losses`, and the share of each substitute.

    Args:
        population: populations of a batch of data points.
        log_joint: scores their states.
        depth: number of latents that may replace one.

    Returns:
        Losses ``(H,)``, and the share ``(H, H)`` of data points with latent ``h`` in which latent ``j`` changes without ``h``.
    """
    space = population.space
    words, top = population.mode(), population.log_joint.amax(-1).double()
    row, latent = (space.unpack(words) > 0).nonzero().unbind(1)
    states = space.pack(space.unpack(words[row]).scatter_(1, latent.unsqueeze(1), 0))
    reached = torch.empty(len(row), dtype=torch.float64, device=words.device)
    for rows, places, counts in _blocks(log_joint, row, 1):
        reached[places[counts]] = log_joint.score(states[places], rows).double()[counts]
    may_rise = torch.arange(len(row), device=words.device)
    for _ in range(depth):
        best, improved = _best_with_one_more(
            log_joint, row[may_rise], latent[may_rise], states[may_rise], single_changes(space, words.device)
        )
        # A row that no single latent raises is final.
        rises = best > reached[may_rise]
        may_rise = may_rise[rises]
        reached[may_rise], states[may_rise] = best[rises], improved[rises]
    losses = torch.zeros(space.num_latents, dtype=torch.float64, device=words.device)
    losses.index_add_(0, latent, (top[row] - reached).clamp(min=0.0))
    changed = torch.zeros(space.num_latents, space.num_latents, device=words.device)
    # States compared at a time.
    for some in torch.arange(len(row), device=words.device).split(2**16):
        differs = space.unpack(states[some]) != space.unpack(words[row[some]])
        changed.index_add_(0, latent[some], differs.to(changed.dtype))
    return losses, (changed / changed.diagonal().clamp(min=1.0).unsqueeze(1)).fill_diagonal_(0.0)


def select_for_pruning(losses: Tensor, substitutes: Tensor, number: int) -> Tensor:
    """Returns latents of least deletion loss, none a substitute of another.

    At least one, at most a given number.

    Of two that share a component each is missed little, and both together much.

    Args:
        losses: what the data would lose without each latent, ``(H,)``.
        substitutes: the part of the data points of each latent in which each other one makes up for it, ``(H, H)``.
        number: how many are asked for.
    """
    linked, chosen = ((substitutes > _OFTEN) | (substitutes.mT > _OFTEN)).cpu(), [int(losses.argmin())]
    for latent in losses.argsort().tolist()[1:]:
        if len(chosen) < number and not bool(linked[latent, chosen].any()):
            chosen.append(latent)
    return torch.tensor(chosen, device=losses.device)


def value_deletion_losses(population: Population, latent: int, num_values: int) -> Tensor:
    """Returns deletion losses of a latent's values, ``(V,)`` in float64.

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


def is_redundant(losses: Tensor, num_parameters: int, num_data: int) -> Tensor:
    """Returns which latents are redundant, ``(H,)``.

    Their deletion loss is below twice the penalty of the Bayesian information criterion.

    Twice, because of two that share a component the one that stays would move half of the way to the other.

    Args:
        losses: what the data would lose without each latent, ``(H,)``, see :func:`deletion_losses`.
        num_parameters: how many parameters a latent has.
        num_data: number of data points.
    """
    return losses < num_parameters * math.log(num_data)


def gained_from_noise(losses: Tensor, num_parameters: int, num_data: int) -> float:
    """Returns the overfit of redundant latents in nats per data point.

    It is half a nat per parameter.

    Of two spare latents that share a component one has such parameters: half of them count.

    Args:
        losses: what the data would lose without each latent, ``(H,)``, see :func:`deletion_losses`.
        num_parameters: how many parameters a latent has.
        num_data: number of data points.
    """
    num_spare = int(is_redundant(losses, num_parameters, num_data).sum())
    return (num_spare // 2) * 0.5 * num_parameters / num_data


def _best_with_one_more(log_joint: LogJoint, row: Tensor, latent: Tensor, states: Tensor, moves: Moves) -> tuple[Tensor, Tensor]:
    """Returns the best log joints ``(P,)`` with one more latent, and which.

    States are ``(P, W)``; one latent is forbidden in each.
    """
    best, improved = torch.empty(len(row), dtype=torch.float64, device=states.device), torch.empty_like(states)
    for rows, places, counts in _blocks(log_joint, row, moves.count):
        every = torch.arange(moves.count, device=states.device).expand(*places.shape, -1)
        candidates, value = moves.apply(states[places], every)
        scores = log_joint.score(candidates.flatten(1, 2), rows).double().unflatten(1, every.shape[1:])
        is_out = (latent[places].unsqueeze(-1) == moves.latent) | (value == 0)
        highest, chosen = scores.masked_fill(is_out, -torch.inf).max(-1, keepdim=True)
        best[places[counts]] = highest.squeeze(-1)[counts]
        improved[places[counts]] = torch.take_along_dim(candidates, chosen.unsqueeze(-1), 2).squeeze(2)[counts]
    return best, improved


def _blocks(log_joint: LogJoint, row: Tensor, num_states: int) -> Iterator[tuple[Tensor | None, Tensor, Tensor]]:
    """Yields data points scored together, with places ``(n, k)`` of their rows.

    The places are in ``row (P,)``, ascending; a mask says which count.

    Blocks hold data points with equally many rows if the model can be scored on some of them. Otherwise all have as many as the
    largest.
    """
    number = torch.bincount(row, minlength=log_joint.num_data)
    first = number.cumsum(0) - number
    if log_joint.packed_model is None and len(row):
        every = torch.arange(int(number.max()), device=row.device)
        yield None, (first.unsqueeze(1) + every).clamp(max=len(row) - 1), every < number.unsqueeze(1)
        return
    for size in number[number > 0].unique().tolist():
        for rows in (number == size).nonzero().squeeze(1).split(log_joint.row_blocks(size * num_states)[0].stop):
            places = first[rows].unsqueeze(1) + torch.arange(size, device=row.device)
            yield rows, places, torch.ones_like(places, dtype=torch.bool)
