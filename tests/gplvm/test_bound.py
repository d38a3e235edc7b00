"""The bound of spike-and-slab GP-LVMs: against the exact evidence, a Bayesian GP-LVM, sampling, and itself."""

from __future__ import annotations

import copy
import itertools
import math

import pyro
import pytest
import torch
from pyro.contrib.gp import kernels
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, EvolutionarySearch, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.gp import Quadrature
from pyro_truncated.gplvm import (
    Analytic_ELBO,
    Posterior,
    SpikeSlabGPLVM,
    SpikeSlabMRD,
    fit,
    initialize,
    maximize_bound,
    settle_switches,
    switch_log_odds,
    switch_moves,
    update_switches,
)
from tests.gplvm import exact

DOUBLE = torch.float64


def random_model(num_data=6, num_observed=(3,), num_latents=3, kernel="rbf", num_inducing=4, seed=0, **options):
    torch.manual_seed(seed)
    model = SpikeSlabMRD(num_data, num_observed, num_latents, kernel=kernel, num_inducing=num_inducing, prior=0.3, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def random_views(model, seed=1, missing=0.0):
    generator = torch.Generator().manual_seed(seed)
    views = [torch.randn(model.num_data, d, generator=generator, dtype=DOUBLE) for d in model.num_observed]
    return [v.masked_fill(torch.rand(v.shape, generator=generator) < missing, torch.nan) for v in views]


def evidence(model, views, degree):
    """The exact log evidence of data under a model's parameters."""
    kernels = []
    for view in model.views:
        kernel = view.kernel
        if hasattr(kernel, "lengthscale"):
            kernels.append(exact.rbf(kernel.variance.detach(), kernel.lengthscale.detach()))
        else:
            kernels.append(exact.linear(kernel.variance.detach()))
    noises = [float(view.noise.detach()) for view in model.views]
    centred = [v - view.center for v, view in zip(views, model.views, strict=True)]
    return exact.log_evidence(centred, kernels, noises, model.prior, degree)


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["rbf", "linear"])
@pytest.mark.parametrize(("num_observed", "num_latents", "missing"), [((3,), 1, 0.0), ((3,), 1, 0.3), ((2, 3), 1, 0.0), ((3,), 2, 0.0)])
def test_bound_stays_below_the_exact_evidence(kernel, num_observed, num_latents, missing):
    degree = 40 if num_latents == 1 else 10
    model = random_model(2, num_observed, num_latents, kernel, 2)
    views = random_views(model, 10, missing)
    # From random parameters to where the bound is tightest: the evidence moves along with the kernel and the noise.
    for steps in (0, 20):
        maximize_bound(model, views, steps, fixed=("noise", "kernel"))
        update_switches(model, views)
        gap = evidence(model, views, degree) - float(model.bound(views).detach())
        assert gap > -0.02, steps  # the quadrature's own error
    assert gap < 30


@pytest.mark.slow
def test_divergence_of_switches_and_latents_agrees_with_samples():
    model = random_model(3, (2, 2), 2)
    gamma = model.probability.detach()
    num_samples = 200_000
    b = (torch.rand(num_samples, *gamma.shape, dtype=DOUBLE) < gamma).double()
    used = b.bool().any(1).unsqueeze(1)
    loc, scale = (torch.where(used, v.detach(), other) for v, other in ((model.loc, 0.0), (model.scale, 1.0)))
    x = loc + scale * torch.randn(num_samples, *model.loc.shape, dtype=DOUBLE)
    log_q = torch.distributions.Bernoulli(gamma).log_prob(b).sum((1, 2)) + torch.distributions.Normal(loc, scale).log_prob(x).sum((1, 2))
    standard = torch.distributions.Normal(torch.zeros((), dtype=DOUBLE), 1.0)
    log_p = torch.distributions.Bernoulli(model.prior).log_prob(b).sum((1, 2)) + standard.log_prob(x).sum((1, 2))
    sampled = log_q - log_p
    found = (model.switch_divergence() + (model.usage() * model.latent_divergence()).sum()).detach()
    # Seeded; false alarm in 1 of 10 000 seeds.
    assert abs(float(found - sampled.mean())) < 3.9 * float(sampled.std()) / num_samples**0.5


