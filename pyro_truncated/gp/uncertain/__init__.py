"""Kernels under inputs that are known up to a distribution."""
