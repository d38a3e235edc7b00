"""Decoders for binary, count and categorical data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import pyro
import torch
from pyro.nn import PyroParam, pyro_method
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_truncated.distributed.shards import refuse_shards
from pyro_truncated.gp.active_set_distributions import ActiveSetGaussianProcess, ActiveSetPosterior
from pyro_truncated.gp.active_sets import Choose, Split, some_positions
from pyro_truncated.gplvm.decoders.conditioning_set import Posterior
from pyro_truncated.gplvm.decoders.sas_decoder import SASDecoder
from pyro_truncated.utils.arguments import describe, names_arguments
from pyro_truncated.utils.arrays import takes_arrays

Observation = Callable[[Tensor], Any]


class PointwiseSites(nn.Module):
    """Pseudo-targets ``slope * (x - centre)`` of each output's own value."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((num_outputs,), 4.0))
        self.centre = nn.Parameter(torch.full((num_outputs,), 0.5))

    @takes_arrays
    def forward(self, x: Tensor) -> Tensor:
        """Targets ``(B, D)`` of data points ``(B, D)``."""
        return self.slope * (x - self.centre)


class SASFunctionDecoder(SASDecoder):
    r"""A decoder for any observation distribution, trained with stochastic active sets.

    The functions :math:`f` ``(B, F)``, parameters of the observation distribution, are a latent site of the model. Their guide is
    :class:`ActiveSetPosterior`: Gaussian sites at the active points. With each active set the objective is

    .. math:: \sum_{a \in A} \mathbb E_q[\log p(x_a \mid f_a)] + \tfrac{N - |A|}{|R|} \sum_{n \in R} \mathbb E_q[\log p(x_n \mid f_n)]
        - \mathrm{KL}(q(f_A) \,\|\, p(f_A \mid z_A)) - \ldots

    (the KL terms of the latents follow as in :class:`SASDecoder`), a bound as there, estimated by draws.

    Example::

        decoder = SASFunctionDecoder(len(x), 784, lambda f: dist.Bernoulli(logits=f).to_event(1), bayesian=True)

    Args:
        num_data: number of data points ``N``.
        num_outputs: number of functions ``F``.
        observe: makes the distribution of observations with batch shape ``(*batch, B)`` from function values ``(*batch, B, F)``.
        latent_dim: dimension of the latent space.
        sites: maps data points ``(B, ...)`` to pseudo-targets ``(B, F)``, a module; default :class:`PointwiseSites`.
        options: as for :class:`SASDecoder`.

    The noise of :class:`SASDecoder` is that of the functions here, and small at the start. Latents start from principal components of
    pseudo-targets. Data must be complete. Where starts or places to
    jump to are looked for, no more than 200 latents are tried: the observation distribution is evaluated for one at a time.
    """

    width: Any

    @names_arguments
    def __init__(
        self, num_data: int, num_outputs: int, observe: Observation, latent_dim: int = 2, *, sites: nn.Module | None = None, **options: Any
    ) -> None:
        super().__init__(num_data, num_outputs, latent_dim, **options)
        self.observe = observe
        self.sites = PointwiseSites(num_outputs) if sites is None else sites
        self.noise = PyroParam(torch.tensor(0.05), constraints.positive)
        self.width = PyroParam(torch.tensor(4.0), constraints.positive)

    def _start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._outputs(x), torch.tensor(2.0)

    def _check_shape(self, x: Tensor) -> None:
        refuse_shards(x, "the functions of a minibatch are drawn together, and several processes would not draw what one does")
        if len(x) != self.num_data:
            raise ValueError(f"data must have {self.num_data} rows; got shape {tuple(x.shape)}")

    def _check_points(self, x: Tensor) -> Tensor:
        if not bool(x.isfinite().all()):
            raise ValueError(f"data of a decoder with its own observation distribution must be complete and finite; got {describe(x)}")
        return x

    def _observe(self, z: Tensor, x: Tensor, split: Split) -> None:
        prior = ActiveSetGaussianProcess(z, self.kernel, self.noise_variance, split.num_active, self.num_outputs)
        functions = pyro.sample("f", prior)
        pyro.sample("x", self.observe(functions), obs=self._as_numbers(x[split.indices]))

    @pyro_method
    @takes_arrays
    def guide(self, x: Tensor, split: Split | None = None) -> None:
        """The approximate posterior of latents and functions of a minibatch."""
        split = self._split(x, split)
        self._check_points(x[split.indices])
        loc, scale = self._infer_latents(x, split)
        with self._plate(split):
            z = self._sample_latents(loc, scale, split)
            targets = self._outputs(x[split.active])
            pyro.sample("f", ActiveSetPosterior(z, self.kernel, self.noise_variance, split.num_active, targets, self.width))

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
        """Keeps pseudo-targets of ``size`` data points, by default at most 1000.

        Raises:
            ValueError: if a projection or the closest points are asked for: pseudo-targets of points that are not active have not been
                learned together.
        """
        self._check_data(x)
        if projected or num_neighbors is not None:
            raise ValueError("a decoder with its own observation distribution takes neither projected nor num_neighbors: leave both out")
        return super().condition_(x, min(len(x), 1000) if size is None else size, projected=False, choose=choose)

    def reconstruct(self, x: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Refused: outputs are parameters of observations, and data must be complete.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a decoder with its own observation distribution has no reconstruct: use observe(predict(infer(x))[0])")

    def sample(self, num: int) -> Tensor:
        """Draws new data points ``(num, ...)``: latents, functions, then observations."""
        with torch.no_grad():
            return self.observe(super().sample(num)).sample()

    def _outputs(self, x: Tensor) -> Tensor:
        return self.sites(self._as_numbers(x)).to(self.loc)

    def _as_numbers(self, x: Tensor) -> Tensor:
        """Booleans as floats, and integers too where sites compute with them."""
        return self._as_floats(x) if x.dtype == torch.bool or isinstance(self.sites, PointwiseSites) else x

    @property
    def _output_noise(self) -> Tensor:
        return self.noise_variance + self.width

    def _log_joint(self, posterior: Posterior, x: Tensor, latents: Tensor) -> Tensor:
        return (self.observe(posterior.predict(latents)[0]).log_prob(self._as_numbers(x)) - 0.5 * latents.square().sum(-1)).to(latents)

    def _best_candidates(self, posterior: Posterior, x: Tensor, num: int) -> Tensor:
        candidates = posterior.latents[some_positions(len(posterior.latents), 200).to(posterior.latents.device)]
        # One candidate at a time: all at once would need a tensor of candidates by data points by functions.
        values = torch.stack([self._log_joint(posterior, x, z.expand(len(x), -1)) for z in candidates])
        return candidates[values.topk(min(num, len(candidates)), 0).indices]
