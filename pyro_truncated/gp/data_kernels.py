"""Kernels bound to a data set: what the selection of an inducing subset asks of a covariance function.

Inputs may be anything (numbers, strings, graphs, rows of a precomputed matrix): only covariances are ever asked for, never the inputs
and never a derivative in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import pyro
import torch
from pyro import poutine
from pyro.contrib.gp import kernels
from pyro.contrib.gp.parameterized import Parameterized
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor


@runtime_checkable
class KernelColumns(Protocol):
    """The least a kernel has to offer; :func:`as_data_kernel` makes a :class:`DataKernel` of it."""

    def diag(self) -> Tensor:
        """Variances ``(n,)`` of the data."""
        ...

    def columns(self, index: Tensor) -> Tensor:
        """Covariances ``(n, b)`` of all data with the data at positions ``index`` ``(b,)``."""
        ...

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs with the data at positions ``index``."""
        ...


class DataKernel(Parameterized):
    """A covariance function on ``n`` training inputs that it holds itself.

    Its parameters are those of a module of :mod:`pyro.contrib.gp` (constrained by ``PyroParam``; a prior makes them random inside a Pyro
    model), and covariances are differentiable in them.

    Attributes:
        num_data: number of training inputs ``n``.
    """

    def __init__(self, num_data: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if num_data < 1:
            raise ValueError("a kernel needs at least one training input; got none")
        self.num_data = num_data

    def diag(self, rows: Tensor | None = None) -> Tensor:
        """Variances of the training inputs, ``(n,)``, or only those at ``rows``."""
        raise NotImplementedError

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Covariances ``(n, b)`` of the training inputs, or those at ``rows``, with the ones at positions ``index`` ``(b,)``."""
        raise NotImplementedError

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs with the training inputs at positions ``index``."""
        raise NotImplementedError

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where its numbers live."""
        for tensor in (*self.parameters(), *self.buffers()):
            return torch.device(tensor.device)
        return torch.device("cpu")


class InputKernel(DataKernel):
    """A kernel of numeric inputs ``(n, D)``; it also gives covariances of arbitrary points, which :class:`SubsetGPRegression` can polish.

    Args:
        inputs: training inputs ``(n, D)`` or ``(n,)``, finite.
    """

    inputs: Tensor

    def __init__(self, inputs: Tensor) -> None:
        if not isinstance(inputs, Tensor) or inputs.dim() not in (1, 2) or not inputs.is_floating_point():
            raise TypeError(f"inputs must be a floating point tensor of shape (n, D) or (n,); got {_describe(inputs)}")
        if not bool(inputs.isfinite().all()):
            raise ValueError("inputs must be finite; they hold NaN or infinity")
        super().__init__(len(inputs))
        self.register_buffer("inputs", inputs, persistent=False)

    def between(self, first: Tensor, second: Tensor) -> Tensor:
        """Covariances ``(a, b)`` of points ``(a, D)`` and ``(b, D)``, differentiable in both."""
        raise NotImplementedError

    def variances(self, points: Tensor) -> Tensor:
        """Variances ``(a,)`` of points ``(a, D)``."""
        raise NotImplementedError

    def diag(self, rows: Tensor | None = None) -> Tensor:
        """Variances of the training inputs, ``(n,)``, or only those at ``rows``."""
        return self.variances(self.inputs if rows is None else self.inputs[rows])

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Covariances ``(n, b)`` of the training inputs, or those at ``rows``, with the ones at positions ``index`` ``(b,)``."""
        return self.between(self.inputs if rows is None else self.inputs[rows], self.inputs[index])

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs ``(n_new, D)`` with the training inputs at positions ``index``."""
        return self.between(self._points(new), self.inputs[index])

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs ``(n_new, D)``."""
        return self.variances(self._points(new))

    def _points(self, new: Any) -> Tensor:
        if not isinstance(new, Tensor) or new.shape[1:] != self.inputs.shape[1:]:
            raise ValueError(f"new inputs must have shape {('n_new', *self.inputs.shape[1:])}; got {_describe(new)}")
        return new.to(self.inputs)


class PyroKernel(InputKernel):
    """A kernel of :mod:`pyro.contrib.gp.kernels` on training inputs.

    Outside of Pyro models its parameters are those the module holds: whatever lies in Pyro's parameter store under names such as
    ``"variance"`` neither changes them nor is changed.

    Args:
        kernel: the kernel; used, not copied.
        inputs: training inputs ``(n, D)``.
    """

    def __init__(self, kernel: kernels.Kernel, inputs: Tensor) -> None:
        if not isinstance(kernel, kernels.Kernel):
            raise TypeError(f"kernel must be one of pyro.contrib.gp.kernels; got {type(kernel).__name__}")
        super().__init__(inputs)
        self.kernel = kernel

    def between(self, first: Tensor, second: Tensor) -> Tensor:
        """Covariances ``(a, b)`` of points ``(a, D)`` and ``(b, D)``, differentiable in both."""
        return self._evaluate(first, second)

    def variances(self, points: Tensor) -> Tensor:
        """Variances ``(a,)`` of points ``(a, D)``."""
        return self._evaluate(points, diag=True)

    def _evaluate(self, *points: Tensor, diag: bool = False) -> Tensor:
        if poutine.runtime.am_i_wrapped():
            # Inside a model: parameters may be random, and belong to the store.
            found: Tensor = self.kernel(*points, diag=diag)
            return found
        with poutine.block(), pyro.get_param_store().scope():
            isolated: Tensor = self.kernel(*points, diag=diag)
        return isolated


class GPyTorchKernel(InputKernel):
    """A GPyTorch kernel on training inputs. It is only ever called, so GPyTorch need not be installed to import this.

    Args:
        kernel: a ``gpytorch.kernels.Kernel`` without batch dimensions; used, not copied.
        inputs: training inputs ``(n, D)``.
    """

    def __init__(self, kernel: torch.nn.Module, inputs: Tensor) -> None:
        if not isinstance(kernel, torch.nn.Module):
            raise TypeError(f"kernel must be a GPyTorch kernel; got {type(kernel).__name__}")
        super().__init__(inputs)
        self.kernel = kernel

    def between(self, first: Tensor, second: Tensor) -> Tensor:
        """Covariances ``(a, b)`` of points ``(a, D)`` and ``(b, D)``, differentiable in both."""
        found: Tensor = self.kernel(first, second).to_dense()
        return found

    def variances(self, points: Tensor) -> Tensor:
        """Variances ``(a,)`` of points ``(a, D)``."""
        found: Tensor = self.kernel(points, diag=True)
        return found


class PrecomputedKernel(DataKernel):
    r"""A kernel given by its matrix: :math:`v K` with a learned variance :math:`v`.

    Args:
        matrix: covariances ``(N, N)`` of all objects, training and new ones, symmetric.
        train: positions ``(n,)`` of the training inputs among the objects; default: all. New inputs are positions as well.
        variance: :math:`v` to start from.
    """

    matrix: Tensor
    known: Tensor

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
        """Covariances ``(n, b)`` of the training inputs, or those at ``rows``, with the ones at positions ``index`` ``(b,)``."""
        return self.cross(self.known if rows is None else self.known[rows], index)

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of the objects at positions ``new`` with the training inputs at positions ``index``."""
        return self.variance * self.matrix[new[:, None], self.known[index]]

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of the objects at positions ``new``."""
        return self.variance * self.matrix.diagonal()[new]


class IdentityKernel(DataKernel):
    r""":math:`v\,\delta_{ij}` on the training inputs, none with new ones: noise by another name.

    Redundant beside the noise of a regression, it keeps the optimiser from explaining all data as noise before any other kernel had
    a chance (Cao et al., section 4.1.5).

    Args:
        num_data: number of training inputs.
        variance: :math:`v` to start from.
        like: a tensor whose type and device to take.
    """

    def __init__(self, num_data: int, variance: float = 1.0, like: Tensor | None = None) -> None:
        super().__init__(num_data)
        self.variance: Tensor = positive_parameter(variance, torch.zeros(()) if like is None else like)

    def diag(self, rows: Tensor | None = None) -> Tensor:
        """Variances of the training inputs, ``(n,)``, or only those at ``rows``."""
        return self.variance.expand(self.num_data if rows is None else len(rows))

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Covariances ``(n, b)`` of the training inputs, or those at ``rows``, with the ones at positions ``index`` ``(b,)``."""
        rows = torch.arange(self.num_data, device=index.device) if rows is None else rows
        return self.variance * (rows[:, None] == index).to(self.variance.dtype)

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Zeros ``(n_new, b)``."""
        return self.variance.new_zeros(len(new), len(index))

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs."""
        return self.variance.expand(len(new))


class SumKernel(DataKernel):
    r"""The sum of kernels on the same data, each with parameters (a variance, say) of its own: :math:`\sum_p k_p`.

    Args:
        parts: the kernels.
        redundant_sum: adds one more variance that all parts share, :math:`w \sum_p k_p`. It keeps all of them alive until the useful ones
            are found (Cao et al., section 4.1.5).
        identity: adds an :class:`IdentityKernel`, see there.

    New inputs are handed to every part; a tuple of as many elements as there are parts is handed out one each.
    """

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
        """Mean variance ``(P,)`` that each part contributes, the shared weight included; what :class:`IdentityKernel` adds is not."""
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
        """Covariances ``(n, b)`` of the training inputs, or those at ``rows``, with the ones at positions ``index`` ``(b,)``."""
        return self._sum(lambda part, _: part.columns(index, rows))

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs with the training inputs at positions ``index``."""
        return self._sum(lambda part, x: part.cross(x, index), new)

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs."""
        return self._sum(lambda part, x: part.diag_new(x), new)

    @property
    def _scale(self) -> Any:
        return 1.0 if self.shared is None else 1 + self.shared

    def _sum(self, evaluate: Callable[[Any, Any], Tensor], new: Any = None) -> Tensor:
        each = new if isinstance(new, tuple) and len(new) == len(self.parts) else (new,) * len(self.parts)
        total: Tensor = sum(evaluate(part, x) for part, x in zip(self._kernels, each, strict=True))  # type: ignore[assignment]
        total = self._scale * total
        return total if self.identity is None else total + evaluate(self.identity, each[0])


class ProtocolKernel(DataKernel):
    """Any object with :class:`KernelColumns`, fixed but for a variance; ``diag_new`` is taken from the object where it has one.

    Args:
        columns: the object.
    """

    def __init__(self, columns: KernelColumns) -> None:
        diagonal = columns.diag()
        super().__init__(len(diagonal))
        self.source = columns
        self.variance: Tensor = positive_parameter(1.0, diagonal)

    def diag(self, rows: Tensor | None = None) -> Tensor:
        """Variances of the training inputs, ``(n,)``, or only those at ``rows``."""
        diagonal = self.source.diag()
        return self.variance * (diagonal if rows is None else diagonal[rows])

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Covariances ``(n, b)`` of the training inputs, or those at ``rows``, with the ones at positions ``index`` ``(b,)``."""
        found = self.source.columns(index)
        return self.variance * (found if rows is None else found[rows])

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs with the training inputs at positions ``index``."""
        return self.variance * self.source.cross(new, index)

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs.

        Raises:
            TypeError: if the object has no ``diag_new``.
        """
        variances = getattr(self.source, "diag_new", None)
        if variances is None:
            raise TypeError(f"{type(self.source).__name__} needs a method diag_new(new) -> (n_new,) to predict variances at new inputs")
        found: Tensor = self.variance * variances(new)
        return found


class RescaledKernel(DataKernel):
    r""":math:`k(x_i, x_j) / (\sigma_i \sigma_j)`: turns noise of variance :math:`\sigma_i^2` per data point into noise of variance one.

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
        """Covariances ``(n, b)`` of the training inputs, or those at ``rows``, with the ones at positions ``index`` ``(b,)``."""
        found: Tensor = self.kernel.columns(index, rows) / (self._of(rows)[:, None] * self.deviations[index])
        return found

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs, which are not rescaled, with the training inputs at positions ``index``."""
        found: Tensor = self.kernel.cross(new, index) / self.deviations[index]
        return found

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs."""
        return self.kernel.diag_new(new)

    def _of(self, rows: Tensor | None) -> Tensor:
        found: Tensor = self.deviations if rows is None else self.deviations[rows]
        return found


def as_data_kernel(kernel: Any) -> DataKernel:
    """The kernel itself, or a :class:`ProtocolKernel` around an object with ``diag()``, ``columns(index)`` and ``cross(new, index)``.

    Raises:
        TypeError: for anything else, kernels without data included.
    """
    if isinstance(kernel, DataKernel):
        return kernel
    if isinstance(kernel, kernels.Kernel):
        raise TypeError("kernel has no data yet: give PyroKernel(kernel, inputs)")
    if isinstance(kernel, KernelColumns):
        return ProtocolKernel(kernel)
    raise TypeError(f"kernel must be a DataKernel or have diag(), columns(index) and cross(new, index); got {type(kernel).__name__}")


def positive_parameter(value: float, like: Tensor) -> Any:
    """A positive scalar parameter of the type and device of a tensor (float32 if it holds integers)."""
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    if not value > 0:
        raise ValueError(f"a variance must be positive; got {value}")
    return PyroParam(torch.tensor(value, dtype=dtype, device=like.device), constraints.positive)


def _describe(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def smooth_rbf(inputs: Tensor) -> PyroKernel:
    r"""A squared exponential kernel with one length-scale per dimension, all starting at :math:`2 \sqrt D`, for standardised inputs.

    Args:
        inputs: training inputs ``(n, D)``.
    """
    points = inputs if inputs.dim() == 2 else inputs[:, None]
    dim = points.shape[1]
    return PyroKernel(kernels.RBF(dim, points.new_ones(()), points.new_full((dim,), 2 * dim**0.5)), points)
