"""Sparse regression as a Pyro model, on a subset of the training inputs."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn.module import pyro_method
from torch import Tensor

from pyro_truncated.gp.cholesky import INDUCING_JITTER
from pyro_truncated.gp.data_kernels import positive_parameter, takes_kernel_first
from pyro_truncated.gp.subset.inducing_subset import InducingSubset
from pyro_truncated.gp.subset.sparse_model import SubsetModel
from pyro_truncated.gp.subset.subset_search import SubsetSearch
from pyro_truncated.utils.arguments import names_arguments


class SubsetSparseGPRegression(SubsetModel):
    r"""Sparse regression as :class:`pyro.contrib.gp.models.SparseGPRegression`, on a subset of training inputs of any type.

    .. math:: y \sim \mathcal N(0, \hat K + \sigma^2 I), \qquad \hat K = K_{nI} K_{II}^{-1} K_{In},

    with the trace term of the variational free energy. Hyper-parameters are learned by ``SVI``, the subset by :meth:`reselect` between
    steps; both lower the same loss.

    Example::

        gp = SubsetSparseGPRegression(X, y, kernel, num_inducing=64)
        svi = SVI(gp.model, gp.guide, Adam({"lr": 0.02}), Trace_ELBO())
        for step in range(500):
            if step % 50 == 0:
                gp.reselect()
            svi.step()

    Args:
        X: the training inputs, see :class:`SubsetModel`.
        y: targets ``(n,)`` or ``(H, n)``.
        kernel: see :class:`SubsetModel`.
        num_inducing: size ``m`` of the subset.
        index: the subset to start from; default: random.
        noise: noise variance to start from.
        approx: ``"VFE"`` or ``"DTC"`` (the projected process).
        jitter: see :class:`SubsetModel`.
    """

    @takes_kernel_first("num_inducing")
    @names_arguments
    def __init__(
        self,
        X: Any,
        y: Tensor,
        kernel: Any = None,
        *,
        num_inducing: int,
        index: Tensor | None = None,
        noise: float = 0.5,
        approx: str = "VFE",
        jitter: float = INDUCING_JITTER,
    ) -> None:
        super().__init__(X, y, kernel, num_inducing, index, jitter)
        if approx not in ("VFE", "DTC"):
            raise ValueError(f'approx must be "VFE" or "DTC"; got {approx!r}')
        self.approx = approx
        self.noise: Tensor = positive_parameter(noise, self.y, "noise")

    @pyro_method
    def model(self) -> None:
        """The model, for ``SVI``."""
        self.set_mode("model")  # type: ignore[no-untyped-call]
        columns, noise = self.kernel.columns(self.index), self.noise
        factor = torch.linalg.solve_triangular(self.inducing_factor(), columns.mT, upper=False).mT
        if self.approx == "VFE":
            missing = (self.kernel.diag() - factor.square().sum(-1)).sum().clamp(min=0)
            outputs = self.y.numel() // self.y.shape[-1]
            pyro.factor("trace_term", -0.5 * outputs * missing / noise)
        density = dist.LowRankMultivariateNormal(factor.new_zeros(len(factor)), factor, noise.expand(len(factor)))
        pyro.sample("y", density.expand_by(self.y.shape[:-1]).to_event(self.y.dim() - 1), obs=self.y)

    @pyro_method
    def guide(self) -> None:
        """The guide, for ``SVI``: it holds the guides of parameters with priors."""
        self.set_mode("guide")  # type: ignore[no-untyped-call]
        self._load_pyro_samples()

    @torch.no_grad()
    def reselect(
        self,
        algorithm: str | SubsetSearch = "exchange",
        *,
        max_attempts: int | None = 20,
        max_seconds: float | None = None,
        generator: torch.Generator | None = None,
    ) -> bool:
        """Exchanges members of the subset at the present hyper-parameters.

        Args:
            algorithm: see :class:`InducingSubset`.
            max_attempts: most attempts.
            max_seconds: most seconds.
            generator: source of randomness.

        Returns:
            Whether the subset has changed.
        """
        self.set_mode("guide")  # type: ignore[no-untyped-call]
        targets = self.y.reshape(-1, self.y.shape[-1]).mT
        objective = "vfe" if self.approx == "VFE" else "pp"
        subset = InducingSubset(
            self.kernel, targets, num_inducing=self.num_inducing, noise=float(self.noise), objective=objective, algorithm=algorithm,
            index=self.index, generator=generator,
        )  # fmt: skip
        subset.optimize(max_attempts=max_attempts, max_seconds=max_seconds)
        return self.take_index(subset.index)

    @torch.no_grad()
    def forward(self, new: Any, noiseless: bool = True) -> tuple[Tensor, Tensor]:
        """Means ``(..., n_new)`` and variances ``(n_new,)`` at new inputs, of the function unless ``noiseless=False``, as Pyro's."""
        self.set_mode("guide")  # type: ignore[no-untyped-call]
        targets = self.y.reshape(-1, self.y.shape[-1]).mT
        subset = InducingSubset(self.kernel, targets, num_inducing=self.num_inducing, noise=float(self.noise), index=self.index)
        mean, variance = subset.predict(new, noiseless=noiseless)
        return mean.mT.reshape(*self.y.shape[:-1], len(mean)).to(self.y), variance.to(self.y)
