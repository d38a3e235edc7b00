r"""Regression without inducing inputs, for data with a Cholesky factor in memory.

With :math:`S = K + \sigma^2 I` and :math:`a = S^{-1} Y` the objective, minus the log evidence without its constant, and its gradient are

.. math:: F = \tfrac12 \operatorname{tr}(Y^\top a) + \tfrac H2 \log |S|, \qquad dF = \tfrac12 \langle H S^{-1} - a a^\top, dS \rangle .
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.gp.cholesky import stable_cholesky
from pyro_truncated.gp.data_kernels import DataKernel
from pyro_truncated.gp.noisy_covariance import DenseCovariance
from pyro_truncated.gp.optimization import FitRecord, FitSettings, minimize
from pyro_truncated.gp.subset.objectives import Basis, backward_through, covariances_with, noise_from_log
from pyro_truncated.utils.console import note_once

# Measured, one core, eight inputs: fits of 3000, 4000 and 5000 data points took 32, 58 and 108 CPU seconds; the last process 1.1 GiB.
EXACT_UP_TO = 5000


def default_size(num_data: int) -> int:
    """Returns the default number of inducing inputs, and logs it.

    It is all data points while an exact regression is affordable.
    """
    if num_data <= EXACT_UP_TO:
        note_once(f"SubsetGPRegression is exact on up to {EXACT_UP_TO} data points; num_inducing=... makes it sparse, and faster")
        return num_data
    default = 512
    note_once(f"SubsetGPRegression takes up to {default} inducing inputs on more than {EXACT_UP_TO} data points; see num_inducing")
    return default


def exact_backward(kernel: DataKernel, targets: Tensor, log_noise: Tensor, weight: float = 1.0) -> float:
    """Adds the gradient of a weighted objective to all leaves.

    Covariances and noise depend on these leaves.

    Args:
        kernel: the kernel on the training inputs.
        targets: ``(n, H)`` float64.
        log_noise: unconstrained noise, see :func:`~pyro_truncated.gp.subset.objectives.noise_from_log`.
        weight: what the objective is multiplied by.
    """
    with torch.enable_grad():
        matrix = Basis(kernel, torch.arange(len(targets), device=targets.device)).square()
        covariance = matrix + torch.diag_embed(noise_from_log(log_noise).expand(len(matrix)))
    return evidence_backward(covariance, targets, weight)


def evidence_backward(covariance: Tensor, targets: Tensor, weight: float = 1.0) -> float:
    """Returns the weighted objective of targets ``(n, H)``.

    Its gradient goes through their covariances ``(n, n)``, noise included.

    Large matrices are changed in place: of 5000 data points each takes 0.2 GB.
    """
    with torch.no_grad():
        factor = stable_cholesky(covariance)
        a = torch.cholesky_solve(targets, factor)
        value = 0.5 * (targets * a).sum() + targets.shape[1] * factor.diagonal().log().sum()
        slope = torch.cholesky_inverse(factor).mul_(0.5 * weight * targets.shape[1]).addmm_(a, a.mT, alpha=-0.5 * weight)
        del factor
    backward_through([(covariance, slope)])
    return weight * float(value)


def fit_exactly(
    kernel: DataKernel, targets: Tensor, log_noise: Tensor, parameters: list[Tensor], settings: FitSettings, record: FitRecord
) -> float:
    """Learns kernel parameters and noise in place; returns the objective.

    See :func:`learn_exactly`.

    Args:
        kernel: the kernel on the training inputs.
        targets: ``(n, H)`` float64.
        log_noise: unconstrained noise parameter.
        parameters: the kernel's, and the noise.
        settings: most iterations of L-BFGS, least gain, and time.
        record: takes each improvement.
    """
    return learn_exactly(lambda weight: exact_backward(kernel, targets, log_noise, weight), len(targets), parameters, settings, record)


def learn_exactly(
    weighted: Callable[[float], float], size: int, parameters: list[Tensor], settings: FitSettings, record: FitRecord
) -> float:
    """Minimises an objective by L-BFGS, in place; returns the smallest value.

    Args:
        weighted: returns the objective times a weight, whose gradient it adds to the parameters.
        size: number of targets. The settings's gain is for each of them.
        parameters: what is learned.
        settings: most iterations, the gain below which they end, and the time.
        record: takes each improvement.

    Raises:
        ValueError: if the objective is not finite at the start.
    """
    found = minimize(
        lambda: weighted(1 / size),
        parameters,
        max_iterations=settings.max_epochs,
        tolerance=settings.tolerance,
        is_spent=lambda: settings.seconds_left() <= 0,
        on_better=lambda value: record.note("exact", size * value),
    )
    if not found.value < float("inf"):
        raise ValueError("the objective is not finite at the start: check the kernel, its parameters and the noise")
    return size * found.value


class ExactPosterior:
    """The posterior of a Gaussian process given all training data.

    Args:
        kernel: the kernel on the training inputs.
        targets: ``(n, H)`` float64.
        noise: noise variance.

    Attributes:
        fitted: means at the training inputs, ``(n, H)``.
    """

    @torch.no_grad()
    def __init__(self, kernel: DataKernel, targets: Tensor, noise: float) -> None:
        self.basis, self.targets = Basis(kernel, torch.arange(len(targets), device=targets.device)), targets
        self.covariance = DenseCovariance(self.basis.square(), torch.as_tensor(noise, dtype=targets.dtype, device=targets.device))
        self.weights = torch.cholesky_solve(targets, self.covariance.cholesky)
        self.fitted = targets - noise * self.weights

    def marginals(self, new: Any) -> tuple[Tensor, Tensor]:
        """Returns means ``(n_new, H)`` and variances ``(n_new,)`` of the function.

        They are without noise, and differentiable in numeric inputs.
        """
        cross, prior = covariances_with(self.basis, new)
        return cross @ self.weights, (prior - self._explain(cross).square().sum(0)).clamp(min=0.0)

    def joint(self, new: Any) -> tuple[Tensor, Tensor]:
        """Means ``(n_new, H)`` and covariances ``(n_new, n_new)`` of the function, differentiable in numeric inputs."""
        cross, _ = covariances_with(self.basis, new)
        explained = self._explain(cross)
        return cross @ self.weights, self.basis.kernel.among(new).double() - explained.mT @ explained

    def _explain(self, cross: Tensor) -> Tensor:
        found: Tensor = torch.linalg.solve_triangular(self.covariance.cholesky, cross.mT, upper=False)
        return found

    @torch.no_grad()
    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        """Returns means ``(n, H)`` and variances ``(n,)``, each given all others.

        Variances include the noise.
        """
        return self.covariance.leave_one_out(self.targets)
