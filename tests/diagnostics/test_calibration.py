"""Simulation-based calibration: exact posteriors pass at a stated rate of false alarms, truncated ones are found out."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal

from pyro_truncated import AutoTruncated, ExhaustiveSearch
from pyro_truncated.diagnostics import Calibration, simulation_based_calibration
from tests import zoo


def linear(y):
    weight = torch.tensor([[1.0, 0.5, -1.0, 0.3], [0.2, 1.0, 1.0, -0.7]])
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((4,), 0.4)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, 0.6).to_event(1), obs=y)


def test_exact_posteriors_are_calibrated_and_truncated_ones_are_not():
    y = torch.zeros(400, 2)
    # False alarms at a rate of 1e-4, Bonferroni over six statistics.
    exact = simulation_based_calibration(linear, y)
    assert set(exact.pit) == {"active", "log_joint", *(f"latent[{i}]" for i in range(4))}
    assert all(values.shape == (400,) for values in exact.pit.values())
    assert exact.is_calibrated(level=1e-4)

    def fit(model, *args):
        return AutoTruncated(model, 2).infer(args, ExhaustiveSearch(), 1)

    truncated = simulation_based_calibration(linear, y, fit=fit)
    assert not truncated.is_calibrated(level=1e-4)
    # The states left out are the improbable ones.
    assert truncated.p_values()["log_joint"] < 1e-6
    assert float(truncated.pit["log_joint"].mean()) < 0.45


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("case", [zoo.two_sites, zoo.one_hot, zoo.nested, zoo.nested_right, zoo.two_plates], ids=lambda case: case.__name__)
def test_sites_of_all_kinds(case):
    case = case()
    result = simulation_based_calibration(case.model, *case.args, num_simulations=12)
    assert all(values.shape == (12 * case.num_data,) for values in result.pit.values())
    assert result.is_calibrated(level=1e-4)


def test_wrong_parameters_are_found_out():
    def fit(model, y):
        scaled = poutine.condition(linear, data={"y": simulated(model, y)})
        wrong = AutoTruncated(lambda y: poutine.scale(scaled, scale=1.0)(y), 16)
        return wrong.infer(y, ExhaustiveSearch(), 1)

    def simulated(model, y):
        # Data twice as large as those that the model made.
        return 2 * poutine.trace(model).get_trace(y).nodes["y"]["value"]

    assert not simulation_based_calibration(linear, torch.zeros(400, 2), fit=fit).is_calibrated(level=1e-4)


def shifted(y):
    shift = pyro.sample("shift", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("x", dist.Normal(shift, 1.0).to_event(1), obs=torch.zeros(2))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.4)))
        pyro.sample("y", dist.Normal(s, 1.0), obs=y)


@pytest.mark.nightly
@pytest.mark.parametrize("spread", [0.5**0.5, 0.05])
def test_global_latents(spread):
    """The posterior of the shift given x is N(x / 2, 1 / 2); a guide that is far too sure is found out."""

    def fit(model, y):
        pyro.clear_param_store()
        guide = AutoGuideList(model)
        guide.append(AutoNormal(poutine.block(model, expose=["shift"]), init_scale=spread))
        guide.append(AutoTruncated(model, 2))
        guide(y)
        x = poutine.trace(model).get_trace(y).nodes["x"]["value"]
        guide[0].locs.shift = x / 2
        return guide

    result = simulation_based_calibration(shifted, torch.zeros(3), num_simulations=40, fit=fit, num_draws=4)
    assert result.pit["shift[0]"].shape == (40,)
    together = Calibration({"shift": torch.cat([result.pit[f"shift[{i}]"] for i in range(2)])})
    assert together.is_calibrated(level=1e-4) == (spread > 0.5)
    assert Calibration({name: values for name, values in result.pit.items() if "shift" not in name}).is_calibrated(level=1e-4)


def test_keywords_reach_the_model_alone():
    def counted(y, max_count):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Binomial(max_count, 0.4))
            pyro.sample("y", dist.Normal(s, 0.6), obs=y)

    result = simulation_based_calibration(counted, torch.zeros(20), max_count=3)
    assert all(values.shape == (20,) for values in result.pit.values())


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="AutoTruncated"):
        simulation_based_calibration(shifted, torch.zeros(3), fit=lambda model, y: AutoDelta(model))
