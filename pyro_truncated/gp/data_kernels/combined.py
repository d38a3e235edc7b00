"""Kernels made of precomputed matrices and of other kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.gp.data_kernels.protocol import DataKernel, are_positions, positive_parameter
from pyro_truncated.utils.arguments import check_count, check_kinds, names_arguments
from pyro_truncated.utils.arrays import takes_arrays


class PrecomputedKernel(DataKernel):
    r"""A kernel given by its matrix: :math:`v K` with a learned variance :math:`v`.

    Example:
        >>> kernel = PrecomputedKernel(torch.eye(4), train=torch.tensor([0, 1, 2]))  # the fourth is for prediction
        >>> kernel.diag().shape
        torch.Size([3])

    Args:
        matrix: covariances ``(N, N)`` of all objects, training and new ones, symmetric.
        train: positions ``(n,)`` of the training inputs among the objects. Default: all. New inputs are positions as well.
        variance: :math:`v` to start from.
    """

    matrix: Tensor
    known: Tensor

    @names_arguments
    @takes_arrays
    def __init__(self, matrix: Tensor, train: Tensor | None = None, variance: float = 1.0) -> None:
        if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not bool(matrix.isfinite().all()):
            raise ValueError(f"matrix must be square and finite; got shape {tuple(matrix.shape)}")
        if not torch.allclose(matrix, matrix.mT, rtol=1e-4, atol=1e-6 * float(matrix.abs().max())):
            raise ValueError("matrix must be symmetric: it holds the covariances of all objects with all objects")
        train = torch.arange(len(matrix), device=matrix.device) if train is None else train
        super().__init__(len(train))
        self.register_buffer("matrix", matrix, persistent=False)
        self.register_buffer("known", train, persistent=False)
        self.variance: Tensor = positive_parameter(variance, matrix)

    def diag(self, rows: Tensor | None = None) -> Tensor:
        """Variances of the training inputs, ``(n,)``, or only those at ``rows``."""
        return self.diag_new(self.known if rows is None else self.known[rows])

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns covariances ``(n, b)`` with training inputs at positions ``index`` ``(b,)``.

        They are those of all training inputs, or those at ``rows``.
        """
        return self.cross(self.known if rows is None else self.known[rows], index)

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Returns covariances ``(n_new, b)`` of the objects at positions ``new``.

        They are those with the training inputs at positions ``index``.
        """
        found: Tensor = self.variance * self.matrix[self._positions(new)[:, None], self.known[index]]
        return found

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of the objects at positions ``new``."""
        found: Tensor = self.variance * self.matrix.diagonal()[self._positions(new)]
        return found

    def among(self, new: Any) -> Tensor:
        """Covariances ``(n_new, n_new)`` of the objects at positions ``new`` with each other."""
        position = self._positions(new)
        return torch.as_tensor(self.variance * self.matrix[position[:, None], position])

    def _positions(self, given: Any) -> Tensor:
        try:
            new: Tensor | None = torch.as_tensor(given, device=self.matrix.device)
        except (RuntimeError, TypeError, ValueError):
            new = None
        if new is None or not are_positions(new, len(self.matrix)):
            raise ValueError(
                f"train and new inputs must be vectors of positions from 0 to {len(self.matrix) - 1} among the objects of the matrix"
            )
        return new


