"""Denoises or inpaints a photograph by a model of the image itself.

Small patches of the image are a mixture of normal distributions around places of the image. Truncated EM learns the mixture from
overlapping patches of what has been restored so far; the result is the posterior mean of all noisy patches, averaged where they overlap.
With ``--elements 576`` a patch is a sum of few dictionary elements of normally distributed strength (spike-and-slab sparse coding) instead.

    python examples/denoising.py --noise 25
    python examples/denoising.py --noise 5 --missing 0.5

writes denoising.png (or inpainting.png): the image, its damaged version, the result, and what was learned. For a picture of your own:
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
from pyro_truncated.models import SpikeSlabSparseCoding
from pyro_truncated.restoration import PatchMixture, Restored, denoise


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
    plots.plot_dictionary(learned(restored.model), axes[3], columns=10).set_title("most used", fontsize=10)
    figure.savefig(path, dpi=75, facecolor="white")


def learned(model: PatchMixture | SpikeSlabSparseCoding) -> Tensor:
    """Returns the directions or dictionary elements that are used most, in columns."""
    if isinstance(model, PatchMixture):
        longest = model.factor[model.weights.argsort(descending=True), :, 0]
        return longest[longest.any(1)][:100].mT
    # What an element adds to the variance of a patch says how much it is used.
    prior, mean, deviation = model.prior.detach(), model.slab_mean.detach(), model.slab_scale.detach()
    used = (prior * (mean.square() + deviation.square())).argsort(descending=True)[:100]
    return model.weight.detach()[:, used]


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
    dictionary = {
        "passes": args.passes,
        "num_states": args.states,
        "model": lambda size: SpikeSlabSparseCoding(size, args.elements, offset=False),
    }
    restored = denoise(damaged, side=args.side, stride=args.stride, rounds=args.rounds, **(dictionary if args.elements else {}))
    seconds = time.process_time() - start
    print(
        f"{args.image}, noise {args.noise:g}, {100 * args.missing:.0f} % missing: {psnr(restored.image, truth):.2f} dB; noise learned "
        f"{restored.noise:.2f}, {seconds:.0f} CPU seconds"
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
    parser.add_argument("--side", type=int, default=None, help="side of a patch in pixels; default: several, by the noise")
    parser.add_argument("--stride", type=int, default=1, help="distance of neighbouring patches")
    parser.add_argument("--rounds", type=int, default=None, help="rounds of mixtures; default: by what is missing")
    parser.add_argument("--elements", type=int, default=0, help="number of dictionary elements H; 0: a mixture")
    parser.add_argument("--states", type=int, default=30, help="states per patch of a dictionary, S")
    parser.add_argument("--passes", type=int, default=20, help="passes through all patches of a dictionary")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.image, args.crop, args.side, args.passes = "generated", 24, 4, 3
    return args


if __name__ == "__main__":
    main(parse_args())