def bayesian_gplvm(model, y):
    """The bound of Titsias & Lawrence (2010), written out with explicit inverses and loops, RBF kernel, all dimensions in use."""
    view = model.views[0]
    z, mu, s = view.inducing, model.loc, model.scale.square()
    variance, square = view.kernel.variance, view.kernel.lengthscale.square()
    beta, (n, d), m = 1 / view.noise, y.shape, len(view.inducing)
    kuu = variance * torch.exp(-((z.unsqueeze(1) - z).square() / square).sum(-1) / 2)
    kuu = kuu + 1e-6 * variance * torch.eye(m, dtype=DOUBLE)
    psi1 = torch.zeros(n, m, dtype=DOUBLE)
    psi2 = torch.zeros(m, m, dtype=DOUBLE)
    for i in range(n):
        for a in range(m):
            spread = s[i] / square + 1
            psi1[i, a] = variance * (torch.exp(-(mu[i] - z[a]).square() / (2 * (s[i] + square))) / spread.sqrt()).prod()
            for b in range(m):
                middle = (z[a] + z[b]) / 2
                exponent = -(z[a] - z[b]).square() / (4 * square) - (mu[i] - middle).square() / (2 * s[i] + square)
                psi2[a, b] += variance**2 * (exponent.exp() / (2 * s[i] / square + 1).sqrt()).prod()
    sigma = kuu + beta * psi2
    w = beta * torch.eye(n, dtype=DOUBLE) - beta**2 * psi1 @ sigma.inverse() @ psi1.mT
    bound = d * (n * (beta / (2 * math.pi)).log() + kuu.logdet() - sigma.logdet()) / 2 - (y.mT @ w @ y).trace() / 2
    bound = bound - d * beta * (n * variance - (kuu.inverse() @ psi2).trace()) / 2
    return bound - (mu.square() + s - s.log() - 1).sum() / 2


