"""Truncated posteriors of factorial hidden Markov models beside exact inference and structured mean field.

    python -m tests.papers.experiments.sequences gap speed recovery meter

prints a row of each result. Times are CPU seconds of one thread, kernels compiled.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_truncated import learn
from pyro_truncated.distributions import BinaryChains
from pyro_truncated.models import FactorialHMM
from pyro_truncated.ops import binary_chains as chains
from pyro_truncated.ops.binary_chains import Transitions, block_posteriors
from pyro_truncated.sequences import BlockSearch, ChainPosterior, LinearGaussianSteps, ObservedSteps

DOUBLE = torch.float64


def factorial_chains(num_latents: int, num_observed: int, num_steps: int, noise: float, seed: int, stay: float = 0.95, on: float = 0.3):
    """Sequence ``(1, T, D)``, states, Gaussian columns and the chains."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_observed, num_latents, dtype=DOUBLE, generator=generator)
    begin = (1 - stay) * on / (1 - on)
    table = torch.tensor([[1 - begin, begin], [1 - stay, stay]], dtype=DOUBLE).expand(num_latents, 2, 2)
    prior = BinaryChains(torch.full((num_latents,), on, dtype=DOUBLE), table, num_steps).expand([1])
    torch.manual_seed(seed)
    states = prior.sample()
    y = states @ weight.mT + noise * torch.randn(1, num_steps, num_observed, dtype=DOUBLE, generator=generator)
    return y, states, weight, prior


def meter(num_appliances: int, noise: float, seed: int, num_steps: int = 1440):
    """A day of minutes of one meter: two-state appliances of 60 to 2400 W that run for minutes to hours."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(3, num_appliances, dtype=DOUBLE, generator=generator)
    power = 60 * 40 ** uniform[0]
    minutes_on, share = 5 * 24 ** uniform[1], 0.1 + 0.3 * uniform[2]
    end = 1 / minutes_on
    begin = end * share / (1 - share)
    table = torch.stack([torch.stack([1 - begin, begin], -1), torch.stack([end, 1 - end], -1)], -2)
    prior = BinaryChains(share, table, num_steps).expand([1])
    torch.manual_seed(seed)
    states = prior.sample()
    y = states @ power.unsqueeze(-1) + noise * torch.randn(1, num_steps, 1, dtype=DOUBLE, generator=generator)
    return y, states, power.unsqueeze(0), prior


def exact_evidence(likelihood: LinearGaussianSteps, transitions: Transitions) -> float:
    """Log evidence of one sequence by a forward pass over all joint states, with Kronecker products of the transitions."""
    num_latents = transitions.log_prob.shape[1]
    chances, kind = transitions.log_prob.exp(), transitions.kind[0]
    nothing = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    block = torch.arange(num_latents).unsqueeze(0)
    message = torch.zeros(2**num_latents, dtype=DOUBLE)
    message[0] = 1.0
    whole = LinearGaussianSteps.block_scores
    total = float(likelihood(nothing.expand(1, len(kind), 1, 1)).sum())
    for t in range(len(kind)):
        for m in range(num_latents):
            parts = message.view(-1, 2, 2**m)
            message = torch.einsum("aib,ij->ajb", parts, chances[kind[t], m]).flatten()
        scores = _of_step(likelihood, t, block, whole)
        best = scores.max()
        message = message * (scores - best).exp()
        norm = message.sum()
        message /= norm
        total += float(best + norm.log())
    return total


def _of_step(likelihood: LinearGaussianSteps, t: int, block: Tensor, whole: Callable[..., Tensor]) -> Tensor:
    """Log likelihoods of all states of a step, relative to the state zero."""
    one = object.__new__(LinearGaussianSteps)
    one.__dict__.update(likelihood.__dict__, shape=(1, 1), residual=likelihood.residual[t : t + 1])
    scores = whole(one, torch.zeros(1, 1, 1, dtype=torch.int64), block).flatten()
    return scores - scores[0]


def mean_field(y: Tensor, weight: Tensor, noise: float, prior: BinaryChains, start: Tensor, sweeps: int = 50) -> tuple[float, Tensor]:
    """Structured mean field: each chain's exact posterior given the means of the others, in turn; bound and means ``(T, M)``."""
    rows, mean = y[0], start.clone()
    num_steps, num_latents = mean.shape
    log_prob = prior.transitions().log_prob
    bound = -math.inf
    variance = noise**2
    kind = torch.ones(1, num_steps, dtype=torch.int64)
    kind[:, 0] = 0
    words = torch.tensor([0, 1]).view(1, 1, 2, 1).expand(1, num_steps, 2, 1)
    for _ in range(sweeps):
        entropy = 0.0
        for m in range(num_latents):
            residual = rows - mean @ weight.mT + mean[:, m : m + 1] * weight[:, m]
            field = (residual @ weight[:, m] - 0.5 * weight[:, m].square().sum()) / variance
            unary = torch.stack([torch.zeros_like(field), field], -1).unsqueeze(0)
            sums = chains.messages(words, unary, Transitions(log_prob[:, m : m + 1], kind))
            mean[:, m] = sums.log_weights()[0, :, 1].exp()
            # Of a chain's own sum, what the field has counted is taken off.
            entropy += float(sums.free_energy()) - float((mean[:, m] * field).sum())
        spread = (mean * (1 - mean)) @ weight.square().sum(0)
        squares = (rows - mean @ weight.mT).square().sum() + spread.sum()
        before = bound
        bound = entropy - 0.5 * float(squares) / variance - 0.5 * rows.numel() * math.log(2 * math.pi * variance)
        if bound - before < 1e-4:
            break
    return bound, mean


