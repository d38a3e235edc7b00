"""Codes whose latents change each other's effects: against least squares, and what a linear model of the same data confuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from pyro_truncated.training import pairwise_codes
from pyro_truncated.training.agreement import are_shared
from pyro_truncated.training.pairwise_codes import explaining_pairs
from tests.pretended_device import DEVICE, PretendedDevice, here, there


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def products(code: Tensor) -> Tensor:
    """Ones, latents and products of two of them, one after the other."""
    columns = [torch.ones(len(code)), *code.T, *(code[:, i] * code[:, j] for i, j in itertools.combinations(range(code.shape[1]), 2))]
    return torch.stack(columns, 1)


def left(code: Tensor, values: Tensor) -> float:
    """The square error that least squares leave."""
    effects = torch.linalg.lstsq(products(code), values, driver="gelsd").solution
    return float((values - products(code) @ effects).square().sum())


def data(num_data: int = 300, seed: int = 0) -> tuple[Tensor, Tensor]:
    """States of five latents, and values with effects of pairs half as large as those of latents, and little noise."""
    drawn = generator(seed)
    code = (torch.rand(num_data, 5, generator=drawn) < 0.3).double()
    effects = torch.randn(16, 12, generator=drawn, dtype=torch.float64)
    effects[6:] /= 2
    return code, products(code) @ effects + 0.1 * torch.randn(num_data, 12, generator=drawn, dtype=torch.float64)


def test_a_latent_that_was_missed_is_mostly_found() -> None:
    """By turns for states and effects: of eight data sets two end in another optimum."""
    are_found = []
    for seed in range(8):
        code, values = data(seed=seed)
        given = code.clone()
        given[:, seed % 5] = (torch.rand(len(code), generator=generator(seed + 10)) < 0.3).double()
        found = explaining_pairs(given.long(), values, generator())
        assert found.dtype == torch.long
        assert bool(((found == 0) | (found == 1)).all())
        assert left(found.double(), values) < 0.7 * left(given, values)
        are_found.append(bool(are_shared(code, found.double()).all()))
    assert sum(are_found) >= 6


def test_nothing_ends_higher_and_the_true_code_stays() -> None:
    code, values = data()
    given = (torch.rand(code.shape, generator=generator(3)) < 0.3).double()
    assert left(explaining_pairs(given, values, generator()), values) < left(given, values)
    assert float((explaining_pairs(code, values, generator()) == code).double().mean()) > 0.99


def test_seeds_repeat() -> None:
    code, values = data()
    given = code.roll(7, 0)
    assert torch.equal(*(explaining_pairs(given, values, generator(5)) for _ in range(2)))


def test_too_few_data_and_too_much_work_leave_a_code_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    code, values = data(4 * 16 - 1)
    given = code.roll(7, 0)
    assert explaining_pairs(given, values, generator()) is given
    code, values = data()
    monkeypatch.setattr(pairwise_codes, "_MOST_WORK", 100.0)
    given = code.roll(7, 0)
    assert explaining_pairs(given, values, generator()) is given


def test_latents_that_are_always_on_or_never_are_no_obstacle() -> None:
    code, values = data()
    for constant in (0.0, 1.0):
        given = code.clone()
        given[:, 0] = constant
        found = explaining_pairs(given, values, generator())
        assert bool(found.isfinite().all())
        assert left(found, values) <= left(given, values)


def test_a_code_on_the_host_goes_where_the_values_are() -> None:
    """The code of the best start is kept on the host; what a network decodes is on its device."""
    code, values = data(100)
    given = code.roll(7, 0)
    expected = explaining_pairs(given, values, generator())
    with PretendedDevice():
        found = explaining_pairs(given, there(values), generator())
        assert found.device == DEVICE
        assert torch.equal(here(found), expected)
