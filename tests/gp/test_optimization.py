"""One L-BFGS: it keeps the best it has seen, meets walls, and stops on time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pyro_truncated.gp.cholesky import stable_cholesky
from pyro_truncated.gp.optimization import minimize


def bowl(x: Tensor) -> float:
    """A quadratic with its minimum at 0.6, which has no value below 0.5."""
    if x.item() < 0.5:
        return math.nan
    value = (x - 0.6) ** 2
    value.sum().backward()
    return value.item()


def test_the_best_is_kept_and_what_has_no_value_is_survived():
    x = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    seen: list[float] = []
    found = minimize(lambda: bowl(x), [x], max_evaluations=30, on_better=seen.append)
    assert found.value == min(seen) < 1e-2
    assert (x.item() - 0.6) ** 2 == pytest.approx(min(seen))


def test_nothing_moves_where_the_start_has_no_value():
    y = torch.tensor([1.0], requires_grad=True)
    assert math.isnan(minimize(lambda: math.nan, [y], max_evaluations=5).value)
    assert y.item() == 1.0


def test_matrices_that_cannot_be_factorised_are_walls():
    """-log det of [[1, x], [x, 1]] - x has its minimum where 2 x / (1 - x^2) = 1; beyond 1 there is no matrix."""
    x = torch.tensor([0.0], dtype=torch.float64, requires_grad=True)

    def evaluate() -> Tensor:
        matrix = torch.eye(2, dtype=torch.float64) + x * torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
        value = -2 * stable_cholesky(matrix).diagonal().log().sum() - 5 * x.sum()
        value.backward()
        return value

    minimize(evaluate, [x], max_iterations=50)
    assert x.item() == pytest.approx((-2 + math.sqrt(104)) / 10, rel=1e-6)


def test_it_stops_on_time_at_the_best():
    x = torch.full((20,), 3.0, dtype=torch.float64, requires_grad=True)
    count = 0

    def evaluate() -> Tensor:
        nonlocal count
        count += 1
        value = (x.square() * torch.arange(1, 21)).sum() + x.pow(4).sum()
        value.backward()
        return value.detach()

    start = float(evaluate())
    count = 0
    found = minimize(evaluate, [x], should_stop=lambda: count >= 4)
    assert count == 4
    assert found.value < start
    assert float(evaluate()) == found.value
