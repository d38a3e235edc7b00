"""ArviZ data of any SVI run: autoguides, functions, effects, enumerated models; against closed forms and enumeration."""

from __future__ import annotations

import itertools
import math

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalMessenger,
)

from pyro_truncated import AutoTruncated, ClosedForm, GibbsEM, GibbsGuide, GPSelect, Truncated_ELBO, diagnose, to_arviz
from pyro_truncated.diagnostics import convert_owner
from pyro_truncated.distributions import BinaryChains
from pyro_truncated.models import MaxSpikeSlabSparseCoding
from pyro_truncated.utils.arviz_compat import ARVIZ_V1, get_dataset, group_names

GUIDES = [AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal, AutoIAFNormal, AutoNormalMessenger]
LOC = torch.tensor([-1.0, 1.5])


@pytest.fixture
def inputs(generator):
    return torch.randn(12, 2, generator=generator)


@pytest.fixture
def y(inputs, generator):
    return inputs @ torch.tensor([1.0, -1.0]) + 0.5 * torch.randn(12, generator=generator)


def regression(inputs, y=None):
    with pyro.plate("feature", 2):
        weight = pyro.sample("weight", dist.Normal(0.0, 1.0))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    pyro.deterministic("precision", noise**-2)
    with pyro.plate("data", len(inputs)):
        pyro.sample("y", dist.Normal(inputs @ weight, noise), obs=y)


def trained(model, guide, *args, steps=3, elbo=None, **kwargs):
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), elbo or Trace_ELBO())
    for _ in range(steps):
        svi.step(*args, **kwargs)
    return guide


def log_prior(posterior):
    weight, noise = (torch.from_numpy(posterior[name].values) for name in ("weight", "noise"))
    return dist.Normal(0.0, 1.0).log_prob(weight).sum(-1) + dist.LogNormal(-1.0, 0.5).log_prob(noise)


@pytest.mark.slow
@pytest.mark.parametrize("make", GUIDES)
def test_autoguides(inputs, y, make):
    guide = trained(regression, make(regression), inputs, y=y)
    idata = to_arviz(regression, guide, inputs, y=y, num_samples=4, seed=0)
    groups = {"posterior", "sample_stats", "log_likelihood", "log_prior", "prior", "prior_predictive", "posterior_predictive"}
    assert set(group_names(idata)) == groups | {"observed_data", "constant_data"}
    posterior = get_dataset(idata, "posterior")
    assert set(posterior.data_vars) == {"weight", "noise", "precision"}
    assert posterior["weight"].dims == ("chain", "draw", "feature")
    assert posterior["weight"].shape == (4, 4, 2)
    np.testing.assert_allclose(posterior["precision"], posterior["noise"] ** -2.0, rtol=1e-4)
    weight, noise = (torch.from_numpy(posterior[name].values) for name in ("weight", "noise"))
    expected = dist.Normal(weight @ inputs.mT, noise.unsqueeze(-1)).log_prob(y)
    likelihood = get_dataset(idata, "log_likelihood")
    np.testing.assert_allclose(likelihood["y"], expected, rtol=1e-4, atol=1e-5)
    assert likelihood["y"].dims == ("chain", "draw", "data")
    assert "conditional_on" not in likelihood.attrs
    np.testing.assert_allclose(get_dataset(idata, "sample_stats")["lp"], expected.sum(-1) + log_prior(posterior), rtol=1e-4)
    assert get_dataset(idata, "constant_data")["inputs"].dims == ("data", "inputs_dim_0")
    assert posterior.attrs["point_estimates_only"] == 0
    assert posterior.attrs["inference_method"] == "variational"


def normal_guide(inputs, y=None):
    with pyro.plate("feature", 2):
        pyro.sample("weight", dist.Normal(LOC, 0.2))
    pyro.sample("noise", dist.LogNormal(pyro.param("loc", torch.tensor(-0.5)), 0.1))


