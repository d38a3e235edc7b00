"""Gaussian process decoders trained on stochastic active sets."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Self, cast

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.contrib.gp import kernels
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.nn import PyroParam, pyro_method
from pyro.optim import ClippedAdam
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_truncated.distributed import collectives
from pyro_truncated.distributed.launch import AllReduced, SummedELBO
from pyro_truncated.distributed.shards import (
    Portion,
    as_shard_like,
    gather_all_rows,
    own_positions,
    own_rows,
    propagate_shard_errors,
    rows_at,
    shard_sum,
    synchronize_generator,
    total_rows,
)
from pyro_truncated.gp.active_set_distributions import ActiveSetGaussianProcess
from pyro_truncated.gp.active_sets import (
    ActiveSet,
    Choose,
    Split,
    UniformSplits,
    least_variance,
    some_positions,
    split_weights,
)
from pyro_truncated.gp.data_kernels.protocol import check_kernel
from pyro_truncated.gp.kernels import refuse_foreign_kernel
from pyro_truncated.gplvm.decoders.conditioning_set import ConditioningSet, Posterior, checksum, neighbors_set, select_conditioning_set
from pyro_truncated.gplvm.decoders.latents import (
    CandidateLatents,
    SharedSplit,
    best_candidates,
    gather_latents,
    join_latents,
    log_joint,
    maximize,
)
from pyro_truncated.gplvm.principal_components import principal_components
from pyro_truncated.utils.arguments import check_count, check_counts, check_learning_rate, describe, leaves_inference_mode, names_arguments
from pyro_truncated.utils.arrays import (
    check_dense_real,
    remembers_columns,
    takes_arrays,
    warn_about_noise_of_columns,
    warn_if_rounded,
)
from pyro_truncated.utils.console import note_once, progress_bar
from pyro_truncated.utils.devices import generator_device
from pyro_truncated.utils.parameter_store import UniqueModule, random_numbers_from

_NOISE_FLOOR = {torch.float64: 1e-8}


_HYPERPARAMETERS = {"kernel", "noise", "width"}


# Share of the epochs, from the first one, in which latents may be relocated.
_RELOCATION_SHARE = 0.6


class SASDecoder(UniqueModule):
    r"""Gaussian process latent variable model trained with stochastic active sets.

    Latents :math:`z_n \sim \mathcal N(0, I)` in ``latent_dim`` dimensions are mapped to ``num_outputs`` outputs by independent Gaussian
    processes that share kernel and noise. A training step takes a minibatch, splits it at random into an active set ``A`` and the rest
    ``R``, and follows the gradient of

    .. math:: \mathbb E_q\Bigl[\log p(x_A \mid z_A) + \tfrac{N - |A|}{|R|} \sum_{n \in R} \log p(x_n \mid x_A, z)\Bigr]
        - \mathrm{KL}_A - \tfrac{N - |A|}{|R|} \mathrm{KL}_R,

    by :class:`~pyro.infer.SVI` on :meth:`model` and :meth:`guide`. The deterministic decoder has point masses for ``q``, the Bayesian one
    :math:`q(z_n) = \mathcal N(\mu_n, \mathrm{diag}\,\sigma_n^2)`. Latents are free, a row per data point, or come from an ``encoder``.

    The objective bounds the evidence of the model in which the rest is independent given ``A``, not that of the full process.

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

    Args:
        num_data: number of data points ``N``, in all processes.
        num_outputs: number of outputs ``D``.
        latent_dim: dimension ``Q`` of the latent space.
        num_active: size of the active set of a step without a split. Default: 200, at most half.
        batch_size: size of the minibatch of a step without a split. Default: 1000, or all data.
        bayesian: whether ``q`` is a normal distribution rather than a point mass.
        encoder: maps data points ``(B, D)`` to latents ``(B, Q)``, or if Bayesian to means and softplus-inverse deviations, ``2Q``
            columns.
        encoder_sees_active: call the encoder as ``encoder(x, x_active)``.
        kernel: kernel of :mod:`pyro.contrib.gp.kernels` over ``Q`` inputs. Default: RBF.

    Attributes:
        loc: means of the outputs, ``(D,)``, a buffer.
        kernel: the kernel over the latents.
        noise: noise variance but for a floor, see :attr:`noise_variance`.
        z_loc: free latents ``(N, Q)``, or their means.
        z_scale: their standard deviations ``(N, Q)``, if Bayesian.
        portion: the data points that the latents are of, ``None`` for all.

    Raises:
        ValueError: if sizes are not positive or do not fit, or the kernel is over another number of inputs.

    Reference:
        Moreno-Muñoz, Feldager and Hauberg, "Revisiting Active Sets for Gaussian Process Decoders", 2022.
    """

    loc: Tensor
    # Descriptors of Pyro: tensors when read, parameters when set.
    noise: Any
    z_loc: Any
    z_scale: Any
    portion: Portion | None = None
    _conditioning_points: ConditioningSet | None = None
    _candidates: CandidateLatents | None = None
    _training_data: Tensor | None = None

    @names_arguments
    def __init__(
        self,
        num_data: int,
        num_outputs: int,
        latent_dim: int = 2,
        *,
        num_active: int | None = None,
        batch_size: int | None = None,
        bayesian: bool = False,
        encoder: nn.Module | None = None,
        encoder_sees_active: bool = False,
        kernel: kernels.Kernel | None = None,
    ) -> None:
        super().__init__()
        num_data, num_outputs, latent_dim = check_counts(num_data=num_data, num_outputs=num_outputs, latent_dim=latent_dim)
        refuse_foreign_kernel(kernel)
        if kernel is not None and kernel.input_dim != latent_dim:
            raise ValueError(f"kernel must have input_dim={latent_dim}, the number of latent dimensions; got {kernel.input_dim}")
        if kernel is not None:
            like = next(kernel.parameters(), torch.zeros(()))
            check_kernel(kernel, torch.randn(50, latent_dim, generator=torch.Generator().manual_seed(0)).to(like))
        self.num_data, self.num_outputs, self.latent_dim = num_data, num_outputs, latent_dim
        self.batch_size = min(1000, num_data) if batch_size is None else check_count("batch_size", batch_size)
        self.num_active = min(200, self.batch_size // 2) if num_active is None else check_count("num_active", num_active, least=0)
        split_weights(self.batch_size, self.num_active, num_data)
        self.bayesian, self.encoder, self.encoder_sees_active = bayesian, encoder, encoder_sees_active
        self.kernel = kernels.RBF(latent_dim, torch.tensor(1.0), torch.ones(latent_dim)) if kernel is None else kernel
        self.noise = PyroParam(torch.tensor(0.5), constraints.positive)
        self.register_buffer("loc", torch.zeros(num_outputs))
        if encoder is None:
            self.z_loc = PyroParam(torch.randn(num_data, latent_dim), event_dim=1)
            if bayesian:
                self.z_scale = PyroParam(torch.full((num_data, latent_dim), 0.1), constraints.positive, event_dim=1)

    @names_arguments
    @remembers_columns("x")
    @takes_arrays
    def initialize(self, x: Tensor, steps: int = 300, *, latents: Tensor | None = None) -> Self:
        """Initialises from the data ``(N, D)``: moments, and principal components as latents.

        Args:
            x: the training data.
            steps: how long an encoder learns to imitate the first latents. With 0 it does not.
            latents: first latents ``(N, Q)`` in place of the principal components, such as those of another decoder.

        Raises:
            ValueError: if the data or the latents have another shape, the data are infinite or do not vary, or an output is never observed.

        Warns:
            UserWarning: if one noise does not suit the outputs: units are unlike, or most do not vary.
        """
        self._conditioning_points = None
        steps = check_count("steps", steps, least=0)
        with propagate_shard_errors(x):
            given, x = x, self._check_data(x)
            warn_if_rounded(given, self.loc.dtype)
            if latents is not None:
                if tuple(latents.shape) != (self.num_data, self.latent_dim):
                    raise ValueError(f"latents must have shape ({self.num_data}, {self.latent_dim}); got {tuple(latents.shape)}")
                self._check_places(latents)
            self.portion = join_latents(self, self.portion, x)
            with torch.no_grad():
                features, variance = self._start(x)
                if isinstance(self.kernel, kernels.Isotropy):
                    self.kernel.variance = cast("Any", variance.to(self.loc))
                # A copy, or training would move the latents of whom they came from.
                scores = principal_components(features, self.latent_dim) if latents is None else own_rows(latents, features).clone()
                scores = scores.to(self.loc)
                if self.encoder is None:
                    self.z_loc = scores
            if self.encoder is not None and steps:
                self._imitate(x, scores, steps)
        return self

    def _start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sets means and noise; returns what latents start from, and a variance."""
        observed, total = ~x.isnan(), shard_sum(x)
        sums, counts = total([x.nansum(0), observed.sum(0)])
        if not bool((counts > 0).all()):
            raise ValueError(f"each output of x must be observed at least once; output {int((counts == 0).nonzero()[0])} has only NaN")
        self.loc.copy_(sums / counts)
        deviation = torch.where(observed, x - self.loc, 0.0)
        squares, of_columns = total([deviation.square().sum(), deviation.square().sum(0)])
        variance = squares / counts.sum()
        if not float(variance) > 0:
            least = torch.finfo(variance.dtype).tiny ** 0.5
            raise ValueError(
                f"the data x must vary, by {least:.0e} at least, as squares are taken in {variance.dtype}; got a variance of 0, from "
                f"{float(x.nan_to_num(math.inf).min()):g} to {float(x.nan_to_num(-math.inf).max()):g}"
            )
        warn_about_noise_of_columns("the data", self.loc, of_columns / counts)
        self.noise = 0.5 * variance.to(self.loc)
        return as_shard_like(deviation, x), variance

    @staticmethod
    def _check_places(latents: Tensor) -> None:
        if not latents.is_floating_point():
            raise TypeError(f"latents must be floating point; got {latents.dtype}")
        if not bool(latents.isfinite().all()):
            raise ValueError(f"latents must be finite; got {describe(latents)}")

    def _imitate(self, x: Tensor, scores: Tensor, steps: int) -> None:
        assert self.encoder is not None
        optimizer = torch.optim.Adam(self.encoder.parameters(), lr=3e-3)
        for _ in range(steps):
            rows = torch.randperm(self.num_data, device=x.device)[:256]
            batch = rows_at(x, rows)
            loc, scale = self._encode(batch, batch[: max(1, len(rows) // 4)])
            loss = (loc - rows_at(as_shard_like(scores, x), rows)).square().mean()
            if scale is not None:
                # Deviations start from a tenth of the prior one, as without an encoder.
                loss = loss + (scale.log() - torch.tensor(0.1).log()).square().mean()
            loss.backward()
            optimizer.step()
            # SVI adds to what gradient there is.
            optimizer.zero_grad()

    def learning_rates(self, latents: float = 1e-2, hyperparameters: float = 1e-2) -> Callable[[str], dict[str, float]]:
        """Learning rates for a Pyro optimiser: latents (or encoder), kernel and noise.

        The noise decides how calibrated the predictions are and converges late; it is best given at least 1e-2.
        """
        return lambda name: {"lr": latents if _HYPERPARAMETERS.isdisjoint(name.split(".")) else hyperparameters}

    def _check_data(self, x: Tensor) -> Tensor:
        """Returns training data as floats; refuses other shapes and infinite values."""
        self._check_shape(x)
        return self._check_points(x)

    def _check_shape(self, x: Tensor) -> None:
        shape = (total_rows(x), *x.shape[1:])
        if shape != (self.num_data, self.num_outputs):
            everywhere = " in all processes" if shape[0] > len(x) else ""
            raise ValueError(f"data x must have shape ({self.num_data}, {self.num_outputs}){everywhere}; got {shape}")

    def _check_points(self, x: Tensor) -> Tensor:
        """Returns data points, new or not, as floats; refuses what is none."""
        if x.dim() != 2 or x.shape[1] != self.num_outputs:
            raise ValueError(f"data points x must have shape (M, {self.num_outputs}); got {tuple(x.shape)}")
        x = self._as_floats(x)
        # Sums of squares of larger numbers are infinite.
        largest = torch.finfo(x.dtype).max ** 0.4
        if bool((x.abs() > largest).any()):
            raise ValueError(
                f"data x must be finite, of magnitude {largest:.2e} at most, or NaN where missing; got {float(x[~x.isnan()].abs().max()):g}"
            )
        return x

    def _as_floats(self, x: Tensor) -> Tensor:
        check_dense_real("x", x)
        return x if x.dtype == self.loc.dtype else as_shard_like(x.to(self.loc.dtype), x)

    @property
    def noise_variance(self) -> Tensor:
        """The noise variance: the parameter plus a share of the kernel's.

        It is 1e-4 (1e-8 in float64), where float32 is still exact.
        """
        noise: Tensor = self.noise
        if not isinstance(self.kernel, kernels.Isotropy):
            return noise
        return noise + _NOISE_FLOOR.get(noise.dtype, 1e-4) * cast("Tensor", self.kernel.variance)

    def _split(self, x: Tensor, split: Split | None) -> Split:
        """The split given, or one drawn as Pyro draws subsamples."""
        self._check_shape(x)
        self.portion = join_latents(self, self.portion, x)
        if split is None:
            batch = pyro.plate("batch", self.num_data, subsample_size=self.batch_size).indices
            active = pyro.plate("active", len(batch), subsample_size=self.num_active).indices
            others = torch.ones(len(batch), dtype=torch.bool, device=batch.device)
            others[active] = False
            split = Split(batch[torch.cat([active, others.nonzero().squeeze(-1)])], len(active))
        else:
            split = Split(split.indices.to(self.loc.device), split.num_active)
        return split if self.portion is None else SharedSplit.from_split(split, self.portion)

    @contextlib.contextmanager
    def _plate(self, split: Split) -> Iterator[None]:
        weights = split.weights(self.num_data, self.loc)
        with pyro.plate("data", self.num_data, subsample=split.indices, dim=-1), poutine.scale(scale=weights):
            yield

    @pyro_method
    @takes_arrays
    def model(self, x: Tensor, split: Split | None = None) -> None:
        """The generative program of data ``(N, D)``, for a minibatch."""
        split = self._split(x, split)
        with self._plate(split):
            z = pyro.sample("z", dist.Normal(self.loc.new_zeros(self.latent_dim), 1.0).to_event(1))
            self._observe(z, x, split)

    def _observe(self, z: Tensor, x: Tensor, split: Split) -> None:
        likelihood = ActiveSetGaussianProcess(z, self.kernel, self.noise_variance, split.num_active, self.num_outputs, loc=self.loc)
        pyro.sample("x", likelihood, obs=self._as_floats(split.rows(x)))

    @pyro_method
    @takes_arrays
    def guide(self, x: Tensor, split: Split | None = None) -> None:
        """The approximate posterior of the latents of the same minibatch."""
        split = self._split(x, split)
        loc, scale = self._infer_latents(x, split)
        with self._plate(split):
            self._sample_latents(loc, scale, split)

    def _infer_latents(self, x: Tensor, split: Split) -> tuple[Tensor, Tensor | None]:
        """Means and deviations of a minibatch's latents, before its plate opens."""
        if self.encoder is not None:
            batch = split.rows(x)
            return self._encode(batch, batch[: split.num_active])
        variables = [self.z_loc, self.z_scale] if self.bayesian else [self.z_loc]
        # Pyro's plates subsample parameters, but not where a minibatch is all data in another order.
        rows = split.latents(variables)
        return rows[0], rows[1] if self.bayesian else None

    def _sample_latents(self, loc: Tensor, scale: Tensor | None, split: Split) -> Tensor:
        return pyro.sample("z", dist.Delta(loc, event_dim=1) if scale is None else split.normal(loc, scale))

    def _encode(self, x: Tensor, active: Tensor) -> tuple[Tensor, Tensor | None]:
        assert self.encoder is not None
        parts = [self._as_floats(part) for part in (x, active)]
        filled = [torch.where(part.isnan(), self.loc, part) if bool(part.isnan().any()) else part for part in parts]
        output = self.encoder(*filled) if self.encoder_sees_active else self.encoder(filled[0])
        expected = (2 if self.bayesian else 1) * self.latent_dim
        if output.shape != (len(x), expected):
            raise ValueError(f"the encoder must return shape ({len(x)}, {expected}); got {tuple(output.shape)}")
        if not self.bayesian:
            return output, None
        loc, raw = output.chunk(2, -1)
        return loc, nn.functional.softplus(raw)

    @names_arguments
    @takes_arrays
    def latents(self, x: Tensor) -> Tensor:
        """A copy of the training data's latents (or means) ``(N, Q)``.

        Those of new data are found by :meth:`infer`.
        """
        with torch.no_grad():
            if self.encoder is None:
                self._check_shape(x)
                return (self.z_loc if self.portion is not None else own_rows(self.z_loc, x)).detach().clone()
            return self._encode(x, self._examples(x))[0]

    def _examples(self, x: Tensor) -> Tensor:
        """Training data for an encoder outside training."""
        order = gather_all_rows(x.flatten(1).isnan().any(1), x).byte().argsort(stable=True)
        return rows_at(x, order[: max(1, self.num_active)])

    @torch.no_grad()
    def gather_(self) -> Self:
        """Gives every process the latents of all data points, for saving.

        An optimiser that has moved them cannot go on with them.
        """
        if self.portion is not None:
            gather_latents(self)
            self.portion = None
        return self

    @names_arguments
    @remembers_columns("x")
    @takes_arrays
    def fit(
        self,
        x: Tensor,
        *,
        epochs: int | None = None,
        learning_rate: float = 0.03,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Self:
        """Initialises from the data ``(N, D)``, trains, and calls :meth:`condition_`.

        Minibatches of ``batch_size`` are dealt by :class:`UniformSplits`; Adam's learning rate falls to a twentieth. Between the first six
        tenths of the epochs free latents jump (:meth:`relocate_`), at most twenty times. On a shard
        (:func:`pyro_truncated.distributed.shard`) all processes call it, and in the end each has all latents.

        Args:
            x: the training data, NaN where missing.
            epochs: passes over the data. Default: 60, and so many that there are 400 minibatches.
            learning_rate: that of latents or encoder at first; kernel and noise, which have far to go, have twice as much.
            generator: source of all randomness. Default: torch's global one.
            progress: whether to show a progress bar. Default: in a terminal.

        Raises:
            ValueError: as :meth:`initialize` does, if a number is not positive, or ``learning_rate`` is above 10.
        """
        with random_numbers_from(generator), propagate_shard_errors(x):
            splits = UniformSplits(self.num_data, self.batch_size, self.num_active, generator)
            epochs = self.default_epochs if epochs is None else check_count("epochs", epochs)
            check_learning_rate(learning_rate)
            if epochs * self._batches >= 4000 and not collectives.rank():
                note_once(f"SASDecoder makes {epochs} passes over {self.num_data} data points; epochs=... (or max_iter=...) makes fewer")
            self.initialize(x)
            if self.portion is not None:
                synchronize_generator(generator)
            rates, decay = self.learning_rates(learning_rate, 2 * learning_rate), 0.05 ** (1 / (epochs * self._batches))
            options: Any = lambda name: rates(name) | {"lrd": decay, "clip_norm": math.inf}  # noqa: E731
            elbo = SummedELBO(TraceMeanField_ELBO() if self.bayesian else Trace_ELBO())
            svi = SVI(self.model, self.guide, AllReduced(ClippedAdam(options)), elbo)
            every = max(2, round(_RELOCATION_SHARE * epochs / 20))
            with progress_bar(False if collectives.rank() else progress, total=epochs, unit="epoch") as bar:
                for epoch in range(epochs):
                    if self.encoder is None and epoch % every == every - 1 and epoch < _RELOCATION_SHARE * epochs:
                        self.relocate_(x, generator=generator)
                    loss = sum(svi.step(x, split) for split in splits.epoch(epoch))
                    bar.update()
                    bar.set_postfix_str(f"loss per data point {loss / self.num_data:.4g}")
            return self.gather_().condition_(x)

    @property
    def default_epochs(self) -> int:
        """Default passes of :meth:`fit`: 60, or more for 400 minibatches."""
        return max(60, -(-400 // self._batches))

    @property
    def _batches(self) -> int:
        return -(-self.num_data // self.batch_size)

    @names_arguments
    @takes_arrays
    def relocate_(self, x: Tensor, num_active: int = 1000, *, generator: torch.Generator | None = None) -> float:
        r"""Moves data points to latents that explain them better.

        Draws an active set ``A`` and moves every other data point to the latent of an active point if the objective's own term grows,

        .. math:: z_n \leftarrow \arg\max_{z \in \{z_n\} \cup z_A} \; \log p(x_n \mid x_A, z) + \log \mathcal N(z; 0, I).

        Given ``A`` these terms are independent, so the jumps raise the objective of a point-mass posterior by the sum of their gains. A
        Gaussian one moves with its mean and keeps its width. Call it between the first epochs and leave the last ones to gradients. Cost
        :math:`O(|A|^3 + N |A| D)`.

        Args:
            x: the training data ``(N, D)``.
            num_active: size of ``A``, at most half of the data. All its points are complete if there are enough of these.
            generator: source of the random active set.

        Returns:
            The share of data points that moved.

        Raises:
            ValueError: if the data have another shape, ``num_active`` is not positive, or latents come from an encoder.
        """
        with propagate_shard_errors(x), torch.no_grad():
            x = self._check_data(x)
            if self.encoder is not None:
                raise ValueError("a decoder with an encoder has no free latents to relocate; train the encoder instead")
            num_active = check_count("num_active", num_active)
            self._conditioning_points = None
            self.portion = join_latents(self, self.portion, x)
            order = torch.randperm(self.num_data, generator=generator, device=generator_device(generator)).to(x.device)
            # Incomplete data points last: each pattern of missing entries among the active ones costs a factorisation.
            order = order[gather_all_rows(x.flatten(1).isnan().any(1), x)[order].byte().argsort(stable=True)]
            active, others = order.tensor_split([min(num_active, max(1, self.num_data // 2))])
            z = self.z_loc.detach().clone()
            outputs, latents = self._outputs(rows_at(x, active)), rows_at(as_shard_like(z, x), active)
            posterior = ActiveSet(latents, outputs, self.kernel, self._output_noise)
            count = torch.zeros((), dtype=torch.int64)
            for rows in own_positions(others, self.portion).split(5000):
                there = self._best_candidates(posterior, x[rows], 1)[0]
                better = self._log_joint(posterior, x[rows], there) > self._log_joint(posterior, x[rows], z[rows])
                z[rows[better]] = there[better]
                count += int(better.sum())
            self.z_loc = z
            return int(shard_sum(x)([count])[0]) / self.num_data

    def _outputs(self, x: Tensor) -> Tensor:
        """What functions are conditioned on: deviations of data points from ``loc``."""
        return x - self.loc

    @property
    def _output_noise(self) -> Tensor:
        return self.noise_variance

    def _log_joint(self, posterior: Posterior, x: Tensor, latents: Tensor) -> Tensor:
        """``log p(x | z) + log N(z; 0, I)``, up to a constant, of data points at latents ``(*batch, M, Q)``."""
        return log_joint(posterior, x - self.loc, latents)

    def _best_candidates(self, posterior: Posterior, x: Tensor, num: int) -> Tensor:
        """The best ``num`` of 2000 latents for each data point, ``(num, M, Q)``."""
        candidates = posterior.latents[some_positions(len(posterior.latents), 2000).to(posterior.latents.device)]
        return best_candidates(posterior, x - self.loc, candidates, min(num, len(candidates)))

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
        x = self._check_points(x)
        active = x[:1]
        if self.encoder_sees_active:
            examples = self._conditioning_set().examples
            assert examples is not None
            active = examples.to(x)
        with torch.no_grad():
            return self._encode(x, active)[0]

    @names_arguments
    @takes_arrays
    @leaves_inference_mode
    def condition_(
        self,
        x: Tensor,
        size: int | None = None,
        *,
        projected: bool | None = None,
        num_neighbors: int | None = None,
        choose: Choose | None = None,
    ) -> Self:
        """Keeps the data that predictions condition on.

        They are all training data ``(N, D)``, ``size`` of them, or for each latent those closest to it. Each pattern of missing entries
        costs a factorisation, so complete data points come first. Call it again after more training.

        With none of the options all data are kept if there are at most 2000 and all are complete. Of more complete ones, 1000 are projected
        on in up to four latent dimensions; in more, each latent is predicted from the 100 closest to it. Otherwise the complete ones are
        kept, no more than 1000, filled up to 300.

        Args:
            x: the training data.
            size: number of points to keep, chosen to leave the least variance.
            projected: condition on *all* complete data points, through their projection on the chosen ones
                (:class:`~pyro_truncated.gp.active_sets.ProjectedSet`).
            num_neighbors: condition each prediction on so many complete data points, the closest to its latent
                (:class:`~pyro_truncated.gp.active_sets.NearestSet`).
            choose: called as ``choose(kernel, latents, size)``; default :func:`~pyro_truncated.gp.active_sets.least_variance`.

        Raises:
            ValueError: if the data have another shape, or a number is not positive. Also if no data
                point is complete for a projection or as a neighbour, or ``num_neighbors`` is given
                beside ``size`` or ``projected``.
        """
        x = self._check_data(x)
        latents, outputs = gather_all_rows(self.latents(x), x), as_shard_like(self._outputs(x), x)
        if num_neighbors is None:
            choose = choose or functools.partial(least_variance, noise=self.noise_variance.detach())
            points = select_conditioning_set(self.kernel, latents, outputs, size, projected, choose)
        elif size is None and not projected:
            points = neighbors_set(latents, outputs, check_count("num_neighbors", num_neighbors))
        else:
            raise ValueError("num_neighbors are the closest of all complete data points: leave size and projected out")
        examples = self._examples(x).clone() if self.encoder_sees_active else None
        self._conditioning_points = dataclasses.replace(points, examples=examples, checksum=checksum(self))
        self._training_data, self._candidates = x, None
        return self

    def _conditioning_set(self) -> ConditioningSet:
        if self._conditioning_points is None:
            raise RuntimeError("call condition_(x) first: it keeps the data points that predictions condition on")
        assert self._conditioning_points.checksum is not None
        # Checksums agree up to floating point type or device.
        now = checksum(self)
        if self._conditioning_points.checksum.shape != now.shape or not torch.allclose(
            self._conditioning_points.checksum, now, rtol=1e-6, atol=0.0
        ):
            raise RuntimeError("the decoder has changed since condition_(x); call it again to predict with the present parameters")
        return self._conditioning_points

    def posterior(self) -> Posterior:
        """The Gaussian process posterior of deviations from ``loc``, for predictions.

        Raises:
            RuntimeError: before :meth:`condition_`, or if parameters have changed since.
        """
        points = self._conditioning_set()
        with torch.no_grad():
            return points.posterior(self.kernel, self._output_noise.detach())

    @names_arguments
    @takes_arrays
    def predict(self, latents: Tensor, *, noiseless: bool = False, block: int = 2000) -> tuple[Tensor, Tensor]:
        """Predictive means ``(M, D)`` and variances ``(M, 1)`` at latents ``(M, Q)``."""
        block = check_count("block", block)
        self._check_places(latents)
        if latents.shape[-1:] != (self.latent_dim,):
            raise ValueError(f"latents must have shape (M, {self.latent_dim}); got {tuple(latents.shape)}")
        posterior = self.posterior()
        with torch.no_grad():
            pieces = [posterior.predict(piece, noiseless=noiseless) for piece in latents.split(block)]
        means, variances = (torch.cat(moments) for moments in zip(*pieces, strict=True))
        if not bool(means.isfinite().all()):
            raise ValueError(
                f"latents must be near those of the training data for predictions to be finite; got {float(latents.abs().max()):g}"
            )
        return means + self.loc, variances

    @names_arguments
    @takes_arrays
    @leaves_inference_mode
    def infer(self, x: Tensor, *, starts: int = 3, steps: int = 30, lr: float = 0.05, block: int = 1000) -> Tensor:
        r"""Latents ``(M, Q)`` of data points, new or not, that maximise :math:`\log p(x \mid z) + \log \mathcal N(z; 0, I)`.

        Entries that are NaN are left out. Every point starts from the kept latents that explain it best, and from the encoder's if no entry
        is missing. After a few quasi-Newton steps only the best start continues.

        Args:
            x: data points ``(M, D)``.
            starts: number of kept latents to start from.
            steps: most quasi-Newton steps; points that have arrived take no more.
            lr: length of the first step, in units of the latent space.
            block: data points at a time.
        """
        given, x = x, self._check_points(x)
        warn_if_rounded(given, self.loc.dtype)
        starts, steps, block = check_count("starts", starts), check_count("steps", steps, least=0), check_count("block", block)
        if not isinstance(lr, float | int) or not 0 < lr < math.inf:
            raise ValueError(f"lr must be a positive number; got {lr!r}")
        own = None if self.encoder is None or bool(x.isnan().any()) else self.encode(x)
        posterior, parts = self.posterior(), []
        for rows in torch.arange(len(x), device=x.device).split(block):
            begin = self._best_candidates(posterior, x[rows], starts)
            begin = begin if own is None else torch.cat([begin, own[rows].unsqueeze(0)])
            parts.append(maximize(posterior, self._log_joint, x[rows], begin, steps, lr))
        return torch.cat(parts)

    def reconstruct(self, x: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Returns calibrated means and variances ``(M, D)`` of all outputs.

        Latents are averaged over: those of the training data, and the data point's own, see :class:`.CandidateLatents`. Temperature and
        noise are learned from training data whose halves predict each other, by the first call after :meth:`condition_`. Variances of
        :meth:`predict` at latents of :meth:`infer` leave out that these are uncertain.

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
        self._conditioning_set()
        if self._training_data is None:
            raise RuntimeError("call condition_(x) first: reconstructions are calibrated on the training data, which states do not hold")
        if self._candidates is None:
            generator = torch.Generator(self._training_data.device).manual_seed(0)
            self._candidates = CandidateLatents(self, self._training_data, generator=generator)
        mean, variance = self._candidates.reconstruct(x, noiseless=noiseless)
        return mean.to(self.loc), variance.to(self.loc)

    def sample(self, num: int) -> Tensor:
        """Draws ``(num, D)`` from the latents' prior: predictive means, and functions."""
        z = torch.randn(check_count("num", num), self.latent_dim, dtype=self.loc.dtype, device=self.loc.device)
        mean, variance = self.predict(z, noiseless=True)
        return mean + variance.sqrt() * torch.randn_like(mean)

    def get_extra_state(self) -> dict[str, Tensor]:
        """What :meth:`condition_` kept, for ``state_dict()``."""
        return {} if self._conditioning_points is None else self._conditioning_points.state()

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restores the data points that :meth:`condition_` conditions on."""
        self._conditioning_points = ConditioningSet(**state) if state else None
        self._training_data = self._candidates = None
