"""Revival of dead shared latents: active in no state, so never trained."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.states.population import Population
from pyro_truncated.training.convergence import by_gradients, fixed, train
from pyro_truncated.training.model_parameters import forgetting_guides, load_snapshot, parameters_of
from pyro_truncated.training.model_runs import Run, Settings, insert_states
from pyro_truncated.training.starts import AsTheyAre, Start, start_of
from pyro_truncated.utils.budget import rows_per_block

# At this temperature all states count alike.
_HOT = 1e9
# Probabilities and gradients that count as zero.
_NOTHING = 1e-8
# Most latents revived at once, each in a state of its own; most rounds, as likelihoods may be unbounded.
_MOST, _ROUNDS = 512, 4
# Memory of these states; with more posteriors fewer latents are revived at once.
_BYTES = 2**28


def revive_dead_latents(model: Any, y: Tensor, settings: Settings, start: Start, tolerance: float, steps: int) -> Start:
    r"""Revives dead binary latents that all data share, if that gains.

    With a posterior for each data point most latents are active somewhere, and their parameters are learned. In a single posterior a
    latent may be inactive in all states because of its initial parameters, which nothing then corrects. Here parameters are fitted to
    the likeliest state :math:`s`, and to all states with one dead latent :math:`l` added,

    .. math:: \max_\theta \; \log p(s, y \mid \theta) + \sum_l \log p(s + e_l, y \mid \theta),

    so that each explains a part of the residual. Then states are searched and the model is trained, while the free energy rises.

    Args:
        model: the model, trained by gradients; left somewhere else.
        y: its data.
        settings: what all runs have in common.
        start: has ended, with its states.
        tolerance: gain in free energy per posterior that is worth another round.
        steps: steps of each fit, and least number of those after it.
    """
    if start.states is None or start.beside:
        return start
    for _ in range(_ROUNDS):
        asleep = _asleep(model, y, settings, start)
        if not len(asleep):
            break
        _fit_alive(model, y, settings, start, asleep, steps)
        child = _trained(model, y, settings, start, steps)
        if not child.reached.free_energy > start.reached.free_energy + tolerance:
            break
        start = child
    return start


def _asleep(model: Any, y: Tensor, settings: Settings, start: Start) -> Tensor:
    """Returns dead binary latents whose parameters a step does not change.

    Of too many a random part.
    """
    assert start.states is not None
    load_snapshot(model, y, start.parameters)
    with forgetting_guides(model, y):
        run = Run(model, y, settings)
        insert_states(run, y, start.states)
        run.step(y)
        assert run.truncated is not None
        population = run.truncated.population()
        is_off = (population.marginals().amax(0) < _NOTHING).cpu()
        latents = (is_off & (population.space.cardinality.cpu() == 2)).nonzero().squeeze(1)
        is_taught = all(_have_moved(value, start.parameters[name]) for name, value in parameters_of(model, y).items())
    if is_taught:
        return latents[:0]  # type: ignore[no-any-return]
    most = min(_MOST, rows_per_block(start.states[:, 0].numel() * start.states.element_size(), _BYTES))
    return latents if len(latents) <= most else latents[torch.randperm(len(latents), device="cpu")[:most].sort().values]  # type: ignore[no-any-return]


def _have_moved(after: Tensor, before: Tensor) -> bool:
    """Whether a first Adam step has moved all entries of a parameter.

    It is equally long for all gradients that are not zero.
    """
    step = (after.detach() - before).abs()
    return bool((step.max() > 0) & (step >= step.max() / 2).all())


def _fit_alive(model: Any, y: Tensor, settings: Settings, start: Start, asleep: Tensor, steps: int) -> None:
    """Fits parameters to the likeliest states, with dead latents added in turn."""
    load_snapshot(model, y, start.parameters)
    with forgetting_guides(model, y):
        run = Run(model, y, dataclasses.replace(settings, search=AsTheyAre(), num_states=1 + len(asleep)), lambda _: _HOT)
        scorer, guide = run.scorer(y), run.truncated
        assert guide is not None
        assert start.states is not None
        words = guide.space.pack(start.states)
        likeliest = Population(guide.space, words, scorer.score(words)).mode()
        states = guide.space.unpack(likeliest).unsqueeze(1).repeat(1, 1 + len(asleep), 1)
        states[:, torch.arange(1, 1 + len(asleep)), asleep] = 1
        words = guide.space.pack(states)
        guide.populations.store_(scorer.score(words), None, words)
        train(run, y, fixed(steps))


def _trained(model: Any, y: Tensor, settings: Settings, start: Start, steps: int) -> Start:
    """Trains from present parameters and searched states of a restart."""
    assert start.states is not None
    with forgetting_guides(model, y):
        run = Run(model, y, settings)
        insert_states(run, y, start.states)
        run.find_states(y)
        reached = train(run, y, by_gradients(run, steps))
        assert run.truncated is not None
        return start_of(run, model, y, reached)._replace(states=run.truncated.population().states())
