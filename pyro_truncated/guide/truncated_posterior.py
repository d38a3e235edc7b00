"""A truncated posterior as numbers, by site of the model.

It has marginals, modes, quantiles, expectations and draws. Joint marginals of two sites are those of whole states or of a product of sets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_truncated.guide.product_batch import ProductBatch
from pyro_truncated.program.layout import Layout, SiteLayout
from pyro_truncated.states.population import Population
from pyro_truncated.utils.budget import rows_per_block


@dataclasses.dataclass(frozen=True)
class TruncatedPosterior:
    """What can be read from scored populations."""

    population: Population  # the populations of N data points
    layout: Layout  # the sites that their states are values of
    sizes: tuple[int, ...]  # sizes of the data plates, whose product is N

    def marginals(self) -> dict[str, Tensor]:
        """Returns marginal probabilities.

        At Boolean sites they are those of 1, ``(N, *site shape)``, at others those of each value,
        ``(N, *site shape, V)``.
        """
        probabilities = self.population.value_probabilities()
        result = {}
        for name, site in self.layout.sites.items():
            own = probabilities[:, self.layout.slices[name], : max(site.cardinalities)]
            result[name] = own[..., 1].reshape(-1, *site.shape) if site.kind == "boolean" else own.reshape(-1, *site.shape, own.shape[-1])
        return result

    def pairwise_marginals(self, first: str, second: str) -> Tensor:
        """Joint marginals of two sites, see :meth:`AutoTruncated.pairwise_marginals`."""
        return population_pairs(self.population, self.layout, first, second)

    def mode(self) -> dict[str, Tensor]:
        """The most probable joint state, ``(N, *site shape)``."""
        return self.layout.split(self.population.space.unpack(self.population.mode()))

    def median(self) -> dict[str, Tensor]:
        """The most probable joint state, shaped as the model's sites."""
        return self.layout.site_values(self.population.space.unpack(self.population.mode()), self.sizes)

    def quantiles(self, quantiles: Sequence[float] | Tensor) -> dict[str, Tensor]:
        r"""Returns quantiles, shaped ``(Q, ...)`` as the model's sites.

        They are the smallest values :math:`v` of positive probability with :math:`P(s \le v) \ge
        q`.
        """
        shares = check_quantiles(quantiles)
        one_hot = [name for name, site in self.layout.sites.items() if site.kind == "one_hot"]
        if one_hot:
            raise NotImplementedError(f"the values of the one-hot sites {one_hot} have no order; use mode(), median() or marginals()")
        probabilities = self.population.value_probabilities()
        levels = quantile_levels(probabilities, shares, probabilities.shape[-1])
        values = [self.layout.site_values(level, self.sizes) for level in levels]
        return {name: torch.stack([value[name] for value in values]) for name in self.layout.sites}

    def expectation(self, f: Callable[[dict[str, Tensor]], Tensor], memory_budget: int | None) -> Tensor:
        """Expectation ``(N, ...)`` of a function that maps site values ``(N, S, *site shape)`` to ``(N, S, ...)``."""
        return self.population.expectation(lambda levels: f(self.layout.split(levels)), memory_budget=memory_budget)

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Independent draws, ``(num_samples, N, *site shape)``."""
        return self.layout.split(self.population.space.unpack(self.population.sample(num_samples, generator)))


def check_quantiles(quantiles: Sequence[float] | Tensor) -> list[float]:
    """Returns numbers that must lie in 0 .. 1."""
    shares: list[float] = torch.as_tensor(quantiles, dtype=torch.float64).flatten().tolist()
    if not all(0 <= q <= 1 for q in shares):
        raise ValueError(f"quantiles must lie in 0 .. 1; got {shares}")
    return shares


def quantile_levels(probabilities: Tensor, quantiles: Sequence[float], num_values: int, tolerance: float = 1e-6) -> list[Tensor]:
    """Returns the levels that the quantiles reach, of probabilities ``(..., V)``.

    A value counts as reached in spite of rounding, and the smallest one only if it has any probability.
    """
    below = probabilities.double().cumsum(-1)
    return [(below < max(q - tolerance, tolerance)).sum(-1).clamp(max=num_values - 1) for q in quantiles]


def population_pairs(population: Population, layout: SiteLayout, first: str, second: str) -> Tensor:
    """Returns the joint marginals of two sites on populations of whole states."""
    _check_sites(layout, first, second)
    entries = sum(layout.sites[name].num_latents * max(layout.sites[name].cardinalities) for name in (first, second))
    blocks = []
    for block in population.split(rows_per_block(16 * population.num_states * entries)):
        parts = [_indicators(layout, name, block.words) for name in (first, second)]
        blocks.append(torch.einsum("ns,ns...ev,ns...fw->n...efvw", block.weights().double(), *parts))
    return _restore_shapes(layout, first, second, torch.cat(blocks))


@torch.no_grad()
def product_pairs(batch: ProductBatch, first: str, second: str) -> Tensor:
    """Returns the joint marginals of two sites on a product of sets."""
    scorer, product, layout = batch.scorer, batch.scorer.product, batch.scorer.layout
    _check_sites(layout, first, second)
    owner = {site: node for node, own in enumerate(product.node_layouts) for site in own.sites}
    nodes, sets = (owner[first], owner[second]), batch.sets()
    indicators = []
    for name, node in zip((first, second), nodes, strict=True):
        number, at = product.place[node]
        words = scorer.split_nodes(sets[number], number)[at]
        indicators.append(_with_plates(product.node_layouts[node], name, words, scorer.plate_sizes(node)))
    if nodes[0] == nodes[1]:
        table = torch.einsum("s...,s...ev,s...fw->...efvw", _node_weights(batch, nodes[0]), *indicators)
    else:
        table = torch.einsum("st...,s...ev,t...fw->...efvw", _clique_weights(batch, sets, nodes, (first, second)), *indicators)
    data = [layout.depth + dim for dim in layout.dims]
    plates = [1 if slot in data else size for slot, size in enumerate(table.shape[: layout.depth])]
    table = table.movedim(data, list(range(len(data)))) if data else table
    return _restore_shapes(layout, first, second, table.reshape(scorer.num_data, *plates, *table.shape[layout.depth :]))


def _node_weights(batch: ProductBatch, node: int) -> Tensor:
    """The posterior of the states of a node, ``(S, *plates)``."""
    scorer, product = batch.scorer, batch.scorer.product
    number, at = product.place[node]
    weights = scorer.split_nodes(batch.rescore()[number].weights().double(), number)[at]
    table = product.spread(node, weights, scorer.plate_sizes(node)).movedim(product.tree.dim(node), 0)
    return table.reshape(len(table), *table.shape[product.tree.num_dims - product.tree.depth :])


def _clique_weights(batch: ProductBatch, sets: Sequence[Tensor], nodes: tuple[int, int], names: tuple[str, str]) -> Tensor:
    """The posterior of the joint states of two nodes, ``(S, T, *plates)``."""
    scorer, product, tree = batch.scorer, batch.scorer.product, batch.scorer.product.tree
    bucket = tree.find_bucket(nodes)
    if not set(nodes) <= {bucket, *tree.separators[bucket]}:
        raise NotImplementedError(
            f"no density joins the sites '{names[0]}' and '{names[1]}', so their joint marginals are not at hand. Estimate them from "
            "guide.sample_posterior(num_samples), or make the guide with AutoTruncated(..., whole_states=True)."
        )
    shape = [1] * tree.num_dims
    for node in nodes:
        shape[tree.dim(node)] = sets[product.place[node][0]].shape[1]
        for dim, size in zip(product.node_layouts[node].dims, scorer.plate_sizes(node), strict=True):
            shape[dim] = size
    (table,) = scorer.messages(sets).posterior([nodes], [torch.Size(shape)])
    table = table.expand(shape).movedim((tree.dim(nodes[0]), tree.dim(nodes[1])), (0, 1))
    return table.reshape(*table.shape[:2], *shape[tree.num_dims - tree.depth :])


def _check_sites(layout: SiteLayout, first: str, second: str) -> None:
    for argument, name in (("first", first), ("second", second)):
        if name not in layout.sites:
            raise ValueError(f"{argument} must be the name of a discrete latent site, one of {list(layout.sites)}; got {name!r}")
    frames = [{frame.dim: frame.name for frame in layout.sites[name].frames if frame.vectorized} for name in (first, second)]
    for dim in sorted(frames[0].keys() & frames[1].keys()):
        if frames[0][dim] != frames[1][dim]:
            raise NotImplementedError(
                f"the plates '{frames[0][dim]}' of '{first}' and '{frames[1][dim]}' of '{second}' have the same dim={dim}, so pairs of "
                "their members have no place. Give one of them another dim, or estimate from guide.sample_posterior(num_samples)."
            )


def _indicators(layout: SiteLayout, name: str, words: Tensor) -> Tensor:
    """Returns which value each entry of a site has in states ``(rows, S, num_words)``.

    The result is ``(rows, S, *plates, E, V)``, with the ``E`` entries of an event, and ones where the site has no further plate.
    """
    site, levels = layout.sites[name], layout.space.unpack(words, torch.int64)[..., layout.slices[name]]
    slots = [1] * layout.depth
    for dim, size in site.plates:
        slots[dim] = size
    levels = levels.reshape(*levels.shape[:2], *slots, math.prod(site.event_shape))
    return one_hot(levels, max(site.cardinalities)).double()


def _with_plates(layout: SiteLayout, name: str, words: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns the same with rows as plates, ``(S, *plates, E, V)``."""
    indicators = _indicators(layout, name, words)
    depth, plates = layout.depth, layout.spread(sizes, layout.depth)
    indicators = indicators.reshape(*plates, *indicators.shape[1:]).movedim(depth, 0)
    order = [1 + place for slot in range(depth) for place in (slot, depth + slot)]
    plate_sizes = [own * inner for own, inner in zip(plates, indicators.shape[1 + depth : 1 + 2 * depth], strict=True)]
    return indicators.permute(0, *order, -2, -1).reshape(indicators.shape[0], *plate_sizes, *indicators.shape[-2:])


def _restore_shapes(layout: SiteLayout, first: str, second: str, table: Tensor) -> Tensor:
    """Drops plates without the sites; restores the shapes of events."""
    sites = layout.sites[first], layout.sites[second]
    plates = {dim for site in sites for dim, _ in site.plates}
    plate_sizes = [table.shape[1 + slot] for slot in range(layout.depth) if slot - layout.depth in plates]
    events = [size for site in sites for size in site.event_shape]
    return table.reshape(table.shape[0], *plate_sizes, *events, *table.shape[-2:])
