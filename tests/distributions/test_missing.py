"""The constraint of observations that may be missing."""

from __future__ import annotations

import math

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import biject_to, constraints, transform_to

from pyro_truncated.distributions import NormalOrMissing, or_missing


def test_check_accepts_valid_and_missing_entries() -> None:
    value = torch.tensor([0.0, 1.0, 0.5, math.nan, math.inf])
    assert or_missing(constraints.boolean).check(value).tolist() == [True, True, False, True, False]
    assert or_missing(constraints.real).check(value).tolist() == [True, True, True, True, False]
    assert constraints.independent(or_missing(constraints.boolean), 1).check(value[[0, 1, 3]]).item()


def test_structure_is_that_of_the_base() -> None:
    assert or_missing(constraints.boolean).is_discrete
    assert not or_missing(constraints.positive).is_discrete
    assert or_missing(constraints.real_vector).event_dim == 1
    x = torch.randn(3)
    assert torch.equal(biject_to(or_missing(constraints.positive))(x), x.exp())
    assert torch.equal(transform_to(or_missing(constraints.real))(x), x)


def test_normal_entries_that_are_missing_count_for_nothing_and_leave_no_gradient() -> None:
    loc, scale = torch.randn(5, 1, 3, dtype=torch.float64, requires_grad=True), torch.rand(3, dtype=torch.float64) + 0.5
    value = torch.randn(4, 3, dtype=torch.float64)
    value[1, 2] = value[3, 0] = math.nan
    seen = ~value.isnan()
    log_prob = NormalOrMissing(loc, scale).to_event(1).log_prob(value)
    expected = (dist.Normal(loc, scale).log_prob(value.nan_to_num()) * seen).sum(-1)
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one.sum(), loc)[0] for one in (log_prob, expected)))
    assert NormalOrMissing(loc, scale).expand([2, 5, 4, 3]).sample().isfinite().all()
    bits = value > 0  # of which torch subtracts nothing
    torch.testing.assert_close(NormalOrMissing(loc, scale).log_prob(bits), dist.Normal(loc, scale).log_prob(bits.to(loc)))
    with pytest.raises(ValueError, match="missing"):
        NormalOrMissing(loc, scale).log_prob(value.fill_(math.inf))
