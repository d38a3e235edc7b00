"""In-painting beside published numbers, on the pictures that they were published for.

    python -m tests.papers.experiments.inpainting --pictures FOLDER      # measures what the results do not have yet, and prints the table

The folder holds three pictures of the authors of BPFA (GitHub, mingyuanzhou/mingyuanzhou.github.io): ``Cameraman256.png`` and
``castle.png`` from ``Results/BPFAImage``, and ``castle_damaged.png`` from the archive
``Softwares/BPFA_Denoising_Inpainting_codes_Inference_10292009.zip``. House, Peppers and Barbara of ``denoising_images`` are theirs, pixel
for pixel. Each line is appended to ``inpainting.jsonl`` when it is found; ``--names``, ``--missing`` and ``--seeds`` say which.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from pyro_truncated.datasets import load
from pyro_truncated.restoration import denoise
from pyro_truncated.restoration.noise import nearly_no_noise
from tests.papers.experiments.restoration import decibels

RESULTS = Path(__file__).parents[1] / "results"
THEIRS = "castle, their mask"
# Decibels by picture and percent that are missing: tables 3 to 5 of the authors' page; of their mask section 5.2 of the paper of 2009.
BPFA = {
    ("house", 80): 30.12,
    ("peppers", 80): 25.92,
    ("cameraman", 80): 24.11,
    ("barbara256", 80): 26.90,
    (THEIRS, 80): 29.31,
    ("house", 50): 38.02,
    ("peppers", 50): 32.58,
    ("cameraman", 50): 28.90,
    ("barbara256", 50): 35.41,
    ("barbara", 80): 24.80,
    ("castle", 80): 29.12,
    ("barbara", 50): 33.17,
    ("castle", 50): 36.45,
}
# Mairal, Elad and Sapiro (2008), as quoted there.
K_SVD = {(THEIRS, 80): 29.65}
FILES = {"cameraman": "Cameraman256.png", "castle": "castle.png", THEIRS: "castle.png"}


def picture(name: str, folder: Path) -> np.ndarray:
    """Grey or colour values; ``barbara256`` is the top right quarter of Barbara, as in the authors' program."""
    if name in FILES:
        return np.asarray(Image.open(folder / FILES[name])).astype(np.float32)
    image: np.ndarray = load("denoising_images")[name.removesuffix("256")].astype(np.float32)
    return image[:256, 256:] if name == "barbara256" else image


def seen(image: np.ndarray, name: str, missing: int, seed: int, folder: Path) -> np.ndarray:
    """Which values are seen, as in the authors' program: so many of all, those of a pixel's colours independent of each other."""
    if name == THEIRS:
        damaged = np.asarray(Image.open(folder / "castle_damaged.png")).astype(np.float32)
        return np.abs(damaged - image) < 1
    mask = np.zeros(image.size, bool)
    mask[np.random.default_rng(seed).permutation(image.size)[: image.size * (100 - missing) // 100]] = True
    return mask.reshape(image.shape)


def measured(name: str, missing: int, seed: int, folder: Path) -> dict[str, Any]:
    """A line of the results: decibels of what :func:`.inpaint` returns, and of the same before what is seen is put back.

    The second is what :func:`.denoise` returns for the array with NaN where nothing is seen and nearly no noise, which is all that
    ``inpaint(image, mask)`` does before it puts back what is seen.
    """
    image = picture(name, folder)
    mask = seen(image, name, missing, seed, folder)
    torch.manual_seed(0)
    start = time.process_time()
    damaged = np.where(mask, image, np.float32(np.nan))
    restored = denoise(damaged, nearly_no_noise(torch.from_numpy(damaged), 2), progress=False)
    seconds = time.process_time() - start
    without = restored.image.numpy()
    return {
        "picture": name,
        "missing": missing,
        "seed": seed,
        "psnr": decibels(np.where(mask, image, without), image),
        "psnr_not_put_back": decibels(without, image),
        "psnr_of_missing": decibels(without[~mask], image[~mask]),
        "noise_learned": restored.noise,
        "cpu_seconds": seconds,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "torch": torch.__version__,
    }


def table(rows: list[dict[str, Any]]) -> None:
    """Prints a row for each picture and share of missing values: the published decibels, and mean, least and largest of our masks."""
    print("| picture | missing | BPFA | K-SVD | this library, nothing put back | as `inpaint` returns it | masks | CPU s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, missing in sorted(BPFA, key=lambda case: -case[1]):
        found = [row for row in rows if (row["picture"], row["missing"]) == (name, missing)]
        if found:
            published = [f"{table[name, missing]:.2f}" if (name, missing) in table else "-" for table in (BPFA, K_SVD)]
            ours = [spread([row[key] for row in found], 2) for key in ("psnr_not_put_back", "psnr")]
            seconds = spread([row["cpu_seconds"] for row in found], 0)
            print(f"| {name} | {missing} % | {' | '.join(published + ours)} | {len(found)} | {seconds} |")


def spread(values: list[float], digits: int) -> str:
    """Mean, and least and largest of several values."""
    mean, least, largest = (f"{value:.{digits}f}" for value in (np.mean(values), min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({least} to {largest})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=Path, required=True)
    parser.add_argument("--names", nargs="*", default=list(dict.fromkeys(name for name, _ in BPFA)))
    parser.add_argument("--missing", nargs="*", type=int, default=[80, 50])
    parser.add_argument("--seeds", nargs="*", type=int, default=[71, 72, 73])
    parser.add_argument("--output", type=Path, default=RESULTS / "inpainting.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in args.output.read_text().splitlines()] if args.output.exists() else []
    done = {(row["picture"], row["missing"], row["seed"]) for row in rows}
    for seed in args.seeds:
        for name, missing in BPFA:
            case = (name, missing, 0 if name == THEIRS else seed)
            if name in args.names and missing in args.missing and case not in done:
                rows.append(measured(*case, args.pictures))
                done.add(case)
                with args.output.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    table(rows)


if __name__ == "__main__":
    main()
