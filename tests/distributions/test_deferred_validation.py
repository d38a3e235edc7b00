"""Distributions whose checks wait for a device together with others: the same numbers, the same refusals, and one look."""

from __future__ import annotations

import contextlib

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.distributions import Component, LinearSuperposition, categorical, defer_validation
from tests.pretended_device import PretendedDevice, here, there

Poisson, MultivariateNormal = defer_validation(dist.Poisson), defer_validation(dist.MultivariateNormal)


@contextlib.contextmanager
def one_look():
    with PretendedDevice() as device:
        with ops.defer_checks():
            yield
            assert not device.syncs
        assert sum(device.syncs.values()) == 1, device.syncs


def test_a_device_is_waited_for_once() -> None:
    rate, counts = torch.rand(4, 3) + 1, torch.poisson(torch.full((5, 4, 3), 2.0))
    loc, root, y = torch.randn(4, 3), torch.eye(3).expand(4, 3, 3).tril(), torch.randn(5, 4, 3)
    with one_look():
        found = Poisson(there(rate)).to_event(1).expand([5, 4]).log_prob(there(counts))
        normal = MultivariateNormal(there(loc), scale_tril=there(root)).expand([5, 4]).log_prob(there(y))
    torch.testing.assert_close(here(found), dist.Poisson(rate).log_prob(counts).sum(-1))
    torch.testing.assert_close(here(normal), dist.MultivariateNormal(loc, scale_tril=root).log_prob(y))


@pytest.mark.parametrize("kind", ["compiled", "vectorised"])
def test_what_stock_distributions_refuse_is_refused(kind: str) -> None:
    with ops.use_backend(kind):
        with pytest.raises(ValueError, match="parameter rate"):
            Poisson(torch.tensor([1.0, -1.0]))
        with pytest.raises(ValueError, match=r"within the support .* of the distribution Poisson"):
            Poisson(torch.tensor(1.0)).log_prob(torch.tensor(0.5))
        with pytest.raises(ValueError, match="not broadcastable"):
            Poisson(torch.ones(3)).log_prob(torch.ones(4))
        with pytest.raises(ValueError, match=r"within the support .* of the distribution LinearSuperposition"):
            LinearSuperposition(torch.zeros(2), torch.ones(3, 2), 1.0).log_prob(torch.full((3,), torch.inf))
        assert Poisson(torch.tensor(-1.0), validate_args=False).rate == -1


def test_what_is_wrong_on_a_device_is_found_at_the_look() -> None:
    def step(rate: float, count: float) -> Tensor:
        with PretendedDevice(), ops.defer_checks():
            return Poisson(there(torch.tensor(rate))).log_prob(there(torch.tensor(count)))

    assert torch.isfinite(here(step(1.0, 2.0)))
    with pytest.raises(ValueError, match="parameter rate"):
        step(-1.0, 2.0)
    with pytest.raises(ValueError, match="support"):
        step(1.0, 0.5)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_components_on_a_device_are_drawn_with_their_probabilities(shape: tuple[int, ...]) -> None:
    """Chi-square statistics of 3 degrees of freedom, two or one of them, each beyond 27 with probability 6e-6."""
    torch.manual_seed(0)
    probs = torch.tensor([0.1, 0.0, 0.6, 0.05, 0.25], dtype=torch.float64).expand(*shape, 5)
    probs = probs if not shape else torch.stack([probs[0], probs[1].flip(0)])
    number = 20_000
    with PretendedDevice() as device:
        drawn = here(categorical(there(probs)).expand([number, *shape]).sample())
        assert not {line for line in device.syncs if "sample" in line}
    assert drawn.shape == (number, *shape)
    for values, expected in zip(drawn.reshape(number, -1).unbind(1), probs.reshape(-1, 5), strict=True):
        counts = values.bincount(minlength=5)
        assert counts[expected == 0].sum() == 0
        possible = expected > 0
        assert ((counts - number * expected).square() / (number * expected))[possible].sum() < 27


def test_a_categorical_of_the_cpu_is_the_stock_one() -> None:
    probs = torch.tensor([0.3, 0.7])
    assert type(categorical(probs)) is dist.Categorical
    with PretendedDevice():
        assert type(categorical(there(probs))) is Component
