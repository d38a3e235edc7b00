"""Decoders that predict from the data points closest to a latent, and normals around the most probable latents."""

from __future__ import annotations

import io
import math

import pyro
import pytest
import torch
from pyro.contrib.gp import kernels

from pyro_truncated.gp import ActiveSet
from pyro_truncated.gp.active_sets import NearestSet
from pyro_truncated.gplvm import CandidateLatents, SASDecoder
from pyro_truncated.gplvm.decoders.latents import OwnLatents


def curved(num_data, num_outputs, num_latents, generator, noise=0.1):
    """Outputs that are waves of latents, each with a noise of its own around ``noise``."""
    z = torch.randn(num_data, num_latents, generator=generator)
    maps = torch.randn(num_latents, num_outputs, generator=generator) / num_latents**0.5
    scale = noise * (0.5 + torch.arange(num_outputs) / num_outputs)
    return (1.5 * z @ maps).sin() + z @ maps.flip(0) + scale * torch.randn(num_data, num_outputs, generator=generator)


def conditioned(num_data, latent_dim, **options):
    x = curved(num_data, 8, latent_dim, torch.Generator().manual_seed(0))
    return SASDecoder(num_data, 8, latent_dim).initialize(x).condition_(x, **options), x


@pytest.mark.parametrize(("num_data", "latent_dim", "kind"), [(2001, 5, NearestSet), (500, 5, ActiveSet)])
def test_what_is_kept_depends_on_how_much_and_how_many_dimensions_there_are(num_data, latent_dim, kind):
    decoder, _ = conditioned(num_data, latent_dim)
    assert type(decoder.posterior()) is kind


def test_predictions_from_the_closest_points_are_saved():
    decoder, x = conditioned(60, 3, num_neighbors=7)
    buffer = io.BytesIO()
    torch.save(decoder.state_dict(), buffer)
    buffer.seek(0)
    other = SASDecoder(60, 8, 3)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    z = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    for found, expected in zip(other.predict(z), decoder.predict(z), strict=True):
        torch.testing.assert_close(found, expected)
    rows = torch.cdist(z[:1], decoder.latents(x)).argsort()[0, :7]
    given = ActiveSet(decoder.latents(x)[rows], x[rows] - decoder.loc, decoder.kernel, decoder.noise_variance)
    torch.testing.assert_close(decoder.predict(z[:1])[0], given.predict(z[:1])[0].detach() + decoder.loc)


def test_points_with_gaps_are_no_neighbours():
    decoder, x = conditioned(60, 3)
    x[:20, 1] = math.nan
    assert len(decoder.condition_(x, num_neighbors=50).posterior().latents) == 40
    with pytest.raises(ValueError, match="every row of x has missing entries"):
        decoder.condition_(x.index_fill(1, torch.tensor([0]), math.nan), num_neighbors=5)


@pytest.mark.slow
def test_inferred_latents_are_stationary_given_their_closest_points():
    decoder, x = conditioned(300, 6, num_neighbors=40)
    decoder = decoder.double().condition_(x.double(), num_neighbors=40)
    new = curved(20, 8, 6, torch.Generator().manual_seed(5)).double()
    new[::2, :3] = math.nan
    z = decoder.infer(new, steps=120).requires_grad_()
    around = decoder.posterior().around(z.detach())
    mean, variance = around.predict(z)
    terms = torch.where(new.isnan(), 0.0, (new.nan_to_num(0.0) - decoder.loc - mean).square() / variance + variance.log()).sum(1)
    values = -(terms + z.square().sum(1)) / 2
    (gradient,) = torch.autograd.grad(values.sum(), z)
    # A climb ends where a step promises less than 1e-3; one whose neighbours changed at the last moment may be elsewhere.
    assert float(gradient.norm(dim=1).median()) < 0.3
    mean, variance = decoder.predict(decoder.latents(x).double())
    best = torch.stack(
        [-(torch.where(p.isnan(), 0.0, (p.nan_to_num(0.0) - mean).square() / variance + variance.log()).sum(1)) / 2 for p in new]
    )
    start = (best - decoder.latents(x).double().square().sum(1) / 2).amax(1)
    assert bool((values.detach() > start - 1e-6).double().mean() > 0.9)


