"""Posteriors of new data points over candidate latents: against loops, and whether their intervals cover."""

from __future__ import annotations

import math

import pytest
import torch

from pyro_truncated.gp import UniformSplits
from pyro_truncated.gplvm import CandidateLatents, SASDecoder
from tests.gplvm.test_sas_decoder import circle, train


def untrained(num_data=30, missing=0.0):
    x = circle(num_data, 4, torch.Generator().manual_seed(0))
    x = x.masked_fill(torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < missing, math.nan)
    return SASDecoder(num_data, 4).initialize(x).condition_(x), x


@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_weights_and_moments_are_those_of_the_mixture(missing):
    decoder, x = untrained(missing=missing)
    found = CandidateLatents(decoder, x, most=12, generator=torch.Generator().manual_seed(0))
    new = circle(3, 4, torch.Generator().manual_seed(2))
    new[0, 1] = new[2, 3] = math.nan
    new[2, :2] = math.nan
    found.temperature = 3.0
    weights = found.infer(new)
    mean, variance = (v.double() for v in decoder.predict(found.latents, noiseless=True))
    for row, chances in zip(new.double(), weights, strict=True):
        logs = []
        for z, m, v in zip(found.latents.double(), mean, variance, strict=True):
            normal = torch.distributions.Normal(m, (v + found.noise).sqrt())
            seen = ~row.isnan()
            logs.append(normal.log_prob(row.nan_to_num(0.0))[seen].sum() - z.square().sum() / 2)
        # Errors are correlated: of more entries they average out less.
        temperature = 1 + 2 * max(1.0, float((~row.isnan()).sum()) / found.usual_count)
        torch.testing.assert_close(chances, (torch.stack(logs) / temperature).softmax(0), rtol=1e-6, atol=1e-9)
    components = torch.distributions.Normal(mean, (variance + found.noise).sqrt())
    predicted = found.predict(weights)
    assert torch.equal(found.log_density(new, weights) == 0, new.isnan())
    complete, density = new.nan_to_num(0.3).double(), found.log_density(new.nan_to_num(0.3), weights)
    for n, chances in enumerate(weights):
        first = (chances[:, None] * mean).sum(0)
        second = (chances[:, None] * (mean.square() + components.variance)).sum(0)
        torch.testing.assert_close(predicted[0][n], first)
        torch.testing.assert_close(predicted[1][n], second - first.square())
        expected = (chances[:, None].log() + components.log_prob(complete[n])).logsumexp(0)
        torch.testing.assert_close(density[n], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.nightly
def test_intervals_of_hidden_entries_cover_and_each_output_has_its_noise():
    generator = torch.Generator().manual_seed(0)
    noise = torch.linspace(0.05, 0.5, 12)
    clean = circle(900, 12, generator, noise=0.0)
    x = clean + noise * torch.randn(900, 12, generator=generator)
    decoder = SASDecoder(600, 12).initialize(x[:600])
    train(decoder, x[:600], 40, UniformSplits(600, 200, 60))
    decoder.condition_(x[:600])
    candidates = CandidateLatents(decoder, x[:600], generator=generator)
    for hide in (torch.rand(300, 12, generator=generator) < 0.5, torch.arange(12).expand(300, 12) >= 6):
        hidden = x[600:].masked_fill(hide, math.nan)
        mean, variance = candidates.predict(candidates.infer(hidden))
        inside = ((x[600:] - mean).abs() < 1.96 * variance.sqrt())[hide].double().mean()
        # 1800 hidden entries: three standard errors are 0.015.
        assert 0.92 < float(inside) < 0.98
        own, spread = decoder.reconstruct(hidden)
        # Intervals hold 96.5 % of the entries of training points that are hidden alike.
        assert 0.93 < float(((x[600:] - own).abs() < 1.96 * spread.sqrt())[hide].double().mean()) < 0.98
        one = decoder.predict(decoder.infer(hidden, steps=30))
        scores = [(v.log() + (x[600:] - m).square() / v)[hide].mean() for m, v in ((mean, variance), (one[0], one[1].expand_as(one[0])))]
        assert scores[0] < scores[1]
    torch.testing.assert_close(candidates.noise.sqrt().float(), noise, rtol=0.5, atol=0.05)


def test_calibration_leaves_a_points_own_latent_out():
    # Outputs of pure noise: every point's own latent would explain it, others do not.
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    decoder = SASDecoder(40, 3).initialize(x).condition_(x)
    found = CandidateLatents(decoder, x, generator=torch.Generator().manual_seed(0))
    variance = found.predict(torch.full((1, 40), 1 / 40, dtype=torch.float64))[1]
    assert bool((variance > 0.5 * x.var(0)).all())


@pytest.mark.parametrize("kind", [lambda tensor: tensor.numpy(), lambda tensor: tensor.tolist()])
def test_arrays_and_lists_are_data_points_and_weights(kind):
    decoder, x = untrained()
    found = CandidateLatents(decoder, x)
    weights = found.infer(x[:4])
    torch.testing.assert_close(found.predict(kind(weights)), found.predict(weights))
    torch.testing.assert_close(found.log_density(kind(x[:4].double()), kind(weights)), found.log_density(x[:4], weights))


def test_what_makes_no_sense_is_refused():
    decoder, x = untrained()
    with pytest.raises(ValueError, match="training data"):
        CandidateLatents(decoder, x[:5])
    with pytest.raises(ValueError, match=r"at least three data points.*; got 2"):
        CandidateLatents(*untrained(2))
    found = CandidateLatents(decoder, x)
    with pytest.raises(ValueError, match="shape"):
        found.infer(x[:, :2])
    with pytest.raises(ValueError, match="finite"):
        found.infer(x[:2] / 0)
    with pytest.raises(TypeError, match="x must hold real numbers"):
        found.reconstruct(x[:2].to(torch.complex64))
    again = CandidateLatents(decoder, x.numpy(), generator=torch.Generator().manual_seed(1))
    whole = x.round()
    torch.testing.assert_close(*(CandidateLatents(decoder, some).latents.sort(0).values for some in (whole, whole.long())))
    for new in (x[:2].numpy(), x[:2].tolist()):
        assert torch.equal(again.infer(new), again.infer(x[:2]))


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_the_decoders_own_reconstructions_are_those_of_candidates(missing):
    decoder, x = untrained(missing=missing)
    new = circle(3, 4, torch.Generator().manual_seed(2))
    new[0, 1] = new[2, 3] = math.nan
    expected = CandidateLatents(decoder, x, generator=torch.Generator().manual_seed(0)).reconstruct(new)
    state = torch.get_rng_state()
    for given in (new, new.numpy()):
        for found, wanted in zip(decoder.reconstruct(given), expected, strict=True):
            torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    assert bool((decoder.reconstruct(new, noiseless=True)[1] < expected[1]).all())


def test_variances_are_scaled_by_which_entries_are_hidden():
    decoder, x = untrained()
    candidates = CandidateLatents(decoder, x, generator=torch.Generator().manual_seed(0))
    new = circle(8, 4, torch.Generator().manual_seed(2))

    def scale(new, hidden):
        data = new.masked_fill(hidden, math.nan)
        with_noise, without = (candidates.reconstruct(data, noiseless=noiseless)[1] for noiseless in (False, True))
        scales = (with_noise - without) / candidates.own_noise
        torch.testing.assert_close(scales, scales[:1, :1].expand_as(scales))
        return float(scales[0, 0])

    last, none = torch.tensor([False, False, True, True]), torch.zeros(4, dtype=torch.bool)
    assert scale(new, none) == pytest.approx(candidates.own_scale)
    assert scale(new, last) == pytest.approx(scale(new[:1].flip(1), last))
    assert scale(new, last) != pytest.approx(scale(new, last.flip(0)), rel=1e-3)
    # More data points than training points.
    assert scale(circle(90, 4, torch.Generator().manual_seed(3)), last) == pytest.approx(scale(new, last))


@pytest.mark.slow
def test_reconstructions_need_the_training_data():
    decoder, x = untrained()
    other = SASDecoder(30, 4)
    with pytest.raises(RuntimeError, match="condition_"):
        other.reconstruct(x)
    other.load_state_dict(decoder.state_dict())
    with pytest.raises(RuntimeError, match="states do not hold"):
        other.reconstruct(x)
    other.condition_(x)
    torch.testing.assert_close(other.reconstruct(x[:2]), decoder.reconstruct(x[:2]))
