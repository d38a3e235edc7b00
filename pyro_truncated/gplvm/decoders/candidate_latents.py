r"""Posteriors of new data points over candidate latents.

A truncated mixture replaces one most probable latent.

The latents :math:`z_k` of the training data are the states of the population of every new data point,

.. math:: q_n(k) \propto \left[ \mathcal N(z_k; 0, I) \prod_{d\ \mathrm{seen}} \mathcal N(x_{nd}; m_{kd}, v_k + \sigma_d^2) \right]^{1 / T},

where the decoder predicts :math:`m_k` and :math:`v_k` at :math:`z_k`. Predictions are mixtures over
them. The decoder's noise takes errors of different outputs for independent, which those of pixels
are not, so that its posteriors are too sure. The temperature :math:`T` and the noise of each output
are fitted on some training points. They maximise the density of a hidden half, predicted from the
other half without the point's own latent. Of points of which more is seen the temperature is higher.

Where much of a point is observed, its own most probable latent (:meth:`SASDecoder.infer`) lies
between the candidates. It predicts better than any candidate, the more so the more dimensions there
are. It may join them, with a normal distribution around it
(:mod:`pyro_truncated.gplvm.decoders.latents`) and its own density. It counts as often as a share of
them. Temperature and noise of these predictions are learned in the same way, from latents that are
found without the point itself.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_truncated.gp.active_sets import NearestSet
from pyro_truncated.gplvm.decoders.latents import OwnLatents, climb_among_neighbors, log_joint
from pyro_truncated.utils.arguments import check_count, names_arguments
from pyro_truncated.utils.arrays import as_tensors
from pyro_truncated.utils.devices import device_of

_TEMPERATURES = [2.0 ** (power / 2) for power in range(21)]
_NOISE_FLOOR = 1e-4
# A hundred of 2500: fewer leave errors where all is seen, more make intervals of lower halves of digits too short.
_OWN_SHARE = 0.04
_ROUNDS = 2
# Where more or less is seen than in the half-hidden points intervals cover up to three hundredths less.
_COVER = 0.965
_NEIGHBORS = 100
_STARTS = 3
_MAX_BFGS_STEPS = 30


class Decoder(Protocol):
    """What candidates ask of a decoder, as :class:`.SASDecoder` has it."""

    num_data: int
    num_outputs: int
    loc: Tensor
    kernel: Any

    @property
    def noise_variance(self) -> Tensor:
        """Noise variance of the outputs."""

    def latents(self, x: Tensor) -> Tensor:
        """Latents ``(N, Q)`` of the training data."""

    def predict(self, latents: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Means and variances of outputs at latents."""

    def infer(self, x: Tensor) -> Tensor:
        """The most probable latents of data points."""

    def posterior(self) -> Any:
        """The posterior that predictions are made from."""


