"""learn on counts that have no upper end."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated import LearnConfig, Truncated_ELBO, learn

LARGEST = 25


def seen(y: Tensor) -> None:
    """Animals at a site, of which each visit sees some: repeated binomial counts of a Poisson number."""
    mean = pyro.param("mean", torch.tensor(2.0), constraint=dist.constraints.positive)
    chance = pyro.param("chance", torch.tensor(0.5), constraint=dist.constraints.unit_interval)
    with pyro.plate("sites", len(y)):
        n = pyro.sample("n", dist.Poisson(mean))
        pyro.sample("y", dist.Binomial(n.unsqueeze(-1), chance, validate_args=False).to_event(1), obs=y)


def log_evidence(y: Tensor, mean: float, chance: float) -> float:
    """Summed over all numbers up to the largest."""
    n = torch.arange(LARGEST + 1.0, dtype=y.dtype)
    scores = dist.Binomial(n[:, None, None], chance, validate_args=False).log_prob(y).masked_fill(y > n[:, None, None], -torch.inf)
    return float((scores.sum(-1) + dist.Poisson(mean).log_prob(n)[:, None]).logsumexp(0).sum())


@pytest.mark.slow
def test_counts_without_an_upper_end_are_learned_up_to_a_bound():
    generator = torch.Generator().manual_seed(0)
    number = torch.poisson(torch.full((80, 1), 5.0), generator=generator)
    y = torch.binomial(number.expand(80, 6).contiguous(), torch.full((80, 6), 0.6), generator=generator)
    with pytest.raises(ValueError, match=r"learn\(model, y, max_count=\{'n': 20\}\)"):
        learn(seen, y, progress=False)
    pyro.set_rng_seed(0)
    guide = learn(seen, y, max_count={"n": LARGEST}, restarts=1, config=LearnConfig(restart_steps=30), steps=30, progress=False)
    assert guide.space.size == LARGEST + 1  # all are in the populations of 64 states, so the free energy is exact
    mean, chance = (float(pyro.param(name).detach()) for name in ("mean", "chance"))
    assert -Truncated_ELBO().loss(seen, guide, y) == pytest.approx(log_evidence(y, mean, chance), rel=1e-5)
    assert log_evidence(y, mean, chance) > log_evidence(y, 5.0, 0.6) - 1.0
