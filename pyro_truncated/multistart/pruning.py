"""Overcomplete restarts: surplus latents are pruned by their deletion loss."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pyro
import torch
from torch import Tensor

from pyro_truncated.multistart.profile import Profile
from pyro_truncated.multistart.solution import NOTHING, Solution
from pyro_truncated.multistart.trainer import Trainer, convergence_schedule, train
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.search.conditional import Moves, single_changes
from pyro_truncated.states.population import Population
from pyro_truncated.utils.parameter_store import empty_store

# Share of a latent's data points above which another one is its substitute.
_SUBSTITUTE_SHARE = 0.1
# States compared at a time.
_COMPARED_STATES = 2**16


# --- what a model could do without ---


@torch.no_grad()
def deletion_losses(population: Population, log_joint: LogJoint, depth: int = 2) -> tuple[Tensor, Tensor]:
    r"""Returns deletion losses: best log joints lost without each latent.

    Up to ``depth`` other latents may substitute for it.

    .. math:: L_h = \sum_n \Big( \log p(s^*_n, y_n) - \max_{s} \log p(s, y_n) \Big), \qquad s^*_n = \arg\max_{s \in K_n} \log p(s, y_n),

    where the second maximum is over :math:`s^*_n` without :math:`h`, with up to ``depth`` other latents switched on greedily. A latent
    that repeats another one, or stands for two others, has a small loss. One that nothing else explains loses what it explained.

    Returns losses ``(H,)`` in nats, in float64, and the share ``(H, H)`` of data points with latent ``h`` in which latent ``j`` changes
    without ``h``.
    """
    space = population.space
    words, top = population.mode(), population.log_joint.amax(-1).double()
    row, latent = (space.unpack(words) > 0).nonzero().unbind(1)
    states = space.pack(space.unpack(words[row]).scatter_(1, latent.unsqueeze(1), 0))
    scores = torch.empty(len(row), dtype=torch.float64, device=words.device)
    for rows, places, counts in _blocks(log_joint, row, 1):
        scores[places[counts]] = log_joint.score(states[places], rows).double()[counts]
    may_rise, changes = torch.arange(len(row), device=words.device), single_changes(space, words.device)
    for _ in range(depth):
        best, best_states = _add_best_latent(log_joint, row[may_rise], latent[may_rise], states[may_rise], changes)
        # A row that no single latent raises is final.
        rises = best > scores[may_rise]
        may_rise = may_rise[rises]
        scores[may_rise], states[may_rise] = best[rises], best_states[rises]
    losses = torch.zeros(space.num_latents, dtype=torch.float64, device=words.device)
    losses.index_add_(0, latent, (top[row] - scores).clamp(min=0.0))
    change_counts = torch.zeros(space.num_latents, space.num_latents, device=words.device)
    for some in torch.arange(len(row), device=words.device).split(_COMPARED_STATES):
        differs = space.unpack(states[some]) != space.unpack(words[row[some]])
        change_counts.index_add_(0, latent[some], differs.to(change_counts.dtype))
    return losses, (change_counts / change_counts.diagonal().clamp(min=1.0).unsqueeze(1)).fill_diagonal_(0.0)


def value_deletion_losses(population: Population, latents: Tensor, num_values: int) -> Tensor:
    """Returns deletion losses of values of some latents, ``(V,)`` in float64.

    Other states are those of the populations; of a data point that holds none without the value the loss is infinite.
    """
    levels, log_joint = population.states()[..., latents].long(), population.log_joint.double()
    has_value = torch.nn.functional.one_hot(levels, num_values).bool().any(2)
    without = log_joint.unsqueeze(-1).masked_fill(has_value, -torch.inf).amax(1)
    return (log_joint.amax(1, keepdim=True) - without).sum(0)


def redundant_mask(losses: Tensor, num_parameters: int, num_data: int) -> Tensor:
    """Returns which latents are redundant, ``(H,)``, by their deletion losses.

    These are below twice the penalty of the Bayesian information criterion. Twice, because of two that share a component the one that
    stays would move half of the way to the other.
    """
    return losses < num_parameters * math.log(num_data)


def select_for_pruning(losses: Tensor, substitutes: Tensor, number: int) -> Tensor:
    """Returns latents of least deletion loss, none a substitute of another.

    At least one, at most a given number. Of two that share a component each is missed little, and both together much.
    """
    is_substitute = substitutes > _SUBSTITUTE_SHARE
    is_pair, latents = (is_substitute | is_substitute.mT).cpu(), [int(losses.argmin())]
    for latent in losses.argsort().tolist()[1:]:
        if len(latents) < number and not bool(is_pair[latent, latents].any()):
            latents.append(latent)
    return torch.tensor(latents, device=losses.device)


def _add_best_latent(log_joint: LogJoint, row: Tensor, latent: Tensor, states: Tensor, moves: Moves) -> tuple[Tensor, Tensor]:
    """Returns the best log joints ``(P,)`` with one more latent, and which."""
    best, best_states = torch.empty(len(row), dtype=torch.float64, device=states.device), torch.empty_like(states)
    for rows, places, counts in _blocks(log_joint, row, moves.count):
        every = torch.arange(moves.count, device=states.device).expand(*places.shape, -1)
        candidates, value = moves.apply(states[places], every)
        scores = log_joint.score(candidates.flatten(1, 2), rows).double().unflatten(1, every.shape[1:])
        is_out = (latent[places].unsqueeze(-1) == moves.latent) | (value == 0)
        highest, index = scores.masked_fill(is_out, -torch.inf).max(-1, keepdim=True)
        best[places[counts]] = highest.squeeze(-1)[counts]
        best_states[places[counts]] = torch.take_along_dim(candidates, index.unsqueeze(-1), 2).squeeze(2)[counts]
    return best, best_states


def _blocks(log_joint: LogJoint, row: Tensor, num_states: int) -> Iterator[tuple[Tensor | None, Tensor, Tensor]]:
    """Yields data points scored together, with places ``(n, k)`` of their rows.

    The places are in ``row (P,)``, ascending; a mask says which count. Blocks hold data points with equally many rows if the model can be
    scored on some of them. Otherwise all have as many as the largest.
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