def recovered(weight: Tensor, true: Tensor) -> int:
    """True columns within 30 % of a found one, up to sign."""
    distances = torch.stack([(sign * weight.unsqueeze(2) - true.unsqueeze(1)).norm(dim=0) for sign in (1, -1)]).amin(0)
    return int(((distances / true.norm(dim=0)).amin(0) < 0.3).sum())


class Clock:
    """CPU seconds since it was made, or since the last time it was read."""

    def __init__(self) -> None:
        self.start = time.process_time()

    def read(self) -> float:
        """The seconds; the clock begins anew."""
        seconds = time.process_time() - self.start
        self.start = time.process_time()
        return seconds


def row(*cells: object) -> None:
    print(*cells, sep=" | ", flush=True)


def independent_steps(y: Tensor, weight: Tensor, noise: float, prior: BinaryChains) -> float:
    """The bound of posteriors of single steps, which know of no other step but by the mean of the prior."""
    num_latents = prior.mean.shape[-1]
    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=DOUBLE)] * num_latents)
    log_likelihood = torch.distributions.Normal((states @ weight.mT).unsqueeze(1), noise).log_prob(y[0]).sum(-1).mT
    log_prior = torch.distributions.Bernoulli(prior.mean[0, 0]).log_prob(states).sum(-1)
    log_q = (log_likelihood + log_prior).log_softmax(-1)
    on = log_q.exp() @ states
    pairs = torch.stack([1 - on, on], -1)
    table = prior.transitions().log_prob[1]
    dynamics = torch.einsum("tmi,tmj,mij->", pairs[:-1], pairs[1:], table) + (log_q[0].exp() * log_prior).sum()
    return float((log_q.exp() * (log_likelihood - log_q)).sum() + dynamics)


def whole_paths(y: Tensor, weight: Tensor, noise: float, prior: BinaryChains, posterior: ChainPosterior, number: int) -> float:
    """What no set of so many whole paths exceeds: that often the likeliest one."""
    path = posterior.mode().to(DOUBLE)
    likeliest = torch.distributions.Normal(path @ weight.mT, noise).log_prob(y).sum() + prior.log_prob(path).sum()
    return float(likeliest) + math.log(number)


