"""Maximal causes of exponential families: densities against torch's, gradients against the statistics, causes found again."""

from __future__ import annotations

import math
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor
from torch.distributions import Bernoulli, Exponential, Gamma, Poisson

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, ExhaustiveSearch, Truncated_ELBO, learn
from pyro_truncated.distributions import BernoulliMaximum, ExponentialMaximum, FamilyMaximum, GammaMaximum, PoissonMaximum
from pyro_truncated.models import ExponentialFamilyMaximalCauses
from pyro_truncated.states import Population, StateSpace
from tests.models.enumeration import assert_never_falls, free_energies, full_population, generate

D64 = torch.float64
D, H = 5, 3
FAMILIES: dict[str, tuple[Any, Any]] = {
    "poisson": (PoissonMaximum, Poisson),
    "bernoulli": (BernoulliMaximum, Bernoulli),
    "exponential": (ExponentialMaximum, lambda mean: Exponential(1 / mean)),
    "gamma": (GammaMaximum, lambda mean: Gamma(2.5, 2.5 / mean)),
}


def parameters(family: str) -> tuple[Tensor, ...]:
    weight, background = 0.1 + 0.8 * torch.rand(D, H, dtype=D64), 0.1 + 0.4 * torch.rand(D, dtype=D64)
    factor = 1.0 if family == "bernoulli" else 5.0
    shape = (torch.tensor(2.5, dtype=D64),) if family == "gamma" else ()
    return factor * weight, factor * background, *shape


def draws(family: str, num_data: int, with_missing: bool = False) -> Tensor:
    mean = torch.rand(num_data, D, dtype=D64) if family == "bernoulli" else 4 * torch.rand(num_data, D, dtype=D64) + 0.1
    y: Tensor = FAMILIES[family][1](mean).sample()
    if with_missing:
        y[torch.rand(y.shape) < 0.3] = math.nan
        y[1] = math.nan
    return y


