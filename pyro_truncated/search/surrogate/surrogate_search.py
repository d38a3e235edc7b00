"""Surrogate search: Thompson sampling from regressions, for expensive scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.search.base import Search, SearchBatch, flat_observations, regression_inputs
from pyro_truncated.search.exhaustive import draw_by_weight
from pyro_truncated.search.surrogate.log_joint_regression import IMPOSSIBLE, EffectsPosterior, LogJointRegression, ScoredBatch
from pyro_truncated.search.surrogate.moment_regression import ApproximateLikelihoods, MomentRegression, PrincipalComponents
from pyro_truncated.search.surrogate.quadratic_functions import QuadraticFunctions
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import check_counts, check_kinds, names_arguments

# In the place of the log joints of states of probability zero, and of repetitions.
_LOWEST = -1e30


class SurrogateSearch(Search):
    """Scores the states that regressions on earlier scores think best.

    For binary latents of models whose scores are expensive. Where the model tells means of the observations, these are regressed on all
    scored states as a quadratic function shared by all data (:class:`.MomentRegression`). What log joints lack of the likelihood that
    follows is regressed on linear effects and pairwise interactions (:class:`.LogJointRegression`).

    Each child is the best unscored state near an optimum of effects drawn from their posterior (Thompson sampling).

    Log joints alone are regressed if the moments are not known, there are more than 64 latents, or the approximate likelihoods were wrong
    for most states.

    Moments are known of a model of plain Pyro with one data plate and no conditional, whose states are scored together. Its observations
    must be neither masked nor scaled, and have means and variances.

    The search's own work takes about 6 microseconds a score with 20 latents, 60 with 40, and 450 with 64. It pays where a score takes
    longer.

    Example:
        >>> y = linear_bars(40, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, SurrogateSearch(4), steps=5)

    Args:
        children: number of states proposed in a step.
        memory: number of scored states per data point that are regressed on (at least a population): the best half, and of the others the
            latest.
        rank: number of principal components, of the means of observations, or of the inputs that effects depend on.
        inputs: what effects depend on, a function that makes ``(n, D)`` of a :class:`~pyro_truncated.search.SearchBatch`. Default: the
            observations, flattened. Missing (NaN) entries are replaced by the mean of their column.
        generator: source of randomness. Default: torch's global generator.

    Attributes:
        MAX_LATENTS: number of latents above which log joints alone are regressed.

    Raises:
        ValueError: if an argument is out of range; when searching, if a latent has more than two values.
        NotImplementedError: when searching, for data shared out to several processes.

    Reference:
        Baptista and Poloczek, "Bayesian optimization of combinatorial structures", ICML 2018.
    """

    MAX_LATENTS: ClassVar[int] = 64
    binary_only = True

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
        self.regressions: dict[str, LogJointRegression] = {}
        self.expected: MomentRegression | None = None
        self._projection: PrincipalComponents | None = None
        self._states: ScoredStates | None = None
        self._surprise: Tensor | None = None
        self._has_new_data = self._is_misled = False

    @property
    def takes_moments(self) -> bool:
        """Whether moments help: few enough latents, and likelihoods not found wrong."""
        return not self._is_misled and all(len(known.variance) <= self.MAX_LATENTS for known in self.regressions.values())

    def propose(self, batch: SearchBatch) -> Population:
        """Proposes children ``(N, children)`` with the highest predicted log joints.

        The regression learns from the scores of all that are evaluated.

        Raises:
            NotImplementedError: if several processes share the data.
        """
        self.check_space(batch.space)
        if batch.is_spread:
            raise NotImplementedError("SurrogateSearch learns from the data of one process; got a shard: pass all data in one process")
        is_continued = self._states is not None and self._states.holds(batch)
        if not is_continued:
            self._surprise = None
        history = self._states = ScoredStates.from_batch(batch, self._states)
        memory = history.truncate(max(self.memory, batch.population.num_states))
        states, features = memory.states(), self._features(batch)
        samples, likelihoods = ScoredBatch(states, memory.log_joint, features), self._likelihoods(batch, is_continued)
        # Also where likelihoods are known: of other data they may not be.
        regression = self._update_regression("log joints", samples, batch)
        if likelihoods is not None:
            # Effects of the data are in the likelihoods: what is left are the same constants for all.
            residuals = ScoredBatch(states, memory.log_joint, features[:, -1:], likelihoods(states))
            self._is_misled |= self._may_learn(batch) and not residuals.baseline_fits()
            if self._is_misled:
                likelihoods = None
            else:
                samples, regression = residuals, self._update_regression("rest", residuals, batch)
        if likelihoods is None:
            self._surprise = None
        functions = QuadraticFunctions(
            self._draw_effects(EffectsPosterior(samples, regression, self._surprise), batch), regression.effects.pairs
        )
        start = batch.space.unpack(draw_by_weight(batch, self.children, self.generator)).double()
        if likelihoods is None:
            candidates = batch.evaluate(
                batch.space.pack(functions.best_new_states(functions.ascend(start), history.space, history.words).long())
            )
        else:
            # Half of the children start from another data point's best state.
            uniform = ops.uniform(shape=(self.children // 2,), **batch.draws(self.generator))
            others = samples.best[(uniform.double() * len(samples.best)).long(), 0]
            children = self._likely(likelihoods, functions, torch.cat([start[:, ::2], others], 1))
            candidates = self._score_and_learn(children, batch)
            self._surprise = _surprise(likelihoods, samples, children.double(), candidates.log_joint)
        self._states = history.with_more(candidates)
        return candidates

    def state_dict(self) -> dict[str, Any]:
        """The state of the generator, and what has been learned of data."""
        if self._projection is None:
            return super().state_dict()
        regressions = {name: regression.state_dict() for name, regression in self.regressions.items()}
        state: dict[str, Any] = {"regressions": regressions, "projection": list(self._projection)}
        state["is_of_new_data"], state["is_misled"] = self._has_new_data, self._is_misled
        if self.expected is not None:
            state["expected"] = self.expected.state_dict()
        return {**super().state_dict(), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where a search has been; scores are made anew."""
        self.forget()
        super().load_state_dict(state)
        if "projection" in state:
            self.regressions = {name: LogJointRegression.from_state(regression) for name, regression in state["regressions"].items()}
            self._projection = PrincipalComponents(*state["projection"])
            self._has_new_data, self._is_misled = bool(state["is_of_new_data"]), bool(state["is_misled"])
        if "expected" in state:
            self.expected = MomentRegression.from_state(state["expected"])

    def _features(self, batch: SearchBatch) -> Tensor:
        """Returns the first inputs' principal components and a one, ``(n, Q)``."""
        inputs = regression_inputs(batch, self.inputs)
        if self._projection is None or len(self._projection.centre) != inputs.shape[1] or (self._has_new_data and not batch.is_new):
            self.regressions, self.expected, self._has_new_data, self._is_misled = {}, None, batch.is_new, False
            self._projection = PrincipalComponents.fit(inputs, self.rank)
        return self._projection(inputs)

    def _may_learn(self, batch: SearchBatch) -> bool:
        return self._has_new_data or not batch.is_new

    def _update_regression(self, name: str, samples: ScoredBatch, batch: SearchBatch) -> LogJointRegression:
        """Returns the regression of log joints, updated by training data."""
        sizes, regression = (samples.states.shape[-1], samples.features.shape[1]), self.regressions.get(name)
        if regression is None or regression.effects.linear.shape != sizes:
            regression = LogJointRegression(*sizes, samples.states.device)
        if self._may_learn(batch):
            self.regressions[name] = regression
            regression.fit(samples)
        return regression

    def _score_and_learn(self, children: Tensor, batch: SearchBatch) -> Population:
        """Scores children and learns the moments of observations in them."""
        words = batch.space.pack(children.long())
        if self.expected is None or not self._may_learn(batch):
            return batch.evaluate(words)
        candidates, moments = batch.evaluate_with_moments(words)
        if moments is not None:
            self.expected.take(moments, batch.space)
        return candidates

    def _likelihoods(self, batch: SearchBatch, is_continued: bool) -> ApproximateLikelihoods | None:
        """Returns approximate likelihoods, or ``None`` where moments do not help."""
        moments, num_latents = batch.moments, batch.space.num_latents
        if moments is None or self._is_misled or num_latents > self.MAX_LATENTS:
            return None
        observations = flat_observations(batch)
        num_values = observations.shape[1]
        if num_values != moments.mean.shape[-1]:
            return None
        if self.expected is None or not self.expected.fits(num_latents, num_values):
            if not self._may_learn(batch):
                return None
            self.expected = MomentRegression(num_latents, num_values, self.rank, observations.device)
        if self._may_learn(batch) and not is_continued:
            self.expected.fade()
            self.expected.take(moments, batch.space)
        return self.expected.likelihoods(observations)

    def _likely(self, likelihoods: ApproximateLikelihoods, others: QuadraticFunctions, start: Tensor) -> Tensor:
        """Returns the best unscored states near optima reached from a start."""
        assert self._states is not None
        # States whose second orders fit into the cache.
        children, number = [], max(1, 512 // self.children)
        for first in range(0, len(start), number):
            rows = slice(first, first + number)
            likelihood = likelihoods._replace(observed=likelihoods.observed[rows])
            states, rest = start[rows].float(), QuadraticFunctions(others.effects[rows].float(), others.pairs.float())
            for _ in range(3):
                states = likelihood.second_order(states, rest).ascend_by_pairs(states)
            children.append(likelihood.second_order(states, rest).best_new_states(states, self._states.space, self._states.words[rows]))
        return torch.cat(children)

    def _draw_effects(self, posterior: EffectsPosterior, batch: SearchBatch) -> Tensor:
        """Linear effects for each child, ``(n, children, H)``."""
        num_samples, num_latents = posterior.samples.states.shape[1:]
        uniform = ops.uniform(shape=(self.children, num_latents + num_samples), **batch.draws(self.generator))
        normal = torch.special.ndtri(uniform.double().clamp(min=1e-16))
        normal[:, 0] = 0.0
        # Some children are cautious; a posterior may be wrong.
        normal[:, 1:] *= torch.logspace(-1.0, 1.0, self.children - 1, base=2.0, dtype=normal.dtype, device=normal.device).view(1, -1, 1)
        assert self._states is not None
        # A data point gets stuck where the regression trusts itself.
        normal *= 1.0 + (self._states.num_since_best() >= 2 * self.children).to(normal).view(-1, 1, 1)
        return posterior.draws(normal[..., :num_latents], normal[..., num_latents:])


def _surprise(likelihoods: ApproximateLikelihoods, samples: ScoredBatch, children: Tensor, log_joint: Tensor) -> Tensor:
    """Root mean square errors ``(n,)`` of likelihoods, per root of flips.

    Impossible states are left out. No error counts more than the median change of a flip, since a constraint may cost anything.
    """
    most = dataclasses.replace(samples, baseline=None).median_flip_change() or 0.0
    expected = likelihoods(children) - likelihoods(samples.best)
    actual = log_joint.double().clamp(min=_LOWEST) - samples.log_joint.amax(1, keepdim=True)
    flips = (children - samples.best).abs().sum(-1).clamp(min=1)
    wrong = ((actual - expected).abs() / flips.sqrt()).clamp(max=most).masked_fill(actual < -IMPOSSIBLE, torch.nan)
    return wrong.square().nanmean(1).sqrt().nan_to_num(nan=0.0)


@dataclasses.dataclass(frozen=True)
class ScoredStates:
    """States ``(N, M, W)`` of data points with log joints ``(N, M)`` in float64."""

    space: StateSpace
    positions: Tensor
    words: Tensor
    log_joint: Tensor

    @classmethod
    def from_batch(cls, batch: SearchBatch, before: ScoredStates | None) -> ScoredStates:
        """Returns a batch's states, and earlier ones with unchanged log joints."""
        population = batch.population
        log_joint = population.log_joint.double().clamp(min=_LOWEST)
        if before is not None and before.holds(batch):
            return before.with_more(population)
        return cls(batch.space, batch.positions, population.words, log_joint)

    def holds(self, batch: SearchBatch) -> bool:
        """Whether the best are still in populations, with equal log joints."""
        population = batch.population
        if self.space is not batch.space or not torch.equal(self.positions, batch.positions):
            return False
        best, at = self.log_joint.max(1, keepdim=True)
        is_there = (population.words == ops.gather_states(self.words, at)).all(-1)
        is_same = is_there & (population.log_joint.double().clamp(min=_LOWEST) == best)
        return bool(is_there.any()) and bool((is_same.any(1) | ~is_there.any(1)).all())

    def with_more(self, population: Population) -> ScoredStates:
        """Appends other states, without repetitions within a data point."""
        words = torch.cat([self.words, population.words], 1)
        is_new = ~ops.find_duplicates(words)
        log_joint = torch.cat([self.log_joint, population.log_joint.double().clamp(min=_LOWEST)], 1).masked_fill(~is_new, _LOWEST)
        size = max(1, int(is_new.sum(1).max()))
        order = is_new.long().sort(dim=1, descending=True, stable=True).indices[:, :size]
        return self._select(order, words, log_joint)

    def truncate(self, size: int) -> ScoredStates:
        """Keeps the best half, and the latest of the others."""
        number = self.log_joint.shape[1]
        if number <= size:
            return self
        age = torch.arange(number, device=self.log_joint.device).expand_as(self.log_joint)
        best = self.log_joint.topk(size - size // 2, 1).indices
        rank = age.masked_fill(self.log_joint <= _LOWEST, -1).scatter(1, best, number)
        return self._select(rank.topk(size, 1).indices.sort(1).values, self.words, self.log_joint)

    def num_since_best(self) -> Tensor:
        """How many states come after the best one, ``(N,)``, initial ones included."""
        return self.log_joint.shape[1] - 1 - self.log_joint.argmax(1)

    def _select(self, order: Tensor, words: Tensor, log_joint: Tensor) -> ScoredStates:
        return dataclasses.replace(self, words=ops.gather_states(words, order), log_joint=log_joint.gather(1, order))

    def states(self) -> Tensor:
        """The states' values, ``(N, M, L)`` in float64."""
        return self.space.unpack(self.words).double()
