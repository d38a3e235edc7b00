"""Predictions at each latent from the data points closest to it, for data sets too large to be an active set themselves."""

from __future__ import annotations

import dataclasses

import torch
from pyro.contrib.gp.kernels import Kernel
from torch import Tensor
from torch.nn import functional

from pyro_truncated.gp.cholesky import factorize
from pyro_truncated.gp.kernels.evaluation import covariance, prior_variance
from pyro_truncated.utils.counts import check_count

# Numbers of the largest tensors: of these, several come and go, and small ones are not asked of the system each time.
_BUDGET = 1_000_000


class NearestSet:
    r"""The posteriors of a process at latents :math:`z`, each given its own active set :math:`A(z)`: the data points closest to it.

    .. math:: m(z) = k_{zA} C^{-1} x_A, \qquad c(z) = k_{zz} + \sigma^2 - k_{zA} C^{-1} k_{Az}, \qquad C = K_{AA} + \sigma^2 I,
        \qquad A = A(z)

    Closest are those whose function values correlate most with that at the latent, under the prior. In more than a few dimensions, where
    the data are sparse, no few points of a projection lie within a length-scale of all others, but the closest ones say nearly all that
    the data say about a place. Cost of a prediction: :math:`O(N Q + |A|^3 + |A| D)`, or without the first term :meth:`around` it. Means
    jump, a little, where the closest points change.

    Args:
        latents: of the data, ``(N, Q)``.
        outputs: complete, ``(N, D)``.
        kernel: kernel of :mod:`pyro.contrib.gp.kernels`.
        noise: noise variance, a scalar.
        num_neighbors: size of each active set.

    Raises:
        ValueError: if outputs are missing, or shapes disagree.

    Reference:
        Vecchia, "Estimation and model identification for continuous spatial processes", JRSS B 50 (1988).
    """

    def __init__(self, latents: Tensor, outputs: Tensor, kernel: Kernel, noise: Tensor, num_neighbors: int) -> None:
        if latents.dim() != 2 or outputs.dim() != 2 or len(latents) != len(outputs):
            raise ValueError(f"latents (N, Q) and outputs (N, D) must agree; got {tuple(latents.shape)}, {tuple(outputs.shape)}")
        if bool(outputs.isnan().any()):
            raise ValueError("data points with missing outputs have no part in active sets of the closest; leave them out")
        self.latents, self.outputs, self.kernel = latents, outputs, kernel
        self.noise = torch.as_tensor(noise, dtype=latents.dtype, device=latents.device).reshape(())
        self.num_neighbors = min(check_count("num_neighbors", num_neighbors), len(latents))
        self._scale = prior_variance(kernel, latents).detach().rsqrt()

    @torch.no_grad()
    def around(self, latents: Tensor, leave_out: Tensor | None = None) -> Neighborhoods:
        """The posteriors around latents ``(M, Q)``, given the data points closest to *these*, wherever predictions are then made.

        Args:
            latents: where.
            leave_out: a data point ``(M,)`` for each that is not to be among them.
        """
        rows = max(1, _BUDGET // max(len(self.latents), self.num_neighbors**2))
        own = torch.full((len(latents),), -1, device=latents.device) if leave_out is None else leave_out
        found = [self._closest(z, n) for z, n in zip(latents.split(rows), own.split(rows), strict=True)]
        near = torch.cat(found) if found else own.new_empty(0, self.num_neighbors)
        return Neighborhoods(self, near, torch.cat([self._factor(part) for part in near.split(rows)]))

    def _closest(self, latents: Tensor, leave_out: Tensor) -> Tensor:
        correlation = covariance(self.kernel, latents, self.latents) * self._scale
        out = (leave_out >= 0).nonzero().squeeze(1)
        correlation[out, leave_out[out]] = -torch.inf
        return correlation.topk(self.num_neighbors, dim=1).indices

    def _factor(self, near: Tensor) -> Tensor:
        z = self.latents[near]
        return factorize(covariance(self.kernel, z, z), self.noise)[0]

    def predict(self, latents: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Predictive means ``(*batch, D)`` and variances ``(*batch, 1)``, of the observations or ``noiseless`` of the function."""
        flat = latents.reshape(-1, latents.shape[-1])
        mean, variance = self.around(flat.detach()).predict(flat, noiseless=noiseless)
        return mean.reshape(*latents.shape[:-1], mean.shape[-1]), variance.reshape(*latents.shape[:-1], 1)


@dataclasses.dataclass(frozen=True)
class Neighborhoods:
    """Active sets of a :class:`NearestSet`, one for each of ``M`` places.

    Attributes:
        data: what they are parts of.
        near: their data points ``(M, A)``.
        cholesky: factors of their covariance matrices ``(M, A, A)``, noise included.
    """

    data: NearestSet
    near: Tensor
    cholesky: Tensor

    def take(self, rows: Tensor) -> Neighborhoods:
        """Those at positions ``(L,)``, which may repeat."""
        return Neighborhoods(self.data, self.near[rows], self.cholesky[rows])

    def predict(self, latents: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Means ``(M, D)`` and variances ``(M, 1)`` at latents ``(M, Q)``, each given the active set of its position."""
        data = self.data
        cross = covariance(data.kernel, data.latents[self.near], latents.unsqueeze(-2))
        basis = torch.linalg.solve_triangular(self.cholesky, cross, upper=False)
        weights = torch.linalg.solve_triangular(self.cholesky.mT, basis, upper=True).squeeze(-1)
        # A sum over rows of the data by index: no tensor of places by neighbours by outputs.
        mean = functional.embedding_bag(self.near, data.outputs, per_sample_weights=weights, mode="sum")
        left = (prior_variance(data.kernel, latents) - basis.square().sum((-2, -1))).clamp(min=0.0)
        return mean, (left if noiseless else left + data.noise).unsqueeze(-1)
