# ruff: noqa: E501
"""Reproduces section 5.3 of "GP-select: Accelerating EM using adaptive subspace preselection" (2017): objects at unknown places.

    python -m tests.papers.experiments.occlusive_components --seeds 5

Every variant learns from the same scenes and from the same start; they differ in how candidate places are found.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, Truncated_ELBO
from pyro_truncated.models import OcclusiveComponents
from pyro_truncated.scenes import (
    Match,
    PlacementMoves,
    PlacementSelection,
    PlaceRegression,
    PlaceScan,
    RefinedPlaces,
    Scenes,
    coil_objects,
    colour_maps,
    match_objects,
    occluded_scenes,
)
from pyro_truncated.scenes.occlusion import object_places
from pyro_truncated.scenes.place_scan import Candidates, PlaceAffinity
from pyro_truncated.search import SearchBatch

NUM_OBJECTS, NUM_LEARNED, NUM_SELECTED = 16, 20, 5
WARM_UP = 2
FARTHEST = 8


@dataclasses.dataclass(frozen=True)
class Variant:
    """How candidate places are found; ``name`` is that of the paper."""

    name: str
    scan: bool = False
    refit_every: int = 1
    rank: int | None = None
    pixels: bool = False
    refined: bool = False


VARIANTS = {
    "scan": Variant("hand-crafted scan", scan=True),
    "gp": Variant("GP"),
    "gp-every-5": Variant("GP, refitted every 5 iterations", refit_every=5),
    "gp-refined": Variant("GP, every 5, moved to the best place within a pixel", refit_every=5, refined=True),
    "gp-low-rank": Variant("GP, incomplete Cholesky (rank 200)", rank=200),
    "gp-pixels": Variant("GP on raw pixels, every 5", refit_every=5, pixels=True),
}


class Clock:
    """CPU seconds spent in named parts since the last reading."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return timed

    def read(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return {name: round(value, 3) for name, value in seconds.items()}


def make_affinities(variant: Variant, model: OcclusiveComponents) -> tuple[PlaceScan, PlaceAffinity]:
    """The scan, and what the variant selects with after the warm-up."""
    scan = PlaceScan(model.scene_parameters, model.canvas)
    if variant.scan:
        return scan, scan
    inputs = None if variant.pixels else colour_maps()
    regression = PlaceRegression(model.canvas, refit_every=variant.refit_every, rank=variant.rank, inputs=inputs, fit_steps=10)
    return scan, RefinedPlaces(regression, scan, NUM_SELECTED) if variant.refined else regression


def regression_of(affinity: PlaceAffinity) -> PlaceRegression | None:
    inner = affinity.affinity if isinstance(affinity, RefinedPlaces) else affinity
    return inner if isinstance(inner, PlaceRegression) else None


def run(variant: str, seed: int, num_data: int = 2000, iterations: int = 12, num_states: int = 32) -> dict[str, Any]:
    """One run."""
    objects = coil_objects(NUM_OBJECTS)
    scenes = occluded_scenes(objects, num_data, generator=torch.Generator().manual_seed(seed))
    pyro.set_rng_seed(1000 + seed)
    pyro.clear_param_store()
    clock = Clock()
    model = OcclusiveComponents(NUM_LEARNED)
    with clock.part("start"):
        model.initialize(scenes.data)
    scan, affinity = make_affinities(VARIANTS[variant], model)
    selection = PlacementSelection(clock.wrap("selection", scan), NUM_SELECTED)
    if regression := regression_of(affinity):
        regression._fit = clock.wrap("fit", regression._fit)  # type: ignore[method-assign]
        regression._new_influence = clock.wrap("factorisation", regression._new_influence)  # type: ignore[method-assign]
    model.sufficient_statistics = clock.wrap("statistics", model.sufficient_statistics)  # type: ignore[method-assign]
    moves = PlacementMoves(model.canvas.grid, parents=4, children=5)
    # The likelihood allocates no image per state, so many states can go through the model together.
    guide = AutoTruncated(model, num_states=num_states, memory_budget=2**34)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(selection + moves))
    history = []
    at_start = int(match_objects(model.features, model.masks, objects).is_recovered().sum())
    for iteration in range(iterations):
        if iteration == WARM_UP:
            selection.affinity = clock.wrap("selection", affinity)
        with clock.part("iteration"):
            free_energy = -svi.step(scenes.data) / num_data
        found = int(match_objects(model.features, model.masks, objects).is_recovered().sum())
        history.append({"free_energy": free_energy, "recovered": found, **clock.read()})
        print(variant, seed, iteration, history[-1], flush=True)
    match = match_objects(model.features, model.masks, objects)
    result = {"variant": variant, "seed": seed, "num_data": num_data, "iterations": iterations, "at_start": at_start}
    result |= {"recovered": history[-1]["recovered"], "free_energy": history[-1]["free_energy"], "history": history}
    return result | evaluate(scan, affinity, guide, model, scenes, match)


