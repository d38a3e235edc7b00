"""Gibbs sampling over selected latents as a guide: chains go on, selections follow the marginals, errors."""

from __future__ import annotations

import copy
import inspect

import pyro
import pytest
import torch
from pyro.infer import SVI, Predictive
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, GibbsEM, GibbsGuide, GPSelect, Preselection, Truncated_ELBO
from pyro_truncated.datasets import linear_bars, matched_bars
from pyro_truncated.em import GibbsModel
from pyro_truncated.em.gibbs import GibbsDraws
from pyro_truncated.models import BinarySparseCoding, MaxSpikeSlabSparseCoding
from pyro_truncated.search import Cosine, SearchBatch, Singletons
from tests.models.enumeration import generate

NUM_DATA, NUM_OBSERVED, NUM_LATENTS = 30, 7, 5


def problem() -> tuple[MaxSpikeSlabSparseCoding, Tensor]:
    model = MaxSpikeSlabSparseCoding(NUM_OBSERVED, NUM_LATENTS)
    model.weight = 4 * torch.rand(NUM_OBSERVED, NUM_LATENTS)
    return model, generate(model, NUM_DATA)


class Spy:
    """An affinity that remembers what it was shown."""

    def __init__(self) -> None:
        self.batches: list[SearchBatch] = []

    def __call__(self, batch: SearchBatch) -> Tensor:
        self.batches.append(batch)
        assert batch.marginals is not None
        return batch.marginals


def test_chains_go_on_where_they_stopped_and_latents_not_selected_are_off() -> None:
    model, y = problem()
    guide = GibbsGuide(model)
    starts = []
    gibbs = model.gibbs

    def recorded(y: Tensor, selected: Tensor, coefficients: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        starts.append(coefficients)
        return gibbs(y, selected, coefficients, **options)

    model.gibbs = recorded
    search = Preselection(Singletons(), 3)
    for _ in range(3):
        draws = guide.update_(search, y, sweeps=2)
        last = draws.spread(NUM_LATENTS)[:, -1]
        off = torch.ones(NUM_DATA, NUM_LATENTS, dtype=torch.bool).scatter_(1, draws.selected, False)
        assert (last[off] == 0).all()
        assert (guide.marginals()[off] == 0).all()
        torch.testing.assert_close(guide.marginals().gather(1, draws.selected), draws.probabilities)
        starts.append(last)
    assert (starts[0] == 0).all()
    torch.testing.assert_close(starts[2], starts[1])
    torch.testing.assert_close(starts[4], starts[3])


def test_chains_follow_the_units_of_the_model() -> None:
    model, y = problem()
    guide = GibbsGuide(model)
    svi = SVI(model, guide, ClosedForm(model), GibbsEM(Preselection(Singletons(), 3)))
    svi.step(y)
    # The M-step has changed the unit: strength times element is what it was.
    assert (model.unit - 1).abs() > 1e-4
    torch.testing.assert_close(guide.draws().coefficients, guide.coefficients * model.unit)
    torch.testing.assert_close(guide.draws().coefficients[guide.coefficients != 0].mean().item(), 1.0, rtol=1e-5, atol=0)


def test_selection_sees_the_marginals_of_the_last_step() -> None:
    model, y = problem()
    guide, spy = GibbsGuide(model), Spy()
    search = Preselection(spy, 2, explore=0.0)
    draws = guide.update_(search, y)
    first = spy.batches[0].marginals
    assert torch.equal(draws.selected.sort(1).values, first.topk(2, 1).indices.sort(1).values)
    # Random before the first step: every latent can be selected.
    assert first.std() > 0.1
    before = guide.marginals().clone()
    guide.update_(search, y)
    assert torch.equal(spy.batches[1].marginals, before)
    assert torch.equal(spy.batches[1].observations["y"], y)


def test_gp_select_regresses_on_the_marginals() -> None:
    model, y = problem()
    guide, search = GibbsGuide(model), GPSelect(3, fit_steps=2)
    guide.update_(search, y)
    marginals = guide.marginals().clone()
    guide.update_(search, y)
    torch.testing.assert_close(search.affinity.state_dict()["memory"]["rows"]["marginals"], marginals)


def test_singletons_are_scored_exactly_and_others_refused() -> None:
    model, y = problem()
    spy = Spy()
    GibbsGuide(model).update_(Preselection(spy, 2), y)
    batch = spy.batches[0]
    torch.testing.assert_close(Singletons()(batch), model.singletons(y)[:, 1:])
    words = batch.space.pack(torch.tensor([[0, 0, 0, 0, 0], [0, 1, 0, 0, 0]])).expand(NUM_DATA, -1, -1)
    torch.testing.assert_close(batch.score(words), model.singletons(y)[:, [0, 2]])
    with pytest.raises(NotImplementedError, match="at most one active latent"):
        batch.score(batch.space.pack(torch.ones(1, 1, 5)).expand(NUM_DATA, -1, -1))


@pytest.mark.slow
def test_minibatches() -> None:
    model, y = problem()
    model.initialize(y)
    guide = GibbsGuide(model)
    svi = SVI(model, guide, ClosedForm(model), GibbsEM(Preselection(Singletons(), 3), batch_size=10))
    losses = [svi.step(y) for _ in range(40)]
    assert sum(losses[-10:]) < sum(losses[:10])
    assert (guide.coefficients != 0).any(2).any(1).float().mean() > 0.8
    with pytest.raises(ValueError, match="got 7 draws of 3"):
        guide.update_(Preselection(Singletons(), 3), y, torch.arange(3), sweeps=7)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 60])
