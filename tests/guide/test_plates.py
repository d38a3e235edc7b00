"""Guides beside and around AutoTruncated share its plates, whoever opens them; minibatches come from data loaders, too."""

from __future__ import annotations

import math
import pickle

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Predictive, TraceEnum_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGaussian,
    AutoGuide,
    AutoGuideList,
    AutoMultivariateNormal,
    AutoNormal,
    AutoStructured,
)
from pyro.infer.autoguide.initialization import init_to_value
from pyro.optim import SGD, Adam
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO

D64 = torch.float64
N = 7
Y = torch.tensor([0.1, 3.2, -0.4, 2.5, 3.9, 0.7, 1.4], dtype=D64)
LOC = torch.tensor(0.2, dtype=D64)


def model(y, batch_size=None):
    loc = pyro.sample("loc", dist.Normal(torch.tensor(0.0, dtype=D64), torch.tensor(2.0, dtype=D64)))
    with pyro.plate("data", len(y), subsample_size=batch_size) as index:
        z = pyro.sample("z", dist.Normal(torch.tensor(0.0, dtype=D64), torch.tensor(1.0, dtype=D64)))
        s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.3, dtype=D64)))
        pyro.sample("y", dist.Normal(loc + 3 * s + z, torch.tensor(0.5, dtype=D64)), obs=y[index])


def encoded(y: Tensor) -> Tensor:
    return 0.1 * y


def global_guide(y, batch_size=None):
    pyro.sample("loc", dist.Delta(LOC))


class Recorder:
    """A guide of the latents of data points that remembers which it was for."""

    def __call__(self, y, batch_size=None):
        with pyro.plate("data", len(y), subsample_size=batch_size) as self.index:
            pyro.sample("z", dist.Delta(encoded(y[self.index])))


class Encoder(AutoGuide):
    """The same as an automatic guide that ignores the list's plates."""

    def forward(self, y, batch_size=None):
        with pyro.plate("data", len(y), subsample_size=batch_size) as self.index:
            return {"z": pyro.sample("z", dist.Delta(encoded(y[self.index])))}


def beside(local):
    guide = AutoGuideList(model)
    for part in (global_guide, local, AutoTruncated(model, 2)):
        guide.append(part)
    return guide


def around(local):
    truncated = AutoTruncated(model, 2)

    def guide(y, batch_size=None):
        global_guide(y)
        local(y, batch_size)
        truncated(y, batch_size)

    return guide


def around_in_its_plate(local):
    truncated = AutoTruncated(model, 2)

    def guide(y, batch_size=None):
        global_guide(y)
        with pyro.plate("data", len(y), subsample_size=batch_size) as local.index:
            pyro.sample("z", dist.Delta(encoded(y[local.index])))
            truncated(y, batch_size)

    return guide


def exact_loss(index: Tensor) -> float:
    """Minus the free energy of all states given the guides' point masses, scaled to all data."""
    y = Y[index]
    z = encoded(y)
    prior = dist.Normal(0.0, torch.tensor(2.0, dtype=D64)).log_prob(LOC)
    local = dist.Normal(0.0, torch.tensor(1.0, dtype=D64)).log_prob(z)
    states = torch.tensor([[0.0], [1.0]], dtype=D64)
    joint = dist.Bernoulli(torch.tensor(0.3, dtype=D64)).log_prob(states) + dist.Normal(
        LOC + 3 * states + z, torch.tensor(0.5, dtype=D64)
    ).log_prob(y)
    return -float(prior + N / len(index) * (local + joint.logsumexp(0)).sum())


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("kind", ["truncated", "stock"])
@pytest.mark.parametrize("build", [beside, around, around_in_its_plate])
def test_a_guide_with_its_own_data_plate_shares_it(build, kind, batch_size):
    local = Recorder()
    guide = build(local)
    elbo = Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1) if kind == "truncated" else TraceEnum_ELBO(max_plate_nesting=1)
    for _ in range(3):
        loss = elbo.loss_and_grads(model, guide, Y, batch_size)
        assert len(local.index) == (batch_size or N)
        assert loss == pytest.approx(exact_loss(local.index), rel=1e-12)


