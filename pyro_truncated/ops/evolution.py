"""Genetic operators on packed states: selection of parents, crossover and mutation.

They are those of Guiraud, Drefs & Lücke (2018), "Evolutionary Expectation Maximization", section 3 and appendix D, extended to
latents of more than two values. All of them treat every data point on its own, and what they draw for it is keyed by its position
among all data (``rows``) and a seed from torch's global generator or the source they are given: what happens to a data point does not
depend on the batch it is in, nor on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend
from pyro_truncated.ops.fields import Fields
from pyro_truncated.ops.most_active import made_of
from pyro_truncated.ops.sparse_flips import sparse_flips
from pyro_truncated.ops.streams import Source, draw_seed, positions
from pyro_truncated.ops.words import check_words


def select_parents(
    log_joint: Tensor, num_parents: int, *, by_fitness: bool = True, rows: Tensor | None = None, generator: Source = None
) -> Tensor:
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
        rows: positions ``(N,)`` of the data points among all data; default: ``0 .. N - 1``.
        generator: source of randomness.

    Returns:
        Positions of the parents, ``(N, P)`` int64, distinct within a row.

    Raises:
        ValueError: if there are fewer states than parents.
    """
    if log_joint.dim() != 2 or not 1 <= num_parents <= log_joint.shape[1]:
        raise ValueError(f"cannot draw {num_parents} distinct parents from log joints of shape {tuple(log_joint.shape)}, expected (N, S)")
    keys = positions(rows, len(log_joint), log_joint.device), draw_seed(generator)
    return backend("evolution", log_joint).select_parents(log_joint, num_parents, by_fitness, *keys)  # type: ignore[no-any-return]


def cross(parents: Tensor, fields: Fields, *, rows: Tensor | None = None, generator: Source = None) -> Tensor:
    r"""Single-point crossover of all pairs of parents: both offspring of each pair.

    A pair draws a cut :math:`c` uniformly from :math:`1 .. L - 1` and swaps its latents :math:`c, .., L - 1`.

    Args:
        parents: packed states ``(N, P, W)``.
        fields: where their latents lie, at least two.
        rows: positions ``(N,)`` of the data points among all data; default: ``0 .. N - 1``.
        generator: source of randomness.

    Returns:
        Children ``(N, P (P - 1), W)``.

    Raises:
        ValueError: if there are fewer than two latents or parents.
    """
    check_words("parents", parents)
    if fields.num_latents < 2 or parents.shape[1] < 2:
        raise ValueError(f"crossover needs at least two latents and two parents; got {fields.num_latents} and {parents.shape[1]}")
    keys = positions(rows, len(parents), parents.device), draw_seed(generator)
    return backend("evolution", parents).cross(parents, fields, *keys)  # type: ignore[no-any-return]


def flip_random(words: Tensor, fields: Fields, *, rows: Tensor | None = None, generator: Source = None) -> Tensor:
    """Moves one latent of every state, chosen uniformly, to another of its values, chosen uniformly.

    A binary latent flips; latents of a single value are never chosen.

    Args:
        words: packed states ``(N, C, W)``.
        fields: where their latents lie.
        rows: positions ``(N,)`` of the data points among all data; default: ``0 .. N - 1``.
        generator: source of randomness.

    Returns:
        Mutated states ``(N, C, W)``, each different from the state it was made from.

    Raises:
        ValueError: if the space has only one state.
    """
    _check_mutable(words, fields)
    keys = positions(rows, len(words), words.device), draw_seed(generator)
    return made_of(backend("evolution", words).flip_random(words, fields, *keys), words, flips=1)


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
    words: Tensor, fields: Fields, target_activity: float, flip_probability: float, *, rows: Tensor | None = None, generator: Source = None
) -> Tensor:
    """Sparsity-driven flips: binary latents change independently with the probabilities of :func:`sparse_flip_probabilities`.

    A latent of more than two values moves to another of them, chosen uniformly, with probability ``flip_probability``. A state in
    which nothing changed (with one flip on average more than a third of them) would only repeat its parent: one uniformly chosen
    latent of it changes as in :func:`flip_random`. The activity and the number of flips of children are therefore those of the
    formulas plus the probability of no change times what a random flip adds.

    Args:
        words: packed states ``(N, C, W)``.
        fields: where their latents lie.
        target_activity: wanted mean number of active binary latents.
        flip_probability: mean probability of a flip, in (0, 1].
        rows: positions ``(N,)`` of the data points among all data; default: ``0 .. N - 1``.
        generator: source of randomness.

    Returns:
        Mutated states ``(N, C, W)``, each different from the state it was made from.

    Raises:
        ValueError: if the space has only one state or the probability lies outside (0, 1].
    """
    _check_mutable(words, fields)
    if not 0 < flip_probability <= 1:
        raise ValueError(f"flip_probability must lie in (0, 1]; got {flip_probability}")
    chances = sparse_flip_probabilities(len(fields.binary), target_activity, flip_probability)
    keys = positions(rows, len(words), words.device), draw_seed(generator)
    flips = sparse_flips(*chances, flip_probability, len(fields.several))
    return backend("evolution", words).flip_sparse(words, fields, flips, *keys)  # type: ignore[no-any-return]


def _check_mutable(words: Tensor, fields: Fields) -> None:
    check_words("words", words)
    if not len(fields.mutable):
        raise ValueError("a space of a single state has nothing to mutate")
