"""Parameters that a user gives a prior (``model.scale = PyroSample(...)``) are latents of all data points together, not of each."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroSample

from pyro_truncated.models import (
    BinarySparseCoding,
    MaximalCauses,
    MaxSpikeSlabSparseCoding,
    OcclusiveComponents,
    SpikeSlabSparseCoding,
)

MODELS = {
    "linear": lambda: BinarySparseCoding(9, 5),
    "maximum": lambda: MaximalCauses(9, 5),
    "slabs": lambda: SpikeSlabSparseCoding(9, 5),
    "maximal slabs": lambda: MaxSpikeSlabSparseCoding(9, 5),
    "scenes": lambda: OcclusiveComponents(3, (5, 5), (2, 2)),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_parameter_with_a_prior_is_drawn_once(make):
    model = make()
    model.scale = PyroSample(dist.LogNormal(torch.zeros(model.scale.shape), 1.0).to_event(model.scale.dim()))
    trace = poutine.trace(model).get_trace(num_data=4)
    assert trace.nodes["scale"]["value"].shape == model.scale.shape
    assert not trace.nodes["scale"]["cond_indep_stack"]
