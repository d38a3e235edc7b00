"""Truncated posteriors over huge discrete latent spaces, as guides for Pyro models."""

import importlib
import importlib.metadata
import warnings
from typing import TYPE_CHECKING, Any

from pyro_truncated.em.closed_form import ClosedForm, ClosedFormModel
from pyro_truncated.em.gibbs import GibbsDraws, GibbsEM, GibbsGuide
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.guide.averaging import OneDrawWarning
from pyro_truncated.guide.data_fingerprint import ChangedDataWarning
from pyro_truncated.multistart.config import LearnConfig
from pyro_truncated.multistart.multi_start import ConvergenceWarning, DisagreeingStartsWarning, best_start, learn
from pyro_truncated.program.vectorization import VectorizationWarning
from pyro_truncated.search import EvolutionarySearch, ExhaustiveSearch, Preselection, SampledSearch, Search
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.training.loop import Training, fit, fit_restarts
from pyro_truncated.utils.annealing import cooling

if TYPE_CHECKING:
    __version__: str
    from pyro_truncated.diagnostics import TruncationWarning, check_truncation, covered_mass, diagnose, estimate_evidence, to_arviz
    from pyro_truncated.gp import InducingSubset, SubsetGPRegression
    from pyro_truncated.gplvm import SASDecoder, SpikeSlabGPLVM, SpikeSlabMRD
    from pyro_truncated.search import GPSelect

__all__ = [
    "AutoTruncated",
    "ChangedDataWarning",
    "ClosedForm",
    "ClosedFormModel",
    "ConvergenceWarning",
    "DisagreeingStartsWarning",
    "EvolutionarySearch",
    "ExhaustiveSearch",
    "GPSelect",
    "GibbsDraws",
    "GibbsEM",
    "GibbsGuide",
    "InducingSubset",
    "LearnConfig",
    "OneDrawWarning",
    "Population",
    "Preselection",
    "SASDecoder",
    "SampledSearch",
    "Search",
    "SpikeSlabGPLVM",
    "SpikeSlabMRD",
    "StateSpace",
    "SubsetGPRegression",
    "Training",
    "Truncated_ELBO",
    "TruncationWarning",
    "VectorizationWarning",
    "__version__",
    "best_start",
    "check_truncation",
    "cooling",
    "covered_mass",
    "diagnose",
    "estimate_evidence",
    "fit",
    "fit_restarts",
    "learn",
    "to_arviz",
]

_SUBPACKAGES = (
    "datasets",
    "diagnostics",
    "distributed",
    "distributions",
    "extend",
    "gp",
    "gplvm",
    "models",
    "restoration",
    "sequences",
    "sklearn",
    "testing",
)
# Loaded when first asked for (PEP 562): ArviZ, Matplotlib and SciPy's statistics take longer to import than everything else here, and
# Gaussian processes are not needed by those who have none.
_LATER = {
    **dict.fromkeys(
        ("TruncationWarning", "check_truncation", "covered_mass", "diagnose", "estimate_evidence", "to_arviz"), "pyro_truncated.diagnostics"
    ),
    **dict.fromkeys(("InducingSubset", "SubsetGPRegression"), "pyro_truncated.gp"),
    **dict.fromkeys(("SASDecoder", "SpikeSlabGPLVM", "SpikeSlabMRD"), "pyro_truncated.gplvm"),
    "GPSelect": "pyro_truncated.search.gp_select",
}

# Tools for authors of models, understood here until version 0.4; the warning comes once.
_MOVED = {"UniqueModule", "check_counts", "check_observable", "takes_arrays"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
        return value
    if name in _MOVED:
        warnings.warn(f"{name} has moved: import it from pyro_truncated.extend", DeprecationWarning, stacklevel=2)
        value = globals()[name] = getattr(importlib.import_module("pyro_truncated.extend"), name)
        return value
    if name == "__version__":
        return importlib.metadata.version("pyro-truncated")
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