def test_an_automatic_guide_with_its_own_data_plate_shares_it():
    local = Encoder(model)
    guide = beside(local)
    assert Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1).loss(model, guide, Y, 3) == pytest.approx(exact_loss(local.index))


@pytest.mark.parametrize("build", [beside, around, around_in_its_plate])
def test_predictive_draws_with_shared_plates(build):
    guide = build(Recorder())
    drawn = Predictive(model, guide=guide, num_samples=5, return_sites=["s", "z"])(Y)
    assert drawn["s"].shape == (5, N)
    assert torch.equal(drawn["z"], encoded(Y).expand(5, N))


def test_a_plate_at_another_dimension_is_refused():
    truncated = AutoTruncated(model, 2)

    def guide(y):
        with pyro.plate("data", len(y), dim=-2):
            truncated(y)

    with pytest.raises(ValueError, match=r"called in plate 'data' at dimension -2; the model has it at -1"):
        poutine.trace(guide).get_trace(Y)


# --- data loaders ---


def on_loader(y, index):
    loc = pyro.sample("loc", dist.Normal(torch.tensor(0.0, dtype=D64), torch.tensor(2.0, dtype=D64)))
    with pyro.plate("data", N, subsample=index):
        s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.3, dtype=D64)))
        pyro.sample("y", dist.Normal(loc + 3 * s, torch.tensor(0.5, dtype=D64)), obs=y)


def on_loader_with_locals(y, index):
    with pyro.plate("data", N, subsample=index):
        z = pyro.sample("z", dist.Normal(torch.tensor(0.0, dtype=D64), torch.tensor(1.0, dtype=D64)))
        s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.3, dtype=D64)))
        pyro.sample("y", dist.Normal(z + 3 * s, 0.5), obs=y)


def loader() -> DataLoader:
    return DataLoader(TensorDataset(Y, torch.arange(N)), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(0))


def log_joint(loc: Tensor) -> Tensor:
    states = torch.tensor([0.0, 1.0], dtype=D64)
    return dist.Bernoulli(torch.tensor(0.3, dtype=D64)).log_prob(states) + dist.Normal(
        loc + 3 * states, torch.tensor(0.5, dtype=D64)
    ).log_prob(Y.unsqueeze(-1))


def test_a_list_pairs_the_rows_of_a_loader_with_their_populations():
    guide = AutoGuideList(on_loader)
    guide.append(AutoDelta(poutine.block(on_loader, expose=["loc"]), init_loc_fn=init_to_value(values={"loc": LOC})))
    guide.append(AutoTruncated(on_loader, 2))
    elbo = Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1)
    svi = SVI(on_loader, guide, SGD({"lr": 0.0}), elbo)
    prior = float(dist.Normal(0.0, torch.tensor(2.0, dtype=D64)).log_prob(LOC))
    for y, index in loader():
        expected = -prior - N / len(y) * float(log_joint(LOC).logsumexp(-1)[index].sum())
        assert svi.step(y, index) == pytest.approx(expected, rel=1e-12)
        assert svi.evaluate_loss(y, index) == pytest.approx(expected, rel=1e-12)
        assert TraceEnum_ELBO(max_plate_nesting=1).loss(on_loader, guide, y, index) == pytest.approx(expected, rel=1e-12)
    words = guide[1].states()["s"]
    assert torch.allclose(guide[1].log_joint, log_joint(LOC).gather(1, words.long()), rtol=1e-12)


