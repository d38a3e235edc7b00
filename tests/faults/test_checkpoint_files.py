"""Checkpoint files that are damaged, cannot be written, were left over or are in use: nothing is silent, and nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pyro
import pytest
import torch

from pyro_truncated import AutoTruncated
from pyro_truncated.guide import store
from pyro_truncated.models import BinarySparseCoding, DiscreteSparseCoding
from pyro_truncated.training import checkpoint_file, fit
from pyro_truncated.training.checkpoint import CheckpointWarning, load_checkpoint, save_checkpoint
from pyro_truncated.utils.budget import memory_budget
from tests.faults import runs


@contextlib.contextmanager
def full_disk(size: int = 1000):
    """No file of this process may grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def written(folder: Path, mode: str = "full", steps: int = 3, **options) -> Path:
    svi, args = runs.make(mode)
    fit(svi, *args, steps=steps, checkpoint=folder / "run.pt", **options)
    return folder / "run.pt"


# --- damage ---


def flip_bits(folder: Path, number: int) -> None:
    path = written(folder)
    content = path.read_bytes()
    chance = random.Random(0)
    for _ in range(number):
        bit = chance.randrange(8 * len(content))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        svi, args = runs.make("full")
        before = runs.state(svi)
        with pytest.raises(ValueError, match=r"run\.pt (is damaged|is not a checkpoint)"):
            fit(svi, *args, steps=4, checkpoint=path)
        runs.assert_same(before, runs.state(svi))


@pytest.mark.slow
def test_no_flipped_bit_goes_unnoticed(tmp_path):
    flip_bits(tmp_path, 15)


@pytest.mark.nightly
def test_none_of_a_thousand_flipped_bits_goes_unnoticed(tmp_path):
    flip_bits(tmp_path, 1000)


@pytest.mark.parametrize("length", [0, 1, 50, 4000, -1, -100])
def test_files_that_were_cut_short_are_refused(length, tmp_path):
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    svi, args = runs.make("full")
    with pytest.raises(ValueError, match=r"run\.pt is not a checkpoint written by save_checkpoint, or it was cut short"):
        fit(svi, *args, steps=4, checkpoint=path)


def test_a_file_of_something_else_with_a_checksum_is_refused(tmp_path):
    checkpoint_file.write(tmp_path / "run.pt", {"format": "pyro_truncated checkpoint 2"})
    with pytest.raises(ValueError, match="its layout is 2, this version reads layout 5"):
        load_checkpoint(tmp_path / "run.pt", runs.make("full")[0])


def spoilt(state, kind):
    words = state["populations.words"]
    if kind == "repeated":
        words[3, 1] = words[3, 0]
    elif kind == "beyond":
        words[2, 1, 0] |= 1 << 40
    elif kind == "floats":
        state["populations.words"] = words.double()
    elif kind == "log joint":
        state["populations.log_joint"] = state["populations.log_joint"][:, :2]
    return state


PROBLEMS = {
    "repeated": r"states repeat within 1 of 40 data points \(first: 3\)",
    "beyond": "bits set beyond",
    "floats": "words must be packed states",
    "log joint": r"their log joints \(40, 2\)",
}


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("values", [2, 3])
def test_populations_that_no_guide_can_have_are_not_loaded(kind, values):
    y = runs.data()
    model = BinarySparseCoding(9, 6) if values == 2 else DiscreteSparseCoding(9, 6, values=(-1.0, 0.0, 1.0))
    guide = AutoTruncated(model, num_states=8)
    guide(y)
    state = spoilt(guide.state_dict(), kind)
    for target in (guide, AutoTruncated(model, num_states=8)):
        with pytest.raises(RuntimeError, match=PROBLEMS[kind]):
            target.load_state_dict({name: value.clone() for name, value in state.items()})


def test_a_checkpoint_of_repeated_states_is_refused_and_nothing_changes(tmp_path):
    svi, args = runs.make("full")
    svi.step(*args)
    svi.guide.words[3, 1] = svi.guide.words[3, 0]
    save_checkpoint(tmp_path / "run.pt", svi)
    svi, args = runs.make("full")
    before = runs.state(svi)
    with pytest.raises(ValueError, match=r"(?s)run\.pt .*states repeat within 1 of 40 data points"):
        load_checkpoint(tmp_path / "run.pt", svi)
    runs.assert_same(before, runs.state(svi))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "gradients"])
