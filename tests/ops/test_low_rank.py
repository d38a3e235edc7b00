"""Products of rows with the matrices of their groups against loops and dense formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_truncated.distributions import ComponentLowRankNormal, component_products
from pyro_truncated.ops import components
from pyro_truncated.ops.components import GroupBlocks
from pyro_truncated.utils.budget import memory_budget

D64 = torch.float64
N, D, R, K = 40, 5, 2, 6


def parameters(*, shared: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    loc, factor = (torch.randn(K, D, *rest, generator=generator, dtype=D64) for rest in ((), (R,)))
    scale = 0.5 + torch.rand(() if shared else (K,), generator=generator, dtype=D64)
    return loc, factor, scale


def covariances(factor: Tensor, scale: Tensor) -> Tensor:
    return factor @ factor.mT + scale.square().expand(K)[:, None, None] * torch.eye(D, dtype=D64)


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize(("num_entries", "num_groups"), [(0, 3), (1, 1), (7, 3), (1000, 3), (1000, 700)])
def test_blocks_hold_every_entry_once_with_its_group(num_entries: int, num_groups: int) -> None:
    group = torch.randint(num_groups, (num_entries,), generator=torch.Generator().manual_seed(0))
    grouped = GroupBlocks.from_groups(group, num_groups)
    assert torch.equal(grouped.entry[grouped.is_own].sort().values, torch.arange(num_entries))
    assert torch.equal(grouped.group.unsqueeze(1).expand_as(grouped.entry)[grouped.is_own], group[grouped.entry[grouped.is_own]])
    with memory_budget(1000):
        parts = list(grouped.parts(100))
    assert sum(len(part.group) for part in parts) == len(grouped.group)
    assert torch.equal(grouped.gather([part.entry for part in parts] or [grouped.entry]), torch.arange(num_entries))


@pytest.mark.parametrize("shared", [False, True])
def test_densities_and_gradients_are_those_of_dense_covariances(shared: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    loc, factor, scale = (given.requires_grad_() for given in parameters(shared=shared))
    component, y = torch.randint(K, (3, N), generator=generator), torch.randn(N, D, generator=generator, dtype=D64)
    found = ComponentLowRankNormal(component, loc, factor, scale)
    expected = MultivariateNormal(loc[component], covariances(factor, scale)[component])
    torch.testing.assert_close(found.log_prob(y), expected.log_prob(y))
    weight = torch.randn(3, N, generator=generator, dtype=D64)
    gradients = (torch.autograd.grad((one.log_prob(y) * weight).sum(), (loc, factor, scale)) for one in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.variance, expected.variance)
    torch.testing.assert_close(found.precision_matrix, expected.precision_matrix)
    torch.testing.assert_close(2 * found.half_log_determinant, expected.covariance_matrix.logdet())
    larger = ComponentLowRankNormal(component[:, :1], loc, factor, scale).expand([3, N])
    torch.testing.assert_close(
        larger.log_prob(y), MultivariateNormal(larger.mean, covariances(factor, scale)[larger.component]).log_prob(y)
    )


@pytest.mark.parametrize("ratio", [1e2, 1e4])
def test_long_directions_lose_no_digits_in_single_precision(ratio: float) -> None:
    loc, factor, scale = (given.float() for given in parameters())
    component = torch.arange(K).repeat(20)
    y = ComponentLowRankNormal(component, loc, ratio * factor, scale).sample()
    expected = MultivariateNormal(loc[component].double(), covariances(ratio * factor.double(), scale.double())[component]).log_prob(
        y.double()
    )
    found = ComponentLowRankNormal(component, loc, ratio * factor, scale).log_prob(y)
    # Data are rounded in units of the directions, which is so many units of the noise.
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=16 * ratio * torch.finfo(torch.float32).eps)


def test_draws_have_the_moments_of_the_distribution() -> None:
    torch.manual_seed(0)
    loc, factor, scale = parameters()
    found = ComponentLowRankNormal(torch.tensor([2, 2, 5]), loc, factor, scale)
    drawn = found.sample((20_000,))
    # Within 6 standard errors: false alarm rate 2e-9 for each of 15 + 75 numbers.
    assert ((drawn.mean(0) - found.mean).abs() < 6 * (found.variance / 20_000).sqrt()).all()
    centred = (drawn - found.mean).movedim(0, 1)
    expected = covariances(factor, scale)[found.component]
    error = (expected.square() + found.variance.unsqueeze(-1) * found.variance.unsqueeze(-2)).sqrt() / math.sqrt(20_000)
    assert ((centred.mT @ centred / 20_000 - expected).abs() < 6 * error).all()


@pytest.mark.parametrize("share_missing", [0.0, 0.4, 0.8, 1.0])  # mostly by directions, by entries, and nothing seen at all
@pytest.mark.parametrize("budget", [None, 2 * 8 * D**2, 10])  # all covariances at once, two, and none
def test_without_noise_are_conditional_expectations_given_what_is_observed(
    share_missing: float, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(components, "_CACHED", 2000)  # several blocks
    generator = torch.Generator().manual_seed(2)
    loc, factor, scale = parameters()
    factor[:3, :, 1] = 0.0
    component, y = torch.randint(K, (2, N), generator=generator), torch.randn(N, D, generator=generator, dtype=D64)
    y = torch.where(torch.rand(y.shape, generator=generator) < share_missing, math.nan, y)
    with memory_budget(budget):
        means, variances = ComponentLowRankNormal(component, loc, factor, scale).without_noise(y)
    for s, n in ((s, n) for s in range(2) for n in range(N)):
        k, seen = int(component[s, n]), ~y[n].isnan()
        prior = factor[k] @ factor[k].mT
        gain = torch.linalg.solve(covariances(factor, scale)[k][seen][:, seen], prior[seen]).mT
        torch.testing.assert_close(means[s, n], loc[k] + gain @ (y[n] - loc[k])[seen])
        torch.testing.assert_close(variances[s, n], (prior - gain @ prior[seen]).diagonal())


def test_products_of_components_are_weighted_sums() -> None:
    generator = torch.Generator().manual_seed(3)
    rows, center = torch.randn(N, D, generator=generator, dtype=D64), torch.randn(K, D, generator=generator, dtype=D64)
    component = torch.rand(N, K, generator=generator).argsort(1)[:, :3]
    weight = torch.rand(N, 3, generator=generator, dtype=D64)
    dense = torch.zeros(N, K, dtype=D64).scatter(1, component, weight)
    for around in (None, center):
        above = rows.unsqueeze(1) - (0.0 if around is None else around)
        expected = torch.einsum("nk,nkd,nke->kde", dense, above.expand(N, K, D), above.expand(N, K, D))
        torch.testing.assert_close(component_products(rows, component, weight, K, around), expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"component": torch.tensor([[0], [K]])}, f"component must be from 0 to {K - 1}; got 0 to {K}"),
        ({"component": torch.tensor([[0.0], [1.0]])}, "component must hold integers"),
        ({"component": torch.tensor([[0, 1], [1, 2]])}, r"component and weight must have shape \(N, S\)"),
        ({"weight": torch.tensor([[1.0], [-1.0]])}, "weight must not be negative or NaN"),
        ({"weight": torch.tensor([[1.0], [math.nan]])}, "weight must not be negative or NaN"),
        ({"num_components": 0}, "num_components must be"),
        ({"around": torch.zeros(K, D + 1)}, r"around must have shape \(6, 5\); got \(6, 6\)"),
    ],
)
def test_products_of_components_refuse_what_does_not_fit(changed: dict[str, Any], message: str) -> None:
    given = {"rows": torch.ones(2, D), "component": torch.tensor([[0], [1]]), "weight": torch.ones(2, 1), "num_components": K}
    with pytest.raises(ValueError, match=message):
        component_products(**{**given, **changed})
