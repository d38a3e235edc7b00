"""Leave-one-out under an approximate posterior, from the log densities of the draws under the joint and under the guide."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoGuideList
from torch import Tensor

from pyro_truncated import AutoTruncated
from pyro_truncated.diagnostics import to_arviz
from pyro_truncated.utils.arviz_compat import ARVIZ_V1, get_dataset, pareto_smooth

RATE, NUM_DATA = 0.4, 20


def model(y: Tensor) -> None:
    shift = pyro.sample("shift", dist.Normal(torch.tensor(0.0), 3.0))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.tensor(RATE)))
        pyro.sample("y", dist.Normal(shift + 2 * s, 1.0), obs=y)


def wrong(y: Tensor) -> None:
    """A posterior of the shift that lies a standard deviation too high and is half as wide again."""
    pyro.sample("shift", dist.Normal(torch.tensor(0.4), 0.4))


@pytest.fixture(scope="module")
def y() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NUM_DATA, generator=generator) + 2 * (torch.rand(NUM_DATA, generator=generator) < RATE)


@pytest.fixture(scope="module")
def idata(y: Tensor) -> Any:
    guide = AutoGuideList(model)
    guide.append(wrong)
    guide.append(AutoTruncated(model, num_states=2))
    guide(y)
    return to_arviz(model, guide, y, num_samples=250, num_predictive=0, seed=0)


def exact(y: Tensor) -> tuple[float, float]:
    """Log evidence and leave-one-out by quadrature over the shift."""
    grid = torch.linspace(-5, 5, 4001, dtype=torch.float64)
    rates = torch.tensor([1 - RATE, RATE], dtype=torch.float64).log()[:, None, None]
    locs = torch.stack([grid, grid + 2])[:, None]
    likelihood = (rates + dist.Normal(locs, 1.0).log_prob(y.double()[:, None])).logsumexp(0)
    joint = dist.Normal(0.0, 3.0).log_prob(grid) + likelihood.sum(0)
    left_out = (joint - likelihood).logsumexp(1)
    return float(joint.logsumexp(0)) + math.log(grid[1] - grid[0]), float((joint.logsumexp(0) - left_out).sum())


def leave_one_out(idata: Any, log_weight: np.ndarray) -> float:
    """Draws weighted by the posterior without a data point over what they were drawn from."""
    likelihood = get_dataset(idata, "log_likelihood")["y"].values.reshape(-1, NUM_DATA).T
    weights = pareto_smooth(log_weight.reshape(1, -1) - likelihood)[0]
    return float(np.logaddexp.reduce(weights + likelihood, axis=1).sum())


@pytest.mark.nightly
def test_log_densities_weight_the_draws_to_the_evidence(idata: Any, y: Tensor) -> None:
    """Fails by chance once in 150 000 runs of other seeds: 4.5 standard errors of a mean."""
    evidence, _ = exact(y)
    stats = get_dataset(idata, "sample_stats")
    weight = np.exp((stats["lp"] - stats["log_q"]).values.ravel() - evidence)
    assert abs(weight.mean() - 1) < 4.5 * weight.std() / math.sqrt(weight.size)


@pytest.mark.nightly
def test_log_densities_correct_leave_one_out_for_the_guide(idata: Any, y: Tensor) -> None:
    """The estimate's standard deviation is 0.037 over 200 seeds: five of them, and what no correction makes wrong by 1.0."""
    _, elpd = exact(y)
    stats = get_dataset(idata, "sample_stats")
    log_weight = (stats["lp"] - stats["log_q"]).values
    assert abs(leave_one_out(idata, log_weight) - elpd) < 0.19
    assert abs(leave_one_out(idata, 0 * log_weight) - elpd) > 0.8


@pytest.mark.skipif(not ARVIZ_V1, reason="ArviZ 1.x has loo_approximate_posterior")
def test_arviz_takes_the_log_densities(idata: Any, y: Tensor) -> None:
    """With the same false alarms as above."""
    from arviz_stats import loo_approximate_posterior

    stats = idata["sample_stats"]
    result = loo_approximate_posterior(idata, log_p=stats["lp"], log_q=stats["log_q"], var_name="y")
    assert abs(result.elpd - exact(y)[1]) < 0.19
