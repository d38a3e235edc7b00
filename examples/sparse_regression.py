"""Sparse regression whose inducing inputs are chosen from the data.

    python examples/sparse_regression.py --data molecules

writes sparse_regression_<data>.png. The data are:

- ``molecules``: affinities to thrombin, by a sum of graph kernels
- ``hog``: pose of objects, by one histogram intersection for each part of the image
- ``snelson``: a toy, from a poor start
- ``kin40k``: a robot arm, and what free inducing inputs add
"""

import argparse
import time
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

from pyro_truncated import datasets
from pyro_truncated.gp import (
    CountKernel,
    Graphs,
    HashedCounts,
    HistogramIntersectionKernel,
    MinMaxKernel,
    RandomSearch,
    SubsetGPRegression,
    SumKernel,
    shortest_path,
    smooth_rbf,
    weisfeiler_lehman,
)

BLUE, RED = "#2b5c8a", "#c8553d"


def standardised_error(mean, y):
    return float((mean - y).square().mean() / y.var())


def fit(model, args, **options):
    start = time.process_time()
    model.fit(max_seconds=args.seconds, clock=time.process_time, **options)
    return time.process_time() - start


def compare(kernels, labels, train, test, new, y, args, picture):
    """Fits random and optimised subsets with a sum of kernels."""
    for name, algorithm in (("random", RandomSearch()), ("exchange", "exchange")):
        kernel = SumKernel(kernels(), redundant_sum=True, identity=True)
        generator = torch.Generator().manual_seed(args.seed)
        model = SubsetGPRegression(kernel, y[train], num_inducing=args.inducing, algorithm=algorithm, generator=generator)
        seconds = fit(model, args)
        mean, variance = model.predict(new)
        error = standardised_error(mean, y[test])
        print(f"{name:9} {args.inducing} inducing inputs: objective {model.objective_value:9.1f}, SMSE {error:.3f}, {seconds:.1f} CPU s")
    relevance = kernel.relevance
    for label, value in sorted(zip(labels, relevance.tolist(), strict=True), key=lambda pair: -pair[1]):
        print(f"  {label:32} {value:.3f}")
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.errorbar(y[test], mean, variance.sqrt(), fmt=".", color=BLUE, ecolor="#b8cbdc", elinewidth=0.5, markersize=4)
    left.axline((float(y.mean()), float(y.mean())), slope=1, color="black", linewidth=0.8)
    left.set(xlabel="measured", ylabel="predicted, one standard deviation", title=f"{args.inducing} of {len(train)}: SMSE {error:.2f}")
    right.barh(labels, relevance.tolist(), color=BLUE)
    right.invert_yaxis()
    right.tick_params(labelsize=7)
    right.set(xlabel="variance explained", title="relevance of the kernels")
    figure.savefig(picture, dpi=80, facecolor="white")


def molecules(args, picture):
    arrays = datasets.load("mol_thrombin")
    arrays = {name: torch.as_tensor(value) for name, value in arrays.items() if value.dtype.kind != "U"}
    y = arrays["pKi"].double()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(args.seed))
    order = order[y[order].isfinite()][: args.most]
    train, test = order[: int(0.8 * len(order))], order[int(0.8 * len(order)) :]
    fingerprint = HashedCounts.from_csr(arrays["fp_indptr"], arrays["fp_indices"].long(), arrays["fp_data"])
    features = {"fingerprint, Tanimoto": fingerprint, "fingerprint, MinMax": fingerprint}
    for labels in ("atom", "element", "degree", "none"):
        graphs = Graphs.from_molecules(arrays, labels)
        features |= {f"subtrees of depth {h}, {labels}": weisfeiler_lehman(graphs, h) for h in ((1, 3) if labels == "none" else (0, 3))}
        features[f"shortest paths, {labels}"] = shortest_path(graphs)
    made = {name: (MinMaxKernel if name.endswith("MinMax") else CountKernel)(counts[train]) for name, counts in features.items()}

    def fresh():
        for kernel in made.values():
            kernel.variance = torch.tensor(0.5 / len(made), dtype=torch.float64)
        return list(made.values())

    new = tuple(counts[test] for counts in features.values())
    compare(fresh, list(features), train, test, new, y, args, picture)


def hog(args, picture):
    arrays = datasets.load("coil_hog_pose")
    y = torch.as_tensor(arrays["Y"][:, 0]).double()
    blocks = torch.as_tensor(arrays["H"]).double().reshape(-1, 2, 4, 2, 4, 9).permute(1, 3, 0, 2, 4, 5).flatten(3).flatten(0, 1).flatten(2)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(args.seed))[: args.most]
    train, test = order[: int(0.8 * len(order))], order[int(0.8 * len(order)) :]
    labels = ["top left", "top right", "bottom left", "bottom right"]
    new = tuple(block[test] for block in blocks)
    compare(lambda: [HistogramIntersectionKernel(b[train], 0.25) for b in blocks], labels, train, test, new, y, args, picture)


