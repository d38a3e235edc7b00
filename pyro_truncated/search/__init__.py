"""Searches: strategies that propose better states for the populations of a batch of data points."""

from pyro_truncated.search.affinities import Affinity, Cosine, Projection, Singletons
from pyro_truncated.search.automatic import AutomaticSearch
from pyro_truncated.search.base import CombinedSearch, Search, SearchBatch
from pyro_truncated.search.conditional import ConditionalSearch
from pyro_truncated.search.evolutionary import EvolutionarySearch
from pyro_truncated.search.exhaustive import ExhaustiveSearch
from pyro_truncated.search.gp_select import GPSelect, RegressionAffinity
from pyro_truncated.search.preselection import Preselection
from pyro_truncated.search.sampling import SampledSearch

__all__ = [
    "Affinity",
    "AutomaticSearch",
    "CombinedSearch",
    "ConditionalSearch",
    "Cosine",
    "EvolutionarySearch",
    "ExhaustiveSearch",
    "GPSelect",
    "Preselection",
    "Projection",
    "RegressionAffinity",
    "SampledSearch",
    "Search",
    "SearchBatch",
    "Singletons",
]
