"""Latents that may change places, and what two models find together."""

from __future__ import annotations

import itertools
import math
import warnings
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroParam
from pyro.ops.indexing import Vindex
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, LearnConfig, Truncated_ELBO, learn
from pyro_truncated.datasets import Bars, linear_bars, matched_bars
from pyro_truncated.multistart import DisagreeingStartsWarning
from pyro_truncated.multistart.config import Restart
from pyro_truncated.multistart.model_parameters import Medians, ModelParameters, prior_draw
from pyro_truncated.multistart.moves import (
    Complement,
    Exchangeable,
    Recombination,
    SolutionPool,
    build_recombinations,
    exchangeable_latents,
)
from pyro_truncated.multistart.profile import Profile, profile_model
from pyro_truncated.multistart.pruning import value_deletion_losses
from pyro_truncated.multistart.solution import FreeEnergyEstimate, Solution
from pyro_truncated.multistart.trainer import FixedStates
from pyro_truncated.search.base import Search
from pyro_truncated.search.conditional import ConditionalSearch
from pyro_truncated.states.population import Population


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_parameter(name: str, *shape: int, **constraint: Any) -> Any:
    return pyro.param(name, lambda: torch.rand(shape, generator=generator(len(name))), **constraint)


def square(y: Tensor) -> None:
    """As many latents as dimensions, and a bias of the dimensions."""
    weight, bias, rate = random_parameter("weight", 4, 4), random_parameter("bias", 4), pyro.param("logit", lambda: torch.arange(4.0))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(logits=rate).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT + bias, 0.5).to_event(1), obs=y)


def rows(y: Tensor) -> None:
    """Latents of three values each, along the first axis."""
    weight, scale = random_parameter("weight", 3, 4), random_parameter("scale", 1, constraint=dist.constraints.positive)
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Categorical(torch.tensor([0.5, 0.3, 0.2])).expand([3]).to_event(1))
        pyro.sample("y", dist.Normal(s.to(y.dtype) @ weight, scale).to_event(1), obs=y)


def two_sites(y: Tensor) -> None:
    """Sites of the same length with parameters of their own, of which the first has constants that differ."""
    fixed, first, second = torch.tensor([0.1, 0.2, 0.3]), random_parameter("first", 4, 3), random_parameter("second", 4, 3)
    with pyro.plate("data", len(y)):
        a = pyro.sample("a", dist.Bernoulli(fixed).to_event(1))
        b = pyro.sample("b", dist.Bernoulli(torch.full((3,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(a @ first.mT + b @ second.mT, 0.5).to_event(1), obs=y)


def mixture(y: Tensor) -> None:
    """Five components with shares, and a scale of all."""
    loc, scale = random_parameter("loc", 5, 4), random_parameter("scale", 1, constraint=dist.constraints.positive)
    share = pyro.param("share", torch.tensor([0.1, 0.15, 0.2, 0.25, 0.3]), constraint=dist.constraints.simplex)
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(share))
        pyro.sample("y", dist.Normal(Vindex(loc)[z], scale).to_event(1), obs=y)


def ordered(y: Tensor) -> None:
    """Values of which each is as much as its number says."""
    loc = random_parameter("loc", 5, 4)
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.ones(5) / 5))
        pyro.sample("y", dist.Normal(Vindex(loc)[z] + z.unsqueeze(-1), 0.5).to_event(1), obs=y)


def types_and_factors(y: Tensor) -> None:
    """Three types with a location each, and four latents above them."""
    loc, weight = random_parameter("loc", 3, 5), random_parameter("weight", 5, 4)
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.ones(3) / 3))
        s = pyro.sample("s", dist.Bernoulli(torch.full((4,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(Vindex(loc)[z] + s @ weight.mT, 0.5).to_event(1), obs=torch.cat([y, y[:, :1]], 1))


def chain(y: Tensor) -> None:
    """Latents that come one after the other."""
    weight, coupling = random_parameter("weight", 4, 3), random_parameter("coupling", 1)
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.5)).to_event(1))
        pyro.factor("chain", coupling * (s[..., 1:] * s[..., :-1]).sum(-1))
        pyro.sample("y", dist.Normal(s @ weight.mT, 0.5).to_event(1), obs=y)


def ring(y: Tensor) -> None:
    """Latents that may be turned round, but not exchanged."""
    weight = random_parameter("weight", 4, 4)
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((4,), 0.5)).to_event(1))
        pyro.factor("ring", (s * s.roll(1, -1)).sum(-1))
        pyro.sample("y", dist.Normal(s @ weight.mT, 0.5).to_event(1), obs=y)