def test_chains_that_begin_do_not_lead_the_parameters_away(batch_size: int | None) -> None:
    bars = linear_bars(300, 4, mean_active=1.6, generator=torch.Generator().manual_seed(0))
    y = bars.data.clamp(min=0.0)

    def found_after_a_pass(**warm_up: int) -> int:
        torch.manual_seed(0)
        model = MaxSpikeSlabSparseCoding(16, 8)
        model.weight, model.scale, model.prior = bars.components.clamp(min=1e-3), torch.tensor(2.0), torch.tensor(0.2)
        elbo = GibbsEM(GPSelect(4, kernel="linear"), batch_size=batch_size, **warm_up)
        svi = SVI(model, GibbsGuide(model), ClosedForm(model), elbo)
        return min((svi.step(y), matched_bars(model.weight, bars.components, 0.95))[1] for _ in range(1 if batch_size is None else 5))

    assert found_after_a_pass(warm_up=0) < 4
    assert found_after_a_pass() == 8


def test_chains_settle_once_before_the_first_step_of_their_data_points(monkeypatch: pytest.MonkeyPatch) -> None:
    model, y = problem()
    guide, sizes = GibbsGuide(model), []
    update = guide.update_
    monkeypatch.setattr(guide, "update_", lambda *args, **kwargs: (sizes.append(len(args[2])), update(*args, **kwargs))[1])
    elbo = GibbsEM(Preselection(Singletons(), 3), warm_up=2, batch_size=20)
    chosen = [torch.arange(20), torch.arange(5, 25), torch.arange(10, 30), torch.arange(20)]
    monkeypatch.setattr(elbo, "_subsample", lambda y: (chosen.pop(0), 1.5))
    svi = SVI(model, guide, ClosedForm(model), elbo)
    for _ in range(4):
        svi.step(y)
    assert sizes == [20, 20, 20, 5, 5, 20, 5, 5, 20, 20]


def test_other_numbers_of_draws_and_latents_keep_the_strongest() -> None:
    model, y = problem()
    guide = GibbsGuide(model)
    draws = guide.update_(Preselection(Singletons(), 4), y)
    strongest = draws.spread(NUM_LATENTS)[:, -1].abs().amax(1)
    guide._prepare(y, 2, 5, is_whole=True, generator=None)
    assert guide.coefficients.shape == (NUM_DATA, 5, 2)
    torch.testing.assert_close(guide.coefficients[:, -1].abs().amax(1), strongest)


def test_state_dict_restores_a_fresh_guide_exactly() -> None:
    model, y = problem()
    guide, search = GibbsGuide(model), Preselection(Singletons(), 3)
    guide.update_(search, y)
    state = copy.deepcopy(guide.state_dict())
    fresh = GibbsGuide(model)
    fresh.load_state_dict(state)
    results = []
    for each in (guide, fresh):
        pyro.set_rng_seed(3)
        results.append(each.update_(search, y).coefficients)
    assert torch.equal(*results)


def test_the_guide_is_a_pyro_program() -> None:
    model, y = problem()
    guide = GibbsGuide(model)
    guide.update_(Preselection(Singletons(), 3), y)
    samples = Predictive(model, guide=guide, num_samples=20, return_sites=["s", "z", "y"])(y)
    coefficients = samples["s"] * samples["z"]
    possible = guide.draws().spread(NUM_LATENTS).float()
    distance = (coefficients.unsqueeze(2) - possible).abs().amax(-1).amin(-1)
    assert distance.max() < 1e-6
    assert samples["z"][samples["s"] == 0].std() > 0.3


def test_infer_leaves_model_and_guide_alone() -> None:
    model, y = problem()
    guide = GibbsGuide(model)
    guide.update_(Preselection(Singletons(), 3), y)
    before, weight = copy.deepcopy(guide.state_dict()), model.weight.detach().clone()
    other = guide.infer(y[:8], Preselection(Cosine(lambda: model.weight), 3), steps=3)
    assert other.marginals().shape == (8, NUM_LATENTS)
    assert torch.equal(model.weight, weight)
    for name, value in guide.state_dict().items():
        assert torch.equal(value, before[name])


