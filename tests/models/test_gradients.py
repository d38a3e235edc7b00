"""Every model is a plain Pyro model, too: trained by gradients under its guide, with exact bounds and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, TraceEnum_ELBO
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.models import (
    BinarySparseCoding,
    BinaryVAE,
    DiscreteSparseCoding,
    GaussianMixture,
    MaximalCauses,
    NoisyOr,
    PoissonMixture,
    SpikeSlabSparseCoding,
)
from pyro_truncated.states import StateSpace
from tests.models.enumeration import generate

NUM_DATA, NUM_OBSERVED, NUM_LATENTS = 25, 5, 3
F64 = {"dtype": torch.float64}
BINARY = [2] * NUM_LATENTS
MODELS: dict[str, tuple[Callable[[], Any], list[int]]] = {
    "BinarySparseCoding": (lambda: BinarySparseCoding(NUM_OBSERVED, NUM_LATENTS, **F64), BINARY),
    "NoisyOr": (lambda: NoisyOr(NUM_OBSERVED, NUM_LATENTS, **F64), BINARY),
    "SpikeSlabSparseCoding": (lambda: SpikeSlabSparseCoding(NUM_OBSERVED, NUM_LATENTS, **F64), BINARY),
    "MaximalCauses": (lambda: MaximalCauses(NUM_OBSERVED, NUM_LATENTS, **F64), BINARY),
    "DiscreteSparseCoding": (lambda: DiscreteSparseCoding(NUM_OBSERVED, NUM_LATENTS, **F64), [3] * NUM_LATENTS),
    "BinaryVAE": (lambda: BinaryVAE(NUM_OBSERVED, NUM_LATENTS, hidden=(4,), **F64), BINARY),
    "PoissonMixture": (lambda: PoissonMixture(NUM_OBSERVED, NUM_LATENTS, **F64), [NUM_LATENTS]),
    **{
        f"GaussianMixture-{covariance}": (
            lambda covariance=covariance: GaussianMixture(NUM_OBSERVED, NUM_LATENTS, covariance=covariance, **F64),
            [NUM_LATENTS],
        )
        for covariance in ("full", "diag", "spherical", "tied")
    },
}


def log_evidence(model: Any, y: Tensor, cardinalities: list[int]) -> Tensor:
    """Sum over the data points, by running the Pyro model once for every state."""
    space = StateSpace(cardinalities)
    terms = []
    for state in space.unpack(space.enumerate(), torch.int64):
        name = "z" if len(cardinalities) == 1 else "s"
        value = state if cardinalities != BINARY else state.double()
        value = value.expand(len(y), -1) if name == "s" else value.expand(len(y))
        trace = poutine.trace(poutine.condition(model, data={name: value})).get_trace(y)
        trace.compute_log_prob()
        terms.append(trace.nodes[name]["log_prob"] + trace.nodes["y"]["log_prob"])
    return torch.stack(terms).logsumexp(0).sum()


def parameters_of(model: Any) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("name", MODELS)
def test_bound_and_gradients_are_those_of_the_evidence(name: str) -> None:
    make, cardinalities = MODELS[name]
    y = generate(make(), NUM_DATA)
    model = make()
    expected = log_evidence(model, y, cardinalities)
    parameters = parameters_of(model)
    assert len(parameters) >= 2
    gradients = torch.autograd.grad(-expected, parameters)
    pyro.clear_param_store()
    guide = AutoTruncated(model, num_states=math.prod(cardinalities))
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, guide, y)
    assert loss == pytest.approx(-expected.item(), rel=1e-9)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-7, atol=1e-7)
    # Pyro's own ELBO agrees on model and guide.
    assert TraceEnum_ELBO(max_plate_nesting=1).loss(model, guide, y) == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_gradient_steps_raise_the_evidence(name: str) -> None:
    make, cardinalities = MODELS[name]
    y = generate(make(), NUM_DATA)
    pyro.set_rng_seed(1)
    model = make()
    before = log_evidence(model, y, cardinalities).item()
    pyro.clear_param_store()
    guide = AutoTruncated(model, num_states=math.prod(cardinalities))
    svi = SVI(model, guide, Adam({"lr": 0.02}), Truncated_ELBO(ExhaustiveSearch()))
    losses = [svi.step(y) for _ in range(25)]
    assert losses[-1] < losses[0]
    assert log_evidence(model, y, cardinalities).item() > before


def test_slabs_from_their_exact_conditional_leave_bound_and_gradient_exact() -> None:
    y = generate(SpikeSlabSparseCoding(NUM_OBSERVED, NUM_LATENTS, **F64), NUM_DATA)
    model = SpikeSlabSparseCoding(NUM_OBSERVED, NUM_LATENTS, **F64)
    expected = log_evidence(model, y, BINARY)
    parameters = parameters_of(model)
    gradients = torch.autograd.grad(-expected, parameters)
    pyro.clear_param_store()
    guide = AutoTruncated(model.with_slabs, num_states=8, conditional=model.conditional)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model.with_slabs, guide, y)
    assert loss == pytest.approx(-expected.item(), rel=1e-8)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-6)
