"""Surrogate search, and the regressions that it follows."""

from pyro_truncated.search.surrogate.surrogate_search import SurrogateSearch

__all__ = ["SurrogateSearch"]
