"""EM with Gibbs sampling on several processes: the draws of one process, and so its losses and parameters."""

from __future__ import annotations

import pyro
import pytest
import torch
from pyro.infer import SVI

from pyro_truncated import ClosedForm, GibbsEM, GibbsGuide, GPSelect, Preselection, distributed
from pyro_truncated.datasets import linear_bars
from pyro_truncated.models import MaxSpikeSlabSparseCoding
from pyro_truncated.search import Singletons


def sampled(batch_size: int | None, learns: bool) -> tuple[list[float], float, torch.Tensor, torch.Tensor]:
    pyro.clear_param_store()
    # Whatever the process has drawn before; what others are seeded with does not count.
    pyro.set_rng_seed(distributed.rank())
    y = linear_bars(21, 3, mean_active=2.0, generator=torch.Generator().manual_seed(0)).data.double().clamp(min=0.1)
    y[::4, 2] = torch.nan
    y = distributed.shard(y)
    model = MaxSpikeSlabSparseCoding(9, 6, dtype=torch.float64).initialize(y)
    search = GPSelect(3, rank=5, fit_steps=3) if learns else Preselection(Singletons(), 3)
    guide, elbo = GibbsGuide(model), GibbsEM(search, sweeps=2, burn_in=1)
    svi = SVI(model, guide, ClosedForm(model), elbo)
    losses = [svi.step(y)]
    # A minibatch of two leaves some processes without any data point.
    elbo.batch_size = batch_size
    losses += [svi.step(y) for _ in range(4)]
    return losses, svi.evaluate_loss(y), model.weight.detach(), guide.marginals()


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "learns"), [(None, False), (2, False), (7, True)])
def test_gibbs_sampling_is_that_of_one_process(batch_size, learns, crew):
    losses, last, weight, marginals = sampled(batch_size, learns)
    for number in (2, 3):
        found = crew.results(number, sampled, batch_size, learns)
        for own, own_last, own_weight, _ in found:
            assert own == pytest.approx(losses, rel=1e-12)
            assert own_last == pytest.approx(last, rel=1e-12)
            torch.testing.assert_close(own_weight, weight, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(torch.cat([own for *_, own in found]), marginals, rtol=1e-9, atol=1e-9)
