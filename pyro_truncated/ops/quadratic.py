"""Quadratic functions of packed binary states, moments, and squared residuals.

All functions of packed binary states take ``words (N, C, W)``, 64 latents to a word (see :class:`pyro_truncated.states.StateSpace`). States
shared by all data points may come as an expanded tensor. Coefficients are ``linear (N, H)`` and ``pairwise (H, H)``, which need not be
symmetric. Shapes that do not fit raise ``ValueError``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend, differentiable_gradient, gradient, save_with_context
from pyro_truncated.ops.packed_states import check_bits, check_likelihood, check_rows, check_weights


def pair_energy(words: Tensor, linear: Tensor, pairwise: Tensor) -> Tensor:
    r"""Quadratic function of binary states: :math:`E_{nc} = \sum_h s_h a_{nh} + \sum_{hh'} s_h s_{h'} B_{hh'}` with :math:`s = s_{nc}`.

    On the CPU a state with :math:`k` active latents costs :math:`O(k^2)`, less of up to 20 in all. Differentiable in ``linear`` and
    ``pairwise``, as often as needed; the gradients are the moments of :func:`moments`. ``pairwise`` may be one matrix per data point, ``(N,
    H, H)``. Returns energies ``(N, C)`` of the type of ``linear``.
    """
    num_data, num_latents = check_rows(words, linear, "linear (N, H)")
    check_bits(words, num_latents)
    if pairwise.shape not in ((num_latents, num_latents), (num_data, num_latents, num_latents)):
        raise ValueError(f"pairwise must have shape (H, H) or (N, H, H) with N={num_data}, H={num_latents}; got {tuple(pairwise.shape)}")
    return _PairEnergy.apply(words, linear, pairwise)  # type: ignore[no-untyped-call]


def linear_energy(words: Tensor, linear: Tensor) -> Tensor:
    r"""Linear function of binary states: :math:`E_{nc} = \sum_h s_h a_{nh}`, such as log-odds of independent priors.

    The same as :func:`pair_energy` of no pairs, at a cost of :math:`O(k)` and without a matrix of zeros or of second moments. Returns
    energies ``(N, C)`` of the type of ``linear``.
    """
    check_bits(words, check_rows(words, linear, "linear (N, H)")[1])
    return _PairEnergy.apply(words, linear, None)  # type: ignore[no-untyped-call]


@torch.no_grad()
def flip_energy(words: Tensor, linear: Tensor, pairwise: Tensor) -> Tensor:
    r"""How much :func:`pair_energy` changes where one latent is flipped, for every latent.

    .. math:: E(s \oplus e_h) - E(s) = (1 - 2 s_h) \bigl(a_{nh} + B_{hh} + \sum_{h' \ne h} s_{h'} (B_{hh'} + B_{h'h})\bigr).

    A state with :math:`k` active latents costs :math:`O(kH)`, where scoring the flips one by one takes :math:`O(k^2 H)`. There is one state
    for each data point, ``words (N, W)``. Returns changes ``(N, H)`` in float64.
    """
    num_latents = check_rows(words.unsqueeze(1), linear, "linear (N, H)")[1]
    check_bits(words.unsqueeze(1), num_latents)
    if pairwise.shape != (num_latents, num_latents):
        raise ValueError(f"pairwise must have shape (H, H) with H={num_latents}; got {tuple(pairwise.shape)}")
    pairwise, diagonal = pairwise.double(), pairwise.double().diagonal()
    others = pairwise + pairwise.mT - 2 * torch.diag_embed(diagonal)
    return backend("quadratic", words).flip_energy(words, linear.double() + diagonal, others)


def moments(words: Tensor, weights: Tensor, num_latents: int, per_datum: bool = False) -> tuple[Tensor, Tensor]:
    r"""Weighted first and second moments :math:`\sum_c w_{nc} s` and :math:`\sum_{(n)c} w_{nc} s s^\top` of binary states.

    With ``weights (N, C)``, such as posterior probabilities. Returns first moments ``(N, H)`` and second moments ``(H, H)``, or ``(N, H,
    H)`` with ``per_datum``; both float64.
    """
    check_weights(words, weights)
    check_bits(words, num_latents)
    return backend("quadratic", words).moments(words, weights, num_latents, per_datum)


class _PairEnergy(torch.autograd.Function):
    r"""Energies :math:`s^\top a_n + s^\top B s` of binary states, or without the second term."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, linear: Tensor, pairwise: Tensor | None) -> Tensor:
        """Returns energies ``(N, C)``."""
        save_with_context(ctx, words)
        ctx.num_latents, ctx.per_datum = linear.shape[-1], None if pairwise is None else pairwise.dim() == 3
        return backend("quadratic", words).pair_energy(words, linear, pairwise).to(linear.dtype)

    @staticmethod
    @differentiable_gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor | None]:
        """Gradients: the moments of the states, weighted by those of the energies."""
        per_datum = ctx.per_datum if ctx.needs_input_grad[2] else None
        return None, *_Moments.apply(*ctx.saved_tensors, grad, ctx.num_latents, per_datum)  # type: ignore[no-untyped-call]


class _Moments(torch.autograd.Function):
    r"""Moments :math:`\sum_c w_{nc} s` and :math:`\sum_{(n)c} w_{nc} s s^\top`, linear in the weights, or the first alone."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, weights: Tensor, num_latents: int, per_datum: bool | None) -> tuple[Tensor, Tensor | None]:
        """Returns first and second moments."""
        save_with_context(ctx, words)
        kernels = backend("quadratic", weights)
        if per_datum is None:
            return kernels.first_moments(words, weights, num_latents), None
        return kernels.moments(words, weights, num_latents, per_datum)

    @staticmethod
    @differentiable_gradient
    def backward(ctx: Any, first: Tensor, second: Tensor | None) -> tuple[None, Tensor, None, None]:
        """Gradients: energies whose coefficients are the gradients of the moments."""
        return None, _PairEnergy.apply(*ctx.saved_tensors, first, second), None, None  # type: ignore[no-untyped-call]


def square_error(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
    r"""Weighted squared residuals :math:`\sum_d \lambda_d (y_{nd} - \sum_h W_{dh} s_h)^2` over the observed entries of each data point.

    The form for data with missing entries: otherwise :func:`pair_energy` of the expanded square is cheaper. Differentiable once in
    observations ``value (N, D)``, NaN where missing, the dictionary ``weight (D, H)`` and ``precision (D,)``. Returns sums ``(N, C)`` in
    float64.
    """
    check_likelihood(words, value, weight, precision)
    return _SquareError.apply(words, value, weight, precision)  # type: ignore[no-untyped-call]


class _SquareError(torch.autograd.Function):
    r"""Squared errors :math:`\sum_d \lambda_d (y_{nd} - \sum_h W_{dh} s_h)^2` of observed entries."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
        """Returns errors ``(N, C)``."""
        save_with_context(ctx, words, value, weight, precision)
        return backend("quadratic", words).square_error(words, value, weight, precision)

    @staticmethod
    @gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        """Gradients in data, dictionary and precision."""
        words, *inputs = ctx.saved_tensors
        return None, *backend("quadratic", words).square_error_gradients(words, grad, *inputs)


def product(matrix: Tensor, vectors: Tensor) -> Tensor:
    """Multiplies matrix ``(*batch, D, H)`` by vectors ``(*batch, H)``."""
    return vectors @ matrix.mT if matrix.dim() == 2 else (matrix @ vectors.unsqueeze(-1)).squeeze(-1)
