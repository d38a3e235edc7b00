"""learn of models with priors: it ends no lower than one plain run of Pyro's SVI, or warns."""

from __future__ import annotations

import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from torch import Tensor

from pyro_truncated import AutoTruncated, LearnConfig, Truncated_ELBO, learn
from pyro_truncated.multistart import ConvergenceWarning, DisagreeingStartsWarning, LearnReport


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sticks(y: Tensor) -> None:
    """A mixture of five stick-breaking components of one number."""
    v = pyro.sample("v", dist.Beta(1.0, 1.0).expand([4]).to_event(1))
    one = torch.ones_like(v[..., :1])
    weight = torch.cat([v, one], -1) * torch.cat([one, (1 - v).cumprod(-1)], -1)
    loc = pyro.sample("loc", dist.Normal(0.0, 5.0).expand([5]).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(-1.0, 0.7).expand([5]).to_event(1))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(weight))
        pyro.sample("y", dist.Normal(loc[z], scale[z]), obs=y)


def shares(y: Tensor) -> None:
    """A mixture of four components with a Dirichlet prior on weights and Gamma priors on scales."""
    weight = pyro.sample("weight", dist.Dirichlet(torch.full((4,), 0.5)))
    loc = pyro.sample("loc", dist.Normal(0.0, 5.0).expand([4]).to_event(1))
    scale = pyro.sample("scale", dist.Gamma(2.0, 3.0).expand([4]).to_event(1))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(weight))
        pyro.sample("y", dist.Normal(loc[z], scale[z]), obs=y)


def factors(y: Tensor) -> None:
    """Three binary factors, one continuous one, and noise with a half-Cauchy prior."""
    noise = pyro.sample("noise", dist.HalfCauchy(1.0))
    weight = pyro.sample("weight", dist.Normal(0.0, 2.0).expand([3, 6]).to_event(2))
    load = pyro.sample("load", dist.Normal(0.0, 1.0).expand([6]).to_event(1))
    with pyro.plate("data", len(y)):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight + x.unsqueeze(-1) * load, noise).to_event(1), obs=y)


def buffet(y: Tensor) -> None:
    """A truncated Indian buffet of ten latents with 36 weights each."""
    share = pyro.sample("v", dist.Beta(2.0, 1.0).expand([10]).to_event(1))
    weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([10, 36]).to_event(2))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Bernoulli(share.cumprod(-1)).to_event(1))
        pyro.sample("y", dist.Normal(z @ weight, noise).to_event(1), obs=y)


def pictures() -> Tensor:
    """Four pictures in a corner each of 6 x 6 pixels, each in half of the images."""
    basis, draws = torch.zeros(4, 6, 6), generator()
    basis[0, :3, :3] = torch.tensor([[0, 1, 0], [1, 1, 1], [0, 1, 0]])
    basis[1, :3, 3:] = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1]])
    basis[2, 3:, :3] = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    basis[3, 3:, 3:] = torch.tensor([[1, 1, 1], [0, 1, 0], [0, 1, 0]])
    return torch.bernoulli(torch.full((100, 4), 0.5), generator=draws) @ basis.flatten(1) + 0.5 * torch.randn(100, 36, generator=draws)


def clusters() -> Tensor:
    return torch.cat(
        [centre + spread * torch.randn(20, generator=generator(k)) for k, (centre, spread) in enumerate([(-6, 0.3), (0, 0.6), (2, 0.2)])]
    )


def rows() -> Tensor:
    switches = (torch.rand(60, 3, generator=generator(1)) < 0.3).float()
    weight, load = 2 * torch.randn(3, 6, generator=generator(2)), torch.randn(6, generator=generator(3))
    return switches @ weight + torch.randn(60, 1, generator=generator(4)) * load + 0.4 * torch.randn(60, 6, generator=generator(5))


def bound(model: Any, guide: Any, y: Tensor) -> tuple[float, float]:
    """The free energy and its standard error, over fifty draws."""
    values = torch.tensor([-Truncated_ELBO().loss(model, guide, y) for _ in range(50)])
    return float(values.mean()), float(values.std()) / 50**0.5


def plain(model: Any, y: Tensor, discrete: str) -> Any:
    guide = AutoGuideList(model)
    guide.append(AutoNormal(poutine.block(model, hide=[discrete]), init_scale=0.01))
    guide.append(AutoTruncated(model))
    svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.03, "lrd": 0.998}), Truncated_ELBO())
    for _ in range(1000):
        svi.step(y)
    return guide


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "make", "discrete"), [(sticks, clusters, "z"), (shares, clusters, "z"), (factors, rows, "s"), (buffet, pictures, "z")]
)
def test_learn_ends_no_lower_than_a_plain_run_or_warns(model, make, discrete):
    """By at most the tolerance, 0.5 nats or 0.01 for each data point, and three standard errors of both bounds."""
    y = make()
    pyro.set_rng_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learned, error = bound(model, learn(model, y, progress=False), y)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    reference, other = bound(model, plain(model, y, discrete), y)
    has_warned = any(issubclass(warning.category, (ConvergenceWarning, DisagreeingStartsWarning)) for warning in caught)
    assert has_warned or learned > reference - max(0.5, 0.01 * len(y)) - 3 * (error**2 + other**2) ** 0.5


@pytest.mark.nightly
@pytest.mark.filterwarnings(
    "ignore::pyro_truncated.multistart.ConvergenceWarning", "ignore::pyro_truncated.multistart.DisagreeingStartsWarning"
)
def test_short_runs_end_no_lower_than_their_restarts():
    """Values are exchanged between restarts, and what is kept is the best; three standard errors of the bound, mean of four runs."""
    margins = []
    for seed in range(4):
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        y = clusters()[::3]
        guide = learn(shares, y, restarts=2, config=LearnConfig(restart_steps=10), steps=10, progress=False)
        found, error = bound(shares, guide, y)
        margins.append(found - len(y) * max(guide.starts) + 3 * error + 0.5)
        assert guide.learn_report.moves["use of redundant latents"][0] > 0
    assert sum(margins) > 0


@pytest.mark.slow
def test_a_run_that_is_cut_off_warns_and_says_what_to_do():
    with pytest.warns(ConvergenceWarning, match="training has not converged in 6 steps.*Try more steps") as told:
        guide = learn(sticks, clusters(), restarts=1, config=LearnConfig(restart_steps=4), steps=6, progress=False)
    assert told[0].filename == __file__
    report = guide.learn_report
    assert isinstance(report, LearnReport)
    assert (report.steps, report.reason, report.disagreement, report.optimizer) == (
        6,
        "the maximum number of restarts is reached",
        None,
        "gradients",
    )
    assert len(report.restarts) == 1
    assert report.restarts[0].free_energy == guide.starts[0]
    assert 4 <= report.restarts[0].steps <= 16 * 4
    assert "end of restarts: the maximum number of restarts is reached" in str(report)
