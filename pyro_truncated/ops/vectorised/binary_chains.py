"""Messages along binary chains in plain torch, with a loop over steps.

A step whose kind of transition is negative lies beyond the end of its sequence: its first member has all the weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_truncated.ops.binary_chains import PairTerms, pair_terms
from pyro_truncated.ops.evolution import find_duplicates
from pyro_truncated.ops.vectorised.latent_values import unpack_bits


class _Steps:
    """Pair scores of all steps, made one step at a time."""

    def __init__(self, words: Tensor, log_prob: Tensor, kind: Tensor) -> None:
        self.words, self.kind, self.terms = words, kind, pair_terms(log_prob)
        self.has_forbidden = bool(self.terms.forbidden.any())
        self.log_prob = log_prob
        # Which sequences have a step, none the one after the last.
        self.is_part = torch.nn.functional.pad(kind >= 0, (0, 1))

    def bits(self, t: int, size: int | None = None) -> Tensor:
        """Values ``(N, S, M)`` of the first members of a step."""
        if t < 0:
            return self.words.new_zeros(len(self.words), 1, self.log_prob.shape[1]).double()
        return unpack_bits(self.words[:, t, :size], self.log_prob.shape[1], torch.float64)

    def pairs(self, t: int, previous: Tensor, current: Tensor) -> Tensor:
        """Log probabilities ``(N, S', S)`` of transitions into step ``t``."""
        return _pairs(PairTerms(*(term[self.kind[:, t].clamp(min=0)] for term in self.terms)), previous, current, self.has_forbidden)


def _pairs(terms: PairTerms, previous: Tensor, current: Tensor, has_forbidden: bool) -> Tensor:
    """Log transition probabilities ``(N, S', S)`` between states ``(N, S', M)`` and ``(N, S, M)``."""
    alone = (previous @ terms.previous.unsqueeze(-1)) + (current @ terms.current.unsqueeze(-1)).mT
    result = terms.constant.view(-1, 1, 1) + alone + (previous * terms.both.unsqueeze(1)) @ current.mT
    if has_forbidden:
        values, number = ((1 - previous, previous), (1 - current, current)), torch.zeros_like(result)
        for i in range(2):
            for j in range(2):
                number = number + (values[0][i] * terms.forbidden[:, None, :, i, j]) @ values[1][j].mT
        result = result.masked_fill(number > 0, -torch.inf)
    return result


def _normalize(message: Tensor) -> tuple[Tensor, Tensor]:
    """Messages without their log sum, and that sum; impossible messages stay."""
    total = message.logsumexp(-1)
    return torch.where(total.unsqueeze(-1) > -torch.inf, message - total.unsqueeze(-1), message), total


def _replace_after_end(message: Tensor, is_part: Tensor) -> Tensor:
    """Messages with all weight on the first member where sequences have ended."""
    first = torch.full_like(message, -torch.inf)
    first[..., 0] = 0.0
    return torch.where(is_part.unsqueeze(-1), message, first)


def messages(words: Tensor, unary: Tensor, log_prob: Tensor, kind: Tensor, directions: Sequence[bool]) -> list[tuple[Tensor, Tensor]]:
    """See :func:`pyro_truncated.ops.binary_chains.messages`; messages and norms, forward or backward in turn."""
    steps = _Steps(words, log_prob, kind)
    return [_messages(steps, unary.double(), kind, forward) for forward in directions]


def _messages(steps: _Steps, unary: Tensor, kind: Tensor, forward: bool) -> tuple[Tensor, Tensor]:
    out, log_norm = torch.empty_like(unary), torch.zeros(kind.shape, dtype=torch.float64, device=kind.device)
    num_steps = kind.shape[1]
    for t in range(num_steps) if forward else reversed(range(num_steps)):
        if forward:
            before = out[:, t - 1] if t else unary.new_zeros(len(kind), 1)
            message = _from_left(steps, t, before, steps.bits(t - 1), steps.bits(t)) + unary[:, t]
        else:
            message = _from_right(steps, t, unary[:, t + 1] + out[:, t + 1], steps.bits(t), None) if t + 1 < num_steps else 0 * unary[:, t]
        message, total = _normalize(message)
        if not forward:
            is_last = ~steps.is_part[:, t + 1]
            message = torch.where(is_last.unsqueeze(-1), 0.0, message)
            total = torch.where(is_last, 0.0, total)
        out[:, t] = _replace_after_end(message, steps.is_part[:, t])
        log_norm[:, t] = torch.where(steps.is_part[:, t], total, 0.0)
    return out, log_norm


def _from_left(steps: _Steps, t: int, before: Tensor, others: Tensor, states: Tensor) -> Tensor:
    return (before.unsqueeze(-1) + steps.pairs(t, others, states)).logsumexp(1)


def _from_right(steps: _Steps, t: int, onward: Tensor, states: Tensor, others: Tensor | None) -> Tensor:
    """What the next step sends; nothing where a sequence has none."""
    others = steps.bits(t + 1, onward.shape[1]) if others is None else others
    message = (onward.unsqueeze(1) + steps.pairs(t + 1, states, others)).logsumexp(-1)
    return torch.where(steps.is_part[:, t + 1].unsqueeze(-1), message, 0.0)


def select(
    words: Tensor, unary: Tensor, log_prob: Tensor, kind: Tensor, size: int, ahead: Tensor, forward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.binary_chains.select`."""
    steps, unary = _Steps(words, log_prob, kind), unary.double()
    num_steps, width = kind.shape[1], ahead.shape[2]
    chosen = words.new_empty(*kind.shape, size)
    out, log_norm = unary.new_empty(chosen.shape), unary.new_zeros(kind.shape)
    kept, own = steps.bits(-1), unary.new_zeros(len(kind), 1)
    for t in range(num_steps) if forward else reversed(range(num_steps)):
        states, right = steps.bits(t), unary.new_zeros(unary.shape[0], unary.shape[2])
        others, message = (kept, own) if forward or not t else (steps.bits(t - 1, width), ahead[:, t - 1])
        if not t:
            others, message = steps.bits(-1), unary.new_zeros(len(kind), 1)
        left = _from_left(steps, t, message, others, states) + unary[:, t]
        if t + 1 < num_steps:
            onward = unary[:, t + 1, :width] + ahead[:, t + 1] if forward else own
            right = _from_right(steps, t, onward, states, None if forward else kept)
        place = _best_distinct(left + right, words[:, t], size)
        is_part = steps.is_part[:, t]
        place = torch.where(is_part.unsqueeze(-1), place, torch.where(torch.arange(size, device=place.device) == 0, 0, -1))
        chosen[:, t] = place
        at = place.clamp(min=0)
        message, total = _normalize((left if forward else right).gather(1, at).masked_fill(place < 0, -torch.inf))
        out[:, t], log_norm[:, t] = _replace_after_end(message, is_part), torch.where(is_part, total, 0.0)
        kept = states.gather(1, at.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        own = out[:, t] if forward else out[:, t] + unary[:, t].gather(1, at).masked_fill(place < 0, -torch.inf)
    return chosen, out, log_norm


def _best_distinct(score: Tensor, words: Tensor, size: int) -> Tensor:
    """Positions ``(N, size)`` of the best distinct states, filled up with -1."""
    score, order = score.sort(dim=1, descending=True, stable=True)
    ordered = words.gather(1, order.unsqueeze(-1).expand(-1, -1, words.shape[-1]))
    score = score.masked_fill(find_duplicates(ordered), -torch.inf)
    score, place = torch.nn.functional.pad(score, (0, max(0, size - score.shape[1])), value=-torch.inf).topk(size, dim=1)
    chosen = order.gather(1, place.clamp(max=order.shape[1] - 1)).masked_fill(score == -torch.inf, -1)
    count = torch.arange(size, device=words.device)
    first = torch.where(count < words.shape[1], count, -1)
    return torch.where((score[:, :1] == -torch.inf), first, chosen)


def expected_pairs(
    words: Tensor, forward: Tensor, onward: Tensor, log_prob: Tensor, kind: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weighted numbers of transitions of each kind, and their bits ``(K, M)``."""
    steps, (num_kinds, num_latents) = _Steps(words, log_prob, kind), log_prob.shape[:2]
    number = forward.new_zeros(num_kinds)
    previous, current, both = forward.new_zeros(3, num_kinds, num_latents)
    for t in range(kind.shape[1]):
        before = forward[:, t - 1] if t else forward.new_zeros(len(kind), 1)
        others, states = steps.bits(t - 1), steps.bits(t)
        log_pairs = before.unsqueeze(-1) + steps.pairs(t, others, states) + onward[:, t].unsqueeze(1)
        total = log_pairs.flatten(1).logsumexp(1)
        is_counted = steps.is_part[:, t] & (total > -torch.inf)
        pairs = (log_pairs - torch.where(is_counted, total, 0.0).view(-1, 1, 1)).exp() * (weight * is_counted).view(-1, 1, 1)
        k = kind[:, t].clamp(min=0)
        number.index_add_(0, k, weight * is_counted)
        previous.index_add_(0, k, torch.einsum("nij,nim->nm", pairs, others))
        current.index_add_(0, k, torch.einsum("nij,njm->nm", pairs, states))
        both.index_add_(0, k, (others * (pairs @ states)).sum(1))
    return number, previous, current, both


def best_path(words: Tensor, unary: Tensor, log_prob: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.binary_chains.best_path`."""
    steps, unary = _Steps(words, log_prob, kind), unary.double()
    message, origins = unary.new_zeros(len(kind), 1), []
    for t in range(kind.shape[1]):
        best, origin = (message.unsqueeze(-1) + steps.pairs(t, steps.bits(t - 1), steps.bits(t))).max(1)
        is_part = steps.is_part[:, t].unsqueeze(-1)
        # Beyond the end of a sequence every member keeps its place.
        stay = torch.arange(best.shape[1], device=words.device).expand_as(origin)
        origins.append(torch.where(is_part, origin, stay))
        message = torch.where(is_part, best + unary[:, t], message.expand_as(best))
    value, place = message.max(-1)
    path = torch.zeros_like(kind)
    for t in reversed(range(kind.shape[1])):
        path[:, t] = torch.where(steps.is_part[:, t], place, 0)
        place = origins[t].gather(1, place.unsqueeze(-1)).squeeze(-1)
    return path, torch.where(steps.is_part[:, 0], value, 0.0)


def draw_paths(words: Tensor, forward: Tensor, log_prob: Tensor, kind: Tensor, uniform: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.binary_chains.draw_paths`."""
    steps, path = _Steps(words, log_prob, kind), torch.zeros(uniform.shape, dtype=torch.int64, device=words.device)
    rows = torch.arange(len(kind), device=words.device)
    for t in reversed(range(kind.shape[1])):
        log_weight = forward[:, t].expand(len(uniform), -1, -1)
        if t + 1 < kind.shape[1]:
            pairs = steps.pairs(t + 1, steps.bits(t), steps.bits(t + 1))
            given_next = forward[:, t] + pairs.mT[rows, path[:, :, t + 1]]
            log_weight = torch.where(steps.is_part[:, t + 1].unsqueeze(-1), given_next, log_weight)
        cumulative = log_weight.softmax(-1).cumsum(-1)
        # Rounding shall not choose a member of weight zero.
        last = (cumulative < cumulative[..., -1:]).sum(-1)
        place = (uniform[:, :, t].unsqueeze(-1) >= cumulative).sum(-1).minimum(last)
        path[:, :, t] = torch.where(steps.is_part[:, t], place, 0)
    return path


def masses(words: Tensor, unary: Tensor, others: Tensor, forward: Tensor, onward: Tensor, log_prob: Tensor, kind: Tensor) -> Tensor:
    """Log masses ``(N, T, C)`` of states, up to a constant of each step."""
    steps, out = _Steps(others, log_prob, kind), torch.empty(unary.shape, dtype=torch.float64, device=unary.device)
    for t in range(kind.shape[1]):
        states = unpack_bits(words[:, t], log_prob.shape[1], torch.float64)
        before = forward[:, t - 1] if t else forward.new_zeros(len(kind), 1)
        mass = _from_left(steps, t, before, steps.bits(t - 1), states) + unary[:, t]
        if t + 1 < kind.shape[1]:
            mass = mass + _from_right(steps, t, onward[:, t + 1], states, None)
        out[:, t] = _replace_after_end(mass, steps.is_part[:, t])
    return out


def flips(
    words: Tensor, log_weight: Tensor, gain: Tensor, forward: Tensor, onward: Tensor, log_prob: Tensor, kind: Tensor, rows: slice, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.binary_chains.best_flips`."""
    steps, num_steps = _Steps(words, log_prob, kind), kind.shape[1]
    row = torch.arange(rows.start, rows.stop, device=words.device)
    n, t = row // num_steps, row % num_steps
    after, following = (t + 1).clamp(max=num_steps - 1), torch.where(t + 1 < num_steps, kind[n, (t + 1).clamp(max=num_steps - 1)], -1)
    num_latents = log_prob.shape[1]
    states, before, next_states = (unpack_bits(words[n, step], num_latents, torch.float64) for step in (t, (t - 1).clamp(min=0), after))
    states = states[:, : gain.shape[1]]
    message = forward[n, (t - 1).clamp(min=0)]
    is_first = (t == 0).view(-1, 1)
    before = torch.where(is_first.unsqueeze(-1), 0.0, before)
    message = torch.where(is_first, torch.where(torch.arange(message.shape[1], device=words.device) == 0, 0.0, -torch.inf), message)
    k, later = kind[n, t].clamp(min=0), following.clamp(min=0)
    left = _pairs(PairTerms(*(term[k] for term in steps.terms)), before, states, steps.has_forbidden) + message.unsqueeze(-1)
    right = _pairs(PairTerms(*(term[later] for term in steps.terms)), states, next_states, steps.has_forbidden) + onward[
        n, after
    ].unsqueeze(1)
    chances = log_prob.double().exp()
    on = states.to(torch.bool)
    ratio = _ratio(left.mT.softmax(-1) @ before, chances[k], on)
    ahead = _ratio(right.softmax(-1) @ next_states, chances[later].mT, on)
    ratio = torch.where((following >= 0).view(-1, 1, 1), ratio * ahead, ratio)
    score = (log_weight[n, t, : gain.shape[1]].unsqueeze(-1) + gain + ratio.log()).masked_fill((kind[n, t] < 0).view(-1, 1, 1), -torch.inf)
    score = score.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).flatten(1)
    latent = torch.arange(num_latents, device=words.device)
    bit = torch.where(latent // 64 == torch.arange(words.shape[-1], device=words.device).unsqueeze(-1), 1 << (latent % 64), 0).mT
    flipped = (words[n, t, : gain.shape[1]].unsqueeze(2) ^ bit).flatten(1, 2)
    score, order = score.sort(dim=1, descending=True, stable=True)
    ordered = flipped.gather(1, order.unsqueeze(-1).expand(-1, -1, words.shape[-1]))
    is_old = find_duplicates(torch.cat([words[n, t], ordered], 1))[:, words.shape[2] :]
    score, place = score.masked_fill(is_old, -torch.inf).topk(min(size, score.shape[1]), dim=1)
    chosen = order.gather(1, place)
    missing = (0, size - score.shape[1])
    score, chosen = torch.nn.functional.pad(score, missing, value=-torch.inf), torch.nn.functional.pad(chosen, missing)
    chosen = chosen.masked_fill(score == -torch.inf, 0)
    return chosen // num_latents, chosen % num_latents, score


def _ratio(on: Tensor, chances: Tensor, value: Tensor) -> Tensor:
    """By how much sums grow where a latent's value changes."""

    def flip_ratio(row: Tensor) -> Tensor:
        off_to_on = torch.where(row[..., 0] > 0, row[..., 1] / row[..., 0], 0.0).unsqueeze(1)
        on_to_off = torch.where(row[..., 1] > 0, row[..., 0] / row[..., 1], 0.0).unsqueeze(1)
        return torch.where(value, on_to_off, off_to_on)

    return (1 - on) * flip_ratio(chances[..., 0, :]) + on * flip_ratio(chances[..., 1, :])


class _Blocks:
    """Exact messages over the configurations of blocks of chains."""

    def __init__(self, unary: Tensor, log_prob: Tensor, kind: Tensor, block: Tensor) -> None:
        self.unary, self.kind, self.block = unary.double(), kind, block
        self.chances = log_prob.double().exp()

    def move(self, vector: Tensor, t: int, *, backward: bool) -> Tensor:
        """Takes a block's chains from the step before ``t``, or back."""
        num_data, num_chains = self.block.shape
        table = self.chances[self.kind[:, t].clamp(min=0).unsqueeze(-1), self.block]
        table = table.mT if backward else table
        vector = vector.view(num_data, *(2,) * num_chains)
        for i in range(num_chains):
            # The first latent of the block is the lowest bit, which is the last dimension.
            ahead = vector.movedim(-1 - i, -1)
            vector = (ahead.unsqueeze(-2) @ table[:, i].view(num_data, *(1,) * (num_chains - 1), 2, 2)).squeeze(-2).movedim(-1, -1 - i)
        return vector.reshape(num_data, -1)

    def times(self, vector: Tensor, t: int) -> Tensor:
        """The normalised product of a vector and likelihoods."""
        unary = self.unary[:, t]
        best = unary.amax(-1, keepdim=True)
        likelihood = torch.where(best > -torch.inf, (unary - best).exp(), 1.0)
        product = vector * likelihood
        product = torch.where(product.sum(-1, keepdim=True) > 0, product, likelihood)
        return product / product.sum(-1, keepdim=True)

    def filter(self) -> list[Tensor]:
        """The posterior of each step given the steps before, ``(N, 2**k)`` each."""
        vector = torch.zeros_like(self.unary[:, 0])
        vector[:, 0] = 1.0
        found = []
        for t in range(self.unary.shape[1]):
            vector = self.times(self.move(vector, t, backward=False), t)
            found.append(vector)
        return found


def block_posteriors(unary: Tensor, log_prob: Tensor, kind: Tensor, block: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.binary_chains.block_posteriors`."""
    blocks, num_steps = _Blocks(unary, log_prob, kind, block), unary.shape[1]
    forward = blocks.filter()
    out, vector = torch.empty_like(unary, dtype=torch.float64), torch.full_like(forward[0], 1 / unary.shape[2])
    for t in reversed(range(num_steps)):
        if t + 1 < num_steps:
            onward = blocks.move(blocks.times(vector, t + 1), t + 1, backward=True)
            vector = torch.where((kind[:, t + 1] >= 0).unsqueeze(-1), onward, vector)
        out[:, t] = (forward[t] * vector).log().log_softmax(-1)
    return out


def draw_blocks(unary: Tensor, log_prob: Tensor, kind: Tensor, block: Tensor, uniform: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.binary_chains.draw_blocks`."""
    blocks, (num_data, num_steps, size) = _Blocks(unary, log_prob, kind, block), unary.shape
    forward = blocks.filter()
    out = torch.zeros(num_data, num_steps, dtype=torch.int64, device=unary.device)
    for t in reversed(range(num_steps)):
        weight = forward[t]
        if t + 1 < num_steps:
            after = torch.nn.functional.one_hot(out[:, t + 1], size).double()
            onward = blocks.move(after, t + 1, backward=True)
            weight = torch.where((kind[:, t + 1] >= 0).unsqueeze(-1), weight * onward, weight)
        total = weight.cumsum(-1)
        place = torch.searchsorted(total, uniform[:, t : t + 1] * total[:, -1:], right=True).squeeze(-1)
        # A uniform number that rounding lifts to the sum falls on the last possible place.
        place = torch.minimum(place, size - 1 - (weight > 0).long().flip(-1).argmax(-1))
        out[:, t] = torch.where(kind[:, t] >= 0, place, 0)
    return out