def test_with_all_switches_on_it_is_the_bayesian_gplvm():
    model = random_model(7, (4,), 3)
    (y,) = random_views(model)
    with model.fix_switches(1.0), torch.no_grad():
        found = model.bound(y) + model.switch_divergence()
        torch.testing.assert_close(found, bayesian_gplvm(model, y), rtol=1e-9, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("num_observed", [(3,), (2, 3)])
@pytest.mark.parametrize("missing", [0.0, 0.4])
def test_collapsed_bound_is_the_explicit_one_at_its_optimum(num_observed, missing):
    collapsed = random_model(6, num_observed)
    views = random_views(collapsed, missing=missing)
    explicit = random_model(6, num_observed, collapsed=False)
    explicit.load_state_dict(collapsed.state_dict(), strict=False)
    best = float(collapsed.bound(views).detach())
    if missing == 0:
        with torch.no_grad():
            for view, posterior in zip(explicit.views, collapsed.inducing_posterior(views), strict=True):
                view.mean, view.scale_tril = posterior.mean, torch.linalg.cholesky(posterior.covariance)
        torch.testing.assert_close(float(explicit.bound(views).detach()), best, rtol=1e-10, atol=1e-8)
    maximize_bound(explicit, views, 300, fixed=("loc", "scale_unc", "logits", "kernel", "noise", "inducing"))
    assert float(explicit.bound(views).detach()) <= best + 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("collapsed", [False, True])
@pytest.mark.parametrize("missing", [0.3, 0.0])
@pytest.mark.parametrize("number", [40, pytest.param(400, marks=pytest.mark.nightly)])
def test_stock_elbo_estimates_the_bound(collapsed, missing, number):
    model = random_model(4, (2, 2), 2, collapsed=collapsed)
    views = random_views(model, missing=missing)
    elbo = Trace_ELBO(num_particles=1)
    samples = -torch.tensor([elbo.loss(model.model, model.guide, views) for _ in range(number)], dtype=DOUBLE)
    error = samples.std() / len(samples) ** 0.5
    # Seeded; false alarm in 1 of 10 000 seeds.
    assert abs(float(samples.mean() - model.bound(views).detach())) < 3.9 * float(error)


@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_minibatches_estimate_bound_and_gradient_without_bias(missing, monkeypatch):
    model = random_model(6, (3, 2), 2, collapsed=False)
    views = random_views(model, missing=missing)
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(model.bound(views), parameters)
    value = float(model.bound(views).detach())
    parts = list(torch.arange(6).split(2))
    found, values = [torch.zeros_like(p) for p in parameters], []
    # The batches of a partition weigh all data equally, so the mean over them is exact.
    for part in parts:
        monkeypatch.setattr(
            torch, "randperm", lambda n, device=None, part=part: torch.cat([part, torch.zeros(n - len(part), dtype=torch.long)])
        )
        bound = model.bound(views, batch_size=2)
        values.append(float(bound.detach()))
        for total, gradient in zip(found, torch.autograd.grad(bound, parameters), strict=True):
            total += gradient / len(parts)
    assert len(set(values)) == len(parts)
    assert sum(values) / len(parts) == pytest.approx(value, rel=1e-10)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_random_minibatches_cover_all_data():
    model = random_model(6, (3,), 2, collapsed=False)
    views = random_views(model)
    values = torch.tensor([float(model.bound(views, batch_size=3).detach()) for _ in range(100)])
    assert len(values.unique()) > 15  # of 6 choose 3
    assert abs(float(values.mean() - model.bound(views).detach())) < 3.9 * float(values.std()) / 10


@pytest.mark.parametrize("num_observed", [(3,), (2, 3)])
@pytest.mark.parametrize("kernel", ["rbf", "linear"])
def test_switch_update_is_the_coordinate_maximiser(num_observed, kernel):
    model = random_model(8, num_observed, 2, kernel)
    views = random_views(model)
    odds = switch_log_odds(model, views)
    # At the posterior of the inducing variables as it is now, the bound as a function of one switch peaks at these odds.
    explicit = random_model(8, num_observed, 2, kernel, collapsed=False)
    explicit.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for view, posterior in zip(explicit.views, model.inducing_posterior(views), strict=True):
            view.mean, view.scale_tril = posterior.mean, torch.linalg.cholesky(posterior.covariance)
        for c, q in itertools.product(range(model.num_views), range(2)):
            start = model.logits.detach().clone()
            bounds = []
            for shift in (-0.3, 0.0, 0.3):
                moved = start.clone()
                moved[c, q] = odds[c, q] + shift
                explicit.logits = moved
                bounds.append(float(explicit.bound(views)))
            assert bounds[1] >= max(bounds[0], bounds[2]) - 1e-9
        on, off = (start.clone() for _ in range(2))
        on[0, 0], off[0, 0] = 40.0, -40.0
        with explicit.fix_switches(on.sigmoid()):
            terms = explicit.bound(views) + explicit.switch_divergence()
        with explicit.fix_switches(off.sigmoid()):
            terms = terms - explicit.bound(views) - explicit.switch_divergence()
    torch.testing.assert_close(odds[0, 0] - model.prior[0, 0].logit(), terms, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_updates_and_moves_never_lower_the_bound():
    for seed in range(5):
        model = random_model(8, (2, 3), 3, seed=seed)
        views = random_views(model, seed)
        bounds = [float(model.bound(views).detach())]
        bounds += [
            update_switches(model, views),
            switch_moves(model, views),
            maximize_bound(model, views, 5),
            update_switches(model, views),
        ]
        assert all(b >= a - 1e-9 for a, b in itertools.pairwise(bounds)), bounds


def test_a_dimension_that_the_kernel_removed_shows_the_degeneracy():
    model = SpikeSlabGPLVM(5, 3, 2, kernel="linear", prior=0.5)
    (y,) = random_views(model)
    with torch.no_grad():
        model.views[0].kernel.variance = torch.tensor([1.0, 1e-14], dtype=DOUBLE)
        model.loc[:, 1], model.scale = 0.0, torch.ones(5, 2, dtype=DOUBLE)
        bounds = []
        for gamma in (0.0, 0.5, 1.0):
            with model.fix_switches(torch.tensor([[1.0, gamma]])):
                bounds.append(float(model.bound(y)))
    assert bounds[0] == pytest.approx(bounds[2], abs=1e-6)
    assert bounds[1] - bounds[0] == pytest.approx(math.log(2), abs=1e-6)
    assert float(model.relevance()[0, 1]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("num_observed", [(3,), (2, 2)])
def test_all_patterns_together_are_at_least_as_tight_as_independent_switches(num_observed):
    model = random_model(2, num_observed, 1 if len(num_observed) == 2 else 2, num_inducing=2)
    views = random_views(model)
    maximize_bound(model, views, 15, fixed=("noise", "kernel"))
    for _ in range(3):
        update_switches(model, views)
    space = model.prior.numel()
    guide = AutoTruncated(model.switch_model, num_states=2**space)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss(model.switch_model, guide, views)
    patterns = torch.tensor(list(itertools.product((0.0, 1.0), repeat=space)), dtype=DOUBLE).view(-1, *model.prior.shape)
    prior = torch.distributions.Bernoulli(model.prior).log_prob(patterns).sum((1, 2))
    with torch.no_grad():
        joint = model.pattern_bounds(patterns, views) + prior
        mean_field = float(model.bound(views))
    assert -loss == pytest.approx(float(joint.logsumexp(0)), abs=1e-4)
    assert -loss >= mean_field - 1e-4
    assert -loss <= evidence(model, views, 40 if len(num_observed) == 2 else 10) + 0.02
    # Fewer patterns are a looser bound of the same kind.
    assert float(joint.topk(2).values.logsumexp(0)) <= float(joint.logsumexp(0))


def test_patterns_agree_with_held_switches():
    model = random_model(5, (2, 3), 3)
    views = random_views(model, missing=0.2)
    pattern = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], dtype=DOUBLE)
    with torch.no_grad(), model.fix_switches(pattern):
        expected = model.bound(views) + model.switch_divergence()
    found = model.pattern_bounds(torch.stack([pattern, pattern]), views).detach()
    torch.testing.assert_close(found, expected.expand(2), rtol=1e-10, atol=1e-8)


@pytest.mark.slow
def test_truncated_posterior_of_switches_trains_with_stock_parts():
    model = random_model(8, (3,), 4, kernel="linear")
    views = random_views(model)
    guide = AutoTruncated(model.switch_model, num_states=6)
    svi = SVI(model.switch_model, guide, Adam({"lr": 0.02}), Truncated_ELBO(EvolutionarySearch(parents=2, children=2, generations=1)))
    losses = [svi.step(views) for _ in range(25)]
    assert losses[-1] < losses[0] - 1
    population = guide.population()
    assert len(population.find_duplicates()) == 0
    assert float(population.weights().sum()) == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("collapsed", [True, False])
def test_svi_raises_the_bound(collapsed):
    model = random_model(8, (3, 2), 2, collapsed=collapsed)
    views = random_views(model)
    svi = SVI(model.model, model.guide, Adam({"lr": 0.02}), Analytic_ELBO())
    arguments = {} if collapsed else {"batch_size": 4}
    before = float(model.bound(views).detach())
    for _ in range(30):
        svi.step(views, **arguments)
    assert float(model.bound(views).detach()) > before + 1
    name = model._pyro_name
    assert {f"{name}.{own}" for own in ("loc", "scale", "logits", "views.0.noise")} <= set(pyro.get_param_store().keys())


@pytest.mark.nightly
def test_svi_finds_the_pattern_that_fit_finds_and_what_is_off_is_zero():
    """Two views of two of three signals each, the last of them shared; a fourth dimension is of no use."""
    generator = torch.Generator().manual_seed(0)
    signals = torch.randn(30, 3, generator=generator, dtype=DOUBLE)
    noise = [0.1 * torch.randn(30, 5, generator=generator, dtype=DOUBLE) for _ in range(2)]
    views = [signals[:, c] @ torch.randn(2, 5, generator=generator, dtype=DOUBLE) + noise[v] for v, c in enumerate(([0, 2], [1, 2]))]
    model, fitted = (SpikeSlabMRD(30, [5, 5], 4, kernel="linear") for _ in range(2))
    initialize(model, views, generator=generator)
    svi = SVI(model.model, model.guide, Adam({"lr": 0.02}), Analytic_ELBO(warm_up=400))
    for _ in range(900):
        svi.step(views)
    is_on = model.probability.detach()
    assert bool(((is_on > 0.999) | (is_on < 1e-4)).all())
    assert is_on.round().sum(0).sort().values.tolist() == [0, 1, 1, 2]
    assert is_on.round().sum(1).tolist() == [2, 2]
    found = fit(fitted, views, generator=generator)
    assert float(model.bound(views).detach()) > found.bound - 2
    shown = fitted.probability.detach()
    assert bool(((shown > 0.999) | (shown < 1e-4)).all())
    assert found.bound == pytest.approx(float(fitted.bound(views).detach()), rel=1e-9)
    assert max(found.starts) - found.bound == pytest.approx(-math.log(0.9) * int((shown < 0.5).sum()), abs=0.02)


@pytest.mark.slow
def test_svi_switches_off_what_the_functions_can_do_without_once_they_have_adapted():
    """Given functions that use a dimension its switch is best on, though the bound is higher with it off and the functions adapted."""
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(30, 2, generator=generator, dtype=DOUBLE)

    def normal(rows: int) -> torch.Tensor:
        return torch.randn(rows, 5, generator=generator, dtype=DOUBLE)

    views = [z[:, :size] @ normal(size) + 0.3 * normal(30) for size in (2, 1)]
    model = SpikeSlabMRD(30, [5, 5], 3, kernel="linear")
    fit(model, views, steps=30, warm_up=30, rounds=2, generator=generator)
    found = model.probability.detach().round()
    assert found.sum(1).tolist() == [2, 1]
    model.logits = torch.full_like(model.logits, 12.0)
    closed = settle_switches(copy.deepcopy(model), views)
    SVI(model.model, model.guide, Adam({"lr": 1e-6}), Analytic_ELBO(warm_up=0)).step(views)
    assert model.probability.detach().round().tolist() == found.tolist()
    assert float(model.bound(views).detach()) > closed + 1


def test_models_do_not_share_parameters_through_the_store():
    first, second = random_model(4, seed=0), random_model(4, seed=1)
    (y,) = random_views(first)
    SVI(first.model, first.guide, Adam({"lr": 0.1}), Analytic_ELBO()).step(y)
    beside, twin = float(second.bound(y).detach()), copy.deepcopy(second)
    pyro.clear_param_store()
    assert float(second.bound(y).detach()) == beside
    initialize(twin, y)
    assert float(twin.bound(y).detach()) != beside
    assert float(second.bound(y).detach()) == beside


def test_views_do_not_share_a_kernel_that_is_given_once():
    kernel = kernels.Matern32(2, torch.ones((), dtype=DOUBLE), torch.ones(2, dtype=DOUBLE))
    model = SpikeSlabMRD(5, (3, 2), 2, kernel=kernel, expectation=Quadrature(5))
    first, second = (view.kernel for view in model.views)
    assert first is kernel
    with torch.no_grad():
        first.lengthscale = torch.full((2,), 3.0, dtype=DOUBLE)
    assert second.lengthscale.tolist() == [1.0, 1.0]
    model.bound(random_views(model)).backward()
    gradients = [dict(view.kernel.named_parameters())["lengthscale_unconstrained"].grad for view in model.views]
    assert not torch.equal(*gradients)


def test_generates_and_predicts_as_any_pyro_model():
    model = random_model(5, (3, 2), 2, collapsed=False)
    drawn = Predictive(model.model, num_samples=7)()
    assert drawn["y_0"].shape == (7, 5, 3)
    assert drawn["y_1"].shape == (7, 5, 2)
    views = random_views(model)
    posterior = Predictive(model.model, guide=model.guide, num_samples=6)(views)
    assert posterior["x"].shape == (6, 5, 2)
    assert posterior["b"].shape[-2:] == (2, 2)


@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_single_precision(missing):
    model = random_model(6, (3,), 2)
    (y,) = random_views(model, missing=missing)
    small = random_model(6, (3,), 2, dtype=torch.float32)
    small.load_state_dict(model.state_dict())
    assert small.loc.dtype == torch.float32
    bound = small.bound(y.float())
    assert bound.dtype == torch.float64
    assert float(bound.detach()) == pytest.approx(float(model.bound(y).detach()), rel=1e-3)
    bound.backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in small.parameters())


