"""Crowded bars, learned by the variants of the evolutionary search.

Twenty bars add up, five in an image on average.

    python examples/bars.py --variants all

writes bars.png: images, the bars that each variant finds, and the free energies against that of the true parameters.
"""

import argparse
import time
from pathlib import Path

import matplotlib
import pyro
import torch
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.datasets import Bars, linear_bars, matched_bars
from pyro_truncated.diagnostics.pages import tensor_plots as plots
from pyro_truncated.models import BinarySparseCoding

VARIANTS = {
    "randparents-randflips": {"selection": "randparents"},
    "fitparents-randflips": {},
    "fitparents-sparseflips": {"mutation": "sparseflips"},
    "fitparents-cross-randflips": {"crossover": True},
    "fitparents-cross-sparseflips": {"crossover": True, "mutation": "sparseflips"},
}
NOISE = 2.0


def learn(args: argparse.Namespace, variant: str, bars: Bars) -> tuple[torch.Tensor, list[float]]:
    """Dictionary ``(D, H)`` and free energies per image."""
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    model = BinarySparseCoding(bars.data.shape[1], bars.components.shape[1]).initialize(bars.data)
    guide = AutoTruncated(model, num_states=args.states)
    search = EvolutionarySearch(parents=args.parents, children=args.children, generations=args.generations, **VARIANTS[variant])
    # Hot posteriors at first: bars that share an element may still part.
    elbo = Truncated_ELBO(search, temperature=lambda step: 1 + (args.temperature - 1) * max(0.0, 1 - step / (0.6 * args.iterations)))
    svi = SVI(model, guide, ClosedForm(model), elbo)
    free_energies = [-svi.step(bars.data) / len(bars.data) for _ in range(args.iterations)]
    return model.weight.detach(), free_energies


def true_free_energy(args: argparse.Namespace, bars: Bars) -> float:
    """Free energy per image at the parameters that made the data."""
    pyro.clear_param_store()
    model = BinarySparseCoding(*bars.components.shape)
    model.weight, model.scale = bars.components, torch.tensor(NOISE)
    model.prior = torch.tensor(5.0 / bars.components.shape[1])
    guide = AutoTruncated(model, num_states=args.states).infer(bars.data, EvolutionarySearch(crossover=True), steps=args.iterations)
    return float(guide.population().free_energy().mean())


def picture(bars: Bars, results: dict[str, tuple[torch.Tensor, list[float]]], truth: float, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * (1 + (len(results) + 1) // 2), 6.6), layout="constrained")
    axes = figure.subplots(2, 1 + (len(results) + 1) // 2, squeeze=False)
    plots.plot_dictionary(bars.data[:20].mT, axes[0, 0], columns=5).set_title("images to learn from", fontsize=10)
    for (name, (weight, free_energies)), ax in zip(results.items(), axes[:, 1:].flat, strict=False):
        order = (weight.mT @ bars.components).argmax(1).argsort()
        found = matched_bars(weight, bars.components)
        plots.plot_dictionary(weight[:, order], ax, columns=5)
        ax.set_title(f"{name}\n{found} of {bars.components.shape[1]} bars", fontsize=9)
        axes[1, 0].plot(free_energies, label=name, linewidth=1.5)
    for ax in axes[:, 1:].flat[len(results) :]:
        ax.set_axis_off()
    axes[1, 0].axhline(truth, color="black", linestyle=":", label="true parameters")
    late = [values[len(values) // 10] for _, values in results.values()]
    axes[1, 0].set_ylim(min(late), truth + 0.1 * abs(truth - min(late)))
    axes[1, 0].set(xlabel="iteration", title="free energy per image")
    axes[1, 0].legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=80, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    generator = torch.Generator().manual_seed(args.seed)
    bars = linear_bars(args.images, args.size, mean_active=args.size / 2, noise=NOISE, generator=generator)
    truth = true_free_energy(args, bars)
    print(
        f"{args.images} images of {args.size} x {args.size} pixels, {bars.components.shape[1]} bars; "
        f"free energy at the true parameters {truth:.2f}"
    )
    results = {}
    for variant in VARIANTS if args.variants == "all" else args.variants.split(","):
        start = time.monotonic()
        weight, free_energies = results[variant] = learn(args, variant, bars)
        found = matched_bars(weight, bars.components)
        seconds = time.monotonic() - start
        print(f"{variant:30} free energy {free_energies[-1]:9.2f}   bars found {found:2} of {weight.shape[1]}   {seconds:5.1f} s")
    args.output.mkdir(parents=True, exist_ok=True)
    picture(bars, results, truth, args.output / "bars.png")
    print(f"picture: {args.output / 'bars.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--variants", default="fitparents-cross-randflips", help=f"'all', or some of {', '.join(VARIANTS)}, comma between")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--size", type=int, default=10, help="side of an image; twice as many bars")
    parser.add_argument("--states", type=int, default=60)
    parser.add_argument("--parents", type=int, default=8)
    parser.add_argument("--children", type=int, default=7)
    parser.add_argument("--generations", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=10.0, help="at the start; 1 from 60 %% of the run on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if unknown := set(args.variants.split(",")) - {"all", *VARIANTS}:
        parser.error(f"unknown variants {sorted(unknown)}; choose from {', '.join(VARIANTS)}")
    if args.smoke:
        args.images, args.size, args.states, args.iterations = 60, 4, 12, 4
    return args


if __name__ == "__main__":
    main(parse_args())
