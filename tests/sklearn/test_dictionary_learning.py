"""SparseCoding against the library's own results and against enumeration."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pandas as pd
import pyro
import pytest
import torch
from scipy.spatial.distance import cdist
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pyro_truncated import AutoTruncated, EvolutionarySearch, LearnConfig, learn
from pyro_truncated.datasets import bar_components, linear_bars, matched_bars
from pyro_truncated.models import BinarySparseCoding
from pyro_truncated.sklearn import SparseCoding
from pyro_truncated.sklearn.estimators import isolated_state

QUICK = {"max_iter": 3, "n_init": 1, "random_state": 0}


def bars(num: int = 60, size: int = 3) -> np.ndarray:
    return linear_bars(num, size=size, mean_active=1.5, generator=torch.Generator().manual_seed(3)).data.double().numpy()


def patterns(num: int) -> torch.Tensor:
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=num)), dtype=torch.float64)


def exact(coder: SparseCoding, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and log evidence from the densities of the observed entries under all states, of standardised columns."""
    model, s = coder.model_, patterns(coder.model_.num_latents)
    deviation = np.nanstd(y, 0)
    volume = (~np.isnan(y) * np.log(deviation)).sum(1)
    y = torch.tensor((y - np.nanmean(y, 0)) / deviation)
    log_joint = torch.where(s > 0, model.prior.log(), torch.log1p(-model.prior)).sum(-1).detach().repeat(len(y), 1)
    means = torch.zeros(len(y), len(s), s.shape[1], dtype=torch.float64)
    for n, c in itertools.product(range(len(y)), range(len(s))):
        seen = ~y[n].isnan()
        weight = model.weight.detach()[seen]
        prior_mean = s[c] * model.slab_mean.detach() if coder.family == "spike_slab" else s[c]
        prior_variance = s[c] * model.slab_scale.detach() ** 2 if coder.family == "spike_slab" else torch.zeros_like(s[c])
        covariance = weight @ prior_variance.diag() @ weight.mT + model.scale.detach() ** 2 * torch.eye(int(seen.sum())).double()
        residual = y[n, seen] - model.bias.detach()[seen] - weight @ prior_mean
        density = torch.distributions.MultivariateNormal(torch.zeros_like(residual), covariance)
        log_joint[n, c] += density.log_prob(residual)
        means[n, c] = prior_mean + prior_variance * (weight.mT @ torch.linalg.solve(covariance, residual))
    codes = (log_joint.softmax(-1).unsqueeze(-1) * means).sum(1)
    return codes.numpy(), log_joint.logsumexp(-1).numpy() - volume


@pytest.mark.slow
@pytest.mark.parametrize("family", ["spike_slab", "gaussian"])
def test_codes_and_scores_are_those_of_the_exact_posterior(family):
    y = bars(20)
    y[::3, 2] = y[1::4, 5] = np.nan
    coder = SparseCoding(4, family=family, **QUICK).fit(y)
    codes, evidence = exact(coder, y)
    np.testing.assert_allclose(coder.transform(y), codes, atol=1e-8)
    np.testing.assert_allclose(coder.score_samples(y), evidence, atol=1e-8)
    assert coder.score(y) == pytest.approx(evidence.mean())
    np.testing.assert_allclose(coder.inverse_transform(codes), codes @ coder.components_ + coder.offset_, atol=1e-12)


@pytest.mark.slow
def test_probabilities_of_binary_data_are_those_of_the_noisy_or():
    y = (bars(40) > 5).astype(float)
    coder = SparseCoding(3, family="bernoulli", **QUICK).fit(y)
    s, weight = patterns(3), coder.model_.weight.detach()
    p = 1 - (1 - coder.model_.leak.detach()) * (1 - weight * s.unsqueeze(1)).prod(-1)
    np.testing.assert_allclose(coder.inverse_transform(s.numpy()), p.numpy(), atol=1e-12)
    log_joint = torch.distributions.Bernoulli(p).log_prob(torch.tensor(y).unsqueeze(1)).sum(-1)
    log_joint = log_joint + torch.distributions.Bernoulli(coder.model_.prior.detach()).log_prob(s).sum(-1)
    np.testing.assert_allclose(coder.score_samples(y), log_joint.logsumexp(-1).numpy(), atol=1e-8)
    np.testing.assert_allclose(coder.transform(y), (log_joint.softmax(-1) @ s).numpy(), atol=1e-8)
    np.testing.assert_array_equal(SparseCoding(3, family="bernoulli", binarize=5.0, **QUICK).fit(bars(40)).components_, coder.components_)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::pyro_truncated.DisagreeingStartsWarning")  # after ten steps starts need not agree
