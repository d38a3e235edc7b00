"""A model with closed-form M-steps: binary factor analysis with unequal noise.

    python examples/own_closed_form_model.py

The likelihood knows its expected sufficient statistics, so the model is its program and its M-step. Every step of SVI is one of EM, and the
free energy never decreases, with missing data too.
"""

import argparse

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Population, Truncated_ELBO
from pyro_truncated.datasets import linear_bars, matched_bars
from pyro_truncated.distributions import LinearSuperposition
from pyro_truncated.extend import UniqueModule, takes_arrays


class BinaryFactorAnalysis(UniqueModule):
    """Binary factors with a dictionary, and one noise level for each dimension."""

    def __init__(self, y: Tensor, num_latents: int) -> None:
        super().__init__()
        self.num_latents = num_latents
        mean, deviation = y.nanmean(0), (y - y.nanmean(0)).square().nanmean(0).sqrt()
        self.weight = PyroParam((mean + deviation * torch.randn(num_latents, y.shape[1])).mT.contiguous())
        self.scale = PyroParam(deviation.clone(), constraints.positive)
        self.prior = PyroParam(torch.full((num_latents,), 2 / num_latents).to(y), constraints.unit_interval)

    def likelihood(self, states: Tensor) -> LinearSuperposition:
        """The likelihood of data under states."""
        return LinearSuperposition(states, self.weight, self.scale)

    @takes_arrays
    def forward(self, y: Tensor, batch_size: int | None = None) -> None:
        """The model."""
        prior = self.prior
        with pyro.plate("data", len(y), subsample_size=batch_size) as index:
            states = pyro.sample("s", dist.Bernoulli(prior).to_event(1))
            pyro.sample("y", self.likelihood(states), obs=y[index])

    @takes_arrays
    def sufficient_statistics(
        self, population: Population, y: Tensor, batch_size: int | None = None, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        """What the M-step needs."""
        return LinearSuperposition.statistics(population, y, temperature)

    def maximize(self, statistics: dict[str, Tensor]) -> None:
        """Makes the M-step: least squares, and their residuals as noise."""
        self.weight = (torch.linalg.pinv(statistics["pairs"]) @ statistics["cross"].unsqueeze(-1)).squeeze(-1).to(self.weight)
        errors = self.likelihood(torch.zeros(self.num_latents).to(self.weight)).square_error(statistics)
        self.scale = (errors / statistics["observed"]).sqrt().to(self.scale)
        self.prior = (statistics["states"] / statistics["num_data"]).clamp(1e-6, 1 - 1e-6).to(self.prior)


def make_data(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Returns bars under unequal noise with missing pixels, their dictionary, their noise."""
    bars = linear_bars(args.images, args.size, mean_active=2.0, noise=1e-6, generator=torch.Generator().manual_seed(args.seed))
    noise = torch.linspace(0.5, 3.0, args.size**2, dtype=torch.float64)
    y = bars.data.double() + noise * torch.randn(bars.data.shape, dtype=torch.float64)
    return torch.where(torch.rand(y.shape) < 0.1, torch.nan, y), bars.components, noise


def main(args: argparse.Namespace) -> list[float]:
    pyro.set_rng_seed(args.seed)
    y, components, noise = make_data(args)
    model = BinaryFactorAnalysis(y, components.shape[1])
    guide = AutoTruncated(model, num_states=args.states)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(crossover=True)))
    free_energies = [-svi.step(y) / len(y) for _ in range(args.iterations)]
    steps = torch.tensor(free_energies, dtype=torch.float64).diff()
    print(
        f"{args.images} images, {len(steps)} steps of EM: free energy from {free_energies[0]:.2f} to {free_energies[-1]:.2f} nats per image"
    )
    print(f"smallest gain of a step {float(steps.min()):.1e}")
    weight = model.weight.detach().to(components)
    print(f"bars found {matched_bars(weight, components)} of {components.shape[1]}")
    ratio = model.scale.detach() / noise
    print(f"learned over true noise, pixel by pixel: from {float(ratio.min()):.2f} to {float(ratio.max()):.2f}")
    return free_energies


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--size", type=int, default=5, help="side of an image; twice as many bars")
    parser.add_argument("--states", type=int, default=40)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.images, args.size, args.states, args.iterations = 80, 3, 16, 12
    return args


if __name__ == "__main__":
    main(parse_args())
