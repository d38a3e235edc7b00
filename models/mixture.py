"""What mixtures have in common: the posterior of their components, and the M-step of their mixing proportions."""

from __future__ import annotations

from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.states import Population

NEVER_USED = 1e-8
_WEIGHT_FLOOR = 1e-6


def responsibilities(population: Population, temperature: float) -> Tensor:
    """Posterior probabilities of the components, ``(N, K)`` in float64, of a population whose state is one categorical latent."""
    return ops.value_probabilities(population.words, population.weights(temperature), population.space.fields)[:, 0].double()


def best_weights(counts: Tensor) -> Tensor:
    """Mixing proportions that maximise the expected log prior, none below a floor: at zero a component could never come back."""
    weights = (counts / counts.sum()).clamp(min=_WEIGHT_FLOOR)
    return weights / weights.sum()
