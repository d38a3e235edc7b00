"""Closed-form M-steps driven by SVI: monotone free energies, streaming statistics, errors."""

from __future__ import annotations

import copy
import gc
import itertools
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, ExhaustiveSearch, Population, SampledSearch, Truncated_ELBO
from pyro_truncated.datasets import bar_components, linear_bars, matched_bars, noisy_or_bars
from pyro_truncated.em.gibbs import GibbsEM, GibbsGuide
from pyro_truncated.models import BinarySparseCoding, GaussianMixture, MaxSpikeSlabSparseCoding, NoisyOr
from pyro_truncated.multistart import best_start
from pyro_truncated.search import Cosine, GPSelect, Preselection, SearchBatch
from pyro_truncated.utils.annealing import cooling
from tests import zoo


def problem(name: str, missing: bool = False):
    generator = torch.Generator().manual_seed(1)
    if name == "bsc":
        y = linear_bars(150, 4, mean_active=2.0, generator=generator).data.double()
        model = BinarySparseCoding(16, 8, dtype=torch.float64)
    else:
        y = noisy_or_bars(150, 4, generator=generator).data.double()
        model = NoisyOr(16, 8, dtype=torch.float64)
    if missing:
        y[torch.rand(y.shape, generator=generator) < 0.2] = torch.nan
    return model.initialize(y, generator), y


def assert_never_falls(losses: list[float]) -> None:
    for before, after in itertools.pairwise(losses):
        assert after <= before + 1e-8 * abs(before)


SEARCHES = {
    "exhaustive": lambda: ExhaustiveSearch(),
    "fitparents-randflips": lambda: EvolutionarySearch(4, 3, 2),
    "randparents-cross-sparseflips": lambda: EvolutionarySearch(4, 3, 2, selection="randparents", crossover=True, mutation="sparseflips"),
    "sampled + evolutionary": lambda: SampledSearch(4) + EvolutionarySearch(3, 2, 1),
}


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("search", SEARCHES, ids=str)
@pytest.mark.parametrize("name", ["bsc", "noisy-or"])
def test_free_energy_never_falls_over_whole_runs(name, search, missing):
    model, y = problem(name, missing)
    guide = AutoTruncated(model, num_states=256 if search == "exhaustive" else 20)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(SEARCHES[search]()))
    losses = [svi.step(y) for _ in range(40)]
    assert_never_falls(losses)
    assert losses[-1] < losses[0] - 10
    # The step reports the free energy before its M-step; the one after is at least as good.
    assert svi.evaluate_loss(y) <= losses[-1] + 1e-8 * abs(losses[-1])


@pytest.mark.slow
def test_incremental_minibatches_never_lose_free_energy_and_reach_that_of_full_batches():
    model, y = problem("bsc")
    guide = AutoTruncated(model, num_states=256)
    elbo = Truncated_ELBO(ExhaustiveSearch())
    svi = SVI(model, guide, ClosedForm(model), elbo)
    svi.step(y)
    closed_form = svi.optim
    closed_form.visited = torch.ones(len(y), dtype=torch.bool)
    bound = [svi.evaluate_loss(y)]
    for _ in range(60):
        svi.step(y, 30)
        # With all data visited, F at the populations' own weights never falls; with exact weights neither does the evidence of the
        # statistics' fit.
        bound.append(expected_bound(model, guide, y))
    assert_never_falls(bound[1:])
    other, _ = problem("bsc")
    pyro.clear_param_store()
    svi = SVI(other, AutoTruncated(other, num_states=256), ClosedForm(other), Truncated_ELBO(ExhaustiveSearch()))
    for _ in range(13):
        full = svi.step(y)
    assert elbo.loss(model, guide, y) < full + 1.0


def expected_bound(model, guide, y) -> float:
    """Minus E_q log p(y, s) - H(q) with the weights as stored when each data point was visited last: what incremental EM ascends."""
    weights = guide.population().weights()
    now = guide.posterior(y).log_joint
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum()
    return float(-(weights * now).sum() - entropy)


@pytest.mark.slow
def test_streamed_statistics_equal_those_of_the_stored_populations():
    model, y = problem("bsc")
    guide = AutoTruncated(model, num_states=20)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(4, 3, 1)))
    for _ in range(120):
        svi.step(y, 20)
    visited = svi.optim.visited
    assert visited.all()
    whole = model.sufficient_statistics(guide.population(), y)
    for name, value in whole.items():
        torch.testing.assert_close(svi.optim.statistics[name], value, rtol=1e-9, atol=1e-7)


