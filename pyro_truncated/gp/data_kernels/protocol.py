"""Kernels bound to a data set of anything that has covariances."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from pyro.contrib.gp import kernels
from pyro.contrib.gp.parameterized import Parameterized
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor

from pyro_truncated.gp.kernels import evaluate, outside_programs, refuse_foreign_kernel
from pyro_truncated.utils.arguments import check_count, check_kinds, describe, names_arguments
from pyro_truncated.utils.arrays import as_data, as_tensors, check_column_names, check_units, remember_columns, takes_arrays
from pyro_truncated.utils.devices import module_device
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

    Its parameters are those of a module of :mod:`pyro.contrib.gp`, and covariances are differentiable in them.

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
        """Covariances ``(n, b)`` with inputs at ``index``, of all or ``rows``."""
        raise NotImplementedError

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs with the training inputs at positions ``index``."""
        raise NotImplementedError

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs."""
        raise NotImplementedError

    def among(self, new: Any) -> Tensor:
        """Covariances ``(n_new, n_new)`` of new inputs, for joint predictions.

        Raises:
            TypeError: if the kernel does not offer them.
        """
        raise TypeError(f"{type(self).__name__} has no method among(new) -> (n_new, n_new), which joint predictions need")

    @property
    def device(self) -> torch.device:
        """The device of the kernel's tensors; the CPU if it has none."""
        return module_device(self)


class ProtocolKernel(DataKernel):
    """An object with :class:`KernelColumns`, fixed but for a variance."""

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
        """Covariances ``(n, b)`` with inputs at ``index``, of all or ``rows``."""
        block = self._there(self.source.columns(index))
        return self.variance * (block if rows is None else block[rows])

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs with the training inputs at positions ``index``."""
        return self.variance * self._there(self.source.cross(new, index))

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs."""
        variances = getattr(self.source, "diag_new", None)
        if variances is None:
            raise TypeError(f"{type(self.source).__name__} needs a method diag_new(new) -> (n_new,) to predict variances at new inputs")
        return self.variance * self._there(variances(new))

    def among(self, new: Any) -> Tensor:
        """Covariances ``(n_new, n_new)`` of new inputs with each other."""
        covariances = getattr(self.source, "among", None)
        return super().among(new) if covariances is None else self.variance * self._there(covariances(new))

    def _there(self, values: Tensor) -> Tensor:
        """Values where the variance lives: objects need not know of a device."""
        return values.to(self.variance.device)


@names_arguments
def as_data_kernel(kernel: Any) -> DataKernel:
    """Returns the kernel itself, or a :class:`ProtocolKernel` around an object.

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
    """A positive scalar parameter with a tensor's type (or float32) and device."""
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    if not value > 0:
        raise ValueError(f"{name} must be positive; got {value}")
    return PyroParam(torch.tensor(value, dtype=dtype, device=like.device), constraints.positive)


@torch.no_grad()
def check_data_kernel(kernel: DataKernel) -> None:
    """Looks at the covariances of up to 100 evenly spaced training inputs."""
    rows = torch.linspace(0, kernel.num_data - 1, min(kernel.num_data, 100), dtype=torch.float64, device=kernel.device).long()
    _check(type(kernel).__name__, kernel.columns(rows, rows), kernel.diag(rows), rows)


@torch.no_grad()
def check_kernel(kernel: kernels.Kernel, inputs: Tensor) -> None:
    """Checks covariances of the first 100 inputs, as :func:`check_data_kernel`."""
    inputs = inputs.detach()[:100]
    _check_columns(kernel, inputs)
    # A copy, outside of Pyro's parameter store: a kernel that was called could become part of no other module.
    with outside_programs():
        copied = copy.deepcopy(kernel)
        _check(type(kernel).__name__, copied(inputs), copied(inputs, diag=True), torch.arange(len(inputs)))


def _check_columns(kernel: kernels.Kernel, inputs: Tensor) -> None:
    """Refuses kernels of columns that inputs ``(n, D)`` lack, unwarped."""
    if any(isinstance(part, kernels.Warping) for part in kernel.modules()):
        return
    number = 1 if inputs.dim() == 1 else inputs.shape[1]
    if max(kernel.active_dims, default=0) >= number:
        raise ValueError(f"kernel must be of inputs with {number} columns; it reads column {max(kernel.active_dims)}")


