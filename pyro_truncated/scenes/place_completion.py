"""A search that adds objects where a scene explains an image badly."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.scenes.arrangement import depth_code, depth_rank
from pyro_truncated.scenes.candidates import scene_sizes
from pyro_truncated.scenes.place_scan import PlaceScan
from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.states.population import Population


class PlacementCompletion(Search):
    r"""Adds absent objects where good scenes leave most to be explained.

    One scene is drawn from the posterior of each data point, and one of its objects, or none, is removed. All absent
    objects are compared with the residual of the image at all places (:meth:`.PlaceScan.beside`). The ``num_added``
    that explain most are added in all :math:`2^{\mathrm{num\_added}}` combinations, at random depths where there is
    an order.

    A :class:`PlacementSelection` compares each object with the bare background, and so finds only the few that stand
    out most. Here objects that are present already make room for the others.

    Example:
        >>> scenes = occluded_scenes(generated_objects(2, 3), 10, (8, 8), presence=0.5, wrap=True)
        >>> model = OcclusiveComponents(2, (8, 8), (3, 3)).initialize(scenes.data)
        >>> search = PlacementCompletion(PlaceScan(model.parameters_of_scene, model.canvas), 2)
        >>> guide = AutoTruncated(model, num_states=8).infer(scenes.data, search, steps=2)

    Args:
        scan: compares objects with images; its best place of each object counts.
        num_added: number of objects that are put into a scene.
        generator: source of randomness; default: torch's global generator.

    Raises:
        ValueError: if ``num_added`` is not positive.
    """

    def __init__(self, scan: PlaceScan, num_added: int = 4, *, generator: torch.Generator | None = None) -> None:
        if num_added < 1:
            raise ValueError(f"num_added must be positive; got {num_added}")
        self.scan, self.num_added, self.generator = scan, num_added, generator

    def propose(self, batch: SearchBatch) -> Population:
        """Proposes ``(N, 2^num_added)`` scenes with all combinations of additions."""
        presence, position, rank, draws = self._parents(batch)
        found = self.scan.beside(batch, torch.where(presence, position, -1), rank)
        scores = found.scores[..., 0].masked_fill(presence, -torch.inf)
        number = min(self.num_added, presence.shape[1])
        choices = torch.tensor(list(itertools.product((False, True), repeat=number)), device=scores.device)
        added = scores.topk(number, 1).indices.unsqueeze(1).expand(-1, len(choices), -1)
        is_new = torch.zeros(*added.shape[:2], presence.shape[1], dtype=torch.bool, device=scores.device)
        # Where fewer are absent, some of the best are there already.
        is_new = is_new.scatter(2, added, choices.expand_as(added)) & ~presence.unsqueeze(1)
        is_there = is_new | presence.unsqueeze(1)
        where = torch.where(is_new, found.places[..., 0].unsqueeze(1), position.unsqueeze(1))
        parts = [is_there.long(), where.masked_fill(~is_there, 0)]
        if rank is not None:
            between = presence.sum(1, keepdim=True) * ops.uniform(shape=presence.shape[1:], **draws) - 0.5
            depth = torch.where(presence, rank.double(), between)
            parts.append(depth_code(depth.unsqueeze(1).expand(is_there.shape), is_there))
        return batch.scored(batch.space.pack(torch.cat(parts, -1)))

    def _parents(self, batch: SearchBatch) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        """Draws a probable scene of each data point, perhaps without one object.

        Returns presence, position and rank ``(N, H)``.
        """
        num_objects, _ = scene_sizes(batch.space)
        draws = batch.draws(self.generator)
        passed = batch.population.weights().cumsum(1) < ops.uniform(shape=(1,), **draws)
        chosen = passed.sum(1, keepdim=True).clamp(max=batch.population.num_states - 1)
        levels = batch.space.unpack(batch.population.take(chosen), torch.int64).squeeze(1)
        presence, position, code = levels[:, :num_objects] > 0, levels[:, num_objects : 2 * num_objects], levels[:, 2 * num_objects :]
        rank = depth_rank(code, presence) if code.shape[-1] else None
        keys = ops.uniform(shape=(num_objects + 1,), **draws)
        keys[:, :num_objects].masked_fill_(~presence, -1.0)
        gone = keys.argmax(1, keepdim=True)
        presence = presence & (torch.arange(num_objects, device=gone.device) != gone)
        return presence, position, rank, draws
