"""Gaussian processes: regression with leave-one-out predictions, pivoted Cholesky factors, and kernels under uncertain inputs."""

from pyro_truncated.gp.active_set import ActiveSet, JitterWarning
from pyro_truncated.gp.inputs import Expectation, Quadrature, Sampling, SpikeSlabInputs
from pyro_truncated.gp.kernels import LinearARD
from pyro_truncated.gp.leave_one_out import DenseCovariance, LowRankCovariance, NoisyCovariance, StreamingRegression
from pyro_truncated.gp.pivoted_cholesky import PivotedCholesky, pivoted_cholesky
from pyro_truncated.gp.psi_statistics import PsiStatistics, closed_form, psi_statistics
from pyro_truncated.gp.regression import LeaveOneOutRegression
from pyro_truncated.gp.splits import ChosenSplits, Split, StratifiedSplits, UniformSplits, growing

__all__ = [
    "ActiveSet",
    "ChosenSplits",
    "DenseCovariance",
    "Expectation",
    "JitterWarning",
    "LeaveOneOutRegression",
    "LinearARD",
    "LowRankCovariance",
    "NoisyCovariance",
    "PivotedCholesky",
    "PsiStatistics",
    "Quadrature",
    "Sampling",
    "SpikeSlabInputs",
    "Split",
    "StratifiedSplits",
    "StreamingRegression",
    "UniformSplits",
    "closed_form",
    "growing",
    "pivoted_cholesky",
    "psi_statistics",
]
