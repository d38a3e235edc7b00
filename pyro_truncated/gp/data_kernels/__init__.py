"""Kernels bound to a data set of numbers or other objects.

They may be counts, histograms, graphs, strings or anything that has covariances.
"""

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
    InputKernel,
    KernelColumns,
    PrecomputedKernel,
    ProtocolKernel,
    PyroKernel,
    RescaledKernel,
    RestrictedKernel,
    SumKernel,
    as_data_kernel,
    bound_kernel,
    positive_parameter,
    smooth_rbf,
)

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
