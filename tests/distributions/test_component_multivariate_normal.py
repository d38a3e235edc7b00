"""Normal distributions of components with full covariances against the stock one."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_truncated.distributions import ComponentMultivariateNormal

D64 = torch.float64
N, D, K = 40, 4, 6


def parameters(*, shared: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(*(() if shared else (K,)), D, D, generator=generator, dtype=D64)
    return torch.randn(K, D, generator=generator, dtype=D64), torch.linalg.cholesky(root @ root.mT + torch.eye(D, dtype=D64))


@pytest.mark.parametrize("dtype", [torch.float32, D64])
@pytest.mark.parametrize("shared", [False, True])
def test_densities_and_gradients_are_those_of_the_stock_distribution(shared: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    loc, tril = (given.to(dtype).requires_grad_() for given in parameters(shared=shared))
    component, y = torch.randint(K, (3, N), generator=generator), torch.randn(N, D, generator=generator, dtype=dtype)
    weight = torch.randn(3, N, generator=generator, dtype=dtype)
    close = partial(torch.testing.assert_close, **({} if dtype == D64 else {"rtol": 1e-4, "atol": 1e-3}))
    small = ComponentMultivariateNormal(component[:, :1], loc, tril)
    for found in (ComponentMultivariateNormal(component, loc, tril), small.expand([3, N])):
        expected = MultivariateNormal(loc[found.component], scale_tril=tril if shared else tril[found.component])
        close(found.log_prob(y), expected.log_prob(y))
        gradients = (torch.autograd.grad((one.log_prob(y) * weight).sum(), (loc, tril)) for one in (found, expected))
        for ours, theirs in zip(*gradients, strict=True):
            close(ours, theirs)
        close(found.mean, expected.mean)
        close(found.variance, expected.variance)


@pytest.mark.slow
def test_forward_derivatives_are_those_of_the_stock_distribution() -> None:
    loc, tril = parameters(shared=False)
    component, y = torch.arange(K), torch.linspace(-1, 1, K * D, dtype=D64).reshape(K, D)
    derivatives = [
        torch.func.jvp(lambda at, make=make: make(at).log_prob(y), (loc,), (torch.ones_like(loc),))[1]
        for make in (lambda at: ComponentMultivariateNormal(component, at, tril), lambda at: MultivariateNormal(at, scale_tril=tril))
    ]
    torch.testing.assert_close(*derivatives)


@pytest.mark.parametrize("types", [(torch.float32, D64), (D64, torch.float32)])
@pytest.mark.parametrize("shared", [False, True])
def test_values_may_be_of_another_type_than_the_parameters(shared: bool, types: tuple[torch.dtype, torch.dtype]) -> None:
    loc, tril = (given.to(types[0]) for given in parameters(shared=shared))
    component, y = torch.arange(K).repeat(2), torch.linspace(-1, 1, 2 * K * D, dtype=types[1]).reshape(-1, D)
    found = ComponentMultivariateNormal(component, loc, tril).log_prob(y)
    expected = MultivariateNormal(loc[component], scale_tril=tril if shared else tril[component]).log_prob(y)
    assert found.dtype == types[0]
    torch.testing.assert_close(found, expected, check_dtype=types[0] == D64, rtol=1e-5, atol=1e-5)


def test_factors_that_are_badly_conditioned_are_inverted_as_well_as_can_be() -> None:
    """The errors of inverses in 32 bits were four times those of the stock distribution, where a condition number is a thousand."""
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(K, 10, 10, generator=generator, dtype=D64))[0]
    tril = torch.linalg.cholesky(rotation @ torch.logspace(0, -6, 10, dtype=D64).diag() @ rotation.mT).float()
    component = torch.arange(K).repeat(200)
    noise = torch.randn(len(component), 10, 1, generator=generator, dtype=D64)
    y, loc = (tril.double()[component] @ noise).squeeze(-1).float(), torch.zeros(K, 10)
    truth = MultivariateNormal(loc.double()[component], scale_tril=tril.double()[component]).log_prob(y.double())
    stock = MultivariateNormal(loc[component], scale_tril=tril[component]).log_prob(y)
    found = ComponentMultivariateNormal(component, loc, tril).log_prob(y)
    assert (found - truth).abs().max() < 2 * (stock - truth).abs().max()


@pytest.mark.parametrize("shared", [False, True])
def test_draws_have_the_moments_of_the_distribution(shared: bool) -> None:
    torch.manual_seed(0)
    loc, tril = parameters(shared=shared)
    found = ComponentMultivariateNormal(torch.tensor([2, 2, 5]), loc, tril)
    drawn = found.sample((20_000,))
    # Within 6 standard errors: false alarm rate 2e-9 for each of 12 + 48 numbers.
    assert ((drawn.mean(0) - found.mean).abs() < 6 * (found.variance / 20_000).sqrt()).all()
    centred = (drawn - found.mean).movedim(0, 1)
    expected = (tril @ tril.mT).expand(K, D, D)[found.component]
    error = (expected.square() + found.variance.unsqueeze(-1) * found.variance.unsqueeze(-2)).sqrt() / math.sqrt(20_000)
    assert ((centred.mT @ centred / 20_000 - expected).abs() < 6 * error).all()


@pytest.mark.parametrize("shape", [(K - 1, D, D), (K, D), (D + 1, D + 1)])
def test_factors_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"scale_tril \(K, D, D\) or \(D, D\)"):
        ComponentMultivariateNormal(torch.tensor([0]), torch.zeros(K, D), torch.ones(shape))
