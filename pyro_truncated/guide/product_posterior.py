"""A truncated posterior on a product of sets as numbers.

Marginals, modes, quantiles and draws are given by site of the model. As a Pyro program a guide draws a joint state by messages, and
its sites are set to it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.guide.given_states import excess_density
from pyro_truncated.guide.product_batch import ProductBatch
from pyro_truncated.guide.program import ProgramRun, spread_draws
from pyro_truncated.guide.truncated_posterior import check_quantiles, product_pairs, quantile_levels
from pyro_truncated.ops.elimination import Messages
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arguments import check_count

NO_WHOLE_STATES = (
    "each node of the model's factor graph has a set of states, and there is no list of whole states. Use marginals(), mode() "
    "and sample_posterior(), or make the guide with AutoTruncated(..., whole_states=True)."
)


class SetReadings:
    """Readings from sets of states, which list no whole states."""

    batches: Sequence[Any]

    @property
    def words(self) -> Tensor:
        """Refused by name: there are no whole states."""
        raise AttributeError(NO_WHOLE_STATES)

    @property
    def log_joint(self) -> Tensor:
        """Refused by name: there are no whole states."""
        raise AttributeError(NO_WHOLE_STATES)

    def _share_out(self, num_samples: int, generator: torch.Generator | None) -> list[int]:
        """How many of so many draws are from each batch."""
        number = check_count("num_samples", num_samples)
        counts = torch.randint(len(self.batches), (number,), generator=generator).bincount(minlength=len(self.batches))
        return counts.tolist()


@dataclasses.dataclass(frozen=True)
class ProductPosterior(SetReadings):
    """What can be read from sets of states.

    It has the shapes of whole states, ``(N, *site shape)``, with data points in front.
    """

    # The sets with a run of the model, for each draw of the latents of other guides; what is read
    # is an average over them.
    batches: list[ProductBatch]

    @property
    def batch(self) -> ProductBatch:
        """The batch of the first draw."""
        return self.batches[0]

    @cached_property
    def populations(self) -> list[Population]:
        """Returns the sets of all groups with their log joints."""
        every = [batch.rescore() for batch in self.batches]
        if len(every) == 1:
            return every[0]
        averages = []
        for populations in zip(*every, strict=True):
            weights = torch.stack([population.weights().double() for population in populations]).mean(0)
            free_energy = torch.stack([population.free_energy() for population in populations]).mean(0)
            averages.append(dataclasses.replace(populations[0], log_joint=weights.log() + free_energy.unsqueeze(-1)))
        return averages

    def marginals(self) -> dict[str, Tensor]:
        """Returns the marginal probabilities by site.

        At Boolean sites it is that of 1, ``(N, *site shape)``, at others that of each value, ``(N, *site shape, V)``.
        """
        marginals = {}
        for name, site, table in self._probabilities_by_site():
            own = table[..., : max(site.cardinalities)]
            marginals[name] = self._flatten_data(name, own[..., 1] if site.kind == "boolean" else own)
        return self.batch.scorer.product.join_steps(marginals, is_by_value=True)

    def pairwise_marginals(self, first: str, second: str) -> Tensor:
        """Joint marginals of two sites, see :meth:`AutoTruncated.pairwise_marginals`."""
        return torch.stack([product_pairs(batch, first, second) for batch in self.batches]).mean(0)

    def free_energy(self) -> Tensor:
        """Returns the evidence of each data point, ``(N,)`` in float64.

        Data points are the members of the plates that all nodes share.
        """
        return torch.stack([batch.evidence() for batch in self.batches]).mean(0)

    def mode(self) -> dict[str, Tensor]:
        """Returns the most probable joint state of the sets' product.

        It has shape ``(N, *site shape)``; under several draws it is that of the first.
        """
        return self._join_steps({name: self._flatten_data(name, value) for name, value in self._find_mode().items()})

    def _find_mode(self) -> dict[str, Tensor]:
        return {name: value.squeeze(0) for name, value in self._states(_messages(self.batch, maximum=True).draw(None)).items()}

    def median(self) -> dict[str, Tensor]:
        """The most probable joint state, shaped as the model's sites."""
        return self._join_steps(self._as_model(self._find_mode()))

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Independent draws, ``(num_samples, N, *site shape)``."""
        pairs = zip(self.batches, self._share_out(num_samples, generator), strict=True)
        parts = [self._states(_messages(batch).draw(count, generator)) for batch, count in pairs if count]
        return self._join_steps({name: self._flatten_data(name, torch.cat([states[name] for states in parts]), 1) for name in parts[0]})

    def quantiles(self, quantiles: Sequence[float] | Tensor) -> dict[str, Tensor]:
        r"""Returns quantiles, shaped ``(Q, ...)`` as the model's sites.

        They are the smallest values :math:`v` of positive probability with :math:`P(s \le v) \ge q`.
        """
        shares = check_quantiles(quantiles)
        quantile_values: dict[str, list[Tensor]] = {}
        for name, site, table in self._probabilities_by_site():
            if site.kind == "one_hot":
                raise NotImplementedError(f"the values of the one-hot site '{name}' have no order; use mode(), median() or marginals()")
            levels = quantile_levels(table, shares, max(site.cardinalities))
            quantile_values[name] = [self._as_model({name: site.to_values(level)})[name] for level in levels]
        return self._join_steps({name: torch.stack(values) for name, values in quantile_values.items()})

    # --- from rows to sites ---

    def _join_steps(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.batch.scorer.product.join_steps(values)

    def _probabilities_by_site(self) -> list[tuple[str, Any, Tensor]]:
        """Probabilities of values by site, ``(*plates, *event, V)``."""
        product, scorer = self.batch.scorer.product, self.batch.scorer
        tables: dict[str, tuple[str, Any, Tensor]] = {}
        for number, (group, population) in enumerate(zip(product.groups, self.populations, strict=True)):
            for node, rows in zip(group.nodes, scorer.split_nodes(population.value_probabilities(), number), strict=True):
                own = product.node_layouts[node]
                for name, site in own.sites.items():
                    part = rows[:, own.slices[name]]
                    table = part.reshape(*scorer.plate_sizes(node), *site.shape, *part.shape[2:])
                    tables[name] = name, site, _in_order(table, own.dims, [dim for dim, _ in site.plates])
        return [tables[name] for name in self.batch.scorer.layout.sites]

    def _states(self, draws: dict[int, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        product, scorer = self.batch.scorer.product, self.batch.scorer
        values = {}
        for number, (group, population) in enumerate(zip(product.groups, self.populations, strict=True)):
            for node, words in zip(group.nodes, scorer.split_nodes(population.words, number), strict=True):
                own, sizes = product.node_layouts[node], scorer.plate_sizes(node)
                position = torch.stack([product.rows(node, draw, sizes).squeeze(-1) for draw in draws[node][0]])
                for name, value in own.split(own.space.unpack(pick(words, position))).items():
                    site = own.sites[name]
                    value = value.reshape(len(position), *sizes, *value.shape[2:])
                    values[name] = _in_order(value, own.dims, [dim for dim, _ in site.plates], 1)
        return {name: values[name] for name in scorer.layout.sites}

    def _flatten_data(self, name: str, table: Tensor, start: int = 0) -> Tensor:
        """Returns a tensor with data points as one dimension.

        It is given with a site's plates by dimension; data points are the plates that all nodes share.
        """
        layout, site = self.batch.scorer.layout, self.batch.scorer.layout.sites[name]
        dims = sorted(frame.dim for frame in site.frames if frame.vectorized)
        order = [start + dims.index(dim) for dim in layout.dims] + [start + dims.index(dim) for dim in dims if dim not in layout.dims]
        rest = range(start + len(dims), table.dim())
        table = table.permute((*range(start), *order, *rest))
        return table.reshape(*table.shape[:start], self.batch.scorer.num_data, *table.shape[start + len(layout.dims) :])

    def _as_model(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns values in the shapes of the model's sites.

        They are given as ``(*plates, *event)``; the result has ones where no plate is.
        """
        result = {}
        for name, value in values.items():
            site = self.batch.scorer.layout.sites[name]
            dims = {frame.dim for frame in site.frames if frame.vectorized}
            for dim in range(-1, -site.depth - 1, -1):
                if dim not in dims:
                    value = value.unsqueeze(dim - site.event_dim)
            result[name] = value
        return result


