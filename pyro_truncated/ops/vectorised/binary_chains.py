"""Messages along binary chains in plain torch, with a loop over steps.

A step whose kind of transition is negative lies beyond the end of its sequence: its first member has all the weight. Until kernels are
compiled, everything is computed in their order, to the last digit; elsewhere by products of matrices and logarithms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pyro_truncated.ops.backend import is_vectorised
from pyro_truncated.ops.binary_chains import LOST_NATS, PairTables, chances_if_full, likelihoods, pair_tables
from pyro_truncated.ops.evolution import find_duplicates
from pyro_truncated.ops.packed_states import gather_states
from pyro_truncated.ops.vectorised import in_order
from pyro_truncated.ops.vectorised.latent_values import unpack_bits

exp, log = torch.exp, torch.log


def _sum(values: Tensor, dim: int = -1) -> Tensor:
    """Sums, in order of entries in place of a kernel."""
    return values.sum(dim) if is_vectorised(values) else values.cumsum(dim).select(dim, -1)


def _sum_exp(below: Tensor) -> tuple[Tensor, Tensor]:
    """Exponentials but for those that are lost, and their sum."""
    terms = torch.where(below > -LOST_NATS, in_order.exp(below), 0.0)
    return terms, _sum(terms)


def _log_sum(values: Tensor) -> Tensor:
    if is_vectorised(values):
        return values.logsumexp(-1)
    best = values.amax(-1)
    return torch.where(best > -torch.inf, best + in_order.log(_sum_exp(values - best.unsqueeze(-1))[1]), best)


def _normalize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Messages without their log sum, and that sum; impossible messages stay."""
    total = _log_sum(values)
    return torch.where(total.unsqueeze(-1) > -torch.inf, values - total.unsqueeze(-1), values), total


def _finite(values: Tensor) -> Tensor:
    return torch.where(values > -torch.inf, values, 0.0)


def _expect(pairs: Tensor, bits: Tensor) -> Tensor:
    """Sums ``(N, C, M)`` of bits ``(N, S, M)`` with weights ``(N, C, S)``."""
    if is_vectorised(pairs):
        return pairs @ bits
    total = pairs.new_zeros(*pairs.shape[:2], bits.shape[2])
    for j in range(bits.shape[1]):
        total += pairs[:, :, j, None] * bits[:, None, j]
    return total


def _part_mask(kind: Tensor, t: int) -> Tensor:
    """Which sequences have a step, ``(N, 1)``; none the one after the last."""
    return (kind[:, t] >= 0 if t < kind.shape[1] else torch.zeros_like(kind[:, 0], dtype=torch.bool)).unsqueeze(1)


def _replace_after_end(message: Tensor, is_part: Tensor) -> Tensor:
    """Messages with all weight on the first member where sequences have ended."""
    first = torch.full_like(message, -torch.inf)
    first[..., 0] = 0.0
    return torch.where(is_part, message, first)


