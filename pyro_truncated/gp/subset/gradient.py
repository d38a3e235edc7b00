r"""Objectives of sparse regression as functions of hyper-parameters and inducing inputs, with gradients in closed form.

With the inducing inputs' columns :math:`K_{nI} = L C^\top`, :math:`P = L C^{-1}`, :math:`S = L L^\top + \sigma^2 I`, :math:`a = S^{-1} Y`
and :math:`W = H S^{-1} - a a^\top - [\text{VFE}] H I / \sigma^2`, the gradient of the objective is

.. math:: dF = \langle W P, dK_{nI} \rangle - \tfrac12 \langle P^\top W P, dK_{II} \rangle
    + [\text{VFE}] \tfrac{H}{2 \sigma^2} \operatorname{tr} dK ,

so that only the kernel itself is differentiated automatically, a block of rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_truncated.gp.data_kernels import DataKernel, InputKernel
from pyro_truncated.gp.noisy_covariance import LowRankCovariance
from pyro_truncated.gp.subset.objective import SubsetProblem, independent_cholesky

# Noise below this share of the targets' variance is rounding error.
NOISE_FLOOR = 1e-6
_CHUNK = 2**24


class Basis:
    """Inducing inputs from the training inputs: covariances with them.

    Args:
        kernel: the kernel.
        index: their positions ``(m,)``.
    """

    def __init__(self, kernel: DataKernel, index: Tensor) -> None:
        self.kernel = kernel
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def columns(self, rows: Tensor | None = None) -> Tensor:
        """Covariances ``(n, m)`` of the training inputs, or those at ``rows``, in float64."""
        return self.kernel.columns(self.index, rows).double()

    def square(self) -> Tensor:
        """Covariances ``(m, m)`` of the inducing inputs, in float64."""
        return self.kernel.columns(self.index, self.index).double()

    def cross(self, new: Any) -> Tensor:
        """Covariances ``(n_new, m)`` of new inputs, in float64."""
        return self.kernel.cross(new, self.index).double()


class FreeBasis(Basis):
    """Inducing inputs anywhere in the input space.

    Args:
        kernel: a kernel of numeric inputs.
        inputs: the inducing inputs ``(m, D)``.
    """

    kernel: InputKernel

    def __init__(self, kernel: InputKernel, inputs: Tensor) -> None:
        self.kernel = kernel
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def columns(self, rows: Tensor | None = None) -> Tensor:
        """Covariances ``(n, m)`` of the training inputs, or those at ``rows``, in float64."""
        points = self.kernel.inputs if rows is None else self.kernel.inputs[rows]
        return self.kernel.between(points, self.inputs).double()

    def square(self) -> Tensor:
        """Covariances ``(m, m)`` of the inducing inputs, in float64."""
        return self.kernel.between(self.inputs, self.inputs).double()

    def cross(self, new: Any) -> Tensor:
        """Covariances ``(n_new, m)`` of new inputs, in float64."""
        return self.kernel.between(new.to(self.kernel.inputs), self.inputs).double()


def noise_of(log_noise: Tensor) -> Tensor:
    """Noise variance of an unconstrained parameter."""
    return NOISE_FLOOR + log_noise.exp()


def backward(basis: Basis, targets: Tensor, log_noise: Tensor, objective: str) -> float:
    """The objective, whose gradient is added to all leaves that covariances and noise depend on.

    Args:
        basis: inducing inputs.
        targets: ``(n, H)`` float64.
        log_noise: unconstrained noise parameter, see :func:`noise_of`.
        objective: ``"vfe"``, ``"pp"`` or ``"fitc"``, the last as minus the log likelihood without its constant.

    Returns:
        The objective; NaN, and no gradient, if the inducing inputs' covariance matrix has no factor.
    """
    if objective == "fitc":
        return _fitc_backward(basis, targets, log_noise)
    return _closed_form_backward(basis, targets, log_noise, objective)


def _fitc_backward(basis: Basis, targets: Tensor, log_noise: Tensor) -> float:
    with torch.enable_grad():
        columns, square = basis.columns(), basis.square()
        # Which inputs depend on others is no differentiable question; the factor of the rest is one.
        kept, _ = independent_cholesky(square.detach())
        triangle, info = torch.linalg.cholesky_ex(square[kept][:, kept])
        if not len(kept) or int(info):
            return math.nan
        factor = torch.linalg.solve_triangular(triangle, columns[:, kept].mT, upper=False).mT
        missing = (basis.kernel.diag().double() - factor.square().sum(1)).clamp(min=0.0)
        covariance = LowRankCovariance(factor, noise_of(log_noise) + missing)
        value = -covariance.log_likelihood(targets) - 0.5 * targets.numel() * math.log(2 * math.pi)
        value.backward()
    return float(value.detach())


def _closed_form_backward(basis: Basis, targets: Tensor, log_noise: Tensor, objective: str) -> float:
    with torch.enable_grad():
        square, noise = basis.square(), noise_of(log_noise)
        blocks = list(_blocks(len(targets), len(basis)))
        # One block keeps its graph; several are evaluated twice to save memory.
        first = basis.columns() if len(blocks) == 1 else None
        diagonal = basis.kernel.diag().double()
    with torch.no_grad():
        columns = torch.cat([basis.columns(rows) for rows in blocks]) if first is None else first.detach()
        problem = SubsetProblem(basis.kernel, targets, float(noise), objective)
        terms = _gradient_terms(problem, columns, square.detach(), diagonal.detach().sum())
    if terms is None:
        return math.nan
    with torch.enable_grad():
        fixed = (terms.square * square).sum() + 0.5 * problem.trace_weight * diagonal.sum() + terms.noise * noise
        _backward([(fixed, None)] if first is None else [(fixed, None), (first, terms.columns)])
        for rows in blocks if first is None else ():
            _backward([(basis.columns(rows), terms.columns[rows])])
    return terms.value


def _backward(outputs: list[tuple[Tensor, Tensor | None]]) -> None:
    """Differentiates outputs with their gradients, but for those that depend on nothing that is learned (a frozen kernel)."""
    learned = [(output, gradient) for output, gradient in outputs if output.requires_grad]
    if learned:
        torch.autograd.backward([output for output, _ in learned], [gradient for _, gradient in learned])


class _Terms(NamedTuple):
    value: float
    columns: Tensor
    square: Tensor
    noise: float


def _gradient_terms(problem: SubsetProblem, columns: Tensor, square: Tensor, trace: Tensor) -> _Terms | None:
    """The objective, and its derivatives in the inducing inputs' columns and square and in the noise."""
    Y, s2, H, n = problem.targets, problem.noise, problem.num_outputs, problem.num_data
    kept, C = independent_cholesky(square)
    if not len(kept):
        return None
    whole = len(kept) == len(square)
    L = torch.linalg.solve_triangular(C, (columns if whole else columns[:, kept]).mT, upper=False).mT
    gram = L.mT @ L
    if not bool(gram.isfinite().all()):
        return None
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    R, info = torch.linalg.cholesky_ex(gram + s2 * identity)
    if int(info):
        return None
    whitened = torch.linalg.solve_triangular(R, L.mT @ Y, upper=False)
    residual = trace - gram.diagonal().sum()
    value = problem.value_from(R, whitened, residual)
    B_inverse = torch.cholesky_inverse(R)
    weights = torch.linalg.solve_triangular(R.mT, whitened, upper=True)
    a = (Y - L @ weights) / s2
    C_inverse = torch.linalg.solve_triangular(C, identity, upper=False)
    inner = (H * B_inverse - problem.trace_weight * identity) @ C_inverse
    projected = weights.mT @ C_inverse
    for_columns = (L @ inner).addmm_(a, projected, alpha=-1)
    for_square = -0.5 * C_inverse.mT @ (gram @ inner - weights @ projected)
    d_noise = 0.5 * (
        H * ((n - len(gram)) / s2 + B_inverse.diagonal().sum()) - a.square().sum() - problem.trace_weight * residual.clamp(min=0.0) / s2
    )
    if not whole:
        for_columns = torch.zeros_like(columns).index_copy_(1, kept, for_columns)
        padded = torch.zeros_like(square)
        padded[kept[:, None], kept] = for_square
        for_square = padded
    return _Terms(float(value), for_columns, for_square, float(d_noise))


