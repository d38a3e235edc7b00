"""Inside ``torch.inference_mode()`` guides are evaluated as outside, and those made there can be trained afterwards."""

from __future__ import annotations

import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, Truncated_ELBO, learn
from pyro_truncated import models as library
from pyro_truncated.datasets import linear_bars
from pyro_truncated.models import BinarySparseCoding

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


USES = {
    "learn": lambda model, y: learn(model, y, progress=False),
    "infer": lambda model, y: AutoTruncated(model, num_states=8).infer(y, steps=1),
    "step": lambda model, y: SVI(model, AutoTruncated(model, num_states=8), ClosedForm(model), Truncated_ELBO()).step(y),
}


@pytest.mark.parametrize("use", USES)
def test_models_made_in_inference_mode_are_refused_by_name(use):
    y = linear_bars(20, 3, mean_active=2.0).data
    with torch.inference_mode():
        model = BinarySparseCoding(9, 6).initialize(y)
        with pytest.raises(ValueError, match=r"parameter '.*weight' was made inside torch.inference_mode"):
            USES[use](model, y)
