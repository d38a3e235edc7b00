"""Guides with a set of states for each node of the factor graph: exact at full sets, a bound at smaller ones, refusals by name."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, JitTrace_ELBO, RenyiELBO, Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta, AutoGuideList
from pyro.ops.indexing import Vindex
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.distributions import BinaryChains
from pyro_truncated.program.call import Call
from tests.foreign import structured_networks, structured_plates, structured_sequences  # noqa: F401
from tests.foreign.test_structured import check

SOME = [
    "sequences_of_different_lengths",
    "second_order_chain",
    "factorial_chain_in_a_plate",
    "hidden_semi_markov",
    "semi_supervised_chain",
    "counts_that_thin_out",
    "delta_between_steps",
    "noisy_or_network_with_missing_nodes",
    "grid_of_two_rows",
    "error_correcting_code",
    "occupancy_of_species",
    "two_uncoupled_plates",
    "latent_regression_per_group",
    "minibatch_of_outer_plate",
    "scaled_chain",
    "one_hot_and_counts",
    "users_and_items",
]
TRANSITION = torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.8, 0.1], [0.05, 0.25, 0.7]])


def chain(y):
    """Sequences of three states."""
    loc = pyro.param("loc", lambda: torch.tensor([-1.0, 0.0, 1.5], dtype=y.dtype))
    transition = TRANSITION.to(y.dtype)
    with pyro.plate("data", len(y)):
        z = torch.tensor(0)
        for t in pyro.markov(range(y.shape[1])):
            z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(transition)[z]), infer={"enumerate": "parallel"})
            pyro.sample(f"y_{t}", dist.Normal(Vindex(loc)[z], 0.6), obs=y[:, t])


def exact_loss(model, *args):
    """The loss of Pyro's enumeration."""
    return float(TraceEnum_ELBO().loss(config_enumerate(model), lambda *args: None, *args))


