"""
Sparse Gaussian processes on molecules
======================================

Inputs without gradients: the inducing inputs are a subset of the training molecules, chosen by the bound that fits the
hyper-parameters.
"""

# %%
# Water solubility of small molecules, given as SMILES strings. Where the stored data are missing, strings made up here take their place;
# the page says which it was.

import matplotlib.pyplot as plt
import torch

from pyro_truncated import SubsetGPRegression
from pyro_truncated.datasets import DatasetNotFoundError, load
from pyro_truncated.gp import CountKernel, spectrum

generator = torch.Generator().manual_seed(0)
try:
    stored = load("mol_esol")
    smiles, y = stored["smiles"].tolist(), torch.as_tensor(stored["y"]).double()
    print(f"{len(smiles)} molecules of ESOL, {smiles[0]} for example")
except DatasetNotFoundError:
    letters = [
        torch.randint(4, (int(n),), generator=generator)
        for n in torch.randint(4, 20, (600,), generator=generator)
    ]
    smiles = ["".join("CNOF"[letter] for letter in word) for word in letters]
    y = torch.tensor([word.count("C") - 1.5 * word.count("CO") for word in smiles]).double()
    y += 0.5 * torch.randn(len(y), generator=generator, dtype=torch.float64)
    print(f"{len(smiles)} made-up strings, {smiles[0]} for example")

# %%
# Counts of all substrings of up to three characters, and the Tanimoto kernel on them.

order = torch.randperm(len(y), generator=generator)
train, test = order[: 4 * len(y) // 5], order[4 * len(y) // 5 :]
counts = spectrum(smiles, 3, shorter=True)

errors = {}
for objective in ("vfe", "pp"):
    generator = torch.Generator().manual_seed(0)
    model = SubsetGPRegression(
        counts[train],
        y[train],
        CountKernel,
        num_inducing=32,
        objective=objective,
        generator=generator,
    )
    model.fit(max_seconds=3)
    mean, variance = model.predict(counts[test])
    errors[objective] = float((mean - y[test]).square().mean() / y[test].var())
    covered = ((mean - y[test]).abs() < 1.96 * variance.sqrt()).double().mean()
    print(
        f"{objective}: squared error {errors[objective]:.3f} of the variance, 95 % intervals hold {100 * covered:.0f} %"
    )

# %%
# ``objective="vfe"`` is a bound on the evidence; with few inducing inputs it takes for noise what these cannot explain.
# ``objective="pp"`` is no bound and had the smallest errors of twelve ways to choose and learn on molecules and histograms
# (:doc:`/results/sparse_gp`).

figure, ax = plt.subplots(figsize=(4, 3.4))
ax.errorbar(
    y[test], mean, variance.sqrt(), fmt=".", ecolor="0.8", elinewidth=0.6, markersize=4
)
ax.axline((float(y.mean()), float(y.mean())), slope=1, color="black", linewidth=0.8)
ax.set(xlabel="measured", ylabel="predicted, one standard deviation")
figure.tight_layout()

# %%
# The 32 molecules that the others are predicted from:

print(", ".join(smiles[train[index]] for index in model.subset.tolist()[:12]), "...")
