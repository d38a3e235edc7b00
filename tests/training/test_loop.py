"""The training loop: it takes svi's steps and no others, stops when it should, resumes to the same numbers, and picks the best start."""

from __future__ import annotations

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.datasets import linear_bars
from pyro_truncated.models import BinarySparseCoding
from pyro_truncated.training import fit, fit_restarts
from pyro_truncated.training.checkpoint import save_checkpoint


@pytest.fixture
def y(generator):
    return linear_bars(30, 3, mean_active=2.0, generator=generator).data


def plain(y, batch_size=None):
    weight = pyro.param("weight", lambda: y[:6].mT.clone())
    noise = pyro.param("noise", torch.tensor(5.0), constraint=dist.constraints.positive)
    with pyro.plate("data", len(y), subsample_size=batch_size) as index:
        s = pyro.sample("s", dist.Bernoulli(torch.full((6,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, noise).to_event(1), obs=y[index])


def fresh(kind: str, y: torch.Tensor, seed: int = 7) -> SVI:
    pyro.set_rng_seed(seed)
    elbo = Truncated_ELBO(EvolutionarySearch(parents=3, children=3))
    if kind == "plain":
        return SVI(plain, AutoTruncated(plain, num_states=8), Adam({"lr": 0.1}), elbo)
    model = BinarySparseCoding(9, 6).initialize(y)
    return SVI(model, AutoTruncated(model, num_states=8), ClosedForm(model), elbo)


def test_fit_takes_the_steps_of_svi(y):
    svi = fresh("closed form", y)
    expected = [-svi.step(y) for _ in range(5)]
    pyro.clear_param_store()
    training = fit(fresh("closed form", y), y, steps=5)
    assert training.record == {"free_energy": expected}
    assert training.steps == len(training.seconds) == 5
    assert training.free_energy == expected[-1]
    assert not training.stopped_early


def test_callbacks_record_and_stop(y):
    def halve(training):
        return {"half": training.free_energy / 2}

    training = fit(fresh("closed form", y), y, steps=9, callbacks=[halve, lambda training: training.steps == 4])
    assert training.steps == 4
    assert training.stopped_early
    assert training.record["half"] == [value / 2 for value in training.record["free_energy"]]


def test_callbacks_must_record_at_every_step(y):
    with pytest.raises(ValueError, match="must return the same names at every step"):
        fit(fresh("closed form", y), y, steps=3, callbacks=[lambda training: {"odd": 1.0} if training.steps % 2 else None])
    # Steps are counted by the record of free energies.
    with pytest.raises(ValueError, match=r"each once; after 1 steps there are {'free_energy': 2}"):
        fit(fresh("closed form", y), y, steps=3, callbacks=[lambda training: {"free_energy": training.free_energy}])


class Scripted(SVI):
    """An SVI whose losses are given."""

    def __init__(self, losses):
        self.losses = iter(losses)

    def step(self, *args, **kwargs):
        return next(self.losses)


def test_early_stopping_compares_averages():
    losses = [100.0, 50.0, 20.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0]
    training = fit(Scripted(losses), steps=10, patience=2, tolerance=1e-3)
    # Averages of two: the first pair that does not exceed the pair before is (10, 10) after (10, 10), at the seventh step.
    assert training.steps == 7
    assert training.stopped_early
    assert fit(Scripted(losses), steps=10).steps == 10
    noisy = [10.0 + (-1) ** step for step in range(10)]
    assert fit(Scripted(noisy), steps=10, patience=2).steps == 4


def test_bad_arguments_are_refused(y):
    with pytest.raises(TypeError, match=r"svi must be a pyro\.infer\.SVI; got function"):
        fit(plain, y, steps=1)
    with pytest.raises(TypeError, match="callbacks must be a sequence of functions"):
        fit(fresh("plain", y), y, steps=2, callbacks=print)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["closed form", "plain"])
def test_a_run_cut_short_resumes_to_the_same_numbers(kind, y, tmp_path):
    path = tmp_path / "folder" / "run.pt"
    svi = fresh(kind, y)
    expected = fit(svi, y, steps=8).record["free_energy"]
    words = svi.guide.words.clone()

    def dies(training):
        if training.steps == 5:
            raise KeyboardInterrupt

    pyro.clear_param_store()
    with pytest.raises(KeyboardInterrupt):
        fit(fresh(kind, y), y, steps=8, checkpoint=path, checkpoint_seconds=0.0, callbacks=[dies])
    assert len(torch.load(path, weights_only=True)["history"]["record"]["free_energy"]) == 4
    pyro.clear_param_store()
    svi = fresh(kind, y)
    training = fit(svi, y, steps=8, checkpoint=path)
    assert training.record["free_energy"] == expected
    assert torch.equal(svi.guide.words, words)
    # A finished run is not run again.
    pyro.clear_param_store()
    assert fit(fresh(kind, y), y, steps=8, checkpoint=path).record["free_energy"] == expected


def test_early_stopping_survives_a_checkpoint(y, tmp_path):
    flags = {"patience": 3, "tolerance": 1e-2, "checkpoint": tmp_path / "run.pt"}
    first = fit(fresh("closed form", y), y, steps=100, **flags)
    assert first.stopped_early
    pyro.clear_param_store()
    again = fit(fresh("closed form", y), y, steps=100, **flags)
    assert again.record == first.record
    assert again.stopped_early


def test_checkpoints_of_others_are_refused(y, tmp_path):
    path = tmp_path / "run.pt"
    fit(fresh("closed form", y), y, steps=2, checkpoint=path, settings={"H": 6})
    pyro.clear_param_store()
    with pytest.raises(ValueError, match="other settings"):
        fit(fresh("closed form", y), y, steps=2, checkpoint=path, settings={"H": 7})
    pyro.clear_param_store()
    svi = fresh("closed form", y)
    svi.step(y)
    save_checkpoint(path, svi, history=[1.0])
    pyro.clear_param_store()
    with pytest.raises(ValueError, match="its history has no record"):
        fit(fresh("closed form", y), y, steps=2, checkpoint=path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["closed form", "plain"])
def test_restarts_keep_the_best_and_do_not_touch_each_other(kind, y):
    restarts = fit_restarts(lambda restart: fresh(kind, y, seed=restart), y, restarts=3, steps=6)
    singles = []
    for seed in range(3):
        with pyro.get_param_store().scope():
            singles.append(fit(fresh(kind, y, seed=seed), y, steps=6).record["free_energy"])
    np.testing.assert_array_equal(restarts.record["free_energy"], np.array(singles))
    assert restarts.best == int(np.argmax([values[-1] for values in singles]))
    svi = restarts.training.svi
    # The store holds the best run's parameters: the loss is that of a run which took no other steps.
    with pyro.get_param_store().scope():
        alone = fresh(kind, y, seed=restarts.best)
        fit(alone, y, steps=6)
        expected = alone.evaluate_loss(y)
    assert svi.evaluate_loss(y) == expected


@pytest.mark.slow
def test_records_of_restarts_that_stopped_early_are_padded(y, tmp_path):
    restarts = fit_restarts(
        lambda restart: fresh("closed form", y, seed=restart),
        y,
        restarts=2,
        steps=60,
        patience=2,
        tolerance=1e-2,
        checkpoint=tmp_path / "run.pt",
    )
    lengths = [training.steps for training in restarts.trainings]
    record = restarts.record["free_energy"]
    assert record.shape == (2, max(lengths))
    assert [int(np.isfinite(row).sum()) for row in record] == lengths
    assert {path.name for path in tmp_path.iterdir()} == {"run-0.pt", "run-1.pt"}


class Growth:
    """How much the free energy has grown since the last step, from what the run finds on."""

    def start(self, training):
        self.before = training.record["free_energy"][-1] if training.steps else 0.0

    def __call__(self, training):
        growth, self.before = training.free_energy - self.before, training.free_energy
        return {"growth": growth}


@pytest.mark.slow
def test_a_callback_that_starts_does_not_notice_an_interruption(y, tmp_path):
    def watched(steps, **options):
        pyro.clear_param_store()
        return fit(fresh("closed form", y), y, steps=steps, callbacks=[Growth()], **options).record

    whole = watched(6)
    watched(3, checkpoint=tmp_path / "run.pt")
    assert watched(6, checkpoint=tmp_path / "run.pt")["growth"] == whole["growth"]


def test_a_restart_that_diverged_is_not_the_best(y, monkeypatch):
    def make(restart):
        svi = fresh("closed form", y, seed=restart)
        if restart == 1:
            monkeypatch.setattr(svi, "step", lambda *_: math.nan)
        return svi

    restarts = fit_restarts(make, y, restarts=3, steps=2)
    assert math.isnan(restarts.trainings[1].free_energy)
    assert restarts.best != 1
