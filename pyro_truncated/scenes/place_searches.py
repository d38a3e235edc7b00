"""Searches for scenes: selected, missing and moved objects."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.scenes.occlusion import depth_code, depth_rank
from pyro_truncated.scenes.place_scan import Candidates, PlaceAffinity, PlaceScan, scene_sizes
from pyro_truncated.search.base import Search, SearchBatch, apply_to_batch
from pyro_truncated.search.preselection import AffinitySearch
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import check_count, check_counts, check_kinds, renames


class PlacementSelection(AffinitySearch):
    """Selects :math:`H'` objects with candidate places and proposes all scenes.

    The :math:`H' - r` objects whose best place scores highest and :math:`r` random others are selected, each with its ``C`` best places.
    The proposals are all states in which every selected object is absent or at one of its places: :math:`(1 + C)^{H'}` if ``max_active``
    allows. In addition, each selected object is put at each of its places in the best states of the population.

    Example:
        >>> scenes = occluded_scenes(generated_objects(2, 3), 10, (8, 8), presence=0.5, wrap=True)
        >>> model = OcclusiveComponents(2, (8, 8), (3, 3)).initialize(scenes.data)
        >>> search = PlacementSelection(PlaceScan(model.scene_parameters, model.canvas), 2)
        >>> guide = AutoTruncated(model, num_states=8).infer(scenes.data, search, steps=1)

    Args:
        affinity: maps a batch to :class:`Candidates`, such as a :class:`~pyro_truncated.scenes.PlaceScan` or
            :class:`~pyro_truncated.scenes.PlaceRegression`.
        num_selected: number of selected objects :math:`H'`.
        max_active: largest number of objects in a scene made of candidates. Default: all.
        parents: number of best states of the population that candidates are put into.
        explore: mean share of the :math:`H'` slots given to chance; see :class:`~pyro_truncated.search.Preselection`.
        explore_places: probability that the last place of a selected object is a random one instead.
        generator: source of randomness. Default: torch's global generator.

    Raises:
        TypeError: if the affinity is not callable.
        ValueError: if an argument is out of range.

    Reference:
        Shelton, Gasthaus, Dai, Lücke and Gretton, "GP-select: Accelerating EM using adaptive subspace preselection", Neural Computation 29
        (2017), section 5.3.
    """

    @renames(extended="parents")
    def __init__(
        self,
        affinity: PlaceAffinity,
        num_selected: int,
        *,
        max_active: int | None = None,
        parents: int = 2,
        explore: float = 0.1,
        explore_places: float = 0.1,
        generator: torch.Generator | None = None,
    ) -> None:
        if not callable(affinity):
            raise TypeError(f"affinity must be a function of a SearchBatch, such as a PlaceScan; got {type(affinity).__name__}")
        self.num_selected, self.parents = check_count("num_selected", num_selected), check_count("parents", parents, least=0)
        self.max_active = None if max_active is None else check_count("max_active", max_active)
        for name, share in (("explore", explore), ("explore_places", explore_places)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must lie in [0, 1]; got {share}")
        check_kinds(PlacementSelection.__init__, generator=generator)
        self.affinity, self.explore, self.explore_places, self.generator = affinity, explore, explore_places, generator

    def propose(self, batch: SearchBatch) -> Population:
        """Proposes scenes of selected objects, and best states with one added."""
        objects, places = self.select(batch)
        space, num_places = batch.space, places.shape[-1]
        singles = _place(space, objects.unsqueeze(-1).expand_as(places), places)
        table = _choices(self.num_selected, num_places, self.max_active).to(singles.device)
        options = torch.cat([torch.zeros_like(singles[:, :, :1]), singles], 2)
        words = options.new_zeros(len(options), len(table), space.num_words)
        for slot in range(self.num_selected):
            words |= options[:, slot, table[:, slot]]
        if self.parents:
            # Every object at each of its places in the best states.
            population, objects = batch.population, objects.repeat_interleave(num_places, 1)
            best = population.log_joint.topk(min(self.parents, population.num_states), 1).indices
            full = _place(space, objects, torch.full_like(objects, -1)).unsqueeze(1)
            more = (population.take(best).unsqueeze(2) & ~full) | singles.flatten(1, 2).unsqueeze(1)
            words = torch.cat([words, more.flatten(1, 2)], 1)
        return batch.evaluate(words)

    def select(self, batch: SearchBatch) -> tuple[Tensor, Tensor]:
        """Selected objects ``(N, num_selected)``, random ones last, and their candidate places ``(N, num_selected, C)``.

        Raises:
            ValueError: if there are fewer objects than shall be selected, or the affinity is of the wrong shape or NaN.
        """
        num_objects, num_places = scene_sizes(batch.space)
        candidates = apply_to_batch(self.affinity, batch)
        expected = (len(batch.population), num_objects)
        if not isinstance(candidates, Candidates):
            raise TypeError(f"affinity must return Candidates; got {type(candidates).__name__}")
        is_same = candidates.scores.shape[:2] == expected and candidates.places.shape == candidates.scores.shape
        if not is_same or bool(candidates.scores.isnan().any()):
            shape = tuple(candidates.scores.shape)
            raise ValueError(f"affinity must return numbers of shape {(*expected, 'C')}, none NaN; got shape {shape}")
        if self.num_selected > num_objects:
            raise ValueError(f"num_selected must be at most the number of objects, {num_objects}: cannot select {self.num_selected}")
        draws, shape = batch.draws(self.generator), (self.num_selected,)
        scores = candidates.scores[..., 0]
        number = (self.explore * self.num_selected + ops.uniform(shape=(1,), **draws)).floor()
        best = scores.topk(self.num_selected, 1).indices
        is_kept = torch.arange(self.num_selected, device=scores.device) < self.num_selected - number
        # Kept ones are out of the lottery, and its winners take the places that are left.
        keys, again = ops.uniform(shape=scores.shape[1:], **draws), ops.uniform(shape=shape, **draws)
        lottery = keys.scatter(1, best, again.masked_fill(is_kept, -1.0))
        objects = torch.where(is_kept, best, lottery.topk(self.num_selected, 1).indices.flip(1))
        places = ops.gather_states(candidates.places, objects)
        is_random = ops.uniform(shape=shape, **draws) < self.explore_places
        random_places = ops.uniform_integers(bound=num_places, shape=shape, **draws)
        places[..., -1] = torch.where(is_random, random_places, places[..., -1])
        return objects, places


def _place(space: StateSpace, objects: Tensor, places: Tensor) -> Tensor:
    """Packed states ``(..., W)`` with one object at a place."""
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
    most = 2**16
    if size > most:
        raise ValueError(
            f"{num_selected} objects with {num_places} places make {size} scenes per data point, over {most}; lower max_active"
        )
    rows = [row for row in itertools.product(range(num_places + 1), repeat=num_selected) if sum(c > 0 for c in row) <= limit]
    return torch.tensor(rows)


class PlacementCompletion(Search):
    r"""Adds absent objects where good scenes leave most to be explained.

    One scene is drawn from the posterior of each data point, and one of its objects, or none, is removed. All absent objects are compared
    with the residual of the image at all places (:meth:`.PlaceScan.propose_additions`). The ``num_added`` that explain most are added
    in all :math:`2^{\mathrm{num\_added}}` combinations, at random depths where there is an order.

    Example:
        >>> scenes = occluded_scenes(generated_objects(2, 3), 10, (8, 8), presence=0.5, wrap=True)
        >>> model = OcclusiveComponents(2, (8, 8), (3, 3)).initialize(scenes.data)
        >>> search = PlacementCompletion(PlaceScan(model.scene_parameters, model.canvas), 2)
        >>> guide = AutoTruncated(model, num_states=8).infer(scenes.data, search, steps=2)

    Args:
        scan: compares objects with images; its best place of each object counts.
        num_added: number of objects that are put into a scene.
        generator: source of randomness. Default: torch's global generator.

    Raises:
        ValueError: if ``num_added`` is not positive.
    """

    def __init__(self, scan: PlaceScan, num_added: int = 4, *, generator: torch.Generator | None = None) -> None:
        check_kinds(PlacementCompletion.__init__, generator=generator)
        self.scan, self.num_added, self.generator = scan, check_count("num_added", num_added), generator

    def propose(self, batch: SearchBatch) -> Population:
        """Proposes ``(N, 2^num_added)`` scenes with all combinations of additions."""
        presence, position, rank, draws = self._parents(batch)
        additions = self.scan.propose_additions(batch, torch.where(presence, position, -1), rank)
        scores = additions.scores[..., 0].masked_fill(presence, -torch.inf)
        number = min(self.num_added, presence.shape[1])
        choices = torch.tensor(list(itertools.product((False, True), repeat=number)), device=scores.device)
        added = scores.topk(number, 1).indices.unsqueeze(1).expand(-1, len(choices), -1)
        is_new = torch.zeros(*added.shape[:2], presence.shape[1], dtype=torch.bool, device=scores.device)
        # Where fewer are absent, some of the best are there already.
        is_new = is_new.scatter(2, added, choices.expand_as(added)) & ~presence.unsqueeze(1)
        is_there = is_new | presence.unsqueeze(1)
        where = torch.where(is_new, additions.places[..., 0].unsqueeze(1), position.unsqueeze(1))
        if rank is not None:
            between = presence.sum(1, keepdim=True) * ops.uniform(shape=presence.shape[1:], **draws) - 0.5
            rank = torch.where(presence, rank, between).unsqueeze(1).expand(is_there.shape)
        return batch.evaluate(_pack(batch.space, is_there, where, rank))

    def _parents(self, batch: SearchBatch) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        """Presence, position and rank ``(N, H)`` of probable scenes less one object."""
        num_objects, _ = scene_sizes(batch.space)
        draws = batch.draws(self.generator)
        passed = batch.population.weights().cumsum(1) < ops.uniform(shape=(1,), **draws)
        parent = passed.sum(1, keepdim=True).clamp(max=batch.population.num_states - 1)
        presence, position, rank = _unpack(batch.space, batch.population.take(parent).squeeze(1))
        keys = ops.uniform(shape=(num_objects + 1,), **draws)
        keys[:, :num_objects].masked_fill_(~presence, -1.0)
        gone = keys.argmax(1, keepdim=True)
        presence = presence & (torch.arange(num_objects, device=gone.device) != gone)
        return presence, position, rank, draws


MOVES = ("shift", "swap", "replace", "add", "remove")


class PlacementMoves(Search):
    """Evolutionary moves on scenes.

    Children of fit parents differ in one object:

    ===========  ========================================================================================
    ``shift``    a random object moves to one of the places next to it
    ``swap``     two objects exchange their places; where there is an order, their depths, or both
    ``replace``  an absent object takes the place of a present one
    ``add``      an absent object appears at a random place (and depth)
    ``remove``   an object disappears
    ===========  ========================================================================================

    In a scene with too few objects for a move, an object is added; where none is absent, one is shifted.

    Example:
        >>> scenes = occluded_scenes(generated_objects(2, 3), 10, (8, 8), presence=0.5, wrap=True)
        >>> model = OcclusiveComponents(2, (8, 8), (3, 3)).initialize(scenes.data)
        >>> scan = PlacementSelection(PlaceScan(model.scene_parameters, model.canvas), 2)
        >>> guide = AutoTruncated(model, num_states=8).infer(scenes.data, scan + PlacementMoves((8, 8), 2, 2), steps=1)

    Args:
        grid: rows and columns of the grid of places.
        parents: parents per data point, selected in proportion to fitness without replacement.
        children: children of each parent.
        wrap: whether the grid of places closes on itself. Otherwise shifts end at its edges.
        shares: relative frequency of the moves, in the order of the table.
        generator: source of randomness. Default: torch's global generator.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        grid: tuple[int, int],
        parents: int = 6,
        children: int = 6,
        *,
        wrap: bool = True,
        shares: tuple[float, float, float, float, float] = (0.4, 0.1, 0.2, 0.15, 0.15),
        generator: torch.Generator | None = None,
    ) -> None:
        self.parents, self.children = check_counts(parents=parents, children=children)
        rows, columns = grid
        self.grid = check_count("grid", rows), check_count("grid", columns)
        if len(shares) != len(MOVES) or min(shares) < 0 or not sum(shares) > 0:
            raise ValueError(f"shares must be {len(MOVES)} numbers that are not negative, one per move {MOVES}; got {shares}")
        check_kinds(PlacementMoves.__init__, generator=generator)
        self.wrap, self.shares, self.generator = wrap, shares, generator

    def propose(self, batch: SearchBatch) -> Population:
        """The children, ``(N, parents * children)``.

        Raises:
            ValueError: if the populations hold fewer states than there are parents, or the grid is not that of the positions.
        """
        population, space = batch.population, batch.space
        num_places = scene_sizes(space)[1]
        if self.grid[0] * self.grid[1] != num_places:
            raise ValueError(f"grid must have as many places as positions have values, {num_places}; got {self.grid}")
        if population.num_states < self.parents:
            raise ValueError(f"parents must be at most the states of a population, {population.num_states}: cannot select {self.parents}")
        draws = batch.draws(self.generator)
        parent_states = ops.select_parents(population.log_joint, self.parents, by_fitness=True, **draws)
        parents = population.take(parent_states)
        scenes = _unpack(space, parents.repeat_interleave(self.children, 1))
        return batch.evaluate(_pack(space, *self._move(*scenes, draws)))

    def _move(self, presence: Tensor, position: Tensor, rank: Tensor | None, draws: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Makes one move in every scene ``(N, C, H)``."""
        num_objects, one = presence.shape[-1], (presence.shape[1], 1)
        shares = torch.tensor(self.shares, dtype=torch.float64, device="cpu").cumsum(0).to(presence.device, non_blocking=True)
        move = torch.searchsorted(shares[:-1] / shares[-1], ops.uniform(shape=one[:1], **draws), right=True)
        keys = ops.uniform(shape=presence.shape[1:], **draws)
        on = torch.where(presence, keys, -1.0)
        first, absent = on.argmax(-1, keepdim=True), torch.where(presence, -1.0, keys).argmax(-1, keepdim=True)
        second = on.scatter(-1, first, -1.0).argmax(-1, keepdim=True)
        count = presence.sum(-1)
        shift, swap, replace, add, remove = range(5)
        move = torch.where((count == 0) | ((count == 1) & (move == swap)), add, move)
        move = torch.where((count == num_objects) & ((move == add) | (move == replace)), shift, move).unsqueeze(-1)

        here, there = position.gather(-1, first), position.gather(-1, second)
        anywhere = ops.uniform_integers(bound=self.grid[0] * self.grid[1], shape=one, **draws)
        # With depth, every other swap exchanges only what lies in front.
        exchanged = (move == swap) & ((ops.uniform(shape=one, **draws) < 0.5) if rank is not None else True)
        position = position.scatter(
            -1, first, torch.where(move == shift, self._neighbour(here, draws), torch.where(exchanged, there, here))
        )
        position = torch.where(exchanged, position.scatter(-1, second, here), position)
        newcomer = torch.where(move == replace, here, anywhere)
        is_new = (move == add) | (move == replace)
        position = torch.where(is_new, position.scatter(-1, absent, newcomer), position)
        presence = torch.where((move == replace) | (move == remove), presence.scatter(-1, first, False), presence)
        presence = torch.where(is_new, presence.scatter(-1, absent, True), presence)
        if rank is not None:
            depth = rank.gather(-1, first)
            between = count.unsqueeze(-1) * ops.uniform(shape=one, **draws) - 0.5
            rank = torch.where(is_new, rank.scatter(-1, absent, torch.where(move == replace, depth, between)), rank)
            swapped = rank.scatter(-1, first, rank.gather(-1, second)).scatter(-1, second, depth)
            rank = torch.where(move == swap, swapped, rank)
        return presence, position, rank

    def _neighbour(self, place: Tensor, draws: dict[str, Any]) -> Tensor:
        """Draws one of the eight places around each place."""
        rows, columns = self.grid
        step = ops.uniform_integers(bound=8, shape=place.shape[1:], **draws)
        step = step + (step >= 4)
        row, column = place // columns + step // 3 - 1, place % columns + step % 3 - 1
        if self.wrap:
            return row % rows * columns + column % columns
        return row.clamp(0, rows - 1) * columns + column.clamp(0, columns - 1)


def _unpack(space: StateSpace, words: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Presence, position and depth rank ``(..., H)`` of objects in scenes."""
    num_objects, _ = scene_sizes(space)
    levels = space.unpack(words, torch.int64)
    presence, position, code = levels[..., :num_objects] > 0, levels[..., num_objects : 2 * num_objects], levels[..., 2 * num_objects :]
    return presence, position, depth_rank(code, presence).double() if code.shape[-1] else None


def _pack(space: StateSpace, presence: Tensor, position: Tensor, depth: Tensor | None) -> Tensor:
    """Packed scenes ``(..., W)``."""
    parts = [presence.long(), position.masked_fill(~presence, 0)]
    return space.pack(torch.cat(parts if depth is None else [*parts, depth_code(depth, presence)], -1))
