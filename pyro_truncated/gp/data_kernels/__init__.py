"""Kernels bound to a data set of numbers or other objects.

They may be counts, histograms, graphs, strings or anything that has covariances.
"""

from pyro_truncated.gp.data_kernels.combined import IdentityKernel, PrecomputedKernel, RescaledKernel, RestrictedKernel, SumKernel
from pyro_truncated.gp.data_kernels.features import CountKernel, HistogramIntersectionKernel, MinMaxKernel
from pyro_truncated.gp.data_kernels.fixed import FunctionKernel
from pyro_truncated.gp.data_kernels.graphs import Graphs, shortest_path, weisfeiler_lehman
from pyro_truncated.gp.data_kernels.hashed_counts import HashedCounts, spectrum
from pyro_truncated.gp.data_kernels.numeric import GPyTorchKernel, InputKernel, PyroKernel, bound_kernel, smooth_rbf
from pyro_truncated.gp.data_kernels.protocol import DataKernel, KernelColumns, ProtocolKernel, as_data_kernel, positive_parameter

__all__ = [
    "CountKernel",
    "DataKernel",
    "FunctionKernel",
    "GPyTorchKernel",
    "Graphs",
    "HashedCounts",
    "HistogramIntersectionKernel",
    "IdentityKernel",
    "InputKernel",
    "KernelColumns",
    "MinMaxKernel",
    "PrecomputedKernel",
    "ProtocolKernel",
    "PyroKernel",
    "RescaledKernel",
    "RestrictedKernel",
    "SumKernel",
    "as_data_kernel",
    "bound_kernel",
    "positive_parameter",
    "shortest_path",
    "smooth_rbf",
    "spectrum",
    "weisfeiler_lehman",
]