@pytest.mark.nightly
@pytest.mark.parametrize("family", [AutoNormal, AutoDelta])
def test_latents_of_data_points_follow_a_loader(family):
    guide = AutoGuideList(on_loader_with_locals)
    guide.append(family(poutine.block(on_loader_with_locals, hide=["s"])))
    guide.append(AutoTruncated(on_loader_with_locals, 2))
    elbo = Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1)
    svi = SVI(on_loader_with_locals, guide, Adam({"lr": 0.05}), elbo)
    pyro.set_rng_seed(0)
    for _ in range(150):
        for y, index in loader():
            svi.step(y, index)
    everything = torch.arange(N)
    z = guide[0].z if family is AutoDelta else guide[0].locs.z
    on = guide[1].posterior(Y, everything).value_probabilities()[:, 0, 1]
    # The mode of z given the state, whichever it is: (y - 3 s) / (1 + 0.25).
    assert torch.allclose(z, (Y - 3 * on) / 1.25, atol=0.15)


@pytest.mark.parametrize("family", [AutoDiagonalNormal, AutoMultivariateNormal, AutoStructured])
def test_a_guide_with_one_vector_of_all_latents_cannot_follow_a_loader(family):
    guide = AutoGuideList(on_loader_with_locals)
    guide.append(family(poutine.block(on_loader_with_locals, hide=["s"])))
    guide.append(AutoTruncated(on_loader_with_locals, 2))
    svi = SVI(on_loader_with_locals, guide, Adam({"lr": 0.01}), Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1))
    with pytest.raises(ValueError, match=r"cannot take the latent 'z' for a subsample of plate 'data'.*AutoNormal, AutoDelta"):
        svi.step(Y[:3], torch.arange(3))


@pytest.mark.filterwarnings("ignore:site 'y' lies in the subsampled plate 'rows'")
@pytest.mark.parametrize("family", [AutoDiagonalNormal, AutoStructured, AutoGaussian])
def test_nor_can_it_in_a_plate_without_discrete_latents(family):
    def crossed(y):
        rows, columns = pyro.plate("rows", 6, subsample_size=4, dim=-2), pyro.plate("columns", 3, dim=-1)
        with columns:
            s = pyro.sample("s", dist.Bernoulli(0.4))
        with rows as index:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            with columns:
                pyro.sample("y", dist.Normal(z + 3 * s, 0.5), obs=y[index])

    guide = AutoGuideList(crossed)
    guide.append(family(poutine.block(crossed, hide=["s"])))
    guide.append(AutoTruncated(crossed, 2))
    with pytest.raises(ValueError, match=r"cannot take the latent 'z' for a subsample of plate 'rows'"):
        SVI(crossed, guide, Adam({"lr": 0.01}), Truncated_ELBO(ExhaustiveSearch())).step(torch.randn(6, 3))


def test_a_list_says_that_minibatches_need_their_positions():
    def careless(y):
        loc = pyro.sample("loc", dist.Normal(torch.tensor(0.0, dtype=D64), torch.tensor(2.0, dtype=D64)))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.3, dtype=D64)))
            pyro.sample("y", dist.Normal(loc + 3 * s, torch.tensor(0.5, dtype=D64)), obs=y)

    guide = AutoGuideList(careless)
    guide.append(AutoNormal(poutine.block(careless, expose=["loc"])))
    guide.append(AutoTruncated(careless, 2))
    svi = SVI(careless, guide, Adam({"lr": 0.01}), Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1))
    svi.step(Y[:4])
    with pytest.raises(ValueError, match=r"holds populations of 4 data points.* now has 3\..*subsample=positions"):
        svi.step(Y[4:])


# --- the plates of a list ---


def test_a_list_follows_the_model_to_another_batch_size():
    local = Recorder()
    guide = beside(local)
    elbo = Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1)
    for batch_size in (2, 5, None):
        assert elbo.loss_and_grads(model, guide, Y, batch_size) == pytest.approx(exact_loss(local.index), rel=1e-12)
        assert len(local.index) == (batch_size or N)


def test_plates_that_the_user_creates_stay():
    chosen = torch.tensor([4, 1])
    guide = AutoGuideList(model, create_plates=lambda y: pyro.plate("data", len(y), subsample=chosen))
    local = Recorder()
    for part in (global_guide, local, AutoTruncated(model, 2)):
        guide.append(part)
    loss = Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1).loss(model, guide, Y)
    assert torch.equal(local.index, chosen)
    assert loss == pytest.approx(exact_loss(chosen), rel=1e-12)


