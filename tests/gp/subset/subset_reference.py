"""Dense reference computations of sparse regression, as its definition reads."""

from __future__ import annotations

import torch
from pyro.contrib.gp import kernels
from torch import Tensor

from pyro_truncated.gp import PyroKernel
from pyro_truncated.gp.subset.objectives import SubsetProblem


def nystrom(K: Tensor, index: Tensor) -> Tensor:
    return K[:, index] @ torch.linalg.solve(K[index][:, index], K[index])


def dense_objective(K: Tensor, Y: Tensor, noise: float, index: Tensor, objective: str = "vfe") -> float:
    approximate = nystrom(K, index)
    S = approximate + noise * torch.eye(len(K), dtype=K.dtype)
    value = (Y * torch.linalg.solve(S, Y)).sum() + Y.shape[1] * torch.logdet(S)
    if objective == "vfe":
        value = value + Y.shape[1] * (K.trace() - approximate.trace()) / noise
    return float(value / 2)


def toy(n: int = 120, H: int = 1, lengthscale: float = 1.0, seed: int = 0) -> tuple[PyroKernel, Tensor]:
    """A kernel on three-dimensional inputs in float64, and targets ``(n, H)``."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(n, H, generator=generator, dtype=torch.float64)
    Y = torch.stack([torch.sin(X.sum(1) + h) for h in range(H)], 1) + noise
    kernel = kernels.RBF(3, torch.tensor(1.2, dtype=torch.float64), torch.tensor(lengthscale, dtype=torch.float64))
    return PyroKernel(kernel, X), Y


def matrix(kernel: PyroKernel) -> Tensor:
    return kernel.columns(torch.arange(kernel.num_data)).detach()


def problem_and_index(
    objective: str = "vfe", H: int = 1, m: int = 20, n: int = 120, **kwargs: float
) -> tuple[SubsetProblem, Tensor, Tensor]:
    kernel, Y = toy(n, H, **kwargs)
    index = torch.randperm(n, generator=torch.Generator().manual_seed(1))[:m]
    return SubsetProblem(kernel, Y, 0.02, objective), index, matrix(kernel)
