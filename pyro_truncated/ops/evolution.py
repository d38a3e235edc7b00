"""Genetic operators on packed states: selection of parents, crossover and mutation.

They are those of Guiraud, Drefs & Lücke (2018), "Evolutionary Expectation Maximization", section 3 and appendix D, extended to
latents of more than two values. All of them treat every data point on its own, so what happens to a data point does not depend on
the batch it is in, and draw from torch's global generator or from the one they are given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_truncated.ops.compiled import evolution as evolution_cpu
from pyro_truncated.ops.selection import check_words, uses_kernels
from pyro_truncated.ops.vectorised import evolution as evolution_dense

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pyro_truncated.states.space import StateSpace


def draw_seed(generator: torch.Generator | None = None) -> int:
    """A random 63-bit integer from the generator (default: torch's global one) that seeds the stream of one operator call."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**63 - 1, (), generator=generator, device=device))


def select_parents(log_joint: Tensor, num_parents: int, *, by_fitness: bool = True, generator: torch.Generator | None = None) -> Tensor:
    r"""Draws distinct parents for every data point, with probability proportional to fitness or uniformly.

    The fitness of a state among the :math:`S` states of its data point is

    .. math:: F(s) = (\log p(s, y_n) - m_n) + |m_n|, \qquad m_n = \min_{s'} \log p(s', y_n),

    which for :math:`m_n < 0` is equation (7) of the paper, :math:`\log p - 2 m_n`, and is never negative. Parents are drawn one
    after the other, each in proportion to the fitness of those that are left. States of fitness zero follow when no other is
    left, states of probability zero (which do not count in :math:`m_n`) after those.

    Args:
        log_joint: log joints ``(N, S)``.
        num_parents: number of parents ``P``, at most ``S``.
        by_fitness: ``False`` draws uniformly among the states of positive probability.
        generator: source of randomness.

    Returns:
        Positions of the parents, ``(N, P)`` int64, distinct within a row.

    Raises:
        ValueError: if there are fewer states than parents.
    """
    if log_joint.dim() != 2 or not 1 <= num_parents <= log_joint.shape[1]:
        raise ValueError(f"cannot draw {num_parents} distinct parents from log joints of shape {tuple(log_joint.shape)}, expected (N, S)")
    seed = draw_seed(generator)
    if not uses_kernels(log_joint):
        return evolution_dense.select_parents(log_joint, num_parents, by_fitness, seed)
    out = torch.empty(log_joint.shape[0], num_parents, dtype=torch.int64, device="cpu")
    evolution_cpu.select_parents(log_joint.detach().contiguous().numpy(), by_fitness, seed, out.numpy())
    return out


def cross(parents: Tensor, space: StateSpace, *, generator: torch.Generator | None = None) -> Tensor:
    r"""Single-point crossover of all pairs of parents: both offspring of each pair.

    A pair draws a cut :math:`c` uniformly from :math:`1 .. L - 1` and swaps its latents :math:`c, .., L - 1`.

    Args:
        parents: packed states ``(N, P, W)``.
        space: the state space they belong to, of at least two latents.
        generator: source of randomness.

    Returns:
        Children ``(N, P (P - 1), W)``.

    Raises:
        ValueError: if there are fewer than two latents or parents.
    """
    check_words("parents", parents)
    num_data, num_parents, num_words = parents.shape
    if space.num_latents < 2 or num_parents < 2:
        raise ValueError(f"crossover needs at least two latents and two parents; got {space.num_latents} and {num_parents}")
    seed = draw_seed(generator)
    if not uses_kernels(parents):
        return evolution_dense.cross(parents, space, seed)
    out = parents.new_empty(num_data, num_parents * (num_parents - 1), num_words)
    evolution_cpu.cross(parents.contiguous().numpy(), space.word.numpy(), space.shift.numpy(), seed, out.numpy())
    return out


def flip_random(words: Tensor, space: StateSpace, *, generator: torch.Generator | None = None) -> Tensor:
    """Moves one latent of every state, chosen uniformly, to another of its values, chosen uniformly.

    A binary latent flips; latents of a single value are never chosen.

    Args:
        words: packed states ``(N, C, W)``.
        space: the state space they belong to.
        generator: source of randomness.

    Returns:
        Mutated states ``(N, C, W)``, each different from the state it was made from.

    Raises:
        ValueError: if the space has only one state.
    """
    _check_mutable(words, space)
    seed = draw_seed(generator)
    if not uses_kernels(words):
        return evolution_dense.flip_random(words, space, seed)
    out = torch.empty_like(words, memory_format=torch.contiguous_format)
    evolution_cpu.flip_random(words.contiguous().numpy(), fields_of(space, space.mutable), seed, out.numpy())
    return out


def sparse_flip_probabilities(num_latents: int, target_activity: float, flip_probability: float) -> tuple[Tensor, Tensor]:
    r"""Probabilities to switch latents on and off such that the activity becomes ``target_activity`` on average.

    With :math:`k` of :math:`H` binary latents active, :math:`d = \tilde s - k` to go, and :math:`m = H p_{bf}` flips wanted on
    average, the conditions of appendix D of the paper,

    .. math:: (H - k)\,p_0 + k\,p_1 = m, \qquad (H - k)\,p_0 - k\,p_1 = d,

    have the solution :math:`(H - k)\,p_0 = (m + d)/2`, :math:`k\,p_1 = (m - d)/2`. This is the paper's :math:`p_0` and
    :math:`p_1 = \alpha p_0` without the ratio :math:`\alpha`, which is undefined at :math:`k = 0` and :math:`m + d = 0` and negative
    for :math:`|d| > m`. Both conditions cannot always be met:

    * a target further away than :math:`m` flips reach gets :math:`m` flips, all towards it, rather than more of them: a child stays
      as close to its parent as asked for (in experiments, far better for the search than jumping to the target);
    * otherwise the activity becomes the target, if need be with fewer than :math:`m` flips: at :math:`k = 0` there is nothing to
      switch off, so :math:`H p_0 = \tilde s`.

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
    words: Tensor, space: StateSpace, target_activity: float, flip_probability: float, *, generator: torch.Generator | None = None
) -> Tensor:
    """Sparsity-driven flips: binary latents change independently with the probabilities of :func:`sparse_flip_probabilities`.

    A latent of more than two values moves to another of them, chosen uniformly, with probability ``flip_probability``. A state in
    which nothing changed (with one flip on average more than a third of them) would only repeat its parent: one uniformly chosen
    latent of it changes as in :func:`flip_random`. The activity and the number of flips of children are therefore those of the
    formulas plus the probability of no change times what a random flip adds.

    Args:
        words: packed states ``(N, C, W)``.
        space: the state space they belong to.
        target_activity: wanted mean number of active binary latents.
        flip_probability: mean probability of a flip, in (0, 1].
        generator: source of randomness.

    Returns:
        Mutated states ``(N, C, W)``, each different from the state it was made from.

    Raises:
        ValueError: if the space has only one state or the probability lies outside (0, 1].
    """
    _check_mutable(words, space)
    if not 0 < flip_probability <= 1:
        raise ValueError(f"flip_probability must lie in (0, 1]; got {flip_probability}")
    binary = (space.cardinality == 2).nonzero().squeeze(-1)
    others = (space.cardinality > 2).nonzero().squeeze(-1)
    switch_on, switch_off = sparse_flip_probabilities(len(binary), target_activity, flip_probability)
    seed = draw_seed(generator)
    if not uses_kernels(words):
        return evolution_dense.flip_sparse(words, space, switch_on, switch_off, flip_probability, seed)
    out = torch.empty_like(words, memory_format=torch.contiguous_format)
    mask = torch.zeros(space.num_words, dtype=torch.int64, device="cpu").index_add_(0, space.word[binary], 1 << space.shift[binary])
    stay_other = float(torch.log1p(torch.tensor(-flip_probability, dtype=torch.double, device="cpu")))
    evolution_cpu.flip_sparse(
        words.contiguous().numpy(),
        mask.numpy(),
        fields_of(space, binary),
        fields_of(space, others),
        fields_of(space, space.mutable),
        torch.log1p(-switch_on).numpy(),
        switch_off.numpy(),
        stay_other,
        seed,
        out.numpy(),
    )
    return out


def fields_of(space: StateSpace, latents: Tensor) -> NDArray[np.int64]:
    """Word, shift and cardinality of some latents, ``(3, M)``."""
    return torch.stack([space.word[latents], space.shift[latents], space.cardinality[latents]]).numpy()


def _check_mutable(words: Tensor, space: StateSpace) -> None:
    check_words("words", words)
    if space.size < 2:
        raise ValueError("a space of a single state has nothing to mutate")