def test_options_that_exclude_each_other_are_refused():
    decoder, x = conditioned(40, 3)
    for options in ({"size": 5}, {"projected": True}):
        with pytest.raises(ValueError, match="leave size and projected out"):
            decoder.condition_(x, num_neighbors=5, **options)


def test_minibatches_have_a_thousand_points_by_default():
    assert [SASDecoder(num, 3).batch_size for num in (40, 999, 1000, 70_000)] == [40, 999, 1000, 1000]


def test_normals_around_latents_have_the_curvature_of_gauss_and_newton():
    generator = torch.Generator().manual_seed(0)
    z, x = (torch.randn(30, size, generator=generator, dtype=torch.float64) for size in (3, 5))
    posterior = ActiveSet(z, x, kernels.RBF(3).double(), torch.tensor(0.1, dtype=torch.float64))
    places, loc = torch.randn(4, 3, generator=generator, dtype=torch.float64), torch.randn(5, generator=generator, dtype=torch.float64)
    seen = (torch.rand(4, 5, generator=generator) < 0.6).double()
    noise = torch.rand(5, generator=generator, dtype=torch.float64) + 0.1
    with torch.no_grad():
        own = OwnLatents.at(posterior, places, loc)
    spread, joint = own.spread(seen, noise), own.log_joint(torch.where(seen > 0, x[:4], torch.nan), noise)
    for n in range(4):
        J = torch.autograd.functional.jacobian(lambda q: posterior.predict(q[None])[0][0], places[n]).detach()
        mean, variance = (v.detach() for v in posterior.predict(places[n : n + 1], noiseless=True))
        precision = torch.diag(seen[n] / (variance[0] + noise))
        covariance = torch.linalg.inv(torch.eye(3, dtype=torch.float64) + J.mT @ precision @ J)
        torch.testing.assert_close(spread[n], (J @ covariance @ J.mT).diagonal(), rtol=1e-3, atol=1e-6)
        normal = torch.distributions.Normal(mean[0] + loc, (variance[0] + noise).sqrt())
        expected = normal.log_prob(x[n])[seen[n] > 0].sum() - places[n].square().sum() / 2
        torch.testing.assert_close(joint[n], expected)


@pytest.mark.nightly
def test_intervals_cover_in_five_dimensions():
    # At one latent they cover 0.95, 0.79 and 0.78.
    generator = torch.Generator().manual_seed(0)
    pyro.set_rng_seed(0)
    x, new = curved(800, 20, 5, generator, 0.4).split([500, 300])
    decoder = SASDecoder(500, 20, 5, num_active=100).fit(x, epochs=60, generator=generator)
    candidates = CandidateLatents(decoder, x, generator=generator)
    for hide in (torch.zeros(300, 20) > 0, torch.rand(300, 20, generator=generator) < 0.5, torch.arange(20).expand(300, 20) >= 10):
        mean, variance = candidates.reconstruct(new.masked_fill(hide, math.nan))
        chosen = hide if bool(hide.any()) else ~hide
        inside = ((new - mean).abs() < 1.96 * variance.sqrt())[chosen].double().mean()
        one = decoder.predict(decoder.infer(new.masked_fill(hide, math.nan)))
        scores = [(v.log() + (new - m).square() / v)[chosen].mean() for m, v in ((mean, variance), (one[0], one[1].expand_as(mean)))]
        # At least 3000 entries of 300 points: three standard errors are 0.012 to 0.03. Five latents take a quarter of the squares of twenty
        # entries that are seen, which are covered by 0.976.
        assert 0.92 < float(inside) < (0.98 if bool(hide.any()) else 0.988)
        assert scores[0] < scores[1] or not bool(hide.any())
