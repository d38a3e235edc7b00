"""Spike-and-slab sparse coding with correlated slabs: against brute force, EM that ends where it should, and the truth found again."""

from __future__ import annotations

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.distributions import CorrelatedSlabSuperposition
from pyro_truncated.models import SpikeSlabSparseCoding, spike_slab_sparse_coding
from pyro_truncated.models.spike_slab_sparse_coding import CorrelatedSlabs
from pyro_truncated.states import Population
from tests.models.enumeration import assert_never_falls, free_energies, full_population, generate, log_joint
from tests.pretended_device import PretendedDevice, here, there

D64 = torch.float64
NUM_OBSERVED = 7
NAMES = ("weight", "scale", "prior", "slab_mean", "slab_scale")


def make_model(num_latents: int = 3, correlation: float = 0.8, dtype: torch.dtype = D64) -> SpikeSlabSparseCoding:
    """A model whose slabs all have this correlation."""
    model = SpikeSlabSparseCoding(NUM_OBSERVED, num_latents, covariance="full", offset=False, dtype=dtype)
    model.weight = 3 * torch.randn(NUM_OBSERVED, num_latents, dtype=dtype)
    model.slab_mean = 1 + torch.rand(num_latents, dtype=dtype)
    deviation = 0.5 + torch.rand(num_latents, dtype=dtype)
    covariance = deviation.outer(deviation) * torch.full((num_latents, num_latents), correlation, dtype=dtype).fill_diagonal_(1.0)
    model.slab_scale = torch.linalg.cholesky(covariance)
    return model


def covariance_of(model: SpikeSlabSparseCoding) -> Tensor:
    root = model.slab_scale.detach()
    return root @ root.mT


