"""Dictionaries and means of whole numbers: densities and other parameters are no whole numbers for that."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_truncated import AutoTruncated, Truncated_ELBO
from pyro_truncated.distributions import (
    ComponentNormal,
    LinearSuperposition,
    MaximumSuperposition,
    PoissonMaximum,
    SpikeSlabSuperposition,
)

STATES, WEIGHT, Y = torch.tensor([[1, 0, 1], [0, 1, 1]]), torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 2], [3, 4]])


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: LinearSuperposition(STATES, weight, 1.5),
        lambda weight: MaximumSuperposition(STATES, weight, torch.tensor(1.5)),
        lambda weight: PoissonMaximum(STATES, weight, 0.5),
        lambda weight: SpikeSlabSuperposition(STATES, weight, 0.5, 0.5, 1.5),
        lambda weight: ComponentNormal(torch.tensor([0, 1]), weight.mT, torch.full((3, 2), 1.5)),
    ],
)
@pytest.mark.parametrize("kind", [torch.int64, torch.uint8])
def test_densities_of_whole_numbers(make, kind):
    for value in (Y, Y.float()):
        torch.testing.assert_close(make(WEIGHT.to(kind)).log_prob(value), make(WEIGHT.float()).log_prob(value.float()))


def test_a_normal_likelihood_of_whole_numbers_is_the_normal_density():
    found = LinearSuperposition(STATES, WEIGHT, 1.5).log_prob(Y)
    torch.testing.assert_close(found, dist.Normal(STATES.float() @ WEIGHT.float().mT, 1.5).log_prob(Y).sum(-1))


def test_losses_of_programs_with_whole_dictionaries():
    def loss(weight):
        def model(y):
            with pyro.plate("data", len(y)):
                s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.3)).to_event(1))
                pyro.sample("y", LinearSuperposition(s, weight, 1.5), obs=y)

        return Truncated_ELBO().loss(model, AutoTruncated(model, num_states=8), Y.float())

    assert loss(WEIGHT) == pytest.approx(loss(WEIGHT.float()))
