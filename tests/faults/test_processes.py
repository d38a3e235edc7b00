"""Compiled kernels where processes fork, where nothing can be written, and where several processes compile at once."""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import resource
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch

from pyro_truncated import ops
from pyro_truncated.ops import compiled
from pyro_truncated.ops.compiled import compilation
from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.search.preselection import space_options
from pyro_truncated.states import Population, StateSpace
from pyro_truncated.warmup import warm_up

TRAINING = """
import os, sys, warnings
import pyro, torch
from pyro.infer import SVI
from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.models import BinarySparseCoding

# Python 3.12 and newer warn of every fork of a process with threads.
warnings.filterwarnings("ignore", category=DeprecationWarning)
torch.set_num_threads(int(sys.argv[1]))

def train():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    y = torch.rand(1000, 30)
    model = BinarySparseCoding(30, 12).initialize(y)
    svi = SVI(model, AutoTruncated(model, num_states=20), ClosedForm(model), Truncated_ELBO(EvolutionarySearch(parents=4)))
    return [svi.step(y) for _ in range(3)]
"""

FORK = """
expected = train()
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.write(write, repr(train()).encode())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
found = eval(os.read(read, 10_000))
# Products of matrices are summed in another order on one thread.
assert all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(found, expected)), (found, expected)
"""

