"""Communities: latents that depend on each other so densely that single changes of a good state are all worse."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, Truncated_ELBO, check_truncation
from pyro_truncated.search import ConditionalSearch

EDGES = torch.tensor([[0.7, 0.1, 0.1], [0.1, 0.6, 0.1], [0.1, 0.1, 0.8]])
SIZE = 24
PAIRS = torch.triu_indices(SIZE, SIZE, 1)


def communities(edges: Tensor) -> None:
    """A stochastic block model."""
    with pyro.plate("members", SIZE):
        z = pyro.sample("z", dist.Categorical(torch.full((3,), 1 / 3)))
    with pyro.plate("pairs", len(edges)):
        pyro.sample("edges", dist.Bernoulli(EDGES[z[..., PAIRS[0]], z[..., PAIRS[1]]]), obs=edges)


def draw(seed: int) -> tuple[Tensor, float]:
    """Edges, and the log joint of the communities that they were drawn from."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randint(3, (SIZE,), generator=generator)
    probs = EDGES[z[PAIRS[0]], z[PAIRS[1]]]
    edges = (torch.rand(probs.shape, generator=generator) < probs).to(probs)
    return edges, float(dist.Bernoulli(probs).log_prob(edges).sum() - SIZE * torch.tensor(3.0).log())


@pytest.mark.parametrize("seed", [1, 2])
def test_communities_are_at_least_as_probable_as_the_true_ones(seed: int) -> None:
    """For both seeds conditional searches end lower, by five and by four nats."""
    edges, expected = draw(seed)
    pyro.set_rng_seed(seed)
    guide, elbo = AutoTruncated(communities), Truncated_ELBO()
    losses = [float(elbo.loss_and_grads(communities, guide, edges)) for _ in range(10)]
    assert -losses[-1] > expected


def test_a_search_that_is_stuck_is_noticed() -> None:
    edges, expected = draw(1)
    pyro.set_rng_seed(1)
    guide, elbo = AutoTruncated(communities), Truncated_ELBO(ConditionalSearch())
    losses = [float(elbo.loss_and_grads(communities, guide, edges)) for _ in range(60)]
    assert -losses[-1] < expected - 4
    assert "the search has not converged" in str(check_truncation(guide, edges, warn=False))
