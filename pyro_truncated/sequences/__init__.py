"""Truncated posteriors of sequences: a set of states at every step."""

from pyro_truncated.sequences.block_search import BlockSearch
from pyro_truncated.sequences.chain_posterior import ChainPosterior
from pyro_truncated.sequences.linear_gaussian import LinearGaussianSteps
from pyro_truncated.sequences.observed_steps import ObservedSteps

__all__ = ["BlockSearch", "ChainPosterior", "LinearGaussianSteps", "ObservedSteps"]
