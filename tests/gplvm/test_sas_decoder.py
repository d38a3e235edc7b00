"""Decoders with stochastic active sets: the objective, training, prediction, latents of new data."""

from __future__ import annotations

import io
import itertools
import logging
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.gp import kernels
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.optim import Adam, ClippedAdam
from torch import nn

from pyro_truncated.distributions import ActiveSetGaussianProcess
from pyro_truncated.gp import ActiveSet, Split, UniformSplits
from pyro_truncated.gp.active_sets import ProjectedSet, projected_statistics
from pyro_truncated.gplvm import CandidateLatents, SASDecoder, SpikeSlabGPLVM, fit, principal_components
from pyro_truncated.gplvm.decoders.latents import best_candidates, log_joint, maximize
from pyro_truncated.utils.console import note_once


class SeesActive(nn.Module):
    """An encoder that looks at the mean of the active set."""

    def __init__(self, num_inputs, num_outputs):
        super().__init__()
        self.linear = nn.Linear(2 * num_inputs, num_outputs)

    def forward(self, x, active):
        return self.linear(torch.cat([x, active.mean(0).expand_as(x)], -1))


def circle(num_data, num_outputs, generator, noise=0.05):
    """Points whose outputs are random waves of an angle."""
    angle = 2 * math.pi * torch.rand(num_data, generator=generator)
    phase = 2 * math.pi * torch.rand(num_outputs, generator=generator)
    rate = 1 + (torch.arange(num_outputs) % 2)
    return (angle[:, None] * rate + phase).sin() + noise * torch.randn(num_data, num_outputs, generator=generator)


def make(kind, bayesian, num_data=7, num_outputs=3, **options):
    width = 4 if bayesian else 2
    encoder = {"free": None, "point": nn.Linear(num_outputs, width), "active": SeesActive(num_outputs, width)}[kind]
    return SASDecoder(num_data, num_outputs, bayesian=bayesian, encoder=encoder, encoder_sees_active=kind == "active", **options)


def train(decoder, x, epochs, splits, elbo=None, optimizer=None):
    svi = SVI(decoder.model, decoder.guide, optimizer or Adam(decoder.learning_rates(0.02)), elbo or Trace_ELBO())
    return [sum(svi.step(x, split) for split in splits.epoch(epoch)) for epoch in range(epochs)]


def objective_by_hand(decoder, x, active):
    """Expected log density of a deterministic decoder minus the KL terms, all data, one active set."""
    order = [*active, *(n for n in range(len(x)) if n not in active)]
    with torch.no_grad():
        if decoder.encoder is None:
            z = decoder.z_loc[order]
        else:
            z = decoder.encoder(x[order], x[list(active)]) if decoder.encoder_sees_active else decoder.encoder(x[order])
        likelihood = ActiveSetGaussianProcess(z, decoder.kernel, decoder.noise_variance, len(active), x.shape[1], loc=decoder.loc)
        return float(likelihood.log_prob(x[order]).sum() + dist.Normal(0.0, 1.0).log_prob(z).sum())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["free", "point", "active"])
def test_minibatch_losses_average_to_the_objective_of_each_active_set(kind, generator):
    """For each active set alone, over all choices of the rest: the weights hold for encoders that look at the active set as well."""
    x = torch.randn(6, 3, generator=generator)
    decoder = make(kind, bayesian=False, num_data=6)
    for active in itertools.combinations(range(6), 2):
        others = [n for n in range(6) if n not in active]
        rests = itertools.combinations(others, 2)
        losses = [Trace_ELBO().loss(decoder.model, decoder.guide, x, Split(torch.tensor([*active, *rest]), 2)) for rest in rests]
        assert sum(losses) / len(losses) == pytest.approx(-objective_by_hand(decoder, x, active), rel=2e-5)


