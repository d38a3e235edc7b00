"""Slow, obvious references: brute-force enumeration of a model's discrete states, one at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import pyro.poutine as poutine
import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor


def log_joint_table(
    model: Callable, args: Sequence, sites: Mapping[str, Sequence[Tensor]], num_data: int, plate: str = "data", dim: int | None = -1
) -> tuple[Tensor, list[tuple]]:
    """Log joint ``(T, N)`` of every combination of site values, each set for all data points at once.

    ``sites`` lists the values (of one data point, shaped as the site with a data dimension of size one) of every discrete site.
    """
    rows, states = [], []
    for combination in itertools.product(*sites.values()):
        values = dict(zip(sites, combination, strict=True))
        trace = poutine.trace(poutine.condition(model, data=values)).get_trace(*args)
        total = torch.zeros(num_data, dtype=torch.float64)
        for node in trace.nodes.values():
            if node["type"] != "sample" or type(node["fn"]).__name__ == "_Subsample":
                continue
            if plate not in {frame.name for frame in node["cond_indep_stack"]}:
                continue
            # Latents that are summed out have a distribution whether masked or not.
            mask = None if node["name"] in sites else node["mask"]
            log_prob = scale_and_mask(node["fn"].log_prob(node["value"]), mask=mask)
            if dim is None:  # every batch dimension holds data
                total = total + log_prob.flatten()
                continue
            data_last = log_prob.movedim(dim, -1) if log_prob.dim() > 1 else log_prob
            total = total + data_last.reshape(-1, data_last.shape[-1]).sum(0)
        rows.append(total)
        states.append(combination)
    return torch.stack(rows), states


def binary_states(num_latents: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """All binary vectors, each with a leading data dimension of size one."""
    return [torch.tensor([bits], dtype=dtype) for bits in itertools.product((0.0, 1.0), repeat=num_latents)]
