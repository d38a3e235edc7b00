"""Spaces of discrete states, and populations of states for data points."""

from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace

__all__ = ["Population", "StateSpace"]
