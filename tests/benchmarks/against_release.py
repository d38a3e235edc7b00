"""CPU seconds of one step of this version, of another version in an environment of its own, and of a peer, in one run.

    python tests/benchmarks/against_release.py --release ENVIRONMENT/bin/python

Processes of both versions take turns, each with one thread; what counts is the fewest CPU seconds of all. Peers are scikit-learn's
`GaussianMixture` (one EM iteration) and Pyro's `TraceEnum_ELBO` or, where spaces are too large, a model that is written in plain Pyro (one
gradient step). Settings are those of the other benchmarks; peers have their defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
from pyro.optim import Adam

# Beside this file, which an interpreter of another version runs, too.
from timing import cpu_seconds, em_step, naive_sparse_coding
from torch import Tensor

ROUNDS = 3
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "PYRO_TRUNCATED_BACKGROUND": "0"}


def mixture_program(y: Tensor, num_components: int) -> None:
    """A mixture of normal distributions as a Pyro program."""
    loc = pyro.param("loc", lambda: y[:num_components].clone())
    with pyro.plate("data", len(y)):
        k = pyro.sample("k", dist.Categorical(torch.ones(num_components)))
        pyro.sample("y", dist.Normal(loc[k], 1.0).to_event(1), obs=y)


def gradient_step(program: Callable[..., None], guide: Callable[..., Any], elbo: Any, *arguments: Any) -> Callable[[], float]:
    """One step of Adam."""
    svi = SVI(program, guide, Adam({"lr": 1e-3}), elbo)
    return lambda: svi.step(*arguments)


def noise(num_data: int, num_observed: int) -> Tensor:
    return torch.randn(num_data, num_observed, generator=torch.Generator().manual_seed(0))


def ours() -> dict[str, Callable[[], Callable[[], float]]]:
    """The steps of the version that is installed, by name; called, each prepares one."""
    from pyro_truncated import AutoTruncated, EvolutionarySearch, ExhaustiveSearch, Truncated_ELBO
    from pyro_truncated.datasets import linear_bars, noisy_or_bars
    from pyro_truncated.models import BinarySparseCoding, GaussianMixture, NoisyOr, SpikeSlabSparseCoding

    def bars(num_data: int) -> Tensor:
        return linear_bars(num_data, 10, generator=torch.Generator().manual_seed(0)).data

    def zeros_and_ones() -> Tensor:
        return noisy_or_bars(10_000, 8, generator=torch.Generator().manual_seed(0)).data

    random, sparse = {"crossover": True}, {"mutation": "sparseflips"}
    return {
        "bars: 5000 x 100, H=20, S=120": lambda: em_step(
            BinarySparseCoding(100, 20), bars(5000), EvolutionarySearch(8, 7, 2, **random), 120
        ),
        "patches: 2000 x 256, H=300, S=200": lambda: em_step(
            BinarySparseCoding(256, 300), noise(2000, 256), EvolutionarySearch(10, 9, 4, **random, **sparse), 200
        ),
        "noisy-OR: 10 000 x 64, H=16, S=120": lambda: em_step(
            NoisyOr(64, 16), zeros_and_ones(), EvolutionarySearch(8, 7, 2, **sparse), 120
        ),
        "slabs: 2000 x 64, H=64, S=60": lambda: em_step(SpikeSlabSparseCoding(64, 64), noise(2000, 64), EvolutionarySearch(8, 7, 2), 60),
        "mixture, full: 20 000 x 16, K=50": lambda: em_step(GaussianMixture(16, 50), noise(20_000, 16), ExhaustiveSearch(), 50),
        "program, binary: 1000 x 100, H=20, S=64": lambda: gradient_step(
            naive_sparse_coding,
            AutoTruncated(naive_sparse_coding, 64),
            Truncated_ELBO(EvolutionarySearch(8, 7, 2)),
            bars(1000),
            noise(100, 20),
            1.0,
            0.2,
        ),
        "program, mixture: 5000 x 16, K=50, S=50": lambda: gradient_step(
            mixture_program, AutoTruncated(mixture_program, 50), Truncated_ELBO(ExhaustiveSearch()), noise(5000, 16), 50
        ),
    }


def peers() -> dict[str, tuple[str, Callable[[], float]]]:
    """Who else does the same work, and CPU seconds."""
    return {
        "bars: 5000 x 100, H=20, S=120": ("plain Pyro, gradient step", lambda: plain_pyro(5000, 100, 20, 120)),
        "mixture, full: 20 000 x 16, K=50": ("scikit-learn", mixture_of_scikit_learn),
        "program, mixture: 5000 x 16, K=50, S=50": ("TraceEnum_ELBO", enumeration),
    }


def plain_pyro(num_data: int, num_observed: int, num_latents: int, num_states: int) -> float:
    """A gradient step of binary sparse coding on given states, in Pyro and torch alone."""
    y, states = noise(num_data, num_observed), (torch.rand(num_states, 1, num_latents) < 0.2).float()

    def guide(y: Tensor, weight: Tensor) -> None:
        with pyro.plate("states", num_states, dim=-2), pyro.plate("data", len(y), dim=-1):
            pyro.sample("s", dist.Delta(states.expand(-1, len(y), -1), event_dim=1))

    def model(y: Tensor, weight: Tensor) -> None:
        weight = pyro.param("weight", lambda: weight.clone())
        with pyro.plate("states", num_states, dim=-2), pyro.plate("data", len(y), dim=-1):
            s = pyro.sample("s", dist.Bernoulli(torch.full((num_latents,), 0.2)).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT, 1.0).to_event(1), obs=y)

    return cpu_seconds(gradient_step(model, guide, pyro.infer.Trace_ELBO(), y, noise(num_observed, num_latents)), 2, 1)


def enumeration() -> float:
    elbo = TraceEnum_ELBO(max_plate_nesting=1)
    return cpu_seconds(gradient_step(config_enumerate(mixture_program), lambda *arguments: None, elbo, noise(5000, 16), 50))


def mixture_of_scikit_learn() -> float:
    """From the difference between six iterations and one."""
    import warnings

    from sklearn.mixture import GaussianMixture

    y = noise(20_000, 16).double().numpy()

    def fit(iterations: int) -> float:
        mixture = GaussianMixture(50, tol=0.0, max_iter=iterations, init_params="random_from_data", random_state=0)
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mixture.fit(y)
        return time.process_time() - start

    return min(fit(6) for _ in range(3)) / 5 - min(fit(1) for _ in range(3)) / 5


def measure() -> dict[str, float]:
    """CPU seconds of all steps of the version that is installed."""
    found = {}
    for name, prepare in ours().items():
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        found[name] = cpu_seconds(prepare(), warm_up=3)
    return found


def in_process(python: str) -> dict[str, float]:
    """The same in a process of its own, by another interpreter."""
    command = [python, str(Path(__file__).resolve()), "--worker"]
    shown = subprocess.run(command, env={**os.environ, **ONE_THREAD}, cwd="/", capture_output=True, text=True, check=True).stdout
    found: dict[str, float] = json.loads(shown.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", help="interpreter of an environment with the other version")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure()))
        return
    torch.set_num_threads(1)
    pythons = [sys.executable, *([args.release] if args.release else [])]
    rounds = [[in_process(python) for python in pythons] for _ in range(ROUNDS)]
    others = {name: (peer, seconds()) for name, (peer, seconds) in peers().items()}
    print("| one step | seconds | last release | ratio | peer | its seconds | ratio |\n| --- | --- | --- | --- | --- | --- | --- |")
    for name in rounds[0][0]:
        now, *before = (min(turn[place][name] for turn in rounds) for place in range(len(pythons)))
        cells = [f"{now:.3f}", *([f"{before[0]:.3f}", f"{before[0] / now:.1f}"] if before else ["", ""])]
        peer = [others[name][0], f"{others[name][1]:.3f}", f"{others[name][1] / now:.1f}"] if name in others else ["", "", ""]
        print(f"| {name} | " + " | ".join([*cells, *peer]) + " |")


if __name__ == "__main__":
    main()
