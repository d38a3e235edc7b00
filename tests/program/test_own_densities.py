"""Classes derived from a distribution, with a density of their own: that density counts, not what the parent is computed by."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.distributions import BinaryChains, CategoricalChains, LinearSuperposition, NoisyOrSuperposition

Y = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.3, 0.1]])
WEIGHT = torch.tensor([[0.7, -0.4], [0.2, 1.5], [-1.1, 0.3]])
SWITCH, TABLE = torch.tensor([[[0.8, 0.2], [0.3, 0.7]]] * 2), torch.tensor([[[0.8, 0.1, 0.1], [0.3, 0.4, 0.3], [0.2, 0.2, 0.6]]] * 2)


class Tempered(dist.Bernoulli):
    def log_prob(self, value: Tensor) -> Tensor:
        return 0.5 * super().log_prob(value) - 0.1 * value


class Robust(LinearSuperposition):
    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value).clamp(min=-3.0)


class Leaky(NoisyOrSuperposition):
    def log_prob(self, value: Tensor) -> Tensor:
        return torch.logaddexp(super().log_prob(value), torch.tensor(-4.0))


class Sticky(BinaryChains):
    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value) + 0.7 * value.sum((-1, -2))


class High(CategoricalChains):
    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value) + 0.7 * value.to(Y.dtype).sum((-1, -2))


def causes(prior: type[dist.Bernoulli], likelihood: Callable[[Tensor], dist.Distribution]) -> Callable[[Tensor], None]:
    def model(y: Tensor) -> None:
        s = pyro.sample("s", prior(torch.full((2,), 0.3)).to_event(1))
        pyro.sample("y", likelihood(s), obs=y)

    def rows(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            model(y)

    return rows


def chains(kind: Callable[[], dist.Distribution], likelihood: Callable[[Tensor], dist.Distribution]) -> Callable[[Tensor], None]:
    def model(y: Tensor) -> None:
        s = pyro.sample("s", kind())
        pyro.sample("y", likelihood(s).to_event(1), obs=y)

    return model


def normal(states: Tensor) -> dist.Distribution:
    return dist.Normal(states.to(Y.dtype) @ WEIGHT.mT, 0.8).to_event(1)


def linear(states: Tensor) -> dist.Distribution:
    return LinearSuperposition(states, WEIGHT, 0.8)


CASES = {
    "prior of a likelihood": (causes(Tempered, linear), Y, (2, 2), 2),
    "prior of a normal": (causes(Tempered, normal), Y, (2, 2), 2),
    "likelihood": (causes(dist.Bernoulli, lambda s: Robust(s, WEIGHT, 0.8)), Y, (2, 2), 2),
    "noisy-or": (causes(dist.Bernoulli, lambda s: Leaky(s, WEIGHT.sigmoid(), 0.1)), (Y > 0).to(Y.dtype), (2, 2), 2),
    "chains": (chains(lambda: Sticky(torch.full((2,), 0.3), SWITCH, num_steps=2), normal), Y, (2, 2), 2),
    "categorical chains": (chains(lambda: High(torch.full((2, 3), 1 / 3), TABLE, num_steps=2), normal), Y, (2, 2), 3),
    "likelihood of chains": (
        chains(lambda: BinaryChains(torch.full((2,), 0.3), SWITCH, num_steps=2), lambda s: Robust(s, WEIGHT, 0.8)),
        Y,
        (2, 2),
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_states", [9, 100])
def test_the_density_is_that_of_the_derived_class(name: str, num_states: int) -> None:
    model, y, shape, num_values = CASES[name]
    states = torch.tensor(list(itertools.product(range(num_values), repeat=4))).reshape(-1, *shape)
    joint = []
    for s in states:
        trace = poutine.trace(poutine.condition(model, {"s": s.to(Y.dtype)})).get_trace(y)
        joint.append(trace.log_prob_sum())
    log_joint = torch.stack(joint)
    expected = (log_joint.softmax(0).view(-1, 1, 1) * states).sum(0)
    pyro.set_rng_seed(0)
    guide = AutoTruncated(model, num_states=num_states)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, guide, y)
    if num_states < len(states) and not guide.product and name in ("chains", "categorical chains"):
        # Nine of all whole states: below the evidence.
        assert loss >= -log_joint.logsumexp(0) - 1e-4
        return
    assert loss == pytest.approx(-float(log_joint.logsumexp(0)), abs=1e-4)
    (marginals,) = guide.marginals().values()
    found = marginals if marginals.shape[-2:] == (2, 2) else (marginals * torch.arange(num_values)).sum(-1)
    torch.testing.assert_close(found.reshape(2, 2).to(expected), expected, atol=1e-4, rtol=0)
