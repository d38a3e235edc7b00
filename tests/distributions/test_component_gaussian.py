"""What normal distributions of components have in common: which components they take, and of which type densities are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyro_truncated.distributions import ComponentLowRankNormal, ComponentMultivariateNormal, ComponentNormal

D64 = torch.float64
D, K = 4, 6
Make = Callable[..., ComponentNormal | ComponentMultivariateNormal | ComponentLowRankNormal]
KINDS: dict[str, Make] = {
    "diagonal": lambda z, dtype=D64: ComponentNormal(z, torch.zeros(K, D, dtype=dtype), torch.linspace(1, 2, D, dtype=dtype).expand(K, -1)),
    "spherical": lambda z, dtype=D64: ComponentNormal(z, torch.zeros(K, D, dtype=dtype), torch.ones(K, 1, dtype=dtype)),
    "full": lambda z, dtype=D64: ComponentMultivariateNormal(z, torch.zeros(K, D, dtype=dtype), torch.eye(D, dtype=dtype).repeat(K, 1, 1)),
    "low-rank": lambda z, dtype=D64: ComponentLowRankNormal(
        z, torch.zeros(K, D, dtype=dtype), torch.ones(K, D, 2, dtype=dtype), torch.ones(K, dtype=dtype)
    ),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@every_kind
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_components_may_be_integers_of_any_size(make: Make, dtype: torch.dtype) -> None:
    component, y = torch.tensor([4, 0, 5, 4]), torch.zeros(4, D, dtype=D64)
    found, expected = make(component.to(dtype)), make(component)
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.log_prob(y), expected.log_prob(y))


@every_kind
@pytest.mark.parametrize(
    ("component", "complaint"),
    [
        (torch.tensor([0, -1]), "component must be from 0 to 5; got -1 to 0"),
        (torch.tensor([2, K]), "component must be from 0 to 5; got 2 to 6"),
        (torch.tensor([1.0]), "component must hold integers; got torch.float32"),
    ],
)
def test_components_that_do_not_exist_are_refused(make: Make, component: Tensor, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make(component)


@every_kind
@pytest.mark.parametrize("types", [(torch.float32, D64), (D64, torch.float32), (torch.float16,) * 2, (torch.bfloat16,) * 2])
def test_densities_are_of_the_type_of_the_parameters(make: Make, types: tuple[torch.dtype, torch.dtype]) -> None:
    component, y = torch.arange(K).repeat(2), torch.linspace(-1, 1, 2 * K * D, dtype=types[1]).reshape(-1, D)
    found = make(component, types[0]).log_prob(y)
    assert found.dtype == types[0]
    tolerance = max(1e-5, 10 * torch.finfo(types[0]).eps)
    torch.testing.assert_close(found.double(), make(component).log_prob(y.double()), rtol=tolerance, atol=tolerance)


@every_kind
def test_expanded_ones_are_of_the_same_kind(make: Make) -> None:
    small = make(torch.tensor([[1], [3]]))
    larger, y = small.expand([2, 5]), torch.linspace(-1, 1, 2 * 5 * D, dtype=D64).reshape(2, 5, D)
    assert type(larger) is type(small)
    torch.testing.assert_close(
        larger.log_prob(y), torch.stack([make(z.expand(5)).log_prob(rows) for z, rows in zip(small.component, y, strict=True)])
    )
