"""Checks and selections that all operations on packed states share."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend, is_vectorised
from pyro_truncated.ops.deferred_checks import on_success, raise_if
from pyro_truncated.ops.fields import WORD_BITS
from pyro_truncated.ops.most_active import inherit_active_bound
from pyro_truncated.utils.devices import cache_answer, is_cached


def gather_states(words: Tensor, positions: Tensor) -> Tensor:
    """The states of each data point at the given positions.

    Args:
        words: packed states ``(N, S, W)``, or anything else that has a row per state.
        positions: which ones, ``(N, K)`` int64.

    Returns:
        ``(N, K, W)``.
    """
    return inherit_active_bound(words.gather(1, positions.unsqueeze(-1).expand(-1, -1, words.shape[-1])), words)


def check_words(name: str, words: Tensor) -> None:
    """Refuses anything that is not ``(N, C, W)`` int64.

    Raises:
        ValueError: naming the argument.
    """
    if words.dim() != 3 or words.dtype != torch.int64:
        raise ValueError(f"{name} must be packed states (N, C, W) of type int64; got shape {tuple(words.shape)} of type {words.dtype}")


def check_bits(words: Tensor, num_latents: int) -> None:
    """Refuses states ``(N, C, W)`` without exactly ``num_latents`` binary latents.

    Kernels use set bits as positions of latents.

    Raises:
        ValueError: if the number of words is another, or bits are set beyond those of the last latent.
    """
    num_words = (num_latents + WORD_BITS - 1) // WORD_BITS
    if words.shape[-1] != num_words:
        raise ValueError(f"a state of {num_latents} binary latents fills {num_words} words; got words of shape {tuple(words.shape)}")
    used = num_latents - WORD_BITS * (num_words - 1)
    if used == WORD_BITS:
        return
    # States shared by all data points (an expanded tensor) are looked at once.
    rows = words[:1] if words.shape[0] > 1 and words.stride(0) == 0 else words
    beyond = -1 << used

    def complain() -> None:
        first = backend("latent_values", rows).first_beyond(rows, beyond)
        raise ValueError(
            f"state {first % words.shape[1]} of row {first // words.shape[1]} has bits set beyond the last of its {num_latents} latents; "
            "it belongs to another state space"
        )

    if is_vectorised(rows):
        question = f"has at most {num_latents} latents"
        if not is_cached(rows, question):
            raise_if((rows[..., -1] & beyond).any(), complain)
            on_success(lambda: cache_answer(rows, question, True))
    elif backend("latent_values", rows).first_beyond(rows, beyond) >= 0:
        complain()


def check_rows(words: Tensor, companion: Tensor, name: str) -> tuple[int, int]:
    """Returns the shape ``(N, M)`` of a matrix by rows of words.

    Raises:
        ValueError: if words are no packed states, or the matrix has another number of rows.
    """
    if words.dtype != torch.int64 or words.dim() != 3:
        raise ValueError(f"words must be int64 of shape (N, C, W); got {words.dtype} of shape {tuple(words.shape)}")
    if companion.dim() != 2 or len(companion) != len(words):
        raise ValueError(f"{name} must have one row for each of the {len(words)} rows of words; got shape {tuple(companion.shape)}")
    return companion.shape[0], companion.shape[1]


def check_weights(words: Tensor, weights: Tensor) -> None:
    """Refuses weights that are not ``(N, C)``, one per state.

    Raises:
        ValueError: naming both shapes.
    """
    check_rows(words, weights, "weights (N, C)")
    if weights.shape != words.shape[:2]:
        raise ValueError(f"weights must have shape {tuple(words.shape[:2])}, one per state; got {tuple(weights.shape)}")


def check_likelihood(words: Tensor, value: Tensor, weight: Tensor, offset: Tensor) -> None:
    """Refuses states, observations, dictionary and vector that do not fit.

    They are ``(N, C, W)``, ``(N, D)``, ``(D, H)`` and ``(D,)``.

    Raises:
        ValueError: naming what does not fit.
    """
    _, num_observed = check_rows(words, value, "value (N, D)")
    if weight.dim() != 2 or len(weight) != num_observed or offset.shape != (num_observed,):
        expected = f"(D, H) and (D,) with D={num_observed}"
        raise ValueError(f"parameters must have shapes {expected}; got {tuple(weight.shape)} and {tuple(offset.shape)}")
    check_bits(words, weight.shape[1])