@pytest.mark.nightly(keep=3)
@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_some_structured_programs_equal_brute_force(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_long_chains_equal_enumeration_in_both_precisions(dtype, tolerance):
    y = torch.randn(3, 30, dtype=dtype)
    guide = AutoTruncated(chain, num_states=3)
    loss = Truncated_ELBO(EvolutionarySearch(2, 2)).loss_and_grads(chain, guide, y)
    gradient = pyro.get_param_store()._params["loc"].grad.clone()
    pyro.get_param_store()._params["loc"].grad = None
    expected = TraceEnum_ELBO().loss_and_grads(config_enumerate(chain), lambda y: None, y)
    assert loss == pytest.approx(float(expected), rel=tolerance)
    torch.testing.assert_close(gradient, pyro.get_param_store()._params["loc"].grad, rtol=1e3 * tolerance, atol=1e3 * tolerance)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_full_sets_of_many_categories_equal_enumeration(is_sparse):
    size = 40
    y = torch.randint(5, (40, 4))
    distance = (torch.arange(size) - torch.arange(size).unsqueeze(-1)).abs()

    def model(y):
        moves = pyro.param("moves", lambda: torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
        levels = pyro.param("levels", lambda: torch.randn(size, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
        allowed = moves.masked_fill(distance > 2, -torch.inf) if is_sparse else moves
        with pyro.plate("data", len(y)):
            z = torch.tensor(0)
            for t in pyro.markov(range(y.shape[1])):
                z = pyro.sample(f"z_{t}", dist.Categorical(logits=Vindex(allowed)[z]), infer={"enumerate": "parallel"})
                pyro.sample(f"y_{t}", dist.Categorical(logits=Vindex(levels)[z]), obs=y[:, t])

    loss = Truncated_ELBO().loss_and_grads(model, AutoTruncated(model, num_states=size), y)
    parameters = pyro.get_param_store()._params
    gradients = {name: value.grad.clone() for name, value in parameters.items()}
    pyro.clear_param_store()
    expected = TraceEnum_ELBO().loss_and_grads(config_enumerate(model), lambda y: None, y)
    assert loss == pytest.approx(float(expected), rel=1e-10)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, parameters[name].grad, rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore::pyro_truncated.VectorizationWarning")
@pytest.mark.parametrize("error", [AssertionError, TypeError, KeyError])
def test_programs_that_assert_shapes_keep_whole_states(error):
    def chain(y):
        z = torch.tensor(0)
        for t in range(4):
            z = pyro.sample(f"z_{t}", dist.Categorical(torch.tensor([[0.6, 0.4], [0.3, 0.7]])[z]))
            if z.dim():
                raise error("z must be a scalar")
            pyro.sample(f"y_{t}", dist.Normal(1.0 * z, 1.0), obs=y[t])

    y = torch.tensor([0.3, 1.2, -0.5, 2.0])
    losses = [Truncated_ELBO().loss(chain, AutoTruncated(chain, size), y) for size in (8, 16)]
    paths = itertools.product((0, 1), repeat=4)
    table = torch.tensor([[0.6, 0.4], [0.3, 0.7]]).log()
    joint = [sum(float(table[i, j]) for i, j in itertools.pairwise((0, *path))) for path in paths]
    scores = dist.Normal(torch.tensor(list(itertools.product((0.0, 1.0), repeat=4))), 1.0).log_prob(y).sum(1)
    exact = -float((torch.tensor(joint) + scores).logsumexp(0))
    assert losses[1] == pytest.approx(exact, rel=1e-5)
    assert losses[0] > exact


@pytest.mark.filterwarnings("ignore::pyro_truncated.VectorizationWarning")
@pytest.mark.parametrize("error", [AssertionError, TypeError])
def test_programs_that_assert_shapes_of_one_of_two_decisions_keep_whole_states(error):
    def pairs(y):
        with pyro.plate("data", len(y)):
            a, b = pyro.sample("a", dist.Bernoulli(0.3)), pyro.sample("b", dist.Categorical(torch.ones(3) / 3))
            if a.dim() > 1:
                raise error("a must have a number for each data point")
            pyro.sample("y", dist.Normal((a + b).unsqueeze(-1), 1.0).expand([*b.shape, 2]).to_event(1), obs=y)

    y = torch.tensor([[0.3, 1.2], [-0.5, 2.0], [1.0, 0.0]])
    joint = [[math.log(p / 3) + dist.Normal(a + b, 1.0).log_prob(y).sum(1) for b in range(3)] for a, p in enumerate((0.7, 0.3))]
    exact = -torch.stack([score for row in joint for score in row]).logsumexp(0).sum()
    assert Truncated_ELBO().loss(pairs, AutoTruncated(pairs, 6), y) == pytest.approx(float(exact), rel=1e-5)
    assert Truncated_ELBO().loss(pairs, AutoTruncated(pairs, 4), y) > exact


def test_any_elbo_of_pyro_returns_the_free_energy_without_noise():
    y = torch.randn(2, 5)
    guide = AutoTruncated(chain, num_states=2)
    loss = Truncated_ELBO(EvolutionarySearch(2, 2)).loss(chain, guide, y)
    guide.refresh_(y)
    free_energy = -float(guide.population().free_energy().sum())
    for elbo in (Trace_ELBO(), Trace_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1)):
        assert float(elbo.loss(chain, guide, y)) == pytest.approx(free_energy, rel=1e-4)
    assert free_energy == pytest.approx(loss, rel=1e-4)


@pytest.mark.slow
def test_a_saved_guide_goes_on_in_a_fresh_one():
    y = torch.randn(2, 6)
    guide = AutoTruncated(chain, num_states=2)
    objective = Truncated_ELBO(EvolutionarySearch(2, 2))
    svi = SVI(chain, guide, Adam({"lr": 0.01}), objective)
    for _ in range(3):
        svi.step(y)
    guide.refresh_(y)
    expected = guide.marginals()
    fresh = AutoTruncated(chain, num_states=2)
    fresh.load_state_dict(guide.state_dict())
    fresh.refresh_(y)
    found = fresh.marginals()
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.slow
def test_infers_new_sequences_exactly():
    guide = AutoTruncated(chain, num_states=3)
    Truncated_ELBO(EvolutionarySearch(2, 2)).loss(chain, guide, torch.randn(2, 6))
    new = torch.randn(4, 6)
    other = guide.infer(new)
    assert other.product is not None
    assert float(Trace_ELBO().loss(chain, other, new)) == pytest.approx(exact_loss(chain, new), rel=1e-5)


def test_whole_states_stay_whole_where_a_guide_infers():
    guide = AutoTruncated(chain, num_states=9, whole_states=True)
    Truncated_ELBO(EvolutionarySearch(2, 2)).loss(chain, guide, torch.randn(2, 4))
    assert guide.product is None
    assert guide.infer(torch.randn(3, 4)).product is None


def test_a_subsampled_plate_below_a_shared_latent_is_refused_by_name():
    def model(y):
        flag = pyro.sample("flag", dist.Bernoulli(0.5))
        with pyro.plate("data", len(y), subsample_size=2) as index:
            z = pyro.sample("z", dist.Categorical(torch.ones(4)))
            pyro.sample("y", dist.Normal(z + flag, 1.0), obs=y[index])

    with pytest.raises(NotImplementedError, match=r"\['z'\] lie in the subsampled plate 'data'.*\['flag'\]"):
        Truncated_ELBO(EvolutionarySearch(2, 2)).loss(model, AutoTruncated(model, 2), torch.randn(6))


@pytest.mark.slow
@pytest.mark.parametrize("num_states", [2, 4])
def test_latents_of_one_posterior_with_different_scales_are_refused_by_name(num_states):
    def model(y):
        with pyro.plate("data", len(y)):
            with poutine.scale(scale=0.5):
                z = pyro.sample("z", dist.Bernoulli(0.2))
            w = pyro.sample("w", dist.Bernoulli(0.2 + 0.5 * z))
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    with pytest.raises(ValueError, match="the latents 'z' and 'w' share a posterior, but have the scales"):
        Truncated_ELBO().loss(model, AutoTruncated(model, num_states), torch.zeros(3))


def test_components_may_have_scales_of_their_own():
    def mixture(name, y):
        with pyro.plate(f"data_{name}", len(y)):
            z = pyro.sample(f"z_{name}", dist.Bernoulli(0.3))
            pyro.sample(f"y_{name}", dist.Normal(z, 1.0), obs=y)

    def model(x, y):
        with poutine.scale(scale=2.0):
            mixture("x", x)
        mixture("y", y)

    x, y = torch.randn(3), torch.randn(2)
    expected = 2 * exact_loss(lambda: mixture("x", x)) + exact_loss(lambda: mixture("y", y))
    assert Truncated_ELBO().loss(model, AutoTruncated(model, 2), x, y) == pytest.approx(expected, abs=1e-5)


def test_minibatches_of_sequences_keep_their_own_rows():
    def model(y):
        with pyro.plate("data", len(y), subsample_size=2) as index:
            z = torch.tensor(0)
            for t in range(4):
                z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(TRANSITION)[z]))
                pyro.sample(f"y_{t}", dist.Normal(z.to(y.dtype), 0.5), obs=y[index, t])

    def whole(y):
        with pyro.plate("data", len(y)):
            z = torch.tensor(0)
            for t in range(4):
                z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(TRANSITION)[z]))
                pyro.sample(f"y_{t}", dist.Normal(z.to(y.dtype), 0.5), obs=y[:, t])

    y = torch.randn(6, 4) + 1
    guide = AutoTruncated(model, num_states=3)
    losses = [Truncated_ELBO(EvolutionarySearch(2, 2)).loss_and_grads(model, guide, y) for _ in range(100)]
    standard_error = torch.tensor(losses).std() / 100**0.5
    # False alarms in one of two million runs.
    assert abs(sum(losses) / 100 - exact_loss(whole, y)) < 5 * standard_error


