"""
AutoDiscreteParallel
====================

Pyro's own autoguide for discrete sites: a probability for each value of each site, all sites independent, trained by gradients.
"""

# %%
# A model in which causes explain each other away, as a factorised guide cannot say. Two columns of the dictionary are nearly the same, so
# that one *or* the other made an image.

import time

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDiscreteParallel

from pyro_truncated import AutoTruncated, Truncated_ELBO

pyro.set_rng_seed(0)
H, N, D = 6, 60, 10
weight = 1.5 * torch.randn(D, H)
weight[:, 1] = weight[:, 0] + 0.1 * torch.randn(D)
weight[:, 3] = weight[:, 2] + 0.1 * torch.randn(D)
y = (torch.rand(N, H) < 0.3).float() @ weight.mT + torch.randn(N, D)


def by_sites(y):
    with pyro.plate("data", len(y), dim=-1):
        mean = sum(
            pyro.sample(f"s_{h}", dist.Bernoulli(torch.tensor(0.3))).unsqueeze(-1)
            * weight[:, h]
            for h in range(H)
        )
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)


def by_vector(y):
    with pyro.plate("data", len(y), dim=-1):
        s = pyro.sample("s", dist.Bernoulli(torch.full((H,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, 1.0).to_event(1), obs=y)


elbo = TraceEnum_ELBO(max_plate_nesting=1)
exact = -elbo.loss(config_enumerate(by_sites), lambda y: None, y)
print(f"log evidence, by enumeration:        {exact:9.3f}")

# %%
# Every site is enumerated for the exact expectation, so a step costs :math:`2^H` here as well.

start = time.perf_counter()
guide = AutoDiscreteParallel(by_sites)
svi = SVI(by_sites, guide, pyro.optim.Adam({"lr": 0.1}), elbo)
for _ in range(200):
    svi.step(y)
factorised = -svi.evaluate_loss(y)
print(
    f"AutoDiscreteParallel, 200 steps:     {factorised:9.3f}   {time.perf_counter() - start:5.1f} s"
)

# %%
# The truncated posterior is joint: with four, eight and sixteen of the 64 states. There is nothing to train here, only to search.

for size in (4, 8, 16):
    start = time.perf_counter()
    truncated = AutoTruncated(by_vector, num_states=size).infer(
        y, Truncated_ELBO().search, steps=10
    )
    bound = -Truncated_ELBO().loss(by_vector, truncated, y)
    print(
        f"AutoTruncated, {size:2} of {2**H} states:      {bound:9.3f}   {time.perf_counter() - start:5.1f} s"
    )

# %%
# In favour of ``AutoDiscreteParallel``: it holds no states, and its parameters are the probabilities of single sites. It does not take
# subsampled plates.
#
# In favour of the truncated posterior: the dependence between latents is kept, and the cost of a step is the number of states held,
# whatever the number of latents.
