"""What lands in which group: computed values, factors, reparametrised latents, missing data."""

from __future__ import annotations

import functools
import math
import warnings

import arviz as az
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from pyro.infer.reparam import LocScaleReparam, TransformReparam
from pyro.nn import PyroModule

from pyro_truncated import AutoTruncated, to_arviz
from pyro_truncated.utils.arviz_compat import ARVIZ_V1, get_dataset, group_names

RATE, SHIFT = 0.3, 2.0


def guide_list(model, names, **kwargs):
    guide = AutoGuideList(model)
    guide.append(AutoNormal(poutine.block(model, expose=names), init_scale=0.2))
    guide.append(AutoTruncated(model, **kwargs))
    return guide


def variables(idata, group):
    return set(get_dataset(idata, group).data_vars) if group in group_names(idata) else set()


def likelihood(y, mu):
    """Log likelihoods of a mixture of two normals, by hand."""
    terms = [math.log(p) + dist.Normal(mu + shift, 1.0).log_prob(y) for p, shift in ((1 - RATE, 0.0), (RATE, SHIFT))]
    return torch.stack(terms).logsumexp(0)


def described(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    pyro.deterministic("double", 2 * mu)
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Bernoulli(RATE))
        mean = pyro.deterministic("mean", mu + SHIFT * z)
        pyro.factor("penalty", -0.5 * z)
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


@pytest.mark.slow
def test_computed_values_belong_to_the_posterior_and_factors_nowhere(generator):
    y = torch.randn(8, generator=generator)
    idata = to_arviz(described, guide_list(described, ["mu"], num_states=2), y, num_samples=5, seed=0)
    assert variables(idata, "posterior") == {"z_index", "mu", "z", "double", "mean"}
    for group in ("observed_data", "posterior_predictive", "prior_predictive", "marginal_predictive", "log_likelihood"):
        assert variables(idata, group) == {"y"}
    assert variables(idata, "prior") == {"mu", "z", "double", "mean"}
    posterior = get_dataset(idata, "posterior")
    np.testing.assert_allclose(posterior["double"], 2 * posterior["mu"], rtol=1e-6)
    np.testing.assert_allclose(posterior["mean"], posterior["mu"] + SHIFT * posterior["z"], rtol=1e-5)
    # Its event takes in the plate unless told otherwise; the name says data all the same.
    assert posterior["mean"].dims == ("chain", "draw", "data")
    prior = get_dataset(idata, "prior")
    np.testing.assert_allclose(prior["mean"], prior["mu"] + SHIFT * prior["z"], rtol=1e-5)
    # The factor's density stays in the likelihood.
    mu = torch.from_numpy(posterior["mu"].values)[..., None]
    terms = [math.log(p) - 0.5 * z + dist.Normal(mu + SHIFT * z, 1.0).log_prob(y) for p, z in ((1 - RATE, 0), (RATE, 1))]
    np.testing.assert_allclose(get_dataset(idata, "log_likelihood")["y"], torch.stack(terms).logsumexp(0), rtol=1e-5)
    assert list(az.summary(idata, var_names=["double"], kind="stats").index) == ["double"]


def test_computed_values_of_models_with_states_alone(generator):
    y = torch.randn(6, generator=generator)

    def model(y):
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.5, 0.3])))
            mean = pyro.deterministic("mean", z * torch.tensor([1.0]).expand(len(y)), event_dim=0)
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    idata = to_arviz(model, AutoTruncated(model, 3), y, num_samples=4, num_predictive=0)
    posterior = get_dataset(idata, "posterior")
    assert posterior["mean"].dims == ("chain", "draw", "data")
    np.testing.assert_allclose(posterior["mean"], posterior["z"])


def test_a_likelihood_may_be_a_factor(generator):
    y = torch.poisson(torch.full((20,), 2.0), generator=generator)

    def model(y):
        with pyro.plate("data", len(y)):
            zero = pyro.sample("zero", dist.Bernoulli(RATE))
            pyro.factor("counts", torch.where(zero > 0, torch.where(y == 0, 0.0, -math.inf), dist.Poisson(2.0).log_prob(y)))

    idata = to_arviz(model, AutoTruncated(model, 2), y, num_samples=3)
    expected = torch.where(y == 0, RATE, 0.0) + (1 - RATE) * dist.Poisson(2.0).log_prob(y).exp()
    np.testing.assert_allclose(get_dataset(idata, "log_likelihood")["counts"].values[0, 0], expected.log(), rtol=1e-5)
    assert variables(idata, "posterior") == {"zero", "zero_index"}
    assert not variables(idata, "observed_data")
    assert not variables(idata, "posterior_predictive")


