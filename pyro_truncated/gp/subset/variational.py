"""Variational sparse processes as Pyro models, for any likelihood, on a subset of the training inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.contrib.gp.likelihoods import Likelihood
from pyro.distributions import constraints
from pyro.nn import PyroParam
from pyro.nn.module import pyro_method
from torch import Tensor

from pyro_truncated.gp.cholesky import INDUCING_JITTER, stable_cholesky
from pyro_truncated.gp.data_kernels import RescaledKernel, takes_kernel_first
from pyro_truncated.gp.subset.gaussian_surrogate import gaussian_surrogate
from pyro_truncated.gp.subset.inducing_subset import InducingSubset
from pyro_truncated.gp.subset.sparse_model import SubsetModel
from pyro_truncated.gp.subset.subset_search import SubsetSearch
from pyro_truncated.utils.arguments import names_arguments


class SubsetVariationalGP(SubsetModel):
    r"""A variational sparse process as :class:`pyro.contrib.gp.models.VariationalSparseGP`, on a subset of training inputs of any type.

    .. math:: u \sim \mathcal N(0, K_{II}), \quad f = K_{nI} K_{II}^{-1} u + \ldots, \quad y \sim p(y \mid f), \qquad
        q(u) = \mathcal N(C \mu, C \Sigma C^\top), \; K_{II} = C C^\top,

    whitened. The likelihood may be any of :mod:`pyro.contrib.gp.likelihoods`, or :class:`StudentT`. All is learned by ``SVI`` but the
    subset, which :meth:`reselect` chooses between steps by a Gaussian surrogate.

    Example::

        from pyro.contrib.gp import likelihoods

        gp = SubsetVariationalGP(X, y, kernel, likelihood=likelihoods.Binary(), num_inducing=64, batch_size=256)
        gp.reselect()
        svi = SVI(gp.model, gp.guide, Adam({"lr": 0.02}), Trace_ELBO())
        for step in range(2000):
            svi.step()
            if step in (500, 1000):
                gp.reselect()

    Args:
        X: the training inputs, see :class:`SubsetModel`.
        y: targets ``(..., n)``; class labels ``(n,)`` with a ``latent_shape`` ``(C,)``.
        kernel: see :class:`SubsetModel`.
        likelihood: draws ``y`` given means and variances of the latent function.
        num_inducing: size ``m`` of the subset.
        index: the subset to start from; default: random.
        latent_shape: shape of latent functions; default: ``y.shape[:-1]``.
        batch_size: number of data points, drawn at random, that each step uses; default: all.
        jitter: see :class:`SubsetModel`.
    """

    @takes_kernel_first("likelihood", "num_inducing")
    @names_arguments
    def __init__(
        self,
        X: Any,
        y: Tensor,
        kernel: Any = None,
        *,
        likelihood: Likelihood,
        num_inducing: int,
        index: Tensor | None = None,
        latent_shape: Sequence[int] | None = None,
        batch_size: int | None = None,
        jitter: float = INDUCING_JITTER,
    ) -> None:
        super().__init__(X, y, kernel, num_inducing, index, jitter)
        if batch_size is not None and not 1 <= batch_size <= self.y.shape[-1]:
            raise ValueError(f"batch_size must lie in 1 .. {self.y.shape[-1]}, the number of data points; got {batch_size}")
        self.likelihood = likelihood
        self.latent_shape = torch.Size(self.y.shape[:-1] if latent_shape is None else latent_shape)
        self.batch_size = batch_size
        like = self.kernel.diag().detach()
        m = num_inducing
        self.u_loc: Tensor = torch.nn.Parameter(like.new_zeros(*self.latent_shape, m))
        identity = torch.eye(m, dtype=like.dtype, device=like.device).repeat(*self.latent_shape, 1, 1)
        scale_tril: Any = PyroParam(identity, constraints.lower_cholesky)
        self.u_scale_tril: Tensor = scale_tril

    @pyro_method
    def model(self) -> None:
        """The model, for ``SVI``; each call draws a minibatch if there is a batch size."""
        self.set_mode("model")  # type: ignore[no-untyped-call]
        zero = torch.zeros_like(self.u_loc)
        prior = dist.MultivariateNormal(zero, scale_tril=torch.eye(zero.shape[-1], dtype=zero.dtype, device=zero.device))
        pyro.sample("u", prior.to_event(len(self.latent_shape)))
        n = self.y.shape[-1]
        rows = None if self.batch_size is None else torch.randperm(n, device=self.y.device)[: self.batch_size]
        mean, variance = self.marginals(rows)
        y = self.y if rows is None else self.y[..., rows]
        self.likelihood._load_pyro_samples()
        with poutine.scale(scale=n / y.shape[-1]):
            self.likelihood(mean, variance, y)

    @pyro_method
    def guide(self) -> None:
        """The guide, for ``SVI``: q(u), whitened."""
        self.set_mode("guide")  # type: ignore[no-untyped-call]
        self._load_pyro_samples()
        q = dist.MultivariateNormal(self.u_loc, scale_tril=self.u_scale_tril)
        pyro.sample("u", q.to_event(len(self.latent_shape)))

    def marginals(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Means and variances ``latent_shape + (n,)`` of q(f) at the training inputs, or those at ``rows``."""
        return self._condition(self.kernel.columns(self.index, rows), self.kernel.diag(rows))

    @torch.no_grad()
    def forward(self, new: Any) -> tuple[Tensor, Tensor]:
        """Means and variances ``latent_shape + (n_new,)`` of q(f) at new inputs."""
        self.set_mode("guide")  # type: ignore[no-untyped-call]
        return self._condition(self.kernel.cross(new, self.index), self.kernel.diag_new(new))

    def _condition(self, cross: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        whitened = torch.linalg.solve_triangular(self.inducing_factor(), cross.mT, upper=False)
        mean = self.u_loc @ whitened
        spread = (self.u_scale_tril.mT @ whitened).square().sum(-2)
        return mean, (prior - whitened.square().sum(0)).clamp(min=0) + spread

    def reselect(
        self,
        algorithm: str | SubsetSearch = "exchange",
        *,
        max_attempts: int | None = 20,
        max_seconds: float | None = None,
        num_draws: int = 16,
        generator: torch.Generator | None = None,
    ) -> bool:
        r"""Chooses the subset anew by a Gaussian surrogate of the likelihood around q(f), and carries q(f) over to it.

        With :math:`g` and :math:`\lambda` the expected first and negative second derivatives of :math:`\log p(y \mid f)` under q(f), the
        surrogate has targets :math:`E[f] + g / \lambda` and noise variances :math:`1 / \lambda`. Several latent functions share the mean of
        their :math:`\lambda`. The new q(u) has the moments of q(f) at the new inducing inputs. Before any training, q(f) is the prior.

        Args:
            algorithm: see :class:`InducingSubset`.
            max_attempts: most attempts.
            max_seconds: most seconds.
            num_draws: draws of f for the expectations, an even number.
            generator: source of randomness.

        Returns:
            Whether the subset has changed.
        """
        self.set_mode("guide")  # type: ignore[no-untyped-call]
        targets, deviations = gaussian_surrogate(self.likelihood, *self.marginals(), self.y, num_draws, generator)
        scaled = RescaledKernel(self.kernel, deviations)
        subset = InducingSubset(
            scaled, targets / deviations[:, None], num_inducing=self.num_inducing, noise=1.0, algorithm=algorithm, index=self.index,
            generator=generator,
        )  # fmt: skip
        subset.optimize(max_attempts=max_attempts, max_seconds=max_seconds)
        return self._carry_over(subset.index)

    @torch.no_grad()
    def _carry_over(self, found: Tensor) -> bool:
        old, factor = self.index, self.inducing_factor()
        if not self.take_index(found):
            return False
        new = self.index
        # Moments of q(f) at the new inducing inputs, whitened by their prior.
        whitened = torch.linalg.solve_triangular(factor, self.kernel.columns(old, new).mT, upper=False)
        prior = self.kernel.columns(new, new)
        spread = self.u_scale_tril.mT @ whitened
        covariance = prior - whitened.mT @ whitened + spread.mT @ spread
        C = self.inducing_factor()
        loc = torch.linalg.solve_triangular(C, (self.u_loc @ whitened).unsqueeze(-1), upper=False).squeeze(-1)
        half = torch.linalg.solve_triangular(C, covariance, upper=False)
        inner = torch.linalg.solve_triangular(C, half.mT, upper=False)
        inner = (inner + inner.mT) / 2 + self.jitter * torch.eye(len(new), dtype=inner.dtype, device=inner.device)
        self.u_loc.copy_(loc)
        self.u_scale_tril = stable_cholesky(inner)
        return True
