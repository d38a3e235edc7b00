"""Sparse Gaussian processes whose inducing inputs are chosen from the training inputs."""
