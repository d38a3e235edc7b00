"""Estimates of the evidence, and its value by enumeration."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.diagnostics.truncation.coverage import broadcast_answer, plain, score_populations
from pyro_truncated.diagnostics.truncation.thresholds import PARETO_LIMIT, RELEVANT_NATS, TruncationWarning, judge_estimate
from pyro_truncated.distributed import collectives
from pyro_truncated.distributed.shards import find_part
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.sites import sample_nodes
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import Renamed, check_count, check_counts, check_kinds
from pyro_truncated.utils.arviz_compat import pareto_smooth
from pyro_truncated.utils.budget import rows_per_block
from pyro_truncated.utils.parameter_store import spare_random_numbers


@dataclasses.dataclass(frozen=True)
class ExactComparison:
    r"""Exact and truncated posterior of each of ``N`` data points, in float64.

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
        """The largest error ``(N,)`` of probabilities that two latents are active."""
        return (self.pairs - self.truncated_pairs).abs().amax((1, 2))

    error_of_marginals = Renamed("marginal_error")
    error_of_pairs = Renamed("pair_error")


@torch.no_grad()
def compare_with_enumeration(guide: Any, *args: Any, max_states: int = 2**16, memory_budget: int = 2**30, **kwargs: Any) -> ExactComparison:
    """Compares truncated and exact posterior by scoring all states.

    Latents of other guides are held at their medians.

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
    max_states, memory_budget = check_counts(max_states=max_states, memory_budget=memory_budget)
    _, log_joint, population = score_populations(guide, args, kwargs)
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
    step = rows_per_block(64 * log_joint.num_data, log_joint.memory_budget)
    blocks = (block.expand(log_joint.num_data, -1, -1).contiguous() for block in words.split(step))
    scores = torch.cat([log_joint.score(block).double() for block in blocks], 1)
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


def _pairs(states: Tensor, weights: Tensor) -> Tensor:
    """The probability that two latents of states ``(N or 1, T, L)`` are active."""
    active = (states != 0).to(weights.dtype)
    if len(active) == 1:
        joint = (active.squeeze(0).unsqueeze(-1) * active.squeeze(0).unsqueeze(-2)).flatten(1)
        return (weights @ joint).reshape(-1, *(states.shape[-1],) * 2)
    return torch.einsum("nt,nti,ntj->nij", weights, active, active)


@dataclasses.dataclass(frozen=True)
class Evidence:
    r"""Estimates of :math:`\log p(y_n)`, ``(N,)`` in float64 on the CPU.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> with warnings.catch_warnings(action="ignore", category=TruncationWarning):
        ...     evidence = estimate_evidence(guide, y, num_samples=200)
        >>> evidence.gap.shape
        torch.Size([20])

    Attributes:
        free_energy: the deterministic lower bound :math:`\mathcal F_n`.
        log_evidence: :math:`\log \hat p(y_n)`. Never below the free energy, and a lower bound in expectation.
        lower: lower end of the confidence interval.
        upper: upper end of the confidence interval.
        standard_error: standard error of :math:`\log \hat p(y_n)`, to first order.
        pareto_k: tail index of the importance weights outside the population. Above 0.7 neither
            estimate nor interval is reliable, unless next to nothing lies outside. NaN where the
            weights take too few values for a tail to be fitted (small spaces).
        effective_draws: how many draws the estimated missing mass rests on, :math:`(\sum_i w_i)^2 / \sum_i w_i^2` over those outside.
        possible_draws: how many draws outside have positive probability. Where none has, how many of twenty draws from the prior have,
            inside or outside. Where none has either, nothing is known of the mass outside.
        is_complete: whether the populations hold all states, so that nothing lies outside.
        stochastic_upper: an upper bound in expectation, where exact posterior draws were given; else ``None``.
        confidence: of the interval.
    """

    free_energy: Tensor
    log_evidence: Tensor
    lower: Tensor
    upper: Tensor
    standard_error: Tensor
    pareto_k: Tensor
    effective_draws: Tensor
    possible_draws: Tensor
    is_complete: bool
    stochastic_upper: Tensor | None
    confidence: float

    @property
    def gap(self) -> Tensor:
        """Estimated gap, ``(N,)``; infinite where no possible state is known."""
        return (self.log_evidence - self.free_energy).nan_to_num(nan=torch.inf, posinf=torch.inf)

    @property
    def covered_mass(self) -> Tensor:
        r"""Estimated posterior mass of each population, :math:`e^{-\mathrm{gap}}`, ``(N,)``."""
        return (-self.gap).exp()

    @property
    def is_reliable(self) -> Tensor:
        """Whether the estimate can be relied on, ``(N,)``.

        It cannot where no draw has positive probability. Where the gap is above 0.01 nats, the tail must not be heavy, ten effective draws
        or more must tell so, and the standard error must be below 0.1 nats.
        """
        if self.is_complete:
            return torch.ones_like(self.gap, dtype=torch.bool)
        is_heavy = self.pareto_k > PARETO_LIMIT
        rests_on_few = (self.effective_draws < 10) & ~((self.standard_error <= 0.1) & self.pareto_k.isfinite())
        is_negligible = self.gap <= RELEVANT_NATS
        return (self.possible_draws > 0) & (is_negligible | ~(is_heavy | rests_on_few))

    def total(self) -> tuple[float, float, float]:
        r"""Returns estimate and interval for the log evidence of all data together.

        The errors of data points are independent and skewed. So the ends combine those of the single intervals :math:`[l_n, u_n]` by their
        squares on either side (Zou and Donner 2008). The bias, to second order from the standard errors :math:`\sigma_n`, is added above:

        .. math:: \sum_n \log\hat p_n - \Bigl(\sum_n (\log\hat p_n - l_n)^2\Bigr)^{1/2} , \qquad
                  \sum_n \bigl(\log\hat p_n + \tfrac12 \sigma_n^2\bigr) + \Bigl(\sum_n (u_n - \log\hat p_n)^2\Bigr)^{1/2} .

        The lower end is never below the free energy. In simulations with known evidence, intervals of 95 % hold 94 to 100 %.
        """
        total = float(self.log_evidence.sum())
        below, above = (float((end - self.log_evidence).square().sum().sqrt()) for end in (self.lower, self.upper))
        bias = 0.5 * float(self.standard_error.square().sum())
        return total, max(total - below, float(self.free_energy.sum())), total + bias + above


@torch.no_grad()
def estimate_evidence(
    guide: Any,
    *args: Any,
    num_samples: int = 1000,
    confidence: float = 0.95,
    exact_states: Mapping[str, Tensor] | None = None,
    generator: torch.Generator | None = None,
    **kwargs: Any,
) -> Evidence:
    r"""Estimates the log evidence of each data point by importance sampling.

    The mass of the population is known, so only the rest is estimated, with draws from a mixture :math:`r_n` around the population:

    .. math:: \hat p(y_n) = \sum_{s \in K_n} p(s, y_n) + \frac1M \sum_{i=1}^M \frac{p(s_i, y_n)}{r_n(s_i)} [s_i \notin K_n],
              \qquad s_i \sim r_n .

    This is unbiased for :math:`p(y_n)`, hence :math:`\mathbb E \log\hat p(y_n) \le \log p(y_n)`, and never below the free energy. The
    proposal :math:`r_n` is a *defensive* mixture (Hesterberg 1995): mutations of states of the population, or independent latents, so it
    is positive everywhere. The tail index of the weights says whether to believe it.

    The confidence interval is the union of Hall's, which removes the skewness of the t-statistic, and one symmetric around the logarithm
    of the mean. In simulations intervals of 95 % hold 95 to 96 %.

    If *exact* posterior draws are known, as the states of simulated data, an upper bound in expectation follows, too (Grosse, Ghahramani
    and Adams 2015). One of the draws is replaced by the exact one if that lies outside the population.

    Where data are spread over processes (:func:`pyro_truncated.distributed.shard`), all must call it. Latents of other guides are held at
    their medians. Cost: :math:`N M` log joints, and :math:`N M S L` for the densities.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=10.0).data
        >>> model = BinarySparseCoding(9, 6, offset=False)
        >>> model.weight, model.scale = bar_components(3) * 10.0, torch.tensor(10.0)
        >>> guide = AutoTruncated(model, num_states=8).infer(y, ExhaustiveSearch(), steps=1)
        >>> evidence = estimate_evidence(guide, y, num_samples=1000)
        >>> bool((evidence.gap >= 0).all())  # never below the free energy
        True

    Args:
        guide: an ``AutoTruncated``, or an ``AutoGuideList`` that holds one.
        *args: the model's arguments.
        num_samples: draws per data point, ``M``.
        confidence: of the interval, for each data point.
        exact_states: site values of one exact posterior draw per data point, ``(N, *site shape)`` by site name; of those of this process.
        generator: source of randomness.
        **kwargs: the model's keyword arguments.

    Returns:
        Estimates and intervals.

    Raises:
        ValueError: if there are fewer than 25 samples, the confidence is not between 0 and 1, or the exact states do not fit.

    Warns:
        TruncationWarning: if the estimates of more than a tenth of the data points are not reliable.
    """
    # Fewer do not tell how reliable the estimate is.
    num_samples = check_count("num_samples", num_samples, 25)
    check_kinds(estimate_evidence, confidence=confidence)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1; got {confidence}")
    if find_part(args, kwargs) is not None:
        settings: dict[str, Any] = {"num_samples": num_samples, "confidence": confidence, "generator": generator}
        # Those of all processes, on the first one.
        every = collectives.collect(None if exact_states is None else dict(exact_states))
        known = [own for own in every or () if own is not None]
        settings["exact_states"] = {name: torch.cat([own[name] for own in known]) for name in known[0]} if known else None
        return broadcast_answer(functools.partial(estimate_evidence, **settings), guide, args, kwargs)
    part, log_joint, population = score_populations(guide, args, kwargs)
    exact_words = None if exact_states is None else part.space.pack(part.layout.encode(exact_states).to(population.words.device))
    if exact_words is not None and exact_words.shape[:-1] != (len(population),):
        raise ValueError(f"exact_states must hold one state for each of {len(population)} data points; got {tuple(exact_words.shape[:-1])}")
    proposal = Proposal(population, generator)
    outside, at_exact = [], []
    for rows in log_joint.row_blocks(num_samples + population.num_states):
        parts = []
        for count in proposal.block_sizes(num_samples, rows, log_joint.memory_budget):
            words = proposal.sample(count, rows)
            parts.append(_log_ratios(log_joint.score(words, rows), proposal, words, rows))
        outside.append(torch.cat(parts, 1))
        if exact_words is not None:
            words = exact_words[rows].unsqueeze(1)
            at_exact.append(_log_ratios(log_joint.score(words, rows), proposal, words, rows))
    result = summarize(population.free_energy(), torch.cat(outside), torch.cat(at_exact) if at_exact else None, confidence)
    result = dataclasses.replace(result, is_complete=population.is_complete)
    if not population.is_complete and not bool(result.possible_draws.all()):
        possible_prior_draws = _possible_prior_draws(log_joint)
        result = dataclasses.replace(
            result, possible_draws=torch.where(result.possible_draws > 0, result.possible_draws, possible_prior_draws)
        )
    findings = judge_estimate(result.is_reliable.numpy(), result.possible_draws.numpy())
    if findings:
        warnings.warn(
            "the estimated evidence may be far too low. " + " ".join(map(str, findings)),
            TruncationWarning,
            stacklevel=2,
        )
    return result


def _possible_prior_draws(log_joint: LogJoint) -> Tensor:
    """How many draws have positive prior probability, ``(N,)``."""
    layout, states = log_joint.layout, []
    with spare_random_numbers():
        for _ in range(20):  # draws of the prior
            nodes = sample_nodes(log_joint.run(log_joint.values))
            # A count may be drawn beyond its bound.
            with contextlib.suppress(ValueError):
                states.append(layout.encode_values({name: nodes[name]["value"] for name in layout.sites}, log_joint.sizes))
    if not states:
        return torch.zeros(log_joint.num_data, dtype=torch.int64)
    return plain((log_joint.score(layout.space.pack(torch.stack(states, 1))) > -math.inf).sum(-1))


def _log_ratios(scores: Tensor, proposal: Proposal, words: Tensor, rows: slice) -> Tensor:
    """Log importance weights ``(n, M)`` of draws outside the population."""
    density, is_inside = proposal.log_density(words, rows)
    return (scores.double() - density).masked_fill(is_inside, -math.inf)


def summarize(free_energy: Tensor, outside: Tensor, at_exact: Tensor | None, confidence: float) -> Evidence:
    """Estimates from free energies ``(N,)`` and log weights ``(N, M)`` outside populations."""
    num_samples = outside.shape[1]
    relative = outside - free_energy.unsqueeze(-1)
    peak = relative.amax(-1, keepdim=True).clamp(min=0.0)
    shares = (relative - peak).exp()
    peak = peak.squeeze(-1)
    # Mean and error of the missing mass in units of e^peak.
    mean, error = shares.mean(-1), shares.std(-1) / num_samples**0.5
    base = (-peak).exp()
    estimate, lower, higher = (free_energy + peak + (base + value).log() for value in (mean, *mean_interval(shares, confidence)))
    bound = None
    if at_exact is not None:
        exact_share = (at_exact.squeeze(-1) - free_energy - peak).exp()
        mean_with_exact = torch.where(at_exact.squeeze(-1) > -math.inf, mean + (exact_share - shares[:, 0]) / num_samples, mean)
        bound = plain(free_energy + peak + (base + mean_with_exact).log())
    standard_error = error / (base + mean)
    return Evidence(
        free_energy=plain(free_energy),
        log_evidence=plain(estimate),
        lower=plain(lower),
        upper=plain(higher),
        standard_error=plain(standard_error),
        pareto_k=tail_indices(plain(outside)),
        effective_draws=plain(_effective_number(outside)),
        possible_draws=plain((outside > -math.inf).sum(-1)),
        is_complete=False,
        stochastic_upper=bound,
        confidence=confidence,
    )


def _effective_number(log_weights: Tensor) -> Tensor:
    """The effective number ``(N,)`` of weights ``(N, M)``, however small."""
    largest = log_weights.amax(-1, keepdim=True)
    weights = (log_weights - largest.clamp(min=-1e300)).exp()
    return weights.sum(-1).square() / weights.square().sum(-1).clamp(min=1e-300)


# Temporaries of so many bytes stay near a processor.
_CACHED = 2**21


class Proposal:
    """The defensive mixture around the populations: draws states, and computes their densities."""

    def __init__(self, population: Population, generator: torch.Generator | None) -> None:
        self.population, self.space, self.generator = population, population.space, generator
        self.device = population.words.device
        weights = population.weights().double()
        self.base = 0.5 * weights + 0.5 / population.num_states
        self.cardinality = population.space.cardinality.to(self.device)
        self.values = _smooth(population)
        latents = max(1, len(population.space.mutable))
        # Of kernels around the states in which one or three latents change, and of independent latents.
        self.shares = torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64, device=self.device)
        self.rates = [min(0.5, changes / latents) for changes in (1.0, 3.0)]

    def block_sizes(self, num_samples: int, rows: slice, memory_budget: int) -> list[int]:
        """Numbers of draws that are made at once."""
        num_data = len(self.population.words[rows])
        size = rows_per_block(32 * num_data * (self.values.shape[1] * self.values.shape[2] + self.population.num_states), memory_budget)
        return [min(size, num_samples - start) for start in range(0, num_samples, size)]

    def sample(self, count: int, rows: slice) -> Tensor:
        """Independent draws ``(n, count, W)`` for a slice of the data points."""
        base, words = self.base[rows], self.population.words[rows]
        component = torch.multinomial(self.shares.expand(len(base), -1), count, replacement=True, generator=self.generator)
        index = torch.multinomial(base, count, replacement=True, generator=self.generator)
        values = self.space.unpack(ops.gather_states(words, index), torch.int64)
        rates = torch.tensor([*self.rates, 0.0], dtype=torch.float64, device=self.device)[component]
        changes = self._uniform(values.shape) < rates.unsqueeze(-1)
        step = 1 + (self._uniform(values.shape) * (self.cardinality - 1)).long().minimum((self.cardinality - 2).clamp(min=0))
        around = self.space.pack(torch.where(changes, (values + step) % self.cardinality, values))
        independent = ops.draw_values(self.values[rows], count, self.space.fields, generator=self.generator)
        return torch.where((component == len(self.rates)).unsqueeze(-1), independent, around)

    def _uniform(self, shape: tuple[int, ...]) -> Tensor:
        source = self.device if self.generator is None else self.generator.device
        return torch.rand(shape, generator=self.generator, dtype=torch.float64, device=source).to(self.device)

    def log_density(self, words: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Returns log densities ``(n, M)`` of states, and which are in the population."""
        size = rows_per_block(8 * words.shape[1] * self.population.num_states, _CACHED)
        tables = words, self.population.words[rows], self.base[rows], self.values[rows]
        blocks = [self._log_density(*block) for block in zip(*(table.split(size) for table in tables), strict=True)]
        density, is_inside = (torch.cat(parts) for parts in zip(*blocks, strict=True))
        return density, is_inside

    def _log_density(self, words: Tensor, members: Tensor, base: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        r"""The same, with temporaries ``(n, M, S)``.

        Around a state of the population with which :math:`a` latents of a draw agree, a kernel of rate :math:`r` has the density
        :math:`(1 - r)^a \prod_l r / (V_l - 1)`, over the other latents. Latents of one value never change.
        """
        samples, states = self._one_hot(words), self._one_hot(members)
        log_others = (self.cardinality - 1).clamp(min=1).double().log()
        num_mutable = int((self.cardinality > 1).sum())
        # Sums of zeros and ones are exact in single precision.
        agreement = (samples @ states.mT).double() - (self.space.num_latents - num_mutable)
        extra = torch.zeros((), dtype=torch.float64, device=self.device)
        if bool((log_others > 0).any()):
            extra = (samples * log_others.repeat_interleave(self.values.shape[2])) @ states.double().mT
        parts = [self.shares[-1].log() + torch.einsum("nmk,nk->nm", samples.double(), values.flatten(1).clamp(min=1e-300).log())]
        for share, rate in zip(self.shares, self.rates, strict=False):
            kernel = agreement * (math.log1p(-rate) - math.log(rate)) + extra
            largest = kernel.amax(-1, keepdim=True)
            total = ((kernel - largest).exp() @ base.unsqueeze(-1)).log() + largest
            parts.append(share.log() + num_mutable * math.log(rate) - log_others.sum() + total.squeeze(-1))
        return torch.stack(parts).logsumexp(0), agreement.amax(-1) > num_mutable - 0.5

    def _one_hot(self, words: Tensor) -> Tensor:
        values = torch.arange(self.values.shape[2], device=words.device)
        return (self.space.unpack(words, torch.int64).unsqueeze(-1) == values).float().flatten(-2)


def _smooth(population: Population) -> Tensor:
    """Positive probabilities ``(N, L, V)`` of the independent component."""
    space: StateSpace = population.space
    own = dataclasses.replace(population, log_joint=population.log_joint.double()).value_probabilities()
    cardinality = space.cardinality.to(own.device)
    exists = torch.arange(own.shape[-1], device=own.device) < cardinality.unsqueeze(-1)
    uniform = exists.double() / cardinality.unsqueeze(-1)
    # A fifth of the marginals are the mean ones; the share of uniform values falls with the number of latents.
    share = 1.0 / (space.num_latents + 1)
    mixture = (1 - share) * (0.8 * own + 0.2 * own.mean(0)) + share * uniform
    return mixture / mixture.sum(-1, keepdim=True)


def mean_interval(shares: Tensor, confidence: float) -> tuple[Tensor, Tensor]:
    """Confidence limits ``(N,)`` for means of skewed non-negative weights ``(N, M)``.

    They are the union of two: Hall's, from a monotone cubic transformation of the t-statistic (Hall 1992), and one symmetric for the
    logarithm of the mean. Both take as degrees of freedom half the number of effective draws, less one.
    """
    number, mean, deviation = shares.shape[1], shares.mean(-1), shares.std(-1).clamp(min=1e-300)
    error = deviation / number**0.5
    effective = shares.sum(-1).square() / shares.square().sum(-1).clamp(min=1e-300)
    degrees = (0.5 * effective - 1).clamp(min=1.0)
    quantile = torch.from_numpy(stats.t.ppf(0.5 + confidence / 2, degrees.cpu().numpy())).to(shares)
    skewness = ((shares - mean.unsqueeze(-1)) / deviation.unsqueeze(-1)).pow(3).mean(-1)
    # At 1e-6 the transformation is the identity but for rounding; at zero it would divide by zero.
    slope = (skewness / number**0.5).abs().clamp(min=1e-6) * skewness.sign()
    slope = torch.where(slope == 0, 1e-6, slope)

    def statistic(target: Tensor) -> Tensor:
        cube = 1 + slope * (target - slope / 6)
        return 3 / slope * (cube.sign() * cube.abs() ** (1 / 3) - 1)

    relative = quantile * error / mean.clamp(min=1e-300)
    lower = torch.minimum(mean - error * statistic(quantile), mean * (-relative).exp())
    upper = torch.maximum(mean - error * statistic(-quantile), mean * relative.clamp(max=700.0).exp())
    # Where no draw has any weight there is nothing to extrapolate from.
    is_none = mean == 0
    return lower.clamp(min=0.0).masked_fill(is_none, 0.0), upper.masked_fill(is_none, 0.0)


def tail_indices(ratios: Tensor) -> Tensor:
    """Tail indices ``(N,)`` of log ratios ``(N, M)``, NaN if many are equal."""
    num_samples = ratios.shape[1]
    # The largest ratios: a fifth, or three roots, of their number (Vehtari et al. 2024).
    tail = ratios.sort(-1).values[:, -math.ceil(min(0.2 * num_samples, 3 * num_samples**0.5)) :]
    # Draws of zero weight differ by NaN, which exceeds nothing.
    distinct = (tail.diff(dim=-1) > 1e-9).double().mean(-1) > 0.5
    shapes = torch.full((len(ratios),), math.nan, dtype=torch.float64)
    if bool(distinct.any()):
        shapes[distinct] = torch.from_numpy(pareto_smooth(ratios[distinct].numpy())[1])
    return shapes