@pytest.mark.parametrize("kernel", ["rbf", "linear", lambda: kernels.Sum(kernels.RBF(2), kernels.WhiteNoise(2))])
def test_models_in_single_precision_are_trained_and_predict(kernel, generator):
    # Covariances of fifty inducing inputs in two dimensions are not positive definite but for rounding errors of single precision.
    y = torch.randn(100, 2, generator=generator).sin() @ torch.randn(2, 6, generator=generator) + 0.1
    found = []
    for dtype in (torch.float32, DOUBLE):
        torch.manual_seed(0)
        model = SpikeSlabGPLVM(100, 6, 2, kernel=kernel, dtype=dtype)
        initialize(model, y, generator=torch.Generator().manual_seed(0))
        posterior = Posterior(model, y)
        latents = posterior.infer(y[:5], steps=20)
        found.append([model.bound(y).detach(), latents.loc, posterior.reconstruct(latents).mean])
        fit(model, y, steps=2, warm_up=2, rounds=1)
        assert model.loc.dtype == dtype
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)


def test_a_trained_model_is_converted_to_single_precision():
    model = random_model(6, (3,), 2)
    (y,) = random_views(model)
    single = copy.deepcopy(model).float()
    assert single.probability.dtype == DOUBLE
    means = [Posterior(some, y).reconstruct(Posterior(some, y).infer(y[:2])).mean for some in (model, single)]
    torch.testing.assert_close(*means, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_integers_are_taken_as_floats(dtype):
    y = torch.randint(0, 2, (6, 3), generator=torch.Generator().manual_seed(0)).to(dtype)
    results = []
    for data in (y, y.double()):
        model = SpikeSlabGPLVM(6, 3, 2)
        initialize(model, data, generator=torch.Generator().manual_seed(0))
        fit(model, data, steps=3, warm_up=3, rounds=1, generator=torch.Generator().manual_seed(0))
        results.append([model.bound(data).detach(), model.loc.detach().clone()])
    torch.testing.assert_close(*results)


def test_impossible_arguments_are_named():
    with pytest.raises(ValueError, match="prior must lie strictly between 0 and 1"):
        SpikeSlabGPLVM(5, 3, 2, prior=1.0)
    with pytest.raises(ValueError, match="kernel must be 'rbf', 'linear'"):
        SpikeSlabGPLVM(5, 3, 2, kernel="cubic")
    model = SpikeSlabGPLVM(5, 3, 2)
    with pytest.raises(ValueError, match=r"shapes \[\(5, 3\)\]"):
        model.bound(torch.zeros(5, 4))
    with pytest.raises(ValueError, match="infinite"):
        model.bound(torch.full((5, 3), math.inf))
    with pytest.raises(ValueError, match="collapsed=False"):
        model.bound(torch.zeros(5, 3), batch_size=2)
    with pytest.raises(TypeError, match="methods `model` and `guide`"):
        Analytic_ELBO().loss(model.model, lambda y: None, torch.zeros(5, 3))
    for constant in (torch.ones(5, 3), torch.full((5, 3), math.nan), 1e-200 * torch.randn(5, 3, dtype=torch.float64)):
        with pytest.raises(ValueError, match="view 0 of y does not vary"):
            initialize(model, constant)
    with pytest.raises(ValueError, match=r"start must give finite latent means of shape \(5, 2\); got \(2, 2\)"):
        initialize(model, torch.randn(5, 3), torch.ones(2, 2))
    with pytest.raises(ValueError, match="start must be one of"):
        initialize(model, torch.randn(5, 3), "best")
