"""Densities of a program as tables over sets of states.

There is one set for each node of its factor graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import pyro
import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_truncated.ops.elimination import IMPOSSIBLE, Messages
from pyro_truncated.program.call import Call
from pyro_truncated.program.densities import log_density
from pyro_truncated.program.known_levels import KnownLevels
from pyro_truncated.program.probe import Probe
from pyro_truncated.program.product_layout import ProductLayout
from pyro_truncated.program.sites import is_delta, sample_nodes
from pyro_truncated.program.sites import log_density as sum_log_density
from pyro_truncated.program.supports import supported_log_prob
from pyro_truncated.program.zero_probabilities import exact_log_prob

_STATES_TRIED = 3
# Words of the sets of all groups: (rows, S, num_words) for each group.
Sets = Sequence[Tensor]


class ProductScorer(Probe):
    r"""Tables :math:`\psi_f(s_{v \in f})` of a run of the model.

    They are tables over sets of states; sums go over the product of the sets.

    The model is run once on the sets of all nodes: the states of a node lie in the dimension of its colour, left of all plates, and
    nodes that share a density have different colours. Everything else that the run draws is held fixed.

    Args:
        call: the Pyro model and its arguments.
        product: the nodes of its factor graph.
        values: fixed values by site name: other latents, subsamples of plates.

    Raises:
        NotImplementedError: if a plate is subsampled whose members share a latent of the same component.
    """

    def __init__(self, call: Call, product: ProductLayout, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(call, product.layout, values)
        self.product = product
        self._frames = {f.name: f for name in product.layout.sites for f in self.nodes[name]["cond_indep_stack"] if f.vectorized}
        self._refuse_shared_subsamples()
        if self.is_vectorized:
            raise NotImplementedError(
                "sets of states for each node take one draw of the other latents at a time: use num_particles without vectorize_particles, "
                "and Predictive without parallel=True, or AutoTruncated(..., whole_states=True)"
            )

    def _refuse_shared_subsamples(self) -> None:
        graph = self.product.graph
        for component, root in zip(graph.components, self.product.roots, strict=True):
            own = self.product.node_layouts[root].plates
            for node in component:
                for plate in self.product.node_layouts[node].plates:
                    frame = self._frames[plate]
                    if plate not in own and frame.full_size is not None and frame.full_size != frame.size:
                        raise NotImplementedError(
                            f"the latents {list(graph.nodes[node].sites)} lie in the subsampled plate '{plate}', but share the latents "
                            f"{list(graph.nodes[root].sites)}, whose posterior needs all members of it. Take all of '{plate}'."
                        )

    # --- rows of the populations ---

    def sizes_of(self, node: int) -> tuple[int, ...]:
        """Sizes of a node's plates in this run."""
        return tuple(int(self._frames[name].size) for name in self.product.node_layouts[node].plates)

    def full_size_of(self, plate: str) -> int:
        """Size of a plate, subsampled or not."""
        frame = self._frames[plate]
        return int(frame.full_size or frame.size)

    def rows_of(self, group: int) -> Tensor | None:
        """Returns which rows of a group's population this run selects.

        It is ``None`` for all in order.
        """
        found = self.product.groups[group]
        positions, is_whole = torch.zeros(1, dtype=torch.int64), True
        for name in found.plates:
            frame = self._frames[name]
            size = int(frame.full_size or frame.size)
            chosen = torch.as_tensor(self.values[name]).cpu() if name in self.values else torch.arange(size)
            is_whole &= torch.equal(chosen, torch.arange(size))
            positions = (positions.unsqueeze(-1) * size + chosen).flatten()
        if is_whole:
            return None
        offsets = torch.arange(len(found.nodes)) * found.layouts[0].num_data
        return (offsets.unsqueeze(-1) + positions).flatten().to(self.device)

    def num_rows(self, group: int) -> int:
        """How many rows of a group's population this run selects."""
        nodes = self.product.groups[group].nodes
        return len(nodes) * math.prod(self.sizes_of(nodes[0]))

    def nodes_of(self, rows: Tensor, group: int) -> list[Tensor]:
        """Rows of a group, cut into those of its nodes."""
        return list(rows.chunk(len(self.product.groups[group].nodes)))

    @torch.no_grad()
    def hidden_log_probs(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what masks hide of the sites' log probabilities.

        The sites are discrete and have some values; results are by name of the masked.
        """
        if not self.hidden:
            return {}
        with pyro.validation_enabled(False):
            nodes = sample_nodes(self.run({**self.values, **states}))
        return {name: self._log_prob(nodes[name]).masked_fill(torch.as_tensor(nodes[name]["mask"]), 0.0) for name in self.hidden}

    # --- what is known, and what counts ---

    @cached_property
    def known_sets(self) -> list[list[KnownLevels | None]]:
        """What this call says of the states of each node, by group."""
        observed = {name: self.nodes[name]["value"] for name in self.observed}
        return [
            [
                KnownLevels.of(layout, self.sizes_of(node), observed, self.idle, self.device)
                for node, layout in zip(group.nodes, group.layouts, strict=True)
            ]
            for group in self.product.groups
        ]

    def put_known_into(self, words: Tensor, group: int) -> Tensor:
        """Returns the states of a group with known values put in."""
        known = self.known_sets[group]
        if all(levels is None for levels in known):
            return words
        parts = self.nodes_of(words, group)
        return torch.cat([part if levels is None else levels.put_into(part) for part, levels in zip(parts, known, strict=True)])

    def log_weights(self, words: Tensor, group: int) -> Tensor:
        """Returns log weights ``(rows, S)`` of a group's states.

        They are zero, or impossible where states contradict what is known.
        """
        weights = torch.zeros(words.shape[:2], dtype=torch.float64, device=self.device)
        for part, own, levels in zip(self.nodes_of(words, group), self.nodes_of(weights, group), self.known_sets[group], strict=True):
            if levels is not None:
                own.masked_fill_(levels.contradicts(part), IMPOSSIBLE)
        return weights

    # --- tables and sums ---

    def tables(self, sets: Sets) -> list[tuple[tuple[int, ...], Tensor]]:
        """Returns the log density of each sample site as a table.

        The sites depend on discrete latents; a table is over the states of their nodes.

        Raises:
            ValueError: if a log density is NaN or ``+inf``; the message names the site.
        """
        product, values = self.product, dict(self.values)
        for number, (group, words) in enumerate(zip(product.groups, sets, strict=True)):
            for node, own in zip(group.nodes, self.nodes_of(words, number), strict=True):
                values.update(product.values(node, own, self.sizes_of(node), self.dtypes))
        return self._tables_of(values)

    def _tables_of(self, values: Mapping[str, Any]) -> list[tuple[tuple[int, ...], Tensor]]:
        with pyro.validation_enabled(False):
            nodes = sample_nodes(self.run(values))
            found = {
                name: self._table(nodes[name], scope)
                for name, scope in self.product.graph.factors.items()
                if name in nodes and name not in self.uncovered
            }
        self._check_finite(found)
        return [(self.product.graph.factors[name], table) for name, table in found.items()]

    @staticmethod
    def _check_finite(tables: Mapping[str, Tensor]) -> None:
        # One look at all of them: each would cost as much as a message.
        highest = torch.cat([table.detach().flatten() for table in tables.values()]).amax() if tables else torch.zeros(())
        if bool(highest < math.inf):
            return
        name = next(name for name, table in tables.items() if not bool((table < math.inf).all()))
        kind = "NaN" if bool(tables[name].isnan().any()) else "+inf"
        raise ValueError(
            f"the log density of site '{name}' is {kind} for some states. "
            "Check the model's parameters and data (missing values need a distribution that allows them)."
        )

    def _table(self, node: Any, scope: tuple[int, ...]) -> Tensor:
        product = self.product
        log_prob: Any = self._log_prob(node)
        is_summed_out = node["name"] in product.layout.sites and not node["is_observed"] and node["name"] not in self.idle
        scale = node["scale"] / self.scale_of(scope[0])
        log_prob = scale_and_mask(log_prob, scale, None if is_summed_out else node["mask"])
        if product.layout.checked:
            # What depends on an impossible value may be anything.
            log_prob = torch.where(log_prob.isnan(), -math.inf, log_prob)
        table: Tensor = log_prob.reshape((1,) * (product.tree.num_dims - log_prob.dim()) + tuple(log_prob.shape))
        plates = frozenset().union(*(product.tree.plates[member] for member in scope))
        inner = sorted({frame.dim for frame in node["cond_indep_stack"] if frame.vectorized} - plates)
        return table.sum(inner, keepdim=True) if inner else table

    def _log_prob(self, node: Any) -> Tensor:
        if node["name"] in self.product.layout.checked:
            return supported_log_prob(node["fn"], node["value"])
        if node["name"] in self.product.layout.sites and not node["is_observed"]:
            return exact_log_prob(node["fn"], node["value"], lambda: _usual_log_prob(node))
        return _usual_log_prob(node)

    def scale_of(self, node: int) -> float | Tensor:
        """What the evidence of a node's component is scaled by."""
        scale: float | Tensor = self.nodes[self.product.graph.nodes[node].sites[0]]["scale"]
        return scale

    def scale_beyond_subsamples(self, site: str) -> float | Tensor:
        """Returns the part of a site's scale without subsampling.

        It does not come from subsampled plates.
        """
        node = self.nodes[site]
        share: float = math.prod(frame.size / (frame.full_size or frame.size) for frame in node["cond_indep_stack"])
        return node["scale"] * share  # type: ignore[no-any-return]

    def weights(self, sets: Sets) -> dict[int, Tensor]:
        """Returns, by node, the log weights of its states.

        They have the dimensions of a table.
        """
        found = {}
        for number, (group, words) in enumerate(zip(self.product.groups, sets, strict=True)):
            for node, rows in zip(group.nodes, self.nodes_of(self.log_weights(words, number), number), strict=True):
                found[node] = self.product.spread(node, rows, self.sizes_of(node))
        return found

    def messages(self, sets: Sets, *, maximum: bool = False) -> Messages:
        """The messages of a run of the model on the sets."""
        return self.product.tree.collect(self.tables(sets), self.weights(sets), maximum=maximum)

    def evidence(self, messages: Messages) -> list[Tensor]:
        """Returns, by component, the log of the sum over its sets.

        The sum is over the product of sets, ``(rows of its plates,)`` in float64, and ``-inf`` if impossible.
        """
        found = []
        for root in self.product.roots:
            rows = self.product.rows(root, messages.evidence(root), self.sizes_of(root)).squeeze(-1)
            found.append(rows.masked_fill(rows < IMPOSSIBLE / 2, -math.inf))
        return found

    def free_energy(self, sets: Sets) -> Tensor:
        """Returns the scaled free energy of all components.

        It is differentiable in whatever the model is, and leaves out what is outside.
        """
        return self.scaled(self.evidence(self.messages(sets)))

    def scaled(self, evidence: Sequence[Tensor]) -> Tensor:
        """Returns the scaled sum of the evidence of all components.

        Each is scaled as its plates are subsampled.
        """
        return torch.stack([self.scale_of(root) * rows.sum() for root, rows in zip(self.product.roots, evidence, strict=True)]).sum()

    @torch.no_grad()
    def takes_sets(self) -> bool:
        """Whether runs on sets of states agree with single runs.

        Then the graph is right, and the model takes many states at once.
        """
        generator = torch.Generator().manual_seed(0)
        product = self.product
        sets: list[Tensor] = []
        levels: dict[str, Tensor] = {}
        places: dict[int, Tensor] = {}
        for number, group in enumerate(product.groups):
            words = group.space.random((self.num_rows(number), _STATES_TRIED), 0.5, generator).to(self.device)
            sets.append(words)
            for node, own in zip(group.nodes, self.nodes_of(words, number), strict=True):
                chosen = torch.randint(_STATES_TRIED, (len(own), 1), generator=generator).to(self.device)
                places[node] = product.spread(node, chosen, self.sizes_of(node))
                single = own.gather(1, chosen.unsqueeze(-1).expand(-1, -1, own.shape[-1])).squeeze(1)
                levels |= product.node_layouts[node].site_values(group.space.unpack(single), self.sizes_of(node), self.dtypes)
        try:
            together, singly = self.tables(sets), self._tables_of({**self.values, **levels})
        except (RuntimeError, IndexError, ValueError):
            return False
        return all(self._agree(scope, table, expected[1], places) for (scope, table), expected in zip(together, singly, strict=True))

    def _agree(self, scope: tuple[int, ...], table: Tensor, expected: Tensor, places: Mapping[int, Tensor]) -> bool:
        tree = self.product.tree
        others = {tree.dim(node) for node in self.product.tree.order} - {tree.dim(node) for node in scope}
        if table.dim() != tree.num_dims or any(table.shape[dim] != 1 for dim in others):
            return False
        for node in scope:
            if table.shape[tree.dim(node)] > 1:
                table = torch.take_along_dim(table, places[node], dim=tree.dim(node))
        finite = expected[expected.isfinite()].abs()
        tolerance = 1e3 * torch.finfo(expected.dtype).eps * (1.0 + (float(finite.max()) if finite.numel() else 0.0))
        shape = torch.broadcast_shapes(table.shape, expected.shape)
        return torch.allclose(table.expand(shape), expected.expand(shape), rtol=0.0, atol=tolerance)

    # --- sites that depend on no discrete latent ---

    def is_inside(self, node: Any) -> bool:
        """Whether a site's density depends on discrete latents."""
        return node["name"] in self.product.graph.factors

    def outside(self, *, with_parameters: bool = True) -> Tensor:
        """Returns the scaled log density of what depends on no discrete latent.

        Only what is observed counts: it is a part of the objective.

        Args:
            with_parameters: whether priors of parameters, sites with ``infer={"of_parameters": True}``, count.
        """
        nodes = [node for node in self.nodes.values() if with_parameters or not node["infer"].get("of_parameters", False)]
        return sum_log_density(
            (node for node in nodes if not self.is_inside(node) and (node["is_observed"] or is_delta(node))), self.device
        )


def _usual_log_prob(node: Any) -> Tensor:
    if not node["args"] and not node["kwargs"]:
        return log_density(node["fn"], node["value"])
    log_prob: Tensor = node["fn"].log_prob(node["value"], *node["args"], **node["kwargs"])
    return log_prob