def test_the_dictionary_is_the_one_that_learn_finds():
    y = bars()
    coder = SparseCoding(6, family="gaussian", max_iter=10, n_init=2, n_states=20, random_state=1).fit(y)
    with isolated_state(1) as generator:
        model = BinarySparseCoding(9, 6, shared_prior=False, dtype=torch.float64)
        own = torch.tensor((y - y.mean(0)) / y.std(0))
        guide = learn(
            model, own, num_states=20, steps=10, config=LearnConfig(restart_steps=10), restarts=2, generator=generator, progress=False
        )
    # Both restarts end at the same dictionary: rounding decides whose order of the elements is kept.
    found = model.weight.detach().mT.numpy() * y.std(0)
    order = cdist(coder.components_, found).argmin(1)
    assert sorted(order) == list(range(6))
    np.testing.assert_allclose(coder.components_, found[order], rtol=1e-6)
    np.testing.assert_allclose(coder.starts_, np.array(guide.starts) - np.log(y.std(0)).sum(), rtol=1e-6)


@pytest.mark.nightly
def test_states_of_many_latents_are_as_good_as_those_of_an_evolution():
    y = torch.tensor(bars(100, size=5))
    y = (y - y.mean(0)) / y.std(0, correction=0)
    coder = SparseCoding(10, family="gaussian", random_state=0, max_iter=20, n_init=1, n_states=30).fit(y.numpy())
    with isolated_state():
        guide = AutoTruncated(coder.model_, num_states=30)
        guide.search_(EvolutionarySearch(crossover=True), guide.make_scorer(y), 30)
        evolved = guide.population().free_energy()
    assert coder.score(y.numpy()) > float(evolved.mean()) - 1e-3


@pytest.mark.nightly
def test_what_is_said_of_a_data_point_does_not_depend_on_its_company():
    y = bars(50, size=5)
    coder = SparseCoding(12, n_states=10, **QUICK).fit(y)
    codes = coder.transform(y)
    order = np.random.default_rng(0).permutation(50)
    np.testing.assert_allclose(coder.transform(y[order]), codes[order], atol=1e-10)
    np.testing.assert_allclose(np.concatenate([coder.transform(y[n : n + 1]) for n in range(10)]), codes[:10], atol=1e-10)


@pytest.mark.slow
def test_neither_pyro_nor_torch_notice():
    y = bars()
    pyro.param("weight", torch.tensor(1.0))
    before, state = dict(pyro.get_param_store().items()), torch.get_rng_state()
    first = SparseCoding(3, **QUICK).fit(y)
    components = first.components_.copy()
    SparseCoding(3, **QUICK | {"random_state": 5}).fit(y + 1).transform(y)
    SparseCoding(3, **QUICK).partial_fit(y)
    np.testing.assert_array_equal(first.components_, components)
    assert dict(pyro.get_param_store().items()).keys() == before.keys()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.nightly
def test_pipelines_grids_frames_and_pickles():
    frame = pd.DataFrame(bars(), columns=[f"pixel {d}" for d in range(9)])
    pipeline = make_pipeline(StandardScaler(), SparseCoding(**QUICK)).set_output(transform="pandas")
    search = GridSearchCV(pipeline, {"sparsecoding__n_components": [1, 4]}, cv=2, error_score="raise").fit(frame)
    assert search.best_params_ == {"sparsecoding__n_components": 4}
    codes = search.transform(frame)
    assert list(codes.columns) == [f"sparsecoding{h}" for h in range(4)]
    again = pickle.loads(pickle.dumps(search.best_estimator_)).transform(frame)
    pd.testing.assert_frame_equal(again, codes)
    np.testing.assert_array_equal(clone(pipeline).set_params(sparsecoding__n_components=4).fit(frame).transform(frame), codes)


