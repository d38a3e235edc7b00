"""Guides beside others on several processes: each takes its data, and an equal share of what belongs to none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, EvolutionarySearch, Truncated_ELBO, distributed, fit
from pyro_truncated.distributed import OtherProcessError
from tests.distributed.test_together import data


def rows_with_weights(y: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    with pyro.plate("features", y.shape[1]):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3).double(), 1.0).to_event(1))
    prior = pyro.sample("prior", dist.Beta(torch.ones(3).double(), 3.0).to_event(1))
    with pyro.plate("data", len(y)):
        loudness = 1.0 if scale is None else pyro.sample("loudness", dist.LogNormal(scale, 1.0)).unsqueeze(-1)
        s = pyro.sample("s", dist.Bernoulli(prior).to_event(1))
        pyro.sample("y", dist.Normal(loudness * (weight * s.unsqueeze(-2)).sum(-1), 0.5).to_event(1), obs=y)


def list_of_guides() -> SVI:
    pyro.clear_param_store()
    pyro.set_rng_seed(4)
    guide = AutoGuideList(rows_with_weights)
    guide.append(AutoNormal(pyro.poutine.block(rows_with_weights, hide=["s"])))
    guide.append(AutoTruncated(rows_with_weights, num_states=4))
    driver = distributed.AllReduced(Adam({"lr": 0.05}))
    return SVI(rows_with_weights, guide, driver, Truncated_ELBO(EvolutionarySearch(3, 2)))


def mixed_guides() -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    y = distributed.shard(data(17))
    svi = list_of_guides()
    losses = [svi.step(y) for _ in range(4)] + [svi.evaluate_loss(y) for _ in range(2)]
    return losses, {name: value.detach() for name, value in pyro.get_param_store().items()}, svi.guide[1].words


def test_guides_beside_others_are_trained_as_by_one_process(crew):
    losses, parameters, words = mixed_guides()
    # Draws differ from loss to loss.
    assert len(set(losses)) == len(losses)
    for number in (2, 3):
        ranks = crew.results(number, mixed_guides)
        for found, held, _ in ranks:
            assert found == pytest.approx(losses, rel=1e-12)
            for name, value in parameters.items():
                torch.testing.assert_close(held[name], value, rtol=1e-9, atol=1e-9)
                assert torch.equal(held[name], ranks[0][1][name])
        assert torch.equal(torch.cat([own for *_, own in ranks]), words)


def beside_local_draws() -> float:
    y = distributed.shard(data(17))
    return list_of_guides().step(y, torch.zeros(()).double())


def test_guides_that_draw_for_every_data_point_are_refused(crew):
    for found in crew.run(2, beside_local_draws):
        assert isinstance(found, (NotImplementedError, OtherProcessError))
        assert "other guides sample ['loudness_unconstrained', 'loudness'] for each data point" in str(found)


def fitted(folder: str | None, steps: int) -> tuple[list[float], torch.Tensor]:
    y, svi = distributed.shard(data(17)), list_of_guides()
    training = fit(svi, y, steps=steps, checkpoint=None if folder is None else Path(folder) / "run.pt", progress=False)
    return training.record["free_energy"], svi.guide[1].words


def test_guides_beside_others_go_on_with_any_number_of_processes(crew, tmp_path):
    expected, words = fitted(None, 5)
    crew.results(3, fitted, str(tmp_path / "saved"), 2)
    for number in (1, 2):
        folder = str(shutil.copytree(tmp_path / "saved", tmp_path / str(number)))
        found = [fitted(folder, 5)] if number == 1 else crew.results(number, fitted, folder, 5)
        assert all(record == pytest.approx(expected, rel=1e-12) for record, _ in found)
        assert torch.equal(torch.cat([own for _, own in found]), words)


def with_parameters_of_its_own(folder: str) -> None:
    y, svi = distributed.shard(data(17)), list_of_guides()
    svi.optim.local = frozenset(["loudness"])
    fit(svi, y, steps=1, checkpoint=Path(folder) / "run.pt", progress=False)


def test_parameters_that_are_left_to_every_process_are_not_lost(crew, tmp_path):
    for found in crew.run(2, with_parameters_of_its_own, str(tmp_path)):
        assert isinstance(found, (NotImplementedError, OtherProcessError))
        assert "do not hold parameters that are left to every process, ['loudness']" in str(found)


def with_an_earlier_optimizer(folder: str) -> list[torch.Tensor]:
    """A parameter that one run leaves to every process, and then of a run that shares it while the first optimiser is still there."""

    def model(y: torch.Tensor) -> None:
        level = pyro.param("level", lambda: torch.tensor([1.0 + distributed.rank()]).double())
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((9,), 0.3).double()).to_event(1))
            pyro.sample("y", dist.Normal(level * s, 0.5).to_event(1), obs=y)

    y, found = distributed.shard(data(17)), []
    optimizers = [distributed.AllReduced(Adam({"lr": 0.05}), local=local) for local in (["level"], [])]
    for optimizer in optimizers:
        pyro.clear_param_store()
        svi = SVI(model, AutoTruncated(model, num_states=4), optimizer, Truncated_ELBO(EvolutionarySearch(3, 2)))
        fit(svi, y, steps=2, checkpoint=None if optimizer.local else Path(folder) / "run.pt", progress=False)
        found.append(pyro.param("level").detach().clone())
    return found


def test_an_optimizer_of_an_earlier_run_leaves_nothing_to_every_process(crew, tmp_path):
    (own, shared), (other, same) = crew.results(2, with_an_earlier_optimizer, str(tmp_path))
    assert not torch.equal(own, other)
    assert torch.equal(shared, same)
