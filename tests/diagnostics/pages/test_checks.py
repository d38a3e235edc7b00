"""The report agrees with its parts; good fits pass, bad ones warn and say what to change."""

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
from pyro.infer.autoguide import AutoGuideList, AutoNormal

from pyro_truncated import AutoTruncated, ExhaustiveSearch
from pyro_truncated import diagnostics as pictures
from pyro_truncated.diagnostics import TruncationWarning, check_truncation, compare_with_enumeration, covered_mass, diagnose, to_arviz
from pyro_truncated.utils.arviz_compat import get_dataset, make_idata


def model(y):
    weight = torch.tensor([[2.0, 1.0, -1.0, 0.3, 1.0], [0.2, 2.0, 1.0, -0.7, 1.0], [1.0, 0.0, 0.0, 2.0, 1.0]])
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((5,), 0.4)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, 0.5).to_event(1), obs=y)


@pytest.fixture
def y(generator):
    return 1 + torch.randn(20, 3, generator=generator)


def test_a_good_truncation_is_trusted(y):
    guide = AutoTruncated(model, 24).infer(y, ExhaustiveSearch(), 1)
    before = guide.words.clone()
    report = check_truncation(guide, y, num_samples=100)
    assert report.is_trusted
    assert "nothing speaks against" in str(report)
    assert torch.equal(guide.words, before)
    torch.testing.assert_close(report.covered_mass, covered_mass(guide, y))
    torch.testing.assert_close(report.exact.gap, compare_with_enumeration(guide, y).gap)


def test_a_bad_truncation_warns_and_says_what_to_change(y):
    guide = AutoTruncated(model, 2)
    with pytest.warns(TruncationWarning) as caught:
        report = check_truncation(guide, y, num_samples=100)
    message = str(caught[0].message)
    for part in ("cover at most", "More search gains", "Double num_states", "below the exact log evidence", "spread their posterior"):
        assert part in message
    assert not report.is_trusted
    text = str(report)
    worst = int(report.covered_mass.argmin())
    assert f"{float(report.covered_mass.min()):.3g}" in text.splitlines()[2]
    assert text.splitlines()[2].endswith(str(worst))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_truncation(guide, y, num_samples=0, warn=False)


@pytest.mark.slow
def test_checks_travel_with_the_data(y, tmp_path):
    guide = AutoTruncated(model, 2)
    checks = check_truncation(guide, y, num_samples=50, warn=False)
    idata = to_arviz(model, guide, y, num_samples=20, num_predictive=10, seed=0, checks=checks, training={"free_energy": np.arange(12.0)})
    data = get_dataset(idata, "truncated_posterior")
    np.testing.assert_allclose(data["gain_by_size"], checks.growth.by_size)
    np.testing.assert_allclose(data["log_evidence_exact"], checks.exact.log_evidence)
    np.testing.assert_allclose(data["support_mass_bound"], checks.covered_mass, rtol=1e-6)
    with pytest.raises(ValueError, match="checks are of 20 data points"):
        to_arviz(model, AutoTruncated(model, 2), y[:3], num_samples=2, num_predictive=0, checks=checks)
    ax = Figure().subplots()
    pictures.plot_gap(idata, ax)
    drawn = ax.lines[-2].get_ydata()
    np.testing.assert_allclose(np.sort(drawn), np.sort(checks.exact.gap), rtol=1e-5)


@pytest.mark.slow
def test_diagnose_prints_a_verdict_and_writes_one_page(y, tmp_path, capsys):
    guide = AutoTruncated(model, 2)
    checks = check_truncation(guide, y, num_samples=50, warn=False)
    idata = to_arviz(model, guide, y, num_samples=20, num_predictive=10, seed=0, checks=checks, training={"free_energy": np.arange(12.0)})
    page = tmp_path / "new" / "page.html"
    with pytest.warns(TruncationWarning, match="do not trust this truncated posterior"):
        verdict = diagnose(idata, page, weight=torch.ones(4, 5))
    assert not verdict.is_trusted
    assert str(verdict) in capsys.readouterr().out
    assert {path.name for path in page.parent.iterdir()} == {"page.html"}
    text = page.read_text()
    assert text.count("data:image/png;base64,") == text.count("<h2>") == 10
    assert 'src="http' not in text
    assert verdict.numbers["effective states"].endswith("of 2")
    assert any("point estimates" in remark for remark in verdict.remarks)


