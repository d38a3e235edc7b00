"""Finds which entries of an observed site depend on which latents.

Latents are changed one by one in a run of the model, and members of their plates by the bits of their positions, in logarithmically many
runs. What does not depend on a latent does not change with it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor

from pyro_truncated.ops.elimination import IMPOSSIBLE
from pyro_truncated.program.densities import coarsest_dtype
from pyro_truncated.program.entries import Entries, count_event_dims, flatten, with_entries
from pyro_truncated.program.generic_parameters import generic_parameters
from pyro_truncated.program.layout import SiteLayout
from pyro_truncated.program.product_scorer import ProductScorer
from pyro_truncated.program.sites import is_subsampled
from pyro_truncated.utils.arrays import rounding_tolerance

# Densities of one site on states of all its nodes up to which its entries are told apart.
MOST_ENTRIES = 2**26


class Pattern(NamedTuple):
    """Which entries of one latent change, to see what depends on them.

    Attributes:
        site: the latent.
        bit: number of a bit of the members' positions, ``None`` for all members.
        is_set: whether members with the bit change, or those without.
    """

    site: str
    bit: int | None = None
    is_set: bool = True

    def choose(self, size: int) -> Tensor:
        """Which members of a plate change, ``(size,)``."""
        every = torch.arange(size)
        return every >= 0 if self.bit is None else ((every >> self.bit) & 1 == 1) == self.is_set


def find_entries(scorer: ProductScorer, scopes: Mapping[str, frozenset[str]]) -> dict[str, Entries]:
    """Returns what the entries of observed sites depend on.

    Sites are left out where all entries depend on the same latents.

    Args:
        scorer: of a graph in which these sites join latents to nodes.
        scopes: by sample site, the latents that its density depends on.
    """
    found = {}
    for name in scorer.product.graph.mixing:
        with contextlib.suppress(RuntimeError, IndexError, ValueError):
            search = _EntrySearch(scorer, name, scopes[name] & scorer.product.layout.sites.keys())
            if (entries := search.find()) is not None:
                found[name] = entries
    return found


class _EntrySearch:
    """The search for the parts of one site's entries."""

    def __init__(self, scorer: ProductScorer, name: str, scope: frozenset[str]) -> None:
        self._scorer, self._name, self._node = scorer, name, scorer.nodes[name]
        self._sites = [site for site in scorer.layout.sites if site in scope]
        frames = [frame for frame in self._node["cond_indep_stack"] if frame.vectorized]
        latent_frames = {frame.name: frame for site in self._sites for frame in scorer.layout.sites[site].frames if frame.vectorized}
        self._is_subsampled = any(is_subsampled(frame) for frame in frames if frame.name not in latent_frames)
        self._dims = tuple(sorted(frame.dim for frame in frames if frame.name not in latent_frames))
        self._event_dim = count_event_dims(self._node["fn"])
        own = {frame.name for frame in frames}
        self._plates = {(f.name, f.dim, f.size) for f in latent_frames.values() if f.name not in own}

    def find(self) -> Entries | None:
        """Returns the entries; ``None`` where they cannot be told apart."""
        scorer, scales = self._scorer, [self._scorer.nodes[site]["scale"] for site in self._sites]
        has_one_scale = all(scale is scales[0] or bool(torch.as_tensor(scale == scales[0]).all()) for scale in scales)
        if self._is_subsampled or len(self._plates) > 1 or not has_one_scale or (not self._dims and not self._event_dim):
            return None
        patterns = [pattern for site in self._sites for pattern in self._patterns(site)]
        # From sixteen random states at least.
        number = max(1, -(-16 // max(1, scorer.num_data)))
        if len(patterns) * number * self._node["fn"].shape().numel() > 4 * MOST_ENTRIES:
            return None
        generator = torch.Generator().manual_seed(0)
        with generic_parameters(scorer, [self._name], generator), torch.no_grad(), pyro.validation_enabled(False):
            changes = torch.stack([self._changes(patterns, generator) for _ in range(number)]).any(0)
        return self._read(patterns, changes)

    def _patterns(self, site: str) -> list[Pattern]:
        names = {frame.name for frame in self._scorer.layout.sites[site].frames if frame.vectorized}
        sizes = [size for name, _, size in self._plates if name in names]
        if not sizes:
            return [Pattern(site)]
        bits = range(max(1, math.ceil(math.log2(sizes[0]))))
        return [Pattern(site, bit, is_set) for bit in bits for is_set in (True, False)]

    def _changes(self, patterns: Sequence[Pattern], generator: torch.Generator) -> Tensor:
        """Which entries change with which patterns, from random states, ``(R, E)``."""
        scorer, product = self._scorer, self._scorer.product
        base = [group.space.random((scorer.num_rows(place), 1), 0.5, generator) for place, group in enumerate(product.groups)]
        changes: dict[Pattern, Tensor] = {}
        for node in product.graph.factors[self._name]:
            own = [pattern for pattern in patterns if pattern.site in product.graph.nodes[node].sites]
            size = max(1, MOST_ENTRIES // 4 // max(1, self._node["fn"].shape().numel()))
            for start in range(0, len(own), size):
                part = own[start : start + size]
                changes |= dict(zip(part, self._changes_with(node, part, base, generator), strict=True))
        return torch.stack([changes[pattern] for pattern in patterns])

    def _changes_with(self, node: int, patterns: Sequence[Pattern], base: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        """The same for patterns of the sites of one node."""
        scorer, product = self._scorer, self._scorer.product
        number, position = product.place[node]
        group, layout = product.groups[number], product.node_layouts[node]
        sets = list(base)
        parts = [rows.expand(-1, 1 + len(patterns), -1).clone() for rows in scorer.split_nodes(base[number], number)]
        levels = group.space.unpack(parts[position], torch.int64)
        cardinalities = torch.tensor(group.space.cardinalities)
        shifts = 1 + torch.randint(2**31, levels[:, 0].shape, generator=generator) % (cardinalities - 1).clamp(min=1)
        others = (levels[:, 0] + shifts) % cardinalities
        for row, pattern in enumerate(patterns, 1):
            own, is_changed = self._positions(layout, pattern)
            levels[:, row, own] = torch.where(is_changed, others[:, own], levels[:, row, own])
        parts[position] = group.space.pack(levels)
        sets[number] = torch.cat(parts)
        table = self._densities(scorer.run_sets([words.to(scorer.device) for words in sets]))
        table = table.movedim(product.tree.dim(node) - 1, 0).nan_to_num(nan=IMPOSSIBLE, neginf=IMPOSSIBLE)
        is_other = (table[1:] - table[:1]).abs() > rounding_tolerance(table, table.dtype, coarsest_dtype(self._node))
        if len(is_other) != len(patterns):
            return torch.zeros(len(patterns), table.shape[-1], dtype=torch.bool)
        return is_other.reshape(len(patterns), -1, is_other.shape[-1]).any(1).cpu()

    def _positions(self, layout: SiteLayout, pattern: Pattern) -> tuple[slice, Tensor]:
        """Where the latents of a pattern's site are, and which change."""
        start = 0
        for name, site in layout.sites.items():
            if name == pattern.site:
                break
            start += site.num_latents
        is_changed = torch.ones(site.shape, dtype=torch.bool)
        if pattern.bit is not None:
            ((_, dim, size),) = self._plates
            place = [own for own, _ in site.plates].index(dim)
            is_changed &= pattern.choose(size).view(*(-1 if at == place else 1 for at in range(len(site.shape))))
        return slice(start, start + site.num_latents), is_changed.flatten()

    def _densities(self, nodes: Mapping[str, Any]) -> Tensor:
        node = with_entries(nodes[self._name], self._event_dim)
        log_prob = node["fn"].log_prob(node["value"], *node["args"], **node["kwargs"])
        return flatten(log_prob, self._dims, self._event_dim, self._scorer.product.tree.num_dims)

    def _read(self, patterns: Sequence[Pattern], changes: Tensor) -> Entries | None:
        """Returns the parts of the entries, from what has changed them.

        It is ``None`` if some depend on several members of a plate, if nothing depends on one of the latents, or if all are alike.
        """
        depends = torch.zeros(len(self._sites), changes.shape[1], dtype=torch.bool)
        member = torch.full((changes.shape[1],), -1)
        for number, site in enumerate(self._sites):
            own = [row for row, pattern in enumerate(patterns) if pattern.site == site]
            depends[number] = changes[own].any(0)
            if patterns[own[0]].bit is None:
                continue
            # One member has each bit or has it not.
            is_set, is_unset = changes[own[0::2]], changes[own[1::2]]
            position = (is_set.long() << torch.arange(len(is_set)).unsqueeze(-1)).sum(0)
            is_single = ((is_set ^ is_unset) == depends[number]).all(0) & ~(is_set & is_unset).any(0)
            if not bool(is_single.all()) or bool((depends[number] & (member >= 0) & (member != position)).any()):
                return None
            member = torch.where(depends[number], position, member)
        kinds, part = depends.unique(dim=1, return_inverse=True)
        if not bool(depends.any(1).all()) or (len(kinds.T) == 1 and not self._plates):
            return None
        # Entries that no latent changes may go with any others.
        is_kept = kinds.any(0)
        part = (is_kept.cumsum(0) - 1).clamp(min=0)[part]
        scopes = [frozenset(site for site, is_own in zip(self._sites, kind, strict=True) if is_own) for kind in kinds.T[is_kept].tolist()]
        plate = next(iter(self._plates), None)
        return Entries(tuple(scopes), part, self._dims, self._event_dim, plate, member.clamp(min=0), ~depends.any(0))