class _Members:
    """What members of a neighbouring step say of states of this one.

    Their weights are those of messages ``(N, S)`` and terms of the transition that depend on them alone.
    """

    def __init__(self, tables: PairTables, kind: Tensor, words: Tensor, message: Tensor, *, is_left: bool) -> None:
        self.tables, self.kind, self.words = tables, kind.clamp(min=0), words
        terms, self.own_terms = (tables.previous, tables.current) if is_left else (tables.current, tables.previous)
        self.masks = tables.forbidden[0 if is_left else 1][self.kind]
        logs = message + tables.constant[self.kind].unsqueeze(1) + self._alone(terms, words)
        self.best = _finite(logs.amax(1, keepdim=True))
        self.logs = logs - self.best
        self.weights = in_order.exp(self.logs)

    def _look_up(self, table: Tensor, place: Tensor, words: Tensor) -> Iterator[Tensor]:
        """Yields the entries of tables ``(N,)`` at each octet of words ``(N, ..., W)``."""
        first, octets = (place * table.shape[-2] * 256).view(-1, *(1,) * (words.dim() - 2)), words.contiguous().view(torch.uint8)
        for octet in range(table.shape[-2]):
            yield table.take(octets[..., octet] + (first + 256 * octet))

    def _alone(self, terms: Tensor, words: Tensor) -> Tensor:
        return sum(self._look_up(terms, self.kind, words))  # type: ignore[return-value]

    def alone(self, states: Tensor) -> Tensor:
        """Terms of the transition that depend on the states alone."""
        return self._alone(self.own_terms, states)

    def _possible_mask(self, is_there: Tensor, states: Tensor) -> Tensor:
        is_possible = is_there.unsqueeze(1)
        if self.masks.shape[1]:
            a, b = self.words.unsqueeze(1), states.unsqueeze(2)
            off_off, off_on, on_off, on_on = self.masks[:, :, None, None].unbind(1)
            forbidden = (~a & ~b & off_off) | (~a & b & off_on) | (a & ~b & on_off) | (a & b & on_on)
            is_possible = is_possible & (forbidden == 0).all(-1)
        return is_possible

    def weigh(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Weights times factors of transitions, ``(N, C, S)``, and their sums."""
        # Only in place of a kernel; elsewhere zero, so that logarithms are computed.
        if is_vectorised(states):
            return self.weights.new_zeros(len(states), 1, 1), self.weights.new_zeros(len(states), 1)
        both, products = self.words.unsqueeze(1) & states.unsqueeze(2), self.weights.unsqueeze(1)
        for factor in self._look_up(self.tables.both, 2 * self.kind + 1, both):
            products = products * factor
        products = torch.where(self._possible_mask(self.weights > 0, states), products, 0.0)
        return products, _sum(products)

    def log_pairs(self, states: Tensor) -> Tensor:
        """The logarithms of the same."""
        logs, latent = self.logs.unsqueeze(1), torch.arange(8 * self.tables.both.shape[2], device=states.device)
        if is_vectorised(states):
            coefficient = self.tables.both[:, 0, latent // 8, 1 << latent % 8][self.kind].unsqueeze(1)
            others, own = (unpack_bits(words, len(latent), torch.float64) for words in (self.words, states))
            logs = logs + (own * coefficient) @ others.mT
        else:
            for term in self._look_up(self.tables.both, 2 * self.kind, self.words.unsqueeze(1) & states.unsqueeze(2)):
                logs = logs + term
        return torch.where(self._possible_mask(self.logs > -torch.inf, states), logs, -torch.inf)

    def lost_mask(self, total: Tensor) -> Tensor:
        """Which sums of products must be computed by logarithms."""
        smallest = self.tables.smallest[self.kind].view(-1, *(1,) * (total.dim() - 1))
        return ~((total >= smallest) & (total < torch.inf))

    def message(self, states: Tensor, own: Tensor) -> Tensor:
        """Adds what the members send to states to ``own (N, C)``."""
        total = self.weigh(states)[1]
        log_factor, is_lost = in_order.log(total), self.lost_mask(total)
        if bool(is_lost.any()):
            log_factor = torch.where(is_lost, _log_sum(self.log_pairs(states)), log_factor)
        return own + ((self.alone(states) + self.best) + log_factor)

    def share(self, states: Tensor) -> Tensor:
        """The share of each member in what is sent to states, ``(N, C, S)``."""
        shares, total = self.weigh(states)
        is_lost = self.lost_mask(total)
        if bool(is_lost.any()):
            logs = self.log_pairs(states)
            terms, sums = _sum_exp(logs - logs.amax(-1, keepdim=True))
            shares, total = torch.where(is_lost.unsqueeze(-1), terms, shares), torch.where(is_lost, sums, total)
        return torch.where(total.unsqueeze(-1) > 0, shares / total.unsqueeze(-1), shares)

    def posterior(self, states: Tensor, alone: Tensor) -> tuple[Tensor, Tensor]:
        """The posterior of states and members ``(N, C, S)``, and where one exists."""
        weight = in_order.exp(alone - _finite(alone.amax(1, keepdim=True))).unsqueeze(2)
        products, sums = self.weigh(states)
        pairs = torch.where(weight > 0, weight * products, 0.0)
        total = _sum(torch.where(weight > 0, weight * sums.unsqueeze(2), 0.0).squeeze(2))
        is_lost = self.lost_mask(total)
        if bool(is_lost.any()):
            logs = (alone.unsqueeze(2) + self.log_pairs(states)).flatten(1)
            terms, sums = _sum_exp(logs - logs.amax(1, keepdim=True))
            pairs = torch.where(is_lost[:, None, None], terms.unflatten(1, (states.shape[1], -1)), pairs)
            total = torch.where(is_lost, sums, total)
        return pairs / total[:, None, None], total > 0


def _left(tables: PairTables, kind: Tensor, t: int, words: Tensor, message: Tensor) -> _Members:
    """The step before: members ``(N, T, S, W)`` and their messages ``(N, T, S)``."""
    if t:
        return _Members(tables, kind[:, t], words[:, t - 1], message[:, t - 1], is_left=True)
    zero = words.new_zeros(len(kind), 1, words.shape[-1])
    return _Members(tables, kind[:, 0], zero, zero[..., 0].double(), is_left=True)


def messages(words: Tensor, unary: Tensor, log_prob: Tensor, kind: Tensor, directions: Sequence[bool]) -> list[tuple[Tensor, Tensor]]:
    """See :func:`pyro_truncated.ops.binary_chains.messages`; messages and norms, forward or backward in turn."""
    if (chances := None if is_vectorised(words) else chances_if_full(words, log_prob)) is not None:
        return [_full_messages(unary, kind, chances, forward) for forward in directions]
    tables = pair_tables(log_prob)
    return [_messages(tables, words, unary.double(), kind, forward) for forward in directions]


def _messages(tables: PairTables, words: Tensor, unary: Tensor, kind: Tensor, forward: bool) -> tuple[Tensor, Tensor]:
    out, log_norm = torch.zeros_like(unary), torch.zeros(kind.shape, dtype=torch.float64, device=kind.device)
    for t in range(kind.shape[1]) if forward else reversed(range(kind.shape[1])):
        is_part, has_next = _part_mask(kind, t), _part_mask(kind, t + 1)
        if forward:
            message, total = _normalize(_left(tables, kind, t, words, out).message(words[:, t], unary[:, t]))
        elif t + 1 < kind.shape[1]:
            right = _Members(tables, kind[:, t + 1], words[:, t + 1], unary[:, t + 1] + out[:, t + 1], is_left=False)
            message, total = _normalize(right.message(words[:, t], out[:, t]))
            message, total = torch.where(has_next, message, 0.0), torch.where(has_next.squeeze(1), total, 0.0)
        else:
            message, total = out[:, t], log_norm[:, t]
        out[:, t], log_norm[:, t] = _replace_after_end(message, is_part), torch.where(is_part.squeeze(1), total, 0.0)
    return out, log_norm


def _step(vector: Tensor, table: Tensor) -> Tensor:
    """Takes chains with chances ``(N, k, 2, 2)`` a step on, of ``vector (N, 2**k)``."""
    for i in range(table.shape[1]):
        vector = _step_one(vector, table[:, i], i)
    return vector


def _step_one(vector: Tensor, table: Tensor, i: int) -> Tensor:
    off, on = vector.view(len(vector), -1, 2, 1 << i).unbind(2)
    (off_off, off_on), (on_off, on_on) = (row.unbind(1) for row in table[..., None, None].unbind(1))
    return torch.stack([off * off_off + on * on_off, off * off_on + on * on_on], 2).flatten(1)


def _full_messages(unary: Tensor, kind: Tensor, chances: Tensor, forward: bool) -> tuple[Tensor, Tensor]:
    """Messages of all states in their order, by Kronecker products."""
    likelihood, best = likelihoods(unary)
    out, norm = torch.zeros_like(likelihood), torch.ones_like(kind, dtype=torch.float64)
    vector, scale = torch.zeros_like(likelihood[:, 0]), norm.new_ones(len(kind), 1)
    vector[:, 0] = 1.0
    first = vector.clone()
    for t in range(kind.shape[1]) if forward else reversed(range(kind.shape[1])):
        at, is_part = (t if forward else t + 1), _part_mask(kind, t)
        is_step = _part_mask(kind, at)
        if at < kind.shape[1]:
            table = chances[kind[:, at].clamp(min=0)]
            moved = (_step(vector, table) if forward else vector) * (likelihood[:, at] * scale)
            total = _sum(moved).unsqueeze(1)
            scale = torch.where(is_step, torch.where(total > 0, 1.0 / total, 0.0), scale)
            moved, norm[:, t] = (moved, torch.where(is_part, total, 1.0)[:, 0]) if forward else (_step(moved, table.mT), norm[:, t])
            vector = torch.where(is_step, moved, 1.0)
        else:
            vector = torch.ones_like(vector)
        out[:, t] = torch.where(is_part, vector * scale, first)
    best = torch.where(kind < 0, 0.0, best)
    return out.log_(), norm.log_().add_(best) if forward else norm


def select(
    words: Tensor, unary: Tensor, log_prob: Tensor, kind: Tensor, size: int, ahead: Tensor, forward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.binary_chains.select`."""
    tables, unary, ahead = pair_tables(log_prob), unary.double(), ahead.double()
    num_steps, width = kind.shape[1], ahead.shape[2]
    chosen = words.new_empty(*kind.shape, size)
    out, log_norm = unary.new_empty(chosen.shape), unary.new_zeros(kind.shape)
    kept, own = words[:, 0, :1], unary[:, 0, :1]
    for t in range(num_steps) if forward else reversed(range(num_steps)):
        states, right, is_part, has_next = words[:, t], torch.zeros_like(unary[:, t]), _part_mask(kind, t), _part_mask(kind, t + 1)
        if forward and t:
            before = _Members(tables, kind[:, t], kept, own, is_left=True)
        else:
            before = _left(tables, kind, t, words[:, :, :width], ahead)
        left = before.message(states, unary[:, t])
        if t + 1 < num_steps:
            others, message = (words[:, t + 1, :width], unary[:, t + 1, :width] + ahead[:, t + 1]) if forward else (kept, own)
            after = _Members(tables, kind[:, t + 1], others, message, is_left=False)
            right = torch.where(has_next, after.message(states, right), right)
        place = _best_distinct(left + right, states, size)
        place = torch.where(is_part, place, torch.where(torch.arange(size, device=place.device) == 0, 0, -1))
        chosen[:, t] = place
        at = place.clamp(min=0)
        message, total = _normalize((left if forward else right).gather(1, at).masked_fill(place < 0, -torch.inf))
        out[:, t], log_norm[:, t] = _replace_after_end(message, is_part), torch.where(is_part.squeeze(1), total, 0.0)
        kept = gather_states(states, at)
        own = out[:, t] if forward else out[:, t] + unary[:, t].gather(1, at).masked_fill(place < 0, -torch.inf)
    return chosen, out, log_norm


def _best_distinct(score: Tensor, words: Tensor, size: int) -> Tensor:
    """Positions ``(N, size)`` of the best distinct states, filled up with -1."""
    score, order = score.sort(dim=1, descending=True, stable=True)
    ordered = gather_states(words, order)
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
    num_kinds, num_latents = log_prob.shape[:2]
    number = forward.new_zeros(len(kind), num_kinds)
    previous, current, both = forward.new_zeros(3, len(kind), num_kinds, num_latents)
    row = torch.arange(len(kind), device=kind.device)
    if (chances := None if is_vectorised(words) else chances_if_full(words, log_prob)) is not None:
        _add_full_pairs(forward.exp(), likelihoods(onward)[0], kind, weight, chances, (number, previous, current, both))
        return number.sum(0), previous.sum(0), current.sum(0), both.sum(0)
    tables = pair_tables(log_prob)
    for t in range(kind.shape[1]):
        left, k = _left(tables, kind, t, words, forward), kind[:, t].clamp(min=0)
        pairs, is_counted = left.posterior(words[:, t], onward[:, t] + left.alone(words[:, t]))
        own = torch.where(is_counted & (kind[:, t] >= 0), weight, 0.0)
        share = torch.where(own[:, None, None] != 0, own[:, None, None] * pairs, 0.0)
        others, states = (unpack_bits(members, num_latents, torch.float64) for members in (left.words, words[:, t]))
        number[row, k] += own
        previous[row, k] += _sum(_sum(share, 1).unsqueeze(2) * others, 1)
        current[row, k] += _sum(_sum(share, 2).unsqueeze(2) * states, 1)
        both[row, k] += _sum(_expect(share, others) * states, 1)
    return number.sum(0), previous.sum(0), current.sum(0), both.sum(0)


def _add_full_pairs(
    forward: Tensor, onward: Tensor, kind: Tensor, weight: Tensor, chances: Tensor, sums: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    """Adds expected transitions between all states in their order."""
    (number, previous, current, both), row = sums, torch.arange(len(kind), device=kind.device)
    start = torch.zeros_like(forward[:, 0])
    start[:, 0] = 1.0
    for t in range(kind.shape[1]):
        k = kind[:, t].clamp(min=0)
        table, is_counted = chances[k], (kind[:, t] >= 0) & (weight != 0)
        # To the right of each chain all later ones have made their step backward, to its left all earlier ones theirs forward.
        left, rights = forward[:, t - 1] if t else start, [onward[:, t]]
        for m in range(table.shape[1] - 1, 0, -1):
            rights.append(_step_one(rights[-1], table[:, m].mT, m))
        for m, right in enumerate(reversed(rights)):
            of_left, of_right = (vector.view(len(kind), -1, 2, 1 << m).unbind(2) for vector in (left, right))
            neither, after, before, twice = (
                _sum((a * b).flatten(1)) * table[:, m, i, j] for i, a in enumerate(of_left) for j, b in enumerate(of_right)
            )
            total = neither + after + before + twice
            is_counted = is_counted & (total != 0)
            share = torch.where(is_counted, weight / total, 0.0)
            if m == 0:
                number[row, k] += torch.where(is_counted, weight, 0.0)
            previous[row, k, m] += share * (before + twice)
            current[row, k, m] += share * (after + twice)
            both[row, k, m] += share * twice
            left = _step_one(left, table[:, m], m)


def best_path(words: Tensor, unary: Tensor, log_prob: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.binary_chains.best_path`."""
    tables, message, origins = pair_tables(log_prob), torch.zeros_like(unary, dtype=torch.float64), []
    for t in range(kind.shape[1]):
        before = _left(tables, kind, t, words, message)
        best, origin = before.log_pairs(words[:, t]).max(2)
        now = ((unary[:, t].double() + before.alone(words[:, t])) + before.best) + best
        # Beyond the end of a sequence every member keeps its place.
        stay = torch.arange(best.shape[1], device=words.device).expand_as(origin)
        origins.append(torch.where(_part_mask(kind, t), origin, stay))
        message[:, t] = torch.where(_part_mask(kind, t), now, message[:, t - 1])
    value, place = message[:, -1].max(-1)
    path = torch.zeros_like(kind)
    for t in reversed(range(kind.shape[1])):
        path[:, t] = torch.where(kind[:, t] >= 0, place, 0)
        place = origins[t].gather(1, place.unsqueeze(-1)).squeeze(-1)
    return path, torch.where(kind[:, 0] >= 0, value, 0.0)


def _place(weights: Tensor, uniform: Tensor) -> Tensor:
    """The positions that uniform numbers fall on, in proportion to weights."""
    total = weights.cumsum(-1)
    place = torch.searchsorted(total, uniform.unsqueeze(-1) * total[..., -1:], right=True).squeeze(-1)
    # A uniform number that rounding lifts to the sum falls on the last possible place.
    return place.minimum(((weights > 0) * torch.arange(weights.shape[-1], device=weights.device)).amax(-1))


def draw_paths(words: Tensor, forward: Tensor, log_prob: Tensor, kind: Tensor, uniform: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.binary_chains.draw_paths`."""
    tables, path = pair_tables(log_prob), torch.zeros(uniform.shape, dtype=torch.int64, device=words.device)
    row, chances = torch.arange(len(kind), device=words.device), in_order.exp(forward)
    for t in reversed(range(kind.shape[1])):
        weights = chances[:, t].unsqueeze(1).expand(-1, len(uniform), -1)
        if t + 1 < kind.shape[1]:
            shares = _left(tables, kind, t + 1, words, forward).share(words[row, t + 1, path[:, :, t + 1]].transpose(0, 1))
            weights = torch.where(_part_mask(kind, t + 1).unsqueeze(2), shares, weights)
        place = _place(weights.contiguous(), uniform[:, :, t].mT.contiguous())
        path[:, :, t] = torch.where(_part_mask(kind, t), place, 0).mT
    return path


def masses(words: Tensor, unary: Tensor, others: Tensor, forward: Tensor, onward: Tensor, log_prob: Tensor, kind: Tensor) -> Tensor:
    """Log masses ``(N, T, C)`` of states, up to a constant of each step."""
    tables, out = pair_tables(log_prob), torch.empty(unary.shape, dtype=torch.float64, device=unary.device)
    for t in range(kind.shape[1]):
        mass = _left(tables, kind, t, others, forward).message(words[:, t], unary[:, t].double())
        if t + 1 < kind.shape[1]:
            right = _Members(tables, kind[:, t + 1], others[:, t + 1], onward[:, t + 1], is_left=False)
            added = mass + right.message(words[:, t], torch.zeros_like(mass))
            mass = torch.where(_part_mask(kind, t + 1), added, mass)
        out[:, t] = _replace_after_end(mass, _part_mask(kind, t))
    return out


def flips(
    words: Tensor, log_weight: Tensor, gain: Tensor, forward: Tensor, onward: Tensor, log_prob: Tensor, kind: Tensor, rows: slice, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.binary_chains.best_flips`."""
    tables, num_steps, num_latents = pair_tables(log_prob), kind.shape[1], log_prob.shape[1]
    row = torch.arange(rows.start, rows.stop, device=words.device)
    n, t = row // num_steps, row % num_steps
    k, after, is_first = kind[n, t], (t + 1).clamp(max=num_steps - 1), (t == 0).unsqueeze(1)
    following = torch.where(t + 1 < num_steps, kind[n, after], -1)
    # The step before the first has one member, the state zero.
    before, message = words[n, t - 1].masked_fill(is_first.unsqueeze(-1), 0), forward[n, t - 1]
    message = torch.where(is_first, torch.where(torch.arange(message.shape[1], device=words.device) == 0, 0.0, -torch.inf), message)
    states, chances = words[n, t, : gain.shape[1]], log_prob.double().exp()
    on = unpack_bits(states, num_latents, torch.bool)
    left = _Members(tables, k, before, message, is_left=True)
    ratio = _ratio(_expect(left.share(states), unpack_bits(before, num_latents, torch.float64)), chances[left.kind], on)
    right = _Members(tables, following, words[n, after], onward[n, after], is_left=False)
    ahead = _ratio(_expect(right.share(states), unpack_bits(right.words, num_latents, torch.float64)), chances[right.kind].mT, on)
    ratio = torch.where((following >= 0).view(-1, 1, 1), ratio * ahead, ratio)
    own = log_weight[n, t, : gain.shape[1]].unsqueeze(-1)
    is_possible = (ratio > 0) & (own > -torch.inf) & (k >= 0).view(-1, 1, 1)
    score = torch.where(is_possible, own + gain + in_order.log(ratio), -torch.inf)
    score = score.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).flatten(1)
    latent = torch.arange(num_latents, device=words.device)
    bit = torch.where(latent // 64 == torch.arange(words.shape[-1], device=words.device).unsqueeze(-1), 1 << (latent % 64), 0).mT
    flipped = (words[n, t, : gain.shape[1]].unsqueeze(2) ^ bit).flatten(1, 2)
    score, order = score.sort(dim=1, descending=True, stable=True)
    ordered = gather_states(flipped, order)
    is_member = (ordered.unsqueeze(2) == words[n, t].unsqueeze(1)).all(-1) & (log_weight[n, t] > -torch.inf).unsqueeze(1)
    is_old = is_member.any(-1) | find_duplicates(ordered)
    score, place = score.masked_fill(is_old, -torch.inf).topk(min(size, score.shape[1]), dim=1)
    chosen = order.gather(1, place)
    missing = (0, size - score.shape[1])
    score, chosen = torch.nn.functional.pad(score, missing, value=-torch.inf), torch.nn.functional.pad(chosen, missing)
    chosen = chosen.masked_fill(score == -torch.inf, 0)
    return chosen // num_latents, chosen % num_latents, score


def _ratio(on: Tensor, chances: Tensor, value: Tensor) -> Tensor:
    """By how much sums grow where a latent's value changes."""

    def flip_ratio(share: Tensor, row: Tensor) -> Tensor:
        off, on = row.unsqueeze(1).unbind(-1)
        new, old = torch.where(value, off, on), torch.where(value, on, off)
        return torch.where(old > 0, share * new / old, 0.0)

    return flip_ratio(1.0 - on, chances[..., 0, :]) + flip_ratio(on, chances[..., 1, :])


def _filter_blocks(unary: Tensor, log_prob: Tensor, kind: Tensor, block: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """Likelihoods, chances, and the posterior of each step given those before."""
    likelihood, chances = likelihoods(unary)[0], log_prob.double().exp()
    tables = [chances[kind[:, t].clamp(min=0).unsqueeze(1), block] for t in range(kind.shape[1])]
    vector, filtered = torch.zeros_like(likelihood[:, 0]), torch.zeros_like(likelihood)
    vector[:, 0] = 1.0
    for t, table in enumerate(tables):
        vector = _times(_step(vector, table), likelihood[:, t])
        filtered[:, t] = torch.where(_part_mask(kind, t), vector, 0.0)
    return likelihood, tables, filtered


def _times(vector: Tensor, likelihood: Tensor) -> Tensor:
    """The normalised product of a vector and likelihoods, or these alone."""
    product = vector * likelihood
    for instead in (likelihood, torch.ones_like(product)):
        total = _sum(product).unsqueeze(1)
        product = torch.where(total > 0, product, instead)
    return product * (1.0 / _sum(product).unsqueeze(1))


def block_posteriors(unary: Tensor, log_prob: Tensor, kind: Tensor, block: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.binary_chains.block_posteriors`."""
    likelihood, tables, out = _filter_blocks(unary, log_prob, kind, block)
    vector = torch.full_like(out[:, 0], 1 / unary.shape[2])
    for t in reversed(range(kind.shape[1])):
        if t + 1 < kind.shape[1]:
            moved = _step(_times(vector, likelihood[:, t + 1]), tables[t + 1].mT)
            vector = torch.where(_part_mask(kind, t + 1), moved, vector)
        out[:, t] *= vector
    return (out / out.sum(-1, keepdim=True)).log().nan_to_num(nan=-torch.inf)


def draw_blocks(unary: Tensor, log_prob: Tensor, kind: Tensor, block: Tensor, uniform: Tensor) -> Tensor:
    """See :func:`pyro_truncated.ops.binary_chains.draw_blocks`."""
    _, tables, filtered = _filter_blocks(unary, log_prob, kind, block)
    out = torch.zeros_like(kind)
    for t in reversed(range(kind.shape[1])):
        weight = filtered[:, t]
        if t + 1 < kind.shape[1]:
            # The chance of the configuration after this one, by doubling.
            chance = torch.ones_like(weight[:, :1])
            for i in range(block.shape[1]):
                off, on = tables[t + 1][:, i].gather(2, (out[:, t + 1] >> i & 1).view(-1, 1, 1).expand(-1, 2, 1)).unbind(1)
                chance = torch.cat([chance * off, chance * on], 1)
            weight = torch.where(_part_mask(kind, t + 1), weight * chance, weight)
        out[:, t] = torch.where(kind[:, t] >= 0, _place(weight.contiguous(), uniform[:, t]), 0)
    return out
