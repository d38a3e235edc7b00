"""Evolutionary moves on scenes: objects are shifted, swapped, replaced, added and removed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.scenes.arrangement import depth_code, depth_rank
from pyro_truncated.scenes.candidates import scene_sizes
from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.states.population import Population

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
        >>> scan = PlacementSelection(PlaceScan(model.parameters_of_scene, model.canvas), 2)
        >>> guide = AutoTruncated(model, num_states=8).infer(scenes.data, scan + PlacementMoves((8, 8), 2, 2), steps=1)

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
        draws = batch.draws(self.generator)
        chosen = ops.select_parents(population.log_joint, self.parents, by_fitness=True, **draws)
        parents = population.take(chosen)
        levels = space.unpack(parents.repeat_interleave(self.children, 1), torch.int64)
        presence, position, code = levels[..., :num_objects] > 0, levels[..., num_objects : 2 * num_objects], levels[..., 2 * num_objects :]
        rank = depth_rank(code, presence).double() if code.shape[-1] else None
        presence, position, rank = self._move(presence, position, rank, draws)
        parts = [presence.long(), position.masked_fill(~presence, 0)]
        if rank is not None:
            parts.append(depth_code(rank, presence))
        return batch.scored(space.pack(torch.cat(parts, -1)))

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
        position = position.scatter(-1, first, torch.where(move == shift, self._beside(here, draws), torch.where(exchanged, there, here)))
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

    def _beside(self, place: Tensor, draws: dict[str, Any]) -> Tensor:
        """Draws one of the eight places around each place.

        At an edge of a grid that does not wrap it may be the place itself.
        """
        rows, columns = self.grid
        step = ops.uniform_integers(bound=8, shape=place.shape[1:], **draws)
        step = step + (step >= 4)
        row, column = place // columns + step // 3 - 1, place % columns + step % 3 - 1
        if self.wrap:
            return row % rows * columns + column % columns
        return row.clamp(0, rows - 1) * columns + column.clamp(0, columns - 1)
