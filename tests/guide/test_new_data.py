"""Populations for unseen data, and guides that subsample where the model does not."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Predictive, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuide, AutoGuideList, AutoMultivariateNormal, AutoNormal
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, ExhaustiveSearch, Truncated_ELBO, to_arviz
from pyro_truncated.diagnostics import check_truncation
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


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 6])
def test_amortised_latents_are_computed_for_new_data(size):
    guide = in_a_list(Encoder(shifted), torch.randn(6, dtype=D64))
    plates, words = guide.plates, guide[1].words.clone()
    new = torch.tensor([0.2, 3.1, 2.9, -0.4, 0.0, 3.0], dtype=D64)[:size]
    found = guide[1].infer(new, SEARCH, steps=1)
    assert found.mode()["s"].tolist() == (new > 1.5).tolist()
    assert guide.plates is plates
    assert torch.equal(guide[1].words, words)


# --- the guides beside it come along ---

NEW = torch.tensor([0.3, 3.4, -0.2, 2.9, 4.1, 0.1, 3.3, 0.5, 2.2], dtype=D64)


def located(y, batch_size=None):
    loc = pyro.sample("loc", dist.Normal(torch.tensor(0.0, dtype=D64), torch.tensor(5.0, dtype=D64)))
    with pyro.plate("data", len(y), subsample_size=batch_size) as index:
        s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.3, dtype=D64)))
        pyro.sample("y", dist.Normal(loc + 3 * s, torch.tensor(0.5, dtype=D64)).to_event(0), obs=y[index])


def evidence(loc: Tensor, y: Tensor) -> Tensor:
    states = torch.tensor([0.0, 1.0], dtype=D64)
    prior = dist.Bernoulli(torch.tensor(0.3, dtype=D64)).log_prob(states)
    return (prior + dist.Normal(loc + 3 * states, torch.tensor(0.5, dtype=D64)).log_prob(y.unsqueeze(-1))).logsumexp(-1)


def trained(family, batch_size=None) -> AutoGuideList:
    pyro.set_rng_seed(0)
    guide = AutoGuideList(located)
    guide.append(family(poutine.block(located, expose=["loc"])))
    guide.append(AutoTruncated(located, 2))
    svi = SVI(located, guide, Adam({"lr": 0.05}), Truncated_ELBO(SEARCH, max_plate_nesting=1))
    for _ in range(30):
        svi.step(torch.tensor([0.2, 3.1, 2.8, -0.4, 0.1, 3.3], dtype=D64), batch_size)
    return guide


def loc_and_scale(guide: AutoGuideList) -> tuple[Tensor, Tensor]:
    return guide[0].locs.loc.detach(), guide[0].scales.loc.detach()


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 4])
def test_new_data_have_the_posterior_of_the_trained_list(batch_size):
    guide = trained(AutoNormal, batch_size)
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    new = guide[-1].infer(NEW, SEARCH, steps=1)
    assert all(torch.equal(value, before[name]) for name, value in guide.state_dict().items())
    nodes = poutine.trace(new).get_trace(NEW).nodes
    # AutoNormal samples the unconstrained value, and a Delta of it.
    posterior = nodes["loc_unconstrained"]["fn"]
    assert (posterior.loc, posterior.scale) == loc_and_scale(guide)
    assert nodes["s"]["value"].shape == NEW.shape


@pytest.mark.slow
def test_losses_of_new_data_are_those_of_the_trained_list():
    guide = trained(AutoDelta)
    new = guide[-1].infer(NEW, SEARCH, steps=1)
    loc = guide[0].loc.detach()
    expected = -float(dist.Normal(0.0, torch.tensor(5.0, dtype=D64)).log_prob(loc) + evidence(loc, NEW).sum())
    for elbo in (Truncated_ELBO(SEARCH, max_plate_nesting=1), TraceEnum_ELBO(max_plate_nesting=1)):
        assert elbo.loss(located, new, NEW) == pytest.approx(expected, rel=1e-12)
    # Shared, not copied: what the list learns later is known here.
    guide[0].loc = loc + 0.5
    moved = -float(dist.Normal(0.0, torch.tensor(5.0, dtype=D64)).log_prob(loc + 0.5) + evidence(loc + 0.5, NEW).sum())
    assert elbo.loss(located, new, NEW) == pytest.approx(moved, rel=1e-12)


@pytest.mark.slow
def test_checks_of_new_data_are_those_of_the_trained_list():
    guide = trained(AutoNormal)
    new = guide[-1].infer(NEW, SEARCH, steps=1)
    report = check_truncation(new, NEW, search=SEARCH)
    expected = evidence(loc_and_scale(guide)[0], NEW)
    assert torch.allclose(torch.as_tensor(report.arrays()["log_evidence_exact"]), expected, rtol=1e-10)


@pytest.mark.nightly
@pytest.mark.parametrize("parallel", [False, True])
def test_predictions_of_new_data_use_the_trained_list(parallel):
    guide = trained(AutoNormal)
    loc, scale = loc_and_scale(guide)
    new = guide[-1].infer(NEW, SEARCH, steps=1)
    pyro.set_rng_seed(1)
    drawn = Predictive(located, guide=new, num_samples=400, parallel=parallel, return_sites=["loc", "s"])(NEW)
    # Five standard errors: false alarms below 1e-5.
    assert abs(float(drawn["loc"].mean() - loc)) < 5 * float(scale) / 400**0.5
    assert abs(float(drawn["loc"].std() / scale) - 1) < 5 / 800**0.5
    assert drawn["s"].squeeze().shape == (400, len(NEW))


@pytest.mark.nightly
def test_arviz_data_of_new_data_hold_the_posterior_of_the_trained_list():
    guide = trained(AutoNormal)
    loc, scale = loc_and_scale(guide)
    new = guide[-1].infer(NEW, SEARCH, steps=1)
    idata = to_arviz(located, new, NEW, num_samples=200, num_predictive=5, seed=0)
    draws = idata["posterior"]["loc"].values
    assert abs(draws.mean() - float(loc)) < 5 * float(scale) / 200**0.5
    assert abs(draws.std() / float(scale) - 1) < 5 / 400**0.5
    assert idata["posterior"]["s"].shape[-1] == len(NEW)


@pytest.mark.nightly
def test_marginals_of_new_data_are_averages_over_the_trained_list():
    guide = trained(AutoNormal)
    loc, scale = loc_and_scale(guide)
    new = guide[-1].infer(NEW, SEARCH, steps=1)
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    locs = loc + scale * torch.as_tensor(nodes).unsqueeze(-1)
    on = torch.sigmoid(
        torch.tensor(0.3 / 0.7, dtype=D64).log()
        + dist.Normal(locs + 3, torch.tensor(0.5, dtype=D64)).log_prob(NEW)
        - dist.Normal(locs, torch.tensor(0.5, dtype=D64)).log_prob(NEW)
    )
    exact = (torch.as_tensor(weights / weights.sum()).unsqueeze(-1) * on).sum(0)
    new.num_draws = 500
    # Numbers in 0 .. 1: standard errors below 0.5 / sqrt(500), five of them.
    assert torch.allclose(new.marginals()["s"], exact, atol=5 * 0.5 / 500**0.5)


def test_a_function_of_the_data_comes_along():
    def encoder(y, batch_size=None):
        with pyro.plate("data", len(y)) as index:
            pyro.sample("z", dist.Delta(y[index] - 3 * (y[index] > 1.5).to(D64)))

    guide = in_a_list(encoder, torch.randn(6, dtype=D64))
    new = guide[1].infer(NEW, SEARCH, steps=1)
    drawn = new(NEW)
    assert torch.allclose(drawn["z"], NEW - 3 * (NEW > 1.5).to(D64))
    assert new.mode()["s"].tolist() == (NEW > 1.5).tolist()
    assert new.infer(NEW[:3], SEARCH, steps=1)(NEW[:3])["z"].shape == (3,)


@pytest.mark.slow
def test_the_guide_for_new_data_keeps_the_list_alive():
    guide = trained(AutoDelta)
    loc = guide[0].loc.detach().clone()
    new = guide[-1].infer(NEW, SEARCH, steps=1)
    del guide
    gc.collect()
    assert new(NEW)["loc"] == loc
    assert copy.deepcopy(new)(NEW)["loc"] == loc


def test_latents_that_no_guide_covers_are_refused():
    guide = AutoTruncated(located, 2)
    with pytest.raises(ValueError, match=r"could only draw the latents \['loc'\] from the prior.*AutoGuideList"):
        guide.infer(NEW, SEARCH, steps=1)


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
    assert svi.optim.visited.nonzero().squeeze(-1).tolist() == sorted(FIRST.tolist())
    assert svi.optim.statistics["num_data"] == 2


def test_create_plates_goes_on_with_a_guide_for_new_data():
    y = torch.randn(6, dtype=D64)
    guide = AutoTruncated(bits, 8, create_plates=first_two)
    Truncated_ELBO(SEARCH).loss_and_grads(bits, guide, y)
    new = torch.randn(7, dtype=D64)
    found = guide.infer(new, SEARCH, steps=1)
    assert found.create_plates is first_two
    assert not found.log_joint.isnan().any()
    assert found(new)["s"].shape == (2, 3)
