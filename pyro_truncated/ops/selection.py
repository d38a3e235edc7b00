"""Choosing among packed states: the best distinct ones of two sets, and which states of a set repeat others."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend
from pyro_truncated.ops.most_active import made_of
from pyro_truncated.ops.words import check_words


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
    return backend("selection", words).repeated(words)  # type: ignore[no-any-return]


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
    words, log_joint, fewest = backend("selection", words_a).select_top(words_a, log_joint_a, words_b, log_joint_b, size)
    if fewest >= 0:
        raise ValueError(f"cannot keep {size} distinct states: a data point has only {fewest} among its states and candidates")
    return made_of(words, words_a, words_b), log_joint


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
