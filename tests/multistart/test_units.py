"""learn finds the same in any unit of the data, and wherever their origin is."""

from __future__ import annotations

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.ops.indexing import Vindex
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import LearnConfig, Truncated_ELBO, learn

CENTRES = torch.tensor([-6.0, 0.0, 6.0])


def mixture(y: Tensor) -> None:
    loc = pyro.param("loc", lambda: torch.randn(3))
    scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.ones(3) / 3))
        pyro.sample("y", dist.Normal(loc[z], scale), obs=y)


def pair(y: Tensor) -> None:
    """Two observations in units of their own."""
    loc, other = pyro.param("loc", lambda: torch.randn(3)), pyro.param("other", lambda: torch.randn(3))
    scales = [pyro.param(name, torch.tensor(1.0), constraint=constraints.positive) for name in ("scale", "other scale")]
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.ones(3) / 3))
        pyro.sample("y", dist.Normal(loc[z], scales[0]), obs=y[:, 0])
        pyro.sample("x", dist.Normal(other[z], scales[1]), obs=y[:, 1])


def factors(y: Tensor) -> None:
    weight, offset = pyro.param("weight", lambda: torch.randn(10, 3)), pyro.param("offset", lambda: torch.zeros(10))
    noise = pyro.param("noise", torch.tensor(1.0), constraint=constraints.positive)
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(offset + s @ weight.mT, noise).to_event(1), obs=y)


def clusters(y: Tensor) -> None:
    """A prior far wider than the data."""
    with pyro.plate("components", 3):
        loc = pyro.sample("loc", dist.Normal(0.0, 1000.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 2.0))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.ones(3) / 3))
        pyro.sample("y", dist.Normal(Vindex(loc)[..., z], scale), obs=y)


def drawn_clusters() -> Tensor:
    return torch.cat([centre + torch.randn(50) for centre in CENTRES])


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("unit", "origin"), [(1e-3, 0.0), (1.0, 0.0), (1e3, 0.0), (1.0, 1e4), (1.0, -30.0)])
def test_means_of_a_mixture_are_found_in_any_unit(unit: float, origin: float, seed: int) -> None:
    pyro.set_rng_seed(seed)
    learn(mixture, unit * drawn_clusters() + origin, restarts=2, progress=False)
    loc, scale = (pyro.param(name).detach() for name in ("loc", "scale"))
    torch.testing.assert_close((loc.sort().values - origin) / unit, CENTRES, rtol=0.0, atol=0.5)
    assert float(scale) / unit == pytest.approx(1.0, abs=0.2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_truncated.multistart.DisagreeingStartsWarning")
@pytest.mark.parametrize("unit", [1e-3, 1e3])
def test_observations_may_have_unlike_units(unit: float) -> None:
    pyro.set_rng_seed(0)
    y = torch.stack([drawn_clusters(), unit * drawn_clusters().roll(50)], 1)
    learn(pair, y, restarts=2, progress=False)
    for name, size in (("loc", 1.0), ("other", unit)):
        torch.testing.assert_close(pyro.param(name).detach().sort().values / size, CENTRES, rtol=0.0, atol=0.5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_truncated.multistart.DisagreeingStartsWarning")
def test_factors_explain_data_equally_well_in_any_unit() -> None:
    pyro.set_rng_seed(0)
    data = torch.bernoulli(torch.full((200, 3), 0.3)) @ (2 * torch.randn(3, 10)) + torch.randn(10) + 0.7 * torch.randn(200, 10)
    reached = []
    for unit, origin in ((1.0, 0.0), (1e-3, 10.0), (1e3, -3e4)):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        y = unit * data + origin
        guide = learn(factors, y, restarts=2, progress=False)
        reached.append(-Truncated_ELBO().loss(factors, guide, y) / len(y) + 10 * math.log(unit))
    assert reached == pytest.approx(reached[:1] * 3, abs=0.05)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_start_drawn_from_a_wide_prior_finds_the_data() -> None:
    pyro.set_rng_seed(0)
    y = drawn_clusters()
    guide = learn(clusters, y, progress=False)
    torch.testing.assert_close(guide[0].median(y)["loc"].detach().sort().values, CENTRES, rtol=0.0, atol=0.5)


@pytest.mark.parametrize(("ratio", "number"), [(1.0, 0), (1000.0, 1)])
def test_columns_of_unlike_units_are_named(ratio: float, number: int) -> None:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    units = torch.logspace(0, math.log10(ratio), 10)
    y = units * ((torch.rand(60, 3) < 0.3).float() @ torch.randn(3, 10) + 0.1 * torch.randn(60, 10))
    with warnings.catch_warnings(record=True, action="always") as caught:
        learn(factors, y, steps=5, restarts=1, config=LearnConfig(restart_steps=5), progress=False)
    named = [warning for warning in caught if "columns of the data extend unlike: column 0 " in str(warning.message)]
    assert len(named) == number
    assert not number or {warning.filename for warning in named} == {__file__}


def test_a_parameter_of_no_use_keeps_its_own_size() -> None:
    """Errors of a program at values that nobody asked for are none of the user's."""

    def covariances(y: Tensor) -> None:
        covariance = pyro.param("covariance", torch.eye(2))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.5)))
            pyro.sample("y", dist.MultivariateNormal(z.unsqueeze(-1) * torch.ones(2), covariance), obs=y)

    before = torch.eye(2)
    learn(covariances, torch.randn(20, 2), restarts=1, steps=1, config=LearnConfig(restart_steps=2), progress=False)
    assert not torch.equal(pyro.param("covariance").detach(), before)
