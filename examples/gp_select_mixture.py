"""Gaussian processes preselect the classes of a mixture of three Gaussians.

Every iteration of EM considers only two classes per data point. Gaussian processes choose them: one function over the plane per class,
regressed on the responsibilities of the iteration before. An RBF kernel learns the classes; linear functions cannot single out the
middle one.

    python examples/gp_select_mixture.py

writes gp_select_mixture.png: data with their classes, and the three regression functions, for a few iterations with each kernel.
"""

import argparse
import itertools
from pathlib import Path
from typing import NamedTuple

import matplotlib
import pyro
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, Truncated_ELBO
from pyro_truncated.models import GaussianMixture
from pyro_truncated.search import GPSelect

COLOURS = ("tab:red", "tab:green", "tab:blue")
CENTRES = torch.tensor([[-5.0, -2.0], [0.0, 0.0], [5.0, 2.0]])


class Snapshot(NamedTuple):
    """One iteration: number, classes ``(N,)``, means, and regression functions ``(side, side, 3)``."""

    iteration: int
    classes: Tensor
    loc: Tensor
    functions: Tensor


def make_data(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Returns points ``(N, 2)`` around three centres, and their centres."""
    generator = torch.Generator().manual_seed(args.seed)
    labels = torch.randint(3, (args.points,), generator=generator)
    return CENTRES[labels] + torch.randn(args.points, 2, generator=generator), labels


def grid_over(y: Tensor, side: int) -> tuple[Tensor, list[float]]:
    """Points ``(side**2, 2)`` over the region of the data, and that region."""
    low, high = y.amin(0) - 1, y.amax(0) + 1
    rows, columns = (torch.linspace(float(low[d]), float(high[d]), side) for d in (1, 0))
    return torch.cartesian_prod(rows, columns).flip(1), [float(low[0]), float(high[0]), float(low[1]), float(high[1])]


def learn(args: argparse.Namespace, kernel: str, y: Tensor, labels: Tensor, from_truth: bool = False) -> tuple[list[Snapshot], float]:
    """Returns snapshots of all iterations and the accuracy of the classes."""
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    model = GaussianMixture(2, 3).initialize(y)
    states = None
    if from_truth:
        model.loc, model.scale = CENTRES, torch.eye(2).repeat(3, 1, 1)
        # The right class, and another: populations of two states per point.
        states = torch.stack([labels, (labels + 1) % 3], 1)[:, : args.classes]
    guide = AutoTruncated(model, num_states=args.classes, init=states)
    # Truncated EM as in the literature: the selected classes replace those of the iteration before.
    search = GPSelect(args.classes, kernel=kernel, refit_every=10, merge=False, explore=0.0, fit_steps=8)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(search))
    guide.setup(y)
    guide.refresh_(y)
    grid, _ = grid_over(y, args.grid)
    snapshots = []
    for iteration in range(1, args.iterations + 1):
        targets = guide.population().value_probabilities()[:, 0]
        svi.step(y)
        functions, _ = search.affinity.regression.predict(grid, targets)
        classes = guide.population().value_probabilities()[:, 0].argmax(-1)
        snapshots.append(Snapshot(iteration, classes, model.loc.detach().clone(), functions.unflatten(0, (args.grid, args.grid))))
    return snapshots, accuracy(snapshots[-1].classes, labels)


def accuracy(classes: Tensor, labels: Tensor) -> float:
    """Returns the accuracy under the best permutation of the classes."""
    return max(float((torch.tensor(names)[classes] == labels).double().mean()) for names in itertools.permutations(range(3)))


def picture(y: Tensor, results: dict[str, tuple[list[Snapshot], float]], args: argparse.Namespace, path: Path) -> None:
    from matplotlib.figure import Figure

    shown = sorted({1, max(1, args.iterations // 8), args.iterations})
    figure = Figure(figsize=(9, 1.75 * len(results) * len(shown)), layout="constrained")
    axes = figure.subplots(len(results) * len(shown), 4, squeeze=False)
    _, extent = grid_over(y, args.grid)
    pairs = itertools.product(results.items(), shown)
    for row, ((name, (snapshots, _)), iteration) in zip(axes, pairs, strict=True):
        snapshot = snapshots[iteration - 1]
        row[0].scatter(*y.mT.numpy(), c=[COLOURS[c] for c in snapshot.classes], s=4, alpha=0.6, linewidths=0)
        row[0].scatter(*snapshot.loc.mT.numpy(), c=COLOURS, marker="X", s=60, edgecolors="black")
        row[0].set_title(f"{name}: iteration {iteration}", fontsize=8)
        for c, ax in enumerate(row[1:]):
            function = snapshot.functions[..., c].numpy()
            ax.imshow(function, origin="lower", extent=extent, cmap="viridis", vmin=-0.1, vmax=1.1, aspect="auto")
            ax.contour(function, levels=[0.5], extent=extent, colors="white", linewidths=1.2)
            ax.set_title(f"function of class {c + 1}", color=COLOURS[c], fontsize=9)
        for ax in row:
            ax.set(xticks=[], yticks=[], xlim=extent[:2], ylim=extent[2:])
    figure.savefig(path, dpi=70, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    y, labels = make_data(args)
    results = {}
    for name, kernel, from_truth in (("RBF", "rbf", False), ("linear", "linear", False), ("linear, from truth", "linear", True)):
        results[name] = learn(args, kernel, y, labels, from_truth)
        share = results[name][1]
        print(f"{name:19} {args.classes} of 3 classes selected: {100 * share:5.1f} % of {len(y)} points in their class")
    args.output.mkdir(parents=True, exist_ok=True)
    picture(y, results, args, args.output / "gp_select_mixture.png")
    print(f"picture: {args.output / 'gp_select_mixture.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--classes", type=int, default=2, choices=(1, 2), help="classes considered for each point")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--grid", type=int, default=40, help="side of the grid that the functions are drawn on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.points, args.iterations, args.grid = 60, 4, 8
    return args


if __name__ == "__main__":
    main(parse_args())
