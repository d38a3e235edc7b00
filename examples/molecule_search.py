"""Bayesian optimisation of molecules with BoTorch and a sum of graph kernels.

    pip install pyro-truncated[botorch]
    python examples/molecule_search.py --data mol_esol

First come two regressions on a share of the pool. One has the Tanimoto kernel on fingerprints, the usual default. The other has a sum
of it with kernels of subtrees and shortest paths. Then comes the search. From some molecules at random, BoTorch's
``optimize_acqf_discrete`` picks one after the other by expected improvement, and each is measured. Without BoTorch only the first part
runs; without the data folder the pool is made of random strings.
"""

import argparse
import importlib.util

import torch

from pyro_truncated import datasets
from pyro_truncated.gp import CountKernel, Graphs, HashedCounts, SubsetGPRegression, SumKernel, shortest_path, spectrum, weisfeiler_lehman


def load(args: argparse.Namespace) -> tuple[list[HashedCounts], torch.Tensor]:
    """Counts of features of each kind, and what is to be maximised."""
    try:
        arrays = {name: torch.as_tensor(v) for name, v in datasets.load(args.data).items() if v.dtype.kind != "U"}
    except datasets.DatasetNotFoundError:
        return made_up(args)
    features = [HashedCounts.from_csr(arrays["fp_indptr"], arrays["fp_indices"].long(), arrays["fp_data"])]
    for labels in ("atom", "element", "none"):
        graphs = Graphs.from_molecules(arrays, labels)
        features += [weisfeiler_lehman(graphs, 0 if labels == "element" else 2), shortest_path(graphs)]
    chosen = torch.randperm(len(arrays["y"]), generator=torch.Generator().manual_seed(args.seed))[: args.most]
    return [counts[chosen] for counts in features], arrays["y"].double()[chosen]


def made_up(args: argparse.Namespace) -> tuple[list[HashedCounts], torch.Tensor]:
    letters = torch.randint(4, (min(args.most, 400), 12), generator=torch.Generator().manual_seed(args.seed))
    words = ["".join("CNOF"[letter] for letter in row) for row in letters.tolist()]
    y = torch.tensor([word.count("CN") + 2 * word.count("FO") - word.count("NN") for word in words], dtype=torch.float64)
    return [spectrum(words, 2), spectrum(words, 1)], y


def regression(features: list[HashedCounts], y: torch.Tensor, known: torch.Tensor) -> SubsetGPRegression:
    """Fits an exact regression with one kernel for each kind of features."""
    kernels = [CountKernel(counts[known], "tanimoto", 1 / len(features)) for counts in features]
    model = SubsetGPRegression(SumKernel(kernels), y[known], noise=0.1)
    model.fit(max_epochs=50)
    return model


def compare(features: list[HashedCounts], y: torch.Tensor, generator: torch.Generator) -> None:
    order = torch.randperm(len(y), generator=generator)
    train, test = order[: int(0.8 * len(y))], order[int(0.8 * len(y)) :]
    for name, kinds in (("Tanimoto on fingerprints", features[:1]), ("with graph kernels", features)):
        mean, variance = regression(kinds, y, train).predict(tuple(counts[test] for counts in kinds))
        error = float((mean - y[test]).square().mean() / y[test].var())
        inside = float(((mean - y[test]).abs() < 1.96 * variance.sqrt()).double().mean())
        print(f"{name:26} error {error:.3f} of the variance, {inside:.0%} of the test molecules in their 95 % intervals")


def search(features: list[HashedCounts], y: torch.Tensor, args: argparse.Namespace, generator: torch.Generator) -> None:
    from botorch.acquisition import LogExpectedImprovement
    from botorch.optim import optimize_acqf_discrete

    from pyro_truncated.gp.botorch_models import SubsetGPModel

    def lookup(X: torch.Tensor) -> tuple[HashedCounts, ...]:
        """Returns the features of the molecules at positions ``X (k, 1)``."""
        return tuple(counts[X[:, 0].long()] for counts in features)

    order = torch.randperm(len(y), generator=generator)
    known = order[: args.start]
    for step in range(args.steps):
        model = SubsetGPModel(regression(features, y, known), lookup)
        left = torch.ones(len(y), dtype=torch.bool).index_fill(0, known, False)
        choices = left.nonzero().double()
        pick, _ = optimize_acqf_discrete(LogExpectedImprovement(model, best_f=y[known].max()), q=1, choices=choices)
        known = torch.cat([known, pick.long().flatten()])
        if (step + 1) % max(1, args.steps // 5) == 0:
            rank = int((y > y[known].max()).sum()) + 1
            print(f"{len(known):4} molecules measured: best {float(y[known].max()):.2f}, number {rank} of {len(y)}")
    chance = y[order[: len(known)]]
    print(f"as many at random: best {float(chance.max()):.2f}, number {int((y > chance.max()).sum()) + 1}")


def main(args: argparse.Namespace) -> None:
    features, y = load(args)
    generator = torch.Generator().manual_seed(args.seed)
    compare(features, y, generator)
    if importlib.util.find_spec("botorch") is None:
        print("BoTorch is not installed: pip install pyro-truncated[botorch]")
        return
    search(features, y, args, generator)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", choices=["mol_esol", "mol_lipophilicity"], default="mol_esol")
    parser.add_argument("--most", type=int, default=1200, help="molecules in the pool at most")
    parser.add_argument("--start", type=int, default=30, help="molecules measured before the search")
    parser.add_argument("--steps", type=int, default=30, help="molecules picked one after the other")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.most, args.start, args.steps = 60, 10, 2
    return args


if __name__ == "__main__":
    main(parse_args())
