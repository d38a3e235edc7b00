"""Occlusive components: objects anywhere in an image that hide each other.

Each has its colours and its mask.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import pyro
import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import Population
from pyro_truncated.distributions import Canvas, DepthOrder, OccludedScene, Positions, SceneParameters
from pyro_truncated.extend import Renamed, UniqueModule, check_counts, names_arguments, raise_if, selected_rows, takes_arrays
from pyro_truncated.models.binary_causes import activation, best_prior, cast_like, check_real, count_data, first_rows
from pyro_truncated.models.dictionary import data_scale
from pyro_truncated.models.object_initialization import estimate_background, lone_windows, typical_objects
from pyro_truncated.scenes import PlacementCompletion, PlacementMoves, PlaceScan
from pyro_truncated.search import Search

_MIN_WEIGHT = 1e-8
_NUM_ADDED, _NUM_MOVED = 4, 4


class OcclusiveComponents(UniqueModule):
    r"""Invariant exclusive (or occlusive) components of images.

    They tell which objects an image shows, where, and which parts are visible.

    .. math:: s_h \sim \mathrm{Bernoulli}(\pi_h), \quad x_h \sim \mathrm{Uniform}(1..L) \text{ if } s_h = 1, \quad
        m_{hi} \sim \mathrm{Bernoulli}(\alpha_{hi}),

    with a mask bit for every pixel of every object. A pixel over which no mask is on is
    :math:`\mathcal N(B, \sigma_B^2 I)`. Otherwise one of the objects whose mask is on owns it and
    it is :math:`\mathcal N(w_{hi}, \sigma^2 I)`. With ``order="depth"`` this is the foremost, in a
    uniformly random order of the objects present, the site ``order``. With ``order="exclusive"`` it
    is drawn uniformly, pixel by pixel, and there is no such site. Mask bits and owners are summed
    out exactly. The discrete sites are ``presence``, ``position`` and perhaps ``order``, all of
    them vectors of length ``H``; absent objects have position 0.

    The likelihood does not allocate images for every state that it evaluates. Give the guide a
    large ``memory_budget``. It then scores many states together, and their common terms are
    computed once.

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
        """Initialises from the data.

        Objects are averages of windows that show the same. The background is the common part of
        most pixels.

        Colour and noise of the background are those of the narrow part of a mixture of two normal
        distributions of pixels. Of every image, four windows are taken that are most salient while
        their surroundings are not. Of all these windows the most isolated ones are used. They are
        clustered by twice as many objects as needed, each at the shift at which it resembles an
        object most (k-means with translations). Objects are then pruned, one after the other, that
        the others explain best. In an average of many windows
        there is hardly any noise: noise at which single windows of different objects look alike does no harm.

        Args:
            y: images ``(N, height, width, F)``.
            generator: source of randomness.
            scale: standard deviation to start from, as a share of the root mean square of the data.

        Returns:
            The model itself.

        Raises:
            TypeError: if the images are complex.
            ValueError: if they are not finite or of another shape, or ``scale`` is not positive.
        """
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be a positive number; got {scale!r}")
        rows = first_rows(self._check(y), generator).double()
        unit = data_scale(rows.square().sum(), torch.tensor(float(rows.numel())))
        background, noise = estimate_background(rows.flatten(0, 2) / unit, generator)
        windows = lone_windows(rows / unit - background, noise, self.canvas, self.num_objects)
        found = typical_objects(windows, self.num_objects, generator)
        self.features = (unit * (found.objects.movedim(1, -1) + background)).to(self.features)
        self.masks = torch.where(found.stand_out(noise), 0.7, 0.3).to(self.masks)
        self.prior = torch.full_like(self.prior, min(0.5, 4 / self.num_objects))
        self.scale = (unit * max(scale, self.min_scale)).to(self.scale)
        self.background = (unit * background).to(self.background)
        self.background_scale = (unit * noise.sqrt().clamp(min=self.min_scale)).to(self.background_scale)
        return self

    def default_search(self, num_states: int) -> Search:
        """Returns the default search of :func:`pyro_truncated.learn`.

        Good scenes are completed, and objects moved.

        Args:
            num_states: states per data point.

        Returns:
            A :class:`~pyro_truncated.scenes.PlacementCompletion` with :class:`~pyro_truncated.scenes.PlacementMoves`.
        """
        completion = PlacementCompletion(PlaceScan(self.scene_parameters, self.canvas), _NUM_ADDED)
        return completion + PlacementMoves(self.canvas.grid, 1, _NUM_MOVED, wrap=self.canvas.wrap)

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
        rows = self._check(population.rows_of(y))
        statistics: dict[str, Tensor] = self._any_scene().statistics(dataclasses.replace(population, indices=None), rows, temperature)
        return statistics

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Maximises the expected log joint within the parameters' bounds.

        Let :math:`r_{hi}` be posterior probabilities that object ``h`` owns the pixel under its
        entry ``i``, and :math:`r_0` that nothing does, summed over data points and states. Then
        :math:`w_{hi} = \sum r_{hi} y / \sum r_{hi}`, :math:`\sigma^2 = \sum r_{hi} \|y - w_{hi}\|^2
        / (F \sum r_{hi})`, likewise :math:`B` and :math:`\sigma_B^2`. :math:`\alpha_{hi}` is the
        mean posterior probability that the mask is on where the object is present, :math:`\pi_h`
        that it is present. What has no data keeps its value.
        """
        owned, rest = statistics["owned"], statistics["background"]
        features = _means(owned, self.features.double().flatten(1, 2))
        background = _means(rest, self.background.double())
        present = statistics["present"].unsqueeze(-1)
        masks = torch.where(present > _MIN_WEIGHT, statistics["on"] / present.clamp(min=_MIN_WEIGHT), self.masks.double().flatten(1))
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
        rows = self._check(population.rows_of(y))
        mean: Tensor = cast_like(self._any_scene().reconstruct(dataclasses.replace(population, indices=None), rows), y)
        return mean

    @torch.no_grad()
    def scene_parameters(self) -> SceneParameters:
        """Objects and background at their present values, without gradients."""
        parameters: SceneParameters = self._any_scene().parameters
        return parameters

    parameters_of_scene = Renamed("scene_parameters")

    def _any_scene(self) -> OccludedScene:
        """The likelihood, for what is the same for all scenes."""
        nothing = torch.zeros(self.num_objects, dtype=torch.int64, device=self.features.device)
        return self.likelihood(nothing, nothing)

    def _best_scale(self, sums: Tensor, means: Tensor, old: Tensor, floor: Tensor) -> Tensor:
        weight = sums[..., 0].sum() * self.num_channels
        variance = _squared_errors(sums, means) / weight.clamp(min=_MIN_WEIGHT)
        best = variance.clamp(min=0.0).sqrt().maximum(floor)
        return torch.where(weight > _MIN_WEIGHT, best, old.detach().double()).to(old)

    def _check(self, y: Tensor) -> Tensor:
        expected = (self.canvas.height, self.canvas.width, self.num_channels)

        def complain() -> None:
            raise ValueError(f"y must be finite and of shape (N, {', '.join(map(str, expected))}) with N > 0; got {tuple(y.shape)}")

        check_real(y)
        if y.dim() != 4 or y.shape[1:] != expected or not len(y):
            complain()
        raise_if(~y.isfinite().all(), complain)
        return y


def _means(sums: Tensor, old: Tensor) -> Tensor:
    """Returns weighted means ``(..., F)`` from sums ``(..., F + 2)``.

    Without weight they are the old ones.
    """
    weight = sums[..., :1]
    return torch.where(weight > _MIN_WEIGHT, sums[..., 1:-1] / weight.clamp(min=_MIN_WEIGHT), old)


def _squared_errors(sums: Tensor, means: Tensor) -> Tensor:
    """Sum of squared distances to means ``(..., F)``, from sums ``(..., F + 2)``."""
    errors: Tensor = sums[..., -1] - 2 * (sums[..., 1:-1] * means).sum(-1) + sums[..., 0] * means.square().sum(-1)
    return errors.sum()
