"""The functions of :mod:`pyro_truncated.ops.evolution` in plain torch."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from pyro_truncated.ops.evolution import IMPOSSIBLE, UNFIT, SparseFlips
from pyro_truncated.ops.packed_states import Fields, gather_states
from pyro_truncated.ops.vectorised import random


def find_duplicates(words: Tensor) -> Tensor:
    """Marks the states ``(N, C)`` that equal an earlier state of their row."""
    order = torch.arange(words.shape[1], device=words.device).expand(words.shape[:2])
    # Stable sorts by one word after the other leave equal states side by side, the earliest first.
    for number, word in enumerate(words.unbind(-1)):
        order = word.argsort(dim=1, stable=True) if number == 0 else order.gather(1, word.gather(1, order).argsort(dim=1, stable=True))
    ordered = gather_states(words, order)
    equal = torch.zeros_like(order, dtype=torch.bool)
    equal[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]).all(-1)
    return torch.empty_like(equal).scatter_(1, order, equal)


def select_top(words: Tensor, log_joint: Tensor, extra_words: Tensor, extra_log_joint: Tensor, size: int) -> tuple[Tensor, Tensor, int]:
    """The best ``size`` distinct states, and a row's too small number or -1."""
    are_enough = size <= words.shape[1]
    words = torch.cat([words, extra_words], 1)
    log_joint = torch.cat([log_joint, extra_log_joint], 1)
    surplus = find_duplicates(words)
    # The states of the first set are distinct.
    fewest = size if are_enough or not len(words) else int((~surplus).sum(1).min())
    if fewest < size:
        return words[:, :0], log_joint[:, :0], fewest
    # Only repetitions stay at minus infinity, behind distinct states of probability zero.
    lowest = torch.finfo(log_joint.dtype).min
    key = log_joint.clamp(min=lowest).masked_fill(surplus, -math.inf)
    chosen = key.argsort(dim=1, descending=True, stable=True)[:, :size].sort(dim=1).values
    return gather_states(words, chosen), log_joint.gather(1, chosen), -1


def select_parents(log_joint: Tensor, num_parents: int, by_fitness: bool, rows: Tensor, seed: int) -> Tensor:
    """Successive draws without replacement, all data points at once."""
    uniform = 1 - random.uniform(random.draw_words(seed, rows, num_parents))
    weights, chosen = _fitness(log_joint.double(), by_fitness), []
    for threshold in uniform.split(1, 1):
        running = weights.cumsum(1)
        chosen.append(torch.searchsorted(running, threshold * running[:, -1:]))
        weights.scatter_(1, chosen[-1], 0.0)
    return torch.cat(chosen, 1)


def _fitness(log_joint: Tensor, by_fitness: bool) -> Tensor:
    """Selection weights: the offset fitness, or one."""
    possible = log_joint > -math.inf
    if not by_fitness:
        return torch.ones_like(log_joint).masked_fill_(~possible, IMPOSSIBLE)
    lowest = torch.where(possible, log_joint, math.inf).amin(1, keepdim=True)
    fitness = (log_joint - lowest) + lowest.abs()
    scale = fitness.amax(1, keepdim=True)
    scale = torch.where((scale > 0) & (scale < math.inf), scale, 1.0)
    return torch.where(possible, torch.where(fitness > 0, fitness, scale * UNFIT), scale * IMPOSSIBLE)


def cross(parents: Tensor, fields: Fields, rows: Tensor, seed: int) -> Tensor:
    """Both offspring of every pair of parents, pair after pair."""
    device = parents.device
    num_parents = parents.shape[1]
    first, second = _pairs(num_parents, device)
    draws = random.draw_words(seed, rows, len(first))
    # What lies below the field of the first latent that is swapped stays.
    swapped = (parents[:, first] ^ parents[:, second]) & fields.on(device, "tails")[random.below(draws, fields.num_latents - 1)]
    return torch.stack([parents[:, first] ^ swapped, parents[:, second] ^ swapped], 2).flatten(1, 2)


@functools.lru_cache(maxsize=16)
def _pairs(number: int, device: torch.device) -> Tensor:
    """Positions of the two members of every pair, ``(2, number of pairs)``."""
    return torch.triu_indices(number, number, 1, device=device)


