"""Reproduces tables 1 and 2 of "Revisiting Active Sets for Gaussian Process Decoders" (2022), beside a GP-LVM and a VAE.

    python -m tests.papers.stochastic_active_sets --data mnist --methods sas bayesian-sas gplvm vae --active 100 200 400 --seeds 3

Every method gets the same images, and its test latents are the most probable ones under it (the VAE's those of its encoder).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.contrib.gp import kernels
from pyro.contrib.gp.models import GPLVM, SparseGPRegression
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from torch import Tensor, nn

from pyro_truncated import datasets
from pyro_truncated.distributions import ActiveSetGaussianProcess
from pyro_truncated.gp import ActiveSet, UniformSplits
from pyro_truncated.gp.projected_set import ProjectedSet, projected_statistics
from pyro_truncated.gp.splits import least_variance
from pyro_truncated.gplvm import SASDecoder
from pyro_truncated.gplvm.latents import Predictor, infer_latents, principal_components

DATA = {"mnist": "mnist_train", "fashion": "fashion_mnist_train", "cifar10": "cifar10_train_lossless"}
METHODS = ("sas", "bayesian-sas", "sas-encoder", "bayesian-sas-encoder", "gplvm", "vae")
EPOCHS = {"sas": 60, "bayesian-sas": 60, "sas-encoder": 100, "bayesian-sas-encoder": 100, "gplvm": 300, "vae": 60}


@dataclasses.dataclass(frozen=True)
class Images:
    """Training and test images in [0, 1], as rows, with their classes."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def images(name: str, num_train: int, num_test: int, seed: int) -> Images:
    """A random part of a data set; CIFAR-10 has 4000 images here, of which the last ``num_test`` are for testing."""
    stored = datasets.load(DATA[name])
    order = torch.randperm(len(stored["y"]), generator=torch.Generator().manual_seed(seed))[: num_train + num_test]
    x = torch.from_numpy(stored["X"])[order].flatten(1).float() / 255
    y = torch.from_numpy(stored["y"]).long()[order]
    return Images(x[:-num_test], y[:-num_test], x[-num_test:], y[-num_test:])


@dataclasses.dataclass
class Fit:
    """What the evaluation needs of a trained model: latents of the training data, predictions, and the way to new latents."""

    latents: Tensor
    posterior: Predictor
    loc: Tensor
    latents_test: Tensor
    kernel: Any = None
    noise: Any = None
    latents_encoder: Tensor | None = None


