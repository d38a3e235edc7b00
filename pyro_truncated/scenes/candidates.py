"""Candidate places of objects, their neighbours and probabilities.

A state has the sites ``presence`` (binary), ``position`` (as many values as places) and perhaps ``order``, in this
order. Each is a vector with one latent per object, as in :class:`pyro_truncated.models.OcclusiveComponents`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_truncated.ops.canvas import Canvas
from pyro_truncated.search.base import SearchBatch
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace


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
