"""Likelihoods of a user's own that score packed states: as they score states, or they are refused."""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import AutoTruncated, Truncated_ELBO
from pyro_truncated.distributions import Superposition
from pyro_truncated.states import StateSpace

WEIGHT, Y = torch.tensor([[0.7, -0.4], [0.2, 1.5], [-1.1, 0.3]]), torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.3, 0.1]])


class HeavyTails(Superposition):
    arg_constraints: ClassVar = {
        "states": constraints.real_vector,
        "weight": constraints.independent(constraints.real, 2),
        "scale": constraints.positive,
    }
    support = constraints.real_vector

    def __init__(self, states: Tensor, weight: Tensor, scale: Any, validate_args: bool | None = None) -> None:
        super().__init__(states, weight, validate_args, scale=scale)

    def log_prob(self, value: Tensor) -> Tensor:
        return dist.Laplace(self.states @ self.weight.mT, self.scale).log_prob(value).sum(-1)

    def scores(self, words: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        states = StateSpace([2] * self.weight.shape[1]).unpack(words).to(value)
        return states, dist.Laplace(states @ self.weight.mT, self.scale).log_prob(value.unsqueeze(1)).sum(-1)


class Right(HeavyTails):
    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value)

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        states, scores = self.scores(words, value)
        return scores if state_logits is None else scores + (states * state_logits.unsqueeze(-2)).sum(-1)


class WithoutPrior(Right):
    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value)

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        return self.scores(words, value)[1]


class Twice(Right):
    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value)

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        return 2 * super().packed_log_prob(words, value, state_logits)


def loss(kind: type[HeavyTails], vectorize: bool | None) -> float:
    def model(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((2,), 0.3)).to_event(1))
            pyro.sample("y", kind(s, WEIGHT, 0.8), obs=y)

    return Truncated_ELBO().loss(model, AutoTruncated(model, 4, vectorize=vectorize), Y)


@pytest.mark.parametrize("vectorize", [None, True, False])
@pytest.mark.parametrize("kind", [WithoutPrior, Twice])
def test_packed_scores_that_are_not_those_of_the_states_are_refused(kind: type[HeavyTails], vectorize: bool | None) -> None:
    """They would be taken for the model's: a bound above the evidence, and another posterior."""
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.packed_log_prob must be {kind.__name__}\.log_prob of the unpacked states"):
        loss(kind, vectorize)


@pytest.mark.parametrize("vectorize", [None, True, False])
@pytest.mark.parametrize("kind", [Right, HeavyTails])
def test_the_evidence_is_that_of_the_density(kind: type[HeavyTails], vectorize: bool | None) -> None:
    joint = []
    for s in itertools.product((0.0, 1.0), repeat=2):
        prior = sum(math.log(0.3 if on else 0.7) for on in s)
        joint.append(prior + dist.Laplace(WEIGHT @ torch.tensor(s), 0.8).log_prob(Y).sum(-1))
    assert -loss(kind, vectorize) == pytest.approx(float(torch.stack(joint).logsumexp(0).sum()), abs=1e-4)