def test_collapsed_log_joint_is_the_mixture_of_gaussians() -> None:
    model = make_model()
    y = generate(model, 40)
    states = torch.bernoulli(torch.full((5, 3), 0.5)).double()
    loadings = model.weight * states.unsqueeze(-2)
    covariance = model.scale.square() * torch.eye(NUM_OBSERVED) + loadings @ covariance_of(model) @ loadings.mT
    likelihood = dist.MultivariateNormal(loadings @ model.slab_mean, covariance).log_prob(y.unsqueeze(1))
    prior = dist.Bernoulli(model.prior).log_prob(states).sum(-1)
    torch.testing.assert_close(log_joint(model, y, states), prior + likelihood, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_log_prob_is_the_integral_over_the_slabs() -> None:
    weight, scale, mean = torch.randn(4, 2, dtype=D64), 0.5 + torch.rand(4, dtype=D64), torch.randn(2, dtype=D64)
    root, value = torch.tensor([[0.9, 0.0], [-0.6, 0.5]], dtype=D64), 2 * torch.randn(4, dtype=D64)
    # The trapezoidal rule converges faster than any power for such integrands.
    grid = torch.linspace(-14, 14, 801, dtype=D64)
    slabs = torch.cartesian_prod(grid, grid)
    prior = dist.MultivariateNormal(mean, scale_tril=root).log_prob(slabs)
    expected = (prior + dist.Normal(slabs @ weight.mT, scale).log_prob(value).sum(-1)).logsumexp(0) + 2 * (grid[1] - grid[0]).log()
    actual = CorrelatedSlabSuperposition(torch.ones(2, dtype=D64), weight, scale, mean, root).log_prob(value)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.nightly
@pytest.mark.parametrize("with_missing", [False, True])
def test_free_energy_gradient_vanishes_at_convergence(with_missing: bool) -> None:
    # Slabs that go together by 0.5: stronger ones leave a variance near zero in 60 data points.
    model = make_model(2, 0.5)
    y = generate(model, 60, with_missing)
    assert_never_falls(free_energies(model, y, num_iterations=300))
    total = log_joint(model, y, full_population(model, y).states(y.dtype)[0]).logsumexp(-1).sum()
    for gradient in torch.autograd.grad(total, [getattr(model, f"{name}_unconstrained") for name in NAMES]):
        assert gradient.abs().max() < 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("rarely", [0.6, 0.15])
def test_a_correlated_slab_is_found(rarely: float) -> None:
    # Of N N's that are active together the correlation has standard error (1 - 0.64) / sqrt(n): with 4000 data points 0.01 and 0.04.
    truth = make_model(3, 0.8)
    truth.prior = torch.full((3,), rarely, dtype=D64)
    y = generate(truth, 4000)
    model = make_model(3, 0.0)
    model.weight, model.prior = truth.weight.detach(), truth.prior.detach()
    assert_never_falls(free_energies(model, y, num_iterations=60))
    # Elements keep their norm, so the units of the slabs are those of the truth.
    found, expected = covariance_of(model), covariance_of(truth)
    deviation = expected.diagonal().sqrt()
    torch.testing.assert_close(found / deviation.outer(deviation), expected / deviation.outer(deviation), rtol=0, atol=0.25)
    correlation = found / found.diagonal().sqrt().outer(found.diagonal().sqrt())
    assert (correlation[~torch.eye(3, dtype=torch.bool)] - 0.8).abs().max() < (0.05 if rarely > 0.5 else 0.2)


@pytest.mark.slow
def test_steps_from_the_truth_only_gain() -> None:
    truth = make_model(3, 0.8)
    values = free_energies(truth, generate(truth, 2000), num_iterations=11)
    assert_never_falls(values)
    # 21 weights, of which 3 norms are kept, 1 + 3 + 3 + 6 others: 31 identified parameters. In the limit twice the gain is at most
    # chi-squared with 31 degrees of freedom: false alarm rate below 1e-4 over all seeds.
    assert 0 < 2 * (values[-1] - values[0]) < 31 + 5 * math.sqrt(2 * 31)


@pytest.mark.slow
def test_a_trial_on_some_of_the_data_loses_nothing() -> None:
    # So many that a part of them nominates the step.
    truth = make_model(3, 0.7)
    y = generate(truth, 2500, with_missing=True)
    assert_never_falls(free_energies(make_model(3, 0.0), y, num_iterations=12))


@pytest.mark.parametrize(("sign", "expected"), [(1.0, [(250, 4), (1000, 2)]), (-1.0, [(250, 4)])])
def test_all_data_are_asked_about_long_steps_only(monkeypatch: pytest.MonkeyPatch, sign: float, expected: list[tuple[int, int]]) -> None:
    asked: list[tuple[int, int]] = []

    def gains(self: CorrelatedSlabSuperposition, population: Population, y: Tensor, means: Tensor, *others: Any) -> Tensor:
        asked.append((len(population), len(means)))
        return sign * torch.arange(float(len(means)))

    model, y = make_model(3, 0.0), generate(make_model(3, 0.7), 1000)
    population = full_population(model, y)
    monkeypatch.setattr(CorrelatedSlabSuperposition, "expected_log_slab_prior", gains)
    model.sufficient_statistics(population, y)
    assert asked == expected


def test_a_covariance_with_a_floor_leaves_the_others_as_they_are() -> None:
    deviation = torch.tensor([1.0, 100.0, 3.0], dtype=D64)
    correlations = torch.eye(3, dtype=D64).repeat(3, 1, 1)
    correlations[1, :2, :2] = torch.tensor([[1.0, 1.2], [1.2, 1.0]], dtype=D64)
    covariances, power = correlations * deviation.outer(deviation), deviation.square().expand(3, 3)
    floored = spike_slab_sparse_coding._floor_covariances(covariances, power)
    assert torch.equal(floored[[0, 2]], covariances[[0, 2]])
    # Of the eigenvalues 2.2 and -0.2 the latter becomes 1e-6.
    expected = torch.tensor([[1.1, 1.1, 0.0], [1.1, 1.1, 0.0], [0.0, 0.0, 1.0]], dtype=D64)
    expected[:2, :2] += 0.5e-6 * torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=D64)
    torch.testing.assert_close(floored[1], expected * deviation.outer(deviation), rtol=1e-9, atol=1e-9)


def test_with_one_latent_the_two_kinds_of_covariance_are_one() -> None:
    full = make_model(1)
    y = generate(full, 200, with_missing=True)
    diag = SpikeSlabSparseCoding(NUM_OBSERVED, 1, offset=False, dtype=D64)
    for name in NAMES:
        value = getattr(full, name).detach()
        setattr(diag, name, value.reshape(1) if name == "slab_scale" else value)
    torch.testing.assert_close(free_energies(full, y, num_iterations=8), free_energies(diag, y, num_iterations=8), rtol=1e-9, atol=1e-9)


def test_a_simplified_model_has_the_variances_alone() -> None:
    model = make_model(3, 0.8)
    y = generate(model, 60, with_missing=True)
    simple = model.simplified()
    assert simple.covariance == "diag"
    assert simple.simplified() is simple
    torch.testing.assert_close(simple.slab_scale.detach().square(), covariance_of(model).diagonal())
    other = make_model(3, 0.5)
    other.load_simplified(simple)
    torch.testing.assert_close(covariance_of(other), simple.slab_scale.detach().square().diag())
    energies = [full_population(one, y).free_energy() for one in (simple, other)]
    torch.testing.assert_close(*energies, rtol=1e-9, atol=1e-9)
    assert free_energies(other, y, num_iterations=1)[-1] > float(energies[0].sum())
    assert bool(other.slab_scale.tril(-1).any())
    assert model.covariance == other.covariance == "full"


