"""How large patches are where few pixels are seen."""

import math

import pytest
import torch

from pyro_truncated.restoration.patch_model import mixture_patch_sides


def damaged(shape, missing, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.where(
        torch.rand(shape, generator=generator).expand(40, 40, 3) < missing, math.nan, torch.rand(40, 40, 3, generator=generator)
    )


@pytest.mark.parametrize(
    ("shape", "missing", "grey", "colour"),
    [
        ((40, 40, 1), 0.8, [6, 10], [5, 7]),
        ((40, 40, 1), 0.5, [5, 6, 8], [4, 5]),
        # Of half of the pixels one channel or more is seen.
        ((40, 40, 3), 0.8, [6, 10], [4, 5]),
        ((40, 40, 1), 0.0, [5, 6, 8], [4, 5, 6, 8]),
    ],
)
def test_windows_are_larger_where_few_pixels_are_seen(shape, missing, grey, colour):
    image = damaged(shape, missing)
    assert mixture_patch_sides(image[..., 0], 0.01, image.shape[:2], has_channels=False) == grey
    assert mixture_patch_sides(image, 0.01, image.shape[:2], has_channels=True) == colour


def test_no_window_is_larger_than_the_image():
    image = damaged((40, 40, 1), 0.8)[:7, :9, 0]
    assert mixture_patch_sides(image, 0.01, image.shape, has_channels=False) == [6, 7]
