"""Selection of the best distinct states against sets of Python tuples."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyro_truncated.ops import find_duplicates, select_top, use_backend

# Every test runs on both kinds of kernels.
pytestmark = pytest.mark.usefixtures("kind")


def rows(words: Tensor) -> list[list[tuple[int, ...]]]:
    return [[tuple(state) for state in row] for row in words.tolist()]


def draw(num_data: int, num_a: int, num_b: int, num_words: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Distinct ``a``; ``b`` that repeats states of ``a`` and of itself; log joints that are a function of the state."""
    value = torch.randint(-(2**62), 2**62, (num_data, num_a + num_b, num_words))
    a = value[:, :num_a]
    pick = torch.randint(num_a + num_b, (num_data, num_b))
    b = value.gather(1, pick.unsqueeze(-1).expand(-1, -1, num_words))
    log_joint = torch.randn(num_data, num_a + num_b, dtype=dtype)
    return a, log_joint[:, :num_a], b, log_joint.gather(1, pick)


def best(a: Tensor, lj_a: Tensor, b: Tensor, lj_b: Tensor, size: int) -> list[list[tuple[tuple[int, ...], float]]]:
    """The obvious way: a dictionary per data point that keeps the first occurrence, sorted by log joint."""
    result = []
    for states, values in zip(rows(torch.cat([a, b], 1)), torch.cat([lj_a, lj_b], 1).tolist(), strict=True):
        known: dict[tuple[int, ...], float] = {}
        for state, value in zip(states, values, strict=True):
            known.setdefault(state, value)
        ranked = sorted(known.items(), key=lambda item: -item[1])
        result.append(ranked[:size])
    return result


@pytest.mark.nightly(keep="values")
@pytest.mark.parametrize("num_words", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 20, 23])
def test_keeps_the_best_distinct_states(num_words: int, dtype: torch.dtype, size: int) -> None:
    # 150 data points, more than one block of rows that share scratch memory.
    a, lj_a, b, lj_b = draw(150, 20, 40, num_words, dtype)
    words, log_joint = select_top(a, lj_a, b, lj_b, size)
    assert words.shape == (150, size, num_words)
    assert log_joint.dtype == dtype
    for kept, values, expected in zip(rows(words), log_joint.tolist(), best(a, lj_a, b, lj_b, size), strict=True):
        assert sorted(zip(kept, values, strict=True)) == sorted(expected)


def test_both_kinds_agree_in_order_and_ties() -> None:
    a, lj_a, b, lj_b = draw(80, 12, 30, 2)
    lj_a, lj_b = lj_a.round(), lj_b.round()
    found = {}
    for kind in ("compiled", "vectorised"):
        with use_backend(kind):
            found[kind] = select_top(a, lj_a, b, lj_b, 12)
    assert all(torch.equal(one, other) for one, other in zip(*found.values(), strict=True))


def test_the_first_occurrence_wins() -> None:
    a = torch.tensor([[[1], [2]]])
    b = torch.tensor([[[2], [3], [3]]])
    words, log_joint = select_top(a, torch.tensor([[-1.0, -2.0]]), b, torch.tensor([[5.0, -1.5, 4.0]]), 3)
    assert words.squeeze().tolist() == [1, 2, 3]
    assert log_joint.squeeze().tolist() == [-1.0, -2.0, -1.5]


def test_ties_keep_the_earlier_states() -> None:
    a = torch.tensor([[[1], [2]]])
    b = torch.tensor([[[3], [4]]])
    words, _ = select_top(a, torch.zeros(1, 2), b, torch.zeros(1, 2), 2)
    assert words.squeeze().tolist() == [1, 2]
    words, _ = select_top(a, torch.zeros(1, 2), b, torch.tensor([[0.0, 1.0]]), 2)
    assert words.squeeze().tolist() == [1, 4]


