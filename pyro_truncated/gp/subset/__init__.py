"""Sparse Gaussian processes whose inducing inputs are chosen from the training inputs."""

from pyro_truncated.gp.subset.baselines import (
    GreedyVarianceSearch,
    InformativeVectorSearch,
    KMeansSearch,
    RandomSearch,
    TitsiasSearch,
)
from pyro_truncated.gp.subset.cholqr import CholQRSearch
from pyro_truncated.gp.subset.exchange import ExchangeSearch
from pyro_truncated.gp.subset.inducing_subset import InducingSubset
from pyro_truncated.gp.subset.regression import AllNoiseWarning, SubsetGPRegression
from pyro_truncated.gp.subset.search import SubsetSearch
from pyro_truncated.gp.subset.sparse_model import StudentT, SubsetSparseGPRegression, SubsetVariationalGP

__all__ = [
    "AllNoiseWarning",
    "CholQRSearch",
    "ExchangeSearch",
    "GreedyVarianceSearch",
    "InducingSubset",
    "InformativeVectorSearch",
    "KMeansSearch",
    "RandomSearch",
    "StudentT",
    "SubsetGPRegression",
    "SubsetSearch",
    "SubsetSparseGPRegression",
    "SubsetVariationalGP",
    "TitsiasSearch",
]
