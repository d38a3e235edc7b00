"""A map of handwritten digits by a decoder with stochastic active sets.

    python examples/image_decoder.py --data mnist --images 5000

writes latent_space.png: the training images in the latent space over the decoder's uncertainty, and reconstructions of test images. Below
are images along a grid of latents, and lower halves painted in from upper ones.
"""

import argparse
import math
import time
from pathlib import Path

import matplotlib
import pyro
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.optim import Adam

from pyro_truncated import datasets
from pyro_truncated.gp import UniformSplits
from pyro_truncated.gplvm import SASDecoder

STORED = {"mnist": "mnist_train", "fashion": "fashion_mnist_train"}


def load_images(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns images ``(N, D)`` in [0, 1], their classes, and their width."""
    generator = torch.Generator().manual_seed(args.seed)
    try:
        stored = datasets.load(STORED[args.data])
        x, y = torch.from_numpy(stored["X"]).float() / 255, torch.from_numpy(stored["y"]).long()
    except datasets.DatasetNotFoundError as error:
        from sklearn.datasets import load_digits

        print(f"{error}; taking the digits of scikit-learn instead")
        digits = load_digits()
        x, y = torch.from_numpy(digits.images).float() / 16, torch.from_numpy(digits.target).long()
    order = torch.randperm(len(x), generator=generator)[: args.images + args.test]
    return x[order].flatten(1), y[order], x.shape[-1]


def learn(args: argparse.Namespace, x: torch.Tensor) -> SASDecoder:
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    decoder = SASDecoder(len(x), x.shape[1], bayesian=True).initialize(x)
    decoder.kernel.lengthscale = torch.full((2,), 0.4)
    svi = SVI(decoder.model, decoder.guide, Adam(decoder.learning_rates(0.05, 0.02)), TraceMeanField_ELBO())
    splits = UniformSplits(len(x), min(args.batch, len(x)), args.active)
    start = time.monotonic()
    for epoch in range(args.epochs):
        if epoch < 0.6 * args.epochs and epoch % 2:
            # Gradients only slide the images about; this lets each jump to where it fits best.
            decoder.relocate_(x)
        loss = sum(svi.step(x, split) for split in splits.epoch(epoch))
        if epoch % max(1, args.epochs // 5) == 0 or epoch == args.epochs - 1:
            batches = -(-len(x) // splits.batch_size)
            print(f"epoch {epoch:4}   objective per pixel {-loss / batches / x.numel():8.4f}   {time.monotonic() - start:6.1f} s")
    return decoder.condition_(x, min(300, len(x)), projected=True)


def draw_latent_space(ax, decoder: SASDecoder, z: torch.Tensor, y: torch.Tensor) -> None:
    low, high = z.quantile(0.002, 0) - 0.3, z.quantile(0.998, 0) + 0.3
    across, up = (torch.linspace(float(a), float(b), 120) for a, b in zip(low, high, strict=True))
    grid = torch.cartesian_prod(across, up)
    _, variance = decoder.predict(grid, noiseless=True)
    extent = [float(low[0]), float(high[0]), float(low[1]), float(high[1])]
    ax.imshow(variance.sqrt().reshape(120, 120).mT.detach().numpy(), extent=extent, origin="lower", cmap="Greys", aspect="auto", alpha=0.8)
    colours = matplotlib.colormaps["tab10"](y.numpy())
    ax.scatter(z[:, 0], z[:, 1], s=3, c=colours, linewidths=0)
    for label in y.unique():
        ax.text(*z[y == label].median(0).values.tolist(), str(int(label)), fontsize=15, fontweight="bold", ha="center", va="center")
    ax.set(xlim=extent[:2], ylim=extent[2:], xticks=[], yticks=[])
    ax.set_title("training images in the latent space, by class;\nbehind them the decoder's uncertainty (darker: less known)", fontsize=10)


def tile(rows: list[torch.Tensor], width: int) -> torch.Tensor:
    """Returns a picture of images ``(n, D)``, one row for each entry."""
    squares = [torch.nn.functional.pad(row.reshape(len(row), -1, width), (0, 1, 0, 1), value=0.5) for row in rows]
    return torch.cat([torch.cat(list(square), 1) for square in squares])


def picture(decoder: SASDecoder, x: torch.Tensor, y: torch.Tensor, test: torch.Tensor, width: int, path: Path) -> dict[str, float]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    z = decoder.latents(x)
    draw_latent_space(left.subplots(), decoder, z, y)
    inferred = decoder.infer(test)
    mean, variance = decoder.predict(inferred)
    half = test.clone()
    half[:, test.shape[1] // 2 :] = math.nan
    painted, _ = decoder.predict(decoder.infer(half))
    shown = min(12, len(test))
    quantiles = z.quantile(torch.linspace(0.03, 0.97, 12), 0)
    grid = [decoder.predict(torch.stack([quantiles[:, 0], quantiles[row, 1].expand(12)], 1))[0] for row in range(11, 0, -3)]
    panels = {
        "test images, and their reconstructions from two numbers": [test[:shown], mean[:shown]],
        "test images, their upper halves, and the lower halves painted in": [test[:shown], half[:shown].nan_to_num(0.5), painted[:shown]],
        "images along a grid of latents": grid,
        "samples": [decoder.sample(12), decoder.sample(12)],
    }
    axes = right.subplots(len(panels), 1, height_ratios=[len(rows) for rows in panels.values()])
    for ax, (title, rows) in zip(axes, panels.items(), strict=True):
        ax.imshow(tile(rows, width).detach().numpy(), cmap="gray", vmin=0, vmax=1)
        ax.set_title(title, fontsize=9)
        ax.set_axis_off()
    figure.savefig(path, dpi=64, facecolor="white")
    nlpd = 0.5 * ((test - mean).square() / variance + (2 * math.pi * variance).log()).mean()
    lower = slice(test.shape[1] // 2, None)
    return {
        "reconstruction RMSE": float((test - mean).square().mean().sqrt()),
        "negative log predictive density per pixel": float(nlpd),
        "in-painting RMSE": float((test - painted)[:, lower].square().mean().sqrt()),
        "the same by the mean image": float((test - x.mean(0))[:, lower].square().mean().sqrt()),
    }


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    x, y, width = load_images(args)
    x, test, y = x[: -args.test], x[-args.test :], y[: -args.test]
    decoder = learn(args, x)
    args.output.mkdir(parents=True, exist_ok=True)
    for name, value in picture(decoder, x, y, test, width, args.output / "latent_space.png").items():
        print(f"{name:42} {value:7.4f}")
    print(f"picture: {args.output / 'latent_space.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default="mnist", choices=sorted(STORED))
    parser.add_argument("--images", type=int, default=3000, help="training images")
    parser.add_argument("--test", type=int, default=200, help="test images")
    parser.add_argument("--active", type=int, default=100, help="size of the active sets")
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.images, args.test, args.active, args.batch, args.epochs = 60, 12, 10, 40, 2
    return args


if __name__ == "__main__":
    main(parse_args())
