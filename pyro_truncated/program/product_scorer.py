"""Densities of a program as tables over sets of states.

There is one set for each node of its factor graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_truncated.ops.backend import gradient, save_with_context
from pyro_truncated.ops.elimination import IMPOSSIBLE, LogTables, Messages
from pyro_truncated.program.call import Call
from pyro_truncated.program.densities import MAX_STACKED, coarsest_dtype, count_entries, log_density, site_log_densities
from pyro_truncated.program.entries import flatten, weigh, with_entries
from pyro_truncated.program.factor_graph import DENSITY_LIMIT
from pyro_truncated.program.known_levels import KnownLevels
from pyro_truncated.program.operations import Operations, recognisable_size
from pyro_truncated.program.probe import Probe
from pyro_truncated.program.product_layout import NodeGroup, ProductLayout
from pyro_truncated.program.sites import density_nodes, is_subsampled, sample_nodes
from pyro_truncated.program.supports import log_prob_on_support
from pyro_truncated.program.zero_probabilities import exact_log_prob, without_impossible
from pyro_truncated.utils.arrays import once, rounding_tolerance
from pyro_truncated.utils.parameter_store import load_snapshot, snapshot, spare_random_numbers

# How many states of each set, and different arguments of one kind, are tried.
NUM_TRIED = 3
# Words of the sets of all groups: (rows, S, num_words) for each group.
Sets = Sequence[Tensor]
# The name of a sample site, with the nodes that it, or a part of its entries, depends on.
Factor = tuple[str, tuple[int, ...]]


def other_structure(problem: str, *, has_sets: bool = True) -> str:
    """What to say of a call with another structure."""
    advice = ", or make the guide with AutoTruncated(..., whole_states=True)" if has_sets else ""
    return (
        f"the model has another structure than when the guide was set up: {problem}. Make a new guide and first call "
        f"guide.setup(*args) with the arguments of the largest structure{advice}."
    )


class _GivenGradient(torch.autograd.Function):
    """A number whose gradient with respect to a tensor is known."""

    @staticmethod
    def forward(ctx: Any, entries: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        """Returns the value."""
        save_with_context(ctx, gradient)
        return value.clone()

    @staticmethod
    @gradient
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor, None, None]:
        """The given gradient, times the incoming one."""
        (own,) = ctx.saved_tensors
        return weight * own, None, None


def _log_densities_by_name(nodes: Sequence[Any], formula: Callable[[Any, Tensor], Tensor]) -> dict[str, Tensor]:
    return dict(zip((node["name"] for node in nodes), site_log_densities(nodes, formula), strict=True))


class ProductScorer(Probe):
    r"""Tables :math:`\psi_f(s_{v \in f})` of a run of the model.

    They are tables over sets of states; sums go over the product of the sets.

    The model is run once on the sets of all nodes. The states of a node lie in the dimension of its
    colour, left of all plates; nodes that share a density have different colours. Everything else that the run draws is held fixed.

    A run that finds out which rows the model selects is a second one. Where sets of all rows are given, and the model selects all of
    them and observes none of the latents, their tables are those of the first.

    Attributes:
        product: the nodes of its factor graph.
        first_sets: the sets of the first run, ``None`` where it drew one value of each latent.
    """

    def __init__(self, call: Call, product: ProductLayout, values: Mapping[str, Any] | None = None, sets: Sets | None = None) -> None:
        self.product, self.inside = product, product.graph.factors
        self.first_sets = None if sets is None else [words.clone() for words in sets]
        self._first_tables: LogTables | None = None
        super().__init__(call, product.layout, values)
        self._frames = {f.name: f for name in product.layout.sites for f in self.nodes[name]["cond_indep_stack"] if f.vectorized}
        self._refuse_shared_subsamples()
        for component in product.graph.components:
            self._check_common_scale(site for node in component for site in product.graph.nodes[node].sites)
        if self.is_vectorized:
            raise NotImplementedError(
                "sets of states for each node take one draw of the other latents at a time. Leave out vectorize_particles and "
                "parallel=True of Predictive, or make the guide with AutoTruncated(..., whole_states=True)."
            )

        if self.first_sets is not None:
            self._has_graph = torch.is_grad_enabled()
            self._first_tables = self._build_tables(self.nodes)

    @classmethod
    def on_sets(cls, call: Call, product: ProductLayout, values: Mapping[str, Any] | None, read: Callable[[], Sets]) -> ProductScorer:
        """Returns the scorer of a run on sets of all rows.

        The sets are read if the model may select all rows. Where it does not, the scorer is that of a plain run.
        """
        frames = [frame for site in product.layout.sites.values() for frame in site.frames]
        if not any(map(is_subsampled, frames)):
            sets = read()
            with contextlib.suppress(Exception):
                scorer = cls(call, product, values, sets)
                if not scorer.uncovered_latents and all(
                    scorer.population_rows[number] is None and torch.equal(scorer.insert_known_values(words, number), words)
                    for number, words in enumerate(sets)
                ):
                    return scorer
        return cls(call, product, values)

    def first_run(self, values: Mapping[str, Any]) -> poutine.Trace:
        """The run that says what the model selects, on any given sets."""
        if self.first_sets is None:
            return super().first_run(values)
        sizes = [group.layouts[0].full_sizes for group in self.product.groups]
        states = self._values(self.first_sets, sizes, self.product.dtypes)
        with pyro.validation_enabled(False):
            return self.run({**values, **states})

    def _refuse_shared_subsamples(self) -> None:
        graph = self.product.graph
        for component, root in zip(graph.components, self.product.roots, strict=True):
            own = self.product.node_layouts[root].plates
            for node in component:
                for plate in self.product.node_layouts[node].plates:
                    if plate not in own and is_subsampled(self._frames[plate]):
                        raise NotImplementedError(
                            f"the latents {list(graph.nodes[node].sites)} lie in the subsampled plate '{plate}', but share the latents "
                            f"{list(graph.nodes[root].sites)}, whose posterior needs all members of it. Take all of '{plate}'."
                        )

    # --- rows of the populations ---

    def plate_sizes(self, node: int) -> tuple[int, ...]:
        """Sizes of a node's plates in this run."""
        return tuple(int(self._frames[name].size) for name in self.product.node_layouts[node].plates)

    def plate_size(self, plate: str) -> int:
        """Size of a plate, subsampled or not."""
        frame = self._frames[plate]
        return int(frame.full_size or frame.size)

    @cached_property
    def population_rows(self) -> list[Tensor | None]:
        """By group, the rows that this run selects, ``None`` for all."""
        return [self._find_rows(group) for group in self.product.groups]

    def _find_rows(self, group: NodeGroup) -> Tensor | None:
        positions, is_whole = torch.zeros(1, dtype=torch.int64), True
        for name in group.plates:
            size = self.plate_size(name)
            every = torch.arange(size)
            members = torch.as_tensor(self.values[name]).cpu() if name in self.values else every
            is_whole &= members is every or torch.equal(members, every)
            positions = (positions.unsqueeze(-1) * size + members).flatten()
        if is_whole:
            return None
        offsets = torch.arange(len(group.nodes)) * group.layouts[0].num_data
        return (offsets.unsqueeze(-1) + positions).flatten().to(self.device)

    def num_rows(self, group: int) -> int:
        """How many rows of a group's population this run selects."""
        nodes = self.product.groups[group].nodes
        return len(nodes) * math.prod(self.plate_sizes(nodes[0]))

    def sum_by_data(self, node: int, rows: Tensor) -> Tensor:
        """Sums over a node's rows, for each member of shared plates."""
        beyond = [place for place, dim in enumerate(self.product.node_layouts[node].dims) if dim not in self.layout.dims]
        own = rows.reshape(self.plate_sizes(node))
        return own.sum(beyond) if beyond else own

    def split_nodes(self, rows: Tensor, group: int) -> list[Tensor]:
        """Rows of a group, cut into those of its nodes."""
        return list(rows.chunk(len(self.product.groups[group].nodes)))

    @torch.no_grad()
    def hidden_log_probs(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what masks hide of the sites' log probabilities."""
        if not self.masked_sites:
            return {}
        with pyro.validation_enabled(False):
            nodes = sample_nodes(self.run({**self.values, **states}))
        log_probs = self._log_probs([nodes[name] for name in self.masked_sites])
        pairs = zip(self.masked_sites, log_probs, strict=True)
        return {name: log_prob.masked_fill(torch.as_tensor(nodes[name]["mask"]), 0.0) for name, log_prob in pairs}

    # --- what is known, and what counts ---

    @cached_property
    def known_sets(self) -> list[list[KnownLevels | None]]:
        """What this call says of the states of each node, by group."""
        observed = {name: self.nodes[name]["value"] for name in self.observed_sites}
        return [
            [
                KnownLevels.from_run(layout, self.plate_sizes(node), observed, self.idle, self.device)
                for node, layout in zip(group.nodes, group.layouts, strict=True)
            ]
            for group in self.product.groups
        ]

    def insert_known_values(self, words: Tensor, group: int) -> Tensor:
        """Returns the states of a group with known values put in."""
        known_levels = self.known_sets[group]
        if all(levels is None for levels in known_levels):
            return words
        parts = self.split_nodes(words, group)
        return torch.cat([part if levels is None else levels.put_into(part) for part, levels in zip(parts, known_levels, strict=True)])

    def log_weights(self, words: Tensor, group: int) -> Tensor:
        """Returns log weights ``(rows, S)`` of a group's states."""
        weights = torch.zeros(words.shape[:2], dtype=torch.float64, device=self.device)
        for part, own, levels in zip(self.split_nodes(words, group), self.split_nodes(weights, group), self.known_sets[group], strict=True):
            if levels is not None:
                own.masked_fill_(levels.contradicts(part), IMPOSSIBLE)
        return weights

    # --- tables and sums ---

    def tables(self, sets: Sets) -> LogTables:
        """Returns the log density of each sample site as a table."""
        if (first := self._reuse_first_run(sets)) is not None:
            return first
        with pyro.validation_enabled(False):
            return self._build_tables(self.run_sets(sets))

    def _reuse_first_run(self, sets: Sets) -> LogTables | None:
        """Returns the first run's tables, once, if they are of these sets."""
        first_sets, tables = self.first_sets, self._first_tables
        if first_sets is None or tables is None or not all(map(torch.equal, first_sets, sets)):
            return None
        if torch.is_grad_enabled():
            self._first_tables = None
        return tables if self._has_graph or not torch.is_grad_enabled() else None

    def _values(self, sets: Sets, sizes: Sequence[tuple[int, ...]], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        values = {}
        for number, (words, own) in enumerate(zip(sets, sizes, strict=True)):
            values.update(self.product.values(number, words, own, dtypes))
        return values

    def run_sets(self, sets: Sets) -> dict[str, Any]:
        """The sample sites of a run on sets of the selected rows."""
        states = self._values(sets, [self.plate_sizes(group.nodes[0]) for group in self.product.groups], self.dtypes)
        try:
            with pyro.validation_enabled(False):
                return sample_nodes(self.run({**self.values, **states}))
        except Exception as error:
            error.add_note(
                "This happened when the model ran on sets of states, each in one of some dimensions left of its plates. It may be that "
                + other_structure("densities depend on other discrete latents")
            )
            raise

    def _build_tables(self, nodes: Mapping[str, Any]) -> LogTables:
        """The tables of a run, those of the same nodes added up."""
        names = self._factor_names(nodes)
        sums: dict[tuple[int, ...], Tensor] = {}
        dtypes: dict[tuple[int, ...], torch.dtype] = {}
        for (_, scope), table in self._site_tables(nodes, names):
            sums[scope] = sums[scope].double() + table if scope in sums else table
            dtypes[scope] = torch.promote_types(dtypes.get(scope, table.dtype), table.dtype)
        scopes = list(dict.fromkeys(scope for name in names for scope in self.product.scopes[name]))
        entries = torch.cat([sums[scope].flatten() for scope in scopes]).double()
        lowest, highest = entries.detach().aminmax()
        if not bool(highest < math.inf):
            self._refuse_infinite(self._site_tables(nodes, names))
        if bool(lowest < IMPOSSIBLE):
            entries = entries.clamp(min=IMPOSSIBLE)
        return LogTables(scopes, [sums[scope].shape for scope in scopes], entries, [dtypes[scope] for scope in scopes])

    def _factor_names(self, nodes: Mapping[str, Any]) -> list[str]:
        return [name for name in self.product.graph.factors if name in nodes and name not in self.uncovered_latents]

    def _site_tables(self, nodes: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[Factor, Tensor]]:
        """The tables of sample sites, which may hold NaN.

        Large ones come one by one, so that whoever adds them up needs no memory for all.
        """
        parts: list[list[str]] = [[]]
        for name in names:
            if count_entries(nodes[name]) <= MAX_STACKED:
                parts[0].append(name)
            else:
                parts.append([name])
        entries = self.product.graph.entries
        for part in parts:
            with pyro.validation_enabled(False):
                split = [with_entries(nodes[name], entries[name].event_dim) if name in entries else nodes[name] for name in part]
                log_probs = self._log_probs(split)
                tables = [self._tables(node, log_prob) for node, log_prob in zip(split, log_probs, strict=True)]
            del log_probs
            for name, own in zip(part, tables, strict=True):
                yield from zip(((name, scope) for scope in self.product.scopes[name]), own, strict=True)

    @staticmethod
    def _refuse_infinite(tables: Iterable[tuple[Factor, Tensor]]) -> None:
        name, table = next((name, table) for (name, _), table in tables if not bool((table < math.inf).all()))
        kind, number = "NaN" if bool(table.isnan().any()) else "+inf", int((~(table < math.inf)).sum())
        raise ValueError(
            f"the log density of site '{name}' is {kind} for {number} of {table.numel()} states. "
            "Check the model's parameters and data (missing values need a distribution that allows them)."
        )

    def _sum_inner(self, node: Any, table: Tensor, scope: tuple[int, ...], dims: Collection[int] = ()) -> Tensor:
        """Sums over plates of a site that no node lies in."""
        tree = self.product.tree
        inner = {frame.dim for frame in node["cond_indep_stack"] if frame.vectorized}.union(dims)
        inner = inner.difference(*(tree.plates[member] for member in scope))
        # Where all members of a plate have the same density it is held once.
        return once(table.sum(sorted(inner), keepdim=True) if inner else table, start=tree.num_dims - tree.depth)

    def _tables(self, node: Any, log_prob: Tensor) -> list[Tensor]:
        """A table for each part of a site's entries, or one."""
        name, tree, sites = node["name"], self.product.tree, self.product.layout.sites
        scopes, entries = self.product.scopes[name], self.product.graph.entries.get(name)
        is_summed_out = name in sites and not node["is_observed"] and name not in self.idle
        scale, mask = node["scale"] / self.evidence_scale(scopes[0][0]), None if is_summed_out else node["mask"]
        log_prob = weigh(log_prob, scale, mask, 0 if entries is None else entries.event_dim)
        if self.product.layout.sites_to_check:
            # What depends on an impossible value may be anything.
            log_prob = torch.where(log_prob.isnan(), -math.inf, log_prob)
        if entries is None:
            table = log_prob.reshape((1,) * (tree.num_dims - log_prob.dim()) + tuple(log_prob.shape))
            others = set(range(-tree.num_dims, -tree.depth)).difference(map(tree.dim, scopes[0]))
            if any(table.shape[dim] > 1 for dim in others):
                raise ValueError(other_structure(f"the sites ['{name}'] depend on other discrete latents"))
            return [self._sum_inner(node, table, scopes[0])]
        table = flatten(log_prob, entries.dims, entries.event_dim, tree.num_dims)
        plates = range(-tree.depth, 0)
        try:
            tables = list(entries.split(table, [(*map(tree.dim, scope), *plates) for scope in scopes]))
        except ValueError as error:
            raise ValueError(other_structure(f"the site '{name}' {error}")) from error
        looked_up = [dim for _, dim, _ in entries.plates]
        return [self._sum_inner(node, own, scope, looked_up) for own, scope in zip(tables, scopes, strict=True)]

    def _log_probs(self, nodes: Sequence[Any]) -> Sequence[Tensor]:
        layout = self.product.layout
        others = [node for node in nodes if node["name"] not in layout.sites_to_check]
        latents = [node for node in others if node["name"] in layout.sites and not node["is_observed"]]
        log_probs = {
            node["name"]: log_prob_on_support(node["fn"], node["value"]) for node in nodes if node["name"] in layout.sites_to_check
        }
        log_probs |= _log_densities_by_name(latents, lambda fn, value: exact_log_prob(fn, value, lambda: log_density(fn, value)))
        rest = [node for node in others if node["name"] not in log_probs]
        log_probs |= _log_densities_by_name(rest, lambda fn, value: without_impossible(fn, value, log_density(fn, value)))
        return [log_probs[node["name"]] for node in nodes]

    def evidence_scale(self, node: int) -> float | Tensor:
        """What the evidence of a node's component is scaled by."""
        scale: float | Tensor = self.nodes[self.product.graph.nodes[node].sites[0]]["scale"]
        return scale

    def weights(self, sets: Sets) -> dict[int, Tensor]:
        """Returns, by node, the log weights of its states."""
        log_weights, product = {}, self.product
        for number, (group, words) in enumerate(zip(product.groups, sets, strict=True)):
            if all(levels is None for levels in self.known_sets[number]):
                node = group.nodes[0]
                sizes = self.plate_sizes(node)
                none = torch.zeros((), dtype=torch.float64, device=words.device).expand(math.prod(sizes), words.shape[1])
                log_weights.update(dict.fromkeys(group.nodes, product.spread(node, none, sizes)))
                continue
            for node, rows in zip(group.nodes, self.split_nodes(self.log_weights(words, number), number), strict=True):
                log_weights[node] = product.spread(node, rows, self.plate_sizes(node))
        return log_weights

    @torch.no_grad()
    def messages(self, sets: Sets, *, maximum: bool = False) -> Messages:
        """The messages of a run of the model on the sets."""
        return Messages(self.product.tree, self.tables(sets), self.weights(sets), maximum=maximum)

    def evidence(self, messages: Messages) -> list[Tensor]:
        """Returns by component the log sum over its sets, ``(rows of its plates,)`` in float64."""
        evidence = []
        for root in self.product.roots:
            rows = self.product.rows(root, messages.evidence(root), self.plate_sizes(root)).squeeze(-1)
            evidence.append(rows.masked_fill(rows < IMPOSSIBLE / 2, -math.inf))
        return evidence

    def free_energy(self, sets: Sets) -> Tensor:
        """Returns the scaled free energy of all components, differentiable."""
        return self.free_energy_with_messages(self.tables(sets), self.weights(sets))[0]

    def free_energy_with_messages(
        self, tables: LogTables, weights: Mapping[int, Tensor], temperature: float = 1.0
    ) -> tuple[Tensor, Messages]:
        r"""Returns the scaled free energy at a temperature, :math:`\tau \mathcal F(\psi^{1/\tau})`, and its messages.

        Its gradient with respect to a table is the posterior of its states.
        """
        with torch.no_grad():
            hot = tables if temperature == 1.0 else dataclasses.replace(tables, entries=tables.entries / temperature)
            messages = Messages(self.product.tree, hot, weights)
            value = temperature * self.sum_evidence(self.evidence(messages))
            if not tables.entries.requires_grad:
                return value, messages
            gradient = messages.gradient()
            scales = [self.evidence_scale(scope[0]) for scope in tables.scopes]
            if any(scale is not scales[0] and bool(scale != scales[0]) for scale in scales):
                sizes = torch.tensor([shape.numel() for shape in tables.shapes], device=gradient.device)
                gradient = gradient * torch.stack([torch.as_tensor(scale) for scale in scales]).to(gradient).repeat_interleave(sizes)
            else:
                gradient = scales[0] * gradient
        return _GivenGradient.apply(tables.entries, value, gradient), messages  # type: ignore[no-untyped-call]

    def sum_evidence(self, evidence: Sequence[Tensor]) -> Tensor:
        """Returns the scaled sum of the evidence of all components."""
        return torch.stack([self.evidence_scale(root) * rows.sum() for root, rows in zip(self.product.roots, evidence, strict=True)]).sum()

    @torch.no_grad()
    def refuse_other_entries(self, seed: int) -> None:
        """Checks that parts of entries depend on no other latents now.

        Parameters may have hidden that before. Densities of random states of all nodes are compared with those of single runs.
        """
        if not self._agrees(seed):
            names = list(self.product.graph.entries)
            raise ValueError(other_structure(f"entries of the sites {names} depend on other discrete latents"))

    @torch.no_grad()
    def takes_sets(self, *, is_reduction_known: bool = False) -> bool:
        """Whether runs on random sets of states agree with single ones.

        Then the model takes many states at once. Parameters that are zero, as weights at first, do not tell. All members of a plate share
        a set if the product says so.
        """
        generator = torch.Generator().manual_seed(0)
        parameters = generic_parameters(self, self.product.graph.factors, generator)
        with contextlib.suppress(Exception), parameters:
            return (is_reduction_known or self._reduced_site(generator) is None) and self._agrees() and self._members_agree(generator)
        return False

    def _agrees(self, seed: int = 1) -> bool:
        generator = torch.Generator().manual_seed(seed)
        # Few rows may have states by chance that hide a difference.
        number = max(1, min(8, 128 // sum(map(self.num_rows, range(len(self.product.groups))))))
        return all(self._takes_random_sets(generator, [None] * min(4, number)) for _ in range(-(-number // 4)))

    def _members_agree(self, generator: torch.Generator) -> bool:
        """Whether entries depend on the steps and members that were found.

        Each member takes the first or the second state of its set by a bit of its position: any two differ in some bit. Of large programs
        these are the members that are looked up.
        """
        entries, groups = self.product.graph.entries, self.product.groups
        plates = {plate for own in entries.values() for plate, _, _ in own.plates}
        numbers = [self.num_rows(place) for place in range(len(groups))]
        sizes = [
            number // len(group.nodes)
            for group, number in zip(groups, numbers, strict=True)
            if sum(numbers) <= 128 or plates & {*group.plates}
        ]
        num_bits = max(bool(entries), (max(sizes, default=1) - 1).bit_length())
        return not num_bits or self._takes_random_sets(generator, list(itertools.product(range(num_bits), (0, 1))))

    def _takes_random_sets(self, generator: torch.Generator, patterns: Sequence[tuple[int, int] | None]) -> bool:
        """Whether a run on sets agrees with runs on single states.

        Which state a member takes is drawn, or said by a bit of its position, as it is or flipped.
        """
        product = self.product
        sets: list[Tensor] = []
        # Sets are as large as others only where they may be so in use, and no larger than they can be then.
        distinct = sorted({group.space.size for group in product.groups})
        for number, group in enumerate(product.groups):
            size = min(NUM_TRIED + distinct.index(group.space.size), group.space.size)
            words = group.space.distinguish(group.space.random((self.num_rows(number), size), 0.5, generator)).to(self.device)
            sets.append(words[:1].expand_as(words) if product.shares_sets else words)
        nodes = self.run_sets(sets)
        together = dict(self._site_tables(nodes, self._factor_names(nodes)))
        beyond = (node for node in density_nodes(nodes).values() if node["is_observed"] and not self.is_inside(node))
        takes_plates = all(len(node["fn"].batch_shape) <= product.layout.depth for node in beyond)
        return takes_plates and all(self._agrees_with_single_run(together, sets, self._choose(sets, one, generator)) for one in patterns)

    def _choose(self, sets: Sets, pattern: tuple[int, int] | None, generator: torch.Generator) -> list[Tensor]:
        chosen = []
        for group, words in zip(self.product.groups, sets, strict=True):
            if pattern is None:
                chosen.append(torch.randint(words.shape[1], (len(words),), generator=generator))
            else:
                members = torch.arange(len(words)) % (len(words) // len(group.nodes))
                chosen.append((members >> pattern[0] & 1 ^ pattern[1]).clamp(max=words.shape[1] - 1))
        return chosen

    def _reduced_site(self, generator: torch.Generator) -> str | None:
        """Returns a site that depends on several states of a set."""
        number = recognisable_size(self.nodes)
        if number is None:
            return None
        # Tables of all colours at once would be larger than those in use.
        most, colours = max(1, min(NUM_TRIED, int(math.log(DENSITY_LIMIT, number)))), self.product.graph.num_colours
        parts = (range(first, min(first + most, colours)) for first in range(0, colours, most))
        return next(filter(None, (self._reduced_site_among(part, number, generator) for part in parts)), None)

    def _reduced_site_among(self, colours: range, number: int, generator: torch.Generator) -> str | None:
        """The reduced site, where nodes of these colours alone have several states."""
        product = self.product
        sets: list[Tensor] = []
        chosen: list[int] = []
        for place, group in enumerate(product.groups):
            has_set = product.graph.colours[group.nodes[0]] in colours
            sets.append(group.space.random((self.num_rows(place), number if has_set else 1), 0.5, generator).to(self.device))
            chosen += group.nodes if has_set else ()
        values = self._values(sets, [self.plate_sizes(group.nodes[0]) for group in product.groups], self.dtypes)
        in_plates: dict[str, list[Tensor]] = defaultdict(list)
        for node in map(product.graph.nodes.__getitem__, chosen):
            for plate, _, _ in node.plates:
                in_plates[plate] += (values[site] for site in node.sites)
        own = [values[site] for node in chosen for site in product.graph.nodes[node].sites]
        dimensions = [(number, own), *((int(self._frames[plate].size), inner) for plate, inner in in_plates.items())]
        operations = Operations(dimensions)
        with pyro.validation_enabled(False), operations:
            nodes = sample_nodes(self.run({**self.values, **values}))
        return next(filter(None, (operations.reduced_site(nodes, place) for place in range(len(dimensions)))), None)

    def _agrees_with_single_run(self, together: Mapping[Factor, Tensor], sets: Sets, chosen: Sequence[Tensor]) -> bool:
        """Whether tables agree with a run of one state of each set.

        States are chosen by their positions.
        """
        product = self.product
        levels: dict[str, Tensor] = {}
        places: dict[int, Tensor] = {}
        for number, (group, words) in enumerate(zip(product.groups, sets, strict=True)):
            positions = self.split_nodes(chosen[number].unsqueeze(-1).to(self.device), number)
            for node, own, index in zip(group.nodes, self.split_nodes(words, number), positions, strict=True):
                places[node] = product.spread(node, index, self.plate_sizes(node))
                single = own.gather(1, index.unsqueeze(-1).expand(-1, -1, own.shape[-1])).squeeze(1)
                levels |= product.node_layouts[node].site_values(group.space.unpack(single), self.plate_sizes(node), self.dtypes)
        with pyro.validation_enabled(False):
            names = list(dict.fromkeys(name for name, _ in together))
            singly = dict(self._site_tables(sample_nodes(self.run({**self.values, **levels})), names))
        return all(self._agree(factor, table, singly[factor], places) for factor, table in together.items())

    def _agree(self, factor: Factor, table: Tensor, expected: Tensor, places: Mapping[int, Tensor]) -> bool:
        # One state, without dimensions, adapts to the type of other tensors; sets do not.
        dtypes, tree = (table.dtype, expected.dtype, coarsest_dtype(self.nodes[factor[0]])), self.product.tree
        for node in factor[1]:
            if table.shape[tree.dim(node)] > 1:
                table = torch.take_along_dim(table, places[node], dim=tree.dim(node))
        # What is NaN, the scores tell.
        table, expected = (own.double().nan_to_num(nan=IMPOSSIBLE).clamp(min=IMPOSSIBLE) for own in (table, expected))
        return bool(((table - expected).abs() <= rounding_tolerance(expected, *dtypes)).all())


@contextlib.contextmanager
def generic_parameters(scorer: Probe, names: Iterable[str], generator: torch.Generator) -> Iterator[None]:
    """Moves the parameters of some sites' densities a little, for a while."""
    # Those that are zero or equal hide what densities depend on.
    names = list(names)
    with torch.enable_grad():
        log_probs = _log_probs(scorer, names)
    tensors = [leaf.data for leaf in _leaves(log_probs)]
    values = snapshot(tensors)
    try:
        for tensor, value in zip(tensors, values, strict=True):
            noise = torch.randn(value.shape, generator=generator).to(value)
            size = torch.where(value == 0, value.abs().mean().clamp(min=1e-3), value.abs())
            tensor.add_(0.1 * size * noise)
        try:
            moved = _log_probs(scorer, names)
        except Exception:  # whatever a program raises, as by an assertion
            moved = []
        # Some parameters, such as raw covariances, are none any more.
        if [bool(one.isnan().any()) for one in moved] != [bool(one.isnan().any()) for one in log_probs]:
            load_snapshot(tensors, values)
        yield
    finally:
        load_snapshot(tensors, values)


def _log_probs(scorer: Probe, names: Iterable[str]) -> list[Tensor]:
    with pyro.validation_enabled(False), spare_random_numbers():
        nodes = sample_nodes(scorer.run(scorer.values))
        return [
            node["fn"].log_prob(node["value"], *node["args"], **node["kwargs"]) for node in (nodes[name] for name in names if name in nodes)
        ]


def _leaves(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that tensors are computed from.

    Those are left out whose elements have no places of their own, as expanded ones.
    """
    leaves: dict[int, Tensor] = {}
    functions, seen = [tensor.grad_fn for tensor in tensors], set[Any]()
    while functions:
        function: Any = functions.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if (variable := getattr(function, "variable", None)) is not None:
            leaves[id(variable)] = variable
        functions += [after for after, _ in function.next_functions]
    dense = [leaf for leaf in leaves.values() if leaf.layout == torch.strided]
    return [leaf for leaf in dense if all(stride or size < 2 for size, stride in zip(leaf.shape, leaf.stride(), strict=True))]
