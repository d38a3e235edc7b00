r"""Scenes of objects that hide each other: log densities of images under many states at once, and the sums that M-steps are made of.

An object ``h`` is a template of ``T`` entries with colours :math:`w_{hi}` and mask probabilities :math:`\alpha_{hi}`. In a scene it is
absent or lies at a place, and for every image and entry its mask is on with probability :math:`\alpha_{hi}`. A pixel over which no mask is
on has the background's density :math:`p_B`. Otherwise one object owns it and it is :math:`\mathcal N(w_{hi}, \sigma^2 I)`: without depth
(``rank=None``) an object drawn uniformly from those whose mask is on, with depth the foremost of these. With :math:`a_h` the mask
probabilities of the objects over a pixel, the masks are summed out exactly:

.. math:: \rho_h = a_h \int_0^1 \prod_{j \ne h} (1 - a_j + a_j u)\, du
    \quad\text{or}\quad \rho_h = a_h \prod_{j \text{ before } h} (1 - a_j).

States are places ``(N, C, H)``: the index of the pixel (of the grid of places) under the upper left corner, or -1 for an absent object.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyro_truncated.ops.compiled import scene_scan as occlusion_scan_cpu
from pyro_truncated.ops.compiled import scenes as occlusion_cpu
from pyro_truncated.ops.compiled.quadratic import _array
from pyro_truncated.ops.vectorised import scenes as occlusion_dense

MAX_OBJECTS = 62
_MAX_BLOCKS = 16


@dataclasses.dataclass(frozen=True)
class Canvas:
    """Sizes of images and templates, and where templates may lie.

    Attributes:
        height: rows of an image.
        width: columns of an image.
        template_height: rows of a template.
        template_width: columns of a template.
        wrap: whether a template that leaves the canvas on one side comes back on the other; otherwise it lies inside.

    Raises:
        ValueError: if a size is not positive or templates are larger than images.
    """

    height: int
    width: int
    template_height: int
    template_width: int
    wrap: bool = True

    def __post_init__(self) -> None:
        if not (1 <= self.template_height <= self.height and 1 <= self.template_width <= self.width):
            raise ValueError(
                f"templates of {self.template_height} x {self.template_width} pixels do not fit on a canvas of {self.height} x {self.width}"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the grid of places."""
        if self.wrap:
            return self.height, self.width
        return self.height - self.template_height + 1, self.width - self.template_width + 1

    @property
    def num_places(self) -> int:
        """Number of places ``L``."""
        return self.grid[0] * self.grid[1]

    @property
    def num_pixels(self) -> int:
        """Number of pixels of an image, ``D``."""
        return self.height * self.width

    @property
    def num_entries(self) -> int:
        """Number of pixels of a template, ``T``."""
        return self.template_height * self.template_width

    @functools.cached_property
    def pixels(self) -> Tensor:
        """Index of the pixel under each template entry at each place, ``(L, T)`` int64."""
        row, column = (torch.arange(size, device="cpu") for size in self.grid)
        down, right = (torch.arange(size, device="cpu") for size in (self.template_height, self.template_width))
        rows = (row[:, None, None, None] + down[:, None]) % self.height
        columns = (column[:, None, None] + right) % self.width
        return (rows * self.width + columns).reshape(self.num_places, self.num_entries)

    @property
    def shape(self) -> tuple[int, ...]:
        """Height and width of the canvas, the template and the grid."""
        return self.height, self.width, self.template_height, self.template_width, *self.grid


class SceneStatistics(NamedTuple):
    r"""Sums over data points and states with weights :math:`w_{nc}`, float64.

    Attributes:
        owned: of the probability that the object owns the pixel under an entry, times one, the colours and the squared colours of the
            pixel, ``(H, T, F + 2)``.
        on: of the probability that a mask is on, ``(H, T)``.
        present: over the states with the object, ``(H,)``.
        background: of the probability that nothing owns a pixel, times one, the colours and the squared colours, ``(F + 2,)``.
    """

    owned: Tensor
    on: Tensor
    present: Tensor
    background: Tensor


class SceneParameters(NamedTuple):
    r"""Objects and background.

    Attributes:
        features: colours of the objects :math:`w`, ``(H, T, F)``.
        masks: mask probabilities :math:`\alpha` in (0, 1), ``(H, T)``.
        variance: :math:`\sigma^2`, a scalar.
        background: mean colour of the background, ``(F,)``.
        background_variance: variance of the background, a scalar.
    """

    features: Tensor
    masks: Tensor
    variance: Tensor
    background: Tensor
    background_variance: Tensor


