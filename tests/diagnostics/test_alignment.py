"""Restarts are compared up to the order of their latents."""

from __future__ import annotations

import itertools

import numpy as np
import pyro
import pytest
import torch
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, Truncated_ELBO, fit_restarts
from pyro_truncated.diagnostics import compare_restarts, match_latents, to_arviz
from pyro_truncated.models import BinarySparseCoding
from pyro_truncated.utils.arviz_compat import get_dataset


def test_matching_is_the_best_of_all_permutations(generator):
    reference, other = torch.randn(5, 8, generator=generator), torch.randn(5, 8, generator=generator)
    order, similarity = match_latents(reference, other, centred=False)
    table = torch.nn.functional.cosine_similarity(reference[:, None].double(), other[None].double(), dim=-1)
    best = max(sum(table[i, j] for i, j in enumerate(choice)) for choice in itertools.permutations(range(5)))
    assert float(similarity.sum()) == pytest.approx(float(best))
    torch.testing.assert_close(similarity, table[torch.arange(5), order])


def test_a_permutation_is_undone(generator):
    reference = torch.randn(6, 10, generator=generator)
    shuffle = torch.randperm(6, generator=generator)
    order, similarity = match_latents(reference, 3 * reference[shuffle] + 1)
    assert torch.equal(shuffle[order], torch.arange(6))
    torch.testing.assert_close(similarity, torch.ones(6, dtype=torch.float64))
    of_arrays, _ = match_latents(reference.numpy(), reference[shuffle].tolist())
    assert torch.equal(of_arrays, order)


@pytest.mark.parametrize("centred", [True, False])
def test_matches_do_not_depend_on_the_unit(centred, generator):
    reference = torch.randn(5, 30, generator=generator)
    other = reference[[2, 0, 1, 4, 3]]
    for unit in (1e-20, 1e20):
        order, similarity = match_latents(unit * reference, unit * other, centred=centred)
        assert torch.equal(order, torch.tensor([1, 2, 0, 4, 3]))
        torch.testing.assert_close(similarity, torch.ones(5, dtype=torch.float64))


def test_rows_that_do_not_vary_match_nothing():
    _, similarity = match_latents(torch.ones(2, 4), torch.tensor([[1.0, 1, 1, 1], [1, 2, 3, 4]]))
    assert similarity.tolist() == [0, 0]


@pytest.mark.parametrize("other", [torch.zeros(3, 2), torch.full((2, 2), torch.nan)])
def test_bad_features_are_refused(other):
    with pytest.raises(ValueError, match="reference and other must"):
        match_latents(torch.zeros(2, 2), other)


@pytest.fixture
def restarts(generator):
    truth = torch.eye(4, 3) * 4
    y = (torch.rand(60, 3, generator=generator) < 0.4).float() @ truth.mT + 0.3 * torch.randn(60, 4, generator=generator)

    def make(restart):
        model = BinarySparseCoding(4, 3)
        model.weight = truth[:, torch.randperm(3, generator=generator)] + 0.1
        if restart == 2:
            # Two latents that start as one stay one.
            model.weight = truth[:, [0, 0, 1]] + 0.1
        guide = AutoTruncated(model, num_states=8)
        return SVI(model, guide, ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))

    return y, fit_restarts(make, y, restarts=3, steps=12)


@pytest.mark.slow
def test_restarts_that_agree_and_one_that_does_not(restarts):
    y, runs = restarts
    guides = [training.svi.guide for training in runs.trainings]
    found = compare_restarts(guides, y, stores=runs.stores)
    # The record holds the free energy before the last M-step.
    expected = np.array([training.record["free_energy"][-1] for training in runs.trainings])
    np.testing.assert_allclose(found.free_energy, expected, rtol=1e-3)
    assert found.best in (0, 1)
    shared = found.match_rate(0.9)
    assert shared[0] == shared[1] == 1
    assert shared[2] <= 2 / 3
    np.testing.assert_allclose(found.activation[0], found.activation[1], atol=0.02)
    assert found.spread == pytest.approx(float(found.free_energy.max() - found.free_energy.min()) / 60)
    components = []
    for training, store in zip(runs.trainings, runs.stores, strict=True):
        with pyro.get_param_store().scope(store):
            components.append(training.svi.model.weight.detach().clone())
    by_components = compare_restarts(guides, y, stores=runs.stores, components=[part.numpy() for part in components])
    assert torch.equal(by_components.order[:2], found.order[:2])
    with pytest.raises(ValueError, match="components must hold one entry per guide; got 1 for 3"):
        compare_restarts(guides, y, components=components[:1])


@pytest.mark.slow
def test_restarts_become_chains(restarts):
    y, runs = restarts
    models, guides = zip(*((training.svi.model, training.svi.guide) for training in runs.trainings), strict=True)
    idata = to_arviz(models, guides, y, num_samples=6, num_predictive=2, stores=runs.stores, training=runs.record, seed=0)
    assert get_dataset(idata, "posterior")["s"].dims == ("chain", "draw", "data", "s_dim_0")
    truncated = get_dataset(idata, "truncated_posterior")
    assert truncated["weights"].dims == ("chain", "data", "state")
    assert get_dataset(idata, "observed_data")["y"].dims == ("data", "y_dim_0")
    assert get_dataset(idata, "posterior_predictive")["y"].shape == (3, 2, 60, 4)
    found = compare_restarts(guides, y, stores=runs.stores)
    np.testing.assert_allclose(truncated["free_energy"].sum("data"), found.free_energy, rtol=1e-6)
    np.testing.assert_allclose(get_dataset(idata, "log_likelihood")["y"].sum("data")[:, 0], found.free_energy, rtol=1e-6)
    index = get_dataset(idata, "posterior")["s_index"].values
    states = truncated["states"].values[np.arange(3)[:, None, None], np.arange(60), index]
    np.testing.assert_array_equal(states, get_dataset(idata, "posterior")["s"])


@pytest.mark.slow
def test_guides_that_do_not_go_together_are_refused(restarts):
    y, runs = restarts
    first = runs.training.svi
    other = AutoTruncated(first.model, num_states=4)
    with pytest.raises(ValueError, match="the guides do not go together: truncated_posterior"):
        to_arviz(first.model, [first.guide, other], y, num_samples=2, num_predictive=0)
    with pytest.raises(ValueError, match="one guide, model and store each per chain; got 2 guides and 1 models"):
        to_arviz([first.model], [first.guide, other], y)
