"""Old names of public attributes work for a version, and say the new ones."""

from __future__ import annotations

import pytest
import torch

from pyro_truncated.diagnostics.truncation.evidence import ExactComparison
from pyro_truncated.extend import Renamed
from pyro_truncated.models import GatedDecoder, OcclusiveComponents


class Ruler:
    """A class whose method and property have new names."""

    def measure(self, length: int) -> int:
        return 2 * length

    @property
    def unit(self) -> str:
        return "cm"

    length_of = Renamed("measure")
    unit_of_length = Renamed("unit")


def test_old_names_of_methods_and_properties_warn_and_work() -> None:
    with pytest.warns(DeprecationWarning, match="length_of has a new name: use measure"):
        assert Ruler().length_of(3) == 6
    with pytest.warns(DeprecationWarning, match="unit_of_length has a new name: use unit"):
        assert Ruler().unit_of_length == "cm"


def test_names_of_the_version_before_lead_to_todays() -> None:
    half, third = torch.full((2, 3, 2), 0.5), torch.full((2, 3, 2), 1 / 3)
    exact = ExactComparison(half[:, 0, 0], half[:, 0, 0], half, third, half, third, half[:, 0, 0] > 0)
    with pytest.warns(DeprecationWarning, match="error_of_marginals has a new name: use marginal_error"):
        assert torch.equal(exact.error_of_marginals, exact.marginal_error)
    with pytest.warns(DeprecationWarning, match="error_of_pairs has a new name: use pair_error"):
        assert torch.equal(exact.error_of_pairs, exact.pair_error)
    scenes = OcclusiveComponents(2, canvas=(4, 4), template=(2, 2), num_channels=1)
    with pytest.warns(DeprecationWarning, match="parameters_of_scene has a new name: use scene_parameters"):
        assert torch.equal(scenes.parameters_of_scene().features, scenes.scene_parameters().features)
    decoder = GatedDecoder(torch.rand(3, 5), torch.ones(3, 2), torch.zeros(3, 2, 1))
    with pytest.warns(DeprecationWarning, match="poses_of has a new name: use infer_poses"):
        assert decoder.poses_of(torch.rand(4, 5))[0].shape == (4, 2, 1)
