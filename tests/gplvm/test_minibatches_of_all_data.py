"""Decoders whose minibatch is all data in another order, as by default and on small data."""

from __future__ import annotations

import math

import pyro
import pytest
import torch
from pyro.infer import Trace_ELBO

from pyro_truncated.gp import ActiveSet, Split
from pyro_truncated.gplvm import SASDecoder, SASFunctionDecoder


def loss_of_active_points(z, x, decoder, active):
    """Minus the objective of point masses ``z``, from the active set's own formulas."""
    order = active + [n for n in range(len(x)) if n not in active]
    z, x = z[order], x[order] - decoder.loc
    posterior = ActiveSet(z[: len(active)], x[: len(active)], decoder.kernel, decoder.noise_variance)
    mean, variance = posterior.predict(z[len(active) :])
    rest = torch.distributions.Normal(mean, variance.sqrt()).log_prob(x[len(active) :]).sum()
    return -float((posterior.log_prob_terms().sum() + rest + torch.distributions.Normal(0.0, 1.0).log_prob(z).sum()).detach())


def test_every_data_point_keeps_its_latent(generator):
    x = torch.randn(9, 3, generator=generator).double()
    decoder = SASDecoder(9, 3).double().initialize(x)
    expected = loss_of_active_points(decoder.latents(x), x, decoder, [7, 2, 5])
    elbo = Trace_ELBO().loss(decoder.model, decoder.guide, x, Split(torch.tensor([7, 2, 5, 8, 0, 1, 6, 3, 4]), 3))
    assert elbo == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "kind", [SASDecoder, lambda n, d, **k: SASFunctionDecoder(n, d, lambda f: pyro.distributions.Normal(f, 1).to_event(1), **k)]
)
def test_a_posterior_belongs_to_the_data_point(kind, generator):
    x = torch.randn(6, 2, generator=generator)
    decoder = kind(6, 2, bayesian=True).initialize(x)
    order = torch.tensor([5, 3, 0, 1, 4, 2])
    q = pyro.poutine.trace(decoder.guide).get_trace(x, Split(order, 3)).nodes["z"]["fn"].base_dist
    torch.testing.assert_close(q.loc, decoder.z_loc[order])
    torch.testing.assert_close(q.scale, decoder.z_scale[order])


@pytest.mark.nightly
def test_two_signals_in_forty_points_are_no_noise(generator):
    """The noise is 0.05 per feature, of signals of variance one."""
    signals, mixing = torch.randn(60, 2, generator=generator), torch.randn(2, 6, generator=generator)
    x, new = (signals @ mixing + 0.05 * torch.randn(60, 6, generator=generator) + 3).double().tensor_split([40])
    decoder = SASDecoder(40, 6).double().fit(x, epochs=300, generator=generator)
    assert float(decoder.noise_variance.detach()) < 0.01
    found, _ = decoder.predict(decoder.infer(new))
    assert float((found - new).square().mean()) < 0.02


def test_a_fit_is_reproduced_by_its_generator_and_takes_gaps(generator):
    x = torch.randn(12, 3, generator=generator)
    x[2, 1] = torch.nan
    first, second = (SASDecoder(12, 3, num_active=3, batch_size=6) for _ in "ab")
    for decoder in (first, second):
        decoder.fit(x, epochs=4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(first.latents(x), second.latents(x), rtol=0, atol=0)
    assert bool(first.predict(first.infer(x))[0].isfinite().all())


@pytest.mark.slow
def test_decoders_with_an_encoder_or_an_observation_distribution_fit(generator):
    x = torch.rand(12, 3, generator=generator).round()
    encoded = SASDecoder(12, 3, encoder=torch.nn.Linear(3, 2)).fit(x, epochs=2)
    assert encoded.predict(encoded.encode(x))[0].shape == x.shape
    functions = SASFunctionDecoder(12, 3, lambda f: pyro.distributions.Bernoulli(logits=f).to_event(1), bayesian=True).fit(x, epochs=2)
    assert functions.infer(x).shape == (12, 2)


@pytest.mark.parametrize("wrong", [{"epochs": 0}, *({"learning_rate": rate} for rate in (0.0, math.nan, math.inf, 1e300))])
def test_a_fit_refuses(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SASDecoder(4, 2).fit(torch.randn(4, 2), **wrong)
