"""
Hidden Markov models with too many states to enumerate
======================================================

One meter measures a house with ten appliances, minute by minute. Each is on or off, and stays so for a while. The joint state has
:math:`2^{10}` values, so exact messages take a million operations a minute. Here the guide keeps sixteen states for each minute.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, Truncated_ELBO, check_truncation
from pyro_truncated.distributions import BinaryChains

pyro.set_rng_seed(0)
torch.set_default_dtype(torch.float64)

# %%
# Two mornings
# ------------
#
# A chain is on in the first minute with some probability, and then follows its own transitions: row ``0`` is "off", row ``1`` is "on".

POWER = torch.linspace(60.0, 1500.0, 10)
SWITCH = torch.tensor([[0.985, 0.015], [0.05, 0.95]]).repeat(10, 1, 1)
chains = BinaryChains(torch.full((10,), 0.2), SWITCH, num_steps=200)
truth = chains.expand([2]).sample()
y = dist.Normal(truth @ POWER.unsqueeze(-1), 30.0).sample()

# %%
# The model is a Pyro program
# ---------------------------
#
# A site of chains has the event ``(steps, chains)``. Any likelihood of the steps goes with it.


def model(y):
    power = pyro.param("power", POWER.clone() + 20.0, constraint=dist.constraints.positive)
    noise = pyro.param("noise", torch.tensor(50.0), constraint=dist.constraints.positive)
    with pyro.plate("mornings", len(y)):
        on = pyro.sample(
            "on", BinaryChains(torch.full((10,), 0.2), SWITCH, num_steps=y.shape[1])
        )
        pyro.sample("y", dist.Normal(on @ power.unsqueeze(-1), noise).to_event(2), obs=y)


guide = AutoTruncated(model, num_states=16)
svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), Truncated_ELBO(search_steps=3))
losses = [svi.step(y) for _ in range(60)]
print(guide)
print("noise, made with 30:", float(pyro.param("noise").detach()))

# %%
# What the sets lack
# ------------------
#
# The check distinguishes an insufficient search from sets that are too small. With one search step for each gradient step, the default,
# it says "the search has not converged": several appliances explain the same minutes, and 88 % of the minutes are told rightly. Three
# search steps are enough here.
#
# Any of Pyro's own losses works as well: a draw of the guide is a whole path.

print(check_truncation(guide, y, warn=False))

# %%
# Who is on
# ---------

on = guide.marginals()["on"]
print("minutes that are told rightly:", float((on.round() == truth).double().mean()))

figure, axes = plt.subplots(2, 1, sharex=True, figsize=(7, 5), layout="constrained")
axes[0].plot(y[0, :, 0], color="#1f5d85")
axes[0].set(ylabel="watts", title="what the meter shows")
axes[1].imshow(on[0].mT, aspect="auto", cmap="Blues", interpolation="nearest")
axes[1].set(xlabel="minute", ylabel="appliance", title="probability that it is on")

torch.set_default_dtype(torch.float32)
