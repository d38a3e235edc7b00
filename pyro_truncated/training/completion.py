"""Combination of converged restarts with closed-form M-steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from pyro_truncated.em.closed_form import ClosedFormModel
from pyro_truncated.em.gibbs import GibbsModel
from pyro_truncated.training.convergence import to_convergence, train
from pyro_truncated.training.model_kinds import ResizableModel
from pyro_truncated.training.model_parameters import forgetting_guides, load_snapshot, snapshot
from pyro_truncated.training.model_runs import Run, Settings, insert_states
from pyro_truncated.training.recombination import Member, recombinations_of
from pyro_truncated.training.starts import Start

# Gain that an exchange of latents needs, relative to the tolerance.
_GAIN = 0.1
# Share of unmatched latents up to which two restarts have found the same.
MOST_MISSED = 0.1


def can_complete(model: Any) -> bool:
    """Whether restarts are compared latent by latent.

    They are for closed-form models of causes that are off at zero.
    """
    return isinstance(model, ResizableModel) and isinstance(model, ClosedFormModel) and not isinstance(model, GibbsModel)


def completed(model: Any, y: Tensor, settings: Settings, starts: Sequence[Start], tolerance: float, steps: int) -> Start:
    """Returns the best restart, improved by latents of the others.

    Of a hundred latents one or two missing ones change the free energy by less than restarts may differ. Chance lets another restart
    miss others. Restarts with the same latents cost only this comparison. Others exchange what differs, see
    :class:`~pyro_truncated.training.recombination.Recombination`.

    Args:
        model: the model; left where one of the starts is.
        y: its data.
        settings: what all runs have in common.
        starts: have ended at rest, each with its states.
        tolerance: free energies per data point that differ by less are the same.
        steps: the most steps after an exchange.
    """
    best, *others = sorted(starts, key=lambda one: one.reached.free_energy, reverse=True)
    recombinations = recombinations_of(model, y, settings, _GAIN * tolerance, best.parameters)
    if not recombinations or any(start.states is None for start in starts):
        return best
    recombination = recombinations[0]
    member = first = recombination.known(best.parameters, cast("Tensor", best.states))
    for other in others:
        member = recombination.complete(member, recombination.known(other.parameters, cast("Tensor", other.states)))
    if member is first:
        return best
    found = _converged(model, y, settings, member, steps)
    return found if found.reached.free_energy > best.reached.free_energy else best


def have_found_the_same(model: Any, y: Tensor, settings: Settings, one: Start, other: Start) -> bool:
    """Whether nine of ten latents of two restarts match, both ways.

    They must be active for the same data points.

    With few data points, or without most latents, free energies of different solutions are close to each other.

    Args:
        model: the model; its parameters are not used.
        y: its data.
        settings: what all runs have in common.
        one: has ended; without its states, or if latents cannot change places, nothing is known of it, and this is true.
        other: another one.
    """
    recombinations = recombinations_of(model, y, settings, 0.0, one.parameters)
    if not recombinations or one.states is None or other.states is None:
        return True
    first = recombinations[0].known(one.parameters, one.states)
    return recombinations[0].share_most(first, recombinations[0].known(other.parameters, other.states), MOST_MISSED)


def mended(model: Any, y: Tensor, settings: Settings, start: Start, tolerance: float, steps: int) -> Start:
    """Replaces difference codes by causes where this raises the free energy.

    Most restarts hold no latent that is active only where another one is, and cost only this check.
    """
    recombinations = recombinations_of(model, y, settings, _GAIN * tolerance, start.parameters)
    if not recombinations or start.states is None:
        return start
    first = recombinations[0].known(start.parameters, start.states)
    member = recombinations[0].resolve_difference_codes(first)
    if member is first:
        return start
    found = _converged(model, y, settings, member, steps)
    return found if found.reached.free_energy > start.reached.free_energy else start


def _converged(model: Any, y: Tensor, settings: Settings, member: Member, steps: int) -> Start:
    load_snapshot(model, y, member.parameters)
    with forgetting_guides(model, y):
        run = Run(model, y, settings)
        insert_states(run, y, member.population.states())
        reached = train(run, y, to_convergence(run, steps))
        assert run.truncated is not None
        return Start(reached, snapshot(model, y), run.truncated.population().states())
