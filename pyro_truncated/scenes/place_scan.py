"""Candidate places of objects, found by comparison with the image.

A state has the sites ``presence`` (binary), ``position`` (as many values as places) and perhaps ``order``, in this
order. Each is a vector with one latent per object, as in :class:`pyro_truncated.models.OcclusiveComponents`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.ops.canvas import Canvas, SceneParameters
from pyro_truncated.ops.scenes import scan_at, scan_places, scene_pixel_log_prob
from pyro_truncated.search.base import SearchBatch, forget, set_state, state_of
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.budget import row_slices


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Where the objects of each data point may lie.

    Example:
        >>> scores = torch.zeros(1, 1, 16)
        >>> scores[0, 0, 5] = 1.0
        >>> candidates = best_places(scores, pyro_truncated.distributions.Canvas(4, 4, 2, 2), 1)
        >>> candidates.scores.flatten(), candidates.places.flatten()
        (tensor([1.]), tensor([5]))

    Attributes:
        scores: how well each object fits there, larger is better, ``(N, H, C)``; the best place of an object first.
        places: the places, ``(N, H, C)`` int64.
    """

    scores: Tensor
    places: Tensor


PlaceAffinity = Callable[[SearchBatch], Candidates]


def best_places(scores: Tensor, canvas: Canvas, number: int) -> Candidates:
    """Returns the places of largest score ``(N, H, L)``, best first.

    None lies next to a better one. They are crossed out in ``scores``.

    Example:
        >>> scores = torch.zeros(1, 1, 16)
        >>> scores[0, 0, 5] = 1.0
        >>> best_places(scores, pyro_truncated.distributions.Canvas(4, 4, 2, 2), 1).places.flatten()
        tensor([5])
    """
    values, places = [], []
    for found in range(number):
        best = scores.max(-1)
        values.append(best.values)
        places.append(best.indices)
        if found + 1 < number:
            scores.scatter_(-1, neighbourhood(best.indices, canvas), -torch.inf)
    return Candidates(torch.stack(values, -1), torch.stack(places, -1))