def fit_sas(data: Images, method: str, active: int, epochs: int) -> tuple[Fit, float]:
    """Free latents or an encoder, point masses or normals."""
    bayesian = method.startswith("bayesian")
    encoder = mlp(data.x.shape[1], 256, 4 if bayesian else 2) if method.endswith("encoder") else None
    batch_size = max(500, 5 * active // 2)
    kernel = kernels.RBF(2, torch.tensor(1.0), torch.full((2,), 0.4))
    decoder = SASDecoder(len(data.x), data.x.shape[1], bayesian=bayesian, encoder=encoder, kernel=kernel).initialize(data.x)
    rates = decoder.learning_rates(0.05 if encoder is None else 2e-3, 2e-2)
    schedule = pyro.optim.ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": rates, "gamma": 0.1 ** (1 / epochs)})
    svi = SVI(decoder.model, decoder.guide, schedule, TraceMeanField_ELBO() if bayesian else Trace_ELBO())
    splits = UniformSplits(len(data.x), min(batch_size, len(data.x)), active)
    start = time.perf_counter()
    for epoch in range(epochs):
        for split in splits.epoch(epoch):
            svi.step(data.x, split)
        schedule.step()
    seconds = (time.perf_counter() - start) / epochs
    decoder.condition_(data.x, 300, projected=True)
    found = Fit(decoder.latents(data.x), decoder.posterior(), decoder.loc, decoder.infer(data.x_test, starts=2, steps=40))
    found.kernel, found.noise = decoder.kernel, decoder.noise_variance.detach()
    found.latents_encoder = None if encoder is None else decoder.encode(data.x_test)
    return found, seconds


def fit_gplvm(data: Images, inducing: int, steps: int) -> tuple[Fit, float]:
    """Pyro's GP-LVM on all data at once, from principal components, with inducing inputs among them."""
    loc = data.x.mean(0)
    z = principal_components(data.x - loc, 2)
    kernel = kernels.RBF(2, (data.x - loc).square().mean(), torch.full((2,), 0.4))
    chosen = least_variance(kernel, z, inducing)
    noise = 0.5 * (data.x - loc).square().mean()
    model = GPLVM(SparseGPRegression(z, (data.x - loc).mT, kernel, z[chosen].clone(), noise, approx="VFE", jitter=1e-5))
    schedule = pyro.optim.ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.05}, "gamma": 0.1 ** (1 / steps)})
    svi = SVI(model.model, model.guide, schedule, TraceMeanField_ELBO())
    start = time.perf_counter()
    for _ in range(steps):
        svi.step()
        schedule.step()
    seconds = (time.perf_counter() - start) / steps
    with torch.no_grad():
        model.mode = "guide"
        z, base = model.X_loc.detach(), model.base_model
        posterior = ProjectedSet(kernel, base.noise, projected_statistics(kernel, base.Xu.detach(), z, data.x - loc))
    # The inducing inputs may lie anywhere: starts come from the data.
    found = Candidates(posterior, z)
    return Fit(z, found, loc, infer_latents(found, data.x_test - loc, starts=2, steps=40)), seconds


