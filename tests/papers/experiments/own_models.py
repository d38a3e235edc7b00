"""How many bars ``learn`` finds with models of one's own that are trained by gradients: ``python -m tests.papers.experiments.own_models``.

The images, the function and the class are those of the README's twenty lines and of the page on models.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.nn import PyroModule, PyroParam
from torch import Tensor

from pyro_truncated import AutoTruncated, Truncated_ELBO, learn
from pyro_truncated.datasets import linear_bars, matched_bars
from pyro_truncated.multistart import DisagreeingStartsWarning

NUM_LATENTS = 12


def function(y: Tensor) -> None:
    """The model of the README's twenty lines."""
    weight = pyro.param("weight", lambda: y[:NUM_LATENTS].mT.clone())
    noise = pyro.param("noise", torch.tensor(5.0), constraint=dist.constraints.positive)
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((NUM_LATENTS,), 0.2)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, noise).to_event(1), obs=y)


class Mine(PyroModule):
    """A class that says where a start may lie, and can have other latents."""

    def __init__(self, weight: Tensor, noise: Tensor) -> None:
        super().__init__()
        self.num_latents = weight.shape[1]
        self.weight, self.noise = PyroParam(weight), PyroParam(noise, dist.constraints.positive)

    def initialize(self, y: Tensor, generator: torch.Generator | None = None) -> Mine:
        self.weight = y[torch.randint(len(y), (self.num_latents,), generator=generator)].mT.clone()
        self.noise = y.std()
        return self

    def with_latents(self, index: Tensor) -> Mine:
        return Mine(self.weight.detach()[:, index].clone(), self.noise.detach().clone())

    def forward(self, y: Tensor) -> None:
        weight, noise = self.weight, self.noise
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((self.num_latents,), 2 / self.num_latents)).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT, noise).to_event(1), obs=y)


def plain(y: Tensor) -> int:
    """One start of Adam, as the README's twenty lines have it."""
    svi = SVI(function, AutoTruncated(function, num_states=32), pyro.optim.Adam({"lr": 0.1}), Truncated_ELBO())
    for _ in range(200):
        svi.step(y)
    return 1


def found(kind: str, seed: int) -> str:
    """Bars found, starts, whether it has warned, and CPU seconds."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    bars = linear_bars(500, size=6, mean_active=2.0)
    model: Any = Mine(torch.randn(36, NUM_LATENTS), torch.ones(())) if kind == "class" else function
    start = time.process_time()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", DisagreeingStartsWarning)
        starts = plain(bars.data) if kind == "one start" else len(learn(model, bars.data, progress=False).starts)
    seconds = time.process_time() - start
    weight = model.weight if kind == "class" else pyro.param("weight")
    number = matched_bars(weight.detach(), bars.components)
    return f"{kind}, seed {seed}: {number} of {NUM_LATENTS}, {starts} starts, {'warned' if told else 'silent'}, {seconds:.0f} CPU s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(405, 413)))
    parser.add_argument("--kinds", nargs="+", choices=("one start", "function", "class"), default=["one start", "function", "class"])
    args = parser.parse_args()
    for kind in args.kinds:
        for seed in args.seeds:
            print(found(kind, seed), flush=True)


if __name__ == "__main__":
    main()
