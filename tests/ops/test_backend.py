"""Which kernels compute, under which memory budget: in threads, in backward passes, and all the way from a guide."""

from __future__ import annotations

import threading

import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Population, StateSpace, Truncated_ELBO, ops
from pyro_truncated.models import BinarySparseCoding
from pyro_truncated.ops import backend as dispatch
from pyro_truncated.ops.compiled import evolution as compiled_evolution
from pyro_truncated.ops.vectorised import evolution, latent_values, quadratic
from pyro_truncated.utils.budget import DEFAULT_BUDGET, current_budget, row_slices, rows_per_block

HERE = torch.zeros(1)


def kind(tensor=HERE):
    return dispatch.backend("evolution", tensor).__name__.split(".")[-2]


def test_kernels_are_compiled_unless_said_otherwise():
    assert kind() == "compiled"
    with ops.use_backend("vectorised"):
        assert kind() == "vectorised"
        with ops.use_backend("compiled"):
            assert kind() == "compiled"
        assert kind() == "vectorised"
    assert kind() == "compiled"


def test_no_kernels_are_compiled_for_other_devices():
    with ops.use_backend("compiled"):
        assert kind(torch.zeros(1, device="meta")) == "vectorised"


def test_the_choice_ends_with_an_error_and_holds_in_its_own_thread_only():
    found = []

    def fail_after_a_thread():
        thread = threading.Thread(target=lambda: found.append((kind(), current_budget())))
        thread.start()
        thread.join()
        raise RuntimeError("here")

    with pytest.raises(RuntimeError, match="here"), ops.use_backend("vectorised"), ops.memory_budget(100):
        fail_after_a_thread()
    assert found == [("compiled", DEFAULT_BUDGET)]
    assert (kind(), current_budget()) == found[0]


def test_an_unknown_kind_and_no_memory_are_refused():
    with pytest.raises(ValueError, match="kind must be one of 'compiled', 'vectorised', 'fused'; got 'dense'"), ops.use_backend("dense"):
        pass
    with pytest.raises(ValueError, match="must be a positive number of bytes; got 0"), ops.memory_budget(0):
        pass


def test_rows_fill_the_budget():
    with ops.memory_budget(100):
        assert [rows_per_block(size) for size in (0, 7, 100, 101)] == [100, 14, 1, 1]
        assert list(row_slices(5, 40)) == [slice(0, 2), slice(2, 4), slice(4, 6)]
        with ops.memory_budget(None):
            assert current_budget() == 100
    assert rows_per_block(10, 35) == 3


def test_until_a_kernel_is_compiled_this_thread_leaves_a_core_free(monkeypatch):
    def is_compiled_later(words):
        raise dispatch.NoKernelError

    def spy(words):
        found.append(torch.get_num_threads())
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
        # What torch computes may call another function without a kernel.
        return words == 0 if len(found) > 2 else ops.find_duplicates(words)

    num_threads = torch.get_num_threads()
    monkeypatch.setattr(compiled_evolution, "find_duplicates", is_compiled_later)
    monkeypatch.setattr(evolution, "find_duplicates", spy)
    try:
        for threads, left in ((1, 1), (3, 2)):
            found = []
            torch.set_num_threads(threads)
            ops.find_duplicates(torch.zeros(1, 2, 1, dtype=torch.int64))
            assert [*found, torch.get_num_threads()] == [left, threads, left, threads, threads]
    finally:
        torch.set_num_threads(num_threads)


def test_a_gradient_is_computed_as_its_value_was(monkeypatch):
    found = []
    gradients = quadratic.square_error_gradients

    def spy(*arguments):
        found.append(current_budget())
        return gradients(*arguments)

    monkeypatch.setattr(quadratic, "square_error_gradients", spy)
    weight = torch.ones(2, 3, requires_grad=True)
    with ops.use_backend("vectorised"), ops.memory_budget(100):
        error = ops.square_error(torch.ones(1, 1, 1, dtype=torch.long), torch.zeros(1, 2), weight, torch.ones(2))
    error.sum().backward()
    assert found == [100]
    assert torch.equal(weight.grad, 2.0 * torch.tensor([[1, 0, 0], [1, 0, 0]]))


@pytest.mark.parametrize("optimizer", [ClosedForm, lambda model: Adam({"lr": 0.01})])
def test_the_budget_of_a_guide_reaches_the_kernels(optimizer, monkeypatch):
    found = set()

    def spy(size):
        found.add(current_budget())
        return rows_per_block(size)

    monkeypatch.setattr(latent_values, "rows_per_block", spy)
    y = torch.rand(10, 4).masked_fill(torch.rand(10, 4) < 0.2, torch.nan)
    model = BinarySparseCoding(4, 5).initialize(y.nan_to_num(0.5))
    guide = AutoTruncated(model, num_states=4, memory_budget=2**21)
    with ops.use_backend("vectorised"):
        SVI(model, guide, optimizer(model), Truncated_ELBO(EvolutionarySearch())).step(y)
    assert found == {2**21}


def test_states_are_taken_by_their_positions():
    population = Population(StateSpace([2] * 70), torch.randint(2**60, (3, 5, 2)), torch.zeros(3, 5))
    positions = torch.tensor([[4, 0], [1, 1], [2, 3]])
    taken = population.take(positions)
    assert all(torch.equal(taken[n, k], population.words[n, positions[n, k]]) for n in range(3) for k in range(2))
    for wrong in (positions + 1, positions - 1):
        with pytest.raises(RuntimeError, match="out of bounds"):
            population.take(wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA devices")
def test_where_triton_does_not_run_plain_torch_is_taken():
    assert not dispatch.runs_triton(torch.device("cuda"))
