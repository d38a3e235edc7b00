"""Section 5.3 of the spike-and-slab GP-LVM paper: retrieval of texts by images and of images by texts on Wikipedia articles."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_truncated import datasets
from pyro_truncated.gplvm import CategoricalLabels, Posterior, SpikeSlabMRD, initialize, maximize_bound, update_switches

NUM_LATENTS, NUM_INDUCING, REPLICATES = 10, 100, 6
# Columns: image query, text query, average.
PAPER = {
    "SSMRD (paper)": (0.170, 0.540, 0.355),
    "SCM": (0.362, 0.273, 0.318),
    "SM": (0.350, 0.249, 0.300),
    "CM": (0.267, 0.219, 0.243),
    "GMMFA": (0.264, 0.231, 0.248),
    "GMLDA": (0.272, 0.232, 0.253),
}


def standardised(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Features with mean zero and unit variance on the training data."""
    mean, deviation = train.mean(0), train.std(0).clamp(min=1e-12)
    return (train - mean) / deviation, (test - mean) / deviation


def load() -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Image and text features of training and test articles, and their topics."""
    train, test = datasets.load("wiki_crossmodal_train"), datasets.load("wiki_crossmodal_devtest")
    views = [standardised(*(torch.from_numpy(part[name]).double() for part in (train, test))) for name in ("img_bow", "txt_lda")]
    topics = [torch.from_numpy(part["y"]).long() for part in (train, test)]
    return [v[0] for v in views], [v[1] for v in views], topics[0], topics[1]


def simplex(topics: Tensor, num_dims: int) -> Tensor:
    """Latent means at the corners of a simplex, one for each topic, standardised: the paper's start."""
    corners = torch.nn.functional.one_hot(topics, num_dims).double()
    return (corners - corners.mean(0)) / corners.std(0).clamp(min=1e-12)


def average_precision(distances: Tensor, query: Tensor, stored: Tensor) -> Tensor:
    """Average precision of each query over the full ranking, relevance being the same topic."""
    order = distances.argsort(1)
    hits = (stored[order] == query.unsqueeze(1)).double()
    precision = hits.cumsum(1) / torch.arange(1, hits.shape[1] + 1)
    return (precision * hits).sum(1) / hits.sum(1)


def train(views: list[Tensor], start: Tensor, noise_share: float, steps: int, rounds: int) -> SpikeSlabMRD:
    """The paper's model; the noise starts high because these features say little of each other."""
    model = SpikeSlabMRD(len(start), [v.shape[1] for v in views], NUM_LATENTS, kernel="rbf", num_inducing=NUM_INDUCING)
    initialize(model, views, start, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for view, data in zip(model.views, views, strict=True):
            view.noise = noise_share * data.square().mean()
    with model.fix_switches(1.0):
        maximize_bound(model, views, steps, fixed=("noise", "loc"))
        maximize_bound(model, views, steps, fixed=("loc",))
    for _ in range(rounds):
        with torch.no_grad():
            model.logits = torch.full_like(model.logits, 3.0)
        update_switches(model, views)
        maximize_bound(model, views, steps)
    return model


def run(steps: int = 40, rounds: int = 1, noise_share: float = 0.5, num_data: int | None = None) -> dict[str, Any]:
    """One run: training on all training articles (or the first of them), queries by half of the test articles, which is what there is."""
    train_views, test_views, topics, test_topics = load()
    views = [v[:num_data] for v in train_views]
    topics = topics[:num_data]
    # Text features are repeated six times, as in the paper, to weigh as much as the images.
    views[1], queries = views[1].repeat(1, REPLICATES), [test_views[0], test_views[1].repeat(1, REPLICATES)]
    torch.manual_seed(0)
    begin = time.process_time()
    model = train(views, simplex(topics, NUM_LATENTS), noise_share, steps, rounds)
    seconds = time.process_time() - begin
    posterior = Posterior(model, views)
    found: dict[str, Any] = {}
    for name, c in (("image", 0), ("text", 1)):
        latents = posterior.infer({c: queries[c]}, steps=60)
        found[name] = float(average_precision(posterior.distances(latents), test_topics, topics).mean())
    return {
        "experiment": "retrieval", **found, "average": (found["image"] + found["text"]) / 2, "bound": float(model.bound(views).detach()),
        "seconds": seconds, "steps": steps, "rounds": rounds, "noise_share": noise_share, "num_data": len(topics),
        "gamma": model.probability.tolist(), "noise": [float(v.noise.detach()) for v in model.views],
    }  # fmt: skip


def run_with_labels(steps: int = 100, rounds: int = 12, noise_share: float = 0.5, num_inducing: int = 100) -> Iterator[dict[str, Any]]:
    """Topics of the stored articles as a third view: one row of scores after the warm-up, and one after each round of free iterations.

    Training starts from principal components. Queries have no topic. "same topic" ranks stored articles by the probability that the
    query has their topic; "distance" by distances in the latents that image and text share, as without labels.
    """
    train_views, test_views, topics, test_topics = load()
    views = [train_views[0], train_views[1].repeat(1, REPLICATES), topics.unsqueeze(1).double()]
    queries = [test_views[0], test_views[1].repeat(1, REPLICATES)]
    torch.manual_seed(0)
    begin = time.process_time()
    likelihoods = ["gaussian", "gaussian", CategoricalLabels(int(topics.max()) + 1)]
    sizes = [v.shape[1] for v in views]
    model = SpikeSlabMRD(len(topics), sizes, NUM_LATENTS, num_inducing=num_inducing, likelihood=likelihoods)
    initialize(model, views, "pca", torch.Generator().manual_seed(0))
    with torch.no_grad():
        for view, data in zip(list(model.views)[:2], views, strict=False):
            view.noise = noise_share * data.square().mean()
    with model.fix_switches(1.0):
        maximize_bound(model, views, steps, fixed=("noise",))
        maximize_bound(model, views, steps)
    with torch.no_grad():
        model.logits = torch.full_like(model.logits, 3.0)
    for done in range(rounds + 1):
        if done:
            maximize_bound(model, views, steps)
        bound, seconds = update_switches(model, views), time.process_time() - begin
        yield {
            "experiment": "retrieval with labels", "steps": steps, "iterations": done * steps, "bound": bound, "seconds": seconds,
            "num_inducing": num_inducing, "gamma": model.probability.tolist(),
            **scores_with_labels(Posterior(model, views), queries, topics, test_topics),
        }  # fmt: skip


def scores_with_labels(posterior: Posterior, queries: list[Tensor], topics: Tensor, truth: Tensor) -> dict[str, float]:
    """Mean average precision of queries by image and by text, by the probability of the same topic and by distance."""
    found = {}
    for name, c in (("image", 0), ("text", 1)):
        latents = posterior.infer({c: queries[c]}, steps=60)
        chances = posterior.response(latents, 2)
        found[f"{name}, same topic"] = float(average_precision(-chances[:, topics], truth, topics).mean())
        found[f"{name}, distance"] = float(average_precision(posterior.distances(latents), truth, topics).mean())
    return found