def test_divergences_carry_the_weights_of_their_points(generator):
    """With a likelihood that does not depend on the latents, the loss of a Bayesian decoder is the weighted sum of KL terms."""
    x = torch.randn(8, 3, generator=generator)
    decoder = make("free", bayesian=True, num_data=8)
    decoder.z_scale = torch.rand(8, 2, generator=generator) + 0.1
    decoder.kernel.lengthscale = torch.full((2,), 1e6)
    split = Split(torch.tensor([4, 2, 7, 1, 0]), 2)
    with torch.no_grad():
        kl = torch.distributions.kl_divergence(dist.Normal(decoder.z_loc, decoder.z_scale), dist.Normal(0.0, 1.0)).sum(-1)
        z = torch.zeros(5, 2)
        rows = ActiveSetGaussianProcess(z, decoder.kernel, decoder.noise_variance, 2, 3).log_prob(x[split.indices])
    weights = torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0])
    expected = float((weights * (kl[split.indices] - rows)).sum())
    assert TraceMeanField_ELBO().loss(decoder.model, decoder.guide, x, split) == pytest.approx(expected, rel=1e-4)


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("bayesian", [False, True])
@pytest.mark.parametrize("kind", ["free", "point", "active"])
def test_training_lowers_the_loss_and_predictions_beat_the_mean(kind, bayesian, generator):
    x, new = circle(80, 5, generator).split(60)
    decoder = make(kind, bayesian, 60, 5).initialize(x, steps=30)
    splits = UniformSplits(60, 30, 10, generator)
    optimizer = ClippedAdam({"lr": 0.02}) if kind == "point" else None
    losses = train(decoder, x, 25, splits, TraceMeanField_ELBO() if bayesian else None, optimizer)
    assert sum(losses[-5:]) < sum(losses[:5])
    decoder.condition_(x, size=20)
    mean, variance = decoder.predict(decoder.infer(new, steps=30))
    assert mean.shape == (20, 5)
    assert variance.shape == (20, 1)
    assert (mean - new).square().mean() < 0.3 * new.var()


def test_what_an_encoder_learns_at_the_start_leaves_no_gradient_to_the_first_step(generator):
    x = circle(12, 3, generator).double()
    decoder = make("point", bayesian=False, num_data=12).double().initialize(x, steps=2)
    elbo, split, step = Trace_ELBO(), Split(torch.tensor([4, 2, 7, 1, 0]), 2), 1e-6
    elbo.loss_and_grads(decoder.model, decoder.guide, x, split)
    found, losses = float(decoder.encoder.bias.grad[0]), []
    for shift in (step, -2 * step):
        with torch.no_grad():
            decoder.encoder.bias[0] += shift
        losses.append(elbo.loss(decoder.model, decoder.guide, x, split))
    assert found == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-6)


@pytest.mark.parametrize("bayesian", [False, True])
def test_relocation_takes_the_best_of_own_and_active_latents_and_raises_the_objective(bayesian, generator):
    x = circle(25, 4, generator)
    decoder = make("free", bayesian, 25, 4)
    decoder.z_loc = torch.randn(25, 2, generator=generator)
    decoder.noise = torch.tensor(0.05)
    before, seed = decoder.z_loc.detach().clone(), torch.Generator().manual_seed(3)
    active = torch.randperm(25, generator=torch.Generator().manual_seed(3))[:8]
    objective = objective_by_hand(decoder, x, active.tolist())
    share = decoder.relocate_(x, 8, generator=seed)
    gain, expected = 0.0, before.clone()
    posterior = ActiveSet(before[active], x[active] - decoder.loc, decoder.kernel, decoder.noise_variance.detach())
    for n in set(range(25)) - set(active.tolist()):
        places = torch.cat([before[n : n + 1], before[active]])
        mean, variance = posterior.predict(places)
        values = dist.Normal(mean + decoder.loc, variance.sqrt()).log_prob(x[n]).sum(-1) + dist.Normal(0.0, 1.0).log_prob(places).sum(-1)
        expected[n] = places[values.argmax()]
        gain += float((values.max() - values[0]).detach())
    assert torch.equal(decoder.z_loc, expected)
    assert share == (expected != before).any(1).double().mean()
    assert 0.3 < share < 1
    assert objective_by_hand(decoder, x, active.tolist()) - objective == pytest.approx(gain, rel=1e-4)


@pytest.mark.slow
def test_relocation_untangles_what_gradients_cannot(generator):
    """Latents start in random order along a circle of waves, so every point is among strangers."""
    x = circle(200, 8, generator)
    errors = []
    for relocated in (False, True):
        pyro.set_rng_seed(0)
        decoder = make("free", False, 200, 8).initialize(x, latents=torch.randn(200, 2, generator=torch.Generator().manual_seed(1)))
        for _ in range(8):
            if relocated:
                decoder.relocate_(x, 60)
            train(decoder, x, 3, UniformSplits(200, 100, 40, generator), optimizer=Adam({"lr": 0.05}))
        mean, _ = decoder.condition_(x).predict(decoder.latents(x))
        errors.append(float((mean - x).square().mean()))
    assert errors[1] < 0.5 * errors[0]