def run_gap(first: int, last: int) -> None:
    """M = 8, T = 200, parameters known: gaps to the exact evidence."""
    for noise in (1.0, 2.0):
        for seed in range(first, last):
            y, _, weight, prior = factorial_chains(8, 12, 200, noise, seed)
            likelihood, moves = LinearGaussianSteps(y, weight, torch.tensor(noise)), prior.transitions()
            full = ChainPosterior(likelihood, moves, 256)
            exact = float(full.free_energy())
            cells = []
            for size in (4, 8, 16, 32, 64):
                ChainPosterior(likelihood, moves, size).improve_(1)
                clock = Clock()
                bound = ChainPosterior(likelihood, moves, size).improve_().free_energy()
                cells.append(f"{exact - float(bound):.4f}, {clock.read():.2f}")
            plain, _ = mean_field(y, weight, noise, prior, prior.mean[0])
            eight = ChainPosterior(likelihood, moves, 8).improve_()
            from_sets, _ = mean_field(y, weight, noise, prior, eight.marginals()[0])
            others = plain, from_sets, independent_steps(y, weight, noise, prior), whole_paths(y, weight, noise, prior, full, 64)
            row("gap", noise, seed, f"{exact:.3f}", *cells, *(f"{exact - bound:.2f}" for bound in others))


def run_broad() -> None:
    """M = 30, parameters known: bounds per step where posteriors are narrow and broad."""
    for noise in (1.0, 2.0, 3.0, 4.0, 6.0):
        y, _, weight, prior = factorial_chains(30, 40, 1000, noise, 0)
        likelihood, moves = LinearGaussianSteps(y, weight, torch.tensor(noise)), prior.transitions()
        cells = []
        for size in (8, 32, 64):
            clock = Clock()
            posterior = ChainPosterior(likelihood, moves, size).improve_(40)
            cells.append(f"{float(posterior.free_energy()) / 1000:.3f}, {clock.read():.1f}")
        clock = Clock()
        plain, _ = mean_field(y, weight, noise, prior, prior.mean[0])
        seconds = clock.read()
        from_sets, _ = mean_field(y, weight, noise, prior, posterior.marginals()[0])
        row("broad", noise, *cells, f"{plain / 1000:.3f}, {seconds:.1f}", f"{from_sets / 1000:.3f}")


def run_speed() -> None:
    """An E-step of learning by the number of steps: members rescored, a sweep over flips, messages, statistics."""
    for num_steps in (1000, 10_000, 100_000):
        y, _, weight, prior = factorial_chains(30, 40, num_steps, 1.0, 0)
        model = FactorialHMM(40, 30, dtype=DOUBLE)
        model.weight, model.initial, model.transition = weight, prior.initial[0], prior.transition[0].contiguous()
        clock = Clock()
        posterior = model.posterior(y, 8, steps=0)
        first, times = clock.read(), []
        for step in range(3):
            likelihood = LinearGaussianSteps(y, weight, torch.tensor(1.0))
            posterior.rescore_(likelihood, posterior.transitions).improve_(1, first_forward=step % 2 == 0)
            posterior.expected_transitions()
            times.append(clock.read())
        model.maximize(model.sufficient_statistics(posterior, y))
        row("speed", num_steps, f"{first:.2f}", f"{min(times):.2f}", f"{1e6 * min(times) / num_steps:.1f}", f"{clock.read():.2f}")


def run_recovery(first: int, last: int) -> None:
    """M = 30, D = 40, T = 2000, noise 1: what is recovered on seeds that nothing was chosen on."""
    for seed in range(first, last):
        y, _, weight, prior = factorial_chains(30, 40, 2000, 1.0, seed)
        model, clock = FactorialHMM(40, 30, dtype=DOUBLE), Clock()
        learn(model, y, num_states=8, progress=False, generator=torch.Generator().manual_seed(seed))
        posterior, seconds = model.posterior(y, 32), clock.read()
        truth = ChainPosterior(LinearGaussianSteps(y, weight, torch.tensor(1.0)), prior.transitions(), 32).improve_()
        bounds = [f"{float(one.free_energy()) / 2000:.3f}" for one in (posterior, truth)]
        row("recovery", seed, recovered(model.weight.detach(), weight), *bounds, f"{float(model.scale.detach()):.3f}", f"{seconds:.0f}")


