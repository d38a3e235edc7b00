"""
Restoring your own photograph
=============================

Noise off an image, and holes filled in, from the damaged image alone.
"""

# %%
# A part of one of scikit-learn's photographs; put your own here (``torch.as_tensor(matplotlib.pyplot.imread(...))``). Noise of standard
# deviation 25 on 256 grey values; the restoration is not told.

import matplotlib.pyplot as plt
import pyro
import torch
from sklearn.datasets import load_sample_image

from pyro_truncated.restoration import denoise, inpaint

pyro.set_rng_seed(0)
image = (
    torch.from_numpy(load_sample_image("china.jpg").copy())
    .float()
    .mean(-1)[40:136, 120:216]
)
noisy = image + 25 * torch.randn(image.shape, generator=torch.Generator().manual_seed(0))


def decibels(found):
    return float(10 * torch.log10(255**2 / (found - image).square().mean()))


# %%
# The patches of the photograph are a mixture of normal distributions, learned in three rounds, each from what the last one restored.

restored = denoise(noisy, progress=False)
print(
    f"noise {restored.noise:.1f} learned, 25 made; {decibels(noisy):.2f} dB before, {decibels(restored.image):.2f} dB after"
)

# %%
# Any model of this library may stand for the mixture, such as a dictionary of few active elements. Smaller than it would be at its best,
# so that this page builds in seconds.

from pyro_truncated.models import SpikeSlabSparseCoding

quick = {"side": 8, "num_states": 16, "passes": 8, "progress": False}
by_dictionary = denoise(
    noisy, model=lambda size: SpikeSlabSparseCoding(size, 128, offset=False), **quick
)
print(f"{decibels(by_dictionary.image):.2f} dB by sparse coding")

# %%
# A third of the pixels missing
# -----------------------------
# They are NaN, or given by a mask of what is seen. The rest is kept as it is, unless there is noise to be taken off: told, or estimated.

holes = image + 5 * torch.randn(image.shape, generator=torch.Generator().manual_seed(1))
holes[torch.rand(image.shape, generator=torch.Generator().manual_seed(2)) < 1 / 3] = (
    torch.nan
)
filled = inpaint(holes, noise=None, progress=False)
print(
    f"{decibels(holes.nan_to_num(float(holes.nanmean()))):.2f} dB with the mean in the holes, {decibels(filled.image):.2f} dB filled in"
)

figure, axes = plt.subplots(1, 5, figsize=(11, 2.5))
panels = {
    "photograph": image,
    "noisy": noisy,
    "restored": restored.image,
    "a third missing": holes,
    "filled in": filled.image,
}
for ax, (title, picture) in zip(axes, panels.items(), strict=True):
    ax.imshow(picture, cmap="gray", vmin=0, vmax=255)
    ax.set_title(title, fontsize=10)
    ax.set_axis_off()
figure.tight_layout()

# %%
# From a shell: ``python -m pyro_truncated.restoration photograph.png --output restored.png``. Beside BM3D, with the default settings:
# :doc:`/results/restoration`.
