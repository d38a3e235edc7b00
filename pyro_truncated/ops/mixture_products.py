"""Products over dimensions of a Gaussian bump beside a constant."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend, gradient, save_with_context


def mixture_products(
    height: Tensor, center: Tensor, rate: Tensor, share: Tensor, point: Tensor, decay: Tensor, base: Tensor, *, sum_rows: bool = False
) -> Tensor:
    r"""Returns products over dimensions of bumps beside a column's constants.

    .. math:: r_{np} = \prod_q \left[ a_{nq} \exp\left(-c_{nq} (m_{nq} - x_{qp})^2 - d_{qp}\right) + h_{nq} b_{qp} \right]

    ``height`` :math:`a`, ``center`` :math:`m`, ``rate`` :math:`c` and ``share`` :math:`h` are ``(N, Q)``; ``point`` :math:`x`, ``decay``
    :math:`d` and ``base`` :math:`b` are ``(Q, P)``. The result is ``(N, P)``, or ``(P,)`` if ``sum_rows`` over rows.

    Differentiable once in every argument, without dividing by a factor. On the CPU it is computed in float64 with memory for the result
    only, elsewhere in blocks. A dimension without a constant part (:math:`h_{nq} = 0` for all rows) costs an eighth of one with it.
    """
    rows, columns = (height, center, rate, share), (point, decay, base)
    if height.dim() != 2 or point.dim() != 2 or any(f.shape != height.shape for f in rows) or any(f.shape != point.shape for f in columns):
        shapes = ", ".join(str(tuple(f.shape)) for f in (*rows, *columns))
        raise ValueError(f"mixture_products needs four factors (N, Q) and three (Q, P); got {shapes}")
    if height.shape[1] != point.shape[0]:
        raise ValueError(f"rows and columns must have the same number of dimensions; got {height.shape[1]} and {point.shape[0]}")
    num_sharp = 0
    if height.is_cpu:
        # One exponential serves all dimensions without a constant part: bring them to the front.
        is_sharp = ((share == 0) & (height > 0)).all(0)
        num_sharp = int(is_sharp.sum())
        if 0 < num_sharp < len(is_sharp):
            order = (~is_sharp).long().argsort(stable=True)
            rows, columns = tuple(f[:, order] for f in rows), tuple(f[order] for f in columns)  # type: ignore[assignment]
    return _MixtureProducts.apply(num_sharp, sum_rows, *rows, *columns)  # type: ignore[no-untyped-call]


class _MixtureProducts(torch.autograd.Function):
    """Products over dimensions, see :func:`mixture_products`."""

    @staticmethod
    def forward(ctx: Any, num_sharp: int, sum_rows: bool, *factors: Tensor) -> Tensor:
        """Returns products ``(N, P)``, or ``(P,)`` if summed over rows."""
        save_with_context(ctx, *factors)
        ctx.num_sharp = num_sharp
        return backend("mixture_products", factors[0]).products(factors, num_sharp, sum_rows).to(factors[0].dtype)

    @staticmethod
    @gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Gradients of all factors, without dividing by one."""
        factors = ctx.saved_tensors
        return None, None, *backend("mixture_products", grad).gradients(factors, ctx.num_sharp, grad)
