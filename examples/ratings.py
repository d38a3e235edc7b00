"""Predicts missing ratings of films by maximal causes: the tastes of viewers.

    python examples/ratings.py

Viewers have a few tastes each, and every taste rates every film. A viewer's stars are those of the taste that likes the film best, with a
viewer's whims. Three of four ratings are missing. The data are generated. Maximal causes with gamma observations learn the tastes from the
ratings that are there, and predict the others. Beside them is the usual baseline, the mean rating corrected for viewer and film. Prints
errors of ratings that were never seen, and writes ratings.png: true and learned tastes, and who was found to have which.
"""

import argparse
import time
from pathlib import Path

import matplotlib
import pyro
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from pyro_truncated import LearnConfig, learn
from pyro_truncated.models import ExponentialFamilyMaximalCauses


def generated(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Returns stars ``(viewers, films)``, tastes ``(films, tastes)``, and who has which."""
    generator = torch.Generator().manual_seed(args.seed)
    liked = torch.where(torch.rand(args.films, args.tastes, generator=generator) < 0.25, 4.5, 2.0)
    has = torch.rand(args.viewers, args.tastes, generator=generator) < 2 / args.tastes
    stars = torch.where(has.unsqueeze(1), liked, 1.5).amax(-1) + args.whims * torch.randn(args.viewers, args.films, generator=generator)
    return stars.round().clamp(1, 5), liked, has


def baseline(seen: Tensor) -> Tensor:
    """Returns mean ratings corrected for viewer and film, shrunk by ten ratings."""
    mean = seen.nanmean()
    film = (seen - mean).nansum(0) / (10 + (~seen.isnan()).sum(0))
    viewer = (seen - mean - film).nansum(1) / (10 + (~seen.isnan()).sum(1))
    return mean + film + viewer.unsqueeze(1)


def error(predicted: Tensor, ratings: Tensor, is_hidden: Tensor) -> float:
    """Root mean square over the hidden ratings."""
    return float((predicted - ratings)[is_hidden].square().mean().sqrt())


def picture(liked: Tensor, learned: Tensor, has: Tensor, found: Tensor, path: Path) -> None:
    from matplotlib.figure import Figure

    order = linear_sum_assignment(torch.cdist(liked.mT, learned.mT).numpy())[1]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, 4)
    for axis, image, title in ((axes[0], liked, "stars of the true tastes"), (axes[1], learned[:, order], "as learned")):
        axis.imshow(image.numpy(), cmap="viridis", vmin=1, vmax=5, aspect="auto", interpolation="nearest")
        axis.set(title=title, xlabel="taste", ylabel="film")
    for axis, image, title in ((axes[2], has.float(), "who has which taste"), (axes[3], found[:, order], "posterior probability")):
        axis.imshow(image[:40].numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axis.set(title=title, xlabel="taste", ylabel="viewer")
    figure.savefig(path, dpi=80, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    ratings, liked, has = generated(args)
    is_hidden = torch.rand(ratings.shape, generator=torch.Generator().manual_seed(args.seed + 1)) < args.missing
    seen = ratings.masked_fill(is_hidden, torch.nan)

    start = time.process_time()
    model = ExponentialFamilyMaximalCauses(args.films, args.tastes, family="gamma")
    config = LearnConfig(restart_steps=args.short_steps)
    guide = learn(model, seen, num_states=args.states, steps=args.steps, restarts=args.starts, config=config)
    predicted = model.reconstruct(guide.population(), seen)
    share = 100 * float(is_hidden.float().mean())
    print(
        f"{args.viewers} viewers, {args.films} films, {share:.0f} % of the ratings missing: {time.process_time() - start:.0f} CPU seconds"
    )
    possible = torch.where(has.unsqueeze(1), liked, 1.5).amax(-1)
    rows = {"maximal causes": predicted, "viewer and film": baseline(seen), "the true tastes": possible}
    for name, values in rows.items():
        print(f"{name:16} error {error(values, ratings, is_hidden):.2f} stars")

    args.output.mkdir(parents=True, exist_ok=True)
    # Where a taste likes a film less than everybody does, it does not show how much less.
    learned = model.weight.detach().maximum(model.background.detach().unsqueeze(-1))
    picture(liked, learned, has, guide.marginals()["s"], args.output / "ratings.png")
    print(f"picture: {args.output / 'ratings.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--viewers", type=int, default=600)
    parser.add_argument("--films", type=int, default=40)
    parser.add_argument("--tastes", type=int, default=5)
    parser.add_argument("--missing", type=float, default=0.75, help="share of the ratings that nobody has given")
    parser.add_argument("--whims", type=float, default=0.7, help="standard deviation of a viewer's whims, in stars")
    parser.add_argument("--states", type=int, default=16)
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--short-steps", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.viewers, args.films, args.tastes, args.states = 60, 12, 3, 8
        args.starts, args.short_steps, args.steps = 1, 3, 3
    return args


if __name__ == "__main__":
    main(parse_args())
