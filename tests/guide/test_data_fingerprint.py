"""Populations that are used for other data than they were found for are noticed; the same data never are."""

from __future__ import annotations

import copy
import pickle
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ChangedDataWarning, ExhaustiveSearch, Truncated_ELBO

WEIGHT = torch.linspace(-1, 1, 12).reshape(3, 4)


def model(y, batch_size=None, positions=None, size=None):
    weight = pyro.param("weight", lambda: WEIGHT.clone())
    with pyro.plate("data", size or len(y), subsample_size=batch_size, subsample=positions) as index:
        s = pyro.sample("s", dist.Bernoulli(torch.full((4,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, 1.0).to_event(1), obs=y if positions is not None else y[index])


def trained(model, *args, **kwargs) -> SVI:
    svi = SVI(model, AutoTruncated(model, 8), Adam({"lr": 0.01}), Truncated_ELBO(ExhaustiveSearch()))
    svi.step(*args, **kwargs)
    return svi


@pytest.fixture
def y() -> torch.Tensor:
    return torch.randn(8, 3)


def test_other_data_of_the_same_size_are_noticed_once(y):
    svi = trained(model, y)
    other = torch.randn(8, 3)
    for use in (lambda: svi.step(other), lambda: svi.evaluate_loss(y), lambda: svi.guide(other), lambda: svi.guide.median(y)):
        with pytest.warns(ChangedDataWarning, match=r"observed at \['y'\] .*guide.infer\(new_data.*subsample=positions"):
            use()
    svi.guide(y)


def test_one_data_point_that_differs_is_enough(y):
    svi = trained(model, y)
    other = y.clone()
    other[5] += 1
    with pytest.warns(ChangedDataWarning):
        svi.step(other)


def test_data_changed_in_place_are_noticed(y):
    svi = trained(model, y)
    y.neg_()
    with pytest.warns(ChangedDataWarning):
        svi.step(y)


def test_minibatches_without_their_positions_are_noticed(y):
    svi = trained(model, y[:4])
    with pytest.warns(ChangedDataWarning):
        svi.step(y[4:])


@pytest.mark.parametrize(
    "copied", [lambda y: y, torch.clone, torch.Tensor.double, lambda y: y.mT.contiguous().mT], ids=["itself", "copy", "double", "strided"]
)
def test_the_same_data_are_never_noticed(y, copied):
    y[0, 0], y[1, 1] = torch.nan, -0.0
    svi = trained(lambda *args: model(torch.where(args[0].isnan(), 0.0, args[0]), *args[1:]), y)
    for batch_size in (None, 3, 5, None):
        svi.step(copied(y), batch_size)
        svi.evaluate_loss(copied(y), batch_size)
    svi.guide.infer(torch.randn(8, 3), ExhaustiveSearch(), steps=1)


def test_minibatches_with_their_positions_are_never_noticed(y):
    order = torch.randperm(8)
    svi = trained(model, y[order[:3]], None, order[:3], 8)
    for _ in range(3):
        for positions in torch.randperm(8).split(3):
            svi.step(y[positions], None, positions, 8)


def test_minibatches_with_their_positions_of_other_data_are_noticed(y):
    positions = torch.tensor([6, 1])
    svi = trained(model, y[positions], None, positions, 8)
    svi.step(y[:1], None, torch.tensor([0]), 8)
    with pytest.warns(ChangedDataWarning):
        svi.step(torch.randn(2, 3), None, positions, 8)


def test_observations_computed_from_latents_are_no_data(y):
    def residual(y):
        with pyro.plate("data", len(y)) as index:
            s = pyro.sample("s", dist.Bernoulli(torch.full((4,), 0.3)).to_event(1))
            pyro.deterministic("mean", s @ WEIGHT.mT, event_dim=1)
            pyro.sample("residual", dist.Normal(torch.zeros(3), 1.0).to_event(1), obs=y[index] - s @ WEIGHT.mT)

    svi = trained(residual, y)
    for _ in range(5):
        svi.step(y.clone())


def test_looking_draws_no_random_numbers(y):
    states = []
    for other in (y, y + 1):
        pyro.set_rng_seed(0)
        svi = trained(model, y)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ChangedDataWarning)
            svi.step(other)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda guide: pickle.loads(pickle.dumps(guide))], ids=["deepcopy", "pickle"])
def test_copies_remember(y, copied):
    svi = trained(model, y)
    duplicate = copied(svi.guide)
    duplicate._model = (model,)
    duplicate(y.clone())
    with pytest.warns(ChangedDataWarning):
        duplicate(y + 1)


def test_loaded_populations_are_of_unknown_data(y):
    svi, other = trained(model, y), trained(model, y + 1)
    svi.guide.load_state_dict(other.guide.state_dict())
    svi.guide(y + 1)
