"""Cross-validation on the marginal likelihood, transforms and p-values: against closed forms and their distributions."""

from __future__ import annotations

import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from matplotlib.figure import Figure
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from scipy import stats

from pyro_truncated import AutoTruncated
from pyro_truncated.diagnostics import (
    TruncationWarning,
    compare_models,
    cross_validate,
    loo_pit,
    plot_comparison,
    plot_forest,
    plot_loo_pit,
    plot_pareto_k,
    predictive_p_values,
    to_arviz,
)
from pyro_truncated.utils.arviz_compat import get_dataset, make_idata

WEIGHT = torch.tensor([[2.0, 0.0], [0.0, 3.0]])


def fixed(y, noise=0.5):
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((2,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(s @ WEIGHT.mT, noise).to_event(1), obs=y)


def draw(num_data, generator):
    states = (torch.rand(num_data, 2, generator=generator) < 0.3).float()
    return states @ WEIGHT.mT + 0.5 * torch.randn(num_data, 2, generator=generator)


def converted(model, y, guide=None, **kwargs):
    guide = guide or AutoTruncated(model, 4)
    return to_arviz(model, guide, y, **{"num_samples": 100, "num_chains": 1, "seed": 0, **kwargs})


def shifted(y):
    shift = pyro.sample("shift", dist.Normal(torch.zeros(2), 10.0).to_event(1))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((2,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(s @ WEIGHT.mT + shift, 0.5).to_event(1), obs=y)


@pytest.fixture
def bayesian(generator):
    """A guide that holds the right posterior of the shift, nearly: its standard deviation is that of the mean of the data."""
    y = draw(60, generator)
    guide = AutoGuideList(shifted)
    guide.append(AutoNormal(poutine.block(shifted, expose=["shift"]), init_scale=0.065))
    guide.append(AutoTruncated(shifted, 4))
    guide(y)
    guide[0].locs.shift = torch.zeros(2)
    return converted(shifted, y, guide, num_samples=40, num_predictive=4), y


@pytest.mark.slow
def test_plug_in_estimates_are_the_log_likelihood_and_say_so(generator):
    y = draw(30, generator)
    result = cross_validate(converted(fixed, y))
    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 2)
    scores = dist.Bernoulli(torch.full((2,), 0.3)).log_prob(states).sum(1) + dist.Normal(states @ WEIGHT.mT, 0.5).log_prob(y[:, None]).sum(
        -1
    )
    np.testing.assert_allclose(result.pointwise, scores.logsumexp(1), rtol=1e-5)
    assert result.elpd == pytest.approx(float(scores.logsumexp(1).sum()), rel=1e-5)
    assert result.is_plug_in
    assert "point estimates" in result.caveats[0]


@pytest.mark.slow
def test_draws_of_parameters_give_the_cross_validation_of_the_marginal_likelihood(bayesian):
    idata, y = bayesian
    result = cross_validate(idata)
    likelihood = get_dataset(idata, "log_likelihood")["y"].values[0]
    # By hand, without smoothing: the harmonic mean of the likelihoods.
    expected = -(np.logaddexp.reduce(-likelihood, axis=0) - np.log(len(likelihood)))
    np.testing.assert_allclose(result.pointwise, expected, atol=0.1)
    assert not result.is_plug_in
    assert not result.conditional_on
    assert 0 < result.p_loo < 5
    assert float(np.max(result.pareto_k)) < 1
    assert get_dataset(idata, "log_prior")["shift"].shape == (1, 40)
    ax = Figure().subplots()
    plot_pareto_k(idata, ax)
    plot_forest(idata, ax)
    # The likelihood given drawn states is no ground for it: it exceeds the marginal one by what the states know.
    posterior = get_dataset(idata, "posterior")
    s, shift = torch.from_numpy(posterior["s"].values[0]).float(), torch.from_numpy(posterior["shift"].values[0])
    conditional = dist.Normal(s @ WEIGHT.mT + shift[:, None], 0.5).log_prob(y).sum(-1).numpy()
    flattering = -(np.logaddexp.reduce(-conditional, axis=0) - np.log(len(conditional))).sum()
    assert flattering > result.elpd + 20


@pytest.mark.slow
def test_comparison_prefers_the_right_noise_and_names_its_caveats(generator):
    y = draw(40, generator)

    def noisy(y):
        return fixed(y, noise=2.0)

    idatas = {"right": converted(fixed, y), "too noisy": converted(noisy, y)}
    with pytest.warns(TruncationWarning, match="right, too noisy: the parameters are point estimates"):
        table = compare_models(idatas)
    assert list(table.index) == ["right", "too noisy"]
    assert table["plug_in"].all()
    np.testing.assert_allclose(table["missing_nats"], 0, atol=1e-4)
    elpd = table["elpd_loo" if "elpd_loo" in table else "elpd"].astype(float)
    np.testing.assert_allclose(elpd, [cross_validate(idatas[name]).elpd for name in table.index])
    plot_comparison(table, Figure().subplots())
    with pytest.raises(TypeError, match="table must be what compare_models returns of several models; got "):
        plot_comparison(idatas["right"], Figure().subplots())
    idatas["too noisy"] = converted(noisy, y[:7])
    with pytest.raises(ValueError, match="idatas must be of the same data"):
        compare_models(idatas)
    with pytest.raises(ValueError, match="at least two models"):
        compare_models({"right": idatas["right"]})


@pytest.mark.slow
def test_truncation_that_matters_for_the_comparison_is_named(generator):
    y = draw(40, generator)
    full, cut = converted(fixed, y), converted(fixed, y, AutoTruncated(fixed, 1))
    with pytest.warns(TruncationWarning, match="lacks at least .* nats by truncation"):
        table = compare_models({"full": full, "cut": cut, "again": full})
    assert table.loc["cut", "missing_nats"] > 10


@pytest.mark.slow
def test_transforms_of_the_right_model_are_uniform(generator):
    transforms = loo_pit(converted(fixed, draw(400, generator)))
    assert transforms.shape == (400, 2)
    for feature in range(2):
        # False alarms at a rate of 2e-5 each; a hundred draws make the steps of the transforms visible, so it is conservative.
        assert stats.kstest(transforms[:, feature], "uniform").pvalue > 2e-5
    wrong = loo_pit(converted(lambda y: fixed(y, noise=2.0), draw(400, generator)))
    assert stats.kstest(wrong[:, 0], "uniform").pvalue < 1e-6


@pytest.mark.slow
def test_transforms_of_counts_are_uniform_too(generator):
    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.5)))
            pyro.sample("y", dist.Poisson(1.0 + 3.0 * s), obs=y)

    y = torch.poisson(1 + 3 * (torch.rand(400, generator=generator) < 0.5).float(), generator=generator)
    transforms = loo_pit(converted(model, y, AutoTruncated(model, 2)))
    assert transforms.shape == (400, 1)
    assert stats.kstest(transforms[:, 0], "uniform").pvalue > 2e-5


