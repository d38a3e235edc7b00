"""Signals behind two views: private and shared latent dimensions by switches.

    python examples/spike_slab_signals.py

Three signals (sine, a double peak, cosine); the first view mixes the first and the third, the second view the second and the third.
Starting at random with five latent dimensions, the model finds one private dimension for each view and a shared one.
Writes spike_slab_signals.png.
"""

import argparse
import math
import time
from pathlib import Path

import matplotlib
import torch

from pyro_truncated.gplvm import Posterior, SpikeSlabMRD, fit, plot_relevance, plot_switches

NAMES = ("sin x", "-exp(-cos 2x)", "cos x")
CONTENT = ((0, 2), (1, 2))


def make_views(args: argparse.Namespace) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Signals ``(N, 3)`` and views ``(N, 12)``."""
    generator = torch.Generator().manual_seed(args.seed)
    x = torch.linspace(0, 2 * math.pi, args.points, dtype=torch.float64)
    signals = torch.stack([x.sin(), -torch.exp(-torch.cos(2 * x)), x.cos()], 1)
    signals = (signals - signals.mean(0)) / signals.std(0)
    views = []
    for content in CONTENT:
        clean = signals[:, content] @ torch.randn(2, 12, generator=generator, dtype=torch.float64)
        views.append(clean + args.noise * torch.randn(clean.shape, generator=generator, dtype=torch.float64))
    return signals, views


def picture(signals: torch.Tensor, model: SpikeSlabMRD, shared: dict[str, list[int]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.6), layout="constrained")
    axes = figure.subplot_mosaic([["a", "b", "c"], ["d", "e", "f"]])
    loc, scale = model.loc.detach(), model.scale.detach()
    similar = torch.corrcoef(torch.cat([signals, loc], 1).mT)[:3, 3:]
    parts = (shared["private 0"], shared["private 1"], shared["shared"])
    for ax, name, row, candidates in zip("abc", NAMES, similar, parts, strict=True):
        axes[ax].plot(signals[:, NAMES.index(name)], color="0.7", linewidth=4)
        for q in candidates:
            sign = float(row[q].sign())
            mean, deviation = sign * loc[:, q], scale[:, q]
            factor = 1 / mean.std()
            axes[ax].plot(factor * mean, color="tab:red", linewidth=1.2)
            low, high = factor * (mean - 2 * deviation), factor * (mean + 2 * deviation)
            axes[ax].fill_between(range(len(mean)), low, high, color="tab:red", alpha=0.3, linewidth=0)
        kind = {"a": "private to view 1", "b": "private to view 2", "c": "shared"}[ax]
        found = ", ".join(f"dimension {q}, correlation {abs(float(row[q])):.3f}" for q in candidates)
        axes[ax].set(title=f"{name}: {kind}", xlabel=found or "not found", xticks=[])
    plot_switches(model, axes["d"]).set_title("probabilities of the switches")
    for view, ax in enumerate("ef"):
        plot_relevance(model, axes[ax], view=view).set_title(f"view {view + 1}: weights against switches")
    figure.savefig(path, dpi=80, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    signals, views = make_views(args)
    torch.manual_seed(args.seed)
    model = SpikeSlabMRD(args.points, [12, 12], args.latents, kernel="linear")
    start = time.monotonic()
    result = fit(model, views, start=args.start, warm_up=args.steps, steps=args.steps, generator=torch.Generator().manual_seed(args.seed))
    print(f"bound {result.bound:.2f} after {time.monotonic() - start:.1f} s")
    shared = Posterior(model, views).group_dimensions()
    for name, dims in shared.items():
        print(f"{name:10} {dims}")
    print("probabilities of the switches:")
    for c, row in enumerate(model.probability.tolist()):
        print(f"  view {c + 1}: " + " ".join(f"{p:.2f}" for p in row))
    args.output.mkdir(parents=True, exist_ok=True)
    picture(signals, model, shared, args.output / "spike_slab_signals.png")
    print(f"picture: {args.output / 'spike_slab_signals.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--latents", type=int, default=5)
    parser.add_argument("--start", choices=["pca", "random"], default="random")
    parser.add_argument("--steps", type=int, default=500, help="quasi-Newton iterations of each phase")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.points, args.latents, args.steps = 20, 3, 5
    return args


if __name__ == "__main__":
    main(parse_args())
