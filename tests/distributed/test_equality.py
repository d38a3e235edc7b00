"""So many processes, the same numbers: free energies and parameters of every model with a closed form, and of gradient M-steps."""

from __future__ import annotations

import pyro
import pytest
import torch
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, ClosedForm, Truncated_ELBO, distributed
from pyro_truncated.distributions.maximum import FamilyMaximum
from tests.distributed.runs import Run, losses
from tests.models.configurations import CLOSED_FORM, CONFIGURATIONS

SHORT = [
    *(Run(name, missing=row.takes_missing) for name, row in CONFIGURATIONS.items() if row.is_closed_form and "-" not in name),
    *(Run(name, num_data=40) for name in CLOSED_FORM if name.endswith(("-offset", "-full", "-tied", "-leak"))),
    *(Run(name, missing=True) for name in CLOSED_FORM if name.startswith("ExponentialFamily")),
    Run("BinarySparseCoding-offset", missing=True, minibatch="incremental", steps=9),
    Run("GaussianMixture-diag", minibatch="incremental", num_data=40, steps=9),
    Run("MaximalCauses", missing=True, minibatch="online", steps=9),
    Run("NoisyOr", minibatch="online", steps=9),
    Run("SpikeSlabSparseCoding-offset", missing=True, minibatch="online", steps=9),
    Run("SpikeSlabSparseCoding-full", minibatch="online", steps=9),
    Run("SpikeSlabSparseCoding-full-offset", num_data=2010, steps=3),
    Run("ExponentialFamilyMaximalCauses-poisson", minibatch="online", steps=9),
    Run("ExponentialFamilyMaximalCauses-bernoulli", missing=True, minibatch="online", steps=9),
    Run("ExponentialFamilyMaximalCauses-gamma", missing=True, minibatch="online", steps=9),
    Run("BinarySparseCoding", mutation="sparseflips"),
    Run("NoisyOr", mutation="sparseflips"),
    Run("BinarySparseCoding-offset", missing=True, driver="gradient"),
    Run("GaussianMixture-spherical", driver="gradient", minibatch="incremental", num_data=40),
    Run("BinarySparseCoding", num_data=3),
    Run("NoisyOr", num_data=4),
]


def test_a_process_without_data_points_in_a_minibatch_leaves_its_populations_alone():
    # The last of four processes with 23 data points.
    row = CONFIGURATIONS["BinarySparseCoding-offset"]
    y = distributed.Shard.from_rows(row.generate(6), distributed.Portion(17, 6, 23))
    model = row.make(torch.float64).initialize(y)
    guide = AutoTruncated(model, num_states=4)
    svi = SVI(model, guide, ClosedForm(model, minibatch="online"), Truncated_ELBO(Run("BinarySparseCoding").search()))
    batches, num_idle = distributed.Batches(y, 8, block=3), 0
    svi.step(y)
    for step in range(12):
        before, batch = (guide.words.clone(), guide.log_joint.clone()), batches.at(step)
        with batch:
            loss = svi.step(y)
        others = [n for n in range(6) if batch.is_idle or n not in batch.rows]
        num_idle += batch.is_idle
        assert torch.equal(guide.words[others], before[0][others])
        assert torch.equal(guide.log_joint[others], before[1][others])
        assert loss == 0.0 or not batch.is_idle
    assert num_idle > 2


@pytest.mark.parametrize("minibatch", ["online", "incremental"])
def test_a_minibatch_with_all_data_points_of_one_process_is_a_minibatch(minibatch, crew):
    run = Run("BinarySparseCoding-offset", minibatch=minibatch, num_data=23, steps=12, size=8, block=3)
    expected, parameters = losses(run)
    for found, held in crew.results(4, losses, run):
        assert found == pytest.approx(expected, rel=1e-12, abs=0)
        for name, value in parameters.items():
            torch.testing.assert_close(held[name], value, rtol=1e-8, atol=1e-8)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["poisson", "bernoulli", "exponential", "gamma"])
def test_rounding_of_sums_decides_nothing(family, monkeypatch):
    # Few data points in a minibatch, of which two causes win the same one alone, or leave the background next to nothing.
    run = Run(f"ExponentialFamilyMaximalCauses-{family}", missing=True, minibatch="online", steps=9)
    expected, parameters = losses(run)
    exact, generator = FamilyMaximum.statistics, torch.Generator().manual_seed(0)

    def rounded(*args):
        statistics = exact(*args).items()
        return {name: value * (1 + 1e-16 * torch.randn(value.shape, generator=generator, dtype=value.dtype)) for name, value in statistics}

    monkeypatch.setattr(FamilyMaximum, "statistics", rounded)
    found, held = losses(run)
    assert found == pytest.approx(expected, rel=1e-12, abs=0)
    for name, value in parameters.items():
        torch.testing.assert_close(held[name], value, rtol=1e-8, atol=1e-8)


def minibatches_of_its_own() -> float:
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    row = CONFIGURATIONS["BinarySparseCoding-offset"]
    y = distributed.shard(row.generate(11))
    model = row.make(torch.float64).initialize(y)
    svi = SVI(model, AutoTruncated(model, num_states=4), ClosedForm(model), Truncated_ELBO(Run("BinarySparseCoding").search()))
    for _ in range(30):
        svi.step(y, 3)
    return float(svi.optim.statistics["num_data"])


def test_what_is_all_data_for_one_process_is_a_minibatch_where_others_have_more(crew):
    # Of three, four and four data points each process draws three.
    assert crew.results(3, minibatches_of_its_own) == pytest.approx([11.0] * 3)


@pytest.mark.parametrize("run", SHORT, ids=str)
def test_several_processes_equal_one(run, crew):
    expected, parameters = losses(run)
    for number in (2, 3):
        ranks = crew.results(number, losses, run)
        for found, held in ranks:
            assert found == pytest.approx(expected, rel=1e-12, abs=0)
            for name, value in parameters.items():
                torch.testing.assert_close(held[name], value, rtol=1e-8, atol=1e-8)
                assert torch.equal(held[name], ranks[0][1][name])
