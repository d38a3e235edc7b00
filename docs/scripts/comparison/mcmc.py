"""
MCMC over the states
====================

A Gibbs sampler has no bias in the long run. A truncated posterior has no noise. Which is nearer after the same time?
"""

# %%
# Pyro's NUTS sums discrete sites out by enumeration, so it ends where enumeration ends. A Gibbs sampler over the states does not. This one
# visits the latents in order, all data points at once.

import time

import pyro
import torch

from pyro_truncated import AutoTruncated, EvolutionarySearch
from pyro_truncated.datasets import linear_bars
from pyro_truncated.diagnostics import compare_with_enumeration
from pyro_truncated.models import BinarySparseCoding


def gibbs(y, weight, noise, prior, sweeps, burn_in):
    s = (torch.rand(len(y), weight.shape[1]) < prior).to(y)
    residual, total = y - s @ weight.mT, torch.zeros_like(s)
    odds, square = torch.logit(torch.tensor(prior)), weight.square().sum(0)
    for sweep in range(sweeps):
        for h in range(weight.shape[1]):
            without = residual + s[:, h, None] * weight[:, h]
            logit = odds + (without @ weight[:, h] - 0.5 * square[h]) / noise**2
            s[:, h] = (torch.rand(len(y)) < torch.sigmoid(logit)).to(y)
            residual = without - s[:, h, None] * weight[:, h]
        if sweep >= burn_in:
            total += s
    return total / (sweeps - burn_in)


# %%
# Twelve bars under little noise and under much. The first have posteriors of few states, hard to leave for a sampler that changes one
# latent at a time; the second have posteriors of many states. The exact marginals are known: 4096 states.

for noise in (2.0, 14.0):
    pyro.set_rng_seed(0)
    bars = linear_bars(
        40, 6, mean_active=3.0, noise=noise, generator=torch.Generator().manual_seed(0)
    )
    model = BinarySparseCoding(36, 12, offset=False)
    model.weight, model.scale, model.prior = (
        bars.components,
        torch.tensor(noise),
        torch.tensor(0.25),
    )
    print(f"\nnoise {noise:g}: error of the marginals, mean and largest; seconds")
    exact = None
    for size in (16, 64, 256):
        start = time.perf_counter()
        guide = AutoTruncated(model, num_states=size).infer(
            bars.data, EvolutionarySearch(crossover=True), steps=20
        )
        seconds = time.perf_counter() - start
        comparison = compare_with_enumeration(guide, bars.data)
        exact = comparison.values
        error = (comparison.truncated_values - exact).abs()
        print(
            f"  truncated, {size:3} states: {error.mean():.4f}  {error.max():.4f}  {seconds:.2f} s   (gap {comparison.gap.mean():.3f} nats)"
        )
    for sweeps in (20, 200, 1000):
        start = time.perf_counter()
        found = gibbs(bars.data, bars.components, noise, 0.25, sweeps, sweeps // 5)
        seconds = time.perf_counter() - start
        error = (found.double() - exact[..., 1]).abs()
        print(
            f"  Gibbs, {sweeps:4} sweeps:     {error.mean():.4f}  {error.max():.4f}  {seconds:.2f} s"
        )

# %%
# In favour of the sampler: under much noise, where hundreds of states matter, its error goes on falling while a population of 16 stays
# where it is.
#
# In favour of the truncated posterior: a bound on the evidence, gradients for the model's parameters, and no error to speak of where
# posteriors are concentrated.
