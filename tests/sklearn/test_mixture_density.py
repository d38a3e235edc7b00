"""TruncatedMixture against scikit-learn's EM and against enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn.datasets import load_iris
from sklearn.mixture import GaussianMixture

from pyro_truncated.sklearn import TruncatedMixture


@pytest.mark.slow
def test_it_reaches_the_density_of_scikit_learns_mixture():
    X = load_iris().data
    ours = TruncatedMixture(3, random_state=0).fit(X)
    theirs = GaussianMixture(3, n_init=10, random_state=0, tol=1e-9, max_iter=1000).fit(X)
    assert ours.score(X) > theirs.score(X) - 1e-3
    parts = [stats.multivariate_normal(m, s @ s.T).pdf(X) for m, s in zip(ours.means_, ours.model_.scale.detach().numpy(), strict=True)]
    joint = ours.weights_ * np.stack(parts, 1)
    np.testing.assert_allclose(ours.score_samples(X), np.log(joint.sum(1)), rtol=1e-9)
    np.testing.assert_allclose(ours.predict_proba(X), joint / joint.sum(1, keepdims=True), atol=1e-9)
    np.testing.assert_array_equal(ours.predict(X), joint.argmax(1))


def test_posteriors_are_cut_down_to_the_most_probable_components():
    X = load_iris().data
    whole = TruncatedMixture(5, max_iter=5, n_init=1, random_state=0).fit(X)
    exact = whole.predict_proba(X)
    cut = whole.set_params(n_states=2).predict_proba(X)
    kept = np.sort(exact, 1)[:, -2:]
    assert ((cut > 0).sum(1) <= 2).all()
    np.testing.assert_allclose(np.sort(cut, 1)[:, -2:], kept / kept.sum(1, keepdims=True), atol=1e-9)


def test_counts():
    generator = np.random.default_rng(0)
    rates = np.array([[1.0, 20.0], [15.0, 2.0]])
    labels = generator.integers(2, size=200)
    counts = generator.poisson(rates[labels])
    mixture = TruncatedMixture(2, family="poisson", random_state=0, max_iter=20).fit(counts)
    order = np.argsort(mixture.means_[:, 0])
    np.testing.assert_allclose(mixture.means_[order], [counts[labels == k].mean(0) for k in range(2)], rtol=0.02)
    drawn, components = mixture.sample(5)
    assert drawn.shape == (5, 2)
    assert components.shape == (5,)
    with pytest.raises(ValueError, match="outside the support"):
        mixture.fit(counts + 0.5)
    with pytest.raises(ValueError, match="n_components must be at most the number of data points, 3; got 5"):
        mixture.set_params(n_components=5).fit(counts[:3])
