"""Mutations where good states and predictions disagree, for expensive scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from pyro.contrib.gp import kernels
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.search.base import SearchBatch
from pyro_truncated.search.gp_select import RegressionAffinity
from pyro_truncated.search.preselection import AffinitySearch
from pyro_truncated.search.sampling import draw_by_weight
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arguments import check_count, names_arguments


class LearnedFlips(AffinitySearch):
    r"""Flips latents of good states where a regression predicts otherwise.

    It is for models with expensive scores.

    A Gaussian process predicts the posterior marginals :math:`p_{nh}` of every data point from its observation and
    the marginals of all *other* data points, as in :class:`GPSelect`. A child is a state of the population, drawn by
    its posterior weight, with a geometrically distributed number of flips. Flips are drawn without replacement in
    proportion to

    .. math:: \max(|p_{nh} - s_h|,\ 0.02).

    One of the children is drawn from the predicted marginals instead. Each child is one score. Where a score takes a
    millisecond or more (a renderer, a simulator, a network) this needs several times fewer of them than random flips.
    The gain grows with the data. Where scores are cheap, the regression takes longer than it saves. For binary
    latents.

    Example:
        >>> y = linear_bars(40, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, LearnedFlips(4), steps=5)

    Args:
        children: number of states proposed in a step.
        mean_flips: mean number of flips of a child, at least 1.
        kernel: ``"linear"``, ``"rbf"``, ``"composition"`` or a kernel of :mod:`pyro.contrib.gp.kernels`.
        refit_every: visits of a data point between two fits of the kernel's parameters.
        rank: rank of an incomplete Cholesky factor. Default: exact, for a few thousand data points.
        inputs: inputs of the regression, ``(N, D)`` for all data, or a function that makes ``(n, D)`` of a batch;
            default: the observations.
        generator: source of randomness. Default: torch's global generator.

    Raises:
        ValueError: if an argument is out of range; when searching, if a latent has more than two values.
    """

    affinity: RegressionAffinity
    binary_only = True

    @names_arguments
    def __init__(
        self,
        children: int = 8,
        *,
        mean_flips: float = 1.5,
        kernel: str | kernels.Kernel = "rbf",
        refit_every: int = 5,
        rank: int | None = None,
        inputs: Tensor | Callable[[SearchBatch], Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.children = check_count("children", children)
        if not 1 <= mean_flips < math.inf:
            raise ValueError(f"mean_flips must be at least 1 and finite; got {mean_flips}")
        self.mean_flips = mean_flips
        self.generator = generator
        self.affinity = RegressionAffinity(kernel=kernel, refit_every=refit_every, rank=rank, inputs=inputs, generator=generator)

    def propose(self, batch: SearchBatch) -> Population:
        """Children ``(N, children)``; repetitions are possible."""
        self.check_space(batch.space)
        prediction, parents = self.affinity(batch), draw_by_weight(batch, self.children, self.generator)
        # Every latent may be flipped, so that every state can be reached.
        disagreement = (prediction.unsqueeze(1) - batch.space.unpack(parents).double()).abs().clamp(min=0.02)
        children = parents ^ batch.space.pack(self._flips(batch, disagreement))
        # One is drawn from the predicted marginals.
        children[:, 0] = batch.space.pack((ops.uniform(shape=prediction.shape[1:], **batch.draws(self.generator)) < prediction).long())
        return batch.scored(children)

    def _flips(self, batch: SearchBatch, disagreement: Tensor) -> Tensor:
        """What is flipped, zeros and ones ``(N, children, H)``, in proportion to the disagreement."""
        draws, num_latents = batch.draws(self.generator), disagreement.shape[-1]
        # The largest of independently perturbed logarithms are a draw without replacement (Gumbel).
        noise = -ops.uniform(shape=(self.children, num_latents), **draws).double().clamp(min=1e-300).log()
        place = (disagreement.log() - noise.log()).topk(min(8, num_latents), -1).indices
        stay = torch.tensor(1 - 1 / self.mean_flips, dtype=torch.float64)
        number = ops.uniform(shape=(self.children, 1), **draws).double().clamp(min=1e-300).log() / stay.log()
        is_flipped = torch.arange(place.shape[-1], device=place.device) <= number
        return torch.zeros(disagreement.shape, dtype=torch.int64, device=place.device).scatter_(-1, place, is_flipped.long())
