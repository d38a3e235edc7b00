"""Is my population large enough? Checks of populations of several sizes.

    python examples/question_population.py

prints the report of each size and writes question_population.png: what the bound lacks of the log evidence as the population grows, by
the checks and exactly. Beside it is the certificate of each data point.
"""

import argparse
from pathlib import Path

import matplotlib
import pyro
import torch

from pyro_truncated import AutoTruncated, EvolutionarySearch, check_truncation
from pyro_truncated.datasets import Bars, linear_bars
from pyro_truncated.diagnostics import TruncationReport
from pyro_truncated.models import BinarySparseCoding


def faint_bars(args: argparse.Namespace) -> tuple[Bars, BinarySparseCoding]:
    """Returns faint bars with broad posteriors, and the model that made them."""
    bars = linear_bars(
        args.images, args.size, mean_active=args.size / 2, noise=args.noise, generator=torch.Generator().manual_seed(args.seed)
    )
    model = BinarySparseCoding(*bars.components.shape)
    model.weight, model.scale = bars.components, torch.tensor(args.noise)
    model.prior = torch.tensor(0.25)
    return bars, model


def picture(reports: dict[int, TruncationReport], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = list(reports)
    curves = {
        "estimated by importance sampling": [report.evidence.gap.mean() for report in reports.values()],
        "at least, by the certificate": [-report.covered_mass.log().mean() for report in reports.values()],
        "gained by twice the states": [report.growth.by_size.mean() for report in reports.values()],
    }
    if all(report.exact is not None for report in reports.values()):
        left.plot(sizes, [report.exact.gap.mean() for report in reports.values()], color="black", linewidth=4, alpha=0.25, label="exact")
    for label, values in curves.items():
        left.plot(sizes, torch.stack(values).clamp(min=1e-6), marker="o", markersize=4, label=label)
    left.set(xscale="log", yscale="log", xlabel="states per data point", ylabel="nats per data point", title="what the bound lacks")
    left.legend(frameon=False, fontsize=8)
    for position, (size, report) in enumerate(reports.items()):
        colour = matplotlib.colormaps["viridis"](position / len(reports))
        right.plot(report.covered_mass.sort().values, color=colour, label=f"{size} states")
    right.set(xlabel="data points, least covered first", ylabel="covered mass, at most", ylim=(0, 1.03), title="certificates")
    right.legend(frameon=False, fontsize=8)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=80, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    bars, model = faint_bars(args)
    reports = {}
    for size in args.states:
        search = EvolutionarySearch(parents=min(8, size), children=4, crossover=True)
        guide = AutoTruncated(model, num_states=size).infer(bars.data, search, steps=args.steps)
        # A warning would say what the report says.
        reports[size] = check_truncation(guide, bars.data, search=search, num_samples=args.samples, warn=False)
        print(f"\n{reports[size]}")
    args.output.mkdir(parents=True, exist_ok=True)
    picture(reports, args.output / "question_population.png")
    print(f"\npicture: {args.output / 'question_population.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--size", type=int, default=5, help="side of an image; twice as many bars")
    parser.add_argument("--noise", type=float, default=14.0, help="standard deviation; a bar's pixels have the value 10")
    parser.add_argument("--states", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--steps", type=int, default=30, help="search steps")
    parser.add_argument("--samples", type=int, default=1000, help="draws for the estimate of the evidence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.images, args.size, args.states, args.steps, args.samples = 8, 3, [3, 6], 3, 60
    return args


if __name__ == "__main__":
    main(parse_args())
