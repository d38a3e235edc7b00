"""Spike-and-slab sparse coding: exact EM by enumeration of the indicators, with and without missing data."""

from __future__ import annotations

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.models import SpikeSlabSparseCoding
from pyro_truncated.states import Population
from tests.models.enumeration import assert_never_falls, free_energies, full_population, generate, log_joint

NUM_DATA, NUM_OBSERVED, NUM_LATENTS = 60, 7, 4
NAMES = ("weight", "scale", "prior", "slab_mean", "slab_scale")


def make_model(shared_prior: bool = False, dtype: torch.dtype = torch.float64, num_latents: int = NUM_LATENTS) -> SpikeSlabSparseCoding:
    model = SpikeSlabSparseCoding(NUM_OBSERVED, num_latents, shared_prior=shared_prior, offset=False, dtype=dtype)
    model.weight = 3 * torch.randn(NUM_OBSERVED, num_latents, dtype=dtype)
    model.slab_mean = 1 + torch.rand(num_latents, dtype=dtype)
    model.slab_scale = 0.3 + 0.5 * torch.rand(num_latents, dtype=dtype)
    return model


def make_data(model: SpikeSlabSparseCoding, with_missing: bool) -> Tensor:
    return generate(model, NUM_DATA, with_missing)


def numbers(model: SpikeSlabSparseCoding) -> dict[str, Tensor]:
    return {name: getattr(model, name).detach().clone() for name in NAMES}


def free_energy(model: SpikeSlabSparseCoding, y: Tensor) -> float:
    return full_population(model, y).free_energy().sum().item()


def test_collapsed_log_joint_is_the_mixture_of_gaussians() -> None:
    model = make_model()
    y = make_data(model, with_missing=False)
    states = torch.bernoulli(torch.full((5, NUM_LATENTS), 0.5)).double()
    prior = dist.Bernoulli(model.prior).log_prob(states).sum(-1)
    loadings = model.weight * states.unsqueeze(-2)
    covariance = model.scale.square() * torch.eye(NUM_OBSERVED) + (loadings * model.slab_scale.square()) @ loadings.mT
    likelihood = dist.MultivariateNormal(loadings @ model.slab_mean, covariance).log_prob(y.unsqueeze(1))
    torch.testing.assert_close(log_joint(model, y, states), prior + likelihood, rtol=1e-9, atol=1e-9)


def expected_log_joint(model: SpikeSlabSparseCoding, y: Tensor, population: Population, moments: tuple[Tensor, Tensor]) -> Tensor:
    """``Q`` under posteriors of indicators and slabs that are held fixed: the moments of ``s`` are ``(N, T, H)`` and ``(N, T, H, H)``."""
    states, (first, second) = population.states(torch.float64), moments
    is_seen = ~y.isnan()
    data = y.nan_to_num(0.0).unsqueeze(1)
    error = data.square() - 2 * data * (first @ model.weight.mT) + torch.einsum("dh,nthi,di->ntd", model.weight, second, model.weight)
    noise = -0.5 * error / model.scale.square() - model.scale.log()
    deviation = second.diagonal(dim1=-2, dim2=-1) - 2 * model.slab_mean * first + model.slab_mean.square()
    slabs = states * (-0.5 * deviation / model.slab_scale.square() - model.slab_scale.log())
    prior = dist.Bernoulli(model.prior.expand(NUM_LATENTS)).log_prob(states)
    return (population.weights() * ((noise * is_seen.unsqueeze(1)).sum(-1) + (slabs + prior).sum(-1))).sum()


