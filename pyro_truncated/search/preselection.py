"""Preselection: all combinations of a few latents with high affinity."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.ops.packed_states import combine, single_states
from pyro_truncated.search.base import Search, SearchBatch, Stateful, apply_to_batch
from pyro_truncated.states.population import Population, join
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import check_count, check_kinds, names_arguments


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a preselection: pairs of latent and value, with their states.

    Of binary latents these are the latents. Of latents with more values they are every non-zero value of every
    latent, in this order. A single latent per data point (the class of a mixture) has no value for "nothing", so all
    its values are options. Those of one latent are a group and exclude each other in a selection; of a mixture each
    is a group on its own.
    """

    latent: Tensor  # (P,) int64, as the next two
    value: Tensor
    group: Tensor  # numbered from 0 in order
    words: Tensor  # the packed state with this latent at this value and all others at zero, (P, num_words)
    num_groups: int  # how many options can be selected together

    def __len__(self) -> int:
        return len(self.latent)


@functools.lru_cache(maxsize=16)
def space_options(space: StateSpace, device: torch.device | str = "cpu") -> Options:
    """The options of a state space, brought to a device once."""
    is_mixture = space.num_latents == 1
    latent, value, words = single_states(space.fields, first=0 if is_mixture else 1)
    group = torch.arange(len(latent), device="cpu") if is_mixture else latent.unique_consecutive(return_inverse=True)[1]
    num_groups = int(group[-1]) + 1 if len(group) else 0
    return Options(latent.to(device), value.to(device), group.to(device), words.to(device), num_groups)


Affinity = Callable[[SearchBatch], Tensor]


