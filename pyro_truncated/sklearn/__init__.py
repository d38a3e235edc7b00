"""Estimators for scikit-learn, with posteriors.

They are sparse coding, mixtures, latent variable models and regression.
"""

from pyro_truncated.sklearn.dictionary_learning import SparseCoding
from pyro_truncated.sklearn.gaussian_processes import ActiveSetGPLVM, SpikeSlabGPLVMTransformer, SubsetGPRegressor
from pyro_truncated.sklearn.mixture_density import TruncatedMixture
from pyro_truncated.sklearn.variable_selection import SpikeSlabRegressor

__all__ = ["ActiveSetGPLVM", "SparseCoding", "SpikeSlabGPLVMTransformer", "SpikeSlabRegressor", "SubsetGPRegressor", "TruncatedMixture"]