def test_relocation_with_missing_data_conditions_on_complete_points(generator):
    x = circle(30, 4, generator)
    x[:15, 0] = math.nan
    decoder = make("free", False, 30, 4).initialize(x)
    before = decoder.z_loc.detach().clone()
    decoder.relocate_(x, 10)
    assert int((decoder.z_loc[:15] != before[:15]).any(1).sum()) > 0
    complete = (decoder.z_loc[15:] == before[15:]).all(1)
    assert int(complete.sum()) >= 10


@pytest.mark.slow
def test_an_encoder_starts_from_latents_given(generator):
    x = circle(60, 5, generator)
    latents = torch.randn(60, 2, generator=generator) @ torch.tensor([[1.0, 0.5], [0.0, 1.0]])
    free = make("free", False, 60, 5).initialize(x, latents=latents)
    assert torch.equal(free.latents(x), latents)
    linear = x @ torch.randn(5, 2, generator=generator)
    encoded = make("point", False, 60, 5).initialize(x, steps=800, latents=linear)
    assert (encoded.latents(x) - linear).square().mean() < 0.05 * linear.var()


@pytest.mark.parametrize("kind", ["free", "point"])
def test_a_step_moves_every_parameter(kind, generator):
    x = circle(30, 4, generator)
    decoder = make(kind, True, 30, 4, num_active=10).initialize(x, steps=5)
    before = {name: value.detach().clone() for name, value in decoder.named_parameters()}
    SVI(decoder.model, decoder.guide, Adam({"lr": 0.01}), Trace_ELBO()).step(x)
    assert {name for name, value in decoder.named_parameters() if torch.equal(value, before[name])} == set()


def test_matern_kernel_float64_and_missing_data_train(generator):
    x = circle(50, 6, generator).double()
    x[torch.rand(50, 6, generator=generator) < 0.1] = math.nan
    kernel = kernels.Matern52(2, torch.tensor(1.0), torch.ones(2))
    decoder = SASDecoder(50, 6, kernel=kernel, bayesian=True).double().initialize(x)
    train(decoder, x, 3, UniformSplits(50, 25, 8, generator), TraceMeanField_ELBO())
    mean, _ = decoder.condition_(x).predict(decoder.latents(x))
    assert mean.dtype == torch.float64
    assert bool(mean.isfinite().all())
    assert decoder.infer(x[:4], steps=2).shape == (4, 2)


def test_random_splits_without_a_split_given(generator):
    x = torch.randn(12, 3, generator=generator)
    decoder = make("free", bayesian=False, num_data=12, num_active=3, batch_size=8)
    guide = pyro.poutine.trace(decoder.guide).get_trace(x)
    model = pyro.poutine.trace(pyro.poutine.replay(decoder.model, guide)).get_trace(x)
    rows = guide.nodes["batch"]["value"]
    assert torch.equal(rows, model.nodes["batch"]["value"])
    chosen = rows[guide.nodes["active"]["value"]]
    torch.testing.assert_close(model.nodes["z"]["value"][:3], decoder.z_loc[chosen])
    torch.testing.assert_close(model.nodes["x"]["value"][:3], x[chosen])
    svi = SVI(decoder.model, decoder.guide, Adam({"lr": 0.01}), Trace_ELBO())
    assert math.isfinite(svi.step(x))
    draws = Predictive(decoder.model, guide=decoder.guide, num_samples=2)(x)
    assert draws["z"].shape == (2, 8, 2)


def test_conditioning_on_everything_on_chosen_points_and_on_projections(generator):
    x = circle(80, 4, generator)
    decoder = make("free", False, 80, 4).initialize(x)
    z = torch.randn(10, 2, generator=generator)
    exact = ActiveSet(decoder.latents(x), x - decoder.loc, decoder.kernel, decoder.noise_variance.detach())
    mean, variance = decoder.condition_(x).predict(z)
    torch.testing.assert_close(mean, exact.predict(z)[0].detach() + decoder.loc)
    torch.testing.assert_close(variance, exact.predict(z)[1].detach())
    few = decoder.condition_(x, 15).predict(z)[1]
    torch.testing.assert_close(decoder.condition_(x, 80, projected=True).predict(z)[0], mean, rtol=1e-3, atol=1e-3)
    projected = decoder.condition_(x, 15, projected=True).predict(z)[1]
    assert projected.mean() < few.mean()
    assert decoder.sample(7).shape == (7, 4)


