"""Fills in missing frames by latents with Gaussian processes over time.

    python examples/missing_frames.py
    python examples/missing_frames.py --object 0

A spike-and-slab GP-LVM, whose latents have a prior over time, sees some frames of a noisy film of a swinging pendulum. It paints those in
the gaps, of which it knows the time only, and completes those of which it sees the upper half. Beside it lines between frames around a gap,
and the same model without time. With ``--object``, the frames are views of an object on a turntable, every third of which is known; so
close to each other, lines are as good or better. Writes missing_frames.png.
"""

import argparse
from pathlib import Path

import matplotlib
import torch

from pyro_truncated import datasets
from pyro_truncated.gplvm import Posterior, SpikeSlabGPLVM, TimePrior, fit


def turntable(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns angles in degrees, views ``(N, 1024)`` twice, and which are known."""
    arrays = datasets.load("coil100_17obj")
    names = sorted(set(arrays["obj"].tolist()))
    rows = (arrays["obj"] == names[args.object]).nonzero()[0]
    angles, views = torch.as_tensor(arrays["angle"][rows]).double(), torch.as_tensor(arrays["X32"][rows]).double().mean(-1) / 255
    order = angles.argsort()
    views = views[order].flatten(1)
    return angles[order], views, views, torch.arange(len(views)) % 3 == 0


def pendulum(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns times, frames ``(N, 1024)`` with and without noise, and which are known."""
    times = torch.linspace(0, 8, 80, dtype=torch.float64)
    swing = torch.sin(2.5 * times)
    place, grid = torch.stack([26 * swing.cos() - 8, 15 + 16 * swing.sin()], 1), torch.arange(32)
    apart = (grid[:, None] - place[:, 0, None, None]).square() + (grid - place[:, 1, None, None]).square()
    clean = torch.exp(-apart / 20).flatten(1)
    noise = 0.1 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(args.seed), dtype=torch.float64)
    is_known = torch.ones(80, dtype=torch.bool)
    for start, length in ((8, 4), (22, 5), (39, 5), (55, 4), (68, 5)):
        is_known[start : start + length] = False
    return times, clean + noise, clean, is_known


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found - truth).square().mean().sqrt())


def between(times: torch.Tensor, known: torch.Tensor, frames: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Returns linear interpolations between the frames around a gap."""
    after = torch.searchsorted(times[known], times[wanted]).clamp(max=len(known) - 1)
    share = ((times[wanted] - times[known][after - 1]) / (times[known][after] - times[known][after - 1])).clamp(max=1)[:, None]
    return (1 - share) * frames[known][after - 1] + share * frames[known][after]


def main(args: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    matplotlib.use("Agg")
    is_film = args.object is None
    times, frames, clean, is_known = pendulum(args) if is_film else turntable(args)
    known, wanted = is_known.nonzero().flatten(), (~is_known).nonzero().flatten()
    lower = slice(frames.shape[1] // 2, None)
    upper = frames[wanted].clone()
    upper[:, lower] = torch.nan
    painted = {"lines between frames": between(times, known, frames, wanted)}
    prior = TimePrior(times[known]) if is_film else TimePrior(times[known], "periodic", period=360.0)
    for name, chosen in (("latents over time", prior), ("without time", None)):
        torch.manual_seed(args.seed)
        model = SpikeSlabGPLVM(len(known), frames.shape[1], args.latents, time_prior=chosen, num_inducing=30)
        fit(model, frames[known], steps=args.steps, warm_up=args.steps, rounds=2, generator=torch.Generator().manual_seed(args.seed))
        posterior = Posterior(model, frames[known])
        half = posterior.reconstruct(posterior.infer(upper, times=None if chosen is None else times[wanted])).mean
        print(f"{name:22} lower halves from upper ones: error {error(half[:, lower], clean[wanted][:, lower]):.4f}")
        if chosen is not None:
            found = posterior.reconstruct(posterior.at(times[wanted]))
            painted[name] = found.mean
            inside = (found.mean - frames[wanted]).abs() < 1.96 * (found.variance + found.noise).sqrt()
            print(f"{'':22} whole frames from their times: {float(inside.double().mean()):.0%} of the pixels in their 95 % intervals")
    for name, frame in painted.items():
        print(f"{name:22} whole frames from their times: error {error(frame, clean[wanted]):.4f}")
    shown = torch.linspace(0, len(wanted) - 1, 8).long()
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (name, rows) in zip(figure.subplots(3, 8), {"truth": clean[wanted], **painted}.items(), strict=True):
        for axis, row, time in zip(axes, rows[shown], times[wanted][shown], strict=True):
            axis.imshow(row.reshape(32, 32).numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[], title=f"{time:.3g}" if name == "truth" else "")
        axes[0].set_ylabel(name.replace(" ", "\n", 1), fontsize=8)
    args.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output / "missing_frames.png", dpi=80, facecolor="white")
    print(f"picture: {args.output / 'missing_frames.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--object", type=int, help="views of this one of seventeen objects of the data folder; default: a film")
    parser.add_argument("--latents", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150, help="quasi-Newton iterations of each phase")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.latents, args.steps = 2, 3
    return args


if __name__ == "__main__":
    main(parse_args())
