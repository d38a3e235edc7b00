"""Sparse Gaussian processes whose inducing inputs are chosen from the training inputs."""

from pyro_truncated.gp.subset.coregionalized import CoregionalizedGPRegression
from pyro_truncated.gp.subset.pyro_models import SubsetSparseGPRegression, SubsetVariationalGP
from pyro_truncated.gp.subset.regression import AllNoiseWarning, SubsetGPRegression, SubsetPredictor
from pyro_truncated.gp.subset.subset_search import ExchangeSearch, InducingSubset, RandomSearch, SubsetSearch

__all__ = [
    "AllNoiseWarning",
    "CoregionalizedGPRegression",
    "ExchangeSearch",
    "InducingSubset",
    "RandomSearch",
    "SubsetGPRegression",
    "SubsetPredictor",
    "SubsetSearch",
    "SubsetSparseGPRegression",
    "SubsetVariationalGP",
]
