"""
A dictionary from images
========================

A shipped model with closed-form M-steps, trained by EM inside ``SVI``; and ``learn``, which does not depend on a lucky start.
"""

# %%
# Patches of photographs (those that scikit-learn ships, where nothing else is at hand), whitened.

import matplotlib.pyplot as plt
import pyro
import torch
from pyro.infer import SVI

from pyro_truncated import (
    AutoTruncated,
    ClosedForm,
    EvolutionarySearch,
    Truncated_ELBO,
    learn,
)
from pyro_truncated.datasets import linear_bars, natural_images, whitened_patches
from pyro_truncated.models import BinarySparseCoding

pyro.set_rng_seed(0)
y, whitening = whitened_patches(
    natural_images("sklearn"), 8, 3000, torch.Generator().manual_seed(0)
)
print(tuple(y.shape))

# %%
# ``BinarySparseCoding(num_observed, num_latents)`` is the model of the first tutorial as a class. ``ClosedForm`` stands in the place of
# the optimiser: every step of ``SVI`` is a step of EM, with no learning rate.

model = BinarySparseCoding(64, 64).initialize(y)
guide = AutoTruncated(model, num_states=48)
svi = SVI(
    model,
    guide,
    ClosedForm(model),
    Truncated_ELBO(
        EvolutionarySearch(parents=6, children=4, mutation="sparseflips", crossover=True)
    ),
)
losses = [svi.step(y) for _ in range(60)]
print(f"free energy per patch: {-losses[0] / len(y):.1f} to {-losses[-1] / len(y):.1f}")
print(f"{float(guide.marginals()['s'].sum(-1).mean()):.1f} of 64 fields are on in a patch")


def show(columns, side, rows, across):
    _, axes = plt.subplots(rows, across, figsize=(0.55 * across, 0.55 * rows))
    for column, ax in zip(columns.mT, axes.flat, strict=False):
        ax.imshow(
            column.reshape(side, side),
            cmap="gray",
            vmin=-column.abs().max(),
            vmax=column.abs().max(),
        )
        ax.set_axis_off()


# %%
# What each latent adds to a patch, in whitened pixels.

show(model.weight.detach(), 8, 4, 16)

# %%
# ``make demo`` does this with larger patches and more of them, and writes a page about it.
#
# Starts
# ------
# EM finds the optimum that its start leads to. On crowded bars, four of twenty in an image, a plain start mostly ends with two bars in one
# column or one bar in two.

bars = linear_bars(500, size=8, mean_active=3.0, generator=torch.Generator().manual_seed(1))
plain = BinarySparseCoding(64, 16).initialize(bars.data)
svi = SVI(
    plain,
    AutoTruncated(plain, num_states=64),
    ClosedForm(plain),
    Truncated_ELBO(EvolutionarySearch(crossover=True)),
)
for _ in range(100):
    loss = svi.step(bars.data)
print(f"plain start: free energy per image {-loss / 500:.2f}")
show(plain.weight.detach(), 8, 1, 16)

# %%
# ``learn`` makes short annealed runs until two of them agree, and trains from the best one.

robust = BinarySparseCoding(64, 16)
guide = learn(robust, bars.data, progress=False)
print(
    f"learn: free energy per image {-Truncated_ELBO().loss(robust, guide, bars.data) / 500:.2f}"
)
show(robust.weight.detach(), 8, 1, 16)

# %%
# How often it finds all components, beside other starts: :doc:`/results/learning`.