def test_scores_changed_behind_its_back_are_taken_into_account():
    model, y = problem("bsc")
    guide = AutoTruncated(model, num_states=20)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(4, 3, 1)))
    svi.step(y)
    for _ in range(5):
        svi.step(y, 20)
    guide.refresh_(y)
    svi.step(y, 20)
    assert svi.optim.statistics["num_data"] == 150
    for name, value in model.sufficient_statistics(guide.population(), y).items():
        torch.testing.assert_close(svi.optim.statistics[name], value, rtol=1e-9, atol=1e-7)


def test_full_batches_and_minibatches_mix():
    model, y = problem("bsc")
    guide = AutoTruncated(model, num_states=20)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(4, 3, 1)))
    for batch_size in (20, None, 20, 20, None, 30):
        svi.step(y, batch_size)
        if batch_size != 20 or svi.optim.visited.all():
            assert svi.optim.statistics["num_data"] == pytest.approx(150)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bsc", "noisy-or"])
def test_online_minibatches_learn(name):
    model, y = problem(name)
    guide = AutoTruncated(model, num_states=40)
    closed_form = ClosedForm(model, minibatch="online")
    svi = SVI(model, guide, closed_form, Truncated_ELBO(EvolutionarySearch(4, 3, 2)))
    svi.step(y, 50)
    before = svi.evaluate_loss(y)
    for _ in range(60):
        svi.step(y, 50)
    guide.refresh_(y)
    assert svi.evaluate_loss(y) < before - 50
    assert closed_form.statistics["num_data"] == pytest.approx(150)


@pytest.mark.slow
def test_gradients_reach_what_closed_form_reaches():
    model, y = problem("bsc")
    guide = AutoTruncated(model, num_states=256)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    for _ in range(60):
        closed = svi.step(y)
    svi.optim.release()
    svi = SVI(model, guide, Adam({"lr": 1e-3}), Truncated_ELBO(ExhaustiveSearch()))
    for _ in range(60):
        gradient = svi.step(y)
    # The optimum of one is a stationary point of the other.
    assert gradient == pytest.approx(closed, rel=2e-3)


@pytest.mark.slow
def test_annealing_is_em_again_once_it_has_cooled_down():
    model, y = problem("bsc")
    guide = AutoTruncated(model, num_states=256)
    elbo = Truncated_ELBO(ExhaustiveSearch(), temperature=lambda t: max(1.0, 6.0 - 0.5 * t))
    svi = SVI(model, guide, ClosedForm(model), elbo)
    warm = [svi.step(y) for _ in range(11)]
    cold = [svi.step(y) for _ in range(20)]
    assert_never_falls(cold)
    assert cold[-1] < warm[0]


def test_a_warm_m_step_uses_the_softened_posterior():
    model, y = problem("bsc")
    guide = AutoTruncated(model, num_states=256)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(ExhaustiveSearch(), temperature=3.0))
    weights = (ExhaustiveSearch().propose(make_batch(guide, y)).log_joint / 3.0).softmax(-1)
    states = guide.space.unpack(guide.space.enumerate(), torch.float64)
    expected = (weights @ states).mean()
    svi.step(y)
    torch.testing.assert_close(model.prior.detach(), expected, rtol=1e-9, atol=1e-12)


def make_batch(guide, y) -> SearchBatch:
    log_joint = guide.make_scorer(y)
    with torch.no_grad():
        return SearchBatch(guide.posterior(y), log_joint.score)


@pytest.mark.nightly
def test_best_start_keeps_the_best_of_its_runs():
    bars = noisy_or_bars(400, 4, generator=torch.Generator().manual_seed(0))
    model = NoisyOr(16, 8)
    reached = best_start(model, bars.data, ExhaustiveSearch(), num_starts=4, num_data=400, steps=10, num_states=256)
    assert len(reached) == 4
    assert ClosedForm.find(model) is None
    driver = ClosedForm(model)
    best_start(model, bars.data, ExhaustiveSearch(), num_starts=1, num_data=400, steps=1, num_states=256)
    assert ClosedForm.find(model) is driver
    driver.release()
    reached = best_start(model, bars.data, ExhaustiveSearch(), num_starts=4, num_data=400, steps=10, num_states=256)
    guide = AutoTruncated(model, num_states=256)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, guide, bars.data)
    # What a start reached was measured before its last M-step.
    assert max(reached) <= -loss / 400 < max(reached) + 0.3


