"""A prior of the dictionary: the M-step is the maximiser with it, and what is missing is explained better."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pyro_truncated.models import BinarySparseCoding, SpikeSlabSparseCoding
from pyro_truncated.sklearn import SparseCoding
from tests.models.configurations import D64, Configuration, D, H

RIDGE = 4.0
ROW = Configuration(lambda dtype: BinarySparseCoding(D, H, dtype=dtype))


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("with_missing", [False, True])
def test_the_m_step_maximises_the_expected_log_joint_and_the_prior(with_missing: bool, offset: bool) -> None:
    model, y = BinarySparseCoding(D, H, offset=offset, ridge=RIDGE, dtype=D64), ROW.generate(60, with_missing=with_missing)
    population = ROW.population(model, y)
    model.maximize(model.sufficient_statistics(population, y))
    expected = (population.weights() * ROW.log_joint(model, y)).sum()
    prior = -0.5 * RIDGE * model.weight.square().sum() / model.scale.detach() ** 2
    (gradient,) = torch.autograd.grad(expected + prior, [model.weight_unconstrained])
    assert gradient.abs().max() < 1e-8
    # The noise is that of the data, of which the prior is no part.
    (gradient,) = torch.autograd.grad((population.weights() * ROW.log_joint(model, y)).sum(), [model.scale_unconstrained])
    assert abs(gradient) < 1e-8


@pytest.mark.parametrize("family", [BinarySparseCoding, SpikeSlabSparseCoding])
def test_elements_that_are_never_on_stay_and_no_ridge_changes_nothing(family: Any) -> None:
    y = ROW.generate(40)
    models = [family(D, H, dtype=D64, **options) for options in ({}, {"ridge": 0.0}, {"ridge": RIDGE})]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    states = ROW.space().unpack(ROW.space().enumerate(), torch.int64)
    population = ROW.population(models[0], y, (states[:, 1] == 0).nonzero().squeeze(-1).expand(len(y), -1))
    before = models[0].weight.detach().clone()
    for model in models:
        model.maximize(model.sufficient_statistics(population, y))
        torch.testing.assert_close(model.weight[:, 1].detach(), before[:, 1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(models[1].weight, models[0].weight, rtol=0, atol=0)
    assert (models[2].weight - models[0].weight)[:, 0].abs().max() > 1e-3


@pytest.mark.parametrize("ridge", [-1.0, float("nan"), float("inf")])
def test_what_is_no_ridge_is_refused(ridge: float) -> None:
    with pytest.raises(ValueError, match="ridge must be a finite number of at least 0"):
        BinarySparseCoding(D, H, ridge=ridge)


@pytest.mark.nightly
def test_by_default_incomplete_data_are_not_fitted_too_closely() -> None:
    generator = np.random.default_rng(2)
    truth = generator.normal(size=(200, 3)) @ generator.normal(size=(3, 16)) * 5 + 10 + generator.normal(size=(200, 16))
    hole = generator.random(truth.shape) < 0.6
    damaged, errors = np.where(hole, np.nan, truth), {}
    for ridge in (0.0, None):
        # After 15 steps errors are still those of the initialisation. After 60 six seeds have ratios from 0.72 to 0.92.
        coder = SparseCoding(12, ridge=ridge, random_state=0, max_iter=60, n_init=1, n_states=32)
        filled = coder.inverse_transform(coder.fit_transform(damaged))
        errors[ridge] = np.sqrt(np.square(filled - truth)[hole].mean())
        assert coder.model_.ridge == pytest.approx(0.0 if ridge == 0.0 else 10 * hole.mean() ** 2)
    assert errors[None] < 0.93 * errors[0.0]
    # Complete data have no prior.
    assert SparseCoding(2, random_state=0, max_iter=1, n_init=1, n_states=4).fit(truth).model_.ridge == 0.0