def check_positions(name: str, index: Any, num: int, device: torch.device | None = None) -> Tensor:
    """A vector of integers from 0 to ``num - 1``, or an error."""
    expected = f"{name} must be positions (n,), integers from 0 to {num - 1}"
    try:
        positions: Tensor = torch.as_tensor(index, device=device)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"{expected}; got {type(index).__name__}") from None
    if positions.dim() != 1 or positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ValueError(f"{expected}; got {positions.dtype} of shape {tuple(positions.shape)}")
    if bool(((positions < 0) | (positions >= num)).any()):
        raise ValueError(f"{expected}; got {int(positions.min())} .. {int(positions.max())}")
    return positions


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
            f"{name} must be positive semi-definite; got eigenvalues from {float(eigenvalues[0]):.6g} to {float(eigenvalues[-1]):.6g} "
            f"for the covariance matrix of {len(rows)} inputs"
        )


class PairwiseKernel(DataKernel):
    """A function of two points, bound to training inputs.

    Attributes:
        inputs: the training inputs, in the form in which :meth:`between` takes points.
    """

    inputs: Any

    def between(self, first: Any, second: Any) -> Tensor:
        """Covariances ``(a, b)`` of points."""
        raise NotImplementedError

    def variances(self, points: Any) -> Tensor:
        """Variances ``(a,)`` of points."""
        raise NotImplementedError

    def points(self, new: Any) -> Any:
        """New inputs in the form of the training inputs, checked."""
        return new

    def take(self, rows: Tensor | None) -> Any:
        """The training inputs, or those at ``rows``."""
        return self.inputs if rows is None else self.inputs[rows]

    def diag(self, rows: Tensor | None = None) -> Tensor:
        """Variances of the training inputs, ``(n,)``, or only those at ``rows``."""
        return self.variances(self.take(rows))

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Covariances ``(n, b)`` with inputs at ``index``, of all or ``rows``."""
        return self.between(self.take(rows), self.take(index))

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs with the training inputs at positions ``index``."""
        return self.between(self.points(new), self.take(index))

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs."""
        return self.variances(self.points(new))

    def among(self, new: Any) -> Tensor:
        """Covariances ``(n_new, n_new)`` of new inputs with each other."""
        points = self.points(new)
        return self.between(points, points)


class PrecomputedKernel(PairwiseKernel):
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

    @names_arguments
    @takes_arrays
    def __init__(self, matrix: Tensor, train: Tensor | None = None, variance: float = 1.0) -> None:
        if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not bool(matrix.isfinite().all()):
            raise ValueError(f"matrix must be square and finite; got {describe(matrix)}")
        if not torch.allclose(matrix, matrix.mT, rtol=1e-4, atol=1e-6 * float(matrix.abs().max())):
            difference = float((matrix - matrix.mT).abs().max())
            raise ValueError(f"matrix must be symmetric; got entries that differ from their transposed by up to {difference:g}")
        super().__init__(len(matrix if train is None else train))
        self.register_buffer("matrix", matrix, persistent=False)
        train = torch.arange(len(matrix), device=matrix.device) if train is None else self.points(train)
        self.register_buffer("inputs", train, persistent=False)
        self.variance: Tensor = positive_parameter(variance, matrix)

    def between(self, first: Tensor, second: Tensor) -> Tensor:
        """Covariances ``(a, b)`` of the objects at positions ``(a,)`` and ``(b,)``."""
        return torch.as_tensor(self.variance * self.matrix[first[:, None], second])

    def variances(self, points: Tensor) -> Tensor:
        """Variances ``(a,)`` of the objects at positions ``points``."""
        return torch.as_tensor(self.variance * self.matrix.diagonal()[points])

    def points(self, new: Any) -> Tensor:
        """Positions of objects, on the device of the matrix."""
        return check_positions("train and new inputs", new, len(self.matrix), self.matrix.device)


class IdentityKernel(PairwiseKernel):
    r""":math:`v\,\delta_{ij}` on the training inputs, none with new ones: noise.

    Beside the noise of a regression, it keeps the optimiser from explaining all data as noise before other kernels are learned (Cao et al.,
    section 4.1.5).

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
        like = torch.zeros(()) if like is None else like
        self.register_buffer("inputs", torch.arange(num_data, device=like.device), persistent=False)
        self.variance: Tensor = positive_parameter(variance, like)

    def between(self, first: Tensor, second: Tensor) -> Tensor:
        """Covariances ``(a, b)`` of inputs by their numbers."""
        return self.variance * (first[:, None] == second).to(self.variance.dtype)

    def variances(self, points: Tensor) -> Tensor:
        """Variances ``(a,)``."""
        return self.variance.expand(len(points))

    def points(self, new: Any) -> Tensor:
        """Numbers that no training input has."""
        return -1 - torch.arange(len(new), device=self.inputs.device)


