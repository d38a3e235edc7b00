"""Checkpoints that know no number of processes: saved by so many, continued by others, to the numbers of an uninterrupted run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO, distributed, fit
from pyro_truncated.datasets import linear_bars
from pyro_truncated.distributed import OtherProcessError
from pyro_truncated.models import BinarySparseCoding

KINDS = ("full", "incremental", "online", "gradient")


def data(scale: float = 1.0) -> torch.Tensor:
    y = scale * linear_bars(61, 3, mean_active=2.0, generator=torch.Generator().manual_seed(0)).data.double()
    y[::5, 1] = torch.nan
    return y


def trained(folder: str | None, kind: str, steps: int, scale: float = 1.0) -> tuple[list[float], torch.Tensor]:
    """Trains, from a checkpoint if there is one; the free energies, and the states of this process's data points."""
    pyro.clear_param_store()
    pyro.set_rng_seed(3)
    y = distributed.shard(data(scale))
    model = BinarySparseCoding(9, 6, dtype=torch.float64).initialize(y)
    gradient = distributed.AllReduced(Adam({"lr": 0.05}))
    driver = gradient if kind == "gradient" else ClosedForm(model, minibatch="online" if kind == "online" else None)
    svi = SVI(model, AutoTruncated(model, num_states=8), driver, Truncated_ELBO(EvolutionarySearch(3, 2)))
    batches = distributed.Batches(y, 20, block=5) if kind in ("incremental", "online") else None
    path = None if folder is None else Path(folder) / "run.pt"
    training = fit(svi, y, steps=steps, checkpoint=path, batches=batches, progress=False)
    return training.record["free_energy"], svi.guide.words


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_three_processes_goes_on_with_any_number(kind, crew, tmp_path):
    expected, words = trained(None, kind, 9)
    crew.results(3, trained, str(tmp_path / "saved"), kind, 4)
    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == ["run.pt", "run.pt.rows"]
    for number in (1, 2, 4):
        folder = str(shutil.copytree(tmp_path / "saved", tmp_path / str(number)))
        found = [trained(folder, kind, 9)] if number == 1 else crew.results(number, trained, folder, kind, 9)
        assert all(record == pytest.approx(expected, rel=1e-12) for record, _ in found)
        assert torch.equal(torch.cat([own for _, own in found]), words)


def test_a_run_of_one_process_goes_on_with_two(crew, tmp_path):
    expected, words = trained(None, "incremental", 7)
    trained(str(tmp_path), "incremental", 3)
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    found = crew.results(2, trained, str(tmp_path), "incremental", 7)
    assert all(record == pytest.approx(expected, rel=1e-12) for record, _ in found)
    assert torch.equal(torch.cat([own for _, own in found]), words)


def test_other_data_and_damaged_rows_are_refused(crew, tmp_path):
    crew.results(2, trained, str(tmp_path), "full", 2)
    for found in crew.run(2, trained, str(tmp_path), "full", 4, 2.0):
        assert isinstance(found, (ValueError, OtherProcessError))
        assert "was written by another run: argument 1: float64(61, 9) with hash" in str(found)
    rows = next((tmp_path / "run.pt.rows").glob("*/words-*"))
    content = bytearray(rows.read_bytes())
    content[-3] ^= 1
    rows.write_bytes(content)
    for found in crew.run(2, trained, str(tmp_path), "full", 4):
        assert isinstance(found, (ValueError, OtherProcessError))
        assert "is damaged" in str(found)


def blocked(folder: str) -> str:
    # A file where the folder of the rows shall be.
    if distributed.rank() == 0:
        Path(folder, "run.pt.rows").write_text("in the way")
    distributed.gather(0)
    with pytest.warns(UserWarning, match=r"After 2 steps it has ended, and its last steps are not saved") as caught:
        record, _ = trained(folder, "full", 2)
    assert len(record) == 2
    return str(caught[0].message)


def test_what_cannot_be_written_is_a_warning_on_all(crew, tmp_path):
    crew.results(2, blocked, str(tmp_path))
    assert not (tmp_path / "run.pt").exists()


SCRIPT = """
import os, signal, sys
from pathlib import Path
from pyro_truncated import distributed
import tests.distributed.test_checkpoints as own

distributed.start()

def dies(training):
    if distributed.rank() == 1 and training.steps == 3 and sys.argv[2] == "dies":
        Path(sys.argv[1], "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

fit = own.fit
own.fit = lambda *args, **kwargs: fit(*args, callbacks=[dies], checkpoint_seconds=0, **kwargs)
record, _ = own.trained(sys.argv[1], "incremental", 6)
if distributed.rank() == 0:
    print(record)
"""


def launch(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONWARNINGS": "ignore"}
    return subprocess.run([*command, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.nightly
def test_a_run_of_which_one_process_is_killed_ends_and_goes_on(tmp_path):
    script, expected = tmp_path / "script.py", trained(None, "incremental", 6)[0]
    script.write_text(SCRIPT)
    done = launch(script, str(tmp_path), "dies")
    assert done.returncode != 0
    assert time.time() - (tmp_path / "killed").stat().st_mtime < 60
    assert (tmp_path / "run.pt").exists()
    done = launch(script, str(tmp_path), "lives")
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout.strip().splitlines()[-1]) == pytest.approx(expected, rel=1e-12)
