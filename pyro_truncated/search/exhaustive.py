"""Searches that need no scores: every state, and random states."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.states.population import Population, join
from pyro_truncated.utils.arguments import check_count, check_kinds, names_arguments
from pyro_truncated.utils.budget import rows_per_block


class ExhaustiveSearch(Search):
    """Scores all states of the space and keeps the best.

    It is exact EM where a population holds the whole space.

    Example:
        >>> y = linear_bars(20, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)  # the 16 best of 256 states
        >>> best = guide.population().free_energy()
        >>> some = AutoTruncated(model, num_states=16).infer(y, EvolutionarySearch(4, 3), steps=1).population().free_energy()
        >>> bool((best >= some).all())
        True

    Args:
        max_states: largest number of states in the space that it consents to score for every data point.
    """

    @names_arguments
    def __init__(self, max_states: int = 2**20) -> None:
        self.max_states = check_count("max_states", max_states)

    def propose(self, batch: SearchBatch) -> Population:
        """Returns all states, ``(N, space.size)``, for small spaces and batches.

        :meth:`step` needs no such memory.
        """
        return join([batch.evaluate(words) for words in self._blocks(batch)])

    def step(self, batch: SearchBatch) -> Population:
        """The best states of the space, found block by block.

        Raises:
            ValueError: if the space holds more than ``max_states`` states.
        """
        population = batch.population
        for words in self._blocks(batch):
            population = population.merge(dataclasses.replace(population, words=words, log_joint=batch.score(words)))
        return population

    def _blocks(self, batch: SearchBatch) -> Iterator[Tensor]:
        """All states in blocks ``(N, C, num_words)``."""
        space, num_data = batch.space, len(batch.population)
        if space.size > self.max_states:
            raise ValueError(
                f"exhaustive search would score {space.readable_size} states for each data point, more than max_states={self.max_states}; "
                "use EvolutionarySearch, or raise max_states"
            )
        words = space.enumerate(batch.population.words.device)
        # A state takes 64 bytes for packing, scoring and merging.
        for block in torch.split(words, rows_per_block(64 * num_data)):
            yield block.expand(num_data, -1, -1).contiguous()


class SampledSearch(Search):
    r"""Proposes random states whose latents are drawn independently of each other.

    A share of them comes from a prior, the others from the current posterior marginals of the data point. The prior
    is the marginals' mean over the batch, plus one data point's worth of uniform marginals: :math:`(1/V_l + \sum_n
    q_n(s_l = v)) / (N + 1)`. So no value is out of reach.

    Example:
        >>> y = linear_bars(20, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, EvolutionarySearch(4, 3) + SampledSearch(16), steps=2)

    Args:
        num_samples: number of candidates per data point.
        prior_share: fraction of the candidates that come from the prior, rounded to whole ones.
        generator: source of randomness. Default: torch's global generator.

    Raises:
        ValueError: if an argument is out of range.
    """

    @names_arguments
    def __init__(self, num_samples: int, *, prior_share: float = 0.5, generator: torch.Generator | None = None) -> None:
        num_samples = check_count("num_samples", num_samples)
        if not 0 <= prior_share <= 1:
            raise ValueError(f"prior_share must lie in [0, 1]; got {prior_share}")
        self.num_samples = num_samples
        self.prior_share = prior_share
        check_kinds(SampledSearch.__init__, generator=generator)
        self.generator = generator

    def propose(self, batch: SearchBatch) -> Population:
        """``num_samples`` states per data point; repetitions are left to the merge."""
        space, marginals = batch.space, batch.population.value_probabilities()
        cardinality = space.fields.on(marginals.device, "cardinality").unsqueeze(-1)
        uniform = (torch.arange(marginals.shape[-1], device=marginals.device) < cardinality) / cardinality
        prior = ((marginals.sum(0) + uniform) / (len(marginals) + 1)).expand_as(marginals)
        draws, num_prior = batch.draws(self.generator), round(self.prior_share * self.num_samples)
        words = [
            ops.draw_values(probabilities, number, space.fields, **draws)
            for probabilities, number in ((prior, num_prior), (marginals, self.num_samples - num_prior))
        ]
        return batch.evaluate(torch.cat(words, 1))


def draw_by_weight(batch: SearchBatch, number: int, generator: torch.Generator | None) -> Tensor:
    """States of the populations drawn by their posterior weights, as words ``(N, number, W)``."""
    weight = batch.population.weights().double().cumsum(1)
    at = ops.uniform(shape=(number,), **batch.draws(generator)).double() * weight[:, -1:]
    return batch.population.take(torch.searchsorted(weight, at).clamp(max=weight.shape[1] - 1))
