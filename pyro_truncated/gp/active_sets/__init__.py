"""Gaussian processes on stochastic active sets."""
