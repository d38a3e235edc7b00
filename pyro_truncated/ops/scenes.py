r"""Log densities of images of objects that hide each other, and statistics.

An object ``h`` is a template of ``T`` entries with colours :math:`w_{hi}` and mask probabilities :math:`\alpha_{hi}`. A pixel over which no
mask is on has the background's density :math:`p_B`. Otherwise one object whose mask is on owns it and it is :math:`\mathcal N(w_{hi},
\sigma^2 I)`: without depth (``rank=None``) one drawn uniformly, with depth the foremost. With :math:`a_h` the mask probabilities of the
objects over a pixel, the masks are summed out exactly:

.. math:: \rho_h = a_h \int_0^1 \prod_{j \ne h} (1 - a_j + a_j u)\, du
    \quad\text{or}\quad \rho_h = a_h \prod_{j \text{ before } h} (1 - a_j).

States are places ``(N, C, H)``: the index of the pixel (of the grid of places) under the upper left corner, or -1 for an absent object.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend, gradient, save_with_context
from pyro_truncated.ops.canvas import Canvas, SceneParameters, SceneStatistics
from pyro_truncated.ops.deferred_checks import raise_if
from pyro_truncated.ops.vectorised import scenes as vectorised
from pyro_truncated.ops.vectorised.scenes import normal_log_density

MAX_OBJECTS = 62


def scene_log_prob(places: Tensor, images: Tensor, scene: SceneParameters, canvas: Canvas, rank: Tensor | None = None) -> Tensor:
    """Log densities ``(N, C)`` of images under states, the masks summed out.

    On the CPU an object at a place costs :math:`O(T)` per image, and a state only the pixels where its objects overlap. Differentiable
    once in features, masks, variances and background.

    Images are ``(N, D, F)``, places ``(N, C, H)``, -1 for absent objects, at most 62. With depth the object of the smallest ``rank (N, C,
    H)`` lies in front.
    """
    _check(places, images, scene, canvas, rank)
    return _SceneLogProb.apply(places, rank, images, canvas, *scene)  # type: ignore[no-untyped-call]


@torch.no_grad()
def scene_pixel_log_prob(places: Tensor, images: Tensor, scene: SceneParameters, canvas: Canvas, rank: Tensor | None = None) -> Tensor:
    """Log densities ``(N, C, D)`` of the pixels, which :func:`scene_log_prob` sums."""
    _check(places, images, scene, canvas, rank)
    return backend("scenes", places).pixel_log_prob(places, rank, images, scene, canvas)


def scene_statistics(
    places: Tensor, weights: Tensor, images: Tensor, scene: SceneParameters, canvas: Canvas, rank: Tensor | None = None
) -> SceneStatistics:
    """Sums over who owns the pixels, with weights ``(N, C)``."""
    _check(places, images, scene, canvas, rank)
    if weights.shape != places.shape[:2]:
        raise ValueError(f"weights must have shape (N, C) = {tuple(places.shape[:2])}; got {tuple(weights.shape)}")
    return SceneStatistics(*backend("scenes", places).statistics(places, rank, weights, images, scene, canvas))


def scene_means(
    places: Tensor, weights: Tensor, images: Tensor, scene: SceneParameters, canvas: Canvas, rank: Tensor | None = None
) -> Tensor:
    r"""Means of the noise-free pixels, :math:`\sum_s q(s) (\sum_h r_h w_h + r_0 B)`, ``(N, D, F)``."""
    _check(places, images, scene, canvas, rank)
    return vectorised.means(places, rank, weights, images, scene, canvas)


class _SceneLogProb(torch.autograd.Function):
    """Log densities of images under scenes, see :func:`scene_log_prob`."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, rank: Tensor | None, images: Tensor, canvas: Canvas, *inputs: Tensor) -> Tensor:
        """Returns log densities ``(N, C)``."""
        save_with_context(ctx, places, rank, images, *inputs)
        ctx.canvas = canvas
        return backend("scenes", places).log_prob(places, rank, images, SceneParameters(*inputs), canvas)

    @staticmethod
    @gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in features, masks, variances and background."""
        # Fisher's identity: owners and masks are latents that have been summed out.
        places, rank, images, *inputs = ctx.saved_tensors
        if ctx.needs_input_grad[2]:
            raise NotImplementedError("scene_log_prob is not differentiable in the images")
        scene = SceneParameters(*(tensor.double() for tensor in inputs))
        sums = scene_statistics(places, grad, images, scene, ctx.canvas, rank)
        features, masks, variance, background, background_variance = scene
        gradients = (
            (sums.owned[..., 1:-1] - sums.owned[..., :1] * features) / variance,
            (sums.on - masks * sums.present.unsqueeze(-1)) / (masks * (1 - masks)),
            _variance_gradient(sums.owned.flatten(0, 1), features.flatten(0, 1), variance),
            (sums.background[1:-1] - sums.background[0] * background) / background_variance,
            _variance_gradient(sums.background, background, background_variance),
        )
        return *(None,) * 4, *(new.reshape(original.shape) for new, original in zip(gradients, inputs, strict=True))


def squared_errors(sums: Tensor, means: Tensor) -> Tensor:
    """Squared distances to means ``(..., F)`` from sums of weights, vectors and squares."""
    errors: Tensor = sums[..., -1] - 2 * (sums[..., 1:-1] * means).sum(-1) + sums[..., 0] * means.square().sum(-1)
    return errors.sum()


def _variance_gradient(sums: Tensor, means: Tensor, variance: Tensor) -> Tensor:
    return 0.5 * (squared_errors(sums, means) / variance - sums[..., 0].sum() * means.shape[-1]) / variance


def _check(places: Tensor, images: Tensor, scene: SceneParameters, canvas: Canvas, rank: Tensor | None) -> None:
    features, masks, background = scene.features, scene.masks, scene.background
    if places.dim() != 3 or places.is_floating_point() or places.shape[-1] != len(features):
        raise ValueError(f"places must be integers (N, C, {len(features)}); got shape {tuple(places.shape)} of type {places.dtype}")
    expected = (len(places), canvas.num_pixels, features.shape[-1])
    if images.shape != expected:
        raise ValueError(f"images must have shape (N, D, F) = {expected}; got {tuple(images.shape)}")
    if features.dim() != 3 or masks.shape != features.shape[:2] or features.shape[1] != canvas.num_entries:
        raise ValueError(
            f"features (H, T, F) and masks (H, T) must have T = {canvas.num_entries} entries; "
            f"got {tuple(features.shape)} and {tuple(masks.shape)}"
        )
    if background.shape != features.shape[-1:]:
        raise ValueError(f"background must have shape (F,) = {tuple(features.shape[-1:])}; got {tuple(background.shape)}")
    if rank is not None and rank.shape != places.shape:
        raise ValueError(f"rank must have the shape of places, {tuple(places.shape)}; got {tuple(rank.shape)}")
    if len(features) > MAX_OBJECTS:
        raise ValueError(f"there may be at most {MAX_OBJECTS} objects; got {len(features)}")
    is_outside = ((places < -1) | (places >= canvas.num_places)).any()
    raise_if(is_outside, lambda: f"places must lie in -1 .. {canvas.num_places - 1}; got {int(places.min())} .. {int(places.max())}")


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
        \qquad p_0 = (1 - \epsilon)\, p_B + \epsilon / V.

    Without clutter, :math:`\epsilon = 0`, it is the log likelihood ratio of the object alone against the bare background. Clutter is the
    share of pixels that other objects cover in whatever colour, of the volume :math:`V` that objects and background span. It is a soft
    threshold that keeps the hidden part of an object from outweighing the visible part.

    Entries of mask probabilities below ``min_mask`` are left out ("representative features"), those above ``max_mask`` count as that.
    ``behind (N, D)`` are log densities of the pixels in the place of the bare background's. The result ``(N, H, L)`` is float32, exact to
    about 1e-4 per entry.
    """
    if behind is None:
        behind = _background(images, scene)
    is_compared = scene.masks >= min_mask
    scene = scene._replace(masks=scene.masks.clamp(max=max_mask))
    terms = (*_terms(images, scene, behind, clutter), is_compared)
    return backend("scenes", images).scan(images, scene, canvas, *terms)


