"""L-BFGS that ends at the best parameters, and within a time limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated.gp.cholesky import NotPositiveDefiniteError


class Minimum(NamedTuple):
    """Where :func:`minimize` has ended.

    Attributes:
        value: the smallest value seen; NaN if the first one is.
        iterations: number of iterations begun.
    """

    value: float
    iterations: int


class OutOfTimeError(Exception):
    """Ends an optimiser in the middle of a line search."""


def snapshot(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies of tensors, such as parameters or the values of a ``state_dict()``."""
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def load_snapshot(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Gives tensors, in place, the values that :func:`snapshot` took."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def minimize(
    evaluate: Callable[[], float | Tensor],
    parameters: Sequence[Tensor],
    *,
    max_iterations: int = 10**9,
    max_evaluations: int | None = None,
    tolerance: float = 1e-9,
    gradient_tolerance: float = 1e-7,
    memory: int = 100,
    is_spent: Callable[[], bool] = lambda: False,
    on_better: Callable[[float], None] = lambda value: None,
) -> Minimum:
    """L-BFGS with strong Wolfe line searches that keeps the best parameters.

    Where there is no value (NaN, infinity, or a matrix that cannot be factorised) the line search meets a wall, far above and flat.

    Args:
        evaluate: returns the value and adds its gradient to the parameters.
        parameters: leaves, changed in place.
        max_iterations: most iterations.
        max_evaluations: most evaluations; default: a quarter more than iterations.
        tolerance: change of the value, or of all parameters, below which it ends.
        gradient_tolerance: largest entry of the gradient below which it ends.
        memory: number of steps whose curvature is remembered.
        is_spent: asked before each evaluation but the first whether to stop.
        on_better: called with each new best value.
    """
    if not parameters:
        return Minimum(float(evaluate()), 0)
    best, kept, count = math.inf, snapshot(parameters), 0
    limit = max_iterations * 5 // 4 if max_evaluations is None else max_evaluations
    optimizer = torch.optim.LBFGS(
        list(parameters), max_iter=min(max_iterations, limit), max_eval=limit, tolerance_change=tolerance,
        tolerance_grad=gradient_tolerance, history_size=memory, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> float:
        nonlocal best, kept, count
        if count and (is_spent() or (max_evaluations is not None and count >= max_evaluations)):
            raise OutOfTimeError
        count += 1
        optimizer.zero_grad()
        value = _value(evaluate)
        slopes = [p.grad for p in parameters if p.grad is not None]
        if not math.isfinite(value) or not all(bool(slope.isfinite().all()) for slope in slopes):
            optimizer.zero_grad()
            return best + 10 * (abs(best) + 1) if math.isfinite(best) else value
        for parameter in parameters:
            # Torch's L-BFGS flattens gradients as they lie in memory.
            parameter.grad = None if parameter.grad is None else parameter.grad.contiguous()
        if value < best:
            best, kept = value, snapshot(parameters)
            on_better(value)
        return value

    try:
        optimizer.step(closure)
    except OutOfTimeError:
        pass
    finally:
        load_snapshot(parameters, kept)
        optimizer.zero_grad()
    return Minimum(best if math.isfinite(best) else math.nan, int(optimizer.state[parameters[0]].get("n_iter", 0)))


def _value(evaluate: Callable[[], float | Tensor]) -> float:
    try:
        value = evaluate()
    except (NotPositiveDefiniteError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return math.nan
    return float(value.detach()) if isinstance(value, Tensor) else value
