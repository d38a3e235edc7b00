"""CPU seconds of one step of this version, of another version in an environment of its own, and of a peer, in one run.

    python tests/benchmarks/against_release.py --release ENVIRONMENT/bin/python

Processes of both versions take turns, each with one thread; what counts is the fewest CPU seconds of all. There is a step for each of the
other benchmarks, with their settings; what the other version does not have stays empty. Peers are scikit-learn's `GaussianMixture` (one EM
iteration), Pyro's `TraceEnum_ELBO`, Gaussian processes and, where spaces are too large, models that are written in plain Pyro (one gradient
step). They have their defaults.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.contrib.gp import kernels
from pyro.contrib.gp.models import GPLVM, SparseGPRegression
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO, config_enumerate
from pyro.ops.indexing import Vindex
from pyro.optim import Adam

# Beside this file, which an interpreter of another version runs, too.
from timing import cpu_seconds, em_step, naive_noisy_or, naive_sparse_coding
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
    from pyro_truncated.search import GPSelect

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
        "program, chain: 1000 steps, 4 values, 10 sequences": chain_of_sets,
        "minibatch: 1000 of 100 000 x 25, H=10, S=16": minibatch_step,
        "GP-select: 1000 x 25, H=20, 8 selected": lambda: em_step(
            BinarySparseCoding(25, 20), noise(1000, 25), GPSelect(8, kernel="composition", rank=100, refit_every=10**6, fit_steps=3), 256
        ),
        "GP regression: 2000 x 8, 64 inducing": subset_regression,
        "active sets: 5000 x 784, A=100, epoch of B=500": active_set_epoch,
        "GP-LVM: 1000 x 12, M=50, Q=10, bound and gradient": spike_slab_bound,
    }


def chain_of_sets() -> Callable[[], float]:
    """A hidden Markov program whose sets hold all values; earlier versions have whole paths, which is another problem."""
    from pyro_truncated import AutoTruncated, Truncated_ELBO

    guide, elbo, y = AutoTruncated(hidden_markov, 4), Truncated_ELBO(), noise(1000, 10)
    if not hasattr(guide, "pairwise_marginals"):
        raise AttributeError("no sets for each node of the factor graph")
    return lambda: float(elbo.loss_and_grads(hidden_markov, guide, y))


def hidden_markov(y: Tensor) -> None:
    """Sequences of 1000 steps, as in `test_product_speed.py`."""
    transition = pyro.param("transition", lambda: torch.full((4, 4), 0.1) + 0.6 * torch.eye(4))
    with pyro.plate("data", y.shape[1]):
        z: Any = 0
        for t in pyro.markov(range(len(y))):
            z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(transition)[z]))
            pyro.sample(f"y_{t}", dist.Normal(z.to(y.dtype), 1.0), obs=y[t])


def minibatch_step() -> Callable[[], float]:
    from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO
    from pyro_truncated.models import BinarySparseCoding

    y = noise(100_000, 25)
    model = BinarySparseCoding(25, 10).initialize(y[:1000])
    svi = SVI(model, AutoTruncated(model, 16), ClosedForm(model, minibatch="incremental"), Truncated_ELBO(EvolutionarySearch(4, 3, 1)))
    return lambda: float(svi.step(y, 1000))


def subset_regression() -> Callable[[], float]:
    """A whole fit by the scikit-learn estimator."""
    from pyro_truncated.sklearn import SubsetGPRegressor

    X, y = smooth_function(2000)
    return lambda: float(SubsetGPRegressor(n_inducing=64, random_state=0).fit(X, y).score(X[:10], y[:10]))


def smooth_function(num_data: int) -> tuple[Any, Any]:
    X = noise(num_data, 8)
    return X.numpy(), (torch.sin(2 * X[:, 0]) * X[:, 1] + torch.cos(X[:, 2:5].sum(1)) + 0.2 * noise(num_data, 1)[:, 0]).numpy()


def active_set_epoch() -> Callable[[], float]:
    from pyro_truncated.gp import UniformSplits
    from pyro_truncated.gplvm import SASDecoder

    generator = torch.Generator().manual_seed(0)
    x, decoder = noise(5000, 784), SASDecoder(5000, 784)
    svi = SVI(decoder.model, decoder.guide, Adam({"lr": 0.01}), Trace_ELBO())
    splits = UniformSplits(5000, 500, 100, generator)
    return lambda: sum(float(svi.step(x, split)) for split in splits.epoch())


def spike_slab_bound() -> Callable[[], float]:
    from pyro_truncated.gplvm import SpikeSlabGPLVM, initialize

    y = noise(1000, 12).double()
    model = SpikeSlabGPLVM(1000, 12, 10, num_inducing=50)
    initialize(model, y)

    def bound() -> float:
        value = model.bound(y)
        value.backward()
        return float(value.detach())

    return bound


def peers() -> dict[str, tuple[str, Callable[[], float]]]:
    """Who else does the same work, and CPU seconds."""
    plain = "plain Pyro, gradient step"
    return {
        "bars: 5000 x 100, H=20, S=120": (plain, lambda: plain_pyro(naive_sparse_coding, 5000, 100, 20, 120, 1.0, 0.2)),
        "patches: 2000 x 256, H=300, S=200": (plain, lambda: plain_pyro(naive_sparse_coding, 2000, 256, 300, 200, 1.0, 0.02)),
        "noisy-OR: 10 000 x 64, H=16, S=120": (plain, lambda: plain_pyro(naive_noisy_or, 10_000, 64, 16, 120, 0.1, 0.2)),
        "mixture, full: 20 000 x 16, K=50": ("scikit-learn", mixture_of_scikit_learn),
        "program, binary: 1000 x 100, H=20, S=64": (plain, lambda: plain_pyro(naive_sparse_coding, 1000, 100, 20, 64, 1.0, 0.2)),
        "program, mixture: 5000 x 16, K=50, S=50": ("TraceEnum_ELBO", lambda: enumeration(mixture_program, noise(5000, 16), 50)),
        "program, chain: 1000 steps, 4 values, 10 sequences": ("TraceEnum_ELBO", lambda: enumeration(hidden_markov, noise(1000, 10))),
        "GP regression: 2000 x 8, 64 inducing": ("scikit-learn, all inputs", exact_regression),
        "active sets: 5000 x 784, A=100, epoch of B=500": ("Pyro's GPLVM, one step", gplvm_of_pyro),
    }


def plain_pyro(naive: Callable[..., None], num_data: int, num_observed: int, num_latents: int, num_states: int, *others: float) -> float:
    """A gradient step on given states, in Pyro and torch alone."""
    pyro.clear_param_store()
    states = (torch.rand(num_states, 1, num_latents) < 0.2).float()
    y, weight = noise(num_data, num_observed), noise(num_observed, num_latents)
    y, weight = ((y > 0).float(), weight.sigmoid()) if naive is naive_noisy_or else (y, weight)

    def guide(*arguments: Any) -> None:
        with pyro.plate("states", num_states, dim=-2), pyro.plate("data", num_data, dim=-1):
            pyro.sample("s", dist.Delta(states.expand(-1, num_data, -1), event_dim=1))

    def model(*arguments: Any) -> None:
        with pyro.plate("states", num_states, dim=-2):
            naive(*arguments)

    return cpu_seconds(gradient_step(model, guide, Trace_ELBO(), y, weight, *others), 2, 1)


def exact_regression() -> float:
    """One fit with the default optimiser of hyperparameters."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, WhiteKernel

    X, y = smooth_function(2000)
    return cpu_seconds(lambda: GaussianProcessRegressor(RBF([1.0] * 8) + WhiteKernel()).fit(X, y), 1, 0)