def _stack(a, b):
    return torch.stack([a, b], -1)


def _stack_in_front(a, b):
    return torch.stack([a, b]).movedim(0, -1)


def _concatenate(a, b):
    return torch.cat([a.unsqueeze(-1), b.unsqueeze(-1)], dim=-1)


@pytest.mark.parametrize("join", [_stack, _stack_in_front, _concatenate])
def test_latents_of_two_nodes_are_stacked(join):
    def coupled(join, y):
        with pyro.plate("data", len(y)):
            a = b = torch.tensor(0.0)
            for t in range(4):
                a, b = (
                    pyro.sample(f"a_{t}", dist.Bernoulli(logits=0.5 + a - b), infer={"enumerate": "parallel"}),
                    pyro.sample(f"b_{t}", dist.Bernoulli(logits=0.2 - a + b), infer={"enumerate": "parallel"}),
                )
                pyro.sample(f"y_{t}", dist.Normal(join(a, b), 0.7).to_event(1), obs=y[:, t])

    y = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0))
    model = partial(coupled, join)
    guide = AutoTruncated(model, num_states=2)
    loss = Truncated_ELBO().loss(model, guide, y)
    assert len(guide.product.graph.nodes) == 8
    expected = exact_loss(partial(coupled, lambda a, b: _stack(*torch.broadcast_tensors(a, b))), y)
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "look_up",
    [
        lambda table, z: table.gather(1, z.unsqueeze(-1)).squeeze(-1),
        lambda table, z: torch.gather(table, -1, z.unsqueeze(-1)).squeeze(-1),
        lambda table, z: torch.take_along_dim(table, z.unsqueeze(-1), -1).squeeze(-1),
    ],
)
def test_values_are_gathered_by_the_states_of_a_chain(look_up):
    def chain(look_up, table, y):
        with pyro.plate("data", len(y)):
            z = torch.tensor(0)
            for t in range(4):
                z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(TRANSITION)[z]), infer={"enumerate": "parallel"})
                pyro.sample(f"y_{t}", dist.Normal(look_up(table, z), 0.7), obs=y[:, t])

    generator = torch.Generator().manual_seed(0)
    table, y = torch.randn(5, 3, generator=generator), torch.randn(5, 4, generator=generator)
    model = partial(chain, look_up)
    guide = AutoTruncated(model, num_states=3)
    loss = Truncated_ELBO().loss(model, guide, table, y)
    assert len(guide.product.graph.nodes) == 4
    expected = exact_loss(partial(chain, lambda table, z: table[torch.arange(5), z]), table, y)
    assert loss == pytest.approx(expected, rel=1e-5)


