"""Seconds of EM iterations, likelihoods against plain Pyro, growth with the problem's size, and memory.

    make bench

Everything is printed as a ratio to a baseline of the same run; absolute seconds stand beside it for orientation.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numba
import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO, ops
from pyro_truncated.datasets import linear_bars, noisy_or_bars
from pyro_truncated.models import BinarySparseCoding, NoisyOr
from pyro_truncated.program.log_joint import LogJoint
from tests.benchmarks.timing import best_time, ceilings, em_step, exponent, naive_noisy_or, naive_sparse_coding

pytestmark = pytest.mark.benchmark

OUTPUT = Path(os.environ.get("BENCHMARK_OUTPUT", "report"))


def whitened_noise(num_data: int, num_observed: int) -> torch.Tensor:
    """Stand-in for whitened patches: what is timed does not depend on the values much."""
    return torch.randn(num_data, num_observed, generator=torch.Generator().manual_seed(0))


def test_one_em_iteration_of_crowded_bars():
    y = linear_bars(5000, 10, generator=torch.Generator().manual_seed(0)).data
    times = {}
    for name, crossover in (("crossover", True), ("no crossover", False)):
        step = em_step(BinarySparseCoding(100, 20), y, EvolutionarySearch(8, 7, 2, crossover=crossover), 120)
        times[name] = best_time(step, 10)
    naive = naive_em_seconds(y, 20, 120)
    print(
        "\nBSC bars 10x10, N=5000, D=100, H=20, S=120, 112 new states, one EM iteration; "
        f"the same as a plain Pyro model (one gradient step): {naive:.2f} s"
    )
    for name, seconds in times.items():
        print(f"  {name}: {seconds:.3f} s, plain Pyro takes {naive / seconds:.0f} times as long")
    assert times["crossover"] <= 0.15


def naive_em_seconds(y: torch.Tensor, num_latents: int, num_states: int) -> float:
    pyro.clear_param_store()
    args = (y, torch.randn(y.shape[1], num_latents), 2.0, 0.25)
    guide = AutoTruncated(naive_sparse_coding, num_states=num_states)
    svi = SVI(naive_sparse_coding, guide, Adam({"lr": 0.01}), Truncated_ELBO(EvolutionarySearch(8, 7, 2, crossover=True)))
    return best_time(lambda: svi.step(*args), 2)


def test_one_em_iteration_of_noisy_or_bars():
    y = noisy_or_bars(10_000, 8, generator=torch.Generator().manual_seed(0)).data
    seconds = best_time(em_step(NoisyOr(64, 16), y, EvolutionarySearch(8, 7, 2, mutation="sparseflips"), 120), 6)
    print(f"\nnoisy-OR bars 8x8, N=10000, D=64, H=16, S=120, sparse flips, one EM iteration: {seconds:.2f} s")
    assert seconds <= 0.7


def test_patches():
    y = whitened_noise(2000, 256)
    search = EvolutionarySearch(10, 9, 4, crossover=True, mutation="sparseflips")
    seconds = best_time(em_step(BinarySparseCoding(256, 300), y, search, 200, warm_up=15), 5)
    print(
        f"\nBSC patches, N=2000, D=256, H=300, S=200, 360 new states, one EM iteration: {seconds:.2f} s, "
        f"{seconds / 2:.3f} s per 1000 patches"
    )
    assert seconds <= 0.7


@pytest.mark.parametrize("name", ["linear", "noisy-OR"])
def test_special_likelihoods_against_plain_pyro(name):
    generator = torch.Generator().manual_seed(0)
    if name == "linear":
        y, special = linear_bars(2000, 10, generator=generator).data, BinarySparseCoding(100, 20)
        naive, args = naive_sparse_coding, (y, special.weight.detach(), 1.0, 0.1)
    else:
        y, special = noisy_or_bars(2000, 8, generator=generator).data, NoisyOr(64, 16)
        naive, args = naive_noisy_or, (y, special.weight.detach(), 1e-3, 0.125)
    times = {}
    for label, model, arguments in (("special", special, (y,)), ("plain", naive, args)):
        pyro.clear_param_store()
        guide = AutoTruncated(model, num_states=64)
        guide.setup(*arguments)
        with torch.no_grad():
            scorer: LogJoint = guide.make_scorer(*arguments)
            times[label, "values"] = best_time(lambda s=scorer, g=guide: s.score(g.words), 5)
        elbo = Truncated_ELBO(EvolutionarySearch(2, 1, 1), search_every=10**6)
        elbo.num_evaluations = 1
        times[label, "gradients"] = best_time(lambda e=elbo, m=model, g=guide, a=arguments: e.loss_and_grads(m, g, *a), 3)
    print(f"\n{name} likelihood of N=2000 data points, 64 states each:")
    for what in ("values", "gradients"):
        ratio = times["plain", what] / times["special", what]
        print(f"  {what}: {1e3 * times['special', what]:.1f} ms, plain Pyro {ratio:.1f} times as long")
        assert ratio > 1


def test_growth():
    base = {"N": 2000, "S": 60, "H": 64, "D": 64}
    sweeps = {"N": (500, 1000, 2000, 4000, 8000), "S": (30, 60, 120, 240), "H": (32, 64, 128, 256), "D": (32, 64, 128, 256, 512)}
    curves = {}
    for name, sizes in sweeps.items():
        seconds = []
        for size in sizes:
            now = {**base, name: size}
            search = EvolutionarySearch(8, 7, 2, crossover=True, mutation="sparseflips")
            model = BinarySparseCoding(now["D"], now["H"])
            seconds.append(best_time(em_step(model, whitened_noise(now["N"], now["D"]), search, now["S"], warm_up=6), 5))
        curves[name] = (sizes, seconds)
        print(
            f"\ntime of one EM iteration over {name} = {sizes}: "
            + ", ".join(f"{t / seconds[0]:.2f}" for t in seconds)
            + f" times; exponent {exponent(sizes, seconds):.2f}"
        )
    plot_growth(curves)


def plot_growth(curves) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(curves), figsize=(3 * len(curves), 2.6), layout="constrained", sharey=True)
    for ax, (name, (sizes, seconds)) in zip(axes, curves.items(), strict=True):
        ax.loglog(sizes, seconds, "o-")
        ax.set(xlabel=name, title=f"exponent {exponent(sizes, seconds):.2f}")
    axes[0].set_ylabel("seconds per EM iteration")
    OUTPUT.mkdir(exist_ok=True)
    figure.savefig(OUTPUT / "growth.png", dpi=110)
    plt.close(figure)


def test_what_bounds_the_kernels():
    """Rates of the hot loops beside what torch reaches on this machine in a matrix product and in a copy."""
    top = ceilings()
    print(
        f"\nceilings: matrix product {top['float32']:.0f} (float32) and {top['float64']:.0f} (float64) GFLOP/s, copy {top['copy']:.1f} GB/s"
    )
    for num_data, num_states, num_latents, active in ((5000, 120, 20, 5), (2000, 200, 300, 8)):
        space_words = -(-num_latents // 64)
        states = torch.rand(num_data, num_states, num_latents) < active / num_latents
        from pyro_truncated import StateSpace

        words = StateSpace([2] * num_latents).pack(states)
        linear, pairwise = (
            torch.randn(num_data, num_latents, dtype=torch.float64),
            torch.randn(num_latents, num_latents, dtype=torch.float64),
        )
        seconds = best_time(lambda w=words, a=linear, b=pairwise: ops.pair_energy(w, a, b))
        counts = states.sum(-1).double()
        additions = float((counts * (counts + 3) / 2).sum())
        dense_flops = 2 * num_data * num_states * num_latents**2
        moved = words.numel() * 8 + num_data * num_states * 8
        print(
            f"  pair_energy N={num_data} S={num_states} H={num_latents}: {1e3 * seconds:.1f} ms; "
            f"{additions / seconds / 1e9:.2f} G gathers and additions a second, as fast as a dense product at "
            f"{dense_flops / seconds / 1e9:.0f} GFLOP/s ({dense_flops / seconds / 1e9 / top['float64']:.2f} of the ceiling); "
            f"{moved / seconds / 1e9:.2f} GB/s of states and scores ({moved / seconds / 1e9 / top['copy']:.3f} of the ceiling)"
        )
        assert space_words == words.shape[-1]
        scores = torch.randn(num_data, num_states)
        half = num_states // 2
        seconds = best_time(lambda w=words, s=scores, h=half: ops.select_top(w[:, :h], s[:, :h], w[:, h:], s[:, h:], h))
        moved = words.numel() * 8 * 1.5 + scores.numel() * 4 * 1.5
        print(
            f"  select_top of {num_states} states: {1e3 * seconds:.1f} ms, {moved / seconds / 1e9:.2f} GB/s "
            f"({moved / seconds / 1e9 / top['copy']:.2f} of the ceiling)"
        )


@numba.njit(fastmath=True)
def add_entries(table, places):
    total = 0.0
    for place in places:
        total += table[place]
    return total


def look_ups_per_second(states: torch.Tensor) -> float:
    """How many entries of a table of pairs a loop adds up that does nothing else, in the order of these states ``(C, H)``."""
    active = [state.nonzero().squeeze(-1) for state in states]
    pairs = [(own.unsqueeze(-1) * states.shape[1] + own)[torch.ones(len(own), len(own)).tril().bool()] for own in active]
    places, table = torch.cat(pairs).numpy(), torch.randn(states.shape[1] ** 2, dtype=torch.float64).numpy()
    return len(places) / best_time(lambda: add_entries(table, places), 20)


@pytest.mark.parametrize("name", ["bars", "patches"])
def test_a_step_beside_its_look_ups(name):
    """A state with k active latents takes k (k + 3) / 2 numbers out of tables; a step scores all that it keeps, and all new ones."""
    if name == "bars":
        y, model = linear_bars(5000, 10, generator=torch.Generator().manual_seed(0)).data, BinarySparseCoding(100, 20)
        search, num_states, num_new = EvolutionarySearch(8, 7, 2, crossover=True), 120, 112
    else:
        y, model = whitened_noise(2000, 256), BinarySparseCoding(256, 300)
        search, num_states, num_new = EvolutionarySearch(10, 9, 4, crossover=True, mutation="sparseflips"), 200, 360
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoTruncated(model.initialize(y), num_states=num_states)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(search))
    for _ in range(15):
        svi.step(y)
    seconds, states = best_time(lambda: svi.step(y), 10), guide.population().states()
    counts = states.sum(-1).double()
    number = float((counts * (counts + 3) / 2).mean()) * len(y) * (num_states + num_new)
    rate = look_ups_per_second(states[::10, ::10].flatten(0, 1).double())
    print(
        f"\n{name}: {number / 1e6:.0f} million look-ups a step; {rate / 1e9:.2f} G a second where nothing else is done: "
        f"{1e3 * number / rate:.0f} of {1e3 * seconds:.0f} ms"
    )


def test_memory_of_a_large_guide():
    script = """
        import resource, torch, pyro
        from pyro.infer import SVI
        from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO
        from pyro_truncated.models import BinarySparseCoding
        torch.manual_seed(0)
        y = torch.randn(100_000, 16)
        model = BinarySparseCoding(16, 300).initialize(y)
        small = AutoTruncated(model, num_states=200)
        svi = SVI(model, small, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(4, 3, 1, crossover=True)))
        part = y[:100].clone()
        svi.step(part)
        # Resident now, in kB: the peak so far is that of compiling the kernels.
        before = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
        guide = AutoTruncated(model, num_states=200)
        svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(4, 3, 1, crossover=True)))
        svi.step(y)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        buffers = sum(b.numel() * b.element_size() for b in guide.buffers())
        print(buffers / 1e9, (after - before) / 1e6)
    """
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    ).stdout
    buffers, growth = (float(value) for value in printed.split())
    print(f"\nN=100000, S=200, H=300: populations {buffers:.2f} GB, one EM iteration needs {growth:.2f} GB in all beyond the start-up")
    assert growth <= 1.2
