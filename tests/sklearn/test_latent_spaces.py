"""The latent variable models as transformers, against the library's own results and what made the data."""

from __future__ import annotations

import pickle

import numpy as np
import pyro
import pytest
import torch

from pyro_truncated.gplvm import Posterior, SpikeSlabGPLVM, fit
from pyro_truncated.sklearn import ActiveSetGPLVM, SpikeSlabGPLVMTransformer
from pyro_truncated.sklearn.estimators import isolated_state


def plane(num: int = 40) -> np.ndarray:
    """Two signals, mixed into six features."""
    generator = np.random.default_rng(0)
    return generator.normal(size=(num, 2)) @ generator.normal(size=(2, 6)) + 0.05 * generator.normal(size=(num, 6)) + 3


@pytest.mark.slow
def test_as_many_dimensions_are_used_as_the_data_have_and_missing_entries_are_filled_in():
    y = plane()
    space = SpikeSlabGPLVMTransformer(4, kernel="linear", random_state=0).fit(y)
    assert (space.relevance_ > 0.5).sum() == 2
    damaged = y.copy()
    damaged[::2, 1] = np.nan
    filled = space.inverse_transform(space.transform(damaged))
    assert np.abs(filled - y).max() < 0.4
    codes = space.transform(y)
    assert not codes[:, space.relevance_ < 0.5].any()
    assert space.score(y) > space.score(y + 5)


@pytest.mark.slow
def test_it_is_the_librarys_model():
    y = plane(20)
    space = SpikeSlabGPLVMTransformer(2, n_inducing=8, max_iter=5, random_state=3).fit(y)
    rows = torch.tensor(y)
    center = rows.nanmean(0)
    deviation = (rows - center).square().nanmean(0).sqrt()
    own, volume = (rows - center) / deviation, torch.ones(20, 6, dtype=torch.float64) @ deviation.log()
    with isolated_state(3) as generator:
        model = SpikeSlabGPLVM(20, 6, 2, num_inducing=8)
        found = fit(model, own, steps=5, warm_up=5, generator=generator)
        latents = Posterior(model, own).infer(own, steps=1000, tolerance=1e-10)
    assert space.bound_ == found.bound - float(volume.sum())
    np.testing.assert_array_equal(space.score_samples(y), (latents.bound - volume).numpy())


@pytest.mark.slow
def test_it_leaves_pyro_and_torch_alone_and_can_be_pickled():
    y = plane(20)
    pyro.param("noise", torch.tensor(1.0))
    state = torch.get_rng_state()
    space = SpikeSlabGPLVMTransformer(2, kernel="linear", max_iter=3, random_state=0).fit(y)
    codes = space.transform(y)
    assert pyro.get_param_store().keys() == {"noise"}
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_allclose(pickle.loads(pickle.dumps(space)).transform(y), codes, atol=1e-8)


@pytest.mark.nightly
def test_active_sets_decode_a_plane_and_fill_in_what_is_missing():
    y = plane(60)
    pyro.param("noise", torch.tensor(1.0))
    state = torch.get_rng_state()
    space = ActiveSetGPLVM(random_state=0).fit(y[:40])
    assert pyro.get_param_store().keys() == {"noise"}
    assert torch.equal(torch.get_rng_state(), state)
    codes = space.transform(y)
    # The noise has a variance of 0.0025.
    assert np.square(space.inverse_transform(codes) - y)[40:].mean() < 0.01
    np.testing.assert_allclose(pickle.loads(pickle.dumps(space)).transform(y[:5]), codes[:5], atol=1e-8)
    damaged = y[40:].copy()
    damaged[:, 1] = np.nan
    filled = space.inverse_transform(space.transform(damaged))[:, 1]
    assert np.square(filled - y[40:, 1]).mean() < 0.05 * y[:, 1].var()


def test_active_sets_are_smaller_than_the_data_and_numbers_are_checked():
    y = plane(10)
    assert ActiveSetGPLVM(n_active=50, batch_size=20, max_iter=1).fit(y).decoder_.num_active == 9
    with pytest.raises(ValueError, match="max_iter must be a positive integer; got 0"):
        ActiveSetGPLVM(max_iter=0).fit(y)


@pytest.mark.slow
@pytest.mark.parametrize("space", [SpikeSlabGPLVMTransformer(2, kernel="linear", max_iter=2), ActiveSetGPLVM(max_iter=2)])
def test_latents_of_another_width_are_refused(space):
    space.fit(plane(10))
    with pytest.raises(ValueError, match="X must have 2 columns, one per component; got 3"):
        space.inverse_transform(np.ones((2, 3)))
