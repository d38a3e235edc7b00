"""Mixtures of very many Gaussians beside scikit-learn: what is reached on data it was not trained on, and in how much CPU time.

OMP_NUM_THREADS=1 python -m tests.papers.experiments.large_mixtures --components 1000 --data 200000 --methods ours kmeans sklearn
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, Truncated_ELBO
from pyro_truncated.models import GaussianMixture

DIMS, RANK, NUM_STATES, NUM_TEST = 16, 3, 4, 4000
Result = dict[str, float]


def mixture(num_components: int, covariance: str) -> GaussianMixture:
    return GaussianMixture(DIMS, num_components, covariance=covariance, rank=RANK if covariance == "low-rank" else None)


@torch.no_grad()
def mixture_data(num_components: int, num_data: int, covariance: str, seed: int) -> tuple[Tensor, Tensor, GaussianMixture]:
    """Data to train on, others to test on, and the mixture that both are from: means of deviation 3.

    Noise has the deviation 1, or of 0.5 to 1.5 along the dimensions of every component (diagonal) or along the same rotated ones (tied), or
    of 0.5 beside three normal directions of every component (low-rank).
    """
    generator = torch.Generator().manual_seed(seed)
    truth = mixture(num_components, covariance)
    truth.loc = 3 * torch.randn(num_components, DIMS, generator=generator)
    if covariance == "diag":
        truth.scale = 0.5 + torch.rand(num_components, DIMS, generator=generator)
    component = torch.randint(num_components, (num_data + NUM_TEST,), generator=generator)
    if covariance == "tied":
        rotation = torch.linalg.qr(torch.randn(DIMS, DIMS, generator=generator)).Q
        truth.scale = torch.linalg.cholesky((rotation * (0.5 + torch.rand(DIMS, generator=generator)).square()) @ rotation.mT)
    if covariance == "low-rank":
        truth.scale = torch.full((num_components,), 0.5)
        truth.factor = torch.randn(num_components, DIMS, RANK, generator=generator)
    noise = torch.randn(num_data + NUM_TEST, DIMS, generator=generator)
    if covariance == "tied":
        y = truth.loc[component] + noise @ truth.scale.mT
    else:
        y = truth.loc[component] + truth.scale.reshape(num_components, -1)[component] * noise
    if covariance == "low-rank":
        directions = torch.randn(num_data + NUM_TEST, RANK, 1, generator=generator)
        y += torch.cat(
            [(truth.factor[some] @ given).squeeze(-1) for some, given in zip(component.split(2**16), directions.split(2**16), strict=True)]
        )
    return y[:num_data].clone(), y[num_data:].clone(), truth


@torch.no_grad()
def log_density(y: Tensor, weights: Tensor, loc: Tensor, scale: Tensor) -> float:
    """Mean log density under a mixture with standard deviations ``(K, D)``, all components counted."""
    weights, loc, scale = weights.detach().double(), loc.detach().double(), scale.detach().double().expand(len(loc), y.shape[1])
    precision = scale**-2
    constant = weights.log() - scale.log().sum(1) - 0.5 * y.shape[1] * math.log(2 * math.pi) - 0.5 * (precision * loc.square()).sum(1)
    blocks = y.double().split(max(1, 2**24 // len(loc)))
    parts = [(x @ (precision * loc).mT - 0.5 * x.square() @ precision.mT + constant).logsumexp(1) for x in blocks]
    return float(torch.cat(parts).mean())


@torch.no_grad()
def density_of(model: GaussianMixture, y: Tensor) -> float:
    """Mean log density under one of our mixtures, all components counted."""
    if model.covariance in ("spherical", "diag"):
        return log_density(y, model.weights, model.loc, model.scale.reshape(model.num_components, -1))
    scale = model.scale.double()
    if model.covariance == "low-rank":
        noise = scale.square()[:, None, None] * torch.eye(DIMS, dtype=torch.float64)
        scale = torch.linalg.cholesky(model.factor.double() @ model.factor.double().mT + noise)
    scales = scale.expand(model.num_components, DIMS, DIMS)
    components = (torch.distributions.MultivariateNormal(loc, scale_tril=own) for loc, own in zip(model.loc.double(), scales, strict=True))
    log_joint = torch.stack([component.log_prob(y.double()) for component in components], 1) + model.weights.double().log()
    return float(log_joint.logsumexp(1).mean())


def ours(
    y: Tensor,
    test: Tensor,
    num_components: int,
    covariance: str,
    seed: int,
    passes: int,
    known: dict[str, Tensor] | None = None,
    moves: bool = True,
) -> Iterator[Result]:
    """Truncated EM on all data; yields after the start and every pass.

    Parameters that are known begin with these values: what the others reach tells what a better start would be worth. Moves of components
    follow the passes until a pass that none follows.
    """
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    began, spent = time.process_time(), 0.0
    model = mixture(num_components, covariance).initialize(y)
    seeded = time.process_time() - began
    for name, value in (known or {}).items():
        setattr(model, name, value.detach().clone())
    guide = AutoTruncated(model, num_states=NUM_STATES)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(model.default_search(NUM_STATES)))
    for done in range(passes + 1):
        began = time.process_time() if done else began
        if done:
            svi.step(y)
        moved = model.split_and_merge(guide, y) if done and moves else 0
        moves = moves and (not done or moved > 0)
        last = time.process_time() - began
        spent += last
        found = {"passes": done, "moved": moved, "cpu": spent, "seeding": seeded, "us_per_point": 1e6 * last / len(y)}
        yield {**found, "log_density": density_of(model, test)}


def of_clusters(y: Tensor, test: Tensor, num_components: int, means: Any, labels: Any) -> tuple[float, float]:
    """Mean log densities of the mixtures that clusters make: with one variance for all, and with one for each."""
    loc, label = torch.as_tensor(means).double(), torch.as_tensor(labels).long()
    size = torch.bincount(label, minlength=num_components).double()
    weights = (size / size.sum()).clamp(min=1e-6)
    square = (y.double() - loc[label]).square().mean(1)
    own = torch.zeros(num_components, dtype=torch.float64).index_add_(0, label, square) / size.clamp(min=1)
    own = torch.where(size > 1, own, square.mean()).clamp(min=1e-3)
    shared = log_density(test, weights / weights.sum(), loc, square.mean().sqrt().reshape(1, 1))
    return shared, log_density(test, weights / weights.sum(), loc, own.sqrt().unsqueeze(-1))


def kmeans(y: Tensor, test: Tensor, num_components: int, seed: int, init: str = "k-means++") -> Result:
    """scikit-learn's ``MiniBatchKMeans`` as it is, but for larger batches."""
    from sklearn.cluster import MiniBatchKMeans

    method = MiniBatchKMeans(num_components, init=init, n_init=1, batch_size=10_000, random_state=seed)
    began = time.process_time()
    method.fit(y.numpy())
    spent = time.process_time() - began
    shared, own = of_clusters(y, test, num_components, method.cluster_centers_, method.labels_)
    return {"cpu": spent, "passes": method.n_steps_ * 10_000 / len(y), "log_density": shared, "log_density_own": own}


