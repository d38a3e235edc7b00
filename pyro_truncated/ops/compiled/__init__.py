"""Kernels compiled for the CPU.

Functions of the same name in :mod:`pyro_truncated.ops` call them.
"""
