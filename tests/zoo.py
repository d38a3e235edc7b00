"""Small random models with discrete latents, as users write them, each with what brute force needs to enumerate it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.distributions import constraints
from torch import Tensor

from tests.reference import binary_states, log_joint_table

D64 = torch.float64


@dataclasses.dataclass
class Case:
    """A model, its arguments, the values of its discrete sites, and options of the guide."""

    model: Callable
    args: tuple
    sites: dict[str, list[Tensor]]
    num_data: int
    num_states: int
    max_count: dict[str, int] | None = None
    plate: str = "data"
    dim: int | None = -1

    def table(self) -> Tensor:
        """Log joints ``(T, N)`` of all states by brute force, differentiable in the parameters."""
        return log_joint_table(self.model, self.args, self.sites, self.num_data, self.plate, self.dim)[0]


def _param(name: str, value: Tensor, constraint: constraints.Constraint = constraints.real) -> Tensor:
    return pyro.param(name, lambda: value.clone(), constraint=constraint)


def binary() -> Case:
    """Five binary latents, superimposed nonlinearly."""
    weight, y = torch.randn(4, 5, dtype=D64), torch.randn(6, 4, dtype=D64)

    def model(y):
        weight_ = _param("weight", weight)
        rate = _param("rate", torch.full((5,), 0.3, dtype=D64), constraints.unit_interval)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(rate).to_event(1))
            pyro.sample("y", dist.Normal((s @ weight_.mT).tanh(), 0.5).to_event(1), obs=y)

    return Case(model, (y,), {"s": binary_states(5)}, 6, 32)


def mixture() -> Case:
    """A Gaussian mixture."""
    loc, y = torch.randn(4, 3, dtype=D64), torch.randn(7, 3, dtype=D64)

    def model(y):
        loc_ = _param("loc", loc)
        probs = _param("probs", torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=D64), constraints.simplex)
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(probs))
            pyro.sample("y", dist.Normal(loc_[z], 1.0).to_event(1), obs=y)

    return Case(model, (y,), {"z": [torch.tensor([k]) for k in range(4)]}, 7, 4)


def two_sites() -> Case:
    """A class and binary attributes that depend on it; the posterior over both is joint."""
    rates, weight, y = torch.rand(3, 4, dtype=D64), torch.randn(2, 4, dtype=D64), torch.randn(5, 2, dtype=D64)

    def model(y):
        rates_ = _param("rates", rates, constraints.unit_interval)
        weight_ = _param("weight", weight)
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.5, 0.3], dtype=D64)))
            s = pyro.sample("s", dist.Bernoulli(rates_[z]).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight_.mT + z.unsqueeze(-1), 0.7).to_event(1), obs=y)

    return Case(model, (y,), {"z": [torch.tensor([k]) for k in range(3)], "s": binary_states(4)}, 5, 48)


def counts() -> Case:
    """Poisson and binomial counts with a bound."""
    weight, y = torch.rand(3, 2, dtype=D64), torch.randn(5, 3, dtype=D64)

    def model(y):
        weight_ = _param("weight", weight)
        rate = _param("rate", torch.tensor([0.5, 1.5], dtype=D64), constraints.positive)
        with pyro.plate("data", len(y)):
            n = pyro.sample("n", dist.Poisson(rate).to_event(1))
            m = pyro.sample("m", dist.Binomial(2, torch.tensor(0.4, dtype=D64)))
            pyro.sample("y", dist.Normal(n @ weight_.mT - m.unsqueeze(-1), 1.0).to_event(1), obs=y)

    n = [torch.tensor([c], dtype=D64) for c in itertools.product(range(5), repeat=2)]
    m = [torch.tensor([c], dtype=D64) for c in range(3)]
    return Case(model, (y,), {"n": n, "m": m}, 5, 75, {"n": 4})


def one_hot() -> Case:
    """A one-hot site."""
    loc, y = torch.randn(3, 2, dtype=D64), torch.randn(6, 2, dtype=D64)

    def model(y):
        loc_ = _param("loc", loc)
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.OneHotCategorical(torch.tensor([0.2, 0.5, 0.3], dtype=D64)))
            pyro.sample("y", dist.Normal(z @ loc_, 0.5).to_event(1), obs=y)

    return Case(model, (y,), {"z": list(torch.eye(3, dtype=D64).unsqueeze(1))}, 6, 3)


def nested() -> Case:
    """Words within documents: a plate inside (left of) the data plate, and one latent per document beside it."""
    logits, words = torch.randn(3, 4, dtype=D64), torch.randint(4, (3, 5))

    def model(words):
        table = _param("logits", logits)
        with pyro.plate("data", 5, dim=-1):
            mood = pyro.sample("mood", dist.Bernoulli(torch.tensor(0.3, dtype=D64)))
            with pyro.plate("words", 3, dim=-2):
                topic_logits = torch.stack([mood, 1 - mood, torch.ones_like(mood)], -1)
                z = pyro.sample("z", dist.Categorical(logits=topic_logits))
                pyro.sample("w", dist.Categorical(logits=table[z]), obs=words)

    sites = {
        "mood": [torch.tensor([v], dtype=D64) for v in (0.0, 1.0)],
        "z": [torch.tensor(z).reshape(3, 1) for z in itertools.product(range(3), repeat=3)],
    }
    return Case(model, (words,), sites, 5, 54)


def nested_right() -> Case:
    """The data plate at dim -2, a plate of latents inside it at dim -1 whose members share an observation."""
    y, total = torch.randn(4, 3, dtype=D64), torch.randn(4, 1, dtype=D64)

    def model(y, total):
        loc = _param("loc", torch.tensor([-1.0, 1.0], dtype=D64))
        with pyro.plate("data", 4, dim=-2):
            with pyro.plate("columns", 3, dim=-1):
                z = pyro.sample("z", dist.Categorical(torch.tensor([0.3, 0.7], dtype=D64)))
                pyro.sample("y", dist.Normal(loc[z], 1.0), obs=y)
            pyro.sample("total", dist.Normal(loc[z].sum(-1, keepdim=True), 1.0), obs=total)

    sites = {"z": [torch.tensor(z).reshape(1, 3) for z in itertools.product(range(2), repeat=3)]}
    return Case(model, (y, total), sites, 4, 8, dim=-2)


def two_plates() -> Case:
    """Two plates that both hold everything: twelve data points with a state each."""
    y = torch.randn(4, 3, dtype=D64)

    def model(y):
        loc = _param("loc", torch.tensor([-1.0, 1.0], dtype=D64))
        with pyro.plate("rows", 4, dim=-2), pyro.plate("columns", 3, dim=-1):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.3, 0.7], dtype=D64)))
            pyro.sample("y", dist.Normal(loc[z], 1.0), obs=y)

    return Case(model, (y,), {"z": [torch.tensor([[k]]) for k in range(2)]}, 12, 2, plate="columns", dim=None)


def masked() -> Case:
    """Missing entries by a mask."""
    case = binary()
    (y,) = case.args
    seen = torch.rand(y.shape) < 0.6

    def model(y):
        weight_ = _param("weight", torch.linspace(-1, 1, 20, dtype=D64).reshape(4, 5))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((5,), 0.3, dtype=D64)).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight_.mT, 0.5).mask(seen).to_event(1), obs=y)

    return dataclasses.replace(case, model=model)


def masked_data() -> Case:
    """Whole data points and prior terms masked by a handler."""
    case = mixture()
    inner = case.model
    return dataclasses.replace(case, model=lambda y: poutine.mask(inner, mask=torch.arange(len(y)) % 2 == 0)(y))


CASES = (binary, mixture, two_sites, counts, one_hot, nested, nested_right, two_plates, masked, masked_data)
