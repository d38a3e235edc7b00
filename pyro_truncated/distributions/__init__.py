"""Likelihoods that know their structure and so evaluate many states cheaply."""

from pyro_truncated.distributions.linear import LinearSuperposition
from pyro_truncated.distributions.missing import or_missing
from pyro_truncated.distributions.noisy_or import NoisyOrSuperposition

__all__ = ["LinearSuperposition", "NoisyOrSuperposition", "or_missing"]
