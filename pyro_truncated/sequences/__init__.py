"""Truncated posteriors of sequences: a set of states at every step."""

from pyro_truncated.sequences.chain_posterior import BlockSearch, ChainPosterior
from pyro_truncated.sequences.observed_steps import LinearGaussianSteps, ObservedSteps

__all__ = ["BlockSearch", "ChainPosterior", "LinearGaussianSteps", "ObservedSteps"]
