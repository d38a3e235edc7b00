"""Mixtures of Gaussians of real data by ``learn`` beside scikit-learn: held-out log density, and CPU seconds.

OMP_NUM_THREADS=1 python -m tests.papers.experiments.real_mixtures --folder DATA --data oil --components 10 --covariance full
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import warnings
from pathlib import Path

import numpy as np
import pyro
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor

from pyro_truncated import learn
from pyro_truncated.models import GaussianMixture


def read_rows(folder: Path, name: str) -> np.ndarray:
    """Rows of a set.

    Flow measurements, physicochemical properties of proteins, 20 principal components of images of clothes, six of the expression of genes
    in cells, ten of small images of digits, or ten measurements of the nuclei of cells.
    """
    if name == "oil":
        return np.load(folder / "oil_flow.npz")["Y_train"]
    if name == "protein":
        return np.load(folder / "uci_small.npz")["protein_X"]
    if name == "nuclei":
        return load_breast_cancer().data[:, :10]
    if name == "digits":
        return principal(load_digits().data, 10)
    if name == "genes":
        return principal(np.load(folder / "guo_qpcr.npz")["Y"], 6)
    return principal(np.load(folder / "fashion_mnist_train.npz")["X"].reshape(-1, 784), 20)


def principal(rows: np.ndarray, number: int) -> np.ndarray:
    """The first principal components."""
    rows = rows.astype(np.float64) - rows.mean(0)
    return rows @ np.linalg.eigh(rows.T @ rows)[1][:, -number:]


def split(folder: Path, name: str, seed: int, most: int) -> tuple[Tensor, Tensor]:
    """Standardised rows to train on, at most so many or three quarters of all, and at least 2000 or as many of the others to test on."""
    rows = read_rows(folder, name)
    rows = rows[np.random.RandomState(seed).permutation(len(rows))]
    number = min(most, 3 * len(rows) // 4)
    train, test = rows[:number], rows[number : number + max(2000, number)]
    mean, scale = train.mean(0), train.std(0)
    return torch.tensor((train - mean) / scale, dtype=torch.float32), torch.tensor((test - mean) / scale, dtype=torch.float32)


@torch.no_grad()
def density(model: GaussianMixture, y: Tensor) -> float:
    """Mean log density, all components counted."""
    loc, scale = model.loc.double(), model.scale.double()
    if model.covariance == "diag":
        scale = torch.diag_embed(scale)
    components = torch.distributions.MultivariateNormal(loc, scale_tril=scale)
    parts = [(components.log_prob(some.double().unsqueeze(1)) + model.weights.double().log()).logsumexp(1) for some in y.split(500)]
    return float(torch.cat(parts).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--data", choices=["oil", "protein", "clothes", "genes", "digits", "nuclei"], default="oil")
    parser.add_argument("--most", type=int, default=8000, help="rows to train on")
    parser.add_argument("--components", type=int, nargs="+", default=[10])
    parser.add_argument("--covariance", choices=["full", "diag", "tied"], default="full")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--starts", type=int, default=10, help="of scikit-learn")
    args = parser.parse_args()
    from sklearn.mixture import GaussianMixture as Theirs

    for number, seed in itertools.product(args.components, args.seeds):
        y, test = split(args.folder, args.data, seed, args.most)
        setting = {"data": args.data, "shape": list(y.shape), "components": number, "covariance": args.covariance, "seed": seed}
        for method in ("ours", "scikit-learn"):
            began = time.process_time()
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                if method == "ours":
                    pyro.clear_param_store()
                    pyro.set_rng_seed(seed)
                    model = GaussianMixture(y.shape[1], number, covariance=args.covariance)
                    learn(model, y, progress=False)
                else:
                    theirs = Theirs(number, covariance_type=args.covariance, n_init=args.starts, random_state=seed).fit(y.double().numpy())
            found = {"cpu": time.process_time() - began, "warnings": len(warned)}
            score = [density(model, some) if method == "ours" else float(theirs.score(some.double().numpy())) for some in (y, test)]
            print(json.dumps({"method": method, **setting, **found, "train": score[0], "test": score[1]}), flush=True)


if __name__ == "__main__":
    main()
