"""Gaussian process regression: pivoted Cholesky factors and leave-one-out predictions."""

from pyro_truncated.gp.leave_one_out import DenseCovariance, LowRankCovariance, NoisyCovariance, StreamingRegression
from pyro_truncated.gp.pivoted_cholesky import PivotedCholesky, pivoted_cholesky
from pyro_truncated.gp.regression import LeaveOneOutRegression

__all__ = [
    "DenseCovariance",
    "LeaveOneOutRegression",
    "LowRankCovariance",
    "NoisyCovariance",
    "PivotedCholesky",
    "StreamingRegression",
    "pivoted_cholesky",
]
