"""Scores, moments and likelihoods of packed binary states: compiled kernels on the CPU, vectorised torch elsewhere.

All functions take packed states ``words (N, C, W)``, 64 binary latents to a word (see :class:`pyro_truncated.states.StateSpace`). States
shared by all data points may come as an expanded tensor.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyro_truncated.ops.compiled import quadratic as energy_cpu
from pyro_truncated.ops.selection import check_bits
from pyro_truncated.ops.vectorised import quadratic as energy_dense


def pair_energy(words: Tensor, linear: Tensor, pairwise: Tensor) -> Tensor:
    r"""Quadratic function of binary states: :math:`E_{nc} = \sum_h s_h a_{nh} + \sum_{hh'} s_h s_{h'} B_{hh'}` with :math:`s = s_{nc}`.

    On the CPU a state with :math:`k` active latents costs :math:`O(k^2)`, and sums are taken in float64 whatever the types of the inputs.
    Differentiable once in ``linear`` and ``pairwise``; the gradients are the moments of :func:`moments`.

    Args:
        words: packed states, ``(N, C, W)``.
        linear: coefficients :math:`a`, ``(N, H)``.
        pairwise: coefficients :math:`B`, ``(H, H)`` or one matrix per data point ``(N, H, H)``; need not be symmetric.

    Returns:
        Energies ``(N, C)`` of the type of ``linear``.

    Raises:
        ValueError: if the shapes do not fit.
    """
    num_data, num_latents = _check_words(words, linear, "linear (N, H)")
    check_bits(words, num_latents)
    if pairwise.shape not in ((num_latents, num_latents), (num_data, num_latents, num_latents)):
        raise ValueError(f"pairwise must have shape (H, H) or (N, H, H) with N={num_data}, H={num_latents}; got {tuple(pairwise.shape)}")
    return _PairEnergy.apply(words, linear, pairwise)  # type: ignore[no-any-return, no-untyped-call]


def moments(words: Tensor, weights: Tensor, num_latents: int, per_datum: bool = False) -> tuple[Tensor, Tensor]:
    r"""Weighted first and second moments :math:`\sum_c w_{nc} s` and :math:`\sum_{(n)c} w_{nc} s s^\top` of binary states.

    States of weight zero are skipped. The order of summation is fixed, so the result does not depend on the number of threads.

    Args:
        words: packed states, ``(N, C, W)``.
        weights: weights of the states, ``(N, C)``, for example posterior weights.
        num_latents: number of latents ``H``.
        per_datum: whether to keep the second moments of the data points apart.

    Returns:
        First moments ``(N, H)`` and second moments ``(H, H)``, or ``(N, H, H)`` with ``per_datum``; both float64.

    Raises:
        ValueError: if the shapes do not fit.
    """
    _check_scores(words, weights)
    check_bits(words, num_latents)
    return _kernels(words).moments(words, weights, num_latents, per_datum)  # type: ignore[no-any-return]


def noisy_or_log_prob(
    words: Tensor, value: Tensor, log_complement: Tensor, log_leak_complement: Tensor, linear: Tensor | None = None
) -> Tensor:
    r"""Log probability of binary observations under a noisy-OR of the active latents.

    .. math:: \log p(y_n \mid s) = \sum_d y_{nd} \log(1 - e^{\ell_d}) + (1 - y_{nd})\,\ell_d, \qquad
        \ell_d = \log(1 - w_{0d}) + \sum_h s_h \log(1 - W_{dh}) = \log p(y_d = 0 \mid s).

    An observation that is impossible under a state (:math:`y_d = 1`, :math:`\ell_d = 0`) gives exactly minus infinity. Differentiable once
    in the parameters and in ``linear``. On the CPU a state costs a few multiplications per active latent and pixel that is on, and one
    logarithm per 32 such pixels.

    Args:
        words: packed states, ``(N, C, W)``.
        value: observations in {0, 1}, ``(N, D)``; NaN marks a missing entry, which contributes nothing.
        log_complement: :math:`\log(1 - W)`, ``(D, H)``.
        log_leak_complement: :math:`\log(1 - w_0)`, ``(D,)``.
        linear: coefficients ``(N, H)`` of a linear function of the state to add, such as prior logits.

    Returns:
        Log probabilities ``(N, C)`` of the type of ``log_complement``.

    Raises:
        ValueError: if the shapes do not fit or an observation is neither 0, 1 nor NaN.
    """
    _check_noisy_or(words, value, log_complement, log_leak_complement)
    if linear is None:
        linear = log_complement.new_zeros(1, log_complement.shape[1]).expand(len(value), -1)
    elif linear.shape != (len(value), log_complement.shape[1]):
        raise ValueError(f"linear must have shape (N, H) = {(len(value), log_complement.shape[1])}; got {tuple(linear.shape)}")
    return _NoisyOrLogProb.apply(words, value, log_complement, log_leak_complement, linear)  # type: ignore[no-any-return, no-untyped-call]


def noisy_or_statistics(
    words: Tensor, weights: Tensor, value: Tensor, log_complement: Tensor, log_leak_complement: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Expected causes of the pixels that are on, the sums an EM step and the gradient of :func:`noisy_or_log_prob` are made of.

    With :math:`N_d(s) = 1 - e^{\ell_d(s)}` and weights :math:`w_{nc}`: the first moments :math:`\sum_c w_{nc} s`, the ratios
    :math:`R_{dh} = \sum_n y_{nd} \sum_c w_{nc}\, s_h / N_d(s)`, and the same ratios of the leak,
    :math:`\sum_n y_{nd} \sum_c w_{nc} / N_d(s)`.
    States of weight zero are skipped, whatever they imply.

    Args:
        words: packed states, ``(N, C, W)``.
        weights: weights of the states, ``(N, C)``.
        value: observations in {0, 1} or NaN where missing, ``(N, D)``.
        log_complement: :math:`\log(1 - W)`, ``(D, H)``.
        log_leak_complement: :math:`\log(1 - w_0)`, ``(D,)``.

    Returns:
        First moments ``(N, H)``, ratios ``(D, H)`` and ratios of the leak ``(D,)``, all float64.

    Raises:
        ValueError: if the shapes do not fit or an observation is neither 0, 1 nor NaN.
    """
    _check_scores(words, weights)
    _check_noisy_or(words, value, log_complement, log_leak_complement)
    return _kernels(words).noisy_or_statistics(words, weights, value, log_complement, log_leak_complement)  # type: ignore[no-any-return]