@torch.no_grad()
def _messages(batch: ProductBatch, *, maximum: bool = False) -> Messages:
    return batch.scorer.messages(batch.sets(), maximum=maximum)


def pick(words: Tensor, position: Tensor) -> Tensor:
    """The states ``(B, rows, num_words)`` at positions ``(B, rows)`` of sets ``(rows, S, num_words)``."""
    return words[torch.arange(len(words), device=words.device), position]


def _in_order(table: Tensor, outer: Sequence[int], inner: Sequence[int], start: int = 0) -> Tensor:
    """Returns a tensor with all plates by dimension.

    It is given with data plates first and inner plates next; the result has them from left to right.
    """
    dims = [*outer, *inner]
    order = sorted(range(len(dims)), key=dims.__getitem__)
    rest = range(start + len(dims), table.dim())
    return table.permute((*range(start), *(start + place for place in order), *rest))


class ProductProgramRun(ProgramRun):
    r"""One run of a guide on a product of sets.

    For each node an auxiliary site holds the drawn position in its set, with the log probability :math:`\log q(s_v \mid s_{>v})`. Their sum
    is :math:`\log q(s)`, and :math:`\log p(s, y) - \log q(s) = \mathcal F` for every draw. So any ELBO of Pyro's returns the free energy
    without noise, and an unbiased gradient.
    """

    def _sample_batch(self, batch: ProductBatch, plates: Mapping[str, Any], found: Any) -> dict[str, Tensor]:
        layout, scorer, product = self._layout, batch.scorer, batch.scorer.product
        with torch.no_grad():
            sets = batch.sets()
            particles = {frame.dim: frame.size for frame in self._draw_frames()}
            tables = scorer.tables(sets)
            messages = Messages(product.tree, tables, scorer.weights(sets))
            draws = messages.draw(math.prod(particles.values()))
            if messages.may_be_impossible:
                for root, evidence in zip(product.roots, scorer.evidence(messages), strict=True):
                    excess = excess_density(evidence.unsqueeze(-1), list(layout.sites))
                    position, log_prob = draws[root]
                    draws[root] = position, log_prob + product.spread(root, excess, scorer.plate_sizes(root))
            dtype = tables.dtype
        result: dict[str, Tensor] = {}
        states: dict[str, Tensor] = {}
        for number, group in enumerate(product.groups):
            for node, words in zip(group.nodes, scorer.split_nodes(sets[number], number), strict=True):
                own, sizes = product.node_layouts[node], scorer.plate_sizes(node)
                position, log_prob = (torch.stack([product.rows(node, draw, sizes).squeeze(-1) for draw in table]) for table in draws[node])
                levels = own.space.unpack(pick(words, position))
                batch_shape = spread_draws(list(particles), list(particles.values()), own.spread(sizes, layout.depth))
                states |= own.decode(levels.reshape(*batch_shape, -1), len(batch_shape) - 1, scorer.dtypes)
                self._sample_index(own, position.reshape(batch_shape), log_prob.to(dtype).reshape(batch_shape), plates, scorer)
        hidden = scorer.hidden_log_probs(states)
        none, all_steps = torch.zeros((), dtype=dtype), product.all_steps
        for own in product.node_layouts:
            for name, site in own.sites.items():
                if name not in scorer.observed_sites:
                    # The guide's density gives back what a mask takes away from the model's.
                    density, scale = -hidden.get(name, none), scorer.scale_beyond_subsamples(name)
                    result[name] = self._sample_site(site, states[name], plates, density, scale=scale, is_auxiliary=name in all_steps)
        result = product.join_steps(result)
        for name, steps in product.steps.items():
            site = dataclasses.replace(layout.sites[steps[0]], name=name, event_shape=tuple(result[name].shape[-2:]))
            result[name] = self._sample_site(site, result[name], plates, none, scale=scorer.scale_beyond_subsamples(name))
        return result
