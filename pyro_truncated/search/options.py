"""What a preselection chooses from: pairs of a latent and a value."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from pyro_truncated.ops.fields import single_states
from pyro_truncated.states.space import StateSpace


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a preselection: pairs of latent and value, with their states.

    Of binary latents these are the latents. Of latents with more values they are every non-zero value of every
    latent, in this order. A single latent per data point (the class of a mixture) has no value for "nothing", so all
    its values are options.

    Attributes:
        latent: the latent of each option, ``(P,)`` int64.
        value: its value, ``(P,)`` int64.
        group: options of one group exclude each other in a selection, ``(P,)`` int64, numbered from 0 in order. They
            are those of one latent, or each on its own for a mixture.
        words: the packed state with this latent at this value and all others at zero, ``(P, num_words)``.
        num_groups: number of options that can be selected together.
    """

    latent: Tensor
    value: Tensor
    group: Tensor
    words: Tensor
    num_groups: int

    def __len__(self) -> int:
        return len(self.latent)


@functools.lru_cache(maxsize=16)
def options_of(space: StateSpace, device: torch.device | str = "cpu") -> Options:
    """The options of a state space, brought to a device once."""
    is_mixture = space.num_latents == 1
    latent, value, words = single_states(space.fields, first=0 if is_mixture else 1)
    group = torch.arange(len(latent), device="cpu") if is_mixture else latent.unique_consecutive(return_inverse=True)[1]
    num_groups = int(group[-1]) + 1 if len(group) else 0
    return Options(latent.to(device), value.to(device), group.to(device), words.to(device), num_groups)
