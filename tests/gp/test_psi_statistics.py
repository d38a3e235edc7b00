"""Psi statistics against exact sums over switches and quadrature, Monte Carlo, finite differences and each other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from pyro.contrib.gp import kernels

from pyro_truncated.gp import LinearARD, Quadrature, Sampling, SpikeSlabInputs, closed_form, psi_statistics
from pyro_truncated.ops import memory_budget
from pyro_truncated.ops.compiled import mixture_products as mixture_products_cpu
from pyro_truncated.ops.mixture_products import mixture_products
from pyro_truncated.ops.vectorised import mixture_products as mixture_products_dense

DOUBLE = torch.float64
# Extreme z over the (at most 60) entries of a test, seeded: a false alarm in fewer than 1 of 1000 seeds.
Z_LIMIT = 4.2


def make_inputs(num_data=4, num_dims=3, per_datum=False, prior_share=False, dtype=DOUBLE):
    probability = torch.rand((num_data, num_dims) if per_datum else (num_dims,), dtype=dtype)
    share = torch.rand(num_dims, dtype=dtype) if prior_share else None
    return SpikeSlabInputs(torch.randn(num_data, num_dims, dtype=dtype), torch.rand(num_data, num_dims, dtype=dtype), probability, share)


def rbf(num_dims, dtype=DOUBLE, dims=None):
    return kernels.RBF(num_dims, torch.tensor(1.3, dtype=dtype), 0.6 + torch.rand(num_dims, dtype=dtype), dims)


def linear(num_dims, dtype=DOUBLE, dims=None):
    return LinearARD(num_dims, 0.3 + torch.rand(num_dims, dtype=dtype), dims)


def draw(inputs, num_samples):
    """Samples of the effective inputs, ``(num_samples, N, Q)``."""
    shape = (num_samples, *inputs.loc.shape)
    slab = torch.rand(shape, dtype=DOUBLE) < inputs.slab
    share = torch.zeros(shape[-1], dtype=DOUBLE) if inputs.prior_share is None else inputs.prior_share
    rest = torch.where(torch.rand(shape, dtype=DOUBLE) < share, torch.randn(shape, dtype=DOUBLE), 0.0)
    return torch.where(slab, inputs.loc + inputs.variance.sqrt() * torch.randn(shape, dtype=DOUBLE), rest)


def exact(kernel, inputs, inducing, degree=60):
    """Sum over all switches, tensor quadrature over the dimensions that are on."""
    roots, weights = np.polynomial.hermite_e.hermegauss(degree)
    roots, weights = torch.from_numpy(roots), torch.from_numpy(weights / np.sqrt(2 * np.pi))
    num_data, num_dims = inputs.loc.shape
    found = [torch.zeros(num_data, dtype=DOUBLE), torch.zeros(num_data, len(inducing), dtype=DOUBLE)]
    found.append(torch.zeros(num_data, len(inducing), len(inducing), dtype=DOUBLE))
    share = torch.zeros(num_dims, dtype=DOUBLE) if inputs.prior_share is None else inputs.prior_share
    kinds = 2 if inputs.prior_share is None else 3
    for n, parts in itertools.product(range(num_data), itertools.product(range(kinds), repeat=num_dims)):
        slab = inputs.slab[n]
        probability = torch.stack([(1 - slab) * (1 - share), slab, (1 - slab) * share])[list(parts), range(num_dims)].prod()
        axes, factors = [], []
        for q, part in enumerate(parts):
            loc, variance = [(0.0, 0.0), (inputs.loc[n, q], inputs.variance[n, q]), (0.0, 1.0)][part]
            axes.append(loc + variance**0.5 * roots if part else torch.zeros(1, dtype=DOUBLE))
            factors.append(weights if part else torch.ones(1, dtype=DOUBLE))
        x = torch.cartesian_prod(*axes).reshape(-1, num_dims)
        w = probability * torch.cartesian_prod(*factors).reshape(-1, num_dims).prod(1)
        with torch.no_grad():
            cross, diagonal = kernel(x, inducing), kernel(x, diag=True)
        found[0][n] += w @ diagonal
        found[1][n] += w @ cross
        found[2][n] += (w.unsqueeze(-1) * cross).mT @ cross
    return found


def check_against(found, expected, **tolerance):
    torch.testing.assert_close(found.psi0, expected[0], **tolerance)
    torch.testing.assert_close(found.psi1, expected[1], **tolerance)
    torch.testing.assert_close(found.psi2, expected[2] if found.psi2.dim() == 3 else expected[2].sum(0), **tolerance)


@pytest.mark.parametrize("make", [rbf, linear, lambda dims: kernels.Linear(dims, torch.tensor(0.7, dtype=DOUBLE))])
@pytest.mark.parametrize("per_datum_switches", [False, True])
@pytest.mark.parametrize("prior_share", [False, True])
@pytest.mark.parametrize("per_datum", [False, True])
def test_closed_forms_equal_exact_sums(make, per_datum_switches, prior_share, per_datum):
    inputs, kernel, inducing = (
        make_inputs(1 + per_datum_switches, 2, per_datum_switches, prior_share),
        make(2),
        torch.randn(3, 2, dtype=DOUBLE),
    )
    assert closed_form(kernel, inputs, inducing, per_datum) is not None
    found = psi_statistics(kernel, inputs, inducing, per_datum=per_datum)
    check_against(found, exact(kernel, inputs, inducing), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("make", [rbf, linear])
def test_closed_forms_agree_with_samples(make):
    inputs, kernel, inducing = make_inputs(3, 5, prior_share=True), make(5), torch.randn(4, 5, dtype=DOUBLE)
    found = psi_statistics(kernel, inputs, inducing, per_datum=True)
    num_samples = 100_000
    x = draw(inputs, num_samples)
    with torch.no_grad():
        cross = kernel(x.reshape(-1, 5), inducing).reshape(num_samples, 3, 4)
        values = {
            "psi0": kernel(x.reshape(-1, 5), diag=True).reshape(num_samples, 3),
            "psi1": cross,
            "psi2": cross.unsqueeze(-1) * cross.unsqueeze(-2),
        }
    for name, value in values.items():
        deviation = value.std(0) / num_samples**0.5
        error = (getattr(found, name) - value.mean(0)).abs()
        assert bool((error <= Z_LIMIT * deviation + 1e-12).all()), name


@pytest.mark.parametrize("combine", ["sum", "product", "plus number", "times number", "plus constant", "plus noise"])
@pytest.mark.parametrize("per_datum", [False, True])
def test_sums_and_products_of_independent_kernels(combine, per_datum):
    inputs, inducing = make_inputs(1, 3), torch.randn(3, 3, dtype=DOUBLE)
    a, b = rbf(2, dims=[0, 2]), linear(1, dims=[1])
    kernel = {
        "sum": lambda: kernels.Sum(a, b),
        "product": lambda: kernels.Product(a, b),
        "plus number": lambda: kernels.Sum(a, 0.7),
        "times number": lambda: kernels.Product(a, 0.7),
        "plus constant": lambda: kernels.Sum(a, kernels.Constant(3, torch.tensor(0.4, dtype=DOUBLE))),
        "plus noise": lambda: kernels.Sum(a, kernels.WhiteNoise(3, torch.tensor(0.4, dtype=DOUBLE))),
    }[combine]()
    assert closed_form(kernel, inputs, inducing, per_datum) is not None
    check_against(psi_statistics(kernel, inputs, inducing, per_datum=per_datum), exact(kernel, inputs, inducing, 25), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("per_datum", [False, True])
def test_other_kernels_by_quadrature(per_datum):
    inputs, inducing = make_inputs(3, 2, prior_share=True), torch.randn(3, 2, dtype=DOUBLE)
    kernel = kernels.Sum(rbf(2), linear(2))
    assert closed_form(kernel, inputs, inducing, per_datum) is None
    found = psi_statistics(kernel, inputs, inducing, per_datum=per_datum, expectation=Quadrature(60))
    check_against(found, exact(kernel, inputs, inducing), rtol=1e-9, atol=1e-9)


def test_blocks_change_nothing():
    inputs, inducing = make_inputs(7, 2), torch.randn(3, 2, dtype=DOUBLE)
    matern = kernels.Matern52(2, torch.tensor(1.0, dtype=DOUBLE), torch.ones(2, dtype=DOUBLE))
    product = kernels.Product(rbf(1, dims=[0]), rbf(1, dims=[1]))
    for kernel, expectation in ((matern, Quadrature(5)), (matern, Sampling(8)), (product, None)):
        whole = psi_statistics(kernel, inputs, inducing, expectation=expectation)
        with memory_budget(1):
            parts = psi_statistics(kernel, inputs, inducing, expectation=expectation)
        for a, b in zip(whole, parts, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_samples_approach_the_closed_form():
    inputs, kernel, inducing = make_inputs(5, 4, prior_share=True), rbf(4), torch.randn(3, 4, dtype=DOUBLE)
    expected = psi_statistics(kernel, inputs, inducing)
    errors = []
    for num_samples in (2**6, 2**14):
        nodes = Sampling(num_samples).nodes(inputs)
        cross = kernel(nodes.points.reshape(-1, 4), inducing).reshape(num_samples, 5, 3)
        errors.append(float((torch.einsum("sn,snm->nm", nodes.weights, cross) - expected.psi1).detach().abs().max()))
    assert errors[1] < 3e-3
    assert errors[1] < errors[0] / 5


def test_gradient_of_samples_is_that_of_the_expectation():
    # In the probabilities the samples have a score-function gradient: compared with the closed form's over many samples.
    loc, variance = torch.randn(2, 2, dtype=DOUBLE), torch.rand(2, 2, dtype=DOUBLE)
    probability = torch.tensor([0.3, 0.8], dtype=DOUBLE)
    kernel, inducing = rbf(2), torch.randn(3, 2, dtype=DOUBLE)
    gradients = []
    for sampled in (False, True):
        leaves = [v.clone().requires_grad_() for v in (loc, variance, probability)]
        inputs = SpikeSlabInputs(*leaves)
        if sampled:
            nodes = Sampling(2**16).nodes(inputs)
            cross = kernel(nodes.points.reshape(-1, 2), inducing).reshape(-1, 2, 3)
            psi1 = torch.einsum("sn,snm->nm", nodes.weights, cross)
        else:
            psi1 = psi_statistics(kernel, inputs, inducing).psi1
        gradients.append(torch.autograd.grad(psi1.sum(), leaves))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("make", [rbf, linear])
@pytest.mark.parametrize("per_datum", [False, True])
def test_gradients(make, per_datum):
    inputs, kernel = make_inputs(3, 2, prior_share=True), make(2)
    inducing = torch.randn(3, 2, dtype=DOUBLE)
    names = [name for name, _ in kernel.named_parameters()]
    values = [value.detach().clone().requires_grad_() for _, value in kernel.named_parameters()]
    leaves = [t.clone().requires_grad_() for t in (inputs.loc, inputs.variance, inputs.probability, inputs.prior_share, inducing)]

    def statistics(*tensors):
        *described, z = tensors[:5]
        held = dict(zip(names, tensors[5:], strict=True))
        positive = {name.removesuffix("_unconstrained"): value.exp() for name, value in held.items()}
        copy = type(kernel)(2, **positive)
        for name, value in positive.items():
            delattr(copy, name)
            setattr(copy, name, value)
        return tuple(psi_statistics(copy, SpikeSlabInputs(*described), z, per_datum=per_datum))

    assert torch.autograd.gradcheck(statistics, (*leaves, *values), atol=1e-7)


def random_factors(num_rows=13, num_dims=4, num_columns=70, num_sharp=0):
    rows = [torch.rand(num_rows, num_dims, dtype=DOUBLE) for _ in range(4)]
    rows[3][:, :num_sharp] = 0
    return (*rows, *(torch.rand(num_dims, num_columns, dtype=DOUBLE) for _ in range(3)))


@pytest.mark.parametrize("num_sharp", [0, 2, 4])
@pytest.mark.parametrize("summed", [False, True])
def test_compiled_and_dense_kernels_agree(num_sharp, summed):
    factors = random_factors(num_sharp=num_sharp)
    found, expected = (k.products(factors, num_sharp, summed) for k in (mixture_products_cpu, mixture_products_dense))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    weight = torch.randn_like(expected)
    a = mixture_products_cpu.gradients(factors, num_sharp, weight)
    with memory_budget(2**10):
        b = mixture_products_dense.gradients(factors, num_sharp, weight)
    for index, (x, y) in enumerate(zip(a, b, strict=True)):
        if index in (3, 6):  # constant parts of weight zero get no gradient from the compiled kernel
            x, y = (v[:, num_sharp:] if index == 3 else v[num_sharp:] for v in (x, y))
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("off", [[1], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("prior_share", [False, True])
@pytest.mark.parametrize("per_datum", [False, True])
def test_dimensions_that_are_off_are_left_out(off, prior_share, per_datum):
    torch.manual_seed(0)
    kernel, inducing = rbf(3), torch.randn(4, 3, dtype=DOUBLE, requires_grad=True)
    inputs = make_inputs(prior_share=prior_share)
    inputs.loc.requires_grad_()
    inputs.probability[off] = 0.0
    if prior_share:
        inputs.prior_share[off[0]] = 0.0
    leaves = (inputs.loc, inducing, *kernel.parameters())

    def found(probability):
        seen = SpikeSlabInputs(inputs.loc, inputs.variance, probability, inputs.prior_share)
        statistics = psi_statistics(kernel, seen, inducing, per_datum=per_datum)
        weighted = sum((value * torch.linspace(1, 2, value.numel(), dtype=DOUBLE).reshape(value.shape)).sum() for value in statistics)
        return [*statistics, *torch.autograd.grad(weighted, leaves)]

    # Switches to be differentiated by keep all dimensions.
    for short, full in zip(found(inputs.probability), found(inputs.probability.clone().requires_grad_()), strict=True):
        torch.testing.assert_close(short, full, rtol=1e-12, atol=1e-12)


def test_order_of_dimensions_does_not_matter():
    factors = list(random_factors())
    factors[3][:, [1, 3]] = 0
    order = torch.tensor([3, 0, 2, 1])
    shuffled = [f[:, order] if i < 4 else f[order] for i, f in enumerate(factors)]
    torch.testing.assert_close(mixture_products(*factors), mixture_products(*shuffled), rtol=1e-13, atol=1e-15)


def test_zero_factors_have_finite_gradients():
    factors = [f.requires_grad_() for f in random_factors(num_dims=3)]
    with torch.no_grad():
        factors[0][:, 1] = 0
        factors[6][1] = 0
    mixture_products(*factors, sum_rows=True).sum().backward()
    assert all(bool(f.grad.isfinite().all()) for f in factors)
    assert bool((factors[0].grad[:, 1] > 0).all())


def test_distant_inducing_points_underflow_to_nothing_and_nan_shows():
    inputs = SpikeSlabInputs(
        torch.zeros(2, 2, dtype=DOUBLE), torch.full((2, 2), 1e-6, dtype=DOUBLE), torch.tensor([1.0, 0.5], dtype=DOUBLE)
    )
    kernel = kernels.RBF(2, torch.tensor(1.0, dtype=DOUBLE), torch.full((2,), 1e-2, dtype=DOUBLE))
    found = psi_statistics(kernel, inputs, torch.full((2, 2), 1e3, dtype=DOUBLE))
    assert all(bool(v.isfinite().all()) for v in found)
    assert float(found.psi2.detach().abs().max()) < 1e-300
    inputs.loc[0, 0] = torch.nan
    assert bool(psi_statistics(kernel, inputs, torch.zeros(2, 2, dtype=DOUBLE)).psi2.isnan().all())


def test_single_precision():
    inputs, inducing = make_inputs(6, 3), torch.randn(4, 3, dtype=DOUBLE)
    kernel = rbf(3)
    single = SpikeSlabInputs(inputs.loc.float(), inputs.variance.float(), inputs.probability.float())
    small = kernels.RBF(3, kernel.variance.detach().float(), kernel.lengthscale.detach().float())
    found, expected = psi_statistics(small, single, inducing.float()), psi_statistics(kernel, inputs, inducing)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


def test_impossible_arguments_are_named():
    inputs = make_inputs(2, 2)
    with pytest.raises(ValueError, match=r"inducing inputs must have shape \(M, 2\); got \(3, 4\)"):
        psi_statistics(rbf(2), inputs, torch.randn(3, 4, dtype=DOUBLE))
    with pytest.raises(ValueError, match="probability must have shape"):
        SpikeSlabInputs(inputs.loc, inputs.variance, torch.rand(3, dtype=DOUBLE))
    with pytest.raises(ValueError, match="same shape"):
        SpikeSlabInputs(inputs.loc, inputs.variance[:1])
    with pytest.raises(ValueError, match="one weight per dimension"):
        LinearARD(2, torch.ones(3))
    with pytest.raises(ValueError, match=r"four factors \(N, Q\)"):
        mixture_products(*random_factors()[:4], *random_factors(num_columns=3)[4:5], *random_factors()[5:])
