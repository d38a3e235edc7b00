"""Fixtures that every test gets: a fixed seed, an empty parameter store, and a check that no global setting leaks."""

from __future__ import annotations

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib
import numpy as np
import pyro
import pytest
import torch

from pyro_truncated import datasets

matplotlib.use("Agg")
# Tests of kernels are about the compiled ones, from the first call on; so in the processes that they start.
os.environ.setdefault("PYRO_TRUNCATED_BACKGROUND", "0")
# For a device that is not there, torch keeps every seed with the call stack that set it: milliseconds each.
for backend in (torch.cuda, torch.xpu, torch.mtia):
    if hasattr(backend, "manual_seed_all") and not backend.is_available():
        backend.manual_seed_all = lambda seed: None


def _kept(variants: list[pytest.Function], keep: int | str) -> Iterator[pytest.Function]:
    """So many variants, evenly spread, or (`"values"`) as few as hold each value of each parameter."""
    if isinstance(keep, int):
        yield from (variants[-(-i * len(variants) // keep)] for i in range(min(keep, len(variants))))
        return
    used: Counter[tuple[str, int]] = Counter()
    values = {variant: [(name, id(value)) for name, value in variant.callspec.params.items()] for variant in variants}
    while missing := {value for some in values.values() for value in some} - set(used):
        # The diagonal of a product: as many new values as can be, and of the old ones those that came up least.
        best = min(variants, key=lambda variant: (-len(missing.intersection(values[variant])), sum(used[v] for v in values[variant])))
        used.update(values[best])
        yield best


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--variants`: what `make quick` runs of each test."""
    parser.addoption("--variants", type=int, help="of each parametrised test that is chosen, run at most so many variants")


# Of two workers one tests the kernels, and compiles them. The other begins with what needs none: it finds them on disk later.
KERNELS, NO_KERNELS = ("distributions", "em", "guide", "models", "ops", "scenes", "sequences"), ("datasets", "gp", "gplvm")


def _grids(items: list[pytest.Item]) -> list[list[pytest.Function]]:
    """The variants of each test."""
    grids = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function):
            grids[item.parent, item.originalname].append(item)
    return list(grids.values())


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Of a test marked `nightly(keep=...)`, some variants belong to every run: they lose the mark. `--variants` leaves out others."""
    marks = {item: item.get_closest_marker("nightly") for item in items}
    for variants in _grids([item for item, mark in marks.items() if mark and "keep" in mark.kwargs]):
        for item in _kept(variants, marks[variants[0]].kwargs["keep"]):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "nightly"]
    yield
    if most := config.getoption("--variants"):
        left_out = {item for variants in _grids(items) for item in set(variants).difference(_kept(variants, most))}
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    folders = {item: item.path.relative_to(Path(__file__).parent).parts[0] for item in items}
    items.sort(key=lambda item: 0 if folders[item] in KERNELS else 1 if folders[item] in NO_KERNELS else 2)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the garbage collector need not go through half a million objects again and again.

    Nor so often through what tests leave behind.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


def _global_state() -> dict[str, object]:
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "torch validation": torch.distributions.Distribution._validate_args,
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        **{f"pyro setting {name}": value for name, value in pyro.settings.get().items()},
    }


def _restore(state: dict[str, object], settings: dict[str, object]) -> None:
    torch.set_default_dtype(state["default dtype"])
    torch.set_default_device(state["default device"])
    torch.set_grad_enabled(bool(state["grad mode"]))
    torch.set_num_threads(int(str(state["threads"])))
    torch.use_deterministic_algorithms(bool(state["deterministic algorithms"]))
    pyro.settings.set(**settings)


@pytest.fixture(autouse=True)
def clean_globals() -> Iterator[None]:
    """Seeds every generator, empties Pyro's parameter store, and fails a test that leaves a global setting changed."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    pyro.enable_validation(True)
    before, settings = _global_state(), pyro.settings.get()
    yield
    pyro.clear_param_store()
    after = _global_state()
    leaked = {name: (value, after[name]) for name, value in before.items() if after[name] != value}
    if leaked:
        _restore(before, settings)
        pytest.fail("the test left global settings changed (before, after): " + repr(leaked))


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded generator for tests that draw their own data."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def real_data() -> Callable[[str], dict[str, np.ndarray]]:
    """Loads a real data set by name, or skips the test where the data folder does not hold it."""

    def load(name: str) -> dict[str, np.ndarray]:
        try:
            return datasets.load(name)
        except datasets.DatasetNotFoundError as error:
            pytest.skip(str(error))

    return load
