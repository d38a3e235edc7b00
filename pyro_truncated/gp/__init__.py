"""Gaussian processes, pivoted Cholesky factors, and kernels under uncertain inputs."""

import warnings
from typing import Any

from pyro_truncated.gp.active_set_distributions import ActiveSetScaleWarning
from pyro_truncated.gp.active_sets import ActiveSet, Split, UniformSplits, linear_growth
from pyro_truncated.gp.cholesky import JitterWarning, PivotedCholesky, pivoted_cholesky
from pyro_truncated.gp.data_kernels.features import (
    CountKernel,
    FunctionKernel,
    Graphs,
    HashedCounts,
    HistogramIntersectionKernel,
    MinMaxKernel,
    shortest_path,
    spectrum,
    weisfeiler_lehman,
)
from pyro_truncated.gp.data_kernels.protocol import (
    DataKernel,
    GPyTorchKernel,
    IdentityKernel,
    PrecomputedKernel,
    PyroKernel,
    RestrictedKernel,
    SumKernel,
    as_data_kernel,
    smooth_rbf,
)
from pyro_truncated.gp.kernels import LinearARD
from pyro_truncated.gp.noisy_covariance import DenseCovariance, LowRankCovariance, NoisyCovariance
from pyro_truncated.gp.subset.coregionalized import CoregionalizedGPRegression
from pyro_truncated.gp.subset.leave_one_out import LeaveOneOutRegression
from pyro_truncated.gp.subset.pyro_models import StudentT, SubsetSparseGPRegression, SubsetVariationalGP
from pyro_truncated.gp.subset.regression import AllNoiseWarning, SubsetGPRegression, SubsetPredictor
from pyro_truncated.gp.subset.subset_search import ExchangeSearch, InducingSubset, RandomSearch, SubsetSearch
from pyro_truncated.gp.uncertain import Expectation, PsiStatistics, Quadrature, Sampling, SpikeSlabInputs, closed_form, psi_statistics

__all__ = [
    "ActiveSet",
    "ActiveSetScaleWarning",
    "AllNoiseWarning",
    "CoregionalizedGPRegression",
    "CountKernel",
    "DataKernel",
    "DenseCovariance",
    "ExchangeSearch",
    "Expectation",
    "FunctionKernel",
    "GPyTorchKernel",
    "Graphs",
    "HashedCounts",
    "HistogramIntersectionKernel",
    "IdentityKernel",
    "InducingSubset",
    "JitterWarning",
    "LeaveOneOutRegression",
    "LinearARD",
    "LowRankCovariance",
    "MinMaxKernel",
    "NoisyCovariance",
    "PivotedCholesky",
    "PrecomputedKernel",
    "PsiStatistics",
    "PyroKernel",
    "Quadrature",
    "RandomSearch",
    "RestrictedKernel",
    "Sampling",
    "SpikeSlabInputs",
    "Split",
    "StudentT",
    "SubsetGPRegression",
    "SubsetPredictor",
    "SubsetSearch",
    "SubsetSparseGPRegression",
    "SubsetVariationalGP",
    "SumKernel",
    "UniformSplits",
    "as_data_kernel",
    "closed_form",
    "linear_growth",
    "pivoted_cholesky",
    "psi_statistics",
    "shortest_path",
    "smooth_rbf",
    "spectrum",
    "weisfeiler_lehman",
]


def __getattr__(name: str) -> Any:
    if name == "growing":
        warnings.warn("gp.growing has a new name: use gp.linear_growth", DeprecationWarning, stacklevel=2)
        return linear_growth
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