def _blocks(n: int, m: int) -> Iterator[Tensor]:
    yield from torch.arange(n).split(max(1, _CHUNK // max(1, m)))


class OutOfTimeError(Exception):
    """Ends an optimiser in the middle of a line search."""


def minimize(
    evaluate: Callable[[], float],
    parameters: Sequence[Tensor],
    max_evaluations: int,
    is_spent: Callable[[], bool] = lambda: False,
    on_better: Callable[[float], None] = lambda value: None,
) -> float:
    """L-BFGS that ends at the best parameters it has seen.

    Args:
        evaluate: returns the value and adds its gradient to the parameters; NaN where there is none.
        parameters: leaves, changed in place.
        max_evaluations: most evaluations.
        is_spent: asked before each evaluation but the first whether to stop.
        on_better: called with each new best value.

    Returns:
        The smallest value seen; the parameters are those it was seen at. NaN if the first one is.
    """
    if not parameters:
        return evaluate()
    best, kept, count = math.inf, [p.detach().clone() for p in parameters], 0
    optimizer = torch.optim.LBFGS(list(parameters), max_iter=max_evaluations, max_eval=max_evaluations, line_search_fn="strong_wolfe")

    def closure() -> float:
        nonlocal best, kept, count
        if count >= max_evaluations or (count and is_spent()):
            raise OutOfTimeError
        count += 1
        optimizer.zero_grad()
        value = evaluate()
        slopes = [p.grad for p in parameters if p.grad is not None]
        if not math.isfinite(value) or not all(bool(slope.isfinite().all()) for slope in slopes):
            # A wall for the line search: far above, and flat.
            optimizer.zero_grad()
            return best + 10 * (abs(best) + 1) if math.isfinite(best) else value
        if value < best:
            best, kept = value, [p.detach().clone() for p in parameters]
            on_better(value)
        return value

    try:
        optimizer.step(closure)
    except OutOfTimeError:
        pass
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
        optimizer.zero_grad()
    return best if math.isfinite(best) else math.nan
