"""Which of 200 predictors matter? One posterior of 2^200 models.

The selectors are global, so the guide holds one population of models. Given the selectors the coefficients are Gaussian; this exact
conditional is handed to the guide, which then scores every model with its coefficients integrated out. How many predictors to expect,
how large their coefficients are and how much noise there is, is learned as well.

    python examples/spike_slab_regression.py
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import AutoTruncated, EvolutionarySearch, Truncated_ELBO


class Data(NamedTuple):
    """Predictors ``x (N, P)``, responses ``y (N,)`` and the true coefficients ``(P,)``."""

    x: Tensor
    y: Tensor
    coefficients: Tensor


def make_data(args: argparse.Namespace) -> Data:
    """Returns correlated predictors, a few of them with coefficients."""
    generator = torch.Generator().manual_seed(args.seed)
    noise = torch.randn(args.data, args.predictors, generator=generator, dtype=torch.float64)
    x = noise.clone()
    for column in range(1, args.predictors):
        x[:, column] = args.correlation * x[:, column - 1] + (1 - args.correlation**2) ** 0.5 * noise[:, column]
    coefficients = torch.zeros(args.predictors, dtype=torch.float64)
    where = torch.linspace(0, args.predictors - 1, args.relevant + 2).long()[1:-1]
    sizes = torch.linspace(2.0, 0.4, args.relevant, dtype=torch.float64)
    coefficients[where] = sizes * torch.tensor([1.0, -1.0]).repeat(args.relevant)[: args.relevant]
    y = x @ coefficients + torch.randn(args.data, generator=generator, dtype=torch.float64)
    return Data(x, y, coefficients)


def parameters() -> tuple[Tensor, Tensor, Tensor]:
    rate = pyro.param("rate", torch.tensor(0.05, dtype=torch.float64), constraint=constraints.unit_interval)
    slab = pyro.param("slab", torch.tensor(1.0, dtype=torch.float64), constraint=constraints.positive)
    noise = pyro.param("noise", torch.tensor(2.0, dtype=torch.float64), constraint=constraints.positive)
    return rate, slab, noise


def model(x: Tensor, y: Tensor) -> None:
    rate, slab, noise = parameters()
    num = x.shape[1]
    s = pyro.sample("s", dist.Bernoulli(rate).expand([num]).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, slab).expand([num]).to_event(1))
    pyro.sample("y", dist.Normal((s * b) @ x.mT, noise).to_event(1), obs=y)


def coefficients_given(states: dict[str, Tensor], x: Tensor, y: Tensor) -> None:
    r"""The exact conditional :math:`p(b \mid s, y)`, Gaussian with precision :math:`1/\tau^2 + X_s^\top X_s / \sigma^2`."""
    _, slab, noise = parameters()
    s = states["s"].to(x)
    precision = s.unsqueeze(-1) * (x.mT @ x) * s.unsqueeze(-2) / noise**2 + torch.eye(x.shape[1], dtype=x.dtype) / slab**2
    mean = torch.cholesky_solve((s * (y @ x) / noise**2).unsqueeze(-1), torch.linalg.cholesky(precision)).squeeze(-1)
    pyro.sample("b", dist.MultivariateNormal(mean, precision_matrix=precision, validate_args=False))


def collapsed(states: Tensor, data: Data) -> Tensor:
    """Returns log joints of selectors ``(C, P)`` and data in closed form."""
    rate, slab, noise = parameters()
    covariance = slab**2 * (data.x * states.unsqueeze(-2)) @ data.x.mT + noise**2 * torch.eye(len(data.y), dtype=data.y.dtype)
    prior = dist.Bernoulli(rate).log_prob(states).sum(-1)
    return prior + dist.MultivariateNormal(torch.zeros_like(data.y), covariance).log_prob(data.y)


def picture(data: Data, inclusion: Tensor, path: Path) -> None:
    from matplotlib.figure import Figure

    from pyro_truncated.diagnostics.pages.tensor_plots import ACCENT, COLOUR

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    correlation = (data.y @ data.x / (data.y.norm() * data.x.norm(dim=0))).abs()
    true = data.coefficients != 0
    for ax, height, label in ((upper, correlation, "|correlation with y|"), (lower, inclusion, "inclusion probability")):
        for chosen, colour in ((~true, COLOUR), (true, ACCENT)):
            ax.bar(chosen.nonzero().squeeze(-1).numpy(), height[chosen].numpy(), color=colour, width=1.4)
        ax.set_ylabel(label)
        ax.spines[["top", "right"]].set_visible(False)
    upper.set_title("red: predictors with a true effect; numbers: their coefficients", fontsize=10)
    lower.set(xlabel="predictor", ylim=(0, 1.18))
    for index in true.nonzero().squeeze(-1).tolist():
        lower.text(index, float(inclusion[index]) + 0.03, f"{data.coefficients[index]:.1f}", ha="center", fontsize=8)
    figure.savefig(path, dpi=90, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    data = make_data(args)
    guide = AutoTruncated(model, num_states=args.states, conditional=coefficients_given)
    # Differentiating costs more than searching, so search a few times before each gradient.
    elbo = Truncated_ELBO(EvolutionarySearch(parents=6, generations=1, crossover=True), search_steps=4)
    svi = SVI(model, guide, Adam({"lr": 0.1}), elbo)
    start = time.monotonic()
    for step in range(args.steps):
        loss = svi.step(data.x, data.y)
        if step % max(1, args.steps // 8) == 0 or step == args.steps - 1:
            print(f"step {step:4}   log evidence at least {-loss:9.3f}", flush=True)
    guide.refresh_(data.x, data.y)
    inclusion = guide.marginals()["s"].reshape(-1).double()
    rate, slab, noise = (value.item() for value in map(torch.Tensor.detach, parameters()))
    print(
        f"{time.monotonic() - start:.0f} s; learned: noise {noise:.2f}, slab {slab:.2f}, {rate * args.predictors:.1f} predictors expected"
    )
    with torch.no_grad():
        difference = guide.population().log_joint - collapsed(guide.population().states().double(), data)
    print(f"largest difference of a model's log joint from the closed form: {float(difference.abs().max()):.1e}")
    print("predictor   inclusion   true coefficient")
    for index in inclusion.argsort(descending=True)[: args.relevant + 4].tolist():
        print(f"{index:9}   {inclusion[index]:9.3f}   {data.coefficients[index]:16.2f}")
    args.output.mkdir(parents=True, exist_ok=True)
    picture(data, inclusion, args.output / "spike_slab_regression.png")
    print(f"picture: {args.output / 'spike_slab_regression.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=int, default=100, help="number of observations")
    parser.add_argument("--predictors", type=int, default=200)
    parser.add_argument("--relevant", type=int, default=8, help="predictors with an effect")
    parser.add_argument("--correlation", type=float, default=0.6, help="of neighbouring predictors")
    parser.add_argument("--states", type=int, default=30, help="models in the population")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.data, args.predictors, args.relevant, args.states, args.steps = 20, 12, 2, 10, 4
    return args


if __name__ == "__main__":
    main(parse_args())
