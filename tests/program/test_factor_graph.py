"""Which nodes a program's factor graph has, in which plates, and when components keep whole states."""

from __future__ import annotations

import logging
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceEnum_ELBO, config_enumerate
from pyro.ops.indexing import Vindex
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyro_truncated import AutoTruncated, Truncated_ELBO

STICKY = torch.tensor([[0.8, 0.2], [0.3, 0.7]])


def graph_of(model, num_states, *args):
    """The factor graph, ``None`` where populations hold whole states."""
    guide = AutoTruncated(model, num_states)
    guide.setup(*args)
    return None if guide.product is None else guide.product.graph


def split_nodes(graph):
    return [node.sites for node in graph.nodes]


def width(graph):
    """The largest number of other nodes in a clique."""
    return max(map(len, graph.separators))


def chain(y, order=1):
    before = [torch.tensor(0)] * order
    table = torch.rand(*[2] * order, 2, generator=torch.Generator().manual_seed(0)).softmax(-1)
    for t in range(len(y)):
        z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(table)[tuple(before)]))
        before = [*before[1:], z]
        pyro.sample(f"y_{t}", dist.Normal(z.to(y.dtype), 1.0), obs=y[t])


def test_a_chain_has_a_node_for_each_step_and_cliques_of_two():
    graph = graph_of(chain, 2, torch.zeros(6))
    assert split_nodes(graph) == [(f"z_{t}",) for t in range(6)]
    assert width(graph) == 1
    assert graph.factors["z_3"] == (2, 3)
    assert graph.factors["y_3"] == (3,)
    assert len(graph.components) == 1


def test_a_second_order_chain_has_cliques_of_three():
    graph = graph_of(chain, 2, torch.zeros(6), 2)
    assert len(graph.nodes) == 6
    assert width(graph) == 2


def test_an_observation_of_the_last_three_steps_does_not_join_a_chain():
    def model(y):
        z = [pyro.sample("z_0", dist.Bernoulli(0.5))]
        for t in range(1, len(y)):
            z.append(pyro.sample(f"z_{t}", dist.Bernoulli(0.2 + 0.6 * z[-1])))
            pyro.sample(f"y_{t}", dist.Normal(sum(z[-3:]), 1.0), obs=y[t])

    graph = graph_of(model, 2, torch.zeros(8))
    assert len(graph.nodes) == 8
    assert width(graph) == 2


