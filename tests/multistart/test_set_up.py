"""Guides of restarts: the program is read once for those of the same model and rows."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch

from pyro_truncated.multistart.profile import profile_model


def test_a_program_is_read_once_for_guides_of_the_same_rows():
    runs = []

    def model(y):
        runs.append(len(y))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
            pyro.sample("y", dist.Normal(torch.tensor([-3.0, 0.0, 3.0])[z], 1.0), obs=y)

    y = torch.randn(12, generator=torch.Generator().manual_seed(0))
    profile = profile_model(model, y, num_states=2)
    first = profile.set_up_guide()
    runs.clear()
    second = profile.set_up_guide()
    assert not runs
    assert torch.equal(second.words, first.words)
    assert second.words.data_ptr() != first.words.data_ptr()
    torch.testing.assert_close(second.make_batch(y).rescore().log_joint, first.make_batch(y).rescore().log_joint)
    runs.clear()
    assert profile.replace(y=y[:5]).set_up_guide().layout.num_data == 5
    assert set(runs) == {5}
