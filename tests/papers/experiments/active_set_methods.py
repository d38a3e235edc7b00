"""Decoders of images that the tables of the active sets paper compare: how each is trained, and what it leaves for the evaluation."""

from __future__ import annotations

import dataclasses
import importlib
import math
import time
from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro.contrib.gp import kernels
from pyro.contrib.gp.models import GPLVM, SparseGPRegression
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from torch import Tensor, nn

from pyro_truncated import datasets
from pyro_truncated.gp import UniformSplits
from pyro_truncated.gp.active_sets import ProjectedSet, least_variance, projected_statistics
from pyro_truncated.gplvm import SASDecoder, principal_components
from pyro_truncated.gplvm.decoders.conditioning_set import Posterior
from pyro_truncated.gplvm.decoders.latents import best_candidates, log_joint, maximize

DATA = {"mnist": "mnist_train", "fashion": "fashion_mnist_train", "cifar10": "cifar10_train_lossless"}


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
    cut = len(x) - num_test
    return Images(x[:cut], y[:cut], x[cut:], y[cut:])


@dataclasses.dataclass
class Fit:
    """What the evaluation needs of a trained model: latents of the training data, predictions, and the way to new latents."""

    latents: Tensor
    posterior: Posterior
    loc: Tensor
    latents_test: Tensor
    seconds: float
    """CPU seconds of training."""
    kernel: Any = None
    noise: Any = None
    latents_encoder: Tensor | None = None


def fit_sas(data: Images, method: str, active: int, epochs: int) -> Fit:
    """Stochastic active sets: free latents with jumps or without, or an encoder."""
    start = time.process_time()
    bayesian = method.startswith("bayesian")
    encoder = mlp(data.x.shape[1], 256, 4 if bayesian else 2) if method.endswith("encoder") else None
    decoder = train_sas(data.x, active, epochs, bayesian=bayesian, encoder=encoder, jumps=method.endswith("jumps"))
    return evaluated(decoder, data, time.process_time() - start)