# Torch has started its threads, but kernels are loaded by the child.
FORK_FIRST = """
torch.rand(1000, 1000) @ torch.rand(1000, 1000)
child = os.fork()
if child == 0:
    assert "numba" not in sys.modules
    train()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""

LOADER = """
class Losses(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return train()[-1]

if __name__ == "__main__":
    expected = train()[-1]
    found = list(torch.utils.data.DataLoader(Losses(), batch_size=None, num_workers=2, multiprocessing_context=sys.argv[2]))
    assert all(abs(value - expected) <= 1e-5 * abs(expected) for value in found), (found, expected)
"""

# A run among forked ones dies while it holds the lock of tqdm's bars, which all of them share.
KILLED_BAR = """
import signal
from tqdm.auto import tqdm
from pyro_truncated import fit

def fitted(progress):
    y = torch.rand(50, 9)
    model = BinarySparseCoding(9, 4).initialize(y)
    svi = SVI(model, AutoTruncated(model, num_states=8), ClosedForm(model), Truncated_ELBO(EvolutionarySearch()))
    fit(svi, y, steps=1, progress=progress)

tqdm.get_lock()
child = os.fork()
if child == 0:
    tqdm.get_lock().acquire()
    os.kill(os.getpid(), signal.SIGKILL)
assert os.waitpid(child, 0)[1] == signal.SIGKILL
for progress in (False, True):
    child = os.fork()
    if child == 0:
        fitted(progress)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    fitted(progress)
"""


def run(script: str, *arguments: str, folder: Path, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(script)
    return subprocess.run(
        [sys.executable, str(file), *arguments],
        env={**os.environ, "OMP_WAIT_POLICY": "passive", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_forked_child_trains_as_its_parent_does(threads, tmp_path):
    done = run(TRAINING + FORK, threads, folder=tmp_path, NUMBA_NUM_THREADS=threads)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_may_be_the_first_to_call_kernels(tmp_path):
    done = run(TRAINING + FORK_FIRST, "2", folder=tmp_path, NUMBA_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_workers_of_a_data_loader_may_call_kernels(tmp_path):
    done = run(TRAINING + LOADER, "2", "fork", folder=tmp_path, NUMBA_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_run_that_is_killed_does_not_keep_others_waiting_for_its_progress_bar(tmp_path):
    done = run(TRAINING + KILLED_BAR, "1", folder=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def fresh_warning():
    compilation._say.cache_clear()
    yield
    compilation._say.cache_clear()


def double(x):
    return 2 * x


@pytest.mark.skipif(not hasattr(numba.core.config, "CACHE_LOCATOR_CLASSES"), reason="numba 0.60 always finds a folder")
def test_without_a_folder_for_its_cache_a_function_is_compiled_and_one_line_logged(monkeypatch, caplog, fresh_warning):
    monkeypatch.setattr(numba.core.config, "CACHE_LOCATOR_CLASSES", "UserProvidedCacheLocator")
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", "")
    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(cache=True)(double)
    with caplog.at_level(logging.INFO):
        assert [njit(cache=True)(double)(3), njit(double, cache=True)(4)] == [6, 8]
    (record,) = caplog.records
    assert "NUMBA_CACHE_DIR" in record.message


@pytest.mark.slow
def test_a_function_is_compiled_anew_once_one_that_it_calls_has_changed_in_another_file(monkeypatch, tmp_path):
    def defined(name, source, **names):
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        # What numba keeps of a function names its module, without which it can be read only while the first one is in memory.
        exec(compile(source, path, "exec"), names | {"njit": njit, "__name__": __name__}, found := {})
        return found["function"]

    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path / "cache"))
    results = []
    for factor in (2, 2, 3):
        inner = defined(f"by_{factor}", f"@njit(cache=True)\ndef function(x):\n    return {factor} * x\n")
        outer = defined("outer", "@njit(cache=True)\ndef function(x):\n    return inner(x)\n", inner=inner)
        results.append((outer(5), sum(outer.stats.cache_hits.values())))
    assert results == [(10, 0), (10, 1), (15, 0)]


@pytest.mark.slow
def test_a_function_is_compiled_anew_once_its_own_file_says_something_else_not_once_it_is_newer(monkeypatch, tmp_path):
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path / "cache"))
    path, results = tmp_path / "own.py", []
    for factor in (2, 2, 3, 2):
        path.write_text(source := f"@njit(cache=True)\ndef function(x):\n    return {factor} * x\n")
        os.utime(path, (1e9 + len(results), 1e9 + len(results)))
        exec(compile(source, path, "exec"), {"njit": njit, "__name__": __name__}, found := {})
        results.append((found["function"](5), sum(found["function"].stats.cache_hits.values())))
    assert results == [(10, 0), (10, 1), (15, 0), (10, 0)]


@pytest.mark.slow
def test_a_function_is_compiled_anew_once_an_intrinsic_that_it_calls_has_changed(monkeypatch, tmp_path):
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path / "cache"))
    source = (
        "@intrinsic\ndef function(context, x):\n"
        "    return types.int64(types.int64), lambda _, builder, signature, given: builder.mul(given[0], given[0].type({factor}))\n"
    )
    results = []
    for factor in (2, 2, 3):
        path = tmp_path / f"by_{factor}.py"
        path.write_text(source.format(factor=factor))
        exec(
            compile(path.read_text(), path, "exec"),
            {"intrinsic": numba.extending.intrinsic, "types": numba.types, "__name__": __name__},
            inner := {},
        )
        (tmp_path / "outer.py").write_text(text := "@njit(cache=True)\ndef function(x):\n    return inner(x)\n")
        exec(compile(text, tmp_path / "outer.py", "exec"), {"njit": njit, "inner": inner["function"], "__name__": __name__}, outer := {})
        results.append((outer["function"](5), sum(outer["function"].stats.cache_hits.values())))
    assert results == [(10, 0), (10, 1), (15, 0)]


def test_a_full_disk_costs_the_cache_only(monkeypatch, caplog, tmp_path, fresh_warning):
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    compiled = njit(cache=True)(double)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        assert compiled(3) == 6
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "NUMBA_CACHE_DIR" in caplog.text


def test_a_damaged_cache_is_not_used(monkeypatch, caplog, tmp_path, fresh_warning):
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))
    assert njit(cache=True)(double)(3) == 6
    for file in tmp_path.glob("*/*.nb?"):
        file.write_bytes(file.read_bytes()[:20])
    assert njit(cache=True)(double)(3) == 6
    assert "NUMBA_CACHE_DIR" in caplog.text


@pytest.mark.nightly
def test_the_library_is_imported_and_computes_where_nothing_can_be_written(tmp_path):
    script = (
        "from pyro_truncated.states import StateSpace; import torch; space = StateSpace([2] * 70); "
        "print(space.unpack(space.pack(torch.ones(1, 100, 70).long())).shape)"
    )
    done = run(script, folder=tmp_path, NUMBA_CACHE_LOCATOR_CLASSES="UserProvidedCacheLocator", NUMBA_CACHE_DIR="")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.Size([1, 100, 70])\n"
    assert done.stderr.count("cannot be kept on disk") == 1


@pytest.mark.nightly
def test_the_warm_up_leaves_no_kernel_out():
    warm_up(progress=False)
    missing = set()
    for module in pkgutil.iter_modules(compiled.__path__, f"{compiled.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if hasattr(value, "compiled") and not value.compiled.signatures:
                missing.add(value.__name__)
    assert not missing


@pytest.mark.nightly
def test_kernels_are_as_fast_where_they_were_compiled_as_from_disk(tmp_path):
    # A helper of this kernel had run as it was before it was optimised with the kernel, in 25 times the time.
    script = (
        "import time, torch\n"
        "from pyro_truncated.models import OcclusiveComponents\n"
        "from pyro_truncated.ops.scenes import scan_places\n"
        "model, y = OcclusiveComponents(6, (20, 20), (7, 7)), torch.rand(20, 400, 3)\n"
        "def seconds():\n"
        "    start = time.thread_time()\n"
        "    with torch.no_grad():\n"
        "        scan_places(y, model.scene_parameters(), model.canvas)\n"
        "    return time.thread_time() - start\n"
        "seconds()\n"
        "print(min(seconds() for _ in range(20)))"
    )
    seconds = [float(run(script, folder=tmp_path, NUMBA_CACHE_DIR=str(tmp_path), OMP_NUM_THREADS="1").stdout) for _ in range(2)]
    assert seconds[0] < 5 * seconds[1]


@pytest.mark.nightly
def test_processes_that_compile_at_the_same_time_agree(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch; from pyro_truncated.states import StateSpace\n"
        "print(StateSpace([2] * 3).unpack(torch.full((2048, 1), 5), torch.float64).unique(dim=0).tolist())"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    running = [subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=300)[0] for process in running] == ["[[1.0, 0.0, 1.0]]\n"] * 2
    assert [process.returncode for process in running] == [0, 0]


def test_populations_on_the_cpu_do_not_care_for_the_default_device():
    def population():
        space, generator = StateSpace([2, 3] * 20), torch.Generator("cpu").manual_seed(0)
        words = ops.initial_states(space.fields, 10, 12, generator)
        children = ops.flip_sparse(words, space.fields, 3.0, 0.1, generator=generator)
        kept, scores = ops.select_top(words, words[..., 0].double(), children, children[..., 0].double(), 12)
        population = Population(space, kept, scores)
        population.assert_distinct()
        return kept, population.states(), population.marginals(), population.value_probabilities(), space_options(space).words

    expected = population()
    # On "meta" nothing can be computed: whatever were made on the default device would be found out.
    space_options.cache_clear()
    with torch.device("meta"):
        found = population()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