@pytest.mark.parametrize("with_missing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_dense_and_packed_densities_are_those_of_the_family(family: str, with_missing: bool) -> None:
    make, reference = FAMILIES[family]
    given, y = parameters(family), draws(family, 6, with_missing)
    space = StateSpace([2] * H)
    states = space.unpack(space.enumerate(), D64)
    mean = torch.stack([(given[0] * state).amax(-1).maximum(given[1]) for state in states])
    terms = reference(mean.unsqueeze(1)).log_prob(torch.where(y.isnan(), 1.0, y))
    expected = terms.masked_fill(y.isnan(), 0.0).sum(-1)
    likelihood = make(states.unsqueeze(1), *given)
    torch.testing.assert_close(likelihood.log_prob(y), expected, rtol=1e-10, atol=1e-10)
    packed = make(torch.zeros(H, dtype=D64), *given).packed_log_prob(space.enumerate().expand(len(y), -1, -1), y)
    torch.testing.assert_close(packed.mT, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(likelihood.mean.squeeze(1), mean)
    torch.testing.assert_close(likelihood.variance.squeeze(1), reference(mean).variance)


def expected_loss(likelihood: FamilyMaximum, means: Tensor, statistics: dict[str, Tensor]) -> Tensor:
    """Expected negative log densities of every dimension, ``(D,)``, under the dictionary that the statistics come from."""
    return (likelihood.partition(means) * statistics["wins"] - likelihood.natural(means) * statistics["won"]).sum(1) - statistics["bases"]


@pytest.mark.parametrize("with_missing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_are_the_gradient_of_the_free_energy(family: str, with_missing: bool) -> None:
    make, given, y = FAMILIES[family][0], parameters(family), draws(family, 9, with_missing)
    space, free = StateSpace([2] * H), [parameter.clone().requires_grad_() for parameter in given]
    words = torch.stack([space.enumerate()[torch.randperm(2**H)[:5]] for _ in y])
    zeros = torch.zeros(H, dtype=D64)
    scores = make(zeros, *free).packed_log_prob(words, y)
    gradient, slope = torch.autograd.grad(scores.logsumexp(-1).sum(), free[:2])
    likelihood = make(zeros, *given)
    statistics = likelihood.statistics(Population(space, words, scores.detach()), y)
    means = torch.cat([given[0], given[1].unsqueeze(-1)], -1).requires_grad_()
    (natural_slope,) = torch.autograd.grad(likelihood.natural(means).sum(), means)
    expected = natural_slope * (statistics["won"] - statistics["wins"] * means.detach())
    torch.testing.assert_close(torch.cat([gradient, slope.unsqueeze(-1)], -1), expected, rtol=1e-9, atol=1e-9)
    weights = scores.detach().softmax(-1)
    states = space.unpack(words, D64)
    torch.testing.assert_close(statistics["states"], torch.einsum("nc,nch->h", weights, states))
    losses = -(weights * scores.detach()).sum()
    torch.testing.assert_close(expected_loss(likelihood, means, statistics).sum(), losses)
    expected = torch.einsum("nc,ncd->nd", weights, make(states, *given).mean)
    torch.testing.assert_close(likelihood.reconstruct(Population(space, words, scores.detach()), y), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_draws_have_the_moments(family: str) -> None:
    # 5 standard errors of 10 means and variances with a kurtosis of at most 9: false alarm rate 2e-5 over all seeds.
    likelihood = FAMILIES[family][0](torch.tensor([1.0, 0.0, 1.0], dtype=D64), *parameters(family))
    y = likelihood.sample((20_000,))
    assert likelihood.support.check(y).all()
    assert ((y.mean(0) - likelihood.mean) / (likelihood.variance / 20_000).sqrt()).abs().max() < 5
    torch.testing.assert_close(y.var(0), likelihood.variance, rtol=5 * math.sqrt(8 / 20_000), atol=0)
    assert likelihood.expand([2]).log_prob(y[:2]).shape == (2,)


def bars(family: str, size: int = 4) -> ExponentialFamilyMaximalCauses:
    """Horizontal and vertical bars of a high mean on a low background."""
    model = ExponentialFamilyMaximalCauses(size**2, 2 * size, family=family, dtype=D64)
    high, low = (0.9, 0.05) if family == "bernoulli" else (12.0, 1.0)
    images = torch.full((2 * size, size, size), low, dtype=D64)
    for i in range(size):
        images[i, i], images[size + i, :, i] = high, high
    model.weight, model.background = images.flatten(1).mT.contiguous(), torch.full((size**2,), low, dtype=D64)
    model.prior = torch.tensor(2 / (2 * size), dtype=D64)
    if family == "gamma":
        model.concentration = torch.tensor(4.0, dtype=D64)
    return model


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["bernoulli", "gamma"])
def test_causes_are_found_again(family: str) -> None:
    truth = bars(family)
    pyro.set_rng_seed(1)
    y = generate(truth, 600)
    y[torch.rand(y.shape) < 0.1] = math.nan
    model = ExponentialFamilyMaximalCauses(16, 8, family=family, dtype=D64)
    learn(model, y, EvolutionarySearch(parents=6, children=4, generations=2), num_states=30, steps=60)
    # Means of about 75 data points each; probabilities to 0.06, others to a few parts in ten: far below the contrast of the bars.
    found, expected = model.weight.detach().maximum(model.background.detach().unsqueeze(-1)), truth.weight.detach()
    contrast = expected.max() - expected.min()
    distances = (found.mT.unsqueeze(1) - expected.mT).abs().amax(-1) / contrast
    assert sorted(distances.argmin(1).tolist()) == list(range(8))
    assert distances.amin(1).max() < 0.4
    if family == "gamma":
        assert model.concentration.item() == pytest.approx(4.0, rel=0.15)


@pytest.mark.parametrize("family", FAMILIES)
def test_em_from_the_truth_only_gains(family: str) -> None:
    truth = bars(family, 2)
    y = generate(truth, 400, with_missing=True)
    values = free_energies(truth, y, num_iterations=10)
    assert_never_falls(values)
    # 4 x 4 means, 4 backgrounds, prior and concentration: in the limit twice the gain is at most chi-squared with 22 degrees of freedom,
    # false alarm rate below 1e-4.
    assert 0 < 2 * (values[-1] - values[0]) < 22 + 5 * math.sqrt(2 * 22)


def test_the_concentration_of_gamma_distributions_is_the_maximiser() -> None:
    truth = bars("gamma", 2)
    y = generate(truth, 200)
    free_energies(truth, y, num_iterations=3)
    population = full_population(truth, y)
    truth.maximize(truth.sufficient_statistics(population, y))
    best = truth.concentration.item()

    def expected(concentration: float) -> float:
        truth.concentration = torch.tensor(concentration, dtype=D64)
        return float((population.weights() * full_population(truth, y).log_joint).sum())

    values = [expected(best * factor) for factor in (0.999, 1.0, 1.001)]
    assert values[1] > max(values[0], values[2])


def test_free_energies_of_narrow_gammas_rise_in_single_precision() -> None:
    generator = torch.Generator().manual_seed(1)
    states = (torch.rand(200, 4, generator=generator) < 0.4).double()
    y = 1000 + states @ (3 * torch.rand(4, 6, generator=generator, dtype=D64)) + 0.3 * torch.randn(200, 6, generator=generator, dtype=D64)
    model = ExponentialFamilyMaximalCauses(6, 4, family="gamma").initialize(y.float(), torch.Generator().manual_seed(3))
    svi = SVI(model, AutoTruncated(model, num_states=16), ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    losses = torch.tensor([svi.step(y.float()) for _ in range(15)])
    assert bool((losses.diff() < 0).all())
    # Their deviation is a thousandth of their mean, where losses and logarithms cancel to the seventh digit.
    assert model.concentration.item() > 9e5


@pytest.mark.slow
def test_minibatches_learn() -> None:
    y = generate(bars("poisson"), 600)
    model = ExponentialFamilyMaximalCauses(16, 8, dtype=D64).initialize(y, torch.Generator().manual_seed(0))
    before = full_population(model, y).free_energy().sum().item()
    pyro.clear_param_store()
    guide = AutoTruncated(model, num_states=16)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(parents=4, children=3, generations=1)))
    for _ in range(30):
        svi.step(y, 150)
    assert full_population(model, y).free_energy().sum().item() > before


def test_wrong_families_are_refused() -> None:
    with pytest.raises(ValueError, match="family must be one of 'poisson', 'bernoulli', 'exponential', 'gamma'; got 'normal'"):
        ExponentialFamilyMaximalCauses(4, 3, family="normal")
    with pytest.raises(ValueError, match="weight"):
        BernoulliMaximum(torch.zeros(3), torch.full((4, 3), 1.5), 0.1)
