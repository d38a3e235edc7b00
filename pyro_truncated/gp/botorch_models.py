"""Sparse and exact regressions for BoTorch, and inducing inputs for its models.

It needs ``pip install pyro-truncated[botorch]``, and is imported by its name, ``from pyro_truncated.gp.botorch_models import ...``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from botorch.models.model import Model
from botorch.models.utils.inducing_point_allocators import InducingPointAllocator, QualityFunction, UnitQualityFunction
from botorch.posteriors import GPyTorchPosterior
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator.operators import DenseLinearOperator
from torch import Tensor

from pyro_truncated.gp.cholesky import stable_cholesky
from pyro_truncated.gp.data_kernels.protocol import GPyTorchKernel
from pyro_truncated.gp.subset.regression import SubsetGPRegression
from pyro_truncated.gp.subset.subset_search import InducingSubset, SubsetSearch


class SubsetGPModel(Model):
    """A :class:`~pyro_truncated.gp.SubsetGPRegression` as a BoTorch model, on inputs of any kind.

    Posteriors are joint over the ``q`` points of a batch and differentiable in numeric inputs. Inputs that are no numbers are chosen from
    a pool: ``X`` then holds positions in it, which ``inputs`` looks up::

        model = SubsetGPModel(regression, lambda X: fingerprints[X[:, 0].long()])
        optimize_acqf_discrete(LogExpectedImprovement(model, best_f=y.max()), q=1, choices=torch.arange(1000.0)[:, None])

    Args:
        regression: the regression, fitted.
        inputs: new inputs as the kernel takes them, of rows ``(k, d)``. Default: the rows themselves.
    """

    def __init__(self, regression: SubsetGPRegression, inputs: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        # Not a submodule: acquisition functions convert those to the type of their candidates, and a regression computes in float64.
        self._regression_tuple = (regression,)
        self.inputs = inputs

    @property
    def regression(self) -> SubsetGPRegression:
        """The regression."""
        return self._regression_tuple[0]

    @property
    def num_outputs(self) -> int:
        """Number of outputs ``H``."""
        return int(self.regression.targets.shape[1])

    @property
    def batch_shape(self) -> torch.Size:
        """It is one model: ``()``."""
        return torch.Size()

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """The joint distributions of the outputs at batches of points ``(*batch, q, d)``."""
        if isinstance(observation_noise, Tensor):
            raise TypeError("observation_noise must be True (add the learned noise) or False; got a tensor")
        mean, covariance = self._moments(X)
        if observation_noise:
            covariance = covariance + self.regression.noise * torch.eye(X.shape[-2]).to(covariance)
        normals = []
        for output in range(self.num_outputs) if output_indices is None else output_indices:
            shift, scale = self.regression.target_mean[output], self.regression.target_scale[output]
            spread = DenseLinearOperator((scale.square() * covariance).to(X))
            normals.append(MultivariateNormal((mean[..., output] * scale + shift).to(X), spread))
        joint = normals[0] if len(normals) == 1 else MultitaskMultivariateNormal.from_independent_mvns(normals)
        posterior = GPyTorchPosterior(distribution=joint)
        return posterior if posterior_transform is None else posterior_transform(posterior)

    def _moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Means ``(*batch, q, H)`` and covariances ``(*batch, q, q)`` of the standardised functions."""
        q, rows = X.shape[-2], X.reshape(-1, X.shape[-1])
        settled, means, covariances = self.regression.posterior(), [], []
        # Several batches at a time, of whose covariances the blocks on the diagonal are kept.
        for block in rows.split(max(1, 1024 // q) * q if q > 1 else 2**14):
            new = block if self.inputs is None else self.inputs(block)
            if q == 1:
                mean, variance = settled.marginals(new)
                covariance = variance[:, None, None]
            else:
                mean, full = settled.joint(new)
                blocks = full.reshape(len(block) // q, q, -1, q).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
                # Of near-certain functions rounding leaves no covariance: as little is added as makes it one.
                root = stable_cholesky(blocks, self.regression.kernel.diag_new(new).double().mean())
                covariance = root @ root.mT
            means.append(mean)
            covariances.append(covariance)
        shape = X.shape[:-1]
        return torch.cat(means).reshape(*shape, -1), torch.cat(covariances).reshape(*shape, q)


class SubsetAllocator(InducingPointAllocator):
    """Inducing points of a BoTorch model by :class:`~pyro_truncated.gp.InducingSubset`, which explain the targets.

    Example::

        allocator = SubsetAllocator(Y)
        SingleTaskVariationalGP(X, Y, inducing_points=32, inducing_point_allocator=allocator, learn_inducing_points=False)

    Args:
        targets: ``(n,)`` or ``(n, H)``. Standardised here.
        noise: noise variance of standardised targets.
        algorithm: ``"exchange"``, or a :class:`~pyro_truncated.gp.SubsetSearch`.
        max_attempts: most attempts to exchange members.
        generator: source of randomness.
    """

    def __init__(
        self,
        targets: Tensor,
        noise: float = 0.1,
        *,
        algorithm: str | SubsetSearch = "exchange",
        max_attempts: int | None = 50,
        generator: torch.Generator | None = None,
    ) -> None:
        matrix = (targets if targets.dim() == 2 else targets[:, None]).detach().double()
        self.targets = (matrix - matrix.mean(0)) / matrix.std(0).clamp(min=1e-12)
        self.noise, self.algorithm, self.max_attempts, self.generator = noise, algorithm, max_attempts, generator

    def allocate_inducing_points(self, inputs: Tensor, covar_module: Any, num_inducing: int, input_batch_shape: torch.Size) -> Tensor:
        """The training inputs ``(m, d)`` chosen from ``(n, d)``."""
        del input_batch_shape
        if inputs.dim() != 2 or len(inputs) != len(self.targets):
            raise ValueError(f"inputs must have shape ({len(self.targets)}, d), a row for each target; got {tuple(inputs.shape)}")
        kernel = GPyTorchKernel(copy.deepcopy(covar_module).to(inputs), inputs.detach())
        subset = InducingSubset(
            kernel, self.targets, num_inducing=min(num_inducing, len(inputs)), noise=self.noise, algorithm=self.algorithm,
            generator=self.generator,
        )  # fmt: skip
        subset.optimize(max_attempts=self.max_attempts)
        return inputs[subset.index]

    def _get_quality_function(self) -> QualityFunction:
        return UnitQualityFunction()
