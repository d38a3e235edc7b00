"""
Twenty lines
============

A model with 2\\ :sup:`12` states per data point, a guide that holds 32 of them, and Pyro's own ``SVI``.
"""

# %%
# The data are images of 6x6 pixels. Twelve bars, horizontal and vertical ones, are in an image or not, two of them on average, and
# where they cross they add up.

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, Truncated_ELBO, check_truncation, to_arviz
from pyro_truncated.datasets import linear_bars

pyro.set_rng_seed(0)
y = linear_bars(500, size=6, mean_active=2.0).data

figure, axes = plt.subplots(1, 8, figsize=(8, 1.2))
for image, ax in zip(y, axes, strict=False):
    ax.imshow(image.reshape(6, 6), cmap="gray")
    ax.set_axis_off()

# %%
# The model says how such an image comes about: twelve binary causes ``s``, a dictionary ``weight`` that holds what each of them adds to
# the image, and noise. It is an ordinary Pyro program.


def model(y, batch_size=None):
    weight = pyro.param("weight", lambda: y[:12].mT.clone())
    noise = pyro.param("noise", torch.tensor(5.0), constraint=dist.constraints.positive)
    with pyro.plate("data", len(y), subsample_size=batch_size) as i:
        s = pyro.sample("s", dist.Bernoulli(torch.full((12,), 0.2)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, noise).to_event(1), obs=y[i])


# %%
# The guide finds the discrete site by itself. It keeps ``num_states`` states for every image; their weights are the exact posterior,
# renormalised. ``Truncated_ELBO`` searches for better states before each step.

guide = AutoTruncated(model, num_states=32)
svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), Truncated_ELBO())
losses = [svi.step(y) for _ in range(200)]
print(f"loss per image: {losses[0] / 500:.1f} at first, {losses[-1] / 500:.1f} at the end")

# %%
# The columns of ``weight`` are what was learned.

figure, axes = plt.subplots(1, 12, figsize=(9, 0.9))
for column, ax in zip(pyro.param("weight").detach().mT, axes, strict=True):
    ax.imshow(column.reshape(6, 6), cmap="RdBu_r", vmin=-10, vmax=10)
    ax.set_axis_off()

# %%
# Most columns are a bar. Some hold two, or share one: gradients end in the optimum that their start leads to, and
# :doc:`/tutorials/image_dictionary` shows what to do about it.
#
# Every image has a posterior over which bars are in it. Nothing has to be sampled to read it.

print(guide)
print(guide.marginals()["s"][0])  # P(each latent is on | first image)
print(guide.mode()["s"][0])  # the most probable state

# %%
# The loss is minus a lower bound on the log evidence, without sampling noise. ``check_truncation`` says what the 32 states miss.

print(check_truncation(guide, y))

# %%
# And ArviZ gets draws, the log likelihood of every image with its states summed out, and the weights.

idata = to_arviz(model, guide, y)
print(idata)
