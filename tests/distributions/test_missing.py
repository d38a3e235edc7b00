"""The constraint of observations that may be missing."""

from __future__ import annotations

import math

import torch
from torch.distributions import biject_to, constraints, transform_to

from pyro_truncated.distributions import or_missing


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