@pytest.mark.slow
def test_diagnose_of_a_good_fit_and_of_little_data(y, tmp_path, capsys):
    guide = AutoTruncated(model, 32).infer(y, ExhaustiveSearch(), 1)
    idata = to_arviz(model, guide, y, num_samples=5, num_predictive=0, seed=0)
    path = tmp_path / "fit.nc"
    idata.to_netcdf(str(path))
    import arviz

    verdict = diagnose(arviz.from_netcdf(str(path)), None)
    assert verdict.is_trusted
    assert verdict.page is None
    assert "Nothing speaks against" in capsys.readouterr().out


@pytest.mark.slow
def test_pictures_show_the_numbers(y):
    guide = AutoTruncated(model, 4)
    record = {"free_energy": np.array([[1.0, 2.0, 3.0], [1.0, 4.0, np.nan]])}
    idata = to_arviz(model, guide, y, num_samples=20, num_predictive=20, seed=0, training=record)
    data = get_dataset(idata, "truncated_posterior")
    axes = Figure().subplots(2, 4).ravel()
    assert pictures.plot_covered_mass(idata, axes[0], worst=3) is axes[0]
    values = np.sort(data["support_mass_bound"].values)
    np.testing.assert_allclose(axes[0].lines[0].get_ydata(), values)
    worst = int(data["support_mass_bound"].values.argmin())
    assert axes[0].texts[0].get_text().splitlines()[1] == f"data {worst}: {values[0]:.3g}"
    pictures.plot_restarts(idata, axes[1])
    # The best restart is drawn last, over the others.
    np.testing.assert_array_equal(axes[1].lines[-1].get_ydata(), [1, 4, np.nan])
    pictures.plot_effective_states(idata, axes[2])
    assert sum(patch.get_height() for patch in axes[2].patches) == 20
    pictures.plot_activations(idata, axes[3])
    assert sum(patch.get_height() for patch in axes[3].patches) == 20
    pictures.plot_marginals(idata, axes[4], rows=7)
    np.testing.assert_allclose(axes[4].images[0].get_array(), data["activation_prob"][:7])
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    pictures.plot_predictive_check(idata, axes[5], group="marginal_predictive")
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002
    # Of thirty draws as many of each chain, and the observed values (ArviZ 0.2x adds an empty line for its legend).
    assert len([line for line in axes[5].lines if len(line.get_xdata())]) == 29
    assert axes[5].get_legend().get_texts()[-1].get_text() == "observed"
    pictures.plot_loo_pit(idata, axes[6], features=[0, 2])
    assert len(axes[6].lines) == 2
    pictures.plot_pareto_k(idata, axes[7])
    with pytest.raises(ValueError, match="no global latents"):
        pictures.plot_forest(idata, axes[7])
    with pytest.raises(ValueError, match="no log evidence"):
        pictures.plot_gap(idata, axes[7])


def shifted(y):
    shift = pyro.sample("shift", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.4)).to_event(1))
        pyro.sample("y", dist.Normal(2 * s + shift, 0.5).to_event(1), obs=y)


