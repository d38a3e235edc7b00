"""States of another space are refused before a kernel takes their bits for positions; small calls run on one thread."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from pyro_truncated import ops
from pyro_truncated.ops.compiled import compilation, latent_values
from pyro_truncated.ops.compiled.compilation import parallel_kernel
from pyro_truncated.states import StateSpace

H, D = 6, 3
SPACE = StateSpace([2] * H)


def stray() -> torch.Tensor:
    words = SPACE.random((4, 5), 0.3)
    words[2, 1, 0] |= 1 << H
    return words


def calls(words: torch.Tensor) -> dict:
    value = torch.rand(len(words), D, dtype=torch.double).round()
    weight, precision = torch.rand(D, H, dtype=torch.double), torch.ones(D, dtype=torch.double)
    weights, ones = torch.rand(words.shape[:2], dtype=torch.double), torch.ones(H, dtype=torch.double)
    logs = torch.log1p(-weight / 2), torch.log1p(-precision / 2)
    return {
        "pair_energy": lambda: ops.pair_energy(words, torch.rand(len(words), H), torch.rand(H, H)),
        "linear_energy": lambda: ops.linear_energy(words, torch.rand(len(words), H)),
        "moments": lambda: ops.moments(words, weights, H),
        "noisy_or_log_prob": lambda: ops.noisy_or_log_prob(words, value, *logs),
        "noisy_or_statistics": lambda: ops.noisy_or_statistics(words, weights, value, *logs),
        "square_error": lambda: ops.square_error(words, value, weight, precision),
        "maximum_error": lambda: ops.maximum_error(words, value, weight, precision),
        "maximum_statistics": lambda: ops.maximum_statistics(words, weights, value, weight),
        "slab_log_prob": lambda: ops.slab_log_prob(words, value, weight, precision, ones, ones),
        "slab_moments": lambda: ops.slab_moments(words, weights, value, weight, precision, ones, ones),
        "activation_probabilities": lambda: ops.activation_probabilities(words, weights, SPACE.fields),
    }


@pytest.mark.parametrize("name", calls(stray()))
def test_bits_beyond_the_last_latent_are_refused(name, kind):
    with pytest.raises(ValueError, match="state 1 of row 2 has bits set beyond the last of its 6 latents"):
        calls(stray())[name]()


def test_shared_states_with_bits_beyond_are_refused(kind):
    words = stray()[2:3].expand(4, -1, -1)
    with pytest.raises(ValueError, match="state 1 of row 0 has bits set beyond"):
        calls(words)["pair_energy"]()


@pytest.mark.parametrize("num_latents", [1, 63, 64, 65, 128])
def test_all_bits_of_the_latents_are_legal(num_latents):
    space = StateSpace([2] * num_latents)
    words = space.pack(torch.ones(2, 1, num_latents))
    first, _ = ops.moments(words, torch.ones(2, 1), num_latents)
    assert torch.equal(first, torch.ones(2, num_latents, dtype=torch.double))


def test_values_that_a_latent_does_not_have_are_refused(kind):
    space = StateSpace([3, 2])
    words = space.random((2, 4), 0.5)
    words[1, 2, 0] = 3
    with pytest.raises(ValueError, match="the states hold 1 values outside of 0"):
        ops.value_probabilities(words, torch.full((2, 4), 0.25), space.fields)


def test_words_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"must have the shapes \(N, S, 1\) and \(N, S\); got \(4, 5, 2\) and \(4, 5\)"):
        ops.activation_probabilities(torch.zeros(4, 5, 2, dtype=torch.int64), torch.ones(4, 5), SPACE.fields)


@pytest.mark.skipif(numba.get_num_threads() == 1, reason="needs two threads")
@pytest.mark.parametrize(("size", "expected"), [(2**13 - 1, 1), (2**13, numba.get_num_threads())])
def test_small_calls_run_on_one_thread(size, expected, monkeypatch):
    monkeypatch.setattr(numba, "njit", lambda **options: lambda function: function)
    # Whatever OMP_NUM_THREADS gives torch.
    monkeypatch.setattr(compilation, "_AS_TORCH", False)
    before = numba.get_num_threads()
    kernel = parallel_kernel(cost=2)(lambda out: numba.get_num_threads())
    assert kernel(np.zeros(size)) == expected
    assert numba.get_num_threads() == before


@pytest.mark.skipif(numba.get_num_threads() == 1, reason="needs two threads")
@pytest.mark.parametrize(("as_torch", "expected"), [(True, 1), (False, numba.get_num_threads())])
def test_there_are_no_more_threads_than_torch_has_unless_their_number_is_given(as_torch, expected, monkeypatch):
    monkeypatch.setattr(numba, "njit", lambda **options: lambda function: function)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(compilation, "_AS_TORCH", as_torch)
    before = numba.get_num_threads()
    assert parallel_kernel()(lambda out: numba.get_num_threads())(np.zeros(2**14)) == expected
    assert numba.get_num_threads() == before


def test_the_number_of_threads_is_put_back_when_a_kernel_fails():
    before = numba.get_num_threads()
    with pytest.raises(numba.TypingError):
        latent_values._unpack_fields(np.zeros(3), None, None, None, None)
    assert numba.get_num_threads() == before