@torch.no_grad()
def evaluate(
    scan: PlaceScan, affinity: PlaceAffinity, guide: AutoTruncated, model: OcclusiveComponents, scenes: Scenes, match: Match
) -> dict[str, Any]:
    """Errors of places: of the selector as it ends up, and of the posterior's mode; and the time that a pass over all images takes."""
    population = guide.population()
    batch = SearchBatch(population, lambda words: words, {"y": scenes.data})
    result: dict[str, Any] = {}
    seconds = {"scan": _seconds(lambda: scan(batch))}
    if regression := regression_of(affinity):
        regression.refit_every = 10**9
        seconds["gp"] = _seconds(lambda: affinity(batch))
        own = copy.copy(regression)
        own.leave_out = False
        own._influence = PlaceRegression._new_influence(own, own.regression)  # type: ignore[arg-type]
        result["errors_own"] = errors(own(batch), scenes, match)
    found = affinity(batch)
    result |= {"errors": errors(found, scenes, match), "recall": recall(found, scenes, match), "pass_seconds": seconds}
    mode = dataclasses.replace(population, words=population.mode().unsqueeze(1), log_joint=population.log_joint[:, :1])
    places = object_places(mode, model.num_objects)[0].squeeze(1).unsqueeze(-1)
    present = Candidates((places >= 0).float(), places.clamp(min=0).long())
    return result | {"errors_mode": errors(present, scenes, match, only_present=True)}


def _seconds(function: Callable[[], Any], times: int = 3) -> float:
    """The least CPU seconds of a few calls."""
    found = []
    for _ in range(times):
        start = time.process_time()
        function()
        found.append(time.process_time() - start)
    return min(found)


def errors(found: Candidates, scenes: Scenes, match: Match, only_present: bool = False) -> list[int]:
    """Histogram of the distances, rounded to pixels, of the objects in the scenes to the best place of the learned object they match.

    The last bin counts all distances from ``FARTHEST`` on, and objects that are not found at all.
    """
    height, width = scenes.data.shape[1:3]
    learned = match.similarity.argmax(1)
    shift = match.shift[torch.arange(len(learned)), learned]
    image, true = scenes.presence.nonzero(as_tuple=True)
    place, position = found.places[image, learned[true], 0], scenes.position[image, true]
    down = place // width - position // width - shift[true, 0] + height // 2
    right = place % width - position % width - shift[true, 1] + width // 2
    distance = torch.hypot((down % height - height // 2).float(), (right % width - width // 2).float())
    if only_present:
        distance = distance.masked_fill(found.scores[image, learned[true], 0] == 0, torch.inf)
    bins = distance.clamp(max=FARTHEST).round().long()
    return torch.bincount(bins, minlength=FARTHEST + 1).tolist()


def recall(found: Candidates, scenes: Scenes, match: Match) -> float:
    """Share of the objects in the scenes whose learned object is among the selected."""
    chosen = found.scores[..., 0].topk(NUM_SELECTED, 1).indices
    image, true = scenes.presence.nonzero(as_tuple=True)
    learned: Tensor = match.similarity.argmax(1)
    return float((chosen[image] == learned[true].unsqueeze(-1)).any(1).double().mean())


# --- tables ---

SETTINGS = """# Objects at unknown places (GP-select 2017, section 5.3)

| setting | value |
| --- | --- |
| data | N images of 30 x 30 pixels; each of 16 COIL-100 objects (10 x 10, three colours) with probability 0.2, random positions and depth order, noise 0.05 |
| model | H=20 objects with exclusive masks at all 900 places, 32 states, 20 evolutionary moves per image and iteration |
| selection | H'=5 objects per image with one candidate place each; the first two iterations select by the scan |
| recovered | normalised correlation of features times masks of at least 0.9, up to translation |
| location errors | distance to the best place of the matching object; *leave-one-out* predicts each image from the posteriors of the others |
"""


def share(counts: list[int], upto: int) -> float:
    return 100 * sum(counts[: upto + 1]) / sum(counts)


def table(results: list[dict[str, Any]]) -> list[str]:
    """Markdown: one row per variant."""
    lines = [
        "| selection | N | iterations | seeds | recovered at the start | recovered of 16 | F per image | exact place %, leave-one-out | "
        "within 1 pixel % | recall@5 % | exact place %, with its own | exact place %, posterior | CPU s per iteration | "
        "selection pass, CPU s | scan pass, same run | fit and factorisation, CPU s |",
        "|" + " --- |" * 16,
    ]  # fmt: skip
    for key in sorted({(r["variant"], r["num_data"], r["iterations"]) for r in results}, key=lambda k: list(VARIANTS).index(k[0])):
        group = [r for r in results if (r["variant"], r["num_data"], r["iterations"]) == key]
        each = {name: [r[name] for r in group] for name in ("errors", "errors_mode", "recall", "free_energy", "recovered", "at_start")}
        own = [share(r["errors_own"], 0) for r in group if "errors_own" in r]
        late = [h for r in group for h in r["history"][WARM_UP:]]
        fits = [h["fit"] + h["factorisation"] for h in late if "fit" in h]
        passes = [r["pass_seconds"].get("gp", r["pass_seconds"]["scan"]) for r in group]
        lines.append(
            f"| {VARIANTS[key[0]].name} | {key[1]} | {key[2]} | {', '.join(str(r['seed']) for r in group)} | {_list(each['at_start'])} | "
            f"{_list(each['recovered'])} | {statistics.mean(each['free_energy']):.1f} | "
            f"{_mean([share(e, 0) for e in each['errors']])} | {_mean([share(e, 1) for e in each['errors']])} | "
            f"{_mean([100 * r for r in each['recall']])} | {_mean(own)} | {_mean([share(e, 0) for e in each['errors_mode']])} | "
            f"{statistics.median(h['iteration'] for h in late):.2f} | {min(passes):.2f} | "
            f"{min(r['pass_seconds']['scan'] for r in group):.2f} | {_mean(fits)} |"
        )
    return lines


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values))