class CandidateLatents:
    """Latents of a decoder's training data as candidates for new data.

    Example::

        decoder.condition_(x)
        candidates = CandidateLatents(decoder, x)
        mean, variance = candidates.reconstruct(x_new)       # (M, D) each, noise included; x_new is NaN where pixels are missing
        weights = candidates.infer(x_new)                    # (M, K): posterior over the candidates, no optimisation
        mean, variance = candidates.predict(weights)

    Args:
        decoder: the decoder, conditioned.
        x: its training data ``(N, D)``, NaN where missing.
        most: most candidates, drawn at random.
        calibration: training points that temperature and noise are learned from.
        generator: source of randomness.

    Attributes:
        latents: the candidates, ``(K, Q)``.
        noise: noise variance of each output, ``(D,)``.
        temperature: the temperature :math:`T` of halves, at least 1.
        usual_count: how many entries of halves are seen, on average.
        own_noise: noise variance of each output where own latents join, ``(D,)``.
        own_temperature: the temperature there.
        own_scale: factor of the variances there, which makes 95 % intervals hold 96.5 % of the hidden entries.

    Raises:
        ValueError: if the data do not have the decoder's shape or there are fewer than three.
    """

    @names_arguments
    @torch.no_grad()
    def __init__(
        self, decoder: Decoder, x: Tensor, *, most: int = 5000, calibration: int = 500, generator: torch.Generator | None = None
    ) -> None:
        most, calibration, x = check_count("most", most, least=3), check_count("calibration", calibration), as_tensors(x, decoder.loc)
        if tuple(x.shape) != (decoder.num_data, decoder.num_outputs) or len(x) < 3:
            raise ValueError(f"x must be the decoder's training data, ({decoder.num_data}, {decoder.num_outputs}); got {tuple(x.shape)}")
        if not x.is_floating_point() or not bool((~x.isnan()).any()):
            raise ValueError(f"x must hold real numbers, not only missing ones; got {x.dtype}")
        latents = decoder.latents(x)
        device = device_of(generator)
        order = torch.randperm(len(x), generator=generator, device=device).to(x.device)[:most]
        self.decoder, self.latents = decoder, latents[order]
        mean, variance = decoder.predict(self.latents, noiseless=True)
        self._mean, self._variance = mean.double(), variance.double()
        rows = order[:calibration]
        points, is_hidden = x[rows].double(), torch.rand(x[rows].shape, generator=generator, device=device).to(x.device) < 0.5
        self.usual_count = float((~points.masked_fill(is_hidden, math.nan).isnan()).double().sum(1).mean().clamp(min=1.0))
        self.temperature, self.noise = self._calibrate(points, is_hidden, None)
        own = self._without_themselves(x, rows, is_hidden)
        self.own_temperature, self.own_noise = (self.temperature, self.noise) if own is None else self._calibrate(points, is_hidden, own)
        self.own_scale = 1.0 if own is None else self._scale(points, is_hidden, own)

    @names_arguments
    @torch.no_grad()
    def infer(self, x: Tensor) -> Tensor:
        """Returns posterior probabilities of the candidates, ``(M, K)``.

        Data points are ``(M, D)``, NaN where missing.

        Raises:
            TypeError: if data points are complex.
            ValueError: if data points have another number of outputs, or are infinite.
        """
        x = self._check(x)
        return (self._log_joint(x, self.noise) / self._temper(x, self.temperature)).softmax(1)

    def _temper(self, x: Tensor, temperature: float) -> Tensor:
        r"""Returns temperatures ``(M, 1)`` by how much is seen of data points.

        If errors of any two entries have the correlation :math:`\rho`, the mean of ``n`` has :math:`1 + (n - 1) \rho`
        times the variance of that of independent ones. Where less is seen, the temperature stays that of halves.
        """
        count = (~x.isnan()).double().sum(1, keepdim=True)
        return 1 + (temperature - 1) * (count / self.usual_count).clamp(min=1.0)

    def _check(self, x: Tensor) -> Tensor:
        x = as_tensors(x, self._mean)
        if x.is_complex():
            raise TypeError(f"data points x must be real; got {x.dtype}")
        x = x.to(self._mean)
        if x.dim() != 2 or x.shape[1] != self._mean.shape[1] or bool(x.isinf().any()):
            raise ValueError(f"data points x must be finite or NaN and of shape (M, {self._mean.shape[1]}); got {tuple(x.shape)}")
        return x

    @names_arguments
    @torch.no_grad()
    def reconstruct(self, x: Tensor, *, noiseless: bool = False, block: int = 2000) -> tuple[Tensor, Tensor]:
        """Returns means and variances ``(M, D)`` of all outputs.

        They are given the observed entries of data points ``(M, D)``, NaN where missing.

        The most probable latent of each data point is among its candidates.

        Args:
            x: data points.
            noiseless: whether variances are those of the functions alone.
            block: data points at a time.

        Raises:
            ValueError: as :meth:`infer` does.
            RuntimeError: if the decoder's parameters have changed since.
        """
        parts = [self._reconstruct(rows) for rows in self._check(x).split(check_count("block", block))]
        mean, spread = (torch.cat(moments) for moments in zip(*parts, strict=True))
        return mean, self.own_scale * (spread if noiseless else spread + self.own_noise)

    def _reconstruct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances ``(M, D)`` of the functions of data points."""
        z = self.decoder.infer(x.to(self.latents))
        own = OwnLatents.at(self.decoder.posterior(), z, self.decoder.loc)
        return self._with_own(self._log_joint(x, self.own_noise), x, own)

    def _with_own(self, log_joint: Tensor, x: Tensor, own: OwnLatents) -> tuple[Tensor, Tensor]:
        """As :meth:`_mix`, at the temperature and the noise that were learned."""
        T, noise = self._temper(x, self.own_temperature), self.own_noise
        return self._mix(log_joint / T, own, own.log_joint(x, noise) / T[:, 0], T * own.spread((~x.isnan()).double(), noise))

    def _scale(self, x: Tensor, is_hidden: Tensor, own: OwnLatents) -> float:
        """Returns the factor of variances that calibrates 95 % intervals.

        They then hold a given share of the hidden entries.
        """
        visible, hidden = x.masked_fill(is_hidden, math.nan), is_hidden & ~x.isnan()
        mean, spread = self._with_own(self._log_joint_of_others(visible, self.own_noise), visible, own)
        squares = ((x - mean).square() / (spread + self.own_noise))[hidden]
        return float(squares.kthvalue(max(1, round(_COVER * len(squares)))).values) / 1.96**2 if len(squares) else 1.0

    def _mix(self, log_weights: Tensor, own: OwnLatents, log_own: Tensor, own_spread: Tensor) -> tuple[Tensor, Tensor]:
        """Returns functions' means and variances ``(M, D)`` under candidates, and own normals.

        The normals around own latents are those among the candidates.
        """
        weights, total = log_weights.softmax(1), log_weights.logsumexp(1)
        mean, second = weights @ self._mean, weights @ (self._mean.square() + self._variance)
        share = (log_own + math.log(_OWN_SHARE * len(self.latents)) - total).sigmoid().unsqueeze(1)
        mean = torch.lerp(mean, own.mean, share)
        second = torch.lerp(second, own.mean.square() + own.variance + own_spread, share)
        return mean, (second - mean.square()).clamp(min=0.0)

    @names_arguments
    @torch.no_grad()
    def predict(self, weights: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Returns means and variances ``(M, D)`` under posteriors ``(M, K)``.

        They are those of the data points' outputs, or ``noiseless`` of the functions.
        """
        return self._moments(weights, torch.zeros_like(self.noise) if noiseless else self.noise)

    @names_arguments
    @torch.no_grad()
    def log_density(self, x: Tensor, weights: Tensor, most: int = 50) -> Tensor:
        """Returns each output's log density ``(M, D)`` under the mixture.

        It has the ``most`` probable candidates of each data point.
        """
        chances, index = weights.topk(min(most, weights.shape[1]), 1)
        log_share = (chances / chances.sum(1, keepdim=True)).log()
        total = torch.full_like(x, -math.inf, dtype=torch.float64)
        for share, k in zip(log_share.mT, index.mT, strict=True):
            spread = self._variance[k] + self.noise
            log_prob = -((x - self._mean[k]).square() / spread + (2 * math.pi * spread).log()) / 2
            total = torch.logaddexp(total, share[:, None] + log_prob)
        return total

    def _log_joint(self, x: Tensor, noise: Tensor) -> Tensor:
        """Returns log joint densities ``(M, K)`` of observed entries and candidates.

        They are correct up to constants.
        """
        seen, value = (~x.isnan()).double(), x.nan_to_num(0.0)
        precision = 1 / (self._variance + noise)
        square = value.square() @ precision.mT - 2 * value @ (precision * self._mean).mT + seen @ (precision * self._mean.square()).mT
        return -(square - seen @ precision.log().mT + self.latents.double().square().sum(1)) / 2

    def _moments(self, weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean = weights @ self._mean
        second = weights @ (self._mean.square() + self._variance)
        return mean, (second - mean.square()).clamp(min=0.0) + noise

    def _log_joint_of_others(self, visible: Tensor, noise: Tensor) -> Tensor:
        """As :meth:`_log_joint`, of the first candidates without their own latents."""
        found = self._log_joint(visible, noise)
        found.diagonal()[: len(visible)] = -math.inf
        return found

    def _first_noise(self) -> Tensor:
        return self.decoder.noise_variance.detach().double().expand(self._mean.shape[1])

    def _calibrate(self, x: Tensor, is_hidden: Tensor, own: OwnLatents | None) -> tuple[float, Tensor]:
        """Temperature and noise learned from data points that are the first candidates."""
        visible, hidden = x.masked_fill(is_hidden, math.nan), (is_hidden & ~x.isnan()).double()
        temperature, noise, nothing = 1.0, self._first_noise(), torch.zeros_like(self._mean[0])
        for _ in range(_ROUNDS):
            logs, temperatures = self._log_joint_of_others(visible, noise), [self._temper(visible, T) for T in _TEMPERATURES]
            if own is None:
                moments = [self._moments((logs / T).softmax(1), nothing) for T in temperatures]
            else:
                log_own, spread = own.log_joint(visible, noise), own.spread((~visible.isnan()).double(), noise)
                moments = [self._mix(logs / T, own, log_own / T[:, 0], T * spread) for T in temperatures]
            found = [_fitted_noise(x.nan_to_num(0.0), hidden, mean, spread) for mean, spread in moments]
            best = int(torch.stack([score for score, _ in found]).argmax())
            temperature, noise = _TEMPERATURES[best], found[best][1]
        return temperature, noise

    def _without_themselves(self, x: Tensor, rows: Tensor, is_hidden: Tensor) -> OwnLatents | None:
        """Returns own latents of half-hidden training points, given the closest others.

        ``None`` where few of the data are complete.
        """
        complete = ~x.isnan().any(1)
        if 2 * int(complete.sum()) < len(x):
            return None
        decoder, visible = self.decoder, x[rows].masked_fill(is_hidden, math.nan)
        others = NearestSet(
            decoder.latents(x)[complete], x[complete] - decoder.loc, decoder.kernel, decoder.noise_variance.detach(), _NEIGHBORS
        )
        own_row = torch.where(complete, complete.cumsum(0) - 1, -1)[rows]
        best = self._log_joint_of_others(visible.double(), self._first_noise()).topk(min(_STARTS, len(self.latents) - 1), 1).indices
        starts = self.latents[best].movedim(1, 0)
        z = climb_among_neighbors(others, log_joint, visible - decoder.loc, starts, _MAX_BFGS_STEPS, 0.05, own_row)
        return OwnLatents.at(others, z, decoder.loc, own_row)


def _fitted_noise(x: Tensor, hidden: Tensor, mean: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log density of hidden entries, and each output's noise.

    The noise is estimated from the errors.
    """
    error, counts = (x - mean).square() * hidden, hidden.sum(0).clamp(min=1.0)
    noise = ((error - spread * hidden).sum(0) / counts).clamp(min=_NOISE_FLOOR * float(error.sum() / hidden.sum()))
    total = spread + noise
    return -((error / total + hidden * total.log()).sum() / 2), noise
