"""The wall that enumeration meets: 2^H times time and memory.

Both evaluate the log evidence (or its lower bound) of the same linear Gaussian model. Plain enumeration runs in a process of its own with
limited memory, so that it can fail. Prints the table, writes enumeration_wall.png. Where there is no
exact value, the bound can still be held against the log joint of the states that made the data.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.infer import TraceEnum_ELBO, config_enumerate
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, ExhaustiveSearch, Truncated_ELBO

NOISE = 0.5
# Both on one thread: the numbers then depend least on what else the machine does.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


def plain_model(y: Tensor, weight: Tensor) -> None:
    """One site per latent, as plain enumeration wants it."""
    rate = torch.tensor(2.0 / weight.shape[1], dtype=y.dtype)
    with pyro.plate("data", len(y), dim=-1):
        mean = sum(pyro.sample(f"s_{h}", dist.Bernoulli(rate)).unsqueeze(-1) * column for h, column in enumerate(weight.mT))
        pyro.sample("y", dist.Normal(mean, NOISE).to_event(1), obs=y)


def model(y: Tensor, weight: Tensor) -> None:
    """The same model with one vector of latents."""
    rate = torch.full((weight.shape[1],), 2.0 / weight.shape[1], dtype=y.dtype)
    with pyro.plate("data", len(y), dim=-1):
        s = pyro.sample("s", dist.Bernoulli(rate).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, NOISE).to_event(1), obs=y)


class Data(NamedTuple):
    """Returns observations ``(N, D)``, dictionary ``(D, H)``, and true states ``(N, H)``."""

    y: Tensor
    weight: Tensor
    states: Tensor


def make_data(latents: int, args: argparse.Namespace) -> Data:
    generator = torch.Generator().manual_seed(latents)
    weight = torch.randn(args.dimensions, latents, generator=generator, dtype=torch.float64)
    states = (torch.rand(args.data, latents, generator=generator) < 2.0 / latents).double()
    noise = torch.randn(args.data, args.dimensions, generator=generator, dtype=torch.float64)
    return Data(states @ weight.mT + NOISE * noise, weight, states)


def log_joint_of_truth(data: Data) -> float:
    """Returns the log joint of the true states, part of the evidence."""
    trace = poutine.trace(poutine.condition(model, {"s": data.states})).get_trace(data.y, data.weight)
    return float(trace.log_prob_sum())


def peak_memory() -> float:
    """Most memory that this process ever took, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def enumerate_plainly(latents: int, args: argparse.Namespace) -> dict[str, float]:
    before = peak_memory()
    limit = int(args.memory * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    data = make_data(latents, args)
    start = time.perf_counter()
    with torch.no_grad():
        loss = TraceEnum_ELBO(max_plate_nesting=1).loss(config_enumerate(plain_model), lambda *args: None, data.y, data.weight)
    return {"bound": -loss, "seconds": time.perf_counter() - start, "memory": max(1.0, peak_memory() - before)}


def truncate(latents: int, args: argparse.Namespace) -> dict[str, float]:
    # The kernels are compiled, or fetched from the cache, on first use; that is no part of the work.
    evaluate(4, argparse.Namespace(**{**vars(args), "exact": 0, "states": 8, "steps": 1}))
    before = peak_memory()
    start = time.perf_counter()
    bound = evaluate(latents, args)
    return {
        "truth": log_joint_of_truth(make_data(latents, args)),
        "bound": bound,
        "seconds": time.perf_counter() - start,
        "memory": max(1.0, peak_memory() - before),
    }


def evaluate(latents: int, args: argparse.Namespace) -> float:
    """The truncated bound after the search."""
    pyro.set_rng_seed(0)
    data = make_data(latents, args)
    everything = latents <= args.exact
    guide = AutoTruncated(model, num_states=2**latents if everything else args.states)
    evolution = EvolutionarySearch(min(20, args.states), generations=1, crossover=True, mutation="sparseflips")
    elbo = Truncated_ELBO(ExhaustiveSearch()) if everything else Truncated_ELBO(evolution, search_steps=args.steps)
    elbo.loss_and_grads(model, guide, data.y, data.weight)
    return -elbo.loss(model, guide, data.y, data.weight)


METHODS = {"plain": enumerate_plainly, "truncated": truncate}


def in_process(method: str, latents: int, args: argparse.Namespace) -> dict[str, float] | None:
    """Returns bound, time and memory of a process; ``None`` if it failed."""
    options = [f"--{name}={getattr(args, name)}" for name in ("data", "dimensions", "states", "steps", "exact", "memory")]
    command = [sys.executable, __file__, *options, f"--worker={method}:{latents}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, env=os.environ | ONE_THREAD)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode == 0:
        result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return result
    if "memory" not in done.stderr.lower() and done.returncode > 0:
        raise RuntimeError(done.stderr)
    return None


def show(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| H | states 2^H | plain: s | plain: MiB | truncated: s | truncated: MiB | bound below exact, nats | bound above truth, nats |",
        "| --- " * 8 + "|",
    ]
    for row in rows:
        plain, ours = row["plain"], row["truncated"]
        time_, memory = (plain["seconds"], plain["memory"]) if plain else (None, None)
        gap = plain["bound"] - ours["bound"] if plain else None
        failed = "not tried" if not row["tried"] else "out of memory or time"
        cells = [
            row["latents"],
            f"{2.0 ** row['latents']:.0e}",
            show(time_, ".2f") if plain else failed,
            show(memory, ".0f"),
            show(ours["seconds"], ".2f"),
            show(ours["memory"], ".0f"),
            show(gap, ".0e"),
            f"{ours['bound'] - ours['truth']:.0e}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def picture(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    from pyro_truncated.diagnostics.pages.tensor_plots import ACCENT, COLOUR

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for ax, quantity, unit in zip(figure.subplots(1, 2), ("seconds", "memory"), ("seconds", "MiB on top of the libraries"), strict=True):
        for method, colour, label in (("plain", ACCENT, "plain enumeration"), ("truncated", COLOUR, "AutoTruncated")):
            done = [(row["latents"], row[method][quantity]) for row in rows if row[method]]
            ax.plot(*zip(*done, strict=True), "o-", color=colour, label=label, markersize=4)
        failed = [row["latents"] for row in rows if row["tried"] and not row["plain"]]
        if failed:
            top = max(row[m][quantity] for row in rows for m in METHODS if row[m])
            ax.plot(failed, [2 * top] * len(failed), "x", color=ACCENT, markersize=9, markeredgewidth=2, label="out of memory or time")
        ax.set(xscale="log", yscale="log", xlabel="binary latents per data point, H", ylabel=unit)
        ticks = [row["latents"] for row in rows if row["latents"] in (8, 12, 16, 24, 50, 100, 300)]
        ax.set_xticks(ticks, [str(tick) for tick in ticks])
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(args.output / "enumeration_wall.png", dpi=90, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    if args.worker:
        method, latents = args.worker.split(":")
        print(json.dumps(METHODS[method](int(latents), args)))
        return
    rows: list[dict[str, Any]] = []
    alive = True
    for latents in args.latents:
        tried = alive and latents <= args.enumerate_up_to
        plain = in_process("plain", latents, args) if tried else None
        alive = alive and not (tried and plain is None)
        ours = in_process("truncated", latents, args)
        if ours is None:
            raise RuntimeError(f"AutoTruncated ran out of memory or time at H={latents}")
        rows.append({"latents": latents, "plain": plain, "truncated": ours, "tried": tried})
        print(f"H = {latents}: bound {ours['bound']:.9f}, exact {show(plain and plain['bound'], '.9f')}", flush=True)
        if plain and latents <= args.exact and abs(plain["bound"] - ours["bound"]) > 1e-9 * abs(plain["bound"]):
            raise AssertionError(f"all states are in the population, but the bound differs: {plain['bound']} and {ours['bound']}")
    args.output.mkdir(parents=True, exist_ok=True)
    picture(rows, args)
    print(f"\n{args.data} data points of {args.dimensions} dimensions, {args.states} states each, all 2^H states up to H = {args.exact}\n")
    print(table(rows))


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--latents", type=int, nargs="+", default=[8, 10, 12, 14, 16, 18, 20, 24, 32, 50, 100, 200, 300])
    parser.add_argument("--enumerate-up-to", type=int, default=24)
    parser.add_argument("--data", type=int, default=5, help="data points")
    parser.add_argument("--dimensions", type=int, default=40)
    parser.add_argument("--states", type=int, default=200, help="states per data point")
    parser.add_argument("--steps", type=int, default=100, help="search steps")
    parser.add_argument("--exact", type=int, default=10, help="up to this many latents the population holds all states")
    parser.add_argument("--memory", type=float, default=6.0, help="GiB that plain enumeration may take")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each measurement")
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.smoke:
        args.latents, args.enumerate_up_to, args.exact, args.data, args.states, args.steps = [4, 6], 4, 4, 3, 8, 2
    return args


if __name__ == "__main__":
    main(parse_args())