def test_latents_are_copies(generator):
    x = circle(40, 4, generator)
    first = make("free", False, 40, 4).initialize(x)
    given = first.latents(x)
    before = given.clone()
    second = make("free", False, 40, 4).initialize(x, latents=given)
    train(second, x, 2, UniformSplits(40, 20, 8, generator))
    assert torch.equal(given, before)
    assert torch.equal(first.latents(x), before)
    assert not torch.equal(second.latents(x), before)


def test_predictions_after_more_training_are_refused_until_conditioned_again(generator):
    x = circle(40, 4, generator)
    decoder = make("free", False, 40, 4).initialize(x).condition_(x)
    decoder.predict(torch.zeros(1, 2))
    train(decoder, x, 1, UniformSplits(40, 20, 8, generator), optimizer=Adam({"lr": 1e-3}))
    with pytest.raises(RuntimeError, match="has changed since condition_"):
        decoder.predict(torch.zeros(1, 2))
    decoder.condition_(x).predict(torch.zeros(1, 2))
    for change in (lambda: decoder.relocate_(x, 10), lambda: decoder.initialize(x + 1)):
        decoder.condition_(x)
        change()
        with pytest.raises(RuntimeError, match="call condition_"):
            decoder.predict(torch.zeros(1, 2))


@pytest.mark.parametrize("projected", [False, True])
def test_what_is_kept_follows_the_type(projected, generator):
    x = circle(60, 4, generator)
    decoder = make("free", True, 60, 4).initialize(x).condition_(x, 20, projected=projected)
    z = torch.randn(5, 2, generator=generator)
    single = decoder.predict(z)[0]
    double = decoder.double().predict(z.double())[0]
    assert double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-3)
    assert torch.allclose(decoder.float().predict(z)[0], single, rtol=1e-3, atol=1e-3)


def test_incomplete_points_fill_up_what_complete_ones_lack(generator):
    x = circle(60, 6, generator)
    hidden = torch.rand(60, 6, generator=generator) < 0.2
    hidden[:4] = False
    decoder = make("free", False, 60, 6).initialize(x.masked_fill(hidden, math.nan))
    gaps = hidden.sum(1)
    complete = int((gaps == 0).sum())
    kept = decoder.condition_(x.masked_fill(hidden, math.nan)).posterior()
    assert kept.size == 60
    some = decoder.condition_(x.masked_fill(hidden, math.nan), complete + 10).posterior()
    assert some.size == complete + 10
    assert int((some.outputs.isnan().any(1)).sum()) == 10
    assert some.outputs.isnan().sum() == gaps.sort().values[: complete + 10].sum()
    few = decoder.condition_(x.masked_fill(hidden, math.nan), 3).posterior()
    assert not bool(few.outputs.isnan().any())
    hidden[:, 0] = torch.arange(60) > 0
    hidden[0] = torch.arange(6) > 0
    with pytest.raises(ValueError, match="every row of x has missing entries"):
        decoder.condition_(x.masked_fill(hidden, math.nan), 5, projected=True)


@pytest.mark.parametrize("projected", [False, True])
def test_encoders_that_see_the_active_set_are_shown_the_same_one_for_every_point(projected, generator):
    x, new = circle(50, 4, generator).split(40)
    decoder = make("active", True, 40, 4, num_active=8).initialize(x, steps=20)
    with pytest.raises(RuntimeError, match="call condition_"):
        decoder.encode(new)
    decoder.condition_(x, 15, projected=projected)
    together, alone = decoder.encode(new), torch.cat([decoder.encode(new[n : n + 1]) for n in range(10)])
    torch.testing.assert_close(together, alone)
    with torch.no_grad():
        torch.testing.assert_close(together, decoder._encode(new, x[:8])[0])
        torch.testing.assert_close(decoder.latents(x), decoder.encode(x))
    buffer = io.BytesIO()
    torch.save(decoder.state_dict(), buffer)
    buffer.seek(0)
    other = make("active", True, 40, 4, num_active=8)
    other.load_state_dict(torch.load(buffer))
    torch.testing.assert_close(other.encode(new), together)


def test_inference_in_blocks_and_without_gradients(generator):
    x, new = circle(70, 4, generator).double().split(50)
    decoder = make("free", False, 50, 4).double().initialize(x).condition_(x)
    whole = decoder.infer(new, steps=5)
    with torch.no_grad():
        torch.testing.assert_close(decoder.infer(new, steps=5, block=6), whole, rtol=1e-8, atol=1e-8)


