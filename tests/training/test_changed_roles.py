"""Latents that have changed places: values for causes, and one categorical latent for another."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.ops.indexing import Vindex
from torch import Tensor

from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.training.agreement import Reached
from pyro_truncated.training.assembly import Assembly
from pyro_truncated.training.changed_roles import changed_roles
from pyro_truncated.training.exchangeable import Exchangeable
from pyro_truncated.training.exchanges import fitted, recombinations_of, settled
from pyro_truncated.training.model_runs import Settings
from pyro_truncated.training.starts import Start

NUM_DATA, SIZE = 300, 12
VALUES, CAUSES = Exchangeable(slice(0, 1), {}, 3), Exchangeable(slice(1, 5), {})


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def states() -> tuple[Tensor, Tensor]:
    """Types of three values, and four causes."""
    z = torch.randint(3, (NUM_DATA,), generator=generator())
    return z, torch.bernoulli(torch.full((NUM_DATA, 4), 0.3), generator=generator(1)).long()


def the_wrong_way_round(z: Tensor, s: Tensor) -> Tensor:
    """The first two latents tell the types apart, and the last two causes, as far as no two of them are on, are values."""
    value = torch.where(s[:, 2] > 0, 1, torch.where(s[:, 3] > 0, 2, 0))
    return torch.stack([value, (z == 1).long(), (z == 2).long(), s[:, 0], s[:, 1]], 1)


def population(space: StateSpace, levels: Tensor) -> Population:
    return Population(space, space.pack(levels.unsqueeze(1)), torch.zeros(len(levels), 1))


def test_latents_that_exclude_each_other_become_values_and_values_latents() -> None:
    space, (z, s) = StateSpace([3, 2, 2, 2, 2]), states()
    before = the_wrong_way_round(z, s)
    first, *_ = changed_roles(VALUES, CAUSES, population(space, before))
    after = first.states()[:, 0]
    assert after[:, 0].tolist() == z.tolist()
    # The values that have gone are latents in the places of those that came.
    assert after[:, 1:3].tolist() == torch.stack([before[:, 0] == 1, before[:, 0] == 2], 1).long().tolist()
    assert after[:, 3:].tolist() == before[:, 3:].tolist()


def test_nothing_changes_where_latents_do_not_exclude_each_other() -> None:
    z, s = states()
    assert changed_roles(VALUES, CAUSES, population(StateSpace([3, 2, 2, 2, 2]), torch.cat([z.unsqueeze(1), s], 1))) == []
    assert changed_roles(CAUSES, VALUES, population(StateSpace([3, 2, 2, 2, 2]), the_wrong_way_round(z, s))) == []
    wide = population(StateSpace([3, 3, 3, 3, 3]), the_wrong_way_round(z, s))
    assert changed_roles(VALUES, CAUSES, wide) == []
    # Of two values none is left for a latent to exclude.
    two = torch.cat([z.clamp(max=1).unsqueeze(1), s], 1)
    assert changed_roles(Exchangeable(slice(0, 1), {}, 2), CAUSES, population(StateSpace([2, 2, 2, 2, 2]), two)) == []


def test_many_values_beside_many_latents_are_looked_at_in_no_time() -> None:
    # 2^29 sets of values: looking at all of them would take hours.
    levels = torch.cat([torch.arange(NUM_DATA).remainder(30).unsqueeze(1), states()[1].repeat(1, 6)], 1)
    many = population(StateSpace([30, *[2] * 24]), levels)
    assert changed_roles(Exchangeable(slice(0, 1), {}, 30), Exchangeable(slice(1, 25), {}), many) == []


def test_the_most_frequent_values_of_the_larger_of_two_latents_go_to_the_smaller_one() -> None:
    larger, smaller = Exchangeable(slice(0, 1), {}, 5), Exchangeable(slice(1, 2), {}, 3)
    levels = torch.tensor([[4, 2], [4, 1], [4, 0], [0, 2], [0, 1], [2, 0], [2, 2], [1, 1]])
    crossed = population(StateSpace([5, 3]), levels)
    (changed,) = changed_roles(larger, smaller, crossed)
    after = changed.states()[:, 0]
    # 4, 0 and 2 are the most frequent; the others are values that the smaller one cannot have.
    assert after[:7].tolist() == [[2, 0], [1, 0], [0, 0], [2, 1], [1, 1], [0, 2], [2, 2]]
    assert after[7, 0] in (3, 4)
    assert changed_roles(smaller, larger, crossed) == []
    assert changed_roles(smaller, smaller, crossed) == []


def types(y: Tensor) -> None:
    loc, weight = pyro.param("loc", torch.zeros(3, SIZE)), pyro.param("weight", torch.zeros(SIZE, 4))
    noise = pyro.param("noise", torch.tensor(1.0), constraint=dist.constraints.positive)
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.ones(3) / 3))
        s = pyro.sample("s", dist.Bernoulli(torch.full((4,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(Vindex(loc)[z] + s @ weight.mT, noise).to_event(1), obs=y)


@pytest.mark.slow
def test_a_model_learned_the_wrong_way_round_is_turned_round() -> None:
    """Its free energy comes up to that of the parameters of the data."""
    pyro.set_rng_seed(0)
    z, s = states()
    loc, weight = 3 * torch.randn(3, SIZE, generator=generator(2)), 3 * torch.randn(SIZE, 4, generator=generator(3))
    y = loc[z] + s.float() @ weight.mT + torch.randn(NUM_DATA, SIZE, generator=generator(4))
    types(y)
    settings = Settings(None, 32)
    truth: dict[str, Any] = {"loc": loc, "weight": weight, "noise": torch.zeros(())}
    wrong = {
        "loc": torch.stack([loc[0], loc[0] + weight[:, 2], loc[0] + weight[:, 3]]),
        "weight": torch.stack([loc[1] - loc[0], loc[2] - loc[0], weight[:, 0], weight[:, 1]], 1),
        "noise": torch.tensor(0.5),
    }

    def best_of(parameters: dict[str, Tensor]) -> float:
        groups = recombinations_of(types, y, settings, 0.05, truth)
        assembly = Assembly(groups, partial(settled, types, y, settings, steps=30), partial(fitted, types, y, settings, steps=60))
        assembly.join(Start(Reached(0.0), parameters, None))
        return assembly.best.reached.free_energy

    member = recombinations_of(types, y, settings, 0.05, truth)[0].member(wrong)
    best = best_of(truth)
    assert member.free_energy < best - 1.0
    assert best_of(wrong) > best - 0.05
