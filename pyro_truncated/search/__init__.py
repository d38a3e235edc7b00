"""Searches: strategies that propose better states for the populations of a batch of data points."""

from pyro_truncated.search.base import CombinedSearch, Search, SearchBatch
from pyro_truncated.search.evolutionary import EvolutionarySearch
from pyro_truncated.search.exhaustive import ExhaustiveSearch
from pyro_truncated.search.sampling import SampledSearch

__all__ = ["CombinedSearch", "EvolutionarySearch", "ExhaustiveSearch", "SampledSearch", "Search", "SearchBatch"]
