"""How decoders on stochastic active sets are trained: by SVI, and by jumps that gradients cannot make."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Self, cast

import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.optim import ClippedAdam
from torch import Tensor

from pyro_truncated.distributed import world
from pyro_truncated.distributed.all_reduced import AllReduced
from pyro_truncated.distributed.owned_rows import as_shard_of, ending_together, own_positions, rows_of_everyone
from pyro_truncated.distributed.shards import draw_alike, rows_at, sums_of
from pyro_truncated.distributed.summed_elbo import SummedELBO
from pyro_truncated.gp.active_sets.active_set import ActiveSet
from pyro_truncated.gp.active_sets.splits import UniformSplits
from pyro_truncated.gplvm.decoders.kept_points import KeptPoints
from pyro_truncated.gplvm.decoders.latents import Predictor, best_candidates, log_joint
from pyro_truncated.gplvm.decoders.sas_model import SASModel
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.counts import check_count
from pyro_truncated.utils.generators import device_of
from pyro_truncated.utils.progress import progress_bar

_LEAST_STEPS = 400
_LEAST_EPOCHS = 60
_JUMPING_SHARE = 0.6
_MOST_JUMPS = 20
_LAST_RATE = 0.05
# Adam's steps are about as long as its learning rate, in latents of unit variance and logarithms.
_FASTEST = 10.0


class SASTraining(SASModel):
    """A decoder's training; the arguments are those of :class:`SASDecoder`, which predicts."""

    _kept: KeptPoints | None = None

    @names_arguments
    @takes_arrays
    def initialize(self, x: Tensor, steps: int = 300, *, latents: Tensor | None = None) -> Self:
        """Starts from the data; see :meth:`SASModel.initialize`."""
        self._kept = None
        return super().initialize(x, steps, latents=latents)

    @names_arguments
    @takes_arrays
    def fit(
        self,
        x: Tensor,
        *,
        epochs: int | None = None,
        learning_rate: float = 0.03,
        generator: torch.Generator | None = None,
        progress: bool = False,
    ) -> Self:
        """Starts from the data ``(N, D)``, trains, and keeps what predictions condition on (:meth:`condition_`).

        Minibatches of ``batch_size`` are dealt by :class:`UniformSplits`; Adam's learning rate falls to a twentieth. Between the first six
        tenths of the epochs free latents jump (:meth:`relocate_`), at most twenty times.

        On a shard of the data (:func:`pyro_truncated.distributed.shard`) all processes call it, and train as one does; in the end each has
        all latents.

        Args:
            x: the training data, NaN where missing.
            epochs: passes over the data; default: 60, and so many that there are 400 minibatches.
            learning_rate: that of latents or encoder at first; kernel and noise, which have far to go, have twice as much.
            generator: source of the splits and jumps.
            progress: whether to show a progress bar.

        Raises:
            ValueError: as :meth:`initialize` does, if a number is not positive, or ``learning_rate`` is above 10.
        """
        with ending_together(x):
            return self._fit(x, epochs, learning_rate, generator, progress)

    def _fit(self, x: Tensor, epochs: int | None, learning_rate: float, generator: torch.Generator | None, progress: bool) -> Self:
        splits = UniformSplits(self.num_data, self.batch_size, self.num_active, generator)
        epochs = self.default_epochs if epochs is None else check_count("epochs", epochs)
        if not 0 < learning_rate <= _FASTEST:
            raise ValueError(f"learning_rate must be a positive number of at most {_FASTEST:g}; got {learning_rate!r}")
        self.initialize(x)
        if self.portion is not None:
            draw_alike(generator)
        rates, decay = self.learning_rates(learning_rate, 2 * learning_rate), _LAST_RATE ** (1 / (epochs * self._batches))
        options = functools.partial(_with_decay, rates, decay)
        optimizer = AllReduced(ClippedAdam(cast("Any", options)))
        svi = SVI(self.model, self.guide, optimizer, SummedELBO(TraceMeanField_ELBO() if self.bayesian else Trace_ELBO()))
        every = max(2, round(_JUMPING_SHARE * epochs / _MOST_JUMPS))
        with progress_bar(progress and world.rank() == 0, total=epochs, unit="epoch") as bar:
            for epoch in range(epochs):
                if self.encoder is None and epoch % every == every - 1 and epoch < _JUMPING_SHARE * epochs:
                    self.relocate_(x, generator=generator)
                loss = sum(svi.step(x, split) for split in splits.epoch(epoch))
                bar.update()
                bar.set_postfix_str(f"loss per data point {loss / self.num_data:.4g}")
        return self.gather_().condition_(x)

    @property
    def default_epochs(self) -> int:
        """Passes over the data that :meth:`fit` makes unless told: 60, and so many that there are 400 minibatches."""
        return max(_LEAST_EPOCHS, -(-_LEAST_STEPS // self._batches))

    @property
    def _batches(self) -> int:
        return -(-self.num_data // self.batch_size)

    def condition_(self, x: Tensor) -> Self:
        """Keeps what predictions condition on."""
        raise NotImplementedError

    @names_arguments
    @takes_arrays
    def relocate_(self, x: Tensor, num_active: int = 1000, *, generator: torch.Generator | None = None) -> float:
        r"""Lets data points jump to where the decoder explains them better, which gradients cannot: they only slide.

        Draws an active set ``A`` and moves every other data point to the latent of an active point if the objective's own term grows,

        .. math:: z_n \leftarrow \arg\max_{z \in \{z_n\} \cup z_A} \; \log p(x_n \mid x_A, z) + \log \mathcal N(z; 0, I).

        Given ``A`` these terms are independent, so the jumps raise the objective of a point-mass posterior by the sum of their gains; a
        Gaussian one moves with its mean and keeps its width. Call it between the first epochs and leave the last ones to gradients: from
        principal components, most data points end far from where they began. Cost :math:`O(|A|^3 + N |A| D)`.

        Args:
            x: the training data ``(N, D)``.
            num_active: size of ``A``, at most half of the data; all its points are complete if there are enough of these.
            generator: source of the random active set.

        Returns:
            The share of data points that moved.

        Raises:
            ValueError: if the data have another shape, ``num_active`` is not positive, or latents come from an encoder.
        """
        with ending_together(x):
            return self._relocate(x, num_active, generator)

    def _relocate(self, x: Tensor, num_active: int, generator: torch.Generator | None) -> float:
        self._check_data(x)
        if self.encoder is not None:
            raise ValueError("latents that come from an encoder cannot be moved: they are the encoder's to choose")
        num_active = check_count("num_active", num_active)
        self._kept = None
        portion = self._join(x)
        order = torch.randperm(self.num_data, generator=generator, device=device_of(generator)).to(x.device)
        # Incomplete data points last: each pattern of missing entries among the active ones costs a factorisation.
        order = order[rows_of_everyone(x.flatten(1).isnan().any(1), x)[order].byte().argsort(stable=True)]
        active, others = order.tensor_split([min(num_active, max(1, self.num_data // 2))])
        with torch.no_grad():
            z = self.z_loc.detach().clone()
            posterior = self._given(rows_at(x, active), rows_at(as_shard_of(z, x), active))
            moved = torch.zeros((), dtype=torch.int64)
            for rows in own_positions(others, portion).split(5000):
                there = self._best_candidates(posterior, x[rows], 1)[0]
                better = self._log_joint(posterior, x[rows], there) > self._log_joint(posterior, x[rows], z[rows])
                z[rows[better]] = there[better]
                moved += int(better.sum())
            self.z_loc = z
        return int(sums_of(x)([moved])[0]) / self.num_data

    def _given(self, x: Tensor, latents: Tensor) -> ActiveSet:
        """The posterior given data points at their latents; it predicts deviations from ``loc``."""
        return ActiveSet(latents, x - self.loc, self.kernel, self.noise_variance.detach())

    def _log_joint(self, posterior: Predictor, x: Tensor, latents: Tensor) -> Tensor:
        """``log p(x | z) + log N(z; 0, I)``, up to a constant, of data points at latents ``(*batch, M, Q)``."""
        return log_joint(posterior, x - self.loc, latents)

    def _best_candidates(self, posterior: Predictor, x: Tensor, num: int) -> Tensor:
        """Of up to 2000 latents of the posterior, the ``num`` that explain each data point best, ``(num, M, Q)``."""
        candidates = posterior.latents[:: -(-len(posterior.latents) // 2000)]
        return best_candidates(posterior, x - self.loc, candidates, min(num, len(candidates)))


def _with_decay(rates: Callable[[str], dict[str, float]], decay: float, name: str) -> dict[str, float]:
    return rates(name) | {"lrd": decay, "clip_norm": math.inf}
