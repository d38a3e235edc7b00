r"""Latents that follow Gaussian processes over time, and their posterior.

Every latent dimension :math:`q` has a prior :math:`x_q \sim \mathcal N(0, K_q)` over all data points, whose time stamps :math:`K_q` is made
of. Its posterior is what pseudo-observations :math:`\tilde y_{nq}` with noise variances :math:`r_{nq}` make of the prior,

.. math:: q(x_q) = \mathcal N(\mu_q, S_q), \quad \mu_q = K_q A_q^{-1} \tilde y_q, \quad S_q = K_q - K_q A_q^{-1} K_q, \quad
          A_q = K_q + \operatorname{diag}(r_q),

which is the form of the optimum, as the likelihood needs marginals alone. Its divergence from the
prior needs no inverse of :math:`K_q`,

.. math:: \mathrm{KL}_q = \tfrac12 \left[ \operatorname{tr}(A_q^{-1} \operatorname{diag}(r_q)) - N
          + \tilde y_q^\top A_q^{-1} K_q A_q^{-1} \tilde y_q + \log |A_q| - \textstyle\sum_n \log r_{nq} \right] .
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pyro.distributions as dist
import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.gp.cholesky import stable_cholesky
from pyro_truncated.utils.arrays import as_tensors
from pyro_truncated.utils.parameter_store import UniqueModule

_KERNELS = ("rbf", "matern", "ou", "periodic")
# Share of the prior variance that is independent over time: it makes factors exist.
_OWN = 1e-4
_START_SPACINGS = 5.0


class Marginals(NamedTuple):
    """What a bound asks of latents.

    Attributes:
        loc: means, ``(N, Q)``.
        scale: standard deviations, ``(N, Q)``.
        divergence: from the prior, of each dimension, ``(Q,)``.
    """

    loc: Tensor
    scale: Tensor
    divergence: Tensor


class TimePrior(UniqueModule):
    """Gaussian processes over time for a model's latents.

    There is one of variance one for each dimension.

    Example:
        >>> times = torch.arange(12.0)
        >>> model = SpikeSlabGPLVM(12, 3, num_latents=2, time_prior=TimePrior(times, "matern"))
        >>> loc, scale = model.time_prior.at(torch.tensor([12.0, 13.0]))  # the latents of days to come
        >>> loc.shape
        torch.Size([2, 2])

    Args:
        times: time stamps ``(N,)``, in any order and spacing.
        kernel: ``"rbf"``, ``"matern"`` (3/2), ``"ou"`` (Ornstein-Uhlenbeck, Matern 1/2), or ``"periodic"``.
        sequences: number of the sequence that each data point belongs to, ``(N,)``. Sequences are independent. Default: one.
        period: of the periodic kernel.

    Attributes:
        timescale: length-scales of the dimensions, ``(Q,)``, in units of time. Those of the periodic kernel are relative to a period.
        targets: the posterior's pseudo-observations, ``(N, Q)``.
        spread: their noise deviations, ``(N, Q)``.

    Raises:
        ValueError: if times are not finite, a name is unknown, or a period is missing or not positive.
    """

    times: Tensor
    sequences: Tensor
    timescale: Tensor
    targets: Tensor
    spread: Tensor

    def __init__(self, times: Tensor, kernel: str = "rbf", *, sequences: Tensor | None = None, period: float | None = None) -> None:
        super().__init__()
        times = as_tensors(times)
        if not isinstance(times, Tensor) or times.dim() != 1 or not bool(times.isfinite().all()):
            raise ValueError(f"times must be finite and of shape (N,); got {getattr(times, 'shape', type(times).__name__)}")
        sequences = torch.zeros(len(times), dtype=torch.int64) if sequences is None else as_tensors(sequences)
        if sequences.shape != times.shape:
            raise ValueError(f"sequences must have a number for each of the {len(times)} times; got {tuple(sequences.shape)}")
        if kernel not in _KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(_KERNELS)}; got {kernel!r}")
        if (kernel == "periodic") != (period is not None) or (period is not None and not 0 < period < math.inf):
            raise ValueError(f"a periodic kernel has a period above 0, and no other has one; got kernel={kernel!r}, period={period}")
        self.kernel, self.period = kernel, period
        self.register_buffer("times", times.detach().double())
        self.register_buffer("sequences", sequences.detach())

    def start(self, num_latents: int) -> None:
        """Creates parameters for ``Q`` latents: the prior, with moderate time scales.

        Time scales are a few spacings.
        """
        size = (len(self.times), num_latents)
        ordered = self.times.sort().values.unique()
        spacing = float(ordered.diff().median()) if len(ordered) > 1 else 1.0
        timescale = self.times.new_full((num_latents,), 1.0 if self.kernel == "periodic" else _START_SPACINGS * spacing)
        self.timescale = PyroParam(timescale, constraints.positive)  # type: ignore[assignment]
        self.targets = PyroParam(self.times.new_zeros(size), constraints.real)  # type: ignore[assignment]
        self.spread = PyroParam(self.times.new_ones(size), constraints.positive)  # type: ignore[assignment]

    def correlations(self, times: Tensor, sequences: Tensor) -> Tensor:
        """Returns prior covariances ``(Q, n, N)`` with the data points' latents.

        They are those of latents at some times, without the independent part.
        """
        apart, scale = (times[:, None] - self.times).abs(), self.timescale.double()[:, None, None]
        if self.kernel == "rbf":
            found = torch.exp(-(apart / scale).square() / 2)
        elif self.kernel == "matern":
            ratio = math.sqrt(3) * apart / scale
            found = (1 + ratio) * torch.exp(-ratio)
        elif self.kernel == "ou":
            found = torch.exp(-apart / scale)
        else:
            assert self.period is not None
            found = torch.exp(-2 * (torch.sin(math.pi * apart / self.period) / scale).square())
        return (1 - _OWN) * found * (sequences[:, None] == self.sequences)

    def covariance(self) -> Tensor:
        """Prior covariances of the data points, ``(Q, N, N)``."""
        eye = torch.eye(len(self.times), dtype=self.times.dtype, device=self.times.device)
        return self.correlations(self.times, self.sequences) + _OWN * eye

    def marginals(self) -> Marginals:
        """Returns latents' means and deviations, and their joint posterior's divergence."""
        prior, noise = self.covariance(), self.spread.double().square().mT
        factor, weights = self._solve(prior, noise)
        half = torch.linalg.solve_triangular(factor, prior, upper=False)
        loc = (prior @ weights).squeeze(-1)
        variance = (prior.diagonal(dim1=-2, dim2=-1) - half.square().sum(-2)).clamp(min=1e-12)
        inverse = torch.cholesky_inverse(factor).diagonal(dim1=-2, dim2=-1)
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - noise.log().sum(-1)
        fit = (weights * loc.unsqueeze(-1)).sum((-2, -1))
        divergence = ((inverse * noise).sum(-1) - noise.shape[-1] + fit + log_det) / 2
        return Marginals(loc.mT, variance.sqrt().mT, divergence)

    def at(self, times: Tensor, sequences: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns means and deviations ``(n, Q)`` of latents at other times ``(n,)``.

        They belong to the first sequence unless sequences are given.

        Raises:
            ValueError: if times are not finite or sequences do not fit them.
        """
        times = as_tensors(times).to(self.times)
        sequences = self.sequences.new_zeros(len(times)) + self.sequences[0] if sequences is None else as_tensors(sequences)
        if times.dim() != 1 or sequences.shape != times.shape or not bool(times.isfinite().all()):
            raise ValueError(f"times must be finite, with a sequence each; got shapes {tuple(times.shape)}, {tuple(sequences.shape)}")
        factor, weights = self._solve(self.covariance(), self.spread.double().square().mT)
        cross = self.correlations(times, sequences)
        half = torch.linalg.solve_triangular(factor, cross.mT, upper=False)
        return (cross @ weights).squeeze(-1).mT, (1 - half.square().sum(-2)).clamp(min=1e-12).sqrt().mT

    def set_latents(self, loc: Tensor, scale: Tensor) -> None:
        """Sets pseudo-observations to agree with given means and deviations ``(N, Q)``."""
        self.targets, self.spread = loc.detach().to(self.targets, copy=True), scale.detach().to(self.spread, copy=True)

    # --- distributions over all data points: event (Q, N) ---

    def prior_distribution(self) -> dist.TorchDistribution:
        """The prior of all latents."""
        covariance = self.covariance()
        zeros, root = covariance.new_zeros(covariance.shape[:-1]), stable_cholesky(covariance)
        found: dist.TorchDistribution = dist.MultivariateNormal(zeros, scale_tril=root).to_event(1)
        return found

    def distribution(self, is_used: Tensor) -> dist.TorchDistribution:
        """Returns all latents' posterior in used dimensions ``(*, Q)``.

        In the other dimensions it is the prior.
        """
        prior, noise = self.covariance(), self.spread.double().square().mT
        factor, weights = self._solve(prior, noise)
        half = torch.linalg.solve_triangular(factor, prior, upper=False)
        root, own = stable_cholesky(prior - half.mT @ half, prior.new_ones(())), stable_cholesky(prior)
        chosen = is_used.unsqueeze(-1)
        loc = torch.where(chosen, (prior @ weights).squeeze(-1), 0.0)
        roots = torch.where(chosen.unsqueeze(-1), root, own)
        found: dist.TorchDistribution = dist.MultivariateNormal(loc, scale_tril=roots).to_event(1)
        return found

    def draws(self, is_used: Tensor, noise: Tensor) -> Tensor:
        """Draws ``(*, N, Q)`` from that distribution by standard normal noise.

        The noise is ``(*, N, Q)``, and dimensions in use are ``(*, Q)``.
        """
        found = self.distribution(is_used.to(self.times.device)).base_dist
        moved = (found.scale_tril @ noise.mT.unsqueeze(-1).to(found.loc)).squeeze(-1)
        drawn: Tensor = found.loc + moved
        return drawn.mT.cpu()

    def _solve(self, prior: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the pseudo-observations' covariance factor ``(Q, N, N)`` and whitened values.

        The latter are ``(Q, N, 1)``.
        """
        factor = torch.linalg.cholesky(prior + torch.diag_embed(noise))
        return factor, torch.cholesky_solve(self.targets.double().mT.unsqueeze(-1), factor)
