"""Gaussian processes: regression with leave-one-out predictions, pivoted Cholesky factors, and kernels under uncertain inputs."""

from pyro_truncated.gp.active_set import ActiveSet, JitterWarning
from pyro_truncated.gp.cholqr import CholQRSearch
from pyro_truncated.gp.data_kernels import (
    DataKernel,
    GPyTorchKernel,
    IdentityKernel,
    PrecomputedKernel,
    PyroKernel,
    SumKernel,
    as_data_kernel,
    smooth_rbf,
)
from pyro_truncated.gp.exchange import ExchangeSearch
from pyro_truncated.gp.feature_kernels import CountKernel, FunctionKernel, HistogramIntersectionKernel, MinMaxKernel
from pyro_truncated.gp.graph_kernels import Graphs, shortest_path, weisfeiler_lehman
from pyro_truncated.gp.hashed_counts import HashedCounts
from pyro_truncated.gp.inducing_subset import InducingSubset
from pyro_truncated.gp.inputs import Expectation, Quadrature, Sampling, SpikeSlabInputs
from pyro_truncated.gp.kernels import LinearARD
from pyro_truncated.gp.leave_one_out import DenseCovariance, LowRankCovariance, NoisyCovariance, StreamingRegression
from pyro_truncated.gp.pivoted_cholesky import PivotedCholesky, pivoted_cholesky
from pyro_truncated.gp.psi_statistics import PsiStatistics, closed_form, psi_statistics
from pyro_truncated.gp.regression import LeaveOneOutRegression
from pyro_truncated.gp.splits import ChosenSplits, Split, StratifiedSplits, UniformSplits, growing
from pyro_truncated.gp.string_kernels import spectrum
from pyro_truncated.gp.subset_baselines import (
    GreedyVarianceSearch,
    InformativeVectorSearch,
    KMeansSearch,
    RandomSearch,
    RestrictedKernel,
    TitsiasSearch,
)
from pyro_truncated.gp.subset_models import StudentT, SubsetSparseGPRegression, SubsetVariationalGP
from pyro_truncated.gp.subset_regression import AllNoiseWarning, SubsetGPRegression
from pyro_truncated.gp.subset_search import SubsetSearch

__all__ = [
    "ActiveSet",
    "AllNoiseWarning",
    "CholQRSearch",
    "ChosenSplits",
    "CountKernel",
    "DataKernel",
    "DenseCovariance",
    "ExchangeSearch",
    "Expectation",
    "FunctionKernel",
    "GPyTorchKernel",
    "Graphs",
    "GreedyVarianceSearch",
    "HashedCounts",
    "HistogramIntersectionKernel",
    "IdentityKernel",
    "InducingSubset",
    "InformativeVectorSearch",
    "JitterWarning",
    "KMeansSearch",
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
    "StratifiedSplits",
    "StreamingRegression",
    "StudentT",
    "SubsetGPRegression",
    "SubsetSearch",
    "SubsetSparseGPRegression",
    "SubsetVariationalGP",
    "SumKernel",
    "TitsiasSearch",
    "UniformSplits",
    "as_data_kernel",
    "closed_form",
    "growing",
    "pivoted_cholesky",
    "psi_statistics",
    "shortest_path",
    "smooth_rbf",
    "spectrum",
    "weisfeiler_lehman",
]
