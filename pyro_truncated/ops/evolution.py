"""Populations of packed states: start, genetic operators, selection.

They are those of Guiraud, Drefs & Lücke (2018), "Evolutionary Expectation Maximization", section 3 and appendix D, extended to latents of
more than two values. Random numbers are keyed by a data point's position among all data (``rows``) and a seed, so results depend neither on
the batch nor on the device.

Functions take packed states ``words (N, C, W)`` and ``fields``, where their latents lie. Those that draw take ``rows (N,)``, by default ``0
.. N - 1``, and a ``generator``. Shapes that do not fit raise ``ValueError``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend
from pyro_truncated.ops.packed_states import Fields, check_words, enumerate_states, single_states, unpack
from pyro_truncated.ops.streams import Source, draw_seed, positions

# Weights of parents that are drawn only when no fitter one is left, in units of the largest fitness: far below what rounding can see.
UNFIT, IMPOSSIBLE = 1e-100, 1e-200


class SparseFlips(NamedTuple):
    """What decides on flips."""

    log_stay_off: Tensor  # log probability that an idle binary latent stays so, for every number of active ones, (H + 1,) float64
    switch_off: Tensor  # probability that an active binary latent is switched off, in units of 2**-32, (H + 1,) int64
    log_stay_other: float  # log probability that a latent of several values keeps its value
    num_on: int  # random numbers for switching on, one for each latent that is met
    num_other: int  # pairs of random numbers for moving latents of several values


def sparse_flips(switch_on: Tensor, switch_off: Tensor, rate: float, num_several: int) -> SparseFlips:
    """Tables of switching probabilities ``(H + 1,)``, and a rate for other latents."""
    num_binary = len(switch_on) - 1
    stay_other = -math.inf if rate == 1 else math.log1p(-rate)
    numbers = most_flips(num_binary, float(switch_on.max())), most_flips(num_several, rate)
    return SparseFlips(torch.log1p(-switch_on), (switch_off * 2.0**32).round().long(), stay_other, *numbers)


def most_flips(number: int, probability: float) -> int:
    r"""A number of successes exceeded with probability below 1e-18.

    By Chernoff, :math:`P(X \ge x) \le \exp(-x \log(x / \mu) + x - \mu)` for a sum of mean :math:`\mu < x`.
    """
    mean = number * probability
    if mean == 0:
        return 0
    # Of a number of flips that is exceeded less often than this, the rest is cut off.
    exceeds = (x for x in range(math.ceil(mean), number) if x > mean and x * math.log(x / mean) - x + mean > -math.log(1e-18))
    return next(exceeds, number)


def find_duplicates(words: Tensor) -> Tensor:
    """Which states of each data point equal an earlier one, Booleans ``(N, C)``."""
    check_words("words", words)
    return backend("evolution", words).find_duplicates(words)


def select_top(words_a: Tensor, log_joint_a: Tensor, words_b: Tensor, log_joint_b: Tensor, size: int) -> tuple[Tensor, Tensor]:
    r"""Returns each data point's best ``size`` distinct states of two sets.

    A state that occurs more than once has the log joint of its first occurrence. So :math:`\log\sum_s p(s, y_n)` never falls below that of
    the best ``size`` states of ``a``. Costs expected :math:`O(S + C)` per data point on the CPU.

    The states ``words_a (N, S, W)`` are distinct within each data point, those of ``words_b (N, C, W)`` may repeat each other and them. Of
    log joints ``-inf`` is legal, NaN is not. Returns states ``(N, size, W)`` and log joints ``(N, size)`` in their original order, those of
    ``a`` first. Among states of equal log joint the earlier ones are kept. A data point with fewer than ``size`` distinct states is an
    error.
    """
    _check_pair(words_a, log_joint_a, words_b, log_joint_b, size)
    dtype = torch.promote_types(log_joint_a.dtype, log_joint_b.dtype)
    log_joint_a, log_joint_b = log_joint_a.detach().to(dtype), log_joint_b.detach().to(dtype)
    words, log_joint, fewest = backend("evolution", words_a).select_top(words_a, log_joint_a, words_b, log_joint_b, size)
    if fewest >= 0:
        raise ValueError(f"cannot keep {size} distinct states: a data point has only {fewest} among its states and candidates")
    return words, log_joint


def _check_pair(words_a: Tensor, log_joint_a: Tensor, words_b: Tensor, log_joint_b: Tensor, size: int) -> None:
    check_words("words_a", words_a)
    check_words("words_b", words_b)
    if words_a.shape[0] != words_b.shape[0] or words_a.shape[2] != words_b.shape[2]:
        raise ValueError(
            "words_a and words_b must agree in the number of data points and of words; "
            f"got shapes {tuple(words_a.shape)} and {tuple(words_b.shape)}"
        )
    for name, words, log_joint in (("a", words_a, log_joint_a), ("b", words_b, log_joint_b)):
        if log_joint.shape != words.shape[:2]:
            raise ValueError(f"log_joint_{name} must have the shape {tuple(words.shape[:2])} of its states; got {tuple(log_joint.shape)}")
    if size < 1:
        raise ValueError(f"size must be a positive number of states; got {size}")


def select_parents(
    log_joint: Tensor, num_parents: int, *, by_fitness: bool = True, rows: Tensor | None = None, generator: Source = None
) -> Tensor:
    r"""Draws distinct parents for every data point, by fitness or uniformly.

    The fitness of a state among the :math:`S` states of its data point is

    .. math:: F(s) = (\log p(s, y_n) - m_n) + |m_n|, \qquad m_n = \min_{s'} \log p(s', y_n),

    which for :math:`m_n < 0` is equation (7) of the paper, :math:`\log p - 2 m_n`, and is never negative. Parents are drawn in turn, each
    in proportion to the fitness of those that are left; states of fitness zero follow last, after them states of probability zero. Without
    ``by_fitness`` possible states are drawn uniformly. Returns positions ``(N, P)`` int64, distinct within a row.
    """
    if log_joint.dim() != 2 or not 1 <= num_parents <= log_joint.shape[1]:
        raise ValueError(f"cannot draw {num_parents} distinct parents from log joints of shape {tuple(log_joint.shape)}, expected (N, S)")
    keys = positions(rows, len(log_joint), log_joint.device), draw_seed(generator)
    return backend("evolution", log_joint).select_parents(log_joint, num_parents, by_fitness, *keys)


def cross(parents: Tensor, fields: Fields, *, rows: Tensor | None = None, generator: Source = None) -> Tensor:
    r"""Single-point crossover of all pairs of parents: both offspring of each pair.

    A pair draws a cut :math:`c` uniformly from :math:`1 .. L - 1` and swaps its latents :math:`c, .., L - 1`. Returns children ``(N, P (P -
    1), W)``.
    """
    check_words("parents", parents)
    if fields.num_latents < 2 or parents.shape[1] < 2:
        raise ValueError(f"crossover needs at least two latents and two parents; got {fields.num_latents} and {parents.shape[1]}")
    keys = positions(rows, len(parents), parents.device), draw_seed(generator)
    return backend("evolution", parents).cross(parents, fields, *keys)


def flip_random(words: Tensor, fields: Fields, *, rows: Tensor | None = None, generator: Source = None) -> Tensor:
    """Moves one uniformly chosen latent of every state to another value."""
    _check_mutable(words, fields)
    keys = positions(rows, len(words), words.device), draw_seed(generator)
    flipped: Tensor = backend("evolution", words).flip_random(words, fields, *keys)
    return flipped


def sparse_flip_probabilities(num_latents: int, target_activity: float, flip_probability: float) -> tuple[Tensor, Tensor]:
    r"""Returns switching probabilities such that the mean activity becomes ``target_activity``.

    With :math:`k` of :math:`H` binary latents active, :math:`d = \tilde s - k` to go, and :math:`m = H p_{bf}` flips wanted on average, the
    conditions of appendix D of the paper,

    .. math:: (H - k)\,p_0 + k\,p_1 = m, \qquad (H - k)\,p_0 - k\,p_1 = d,

    have the solution :math:`(H - k)\,p_0 = (m + d)/2`, :math:`k\,p_1 = (m - d)/2`. A target further away than :math:`m` flips reach gets
    :math:`m` flips, all towards it. Otherwise the activity becomes the target, if need be with fewer than :math:`m` flips: at :math:`k =
    0`, :math:`H p_0 = \tilde s`.

    Args:
        num_latents: number of binary latents :math:`H`.
        target_activity: wanted number of active latents :math:`\tilde s`.
        flip_probability: mean probability :math:`p_{bf}` of a flip.

    Returns:
        :math:`p_0` and :math:`p_1` for every activity :math:`k = 0 .. H`, both ``(H + 1,)`` float64.
    """
    active = torch.arange(num_latents + 1, dtype=torch.double, device="cpu")
    idle = num_latents - active
    flips = torch.full_like(active, num_latents * flip_probability)
    change = (target_activity - active).maximum(-torch.minimum(flips, active)).minimum(torch.minimum(flips, idle))
    raised = ((flips + change) / 2).minimum(torch.minimum(idle, active + change))
    lowered = raised - change
    return (raised / idle.clamp(min=1)).clamp(0, 1), (lowered / active.clamp(min=1)).clamp(0, 1)


def flip_sparse(
    words: Tensor, fields: Fields, target_activity: float, flip_probability: float, *, rows: Tensor | None = None, generator: Source = None
) -> Tensor:
    """Sparsity-driven flips: binary latents change independently with the probabilities of :func:`sparse_flip_probabilities`.

    A latent of more than two values moves to another of them, chosen uniformly, with probability ``flip_probability``. In a state that
    would stay unchanged one uniformly chosen latent changes as in :func:`flip_random`. ``target_activity`` is the wanted mean number of
    active latents.
    """
    _check_mutable(words, fields)
    if not 0 < flip_probability <= 1:
        raise ValueError(f"flip_probability must lie in (0, 1]; got {flip_probability}")
    chances = sparse_flip_probabilities(len(fields.binary), target_activity, flip_probability)
    keys = positions(rows, len(words), words.device), draw_seed(generator)
    flips = sparse_flips(*chances, flip_probability, len(fields.several))
    return backend("evolution", words).flip_sparse(words, fields, flips, *keys)


def _check_mutable(words: Tensor, fields: Fields) -> None:
    check_words("words", words)
    if not len(fields.mutable):
        raise ValueError("a space of a single state has nothing to mutate")


def initial_states(fields: Fields, num_data: int, num_states: int, generator: Source = None, *, rows: Tensor | None = None) -> Tensor:
    """Distinct initial states ``(N, S, W)``, see :func:`pyro_truncated.states.population.initial_population`."""
    if not 1 <= num_states <= fields.size:
        raise ValueError(f"num_states must be at least 1 and at most the number of states in the space, {fields.size}; got {num_states}")
    keys = positions(rows, num_data, torch.device("cpu")), draw_seed(generator)
    _, _, singletons = single_states(fields)
    others = singletons[:0]
    # So small a space is enumerated.
    if fields.size <= max(4096, 4 * num_states):
        everything = enumerate_states(fields, "cpu")
        others = everything[(unpack(everything, fields, torch.int64) != 0).sum(-1) > 1]
    if num_states == fields.size:
        return torch.cat([singletons.new_zeros(1, fields.num_words), singletons, others]).repeat(num_data, 1, 1)
    return backend("evolution", singletons).initial_states(singletons, others, fields, num_states, *keys)
