"""Latents of new data, predictions, retrieval, minibatch training, conversion and pictures."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO, to_arviz
from pyro_truncated.gp import SpikeSlabInputs
from pyro_truncated.gplvm import (
    Posterior,
    SpikeSlabGPLVM,
    explicit_copy,
    fit,
    fit_minibatches,
    initialize,
    latents_to_arviz,
    natural_step,
    plot_latents,
    plot_relevance,
    plot_switches,
    remove_dimensions,
)
from pyro_truncated.gplvm.spike_slab.fitting import _nearly_linear
from pyro_truncated.utils.arviz_compat import get_dataset
from tests.gplvm.test_bound import random_model, random_views

DOUBLE = torch.float64


def joined(model, posterior, loc, scale):
    """The model with explicit inducing variables and more data points."""
    larger = random_model(model.num_data + len(loc), model.num_observed, model.num_latents, num_inducing=4, collapsed=False)
    held = {name: value for name, value in model.state_dict().items() if "loc" not in name and not name.startswith("scale")}
    larger.load_state_dict(held, strict=False)
    with torch.no_grad():
        larger.loc = torch.cat([model.loc, loc])
        larger.scale = torch.cat([model.scale, scale])
        for view, inducing in zip(larger.views, posterior.inducing, strict=True):
            view.mean, view.scale_tril = inducing.mean, torch.linalg.cholesky(inducing.covariance)
    return larger


@pytest.mark.parametrize("missing", [0.0, 0.4])
def test_contribution_of_new_points_is_the_growth_of_the_bound(missing):
    model = random_model(6, (3, 2), 2)
    views = random_views(model)
    posterior = Posterior(model, views)
    new = [v[:3].masked_fill(torch.rand(3, v.shape[1]) < missing, torch.nan) for v in random_views(random_model(6, (3, 2), 2), 7)]
    latents = posterior.infer(new, steps=3)
    larger = joined(model, posterior, latents.loc, latents.scale)
    both = [torch.cat([a, b]) for a, b in zip(views, new, strict=True)]
    growth = float((larger.bound(both) - model.bound(views)).detach())
    assert float(latents.bound.sum()) == pytest.approx(growth, rel=1e-9, abs=1e-8)


@pytest.mark.slow
def test_inferred_latents_are_optimal_and_rows_do_not_interact():
    model = random_model(6, (3, 2), 2)
    posterior = Posterior(model, random_views(model))
    new = random_views(model, 5)[0][:4]
    together = posterior.infer({0: new}, steps=200, tolerance=1e-12)
    alone = posterior.infer({0: new[2:3]}, steps=200, tolerance=1e-12)
    torch.testing.assert_close(alone.bound, together.bound[2:3], rtol=1e-9, atol=1e-9)
    data, prior = posterior._check_views({0: new}), (torch.zeros_like(together.loc), torch.ones_like(together.loc))
    for shift in (0.02, -0.02):
        for q in range(2):
            moved = together.loc.clone()
            moved[:, q] += shift
            with torch.no_grad():
                worse = posterior._contribution(data, together.usage, moved, together.scale.log(), prior)
            assert bool((worse <= together.bound + 1e-7).all())


def test_an_unobserved_view_is_predicted_from_what_is_shared():
    model = random_model(6, (3, 2), 2)
    posterior = Posterior(model, random_views(model))
    latents = posterior.infer({0: random_views(model, 5)[0][:2]}, steps=20)
    found = posterior.reconstruct(latents, 1, full_covariance=True)
    # By drawing switches of both views, latents, and the functions' means: the first two moments.
    num_samples = 40_000
    gamma = model.probability.detach()
    b = torch.rand(num_samples, 2, 2, dtype=DOUBLE) < gamma
    informed = b[:, 0].unsqueeze(1)
    noise = torch.randn(num_samples, *latents.loc.shape, dtype=DOUBLE)
    x = torch.where(informed, latents.loc + latents.scale * noise, noise) * b[:, 1].unsqueeze(1)
    view, inducing = model.views[1], posterior.inducing[1]
    with torch.no_grad():
        cross = view.kernel(x.reshape(-1, 2), view.inducing)
        f = (cross @ inducing.weights).reshape(num_samples, 2, 2) + view.center
        own = view.kernel.variance - ((cross @ inducing.reduction) * cross).sum(-1).reshape(num_samples, 2)
    error = f.std(0) / num_samples**0.5
    # Seeded; false alarm in fewer than 1 of 1000 seeds.
    assert bool(((found.mean - f.mean(0)).abs() < 4.2 * error).all())
    centred = f - f.mean(0)
    covariance = torch.einsum("snd,sne->nde", centred, centred) / num_samples + torch.diag_embed(own.mean(0).unsqueeze(-1).expand(-1, 2))
    torch.testing.assert_close(found.covariance, covariance, rtol=0.05, atol=0.02)
    torch.testing.assert_close(posterior.reconstruct(latents, 1).variance, found.variance, rtol=1e-10, atol=1e-12)


def test_an_exact_latent_with_uncertain_switches_is_not_just_plugged_in():
    model = random_model(6, (3,), 1)
    posterior = Posterior(model, random_views(model))
    loc = torch.randn(3, 1, dtype=DOUBLE)
    gamma = model.probability[0].detach()
    parts = [posterior.predict_at(SpikeSlabInputs(x, torch.zeros_like(x))) for x in (loc, torch.zeros_like(loc))]
    mean = gamma * parts[0].mean + (1 - gamma) * parts[1].mean
    second = gamma * (parts[0].variance + parts[0].mean.square()) + (1 - gamma) * (parts[1].variance + parts[1].mean.square())
    found = posterior.predict(loc)
    torch.testing.assert_close(found.mean, mean, rtol=1e-9, atol=1e-10)
    center = model.views[0].center
    torch.testing.assert_close(found.variance, second - mean.square(), rtol=1e-7, atol=1e-8)
    assert center.shape == (3,)


def curve(num_data=30, noise=0.05, seed=0):
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(num_data, 1, generator=generator, dtype=DOUBLE)
    weight = torch.randn(1, 6, generator=generator, dtype=DOUBLE)
    return t @ weight + noise * torch.randn(num_data, 6, generator=generator, dtype=DOUBLE), t


@pytest.mark.slow
def test_missing_outputs_are_filled_in():
    y, _ = curve(40)
    model = SpikeSlabGPLVM(30, 6, 3, kernel="linear")
    assert not fit(model, y[:30], warm_up=60, steps=40, rounds=2).is_all_noise
    assert int((model.probability > 0.5).sum()) == 1
    posterior = Posterior(model, y[:30])
    holed = y[30:].clone()
    holed[:, 3:] = torch.nan
    latents = posterior.infer(holed)
    found = posterior.reconstruct(latents)
    assert float((found.mean - y[30:])[:, 3:].abs().max()) < 0.3
    assert bool((found.variance > 0).all())


@pytest.mark.slow
def test_pure_noise_is_called_noise():
    model = SpikeSlabGPLVM(20, 4, 2, kernel="linear")
    result = fit(model, torch.randn(20, 4, dtype=DOUBLE), warm_up=20, steps=40, rounds=2)
    assert result.is_all_noise
    assert float(model.relevance().max()) < 0.1


def test_long_length_scales_at_first_leave_kernels_as_they_were():
    model = random_model(6, (3, 2), 2, kernel=["rbf", "linear"])
    kernel = model.views[0].kernel
    before = copy.deepcopy(model.state_dict())
    steep = kernel.variance.detach() / kernel.lengthscale.detach().square()
    with _nearly_linear(model):
        torch.testing.assert_close(kernel.lengthscale.detach(), 3 * before["views.0.kernel.lengthscale_unconstrained"].exp())
        torch.testing.assert_close(kernel.variance.detach() / kernel.lengthscale.detach().square(), steep)
    torch.testing.assert_close(model.state_dict(), before, rtol=1e-12, atol=1e-12)


@pytest.mark.nightly
def test_dimensions_that_stand_for_bends_are_removed():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 2, generator=generator, dtype=DOUBLE)
    bends = torch.cat([x, x.square(), x.prod(1, keepdim=True)], 1)
    y = bends @ torch.randn(5, 8, generator=generator, dtype=DOUBLE)
    y = y + 0.3 * torch.randn(y.shape, generator=generator, dtype=DOUBLE)
    model = SpikeSlabGPLVM(150, 8, 5, num_inducing=15)
    before = fit(model, y, warm_up=30, steps=20, rounds=1, generator=torch.Generator().manual_seed(0)).bound
    used = int((model.probability > 0.5).sum())
    reached = remove_dimensions(model, y, 40)
    assert reached > before + 1
    assert 1 <= int((model.probability > 0.5).sum()) < used
    # What it returns is the bound of the model that it leaves, its switches fully on or off.
    with model.fix_switches((model.probability > 0.5).double()):
        assert float(model.bound(y).detach()) == pytest.approx(reached, rel=1e-9)


@pytest.mark.slow
def test_every_start_begins_with_the_same_length_scales(monkeypatch):
    model = SpikeSlabGPLVM(8, 3, 2, num_inducing=3)
    (y,) = random_views(model)
    seen = []

    def recording(started, *arguments):
        seen.append(started.views[0].kernel.lengthscale.detach().clone())
        initialize(started, *arguments)

    monkeypatch.setattr("pyro_truncated.gplvm.spike_slab.fitting.initialize", recording)
    fit(model, y, start="random", num_starts=2, warm_up=2, steps=2, rounds=1)
    assert torch.equal(*seen)
    assert not torch.equal(model.views[0].kernel.lengthscale.detach(), seen[0])


@pytest.mark.slow
def test_a_start_that_is_given_stays_as_it_is_and_serves_every_start():
    model = SpikeSlabGPLVM(8, 3, 2, num_inducing=3)
    (y,) = random_views(model)
    given = torch.randn(8, 2, dtype=torch.float64)
    kept = given.clone()
    result = fit(model, y, start=given, num_starts=2, warm_up=3, steps=3, rounds=1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(given, kept)
    initialize(model, y, given)
    assert torch.equal(model.loc.detach(), kept)
    assert len(result.starts) == 2


@pytest.mark.slow
def test_training_with_missing_outputs_recovers_them():
    y, _ = curve(30)
    holes = torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    model = SpikeSlabGPLVM(30, 6, 2, kernel="linear")
    result = fit(model, y.masked_fill(holes, torch.nan), warm_up=60, steps=40, rounds=2)
    assert result.bound == pytest.approx(float(model.bound(y.masked_fill(holes, torch.nan)).detach()))
    posterior = Posterior(model, y.masked_fill(holes, torch.nan))
    found = posterior.predict(model.loc.detach(), scale=model.scale.detach())
    assert float((found.mean - y)[holes].square().mean().sqrt()) < 0.15


def test_shared_dimensions_and_distances():
    model = random_model(6, (3, 2), 3)
    views = random_views(model)
    with torch.no_grad():
        model.logits = torch.tensor([[20.0, 20.0, -20.0], [20.0, -20.0, -20.0]])
    posterior = Posterior(model, views)
    assert posterior.group_dimensions() == {"shared": [0], "unused": [2], "private 0": [1], "private 1": []}
    latents = posterior.infer([views[0][:2], None], steps=5)
    expected = (latents.loc[:, :1] - model.loc.detach()[:, :1].mT).abs()
    torch.testing.assert_close(posterior.distances(latents), expected, rtol=1e-5, atol=1e-6)


def test_full_natural_step_reaches_the_collapsed_bound():
    collapsed = random_model(7, (3, 2), 2)
    views = random_views(collapsed)
    found = explicit_copy(collapsed, views)
    assert not found.collapsed
    assert float(found.bound(views).detach()) == pytest.approx(float(collapsed.bound(views).detach()), rel=1e-9)
    assert collapsed.collapsed


@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_natural_steps_raise_the_explicit_bound(missing):
    model = random_model(7, (3,), 2, collapsed=False)
    views = random_views(model, missing=missing)
    bounds = []
    for _ in range(6):
        bounds.append(float(model.bound(views).detach()))
        natural_step(model, views, rate=0.5)
    assert all(b > a for a, b in itertools.pairwise(bounds))


@pytest.mark.nightly
def test_minibatches_come_close_to_the_collapsed_bound():
    y, _ = curve(60)
    model = SpikeSlabGPLVM(60, 6, 2, kernel="linear", collapsed=False)
    initialize(model, y)
    natural_step(model, y)
    first = float(model.bound(y).detach())
    fit_minibatches(model, y, 300, batch_size=20, learning_rate=0.05, generator=torch.Generator().manual_seed(0))
    natural_step(model, y)
    reached = float(model.bound(y).detach())
    bound = fit(SpikeSlabGPLVM(60, 6, 2, kernel="linear"), y, warm_up=60, steps=40, rounds=2).bound
    assert bound - 0.05 * (bound - first) < reached < bound + 1.0


def test_arviz_holds_switches_and_latents():
    model = random_model(5, (3, 2), 2)
    views = random_views(model)
    idata = latents_to_arviz(model, views, num_samples=300, num_chains=1, seed=0)
    posterior, exact = get_dataset(idata, "posterior"), get_dataset(idata, "latent_posterior")
    assert dict(posterior["b"].sizes) == {"chain": 1, "draw": 300, "view": 2, "latent": 2}
    # Seeded; four means of 300 draws, false alarm in fewer than 1 of 1000 seeds.
    error = np.sqrt(exact["probability"] * (1 - exact["probability"]) / 300)
    assert bool((np.abs(posterior["b"].mean(("chain", "draw")) - exact["probability"]) < 3.7 * error).all())
    assert posterior["x"].shape == (1, 300, 5, 2)
    np.testing.assert_allclose(exact["bound"], float(model.bound(views).detach()))
    np.testing.assert_allclose(get_dataset(idata, "observed_data")["y_1"], views[1].numpy())
    again = latents_to_arviz(model, views, num_samples=300, num_chains=1, seed=0)
    np.testing.assert_array_equal(get_dataset(again, "posterior")["x"], posterior["x"])
    options = {"num_samples": 300, "num_chains": 1, "seed": 0}
    for same in (
        to_arviz(model.model, model.guide, views, **options),
        to_arviz(model, views, **options),
        to_arviz(model, None, views, **options),
        to_arviz(model, model.guide, y=views, **options),
        to_arviz(model, [view.numpy() for view in views], **options),
    ):
        np.testing.assert_array_equal(get_dataset(same, "posterior")["b"], posterior["b"])
    with pytest.raises(TypeError, match=r"SpikeSlabMRD converts itself and takes .*; got also \['dims'\]"):
        to_arviz(model, views, dims={"x": ["a"]})


@pytest.mark.nightly
def test_patterns_of_switches_convert_with_the_librarys_own_function():
    model = random_model(5, (3,), 2)
    views = random_views(model)
    guide = AutoTruncated(model.switch_model, num_states=4)
    Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model.switch_model, guide, views)
    idata = to_arviz(model.switch_model, guide, views, num_samples=20, seed=0)
    truncated = get_dataset(idata, "truncated_posterior")
    assert truncated["states"].shape[-1] == 2
    assert float(truncated["weights"].sum()) == pytest.approx(1.0, abs=1e-5)


def test_pictures():
    model = random_model(6, (3,), 3)
    posterior = Posterior(model, random_views(model))
    axes = Figure().subplots(1, 2)
    plot_latents(posterior, axes[0], labels=torch.tensor([0, 0, 1, 1, 2, 2]), resolution=5)
    plot_relevance(model, axes[1])
    background = axes[0].collections[0].get_array()
    assert background.shape == (5, 5)
    assert len(axes[0].collections) == 4
    heights = [bar.get_height() for bar in axes[1].patches]
    assert max(heights[:3]) == pytest.approx(1.0)
    assert sorted(heights[3:]) == pytest.approx(sorted(model.probability[0].tolist()))


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (torch.tensor([0, 0, 1, 1, 2, 2]), ["0", "1", "2"]),
        (["b", "b", "a", "a", "b", "b"], ["a", "b"]),
        (np.array(["b", None, "a", "a", "b", "b"], dtype=object), ["None", "a", "b"]),
        (np.array([0.0, math.nan, 1.0, 1.0, math.nan, 0.0]), ["0.0", "1.0", "nan"]),
    ],
)
def test_pictures_of_latents_show_all_data_points_by_their_labels(labels, expected):
    model = random_model(6, (3,), 3)
    axes = plot_latents(Posterior(model, random_views(model)), Figure().subplots(), labels=labels, resolution=5)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == expected
    assert sum(len(points.get_offsets()) for points in axes.collections[1:]) == 6


def test_no_new_data_points_have_no_latents():
    model = random_model(6, (3,), 2)
    views = random_views(model)
    assert Posterior(model, views).infer(views[0][:0]).loc.shape == (0, 2)


def test_pictures_of_latents_say_what_they_need():
    one, three = random_model(6, (3,), 1), random_model(6, (3,), 3)
    for model, options, message in (
        (one, {}, "dims must be two different dimensions of the model's 1"),
        (three, {"dims": (0, 3)}, r"two different dimensions of the model's 3; got \(0, 3\)"),
        (three, {"dims": (1, 1)}, r"two different dimensions of the model's 3; got \(1, 1\)"),
        (three, {"dims": (0, -3)}, r"two different dimensions of the model's 3; got \(0, -3\)"),
        (three, {"dims": (0, 1, 1)}, r"two different dimensions of the model's 3; got \(0, 1, 1\)"),
        (three, {"labels": ["a", "b"]}, r"labels must have shape \(6,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            plot_latents(Posterior(model, random_views(model)), Figure().subplots(), resolution=5, **options)


def test_picture_of_switches_shows_every_view():
    model = random_model(6, (3, 2), 4)
    axes = plot_switches(model, Figure().subplots(), names=("first", "second"))
    assert [bar.get_height() for bar in axes.patches] == pytest.approx(model.probability.flatten().tolist())
    # Bars of a dimension stand side by side around its tick.
    centres = torch.tensor([bar.get_x() + bar.get_width() / 2 for bar in axes.patches]).view(2, 4)
    torch.testing.assert_close(centres.mean(0), torch.arange(4, dtype=DOUBLE))
    assert float((centres[1] - centres[0]).min()) >= axes.patches[0].get_width() - 1e-6
    with pytest.raises(ValueError, match="each of the 2 views"):
        plot_switches(model, Figure().subplots(), names=("one",))


def test_integers_and_booleans_are_taken_as_numbers():
    model = random_model(6, (3,), 2)
    views = random_views(model)
    posterior, whole = Posterior(model, views), torch.tensor([[0, 1], [2, -1]])
    torch.testing.assert_close(posterior.predict(whole).mean, posterior.predict(whole.double()).mean)
    for data in (views[0] > 0, (2 * views[0]).round().int()):
        torch.testing.assert_close(posterior.infer(data, steps=3).loc, posterior.infer(data.double(), steps=3).loc)


def test_latents_of_another_shape_or_range_are_refused():
    model = random_model(6, (3, 2), 3)
    posterior = Posterior(model, random_views(model))
    latents, zeros = posterior.infer(random_views(model), steps=1), torch.zeros(4, 3)
    for call, message in (
        (lambda: posterior.predict(torch.zeros(4, 2)), r"loc must have shape \(N, 3\); got \(4, 2\)"),
        (lambda: posterior.predict(torch.zeros(3)), r"loc must have shape \(N, 3\); got \(3,\)"),
        (lambda: posterior.predict(zeros, scale=-torch.ones(4, 3)), r"scale must have loc's shape \(4, 3\), and no negative number; .* -1"),
        (lambda: posterior.predict(zeros, scale=torch.ones(2, 3)), r"scale must have loc's shape \(4, 3\), .*; got \(2, 3\)"),
        (lambda: posterior.distances(latents, points=torch.zeros(4, 1)), r"points must have shape \(N, 3\); got \(4, 1\)"),
        (lambda: posterior.distances(latents, (0, 5)), r"views\[1\] must lie in 0 \.\. 1; got 5"),
        (lambda: posterior.group_dimensions(math.nan), "threshold must be a probability, between 0 and 1; got nan"),
        (lambda: posterior.infer({"first": torch.zeros(4, 3)}), "view first must have the shape"),
        (lambda: posterior.infer({0: torch.full((4, 3), 1e200, dtype=DOUBLE)}), "view 0 must be finite, .* larger than 1e[+]150"),
        (lambda: model.fix_switches(2.0).__enter__(), "probability must lie between 0 and 1; got 2.0"),
        (lambda: model.fix_switches(math.nan).__enter__(), "probability must lie between 0 and 1; got nan"),
        (lambda: model.set_latents(torch.zeros(4, 3), torch.ones(4, 3)), r"loc and scale must have shape \(6, 3\); got \(4, 3\) and"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_impossible_arguments_are_named():
    model = random_model(5, (3, 2), 2)
    views = random_views(model)
    with pytest.raises(ValueError, match="depend on the data"):
        Posterior(model)
    with pytest.raises(TypeError, match="model must be"):
        Posterior(3, views)
    explicit = random_model(5, (3, 2), 2, collapsed=False)
    for rate in (math.inf, 1e300, math.nan, -1.0):
        with pytest.raises(ValueError, match="learning_rate must be a positive number"):
            fit_minibatches(explicit, views, 1, batch_size=2, learning_rate=rate)
    posterior = Posterior(model, views)
    with pytest.raises(ValueError, match="at least one view"):
        posterior.infer([None, None])
    with pytest.raises(ValueError, match=r"view 1 must have the shape"):
        posterior.infer({1: views[0]})
    with pytest.raises(ValueError, match="collapsed=False"):
        natural_step(model, views)
    latents = posterior.infer(views, steps=1)
    assert dataclasses.is_dataclass(latents)
    for view in (2, -1):
        for read in (posterior.reconstruct, posterior.response):
            with pytest.raises(ValueError, match=rf"view must .*; got {view}"):
                read(latents, view)
    with pytest.raises(ValueError, match=r"view must lie in 0 \.\. 1; got 2"):
        posterior.predict(latents.loc, 2)
    with pytest.raises(TypeError, match="latents must be a Latents"):
        posterior.response(latents.loc)
    with pytest.raises(TypeError, match="loc must be a tensor"):
        posterior.predict(latents)


def test_lists_of_numbers_are_refused_with_what_to_do():
    model = random_model(6, (3,), 2)
    rows = random_views(model)[0].tolist()
    for call in (lambda: fit(model, rows, steps=1), lambda: model.bound(rows), lambda: Posterior(model, torch.tensor(rows)).infer(rows)):
        with pytest.raises(TypeError, match=r"y must be a tensor or an array, .*; got a list in y: .*torch.as_tensor\(y\)"):
            call()
    with pytest.raises(TypeError, match="y must be a tensor, an array or a list of numbers; got an array of <U"):
        model.bound(np.array(rows).astype(str))
