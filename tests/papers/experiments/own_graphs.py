"""What ``learn(model, y)`` makes of latents that all data share: ``python -m tests.papers.experiments.own_graphs``.

Sixty nodes of a graph belong to one of three blocks, and the data are its 1770 possible edges; or twelve of forty predictors count, and the
data are three hundred rows of predictors and outcome. All data have one posterior.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import Truncated_ELBO, learn
from pyro_truncated.multistart import DisagreeingStartsWarning
from tests.papers.experiments.own_functions import run

NUM_NODES, NUM_BLOCKS, WITHIN, BETWEEN = 60, 3, 0.45, 0.05
FIRST, SECOND = torch.triu_indices(NUM_NODES, NUM_NODES, 1)
NUM_ROWS, NUM_PREDICTORS, NUM_CHOSEN = 300, 40, 12


class Drawn(NamedTuple):
    """Data, and the log joint of the states that they were drawn with at the likeliest parameters."""

    y: Tensor
    log_joint: float


def blocks(edges: Tensor) -> None:
    chance = pyro.param("chance", lambda: 0.1 + 0.3 * torch.rand(NUM_BLOCKS, NUM_BLOCKS), constraint=constraints.unit_interval)
    block = pyro.sample("states", dist.Categorical(torch.ones(NUM_NODES, NUM_BLOCKS) / NUM_BLOCKS).to_event(1)).long()
    pyro.sample("edges", dist.Bernoulli(chance[block[..., FIRST], block[..., SECOND]]).to_event(1), obs=edges)


def drawn_blocks() -> Drawn:
    block = torch.arange(NUM_NODES) % NUM_BLOCKS
    pair = NUM_BLOCKS * block[FIRST] + block[SECOND]
    edges = torch.bernoulli(torch.where(block[FIRST] == block[SECOND], WITHIN, BETWEEN))
    share = torch.zeros(NUM_BLOCKS**2).index_add_(0, pair, edges) / pair.bincount(minlength=NUM_BLOCKS**2)
    return Drawn(edges, float(dist.Bernoulli(share[pair]).log_prob(edges).sum()) - NUM_NODES * math.log(NUM_BLOCKS))


def selection(rows: Tensor) -> None:
    x, y = rows[:, :-1], rows[:, -1]
    weight = pyro.param("weight", lambda: torch.randn(NUM_PREDICTORS))
    noise = pyro.param("noise", torch.tensor(1.0), constraint=constraints.positive)
    chosen = pyro.sample("states", dist.Bernoulli(torch.full((NUM_PREDICTORS,), 0.2)).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(((chosen * weight).unsqueeze(-2) * x).sum(-1), noise), obs=y)


def drawn_selection() -> Drawn:
    x = torch.randn(NUM_ROWS, NUM_PREDICTORS)
    chosen = torch.arange(NUM_PREDICTORS) < NUM_CHOSEN
    y = x[:, chosen] @ (1 + torch.rand(NUM_CHOSEN)) + torch.randn(NUM_ROWS)
    residual = y - x[:, chosen] @ torch.linalg.lstsq(x[:, chosen], y.unsqueeze(-1)).solution.squeeze(-1)
    likelihood = dist.Normal(0.0, residual.square().mean().sqrt()).log_prob(residual).sum()
    return Drawn(
        torch.cat([x, y.unsqueeze(-1)], 1),
        float(likelihood + dist.Bernoulli(0.2).log_prob(chosen.float()).sum()),
    )


KINDS: dict[str, tuple[Callable[[Tensor], None], Callable[[], Drawn]]] = {
    "blocks": (blocks, drawn_blocks),
    "selection": (selection, drawn_selection),
}


def found(name: str, seed: int) -> str:
    """The free energy that is reached, beside the log joint of what was drawn, in words."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    program, drawn = KINDS[name]
    data = drawn()
    start = time.process_time()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", DisagreeingStartsWarning)
        guide: Any = learn(program, data.y, progress=False)
    seconds = time.process_time() - start
    reached, said = -Truncated_ELBO().loss(program, guide, data.y), "warned" if told else "silent"
    return (
        f"{name}, seed {seed}: {reached:.1f} ({data.log_joint:.1f} of the truth), {len(guide.starts)} starts, {said}, {seconds:.0f} CPU s"
    )


if __name__ == "__main__":
    run(__doc__, KINDS, [971, 972, 973], found)