def without_parameters_of_their_own(y: Tensor) -> None:
    strength = random_parameter("strength", 1)
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.5)).to_event(1))
        pyro.sample("y", dist.Normal(strength * s.sum(-1, keepdim=True), 0.5).expand([*s.shape[:-1], 4]).to_event(1), obs=y)


def beside_continuous(y: Tensor) -> None:
    weight = random_parameter("weight", 4, 3)
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.1))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.5)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, scale).to_event(1), obs=y)


def with_priors(y: Tensor) -> None:
    """Four components whose shares and locations have priors, beside a scale that all have."""
    share = pyro.sample("share", dist.Dirichlet(torch.ones(4)))
    loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([4, 4]).to_event(2))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.1))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(share))
        pyro.sample("y", dist.Normal(Vindex(loc)[..., z, :], scale.unsqueeze(-1)).to_event(1), obs=y)


def superposed(y: Tensor) -> None:
    """Two draws of three classes: shares and locations belong to the values of both sites."""
    loc, share = random_parameter("loc", 3, 4), pyro.param("share", torch.tensor([0.2, 0.3, 0.5]), constraint=dist.constraints.simplex)
    with pyro.plate("data", len(y)):
        a, b = (pyro.sample(name, dist.Categorical(share)) for name in "ab")
        c = pyro.sample("c", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
        means = Vindex(loc)[a] + 0.5 * Vindex(loc)[b] + c.unsqueeze(-1)
        pyro.sample("y", dist.Normal(means, 0.5).to_event(1), obs=y)


def transitions(y: Tensor) -> None:
    """Two times: the transitions belong to the values of the first along rows, of the second along columns."""
    loc, table = random_parameter("loc", 3, 4), random_parameter("transition", 3, 3)
    with pyro.plate("data", len(y)):
        first = pyro.sample("first", dist.Categorical(torch.ones(3)))
        second = pyro.sample("second", dist.Categorical(logits=Vindex(table)[first]))
        pyro.sample("y", dist.Normal(Vindex(loc)[first] + 0.5 * Vindex(loc)[second], 0.5).to_event(1), obs=y)


def two_draws(y: Tensor) -> None:
    """Two draws of three classes in one site."""
    loc = random_parameter("loc", 3, 4)
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.ones(3)).expand([2]).to_event(1))
        pyro.sample("y", dist.Normal(Vindex(loc)[z[..., 0]] + Vindex(loc)[z[..., 1]], 0.5).to_event(1), obs=y)


def two_times(y: Tensor) -> None:
    """Factors now and before, with one dictionary of both."""
    weight = random_parameter("weight", 4, 3)
    with pyro.plate("data", len(y)):
        s, t = (pyro.sample(name, dist.Bernoulli(torch.full((3,), 0.3)).to_event(1)) for name in "st")
        pyro.sample("y", dist.Normal((s + 0.5 * t) @ weight.mT, 0.5).to_event(1), obs=y)


def tables_of_their_own(y: Tensor) -> None:
    """Two draws with a table each, in one parameter: the values of one may be exchanged without those of the other."""
    loc = random_parameter("loc", 2, 3, 4)
    with pyro.plate("data", len(y)):
        a, b = (pyro.sample(name, dist.Categorical(torch.ones(3))) for name in "ab")
        pyro.sample("y", dist.Normal(Vindex(loc[0])[a] + 0.5 * Vindex(loc[1])[b], 0.5).to_event(1), obs=y)


def four_tables(y: Tensor) -> None:
    """Four draws with a table each, and a parameter as long as there are values: 162 assignments of axes, not all of which are tried."""
    tables, scale = [random_parameter(f"loc_{i}", 5, 5) for i in range(4)], random_parameter("scale", 5)
    with pyro.plate("data", len(y)):
        means = [Vindex(loc)[pyro.sample(f"z_{i}", dist.Categorical(torch.ones(5)))] * (1 + 0.1 * i) for i, loc in enumerate(tables)]
        pyro.sample("y", dist.Normal(sum(means), scale.abs() + 0.1).to_event(1), obs=y)


