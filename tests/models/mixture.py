"""Exact EM for mixtures: populations that hold every component."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_truncated.states import Population, StateSpace


def log_joint(model: Any, y: Tensor) -> Tensor:
    """``log p(z, y_n)`` of every component and data point, ``(N, K)``, by running the Pyro model."""
    pyro.clear_param_store()
    values = torch.arange(model.num_components).unsqueeze(-1).expand(-1, len(y))
    trace = poutine.trace(poutine.condition(model, data={"z": values})).get_trace(y)
    trace.compute_log_prob()
    return (trace.nodes["z"]["log_prob"] + trace.nodes["y"]["log_prob"]).mT


def full_population(model: Any, y: Tensor) -> Population:
    """The population of all components, so the truncated posterior is the exact one."""
    space = StateSpace([model.num_components])
    with torch.no_grad():
        return Population(space, space.enumerate().expand(len(y), -1, -1), log_joint(model, y))


def truncated_population(model: Any, y: Tensor, chosen: Tensor) -> Population:
    """The population of the chosen components ``(N, S)``."""
    everything = full_population(model, y)
    words = everything.words.gather(1, chosen.unsqueeze(-1))
    return Population(everything.space, words, everything.log_joint.gather(1, chosen))


def free_energies(model: Any, y: Tensor, num_iterations: int, chosen: Tensor | None = None) -> list[float]:
    """The free energy before each of the iterations of EM, exact or on fixed components, and after the last."""
    values = []
    for _ in range(num_iterations):
        population = full_population(model, y) if chosen is None else truncated_population(model, y, chosen)
        values.append(objective(model, population))
        model.maximize(model.sufficient_statistics(population, y))
    population = full_population(model, y) if chosen is None else truncated_population(model, y, chosen)
    return [*values, objective(model, population)]


@torch.no_grad()
def objective(model: Any, population: Population) -> float:
    """What training raises: the free energy, with the log prior of the covariances of Gaussians."""
    prior = float(model.log_prior()) if hasattr(model, "log_prior") else 0.0
    return float(population.free_energy().sum()) + prior


def sparse_pairs(num_pairs: int, num_observed: int, dtype: torch.dtype) -> Tensor:
    """Pairs of data points ``(K, 2, D)``, most entries zero: single precision underflows on the way to their covariances' eigenvalues."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-3, 4, (num_pairs, 2, num_observed), generator=generator) * torch.rand(num_pairs, 1, 1, generator=generator)
    return (values * (torch.rand(values.shape, generator=generator) < 0.2)).to(dtype)
