"""Does it predict? Checks on data that fit the model, and misfit.

    python examples/question_predict.py

Predictive checks, PSIS-LOO and LOO-PIT. The weights and the noise are latents with a normal guide, so leaving a data point out is more than
a figure of speech. The second data set has bars of varying strength, which the model does not know. Writes the diagnosis of both as pages,
and question_predict.png.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, AutoNormal, init_to_value
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, EvolutionarySearch, Truncated_ELBO, TruncationWarning, diagnose, fit, to_arviz
from pyro_truncated.datasets import bar_components
from pyro_truncated.diagnostics import cross_validate, plot_forest, plot_loo_pit, plot_pareto_k, plot_predictive_check


def model(y: torch.Tensor, num_latents: int) -> None:
    """A linear dictionary with sparse binary causes; everything has a prior."""
    weight = pyro.sample("weight", dist.Normal(0.0, 2.0).expand([y.shape[1], num_latents]).to_event(2))
    noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.3)).expand([num_latents]).to_event(1))
        pyro.sample("y", dist.Normal((s.unsqueeze(-2) * weight).sum(-1), noise.unsqueeze(-1)).to_event(1), obs=y)


def make_data(args: argparse.Namespace, varying: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(args.seed)
    components = 3 * bar_components(args.size)
    states = (torch.rand(args.images, components.shape[1], generator=generator) < 0.3).float()
    strength = torch.rand(states.shape, generator=generator) * 2 if varying else torch.ones_like(states)
    return (states * strength) @ components.mT + 0.5 * torch.randn(args.images, args.size**2, generator=generator)


def learn(args: argparse.Namespace, y: torch.Tensor) -> Any:
    """The fit as ArviZ data."""
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    start = {"weight": y[torch.randperm(len(y))[: 2 * args.size]].mT.clone(), "noise": torch.tensor(1.0)}
    guide = AutoGuideList(model)
    guide.append(AutoNormal(poutine.block(model, expose=["weight", "noise"]), init_loc_fn=init_to_value(values=start), init_scale=0.05))
    guide.append(AutoTruncated(model, num_states=args.states))
    elbo = Truncated_ELBO(EvolutionarySearch(parents=4, children=4, crossover=True), max_plate_nesting=1)
    svi = SVI(model, guide, Adam({"lr": 0.03}), elbo)
    training = fit(svi, y, 2 * args.size, steps=args.steps)
    dims = {"weight": ["pixel", "latent_"], "y": ["pixel"]}
    return to_arviz(
        model,
        guide,
        y,
        2 * args.size,
        num_samples=-(-args.samples // 4),
        dims=dims,
        seed=args.seed,
        training=training.record,
    )


def picture(idatas: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.1 * len(idatas)), layout="constrained")
    for row, (name, idata) in zip(figure.subplots(len(idatas), 4), idatas.items(), strict=True):
        plot_predictive_check(idata, row[0], group="marginal_predictive").set_title(f"{name}:\nnew data points", fontsize=10)
        plot_loo_pit(idata, row[1]).set_title("calibration, pixel by pixel", fontsize=10)
        plot_pareto_k(idata, row[2]).set_title("influence of data points", fontsize=10)
        plot_forest(idata, row[3], var_names=["weight"], most=10).set_title("some weights", fontsize=10)
    figure.savefig(path, dpi=70, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    args.output.mkdir(parents=True, exist_ok=True)
    idatas = {}
    for name, varying in (("bars of one strength", False), ("bars of varying strength", True)):
        idata = idatas[name] = learn(args, make_data(args, varying))
        page = args.output / f"question_predict_{name.split()[-2]}.html"
        print(f"\n{name}")
        with warnings.catch_warnings():
            # The verdict is printed.
            warnings.simplefilter("ignore", TruncationWarning)
            diagnose(idata, page)
        print(f"effective number of parameters {cross_validate(idata).p_loo:.1f}")
    picture(idatas, args.output / "question_predict.png")
    print(f"\npicture: {args.output / 'question_predict.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--images", type=int, default=150)
    parser.add_argument("--size", type=int, default=3, help="side of an image; twice as many bars")
    parser.add_argument("--states", type=int, default=30)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--samples", type=int, default=150, help="draws from the posterior")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.images, args.states, args.steps, args.samples = 15, 6, 4, 12
    return args


if __name__ == "__main__":
    main(parse_args())
