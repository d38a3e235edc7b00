"""Undirected models by ``pyro.factor``: images, graphs, networks, constraints."""

import pyro
import pyro.distributions as dist
import torch
from pyro.ops.indexing import Vindex

from tests.foreign import Foreign, foreign


@foreign
def ising_denoising() -> Foreign:
    """Denoising binary images with an Ising prior (Geman and Geman), one 3 x 3 field of matrix shape per image."""

    def model(y):
        coupling = pyro.param("coupling", torch.tensor(0.4))
        with pyro.plate("images", len(y)):
            s = pyro.sample("s", dist.Bernoulli(0.5).expand(y.shape[-2:]).to_event(2))
            spin = 2 * s - 1
            energy = (spin[..., 1:, :] * spin[..., :-1, :]).sum((-1, -2)) + (spin[..., 1:] * spin[..., :-1]).sum((-1, -2))
            pyro.factor("field", coupling * energy)
            pyro.sample("y", dist.Normal(spin, 1.0).to_event(2), obs=y)

    return Foreign(model, (torch.randn(2, 2, 3),), plates=("images",), new=(torch.randn(1, 2, 3),))


@foreign
def ising_global() -> Foreign:
    """The same as one image without a plate: the field is one global state."""

    def model(y):
        spin = 2 * pyro.sample("s", dist.Bernoulli(0.5).expand(y.shape).to_event(1)) - 1
        pyro.factor("field", 0.5 * (spin[..., 1:] * spin[..., :-1]).sum(-1))
        pyro.sample("y", dist.Normal(spin, 1.0).to_event(1), obs=y)

    return Foreign(model, (torch.randn(5),), plates=())


@foreign
def potts_segmentation() -> Foreign:
    """Segmentation with a Potts prior, pixels in two plates and neighbours compared by a factor outside of them."""

    def model(y):
        loc = pyro.sample("loc", dist.Normal(torch.tensor([-1.0, 0.0, 1.0]), 1.0).to_event(1))
        with pyro.plate("rows", y.shape[0], dim=-2), pyro.plate("columns", y.shape[1], dim=-1):
            z = pyro.sample("z", dist.Categorical(torch.ones(3)))
            pyro.sample("y", dist.Normal(Vindex(loc)[..., z], 0.8), obs=y)
        same = (z[..., 1:, :] == z[..., :-1, :]).sum((-1, -2)) + (z[..., 1:] == z[..., :-1]).sum((-1, -2))
        pyro.factor("smooth", 0.7 * same)

    return Foreign(model, (torch.randn(2, 2),), plates=())


@foreign
def stochastic_block_model() -> Foreign:
    """A stochastic block model: communities of all nodes in one vector, edges by their pairs."""

    def model(edges):
        n = len(edges)
        within = pyro.sample("within", dist.Beta(4.0, 2.0))
        between = pyro.sample("between", dist.Beta(1.0, 6.0))
        z = pyro.sample("z", dist.Categorical(torch.ones(n, 2)).to_event(1))
        same = z.unsqueeze(-1) == z.unsqueeze(-2)
        probs = torch.where(same, within, between)
        upper = torch.ones(n, n).triu(1) > 0
        pyro.sample("edges", dist.Bernoulli(probs).mask(upper).to_event(2), obs=edges)

    return Foreign(model, (torch.bernoulli(torch.full((5, 5), 0.4)).triu(1),), plates=())


@foreign
def node_plate_block_model() -> Foreign:
    """The same with nodes in a plate and edges in a plate of pairs: nothing in the node plate is independent."""

    def model(edges, source, target):
        logits = pyro.sample("logits", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
        with pyro.plate("nodes", 4):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.5, 0.5])))
        with pyro.plate("edges", len(edges)):
            pyro.sample("edge", dist.Bernoulli(logits=Vindex(logits)[z[..., source], z[..., target]]), obs=edges)

    source, target = torch.triu_indices(4, 4, 1)
    return Foreign(model, (torch.bernoulli(torch.full((6,), 0.5)), source, target), plates=())


@foreign
def boltzmann_machine() -> Foreign:
    """Hidden units of a restricted Boltzmann machine given visible ones, with an undirected coupling as a factor."""

    def model(v):
        w = pyro.param("w", torch.linspace(-1, 1, 12).reshape(3, 4))
        with pyro.plate("data", len(v)):
            h = pyro.sample("h", dist.Bernoulli(0.5).expand([3]).to_event(1))
            pyro.factor("energy", ((h @ w) * v).sum(-1))

    return Foreign(model, (torch.bernoulli(torch.full((4, 4), 0.5)),))


@foreign
def map_colouring() -> Foreign:
    """Colours of Australia's states as hard constraints: neighbours that agree have probability zero."""

    borders = torch.tensor([[0, 1], [0, 2], [1, 2], [1, 3], [2, 3]])

    def model(reward):
        colour = pyro.sample("colour", dist.Categorical(torch.ones(4, 3)).to_event(1))
        clash = (colour[..., borders[:, 0]] == colour[..., borders[:, 1]]).any(-1)
        pyro.factor("borders", torch.where(clash, -torch.inf, 0.0))
        pyro.sample("reward", dist.Normal((colour == 0).sum(-1).to(reward.dtype), 1.0), obs=reward)

    return Foreign(model, (torch.tensor(2.0),), plates=())


@foreign
def weighing_puzzle() -> Foreign:
    """Which of the coins is false, and is it light: a constraint by a tight likelihood (Church, WebPPL)."""

    def model(balance):
        false = pyro.sample("false", dist.Categorical(torch.ones(6)))
        is_light = pyro.sample("is_light", dist.Bernoulli(0.5))
        left = (false < 2).to(balance.dtype)
        right = ((false >= 2) & (false < 4)).to(balance.dtype)
        pyro.sample("balance", dist.Normal((left - right) * (1 - 2 * is_light), 0.1), obs=balance)

    return Foreign(model, (torch.tensor(-1.0),), plates=())