def test_what_a_call_observes_of_a_chain_is_taken():
    def model(y, known):
        z = torch.tensor(0)
        for t in range(6):
            obs = None if known is None or t not in known else torch.tensor(known[t])
            z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(TRANSITION)[z]), obs=obs, infer={"enumerate": "parallel"})
            pyro.sample(f"y_{t}", dist.Normal(z.to(y.dtype), 1.0), obs=y[t])

    y = torch.randn(6)
    guide, objective = AutoTruncated(model, num_states=3), Truncated_ELBO(EvolutionarySearch(2, 2))
    for known in (None, {2: 1}, {0: 2, 5: 0}, None):
        assert float(objective.loss_and_grads(model, guide, y, known)) == pytest.approx(exact_loss(model, y, known), rel=1e-5)


@pytest.mark.slow
def test_smaller_sets_bound_the_evidence_and_search_never_loses():
    def model(y):
        z = torch.tensor(0)
        for t in pyro.markov(range(len(y))):
            logits = -0.3 * (torch.arange(12) - z.unsqueeze(-1)).double().square()
            z = pyro.sample(f"z_{t}", dist.Categorical(logits=logits), infer={"enumerate": "parallel"})
            pyro.sample(f"y_{t}", dist.Normal(z.double(), 0.7), obs=y[t])

    y = (torch.randn(8, dtype=torch.float64).cumsum(0) + 5).clamp(0, 11)
    expected = exact_loss(model, y)
    guide, objective = AutoTruncated(model, num_states=6), Truncated_ELBO(EvolutionarySearch(2, 2))
    losses = [float(objective.loss_and_grads(model, guide, y)) for _ in range(15)]
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(losses))
    assert expected - 1e-9 <= losses[-1] < expected + 0.05


