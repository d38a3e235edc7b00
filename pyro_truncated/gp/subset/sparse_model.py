"""What Pyro models share whose inducing inputs are positions in the training data."""

from __future__ import annotations

from typing import Any

import torch
from pyro.contrib.gp.parameterized import Parameterized
from pyro.nn import PyroModule
from torch import Tensor

from pyro_truncated.gp.cholesky import stable_cholesky
from pyro_truncated.gp.data_kernels import DataKernel, bound_kernel
from pyro_truncated.gp.data_kernels.validity import check_data_kernel
from pyro_truncated.gp.kernels.evaluation import outside_of_programs
from pyro_truncated.gp.subset.objective import check_index
from pyro_truncated.utils.arrays import as_tensors
from pyro_truncated.utils.counts import check_count
from pyro_truncated.utils.isolation import spare_random_numbers
from pyro_truncated.utils.unique_names import UniqueModule


class SubsetModel(UniqueModule, Parameterized):
    """What sparse models on an inducing subset share.

    Args:
        X: the training inputs, of any type that the kernel takes; or a kernel that holds them already: a :class:`DataKernel`, or an object
            with ``diag()``, ``columns(index)`` and ``cross(new, index)``.
        y: targets; the last dimension is the data.
        kernel: a kernel of :mod:`pyro.contrib.gp.kernels` or of GPyTorch, or a function that makes a :class:`DataKernel` of the inputs,
            such as :class:`CountKernel`. Default for numeric inputs: :func:`smooth_rbf`.
        num_inducing: size ``m`` of the subset.
        index: the subset to start from; default: random, until :meth:`reselect` chooses one.
        jitter: added to the diagonal of the inducing inputs' covariance matrix, as Pyro does, while parameters are being learned.

    Attributes:
        index: positions of the inducing inputs, ``(m,)``, a buffer.

    Raises:
        ValueError: if targets or positions do not fit the kernel's data, or the kernel is no covariance function.
    """

    index: Tensor
    y: Tensor

    def __init__(self, X: Any, y: Tensor, kernel: Any, num_inducing: int, index: Tensor | None, jitter: float) -> None:
        super().__init__()
        self.kernel: DataKernel = _checked(bound_kernel(X, kernel))
        n, y = self.kernel.num_data, as_tensors(y)
        if not isinstance(y, Tensor) or not y.dim() or y.shape[-1] != n:
            raise ValueError(f"y must be a tensor of shape (..., {n}), one target per training input; got {getattr(y, 'shape', type(y))}")
        num_inducing = check_count("num_inducing", num_inducing)
        if num_inducing > n:
            raise ValueError(f"num_inducing must lie in 1 .. {n}, the number of inputs; got {num_inducing}")
        index = torch.randperm(n)[:num_inducing].to(y.device) if index is None else check_index(index, n)
        if len(index) != num_inducing:
            raise ValueError(f"index must hold num_inducing={num_inducing} positions; got {len(index)}")
        self.num_inducing = num_inducing
        self.jitter = jitter
        self.register_buffer("index", index)
        self.register_buffer("y", y, persistent=False)

    def inducing_factor(self) -> Tensor:
        """Cholesky factor ``(m, m)`` of the inducing inputs' covariance matrix."""
        square = self.kernel.columns(self.index, self.index)
        return stable_cholesky(square + self.jitter * torch.eye(len(square), dtype=square.dtype, device=square.device))

    def take_index(self, found: Tensor) -> bool:
        """Takes a new subset, filled up from the old one where it is smaller; says whether it is another set."""
        old = self.index
        rest = old[~torch.isin(old, found)][: self.num_inducing - len(found)]
        new = torch.cat([found, rest])
        if torch.equal(new.sort().values, old.sort().values):
            return False
        self.index = new
        return True


def _checked(kernel: DataKernel) -> DataKernel:
    """Looks at a kernel's covariances, and lets one that was called before become part of a model, which Pyro would refuse."""
    # Random parameters are drawn for the look.
    with spare_random_numbers(), outside_of_programs():
        check_data_kernel(kernel)
    for module in kernel.modules():
        if isinstance(module, PyroModule):
            module._pyro_context.used = False
    return kernel
