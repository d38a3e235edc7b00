"""Occlusive components: objects anywhere in an image that hide each other."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import ClassVar, NamedTuple

import pyro
import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import conv2d, pad

from pyro_truncated import Population
from pyro_truncated.distributions import Canvas, DepthOrder, OccludedScene, Positions, SceneParameters
from pyro_truncated.extend import (
    Renamed,
    UniqueModule,
    check_counts,
    generator_device,
    names_arguments,
    raise_if,
    selected_rows,
    takes_arrays,
)
from pyro_truncated.models.data_model import (
    MIN_COMPONENT_COUNT,
    activation,
    best_prior,
    cast_like,
    check_real,
    count_data,
    first_rows,
    random_rows,
)
from pyro_truncated.models.dictionary import data_scale
from pyro_truncated.scenes import PlacementCompletion, PlacementMoves, PlaceScan
from pyro_truncated.search import Search

_MAX_MISSING_SHARE = 0.3  # less of a window's energy is missing in an object that it shows


class Windows(NamedTuple):
    """Windows of images less their background, with what lies around them."""

    pixels: Tensor  # (n, F, t + 4 p, u + 4 q) float32: objects of t x u pixels may lie up to p rows and q columns off the centre
    energy: Tensor  # squared length of the t x u pixels at the centre, less that of the noise, (n,)
    reach: tuple[int, int]  # p and q
    noise: Tensor  # variance of the noise

    def within(self, times: int) -> Tensor:
        """The centres with so many times ``p`` and ``q`` pixels around them."""
        rows, columns = ((2 - times) * reach for reach in self.reach)
        return self.pixels[..., rows : self.pixels.shape[-2] - rows, columns : self.pixels.shape[-1] - columns]


class Clusters(NamedTuple):
    """What windows show in common."""

    objects: Tensor  # (K, F, t, u), less the background
    size: Tensor  # how many windows each is the average of, (K,)
    energy: Tensor  # squared length, less that of the noise left, (K,)

    def take(self, index: Tensor) -> Clusters:
        """Some of them."""
        return Clusters(*(value[index] for value in self))


def estimate_background(pixels: Tensor, generator: torch.Generator | None, steps: int = 30) -> tuple[Tensor, Tensor]:
    """Colour ``(F,)`` and variance of the background among pixels ``(P, F)``.

    It is the narrow part of a mixture of two normal distributions, fitted by EM.
    """
    some = random_rows(pixels, min(len(pixels), 20_000), generator)
    least = (1e-6 * some.square().mean()).clamp(min=1e-12)
    colour, (mean, wide) = some.median(0).values, _moments(some, torch.ones_like(some[:, 0]))
    variance, wide = (some - colour).square().mean(1).quantile(0.25).clamp(min=least), wide.clamp(min=least)
    share = torch.full_like(variance, 0.5)
    for _ in range(steps):
        behind = share.log() - 0.5 * ((some - colour).square() / variance + variance.log()).sum(1)
        before = (1 - share).log() - 0.5 * ((some - mean).square() / wide + wide.log()).sum(1)
        is_behind = (behind - before).sigmoid()
        # Neither part may vanish.
        share = is_behind.mean().clamp(0.05, 0.99)
        colour, spread = _moments(some, is_behind)
        mean, wide = _moments(some, 1 - is_behind)
        variance, wide = spread.mean().clamp(min=least), wide.clamp(min=least)
    return colour, variance


def _moments(points: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted means and variances ``(F,)`` of points ``(P, F)``."""
    weights = (weights / weights.sum().clamp(min=1e-12)).unsqueeze(1)
    mean = (weights * points).sum(0)
    return mean, (weights * (points - mean).square()).sum(0)


def isolated_windows(images: Tensor, noise: Tensor, canvas: Canvas, num_objects: int) -> Windows:
    """Windows of images ``(N, height, width, F)``, less background, with little around them."""
    num_channels = images.shape[-1]
    alone, energy, place = _brightest_windows(images.square().sum(-1) - num_channels * noise, canvas)
    # What noise alone would show does not stand out.
    stands_out = energy > 4 * noise * math.sqrt(2 * canvas.num_entries * num_channels)
    alone = torch.where(stands_out, alone / energy.clamp(min=1e-12), -torch.inf).flatten()
    number = min(60 * num_objects, 2000, max(1, int(alone.isfinite().sum())))
    best = alone.topk(number).indices
    row, place = best // place.shape[1], place.flatten()[best]
    height, width = canvas.template_height, canvas.template_width
    rows, columns = height // 2, width // 2
    top, left = place // canvas.grid[1] - 2 * rows, place % canvas.grid[1] - 2 * columns
    pixels = _cut(images.movedim(-1, 1), row, top, left, (height + 4 * rows, width + 4 * columns), canvas.wrap)
    return Windows(pixels.float().contiguous(), energy.flatten()[best].float(), (rows, columns), noise.float())


