"""Models to start from, each in one file, written as a user would write them."""

from pyro_truncated.models.binary_sparse_coding import BinarySparseCoding
from pyro_truncated.models.noisy_or import NoisyOr

__all__ = ["BinarySparseCoding", "NoisyOr"]
