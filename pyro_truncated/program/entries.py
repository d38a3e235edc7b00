"""Which entries of an observed site depend on which discrete latents.

Entries are those of its event, and the members of plates that hold none of the latents. Each may depend on few of them: on one step of a
sequence that is stacked, or on the one member of a plate that an index looks up. Then every part of the entries is a factor of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_truncated.ops.elimination import IMPOSSIBLE
from pyro_truncated.utils.arrays import rounding_tolerance


@dataclasses.dataclass(frozen=True)
class Entries:
    """The entries of a site's density, in parts."""

    scopes: tuple[frozenset[str], ...]  # by part, the latents that its entries depend on
    part: Tensor  # by entry, the number of its part, (E,)
    dims: tuple[int, ...]  # dimensions of the plates whose members are entries, from left to right
    event_dim: int  # number of event dimensions, whose positions are entries
    # A plate of latents of which each entry looks up one member, with dimension and size; None if
    # there is none.
    plate: tuple[str, int, int] | None
    member: Tensor  # by entry, that member, (E,); zeros if there is none
    is_constant: Tensor  # by entry, whether no latent changed it when the model was first seen, (E,)

    @property
    def plates(self) -> set[tuple[str, int, int]]:
        """The plate that is looked up, if any."""
        return set() if self.plate is None else {self.plate}

    @property
    def num_members(self) -> int:
        """The size of that plate, or one."""
        return 1 if self.plate is None else self.plate[2]

    def split(self, table: Tensor, dims: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Yields the table of each part, of log densities ``(*dimensions of a table, E)``.

        ``dims`` are, by part, the dimensions (negative) that states of its latents lie in; its entries are the same along all others.
        """
        if table.shape[-1] != len(self.part):
            raise ValueError(f"had {len(self.part)} entries, and now has {table.shape[-1]}")
        if bool(self.is_constant.any()):
            # To which member of a plate entries belong that depend on latents only now is not known.
            rest = table.detach()[..., self.is_constant.to(table.device)].flatten(0, -2).nan_to_num(nan=IMPOSSIBLE, neginf=IMPOSSIBLE)
            if bool(((rest - rest[:1]).abs() > rounding_tolerance(rest[:1])).any()):
                raise ValueError("has entries that depend on other latents than they did")
        tables: dict[int, Tensor] = {}
        kinds: dict[tuple[int, ...], list[int]] = {}
        for number, own in enumerate(dims):
            kinds.setdefault(tuple(own), []).append(number)
        depth = table.dim() - 1
        for own, numbers in kinds.items():
            narrow = table
            for dim in range(-depth, 0):
                if dim not in own:
                    narrow = narrow.narrow(dim - 1, 0, 1)
            place = torch.full((len(self.scopes),), -1)
            place[numbers] = torch.arange(len(numbers))
            chosen = (place[self.part] >= 0).nonzero().flatten()
            index = place[self.part[chosen]] * self.num_members + self.member[chosen]
            empty = narrow.new_zeros(*narrow.shape[:-1], len(numbers) * self.num_members)
            sums = empty.index_add(-1, index.to(table.device), narrow[..., chosen.to(table.device)])
            for number, part in zip(numbers, sums.unflatten(-1, (len(numbers), self.num_members)).unbind(-2), strict=True):
                tables[number] = part.squeeze(-1) if self.plate is None else part.transpose(self.plate[1] - 1, -1).squeeze(-1)
        for number in range(len(self.scopes)):
            yield tables[number]


def with_entries(node: Any, event_dim: int) -> dict[str, Any]:
    """A sample site without event dimensions: its density is by entry."""
    fn, number = node["fn"], event_dim
    while number:
        number, fn = number - fn.reinterpreted_batch_ndims, fn.base_dist
    return {**node, "fn": fn}


def weigh(log_prob: Tensor, scale: Any, mask: Any, event_dim: int) -> Tensor:
    """The log densities of entries, scaled and masked as their site."""
    if event_dim:
        scale, mask = (
            part.reshape(*part.shape, *(1,) * event_dim) if isinstance(part, Tensor) and part.dim() else part for part in (scale, mask)
        )
    weighed: Tensor = scale_and_mask(log_prob, scale, mask)
    return weighed


def flatten(log_prob: Tensor, dims: Sequence[int], event_dim: int, num_dims: int) -> Tensor:
    """Returns log densities ``(..., *plates, *event)`` by entry, ``(*dimensions of a table, E)``."""
    table = log_prob.reshape((1,) * (num_dims + event_dim - log_prob.dim()) + tuple(log_prob.shape))
    places = [*(dim - event_dim for dim in dims), *range(-event_dim, 0)]
    if not places:
        return table.unsqueeze(-1)
    table = table.movedim(places, list(range(-len(places), 0))).flatten(-len(places))
    for dim in sorted(dims, reverse=True):
        table = table.unsqueeze(dim - 1)
    return table
