"""What is known of states.

Known are latents that a call of the model observes, and entries that masks switch off.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyro
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_truncated.ops import find_duplicates, gather_states
from pyro_truncated.program.call import Call
from pyro_truncated.program.layout import Layout, SiteLayout
from pyro_truncated.program.sites import family, sample_nodes
from pyro_truncated.utils.parameter_store import spare_random_numbers


@dataclasses.dataclass(frozen=True)
class KnownLevels:
    """Levels that some latents of some data points must have.

    Attributes:
        layout: the sites.
        levels: ``(N, 1, L)`` int64, -1 where nothing is known.
    """

    layout: SiteLayout
    levels: Tensor

    @classmethod
    def from_run(
        cls, layout: SiteLayout, sizes: Sequence[int], observed: Mapping[str, Tensor], idle: Mapping[str, Tensor], device: Any
    ) -> KnownLevels | None:
        """What is known in a run, ``None`` if nothing is.

        Args:
            layout: the sites.
            sizes: sizes of the data plates in the run.
            observed: values of sites that the run observes, in the shapes of the model's sites.
            idle: by site, which entries of its batch count for nothing: they take the lowest level.
            device: where the states are.
        """
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


def find_idle(call: Call, trace: Any, layout: Layout) -> frozenset[str]:
    """Returns the discrete sites that are idle where masked.

    Their entries change no other density where masks switch them off: missing entries, ends of sequences.

    Args:
        call: the model and its arguments.
        trace: a run of it.
        layout: its discrete sites.
    """
    nodes = sample_nodes(trace)
    names = {name for name in layout.sites if nodes[name]["mask"] is not None}
    if not names:
        return frozenset()
    values = {name: node["value"] for name, node in nodes.items() if not node["is_observed"] and family(node["fn"]) != "Delta"}
    values |= {name: node["value"] for name, node in trace.nodes.items() if node["type"] == "sample" and site_is_subsample(node)}
    alternative = dict(values)
    for name in names:
        site, node = layout.sites[name], nodes[name]
        try:
            levels = site.to_levels(node["value"])
        except ValueError:
            # A draw of a count beyond its bound.
            levels = torch.zeros(node["value"].shape, dtype=torch.int64, device=node["value"].device)
        other = (levels + 1) % torch.tensor(max(site.cardinalities))
        mask = torch.as_tensor(node["mask"]).expand(node["fn"].batch_shape)
        mask = mask.reshape(mask.shape + (1,) * site.event_dim)
        alternative[name] = torch.where(mask, node["value"], site.to_values(other, node["value"].dtype))
    with torch.no_grad(), spare_random_numbers(), pyro.validation_enabled(False):
        before, after = (sample_nodes(call.run(setting)) for setting in (values, alternative))
        is_same = before.keys() == after.keys() and all(torch.equal(_density(before[name]), _density(after[name])) for name in before)
    return frozenset(names) if is_same else frozenset()


def _density(node: Any) -> Tensor:
    density: Any = scale_and_mask(node["fn"].log_prob(node["value"], *node["args"], **node["kwargs"]), node["scale"], node["mask"])
    return torch.as_tensor(density)
