"""EM with Gibbs sampling on several processes: the draws of one process, and so its losses and parameters."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyro
import pytest
import torch
from pyro.infer import SVI

from pyro_truncated import ClosedForm, GibbsEM, GibbsGuide, GPSelect, Preselection, distributed, fit
from pyro_truncated.datasets import linear_bars
from pyro_truncated.models import MaxSpikeSlabSparseCoding
from pyro_truncated.search import Singletons


def made(learns: bool) -> tuple[SVI, torch.Tensor]:
    pyro.clear_param_store()
    # Whatever the process has drawn before; what others are seeded with does not count.
    pyro.set_rng_seed(distributed.rank())
    y = linear_bars(21, 3, mean_active=2.0, generator=torch.Generator().manual_seed(0)).data.double().clamp(min=0.1)
    y[::4, 2] = torch.nan
    y = distributed.shard(y)
    model = MaxSpikeSlabSparseCoding(9, 6, dtype=torch.float64).initialize(y)
    search = GPSelect(3, rank=5, fit_steps=3) if learns else Preselection(Singletons(), 3)
    return SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(search, sweeps=2, burn_in=1)), y


def sampled(batch_size: int | None, learns: bool) -> tuple[list[float], float, torch.Tensor, torch.Tensor]:
    svi, y = made(learns)
    losses = [svi.step(y)]
    # A minibatch of two leaves some processes without any data point.
    svi.loss.__self__.batch_size = batch_size
    losses += [svi.step(y) for _ in range(4)]
    return losses, svi.evaluate_loss(y), svi.model.weight.detach(), svi.guide.marginals()


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


def fitted(folder: str | None, steps: int) -> tuple[list[float], torch.Tensor]:
    svi, y = made(learns=False)
    training = fit(svi, y, steps=steps, checkpoint=None if folder is None else Path(folder) / "run.pt", progress=False)
    return training.record["free_energy"], svi.guide.marginals()


def test_chains_go_on_with_any_number_of_processes(crew, tmp_path):
    expected, marginals = fitted(None, 5)
    crew.results(3, fitted, str(tmp_path / "saved"), 2)
    for number in (1, 2):
        folder = str(shutil.copytree(tmp_path / "saved", tmp_path / str(number)))
        found = [fitted(folder, 5)] if number == 1 else crew.results(number, fitted, folder, 5)
        assert all(record == pytest.approx(expected, rel=1e-12) for record, _ in found)
        torch.testing.assert_close(torch.cat([own for _, own in found]), marginals, rtol=1e-9, atol=1e-9)
