"""Names of the user's sites, data in named tuples, and plates of other sizes in later calls."""

from __future__ import annotations

import math
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta, AutoGuideList
from torch import Tensor

from pyro_truncated import AutoTruncated, Truncated_ELBO

Y = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)


def shifted(y: Tensor) -> None:
    """A latent has the name that indices of states of ``z`` would have."""
    shift = pyro.sample("z_index", dist.Normal(torch.zeros((), dtype=y.dtype), 1.0))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.3, dtype=y.dtype)))
        pyro.sample("y", dist.Normal(z + shift, 1.0), obs=y)


def test_sites_of_the_model_keep_their_names() -> None:
    guide = AutoGuideList(shifted)
    guide.append(AutoDelta(poutine.block(shifted, expose=["z_index"])))
    guide.append(AutoTruncated(shifted, num_states=2))
    loss = float(Truncated_ELBO().loss(shifted, guide, Y))
    shift = guide[0](Y)["z_index"].detach()
    joint = torch.stack([math.log(p) + dist.Normal(z + shift, 1.0).log_prob(Y) for z, p in ((0, 0.7), (1, 0.3))])
    expected = -joint.logsumexp(0).sum() - dist.Normal(0.0, 1.0).log_prob(shift)
    assert loss == pytest.approx(float(expected), rel=1e-12)
    assert TraceEnum_ELBO().loss(shifted, guide, Y) == pytest.approx(float(expected), rel=1e-12)


class Table(NamedTuple):
    """Data of a program with one argument."""

    x: Tensor
    y: Tensor


@pytest.mark.parametrize("whole_states", [True, False])
@pytest.mark.parametrize("kind", ["observed", "parameter"])
def test_observed_sites_and_parameters_keep_their_names(kind: str, whole_states: bool) -> None:
    """Names that indices of states would have, with sets for each step or without."""

    def model(y: Tensor) -> None:
        for name in ("z_0_index", "z_1_index", "z_0_z_1_index"):
            if kind == "observed":
                pyro.sample(name, dist.Normal(torch.zeros((), dtype=y.dtype), 1.0), obs=y[0])
            else:
                pyro.param(name, torch.zeros((), dtype=y.dtype))
        with pyro.plate("data", len(y)):
            z = torch.zeros((), dtype=y.dtype)
            for t in range(2):
                z = pyro.sample(f"z_{t}", dist.Bernoulli(0.2 + 0.6 * z))
                pyro.sample(f"y_{t}", dist.Normal(z, 1.0), obs=y)

    exact = TraceEnum_ELBO(max_plate_nesting=1).loss(config_enumerate(model), lambda y: None, Y)
    guide = AutoTruncated(model, num_states=4 if whole_states else 2, whole_states=whole_states)
    for elbo in (Truncated_ELBO(), TraceEnum_ELBO(max_plate_nesting=1) if whole_states else Trace_ELBO()):
        assert elbo.loss(model, guide, Y) == pytest.approx(exact, rel=1e-12)


def test_a_named_tuple_is_one_argument_of_new_data() -> None:
    def model(table: Table) -> None:
        with pyro.plate("data", len(table.y)):
            z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4, dtype=Y.dtype)))
            pyro.sample("y", dist.Normal(z + table.x, 1.0), obs=table.y)

    table = Table(Y.flip(0), Y)
    guide = AutoTruncated(model, num_states=2).infer(table)
    joint = torch.stack([math.log(p) + dist.Normal(z + table.x, 1.0).log_prob(Y) for z, p in ((0, 0.6), (1, 0.4))])
    torch.testing.assert_close(guide.population().free_energy(), joint.logsumexp(0))


@pytest.mark.parametrize("whole_states", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_inner_plate_of_another_size_is_refused_by_name(whole_states: bool, size: int) -> None:
    def model(y: Tensor) -> None:
        with pyro.plate("schools", y.shape[0], dim=-2):
            good = pyro.sample("good", dist.Bernoulli(0.4))
            with pyro.plate("pupils", y.shape[1], dim=-1):
                knows = pyro.sample("knows", dist.Bernoulli(0.3 + 0.2 * good))
                pyro.sample("y", dist.Normal(knows + good, 1.0), obs=y)

    guide, elbo = AutoTruncated(model, num_states=2, whole_states=whole_states), Truncated_ELBO()
    elbo.loss(model, guide, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=f"plate 'pupils' of discrete latent site 'knows' now has {size} members, but 3 when"):
        elbo.loss(model, guide, torch.zeros(2, size))


@pytest.mark.parametrize("num_states", [2, 4])
def test_minibatches_that_the_model_draws_are_not_read_as_all_data(num_states: int) -> None:
    y = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))

    def model(y: Tensor, size: int | None = None, rows: Tensor | None = None) -> None:
        with pyro.plate("data", len(y), subsample_size=size, subsample=rows) as index:
            a = pyro.sample("a", dist.Bernoulli(0.4))
            pyro.sample("y", dist.Normal(a, 1.0), obs=y[index, 0])
            b = pyro.sample("b", dist.Bernoulli(0.3 + 0.4 * a))
            pyro.sample("w", dist.Normal(b, 1.0), obs=y[index, 1])

    guide, elbo = AutoTruncated(model, num_states), Truncated_ELBO()
    elbo.loss_and_grads(model, guide, y, 4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"call guide.refresh_\(\*args\) with"):
            guide.marginals()
    guide.refresh_(y)
    marginals = guide.marginals()["a"]
    a, b = torch.tensor([0.0, 1.0]), torch.tensor([[0.0], [1.0]])
    prior = dist.Bernoulli(0.4).log_prob(a) + dist.Bernoulli(0.3 + 0.4 * a).log_prob(b)
    joint = prior + dist.Normal(a, 1.0).log_prob(y[:, :1, None]) + dist.Normal(b, 1.0).log_prob(y[:, 1:, None])
    torch.testing.assert_close(marginals, joint.flatten(1).softmax(-1).view(8, 2, 2).sum(1)[:, 1], check_dtype=False)
    rows = torch.tensor([5, 1, 6])
    elbo.loss_and_grads(model, guide, y, None, rows)
    torch.testing.assert_close(guide.marginals()["a"], marginals if num_states == 4 else marginals[rows])
