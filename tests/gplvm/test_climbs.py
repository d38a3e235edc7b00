"""Maxima of many functions at once: against known maxima, and against long runs of plain gradient ascent."""

from __future__ import annotations

import math

import pytest
import torch

from pyro_truncated.gplvm import CandidateLatents, SASDecoder
from pyro_truncated.gplvm.batched_bfgs import maximize_batched
from pyro_truncated.gplvm.decoders.latents import OwnLatents, log_joint
from tests.gplvm.test_sas_decoder import circle

CENTRES = torch.tensor([[3.0, -2.0, 0.5], [0.0, 1.0, -4.0], [10.0, 0.0, 0.0]], dtype=torch.float64)
SHAPES = torch.tensor([[1.0, 30.0, 0.1], [5.0, 5.0, 5.0], [1e-2, 1.0, 100.0]], dtype=torch.float64)


def bowls(points, rows):
    return -((points - CENTRES[rows]).square() * SHAPES[rows]).sum(-1)


def test_each_quadratic_reaches_its_own_maximum():
    found = maximize_batched(bowls, torch.zeros(1, 3, 3, dtype=torch.float64), 100, 0.05, tolerance=1e-12)
    assert bool((bowls(found, torch.arange(3)) > -1e-6).all())


@pytest.mark.parametrize("evaluations", [0, 1, 2, 5, 7])
def test_no_result_is_below_the_best_start(evaluations, generator):
    starts = torch.randn(4, 3, 3, generator=generator).double()
    best = torch.stack([bowls(start, torch.arange(3)) for start in starts]).amax(0)
    reached = bowls(maximize_batched(bowls, starts, evaluations, 0.5), torch.arange(3))
    assert bool((reached >= best).all())
    assert evaluations < 5 or bool((reached > best).all())


def test_functions_do_not_influence_each_other_and_there_may_be_none(generator):
    starts = torch.randn(2, 3, 3, generator=generator).double()
    together = maximize_batched(bowls, starts, 9, 0.1)
    alone = maximize_batched(lambda z, n: bowls(z, n + 1), starts[:, 1:2], 9, 0.1)
    torch.testing.assert_close(together[1:2], alone, rtol=1e-10, atol=1e-10)
    assert maximize_batched(bowls, starts[:, :0], 9, 0.1).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_banana_and_a_slope_without_end(dtype):
    def banana(points, rows):
        x, y = points.unbind(-1)
        return torch.where(rows == 0, -((1 - x).square() + 10 * (y - x.square()).square()), x)

    found = maximize_batched(banana, torch.full((1, 2, 2), -1.0, dtype=dtype), 80, 0.1, tolerance=1e-10)
    torch.testing.assert_close(found[0], torch.ones(2, dtype=dtype), rtol=0, atol=1e-2)
    assert float(found[1, 0]) > 40  # a step is no longer than one


def conditioned(generator, num_data=60):
    x = circle(num_data + 20, 6, generator).double()
    x[num_data:, ::2] = torch.nan
    return SASDecoder(num_data, 6).double().fit(x[:num_data], epochs=30, generator=generator), x[:num_data], x[num_data:]


@pytest.mark.slow
def test_inferred_latents_are_those_of_a_long_ascent(generator):
    decoder, _, new = conditioned(generator)
    posterior = decoder.posterior()
    z = decoder.infer(new).clone().requires_grad_()

    def total():
        return log_joint(posterior, new - decoder.loc, z).sum()

    before, optimizer = total().item(), torch.optim.Adam([z], 1e-3)
    for _ in range(300):
        optimizer.zero_grad()
        (-total()).backward()
        optimizer.step()
    assert total().item() < before + 1e-2


@pytest.mark.slow
def test_the_own_latent_is_one_more_component(generator):
    decoder, x, new = conditioned(generator)
    candidates = CandidateLatents(decoder, x, generator=generator)
    z = decoder.infer(new)
    mean, variance = decoder.predict(torch.cat([candidates.latents, z[:1]]), noiseless=True)
    seen, spread = ~new[0].isnan(), variance + candidates.own_noise
    normal = torch.distributions.Normal(mean[:, seen], spread[:, seen].sqrt())
    prior = torch.cat([candidates.latents, z[:1]]).square().sum(1) / 2
    log_weights = (normal.log_prob(new[0, seen]).sum(1) - prior) / candidates.own_temperature
    log_weights[-1] += math.log(0.04 * len(candidates.latents))
    weights = log_weights.softmax(0)
    expected = weights @ mean
    torch.testing.assert_close(candidates.reconstruct(new)[0][0], expected, rtol=1e-8, atol=1e-10)
    around = OwnLatents.at(decoder.posterior(), z[:1], decoder.loc).spread(seen[None].double(), candidates.own_noise)[0]
    own = weights @ (mean.square() + variance) - expected.square() + weights[-1] * candidates.own_temperature * around
    without, found = candidates.reconstruct(new, noiseless=True)[1][0], candidates.reconstruct(new, block=7)[1][0]
    scale = (found - without) / candidates.own_noise
    torch.testing.assert_close(scale, scale[:1].expand(6))
    torch.testing.assert_close(without, scale * own, rtol=1e-6, atol=1e-9)
