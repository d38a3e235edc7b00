"""What `import pyro_truncated` loads, and that everything else is there when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pyro_truncated

HEAVY = ("arviz", "pandas", "matplotlib", "xarray", "scipy", "numba", "llvmlite", "pyro_truncated.gp")


@pytest.mark.nightly
def test_heavy_libraries_wait_until_they_are_used():
    lines = [
        "import sys",
        "import pyro, pyro.contrib.gp",
        "before = set(sys.modules)",
        "import pyro_truncated",
        "print(*set(sys.modules) - before)",
    ]
    result = subprocess.run([sys.executable, "-c", "; ".join(lines)], capture_output=True, text=True, check=True)
    loaded = result.stdout.split()
    assert "pyro_truncated.guide.auto_truncated" in loaded
    assert not {name for name in HEAVY if name in loaded}


@pytest.mark.nightly
def test_without_compiled_kernels_numba_is_never_loaded():
    script = """
import sys
import torch
from pyro.infer import SVI
from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO, ops
from pyro_truncated.models import BinarySparseCoding

num_threads = torch.get_num_threads()
with ops.use_backend("vectorised"):
    y = torch.rand(10, 6)
    model = BinarySparseCoding(6, 70).initialize(y)
    guide = AutoTruncated(model, num_states=90)
    SVI(model, guide, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(crossover=True))).step(y)
    guide.marginals()
print("numba" in sys.modules)
guide.marginals()
print("numba" in sys.modules, torch.get_num_threads() == num_threads)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True", "True"]


@pytest.mark.nightly
def test_fits_of_gaussian_processes_do_not_load_the_compiler_of_torch():
    script = """
import sys
import torch
from pyro_truncated.gp.optimization import minimize

x = torch.zeros(2, requires_grad=True)

def evaluate():
    value = (x - 1).square().sum()
    value.backward()
    return value

minimize(evaluate, [x])
print("torch._dynamo" in sys.modules, bool((x - 1).abs().max() < 1e-6))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True"]


@pytest.mark.nightly
def test_densities_in_blocks_without_gradients_do_not_load_the_compiler_of_torch():
    script = """
import sys
import torch
from pyro_truncated.distributions import SpikeSlabSuperposition
from pyro_truncated.ops import memory_budget

weight = torch.rand(3, 4, requires_grad=True)
likelihood = SpikeSlabSuperposition(torch.ones(5, 4), weight, 1.0, 1.0, 1.0)
with memory_budget(2**10), torch.no_grad():
    likelihood.log_prob(torch.zeros(5, 3))
print("torch._dynamo" in sys.modules)
with memory_budget(2**10):
    likelihood.log_prob(torch.zeros(5, 3)).sum().backward()
print("torch._dynamo" in sys.modules, bool(weight.grad.abs().sum() > 0))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True", "True"]


@pytest.mark.parametrize("name", pyro_truncated.__all__)
def test_every_public_name_is_there(name):
    assert name == "__version__" or getattr(pyro_truncated, name).__name__ == name
    assert name in dir(pyro_truncated)


@pytest.mark.parametrize("name", ["UniqueModule", "check_counts", "check_observable", "takes_arrays"])
def test_tools_for_authors_are_still_found_in_the_face_with_a_warning(name, monkeypatch):
    monkeypatch.delitem(vars(pyro_truncated), name, raising=False)
    with pytest.warns(DeprecationWarning, match=rf"{name} has moved: import it from pyro_truncated.extend"):
        found = getattr(pyro_truncated, name)
    assert found is getattr(pyro_truncated.extend, name) is getattr(pyro_truncated, name)


def test_parts_are_attributes_of_the_package():
    assert pyro_truncated.diagnostics.to_arviz is pyro_truncated.to_arviz
    with pytest.raises(AttributeError, match="no attribute 'to_arvis'"):
        _ = pyro_truncated.to_arvis
