"""
From config_enumerate to AutoTruncated
======================================

A mixture with Pyro's own enumeration, the same mixture with ``AutoTruncated``, and then a model with 300 latents per data point,
which enumeration cannot do.
"""

# %%
# The mixture
# -----------
# Three clusters in the plane. ``config_enumerate`` tells ``TraceEnum_ELBO`` to sum the class of every point out.

import time

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate

from pyro_truncated import AutoTruncated, EvolutionarySearch, Truncated_ELBO

pyro.set_rng_seed(0)
centres = torch.tensor([[0.0, 0.0], [4.0, 0.0], [2.0, 3.0]])
y = centres[torch.randint(3, (200,))] + 0.8 * torch.randn(200, 2)


def mixture(y):
    share = pyro.param("share", torch.ones(3) / 3, constraint=dist.constraints.simplex)
    centre = pyro.param("centre", lambda: y[:3].clone())
    scale = pyro.param("scale", torch.tensor(2.0), constraint=dist.constraints.positive)
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(share))
        pyro.sample("y", dist.Normal(centre[z], scale).to_event(1), obs=y)


def no_guide(y):
    pass


svi = SVI(
    config_enumerate(mixture),
    no_guide,
    pyro.optim.Adam({"lr": 0.05}),
    TraceEnum_ELBO(max_plate_nesting=1),
)
for _ in range(200):
    enumerated = svi.step(y)
enumerated = svi.evaluate_loss(y)
print(f"loss by enumeration: {enumerated:.4f}")

# %%
# The same model, by a truncated guide
# ------------------------------------
# ``config_enumerate`` goes, and guide and loss change. The guide holds the states there are, three for every point, so its posterior is
# the exact one and the loss is the same number. It is the *model* that is given to both, without ``config_enumerate``.

guide = AutoTruncated(mixture, num_states=3)
svi = SVI(mixture, guide, pyro.optim.Adam({"lr": 0.05}), Truncated_ELBO())
truncated = svi.evaluate_loss(y)
print(f"loss by AutoTruncated: {truncated:.4f}")
assert abs(truncated - enumerated) < 1e-4 * abs(enumerated)

# %%
# Pyro's own ELBO takes the guide as well.

stock = SVI(
    mixture, guide, pyro.optim.Adam({"lr": 0.05}), TraceEnum_ELBO(max_plate_nesting=1)
).evaluate_loss(y)
print(f"the same guide under TraceEnum_ELBO: {stock:.4f}")

# %%
# What enumeration leaves to ``infer_discrete`` can be read from the guide: the probability of every class for every point.

guide.refresh_(y)
probability = guide.marginals()["z"]
print(probability[:3])

figure, ax = plt.subplots(figsize=(4, 3.2))
ax.scatter(*y.mT, c=probability.detach().numpy(), s=15)
ax.scatter(*pyro.param("centre").detach().mT, marker="+", color="black", s=90)
ax.set(xlabel="coloured by the probabilities of the classes", xticks=[], yticks=[])

# %%
# 300 latents
# -----------
# Now every data point is a sum of columns of a dictionary, and each of 300 columns is in it or not. That makes
# 2\ :sup:`300` states per data point. ``config_enumerate`` skips such a vector-valued site with a warning and samples it from the prior.

pyro.clear_param_store()
weight = torch.randn(40, 300)
states = (torch.rand(5, 300) < 2 / 300).float()
y = states @ weight.mT + 0.5 * torch.randn(5, 40)


def causes(y):
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((300,), 2 / 300)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, 0.5).to_event(1), obs=y)


# %%
# There is nothing to learn here: the populations alone are to be filled. A step of the optimiser would do that, too. ``infer`` only
# searches.

search = EvolutionarySearch(
    parents=20, generations=1, crossover=True, mutation="sparseflips"
)
guide = AutoTruncated(causes, num_states=200)
start = time.perf_counter()
posterior = guide.infer(y, search, steps=100)
print(f"{time.perf_counter() - start:.1f} seconds")
found = posterior.mode()["s"]
print("latents on, truth:", [row.nonzero().flatten().tolist() for row in states])
print("latents on, found:", [row.nonzero().flatten().tolist() for row in found])

# %%
# Where no exact value can be had, the log joint of the states that made the data is a yardstick. It is one term of the evidence, and a
# good bound lies above it.

bound = -Truncated_ELBO().loss(causes, posterior, y)
truth = (
    pyro.poutine.trace(pyro.poutine.condition(causes, {"s": states}))
    .get_trace(y)
    .log_prob_sum()
)
print(f"bound {bound:.2f}, log joint of the true states {truth:.2f}")

# %%
# Whether a search finds the best states is a matter of the problem: these data are informative enough that it does. See
# :doc:`/tutorials/posterior_any_good` for how to tell when the truth is not known, and :doc:`/comparison/enumeration` for where
# plain enumeration ends.