def square_error(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
    r"""Weighted squared residuals :math:`\sum_d \lambda_d (y_{nd} - \sum_h W_{dh} s_h)^2` over the observed entries of each data point.

    The form for data with missing entries; where nothing is missing, expanding the square into :func:`pair_energy` is cheaper.
    Differentiable once in ``value``, ``weight`` and ``precision``.

    Args:
        words: packed states, ``(N, C, W)``.
        value: observations, ``(N, D)``; NaN marks a missing entry, which contributes nothing.
        weight: dictionary :math:`W`, ``(D, H)``.
        precision: weights :math:`\lambda` of the observed dimensions, ``(D,)``.

    Returns:
        Sums ``(N, C)`` in float64.

    Raises:
        ValueError: if the shapes do not fit.
    """
    _check_likelihood(words, value, weight, precision)
    return _SquareError.apply(words, value, weight, precision)  # type: ignore[no-any-return, no-untyped-call]


class _PairEnergy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, words: Tensor, linear: Tensor, pairwise: Tensor) -> Tensor:
        ctx.save_for_backward(words)
        ctx.options = (linear.dtype, pairwise.dtype, pairwise.dim() == 3, linear.shape[-1])
        return _kernels(words).pair_energy(words, linear, pairwise).to(linear.dtype)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        linear_type, pairwise_type, per_datum, num_latents = ctx.options
        first, second = _kernels(grad).moments(*ctx.saved_tensors, grad, num_latents, per_datum)
        return None, first.to(linear_type), second.to(pairwise_type)


class _NoisyOrLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, words: Tensor, value: Tensor, log_complement: Tensor, log_leak_complement: Tensor, linear: Tensor) -> Tensor:
        ctx.save_for_backward(words, value, log_complement, log_leak_complement)
        ctx.linear_type = linear.dtype
        result = _kernels(words).noisy_or_log_prob(words, value, log_complement, log_leak_complement, linear)
        return result.to(log_complement.dtype)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, Tensor, Tensor]:
        words, value, log_complement, log_leak_complement = ctx.saved_tensors
        # d/dl of y log(1 - e^l) + (1 - y) l is 1 - y / N with N = 1 - e^l.
        first, ratio, leak_ratio = _kernels(words).noisy_or_statistics(words, grad, value, log_complement, log_leak_complement)
        is_observed = (~value.isnan()).double()
        grad_weight = is_observed.mT @ first - ratio
        grad_leak = is_observed.mT @ grad.double().sum(1) - leak_ratio
        return None, None, grad_weight.to(log_complement.dtype), grad_leak.to(log_leak_complement.dtype), first.to(ctx.linear_type)


class _SquareError(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
        ctx.save_for_backward(words, value, weight, precision)
        return _kernels(words).square_error(words, value, weight, precision)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        words, *inputs = ctx.saved_tensors
        gradients = _kernels(words).square_error_gradients(words, grad, *inputs)
        value, weight, precision = (gradient.to(given.dtype) for gradient, given in zip(gradients, inputs, strict=True))
        return None, value, weight, precision


def _kernels(tensor: Tensor) -> ModuleType:
    return energy_cpu if tensor.device.type == "cpu" else energy_dense


def _check_words(words: Tensor, companion: Tensor, name: str) -> tuple[int, int]:
    if words.dtype != torch.int64 or words.dim() != 3:
        raise ValueError(f"words must be int64 of shape (N, C, W); got {words.dtype} of shape {tuple(words.shape)}")
    if companion.dim() != 2 or len(companion) != len(words):
        raise ValueError(f"{name} must have one row for each of the {len(words)} rows of words; got shape {tuple(companion.shape)}")
    return companion.shape[0], companion.shape[1]


def _check_scores(words: Tensor, weights: Tensor) -> None:
    _check_words(words, weights, "weights (N, C)")
    if weights.shape != words.shape[:2]:
        raise ValueError(f"weights must have shape {tuple(words.shape[:2])}, one per state; got {tuple(weights.shape)}")


def _check_likelihood(words: Tensor, value: Tensor, weight: Tensor, offset: Tensor) -> None:
    _, num_observed = _check_words(words, value, "value (N, D)")
    if weight.dim() != 2 or len(weight) != num_observed or offset.shape != (num_observed,):
        expected = f"(D, H) and (D,) with D={num_observed}"
        raise ValueError(f"parameters must have shapes {expected}; got {tuple(weight.shape)} and {tuple(offset.shape)}")
    check_bits(words, weight.shape[1])


def _check_noisy_or(words: Tensor, value: Tensor, log_complement: Tensor, log_leak_complement: Tensor) -> None:
    _check_likelihood(words, value, log_complement, log_leak_complement)
    if not bool(((value == 0) | (value == 1) | value.isnan()).all()):
        raise ValueError("observations of a noisy-OR must be 0, 1 or, where missing, NaN")
