"""Takes noise off a photograph, or fills in what is missing, with a dictionary learned from the damaged image itself.

Every small patch of the image is a sum of few dictionary elements of normally distributed strength (spike-and-slab sparse coding).
Truncated EM learns the elements from overlapping patches, with two searches side by side: greedy pursuit and evolution. The result is the
posterior mean of all patches, averaged where they overlap.

    python examples/denoising.py --noise 25
    python examples/denoising.py --noise 5 --missing 0.5

writes denoising.png (or inpainting.png): the image, its damaged version, the result, and the dictionary. For a picture of your own:
``python -m pyro_truncated.restoration photograph.png --output restored.png``.
"""

import argparse
import math
import time
from pathlib import Path

import matplotlib
import pyro
import torch
from torch import Tensor

from pyro_truncated.datasets import generated_images, load
from pyro_truncated.diagnostics.pages import tensor_plots as plots
from pyro_truncated.restoration import Restored, denoise


def psnr(image: Tensor, truth: Tensor) -> float:
    """Peak signal to noise ratio in decibels."""
    return float(10 * torch.log10(255**2 / (image - truth).double().square().mean()))


def picture(truth: Tensor, damaged: Tensor, restored: Restored, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    axes = figure.subplots(1, 4)
    is_seen = ~damaged.isnan()
    seen = f"damaged: {psnr(damaged[is_seen], truth[is_seen]):.2f} dB where seen"
    titles = ("image", seen, f"restored: {psnr(restored.image, truth):.2f} dB")
    for ax, image, title in zip(axes, (truth, damaged.nan_to_num(0.0), restored.image), titles, strict=False):
        ax.imshow(image.numpy(), cmap="gray", vmin=0, vmax=255)
        ax.set_title(title, fontsize=10)
        ax.set_axis_off()
    # What an element adds to the variance of a patch says how much it is used.
    model = restored.model
    prior, mean, deviation = model.prior.detach(), model.slab_mean.detach(), model.slab_scale.detach()
    used = (prior * (mean.square() + deviation.square())).argsort(descending=True)[:100]
    plots.plot_dictionary(model.weight.detach()[:, used], axes[3], columns=10).set_title("most used elements", fontsize=10)
    figure.savefig(path, dpi=75, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    if args.image == "generated":
        truth = 255 * generated_images(1, args.crop or 256, torch.Generator().manual_seed(0))[0]
    else:
        truth = torch.from_numpy(load("denoising_images")[args.image]).float()
    truth = truth[: args.crop or None, : args.crop or None]
    generator = torch.Generator().manual_seed(args.seed)
    damaged = truth + args.noise * torch.randn(truth.shape, generator=generator)
    damaged[torch.rand(truth.shape, generator=generator) < args.missing] = math.nan
    pyro.set_rng_seed(args.seed)
    start = time.process_time()
    restored = denoise(damaged, side=args.side, num_latents=args.elements, passes=args.passes, num_states=args.states, stride=args.stride)
    seconds = time.process_time() - start
    active = float(restored.model.prior.detach().sum())
    print(
        f"{args.image}, noise {args.noise:g}, {100 * args.missing:.0f} % missing: {psnr(restored.image, truth):.2f} dB; noise learned "
        f"{restored.noise:.2f}, {active:.1f} of {args.elements} elements active, free energy per patch {restored.free_energies[0]:.1f} to "
        f"{restored.free_energies[-1]:.1f}, {seconds:.0f} CPU seconds"
    )
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / ("inpainting.png" if args.missing else "denoising.png")
    picture(truth, damaged, restored, path)
    print(f"picture: {path}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--image", default="house", help="a name in denoising_images.npz, or 'generated'")
    parser.add_argument("--noise", type=float, default=25.0, help="standard deviation, of 255 grey values; the restoration is not told")
    parser.add_argument("--missing", type=float, default=0.0, help="share of the pixels that are missing")
    parser.add_argument("--crop", type=int, default=0, help="side of a corner of the image to work on; 0: all of it")
    parser.add_argument("--side", type=int, default=None, help="side of a patch in pixels; default: by the noise")
    parser.add_argument("--stride", type=int, default=1, help="distance of neighbouring patches")
    parser.add_argument("--elements", type=int, default=576, help="number of dictionary elements H")
    parser.add_argument("--states", type=int, default=30, help="states per patch, S")
    parser.add_argument("--passes", type=int, default=20, help="passes through all patches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.image, args.crop, args.side, args.elements, args.passes = "generated", 24, 4, 25, 3
    return args


if __name__ == "__main__":
    main(parse_args())
