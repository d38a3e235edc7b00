"""The truncated and the exact posterior of small, enumerable spaces."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.diagnostics.truncation.scoring import plain, scored_populations
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.states.population import Population
from pyro_truncated.utils.budget import rows_per_block
from pyro_truncated.utils.renaming import Renamed


@dataclasses.dataclass(frozen=True)
class ExactComparison:
    r"""Exact and truncated posterior of each of ``N`` data points.

    All are in float64 on the CPU.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> comparison = compare_with_enumeration(guide, y)
        >>> bool((comparison.free_energy <= comparison.log_evidence + 1e-6).all())
        True

    Attributes:
        log_evidence: exact :math:`\log p(y_n)`, ``(N,)``.
        free_energy: :math:`\log\sum_{s \in K_n} p(s, y_n)`, ``(N,)``.
        values: exact probability of each value of each latent, ``(N, L, V)``.
        truncated_values: the same under the truncated posterior.
        pairs: exact probability that two latents are both active (not at their first value), ``(N, L, L)``.
        truncated_pairs: the same under the truncated posterior.
        holds_mode: whether the population holds the most probable state, ``(N,)``.
    """

    log_evidence: Tensor
    free_energy: Tensor
    values: Tensor
    truncated_values: Tensor
    pairs: Tensor
    truncated_pairs: Tensor
    holds_mode: Tensor

    @property
    def gap(self) -> Tensor:
        r"""Gap of the bound, ``(N,)``; it is the divergence :math:`\mathrm{KL}(q_n \| p(s \mid y_n)) = \log p(y_n) - \mathcal F_n`."""
        return self.log_evidence - self.free_energy

    @property
    def covered_mass(self) -> Tensor:
        r"""Posterior mass of the population, :math:`\exp(-\mathrm{gap})`, ``(N,)``."""
        return (-self.gap).exp().clamp(max=1.0)

    @property
    def marginal_error(self) -> Tensor:
        """Largest absolute error of a value's probability, ``(N,)``."""
        return (self.values - self.truncated_values).abs().amax((1, 2))

    @property
    def pair_error(self) -> Tensor:
        """Returns the largest error of probabilities that two latents are active.

        It is ``(N,)``.
        """
        return (self.pairs - self.truncated_pairs).abs().amax((1, 2))

    error_of_marginals = Renamed("marginal_error")
    error_of_pairs = Renamed("pair_error")


@torch.no_grad()
def compare_with_enumeration(guide: Any, *args: Any, max_states: int = 2**16, memory_budget: int = 2**30, **kwargs: Any) -> ExactComparison:
    """Compares truncated and exact posterior by scoring all states.

    Latents of other guides are held at their medians; the comparison is of posteriors given these.

    Example:
        >>> y = linear_bars(10, 3, mean_active=2.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> comparison = compare_with_enumeration(guide, y)
        >>> torch.allclose(comparison.gap, -comparison.covered_mass.log(), atol=1e-6)
        True

    Args:
        guide: an ``AutoTruncated``, or an ``AutoGuideList`` that holds one.
        *args: the model's arguments.
        max_states: largest space that is enumerated.
        memory_budget: bytes that the log joints of all states of all data points may take.
        **kwargs: the model's keyword arguments.

    Returns:
        Evidence, marginals and pairwise marginals of both.

    Raises:
        ValueError: if the space has more than ``max_states`` states, or their log joints exceed the memory budget.
    """
    _, log_joint, population = scored_populations(guide, args, kwargs)
    space = population.space
    if space.size > max_states:
        raise ValueError(
            f"the space has {space.readable_size} states per data point, more than max_states={max_states}; "
            "use covered_mass, population_growth and estimate_evidence, which need no enumeration"
        )
    if 8 * space.size * len(population) > memory_budget:
        raise ValueError(
            f"{space.size} states of {len(population)} data points need {8 * space.size * len(population)} bytes, more than "
            f"memory_budget={memory_budget}; compare on fewer data points (guide.infer)"
        )
    population = dataclasses.replace(population, log_joint=population.log_joint.double())
    words = space.enumerate(population.words.device)
    scores = all_scores(log_joint, words)
    exact = Population(space, words.expand(len(population), -1, -1), scores)
    best = exact.log_joint.amax(-1)
    return ExactComparison(
        log_evidence=plain(scores.logsumexp(-1)),
        free_energy=plain(population.free_energy()),
        values=plain(exact.value_probabilities()),
        truncated_values=plain(population.value_probabilities()),
        pairs=plain(_pairs(space.unpack(words).unsqueeze(0), exact.weights())),
        truncated_pairs=plain(_pairs(population.states(), population.weights())),
        # A tie in the last digits is no miss.
        holds_mode=plain(population.log_joint.amax(-1) >= best - 1e-6 * (1 + best.abs())),
    )


def all_scores(log_joint: LogJoint, words: Tensor) -> Tensor:
    """Returns log joints ``(N, T)`` of packed states ``(T, W)``.

    They are in float64, for every data point.
    """
    step = rows_per_block(64 * log_joint.num_data, log_joint.memory_budget)
    blocks = [log_joint.score(block.expand(log_joint.num_data, -1, -1).contiguous()) for block in words.split(step)]
    return torch.cat([block.double() for block in blocks], 1)


def _pairs(states: Tensor, weights: Tensor) -> Tensor:
    """Returns the probability that two latents are both active.

    States are ``(N or 1, T, L)`` and weights ``(N, T)``.
    """
    active = (states != 0).to(weights.dtype)
    if len(active) == 1:
        joint = (active.squeeze(0).unsqueeze(-1) * active.squeeze(0).unsqueeze(-2)).flatten(1)
        return (weights @ joint).reshape(-1, *(states.shape[-1],) * 2)
    return torch.einsum("nt,nti,ntj->nij", weights, active, active)
