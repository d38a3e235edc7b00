"""Candidate places of objects, by comparison with the image or by regression.

A state has the sites ``presence`` (binary), ``position`` (as many values as places) and perhaps ``order``, vectors with one latent per
object, as in :class:`pyro_truncated.models.OcclusiveComponents`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pyro.contrib.gp import kernels
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.distributed import collectives
from pyro_truncated.gp.noisy_covariance import DenseCovariance
from pyro_truncated.gp.subset.leave_one_out import LeaveOneOutRegression
from pyro_truncated.ops.canvas import Canvas, SceneParameters
from pyro_truncated.ops.components import k_means
from pyro_truncated.ops.scenes import scan_at, scan_places, scene_pixel_log_prob
from pyro_truncated.search.base import SearchBatch, apply_to_batch
from pyro_truncated.search.gp_select import LearnedAffinity, gather_function
from pyro_truncated.search.preselection import AffinityOwner
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import check_count, check_counts
from pyro_truncated.utils.budget import row_slices, rows_per_block


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
    """Places of largest score ``(N, H, L)``, not beside better ones.

    Those are crossed out in ``scores``.

    Example:
        >>> scores = torch.zeros(1, 1, 16)
        >>> scores[0, 0, 5] = 1.0
        >>> best_places(scores, pyro_truncated.distributions.Canvas(4, 4, 2, 2), 1).places.flatten()
        tensor([5])
    """
    values, places = [], []
    for place in range(number):
        best = scores.max(-1)
        values.append(best.values)
        places.append(best.indices)
        if place + 1 < number:
            scores.scatter_(-1, neighbourhood(best.indices, canvas), -torch.inf)
    return Candidates(torch.stack(values, -1), torch.stack(places, -1))


def neighbourhood(places: Tensor, canvas: Canvas, radius: int = 1) -> Tensor:
    """Places ``(..., (2 radius + 1)^2)`` around others, included."""
    rows, columns = canvas.grid
    steps = torch.arange(-radius, radius + 1, device=places.device)
    row, column = (places // columns).unsqueeze(-1) + steps, (places % columns).unsqueeze(-1) + steps
    row, column = (row % rows, column % columns) if canvas.wrap else (row.clamp(0, rows - 1), column.clamp(0, columns - 1))
    return (row.unsqueeze(-1) * columns + column.unsqueeze(-2)).flatten(-2)


def join(blocks: list[Candidates]) -> Candidates:
    """The candidates of several blocks of data points, one after the other."""
    return Candidates(torch.cat([c.scores for c in blocks]), torch.cat([c.places for c in blocks]))


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
    """Numbers of objects and of places."""
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

    See :func:`~pyro_truncated.ops.scenes.scan_places` for the score. The candidates of an object are the places of largest score, no two of
    them next to each other.

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
        if not 0 <= clutter < 1:
            raise ValueError(f"clutter must lie in [0, 1); got {clutter}")
        self.scene, self.canvas, self.num_candidates = scene, canvas, check_count("num_candidates", num_candidates)
        self.clutter, self.min_mask, self.site = clutter, min_mask, site

    def __call__(self, batch: SearchBatch) -> Candidates:
        """Candidates of the batch's data points."""
        return self._candidates(self._images(batch), None)

    def propose_additions(self, batch: SearchBatch, places: Tensor, rank: Tensor | None = None) -> Candidates:
        """Candidates to add to scenes of places and depth ranks ``(N, H)``.

        Objects are compared with what the scene makes of the image. Where others lie they may be hidden, so no mask counts as more probable
        than not. Which entries are compared (``min_mask``) does not depend on that.
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
        blocks = []
        # A score takes 32 bytes, temporaries included.
        for rows in row_slices(len(images), 32 * len(scene.features) * self.canvas.num_places):
            scores = scan_places(images[rows], scene, self.canvas, behind=None if behind is None else behind[rows], **options)
            blocks.append(best_places(scores, self.canvas, self.num_candidates))
        return join(blocks)

    def scores_at(self, batch: SearchBatch, objects: Tensor, places: Tensor) -> Tensor:
        """Scores ``(N, K, P)`` of some objects ``(N, K)`` at some places ``(N, K, P)`` only."""
        return scan_at(self._images(batch), self.scene(), self.canvas, objects, places, clutter=self.clutter, min_mask=self.min_mask)


class RefinedPlaces(AffinityOwner):
    """Moves another affinity's candidates to the best place nearby.

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
        self.affinity, self.scan = affinity, scan
        self.num_objects, self.radius = check_counts(num_objects=num_objects, radius=radius)

    def __call__(self, batch: SearchBatch) -> Candidates:
        """Candidates of the batch's data points."""
        candidates = apply_to_batch(self.affinity, batch)
        objects = candidates.scores[..., 0].topk(min(self.num_objects, candidates.scores.shape[1]), 1).indices
        index = objects.unsqueeze(-1).expand(-1, -1, candidates.places.shape[-1])
        near = neighbourhood(candidates.places.gather(1, index), self.scan.canvas, self.radius)
        scores = self.scan.scores_at(batch, objects, near.flatten(2)).reshape(near.shape)
        places = near.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
        return Candidates(candidates.scores, candidates.places.scatter(1, index, places))