def test_a_checkpoint_that_fails_half_way_changes_nothing(mode, tmp_path):
    path = written(tmp_path, mode)
    content = torch.load(path, weights_only=True)
    content["generators"]["cpu"] = torch.zeros(3, dtype=torch.uint8)
    checkpoint_file.write(path, content)
    svi, args = runs.make(mode)
    expected = [svi.step(*args) for _ in range(4)]
    svi, args = runs.make(mode)
    losses = [svi.step(*args) for _ in range(2)]
    before = runs.state(svi)
    with pytest.raises(ValueError, match=r"run\.pt does not fit this run, which is unchanged"):
        load_checkpoint(path, svi)
    runs.assert_same(before, runs.state(svi))
    # Optimiser and random numbers, too, are as they were.
    assert losses + [svi.step(*args) for _ in range(2)] == expected


# --- places that cannot be written to ---


def test_a_full_disk_is_a_warning_and_tried_again(tmp_path):
    path = written(tmp_path, steps=2)
    before = path.read_bytes()
    svi, args = runs.make("full")
    found = []

    def fills(training):
        found.append((training.steps, path.read_bytes() == before))
        limit = 1000 if training.steps in (3, 4) else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    with full_disk(-1), pytest.warns(CheckpointWarning, match=r"(?s)run\.pt.*After [34] steps it goes on, and tries again") as record:
        training = fit(svi, *args, steps=6, checkpoint=path, checkpoint_seconds=0.0, callbacks=[fills])
    assert len(record) == 2
    assert "File too large" in str(record[0].message)
    # What the third and the fourth step could not replace is still there at the fifth; the fifth was saved.
    assert found == [(3, True), (4, True), (5, True), (6, False)]
    assert training.steps == 6
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    svi, args = runs.make("full")
    assert fit(svi, *args, steps=6, checkpoint=path).record == training.record


@pytest.mark.parametrize("size", [0, 100, 1000, 10_000])
def test_a_checkpoint_that_does_not_fit_on_the_disk_says_where_and_why(size, tmp_path):
    svi, args = runs.make("full")
    svi.step(*args)
    with full_disk(size), pytest.raises(OSError, match=r"the checkpoint cannot be written: File too large: '.*run\.pt'") as error:
        save_checkpoint(tmp_path / "run.pt", svi)
    assert error.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())


def test_bad_destinations_are_refused_before_the_first_step(tmp_path):
    svi, args = runs.make("full")
    before = runs.state(svi)
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for place, error, message in (
        (tmp_path, IsADirectoryError, "must name a file, and this is a folder"),
        ("", IsADirectoryError, "must name a file"),
        ("/dev/null", ValueError, "/dev/null is a device"),
        (tmp_path / "pipe", ValueError, "is a device, a pipe or a socket"),
        (tmp_path / "file" / "run.pt", OSError, "folder cannot be made"),
        ("/proc/run.pt", OSError, "checkpoints cannot be written here"),
    ):
        with pytest.raises(error, match=message):
            fit(svi, *args, steps=1, checkpoint=place)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "pipe"]
    runs.assert_same(before, runs.state(svi))


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_without_the_right_to_write_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    svi, args = runs.make("full")
    with pytest.raises(PermissionError, match="checkpoints cannot be written here"):
        fit(svi, *args, steps=1, checkpoint=tmp_path / "run.pt")


def test_the_folder_is_on_the_disk_too_and_links_stay_links(tmp_path, monkeypatch):
    (tmp_path / "link.pt").symlink_to(tmp_path / "target.pt")
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}")), fsync(descriptor)))
    save_checkpoint(tmp_path / "link.pt", runs.make("full")[0])
    assert [Path(name).name.split(".")[0] for name in synced] == ["target", tmp_path.name]
    assert (tmp_path / "link.pt").is_symlink()
    load_checkpoint(tmp_path / "target.pt", runs.make("full")[0])


# --- memory ---


