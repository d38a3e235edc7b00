"""
Tensor Monte Carlo
==================

``TraceTMC_ELBO`` draws a few values for each site and sums over all combinations of them: an importance-weighted bound.
"""

# %%
# Six binary causes of every data point; the exact log evidence is known.

import time

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import TraceEnum_ELBO, TraceTMC_ELBO, config_enumerate

from pyro_truncated import AutoTruncated, Truncated_ELBO

pyro.set_rng_seed(0)
H, N, D = 6, 20, 10
weight = torch.randn(D, H)
y = (torch.rand(N, H) < 0.3).float() @ weight.mT + 0.5 * torch.randn(N, D)


def by_sites(y):
    with pyro.plate("data", len(y), dim=-1):
        mean = sum(
            pyro.sample(f"s_{h}", dist.Bernoulli(torch.tensor(0.3))).unsqueeze(-1)
            * weight[:, h]
            for h in range(H)
        )
        pyro.sample("y", dist.Normal(mean, 0.5).to_event(1), obs=y)


def by_vector(y):
    with pyro.plate("data", len(y), dim=-1):
        s = pyro.sample("s", dist.Bernoulli(torch.full((H,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, 0.5).to_event(1), obs=y)


def no_guide(y):
    pass


exact = -TraceEnum_ELBO(max_plate_nesting=1).loss(config_enumerate(by_sites), no_guide, y)
print(f"log evidence, by enumeration: {exact:.2f}\n")

# %%
# Draws from the prior of each site; all combinations of them are scored.

print("draws per site   combinations   bound, mean and deviation of 20   seconds each")
for draws in (2, 3, 4):
    sampled = config_enumerate(
        by_sites, default="parallel", expand=False, num_samples=draws, tmc="diagonal"
    )
    start = time.perf_counter()
    with torch.no_grad():
        bounds = torch.tensor(
            [
                -TraceTMC_ELBO(max_plate_nesting=1).loss(sampled, no_guide, y)
                for _ in range(20)
            ]
        )
    seconds = (time.perf_counter() - start) / 20
    print(
        f"{draws:14}   {draws**H:12}   {bounds.mean():12.2f} ± {bounds.std():7.2f}            {seconds:8.3f}"
    )

# %%
# As many states as the population holds, chosen instead of drawn, and each counted once:

print("states held   bound")
for size in (4, 8, 16):
    guide = AutoTruncated(by_vector, num_states=size).infer(
        y, Truncated_ELBO().search, steps=10
    )
    print(f"{size:11}   {-Truncated_ELBO().loss(by_vector, guide, y):7.2f}")

# %%
# In favour of tensor Monte Carlo: it is for continuous and discrete sites alike, and holds nothing per data point. Where the model
# factorises, the combinations are summed without being listed. Where all sites meet in one observation, as here, they are listed.
#
# In favour of the truncated posterior: no noise, and the states are the probable ones rather than those of the prior.