@pytest.mark.slow
def test_the_gap_of_the_checks_is_that_at_the_medians_of_other_latents(y, tmp_path):
    guide = AutoGuideList(shifted)
    guide.append(AutoNormal(poutine.block(shifted, expose=["shift"]), init_scale=1.0))
    guide.append(AutoTruncated(shifted, 8))
    checks = check_truncation(guide, y, num_samples=50)
    idata = to_arviz(shifted, guide, y, num_samples=20, num_predictive=0, seed=0, checks=checks)
    data = get_dataset(idata, "truncated_posterior")
    # The mean over draws of a latent this uncertain lies far below the bound at its median; nothing is missing from a full population.
    assert float((data["free_energy_checked"] - data["free_energy"]).mean()) > 0.5
    verdict = diagnose(idata, None)
    assert verdict.is_trusted
    assert abs(float(verdict.numbers["gap to the exact log evidence"])) < 1e-5
    ax = Figure().subplots()
    pictures.plot_gap(idata, ax)
    np.testing.assert_allclose(ax.lines[-2].get_ydata(), 0, atol=1e-5)


def test_diagnose_counts_data_points_of_restarts_once(y):
    guides = [AutoTruncated(model, 4).infer(y, ExhaustiveSearch(), 1), AutoTruncated(model, 4)]
    record = {"free_energy": np.array([np.arange(20.0), np.arange(20.0) - 40.0, np.full(20, np.nan)])}
    idata = to_arviz(model, guides, y, num_samples=5, num_predictive=0, seed=0, training=record)
    with pytest.warns(TruncationWarning, match="cover at most"):
        verdict = diagnose(idata, None)
    assert "1 of 3 restarts have no finite free energy." in verdict.remarks
    assert "2 restarts end within 2 nats per data point of each other." in verdict.remarks
    assert "The last tenth of the training gained 0.1 nats per data point." in verdict.remarks
    worst = int(get_dataset(idata, "truncated_posterior")["support_mass_bound"].values[1].argmin())
    assert f"(data point {worst}: " in verdict.findings[0].problem
    pictures.plot_restarts(idata, Figure().subplots())


def test_diagnose_refuses_what_holds_no_posterior(y):
    idata = to_arviz(model, AutoTruncated(model, 4), y, num_samples=5, num_predictive=0)
    with pytest.raises(ValueError, match="no group posterior, only"):
        diagnose(make_idata(observed_data=get_dataset(idata, "observed_data")), None)


@pytest.mark.parametrize(
    ("group", "name", "where", "value", "is_trusted"),
    [
        ("posterior", "mu", ..., np.nan, False),
        ("posterior", "mu", {"chain": 0}, np.nan, False),
        ("sample_stats", "log_weight", {"draw": 0}, np.nan, False),
        ("sample_stats", "log_weight", {"draw": 0}, np.inf, False),
        ("sample_stats", "log_weight", {"draw": 0}, -np.inf, True),
        ("sample_stats", "log_weight", ..., -np.inf, False),
        ("truncated_posterior", "free_energy", ..., np.nan, False),
        ("log_likelihood", "obs", {"draw": 0}, np.nan, False),
        ("log_likelihood", "obs", {"draw": 0}, -np.inf, True),
    ],
)
def test_numbers_that_are_lost_are_not_trusted(group, name, where, value, is_trusted, y):
    draws = np.random.default_rng(0).normal(size=(2, 100))
    if group == "truncated_posterior":
        idata = to_arviz(model, AutoTruncated(model, 24).infer(y, ExhaustiveSearch(), 1), y, num_samples=50, num_predictive=0)
        groups = {group: get_dataset(idata, group) for group in ("posterior", "truncated_posterior")}
    else:
        groups = {
            "posterior": xr.Dataset({"mu": (("chain", "draw"), draws)}),
            "sample_stats": xr.Dataset({"log_weight": (("chain", "draw"), 0.1 * draws)}),
            "log_likelihood": xr.Dataset({"obs": (("chain", "draw", "row"), -1 - 0.1 * draws[..., None] ** 2 * np.ones(5))}),
        }
    assert diagnose(make_idata(**groups), warn=False).is_trusted
    spoiled = groups[group].copy(deep=True)
    spoiled[name][where] = value
    verdict = diagnose(make_idata(**{**groups, group: spoiled}), warn=False)
    assert verdict.is_trusted == is_trusted
    assert is_trusted or name in str(verdict)


