"""Sample statements of random models: kinds of discrete sites and of observations, each with a form in stock distributions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_truncated.distributions import (
    LinearSuperposition,
    MaximumSuperposition,
    NoisyOrSuperposition,
    SpikeSlabSuperposition,
    or_missing,
)


@dataclasses.dataclass(frozen=True)
class Statement:
    """A sample statement: kind, place, a number of its own, the sites it depends on, the site that bounds it, what hides it."""

    name: str
    kind: str
    place: str
    size: int = 0
    base: float = 0.0
    parents: tuple[tuple[str, float], ...] = ()
    total: str | None = None
    hidden: str | None = None
    data: Tensor | None = None


# --- kinds of discrete sites ---


def summary(statement: Statement, value: Tensor) -> Tensor:
    """A site's value as one number per draw: classes count as numbers, vectors are summed with unequal weights."""
    value = value.to(torch.get_default_dtype())
    return (value * torch.linspace(0.4, 1.2, value.shape[-1])).sum(-1) if statement.kind in VECTORS else value


def _classes(statement: Statement, number: Tensor) -> Tensor:
    return number.unsqueeze(-1) * torch.linspace(-1, 1, statement.size)


def _thinned(statement: Statement, number: Tensor, known: Mapping[str, tuple[Statement, Tensor]]) -> Any:
    assert statement.total is not None
    return dist.Binomial(known[statement.total][1], logits=number)


DISCRETE: dict[str, Callable[..., Any]] = {
    "bernoulli": lambda statement, number, known: dist.Bernoulli(logits=number),
    "bernoulli_vector": lambda statement, number, known: dist.Bernoulli(logits=number.unsqueeze(-1) + torch.zeros(statement.size)).to_event(
        1
    ),
    "categorical": lambda statement, number, known: dist.Categorical(logits=_classes(statement, number)),
    "categorical_vector": lambda statement, number, known: dist.Categorical(
        logits=_classes(statement, number).unsqueeze(-2) * torch.tensor([[1.0], [2.0]])
    ).to_event(1),
    "one_hot": lambda statement, number, known: dist.OneHotCategorical(logits=_classes(statement, number)),
    "binomial": lambda statement, number, known: dist.Binomial(statement.size, logits=number),
    "poisson": lambda statement, number, known: dist.Poisson((0.5 * number).exp()),
    "poisson_vector": lambda statement, number, known: dist.Poisson((0.5 * number.unsqueeze(-1) + torch.zeros(2)).exp()).to_event(1),
    "geometric": lambda statement, number, known: dist.Geometric(logits=number),
    "thinned": _thinned,
}
VECTORS = ("bernoulli_vector", "categorical_vector", "one_hot", "poisson_vector")
UNBOUNDED = ("poisson", "poisson_vector", "geometric")


def cardinality(statement: Statement) -> int:
    """Number of values of a site in one draw; of a thinned count at most."""
    sizes = {"bernoulli": 2, "bernoulli_vector": 2**statement.size, "categorical": statement.size, "one_hot": statement.size}
    sizes |= {"categorical_vector": statement.size**2, "poisson_vector": (statement.size + 1) ** 2}
    return sizes.get(statement.kind, statement.size + 1)


# --- kinds of observations: they sample a statement, given its mean ---