@pytest.mark.nightly
def test_minibatches_lead_where_all_data_lead():
    y = bars(400)
    whole = SparseCoding(6, family="gaussian", random_state=0, max_iter=30).fit(y)
    online = SparseCoding(6, family="gaussian", random_state=0)
    for batch in range(60):
        online.partial_fit(y[batch % 4 :: 4])
    assert online.n_iter_ == 60
    start = SparseCoding(6, family="gaussian", random_state=0).partial_fit(y[::4])
    assert online.score(y) > start.score(y) + 1
    # From the batch's optimum, minibatches stay there.
    before = whole.score(y)
    for batch in range(4):
        whole.partial_fit(y[batch::4])
    assert whole.score(y) > before - 0.2


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["spike_slab", "gaussian", "bernoulli"])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_few_new_rows_change_a_fitted_dictionary_little(family, num_rows):
    y = bars(200) if family != "bernoulli" else (bars(200) > 5).astype(float)
    coder = SparseCoding(6, family=family, max_iter=15, n_init=1, random_state=0).fit(y)
    before = coder.score(y)
    for start in range(3):
        coder.partial_fit(y[start : start + num_rows])
    assert coder.score(y) > before - 1


@pytest.mark.slow
def test_rows_that_come_one_by_one_train_a_dictionary():
    y = bars(200)
    coder = SparseCoding(6, family="gaussian", random_state=0).partial_fit(y[:2])
    first = coder.score(y)
    for row in y[:80]:
        coder.partial_fit(row[None])
    assert coder.score(y) > first + 1


@pytest.mark.slow
def test_starts_are_one_by_default_where_entries_are_missing():
    damaged = np.random.default_rng(0).normal(size=(60, 4))
    damaged[::3, 1] = np.nan
    assert len(SparseCoding(3, max_iter=2, random_state=0).fit(damaged).starts_) == 1


@pytest.mark.slow
def test_missing_entries_are_filled_in():
    y = bars(200)
    damaged = np.where(np.random.default_rng(0).random(y.shape) < 0.2, np.nan, y)
    coder = SparseCoding(6, family="gaussian", random_state=0, max_iter=15, n_init=1).fit(damaged)
    filled = coder.inverse_transform(coder.transform(damaged))
    hole = np.isnan(damaged)
    means = np.broadcast_to(np.nanmean(damaged, 0), y.shape)
    assert np.square(filled - y)[hole].mean() < 0.5 * np.square(means - y)[hole].mean()


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["spike_slab", "gaussian"])
def test_all_bars_are_found_with_the_defaults(family):
    y = linear_bars(250, size=5, mean_active=2.0, generator=torch.Generator().manual_seed(7)).data.numpy()
    coder = SparseCoding(10, family=family, random_state=0).fit(y)
    assert coder.components_.dtype == np.float32
    assert matched_bars(torch.from_numpy(coder.components_.T.copy()), 10 * bar_components(5)) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "poisson"}, "family must be one of .*'poisson'"),
        ({"n_components": 0}, "n_components must be a positive integer; got 0"),
        ({"max_iter": 1.5}, "max_iter must be a positive integer; got 1.5"),
        ({"ridge": -1.0}, "ridge must be a finite number of at least 0; got -1.0"),
        ({"family": "bernoulli"}, "X must hold 0 and 1 for family='bernoulli'; got .*: give a threshold"),
    ],
)
def test_what_is_wrong_is_said_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        SparseCoding(**{**QUICK, **options}).fit(bars())


@pytest.mark.slow
def test_codes_of_another_width_are_refused():
    coder = SparseCoding(2, **QUICK).fit(bars())
    with pytest.raises(ValueError, match="X must have 2 columns, one per component; got 3"):
        coder.inverse_transform(np.ones((4, 3)))


def test_real_numbers_need_a_threshold_to_be_binary():
    with pytest.raises(ValueError, match=r"X must hold 0 and 1 for family='bernoulli'; got 0\.5: give a threshold, binarize="):
        SparseCoding(2, family="bernoulli").fit([[0.0, 1.0], [0.5, 1.0]])


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_data_that_do_not_vary_are_told(value):
    coder = SparseCoding(2, n_init=1, max_iter=3, random_state=0)
    with pytest.warns(UserWarning, match="X does not vary: nothing is learned from it"):
        found = coder.inverse_transform(coder.fit_transform(np.full((30, 4), value)))
    np.testing.assert_allclose(found, value, atol=1e-6)
