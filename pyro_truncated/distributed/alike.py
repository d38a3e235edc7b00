"""Equal parameters on all processes before their first step."""

from __future__ import annotations

from typing import Any

import pyro
import torch

from pyro_truncated.distributed import world
from pyro_truncated.distributed.all_reduced import local_names
from pyro_truncated.distributed.rows_in_states import rows_of
from pyro_truncated.distributed.shards import draw_alike


@torch.no_grad()
def start_as_first(model: Any, guide: Any, search: Any) -> None:
    """Broadcasts parameters, buffers, search and random state of the first process.

    Parameters that :class:`AllReduced` leaves to every process stay as they are.

    Args:
        model: a model.
        guide: its guide.
        search: has ``state_dict`` and ``load_state_dict``.
    """
    held = dict(pyro.get_param_store().named_parameters())
    modules = {name: part for name, part in (("model", model), ("guide", guide)) if isinstance(part, torch.nn.Module)}
    for name, module in modules.items():
        held |= {f"{name}.{key}": value for key, value in module.named_parameters()}
    if "model" in modules:
        held |= {f"model.{key}": value for key, value in model.named_buffers()}
    left = {id(tensor) for name, tensor in held.items() if name in local_names()}
    tensors = [tensor for _, tensor in sorted(held.items()) if id(tensor) not in left]
    for tensor, value in zip(tensors, world.agree([tensor.detach() for tensor in tensors]), strict=True):
        tensor.copy_(value)
    learned = search.state_dict()
    # What was learned from shards was learned together: it is alike, but for what each process keeps of its data points.
    if not all(world.gather(bool(rows_of(learned)))):
        search.load_state_dict(world.agree(learned))
    draw_alike(None)