def slab_moments(model: SpikeSlabSparseCoding, y: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior moments of ``s = b * z`` by conditioning the joint Gaussian, missing entries having no loadings."""
    with torch.no_grad():
        loadings = model.weight * (~y.isnan()).unsqueeze(-1)
        prior = torch.diag_embed(states * model.slab_scale.square())
        loadings, mean = loadings.unsqueeze(1), states * model.slab_mean
        covariance = model.scale.square() * torch.eye(NUM_OBSERVED) + loadings @ prior @ loadings.mT
        gain = prior @ loadings.mT @ covariance.inverse()
        residual = y.nan_to_num(0.0).unsqueeze(1) - (loadings @ mean.unsqueeze(-1)).squeeze(-1)
        first = mean + (gain @ residual.unsqueeze(-1)).squeeze(-1)
        return first, prior - gain @ loadings @ prior + first.unsqueeze(-1) * first.unsqueeze(-2)


@pytest.mark.parametrize("with_missing", [False, True])
@pytest.mark.parametrize("shared_prior", [False, True])
def test_maximize_finds_the_stationary_point_of_q(with_missing: bool, shared_prior: bool) -> None:
    model = make_model(shared_prior)
    y = make_data(model, with_missing)
    model.weight = model.weight.detach() + torch.randn_like(model.weight)
    population = full_population(model, y)
    first, second = slab_moments(model, y, population.states(torch.float64))
    before = expected_log_joint(model, y, population, (first, second))
    size = torch.autograd.grad(before, model.weight_unconstrained)[0].abs().max().item()
    old_norm = model.weight.detach().norm(dim=0)
    statistics = model.sufficient_statistics(population, y)
    pairs = statistics["pairs"]
    model.maximize(statistics)
    torch.testing.assert_close(model.weight.norm(dim=0), old_norm)
    # The slabs' posteriors in the units that the gauge has chosen.
    gain = (statistics["pairs"] / pairs).reshape(-1, NUM_LATENTS, NUM_LATENTS)[0].diagonal().sqrt()
    after = expected_log_joint(model, y, population, (first * gain, second * gain.unsqueeze(-1) * gain))
    for gradient in torch.autograd.grad(after, [getattr(model, f"{name}_unconstrained") for name in NAMES]):
        assert gradient.abs().max() < 1e-8 * max(1.0, size)


@pytest.mark.nightly
@pytest.mark.parametrize("with_missing", [False, True])
def test_free_energy_gradient_vanishes_at_convergence(with_missing: bool) -> None:
    model = make_model(num_latents=2)
    y = make_data(model, with_missing)
    free_energies(model, y, num_iterations=400)
    states = full_population(model, y).states(y.dtype)[0]
    total = log_joint(model, y, states).logsumexp(-1).sum()
    for gradient in torch.autograd.grad(total, [getattr(model, f"{name}_unconstrained") for name in NAMES]):
        assert gradient.abs().max() < 1e-4


@pytest.mark.slow
def test_steps_from_the_truth_only_gain() -> None:
    # Updates with products of posterior means, or with a matrix inverse in the slabs' variances, lose here.
    truth = make_model()
    y = generate(truth, 2000)
    values = free_energies(truth, y, num_iterations=11)
    assert_never_falls(values)
    # Of the 41 parameters 37 are identified. In the limit twice the gain of fitting them all is chi-squared with 37 degrees of freedom, of
    # which 11 steps reach a part: false alarm rate below 6e-5 over all seeds.
    assert 0 < 2 * (values[-1] - values[0]) < 37 + 5 * math.sqrt(2 * 37)


@pytest.mark.slow
def test_noise_does_not_shrink_with_missing_data() -> None:
    truth = make_model()
    truth.scale = torch.tensor(1.0).double()
    y = generate(truth, 2000)
    y[torch.rand(y.shape) < 0.5] = math.nan
    model = make_model()
    for name, value in numbers(truth).items():
        setattr(model, name, value)
    free_energies(model, y, num_iterations=15)
    # 7000 entries determine about 4000 active coefficients, which leaves a standard error of 1 / sqrt(2 * 3000) = 0.013: false alarm rate
    # 4e-6 over all seeds.
    assert model.scale.item() == pytest.approx(1.0, abs=0.06)


def test_missing_data_agree_with_the_marginal_of_the_observed_entries() -> None:
    model = make_model()
    y = make_data(model, with_missing=True)
    states = full_population(model, y).states(y.dtype)[0]
    for row in y[:10]:
        is_seen = ~row.isnan()
        if not is_seen.any():
            continue
        part = SpikeSlabSparseCoding(int(is_seen.sum()), NUM_LATENTS, offset=False, dtype=torch.float64)
        for name, value in numbers(model).items():
            setattr(part, name, value[is_seen] if name == "weight" else value)
        torch.testing.assert_close(log_joint(model, row[None], states), log_joint(part, row[is_seen][None], states))


def test_scaling_elements_and_unscaling_slabs_changes_nothing() -> None:
    model = make_model()
    y = make_data(model, with_missing=True)
    before, factor = free_energy(model, y), torch.tensor([2.0, -0.5, -1.0, 7.0]).double()
    model.weight = model.weight.detach() * factor
    model.slab_mean = model.slab_mean.detach() / factor
    model.slab_scale = model.slab_scale.detach() / factor.abs()
    assert free_energy(model, y) == pytest.approx(before, rel=1e-12)
    norm = model.weight.detach().norm(dim=0)
    free_energies(model, y, num_iterations=3)
    assert (model.slab_mean >= 0).all()
    torch.testing.assert_close(model.weight.norm(dim=0), norm)


def test_maximize_brings_statistics_into_its_units() -> None:
    # Signs flip: the statistics of old and new batches must still add up to a step that does not hurt.
    model = make_model()
    y = make_data(model, with_missing=True)
    model.slab_mean, model.weight = -model.slab_mean.detach(), -model.weight.detach()
    statistics = model.sufficient_statistics(full_population(model, y), y)
    model.maximize(statistics)
    assert (model.slab_mean >= 0).all()
    first = numbers(model)
    model.maximize(statistics)
    for name, value in numbers(model).items():
        torch.testing.assert_close(value, first[name], rtol=1e-7, atol=1e-7)


def test_latents_that_are_never_active_keep_their_parameters() -> None:
    model = make_model()
    y = make_data(model, with_missing=False)
    population = full_population(model, y)
    is_off = population.states()[..., 2] == 0
    population = Population(population.space, population.words, population.log_joint.masked_fill(~is_off, -math.inf))
    before = numbers(model)
    model.maximize(model.sufficient_statistics(population, y))
    for name in ("weight", "slab_mean", "slab_scale"):
        torch.testing.assert_close(getattr(model, name)[..., 2], before[name][..., 2], rtol=1e-12, atol=0)
        assert getattr(model, name).isfinite().all()
    assert model.prior[2].item() == pytest.approx(1e-6)


@pytest.mark.slow
def test_clamps() -> None:
    model = make_model()
    y = torch.zeros(NUM_DATA, NUM_OBSERVED, dtype=torch.float64)
    free_energies(model, y, num_iterations=60)
    assert model.scale.item() >= 1e-3
    assert all(value.isfinite().all() for value in numbers(model).values())


def test_ill_conditioned_dictionary_in_float32_loses_nothing() -> None:
    # Solved in float32 such a system costs tens of nats per data point.
    model = make_model(dtype=torch.float32)
    base = torch.randn(NUM_OBSERVED, 1)
    model.weight = 3 * base + 1e-3 * torch.randn(NUM_OBSERVED, NUM_LATENTS)
    model.scale, model.slab_scale = torch.tensor(0.1), torch.full((NUM_LATENTS,), 0.01)
    y = make_data(model, with_missing=False)
    values = free_energies(model, y, num_iterations=10)
    assert values[-1] > values[0]
    for before, after in itertools.pairwise(values):
        # Parameters are rounded to float32: 1e-7 of 3 is 3e-6 of the noise's deviation per entry.
        assert after >= before - 1e-3 * NUM_DATA


@pytest.mark.parametrize("with_missing", [False, True])
def test_reconstruction_is_the_posterior_mean(with_missing: bool) -> None:
    model = make_model()
    y = make_data(model, with_missing)
    population = full_population(model, y)
    first, _ = slab_moments(model, y, population.states(torch.float64))
    expected = torch.einsum("nt,nth,dh->nd", population.weights(), first, model.weight)
    torch.testing.assert_close(model.reconstruct(population, y), expected.detach(), rtol=1e-9, atol=1e-9)
    # Without any observation it is the prior mean.
    prior_mean = model.weight @ (model.prior * model.slab_mean)
    nothing = torch.full_like(y, math.nan)
    torch.testing.assert_close(model.reconstruct(full_population(model, nothing), nothing)[0], prior_mean.detach())


@pytest.mark.parametrize("batch_size", [None, 8])
def test_exact_conditional_scores_states_like_the_collapsed_model(batch_size: int | None) -> None:
    model = make_model()
    y = make_data(model, with_missing=True)
    size = 2**NUM_LATENTS
    collapsed, structured = AutoTruncated(model, size), AutoTruncated(model.with_slabs, size, conditional=model.conditional)
    chosen, scores = torch.randperm(NUM_DATA)[:batch_size].sort().values, {}
    for name, guide in (("collapsed", collapsed), ("structured", structured)):
        pyro.clear_param_store()
        with torch.no_grad():
            scorer = guide.make_scorer(y, batch_size, values={"data": chosen})
            states = guide.space.enumerate().expand(scorer.num_data, -1, -1)
            scores[name] = scorer.score(states)
        assert (scorer.packed_model is not None) == (name == "collapsed")
    torch.testing.assert_close(scores["structured"], scores["collapsed"], rtol=1e-9, atol=1e-9)


def test_trains_through_svi() -> None:
    model = make_model()
    y = make_data(model, with_missing=True)
    expected = free_energies(model, y, num_iterations=5)
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    model = make_model()
    guide = AutoTruncated(model, num_states=2**NUM_LATENTS)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    losses = [svi.step(y) for _ in range(5)]
    assert losses == pytest.approx([-value for value in expected[:5]], rel=1e-8)


def test_initialize_uses_the_data() -> None:
    y = 5 + 2 * torch.randn(40, NUM_OBSERVED).double()
    y[torch.rand(y.shape) < 0.2] = math.nan
    model = SpikeSlabSparseCoding(NUM_OBSERVED, 10, offset=False, dtype=torch.float64)
    assert model.initialize(y, generator=torch.Generator().manual_seed(1)) is model
    first = model.weight.detach().clone()
    distances = (first.mT.unsqueeze(1) - torch.where(y.isnan(), y.nanmean(0), y)).abs().amax(-1)
    assert distances.argmin(1).unique().numel() == 10
    torch.testing.assert_close(model.scale.item() ** 2, y[~y.isnan()].var(correction=0).item(), rtol=1e-6, atol=0)
    model.initialize(y, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.weight, first)
    with pytest.raises(ValueError, match=r"y must have shape \(N, 7\)"):
        model.initialize(y[:, :3])


def test_generates_and_subsamples() -> None:
    model = make_model()
    y = make_data(model, with_missing=False)
    assert y.shape == (NUM_DATA, NUM_OBSERVED)
    for program, latent in ((model, "s"), (model.with_slabs, "z")):
        trace = pyro.poutine.trace(program).get_trace(y, batch_size=8)
        assert trace.nodes[latent]["value"].shape == (8, NUM_LATENTS)
        # Each data point of the minibatch stands for as many.
        assert float(trace.nodes["y"]["scale"]) == pytest.approx(NUM_DATA / 8)
        assert any(torch.equal(trace.nodes["y"]["value"][0], row) for row in y)


def test_slabs_from_their_exact_conditional_leave_bound_and_gradient_exact() -> None:
    y = generate(SpikeSlabSparseCoding(5, 3, dtype=torch.float64), 25)
    model = SpikeSlabSparseCoding(5, 3, dtype=torch.float64)
    states = full_population(model, y).states(y.dtype)[0]
    expected = log_joint(model, y, states).logsumexp(-1).sum()
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(-expected, parameters)
    pyro.clear_param_store()
    guide = AutoTruncated(model.with_slabs, num_states=8, conditional=model.conditional)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model.with_slabs, guide, y)
    assert loss == pytest.approx(-expected.item(), rel=1e-8)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-6)
