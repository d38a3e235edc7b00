"""Converged restarts: redundant latents, agreement."""

from __future__ import annotations

from typing import Any

import pyro
import pytest
import torch
from torch import Tensor

from pyro_truncated.datasets import bar_components, linear_bars, matched_bars
from pyro_truncated.models import BinarySparseCoding, SpikeSlabSparseCoding
from pyro_truncated.multistart.config import LearnConfig
from pyro_truncated.multistart.profile import Profile, profile_model
from pyro_truncated.multistart.pruning import num_parameters_per_latent, start_overcomplete
from pyro_truncated.multistart.solution import Solution
from pyro_truncated.multistart.trainer import Trainer, convergence_schedule, train
from pyro_truncated.states.population import Population
from pyro_truncated.utils.console import progress_bar
from tests.multistart.scripted import ScriptedMultiStart


def profile_of(y: Tensor, num_latents: int = 8, **arguments: Any) -> Profile:
    profile = profile_model(
        BinarySparseCoding(y.shape[1], num_latents), y, num_states=32, config=LearnConfig(**{"restart_steps": 10, **arguments})
    )
    return profile.replace(tolerance=0.05)


def start_that_knows(weight: Tensor, y: Tensor) -> Solution:
    pyro.clear_param_store()
    model = BinarySparseCoding(*weight.shape)
    model.weight, model.prior, model.scale = weight.clone(), torch.full((weight.shape[1],), 0.25), torch.tensor(1.0)
    run = Trainer(profile_of(y).replace(model=model))
    run.find_states()
    return run.record(train(run, convergence_schedule(run.profile, 10)))


@pytest.mark.slow
def test_latents_of_a_restart_that_are_redundant_are_in_no_state_and_the_others_show_all_bars() -> None:
    bars = linear_bars(100, 3, mean_active=1.5, generator=torch.Generator().manual_seed(0))
    pyro.set_rng_seed(0)
    profile = profile_of(bars.data, 10)
    found = start_overcomplete(profile)
    is_on = (found.states > 0).any(0).any(0)
    profile.model.load_state_dict(found.parameters)
    assert 6 <= int(is_on.sum()) < 10
    # The states have the posterior that was reached with them.
    assert torch.equal(found.population.free_energy(), found.estimate.each)
    assert matched_bars(profile.model.weight[:, is_on], bars.components) == 6


def test_what_a_latent_is_asked_for_is_counted_among_the_latents_that_are_left() -> None:
    """Each of 4 latents has weights to 9 pixels, a probability, a mean, and is in 4 + 3 entries of the factor of covariances; of 2 in 3."""
    y = torch.randn(20, 9, generator=torch.Generator().manual_seed(0))
    for number, entries in ((4, 7), (2, 3)):
        profile = profile_model(SpikeSlabSparseCoding(9, number, covariance="full"), y)
        assert num_parameters_per_latent(profile) == 9 + 1 + 1 + entries


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number", "disagreement"),
    [
        ("other order", 2, None),
        ("same latents", 2, None),
        ("other latents", 3, "no two of 3 restarts that reached the same free energy"),
    ],
)
def test_starts_of_equal_free_energies_agree_where_they_have_found_the_same_latents(
    kind: str, number: int, disagreement: str | None
) -> None:
    y, truth = linear_bars(100, 4, mean_active=2.0, noise=1.0).data, 10 * bar_components(4)
    start = start_that_knows(truth, y)
    assert start.population is not None

    def shifted(shift: int) -> Solution:
        """What explains other data points equally well by chance is something else, unless the same latents are active."""
        rows = shift if kind == "other latents" else 0
        population = Population(start.population.space, start.population.words.roll(rows, 0), start.population.log_joint.roll(rows, 0))
        return start.replace(estimate=start.estimate._replace(each=start.estimate.each.roll(shift)), population=population)

    starts = iter([start, start_that_knows(truth.flip(1), y)] if kind == "other order" else [shifted(shift) for shift in range(3)])
    found = ScriptedMultiStart(profile_of(y, max_restarts=3), lambda profile: next(starts))
    found.run(progress_bar(False))
    assert len(found.pool.energies) == number
    said = found.rule.disagreement()
    assert said is None if disagreement is None else said is not None and said.startswith(disagreement)
