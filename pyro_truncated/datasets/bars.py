"""Bars: the test of the field for components that overlap."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated.utils.arguments import check_count


class Bars(NamedTuple):
    """A bars test.

    Example:
        >>> data, components, states = linear_bars(10, 4)
        >>> components.shape
        torch.Size([16, 8])

    Attributes:
        data: images ``(N, D)``.
        components: what generated them, one column per bar ``(D, H)``.
        states: which bars each image holds, ``(N, H)`` uint8.
    """

    data: Tensor
    components: Tensor
    states: Tensor


def bar_components(size: int, width: int = 1) -> Tensor:
    """Returns all horizontal, then all vertical bars, ``(size**2, 2 * (size - width + 1))``.

    A bar of ones is ``size`` pixels long and ``width`` wide. Bars of one orientation start at successive pixels.

    Example:
        >>> bar_components(2)
        tensor([[1., 0., 1., 0.],
                [1., 0., 0., 1.],
                [0., 1., 1., 0.],
                [0., 1., 0., 1.]])
    """
    size, width = check_count("size", size), check_count("width", width)
    if width > size:
        raise ValueError(f"width must lie in 1 .. {size}, the size of the image; got {width}")
    offset = torch.arange(size) - torch.arange(size - width + 1)[:, None]
    profile = ((offset >= 0) & (offset < width)).float()
    horizontal = profile[:, :, None].expand(-1, -1, size)
    vertical = profile[:, None, :].expand(-1, size, -1)
    return torch.cat([horizontal, vertical]).flatten(1).mT.contiguous()


def _bar_states(num_data: int, num_bars: int, mean_active: float, generator: torch.Generator | None) -> Tensor:
    num_data = check_count("num_data", num_data)
    if not 0 <= mean_active <= num_bars:
        raise ValueError(f"mean_active must lie in 0 .. {num_bars}; got {mean_active}")
    return (torch.rand(num_data, num_bars, generator=generator) < mean_active / num_bars).to(torch.uint8)


def _noisy_or(states: Tensor, components: Tensor, generator: torch.Generator | None) -> Bars:
    silent = (states.float() @ torch.log1p(-components.double()).float().mT).exp()
    return Bars(torch.bernoulli(1 - silent, generator=generator), components, states)


def noisy_or_bars(
    num_data: int,
    size: int = 8,
    *,
    mean_active: float = 2.0,
    weight: float = 0.8,
    background: float = 0.0,
    generator: torch.Generator | None = None,
) -> Bars:
    r"""The standard bars test of the noisy-OR model: :math:`p(y_d = 1 \mid s) = 1 - \prod_h (1 - W_{dh} s_h)`.

    ``2 * size`` bars that do not overlap within an orientation appear independently (Foeldiak, 1990).

    Example:
        >>> noisy_or_bars(100, 4).data.unique()
        tensor([0., 1.])

    Args:
        num_data: number of images ``N``.
        size: side of the image.
        mean_active: mean number of bars in an image.
        weight: probability that a bar switches on a pixel of its own.
        background: probability that it switches on any other pixel.
        generator: source of randomness.
    """
    if not (0 <= weight < 1 and 0 <= background < 1):
        raise ValueError(f"weight and background must lie in [0, 1); got {weight} and {background}")
    mask = bar_components(size)
    states = _bar_states(num_data, mask.shape[1], mean_active, generator)
    return _noisy_or(states, background + (weight - background) * mask, generator)


def overlapping_bars(
    num_data: int = 400, *, mean_active: float = 2.0, weight: float = 0.8, generator: torch.Generator | None = None
) -> Bars:
    """Sixteen strongly overlapping bars under a noisy-OR.

    Eight horizontal and eight vertical bars lie on a 9 x 9 grid, each nine pixels long and two wide. This reconstructs the test of Luecke &
    Sahani (JMLR 2008, figure 9) and of Evolutionary Expectation Maximization (2018, figure 4). Grid, width, two bars in an image on
    average, and the noisy-OR weight are choices made here.

    Example:
        >>> overlapping_bars(10).components.shape[1]
        16
    """
    components = weight * bar_components(9, width=2)
    return _noisy_or(_bar_states(num_data, components.shape[1], mean_active, generator), components, generator)


def linear_bars(
    num_data: int,
    size: int = 10,
    *,
    mean_active: float = 5.0,
    amplitude: float = 10.0,
    noise: float = 2.0,
    generator: torch.Generator | None = None,
) -> Bars:
    r"""Bars that add up, with Gaussian noise: :math:`y \sim N(W s, \mathrm{noise}^2 I)`.

    The defaults are the crowded test of Evolutionary Expectation Maximization (2018, section 5.1): twenty bars, five of them in an image on
    average. The amplitude and the noise follow other work on this test.

    Example:
        >>> bars = linear_bars(100, 6, mean_active=2.0)
        >>> bars.data.shape, bars.components.shape, bars.states.shape
        (torch.Size([100, 36]), torch.Size([36, 12]), torch.Size([100, 12]))

    Args:
        num_data: number of images ``N``.
        size: side of the image. There are ``2 * size`` bars.
        mean_active: mean number of bars in an image.
        amplitude: value of a bar's pixels.
        noise: standard deviation of the noise.
        generator: source of randomness.
    """
    components = amplitude * bar_components(size)
    states = _bar_states(num_data, components.shape[1], mean_active, generator)
    data = states.float() @ components.mT
    return Bars(data + noise * torch.randn(data.shape, generator=generator), components, states)


def matched_bars(weight: Tensor, truth: Tensor, threshold: float = 0.9) -> int:
    """How many true components ``(D, H_true)`` a learned dictionary ``(D, H)`` recovers.

    A true component is recovered if its most similar column has a cosine of at least ``threshold``, and resembles no other true component
    more.

    Example:
        >>> components = bar_components(4)
        >>> matched_bars(3 * components[:, torch.randperm(8)], components)  # in any order and scale
        8
    """
    if weight.shape[0] != truth.shape[0]:
        raise ValueError(f"weight and truth must have the same number of rows; got {tuple(weight.shape)} and {tuple(truth.shape)}")
    columns, components = (torch.nn.functional.normalize(matrix.detach().double(), dim=0) for matrix in (weight, truth))
    similarities = components.mT @ columns
    similarity, column = similarities.max(1)
    owner = similarities.argmax(0)
    return int(((similarity >= threshold) & (owner[column] == torch.arange(len(column), device=column.device))).sum())
