"""States to start from, when nothing is known about the data."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend
from pyro_truncated.ops.fields import Fields, enumerate_states, single_states
from pyro_truncated.ops.streams import Source, draw_seed, positions
from pyro_truncated.ops.values import unpack

_SMALL_SPACE = 4096


def initial_states(fields: Fields, num_data: int, num_states: int, generator: Source = None, *, rows: Tensor | None = None) -> Tensor:
    """Distinct states to start from, different for each data point, on the CPU.

    See :func:`pyro_truncated.states.population.initial_population`, which moves the result to a device, for which states they are.

    Args:
        fields: where the latents lie.
        num_data: number of data points ``N``.
        num_states: number of states per data point ``S``.
        generator: source of randomness.
        rows: positions ``(N,)`` of the data points among all data; default: ``0 .. N - 1``.

    Returns:
        Packed states ``(N, S, W)``.

    Raises:
        ValueError: if there are fewer than ``num_states`` states.
    """
    if not 1 <= num_states <= fields.size:
        raise ValueError(f"num_states must be at least 1 and at most the number of states in the space, {fields.size}; got {num_states}")
    keys = positions(rows, num_data, torch.device("cpu")), draw_seed(generator)
    _, _, singletons = single_states(fields)
    others = singletons[:0]
    if fields.size <= max(_SMALL_SPACE, 4 * num_states):
        everything = enumerate_states(fields, "cpu")
        others = everything[(unpack(everything, fields, torch.int64) != 0).sum(-1) > 1]
    return backend("initial", singletons).initial_states(singletons, others, fields, num_states, *keys)  # type: ignore[no-any-return]