class PlaceRegression(LearnedAffinity[Candidates]):
    """Predicts places of objects from the image by Gaussian processes.

    There is one output per object and place, and one kernel for all. The targets are the posterior probabilities :math:`q_n(s_h = 1, x_h =
    l)` of the populations. The prediction is the leave-one-out mean: of each image from the posteriors of all *others*. It knows no
    templates. An output can only be predicted if an object lay at this very place in another image. So ``smooth`` adds half of the scores
    of the places beside, and a quarter of those on the diagonals.

    It learns from batches that hold all data in order. For minibatches and new images it predicts from these. On several processes
    (:func:`pyro_truncated.distributed.shard`) each predicts its own.

    Example:
        >>> scenes = occluded_scenes(generated_objects(2, 3), 10, (8, 8), presence=0.5, wrap=True)
        >>> model = OcclusiveComponents(2, (8, 8), (3, 3)).initialize(scenes.data)
        >>> search = PlacementSelection(PlaceRegression(model.canvas, inputs=colour_maps(4)), 2)

    Args:
        canvas: sizes.
        kernel: as for :class:`~pyro_truncated.gp.LeaveOneOutRegression`.
        refit_every: visits between two fits of the kernel's parameters.
        rank: rank of an incomplete Cholesky factor. Default: exact.
        num_candidates: places per object.
        smooth: whether scores of neighbouring places support each other.
        inputs: maps images ``(n, height, width, F)`` to what to regress on, ``(n, D)``. Default: the pixels.
        leave_out: whether to leave each image's own posterior out. If not, the regression mostly returns what it was given.
        fit_steps: largest number of L-BFGS steps of a fit.
        max_fit: largest number of images that a fit looks at, drawn at random; predictions use all.
        site: name of the observed images.
        generator: source of randomness for the choice of these images. Default: torch's global generator.

    Raises:
        ValueError: if an argument is out of range.
    """

    _takes_minibatches = False

    def __init__(
        self,
        canvas: Canvas,
        *,
        kernel: str | kernels.Kernel = "composition",
        refit_every: int = 5,
        rank: int | None = None,
        num_candidates: int = 1,
        smooth: bool = True,
        inputs: Callable[[Tensor], Tensor] | None = None,
        leave_out: bool = True,
        fit_steps: int = 20,
        max_fit: int = 400,
        site: str = "y",
        generator: torch.Generator | None = None,
    ) -> None:
        check_counts(refit_every=refit_every, num_candidates=num_candidates, fit_steps=fit_steps, max_fit=max_fit)
        self.canvas, self.kernel, self.refit_every, self.rank = canvas, kernel, refit_every, rank
        self.num_candidates, self.smooth, self.inputs, self.leave_out = num_candidates, smooth, inputs, leave_out
        self.fit_steps, self.max_fit, self.site = fit_steps, max_fit, site
        super().__init__(generator)

    def forget(self) -> None:
        """Forgets all images and targets; the kernel keeps its parameters."""
        super().forget()
        self._images: Tensor | None = None
        self._influence: Tensor | None = None
        self._targets: Tensor | None = None
        self._visits, self._drew_seed = 0, False

    def _regression_data(self, batch: SearchBatch) -> Tensor:
        if self.site not in batch.observations:
            raise ValueError(f"PlaceRegression found no observed site {self.site!r}; the model has {list(batch.observations)}")
        return batch.observations[self.site]

    def _knows(self, data: Tensor, batch: SearchBatch) -> bool:
        return self._images is data or (self._images is not None and torch.equal(self._images, data))

    def _predict_from_others(self, data: Tensor, batch: SearchBatch) -> Candidates:
        assert self._influence is not None
        return self._candidates(self._influence if batch.population.indices is None else self._influence[batch.population.indices])

    def _predict_new(self, data: Tensor) -> Candidates:
        if self.regression is None:
            raise ValueError("PlaceRegression learns from a batch of all data in order; give it one before minibatches or new images")
        identity = torch.eye(len(self.regression.inputs), dtype=torch.float64, device=data.device)
        return self._candidates(self.regression.predict(self._regression_inputs(data), identity)[0].float())

    def _memory_state(self) -> dict[str, Any]:
        assert self._targets is not None
        targets = {"entries": self._targets.indices(), "values": self._targets.values(), "shape": list(self._targets.shape)}
        return {"rows": {"images": self._images}, "visits": self._visits, "targets": targets}

    def _remember(self, memory: Mapping[str, Any], regression: Mapping[str, Any]) -> LeaveOneOutRegression:
        self._images, self._visits = memory["rows"]["images"], memory["visits"]
        self._targets = _sparse(*memory["targets"].values())
        new = self._new_regression()
        new.load_state_dict(regression)
        return new

    def _new_regression(self) -> LeaveOneOutRegression:
        assert self._images is not None
        # Inputs may depend on all images, as maps of the colours that they show do.
        images = torch.cat(collectives.gather(self._images)) if self._is_spread else self._images
        return LeaveOneOutRegression(self._regression_inputs(images), self.kernel, self.rank)

    def _regression_inputs(self, images: Tensor) -> Tensor:
        return images.flatten(1) if self.inputs is None else self.inputs(images)

    def _take_in(self, data: Tensor, batch: SearchBatch) -> None:
        """Takes in the posteriors, and fits the kernel if it is due."""
        sizes = gather_function(batch)(len(data))
        first = sum(sizes[: collectives.rank()]) if batch.is_spread else 0
        entries, values = place_probabilities(batch.population)
        # Less likely places would not change the regression.
        is_likely = values > 1e-4
        entries, values = entries[:, is_likely], values[is_likely]
        if self.smooth:
            entries, values = self._smooth(entries, values)
        if batch.is_spread:
            entries = torch.cat(collectives.gather(entries + entries.new_tensor([[first], [0]])), 1)
            values = torch.cat(collectives.gather(values))
        shape = (sum(sizes), scene_sizes(batch.space)[0] * self.canvas.num_places)
        self._targets = _sparse(entries, values.float(), shape)
        if self.regression is None:
            self._images, self._first_position, self._is_spread = data, batch.first_position, batch.is_spread
            self.regression = self._new_regression()
        self._drew_seed = self._visits % self.refit_every == 0
        if self._drew_seed:
            self._fit(self.regression, self._targets, ops.draw_seed(batch.source(self.generator)))
            self._influence = None
        self._visits += 1
        if self._influence is None:
            influence = self._new_influence(self.regression, slice(first, first + len(data)))
            # Places beside one often have the same score: its last bits, which depend on how many images are here, must not decide.
            self._influence = influence if self._knows_all else influence.float()

    def _smooth(self, entries: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Spreads targets over the places beside, on the grid of all places."""
        rows, columns = self.canvas.grid
        head, place = entries[1] // self.canvas.num_places, entries[1] % self.canvas.num_places
        steps = torch.tensor([-1, 0, 1], device=entries.device)
        row, column = (place // columns).unsqueeze(-1) + steps, (place % columns).unsqueeze(-1) + steps
        if self.canvas.wrap:
            row, column = row % rows, column % columns
        inside = ((row >= 0) & (row < rows)).unsqueeze(-1) & ((column >= 0) & (column < columns)).unsqueeze(-2)
        weight = 1 - 0.5 * steps.abs().double()
        spread = (values[:, None, None] * weight[:, None] * weight)[inside]
        key = head[:, None, None] * self.canvas.num_places + row.unsqueeze(-1) * columns + column.unsqueeze(-2)
        data = entries[0][:, None, None].expand_as(key)
        return torch.stack([data[inside], key[inside]]), spread

    def _fit(self, regression: LeaveOneOutRegression, targets: Tensor, seed: int) -> None:
        """Raises the marginal likelihood of random outputs on random images."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(targets.shape[0], generator=generator)[: self.max_fit].to(targets.device)
        data, output = targets.indices()
        is_new = torch.zeros(targets.shape[0], dtype=torch.bool, device=targets.device)
        is_new[rows] = True
        outputs = output[is_new[data]].unique()
        if not len(outputs):
            return
        outputs = outputs[torch.randperm(len(outputs), generator=generator)[:1000].to(outputs.device)]
        column = torch.full((targets.shape[1],), -1, device=targets.device)
        column[outputs] = torch.arange(len(outputs), device=targets.device)
        is_used = is_new[data] & (column[output] >= 0)
        dense = torch.zeros(targets.shape[0], len(outputs), dtype=torch.float64, device=targets.device)
        dense[data[is_used], column[output[is_used]]] = targets.values()[is_used].double()
        regression.fit(dense, self.fit_steps, rows=rows)

    def _new_influence(self, regression: LeaveOneOutRegression, own: slice) -> Tensor:
        """Returns this process's rows ``(n, N)`` of the matrix from targets to predictions."""
        identity = torch.eye(len(regression.inputs), dtype=torch.float64, device=regression.inputs.device)
        if not self.leave_out:
            assert self._images is not None
            return regression.predict(self._regression_inputs(self._images), identity)[0]
        if isinstance(regression.covariance, DenseCovariance):
            inverse = regression.covariance.inverse
            return (identity - inverse / inverse.diagonal().unsqueeze(-1))[own]
        return regression.covariance.leave_one_out(identity)[0][own]

    def _candidates(self, influence: Tensor) -> Candidates:
        """Returns the best places by predictions: ``(n, N)`` times the targets."""
        assert self._targets is not None
        outputs = self._targets.t().coalesce().to(influence.dtype)
        num_objects = outputs.shape[0] // self.canvas.num_places
        # A score of an object at a place takes 32 bytes, temporaries included.
        step = rows_per_block(32 * outputs.shape[0])
        blocks = []
        for block in influence.split(step):
            scores = torch.sparse.mm(outputs, block.T.contiguous()).T.float()
            blocks.append(best_places(scores.reshape(len(block), num_objects, -1), self.canvas, self.num_candidates))
        return join(blocks)


def _sparse(entries: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.sparse_coo_tensor(entries, values, tuple(shape), check_invariants=False).coalesce()


def colour_maps(num_colours: int = 12, stride: int = 2, width: float = 0.1) -> Callable[[Tensor], Tensor]:
    """Returns maps of colours as inputs of a :class:`PlaceRegression`.

    The colours that differ from the background are clustered (k-means) when the returned function sees images for the first time. Every
    pixel is then a vector of memberships: softmax of minus squared distances over ``2 width**2``, averaged over 3 x 3 pixels and thinned
    out.

    Example:
        >>> scenes = occluded_scenes(generated_objects(2, 3), 10, (8, 8), presence=0.5, wrap=True)
        >>> model = OcclusiveComponents(2, (8, 8), (3, 3)).initialize(scenes.data)
        >>> search = PlacementSelection(PlaceRegression(model.canvas, inputs=colour_maps(4)), 2)

    Args:
        num_colours: number of clusters.
        stride: distance of the pixels kept.
        width: distance of colours at which memberships soften.

    Returns:
        A function that maps images ``(n, height, width, F)`` to inputs ``(n, D)``.
    """
    palette: list[Tensor] = []

    def maps(images: Tensor) -> Tensor:
        """Pooled maps of how much each pixel is of each colour."""
        pixels = images.flatten(0, 2)
        if not palette:
            palette.append(_palette(pixels, num_colours))
        memberships = (-torch.cdist(pixels, palette[0].to(pixels)).square() / (2 * width**2)).softmax(-1)[:, 1:]
        layers = memberships.reshape(*images.shape[:3], -1).movedim(-1, 1)
        pooled = torch.nn.functional.avg_pool2d(torch.nn.functional.pad(layers, (1, 1, 1, 1), mode="circular"), 3, stride)
        return pooled.flatten(1)

    return maps


def _palette(pixels: Tensor, number: int, most: int = 20_000, steps: int = 15) -> Tensor:
    """Returns the most frequent colour and cluster centres, ``(number + 1, F)``."""
    background = pixels.median(0).values
    distance = (pixels - background).norm(dim=-1)
    colours = pixels[distance > 5 * distance.median()]
    if len(colours) < number:
        raise ValueError(f"images show only {len(colours)} pixels that differ from their background; {number} colours need more")
    colours = colours[:: max(1, len(colours) // most)]
    # From dark to bright, so that no draw is needed.
    centres = colours[colours.sum(-1).argsort()][(torch.arange(number) * (len(colours) - 1)) // max(1, number - 1)]
    return torch.cat([background.unsqueeze(0), k_means(colours, centres, steps)])
