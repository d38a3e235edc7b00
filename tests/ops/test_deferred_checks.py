"""Checks are looked at together, on a device and in plain torch, and complain all the same."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_truncated import AutoTruncated, EvolutionarySearch, StateSpace, ops
from pyro_truncated.models import BinarySparseCoding


def complain() -> None:
    raise ValueError("this was found")


class Looks(TorchDispatchMode):
    """Counts what waits for a device."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal")
        return function(*args, **(kwargs or {}))


def test_within_a_context_they_complain_at_its_end_and_the_first_one_first() -> None:
    yes, no, reached = torch.tensor(True), torch.tensor(False), []

    def several() -> None:
        with ops.defer_checks():
            ops.raise_if(no, lambda: reached.append("a problem that is none"))
            ops.raise_if(yes, complain)
            ops.raise_if(yes, lambda: reached.append("a second problem"))
            reached.append("end")

    def followed_by_another() -> None:
        with ops.defer_checks(), ops.defer_checks():
            ops.raise_if(yes, complain)
            raise ZeroDivisionError

    with ops.use_backend("vectorised"):
        for failing in (several, followed_by_another, lambda: ops.raise_if(yes, complain)):
            with pytest.raises(ValueError, match="this was found"):
                failing()
        assert reached == ["end"]
    # Compiled kernels have nothing to wait for.
    with pytest.raises(ValueError, match="this was found"):
        several()
    assert reached == ["end"]


def test_states_of_another_space_are_refused_at_the_end() -> None:
    space = StateSpace([2] * 5)
    with (
        ops.use_backend("vectorised"),
        pytest.raises(ValueError, match="state 0 of row 0 has bits set beyond the last of its 5"),
        ops.defer_checks(),
    ):
        ops.activation_probabilities(torch.full((3, 4, 1), 64), torch.ones(3, 4), space.fields)


def test_a_search_looks_as_often_however_many_generations_it_has() -> None:
    y = torch.randn(30, 6)
    model, looks = BinarySparseCoding(6, 20), []
    with ops.use_backend("vectorised"):
        guide = AutoTruncated(model, 16)
        batch = guide.make_batch(y)
        batch.search_(EvolutionarySearch(4, 3, 1))
        for generations in (1, 8):
            with Looks() as mode:
                batch.search_(EvolutionarySearch(4, 3, generations, crossover=True))
            looks.append(mode.number)
    assert looks[0] == looks[1] <= 4
