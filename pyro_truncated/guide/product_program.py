"""A guide on a product of sets as a Pyro program.

Messages draw a joint state, and the sites are set to it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_truncated.guide.plates import enter
from pyro_truncated.guide.product_batch import ProductBatch
from pyro_truncated.guide.product_posterior import pick
from pyro_truncated.guide.program import ProgramRun, search_asked_for
from pyro_truncated.program import inspection
from pyro_truncated.program.product_scorer import ProductScorer
from pyro_truncated.program.sites import trim


class ProductProgramRun(ProgramRun):
    r"""One run of a guide on a product of sets.

    For each node an auxiliary site holds the drawn position in its set, with the log probability :math:`\log q(s_v \mid s_{>v})`. Their sum
    is :math:`\log q(s)`, and :math:`\log p(s, y) - \log q(s) = \mathcal F` for every draw. So any ELBO of Pyro's returns the free energy
    without noise, and an unbiased gradient.
    """

    def _sample_batch(self, batch: ProductBatch, plates: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Tensor]:
        layout, scorer, product = self._layout, batch.scorer, batch.scorer.product
        asked = search_asked_for(name=next(iter(layout.sites)))
        with torch.no_grad():
            if asked is not None:
                batch.search_(asked.search, asked.steps)
            sets = batch.sets()
            particles = [f for f in inspection.plates_around(self._guide.frames, self._guide.index_name) if f.size > 1]
            count = math.prod(frame.size for frame in particles)
            tables = scorer.tables(sets)
            drawn = product.tree.collect(tables.parts, scorer.weights(sets)).draw(count)
            dtype = tables.dtype
        result: dict[str, Tensor] = {name: values[name] for name in layout.other_latents if name in values}
        states: dict[str, Tensor] = {}
        for number, group in enumerate(product.groups):
            for node, words in zip(group.nodes, scorer.nodes_of(sets[number], number), strict=True):
                own, sizes = product.node_layouts[node], scorer.sizes_of(node)
                position, log_prob = (self._rows(product, node, table, sizes) for table in drawn[node])
                levels = own.space.unpack(pick(words, position))
                shape = _left_of(particles, layout.depth)
                batch_shape = (*shape, *own.spread(sizes, layout.depth))
                states |= own.decode(levels.reshape(*batch_shape, -1), len(batch_shape) - 1, scorer.dtypes)
                self._sample_position(own, position.reshape(batch_shape), log_prob.to(dtype).reshape(batch_shape), plates, scorer)
        hidden = scorer.hidden_log_probs(states)
        for own in product.node_layouts:
            for name, site in own.sites.items():
                if name not in scorer.observed:
                    result[name] = self._sample_delta(site, states[name], plates, scorer, hidden.get(name, torch.zeros((), dtype=dtype)))
        return result

    @staticmethod
    def _rows(product: Any, node: int, table: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """The entries ``(draws, rows)`` of a node's table of draws."""
        return torch.stack([product.rows(node, draw, sizes).squeeze(-1) for draw in table])

    def _sample_position(self, own: Any, position: Tensor, log_prob: Tensor, plates: Mapping[str, Any], scorer: ProductScorer) -> None:
        infer: Any = {"is_auxiliary": True, "truncated": {"guide": weakref.ref(self._guide)}}
        with ExitStack() as stack:
            for name in own.plates:
                enter(stack, plates[name])
            stack.enter_context(poutine.scale(scale=scorer.scale_beyond_subsamples(next(iter(own.sites)))))
            depth = max((-dim for dim in own.dims), default=0)
            position, log_prob = (trim(value, 0, depth) for value in (position, log_prob))
            pyro.sample("_".join([*own.sites, "index"]), dist.Delta(position, log_density=log_prob), infer=infer)

    def _sample_delta(self, site: Any, value: Tensor, plates: Mapping[str, Any], scorer: ProductScorer, hidden: Tensor) -> Tensor:
        """Samples a site as a point mass.

        The guide's density gives back what a mask takes away from the model's.
        """
        with ExitStack() as stack:
            for frame in site.frames:
                if frame.vectorized:
                    enter(stack, plates[frame.name])
            stack.enter_context(poutine.scale(scale=scorer.scale_beyond_subsamples(site.name)))
            value = trim(value, site.event_dim, site.depth)
            density = -hidden.to(value.device).expand(value.shape[: value.dim() - site.event_dim])
            stack.enter_context(self._layout.room_for(site, density.dim()))
            return pyro.sample(site.name, dist.Delta(value, log_density=density, event_dim=site.event_dim))


def _left_of(particles: list[Any], depth: int) -> tuple[int, ...]:
    """Returns the shape of the plates of parallel draws.

    They lie left of all plates of the model.
    """
    if not particles:
        return ()
    shape = [1] * (max(-frame.dim for frame in particles) - depth)
    for frame in particles:
        shape[-(-frame.dim - depth)] = frame.size
    return tuple(shape)
