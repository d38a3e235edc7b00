"""Arrays cut into patches, and arrays put together from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pyro_truncated.restoration import Patches


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("shape", "size", "stride", "channels"),
    [((9,), 4, 3, None), ((7, 8), 3, 2, None), ((7, 8), (2, 5), 1, 3), ((5, 4, 6), 2, 2, None), ((3, 3), 3, 1, 1)],
)
def test_arrays_are_cut_as_loops_cut_them_and_come_back_whole(shape, size, stride, channels):
    patches = Patches(shape, size, stride, channels=channels)
    array = torch.randn(*shape, *([channels] if channels else []), dtype=torch.float64, generator=generator())
    found = patches.extract(array)
    sides = patches.size
    starts = [sorted({*range(0, n - side + 1, stride), n - side}) for n, side in zip(shape, sides, strict=True)]
    expected = [
        array[tuple(slice(s, s + side) for s, side in zip(place, sides, strict=True))].flatten()
        for place in torch.cartesian_prod(*map(torch.tensor, starts)).reshape(-1, len(shape)).tolist()
    ]
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=0)
    assert found.shape == (len(patches), patches.num_observed)
    torch.testing.assert_close(patches.assemble(found), array)
    torch.testing.assert_close(patches.assemble(found, torch.rand(len(found), generator=generator()) + 0.1), array)


def test_entries_are_weighted_means_of_what_patches_say():
    patches = Patches((3,), 2)
    values = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    torch.testing.assert_close(patches.assemble(values), torch.tensor([1.0, 3.0, 8.0]))
    torch.testing.assert_close(patches.assemble(values, torch.tensor([3.0, 1.0])), torch.tensor([1.0, 2.5, 8.0]))
    torch.testing.assert_close(patches.assemble(values, torch.tensor([[1.0, 1.0], [3.0, 1.0]])), torch.tensor([1.0, 3.5, 8.0]))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(((4, 4), 5), "size"), (((4, 4), 2, 3), "stride"), (((4, 4), (2,)), "size"), (((4, 0), 2), "shape"), (((), 2), "shape")],
)
def test_patches_that_cannot_be_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        Patches(*arguments)


def test_arrays_and_patches_of_other_shapes_are_refused():
    patches = Patches((4, 4), 2)
    with pytest.raises(ValueError, match="shape"):
        patches.extract(torch.zeros(4, 5))
    with pytest.raises(ValueError, match="patches must have shape"):
        patches.assemble(torch.zeros(8, 4))
    for weights in (torch.ones(8), torch.ones(9, 2), -torch.ones(9), torch.full((9, 4), torch.nan), torch.full((9,), torch.inf)):
        with pytest.raises(ValueError, match="weights must have shape"):
            patches.assemble(torch.zeros(9, 4), weights)


def test_patches_of_numpy_arrays_are_tensors():
    patches, image = Patches((4, 5), 2, channels=3), np.random.default_rng(0).random((4, 5, 3))
    found = patches.extract(image)
    torch.testing.assert_close(patches.assemble(found.numpy(), np.ones(len(patches))), torch.from_numpy(image))
    assert Patches((4, 5), np.int64(2)).size == (2, 2)


def test_means_of_integers_are_not_cut_off():
    means = Patches((3,), 2).assemble(torch.tensor([[1, 2], [3, 8]]))
    torch.testing.assert_close(means, torch.tensor([1.0, 2.5, 8.0]))
