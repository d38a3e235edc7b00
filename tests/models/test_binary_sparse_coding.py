"""Binary sparse coding: exact EM by enumeration, with and without missing data."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pyro_truncated.models import BinarySparseCoding
from pyro_truncated.states import Population
from tests.models.enumeration import expected_log_joint, free_energies, full_population, generate, log_joint

NUM_DATA, NUM_OBSERVED, NUM_LATENTS = 60, 7, 4


def make_model(shared_prior: bool = True, dtype: torch.dtype = torch.float64, num_latents: int = NUM_LATENTS) -> BinarySparseCoding:
    model = BinarySparseCoding(NUM_OBSERVED, num_latents, shared_prior=shared_prior, offset=False, dtype=dtype)
    model.weight = 3 * torch.randn(NUM_OBSERVED, num_latents, dtype=dtype)
    return model


def make_data(model: BinarySparseCoding, with_missing: bool) -> Tensor:
    return generate(model, NUM_DATA, with_missing)


def test_model_is_bernoulli_times_normal() -> None:
    model = make_model()
    y = make_data(model, with_missing=False)
    states = torch.bernoulli(torch.full((5, NUM_LATENTS), 0.5)).double()
    prior = torch.distributions.Bernoulli(model.prior).log_prob(states).sum(-1)
    likelihood = torch.distributions.Normal(states @ model.weight.mT, model.scale).log_prob(y.unsqueeze(1)).sum(-1)
    torch.testing.assert_close(log_joint(model, y, states), prior + likelihood, rtol=1e-10, atol=1e-10)


@pytest.mark.nightly
@pytest.mark.parametrize("with_missing", [False, True])
def test_free_energy_gradient_vanishes_at_convergence(with_missing: bool) -> None:
    # Where EM stands still, so does the marginal likelihood of the observed entries.
    model = make_model(num_latents=2)
    y = make_data(model, with_missing)
    free_energies(model, y, num_iterations=150)
    states = full_population(model, y).states(y.dtype)[0]
    total = log_joint(model, y, states).logsumexp(-1).sum()
    for gradient in torch.autograd.grad(total, [model.weight_unconstrained, model.scale_unconstrained, model.prior_unconstrained]):
        assert gradient.abs().max() < 1e-6


def test_missing_data_agree_with_the_marginal_of_the_observed_entries() -> None:
    model = make_model()
    y = make_data(model, with_missing=True)
    states = full_population(model, y).states(y.dtype)[0]
    for row in y[:10]:
        is_seen = ~row.isnan()
        part = BinarySparseCoding(max(1, int(is_seen.sum())), NUM_LATENTS, offset=False, dtype=torch.float64)
        part.weight, part.scale, part.prior = model.weight[is_seen].detach(), model.scale.detach(), model.prior.detach()
        if is_seen.any():
            torch.testing.assert_close(log_joint(model, row[None], states), log_joint(part, row[is_seen][None], states))


def test_statistics_add_up_over_parts_of_the_data() -> None:
    model = make_model()
    y = make_data(model, with_missing=True)
    y[: NUM_DATA // 2] = torch.randn(NUM_DATA // 2, NUM_OBSERVED)
    population = full_population(model, y)
    whole = model.sufficient_statistics(population, y)
    parts = []
    for index in (torch.arange(NUM_DATA // 2), torch.arange(NUM_DATA // 2, NUM_DATA)):
        part = Population(population.space, population.words[index], population.log_joint[index])
        selected = Population(population.space, part.words, part.log_joint, index)
        by_index, by_rows = model.sufficient_statistics(selected, y), model.sufficient_statistics(part, y[index])
        # The first part has nothing missing: its second moments are common to all dimensions.
        torch.testing.assert_close(by_index["pairs"], by_rows["pairs"].expand_as(by_index["pairs"]))
        parts.append(by_rows)
    for name, value in whole.items():
        torch.testing.assert_close(parts[0][name] + parts[1][name], value, rtol=1e-12, atol=1e-12)


def test_latents_that_are_never_active_keep_their_element() -> None:
    model = make_model()
    y = make_data(model, with_missing=False)
    population = full_population(model, y)
    is_off = population.states()[..., 2] == 0
    population = Population(population.space, population.words, population.log_joint.masked_fill(~is_off, -math.inf))
    before = model.weight.detach().clone()
    model.maximize(model.sufficient_statistics(population, y))
    assert torch.equal(model.weight[:, 2], before[:, 2])
    assert not torch.isclose(model.weight[:, [0, 1, 3]], before[:, [0, 1, 3]]).any()
    assert model.weight.isfinite().all()


def test_latents_that_are_always_active_together_are_no_obstacle() -> None:
    model = make_model()
    y = make_data(model, with_missing=False)
    population = full_population(model, y)
    states = population.states()
    population = Population(
        population.space, population.words, population.log_joint.masked_fill(states[..., 0] != states[..., 1], -math.inf)
    )
    before = expected_log_joint(model, y, population)
    model.maximize(model.sufficient_statistics(population, y))
    assert model.weight.isfinite().all()
    assert expected_log_joint(model, y, population) > before


def test_clamps() -> None:
    model = make_model()
    y = torch.zeros(NUM_DATA, NUM_OBSERVED, dtype=torch.float64)
    model.weight = torch.zeros_like(model.weight)
    free_energies(model, y, num_iterations=3)
    assert model.scale.item() == pytest.approx(1e-3)
    population = full_population(model, y)
    population = Population(population.space, population.words[:, :1], population.log_joint[:, :1])
    model.maximize(model.sufficient_statistics(population, y))
    assert model.prior.item() == pytest.approx(1e-6)


def test_initialize_uses_the_data(generator: torch.Generator) -> None:
    y = 5 + 2 * torch.randn(40, NUM_OBSERVED, generator=generator).double()
    y[torch.rand(y.shape, generator=generator) < 0.2] = math.nan
    model = BinarySparseCoding(NUM_OBSERVED, 10, offset=False, dtype=torch.float64)
    assert model.initialize(y, generator=torch.Generator().manual_seed(1)) is model
    first = model.weight.detach().clone()
    rows = torch.where(y.isnan(), y.nanmean(0), y)
    cosines = torch.nn.functional.normalize(first.mT) @ torch.nn.functional.normalize(rows).mT
    assert (cosines.amax(1) > 0.9999).all()
    nearest = cosines.argmax(1)
    assert nearest.unique().numel() == 10
    assert (first.norm(dim=0) < 1.01 * rows[nearest].norm(dim=1)).all()
    torch.testing.assert_close(model.scale.item() ** 2, y[~y.isnan()].var(correction=0).item(), rtol=1e-6, atol=0)
    assert model.prior.item() == pytest.approx(0.2)
    model.initialize(y, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.weight, first)
    small = BinarySparseCoding(NUM_OBSERVED, 50, offset=False, dtype=torch.float64).initialize(y)
    assert torch.linalg.matrix_rank(small.weight) == NUM_OBSERVED
    with pytest.raises(ValueError, match=r"y must have shape \(N, 7\)"):
        model.initialize(y[:, :3])


@pytest.mark.slow
def test_recovers_the_dictionary() -> None:
    truth = make_model(num_latents=3)
    truth.scale, truth.prior = torch.tensor(0.3).double(), torch.tensor(0.3).double()
    y = generate(truth, 500)
    model = BinarySparseCoding(NUM_OBSERVED, 3, offset=False, dtype=torch.float64)
    model.weight = truth.weight.detach() + torch.randn(NUM_OBSERVED, 3)
    free_energies(model, y, num_iterations=50)
    # Standard errors are about 0.3 / sqrt(150) = 0.025 per entry: 5 of them.
    torch.testing.assert_close(model.weight, truth.weight, rtol=0, atol=0.125)
    assert model.scale.item() == pytest.approx(0.3, rel=0.06)
