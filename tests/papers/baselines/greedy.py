"""Published ways to choose inducing inputs: greedy ones and k-means."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.gp import DataKernel, RestrictedKernel, SubsetSearch
from pyro_truncated.gp.cholesky import DEPENDENT, greedy_cholesky
from pyro_truncated.gp.data_kernels.protocol import InputKernel
from pyro_truncated.gp.subset.objectives import SubsetProblem
from pyro_truncated.gp.subset.subset_search import Budget, CandidatePool, ExchangeFactors, draw, random_subset
from pyro_truncated.ops.components import k_means
from pyro_truncated.utils.arguments import check_count, names_arguments


class TitsiasSearch(SubsetSearch):
    """Greedy forward selection by the objective itself, each input the best of some random candidates, scored exactly all at once.

    Example:
        >>> x = torch.linspace(0, 6, 60).double().unsqueeze(-1)
        >>> model = SubsetGPRegression(smooth_rbf(x), x.squeeze(-1).sin(), num_inducing=8, algorithm=TitsiasSearch())
        >>> objective = model.fit(max_epochs=2)

    Args:
        candidates: number of random candidates per input.

    Reference:
        Titsias, "Variational learning of inducing variables in sparse Gaussian processes", AISTATS 2009.
    """

    @names_arguments
    def __init__(self, candidates: int = 16) -> None:
        self.candidates = check_count("candidates", candidates)

    @torch.no_grad()
    def improve(
        self, problem: SubsetProblem, num_inducing: int, index: Tensor | None, budget: Budget, generator: torch.Generator | None = None
    ) -> Tensor:
        """A new subset, built from nothing; the budget's limits do not apply. See :class:`SubsetSearch`."""
        factors = ExchangeFactors(problem, min(num_inducing, problem.num_data))
        while factors.size < min(num_inducing, problem.num_data):
            drawn = draw(factors.candidates().double(), self.candidates, generator)
            if not len(drawn):
                break
            pool = CandidatePool(factors, drawn)
            best = pool.gains().argmax()
            if not factors.append(drawn[best][None], pool.residuals[:, best, None]):
                break
            budget.attempts += 1
        budget.record(factors.value())
        return factors.index.clone()


class GreedyVarianceSearch(SubsetSearch):
    """Pivoted Cholesky: each input is the one whose variance, given those before, is largest. It does not look at the targets.

    Example:
        >>> x = torch.linspace(0, 6, 60).double().unsqueeze(-1)
        >>> model = SubsetGPRegression(smooth_rbf(x), x.squeeze(-1).sin(), num_inducing=8, algorithm=GreedyVarianceSearch())
        >>> objective = model.fit(max_epochs=2)
    """

    @torch.no_grad()
    def improve(
        self, problem: SubsetProblem, num_inducing: int, index: Tensor | None, budget: Budget, generator: torch.Generator | None = None
    ) -> Tensor:
        """A new subset, built from nothing; see :class:`SubsetSearch`."""
        return _greedy(problem, num_inducing, 0.0)


class InformativeVectorSearch(SubsetSearch):
    """The informative vector machine: each input is the one whose noisy target would reduce the entropy of the posterior most.

    For Gaussian noise that is the input of largest posterior variance, given noisy targets at those before.

    Example:
        >>> x = torch.linspace(0, 6, 60).double().unsqueeze(-1)
        >>> model = SubsetGPRegression(smooth_rbf(x), x.squeeze(-1).sin(), num_inducing=8, algorithm=InformativeVectorSearch())
        >>> objective = model.fit(max_epochs=2)

    Reference:
        Lawrence, Seeger and Herbrich, "Fast sparse Gaussian process methods: the informative vector machine", NIPS 2003.
    """

    @torch.no_grad()
    def improve(
        self, problem: SubsetProblem, num_inducing: int, index: Tensor | None, budget: Budget, generator: torch.Generator | None = None
    ) -> Tensor:
        """A new subset, built from nothing; see :class:`SubsetSearch`."""
        return _greedy(problem, num_inducing, problem.noise)


class KMeansSearch(SubsetSearch):
    """The training inputs nearest to the centres of k-means clusters; numeric inputs only.

    Example:
        >>> x = torch.linspace(0, 6, 60).double().unsqueeze(-1)
        >>> model = SubsetGPRegression(smooth_rbf(x), x.squeeze(-1).sin(), num_inducing=8, algorithm=KMeansSearch())
        >>> objective = model.fit(max_epochs=2)

    Args:
        iterations: most iterations of Lloyd's algorithm.
    """

    @names_arguments
    def __init__(self, iterations: int = 20) -> None:
        self.iterations = check_count("iterations", iterations)

    @torch.no_grad()
    def improve(
        self, problem: SubsetProblem, num_inducing: int, index: Tensor | None, budget: Budget, generator: torch.Generator | None = None
    ) -> Tensor:
        """The subset given, or at the start one by k-means; see :class:`SubsetSearch`.

        Raises:
            TypeError: if the kernel's inputs are not numeric.
        """
        if index is not None:
            return index
        inputs = _kernel_inputs(problem.kernel)
        start = inputs[random_subset(len(inputs), num_inducing, generator, inputs.device)]
        centres = k_means(inputs, start, self.iterations)
        found = torch.cdist(centres, inputs).argmin(1).unique()
        left = torch.ones(problem.num_data, device=found.device, dtype=torch.float64)
        left[found] = 0.0
        return torch.cat([found, draw(left, num_inducing - len(found), generator)])


def _kernel_inputs(kernel: DataKernel) -> Tensor:
    """Inputs ``(n, D)`` of a kernel of numbers, or those that are left of them."""
    if isinstance(kernel, RestrictedKernel):
        return _kernel_inputs(kernel.kernel)[kernel.rows]
    if not isinstance(kernel, InputKernel):
        raise TypeError(f"k-means needs a kernel of numeric inputs, such as PyroKernel; got {type(kernel).__name__}")
    return kernel.inputs if kernel.inputs.dim() == 2 else kernel.inputs[:, None]


def _greedy(problem: SubsetProblem, num: int, noise: float) -> Tensor:
    """Inputs of largest variance given (noisy) function values at those before, one after the other."""
    prior = problem.diag()
    return greedy_cholesky(prior + noise, problem.columns, num, DEPENDENT * prior + noise).pivots