def flip_random(words: Tensor, fields: Fields, rows: Tensor, seed: int) -> Tensor:
    """Changes one latent of every state."""
    draws = random.draw_words(seed, rows, 2 * words.shape[1])
    return words ^ change_latent(words, fields, draws.view(*words.shape[:2], 2))


def flip_sparse(words: Tensor, fields: Fields, flips: SparseFlips, rows: Tensor, seed: int) -> Tensor:
    """Sparsity-driven flips, in blocks of data points."""
    out = torch.empty_like(words, memory_format=torch.contiguous_format)
    first = flips.num_on + 2 * flips.num_other + 2
    # Every state has this many random words, of which those for bits behind the last latent are not needed.
    size, num_off = first + 32 * fields.num_words, -(-fields.num_bits // 2)
    streams = random.stream(seed, rows)
    for block in random.blocks(streams, words.shape[1] * (first + num_off)):
        own = random.strides(streams[block], words.shape[1], size)
        out[block] = _flip_sparse(words[block], fields, flips, random.numbers(own, first + num_off))
    return out


def _flip_sparse(words: Tensor, fields: Fields, flips: SparseFlips, draws: Tensor) -> Tensor:
    """Flips in states ``(n, C, W)`` by random words ``(n, C, .)``."""
    device = words.device
    on, moves, change, off = draws.split([flips.num_on, 2 * flips.num_other, 2, -(-fields.num_bits // 2)], -1)
    bits = fields.on(device, "binary_bits")
    active = (words & bits).view(torch.uint8).long()
    active = _ones(device)[active].sum(-1)
    changed = torch.zeros_like(words)
    if flips.num_on:
        changed = _switch_on(words, fields, flips.log_stay_off.to(device, non_blocking=True)[active], on)
    if len(fields.binary):
        halves = off.contiguous().view(torch.int32)
        # The halves of words are signed here, so they are compared with thresholds moved down by half of their range.
        threshold = flips.switch_off.to(device, non_blocking=True)[active].unsqueeze(-1) - 2**31
        below = torch.nn.functional.pad((halves ^ -(2**31)) < threshold, (0, 64 * fields.num_words - halves.shape[-1]))
        changed = changed | (_pack(below) & words & bits)
    if flips.num_other:
        changed = changed | _move(words, fields, flips.log_stay_other, moves)
    same = (changed == 0).all(-1, keepdim=True)
    return words ^ torch.where(same, change_latent(words, fields, change), changed)


@functools.cache
def _ones(device: torch.device) -> Tensor:
    """How many bits of a byte are set, for all bytes."""
    # To look it up takes fewer launches than to count pairs, fours and so on.
    return torch.tensor([byte.bit_count() for byte in range(256)], device=device)


def _pack(bits: Tensor) -> Tensor:
    """Words ``(..., W)`` of bits ``(..., 64 W)``."""
    octets: Tensor = (bits.unflatten(-1, (-1, 8)) * _powers(bits.device)).sum(-1, dtype=torch.uint8)
    return octets.view(torch.int64)


@functools.cache
def _powers(device: torch.device) -> Tensor:
    return (1 << torch.arange(8, device=device)).to(torch.uint8)


def _gaps(draws: Tensor, log_stay: Tensor, number: int) -> Tensor:
    """Positions ``(..., J)`` of changes with geometric gaps."""
    gap = (-random.uniform(draws)).log1p() / log_stay
    gap = torch.where(log_stay < 0, gap, number).clamp(max=number)
    return (gap.long() + 1).cumsum(-1) - 1


def _switch_on(words: Tensor, fields: Fields, log_stay: Tensor, draws: Tensor) -> Tensor:
    """Bits ``(n, C, W)`` of idle binary latents, each with probability ``1 - exp(log_stay)``, ``(n, C)``."""
    word, shift, _ = fields.on(words.device, "rows of binary")
    place = _gaps(draws, log_stay.unsqueeze(-1), len(word))
    inside, place = place < len(word), place.clamp(max=len(word) - 1)
    bit = inside.long() << shift[place]
    word = word[place]
    return torch.zeros_like(words).scatter_add_(-1, word, bit & ~words.gather(-1, word))


def _move(words: Tensor, fields: Fields, log_stay: float, draws: Tensor) -> Tensor:
    """Bits ``(n, C, W)`` that move latents of several values, each with probability ``1 - exp(log_stay)``."""
    number = len(fields.several)
    gap, value = draws.unflatten(-1, (-1, 2)).unbind(-1)
    place = _gaps(gap, torch.tensor(log_stay, dtype=torch.double, device=words.device), number)
    inside, place = place < number, place.clamp(max=number - 1)
    word, bits = _moves(words, fields, "several", place, value)
    return torch.zeros_like(words).scatter_add_(-1, word, bits.masked_fill(~inside, 0))


def change_latent(words: Tensor, fields: Fields, draws: Tensor) -> Tensor:
    """Bits ``(n, C, W)`` that move one latent, by two random words each."""
    latent, value = draws.split(1, -1)
    word, bits = _moves(words, fields, "mutable", random.below(latent, len(fields.mutable)), value)
    return torch.zeros_like(words).scatter_(-1, word, bits)


def _moves(words: Tensor, fields: Fields, kind: str, place: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Words and bits ``(n, C, J)`` that move latents to other values."""
    word, shift, cardinality = fields.on(words.device, f"rows of {kind}")[:, place]
    if fields.is_binary:
        return word, torch.ones_like(shift) << shift
    mask = fields.on(words.device, f"masks of {kind}")[place]
    old = (words.gather(-1, word) >> shift) & mask
    new = (old + 1 + random.below(draws, cardinality - 1)) % cardinality
    return word, (old ^ new) << shift


def initial_states(singletons: Tensor, others: Tensor, fields: Fields, num_states: int, rows: Tensor, seed: int) -> Tensor:
    """See :func:`pyro_truncated.ops.initial_states`."""
    streams = random.stream(seed, rows)
    num_singletons = min(len(singletons), num_states - 1)
    num_others = num_states - 1 - num_singletons
    first = [singletons.new_zeros(len(rows), 1, fields.num_words), _subsets(singletons, num_singletons, streams)]
    if num_singletons < len(singletons):
        streams = random.advance(streams, num_singletons)
    if len(others):
        return torch.cat([*first, _subsets(others, num_others, streams)], 1)
    return _add_sparse(torch.cat(first, 1), num_others, fields, streams)


def _subsets(choices: Tensor, size: int, streams: Tensor) -> Tensor:
    """Random distinct rows of ``choices``, ``(N, size, W)``, or all in order."""
    if size == len(choices):
        return choices.expand(len(streams), -1, -1)
    draws, order = random.numbers(streams, size), torch.arange(len(choices), device="cpu").repeat(len(streams), 1)
    for i in range(size):
        random.shuffle_step(order, i, draws[:, i : i + 1])
    return choices[order[:, :size]]


def _add_sparse(words: Tensor, number: int, fields: Fields, streams: Tensor) -> Tensor:
    """Adds new states with two and a Poisson number more changes."""
    num_data, num_first, num_words = words.shape
    streams = streams.unsqueeze(1) + random.STEP
    walks = random.mix(streams + torch.arange(num_first, num_first + number, device="cpu") * random.STEP)
    steps = 2 + _poisson(random.uniform(random.mix(walks + random.STEP)), 2 * random.uniform(random.mix(streams)))
    words = torch.cat([words, words.new_zeros(num_data, number, num_words)], 1)
    new = words[:, num_first:]
    for step in range(int(steps.max()) if steps.numel() else 0):
        _walk(new, fields, walks, torch.full_like(steps, step), step < steps)
    # A random walk leaves the region of states that are taken, however crowded it is.
    while bool((surplus := find_duplicates(words)[:, num_first:]).any()):
        _walk(new, fields, walks, steps, surplus)
        steps += surplus
    return words


def _poisson(uniform: Tensor, mean: Tensor) -> Tensor:
    """Poisson numbers by inversion, for means up to 2."""
    probability = (-mean).exp()
    cumulative, count = probability, torch.zeros(uniform.shape, dtype=torch.int64, device="cpu")
    # More are less likely than 1e-20.
    for number in range(1, 25):
        count += uniform >= cumulative
        probability = probability * (mean / number)
        cumulative = cumulative + probability
    return count


def _walk(words: Tensor, fields: Fields, walks: Tensor, step: Tensor, moves: Tensor) -> None:
    """Lets some states ``(N, C, W)`` make a step of their walks."""
    state = walks + (2 * step + 2) * random.STEP
    draws = random.mix(torch.stack([state, state + random.STEP], -1))
    words ^= torch.where(moves.unsqueeze(-1), change_latent(words, fields, draws), 0)
