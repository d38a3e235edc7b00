"""Where learning of objects starts from: windows of images that show one of them alone."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.distributions import Canvas

_MOST_WINDOWS = 500
_ALIKE = 0.94


def windows_alone(images: Tensor, contrast: Tensor, canvas: Canvas) -> tuple[Tensor, Tensor, Tensor]:
    """One window ``(N, T, F)`` of each image, its contrast to the background ``(N, T)``, and how much it lies alone, ``(N,)``."""
    (height, width), margin = (canvas.template_height, canvas.template_width), 2
    row, column = torch.arange(height).double() - (height - 1) / 2, torch.arange(width).double() - (width - 1) / 2
    # What lies around a window counts against it, and a little what lies off its centre, so that small objects are centred.
    inner = 1 - 0.2 * ((row[:, None] / height).square() + (column / width).square())
    kernel = torch.nn.functional.pad(inner, (margin,) * 4, value=-2.0)
    kernels = torch.stack([kernel, torch.ones_like(kernel)]).unsqueeze(1).to(contrast)
    # Around the canvas, more than once where template and margin together are larger.
    around_rows = torch.arange(-margin, canvas.height + height + margin - 1, device=images.device) % canvas.height
    around_columns = torch.arange(-margin, canvas.width + width + margin - 1, device=images.device) % canvas.width
    surround = contrast[:, around_rows][:, :, around_columns].unsqueeze(1)
    score, around = torch.nn.functional.conv2d(surround, kernels)[..., : canvas.grid[0], : canvas.grid[1]].flatten(2).unbind(1)
    best = score.argmax(1, keepdim=True)
    under = canvas.pixels_on(images.device)[best.squeeze(1)]
    rows = torch.arange(len(images), device=images.device).unsqueeze(-1)
    brightness = contrast.flatten(1)[rows, under]
    total = brightness.sum(1)
    alone = total / around.gather(1, best).squeeze(1).clamp(min=1e-12)
    # A few bright pixels of noise in an empty image lie alone, too.
    return images.flatten(1, 2)[rows, under], brightness, torch.where(total > 0.1 * total.median(), alone, 0.0)


def typical_windows(windows: Tensor, number: int, generator: torch.Generator | None) -> Tensor:
    """Positions of windows ``(N, t, u, F)``, each of which resembles the most windows that none before resembles.

    Windows resemble each other if their cosine at some shift of up to half a window is large enough.
    """
    device = "cpu" if generator is None else generator.device
    drawn = torch.randperm(len(windows), generator=generator, device=device)[:_MOST_WINDOWS].to(windows.device)
    unit = torch.nn.functional.normalize(windows[drawn].flatten(1), dim=1).reshape(len(drawn), *windows.shape[1:]).movedim(-1, 1).float()
    reach = windows.shape[1] // 2, windows.shape[2] // 2
    alike = torch.cat([torch.nn.functional.conv2d(unit, part, padding=reach).flatten(2).amax(2) for part in unit.split(64)], 1)
    resembles = (alike > _ALIKE).mT
    is_left = torch.ones(len(drawn), dtype=torch.bool, device=windows.device)
    chosen: list[Tensor] = []
    for _ in range(number):
        best = (resembles & is_left).sum(1).argmax()
        chosen.append(best)
        is_left = is_left & ~resembles[best]
        is_left = is_left if bool(is_left.any()) else torch.ones_like(is_left)
    return drawn[torch.stack(chosen)]
