"""Which model is better? Three models of binary bars, compared by PSIS-LOO.

    python examples/question_models.py

A probability and a density are no numbers to compare. The Gaussian models get the same data with uniform noise added. Their expected log
density is then a lower bound on the log probability that their discretised versions give to the binary data. The parameters are point
estimates, so the comparison is plug-in, and images that no model has seen have the last word. Writes question_models.png.
"""

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pyro
import torch
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO, TruncationWarning, fit, to_arviz
from pyro_truncated.datasets import noisy_or_bars
from pyro_truncated.diagnostics import compare_models, plot_comparison
from pyro_truncated.models import BinarySparseCoding, NoisyOr, SpikeSlabSparseCoding

MODELS: dict[str, tuple[Callable[..., Any], bool]] = {
    "noisy-OR": (NoisyOr, True),
    "binary sparse coding": (BinarySparseCoding, False),
    "spike and slab": (SpikeSlabSparseCoding, False),
}


def learn(args: argparse.Namespace, make: Callable[..., Any], seen: torch.Tensor, unseen: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Returns ArviZ data of the fit, and log likelihoods of unseen images."""
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    model = make(seen.shape[1], 2 * args.size).initialize(seen)
    search = EvolutionarySearch(parents=4, children=4, crossover=True)
    elbo = Truncated_ELBO(search, temperature=lambda step: max(1.0, 5 * (1 - step / (0.6 * args.steps))))
    svi = SVI(model, AutoTruncated(model, num_states=args.states), ClosedForm(model), elbo)
    training = fit(svi, seen, steps=args.steps)
    idata = to_arviz(model, svi.guide, seen, num_samples=20, num_predictive=0, training=training.record, seed=args.seed)
    inferred = svi.guide.infer(unseen, search, steps=20)
    return idata, inferred.population().free_energy()


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    generator = torch.Generator().manual_seed(args.seed)
    data = noisy_or_bars(2 * args.images, args.size, generator=generator).data
    dequantised = data + torch.rand(data.shape, generator=generator)
    fits, unseen = {}, {}
    for name, (make, is_binary) in MODELS.items():
        y = data if is_binary else dequantised
        fits[name], unseen[name] = learn(args, make, y[: args.images], y[args.images :])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TruncationWarning)
        table = compare_models(fits)
    columns = [column for column in ("rank", "elpd_loo", "elpd", "elpd_diff", "dse", "missing_nats", "plug_in") if column in table]
    print(table[columns].to_string())
    for warning in caught:
        print(f"\n{warning.message}")
    print("\nnats per image that no model has seen, and the difference to the best with its standard error:")
    best = max(unseen, key=lambda name: float(unseen[name].mean()))
    for name, values in unseen.items():
        difference = values - unseen[best]
        print(f"  {name:22} {values.mean():8.2f}   {difference.mean():7.2f} ± {difference.std() / len(difference) ** 0.5:.2f}")
    args.output.mkdir(parents=True, exist_ok=True)
    picture(table, unseen, args.output / "question_models.png")
    print(f"picture: {args.output / 'question_models.png'}")


def picture(table: Any, unseen: dict[str, torch.Tensor], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_comparison(table, left).set_title("images seen (plug-in)", fontsize=10)
    names = list(table.index)[::-1]
    means = [float(unseen[name].mean()) for name in names]
    errors = [float(unseen[name].std() / len(unseen[name]) ** 0.5) for name in names]
    right.errorbar(means, range(len(means)), xerr=errors, fmt="o", color="black", capsize=3)
    right.set_yticks(range(len(means)), names)
    right.set(xlabel="log likelihood per image, nats", title="images that no model has seen", ylim=(-0.5, len(means) - 0.5))
    right.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=80, facecolor="white")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--images", type=int, default=400, help="seen by the models; as many more are not")
    parser.add_argument("--size", type=int, default=4, help="side of an image; twice as many bars")
    parser.add_argument("--states", type=int, default=40)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.images, args.size, args.states, args.steps = 20, 3, 8, 4
    return args


if __name__ == "__main__":
    main(parse_args())
