"""Errors from below name the arguments that caused them; those that say something already stay, and what works is not looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_truncated.distributions import LinearSuperposition, MaximumSlabs
from pyro_truncated.utils.arguments import check_kinds, names_arguments


@names_arguments
def product(
    first: Tensor, second: Tensor | float, *, times: int = 1, name: str | None = None, then: Callable[[Tensor], Any] | None = None
) -> Any:
    if times < 0:
        raise ValueError("times must not be negative")
    if name == "nobody":
        raise NotImplementedError("nobody has written this")
    found = (first @ second.mT) * times
    return found if then is None else then(found)


def test_what_works_is_returned():
    assert product(torch.ones(2, 3), torch.ones(2, 3), times=2).sum() == 24


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("x", torch.ones(2, 3)), TypeError, "first must be a tensor; got 'x'"),
        ((torch.ones(2, 3), None), TypeError, "second must be a tensor or a number; got None"),
        ((torch.ones(2, 3).cfloat(), torch.ones(2, 3)), TypeError, r"first must be a tensor; got complex64 of shape \(2, 3\)"),
        ((torch.ones(2, 3), torch.ones(2, 2)), ValueError, r"first: float32 of shape \(2, 3\), second: float32 of shape \(2, 2\)"),
        ((torch.full((2, 3), torch.nan), torch.ones(2, 2)), ValueError, r"first: float32 of shape \(2, 3\), 6 NaN"),
    ],
)
def test_what_fails_below_names_its_argument(arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        product(*arguments)
    assert caught.value.__cause__ is not None


def test_errors_that_say_something_stay():
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"^times must not be negative$"):
        product(ones, ones, times=-1)
    with pytest.raises(NotImplementedError, match="nobody"):
        product(ones, ones, name="nobody")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'second'"):
        product(ones)
    with pytest.raises(KeyboardInterrupt):
        product(ones, ones, then=_interrupt)


def _interrupt(_: Tensor) -> None:
    raise KeyboardInterrupt


def several(values: Sequence[float], kind: str, size: int | None = None) -> None:
    """A function of some kinds of arguments."""


@pytest.mark.parametrize(
    "good", [{"values": [1.0]}, {"values": (1, 2)}, {"kind": "a"}, {"size": None}, {"size": 3}, {"size": torch.tensor(3)}]
)
def test_kinds_that_fit(good):
    check_kinds(several, **good)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"values": "abc"}, "values must be a Sequence; got 'abc'"),
        ({"values": 3}, "values must be a Sequence; got 3"),
        ({"kind": None}, "kind must be a string; got None"),
        ({"size": True}, "size must be an integer or None; got True"),
        ({"size": 2.5}, "size must be an integer or None; got 2.5"),
    ],
)
def test_kinds_that_do_not_fit(bad, message):
    with pytest.raises(TypeError, match=message):
        check_kinds(several, **bad)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_infinite_parameters_of_a_likelihood_are_refused(name):
    given = {"weight": torch.ones(3, 2), "scale": torch.ones(3), "bias": torch.zeros(3)}
    given[name].view(-1)[0] = torch.inf
    with pytest.raises(ValueError, match=rf"parameter {name} .* to satisfy the constraint .*finite"):
        LinearSuperposition(torch.ones(5, 2), **given, validate_args=True)


@pytest.mark.parametrize(("name", "value"), [("scale", 0.0), ("slab_scale", torch.nan), ("weight", torch.inf), ("value", torch.inf)])
def test_slabs_refuse_parameters_that_make_nan(name, value):
    given = {"states": torch.ones(5, 2), "weight": torch.ones(3, 2), "scale": torch.ones(3), "slab_mean": torch.ones(2)}
    given |= {"slab_scale": torch.ones(2), "value": torch.ones(5, 3)}
    given[name].view(-1)[0] = value
    with pytest.raises(ValueError, match=f"^{name} must be .*finite"):
        MaximumSlabs(**given)
