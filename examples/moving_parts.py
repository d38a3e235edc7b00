"""Which parts are in an image, and where, from few labelled examples.

    python examples/moving_parts.py

Images are sums of up to four shapes that move. Sixty of them come with labels (which shapes, in which pose) and are the active set; for
all others the model finds the shapes and poses. It writes moving_parts.png.
"""

import argparse
from pathlib import Path

import matplotlib
import pyro
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.models import GatedDecoder

SIZE = 14
NAMES = ("horizontal bar", "vertical bar", "disc", "corner")


def render(switches: torch.Tensor, poses: torch.Tensor) -> torch.Tensor:
    """Images ``(N, D)`` of shapes ``(N, 4)`` in poses ``(N, 4, 1)``, soft at their edges."""
    place = torch.linspace(-2.5, 2.5, SIZE)
    row, column = place[:, None].expand(SIZE, SIZE), place.expand(SIZE, SIZE)
    z = poses.unsqueeze(-1)
    horizontal = (-((row - z[:, 0]) / 0.35).square()).exp()
    vertical = (-((column - z[:, 1]) / 0.35).square()).exp()
    angle = 1.1 * z[:, 2]
    disc = (-((row - 1.6 * angle.sin()).square() + (column - 1.6 * angle.cos()).square()) / 0.5).exp()
    corner = torch.sigmoid(8 * (row + column - 2.6 - 0.8 * z[:, 3]))
    return (switches[:, :, None, None] * torch.stack([horizontal, vertical, disc, corner], 1)).sum(1).flatten(1)


def make_data(num: int, noise: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    switches = torch.bernoulli(torch.full((num, 4), 0.4), generator=generator)
    poses = torch.randn(num, 4, 1, generator=generator)
    images = render(switches, poses)
    return images + noise * torch.randn(images.shape, generator=generator), switches, poses


def learn(args: argparse.Namespace, examples: tuple[torch.Tensor, ...], x: torch.Tensor) -> tuple[GatedDecoder, AutoTruncated]:
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    model = GatedDecoder(*examples)
    model.dream(args.dreams)
    guide = AutoTruncated(model, num_states=args.states, conditional=model.pose_guide)
    svi = SVI(model, guide, Adam({"lr": 0.003}), Truncated_ELBO(EvolutionarySearch(4, 3, 1)))
    for step in range(args.steps):
        loss = svi.step(x)
        if step % max(1, args.steps // 5) == 0 or step == args.steps - 1:
            print(f"step {step:4}   free energy per image {-loss / len(x):9.2f}   noise {float(model.noise.detach().sqrt()):.3f}")
    return model, guide


def picture(model: GatedDecoder, x: torch.Tensor, probability: torch.Tensor, path: Path) -> None:
    from matplotlib.figure import Figure

    with torch.no_grad():
        poses, _ = model.infer_poses(x)
    parts = model.parts(probability.round(), poses)
    figure = Figure(figsize=(1.15 * len(x), 7.4), layout="constrained")
    axes = figure.subplots(6, len(x))
    for n in range(len(x)):
        rows = [x[n], parts[n].sum(0), *parts[n]]
        for ax, values in zip(axes[:, n], rows, strict=True):
            ax.imshow(values.reshape(SIZE, SIZE).detach().numpy(), cmap="gray", vmin=0, vmax=1.2)
            ax.set(xticks=[], yticks=[])
        for h, ax in enumerate(axes[2:, n]):
            ax.set_xlabel(f"{float(probability[n, h]):.2f}", fontsize=8, labelpad=1)
    for ax, name in zip(axes[:, 0], ("image", "mean", *NAMES), strict=True):
        ax.set_ylabel(name, fontsize=9)
    figure.suptitle("new images, and their parts with the probability that they are there", fontsize=11)
    figure.savefig(path, dpi=70, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    generator = torch.Generator().manual_seed(args.seed)
    x, switches, poses = make_data(args.examples + args.images, args.noise, generator)
    known, new = slice(0, args.examples), slice(args.examples, None)
    model, guide = learn(args, (x[known], switches[known], poses[known]), x[new])
    probability = guide.marginals()["b"]
    right = (probability.round() == switches[new]).float()
    print(f"switches right: {float(right.mean()):.3f} of {right.numel()}; images with all of them right: {float(right.prod(1).mean()):.3f}")
    with torch.no_grad():
        found, _ = model.infer_poses(x[new])
    error = (found - poses[new])[switches[new] > 0].abs().median()
    print(f"median error of the poses of present parts: {float(error):.3f} (their standard deviation is 1)")
    args.output.mkdir(parents=True, exist_ok=True)
    shown = torch.arange(len(x))[new][: min(10, args.images)]
    picture(model, x[shown], probability[: len(shown)], args.output / "moving_parts.png")
    print(f"picture: {args.output / 'moving_parts.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--examples", type=int, default=60, help="labelled images: the active set")
    parser.add_argument("--images", type=int, default=150, help="images without labels")
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--states", type=int, default=8, help="of 16 states of the switches, how many are kept for each image")
    parser.add_argument("--dreams", type=int, default=600, help="steps that teach the pose network on images of the model's own")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.examples, args.images, args.dreams, args.steps = 12, 8, 5, 3
    return args


if __name__ == "__main__":
    main(parse_args())
