"""``fit`` and ``fit_restarts`` on several processes: the first one decides, and an error of one ends all."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from pyro_truncated import distributed, fit, fit_restarts
from pyro_truncated.distributed import OtherProcessError
from tests.distributed.test_together import data, made


def fitted() -> tuple[Any, ...]:
    y = distributed.shard(data())
    _, svi = made(y)
    calls = []

    def stops(training):
        calls.append(training.steps)
        # Only the first one's word counts.
        return training.steps == (3 if distributed.rank() == 0 else 2) or {}

    training = fit(svi, y, steps=10, callbacks=[stops], batches=distributed.Batches(y, 10, block=4))
    return training.record["free_energy"], training.stopped_early, calls


def test_the_first_process_decides_when_a_run_ends(crew):
    found = crew.results(3, fitted)
    assert all(record == found[0][0] and early and calls == [1, 2, 3] for record, early, calls in found)


def hurried(folder: str) -> tuple[Any, ...]:
    y = distributed.shard(data())
    _, svi = made(y)
    is_first, start = distributed.rank() == 0, time.monotonic()

    def until(training):
        # A limit of wall-clock time, which each process measures for itself; the others are slow, and theirs is over at once.
        time.sleep(0.0 if is_first else 0.02)
        return time.monotonic() - start > 0.3 and training.steps > 5 if is_first else True

    # So is what others think of patience.
    settings = {"patience": None if is_first else 1, "tolerance": 0.0 if is_first else 1e9, "checkpoint_seconds": 0.1 if is_first else 0.0}
    training = fit(svi, y, steps=100_000, callbacks=[until], checkpoint=f"{folder}/run.pt", progress=False, **settings)
    return training.steps, training.record["free_energy"], training.stopped_early, time.monotonic() - start


def test_the_clock_of_the_first_process_counts(crew, tmp_path):
    (steps, record, early, seconds), *others = crew.results(3, hurried, str(tmp_path))
    assert early
    assert steps > 5
    assert seconds >= 0.3
    assert all(other[:3] == (steps, record, True) for other in others)
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    assert len(state["history"]["record"]["free_energy"]) == steps


def fails_in_the_middle() -> Any:
    y = distributed.shard(data())
    _, svi = made(y)

    def breaks(training):
        if distributed.rank() == 1 and training.steps == 2:
            raise ZeroDivisionError("in the callback of one")

    start = time.monotonic()
    try:
        return fit(svi, y, steps=10, callbacks=[breaks])
    finally:
        assert time.monotonic() - start < 30


def test_an_error_of_one_process_ends_all(crew):
    first, second = crew.run(2, fails_in_the_middle)
    assert isinstance(second, ZeroDivisionError)
    assert isinstance(first, OtherProcessError)
    assert "process 1 failed with ZeroDivisionError: in the callback of one" in str(first)


def restarted() -> tuple[list[list[float]], int, list[torch.Tensor]]:
    y = distributed.shard(data())
    runs = fit_restarts(lambda seed: made(y, seed)[1], y, restarts=3, steps=4, progress=False)
    return runs.record["free_energy"].tolist(), runs.best, [value.detach() for value in runs.training.svi.model.parameters()]


def test_restarts_are_those_of_one_process(crew):
    record, best, parameters = restarted()
    for found, own, held in crew.results(2, restarted):
        assert found == [pytest.approx(run, rel=1e-12) for run in record]
        assert own == best
        torch.testing.assert_close(held, parameters, rtol=1e-10, atol=1e-10)