class AffinityOwner(Stateful):
    """An object that ranks by an affinity, which may learn from data."""

    affinity: Any

    @property
    def learns(self) -> bool:
        """Whether the affinity does."""
        return getattr(self.affinity, "learns", False)

    def meet(self, batch: SearchBatch) -> None:
        """Lets the affinity learn."""
        if self.learns:
            self.affinity.meet(batch)

    def forget(self) -> None:
        """Lets the affinity forget what it has learned of data."""
        getattr(self.affinity, "forget", lambda: None)()

    def state_dict(self) -> dict[str, Any]:
        """Returns the generator's state and what the affinity has learned."""
        return {**super().state_dict(), "affinity": dict(getattr(self.affinity, "state_dict", dict)())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where a search has been."""
        super().load_state_dict(state)
        getattr(self.affinity, "load_state_dict", lambda state: None)(state["affinity"])


class AffinitySearch(AffinityOwner, Search):
    """A search that ranks by an affinity."""


class Singletons:
    r"""Log joint of single active latents: :math:`f_{nh} = \log p(s = e_h, y_n)`.

    For latents of several values it is that of the state with this value alone. For a mixture it is the log joint of
    every class. It works for every model and costs the evaluation of one state per option.

    Example:
        >>> search = Preselection(Singletons(), 4)  # for any model of binary latents
    """

    def __call__(self, batch: SearchBatch) -> Tensor:
        """Scores ``(N, P)`` of the options of the batch's data points."""
        words = space_options(batch.space, batch.population.words.device).words
        return batch.score(words.expand(len(batch.population), -1, -1).contiguous())


class _Dictionary(abc.ABC):
    """An affinity that compares observations with the columns of a dictionary."""

    @names_arguments
    def __init__(self, weight: Callable[[], Tensor], site: str | None = None) -> None:
        if not callable(weight):
            raise TypeError(
                f"weight must be a function that returns the current dictionary, such as lambda: model.weight; got {type(weight).__name__}"
            )
        self.weight = weight
        self.site = site

    def __call__(self, batch: SearchBatch) -> Tensor:
        """Scores ``(N, H)`` of the data points of a batch."""
        names = list(batch.observations)
        if self.site is None and len(names) != 1:
            raise ValueError(f"{type(self).__name__} needs the name of one observed site (site=...); the model has {names}")
        if self.site is not None and self.site not in names:
            raise ValueError(f"{type(self).__name__} found no observed site {self.site!r}; the model has {names}")
        observed, weight = batch.observations[names[0] if self.site is None else self.site], self.weight().detach()
        observed = observed if observed.is_floating_point() else observed.to(torch.get_default_dtype())
        if weight.dim() != 2 or observed.dim() != 2 or weight.shape[0] != observed.shape[1]:
            raise ValueError(
                f"{type(self).__name__} compares observations (N, D) with a dictionary (D, H); "
                f"got shapes {tuple(observed.shape)} and {tuple(weight.shape)}"
            )
        return self._compare(observed, weight.to(observed))

    @abc.abstractmethod
    def _compare(self, observed: Tensor, weight: Tensor) -> Tensor:
        """Scores ``(N, H)`` of observations ``(N, D)``."""


class Projection(_Dictionary):
    r"""Projection of the observation on the dictionary, :math:`f_{nh} = W_h^\top y_n`.

    Missing (NaN) entries are left out.

    Example:
        >>> model = BinarySparseCoding(16, 8)
        >>> search = Preselection(Projection(lambda: model.weight), 4)

    Args:
        weight: returns the current dictionary :math:`W`, ``(D, H)``.
        site: name of the observed site; needed only where there are several.
    """

    def _compare(self, observed: Tensor, weight: Tensor) -> Tensor:
        return observed.nan_to_num(nan=0.0) @ weight


class Cosine(_Dictionary):
    r"""Cosine of observation and dictionary element, times the observation's norm.

    The norm does not change ranks.

    .. math:: f_{nh} = W_h^\top y_n / \|W_h\|

    Sums and norms run over the observed entries of :math:`y_n`; an element without length there has the score zero.

    Example:
        >>> model = BinarySparseCoding(16, 8)
        >>> search = Preselection(Cosine(lambda: model.weight), 4)

    Args:
        weight: returns the current dictionary :math:`W`, ``(D, H)``.
        site: name of the observed site; needed only where there are several.
    """

    def _compare(self, observed: Tensor, weight: Tensor) -> Tensor:
        missing = observed.isnan()
        if not bool(missing.any()):
            direction: Tensor = weight / _replace_zeros(weight.norm(dim=0))
            return observed @ direction
        norm = ((~missing).to(weight) @ weight.square()).sqrt()
        projection: Tensor = observed.nan_to_num(nan=0.0) @ weight
        return projection / _replace_zeros(norm)


def _replace_zeros(norm: Tensor) -> Tensor:
    return torch.where(norm > 0, norm, 1.0)


class Preselection(AffinitySearch):
    r"""Proposes all states over the :math:`H'` latents of highest affinity.

    :math:`r_n` of the :math:`H'` places are given to chance. The :math:`H' - r_n` latents of largest affinity and
    :math:`r_n` others, drawn uniformly from the rest, form the selection :math:`I_n`. So every latent has a positive
    probability. The proposals are :math:`\{s : s_h = 0 \text{ for } h \notin I_n, |s| \le \gamma\}`.

    Latents of more than two values are selected with their value of largest affinity, and are zero or have this value
    in the proposals. Of a single latent per data point (the class of a mixture), :math:`H'` values are selected and
    proposed.

    Example:
        >>> from pyro_truncated.search import Cosine
        >>> y = linear_bars(20, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> search = Preselection(Cosine(lambda: model.weight), 4)  # all 16 states over the four best latents of each data point
        >>> guide = AutoTruncated(model, num_states=16).infer(y, search, steps=1)

    Args:
        affinity: maps a :class:`~pyro_truncated.search.SearchBatch` to scores ``(N, P)``, larger for latents that are more likely to be
            active. There is one column per binary latent, per class of a mixture, or else per non-zero value of every latent.
        num_selected: number of selected latents :math:`H'`. All of them where there are fewer.
        max_active: largest number :math:`\gamma` of active latents in a proposal. Default: all :math:`2^{H'}` states. Has no meaning
            for a mixture.
        explore: mean share of the :math:`H'` places given to chance, with :math:`r_n = \lfloor \mathrm{explore} \cdot H' + u_n \rfloor`
            and a uniform :math:`u_n`. Use 0 for the last iterations, and for prediction.
        merge: whether proposals join the population, so that no free energy falls. Otherwise the best of them replace it (expectation
            truncation).
        generator: source of randomness. Default: torch's global generator.

    Raises:
        TypeError: if the affinity is not callable.
        ValueError: if an argument is out of range.

    Reference:
        Lücke and Eggert, "Expectation truncation and the benefits of preselection in training generative models",
        JMLR 11 (2010). For the random share: Shelton, Gasthaus, Dai, Lücke and Gretton, "GP-select: Accelerating EM
        using adaptive subspace preselection", Neural Computation 29 (2017).
    """

    @names_arguments
    def __init__(
        self,
        affinity: Affinity,
        num_selected: int,
        *,
        max_active: int | None = None,
        explore: float = 0.1,
        merge: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        if not callable(affinity):
            raise TypeError(f"affinity must be a function of a SearchBatch, such as Singletons(); got {type(affinity).__name__}")
        num_selected = check_count("num_selected", num_selected)
        max_active = None if max_active is None else check_count("max_active", max_active)
        if not 0 <= explore <= 1:
            raise ValueError(f"explore must lie in [0, 1]; got {explore}")
        self.affinity = affinity
        self.num_selected = num_selected
        self.max_active = max_active
        self.explore = explore
        check_kinds(Preselection.__init__, merge=merge, generator=generator)
        self.merge = merge
        self.generator = generator

    def propose(self, batch: SearchBatch) -> Population:
        """The states over the selected latents: ``(N, S)``, distinct within each data point."""
        options = space_options(batch.space, batch.population.words.device)
        words = options.words[self._select(batch, options)]
        return batch.evaluate(words if batch.space.num_latents == 1 else combine(words, self.max_active))

    def step(self, batch: SearchBatch) -> Population:
        """The improved populations, or, without ``merge``, the best of the proposals alone.

        Raises:
            ValueError: if the proposals shall fill the populations but are too few.
        """
        if self.merge:
            return super().step(batch)
        proposals, size = self.propose(batch), batch.population.num_states
        if proposals.num_states < size:
            raise ValueError(
                f"merge=False fills populations of {size} states from {proposals.num_states} proposals; "
                "select more latents (num_selected), raise max_active, or use fewer states (num_states)"
            )
        best = proposals.log_joint.topk(size, 1).indices
        words = proposals.take(best)
        return dataclasses.replace(proposals, words=words, log_joint=proposals.log_joint.gather(1, best))

    def select(self, batch: SearchBatch) -> Tensor:
        """Returns selected latents ``(N, num_selected)``, of a mixture classes.

        Those of largest affinity come first, random ones last.

        Raises:
            ValueError: if the affinity is not of the right shape or NaN.
        """
        options = space_options(batch.space, batch.population.words.device)
        return (options.value if batch.space.num_latents == 1 else options.latent)[self._select(batch, options)]

    def _select(self, batch: SearchBatch, options: Options) -> Tensor:
        """Positions of the selected options, ``(N, num_selected)``."""
        num_selected = min(self.num_selected, options.num_groups)
        scores = self._scores(batch, options)
        draws = batch.draws(self.generator)
        lottery = ops.Stream(ops.draw_seed(draws["generator"]))
        selection = _select_best(scores, options, num_selected)
        offset = ops.uniform(shape=(1,), **draws)
        num_random = (self.explore * num_selected + offset).floor().long().clamp(max=num_selected)
        # A device does the work for all data points rather than be waited for to know which ones need it.
        rows = slice(None) if ops.is_vectorised(selection) else num_random.squeeze(1).nonzero().squeeze(1)
        most = min(num_selected, int(self.explore * num_selected) + 1)
        if len(selection[rows]) and most:
            keys = ops.uniform(draws["rows"][rows], (len(options),), generator=lottery)
            selection[rows] = _replace_by_chance(selection[rows], num_random[rows], most, options, keys)
        return selection

    def _scores(self, batch: SearchBatch, options: Options) -> Tensor:
        scores = apply_to_batch(self.affinity, batch)
        expected = (len(batch.population), len(options))
        if not isinstance(scores, Tensor) or tuple(scores.shape) != expected:
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"the affinity must return a tensor of shape {expected}, data points by latents (or values); got {got}")
        ops.raise_if(
            scores.isnan().any(),
            lambda: f"the affinity is NaN for {int(scores.isnan().any(1).sum())} of {len(scores)} data points: check its inputs",
        )
        return scores.detach()


def _replace_by_chance(selection: Tensor, num_random: Tensor, most: int, options: Options, keys: Tensor) -> Tensor:
    """Fills the last places of selections ``(N, K)`` by chance, from other groups."""
    place = torch.arange(selection.shape[1], device=selection.device) - (selection.shape[1] - num_random)
    is_selected = torch.zeros(len(selection), options.num_groups, dtype=torch.bool, device=selection.device)
    is_selected.scatter_(1, options.group[selection], place < 0)
    # At least as many groups are left as places; what the fill would add beyond them is never looked at.
    others = _select_best(keys.masked_fill(is_selected[:, options.group], -math.inf), options, most)
    return torch.where(place < 0, selection, others.gather(1, place.clamp(0, most - 1)))


def _select_best(scores: Tensor, options: Options, count: int) -> Tensor:
    """Positions ``(N, count)`` of largest scores, at most one of each group."""
    if options.num_groups == len(options):
        return scores.topk(count, 1).indices
    # Every group in a row of its own, filled up behind its options; among equal scores, torch takes the first.
    sizes = torch.bincount(options.group)
    first = sizes.cumsum(0) - sizes
    place = torch.arange(len(options), device=scores.device) - first[options.group]
    grid = scores.new_full((len(scores), len(sizes), int(sizes.max())), -math.inf)
    grid[:, options.group, place] = scores
    best = grid.max(-1)
    group = best.values.topk(count, 1).indices
    return first[group] + best.indices.gather(1, group)


class CombinedFlips(Search):
    r"""Combines the best single flips of the best state.

    It is for many binary latents.

    With the best state :math:`s^*` of a population and its flips :math:`s^* \oplus e_h`, the :math:`H'` latents of largest

    .. math:: \log p(s^* \oplus e_h, y_n) - \log p(s^*, y_n)

    form the selection :math:`I_n`, and the proposals are :math:`\{s^* \oplus e_J : J \subseteq I_n\}`. The difference
    says how uncertain a latent is given all others, under any model. So latents that best explain the residual are
    tried, and those that hardly help are removed. The best proposal begins the next round. A round takes :math:`H +
    2^{H'}` scores per data point.

    :class:`EvolutionarySearch` and :class:`ConditionalSearch` rarely hit the few relevant ones of a thousand latents;
    where there are few latents they look around more widely. For sums of causes
    (:class:`~pyro_truncated.distributions.LinearSuperposition`) all flips of a state with ``k`` active latents take
    :math:`O(kH)`.

    Example:
        >>> y = linear_bars(20, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, CombinedFlips(4), steps=5)

    Args:
        num_selected: number of latents whose flips are combined, :math:`H'`; all of them where there are fewer.
        rounds: how often that is done in a step. Where data points are seen once or a few times, two do much more than one.

    Raises:
        ValueError: if a number is no positive integer; when searching, if a latent has more than two values.
    """

    binary_only = True

    @names_arguments
    def __init__(self, num_selected: int = 6, rounds: int = 2) -> None:
        self.num_selected, self.rounds = check_count("num_selected", num_selected), check_count("rounds", rounds)

    def max_proposals(self, num_states: int) -> int:
        """All combinations of all rounds."""
        return self.rounds << self.num_selected

    def propose(self, batch: SearchBatch) -> Population:
        """The best states with all combinations of their most promising flips, ``(N, rounds * 2**num_selected)``."""
        self.check_space(batch.space)
        populations = [self._combine_flips(batch.population.mode(), batch)]
        while len(populations) < self.rounds:
            populations.append(self._combine_flips(populations[-1].mode(), batch))
        return join(populations)

    def _combine_flips(self, best: Tensor, batch: SearchBatch) -> Population:
        """States ``(N, W)``, then all combinations of their best flips."""
        states, flips = best.unsqueeze(1), space_options(batch.space, best.device).words
        flip_gains = getattr(batch.score, "flip_gains", None)
        gains = None if flip_gains is None else flip_gains(best)
        if gains is None:
            # A few at a time, so that words of many latents need no more memory than those of other searches.
            gains = torch.cat([batch.score(states ^ some) for some in flips.split(256)], 1)
        index = gains.topk(min(self.num_selected, gains.shape[1]), 1).indices
        return batch.evaluate(combine(flips[index]) ^ states)
