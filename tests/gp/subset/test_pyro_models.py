"""Pyro models on an inducing subset: against Pyro's own models, under SVI, with other likelihoods, and when the subset changes."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.gp import kernels, likelihoods, models
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.nn import PyroSample
from pyro.optim import Adam, ClippedAdam

from pyro_truncated.gp import CountKernel, StudentT, SubsetSparseGPRegression, SubsetVariationalGP, spectrum
from pyro_truncated.gp.subset.pyro_models import gaussian_surrogate
from tests.gp.subset.subset_reference import toy

INDEX = torch.arange(0, 60, 6)


def double(module):
    return module.double()


@pytest.mark.parametrize("approx", ["VFE", "DTC"])
def test_regression_has_the_density_and_predictions_of_pyro(approx):
    kernel, Y = toy(60)
    noise = torch.tensor(0.05, dtype=torch.float64)
    theirs = models.SparseGPRegression(kernel.inputs, Y[:, 0], kernel.kernel, kernel.inputs[INDEX], noise=noise, approx=approx, jitter=1e-8)
    ours = SubsetSparseGPRegression(kernel, Y[:, 0], num_inducing=10, index=INDEX, noise=0.05, approx=approx, jitter=1e-8)
    expected = poutine.trace(theirs.model).get_trace().log_prob_sum().detach()
    pyro.clear_param_store()
    torch.testing.assert_close(poutine.trace(ours.model).get_trace().log_prob_sum().detach(), expected, rtol=1e-9, atol=1e-9)
    new = torch.randn(7, 3, dtype=torch.float64)
    with torch.no_grad():
        mean, variance = theirs(new, noiseless=False)
    found = ours(new, noiseless=False)
    torch.testing.assert_close(found[0], mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1], variance, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_regression_learns_hyper_parameters_by_svi_and_the_subset_by_exchange():
    kernel, Y = toy(60)
    gp = SubsetSparseGPRegression(kernel, Y[:, 0], num_inducing=8, index=torch.arange(8))
    svi = SVI(gp.model, gp.guide, Adam({"lr": 0.05}), Trace_ELBO())
    first = svi.step()
    for _ in range(30):
        svi.step()
    before = svi.evaluate_loss()
    assert before < first
    assert gp.reselect(generator=torch.Generator().manual_seed(0))
    assert svi.evaluate_loss() < before - 1
    assert len(gp.index.unique()) == 8
    state = gp.state_dict()
    assert torch.equal(state["index"], gp.index)


def test_variational_process_has_the_loss_and_marginals_of_pyro():
    kernel, Y = toy(60)
    generator = torch.Generator().manual_seed(0)
    loc = torch.randn(10, generator=generator, dtype=torch.float64)
    tril = torch.randn(10, 10, generator=generator, dtype=torch.float64).tril(-1) * 0.1 + torch.eye(10, dtype=torch.float64)
    theirs = models.VariationalSparseGP(
        kernel.inputs, Y[:, 0], kernel.kernel, kernel.inputs[INDEX], double(likelihoods.Gaussian()), whiten=True
    )
    ours = SubsetVariationalGP(kernel, Y[:, 0], likelihood=double(likelihoods.Gaussian()), num_inducing=10, index=INDEX)
    losses = []
    for gp in (theirs, ours):
        pyro.clear_param_store()
        with torch.no_grad():
            gp.u_loc.copy_(loc)
        gp.u_scale_tril = tril
        losses.append(TraceMeanField_ELBO().loss(gp.model, gp.guide))
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    new = torch.randn(7, 3, dtype=torch.float64)
    with torch.no_grad():
        expected = theirs(new)
    for found, value in zip(ours(new), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=1e-9)


def exact_loss(gp, noise):
    """Minus the evidence bound for Gaussian noise, in closed form."""
    mean, variance = gp.marginals()
    fit = dist_normal(gp.y, mean, noise) - 0.5 * variance / noise
    q = torch.distributions.MultivariateNormal(gp.u_loc, scale_tril=gp.u_scale_tril)
    m = len(gp.u_loc)
    prior = torch.distributions.MultivariateNormal(torch.zeros(m).to(gp.u_loc), torch.eye(m).to(gp.u_loc))
    return float((torch.distributions.kl_divergence(q, prior) - fit.sum()).detach())


def dist_normal(y, mean, noise):
    return -0.5 * (y - mean).square() / noise - 0.5 * math.log(2 * math.pi * noise)


@pytest.mark.slow
def test_minibatches_are_unbiased():
    kernel, Y = toy(60)
    gp = SubsetVariationalGP(kernel, Y[:, 0], likelihood=double(likelihoods.Gaussian()), num_inducing=10, index=INDEX, batch_size=7)
    whole = SubsetVariationalGP(toy(60)[0], Y[:, 0], likelihood=double(likelihoods.Gaussian()), num_inducing=10, index=INDEX)
    pyro.clear_param_store()
    expected = TraceMeanField_ELBO().loss(whole.model, whole.guide)
    pyro.clear_param_store()
    losses = torch.tensor([TraceMeanField_ELBO().loss(gp.model, gp.guide) for _ in range(200)])
    # Six standard errors: a false alarm once in 5e8 seeds.
    assert abs(float(losses.mean()) - expected) < 6 * float(losses.std()) / 200**0.5


def targets(name: str, f: torch.Tensor) -> tuple[object, torch.Tensor, dict[str, object]]:
    generator = torch.Generator().manual_seed(1)
    if name == "binary":
        return likelihoods.Binary(), torch.bernoulli(torch.sigmoid(3 * f), generator=generator), {}
    if name == "poisson":
        # The offset belongs to the link: a process of mean zero would have to learn it from each inducing input's neighbourhood.
        return likelihoods.Poisson(lambda f: (2 + f).exp()), torch.poisson((2 + f).exp(), generator=generator), {}
    if name == "student":
        y = f + 0.1 * torch.randn(len(f), generator=generator, dtype=f.dtype)
        y[::10] += 5
        return StudentT(scale=0.3, dtype=torch.float64), y, {}
    classes = (f > -0.5).long() + (f > 0.5).long()
    return likelihoods.MultiClass(3), classes, {"latent_shape": (3,)}


@pytest.mark.nightly(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["binary", "poisson", "student", "classes"])
def test_likelihoods_train_with_minibatches_and_reselection(name):
    kernel, Y = toy(60)
    likelihood, y, options = targets(name, Y[:, 0])
    generator = torch.Generator().manual_seed(0)
    gp = SubsetVariationalGP(kernel, y, likelihood=likelihood, num_inducing=20, index=torch.arange(20), batch_size=30, **options)
    assert gp.reselect(max_attempts=5, generator=generator)
    svi = SVI(gp.model, gp.guide, ClippedAdam({"lr": 0.1, "lrd": 0.985, "clip_norm": 1e6}), Trace_ELBO())
    losses = []
    for step in range(200):
        if step == 100:
            gp.reselect(max_attempts=3, generator=generator)
        losses.append(svi.step())
    assert all(math.isfinite(loss) for loss in losses)
    if name in {"poisson", "student"}:
        # One draw a step from 30 labels tells too little to see the fall in so few steps; these data tell enough.
        assert sum(losses[-20:]) / 20 < 0.9 * sum(losses[:10]) / 10
    mean, variance = gp(kernel.inputs)
    assert bool((variance >= 0).all())
    if name == "classes":
        assert (mean.argmax(0) == y).double().mean() > 0.8
    else:
        assert torch.corrcoef(torch.stack([mean, Y[:, 0]]))[0, 1] > 0.8


def test_surrogate_of_gaussian_noise_is_exact():
    kernel, Y = toy(60)
    gp = SubsetVariationalGP(kernel, Y[:, 0], likelihood=double(likelihoods.Gaussian(torch.tensor(0.3))), num_inducing=10, index=INDEX)
    found, deviations = gaussian_surrogate(gp.likelihood, *gp.marginals(), gp.y, 2, torch.Generator().manual_seed(0))
    torch.testing.assert_close(found[:, 0], Y[:, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(deviations.square(), torch.full((60,), 0.3, dtype=torch.float64), rtol=1e-6, atol=0)


def test_reselection_carries_the_posterior_over():
    kernel, Y = toy(60)
    likelihood = double(likelihoods.Gaussian(torch.tensor(0.02)))
    gp = SubsetVariationalGP(kernel, Y[:, 0], likelihood=likelihood, num_inducing=30, index=torch.arange(30))
    with torch.no_grad():
        gp.u_loc.copy_(torch.randn(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    before = gp.marginals()
    mean, variance = before[0].detach(), before[1].detach()
    new = torch.arange(10, 40)
    assert gp.take_index(new)
    after = gp.marginals(new)
    torch.testing.assert_close(after[0].detach(), mean[new], rtol=0, atol=1e-4)
    torch.testing.assert_close(after[1].detach(), variance[new], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_selection_lowers_the_best_loss_of_the_variational_process():
    losses = []
    for choose in (False, True):
        pyro.clear_param_store()
        kernel, Y = toy(60)
        likelihood = double(likelihoods.Gaussian(torch.tensor(0.02)))
        gp = SubsetVariationalGP(kernel, Y[:, 0], likelihood=likelihood, num_inducing=8, index=torch.arange(8))
        if choose:
            gp.reselect(generator=torch.Generator().manual_seed(0))
        optimizer = torch.optim.LBFGS([gp.u_loc, *(p for n, p in gp.named_parameters() if n == "u_scale_tril_unconstrained")], max_iter=60)

        def closure(gp=gp, optimizer=optimizer):
            optimizer.zero_grad()
            mean, variance = gp.marginals()
            q = torch.distributions.MultivariateNormal(gp.u_loc, scale_tril=gp.u_scale_tril)
            eye = torch.eye(8, dtype=torch.float64)
            loss = torch.distributions.kl_divergence(q, torch.distributions.MultivariateNormal(torch.zeros_like(gp.u_loc), eye))
            loss = loss - (dist_normal(gp.y, mean, 0.02) - 0.5 * variance / 0.02).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        losses.append(exact_loss(gp, 0.02))
    assert losses[1] < losses[0] - 10


@pytest.mark.slow
def test_strings_and_loading():
    words = ["ab" * k + "c" * j for k in range(1, 6) for j in range(4)]
    y = torch.tensor([float("c" in word) for word in words], dtype=torch.float64)
    features = spectrum(words, 2, shorter=True)
    gp = SubsetVariationalGP(CountKernel(features, "cosine", 10.0), y, likelihood=likelihoods.Binary(), num_inducing=6)
    gp.reselect(generator=torch.Generator().manual_seed(0))
    svi = SVI(gp.model, gp.guide, Adam({"lr": 0.1}), Trace_ELBO())
    for _ in range(80):
        svi.step()
    mean, _ = gp(features)
    assert ((mean > 0) == (y > 0)).double().mean() >= 0.9
    pyro.clear_param_store()
    again = SubsetVariationalGP(CountKernel(features, "cosine", 10.0), y, likelihood=likelihoods.Binary(), num_inducing=6)
    again.load_state_dict(gp.state_dict())
    torch.testing.assert_close(again(features)[0], mean)


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.bool])
def test_integer_targets_are_numbers(kind):
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, index = x[:, 0] > 0, torch.arange(5)

    def results(y):
        regression = SubsetSparseGPRegression(x, y, num_inducing=5, index=index, noise=0.2)
        process = SubsetVariationalGP(x, y, likelihood=likelihoods.Binary(), num_inducing=5, index=index)
        torch.manual_seed(0)
        losses = [Trace_ELBO(num_particles=1).loss(one.model, one.guide) for one in (regression, process)]
        process.reselect(generator=torch.Generator().manual_seed(0))
        return [*regression(x, noiseless=False), torch.tensor(losses), process.index]

    for found, expected in zip(results(y.to(kind)), results(y.double()), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_bad_input():
    kernel, Y = toy(60)
    y = Y[:, 0]
    with pytest.raises(ValueError, match=r"y must have shape \(\.\.\., 60\)"):
        SubsetSparseGPRegression(kernel, y[:5], num_inducing=3)
    with pytest.raises(ValueError, match="index must hold num_inducing=3 positions; got 10"):
        SubsetSparseGPRegression(kernel, y, num_inducing=3, index=INDEX)
    with pytest.raises(ValueError, match='approx must be "VFE" or "DTC"'):
        SubsetSparseGPRegression(kernel, y, num_inducing=3, approx="FITC")
    with pytest.raises(ValueError, match=r"num_inducing must lie in 1 \.\. 60, the number of inputs"):
        SubsetVariationalGP(kernel, y, likelihood=likelihoods.Binary(), num_inducing=61)
    with pytest.raises(ValueError, match=r"batch_size must lie in 1 \.\. 60"):
        SubsetVariationalGP(kernel, y, likelihood=likelihoods.Binary(), num_inducing=6, batch_size=0)
    with pytest.raises(ValueError, match=r"batch_size must be an integer .*; got 2\.5"):
        SubsetVariationalGP(kernel, y, likelihood=likelihoods.Binary(), num_inducing=6, batch_size=2.5)


@pytest.mark.parametrize("variational", [True, False])
def test_a_state_of_other_inputs_is_refused(variational):
    x = torch.randn(30, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def make(x):
        if variational:
            return SubsetVariationalGP(x, x[:, 0].sin(), likelihood=double(likelihoods.Gaussian()), num_inducing=5)
        return SubsetSparseGPRegression(x, x[:, 0].sin(), num_inducing=5)

    gp, again = make(x), make(x)
    with torch.no_grad():
        for value in gp.parameters():
            value.mul_(1.1)
    state = {name: value.clone() for name, value in gp.state_dict().items()}
    for other in (2 * x, x.square(), x[:6]):
        with pytest.raises(ValueError, match="other inputs"):
            make(other).load_state_dict(state)
    earlier = {name: value for name, value in state.items() if name != "_extra_state"}
    for each in (state, earlier):
        again.load_state_dict(each)
        torch.testing.assert_close(again(x)[0], gp(x)[0])


def test_states_of_kernels_with_priors_are_taken():
    x = torch.randn(20, 1, generator=torch.Generator().manual_seed(0))

    def make():
        kernel = kernels.RBF(1)
        kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0))
        return SubsetVariationalGP(x, x[:, 0].sin(), kernel, likelihood=likelihoods.Gaussian(), num_inducing=5)

    gp, again = make(), make()
    for _ in range(2):
        again.load_state_dict(gp.state_dict())
        gp(x)