def typical_objects(windows: Windows, number: int, generator: torch.Generator | None) -> Clusters:
    """Averages windows that show the same object, for the commonest objects.

    Some of the windows are the first objects, without those that the others make up for best. Every window then belongs to the object that
    it resembles most, at the best shift, whose mean the object becomes. At the end again those go that the others make up for best.
    """
    # Twenty candidates for each object, of which two remain for the steps of k-means.
    count = min(20 * number, 500)
    candidates = torch.randperm(len(windows.energy), generator=generator, device=generator_device(generator))[:count].to(
        windows.energy.device
    )
    clusters = Clusters(windows.within(0)[candidates], torch.ones_like(candidates), windows.energy[candidates])
    clusters = clusters.take(prune_objects(missing_energy(windows, clusters)[0], 2 * number))
    # Objects beyond the candidates repeat these, with noise.
    objects, others = clusters.objects.tensor_split([len(candidates)])
    noise = torch.randn(others.shape, generator=generator, device=others.device if generator is None else generator.device).to(others)
    size = others.square().mean((1, 2, 3), keepdim=True).sqrt()
    clusters = clusters._replace(objects=torch.cat([objects, others + 0.1 * size * noise]))
    for _ in range(4):
        clusters = _average(windows, clusters)
    return clusters.take(prune_objects(missing_energy(windows, clusters)[0], number))


def missing_energy(windows: Windows, clusters: Clusters) -> tuple[Tensor, Tensor]:
    """The missing share of windows' energy and best shift, ``(n, K)``."""
    products = [conv2d(part, clusters.objects).flatten(2).max(2) for part in windows.within(1).split(100)]
    product, shift = (torch.cat([getattr(part, name) for part in products]) for name in ("values", "indices"))
    energy = windows.energy.unsqueeze(1)
    return (energy + clusters.energy - 2 * product).clamp(min=0.0) / energy.clamp(min=1e-12), shift


def prune_objects(missing_share: Tensor, number: int) -> Tensor:
    """Positions of so many objects, without those that the others explain best."""
    explained = (_MAX_MISSING_SHARE - missing_share).clamp(min=0.0)
    index = torch.arange(explained.shape[1], device=missing_share.device)
    while len(index) > number:
        best = explained[:, index].topk(2, 1)
        losses = torch.zeros_like(missing_share[0, index]).index_add_(0, best.indices[:, 0], best.values[:, 0] - best.values[:, 1])
        index = torch.cat([index[: losses.argmin()], index[losses.argmin() + 1 :]])
    return index[torch.arange(number, device=index.device) % len(index)]


