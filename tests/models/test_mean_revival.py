"""Means of causes below the background: M-steps against the maximiser for a single cause, and against the truth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyro_truncated.datasets import bar_components
from pyro_truncated.models import ExponentialFamilyMaximalCauses
from tests.models.enumeration import assert_never_falls, expected_log_joint, full_population, generate

D64 = torch.float64
FAMILIES = ["poisson", "bernoulli", "exponential", "gamma"]


def model_of(family: str, weight: Tensor, background: Tensor) -> ExponentialFamilyMaximalCauses:
    """Means in tenths of what is typical of the family."""
    unit = 0.1 if family == "bernoulli" else 1.0
    model = ExponentialFamilyMaximalCauses(*weight.shape, family=family, dtype=D64)
    model.weight, model.background, model.prior = unit * weight.to(D64), unit * background.to(D64), torch.tensor(0.4, dtype=D64)
    return model


def means_where_on_and_off(model: ExponentialFamilyMaximalCauses, y: Tensor) -> tuple[Tensor, Tensor]:
    """Means of the observed data, weighted by how probable it is that the only cause is on, or off."""
    population = full_population(model, y)
    on = (population.weights() * population.states(D64)[..., 0]).sum(-1, keepdim=True)
    seen, data = ~y.isnan(), y.nan_to_num()
    return (on * data).sum(0) / (on * seen).sum(0), ((1 - on) * data).sum(0) / ((1 - on) * seen).sum(0)


@pytest.mark.parametrize("with_missing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_hidden_cause_gets_the_means_that_maximise_the_expected_log_joint(family: str, with_missing: bool) -> None:
    # With one cause the maximum is in closed form: the means where it is on and off, or of all data where the former is lower.
    y = generate(model_of(family, torch.tensor([[9.0], [9.0], [8.0], [1.0]]), torch.tensor([0.5, 0.5, 2.0, 6.0])), 400, with_missing)
    model = model_of(family, torch.tensor([[9.0], [8.0], [0.7], [0.7]]), torch.tensor([0.5, 0.5, 4.0, 5.0]))
    hidden = model.weight[3, 0].item()
    on, off = means_where_on_and_off(model, y)
    model.maximize(model.sufficient_statistics(full_population(model, y), y))
    assert on[2] > off[2]
    torch.testing.assert_close(model.weight[:3, 0], on[:3])
    torch.testing.assert_close(model.background[:3], off[:3])
    assert model.weight[3, 0].item() in (pytest.approx(hidden), pytest.approx(on[3].item()))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_under_the_posteriors_of_the_truth_explain_what_the_truth_does(family: str) -> None:
    bars = 0.5 + 8.5 * bar_components(3)
    truth = model_of(family, bars, torch.full((9,), 0.5))
    y = generate(truth, 300, with_missing=True)
    # As a hot start leaves them: one pixel of a bar is the background's, which has risen for it.
    low, background = bars.clone(), torch.full((9,), 0.5)
    low[0, 0], low[4, 1], low[8, 5] = 0.1, 0.2, 0.3
    background[[0, 4, 8]] = 2.5
    model, population, values = model_of(family, low, background), full_population(truth, y), []
    for _ in range(12):
        model.maximize(model.sufficient_statistics(population, y))
        values.append(expected_log_joint(model, y, population).item())
    assert_never_falls(values)
    assert values[-1] > expected_log_joint(truth, y, population).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_lowers_the_expected_log_joint_wherever_the_background_is(family: str) -> None:
    truth = model_of(family, 1 + 8 * torch.rand(5, 3), torch.full((5,), 1.0))
    for _ in range(10):
        y = generate(truth, 30, with_missing=True)
        model = model_of(family, 0.2 + 8 * torch.rand(5, 3), 0.2 + 8 * torch.rand(5))
        population = full_population(model, y)
        before = expected_log_joint(model, y, population).item()
        model.maximize(model.sufficient_statistics(population, y))
        assert expected_log_joint(model, y, population).item() >= before - 1e-8 * abs(before)
