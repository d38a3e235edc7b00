"""Searches: strategies that propose better states for populations."""

import importlib
from typing import TYPE_CHECKING, Any

from pyro_truncated.search.automatic import AutomaticSearch
from pyro_truncated.search.base import CombinedSearch, Search, SearchBatch
from pyro_truncated.search.conditional import ConditionalSearch
from pyro_truncated.search.evolutionary import EvolutionarySearch
from pyro_truncated.search.exhaustive import ExhaustiveSearch, SampledSearch
from pyro_truncated.search.max_inner_product_index import MaxInnerProductIndex
from pyro_truncated.search.neighbours import NeighbourSearch
from pyro_truncated.search.preselection import Affinity, CombinedFlips, Cosine, Preselection, Projection, Singletons
from pyro_truncated.search.surrogate import SurrogateSearch

if TYPE_CHECKING:
    from pyro_truncated.search.gp_select import GPSelect, LearnedFlips, RegressionAffinity

__all__ = [
    "Affinity",
    "AutomaticSearch",
    "CombinedFlips",
    "CombinedSearch",
    "ConditionalSearch",
    "Cosine",
    "EvolutionarySearch",
    "ExhaustiveSearch",
    "GPSelect",
    "LearnedFlips",
    "MaxInnerProductIndex",
    "NeighbourSearch",
    "Preselection",
    "Projection",
    "RegressionAffinity",
    "SampledSearch",
    "Search",
    "SearchBatch",
    "Singletons",
    "SurrogateSearch",
]

# Loaded when first asked for (PEP 562), with the Gaussian processes that they need.
_LATER = {"GPSelect": "gp_select", "LearnedFlips": "gp_select", "RegressionAffinity": "gp_select"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"pyro_truncated.search.{_LATER[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
