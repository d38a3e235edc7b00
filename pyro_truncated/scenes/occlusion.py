"""Images of objects that hide each other: likelihood, and scenes with objects."""

from __future__ import annotations

import math
import warnings
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.util import broadcast_shape
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import ops
from pyro_truncated.datasets import load
from pyro_truncated.distributions.deferred_validation import defer_check_entries, defer_constraints, validate_later
from pyro_truncated.ops import raise_if
from pyro_truncated.ops.canvas import Canvas, SceneParameters
from pyro_truncated.ops.scenes import scene_log_prob, scene_means, scene_statistics, squared_errors
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arguments import check_count, names_arguments
from pyro_truncated.utils.constraints import finite, larger_batch, positive_finite


class _PresentIntegers(TorchDistribution):
    """Integers of objects: uniform for present ones, 0 for absent ones."""

    arg_constraints: ClassVar[dict[str, Any]] = defer_constraints({"presence": constraints.independent(constraints.boolean, 1)})
    _validate_sample = validate_later
    presence: Tensor

    @names_arguments
    def __init__(self, presence: Tensor, num_values: int, validate_args: bool | None = None) -> None:
        if presence.dim() < 1:
            raise ValueError("presence must have shape (*batch, H); got a scalar")
        self.presence = presence
        self.num_values = check_count("num_values", num_values)
        super().__init__(presence.shape[:-1], presence.shape[-1:], validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> Any:
        """Integers below the number of values."""
        return constraints.independent(constraints.integer_interval(0, self.num_values - 1), 1)

    def expand(self, batch_shape: Any, _instance: Any = None) -> _PresentIntegers:
        """The same distribution over a larger batch."""
        return larger_batch(self, batch_shape, _instance, presence=self.presence.expand(*batch_shape, -1))

    def _counts(self) -> Tensor:
        """The number of values of each object, ``(*batch, H)``, or of all."""
        return torch.full((), self.num_values, device=self.presence.device)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws integers ``(*sample_shape, *batch, H)``, int64."""
        shape = torch.Size(sample_shape) + self.batch_shape + self.event_shape
        counts = torch.where(self.presence > 0, self._counts(), 1).expand(shape)
        uniform = torch.rand(shape, device=self.presence.device, dtype=torch.float64)
        return torch.minimum((uniform * counts).long(), counts - 1)

    @names_arguments
    def log_prob(self, value: Tensor) -> Tensor:
        """The log probability of integers ``(*batch, H)``."""
        if self._validate_args:
            self._validate_sample(value)
        counts = torch.where(self.presence > 0, self._counts(), 1)
        dtype = self.presence.dtype if self.presence.is_floating_point() else torch.get_default_dtype()
        return torch.where(value < counts, -counts.to(dtype).log(), -math.inf).sum(-1)


class Positions(_PresentIntegers):
    """Positions: uniform over ``num_values`` for present objects, else 0.

    Example:
        >>> Positions(torch.tensor([1.0, 0.0]), 4).log_prob(torch.tensor([3, 0])).exp()
        tensor(0.2500)

    Args:
        presence: which objects are present, ``(*batch, H)``, zeros and ones.
        num_values: number of places ``L``.
        validate_args: whether to check parameters and values.
    """

    @names_arguments
    def log_prob(self, value: Tensor) -> Tensor:
        r"""The log probability :math:`-|s| \log L` of places ``(*batch, H)``."""
        if self._validate_args:
            self._validate_sample(value)
        present = self.presence > 0
        dtype = self.presence.dtype if self.presence.is_floating_point() else torch.get_default_dtype()
        number = present.sum(-1).to(dtype)
        return torch.where((present | (value == 0)).all(-1), -math.log(self.num_values) * number, -math.inf)


class DepthOrder(_PresentIntegers):
    """A uniformly random depth order of the present objects.

    Object ``h`` comes behind ``value[h]`` of the present objects of smaller index. So every order has exactly one code, and absent objects
    have code 0. :func:`depth_rank` turns codes into ranks and :func:`depth_code` ranks into codes.

    Example:
        >>> order = DepthOrder(torch.tensor([1.0, 0.0, 1.0]))
        >>> order.log_prob(torch.tensor([0, 0, 1])).exp()  # two objects: two orders
        tensor(0.5000)

    Args:
        presence: which objects are present, ``(*batch, H)``, zeros and ones.
        validate_args: whether to check parameters and values.
    """

    @names_arguments
    def __init__(self, presence: Tensor, validate_args: bool | None = None) -> None:
        super().__init__(presence, presence.shape[-1] if presence.dim() else 1, validate_args)

    def _counts(self) -> Tensor:
        present = (self.presence > 0).long()
        return present.cumsum(-1)


def depth_rank(code: Tensor, presence: Tensor) -> Tensor:
    """Ranks of present objects, the foremost 0, from codes ``(*batch, H)``."""
    num_objects = code.shape[-1]
    ranks: list[Tensor] = []
    for h in range(num_objects):
        here, present = code[..., h], presence[..., h] > 0
        # Whatever lies at this rank or behind moves back by one.
        ranks = [rank + ((rank >= here) & present) for rank in ranks]
        ranks.append(torch.where(present, here, num_objects))
    result = torch.stack(ranks, -1)
    return result.masked_fill(presence <= 0, num_objects)


def depth_code(rank: Tensor, presence: Tensor) -> Tensor:
    """Codes of a :class:`DepthOrder` from ranks ``(*batch, H)`` of present objects."""
    present = presence > 0
    front = rank.unsqueeze(-2) < rank.unsqueeze(-1)
    earlier = torch.ones(rank.shape[-1], rank.shape[-1], dtype=torch.bool, device=rank.device).tril(-1)
    code: Tensor = (front & earlier & present.unsqueeze(-2)).sum(-1)
    return code.masked_fill(~present, 0)


def object_places(population: Population, num_objects: int) -> tuple[Tensor, Tensor | None]:
    """Places ``(N, S, H)``, -1 if absent, and depth ranks or ``None``."""
    if population.space.num_latents not in (2 * num_objects, 3 * num_objects):
        raise ValueError(
            f"states of {num_objects} objects have {2 * num_objects} latents (presence and position) or {3 * num_objects} (and order); "
            f"got {population.space!r}"
        )
    levels = population.states(torch.int32)
    presence, position = levels[..., :num_objects], levels[..., num_objects : 2 * num_objects]
    code = levels[..., 2 * num_objects :]
    rank = depth_rank(code, presence) if code.shape[-1] else None
    return torch.where(presence > 0, position, -1), rank


class OccludedScene(TorchDistribution):
    r"""An image of occluding objects, their masks summed out.

    In every pixel the mask of each object there is on with its probability :math:`\alpha_{hi}`. If none is, the pixel is :math:`\mathcal
    N(B, \sigma_B^2 I)`. Otherwise it is :math:`\mathcal N(w_{hi}, \sigma^2 I)` of one object: with an order the foremost whose mask is on,
    without one drawn uniformly, pixel by pixel. See :mod:`pyro_truncated.ops.scenes` for the density. The cost per state grows only with
    the area where its objects overlap.

    Example:
        >>> presence, position = torch.tensor([1.0]), torch.tensor([0])
        >>> scene = OccludedScene(presence, position, torch.ones(1, 2, 2, 1), torch.full((1, 2, 2), 0.9), 0.1, torch.zeros(1), 0.1, (4, 4))
        >>> scene.sample().shape
        torch.Size([4, 4, 1])

    Args:
        presence: which objects are present, ``(*batch, H)``, zeros and ones.
        position: index of the place of each object, ``(*batch, H)`` integers; of absent objects it does not matter.
        features: colours :math:`w`, ``(H, t, u, F)`` for templates of ``t x u`` pixels and ``F`` channels.
        masks: mask probabilities :math:`\alpha`, ``(H, t, u)``, in (0, 1).
        scale: standard deviation :math:`\sigma` of the objects' pixels, a scalar.
        background: mean colour :math:`B`, ``(F,)``.
        background_scale: standard deviation :math:`\sigma_B`, a scalar.
        canvas: height and width of the image.
        wrap: whether objects that leave the canvas on one side return on the other, so that every pixel is a place.
        order: codes of the depth order, see :class:`DepthOrder`, ``(*batch, H)``; ``None`` without.
        validate_args: whether to check parameters and values.

    Raises:
        ValueError: if shapes do not fit or a parameter is invalid.

    Reference:
        Dai, Exarchakis and Lücke, "What are the invariant occlusive components of image patches? A probabilistic
        generative approach", NIPS 2013. The model with exclusive components is theirs; the owner of a pixel is
        decided as said above.
    """

    squared_errors = staticmethod(squared_errors)
    arg_constraints: ClassVar[dict[str, Any]] = defer_constraints(
        {
            "presence": constraints.independent(constraints.boolean, 1),
            "features": constraints.independent(constraints.real, 4),
            "masks": constraints.independent(constraints.unit_interval, 3),
            "scale": constraints.positive,
            "background": constraints.independent(constraints.real, 1),
            "background_scale": constraints.positive,
        }
    )
    support = constraints.independent(constraints.real, 3)
    _validate_sample = validate_later

    @names_arguments
    def __init__(
        self,
        presence: Tensor,
        position: Tensor,
        features: Tensor,
        masks: Tensor,
        scale: Tensor | float,
        background: Tensor,
        background_scale: Tensor | float,
        canvas: tuple[int, int],
        *,
        wrap: bool = True,
        order: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if features.dim() != 4 or masks.shape != features.shape[:3] or presence.shape[-1:] != features.shape[:1]:
            raise ValueError(
                "presence (*batch, H), features (H, t, u, F) and masks (H, t, u) must fit; "
                f"got {tuple(presence.shape)}, {tuple(features.shape)} and {tuple(masks.shape)}"
            )
        self.canvas = Canvas(*canvas, features.shape[1], features.shape[2], wrap)
        self.presence, self.position, self.order = presence, position, order
        self.features, self.masks, self.background = features, masks, background
        self.scale, self.background_scale = (
            torch.as_tensor(value, dtype=features.dtype, device=features.device) for value in (scale, background_scale)
        )
        if self._validate_args if validate_args is None else validate_args:
            defer_check_entries(finite, position=position, background=background)
            defer_check_entries(positive_finite, scale=self.scale, background_scale=self.background_scale)
        shapes = [value.shape[:-1] for value in (presence, position, order) if value is not None]
        event_shape = torch.Size((*canvas, features.shape[-1]))
        super().__init__(torch.Size(broadcast_shape(*shapes)), event_shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> OccludedScene:
        """The same distribution over a larger batch."""
        latents = {"presence": self.presence, "position": self.position, "order": self.order}
        larger = {name: None if value is None else value.expand(*batch_shape, -1) for name, value in latents.items()}
        return larger_batch(self, batch_shape, _instance, **larger)

    @names_arguments
    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of images ``(*batch, height, width, F)``, differentiable once.

        Raises:
            ValueError: for a place off the canvas, or a code of the order that no number of objects has.
        """
        if self._validate_args:
            self._validate_sample(value)
        batch = torch.Size(broadcast_shape(self.batch_shape, value.shape[:-3]))
        # Images that all states of a batch share are not copied: the batch's last dimensions are the images'.
        own = value.shape[:-3]
        while own and own[0] == 1:
            own = own[1:]
        if own != batch[len(batch) - len(own) :]:
            own = batch
        value = value.reshape(own + value.shape[-3:]) if len(own) < value.dim() - 3 else value.expand(own + self.event_shape)
        images = value.flatten(-3, -2).reshape(-1, self.canvas.num_pixels, value.shape[-1])
        places = self._by_image(torch.where(self.presence > 0, self.position.long(), -1), batch, len(own))
        rank = None if self.order is None else self._by_image(self._rank(), batch, len(own))
        log_prob = scene_log_prob(places, images, self.parameters, self.canvas, rank)
        dtype = torch.promote_types(self.features.dtype, value.dtype)
        return log_prob.mT.reshape(batch).to(dtype)

    @torch.no_grad()
    def statistics(self, population: Population, value: Tensor, temperature: float = 1.0) -> dict[str, Tensor]:
        r"""Expected sufficient statistics, summed over the population's data points, in float64.

        Let :math:`r_{hi}` be the posterior probability that object ``h`` owns the pixel under its entry ``i``, summed over data points and
        states. The gradient of the truncated free energy is

        .. math:: \frac{\partial \mathcal F}{\partial w_{hi}} = \frac{\sum r_{hi}\, (y - w_{hi})}{\sigma^2}, \qquad
            \frac{\partial \mathcal F}{\partial \alpha_{hi}} = \frac{m_{hi} - n_h\, \alpha_{hi}}{\alpha_{hi} (1 - \alpha_{hi})}

        where :math:`m_{hi}` is how often the mask is on and :math:`n_h` how often the object is present.

        Args:
            population: truncated posteriors over presence, position and perhaps order. Its ``indices`` select the
                data points among all data.
            value: all images, ``(N, height, width, F)``.
            temperature: of the posteriors.

        Returns:
            ``num_data``; ``owned (H, T, F + 2)`` and ``background (F + 2,)``; ``on (H, T)`` :math:`m` and ``present
            (H,)`` :math:`n`. The first two are sums of the probability that an entry (or nothing) owns a pixel, times
            one, the colours and their squared length. All can be added and scaled.
        """
        images = population.select_rows(value).flatten(1, 2)
        places, rank = object_places(population, self.features.shape[0])
        weights = population.weights(temperature)
        # Most states of a population are lost beside the best; those of weight zero are skipped.
        weights = weights.masked_fill(weights < torch.finfo(weights.dtype).eps, 0.0)
        sums = scene_statistics(places, weights, images, self.parameters, self.canvas, rank)
        return {**sums._asdict(), "num_data": sums.on.new_full((), len(population))}

    @torch.no_grad()
    def reconstruct(self, population: Population, value: Tensor) -> Tensor:
        """Returns posterior means of images without noise.

        Args:
            population: truncated posteriors as for :meth:`statistics`.
            value: all images, ``(N, height, width, F)``.

        Returns:
            ``(N, height, width, F)`` for the population's data points, in float64.
        """
        images = population.select_rows(value).flatten(1, 2)
        places, rank = object_places(population, self.features.shape[0])
        means = scene_means(places, population.weights(), images, self.parameters, self.canvas, rank)
        return means.reshape(-1, *self.event_shape)

    @property
    def numbers_per_state(self) -> int:
        """Returns how many temporary numbers the density of a state takes."""
        return len(self.features)

    @property
    def parameters(self) -> SceneParameters:
        """Objects (templates in one dimension), background and variances in float64."""
        return SceneParameters(
            self.features.flatten(1, 2), self.masks.flatten(1), self.scale.double().square(),
            self.background, self.background_scale.double().square(),
        )  # fmt: skip

    def _rank(self) -> Tensor:
        """Ranks of the present objects; impossible codes are scored, too."""
        assert self.order is not None
        order, size = self.order, self.presence.shape[-1]
        raise_if(
            ((order < 0) | (order >= size)).any(),
            lambda: f"codes of a depth order of {size} objects must lie in 0 .. {size - 1}; got {int(order.min())} .. {int(order.max())}",
        )
        return depth_rank(order.long(), self.presence)

    def _by_image(self, states: Tensor, batch: torch.Size, image_dims: int) -> Tensor:
        """States ``(images, states of each, H)``."""
        states = states.expand(batch + self._state_shape)
        num_images = math.prod(batch[len(batch) - image_dims :])
        return states.reshape(-1, num_images, states.shape[-1]).transpose(0, 1)

    @property
    def _state_shape(self) -> torch.Size:
        return self.features.shape[:1]

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws images, masks and owners of pixels included."""
        shape = torch.Size(sample_shape) + self.batch_shape
        presence, position = (value.expand(shape + self._state_shape) for value in (self.presence, self.position))
        under = self.canvas.pixels_on(position.device)[torch.where(presence > 0, position, 0).long()]
        masks = self.masks.flatten(1)
        on = (torch.rand(under.shape, device=masks.device, dtype=masks.dtype) < masks) & (presence > 0).unsqueeze(-1)
        priority = torch.rand(under.shape, device=masks.device)
        if self.order is not None:
            priority = 1 / (1.0 + depth_rank(self.order.long(), self.presence)).expand(presence.shape).unsqueeze(-1).expand(under.shape)
        bids = priority.new_zeros(*under.shape[:-1], self.canvas.num_pixels).scatter(-1, under, torch.where(on, priority + 1, 0.0))
        entries = torch.arange(under.shape[-1], device=under.device).expand(under.shape)
        entry = torch.zeros_like(bids, dtype=torch.int64).scatter(-1, under, entries)
        best = bids.max(-2)
        entry = entry.gather(-2, best.indices.unsqueeze(-2)).squeeze(-2)
        is_owned = (best.values > 0).unsqueeze(-1)
        mean = torch.where(is_owned, self.features.flatten(1, 2)[best.indices, entry], self.background)
        noise = torch.randn(mean.shape, device=mean.device, dtype=mean.dtype)
        image = mean + torch.where(is_owned, self.scale, self.background_scale) * noise
        return image.reshape(shape + self.event_shape)


class Objects(NamedTuple):
    """Pictures of objects, to compose scenes of.

    Example:
        >>> features, masks = generated_objects(3, 5)
        >>> features.shape, masks.shape
        (torch.Size([3, 5, 5, 3]), torch.Size([3, 5, 5]))

    Attributes:
        features: colours ``(K, height, width, channels)`` float32 in [0, 1]; zero outside the mask.
        masks: which pixels belong to the object, ``(K, height, width)`` bool.
    """

    features: Tensor
    masks: Tensor


def coil_objects(num: int = 16) -> Objects:
    """COIL-100 objects from the front, 10 x 10 pixels, half covered, in colour.

    Example:
        >>> try:
        ...     objects = coil_objects(4)
        ... except DatasetNotFoundError:
        ...     objects = generated_objects(4)  # where the data folder does not hold them
        >>> len(objects.features)
        4

    Raises:
        DatasetNotFoundError: if the data folder does not hold them.
        ValueError: if more objects are asked for than there are.
    """
    stored = load("coil100_17obj")
    front = stored["angle"] == 0
    if not 1 <= num <= front.sum():
        raise ValueError(f"num must lie in 1 .. {front.sum()}; got {num}")
    masks = torch.from_numpy(stored["cover10"][front][:num] >= 128)
    features = torch.from_numpy(stored["X10"][front][:num].astype(np.float32) / 255)
    return Objects(features * masks.unsqueeze(-1), masks)


def generated_objects(num: int, size: int = 10, generator: torch.Generator | None = None) -> Objects:
    """Draws blobs of random shape and colour.

    The radius of a blob is a random smooth function of the angle. Its colour changes linearly from one random colour to another.

    Example:
        >>> generated_objects(2, 6).features.shape
        torch.Size([2, 6, 6, 3])
    """
    num, size = check_count("num", num), check_count("size", size)
    offset = torch.arange(size) - (size - 1) / 2
    row, column = offset[:, None].expand(size, size), offset.expand(size, size)
    angle, radius = torch.atan2(row, column), torch.hypot(row, column)
    orders = torch.arange(1, 4)
    phase = 2 * math.pi * torch.rand(num, len(orders), 1, 1, generator=generator)
    waves = torch.cos(orders[:, None, None] * angle + phase).sum(1) / 3
    # Blobs that reach to between 0.4 and 1 of half the side.
    masks = radius <= size / 2 * (0.7 + 0.3 * waves)
    colours = 0.15 + 0.85 * torch.rand(2, num, 1, 1, 3, generator=generator)
    direction = 2 * math.pi * torch.rand(num, 1, 1, generator=generator)
    blend = (0.5 + (direction.cos() * row + direction.sin() * column) / (1.5 * size)).clamp(0, 1).unsqueeze(-1)
    return Objects((blend * colours[0] + (1 - blend) * colours[1]) * masks.unsqueeze(-1), masks)


class Scenes(NamedTuple):
    """Images of objects at random places that hide each other.

    Example:
        >>> scenes = occluded_scenes(generated_objects(2, 3), 10, (8, 8), presence=0.5, wrap=True)
        >>> scenes.data.shape, scenes.presence.shape
        (torch.Size([10, 8, 8, 3]), torch.Size([10, 2]))

    Attributes:
        data: images ``(N, height, width, channels)``.
        presence: which objects each image holds, ``(N, K)`` uint8.
        position: flat index of the pixel under the upper left corner of each object, ``(N, K)`` int64; drawn for absent ones too.
        depth: a random permutation per image, ``(N, K)`` int64; of two objects the one of smaller depth hides the other.
    """

    data: Tensor
    presence: Tensor
    position: Tensor
    depth: Tensor


def occluded_scenes(
    objects: Objects,
    num_data: int,
    canvas: tuple[int, int] = (30, 30),
    *,
    presence: float = 0.2,
    noise: float = 0.05,
    wrap: bool = False,
    generator: torch.Generator | None = None,
) -> Scenes:
    """Draws scenes of objects on a black canvas, in random depth order.

    The defaults are the test of GP-select (Neural Computation 29, 2017, section 5.3) but for the noise: the paper mentions none.

    Example:
        >>> occluded_scenes(generated_objects(2, 6), 5, (16, 16)).data.shape
        torch.Size([5, 16, 16, 3])

    Args:
        objects: what the scenes are made of.
        num_data: number of images ``N``.
        canvas: height and width of an image.
        presence: probability that an object is in an image.
        noise: standard deviation of the pixels' noise.
        wrap: whether an object that leaves the canvas on one side comes back on the other. Otherwise objects lie inside.
        generator: source of randomness.

    Raises:
        ValueError: if the objects do not fit on the canvas, or a number is out of range.
    """
    num_data = check_count("num_data", num_data)
    (num, height, width), (rows, columns) = objects.masks.shape, canvas
    if height > rows or width > columns:
        raise ValueError(f"objects of {height} x {width} pixels do not fit on a canvas of {rows} x {columns}")
    if not 0 <= presence <= 1 or not noise >= 0:
        raise ValueError(f"presence must lie in [0, 1] and noise must not be negative; got {presence} and {noise}")
    present = torch.rand(num_data, num, generator=generator) < presence
    limits = (rows, columns) if wrap else (rows - height + 1, columns - width + 1)
    top, left = (torch.randint(limit, (num_data, num), generator=generator) for limit in limits)
    depth = torch.rand(num_data, num, generator=generator).argsort(1)
    data = torch.zeros(num_data, rows * columns, objects.features.shape[-1])
    image = torch.arange(num_data)
    for owner in depth.argsort(1).mT.flip(0):  # the rearmost object of every image first
        row = (top[image, owner, None] + torch.arange(height)) % rows
        column = (left[image, owner, None] + torch.arange(width)) % columns
        pixels = (row.unsqueeze(-1) * columns + column.unsqueeze(-2)).flatten(1)
        is_visible = (objects.masks[owner] & present[image, owner, None, None]).flatten(1).unsqueeze(-1)
        under = ops.gather_states(data, pixels)
        data[image.unsqueeze(-1), pixels] = torch.where(is_visible, objects.features[owner].flatten(1, 2), under)
    data += noise * torch.randn(data.shape, generator=generator)
    return Scenes(data.reshape(num_data, rows, columns, -1), present.to(torch.uint8), top * columns + left, depth)


class Match(NamedTuple):
    """How alike true and learned objects are.

    Example:
        >>> objects = generated_objects(2, 3)
        >>> match = match_objects(objects.features, objects.masks, objects)
        >>> match.is_recovered()
        tensor([True, True])

    Attributes:
        similarity: cosine of true objects and learned features times masks, at the shift where it is largest, ``(K, H)``.
        shift: that shift, rows and columns, ``(K, H, 2)`` int64. An object at a position is the learned one at the
            position plus the shift.
    """

    similarity: Tensor
    shift: Tensor

    def is_recovered(self, threshold: float = 0.9) -> Tensor:
        """Which true objects ``(K,)`` have a learned one of their own."""
        similarity, match = self.similarity.max(1)
        owner = self.similarity.argmax(0)
        return (similarity >= threshold) & (owner[match] == torch.arange(len(match), device=match.device))

    def recovered(self, threshold: float = 0.9) -> Tensor:
        """The old name of :meth:`is_recovered`."""
        warnings.warn("recovered has a new name: use is_recovered", DeprecationWarning, stacklevel=2)
        return self.is_recovered(threshold)


@torch.no_grad()
def match_objects(features: Tensor, masks: Tensor, objects: Objects) -> Match:
    """Compares learned objects with true ones at all shifts.

    Features are ``(H, t, u, F)``, mask probabilities ``(H, t, u)``.

    Example:
        >>> objects = generated_objects(2, 3)
        >>> match_objects(objects.features, objects.masks, objects).similarity.shape
        torch.Size([2, 2])
    """
    pictures = (features * masks.unsqueeze(-1)).double().movedim(-1, 1)
    true = objects.features.double().movedim(-1, 1)
    height, width = pictures.shape[-2:]
    products = torch.nn.functional.conv2d(true, pictures, padding=(height - 1, width - 1))
    norms = true.flatten(1).norm(dim=1).unsqueeze(1) * pictures.flatten(1).norm(dim=1)
    best = products.flatten(2).max(-1)
    size = products.shape[-1]
    shift = torch.stack([best.indices // size - (height - 1), best.indices % size - (width - 1)], -1)
    return Match(best.values / norms.clamp(min=1e-12), shift)