def scene_log_prob(places: Tensor, images: Tensor, scene: SceneParameters, canvas: Canvas, rank: Tensor | None = None) -> Tensor:
    r"""Log densities of images under states, the masks summed out.

    On the CPU an object at a place costs :math:`O(T)` per image, and a state only the pixels where its objects overlap. Differentiable
    once in features, masks, variances and background.

    Args:
        places: ``(N, C, H)`` integers, -1 for absent objects.
        images: ``(N, D, F)``.
        scene: objects and background.
        canvas: sizes.
        rank: depth of the objects, ``(N, C, H)`` integers, of which the smallest lies in front; ``None`` without depth.

    Returns:
        ``(N, C)`` in float64.

    Raises:
        ValueError: if shapes do not fit, or there are more than 62 objects.
    """
    _check(places, images, scene, canvas, rank)
    return _SceneLogProb.apply(places, rank, images, canvas, *scene)  # type: ignore[no-any-return, no-untyped-call]


def scene_statistics(
    places: Tensor, weights: Tensor, images: Tensor, scene: SceneParameters, canvas: Canvas, rank: Tensor | None = None
) -> SceneStatistics:
    """Who owns the pixels, summed over states with weights ``(N, C)``; the other arguments are those of :func:`scene_log_prob`.

    States of weight zero are skipped.
    """
    _check(places, images, scene, canvas, rank)
    if weights.shape != places.shape[:2]:
        raise ValueError(f"weights must have shape (N, C) = {tuple(places.shape[:2])}; got {tuple(weights.shape)}")
    if places.device.type != "cpu":
        doubles = [tensor.double() for tensor in (weights, images, *scene)]
        return SceneStatistics(*_kernel(occlusion_dense.statistics)(places, rank, *doubles, canvas.pixels))
    (num_objects, num_entries, channels), num_blocks = scene.features.shape, min(max(1, len(places)), _MAX_BLOCKS)
    owned = torch.zeros(num_blocks, num_objects, num_entries, channels + 2, dtype=torch.float64, device="cpu")
    on = torch.zeros(num_blocks, num_objects, num_entries, dtype=torch.float64, device="cpu")
    present, rest = (
        torch.zeros(num_blocks, num_objects, dtype=torch.float64, device="cpu"),
        torch.zeros(num_blocks, channels + 2, dtype=torch.float64, device="cpu"),
    )
    states, model = _arguments(places, rank, scene, canvas)
    sums = (owned, on, present, rest)
    _kernel(occlusion_cpu.statistics)(*states, _array(weights), _array(images), *model, *(total.numpy() for total in sums))
    return SceneStatistics(*(total.sum(0) for total in sums))