def test_a_tree_and_a_grid_have_small_cliques():
    def tree(y):
        z = [pyro.sample("z_0", dist.Bernoulli(0.5))]
        for i in range(1, 15):
            z.append(pyro.sample(f"z_{i}", dist.Bernoulli(0.2 + 0.6 * z[(i - 1) // 2])))
        pyro.sample("y", dist.Normal(z[-1], 1.0), obs=y)

    def grid(y):
        z = {}
        for column in range(6):
            for row in range(2):
                z[row, column] = pyro.sample(f"z_{row}_{column}", dist.Bernoulli(0.5))
                if column:
                    pyro.factor(f"along_{row}_{column}", 0.3 * z[row, column] * z[row, column - 1])
            pyro.sample(f"y_{column}", dist.Normal(z[0, column] - z[1, column], 1.0), obs=y)

    assert width(graph_of(tree, 2, torch.tensor(0.0))) == 1
    assert width(graph_of(grid, 2, torch.tensor(0.0))) == 2


def test_scalars_of_one_step_are_one_node_as_far_as_it_holds_them():
    def model(y):
        s = [torch.tensor(0.0)] * 3
        for t in range(len(y)):
            s = [pyro.sample(f"s_{t}_{m}", dist.Bernoulli(0.2 + 0.6 * s[m])) for m in range(3)]
            pyro.sample(f"y_{t}", dist.Normal(s[0] + 2 * s[1] + 4 * s[2], 1.0), obs=y[t])

    assert split_nodes(graph_of(model, 8, torch.zeros(4))) == [tuple(f"s_{t}_{m}" for m in range(3)) for t in range(4)]
    # Three sites with two states each are summed exactly, a joint set of four would not be.
    assert len(graph_of(model, 4, torch.zeros(4)).nodes) == 12


def test_members_of_inner_plates_are_one_node_where_one_density_joins_them():
    def model(y):
        causes = pyro.plate("causes", 3, dim=-2)
        with pyro.plate("data", 2, dim=-1):
            s = torch.zeros(())
            for t in range(4):
                with causes:
                    s = pyro.sample(f"s_{t}", dist.Bernoulli(0.2 + 0.6 * s))
                pyro.sample(f"y_{t}", dist.Normal(s.sum(-2, keepdim=True), 1.0), obs=y)

    guide = AutoTruncated(model, 8)
    guide.setup(torch.zeros(2))
    assert [[name for name, _, _ in node.plates] for node in guide.product.graph.nodes] == [["data"]] * 4
    assert all(layout.space.size == 8 for layout in guide.product.node_layouts)


def test_a_global_latent_comes_last_in_the_elimination():
    def model(y):
        flag = pyro.sample("flag", dist.Bernoulli(0.5))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(3)))
            pyro.sample("y", dist.Normal(z + flag, 1.0), obs=y)

    graph = graph_of(model, 3, torch.zeros(5))
    assert [node.plates for node in graph.nodes] == [(), (("data", -1, 5),)]
    assert graph.order == (1, 0)


def test_what_nothing_couples_are_components_of_their_own():
    def model(y):
        for i in range(len(y)):
            a = pyro.sample(f"a_{i}", dist.Bernoulli(0.5))
            pyro.sample(f"b_{i}", dist.Bernoulli(0.2 + 0.6 * a))
            pyro.sample(f"y_{i}", dist.Normal(a, 1.0), obs=y[i])

    assert graph_of(model, 2, torch.zeros(4)).components == ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.slow
def test_a_component_without_small_cliques_keeps_whole_states_and_says_so(caplog):
    def model(y):
        z = [pyro.sample(f"z_{i}", dist.Bernoulli(0.5)) for i in range(24)]
        for i in range(24):
            for j in range(i):
                pyro.factor(f"pair_{i}_{j}", 0.1 * z[i] * z[j])
        pyro.sample("y", dist.Normal(z[0], 1.0), obs=y)

    with caplog.at_level(logging.INFO):
        assert graph_of(model, 4, torch.tensor(0.0)) is None
    assert "the 24 sites z_0, z_1, z_2, z_3, ... depend on each other too densely" in caplog.text
    assert "whole states, 4 of" in caplog.text


def test_pairs_of_members_that_an_index_looks_up_are_one_decision_and_it_says_so(caplog):
    def model(y):
        with pyro.plate("groups", 8):
            u = pyro.sample("u", dist.Bernoulli(0.3))
        with pyro.plate("data", len(y)):
            neighbours = u[..., torch.arange(len(y)) % 8] + u[..., torch.arange(1, 1 + len(y)) % 8]
            pyro.sample("y", dist.Normal(neighbours, 1.0), obs=y)

    with caplog.at_level(logging.INFO):
        assert graph_of(model, 4, torch.zeros(16)) is None
    assert "'y' depends on several members of the plate 'groups' of 'u': they are one decision, with 4 of 256 states" in caplog.text


def test_the_members_of_one_of_two_crossed_plates_are_one_decision():
    def model(y):
        rows, columns = pyro.plate("rows", 3, dim=-2), pyro.plate("columns", 4, dim=-1)
        with rows:
            a = pyro.sample("a", dist.Bernoulli(0.5))
        with columns:
            b = pyro.sample("b", dist.Bernoulli(0.5))
        with rows, columns:
            pyro.sample("y", dist.Normal(a + b, 1.0), obs=y)

    graph = graph_of(model, 8, torch.zeros(3, 4))
    assert [node.plates for node in graph.nodes] == [(), (("columns", -1, 4),)]
    assert graph.order == (1, 0)
    assert not graph.whole


def test_steps_that_one_observation_adds_up_are_whole_states_and_it_says_so(caplog):
    def model(y, is_chain):
        z, steps = torch.tensor(0.0), []
        with pyro.plate("data", len(y)):
            for t in range(y.shape[1]):
                z = pyro.sample(f"z_{t}", dist.Bernoulli(0.2 + 0.6 * z if is_chain else 0.3))
                steps.append(z)
            mean = torch.stack(torch.broadcast_tensors(*steps), -1).cumsum(-1)
            pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)

    expected = "'y' depends on all of the sites z_0, z_1, z_2, z_3, ...: a population holds whole states, 4 of 64."
    for is_chain in (True, False):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert graph_of(model, 4, torch.zeros(3, 6), is_chain) is None
        # Independent causes of one observation are whole states as they are meant.
        assert (expected in caplog.text) == is_chain


class LargestTensor(TorchDispatchMode):
    """The most entries of a tensor that is computed."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # Views take no memory.
            if isinstance(tensor, torch.Tensor):
                self.number = max(self.number, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def several_chains(y, number):
    weights = torch.linspace(-2.0, 2.0, number * y.shape[2]).reshape(number, y.shape[2])
    with pyro.plate("sequences", len(y), dim=-2):
        states = [torch.tensor(0)] * number
        for t in range(y.shape[1]):
            states = [pyro.sample(f"s{m}_{t}", dist.Categorical(STICKY[s])) for m, s in enumerate(states)]
            logits = sum(s * weight for s, weight in zip(states, weights, strict=True)) - 1.0
            with pyro.plate(f"tones_{t}", y.shape[2], dim=-1):
                pyro.sample(f"y_{t}", dist.Bernoulli(logits=logits), obs=y[:, t])


def test_a_look_at_many_sites_of_a_step_takes_little_memory():
    """It is at most that of 1,024 joint states, up to which sites of one density stay apart."""
    y = torch.rand(5, 3, 11, generator=torch.Generator().manual_seed(0)).round()
    guide, elbo = AutoTruncated(several_chains, 16), Truncated_ELBO()
    with LargestTensor() as largest:
        guide.setup(y, 8)
    assert largest.number <= 2**10 * y[:, 0].numel()
    assert len(guide.product.graph.nodes) == 24
    exact = TraceEnum_ELBO(max_plate_nesting=2).loss(config_enumerate(several_chains, "parallel"), lambda *args: None, y, 8)
    assert elbo.loss(several_chains, guide, y, 8) == pytest.approx(exact, rel=1e-5)


def test_steps_with_many_sites_are_nodes_of_which_nothing_is_to_be_said(caplog):
    """Only sites of one node that depend on each other could be observed apart."""
    y = torch.zeros(2, 3, 4)
    with caplog.at_level(logging.INFO):
        graph = graph_of(several_chains, 16, y, 11)
    assert [len(node.sites) for node in graph.nodes] == [11] * 3
    assert not caplog.text


def test_what_holds_of_many_steps_is_said_once(caplog):
    def model(y):
        for t in range(len(y)):
            with pyro.plate(f"members_{t}", 6):
                z = pyro.sample(f"z_{t}", dist.Bernoulli(0.3))
            pyro.sample(f"y_{t}", dist.Normal(z.sum(-1, keepdim=True), 1.0), obs=y[t])

    with caplog.at_level(logging.INFO):
        assert len(graph_of(model, 8, torch.zeros(5)).nodes) == 5
    assert caplog.text.count("they are one decision") == 1
    assert "'y_0' depends on several members" in caplog.text
    assert "The same holds of 4 more." in caplog.text


@pytest.mark.parametrize("num_states", [4, 256])
def test_units_are_factors_whether_observed_or_not(num_states):
    """``dist.Unit`` has no value that another guide could give."""

    def units(y, is_observed):
        z = [pyro.sample(f"z_{t}", dist.Categorical(torch.ones(4))) for t in range(len(y))]
        for t in range(len(y)):
            pyro.sample(f"y_{t}", dist.Normal(z[t], 1.0), obs=y[t])
            unit = dist.Unit(1.5 * (z[t] == z[t - 1]).to(y.dtype))
            pyro.sample(f"u_{t}", unit, obs=unit.sample() if is_observed else None)

    y = torch.tensor([0.3, -1.0, 2.0, 0.7])
    states = torch.cartesian_prod(*[torch.arange(4)] * 4)
    log_joint = dist.Normal(states.float(), 1.0).log_prob(y).sum(-1) + 1.5 * (states == states.roll(1, -1)).sum(-1)
    evidence = float(log_joint.logsumexp(0)) - 4 * math.log(4.0)
    for is_observed in (False, True):
        loss = Truncated_ELBO().loss(units, AutoTruncated(units, num_states), y, is_observed)
        assert loss == pytest.approx(-evidence, rel=1e-5)
