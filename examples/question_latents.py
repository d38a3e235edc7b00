"""Which latents are on? Activation probabilities over restarts, beside the truth.

    python examples/question_latents.py

learns the bars from several restarts, and matches their latents to each other and to the true bars. Simulation-based calibration tells
whether the probabilities are right on average. The picture is question_latents.png.
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import pyro
import torch
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO, fit_restarts
from pyro_truncated.datasets import Bars, linear_bars
from pyro_truncated.diagnostics import Calibration, compare_restarts, match_latents, simulation_based_calibration
from pyro_truncated.diagnostics.pages import tensor_plots as plots
from pyro_truncated.models import BinarySparseCoding


def picture(bars: Bars, marginals: torch.Tensor, weight: torch.Tensor, calibration: Calibration, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, 4)
    shown = min(30, len(marginals))
    pair = np.concatenate([marginals[:shown].numpy(), np.full((shown, 1), 0.5), bars.states[:shown].float().numpy()], 1)
    axes[0].imshow(pair, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes[0].set(xticks=[], xlabel="inferred | true", ylabel="image", title="which bars are on?")
    plots.plot_dictionary(weight, axes[1], columns=4).set_title("the bars learned")
    order = marginals.flatten().argsort()
    groups = [group for group in order.chunk(12) if len(group)]
    stated = [float(marginals.flatten()[group].mean()) for group in groups]
    found = [float(bars.states.float().flatten()[group].mean()) for group in groups]
    axes[2].plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axes[2].plot(stated, found, "o-", color=plots.COLOUR, markersize=4)
    axes[2].set(xlabel="stated probability", ylabel="share of bars that are on", title="calibrated on these data?")
    grid = np.linspace(0, 1, 101)
    for name, values in calibration.pit.items():
        curve = np.searchsorted(np.sort(values.numpy()), grid, side="right") / len(values) - grid
        strong = {"color": plots.ACCENT, "label": name} if name in ("active", "log_joint") else {"color": plots.GAPS}
        axes[3].plot(grid, curve, linewidth=1.0, **strong)
    axes[3].set(
        xlabel="place of the truth in its posterior", ylabel="ECDF - uniform", title="calibrated on simulated data?", ylim=(-0.2, 0.2)
    )
    axes[3].legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=80, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    pyro.clear_param_store()
    bars = linear_bars(args.images, args.size, mean_active=2.0, noise=args.noise, generator=torch.Generator().manual_seed(args.seed))

    def make(restart: int) -> SVI:
        pyro.set_rng_seed(args.seed + restart)
        model = BinarySparseCoding(*bars.components.shape).initialize(bars.data)
        elbo = Truncated_ELBO(
            EvolutionarySearch(parents=4, children=4, crossover=True),
            temperature=lambda step: max(1.0, 8 * (1 - step / (0.6 * args.steps))),
        )
        return SVI(model, AutoTruncated(model, num_states=args.states), ClosedForm(model), elbo)

    runs = fit_restarts(make, bars.data, restarts=args.restarts, steps=args.steps)
    guides = [training.svi.guide for training in runs.trainings]
    found = compare_restarts(guides, bars.data, stores=runs.stores)
    for restart, free_energy in enumerate(found.free_energy):
        similarity = found.similarity[restart]
        print(
            f"restart {restart}: free energy {free_energy / args.images:9.3f} per image, correlation of its latents with those of the best "
            f"{float(similarity.min()):.2f} .. {float(similarity.max()):.2f}"
        )
    model, guide = runs.training.svi.model, runs.training.svi.guide
    order, similarity = match_latents(bars.components.mT, model.weight.detach().mT)
    marginals = guide.posterior(bars.data).marginals().double()[:, order]
    weight = model.weight.detach()[:, order]
    agreement = float(((marginals > 0.5) == (bars.states > 0)).double().mean())
    print(f"bars found: {int((similarity > 0.8).sum())} of {len(order)}; {agreement:.1%} of the bars' states are right")
    for image in range(3):
        on = [f"{bar} ({p:.2f})" for bar, p in enumerate(marginals[image].tolist()) if p > 0.1]
        print(f"image {image}: on are {', '.join(on) or 'none'}; truly {bars.states[image].nonzero().flatten().tolist()}")
    calibration = simulation_based_calibration(model, bars.data)
    p_values = calibration.p_values()
    smallest = min(1.0, len(p_values) * min(p_values.values()))
    print(f"smallest p-value of {len(p_values)} calibration tests on simulated data, corrected for their number: {smallest:.3f}")
    print("(of a right posterior it is below 0.01 on one simulation of a hundred: if it is small, simulate again with another seed)")
    args.output.mkdir(parents=True, exist_ok=True)
    picture(bars, marginals, weight, calibration, args.output / "question_latents.png")
    print(f"picture: {args.output / 'question_latents.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--size", type=int, default=4, help="side of an image; twice as many bars")
    parser.add_argument("--noise", type=float, default=5.0, help="standard deviation; a bar's pixels have the value 10")
    parser.add_argument("--states", type=int, default=40)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--restarts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.images, args.size, args.states, args.steps, args.restarts = 20, 3, 8, 3, 2
    return args


if __name__ == "__main__":
    main(parse_args())
