"""Gaussian process decoders trained by conditioning each minibatch on a random active set."""

from __future__ import annotations

import dataclasses
import math
from typing import Self

import torch
from pyro.contrib.gp import kernels
from torch import Tensor

from pyro_truncated.distributed.owned_rows import as_shard_of, rows_of_everyone
from pyro_truncated.gp.active_sets.splits import Choose, least_variance
from pyro_truncated.gplvm.decoders.candidate_latents import CandidateLatents
from pyro_truncated.gplvm.decoders.kept_points import KeptPoints, Posterior, checksum, is_same, keep_neighbors, keep_points
from pyro_truncated.gplvm.decoders.latents import climb
from pyro_truncated.gplvm.decoders.sas_training import SASTraining
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.counts import check_count
from pyro_truncated.utils.former_spellings import takes_noise


class SASDecoder(SASTraining):
    r"""Gaussian process latent variable model trained with stochastic active sets.

    Latents :math:`z_n \sim \mathcal N(0, I)` in ``latent_dim`` dimensions are mapped to ``num_outputs`` outputs by independent Gaussian
    processes that share kernel and noise. A training step takes a minibatch, splits it at random into an active set ``A`` and the rest
    ``R``, and follows the gradient of

    .. math:: \mathbb E_q\Bigl[\log p(x_A \mid z_A) + \tfrac{N - |A|}{|R|} \sum_{n \in R} \log p(x_n \mid x_A, z)\Bigr]
        - \mathrm{KL}_A - \tfrac{N - |A|}{|R|} \mathrm{KL}_R,

    by :class:`~pyro.infer.SVI` on :meth:`model` and :meth:`guide`, with any Pyro optimiser. The deterministic decoder has point masses
    for ``q`` (MAP latents, the KL terms are prior log densities), the Bayesian one :math:`q(z_n) = \mathcal N(\mu_n,
    \mathrm{diag}\,\sigma_n^2)`. Either has free latents, a row per data point, or an ``encoder``.

    .. note:: For each active set the objective bounds the evidence of the model in which the rest is independent given ``A``, and on
        average the evidence of the mixture of these models over active sets. It is not a bound of the full Gaussian process's evidence.

    An encoder may look at the active set too: then :math:`q` depends on ``A``, for each of which the objective is a bound as before, with
    the same weights. It must not look at the rest of the minibatch (as batch normalisation does): then nothing is bounded.

    Example::

        from pyro_truncated.gp import UniformSplits

        decoder = SASDecoder(len(x), x.shape[1]).initialize(x)
        svi = SVI(decoder.model, decoder.guide, Adam(decoder.learning_rates(0.03, 0.06)), Trace_ELBO())
        splits = UniformSplits(len(x), 1000, 200)
        for epoch in range(100):
            if epoch < 60 and epoch % 2:
                decoder.relocate_(x)
            for split in splits.epoch(epoch):
                svi.step(x, split)
        decoder.condition_(x)  # decoder.fit(x) is all of this, with a learning rate that falls
        mean, variance = decoder.reconstruct(x_new)  # x_new is NaN where entries are missing

    Data may be shared out to several processes (:func:`pyro_truncated.distributed.shard`). Each then holds the latents of its own data
    points; owners send the active ones of a step, and get their gradients back. A step of :class:`~pyro.infer.SVI` takes
    :class:`~pyro_truncated.distributed.AllReduced` and :class:`~pyro_truncated.distributed.SummedELBO`; :meth:`fit` does it by itself.

    Args:
        num_data: number of data points ``N``, in all processes.
        num_outputs: number of outputs ``D``.
        latent_dim: dimension ``Q`` of the latent space.
        num_active: size of the active set where a training step is not given a split; default: 200, but at most half of the minibatch.
        batch_size: size of the minibatch where a training step is not given a split; default: 1000, or all data if these are fewer.
        bayesian: whether ``q`` is a normal distribution rather than a point mass.
        encoder: maps data points ``(B, D)`` to latents ``(B, Q)``, or if Bayesian to means and softplus-inverse standard deviations
            ``(B, 2Q)``. Missing entries come to it as the mean. ``None`` for free latents.
        encoder_sees_active: call the encoder as ``encoder(x, x_active)``. Outside training it is shown the first ``num_active`` complete
            data points.
        kernel: kernel of :mod:`pyro.contrib.gp.kernels` over ``Q`` inputs; default: RBF with a length-scale per dimension.

    Raises:
        ValueError: if sizes are not positive or do not fit, or the kernel is over another number of inputs.

    Reference:
        Moreno-Muñoz, Feldager and Hauberg, "Revisiting Active Sets for Gaussian Process Decoders", 2022.
    """

    _candidates: CandidateLatents | None = None
    _training_data: Tensor | None = None

    @names_arguments
    @takes_arrays
    def encode(self, x: Tensor) -> Tensor:
        """The encoder's latents ``(M, Q)`` of any data points ``(M, D)``.

        Raises:
            ValueError: if there is no encoder; :meth:`infer` needs none.
            RuntimeError: if the encoder looks at an active set, before :meth:`condition_`.
        """
        if self.encoder is None:
            raise ValueError("a decoder with free latents has no encoder; use infer(x)")
        self._check_points(x)
        active = x[:1]
        if self.encoder_sees_active:
            examples = self._kept_points().examples
            assert examples is not None
            active = examples.to(x)
        with torch.no_grad():
            return self._encode(x, active)[0]

    @names_arguments
    @takes_arrays
    def condition_(
        self,
        x: Tensor,
        size: int | None = None,
        *,
        projected: bool | None = None,
        num_neighbors: int | None = None,
        choose: Choose | None = None,
    ) -> Self:
        """Keeps what predictions condition on: all training data ``(N, D)``, ``size`` of them, or for each latent those closest to it.

        Call it again after more training. Incomplete data points cost a factorisation for each pattern of missing entries, so complete
        ones come first; where these are fewer than ``size``, the most complete others fill up.

        With none of the options all data are kept if there are at most 2000 and all are complete. Of more complete ones, 1000 are
        projected on in up to four latent dimensions, and in more each latent is predicted from the 100 closest to it: there data are too
        sparse for a projection. Otherwise the complete ones are kept, no more than 1000, filled up to 300.

        Args:
            x: the training data.
            size: number of points to keep, chosen to leave the least variance.
            projected: condition on *all* complete data points, through their projection on the chosen ones
                (:class:`~pyro_truncated.gp.active_sets.projected_set.ProjectedSet`).
            num_neighbors: condition each prediction on so many complete data points, the closest to its latent
                (:class:`~pyro_truncated.gp.active_sets.nearest_set.NearestSet`).
            choose: called as ``choose(kernel, latents, size)``; default :func:`~pyro_truncated.gp.active_sets.splits.least_variance`.

        Raises:
            ValueError: if the data have another shape, a number is not positive, no data point is complete for a projection or as a
                neighbour, or ``num_neighbors`` is given beside ``size`` or ``projected``.
        """
        self._check_data(x)
        with torch.no_grad():
            latents, outputs = rows_of_everyone(self.latents(x), x), as_shard_of(x - self.loc, x)
            if num_neighbors is None:
                kept = keep_points(self.kernel, latents, outputs, size, projected, choose or self._least_variance)
            elif size is None and not projected:
                kept = keep_neighbors(latents, outputs, check_count("num_neighbors", num_neighbors))
            else:
                raise ValueError("num_neighbors are the closest of all complete data points: leave size and projected out")
            self._kept = self._sealed(kept, x)
        self._training_data, self._candidates = x, None
        return self

    def _sealed(self, kept: KeptPoints, x: Tensor) -> KeptPoints:
        """With what an encoder needs, and a checksum of the parameters that it belongs to."""
        examples = self._examples(x).clone() if self.encoder_sees_active else None
        return dataclasses.replace(kept, examples=examples, checksum=checksum(self))

    def _least_variance(self, kernel: kernels.Kernel, latents: Tensor, size: int) -> Tensor:
        return least_variance(kernel, latents, size, self.noise_variance.detach())

    def _kept_points(self) -> KeptPoints:
        if self._kept is None:
            raise RuntimeError("call condition_(x) first: it keeps the data points that predictions condition on")
        assert self._kept.checksum is not None
        if not is_same(self._kept.checksum, checksum(self)):
            raise RuntimeError("the decoder has changed since condition_(x); call it again to predict with the present parameters")
        return self._kept

    def posterior(self) -> Posterior:
        """The Gaussian process posterior that predictions are made from; it predicts deviations from ``loc``.

        Raises:
            RuntimeError: before :meth:`condition_`, or if parameters have changed since.
        """
        kept = self._kept_points()
        with torch.no_grad():
            return kept.posterior(self.kernel, self.noise_variance.detach())

    @names_arguments
    @takes_noise
    @takes_arrays
    def predict(self, latents: Tensor, *, noiseless: bool = False, block: int = 2000) -> tuple[Tensor, Tensor]:
        """Predictive means ``(M, D)`` and variances ``(M, 1)`` of outputs at latents ``(M, Q)``; ``noiseless`` of the function."""
        block = check_count("block", block)
        self._check_places(latents)
        posterior = self.posterior()
        with torch.no_grad():
            pieces = [posterior.predict(piece, noiseless=noiseless) for piece in latents.split(block)]
        means, variances = (torch.cat(moments) for moments in zip(*pieces, strict=True))
        if not bool(means.isfinite().all()):
            raise ValueError("latents are so far away that predictions at them are not finite")
        return means + self.loc, variances

    @names_arguments
    @takes_arrays
    def infer(self, x: Tensor, *, starts: int = 3, steps: int = 30, lr: float = 0.05, block: int = 1000) -> Tensor:
        r"""Latents ``(M, Q)`` of data points, new or not, that maximise :math:`\log p(x \mid z) + \log \mathcal N(z; 0, I)`.

        Entries that are NaN are left out. Every point starts from the kept latents that explain it best, and from the encoder's if there is
        one and no entry is missing; after a few quasi-Newton steps from each start only the best goes on.

        Args:
            x: data points ``(M, D)``.
            starts: number of kept latents to start from.
            steps: most quasi-Newton steps; points that have arrived take no more.
            lr: length of the first step, in units of the latent space.
            block: data points at a time.
        """
        self._check_points(x)
        starts, steps, block = check_count("starts", starts), check_count("steps", steps, least=0), check_count("block", block)
        if not isinstance(lr, float | int) or not 0 < lr < math.inf:
            raise ValueError(f"lr must be a positive number; got {lr!r}")
        own = None if self.encoder is None or bool(x.isnan().any()) else self.encode(x)
        posterior, found = self.posterior(), []
        for rows in torch.arange(len(x), device=x.device).split(block):
            with torch.no_grad():
                begin = self._best_candidates(posterior, x[rows], starts)
            begin = begin if own is None else torch.cat([begin, own[rows].unsqueeze(0)])
            found.append(climb(posterior, self._log_joint, x[rows], begin, steps, lr))
        return torch.cat(found)

    def reconstruct(self, x: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Calibrated means and variances ``(M, D)`` of all outputs of data points, given what is seen of them.

        Latents are averaged over: those of the training data, and the data point's own, see :class:`.CandidateLatents`. Temperature and
        noise are learned from training data whose halves predict each other; the first call after :meth:`condition_` does it.
        Variances of :meth:`predict` at latents of :meth:`infer` leave out that these are uncertain.

        Example::

            mean, variance = decoder.fit(x).reconstruct(x_new)
            low, high = mean - 1.96 * variance.sqrt(), mean + 1.96 * variance.sqrt()  # hold 95 % of what is missing

        Args:
            x: data points ``(M, D)``, NaN where missing.
            noiseless: whether variances are those of the functions alone.

        Raises:
            RuntimeError: before :meth:`condition_`, after loading a state (call it again), or if parameters have changed since.
            ValueError: for data points of another shape, or infinite ones.
        """
        self._kept_points()
        if self._training_data is None:
            raise RuntimeError("call condition_(x) first: reconstructions are calibrated on the training data, which states do not hold")
        if self._candidates is None:
            generator = torch.Generator(self._training_data.device).manual_seed(0)
            self._candidates = CandidateLatents(self, self._training_data, generator=generator)
        mean, variance = self._candidates.reconstruct(x, noiseless=noiseless)
        return mean.to(self.loc), variance.to(self.loc)

    def sample(self, num: int) -> Tensor:
        """New data points ``(num, D)``: latents from the prior, then the predictive mean and noise-free function values around it."""
        z = torch.randn(check_count("num", num), self.latent_dim, dtype=self.loc.dtype, device=self.loc.device)
        mean, variance = self.predict(z, noiseless=True)
        return mean + variance.sqrt() * torch.randn_like(mean)

    def get_extra_state(self) -> dict[str, Tensor]:
        """What :meth:`condition_` kept, for ``state_dict()``."""
        return {} if self._kept is None else self._kept.state()

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restores what :meth:`condition_` kept."""
        self._kept = KeptPoints(**state) if state else None
        self._training_data = self._candidates = None
