"""Discrete sites outside all plates: a change point, a model indicator, a global class beside plated ones, against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer import SVI, Predictive, TraceEnum_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGaussian,
    AutoGuideList,
    AutoIAFNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoStructured,
)
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO, to_arviz

TIMES = 6
Y = torch.linspace(-1.0, 2.0, TIMES, dtype=torch.float64)


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def rate() -> Tensor:
    return pyro.param("rate", lambda: torch.tensor(0.3), constraint=constraints.unit_interval)


def change_point(y):
    """One switch time for the whole series."""
    level = pyro.param("level", lambda: torch.tensor([0.2, 1.1]))
    tau = pyro.sample("tau", dist.Categorical(torch.ones(TIMES) / TIMES))
    with pyro.plate("times", TIMES):
        before = torch.arange(TIMES) < tau
        pyro.sample("y", dist.Normal(torch.where(before, level[0], level[1]), 0.7), obs=y)


def several(y):
    """A model indicator and a count, on which everything depends."""
    m = pyro.sample("m", dist.Bernoulli(rate()))
    k = pyro.sample("k", dist.Binomial(3, rate()))
    with pyro.plate("data", TIMES):
        pyro.sample("y", dist.Normal(m - 0.5 * k, 1.0), obs=y)


def beside_plated(y):
    """A global class beside one class of each data point."""
    m = pyro.sample("m", dist.Categorical(torch.stack([rate(), 1 - rate()])))
    with pyro.plate("data", TIMES):
        z = pyro.sample("z", dist.Bernoulli(rate()))
        pyro.sample("y", dist.Normal(m + 2 * z, 1.0), obs=y)


BITS = [torch.tensor(bits, dtype=torch.float64) for bits in itertools.product((0.0, 1.0), repeat=TIMES)]
CASES: tuple[tuple[Callable, dict[str, list[Tensor]]], ...] = (
    (change_point, {"tau": list(torch.arange(TIMES))}),
    (several, {"m": list(torch.arange(2.0, dtype=torch.float64)), "k": list(torch.arange(4.0, dtype=torch.float64))}),
    (beside_plated, {"m": list(torch.arange(2)), "z": BITS}),
)
cases = pytest.mark.parametrize(("model", "sites"), CASES, ids=lambda value: getattr(value, "__name__", ""))


def table(model: Callable, sites: dict[str, list[Tensor]]) -> Tensor:
    """Log joint of every state by plain runs of the model."""
    rows = []
    for values in itertools.product(*sites.values()):
        conditioned = poutine.condition(model, data=dict(zip(sites, values, strict=True)))
        rows.append(poutine.trace(conditioned).get_trace(Y).log_prob_sum())
    return torch.stack(rows)


def evaluated(elbo, model, guide) -> tuple[float, dict[str, Tensor]]:
    loss = elbo.loss_and_grads(model, guide, Y)
    gradients = {}
    for name, value in pyro.get_param_store().named_parameters():
        gradients[name], value.grad = value.grad.clone(), None
    return loss, gradients


@pytest.mark.slow
@cases
def test_loss_gradients_and_marginals_equal_brute_force(model, sites):
    joint = table(model, sites)
    (-joint.logsumexp(0)).backward()
    parameters = pyro.get_param_store()._params
    exact = {name: value.grad.clone() for name, value in parameters.items()}
    for value in parameters.values():
        value.grad = None
    guide = AutoTruncated(model, len(joint))
    for elbo in (Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1), TraceEnum_ELBO(max_plate_nesting=1)):
        loss, gradients = evaluated(elbo, model, guide)
        assert loss == pytest.approx(-joint.logsumexp(0).item(), rel=1e-12)
        for name, value in exact.items():
            torch.testing.assert_close(gradients[name], value, rtol=1e-11, atol=1e-12)
    probability = joint.detach().softmax(0).reshape([len(values) for values in sites.values()])
    for position, (name, found) in enumerate(guide.marginals().items()):
        own = probability.movedim(position, 0).flatten(1).sum(1) if len(sites) > 1 else probability
        if guide.layout.sites[name].kind == "boolean":
            own = torch.einsum("v,v...->...", own, torch.stack(sites[name]))
        torch.testing.assert_close(found.squeeze(0), own.reshape(found.shape[1:]), rtol=1e-11, atol=1e-12)


@pytest.mark.nightly
@cases
def test_calls_predictive_draws_and_arviz_work(model, sites):
    guide = AutoTruncated(model, len(table(model, sites)))
    SVI(model, guide, Adam({"lr": 0.01}), Truncated_ELBO(ExhaustiveSearch())).step(Y)
    plain = poutine.trace(model).get_trace(Y)
    for name, value in guide(Y).items():
        assert value.shape == plain.nodes[name]["value"].shape
    for parallel in (False, True):
        draws = Predictive(model, guide=guide, num_samples=7, parallel=parallel)(Y)
        assert all(draws[name].shape[0] == 7 for name in sites)
    posterior = to_arviz(model, guide, Y).posterior
    assert set(sites) <= set(posterior)


def indicator(y):
    """A model indicator beside continuous latents."""
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.3))
    m = pyro.sample("m", dist.Bernoulli(torch.tensor(0.3)))
    with pyro.plate("data", TIMES):
        pyro.sample("y", dist.Normal(loc + m * shift, scale), obs=y)


def indicator_guide(part: type) -> AutoGuideList:
    guide = AutoGuideList(indicator)
    guide.append(part(poutine.block(indicator, hide=["m"])))
    guide.append(AutoTruncated(indicator, 2))
    return guide


@pytest.mark.parametrize(
    "part",
    [
        AutoDelta,
        AutoNormal,
        AutoDiagonalNormal,
        AutoMultivariateNormal,
        AutoLowRankMultivariateNormal,
        AutoIAFNormal,
        AutoLaplaceApproximation,
        AutoStructured,
        AutoGaussian,
    ],
)
def test_every_autoguide_beside_a_scalar_site(part):
    guide = indicator_guide(part)
    elbo = Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1)
    SVI(indicator, guide, Adam({"lr": 0.01}), elbo).step(Y)
    losses = []
    for candidate in (elbo, TraceEnum_ELBO(max_plate_nesting=1)):
        pyro.set_rng_seed(1)
        losses.append(candidate.loss(indicator, guide, Y))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    TraceEnum_ELBO(max_plate_nesting=1, num_particles=3, vectorize_particles=True).loss(indicator, guide, Y)
    for parallel in (False, True):
        assert Predictive(indicator, guide=guide, num_samples=5, parallel=parallel)(Y)["m"].shape[0] == 5


def exact_index_logits(locs: Tensor, shifts: Tensor, scales: Tensor) -> Tensor:
    m = torch.tensor([0.0, 1.0])
    loc = locs.unsqueeze(-1) + m * shifts.unsqueeze(-1)
    joint = dist.Normal(loc.unsqueeze(-1), scales[:, None, None]).log_prob(Y).sum(-1) + torch.tensor([0.7, 0.3]).log()
    return joint.log_softmax(-1)


def test_parallel_draws_are_weighted_each_under_its_own_other_latents():
    guide = indicator_guide(AutoNormal)
    guide(Y)
    # Predictive opens its plate at the left-most dimension of the guide, which has fewer plates than the model.
    with poutine.trace() as recorder, pyro.plate("draws", 5, dim=-1):
        guide(Y)
    nodes = recorder.trace.nodes
    logits = nodes["m_index"]["fn"].logits
    values = guide[1].states()["m"].squeeze(0).long()
    expected = exact_index_logits(*(nodes[name]["value"] for name in ("loc", "shift", "scale")))
    torch.testing.assert_close(logits, expected[:, values], rtol=1e-12, atol=1e-12)


def test_vectorised_particles_of_a_point_estimate_equal_one_particle_where_plates_are_nested():
    words = torch.randint(4, (3, 5))

    def model():
        table = pyro.sample("table", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with pyro.plate("documents", 5, dim=-1):
            z = pyro.sample("z", dist.Bernoulli(0.4))
            with pyro.plate("words", 3, dim=-2):
                pyro.sample("w", dist.Poisson((table[..., 0] + z * table[..., 1]).exp()), obs=words.double())

    guide = AutoGuideList(model)
    guide.append(AutoDelta(poutine.block(model, hide=["z"])))
    guide.append(AutoTruncated(model, 2))
    one = TraceEnum_ELBO(max_plate_nesting=2).loss(model, guide)
    assert TraceEnum_ELBO(max_plate_nesting=2, num_particles=4, vectorize_particles=True).loss(model, guide) == pytest.approx(
        one, rel=1e-12
    )
