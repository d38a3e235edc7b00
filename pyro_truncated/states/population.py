"""Populations: distinct states kept for each data point, and their log joints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import Renamed, check_count
from pyro_truncated.utils.budget import rows_per_block
from pyro_truncated.utils.constraints import missing_where


class Moments(NamedTuple):
    """Means and variances of the observations in ``M`` states.

    The states may belong to any data points. All sites stand side by side.
    """

    words: Tensor  # the states, (M, num_words)
    mean: Tensor  # of each observed value in each state, (M, D)
    variance: Tensor  # likewise

    @classmethod
    def concatenate(cls, parts: Sequence[Moments]) -> Moments:
        """Those of all parts."""
        return parts[0] if len(parts) == 1 else cls(*map(torch.cat, zip(*parts, strict=True)))


States = Tensor | Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Population:
    r"""``S`` packed states for each of ``N`` data points.

    They have log joints :math:`\log p(s, y_n)`.

    The truncated posterior is :math:`q_n(s) \propto p(s, y_n)` on the states of the population. States of one data point must be
    distinct wherever the population stands for a posterior. A state held twice would be counted
    twice, and the "bound" could exceed the evidence. :meth:`merge` keeps them distinct. Candidates
    that a search proposes may repeat each other.

    Example:
        >>> space = StateSpace([2, 2])
        >>> words = space.pack(torch.tensor([[[0, 1], [1, 1]]]))
        >>> population = Population(space, words, torch.tensor([[0.25, 0.5]]).log())
        >>> population.weights()
        tensor([[0.3333, 0.6667]])
        >>> population.free_energy().exp()
        tensor([0.7500], dtype=torch.float64)
        >>> population.marginals()
        tensor([[0.6667, 1.0000]])

    Attributes:
        space: the state space.
        words: packed states, ``(N, S, num_words)`` int64.
        log_joint: log joints ``(N, S)``; ``-inf`` for a state of probability zero.
        indices: positions ``(N,)`` of the data points in the full data set, or ``None`` if these are all data in order.
    """

    space: StateSpace
    words: Tensor
    log_joint: Tensor
    indices: Tensor | None = None

    def __len__(self) -> int:
        return self.words.shape[0]

    @property
    def num_states(self) -> int:
        """Number of states per data point, ``S``."""
        return self.words.shape[1]

    @property
    def is_complete(self) -> bool:
        """Whether every population holds all states, so that the posterior is exact."""
        return self.num_states >= self.space.size

    def split(self, rows: int) -> list[Population]:
        """Returns populations of at most so many data points, in order.

        A population that is not larger is returned itself.
        """
        if len(self) <= rows:
            return [self]
        indices = torch.arange(len(self), device=self.words.device) if self.indices is None else self.indices
        blocks = zip(self.words.split(rows), self.log_joint.split(rows), indices.split(rows), strict=True)
        return [Population(self.space, *block) for block in blocks]

    def weights(self, temperature: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        r"""Posterior weights :math:`q_n(s)`, ``(N, S)``; at a temperature :math:`\tau`, :math:`q \propto p^{1/\tau}`.

        A data point whose states all have probability zero has no posterior; its weights are equal, so that a search can go on. Their sums
        are one to the last digits of the ``dtype``, which is that of the log joints unless another is named.

        Raises:
            RuntimeError: for data points whose states have never been scored under the model.
        """
        log_joint = self.log_joint if temperature == 1.0 else self.log_joint / temperature
        possible = log_joint.amax(-1, keepdim=True) > -math.inf
        if ops.is_vectorised(possible):
            ops.raise_if(log_joint.isnan().any(), self._refuse_unscored_states)
            log_joint = log_joint.masked_fill(~possible, 0.0)
        elif not bool(possible.all()):
            self._refuse_unscored_states()
            log_joint = log_joint.masked_fill(~possible, 0.0)
        return log_joint.softmax(-1, dtype)

    def _refuse_unscored_states(self) -> None:
        unscored = self.log_joint.isnan().any(-1).nonzero().squeeze(-1)
        if len(unscored):
            raise RuntimeError(
                f"the states of {len(unscored)} of {len(self)} data points (first: {int(unscored[0])}) have never been scored: no "
                "minibatch has held them yet. With the model's arguments call guide.posterior(*args), or guide.refresh_(*args), which "
                "also keeps the scores."
            )

    def free_energy(self) -> Tensor:
        r"""Returns the lower bound of each data point's log evidence.

        It is :math:`\log\sum_s p(s, y_n)`, ``(N,)`` in float64, and NaN where never scored.
        """
        # Temporaries that the cache of a CPU holds take a third of the time.
        rows = rows_per_block(256 * self.num_states, None if ops.is_vectorised(self.log_joint) else 2**24)
        return torch.cat([block.double().logsumexp(-1) for block in self.log_joint.split(rows)])

    def states(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns unpacked values ``(N, S, L)``.

        By default they have the smallest integer type that holds them.
        """
        return self.space.unpack(self.words, dtype)

    def marginals(self) -> Tensor:
        r"""Probability :math:`\sum_s q_n(s) [s_l \ne 0]` that a latent is active, ``(N, L)``."""
        return ops.activation_probabilities(self.words, self.weights(), self.space.fields)

    def value_probabilities(self, temperature: float = 1.0) -> Tensor:
        r"""Probability :math:`\sum_s q_n(s) [s_l = v]` of each value, ``(N, L, V)`` with ``V`` the largest cardinality.

        Summed over the data points they are the sufficient statistics of the latents' priors. For :math:`P(s_l = v) = \pi_{lv}` the
        gradient is :math:`\partial \mathcal F / \partial \pi_{lv} = \pi_{lv}^{-1} \sum_n q_n(s_l = v)`. Of a mixture, whose one latent is
        the component, they are the responsibilities.

        Args:
            temperature: temperature of the posteriors, see :meth:`weights`.
        """
        return ops.value_probabilities(self.words, self.weights(temperature), self.space.fields)

    def select_rows(self, data: Tensor) -> Tensor:
        """The rows of these data points among those ``(N, ...)`` of all data.

        Raises:
            ValueError: if there are other data points than these without indices, or fewer than indices select from.
        """
        if self.indices is None:
            if len(data) != len(self):
                raise ValueError(f"data must have a row for each of the population's {len(self)} data points; got {len(data)} rows")
            return data
        try:
            return missing_where(data.index_select(0, self.indices.to(data.device)), data)
        except IndexError as error:
            last = int(self.indices.max())
            raise ValueError(f"data must be all data, of which the population's indices select row {last}; got {len(data)} rows") from error

    rows_of = Renamed("select_rows")

    def rows_above(self, data: Tensor, center: Tensor) -> Tensor:
        """The same in float64 with a ``center`` subtracted."""
        rows = self.select_rows(data)
        return missing_where(rows.double() - center, rows)

    def activity(self) -> Tensor:
        """Expected number of active (non-zero) latents, ``(N,)``."""
        return self.marginals().sum(-1)

    def effective_states(self) -> Tensor:
        r"""Exponential of the posterior's entropy, :math:`\exp(-\sum_s q_n \log q_n)`, ``(N,)``: from 1 to ``S``."""
        entropy: Tensor = torch.special.entr(self.weights()).sum(-1)
        return entropy.exp()

    def mode(self) -> Tensor:
        """The most probable state of each data point as words ``(N, num_words)``."""
        return self.take(self.log_joint.argmax(-1, keepdim=True)).squeeze(1)

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws from the truncated posterior as words ``(num_samples, N, num_words)``."""
        num_samples = check_count("num_samples", num_samples)
        position = torch.multinomial(self.weights(), num_samples, replacement=True, generator=generator)
        return self.take(position).transpose(0, 1).contiguous()

    def expectation(self, f: Callable[[Tensor], Tensor], memory_budget: int | None = None) -> Tensor:
        r"""Posterior expectation :math:`\sum_s q_n(s) f(s)` of a function of the latents' values.

        Args:
            f: maps values ``(n, S, L)`` int64 of any ``n`` data points to ``(n, S, ...)``.
            memory_budget: bytes that a block of data points may take. Half of them is for the
                values, half for the results of ``f``. Default: the budget in force, see
                :func:`pyro_truncated.ops.memory_budget`.

        Returns:
            ``(N, ...)`` in the type of the weights, or that of ``f``'s values if it is wider.

        Raises:
            ValueError: if what the function returns does not start with the dimensions ``(n, S)``.
        """
        weights = self.weights()
        rows = rows_per_block(16 * self.num_states * self.space.num_latents, memory_budget)
        blocks = []
        # At least one block, empty if need be, because only `f` knows the shape of the result.
        for start in range(0, max(1, len(self)), rows):
            value = f(self.space.unpack(self.words[start : start + rows], torch.int64))
            weight = weights[start : start + rows]
            if not isinstance(value, Tensor) or value.shape[:2] != weight.shape:
                kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"the function must return a tensor that starts with the dimensions (N, S) = {tuple(weight.shape)}; got {kind}"
                )
            dtype = torch.promote_types(weight.dtype, value.dtype)
            blocks.append(torch.einsum("ns,ns...->n...", weight.to(dtype), value.to(dtype)))
        return torch.cat(blocks)

    def find_duplicates(self) -> Tensor:
        """Returns the positions of data points that hold a state twice, ascending."""
        return ops.find_duplicates(self.words).any(-1).nonzero().squeeze(-1)

    def assert_distinct(self) -> None:
        """Checks that no data point holds a state twice.

        Raises:
            ValueError: naming how many data points do, and the first.
        """
        rows = self.find_duplicates()
        if len(rows):
            raise ValueError(
                f"states repeat within {len(rows)} of {len(self)} data points (first: {int(rows[0])}). "
                "A repeated state would be counted twice and the bound could exceed the evidence."
            )

    def merge(self, candidates: Population, num_states: int | None = None) -> Population:
        """Returns the best distinct states of this population and the candidates.

        ``num_states`` are kept, by default as many as now.

        States of this population must be distinct, candidates need not. With the default, or a larger number, the free energy of
        no data point is below that of ``self``.

        Raises:
            ValueError: if some data point has fewer than ``num_states`` distinct states in the union.
        """
        size = self.num_states if num_states is None else num_states
        words, log_joint = ops.select_top(self.words, self.log_joint, candidates.words, candidates.log_joint, size)
        return dataclasses.replace(self, words=words, log_joint=log_joint)

    def without_impossible(self) -> Population:
        """Replaces states of probability zero by the best state, with weight zero.

        An enumerating ELBO multiplies log densities by weights. Where there is no possible state all weights are equal.
        """
        words, log_joint = self.words, self.log_joint
        impossible = log_joint == -math.inf
        if log_joint.dim() != 2 or not bool(impossible.any()):
            return self
        best = log_joint.argmax(-1, keepdim=True)
        words = torch.where(impossible.unsqueeze(-1), self.take(best), words)
        # So many nats below the best one a weight is zero.
        log_joint = torch.where(impossible, log_joint.amax(-1, keepdim=True).nan_to_num(neginf=0.0) - 1000.0, log_joint)
        return dataclasses.replace(self, words=words, log_joint=log_joint)

    def take(self, positions: Tensor) -> Tensor:
        """Returns each data point's states at positions ``(N, K)``.

        They are packed words ``(N, K, num_words)``.
        """
        return ops.gather_states(self.words, positions)


def join(populations: Sequence[Population]) -> Population:
    """States of the same data points side by side, repetitions included."""
    words = torch.cat([population.words for population in populations], 1)
    return dataclasses.replace(populations[0], words=words, log_joint=torch.cat([population.log_joint for population in populations], 1))


def initial_population(
    space: StateSpace,
    num_data: int,
    num_states: int,
    generator: ops.Source = None,
    device: torch.device | str | None = None,
    *,
    rows: Tensor | None = None,
) -> Tensor:
    """Distinct states to start from, different for each data point.

    Every data point gets the all-zero state, then the states with one active latent at each of its
    non-zero values. If these do not all fit, it gets a random subset. The rest are random states
    with more active latents. In a small space they are a random subset. In a large one they are
    sparse: two active latents and a Poisson number more, whose mean is drawn per data point between
    0 and 2.

    The result is ``(N, S, num_words)``. Positions ``rows (N,)`` of the data points among all data decide on their states.
    """
    return ops.initial_states(space.fields, num_data, num_states, generator, rows=rows).to(device or "cpu")