def train_sas(
    x: Tensor,
    active: int,
    epochs: int,
    *,
    bayesian: bool,
    jumps: bool = False,
    encoder: nn.Module | None = None,
    watch: Callable[[int, SASDecoder], None] | None = None,
) -> SASDecoder:
    """A decoder trained on minibatches of 500 images, or 2.5 active sets if that is more; jumps in every other of the first 60 % epochs."""
    kernel = kernels.RBF(2, torch.tensor(1.0), torch.full((2,), 0.4))
    decoder = SASDecoder(len(x), x.shape[1], bayesian=bayesian, encoder=encoder, kernel=kernel).initialize(x)
    rates = decoder.learning_rates(0.05 if encoder is None else 1e-3, 2e-2)
    schedule = pyro.optim.ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": rates, "gamma": 0.1 ** (1 / epochs)})
    svi = SVI(decoder.model, decoder.guide, schedule, TraceMeanField_ELBO() if bayesian else Trace_ELBO())
    splits = UniformSplits(len(x), min(max(500, 5 * active // 2), len(x)), active)
    for epoch in range(epochs):
        if jumps and epoch < 0.6 * epochs and epoch % 2:
            decoder.relocate_(x)
        for split in splits.epoch(epoch):
            svi.step(x, split)
        schedule.step()
        if watch is not None:
            watch(epoch, decoder)
    return decoder


def evaluated(decoder: SASDecoder, data: Images, seconds: float) -> Fit:
    decoder.condition_(data.x, 300, projected=True)
    encoded = None if decoder.encoder is None else decoder.encode(data.x_test)
    return Fit(
        decoder.latents(data.x),
        decoder.posterior(),
        decoder.loc,
        decoder.infer(data.x_test, starts=2, steps=40),
        seconds,
        decoder.kernel,
        decoder.noise_variance.detach(),
        encoded,
    )


def infer_latents(posterior: Posterior, x: Tensor, *, starts: int, steps: int, extra_start: Tensor | None = None) -> Tensor:
    """The most probable latents ``(M, Q)`` of data points, from the posterior's own latents that explain them best."""
    candidates, parts = posterior.latents[:: -(-len(posterior.latents) // 2000)], []
    for rows in torch.arange(len(x), device=x.device).split(5000):
        with torch.no_grad():
            begin = best_candidates(posterior, x[rows], candidates, min(starts, len(candidates)))
        begin = begin if extra_start is None else torch.cat([begin, extra_start[rows].unsqueeze(0)])
        parts.append(maximize(posterior, log_joint, x[rows], begin, steps, 0.05))
    return torch.cat(parts)


def fit_gplvm(data: Images, inducing: int, steps: int) -> Fit:
    """Pyro's GP-LVM on all data at once, from principal components, with inducing inputs among them."""
    start = time.process_time()
    loc = data.x.mean(0)
    z = principal_components(data.x - loc, 2)
    kernel = kernels.RBF(2, (data.x - loc).square().mean(), torch.full((2,), 0.4))
    chosen = least_variance(kernel, z, inducing)
    noise = 0.5 * (data.x - loc).square().mean()
    model = GPLVM(SparseGPRegression(z, (data.x - loc).mT, kernel, z[chosen].clone(), noise, approx="VFE", jitter=1e-5))
    schedule = pyro.optim.ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.05}, "gamma": 0.1 ** (1 / steps)})
    svi = SVI(model.model, model.guide, schedule, TraceMeanField_ELBO())
    for _ in range(steps):
        svi.step()
        schedule.step()
    seconds = time.process_time() - start
    with torch.no_grad():
        model.mode = "guide"
        z, base = model.X_loc.detach(), model.base_model
        posterior = ProjectedSet(kernel, base.noise, projected_statistics(kernel, base.Xu.detach(), z, data.x - loc))
    # The inducing inputs may lie anywhere: starts come from the data.
    found = Candidates(posterior.predict, z)
    return Fit(z, found, loc, infer_latents(found, data.x_test - loc, starts=2, steps=40), seconds)


class Candidates:
    """Predictions of any model, with latents of its training data as candidates for new ones."""

    def __init__(self, predict: Callable[..., tuple[Tensor, Tensor]], latents: Tensor) -> None:
        self._predict, self.latents = predict, latents[:: max(1, len(latents) // 300)]

    def predict(self, latents: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        return self._predict(latents, noiseless=noiseless)


def mlp(num_inputs: int, width: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, num_outputs))


def fit_vae(data: Images, epochs: int, latent_dim: int = 2) -> Fit:
    """Two hidden layers of 256 units on either side, a learned noise variance."""
    width, loc = data.x.shape[1], data.x.mean(0)
    encoder, network = mlp(width, 256, 2 * latent_dim), mlp(latent_dim, 256, width)
    log_noise = nn.Parameter((data.x - loc).square().mean().log())
    optimizer = torch.optim.Adam(
        [{"params": [*encoder.parameters(), *network.parameters()], "lr": 1e-3}, {"params": [log_noise], "lr": 1e-2}]
    )
    start = time.process_time()
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
    seconds = time.process_time() - start
    with torch.no_grad():
        z, encoded = (encoder(x - loc).chunk(2, -1)[0] for x in (data.x, data.x_test))
    noise = log_noise.detach().exp()

    def predict(latents: Tensor, *, noise_variance: Tensor = noise, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        mean = network(latents)
        return mean, noise_variance.expand(mean.shape[:-1]).unsqueeze(-1) * float(not noiseless)

    posterior = Candidates(predict, z)
    latents = infer_latents(posterior, data.x_test - loc, starts=2, steps=40, extra_start=encoded)
    return Fit(z, posterior, loc, latents, seconds, latents_encoder=encoded)


def fit_gpytorch(data: Images, inducing: int, seconds: float) -> Fit:
    """GPyTorch's Bayesian GP-LVM for CPU seconds, from the same start; inducing inputs and noise shared by outputs, minibatches of 500."""
    gpytorch = importlib.import_module("gpytorch")
    loc = data.x.mean(0)
    x, (num, width) = data.x - loc, data.x.shape
    start = time.process_time()
    first = principal_components(x, 2)
    model = gpytorch_gplvm(gpytorch, first, width, inducing, float(x.square().mean()))
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.5 * x.square().mean()
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=num)
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.02)
    model.train()
    while time.process_time() - start < seconds:
        rows = torch.randperm(num)[:500]
        optimizer.zero_grad()
        loss = -objective(model(model.sample_latent_variable()[rows]), x[rows].mT).sum()
        loss.backward()
        optimizer.step()
    used = time.process_time() - start
    model.eval()
    z = model.X.q_mu.detach()

    def predict(latents: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        found = model(latents.reshape(-1, 2))
        variance = found.variance + (0.0 if noiseless else likelihood.noise.detach())
        return tuple(values.mT.reshape(*latents.shape[:-1], width) for values in (found.mean, variance))  # type: ignore[return-value]

    posterior = Candidates(predict, z)
    return Fit(z, posterior, loc, infer_latents(posterior, data.x_test - loc, starts=2, steps=40), used)


def gpytorch_gplvm(gpytorch: Any, latents: Tensor, num_outputs: int, inducing: int, variance: float) -> Any:
    """The model, with normal latents that start with a standard deviation of 0.1."""
    gplvm = importlib.import_module("gpytorch.models.gplvm.bayesian_gplvm")
    variables = importlib.import_module("gpytorch.models.gplvm.latent_variable")
    variational, batch = gpytorch.variational, torch.Size([num_outputs])
    prior = gpytorch.priors.NormalPrior(torch.zeros_like(latents), torch.ones_like(latents))
    latent = variables.VariationalLatentVariable(len(latents), num_outputs, 2, latents.clone(), prior)
    with torch.no_grad():
        latent.q_log_sigma.fill_(math.log(math.expm1(0.1)))
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))
    kernel.outputscale, kernel.base_kernel.lengthscale = variance, 0.4
    chosen = least_variance(kernels.RBF(2, torch.tensor(1.0), torch.full((2,), 0.4)), latents, inducing)

    class Model(gplvm.BayesianGPLVM):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            distribution = variational.CholeskyVariationalDistribution(inducing, batch_shape=batch)
            points = latents[chosen].clone()
            super().__init__(latent, variational.VariationalStrategy(self, points, distribution, learn_inducing_locations=True))
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernel

        def forward(self, z: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(z), self.covar_module(z))

    return Model()


def fit(data: Images, method: str, active: int, epochs: int) -> Fit:
    """Trains a method of the tables; ``active`` is the number of inducing inputs for GP-LVMs, and ``epochs`` CPU seconds for GPyTorch's."""
    others: dict[str, Callable[[], Fit]] = {
        "gplvm": lambda: fit_gplvm(data, active, epochs),
        "vae": lambda: fit_vae(data, epochs),
        "gpytorch-gplvm": lambda: fit_gpytorch(data, active, epochs),
    }
    return others[method]() if method in others else fit_sas(data, method, active, epochs)