class Constants(PyroModule):
    """What is learned belongs to latents that differ by constants."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = PyroParam(torch.rand(4, 3, generator=generator()))
        self.register_buffer("logits", torch.arange(3.0))

    def forward(self, y: Tensor) -> None:
        weight = self.weight
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(logits=self.logits).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT, 0.5).to_event(1), obs=y)


def beside(model: Any, y: Tensor, guide: AutoTruncated) -> dict[str, Tensor]:
    """The state of a guide of continuous latents that begins at a draw of theirs."""
    if not guide.layout.other_latents:
        return {}
    normal = AutoNormal(poutine.block(model, hide=list(guide.layout.sites)), init_loc_fn=prior_draw)
    normal(y)
    return normal.state_dict()


def found(model: Any, num_observed: int = 4) -> list[Exchangeable]:
    y = torch.rand(20, num_observed, generator=generator())
    guide = AutoTruncated(model, num_states=4)
    guide.setup(y)
    learned = Medians(guide, y)
    state = learned.state(beside(model, y, guide))
    before, random = ModelParameters(model, y).snapshot(), torch.get_rng_state()
    groups = exchangeable_latents(learned, state)
    assert torch.equal(torch.get_rng_state(), random)
    after = ModelParameters(model, y).snapshot()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    return groups


def test_every_group_is_found_and_the_largest_comes_first() -> None:
    assert found(types_and_factors) == [
        Exchangeable((slice(1, 5),), [("weight", 1)]),
        Exchangeable((slice(0, 1),), [("loc", 0)], num_values=3),
    ]


@pytest.mark.parametrize(
    ("model", "group"),
    [
        (square, Exchangeable((slice(0, 4),), [("weight", 1), ("logit", 0)])),
        (rows, Exchangeable((slice(0, 3),), [("weight", 0)])),
        (two_sites, Exchangeable((slice(3, 6),), [("second", 1)])),
        (mixture, Exchangeable((slice(0, 1),), [("loc", 0), ("share", 0)], num_values=5)),
        (beside_continuous, Exchangeable((slice(0, 3),), [("weight", 1)])),
        (with_priors, Exchangeable((slice(0, 1),), [("median of share", 0), ("median of loc", 0)], num_values=4)),
        (superposed, Exchangeable((slice(0, 1), slice(1, 2)), [("loc", 0), ("share", 0)], num_values=3)),
        (transitions, Exchangeable((slice(0, 1), slice(1, 2)), [("loc", 0), ("transition", 0), ("transition", 1)], num_values=3)),
        (two_draws, Exchangeable((slice(0, 2),), [("loc", 0)], num_values=3)),
        (two_times, Exchangeable((slice(0, 3), slice(3, 6)), [("weight", 1)])),
    ],
)
def test_the_program_shows_which_parameters_belong_to_which_latent_or_value(model: Any, group: Exchangeable) -> None:
    assert found(model) == [group]


def test_draws_with_tables_of_their_own_are_not_taken_together() -> None:
    assert found(four_tables, 5) == [Exchangeable((slice(0, 1),), [("loc_0", 0)], num_values=5)]


@pytest.mark.parametrize("model", [chain, ring, ordered, without_parameters_of_their_own, tables_of_their_own, Constants()])
def test_latents_that_are_not_alike_or_have_no_parameters_are_left_alone(model: Any) -> None:
    assert found(model) == []


# --- recombination ---


def bars_model(y: Tensor) -> None:
    weight, logit = pyro.param("weight", torch.zeros(9, 6)), pyro.param("rate", torch.zeros(6))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(logits=logit).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, 1.0).to_event(1), obs=y)


def every_joint(parameters: dict[str, Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
    """All states, and their log joints ``(N, 64)``."""
    states = torch.tensor(list(itertools.product([0.0, 1.0], repeat=6)), dtype=torch.float64)
    weight, logit = parameters["weight"].double(), parameters["rate"].double()
    prior = dist.Bernoulli(logits=logit).log_prob(states).sum(-1)
    return states, prior + dist.Normal(states @ weight.mT, 1.0).log_prob(y.double().unsqueeze(1)).sum(-1)


def exact(parameters: dict[str, Tensor], y: Tensor) -> float:
    """Mean log evidence, by enumeration."""
    return float(every_joint(parameters, y)[1].logsumexp(-1).mean())


def exact_marginals(parameters: dict[str, Tensor], y: Tensor) -> Tensor:
    states, log_joint = every_joint(parameters, y)
    return log_joint.softmax(-1) @ states


def recombination(y: Tensor, num_states: int = 64, search: Search | None = None) -> Recombination:
    guide = AutoTruncated(bars_model, num_states=num_states)
    guide.setup(y)
    return Recombination(
        Medians(guide, y), search or EvolutionarySearch(), Exchangeable((slice(0, 6),), [("weight", 1), ("rate", 0)]), 0.01
    )


@pytest.mark.slow
def test_two_models_find_together_what_each_of_them_lacks() -> None:
    bars = linear_bars(300, 3, mean_active=2.0, noise=1.0, generator=generator())
    whole = {"weight": bars.components, "rate": torch.full((6,), -0.7) + 0.01 * torch.arange(6)}
    # Latents that show a bar only beside another one; a code of three differences for three bars. In another order, too.
    one, other = whole["weight"].clone(), whole["weight"].clone()
    one[:, 0] -= one[:, 1]
    code = torch.tensor([[-0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0.5, 0.5, -0.5]])
    other[:, 3:] = other[:, 3:] @ code
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    lacking = {"weight": one, "rate": whole["rate"]}
    coded = {"weight": other[:, order], "rate": whole["rate"][order]}
    crossing = recombination(bars.data)
    first, second = populated(crossing, lacking), populated(crossing, coded)
    assert first.free_energy == pytest.approx(exact(lacking, bars.data), rel=1e-5)
    assert second.free_energy == pytest.approx(exact(coded, bars.data), rel=1e-5)
    assert first.free_energy > second.free_energy
    child = crossing.cross(first, second)
    assert child.free_energy == pytest.approx(exact(child.parameters, bars.data), rel=1e-5)
    assert child.free_energy == pytest.approx(exact(whole, bars.data), rel=1e-5)
    assert matched_bars(child.parameters["weight"], bars.components) == 6
    # Each latent has come with its own rate.
    for latent in range(6):
        source = int((child.parameters["weight"][:, latent : latent + 1] - whole["weight"]).abs().sum(0).argmin())
        assert child.parameters["rate"][latent] == whole["rate"][source]


@pytest.mark.slow
def test_nothing_changes_where_the_other_model_has_found_nothing_else() -> None:
    bars = linear_bars(200, 3, mean_active=2.0, noise=1.0, generator=generator())
    crossing = recombination(bars.data)
    whole = populated(crossing, {"weight": bars.components, "rate": torch.full((6,), -0.7)})
    broken = populated(crossing, {"weight": bars.components.roll(1, 0).contiguous(), "rate": torch.zeros(6)})
    assert crossing.cross(whole, broken) is whole


def test_a_restart_keeps_the_states_that_it_has_found() -> None:
    bars = linear_bars(200, 3, mean_active=2.0, noise=1.0, generator=generator())
    crossing, parameters = (
        recombination(bars.data, num_states=2, search=FixedStates()),
        {"weight": bars.components, "rate": torch.full((6,), 0.7)},
    )
    states, log_joint = every_joint(parameters, bars.data)
    best = log_joint.topk(2, 1)
    population = Population(crossing.space, crossing.space.pack(states.to(torch.uint8)[best.indices]), best.values.float())
    kept = crossing.populate(Solution(FreeEnergyEstimate(0.0), parameters, population))
    assert kept.free_energy == pytest.approx(float(best.values.logsumexp(1).mean()), rel=1e-5)


# --- what several starts have found ---


def whole(bars: Bars) -> dict[str, Tensor]:
    return {"weight": bars.components, "rate": torch.full((6,), -0.7)}


def without(bars: Bars, *lost: int) -> dict[str, Tensor]:
    """A model in which some latents show nothing."""
    parameters = whole(bars)
    return {**parameters, "weight": parameters["weight"].index_fill(1, torch.tensor(lost), 0.0)}


def not_showing(bars: Bars, *latents: int) -> Bars:
    """Only the data in which some bars do not show, so that their latents have nothing to do."""
    return bars._replace(data=bars.data[(bars.states[:, list(latents)] == 0).all(1)])


def repeating(bars: Bars) -> dict[str, Tensor]:
    """A model in which two latents show the same bar, and none the last one."""
    parameters = whole(bars)
    return {**parameters, "weight": bars.components[:, [0, 1, 2, 3, 4, 4]]}


def assembly_of(bars: Bars, *parameters: dict[str, Tensor]) -> SolutionPool:
    """Starts that have ended with these parameters, which are left as they are."""
    assembly = pool_of([recombination(bars.data)])
    for value in parameters:
        add(assembly, ended(assembly.groups[0], value))
    return assembly


def ended(group: Recombination, parameters: dict[str, Tensor]) -> Solution:
    """A start that has ended with these parameters, and with states that were not searched yet."""
    words = group._guide.words.clone()
    return Solution(FreeEnergyEstimate(0.0), parameters, Population(group.space, words, torch.zeros(words.shape[:2])))


def populated(group: Recombination, parameters: dict[str, Tensor]) -> Solution:
    return group.populate(ended(group, parameters))


def pool_of(groups: list[Recombination], refine: Any = None, **arguments: Any) -> SolutionPool:
    """Restarts that exchange latents of these groups; what moves propose is left as it is unless said otherwise."""
    arguments = {"model": bars_model, "y": torch.zeros(4, 9), "config": LearnConfig(tolerance=0.01), **arguments}
    pool = SolutionPool(profile_model(**arguments))
    pool.refine, pool.own_moves, pool.groups = refine or as_it_is, (), groups
    return pool


def add(pool: SolutionPool, found: Solution) -> None:
    pool.add(found, Restart("", 1, found.free_energy))


def as_it_is(profile: Profile, solution: Solution) -> Solution:
    return solution.replace(companion={})


def with_continuous_latents(profile: Profile | None, solution: Solution, less: float) -> Solution:
    estimate = FreeEnergyEstimate(solution.free_energy - less)
    return solution.replace(estimate=estimate, companion={"scale": torch.ones(())}, spread=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("is_better", [True, False])
def test_beside_continuous_latents_an_exchange_counts_for_what_it_has_once_it_is_trained(is_better: bool) -> None:
    """What it has before is an estimate, with the spread of the continuous latents that the parent has."""
    bars = linear_bars(300, 3, mean_active=2.0, noise=1.0, generator=generator())
    crossing = recombination(bars.data)
    assembly = pool_of([crossing], partial(with_continuous_latents, less=0.0 if is_better else 1000.0))
    starts = [with_continuous_latents(None, populated(crossing, without(bars, lost)), less=1.0) for lost in (3, 4)]
    for start in starts:
        add(assembly, start)
    expected = exact(whole(bars), bars.data) - 1 if is_better else max(start.free_energy for start in starts)
    assert assembly.best.free_energy == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_latents_of_the_best_that_only_one_start_has_found_are_counted() -> None:
    bars = linear_bars(300, 3, mean_active=2.0, noise=1.0, generator=generator())
    starts = [without(bars, 1, 5), without(bars, 3), without(bars, 5)]
    together = exact_marginals(whole(bars), bars.data)
    counts = torch.zeros(6)
    assembly = assembly_of(bars)
    for number, parameters in enumerate(starts):
        add(assembly, ended(assembly.groups[0], parameters))
        if number == 0:
            continue  # the best lacks bars as yet
        each = [exact_marginals(start, bars.data) for start in starts[: number + 1]]
        counts = sum((torch.corrcoef(torch.cat([together, one], 1).mT)[:6, 6:].diagonal().nan_to_num() > 0.9).int() for one in each)
        assert assembly.best.free_energy == pytest.approx(exact(whole(bars), bars.data), rel=1e-5)
        assert matched_bars(assembly.best.parameters["weight"], bars.components) == 6
        assert assembly.num_singletons == int((counts < 2).sum()) > 0
        assert not assembly.is_complete()
    add(assembly, ended(assembly.groups[0], whole(bars)))
    add(assembly, ended(assembly.groups[0], whole(bars)))
    assert (assembly.num_singletons, assembly.is_complete()) == (0, True)


def test_a_latent_that_two_starts_repeat_ends_nothing_and_is_not_missed() -> None:
    bars = linear_bars(300, 3, mean_active=2.0, noise=1.0, generator=generator())
    alike = assembly_of(not_showing(bars, 5), repeating(bars), repeating(bars))
    assert alike.num_singletons == 0
    assert not alike.is_complete()


@pytest.mark.slow
def test_spare_latents_are_excused_while_there_are_no_more_of_them_than_of_others() -> None:
    bars = linear_bars(300, 3, mean_active=2.0, noise=1.0, generator=generator())
    few, many = without(bars, 5), without(bars, 0, 1, 2, 3)
    assert assembly_of(not_showing(bars, 5), few, few).num_singletons == 0
    assert not assembly_of(not_showing(bars, 5), few, few).is_complete()
    assert assembly_of(not_showing(bars, 0, 1, 2, 3), many, many).num_singletons == 4


@pytest.mark.slow
def test_what_has_no_counterpart_replaces_what_is_needed_least() -> None:
    """Whatever the order is in which the starts have their latents."""
    bars = linear_bars(300, 3, mean_active=2.0, noise=1.0, generator=generator())
    lost = without(bars, 0, 2, 4)
    for seed in range(3):
        order = torch.randperm(6, generator=generator(seed))
        together = assembly_of(bars, repeating(bars), {name: value[..., order] for name, value in lost.items()})
        assert together.best.free_energy == pytest.approx(exact(whole(bars), bars.data), rel=1e-5)


@pytest.mark.slow
def test_what_two_starts_find_together_lets_a_third_one_help() -> None:
    """In a code of three bars no single latent of another start is of use: the code has to be replaced first."""
    bars = linear_bars(300, 3, mean_active=2.0, noise=1.0, generator=generator())
    coded = without(bars, 1)
    code = torch.tensor([[-0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0.5, 0.5, -0.5]])
    coded["weight"] = torch.cat([coded["weight"][:, :3], bars.components[:, 3:] @ code], 1)
    together = assembly_of(bars, coded, without(bars, 1), without(bars, 3))
    assert together.best.free_energy == pytest.approx(exact(whole(bars), bars.data), rel=1e-5)


@pytest.mark.slow
def test_nothing_is_complete_before_each_group_is() -> None:
    """What a single start has found is missed in each of two groups."""
    bars = linear_bars(100, 3, mean_active=2.0, noise=1.0, generator=generator())
    latents = recombination(bars.data)
    both = pool_of([latents, latents])
    for parameters in (whole(bars), without(bars, 5), without(bars, 5)):
        add(both, ended(latents, parameters))
    assert (both.num_singletons, both.is_complete()) == (2, False)
    add(both, ended(latents, whole(bars)))
    assert (both.num_singletons, both.is_complete()) == (0, True)


# --- components of a mixture ---


def clusters(y: Tensor) -> None:
    loc, share = pyro.param("loc", torch.zeros(4, 2)), pyro.param("share", torch.ones(4) / 4, constraint=dist.constraints.simplex)
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(share))
        pyro.sample("y", dist.Normal(Vindex(loc)[z], 1.0).to_event(1), obs=y)


CENTRES = 6 * torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


def in_clusters(number: int = 200) -> Tensor:
    return CENTRES[torch.arange(number) % 4] + torch.randn(number, 2, generator=generator())


def component_joint(loc: Tensor, y: Tensor) -> Tensor:
    """Log joints ``(N, 4)`` of components with the same share."""
    return dist.Normal(loc, 1.0).to_event(1).log_prob(y.unsqueeze(1)).double() - math.log(4)


def crossing_of_clusters(y: Tensor) -> Recombination:
    guide = AutoTruncated(clusters, num_states=4)
    guide.setup(y)
    return Recombination(Medians(guide, y), EvolutionarySearch(), Exchangeable((slice(0, 1),), [("loc", 0), ("share", 0)], 4), 0.01)


def test_mixtures_exchange_components() -> None:
    y = in_clusters()
    # The first has two clusters in one component, and a component twice; the second, in another order, has lost another one.
    one = CENTRES[[0, 1, 2, 2]]
    other = CENTRES[[3, 3, 1, 0]]
    crossing = crossing_of_clusters(y)
    first, second = (populated(crossing, {"loc": loc, "share": torch.zeros(4)}) for loc in (one, other))
    assert first.free_energy == pytest.approx(float(component_joint(one, y).logsumexp(-1).mean()), rel=1e-5)
    child = crossing.cross(first, second)
    assert child.free_energy == pytest.approx(float(component_joint(CENTRES, y).logsumexp(-1).mean()), rel=1e-5)
    exact_shares = [component_joint(loc, y).softmax(-1) for loc in (CENTRES, one)]
    correlation = torch.corrcoef(torch.cat(exact_shares, 1).mT)[:4, 4:]
    assert crossing.shared_mask(child, first).sum() == (correlation > 0.9).any(1).sum() > 0
    assert crossing.find_redundant(first).tolist() == [False, False, True, True]
    assert not crossing.find_redundant(child).any()


def in_one_state(y: Tensor) -> None:
    """The clusters of all data points are one state, as those of the nodes of a network."""
    loc = pyro.param("loc", CENTRES.clone())
    z = pyro.sample("z", dist.Categorical(torch.ones(4)).expand([len(y)]).to_event(1))
    pyro.sample("y", dist.Normal(Vindex(loc)[z], 1.0).to_event(2), obs=y)


def test_values_of_many_latents_in_one_state_are_matched_latent_by_latent() -> None:
    y = in_clusters(8)
    guide = AutoTruncated(in_one_state, num_states=16)
    guide.setup(y)
    values = Exchangeable((slice(0, 8),), [("loc", 0)], 4)
    group = Recombination(Medians(guide, y), ConditionalSearch(), values, 0.01)
    first, second = (populated(group, {"loc": loc}) for loc in (CENTRES, CENTRES[[2, 0, 3, 1]]))
    assert group.shared_mask(first, second).all()
    assert torch.equal(group._match(first, second)[1], torch.tensor([1, 3, 0, 2]))


def estimated(profile: Profile, member: Solution) -> Solution:
    """What EM makes of the locations of components that have the same share."""
    y, loc = profile.y, member.parameters["loc"]
    for _ in range(30):
        weight = component_joint(loc, y).softmax(-1).float()
        loc = (weight.mT @ y) / weight.sum(0).unsqueeze(-1)
    return Solution(FreeEnergyEstimate(0.0), {**member.parameters, "loc": loc}, member.population)


def test_a_component_that_all_starts_have_twice_goes_where_data_are_explained_worst() -> None:
    y = in_clusters()
    parameters = {"loc": torch.stack([CENTRES[0], CENTRES[1], CENTRES[2:].mean(0), CENTRES[0]]), "share": torch.zeros(4)}
    assembly = pool_of([crossing_of_clusters(y)], estimated, model=clusters, y=y, generator=generator())
    stuck = ended(assembly.groups[0], parameters)
    add(assembly, stuck)
    assert assembly.best.parameters is stuck.parameters
    # Nothing is tried before another start has failed to help.
    add(assembly, stuck)
    torch.testing.assert_close(torch.cdist(CENTRES, assembly.best.parameters["loc"]).amin(1), torch.zeros(4), rtol=0, atol=0.5)
    assert assembly.best.free_energy == pytest.approx(
        float(component_joint(assembly.best.parameters["loc"], y).logsumexp(-1).mean()), rel=1e-5
    )


def test_a_value_is_worth_what_the_best_states_lose_without_it() -> None:
    y, loc = in_clusters(40), CENTRES[[0, 1, 2, 2]]
    member = populated(crossing_of_clusters(y), {"loc": loc, "share": torch.zeros(4)})
    joint = component_joint(loc, y)
    expected = [(joint.amax(1) - joint[:, [k for k in range(4) if k != value]].amax(1)).sum() for value in range(4)]
    torch.testing.assert_close(value_deletion_losses(member.population, torch.tensor([0]), 4), torch.stack(expected), rtol=1e-4, atol=1e-3)
    # Two of four components are in these populations: what nothing else in them can replace is missed without end.
    narrow = Population(member.population.space, member.population.words[:, :2], member.population.log_joint[:, :2])
    has_value = (narrow.states()[..., :1] == torch.arange(4)).all(1).any(0)
    assert torch.equal(value_deletion_losses(narrow, torch.tensor([0]), 4).isinf(), has_value)


def above_an_offset(y: Tensor) -> None:
    weight, offset = pyro.param("weight", torch.zeros(9, 6)), pyro.param("offset", torch.zeros(9))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((6,), 0.2)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT + offset, 1.0).to_event(1), obs=y)


@pytest.mark.slow
def test_a_latent_that_is_on_where_its_cause_is_missing_is_turned() -> None:
    """Its weights are minus what they should be, and the offset shows the cause: all starts may end so, and agree."""
    bars = linear_bars(200, 3, mean_active=1.2, noise=1.0, generator=generator())
    right = {"weight": bars.components, "offset": torch.zeros(9)}
    turned = {"weight": bars.components.clone(), "offset": bars.components[:, 2].clone()}
    turned["weight"][:, 2] *= -1
    profile = profile_model(
        above_an_offset, bars.data, EvolutionarySearch(), num_states=16, config=LearnConfig(tolerance=0.05, restart_steps=40)
    )
    (group,) = build_recombinations(profile, {"weight": torch.randn(9, 6), "offset": torch.randn(9)})
    pool = SolutionPool(profile)
    add(pool, populated(group, turned))
    pool.exchange([group])
    best = pool.best
    # Its states were fitted one for each data point: none of them counts twice.
    states = torch.tensor(list(itertools.product((0.0, 1.0), repeat=6)))
    means = states @ best.parameters["weight"].mT + best.parameters["offset"]
    joint = dist.Normal(means, 1.0).log_prob(bars.data.unsqueeze(1)).sum(-1) + dist.Bernoulli(0.2).log_prob(states).sum(-1)
    assert best.free_energy <= float(joint.logsumexp(1).mean()) + 1e-4
    # Of six latents with a probability of 0.2 one that is turned is on in 0.8 of the data points.
    assert populated(group, turned).free_energy < populated(group, right).free_energy - 0.5
    assert best.free_energy > populated(group, right).free_energy
    assert matched_bars(best.parameters["weight"], bars.components) == 6
    torch.testing.assert_close(best.parameters["offset"], torch.zeros(9), rtol=0, atol=1.0)


def mostly_on(y: Tensor) -> None:
    weight = pyro.param("weight", torch.zeros(9, 6))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((6,), 0.75)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, 1.0).to_event(1), obs=y)


def test_latents_on_the_other_side_of_a_half_than_their_prior_are_found_the_largest_gain_first() -> None:
    torch.manual_seed(0)
    weight, states = 3 * torch.randn(9, 6), torch.bernoulli(torch.tensor([0.2, 0.9, 0.7, 0.3, 0.95, 0.6]).expand(100, 6))
    profile = profile_model(mostly_on, states @ weight.mT, EvolutionarySearch(), num_states=16)
    space = profile.space
    population = Population(space, space.pack(states.unsqueeze(1)), torch.zeros(100, 1))
    # The prior says 0.75: what is rarely on stands for the opposite.
    assert Complement(profile).find_unlikely(Solution(FreeEnergyEstimate(0.0), {"weight": weight}, population)) == [
        latent for latent in states.mean(0).argsort().tolist() if states.mean(0)[latent] < 0.5
    ]


@pytest.mark.slow
def test_latents_that_are_often_on_are_not_taken_for_their_opposites() -> None:
    """The optimum has the entropy of the prior: with an opposite latent it is 0.3 nats lower, and two restarts agreed on that."""

    def often_on(y: Tensor) -> None:
        weight, offset = pyro.param("weight", lambda: torch.randn(8, 25)), pyro.param("offset", lambda: torch.zeros(25))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((8,), 0.7)).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight + offset, 1.0).to_event(1), obs=y)

    pyro.set_rng_seed(7103)
    states, weight = (torch.rand(500, 8) < 0.7).float(), torch.randn(8, 25)
    y = states @ weight + 2 * torch.randn(25) + torch.randn(500, 25)
    guide = learn(often_on, y, progress=False)
    cosines = torch.nn.functional.cosine_similarity(pyro.param("weight").detach().unsqueeze(1), weight, dim=-1)
    assert float(cosines.amax(0).min()) > 0.9
    assert abs(float(guide.marginals()["s"].mean()) - 0.7) < 0.05


# --- in learn ---


def six_bars(y: Tensor) -> None:
    weight = pyro.param("weight", lambda: y[:6].mT.clone())
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((6,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, 2.0).to_event(1), obs=y)


@pytest.mark.nightly
def test_a_function_of_ones_own_reaches_its_optimum_twice_and_does_not_warn() -> None:
    bars = linear_bars(100, 3, mean_active=2.0, generator=generator(4))
    pyro.set_rng_seed(4)
    with warnings.catch_warnings(action="error", category=DisagreeingStartsWarning):
        guide = learn(six_bars, bars.data, num_states=16, config=LearnConfig(restart_steps=40), steps=5, progress=False)
    assert len(guide.starts) < 8
    assert matched_bars(pyro.param("weight").detach(), bars.components) == 6


@pytest.mark.slow
def test_latents_that_one_start_has_found_alone_are_told() -> None:
    bars = linear_bars(60, 3, mean_active=2.0, generator=generator(4))
    pyro.set_rng_seed(4)
    with pytest.warns(
        DisagreeingStartsWarning, match=r"latents of the best of 2 restarts were found by at most one of them: the best may be"
    ):
        guide = learn(six_bars, bars.data, num_states=16, restarts=2, config=LearnConfig(restart_steps=10), steps=2, progress=False)
    assert len(guide.starts) == 2


def two_sources(y: Tensor) -> None:
    """Counts of two sources, drawn from six that have one table of rates."""
    rate = pyro.param("rate", torch.full((6, 5), 5.0), constraint=dist.constraints.positive)
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.ones(6)).expand([2]).to_event(1))
        pyro.sample("y", dist.Poisson(Vindex(rate)[z].sum(-2)).to_event(1), obs=y)


@pytest.mark.slow
def test_values_of_several_latents_with_one_table_are_found_together() -> None:
    """Restarts that exchange nothing are eight at least."""
    pyro.set_rng_seed(2)
    rate = dist.Gamma(0.5, 0.06).sample((6, 5)).clamp(min=0.2)
    y = torch.poisson(rate[torch.randint(6, (600, 2))].sum(1))
    guide = learn(two_sources, y, progress=False)
    assert guide.learn_report.reason == "each latent of the best was found by two restarts"
    reached, pyro.get_param_store()["rate"] = -Truncated_ELBO().loss(two_sources, guide, y), rate
    assert reached > -Truncated_ELBO().loss(two_sources, guide, y)
