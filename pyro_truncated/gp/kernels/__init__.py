"""Covariance functions: the linear one, and the search for hyper-parameters."""