def _observe(statement: Statement, suffix: str, fn: Any, event_dim: int = 0) -> None:
    value = statement.data
    assert value is not None
    if statement.hidden == "entries":
        seen = ~value.isnan()
        fn, value = fn.mask(seen), torch.where(seen, value, 1.0)
    known = torch.rand(value.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    options: dict[str, Any] = {"obs_mask": known} if statement.hidden == "imputed" else {}
    pyro.sample(statement.name + suffix, fn.to_event(event_dim), obs=value, **options)


def _normal(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    _observe(statement, suffix, dist.Normal(mean, width))


def _normal_vector(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    _observe(statement, suffix, dist.Normal(mean.unsqueeze(-1) * torch.tensor([1.0, -0.5]), width), 1)


def _bernoulli(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    _observe(statement, suffix, dist.Bernoulli(logits=mean))


def _poisson(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    _observe(statement, suffix, dist.Poisson((0.3 * mean).exp() * width))


def _categorical(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    _observe(statement, suffix, dist.Categorical(logits=mean.unsqueeze(-1) * torch.tensor([0.0, 0.5, -0.7])))


def _counted(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Mapping[str, tuple[Statement, Tensor]]) -> None:
    assert statement.total is not None
    _observe(statement, suffix, dist.Binomial(known[statement.total][1], logits=mean, validate_args=False))


def _weights(statement: Statement, known: Mapping[str, tuple[Statement, Tensor]], width: Tensor) -> tuple[Tensor, Tensor]:
    assert statement.total is not None
    site, states = known[statement.total]
    return states, width * torch.linspace(-0.4, 1.5, 3 * site.size).reshape(3, site.size)


def _superposition(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    states, weight = _weights(statement, known, width)
    pyro.sample(statement.name + suffix, LinearSuperposition(states, weight, width), obs=statement.data)


def _superposition_spelled_out(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    states, weight = _weights(statement, known, width)
    _observe(dataclasses.replace(statement, hidden="entries"), suffix, dist.Normal(states @ weight.mT, width), 1)


def _maximum(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    states, weight = _weights(statement, known, width)
    pyro.sample(statement.name + suffix, MaximumSuperposition(states, weight, width), obs=statement.data)


def _maximum_spelled_out(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    states, weight = _weights(statement, known, width)
    mean = (weight * states.unsqueeze(-2)).amax(-1).clamp(min=0.0)
    _observe(dataclasses.replace(statement, hidden="entries"), suffix, dist.Normal(mean, width), 1)


def _spike_slab(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    states, weight = _weights(statement, known, width)
    pyro.sample(statement.name + suffix, SpikeSlabSuperposition(states, weight, width, 0.7, 1.3), obs=statement.data)


def _spike_slab_spelled_out(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    """A missing entry becomes an independent standard normal number at its mean, whose density is taken off again."""
    states, weight = _weights(statement, known, width)
    value = statement.data
    assert value is not None
    seen = (~value.isnan()).to(weight.dtype)
    spread = weight * (1.3 * states).unsqueeze(-2)
    covariance = spread @ spread.mT + width.square() * torch.eye(len(weight))
    covariance = covariance * seen.unsqueeze(-1) * seen.unsqueeze(-2) + torch.diag_embed(1 - seen)
    mean = (0.7 * states) @ weight.mT
    pyro.sample(statement.name + suffix, dist.MultivariateNormal(mean, covariance), obs=torch.where(seen > 0, value, mean.detach()))
    # At its mean every missing entry still has this derivative: none.
    pyro.factor(statement.name + suffix + "_missing", 0.5 * math.log(2 * math.pi) * (1 - seen).sum(-1))


def _noisy_or(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    states, weight = _probabilities(statement, known, width)
    pyro.sample(statement.name + suffix, NoisyOrSuperposition(states, weight, 0.1), obs=statement.data)


def _noisy_or_spelled_out(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    states, weight = _probabilities(statement, known, width)
    probs = 1 - 0.9 * (1 - weight * states.unsqueeze(-2)).prod(-1)
    _observe(dataclasses.replace(statement, hidden="entries"), suffix, dist.Bernoulli(probs), 1)


def _probabilities(statement: Statement, known: Mapping[str, tuple[Statement, Tensor]], width: Tensor) -> tuple[Tensor, Tensor]:
    assert statement.total is not None
    site, states = known[statement.total]
    return states, 0.5 * width * torch.linspace(0.1, 1.5, 3 * site.size).reshape(3, site.size)


class NormalOrMissing(dist.Normal):  # type: ignore[misc]
    """A user's own distribution, whose observations may be missing."""

    support = or_missing(dist.constraints.real)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density; zero where there is nothing."""
        density: Tensor = super().log_prob(torch.where(value.isnan(), 0.0, value))
        return torch.where(value.isnan(), 0.0, density)


def _own(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    fn = NormalOrMissing(mean.unsqueeze(-1) * torch.tensor([1.0, -0.5]), width).to_event(1)
    pyro.sample(statement.name + suffix, fn, obs=statement.data)


def _own_spelled_out(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    _normal_vector(dataclasses.replace(statement, hidden="entries"), suffix, mean, width, known)


OBSERVED: dict[str, Callable[..., None]] = {
    "normal": _normal,
    "normal_vector": _normal_vector,
    "bernoulli": _bernoulli,
    "poisson": _poisson,
    "categorical": _categorical,
    "counted": _counted,
    "superposition": _superposition,
    "maximum": _maximum,
    "spike_slab": _spike_slab,
    "noisy_or": _noisy_or,
    "own": _own,
}
# The same densities in stock distributions, for the brute force.
SPELLED_OUT: dict[str, Callable[..., None]] = {
    "superposition": _superposition_spelled_out,
    "maximum": _maximum_spelled_out,
    "spike_slab": _spike_slab_spelled_out,
    "noisy_or": _noisy_or_spelled_out,
    "own": _own_spelled_out,
}
SUPERPOSITIONS = ("superposition", "maximum", "spike_slab", "noisy_or")
EVENTS = {"normal_vector": 2, "own": 2, **dict.fromkeys(SUPERPOSITIONS, 3)}
