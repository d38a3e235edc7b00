"""Triton kernels for GPUs: each does one function of :mod:`~pyro_truncated.ops.vectorised`."""