@pytest.mark.slow
def test_p_values_count_draws(generator):
    idata = converted(fixed, draw(50, generator))
    drawn = get_dataset(idata, "marginal_predictive")["y"].values[0]
    observed = get_dataset(idata, "observed_data")["y"].values
    found = predictive_p_values(idata, group="marginal_predictive")
    # Of 100 draws; the observed one counts by half.
    assert found["mean"] == pytest.approx(((drawn.mean((1, 2)) > observed.mean()).sum() + 0.5) / 101)
    assert predictive_p_values(idata, statistics={"size": np.size}) == {"size": 0.5}


def test_p_values_do_not_depend_on_the_unit_nor_claim_much_of_few_draws(generator):
    observed, drawn = draw(30, generator).numpy(), torch.randn(1, 200, 30, 2, generator=generator).numpy()
    found = []
    for unit in (1e-12, 1.0, 1e11):
        groups = {"observed_data": (("data", "y_dim_0"), observed), "posterior_predictive": (("chain", "draw", "data", "y_dim_0"), drawn)}
        idata = make_idata(**{name: xr.Dataset({"y": (dims, values * np.float32(unit))}) for name, (dims, values) in groups.items()})
        found.append(predictive_p_values(idata))
    assert found[0] == found[1] == found[2]
    assert 0 < found[1]["kurtosis"] < 1
    one = make_idata(**{name: xr.Dataset({"y": (dims, values[..., :1, :])}) for name, (dims, values) in groups.items()})
    assert predictive_p_values(one, statistics={"size": np.size})["size"] == 0.5
    few = make_idata(**{name: get_dataset(one, name).isel(draw=slice(1), missing_dims="ignore") for name in groups})
    assert all(0.2 < p < 0.8 for p in predictive_p_values(few).values())


