"""Search among neighbours of mixture components, which are learned from scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.ops.streams import uniform_integers
from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arguments import check_count, check_kinds


class NeighbourSearch(Search):
    r"""Proposes neighbours of the best components, and a few random ones.

    It is for mixtures of many components.

    The one latent is the component of a data point. Every component keeps a list of its nearest others. The distance of ``c``
    to ``c'`` is the mean loss of log joint,

    .. math:: d_{cc'} = \bigl\langle \log p(c, y_n) - \log p(c', y_n) \bigr\rangle_{n:\, c = \arg\max},

    over data that ``c`` explains best. Earlier searches count half. Candidates and
    cost do not depend on the number of components. Neighbours of neighbours become neighbours, so the lists are good
    after a few passes. From random components that takes many more passes than from likely ones, see ``init`` below.

    What was learned is part of :meth:`state_dict`; new data (``guide.infer``) use it and add nothing.

    Example:
        >>> y = torch.randn(500, 2)
        >>> model = GaussianMixture(2, 50, covariance="spherical").initialize(y)
        >>> guide = AutoTruncated(model, num_states=4, init=model.likeliest_components(y, 4))
        >>> svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(NeighbourSearch(5)))
        >>> losses = [svi.step(y, 100) for _ in range(3)]

    Args:
        num_neighbours: length of the lists.
        parents: how many of a data point's best components are asked for neighbours.
        num_random: number of random components that are tried, too.
        generator: source of randomness. Default: torch's global generator.

    Attributes:
        neighbours: the lists, ``(K, num_neighbours)``, nearest first; a component that stands in its own list fills a place that is free.
            ``None`` before the first search.

    Raises:
        ValueError: if an argument is out of range; when searching, if the model has other latents than one per data point.

    References:
        Forster and Lücke, "Can Clustering Scale Sublinearly with its Clusters? A Variational EM Acceleration of GMMs and k-Means", AISTATS
        2018. Exarchakis, Oubari and Lenz, "A Sampling-Based Approach for Efficient Clustering in Large Datasets", CVPR 2022. Here the
        distances need no more than scores, so any mixture will do.
    """

    mixture_only = True

    def __init__(self, num_neighbours: int = 8, *, parents: int = 4, num_random: int = 1, generator: torch.Generator | None = None) -> None:
        self.num_neighbours = check_count("num_neighbours", num_neighbours)
        self.parents = check_count("parents", parents)
        self.num_random = check_count("num_random", num_random)
        check_kinds(NeighbourSearch.__init__, generator=generator)
        self.generator = generator
        self.forget()

    def forget(self) -> None:
        """Forgets the lists of nearest components."""
        self.neighbours: Tensor | None = None
        self._distance = self._weight = torch.empty(0)

    def state_dict(self) -> dict[str, Any]:
        """The lists with their distances and weights."""
        if self.neighbours is None:
            return super().state_dict()
        lists = {"neighbours": self.neighbours.clone(), "distance": self._distance.clone(), "weight": self._weight.clone()}
        return {**super().state_dict(), **lists}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where a search with the same arguments has been."""
        self.forget()
        super().load_state_dict(state)
        if "neighbours" in state:
            self.neighbours, self._distance, self._weight = (state[name].clone() for name in ("neighbours", "distance", "weight"))

    def propose(self, batch: SearchBatch) -> Population:
        """Neighbours and random components, repetitions included; ``parents * num_neighbours + num_random`` of them."""
        self.check_space(batch.space)
        own = batch.population.states(torch.int64)[..., 0]
        if self.neighbours is None or len(self.neighbours) != batch.space.size:
            self.neighbours = torch.arange(batch.space.size, device=own.device).unsqueeze(-1).repeat(1, self.num_neighbours)
            self._distance = torch.full(self.neighbours.shape, torch.inf, dtype=torch.float64, device=own.device)
            self._weight = torch.zeros_like(self._distance)
        best = batch.population.log_joint.topk(min(self.parents, own.shape[1])).indices
        near = self.neighbours[own.gather(1, best)].flatten(1)
        random = uniform_integers(batch.positions, batch.space.size, (self.num_random,), generator=batch.source(self.generator))
        components = torch.cat([near, random], 1)
        candidates = batch.evaluate(batch.space.pack(components.unsqueeze(-1)))
        if not batch.is_new:
            self._learn(torch.cat([own, components], 1), torch.cat([batch.population.log_joint, candidates.log_joint], 1))
        return candidates

    def _learn(self, components: Tensor, scores: Tensor) -> None:
        """Takes in the scores ``(N, C)`` of components of some data points."""
        assert self.neighbours is not None
        size = len(self.neighbours)
        best, winner = scores.double().max(1, keepdim=True)
        pairs = components.gather(1, winner) * size + components
        distances = best - scores
        is_comparable = distances.isfinite() & (components != components.gather(1, winner))
        is_listed = self._weight > 0
        first = torch.arange(size, device=pairs.device).unsqueeze(-1) * size + self.neighbours
        pairs, where = torch.cat([first[is_listed], pairs[is_comparable]]).unique(return_inverse=True)
        # What earlier searches have seen counts half as much with every search.
        weights = torch.cat([0.5 * self._weight[is_listed], torch.ones_like(distances[is_comparable])])
        total = torch.zeros(len(pairs), dtype=torch.float64, device=pairs.device)
        mean = total.index_add(0, where, weights * torch.cat([self._distance[is_listed], distances[is_comparable]]))
        total = total.index_add(0, where, weights)
        self._keep_nearest(pairs, mean / total, total)

    def _keep_nearest(self, pairs: Tensor, distance: Tensor, weight: Tensor) -> None:
        """The lists are the nearest of all pairs that are known."""
        assert self.neighbours is not None
        size = len(self.neighbours)
        order = distance.argsort(stable=True)
        order = order[(pairs[order] // size).argsort(stable=True)]
        component = pairs[order] // size
        starts = torch.searchsorted(component, torch.arange(size, device=pairs.device))
        rank = torch.arange(len(order), device=pairs.device) - starts[component]
        is_near = rank < self.num_neighbours
        order, place = order[is_near], (component[is_near], rank[is_near])
        self.neighbours = torch.arange(size, device=pairs.device).unsqueeze(-1).repeat(1, self.num_neighbours)
        self._distance, self._weight = torch.full_like(self._distance, torch.inf), torch.zeros_like(self._weight)
        self.neighbours[place], self._distance[place], self._weight[place] = pairs[order] % size, distance[order], weight[order]
