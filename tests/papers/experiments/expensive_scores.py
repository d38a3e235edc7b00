"""Where GP-select pays: scores and time that searches need, against the cost of a score, for a renderer of translucent objects.

python -m tests.papers.experiments.expensive_scores --output results.jsonl     # one line for each search and cost
python -m tests.papers.experiments.expensive_scores --picture results.jsonl where_gp_select_pays.png
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, GPSelect, Population
from pyro_truncated.search import LearnedFlips, Preselection, Search, SearchBatch, Singletons, SurrogateSearch

SIDE, NUM_STATES, NOISE, PRIOR = 16, 16, 0.05, 0.12
NUM_NEW = 200
# Rays that are followed at a time: what fits into the cache, so that a score costs the same whatever a search asks for at once.
BLOCK = 2**17
# Free energies within so many nats per image of the log joint of the states that made it are good.
SLACK = 1.0


class Renderer:
    """Images of translucent discs that lie over each other, each pixel the mean of ``detail ** 2`` rays.

    Attributes:
        num_scores: states rendered so far.
    """

    def __init__(self, num_objects: int, detail: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_objects, self.detail, self.num_scores = num_objects, detail, 0
        centre, radius = torch.rand(num_objects, 2, generator=generator), 0.1 + 0.1 * torch.rand(num_objects, generator=generator)
        grid = (torch.arange(SIDE * detail) + 0.5) / (SIDE * detail)
        place = torch.cartesian_prod(grid, grid).reshape(SIDE, detail, SIDE, detail, 2).transpose(1, 2).reshape(-1, 2)
        distance = (place - centre.unsqueeze(1)).norm(dim=-1) / radius.unsqueeze(1)
        self.opacity = 0.8 * torch.sigmoid(12 * (1 - distance))
        self.shade = torch.rand(num_objects, generator=generator)

    def __call__(self, states: Tensor) -> Tensor:
        """Images ``(..., SIDE ** 2)`` of states ``(..., H)``, the first object in front."""
        self.num_scores += states[..., 0].numel()
        blocks = states.flatten(0, -2).split(max(1, BLOCK // self.opacity.shape[1]))
        return torch.cat([self._rendered(block) for block in blocks]).unflatten(0, states.shape[:-1])

    def _rendered(self, states: Tensor) -> Tensor:
        passed = torch.ones(*states.shape[:-1], self.opacity.shape[1])
        image = torch.zeros_like(passed)
        for on, opacity, shade in zip(states.unbind(-1), self.opacity, self.shade, strict=True):
            hidden = on.unsqueeze(-1) * opacity * passed
            image += shade * hidden
            passed -= hidden
        return (image + 0.5 * passed).unflatten(-1, (SIDE**2, -1)).mean(-1)


class Network(Renderer):
    """Images of a random network of two hidden layers of ``1024 * detail`` units: a decoder whose latents interact in any way."""

    def __init__(self, num_objects: int, detail: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_objects, self.detail, self.num_scores = num_objects, detail, 0
        sizes = num_objects, 1024 * detail, 1024 * detail, SIDE**2
        self.layers = [torch.randn(m, n, generator=generator) * (2 / m) ** 0.5 for m, n in itertools.pairwise(sizes)]

    def __call__(self, states: Tensor) -> Tensor:
        """Images ``(..., SIDE ** 2)`` of states ``(..., H)``."""
        self.num_scores += states[..., 0].numel()
        first, second, last = self.layers
        return ((states @ first).relu() @ second).relu() @ last


RENDERERS: dict[str, type[Renderer]] = {"discs": Renderer, "network": Network}


def model_of(renderer: Renderer) -> Callable[[Tensor], None]:
    def model(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((renderer.num_objects,), PRIOR)).to_event(1))
            pyro.sample("y", dist.Normal(renderer(s), NOISE).to_event(1), obs=y)

    return model


def images(renderer: Renderer, num_data: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images, and the log joints of the states that made them."""
    generator = torch.Generator().manual_seed(seed)
    states = (torch.rand(num_data, renderer.num_objects, generator=generator) < PRIOR).float()
    clean = renderer(states)
    y = clean + NOISE * torch.randn(clean.shape, generator=generator)
    prior = dist.Bernoulli(torch.tensor(PRIOR)).log_prob(states).sum(1)
    return y, prior + dist.Normal(clean, NOISE).log_prob(y).sum(1)


class Watched(Search):
    """A search that notes after every step how many scores and CPU seconds it took, and the mean free energy; rests at a goal."""

    def __init__(self, search: Search, renderer: Renderer, num_data: int, max_scores: float, goal: float) -> None:
        self.search, self.renderer, self.num_data, self.max_scores, self.goal = search, renderer, num_data, max_scores, goal
        self.before, self.began = renderer.num_scores, time.process_time()
        self.curve: list[tuple[float, float, float]] = []

    @property
    def takes_moments(self) -> bool:
        return self.search.takes_moments

    def propose(self, batch: SearchBatch) -> Population:
        return self.search.propose(batch)

    def step(self, batch: SearchBatch) -> Population:
        if self.curve and (self.curve[-1][2] >= self.goal or self.curve[-1][0] >= self.max_scores):
            return batch.population
        population = self.search.step(batch)
        scores = (self.renderer.num_scores - self.before) / self.num_data
        self.curve.append((scores, time.process_time() - self.began, float(population.free_energy().mean())))
        return population

    def summary(self) -> dict[str, object]:
        scores, seconds, reached = self.curve[-1]
        return {"scores": scores, "cpu": seconds, "free_energy": reached, "goal": self.goal, "curve": self.curve}


