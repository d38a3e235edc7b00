"""What models with independent binary causes have in common: their data, the truncated posterior of a batch, and the prior's M-step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_truncated.program.call import Call
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.states import Population
from pyro_truncated.utils.counts import check_count

PRIOR_FLOOR = 1e-6


def check_sizes(**sizes: int) -> None:
    """Checks the sizes of a model, given by name.

    Raises:
        ValueError: naming one that is no positive integer.
    """
    for name, size in sizes.items():
        check_count(name, size)


def check_data(y: Tensor, num_observed: int) -> Tensor:
    """Returns the data if they have shape ``(N, num_observed)``.

    Raises:
        ValueError: if they do not.
    """
    if y.dim() != 2 or y.shape[1] != num_observed or not len(y):
        raise ValueError(f"y must have shape (N, {num_observed}) with N > 0, one row per data point; got {tuple(y.shape)}")
    return y


def rows_of(y: Tensor, population: Population) -> Tensor:
    """The population's data points among all data ``y``."""
    return y if population.indices is None else y[population.indices.to(y.device)]


@torch.no_grad()
def scored(model: Callable[..., Any], population: Population, y: Tensor) -> Population:
    """The population, with the data points that have never been scored scored under the model of the data ``y`` as it is now."""
    rows = population.log_joint.isnan().any(-1).nonzero().squeeze(-1)
    if not len(rows):
        return population
    call = Call(model, (y,))
    with poutine.block():
        layout = Layout(call.trace())
    positions = rows if population.indices is None else population.indices[rows]
    log_joint = LogJoint(call, layout, values={layout.plates[0]: positions})
    scores = population.log_joint.clone()
    scores[rows] = log_joint.score(population.words[rows]).to(scores)
    return dataclasses.replace(population, log_joint=scores)


def random_rows(y: Tensor, num_rows: int, generator: torch.Generator | None) -> Tensor:
    """``num_rows`` randomly chosen data points, without repetition if there are as many; missing entries become their dimension's mean."""
    device = None if generator is None else generator.device
    order = torch.randperm(len(y), generator=generator, device=device).to(y.device)
    rows = y[order.repeat(-(-num_rows // len(y)))[:num_rows]]
    return torch.where(rows.isnan(), y.nanmean(0).nan_to_num(), rows)


def perturbed_rows(y: Tensor, num_rows: int, deviation: Tensor, generator: torch.Generator | None) -> Tensor:
    """:func:`random_rows`, with noise of a hundredth of the ``deviation`` that tells equal ones apart."""
    rows = random_rows(y, num_rows, generator)
    noise = torch.randn(rows.shape, generator=generator, device=None if generator is None else generator.device).to(y.device)
    return rows + 0.01 * deviation * noise.to(rows)


def first_prior(num_latents: int, is_shared: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Probabilities to start from, a scalar or ``(H,)``: two active latents on average."""
    return torch.full(() if is_shared else (num_latents,), min(0.5, 2 / num_latents), dtype=dtype)


def best_prior(active: Tensor, num_data: Tensor, is_shared: bool) -> Tensor:
    r"""Maximiser :math:`\pi_h = \frac1N \sum_n \langle s_h \rangle` of the expected log prior, or its mean over the latents if shared."""
    frequency = active / num_data
    frequency = frequency.mean() if is_shared else frequency
    return frequency.clamp(PRIOR_FLOOR, 1 - PRIOR_FLOOR)
