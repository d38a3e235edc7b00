"""Kills training runs of every mode at random moments and lets them go on: ``python -m tests.faults.kills --kills 200 --inside 56``.

Each run saves a checkpoint after every step. It is killed (``SIGKILL``) at a random moment or inside a write, again and again, until it has
reached its end. After every kill the checkpoint must be whole, hold the numbers of a run that was never interrupted, and all steps but for
the one that was not saved yet; at the end, all that was learned must be the same bit by bit. Runs are forked, so that none has to import
and none has to load kernels: a life takes a tenth of a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pyro_truncated.ops import backend
from pyro_truncated.training import Training, checkpoint_file, fit
from tests.faults import runs

STEPS = 8
# Of the deaths outside of writes, how many come before the first step, while the run is made or read from its checkpoint.
_EARLY = 0.2


@dataclasses.dataclass
class Tally:
    """What happened to runs of one kind.

    Attributes:
        kills: number of kills.
        inside: those of them inside a write.
        before: those before the first checkpoint.
        ends: number of runs that reached their end: to the numbers of one that was never interrupted.
        left: temporary files that kills left, all of which were removed by the next run.
    """

    kills: int = 0
    inside: int = 0
    before: int = 0
    ends: int = 0
    left: int = 0


def torment(mode: str, kills: int, inside: int, seed: int = 0) -> Tally:
    """Kills runs of one kind so many times, some of them inside a write, and lets the last one come to its end.

    Raises:
        AssertionError: if something was torn, lost or is not the same.
    """
    chance, tally = random.Random(f"{mode} {seed}"), Tally()
    svi, args = runs.make(mode)
    record = fit(svi, *args, steps=STEPS, progress=False).record
    learned, length = runs.state(svi), _measure(mode)
    while tally.kills < kills:
        with tempfile.TemporaryDirectory() as folder:
            while not _lives_on(mode, Path(folder), record, chance, tally, length, (kills, inside)):
                pass
            end = torch.load(Path(folder, "end.pt"), weights_only=True)
            assert end["record"] == record, f"{mode}: the end is not that of an uninterrupted run"
            runs.assert_same(learned, end["state"])
            assert sorted(os.listdir(folder)) == ["end.pt", "run.pt"], os.listdir(folder)
            tally.ends += 1
    return tally


@dataclasses.dataclass
class _Length:
    """How long a forked run is: seconds to its first report, seconds from there to its end, pieces that a checkpoint is written in."""

    start: float
    steps: float
    pieces: int


def _measure(mode: str) -> _Length:
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        child, pipe = _fork(mode, Path(folder), None)
        select.select([pipe], [], [])
        first = time.monotonic()
        _drain(pipe)
        os.waitpid(child, 0)
        end = time.monotonic()
        return _Length(first - begin, end - first, _count_pieces(Path(folder, "run.pt")))


def _count_pieces(path: Path) -> int:
    """In how many pieces a checkpoint of this content is written."""
    pieces = []

    class Counted(io.BytesIO):
        def write(self, data: Any) -> int:
            pieces.append(len(data))
            return super().write(data)

    # An own class has no file descriptor to write to directly, as the one that hashes.
    torch.save(checkpoint_file.read(path), checkpoint_file._HashingFile(Counted()))  # type: ignore[arg-type]
    return len(pieces)


def _fork(mode: str, folder: Path, moment: Callable[[], None] | None) -> tuple[int, int]:
    """A child that trains, and the pipe on which it tells of each step."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _live(mode, folder, write, moment)
    os.close(write)
    return child, read


