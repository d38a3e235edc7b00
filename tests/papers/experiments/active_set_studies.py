"""What else the active sets paper's results file tells: the estimator's bias and spread, which points to keep, growth, all of MNIST."""

from __future__ import annotations

import itertools
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from pyro.contrib.gp import kernels
from torch import Tensor

from pyro_truncated.distributions import ActiveSetGaussianProcess
from pyro_truncated.gp import ActiveSet, pivoted_cholesky
from pyro_truncated.gp.active_sets import conditional_log_prob, least_variance
from pyro_truncated.gplvm import SASDecoder
from tests.benchmarks import test_active_sets as benchmark
from tests.benchmarks.timing import exponent
from tests.papers.experiments.active_set_methods import evaluated, images, train_sas

ACTIVE = (50, 100, 200, 400, 800, 1600)
REST = (100, 400, None)
SIZES = {"N": 5000, "A": 200, "B": 1000, "D": 784}
GROWTH = {"N": (5000, 10_000, 20_000, 60_000), "A": (50, 100, 200, 400, 800), "B": (500, 1000, 2500, 5000), "D": (98, 196, 784, 3072)}


def estimator(num_train: int = 5000, active: int = 200, epochs: int = 40, draws: int = 20) -> dict[str, Any]:
    """The minibatch estimate less the exact log density at the latents of a trained decoder, in nats per pixel."""
    x = images("mnist", num_train, 1, 0).x
    decoder = train_sas(x, active, epochs, bayesian=False, jumps=True)
    with torch.no_grad():
        z, y = decoder.latents(x).double(), (x - decoder.loc).double()
        noise = decoder.noise_variance.double()
        exact = ActiveSet(z, y, decoder.kernel, noise).log_prob_terms().sum()
        rows = []
        for size in ACTIVE:
            estimates: dict[str, list[float]] = {}
            for _ in range(draws):
                first, others = torch.randperm(num_train).tensor_split([size])
                given = ActiveSet(z[first], y[first], decoder.kernel, noise)
                terms = conditional_log_prob(y[others], *given.predict(z[others]))
                for rest in REST:
                    total = given.log_prob_terms().sum() + len(others) * terms[:rest].mean()
                    estimates.setdefault(str(rest or "all"), []).append(float(total - exact) / x.numel())
            found = {rest: (statistics.mean(values), statistics.stdev(values)) for rest, values in estimates.items()}
            rows.append({"active": size, **found})
    return {"exact": float(exact) / x.numel(), "noise": float((noise / decoder.kernel.variance).detach()), "rows": rows}


def estimator_table(found: dict[str, Any]) -> list[str]:
    rests = [str(rest or "all") for rest in REST]
    lines = [
        "## Bias and spread of the estimator, MNIST", "",
        "The minibatch estimate of the log density less the exact one, at the latents of a deterministic decoder of 5000 images, in nats",
        f"per pixel (exact: {found['exact']:.4f}; noise {found['noise']:.2f} of the prior variance): mean ± standard deviation over 20",
        "random active sets, by the size R of the rest in the minibatch.", "",
        "| A | " + " | ".join(f"R = {rest}" for rest in rests) + " |",
        "| " + " | ".join(["---"] * (1 + len(rests))) + " |",
    ]  # fmt: skip
    for row in found["rows"]:
        lines.append(f"| {row['active']} | " + " | ".join(f"{row[rest][0]:.4f} ± {row[rest][1]:.4f}" for rest in rests) + " |")
    return [*lines, ""]


def kept(num_train: int = 5000, epochs: int = 60) -> dict[str, Any]:
    """Errors on test images, at the same latents, by the training images that are conditioned on."""
    from tests.papers.experiments.stochastic_active_sets import errors, errors_given

    data = images("mnist", num_train, 1000, 0)
    decoder = train_sas(data.x, 100, epochs, bayesian=True, jumps=True)
    fit = evaluated(decoder, data, 0.0)
    rows: dict[str, dict[str, float]] = {}
    for size in (100, 300, 1000):
        draws = [errors_given(fit, data, torch.randperm(num_train)[:size]) for _ in range(5)]
        rows[f"{size} at random (mean of five draws)"] = {key: statistics.mean(draw[key] for draw in draws) for key in draws[0]}
        rows[f"{size} of largest remaining variance (pivoted Cholesky)"] = errors_given(
            fit, data, pivoted_cholesky(fit.kernel, fit.latents.double(), size).pivots
        )
        rows[f"{size} that leave the least variance on average"] = errors_given(
            fit, data, least_variance(fit.kernel, fit.latents, size, fit.noise)
        )
    for size in (100, 300, 1000):
        decoder.condition_(data.x, size, projected=True)
        rows[f"all {num_train}, projected on {size}"] = errors(data.x_test, *decoder.predict(fit.latents_test))
    return {"rows": rows}


