"""Unpacking of states, weighted marginals, and draws of independent latents."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend
from pyro_truncated.ops.deferred_checks import raise_if
from pyro_truncated.ops.packed_states import Fields, check_bits, check_words
from pyro_truncated.ops.streams import Source, draw_seed, positions


def unpack(words: Tensor, fields: Fields, dtype: torch.dtype) -> Tensor:
    """Values ``(..., L)`` of packed states ``(..., W)`` in the given type.

    Raises:
        ValueError: if ``words`` is not int64 or does not end in a dimension of the space's words.
    """
    if words.shape[-1:] != (fields.num_words,) or words.dtype != torch.int64:
        raise ValueError(f"words must be int64 and end in a dimension of {fields.num_words}; got {tuple(words.shape)} of {words.dtype}")
    return backend("latent_values", words).unpack(words, fields, dtype)  # type: ignore[no-any-return]


def activation_probabilities(words: Tensor, weights: Tensor, fields: Fields) -> Tensor:
    r"""Probability :math:`\sum_s w_{ns} [s_l \ne 0]` that a latent is not zero.

    Args:
        words: packed states ``(N, S, W)``.
        weights: weights of the states, ``(N, S)``; probabilities if they sum to one.
        fields: where their latents lie.

    Returns:
        ``(N, L)`` in the type of the weights, accumulated in float64 on the CPU.

    Raises:
        ValueError: if the shapes do not fit or a state does not belong to the space.
    """
    if not fields.is_binary:
        return value_probabilities(words, weights, fields)[..., 1:].sum(-1)
    _check_weighted(words, weights, fields)
    check_bits(words, fields.num_latents)
    return backend("latent_values", words).activation_probabilities(words, weights, fields)  # type: ignore[no-any-return]


def value_probabilities(words: Tensor, weights: Tensor, fields: Fields) -> Tensor:
    r"""Probability :math:`\sum_s w_{ns} [s_l = v]` of every value of every latent.

    Args:
        words: packed states ``(N, S, W)``.
        weights: weights of the states, ``(N, S)``; probabilities if they sum to one.
        fields: where their latents lie.

    Returns:
        ``(N, L, V)`` with ``V`` the largest cardinality; zero at values that a latent does not have.

    Raises:
        ValueError: if the shapes do not fit or a state does not belong to the space.
    """
    if fields.is_binary:
        active = activation_probabilities(words, weights, fields)
        return torch.stack([weights.sum(1, keepdim=True) - active, active], -1)
    _check_weighted(words, weights, fields)
    out, num_invalid = backend("latent_values", words).value_probabilities(words, weights, fields)
    raise_if(torch.as_tensor(num_invalid > 0, device=words.device), lambda: _refuse_others(int(num_invalid)))
    return out  # type: ignore[no-any-return]


def draw_values(probabilities: Tensor, num_samples: int, fields: Fields, *, rows: Tensor | None = None, generator: Source = None) -> Tensor:
    """Draws states whose latents are independent.

    Args:
        probabilities: probability of every value of every latent, ``(N, L, V)`` with ``V`` the
            largest cardinality. Each latent's sum to one and vanish at values that it does not
            have.
        num_samples: number of states per data point.
        fields: where their latents lie.
        rows: positions ``(N,)`` of the data points among all data. Default: ``0 .. N - 1``.
        generator: source of randomness.

    Returns:
        Packed states ``(N, num_samples, W)``.
    """
    if probabilities.dim() != 3 or probabilities.shape[1:] != (fields.num_latents, fields.num_values):
        raise ValueError(
            f"probabilities must have the shape (N, {fields.num_latents}, {fields.num_values}); got {tuple(probabilities.shape)}"
        )
    keys = positions(rows, len(probabilities), probabilities.device), draw_seed(generator)
    # Tail probabilities are summed from above, so a value of probability zero beyond the last one is never drawn.
    tails = probabilities.detach().double().flip(-1).cumsum(-1).flip(-1)[..., 1:].contiguous()
    return backend("latent_values", tails).draw_values(tails, num_samples, fields, *keys)  # type: ignore[no-any-return]


def _refuse_others(number: int) -> None:
    raise ValueError(f"{number} latents of the states hold values that they do not have; the states belong to another state space")


def _check_weighted(words: Tensor, weights: Tensor, fields: Fields) -> None:
    check_words("words", words)
    if words.shape[-1] != fields.num_words or weights.shape != words.shape[:2]:
        given = f"{tuple(words.shape)} and {tuple(weights.shape)}"
        raise ValueError(f"words and weights must have the shapes (N, S, {fields.num_words}) and (N, S); got {given}")