@pytest.mark.parametrize("size", [2, 4])
def test_log_joints_of_minus_infinity_rank_last_but_count(size: int) -> None:
    a = torch.tensor([[[1], [2]]])
    b = torch.tensor([[[2], [1], [3], [4]]])
    infinite = -math.inf
    words, log_joint = select_top(a, torch.full((1, 2), infinite), b, torch.tensor([[infinite, infinite, infinite, -7.0]]), size)
    assert sorted(words.flatten().tolist()) == ([1, 4] if size == 2 else [1, 2, 3, 4])
    assert log_joint.max() == -7.0


def test_words_with_the_sign_bit_and_equal_low_bits_differ() -> None:
    a = torch.tensor([[[0, 0], [-(2**63), 0]]])
    b = torch.tensor([[[0, -(2**63)], [-(2**63), 0], [0, 1]]])
    words, _ = select_top(a, torch.zeros(1, 2), b, torch.ones(1, 3), 4)
    assert len(set(rows(words)[0])) == 4


def test_too_few_distinct_states_are_refused() -> None:
    a, b = torch.arange(6).reshape(2, 3, 1), torch.zeros(2, 4, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="cannot keep 5 distinct states: a data point has only 3"):
        select_top(a, torch.zeros(2, 3), b, torch.zeros(2, 4), 5)
    words, _ = select_top(a, torch.zeros(2, 3), b, torch.ones(2, 4), 3)
    assert rows(words)[0] == [(0,), (1,), (2,)]


def test_no_candidates_and_no_data() -> None:
    a, none = torch.arange(3).reshape(1, 3, 1), torch.zeros(1, 0, 1, dtype=torch.long)
    words, _ = select_top(a, torch.tensor([[0.0, 2.0, 1.0]]), none, torch.zeros(1, 0), 2)
    assert words.flatten().tolist() == [1, 2]
    words, log_joint = select_top(a[:0], torch.zeros(0, 3), none[:0], torch.zeros(0, 0), 3)
    assert words.shape == (0, 3, 1)
    assert log_joint.shape == (0, 3)


def test_non_contiguous_input() -> None:
    a, lj_a, b, lj_b = draw(5, 8, 8, 2)
    expected = select_top(a, lj_a, b, lj_b, 8)
    strided = select_top(a.transpose(0, 1).contiguous().transpose(0, 1), lj_a.T.contiguous().T, b, lj_b, 8)
    assert torch.equal(expected[0], strided[0])
    assert torch.equal(expected[1], strided[1])


def test_bad_arguments() -> None:
    a, lj = torch.zeros(2, 3, 1, dtype=torch.long), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"words_a must be packed states .* got shape \(2, 3, 1\) of type torch.float32"):
        select_top(a.float(), lj, a, lj, 3)
    with pytest.raises(ValueError, match="must agree in the number of data points and of words"):
        select_top(a, lj, a[:1], lj[:1], 3)
    with pytest.raises(ValueError, match=r"log_joint_b must have the shape \(2, 3\)"):
        select_top(a, lj, a, lj[:, :2], 3)
    with pytest.raises(ValueError, match="size must be a positive number of states; got 0"):
        select_top(a, lj, a, lj, 0)


def test_repeated_marks_all_but_the_first() -> None:
    words = torch.tensor([[[1, 0], [0, 1], [1, 0], [1, 0]], [[5, 5], [5, 4], [4, 5], [4, 4]]])
    assert find_duplicates(words).tolist() == [[False, False, True, True], [False] * 4]


@pytest.mark.slow
@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=2), min_size=1, max_size=30))
def test_repeated_is_a_set(states: list[list[int]]) -> None:
    seen: set[tuple[int, ...]] = set()
    expected = []
    for state in states:
        expected.append(tuple(state) in seen)
        seen.add(tuple(state))
    for kind in ("compiled", "vectorised"):
        with use_backend(kind):
            assert find_duplicates(torch.tensor([states]))[0].tolist() == expected
