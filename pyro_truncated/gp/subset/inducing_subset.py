"""Inducing inputs chosen from the training inputs, at fixed hyper-parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_truncated.gp.data_kernels import bound_kernel
from pyro_truncated.gp.data_kernels.protocol import check_data_kernel
from pyro_truncated.gp.subset.objectives import Basis, SparsePosterior, SubsetProblem, check_index
from pyro_truncated.gp.subset.subset_search import Budget, ExchangeFactors, ExchangeSearch, SubsetSearch
from pyro_truncated.utils.arguments import check_count, check_kinds, names_arguments
from pyro_truncated.utils.constraints import in_double


class InducingSubset:
    r"""Chooses a sparse Gaussian process's inducing inputs from its training inputs.

    The objective is the one that fits hyper-parameters.

    Inputs may be anything a kernel is defined on, and the kernel need not be differentiable in them. The objective (see
    :mod:`pyro_truncated.gp.subset.objectives`) never rises, whatever the search.

    Example::

        subset = InducingSubset(fingerprints, y, CountKernel, num_inducing=128, noise=0.1)
        subset.optimize(max_seconds=5)
        mean, variance = subset.predict(new_fingerprints)

    Args:
        X: the training inputs, of any type that the kernel takes. Or a kernel with its own inputs:
            a :class:`DataKernel`, or an object with ``diag()``, ``columns(index)`` and ``cross(new,
            index)``.
        y: targets, ``(n,)``, or ``(n, H)`` for several outputs that share subset, kernel and noise; centred.
        kernel: a kernel of :mod:`pyro.contrib.gp.kernels` or of GPyTorch, or a function that makes a :class:`DataKernel` of the inputs,
            such as :class:`CountKernel`. Default for numeric inputs: :func:`smooth_rbf`.
        num_inducing: size ``m`` of the subset, at most ``n``.
        noise: noise variance.
        objective: ``"vfe"`` (variational free energy) or ``"pp"`` (likelihood of the projected process).
        algorithm: ``"exchange"``, or a :class:`SubsetSearch`.
        index: a subset to start from. Default: the algorithm's own start.
        generator: source of randomness.

    Attributes:
        index: positions of the inducing inputs, ``(m,)``; fewer if all other inputs depend on them.
        objective_value: the objective, in nats. Its constant :math:`\frac{nH}2 \log 2\pi` is left out.
        history: seconds, swaps and objective after each change since the start.

    Raises:
        ValueError: if targets, noise or names are not as above, or the kernel is none: not finite, not symmetric or not positive.
        TypeError: if the kernel offers no covariances.
    """

    @names_arguments
    def __init__(
        self,
        X: Any,
        y: Tensor,
        kernel: Any = None,
        *,
        num_inducing: int,
        noise: float,
        objective: str = "vfe",
        algorithm: str | SubsetSearch = "exchange",
        index: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.kernel = bound_kernel(X, kernel)
        matrix = _matrix(y)
        if len(matrix) != self.kernel.num_data:
            raise ValueError(f"y must have one target for each of the {self.kernel.num_data} inputs X; got {len(matrix)}")
        self.problem = SubsetProblem(self.kernel, matrix, float(noise), objective)
        check_data_kernel(self.kernel)
        num_inducing = check_count("num_inducing", num_inducing)
        if num_inducing > self.problem.num_data:
            raise ValueError(f"num_inducing must lie in 1 .. {self.problem.num_data}, the number of inputs; got {num_inducing}")
        self.num_inducing = num_inducing
        check_kinds(InducingSubset.__init__, generator=generator)
        self.search = make_search(algorithm)
        self.generator = generator
        self.history: list[tuple[float, int, float]] = []
        if index is None:
            index = self.search.improve(self.problem, num_inducing, None, Budget(max_attempts=0), generator)
        self.index = check_index(index, self.problem.num_data).to(self.problem.targets.device)
        self.objective_value = self._value(self.index)

    def optimize(
        self,
        *,
        max_swaps: int | None = None,
        max_attempts: int | None = None,
        max_seconds: float | None = None,
        progress: bool = False,
    ) -> float:
        """Searches for a better subset until convergence or a limit.

        Args:
            max_swaps: most members exchanged.
            max_attempts: most attempts to exchange members.
            max_seconds: most seconds.
            progress: whether to show a progress bar.

        Returns:
            The objective, never above that before.
        """
        budget = Budget(max_swaps, max_attempts, max_seconds, progress=progress)
        found = self.search.improve(self.problem, self.num_inducing, self.index, budget, self.generator)
        budget.close()
        value = self._value(found)
        self.history += budget.history
        if value < self.objective_value:
            self.index, self.objective_value = found, value
        return self.objective_value

    def update(self, *, noise: float | None = None, targets: Tensor | None = None) -> float:
        """Updates new noise, new targets, or changed kernel parameters.

        Returns:
            The objective of the present subset.
        """
        matrix = self.problem.targets if targets is None else _matrix(targets)
        self.problem = SubsetProblem(self.kernel, matrix, self.problem.noise if noise is None else float(noise), self.problem.objective)
        self.objective_value = self._value(self.index)
        return self.objective_value

    def posterior(self) -> SparsePosterior:
        """The posterior given the present subset."""
        return SparsePosterior(Basis(self.kernel, self.index), self.problem.targets, self.problem.noise)

    @torch.no_grad()
    def predict(self, new: Any, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Returns means ``(n_new, H)`` and variances ``(n_new,)`` at new inputs.

        They are those of the targets, or ``noiseless`` of the function.
        """
        mean, variance = self.posterior().marginals(new)
        return mean, variance if noiseless else variance + self.problem.noise

    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        """Returns means ``(n, H)`` and variances ``(n,)``, each given all others.

        Variances include the noise, and the subset is held fixed.
        """
        return self.posterior().leave_one_out()

    @torch.no_grad()
    def _value(self, index: Tensor) -> float:
        return ExchangeFactors(self.problem, len(index), index).value()


def make_search(algorithm: str | SubsetSearch) -> SubsetSearch:
    """A search by name, or the one given.

    Raises:
        ValueError: for an unknown name.
        TypeError: for anything but a name or a search.
    """
    if isinstance(algorithm, SubsetSearch):
        return algorithm
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm must be a name or a SubsetSearch; got {type(algorithm).__name__}")
    if algorithm != "exchange":
        raise ValueError(f'algorithm must be "exchange" or a SubsetSearch; got {algorithm!r}')
    return ExchangeSearch()


def _matrix(targets: Tensor) -> Tensor:
    found = in_double("y, the targets,", targets).detach()
    if found.dim() not in (1, 2):
        raise ValueError(f"y, the targets, must have shape (n,) or (n, H); got {tuple(found.shape)}")
    return found if found.dim() == 2 else found[:, None]
