"""Every foreign model: numbers against brute force, or a refusal by name; some habits by default, all with ``make nightly``."""

from __future__ import annotations

import re

import pytest

from tests.foreign import table
from tests.foreign.catalogue import MODELS, OPEN
from tests.foreign.habits import HABITS, PyroLimitError
from tests.foreign.harness import as_a_new_user, compare

ACCEPTED = [name for name in MODELS if name not in OPEN]
PAIRS = [(name, habit) for name in ACCEPTED for habit in HABITS]
# A stride that shares no factor with the number of habits: all of them come up, on models from every file.
SOME = PAIRS[::37]
# Counts are cut off on both sides.
pytestmark = pytest.mark.filterwarnings("ignore:.*larger counts are left out")


def test_there_are_enough_models_and_each_names_its_source():
    assert len(MODELS) >= 60
    assert all(make.__doc__ for make in MODELS.values())
    assert set(OPEN) <= set(MODELS)


@pytest.mark.nightly(keep=12)
@pytest.mark.slow
@pytest.mark.parametrize("name", ACCEPTED)
def test_loss_gradient_and_marginals_equal_brute_force(name):
    with as_a_new_user(name) as case:
        if case.refused is not None:
            with pytest.raises((ValueError, NotImplementedError), match=case.refused):
                compare(case)
            return
        errors = compare(case)
    assert errors.worst < 1e-8, errors


@pytest.mark.nightly(keep=4)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "habit"), SOME)
def test_some_habits_on_some_models(name, habit):
    check(name, habit)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "habit"), PAIRS)
def test_every_habit_on_every_model(name, habit):
    check(name, habit)


def check(name: str, habit: str) -> None:
    """Puts a model through a habit; what cannot work says so with the message that the model announces."""
    with as_a_new_user(name) as case:
        if case.refused is not None:
            pytest.skip("refused, see the table")
        if habit in case.limits:
            with pytest.raises((ValueError, NotImplementedError), match=case.limits[habit]):
                HABITS[habit](case)
            return
        try:
            HABITS[habit](case)
        except PyroLimitError as limit:
            pytest.skip(f"Pyro itself cannot: {limit}")


def test_the_table_is_complete():
    text = table.PATH.read_text()
    listed = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(MODELS), "run python -m tests.foreign.table"
