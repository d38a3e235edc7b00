"""Places of objects by comparison with the image, everywhere or nearby."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pyro_truncated.ops.canvas import Canvas, SceneParameters
from pyro_truncated.ops.scenes import scan_at, scan_places, scene_pixel_log_prob
from pyro_truncated.scenes.candidates import Candidates, PlaceAffinity, best_places, join, neighbourhood
from pyro_truncated.search.base import SearchBatch, forget, set_state, state_of
from pyro_truncated.utils.budget import row_slices

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
