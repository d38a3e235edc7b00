"""Handwritten ones, sevens and nines in a latent space with switches.

    python examples/spike_slab_digits.py

The model sees no classes. Writes spike_slab_digits.png: the two most relevant latents over the predictive uncertainty, and switches beside
the kernel's weights. Below are test digits whose lower half was hidden, and their completions.
"""

import argparse
import time
from pathlib import Path

import matplotlib
import torch
from sklearn.datasets import load_digits

from pyro_truncated.gplvm import Posterior, SpikeSlabGPLVM, fit, plot_latents, plot_relevance

CLASSES = (1, 7, 9)


def load(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images, their classes, and images for testing, of 8 x 8 pixels."""
    data = load_digits()
    labels = torch.from_numpy(data.target)
    rows = torch.cat([(labels == c).nonzero().flatten()[: args.images + args.tests] for c in CLASSES])
    images, labels = torch.from_numpy(data.data[rows.numpy()]) / 16, labels[rows]
    is_test = torch.cat([torch.arange(int((labels == c).sum())) >= args.images for c in CLASSES])
    return images[~is_test], labels[~is_test], images[is_test]


def tiles(images: torch.Tensor) -> torch.Tensor:
    """Images ``(N, 64)`` side by side with a white gap between them."""
    return torch.cat([torch.nn.functional.pad(image.view(8, 8), (1, 1, 1, 1)) for image in images], 1)


def picture(posterior: Posterior, labels: torch.Tensor, truth: torch.Tensor, filled: torch.Tensor, path: Path) -> None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.1])
    plot_latents(posterior, left, labels=labels).set_title("latent means over predictive deviation", fontsize=10)
    plot_relevance(posterior.model, middle).set_title("switches beside weights", fontsize=10)
    holed = truth.clone()
    holed[:, 32:] = torch.nan
    rows = torch.cat([tiles(images) for images in (truth, holed, filled)])
    right.imshow(rows.numpy(), cmap=colormaps["Greys"].with_extremes(bad="lightsteelblue"), vmin=0, vmax=1)
    right.set_yticks([5, 15, 25], ["truth", "seen", "filled in"])
    right.set_xticks([])
    right.tick_params(length=0)
    right.spines[:].set_visible(False)
    right.set_title("test digits with their lower halves hidden", fontsize=10)
    figure.savefig(path, dpi=80, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    y, labels, test = load(args)
    torch.manual_seed(args.seed)
    model = SpikeSlabGPLVM(*y.shape, args.latents, num_inducing=args.inducing)
    start = time.monotonic()
    generator = torch.Generator().manual_seed(args.seed)
    result = fit(model, y, warm_up=args.steps, steps=args.steps, rounds=2, generator=generator)
    gamma = model.probability[0].detach()
    print(
        f"bound {result.bound:.1f} after {time.monotonic() - start:.1f} s; {int((gamma > 0.5).sum())} of {args.latents} dimensions in use"
    )
    loc = model.loc.detach() * (gamma > 0.5)
    distances = torch.cdist(loc, loc).fill_diagonal_(torch.inf)
    print(f"nearest neighbour in the latent space has the same class: {float((labels[distances.argmin(1)] == labels).double().mean()):.3f}")
    posterior = Posterior(model, y)
    holed = test.clone()
    holed[:, 32:] = torch.nan
    filled = posterior.reconstruct(posterior.infer(holed)).mean
    error, spread = ((v - test)[:, 32:].square().mean().sqrt() for v in (filled, y.mean(0)))
    print(f"hidden halves of {len(test)} test digits: root mean square error {float(error):.3f}, of the mean image {float(spread):.3f}")
    args.output.mkdir(parents=True, exist_ok=True)
    chosen = torch.linspace(0, len(test) - 1, 6).long()
    picture(posterior, labels, test[chosen], filled[chosen].clamp(0, 1), args.output / "spike_slab_digits.png")
    print(f"picture: {args.output / 'spike_slab_digits.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--images", type=int, default=100, help="training images of each class")
    parser.add_argument("--tests", type=int, default=30, help="test images of each class")
    parser.add_argument("--latents", type=int, default=10)
    parser.add_argument("--inducing", type=int, default=30)
    parser.add_argument("--steps", type=int, default=100, help="quasi-Newton iterations of each phase")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.images, args.tests, args.latents, args.inducing, args.steps = 8, 3, 3, 5, 3
    return args


if __name__ == "__main__":
    main(parse_args())
