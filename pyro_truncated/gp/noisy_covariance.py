r"""Leave-one-out predictions of regressions whose outputs share one covariance matrix.

The outputs :math:`r_p \sim \mathcal N(0, C)` are the columns of the targets :math:`R` ``(N, P)``, with :math:`C = K + \lambda I`. Leaving
out one data point takes no refits:

.. math:: \hat R_n = R_n - [C^{-1} R]_n / [C^{-1}]_{nn}, \qquad v_n = 1 / [C^{-1}]_{nn}

are the mean and the variance of its predictive distribution, noise included (Rasmussen and Williams, "Gaussian Processes for Machine
Learning", 2006, equations 5.10 to 5.12).
"""

from __future__ import annotations

import abc
import functools
import math

import torch
from torch import Tensor

from pyro_truncated.gp.cholesky import NotPositiveDefiniteError, stable_cholesky
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import takes_arrays

# What is left of one where a data point, or a column, explains itself alone is zero but for rounding.
SMALLEST_SHARE = 1e-12


class NoisyCovariance(abc.ABC):
    """The covariance matrix ``C`` of noisy observations, factored for solving.

    Example:
        >>> covariance: NoisyCovariance = DenseCovariance(torch.eye(2), torch.tensor(1.0))
        >>> mean, precision = covariance.leave_one_out(torch.ones(2, 1))
        >>> mean.flatten()
        tensor([0., 0.])

    Attributes:
        num_data: number of data points ``N``.
    """

    num_data: int

    @property
    @abc.abstractmethod
    def log_determinant(self) -> Tensor:
        r"""Log determinant :math:`\log |C|`, a scalar."""

    @property
    @abc.abstractmethod
    def inverse_diagonal(self) -> Tensor:
        """Diagonal of the inverse, :math:`(C^{-1})_{nn}`, ``(N,)``."""

    @abc.abstractmethod
    def solve(self, targets: Tensor, rows: Tensor | None = None) -> Tensor:
        r""":math:`C^{-1} R`, ``(N, P)``, or only the given rows of it."""

    @abc.abstractmethod
    def quadratic(self, targets: Tensor) -> Tensor:
        r"""Returns :math:`\operatorname{tr}(R^\top C^{-1} R)` of targets ``(N, D)``, a scalar."""

    @takes_arrays
    def leave_one_out(self, targets: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        r"""Predictions of every data point's targets from those of all others.

        Args:
            targets: :math:`R`, ``(N, P)``.
            rows: positions ``(n,)`` of the data points to predict. Default: all.

        Returns:
            Means ``(n, P)``, and the variances ``(n,)`` that all outputs share, noise included.
        """
        self._check(targets)
        index = slice(None) if rows is None else rows
        diagonal = self.inverse_diagonal[index]
        return targets[index] - self.solve(targets, rows) / diagonal.unsqueeze(-1), 1 / diagonal

    @takes_arrays
    def log_likelihood(self, targets: Tensor, num_outputs: int | None = None) -> Tensor:
        r"""Log density of all outputs, :math:`-\frac12\operatorname{tr}(R^\top C^{-1} R) - \frac P2\log|C| - \frac{NP}2\log 2\pi`.

        Args:
            targets: :math:`R`, ``(N, P)``, or any matrix of equal :math:`R R^\top`, see :func:`compress`.
            num_outputs: number of outputs ``P``. Default: that of the columns.
        """
        self._check(targets)
        outputs = targets.shape[1] if num_outputs is None else num_outputs
        constant = len(targets) * math.log(2 * math.pi)
        return -0.5 * (self.quadratic(targets) + outputs * (self.log_determinant + constant))

    def _check(self, targets: Tensor) -> None:
        if targets.dim() < 2 or targets.shape[-2] != self.num_data:
            raise ValueError(
                f"targets must have shape ({self.num_data}, P), a row for each row of factor or kernel_matrix; got {tuple(targets.shape)}"
            )


class DenseCovariance(NoisyCovariance):
    r"""An exact covariance :math:`C = K + \lambda I`: :math:`O(N^3)`, then :math:`O(N^2 P)`.

    Example:
        >>> DenseCovariance(torch.eye(2), torch.tensor(1.0)).solve(torch.ones(2, 1))  # C = 2 I
        tensor([[0.5000],
                [0.5000]])

    Args:
        kernel_matrix: :math:`K`, ``(N, N)``.
        noise: noise variance :math:`\lambda`, a scalar, or one per data point ``(N,)``.

    Raises:
        ValueError: if the kernel matrix is not square.
        NotPositiveDefiniteError: if the sum of both is no covariance matrix, or not finite.
    """

    @names_arguments
    @takes_arrays
    def __init__(self, kernel_matrix: Tensor, noise: Tensor | float) -> None:
        if kernel_matrix.dim() != 2 or kernel_matrix.shape[0] != kernel_matrix.shape[1]:
            raise ValueError(f"kernel_matrix must have shape (N, N); got {tuple(kernel_matrix.shape)}")
        self.num_data, noise = len(kernel_matrix), _on(kernel_matrix, noise)
        matrix = kernel_matrix + torch.diag_embed(noise.expand(len(kernel_matrix)))
        self.cholesky = _factorise(matrix, noise, kernel_matrix=kernel_matrix)

    @property
    def log_determinant(self) -> Tensor:
        r"""Log determinant :math:`\log |C|`, a scalar."""
        return 2 * self.cholesky.diagonal().log().sum()

    @functools.cached_property
    def inverse(self) -> Tensor:
        r""":math:`C^{-1}`, ``(N, N)``."""
        return torch.cholesky_inverse(self.cholesky)

    @property
    def inverse_diagonal(self) -> Tensor:
        """Diagonal of the inverse, :math:`(C^{-1})_{nn}`, ``(N,)``."""
        return self.inverse.diagonal()

    def solve(self, targets: Tensor, rows: Tensor | None = None) -> Tensor:
        r""":math:`C^{-1} R`, ``(N, P)``, or the given rows, by the stored inverse."""
        return (self.inverse if rows is None else self.inverse[rows]) @ targets

    def quadratic(self, targets: Tensor) -> Tensor:
        r""":math:`\operatorname{tr}(R^\top C^{-1} R)`, without the inverse."""
        return torch.linalg.solve_triangular(self.cholesky, targets, upper=False).square().sum()


class LowRankCovariance(NoisyCovariance):
    r"""A covariance matrix :math:`C = L L^\top + \Lambda` with ``Q`` columns in :math:`L`.

    It takes :math:`O(N Q^2)` once, then :math:`O(N Q P)`, by Woodbury's identity.

    Example:
        >>> LowRankCovariance(torch.ones(3, 1), torch.tensor(1.0)).solve(torch.ones(3, 1)).flatten()  # C = 1 1' + I
        tensor([0.2500, 0.2500, 0.2500])

    Args:
        factor: :math:`L`, ``(N, Q)``.
        noise: diagonal of :math:`\Lambda`: a scalar :math:`\lambda`, or one value per data point ``(N,)``. With :math:`\lambda` plus the
            diagonal of :math:`K - L L^\top` it is the FITC approximation, which keeps the prior variances exact.

    Raises:
        TypeError: if the factor is complex.
        NotPositiveDefiniteError: if the noise is not positive, or a number is not finite.
    """

    @names_arguments
    @takes_arrays
    def __init__(self, factor: Tensor, noise: Tensor | float) -> None:
        if factor.is_complex():
            raise TypeError(f"factor must be real; got {factor.dtype}")
        self.factor, self.num_data, noise = factor, len(factor), _on(factor, noise)
        self.noise = noise.expand(len(factor))
        scaled = factor / self.noise.sqrt().unsqueeze(-1)
        identity = torch.eye(factor.shape[1], dtype=factor.dtype, device=factor.device)
        self.cholesky = _factorise(identity + scaled.mT @ scaled, noise, factor=factor)
        self.basis = torch.linalg.solve_triangular(self.cholesky, scaled.mT, upper=False)

    @property
    def log_determinant(self) -> Tensor:
        r"""Log determinant :math:`\log |C|`, a scalar."""
        return self.noise.log().sum() + 2 * self.cholesky.diagonal().log().sum()

    @property
    def inverse_diagonal(self) -> Tensor:
        """Diagonal of the inverse, :math:`(C^{-1})_{nn}`, ``(N,)``."""
        return (1 - self.basis.square().sum(0)).clamp(min=SMALLEST_SHARE) / self.noise

    def solve(self, targets: Tensor, rows: Tensor | None = None) -> Tensor:
        r""":math:`C^{-1} R`, ``(N, P)``, or only the given rows of it."""
        self._check(targets)
        index = slice(None) if rows is None else rows
        scale = self.noise.sqrt().unsqueeze(-1)
        scaled = targets / scale
        return (scaled[index] - self.basis[:, index].mT @ (self.basis @ scaled)) / scale[index]

    def quadratic(self, targets: Tensor) -> Tensor:
        r"""Returns :math:`\operatorname{tr}(R^\top C^{-1} R)` of targets ``(N, D)``, a scalar."""
        self._check(targets)
        scaled = targets / self.noise.sqrt().unsqueeze(-1)
        return scaled.square().sum() - (self.basis @ scaled).square().sum()


def compress(targets: Tensor) -> Tensor:
    r"""A matrix with the same :math:`R R^\top` as targets, and ``N`` columns."""
    if targets.shape[1] <= targets.shape[0]:
        return targets
    return torch.linalg.qr(targets.mT, mode="r").R.mT


def varying_columns(targets: Tensor) -> Tensor:
    """Which outputs ``(N, P)`` are not constant, in whatever units: ``(P,)``."""
    # Squares of very large or small numbers are infinite or zero.
    scaled = targets / targets.abs().max().clamp(min=torch.finfo(targets.dtype).tiny)
    variance = scaled.var(0, correction=0)
    # Below these shares of the largest variance and of its own mean square, the variance of an output is rounding.
    return (variance > 1e-8 * variance.max()) & (variance > 1e-14 * scaled.square().mean(0))


def _on(matrix: Tensor, noise: Tensor | float) -> Tensor:
    """Returns the noise as a tensor; a number takes a matrix's type."""
    return noise if isinstance(noise, Tensor) else matrix.new_tensor(noise)


def _factorise(matrix: Tensor, noise: Tensor, **parts: Tensor) -> Tensor:
    """A matrix's Cholesky factor, or an error about its inputs."""
    try:
        return stable_cholesky(matrix)
    except NotPositiveDefiniteError as error:
        states = ", ".join(f"{name} {'is' if bool(part.isfinite().all()) else 'is not'} finite" for name, part in parts.items())
        least, most = noise.detach().aminmax()
        raise NotPositiveDefiniteError(f"{error}; {states}, noise, which must be positive, is from {least:g} to {most:g}") from error
