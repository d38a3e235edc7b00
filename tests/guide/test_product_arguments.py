"""Arguments of a guide on structured programs: initial states, populations in files, continuous latents given the states."""

from __future__ import annotations

import contextlib
import logging
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
from pyro.ops.indexing import Vindex
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, Truncated_ELBO
from pyro_truncated.distributions import BinaryChains
from pyro_truncated.search import ConditionalSearch

WEIGHTS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
MOVES = torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.8, 0.1], [0.05, 0.25, 0.7]], dtype=torch.float64)
SLAB, NOISE = 0.5, 0.6


class Program:
    """A program whose observations have real latents with Gaussian densities, or none where these are integrated out."""

    has_data_plate = True

    def __init__(self, *, is_collapsed: bool = True) -> None:
        self.is_collapsed = is_collapsed

    def plate(self, name, size):
        """A plate of the program."""
        return pyro.plate(name, size)

    def observe(self, name, mean, value):
        """An observation around a real latent around the mean."""
        if self.is_collapsed:
            return pyro.sample(name, dist.Normal(mean, math.hypot(SLAB, NOISE)), obs=value)
        return pyro.sample(name, dist.Normal(pyro.sample(f"{name}_latent", dist.Normal(mean, SLAB)), NOISE), obs=value)

    def conditional(self, states, *data):
        """Samples the real latents from their exact posterior."""
        found = {}

        def observe(name, mean, value):
            precision = SLAB**-2 + NOISE**-2
            exact = dist.Normal((mean * SLAB**-2 + value * NOISE**-2) / precision, precision**-0.5)
            found[f"{name}_latent"] = pyro.sample(f"{name}_latent", exact)

        other = type(self)()
        other.observe = observe
        if self.has_data_plate:
            other.plate = lambda *_: contextlib.nullcontext()
        with pyro.poutine.block(hide=list(states)), pyro.poutine.condition(data=states):
            other(*data)
        return found


class TwoPlates(Program):
    has_data_plate = False

    def __call__(self, x, y):
        for name, value in (("x", x), ("y", y)):
            with self.plate(f"data_{name}", len(value)):
                z = pyro.sample(f"z_{name}", dist.Categorical(WEIGHTS))
                self.observe(name, z.double(), value)


class Chain(Program):
    def __call__(self, y):
        with self.plate("data", len(y)):
            z = torch.tensor(0)
            for t in pyro.markov(range(y.shape[1])):
                z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(MOVES)[z]))
                self.observe(f"y_{t}", z.double(), y[:, t])


class Flag(Program):
    has_data_plate = False

    def __call__(self, y):
        flag = pyro.sample("flag", dist.Bernoulli(torch.tensor(0.4, dtype=torch.float64)))
        with self.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(WEIGHTS))
            self.observe("y", z + 2 * flag, y)


class Tree(Program):
    def __call__(self, y):
        with self.plate("data", len(y)):
            root = pyro.sample("root", dist.Categorical(WEIGHTS))
            for i in range(y.shape[1]):
                z = pyro.sample(f"z_{i}", dist.Categorical(Vindex(MOVES)[root]))
                self.observe(f"y_{i}", z.double(), y[:, i])


PROGRAMS = {TwoPlates: ((3,), (2,)), Chain: ((3, 4),), Flag: ((4,),), Tree: ((3, 3),)}


def columns(program):
    return [torch.randn(*shape, dtype=torch.float64) for shape in PROGRAMS[program]]


def exact_loss(model, data):
    return float(TraceEnum_ELBO(max_plate_nesting=1).loss(config_enumerate(model), lambda *data: None, *data))


