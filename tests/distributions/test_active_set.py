"""The active set likelihood against the exact Gaussian process, cross-validation identities, and enumeration of minibatches."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.contrib.gp import kernels
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

from pyro_truncated.distributions import ActiveSetGaussianProcess, GivenActiveSet
from pyro_truncated.gp import ActiveSet, ActiveSetScaleWarning, JitterWarning
from pyro_truncated.gp.active_sets import split_weights
from pyro_truncated.gp.kernels import covariance, squared_distances

# Profiles over the scaled distance, written out once more; Pyro's own are off by 1e-6 at distance zero.
PROFILES = {
    "RBF": lambda r: (-(r**2) / 2).exp(),
    "Exponential": lambda r: (-r).exp(),
    "Matern32": lambda r: (1 + 3**0.5 * r) * (-(3**0.5) * r).exp(),
    "Matern52": lambda r: (1 + 5**0.5 * r + 5 * r**2 / 3) * (-(5**0.5) * r).exp(),
}
KERNELS = {"rbf": kernels.RBF, "exponential": kernels.Exponential, "matern32": kernels.Matern32, "matern52": kernels.Matern52}


def rbf(variance=1.3, lengthscale=(0.8, 1.4), kind="rbf"):
    lengthscale = torch.tensor(lengthscale, dtype=torch.float64)
    return KERNELS[kind](len(lengthscale), torch.tensor(variance, dtype=torch.float64), lengthscale)


def problem(num_data, num_outputs, generator, noise=0.2, kernel=None):
    kernel = kernel or rbf()
    z = torch.randn(num_data, 2, dtype=torch.float64, generator=generator)
    noise = torch.tensor(noise, dtype=torch.float64)
    with torch.no_grad():
        C = kernel.variance * PROFILES[type(kernel).__name__](
            torch.cdist(z / kernel.lengthscale, z / kernel.lengthscale)
        ) + noise * torch.eye(num_data, dtype=torch.float64)
    x = torch.linalg.cholesky(C) @ torch.randn(num_data, num_outputs, dtype=torch.float64, generator=generator)
    return kernel, noise, z, x, C


def normal_log_prob(x, C):
    return dist.MultivariateNormal(torch.zeros(len(C), dtype=C.dtype), C).log_prob(x.mT).sum()


def total(kernel, noise, z, x, active):
    """Log density with the given active set, all others the rest."""
    order = [*active, *(n for n in range(len(x)) if n not in active)]
    return ActiveSetGaussianProcess(z[order], kernel, noise, len(active), x.shape[1]).log_prob(x[order]).sum()


def sets(num_data, size):
    return list(itertools.combinations(range(num_data), size))


def scores(kernel, noise, z, x, C):
    """Leave-r-out scores S(r), r = 1 .. N, by explicit conditioning with dense inverses."""
    num_data = len(x)
    found = []
    for r in range(1, num_data + 1):
        values = []
        for active in sets(num_data, num_data - r):
            rest = [n for n in range(num_data) if n not in active]
            A = list(active)
            gain = C[rest][:, A] @ torch.linalg.inv(C[A][:, A]) if A else C.new_zeros(len(rest), 0)
            mean = gain @ x[A]
            variance = C.diagonal()[rest] - (gain * C[rest][:, A]).sum(-1)
            values.append(dist.Normal(mean, variance.sqrt().unsqueeze(-1)).log_prob(x[rest]).sum() / r)
        found.append(torch.stack(values).mean())
    return torch.stack(found)


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("num_active", [0, 4, 6, 7])
def test_density_is_that_of_the_formula(kind, num_active, generator):
    kernel, noise, z, x, C = problem(7, 3, generator, kernel=rbf(kind=kind))
    A, R = slice(0, num_active), slice(num_active, 7)
    gain = C[R, A] @ torch.linalg.inv(C[A, A])
    variance = C.diagonal()[R] - (gain * C[R, A]).sum(-1)
    rest = dist.Normal(gain @ x[A], variance.sqrt().unsqueeze(-1)).log_prob(x[R]).sum(-1)
    found = ActiveSetGaussianProcess(z, kernel, noise, num_active, 3).log_prob(x)
    assert found.shape == (7,)
    torch.testing.assert_close(found[R], rest, rtol=1e-9, atol=1e-9)
    if num_active:
        torch.testing.assert_close(found[A].sum(), normal_log_prob(x[A], C[A, A]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_active", [8, 9])
def test_all_or_all_but_one_active_is_the_exact_gaussian_process(num_active, generator):
    kernel, noise, z, x, C = problem(9, 4, generator)
    found = ActiveSetGaussianProcess(z, kernel, noise, num_active, 4).log_prob(x).sum()
    torch.testing.assert_close(found, normal_log_prob(x, C), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_exhaustive_cross_validation_is_the_log_marginal_likelihood(generator):
    kernel, noise, z, x, C = problem(8, 3, generator)
    exact = normal_log_prob(x, C)
    S = scores(kernel, noise, z, x, C)
    torch.testing.assert_close(S.sum(), exact, rtol=0, atol=1e-8)
    # The part of it that the likelihood computes: E_A log p(x_A) is what the scores up to R leave over.
    for rest in (1, 3, 6):
        active = [normal_log_prob(x[list(A)], C[list(A)][:, list(A)]) for A in sets(8, 8 - rest)]
        torch.testing.assert_close(S[:rest].sum() + torch.stack(active).mean(), exact, rtol=0, atol=1e-8)


@pytest.mark.slow
def test_bias_of_the_estimator_is_its_closed_form(generator):
    kernel, noise, z, x, C = problem(7, 2, generator)
    S, exact = scores(kernel, noise, z, x, C), normal_log_prob(x, C)
    for rest in range(1, 7):
        mean = torch.stack([total(kernel, noise, z, x, A) for A in sets(7, 7 - rest)]).mean()
        torch.testing.assert_close(mean - exact, (S[rest - 1] - S[:rest]).sum(), rtol=0, atol=1e-8)


@pytest.mark.slow
def test_bias_under_the_model_is_minus_the_total_correlation_of_the_rest(generator):
    """E_x[log p_A(x) - log p(x)] = -TC(x_R | x_A), here by determinants; 400 draws, false alarms at five standard errors: 6e-7."""
    kernel, noise, z, _, C = problem(8, 1, generator)
    x = torch.linalg.cholesky(C) @ torch.randn(8, 400, dtype=torch.float64, generator=generator)
    conditional = C[3:, 3:] - C[3:, :3] @ torch.linalg.inv(C[:3, :3]) @ C[:3, 3:]
    correlation = 0.5 * (conditional.diagonal().log().sum() - torch.logdet(conditional))
    approximate = torch.stack([ActiveSetGaussianProcess(z, kernel, noise, 3, 1).log_prob(column.unsqueeze(-1)).sum() for column in x.mT])
    exact = dist.MultivariateNormal(torch.zeros(8, dtype=C.dtype), C).log_prob(x.mT)
    gap = (approximate - exact).detach()
    assert abs(float(gap.mean() + correlation)) < 5 * float(gap.std()) / 20


@pytest.mark.parametrize(("batch_size", "num_active"), [(4, 2), (5, 1), (3, 2)])
def test_minibatches_in_a_subsampled_plate_are_unbiased(batch_size, num_active, generator):
    """Over all minibatches and all their splits, the mean of Pyro's loss is the mean over active sets of the full objective."""
    kernel, noise, z, x, _ = problem(6, 2, generator)

    def model(indices):
        with pyro.plate("data", 6, subsample=indices):
            likelihood = ActiveSetGaussianProcess(z[indices], kernel, noise, num_active, 2, num_data=6)
            pyro.sample("x", likelihood, obs=x[indices])

    losses = []
    for batch in sets(6, batch_size):
        for active in itertools.combinations(batch, num_active):
            indices = torch.tensor([*active, *(n for n in batch if n not in active)])
            losses.append(Trace_ELBO().loss(model, lambda indices: None, indices))
    expected = torch.stack([total(kernel, noise, z, x, A) for A in sets(6, num_active)]).mean()
    assert sum(losses) / len(losses) == pytest.approx(-expected.item(), abs=1e-9)


