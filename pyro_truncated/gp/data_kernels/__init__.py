"""Kernels bound to a data set of numbers or other objects."""
