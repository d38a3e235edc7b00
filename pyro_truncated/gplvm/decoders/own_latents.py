r"""Normal distributions around the most probable latents of data points, and what they say about the outputs.

Around the most probable latent :math:`z_n` the decoder's means are nearly linear, with slopes :math:`J_n`, so that the posterior of the
latent is nearly normal and the outputs have the moments

.. math:: q(z) = \mathcal N(z_n, T H_n^{-1}), \qquad
    H_n = I + \sum_{d\ \mathrm{seen}} \frac{J_{nd} J_{nd}^\top}{v_n + \sigma_d^2}, \qquad
    \mathbb E\, x_{nd} = m_{nd}, \qquad \operatorname{var} x_{nd} = v_n + \sigma_d^2 + T J_{nd}^\top H_n^{-1} J_{nd}

(Laplace's approximation with the curvature of Gauss and Newton) at a temperature :math:`T`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import torch
from torch import Tensor

from pyro_truncated.gp.active_sets.nearest_set import NearestSet

# Of the latent space, whose prior has unit variance: errors of central differences in float32 are below 1e-4 there.
_STEP = 1e-2


@dataclasses.dataclass(frozen=True)
class OwnLatents:
    """Most probable latents of data points, and the decoder's predictions around them.

    Attributes:
        latents: ``(M, Q)``.
        mean: of the functions at the latents, ``(M, D)``.
        variance: of the functions there, ``(M, 1)`` or ``(M, D)``.
        slopes: of the means, ``(M, D, Q)``.
    """

    latents: Tensor
    mean: Tensor
    variance: Tensor
    slopes: Tensor

    @classmethod
    def at(cls, posterior: Any, latents: Tensor, loc: Tensor, leave_out: Tensor | None = None) -> Self:
        """Predictions of a posterior around latents; slopes are central differences.

        Args:
            posterior: predicts functions at latents.
            latents: ``(M, Q)``.
            loc: mean of the outputs ``(D,)``, from which the posterior predicts deviations.
            leave_out: a data point ``(M,)`` of a :class:`NearestSet` for each, not to predict from.
        """
        around = posterior.around(latents, leave_out) if isinstance(posterior, NearestSet) else posterior
        mean, variance = around.predict(latents, noiseless=True)
        steps = _STEP * torch.eye(latents.shape[1]).to(latents)
        slopes = [(around.predict(latents + step)[0] - around.predict(latents - step)[0]) / (2 * _STEP) for step in steps]
        return cls(latents.double(), (mean + loc).double(), variance.double(), torch.stack(slopes, -1).double())

    def spread(self, seen: Tensor, noise: Tensor) -> Tensor:
        """Variances ``(M, D)`` of the means under the normals, at temperature one, where entries ``(M, D)`` have been seen."""
        precision = seen / (self.variance + noise)
        curvature = torch.einsum("mdq,md,mdr->mqr", self.slopes, precision, self.slopes)
        root = torch.linalg.cholesky(curvature + torch.eye(self.latents.shape[1]).to(curvature))
        whitened: Tensor = torch.linalg.solve_triangular(root, self.slopes.mT, upper=False)
        return whitened.square().sum(1)

    def log_joint(self, x: Tensor, noise: Tensor) -> Tensor:
        """Log joint densities ``(M,)`` of what is seen of data points ``(M, D)`` and of their latents, up to constants."""
        spread = self.variance + noise
        terms = torch.where(x.isnan(), 0.0, (x - self.mean).square() / spread + spread.log())
        return -(terms.sum(1) + self.latents.square().sum(1)) / 2