@pytest.mark.parametrize("kind", ["rbf", "matern32", "matern52"])
def test_gradients_against_finite_differences(kind, generator):
    _, _, z, x, _ = problem(6, 2, generator)

    double = {"dtype": torch.float64, "requires_grad": True}
    arguments = (z.requires_grad_(), torch.tensor(1.3, **double), torch.tensor([0.8, 1.4], **double), torch.tensor(0.2, **double))

    class Plain(KERNELS[kind]):
        """The kernel with tensors in the place of its parameters, so that they can be differentiated."""

        def __init__(self, dim, variance, lengthscale):
            super().__init__(dim)
            object.__setattr__(self, "values", (variance, lengthscale))

        variance = property(lambda self: self.values[0], lambda self, value: None)
        lengthscale = property(lambda self: self.values[1], lambda self, value: None)

    def through(z, variance, lengthscale, noise):
        return ActiveSetGaussianProcess(z, Plain(2, variance, lengthscale), noise, 4, 2, num_data=9).log_prob(x).sum()

    assert torch.autograd.gradcheck(through, arguments, atol=1e-6)


def test_gradient_at_coinciding_latents_is_finite(generator):
    for kind in KERNELS:
        z = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
        x = torch.randn(4, 2, dtype=torch.float64, generator=generator)
        ActiveSetGaussianProcess(z, rbf(kind=kind), 0.3, 2, 2).log_prob(x).sum().backward()
        assert bool(z.grad.isfinite().all())


