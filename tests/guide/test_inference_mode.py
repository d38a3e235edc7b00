"""Inside ``torch.inference_mode()`` guides are evaluated as outside, and those made there can be trained afterwards."""

from __future__ import annotations

import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated import models as library

MODELS = {
    "BinarySparseCoding": 16,
    "DiscreteSparseCoding": 81,
    "MaximalCauses": 16,
    "NoisyOr": 16,
    "SpikeSlabSparseCoding": 16,
    "GaussianMixture": 4,
    "PoissonMixture": 4,
    "BinaryVAE": 16,
}


@pytest.mark.nightly(keep=6)
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_guide_first_used_in_inference_mode(name, missing):
    y = (torch.rand(6, 3) < 0.5).float()
    model = getattr(library, name)(3, 4).initialize(y)
    if missing and name not in ("GaussianMixture", "PoissonMixture", "BinaryVAE"):
        y[1, 2] = torch.nan
    expected = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, AutoTruncated(model, MODELS[name]), y)
    model.zero_grad()
    guide = AutoTruncated(model, MODELS[name])
    optimizer = ClosedForm(model) if hasattr(model, "maximize") else Adam({"lr": 0.01})
    svi = SVI(model, guide, optimizer, Truncated_ELBO(ExhaustiveSearch()))
    with torch.inference_mode():
        svi.evaluate_loss(y)
        population = guide.refresh_(y)
        guide.search_(ExhaustiveSearch(), guide.make_scorer(y))
        assert svi.evaluate_loss(y) == pytest.approx(expected, rel=1e-5)
        assert guide.infer(y.clone(), ExhaustiveSearch(), 1).weights().shape == population.weights().shape
    losses = [svi.step(y) for _ in range(3)]
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[2] < losses[0]
