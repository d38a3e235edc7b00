"""States that a regression on all scores so far thinks best, for models whose scores are expensive."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.search.log_joint_regression import Belief, LogJointRegression, Trials
from pyro_truncated.search.met_data import flat_observations
from pyro_truncated.search.scored_states import ScoredStates, drawn_by_weight
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import check_kinds, names_arguments
from pyro_truncated.utils.counts import check_counts

# The climb from a state to an optimum of the quadratic function, and the latents of whose pairs neighbours of it are made.
_CLIMB, _PAIRED = 12, 40
# Deviations of the draws from their means, as powers of two times what is believed: some children are cautious; a belief may be wrong.
_BOLDNESS = -1.0, 1.0
# Steps without a better state after which they are twice as bold: a data point gets stuck where the regression trusts itself.
_PATIENCE = 2


class SurrogateSearch(Search):
    r"""Scores the states that a quadratic regression on the scores so far thinks best; for models whose scores are expensive.

    All scores of a search are kept while the parameters stay the same, those of bad states too; ``memory`` of them are regressed on the
    states: linear effects depend on the observation and on the data point, interactions of pairs are shared by all data (see
    :class:`.LogJointRegression`). For each child, effects are drawn from what is believed of them in the data point (Thompson sampling), a
    state of the population drawn by its weight climbs to an optimum of the quadratic function that they make, and the best of that optimum
    and of the states one or two flips away which has not been scored before is scored. The first child takes the means, the others deviate
    from them by half to twice as much as is believed, because a quadratic function is not the whole truth, and by twice that in data
    points for which two steps have found no better state. So no state is scored twice, flips that are known to be bad are not tried
    again, and what was learned from other data points tells where to look.

    What was scored under other parameters is forgotten, but for the regression, so that in training, too, each step starts from what the
    steps before have learned. Where a score takes some tens of microseconds or more, this pays. For binary latents.

    Example:
        >>> y = linear_bars(40, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, SurrogateSearch(4), steps=5)

    Args:
        children: number of states proposed in a step.
        memory: number of scored states per data point that are regressed on (no fewer than a population has): the best half, and of the
            others the latest. It does not bound what is kept, lest a state be scored twice: all that were scored under the same
            parameters, up to ``children`` more per data point with every step, until parameters or data change.
        rank: number of principal components of the inputs that effects depend on.
        inputs: what effects depend on, a function that makes ``(n, D)`` of a :class:`~pyro_truncated.search.SearchBatch`; default: the
            observations, flattened. Missing (NaN) entries are replaced by the mean of their column.
        generator: source of randomness; default: torch's global generator.

    Raises:
        ValueError: if an argument is out of range; when searching, if a latent has more than two values.
        NotImplementedError: when searching, for data that are shared out to several processes.

    Reference:
        Baptista and Poloczek, "Bayesian optimization of combinatorial structures", ICML 2018, for Thompson sampling from a quadratic
        regression; here many problems are solved at a time that share most of it.
    """

    @names_arguments
    def __init__(
        self,
        children: int = 8,
        *,
        memory: int = 96,
        rank: int = 64,
        inputs: Callable[[SearchBatch], Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.children, self.memory, self.rank = check_counts(children=children, memory=memory, rank=rank)
        check_kinds(SurrogateSearch.__init__, inputs=inputs, generator=generator)
        self.inputs = inputs
        self.generator = generator
        self.forget()

    def forget(self) -> None:
        """Forgets all scores, and what was learned from them."""
        self.regression: LogJointRegression | None = None
        self._projection: PrincipalComponents | None = None
        self._scored: ScoredStates | None = None
        self._is_of_new_data = False

    def check_space(self, space: StateSpace) -> None:
        """Refuses latents of more than two values."""
        if not space.is_binary:
            raise ValueError(f"SurrogateSearch is for binary latents; the model has {space}")

    def propose(self, batch: SearchBatch) -> Population:
        """Children ``(N, children)``."""
        self.check_space(batch.space)
        if batch.is_spread:
            raise NotImplementedError("SurrogateSearch learns from the data of one process; these are shards: train it on whole data")
        scored = self._scored = ScoredStates.of(batch, self._scored)
        kept = scored.kept(max(self.memory, batch.population.num_states))
        trials = Trials(kept.states(), kept.log_joint, self._features(batch))
        self._learn(trials, batch)
        assert self.regression is not None
        effects = self._drawn(Belief(trials, self.regression), batch)
        start = batch.space.unpack(drawn_by_weight(batch, self.children, self.generator)).double()
        children = _best_unseen(start, effects, self.regression.effects.pairs, scored)
        found = batch.scored(batch.space.pack(children.long()))
        self._scored = scored.with_more(found)
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state of the generator, and what has been learned of data."""
        if self.regression is None or self._projection is None:
            return super().state_dict()
        learned = {"regression": self.regression.state_dict(), "projection": list(self._projection), "is_of_new_data": self._is_of_new_data}
        return {**super().state_dict(), **learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where a search has been; scores are made anew."""
        self.forget()
        super().load_state_dict(state)
        if "regression" in state:
            self.regression = LogJointRegression.of(state["regression"])
            self._projection = PrincipalComponents(*state["projection"])
            self._is_of_new_data = bool(state["is_of_new_data"])

    def _features(self, batch: SearchBatch) -> Tensor:
        """Principal components of the inputs and a one, ``(n, Q)``; those of the first batch, until other inputs come."""
        inputs = flat_observations(batch) if self.inputs is None else self.inputs(batch).detach().double()
        if self._projection is None or len(self._projection.centre) != inputs.shape[1] or (self._is_of_new_data and not batch.is_new):
            self.regression, self._is_of_new_data = None, batch.is_new
            self._projection = PrincipalComponents.of(inputs, self.rank)
        return self._projection(inputs)

    def _learn(self, trials: Trials, batch: SearchBatch) -> None:
        num_latents, num_features = trials.states.shape[-1], trials.features.shape[1]
        if self.regression is None or len(self.regression.variance) != num_latents:
            self.regression = LogJointRegression(num_latents, num_features, trials.states.device)
        if self._is_of_new_data or not batch.is_new:
            self.regression.fit(trials)

    def _drawn(self, belief: Belief, batch: SearchBatch) -> Tensor:
        """Linear effects for each child, ``(n, children, H)``."""
        num_trials, num_latents = belief.trials.states.shape[1:]
        uniform = ops.uniform(shape=(self.children, num_latents + num_trials), **batch.draws(self.generator))
        normal = torch.special.ndtri(uniform.double().clamp(min=1e-16))
        normal[:, 0] = 0.0
        normal[:, 1:] *= torch.logspace(*_BOLDNESS, self.children - 1, base=2.0, dtype=normal.dtype, device=normal.device).view(1, -1, 1)
        assert self._scored is not None
        normal *= 1.0 + (self._scored.num_since_best() >= _PATIENCE * self.children).to(normal).view(-1, 1, 1)
        return belief.draws(normal[..., :num_latents], normal[..., num_latents:])


class PrincipalComponents(NamedTuple):
    """The largest principal components of inputs, scaled to a mean square of one."""

    centre: Tensor
    axes: Tensor

    @classmethod
    def of(cls, inputs: Tensor, rank: int) -> PrincipalComponents:
        """Those of inputs ``(n, D)``."""
        centre = inputs.nanmean(0).nan_to_num(nan=0.0)
        known = torch.where(inputs.isnan(), centre, inputs) - centre
        axes = torch.linalg.svd(known, full_matrices=False)[2]
        components = cls(centre, axes[: min(rank, max(1, len(inputs) // 2))].mT)
        scale = components(inputs)[:, :-1].square().mean().sqrt()
        return components._replace(axes=components.axes / torch.where(scale > 0, scale, 1.0))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Components of inputs ``(n, D)``, and a one, ``(n, Q)``."""
        known = torch.where(inputs.isnan(), self.centre, inputs) - self.centre
        return torch.cat([known @ self.axes, torch.ones_like(known[:, :1])], 1)


# --- children ---


def _best_unseen(start: Tensor, effects: Tensor, pairs: Tensor, scored: ScoredStates) -> Tensor:
    """For each of the effects ``(n, C, H)`` the best state that was not scored yet, near an optimum that is reached from a start."""
    optimum = _climbed(start, effects, pairs)
    # States are known by their words, or by one number made of these; each latent adds its own.
    latent_keys = _keys(scored.space.pack(torch.eye(start.shape[-1], dtype=torch.int64, device=start.device)))
    taken, children = _keys(scored.words).sort(1).values, []
    for state, gain in zip(optimum.unbind(1), _gains(optimum, effects, pairs).unbind(1), strict=True):
        near, sign = Neighbours.of(gain), 1 - 2 * state
        values = near.sums(gain)
        values[:, 1 + gain.shape[1] :] += near.between(pairs) * near.products(sign)
        keys = near.sums(sign.long() * latent_keys) + (state.long() * latent_keys).sum(-1, keepdim=True)
        at = torch.searchsorted(taken, keys).clamp(max=taken.shape[1] - 1)
        best = values.masked_fill(taken.gather(1, at) == keys, -math.inf).argmax(1, keepdim=True)
        children.append((state - near.flips(best).to(state)).abs())
        taken = torch.cat([taken, keys.gather(1, best)], 1).sort(1).values
    return torch.stack(children, 1)


def _gains(states: Tensor, effects: Tensor, pairs: Tensor) -> Tensor:
    """What flips of each latent alone add to quadratic functions."""
    return (1 - 2 * states) * (effects + states @ pairs)


def _climbed(states: Tensor, effects: Tensor, pairs: Tensor) -> Tensor:
    """States ``(n, C, H)`` after flips that each raise their quadratic functions most."""
    for _ in range(_CLIMB):
        gain, latent = _gains(states, effects, pairs).max(-1, keepdim=True)
        flip = torch.zeros_like(states).scatter_(-1, latent, (gain > 0).to(states))
        states = (states - flip).abs()
    return states


class Neighbours(NamedTuple):
    """A state, all that are one flip away, and those two flips away of the latents that alone would gain most, for each data point.

    Attributes:
        best: these latents, ``(n, B)``.
        one: which of them is flipped first in states two flips away.
        other: which second.
        num_latents: number of all latents ``H``.
    """

    best: Tensor
    one: Tensor
    other: Tensor
    num_latents: int

    @classmethod
    def of(cls, gain: Tensor) -> Neighbours:
        """Those of states whose flips gain this, ``(n, H)``."""
        best = gain.topk(min(_PAIRED, gain.shape[1]), 1).indices
        one, other = torch.triu_indices(best.shape[1], best.shape[1], 1, device=gain.device)
        return cls(best, one, other, gain.shape[1])

    def sums(self, values: Tensor) -> Tensor:
        """Sums ``(n, 1 + H + len(one))`` over the flipped latents of values ``(n, H)``."""
        best = values.gather(1, self.best)
        return torch.cat([torch.zeros_like(values[:, :1]), values, best[:, self.one] + best[:, self.other]], 1)

    def products(self, values: Tensor) -> Tensor:
        """Products ``(n, len(one))`` of values of the two latents of states two flips away."""
        best = values.gather(1, self.best)
        return best[:, self.one] * best[:, self.other]

    def between(self, pairs: Tensor) -> Tensor:
        """Entries ``(n, len(one))`` of a matrix at the two latents of states two flips away."""
        return pairs[self.best.unsqueeze(2), self.best.unsqueeze(1)][:, self.one, self.other]

    def flips(self, chosen: Tensor) -> Tensor:
        """Which latents are flipped in the chosen ones ``(n, 1)``, booleans ``(n, H)``."""
        latent, pair = torch.arange(self.num_latents, device=chosen.device), chosen - 1 - self.num_latents
        one, other = (self.best.gather(1, which[pair.clamp(min=0)]) for which in (self.one, self.other))
        return torch.where(pair < 0, latent == chosen - 1, (latent == one) | (latent == other))


def _keys(words: Tensor) -> Tensor:
    """One number for each state: a sum over its words, so that it is one over its latents too."""
    factors = torch.arange(words.shape[-1], device=words.device) * 0x9E3779B97F4A7C + 1
    return (words * factors).sum(-1)