def test_factors_join_the_data_beside_them_where_states_are_global(generator):
    y = torch.randn(5, generator=generator)

    def model(y):
        z = pyro.sample("z", dist.Bernoulli(torch.full((2,), 0.5)).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.factor("tilt", 0.3 * z.sum(-1, keepdim=True).expand(*z.shape[:-1], len(y)))
            pyro.sample("y", dist.Normal(z.sum(-1, keepdim=True), 1.0), obs=y)

    idata = to_arviz(model, AutoTruncated(model, 4), y, num_samples=3, num_predictive=0)
    total = torch.from_numpy(get_dataset(idata, "posterior")["z"].values).sum(-1, keepdim=True).float()
    assert variables(idata, "log_likelihood") == {"y"}
    np.testing.assert_allclose(get_dataset(idata, "log_likelihood")["y"], dist.Normal(total, 1.0).log_prob(y) + 0.3 * total, rtol=1e-5)


def test_data_with_a_point_mass_for_their_likelihood_are_data():
    total = torch.tensor([3.0, 4.0])

    def model(total):
        with pyro.plate("throw", len(total)):
            dice = pyro.sample("dice", dist.Categorical(torch.ones(2, 3) / 3).to_event(1))
            pyro.sample("total", dist.Delta((dice + 1.0).sum(-1)), obs=total)

    idata = to_arviz(model, AutoTruncated(model, 9), total, num_samples=20, seed=0)
    assert variables(idata, "observed_data") == variables(idata, "log_likelihood") == {"total"}
    np.testing.assert_allclose(get_dataset(idata, "log_likelihood")["total"].values[0, 0], np.log([2 / 9, 3 / 9]), rtol=1e-5)
    drawn = get_dataset(idata, "posterior")["dice"].values.sum(-1) + 2
    np.testing.assert_array_equal(drawn, np.broadcast_to(total, drawn.shape))


@pytest.mark.slow
@pytest.mark.parametrize("reparam", [LocScaleReparam(0.0), TransformReparam()])
def test_reparametrised_latents_belong_to_the_posterior(generator, reparam):
    y = torch.randn(6, generator=generator)
    is_scaled = isinstance(reparam, LocScaleReparam)
    auxiliary = "mu_decentered" if is_scaled else "mu_base"

    def plain(y):
        base = dist.Normal(1.0, 3.0) if is_scaled else dist.LogNormal(0.0, 1.0)
        mu = pyro.sample("mu", base)
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(RATE))
            pyro.sample("y", dist.Normal(mu + SHIFT * z, 1.0), obs=y)

    model = poutine.reparam(plain, config={"mu": reparam})
    idata = to_arviz(model, guide_list(model, [auxiliary], num_states=2), y, num_samples=5, seed=0)
    assert variables(idata, "posterior") == {"z_index", "z", "mu", auxiliary}
    assert variables(idata, "observed_data") == variables(idata, "posterior_predictive") == {"y"}
    posterior = get_dataset(idata, "posterior")
    expected = 1 + 3 * posterior[auxiliary] if is_scaled else np.exp(posterior[auxiliary])
    np.testing.assert_allclose(posterior["mu"], expected, rtol=1e-5)
    mu = torch.from_numpy(posterior["mu"].values)[..., None]
    np.testing.assert_allclose(get_dataset(idata, "log_likelihood")["y"], likelihood(y, mu), rtol=1e-5)


def imputed(x, is_seen):
    mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Bernoulli(RATE))
        pyro.sample("x", dist.Normal(mu + SHIFT * z, 1.0), obs=x, obs_mask=is_seen)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("covered", [True, False])
def test_missing_data_are_imputed_in_the_posterior(generator, covered):
    x, is_seen = torch.randn(8, generator=generator), torch.arange(8) % 3 > 0
    guide = guide_list(imputed, ["mu", "x_unobserved"] if covered else ["mu"], num_states=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no guide covers the latents")
        idata = to_arviz(imputed, guide, x, is_seen, num_samples=20, num_predictive=2, seed=0)
    assert variables(idata, "posterior") == {"z_index", "mu", "z", "x", "x_unobserved"}
    for group in ("observed_data", "posterior_predictive", "log_likelihood"):
        assert variables(idata, group) == {"x_observed"}
    # Of entries that nobody has seen there is nothing to be compared, or left out.
    for group in ("observed_data", "posterior_predictive", "log_likelihood"):
        np.testing.assert_array_equal(get_dataset(idata, group)["data"], is_seen.nonzero().squeeze(-1))
    np.testing.assert_allclose(get_dataset(idata, "observed_data")["x_observed"], x[is_seen])
    posterior = get_dataset(idata, "posterior")
    completed = posterior["x"].values
    np.testing.assert_allclose(completed[..., is_seen], np.broadcast_to(x[is_seen], completed[..., is_seen].shape))
    np.testing.assert_allclose(completed[..., ~is_seen], posterior["x_unobserved"].values[..., ~is_seen])
    # The likelihood is that of what was seen, with states and missing values summed out.
    mu = torch.from_numpy(posterior["mu"].values)[..., None]
    found = get_dataset(idata, "log_likelihood")
    np.testing.assert_allclose(found["x_observed"], likelihood(x[is_seen], mu), rtol=1e-4, atol=1e-5)
    assert "conditional_on" not in found.attrs
    if not covered:
        # Missing values come from the mixture that their states were drawn from: 80 draws of three values, six standard errors.
        rest = completed[..., ~is_seen] - posterior["mu"].values[..., None]
        sd = math.sqrt(1 + RATE * (1 - RATE) * SHIFT**2)
        assert abs(rest.mean() - RATE * SHIFT) < 6 * sd / math.sqrt(rest.size)
        stats = get_dataset(idata, "sample_stats")
        np.testing.assert_allclose(stats["log_weight"], stats["lp"] - stats["log_q"])
        assert bool(np.isfinite(stats["log_weight"]).all())


@pytest.mark.parametrize("is_event", [False, True])
def test_masked_entries_are_no_data(generator, is_event):
    """Under ``poutine.mask``, or in a distribution whose masked entries are then one event."""
    y, is_seen = torch.randn(4, 2, generator=generator), torch.tensor([[True, True], [False, False], [True, False], [True, True]])

    def model(y):
        with pyro.plate("data", len(y), dim=-2):
            z = pyro.sample("z", dist.Bernoulli(RATE))
            with pyro.plate("view", 2, dim=-1), poutine.mask(mask=is_seen):
                pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    def model_of_events(y):
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(RATE))
            pyro.sample("y", dist.Normal(z.unsqueeze(-1), torch.ones(2)).mask(is_seen).to_event(1), obs=y)

    model = model_of_events if is_event else model
    idata = to_arviz(model, AutoTruncated(model, 2), y, num_samples=2)
    observed = get_dataset(idata, "observed_data")["y"]
    assert observed["data"].values.tolist() == get_dataset(idata, "log_likelihood")["data"].values.tolist() == [0, 2, 3]
    np.testing.assert_array_equal(observed, torch.where(is_seen, y, torch.nan)[[0, 2, 3]])
    assert get_dataset(idata, "posterior")["z"].sizes["data"] == 4


