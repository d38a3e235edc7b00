"""What is drawn for a data point depends on the seed and on its position among all data, and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.states import StateSpace

SPACES = {
    "binary": [2] * 20,
    "one word": [2] * 64,
    "many words": [2] * 150,
    "categorical": [3, 5, 4, 7],
    "mixed": [2, 3, 1, 2, 17] * 8,
}
NUM_DATA, NUM_STATES = 40, 9


@pytest.fixture(params=SPACES)
def space(request: pytest.FixtureRequest) -> StateSpace:
    return StateSpace(SPACES[request.param])


def probabilities(space: StateSpace) -> Tensor:
    """Of all values of all latents, of every data point."""
    cardinality = space.cardinality.unsqueeze(-1)
    weights = torch.rand(NUM_DATA, space.num_latents, space.fields.num_values) * (torch.arange(space.fields.num_values) < cardinality)
    return weights / weights.sum(-1, keepdim=True)


def fitness() -> Tensor:
    """Log joints with impossible and unfit states, and data points without any other."""
    log_joint = torch.randn(NUM_DATA, 30) * 5 - 40
    log_joint[::3, ::2], log_joint[5], log_joint[7] = -torch.inf, -torch.inf, 0.0
    return log_joint


def operators(space: StateSpace) -> dict[str, Callable[..., Tensor]]:
    """Every operator that draws, as a function of some rows of the data and what it draws with."""
    words, table, log_joint, fields = space.random((NUM_DATA, NUM_STATES), 0.2), probabilities(space), fitness(), space.fields

    def initial(number: int) -> Callable[..., Tensor]:
        return lambda part, **draws: ops.initial_states(fields, len(part), number, **draws)

    def sparse(target: float, flips: float) -> Callable[..., Tensor]:
        return lambda part, **draws: ops.flip_sparse(words[part], fields, target, flips, **draws)

    return {
        "select_parents": lambda part, **draws: ops.select_parents(log_joint[part], 20, **draws),
        "select_parents uniformly": lambda part, **draws: ops.select_parents(log_joint[part], 20, by_fitness=False, **draws),
        "cross": lambda part, **draws: ops.cross(words[part], fields, **draws),
        "flip_random": lambda part, **draws: ops.flip_random(words[part], fields, **draws),
        "flip_sparse": sparse(3.0, 1 / len(space.mutable)),
        "flip_sparse often": sparse(0.5, 0.4),
        "flip_sparse always": sparse(8.0, 1.0),
        "draw_values": lambda part, **draws: ops.draw_values(table[part], 7, fields, **draws),
        "initial_states": initial(8),
        "more initial_states": initial(min(200, space.size)),
        "uniform": lambda part, **draws: ops.uniform(draws.pop("rows"), (4, 5), **draws),
        "uniform_integers": lambda part, **draws: ops.uniform_integers(draws.pop("rows"), 7, (3,), **draws),
    }


def draws(rows: Tensor, seed: int = 3) -> dict[str, Any]:
    return {"rows": rows, "generator": ops.Stream(seed)}


@pytest.mark.slow
def test_both_kinds_of_kernels_draw_the_same(space: StateSpace) -> None:
    rows = torch.arange(NUM_DATA)
    for name, operator in operators(space).items():
        found = []
        for kind in ("compiled", "vectorised"):
            with ops.use_backend(kind):
                found.append(operator(rows, **draws(1000 * rows)))
        assert torch.equal(*found), name
        assert not torch.equal(found[0], operator(rows, **draws(1000 * rows, seed=4))), name


@pytest.mark.usefixtures("kind")
def test_a_part_of_the_data_draws_what_all_data_draw(space: StateSpace) -> None:
    part = torch.randperm(NUM_DATA)[:13]
    for name, operator in operators(space).items():
        everything = operator(torch.arange(NUM_DATA), **draws(torch.arange(NUM_DATA)))
        assert torch.equal(operator(part, **draws(part)), everything[part]), name
        with ops.memory_budget(2**12):
            assert torch.equal(operator(torch.arange(NUM_DATA), **draws(torch.arange(NUM_DATA))), everything), name


@pytest.mark.usefixtures("kind")
def test_rows_are_checked() -> None:
    space = StateSpace([2] * 5)
    for rows in (torch.arange(3), torch.arange(4.0)):
        with pytest.raises(ValueError, match="rows must be the positions of 4 data points, int64 of shape"):
            ops.flip_random(space.random((4, 2), 0.5), space.fields, rows=rows)


@pytest.mark.usefixtures("kind")
def test_uniform_numbers_are_uniform_and_independent() -> None:
    numbers = ops.uniform(torch.arange(40000), (5,), generator=ops.Stream(1))
    # Twenty bins of each column at 4.9 standard errors: exceeded with probability 1e-4 over all seeds.
    for column in numbers.unbind(1):
        hits = torch.histc(column, 20, 0.0, 1.0)
        assert ((hits - 2000).abs() < 4.9 * (40000 * 0.05 * 0.95) ** 0.5).all()
    shifted = torch.cat([numbers, numbers.roll(1, 0)], 1)
    assert (torch.corrcoef(shifted.T) - torch.eye(10)).abs().max() < 4.9 / 200


def test_streams_count_up_and_begin_again() -> None:
    stream = ops.Stream(7)
    seeds = [ops.draw_seed(stream) for _ in range(100)]
    assert len(set(seeds)) == 100
    assert [ops.draw_seed(stream.again()) for _ in range(2)] == [seeds[0]] * 2
    generator = torch.Generator().manual_seed(5)
    own = [ops.draw_seed(stream.branch(generator)) for _ in range(3)]
    before = generator.get_state()
    again = stream.again()
    assert [ops.draw_seed(again.branch(generator)) for _ in range(3)] == own
    assert torch.equal(before, generator.get_state())
    assert not set(own) & set(seeds)


@pytest.mark.parametrize("counts", [[4, 6, 24, 3], [4, 1, 0, 3], [5]])
def test_words_drawn_ahead_are_those_drawn_one_call_after_the_other(counts: list[int]) -> None:
    space, rows = StateSpace([2] * 20), torch.arange(NUM_DATA)
    words, log_joint = space.random((NUM_DATA, NUM_STATES), 0.2), torch.randn(NUM_DATA, NUM_STATES)

    def drawn(ahead: list[int]) -> list[Tensor]:
        keys: dict[str, Any] = {"rows": rows, "generator": ops.Stream(5)}
        ops.draw_ahead(ahead, **keys)
        parents = ops.gather_states(words, ops.select_parents(log_joint, 4, **keys))
        children = ops.cross(parents, space.fields, **keys)
        return [parents, children, ops.flip_random(children, space.fields, **keys), ops.uniform(shape=(3,), **keys)]

    compiled = drawn(counts)
    with ops.use_backend("vectorised"):
        for one, other, third in zip(drawn([]), drawn(counts), compiled, strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one, third)