def test_a_list_within_a_list_opens_the_plates_once():
    local = Recorder()
    inner = AutoGuideList(model)
    for part in (local, AutoTruncated(model, 2)):
        inner.append(part)
    outer = AutoGuideList(model)
    outer.append(global_guide)
    outer.append(inner)
    assert inner.create_plates is None
    loss = Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1).loss(model, outer, Y, 3)
    assert loss == pytest.approx(exact_loss(local.index), rel=1e-12)


def test_a_list_is_pickled_with_its_plates():
    guide = AutoGuideList(model)
    for part in (AutoDelta(poutine.block(model, expose=["loc"])), Encoder(model), AutoTruncated(model, 2)):
        guide.append(part)
    guide(Y)
    again = pickle.loads(pickle.dumps(guide))
    assert torch.equal(again[2].words, guide[2].words)
    assert again.create_plates.__self__ is again[2]


def test_finding_the_plates_takes_no_random_numbers():
    guide = beside(Recorder())
    guide(Y, 3)
    state = torch.get_rng_state()
    guide[2]._list_plates(Y)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["entered in the model", "around the model"])
def test_plates_may_be_made_outside_of_the_model(kind):
    plate, outer = pyro.plate("data", N), pyro.plate("outer", 1, dim=-2)

    def entered(y):
        loc = pyro.sample("loc", dist.Delta(LOC))
        with plate if kind == "entered in the model" else pyro.plate("data", N):
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.3, dtype=D64)))
            pyro.sample("y", dist.Normal(loc + 3 * s, torch.tensor(0.5, dtype=D64)), obs=y)

    model = entered if kind == "entered in the model" else outer(entered)
    joint = torch.stack([dist.Normal(LOC + 3 * s, 0.5).log_prob(Y) + math.log(0.3 if s else 0.7) for s in (0, 1)])
    alone = AutoTruncated(model, 2)
    assert Truncated_ELBO().loss(model, alone, Y) == pytest.approx(-float(joint.logsumexp(0).sum()), rel=1e-7)
    assert Predictive(model, guide=alone, num_samples=3)(Y)["s"].shape[-1] == N
    torch.testing.assert_close(alone.marginals()["s"].flatten(), joint.softmax(0)[1], rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Found plate statements in guide but not model")
def test_a_plate_outside_of_the_model_is_found_beside_another_guide():
    plate = pyro.plate("data", N)

    def model(y):
        loc = pyro.sample("loc", dist.Normal(torch.tensor(0.0, dtype=D64), 2.0))
        with plate:
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.3, dtype=D64)))
            pyro.sample("y", dist.Normal(loc + 3 * s, torch.tensor(0.5, dtype=D64)), obs=y)

    guide = AutoGuideList(model)
    guide.append(AutoDelta(poutine.block(model, hide=["s"]), init_loc_fn=init_to_value(values={"loc": LOC})))
    guide.append(AutoTruncated(model, 2))
    joint = torch.stack([dist.Normal(LOC + 3 * s, 0.5).log_prob(Y) + math.log(0.3 if s else 0.7) for s in (0, 1)])
    expected = -float(joint.logsumexp(0).sum() + dist.Normal(0.0, 2.0).log_prob(LOC))
    assert Truncated_ELBO(max_plate_nesting=1).loss(model, guide, Y) == pytest.approx(expected, rel=1e-7)


def test_a_plate_that_has_drawn_its_subsample_outside_of_the_model_is_refused():
    plate = pyro.plate("data", N, subsample_size=3)

    def model(y):
        with plate as index:
            s = pyro.sample("s", dist.Bernoulli(0.3))
            pyro.sample("y", dist.Normal(3 * s, 0.5), obs=y[index])

    with pytest.raises(ValueError, match="plate 'data' was made outside of the model"):
        Truncated_ELBO().loss(model, AutoTruncated(model, 2), Y)
