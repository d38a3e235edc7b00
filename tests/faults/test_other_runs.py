"""A checkpoint continues the run that wrote it, to the same numbers, and no other: what differs is named before anything changes."""

from __future__ import annotations

import functools
import re
import time

import numpy as np
import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam, ClippedAdam, ExponentialLR

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, SampledSearch, Truncated_ELBO
from pyro_truncated.models import BinarySparseCoding, MaximalCauses
from pyro_truncated.training import fit
from pyro_truncated.training.checkpoint import load_checkpoint, save_checkpoint
from pyro_truncated.training.fingerprint import describe, describe_arguments
from tests.faults import runs


@pytest.mark.nightly(keep=5)
@pytest.mark.slow
@pytest.mark.parametrize("mode", runs.MODES)
def test_every_kind_of_run_goes_on_to_the_same_numbers(mode, tmp_path):
    def dies(training):
        if training.steps == 4:
            raise KeyboardInterrupt

    svi, args = runs.make(mode)
    expected, learned = fit(svi, *args, steps=6).record, runs.state(svi)
    svi, args = runs.make(mode)
    with pytest.raises(KeyboardInterrupt):
        fit(svi, *args, steps=6, checkpoint=tmp_path / "run.pt", checkpoint_seconds=0, callbacks=[dies])
    svi, args = runs.make(mode)
    torch.rand(11)
    assert fit(svi, *args, steps=6, checkpoint=tmp_path / "run.pt").record == expected
    runs.assert_same(learned, runs.state(svi))


def halved(step):
    return 1.0 + 0.5**step


def make(kind=BinarySparseCoding, optimizer=ClosedForm, num_states=8, search=None, temperature=1.0, guide=AutoTruncated, **options) -> SVI:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = kind(9, 6).initialize(runs.data())
    search = EvolutionarySearch(parents=3, children=3) if search is None else search
    optim = optimizer(model) if optimizer is ClosedForm else optimizer
    return SVI(model, guide(model, num_states), optim, Truncated_ELBO(search, temperature=temperature, **options))


class OtherGuide(AutoTruncated):
    pass


def changed():
    y = runs.data()
    y[7, 2] += 1e-3
    return y


ORIGINAL = {"y": runs.data(), "batch_size": 10}
OTHERS = {
    "model": ({"kind": MaximalCauses}, {}, "model: BinarySparseCoding(", "MaximalCauses("),
    "guide": ({"guide": OtherGuide}, {}, "guide: AutoTruncated(", "OtherGuide("),
    "optimizer": ({"optimizer": Adam({"lr": 0.1})}, {}, "optimizer: ClosedForm(", "Adam"),
    "search": ({"search": SampledSearch(4)}, {}, "search: EvolutionarySearch(", "SampledSearch("),
    "parents": ({"search": EvolutionarySearch(parents=4, children=3)}, {}, "parents=3", "parents=4"),
    "temperature": ({"temperature": halved}, {}, "temperature=1.0", "temperature=halved"),
    "search_steps": ({"search_steps": 2}, {}, "search_steps=1", "search_steps=2"),
    "one entry": ({}, {"y": changed()}, "argument y: float32(40, 9)", "with hash"),
    "order": ({}, {"y": runs.data().flip(0)}, "argument y: float32(40, 9)", "with hash"),
    "precision": ({}, {"y": runs.data().double()}, "argument y: float32(40, 9)", "float64(40, 9)"),
    "batch size": ({}, {"batch_size": 20}, "argument batch_size: 10", "20"),
    "argument": ({}, {"num_data": 40}, "argument num_data: absent", "40"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.nightly(keep="values")
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("steps", [3, 5], ids=["finished", "longer"])
def test_another_run_is_refused_by_name_and_nothing_changes(name, steps, tmp_path):
    path = tmp_path / "run.pt"
    fit(make(), **ORIGINAL, steps=3, checkpoint=path)
    content = path.read_bytes()
    parts, arguments, saved, now = OTHERS[name]
    svi = make(**parts)
    before, drawn = runs.state(svi), torch.get_rng_state()
    with pytest.raises(
        ValueError, match=f"written by another run: .*{re.escape(saved)}.* in the checkpoint, .*{re.escape(now)}.* now.*may_differ="
    ):
        fit(svi, **{**ORIGINAL, **arguments}, steps=steps, checkpoint=path)
    runs.assert_same(before, runs.state(svi))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert path.read_bytes() == content


def test_other_learning_rates_clipping_and_schedules_are_other_optimisers(tmp_path):
    made = {
        "lr": Adam({"lr": 0.1}),
        "lr 2": Adam({"lr": 0.2}),
        "clipped": Adam({"lr": 0.1}, {"clip_norm": 1.0}),
        "other": ClippedAdam({"lr": 0.1}),
        "falling": ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.1}, "gamma": 0.9}),
        "falling faster": ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.1}, "gamma": 0.8}),
        "by name": Adam(lambda name: {"lr": 0.1}),
    }
    assert len({describe(optimizer) for optimizer in made.values()}) == len(made)