def run_learning() -> None:
    """M = 8, noise 1, the same start: bounds per step after 30 EM steps, by the size of the sets; 256 is exact EM."""
    for seed in range(3):
        y, _, weight, _ = factorial_chains(8, 12, 1000, 1.0, seed)
        cells = []
        for size in (4, 8, 16, 256):
            model = FactorialHMM(12, 8, dtype=DOUBLE).initialize(y, torch.Generator().manual_seed(seed))
            clock, posterior = Clock(), model.posterior(y, size, steps=0)
            steps = ObservedSteps.from_mask(torch.ones(y.shape[:2], dtype=torch.bool))
            for step in range(30):
                fresh = LinearGaussianSteps(y, model.weight, model.scale, model.bias)
                posterior.rescore_(fresh, steps.transitions(model.initial.detach(), model.transition.detach()))
                posterior.improve_(1, first_forward=step % 2 == 0)
                model.maximize(model.sufficient_statistics(posterior, y))
            found = recovered(model.weight.detach(), weight)
            cells.append(f"{float(posterior.free_energy()) / 1000:.3f}, {found}, {clock.read():.0f}")
        row("learning", seed, *cells)


def likeliest_sets(likelihood: LinearGaussianSteps, transitions: Transitions, size: int) -> ChainPosterior:
    """Sets of the likeliest states of each step under the exact posterior, which no search has to find."""
    num_steps, num_latents = transitions.kind.shape[1], transitions.log_prob.shape[1]
    block = torch.arange(num_latents).unsqueeze(0)
    scores = likelihood.block_scores(torch.zeros(1, num_steps, 1, dtype=torch.int64), block)
    words = block_posteriors(scores, transitions, block).topk(size, dim=2).indices.unsqueeze(-1)
    return ChainPosterior(likelihood, transitions, size, words=words).improve_(4)


def run_meter(num_appliances: int, first: int, last: int) -> None:
    """One meter, parameters known: gaps of annealed paths, of blocks after them, and of sets taken from the exact posterior."""
    for noise in (30.0, 10.0, 60.0):
        for seed in range(first, last):
            y, _, power, prior = meter(num_appliances, noise, seed)
            likelihood, moves = LinearGaussianSteps(y, power, torch.tensor(noise)), prior.transitions()
            evidence = exact_evidence(likelihood, moves)
            search, clock = BlockSearch(8, generator=torch.Generator().manual_seed(100 + seed)), Clock()
            posterior = ChainPosterior(likelihood, moves, 32)
            cells = [f"{evidence - float(posterior.free_energy()):.3f}, {clock.read():.1f}"]
            posterior.anneal_(max(1.5, (90 / noise) ** 2), search, steps=200)
            cells.append(f"{evidence - float(posterior.free_energy()):.3f}, {clock.read():.1f}")
            posterior.search_(search, 15).improve_(4)
            cells.append(f"{evidence - float(posterior.free_energy()):.3f}, {clock.read():.1f}")
            cells.append(f"{evidence - float(likeliest_sets(likelihood, moves, 32).free_energy()):.3f}")
            row("meter", num_appliances, noise, seed, f"{evidence:.2f}", *cells)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="+", choices=["gap", "broad", "speed", "recovery", "learning", "meter8", "meter15"])
    parser.add_argument("--first", type=int, default=200)
    parser.add_argument("--last", type=int, default=210)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    studies = {
        "gap": lambda: run_gap(arguments.first, arguments.last),
        "broad": run_broad,
        "speed": run_speed,
        "recovery": lambda: run_recovery(arguments.first, arguments.last),
        "learning": run_learning,
        "meter8": lambda: run_meter(8, arguments.first, arguments.last),
        "meter15": lambda: run_meter(15, arguments.first, arguments.last),
    }
    for name in arguments.studies:
        studies[name]()