def test_errors_say_what_is_wrong() -> None:
    model, y = problem()
    guide, search = GibbsGuide(model), Preselection(Singletons(), 3)
    with pytest.raises(TypeError, match="needs a model with a Gibbs sampler"):
        GibbsGuide(BinarySparseCoding(7, 5))
    with pytest.raises(RuntimeError, match="no draws yet"):
        guide.marginals()
    with pytest.raises(TypeError, match="search must select latents"):
        GibbsEM(EvolutionarySearch())
    with pytest.raises(TypeError, match=r"search must select latents: a Preselection, .* got EvolutionarySearch"):
        GibbsGuide(model).infer(y, EvolutionarySearch())
    with pytest.raises(ValueError, match="warm_up must be"):
        GibbsEM(search, warm_up=-1)
    with pytest.raises(ValueError, match="num_selected must be at most the number of latents, 5: cannot select 6"):
        guide.update_(Preselection(Singletons(), 6), y)
    with pytest.raises(TypeError, match="needs ClosedForm"):
        SVI(model, guide, Adam({}), GibbsEM(search)).step(y)
    closed_form = ClosedForm(model)
    with pytest.raises(ValueError, match="temperature must be at least 1"):
        SVI(model, guide, closed_form, GibbsEM(search, temperature=0.5)).step(y)
    with pytest.raises(TypeError, match=r"the M-step of MaxSpikeSlabSparseCoding takes Gibbs draws: use GibbsGuide\(model\) and GibbsEM"):
        SVI(model, AutoTruncated(model, 4, conditional=model.conditional), closed_form, Truncated_ELBO()).step(y)
    with pytest.raises(TypeError, match="of the very model it was made for; got AutoTruncated"):
        SVI(model, AutoTruncated(model, 4, conditional=model.conditional), closed_form, GibbsEM(search)).step(y)
    guide.update_(search, y)
    with pytest.raises(ValueError, match="holds chains of 30 data points, the data have 4"):
        guide.update_(search, y[:4])


def test_what_makes_a_model_one_to_sample_is_found_without_asking_it():
    """As ``isinstance`` looks for it from Python 3.12 on, where what a module makes up in ``__getattr__`` is none of its attributes."""
    members = {name for name in (*vars(GibbsModel), *vars(GibbsModel).get("__annotations__", {})) if not name.startswith("_")}
    assert "gibbs" in members
    for name in members:
        inspect.getattr_static(MaxSpikeSlabSparseCoding(3, 2), name)


class BernoulliNoise(torch.nn.Module):
    """A model with what :class:`GibbsModel` asks for, and no more: latents that the data say nothing of."""

    num_latents = 4

    def __init__(self) -> None:
        super().__init__()
        self.unit = torch.ones(4)

    def gibbs(
        self,
        y: Tensor,
        selected: Tensor,
        coefficients: Tensor,
        *,
        burn_in: int,
        sweeps: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return torch.ones(len(y), sweeps, selected.shape[1]), torch.full(selected.shape, 0.5)

    def singletons(self, y: Tensor) -> Tensor:
        return torch.zeros(len(y), 5)

    def site_values(self, coefficients: Tensor) -> dict[str, Tensor]:
        return {"s": (coefficients != 0).float()}

    def expected_log_joint(self, draws: GibbsDraws, y: Tensor) -> Tensor:
        return torch.zeros(())

    def sufficient_statistics(self, draws: GibbsDraws, y: Tensor) -> dict[str, Tensor]:
        return {}

    def maximize(self, statistics: dict[str, Tensor]) -> None:
        pass


def test_a_model_written_to_the_protocol_is_sampled() -> None:
    kinds = GibbsModel, BernoulliNoise, MaxSpikeSlabSparseCoding
    assert len({frozenset(inspect.signature(kind.gibbs).parameters) for kind in kinds}) == 1
    model = BernoulliNoise()
    assert isinstance(model, GibbsModel)
    guide = GibbsGuide(model)
    guide.update_(Preselection(Spy(), 2), torch.zeros(6, 3), sweeps=2)
    assert guide.marginals().sum(1).tolist() == [1.0] * 6


def test_a_copied_guide_samples_the_same_model() -> None:
    model, y = problem()
    svi = SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(Preselection(Singletons(), 3)))
    svi.step(y)
    guide = copy.deepcopy(svi.guide)
    assert guide.model is model
    before = guide.coefficients.clone()
    svi.step(y)
    assert torch.equal(guide.coefficients, before)
    SVI(model, guide, svi.optim, GibbsEM(Preselection(Singletons(), 3))).step(y)
    both, twin = copy.deepcopy((model, guide))
    assert twin.model is both


def test_a_shallow_copy_leaves_the_model_to_the_one_that_trains_it() -> None:
    model, y = problem()
    svi = SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(Preselection(Singletons(), 3)))
    svi.step(y)
    shallow = copy.copy(svi.optim)
    assert ClosedForm.find(model) is svi.optim
    del shallow
    svi.step(y)
