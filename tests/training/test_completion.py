"""What several starts have found, put together once they are at rest."""

from __future__ import annotations

import pyro
import pytest
import torch
from torch import Tensor

from pyro_truncated.datasets import bar_components, linear_bars, matched_bars
from pyro_truncated.models import BinarySparseCoding, SpikeSlabSparseCoding
from pyro_truncated.training import cooling, multi_start, overcomplete
from pyro_truncated.training.completion import can_complete, completed, mended
from pyro_truncated.training.convergence import to_convergence, train
from pyro_truncated.training.model_parameters import snapshot
from pyro_truncated.training.model_runs import Run, Settings
from pyro_truncated.training.multi_start import MultiStart
from pyro_truncated.training.recombination import Recombination
from pyro_truncated.training.starts import Start
from pyro_truncated.training.stop_rule import Plan
from pyro_truncated.utils.console import progress_bar

SETTINGS = Settings(None, 32)


def start_that_knows(weight: Tensor, y: Tensor) -> Start:
    pyro.clear_param_store()
    model = BinarySparseCoding(*weight.shape)
    model.weight, model.prior, model.scale = weight.clone(), torch.full((weight.shape[1],), 0.25), torch.tensor(1.0)
    run = Run(model, y, SETTINGS)
    run.find_states(y)
    reached = train(run, y, to_convergence(run, 10))
    return Start(reached, snapshot(model, y), run.truncated.population().states())


def bars_of(start: Start) -> int:
    model = BinarySparseCoding(16, 8)
    model.load_state_dict(start.parameters)
    return matched_bars(model.weight, bar_components(4))


def combine(y: Tensor, *starts: Start) -> Start:
    pyro.clear_param_store()
    return completed(BinarySparseCoding(16, 8), y, SETTINGS, starts, 0.05, 10)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_starts_that_have_found_the_same_exchange_nothing() -> None:
    y, truth = linear_bars(200, 4, mean_active=2.0, noise=1.0).data, 10 * bar_components(4)
    best, other = start_that_knows(truth, y), start_that_knows(truth[:, torch.arange(7, -1, -1)], y)
    assert combine(y, best, other) is max(best, other, key=lambda start: start.reached.free_energy)
    assert can_complete(BinarySparseCoding(16, 8))
    assert not can_complete(lambda y: None)


@pytest.mark.slow
def test_a_start_has_the_parameters_that_it_has_reached_after_changes_that_gained_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried is put into the model, from which the parameters of all latents are made."""
    y, filled = linear_bars(100, 3, mean_active=1.5, generator=torch.Generator().manual_seed(0)).data, []
    of_all = overcomplete._filled_up

    def watched(model: BinarySparseCoding, y: Tensor, found: Start, asked: Start, kept: Tensor) -> Start:
        filled.append((kept, found.parameters, of_all(model, y, found, asked, kept).parameters))
        return of_all(model, y, found, asked, kept)

    monkeypatch.setattr(overcomplete, "_filled_up", watched)
    monkeypatch.setattr(Recombination, "_only_beside", lambda *_: [(0, 1)])
    pyro.set_rng_seed(0)
    overcomplete.start_overcomplete(BinarySparseCoding(9, 10), y, Settings(None, 16), lambda _: 1.0, 10, None, 0.05)
    ((kept, found, of_all_latents),) = filled
    assert len(kept) < 10
    torch.testing.assert_close(of_all_latents["weight_unconstrained"][:, kept], found["weight_unconstrained"], rtol=0, atol=0)


def test_what_a_latent_is_asked_for_is_counted_among_the_latents_that_are_left() -> None:
    """Each of 4 latents has weights to 9 pixels, a probability, a mean, and is in 4 + 3 entries of the factor of covariances; of 2 in 3."""
    y = torch.randn(20, 9, generator=torch.Generator().manual_seed(0))
    shrinking = overcomplete._Shrinking(SpikeSlabSparseCoding(9, 4, covariance="full"), y, Settings(None, 4), lambda _: 1.0)
    assert shrinking.num_parameters == 9 + 1 + 1 + 7
    shrinking._lose(torch.tensor([1, 3]))
    assert shrinking.num_parameters == 9 + 1 + 1 + 3
    shrinking._lose(torch.tensor([0]))
    assert shrinking.num_parameters == 9 + 1 + 1 + 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("are_alike", "number", "disagreement"), [(True, 2, None), (False, 3, "no two of 3 starts that reached the same free energy")]
)
def test_starts_of_equal_free_energies_agree_where_they_have_found_the_same_latents(
    monkeypatch: pytest.MonkeyPatch, are_alike: bool, number: int, disagreement: str | None
) -> None:
    y, truth = linear_bars(100, 4, mean_active=2.0, noise=1.0).data, 10 * bar_components(4)
    start = start_that_knows(truth, y)
    # On for other data points: what explains these as well by chance is something else.
    starts = iter(
        [start, start_that_knows(truth.flip(1), y)]
        if are_alike
        else [start._replace(states=start.states.roll(shift, 0)) for shift in range(3)]
    )
    monkeypatch.setattr(multi_start, "start_overcomplete", lambda *args: next(starts))
    found = MultiStart(BinarySparseCoding(16, 8), y, SETTINGS, Plan(3, 2, cooling(1.0, 2), 0.05, None, are_compared=True))
    found.make(progress_bar(False))
    assert len(found.pool.energies) == number
    said = found.rule.disagreement(found.pool)
    assert said is None if disagreement is None else said is not None and said.startswith(disagreement)
