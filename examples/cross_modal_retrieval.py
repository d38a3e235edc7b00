"""Retrieves images by texts and texts by images, through shared latent dimensions.

    python examples/cross_modal_retrieval.py

Uses the Wikipedia articles of the data folder, or where there is none two made-up views. Topics of the stored articles are a third view
of the model, a categorical one; queries have none. Stored articles are ranked by the probability that the query has their topic, which is
what "relevant" means here. That averages 0.49 to 0.53 mean average precision where the bound hardly rises any more (1000 iterations).
Distances between latents, shown beside, rank by everything that images and texts share, of which topics are a small part, and average
0.25; without any labels they have 0.31. Writes cross_modal_retrieval.png: precision over recall for queries by image and by text, and which
view uses which dimension.
"""

import argparse
import time
from pathlib import Path

import matplotlib
import torch

from pyro_truncated import datasets
from pyro_truncated.gplvm import CategoricalLabels, Posterior, SpikeSlabMRD, initialize, maximize_bound, plot_switches, update_switches

NAMES = ("image", "text", "topic")
TOPIC = NAMES.index("topic")


def load(args: argparse.Namespace) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Standardised training views, test views, and the topics of both."""
    try:
        parts = [datasets.load(f"wiki_crossmodal_{part}") for part in ("train", "devtest")]
    except datasets.DatasetNotFoundError:
        parts = made_up(args)
    topics = [torch.as_tensor(part["y"]).long()[: args.articles] for part in parts]
    views = []
    for name, copies in (("img_bow", 1), ("txt_lda", 6)):
        train, test = (torch.as_tensor(part[name]).double()[: args.articles] for part in parts)
        mean, deviation = train.mean(0), train.std(0).clamp(min=1e-12)
        # Copies of the few text features weigh as much as the many image features.
        views.append([((v - mean) / deviation).repeat(1, copies) for v in (train, test)])
    return [v[0] for v in views], [v[1] for v in views], topics[0], topics[1]


def made_up(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(args.seed)
    means = torch.randn(10, 20, generator=generator)
    parts = []
    for size in (args.articles, 60):
        y = torch.randint(10, (size,), generator=generator)
        both = means[y] + torch.randn(size, 20, generator=generator)
        parts.append({"img_bow": both[:, :15], "txt_lda": both[:, 10:], "y": y})
    return parts


def precision_recall(distances: torch.Tensor, query: torch.Tensor, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Returns eleven levels of recall, their precisions, and the mean average precision."""
    hits = (stored[distances.argsort(1)] == query.unsqueeze(1)).double()
    precision = hits.cumsum(1) / torch.arange(1, hits.shape[1] + 1)
    recall = hits.cumsum(1) / hits.sum(1, keepdim=True)
    levels = torch.linspace(0, 1, 11, dtype=torch.float64)
    at_least = torch.stack([precision.masked_fill(recall < level, 0).amax(1).nanmean() for level in levels])
    return at_least, levels, float(((precision * hits).sum(1) / hits.sum(1)).nanmean())


def train(args: argparse.Namespace, views: list[torch.Tensor]) -> SpikeSlabMRD:
    """Trains from principal components; switches are on until the latents converge."""
    torch.manual_seed(args.seed)
    sizes, likelihood = [v.shape[1] for v in views], ["gaussian", "gaussian", CategoricalLabels(10)]
    model = SpikeSlabMRD(len(views[0]), sizes, 10, num_inducing=args.inducing, likelihood=likelihood)
    initialize(model, views, "pca", torch.Generator().manual_seed(args.seed))
    with torch.no_grad():
        for view in list(model.views)[:TOPIC]:
            view.noise = torch.full_like(view.noise, 0.5)  # images and texts say little of each other
    with model.fix_switches(1.0):
        maximize_bound(model, views, args.steps, fixed=("noise",))
        maximize_bound(model, views, args.steps)
    with torch.no_grad():
        model.logits = torch.full_like(model.logits, 3.0)
    update_switches(model, views)
    return model


def main(args: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    matplotlib.use("Agg")
    views, queries, topics, truth = load(args)
    start = time.monotonic()
    views.append(topics.unsqueeze(1).double())
    model = train(args, views)
    posterior = Posterior(model, views)
    bound = float(model.bound(views).detach())
    print(f"{len(topics)} articles, bound {bound:.0f} after {time.monotonic() - start:.0f} s; {posterior.group_dimensions()}")
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    scores = []
    for c, name in enumerate(NAMES[:TOPIC]):
        latents = posterior.infer({c: queries[c]}, steps=args.steps)
        precision, levels, score = precision_recall(-posterior.response(latents, TOPIC)[:, topics], truth, topics)
        _, _, by_distance = precision_recall(posterior.distances(latents), truth, topics)
        scores.append(score)
        left.plot(levels, precision, marker=".", label=f"{name} query, mean average precision {score:.3f}")
        print(f"{name} query: mean average precision {score:.3f} by the probability of the same topic, {by_distance:.3f} by distance")
    chance = float((topics.bincount(minlength=10) / len(topics))[truth].mean())
    print(f"average {sum(scores) / 2:.3f}; a random ranking has about {chance:.3f}")
    left.axhline(chance, color="0.5", linewidth=1, linestyle="dashed", label=f"random ranking, about {chance:.3f}")
    left.set(xlabel="recall", ylabel="precision", ylim=(0, 1))
    left.legend(frameon=False, fontsize=8)
    plot_switches(model, right, names=NAMES).set_title("probabilities of the switches", fontsize=10)
    args.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output / "cross_modal_retrieval.png", dpi=80, facecolor="white")
    print(f"picture: {args.output / 'cross_modal_retrieval.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--articles", type=int, default=3000, help="training articles at most")
    parser.add_argument("--inducing", type=int, default=50)
    parser.add_argument("--steps", type=int, default=40, help="quasi-Newton iterations of each phase")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.articles, args.inducing, args.steps = 40, 5, 2
    return args


if __name__ == "__main__":
    main(parse_args())