def test_what_only_the_loop_sees_may_change(tmp_path):
    path = tmp_path / "run.pt"
    fit(make(), **ORIGINAL, steps=3, checkpoint=path)
    seen = []
    options = {
        "patience": 50,
        "tolerance": 1e-9,
        "progress": False,
        "callbacks": [lambda training: seen.append(training.steps)],
        "checkpoint_seconds": 0,
    }
    training = fit(make(), **ORIGINAL, steps=5, checkpoint=path, **options)
    assert seen == [4, 5]
    assert training.record == fit(make(), **ORIGINAL, steps=5).record


def test_what_may_differ_may(tmp_path):
    path = tmp_path / "run.pt"
    first = fit(make(), **ORIGINAL, steps=3, checkpoint=path)
    other = {"search": EvolutionarySearch(parents=4, children=3), "optimizer": Adam({"lr": 0.1})}
    with pytest.raises(ValueError, match=r"may_differ=\['optimizer', 'search'\]"):
        fit(make(**other), **ORIGINAL, steps=4, checkpoint=path)
    svi = make(**other)
    training = fit(svi, **ORIGINAL, steps=4, checkpoint=path, may_differ=["optimizer", "search"])
    assert training.steps == 4
    assert training.record["free_energy"][:3] == first.record["free_energy"]
    # From now on it is the run with the other parts.
    assert fit(make(**other), **ORIGINAL, steps=5, checkpoint=path).steps == 5
    with pytest.raises(ValueError, match=r"may_differ names \['lr'\]"):
        fit(make(**other), **ORIGINAL, steps=6, checkpoint=path, may_differ=["lr"])


def test_checkpoints_saved_by_hand_know_the_run_too(tmp_path):
    svi = make(optimizer=Adam({"lr": 0.1}))
    svi.step(**ORIGINAL)
    save_checkpoint(tmp_path / "run.pt", svi)
    with pytest.raises(ValueError, match=r"written by another run: optimizer: PyroOptim\(.*lr: 0\.1.*lr: 0\.2"):
        load_checkpoint(tmp_path / "run.pt", make(optimizer=Adam({"lr": 0.2})))
    load_checkpoint(tmp_path / "run.pt", make(optimizer=Adam({"lr": 0.1})))


@pytest.mark.slow
def test_an_optimiser_that_has_taken_steps_takes_the_state_of_the_checkpoint(tmp_path):
    svi = make(optimizer=Adam({"lr": 0.1}))
    losses = [svi.step(**ORIGINAL) for _ in range(6)]
    svi = make(optimizer=Adam({"lr": 0.1}))
    for _ in range(3):
        svi.step(**ORIGINAL)
    save_checkpoint(tmp_path / "run.pt", svi)
    for _ in range(4):
        svi.step(**ORIGINAL)
    load_checkpoint(tmp_path / "run.pt", svi)
    assert [svi.step(**ORIGINAL) for _ in range(3)] == losses[3:]


class Holder:
    def __init__(self, value, function):
        self.value, self.function, self.counter = value, function, 0


def test_descriptions_know_values_and_names_but_no_addresses_and_nothing_that_changes():
    first, second = Holder(3, lambda: 1), Holder(3, lambda: 1)
    second.counter = 7
    assert describe(first) == describe(second)
    assert "0x" not in describe(first)
    assert describe(first) != describe(Holder(4, lambda: 1))
    assert describe(functools.partial(halved, step=2)) != describe(functools.partial(halved, step=3))
    assert describe(torch.nn.Linear(2, 3)) != describe(torch.nn.Linear(3, 3))
    svi, args = runs.make("gradients")
    before = [describe(part) for part in (svi.model, svi.guide, svi.optim, svi.loss.__self__)]
    svi.step(*args)
    assert [describe(part) for part in (svi.model, svi.guide, svi.optim, svi.loss.__self__)] == before


def hashed(*args, **kwargs):
    return list(describe_arguments(args, kwargs).values())


def test_hashes_are_those_of_the_entries_in_whatever_they_come():
    y = runs.data()
    (one,) = hashed(y)
    assert [one] == hashed(y.clone()) == hashed(y.numpy()) == hashed(y.mT.contiguous().mT)
    others = [y[:-1], y + 1e-3, y.half(), y.reshape(-1), y.bool(), torch.complex(y, y), [y, 1], [y, 2], {"a": y}, torch.tensor(1.0)]
    assert len({*hashed(*others), one}) == len(others) + 1
    assert hashed(torch.zeros(0, 3), y.to_sparse(), torch.zeros(2, dtype=torch.bfloat16), np.array(["a", "b"]), object)


@pytest.mark.slow
def test_hashing_is_fast():
    y = torch.rand(2**25)
    start = time.perf_counter()
    hashed(y)
    # 128 MiB at 100 MiB/s; it is ten times faster on an idle machine.
    assert time.perf_counter() - start < 1.3 * 8
