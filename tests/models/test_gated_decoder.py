"""Switched Gaussian process decoders: the gated kernel, the free energy against enumeration, recovery of parts."""

from __future__ import annotations

import itertools
import math

import pyro
import pytest
import torch
from pyro.contrib.gp import kernels
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoGuideList
from pyro.infer.autoguide.initialization import init_to_value
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.distributions import GivenActiveSet
from pyro_truncated.models import GatedDecoder
from pyro_truncated.models.gated_decoder import GatedKernel


def bumps(switches, poses, width=12):
    """Signals of 3 x ``width`` pixels: part h is a bump in row h whose place is its pose."""
    places = torch.linspace(-2.5, 2.5, width)
    rows = switches.unsqueeze(-1) * (-(places - poses).square() / 0.5).exp()
    return rows.flatten(-2)


def data(num, generator, noise=0.1):
    switches = torch.bernoulli(torch.full((num, 3), 0.5), generator=generator)
    poses = torch.randn(num, 3, 1, generator=generator)
    x = bumps(switches, poses)
    return x + noise * torch.randn(x.shape, generator=generator), switches, poses


def test_kernel_is_the_sum_over_shared_parts(generator):
    part = kernels.RBF(2, torch.tensor(1.3), torch.tensor([0.5, 2.0]))
    kernel = GatedKernel([part, kernels.Matern32(2)], 2)
    b, z = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]), torch.randn(4, 2, 2, generator=generator)
    X = GatedDecoder.inputs(b, z)
    expected = torch.zeros(4, 4)
    for n, m in itertools.product(range(4), repeat=2):
        for h, k in enumerate((part, kernel.part1)):
            pyro.clear_param_store()
            expected[n, m] += b[n, h] * b[m, h] * k(z[n : n + 1, h], z[m : m + 1, h]).detach().squeeze()
    pyro.clear_param_store()
    torch.testing.assert_close(kernel(X).detach(), expected)
    torch.testing.assert_close(kernel(X, diag=True).detach(), expected.diagonal(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_reconstructions_are_posterior_means_over_switches_and_poses(generator):
    """One part, its pose by quadrature; draws from a network that knows nothing yet are off by less than 0.003 (one deviation)."""
    x, switches, poses = (part.double() for part in data(14, generator, noise=0.3))
    model = GatedDecoder(x[:10, :12], switches[:10, :1], poses[:10, :1]).double()
    model.noise = torch.tensor(0.4, dtype=torch.float64)
    new = x[10:, :12].clone()
    new[0, :4] = torch.nan
    population = AutoTruncated(model, num_states=2, conditional=model.pose_guide).infer(new, ExhaustiveSearch(), 1).population()
    grid, expected = torch.linspace(-6, 6, 1201, dtype=torch.float64), torch.zeros_like(new)
    for state, weight in zip(population.states(torch.float64).unbind(1), population.weights().unbind(1), strict=True):
        rows = model.inputs(state.expand(1201, *state.shape), grid[:, None, None, None].expand(-1, len(new), 1, 1))
        image = GivenActiveSet(model.active_set(), rows)
        density = (image.log_prob(new) - 0.5 * grid.unsqueeze(-1).square()).softmax(0).unsqueeze(-1)
        expected += weight.unsqueeze(-1) * (density * image.mean).sum(0).detach()
    torch.testing.assert_close(model.reconstruct(population, new, num_draws=2000), expected, rtol=0, atol=0.015)


@pytest.mark.slow
def test_free_energy_is_the_enumerated_evidence_given_the_active_set(generator):
    """All eight states, poses fixed: joint densities of the active set and each image by dense normals."""
    x, switches, poses = (part.double() for part in data(14, generator))
    model = GatedDecoder(x[:10], switches[:10], poses[:10]).double()
    new, z = x[10:], poses[10:]
    guide = AutoGuideList(model)
    guide.append(AutoDelta(pyro.poutine.block(model, hide=["b"]), init_loc_fn=init_to_value(values={"z": z})))
    guide.append(AutoTruncated(model, num_states=8))
    loss = Truncated_ELBO(ExhaustiveSearch()).loss(model, guide, new)

    def evidence(x, X):
        with torch.no_grad():
            C = model.kernel(X) + model.noise * torch.eye(len(X), dtype=torch.float64)
            return torch.distributions.MultivariateNormal(torch.zeros(len(X), dtype=C.dtype), C).log_prob(x.mT).sum()

    base = evidence(x[:10], model.active_inputs)
    expected = base + torch.distributions.Normal(0.0, 1.0).log_prob(z).sum()
    for n in range(4):
        terms = []
        for state in itertools.product([0.0, 1.0], repeat=3):
            row = GatedDecoder.inputs(torch.tensor([state], dtype=torch.float64), z[n : n + 1])
            joint = evidence(torch.cat([x[:10], new[n : n + 1]]), torch.cat([model.active_inputs, row]))
            terms.append(joint - base + 3 * math.log(0.5))
        expected = expected + torch.stack(terms).logsumexp(0)
    assert loss == pytest.approx(-float(expected), abs=1e-4)


@pytest.mark.nightly
def test_parts_of_new_signals_are_found(generator):
    """Which of three parts are there: at least 95 % of 120 switches right; guessing gives one half."""
    x, switches, poses = data(100, generator)
    model = GatedDecoder(x[:60], switches[:60], poses[:60])
    first = model.dream(1)[0]
    assert model.dream(300)[-1] < first
    guide = AutoTruncated(model, num_states=8, conditional=model.pose_guide)
    svi = SVI(model, guide, Adam({"lr": 0.005}), Truncated_ELBO(ExhaustiveSearch()))
    losses = [svi.step(x[60:]) for _ in range(40)]
    assert sum(losses[-10:]) < sum(losses[:10])
    found = guide.marginals()["b"].round()
    assert float((found == switches[60:]).float().mean()) >= 0.95
    alone = model.parts(switches[60:], poses[60:])
    assert alone.shape == (40, 3, 36)
    with torch.no_grad():
        whole, _ = model.active_set().predict(GatedDecoder.inputs(switches[60:], poses[60:]))
    torch.testing.assert_close(alone.sum(1), whole, rtol=1e-3, atol=1e-3)


def test_shapes_must_fit():
    with pytest.raises(ValueError, match="must fit"):
        GatedDecoder(torch.zeros(4, 5), torch.zeros(4, 2), torch.zeros(4, 3, 1))
    with pytest.raises(ValueError, match="zeros and ones"):
        GatedDecoder(torch.rand(4, 5), torch.full((4, 2), 0.3), torch.zeros(4, 2, 1))


@pytest.mark.parametrize("name", ["outputs", "switches", "poses"])
@pytest.mark.parametrize("is_array", [False, True])
def test_complex_examples_are_refused_by_name(name, is_array):
    examples = {"outputs": torch.rand(4, 5), "switches": torch.ones(4, 2), "poses": torch.zeros(4, 2, 1)}
    examples[name] = examples[name].to(torch.complex64)
    if is_array:
        examples = {name: values.numpy() for name, values in examples.items()}
    with pytest.raises(TypeError, match=f"^{name} must hold real numbers; got .*complex64$"):
        GatedDecoder(**examples)
