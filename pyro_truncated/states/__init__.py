"""What a state is: spaces of discrete latents, and the populations of states that are kept for each data point."""

from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace

__all__ = ["Population", "StateSpace"]