def kept_table(found: dict[str, Any]) -> list[str]:
    lines = [
        "## Which data points to keep for prediction", "",
        "Bayesian decoder with jumps, 5000 MNIST images, A = 100 in training, 60 epochs; 1000 test images at the same latents:", "",
        "| kept | RMSE | NLPD |", "| --- | --- | --- |",
    ]  # fmt: skip
    return [*lines, *(f"| {name} | {row['rmse']:.4f} | {row['nlpd']:.3f} |" for name, row in found["rows"].items()), ""]


def all_of_mnist(epochs: int = 100, active: int = 400) -> dict[str, Any]:
    """Trains on all 60 000 images; after each epoch takes the NLPD of 3000 of them given three random active sets without them."""
    x = images("mnist", 60_000, 0, 0).x
    start, curve, watching = (time.process_time(), time.perf_counter()), [], [0.0]

    def watch(epoch: int, decoder: SASDecoder) -> None:
        now = time.process_time()
        cpu, wall = now - start[0] - watching[0], time.perf_counter() - start[1]
        curve.append({"epoch": epoch, "cpu": cpu, "wall": wall, "nlpd": conditional_nlpd(decoder, x, active)})
        watching[0] += time.process_time() - now

    train_sas(x, active, epochs, bayesian=True, jumps=True, watch=watch)
    return {"active": active, "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "curve": curve}


def conditional_nlpd(decoder: SASDecoder, x: Tensor, active: int) -> float:
    """Negative log predictive density per pixel of a thousand data points, at their latents, given others; mean of three active sets."""
    values = []
    with torch.no_grad():
        z = decoder.latents(x)
        for draw in range(3):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(draw))
            first, others = order[:active], order[active : active + 1000]
            given = ActiveSet(z[first], x[first] - decoder.loc, decoder.kernel, decoder.noise_variance.detach())
            terms = conditional_log_prob(x[others] - decoder.loc, *given.predict(z[others]))
            values.append(-float(terms.mean()) / x.shape[1])
    return statistics.mean(values)


def all_of_mnist_table(found: dict[str, Any]) -> list[str]:
    curve = found["curve"]
    final = curve[-1]["nlpd"]
    close = next(row for row in curve if row["nlpd"] <= final + 0.02 * abs(final))
    lines = [
        "## All 60 000 images of MNIST", "",
        f"Bayesian decoder with jumps, A = {found['active']}, minibatches of {5 * found['active'] // 2}, {len(curve)} epochs, one thread.",
        "NLPD per pixel of training images, at their latents, given random active sets that they are not in. It comes within 2 % of its",
        f"last value after epoch {close['epoch'] + 1}, {close['cpu'] / 60:.1f} CPU minutes from the start ({close['wall'] / 60:.1f}",
        f"minutes on the clock, measuring included); largest memory of the process {found['peak_gib']:.1f} GiB.", "",
        "| epoch | CPU minutes | NLPD |", "| --- | --- | --- |",
    ]  # fmt: skip
    shown = [row for row in curve if row["epoch"] in {0, 1, 3, 7, 15, 31, 63} or row in (close, curve[-1])]
    return [*lines, *(f"| {row['epoch'] + 1} | {row['cpu'] / 60:.1f} | {row['nlpd']:.4f} |" for row in shown), ""]


def growth() -> dict[str, Any]:
    """Seconds of an epoch, and bytes that a step keeps for its gradient, against each size."""
    rows = {}
    for name, sizes in GROWTH.items():
        seconds = [benchmark.epoch_seconds(**(SIZES | {name: size})) for size in sizes]
        kept_bytes = [benchmark.saved_bytes(**(SIZES | {name: size})) for size in sizes]
        rows[name] = {"sizes": sizes, "seconds": seconds, "bytes": kept_bytes, "exponent": exponent(sizes, seconds)}
    return {"base": SIZES, "rows": rows}