@pytest.mark.slow
def test_names_that_arviz_or_files_cannot_have(generator, tmp_path):
    y = torch.randn(3, 2, generator=generator)

    def model(y):
        draw = pyro.sample("draw", dist.Normal(0.0, 1.0))
        mean = pyro.sample("scope/mean.a[0]", dist.Normal(0.0, 1.0))
        with pyro.plate("chain", 3, dim=-2):
            z = pyro.sample("z", dist.Bernoulli(RATE))
            with pyro.plate("state", 2, dim=-1):
                pyro.sample("y", dist.Normal(draw + mean + z, 1.0), obs=y)

    idata = to_arviz(model, guide_list(model, ["draw", "scope/mean.a[0]"], num_states=2), y, num_samples=2)
    posterior = get_dataset(idata, "posterior")
    assert set(posterior.data_vars) == {"draw_site", "scope.mean.a[0]", "z", "z_index"}
    assert posterior["z"].dims == ("chain", "draw", "chain_plate")
    assert get_dataset(idata, "observed_data")["y"].dims == ("chain_plate", "state_plate")
    assert get_dataset(idata, "truncated_posterior")["weights"].dims == ("chain_plate", "state")
    idata.to_netcdf(tmp_path / "fit.nc")
    assert get_dataset(az.from_netcdf(tmp_path / "fit.nc"), "posterior")["z"].shape == (4, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda model, y: (functools.partial(model, y), ()), lambda model, y: (Wrapped(model), (y,))])
def test_models_in_wrappers(generator, wrap):
    model, args = wrap(described, torch.randn(4, generator=generator))
    guide = guide_list(model, ["mu"], num_states=2)
    idata = to_arviz(model, guide, *args, num_samples=2)
    assert variables(idata, "posterior") == {"z_index", "mu", "z", "double", "mean"}
    assert get_dataset(idata, "log_likelihood")["y"].shape == (4, 2, 4)


class Wrapped(PyroModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, y):
        return self.model(y)


@pytest.mark.nightly
@pytest.mark.skipif(ARVIZ_V1, reason="names and defaults of ArviZ 0.2x; 1.x has its own test")
def test_arviz_runs_on_the_defaults_without_complaint(generator):
    y = torch.cat([torch.randn(8, generator=generator), SHIFT + torch.randn(8, generator=generator)])
    idata = to_arviz(described, guide_list(described, ["mu"], num_states=2), y, seed=0)
    assert dict(get_dataset(idata, "posterior")["mu"].sizes) == {"chain": 4, "draw": 125}
    assert get_dataset(idata, "posterior_predictive").sizes["draw"] == 125
    # Warnings are errors in this suite. (Of variables that do not vary, a state that is certain say, ArviZ complains always.)
    summary = az.summary(idata, var_names=["mu", "double"])
    assert bool((summary["r_hat"] < 1.1).all())
    assert bool(np.isfinite(summary.values).all())
    assert az.loo(idata).n_data_points == az.waic(idata).n_data_points == len(y)
    assert az.loo_pit(idata, y="y").shape == y.shape
    for draw in (az.plot_ppc, az.plot_trace, az.plot_forest, az.plot_posterior):
        draw(idata, **({} if draw is az.plot_ppc else {"var_names": ["mu", "double"]}))
        plt.close("all")
    az.plot_loo_pit(idata, y="y")
    plt.close("all")
    assert float(az.ess(idata, var_names=["mu"])["mu"]) > 100
    assert float(az.rhat(idata, var_names=["mu"])["mu"]) < 1.1