@pytest.mark.parametrize(("noise", "tolerance"), [(1e-2, 2e-4), (1e-3, 2e-3)])
def test_float32_against_float64_off_centre(noise, tolerance, generator):
    """Latents far from the origin, where the expanded square of float32 distances has no digits: errors in nats per output and point."""
    kernel, _, z, x, _ = problem(150, 5, generator, noise, kernel=rbf(1.0, (1.0, 1.0)))
    z = (z + 30).float()
    exact = ActiveSetGaussianProcess(z.double(), kernel, noise, 100, 5).log_prob(x)
    found = ActiveSetGaussianProcess(z, kernel.float(), noise, 100, 5).log_prob(x.float())
    assert found.dtype == torch.float32
    assert (found - exact).abs().max().item() / 5 < tolerance


def test_covariances_are_those_of_the_kernel(generator):
    X, Z = (torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (4, 5))
    variance, lengthscale = torch.tensor(2.0, dtype=torch.float64), torch.tensor([0.5, 1.0], dtype=torch.float64)
    own = [kind(2, variance, lengthscale, active_dims=[0, 2]) for kind in KERNELS.values()]
    for kernel in [*own, kernels.RationalQuadratic(3), kernels.Sum(kernels.RBF(3), kernels.Linear(3))]:
        pyro.clear_param_store()  # a kernel that is called registers its parameters by names that all share
        torch.testing.assert_close(covariance(kernel, X, Z), kernel(X, Z), rtol=0, atol=1e-6)
        many = torch.stack([X, X + 1])
        torch.testing.assert_close(covariance(kernel, many, Z), torch.stack([kernel(X, Z), kernel(X + 1, Z)]), rtol=0, atol=1e-6)
    torch.testing.assert_close(squared_distances(X, Z), torch.cdist(X, Z).square())


def test_missing_entries_of_the_rest_and_of_the_active_set_are_marginalised_exactly(generator):
    kernel, noise, z, x, C = problem(8, 5, generator)
    x = x.masked_fill(torch.rand(x.shape, generator=generator) < 0.3, math.nan)
    x[:, 4] = math.nan
    num_active = 5
    expected = 0.0
    for d in range(5):
        seen = ~x[:, d].isnan()
        A = [n for n in range(num_active) if seen[n]]
        expected += normal_log_prob(x[A, d : d + 1], C[A][:, A]) if A else 0.0
        for n in (n for n in range(num_active, 8) if seen[n]):
            expected += normal_log_prob(x[[*A, n], d : d + 1], C[[*A, n]][:, [*A, n]])
            expected -= normal_log_prob(x[A, d : d + 1], C[A][:, A]) if A else 0.0
    found = ActiveSetGaussianProcess(z, kernel, noise, num_active, 5).log_prob(x)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found.sum(), torch.as_tensor(expected), rtol=0, atol=1e-8)
    mean, variance = ActiveSet(z[:num_active], x[:num_active], kernel, noise).predict(z[num_active:])
    torch.testing.assert_close(mean[:, 4], torch.zeros(3, dtype=mean.dtype))
    torch.testing.assert_close(variance[:, 4], C.diagonal()[num_active:])