class SumKernel(DataKernel):
    r"""The sum of kernels on the same data: :math:`\sum_p k_p`.

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
        """The mean variance ``(P,)`` of each part, without :class:`IdentityKernel`'s."""
        with torch.no_grad():
            return self._scale * torch.stack([part.diag().mean() for part in self._kernels])

    @property
    def _kernels(self) -> list[DataKernel]:
        return [part for part in self.parts if isinstance(part, DataKernel)]

    def diag(self, rows: Tensor | None = None) -> Tensor:
        """Variances of the training inputs, ``(n,)``, or only those at ``rows``."""
        return self._sum(lambda part, _: part.diag(rows))

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Covariances ``(n, b)`` with inputs at ``index``, of all or ``rows``."""
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


class RestrictedKernel(DataKernel):
    """A kernel on some of its training inputs: subset of data.

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
        if not borrowed and not len(check_positions("rows", rows, num)):
            raise ValueError(f"rows must be positions (n,), integers from 0 to {num - 1}; got none")
        super().__init__(len(rows))
        self._lent = (kernel,)  # not a submodule: it may already belong to another module
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
        """Covariances ``(n, b)`` with kept inputs at ``index``, of all or ``rows``."""
        return self.kernel.columns(self.rows[index], self.rows if rows is None else self.rows[rows])

    def cross(self, new: object, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs with the inputs kept at positions ``index``."""
        return self.kernel.cross(new, self.rows[index])

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs."""
        return self.kernel.diag_new(new)

    def among(self, new: Any) -> Tensor:
        """Covariances ``(n_new, n_new)`` of new inputs with each other."""
        return self.kernel.among(new)


class InputKernel(PairwiseKernel):
    """A kernel of numeric inputs ``(n, D)``, which gives covariances of any points."""

    inputs: Tensor

    def __init__(self, inputs: Tensor) -> None:
        table, inputs = inputs, _as_matrix("inputs", inputs)
        if not isinstance(inputs, Tensor) or inputs.dim() not in (1, 2) or inputs.is_complex():
            raise TypeError(f"inputs must be real numbers of shape (n, D) or (n,); got {describe(inputs)}")
        inputs = inputs if inputs.is_floating_point() else inputs.double()
        if not bool(inputs.isfinite().all()):
            raise ValueError(f"inputs must be finite; got {describe(inputs)}")
        super().__init__(len(inputs))
        remember_columns(self, "new", table)
        self.register_buffer("inputs", inputs, persistent=False)

    def points(self, new: Any) -> Tensor:
        """Returns new inputs ``(n_new, D)`` in the training inputs' type and device.

        Raises:
            ValueError: if they are not of this shape, not finite, or a table with other columns than the training inputs.
        """
        check_column_names(self, "new", new)
        new = _as_matrix("new inputs", new)
        if isinstance(new, Tensor) and new.dim() == 1 and self.inputs.shape[1:] == (1,):
            new = new.unsqueeze(1)
        if not isinstance(new, Tensor) or new.is_complex() or new.shape[1:] != self.inputs.shape[1:]:
            raise ValueError(f"new inputs must be real and have shape {('n_new', *self.inputs.shape[1:])}; got {describe(new)}")
        if not bool(new.isfinite().all()):
            raise ValueError(f"new inputs must be finite; got {describe(new)}")
        return new.to(self.inputs)


class PyroKernel(InputKernel):
    """A kernel of :mod:`pyro.contrib.gp.kernels` on training inputs.

    Outside of Pyro models its parameters are the module's, whatever Pyro's parameter store holds.

    Example:
        >>> kernel = PyroKernel(pyro.contrib.gp.kernels.RBF(2), torch.randn(10, 2))
        >>> kernel.columns(torch.tensor([0, 3])).shape
        torch.Size([10, 2])

    Args:
        kernel: the kernel; used, not copied.
        inputs: training inputs ``(n, D)``.
    """

    @names_arguments
    def __init__(self, kernel: kernels.Kernel, inputs: Tensor) -> None:
        if not isinstance(kernel, kernels.Kernel):
            raise TypeError(f"kernel must be one of pyro.contrib.gp.kernels; got {type(kernel).__name__}")
        super().__init__(inputs)
        _check_columns(kernel, self.inputs)
        if any(isinstance(part, kernels.WhiteNoise) for part in kernel.modules()):
            raise ValueError("kernel must be without WhiteNoise: models have noise of their own, and IdentityKernel(n) is more")
        self.kernel = kernel

    def between(self, first: Tensor, second: Tensor) -> Tensor:
        """Covariances ``(a, b)`` of points ``(a, D)`` and ``(b, D)``, differentiable in both."""
        return evaluate(self.kernel, first, second)

    def variances(self, points: Tensor) -> Tensor:
        """Variances ``(a,)`` of points ``(a, D)``."""
        return evaluate(self.kernel, points, diag=True)


class GPyTorchKernel(InputKernel):
    """A GPyTorch kernel on training inputs.

    Example::

        import gpytorch

        kernel = GPyTorchKernel(gpytorch.kernels.MaternKernel(), X)
        model = SubsetGPRegression(kernel, y, num_inducing=10)

    Args:
        kernel: a ``gpytorch.kernels.Kernel`` without batch dimensions; used, not copied.
        inputs: training inputs ``(n, D)``.
    """

    @names_arguments
    def __init__(self, kernel: torch.nn.Module, inputs: Tensor) -> None:
        if not isinstance(kernel, torch.nn.Module):
            raise TypeError(f"kernel must be a GPyTorch kernel; got {type(kernel).__name__}")
        super().__init__(inputs)
        self.kernel = kernel

    def between(self, first: Tensor, second: Tensor) -> Tensor:
        """Covariances ``(a, b)`` of points ``(a, D)`` and ``(b, D)``, differentiable in both."""
        return self.kernel(first, second).to_dense()

    def variances(self, points: Tensor) -> Tensor:
        """Variances ``(a,)`` of points ``(a, D)``."""
        return self.kernel(points, diag=True)


@names_arguments
def smooth_rbf(inputs: Tensor) -> PyroKernel:
    r"""A squared exponential kernel with one length-scale per dimension.

    Length-scales start at :math:`2 \sqrt D` standard deviations of the inputs, which need not be standardised. Of inputs with outliers it
    is the deviation of the middle half, as of normal numbers.

    Example:
        >>> kernel = smooth_rbf(torch.randn(10, 4))
        >>> kernel.diag().shape
        torch.Size([10])

    Args:
        inputs: training inputs ``(n, D)``, or ``(n,)`` for one dimension.
    """
    table, inputs = inputs, as_data("inputs", inputs)
    inputs = inputs if inputs.is_floating_point() else inputs.double()
    points = inputs if inputs.dim() == 2 else inputs[:, None]
    if not points.numel():
        raise ValueError(f"X, the inputs, must have a row and a column at least; got {describe(inputs)}")
    check_units("inputs", points)
    dim = points.shape[1]
    spread = points.std(0, correction=0)
    low, high = points[:: -(-len(points) // 1000)].quantile(points.new_tensor([0.25, 0.75]), 0)
    # Squares of so many length-scales still have the digits of others.
    middle = ((high - low) / 1.349).maximum(1e-5 * spread * (high > low))
    spread = torch.where((middle > 0) & (spread > 5 * middle), middle, spread)
    lengthscale = 2 * dim**0.5 * torch.where(spread > 0, spread, torch.ones_like(spread))
    kernel = PyroKernel(kernels.RBF(dim, points.new_ones(()), lengthscale), points)
    remember_columns(kernel, "new", table)
    return kernel


def _as_matrix(name: str, value: Any) -> Any:
    """Returns arrays and lists of numbers as tensors."""
    if not isinstance(value, (list, tuple, range)):
        return as_tensors(value, name=name)
    try:
        return as_data(name, value)
    except TypeError:  # other objects
        return value


def bound_kernel(X: Any, kernel: Any = None) -> DataKernel:
    """A kernel on training inputs, both given as to :class:`.SubsetGPRegression`."""
    holders = DataKernel, KernelColumns
    if isinstance(X, holders) and not isinstance(X, type):
        if kernel is not None:
            raise TypeError("X is a kernel that holds its inputs already: leave kernel out")
        return as_data_kernel(X)
    if isinstance(kernel, holders) and not isinstance(kernel, type):
        raise TypeError("kernel holds its inputs already: give it in the place of X")
    refuse_foreign_kernel(kernel)
    is_maker = callable(kernel) and not isinstance(kernel, torch.nn.Module)
    inputs = as_tensors(X, name="X") if is_maker else _as_matrix("X", X)
    bound: DataKernel | None = None
    if isinstance(kernel, kernels.Kernel):
        bound = PyroKernel(kernel, inputs)
    elif isinstance(kernel, torch.nn.Module):
        bound = GPyTorchKernel(kernel, inputs)
    elif is_maker:
        bound = as_data_kernel(kernel(inputs))
    elif kernel is not None:
        raise TypeError(f"kernel must be a kernel of Pyro or GPyTorch, or make a DataKernel of the inputs; got {type(kernel).__name__}")
    elif isinstance(inputs, Tensor) and not inputs.is_complex() and inputs.dim() in (1, 2):
        bound = smooth_rbf(inputs)
    if bound is not None:
        remember_columns(bound, "new", X)
        return bound
    if isinstance(X, kernels.Kernel):
        raise TypeError("kernel has no data yet: give inputs, targets, kernel in this order")
    raise TypeError(f"kernel is needed where X is neither a matrix of numbers nor a DataKernel; X is {type(X).__name__}")
