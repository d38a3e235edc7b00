"""The largest of many linear functions: of all, of groups, and from neighbour to neighbour; sums for components."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_truncated.ops.components import component_sums
from pyro_truncated.ops.max_inner_products import follow_neighbours, max_inner_products, max_inner_products_in_groups


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Features of 150 data points, coefficients of 203 functions, and their groups, of which some have few."""
    generator = torch.Generator().manual_seed(0)
    features, coefficients = (torch.randn(number, 5, generator=generator, dtype=dtype) for number in (150, 203))
    return features, coefficients, torch.cat([torch.arange(7), torch.randint(3, (196,), generator=generator)])


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("number", [1, 4, 203])
def test_the_largest_of_all_are_those_of_the_table(number: int) -> None:
    features, coefficients, _ = problem()
    value, index = max_inner_products(features, coefficients, number)
    expected = (features @ coefficients.mT).topk(number)
    torch.testing.assert_close(value, expected.values)
    assert torch.equal(index, expected.indices)


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("num_features", "num_functions", "number"), [(1, 1, 1), (3, 16, 5), (8, 17, 16), (16, 100, 40), (25, 64, 33), (33, 170, 4)]
)
def test_the_largest_are_found_whatever_the_sizes(num_features: int, num_functions: int, number: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_functions)
    features, coefficients = (torch.randn(size, num_features, generator=generator, dtype=dtype) for size in (60, num_functions))
    expected = (features @ coefficients.mT).topk(number)
    group = torch.arange(num_functions) * 3 // num_functions
    group = group.unique(return_inverse=True)[1]
    asked = torch.stack([torch.randperm(int(group.max()) + 1, generator=generator) for _ in range(60)])
    neighbours = torch.arange(num_functions).repeat(num_functions, 1)
    start = (features @ coefficients[:number].mT).sort(1, descending=True)
    for value, index in (
        max_inner_products(features, coefficients, number),
        max_inner_products_in_groups(features, coefficients, group, int(group.max()) + 1, asked, number),
        follow_neighbours(features, coefficients, neighbours, start.values, start.indices, 1),
    ):
        torch.testing.assert_close(value, expected.values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close((features.unsqueeze(1) * coefficients[index]).sum(-1), expected.values, rtol=1e-5, atol=1e-5)
        assert all(len(row.unique()) == number for row in index)


@pytest.mark.usefixtures("kind")
def test_in_groups_others_are_not_looked_at() -> None:
    features, coefficients, group = problem()
    asked = torch.stack([torch.randperm(7, generator=torch.Generator().manual_seed(n))[:3] for n in range(150)])
    asked[:, 0], asked[:, 1] = torch.where((asked < 3).any(1), asked[:, 0], 0), torch.where((asked < 3).any(1), asked[:, 1], 3)
    value, index = max_inner_products_in_groups(features, coefficients, group, 7, asked, 3)
    is_out = (group != asked.unsqueeze(-1)).all(1)
    expected = (features @ coefficients.mT).masked_fill(is_out, -torch.inf).topk(3)
    torch.testing.assert_close(value, expected.values)
    assert torch.equal(index, expected.indices)


@pytest.mark.usefixtures("kind")
def test_a_group_without_functions_changes_no_other() -> None:
    features, coefficients, group = problem()
    group = torch.where(group == 4, 3, group)
    asked = torch.tensor([[0, 3]]).expand(150, -1).contiguous()
    value, _ = max_inner_products_in_groups(features, coefficients, group, 7, asked, 3)
    expected = (features @ coefficients.mT).masked_fill((group != 0) & (group != 3), -torch.inf).topk(3)
    torch.testing.assert_close(value, expected.values)


@pytest.mark.usefixtures("kind")
def test_a_walk_ends_where_no_neighbour_of_the_best_is_better() -> None:
    # Functions along a line, each largest at its own place: from the left end neighbours lead to a data point at place 9.
    places = torch.arange(20, dtype=torch.float64)
    coefficients = torch.stack([-0.5 * places**2, places], 1)
    neighbours = torch.stack([(torch.arange(20) + step).clamp(0, 19) for step in (-2, -1, 1, 2)], 1)
    features = torch.tensor([[1.0, 9.2]], dtype=torch.float64)
    start = torch.tensor([[5, 4, 3, 2, 1]])
    value, found = follow_neighbours(features, coefficients, neighbours, (features @ coefficients.mT).gather(1, start), start, 1)
    stayed = follow_neighbours(features, coefficients, neighbours[:, :0], (features @ coefficients.mT).gather(1, start), start, 1)[1]
    assert found.tolist() == [[9, 10, 8, 11, 7]]
    torch.testing.assert_close(value, (features @ coefficients.mT).gather(1, found))
    assert torch.equal(stayed, start)
    also = torch.tensor([[12, 4, 19]])
    led = follow_neighbours(features, coefficients, neighbours[:, :0], (features @ coefficients.mT).gather(1, start), start, 1, also)[1]
    assert led.tolist() == [[12, 5, 4, 3, 2]]


@pytest.mark.usefixtures("kind")
def test_what_overflows_is_filled_up_with_different_functions() -> None:
    features = torch.tensor([[1e30], [1.0]])
    index = max_inner_products(features, torch.tensor([[-1e30], [-1e29], [-1.0], [-2.0]]), 3)[1]
    assert index[1].tolist() == [2, 3, 1]
    assert len(set(index[0].tolist())) == 3
    assert set(index[0].tolist()) > {2, 3}


@pytest.mark.usefixtures("kind")
def test_of_groups_whose_functions_are_minus_infinity_different_ones_are_named() -> None:
    features = torch.ones(4, 1, dtype=torch.float64)
    coefficients = torch.full((7, 1), -torch.inf, dtype=torch.float64)
    coefficients[5] = 2.0
    # The last group is smaller than the others.
    value, index = max_inner_products_in_groups(
        features, coefficients, torch.tensor([0, 0, 0, 1, 1, 1, 2]), 3, torch.tensor([[1, 2]] * 4), 4
    )
    assert value.tolist() == [[2.0, -torch.inf, -torch.inf, -torch.inf]] * 4
    assert all(row[0] == 5 and len(set(row)) == 4 for row in index.tolist())


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("place", [0, 3, 24, 25, 101, 199, 200, 202])
def test_nan_is_the_largest_and_hides_no_other(place: int) -> None:
    features, coefficients, group = problem()
    coefficients[place] = torch.nan
    expected = (features @ coefficients.mT).topk(3)
    asked = torch.arange(7).repeat(150, 1)
    for value, index in (
        max_inner_products(features, coefficients, 3),
        max_inner_products_in_groups(features, coefficients, group, 7, asked, 3),
    ):
        torch.testing.assert_close(value, expected.values, equal_nan=True)
        assert torch.equal(index, expected.indices)
    start = (features @ coefficients[:4].mT).nan_to_num(-99.0).sort(1, descending=True)
    neighbours = torch.arange(203).repeat(203, 1)
    found = follow_neighbours(features, coefficients, neighbours, start.values[:, :3], start.indices[:, :3], 3)[1]
    assert torch.equal(found, expected.indices)


@pytest.mark.usefixtures("kind")
def test_of_functions_that_are_all_nan_different_ones_are_named() -> None:
    features, coefficients, group = problem()
    features[7] = torch.nan
    asked = torch.arange(7).repeat(150, 1)
    for index in (
        max_inner_products(features, coefficients, 40)[1],
        max_inner_products_in_groups(features, coefficients, group, 7, asked, 40)[1],
    ):
        assert len(index[7].unique()) == 40
        assert 0 <= int(index.min()) <= int(index.max()) < 203
        assert torch.equal(index[8:], (features[8:] @ coefficients.mT).topk(40).indices)


@pytest.mark.usefixtures("kind")
def test_half_precision_is_searched() -> None:
    features, coefficients, _ = problem(torch.float32)
    features, coefficients = features.half(), coefficients.half()
    index = max_inner_products(features, coefficients, 2)[1]
    assert torch.equal(index, (features.float() @ coefficients.float().mT).topk(2).indices)


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("number", [3, 70])
def test_sums_for_components_are_those_of_a_table(number: int) -> None:
    generator = torch.Generator().manual_seed(0)
    component = torch.randint(number, (400, 3), generator=generator)
    weight, rows = torch.rand(400, 3, generator=generator), torch.randn(400, 5, generator=generator)
    shares = torch.zeros(400, number, dtype=torch.float64).scatter_add_(1, component, weight.double())
    torch.testing.assert_close(component_sums(component, weight, rows, number), shares.mT @ rows.double())


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"component": torch.tensor([[0], [5]])}, r"component must be from 0 to 1; got 0 to 5"),
        ({"component": torch.tensor([[-1], [0]])}, r"component must be from 0 to 1; got -1 to 0"),
        ({"component": torch.zeros(2, 1)}, "component must hold integers"),
        ({"component": torch.zeros(3, 1, dtype=torch.int64)}, r"component and weight must have shape \(N, S\)"),
        ({"rows": torch.ones(1, 3)}, r"rows \(N, D\); got \(2, 1\), \(2, 1\), \(1, 3\)"),
        ({"number": 0}, "number must be a positive integer"),
    ],
)
def test_sums_for_components_that_do_not_exist_are_refused(change: dict[str, Any], message: str) -> None:
    fitting = {"component": torch.tensor([[0], [1]]), "weight": torch.ones(2, 1), "rows": torch.ones(2, 3), "number": 2}
    assert component_sums(**fitting).tolist() == [[1.0] * 3] * 2
    with pytest.raises(ValueError, match=message):
        component_sums(**(fitting | change))


@pytest.mark.usefixtures("kind")
def test_sums_for_components_are_differentiable() -> None:
    weight, rows = torch.tensor([[2.0], [3.0]], requires_grad=True), torch.tensor([[1.0], [5.0]], requires_grad=True)
    component_sums(torch.tensor([[1], [1]]), weight, rows, 2)[1].sum().backward()
    assert weight.grad is not None
    assert rows.grad is not None
    assert weight.grad.tolist() == [[1.0], [5.0]]
    assert rows.grad.tolist() == [[2.0], [3.0]]
    with torch.no_grad():
        assert not component_sums(torch.tensor([[1], [1]]), weight, rows, 2).requires_grad
