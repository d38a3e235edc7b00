"""Random models against brute force: some in the default run, a thousand with ``make nightly``."""

from __future__ import annotations

import warnings

import pytest
import torch

from pyro_truncated import VectorizationWarning
from tests.foreign.random_check import SEARCHES, check, seeded
from tests.foreign.random_draws import draw
from tests.foreign.random_models import LAYOUTS
from tests.foreign.random_sites import DISCRETE, OBSERVED

CHUNK = 10
TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-3}

# Counts are cut off on both sides.
pytestmark = pytest.mark.filterwarnings("ignore:Of the posterior of")


def check_all(start: int, dtype: torch.dtype) -> None:
    """Loss, gradients and marginals equal brute force, fewer states bound the evidence, and nothing is refused."""
    for seed in range(start, start + CHUNK):
        with seeded(seed, dtype), warnings.catch_warnings():
            warnings.simplefilter("ignore", VectorizationWarning)
            try:
                found = check(draw(seed))
            except Exception as error:
                error.add_note(f"This was the random model of seed {seed}.")
                raise
        assert found.worst < TOLERANCES[dtype], (seed, found)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(("start", "dtype"), [(10 * chunk, torch.float64 if chunk < 8 else torch.float32) for chunk in range(10)])
def test_a_hundred_random_models_equal_brute_force(start, dtype):
    check_all(start, dtype)


@pytest.mark.nightly
@pytest.mark.parametrize(("start", "dtype"), [(10 * chunk, torch.float32 if chunk % 5 == 4 else torch.float64) for chunk in range(100)])
def test_a_thousand_random_models_equal_brute_force(start, dtype):
    check_all(start, dtype)


def test_every_kind_and_layout_is_drawn():
    drawn = [draw(seed) for seed in range(1000)]
    statements = [statement for program in drawn for statement in (*program.discrete, *program.observed)]
    assert {statement.kind for program in drawn for statement in program.discrete} == set(DISCRETE)
    assert {statement.kind for program in drawn for statement in program.observed} == set(OBSERVED)
    assert {statement.hidden for statement in statements} == {None, "points", "entries", "imputed"}
    assert {id(program.layout) for program in drawn} == {id(layout) for layout in LAYOUTS.values()}
    assert {program.continuous for program in drawn} == {None, "global", "local", "slab", "collapsed"}
    assert {(program.part, program.scale != 1) for program in drawn if program.continuous not in (None, "collapsed")} == {
        (part, is_scaled) for part in ("AutoDelta", "AutoNormal") for is_scaled in (False, True)
    }
    assert {(program.style, program.vectorize) for program in drawn} == {
        *((None, choice) for choice in (None, True, False)),
        *((style, choice) for style in ("left", "branch") for choice in (None, False)),
    }
    assert {program.search for program in drawn} == set(SEARCHES)
    assert any(program.subsample is not None for program in drawn)
    assert any(program.is_minibatch for program in drawn)
