"""The Pyro programs of decoders on stochastic active sets: latents, processes and observations of a minibatch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self, cast

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.contrib.gp import kernels
from pyro.nn import PyroParam, pyro_method
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_truncated.distributed.owned_rows import as_shard_of, ending_together, rows_of_everyone
from pyro_truncated.distributed.shards import own_rows, rows_at, sums_of, total_rows
from pyro_truncated.gp.active_sets.distributions import ActiveSetGaussianProcess
from pyro_truncated.gp.active_sets.splits import Split, split_weights
from pyro_truncated.gp.data_kernels.validity import check_kernel
from pyro_truncated.gplvm.decoders.shared_latents import SharedLatents
from pyro_truncated.gplvm.decoders.shared_split import NormalOfRows, SharedSplit
from pyro_truncated.gplvm.principal_components import principal_components
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.counts import check_count, check_counts

_NOISE_FLOOR = {torch.float64: 1e-8}
_BATCH_SIZE = 1000
_HYPERPARAMETERS = {"kernel", "noise", "width"}


class SASModel(SharedLatents):
    """Model and guide of a decoder, and where their parameters start; the arguments are those of :class:`SASDecoder`, which predicts.

    Attributes:
        loc: means of the outputs, ``(D,)``, a buffer.
        kernel: the kernel over the latents.
        noise: noise variance but for a floor, see :attr:`noise_variance`.
    """

    loc: Tensor
    # Descriptors of Pyro: tensors when read, parameters when set.
    noise: Any

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
        if kernel is not None and kernel.input_dim != latent_dim:
            raise ValueError(f"the kernel has {kernel.input_dim} inputs, the latent space {latent_dim} dimensions")
        if kernel is not None:
            like = next(kernel.parameters(), torch.zeros(()))
            check_kernel(kernel, torch.randn(50, latent_dim, generator=torch.Generator().manual_seed(0)).to(like))
        self.num_data, self.num_outputs, self.latent_dim = num_data, num_outputs, latent_dim
        self.batch_size = min(_BATCH_SIZE, num_data) if batch_size is None else check_count("batch_size", batch_size)
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

    @takes_arrays
    def initialize(self, x: Tensor, steps: int = 300, *, latents: Tensor | None = None) -> Self:
        """Starts from the data ``(N, D)``: mean, amplitude and noise from their moments, latents from principal components.

        Args:
            x: the training data.
            steps: how long an encoder learns to imitate the first latents; 0 leaves it as it is.
            latents: first latents ``(N, Q)`` in place of the principal components, such as those of another decoder.

        Raises:
            ValueError: if the data or the latents have another shape, the data are infinite or do not vary, or an output is never observed.
        """
        steps = check_count("steps", steps, least=0)
        with ending_together(x):
            self._check_data(x)
            self._check_latents(latents)
            self._join(x)
            return self._start(x, steps, latents)

    def _start(self, x: Tensor, steps: int, latents: Tensor | None) -> Self:
        observed, total = ~x.isnan(), sums_of(x)
        sums, counts = total([x.nansum(0), observed.sum(0)])
        if not bool((counts > 0).all()):
            raise ValueError(f"output {int((counts == 0).nonzero()[0])} is missing in every data point of x")
        with torch.no_grad():
            self.loc.copy_(sums / counts)
            deviation = torch.where(observed, x - self.loc, 0.0)
            variance = total([deviation.square().sum()])[0] / counts.sum()
            if not float(variance) > 0:
                raise ValueError("the data x do not vary: there is nothing to learn")
            self.noise = 0.5 * variance.to(self.loc)
            if isinstance(self.kernel, kernels.Isotropy):
                self.kernel.variance = cast("Any", variance.to(self.loc))
            scores = self._first_latents(as_shard_of(deviation, x), latents)
            if self.encoder is None:
                self.z_loc = scores
        if self.encoder is not None and steps:
            self._imitate(x, scores, steps)
        return self

    def _first_latents(self, features: Tensor, given: Tensor | None) -> Tensor:
        # A copy, or training would move the latents of whom they came from.
        found = principal_components(features, self.latent_dim) if given is None else own_rows(given, features).detach().clone()
        return found.to(self.loc)

    def _check_latents(self, latents: Tensor | None) -> None:
        if latents is not None and tuple(latents.shape) != (self.num_data, self.latent_dim):
            raise ValueError(f"latents must have shape ({self.num_data}, {self.latent_dim}); got {tuple(latents.shape)}")
        if latents is not None:
            self._check_places(latents)

    @staticmethod
    def _check_places(latents: Tensor) -> None:
        """Refuses latents that are no finite real numbers."""
        if not latents.is_floating_point():
            raise TypeError(f"latents must be floating point; got {latents.dtype}")
        if not bool(latents.isfinite().all()):
            raise ValueError("latents must be finite; they hold NaN or infinity")

    def _imitate(self, x: Tensor, scores: Tensor, steps: int) -> None:
        assert self.encoder is not None
        optimizer = torch.optim.Adam(self.encoder.parameters(), 3e-3)
        for _ in range(steps):
            rows = torch.randperm(self.num_data, device=x.device)[:256]
            shown = rows_at(x, rows)
            loc, scale = self._encode(shown, shown[: max(1, len(rows) // 4)])
            loss = (loc - rows_at(as_shard_of(scores, x), rows)).square().mean()
            if scale is not None:
                loss = loss + (scale.log() - torch.tensor(0.1).log()).square().mean()
            loss.backward()
            optimizer.step()
            # SVI adds to what gradient there is.
            optimizer.zero_grad()

    def learning_rates(self, latents: float = 1e-2, hyperparameters: float = 1e-2) -> Callable[[str], dict[str, float]]:
        """Options for a Pyro optimiser: one learning rate for latents or encoder, one for kernel and noise.

        The noise decides how calibrated the predictions are and converges late; it is best given at least 1e-2.
        """
        return lambda name: {"lr": latents if _HYPERPARAMETERS.isdisjoint(name.split(".")) else hyperparameters}

    def _check_data(self, x: Tensor) -> None:
        """Refuses training data of another shape, integers, and what is infinite or nearly so."""
        shape = (total_rows(x), *x.shape[1:])
        if shape != (self.num_data, self.num_outputs):
            everywhere = " in all processes" if shape[0] > len(x) else ""
            raise ValueError(f"data x must have shape ({self.num_data}, {self.num_outputs}){everywhere}; got {shape}")
        self._check_points(x)

    def _check_points(self, x: Tensor) -> None:
        """Refuses data points, new or not, that the model cannot take."""
        if x.dim() != 2 or x.shape[1] != self.num_outputs:
            raise ValueError(f"data points x must have shape (M, {self.num_outputs}); got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"data x must be floating point; got {x.dtype}")
        # Sums of squares of larger numbers are infinite.
        largest = torch.finfo(x.dtype).max ** 0.4
        if bool((x.abs() > largest).any()):
            raise ValueError(f"data x must be finite, of magnitude {largest:.0e} at most, or NaN where missing; got infinity or more")

    @property
    def noise_variance(self) -> Tensor:
        """Noise variance: the parameter plus a floor of 1e-4 of the kernel's variance (1e-8 in float64), where float32 is still exact."""
        noise: Tensor = self.noise
        if not isinstance(self.kernel, kernels.Isotropy):
            return noise
        return noise + _NOISE_FLOOR.get(noise.dtype, 1e-4) * cast("Tensor", self.kernel.variance)

    def _split(self, x: Tensor, split: Split | None) -> Split:
        """The split given, or one drawn as Pyro draws subsamples, so that guide and model see the same; of a shard its part of it."""
        portion, split = self._join(x), self._whole_split(split)
        return split if portion is None else SharedSplit.of(split, portion)

    def _whole_split(self, split: Split | None) -> Split:
        if split is not None:
            return Split(split.indices.to(self.loc.device), split.num_active)
        batch = pyro.plate("batch", self.num_data, subsample_size=self.batch_size).indices
        chosen = pyro.plate("active", len(batch), subsample_size=self.num_active).indices
        others = torch.ones(len(batch), dtype=torch.bool, device=batch.device)
        others[chosen] = False
        return Split(batch[torch.cat([chosen, others.nonzero().squeeze(-1)])], len(chosen))

    @contextlib.contextmanager
    def _plate(self, split: Split) -> Iterator[None]:
        weights = split.weights(self.num_data, self.loc)
        with pyro.plate("data", self.num_data, subsample=split.indices, dim=-1), poutine.scale(scale=weights):
            yield

    def _prior(self) -> Any:
        return dist.Normal(self.loc.new_zeros(self.latent_dim), 1.0).to_event(1)

    @pyro_method
    @takes_arrays
    def model(self, x: Tensor, split: Split | None = None) -> None:
        """The generative program of data ``(N, D)``, for the minibatch of a split (default: a random one)."""
        split = self._split(x, split)
        with self._plate(split):
            z = pyro.sample("z", self._prior())
            self._observe(z, x, split)

    def _observe(self, z: Tensor, x: Tensor, split: Split) -> None:
        likelihood = ActiveSetGaussianProcess(z, self.kernel, self.noise_variance, split.num_active, self.num_outputs, loc=self.loc)
        pyro.sample("x", likelihood, obs=_rows(x, split))

    @pyro_method
    @takes_arrays
    def guide(self, x: Tensor, split: Split | None = None) -> None:
        """The approximate posterior of the latents of the same minibatch."""
        split = self._split(x, split)
        loc, scale = self._latents_of(x, split)
        with self._plate(split):
            self._sample_latents(loc, scale, split)

    def _latents_of(self, x: Tensor, split: Split) -> tuple[Tensor, Tensor | None]:
        """Means and standard deviations of q(z) of a minibatch; to be called before its plate opens."""
        if self.encoder is not None:
            shown = _rows(x, split)
            return self._encode(shown, shown[: split.num_active])
        held = [self.z_loc, self.z_scale] if self.bayesian else [self.z_loc]
        # Pyro's plates subsample parameters, but not where a minibatch is all data in another order.
        rows = split.latents(held) if isinstance(split, SharedSplit) else [values[split.indices] for values in held]
        return rows[0], rows[1] if self.bayesian else None

    def _sample_latents(self, loc: Tensor, scale: Tensor | None, split: Split) -> Tensor:
        z: Tensor = pyro.sample("z", _posterior(loc, scale, split))
        return z

    def _encode(self, x: Tensor, active: Tensor) -> tuple[Tensor, Tensor | None]:
        assert self.encoder is not None
        filled = [torch.where(part.isnan(), self.loc, part) if bool(part.isnan().any()) else part for part in (x, active)]
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
        """Latents ``(N, Q)`` of the training data, means if Bayesian; a copy. Of a shard, those of its data points."""
        with torch.no_grad():
            if self.encoder is None:
                found: Tensor = self.z_loc if self.portion is not None else own_rows(self.z_loc, x)
                return found.detach().clone()
            return self._encode(x, self._examples(x))[0]

    def _examples(self, x: Tensor) -> Tensor:
        """The training data that an encoder which looks at an active set is shown outside training."""
        order = rows_of_everyone(x.flatten(1).isnan().any(1), x).byte().argsort(stable=True)
        return rows_at(x, order[: max(1, self.num_active)])


def _rows(x: Tensor, split: Split) -> Tensor:
    """The data of a minibatch, or what a process has of them."""
    return split.rows(x) if isinstance(split, SharedSplit) else x[split.indices]


def _posterior(loc: Tensor, scale: Tensor | None, split: Split) -> Any:
    if scale is None:
        return dist.Delta(loc, event_dim=1)
    if isinstance(split, SharedSplit):
        return dist.Independent(NormalOfRows(loc, scale, split.within, split.batch_size), 1)
    return dist.Normal(loc, scale).to_event(1)