@pytest.mark.nightly
def test_best_start_by_gibbs_sampling():
    torch.manual_seed(3)
    components = 8 * bar_components(3)
    states = (torch.rand(200, 6) < 1 / 3).float()
    y = (states.unsqueeze(1) * components).amax(-1) + torch.randn(200, 9)
    model = MaxSpikeSlabSparseCoding(9, 6)
    search = Preselection(Cosine(lambda: model.weight), 4, explore=0.0)
    reached = best_start(model, y, search, num_starts=4, num_data=200, steps=12, temperature=lambda step: max(1.0, 3.0 - step / 3))
    # The parameters are those of the best run: going on from there does at least as well at once, up to the noise of sampling. It does
    # better where twelve steps were too few.
    loss = SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(search, burn_in=10)).step(y)
    assert max(reached) - min(reached) > 1.0
    assert -loss / len(y) > max(reached) - 0.5
    with pytest.raises(TypeError, match="for a Gibbs sampler one that selects latents"):
        best_start(model, y, ExhaustiveSearch())


@pytest.mark.nightly
def test_training_goes_on_from_a_best_start_by_gibbs_sampling():
    """A first M-step of chains that had just begun lost all bars and thirty nats per data point."""
    bars = linear_bars(300, 4, mean_active=1.6, generator=torch.Generator().manual_seed(0))
    y = bars.data.clamp(min=0.0)
    torch.manual_seed(0)
    model, search = MaxSpikeSlabSparseCoding(16, 8), GPSelect(4, kernel="linear")
    reached = best_start(model, y, search, num_starts=1, num_data=300, steps=30, temperature=cooling(5.0, 30))
    assert matched_bars(model.weight, bars.components, 0.95) == 8
    svi = SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(search))
    # The mean log joint of single steps differs by some tenths between steps.
    assert -svi.step(y) / len(y) > reached[0] - 1.0
    assert matched_bars(model.weight, bars.components, 0.95) == 8


def test_starts_of_a_mixture_end_at_convergence(monkeypatch):
    """Three clusters ten deviations apart: every start finds them in a few steps, and a further one would change nothing."""
    y = torch.randn(90, 2, generator=torch.Generator().manual_seed(0)) + 10 * torch.arange(3.0).repeat(30)[:, None]
    steps, maximize = [], GaussianMixture.maximize
    monkeypatch.setattr(GaussianMixture, "maximize", lambda self, statistics: steps.append(1) or maximize(self, statistics))
    model = GaussianMixture(2, 3)
    reached = best_start(model, y, ExhaustiveSearch(), num_starts=2, num_data=90, steps=500)
    assert len(steps) < 60
    loss = Truncated_ELBO(ExhaustiveSearch()).loss(model, AutoTruncated(model, num_states=3), y)
    assert -loss / 90 == pytest.approx(max(reached), abs=1e-3)


def test_best_start_checks_its_arguments():
    with pytest.raises(TypeError, match="needs a model with the method initialize"):
        best_start(lambda y: None, torch.zeros(3, 4), ExhaustiveSearch())


# --- errors ---


def test_models_without_closed_form_are_refused():
    with pytest.raises(TypeError, match="needs a model with the methods sufficient_statistics and maximize; function lacks"):
        ClosedForm(zoo.binary().model)
    with pytest.raises(ValueError, match="minibatch must be 'incremental' or 'online'; got 'batch'"):
        ClosedForm(BinarySparseCoding(4, 2), minibatch="batch")
    with pytest.raises(ValueError, match=r"'incremental' is not exact for NoisyOr.*Use minibatch='online'"):
        ClosedForm(NoisyOr(4, 2), minibatch="incremental")


def test_another_optimiser_on_a_closed_form_model_is_noticed():
    model, y = problem("bsc")
    guide = AutoTruncated(model, num_states=20)
    closed_form = ClosedForm(model)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Truncated_ELBO(EvolutionarySearch(4, 3, 1)))
    svi.step(y)
    with pytest.raises(RuntimeError, match="SVI is being driven by another optimiser"):
        svi.step(y)
    closed_form.release()
    svi.step(y)
    with pytest.raises(RuntimeError, match="has no statistics to use"):
        closed_form([])


def test_incremental_statistics_refuse_a_changing_temperature():
    model, y = problem("bsc")
    guide = AutoTruncated(model, num_states=20)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(4, 3, 1), temperature=lambda t: 2.0))

    def train() -> None:
        for _ in range(20):
            svi.step(y, 50)

    with pytest.raises(ValueError, match="cannot follow a changing temperature"):
        train()


@pytest.mark.slow
def test_state_resumes():
    model, y = problem("bsc")
    guide = AutoTruncated(model, num_states=20)
    closed_form = ClosedForm(model)
    elbo = Truncated_ELBO(ExhaustiveSearch())
    svi = SVI(model, guide, closed_form, elbo)
    for _ in range(10):
        svi.step(y, 50)
    saved = {"model": {k: v.clone() for k, v in model.state_dict().items()}, "guide": {k: v.clone() for k, v in guide.state_dict().items()}}
    state, rng = closed_form.get_state(), torch.get_rng_state()
    expected = [svi.step(y, 50) for _ in range(5)]
    pyro.clear_param_store()
    fresh, _ = problem("bsc")
    fresh.load_state_dict(saved["model"])
    other = AutoTruncated(fresh, num_states=20)
    other.load_state_dict(saved["guide"])
    optimiser = ClosedForm(fresh)
    optimiser.set_state(state)
    torch.set_rng_state(rng)
    svi = SVI(fresh, other, optimiser, Truncated_ELBO(ExhaustiveSearch()))
    assert [svi.step(y, 50) for _ in range(5)] == expected