def test_signs_and_norms_of_elements_are_settled() -> None:
    model = make_model()
    y = generate(model, 100)
    before = full_population(model, y).free_energy().sum().item()
    gain = torch.tensor([2.0, -0.5, -1.0], dtype=D64)
    model.weight, model.slab_mean = model.weight.detach() * gain, model.slab_mean.detach() / gain
    model.slab_scale = model.slab_scale.detach() / gain.unsqueeze(-1) * gain.sign()
    assert full_population(model, y).free_energy().sum().item() == pytest.approx(before, rel=1e-12)
    norm = model.weight.detach().norm(dim=0)
    assert_never_falls(free_energies(model, y, num_iterations=3))
    assert (model.slab_mean >= 0).all()
    torch.testing.assert_close(model.weight.norm(dim=0), norm)


def test_latents_that_are_never_active_keep_their_elements() -> None:
    model = make_model()
    y = generate(model, 60)
    population = full_population(model, y)
    is_off = population.states()[..., 2] == 0
    population = Population(population.space, population.words, population.log_joint.masked_fill(~is_off, -math.inf))
    before = model.weight.detach()[:, 2].clone()
    model.maximize(model.sufficient_statistics(population, y))
    torch.testing.assert_close(model.weight[:, 2].detach(), before, rtol=1e-12, atol=0)
    assert model.slab_scale.isfinite().all()
    assert model.slab_mean.isfinite().all()


@pytest.mark.parametrize("with_missing", [False, True])
def test_slabs_from_their_exact_conditional_leave_bound_and_gradient_exact(with_missing: bool) -> None:
    model = make_model()
    y = generate(model, 25, with_missing)
    expected = log_joint(model, y, full_population(model, y).states(y.dtype)[0]).logsumexp(-1).sum()
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(-expected, parameters)
    pyro.clear_param_store()
    guide = AutoTruncated(model.with_slabs, num_states=8, conditional=model.conditional)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model.with_slabs, guide, y)
    assert loss == pytest.approx(-expected.item(), rel=1e-8)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_minibatches_learn() -> None:
    truth = make_model(3, 0.8)
    y = generate(truth, 1000)
    model = make_model(3, 0.0).initialize(y, torch.Generator().manual_seed(0))
    before = full_population(model, y).free_energy().sum().item()
    pyro.clear_param_store()
    guide = AutoTruncated(model, num_states=8)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(parents=2, children=2, generations=1)))
    for _ in range(40):
        svi.step(y, 200)
    assert full_population(model, y).free_energy().sum().item() > before


def test_copies_of_latents_have_a_covariance() -> None:
    model = make_model()
    copy = model.with_latents(torch.tensor([2, 0, 0, 1]))
    found, given = covariance_of(copy), covariance_of(model)
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(found[[0, 1, 3]][:, [0, 1, 3]], given[order][:, order])
    assert found[2, 2] == pytest.approx(given[0, 0].item())
    assert (found[2, [0, 1, 3]] == 0).all()
    assert copy(num_data=3).shape == (3, NUM_OBSERVED)


def test_samples_have_the_moments() -> None:
    # 5 standard errors of 14 numbers: false alarm rate 1e-5 over all seeds.
    model = make_model()
    likelihood = model.likelihood(torch.tensor([1.0, 0.0, 1.0], dtype=D64))
    draws = likelihood.sample((20_000,))
    assert ((draws.mean(0) - likelihood.mean) / (likelihood.variance / 20_000).sqrt()).abs().max() < 5
    torch.testing.assert_close(draws.var(0), likelihood.variance, rtol=5 * math.sqrt(2 / 20_000), atol=0)
    assert likelihood.expand([2]).log_prob(draws[:2]).shape == (2,)


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="covariance must be one of 'diag', 'full'; got 'spherical'"):
        SpikeSlabSparseCoding(4, 3, covariance="spherical")
    with pytest.raises(ValueError, match=r"slab_scale_tril must have shape \(H, H\) = \(3, 3\); got \(3,\)"):
        CorrelatedSlabSuperposition(torch.zeros(2, 3), torch.zeros(5, 3), 1.0, 0.0, torch.ones(3))
    with pytest.raises(ValueError, match="slab_scale_tril"):
        CorrelatedSlabSuperposition(torch.zeros(2, 3), torch.zeros(5, 3), 1.0, 0.0, -torch.eye(3))


def test_latents_on_a_device_are_chosen_by_positions_on_the_host() -> None:
    scale, index = torch.randn(4, 4, dtype=D64).tril(), torch.tensor([2, 0, 2])
    expected = CorrelatedSlabs().select_latents(scale, index)
    with PretendedDevice():
        found = CorrelatedSlabs().select_latents(there(scale), index)
    torch.testing.assert_close(here(found), expected)
