"""Checks of covariance functions on a few inputs, and of numeric inputs."""

from __future__ import annotations

import copy

import torch
from pyro.contrib.gp import kernels
from torch import Tensor

from pyro_truncated.gp.data_kernels.protocol import DataKernel
from pyro_truncated.gp.kernels.evaluation import outside_of_programs

_MOST_INPUTS = 100
# Relative to the largest covariance; single precision loses most of its digits in differences of squares.
_TOLERANCE = {torch.float64: 1e-6}
_COARSE = 1e-3
# Kernels of distances add this to keep their roots differentiable: Pyro's exponential one differs from its own variance by 1e-6.
_OF_ROOTS = 1e-5


@torch.no_grad()
def check_data_kernel(kernel: DataKernel) -> None:
    """Looks at the covariances of up to 100 evenly spaced training inputs.

    Raises:
        ValueError: if they are not finite, not symmetric, have negative variances or others than ``diag`` says, or are not positive.
    """
    rows = torch.linspace(0, kernel.num_data - 1, min(kernel.num_data, _MOST_INPUTS), dtype=torch.float64, device=kernel.device).long()
    _check(type(kernel).__name__, kernel.columns(rows, rows), kernel.diag(rows), rows)


@torch.no_grad()
def check_kernel(kernel: kernels.Kernel, inputs: Tensor) -> None:
    """Checks covariances of the first inputs of ``(N, D)``, at most 100.

    See :func:`check_data_kernel`.
    """
    inputs = inputs.detach()[:_MOST_INPUTS]
    # A copy, outside of Pyro's parameter store: a kernel that was called could become part of no other module.
    with outside_of_programs():
        copied = copy.deepcopy(kernel)
        _check(type(kernel).__name__, copied(inputs), copied(inputs, diag=True), torch.arange(len(inputs)))


def are_positions(given: Tensor, num: int) -> bool:
    """Whether a tensor is a vector of integers from 0 to ``num - 1``."""
    is_integer = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
    return is_integer and given.dim() == 1 and bool(((given >= 0) & (given < num)).all())


def _check(name: str, block: Tensor, diagonal: Tensor, rows: Tensor) -> None:
    tolerance = _TOLERANCE.get(block.dtype, _COARSE)
    block, diagonal = block.detach().double(), diagonal.detach().double()
    finite = block.isfinite() & diagonal.isfinite()
    if not bool(finite.all()):
        first, second = (int(rows[k]) for k in (~finite).nonzero()[0])
        raise ValueError(f"{name} is not finite between inputs {first} and {second}")
    slack = tolerance * block.abs().max()
    asymmetry = (block - block.mT).abs()
    if bool((asymmetry > slack).any()):
        a, b = divmod(int(asymmetry.argmax()), len(rows))
        raise ValueError(
            f"{name} is not symmetric: k(x_{int(rows[a])}, x_{int(rows[b])}) = {float(block[a, b]):.6g}, "
            f"but k(x_{int(rows[b])}, x_{int(rows[a])}) = {float(block[b, a]):.6g}"
        )
    if bool((diagonal < 0).any()):
        a = int(diagonal.argmin())
        raise ValueError(f"{name} has a negative variance: k(x_{int(rows[a])}, x_{int(rows[a])}) = {float(diagonal[a]):.6g}")
    difference = (block.diagonal() - diagonal).abs()
    if bool((difference > max(tolerance, _OF_ROOTS) * block.abs().max()).any()):
        worst = int(difference.argmax())
        raise ValueError(
            f"{name} contradicts itself: the variance of input {int(rows[worst])} is {float(diagonal[worst]):.6g} by diag and "
            f"{float(block[worst, worst]):.6g} by columns"
        )
    eigenvalues = torch.linalg.eigvalsh(block)
    if bool(eigenvalues[0] < -tolerance * eigenvalues.abs().max()):
        raise ValueError(
            f"{name} is not positive semi-definite: the covariance matrix of {len(rows)} of its inputs has the eigenvalue "
            f"{float(eigenvalues[0]):.6g}, beside the largest, {float(eigenvalues[-1]):.6g}"
        )
