"""Truncated posteriors of sequences: a set of states at every step.

Sums over the paths through the sets of binary chains are exact.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.distributions.linear import LinearSuperposition
from pyro_truncated.ops import binary_chains as chains
from pyro_truncated.ops.binary_chains import Messages, Transitions, block_posteriors, draw_blocks, expected_transitions, safe_log
from pyro_truncated.ops.packed_states import WORD_BITS
from pyro_truncated.search.base import Search, SearchBatch, propose_with
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import check_count, describe, leaves_inference_mode, names_arguments
from pyro_truncated.utils.arrays import as_data
from pyro_truncated.utils.budget import rows_per_block
from pyro_truncated.utils.console import ReprFromArguments

__all__ = ["BlockSearch", "ChainPosterior", "LinearGaussianSteps", "ObservedSteps"]


class ChainPosterior:
    r"""The exact posterior of binary chains, restricted to sets of states.

    Every step has one set.

    With sets :math:`K_t` of ``S`` joint states it is the posterior on :math:`K_1 \times \dots \times K_T`, and its free energy

    .. math:: \mathcal F = \log \sum_{s_1 \in K_1} \cdots \sum_{s_T \in K_T} \prod_t p(s_t \mid s_{t-1})\, p(y_t \mid s_t)

    a lower bound of the log evidence, which no change of the sets lowers. It starts from a greedy pursuit at each step and a pass
    that connects the steps. Where all states of a step fit, it is exact.

    Example:
        >>> y, weight = torch.randn(1, 20, 3), torch.randn(3, 5)
        >>> switch = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).expand(5, 2, 2)
        >>> prior = BinaryChains(torch.full((5,), 0.3), switch, num_steps=20)
        >>> posterior = ChainPosterior(LinearGaussianSteps(y, weight, torch.tensor(0.5)), prior.transitions(), num_states=8)
        >>> posterior.improve_().marginals().shape
        torch.Size([1, 20, 5])

    Args:
        log_likelihood: maps packed states ``(N, T, C, W)`` to their log likelihoods ``(N, T, C)``, for any ``C``. It may have
            ``flip_gains`` and ``block_scores`` as :class:`LinearGaussianSteps` has, which are cheaper than to score the states.
        transitions: of the chains, see :class:`~pyro_truncated.ops.binary_chains.Transitions`.
        num_states: states of each step, ``S``.
        words: sets ``(N, T, S, W)`` to begin with; a state that a step repeats counts once.

    Attributes:
        space: the states of a step.
        is_complete: whether every set holds all states, so that the posterior is exact.
        words: the sets, ``(N, T, S, W)``.
        unary: their log likelihoods, ``(N, T, S)``; minus infinity of places that no state has.
        indices: which of all sequences these are; ``None`` for all.
        positions: where these are among the sequences of all processes, ``(N,)``: what random numbers are drawn by.
    """

    @names_arguments
    def __init__(
        self, log_likelihood: Callable[[Tensor], Tensor], transitions: Transitions, num_states: int = 32, *, words: Tensor | None = None
    ) -> None:
        self.log_likelihood, self.transitions = log_likelihood, transitions
        self.space = StateSpace([2] * transitions.log_prob.shape[1])
        if (number := getattr(log_likelihood, "num_chains", self.space.num_latents)) != self.space.num_latents:
            raise ValueError(f"log_likelihood and transitions must have as many chains; got {number} and {self.space.num_latents}")
        self.num_states = min(check_count("num_states", num_states), self.space.size)
        self.is_complete = self.num_states == self.space.size
        self._messages: Messages | None = None
        self.indices: Tensor | None = None
        self.positions = torch.arange(len(transitions.kind), device=transitions.kind.device)
        if self.is_complete:
            words = self.space.enumerate(transitions.kind.device).expand(*transitions.kind.shape, -1, -1)
            self._set(words, self._score(words))
        elif words is None:
            self._start()
        else:
            is_repeated = ops.find_duplicates(words.flatten(0, 1)).view(words.shape[:3])
            self._set(words, self._score(words).masked_fill(is_repeated, -math.inf))
        blocked = int((self.free_energy() == -math.inf).sum())
        if blocked:
            warnings.warn(
                f"no path of positive probability crosses the sets of {blocked} of {len(self.words)} sequences: their bound is -inf. "
                "Keep more states, or make all transitions positive.",
                stacklevel=2,
            )

    @property
    def messages(self) -> Messages:
        """Forward and backward messages along the sequences, computed once."""
        if self._messages is None:
            self._messages = chains.messages(self.words, self.unary, self.transitions)
        return self._messages

    def free_energy(self) -> Tensor:
        """The bound of every sequence, ``(N,)``."""
        return self.messages.free_energy()

    def rescore_(self, log_likelihood: Callable[[Tensor], Tensor], transitions: Transitions) -> Self:
        """The same sets under other parameters."""
        self.log_likelihood, self.transitions = log_likelihood, transitions
        scores = self._score(self.words)
        # A place without a state holds a copy of another one.
        is_state = torch.ones_like(self.unary, dtype=torch.bool) if self.is_complete else self.unary > -math.inf
        self._set(self.words, scores.masked_fill(~is_state, -math.inf))
        return self

    def improve_(self, steps: int = 20, *, first_forward: bool = True) -> Self:
        """Sweeps over flips of the members while the bound rises.

        Sweeps go forward and backward in turn, at most so many steps.
        """
        bound = -math.inf
        for step in range(0 if self.is_complete else steps):
            self.sweep_(*self._flips(self.num_states), forward=(step % 2 == 0) == first_forward)
            now = float(self.messages.free_energy().sum())
            # Sweeps go on while they raise the bound by more than this, in nats per sequence.
            if step % 2 and not now > bound + 1e-3 * len(self.words):
                break
            bound = now if step % 2 else bound
        return self

    def sweep_(self, words: Tensor, unary: Tensor, *, forward: bool) -> Self:
        """Keeps the best states of each step among members and candidates.

        One step is chosen after the other, and the bound never falls.

        Args:
            words: candidates ``(N, T, C, W)``; they may repeat each other and members.
            unary: their log likelihoods ``(N, T, C)``.
            forward: whether to go forward.
        """
        sums = self.messages
        joined, scores = torch.cat([self.words, words], 2), torch.cat([self.unary, unary], 2)
        ahead = sums.backward if forward else sums.forward
        self._set(*self._select(joined, scores, ahead, forward))
        return self

    def look_ahead_(self, words: Tensor, unary: Tensor, *, forward: bool) -> Tensor:
        """Sweeps with messages over all candidates from where the pass goes.

        Sequences whose bound would fall keep their sets.

        Returns:
            By how much the bound has risen, ``(N,)``.
        """
        bound = self.messages.free_energy()
        joined, scores = torch.cat([self.words, words], 2), torch.cat([self.unary, unary], 2)
        scores = scores.masked_fill(ops.find_duplicates(joined.flatten(0, 1)).view(scores.shape), -math.inf)
        if forward:
            ahead = chains.backward_messages(joined, scores, self.transitions)
        else:
            ahead = chains.forward_messages(joined, scores, self.transitions)[0]
        before = self.words, self.unary
        self._set(*self._select(joined, scores, ahead, forward))
        gain = self.messages.free_energy() - bound
        is_better = (gain > 0).view(-1, 1, 1)
        if not bool(is_better.all()):
            self._set(torch.where(is_better.unsqueeze(-1), self.words, before[0]), torch.where(is_better, self.unary, before[1]))
        return gain.clamp(min=0.0).nan_to_num()

    def search_(self, search: Search | BlockSearch, steps: int = 1, **keys: Any) -> Self:
        """Improves the sets by a search.

        Of a :class:`.Search` the states of a step are a data point, and the score of a state is what it adds to the sum over all paths.

        Args:
            search: what proposes.
            steps: how often.
            **keys: what else a search is told, see :class:`.SearchBatch`.
        """
        for step in range(0 if self.is_complete else steps):
            forward = step % 2 == 0
            if isinstance(search, BlockSearch):
                self.look_ahead_(*search.propose(self), forward=forward)
            else:
                words = self._propose(search, keys)
                scores = self._score(words)
                self.sweep_(words, scores, forward=forward).sweep_(words, scores, forward=not forward)
        return self

    def anneal_(self, temperature: float, search: BlockSearch | None = None, *, steps: int = 100, num_paths: int = 4) -> Self:
        """Adds states of paths drawn while the temperature falls to one.

        A path is drawn from its posterior at the temperature, one block of chains after the other. In the last half of the steps the
        temperature is one, and the states that a step visits join its set. Messages over all of them combine stretches of the paths.

        Args:
            temperature: divides log likelihoods at first, and falls geometrically. Of Gaussian noise it is the ratio of variances.
            search: draws the blocks; default: :class:`BlockSearch`.
            steps: blocks that are drawn for each path.
            num_paths: independent paths.

        Raises:
            ValueError: if a number is out of range.
        """
        if not 1 <= temperature < math.inf:
            raise ValueError(f"temperature must be a number of at least one; got {temperature}")
        steps, num_paths = check_count("steps", steps), check_count("num_paths", num_paths)
        search = BlockSearch() if search is None else search
        if self.is_complete:
            return self
        hot, visited = steps - steps // 2, []
        for _ in range(num_paths):
            path = self.best_words()
            for step in range(steps):
                path = search.draw(self, path, temperature ** max(0.0, 1 - step / max(1, hot - 1)))
                if step >= hot - 1:
                    visited.append(path)
        # States that drawn paths visit join the candidates of a step: at most so many for each of
        # its set.
        words = _most_frequent(torch.stack(visited, 2), 2 * self.num_states)
        self.look_ahead_(words, self._score(words), forward=True)
        return self

    def population(self) -> Population:
        r"""Returns the sets as populations of ``N * T`` data points.

        The steps of a sequence are in order.

        Log joints are :math:`\log q_t + c_t`: weights are posterior probabilities, and free energies sum to that of the sequence. Steps
        beyond the end of a sequence have one state of log joint zero.
        """
        sums = self.messages
        log_joint = (sums.log_weights() + sums.log_norm.unsqueeze(-1)).flatten(0, 1)
        return Population(self.space, self.words.flatten(0, 1), log_joint)

    def marginals(self) -> Tensor:
        """Returns the probability that each chain is on, ``(N, T, M)``.

        Beyond the end of a sequence it is zero.
        """
        marginals = self.population().marginals().unflatten(0, self.words.shape[:2])
        return marginals * (self.transitions.kind >= 0).unsqueeze(-1)

    @torch.no_grad()
    def pairwise_marginals(self) -> Tensor:
        r"""Returns the joint probabilities of all pairs of entries, ``(N, T, M, T, M, 2, 2)``.

        .. math:: q(s_t, s_u) = q(s_t) \prod_{r=t+1}^u q(s_r \mid s_{r-1}), \qquad t < u.

        Steps beyond the end of a sequence hold zeros. It costs ``T`` products of ``T M`` vectors with matrices of ``S`` by ``S``.
        """
        bits = self.space.unpack(self.words, torch.float64)
        num_data, num_steps, _, num_chains = bits.shape
        weights = self.messages.log_weights().exp()
        both = bits.new_zeros(num_data, num_steps, num_chains, num_steps, num_chains)
        # What the posterior of a step's states is, times whether an earlier entry is on.
        carried = bits.new_zeros(num_data, 0, bits.shape[2])
        for step in range(num_steps):
            if step:
                carried = carried @ self._conditional(step, bits)
            carried = torch.cat([carried, (weights[:, step].unsqueeze(-1) * bits[:, step]).mT], 1)
            block = (carried @ bits[:, step]).unflatten(1, (step + 1, num_chains))
            both[:, : step + 1, :, step] = block
            both[:, step, :, : step + 1] = block.movedim(3, 1)
        is_part = (self.transitions.kind >= 0)[:, :, None].expand(-1, -1, num_chains)
        both *= is_part[:, :, :, None, None] & is_part[:, None, None]
        on = self.marginals()
        first, second = on[:, :, :, None, None] - both, on[:, None, None] - both
        return torch.stack([torch.stack([1 - first - second - both, second], -1), torch.stack([first, both], -1)], -2).clamp(min=0.0)

    def _conditional(self, step: int, bits: Tensor) -> Tensor:
        """The posterior of a step given the step before, ``(N, S, S)``."""
        before, now = bits[:, step - 1].long(), bits[:, step].long()
        table = self.transitions.log_prob[self.transitions.kind[:, step].clamp(min=0)].flatten(-2).double()
        place = 2 * before.unsqueeze(2) + now.unsqueeze(1)
        log_prob = table[:, None, None].expand(*place.shape, 4).gather(-1, place.unsqueeze(-1)).squeeze(-1).sum(-1)
        after = (self.unary[:, step] + self.messages.backward[:, step]).double()
        return (log_prob + after.unsqueeze(1)).softmax(-1).nan_to_num()

    def expected_transitions(self) -> Tensor:
        """Expected numbers of transitions of each kind and chain, ``(K, M, 2, 2)``."""
        return chains.expected_transitions(self.words, self.unary, self.transitions, self.messages)

    def best_words(self) -> Tensor:
        """The best path of each sequence, ``(N, T, W)``."""
        place, _ = chains.best_path(self.words, self.unary, self.transitions)
        return ops.gather_states(self.words, place.unsqueeze(-1)).squeeze(2)

    def mode(self) -> Tensor:
        """The best path of each sequence through its sets, ``(N, T, M)``."""
        return self._values(self.best_words())

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent paths from the posterior, ``(num_samples, N, T, M)``."""
        check_count("num_samples", num_samples)
        places = self._draw_places(num_samples, generator)
        return self._values(ops.gather_states(self.words, places.movedim(0, -1)).movedim(2, 0))

    def draw_with_log_prob(self, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        r"""Draws one path of each sequence from the posterior, ``(N, T, M)``.

        Its log probability :math:`\log q` has shape ``(N,)``.
        """
        place = self._draw_places(1, generator)[0].unsqueeze(-1)
        words = ops.gather_states(self.words, place)
        log_joint = chains.free_energy(words, self.unary.gather(2, place), self.transitions)
        return self._values(words.squeeze(2)), log_joint - self.messages.free_energy()

    def draw_words(self, generator: ops.Source = None) -> Tensor:
        """Draws one path of each sequence from the posterior, packed ``(N, T, W)``."""
        return ops.gather_states(self.words, self._draw_places(1, generator)[0].unsqueeze(-1)).squeeze(2)

    def effective_states(self) -> Tensor:
        """Exponential of the entropy of each step's posterior, ``(N, T)``."""
        return self.population().effective_states().unflatten(0, self.words.shape[:2])

    def best_additions(self) -> Tensor:
        """Returns how much the best single flip would add to the bound.

        The numbers are nats, ``(N, T)``.
        """
        masses = self._best_flips(1, self.num_states).log_mass.view(*self.words.shape[:2])
        return torch.log1p(masses.exp())

    def certificate(self) -> Tensor:
        r"""Returns a lower bound of the log evidence, ``(N,)``.

        It counts paths outside of the sets.

        Paths with exactly one step outside are disjoint, so
        :math:`\log p(y) \ge \log(e^{\mathcal F} + \sum_t \sum_{s \notin K_t} e^{\mathrm{score}_t(s)})`, with the flips of all members.
        It is tight where the gap is small, and sees no other mode.
        """
        size = self.num_states * self.space.num_latents
        masses = self._best_flips(size, self.num_states).log_mass.view(len(self.words), -1)
        return self.free_energy() + torch.log1p(masses.exp().sum(1))

    def _start(self) -> None:
        """Starts from greedy words of each step and their best neighbours.

        The words of the steps beside it join them; a pass in each direction connects the steps.
        """
        kind = self.transitions.kind
        chances = self.transitions.log_prob.double().exp()
        switch = chances[..., 0, 1] / (chances[..., 0, 1] + chances[..., 1, 0]).clamp(min=1e-300)
        logits = switch.clamp(1e-6, 1 - 1e-6).logit()[kind.clamp(min=0)]
        words, gain = self._pursuit(logits)
        nearest = gain.topk(min(self.num_states, gain.shape[-1]), dim=-1).indices
        shape = (*nearest.shape, words.shape[-1])
        flipped = chains.Flips(torch.zeros_like(nearest), nearest, nearest).words(words.unsqueeze(2))
        beside = [words.roll(shift, 1) for shift in (1, -1)]
        candidates = torch.cat([words.unsqueeze(2), flipped.view(shape), *(other.unsqueeze(2) for other in beside)], 2)
        scores = self._score(candidates)
        scores = scores.masked_fill(ops.find_duplicates(candidates.flatten(0, 1)).view(scores.shape), -math.inf)
        ahead = chains.backward_messages(candidates, scores, self.transitions)
        self._set(*self._select(candidates, scores, ahead, True))
        self.sweep_(candidates, scores, forward=False)

    def _pursuit(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns words ``(N, T, W)`` of a greedy ascent, and flips' changes ``(N, T, M)``."""
        words = torch.zeros(*logits.shape[:2], 1, self.space.num_words, dtype=torch.int64, device=logits.device)
        for _ in range(2 * self.space.num_latents):
            values = self._values(words.squeeze(2))
            gain = self._gains(words).squeeze(2) + (1 - 2 * values) * logits
            best = gain.max(-1, keepdim=True)
            is_better = best.values > 0
            if not bool(is_better.any()):
                break
            flipped = chains.Flips(torch.zeros_like(best.indices), best.indices, best.values).words(words)
            words = torch.where(is_better.unsqueeze(-1), flipped, words)
        return words.squeeze(2), gain

    def _gains(self, words: Tensor) -> Tensor:
        """How much the log likelihood changes with each flip, ``(N, T, S, M)``."""
        own = getattr(self.log_likelihood, "flip_gains", None)
        if own is not None:
            rows = slice(0, words.shape[0] * words.shape[1])
            gains: Tensor = own(words.flatten(0, 1), rows)
            return gains.unflatten(0, words.shape[:2])
        latent = torch.arange(self.space.num_latents, device=words.device)
        scores = self._score(words)
        parts = []
        for i in range(words.shape[2]):
            member = torch.full((*words.shape[:2], len(latent)), i, device=words.device)
            flipped = chains.Flips(member, latent.expand_as(member), member).words(words)
            parts.append(self._score(flipped) - scores[:, :, i : i + 1])
        return torch.stack(parts, 2).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)

    def _best_flips(self, size: int, num_parents: int) -> chains.Flips:
        """Returns the best candidates ``(N, T, size)`` one flip from the first members."""
        parents = self.words[:, :, :num_parents]
        num_rows = parents.shape[0] * parents.shape[1]
        own = getattr(self.log_likelihood, "flip_gains", None)
        whole = None if own is not None else self._gains(parents).flatten(0, 1)
        block = rows_per_block(48 * parents.shape[2] * self.space.num_latents)
        flips = []
        for first in range(0, num_rows, block):
            rows = slice(first, min(first + block, num_rows))
            gain: Tensor = whole[rows] if whole is not None else own(parents.flatten(0, 1)[rows], rows)  # type: ignore[misc]
            flips.append(chains.best_flips(self.words, self.unary, self.transitions, self.messages, gain, rows, size))
        return chains.Flips(*(torch.cat(parts, 1).view(*self.words.shape[:2], -1) for parts in zip(*flips, strict=True)))

    def _flips(self, size: int) -> tuple[Tensor, Tensor]:
        # Flips of the best members of a step are proposed.
        flips = self._best_flips(size, min(8, self.num_states))
        words = flips.words(self.words)
        return words, self._score(words).masked_fill(flips.log_mass == -math.inf, -math.inf)

    def _propose(self, search: Search, keys: Mapping[str, Any]) -> Tensor:
        """The best candidates of a search, ``(N, T, C, W)``."""
        sums, (num_data, num_steps) = self.messages, self.words.shape[:2]

        def score(words: Tensor) -> Tensor:
            states = words.unflatten(0, (num_data, num_steps))
            masses = chains.masses(self.words, self.unary, self.transitions, sums, states, self._score(states))
            return (masses + sums.log_norm.unsqueeze(-1)).flatten(0, 1)

        rows = self.positions.unsqueeze(1) * num_steps + torch.arange(num_steps, device=self.positions.device)
        population = dataclasses.replace(self.population(), indices=rows.flatten())
        candidates = propose_with(search, SearchBatch(population, score, **keys))
        best = candidates.log_joint.topk(min(2 * self.num_states, candidates.num_states), dim=1).indices
        return candidates.take(best).unflatten(0, (num_data, num_steps))

    def _select(self, words: Tensor, unary: Tensor, ahead: Tensor, forward: bool) -> tuple[Tensor, Tensor]:
        index, _, _ = chains.select(words, unary, self.transitions, self.num_states, ahead, forward=forward)
        at = index.clamp(min=0)
        # A place without a state holds a copy of the best one.
        at = torch.where(index < 0, at[..., :1], at)
        return ops.gather_states(words, at), unary.gather(2, at).masked_fill(index < 0, -math.inf)

    def _score(self, words: Tensor) -> Tensor:
        scores = self.log_likelihood(words).double()
        if scores.shape != words.shape[:3]:
            raise ValueError(f"log_likelihood must return a number for each state, {tuple(words.shape[:3])}; got {tuple(scores.shape)}")
        return scores

    def _draw_places(self, number: int, source: ops.Source) -> Tensor:
        """Positions ``(R, N, T)`` of members along paths from the posterior."""
        uniform = ops.uniform(self.positions, (number, self.words.shape[1]), generator=source).movedim(1, 0).contiguous()
        return chains.draw_paths(self.words, self.messages.forward, self.transitions, uniform)

    def _set(self, words: Tensor, unary: Tensor) -> None:
        self.words, self.unary, self._messages = words, unary, None

    def _values(self, words: Tensor) -> Tensor:
        """Returns values of chains as floating point numbers."""
        return self.space.unpack(words, torch.float64) * (self.transitions.kind >= 0).unsqueeze(-1)


class BlockSearch(ReprFromArguments):
    r"""Proposes the likeliest configurations of random blocks of chains.

    They are proposed at all steps of a sequence.

    Flips of single steps get stuck where several chains explain the same thing over a stretch of time. A step of this search draws a
    path from the sets, draws ``k`` of its chains anew, and chooses ``k`` others. It computes the exact posterior of their :math:`2^k`
    joint configurations at every step, given the other chains of the path. The best configurations of each step become candidates.

    Example:
        >>> BlockSearch(num_chains=4)
        BlockSearch(num_chains=4, num_candidates=16)

    Args:
        num_chains: chains of a block, ``k``; a step costs :math:`k 2^k`.
        num_candidates: configurations proposed at each step.
        generator: source of randomness; default: torch's global generator.

    Raises:
        ValueError: if a number is not positive.
    """

    @names_arguments
    def __init__(self, num_chains: int = 8, num_candidates: int = 16, *, generator: ops.Source = None) -> None:
        self.num_chains = check_count("num_chains", num_chains)
        self.num_candidates = check_count("num_candidates", num_candidates)
        self.generator = generator

    def propose(self, posterior: ChainPosterior) -> tuple[Tensor, Tensor]:
        """Candidates ``(N, T, C, W)`` and their log likelihoods ``(N, T, C)``."""
        path = self.draw(posterior, posterior.draw_words(self.generator))
        block = self._block(posterior)
        scores = _block_scores(posterior, path, block)
        likely = block_posteriors(scores, posterior.transitions, block)
        place = likely.topk(min(self.num_candidates, likely.shape[2]), dim=2).indices
        words = _with_block(path.unsqueeze(2), block, place)
        log_likelihood = posterior.log_likelihood(path.unsqueeze(2))
        at_path = (
            posterior.space.unpack(path, torch.int64).gather(2, block.unsqueeze(1).expand(-1, path.shape[1], -1)) << _order(block)
        ).sum(2)
        return words, log_likelihood + scores.gather(2, place) - scores.gather(2, at_path.unsqueeze(2))

    def draw(self, posterior: ChainPosterior, path: Tensor, temperature: float = 1.0) -> Tensor:
        """Draws a random block of chains given the others on a path.

        It is a Gibbs step on the posterior with log likelihoods divided by the temperature.

        Args:
            posterior: has likelihood and transitions.
            path: a state of each step, ``(N, T, W)``.
            temperature: of the log likelihoods.

        Returns:
            The path with the chains that were drawn, ``(N, T, W)``.
        """
        block = self._block(posterior)
        scores = _block_scores(posterior, path, block) / temperature
        uniform = ops.uniform(posterior.positions, path.shape[1:2], generator=self.generator)
        place = draw_blocks(scores, posterior.transitions, block, uniform).unsqueeze(2)
        return _with_block(path.unsqueeze(2), block, place).squeeze(2)

    def _block(self, posterior: ChainPosterior) -> Tensor:
        num_latents = posterior.space.num_latents
        chances = ops.uniform(posterior.positions, (num_latents,), generator=self.generator)
        return chances.topk(min(self.num_chains, num_latents), dim=1).indices


def _most_frequent(words: Tensor, size: int) -> Tensor:
    """The states ``(N, T, C, W)`` that candidates repeat most, at most ``size``."""
    is_equal = (words.unsqueeze(2) == words.unsqueeze(3)).all(-1)
    number = is_equal.sum(-1).masked_fill(ops.find_duplicates(words.flatten(0, 1)).view(words.shape[:3]), 0)
    place = number.topk(min(size, words.shape[2]), dim=2).indices
    return ops.gather_states(words, place)


def _order(block: Tensor) -> Tensor:
    return torch.arange(block.shape[1], device=block.device)


def _with_block(words: Tensor, block: Tensor, place: Tensor) -> Tensor:
    """States ``(N, T, 1, W)`` with the chains of a block in configurations ``(N, T, C)``."""
    bits = (place.unsqueeze(-1) >> _order(block)) & 1
    word, bit = block // WORD_BITS, torch.ones_like(block) << block % WORD_BITS
    parts = []
    for w in range(words.shape[-1]):
        own = torch.where(word == w, bit, 0)
        parts.append((words[..., w] & ~own.sum(1).view(-1, 1, 1)) | (bits * own.view(len(block), 1, 1, -1)).sum(-1))
    return torch.stack(parts, -1)


def _block_scores(posterior: ChainPosterior, path: Tensor, block: Tensor) -> Tensor:
    """Returns log likelihoods of all configurations of a block."""
    own = getattr(posterior.log_likelihood, "block_scores", None)
    if own is not None:
        scores: Tensor = own(path, block)
        return scores
    every = torch.arange(2 ** block.shape[1], device=path.device).expand(*path.shape[:2], -1)
    return posterior.log_likelihood(_with_block(path.unsqueeze(2), block, every))


class ObservedSteps(NamedTuple):
    r"""Which steps of sequences hold an observation, and the gaps between.

    The posterior of a step without an observation is broad, so that a set of states would hold little of it. Chains that are
    independent a priori pass it by: their transition over ``k`` steps is :math:`A_m^k`. No mass is lost.

    Example:
        >>> steps = ObservedSteps.from_mask(torch.tensor([[True, False, False, True]]))
        >>> steps.position.tolist(), steps.first, steps.gaps
        ([[0, 3]], (0,), (3,))

    Attributes:
        position: of the observed steps among all, ``(N, T')``; beyond the end those of the last step.
        kind: kind of the transition into each of them, ``(N, T')``, negative beyond the end.
        first: kinds ``0, 1, ...`` start a sequence after so many steps.
        gaps: the other kinds are transitions over so many steps.
    """

    position: Tensor
    kind: Tensor
    first: tuple[int, ...]
    gaps: tuple[int, ...]

    @classmethod
    def from_mask(cls, is_observed: Tensor) -> Self:
        """Those of sequences in which steps ``(N, T)`` are observed."""
        num_steps = is_observed.shape[1]
        counts = is_observed.sum(1)
        size = max(1, int(counts.max()))
        step = torch.arange(num_steps, device=is_observed.device)
        # Observed steps first, in order.
        position = torch.where(is_observed, step, num_steps + step).argsort(1)[:, :size]
        is_part = torch.arange(size, device=position.device) < counts.unsqueeze(1)
        before = torch.nn.functional.pad(position[:, :-1], (1, 0), value=0)
        gap = torch.where(is_part, position - before, 0)
        is_first = torch.zeros_like(is_part)
        is_first[:, 0] = True
        first, gaps = (gap[where & is_part].unique() for where in (is_first, ~is_first))
        kind = torch.where(is_first, torch.searchsorted(first, gap), len(first) + torch.searchsorted(gaps, gap))
        last = position.gather(1, (counts - 1).clamp(min=0).unsqueeze(1))
        position = torch.where(is_part, position, last)
        return cls(position, kind.masked_fill(~is_part, -1), tuple(first.tolist()), tuple(gaps.tolist()))

    def transitions(self, initial: Tensor, transition: Tensor) -> Transitions:
        """Returns the transitions between observed steps of chains.

        The chains have initial probabilities ``(M,)`` and transitions ``(M, 2, 2)``.
        """
        start = torch.stack([1 - initial, initial], -1).unsqueeze(-2)
        first = [(start @ _power(transition, gap)).expand_as(transition) for gap in self.first]
        tables = [*first, *(_power(transition, gap) for gap in self.gaps)]
        if not tables:
            tables = [transition]
        return Transitions(safe_log(torch.stack(tables)), self.kind)

    @leaves_inference_mode
    def expected_transitions(self, initial: Tensor, transition: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Returns expected first values and transitions of single steps.

        Their shapes are ``(M, 2)`` and ``(M, 2, 2)``.

        Args:
            initial: initial probabilities ``(M,)`` of the chains.
            transition: their transitions ``(M, 2, 2)``.
            counts: expected numbers ``(K, M, 2, 2)`` of the transitions between observed steps.
        """
        # Of a function of log transitions, such as the log joint of a path, the gradient is how often each one occurs.
        with torch.enable_grad():
            start, table = torch.stack([1 - initial, initial], -1).detach().double(), transition.detach().double()
            start, table = start.requires_grad_(), table.requires_grad_()
            first = [(start.unsqueeze(-2) @ _power(table, gap)).expand_as(table) for gap in self.first]
            tables = [*first, *(_power(table, gap) for gap in self.gaps)]
            if not tables:
                return torch.zeros_like(start), torch.zeros_like(table)
            terms = safe_log(torch.stack(tables))
            total = torch.where(counts > 0, counts * terms, 0.0).sum() + 0.0 * (start.sum() + table.sum())
            of_start, of_table = torch.autograd.grad(total, (start, table))
        return (start * of_start).detach(), (table * of_table).detach()

    def marginals(self, posterior: ChainPosterior, initial: Tensor, transition: Tensor, lengths: Tensor, num_steps: int) -> Tensor:
        r"""Returns the probability that each chain is on, ``(N, T, M)``.

        Steps without observation are included.

        Chain by chain, between observed steps ``a`` and ``b`` it is
        :math:`\sum_{ij} q(s_a = i, s_b = j)\, p(s_t \mid s_a = i, s_b = j)`. Steps beyond the end of a sequence have zeros.

        Args:
            posterior: of the observed steps.
            initial: initial probabilities ``(M,)`` of the chains.
            transition: their transitions ``(M, 2, 2)``.
            lengths: number of steps of each sequence, ``(N,)``.
            num_steps: number of steps ``T``.
        """
        marginals = posterior.marginals()
        is_part = self.kind >= 0
        n, place = is_part.nonzero().unbind(1)
        out = marginals.new_zeros(len(marginals), num_steps, marginals.shape[-1])
        out[n, self.position[n, place]] = marginals[n, place]
        spans = torch.tensor([*(gap + 1 for gap in self.first), *self.gaps], device=out.device)
        has_gap = is_part & (spans[self.kind.clamp(min=0)] > 1) if len(spans) else is_part
        if not bool(has_gap.any()):
            return out
        # Transitions over gaps are told apart, so that what is expected of each one is known.
        n, place = has_gap.nonzero().unbind(1)
        own = self.transitions(initial, transition)
        kind = self.kind.clone()
        kind[n, place] = len(own.log_prob) + torch.arange(len(n), device=kind.device)
        tables = torch.cat([own.log_prob, own.log_prob[self.kind[n, place]]])
        pairs = expected_transitions(posterior.words, posterior.unary, Transitions(tables, kind), posterior.messages)[len(own.log_prob) :]
        span = spans[self.kind[n, place]]
        powers = _powers(transition, int(span.max()))
        start = torch.stack([1 - initial, initial], -1).unsqueeze(-2).expand_as(transition)
        # One row for each step inside of a gap, which begins with the value before it, or with the initial distribution.
        gap = torch.arange(len(n), device=n.device).repeat_interleave(span - 1)
        first = (span - 1).cumsum(0) - (span - 1)
        step = torch.arange(len(gap), device=n.device) - first[gap] + 1
        is_start = (place[gap] == 0).view(-1, 1, 1, 1)
        before = torch.where(is_start, start @ powers[step - 1], powers[step])
        through = before.unsqueeze(-1) * powers[span[gap] - step].unsqueeze(-3)
        share = through / through.sum(-2, keepdim=True).clamp(min=torch.finfo(through.dtype).tiny)
        on = (pairs[gap].unsqueeze(-2) * share)[..., 1, :].sum((-2, -1))
        out[n[gap], self.position[n, place][gap] - span[gap] + step] = on
        return out * (torch.arange(num_steps, device=out.device) < lengths.unsqueeze(1)).unsqueeze(-1)


def _powers(matrix: Tensor, largest: int) -> Tensor:
    """Powers from zero on, ``(largest + 1, M, 2, 2)``."""
    powers = [torch.eye(2, dtype=matrix.dtype, device=matrix.device).expand_as(matrix)]
    for _ in range(largest):
        powers.append(powers[-1] @ matrix)
    return torch.stack(powers)


def _power(matrix: Tensor, exponent: int) -> Tensor:
    return matrix if exponent == 1 else torch.linalg.matrix_power(matrix, exponent)


class LinearGaussianSteps:
    r"""Scores states of all steps under :math:`y_t \sim \mathcal N(W s_t + b, \mathrm{diag}(\sigma^2))`.

    Entries of the observations that are NaN are missing and contribute nothing.

    Example:
        >>> y, weight = torch.randn(2, 5, 3), torch.randn(3, 4)
        >>> score = LinearGaussianSteps(y, weight, torch.tensor(0.5))
        >>> score(torch.zeros(2, 5, 1, 1, dtype=torch.int64)).shape
        torch.Size([2, 5, 1])

    Args:
        y: observations ``(N, T, D)``.
        weight: what each chain contributes, ``(D, M)``.
        scale: standard deviation, a scalar or ``(D,)``.
        bias: offset ``(D,)``; default: zero.

    Attributes:
        num_chains: number of chains ``M``.

    Raises:
        ValueError: if shapes do not fit, or ``scale`` is not positive.
    """

    @names_arguments
    def __init__(self, y: Tensor, weight: Tensor, scale: Tensor | float, bias: Tensor | None = None) -> None:
        y, weight, scale = as_data("y", y), as_data("weight", weight), torch.as_tensor(scale)
        bias = None if bias is None else as_data("bias", bias)
        if y.dim() != 3 or weight.dim() != 2 or len(weight) != y.shape[-1]:
            raise ValueError(f"y must have shape (N, T, D) and weight (D, M); got {tuple(y.shape)} and {tuple(weight.shape)}")
        shapes = [(), (1,), (len(weight),)]
        for name, value in {"scale": scale, "bias": bias}.items():
            if value is not None and tuple(value.shape) not in shapes:
                raise ValueError(f"{name} must have one of the shapes {shapes}; got {tuple(value.shape)}")
        if not bool((scale > 0).all()):
            raise ValueError(f"scale must be positive; got {describe(scale)}")
        self.num_chains = weight.shape[1]
        self.shape = y.shape[:2]
        self.weight, self.value = weight.detach().double(), y.detach().double().flatten(0, 1)
        bias = self.weight.new_zeros(len(weight)) if bias is None else bias.detach().double()
        self.fields = StateSpace([2] * weight.shape[1]).fields
        scale = scale.detach().double().expand(len(weight))
        zeros = self.weight.new_zeros(weight.shape[1])
        self._likelihood = LinearSuperposition(zeros, self.weight, scale, bias, validate_args=False)
        self.precision, self.residual = scale.pow(-2), self.value - bias
        self._is_complete = not bool(self.value.isnan().any())
        if self._is_complete:
            self._field = (self.residual * self.precision) @ self.weight
            self._gram = self.weight.mT @ (self.precision.unsqueeze(-1) * self.weight)

    @torch.no_grad()
    def __call__(self, words: Tensor) -> Tensor:
        """Log likelihoods ``(N, T, C)`` of states ``(N, T, C, W)``."""
        if words.shape[:2] != self.shape:
            raise ValueError(f"states must be those of the {self.shape[0]} sequences of {self.shape[1]} steps; got {tuple(words.shape)}")
        return self._likelihood.packed_log_prob(words.flatten(0, 1), self.value).unflatten(0, self.shape)

    @torch.no_grad()
    def flip_gains(self, words: Tensor, rows: slice) -> Tensor:
        r"""Returns how a flip of each chain changes the log likelihood.

        Args:
            words: states of some steps, ``(rows, S, W)``.
            rows: which steps, counted through all sequences.

        Returns:
            ``(rows, S, M)``.
        """
        states = ops.unpack(words, self.fields, torch.float64)
        if self._is_complete:
            field = self._field[rows].unsqueeze(1) - states @ self._gram
            return (1 - 2 * states).mul_(field).sub_(0.5 * self._gram.diagonal())
        value = self.residual[rows]
        precision = torch.where(value.isnan(), 0.0, self.precision)
        residual = (value.nan_to_num().unsqueeze(1) - states @ self.weight.mT) * precision.unsqueeze(1)
        curvature = precision @ self.weight.square()
        return (1 - 2 * states) * (residual @ self.weight) - 0.5 * curvature.unsqueeze(1)

    @torch.no_grad()
    def block_scores(self, words: Tensor, block: Tensor) -> Tensor:
        r"""Returns log likelihoods of all configurations of some chains.

        The other chains are given; a constant of each step is left out.

        Args:
            words: one state of each step, ``(N, T, W)``.
            block: the chains of each sequence, ``(N, k)``.

        Returns:
            ``(N, T, 2**k)``; bit ``i`` of a position is the value of ``block[i]``.
        """
        states = ops.unpack(words, self.fields, torch.float64)
        others = states.scatter(2, block.unsqueeze(1).expand(-1, states.shape[1], -1), 0.0)
        value = self.residual.unflatten(0, self.shape)
        precision = torch.where(value.isnan(), 0.0, self.precision)
        residual = value.nan_to_num() - others @ self.weight.mT
        configurations = torch.arange(2 ** block.shape[1], device=words.device)
        bits = (configurations >> torch.arange(block.shape[1], device=words.device).unsqueeze(-1) & 1).double()
        sums = self.weight.mT[block].mT @ bits
        # Without missing entries all steps have the same precision.
        penalty = (precision[:, :1] if self._is_complete else precision) @ sums.square()
        return torch.baddbmm(penalty, residual * precision, sums, beta=-0.5)
