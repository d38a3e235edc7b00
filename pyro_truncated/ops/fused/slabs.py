"""Spike-and-slab likelihoods and moments, a state's active latents in registers."""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyro_truncated.ops.backend import NoKernelError
from pyro_truncated.ops.fused.bits import any_bits, lowest_bit, on_device
from pyro_truncated.ops.slabs import SlabTerms
from pyro_truncated.ops.vectorised.latent_values import gram_matrix, sort_by_number

# Of a matrix of active latents; larger ones do not fit registers.
_PLACES = [4, 8, 16, 32, 64]


@on_device
def log_prob(words: Tensor, terms: SlabTerms) -> Tensor:
    """Log densities ``(N, C)``, up to constants, with slabs integrated out."""
    launches = _plan(words)
    out = torch.empty(words.shape[:2], dtype=torch.float64, device=words.device)
    parameters = _parameters(words, terms)
    for launch in launches:
        _log_prob[launch.grid](launch.order, len(launch.order), *parameters, out, **launch.constants)
    return out


@on_device
def moments(words: Tensor, weights: Tensor, terms: SlabTerms, per_datum: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.slab_moments`."""
    launches = _plan(words)
    # The order of atomic sums changes from run to run.
    if torch.are_deterministic_algorithms_enabled():
        raise NoKernelError
    num_data, num_latents = terms.linear.shape
    active, first = torch.zeros(2, num_data, num_latents, dtype=torch.float64, device=words.device)
    second = active.new_zeros(num_data if per_datum else 1, num_latents, num_latents)
    parameters = _parameters(words, terms)
    results = weights.double().contiguous(), active, first, second, second.stride(0) if per_datum else 0
    for launch in launches:
        _moments[launch.grid](launch.order, len(launch.order), *parameters, *results, **launch.constants)
    return active, first, second if per_datum else second[0]


@dataclasses.dataclass(frozen=True)
class _Launch:
    """A launch, on states that fit matrices of one size."""

    order: Tensor  # their positions in the flattened (N, C)
    places: int  # rows of the matrices

    @property
    def constants(self) -> dict[str, int]:
        return {"STATES": max(1, 1024 // self.places**2), "PLACES": self.places, "num_warps": max(1, self.places**2 // 1024)}

    @property
    def grid(self) -> tuple[int]:
        return (triton.cdiv(len(self.order), self.constants["STATES"]),)


def _plan(words: Tensor) -> list[_Launch]:
    """The launches; no state may have too many active latents."""
    launches = [_Launch(order, places) for places, order in sort_by_number(words, [*_PLACES, 64 * words.shape[2]])]
    if launches and launches[-1].places > _PLACES[-1]:
        raise NoKernelError
    return launches


def _parameters(words: Tensor, terms: SlabTerms) -> tuple[Tensor | int, ...]:
    """The arguments that all kernels begin with."""
    gram = gram_matrix(terms.elements, terms.is_observed)
    parameters = (tensor.contiguous() for tensor in (terms.linear, terms.mean, terms.spread, gram))
    return words, *words.stride(), *words.shape[1:], terms.linear.shape[1], *parameters, 0 if len(gram) == 1 else gram.stride(0)


@triton.jit
def _log_prob(
    order,
    number,
    words,
    by_datum,
    by_candidate,
    by_word,
    num_candidates,
    num_words,
    num_latents,
    linear,
    mean,
    deviation,
    gram,
    gram_by_datum,
    out,
    STATES: tl.constexpr,
    PLACES: tl.constexpr,
):
    state, datum, inside = _find_states(order, number, num_candidates, STATES)
    words += datum * by_datum + (state - datum * num_candidates) * by_candidate
    latents, count = _find_active(words, by_word, num_words, inside, STATES, PLACES)
    is_active = tl.arange(0, PLACES)[None, :] < count[:, None]
    linear += datum[:, None] * num_latents
    gram += (datum * gram_by_datum)[:, None, None]
    amplitude, spread, product, field, matrix = _load_active(latents, is_active, linear, mean, deviation, gram, num_latents, PLACES)
    energy = 0.5 * tl.sum(amplitude * (product + field), 1)
    target = spread * field
    # The matrix is factorised in its place, one column after the other, and the target solved for on the way.
    for j in range(tl.max(count, 0)):
        column, pivot, value = _pivot(matrix, target, j, PLACES)
        energy += 0.5 * (value * value / pivot - tl.log(pivot))
        ratio = column / pivot[:, None]
        matrix -= ratio[:, :, None] * column[:, None, :]
        target -= ratio * value[:, None]
    tl.store(out + state, energy, inside)


@triton.jit
def _moments(
    order,
    number,
    words,
    by_datum,
    by_candidate,
    by_word,
    num_candidates,
    num_words,
    num_latents,
    linear,
    mean,
    deviation,
    gram,
    gram_by_datum,
    weights,
    active,
    first,
    second,
    second_by_datum,
    STATES: tl.constexpr,
    PLACES: tl.constexpr,
):
    state, datum, inside = _find_states(order, number, num_candidates, STATES)
    words += datum * by_datum + (state - datum * num_candidates) * by_candidate
    latents, count = _find_active(words, by_word, num_words, inside, STATES, PLACES)
    place = tl.arange(0, PLACES)
    is_active = place[None, :] < count[:, None]
    linear += datum[:, None] * num_latents
    gram += (datum * gram_by_datum)[:, None, None]
    amplitude, spread, _, field, matrix = _load_active(latents, is_active, linear, mean, deviation, gram, num_latents, PLACES)
    target = spread * field
    # Sweeps turn the matrix to its inverse in its place, and the target to the solution (Goodnight 1979).
    for j in range(tl.max(count, 0)):
        column, pivot, value = _pivot(matrix, target, j, PLACES)
        is_here = (place == j)[None, :]
        ratio = column / pivot[:, None]
        swept = matrix - ratio[:, :, None] * column[:, None, :]
        swept = tl.where(is_here[:, None, :], ratio[:, :, None], swept)
        swept = tl.where(is_here[:, :, None], ratio[:, None, :], swept)
        matrix = tl.where(is_here[:, None, :] & is_here[:, :, None], -1 / pivot[:, None, None], swept)
        target = tl.where(is_here, value[:, None] / pivot[:, None], target - ratio * value[:, None])
    weight = tl.load(weights + state, inside, 0.0)
    mean_active = amplitude + spread * target
    moment = mean_active[:, :, None] * mean_active[:, None, :] - spread[:, :, None] * matrix * spread[:, None, :]
    row = datum[:, None] * num_latents + latents
    tl.atomic_add(active + row, weight[:, None] + tl.zeros([STATES, PLACES], tl.float64), is_active, sem="relaxed")
    tl.atomic_add(first + row, weight[:, None] * mean_active, is_active, sem="relaxed")
    pairs = (datum * second_by_datum)[:, None, None] + latents[:, :, None] * num_latents + latents[:, None, :]
    tl.atomic_add(second + pairs, weight[:, None, None] * moment, is_active[:, :, None] & is_active[:, None, :], sem="relaxed")


@triton.jit
def _find_states(order, number, num_candidates, STATES: tl.constexpr):
    """This program's states, their data points, and which there are."""
    rank = tl.program_id(0).to(tl.int64) * STATES + tl.arange(0, STATES)
    inside = rank < number
    state = tl.load(order + rank, inside, 0)
    return state, state // num_candidates, inside


@triton.jit
def _find_active(words, by_word, num_words, inside, STATES: tl.constexpr, PLACES: tl.constexpr):
    """Active latents of states, and how many there are."""
    place = tl.arange(0, PLACES)
    latents = tl.zeros([STATES, PLACES], tl.int64)
    count = tl.zeros([STATES], tl.int32)
    for i in range(num_words):
        rest = tl.load(words + i * by_word, inside, 0)
        while any_bits(rest):
            is_on = rest != 0
            is_here = is_on[:, None] & (count[:, None] == place[None, :])
            latents = tl.where(is_here, (64 * i + lowest_bit(rest))[:, None], latents)
            count += is_on.to(tl.int32)
            rest = rest & (rest - 1)
    return latents, count


@triton.jit
def _load_active(latents, is_active, linear, mean, deviation, gram, num_latents, PLACES: tl.constexpr):
    """See :func:`pyro_truncated.ops.slabs.collapse`, of active latents."""
    place = tl.arange(0, PLACES)
    amplitude = tl.load(mean + latents, is_active, 0.0)
    spread = tl.load(deviation + latents, is_active, 0.0)
    product = tl.load(linear + latents, is_active, 0.0)
    pairs = gram + latents[:, :, None] * num_latents + latents[:, None, :]
    matrix = tl.load(pairs, is_active[:, :, None] & is_active[:, None, :], 0.0)
    field = product - tl.sum(matrix * amplitude[:, None, :], 2)
    identity = (place[:, None] == place[None, :])[None, :, :].to(tl.float64)
    return amplitude, spread, product, field, spread[:, :, None] * matrix * spread[:, None, :] + identity


@triton.jit
def _pivot(matrix, target, j, PLACES: tl.constexpr):
    """Column ``j``, its entry on the diagonal, and that of the target."""
    is_here = (tl.arange(0, PLACES) == j)[None, :]
    column = tl.sum(tl.where(is_here[:, None, :], matrix, 0.0), 2)
    return column, tl.sum(tl.where(is_here, column, 0.0), 1), tl.sum(tl.where(is_here, target, 0.0), 1)