class IdentityKernel(DataKernel):
    r""":math:`v\,\delta_{ij}` on the training inputs, none with new ones: noise.

    It is redundant beside the noise of a regression. It keeps the optimiser from explaining all
    data as noise before other kernels are learned (Cao et al., section 4.1.5).

    Example:
        >>> IdentityKernel(3, variance=0.5).diag()
        tensor([0.5000, 0.5000, 0.5000], grad_fn=<...>)

    Args:
        num_data: number of training inputs.
        variance: :math:`v` to start from.
        like: a tensor whose type and device to take.
    """

    @names_arguments
    def __init__(self, num_data: int, variance: float = 1.0, like: Tensor | None = None) -> None:
        super().__init__(check_count("num_data", num_data))
        self.variance: Tensor = positive_parameter(variance, torch.zeros(()) if like is None else like)

    def diag(self, rows: Tensor | None = None) -> Tensor:
        """Variances of the training inputs, ``(n,)``, or only those at ``rows``."""
        return self.variance.expand(self.num_data if rows is None else len(rows))

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns covariances ``(n, b)`` with training inputs at positions ``index`` ``(b,)``.

        They are those of all training inputs, or those at ``rows``.
        """
        rows = torch.arange(self.num_data, device=index.device) if rows is None else rows
        return self.variance * (rows[:, None] == index).to(self.variance.dtype)

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Zeros ``(n_new, b)``."""
        return self.variance.new_zeros(len(new), len(index))

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs."""
        return self.variance.expand(len(new))

    def among(self, new: Any) -> Tensor:
        """The variance ``(n_new, n_new)`` on the diagonal."""
        return torch.diag_embed(self.diag_new(new))


class SumKernel(DataKernel):
    r"""The sum of kernels on the same data: :math:`\sum_p k_p`.

    Each has its own parameters, such as a variance.

    Example:
        >>> words = spectrum(["CCO", "CCC", "NNN"], 1)
        >>> kernel = SumKernel([CountKernel(words), MinMaxKernel(words)], identity=True)
        >>> kernel.diag().shape
        torch.Size([3])

    Args:
        parts: the kernels.
        redundant_sum: adds one more variance that all parts share, :math:`w \sum_p k_p`. It keeps all of them alive until the useful ones
            are found (Cao et al., section 4.1.5).
        identity: adds an :class:`IdentityKernel`, see there.

    New inputs are handed to every part; a tuple of as many elements as there are parts is handed out one each.
    """

    @names_arguments
    def __init__(self, parts: Sequence[DataKernel], *, redundant_sum: bool = False, identity: bool = False) -> None:
        sizes = {part.num_data for part in parts}
        if len(sizes) != 1:
            raise ValueError(f"parts must be kernels on the same data; got {len(parts)} kernels on {sorted(sizes)} inputs")
        super().__init__(sizes.pop())
        self.parts = torch.nn.ModuleList(parts)
        like = next((p for part in parts for p in part.parameters()), torch.zeros(()))
        self.shared: Tensor | None = positive_parameter(1.0, like) if redundant_sum else None
        self.identity = IdentityKernel(self.num_data, like=like.detach()) if identity else None

    @property
    def relevance(self) -> Tensor:
        """Returns the mean variance ``(P,)`` of each part.

        It includes the shared weight, but nothing of :class:`IdentityKernel`.
        """
        with torch.no_grad():
            found: Tensor = self._scale * torch.stack([part.diag().mean() for part in self._kernels])
            return found

    @property
    def _kernels(self) -> list[DataKernel]:
        return [part for part in self.parts if isinstance(part, DataKernel)]

    def diag(self, rows: Tensor | None = None) -> Tensor:
        """Variances of the training inputs, ``(n,)``, or only those at ``rows``."""
        return self._sum(lambda part, _: part.diag(rows))

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns covariances ``(n, b)`` with training inputs at positions ``index`` ``(b,)``.

        They are those of all training inputs, or those at ``rows``.
        """
        return self._sum(lambda part, _: part.columns(index, rows))

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs with the training inputs at positions ``index``."""
        return self._sum(lambda part, x: part.cross(x, index), new)

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs."""
        return self._sum(lambda part, x: part.diag_new(x), new)

    def among(self, new: Any) -> Tensor:
        """Covariances ``(n_new, n_new)`` of new inputs with each other."""
        return self._sum(lambda part, x: part.among(x), new)

    @property
    def _scale(self) -> Any:
        return 1.0 if self.shared is None else 1 + self.shared

    def _sum(self, evaluate: Callable[[Any, Any], Tensor], new: Any = None) -> Tensor:
        each = new if isinstance(new, tuple) and len(new) == len(self.parts) else (new,) * len(self.parts)
        total: Tensor = sum(evaluate(part, x) for part, x in zip(self._kernels, each, strict=True))  # type: ignore[assignment]
        total = self._scale * total
        return total if self.identity is None else total + evaluate(self.identity, each[0])