def test_models_without_populations_compare(bayesian):
    idata, _ = bayesian
    groups = {name: get_dataset(idata, name) for name in ("posterior", "log_likelihood", "observed_data")}
    other = make_idata(**{**groups, "log_likelihood": groups["log_likelihood"] - 1})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = compare_models({"other": other, "first": make_idata(**groups)})
    assert list(table.index) == ["first", "other"]
    assert table["missing_nats"].isna().all()


@pytest.mark.parametrize("unit", [1e-15, 1e15])
def test_p_values_do_not_depend_on_the_unit(generator, unit):
    draws = {name: torch.randn(shape, generator=generator).numpy() for name, shape in (("observed", (40, 3)), ("drawn", (1, 25, 40, 3)))}
    found = []
    for scale in (np.float32(1), np.float32(unit)):
        predictive = xr.Dataset({"y": (("chain", "draw", "data", "feature"), scale * draws["drawn"])})
        observed = xr.Dataset({"y": (("data", "feature"), scale * draws["observed"])})
        found.append(predictive_p_values(make_idata(posterior_predictive=predictive, observed_data=observed)))
    assert found[0] == found[1]
    values = draws["observed"].ravel().astype(float)
    kurtosis = [stats.kurtosis(one.ravel().astype(float)) for one in draws["drawn"][0]]
    assert found[0]["kurtosis"] == pytest.approx((np.sum(np.array(kurtosis) > stats.kurtosis(values)) + 0.5) / 26)


@pytest.mark.slow
def test_predictive_groups_have_the_right_distributions(generator):
    y = draw(30, generator)
    idata = converted(fixed, y, num_samples=400, num_predictive=400)
    marginal, prior, posterior = (get_dataset(idata, f"{name}_predictive")["y"].values[0] for name in ("marginal", "prior", "posterior"))
    # Means over 400 draws of 30 points, all independent: six standard errors.
    for values in (marginal, prior):
        deviation = np.sqrt((0.21 * np.array([4.0, 9.0]) + 0.25) / (400 * 30))
        assert (np.abs(values.mean((0, 1)) - 0.3 * np.array([2.0, 3.0])) < 6 * deviation).all()
    expected = torch.from_numpy(get_dataset(idata, "truncated_posterior")["activation_prob"].values).float() @ WEIGHT.mT
    assert (np.abs(posterior.mean(0) - expected.numpy()) < 6 * np.sqrt((0.25 * 9 + 0.25) / 400)).all()
    # Each posterior-predictive draw goes with the draw of its states.
    states = torch.from_numpy(get_dataset(idata, "posterior")["s"].values[0]).float()
    residual = posterior - (states @ WEIGHT.mT).numpy()
    assert residual.std() == pytest.approx(0.5, rel=0.03)
    assert get_dataset(idata, "prior")["s"].dtype == np.int8


def test_missing_groups_are_named(generator):
    idata = converted(fixed, draw(5, generator), num_predictive=0)
    with pytest.raises(ValueError, match="no group marginal_predictive; call to_arviz with num_predictive > 0"):
        loo_pit(idata)


@pytest.mark.slow
def test_transforms_where_observations_are_missing(generator):
    y = draw(400, generator)
    is_missing = torch.rand(y.shape, generator=generator) < 0.3
    idata = converted(fixed, y)
    observed = get_dataset(idata, "observed_data").copy(deep=True)
    observed["y"].values[is_missing.numpy()] = np.nan
    groups = {name: get_dataset(idata, name) for name in ("log_likelihood", "marginal_predictive", "truncated_posterior")}
    idata = make_idata(**groups, observed_data=observed)
    transforms = loo_pit(idata)
    np.testing.assert_array_equal(np.isnan(transforms), is_missing.numpy())
    for feature in range(2):
        # False alarms at a rate of 2e-5 each.
        assert stats.kstest(transforms[~is_missing[:, feature].numpy(), feature], "uniform").pvalue > 2e-5
    ax = Figure().subplots()
    plot_loo_pit(idata, ax)
    seen = np.sort(transforms[~is_missing[:, 0].numpy(), 0])
    np.testing.assert_allclose(ax.lines[0].get_ydata()[100], (seen <= 0.5).mean() - 0.5)


