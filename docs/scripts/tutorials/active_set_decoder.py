"""
A decoder with active sets
==========================

A Gaussian process decoder (GP-LVM) that trains on minibatches: of each, a random part is the active set that the rest is predicted from.
"""

# %%
# Small images of handwritten digits, which scikit-learn ships.

import matplotlib.pyplot as plt
import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from sklearn.datasets import load_digits

from pyro_truncated.gp import UniformSplits
from pyro_truncated.gplvm import SASDecoder

digits = load_digits()
x, label = (
    torch.from_numpy(digits.images).float().flatten(1) / 16,
    torch.from_numpy(digits.target),
)
x, test, label = x[:1500], x[1500:1600], label[:1500]

# %%
# Two latent dimensions per image. ``UniformSplits`` deals minibatches of 500 images, 100 of them active.

pyro.clear_param_store()
pyro.set_rng_seed(0)
decoder = SASDecoder(len(x), x.shape[1]).initialize(x)
svi = SVI(
    decoder.model,
    decoder.guide,
    pyro.optim.Adam(decoder.learning_rates(0.05, 0.02)),
    Trace_ELBO(),
)
splits = UniformSplits(len(x), 500, 100)
for epoch in range(40):
    if epoch < 24 and epoch % 4 == 1:
        decoder.relocate_(x)
    for split in splits.epoch(epoch):
        loss = svi.step(x, split)

# %%
# Gradients only slide latents about. ``relocate_`` let each image jump to where it fits best, every fourth epoch.

decoder.condition_(x)
latents = decoder.latents(x)
figure, ax = plt.subplots(figsize=(5, 4.5))
ax.scatter(*latents.detach().mT, c=label, cmap="tab10", s=6)
for digit in range(10):
    ax.text(
        *latents[label == digit].median(0).values.tolist(),
        str(digit),
        fontsize=14,
        fontweight="bold",
    )
ax.set(xticks=[], yticks=[])

# %%
# New images, half of them missing
# --------------------------------
# Missing pixels are NaN. ``reconstruct`` averages over latents, and says how sure it is: 95 % intervals hold 95 % of the missing pixels.

half = test.clone()
half[:, 32:] = torch.nan
mean, variance = decoder.reconstruct(half)
inside = ((mean - test).abs() < 1.96 * variance.sqrt())[:, 32:].double().mean()
error = float((mean - test)[:, 32:].square().mean().sqrt())
by_mean_image = float((x.mean(0) - test)[:, 32:].square().mean().sqrt())
print(
    f"lower halves painted in: RMSE {error:.3f}; by the mean image {by_mean_image:.3f}; {100 * inside:.0f} % inside"
)

figure, axes = plt.subplots(3, 10, figsize=(7, 2.2))
for column in range(10):
    for ax, image in zip(
        axes[:, column], (test, half.nan_to_num(0.5), mean.detach()), strict=True
    ):
        ax.imshow(image[column].reshape(8, 8), cmap="gray", vmin=0, vmax=1)
        ax.set_axis_off()

# %%
# What the objective estimates: :doc:`/explanation/active_sets`. MNIST, Fashion-MNIST and CIFAR-10 beside Pyro's and GPyTorch's GP-LVM and
# a VAE: :doc:`/results/stochastic_active_sets`.
