"""Posteriors of slabs under a maximum: normalised, exact for single causes, a proposal whose weights estimate the evidence for several."""

from __future__ import annotations

import math

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated.distributions import MaximumSlabs, MaximumSuperposition, PiecewiseGaussian

NUM_DATA, NUM_OBSERVED, NUM_LATENTS = 5, 6, 3


def parameters() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weight, scale, slab mean and slab scale."""
    weight = (2 * torch.rand(NUM_OBSERVED, NUM_LATENTS) - 0.3).clamp(min=0.0).double()
    return weight, 0.5 + torch.rand(NUM_OBSERVED).double(), torch.rand(NUM_LATENTS).double(), 0.4 + torch.rand(NUM_LATENTS).double()


def data(with_missing: bool = False) -> Tensor:
    value = 1 + torch.randn(NUM_DATA, NUM_OBSERVED).double()
    if with_missing:
        value[torch.rand(value.shape) < 0.3] = math.nan
    return value


def test_density_is_normalised_and_has_its_mean() -> None:
    weight, scale, mean, deviation = parameters()
    others = torch.rand(NUM_DATA, NUM_OBSERVED).double()
    posterior = PiecewiseGaussian.from_maximum(data(), others, weight[:, 0], scale, mean[0].expand(NUM_DATA), deviation[0].expand(NUM_DATA))
    assert posterior.batch_shape == (NUM_DATA,)
    z = torch.linspace(-12, 12, 30_001).double().unsqueeze(-1)
    density = posterior.log_prob(z).exp()
    torch.testing.assert_close(torch.trapezoid(density, z, dim=0), torch.ones(NUM_DATA).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.trapezoid(z * density, z, dim=0), posterior.mean, rtol=0, atol=1e-6)
    wider = posterior.expand((4, NUM_DATA))
    torch.testing.assert_close(wider.log_prob(z[:1]), posterior.log_prob(z[:1]).expand(4, -1))
    draws = wider.sample((1000,)).flatten(0, 1)
    spread = (torch.trapezoid(z.square() * density, z, dim=0) - posterior.mean.square()).sqrt()
    # Five standard errors on five numbers: false alarm rate 3e-6 over all seeds.
    assert ((draws.mean(0) - posterior.mean).abs() < 5 * spread / math.sqrt(len(draws))).all()


def test_negative_elements_are_refused() -> None:
    weight, scale, mean, deviation = parameters()
    with pytest.raises(ValueError, match="must not be negative"):
        PiecewiseGaussian.from_maximum(data(), torch.zeros(NUM_OBSERVED), -weight[:, 0], scale, mean[0], deviation[0])


def score(states: Tensor, slabs: Tensor, value: Tensor, model: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """``log p(y, z | b)``."""
    weight, scale, mean, deviation = model
    likelihood = MaximumSuperposition(states * slabs, weight, scale).log_prob(value)
    return likelihood + dist.Normal(mean, deviation).to_event(1).log_prob(slabs)


@pytest.mark.parametrize("with_missing", [False, True])
def test_proposal_is_the_posterior_where_at_most_one_cause_is_on(with_missing: bool) -> None:
    model, value = parameters(), data(with_missing)
    states = torch.cat([torch.zeros(1, NUM_LATENTS), torch.eye(NUM_LATENTS)]).double().unsqueeze(1)
    proposal = MaximumSlabs(states, *model, value)
    assert proposal.batch_shape == (NUM_LATENTS + 1, NUM_DATA)
    slabs = proposal.sample((6,))
    evidence = score(states, slabs, value, model) - proposal.log_prob(slabs)
    torch.testing.assert_close(evidence, evidence[:1].expand_as(evidence), rtol=1e-9, atol=1e-9)
    weight, scale, mean, deviation = model
    nothing = torch.zeros(NUM_DATA, 1, NUM_OBSERVED).double()
    exact = PiecewiseGaussian.from_maximum(value.unsqueeze(1), nothing, weight.mT, scale, mean, deviation).log_normalizer
    torch.testing.assert_close(evidence[0, 1:], exact.mT, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_weights_of_the_proposal_estimate_the_evidence_of_two_causes() -> None:
    model, value = parameters(), data()
    states = torch.tensor([1.0, 1.0, 0.0]).double()
    weight, scale, mean, deviation = model
    axes = [mean[h] + deviation[h] * torch.linspace(-8, 8, 401).double() for h in range(2)]
    offers = torch.maximum((axes[0].unsqueeze(-1) * weight[:, 0]).unsqueeze(1), axes[1].unsqueeze(-1) * weight[:, 1]).clamp(min=0.0)
    prior = dist.Normal(mean[0], deviation[0]).log_prob(axes[0]).unsqueeze(1) + dist.Normal(mean[1], deviation[1]).log_prob(axes[1])
    log_joint = dist.Normal(offers, scale).to_event(1).log_prob(value[:, None, None]) + prior
    exact = torch.trapezoid(torch.trapezoid(log_joint.exp(), axes[1]), axes[0])
    proposal = MaximumSlabs(states, *model, value)
    slabs = proposal.sample((2000,))
    weights = (score(states, slabs, value, model) - proposal.log_prob(slabs)).exp() / exact
    # Five standard errors on five means: false alarm rate 3e-6 over all seeds.
    assert ((weights.mean(0) - 1).abs() < 5 * weights.std(0) / math.sqrt(len(weights))).all()
    # Close to the posterior: of 2000 draws the weights leave more than 2000 / (1 + 1).
    assert weights.var(0).max() < 1
    # Proposals from the prior are far worse.
    prior_slabs = mean + deviation * torch.randn(2000, NUM_DATA, NUM_LATENTS).double()
    naive = MaximumSuperposition(states * prior_slabs, weight, scale).log_prob(value).exp() / exact
    assert (weights.var(0) < 0.2 * naive.var(0)).all()


def test_slabs_of_causes_that_are_off_have_their_prior() -> None:
    model, value = parameters(), data()
    states = torch.tensor([1.0, 0.0, 1.0]).double()
    proposal = MaximumSlabs(states, *model, value)
    one = proposal.sample()
    other = one.clone()
    other[..., 1] += torch.randn(NUM_DATA).double()
    prior = dist.Normal(model[2][1], model[3][1])
    expected = prior.log_prob(other[..., 1]) - prior.log_prob(one[..., 1])
    torch.testing.assert_close(proposal.log_prob(other) - proposal.log_prob(one), expected, rtol=1e-9, atol=1e-9)


def test_types_and_gradients() -> None:
    weight, *others = (tensor.float() for tensor in parameters())
    weight.requires_grad_()
    proposal = MaximumSlabs(torch.ones(NUM_LATENTS), weight, *others, data().float())
    slabs = proposal.sample()
    assert slabs.dtype == proposal.log_prob(slabs).dtype == torch.float32
    assert not proposal.log_prob(slabs).requires_grad
