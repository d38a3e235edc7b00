"""What ``learn(model, y)`` makes of small programs of several kinds: ``python -m tests.papers.experiments.own_functions``.

Data come from each program with parameters that are known. The free energy per data point that ``learn`` has reached is compared with
what its last steps reach from those parameters, or exact evidences are: less by no more than the tolerance is "recovered".
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.ops.indexing import Vindex
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import softplus

from pyro_truncated import Truncated_ELBO, learn
from pyro_truncated.multistart import DisagreeingStartsWarning
from pyro_truncated.multistart.profile import profile_model
from pyro_truncated.multistart.trainer import Trainer

NUM_DATA, NUM_LOSSES = 500, 20
Program = Callable[[Tensor], None]


class Kind(NamedTuple):
    """A kind of program, and how it is judged.

    Attributes:
        program: makes one, whose parameters begin anywhere.
        true: draws the parameters of the data, as far as they are not the program's own.
        num_observed: numbers of a data point.
        tolerance: by how much less than from the true parameters is still recovered.
        evidence: the exact mean log evidence with the parameters in the store, which is compared where it is known.
        steps: training steps from the true parameters, and what is left of the learning rate after them, as ``learn`` has them.
    """

    program: Callable[[], Program]
    true: Callable[[], dict[str, Tensor]]
    num_observed: int
    tolerance: float = 0.05
    evidence: Callable[[Tensor], float] | None = None
    steps: tuple[int, float] = (100, 0.1)


def rates(number: int) -> Tensor:
    """The probability of each latent; two are on, on average."""
    return torch.full((number,), 2 / number)


# --- noisy-OR ---


def noisy_or() -> Program:
    def program(y: Tensor) -> None:
        weight = pyro.param("weight", lambda: 0.1 + 0.5 * torch.rand(25, 8), constraint=constraints.unit_interval)
        leak = pyro.param("leak", torch.tensor(0.1), constraint=constraints.unit_interval)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(rates(8)).to_event(1))
            off = (1 - leak) * (s @ torch.log1p(-weight).mT).exp()
            pyro.sample("y", dist.Bernoulli(1 - off).to_event(1), obs=y)

    return program


def true_noisy_or() -> dict[str, Tensor]:
    return {"weight": torch.where(torch.rand(25, 8) < 0.3, 0.9, 0.02), "leak": torch.tensor(0.02)}


# --- a mixture of Gaussians ---


def mixture() -> Program:
    def program(y: Tensor) -> None:
        loc = pyro.param("loc", lambda: torch.randn(8, 5))
        scale = pyro.param("scale", torch.ones(8), constraint=constraints.positive)
        share = pyro.param("share", torch.full((8,), 1 / 8), constraint=constraints.simplex)
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(share))
            pyro.sample("y", dist.Normal(Vindex(loc)[z], Vindex(scale)[z].unsqueeze(-1)).to_event(1), obs=y)

    return program


def true_mixture() -> dict[str, Tensor]:
    return {"loc": 5 * torch.randn(8, 5), "scale": 0.5 + torch.rand(8)}


# --- a network between the latents and the data ---


def decoder() -> Program:
    network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 25))
    torch.nn.init.normal_(network[0].weight, std=1.0)
    torch.nn.init.normal_(network[2].weight, std=1.0)

    def program(y: Tensor) -> None:
        net = pyro.module("net", network)
        noise = pyro.param("noise", torch.tensor(1.0), constraint=constraints.positive)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(rates(8)).to_event(1))
            pyro.sample("y", dist.Normal(net(s), noise).to_event(1), obs=y)

    return program


def true_decoder() -> dict[str, Tensor]:
    return {"noise": torch.tensor(0.5)}


# --- a type and factors ---


def types() -> Program:
    def program(y: Tensor) -> None:
        loc, weight = pyro.param("loc", lambda: torch.randn(3, 25)), pyro.param("weight", lambda: torch.randn(25, 8))
        noise = pyro.param("noise", torch.tensor(2.0), constraint=constraints.positive)
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(3) / 3))
            s = pyro.sample("s", dist.Bernoulli(rates(8)).to_event(1))
            pyro.sample("y", dist.Normal(Vindex(loc)[z] + s @ weight.mT, noise).to_event(1), obs=y)

    return program


def true_types() -> dict[str, Tensor]:
    return {"loc": 3 * torch.randn(3, 25), "weight": 3 * torch.randn(25, 8), "noise": torch.tensor(1.0)}


# --- factors and a contrast of every data point ---


def contrasts() -> Program:
    def program(y: Tensor) -> None:
        weight = pyro.param("weight", lambda: torch.randn(25, 8))
        noise = pyro.param("noise", torch.tensor(2.0), constraint=constraints.positive)
        with pyro.plate("data", len(y)):
            contrast = pyro.sample("contrast", dist.LogNormal(0.0, 0.3))
            s = pyro.sample("s", dist.Bernoulli(rates(8)).to_event(1))
            pyro.sample("y", dist.Normal(contrast.unsqueeze(-1) * (s @ weight.mT), noise).to_event(1), obs=y)

    return program


def true_contrasts() -> dict[str, Tensor]:
    return {"weight": 3 * torch.randn(25, 8), "noise": torch.tensor(1.0)}


# --- counts ---


def counts() -> Program:
    def program(y: Tensor) -> None:
        weight, base = pyro.param("weight", lambda: torch.randn(25, 8)), pyro.param("base", lambda: torch.zeros(25))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(rates(8)).to_event(1))
            pyro.sample("y", dist.Poisson(softplus(base) + s @ softplus(weight).mT).to_event(1), obs=y)

    return program


def true_counts() -> dict[str, Tensor]:
    return {"weight": torch.where(torch.rand(25, 8) < 0.3, 6.0, -3.0), "base": torch.full((25,), -1.0)}


# --- answers on a scale of four levels ---


def ordinal() -> Program:
    def program(y: Tensor) -> None:
        weight = pyro.param("weight", lambda: torch.randn(25, 8))
        cuts = pyro.param("cuts", torch.tensor([-1.0, 0.0, 1.0]), constraint=dist.constraints.ordered_vector)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(rates(8)).to_event(1))
            pyro.sample("y", dist.OrderedLogistic(s @ weight.mT, cuts).to_event(1), obs=y)

    return program


def true_ordinal() -> dict[str, Tensor]:
    return {"weight": 5 * torch.randn(25, 8) * (torch.rand(25, 8) < 0.4), "cuts": torch.tensor([-2.0, 0.5, 3.0])}


# --- the topics of short texts ---


def topics() -> Program:
    def program(y: Tensor) -> None:
        words = pyro.param("words", lambda: torch.randn(8, 25))
        base = pyro.param("base", lambda: torch.randn(25))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(rates(8)).to_event(1))
            probs = (s @ words.softmax(-1) + 0.3 * base.softmax(-1)) / (s.sum(-1, keepdim=True) + 0.3)
            pyro.sample("y", dist.Multinomial(60, probs), obs=y)

    return program


def true_topics() -> dict[str, Tensor]:
    return {"words": 2 * torch.randn(8, 25), "base": torch.randn(25)}


# --- a type that a continuous latent depends on ---


def positions() -> Program:
    def program(y: Tensor) -> None:
        loc, weight = pyro.param("loc", lambda: torch.randn(4, 2)), pyro.param("weight", lambda: torch.randn(10, 2))
        noise = pyro.param("noise", torch.tensor(1.0), constraint=constraints.positive)
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(4) / 4))
            x = pyro.sample("x", dist.Normal(Vindex(loc)[z], 1.0).to_event(1))
            pyro.sample("y", dist.Normal(x @ weight.mT, noise).to_event(1), obs=y)

    return program


def true_positions() -> dict[str, Tensor]:
    return {"loc": 2 * torch.randn(4, 2), "weight": torch.randn(10, 2), "noise": torch.tensor(0.5)}


def evidence_of_positions(y: Tensor) -> float:
    """Of each type the data are normal."""
    loc, weight, noise = (pyro.param(name).detach() for name in ("loc", "weight", "noise"))
    covariance = weight @ weight.mT + noise.square() * torch.eye(10)
    likelihood = dist.MultivariateNormal(loc @ weight.mT, covariance).log_prob(y.unsqueeze(1))
    return float((likelihood.logsumexp(1) - math.log(4)).mean())


KINDS = {
    "noisy-OR": Kind(noisy_or, true_noisy_or, 25),
    "mixture": Kind(mixture, true_mixture, 5, tolerance=0.01),
    "decoder": Kind(decoder, true_decoder, 25),
    "types": Kind(types, true_types, 25),
    "contrasts": Kind(contrasts, true_contrasts, 25, steps=(200, 0.01)),
    "counts": Kind(counts, true_counts, 25),
    "ordinal": Kind(ordinal, true_ordinal, 25),
    "topics": Kind(topics, true_topics, 25),
    "positions": Kind(positions, true_positions, 10, evidence=evidence_of_positions),
}


def sampled(kind: Kind) -> tuple[Program, Tensor]:
    """A program whose parameters are the true ones, and data from it."""
    program, nothing = kind.program(), torch.zeros(NUM_DATA, kind.num_observed)
    program(nothing)
    for name, value in kind.true().items():
        pyro.get_param_store()[name] = value
    with torch.no_grad():
        return program, poutine.trace(poutine.uncondition(program)).get_trace(nothing).nodes["y"]["value"]


def reached_from_truth(kind: Kind, program: Program, y: Tensor) -> float:
    """The free energy per data point where learning begins with the true parameters, or the evidence."""
    if kind.evidence is not None:
        return kind.evidence(y)
    steps, last_rate = kind.steps
    run = Trainer(profile_model(program, y, None, num_states=64))
    run.slow_down(steps, last_rate)
    values = [run.step() for _ in range(steps)]
    return sum(values[-NUM_LOSSES:]) / NUM_LOSSES


def learned(kind: Kind, y: Tensor) -> tuple[float, int, bool]:
    """The free energy per data point that ``learn`` has reached, in how many starts, and whether it has warned."""
    program = kind.program()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", DisagreeingStartsWarning)
        guide: Any = learn(program, y, progress=False)
    if kind.evidence is not None:
        return kind.evidence(y), len(guide.starts), bool(told)
    svi = SVI(program, guide, pyro.optim.Adam({"lr": 0.0}), Truncated_ELBO())
    return -sum(svi.evaluate_loss(y) for _ in range(NUM_LOSSES)) / NUM_LOSSES / len(y), len(guide.starts), bool(told)


def found(name: str, seed: int) -> str:
    """What a run has reached beside what it should, in words."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    program, y = sampled(kind := KINDS[name])
    best = reached_from_truth(kind, program, y)
    pyro.clear_param_store()
    start = time.process_time()
    reached, starts, warned = learned(kind, y)
    seconds = time.process_time() - start
    verdict, told = "recovered" if reached > best - kind.tolerance else "not recovered", "warned" if warned else "silent"
    return f"{name}, seed {seed}: {reached:.2f} ({best:.2f} from the truth), {verdict}, {starts} starts, {told}, {seconds:.0f} CPU s"


def run(description: str, kinds: Iterable[str], seeds: list[int], found: Callable[[str, int], str]) -> None:
    """Prints what is found of the kinds and seeds that are asked for on the command line."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=seeds)
    parser.add_argument("--kinds", nargs="+", choices=list(kinds), default=list(kinds))
    args = parser.parse_args()
    for name in args.kinds:
        for seed in args.seeds:
            print(found(name, seed), flush=True)


if __name__ == "__main__":
    run(__doc__, KINDS, [601, 602, 603], found)
