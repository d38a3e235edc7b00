"""What several starts have found, put together once they are at rest."""

from __future__ import annotations

import pyro
import torch
from torch import Tensor

from pyro_truncated.datasets import bar_components, linear_bars, matched_bars
from pyro_truncated.models import BinarySparseCoding
from pyro_truncated.training.completion import can_complete, completed, mended
from pyro_truncated.training.model_parameters import copies
from pyro_truncated.training.model_runs import Run, Settings
from pyro_truncated.training.resting import rested
from pyro_truncated.training.starts import Start

SETTINGS = Settings(None, 32)


def start_that_knows(weight: Tensor, y: Tensor) -> Start:
    pyro.clear_param_store()
    model = BinarySparseCoding(*weight.shape)
    model.weight, model.prior, model.scale = weight.clone(), torch.full((weight.shape[1],), 0.25), torch.tensor(1.0)
    run = Run(model, y, SETTINGS)
    run.find_states(y)
    reached = rested(run, y, 10)
    return Start(reached, copies(model, y), run.truncated.population().states())


def bars_of(start: Start) -> int:
    model = BinarySparseCoding(16, 8)
    model.load_state_dict(start.parameters)
    return matched_bars(model.weight, bar_components(4))


def combine(y: Tensor, *starts: Start) -> Start:
    pyro.clear_param_store()
    return completed(BinarySparseCoding(16, 8), y, SETTINGS, starts, 0.05, 10)


def test_starts_that_miss_different_causes_have_all_of_them_together() -> None:
    y, truth = linear_bars(400, 4, mean_active=2.0, noise=1.0).data, 10 * bar_components(4)
    found = []
    for missed, other in ((2, 5), (6, 1)):
        # One latent for either of two bars, and one that makes the other one of it: free energies hardly show it.
        weight = truth.clone()
        weight[:, missed] -= truth[:, other]
        found.append(start_that_knows(weight, y))
    assert [bars_of(start) for start in found] == [7, 7]
    together = combine(y, *found)
    assert bars_of(together) == 8
    assert together.reached.free_energy > max(start.reached.free_energy for start in found)


def test_a_latent_that_is_on_only_where_another_one_is_becomes_the_cause_that_both_stand_for() -> None:
    y, truth = linear_bars(400, 4, mean_active=2.0, noise=1.0).data, 10 * bar_components(4)
    weight = truth.clone()
    weight[:, 2] -= truth[:, 5]
    found = []
    for start in (start_that_knows(truth, y), start_that_knows(weight, y)):
        pyro.clear_param_store()
        found.append((start, mended(BinarySparseCoding(16, 8), y, SETTINGS, start, 0.05, 10)))
    (complete, same), (lesser, whole) = found
    assert same is complete
    assert (bars_of(lesser), bars_of(whole)) == (7, 8)
    assert abs(whole.reached.free_energy - complete.reached.free_energy) < 0.05


def test_starts_that_have_found_the_same_exchange_nothing() -> None:
    y, truth = linear_bars(200, 4, mean_active=2.0, noise=1.0).data, 10 * bar_components(4)
    best, other = start_that_knows(truth, y), start_that_knows(truth[:, torch.arange(7, -1, -1)], y)
    assert combine(y, best, other) is max(best, other, key=lambda start: start.reached.free_energy)
    assert can_complete(BinarySparseCoding(16, 8))
    assert not can_complete(lambda y: None)
