"""Chains and grids with broad posteriors: populations come close to the best ones of their size, and more states are never worse."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, Population, StateSpace, Truncated_ELBO
from pyro_truncated.search import Search, SearchBatch
from pyro_truncated.states.population import initial_population


def best_paths(unary: Tensor, pair: Tensor, size: int) -> Tensor:
    """Log joints ``(N, size)`` of the best paths by list Viterbi, of scores ``(N, T, K)`` of values and ``(K, K)`` of steps."""
    lists = unary[:, 0].unsqueeze(-1)
    for now in unary[:, 1:].unbind(1):
        # By next value: all previous values and their lists.
        longer = (lists.unsqueeze(1) + pair.T[None, :, :, None]).flatten(2)
        lists = longer.topk(min(size, longer.shape[-1]), -1).values + now.unsqueeze(-1)
    return lists.flatten(1).topk(size, -1).values


class Grid:
    """Potts model of ``rows`` x ``columns`` latents of ``num_values`` values with noisy observations; one row makes a chain.

    Neighbours along a row are coupled by ``along``, ``(K, K)``, those in a column by ``down`` (a row is next to the one below).
    """

    def __init__(self, rows: int, along: Tensor, down: Tensor, unary: Tensor) -> None:
        self.rows, self.along, self.down, self.unary = rows, along, down, unary
        self.space = StateSpace([unary.shape[-1]] * unary.shape[1])

    def score(self, words: Tensor) -> Tensor:
        values = self.space.unpack(words, torch.int64)
        alone = self.unary.unsqueeze(1).expand(-1, values.shape[1], -1, -1).gather(3, values.unsqueeze(-1)).sum((-1, -2))
        grid = values.unflatten(-1, (self.rows, -1))
        return (
            alone + self.along[grid[..., :-1], grid[..., 1:]].sum((-1, -2)) + self.down[grid[..., :-1, :], grid[..., 1:, :]].sum((-1, -2))
        )

    def best(self, size: int) -> Tensor:
        """Free energies of the best populations: a grid is a chain of columns."""
        values = torch.cartesian_prod(*[torch.arange(self.unary.shape[-1])] * self.rows).view(-1, self.rows)
        columns = self.unary.unflatten(1, (self.rows, -1))
        unary = sum(columns[:, row][..., values[:, row]] for row in range(self.rows)) + self.down[values[:, :-1], values[:, 1:]].sum(-1)
        return best_paths(unary, self.along[values[:, None], values[None]].sum(-1), size).logsumexp(-1)

    def gap(self, search: Search, size: int, steps: int = 60) -> tuple[Tensor, Tensor]:
        """Nats ``(N,)`` that are missing to the best populations of a size, and the free energies found."""
        words = initial_population(self.space, len(self.unary), size)
        population = Population(self.space, words, self.score(words))
        population = search.improve(SearchBatch(population, self.score), steps)
        population.assert_distinct()
        return self.best(size) - population.free_energy(), population.free_energy()


def chain(num_values: int, transition: Tensor, num_data: int = 6, length: int = 20) -> Grid:
    """A hidden Markov chain whose observations have a standard deviation of one step between values."""
    path = [torch.randint(num_values, (num_data,))]
    for _ in range(length - 1):
        path.append(transition[path[-1]].multinomial(1).squeeze(-1))
    y = torch.stack(path, 1) + torch.randn(num_data, length, dtype=torch.float64)
    unary = -0.5 * (y.unsqueeze(-1) - torch.arange(num_values)) ** 2
    return Grid(1, transition.log(), torch.zeros(num_values, num_values, dtype=torch.float64), unary)


def sticky(num_values: int, stay: float) -> Tensor:
    return torch.full((num_values, num_values), (1 - stay) / (num_values - 1), dtype=torch.float64).fill_diagonal_(stay)


def any_transition(num_values: int) -> Tensor:
    return 0.9 * dist.Dirichlet(torch.full((num_values, num_values), 0.5, dtype=torch.float64)).sample() + 0.1 / num_values


def potts(num_values: int, coupling: float, num_data: int = 6) -> Grid:
    pair = coupling * torch.eye(num_values, dtype=torch.float64)
    y = torch.randint(num_values, (num_data, 20)) + torch.randn(num_data, 20, dtype=torch.float64)
    return Grid(4, pair, pair, -0.5 * (y.unsqueeze(-1) - torch.arange(num_values)) ** 2)


PROBLEMS = {
    "chain, 2 values, sticky": lambda: chain(2, sticky(2, 0.95)),
    "chain, 4 values, loose": lambda: chain(4, sticky(4, 0.5)),
    "chain, 4 values, sticky": lambda: chain(4, sticky(4, 0.95)),
    "chain, 4 values, any transitions": lambda: chain(4, any_transition(4)),
    "chain, 5 values": lambda: chain(5, sticky(5, 0.8)),
    "grid, 2 values, strong": lambda: potts(2, 1.0),
    "grid, 3 values, weak": lambda: potts(3, 0.4),
}


@pytest.mark.nightly(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_populations_of_every_size_are_close_to_the_best(name: str) -> None:
    # The seed is fixed. Of 126 cases with six other seeds one missed the limit (five values, 16 states: 0.13), none the order of sizes.
    torch.manual_seed(0)
    problem = PROBLEMS[name]()
    before = torch.full((6,), -math.inf, dtype=torch.float64)
    for size in (16, 64, 300):
        gap, free_energy = problem.gap(EvolutionarySearch(), size)
        assert (gap > -1e-9).all()
        assert gap.mean() < 0.1
        assert (free_energy > before).all()
        before = free_energy


def test_list_viterbi_is_right() -> None:
    torch.manual_seed(0)
    problem = potts(2, 0.7, num_data=2)
    problem = Grid(2, problem.along, problem.down, problem.unary[:, :8])
    everything = problem.score(problem.space.enumerate().expand(2, -1, -1))
    torch.testing.assert_close(problem.best(20), everything.topk(20).values.logsumexp(-1))


@pytest.mark.nightly
def test_a_hidden_markov_model_with_default_steps() -> None:
    torch.manual_seed(1)
    problem = chain(4, sticky(4, 0.8), num_data=3)
    transition = problem.along.exp()

    def model() -> None:
        with pyro.plate("data", 3):
            state = None
            for t in range(20):
                probs = torch.full((4,), 0.25, dtype=torch.float64) if state is None else transition[state]
                state = pyro.sample(f"z_{t}", dist.Categorical(probs))
                pyro.factor(f"y_{t}", torch.gather(problem.unary[:, t].expand(*state.shape, 4), -1, state.unsqueeze(-1)).squeeze(-1))

    for size in (64, 200):
        guide, elbo = AutoTruncated(model, num_states=size, whole_states=True), Truncated_ELBO()
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.0}), elbo)
        for _ in range(60):
            loss = svi.step()
        best = problem.best(size) - math.log(4)
        assert -loss <= best.sum() + 1e-9
        assert best.sum() + loss < 0.1 * 3
        assert "ConditionalSearch" in repr(elbo)