def growth_table(found: dict[str, Any]) -> list[str]:
    base = ", ".join(f"{name} = {value}" for name, value in found["base"].items())
    lines = [
        "## Growth", "",
        f"Seconds of an epoch (fastest step times steps), and megabytes that a step keeps for its gradient, around {base}",
        "(data points, active set, minibatch, outputs); deterministic decoder with free latents, one thread.", "",
        "| size | values | s per epoch | MB of a step | exponent of s |", "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, row in found["rows"].items():
        sizes, seconds = ", ".join(map(str, row["sizes"])), ", ".join(f"{value:.3f}" for value in row["seconds"])
        lines.append(f"| {name} | {sizes} | {seconds} | {', '.join(f'{v / 1e6:.2f}' for v in row['bytes'])} | {row['exponent']:.2f} |")
    return [*lines, ""]


STUDIES: dict[str, Callable[[], dict[str, Any]]] = {
    "estimator": estimator,
    "kept": kept,
    "growth": growth,
    "all of mnist": all_of_mnist,
}
_TABLES = {"estimator": estimator_table, "kept": kept_table, "growth": growth_table, "all of mnist": all_of_mnist_table}


def study_tables(results: list[dict[str, Any]]) -> list[str]:
    """Markdown lines of all studies that have been made."""
    made = {row["study"]: row for row in results if "study" in row}
    lines = [line for name, table in _TABLES.items() if name in made for line in table(made[name])]
    return lines + bias_table() + again_table(results)


def again_table(results: list[dict[str, Any]]) -> list[str]:
    """Runs of stored rows made once more by later code, with the same seed, beside what is stored."""
    kept = {_key(row): row for row in results if "data" in row}
    again = [(row["day"], kept[_key(row["again"])], row["again"]) for row in results if "again" in row]
    if not again:
        return []
    lines = [
        "## One seed again", "",
        "Runs of rows above that are of an earlier day, once more with seed 0 by the code of a later one: the stored run, then the new",
        "one. CPU seconds are those of the whole run, with the inference of test images.", "",
        "| data | method | A | day | RMSE all | MAE all | NLPD all | RMSE chosen | kNN | lower half: RMSE | CPU s |",
        "| " + " | ".join(["---"] * 11) + " |",
    ]  # fmt: skip
    scores = [("all", "rmse"), ("all", "mae"), ("all", "nlpd"), ("chosen", "rmse"), ("knn",), ("half", "rmse")]
    for day, *runs in again:
        cells = [", ".join(filter(None, (_score(run, *names) for run in runs))) for names in scores]
        new = runs[1]
        lines.append(f"| {new['data']} | {new['method']} | {new['active'] or ''} | {day} | {' | '.join(cells)} | {new['whole']:.0f} |")
    return [*lines, ""]


def _key(run: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(run[name] for name in ("data", "method", "active", "seed", "num_train", "epochs"))


def _score(run: dict[str, Any], *names: str) -> str:
    value: Any = run
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return "" if value is None else f"{value:.4f}"


def bias_table(num_data: int = 11, num_outputs: int = 50) -> list[str]:
    """Bias and spread of the estimator over all active sets of each size, for data drawn from the model itself."""
    lines = [
        f"## Bias and spread of the estimator, N = {num_data}", "",
        "The estimate for an active set less the exact log density, in nats per output, over all active sets of a size; data from the",
        "model, latents standard normal in two dimensions, length-scale 1, variance 1. The rest is everything else, so this is what an",
        "infinite number of minibatches would average to.", "",
        "| noise variance | " + " | ".join(f"A = {size}" for size in range(0, num_data, 2)) + " |",
        "| " + " | ".join(["---"] * (1 + len(range(0, num_data, 2)))) + " |",
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(num_data, 2, dtype=torch.float64, generator=generator)
    kernel = kernels.RBF(2).double()
    for noise in (0.01, 0.1, 0.5):
        with torch.no_grad():
            C = kernel(z) + noise * torch.eye(num_data, dtype=torch.float64)
            root = torch.linalg.cholesky(C)
            x = root @ torch.randn(num_data, num_outputs, dtype=torch.float64, generator=generator)
            exact = torch.distributions.MultivariateNormal(torch.zeros(num_data, dtype=C.dtype), scale_tril=root).log_prob(x.mT).sum()
            cells = []
            for size in range(0, num_data, 2):
                active = torch.tensor(list(itertools.combinations(range(num_data), size)), dtype=torch.int64)
                kept = torch.zeros(len(active), num_data).scatter(1, active, 1.0)
                order = kept.argsort(dim=1, descending=True, stable=True)
                density = ActiveSetGaussianProcess(z[order], kernel, noise, size, num_outputs).log_prob(x[order]).sum(-1)
                gap = (density - exact) / num_outputs
                cells.append(f"{gap.mean():.2f} ± {gap.std(correction=0):.2f}")
        lines.append(f"| {noise} | " + " | ".join(cells) + " |")
    return [*lines, ""]