@pytest.mark.parametrize("program", PROGRAMS)
def test_sets_begin_with_the_states_that_are_given(program):
    """Sets that hold some whole states have no less evidence than these; states that repeat at a node leave room for others."""
    model, data = program(), columns(program)
    whole = AutoTruncated(model, 2, whole_states=True)
    whole(*data)
    states = whole.states()
    given = AutoTruncated(model, 2, init=lambda: states)
    loss = Truncated_ELBO().loss(model, given, *data)
    assert given.product is not None
    assert exact_loss(model, data) - 1e-9 <= loss <= Truncated_ELBO().loss(model, whole, *data) + 1e-9
    guide = AutoTruncated(model, 3, init={name: value[:, :1].expand(-1, 3, *value.shape[2:]) for name, value in states.items()})
    assert Truncated_ELBO().loss(model, guide, *data) == pytest.approx(exact_loss(model, data), rel=1e-9)
    with pytest.raises(ValueError, match=r"must start with the dimensions \(num_data, num_states\)"):
        Truncated_ELBO().loss(model, AutoTruncated(model, 3, init=states), *data)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("num_states", [2, 3])
def test_sets_in_files_are_those_in_memory(program, num_states, tmp_path):
    model, data, losses = program(), columns(program), []
    for store in (None, tmp_path):
        pyro.set_rng_seed(1)
        svi = SVI(model, AutoTruncated(model, num_states, store=store), Adam({"lr": 0.0}), Truncated_ELBO(ConditionalSearch()))
        losses.append([svi.step(*data) for _ in range(3)])
        assert svi.guide.product is not None
    assert losses[0] == losses[1]
    assert list(tmp_path.glob("group-*/words-*.npy"))
    if num_states == 3:
        assert losses[1][-1] == pytest.approx(exact_loss(model, data), rel=1e-9)


def test_a_minibatch_touches_its_own_sets_in_files(tmp_path):
    def model(y):
        with pyro.plate("data", len(y), subsample_size=2) as rows:
            z = pyro.sample("z", dist.Categorical(torch.ones(9)))
            w = pyro.sample("w", dist.Bernoulli(0.1 + 0.05 * z))
            pyro.sample("x", dist.Normal(z, 1.0), obs=y[rows])
            pyro.sample("y", dist.Normal(w, 1.0), obs=y[rows])

    guide = AutoTruncated(model, 2, store=tmp_path)
    Truncated_ELBO(ConditionalSearch()).loss_and_grads(model, guide, torch.randn(1000))
    assert guide.product is not None
    for store in guide.populations.stores:
        assert int(store._is_started.sum()) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("program", "num_states"), [(TwoPlates, 243), (Chain, 81), (Flag, 162), (Tree, 81)])
def test_continuous_latents_given_whole_states_are_integrated_out(program, num_states):
    model, data = program(is_collapsed=False), columns(program)
    guide = AutoTruncated(model, num_states, conditional=model.conditional)
    loss = Truncated_ELBO().loss_and_grads(model, guide, *data)
    assert loss == pytest.approx(exact_loss(program(), data), rel=1e-9)


def test_a_conditional_says_that_populations_hold_whole_states(caplog):
    model, data = Chain(is_collapsed=False), columns(Chain)
    with caplog.at_level(logging.INFO):
        AutoTruncated(model, 5, conditional=model.conditional)(*data)
    assert "conditional= needs whole states" in caplog.text


@pytest.mark.parametrize("num_states", [3, 4])
def test_sets_of_chains_begin_with_given_paths(num_states):
    """Their bound is at least the log joint of each path; with all four states of two chains it is the evidence."""
    chains = BinaryChains(torch.full((2,), 0.5), torch.tensor([[0.9, 0.1], [0.2, 0.8]]).expand(2, 2, 2), 5)

    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", chains)
            pyro.sample("y", dist.Normal((s * torch.tensor([1.0, 2.0])).sum(-1), 0.1).to_event(1), obs=y)

    def log_joint(paths, y):
        return chains.log_prob(paths) + dist.Normal((paths * torch.tensor([1.0, 2.0])).sum(-1), 0.1).log_prob(y.unsqueeze(1)).sum(-1)

    y, init = torch.randn(2, 5), (torch.rand(2, num_states, 5, 2) < 0.5).float()
    bound = -Truncated_ELBO().loss(model, AutoTruncated(model, num_states, init=init), y)
    paths = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 10).view(1, -1, 5, 2)
    evidence = float(log_joint(paths, y).logsumexp(1).sum())
    assert float(log_joint(init, y).amax(1).sum()) - 1e-3 <= bound <= evidence + 1e-3
    assert num_states < 4 or bound == pytest.approx(evidence, abs=1e-3)