def evolution() -> Search:
    return EvolutionarySearch(5, 4, 1, crossover=True)


SEARCHES: dict[str, Callable[[], Search]] = {
    "surrogate": lambda: SurrogateSearch(8),
    "evolution": evolution,
    "evolution, sparse flips": lambda: EvolutionarySearch(5, 4, 1, mutation="sparseflips"),
    "singletons": lambda: Preselection(Singletons(), 8),
    "GP-select": lambda: GPSelect(8, kernel="rbf", refit_every=5),
    "learned flips": lambda: LearnedFlips(8),
    "singletons + evolution": lambda: Preselection(Singletons(), 6) + evolution(),
    "GP-select + evolution": lambda: GPSelect(6, kernel="rbf", refit_every=5) + evolution(),
    "learned flips + evolution": lambda: LearnedFlips(8) + EvolutionarySearch(4, 2, 1),
}


def run(
    name: str,
    num_data: int,
    num_objects: int,
    detail: int,
    max_scores: float,
    seed: int = 0,
    num_new: int = NUM_NEW,
    kind: str = "discs",
) -> dict[str, object]:
    """One search on images, then on new ones, until the goal is reached or so many scores per image are spent."""
    pyro.set_rng_seed(seed)
    renderer, search = RENDERERS[kind](num_objects, detail, seed), SEARCHES[name]()
    y, truth = images(renderer, num_data + num_new, seed)
    guide = AutoTruncated(model_of(renderer), num_states=NUM_STATES)
    batch = guide.make_batch(y[:num_data])
    watched = Watched(search, renderer, num_data, max_scores, float(truth[:num_data].mean()) - SLACK)
    batch.search_(watched, 10_000)
    later = Watched(search, renderer, num_new, max_scores, float(truth[num_data:].mean()) - SLACK)
    guide.infer(y[num_data:], later, 10_000)
    begin = time.process_time()
    renderer(torch.ones(200, num_objects))
    cost = (time.process_time() - begin) / 200
    setting = {"search": name, "renderer": kind, "data": num_data, "objects": num_objects, "detail": detail, "seed": seed}
    return {**setting, "cost": cost, "new": num_new, **watched.summary(), **{f"new_{key}": value for key, value in later.summary().items()}}


def picture(lines: Sequence[dict[str, object]], file: Path) -> None:
    """Left: free energy against scores. Right: CPU time to the goal against the cost of a score, from scores and overhead; marks as run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
    costs = [10 ** (exponent / 4) for exponent in range(-22, 1)]
    for number, name in enumerate(SEARCHES):
        for line in lines:
            if line["search"] == name and line["detail"] == 1:
                scores, _, energies = zip(*line["curve"], strict=True)
                left.plot(scores, [line["goal"] - energy for energy in energies], color=f"C{number}", label=name)
                if line["free_energy"] >= line["goal"]:
                    overhead = max(0.0, line["cpu"] / line["data"] - line["scores"] * line["cost"])
                    right.plot(costs, [overhead + line["scores"] * cost for cost in costs], color=f"C{number}", label=name)
                if name in ("learned flips", "surrogate"):
                    later = line["new_cpu"] / line.get("new", NUM_NEW) - line["new_scores"] * line["cost"]
                    times = [max(0.0, later) + line["new_scores"] * cost for cost in costs]
                    right.plot(costs, times, "--", color=f"C{number}", label=f"{name}, later images")
            elif line["search"] == name and line["free_energy"] >= line["goal"]:
                right.plot(line["cost"], line["cpu"] / line["data"], "s" if line["renderer"] == "network" else "o", color=f"C{number}")
    left.set(xscale="log", yscale="log", ylim=(0.5, 1000), xlabel="scores per image", ylabel="nats per image below the goal")
    right.set(xscale="log", yscale="log", xlabel="CPU seconds of a score", ylabel="CPU seconds per image to the goal")
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=int, default=500)
    parser.add_argument("--new", type=int, default=NUM_NEW, help="images that come later")
    parser.add_argument("--objects", type=int, default=40)
    parser.add_argument("--renderer", default="discs", choices=list(RENDERERS))
    parser.add_argument("--details", type=int, nargs="+", default=[1])
    parser.add_argument("--searches", nargs="+", default=list(SEARCHES))
    parser.add_argument("--max-scores", type=float, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path, nargs=2)
    args = parser.parse_args()
    if args.picture:
        picture([json.loads(line) for line in args.picture[0].read_text().splitlines()], args.picture[1])
        return
    for detail in args.details:
        for name in args.searches:
            found = run(name, args.data, args.objects, detail, args.max_scores, args.seed, args.new, args.renderer)
            print({key: value for key, value in found.items() if not key.endswith("curve")}, flush=True)
            if args.output:
                with args.output.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