class Candidates:
    """A posterior whose candidate latents are others than those it is made of."""

    def __init__(self, posterior: ProjectedSet, latents: Tensor) -> None:
        self.predict, self.latents = posterior.predict, latents[:: max(1, len(latents) // 300)]


def mlp(num_inputs: int, width: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, num_outputs))


class Decoder:
    """A VAE's decoder as a posterior: network means, one noise variance."""

    def __init__(self, network: nn.Module, noise: Tensor, latents: Tensor) -> None:
        self.network, self.noise, self.latents = network, noise, latents[:: max(1, len(latents) // 300)]

    def predict(self, latents: Tensor, *, noise: bool = True) -> tuple[Tensor, Tensor]:
        mean = self.network(latents)
        return mean, self.noise.expand(mean.shape[:-1]).unsqueeze(-1)


def fit_vae(data: Images, epochs: int) -> tuple[Fit, float]:
    """Two hidden layers of 256 units on either side, a learned noise variance."""
    width, loc = data.x.shape[1], data.x.mean(0)
    encoder, network = mlp(width, 256, 4), mlp(2, 256, width)
    log_noise = nn.Parameter((data.x - loc).square().mean().log())
    optimizer = torch.optim.Adam(
        [{"params": [*encoder.parameters(), *network.parameters()], "lr": 1e-3}, {"params": [log_noise], "lr": 1e-2}]
    )
    start = time.perf_counter()
    for _ in range(epochs):
        for rows in torch.randperm(len(data.x)).split(100):
            x = data.x[rows] - loc
            mean, raw = encoder(x).chunk(2, -1)
            scale = nn.functional.softplus(raw)
            decoded = network(mean + scale * torch.randn_like(mean))
            log_prob = -0.5 * ((x - decoded).square() / log_noise.exp() + log_noise + math.log(2 * math.pi)).sum(-1)
            kl = torch.distributions.kl_divergence(torch.distributions.Normal(mean, scale), torch.distributions.Normal(0.0, 1.0)).sum(-1)
            optimizer.zero_grad()
            (kl - log_prob).mean().backward()
            optimizer.step()
    seconds = (time.perf_counter() - start) / epochs
    with torch.no_grad():
        z, encoded = (encoder(x - loc).chunk(2, -1)[0] for x in (data.x, data.x_test))
    posterior = Decoder(network, log_noise.detach().exp(), z)
    found = Fit(z, posterior, loc, infer_latents(posterior, data.x_test - loc, starts=2, steps=40, extra_start=encoded))
    found.latents_encoder = encoded
    return found, seconds


def errors(x: Tensor, mean: Tensor, variance: Tensor) -> dict[str, float]:
    """Root mean square and mean absolute error, negative log predictive density, per pixel."""
    residual = x - mean
    nlpd = 0.5 * (residual.square() / variance + (2 * math.pi * variance).log())
    return {
        "rmse": float(residual.square().mean().sqrt()), "mae": float(residual.abs().mean()), "nlpd": float(nlpd.mean()),
    }  # fmt: skip


def evaluate(fit: Fit, data: Images, active: int) -> dict[str, Any]:
    """The protocol: reconstruction from random active sets and from all data, classes in the latent space, lower halves from upper ones."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

    found: dict[str, Any] = {}
    with torch.no_grad():
        mean, variance = fit.posterior.predict(fit.latents_test)
        found["all"] = errors(data.x_test, mean + fit.loc, variance)
        if fit.latents_encoder is not None:
            mean, variance = fit.posterior.predict(fit.latents_encoder)
            found["encoder"] = errors(data.x_test, mean + fit.loc, variance)
        if fit.kernel is not None:
            draws = []
            for _ in range(5):
                rows = torch.randperm(len(data.x))[:active]
                one = ActiveSet(fit.kernel, fit.noise, fit.latents[rows], data.x[rows] - fit.loc)
                mean, variance = one.predict(fit.latents_test)
                draws.append(errors(data.x_test, mean + fit.loc, variance))
            found["random"] = {key: statistics.mean(d[key] for d in draws) for key in draws[0]}
            found["random_spread"] = {key: statistics.stdev(d[key] for d in draws) for key in draws[0]}
    classifiers = {"knn": KNeighborsClassifier(10), "logistic": LogisticRegression(max_iter=500)}
    for name, classifier in classifiers.items():
        classifier.fit(fit.latents.numpy(), data.y.numpy())
        found[name] = float(classifier.score(fit.latents_test.numpy(), data.y_test.numpy()))
    half = data.x_test.shape[1] // 2
    upper = (data.x_test - fit.loc).clone()
    upper[:, half:] = math.nan
    latents = infer_latents(fit.posterior, upper, starts=2, steps=40)
    with torch.no_grad():
        mean, variance = fit.posterior.predict(latents)
        found["half"] = errors(data.x_test[:, half:], (mean + fit.loc)[:, half:], variance)
    return found


def run(data_name: str, method: str, active: int, seed: int, num_train: int, num_test: int, epochs: int | None = None) -> dict[str, Any]:
    """One run of a method; ``active`` is the number of inducing inputs for the GP-LVM, and has no meaning for the VAE."""
    data = images(data_name, num_train, num_test, seed)
    epochs = EPOCHS[method] if epochs is None else epochs
    pyro.clear_param_store()
    pyro.set_rng_seed(1000 + seed)
    if method == "gplvm":
        fit, seconds = fit_gplvm(data, active, epochs)
    elif method == "vae":
        fit, seconds = fit_vae(data, epochs)
    else:
        fit, seconds = fit_sas(data, method, active, epochs)
    key = {"data": data_name, "method": method, "active": active, "seed": seed, "num_train": len(data.x), "epochs": epochs}
    return {**key, **evaluate(fit, data, active), "seconds_per_epoch": seconds}


def jobs_of(args: argparse.Namespace) -> list[tuple[Any, ...]]:
    """Seeds in the outer loop, so that a run that is cut short leaves whole rows of fewer seeds."""
    found = []
    for seed in range(args.seeds):
        for name in args.data:
            for method in args.methods:
                sizes = args.active if "sas" in method else [100] if method == "gplvm" else [0]
                found += [(name, method, size, seed) for size in sizes]
    return found


def done(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def run_all(args: argparse.Namespace) -> None:
    """All runs that the output file lacks; results are appended as they come."""
    for name, method, active, seed in jobs_of(args):
        size = min(args.train, 3000) if name == "cifar10" else args.train
        epochs = args.epochs if args.epochs is not None else EPOCHS[method]
        wanted = (name, method, active, seed, size, epochs)
        if wanted in {(r["data"], r["method"], r["active"], r["seed"], r["num_train"], r["epochs"]) for r in done(args.output)}:
            continue
        result = run(name, method, active, seed, size, args.test, epochs)
        with args.output.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)


PAPER = {  # data: method: active: (RMSE, MAE, NLPD), and accuracies
    "mnist": {
        "sas": {100: (0.255, 0.161, 0.299), 200: (0.247, 0.155, 0.292), 400: (0.241, 0.151, 0.284)},
        "bayesian-sas": {100: (0.216, 0.111, 0.233), 200: (0.208, 0.104, 0.226), 400: (0.199, 0.096, 0.217)},
        "accuracy": "Bayesian SAS 0.63, Bayesian GP-LVM 0.18, VAE 0.54",
    },
    "fashion": {
        "sas": {100: (0.237, 0.148, 0.276), 200: (0.231, 0.142, 0.271), 400: (0.225, 0.139, 0.265)},
        "bayesian-sas": {100: (0.199, 0.111, 0.216), 200: (0.188, 0.102, 0.207), 400: (0.185, 0.098, 0.204)},
        "accuracy": "Bayesian SAS 0.63, Bayesian GP-LVM 0.24, VAE 0.58",
    },
    "cifar10": {
        "sas": {100: (0.266, 0.177, 0.320), 200: (0.255, 0.169, 0.307), 400: (0.255, 0.169, 0.332)},
        "bayesian-sas": {100: (0.274, 0.184, 0.324), 200: (0.264, 0.176, 0.314), 400: (0.257, 0.171, 0.306)},
    },
}


def cell(rows: list[dict[str, Any]], *keys: str, digits: int = 3) -> str:
    """Mean over seeds of a nested entry, with the standard deviation where there are several."""
    values = []
    for row in rows:
        value: Any = row
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            values.append(float(value))
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def table(name: str, results: list[dict[str, Any]]) -> list[str]:
    """Markdown lines of one data set."""
    lines = [
        f"## {name}", "",
        "| method | A | training images | epochs | seeds | RMSE random A / all | MAE all | NLPD random A / all | "
        "RMSE by encoder | kNN / logistic | lower half: RMSE | s per epoch | paper: RMSE, MAE, NLPD |",
        "| " + " | ".join(["---"] * 13) + " |",
    ]  # fmt: skip
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in results:
        if row["data"] == name:
            groups.setdefault((METHODS.index(row["method"]), row["active"], row["num_train"], row["epochs"]), []).append(row)
    for (method, active, size, epochs), rows in sorted(groups.items()):
        paper = PAPER[name].get(METHODS[method].removesuffix("-encoder"), {})
        known = paper.get(active) if isinstance(paper, dict) else None
        lines.append(
            f"| {METHODS[method]} | {active or ''} | {size} | {epochs} | {len(rows)} | "
            f"{cell(rows, 'random', 'rmse')} / {cell(rows, 'all', 'rmse')} | {cell(rows, 'all', 'mae')} | "
            f"{cell(rows, 'random', 'nlpd')} / {cell(rows, 'all', 'nlpd')} | {cell(rows, 'encoder', 'rmse')} | "
            f"{cell(rows, 'knn', digits=2)} / {cell(rows, 'logistic', digits=2)} | {cell(rows, 'half', 'rmse')} | "
            f"{cell(rows, 'seconds_per_epoch', digits=2)} | {', '.join(f'{v:.3f}' for v in known) if known else ''} |"
        )
    accuracy = PAPER[name].get("accuracy")
    return [*lines, "", *([f"The paper's accuracies in two latent dimensions: {accuracy}.", ""] if accuracy else [])]


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


SETTINGS = """# Stochastic active sets (2022): tables 1 and 2

Pixels in [0, 1], two latent dimensions, test images apart from the training images and drawn by the same seed. All decoders start from
principal components, with an RBF kernel of length-scale 0.4 in units of their standard deviation. SAS trains on minibatches of
500 images, or 2.5 A if that is more (A of them active), Adam with learning rate 0.05 for free latents (0.002 for the encoder of two
hidden layers of 256 units), 0.02 for kernel and noise, falling to a tenth. `gplvm` is `pyro.contrib.gp.models.GPLVM` over
`SparseGPRegression` (VFE, 100 inducing inputs), full batch, an epoch is one step, learning rate 0.05 falling to a tenth. `vae` has
two hidden layers of 256 units on each side and a learned noise, 60 epochs of Adam at 0.001, batches of 100.

Test latents are the most probable ones under each decoder (two starts, 40 steps); `RMSE by encoder` has those of the encoder. `random A`
predicts from a random active set of the training size (mean of five), `all` from all training images, for SAS through a
projection on 300 of them, for the GP-LVM through its inducing inputs. NLPD is per pixel, noise included, signed. Classifiers are
fitted to the training latents: ten nearest neighbours and logistic regression. Lower halves are predicted from latents inferred from
the upper halves. The spread is the standard deviation over seeds.
The paper's NLPD is on another scale (it is printed positive, times 0.1, from code whose objective differs), its RMSE and MAE compare.
"""


KEPT = [
    "## Which data points to keep for prediction", "",
    "Bayesian decoder of `examples/image_decoder.py` (3000 MNIST images, |A| = 100 in training), 200 test images at the same latents:", "",
    "| kept | RMSE | NLPD |", "| --- | --- | --- |",
    "| 100 at random (three draws) | .2241, .2241, .2250 | -.088, -.084, -.086 |",
    "| 100 of largest remaining variance (pivoted Cholesky) | .2254 | -.071 |",
    "| 100 that leave the least variance on average | .2211 | -.097 |",
    "| 300 at random (three draws) | .2104, .2112, .2104 | -.147, -.146, -.148 |",
    "| 300 of largest remaining variance | .2122 | -.132 |",
    "| 300 that leave the least variance on average | .2097 | -.148 |",
    "| all 3000, projected on 300 | .1952 | -.218 |", "",
    "With noise this large the number of data points conditioned on counts far more than which they are.", "",
]  # fmt: skip


def write_tables(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Writes the results file."""
    lines = [SETTINGS, f"Made on {time.strftime('%Y-%m-%d')}, {args.machine}.", "", *([args.remark, ""] if args.remark else [])]
    for name in DATA:
        if any(r["data"] == name for r in results):
            lines += table(name, results)
    lines += [*bias_table(), *KEPT]
    args.table.write_text("\n".join(lines).rstrip() + "\n")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="+", default=["mnist"], choices=list(DATA))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--active", nargs="+", type=int, default=[100, 200, 400])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train", type=int, default=5000, help="number of training images")
    parser.add_argument("--test", type=int, default=1000, help="number of test images")
    parser.add_argument("--epochs", type=int, help=f"default: by method, {EPOCHS}")
    parser.add_argument("--output", type=Path, default=Path("stochastic_active_sets.jsonl"))
    parser.add_argument("--table", type=Path, default=Path(__file__).parent / "results" / "stochastic_active_sets.md")
    parser.add_argument("--machine", default=f"a machine of {os.cpu_count()} CPU cores", help="the machine in words")
    parser.add_argument("--remark", default="", help="a sentence about the conditions of these runs")
    parser.add_argument("--only-table", action="store_true", help="write the table of the results already in the output file")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_args()
    if not args.only_table:
        run_all(args)
    write_tables(done(args.output), args)


if __name__ == "__main__":
    main()
