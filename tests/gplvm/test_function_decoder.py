"""Functions behind observations that are not Gaussian: the guide's density, the bound, training."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.gp import kernels
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch import nn

from pyro_truncated.distributions import ActiveSetGaussianProcess, ActiveSetPosterior
from pyro_truncated.gp import ActiveSet, UniformSplits
from pyro_truncated.gplvm import SASFunctionDecoder


def setting(generator, num_data=5, num_active=3, num_outputs=2):
    kernel = kernels.RBF(1, torch.tensor(1.5), torch.tensor(0.8)).double()
    z, y = (torch.randn(num_data, size, dtype=torch.float64, generator=generator) for size in (1, num_outputs))
    posterior = ActiveSetPosterior(z, kernel, 0.1, num_active, y[:num_active], 0.6)
    prior = ActiveSetGaussianProcess(z, kernel, 0.1, num_active, num_outputs)
    with torch.no_grad():
        K = kernel(z) + 0.1 * torch.eye(num_data, dtype=torch.float64)
    return posterior, prior, K, y


def joint_normal(K, y, num_active, width):
    """Mean and covariance of the posterior of all functions, by dense inverses."""
    A, R = slice(0, num_active), slice(num_active, len(K))
    gain = K[A, A] @ torch.linalg.inv(K[A, A] + width * torch.eye(num_active, dtype=K.dtype))
    mean, covariance = gain @ y[A], K[A, A] - gain @ K[A, A]
    step = K[R, A] @ torch.linalg.inv(K[A, A])
    rest = torch.diag((K[R, R] - step @ K[A, R]).diagonal()) + step @ covariance @ step.mT
    top, bottom = torch.cat([covariance, covariance @ step.mT], 1), torch.cat([step @ covariance, rest], 1)
    return torch.cat([mean, step @ mean]), torch.cat([top, bottom])


def test_density_is_the_joint_normal(generator):
    posterior, _, K, y = setting(generator)
    mean, covariance = joint_normal(K, y, 3, 0.6)
    f = torch.randn(5, 2, dtype=torch.float64, generator=generator)
    expected = dist.MultivariateNormal(mean.mT, covariance).log_prob(f.mT).sum()
    torch.testing.assert_close(posterior.log_prob(f).sum(), expected, rtol=1e-8, atol=1e-8)


def test_samples_have_the_moments_of_the_density(generator):
    """20 000 draws: means and covariances within six standard errors, false alarms below 1e-6."""
    posterior, _, K, y = setting(generator)
    mean, covariance = joint_normal(K, y, 3, 0.6)
    draws = posterior.rsample((20_000,)).detach()
    assert bool(((draws.mean(0) - mean).abs() < 6 * (covariance.diagonal() / 20_000).sqrt().unsqueeze(-1)).all())
    for d in range(2):
        centred = draws[..., d] - mean[:, d]
        error = ((covariance.diagonal().outer(covariance.diagonal()) + covariance.square()) / 20_000).sqrt()
        assert bool(((centred.mT @ centred / 20_000 - covariance).abs() < 6 * error).all())


def test_the_rest_costs_nothing_and_exact_sites_make_the_bound_tight_for_every_draw(generator):
    posterior, prior, K, y = setting(generator)
    f = posterior.rsample()
    gap = (prior.log_prob(f) - posterior.log_prob(f)).detach()
    torch.testing.assert_close(gap[3:], torch.zeros(2, dtype=gap.dtype), rtol=0, atol=1e-9)
    likelihood = dist.Normal(f[:3], math.sqrt(0.6)).log_prob(y[:3]).sum()
    evidence = dist.MultivariateNormal(torch.zeros(3, dtype=K.dtype), K[:3, :3] + 0.6 * torch.eye(3, dtype=K.dtype)).log_prob(y[:3].mT)
    torch.testing.assert_close(gap[:3].sum() + likelihood.detach(), evidence.sum(), rtol=1e-8, atol=1e-8)


def test_bernoulli_bound_stays_below_the_evidence_and_comes_close(generator):
    """Two points, one output, against quadrature; 4000 draws, five standard errors, false alarms 3e-7."""
    z, x = torch.tensor([[0.0], [0.7]], dtype=torch.float64), torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    kernel = kernels.RBF(1, torch.tensor(2.0), torch.tensor(1.0)).double()
    with torch.no_grad():
        K = kernel(z) + 0.05 * torch.eye(2, dtype=torch.float64)
    grid = torch.linspace(-9, 9, 601, dtype=torch.float64)
    points = torch.cartesian_prod(grid, grid)
    log_joint = dist.MultivariateNormal(torch.zeros(2, dtype=K.dtype), K).log_prob(points) + dist.Bernoulli(logits=points).log_prob(
        x.mT
    ).sum(-1)
    evidence = float(log_joint.logsumexp(0)) + 2 * math.log(18 / 600)
    bounds = {}
    for slope, width in ((0.0, 1e4), (4.0, 4.0), (5.0, 5.0)):
        posterior = ActiveSetPosterior(z, kernel, 0.05, 2, slope * (x - 0.5), width)
        f = posterior.rsample((4000,)).detach()
        prior = ActiveSetGaussianProcess(z, kernel, 0.05, 2, 1)
        terms = (prior.log_prob(f) - posterior.log_prob(f) + dist.Bernoulli(logits=f).log_prob(x).sum(-1)).sum(-1).detach()
        bounds[slope] = float(terms.mean())
        assert bounds[slope] < evidence + 5 * float(terms.std()) / math.sqrt(4000)
    assert max(bounds.values()) > evidence - 0.05
    assert bounds[0.0] < evidence - 0.1


class OneHotSites(nn.Module):
    """Targets of categorical outputs: contrasts of the one-hot code."""

    def __init__(self, num_classes):
        super().__init__()
        self.num_classes, self.slope = num_classes, nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return self.slope * (nn.functional.one_hot(x.long(), self.num_classes) - 1 / self.num_classes).flatten(1)


class CountSites(nn.Module):
    """Targets of counts: log rates."""

    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return (x + 0.1 + self.offset.exp()).log()


FAMILIES = {
    "bernoulli": (lambda f: dist.Bernoulli(logits=f).to_event(1), None, 6),
    "poisson": (lambda f: dist.Poisson(f.exp().clamp(max=1e4)).to_event(1), CountSites(), 6),
    "categorical": (lambda f: dist.Categorical(logits=f.unflatten(-1, (6, 3))).to_event(1), OneHotSites(3), 18),
}


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("bayesian", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_explains_held_out_data(family, bayesian, generator):
    observe, sites, num_functions = FAMILIES[family]
    angle = 2 * math.pi * torch.rand(80, 1, generator=generator)
    phase = 2 * math.pi * torch.rand(num_functions, generator=generator)
    torch.manual_seed(1)
    x, new = observe(2.5 * (angle + phase).sin()).sample().float().split(60)
    decoder = SASFunctionDecoder(60, num_functions, observe, sites=sites, bayesian=bayesian).initialize(x)
    svi = SVI(decoder.model, decoder.guide, Adam(decoder.learning_rates(0.05, 0.05)), Trace_ELBO())
    splits = UniformSplits(60, 40, 20, generator)
    losses = [sum(svi.step(x, split) for split in splits.epoch()) for _ in range(25)]
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-5:]) < sum(losses[:5])
    z = decoder.condition_(x, 30).infer(new, steps=15)
    mean, _ = decoder.predict(z, noiseless=True)
    null = torch.zeros_like(mean) + {"bernoulli": 0.0, "poisson": math.log(float(x.mean())), "categorical": 0.0}[family]
    assert observe(mean).log_prob(new).mean() > observe(null).log_prob(new).mean()


def test_wrong_arguments_are_refused(generator):
    with pytest.raises(ValueError, match="3 active points"):
        ActiveSetPosterior(torch.zeros(5, 2), kernels.RBF(2), 0.1, 3, torch.zeros(2, 4), 1.0)
    decoder = SASFunctionDecoder(10, 3, lambda f: dist.Bernoulli(logits=f).to_event(1))
    with pytest.raises(ValueError, match="data must have 10 rows"):
        decoder.condition_(torch.zeros(4, 3))
    with pytest.raises(RuntimeError, match="call condition_"):
        decoder.posterior()
    x = torch.bernoulli(torch.full((10, 3), 0.5), generator=generator)
    with pyro.poutine.trace() as trace:
        decoder.guide(x, next(UniformSplits(10, 6, 2, generator).epoch()))
    assert trace.trace.nodes["f"]["value"].shape == (6, 3)


def test_relocation_of_binary_data_raises_their_log_density(generator):
    angle = 2 * math.pi * torch.rand(60, 1, generator=generator)
    phase = 2 * math.pi * torch.rand(6, generator=generator)
    x = torch.bernoulli((3 * (angle + phase).sin()).sigmoid(), generator=generator)
    decoder = SASFunctionDecoder(60, 6, lambda f: dist.Bernoulli(logits=f).to_event(1)).initialize(x)
    before = decoder.z_loc.detach().clone()
    active = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:20]
    share = decoder.relocate_(x, 20, generator=torch.Generator().manual_seed(0))
    assert torch.equal(decoder.z_loc[active], before[active])
    assert share > 0.2
    posterior = ActiveSet(before[active], decoder.sites(x[active]), decoder.kernel, decoder.noise_variance + decoder.width)
    own, moved = (
        dist.Bernoulli(logits=posterior.predict(z)[0]).log_prob(x).sum(-1) - 0.5 * z.square().sum(-1) for z in (before, decoder.z_loc)
    )
    changed = (decoder.z_loc != before).any(1)
    assert bool((moved > own)[changed].all())


def test_amortised_categorical_decoders_and_their_samples(generator):
    observe, sites, num_functions = FAMILIES["categorical"]
    x = torch.randint(3, (40, 6), generator=generator).float()
    encoder = nn.Linear(6, 4)
    decoder = SASFunctionDecoder(40, num_functions, observe, sites=sites, bayesian=True, encoder=encoder).initialize(x, steps=20)
    assert math.isfinite(SVI(decoder.model, decoder.guide, Adam({"lr": 0.01}), Trace_ELBO()).step(x))
    draws = decoder.condition_(x, 20).sample(9)
    assert draws.shape == (9, 6)
    assert set(draws.unique().tolist()) <= {0.0, 1.0, 2.0}


def test_data_of_other_types_are_taken(generator):
    x = torch.bernoulli(torch.full((10, 3), 0.5), generator=generator)
    found = []
    for data in (x, x.double(), x.bool(), x.long(), x.byte()):
        torch.manual_seed(0)
        decoder = SASFunctionDecoder(10, 3, lambda f: dist.Bernoulli(logits=f).to_event(1))
        found.append(decoder.fit(data, epochs=2, generator=torch.Generator().manual_seed(0)).infer(data, steps=3))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-5)


def test_missing_data_and_projections_are_refused(generator):
    x = torch.bernoulli(torch.full((10, 3), 0.5), generator=generator)
    decoder = SASFunctionDecoder(10, 3, lambda f: dist.Bernoulli(logits=f).to_event(1)).initialize(x)
    with pytest.raises(ValueError, match="takes neither projected nor num_neighbors"):
        decoder.condition_(x, projected=True)
    decoder.condition_(x)
    missing = x.masked_fill(torch.eye(10, 3) > 0, math.nan)
    svi = SVI(decoder.model, decoder.guide, Adam({"lr": 0.01}), Trace_ELBO())
    for call in (decoder.initialize, decoder.condition_, decoder.infer, svi.step):
        with pytest.raises(ValueError, match="must be complete and finite"):
            call(missing)
