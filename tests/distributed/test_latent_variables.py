"""Spike-and-slab latent variable models on minibatches of several processes: the bounds and parameters of one."""

from __future__ import annotations

import pyro
import pytest
import torch

from pyro_truncated import SpikeSlabMRD, distributed
from pyro_truncated.gplvm import fit_minibatches, initialize


def trained(missing: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    pyro.clear_param_store()
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(17, 2, generator=generator).double()
    views = [factors @ torch.randn(2, size, generator=generator).double() for size in (4, 3)]
    views = [view + 0.1 * torch.randn(view.shape, generator=generator).double() for view in views]
    if missing:
        views[0][::5, 1] = torch.nan
    pyro.set_rng_seed(1)
    model = SpikeSlabMRD(17, (4, 3), 2, num_inducing=5, collapsed=False)
    initialize(model, views)
    # What the others have is of no account: the first one's parameters and draws are those of all.
    pyro.set_rng_seed(2 + distributed.rank())
    # A minibatch of two leaves some processes without any data point.
    bounds = fit_minibatches(model, [distributed.shard(view) for view in views], 6, batch_size=2 if missing else 9)
    return bounds, {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("missing", [False, True])
def test_minibatches_are_those_of_one_process(missing, crew):
    bounds, state = trained(missing)
    for number in (2, 3):
        ranks = crew.results(number, trained, missing)
        for found, held in ranks:
            assert found == pytest.approx(bounds, rel=1e-10)
            for name, value in state.items():
                torch.testing.assert_close(held[name], value, rtol=1e-7, atol=1e-8)
                assert torch.equal(held[name], ranks[0][1][name])