def _lives_on(
    mode: str, folder: Path, record: dict[str, list[float]], chance: random.Random, tally: Tally, length: _Length, wanted: tuple[int, int]
) -> bool:
    """One life of a run; returns whether it reached its end."""
    kills, inside = wanted
    is_spared = tally.kills >= kills
    dies_inside = not is_spared and tally.inside < inside and chance.random() < inside / kills + 0.2
    child, pipe = _fork(mode, folder, _moment_inside(chance, length.pieces) if dies_inside else None)
    if not is_spared and not dies_inside:
        _wait(pipe, chance, length)
        os.kill(child, signal.SIGKILL)
    steps = _drain(pipe)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        return True
    assert status == signal.SIGKILL, f"{mode}: a run ended by itself with status {status}"
    tally.kills += 1
    tally.inside += dies_inside
    tally.left += sum(name.endswith(".tmp") for name in os.listdir(folder))
    tally.before += not _check(folder / "run.pt", record, steps)
    return False


def _wait(pipe: int, chance: random.Random, length: _Length) -> None:
    """Until a random moment of a life: a few before its first step, most from there to its end."""
    if chance.random() < _EARLY:
        time.sleep(chance.uniform(0, length.start))
    else:
        select.select([pipe], [], [])
        time.sleep(chance.uniform(0, length.steps))


def _check(path: Path, record: dict[str, list[float]], steps: int) -> bool:
    """Whether there is a checkpoint; it must hold all steps that were begun after the last one had been saved."""
    if not path.exists():
        assert steps <= 1, f"{steps} steps were taken, and there is no checkpoint"
        return False
    held = checkpoint_file.read(path)["history"]["record"]["free_energy"]
    assert held == record["free_energy"][: len(held)]
    assert len(held) >= steps - 1, f"{steps} steps were taken, {len(held)} are in the checkpoint"
    return True


def _live(mode: str, folder: Path, pipe: int, moment: Callable[[], None] | None) -> None:
    """Trains to the end in this process, and ends it."""
    try:
        if moment is not None:
            moment()
        svi, args = runs.make(mode)

        def report(training: Training) -> None:
            os.write(pipe, bytes([training.steps]))

        training = fit(svi, *args, steps=STEPS, progress=False, checkpoint=folder / "run.pt", checkpoint_seconds=0.0, callbacks=[report])
        end: dict[str, Any] = {"record": training.record, "state": runs.state(svi)}
        torch.save(end, folder / "end.pt")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _moment_inside(chance: random.Random, pieces: int) -> Callable[[], None]:
    """Arranges a process's death inside a write: between two of its pieces, or about the renaming."""
    save, place, last = (
        chance.randrange(STEPS // 2),
        chance.choice(["pieces"] * 4 + ["before renaming", "after renaming"]),
        chance.randrange(pieces),
    )

    def arrange() -> None:
        write, replace = checkpoint_file._HashingFile.write, os.replace
        seen = {"saves": 0, "pieces": 0}

        def dying_write(self: Any, data: bytes) -> int:
            seen["pieces"] += 1
            if place == "pieces" and seen["saves"] == save and seen["pieces"] > last:
                write(self, bytes(data)[: len(data) // 2])
                self.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return write(self, data)

        def dying_replace(source: Any, target: Any) -> None:
            if place == "before renaming" and seen["saves"] == save:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)
            if place == "after renaming" and seen["saves"] == save:
                os.kill(os.getpid(), signal.SIGKILL)
            seen.update(saves=seen["saves"] + 1, pieces=0)

        checkpoint_file._HashingFile.write = dying_write  # type: ignore[method-assign]
        os.replace = dying_replace

    return arrange


def _drain(pipe: int) -> int:
    """The last number of steps that a run has told before it ended."""
    with os.fdopen(pipe, "rb") as file:
        told = file.read()
    return told[-1] if told else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="kills of each mode")
    parser.add_argument("--inside", type=int, default=56, help="those of them inside a write")
    parser.add_argument("--modes", nargs="*", default=list(runs.MODES))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    # The kernels of forked children, which are compiled and loaded once, here.
    backend.enter_child()
    print(f"{'mode':12} kills inside before-first left-temporaries ends-that-are-the-same", flush=True)
    for mode in arguments.modes:
        tally = torment(mode, arguments.kills, arguments.inside)
        print(f"{mode:12} {tally.kills:5} {tally.inside:6} {tally.before:12} {tally.left:16} {tally.ends:23}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
