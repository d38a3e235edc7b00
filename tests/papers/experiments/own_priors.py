"""What ``learn(model, y)`` makes of programs whose parameters have priors: ``python -m tests.papers.experiments.own_priors``.

Their medians are compared with what the data were drawn from.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.ops.indexing import Vindex
from torch import Tensor

from pyro_truncated import learn
from pyro_truncated.multistart import DisagreeingStartsWarning
from tests.papers.experiments.own_functions import run

CENTRES = torch.tensor([-4.0, 0.0, 5.0])


def clusters(y: Tensor) -> None:
    share = pyro.sample("share", dist.Dirichlet(torch.full((3,), 0.5)))
    with pyro.plate("components", 3):
        loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 2.0))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(share))
        pyro.sample("y", dist.Normal(Vindex(loc)[..., z], scale), obs=y)


def drawn_clusters() -> tuple[Tensor, Tensor]:
    return torch.cat([centre + 0.5 * torch.randn(60) for centre in CENTRES]), CENTRES.unsqueeze(1)


def classes(y: Tensor) -> None:
    share = pyro.sample("share", dist.Dirichlet(torch.ones(4)))
    answer = pyro.sample("answer", dist.Beta(1.0, 1.0).expand([4, 20]).to_event(2))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(share))
        pyro.sample("y", dist.Bernoulli(Vindex(answer)[..., z, :]).to_event(1), obs=y)


def drawn_classes() -> tuple[Tensor, Tensor]:
    answer = dist.Beta(0.5, 0.5).sample((4, 20))
    return torch.bernoulli(answer[torch.randint(4, (400,))]), answer


def factors(y: Tensor) -> None:
    weight = pyro.sample("weight", dist.Normal(0.0, 3.0).expand([8, 25]).to_event(2))
    noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((8,), 0.25)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight, noise.unsqueeze(-1)).to_event(1), obs=y)


def drawn_factors() -> tuple[Tensor, Tensor]:
    weight = 3 * torch.randn(8, 25)
    return torch.bernoulli(torch.full((500, 8), 0.25)) @ weight + torch.randn(500, 25), weight


# The program, its data with what stands behind them, and the name of that.
KINDS: dict[str, tuple[Callable[[Tensor], None], Callable[[], tuple[Tensor, Tensor]], str]] = {
    "clusters": (clusters, drawn_clusters, "loc"),
    "classes": (classes, drawn_classes, "answer"),
    "factors": (factors, drawn_factors, "weight"),
}


def found(name: str, seed: int) -> str:
    """How far what has been drawn is from the nearest that was learned, in words."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    program, drawn, what = KINDS[name]
    y, true = drawn()
    start = time.process_time()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", DisagreeingStartsWarning)
        guide: Any = learn(program, y, progress=False)
    seconds = time.process_time() - start
    learned = guide[0].median(y)[what].detach().reshape(true.shape)
    errors = torch.cdist(true, learned).amin(1) / true.shape[1] ** 0.5
    said = "warned" if told else "silent"
    return f"{name}, seed {seed}: off by {errors.max():.2f} at most, {len(guide.starts)} starts, {said}, {seconds:.0f} CPU s"


if __name__ == "__main__":
    run(__doc__, KINDS, [54, 55, 56], found)