def test_prediction_against_dense_conditioning(generator):
    kernel, noise, z, x, C = problem(9, 3, generator)
    active = ActiveSet(z[:6], x[:6], kernel, noise)
    mean, variance = active.predict(z[6:], noiseless=True)
    gain = C[6:, :6] @ torch.linalg.inv(C[:6, :6])
    conditional = C[6:, 6:] - gain @ C[:6, 6:] - noise * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(mean, gain @ x[:6], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(variance.squeeze(-1), conditional.diagonal(), rtol=1e-9, atol=1e-9)
    many = torch.stack([z[6:], z[6:] + 1])
    torch.testing.assert_close(active.predict(many)[0][0], mean, rtol=1e-9, atol=1e-9)
    given = GivenActiveSet(active, many, loc=0.5)
    expected = dist.Normal(given.mean, given.variance.sqrt()).log_prob(x[6:]).sum(-1)
    torch.testing.assert_close(given.log_prob(x[6:]), expected)
    assert given.expand((4, 2, 3)).log_prob(x[6:]).shape == (4, 2, 3)


def test_parallel_draws_of_latents_are_scored_each_on_its_own(generator):
    kernel, noise, z, x, _ = problem(6, 2, generator)
    z = torch.stack([z, z.flip(0), 2 * z])
    found = ActiveSetGaussianProcess(z, kernel, noise, 4, 2).log_prob(x)
    single = [ActiveSetGaussianProcess(draw, kernel, noise, 4, 2).log_prob(x) for draw in z]
    torch.testing.assert_close(found, torch.stack(single))


def test_samples_have_the_moments_of_the_density(generator):
    """20 000 draws: covariances within six standard errors, false alarms below 1e-6."""
    kernel, noise, z, _, C = problem(5, 2, generator)
    likelihood = ActiveSetGaussianProcess(z, kernel, noise, 3, 2, loc=torch.tensor([1.0, -2.0]))
    draws = likelihood.rsample((20_000,))
    gain = C[3:, :3] @ torch.linalg.inv(C[:3, :3])
    expected = C.clone()
    rest = gain @ C[:3, :3] @ gain.mT
    expected[3:, 3:] = rest + torch.diag(C.diagonal()[3:] - rest.diagonal())
    for d, loc in enumerate((1.0, -2.0)):
        centred = draws[..., d] - loc
        error = (expected.diagonal().outer(expected.diagonal()) + expected.square()).sqrt() / math.sqrt(20_000)
        assert bool(((centred.mT @ centred / 20_000 - expected).abs() < 6 * error).all())
    torch.testing.assert_close(likelihood.variance[:, 0], C.diagonal())


def test_nearly_singular_matrices_are_lifted_and_reported(generator):
    z = (0.001 * torch.randn(60, 2, generator=generator)).float()
    x = torch.randn(60, 3, generator=generator)
    kernel = kernels.RBF(2)
    with pytest.warns(JitterWarning, match="nearly singular in torch.float32"):
        active = ActiveSet(z, x, kernel, torch.tensor(1e-8))
    assert 0.99e-5 <= active.jitter < 1e-2
    assert active.predict(z)[1].min() >= 1e-8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ActiveSet(z.double(), x.double(), kernel.double(), torch.tensor(1e-8)).jitter == 0
    with pytest.raises(ValueError, match="cannot be factorised"):
        ActiveSet(torch.full((3, 2), math.nan), torch.zeros(3, 1), kernel, torch.tensor(0.1))


def test_a_pyro_model_trains_with_either_elbo(generator):
    kernel, _, _, x, _ = problem(20, 3, generator)
    x = x.float()

    def model():
        pyro.module("kernel", kernel.float())
        level = pyro.param("noise", torch.tensor(0.5), constraint=dist.constraints.positive)
        with pyro.plate("data", 20, subsample_size=10) as i:
            latent = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).expand([2]).to_event(1))
            pyro.sample("x", ActiveSetGaussianProcess(latent, kernel, level, 5, 3, num_data=20), obs=x[i])

    guide = pyro.infer.autoguide.AutoNormal(model, create_plates=lambda: pyro.plate("data", 20, subsample_size=10))
    for elbo in (Trace_ELBO(), TraceMeanField_ELBO(), Trace_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1)):
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), elbo)
        assert all(math.isfinite(svi.step()) for _ in range(3))


