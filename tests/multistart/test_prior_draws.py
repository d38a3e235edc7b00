"""Guides of continuous latents begin at draws from the prior, whatever the latents are."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_truncated import LearnConfig
from pyro_truncated.multistart.model_parameters import prior_draw
from pyro_truncated.multistart.profile import profile_model
from pyro_truncated.multistart.trainer import Trainer
from pyro_truncated.training import cooling


def topics(y):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("topics", 3):
        loc = pyro.sample("loc", dist.MultivariateNormal(torch.zeros(2), 100 * torch.eye(2)))
        shares = pyro.sample("shares", dist.Dirichlet(torch.ones(4)))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(loc[z], 0.1 + shares[z][..., :2]).to_event(1), obs=y)


@pytest.mark.slow
def test_two_starts_begin_apart_in_vectors_and_simplices():
    begins = []
    for seed in range(2):
        torch.manual_seed(seed)
        pyro.clear_param_store()
        run = Trainer(profile_model(topics, torch.zeros(9, 2), None, num_states=3, config=LearnConfig(lr=1e-6)), cooling(1.0, 2))
        run.step()
        begins.append({name: value for name, value in run.companion.items() if "locs" in name})
    assert len(begins[0]) == 3
    for name, value in begins[0].items():
        assert (value - begins[1][name]).abs().amax() > 0.1, name


def test_no_share_begins_near_nothing():
    drawn = prior_draw({"fn": dist.Dirichlet(torch.full((5,), 1e-3)).expand([20]).to_event(1)})
    assert drawn.shape == (20, 5)
    assert drawn.amin() >= 0.0999
    torch.testing.assert_close(drawn.sum(-1), torch.ones(20))


@pytest.mark.parametrize(
    "fn",
    [dist.TransformedDistribution(dist.Normal(1e4, 1.0), dist.transforms.ExpTransform()), dist.LogNormal(torch.tensor([0.0, -1e4]), 1.0)],
)
def test_draws_that_are_not_finite_or_at_the_end_of_the_support_give_way_to_a_feasible_point(fn):
    torch.testing.assert_close(prior_draw({"fn": fn}), torch.ones(fn.batch_shape))


def test_discrete_latents_that_a_guide_passes_by_are_drawn():
    assert prior_draw({"fn": dist.Bernoulli(torch.tensor([0.0, 1.0]))}).tolist() == [0.0, 1.0]