@pytest.mark.slow
def test_transforms_where_states_are_global(generator):
    inputs = torch.randn(200, 2, generator=generator)

    def model(y):
        chosen = pyro.sample("chosen", dist.Bernoulli(torch.full((2,), 0.5)).to_event(1))
        with pyro.plate("data", len(inputs)):
            pyro.sample("y", dist.Normal((chosen * inputs).sum(-1), 1.0), obs=y)

    y = inputs[:, 0] + torch.randn(200, generator=generator)
    transforms = loo_pit(converted(model, y, AutoTruncated(model, 4)))
    assert transforms.shape == (200, 1)
    assert stats.kstest(transforms[:, 0], "uniform").pvalue > 2e-5


@pytest.mark.slow
def test_of_restarts_with_point_estimates_the_best_counts(generator):
    y = draw(30, generator)

    def noisy(y):
        return fixed(y, noise=2.0)

    both = converted([noisy, fixed], y, [AutoTruncated(noisy, 4), AutoTruncated(fixed, 4)])
    alone = converted(fixed, y)
    result = cross_validate(both)
    np.testing.assert_allclose(result.pointwise, cross_validate(alone).pointwise)
    assert (result.num_restarts, result.is_plug_in, result.p_loo) == (2, True, 0)
    assert "best of 2 restarts" in result.caveats[1]
    with pytest.warns(TruncationWarning, match="both: it is that of the best of 2 restarts"):
        table = compare_models({"both": both, "alone": alone})
    np.testing.assert_allclose(table["elpd_loo" if "elpd_loo" in table else "elpd"].astype(float), result.elpd)
    np.testing.assert_allclose(table["missing_nats"], 0, atol=1e-4)


@pytest.mark.nightly
def test_latents_of_data_points_make_no_posterior_of_the_parameters(generator):
    y = draw(20, generator)

    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((2,), 0.3)).to_event(1))
            shift = pyro.sample("shift", dist.Normal(torch.zeros(2), 0.3).to_event(1))
            pyro.sample("y", dist.Normal(s @ WEIGHT.mT + shift, 0.4).to_event(1), obs=y)

    def conditional(states, y):
        # Wider than the exact conditional by half: log joints are random, and unbiased as densities.
        rest = (y - states["s"].float() @ WEIGHT.mT) / 0.16
        precision = 1 / 0.16 + 1 / 0.09
        pyro.sample("shift", dist.Normal(rest / precision, 1.5 * precision**-0.5).to_event(1))

    idata = converted(model, y, AutoTruncated(model, 4, conditional=conditional), num_samples=200, num_predictive=0)
    result = cross_validate(idata)
    # y has the variance 0.16 + 0.09 = 0.25 given s: that of the other model.
    exact = cross_validate(converted(fixed, y)).pointwise
    assert result.is_plug_in
    assert result.num_restarts == 1
    # The relative variance of a weight is c^4 / (2 c^2 - 1) - 1 = 0.45 for c = 1.5 and two dimensions; six standard errors of the mean.
    np.testing.assert_allclose(result.pointwise, exact, atol=6 * (0.45 / 200) ** 0.5)
    likelihood = get_dataset(idata, "log_likelihood")["y"].values[0]
    np.testing.assert_allclose(np.exp(result.pointwise), np.exp(likelihood).mean(0))


def test_delta_guides_are_point_estimates(generator):
    y = draw(10, generator)
    guide = AutoGuideList(shifted)
    guide.append(AutoDelta(poutine.block(shifted, expose=["shift"])))
    guide.append(AutoTruncated(shifted, 4))
    idata = converted(shifted, y, guide, num_samples=5, num_predictive=0)
    assert get_dataset(idata, "posterior").attrs["point_estimates_only"] == 1
    assert cross_validate(idata).is_plug_in
