"""Choosing among packed states: the best distinct ones of two sets, and which states of a set repeat others."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.compiled import selection as selection_cpu
from pyro_truncated.ops.compiled import values as bits_cpu
from pyro_truncated.ops.vectorised import selection as selection_dense

WORD_BITS = 64


def repeated(words: Tensor) -> Tensor:
    """Which states of each data point equal an earlier one.

    Args:
        words: packed states, ``(N, C, W)`` int64.

    Returns:
        Booleans ``(N, C)``; the first occurrence of a state is ``False``, every further one ``True``.

    Raises:
        ValueError: if ``words`` is not a three-dimensional int64 tensor.
    """
    check_words("words", words)
    if not uses_kernels(words):
        return selection_dense.repeated(words)
    out = torch.empty(words.shape[:2], dtype=torch.bool, device="cpu")
    selection_cpu.distinct(words.contiguous().numpy(), out.numpy())
    return ~out


def select_top(words_a: Tensor, log_joint_a: Tensor, words_b: Tensor, log_joint_b: Tensor, size: int) -> tuple[Tensor, Tensor]:
    r"""The ``size`` distinct states of largest log joint in the union of two sets, for every data point.

    A state that occurs more than once counts once, with the log joint of its first occurrence. Since the kept states are the
    largest of the union, :math:`\log\sum_s p(s, y_n)` over them never falls below that of the best ``size`` states of ``a``.
    Costs expected :math:`O(S + C)` per data point on the CPU.

    Args:
        words_a: packed states ``(N, S, W)``, distinct within each data point.
        log_joint_a: their log joints ``(N, S)``; ``-inf`` is legal, NaN is not.
        words_b: more packed states ``(N, C, W)``, which may repeat each other and those of ``a``.
        log_joint_b: their log joints ``(N, C)``.
        size: number of states to keep.

    Returns:
        States ``(N, size, W)`` and log joints ``(N, size)`` in their original order, those of ``a`` first. Among states of equal
        log joint the earlier ones are kept.

    Raises:
        ValueError: if the shapes do not fit, or a data point has fewer than ``size`` distinct states, which takes ``size > S``.
    """
    _check_pair(words_a, log_joint_a, words_b, log_joint_b, size)
    dtype = torch.promote_types(log_joint_a.dtype, log_joint_b.dtype)
    log_joint_a, log_joint_b = log_joint_a.detach().to(dtype), log_joint_b.detach().to(dtype)
    if uses_kernels(words_a):
        words = words_a.new_empty(words_a.shape[0], size, words_a.shape[2])
        log_joint = log_joint_a.new_empty(words_a.shape[0], size)
        a, lj_a, b, lj_b = (t.contiguous().numpy() for t in (words_a, log_joint_a, words_b, log_joint_b))
        fewest = selection_cpu.select_top(a, lj_a, b, lj_b, words.numpy(), log_joint.numpy())
    else:
        words, log_joint, fewest = selection_dense.select_top(words_a, log_joint_a, words_b, log_joint_b, size)
    if fewest >= 0:
        raise ValueError(f"cannot keep {size} distinct states: a data point has only {fewest} among its states and candidates")
    return words, log_joint


def uses_kernels(tensor: Tensor) -> bool:
    """Whether compiled kernels handle the tensor; plain torch does on any device but the CPU."""
    return tensor.device.type == "cpu"


def check_words(name: str, words: Tensor) -> None:
    """Refuses anything that is not ``(N, C, W)`` int64."""
    if words.dim() != 3 or words.dtype != torch.int64:
        raise ValueError(f"{name} must be packed states (N, C, W) of type int64; got shape {tuple(words.shape)} of type {words.dtype}")


def check_bits(words: Tensor, num_latents: int) -> None:
    """Refuses states ``(N, C, W)`` that are not made of ``num_latents`` binary latents: kernels use set bits as positions of latents.

    Raises:
        ValueError: if the number of words is another, or bits are set beyond those of the last latent.
    """
    num_words = (num_latents + WORD_BITS - 1) // WORD_BITS
    if words.shape[-1] != num_words:
        raise ValueError(f"a state of {num_latents} binary latents fills {num_words} words; got words of shape {tuple(words.shape)}")
    used = num_latents - WORD_BITS * (num_words - 1)
    if used == WORD_BITS:
        return
    beyond = -1 << used
    # States shared by all data points (an expanded tensor) are looked at once.
    rows = words[:1] if words.shape[0] > 1 and words.stride(0) == 0 else words
    if uses_kernels(rows):
        first = bits_cpu.first_beyond(rows.numpy(), beyond)
    else:
        found = (rows[..., -1] & beyond).flatten().nonzero()
        first = int(found[0]) if len(found) else -1
    if first >= 0:
        raise ValueError(
            f"state {first % words.shape[1]} of row {first // words.shape[1]} has bits set beyond the last of its {num_latents} latents; "
            "it belongs to another state space"
        )


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
