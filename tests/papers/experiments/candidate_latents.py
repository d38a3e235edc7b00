"""Posteriors over candidate latents beside one most probable latent: errors, densities and intervals of images and of hidden halves.

python -m tests.papers.experiments.candidate_latents
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_truncated.gplvm import CandidateLatents
from pyro_truncated.gplvm.decoders.latents import infer_latents
from tests.papers.experiments.active_set_methods import Fit, Images, fit, images, train_sas

RESULTS = Path(__file__).parents[1] / "results"


def hidden_parts(x: Tensor, seed: int) -> dict[str, Tensor]:
    """Which pixels of images ``(M, D)`` are hidden: none, a random half, the lower half."""
    random = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    lower = torch.arange(x.shape[1]).expand_as(x) >= x.shape[1] // 2
    return {"none": torch.zeros_like(random), "random half": random, "lower half": lower}


def scores(truth: Tensor, mean: Tensor, variance: Tensor, is_hidden: Tensor) -> dict[str, float]:
    """Error, negative log density and cover of 95 % intervals of the hidden pixels, or of all where none is hidden."""
    chosen = is_hidden if bool(is_hidden.any()) else torch.ones_like(is_hidden)
    error, variance = (truth - mean)[chosen], variance.expand_as(mean)[chosen]
    density = ((2 * math.pi * variance).log() + error.square() / variance).mean() / 2
    inside = (error.abs() < 1.96 * variance.sqrt()).double().mean()
    return {"rmse": float(error.square().mean().sqrt()), "nlpd": float(density), "cover": float(inside)}


def one_latent(found: Fit, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        mean, variance = found.posterior.predict(infer_latents(found.posterior, x - found.loc, starts=2, steps=40))
    return mean + found.loc, variance


def rows(name: str, data: Images, predict: Any, seed: int) -> list[dict[str, Any]]:
    found = []
    for part, is_hidden in hidden_parts(data.x_test, seed).items():
        start = time.process_time()
        mean, variance = predict(data.x_test.masked_fill(is_hidden, math.nan))
        seconds = time.process_time() - start
        found.append({"method": name, "seed": seed, "hidden": part, "seconds": seconds, **scores(data.x_test, mean, variance, is_hidden)})
    return found


def run(seed: int, num_train: int = 3000, num_test: int = 500) -> list[dict[str, Any]]:
    """All methods on one split of MNIST, two latent dimensions."""
    data = images("mnist", num_train, num_test, seed)
    pyro.set_rng_seed(seed)
    decoder = train_sas(data.x, 200, 60, bayesian=False, jumps=True)
    decoder.condition_(data.x, 300, projected=True)
    start = time.process_time()
    candidates = CandidateLatents(decoder, data.x, generator=torch.Generator().manual_seed(seed))
    print(f"seed {seed}: temperature {candidates.temperature:.1f}, made in {time.process_time() - start:.1f} CPU s")
    posterior = decoder.posterior()
    most_probable = Fit(decoder.latents(data.x), posterior, decoder.loc, decoder.latents(data.x)[:0], 0.0)
    found = rows("SAS, one latent", data, lambda x: one_latent(most_probable, x), seed)
    found += rows("SAS, candidates", data, lambda x: candidates.predict(candidates.infer(x)), seed)
    found += rows("SAS, candidates and own latent", data, candidates.reconstruct, seed)
    for name, method, size, epochs in (("GP-LVM", "gplvm", 100, 400), ("VAE", "vae", 0, 100)):
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        other = fit(data, method, size, epochs)
        found += rows(name, data, lambda x, other=other: one_latent(other, x), seed)
    return found


HEAD = """# Posteriors over latents: intervals of what is hidden

    python -m tests.papers.experiments.candidate_latents

3000 images of MNIST to train on and 500 to test, two latent dimensions; means over {num} splits (seeds {seeds}). RMSE / negative log
density per pixel / share of pixels in 95 % intervals: of all pixels where none is hidden, else of the hidden ones. "One latent" predicts at
the most probable latent of an image; "candidates" (`CandidateLatents.predict`) from a truncated mixture over the latents of the training
images, with a noise for each pixel and a temperature learned on half-hidden training images; with its "own latent" (`reconstruct`), the
most probable latent of the image is one more component, whose share was chosen on a further split. The others have one noise for all
pixels, from which much of the difference in density comes. CPU seconds are for all 500 images.

| method | none hidden | random half hidden | lower half hidden | CPU s |
| --- | --- | --- | --- | --- |
"""


def table(found: list[dict[str, Any]]) -> str:
    """Means over the splits on which every method has been run."""

    def mean(method: str, part: str, what: str) -> float:
        values = [row[what] for row in found if row["method"] == method and row["hidden"] == part]
        return sum(values) / len(values)

    parts, lines = list(dict.fromkeys(row["hidden"] for row in found)), []
    for method in dict.fromkeys(row["method"] for row in found):
        cells = [f"{mean(method, p, 'rmse'):.4f} / {mean(method, p, 'nlpd'):.3f} / {mean(method, p, 'cover'):.3f}" for p in parts]
        seconds = sum(mean(method, p, "seconds") for p in parts) / len(parts)
        lines.append(f"| {method} | {' | '.join(cells)} | {seconds:.2f} |")
    seeds = sorted({row["seed"] for row in found})
    return HEAD.format(num=len(seeds), seeds=", ".join(map(str, seeds))) + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[20, 21, 22])
    parser.add_argument("--output", type=Path, default=RESULTS / "candidate_latents.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in args.seeds:
        with args.output.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in run(seed))
    found = [json.loads(line) for line in args.output.read_text().splitlines()]
    args.output.with_suffix(".md").write_text(table(found))


if __name__ == "__main__":
    main()
