"""Views of labels and counts: their local bounds, the bound of the evidence, inference, and learning from few labels."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from pyro.infer import Predictive, Trace_ELBO

from pyro_truncated.gplvm import (
    BernoulliLabels,
    CategoricalLabels,
    PoissonCounts,
    Posterior,
    SpikeSlabMRD,
    explicit_copy,
    fit,
    initialize,
    maximize_bound,
    natural_step,
    update_switches,
)
from pyro_truncated.gplvm.spike_slab.inducing_posterior import Observations, collapsed_bound
from tests.gplvm import exact

DOUBLE = torch.float64
LIKELIHOODS = {"bernoulli": (BernoulliLabels(), 2), "categorical": (CategoricalLabels(3), 1), "poisson": (PoissonCounts(), 2)}


def random_labels(likelihood, num_data, num_observed, seed=0, missing=0.0):
    generator = torch.Generator().manual_seed(seed)
    if isinstance(likelihood, CategoricalLabels):
        y = torch.randint(likelihood.num_classes, (num_data, 1), generator=generator).double()
    elif isinstance(likelihood, BernoulliLabels):
        y = torch.randint(2, (num_data, num_observed), generator=generator).double()
    else:
        y = torch.poisson(3 * torch.rand(num_data, num_observed, generator=generator, dtype=DOUBLE), generator=generator)
    return y.masked_fill(torch.rand(y.shape, generator=generator) < missing, torch.nan)


def random_model(num_data, num_observed, likelihood, num_latents=2, num_inducing=4, seed=0, **options):
    torch.manual_seed(seed)
    model = SpikeSlabMRD(num_data, num_observed, num_latents, num_inducing=num_inducing, likelihood=likelihood, prior=0.3, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def labelled(missing=0.0, num_data=5, collapsed=True, seed=0, names=("categorical", "bernoulli")):
    """A model with a Gaussian view and views of labels, and data for it."""
    likelihoods = [LIKELIHOODS[name] for name in names]
    sizes = [2, *(size for _, size in likelihoods)]
    model = random_model(num_data, sizes, [None, *(one for one, _ in likelihoods)], seed=seed, collapsed=collapsed)
    views = [torch.randn(num_data, 2, dtype=DOUBLE)]
    views += [random_labels(one, num_data, size, seed + k, missing) for k, (one, size) in enumerate(likelihoods)]
    return model, views


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_local_bound_is_below_the_likelihood_and_touches_it(name):
    likelihood, size = copy.deepcopy(LIKELIHOODS[name])
    num = 4000
    y = random_labels(likelihood, num, size, 1, 0.1)
    if name == "poisson":
        y = y * 20 ** torch.rand(y.shape, dtype=DOUBLE)
        y = y.round()
        likelihood.base(y)
    shape = (num, likelihood.num_functions(size))
    point, functions = 6 * torch.randn(shape, dtype=DOUBLE), 8 * torch.randn(shape, dtype=DOUBLE)

    def bound(values):
        data = likelihood.bound(y, point)
        return data.offset - ((data.values - values).square() * data.all_weights).sum(1) / (2 * likelihood.noise)

    assert bool((bound(functions) <= likelihood.log_prob(y, functions) + 1e-9).all())
    at = point.clone().requires_grad_()
    torch.testing.assert_close(bound(at), likelihood.log_prob(y, at), rtol=1e-8, atol=1e-8)
    slopes = [torch.autograd.grad(f(at).sum(), at)[0] for f in (bound, lambda values: likelihood.log_prob(y, values))]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-6)


def log_evidence(model, y, degree):
    """Exact log evidence of a single view of labels on two data points and one latent: sums over the switch, quadrature over all else."""
    view = model.views[0]
    roots, weights = np.polynomial.hermite_e.hermegauss(degree)
    roots, weights = torch.from_numpy(roots), torch.from_numpy(weights / math.sqrt(2 * math.pi))
    x = torch.cartesian_prod(roots, roots).unsqueeze(-1)  # (G, 2, 1)
    log_weight = torch.cartesian_prod(weights, weights).log().sum(1)
    covariance = exact.rbf(view.kernel.variance.detach(), view.kernel.lengthscale.detach())
    num = view.num_functions
    grid = torch.cartesian_prod(*[torch.arange(degree)] * (2 * num)).reshape(-1, 2, num)
    unit, log_unit = roots[grid], weights[grid].log().sum((1, 2))
    total = []
    for bit in (0.0, 1.0):
        root = torch.linalg.cholesky(covariance(x * bit) + 1e-12 * torch.eye(2, dtype=DOUBLE))
        for factor, log_w in zip(root, log_weight, strict=True):
            functions = factor @ unit + view.center
            prior = torch.tensor(bit * math.log(0.3) + (1 - bit) * math.log(0.7))
            total.append((view.likelihood.log_prob(y, functions).sum(-1) + log_unit).logsumexp(0) + log_w + prior)
    return float(torch.stack(total).logsumexp(0))


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", [BernoulliLabels(), CategoricalLabels(2), PoissonCounts()])
def test_bound_stays_below_the_exact_evidence(likelihood):
    model, y = random_model(2, [1], likelihood, 1, 2), random_labels(likelihood, 2, 1, 0)
    degree = 8 if isinstance(likelihood, CategoricalLabels) else 24
    for steps in (0, 30):
        maximize_bound(model, y, steps, fixed=("kernel",))
        update_switches(model, y)
        gap = log_evidence(model, y, degree) - float(model.bound(y).detach())
        assert -1e-3 < gap < 3, steps


@pytest.mark.slow
def test_closed_form_points_are_where_the_bound_is_flat_and_never_lower_it():
    model, views = labelled(missing=0.3, names=("categorical", "bernoulli", "poisson"))
    before = float(model.bound(views).detach())
    for step in range(60):
        model.tighten(views)
        if step % 10 == 0:
            after = float(model.bound(views).detach())
            assert after >= before - 1e-9
            before = after
    points = [view.point for view in list(model.views)[1:]]
    for gradient in torch.autograd.grad(model.bound(views), points):
        assert float(gradient.abs().max()) < 1e-4


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("collapsed", [True, False])
@pytest.mark.parametrize("number", [40, 400])
def test_stock_elbo_estimates_the_bound(collapsed, number):
    model, views = labelled(missing=0.3, num_data=4, collapsed=collapsed)
    elbo = Trace_ELBO(num_particles=1)
    samples = -torch.tensor([elbo.loss(model.model, model.guide, views) for _ in range(number)], dtype=DOUBLE)
    # Seeded; false alarm in 1 of 10 000 seeds.
    assert abs(float(samples.mean() - model.bound(views).detach())) < 3.9 * float(samples.std()) / number**0.5


@pytest.mark.slow
def test_contribution_of_new_points_is_the_growth_of_the_bound():
    model, views = labelled(num_data=6, names=("categorical",))
    for _ in range(100):
        model.tighten(views)
    posterior = Posterior(model, views)
    new = [torch.randn(3, 2, dtype=DOUBLE), torch.tensor([[0.0], [2.0], [torch.nan]], dtype=DOUBLE)]
    latents = posterior.infer(new, steps=3)
    larger = joined_labels(model, posterior, latents)
    both = [torch.cat([a, b]) for a, b in zip(views, new, strict=True)]
    growth = float((larger.bound(both) - model.bound(views)).detach())
    assert float(latents.bound.sum()) == pytest.approx(growth, rel=1e-7, abs=1e-7)
    unlabelled = posterior.infer({0: new[0], 1: torch.full((3, 1), torch.nan, dtype=DOUBLE)}, steps=30)
    alone = posterior.infer({0: new[0]}, steps=30)
    assert unlabelled.usage.ge(alone.usage).all()  # a view that is given, if only as missing, has its switches


def joined_labels(model, posterior, latents):
    larger = random_model(model.num_data + len(latents.loc), [2, 1], [None, CategoricalLabels(3)], collapsed=False)
    own = {name: v for name, v in model.state_dict().items() if "loc" not in name and not name.startswith("scale") and "point" not in name}
    larger.load_state_dict(own, strict=False)
    with torch.no_grad():
        larger.loc, larger.scale = torch.cat([model.loc, latents.loc]), torch.cat([model.scale, latents.scale])
        for view, inducing in zip(larger.views, posterior.inducing, strict=True):
            view.mean, view.scale_tril = inducing.mean, torch.linalg.cholesky(inducing.covariance)
    return larger


def test_data_points_without_a_view_have_no_part_in_it():
    model = random_model(6, [3, 2], None)
    views = [torch.randn(6, 3, dtype=DOUBLE), torch.randn(6, 2, dtype=DOUBLE)]
    views[1][[1, 4]] = torch.nan
    view, inputs = model.views[1], model.inputs(1)
    entrywise = collapsed_bound(view.statistics(inputs, True), view.cholesky(), Observations.from_outputs(views[1]), view.noise)[0]
    found = view.optimal(inputs, views[1])[0]
    torch.testing.assert_close(found, entrywise, rtol=1e-10, atol=1e-10)
    views[1][:] = torch.nan
    nothing = view.optimal(inputs, views[1])[0]
    assert float(nothing.detach()) == pytest.approx(0, abs=1e-9)


@pytest.mark.nightly
def test_few_labels_are_carried_over_by_the_other_view():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (150, 1), generator=generator)
    means = 3 * torch.randn(3, 6, generator=generator, dtype=DOUBLE)
    y = means[labels[:, 0]] + torch.randn(150, 6, generator=generator, dtype=DOUBLE)
    known = labels[:100].double()
    known[30:] = torch.nan
    model = SpikeSlabMRD(100, [6, 1], 3, likelihood=["gaussian", CategoricalLabels(3)], num_inducing=15)
    fit(model, [y[:100], known], steps=60, warm_up=60, rounds=2, generator=generator)
    posterior = Posterior(model, [y[:100], known])
    probabilities = posterior.response(posterior.infer({0: y[100:]}), 1)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(50, dtype=DOUBLE))
    assert float((probabilities.argmax(1) == labels[100:, 0]).double().mean()) > 0.9


@pytest.mark.slow
def test_gradients_of_explicit_inducing_variables_agree_with_finite_differences():
    model, views = labelled(collapsed=False)
    for view in list(model.views)[1:]:
        gradient = torch.autograd.grad(model.bound(views), view.mean)[0]
        for m, d in ((0, 0), (2, 1)):
            values = []
            for step in (1e-4, -2e-4, 1e-4):
                with torch.no_grad():
                    view.mean[m, d] += step
                    values.append(float(model.bound(views)))
            assert float(gradient[m, d]) == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_minibatches_of_labels():
    model, views = labelled(num_data=12, names=("categorical",))
    initialize(model, views, "random", torch.Generator().manual_seed(0))
    for _ in range(60):
        model.tighten(views)
    explicit = explicit_copy(model, views)
    reached = float(model.bound(views).detach())
    assert float(explicit.bound(views).detach()) == pytest.approx(reached, abs=1e-2)
    parts = [
        float(explicit.partial_bound([data[part] for data in views], explicit.latents(part), 3.0).detach())
        for part in torch.arange(12).split(4)
    ]
    assert sum(parts) / 3 == pytest.approx(float(explicit.bound(views).detach()), rel=1e-9)
    before = float(explicit.bound(views).detach())
    natural_step(explicit, views)
    assert float(explicit.bound(views).detach()) >= before - 1e-9


@pytest.mark.slow
def test_the_model_generates_labels():
    model, views = labelled(names=("categorical", "bernoulli", "poisson"))
    drawn = Predictive(model.model, guide=model.guide, num_samples=1)(views)
    assert "b" in drawn
    generated = Predictive(model.model, num_samples=5)()
    classes, bits, counts = (generated[f"y_{c}"] for c in (1, 2, 3))
    assert classes.shape[-2:] == (5, 1)
    assert set(classes.unique().tolist()) <= {0, 1, 2}
    assert set(bits.unique().tolist()) <= {0.0, 1.0}
    assert bool(((counts >= 0) & (counts == counts.round())).all())


def test_expected_labels_agree_with_draws():
    torch.manual_seed(0)
    loc, variance = torch.randn(2, 3, dtype=DOUBLE), torch.rand(2, 3, dtype=DOUBLE) * 2
    draws = loc + variance.sqrt() * torch.randn(200_000, 2, 3, dtype=DOUBLE)
    for likelihood, mean in (
        (BernoulliLabels(), draws.sigmoid()),
        (CategoricalLabels(3), draws.softmax(-1)),
        (PoissonCounts(), torch.nn.functional.softplus(draws)),
    ):
        # Within 5e-3: more than ten standard errors of the draws.
        torch.testing.assert_close(likelihood.response(loc, variance), mean.mean(0), rtol=0, atol=5e-3)


@pytest.mark.parametrize("level", [10.0, 1e4])
def test_large_counts_are_learned_and_kept(level, generator):
    x = torch.linspace(-2.0, 2.0, 60, dtype=DOUBLE).unsqueeze(1)
    y = torch.cat([x, x.sin(), x.cos()], 1) + 0.05 * torch.randn(60, 3, dtype=DOUBLE, generator=generator)
    rate = level * torch.cat([(1.5 * x.sin()).exp(), (1.5 * x.cos()).exp() / 100], 1)
    views = [y, torch.poisson(rate, generator=generator)]
    counts = PoissonCounts()
    model = SpikeSlabMRD(60, [3, 2], 2, num_inducing=10, likelihood=["gaussian", counts])
    fit(model, views, steps=40, warm_up=40, rounds=1, generator=generator)
    found = Posterior(model, views).response(Posterior(model, views).infer({0: y}), 1)
    # In the unit of single counts, errors were 0.45 and 0.99.
    assert float((found - rate)[:, 0].square().mean().sqrt() / rate[:, 0].std()) < 0.15
    assert float(counts.unit) == 1.0  # a view has units of its own
    torch.testing.assert_close(model.views[1].likelihood.unit, views[1].mean(0).clamp(min=1.0), rtol=0.02, atol=0.01)
    other = SpikeSlabMRD(60, [3, 2], 2, num_inducing=10, likelihood=["gaussian", counts])
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.bound(views), model.bound(views))
    # States of earlier versions were of single counts.
    other.load_state_dict({name: value for name, value in model.state_dict().items() if not name.endswith("unit")})
    assert bool((other.views[1].likelihood.unit == 1).all())


@pytest.mark.nightly(keep="values")
@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("kind", [np.int64, np.uint16])
def test_labels_and_counts_may_be_integers(name, kind):
    likelihood, size = LIKELIHOODS[name]
    numbers, labels = torch.randn(9, 2, dtype=DOUBLE), random_labels(likelihood, 9, size)

    def after_fit(labels):
        model = SpikeSlabMRD(9, [2, size], 2, num_inducing=4, likelihood=["gaussian", likelihood])
        bound = fit(model, [numbers, labels], steps=2, warm_up=2, rounds=1, generator=torch.Generator().manual_seed(0)).bound
        return bound, Posterior(model, [numbers, labels]).infer({1: labels[:3]}, steps=2).loc

    torch.testing.assert_close(after_fit(labels.numpy().astype(kind)), after_fit(labels), rtol=0, atol=0)


def test_labels_outside_the_support_are_refused():
    for likelihood, wrong in ((CategoricalLabels(3), 3.0), (CategoricalLabels(3), 0.5), (BernoulliLabels(), 2.0), (PoissonCounts(), -1.0)):
        model = SpikeSlabMRD(3, [2, 1], 1, likelihood=[None, likelihood])
        with pytest.raises(ValueError, match="view 1 has"):
            model.bound([torch.randn(3, 2), torch.tensor([[0.0], [wrong], [1.0]])])
    with pytest.raises(ValueError, match="one column"):
        SpikeSlabMRD(3, [2], 1, likelihood=CategoricalLabels(3))
    with pytest.raises(ValueError, match="likelihood must be one of"):
        SpikeSlabMRD(3, [2], 1, likelihood="binomial")
    with pytest.raises(TypeError, match="likelihood must be"):
        SpikeSlabMRD(3, [2], 1, likelihood=[3])
    with pytest.raises(ValueError, match="for each of the 1 views"):
        SpikeSlabMRD(3, [2], 1, likelihood=[None, None])
