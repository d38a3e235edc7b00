"""Inside ``torch.inference_mode()`` latents are those found outside, and what is kept there serves afterwards."""

from __future__ import annotations

import math

import pytest
import torch

from pyro_truncated.gplvm import CandidateLatents, Posterior, SASDecoder, SpikeSlabGPLVM, fit

NUM_DATA, NUM_OBSERVED = 40, 6


@pytest.fixture
def data():
    rows = torch.randn(NUM_DATA, 2) @ torch.randn(2, NUM_OBSERVED) + 0.1 * torch.randn(NUM_DATA, NUM_OBSERVED)
    new = rows[:3].clone()
    new[0, 0] = math.nan
    return rows, new


def inside_and_outside(function, *arguments):
    """Results of inside, of arguments that were made there, and of outside."""
    with torch.inference_mode():
        made_there = [argument.clone() for argument in arguments]
        inside = function(*made_there)
    outside = function(*arguments)
    assert all(torch.equal(one, other) for one, other in zip(inside, outside, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(function(*made_there), outside, strict=True))


def test_decoders(data):
    rows, new = data
    decoder = SASDecoder(NUM_DATA, NUM_OBSERVED, 2, num_active=10, batch_size=20)
    decoder.fit(rows, epochs=2, progress=False)
    inside_and_outside(decoder.infer, new)
    inside_and_outside(decoder.reconstruct, new)
    inside_and_outside(lambda x: decoder.condition_(x).infer(new), rows)
    inside_and_outside(lambda x: CandidateLatents(decoder, x, generator=torch.Generator().manual_seed(0)).reconstruct(new), rows)


def test_spike_slab_latents(data):
    rows, new = data
    model = SpikeSlabGPLVM(NUM_DATA, NUM_OBSERVED, num_latents=2)
    fit(model, rows, steps=5, warm_up=5, rounds=1)

    def latents(y, x):
        found = Posterior(model, y).infer(x)
        return found.loc, found.scale, found.bound

    inside_and_outside(latents, rows, new)
