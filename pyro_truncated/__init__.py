"""Truncated posteriors over huge discrete latent spaces, as guides for Pyro models."""

from pyro_truncated.diagnostics import TruncationWarning, check_truncation, covered_mass, diagnose, estimate_evidence, to_arviz
from pyro_truncated.elbo import Truncated_ELBO
from pyro_truncated.em import ClosedForm
from pyro_truncated.gibbs import GibbsEM, GibbsGuide
from pyro_truncated.gp import InducingSubset, SubsetGPRegression
from pyro_truncated.gplvm import SASDecoder, SpikeSlabGPLVM, SpikeSlabMRD
from pyro_truncated.guide import AutoTruncated
from pyro_truncated.population import Population
from pyro_truncated.restarts import best_start
from pyro_truncated.search import EvolutionarySearch, ExhaustiveSearch, GPSelect, Preselection, SampledSearch, Search
from pyro_truncated.seen_data import ChangedDataWarning
from pyro_truncated.states import StateSpace
from pyro_truncated.training import Training, fit, fit_restarts

__all__ = [
    "AutoTruncated",
    "ChangedDataWarning",
    "ClosedForm",
    "EvolutionarySearch",
    "ExhaustiveSearch",
    "GPSelect",
    "GibbsEM",
    "GibbsGuide",
    "InducingSubset",
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
    "best_start",
    "check_truncation",
    "covered_mass",
    "diagnose",
    "estimate_evidence",
    "fit",
    "fit_restarts",
    "to_arviz",
]