class RescaledKernel(DataKernel):
    r""":math:`k(x_i, x_j) / (\sigma_i \sigma_j)`.

    It turns noise of variance :math:`\sigma_i^2` per data point into noise of variance one.

    Args:
        kernel: the kernel.
        deviations: :math:`\sigma`, ``(n,)``.
    """

    def __init__(self, kernel: DataKernel, deviations: Tensor) -> None:
        super().__init__(kernel.num_data)
        # Not a submodule: the kernel may already belong to a Pyro model.
        self._rescaled = (kernel,)
        self.register_buffer("deviations", deviations, persistent=False)

    @property
    def kernel(self) -> DataKernel:
        """The kernel that is rescaled."""
        return self._rescaled[0]

    def diag(self, rows: Tensor | None = None) -> Tensor:
        """Variances of the training inputs, ``(n,)``, or only those at ``rows``."""
        return self.kernel.diag(rows) / self._of(rows).square()

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns covariances ``(n, b)`` with training inputs at positions ``index`` ``(b,)``.

        They are those of all training inputs, or those at ``rows``.
        """
        found: Tensor = self.kernel.columns(index, rows) / (self._of(rows)[:, None] * self.deviations[index])
        return found

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Returns covariances ``(n_new, b)`` of new inputs, which are not rescaled.

        They are those with the training inputs at positions ``index``.
        """
        found: Tensor = self.kernel.cross(new, index) / self.deviations[index]
        return found

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs."""
        return self.kernel.diag_new(new)

    def among(self, new: Any) -> Tensor:
        """Covariances ``(n_new, n_new)`` of new inputs, which are not rescaled, with each other."""
        return self.kernel.among(new)

    def _of(self, rows: Tensor | None) -> Tensor:
        found: Tensor = self.deviations if rows is None else self.deviations[rows]
        return found


class RestrictedKernel(DataKernel):
    """A kernel on some of its training inputs.

    Regression on these alone is the method "subset of data".

    Example:
        >>> kernel = RestrictedKernel(smooth_rbf(torch.randn(10, 4)), torch.arange(5))
        >>> kernel.diag().shape
        torch.Size([5])

    Args:
        kernel: the kernel.
        rows: positions ``(n,)`` of the inputs to keep.
        borrowed: whether the kernel stays part of another module, which learns its parameters; otherwise they are this one's.

    Raises:
        TypeError: if the kernel is none, or rows are no tensor.
        ValueError: if rows are no positions of the kernel's inputs (of a borrowed kernel, only where they are used).
    """

    rows: Tensor

    @names_arguments
    def __init__(self, kernel: DataKernel, rows: Tensor, *, borrowed: bool = False) -> None:
        check_kinds(RestrictedKernel.__init__, kernel=kernel, rows=rows)
        num = kernel.num_data
        if not borrowed and not (are_positions(rows, num) and len(rows)):
            raise ValueError(f"rows must be positions (n,), integers from 0 to {num - 1}; got {rows.dtype} of shape {tuple(rows.shape)}")
        super().__init__(len(rows))
        self._lent = (kernel,)
        if not borrowed:
            self._own = kernel
        self.register_buffer("rows", rows, persistent=False)

    @property
    def kernel(self) -> DataKernel:
        """The kernel on all of its training inputs."""
        return self._lent[0]

    def diag(self, rows: Tensor | None = None) -> Tensor:
        """Variances of the inputs kept, ``(n,)``, or only those at ``rows``."""
        return self.kernel.diag(self.rows if rows is None else self.rows[rows])

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns covariances ``(n, b)`` with kept inputs at positions ``index``.

        They are those of all kept inputs, or those at ``rows``.
        """
        return self.kernel.columns(self.rows[index], self.rows if rows is None else self.rows[rows])

    def cross(self, new: object, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs with the inputs kept at positions ``index``."""
        return self.kernel.cross(new, self.rows[index])

    def diag_new(self, new: object) -> Tensor:
        """Variances ``(n_new,)`` of new inputs."""
        return self.kernel.diag_new(new)

    def among(self, new: object) -> Tensor:
        """Covariances ``(n_new, n_new)`` of new inputs with each other."""
        return self.kernel.among(new)
