"""How much of a field a Gabor function explains: least squares for many fields at once."""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch
from torch import Tensor
from torch.func import jacfwd, vmap

# Across and along the wave, and frequencies, in shares of the field's side.
_WIDTHS = (0.08, 0.08), (0.08, 0.18), (0.14, 0.14), (0.14, 0.28)
_FREQUENCIES = 1.0, 1.8, 2.8, 4.5
_ORIENTATIONS = 8
_BLOCK = 2000


@dataclasses.dataclass(frozen=True)
class GaborFits:
    r"""Gabor functions :math:`e^{-\frac12 (u^2 / \sigma_u^2 + v^2 / \sigma_v^2)} (a \cos 2 \pi f u + b \sin 2 \pi f u)` of ``n`` fields.

    The axes :math:`u, v` are those of pixels, moved to :math:`(x_0, y_0)` and turned by :math:`\theta`.

    Attributes:
        parameters: :math:`x_0, y_0, \log \sigma_u, \log \sigma_v, \theta, f, a, b`, ``(n, 8)``, lengths in pixels.
        r_squared: share of each field's variance about its mean that is explained, ``(n,)``.
    """

    parameters: Tensor
    r_squared: Tensor

    def fields(self, side: int) -> Tensor:
        """The functions on the pixels, ``(n, side**2)``."""
        return _gabor(self.parameters, _pixels(side))


def fit_gabors(fields: Tensor, steps: int = 25, starts: int = 3) -> GaborFits:
    """Fits a Gabor function to each of ``n`` square fields ``(n, side**2)``.

    The best of a grid of functions, amplitudes and phases fitted, start the Levenberg-Marquardt algorithm, all of them at once; the best
    end is kept.

    Args:
        fields: the fields; of length zero they are explained not at all.
        steps: of Levenberg and Marquardt.
        starts: how many of the grid's functions to start from.
    """
    fields = fields.detach().double()
    unit = fields.norm(dim=1, keepdim=True).clamp(min=torch.finfo(fields.dtype).tiny)
    side = round(fields.shape[1] ** 0.5)
    pixels, targets = _pixels(side), fields / unit
    starting = _best_of_grid(targets, pixels, starts)
    found, errors = _climb(starting.flatten(0, 1), targets.repeat_interleave(starts, 0), pixels, steps)
    errors, best = errors.reshape(-1, starts).min(1)
    parameters = found.reshape(-1, starts, 8)[torch.arange(len(fields)), best]
    parameters[:, 6:] *= unit
    spread = (targets - targets.mean(1, keepdim=True)).square().sum(1)
    return GaborFits(parameters, torch.where(spread > 0, 1 - errors / spread.clamp(min=1e-12), 0.0))


def _pixels(side: int) -> Tensor:
    line = torch.arange(side, dtype=torch.float64)
    return torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).reshape(-1, 2)


def _waves(shape: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Even and odd Gabor functions ``(*batch, D)`` of positions, widths, orientations and frequencies ``(*batch, 6)``."""
    x, y, log_u, log_v, angle, frequency = (part.unsqueeze(-1) for part in shape[..., :6].unbind(-1))
    across, along = pixels[:, 0] - x, pixels[:, 1] - y
    u, v = across * angle.cos() + along * angle.sin(), along * angle.cos() - across * angle.sin()
    envelope = (-0.5 * ((u * (-log_u).exp()).square() + (v * (-log_v).exp()).square())).exp()
    return envelope * (2 * math.pi * frequency * u).cos(), envelope * (2 * math.pi * frequency * u).sin()


def _gabor(parameters: Tensor, pixels: Tensor) -> Tensor:
    even, odd = _waves(parameters, pixels)
    return parameters[..., 6:7] * even + parameters[..., 7:8] * odd


def _best_of_grid(targets: Tensor, pixels: Tensor, number: int) -> Tensor:
    """The grid's functions that explain most of each target ``(n, D)``, with their amplitudes, ``(n, number, 8)``."""
    side = float(pixels.max()) + 1
    places = [(k + 0.5) * side / 8 - 0.5 for k in range(8)]
    widths = [(math.log(side * across), math.log(side * along)) for across, along in _WIDTHS]
    frequencies = [number / side for number in _FREQUENCIES]
    angles = [k * math.pi / _ORIENTATIONS for k in range(_ORIENTATIONS)]
    choices = itertools.product(places, places, widths, angles, frequencies)
    grid = torch.tensor([(x, y, *width, angle, frequency) for x, y, width, angle, frequency in choices], dtype=torch.float64)
    gains, amplitudes = [], []
    for shapes in grid.split(_BLOCK):
        # The odd part is made orthogonal to the even one: what both explain then adds up.
        even, odd = _waves(shapes, pixels)
        squares = even.square().sum(-1, keepdim=True)
        overlap = (even * odd).sum(-1, keepdim=True) / squares
        odd = odd - overlap * even
        powers = odd.square().sum(-1)
        first, second = targets @ even.mT / squares.squeeze(-1), targets @ odd.mT / powers.clamp(min=1e-12)
        gain = first.square() * squares.squeeze(-1) + second.square() * powers
        best = gain.topk(number)
        gains.append(best.values)
        first, second = first.gather(1, best.indices), second.gather(1, best.indices)
        first = first - second * overlap.squeeze(-1)[best.indices]
        amplitudes.append(torch.cat([shapes[best.indices], torch.stack([first, second], -1)], -1))
    chosen = torch.cat(gains, 1).topk(number).indices
    return torch.cat(amplitudes, 1).gather(1, chosen.unsqueeze(-1).expand(-1, -1, 8))


def _climb(parameters: Tensor, targets: Tensor, pixels: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Levenberg-Marquardt from every row ``(n, 8)``; the ends and their squared errors."""
    jacobian = vmap(jacfwd(lambda row: _gabor(row, pixels)))
    ends, errors = [], []
    for rows, target in zip(parameters.split(_BLOCK), targets.split(_BLOCK), strict=True):
        error = (target - _gabor(rows, pixels)).square().sum(1)
        damping = torch.full_like(error, 1e-2)
        for _ in range(steps):
            slope = jacobian(rows)
            residual = target - _gabor(rows, pixels)
            normal = slope.mT @ slope
            scale = normal.diagonal(dim1=1, dim2=2) + 1e-9
            system = normal + torch.diag_embed(damping.unsqueeze(-1) * scale)
            step = torch.linalg.solve(system, slope.mT @ residual.unsqueeze(-1)).squeeze(-1)
            tried = _within(rows + step, float(pixels.max()) + 1)
            reached = (target - _gabor(tried, pixels)).square().sum(1)
            better = reached < error
            rows, error = torch.where(better.unsqueeze(-1), tried, rows), torch.where(better, reached, error)
            damping = torch.where(better, damping / 4, damping * 4).clamp(1e-8, 1e8)
        ends.append(rows)
        errors.append(error)
    return torch.cat(ends), torch.cat(errors)


def _within(rows: Tensor, side: float) -> Tensor:
    """Centres on the field or near it, widths from half a pixel to the field's, frequencies up to one half per pixel."""
    place, widths, angle, frequency, amplitudes = rows.split([2, 2, 1, 1, 2], -1)
    place, widths = place.clamp(-0.25 * side, 1.25 * side), widths.clamp(math.log(0.5), math.log(side))
    return torch.cat([place, widths, angle, frequency.clamp(0.0, 0.5), amplitudes], -1)