def gplvm_of_pyro() -> float:
    """All data points in one step, with 100 inducing inputs."""
    pyro.clear_param_store()
    z, x = noise(5000, 2), noise(784, 5000)
    kernel = kernels.RBF(2, lengthscale=torch.ones(2))
    model = GPLVM(SparseGPRegression(z, x, kernel, z[:100].clone(), torch.tensor(0.5), approx="VFE"))
    return cpu_seconds(SVI(model.model, model.guide, Adam({"lr": 0.01}), TraceMeanField_ELBO()).step, 3, 1)


def enumeration(program: Callable[..., None], *arguments: Any) -> float:
    pyro.clear_param_store()
    elbo = TraceEnum_ELBO(max_plate_nesting=1)
    return cpu_seconds(gradient_step(config_enumerate(program), lambda *arguments: None, elbo, *arguments), 3)


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
        # What an earlier version lacks or calls otherwise has no number.
        with suppress(ImportError, AttributeError, TypeError):
            found[name] = cpu_seconds(prepare(), repeats=3 if name.startswith("GP") else 7, warm_up=1 if name.startswith("GP") else 3)
    return found


def in_process(python: str, what: str = "ours") -> dict[str, Any]:
    """The same, or that of peers, in a process of its own, whose libraries all have one thread."""
    command = [python, str(Path(__file__).resolve()), "--worker", what]
    shown = subprocess.run(command, env={**os.environ, **ONE_THREAD}, cwd="/", capture_output=True, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(shown.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", help="interpreter of an environment with the other version")
    parser.add_argument("--worker", choices=("ours", "peers"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure() if args.worker == "ours" else {name: (peer, seconds()) for name, (peer, seconds) in peers().items()}))
        return
    pythons = [sys.executable, *([args.release] if args.release else [])]
    rounds = [[in_process(python) for python in pythons] for _ in range(ROUNDS)]
    others = in_process(sys.executable, "peers")
    print("| one step | seconds | last release | ratio | peer | its seconds | ratio |\n| --- | --- | --- | --- | --- | --- | --- |")
    for name in rounds[0][0]:
        now, *before = (min(turn[place].get(name, math.nan) for turn in rounds) for place in range(len(pythons)))
        peer, seconds = others.get(name, ("", math.nan))
        cells = [f"{now:.3f}", *beside(before[0] if before else math.nan, now), peer, *beside(seconds, now)]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def beside(seconds: float, ours: float) -> list[str]:
    """Cells with seconds and their ratio to ours; empty where there are none."""
    return ["", ""] if math.isnan(seconds) else [f"{seconds:.3f}", f"{seconds / ours:.1f}"]


if __name__ == "__main__":
    main()