def neighbourhood(places: Tensor, canvas: Canvas, radius: int = 1) -> Tensor:
    """Returns places ``(..., (2 radius + 1)^2)`` around others, included.

    At the edge of a canvas that does not wrap some are repeated.
    """
    rows, columns = canvas.grid
    steps = torch.arange(-radius, radius + 1, device=places.device)
    row, column = (places // columns).unsqueeze(-1) + steps, (places % columns).unsqueeze(-1) + steps
    row, column = (row % rows, column % columns) if canvas.wrap else (row.clamp(0, rows - 1), column.clamp(0, columns - 1))
    return (row.unsqueeze(-1) * columns + column.unsqueeze(-2)).flatten(-2)


def join(found: list[Candidates]) -> Candidates:
    """The candidates of several blocks of data points, one after the other."""
    return Candidates(torch.cat([c.scores for c in found]), torch.cat([c.places for c in found]))


def place_probabilities(population: Population) -> tuple[Tensor, Tensor]:
    """Returns :math:`q_n(s_h = 1, x_h = l)` as a sparse matrix.

    Example:
        >>> scenes = occluded_scenes(generated_objects(2, 3), 10, (8, 8), presence=0.5, wrap=True)
        >>> model = OcclusiveComponents(2, (8, 8), (3, 3)).initialize(scenes.data)
        >>> search = PlacementSelection(PlaceScan(model.scene_parameters, model.canvas), 2)
        >>> guide = AutoTruncated(model, num_states=8).infer(scenes.data, search, steps=1)
        >>> where, probability = place_probabilities(guide.population())

    Returns:
        Positions of entries ``(2, E)``: data point, and ``h * L + l``; and the probabilities ``(E,)`` float64. What is not listed is zero.
    """
    num_objects, num_places = scene_sizes(population.space)
    levels = population.states(torch.int32)
    row, state, latent = (levels[..., :num_objects] > 0).nonzero(as_tuple=True)
    place = levels[row, state, num_objects + latent].long()
    key = (row * num_objects + latent) * num_places + place
    keys, entry = key.unique(return_inverse=True)
    values = torch.zeros(len(keys), dtype=torch.float64, device=keys.device)
    values.index_add_(0, entry, population.weights().double()[row, state])
    width = num_objects * num_places
    return torch.stack([keys // width, keys % width]), values


def scene_sizes(space: StateSpace) -> tuple[int, int]:
    """Numbers of objects and of places.

    Raises:
        ValueError: if the space is not that of presence, position and perhaps order.
    """
    cardinalities = space.cardinalities
    for parts in (2, 3):
        size, rest = divmod(len(cardinalities), parts)
        if rest or not size or any(v != 2 for v in cardinalities[:size]) or len(set(cardinalities[size : 2 * size])) != 1:
            continue
        if parts == 2 or all(v == size for v in cardinalities[2 * size :]):
            return size, cardinalities[size]
    raise ValueError(
        "searches for scenes need a model with the discrete sites presence (binary), position and perhaps order, vectors of equal length; "
        f"got latents of {cardinalities[:8]}... values"
    )


Scene = Callable[[], SceneParameters]


class PlaceScan:
    """Compares every object with the image at every place, the hand-crafted way.

    See :func:`~pyro_truncated.ops.scenes.scan_places` for the score. The candidates of an object are the places of largest score, no
    two of them next to each other.

    Example:
        >>> scenes = occluded_scenes(generated_objects(2, 3), 10, (8, 8), presence=0.5, wrap=True)
        >>> model = OcclusiveComponents(2, (8, 8), (3, 3)).initialize(scenes.data)
        >>> search = PlacementSelection(PlaceScan(model.scene_parameters, model.canvas), 2)

    Args:
        scene: returns the current :class:`~pyro_truncated.ops.canvas.SceneParameters`, such as ``model.scene_parameters``.
        canvas: sizes.
        num_candidates: places per object.
        clutter: share of the pixels that other objects cover.
        min_mask: only template entries of at least this mask probability are compared, by what the masks are, also in :meth:`beside`.
        site: name of the observed images.

    Raises:
        TypeError: if ``scene`` is not callable.
        ValueError: if a number is out of range.
    """

    def __init__(
        self, scene: Scene, canvas: Canvas, *, num_candidates: int = 1, clutter: float = 0.2, min_mask: float = 0.0, site: str = "y"
    ) -> None:
        if not callable(scene):
            raise TypeError(f"scene must be a function that returns the current parameters; got {type(scene).__name__}")
        if num_candidates < 1 or not 0 <= clutter < 1:
            raise ValueError(f"num_candidates must be positive and clutter in [0, 1); got {num_candidates} and {clutter}")
        self.scene, self.canvas, self.num_candidates = scene, canvas, num_candidates
        self.clutter, self.min_mask, self.site = clutter, min_mask, site

    def __call__(self, batch: SearchBatch) -> Candidates:
        """Candidates of the batch's data points."""
        return self._candidates(self._images(batch), None)

    def beside(self, batch: SearchBatch, places: Tensor, rank: Tensor | None = None) -> Candidates:
        """Returns candidates to be added to scenes.

        Scenes have places ``(N, H)``, -1 for absent objects, and depth ranks ``(N, H)``.

        Objects are compared with what the scene makes of the image, not with the bare background. Where others lie they may be hidden, so
        no mask counts as more probable than not. Which entries are compared (``min_mask``) does not depend on that.
        """
        images, scene = self._images(batch), self.scene()
        ranks = None if rank is None else rank.unsqueeze(1)
        return self._candidates(images, scene_pixel_log_prob(places.unsqueeze(1), images, scene, self.canvas, ranks).squeeze(1))

    def _images(self, batch: SearchBatch) -> Tensor:
        if self.site not in batch.observations:
            raise ValueError(f"PlaceScan found no observed site {self.site!r}; the model has {list(batch.observations)}")
        return batch.observations[self.site].flatten(1, 2)

    def _candidates(self, images: Tensor, behind: Tensor | None) -> Candidates:
        scene = self.scene()
        options: Any = {"clutter": self.clutter, "min_mask": self.min_mask, "max_mask": 1.0 if behind is None else 0.5}
        found = []
        # A score takes 32 bytes, temporaries included.
        for rows in row_slices(len(images), 32 * len(scene.features) * self.canvas.num_places):
            scores = scan_places(images[rows], scene, self.canvas, behind=None if behind is None else behind[rows], **options)
            found.append(best_places(scores, self.canvas, self.num_candidates))
        return join(found)

    def scores_at(self, batch: SearchBatch, objects: Tensor, places: Tensor) -> Tensor:
        """Scores ``(N, K, P)`` of some objects ``(N, K)`` at some places ``(N, K, P)`` only."""
        return scan_at(self._images(batch), self.scene(), self.canvas, objects, places, clutter=self.clutter, min_mask=self.min_mask)


class RefinedPlaces:
    """Moves another affinity's candidates to the best place nearby.

    Which objects are selected remains the affinity's choice: its scores are passed on.

    Example:
        >>> scenes = occluded_scenes(generated_objects(2, 3), 10, (8, 8), presence=0.5, wrap=True)
        >>> model = OcclusiveComponents(2, (8, 8), (3, 3)).initialize(scenes.data)
        >>> scan = PlaceScan(model.scene_parameters, model.canvas)
        >>> search = PlacementSelection(RefinedPlaces(PlaceRegression(model.canvas), scan, 2), 2)

    Args:
        affinity: gives candidates to refine, such as a :class:`PlaceRegression`.
        scan: scores objects at places.
        num_objects: number of objects per data point whose candidates are refined, those of largest score.
        radius: how far a candidate may move, in steps of the grid of places in both directions.

    Raises:
        ValueError: if a number is out of range.
    """

    def __init__(self, affinity: PlaceAffinity, scan: PlaceScan, num_objects: int, *, radius: int = 1) -> None:
        if num_objects < 1 or radius < 1:
            raise ValueError(f"num_objects and radius must be positive; got {num_objects} and {radius}")
        self.affinity, self.scan, self.num_objects, self.radius = affinity, scan, num_objects, radius

    def forget(self) -> None:
        """Lets the affinity forget what it has learned of data."""
        forget(self.affinity)

    def state_dict(self) -> dict[str, Any]:
        """What the affinity has learned of data."""
        return state_of(self.affinity)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the affinity go on from where it has been."""
        set_state(self.affinity, state)

    def __call__(self, batch: SearchBatch) -> Candidates:
        """Candidates of the batch's data points."""
        found = self.affinity(batch)
        objects = found.scores[..., 0].topk(min(self.num_objects, found.scores.shape[1]), 1).indices
        index = objects.unsqueeze(-1).expand(-1, -1, found.places.shape[-1])
        near = neighbourhood(found.places.gather(1, index), self.scan.canvas, self.radius)
        scores = self.scan.scores_at(batch, objects, near.flatten(2)).reshape(near.shape)
        places = near.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
        return Candidates(found.scores, found.places.scatter(1, index, places))
