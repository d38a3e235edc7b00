"""Mixtures of Gaussians of real data by ``learn`` beside scikit-learn: held-out log density, and CPU seconds.

OMP_NUM_THREADS=1 python -m tests.papers.experiments.real_mixtures --folder DATA --data oil --components 10 --covariance full
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path

import numpy as np
import pyro
import torch
from torch import Tensor

from pyro_truncated import learn
from pyro_truncated.models import GaussianMixture

_MOST = 8000


def rows_of(folder: Path, name: str) -> np.ndarray:
    """Rows of a set: flow measurements, physicochemical properties of proteins, or 20 principal components of images of clothes."""
    if name == "oil":
        return np.load(folder / "oil_flow.npz")["Y_train"]
    if name == "protein":
        return np.load(folder / "uci_small.npz")["protein_X"]
    images = np.load(folder / "fashion_mnist_train.npz")["X"].reshape(-1, 784).astype(np.float64)
    images -= images.mean(0)
    return images @ np.linalg.eigh(images.T @ images)[1][:, -20:]


def split(folder: Path, name: str, seed: int) -> tuple[Tensor, Tensor]:
    """Standardised rows to train on, at most 8000, and as many to test on, or a quarter of all."""
    rows = rows_of(folder, name)
    rows = rows[np.random.RandomState(seed).permutation(len(rows))]
    number = min(_MOST, 3 * len(rows) // 4)
    train, test = rows[:number], rows[number : 2 * number]
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
    parser.add_argument("--data", choices=["oil", "protein", "clothes"], default="oil")
    parser.add_argument("--components", type=int, default=10)
    parser.add_argument("--covariance", choices=["full", "diag", "tied"], default="full")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--starts", type=int, default=10, help="of scikit-learn")
    args = parser.parse_args()
    from sklearn.mixture import GaussianMixture as Theirs

    for seed in args.seeds:
        y, test = split(args.folder, args.data, seed)
        setting = {"data": args.data, "shape": list(y.shape), "components": args.components, "covariance": args.covariance, "seed": seed}
        for method in ("ours", "scikit-learn"):
            began = time.process_time()
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                if method == "ours":
                    pyro.clear_param_store()
                    pyro.set_rng_seed(seed)
                    model = GaussianMixture(y.shape[1], args.components, covariance=args.covariance)
                    learn(model, y, progress=False)
                else:
                    theirs = Theirs(args.components, covariance_type=args.covariance, n_init=args.starts, random_state=seed).fit(
                        y.double().numpy()
                    )
            found = {"cpu": time.process_time() - began, "warnings": len(warned)}
            score = [density(model, some) if method == "ours" else float(theirs.score(some.double().numpy())) for some in (y, test)]
            print(json.dumps({"method": method, **setting, **found, "train": score[0], "test": score[1]}), flush=True)


if __name__ == "__main__":
    main()
