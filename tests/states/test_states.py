"""The state space: packing, unpacking, enumeration and random states."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyro_truncated import StateSpace, ops
from pyro_truncated.ops.vectorised import latent_values as vectorised

cardinalities = st.one_of(
    st.lists(st.just(2), min_size=1, max_size=150),
    st.lists(st.integers(1, 9), min_size=1, max_size=60),
    st.lists(st.sampled_from([1, 2, 3, 2**8, 2**8 + 1, 2**20, 2**31]), min_size=1, max_size=20),
)


@pytest.mark.slow
@settings(derandomize=True, max_examples=200, deadline=None)
@given(cardinalities, st.integers(0, 2**31))
def test_round_trip(values_per_latent: list[int], seed: int) -> None:
    space = StateSpace(values_per_latent)
    generator = torch.Generator().manual_seed(seed)
    values = (torch.rand(3, 2, space.num_latents, generator=generator, dtype=torch.double) * space.cardinality).long()
    values[0, 0], values[0, 1] = 0, space.cardinality - 1
    words = space.pack(values)
    assert words.shape == (3, 2, space.num_words)
    assert torch.equal(space.unpack(words).long(), values)
    assert torch.equal(vectorised.unpack(words, space.fields, torch.int64), values)
    # Distinct values have distinct words.
    assert len(set(map(tuple, words.flatten(0, 1).tolist()))) == len(set(map(tuple, values.flatten(0, 1).tolist())))


@pytest.mark.slow
@settings(derandomize=True, max_examples=100, deadline=None)
@given(cardinalities)
def test_fields_are_disjoint_and_inside_a_word(values_per_latent: list[int]) -> None:
    space = StateSpace(values_per_latent)
    used: set[tuple[int, int]] = set()
    for word, shift, width, cardinality in zip(space.word, space.shift, space.bits, space.cardinalities, strict=True):
        field = {(int(word), int(shift) + i) for i in range(int(width))}
        assert not used & field
        assert int(shift) + int(width) <= 64
        assert 2 ** int(width) >= cardinality
        used |= field
    assert max(word for word, _ in used) == space.num_words - 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("cardinality", [2, 3])
def test_unpacked_types(dtype: torch.dtype, cardinality: int) -> None:
    space = StateSpace([cardinality] * 70)
    values = torch.randint(2, (4, 5, 70))
    unpacked = space.unpack(space.pack(values), dtype)
    assert unpacked.dtype == dtype
    assert torch.equal(unpacked, values.to(dtype))


def test_the_sign_bit_is_a_latent_like_any_other() -> None:
    space = StateSpace([2] * 64)
    top = torch.zeros(64, dtype=torch.long)
    top[63] = 1
    assert space.pack(top).item() == -(2**63)
    assert space.pack(torch.ones(64)).item() == -1
    assert torch.equal(space.unpack(space.pack(top)).long(), top)


def test_default_type_holds_every_value() -> None:
    assert StateSpace([256]).unpack(torch.tensor([255])).item() == 255
    assert StateSpace([257]).unpack(torch.tensor([256])).item() == 256
    assert StateSpace([2**31]).unpack(torch.tensor([2**31 - 1])).item() == 2**31 - 1


def test_shapes_without_leading_dimensions_and_without_rows() -> None:
    space = StateSpace([2, 3])
    assert space.pack(torch.tensor([1, 2])).shape == (1,)
    assert space.unpack(space.pack(torch.tensor([1, 2]))).tolist() == [1, 2]
    assert space.pack(torch.zeros(0, 4, 2)).shape == (0, 4, 1)
    assert space.unpack(torch.zeros(0, 4, 1, dtype=torch.long)).shape == (0, 4, 2)


def test_packing_in_blocks() -> None:
    space = StateSpace([2, 5, 3])
    values = (torch.rand(11, 3) * space.cardinality).long()
    expected = space.pack(values)
    with ops.memory_budget(2 * 32 * 3):
        assert torch.equal(space.pack(values), expected)


def test_enumeration() -> None:
    space = StateSpace([2, 3, 1, 4])
    expected = [tuple(reversed(state)) for state in itertools.product(range(4), range(1), range(3), range(2))]
    assert [tuple(state) for state in space.unpack(space.enumerate()).tolist()] == expected
    assert space.size == 24


def test_enumeration_over_several_words() -> None:
    space = StateSpace([1] * 63 + [2, 2, 3])
    assert space.num_words == 2
    assert torch.equal(space.pack(space.unpack(space.enumerate())), space.enumerate())
    assert len(space.enumerate().unique(dim=0)) == 12


def test_a_huge_space_is_not_enumerated() -> None:
    with pytest.raises(ValueError, match=r"2\^2000.0 states is too large to enumerate"):
        StateSpace([2] * 2000).enumerate()
    assert "2^2000.0 states" in repr(StateSpace([2] * 2000))
    assert "6 states" in repr(StateSpace([2, 3]))


def test_random_states() -> None:
    # 20000 draws per latent; five standard deviations of a frequency are exceeded with probability 6e-7.
    space = StateSpace([2, 1, 4, 300])
    values = space.unpack(space.random((20000,), 0.3), torch.long)
    active = (values != 0).double().mean(0)
    assert (active[[0, 2, 3]] - 0.3).abs().max() < 5 * (0.21 / 20000) ** 0.5
    assert active[1] == 0
    assert values[:, 3].max() < 300
    counts = torch.bincount(values[:, 2], minlength=4).double()[1:]
    assert (counts / 20000 - 0.1).abs().max() < 5 * (0.09 / 20000) ** 0.5
    generator = torch.Generator().manual_seed(1)
    first = space.random((5,), 0.5, generator)
    assert torch.equal(first, space.random((5,), 0.5, torch.Generator().manual_seed(1)))


def test_equality() -> None:
    assert StateSpace([2, 3]) == StateSpace((2, 3))
    assert hash(StateSpace([2, 3])) == hash(StateSpace((2, 3)))
    assert StateSpace([2, 3]) != StateSpace([3, 2])


@pytest.mark.parametrize("wrong", [[], [2, 0], [2**31 + 1]])
def test_bad_cardinalities(wrong: list[int]) -> None:
    with pytest.raises(
        ValueError, match=r"cardinalities must be .* from 1 to 2\*\*31|number of values of a latent must be a positive integer"
    ):
        StateSpace(wrong)


def test_bad_values_and_words() -> None:
    space = StateSpace([2, 3])
    with pytest.raises(ValueError, match=r"dimension of 2 latents; got shape \(4, 3\)"):
        space.pack(torch.zeros(4, 3))
    for wrong in ([0, 3], [-1, 0]):
        with pytest.raises(ValueError, match=r"values must lie in 0 \.\. cardinality - 1"):
            space.pack(torch.tensor([[0, 0], wrong]))
    with pytest.raises(ValueError, match="words must be int64 and end in a dimension of 1"):
        space.unpack(torch.zeros(4, 2, dtype=torch.long))
