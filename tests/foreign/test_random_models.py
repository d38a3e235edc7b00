"""Random models against brute force: a hundred in the default run, a thousand with ``make foreign``."""

from __future__ import annotations

import pyro
import pytest
import torch

from tests.foreign.harness import compare
from tests.foreign.random_models import DISCRETE, LAYOUTS, OBSERVED, Program, draw

CHUNK = 20
TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-3}


def programs(start: int, dtype: torch.dtype) -> list[Program]:
    """The programs of some seeds."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return [draw(seed) for seed in range(start, start + CHUNK)]
    finally:
        torch.set_default_dtype(before)


def check(start: int, dtype: torch.dtype) -> None:
    """Loss, gradients and marginals equal brute force, fewer states bound the evidence, and nothing is refused."""
    before = torch.get_default_dtype()
    for seed, program in enumerate(programs(start, dtype), start):
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            errors = compare(program.foreign())
        except Exception as error:
            error.add_note(f"This was the random model of seed {seed}.")
            raise
        finally:
            torch.set_default_dtype(before)
        assert errors.worst < TOLERANCES[dtype], (seed, errors)


@pytest.mark.parametrize(("start", "dtype"), [(20 * chunk, torch.float64 if chunk < 4 else torch.float32) for chunk in range(5)])
def test_a_hundred_random_models_equal_brute_force(start, dtype):
    check(start, dtype)


@pytest.mark.foreign
@pytest.mark.parametrize(("start", "dtype"), [(20 * chunk, torch.float32 if chunk % 5 == 4 else torch.float64) for chunk in range(50)])
def test_a_thousand_random_models_equal_brute_force(start, dtype):
    check(start, dtype)


def test_every_kind_and_layout_is_drawn():
    drawn = [draw(seed) for seed in range(500)]
    kinds = {statement.kind for program in drawn for statement in program.discrete}
    observed = {statement.kind for program in drawn for statement in program.observed}
    hidden = {statement.hidden for program in drawn for statement in (*program.discrete, *program.observed)}
    assert kinds == set(DISCRETE)
    assert observed == {kind for kind in OBSERVED if not kind.endswith("spelled_out")}
    assert {id(program.layout) for program in drawn} == {id(layout) for layout in LAYOUTS.values()}
    assert hidden == {None, "points", "entries", "imputed"}
    assert {program.continuous for program in drawn} == {None, "global", "local", "slab"}
    assert any(program.subsample is not None for program in drawn)
