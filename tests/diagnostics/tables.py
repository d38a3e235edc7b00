"""Models whose log joints are a table, so that everything about their posteriors is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_truncated import AutoTruncated


def table_model(table: Tensor, num_latents: int, cardinality: int = 2) -> Callable[[], None]:
    """Log joints ``(N, cardinality^H)``, the first latent varying fastest: a uniform prior, and an observation that makes up for it."""
    powers = cardinality ** torch.arange(num_latents)
    likelihood = table + math.log(table.shape[1])

    def model() -> None:
        with pyro.plate("data", len(table)):
            probs = torch.full((cardinality,), 1 / cardinality, dtype=table.dtype)
            s = pyro.sample("s", dist.Categorical(probs).expand([num_latents]).to_event(1))
            density = likelihood[torch.arange(len(table)), (s.long() * powers).sum(-1)]
            pyro.sample("y", dist.Delta(torch.zeros_like(density), density), obs=torch.zeros_like(table[:, 0]))

    return model


def table_guide(table: Tensor, population: Tensor, num_latents: int, cardinality: int = 2) -> AutoTruncated:
    """A guide with the states of the table's positions ``(N, S)``."""
    init = population.unsqueeze(-1) // cardinality ** torch.arange(num_latents) % cardinality
    return AutoTruncated(table_model(table, num_latents, cardinality), population.shape[1], init=init)
