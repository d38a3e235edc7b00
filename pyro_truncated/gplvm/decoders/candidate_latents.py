r"""Posteriors of new data points over candidate latents: a truncated mixture in place of one most probable latent.

The latents :math:`z_k` of the training data are the states of the population of every new data point,

.. math:: q_n(k) \propto \left[ \mathcal N(z_k; 0, I) \prod_{d\ \mathrm{seen}} \mathcal N(x_{nd}; m_{kd}, v_k + \sigma_d^2) \right]^{1 / T},

where the decoder predicts :math:`m_k` and :math:`v_k` at :math:`z_k`. Predictions are mixtures over them. The decoder's noise takes errors
of different outputs for independent, which those of pixels are not, so that its posteriors are too sure. The temperature :math:`T` and the
noise of each output are therefore those under which the hidden half of some training points has the highest density, predicted from the
other half with the point's own latent left out.

Where much of a point is seen, its own most probable latent (:meth:`SASDecoder.infer`) lies between the candidates and predicts better than
any. It may join them, with a density of its own, and counts as often as a share of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_truncated.gplvm.decoders.sas_decoder import SASDecoder
from pyro_truncated.utils.arrays import as_tensors
from pyro_truncated.utils.counts import check_count

_TEMPERATURES = [2.0 ** (power / 2) for power in range(21)]
_NOISE_FLOOR = 1e-4
# A hundred of 2500: fewer leave errors where all is seen, more make intervals of lower halves of digits too short.
_OWN_SHARE = 0.04
_ROUNDS = 2


class CandidateLatents:
    """Latents of the training data of a decoder as candidates for those of new data points.

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
        calibration: number of training points that temperature and noise are learned from, drawn at random.
        generator: source of randomness.

    Attributes:
        latents: the candidates, ``(K, Q)``.
        noise: noise variance of each output, ``(D,)``.
        temperature: the temperature :math:`T`, at least 1.

    Raises:
        ValueError: if the data do not have the decoder's shape or there are fewer than three.
    """

    @torch.no_grad()
    def __init__(
        self, decoder: SASDecoder, x: Tensor, *, most: int = 5000, calibration: int = 1000, generator: torch.Generator | None = None
    ) -> None:
        most, calibration, x = check_count("most", most, least=3), check_count("calibration", calibration), as_tensors(x, decoder.loc)
        if tuple(x.shape) != (decoder.num_data, decoder.num_outputs) or len(x) < 3:
            raise ValueError(f"x must be the decoder's training data, ({decoder.num_data}, {decoder.num_outputs}); got {tuple(x.shape)}")
        latents = decoder.latents(x)
        order = torch.randperm(len(x), generator=generator, device=None if generator is None else generator.device).to(x.device)[:most]
        self.decoder, self.latents = decoder, latents[order]
        mean, variance = decoder.predict(self.latents, noiseless=True)
        self._mean, self._variance = mean.double(), variance.double()
        self.noise = decoder.noise_variance.detach().double().expand(mean.shape[1]).clone()
        self.temperature = 1.0
        rows = order[:calibration]
        self._calibrate(x[rows].double(), generator)

    @torch.no_grad()
    def infer(self, x: Tensor) -> Tensor:
        """Posterior probabilities of the candidates for data points ``(M, D)``, NaN where missing: ``(M, K)``.

        Raises:
            ValueError: if data points have another number of outputs, or are infinite.
        """
        return (self._log_joint(self._checked(x)) / self.temperature).softmax(1)

    def _checked(self, x: Tensor) -> Tensor:
        x = as_tensors(x, self._mean).to(self._mean)
        if x.dim() != 2 or x.shape[1] != self._mean.shape[1] or bool(x.isinf().any()):
            raise ValueError(f"data points must be finite or NaN and of shape (M, {self._mean.shape[1]}); got {tuple(x.shape)}")
        return x

    @torch.no_grad()
    def reconstruct(self, x: Tensor, *, noiseless: bool = False, block: int = 2000) -> tuple[Tensor, Tensor]:
        """Means and variances ``(M, D)`` of all outputs of data points ``(M, D)``, NaN where missing, given what is seen of them.

        The most probable latent of each data point is among its candidates.

        Args:
            x: data points.
            noiseless: whether variances are those of the functions alone.
            block: data points at a time.

        Raises:
            ValueError: as :meth:`infer` does.
            RuntimeError: if the decoder's parameters have changed since.
        """
        parts = [self._reconstruct(rows) for rows in self._checked(x).split(check_count("block", block))]
        mean, second = (torch.cat(moments) for moments in zip(*parts, strict=True))
        return mean, (second - mean.square()).clamp(min=0.0) + (0.0 if noiseless else self.noise)

    def _reconstruct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """First and second moments ``(M, D)`` of the functions at the latents of data points."""
        log_weights = self._log_joint(x) / self.temperature
        weights, total = log_weights.softmax(1), log_weights.logsumexp(1)
        mean, second = weights @ self._mean, weights @ (self._mean.square() + self._variance)
        z = self.decoder.infer(x.to(self.latents))
        own, variance = (moment.double() for moment in self.decoder.predict(z, noiseless=True))
        log_own = self._log_joint_at(x, own, variance, z.double()) / self.temperature
        share = (log_own + math.log(_OWN_SHARE * len(self.latents)) - total).sigmoid().unsqueeze(1)
        return torch.lerp(mean, own, share), torch.lerp(second, own.square() + variance, share)

    def _log_joint_at(self, x: Tensor, mean: Tensor, variance: Tensor, z: Tensor) -> Tensor:
        """Log joint densities ``(M,)`` of what is seen of data points and of a latent of each, up to the same constants."""
        spread = variance + self.noise
        terms = torch.where(x.isnan(), 0.0, (x - mean).square() / spread + spread.log())
        return -(terms.sum(1) + z.square().sum(1)) / 2

    @torch.no_grad()
    def predict(self, weights: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Means and variances ``(M, D)`` of the outputs of data points under posteriors ``(M, K)``; ``noiseless`` of the functions."""
        return self._moments(weights, torch.zeros_like(self.noise) if noiseless else self.noise)

    @torch.no_grad()
    def log_density(self, x: Tensor, weights: Tensor, most: int = 50) -> Tensor:
        """Log density of each output ``(M, D)`` under the mixture of the ``most`` probable candidates of each data point."""
        chances, index = weights.topk(min(most, weights.shape[1]), 1)
        log_share = (chances / chances.sum(1, keepdim=True)).log()
        total = torch.full_like(x, -math.inf, dtype=torch.float64)
        for share, k in zip(log_share.mT, index.mT, strict=True):
            spread = self._variance[k] + self.noise
            log_prob = -((x - self._mean[k]).square() / spread + (2 * math.pi * spread).log()) / 2
            total = torch.logaddexp(total, share[:, None] + log_prob)
        return total

    def _log_joint(self, x: Tensor) -> Tensor:
        """Log joint densities ``(M, K)`` of what is seen of data points and of every candidate, up to constants."""
        seen, value = (~x.isnan()).double(), x.nan_to_num(0.0)
        precision = 1 / (self._variance + self.noise)
        square = value.square() @ precision.mT - 2 * value @ (precision * self._mean).mT + seen @ (precision * self._mean.square()).mT
        return -(square - seen @ precision.log().mT + self.latents.double().square().sum(1)) / 2

    def _moments(self, weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean = weights @ self._mean
        second = weights @ (self._mean.square() + self._variance)
        return mean, (second - mean.square()).clamp(min=0.0) + noise

    def _calibrate(self, x: Tensor, generator: torch.Generator | None) -> None:
        """Learns temperature and noise from data points that are the first candidates."""
        device = None if generator is None else generator.device
        is_hidden = torch.rand(x.shape, generator=generator, device=device).to(x.device) < 0.5
        visible, hidden = x.masked_fill(is_hidden, math.nan), (is_hidden & ~x.isnan()).double()
        for _ in range(_ROUNDS):
            log_joint = self._log_joint(visible)
            log_joint.diagonal()[: len(x)] = -math.inf  # not its own latent
            found = [self._at_temperature(log_joint / temperature, x.nan_to_num(0.0), hidden) for temperature in _TEMPERATURES]
            best = int(torch.stack([score for score, _ in found]).argmax())
            self.temperature, self.noise = _TEMPERATURES[best], found[best][1]

    def _at_temperature(self, log_weights: Tensor, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log density of the hidden entries, and the noise of each output that their errors speak for."""
        mean, spread = self._moments(log_weights.softmax(1), torch.zeros_like(self.noise))
        error, counts = (x - mean).square() * hidden, hidden.sum(0).clamp(min=1.0)
        noise = ((error - spread * hidden).sum(0) / counts).clamp(min=_NOISE_FLOOR * float(error.sum() / hidden.sum()))
        total = spread + noise
        return -((error / total + hidden * total.log()).sum() / 2), noise