def test_best_start_of_a_small_space_takes_all_of_it():
    y = linear_bars(40, 2, mean_active=1.0, generator=torch.Generator().manual_seed(0)).data
    runs = []
    for options in ({}, {"num_states": 16}):
        pyro.set_rng_seed(0)
        runs.append(best_start(BinarySparseCoding(4, 4), y, EvolutionarySearch(2, 2), num_starts=2, steps=2, **options))
    assert len(runs[0]) == 2
    assert runs[0] == runs[1]


def test_online_em_of_one_component_converges_to_the_moments_of_all_data():
    # With steps 1 / (t + 1) the statistics are the mean over the minibatches: after each data point was in one, those of all data.
    y = torch.randn(60, 3, dtype=torch.float64) * 2 + torch.tensor([1.0, -5.0, 3.0], dtype=torch.float64)
    model = GaussianMixture(3, 1, pseudo_data=0.0, dtype=torch.float64).initialize(y)
    guide = AutoTruncated(model, num_states=1)
    guide.refresh_(y)
    closed_form = ClosedForm(model, minibatch="online", step_size=lambda step: 1 / (step + 1))
    for indices in torch.randperm(60).split(10):
        closed_form.collect(model.sufficient_statistics(guide.population(indices), y), None, indices, 60)
        closed_form(())
    for name, value in model.sufficient_statistics(guide.population(), y).items():
        torch.testing.assert_close(closed_form.statistics[name], value)
    torch.testing.assert_close(model.loc.detach()[0], y.mean(0))
    covariance = model.scale.detach()[0] @ model.scale.detach()[0].mT
    torch.testing.assert_close(covariance, y.mT.cov(correction=0))


def test_online_statistics_are_blended_at_the_default_step_size():
    model, y = problem("bsc")
    closed_form = ClosedForm(model, minibatch="online")
    svi = SVI(model, AutoTruncated(model, num_states=20), closed_form, Truncated_ELBO(EvolutionarySearch(4, 3, 1)))
    collect, batches = closed_form.collect, []
    closed_form.collect = lambda new, *rest, **how: batches.append(dict(new)) or collect(new, *rest, **how)
    expected = None
    for step in range(6):
        svi.step(y, 50)
        rate = 1.0 if expected is None else (step + 2) ** -0.6
        whole = {name: 3 * value for name, value in batches[-1].items()}
        expected = {name: rate * value + (0 if expected is None else (1 - rate) * expected[name]) for name, value in whole.items()}
        for name, value in expected.items():
            torch.testing.assert_close(closed_form.statistics[name], value)


@pytest.mark.slow
def test_the_model_is_left_as_it_is_and_goes_back_to_gradients_with_the_object():
    model, y = problem("bsc")
    before = dict(vars(model))
    svi = SVI(model, AutoTruncated(model, num_states=20), ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    assert vars(model) == before
    assert ClosedForm.find(model) is svi.optim
    # A copy is another model, which nobody drives; a copy of both is driven by the copy.
    assert ClosedForm.find(copy.deepcopy(model)) is None
    both = copy.deepcopy((model, svi.optim))
    assert ClosedForm.find(both[0]) is both[1]
    del svi
    gc.collect()
    assert ClosedForm.find(model) is None
    svi = SVI(model, AutoTruncated(model, num_states=20), Adam({"lr": 0.01}), Truncated_ELBO(ExhaustiveSearch()))
    assert svi.step(y) > svi.step(y)
    assert ClosedForm.find(lambda y: None) is None


def test_statistics_of_a_model_that_is_no_module_are_put_back() -> None:
    class Plain:
        def sufficient_statistics(self, population: Population, *args: Any, temperature: float = 1.0) -> dict[str, Tensor]:
            return {}

        def maximize(self, statistics: dict[str, Tensor]) -> None:
            pass

    optimizer, again = ClosedForm(Plain()), ClosedForm(Plain())
    optimizer.statistics, optimizer.num_steps = {"sums": torch.arange(3.0)}, 4
    again.set_state(optimizer.get_state())
    assert again.statistics is not None
    assert torch.equal(again.statistics["sums"], torch.arange(3.0))
    assert again.num_steps == 4