def anonymous() -> int:
    """Bytes of this process that are no pages of files."""
    return 1024 * int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")).split()[1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")
def test_what_is_read_stays_in_its_file_and_is_what_it_was(tmp_path):
    size = 2**25
    checkpoint_file.write(tmp_path / "run.pt", {"words": torch.arange(size // 8), "name": "first"})
    before = anonymous()
    held = checkpoint_file.read(tmp_path / "run.pt")
    assert held["words"][-1] == size // 8 - 1
    assert held["words"].sum() == (size // 8) * (size // 8 - 1) // 2
    assert anonymous() - before < size / 4
    # The next checkpoint takes the name, not the content.
    checkpoint_file.write(tmp_path / "run.pt", {"words": torch.zeros(size // 8, dtype=torch.int64), "name": "second"})
    assert held["words"][-1] == size // 8 - 1


@pytest.mark.slow
def test_populations_in_files_go_on_from_a_checkpoint_piece_by_piece(tmp_path, monkeypatch):
    expected = fit(*unpacked("files"), steps=6, progress=False)
    learned = runs.state(expected.svi)
    fit(*unpacked("files"), steps=3, progress=False, checkpoint=tmp_path / "run.pt")
    pieces = []
    monkeypatch.setattr(store, "release", pieces.append)
    with memory_budget(1000):
        training = fit(*unpacked("files"), steps=6, progress=False, checkpoint=tmp_path / "run.pt")
    assert training.record == expected.record
    runs.assert_same(learned, runs.state(training.svi))
    # Of 40 data points with 8 states of one word, some at a time.
    assert len(pieces) > 4


def unpacked(mode: str):
    svi, args = runs.make(mode)
    return svi, *args


# --- what is left, and who else is there ---


def test_what_killed_runs_left_is_removed(tmp_path):
    path = written(tmp_path, steps=1)
    for name in ("run.pt.123.tmp", "run.pt.lock", "run.pt.123.tmp.kept", "run_pt.123.tmp", "other.pt.123.tmp"):
        (tmp_path / name).write_text("left over")
    svi, args = runs.make("full")
    fit(svi, *args, steps=2, checkpoint=path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other.pt.123.tmp", "run.pt", "run.pt.123.tmp.kept", "run_pt.123.tmp"]


HOLDER = """
import sys
from pathlib import Path
from pyro_truncated.training.checkpoint_file import claim_path
with claim_path(Path(sys.argv[1])):
    print("claimed", flush=True)
    sys.stdin.read()
"""


@pytest.mark.nightly
def test_two_processes_on_one_checkpoint(tmp_path):
    path = tmp_path / "run.pt"
    svi, args = runs.make("full")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "claimed\n"
        with pytest.raises(RuntimeError, match=r"another run is writing checkpoints to .*run\.pt"):
            fit(svi, *args, steps=1, checkpoint=path)
    finally:
        holder.kill()
        holder.communicate()
    # The one that was killed does not hold it.
    assert fit(svi, *args, steps=1, checkpoint=path).steps == 1
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_two_runs_of_one_process_on_one_checkpoint(tmp_path):
    path = tmp_path / "run.pt"

    def other(training):
        svi, args = runs.make("full")
        with pytest.raises(RuntimeError, match="another run is writing"):
            fit(svi, *args, steps=1, checkpoint=path)
        pyro.clear_param_store()

    svi, args = runs.make("full")
    fit(svi, *args, steps=1, checkpoint=path, callbacks=[other])


def test_seconds_between_checkpoints_must_be_a_number(tmp_path):
    svi, args = runs.make("full")
    for seconds, error in ((math.nan, ValueError), (-1.0, ValueError), ("30", TypeError), (None, TypeError)):
        with pytest.raises(error, match="checkpoint_seconds must be a number"):
            fit(svi, *args, steps=1, checkpoint=tmp_path / "run.pt", checkpoint_seconds=seconds)
        with pytest.raises(error, match="checkpoint_seconds must be a number"):
            fit(svi, *args, steps=1, checkpoint_seconds=seconds)
    assert not list(tmp_path.iterdir())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(svi, *args, steps=2, checkpoint=tmp_path / "run.pt", checkpoint_seconds=math.inf)
