"""Populations in files: the same numbers as in memory, and no row is touched that is not in the minibatch."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO, distributed
from pyro_truncated.datasets import linear_bars
from pyro_truncated.models import BinarySparseCoding
from tests.pretended_device import PretendedDevice, there


def made(y: Tensor, dtype: torch.dtype = torch.float64, **options: Any) -> SVI:
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    model = BinarySparseCoding(9, 6, dtype=dtype).initialize(y)
    return SVI(model, AutoTruncated(model, 8, **options), ClosedForm(model), Truncated_ELBO(EvolutionarySearch(3, 2)))


@pytest.fixture
def y(generator) -> Tensor:
    return linear_bars(100, 3, mean_active=2.0, generator=generator).data.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_populations_in_files_are_those_in_memory(dtype, y, tmp_path):
    y = y.to(dtype)
    losses = []
    for options in ({}, {"store": tmp_path / "populations"}):
        svi = made(y, dtype, **options)
        batches = distributed.Batches(y, 20, block=4)
        found = []
        # Not all data points have been visited when all are asked for.
        for batch in islice(batches, 3):
            with batch:
                found.append(svi.step(y))
        losses.append([*found, *(svi.step(y) for _ in range(2))])
    assert losses[0] == losses[1]
    files = sorted(file.name for file in (tmp_path / "populations").iterdir())
    assert files == ["log_joint-000000000000.npy", "words-000000000000.npy"]
    assert torch.equal(torch.from_numpy(np.load(tmp_path / "populations" / files[1])), svi.guide.words)
    assert np.load(tmp_path / "populations" / files[0]).dtype == (np.float64 if dtype == torch.float64 else np.float32)


def test_a_saved_guide_holds_what_would_have_begun(y, tmp_path):
    expected = made(y).guide
    expected.setup(y)
    svi = made(y, store=tmp_path)
    with distributed.Batches(y, 20).at(0):
        svi.guide.setup(y)
    assert not svi.guide.words.any()
    state = svi.guide.state_dict()
    assert torch.equal(state["populations.words"], expected.words)
    other = made(y, store=tmp_path / "other").guide
    other.load_state_dict(state)
    assert (tmp_path / "other" / "words-000000000000.npy").exists()
    assert torch.equal(other.words, expected.words)


@pytest.mark.slow
def test_what_files_cannot_hold_is_refused(y, tmp_path):
    states = torch.zeros(100, 8, 6)
    with pytest.raises(ValueError, match="a guide with a store takes no init"):
        made(y, store=tmp_path, init=states).guide.setup(y)
    with PretendedDevice(), pytest.raises(ValueError, match="populations in files need a model on the CPU; got one on"):
        AutoTruncated(there(BinarySparseCoding(9, 6, dtype=torch.float64).initialize(y)), 8, store=tmp_path).setup(there(y))
    assert not list(tmp_path.iterdir())


class Watched(Tensor):
    """Data that note which of their rows are read."""

    read: list[Tensor]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            value = func(*args, **(kwargs or {}))
        owner = args[0] if args else None
        if isinstance(owner, Watched) and isinstance(value, Tensor):
            chosen = {"__getitem__": args[-1], "index_select": args[-1]}.get(getattr(func, "__name__", ""), slice(None))
            owner.read.append(torch.arange(len(owner))[chosen.as_subclass(Tensor) if isinstance(chosen, Tensor) else chosen])
        return value


def test_no_row_is_touched_that_is_not_in_the_minibatch(y, tmp_path):
    svi = made(y, store=tmp_path)
    watched = y.as_subclass(Watched)
    watched.read = []
    visited = torch.zeros(100, dtype=torch.bool)
    for batch in islice(distributed.Batches(y, 20, block=4), 4):
        watched.read.clear()
        with batch:
            svi.step(watched)
        rows = torch.cat([read.reshape(-1) for read in watched.read])
        assert len(rows)
        assert torch.isin(rows, batch.rows).all()
        visited[batch.rows] = True
        assert torch.equal(svi.guide.words.flatten(1).any(1), visited)


def shared(folder: str, rows: Tensor) -> tuple[list[float], Tensor]:
    y = distributed.shard(rows)
    svi = made(y, store=folder)
    found = []
    for batch in islice(distributed.Batches(y, 20, block=4), 6):
        with batch:
            found.append(svi.step(y))
    return found, svi.guide.words.clone()


def test_each_process_has_files_of_its_own(y, crew, tmp_path):
    expected, words = shared(str(tmp_path / "one"), y)
    found = crew.results(2, shared, str(tmp_path / "two"), y)
    assert all(losses == pytest.approx(expected, rel=1e-12) for losses, _ in found)
    assert torch.equal(torch.cat([own for _, own in found]), words)
    assert len(list((tmp_path / "two").iterdir())) == 4


def test_rows_of_files_are_those_of_memory_and_what_was_written_stays(tmp_path):
    values = np.arange(6000.0).reshape(3000, 2)
    np.save(tmp_path / "y.npy", values)
    mapped = distributed.shard(np.load(tmp_path / "y.npy", mmap_mode="r"))
    positions = torch.randperm(3000, generator=torch.Generator().manual_seed(0))[:2500]
    np.testing.assert_array_equal(distributed.rows_at(mapped, positions), values[positions])
    # What is written to a private map is nowhere else.
    private = np.load(tmp_path / "y.npy", mmap_mode="c")
    private[7] = -1.0
    rows = distributed.shard(private)
    with distributed.Batches(rows, 10).at(0):
        distributed.rows_at(rows, positions)
    assert (private[7] == -1.0).all()