def _average(windows: Windows, clusters: Clusters) -> Clusters:
    """Objects as means of the windows that resemble them most."""
    missing_share, shift = missing_energy(windows, clusters)
    nearest = missing_share.min(1)
    is_alike, owner = nearest.values < _MAX_MISSING_SHARE, nearest.indices
    best = shift.gather(1, owner.unsqueeze(1)).squeeze(1)
    (height, width), (rows, columns) = clusters.objects.shape[-2:], windows.reach
    side = 2 * columns + 1
    aligned = _cut(
        windows.pixels, torch.arange(len(best), device=best.device), best // side, best % side, (height + 2 * rows, width + 2 * columns)
    )
    size = torch.zeros_like(clusters.size).index_add_(0, owner, is_alike.to(clusters.size))
    total = torch.zeros_like(aligned[:1]).repeat(len(size), 1, 1, 1).index_add_(0, owner, aligned * is_alike[:, None, None, None])
    mean = total / size.clamp(min=1)[:, None, None, None]
    # Where most of it is seen: the first window may have cut something off.
    corner = conv2d(mean.square().sum(1, keepdim=True), _centre(height, width).to(mean)[None, None]).flatten(1).argmax(1)
    objects = _cut(mean, torch.arange(len(corner), device=corner.device), corner // side, corner % side, (height, width))
    energy = objects.square().sum((1, 2, 3)) - objects[0].numel() * windows.noise / size.clamp(min=1)
    several = size > 1
    return Clusters(
        torch.where(several[:, None, None, None], objects, clusters.objects),
        torch.where(several, size, clusters.size),
        torch.where(several, energy, clusters.energy),
    )


def _brightest_windows(contrast: Tensor, canvas: Canvas) -> tuple[Tensor, Tensor, Tensor]:
    """What windows of contrasts ``(N, height, width)`` show inside less around, inside, and places."""
    height, width = canvas.template_height, canvas.template_width
    # Pixels around a window that shall show background.
    margin = 2
    inner = _centre(height, width).to(contrast)
    kernels = torch.stack([pad(inner, (margin,) * 4, value=-2.0), pad(torch.ones_like(inner), (margin,) * 4)]).unsqueeze(1)
    every = torch.arange(len(contrast), device=contrast.device)
    corner = torch.full_like(every, -margin)
    rows, columns = (cells - 1 + side + 2 * margin for cells, side in zip(canvas.grid, (height, width), strict=True))
    around = _cut(contrast.unsqueeze(1), every, corner, corner, (rows, columns), canvas.wrap)
    score, inside = conv2d(around, kernels).flatten(2).unbind(1)
    peaks = []
    for _ in range(4):
        best = score.max(1)
        peaks.append((best.values, inside.gather(1, best.indices.unsqueeze(1)).squeeze(1), best.indices))
        score = score.masked_fill(_overlap(best.indices, canvas), -torch.inf)
    alone, energy, place = (torch.stack(values, 1) for values in zip(*peaks, strict=True))
    return alone, energy, place


def _centre(height: int, width: int) -> Tensor:
    """Weights of a window's pixels, lower off its centre."""
    down, right = torch.arange(height).double() - (height - 1) / 2, torch.arange(width).double() - (width - 1) / 2
    # A tenth less at the corners.
    return 1 - 0.2 * ((down[:, None] / height).square() + (right / width).square())


def _overlap(place: Tensor, canvas: Canvas) -> Tensor:
    """Which places ``(N, L)`` have windows that overlap those at places ``(N,)``."""
    near: list[Tensor] = []
    for position, size, cells, side in (
        (place // canvas.grid[1], canvas.height, canvas.grid[0], canvas.template_height),
        (place % canvas.grid[1], canvas.width, canvas.grid[1], canvas.template_width),
    ):
        distance = (torch.arange(cells, device=place.device) - position.unsqueeze(1)).abs()
        near.append((torch.minimum(distance, size - distance) if canvas.wrap else distance) < side)
    rows, columns = near
    return (rows.unsqueeze(2) & columns.unsqueeze(1)).flatten(1)


def _cut(pictures: Tensor, which: Tensor, top: Tensor, left: Tensor, size: tuple[int, int], wrap: bool = True) -> Tensor:
    """Parts ``(n, F, *size)`` of pictures ``(N, F, rows, columns)``."""
    index, is_inside = [], []
    for corner, steps, limit in zip((top, left), size, pictures.shape[2:], strict=True):
        along = corner.unsqueeze(1) + torch.arange(steps, device=corner.device)
        index.append(along % limit)
        is_inside.append((along >= 0) & (along < limit))
    parts = pictures.movedim(1, -1)[which[:, None, None], index[0].unsqueeze(2), index[1].unsqueeze(1)]
    if not wrap:
        parts = parts * (is_inside[0].unsqueeze(2) & is_inside[1].unsqueeze(1)).unsqueeze(-1)
    return parts.movedim(-1, 1)


class OcclusiveComponents(UniqueModule):
    r"""Invariant exclusive (or occlusive) components of images.

    .. math:: s_h \sim \mathrm{Bernoulli}(\pi_h), \quad x_h \sim \mathrm{Uniform}(1..L) \text{ if } s_h = 1, \quad
        m_{hi} \sim \mathrm{Bernoulli}(\alpha_{hi}),

    with a mask bit for every pixel of every object. A pixel over which no mask is on is :math:`\mathcal N(B, \sigma_B^2 I)`. Otherwise one
    of the objects whose mask is on owns it and it is :math:`\mathcal N(w_{hi}, \sigma^2 I)`. With ``order="depth"`` this is the foremost,
    in a uniformly random order of the objects present, the site ``order``. With ``order="exclusive"`` it is drawn uniformly, pixel by
    pixel. Mask bits and owners are summed out exactly. The discrete sites are vectors of length ``H``; absent objects have position 0.

    Give the guide a large ``memory_budget``: it then scores many states together, and their common terms are computed once.

    Example:
        >>> from pyro_truncated.scenes import PlaceScan, PlacementSelection, generated_objects, occluded_scenes
        >>> scenes = occluded_scenes(generated_objects(2, 3), 10, (8, 8), presence=0.5, wrap=True)
        >>> model = OcclusiveComponents(2, (8, 8), (3, 3)).initialize(scenes.data)
        >>> search = PlacementSelection(PlaceScan(model.scene_parameters, model.canvas), 2)
        >>> svi = SVI(model, AutoTruncated(model, num_states=8), ClosedForm(model), Truncated_ELBO(search))
        >>> loss = svi.step(scenes.data)

    Args:
        num_objects: number of objects ``H``.
        canvas: height and width of an image.
        template: height and width of an object.
        num_channels: number of colour channels ``F``.
        order: ``"exclusive"`` or ``"depth"``.
        wrap: whether objects that leave the canvas on one side come back on the other, so that there are as many places as pixels.
        min_scale: floor of both standard deviations, as a share of the data's root mean square. Without noise no density has a maximum.
        min_mask: masks stay in [min_mask, 1 - min_mask]. At 0 or 1 no pixel could ever change a mask again.
        dtype: type of the parameters. Default: torch's.

    Attributes:
        features: colours :math:`w`, ``(H, t, u, F)``.
        masks: mask probabilities :math:`\alpha`, ``(H, t, u)``.
        prior: probability :math:`\pi` of presence, ``(H,)``.
        scale: :math:`\sigma`, a scalar.
        background: :math:`B`, ``(F,)``.
        background_scale: :math:`\sigma_B`, a scalar.

    Raises:
        ValueError: for an unknown order, sizes that do not fit, or a bound out of range.

    Reference:
        Dai, Exarchakis and Lücke, "What are the invariant occlusive components of image patches? A probabilistic generative approach",
        NIPS 2013; Shelton, Gasthaus, Dai, Lücke and Gretton, "GP-select", Neural Computation 29 (2017), section 5.3.
    """

    has_informed_init: ClassVar[bool] = True  # what `initialize` finds are the objects, nearly

    features: Tensor
    masks: Tensor
    prior: Tensor
    scale: Tensor
    background: Tensor
    background_scale: Tensor

    @names_arguments
    def __init__(
        self,
        num_objects: int,
        canvas: tuple[int, int] = (30, 30),
        template: tuple[int, int] = (10, 10),
        num_channels: int = 3,
        *,
        order: str = "exclusive",
        wrap: bool = True,
        min_scale: float = 0.15,
        min_mask: float = 1e-3,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if order not in ("exclusive", "depth"):
            raise ValueError(f"order must be 'exclusive' or 'depth'; got {order!r}")
        check_counts(num_objects=num_objects, num_channels=num_channels)
        if not 0 < min_mask < 0.5 or not 0 < min_scale <= 1:
            raise ValueError(f"min_mask must lie in (0, 0.5) and min_scale in (0, 1]; got {min_mask} and {min_scale}")
        self.num_objects, self.num_channels, self.order = num_objects, num_channels, order
        self.min_scale, self.min_mask = min_scale, min_mask
        self.canvas = Canvas(*canvas, *template, wrap)
        shape, unit, one = (num_objects, *template), constraints.unit_interval, torch.ones((), dtype=dtype)
        self.features = PyroParam(torch.rand(*shape, num_channels, dtype=dtype), constraints.real)  # type: ignore[assignment]
        self.masks = PyroParam(torch.full(shape, 0.5, dtype=dtype), unit)  # type: ignore[assignment]
        self.prior = PyroParam(torch.full((num_objects,), min(0.5, 3 / num_objects), dtype=dtype), unit)  # type: ignore[assignment]
        self.scale = PyroParam(0.2 * one, constraints.positive)  # type: ignore[assignment]
        self.background = PyroParam(torch.zeros(num_channels, dtype=dtype), constraints.real)  # type: ignore[assignment]
        self.background_scale = PyroParam(0.1 * one, constraints.positive)  # type: ignore[assignment]

    @takes_arrays
    def forward(self, y: Tensor | None = None, batch_size: int | None = None, num_data: int | None = None) -> Tensor:
        """The model of images ``y (N, height, width, F)``; without data it generates ``num_data`` of them."""
        # Parameters that were given a prior are drawn outside of the plate, and stay what they are within a call.
        prior, *_ = self.prior, self.features, self.masks, self.scale, self.background, self.background_scale
        size = count_data(y, num_data)
        with pyro.plate("data", size, subsample_size=batch_size) as index:
            presence = pyro.sample("presence", activation(prior, self.num_objects))
            position = pyro.sample("position", Positions(presence, self.canvas.num_places))
            order = pyro.sample("order", DepthOrder(presence)) if self.order == "depth" else None
            scene = self.likelihood(presence, position, order)
            return pyro.sample("y", scene, obs=selected_rows(y, index))

    def likelihood(self, presence: Tensor, position: Tensor, order: Tensor | None = None) -> OccludedScene:
        """The likelihood of images of these objects."""
        return OccludedScene(
            presence, position, self.features, self.masks, self.scale, self.background, self.background_scale,
            (self.canvas.height, self.canvas.width), wrap=self.canvas.wrap, order=order,
        )  # fmt: skip

    @names_arguments
    @torch.no_grad()
    @takes_arrays
    def initialize(self, y: Tensor, generator: torch.Generator | None = None, *, scale: float = 1.0) -> OcclusiveComponents:
        """Initialises from averages of windows that show the same object.

        Colour and noise of the background are those of the narrow part of a mixture of two normal distributions of pixels. Of every image,
        the four most salient windows with empty surroundings are taken. They are clustered by twice as many objects as needed (k-means with
        translations), and objects pruned that the others explain best.

        Args:
            y: images ``(N, height, width, F)``.
            generator: source of randomness.
            scale: standard deviation to start from, as a share of the root mean square of the data.

        Raises:
            TypeError: if the images are complex.
            ValueError: if they are not finite or of another shape, or ``scale`` is not positive.

        Warns:
            UserWarning: if they vary by less than the floor of the noise.
        """
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be a positive number; got {scale!r}")
        rows = first_rows(self._check(y), generator).double()
        unit = data_scale(rows.square().sum(), torch.tensor(float(rows.numel())))
        floor, deviation = float(self.min_scale * unit), float(rows.flatten(0, 2).std(0, correction=0).max())
        if 0 < deviation < floor:
            warnings.warn(
                f"the images vary by {deviation:.3g}, less than {floor:.3g}, the floor of the noise: min_scale={self.min_scale:g} times "
                "their root mean square. Subtract their background, or take a smaller min_scale.",
                UserWarning,
                stacklevel=3,
            )
        background, noise = estimate_background(rows.flatten(0, 2) / unit, generator)
        windows = isolated_windows(rows / unit - background, noise, self.canvas, self.num_objects)
        clusters = typical_objects(windows, self.num_objects, generator)
        self.features = (unit * (clusters.objects.movedim(1, -1) + background)).to(self.features)
        # Likely on where the object exceeds the noise that averages leave, but undecided.
        left_over = self.num_channels * noise / clusters.size
        is_salient = clusters.objects.square().sum(1) > 4 * left_over[:, None, None]
        self.masks = torch.where(is_salient, 0.7, 0.3).to(self.masks)
        self.prior = torch.full_like(self.prior, min(0.5, 4 / self.num_objects))
        self.scale = (unit * max(scale, self.min_scale)).to(self.scale)
        self.background = (unit * background).to(self.background)
        self.background_scale = (unit * noise.sqrt().clamp(min=self.min_scale)).to(self.background_scale)
        return self

    def default_search(self, num_states: int) -> Search:
        """Returns the default search of :func:`pyro_truncated.learn`.

        Args:
            num_states: states per data point.

        Returns:
            A :class:`~pyro_truncated.scenes.PlacementCompletion` with :class:`~pyro_truncated.scenes.PlacementMoves`.
        """
        completion = PlacementCompletion(PlaceScan(self.scene_parameters, self.canvas))
        return completion + PlacementMoves(self.canvas.grid, 1, 4, wrap=self.canvas.wrap)

    @torch.no_grad()
    @takes_arrays
    def sufficient_statistics(
        self, population: Population, y: Tensor, batch_size: int | None = None, num_data: int | None = None, *, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        r"""Sums over the population's data points that :meth:`maximize` needs, in float64.

        Args:
            population: truncated posteriors. Its ``indices`` select the data points among ``y``.
            y: all images, ``(N, height, width, F)``.
            batch_size: as in :meth:`forward`. Not used.
            num_data: as in :meth:`forward`. Not used.
            temperature: of the posteriors.

        Returns:
            Those of :meth:`.OccludedScene.statistics`.
        """
        rows = self._check(population.select_rows(y))
        return self._any_scene().statistics(dataclasses.replace(population, indices=None), rows, temperature)

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Maximises the expected log joint within the parameters' bounds.

        Let :math:`r_{hi}` be posterior probabilities that object ``h`` owns the pixel under its
        entry ``i``, and :math:`r_0` that nothing does, summed over data points and states. Then
        :math:`w_{hi} = \sum r_{hi} y / \sum r_{hi}`, :math:`\sigma^2 = \sum r_{hi} \|y - w_{hi}\|^2
        / (F \sum r_{hi})`, likewise :math:`B` and :math:`\sigma_B^2`. The mask :math:`\alpha_{hi}` is the
        mean posterior probability that it is on where the object is present. The prior :math:`\pi_h`
        is that of presence. What has no data keeps its value.
        """
        owned, rest = statistics["owned"], statistics["background"]
        features = _means(owned, self.features.double().flatten(1, 2))
        background = _means(rest, self.background.double())
        present = statistics["present"].unsqueeze(-1)
        masks = torch.where(
            present > MIN_COMPONENT_COUNT, statistics["on"] / present.clamp(min=MIN_COMPONENT_COUNT), self.masks.double().flatten(1)
        )
        self.features = features.reshape(self.features.shape).to(self.features)
        self.background = background.to(self.background)
        self.masks = masks.clamp(self.min_mask, 1 - self.min_mask).reshape(self.masks.shape).to(self.masks)
        every = owned.sum((0, 1)) + rest
        floor = self.min_scale * data_scale(every[-1], every[0] * self.num_channels)
        self.scale = self._best_scale(owned, features, self.scale, floor)
        self.background_scale = self._best_scale(rest, background, self.background_scale, floor)
        self.prior = best_prior(statistics["present"], statistics["num_data"], False).to(self.prior)

    @torch.no_grad()
    @takes_arrays
    def reconstruct(self, population: Population, y: Tensor) -> Tensor:
        """Posterior mean ``(n, height, width, F)`` of the population's images without noise, see :meth:`.OccludedScene.reconstruct`.

        Args:
            population: truncated posteriors; its ``indices`` select the data points among ``y``.
            y: all images, ``(N, height, width, F)``.
        """
        rows = self._check(population.select_rows(y))
        return cast_like(self._any_scene().reconstruct(dataclasses.replace(population, indices=None), rows), y)

    @torch.no_grad()
    def scene_parameters(self) -> SceneParameters:
        """Objects and background at their present values, without gradients."""
        return self._any_scene().parameters

    parameters_of_scene = Renamed("scene_parameters")

    def _any_scene(self) -> OccludedScene:
        """The likelihood, for what is the same for all scenes."""
        nothing = torch.zeros(self.num_objects, dtype=torch.int64, device=self.features.device)
        return self.likelihood(nothing, nothing)

    def _best_scale(self, sums: Tensor, means: Tensor, old: Tensor, floor: Tensor) -> Tensor:
        weight = sums[..., 0].sum() * self.num_channels
        variance = OccludedScene.squared_errors(sums, means) / weight.clamp(min=MIN_COMPONENT_COUNT)
        best = variance.clamp(min=0.0).sqrt().maximum(floor)
        return torch.where(weight > MIN_COMPONENT_COUNT, best, old.detach().double()).to(old)

    def _check(self, y: Tensor) -> Tensor:
        expected = (self.canvas.height, self.canvas.width, self.num_channels)
        check_real(y)
        if y.dim() != 4 or y.shape[1:] != expected or not len(y):
            raise ValueError(f"y must be of shape (N, {', '.join(map(str, expected))}) with N > 0; got {tuple(y.shape)}")
        raise_if(~y.isfinite().all(), lambda: f"y must be finite; got {int((~y.isfinite()).sum())} entries that are not")
        return y


def _means(sums: Tensor, old: Tensor) -> Tensor:
    """Weighted means ``(..., F)`` from sums ``(..., F + 2)``, or old ones."""
    weight = sums[..., :1]
    return torch.where(weight > MIN_COMPONENT_COUNT, sums[..., 1:-1] / weight.clamp(min=MIN_COMPONENT_COUNT), old)