@pytest.mark.slow
def test_guide_functions(inputs, y):
    idata = to_arviz(regression, normal_guide, inputs, y=y, num_samples=50, seed=0)
    posterior, stats = get_dataset(idata, "posterior"), get_dataset(idata, "sample_stats")
    weight, noise = (torch.from_numpy(posterior[name].values) for name in ("weight", "noise"))
    log_q = dist.Normal(LOC, 0.2).log_prob(weight).sum(-1) + dist.LogNormal(-0.5, 0.1).log_prob(noise)
    np.testing.assert_allclose(stats["log_q"], log_q.detach(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(stats["log_weight"], stats["lp"] - stats["log_q"])
    # 200 draws, six standard errors.
    assert (np.abs(posterior["weight"].mean(("chain", "draw")) - LOC.numpy()) < 6 * 0.2 / 200**0.5).all()
    assert posterior.attrs["guide"] == "normal_guide"


def test_point_estimates_say_so(inputs, y):
    guide = trained(regression, AutoDelta(regression), inputs, y=y)
    idata = to_arviz(regression, guide, inputs, y=y, num_samples=2)
    assert get_dataset(idata, "posterior").attrs["point_estimates_only"] == 1
    np.testing.assert_allclose(get_dataset(idata, "sample_stats")["log_q"], 0)


def test_lists_of_guides(inputs, y):
    guide = AutoGuideList(regression)
    guide.append(AutoNormal(poutine.block(regression, expose=["weight"])))
    guide.append(AutoDelta(poutine.block(regression, expose=["noise"])))
    idata = to_arviz(regression, trained(regression, guide, inputs, y=y), inputs, y=y, num_samples=3)
    assert set(get_dataset(idata, "posterior").data_vars) == {"weight", "noise", "precision"}
    assert get_dataset(idata, "posterior").attrs["point_estimates_only"] == 0


def test_restarts_of_any_guide_become_chains(inputs, y):
    guides = [trained(regression, AutoNormal(regression), inputs, y=y) for _ in range(2)]
    idata = to_arviz(regression, guides, inputs, y=y, num_samples=3)
    assert dict(get_dataset(idata, "posterior")["noise"].sizes) == {"chain": 2, "draw": 3}


def mixture(y):
    loc = pyro.sample("loc", dist.Normal(LOC, 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        kind = pyro.sample("kind", dist.Categorical(torch.tensor([0.3, 0.7])))
        pyro.sample("y", dist.Normal(loc[..., kind] if loc.dim() == 1 else loc.gather(-1, kind), 1.0), obs=y)


def mixture_terms(posterior, y):
    loc = torch.from_numpy(posterior["loc"].values).unsqueeze(-2)
    return dist.Normal(loc, 1.0).log_prob(y.unsqueeze(-1)) + torch.tensor([0.3, 0.7]).log()


@pytest.mark.slow
def test_enumerated_latents_of_data_points_are_summed_out_and_drawn_from_their_posterior(y):
    model = config_enumerate(mixture)
    guide = AutoNormal(poutine.block(mixture, hide=["kind"]), init_scale=0.1)
    guide = trained(model, guide, y, elbo=TraceEnum_ELBO(max_plate_nesting=1))
    idata = to_arviz(model, guide, y, num_samples=25, num_predictive=1, seed=0)
    posterior = get_dataset(idata, "posterior")
    assert posterior["kind"].dims == ("chain", "draw", "data")
    assert posterior["kind"].dtype == np.int8
    terms = mixture_terms(posterior, y)
    np.testing.assert_allclose(get_dataset(idata, "log_likelihood")["y"], terms.logsumexp(-1), rtol=1e-4, atol=1e-5)
    # 100 draws; seven standard errors of each of 12 means.
    probability = terms.softmax(-1)[..., 1].numpy()
    error = np.sqrt((probability * (1 - probability)).mean((0, 1)) / 100)
    assert (np.abs(posterior["kind"].values.mean((0, 1)) - probability.mean((0, 1))) < 7 * error).all()
    stats = get_dataset(idata, "sample_stats")
    loc = torch.from_numpy(posterior["loc"].values)
    log_q = torch.distributions.Normal(guide.locs.loc, guide.scales.loc).log_prob(loc).sum(-1)
    evidence = terms.logsumexp(-1).sum(-1) + dist.Normal(LOC, 1.0).log_prob(loc).sum(-1)
    np.testing.assert_allclose(stats["log_weight"], (evidence - log_q).detach(), rtol=1e-4, atol=1e-4)
    assert get_dataset(idata, "marginal_predictive")["y"].shape == (4, 1, 12)


@pytest.mark.nightly
def test_enumerated_guides_and_truncated_ones_of_all_states_agree(y):
    stock = AutoNormal(poutine.block(mixture, hide=["kind"]), init_scale=0.1)
    truncated = AutoGuideList(mixture)
    truncated.append(AutoNormal(poutine.block(mixture, hide=["kind"]), init_scale=0.1))
    truncated.append(AutoTruncated(mixture, 2))
    stock(y), truncated(y)
    truncated[0].locs.loc.data.copy_(stock.locs.loc.data)
    first, second = (to_arviz(mixture, guide, y, num_samples=75, num_predictive=0, seed=0) for guide in (stock, truncated))
    # Independent draws of the same distribution: standard deviations are at most 0.5; six standard errors.
    for group, name in (("log_likelihood", "y"), ("posterior", "kind")):
        one, other = (get_dataset(data, group)[name].mean(("chain", "draw")) for data in (first, second))
        np.testing.assert_allclose(one, other, atol=6 * 0.5 * (2 / 300) ** 0.5)


def chain_model(y):
    stay = pyro.sample("stay", dist.Beta(5.0, 2.0))
    with pyro.plate("sequence", len(y)):
        state = torch.zeros((), dtype=torch.long)
        for t in pyro.markov(range(y.shape[1])):
            state = pyro.sample(f"state_{t}", dist.Bernoulli(torch.where(state > 0, stay, 1 - stay))).long()
            pyro.sample(f"y_{t}", dist.Normal(2.0 * state, 1.0), obs=y[:, t])


@pytest.mark.slow
def test_enumerated_markov_chains(generator):
    y = torch.randn(3, 4, generator=generator) + 1
    guide = AutoNormal(poutine.block(chain_model, expose=["stay"]))
    idata = to_arviz(config_enumerate(chain_model), guide, y, num_samples=2, num_predictive=1, seed=0)
    likelihood = get_dataset(idata, "log_likelihood")
    assert list(likelihood.data_vars) == ["y_0_y_1_y_2_y_3"]
    for draw in range(2):
        stay = float(get_dataset(idata, "posterior")["stay"][1, draw])
        for row in range(3):
            paths = []
            for path in itertools.product((0, 1), repeat=4):
                steps = zip((0, *path[:-1]), path, strict=True)
                prior = sum(math.log(stay if before == after else 1 - stay) for before, after in steps)
                paths.append(prior + float(dist.Normal(2.0 * torch.tensor(path), 1.0).log_prob(y[row]).sum()))
            found = float(likelihood["y_0_y_1_y_2_y_3"][1, draw, row])
            assert found == pytest.approx(np.logaddexp.reduce(paths), abs=1e-4)
    assert get_dataset(idata, "posterior")["state_3"].dims == ("chain", "draw", "sequence")


def test_enumerated_latents_outside_of_data_points_are_parameters(y):
    def model(y):
        kind = pyro.sample("kind", dist.Categorical(torch.tensor([0.3, 0.7])))
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(LOC[kind] + shift, 1.0), obs=y)

    guide = AutoNormal(poutine.block(model, expose=["shift"]))
    idata = to_arviz(config_enumerate(model), guide, y, num_samples=5, num_predictive=1, seed=0)
    posterior = get_dataset(idata, "posterior")
    mean = LOC[torch.from_numpy(posterior["kind"].values).long()] + torch.from_numpy(posterior["shift"].values)
    expected = dist.Normal(mean.unsqueeze(-1), 1.0).log_prob(y)
    np.testing.assert_allclose(get_dataset(idata, "log_likelihood")["y"], expected, rtol=1e-4, atol=1e-5)
    assert "marginal_predictive" not in group_names(idata)


@pytest.mark.slow
def test_missing_data_beside_stock_guides(y):
    is_seen = torch.arange(12) % 3 > 0

    def model(y, is_seen):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y, obs_mask=is_seen)

    guide = AutoNormal(poutine.block(model, expose=["loc"]), init_scale=0.1)
    idata = to_arviz(model, guide, y, is_seen, num_samples=50, seed=0)
    posterior, likelihood = get_dataset(idata, "posterior"), get_dataset(idata, "log_likelihood")
    assert set(posterior.data_vars) == {"loc", "y", "y_unobserved"}
    loc = torch.from_numpy(posterior["loc"].values).unsqueeze(-1)
    np.testing.assert_allclose(likelihood["y_observed"], dist.Normal(loc, 1.0).log_prob(y[is_seen]), rtol=1e-4, atol=1e-5)
    assert "conditional_on" not in likelihood.attrs
    stats = get_dataset(idata, "sample_stats")
    log_q = torch.distributions.Normal(guide.locs.loc, guide.scales.loc).log_prob(loc.squeeze(-1))
    evidence = dist.Normal(loc, 1.0).log_prob(y[is_seen]).sum(-1) + dist.Normal(0.0, 1.0).log_prob(loc.squeeze(-1))
    np.testing.assert_allclose(stats["log_weight"], (evidence - log_q).detach(), rtol=1e-4, atol=1e-4)


def test_latents_of_single_observations_are_named_where_the_likelihood_depends_on_them(y):
    def model(y):
        spread = pyro.sample("spread", dist.LogNormal(0.0, 0.3))
        with pyro.plate("school", len(y)):
            effect = pyro.sample("effect", dist.Normal(0.0, spread))
            pyro.sample("y", dist.Normal(effect, 1.0), obs=y)

    idata = to_arviz(model, trained(model, AutoNormal(model), y), y, num_samples=5)
    likelihood = get_dataset(idata, "log_likelihood")
    assert likelihood.attrs["conditional_on"] == "effect"
    assert set(get_dataset(idata, "log_prior").data_vars) == {"spread"}
    assert get_dataset(idata, "marginal_predictive")["y"].shape == (4, 5, 12)


def test_latents_shared_by_observations_are_parameters(generator):
    y = (torch.rand(5, 3, generator=generator) < 0.5).float()

    def model(y):
        persons, items = pyro.plate("person", 5, dim=-2), pyro.plate("item", 3, dim=-1)
        with persons:
            ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
        with items:
            difficulty = pyro.sample("difficulty", dist.Normal(0.0, 1.0))
        with persons, items:
            pyro.sample("y", dist.Bernoulli(logits=ability - difficulty), obs=y)

    idata = to_arviz(model, trained(model, AutoNormal(model), y), y, num_samples=5)
    posterior, likelihood = get_dataset(idata, "posterior"), get_dataset(idata, "log_likelihood")
    # Zeros and ones are counted, not smoothed.
    assert all(np.issubdtype(get_dataset(idata, group)["y"].dtype, np.integer) for group in ("observed_data", "posterior_predictive"))
    np.testing.assert_array_equal(get_dataset(idata, "observed_data")["y"], y)
    assert posterior["ability"].dims == ("chain", "draw", "person")
    assert posterior["difficulty"].dims == ("chain", "draw", "item")
    assert likelihood["y"].dims == ("chain", "draw", "person", "item")
    assert "conditional_on" not in likelihood.attrs
    assert posterior.attrs["point_estimates_only"] == 0


def test_latents_that_nobody_infers_are_refused(inputs, y):
    with pytest.raises(ValueError, match=r"no distribution for the latents \['noise'\].*from their prior"):
        to_arviz(regression, AutoNormal(poutine.block(regression, hide=["noise"])), inputs, y=y)


def test_latents_of_data_points_in_states_of_the_whole_model_are_given_and_named():
    y = torch.tensor([0.0, 2.0, 5.0])

    def model(y):
        k = pyro.sample("k", dist.Categorical(torch.ones(3) / 3))
        with pyro.plate("data", len(y)):
            b = pyro.sample("b", dist.Bernoulli(0.3))
            pyro.sample("y", dist.Poisson(1.0 + k + 2 * b), obs=y)

    guide = AutoTruncated(model, num_states=24)
    guide.setup(y)
    idata = to_arviz(model, guide, y, num_samples=50, seed=0)
    posterior, likelihood = get_dataset(idata, "posterior"), get_dataset(idata, "log_likelihood")
    rate = torch.as_tensor((1.0 + posterior["k"] + 2 * posterior["b"]).values)
    assert torch.allclose(torch.as_tensor(likelihood["y"].values).float(), dist.Poisson(rate).log_prob(y).float(), atol=1e-5)
    assert likelihood.attrs["conditional_on"] == "b"
    assert list(get_dataset(idata, "log_prior")) == ["k"]
    # Each rate of a new data point is 1.6 on average, and k by its posterior. Five standard errors of 200 draws.
    rates = torch.arange(1.0, 4.0).unsqueeze(-1)
    evidence = (0.7 * dist.Poisson(rates).log_prob(y).exp() + 0.3 * dist.Poisson(rates + 2).log_prob(y).exp()).prod(1)
    expected = 1.6 + float((evidence / evidence.sum()) @ torch.arange(3.0))
    assert float(get_dataset(idata, "marginal_predictive")["y"].mean()) == pytest.approx(expected, abs=0.5)


@pytest.mark.slow
def test_gibbs_guides(generator):
    model = MaxSpikeSlabSparseCoding(4, 3).double()
    y = 3 * torch.rand(6, 4, generator=generator, dtype=torch.float64)
    model.initialize(y)
    guide = GibbsGuide(model)
    SVI(model, guide, ClosedForm(model), GibbsEM(GPSelect(2))).step(y)
    idata = to_arviz(model, guide, y, num_samples=3, num_predictive=0)
    posterior, likelihood = get_dataset(idata, "posterior"), get_dataset(idata, "log_likelihood")
    assert posterior["s"].dims == ("chain", "draw", "data", "s_dim_0")
    assert posterior["s"].dtype == np.int8
    assert likelihood["y"].dims == ("chain", "draw", "data")
    assert likelihood.attrs["conditional_on"] == "s, z"


SWITCH = torch.tensor([[0.8, 0.2], [0.3, 0.7]], dtype=torch.float64)


def steps(y):
    """A chain of four steps, whose nodes have sets."""
    height = pyro.sample("height", dist.Normal(torch.tensor(1.0, dtype=torch.float64), 0.5))
    with pyro.plate("data", 6):
        z = torch.tensor(0)
        for t in range(3):
            z = pyro.sample(f"z_{t}", dist.Categorical(SWITCH[z]))
            pyro.sample(f"y_{t}", dist.Normal(height * z, 0.6), obs=y[t])


def chains(y):
    height = pyro.sample("height", dist.Normal(torch.tensor(1.0, dtype=torch.float64), 0.5))
    with pyro.plate("data", 6):
        z = pyro.sample("z", BinaryChains(SWITCH[0, 1:], SWITCH.unsqueeze(0), num_steps=3))
        pyro.sample("y", dist.Normal(height * z.squeeze(-1), 0.6).to_event(1), obs=y.mT)


@pytest.mark.parametrize("model", [steps, chains])
def test_states_of_sets_are_summed_out_of_the_likelihood_of_each_data_point(model, generator):
    """They are as in an enumeration of all states of a data point, under each draw of the other latents."""
    y = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    guide = AutoGuideList(model)
    guide.append(AutoNormal(poutine.block(model, expose=["height"])))
    guide.append(AutoTruncated(model, num_states=4))
    trained(model, guide, y, elbo=Truncated_ELBO())
    idata = to_arviz(model, guide, y, num_samples=5, num_chains=1, num_predictive=0)
    likelihood = get_dataset(idata, "log_likelihood")
    assert "conditional_on" not in likelihood.attrs
    (values,) = likelihood.data_vars.values()
    assert values.dims == ("chain", "draw", "data")
    for height, value in zip(get_dataset(idata, "posterior")["height"].values.ravel(), values.values[0], strict=True):
        total = []
        for path in itertools.product((0, 1), repeat=3):
            prior = [SWITCH[before, now] for before, now in itertools.pairwise((0, *path))]
            total.append(sum(map(torch.log, prior)) + dist.Normal(height * torch.tensor(path).double(), 0.6).log_prob(y.mT).sum(-1))
        np.testing.assert_allclose(value, torch.stack(total).logsumexp(0).numpy(), rtol=1e-5)


def test_subsamples_are_refused(y):
    def model(y, batch_size=None):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y), subsample_size=batch_size) as rows:
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y[rows])

    guide = trained(model, AutoNormal(model), y, batch_size=4)
    with pytest.raises(ValueError, match="needs all 12 data points; the model subsampled 4 of them in data"):
        to_arviz(model, guide, y, batch_size=4)
    assert get_dataset(to_arviz(model, guide, y, num_samples=2), "log_likelihood")["y"].shape == (4, 2, 12)


