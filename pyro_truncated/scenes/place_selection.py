"""Selected objects at their candidate places: all scenes of these are proposed."""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.scenes.candidates import PlaceAffinity, scene_sizes
from pyro_truncated.search.base import SearchBatch
from pyro_truncated.search.preselection import AffinitySearch
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace

_MAX_STATES = 2**16


class PlacementSelection(AffinitySearch):
    """Selects :math:`H'` objects with candidate places and proposes all scenes.

    The score of an object is that of its best place. :math:`r` of the :math:`H'` slots are given to chance. So the
    :math:`H' - r` objects of largest score and :math:`r` random others are selected, each with its ``C`` best places.
    The proposals are all states in which every selected object is absent or at one of its places: :math:`(1 +
    C)^{H'}` if ``max_active`` allows. In addition, each selected object is put at each of its places in the best
    states of the population. Scenes can so outgrow :math:`H'` objects.

    Example:
        >>> scenes = occluded_scenes(generated_objects(2, 3), 10, (8, 8), presence=0.5, wrap=True)
        >>> model = OcclusiveComponents(2, (8, 8), (3, 3)).initialize(scenes.data)
        >>> search = PlacementSelection(PlaceScan(model.parameters_of_scene, model.canvas), 2)
        >>> guide = AutoTruncated(model, num_states=8).infer(scenes.data, search, steps=1)

    Args:
        affinity: maps a batch to :class:`Candidates`, such as a :class:`~pyro_truncated.scenes.PlaceScan` or
            :class:`~pyro_truncated.scenes.PlaceRegression`.
        num_selected: number of selected objects :math:`H'`.
        max_active: largest number of objects in a scene made of candidates; default: all.
        extended: number of best states of the population that candidates are put into.
        explore: mean share of the :math:`H'` slots given to chance; see :class:`~pyro_truncated.search.Preselection`.
        explore_places: probability that the last place of a selected object is a random one instead.
        generator: source of randomness; default: torch's global generator.

    Raises:
        TypeError: if the affinity is not callable.
        ValueError: if an argument is out of range.

    Reference:
        Shelton, Gasthaus, Dai, Lücke and Gretton, "GP-select: Accelerating EM using adaptive subspace preselection", Neural Computation 29
        (2017), section 5.3.
    """

    def __init__(
        self,
        affinity: PlaceAffinity,
        num_selected: int,
        *,
        max_active: int | None = None,
        extended: int = 2,
        explore: float = 0.1,
        explore_places: float = 0.1,
        generator: torch.Generator | None = None,
    ) -> None:
        if not callable(affinity):
            raise TypeError(f"affinity must be a function of a SearchBatch, such as a PlaceScan; got {type(affinity).__name__}")
        if num_selected < 1 or (max_active is not None and max_active < 1) or extended < 0:
            raise ValueError(
                f"num_selected and max_active must be positive and extended not negative; got {num_selected}, {max_active} and {extended}"
            )
        for name, share in (("explore", explore), ("explore_places", explore_places)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must lie in [0, 1]; got {share}")
        self.affinity, self.num_selected, self.max_active, self.extended = affinity, num_selected, max_active, extended
        self.explore, self.explore_places, self.generator = explore, explore_places, generator

    def propose(self, batch: SearchBatch) -> Population:
        """Proposes scenes of selected objects, and best states with one added.

        Repetitions are left to the merge.
        """
        objects, places = self.select(batch)
        space, num_places = batch.space, places.shape[-1]
        singles = _placed(space, objects.unsqueeze(-1).expand_as(places), places)
        table = _choices(self.num_selected, num_places, self.max_active).to(singles.device)
        options = torch.cat([torch.zeros_like(singles[:, :, :1]), singles], 2)
        words = options.new_zeros(len(options), len(table), space.num_words)
        for slot in range(self.num_selected):
            words |= options[:, slot, table[:, slot]]
        if self.extended:
            words = torch.cat([words, self._extended(batch.population, objects.repeat_interleave(num_places, 1), singles.flatten(1, 2))], 1)
        return batch.scored(words)

    def select(self, batch: SearchBatch) -> tuple[Tensor, Tensor]:
        """Selected objects ``(N, num_selected)``, random ones last, and their candidate places ``(N, num_selected, C)``.

        Raises:
            ValueError: if there are fewer objects than shall be selected, or the affinity is of the wrong shape or NaN.
        """
        num_objects, num_places = scene_sizes(batch.space)
        found = self.affinity(batch)
        expected = (len(batch.population), num_objects)
        if found.scores.shape[:2] != expected or found.places.shape != found.scores.shape or bool(found.scores.isnan().any()):
            raise ValueError(f"the affinity must return numbers of shape {(*expected, 'C')}; got {tuple(found.scores.shape)}, or NaN")
        if self.num_selected > num_objects:
            raise ValueError(f"cannot select {self.num_selected} of {num_objects} objects (num_selected)")
        draws, shape = batch.draws(self.generator), (self.num_selected,)
        scores = found.scores[..., 0]
        number = (self.explore * self.num_selected + ops.uniform(shape=(1,), **draws)).floor()
        best = scores.topk(self.num_selected, 1).indices
        is_kept = torch.arange(self.num_selected, device=scores.device) < self.num_selected - number
        # Kept ones are out of the lottery, and its winners take the places that are left.
        keys, again = ops.uniform(shape=scores.shape[1:], **draws), ops.uniform(shape=shape, **draws)
        lottery = keys.scatter(1, best, again.masked_fill(is_kept, -1.0))
        objects = torch.where(is_kept, best, lottery.topk(self.num_selected, 1).indices.flip(1))
        places = ops.take(found.places, objects)
        is_random = ops.uniform(shape=shape, **draws) < self.explore_places
        random_places = ops.uniform_integers(bound=num_places, shape=shape, **draws)
        places[..., -1] = torch.where(is_random, random_places, places[..., -1])
        return objects, places

    def _extended(self, population: Population, objects: Tensor, singles: Tensor) -> Tensor:
        """Puts the objects ``(N, K)`` at their places in the best states."""
        space, number = population.space, min(self.extended, population.num_states)
        best = population.log_joint.topk(number, 1).indices
        parents = population.take(best).unsqueeze(2)
        full = _placed(space, objects, torch.full_like(objects, -1))
        return ((parents & ~full.unsqueeze(1)) | singles.unsqueeze(1)).flatten(1, 2)


def _placed(space: StateSpace, objects: Tensor, places: Tensor) -> Tensor:
    """Returns packed states ``(..., W)`` with one object at a place.

    Place -1 sets all bits of its fields.
    """
    num_objects, _ = scene_sizes(space)
    words = places.new_zeros(*places.shape, space.num_words)
    full = places < 0
    for latent, value in ((objects, torch.ones_like(places)), (objects + num_objects, places)):
        word, shift, bits = (table.to(places.device)[latent] for table in (space.word, space.shift, space.bits))
        field = torch.where(full, (1 << bits) - 1, value) << shift
        words.scatter_add_(-1, word.unsqueeze(-1), field.unsqueeze(-1))
    return words


@functools.lru_cache(maxsize=16)
def _choices(num_selected: int, num_places: int, max_active: int | None) -> Tensor:
    """Returns all choices ``(S, num_selected)``: 0 for absent, else a place."""
    limit = num_selected if max_active is None else min(max_active, num_selected)
    size = sum(math.comb(num_selected, k) * num_places**k for k in range(limit + 1))
    if size > _MAX_STATES:
        raise ValueError(
            f"{num_selected} objects with {num_places} places make {size} scenes per data point, over {_MAX_STATES}; lower max_active"
        )
    rows = [row for row in itertools.product(range(num_places + 1), repeat=num_selected) if sum(c > 0 for c in row) <= limit]
    return torch.tensor(rows)
