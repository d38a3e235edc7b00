"""Learns objects that lie anywhere and hide each other.

Places are found by a scan or predicted by Gaussian processes.

    python examples/occlusive_components.py

writes objects.png (scenes, learned masks and objects), locations.png (errors of places, by selection) and free_energy.png.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib
import pyro
import torch
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, ClosedForm, Truncated_ELBO
from pyro_truncated.datasets import DatasetNotFoundError
from pyro_truncated.models import OcclusiveComponents
from pyro_truncated.scenes import (
    Objects,
    PlacementMoves,
    PlacementSelection,
    PlaceRegression,
    PlaceScan,
    RefinedPlaces,
    Scenes,
    coil_objects,
    colour_maps,
    generated_objects,
    match_objects,
    occluded_scenes,
)
from pyro_truncated.scenes.place_scan import PlaceAffinity
from pyro_truncated.search import SearchBatch

SELECTIONS = {
    "scan": "hand-crafted scan",
    "gp": "GP",
    "gp-every-5": "GP, refitted every 5 iterations",
    "gp-refined": "GP, then moved within a pixel by the scan",
    "gp-low-rank": "GP, incomplete Cholesky",
}


class Learned(NamedTuple):
    """What one way to select has led to."""

    model: OcclusiveComponents
    free_energies: list[float]
    distances: torch.Tensor


def affinity_of(selection: str, model: OcclusiveComponents, scan: PlaceScan, selected: int) -> PlaceAffinity:
    if selection == "scan":
        return scan
    options = {"gp": {"refit_every": 1}, "gp-low-rank": {"refit_every": 1, "rank": 100}}.get(selection, {"refit_every": 5})
    regression = PlaceRegression(model.canvas, inputs=colour_maps(), fit_steps=10, **options)
    return RefinedPlaces(regression, scan, selected) if selection == "gp-refined" else regression


def learn(args: argparse.Namespace, name: str, scenes: Scenes, objects: Objects) -> Learned:
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    size, template = tuple(scenes.data.shape[1:3]), tuple(objects.masks.shape[1:])
    model = OcclusiveComponents(args.learned, size, template).initialize(scenes.data)
    scan = PlaceScan(model.scene_parameters, model.canvas)
    affinity = affinity_of(name, model, scan, args.selected)
    selection = PlacementSelection(scan, args.selected)
    # The likelihood allocates no image per state, so many states can go through the model together.
    guide = AutoTruncated(model, num_states=args.states, memory_budget=2**34)
    elbo = Truncated_ELBO(selection + PlacementMoves(model.canvas.grid, parents=4, children=5))
    svi = SVI(model, guide, ClosedForm(model), elbo)
    free_energies = []
    for iteration in range(args.iterations):
        if iteration == args.warm_up:
            # From here on, Gaussian processes select without looking at the objects.
            selection.affinity = affinity
        free_energies.append(-svi.step(scenes.data) / len(scenes.data))
    batch = SearchBatch(guide.population(), lambda words: words, {"y": scenes.data})
    return Learned(model, free_energies, distances(affinity(batch).places[..., 0], model, scenes, objects))


def distances(places: torch.Tensor, model: OcclusiveComponents, scenes: Scenes, objects: Objects) -> torch.Tensor:
    """Returns distances in pixels of true objects to their inferred places."""
    match = match_objects(model.features, model.masks, objects)
    learned = match.similarity.argmax(1)
    shift = match.shift[torch.arange(len(learned)), learned]
    image, true = scenes.presence.nonzero(as_tuple=True)
    place, position = places[image, learned[true]], scenes.position[image, true]
    height, width = scenes.data.shape[1:3]
    down = (place // width - position // width - shift[true, 0] + height // 2) % height - height // 2
    right = (place % width - position % width - shift[true, 1] + width // 2) % width - width // 2
    return torch.hypot(down.float(), right.float())


def picture_of_objects(scenes: Scenes, objects: Objects, result: Learned, title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    model = result.model
    match = match_objects(model.features, model.masks, objects)
    count = max(len(model.masks), len(objects.masks))
    figure = Figure(figsize=(0.62 * count, 4.4), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[1, 2])
    for ax, image in zip(upper.subplots(1, 8).flat, scenes.data, strict=False):
        ax.imshow(image.clamp(0, 1).numpy())
        ax.set_axis_off()
    masks, features = model.masks.detach(), model.features.detach().clamp(0, 1)
    order = match.similarity.argmax(0).argsort()
    rows = [objects.features, masks[order], features[order], (features * (masks > 0.5).unsqueeze(-1))[order]]
    axes = lower.subplots(4, count)
    for row, pictures in zip(axes, rows, strict=True):
        for ax in row:
            ax.set_axis_off()
        for ax, image in zip(row, pictures, strict=False):
            ax.imshow(image.numpy(), vmin=0, vmax=1, cmap="gray")
    for row, label in zip(axes, ("true", "mask", "colour", "mask > 0.5"), strict=True):
        row[0].set_title(label, fontsize=8, loc="left")
    found = int(match.is_recovered().sum())
    figure.suptitle(f"scenes, and what was learned with the {title}: {found} of {len(objects.masks)} objects", fontsize=10)
    figure.savefig(path, dpi=80, facecolor="white")


def picture_of_errors(results: dict[str, Learned], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.4), layout="constrained")
    ax = figure.subplots()
    bins, width = torch.arange(16), 0.8 / len(results)
    for number, (name, result) in enumerate(results.items()):
        counts = torch.bincount(result.distances.clamp(max=15).round().long(), minlength=16)
        ax.bar(
            (bins + (number - len(results) / 2 + 0.5) * width).tolist(),
            (100 * counts / counts.sum()).tolist(),
            width,
            label=SELECTIONS[name],
        )
    ax.set(yscale="log", xlabel="distance to the true place in pixels (15: or more)", ylabel="% of objects")
    ax.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=80, facecolor="white")


def picture_of_free_energies(results: dict[str, Learned], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.4), layout="constrained")
    ax = figure.subplots()
    for name, result in results.items():
        ax.plot(range(1, len(result.free_energies) + 1), result.free_energies, label=SELECTIONS[name])
    ax.set(xlabel="iteration", ylabel="pseudo log likelihood per image")
    ax.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=80, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    generator = torch.Generator().manual_seed(args.seed)
    try:
        objects = generated_objects(args.objects, args.template, generator) if args.generated else coil_objects(args.objects)
    except DatasetNotFoundError as error:
        print(f"{error}\nusing generated objects")
        objects = generated_objects(args.objects, args.template, generator)
    scenes = occluded_scenes(objects, args.images, (args.size, args.size), presence=args.presence, generator=generator)
    print(f"{args.images} images of {args.size} x {args.size} pixels; {scenes.presence.sum() / args.images:.2f} objects in an image")
    results = {}
    for name in args.selections.split(","):
        start = time.monotonic()
        result = results[name] = learn(args, name, scenes, objects)
        found = int(match_objects(result.model.features, result.model.masks, objects).is_recovered().sum())
        print(
            f"{SELECTIONS[name]:32} objects found {found:2} of {len(objects.masks)}   free energy {result.free_energies[-1]:9.2f}   "
            f"places within a pixel {100 * float((result.distances < 1.5).double().mean()):5.1f} %   {time.monotonic() - start:6.1f} s"
        )
    args.output.mkdir(parents=True, exist_ok=True)
    last = list(results)[-1]
    picture_of_objects(scenes, objects, results[last], SELECTIONS[last], args.output / "objects.png")
    picture_of_errors(results, args.output / "locations.png")
    picture_of_free_energies(results, args.output / "free_energy.png")
    print(f"pictures: {args.output}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--selections", default="scan,gp-every-5,gp-refined", help=f"some of {', '.join(SELECTIONS)}, comma between")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--size", type=int, default=30, help="side of an image")
    parser.add_argument("--objects", type=int, default=16)
    parser.add_argument("--template", type=int, default=10, help="side of a generated object; pictures of real ones have 10 pixels")
    parser.add_argument("--generated", action="store_true", help="coloured blobs in the place of pictures of real objects")
    parser.add_argument("--presence", type=float, default=0.2, help="probability that an object is in an image")
    parser.add_argument("--learned", type=int, default=20, help="number of learned objects")
    parser.add_argument("--selected", type=int, default=5, help="number of objects selected for each image")
    parser.add_argument("--states", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=2, help="iterations in which every variant selects by the scan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if unknown := set(args.selections.split(",")) - set(SELECTIONS):
        parser.error(f"unknown selections {sorted(unknown)}; choose from {', '.join(SELECTIONS)}")
    if args.smoke:
        args.generated, args.images, args.size, args.template, args.objects, args.learned = True, 40, 10, 4, 3, 4
        args.selected, args.states, args.iterations, args.presence = 2, 8, 4, 0.4
    return args


if __name__ == "__main__":
    main(parse_args())
