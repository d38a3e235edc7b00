"""What is known of states.

Known are latents that a call of the model observes, and entries that masks switch off.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.ops import find_duplicates, gather_states
from pyro_truncated.program.layout import Layout, SiteLayout
from pyro_truncated.program.sites import density_nodes, recorded_names, unwrap


@dataclasses.dataclass(frozen=True)
class KnownLevels:
    """Levels that some latents of some data points must have."""

    layout: SiteLayout  # the sites
    levels: Tensor  # (N, 1, L) int64, -1 where nothing is known

    @classmethod
    def from_run(
        cls, layout: SiteLayout, sizes: Sequence[int], observed: Mapping[str, Tensor], idle: Mapping[str, Tensor], device: Any
    ) -> KnownLevels | None:
        """What is known in a run, ``None`` if nothing is."""
        if not any(name in observed or name in idle for name in layout.sites):
            return None
        parts = []
        for name, site in layout.sites.items():
            levels = torch.full((math.prod(sizes), site.num_latents), -1, device=device)
            if name in observed:
                levels = layout.encode_site(name, observed[name], sizes)
            elif name in idle:
                off = idle[name].reshape(idle[name].shape + (1,) * site.event_dim)
                levels = torch.where(layout.expand_to_rows(name, off, sizes).reshape(levels.shape), 0, levels)
            parts.append(levels)
        return cls(layout, torch.cat(parts, -1).unsqueeze(1))

    def contradicts(self, words: Tensor) -> Tensor:
        """Which of the states ``(N, C, num_words)`` have other levels, ``(N, C)``."""
        return ((self.layout.space.unpack(words).long() != self.levels) & (self.levels >= 0)).any(-1)

    def put_into(self, words: Tensor) -> Tensor:
        """Returns states ``(N, S, num_words)`` with the levels put in.

        They are distinct: those that would repeat others stay as they are.
        """
        space = self.layout.space
        replacement = space.pack(torch.where(self.levels >= 0, self.levels, space.unpack(words).long()))
        # States that have the levels already count as the first of their kind: they repeat none of each other.
        order = self.contradicts(words).byte().argsort(dim=-1, stable=True)
        repeats = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order, find_duplicates(gather_states(replacement, order)))
        return torch.where(repeats.unsqueeze(-1), words, replacement)


def find_idle(nodes: Mapping[str, Any], masks: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Returns, by discrete site, the entries that masks switch off.

    Sites are left out where such entries change another density: missing entries and ends of sequences do not.
    """
    idle: dict[str, Tensor] = {}
    densities = density_nodes(nodes)
    for name in reversed(list(masks)):
        if name not in layout.idle_sites:
            continue
        off = ~masks[name]
        # What Pyro observes of a site by `obs_mask` takes the place of what it does not.
        base = name.removesuffix("_unobserved")
        twin = nodes.get(f"{base}_observed") if base in recorded_names(nodes) else None
        rest = off if twin is None or twin["mask"] is None else off & ~torch.as_tensor(twin["mask"])
        plates = {frame.name for frame in nodes[name]["cond_indep_stack"]}
        readers = [densities[reader] for reader in layout.readers[name] if reader in densities]
        if not any(_counts(node, rest, plates, layout, idle) for node in readers):
            idle[name] = off
    return idle


def _counts(node: Any, off: Tensor, plates: set[str], layout: Layout, idle: Mapping[str, Tensor]) -> bool:
    """Whether a density counts where a site is off."""
    name = node["name"]
    is_summed_out = name in layout.sites and not node["is_observed"] and name not in idle
    if is_summed_out or name in layout.varying_masks:
        return bool(off.any())
    fn, on = node["fn"], torch.ones((), dtype=torch.bool, device=off.device)
    for mask, event_dim in [(node["mask"], fn.event_dim), *unwrap(fn)[1]]:
        if mask is not None:
            mask = torch.as_tensor(mask, device=off.device)
            inner = min(fn.event_dim - event_dim, mask.dim())
            on = on & (mask.flatten(-inner).any(-1) if inner else mask)
    if plates <= {frame.name for frame in node["cond_indep_stack"]}:
        # Members of other plates than those of the data may depend on each other, as on the step before.
        for frame in node["cond_indep_stack"]:
            if frame.vectorized and frame.name not in layout.plates:
                off, on = (mask.any(frame.dim, keepdim=True) if mask.dim() >= -frame.dim else mask for mask in (off, on))
        return bool((off & on).any())
    return bool(off.any()) and bool(on.any())