@torch.no_grad()
def scan_at(
    images: Tensor, scene: SceneParameters, canvas: Canvas, objects: Tensor, places: Tensor, *, clutter: float = 0.0, min_mask: float = 0.0
) -> Tensor:
    """:func:`scan_places` for objects ``(N, K)`` at places ``(N, K, P)``, in float32.

    On the CPU it costs only these places, elsewhere the whole scan.
    """
    terms = (*_terms(images, scene, _background(images, scene), clutter), scene.masks >= min_mask)
    return backend("scenes", images).scan_at(images, scene, canvas, *terms, objects, places)


def _background(images: Tensor, scene: SceneParameters) -> Tensor:
    """Log densities of the pixels, ``(N, D)``, where there is no object."""
    return normal_log_density(images.double(), scene.background.double(), scene.background_variance.double())


def _terms(images: Tensor, scene: SceneParameters, background_log_density: Tensor, clutter: float) -> tuple[Tensor, Tensor]:
    """What scans add up.

    Minus the log density of what else pixels may show, ``(N, D)``, and log-odds of the masks, with the constant of the objects' densities,
    ``(H, T)``.
    """
    colours = torch.cat([scene.features.flatten(0, 1), scene.background.unsqueeze(0)]).double()
    spans = (colours.amax(0) - colours.amin(0)).clamp(min=scene.variance.double().sqrt())
    covered = (math.log(clutter) if clutter else -math.inf) - spans.log().sum()
    energy = -torch.logaddexp(math.log1p(-clutter) + background_log_density, covered.expand_as(background_log_density))
    logits = scene.masks.double().logit() - 0.5 * images.shape[-1] * (2 * math.pi * scene.variance.double()).log()
    return energy, logits