# --- overcomplete restarts ---


def start_overcomplete(profile: Profile) -> Solution:
    """Trains with surplus latents, then prunes the redundant ones.

    Redundant latents (see :func:`redundant_mask`) fit noise, slowly and never alike. With closed-form M-steps they are removed too, before
    the run has converged. The free energy is that of the others alone. Parameters are those of all latents asked for; redundant ones are
    unchanged and inactive in all states. The model stays as it is.

    More than 256 binary latents are neither doubled nor pruned: to evaluate each of them costs more than the steps.
    """
    model, steps = profile.model, profile.config.restart_steps
    with empty_store():
        # Pyro's store holds the larger model's parameters under these names.
        pyro.clear_param_store()
        growth = 1 if profile.is_large else profile.config.growth
        larger = profile.replace(model=model.with_latents(torch.arange(model.num_latents).repeat(growth)))
        larger.initialize()
        trainer = Trainer(larger, profile.temperature)
        _take(trainer, steps)
        if profile.is_large:
            return _converge(trainer, max(1, steps // 2))
        trainer, _ = _prune(trainer, model.num_latents)
        if not profile.learns_causes:
            return _converge(trainer, steps)
        original = trainer.record(NOTHING.estimate)
        trainer, positions = _prune(trainer)
        solution = _converge(trainer, steps)
        if len(positions) == model.num_latents:
            return solution
        return _add_inactive_latents(trainer.profile, solution, original, positions)


def _take(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer.step()


def _converge(trainer: Trainer, steps: int) -> Solution:
    return trainer.record(train(trainer, convergence_schedule(trainer.profile, steps)))


def _prune(trainer: Trainer, number: int | None = None) -> tuple[Trainer, Tensor]:
    """Prunes a run's model to so many latents, or redundant ones.

    A third of the surplus goes each time. Returns the run of the last model, and the positions of its latents among the first ones.
    """
    positions = torch.arange(trainer.profile.model.num_latents)
    while len(positions) > (number or 1):
        profile, population, companion = trainer.profile, trainer.truncated_guide.population(), trainer.companion
        losses, substitutes = deletion_losses(population, trainer.scorer(), profile.config.pruning_depth)
        if number is None:
            surplus = int(redundant_mask(losses, num_parameters_per_latent(profile), profile.num_data).sum())
        else:
            surplus = len(positions) - number
        if not surplus:
            break
        latents = select_for_pruning(losses, substitutes, min(max(1, surplus // 3), len(positions) - 1))
        others = torch.ones(len(positions), dtype=torch.bool, device=latents.device).index_fill(0, latents, False).nonzero().squeeze(1)
        # Pyro's store holds the larger model's parameters under these names.
        pyro.clear_param_store()
        trainer = Trainer(profile.replace(model=profile.model.with_latents(others)))
        trainer.take_over(companion)
        trainer.insert_states(trainer.truncated_guide.space.pack(population.states()[..., others]))
        _take(trainer, profile.config.pruning_steps)
        positions = positions[others.to(positions.device)]
    return trainer, positions


def _add_inactive_latents(profile: Profile, solution: Solution, original: Solution, positions: Tensor) -> Solution:
    """Adds inactive latents to learned ones at some positions."""
    number = original.states.shape[-1]
    place = torch.zeros(number, dtype=torch.long).index_copy(0, positions, torch.arange(len(positions)))
    spare = torch.ones(number, dtype=torch.bool).index_fill(0, positions, False).nonzero().squeeze(1)
    profile.parameters.load(solution.parameters)
    parameters = profile.replace(model=profile.model.with_latents(place)).parameters.snapshot()
    for name, value in parameters.items():
        # Sizes differ along axes of latents. Parameters of pairs, such as covariances, have two and stay.
        axes = [axis for axis, (one, other) in enumerate(zip(value.shape, solution.parameters[name].shape, strict=True)) if one != other]
        if len(axes) == 1:
            index = spare.to(value.device)
            parameters[name] = value.index_copy(axes[0], index, original.parameters[name].index_select(axes[0], index))
    states = torch.zeros_like(original.states[:, :1]).repeat(1, solution.states.shape[1], 1)
    states[..., positions] = solution.states
    space, log_joint = original.kept_population.space, solution.kept_population.log_joint
    return solution.replace(parameters=parameters, population=Population(space, space.pack(states), log_joint))


def num_parameters_per_latent(profile: Profile) -> int:
    """Returns how many parameters one latent has, those of pairs included."""
    smaller = profile.replace(model=profile.model.with_latents(torch.arange(profile.model.num_latents - 1)))
    number, fewer = (sum(value.numel() for value in one.parameters.tensors().values()) for one in (profile, smaller))
    return number - fewer
