"""Restoration from the damaged image alone, beside BM3D on the very same noisy images.

    python -m tests.papers.experiments.restoration damage --folder FOLDER            # writes the damaged images
    python -m tests.papers.experiments.restoration restore --folder FOLDER           # the defaults of this library, one line each
    python -m tests.papers.experiments.restoration restore_told --folder FOLDER      # the same, told the noise
    python tests/papers/experiments/restoration.py bm3d --folder FOLDER              # where the package bm3d is installed

Damaged images are NumPy files of the folder, with the truth; restored ones are written beside them, and what was found is appended to
``results.jsonl`` in the folder.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("house", "cameraman", "peppers", "monarch", "barbara")
NOISES = (15, 25, 50)


def truth(name: str) -> np.ndarray:
    """Grey values of an image; of Barbara the middle 256x256."""
    from pyro_truncated.datasets import load

    image = load("denoising_images")[name].astype(np.float32)
    return image[128:384, 128:384] if name == "barbara" else image


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Standard normal numbers of a seed of torch's generator."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).numpy()


def damaged(names: list[str], noises: list[int], seeds: list[int], missing: list[float]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of files and what they hold: noisy images, and those with missing pixels, which have no noise."""
    for name in names:
        image = truth(name)
        for seed in seeds:
            for noise in noises:
                yield (
                    f"{name}_noise{noise}_seed{seed}",
                    {"truth": image, "damaged": image + noise * normal(image.shape, seed), "noise": noise},
                )
            for share in missing:
                hidden = np.random.default_rng(seed).random(image.shape[:2]) < share
                holes = np.where(hidden if image.ndim == 2 else hidden[..., None], np.nan, image).astype(np.float32)
                yield f"{name}_missing{100 * share:.0f}_seed{seed}", {"truth": image, "damaged": holes, "noise": 0}


def decibels(image: np.ndarray, truth: np.ndarray) -> float:
    """Peak signal to noise ratio, of 255 grey values, without clipping."""
    return float(10 * np.log10(255**2 / np.mean((image.astype(np.float64) - truth) ** 2)))


def restore(image: np.ndarray, noise: float) -> tuple[np.ndarray, dict[str, Any]]:
    """By this library with its defaults; the noise is not told."""
    return restore_told(image, None)


def restore_told(image: np.ndarray, noise: float | None) -> tuple[np.ndarray, dict[str, Any]]:
    """The same with the noise told."""
    import torch

    from pyro_truncated.restoration import denoise, inpaint

    torch.set_num_threads(1)
    torch.manual_seed(0)
    restored = inpaint(image, progress=False) if np.isnan(image).any() else denoise(image, noise, progress=False)
    return restored.image.numpy(), {"noise_learned": restored.noise}


def bm3d(image: np.ndarray, noise: float) -> tuple[np.ndarray, dict[str, Any]]:
    """By the package of its authors with its default profile; the noise is told."""
    import bm3d as package

    function = package.bm3d if image.ndim == 2 else package.bm3d_rgb
    return function(image.astype(np.float64), noise), {}


def run(method: Any, folder: Path, pattern: str) -> None:
    for path in sorted(folder.glob(f"{pattern}.npz")):
        if (folder / f"{method.__name__}_{path.stem}.npy").exists():
            continue
        data = np.load(path)
        start = time.process_time()
        image, extra = method(data["damaged"], float(data["noise"]))
        row = {"method": method.__name__, "image": path.stem, "psnr": decibels(image, data["truth"]), "cpu": time.process_time() - start}
        hidden = np.isnan(data["damaged"])
        if hidden.any():
            extra["psnr_of_hidden"] = decibels(image[hidden], data["truth"][hidden])
        np.save(folder / f"{method.__name__}_{path.stem}.npy", image.astype(np.float32))
        with (folder / "results.jsonl").open("a") as file:
            file.write(json.dumps({**row, **extra}) + "\n")
        print(f"{row['method']:8} {row['image']:32} {row['psnr']:.3f} dB {row['cpu']:.0f} CPU s {extra}", flush=True)


def table(folder: Path) -> None:
    """Prints a row for each image and noise, with the decibels of all seeds, and one for the mean over the images of what both restored."""
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    ours, theirs = ({row["image"]: row for row in rows if row["method"] == name} for name in ("restore", "bm3d"))
    both = sorted((image.rsplit("_", 2) for image in ours if image in theirs), key=lambda parts: parts[1])
    for damage in dict.fromkeys(damage for _, damage, _ in both):
        images = ["_".join(parts) for parts in both if parts[1] == damage]
        for name in dict.fromkeys(image.rsplit("_", 2)[0] for image in images):
            print(line(name, damage, [image for image in images if image.startswith(name)], ours, theirs))
        print(line("mean", damage, images, ours, theirs))


def line(name: str, damage: str, images: list[str], ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """A row of the table: the decibels of up to three images, and means."""
    both = [np.array([found[image]["psnr"] for image in images]) for found in (ours, theirs)]
    shown = [", ".join(f"{one:.2f}" for one in found) if len(images) <= 3 else f"{found.mean():.2f}" for found in both]
    noise, seconds = ([ours[image][key] for image in images] for key in ("noise_learned", "cpu"))
    difference, times = (both[0] - both[1]).mean(), f"{min(seconds):.0f} to {max(seconds):.0f}"
    return f"| {name} | {damage} | {shown[0]} | {shown[1]} | {difference:+.2f} | {np.mean(noise):.1f} | {times} | {len(images)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("damage", "restore", "restore_told", "bm3d", "table"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--names", nargs="+", default=list(NAMES))
    parser.add_argument("--noises", nargs="*", type=int, default=list(NOISES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--missing", nargs="*", type=float, default=[])
    parser.add_argument("--only", default="*", help="a pattern of file names without ending")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.task == "damage":
        for name, data in damaged(args.names, args.noises, args.seeds, args.missing):
            np.savez(args.folder / f"{name}.npz", **data)
    elif args.task == "table":
        table(args.folder)
    else:
        run({"restore": restore, "restore_told": restore_told, "bm3d": bm3d}[args.task], args.folder, args.only)


if __name__ == "__main__":
    main()