@pytest.mark.slow
def test_masked_steps_multiply_nothing():
    def model(y, lengths):
        with pyro.plate("data", len(y)):
            z = torch.tensor(0)
            for t in pyro.markov(range(y.shape[1])):
                with poutine.mask(mask=t < lengths):
                    z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(TRANSITION)[z]), infer={"enumerate": "parallel"})
                    pyro.sample(f"y_{t}", dist.Normal(Vindex(torch.tensor([-1.0, 0.0, 1.5]))[z], 0.1), obs=y[:, t])

    y = torch.tensor([[-1.0, 0.0, 1.5, 0.0, 0.0], [-1.0, -1.0, 0.0, 0.0, 1.5]])
    lengths = torch.tensor([2, 4])
    guide, objective = AutoTruncated(model, num_states=2), Truncated_ELBO(EvolutionarySearch(2, 2))
    losses = [float(objective.loss_and_grads(model, guide, y, lengths)) for _ in range(5)]
    expected = exact_loss(model, y, lengths)
    assert expected - 1e-5 <= losses[-1] < expected + 0.01


def count_runs(monkeypatch):
    """Counts the runs of the model."""
    runs, usual = [], Call.trace

    def trace(self):
        runs.append(self)
        return usual(self)

    monkeypatch.setattr(Call, "trace", trace)
    return runs


def test_a_step_at_full_sets_runs_the_model_once(monkeypatch):
    y = torch.randn(2, 6)
    guide, objective = AutoTruncated(chain, num_states=3), Truncated_ELBO()
    objective.loss_and_grads(chain, guide, y)
    runs = count_runs(monkeypatch)
    for step in range(1, 4):
        objective.loss_and_grads(chain, guide, y)
        assert len(runs) == step


@pytest.mark.slow
def test_a_search_step_runs_the_model_once_for_each_group_and_block(monkeypatch):
    def model(y):
        z = torch.tensor(0)
        for t in pyro.markov(range(len(y))):
            logits = -0.3 * (torch.arange(12) - z.unsqueeze(-1)).double().square()
            z = pyro.sample(f"z_{t}", dist.Categorical(logits=logits))
            pyro.sample(f"y_{t}", dist.Normal(z.double(), 0.7), obs=y[t])

    y = torch.randn(8, dtype=torch.float64) + 5
    guide, objective = AutoTruncated(model, num_states=4), Truncated_ELBO(EvolutionarySearch(2, 2, generations=1))
    objective.loss_and_grads(model, guide, y)
    runs = count_runs(monkeypatch)
    objective.loss_and_grads(model, guide, y)
    # Two runs of the sets, before and after the search; then one for each group, and one for each of two blocks.
    assert len(runs) <= 2 + len(guide.product.groups) + 2


