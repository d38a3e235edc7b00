"""The messages between processes, against what they would be if one process had all; and what they say when something is wrong."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pyro_truncated import distributed
from pyro_truncated.distributed import OtherProcessError, collectives


def sums() -> list[list[float]]:
    number = distributed.rank() + 1
    scalar, vector = torch.tensor(0.5 * number), torch.full((3,), number, dtype=torch.int64)
    # What is the same for all dimensions on one process, and differs between them on others.
    matrix = torch.ones(2, 2) if number == 1 else number * torch.ones(3, 2, 2)
    found = distributed.add([scalar, vector, matrix])
    assert [value.dtype for value in found] == [torch.float32, torch.int64, torch.float32]
    return [value.flatten().tolist() for value in found]


@pytest.mark.parametrize("number", [2, 3])
def test_sums(number, crew):
    total = number * (number + 1) / 2
    for scalar, vector, matrix in crew.results(number, sums):
        assert scalar == [0.5 * total]
        assert vector == [total] * 3
        assert matrix == [total] * 12


def says() -> tuple[object, object, list[int], bool]:
    mine = distributed.rank()
    return (
        distributed.agree({"rank": mine, "nan": math.inf}),
        distributed.agree(mine == 0),
        distributed.gather(mine),
        distributed.agree(2 + mine),
    )


def test_what_the_first_says_and_what_all_say(crew):
    for told, decided, everyone, number in crew.results(3, says):
        assert told == {"rank": 0, "nan": math.inf}
        assert decided is True
        assert number == 2
        assert everyone == [0, 1, 2]


def of_different_sizes() -> list[object]:
    mine = distributed.rank()
    return [distributed.agree([own, other][mine]) for own, other in ((3, 2**60), (2**60, 3), (None, 7), (0.5, None), (True, 4))]


def test_the_first_decides_whatever_the_others_have(crew):
    for told in crew.results(2, of_different_sizes):
        assert told == [3, 2**60, None, 0.5, True]
        assert told[-1] is True


def without_a_group():
    assert not dist.is_initialized()
    value = torch.ones(2)
    assert distributed.add([value])[0] is value
    return distributed.agree("x"), distributed.gather(3), distributed.rank(), distributed.size()


def test_without_a_group_nothing_happens():
    assert without_a_group() == ("x", [3], 0, 1)
    assert distributed.start().type in ("cpu", "cuda")
    assert not dist.is_initialized()


def unlike():
    return distributed.add([torch.ones(2)]) if distributed.rank() else distributed.gather(1)


def misshapen():
    return distributed.add([torch.ones(2 + distributed.rank())])


def test_processes_that_do_different_things_are_told(crew):
    for found in crew.run(2, unlike):
        assert isinstance(found, OtherProcessError)
        assert "take different steps" in str(found)
    for found in crew.run(2, misshapen):
        assert isinstance(found, ValueError)
        assert "(2,), (3,)" in str(found)


def one_fails():
    start = time.monotonic()
    try:
        with collectives.propagate_errors():
            if distributed.rank() == 1:
                raise KeyError("my key")
            return distributed.add([torch.ones(100)])
    finally:
        assert time.monotonic() - start < 30


def test_an_error_of_one_is_an_error_of_all_that_names_it(crew):
    first, second, third = crew.run(3, one_fails)
    assert isinstance(second, KeyError)
    for found in (first, third):
        assert isinstance(found, OtherProcessError)
        assert "process 1 failed with KeyError: 'my key'" in str(found)


# --- shards ---


class Sliceable:
    """What HDF5, zarr and xarray have in common."""

    def __init__(self, values):
        self.values, self.read = values, []

    def __len__(self):
        return len(self.values)

    def __getitem__(self, rows):
        self.read.append(rows)
        return self.values[rows]


def shards(path: str) -> tuple[object, ...]:
    y = np.load(path, mmap_mode="r")
    lazy = Sliceable(y)
    shard = distributed.shard(lazy)
    assert lazy.read == [slice(shard.portion.first, shard.portion.first + len(shard))]
    own = distributed.shard(shard.numpy().copy(), split=False)
    assert own.portion == shard.portion
    assert type(shard[1:]) is torch.Tensor
    assert type(shard + 1) is torch.Tensor
    assert shard.float().portion == shard.portion
    everything = distributed.some_rows(shard, 100)
    some = distributed.some_rows(shard, 4)
    return shard.portion, shard.clone().as_subclass(torch.Tensor), everything.as_subclass(torch.Tensor), some.as_subclass(torch.Tensor)


def test_shards_are_successive_rows_and_rows_travel(crew, tmp_path):
    y = np.arange(22.0).reshape(11, 2)
    y[3, 1] = np.nan
    np.save(tmp_path / "y.npy", y)
    found = crew.results(3, shards, str(tmp_path / "y.npy"))
    assert [(portion.first, portion.size, portion.total) for portion, *_ in found] == [(0, 3, 11), (3, 4, 11), (7, 4, 11)]
    np.testing.assert_array_equal(torch.cat([rows for _, rows, *_ in found]), y)
    for _, _, everything, some in found:
        np.testing.assert_array_equal(everything, y)
        assert some.shape == (4, 2)
        assert torch.equal(some.nan_to_num(-1), found[0][3].nan_to_num(-1))


def masked():
    hidden = np.arange(6) == 5
    return distributed.shard(np.ma.masked_array(np.arange(6), hidden)).as_subclass(torch.Tensor)


def test_processes_hold_one_type_of_data_of_which_only_some_are_missing(crew):
    first, second = crew.results(2, masked)
    torch.testing.assert_close(torch.cat([first, second]), torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, torch.nan]).double(), equal_nan=True)
    assert first.dtype == second.dtype


def different():
    return distributed.shard(torch.ones(5 + distributed.rank()))


def too_few():
    return distributed.shard(torch.ones(1))


def test_data_that_cannot_be_shared_out(crew):
    assert all("every process must be given all data" in str(found) for found in crew.run(2, different))
    assert all("at least one data point per process; got 1 for 2" in str(found) for found in crew.run(2, too_few))
    with pytest.raises(TypeError, match="a row per data point, a length and slices; got int"):
        distributed.shard(3)
    with pytest.raises(TypeError, match="data must be a tensor, an array or a list of numbers; got an array of <U1"):
        distributed.shard(np.array(["a"]))


def test_one_process_holds_all_and_copies_nothing():
    y = np.arange(6.0).reshape(3, 2)
    shard = distributed.shard(y)
    assert shard.portion == distributed.Portion(0, 3, 3)
    assert not shard.portion.is_part
    assert shard.data_ptr() == y.ctypes.data


# --- minibatches ---


@pytest.mark.parametrize(("size", "block"), [(5, 2), (4, 1), (20, 7), (100, 64)])
def test_an_epoch_holds_every_data_point_once(size, block):
    batches = distributed.Batches(torch.ones(23), size, block=block)
    for epoch in range(2):
        found = [batches.at(step) for step in range(epoch * len(batches), (epoch + 1) * len(batches))]
        assert torch.equal(torch.cat([batch.rows for batch in found]).sort().values, torch.arange(23))
        assert all(batch.scale == 23 / len(batch.rows) and len(batch.rows) <= size for batch in found)


def test_epochs_have_orders_of_their_own():
    batches = distributed.Batches(torch.ones(100), 10, block=2)
    assert not torch.equal(batches.at(0).rows, batches.at(len(batches)).rows)


def test_minibatches_do_not_depend_on_who_shares_the_data():
    whole = distributed.Batches(torch.ones(23), 5, block=2, seed=3)
    parts = [distributed.Portion(0, 7, 23), distributed.Portion(7, 1, 23), distributed.Portion(8, 15, 23)]
    shared = [distributed.Batches(distributed.Shard.from_rows(torch.ones(part.size), part), 5, block=2, seed=3) for part in parts]
    assert not torch.equal(whole.at(0).rows, distributed.Batches(torch.ones(23), 5, block=2, seed=4).at(0).rows)
    for step in range(12):
        found = [(batches.at(step), part) for batches, part in zip(shared, parts, strict=True)]
        rows = torch.cat([batch.rows + part.first for batch, part in found if not batch.is_idle])
        assert torch.equal(rows, whole.at(step).rows)
        assert {batch.scale for batch, _ in found} == {whole.at(step).scale}
    assert any(batches.at(step).is_idle for batches in shared for step in range(12))
