"""So many processes, the same numbers: free energies and parameters of every model with a closed form, and of gradient M-steps."""

from __future__ import annotations

import pytest
import torch

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
    Run("BinarySparseCoding", mutation="sparseflips"),
    Run("NoisyOr", mutation="sparseflips"),
    Run("BinarySparseCoding-offset", missing=True, driver="gradient"),
    Run("GaussianMixture-spherical", driver="gradient", minibatch="incremental", num_data=40),
    Run("BinarySparseCoding", num_data=3),
    Run("NoisyOr", num_data=4),
]


@pytest.mark.slow
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