def _mean(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f}" if values else "-"


def shares_of_time(results: list[dict[str, Any]]) -> list[str]:
    """Where the time of an iteration goes, per variant."""
    lines = ["| selection | whole iteration, CPU s | selection | of it fit | of it factorisation | statistics | scoring and the rest |"]
    lines.append("|" + " --- |" * 7)
    for variant in VARIANTS:
        late = [h for r in results if r["variant"] == variant for h in r["history"][WARM_UP:]]
        if late:
            means = {name: statistics.mean(h.get(name, 0.0) for h in late) for name in PARTS}
            rest = means["iteration"] - means["selection"] - means["statistics"]
            lines.append(f"| {VARIANTS[variant].name} | " + " | ".join(f"{means[name]:.2f}" for name in PARTS) + f" | {rest:.2f} |")
    return lines


PARTS = ("iteration", "selection", "fit", "factorisation", "statistics")


def histograms(results: list[dict[str, Any]]) -> list[str]:
    """Percentages of location errors, per variant."""
    lines = ["| selection | errors of | " + " | ".join(map(str, range(FARTHEST))) + f" | {FARTHEST} or more, or absent |"]
    lines.append("|" + " --- |" * (FARTHEST + 3))
    for variant in VARIANTS:
        group = [r for r in results if r["variant"] == variant]
        for name, what in (("errors", "selection"), ("errors_own", "selection with its own"), ("errors_mode", "posterior")):
            counts = [r[name] for r in group if name in r]
            if counts:
                total = torch.tensor(counts, dtype=torch.float64).sum(0)
                row = " | ".join(f"{v:.2f}" for v in (100 * total / total.sum()).tolist())
                lines.append(f"| {VARIANTS[variant].name} | {what} | {row} |")
    return lines


# What is written by hand from this heading on is kept.
REMARKS = "## What this shows"


def write_tables(results: list[dict[str, Any]], file: Path, machine: str) -> None:
    lines = [
        SETTINGS,
        f"Made on {time.strftime('%Y-%m-%d')}, {machine}, by",
        "",
        "    python -m tests.papers.experiments.occlusive_components",
        "",
    ]
    lines += [
        "## Recovery, accuracy and time",
        "",
        *table(results),
        "",
        "## Where the time of an iteration goes",
        "",
        *shares_of_time(results),
        "",
    ]
    lines += ["## Location errors in pixels, per cent of all objects in all images", "", *histograms(results), ""]
    written = file.read_text() if file.exists() else ""
    if REMARKS in written:
        lines += [written[written.index(REMARKS) :].strip(), ""]
    file.write_text("\n".join(lines))


def _done(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--num-data", type=int, default=2000)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results" / "occlusive_components.jsonl")
    parser.add_argument("--table", type=Path, default=Path(__file__).parents[1] / "results" / "occlusive_components.md")
    parser.add_argument("--machine", default=f"a machine of {os.cpu_count()} CPU cores", help="the machine in words")
    parser.add_argument("--only-table", action="store_true", help="write the table of the results already in the output file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    jobs = [] if args.only_table else [(variant, seed) for seed in range(args.seeds) for variant in args.variant]
    for variant, seed in jobs:
        key = (variant, seed, args.num_data, args.iterations)
        if key not in {(r["variant"], r["seed"], r["num_data"], r["iterations"]) for r in _done(args.output)}:
            result = run(variant, seed, args.num_data, args.iterations)
            with args.output.open("a") as file:
                file.write(json.dumps(result) + "\n")
    write_tables(_done(args.output), args.table, args.machine)


if __name__ == "__main__":
    main()
