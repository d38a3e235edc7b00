"""Populations that hold all states: nothing is searched, and data points share them where the model can."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
from pyro.ops.indexing import Vindex
from torch import Tensor

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO

X, Y = torch.randn(2, 6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(0)
CENTRES = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(4, 2)


def indexed(k: Tensor, loc: Tensor) -> Tensor:
    return Vindex(loc)[..., k, :]


def stacked(k: Tensor, loc: Tensor) -> Tensor:
    """It needs a value for each data point."""
    values = torch.stack([k.to(X.dtype), X[:, 0].expand_as(k)], -1)
    assert values.shape[-2] == len(X) == k.shape[-1]
    return values * loc.sum(0)


def program(mean: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    def model(y: Tensor, size: int | None = None) -> None:
        loc = pyro.param("loc", lambda: CENTRES.clone())
        with pyro.plate("data", len(y), subsample_size=size) as rows:
            k = pyro.sample("k", dist.Categorical(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=y.dtype)))
            pyro.sample("y", dist.Normal(mean(k, loc), 0.7).to_event(1), obs=y[rows])

    return model


@pytest.mark.parametrize("mean", [indexed, stacked])
def test_losses_and_gradients_are_those_of_enumeration(mean: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = program(mean)
    guide = AutoTruncated(model, num_states=4)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, guide, Y)
    gradient = pyro.param("loc").grad
    assert guide.layout.takes_shared_states is (mean is indexed)
    pyro.clear_param_store()
    states = torch.arange(4).unsqueeze(-1).expand(-1, len(Y))
    loc = CENTRES.clone().requires_grad_()
    prior = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log().unsqueeze(-1)
    evidence = (prior + dist.Normal(mean(states, loc), 0.7).log_prob(Y).sum(-1)).logsumexp(0).sum()
    evidence.backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(-float(evidence.detach()), rel=1e-12)
    assert loc.grad is not None
    torch.testing.assert_close(gradient, -loc.grad, rtol=1e-10, atol=1e-10)


def test_minibatches_and_new_data_share_states() -> None:
    model = program(indexed)
    guide = AutoTruncated(model, num_states=4)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-9}), Truncated_ELBO())
    for _ in range(5):
        svi.step(Y, 2)
    enumerated = TraceEnum_ELBO(max_plate_nesting=1).loss(config_enumerate(model), lambda *_: None, Y)
    assert Truncated_ELBO().loss(model, guide, Y) == pytest.approx(float(enumerated), rel=1e-8)
    new = guide.infer(Y + 1)
    enumerated = TraceEnum_ELBO(max_plate_nesting=1).loss(config_enumerate(model), lambda *_: None, Y + 1)
    assert -float(new.population().free_energy().sum()) == pytest.approx(float(enumerated), rel=1e-8)


@pytest.mark.parametrize("order", [[3, 1, 0, 2], [0, 1, 2, 3]])
def test_the_order_of_states_does_not_matter(order: list[int]) -> None:
    model = program(indexed)
    guide = AutoTruncated(model, num_states=4)
    first = guide.posterior(Y)
    free_energy, marginals = first.free_energy(), first.marginals()
    guide.populations.words[::2] = guide.populations.words[::2][:, torch.tensor(order)]
    guide.refresh_(Y)
    torch.testing.assert_close(guide.population().free_energy(), free_energy)
    torch.testing.assert_close(guide.population().marginals(), marginals)


def test_data_points_without_a_possible_state_are_named() -> None:
    def model(y: Tensor) -> None:
        rate = pyro.param("rate", torch.tensor(0.5))
        with pyro.plate("data", len(y)):
            k = pyro.sample("k", dist.Bernoulli(0.3))
            pyro.factor("hard", torch.where(y > 0, rate * k, -math.inf))

    with pytest.raises(ValueError, match="probability zero"):
        Truncated_ELBO().loss_and_grads(model, AutoTruncated(model, num_states=2), torch.tensor([1.0, -1.0]))
