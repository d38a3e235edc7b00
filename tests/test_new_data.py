"""Populations for unseen data, and guides that subsample where the model does not."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuide, AutoGuideList, AutoMultivariateNormal, AutoNormal
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.models import BinarySparseCoding

D64 = torch.float64
SEARCH = ExhaustiveSearch()


def shifted(y, batch_size=None):
    with pyro.plate("data", len(y), subsample_size=batch_size) as index:
        z = pyro.sample("z", dist.Normal(torch.tensor(0.0, dtype=D64), 1.0))
        s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.3, dtype=D64)))
        pyro.sample("y", dist.Normal(3 * s + z, 0.1), obs=y[index])


class Encoder(AutoGuide):
    """Computes the shift of a data point from its value: from the distance to the nearer of 0 and 3."""

    def forward(self, y):
        plates = self._create_plates(y)
        with plates["data"] as index:
            near = y[index] - 3 * (y[index] > 1.5).to(D64)
            return {"z": pyro.sample("z", dist.Normal(near, 1e-3))}


def in_a_list(part, y: Tensor) -> AutoGuideList:
    guide = AutoGuideList(shifted)
    guide.append(part)
    guide.append(AutoTruncated(shifted, 2))
    svi = SVI(shifted, guide, Adam({"lr": 0.01}), Truncated_ELBO(SEARCH, max_plate_nesting=1))
    for _ in range(3):
        svi.step(y)
    return guide


@pytest.mark.parametrize("size", [4, 6])
@pytest.mark.parametrize("family", [AutoDelta, AutoNormal, AutoMultivariateNormal])
def test_latents_of_each_data_point_are_not_those_of_new_data(family, size):
    guide = in_a_list(family(poutine.block(shifted, hide=["s"])), torch.randn(6, dtype=D64))
    with pytest.raises(ValueError, match=r"cannot know the latents \['z'\] of the new data points.*conditional=.*amortised"):
        guide[1].infer(torch.randn(size, dtype=D64), SEARCH, steps=1)


@pytest.mark.parametrize("size", [4, 6])
def test_amortised_latents_are_computed_for_new_data(size):
    guide = in_a_list(Encoder(shifted), torch.randn(6, dtype=D64))
    plates, words = guide.plates, guide[1].words.clone()
    new = torch.tensor([0.2, 3.1, 2.9, -0.4, 0.0, 3.0], dtype=D64)[:size]
    found = guide[1].infer(new, SEARCH, steps=1)
    assert found.mode()["s"].tolist() == (new > 1.5).tolist()
    assert guide.plates is plates
    assert torch.equal(guide[1].words, words)


def test_new_data_are_needed_at_once():
    guide = AutoTruncated(shifted, 2, conditional=lambda states, y, batch_size=None: None)
    with pytest.raises(ValueError, match=r"needs all 6 data points of plate 'data' at once; .* subsampled 2"):
        guide.infer((torch.randn(6, dtype=D64), 2), SEARCH, steps=1)


# --- create_plates ---

FIRST = torch.tensor([4, 1])


def first_two(y, *args):
    return pyro.plate("data", len(y), subsample=FIRST)


def bits(y):
    rate = pyro.param("rate", torch.tensor(0.4, dtype=D64))
    with pyro.plate("data", len(y)) as index:
        s = pyro.sample("s", dist.Bernoulli(rate.expand(3)).to_event(1))
        pyro.sample("y", dist.Normal(s.sum(-1), 1.0), obs=y[index])


def test_create_plates_decides_about_every_loss():
    y = torch.randn(6, dtype=D64)
    guide = AutoTruncated(bits, 8, create_plates=first_two)
    elbo = Truncated_ELBO(SEARCH)
    loss = elbo.loss_and_grads(bits, guide, y)
    assert (~guide.log_joint.isnan().any(-1)).nonzero().squeeze(-1).tolist() == sorted(FIRST.tolist())
    assert elbo.loss(bits, guide, y) == pytest.approx(loss, rel=1e-12)
    with torch.no_grad():
        assert elbo.differentiable_loss(bits, guide, y).item() == pytest.approx(loss, rel=1e-12)
    assert TraceEnum_ELBO(max_plate_nesting=1).loss(bits, guide, y) == pytest.approx(loss, rel=1e-9)


def test_create_plates_decides_about_closed_form_steps():
    y = torch.randn(6, 3, dtype=D64)
    model = BinarySparseCoding(3, 4, dtype=D64)
    model.initialize(y)
    guide = AutoTruncated(model, 5, create_plates=first_two)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(parents=2, children=2)))
    svi.step(y)
    assert model.closed_form.visited.nonzero().squeeze(-1).tolist() == sorted(FIRST.tolist())
    assert model.closed_form.statistics["num_data"] == 2


def test_create_plates_goes_on_with_a_guide_for_new_data():
    y = torch.randn(6, dtype=D64)
    guide = AutoTruncated(bits, 8, create_plates=first_two)
    Truncated_ELBO(SEARCH).loss_and_grads(bits, guide, y)
    new = torch.randn(7, dtype=D64)
    found = guide.infer(new, SEARCH, steps=1)
    assert found.create_plates is first_two
    assert not found.log_joint.isnan().any()
    assert found(new)["s"].shape == (2, 3)
