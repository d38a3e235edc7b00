"""Whether `learn` finds all components, on bars that no setting was chosen on: ``python -m tests.papers.experiments.learning --seeds 20``.

Beside it the recipe of the reproductions (the best of eight short annealed starts) and one plain start, on the first of the seeds. Every
run is written down when it ends, and not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import (
    AutoTruncated,
    ClosedForm,
    DisagreeingStartsWarning,
    EvolutionarySearch,
    Truncated_ELBO,
    best_start,
    cooling,
    learn,
)
from pyro_truncated.datasets import Bars, bar_components, matched_bars, noisy_or_bars
from pyro_truncated.models import BinarySparseCoding, NoisyOr

RESULTS = Path(__file__).parents[1] / "results" / "learning.jsonl"
FIRST_SEED = 101
NUM_DATA, SIZE, MEAN_ACTIVE, AMPLITUDE, NOISE = 1000, 10, 4.0, 10.0, 2.0


def bars(
    seed: int,
    *,
    num_data: int = NUM_DATA,
    correlation: float = 0.0,
    amplitudes: tuple[float, float] = (AMPLITUDE, AMPLITUDE),
    is_negative: bool = False,
    missing: float = 0.0,
    scale: float = 1.0,
) -> Bars:
    """Bars that add up: activations correlated in pairs (a copula), of mixed amplitudes or signs, with missing entries, in other units."""
    generator = torch.Generator().manual_seed(seed)
    num_bars = 2 * SIZE
    low, high = amplitudes
    components = bar_components(SIZE) * (low + (high - low) * torch.rand(num_bars, generator=generator))
    if is_negative:
        components = components * torch.where(torch.arange(num_bars) % 2 == 0, 1.0, -1.0)
    normal = torch.randn(num_data, num_bars, generator=generator)
    normal[:, 1::2] = correlation * normal[:, 0::2] + math.sqrt(1 - correlation**2) * normal[:, 1::2]
    states = (torch.special.ndtr(normal) < MEAN_ACTIVE / num_bars).float()
    data = scale * (states @ components.mT + NOISE * torch.randn(num_data, SIZE**2, generator=generator))
    data[torch.rand(data.shape, generator=generator) < missing] = math.nan
    return Bars(data, scale * components, states)


def _weak_noisy_or(seed: int) -> Bars:
    return noisy_or_bars(NUM_DATA, 8, weight=0.6, generator=torch.Generator().manual_seed(seed))


def _sparse_coding(num_latents: int = 2 * SIZE) -> BinarySparseCoding:
    return BinarySparseCoding(SIZE**2, num_latents)


@dataclasses.dataclass(frozen=True)
class Variant:
    """Data by seed, and the model that learns them."""

    data: Callable[[int], Bars]
    model: Callable[[], Any] = _sparse_coding


VARIANTS = {
    "activations correlated .8 in pairs": Variant(lambda seed: bars(seed, correlation=0.8)),
    "ten bars negative": Variant(lambda seed: bars(seed, is_negative=True)),
    "amplitudes 2 to 6": Variant(lambda seed: bars(seed, amplitudes=(2.0, 6.0))),
    "N = 200": Variant(lambda seed: bars(seed, num_data=200)),
    "H = 40 for 20 bars": Variant(bars, lambda: _sparse_coding(40)),
    "30 % missing": Variant(lambda seed: bars(seed, missing=0.3)),
    "float32, amplitude 3e4": Variant(lambda seed: bars(seed, scale=3e3)),
    "noisy-OR 8x8, weights .6": Variant(_weak_noisy_or, lambda: NoisyOr(64, 16)),
}


def by_learn(model: Any, y: Tensor) -> bool:
    """The call of the README; whether it warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learn(model, y, progress=False)
    return any(issubclass(warning.category, DisagreeingStartsWarning) for warning in caught)


def by_recipe(model: Any, y: Tensor) -> bool:
    """The best of eight starts of 80 annealed steps, then 100 steps, with 120 states."""
    search = EvolutionarySearch(8, 7, 2, crossover=True)
    best_start(model, y, search, num_starts=8, num_data=NUM_DATA, steps=80, num_states=120, temperature=cooling(8.0, 80))
    _train(model, y, search, 120)
    return False


def by_plain_start(model: Any, y: Tensor) -> bool:
    """One start from data points, without a temperature."""
    model.initialize(y)
    _train(model, y, EvolutionarySearch(crossover=True), 64)
    return False


def _train(model: Any, y: Tensor, search: EvolutionarySearch, num_states: int) -> None:
    svi = SVI(model, AutoTruncated(model, num_states=num_states), ClosedForm(model), Truncated_ELBO(search))
    for _ in range(100):
        svi.step(y)


METHODS: dict[str, Callable[[Any, Tensor], bool]] = {"learn": by_learn, "recipe": by_recipe, "plain": by_plain_start}


def run(name: str, method: str, seed: int) -> dict[str, Any]:
    """How many bars were found, in how many CPU seconds, and whether a warning was given."""
    variant = VARIANTS[name]
    data = variant.data(seed)
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model = variant.model()
    start = time.process_time()
    warned = METHODS[method](model, data.data)
    seconds = time.process_time() - start
    found = matched_bars(model.weight, data.components)
    key = {"variant": name, "method": method, "seed": seed}
    return {**key, "found": found, "of": data.components.shape[1], "seconds": seconds, "warned": warned}


def done(output: Path) -> list[dict[str, Any]]:
    """The runs already in the output file."""
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def cells(runs: list[dict[str, Any]], method: str) -> list[str]:
    """Complete runs and mean CPU seconds."""
    if not runs:
        return ["", ""]
    missed = ", ".join(f"{r['found']}{' (warned)' if r['warned'] else ''}" for r in runs if r["found"] < r["of"])
    warned = sum(r["warned"] for r in runs if r["found"] == r["of"])
    text = f"{sum(r['found'] == r['of'] for r in runs)} of {len(runs)}" + (f" (else {missed})" if missed else "")
    text += f"; {warned} of the complete warned" if method == "learn" else ""
    return [text, f"{statistics.mean(r['seconds'] for r in runs):.1f}"]


def table(results: list[dict[str, Any]]) -> list[str]:
    """Markdown lines: a row per variant."""
    lines = ["| variant | `learn` | CPU s | best of eight | CPU s | plain start | CPU s |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for name in VARIANTS:
        row = [name]
        for method in METHODS:
            row += cells([r for r in results if (r["variant"], r["method"]) == (name, method)], method)
        lines.append("| " + " | ".join(row) + " |")
    return lines


def main() -> None:
    """Makes the runs that the output file lacks, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=FIRST_SEED, help="the first seed")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--compared", type=int, default=1, help="seeds for the other two methods")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = {(r["variant"], r["method"], r["seed"]) for r in done(args.output)}
    jobs = [(name, "learn", args.first + k) for k in range(args.seeds) for name in args.variants]
    jobs += [(name, method, args.first + k) for k in range(args.compared) for name in args.variants for method in ("plain", "recipe")]
    with args.output.open("a") as file:
        for job in jobs:
            if job not in before:
                file.write(json.dumps(run(*job)) + "\n")
                file.flush()
    print("\n".join(table(done(args.output))))


if __name__ == "__main__":
    main()
