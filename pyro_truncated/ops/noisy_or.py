r"""Likelihoods of packed binary states under a noisy-OR, with statistics.

With ``words (N, C, W)`` and observations ``value (N, D)`` in {0, 1}, NaN where missing, both functions take ``log_complement (D, H)``,
:math:`\log(1 - W)`, and ``log_leak_complement (D,)``, :math:`\log(1 - w_0)`. Shapes that do not fit, and other observations, raise
``ValueError``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend, gradient, save_with_context
from pyro_truncated.ops.packed_states import check_likelihood, check_weights
from pyro_truncated.ops.quadratic import product
from pyro_truncated.utils.constraints import as_signed
from pyro_truncated.utils.devices import cached_answer


def noisy_or_log_prob(
    words: Tensor, value: Tensor, log_complement: Tensor, log_leak_complement: Tensor, linear: Tensor | None = None
) -> Tensor:
    r"""Log probability of binary observations under a noisy-OR of the active latents.

    .. math:: \log p(y_n \mid s) = \sum_d y_{nd} \log(1 - e^{\ell_d}) + (1 - y_{nd})\,\ell_d, \qquad
        \ell_d = \log(1 - w_{0d}) + \sum_h s_h \log(1 - W_{dh}) = \log p(y_d = 0 \mid s).

    An observation that is impossible under a state (:math:`y_d = 1`, :math:`\ell_d = 0`) gives exactly minus infinity. Differentiable once
    in the parameters and in ``linear (N, H)``, coefficients of a linear function of the state to add, such as prior logits. Returns log
    probabilities ``(N, C)`` of the type of ``log_complement``.
    """
    _check_noisy_or(words, value, log_complement, log_leak_complement)
    if linear is None:
        linear = log_complement.new_zeros(1, log_complement.shape[1]).expand(len(value), -1)
    elif linear.shape != (len(value), log_complement.shape[1]):
        raise ValueError(f"linear must have shape (N, H) = {(len(value), log_complement.shape[1])}; got {tuple(linear.shape)}")
    return _NoisyOrLogProb.apply(words, value, log_complement, log_leak_complement, linear)  # type: ignore[no-untyped-call]


def noisy_or_statistics(
    words: Tensor, weights: Tensor, value: Tensor, log_complement: Tensor, log_leak_complement: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Returns expected causes of the pixels that are on.

    With :math:`N_d(s) = 1 - e^{\ell_d(s)}` and weights :math:`w_{nc}`: the first moments :math:`\sum_c w_{nc} s`, the ratios :math:`R_{dh}
    = \sum_n y_{nd} \sum_c w_{nc}\, s_h / N_d(s)`, and the same ratios of the leak, :math:`\sum_n y_{nd} \sum_c w_{nc} / N_d(s)`. States of
    weight zero are skipped, whatever they imply. Shapes are ``(N, H)``, ``(D, H)`` and ``(D,)``, all float64.
    """
    check_weights(words, weights)
    _check_noisy_or(words, value, log_complement, log_leak_complement)
    return backend("noisy_or", words).noisy_or_statistics(words, weights, value, log_complement, log_leak_complement)


class _NoisyOrLogProb(torch.autograd.Function):
    """Log probabilities under a noisy-OR, see :func:`noisy_or_log_prob`."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, value: Tensor, log_complement: Tensor, log_leak_complement: Tensor, linear: Tensor) -> Tensor:
        """Returns log probabilities ``(N, C)``."""
        save_with_context(ctx, words, value, log_complement, log_leak_complement)
        result = backend("noisy_or", words).noisy_or_log_prob(words, value, log_complement, log_leak_complement, linear)
        return result.to(log_complement.dtype)

    @staticmethod
    @gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, Tensor, Tensor]:
        r"""Gradients: :math:`\sum_n \langle s_h \rangle - R_{dh}` over observed entries, of the leak likewise."""
        words, value, log_complement, log_leak_complement = ctx.saved_tensors
        # d/dl of y log(1 - e^l) + (1 - y) l is 1 - y / N with N = 1 - e^l.
        first, ratio, leak_ratio = backend("noisy_or", words).noisy_or_statistics(words, grad, value, log_complement, log_leak_complement)
        is_observed = (~value.isnan()).double()
        grad_weight = is_observed.mT @ first - ratio
        grad_leak = is_observed.mT @ grad.double().sum(1) - leak_ratio
        return None, None, grad_weight, grad_leak, first


def _check_noisy_or(words: Tensor, value: Tensor, log_complement: Tensor, log_leak_complement: Tensor) -> None:
    check_likelihood(words, value, log_complement, log_leak_complement)
    if not cached_answer(value, "is binary or missing", lambda: _equals_square(value) or _equals_square(value.nan_to_num(0.0))):
        observed = value[~value.isnan()]
        raise ValueError(
            "observations of a noisy-OR must be 0, 1 or, where missing, NaN; "
            f"got numbers from {float(observed.min()):g} to {float(observed.max()):g}"
        )


def _equals_square(value: Tensor) -> bool:
    """Whether numbers from zero to one equal their squares: zeros and ones."""
    number = as_signed(value)
    return torch.equal(number.clamp(0, 1).square(), number)


def log_off(states: Tensor, log_complement: Tensor, log_leak_complement: Tensor) -> Tensor:
    """``log p(y_d = 0 | s)`` of states ``(..., H)``, where weights may be one."""
    # Zero times the infinite logarithm of weights of one is no number: the largest number stands for it.
    largest = torch.finfo(log_complement.dtype).max
    result = log_leak_complement + product(log_complement.clamp(min=-largest), states)
    return result.masked_fill(result < -largest / 2, -torch.inf)


def log1mexp(x: Tensor) -> Tensor:
    r""":math:`\log(1 - e^x)` for :math:`x \le 0`, accurate at both ends; ``-inf``, with gradient zero, at 0."""
    is_zero, is_near = x == 0, x > -0.6931471805599453
    # Near zero 1 - e^x comes from expm1; far from zero the logarithm of a number close to one comes from log1p. Each branch sees
    # harmless inputs where it is not taken, or its gradient there would turn into NaN.
    near = torch.where(is_near & ~is_zero, x, -0.5).expm1().neg().log()
    far = torch.where(is_near, -1.0, x).exp().neg().log1p()
    return torch.where(is_near, near, far).masked_fill(is_zero, -torch.inf)
