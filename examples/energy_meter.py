"""Energy disaggregation: which of ten appliances is on, by one meter?

    python examples/energy_meter.py

writes energy_meter.png: the meter, and the power of each appliance, true and inferred. All 1024 joint states of a minute are too many to
be kept for each; 32 of them are. Flips of single minutes get stuck where several appliances explain the same hour, blocks of appliances do
not.
"""

import argparse
import time
from pathlib import Path

import matplotlib
import torch

from pyro_truncated.distributions import BinaryChains
from pyro_truncated.sequences import BlockSearch, ChainPosterior, LinearGaussianSteps


def simulate(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, BinaryChains]:
    """Returns meter ``(1, T, 1)``, states ``(1, T, M)``, powers ``(1, M)`` and transitions."""
    generator = torch.Generator().manual_seed(args.seed)
    first, second, third = torch.rand(3, args.appliances, dtype=torch.float64, generator=generator)
    power = (60 * 40**first).sort(descending=True).values
    # They run for five minutes to two hours, a tenth to four tenths of the day.
    end, share = 1 / (5 * 24**second), 0.1 + 0.3 * third
    begin = end * share / (1 - share)
    habits = torch.stack([torch.stack([1 - begin, begin], -1), torch.stack([end, 1 - end], -1)], -2)
    prior = BinaryChains(share, habits, args.minutes).expand([1])
    torch.manual_seed(args.seed)
    states = prior.sample()
    noise = args.noise * torch.randn(1, args.minutes, 1, dtype=torch.float64, generator=generator)
    return states @ power.unsqueeze(-1) + noise, states, power.unsqueeze(0), prior


def picture(y: torch.Tensor, states: torch.Tensor, on: torch.Tensor, power: torch.Tensor, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    hours = torch.arange(y.shape[1]) / 60
    top.plot(hours, y[0, :, 0], color="black", linewidth=0.6)
    top.set(ylabel="watt", title="what the meter shows")
    for ax, share, title in ((middle, states[0], "what was on"), (bottom, on[0], "posterior mean, from the meter alone")):
        ax.stackplot(hours, *(share * power).mT, linewidth=0)
        ax.set(ylabel="watt", title=title)
    bottom.set_xlabel("hour")
    figure.savefig(path, dpi=80, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    y, states, power, prior = simulate(args)
    likelihood = LinearGaussianSteps(y, power, torch.tensor(args.noise))
    start = time.process_time()
    posterior = ChainPosterior(likelihood, prior.transitions(), num_states=args.states).improve_(40)
    print(f"flips of single minutes: free energy {float(posterior.free_energy()):.1f}   {time.process_time() - start:.1f} CPU s")
    search = BlockSearch(args.block, generator=torch.Generator().manual_seed(args.seed))
    posterior.anneal_(max(1.5, (90 / args.noise) ** 2), search, steps=args.steps).search_(search, args.rounds).improve_()
    print(f"annealed, with blocks:   free energy {float(posterior.free_energy()):.1f}   {time.process_time() - start:.1f} CPU s")
    on = posterior.marginals()
    wrong = ((on - states).abs() * power).sum() / (2 * (states * power).sum())
    effective = float(posterior.effective_states().mean())
    print(f"energy on the wrong appliance: {100 * float(wrong):.1f} %; effective states of a minute: {effective:.1f}")
    args.output.mkdir(parents=True, exist_ok=True)
    picture(y, states, on, power, args.output / "energy_meter.png")
    print(f"picture: {args.output / 'energy_meter.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--appliances", type=int, default=10)
    parser.add_argument("--minutes", type=int, default=1440)
    parser.add_argument("--noise", type=float, default=30.0, help="standard deviation of the meter, in watt")
    parser.add_argument("--states", type=int, default=32, help="states kept for each minute")
    parser.add_argument("--block", type=int, default=8, help="appliances of a block")
    parser.add_argument("--steps", type=int, default=100, help="blocks that are drawn while the temperature falls")
    parser.add_argument("--rounds", type=int, default=10, help="blocks whose best configurations join the sets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.appliances, args.minutes, args.states, args.block, args.steps, args.rounds = 4, 60, 8, 3, 4, 1
    return args


if __name__ == "__main__":
    main(parse_args())
