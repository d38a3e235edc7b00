"""The populations of a guide on a product of sets.

There is one store for each group of nodes of the factor graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.distributed.shards import Portion
from pyro_truncated.guide.data_fingerprint import SeenData
from pyro_truncated.guide.given_states import Init, given_levels
from pyro_truncated.guide.store import PopulationStore, populations_in
from pyro_truncated.ops import Stream, mix_bits
from pyro_truncated.program.chain_scorer import ChainLayout
from pyro_truncated.program.product_layout import ProductLayout
from pyro_truncated.states.population import Population


class ProductStore(torch.nn.Module):
    r"""The sets of states of all nodes and their log joints.

    A row's log joints are :math:`\log q_v(s)`, to which the row of a component's root adds the evidence of the component. So the
    weights of a row are the marginal of its node, and the free energies of all rows add up to that of the guide.

    Attributes:
        num_states: states per node that are asked for. Small spaces have fewer.
        groups: the populations of each group, a row for each node and member of its plates.
        seen: the observed values that the populations belong to.
        portion: which of all data points these are, where other processes have the rest.
        first_position: position of the first of them among those of all processes.
        is_part: whether other processes hold the populations of other data points.
        is_given: whether the sets begin with states that were given.
    """

    def __init__(self, num_states: int, num_groups: int, folder: Path | None = None) -> None:
        super().__init__()
        self.num_states = num_states
        folders = (None if folder is None else folder / f"group-{number}" for number in range(num_groups))
        self.groups = torch.nn.ModuleList(populations_in(own, num_states) for own in folders)
        self.seen = SeenData()
        self.portion: Portion | None = None
        self.first_position, self.is_part, self.is_given = 0, False, False

    @property
    def stores(self) -> list[PopulationStore]:
        """The stores of the groups."""
        return list(self.groups)  # type: ignore[arg-type]

    def seed_(self, seed: int | None = None) -> None:
        """Gives groups without a seed one."""
        first, *others = self.stores
        first.seed = seed if first.seed is None else first.seed
        first.seed_()
        assert first.seed is not None
        for number, store in enumerate(others, 1):
            store.seed = mix_bits(first.seed, number) if store.seed is None else store.seed

    @property
    def seed(self) -> int | None:
        """The seed of the first group's random numbers."""
        return self.stores[0].seed

    @seed.setter
    def seed(self, seed: int | None) -> None:
        self.stores[0].seed = seed

    def stream(self, number: int) -> Stream:
        """The seeds of the first group's search of that number."""
        return self.stores[0].stream(number)

    def start_(self, product: ProductLayout | ChainLayout, init: Init, device: torch.device, portion: Portion | None) -> None:
        """Creates the populations, or checks those that have been loaded."""
        if len(self.groups) != len(product.groups):
            raise ValueError(f"the state must have {len(product.groups)} groups of nodes, as the model; got {len(self.groups)}")
        if portion is not None:
            self.portion, self.first_position, self.is_part = portion, portion.first, True
            self.seed_()
        first_words: Sequence[Tensor | None] = [None] * len(self.groups)
        if init is not None and not all(store.is_filled for store in self.stores):
            self.is_given = True
            num_states = self.num_states if isinstance(product, ProductLayout) else min(self.num_states, product.groups[0].space.size)
            first_words = product.pack(given_levels(product.layout, init, num_states))
        groups: Sequence[Any] = product.groups
        for number, (store, group) in enumerate(zip(self.stores, groups, strict=True)):
            store.num_states = min(store.num_states, group.space.size)
            own = None if portion is None else portion.times(product.count_inner(number))
            store.start_(group, first_words[number], device, own)

    def store_(self, populations: list[Population]) -> None:
        """Keeps populations with their log joints."""
        for store, population in zip(self.stores, populations, strict=True):
            store.store_(population.log_joint, population.indices, population.words)

    def mismatch(self, state_dict: Mapping[str, Any], prefix: str = "") -> str | None:
        """Why populations that were saved do not fit here."""
        number = count_saved_groups(state_dict, prefix)
        if number != len(self.groups):
            return f"the saved populations are of {number} groups of nodes, this guide has {len(self.groups)}"
        problems = (store.mismatch(state_dict, f"{prefix}groups.{place}.") for place, store in enumerate(self.stores))
        return next((problem for problem in problems if problem is not None), None)


def count_saved_groups(state_dict: Mapping[str, Tensor], prefix: str) -> int:
    """Counts groups of nodes in a state dict, zero for whole states."""
    start = f"{prefix}groups."
    return len({name.removeprefix(start).split(".")[0] for name in state_dict if name.startswith(start)})
