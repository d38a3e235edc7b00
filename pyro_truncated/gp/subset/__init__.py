"""Sparse Gaussian processes whose inducing inputs are chosen from the training inputs."""

from pyro_truncated.gp.subset.all_noise import AllNoiseWarning
from pyro_truncated.gp.subset.cholqr import CholQRSearch
from pyro_truncated.gp.subset.coregionalized import CoregionalizedGPRegression
from pyro_truncated.gp.subset.exchange import ExchangeSearch
from pyro_truncated.gp.subset.inducing_subset import InducingSubset
from pyro_truncated.gp.subset.regression import SubsetGPRegression
from pyro_truncated.gp.subset.saved_regression import SubsetPredictor
from pyro_truncated.gp.subset.sparse_regression import SubsetSparseGPRegression
from pyro_truncated.gp.subset.subset_search import SubsetSearch
from pyro_truncated.gp.subset.variational import SubsetVariationalGP

__all__ = [
    "AllNoiseWarning",
    "CholQRSearch",
    "CoregionalizedGPRegression",
    "ExchangeSearch",
    "InducingSubset",
    "SubsetGPRegression",
    "SubsetPredictor",
    "SubsetSearch",
    "SubsetSparseGPRegression",
    "SubsetVariationalGP",
]
