"""learn and what the best start has to spare: it is tried elsewhere, even if nobody comes after the start that has just ended."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.ops.indexing import Vindex
from torch import Tensor

from pyro_truncated.multistart.solution import FreeEnergyEstimate
from tests.multistart.scripted import ended_with_states, scripted_restarts, train_best

CENTRES = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
# All where no data are; one for two clusters, and one for none.
ENDS = torch.tensor([[[60.0, 60.0], [61.0, 59.0], [59.0, 61.0]], [[0.0, 0.0], [5.0, 5.0], [60.0, 60.0]]])


def mixture(y: Tensor) -> None:
    loc = pyro.param("loc", lambda: torch.randn(3, 2))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.ones(3) / 3))
        pyro.sample("y", dist.Normal(Vindex(loc)[z], 1.0).to_event(1), obs=y)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("order", [[0, 1], [1, 0], [1, 1]])
def test_a_component_that_explains_nothing_is_tried_elsewhere_whichever_start_comes_last(order):
    pyro.set_rng_seed(0)
    y = CENTRES.repeat_interleave(40, 0) + torch.randn(120, 2)
    ends = iter(ENDS[order])

    def start(profile, *args):
        pyro.get_param_store()["loc"] = next(ends).clone()
        return ended_with_states(profile, FreeEnergyEstimate(-1000.0))

    found = scripted_restarts(mixture, y, start, max_restarts=2)
    train_best(found, mixture, y)
    assert float(torch.cdist(CENTRES, pyro.param("loc").detach()).amin(1).max()) < 1.0