def test_learning_rates_find_hyperparameters_inside_other_modules():
    rates = SASDecoder(10, 3).learning_rates(0.5, 0.1)
    assert [rates(name)["lr"] for name in ("z_loc", "decoder.z_scale", "encoder.0.weight")] == [0.5] * 3
    assert [rates(name)["lr"] for name in ("noise", "kernel.variance", "decoder.kernel.lengthscale", "decoder.noise")] == [0.1] * 4


def test_projection_on_all_points_is_exact_and_sums_add_up(generator):
    kernel, noise = kernels.Matern32(2).double(), torch.tensor(0.1, dtype=torch.float64)
    z, x = (torch.randn(30, size, dtype=torch.float64, generator=generator) for size in (2, 3))
    new = torch.randn(4, 2, dtype=torch.float64, generator=generator)
    statistics = projected_statistics(kernel, z, z, x, block=7)
    for found, expected in zip(
        ProjectedSet(kernel, noise, statistics).predict(new), ActiveSet(z, x, kernel, noise).predict(new), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    chosen = z[:6]
    U, S = kernel(chosen), kernel(chosen) + kernel(chosen, z) @ kernel(z, chosen) / noise
    mean, variance = ProjectedSet(kernel, noise, projected_statistics(kernel, chosen, z, x)).predict(new, noiseless=True)
    cross = kernel(new, chosen)
    torch.testing.assert_close(mean, cross @ torch.linalg.solve(S, kernel(chosen, z) @ x) / noise, rtol=1e-6, atol=1e-6)
    reduction = torch.linalg.inv(U) - torch.linalg.inv(S)
    torch.testing.assert_close(variance.squeeze(-1), 1 - (cross @ reduction * cross).sum(-1), rtol=1e-6, atol=1e-6)
    # In float32, with many points within a length-scale, the variance must not lose its digits to cancellation.
    dense, wide = torch.randn(200, 2, generator=generator), kernels.RBF(2, lengthscale=torch.tensor(2.0))
    single = ProjectedSet(wide, noise.float(), projected_statistics(wide, dense, dense, dense.sin())).predict(new.float(), noiseless=True)
    wide = wide.double()
    double = ProjectedSet(wide, noise, projected_statistics(wide, dense.double(), dense.double(), dense.double().sin())).predict(
        new, noiseless=True
    )
    for found, expected in zip(single, double, strict=True):
        torch.testing.assert_close(found, expected.float(), rtol=1e-2, atol=1e-5)


def test_inferred_latents_are_the_best_of_a_grid_from_partial_observations_too(generator):
    kernel, noise = kernels.RBF(1, lengthscale=torch.tensor(0.7)), torch.tensor(0.05)
    z = torch.linspace(-2, 2, 15).unsqueeze(-1)
    x = torch.cat([z.sin(), (2 * z).cos(), z**2 / 4], 1)
    posterior = ActiveSet(z, x, kernel, noise)
    new = x[2:12:2] + 0.1 * torch.randn(5, 3, generator=generator)
    new[torch.tensor([0, 1, 2]), torch.tensor([0, 2, 1])] = math.nan
    found = maximize(posterior, log_joint, new, best_candidates(posterior, new, z, 3), 200, 0.05)
    grid = torch.linspace(-3, 3, 4001).unsqueeze(-1)

    def exact_log_joint(latents):
        mean, variance = posterior.predict(latents)
        terms = dist.Normal(mean, variance.sqrt()).log_prob(new.unsqueeze(1).nan_to_num(0.0)).masked_fill(new.unsqueeze(1).isnan(), 0.0)
        return (terms.sum(-1) - 0.5 * latents.square().sum(-1)).detach()

    best = exact_log_joint(grid).max(1)
    reached = exact_log_joint(found.unsqueeze(1).expand(5, 5, 1).transpose(0, 1)).diagonal()
    assert bool((reached > best.values - 1e-3).all())
    candidates = best_candidates(posterior, new, z, 2)
    assert torch.equal(candidates[0], z[exact_log_joint(z).argmax(1)])


@pytest.mark.parametrize(("hide_active", "hide_new"), [(False, False), (False, True), (True, False), (True, True)])
def test_best_candidates_are_those_of_the_density(hide_active, hide_new, generator):
    """Variances that outputs share, and variances of their own where entries of the active set are missing."""
    z, x = torch.randn(12, 2, generator=generator).double(), circle(12, 3, generator).double()
    new = circle(9, 3, generator).double()
    if hide_active:
        x[0, 1] = math.nan
    if hide_new:
        new[2, 0] = math.nan
    kernel, noise = kernels.RBF(2).double(), torch.tensor(0.1).double()
    with torch.no_grad():
        posterior = ActiveSet(z, x, kernel, noise)
        mean, variance = posterior.predict(z)
        assert variance.shape[-1] == (3 if hide_active else 1)
        terms = dist.Normal(mean, variance.sqrt().expand_as(mean)).log_prob(new.nan_to_num(0.0).unsqueeze(1))
        values = terms.masked_fill(new.isnan().unsqueeze(1), 0.0).sum(-1) - 0.5 * z.square().sum(-1)
        assert torch.equal(best_candidates(posterior, new, z, 3), z[values.topk(3, 1).indices].movedim(1, 0))


@pytest.mark.slow
def test_state_dict_holds_what_predictions_need(generator):
    x = circle(40, 3, generator)
    decoder = make("point", False, 40, 3).initialize(x).condition_(x, 20)
    buffer = io.BytesIO()
    torch.save(decoder.state_dict(), buffer)
    buffer.seek(0)
    fresh = make("point", False, 40, 3)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    z = torch.randn(5, 2, generator=generator)
    torch.testing.assert_close(fresh.predict(z), decoder.predict(z))


def test_principal_components(generator):
    wide, tall = torch.randn(5, 40, generator=generator), torch.randn(40, 5, generator=generator)
    for data in (wide, tall):
        centred = data - data.mean(0)
        scores = principal_components(centred, 2)
        torch.testing.assert_close(scores.square().mean(0), torch.ones(2))
        U, _, _ = torch.linalg.svd(centred, full_matrices=False)
        torch.testing.assert_close((scores * U[:, :2]).sum(0).abs(), torch.full((2,), len(data) ** 0.5), rtol=1e-3, atol=1e-3)
    assert bool(principal_components(torch.zeros(6, 3), 2).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(50, 100), (100, 50)])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_columns_beyond_the_rank_are_standard_normal(shape, dtype, offset, generator):
    num_data, num_outputs = shape
    factors = torch.randn(num_data, 2, generator=generator, dtype=torch.float64)
    data = (factors @ torch.randn(2, num_outputs, generator=generator, dtype=torch.float64) + offset).to(dtype)
    first, again, other = (principal_components(data, 5, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert first.dtype == dtype
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    torch.testing.assert_close(first[:, :2], other[:, :2], rtol=0, atol=0)
    # The span of the two components is that of the centred factors.
    basis, _ = torch.linalg.qr(factors - factors.mean(0))
    torch.testing.assert_close(basis @ (basis.mT @ first[:, :2].double()), first[:, :2].double(), rtol=0, atol=1e-4)
    # Six columns of at least 50 independent numbers: the limits are over 4.5 standard deviations away, false alarms rarer than 1e-4 a case.
    filled = torch.cat([first[:, 2:], other[:, 2:]], 1).double()
    assert bool((filled.mean(0).abs() < 0.8).all())
    assert bool(((filled.var(0) > 0.3) & (filled.var(0) < 2.2)).all())
    correlations = torch.corrcoef(filled.mT) - torch.eye(6, dtype=torch.float64)
    assert float(correlations.abs().max()) < 0.75


def test_principal_components_centre_and_join_views(generator):
    data = torch.randn(30, 8, generator=generator, dtype=torch.float64)
    shifted = data + 5 * torch.randn(8, generator=generator, dtype=torch.float64)
    U, _, _ = torch.linalg.svd(data - data.mean(0), full_matrices=False)
    for given in (shifted, [shifted[:, :3], shifted[:, 3:]]):
        scores = principal_components(given, 3)
        torch.testing.assert_close(scores.mean(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-10)
        torch.testing.assert_close((scores * U[:, :3]).sum(0).abs(), torch.full((3,), 30**0.5, dtype=torch.float64))
    # A constant is rounding once it is centred.
    constant = torch.full((30, 8), 0.1, dtype=torch.float64)
    one, two = (principal_components(constant, 2, torch.Generator().manual_seed(seed)) for seed in (1, 2))
    assert bool((one != two).all())


def test_principal_components_refuse_bad_data():
    with pytest.raises(TypeError, match="floating point"):
        principal_components(torch.ones(4, 3, dtype=torch.long), 2)
    for data in (torch.ones(4), torch.ones(0, 3), torch.full((4, 3), math.nan)):
        with pytest.raises(ValueError, match="finite matrix"):
            principal_components(data, 2)


@pytest.mark.parametrize("kind", ["decoder", "model"])
def test_columns_that_one_noise_does_not_suit_are_named(kind, generator):
    x = torch.randn(30, 1, generator=generator) * torch.ones(5) + 0.1 * torch.randn(30, 5, generator=generator)

    def train(data):
        if kind == "decoder":
            decoder = make("free", False, *data.shape).fit(data, epochs=40)
            return decoder.noise_variance
        model = SpikeSlabGPLVM(*data.shape, 1, kernel="linear")
        fit(model, data.double(), steps=20, warm_up=20, rounds=1)
        return model.views[0].noise

    with warnings.catch_warnings(action="error"):
        expected = float(train(x).detach())
    with pytest.warns(UserWarning, match="6 of the 11 columns of .* do not vary, and lower the noise"):
        assert float(train(torch.cat([x, torch.full((30, 6), 0.1)], 1)).detach()) < 0.7 * expected
    with pytest.warns(UserWarning, match="share one noise, and have standard deviations of up to .*: standardise"):
        # The noise of the column in another unit is everybody's.
        assert float(train(x * torch.tensor([100.0, 1.0, 1.0, 1.0, 1.0])).detach()) > 2 * expected


@pytest.mark.parametrize(("epochs", "expected"), [(1999, []), (2000, ["SASDecoder makes 2000 passes over 20 data points"])])
def test_a_line_says_where_passes_are_many(epochs, expected, caplog):
    # Each line is said once per process.
    note_once.cache_clear()
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match="must vary"):
        SASDecoder(20, 3, batch_size=10).fit(torch.ones(20, 3), epochs=epochs)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == expected


def test_a_choice_among_very_many_latents_looks_at_some(generator):
    # Rows of two kinds take turns.
    kind = torch.arange(50_000) % 2
    z = torch.rand(50_000, 1, generator=generator) + 2 * kind.unsqueeze(1)
    decoder = SASDecoder(50_000, 2, 1, batch_size=100).initialize(torch.cat([z.sin(), z.cos()], 1), latents=z)
    seen = []

    def choose(kernel, latents, size):
        seen.append((len(latents), int((latents > 1.5).sum())))
        return torch.arange(0, len(latents), len(latents) // size)[:size]

    decoder.condition_(torch.cat([z.sin(), z.cos()], 1), 200, choose=choose)
    ((number, of_one_kind),) = seen
    assert number == 20_000
    # Seven standard deviations of a fair draw.
    assert abs(of_one_kind - 10_000) < 500
    torch.testing.assert_close(decoder.predict(z[:9])[0], torch.cat([z[:9].sin(), z[:9].cos()], 1), rtol=0, atol=0.1)


def test_inference_starts_from_kept_latents_of_all_kinds_where_these_take_turns(generator):
    z = 0.8 * torch.rand(4002, 1, generator=generator) + 2.0 * (torch.arange(4002) % 3 - 1).unsqueeze(1)
    x = torch.cat([(2 * z).sin(), (2 * z).cos(), z], 1)
    decoder = SASDecoder(4002, 3, 1, batch_size=100).initialize(x, latents=z)
    decoder.condition_(x, 4002)
    # Kinds lie more than one apart.
    assert float((decoder.infer(x[:6], starts=1, steps=0) - z[:6]).abs().max()) < 0.5


def test_a_generator_is_the_only_source_of_random_numbers(generator):
    x, found = torch.randn(12, 3, generator=generator), []
    for seed in (0, 1):
        pyro.set_rng_seed(0)
        decoder = make("free", True, 12, 3, batch_size=6, num_active=3)
        pyro.set_rng_seed(seed)
        decoder.fit(x, epochs=2, generator=torch.Generator().manual_seed(0))
        found.append(decoder.reconstruct(x)[0])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["free", "active"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_integers_are_taken_as_floats(kind, dtype, generator):
    x = torch.randint(0, 2, (12, 3), generator=generator).to(dtype)
    means = []
    for data in (x, x.float()):
        pyro.set_rng_seed(0)
        decoder = make(kind, False, 12, 3, batch_size=6, num_active=3)
        decoder.fit(data, epochs=2, generator=torch.Generator().manual_seed(0))
        means.append(torch.stack([decoder.predict(decoder.infer(data, steps=2))[0], decoder.reconstruct(data)[0]]).detach())
        SVI(decoder.model, decoder.guide, Adam({"lr": 0.01}), Trace_ELBO()).step(data)
    torch.testing.assert_close(*means)


@pytest.mark.parametrize("kind", ["free", "active"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_data_of_another_precision_are_taken_in_the_decoders(kind, dtype, generator):
    x = torch.randn(12, 3, generator=generator).half()
    found = []
    for data in (x.to(dtype), x.float()):
        pyro.set_rng_seed(0)
        decoder = make(kind, False, 12, 3, batch_size=6, num_active=3)
        decoder.fit(data, epochs=2, generator=torch.Generator().manual_seed(0))
        latents = decoder.infer(data, steps=2)
        candidates = CandidateLatents(decoder, data, generator=torch.Generator().manual_seed(0))
        found.append([latents, decoder.reconstruct(data)[0], candidates.infer(data)])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    with pytest.warns(UserWarning, match=r"lose precision in torch\.float32"):
        decoder.infer(x.double() + 1e7)
    with pytest.warns(UserWarning, match=r"lose precision in torch\.float32") as caught:
        make("free", False, 12, 3).fit(x.double() + 1e6, epochs=3)
    assert len(caught) == 1


def test_wrong_arguments_are_refused(generator):
    x = torch.randn(10, 3, generator=generator)
    decoder = make("free", False, 10, 3)
    with pytest.raises(ValueError, match="kernel must have input_dim=2"):
        SASDecoder(10, 3, kernel=kernels.RBF(3))
    with pytest.raises(ValueError, match=r"data x must have shape \(10, 3\)"):
        decoder.initialize(x[:5])
    with pytest.raises(ValueError, match="output 1 has only NaN"):
        decoder.initialize(x.index_fill(1, torch.tensor([1]), math.nan))
    with pytest.raises(RuntimeError, match="call condition_"):
        decoder.predict(torch.zeros(1, 2))
    for shape in ((1, 3), (1, 1), (3,)):  # kernels take the first columns of more
        with pytest.raises(ValueError, match=r"latents must have shape \(M, 2\)"):
            decoder.predict(torch.zeros(shape))
        with pytest.raises(ValueError, match=r"latents must have shape \(\*batch, B, 2\)"):
            ActiveSet(torch.zeros(2, 2), torch.zeros(2, 1), decoder.kernel, torch.tensor(0.1)).predict(torch.zeros(shape))
    with pytest.raises(ValueError, match="has no encoder"):
        decoder.encode(x)
    with pytest.raises(ValueError, match=r"data points x must have shape \(M, 3\)"):
        decoder.condition_(x).infer(x[:, :2])
    for other in (x[:, :2], x[:5]):  # which have no latents yet
        with pytest.raises(ValueError, match=r"data x must have shape \(10, 3\)"):
            decoder.latents(other)
    wrong = SASDecoder(10, 3, encoder=nn.Linear(3, 5))
    with pytest.raises(ValueError, match="encoder must return shape"):
        wrong.latents(x)
    with pytest.raises(ValueError, match="sizes must satisfy"):
        SASDecoder(10, 3, num_active=11)
    with pytest.raises(ValueError, match=r"the data x must vary, by 1e-19 at least, .* in torch\.float32; got a variance of 0"):
        decoder.initialize(torch.ones(10, 3))
    with pytest.raises(TypeError, match="x must hold real numbers"):
        decoder.initialize(torch.ones(10, 3, dtype=torch.complex64))
    infinite, huge = x.clone(), x.clone()
    infinite[2, 1], huge[2, 1] = math.inf, torch.finfo(x.dtype).max
    for call in (decoder.initialize, decoder.condition_, decoder.infer, decoder.relocate_):
        for bad in (infinite, huge):
            with pytest.raises(ValueError, match="data x must be finite, of magnitude"):
                call(bad)
    with pytest.raises(ValueError, match="within the support"):
        SVI(decoder.model, decoder.guide, Adam({"lr": 0.1}), Trace_ELBO()).step(infinite)
    for bad in (x[:5], x[:, :2]):
        with pytest.raises(ValueError, match=r"data x must have shape \(10, 3\)"):
            SVI(decoder.model, decoder.guide, Adam({"lr": 0.1}), Trace_ELBO()).step(bad)
    with pytest.raises(ValueError, match="a decoder with an encoder has no free latents"):
        wrong.relocate_(x)
    with pytest.raises(ValueError, match=r"latents must have shape \(10, 2\); got \(9, 2\)"):
        decoder.initialize(x, latents=torch.zeros(9, 2))
