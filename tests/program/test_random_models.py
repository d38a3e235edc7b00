"""Models that draw random numbers or update statistics beside their sample sites are named."""

from __future__ import annotations

import copy
import warnings

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, TraceEnum_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from pyro.optim import Adam
from torch import nn

from pyro_truncated import AutoTruncated, Truncated_ELBO, VectorizationWarning

Y = torch.tensor([0.3, 1.2, -0.4, 0.9])


def observed_through(layer):
    net = nn.Sequential(nn.Linear(1, 4), layer, nn.Linear(4, 1))

    def model(y):
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("y", dist.Normal(net(z.unsqueeze(-1)).squeeze(-1), 1.0), obs=y)

    return model, net


def noisy(y):
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(z + 0.1 * torch.randn(len(y)), 1.0), obs=y)


def test_noise_that_is_no_sample_site_is_named():
    model, net = observed_through(nn.Dropout(0.5))
    for program in (model, noisy):
        with pytest.warns(UserWarning, match=r"site 'y' gets other log probabilities whenever the same states are scored: the model draws"):
            AutoTruncated(program).setup(Y)
    net.eval()
    AutoTruncated(model).setup(Y)


class Flat(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def test_layers_that_update_statistics_in_every_run_are_named():
    model, net = observed_through(Flat(4))
    with (
        pytest.warns(UserWarning, match="the model runs Flat in training mode: each run normalises by the states in it"),
        pytest.warns(UserWarning, match="depends on the states of other data points"),
        warnings.catch_warnings(action="ignore", category=VectorizationWarning),
    ):
        AutoTruncated(model).setup(Y)
    net.eval()
    AutoTruncated(model).setup(Y)
    model, _ = observed_through(nn.LayerNorm(4))
    AutoTruncated(model).setup(Y)


def across(function):
    def model(y):
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(torch.full((2,), 0.5)).to_event(1))
            pyro.sample("y", dist.Normal(function(z).sum(-1), 1.0), obs=y)

    return model


# Two of twelve data points change places.
SWAPPED = [
    [second if n == first else first if n == second else n for n in range(12)] for first, second in ((0, 1), (0, 3), (5, 11), (1, 10))
]


@pytest.mark.parametrize(
    "function",
    [
        lambda z: z - z.mean(-2, keepdim=True),
        lambda z: z.cumsum(-2),
        *(lambda z, shift=shift: z + z.roll(shift, -2) for shift in range(1, 12)),
        *(lambda z, order=order: z[..., order, :] for order in SWAPPED),
        lambda z: torch.softmax(z @ z.mT, -1) @ z,
        nn.LayerNorm([12, 2]),
        Flat(2, track_running_stats=False).eval(),
    ],
)
def test_computing_across_data_points_is_named(function):
    with (
        pytest.warns(UserWarning, match=r"site 'y' of a data point depends on the states of other data points.* \['data'\]"),
        warnings.catch_warnings(action="ignore", category=VectorizationWarning),
    ):
        AutoTruncated(across(function)).setup(Y.repeat(3))


def test_computing_within_data_points_is_taken():
    for function in (nn.LayerNorm(2), lambda z: z.cumsum(-1), lambda z: z * Y.mean(), lambda z: z / Y.unsqueeze(-1)):
        with warnings.catch_warnings(action="error"):
            AutoTruncated(across(function)).setup(Y)


def test_sums_over_plates_are_told_to_keep_their_dimension():
    def model():
        with pyro.plate("parts", 3):
            s = pyro.sample("s", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(s.sum(-1), 1.0), obs=torch.tensor(1.0))

    with pytest.warns(VectorizationWarning, match=r"a reduction over a plate that keeps its dimension, s\.sum\(-1, keepdim=True\)"):
        AutoTruncated(model).setup()


def mixed(y):
    weight = pyro.param("weight", torch.tensor(1.0))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Bernoulli(0.4))
        pyro.sample("y", dist.Normal(weight * z, 1.0), obs=y)


@pytest.mark.parametrize("elbo", [Truncated_ELBO, TraceEnum_ELBO])
def test_copies_of_trained_guides_say_what_these_say(elbo):
    guide = AutoTruncated(mixed)
    svi = SVI(mixed, guide, Adam({"lr": 0.01}), elbo())
    for _ in range(3):
        svi.step(Y)
    duplicate = copy.deepcopy(guide)
    torch.testing.assert_close(duplicate.marginals()["z"], guide.marginals()["z"])
    torch.testing.assert_close(duplicate.mode()["z"], guide.mode()["z"])
    torch.testing.assert_close(copy.deepcopy(duplicate).weights(), guide.weights())


def with_mean(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Bernoulli(0.4))
        pyro.sample("y", dist.Normal(mean + z, 1.0), obs=y)


@pytest.mark.slow
def test_copies_of_guide_lists_say_what_these_say():
    guide = AutoGuideList(with_mean)
    guide.append(AutoNormal(poutine.block(with_mean, expose=["mean"])))
    guide.append(AutoTruncated(with_mean))
    svi = SVI(with_mean, guide, Adam({"lr": 0.01}), Truncated_ELBO())
    for _ in range(3):
        svi.step(Y)
    duplicate = copy.deepcopy(guide)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = duplicate[-1].marginals()["z"]
    torch.testing.assert_close(found, guide[-1].marginals()["z"], rtol=0.0, atol=0.1)


@pytest.mark.parametrize(
    ("components", "values", "max_count"),
    [
        (lambda: dist.Poisson(torch.tensor([1.0, 6.0])), 12, 11),
        (lambda: dist.Bernoulli(torch.tensor([0.1, 0.8])), 2, None),
        (lambda: dist.Binomial(torch.tensor([2, 5]), torch.tensor([0.3, 0.7])), 6, None),
        (lambda: dist.Categorical(torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.4, 0.0]])), 3, None),
    ],
)
def test_mixtures_of_one_family_are_latents_like_others(components, values, max_count):
    def model(y):
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.3, 0.7])), components()))
            pyro.sample("y", dist.Normal(z.float(), 1.0), obs=y)

    guide = AutoTruncated(model, max_count=max_count)
    loss = Truncated_ELBO().loss(model, guide, Y)
    z = torch.arange(values).unsqueeze(-1)
    with pyro.validation_enabled(False):
        prior = (components().log_prob(z.float()) + torch.tensor([0.3, 0.7]).log()).logsumexp(-1)
        if values == 6:
            prior = torch.stack([0.3 * two_or_five(2, 0.3, k) + 0.7 * two_or_five(5, 0.7, k) for k in range(6)]).log()
    joint = prior + dist.Normal(z.squeeze(-1).float(), 1.0).log_prob(Y.unsqueeze(-1))
    torch.testing.assert_close(torch.tensor(-loss), joint.logsumexp(-1).sum(), rtol=1e-5, atol=1e-5)
    found = guide.marginals()["z"]
    torch.testing.assert_close(found, joint.softmax(-1) if found.dim() == 2 else joint.softmax(-1)[:, 1], rtol=1e-4, atol=1e-5)


def two_or_five(number, probability, count):
    if count > number:
        return torch.zeros(())
    return dist.Binomial(number, torch.tensor(probability)).log_prob(torch.tensor(float(count))).exp()
