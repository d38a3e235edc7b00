"""Section 5.2 of the spike-and-slab GP-LVM paper: how many dimensions handwritten ones, sevens and nines need."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from pyro_truncated import datasets
from pyro_truncated.gplvm import Posterior, SpikeSlabGPLVM, fit

CLASSES = (1, 7, 9)
NUM_LATENTS = 20


def load(per_class: int, offset: int = 0) -> tuple[Tensor, Tensor]:
    """Images ``(N, 784)`` of the three classes with grey levels from 0 to 1, and their classes."""
    data = datasets.load("mnist_train")
    labels = torch.from_numpy(data["y"]).long()
    rows = torch.cat([(labels == c).nonzero().flatten()[offset : offset + per_class] for c in CLASSES])
    return torch.from_numpy(data["X"][rows.numpy()]).double().flatten(1) / 255, labels[rows]


def neighbour_accuracy(train: Tensor, classes: Tensor, test: Tensor, truth: Tensor) -> float:
    """Share of test points whose nearest training point is of their class."""
    if train.shape[1] == 0:
        return float((truth == classes.mode().values).double().mean())
    return float((classes[torch.cdist(test, train).argmin(1)] == truth).double().mean())


def run(per_class: int = 1000, num_inducing: int = 50, steps: int = 60, rounds: int = 2) -> dict[str, Any]:
    """One run; the images for testing are training images of MNIST that the model has not seen."""
    y, classes = load(per_class)
    test, truth = load(per_class, per_class)
    torch.manual_seed(0)
    model = SpikeSlabGPLVM(*y.shape, NUM_LATENTS, kernel="rbf", num_inducing=num_inducing)
    begin = time.process_time()
    result = fit(model, y, steps=steps, warm_up=steps, rounds=rounds, generator=torch.Generator().manual_seed(0))
    seconds = time.process_time() - begin
    posterior = Posterior(model, y)
    latents = posterior.infer(test, steps=40)
    gamma = model.probability[0].detach()
    weight = model.views[0].kernel.lengthscale.detach().square().reciprocal()
    order = weight.argsort(descending=True)
    loc = model.loc.detach()
    by_threshold = [neighbour_accuracy(loc[:, order[:k]], classes, latents.loc[:, order[:k]], truth) for k in range(1, NUM_LATENTS + 1)]
    used = (gamma > 0.5).nonzero().flatten()
    error = (posterior.reconstruct(latents).mean - test).square().mean().sqrt()
    return {
        "experiment": "digits", "per_class": per_class, "num_inducing": num_inducing, "steps": steps, "rounds": rounds,
        "used": len(used), "accuracy": neighbour_accuracy(loc[:, used], classes, latents.loc[:, used], truth),
        "by_threshold": by_threshold, "gamma": gamma.tolist(), "relevance": model.relevance()[0].tolist(),
        "lengthscale": model.views[0].kernel.lengthscale.detach().tolist(), "pixels": neighbour_accuracy(y, classes, test, truth),
        "error": float(error), "spread": float((test - y.mean(0)).square().mean().sqrt()), "bound": result.bound, "seconds": seconds,
        "noise": float(model.views[0].noise.detach()),
    }  # fmt: skip
