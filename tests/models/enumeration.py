"""Exact EM by enumeration for the models with binary causes: populations that hold every state."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_truncated.states import Population, StateSpace


def log_joint(model: Any, y: Tensor, states: Tensor) -> Tensor:
    """``log p(s, y_n)`` of states ``(T, H)`` under every data point, ``(N, T)``, by running the Pyro model."""
    # Pyro's parameter store goes by names, and a test may hold several models.
    pyro.clear_param_store()
    values = states.unsqueeze(1).expand(-1, len(y), -1)
    trace = poutine.trace(poutine.condition(model, data={"s": values})).get_trace(y)
    trace.compute_log_prob()
    return (trace.nodes["s"]["log_prob"] + trace.nodes["y"]["log_prob"]).mT


def generate(model: Any, num_data: int, with_missing: bool = False) -> Tensor:
    """Data drawn from the model, on request with 30 % of the entries and one whole data point missing."""
    pyro.clear_param_store()
    with torch.no_grad():
        y: Tensor = model(num_data=num_data)
    if with_missing:
        y[torch.rand(y.shape) < 0.3] = torch.nan
        y[3] = torch.nan
    pyro.clear_param_store()
    return y


def full_population(model: Any, y: Tensor) -> Population:
    """The population of all states, so the truncated posterior is the exact one."""
    space = StateSpace([2] * model.num_latents)
    words = space.enumerate()
    with torch.no_grad():
        scores = log_joint(model, y, space.unpack(words, y.dtype))
    return Population(space, words.expand(len(y), -1, -1), scores)


def free_energies(model: Any, y: Tensor, num_iterations: int, observe: Callable[[], None] = lambda: None) -> list[float]:
    """The free energy before each of the iterations of exact EM, and after the last."""
    values = []
    for _ in range(num_iterations):
        population = full_population(model, y)
        values.append(population.free_energy().sum().item())
        model.maximize(model.sufficient_statistics(population, y))
        observe()
    return [*values, full_population(model, y).free_energy().sum().item()]


def assert_never_falls(values: list[float]) -> None:
    """Monotone up to 1e-8 of the magnitude."""
    for before, after in itertools.pairwise(values):
        assert after >= before - 1e-8 * abs(before), f"the free energy fell from {before} to {after}"


def expected_log_joint(model: Any, y: Tensor, population: Population) -> Tensor:
    """``Q``: the expected log joint under fixed posteriors, differentiable in the model's parameters."""
    states = population.states(y.dtype)[0]
    return (population.weights() * log_joint(model, y, states)).nan_to_num(nan=0.0).sum()
