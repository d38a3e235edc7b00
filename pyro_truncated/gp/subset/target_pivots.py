"""Pivots of a low-rank kernel matrix that explain given targets best."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.gp.data_kernels import as_data_kernel
from pyro_truncated.gp.kernels.evaluation import Covariance
from pyro_truncated.gp.subset.exchange import ExchangeSearch
from pyro_truncated.gp.subset.objective import SubsetProblem
from pyro_truncated.gp.subset.row_sample import sample_rows
from pyro_truncated.gp.subset.subset_search import Budget

# Of more data, pivots are chosen from a random sample.
_MOST_CANDIDATES = 20_000
_EXCHANGES = 20


class _Columns:
    """A kernel matrix by columns, as the choice of an inducing subset asks for it."""

    def __init__(self, kernel: Covariance, inputs: Tensor) -> None:
        self.kernel, self.inputs = kernel, inputs

    def diag(self) -> Tensor:
        """Prior variances ``(n,)``."""
        return self.kernel(self.inputs, diag=True)

    def columns(self, index: Tensor) -> Tensor:
        """Covariances ``(n, m)`` with some of the data."""
        return self.kernel(self.inputs, self.inputs[index])

    def cross(self, new: Tensor, index: Tensor) -> Tensor:
        """Covariances ``(k, m)`` of new inputs with some of the data."""
        return self.kernel(new, self.inputs[index])


@torch.no_grad()
def pivots_for(
    kernel: Covariance,
    inputs: Tensor,
    targets: Tensor,
    noise: float,
    rank: int,
    known: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Pivots chosen by an exchange search, whose objective is the variational free energy of the targets.

    Args:
        kernel: the kernel.
        inputs: ``(n, D)``.
        targets: ``(n, H)``.
        noise: noise variance.
        rank: how many to choose; all inputs if there are no more.
        known: pivots ``(m,)`` to go on from.
        generator: source of randomness.

    Returns:
        Distinct positions among the inputs, at most ``rank``.
    """
    rank = min(rank, len(inputs))
    start = inputs.new_zeros(0, dtype=torch.int64) if known is None else known
    sample = sample_rows(as_data_kernel(_Columns(kernel, inputs)), targets, start, max(_MOST_CANDIDATES, 4 * rank), generator)
    problem = SubsetProblem(sample.kernel, sample.targets, noise)
    search = ExchangeSearch()
    found = search.improve(problem, rank, sample.inducing if len(start) else None, Budget(max_attempts=_EXCHANGES), generator)
    return sample.among_all(found)