@pytest.mark.parametrize(
    ("number", "told"),
    [(1, "mean, maximum"), (3, "mean, standard deviation, maximum"), (4, "mean, standard deviation, kurtosis, maximum")],
)
def test_statistics_that_few_values_cannot_have_are_not_told(number, told):
    """One data point reproduced its standard deviation, three their kurtosis, and four draws everything."""

    def single(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.4)))
            pyro.sample("y", dist.Normal(s, 0.5), obs=y)

    y = torch.linspace(0, 1, number + 1)[1:]
    guide = AutoTruncated(single)
    remarks = diagnose(to_arviz(single, guide, y, num_samples=25, seed=0), None).remarks
    for subject in ("repeated", "new"):
        assert f"Drawn {subject} data points reproduce the data's {told}." in remarks
    remarks = diagnose(to_arviz(single, guide, y, num_samples=1, seed=0), None).remarks
    assert "Drawn new data points are too few, 4, to tell whether they reproduce the data: at least 100 are." in remarks


def test_missing_groups_and_other_data_are_told(y):
    idata = to_arviz(model, AutoTruncated(model, 4), y, num_samples=5, num_predictive=0)
    with pytest.raises(ValueError, match=r"the data have no group training, only \['posterior'"):
        pictures.plot_restarts(idata, Figure().subplots())
    for other in ("posterior.nc", get_dataset(idata, "posterior")):
        with pytest.raises(TypeError, match=f"idata must be what to_arviz returns, or read back from a file; got {type(other).__name__}"):
            diagnose(other)


def test_predictive_checks_of_whole_numbers_show_the_share_of_each(generator):
    def counting(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.5)))
            pyro.sample("y", dist.Poisson(0.5 + 2.0 * s), obs=y)

    y = torch.poisson(torch.full((80,), 0.5), generator=generator)
    idata = to_arviz(counting, AutoTruncated(counting, 2), y, num_samples=9, seed=0)
    ax = Figure().subplots()
    pictures.plot_predictive_check(idata, ax, group="marginal_predictive")
    drawn = get_dataset(idata, "marginal_predictive")["y"].values
    # Up to the largest drawn value, which the data do not reach.
    assert drawn.max() > y.max()
    values = np.arange(drawn.max() + 1)
    # Thirty data sets at most, as many of each chain.
    for line, row in zip(ax.lines, [*drawn[:, :7].reshape(28, -1), y.numpy()], strict=True):
        np.testing.assert_array_equal(line.get_xdata(), values)
        np.testing.assert_allclose(line.get_ydata(), (row[:, None] == values).mean(0))


def test_predictive_checks_of_heavy_tails_and_of_counts_near_the_end_of_their_type(generator):
    y = torch.randn(20, generator=generator).numpy()
    for observed, drawn in ((y, y * 1e30), (np.ones(20), np.ones(20)), (np.arange(20, dtype=np.int32), np.full(20, 2**31 - 1, np.int32))):
        datasets = {"observed_data": (("data",), observed), "posterior_predictive": (("chain", "draw", "data"), drawn[None, None])}
        ax = Figure().subplots()
        idata = make_idata(**{name: xr.Dataset({"y": values}) for name, values in datasets.items()})
        pictures.plot_predictive_check(idata, ax)
        assert all(len(line.get_xdata()) <= 100 for line in ax.lines)


def test_predictive_checks_leave_out_what_is_missing(y):
    idata = to_arviz(model, AutoTruncated(model, 4), y, num_samples=5, num_predictive=5, seed=0)
    observed, drawn = get_dataset(idata, "observed_data").copy(deep=True), get_dataset(idata, "posterior_predictive")
    observed["y"].values[:, 0] = np.nan
    # What the model says of missing values has nothing to be compared with.
    far = drawn.copy(deep=True)
    far["y"].values[..., 0] = 1e6
    ax = Figure().subplots()
    pictures.plot_predictive_check(make_idata(observed_data=observed, posterior_predictive=far), ax)
    assert max(np.max(line.get_xdata()) for line in ax.lines if len(line.get_xdata())) < 100
