"""Bars that are superposed in three ways, with four ways of preselection.

Bars add up (A), add up with varying strength (B), or hide each other, with varying strength (C). For each image EM considers only some
of the bars. A hand-crafted affinity ranks them, or Gaussian processes predict them from the image, with a linear kernel, an RBF kernel, or
their sum.

    python examples/bars_selection.py

writes bars_selection.png: images of each kind, and the dictionaries that each selection leads to.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import matplotlib
import pyro
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, GibbsEM, GibbsGuide, Truncated_ELBO
from pyro_truncated.datasets import bar_components, matched_bars
from pyro_truncated.diagnostics.pages import tensor_plots as plots
from pyro_truncated.models import BinarySparseCoding, MaxSpikeSlabSparseCoding, SpikeSlabSparseCoding
from pyro_truncated.multistart import best_start
from pyro_truncated.search import Cosine, GPSelect, Preselection, Singletons

MODELS = {"A: binary": BinarySparseCoding, "B: spike-and-slab": SpikeSlabSparseCoding, "C: maximum": MaxSpikeSlabSparseCoding}
SLAB_DEVIATION = {"A: binary": 0.0, "B: spike-and-slab": 0.5, "C: maximum": 0.3}
SELECTIONS = ("hand-crafted", "linear", "rbf", "composition")
AMPLITUDE, NOISE = 10.0, 2.0**0.5
SHORT = 40  # iterations of a short run


def make_data(args: argparse.Namespace, kind: str, components: Tensor) -> Tensor:
    """Images ``(N, D)`` with two bars on average."""
    generator = torch.Generator().manual_seed(args.seed)
    shape = (args.images, components.shape[1])
    strength = 1 + SLAB_DEVIATION[kind] * torch.randn(shape, generator=generator)
    coefficients = strength * (torch.rand(shape, generator=generator) < 2 / shape[1])
    strongest = (coefficients.unsqueeze(1) * components).amax(-1).clamp(min=0.0)
    clean = strongest if MODELS[kind] is MaxSpikeSlabSparseCoding else coefficients @ components.mT
    return clean + NOISE * torch.randn(clean.shape, generator=generator)


def make_search(args: argparse.Namespace, kind: str, selection: str, model: Any) -> Preselection:
    if selection != "hand-crafted":
        return GPSelect(args.selected, kernel=selection, merge=False, fit_steps=8)
    affinity = Singletons() if MODELS[kind] is SpikeSlabSparseCoding else Cosine(lambda: model.weight)
    return Preselection(affinity, args.selected, merge=False)


def learn(args: argparse.Namespace, kind: str, selection: str, y: Tensor) -> Tensor:
    """The dictionary ``(D, H)``."""
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    model = MODELS[kind](y.shape[1], 2 * args.size).initialize(y)
    num_states = 2**args.selected
    search = make_search(args, kind, selection, model)
    # Two bars may share an element for good; the best of a few short runs tells. Hot posteriors at first: then bars may still part.
    options = {"num_starts": args.starts, "num_data": len(y), "steps": SHORT, "num_states": num_states}
    best_start(model, y, search, temperature=lambda step: max(1.0, 4.0 - 5.0 * step / SHORT), **options)
    if isinstance(model, MaxSpikeSlabSparseCoding):
        # Its posterior has no closed form even for few bars: Gibbs sampling takes the place of the sum over states.
        svi = SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(search))
    else:
        svi = SVI(model, AutoTruncated(model, num_states=num_states), ClosedForm(model), Truncated_ELBO(search))
    for _ in range(args.iterations):
        svi.step(y)
    return model.weight.detach()


def picture(images: dict[str, Tensor], results: dict[tuple[str, str], Tensor], components: Tensor, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.4 * (1 + len(SELECTIONS)), 1.45 * len(MODELS)), layout="constrained")
    axes = figure.subplots(len(MODELS), 1 + len(SELECTIONS))
    for row, kind in zip(axes, MODELS, strict=True):
        plots.plot_dictionary(images[kind][:10].mT, row[0], columns=5).set_title(f"images, {kind}", fontsize=9)
        for ax, selection in zip(row[1:], SELECTIONS, strict=True):
            weight = results[kind, selection]
            order = (weight.mT @ components).argmax(1).argsort()
            plots.plot_dictionary(weight[:, order], ax, columns=5)
            ax.set_title(f"{selection}: {matched_bars(weight, components)} of {components.shape[1]} bars", fontsize=9)
    figure.savefig(path, dpi=80, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    components = AMPLITUDE * bar_components(args.size)
    images = {kind: make_data(args, kind, components) for kind in MODELS}
    results = {}
    for kind in MODELS:
        for selection in SELECTIONS:
            start = time.process_time()
            weight = results[kind, selection] = learn(args, kind, selection, images[kind])
            found, seconds = matched_bars(weight, components), time.process_time() - start
            print(f"{kind:18} {selection:13} bars found {found:2} of {weight.shape[1]}   {seconds:5.1f} CPU seconds")
    args.output.mkdir(parents=True, exist_ok=True)
    picture(images, results, components, args.output / "bars_selection.png")
    print(f"picture: {args.output / 'bars_selection.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--size", type=int, default=5, help="side of an image; twice as many bars")
    parser.add_argument("--selected", type=int, default=5, help="bars considered for each image")
    parser.add_argument("--starts", type=int, default=4, help="short runs to start from the best of")
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.images, args.size, args.selected, args.starts, args.iterations = 40, 3, 3, 1, 3
    return args


if __name__ == "__main__":
    main(parse_args())