@pytest.mark.nightly
def test_arviz_and_the_verdict_take_any_guide(inputs, y, capsys):
    guide = trained(regression, AutoMultivariateNormal(regression, init_scale=0.1), inputs, y=y)
    idata = to_arviz(regression, guide, inputs, y=y, seed=0)
    assert len(az.summary(idata)) == 4
    if not ARVIZ_V1:
        assert az.loo_pit(idata, y="y").shape == (12,)
    diagnose(idata, None, warn=False)
    assert "Pareto index of the guide" in capsys.readouterr().out
    guide = trained(regression, AutoDelta(regression), inputs, y=y)
    verdict = diagnose(to_arviz(regression, guide, inputs, y=y, num_samples=2), None)
    assert "is a point estimate" in verdict.remarks[0]


class Owner:
    """A user's object that holds a posterior of its own."""

    def guide(self, y):
        """What SVI trains."""


class Heir(Owner):
    pass


def test_classes_of_ones_own_say_how_they_become_data():
    owner, y = Heir(), torch.ones(3)
    with pytest.raises(TypeError, match="no function is registered that converts a Heir"):
        convert_owner(owner, y)
    convert_owner.register(
        Owner, lambda owner, y, *, num_samples, num_chains, seed, scale=1.0: (owner, y, num_samples, num_chains, seed, scale)
    )
    assert to_arviz(owner, y, num_samples=7, seed=1) == (owner, y, 7, 4, 1, 1.0)
    assert to_arviz(lambda y: None, owner.guide, y, num_chains=2, scale=3.0) == (owner, y, 125, 2, None, 3.0)
    with pytest.raises(TypeError, match=r"Heir converts itself and takes num_samples, num_chains and seed only; got also \['coords'\]"):
        to_arviz(owner, y, coords={})
