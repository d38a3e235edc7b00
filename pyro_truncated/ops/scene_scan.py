"""How well each object of a scene fits at each place: a correlation of images and templates with a soft threshold inside."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend
from pyro_truncated.ops.canvas import Canvas, SceneParameters
from pyro_truncated.ops.unpacked import normal_log_density


@torch.no_grad()
def scan_places(
    images: Tensor,
    scene: SceneParameters,
    canvas: Canvas,
    *,
    clutter: float = 0.0,
    min_mask: float = 0.0,
    max_mask: float = 1.0,
    behind: Tensor | None = None,
) -> Tensor:
    r"""How well each object fits at each place, for every image.

    .. math:: f_{nh}(l) = \sum_i \log\bigl[1 - \alpha_{hi}
        + \alpha_{hi}\, \mathcal N(y_{n,p(l,i)}; w_{hi}, \sigma^2 I) / p_0(y_{n,p(l,i)})\bigr],
        \qquad p_0 = (1 - \epsilon)\, p_B + \epsilon.

    Without clutter, :math:`\epsilon = 0`, it is the log likelihood ratio of the object alone against the bare background. Then any object
    is better than none where there is another one; clutter, the share of pixels that other objects cover in whatever colour, makes it the
    ratio against anything else. It is a correlation of images and templates with a soft threshold inside, which keeps what is hidden of an
    object from outweighing what is seen.

    Args:
        images: ``(N, D, F)``.
        scene: objects and background.
        canvas: sizes.
        clutter: :math:`\epsilon`, in [0, 1).
        min_mask: entries of smaller mask probability are left out ("representative features").
        max_mask: entries of larger mask probability are compared as if it were this one.
        behind: log densities of the pixels in the place of the bare background's :math:`p_B`, ``(N, D)``.

    Returns:
        ``(N, H, L)`` float32, to about 1e-4 per entry.
    """
    if behind is None:
        behind = _background(images, scene)
    is_compared = scene.masks >= min_mask
    scene = scene._replace(masks=scene.masks.clamp(max=max_mask))
    terms = (*_terms(images, scene, behind, clutter), is_compared)
    return backend("scene_scan", images).scan(images, scene, canvas, *terms)  # type: ignore[no-any-return]


@torch.no_grad()
def scan_at(
    images: Tensor, scene: SceneParameters, canvas: Canvas, objects: Tensor, places: Tensor, *, clutter: float = 0.0, min_mask: float = 0.0
) -> Tensor:
    """What :func:`scan_places` would say of a few objects ``(N, K)`` at a few places ``(N, K, P)``: ``(N, K, P)`` float32.

    All other arguments are those of :func:`scan_places`. On the CPU it costs only these places, elsewhere the whole scan.
    """
    terms = (*_terms(images, scene, _background(images, scene), clutter), scene.masks >= min_mask)
    return backend("scene_scan", images).scan_at(images, scene, canvas, *terms, objects, places)  # type: ignore[no-any-return]


def _background(images: Tensor, scene: SceneParameters) -> Tensor:
    """Log densities of the pixels, ``(N, D)``, where there is no object."""
    return normal_log_density(images.double(), scene.background.double(), scene.background_variance.double())


def _terms(images: Tensor, scene: SceneParameters, behind: Tensor, clutter: float) -> tuple[Tensor, Tensor]:
    """What scans add up.

    Minus the log density of what else pixels may show, ``(N, D)``, and log-odds of the masks, with the constant of the objects' densities,
    ``(H, T)``.
    """
    energy = -torch.logaddexp(math.log1p(-clutter) + behind, torch.full_like(behind, math.log(clutter) if clutter else -math.inf))
    logits = scene.masks.double().logit() - 0.5 * images.shape[-1] * (2 * math.pi * scene.variance.double()).log()
    return energy, logits
