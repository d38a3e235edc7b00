"""Kernels compiled for the CPU, called through the functions of the same name in :mod:`pyro_truncated.ops`."""