def sklearn_mixture(y: Tensor, test: Tensor, num_components: int, covariance: str, seed: int, passes: int) -> Result:
    """scikit-learn's ``GaussianMixture`` as it is (it starts from k-means), for so many iterations at most."""
    from sklearn.mixture import GaussianMixture as Theirs

    kind = "full" if covariance == "low-rank" else covariance  # of which there are none of low rank
    method = Theirs(num_components, covariance_type=kind, max_iter=passes, random_state=seed)
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        method.fit(y.numpy())
    return {"cpu": time.process_time() - began, "passes": method.n_iter_, "log_density": float(method.score(test.numpy()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--components", type=int, default=1000)
    parser.add_argument("--data", type=int, default=200_000)
    parser.add_argument("--covariance", choices=["spherical", "diag", "tied", "low-rank"], default="spherical")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--methods", nargs="+", choices=["ours", "kmeans", "sklearn"], default=["ours", "kmeans"])
    parser.add_argument("--known", nargs="*", default=[], help="parameters of our mixture that begin as those that the data are from")
    parser.add_argument("--no-moves", action="store_true", help="leave components where EM takes them")
    args = parser.parse_args()
    y, test, truth = mixture_data(args.components, args.data, args.covariance, args.seed)

    def show(method: str, **found: Any) -> None:
        setting = {"components": args.components, "data": args.data, "covariance": args.covariance, "seed": args.seed}
        print(json.dumps({"method": method, **setting, **found}), flush=True)

    show("truth", log_density=density_of(truth, test))
    known = {name: getattr(truth, name) for name in args.known}
    runs: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours(y, test, args.components, args.covariance, args.seed, args.passes, known, not args.no_moves),
        "kmeans": lambda: [kmeans(y, test, args.components, args.seed)],
        "sklearn": lambda: [sklearn_mixture(y, test, args.components, args.covariance, args.seed, args.passes)],
    }
    for method in args.methods:
        for found in runs[method]():
            show(method, **found)


if __name__ == "__main__":
    main()
