"""Learns a dictionary from natural image patches and writes a report.

Every patch is explained as a sum of a few out of many fields, each present or absent. The posterior over the 2^H on/off patterns of a patch
is cut down to a population of the best ones. An evolutionary search keeps improving it, and the dictionary follows in closed form.

    python examples/natural_images.py --output report

Killed and started again, it goes on from its last checkpoint to the numbers of an uninterrupted run.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib
import pyro
import torch
from natural_images_report import write
from pyro.infer import SVI
from torch import Tensor
from torch.nn.functional import avg_pool2d
from tqdm import tqdm

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.datasets import DatasetNotFoundError, Whitening, clamp_brightest, natural_images, whitened_patches
from pyro_truncated.models import BinarySparseCoding
from pyro_truncated.training.checkpoint import load_checkpoint, save_checkpoint

SOURCES = ("vanhateren", "hyvarinen", "sklearn", "generated")


class Data(NamedTuple):
    """Returns whitened patches ``y``, and a region that is not among them."""

    source: str
    y: Tensor
    whitening: Whitening
    region: Tensor


def load_images(source: str | None) -> tuple[str, list[Tensor]]:
    for candidate in [source] if source else SOURCES:
        try:
            images = natural_images(candidate)
            # The finest scale of these two photographs is noise and compression.
            return candidate, [avg_pool2d(image[None], 2)[0] for image in images] if candidate == "sklearn" else images
        except (DatasetNotFoundError, ImportError):
            if source:
                raise
    raise AssertionError("generated images can always be had")


def prepare(args: argparse.Namespace) -> Data:
    source, images = load_images(args.source)
    images = [clamp_brightest(image, 0.02) for image in images]
    height, width = 8 * args.patch, 12 * args.patch
    # The right edge of the first image is kept apart; of it, the piece with most contrast.
    strip, images[0] = images[0][:, -width:], images[0][:, :-width]
    pieces = strip[: len(strip) // height * height].unflatten(0, (-1, height))
    region = pieces[pieces.flatten(1).std(1).argmax()]
    generator = torch.Generator().manual_seed(args.seed)
    y, whitening = whitened_patches(images, args.patch, args.patches, generator, clamp=0.0)
    return Data(source, y, whitening, region)


def make_svi(args: argparse.Namespace, y: Tensor) -> SVI:
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    model = BinarySparseCoding(args.patch**2, args.latents).initialize(y)
    # Fields that start as faint patches can be shared; full ones each explain the patch they came from, and little else.
    model.weight = 0.3 * model.weight.detach()
    guide = AutoTruncated(model, num_states=args.states)
    search = EvolutionarySearch(args.parents, generations=args.generations, crossover=True, mutation="sparseflips")
    cooling = 0.6 * args.iterations
    elbo = Truncated_ELBO(search, temperature=lambda step: 1 + (args.temperature - 1) * max(0.0, 1 - step / cooling))
    return SVI(model, guide, ClosedForm(model), elbo)


def train(args: argparse.Namespace, svi: SVI, data: Data) -> dict[str, list[float]]:
    """Trains, from the checkpoint if there is one; returns the record."""
    path = args.output / "checkpoint.pt"
    hidden = {"output", "fresh", "checkpoint_every"}
    settings = {name: value for name, value in vars(args).items() if name not in hidden} | {"source": data.source}
    if args.fresh:
        path.unlink(missing_ok=True)
    history: dict[str, list[float]] = {"free_energy": [], "active": [], "noise": [], "seconds": []}
    if path.exists():
        try:
            history = load_checkpoint(path, svi, settings=settings)
        except ValueError as error:
            error.add_note("Or give --fresh to start over.")
            raise
        print(f"{path}: {len(history['seconds'])} of {args.iterations} iterations done already (--fresh starts over)")
    saved = time.monotonic()
    with tqdm(total=args.iterations, initial=len(history["seconds"]), unit="it") as progress:
        while len(history["seconds"]) < args.iterations:
            start = time.monotonic()
            loss = svi.step(data.y)
            history["free_energy"].append(-loss / len(data.y))
            history["active"].append(svi.model.prior.item() * args.latents)
            history["noise"].append(svi.model.scale.item())
            history["seconds"].append(time.monotonic() - start)
            progress.set_postfix_str(f"free energy per patch {history['free_energy'][-1]:.2f}, {history['active'][-1]:.1f} fields active")
            progress.update()
            if time.monotonic() - saved >= args.checkpoint_every or len(history["seconds"]) == args.iterations:
                save_checkpoint(path, svi, history=history, settings=settings)
                saved = time.monotonic()
    return history


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    args.output.mkdir(parents=True, exist_ok=True)
    data = prepare(args)
    print(f"{len(data.y)} whitened patches of {args.patch} x {args.patch} pixels from {data.source!r}; {args.latents} latents")
    svi = make_svi(args, data.y)
    history = train(args, svi, data)
    numbers, page = write(args, svi, data, history)
    for name, value in numbers.items():
        print(f"{name}: {value}")
    print(f"report: {page}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("report"), help="folder of the report and the checkpoint")
    parser.add_argument("--source", choices=SOURCES, help="images to use; without a choice the first of these that can be had")
    parser.add_argument("--patches", type=int, default=12_000, help="number of patches, N")
    parser.add_argument("--patch", type=int, default=12, help="side of a patch in pixels")
    parser.add_argument("--latents", type=int, default=144, help="number of fields in the dictionary, H")
    parser.add_argument("--states", type=int, default=50, help="states per patch, S")
    parser.add_argument("--parents", type=int, default=6)
    parser.add_argument("--generations", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=180)
    parser.add_argument(
        "--temperature", type=float, default=4.0, help="temperature at the start; falls to 1 over the first 60 %% of the run"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--fresh", action="store_true", help="start over, whatever checkpoint there is")
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.source, args.patches, args.patch, args.latents, args.states, args.iterations = (
            "generated",
            400,
            6,
            20,
            12,
            min(args.iterations, 20),
        )
    return args


if __name__ == "__main__":
    main(parse_args())
