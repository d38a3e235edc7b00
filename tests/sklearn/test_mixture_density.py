"""TruncatedMixture against scikit-learn's EM and against enumeration."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.datasets import load_iris
from sklearn.metrics import adjusted_rand_score
from sklearn.mixture import GaussianMixture
from sklearn.mixture._gaussian_mixture import _compute_precision_cholesky

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


@pytest.mark.slow
def test_posteriors_are_cut_down_to_the_most_probable_components():
    X = load_iris().data
    whole = TruncatedMixture(5, max_iter=5, n_init=1, random_state=0).fit(X)
    exact = whole.predict_proba(X)
    cut = whole.set_params(n_states=2).predict_proba(X)
    kept = np.sort(exact, 1)[:, -2:]
    assert ((cut > 0).sum(1) <= 2).all()
    np.testing.assert_allclose(np.sort(cut, 1)[:, -2:], kept / kept.sum(1, keepdims=True), atol=1e-9)


@pytest.mark.slow
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
    with pytest.raises(ValueError, match="X must hold counts"):
        mixture.fit(counts + 0.5)
    with pytest.raises(ValueError, match="n_components must be at most the number of data points, 3; got 5"):
        mixture.set_params(n_components=5).fit(counts[:3])


@pytest.mark.slow
@pytest.mark.parametrize("covariance_type", ["full", "diag", "spherical", "tied"])
def test_what_users_of_scikit_learns_mixture_look_for(covariance_type):
    X = load_iris().data[::2]
    ours = TruncatedMixture(2, covariance_type=covariance_type, max_iter=200, n_init=1, random_state=0).fit(X)
    theirs = GaussianMixture(2, covariance_type=covariance_type, reg_covar=0)
    theirs.weights_, theirs.means_, theirs.covariances_ = ours.weights_, ours.means_, ours.covariances_
    theirs.precisions_cholesky_ = _compute_precision_cholesky(ours.covariances_, covariance_type)
    root, dense = theirs.precisions_cholesky_, covariance_type in ("full", "tied")
    np.testing.assert_allclose(ours.precisions_, root @ np.swapaxes(root, -1, -2) if dense else root**2, rtol=1e-6)
    np.testing.assert_allclose(ours.score_samples(X), theirs.score_samples(X), rtol=1e-6)
    assert ours.bic(X) == pytest.approx(theirs.bic(X))
    assert ours.aic(X) == pytest.approx(theirs.aic(X))
    assert ours.lower_bound_ == pytest.approx(ours.score(X))
    assert ours.converged_ == (ours.n_iter_ < 200)
    assert not TruncatedMixture(2, max_iter=1, n_init=1, random_state=0).fit(X).converged_


def test_counts_have_information_criteria_and_no_covariances():
    counts = np.random.default_rng(0).poisson(3.0, (40, 2))
    mixture = TruncatedMixture(2, family="poisson", max_iter=5, n_init=1, random_state=0).fit(counts)
    assert mixture.bic(counts) == pytest.approx(-2 * mixture.score_samples(counts).sum() + 5 * np.log(40))
    assert not hasattr(mixture, "covariances_")
    assert not hasattr(mixture, "precisions_")


@pytest.mark.parametrize("tol", [-1.0, np.nan, np.inf, "small"])
def test_tolerances_that_are_none_are_refused_by_their_own_name(tol):
    with pytest.raises(ValueError, match="tol must be a number of at least 0"):
        TruncatedMixture(2, tol=tol, n_init=1).fit(np.random.default_rng(0).normal(size=(20, 2)))


@pytest.mark.parametrize("kind", ["low", "low-rank", None])
def test_other_covariance_types_are_refused_by_name(kind):
    with pytest.raises(ValueError, match="covariance_type must be one of"):
        TruncatedMixture(2, covariance_type=kind).fit(np.random.default_rng(0).normal(size=(9, 2)))


@pytest.mark.parametrize("missing", [None, math.nan, pd.NA])
def test_categories_that_are_missing_are_named(missing):
    X = np.array([["a", "x"], ["b", missing]] * 3, dtype=object)
    for table in (X, pd.DataFrame(X)):
        with pytest.raises(ValueError, match="a category of their own, such as 'missing'"):
            TruncatedMixture(2, family="categorical").fit(table)


def test_categories_of_pandas_are_their_values():
    random = np.random.default_rng(0)
    table = pd.DataFrame({"a": random.choice(["x", "y"], 30), "b": random.choice([3, 7], 30)})
    quick = {"n_components": 2, "family": "categorical", "n_init": 1, "max_iter": 3, "random_state": 0}
    expected, found = (TruncatedMixture(**quick).fit(data) for data in (table, table.astype("category")))
    for values, of_table in zip(found.categories_, expected.categories_, strict=True):
        np.testing.assert_array_equal(values, of_table)
    np.testing.assert_array_equal(found.predict(table.astype("category")), expected.predict(table))
    with pytest.raises(ValueError, match="a category of their own, such as 'missing'"):
        TruncatedMixture(**quick).fit(table.where(table.b == 3, None).astype("category"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [float, str, bool])
def test_latent_classes_of_binary_and_categorical_columns(kind):
    random = np.random.default_rng(0)
    member = random.integers(2, size=300)
    likely = np.array([[0, 1, 0, 1, 1], [1, 0, 1, 0, 0]])[member]
    X = np.where(random.random(likely.shape) < 0.9, likely, 1 - likely).astype(kind)
    if kind is not bool:
        X = np.concatenate([X, np.where(random.random(300) < 0.3, 2, member)[:, None].astype(kind)], 1)
    found = TruncatedMixture(2, family="categorical", n_init=2, max_iter=30, random_state=0).fit(X)
    labels = found.predict(X)
    assert max((labels == member).mean(), (labels != member).mean()) > 0.97
    # Densities are sums over classes of products of probabilities, and these are frequencies.
    codes = np.stack([np.searchsorted(values, X[:, d]) for d, values in enumerate(found.categories_)], 1)
    likelihood = np.prod([probs[:, codes[:, d]] for d, probs in enumerate(found.probabilities_)], 0) * found.weights_[:, None]
    np.testing.assert_allclose(found.score_samples(X), np.log(likelihood.sum(0)), rtol=1e-6)
    shares = found.predict_proba(X)
    for d, probs in enumerate(found.probabilities_):
        expected = shares.T @ np.eye(probs.shape[1])[codes[:, d]]
        np.testing.assert_allclose(probs, expected / expected.sum(1, keepdims=True), atol=1e-3)
    num_parameters = 1 + 2 * sum(len(values) - 1 for values in found.categories_)
    assert found.bic(X) == pytest.approx(-2 * found.score_samples(X).sum() + num_parameters * np.log(300))
    drawn, _ = found.sample(4)
    assert set(drawn.ravel()) <= set(X.ravel())
    with pytest.raises(ValueError, match=r"values that fit has seen; got .*7.* in row 0, column 0. Declare"):
        found.predict(np.full((1, X.shape[1]), "7" if kind is str else 7))


def test_values_that_a_categorical_dtype_declares_may_come_later():
    random = np.random.default_rng(0)
    answers = pd.DataFrame(random.choice(["no", "yes"], (60, 3)), columns=list("abc"))
    mixture = TruncatedMixture(2, family="categorical", n_init=1, random_state=0)
    found, criterion = mixture.fit(answers).score_samples(answers), mixture.bic(answers)
    declared = answers.astype(pd.CategoricalDtype(["yes", "no", "never"]))
    mixture.fit(declared)
    assert mixture.categories_[0].tolist() == ["yes", "no", "never"]
    np.testing.assert_allclose(mixture.score_samples(declared), found, atol=1e-4)
    # Values that do not occur are no parameters.
    assert mixture.bic(declared) == pytest.approx(criterion, abs=0.01)
    declared.iloc[0, 0] = "never"
    scores = mixture.score_samples(declared)
    assert bool(np.isfinite(scores).all())
    assert scores[0] < found[0] - 10


@pytest.mark.parametrize("dtype", [bool, int, float])
def test_constant_columns_of_a_binary_matrix_may_change_later(dtype):
    matrix = np.random.default_rng(0).integers(0, 2, (40, 4)).astype(dtype)
    matrix[:, 2] = 0
    mixture = TruncatedMixture(2, family="categorical", n_init=1, max_iter=10, random_state=0).fit(matrix)
    assert [values.tolist() for values in mixture.categories_] == [[0, 1]] * 4
    assert type(mixture.sample(1)[0][0, 0]) is type(mixture.sample(1)[0][0, 2])
    answers = pd.DataFrame(matrix.astype(int)).astype(pd.CategoricalDtype([0, 1, 2]))
    assert mixture.fit(answers).categories_[0].tolist() == [0, 1, 2]
    mixture.fit(matrix)
    matrix[0, 2] = 1
    scores = mixture.score_samples(matrix)
    assert bool(np.isfinite(scores).all())
    assert scores.argmin() == 0


def test_lists_of_strings_and_numbers_are_categories_as_tables_are():
    rows = [["a", 1], ["b", 2], ["b", 1]] * 10
    mixture = TruncatedMixture(2, family="categorical", n_init=1, random_state=0).fit(rows)
    assert [values.tolist() for values in mixture.categories_] == [["a", "b"], [1, 2]]
    np.testing.assert_array_equal(mixture.predict(rows), mixture.predict(np.array(rows, dtype=object)))
    with pytest.raises(TypeError, match=r"columns of X must hold strings or numbers, not both, as columns \[1\] do"):
        mixture.fit([["a", 1], ["b", "2"]])


def test_labels_are_signed():
    X = np.random.default_rng(0).normal(size=(40, 2))
    labels = TruncatedMixture(2, n_init=1, random_state=0).fit_predict(X)
    assert (labels - 1).min() == -1


@pytest.mark.parametrize("value", [9.5, -1.0])
def test_what_is_no_count_is_refused_by_its_place_in_the_data(value):
    counts = np.random.default_rng(0).poisson(5, (80, 3)).astype(float)
    mixture = TruncatedMixture(2, family="poisson", max_iter=5, n_init=1, random_state=0).fit(counts)
    counts[50, 1] = value
    for call in (TruncatedMixture(2, family="poisson", random_state=0).fit, mixture.predict, mixture.score_samples):
        with pytest.raises(ValueError, match=rf"X must hold counts .*got {value} in row 50, column 1"):
            call(counts)


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("value", [-999.0, -9999.0, 1e6])
@pytest.mark.parametrize("covariance_type", ["full", "diag"])
def test_few_outliers_hide_no_clusters(value, covariance_type):
    random = np.random.default_rng(0)
    kind = random.integers(0, 3, 300)
    points = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])[kind] + 0.5 * random.normal(size=(300, 2))
    table = np.concatenate([points, [[value, 1.0]] * 3])
    found = TruncatedMixture(4, covariance_type=covariance_type, random_state=0).fit_predict(table)
    assert adjusted_rand_score(kind, found[:300]) > 0.95
    assert len({*found[300:]} - {*found[:300]}) == 1


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("row", [[1e9, 1.0], [1e9, -1e9]])
@pytest.mark.parametrize("covariance_type", ["full", "diag", "spherical", "tied"])
def test_a_single_outlier_changes_no_component_but_its_own(covariance_type, row, dtype):
    random = np.random.default_rng(0)
    kind = random.integers(0, 3, 300)
    points = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])[kind] + 0.5 * random.normal(size=(300, 2))
    table = np.concatenate([points, [row]]).astype(dtype)
    found = TruncatedMixture(4, covariance_type=covariance_type, random_state=0).fit(table)
    without = TruncatedMixture(3, covariance_type=covariance_type, random_state=0).fit(points)
    np.testing.assert_array_equal(adjusted_rand_score(without.predict(points), found.predict(table)[:300]), 1.0)
    if covariance_type != "tied":  # the sums that all share lose the digits of the clusters
        expected = without.score(points) + np.log(300 / 301)
        np.testing.assert_allclose(found.score(table[:300]), expected, atol=1e-3)


def test_columns_of_real_numbers_are_hardly_categorical():
    with pytest.warns(UserWarning, match="column 1 has 40 values in 40 rows"):
        TruncatedMixture(2, family="categorical", n_init=1, max_iter=2).fit(np.c_[np.arange(40) % 3, np.linspace(0, 1, 40)])


def test_a_categorical_column_has_only_values_of_its_own():
    """Beside a column of five values, each of one or two had a millionth for three values it lacks, and drew them."""
    rows = np.array([["a", "p", "x"], ["b", "q", "x"], ["c", "p", "x"], ["d", "q", "x"], ["e", "p", "x"]] * 6)
    mixture = TruncatedMixture(2, family="categorical", n_init=1, random_state=0).fit(rows)
    for probabilities in mixture.probabilities_:
        np.testing.assert_allclose(probabilities.sum(1), 1.0, rtol=1e-12)
    drawn, _ = mixture.sample(1_000_000)
    assert [set(column) for column in drawn.T] == [set("abcde"), set("pq"), {"x"}]
    assert mixture.lower_bound_ == pytest.approx(mixture.score(rows), abs=1e-12)


@pytest.mark.parametrize("covariance", ["full", "diag", "spherical", "tied"])
def test_densities_without_bound_are_told(covariance, recwarn):
    """Constant columns, copies, and a component of each data point: scores of 19, 0 and 17 nats said nothing."""
    generator = np.random.default_rng(0)
    X = np.concatenate([generator.normal(size=(60, 3)), 5 + generator.normal(size=(60, 3))])

    def fit(rows, components=2):
        return TruncatedMixture(components, covariance_type=covariance, n_init=1, random_state=0).fit(rows)

    fit(X * [1e-6, 1.0, 1e6])
    fit((X + 1000).astype(np.float32))
    assert not recwarn.list
    # Variances that all columns share are bounded.
    told = (
        contextlib.nullcontext()
        if covariance == "spherical"
        else pytest.warns(UserWarning, match=r"columns \[3\] of X do not vary: .*Leave")
    )
    with told:
        fit(np.c_[X, np.ones(len(X))])
    assert covariance != "spherical" or not recwarn.list
    if covariance in ("full", "tied"):
        with pytest.warns(UserWarning, match=r"have next to no variance in some direction, as columns are copies"):
            fit(np.c_[X, X[:, 0]])
    with pytest.warns(UserWarning, match=r"components \[0.*\] have next to no variance.*take fewer components"):
        fit(X[:5], 5)


@pytest.mark.parametrize("covariance", ["diag", "spherical"])
def test_components_without_covariances_look_at_none(covariance, monkeypatch):
    """Of fewer rows than columns, eigenvalues of matrices took minutes from 2000 columns on."""
    monkeypatch.setattr("torch.linalg.eigh", None)
    X = np.random.default_rng(0).normal(size=(12, 40)) + np.repeat([[0.0], [9.0]], 6, 0)
    mixture = TruncatedMixture(2, covariance_type=covariance, n_init=1, random_state=0).fit(X)
    assert adjusted_rand_score(np.repeat([0, 1], 6), mixture.predict(X)) == 1.0
