"""Training runs that any number of processes do alike: what they return is compared with what one process returns."""

from __future__ import annotations

import dataclasses
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO, distributed
from pyro_truncated.search import ConditionalSearch
from tests.models.configurations import CONFIGURATIONS


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a model of the table.

    Attributes:
        model: its name there.
        missing: whether entries are missing.
        minibatch: ``None`` for all data, else how minibatches are streamed.
        num_data: number of data points.
        steps: steps of training.
        driver: ``"closed form"``, or ``"gradient"`` for Adam.
        mutation: that of the evolutionary search.
        size: data points per minibatch.
        block: successive ones that stay together.
    """

    model: str
    missing: bool = False
    minibatch: str | None = None
    num_data: int = 13
    steps: int = 6
    driver: str = "closed form"
    mutation: str = "randflips"
    size: int = 5
    block: int = 2

    def search(self) -> Any:
        space = CONFIGURATIONS[self.model].space()
        if not space.is_binary:
            return ConditionalSearch()
        return EvolutionarySearch(parents=2, children=2, generations=2, crossover=True, mutation=self.mutation)

    def losses(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        """The loss of every step, and the parameters after the last."""
        pyro.clear_param_store()
        # Whatever the process has drawn before.
        pyro.set_rng_seed(5)
        row = CONFIGURATIONS[self.model]
        y = distributed.shard(row.generate(self.num_data, with_missing=self.missing))
        model = row.make(torch.float64).initialize(y)
        driver = ClosedForm(model, minibatch=self.minibatch) if self.driver == "closed form" else distributed.AllReduced(Adam({"lr": 0.02}))
        size = min(4, row.space().size - 1)
        svi = SVI(model, AutoTruncated(model, num_states=size), driver, Truncated_ELBO(self.search()))
        batches = distributed.Batches(y, self.size, block=self.block) if self.minibatch else None
        losses = []
        for step in range(self.steps):
            if batches is None:
                losses.append(svi.step(y))
            else:
                with batches.at(step):
                    losses.append(svi.step(y))
        return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def losses(run: Run) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What :meth:`Run.losses` returns."""
    return run.losses()
