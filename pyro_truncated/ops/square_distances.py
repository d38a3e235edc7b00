"""Square distances from means of components, in units of covariances."""

from __future__ import annotations

import contextlib

from torch import Tensor

from pyro_truncated.ops.backend import are_differentiated, backend, use_backend

# In more dimensions products of matrices are faster.
_MAX_COMPILED_DIMENSIONS = 32


def square_distances(rows: Tensor, row: Tensor, component: Tensor, loc: Tensor, whitening: Tensor) -> Tensor:
    r"""Returns square lengths :math:`|W_k^\top (x_n - \mu_k)|^2` of pairs of data points and components.

    They are differentiable in all numbers.

    Example:
        >>> from pyro_truncated.ops.square_distances import square_distances
        >>> rows, means, whitening = torch.tensor([[3.0, 4.0]]), torch.zeros(2, 2), torch.stack([torch.eye(2), 2 * torch.eye(2)])
        >>> square_distances(rows, torch.tensor([0, 0]), torch.tensor([0, 1]), means, whitening)
        tensor([ 25., 100.])

    Args:
        rows: data :math:`x`, ``(N, D)``.
        row: which data points, numbers below ``N``, ``(E,)``.
        component: of which components, numbers below ``K``, ``(E,)``.
        loc: means :math:`\mu`, ``(K, D)``, in the type of the data.
        whitening: matrices :math:`W`, ``(K, D, D)``, in the same.

    Returns:
        ``(E,)``.
    """
    with (
        use_backend("vectorised")
        if are_differentiated(rows, loc, whitening) or rows.shape[1] > _MAX_COMPILED_DIMENSIONS
        else contextlib.nullcontext()
    ):
        found: Tensor = backend("square_distances", rows).square_distances(rows, row, component, loc, whitening)
    return found
