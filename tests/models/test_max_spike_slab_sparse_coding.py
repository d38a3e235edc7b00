"""Spike-and-slab sparse coding by maximum: log joints, exact singletons, monotone M-steps, recovery of bars by EM and by gradients."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, GibbsEM, GibbsGuide, Preselection, Truncated_ELBO, ops
from pyro_truncated.datasets import bar_components, matched_bars
from pyro_truncated.em.gibbs import GibbsDraws
from pyro_truncated.models import MaxSpikeSlabSparseCoding
from pyro_truncated.search import Cosine, Singletons
from tests.models.enumeration import generate

NUM_DATA, NUM_OBSERVED, NUM_LATENTS = 60, 7, 4


def make_model(shared: bool = True, dtype: torch.dtype = torch.float64) -> MaxSpikeSlabSparseCoding:
    model = MaxSpikeSlabSparseCoding(NUM_OBSERVED, NUM_LATENTS, shared_prior=shared, shared_slab=shared, dtype=dtype)
    model.weight = 4 * torch.rand(NUM_OBSERVED, NUM_LATENTS, dtype=dtype)
    model.scale = torch.tensor(0.7, dtype=dtype)
    model.slab_scale = torch.full_like(model.slab_scale, 0.4)
    return model


def draws_of(model: MaxSpikeSlabSparseCoding, y: Tensor, num_selected: int = 3) -> GibbsDraws:
    selected = torch.stack([torch.randperm(NUM_LATENTS)[:num_selected] for _ in range(len(y))])
    start = torch.zeros(len(y), NUM_LATENTS, dtype=torch.float64)
    return GibbsDraws(selected, *model.gibbs(y, selected, start, burn_in=3, sweeps=4))


def draws_only(draws: GibbsDraws) -> tuple[Tensor, Tensor]:
    return draws.selected, draws.coefficients


def rescaled(draws: GibbsDraws, factor: Tensor) -> GibbsDraws:
    factor = factor.expand(NUM_LATENTS)[draws.selected].unsqueeze(1)
    return GibbsDraws(draws.selected, draws.coefficients * factor, draws.probabilities, draws.indices)


def bars_data(num_data: int, size: int) -> tuple[Tensor, Tensor]:
    """Bars of varying strength that superpose by maximum, and what they are made of."""
    bars = 10 * bar_components(size)
    strength = (torch.rand(num_data, 2 * size) < 1 / size) * (1 + 0.3 * torch.randn(num_data, 2 * size))
    clean = (bars * strength.unsqueeze(1)).amax(-1).clamp(min=0.0)
    return clean + math.sqrt(2) * torch.randn(clean.shape), bars


@pytest.mark.parametrize("shared", [False, True])
def test_log_joint_is_its_definition(shared: bool) -> None:
    model = make_model(shared)
    y = generate(model, NUM_DATA)
    draws = draws_of(model, y)
    coefficients = draws.spread(NUM_LATENTS).transpose(0, 1)
    values = {**model.site_values(coefficients), "y": y.expand(4, -1, -1)}
    trace = poutine.trace(poutine.condition(model, data=values)).get_trace(y)
    trace.compute_log_prob()
    s, z = values["s"], values["z"]
    torch.testing.assert_close(coefficients, s * z)
    mean = (model.weight * (s * z).unsqueeze(-2)).amax(-1).clamp(min=0.0)
    likelihood = dist.Normal(mean, model.scale).log_prob(y).sum(-1)
    torch.testing.assert_close(trace.nodes["y"]["log_prob"], likelihood)
    torch.testing.assert_close(trace.nodes["s"]["log_prob"], dist.Bernoulli(model.prior).log_prob(s).sum(-1))
    slabs = dist.Normal(model.slab_mean, model.slab_scale).log_prob(z)
    torch.testing.assert_close(trace.nodes["z"]["log_prob"], slabs.sum(-1))
    # The mean over the draws, slabs of active latents only, the prior weighted by exact probabilities.
    chances = torch.zeros(NUM_DATA, NUM_LATENTS).double().scatter_(1, draws.selected, draws.probabilities)
    prior = chances * model.prior.log() + (1 - chances) * torch.log1p(-model.prior)
    expected = (likelihood.mean(0) + (s * slabs).sum(-1).mean(0) + prior.sum(-1)).sum()
    torch.testing.assert_close(model.expected_log_joint(draws, y), expected.detach(), rtol=1e-10, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("with_missing", [False, True])
def test_singletons_are_integrals_over_the_slab(with_missing: bool) -> None:
    model = make_model(shared=False)
    model.prior, model.slab_mean = 0.1 + 0.5 * torch.rand(NUM_LATENTS).double(), torch.rand(NUM_LATENTS).double()
    y = generate(model, 10, with_missing)
    off = torch.log1p(-model.prior).sum()
    z = (model.slab_mean + model.slab_scale * torch.linspace(-9, 9, 20001).unsqueeze(-1).double()).detach()
    centre = (z.unsqueeze(-2) * model.weight).clamp(min=0.0).detach()
    expected = []
    for row in y:
        seen = ~row.isnan()
        normal = dist.Normal(centre[:, seen], model.scale).log_prob(row[seen].unsqueeze(-1)).sum(1)
        slab = torch.trapezoid((normal + dist.Normal(model.slab_mean, model.slab_scale).log_prob(z)).exp(), z, dim=0).log()
        zero = dist.Normal(0.0, model.scale).log_prob(row[seen]).sum()
        expected.append(off + torch.cat([zero.reshape(1), slab + model.prior.logit()]))
    torch.testing.assert_close(model.singletons(y), torch.stack(expected).detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("with_missing", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("start", ["truth", "random", "data"])
def test_m_step_never_lowers_the_expected_log_joint_of_its_draws(with_missing: bool, shared: bool, start: str) -> None:
    model = make_model(shared)
    y = generate(model, NUM_DATA, with_missing)
    if start != "truth":
        model.weight = torch.rand_like(model.weight)
    if start == "data":
        model.initialize(y)
    for _ in range(15):
        draws, unit = draws_of(model, y), model.unit.clone()
        before = model.expected_log_joint(draws, y)
        model.maximize(model.sufficient_statistics(draws, y))
        gain = model.unit / unit
        after = model.expected_log_joint(rescaled(draws, gain), y)
        # A density of rescaled slabs is divided by the factor.
        active = (
            torch.zeros(NUM_LATENTS).double().scatter_add(0, draws.selected.flatten(), (draws.coefficients != 0).double().mean(1).flatten())
        )
        assert after + (active * gain.log()).sum() >= before - 1e-9 * before.abs()
        torch.testing.assert_close(model.slab_mean.detach(), torch.ones_like(model.slab_mean), rtol=1e-12, atol=0)


@pytest.mark.slow
def test_steps_that_would_lower_it_are_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyro_truncated.models import dictionary

    falls = []
    for rounding in (math.inf, 1e-12):
        monkeypatch.setattr(dictionary, "_ERROR_RTOL", rounding)
        lost = 0
        for seed in range(10):
            pyro.set_rng_seed(seed)
            y = generate(make_model(), NUM_DATA)
            model = make_model()
            draws = draws_of(model, y)
            statistics = model.sufficient_statistics(draws, y)
            chosen = torch.where(statistics["wins"] > 0, statistics["claims"] / statistics["wins"], model.weight.detach())
            # Every dimension has its own errors, and a step of its own.
            before, after = (ops.maximum_slab_statistics(y, weight, *draws_only(draws))[2] for weight in (model.weight, chosen))
            lost += int((after > before * (1 + 1e-9)).sum())
        falls.append(lost)
    assert falls[0] > 0
    assert falls[1] == 0


@pytest.mark.parametrize("with_missing", [False, True])
def test_full_steps_solve_the_stationary_equation_of_the_dictionary(with_missing: bool) -> None:
    model = make_model()
    y = generate(model, NUM_DATA, with_missing)
    draws = draws_of(model, y)
    s = draws.spread(NUM_LATENTS)
    weight = model.weight.detach().clone().requires_grad_()
    mean = (weight * s.unsqueeze(-2)).amax(-1).clamp(min=0.0)
    residual = torch.where(y.isnan().unsqueeze(1), 0.0, y.unsqueeze(1) - mean)
    (gradient,) = torch.autograd.grad(-0.5 * residual.square().sum() / s.shape[1], weight)
    statistics = model.sufficient_statistics(draws, y)
    step = statistics["claims"] / statistics["wins"] - weight
    # The gradient over the curvature, in every dimension as it is or halved some times.
    progress = (step * statistics["wins"] / gradient)[(gradient != 0) & (statistics["claims"] / statistics["wins"] > 2e-6)]
    halvings = -progress.log2()
    assert ((halvings - halvings.round()).abs() < 1e-6).all()
    assert (halvings.abs() < 1e-6).double().mean() > 0.5


@pytest.mark.parametrize("shared", [False, True])
def test_the_other_parameters_are_stationary(shared: bool) -> None:
    model = make_model(shared)
    y = generate(model, NUM_DATA)
    draws, unit = draws_of(model, y), model.unit.clone()
    model.maximize(model.sufficient_statistics(draws, y))
    draws = rescaled(draws, model.unit / unit)
    s, z = (draws.spread(NUM_LATENTS) != 0).double(), draws.spread(NUM_LATENTS)
    chances = torch.zeros(NUM_DATA, NUM_LATENTS).double().scatter_(1, draws.selected, draws.probabilities)
    mean = (model.weight.detach() * z.unsqueeze(-2)).amax(-1).clamp(min=0.0)
    parts = (
        dist.Normal(mean, model.scale).log_prob(y.unsqueeze(1)).sum() / s.shape[1],
        (s * dist.Normal(model.slab_mean, model.slab_scale).log_prob(z)).sum() / s.shape[1],
        (chances * model.prior.log() + (1 - chances) * torch.log1p(-model.prior)).sum(),
    )
    names = ("scale", "slab_mean", "slab_scale", "prior")
    for gradient in torch.autograd.grad(sum(parts), [getattr(model, f"{name}_unconstrained") for name in names]):
        assert gradient.abs().max() < 1e-8


def test_statistics_follow_the_units() -> None:
    model = make_model(shared=False)
    y = generate(model, NUM_DATA)
    draws, unit = draws_of(model, y), model.unit.clone()
    statistics = model.sufficient_statistics(draws, y)
    model.maximize(statistics)
    expected = model.sufficient_statistics(rescaled(draws, model.unit / unit), y)
    for name in ("coefficients", "coefficient_squares"):
        torch.testing.assert_close(statistics[name], expected[name], rtol=1e-12, atol=1e-12)
    before = {name: getattr(model, name).detach().clone() for name in ("weight", "scale", "prior", "slab_mean", "slab_scale")}
    model.maximize(statistics)
    for name, value in before.items():
        torch.testing.assert_close(getattr(model, name).detach(), value, rtol=1e-10, atol=1e-12)


def test_latents_that_are_never_selected_keep_their_parameters() -> None:
    model = make_model(shared=False)
    y = generate(model, NUM_DATA)
    selected = torch.tensor([[0, 2, 3]]).expand(NUM_DATA, -1)
    draws = GibbsDraws(selected, *model.gibbs(y, selected, torch.zeros(NUM_DATA, NUM_LATENTS), burn_in=1, sweeps=2))
    weight, slab = model.weight[:, 1].detach().clone(), model.slab_scale[1].detach().clone()
    model.maximize(model.sufficient_statistics(draws, y))
    torch.testing.assert_close(model.weight[:, 1].detach(), weight, rtol=1e-13, atol=0)
    torch.testing.assert_close(model.slab_scale[1].detach(), slab, rtol=1e-13, atol=0)
    assert model.prior[1].item() == pytest.approx(1e-6)


def test_reconstruction_is_the_mean_over_draws() -> None:
    model = make_model()
    y = generate(model, NUM_DATA, with_missing=True)
    draws = draws_of(model, y)
    expected = (model.weight * draws.spread(NUM_LATENTS).unsqueeze(-2)).amax(-1).clamp(min=0.0).mean(1)
    torch.testing.assert_close(model.reconstruct(draws), expected.detach())
    with pytest.raises(ValueError, match=f"y must have a row for each of the draws' {NUM_DATA} data points; got {NUM_DATA - 1} rows"):
        model.reconstruct(draws, y[1:])


def test_float32_parameters_follow_float64() -> None:
    double, single = make_model(), make_model(dtype=torch.float32)
    y = generate(double, NUM_DATA)
    draws = draws_of(double, y)
    names = ("weight", "scale", "prior", "slab_mean", "slab_scale")
    for name in names:
        setattr(single, name, getattr(double, name).detach().float())
    for model, data in ((double, y), (single, y.float())):
        model.maximize(model.sufficient_statistics(draws, data))
    for name in names:
        assert getattr(single, name).dtype == torch.float32
        torch.testing.assert_close(getattr(single, name).detach().double(), getattr(double, name).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cosine", "singletons"])
def test_em_finds_the_bars(kind: str) -> None:
    y, bars = bars_data(400, 5)
    model = MaxSpikeSlabSparseCoding(25, 10).initialize(y)
    affinity = Cosine(lambda: model.weight) if kind == "cosine" else Singletons()
    elbo = GibbsEM(Preselection(affinity, 5), temperature=lambda step: 1 + 3 * max(0.0, 1 - step / 24))
    guide = GibbsGuide(model)
    svi = SVI(model, guide, ClosedForm(model), elbo)
    losses = [svi.step(y) for _ in range(45)]
    assert matched_bars(model.weight, bars) == 10
    assert losses[-1] < losses[0] - 1000
    assert 1.5 < model.scale.square().item() < 3.0
    assert model.prior.item() == pytest.approx(0.2, abs=0.03)
    # Elements are what a cause adds at mean strength.
    assert (model.weight.amax(0) - 10).abs().max() < 2
    assert svi.evaluate_loss(y) < losses[0]


@pytest.mark.slow
def test_trains_by_gradients_as_a_plain_pyro_model() -> None:
    y, _ = bars_data(30, 2)
    model = MaxSpikeSlabSparseCoding(4, 4).initialize(y)
    guide = AutoTruncated(model, num_states=2**4, conditional=model.conditional)
    svi = SVI(model, guide, Adam({"lr": 0.1}), Truncated_ELBO(ExhaustiveSearch()))
    losses = [svi.step(y) for _ in range(20)]
    # A third of a nat per data point.
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 10


@pytest.mark.slow
def test_structured_guide_bounds_the_evidence_from_below() -> None:
    # Two latents: the evidence of every data point by a grid over both slabs.
    model = MaxSpikeSlabSparseCoding(4, 2, dtype=torch.float64)
    model.weight = torch.tensor([[2.0, 0.3], [1.5, 1.4], [0.2, 2.1], [0.8, 0.9]]).double()
    model.slab_scale, model.prior = torch.tensor(0.4).double(), torch.tensor(0.4).double()
    y = generate(model, 20)
    axis = 1 + 0.4 * torch.linspace(-6, 6, 301).double()
    slab = dist.Normal(1.0, 0.4).log_prob(axis)
    singles = model.singletons(y)
    offers = torch.maximum((axis.unsqueeze(-1) * model.weight[:, 0]).unsqueeze(1), axis.unsqueeze(-1) * model.weight[:, 1]).clamp(min=0.0)
    both = dist.Normal(offers, model.scale).to_event(1).log_prob(y[:, None, None]) + slab.unsqueeze(1) + slab
    both = torch.trapezoid(torch.trapezoid(both.exp(), axis), axis).log() + 2 * model.prior.log()
    exact = torch.cat([singles, both.unsqueeze(1)], 1).logsumexp(1).detach()
    guide = AutoTruncated(model, num_states=4, conditional=model.conditional)
    with torch.no_grad():
        # Forty for each data point, all at once.
        bounds = guide.posterior(y.repeat(40, 1)).free_energy().reshape(40, len(y))
    error = bounds.std(0) / math.sqrt(len(bounds))
    # In the mean it is a bound, and a tight one: five standard errors on twenty means, false alarm rate 1e-4 over all seeds.
    assert (bounds.mean(0) < exact + 5 * error + 1e-6).all()
    assert (bounds.mean(0) > exact - 0.05).all()
