"""Kernels bound to a data set.

The selection of an inducing subset asks for their covariances.

Inputs may be anything: numbers, strings, graphs, rows of a precomputed matrix. Only covariances are
needed, neither the inputs nor derivatives in them.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol, runtime_checkable

import torch
from pyro.contrib.gp import kernels
from pyro.contrib.gp.parameterized import Parameterized
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor

from pyro_truncated.gp.kernels.evaluation import outside_programs
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.parameter_store import UniqueModule


@runtime_checkable
class KernelColumns(Protocol):
    """The least that a kernel offers; :func:`as_data_kernel` makes a :class:`DataKernel` of it."""

    def diag(self) -> Tensor:
        """Variances ``(n,)`` of the data."""
        ...

    def columns(self, index: Tensor) -> Tensor:
        """Covariances ``(n, b)`` of all data with the data at positions ``index`` ``(b,)``."""
        ...

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs with the data at positions ``index``."""
        ...


class DataKernel(UniqueModule, Parameterized):
    """A covariance function on ``n`` training inputs that it holds itself.

    Its parameters are those of a module of :mod:`pyro.contrib.gp`, constrained by ``PyroParam``. A
    prior makes them random inside a Pyro model. Covariances are differentiable in them.

    Example:
        >>> kernel = smooth_rbf(torch.randn(10, 2))
        >>> isinstance(kernel, DataKernel), kernel.num_data
        (True, 10)
        >>> torch.allclose(kernel.columns(torch.tensor([3]))[3], kernel.diag()[3])
        True

    Attributes:
        num_data: number of training inputs ``n``.
    """

    def __init__(self, num_data: int) -> None:
        super().__init__()
        if num_data < 1:
            raise ValueError(
                "a kernel needs at least one training input (inputs, histograms, features, objects or rows of a matrix); got none"
            )
        self.num_data = num_data

    def diag(self, rows: Tensor | None = None) -> Tensor:
        """Variances of the training inputs, ``(n,)``, or only those at ``rows``."""
        raise NotImplementedError

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns covariances ``(n, b)`` with training inputs at positions ``index`` ``(b,)``.

        They are those of all training inputs, or those at ``rows``.
        """
        raise NotImplementedError

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs with the training inputs at positions ``index``."""
        raise NotImplementedError

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs."""
        raise NotImplementedError

    def among(self, new: Any) -> Tensor:
        """Returns covariances ``(n_new, n_new)`` of new inputs with each other.

        Joint predictions need them.

        Raises:
            TypeError: if the kernel does not offer them.
        """
        raise TypeError(f"{type(self).__name__} has no method among(new) -> (n_new, n_new), which joint predictions need")

    @property
    def device(self) -> torch.device:
        """Where its numbers live."""
        for tensor in (*self.parameters(), *self.buffers()):
            return torch.device(tensor.device)
        return torch.device("cpu")


class ProtocolKernel(DataKernel):
    """An object with :class:`KernelColumns`, fixed but for a variance.

    Its ``diag_new`` is used if it has one.

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
        diagonal = self._there(self.source.diag())
        return self.variance * (diagonal if rows is None else diagonal[rows])

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns covariances ``(n, b)`` with training inputs at positions ``index`` ``(b,)``.

        They are those of all training inputs, or those at ``rows``.
        """
        found = self._there(self.source.columns(index))
        return self.variance * (found if rows is None else found[rows])

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs with the training inputs at positions ``index``."""
        return self.variance * self._there(self.source.cross(new, index))

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs.

        Raises:
            TypeError: if the object has no ``diag_new``.
        """
        variances = getattr(self.source, "diag_new", None)
        if variances is None:
            raise TypeError(f"{type(self.source).__name__} needs a method diag_new(new) -> (n_new,) to predict variances at new inputs")
        found: Tensor = self.variance * self._there(variances(new))
        return found

    def among(self, new: Any) -> Tensor:
        """Covariances ``(n_new, n_new)`` of new inputs with each other.

        Raises:
            TypeError: if the object has no ``among``.
        """
        covariances = getattr(self.source, "among", None)
        return super().among(new) if covariances is None else self.variance * self._there(covariances(new))

    def _there(self, values: Tensor) -> Tensor:
        """Values where the variance lives: objects need not know of a device."""
        return values.to(self.variance.device)


@names_arguments
def as_data_kernel(kernel: Any) -> DataKernel:
    """Returns the kernel itself, or a :class:`ProtocolKernel` around an object.

    The object has ``diag()``, ``columns(index)`` and ``cross(new, index)``.

    Example:
        >>> class Common:
        ...     def __init__(self, words):
        ...         self.words = [set(word) for word in words]
        ...     def diag(self):
        ...         return torch.ones(len(self.words))
        ...     def columns(self, index):
        ...         return self.cross(self.words, index)
        ...     def cross(self, new, index):
        ...         old = [self.words[i] for i in index.tolist()]
        ...         return torch.tensor([[len(set(a) & b) / len(set(a) | b) for b in old] for a in new])
        >>> as_data_kernel(Common(["ab", "bc", "cd"])).num_data
        3

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


def positive_parameter(value: float, like: Tensor, name: str = "variance") -> Any:
    """Returns a positive scalar parameter with a tensor's type and device.

    For integers the type is float32.
    """
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    if not value > 0:
        raise ValueError(f"{name} must be positive; got {value}")
    return PyroParam(torch.tensor(value, dtype=dtype, device=like.device), constraints.positive)


@torch.no_grad()
def check_data_kernel(kernel: DataKernel) -> None:
    """Looks at the covariances of up to 100 evenly spaced training inputs.

    Raises:
        ValueError: if they are not finite, not symmetric, have negative variances or others than ``diag`` says, or are not positive.
    """
    rows = torch.linspace(0, kernel.num_data - 1, min(kernel.num_data, 100), dtype=torch.float64, device=kernel.device).long()
    _check(type(kernel).__name__, kernel.columns(rows, rows), kernel.diag(rows), rows)


@torch.no_grad()
def check_kernel(kernel: kernels.Kernel, inputs: Tensor) -> None:
    """Checks covariances of the first inputs of ``(N, D)``, at most 100.

    See :func:`check_data_kernel`.
    """
    inputs = inputs.detach()[:100]
    # A copy, outside of Pyro's parameter store: a kernel that was called could become part of no other module.
    with outside_programs():
        copied = copy.deepcopy(kernel)
        _check(type(kernel).__name__, copied(inputs), copied(inputs, diag=True), torch.arange(len(inputs)))


def are_positions(given: Tensor, num: int) -> bool:
    """Whether a tensor is a vector of integers from 0 to ``num - 1``."""
    is_integer = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
    return is_integer and given.dim() == 1 and bool(((given >= 0) & (given < num)).all())


def _check(name: str, block: Tensor, diagonal: Tensor, rows: Tensor) -> None:
    # Relative to the largest covariance; single precision loses most of its digits in differences of squares.
    tolerance = 1e-6 if block.dtype == torch.float64 else 1e-3
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
    # Kernels of distances add a little to keep their roots differentiable: Pyro's exponential one differs from its own variance by 1e-6.
    if bool((difference > max(tolerance, 1e-5) * block.abs().max()).any()):
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