@pytest.mark.nightly
def test_full_sets_need_no_compiled_kernels():
    program = """
import sys, pyro, torch
from pyro_truncated import AutoTruncated, Truncated_ELBO
from tests.guide.test_product_sets import chain
y = torch.randn(2, 5)
Truncated_ELBO().loss_and_grads(chain, AutoTruncated(chain, num_states=3), y)
assert "numba" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def alternating(y, mean=0.0):
    """A chain that must change its value at every step."""
    z = torch.tensor(0.0)
    for t in range(len(y)):
        z = pyro.sample(f"z_{t}", dist.Bernoulli(1 - z))
        pyro.sample(f"y_{t}", dist.Normal(z + mean, 0.5), obs=y[t])


def alternating_with_mean(y):
    alternating(y, pyro.sample("mean", dist.Normal(0.0, 1.0)))


def alternating_chains(y):
    """The same as one site of chains."""
    moves = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).expand(8, 2, 2)
    with pyro.plate("data", 2):
        s = pyro.sample("s", BinaryChains(torch.full((8,), 0.5), moves, len(y)))
        pyro.sample("y", dist.Normal(s.sum(-1), 1.0).to_event(1), obs=y.expand(2, -1))


def alone(model, **options):
    return model, AutoTruncated(model, num_states=1, **options)


def beside_another(**options):
    guide = AutoGuideList(alternating_with_mean)
    guide.append(AutoDelta(poutine.block(alternating_with_mean, expose=["mean"])))
    guide.append(AutoTruncated(alternating_with_mean, num_states=1, **options))
    return alternating_with_mean, guide


IMPOSSIBLE = {
    "sets": lambda: alone(alternating),
    "whole states": lambda: alone(alternating, whole_states=True),
    "chains": lambda: alone(alternating_chains),
    "sets beside another guide": beside_another,
    "whole states beside another guide": lambda: beside_another(whole_states=True),
}


@pytest.mark.filterwarnings("ignore:Encountered .inf", "ignore:no path of", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings(r"ignore:[\s\S]*need to use TraceEnum")
@pytest.mark.parametrize("kind", IMPOSSIBLE)
@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceGraph_ELBO, TraceEnum_ELBO, RenyiELBO, JitTrace_ELBO, Truncated_ELBO])
def test_every_loss_is_infinite_where_no_kept_state_is_possible(elbo, kind):
    model, guide = IMPOSSIBLE[kind]()
    elbo = elbo(num_particles=2 if elbo is RenyiELBO else 1, strict_enumeration_warning=False)
    with pytest.warns(UserWarning, match="the loss is infinite: .* of (z_0|s)"):
        assert elbo.loss(model, guide, torch.zeros(5)) == math.inf
    if isinstance(elbo, (Truncated_ELBO, JitTrace_ELBO)):
        return  # the first searches, the second takes no guide of states
    with pytest.warns(UserWarning, match="the loss is infinite"):
        assert float(elbo.loss_and_grads(model, guide, torch.zeros(5))) == math.inf


@pytest.mark.parametrize("options", [{}, {"whole_states": True}])
def test_a_search_comes_before_the_loss_beside_another_guide(options):
    model, guide = beside_another(**options)
    assert math.isfinite(Truncated_ELBO().loss_and_grads(model, guide, torch.zeros(5)))


def test_sets_that_no_path_crosses_are_named():
    model, y = alternating, torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
    guide = AutoTruncated(model, num_states=1)
    with pytest.warns(UserWarning, match=r"to all joint states that the guide keeps of z_0, z_1, z_2, z_3, \.\.\.\."):
        assert Truncated_ELBO().loss(model, guide, y) == math.inf
    without_search = Truncated_ELBO(search_every=2)
    without_search.num_evaluations = 1
    with pytest.raises(ValueError, match=r"of the batch\) of z_0, z_2, z_4\. Search first"):
        without_search.loss_and_grads(model, guide, y)
    assert Truncated_ELBO().loss_and_grads(model, guide, y) == pytest.approx(exact_loss(model, y), rel=1e-5)


@pytest.mark.parametrize("num_states", [2, 3, 6])
@pytest.mark.parametrize("is_idle", [True, False])
@pytest.mark.parametrize("mask", [True, False])
def test_one_mask_of_sites_without_plates(num_states: int, is_idle: bool, mask: bool) -> None:
    """What a mask switches off has no likelihood; where nothing else depends on it, it has one value."""
    second = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.1, 0.5]], dtype=torch.float64)

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.full((), 0.3, dtype=y.dtype)))
        with pyro.poutine.mask(mask=torch.tensor(mask)):
            w = pyro.sample("w", dist.Categorical(second[z.long()]))
            pyro.sample("y", dist.Normal(w.to(y.dtype), 1.0), obs=y)
        pyro.sample("x", dist.Normal(z if is_idle else z + w, 1.0), obs=y)

    y, total = torch.tensor(0.7, dtype=torch.float64), 0.0
    density = dist.Normal(0.0, 1.0).log_prob
    for z, w in itertools.product(range(2), range(3)):
        log_likelihood = density(y - z - (0 if is_idle else w)) + (density(y - w) if mask else 0.0)
        total += (0.3 if z else 0.7) * float(second[z, w]) * math.exp(float(log_likelihood))
    loss = Truncated_ELBO(EvolutionarySearch(2, 2)).loss(model, AutoTruncated(model, num_states), y)
    assert loss >= -math.log(total) - 1e-9
    if num_states == 6:
        assert loss == pytest.approx(-math.log(total), rel=1e-9)
