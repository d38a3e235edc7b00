"""Searches for scenes: which objects are present, where they lie, and in which order they hide each other.

A state is that of a model with the sites ``presence`` (binary), ``position`` (as many values as places) and perhaps ``order``, each of them
a vector with one latent per object, in this order, such as :class:`pyro_truncated.models.OcclusiveComponents`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.scenes.occlusion import depth_code, depth_rank
from pyro_truncated.search.base import Search, SearchBatch, forget
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace

_MAX_STATES = 2**16
MOVES = ("shift", "swap", "replace", "add", "remove")


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Where the objects of each data point may lie.

    Attributes:
        scores: how well each object fits there, larger is better, ``(N, H, C)``; the best place of an object first.
        places: the places, ``(N, H, C)`` int64.
    """

    scores: Tensor
    places: Tensor


PlaceAffinity = Callable[[SearchBatch], Candidates]


class PlacementSelection(Search):
    r"""Selects :math:`H'` objects of each data point with candidate places, and proposes all scenes of these.

    The score of an object is that of its best place. With :math:`r` of the :math:`H'` slots given to chance, the :math:`H' - r` objects of
    largest score and :math:`r` random others are selected, each with its ``C`` best places. The proposals are all states in which every
    selected object is absent or at one of its places, :math:`(1 + C)^{H'}` of them if ``max_active`` allows. In addition, each selected
    object is put at each of its places in the best states that the population holds already, which so can outgrow :math:`H'` objects.

    Args:
        affinity: maps a batch to :class:`Candidates`, such as a :class:`~pyro_truncated.search.PlaceScan` or
            :class:`~pyro_truncated.search.PlaceRegression`.
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
        """Scenes of the selected objects, and the best states with one of these put in; repetitions are left to the merge."""
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
        generator = torch.Generator(found.scores.device).manual_seed(ops.draw_seed(self.generator))
        options: Any = {"generator": generator, "device": found.scores.device}
        scores = found.scores[..., 0]
        number = (self.explore * self.num_selected + torch.rand(len(scores), 1, **options)).floor()
        best = scores.topk(self.num_selected, 1).indices
        is_kept = torch.arange(self.num_selected, device=scores.device) < self.num_selected - number
        # Kept ones are out of the lottery, and its winners take the places that are left.
        lottery = torch.rand(scores.shape, **options).scatter(1, best, torch.where(is_kept, -1.0, torch.rand(best.shape, **options)))
        objects = torch.where(is_kept, best, lottery.topk(self.num_selected, 1).indices.flip(1))
        places = found.places.gather(1, objects.unsqueeze(-1).expand(-1, -1, found.places.shape[-1])).clone()
        is_random = torch.rand(objects.shape, **options) < self.explore_places
        random_places = torch.randint(num_places, objects.shape, **options)
        places[..., -1] = torch.where(is_random, random_places, places[..., -1])
        return objects, places

    def forget(self) -> None:
        """Lets the affinity forget what it has learned of data."""
        forget(self.affinity)

    def _extended(self, population: Population, objects: Tensor, singles: Tensor) -> Tensor:
        """The best states with each of the objects ``(N, K)`` at its place instead of wherever it was."""
        space, number = population.space, min(self.extended, population.num_states)
        best = population.log_joint.topk(number, 1).indices
        parents = population.words.gather(1, best.unsqueeze(-1).expand(-1, -1, space.num_words)).unsqueeze(2)
        full = _placed(space, objects, torch.full_like(objects, -1))
        return ((parents & ~full.unsqueeze(1)) | singles.unsqueeze(1)).flatten(1, 2)


class PlacementMoves(Search):
    """Evolutionary moves on scenes: children of fit parents with one object shifted, swapped with another, replaced, added or removed.

    ===========  ========================================================================================
    ``shift``    a random object moves to one of the places next to it
    ``swap``     two objects exchange their places; where there is an order, their depths, or both
    ``replace``  an absent object takes the place of a present one
    ``add``      an absent object appears at a random place (and depth)
    ``remove``   an object disappears
    ===========  ========================================================================================

    In a scene with too few objects for a move, an object is added; where none is absent, one is shifted.

    Args:
        grid: rows and columns of the grid of places.
        parents: number of parents per data point, selected in proportion to fitness, without replacement.
        children: children of each parent.
        wrap: whether the grid of places closes on itself; otherwise shifts end at its edges.
        shares: relative frequency of the moves, in the order of the table.
        generator: source of randomness; default: torch's global generator.

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
        if parents < 1 or children < 1 or min(grid) < 1:
            raise ValueError(f"parents, children and grid must be positive; got {parents}, {children} and {grid}")
        if len(shares) != len(MOVES) or min(shares) < 0 or not sum(shares) > 0:
            raise ValueError(f"shares must be {len(MOVES)} numbers that are not negative, one per move {MOVES}; got {shares}")
        self.grid, self.parents, self.children, self.wrap = grid, parents, children, wrap
        self.shares, self.generator = shares, generator

    def propose(self, batch: SearchBatch) -> Population:
        """The children, ``(N, parents * children)``.

        Raises:
            ValueError: if the populations hold fewer states than there are parents, or the grid is not that of the positions.
        """
        population, space = batch.population, batch.space
        num_objects, num_places = scene_sizes(space)
        if self.grid[0] * self.grid[1] != num_places:
            raise ValueError(f"a grid of {self.grid} does not have the {num_places} places of the positions")
        if population.num_states < self.parents:
            raise ValueError(f"cannot select {self.parents} parents from populations of {population.num_states} states")
        chosen = ops.select_parents(population.log_joint, self.parents, by_fitness=True, generator=self.generator)
        parents = population.words.gather(1, chosen.unsqueeze(-1).expand(-1, -1, space.num_words))
        levels = space.unpack(parents.repeat_interleave(self.children, 1), torch.int64)
        presence, position, code = levels[..., :num_objects] > 0, levels[..., num_objects : 2 * num_objects], levels[..., 2 * num_objects :]
        generator = torch.Generator(levels.device).manual_seed(ops.draw_seed(self.generator))
        rank = depth_rank(code, presence).double() if code.shape[-1] else None
        presence, position, rank = self._move(presence, position, rank, generator)
        parts = [presence.long(), position.masked_fill(~presence, 0)]
        if rank is not None:
            parts.append(depth_code(rank, presence))
        return batch.scored(space.pack(torch.cat(parts, -1)))

    def _move(
        self, presence: Tensor, position: Tensor, rank: Tensor | None, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Makes one move in every scene ``(N, C, H)``."""
        shape, num_objects = presence.shape[:-1], presence.shape[-1]
        options: Any = {"generator": generator, "device": presence.device}
        weights = torch.tensor(self.shares, dtype=torch.float64, device=presence.device)
        move = torch.multinomial(weights, math.prod(shape), replacement=True, generator=generator).reshape(shape)
        keys = torch.rand(presence.shape, **options)
        on = torch.where(presence, keys, -1.0)
        first, absent = on.argmax(-1, keepdim=True), torch.where(presence, -1.0, keys).argmax(-1, keepdim=True)
        second = on.scatter(-1, first, -1.0).argmax(-1, keepdim=True)
        count = presence.sum(-1)
        shift, swap, replace, add, remove = range(5)
        move = torch.where((count == 0) | ((count == 1) & (move == swap)), add, move)
        move = torch.where((count == num_objects) & ((move == add) | (move == replace)), shift, move).unsqueeze(-1)

        here, there = position.gather(-1, first), position.gather(-1, second)
        anywhere = torch.randint(self.grid[0] * self.grid[1], here.shape, **options)
        # With depth, every other swap exchanges only what lies in front.
        exchanged = (move == swap) & ((torch.rand(here.shape, **options) < 0.5) if rank is not None else True)
        position = position.scatter(
            -1, first, torch.where(move == shift, self._beside(here, generator), torch.where(exchanged, there, here))
        )
        position = torch.where(exchanged, position.scatter(-1, second, here), position)
        newcomer = torch.where(move == replace, here, anywhere)
        is_new = (move == add) | (move == replace)
        position = torch.where(is_new, position.scatter(-1, absent, newcomer), position)
        presence = torch.where((move == replace) | (move == remove), presence.scatter(-1, first, False), presence)
        presence = torch.where(is_new, presence.scatter(-1, absent, True), presence)
        if rank is not None:
            depth = rank.gather(-1, first)
            between = count.unsqueeze(-1) * torch.rand(depth.shape, dtype=rank.dtype, **options) - 0.5
            rank = torch.where(is_new, rank.scatter(-1, absent, torch.where(move == replace, depth, between)), rank)
            swapped = rank.scatter(-1, first, rank.gather(-1, second)).scatter(-1, second, depth)
            rank = torch.where(move == swap, swapped, rank)
        return presence, position, rank

    def _beside(self, place: Tensor, generator: torch.Generator) -> Tensor:
        """One of the eight places around each place; at an edge where the grid does not wrap, perhaps the place itself."""
        rows, columns = self.grid
        step = torch.randint(8, place.shape, generator=generator, device=place.device)
        step = step + (step >= 4)
        row, column = place // columns + step // 3 - 1, place % columns + step % 3 - 1
        if self.wrap:
            return row % rows * columns + column % columns
        return row.clamp(0, rows - 1) * columns + column.clamp(0, columns - 1)


def place_probabilities(population: Population) -> tuple[Tensor, Tensor]:
    r"""Posterior probabilities :math:`q_n(s_h = 1, x_h = l)` that an object is present at a place, as a sparse matrix.

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


def _placed(space: StateSpace, objects: Tensor, places: Tensor) -> Tensor:
    """Packed states ``(..., W)`` with one object present at a place; all bits of its fields for place -1."""
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
    """All ways to leave each selected object out, 0, or to put it at one of its places, ``(S, num_selected)``."""
    limit = num_selected if max_active is None else min(max_active, num_selected)
    size = sum(math.comb(num_selected, k) * num_places**k for k in range(limit + 1))
    if size > _MAX_STATES:
        raise ValueError(
            f"{num_selected} objects with {num_places} places make {size} scenes per data point, over {_MAX_STATES}; lower max_active"
        )
    rows = [row for row in itertools.product(range(num_places + 1), repeat=num_selected) if sum(c > 0 for c in row) <= limit]
    return torch.tensor(rows)
