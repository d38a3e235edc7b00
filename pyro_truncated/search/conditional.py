"""Searches by full conditionals: latents change at random, others follow."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.ops.packed_states import WORD_BITS
from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.states.population import Population, join
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import Renamed, check_count, check_kinds, names_arguments


@functools.lru_cache(maxsize=16)
def single_changes(space: StateSpace, device: torch.device) -> Moves:
    """Returns all single changes of a state, cached on a device."""
    return Moves(space, device)


class Moves:
    """All changes of one latent, or those to a few next values."""

    def __init__(self, space: StateSpace, device: torch.device, limit: int | None = None) -> None:
        counts = (space.cardinality - 1).clamp(max=limit or max(space.cardinalities))
        latent = torch.arange(space.num_latents, device="cpu").repeat_interleave(counts)
        self.step = (torch.arange(len(latent), device="cpu") - (counts.cumsum(0) - counts)[latent] + 1).to(device)
        self.count = len(latent)  # of moves, M; of latents where all are binary
        self.latent = latent.to(device)  # that each move changes
        self.word, self.shift = space.word[latent].to(device), space.shift[latent].to(device)
        self.mask, self.cardinality = (1 << space.bits[latent].to(device)) - 1, space.cardinality[latent].to(device)

    def neighbours(self, words: Tensor) -> Tensor:
        """The states one move away from packed states ``(N, P, W)``, ``(N, P * M, W)``."""
        return self.apply(words, torch.arange(self.count, device=words.device).expand(*words.shape[:2], -1))[0].flatten(1, 2)

    def apply(self, words: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """New states ``(N, P, m, W)`` and values of moves ``(N, P, m)``."""
        word, shift = self.word[index], self.shift[index]
        old = (words.gather(-1, word) >> shift) & self.mask[index]
        new = torch.remainder(old + self.step[index], self.cardinality[index])
        neighbours = words.unsqueeze(2).repeat(1, 1, index.shape[-1], 1)
        neighbours.scatter_add_(3, word.unsqueeze(-1), ((new - old) << shift).unsqueeze(-1))
        return neighbours, new


class ConditionalSearch(Search):
    r"""Scores neighbours of good states and samples from their full conditionals.

    Up to a constant, the log joints of all states that differ from :math:`s` in one latent are its full conditionals. They are
    :math:`p(s_l \mid s_{-l}, y_n)` under any model. A step of ``C`` candidates per data point

    1. draws states of the population, good ones more often (ranks by log joint are log-uniform), and changes one
    latent or a run of neighbouring latents. The run takes a common value, the values of another state, or values from
    elsewhere in it: a pattern goes on, a boundary moves;
    2. scores these, and all changes of a single latent of a few of them and of a few states of the population (a
    random part if there are too many);
    3. draws the other candidates from the products of these full conditionals, :math:`\prod_l p(s_l \mid s_{-l},
    y_n)`. No latent returns to its value before step 1. So the latents around a change follow it, and changes that do
    not interact are combined.

    Only the runs depend on the order of the latents. Where interactions are known and simple, plain enumeration is
    better: for Markov chains (``pyro.markov`` and ``TraceEnum_ELBO``) it is exact and linear in their length.

    Example:
        >>> y = linear_bars(20, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ConditionalSearch(64), steps=2)

    Args:
        num_candidates: states scored per data point and step, ``C``. Default: ``256 + 2 S`` for populations of ``S``
            states, so that large populations fill as fast as small ones.
        generator: source of randomness. Default: torch's global generator.

    Raises:
        ValueError: if ``num_candidates`` is below 4.
    """

    @names_arguments
    def __init__(self, num_candidates: int | None = None, *, generator: torch.Generator | None = None) -> None:
        self.num_candidates = None if num_candidates is None else check_count("num_candidates", num_candidates, 4)
        check_kinds(ConditionalSearch.__init__, generator=generator)
        self.generator = generator

    def num_candidates_for(self, num_states: int) -> int:
        """Returns states scored per data point and step, up to rounding."""
        return self.num_candidates or 256 + 2 * num_states

    candidates_of = Renamed("num_candidates_for")

    def max_proposals(self, num_states: int) -> int:
        """More than ``C``: shares are rounded up, and every parent draws."""
        return 3 * self.num_candidates_for(num_states)

    def propose(self, batch: SearchBatch) -> Population:
        """Proposes at least ``C`` states per data point.

        They are changed states, neighbours, and draws from full conditionals.
        """
        population, space = batch.population, batch.space
        draws = batch.draws(self.generator)
        moves = single_changes(space, population.words.device)
        size = self.num_candidates_for(population.num_states)
        # Two fifths of the candidates differ from another in one latent, two fifths in a run.
        share = int(0.4 * size)
        num_parents = max(2, share // moves.count)
        num_moves = max(1, min(moves.count, share // num_parents))
        num_changed = num_parents + share
        choices = num_parents * moves.count if num_moves < moves.count else 0
        ops.draw_ahead([num_changed, num_changed, 5 * num_changed, num_changed, 2 * num_changed, *([choices] if choices else [])], **draws)
        before, others = (_members(population, num_changed, draws) for _ in range(2))
        # A run of latents changes, or one in a quarter of states.
        after = _replace_runs(before, others, space, draws)
        single = (ops.uniform(shape=before.shape[1:2], **draws) < 0.25) | (after == before).all(-1)
        after = torch.where(single.unsqueeze(-1), ops.flip_random(before, space.fields, **draws), after)
        # Half of the parents are states of the population themselves.
        after[:, : num_parents // 2] = before[:, : num_parents // 2]
        before, parents = before[:, :num_parents], after[:, :num_parents]
        shape = (*parents.shape[:2], moves.count)
        if choices:
            index = ops.uniform(shape=shape[1:], **draws).topk(num_moves, -1).indices
        else:
            index = torch.arange(moves.count, device=parents.device).expand(shape)
        neighbours, value = moves.apply(parents, index)
        candidates = batch.evaluate(torch.cat([after, neighbours.flatten(1, 2)], 1))
        scores = candidates.log_joint.clamp(min=-1e30)  # of impossible states, for differences
        gain = scores[:, num_changed:].view(index.shape) - scores[:, :num_parents, None]
        table = _conditionals(before, parents, gain, moves.latent[index], value, space)
        each = max(1, (size - candidates.num_states) // num_parents)
        # Every parent of a data point is a data point of its own to what draws for it.
        draws["rows"] = (draws["rows"].unsqueeze(1) * num_parents + torch.arange(num_parents, device=table.device)).flatten()
        samples = ops.draw_values(table, each, space.fields, **draws).view(len(population), -1, space.num_words)
        return join([candidates, batch.evaluate(samples)])


class IteratedLocalSearch(Search):
    """Randomises many latents of good states, and climbs from there.

    Where latents are coupled densely, as the members of communities, the neighbours of a good state are all worse, and only many changes
    together lead to a better one. Each chain starts with a state of the population, in which a random part of the latents takes random
    values. In each of some rounds half of the latents take their most probable values given all others
    (Lourenço, Martin and Stützle, *Iterated local search*, 2003).
    """

    ROUNDS: ClassVar[int] = 6

    def __init__(self, num_chains: int, *, generator: torch.Generator | None = None) -> None:
        self.num_chains, self.generator = num_chains, generator

    def propose(self, batch: SearchBatch) -> Population:
        """Proposes all states that the chains meet, and their neighbours."""
        population, space = batch.population, batch.space
        draws, moves = batch.draws(self.generator), single_changes(space, population.words.device)
        words = _randomise(_members(population, self.num_chains, draws), space, draws)
        index = torch.arange(moves.count, device=words.device).expand(*words.shape[:2], -1)
        found = [batch.evaluate(words)]
        for _ in range(self.ROUNDS):
            neighbours, value = moves.apply(words, index)
            scored = batch.evaluate(neighbours.flatten(1, 2))
            gain = scored.log_joint.clamp(min=-1e30).view(index.shape) - found[-1].log_joint.clamp(min=-1e30).unsqueeze(-1)
            table = _conditionals(words, words, gain, moves.latent[index], value, space)
            best = space.pack(table.argmax(-1).view(*words.shape[:2], -1))
            words = _replace(words, best, ops.uniform(shape=(self.num_chains, space.num_latents), **draws) < 0.5, space)
            found += [scored, batch.evaluate(words)]
        return join(found)


def _replace(words: Tensor, others: Tensor, is_replaced: Tensor, space: StateSpace) -> Tensor:
    """Packed states ``(N, C, W)`` in which some latents ``(N, C, L)`` are those of others."""
    return space.pack(torch.where(is_replaced, space.unpack(others, torch.int64), space.unpack(words, torch.int64)))


def _randomise(words: Tensor, space: StateSpace, draws: dict[str, Any]) -> Tensor:
    """Gives a log-uniform number of latents random values, in states ``(N, C, W)``."""
    shape = (words.shape[1], space.num_latents)
    cardinality = space.cardinality.to(words.device)
    values = (ops.uniform(shape=shape, **draws) * cardinality).long().minimum(cardinality - 1)
    share = ((ops.uniform(shape=shape[:1], **draws) - 1) * math.log(space.num_latents)).exp()
    return _replace(words, space.pack(values), ops.uniform(shape=shape, **draws) < share.unsqueeze(-1), space)


def _members(population: Population, count: int, draws: dict[str, Any]) -> Tensor:
    """Draws states of the populations, ``(N, count, W)``, by log-uniform ranks."""
    rank = (ops.uniform(shape=(count,), **draws) * math.log(population.num_states + 1)).exp().long().clamp(max=population.num_states) - 1
    # Equal ones, impossible ones too, in the same order on every device.
    place = population.log_joint.argsort(dim=1, descending=True, stable=True).gather(1, rank)
    return population.take(place)


def _conditionals(before: Tensor, parents: Tensor, gain: Tensor, latent: Tensor, value: Tensor, space: StateSpace) -> Tensor:
    """Full conditionals ``(N * P, L, V)``; a changed latent stays changed."""
    shape = (*parents.shape[:2], space.num_latents, max(space.cardinalities))
    table = gain.new_full(shape, -math.inf)
    now, past = (space.unpack(words, torch.int64).unsqueeze(-1) for words in (parents, before))
    table.view(*shape[:2], -1).scatter_(2, latent * shape[-1] + value, gain)
    table.scatter_(3, past, -math.inf)
    table.scatter_(3, now, 0.0)
    return table.flatten(0, 1).softmax(-1)


def _replace_runs(words: Tensor, others: Tensor, space: StateSpace, draws: dict[str, Any]) -> Tensor:
    """Replaces a run of neighbouring latents in every state.

    The new values are a common one, those of another state, or those elsewhere in that state.

    The start of a run is uniform, its length is log-uniform, and it ends with the last latent. In two of five cases
    its latents take a common value, at most their largest. In two of five they take the values of the other state a
    log-uniform number of places away (at the same places if latents differ in kind). In the others they take its
    values at the same places.
    """
    first, constant = _tables(space, words.device)
    uniform = ops.uniform(shape=(5, words.shape[1]), **draws).unbind(1)
    start = (uniform[0] * space.num_latents).long().clamp(max=space.num_latents - 1)
    length = (uniform[1] * math.log(space.num_latents + 1)).exp().long()
    value = (uniform[2] * len(constant)).long().clamp(max=len(constant) - 1)
    inside = first[(start + length).clamp(max=space.num_latents)] & ~first[start]
    translation = others
    if len(set(space.cardinalities)) == 1:
        # Up to half of the latents, in both directions.
        distance = ((2 * uniform[3] % 1) * math.log(max(2.0, space.num_latents / 2))).exp().long()
        translation = _translate(others, torch.where(uniform[3] < 0.5, -1, 1) * distance, space)
    kind = uniform[4].unsqueeze(-1)
    new = torch.where(kind < 0.4, constant[value], torch.where(kind < 0.8, translation, others))
    return (words & ~inside) | (new & inside)


def _translate(words: Tensor, distance: Tensor, space: StateSpace) -> Tensor:
    """Shifts states ``(N, C, W)``: latent ``l`` takes latent ``l + distance``.

    Beyond the ends values are zero. All latents have equally many.
    """
    width = int(space.bits[0])
    per_word = WORD_BITS // width
    jump = distance.div(per_word, rounding_mode="floor").unsqueeze(-1)
    shift = (distance.unsqueeze(-1) - jump * per_word) * width
    # A word of zeros at either end stands for all words beyond it.
    extended = torch.nn.functional.pad(words, (1, 1))
    place = torch.arange(1, words.shape[-1] + 1, device=words.device) + jump
    low, high = (extended.gather(-1, (place + i).clamp(0, words.shape[-1] + 1)) for i in (0, 1))
    valid_bits = -1 if per_word * width == WORD_BITS else (1 << (per_word * width)) - 1
    # What comes in from above when a negative word is shifted down is cut off, by a mask without shifts of 64.
    low_bits = ~(-1 << (per_word * width - 1 - shift) << 1)
    return (((low >> shift) & low_bits) | (high << (per_word * width - shift - 1) << 1)) & valid_bits


@functools.lru_cache(maxsize=16)
def _tables(space: StateSpace, device: torch.device) -> tuple[Tensor, Tensor]:
    """Masks ``(L + 1, W)`` of first latents, states ``(V, W)`` of equal values."""
    bits = torch.zeros(space.num_latents + 1, space.num_words, dtype=torch.int64, device="cpu")
    rows = torch.arange(1, space.num_latents + 1, device="cpu")
    field = torch.where(space.bits == WORD_BITS, -1, (1 << space.bits) - 1) << space.shift
    bits[rows, space.word] = field
    values = torch.arange(max(space.cardinalities), device="cpu").unsqueeze(-1)
    return bits.cumsum(0).to(device), space.pack(values.minimum(space.cardinality - 1)).to(device)
