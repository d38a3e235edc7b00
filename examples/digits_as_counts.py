"""Maximal causes of counts learn parts of digits, and restore halves.

    python examples/digits_as_counts.py

A pixel of scikit-learn's digits counts how many of sixteen points the pen has touched. Ink does not add up where strokes cross, so the
strongest cause decides. Prints what the counts of hidden halves of unseen digits cost in nats, under the model and under the mean digit.
Writes digits_as_counts.png: the causes learned (whole digits, and strokes), and digits beside their hidden and restored halves.
"""

import argparse
import time
from pathlib import Path

import matplotlib
import pyro
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from pyro_truncated import EvolutionarySearch, LearnConfig, learn
from pyro_truncated.models import ExponentialFamilyMaximalCauses

SIDE = 8


def half_hidden(counts: Tensor) -> Tensor:
    """Digits whose lower half is missing."""
    hidden = counts.clone()
    hidden[:, SIDE**2 // 2 :] = torch.nan
    return hidden


def nats(counts: Tensor, means: Tensor) -> float:
    """Mean negative log probability of a pixel of the lower half."""
    lower = slice(SIDE**2 // 2, None)
    return -float(torch.distributions.Poisson(means[:, lower].clamp(min=1e-2)).log_prob(counts[:, lower]).mean())


def picture(weight: Tensor, unseen: Tensor, hidden: Tensor, restored: Tensor, path: Path) -> None:
    from matplotlib.figure import Figure

    columns = min(8, weight.shape[1], len(unseen))
    causes = [weight[:, k] for k in range(min(4 * columns, weight.shape[1]))]
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2)
    left.suptitle("causes learned")
    right.suptitle("unseen digits, their upper halves, restored")
    for part, rows, images in ((left, 4, causes), (right, 3, [*unseen[:columns], *hidden[:columns], *restored[:columns]])):
        axes = part.subplots(rows, columns)
        for axis in axes.flat:
            axis.axis("off")
        for axis, image in zip(axes.flat, images, strict=False):
            shown = matplotlib.colormaps["Greys"].with_extremes(bad="wheat")
            axis.imshow(image.reshape(SIDE, SIDE).numpy(), cmap=shown, vmin=0, vmax=16, interpolation="nearest")
    figure.savefig(path, dpi=80, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    counts = torch.from_numpy(load_digits().data).float()
    counts = counts[torch.randperm(len(counts), generator=torch.Generator().manual_seed(args.seed))]
    digits, unseen = counts[: args.digits], counts[-args.unseen :]

    start = time.process_time()
    model = ExponentialFamilyMaximalCauses(SIDE**2, args.causes, family="poisson")
    config = LearnConfig(restart_steps=args.short_steps)
    guide = learn(model, digits, num_states=args.states, steps=args.steps, restarts=args.starts, config=config)
    used = guide.marginals()["s"].sum(1).mean()
    print(f"{args.digits} digits, {args.causes} causes, {used:.1f} of them in a digit: {time.process_time() - start:.0f} CPU seconds")

    hidden = half_hidden(unseen)
    found = guide.infer(hidden, EvolutionarySearch(crossover=True), steps=args.search_steps)
    restored = model.reconstruct(found.population(), hidden)
    mean = digits.mean(0).expand_as(unseen)
    print(f"nats per hidden pixel: {nats(unseen, restored):.2f} under the model, {nats(unseen, mean):.2f} under the mean digit")
    print(f"mean absolute error: {(restored - unseen).abs()[:, 32:].mean():.2f} and {(mean - unseen).abs()[:, 32:].mean():.2f} counts")

    args.output.mkdir(parents=True, exist_ok=True)
    picture(model.weight.detach(), unseen, hidden, restored, args.output / "digits_as_counts.png")
    print(f"picture: {args.output / 'digits_as_counts.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--digits", type=int, default=1500)
    parser.add_argument("--unseen", type=int, default=200)
    parser.add_argument("--causes", type=int, default=32)
    parser.add_argument("--states", type=int, default=32)
    parser.add_argument("--starts", type=int, default=1, help="short runs; with one there is nothing to compare")
    parser.add_argument("--short-steps", type=int, default=40)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--search-steps", type=int, default=20, help="searches for the causes of an unseen digit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.digits, args.unseen, args.causes, args.states = 60, 10, 8, 8
        args.short_steps, args.steps, args.search_steps = 3, 3, 2
    return args


if __name__ == "__main__":
    main(parse_args())
