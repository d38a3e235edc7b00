"""Means and variances of a model's observations, from one run.

The run has candidate states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor

from pyro_truncated.program.probe import Probe
from pyro_truncated.states.population import Moments


def run_moments(nodes: Mapping[str, Any], probe: Probe, words: Tensor, rows: slice) -> Moments | None:
    """Returns moments of some data points in a run, or ``None``.

    States are ``(N, C, num_words)``. ``None`` means that moments do not determine how likely
    observations are.

    They do if a data point is a row of one plate and everything observed inside it is known and
    neither masked nor scaled by itself. Its distributions must have finite means and positive
    variances, of the observations' shape up to dimensions of one.
    """
    if probe.layout.dims != (-1,) or probe.depth != 1:
        return None
    parts = [_site_moments(nodes[name], value, probe, words, rows) for name, value in probe.observations(nodes).items()]
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    mean, variance = (torch.cat(values, -1) for values in zip(*known, strict=True))
    if rows.step not in (None, 1):
        # Lest parts of a tensor keep all of it in memory.
        mean, variance = mean.clone(), variance.clone()
    is_known = mean.isfinite() & variance.isfinite() & (variance > 0)
    return Moments(words[rows].transpose(0, 1).flatten(0, 1), mean, variance) if bool(is_known.all()) else None


def _site_moments(node: Mapping[str, Any], value: Tensor, probe: Probe, words: Tensor, rows: slice) -> tuple[Tensor, Tensor] | None:
    is_alone = len(node["cond_indep_stack"]) == 1 and len(value) == probe.num_data
    if not is_alone or node["mask"] is not None or bool((torch.as_tensor(node["scale"]) != torch.as_tensor(probe.scale)).any()):
        return None
    fn = node["fn"]
    if _is_masked(fn) or value.is_complex() or bool(value.isnan().any()):
        return None
    try:
        moments = fn.mean, fn.variance
    except Exception:  # of a distribution of the user: whatever it is, the model can be scored without
        return None
    shape = words.shape[1], *value.shape
    if not all(isinstance(moment, Tensor) and _fits(moment, shape) for moment in moments):
        return None
    mean, variance = (moment.detach().expand(shape)[:, rows].reshape(-1, math.prod(value.shape[1:])) for moment in moments)
    return mean, variance


def _fits(moment: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether it can be expanded to the shape."""
    sizes = zip(reversed(moment.shape), reversed(shape), strict=False)
    return not moment.is_complex() and moment.dim() <= len(shape) and all(own in (1, size) for own, size in sizes)


def _is_masked(fn: Any) -> bool:
    """Whether there is a mask inside a distribution."""
    return fn is not None and (isinstance(fn, MaskedDistribution) or _is_masked(getattr(fn, "base_dist", None)))
