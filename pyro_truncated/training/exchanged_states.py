"""States exchanged between starts whose parameters cannot change places, such as those of networks."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pyro.poutine as poutine
import torch
from pyro.infer import SVI, Trace_ELBO
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from pyro_truncated.distributed.shards import total_rows
from pyro_truncated.states.population import Population
from pyro_truncated.training.exchangeable import exchangeable_latents
from pyro_truncated.training.medians import Medians
from pyro_truncated.training.model_parameters import copies, forgetting_guides, put_back
from pyro_truncated.training.model_runs import Run, Settings, offer, optimizer_of
from pyro_truncated.training.resting import climbed, trained
from pyro_truncated.training.starts import Start
from pyro_truncated.utils.generators import device_of

# How many changes of states are tried for each start, and how many of them take a latent of another one.
_TRIED, _FROM_OTHERS = 16, 0.75
# Correlation of its likeliest states above which a latent is the same in two starts.
_SAME = 0.9
# Steps, in those of a start, that fit parameters to changed states, and how far below where it was a model may be after that to be trained.
_FITTING, _HOPELESS = 2.5, 1.5


class _Member(NamedTuple):
    """Parameters, populations ``(N, S, L)`` with their likeliest states ``(N, L)``, and the free energy per data point."""

    free_energy: float
    parameters: dict[str, Tensor]
    states: Tensor
    likeliest: Tensor


def can_exchange_states(model: Any, y: Tensor, settings: Settings, state: dict[str, Tensor]) -> bool:
    """Whether starts exchange states: of latents alike, one binary vector per data point, to which less than half of the parameters belong.

    Args:
        model: the model; left with random parameters.
        y: its data, all of which one process has.
        settings: what all runs have in common.
        state: parameters in which latents differ.
    """
    guide = settings.guide_for(model, y)
    layout = guide.layout
    is_vector = len(layout.sites) == 1 and layout.space.is_binary and layout.space.num_latents > 1
    if not is_vector or layout.other_latents or not layout.num_data == len(y) == total_rows(y):
        return False
    learned = Medians(model, y, guide)
    owned = {name for group in exchangeable_latents(learned, state) for name in group.axes}
    numbers = {name: value.numel() for name, value in learned.learned(state).items()}
    return 0 < 2 * sum(numbers[name] for name in owned) < sum(numbers.values())


def taken_over(states: Tensor, others: Tensor, generator: torch.Generator | None) -> Tensor | None:
    """States in which one latent has the states of the latent of another start that resembles it most.

    Latents are matched one to one, by the sizes of their correlations. Of what is on in more than half of the data points the complement
    is taken over.

    Args:
        states: likeliest states of a start, ``(N, L)``.
        others: those of another one, ``(N, L)``.
        generator: draws the latent from those that are not the same in both.

    Returns:
        States ``(N, L)``; nothing if all latents are the same, or each other's complements.
    """
    number = states.shape[1]
    both = torch.cat([states, others], 1).T.double().cpu()
    correlation = torch.corrcoef(both).nan_to_num()[:number, number:].abs()
    partner = torch.from_numpy(linear_sum_assignment(correlation.numpy(), maximize=True)[1])
    differs = (correlation.gather(1, partner.unsqueeze(1)).squeeze(1) < _SAME).nonzero().squeeze(1)
    if not len(differs):
        return None
    here = int(differs[_drawn(len(differs), generator)])
    changed, taken = states.clone(), others[:, partner[here]]
    changed[:, here] = taken if 2 * int(taken.sum()) <= len(taken) else 1 - taken
    return changed


def switched_off(states: Tensor, generator: torch.Generator | None) -> Tensor | None:
    """States ``(N, L)`` in which one latent is off where another one is on, both drawn at random; nothing if that changes none."""
    here, there = _drawn(states.shape[1], generator), _drawn(states.shape[1], generator)
    changed = states.clone()
    changed[:, here] *= 1 - states[:, there]
    return changed if here != there and bool((changed != states).any()) else None


def _drawn(number: int, generator: torch.Generator | None) -> int:
    return int(torch.randint(number, (), generator=generator, device=device_of(generator)))


class ExchangedStates:
    r"""Exchanges states between starts of a model of which no parameters belong to one latent, such as the weights of a network.

    A latent that another start has found is taken over with its likeliest states, in the place of the one that resembles it most; in one of
    four changes a latent is switched off where another one is on, as what stands for two causes together had better be. Parameters are
    fitted to the likeliest states that this makes, :math:`\max_\theta \log p(\hat s, y \mid \theta)`, and unless that leaves the model far
    below where it was, it is trained; what has gained takes the place of what it came from. Pairs of starts, latents, and changes are drawn
    at random, the better one of two in the pair being changed, so that the others go on being different.

    Args:
        model: the model, trained by gradients; its parameters are changed.
        y: its data.
        settings: what all runs have in common.
        steps: those of a start.
        tolerance: least gain in free energy per data point.
        generator: source of randomness.
    """

    def __init__(self, model: Any, y: Tensor, settings: Settings, steps: int, tolerance: float, generator: torch.Generator | None) -> None:
        self._model, self._y, self._steps, self._tolerance, self._generator = model, y, steps, tolerance, generator
        self._settings = dataclasses.replace(settings, clip=torch.inf)
        # In the end steps are as long for all parameters: that fits them in a third of the time.
        self._finely = dataclasses.replace(settings, clip=Settings.clip)

    def best(self, starts: list[Start]) -> Start:
        """The best that comes of the starts, each of which has its states."""
        members = [self._member_of(start) for start in starts]
        for _ in range(_TRIED * len(starts)):
            one, two, other = (_drawn(len(members), self._generator) for _ in range(3))
            one = max(one, two, key=lambda index: members[index].free_energy)
            changed = None if one == other else self._changed(members[one].likeliest, members[other].likeliest)
            child = None if changed is None else self._child(members[one], changed)
            if child is not None and child.free_energy > members[one].free_energy + self._tolerance:
                members[one] = child
        return self._ended(max(members, key=lambda member: member.free_energy))

    def _changed(self, states: Tensor, others: Tensor) -> Tensor | None:
        """States ``(N, L)`` of which one latent has changed; nothing if there is none to be changed."""
        if torch.rand((), generator=self._generator, device=device_of(self._generator)) > _FROM_OTHERS:
            return switched_off(states, self._generator)
        return taken_over(states, others, self._generator)

    def _child(self, parent: _Member, changed: Tensor) -> _Member | None:
        """What training makes of a member whose likeliest states have changed; nothing if these cannot be explained."""
        put_back(self._model, self._y, parent.parameters)
        with forgetting_guides(self._model, self._y):
            self._fit(changed)
            run = self._run(self._settings.slowing(self._steps), torch.cat([parent.states, changed.unsqueeze(1)], 1))
            if run.step(self._y) < parent.free_energy - _HOPELESS:
                return None
            reached = trained(run, self._y, self._steps)
            return self._member(run, reached.free_energy)

    def _fit(self, states: Tensor) -> None:
        """Fits the parameters to one state ``(N, L)`` for each data point."""
        steps = max(1, round(_FITTING * self._steps))
        settings, layout = self._settings.slowing(steps), self._settings.guide_for(self._model, self._y).layout
        known = poutine.condition(self._model, data=layout.site_values(states, (len(states),)))
        svi = SVI(known, lambda y: None, optimizer_of(settings, self._y), Trace_ELBO())
        for _ in range(steps):
            svi.step(self._y)

    def _ended(self, member: _Member) -> Start:
        """The best one after as many steps as it takes until it is at rest: parameters fit what has been exchanged only roughly."""
        put_back(self._model, self._y, member.parameters)
        with forgetting_guides(self._model, self._y):
            run = self._run(self._finely, member.states)
            reached = climbed(run, self._y, self._steps)
            assert run.truncated is not None
            return Start(reached, copies(self._model, self._y), run.truncated.population().states())

    def _run(self, settings: Settings, states: Tensor) -> Run:
        run = Run(self._model, self._y, settings)
        offer(run, self._y, states)
        return run

    def _member_of(self, start: Start) -> _Member:
        assert start.states is not None
        put_back(self._model, self._y, start.parameters)
        with forgetting_guides(self._model, self._y):
            return self._member(self._run(self._settings, start.states), start.reached.free_energy)

    def _member(self, run: Run, free_energy: float) -> _Member:
        assert run.truncated is not None
        population: Population = run.truncated.population()
        states = population.space.unpack(population.mode())
        return _Member(free_energy, copies(self._model, self._y), population.states(), states)
