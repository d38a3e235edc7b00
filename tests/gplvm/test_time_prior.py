"""Latents that follow Gaussian processes over time: against dense algebra, the exact evidence, and models without time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pyro.infer import Predictive, Trace_ELBO

from pyro_truncated import to_arviz
from pyro_truncated.gplvm import (
    Posterior,
    SpikeSlabGPLVM,
    SpikeSlabMRD,
    TimePrior,
    fit,
    fit_minibatches,
    initialize,
    maximize_bound,
    principal_components,
)
from pyro_truncated.utils.arviz_compat import get_dataset
from tests.gplvm import exact

DOUBLE = torch.float64


def random_model(num_data=5, num_observed=(2, 3), num_latents=2, kernel="rbf", seed=0, **options):
    torch.manual_seed(seed)
    times = 3 * torch.rand(num_data, dtype=DOUBLE)
    model = SpikeSlabMRD(num_data, num_observed, num_latents, time_prior=TimePrior(times, kernel, **options), num_inducing=4, prior=0.3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model, [torch.randn(num_data, d, dtype=DOUBLE) for d in num_observed]


def dense(prior):
    """Covariances of the prior, means and covariances of the posterior, by inverses."""
    K = prior.covariance().detach()
    R = torch.diag_embed(prior.spread.detach().square().mT)
    S = torch.linalg.inv(torch.linalg.inv(K) + torch.linalg.inv(R))
    return K, (S @ torch.linalg.inv(R) @ prior.targets.detach().mT.unsqueeze(-1)).squeeze(-1), S


KERNELS = [("rbf", {}), ("matern", {}), ("ou", {}), ("periodic", {"period": 2.0}), ("rbf", {"sequences": torch.tensor([0, 0, 1, 1, 1])})]


@pytest.mark.parametrize(("kernel", "options"), KERNELS)
def test_marginals_and_divergence_are_those_of_dense_formulas(kernel, options):
    model, _ = random_model(kernel=kernel, **options)
    K, mean, S = dense(model.time_prior)
    found = model.latents()
    torch.testing.assert_close(found.loc.detach(), mean.mT)
    torch.testing.assert_close(found.scale.square().detach(), S.diagonal(dim1=-2, dim2=-1).mT)
    normal = torch.distributions.MultivariateNormal
    divergence = torch.distributions.kl_divergence(normal(mean, S), normal(torch.zeros_like(mean), K))
    torch.testing.assert_close(found.divergence.detach(), divergence)
    drawn = model.time_prior.distribution(torch.tensor([True, False]))
    torch.testing.assert_close(drawn.base_dist.covariance_matrix.detach(), torch.stack([S[0], K[1]]))
    torch.testing.assert_close(drawn.base_dist.mean.detach(), torch.stack([mean[0], torch.zeros_like(mean[0])]))
    torch.testing.assert_close(model.loc, found.loc)


def test_prior_of_new_times_is_the_conditional_of_the_process():
    model, _ = random_model()
    prior = model.time_prior
    K, _, _ = dense(prior)
    times = torch.tensor([0.5, 1.7, 9.0], dtype=DOUBLE)
    cross = prior.correlations(times, torch.zeros(3)).detach()
    A = torch.linalg.inv(K + torch.diag_embed(prior.spread.detach().square().mT))
    mean = (cross @ A @ prior.targets.detach().mT.unsqueeze(-1)).squeeze(-1)
    variance = 1 - (cross @ A @ cross.mT).diagonal(dim1=-2, dim2=-1)
    found = prior.at(times)
    torch.testing.assert_close(found[0].detach(), mean.mT)
    torch.testing.assert_close(found[1].square().detach(), variance.mT)


def test_without_correlations_it_is_the_model_of_independent_latents():
    model, views = random_model(num_data=6)
    with torch.no_grad():
        model.time_prior.timescale = torch.full((2,), 1e-6, dtype=DOUBLE)
    other = SpikeSlabMRD(6, (2, 3), 2, num_inducing=4, prior=0.3)
    other.load_state_dict(model.state_dict(), strict=False)
    other.set_latents(model.loc, model.scale)
    torch.testing.assert_close(model.bound(views), other.bound(views), rtol=1e-9, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("num_observed", [(3,), (2, 2)])
def test_bound_stays_below_the_exact_evidence(num_observed):
    model, views = random_model(2, num_observed, 1)
    for steps in (0, 40):
        maximize_bound(model, views, steps, fixed=("noise", "kernel", "timescale"))
        kernels = [exact.rbf(view.kernel.variance.detach(), view.kernel.lengthscale.detach()) for view in model.views]
        root = torch.linalg.cholesky(model.time_prior.covariance().detach())
        noises = [float(view.noise.detach()) for view in model.views]
        evidence = exact.log_evidence(views, kernels, noises, model.prior, 40, root)
        gap = evidence - float(model.bound(views).detach())
        assert gap > -0.02, steps  # the quadrature's own error
    assert gap < 20


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("number", [40, 400])
def test_stock_elbo_estimates_the_bound(number):
    model, views = random_model(4, (2, 2))
    elbo = Trace_ELBO(num_particles=1)
    samples = -torch.tensor([elbo.loss(model.model, model.guide, views) for _ in range(number)], dtype=DOUBLE)
    # Seeded; false alarm in 1 of 10 000 seeds.
    assert abs(float(samples.mean() - model.bound(views).detach())) < 3.9 * float(samples.std()) / number**0.5
    assert Predictive(model.model, num_samples=3)()["y_1"].shape[-2:] == (4, 2)
    draws = get_dataset(to_arviz(model, views), "posterior")["x"]
    assert draws.shape[-2:] == (4, 2)


def sequence(num=60, seed=0):
    """Frames of a bump that moves to and fro, with noise, at uneven times."""
    generator = torch.Generator().manual_seed(seed)
    times = torch.linspace(0, 6, num, dtype=DOUBLE)
    place = 2 * torch.sin(1.7 * times)
    clean = torch.exp(-(place[:, None] - torch.linspace(-3, 3, 20, dtype=DOUBLE)).square())
    return times, clean, clean + 0.1 * torch.randn(num, 20, generator=generator, dtype=DOUBLE)


@pytest.mark.nightly
def test_frames_that_were_held_out_are_filled_in_from_their_times():
    times, clean, frames = sequence()
    held = torch.zeros(60, dtype=torch.bool)
    held[10:16] = held[33:38] = held[50:52] = True
    model = SpikeSlabGPLVM(int((~held).sum()), 20, 2, time_prior=TimePrior(times[~held]), num_inducing=20)
    fit(model, frames[~held], steps=100, warm_up=100, rounds=2, generator=torch.Generator().manual_seed(0))
    posterior = Posterior(model, frames[~held])
    found = posterior.reconstruct(posterior.at(times[held]))
    error = (found.mean - clean[held]).square().mean().sqrt()
    # Lines between the frames on both sides of a gap.
    left, right = (clean[~held][at] for at in _neighbours(times, held))
    start, end = (times[~held][at] for at in _neighbours(times, held))
    share = ((times[held] - start) / (end - start))[:, None]
    lines = ((1 - share) * left + share * right - clean[held]).square().mean().sqrt()
    assert float(error) < 0.7 * float(lines)
    # Half a frame and its time are better than half a frame.
    half = frames[held].clone()
    half[:, 4:] = torch.nan
    with_time = posterior.reconstruct(posterior.infer(half, times=times[held]))
    without = posterior.reconstruct(posterior.infer(half))
    errors = [float((one.mean - clean[held]).square().mean()) for one in (with_time, without)]
    assert errors[0] < errors[1]


def _neighbours(times, held):
    known = times[~held]
    after = torch.searchsorted(known, times[held])
    return after - 1, after


def test_contribution_of_new_points_at_known_times():
    model, views = random_model(6)
    posterior = Posterior(model, views)
    new, times = torch.randn(3, 2, dtype=DOUBLE), torch.tensor([0.1, 1.0, 2.0], dtype=DOUBLE)
    latents = posterior.infer({0: new}, times=times, steps=2)
    mean, deviation = (v.detach() for v in model.time_prior.at(times))
    normal = torch.distributions.Normal
    divergence = torch.distributions.kl_divergence(normal(latents.loc, latents.scale), normal(mean, deviation)).sum(1)
    expected = model.views[0].log_likelihood(posterior.view_inputs(latents, 0), new, posterior.inducing[0], per_datum=True)
    torch.testing.assert_close(latents.bound, (expected - divergence).detach(), rtol=1e-6, atol=1e-6)


def test_times_sequences_and_latents_may_be_lists():
    times, sequences = [0.0, 1.0, 2.0], [0, 0, 1]
    pairs = [TimePrior(times, sequences=sequences), TimePrior(torch.tensor(times), sequences=torch.tensor(sequences))]
    for prior in pairs:
        prior.start(2)
    torch.testing.assert_close(pairs[0].at([0.5], [1]), pairs[1].at(torch.tensor([0.5]), torch.tensor([1])))
    with pytest.raises(TypeError, match=r"times must be .* got an array of datetime64.*: divide differences of times by a unit"):
        TimePrior(np.array(["2026-01-01", "2026-01-02"], dtype="datetime64[D]"))
    for others in ((0.5,), ([0.5], [math.nan])):
        with pytest.raises(ValueError, match="times must be finite, with a sequence each"):
            pairs[0].at(*others)
    with pytest.raises(ValueError, match=r"sequences must have a number for each of the 2 times; got float32 of shape \(2,\), 1 NaN"):
        TimePrior([0.0, 1.0], sequences=torch.tensor([0.0, math.nan]))
    with pytest.raises(TypeError, match="period must be a number or None; got 'year'"):
        TimePrior([0.0, 1.0], "periodic", period="year")
    model, views = random_model(6)
    posterior = Posterior(model, views)
    torch.testing.assert_close(posterior.at([0.5, 1.0]).loc, posterior.at(torch.tensor([0.5, 1.0])).loc)
    loc = torch.randn(2, model.num_latents, dtype=DOUBLE)
    torch.testing.assert_close(posterior.predict(loc.tolist(), scale=loc.abs().tolist()).mean, posterior.predict(loc, scale=loc.abs()).mean)
    data = torch.randn(8, 3, dtype=DOUBLE)
    torch.testing.assert_close(principal_components(data.tolist(), 2), principal_components(data, 2))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="finite"):
        TimePrior(torch.tensor([0.0, math.nan]))
    with pytest.raises(ValueError, match="kernel must be one of"):
        TimePrior(torch.arange(3.0), "cubic")
    with pytest.raises(ValueError, match="period"):
        TimePrior(torch.arange(3.0), "periodic")
    with pytest.raises(ValueError, match="a number for each"):
        TimePrior(torch.arange(3.0), sequences=torch.zeros(2))
    with pytest.raises(ValueError, match="a time for each"):
        SpikeSlabGPLVM(4, 2, 1, time_prior=TimePrior(torch.arange(3.0)))
    model = SpikeSlabGPLVM(3, 2, 1, time_prior=TimePrior(torch.arange(3.0)), collapsed=False)
    y = torch.randn(3, 2)
    initialize(model, y)
    with pytest.raises(ValueError, match="with a time_prior depend on each other"):
        fit_minibatches(model, y, 1, batch_size=2)
    with pytest.raises(ValueError, match="with a time_prior depend on each other"):
        model.bound(y, batch_size=2)
    plain = SpikeSlabGPLVM(3, 2, 1)
    with pytest.raises(ValueError, match="time_prior"):
        Posterior(plain, y.double()).at(torch.zeros(2))