def test_a_subclass_of_a_known_kernel_is_evaluated_by_its_own_forward(generator):
    class Doubled(kernels.RBF):
        def forward(self, X, Z=None, diag=False):
            return 2 * super().forward(X, Z, diag)

    z = torch.randn(5, 2, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(covariance(Doubled(2), z, z), 2 * covariance(kernels.RBF(2), z, z))


def test_noise_and_kernel_must_fit():
    with pytest.raises(ValueError, match="noise must be one variance"):
        ActiveSetGaussianProcess(torch.zeros(4, 2), kernels.RBF(2), torch.ones(3), 2, 3)
    with pytest.raises(ValueError, match="looks at dimension 2"):
        ActiveSetGaussianProcess(torch.zeros(4, 2), kernels.RBF(3), 0.1, 2, 3)


def test_infinite_observations_are_refused(generator):
    likelihood = ActiveSetGaussianProcess(torch.randn(4, 2, generator=generator), kernels.RBF(2), 0.1, 2, 3, validate_args=True)
    value = torch.zeros(4, 3)
    value[3, 1] = math.inf
    with pytest.raises(ValueError, match="within the support"):
        likelihood.log_prob(value)


def test_bad_sizes_are_refused():
    z, kernel = torch.zeros(4, 2), kernels.RBF(2)
    with pytest.raises(ValueError, match="num_active <= batch"):
        ActiveSetGaussianProcess(z, kernel, 0.1, 5, 3)
    with pytest.raises(ValueError, match="none stands for the other 6"):
        ActiveSetGaussianProcess(z, kernel, 0.1, 4, 3, num_data=10)
    with pytest.raises(ValueError, match="latents must be real and have shape"):
        ActiveSetGaussianProcess(z[0], kernel, 0.1, 1, 3)
    with pytest.raises(ValueError, match="must agree"):
        ActiveSet(z, torch.zeros(3, 2), kernel, torch.tensor(0.1))
    with pytest.raises(ValueError, match="one variance"):
        ActiveSet(z, torch.zeros(4, 3), kernel, torch.ones(3))
    with pytest.raises(ValueError, match="batch_shape must end in the number of data points"):
        ActiveSetGaussianProcess(z[:1], kernel, 0.1, 1, 3).expand((7,))


def minibatch(num_data=None, num_active=3, *, weights=None, plated=True, size=6, temperature=1.0):
    """The log density that a program gives to ``size`` of 12 data points."""
    generator = torch.Generator().manual_seed(0)
    z, x = (torch.randn(12, 2, generator=generator, dtype=torch.float64) for _ in range(2))

    def model():
        with contextlib.ExitStack() as stack:
            index = stack.enter_context(pyro.plate("data", 12, subsample=torch.arange(size))) if plated else torch.arange(size)
            stack.enter_context(poutine.scale(scale=temperature if weights is None else weights))
            process = ActiveSetGaussianProcess(z[index], rbf(), torch.tensor(0.1, dtype=torch.float64), num_active, 2, num_data=num_data)
            pyro.sample("x", process.to_event(0 if plated else 1), obs=x[index])

    return float(poutine.trace(model).get_trace().log_prob_sum().detach())


def test_a_plate_that_scales_the_active_set_is_noticed():
    with pytest.warns(ActiveSetScaleWarning, match=r"plate 'data' takes 6 of 12 .* by 2\. Pass num_data=12"):
        wrong = minibatch()
    right = minibatch(12)
    assert minibatch(weights=split_weights(6, 3, 12, torch.zeros((), dtype=torch.float64))) == pytest.approx(right, rel=1e-6)
    # What the warning says: the active set counts twice, and the rest, which stands for nine points, six times in three.
    active, whole = minibatch(size=3, plated=False), minibatch(size=6, plated=False)
    assert wrong == pytest.approx(2 * whole)
    assert right == pytest.approx(active + 3 * (whole - active))


def test_a_tempered_plate_that_scales_the_active_set_is_noticed():
    with pytest.warns(ActiveSetScaleWarning, match=r"by 2\. Pass num_data=12"):
        minibatch(temperature=0.7)


def test_another_number_of_data_than_the_plates_is_noticed():
    with pytest.warns(ActiveSetScaleWarning, match=r"plate 'data' takes 6 of 12 data points, but the distribution has num_data=20"):
        minibatch(20)


def test_scales_that_are_no_mistake_raise_no_warning():
    # Warnings are errors here.
    minibatch(size=12)
    minibatch(size=12, temperature=2.0)
    minibatch(num_active=0)
    minibatch(plated=False, temperature=2.0)