def snelson_data():
    try:
        arrays = datasets.load("snelson1d")
        return (torch.as_tensor(arrays[name]).double().flatten() for name in ("x_train", "y_train"))
    except datasets.DatasetNotFoundError:
        x = 6 * torch.rand(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return x, torch.sin(2 * x) + 0.5 * torch.cos(5 * x) + 0.3 * torch.randn(200, dtype=torch.float64)


def snelson(args, picture):
    x, y = snelson_data()
    scale, grid = x.std(), torch.linspace(float(x.min()) - 1, float(x.max()) + 1, 200, dtype=torch.float64)
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    ways = {
        "fixed where they start": RandomSearch(),
        "exchange": "exchange",
        "exchange, then free": "exchange",
    }
    for ax, (name, algorithm) in zip(figure.subplots(1, 3, sharex=True, sharey=True).flat, ways.items(), strict=True):
        generator = torch.Generator().manual_seed(args.seed)
        model = SubsetGPRegression(smooth_rbf(x[:, None] / scale), y, num_inducing=8, algorithm=algorithm, generator=generator)
        start = x.argsort()[:8]
        model.index.copy_(start)
        fit(model, args, free_inputs=name.endswith("free"), free_input_evaluations=60)
        mean, variance = model.predict(grid[:, None] / scale)
        chosen = x[model.subset] if model.inducing_inputs is None else model.inducing_inputs.detach().squeeze(1) * scale
        print(f"{name:24} objective {model.objective_value:8.2f}")
        ax.fill_between(grid, mean - variance.sqrt(), mean + variance.sqrt(), color=BLUE, alpha=0.2)
        ax.plot(grid, mean, color=BLUE)
        ax.plot(x, y, ".", color="grey", markersize=2)
        low, high = float(y.min()) - 0.7, float(y.max()) + 0.7
        ax.plot(x[start], torch.full((8,), high), "k|", chosen, torch.full_like(chosen, low), "|", markersize=9, markeredgewidth=1.5)
        ax.lines[-1].set_color(RED)
        ax.set_title(f"{name}: objective {model.objective_value:.1f}", fontsize=10)
    figure.suptitle("eight inducing inputs, at the start (top, black) and learned (bottom, red)", fontsize=10)
    figure.savefig(picture, dpi=80, facecolor="white")


def kin40k(args, picture):
    arrays = datasets.load("kin40k")
    X, y, X_new, y_new = (torch.as_tensor(arrays[name]).double()[: args.most] for name in ("X_train", "y_train", "X_test", "y_test"))
    mean, scale = X.mean(0), X.std(0)
    figure = Figure(figsize=(6, 4), layout="constrained")
    ax = figure.subplots()
    ways = {"random": (RandomSearch(), False), "exchange": ("exchange", False), "exchange, then free": ("exchange", True)}
    for name, (algorithm, free_inputs) in ways.items():
        generator = torch.Generator().manual_seed(args.seed)
        model = SubsetGPRegression(smooth_rbf((X - mean) / scale), y, num_inducing=args.inducing, algorithm=algorithm, generator=generator)
        seconds = fit(model, args, free_inputs=free_inputs)
        error = standardised_error(model.predict((X_new - mean) / scale)[0], y_new)
        print(f"{name:20} {args.inducing} inducing inputs: objective {model.objective_value:9.1f}, SMSE {error:.3f}, {seconds:.1f} CPU s")
        seconds_passed, _, values = zip(*model.history, strict=True)
        ax.plot(seconds_passed, values, ".-", markersize=3, label=f"{name}: SMSE {error:.2f}")
    ax.set(xlabel="CPU seconds", ylabel="objective")
    ax.legend(frameon=False)
    figure.savefig(picture, dpi=80, facecolor="white")


DATA = {"molecules": molecules, "hog": hog, "snelson": snelson, "kin40k": kin40k}


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    args.output.mkdir(parents=True, exist_ok=True)
    # Torch imports much when its first optimiser is made, which is no method's own time.
    torch.optim.LBFGS([torch.zeros(1)])
    picture = args.output / f"sparse_regression_{args.data}.png"
    DATA[args.data](args, picture)
    print(f"picture: {picture}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", choices=list(DATA), default="snelson")
    parser.add_argument("--inducing", type=int, default=64, help="number of inducing inputs")
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU seconds for each fit")
    parser.add_argument("--most", type=int, default=10_000, help="most data points")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.inducing, args.seconds, args.most = 8, 0.3, 120
    return args


if __name__ == "__main__":
    main(parse_args())