@torch.no_grad()
def scan_places(images: Tensor, scene: SceneParameters, canvas: Canvas, *, clutter: float = 0.0, min_mask: float = 0.0) -> Tensor:
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

    Returns:
        ``(N, H, L)`` float32, to about 1e-4 per entry.
    """
    terms = _scan_terms(images, scene, clutter, min_mask)
    if images.device.type != "cpu" or images.shape[-1] > 3:
        return _scan_dense(images, scene, terms, canvas)
    out = torch.empty(len(images), len(scene.features), *canvas.grid, device="cpu")
    _kernel(occlusion_scan_cpu.scan)(*_scan_arrays(images, scene, terms, canvas), out.numpy())
    return out.flatten(2)


@torch.no_grad()
def scan_at(
    images: Tensor, scene: SceneParameters, canvas: Canvas, objects: Tensor, places: Tensor, *, clutter: float = 0.0, min_mask: float = 0.0
) -> Tensor:
    """What :func:`scan_places` would say of a few objects ``(N, K)`` at a few places ``(N, K, P)``: ``(N, K, P)`` float32.

    All other arguments are those of :func:`scan_places`. On the CPU it costs only these places, elsewhere the whole scan.
    """
    terms = _scan_terms(images, scene, clutter, min_mask)
    if images.device.type != "cpu" or images.shape[-1] > 3:
        whole = _scan_dense(images, scene, terms, canvas)
        return whole.gather(1, objects.unsqueeze(-1).expand(-1, -1, whole.shape[2])).gather(2, places)
    arrays = _scan_arrays(images, scene, terms, canvas)
    out = torch.empty(places.shape, device="cpu")
    _kernel(occlusion_scan_cpu.scan_at)(*arrays, canvas.grid[1], objects.numpy(), places.contiguous().numpy(), out.numpy())
    return out


class _ScanTerms(NamedTuple):
    """What scans add up.

    Attributes:
        energy: minus the log density of what else pixels may show, ``(N, D)``.
        logits: log-odds of the masks, with the constant of the objects' densities, ``(H, T)``.
        used: which entries of the templates are compared, ``(H, T)``.
    """

    energy: Tensor
    logits: Tensor
    used: Tensor


def _scan_terms(images: Tensor, scene: SceneParameters, clutter: float, min_mask: float) -> _ScanTerms:
    behind = occlusion_dense.normal_log_density(images.double(), scene.background.double(), scene.background_variance.double())
    energy = -torch.logaddexp(math.log1p(-clutter) + behind, torch.full_like(behind, math.log(clutter) if clutter else -math.inf))
    logits = scene.masks.double().logit() - 0.5 * images.shape[-1] * (2 * math.pi * scene.variance.double()).log()
    return _ScanTerms(energy, logits, scene.masks >= min_mask)


def _scan_dense(images: Tensor, scene: SceneParameters, terms: _ScanTerms, canvas: Canvas) -> Tensor:
    objects = scene.features, scene.masks, scene.variance.double()
    return occlusion_dense.scan(images, terms.energy, *objects, terms.logits, terms.used, canvas.pixels)


def _scan_arrays(images: Tensor, scene: SceneParameters, terms: _ScanTerms, canvas: Canvas) -> tuple[Any, ...]:
    """What the compiled scans take: three planes whatever the number of colours, padded by what templates reach over, and the objects."""
    height, width, (rows, columns) = canvas.height, canvas.width, canvas.grid
    root, missing = (2 * scene.variance.double()).sqrt(), 3 - images.shape[-1]
    colours = torch.nn.functional.pad((scene.features.double() / root).float(), (0, missing))
    planes = torch.nn.functional.pad((images.double() / root).float(), (0, missing)).mT.reshape(-1, 3, height, width)
    full = rows + canvas.template_height - 1, columns + canvas.template_width - 1
    reach = (0, full[1] - width, 0, full[0] - height)
    energy = terms.energy.float().reshape(-1, 1, height, width)
    planes, padded = (torch.nn.functional.pad(t, reach, mode="circular") for t in (planes, energy))
    floors = torch.log1p(-scene.masks.double()).float()
    tensors = planes.flatten(2), padded.flatten(1), colours, terms.logits.float(), floors
    return *(t.contiguous().numpy() for t in tensors), (canvas.template_width, full[1]), terms.used.contiguous().numpy()


class _SceneLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, places: Tensor, rank: Tensor | None, images: Tensor, canvas: Canvas, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(places, rank, images, *inputs)
        ctx.canvas = canvas
        if places.device.type != "cpu":
            features, masks, variance, background, spread = (tensor.double() for tensor in inputs)
            return occlusion_dense.log_prob(places, rank, images.double(), features, masks, variance, background, spread, canvas.pixels)
        states, model = _arguments(places, rank, SceneParameters(*inputs), canvas)
        out = torch.empty(places.shape[:2], dtype=torch.float64, device="cpu")
        _kernel(occlusion_cpu.log_prob)(*states, _array(images), *model, out.numpy())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
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
        return None, None, None, None, *(new.to(given.dtype).reshape(given.shape) for new, given in zip(gradients, inputs, strict=True))


def squared_errors(sums: Tensor, means: Tensor) -> Tensor:
    """Sum of squared distances to means ``(..., F)``, from sums ``(..., F + 2)`` of weights, weighted vectors and weighted squares."""
    errors: Tensor = sums[..., -1] - 2 * (sums[..., 1:-1] * means).sum(-1) + sums[..., 0] * means.square().sum(-1)
    return errors.sum()


def _variance_gradient(sums: Tensor, means: Tensor, variance: Tensor) -> Tensor:
    return 0.5 * (squared_errors(sums, means) / variance - sums[..., 0].sum() * means.shape[-1]) / variance


@functools.lru_cache(maxsize=4)
def _quadrature(most: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Legendre rules on the unit interval of 1, 2, ... nodes, up to what is exact for ``most`` objects, one behind the other."""
    rules = [np.polynomial.legendre.leggauss(number) for number in range(1, (most + 1) // 2 + 1)]
    return np.concatenate([(nodes + 1) / 2 for nodes, _ in rules]), np.concatenate([weights / 2 for _, weights in rules])


def _arguments(places: Tensor, rank: Tensor | None, scene: SceneParameters, canvas: Canvas) -> tuple[Any, Any]:
    """States and model as the kernels take them."""
    states = places.to(torch.int32).contiguous().numpy()
    ranks = states if rank is None else rank.to(torch.int32).contiguous().numpy()
    nodes, weights = _quadrature(len(scene.masks)) if rank is None else (np.empty(0), np.empty(0))
    objects = _array(scene.features), _array(scene.masks), float(scene.variance)
    behind = _array(scene.background), float(scene.background_variance)
    return (states, ranks), (*objects, *behind, np.array(canvas.shape), nodes, weights)


def _kernel(compiled: Any) -> Any:
    """A compiled function, of whose arguments type checkers know nothing."""
    return compiled


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
    if places.numel() and not -1 <= int(places.min()) <= int(places.max()) < canvas.num_places:
        raise ValueError(f"places must lie in -1 .. {canvas.num_places - 1}; got {int(places.min())} .. {int(places.max())}")
