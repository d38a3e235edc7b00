"""Rounds of restoration: how many components each has, and what is averaged."""

from __future__ import annotations

import math

import pytest
import torch

from pyro_truncated.restoration import denoise, rounds


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("shape", "number", "expected"),
    [
        ((20, 20), 1, math.ceil(17**2 / 120)),
        ((20, 20), 2, math.ceil(2 * 17**2 / 120)),
        ((20, 20), 3, math.ceil(2 * 17**2 / 120)),
        ((12, 12, 3), 1, math.ceil(9**2 / (20 * 48**0.5))),
        ((12, 12, 3), 3, math.ceil(4 * 9**2 / (20 * 48**0.5))),
        ((12, 12, 3), 4, math.ceil(4 * 9**2 / (20 * 48**0.5))),
    ],
)
def test_components_double_once_and_with_channels_twice(shape, number, expected):
    image = 20 * torch.randn(shape, generator=generator())
    assert denoise(image, side=4, rounds=number, generator=generator(1), progress=False).model.num_components == expected


@pytest.mark.parametrize(
    ("shape", "number", "options", "averaged"),
    [
        ((16, 16), 1, {}, 1),
        ((16, 16), 2, {}, 1),
        ((16, 16), 3, {}, 2),
        ((16, 16), 3, {"num_components": 3}, 2),
        ((16, 16), 1, {"num_components": 3}, 1),
        ((10, 10, 3), 3, {}, 1),
        ((10, 10, 3), 4, {}, 2),
    ],
)
def test_rounds_are_averaged_if_the_last_two_have_as_many_components(monkeypatch, shape, number, options, averaged):
    arrays, learned = [], rounds._restored_by_mixture

    def recording(*arguments):
        found = learned(*arguments)
        arrays.append(found[0])
        return found

    monkeypatch.setattr(rounds, "_restored_by_mixture", recording)
    image = torch.linspace(0, 100, shape[1]).expand(shape[:2]).reshape(*shape[:2], 1).expand(*shape[:2], 3)
    image = (image if len(shape) == 3 else image[..., 0]) + 20 * torch.randn(shape, generator=generator())
    restored = denoise(image, noise=20.0, rounds=number, generator=generator(1), progress=False, **options)
    num_sides = len(arrays) // number
    assert num_sides > 1
    torch.testing.assert_close(restored.image, torch.stack(arrays[-averaged * num_sides :]).mean(0) + image.mean())
