"""Kernels that another process compiles on their first use: the same numbers before and after, and nothing that stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = """
import sys, time, torch
from pyro_truncated import StateSpace, ops
from pyro_truncated.ops.compiled import background, latent_values, quadratic

space = StateSpace([2] * 5)
# More states than torch unpacks as fast.
words = space.pack(torch.arange(8192).reshape(2, 4096, 1) >> torch.arange(5) & 1)
linear, pairwise = torch.rand(2, 5, dtype=torch.float64), torch.rand(5, 5, dtype=torch.float64)

def compute():
    # Of the first kernel there is a twin in plain torch, of the second one a twin without parallel loops.
    return space.unpack(words), ops.pair_energy(words, linear, pairwise)

def compiled():
    return [bool(kernel.compiled.signatures) for kernel in (latent_values._unpack_fields, quadratic._tabulated_energy)]

before = compute()
"""

TAKEN = """
assert compiled() == [False, False]
limit = time.monotonic() + 250
while not all(compiled()) and time.monotonic() < limit:
    after = compute()
    time.sleep(0.1)
assert all(compiled())
assert all(torch.equal(one, other) for one, other in zip(before, after))
print(background._worker.pid)
"""

AT_ONCE = """
assert compiled() == [True, True]
assert background._worker is None
"""

STEPS = """
import pyro, torch
from pyro.infer import SVI
from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.models import {model}
pyro.set_rng_seed(0)
y = (torch.rand({shape}, 9) > 0.5).float()
model = {model}(9, 12).initialize(y)
svi = SVI(model, AutoTruncated(model, 16), ClosedForm(model), Truncated_ELBO(EvolutionarySearch(crossover=True)))
print([svi.step(y).hex() for _ in range(3)])
"""


PROGRAM = """
import pyro, pyro.distributions as dist, torch
from numba.core.event import install_recorder
from pyro.infer import SVI
from pyro_truncated import AutoTruncated, Truncated_ELBO
from pyro_truncated.distributions import BinaryChains
pyro.set_rng_seed(0)
y = torch.randn(3, 260, dtype=torch.float64)

def chains(y):
    weight = pyro.param("weight", lambda: torch.randn(6, dtype=torch.float64))
    switch = pyro.param("switch", torch.full((6, 2, 2), 0.5, dtype=torch.float64), constraint=dist.constraints.simplex)
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", BinaryChains(torch.full((6,), 0.3, dtype=torch.float64), switch, num_steps=20))
        pyro.sample("y", dist.Normal(s @ weight, 1.0).to_event(1), obs=y[:, :20])

def sites(y):
    chance = pyro.param("chance", torch.tensor(0.3, dtype=torch.float64), constraint=dist.constraints.unit_interval)
    z = torch.zeros((), dtype=torch.float64)
    for place in range(260):
        z = pyro.sample(f"z_{{place}}", dist.Bernoulli(0.5 * (chance + z)))
        pyro.sample(f"y_{{place}}", dist.Normal(z, 1.0), obs=y[0, place])

svi = SVI({model}, AutoTruncated({model}, {num_states}), pyro.optim.Adam({{"lr": 0.1}}), Truncated_ELBO())
with install_recorder("numba:compile") as recorder:
    losses = [svi.step(y) for _ in range(3)]
functions = [event.data["dispatcher"].py_func for _, event in recorder.buffer]
print({{function.__name__ for function in functions if function.__module__.startswith("pyro_truncated")}})
print([loss.hex() for loss in losses])
"""


def run(script: str, folder: Path, background: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYRO_TRUNCATED_BACKGROUND": background,
        "NUMBA_CACHE_DIR": str(folder / f"cache{background}"),
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300, check=False, cwd=folder
    )


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.nightly
def test_kernels_of_the_background_are_taken_once_they_are_ready(tmp_path):
    # A pipe left open would be a second line.
    done = run(KERNELS + TAKEN, tmp_path, "1", PYTHONWARNINGS="default::ResourceWarning")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
    assert "in the background" in done.stderr
    assert ended(int(done.stdout))
    # The next process finds them, and starts none.
    done = run(KERNELS + AT_ONCE, tmp_path, "1")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.nightly
def test_a_variable_turns_the_background_off(tmp_path):
    done = run(KERNELS + AT_ONCE, tmp_path, "0")
    assert done.returncode == 0, done.stderr
    assert "in the background" not in done.stderr


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="a script is no program there")
def test_a_background_that_cannot_compile_is_done_without(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    start = f"import sys; sys.executable = {str(broken)!r}\n"
    done = run(start + KERNELS + "time.sleep(1)\ncompute()\nassert compiled() == [True, True]\n", tmp_path, "1")
    assert done.returncode == 0, done.stderr


PLACES = """
import pyro, torch
from pyro.infer import SVI
from pyro_truncated import AutoTruncated, ClosedForm, Truncated_ELBO
from pyro_truncated.models import OcclusiveComponents
pyro.set_rng_seed(0)
y = torch.rand(20, 6, 6, 2)
model = OcclusiveComponents(3, (6, 6), (3, 3), 2, order={order!r})
svi = SVI(model, AutoTruncated(model, 16), ClosedForm(model), Truncated_ELBO(model.default_search(16)))
print([svi.step(y).hex() for _ in range(3)])
"""


@pytest.mark.nightly
@pytest.mark.parametrize("order", ["exclusive", "depth"])
def test_the_first_steps_of_scenes_have_the_same_free_energies_to_the_last_digit(order, tmp_path):
    script = PLACES.format(order=order)
    found = [run(script, tmp_path, background) for background in "01"]
    assert [done.returncode for done in found] == [0, 0], found[1].stderr
    assert found[0].stdout == found[1].stdout


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["BinarySparseCoding", "NoisyOr", "SpikeSlabSparseCoding", "MaximalCauses", "FactorialHMM"])
def test_the_first_steps_have_the_same_free_energies_to_the_last_digit(model, tmp_path):
    script = STEPS.format(model=model, shape="3, 20" if model == "FactorialHMM" else "60")
    found = [run(script, tmp_path, background) for background in "01"]
    assert [done.returncode for done in found] == [0, 0], found[1].stderr
    assert found[0].stdout == found[1].stdout


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "num_states"), [("chains", 16), ("chains", 64), ("sites", 16)])
def test_a_first_step_of_many_kernels_waits_for_none(model, num_states, tmp_path):
    script = PROGRAM.format(model=model, num_states=num_states)
    found = [run(script, tmp_path, background) for background in "01"]
    assert [done.returncode for done in found] == [0, 0], found[1].stderr
    (before, first), (at_once, other) = (done.stdout.splitlines() for done in found)
    assert first == other
    assert len(eval(before)) > 5
    # The functions of single numbers that torch computes in another way.
    assert eval(at_once) <= {"_exp", "_log"}
