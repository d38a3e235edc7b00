"""Preselection and its affinities: against brute force over selections, and exact where everything is selected."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, Population, Preselection, StateSpace, Truncated_ELBO, ops
from pyro_truncated.models import BinarySparseCoding
from pyro_truncated.ops.packed_states import combine
from pyro_truncated.search import Cosine, Projection, SearchBatch, Singletons
from pyro_truncated.states.population import initial_population

SPACES = {"binary": StateSpace([2] * 8), "words": StateSpace([2] * 70), "mixed": StateSpace([2, 3, 2, 1, 5, 2]), "mixture": StateSpace([6])}


@pytest.fixture(params=["compiled", "vectorised"], autouse=True)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs on both implementations of the packed operations."""
    with ops.use_backend(request.param):
        yield request.param


class Toy:
    """Log joints that add up over latents, different for each data point."""

    def __init__(self, space: StateSpace, num_data: int = 20) -> None:
        self.space = space
        self.field = 2 * torch.randn(num_data, space.num_latents, max(space.cardinalities), dtype=torch.float64)

    def batch(self, num_states: int = 4, rows: slice = slice(None)) -> SearchBatch:
        def score(words: Tensor) -> Tensor:
            values = self.space.unpack(words, torch.int64)
            field = self.field[rows].unsqueeze(1).expand(-1, values.shape[1], -1, -1)
            return field.gather(3, values.unsqueeze(-1)).squeeze(-1).sum(-1)

        words = initial_population(self.space, len(self.field), num_states, torch.Generator().manual_seed(0))[rows]
        return SearchBatch(Population(self.space, words, score(words)), score, {"row": torch.arange(len(self.field))[rows]})


def options(space: StateSpace) -> list[tuple[int, int]]:
    """The documented columns of an affinity, as pairs of latent and value."""
    first = 0 if space.num_latents == 1 else 1
    return [(latent, value) for latent, cardinality in enumerate(space.cardinalities) for value in range(first, cardinality)]


def random_affinity(space: StateSpace, num_data: int = 20) -> Callable[[SearchBatch], Tensor]:
    scores = torch.randn(num_data, len(options(space)))
    return lambda batch: scores[batch.observations["row"]]


@pytest.mark.parametrize("num_words", [1, 3])
@pytest.mark.parametrize("max_active", [None, 1, 3, 9])
def test_combinations(num_words: int, max_active: int | None) -> None:
    space = StateSpace([2] * 64 * num_words)
    latents = torch.rand(3, space.num_latents).topk(5, 1).indices
    states = combine(space.pack(torch.nn.functional.one_hot(latents, space.num_latents)), max_active)
    for n in range(3):
        found = {tuple(row.nonzero().flatten().tolist()) for row in space.unpack(states[n])}
        sizes = range(min(5, max_active or 5) + 1)
        expected = {tuple(sorted(s)) for k in sizes for s in itertools.combinations(latents[n].tolist(), k)}
        assert found == expected
        assert states.shape[1] == len(expected)


def test_too_many_combinations() -> None:
    with pytest.raises(ValueError, match="30 selected latents with up to 30 of them active make 1073741824 states"):
        combine(torch.zeros(1, 30, 1, dtype=torch.long))


@pytest.mark.parametrize("name", SPACES)
def test_selection_and_proposals_without_chance(name: str) -> None:
    space, number = SPACES[name], 3
    toy, affinity = Toy(space), random_affinity(space)
    search = Preselection(affinity, number, explore=0.0, max_active=2)
    batch = toy.batch()
    scores, columns = affinity(batch), options(space)
    selected, proposals = search.select(batch), search.propose(batch).states(torch.int64)
    for n, row in enumerate(scores.tolist()):
        order = sorted(range(len(row)), key=lambda i: -row[i])
        best: list[tuple[int, int]] = []
        for i in order:
            if space.num_latents == 1 or columns[i][0] not in [latent for latent, _ in best]:
                best.append(columns[i])
        best = best[:number]
        assert selected[n].tolist() == [pair[space.num_latents == 1] for pair in best]
        found = {tuple(state) for state in proposals[n].tolist()}
        assert len(found) == proposals.shape[1]
        if space.num_latents == 1:
            assert found == {(value,) for _, value in best}
            continue
        expected = set()
        for subset in itertools.chain(*(itertools.combinations(best, k) for k in range(3))):
            chosen = dict(subset)
            expected.add(tuple(chosen.get(latent, 0) for latent in range(space.num_latents)))
        assert found == expected


@pytest.mark.parametrize("name", SPACES)
def test_scores_of_minus_infinity_rank_last(name: str) -> None:
    space = SPACES[name]
    columns = options(space)
    possible = [i for i, (latent, value) in enumerate(columns) if latent == 0 and value == 1]
    scores = torch.full((20, len(columns)), -math.inf)
    scores[:, possible] = 0.0
    available = space.size if space.num_latents == 1 else len(space.mutable)
    search = Preselection(lambda batch: scores, min(5, available), explore=0.2, max_active=1)
    for _ in range(5):
        search.propose(Toy(space).batch()).assert_distinct()
        assert (search.select(Toy(space).batch())[:, 0] == columns[possible[0]][space.num_latents == 1]).all()


class TestExploration:
    @pytest.mark.parametrize(("explore", "fewest"), [(0.1, 0), (0.3, 1), (0.4, 2), (1.0, 5)])
    def test_number_of_random_places(self, explore: float, fewest: int) -> None:
        space, num_data, number = StateSpace([2] * 12), 40000, 5
        words = torch.zeros(num_data, 1, space.num_words, dtype=torch.long)
        batch = SearchBatch(Population(space, words, torch.zeros(num_data, 1)), lambda w: torch.zeros(w.shape[:2]))
        scores = torch.arange(12.0).flip(0).expand(num_data, -1)
        selected = Preselection(lambda batch: scores, number, explore=explore).select(batch)
        assert selected.sort(1).values.diff(dim=1).min() > 0
        # Of r random places, the first goes to latent number - r, the best one left, in one of 12 - (number - r) cases.
        kept = (selected == torch.arange(number)).long().cumprod(1).sum(1)
        assert int(kept.min()) == number - fewest - (explore * number > fewest)
        share = explore * number - fewest
        expected = {fewest: 1 - share, fewest + 1: share}
        mean = sum(chance * (number - r) for r, chance in expected.items())
        for r, chance in expected.items():
            # Places that chance gives back to the latent which would have had it anyway, in a row.
            for again in range(r):
                mean += chance * math.prod(1 / (12 - (number - r) - i) for i in range(again + 1))
        # Five standard deviations of a number between 0 and 5: a false alarm in 1e-6.
        assert abs(float(kept.double().mean()) - mean) < 5 * float(kept.double().std().clamp(min=0.01)) / num_data**0.5

    def test_data_points_have_chances_of_their_own(self) -> None:
        space = StateSpace([2] * 12)
        batch = Toy(space).batch()
        scores = torch.arange(12.0).flip(0).expand(20, -1)
        search = Preselection(lambda batch: scores, 5, explore=0.1)
        differing = 0
        for _ in range(50):
            changed = (search.select(batch)[:, 4] != 4).sum()
            differing += int(0 < changed < 20)
        # Each of twenty changes with probability 7/16: all alike in less than 1 of 9e4 calls, so twice in fifty in 2e-7.
        assert differing >= 49

    @pytest.mark.parametrize("name", ["binary", "mixed", "mixture"])
    def test_all_others_are_equally_likely(self, name: str) -> None:
        space, num_data = SPACES[name], 40000
        columns = options(space)
        scores = torch.arange(float(len(columns))).flip(0).expand(num_data, -1)
        words = torch.zeros(num_data, 1, space.num_words, dtype=torch.long)
        batch = SearchBatch(Population(space, words, torch.zeros(num_data, 1)), lambda w: torch.zeros(w.shape[:2]))
        proposals = Preselection(lambda batch: scores, 4, explore=0.5, max_active=1).propose(batch)
        counts = proposals.value_probabilities() * proposals.num_states
        frequency = torch.stack([counts[:, latent, value] for latent, value in columns], 1).mean(0)
        top = 2
        top_latents = {columns[i][0] for i in range(top)} if name != "mixture" else set()
        rest = [i for i in range(top, len(columns)) if columns[i][0] not in top_latents]
        if name == "mixed":
            # Options (0, 1), (1, 1) lead; of the others, an option is drawn first in one of six cases, and it excludes its latent's others.
            sizes = [sum(columns[j][0] == columns[i][0] for j in rest) for i in rest]
            first = 1 / len(rest)
            expected = [
                first + sum(first / (len(rest) - sizes[j]) for j in range(len(rest)) if columns[rest[j]][0] != columns[i][0]) for i in rest
            ]
        else:
            expected = [2 / len(rest)] * len(rest)
        assert frequency[:top].tolist() == pytest.approx([1.0] * top, abs=1e-5)
        # At most seven frequencies at five standard deviations of at most 0.5 / sqrt(N): a false alarm in 4e-6.
        assert (frequency[rest] - torch.tensor(expected)).abs().max() < 5 * 0.5 / num_data**0.5

    def test_without_and_with_nothing_but_chance(self) -> None:
        space = StateSpace([2] * 10)
        toy, affinity = Toy(space), random_affinity(space)
        calm, wild = Preselection(affinity, 4, explore=0.0), Preselection(affinity, 4, explore=1.0)
        assert torch.equal(calm.select(toy.batch()), calm.select(toy.batch()))
        assert not torch.equal(wild.select(toy.batch()), wild.select(toy.batch()))


@pytest.mark.parametrize("name", SPACES)
def test_merging_never_lowers_the_free_energy(name: str) -> None:
    space = SPACES[name]
    search, batch = Preselection(random_affinity(space), 3, explore=0.5), Toy(space).batch()
    for _ in range(8):
        improved = search.step(batch)
        assert (improved.free_energy() >= batch.population.free_energy()).all()
        improved.assert_distinct()
        assert torch.equal(improved.log_joint, batch.score(improved.words))
        batch = dataclasses.replace(batch, population=improved)


@pytest.mark.parametrize("name", SPACES)
def test_expectation_truncation_forgets_the_population(name: str) -> None:
    space = SPACES[name]
    search, batch = Preselection(random_affinity(space), 4, explore=0.0, merge=False), Toy(space).batch()
    truncated = search.step(batch)
    truncated.assert_distinct()
    torch.testing.assert_close(truncated.log_joint.sort(1).values, search.propose(batch).log_joint.sort(1).values[:, -4:])
    assert torch.equal(truncated.log_joint, batch.score(truncated.words))


def test_expectation_truncation_needs_enough_proposals() -> None:
    toy = Toy(StateSpace([2] * 8))
    with pytest.raises(ValueError, match="merge=False fills populations of 10 states from 8 proposals; select more latents"):
        Preselection(Singletons(), 3, merge=False).step(toy.batch(10))


def test_selecting_everything_is_exact() -> None:
    for space in (StateSpace([2] * 6), StateSpace([7])):
        toy = Toy(space)
        number = 6 if space.is_binary else 7
        for merge in (True, False):
            population = Preselection(random_affinity(space), number, merge=merge).step(toy.batch(space.size))
            torch.testing.assert_close(population.free_energy(), toy.field.logsumexp(-1).sum(-1))
            torch.testing.assert_close(population.value_probabilities(), toy.field.softmax(-1))


def test_the_largest_marginals_keep_the_most_mass() -> None:
    space, number = StateSpace([2] * 7), 3
    toy = Toy(space)
    marginals = toy.field.softmax(-1)[..., 1]
    kept = Preselection(lambda batch: marginals, number, explore=0.0).propose(toy.batch())
    mass = (kept.log_joint.logsumexp(1) - toy.field.logsumexp(-1).sum(-1)).exp()
    # The product over unselected latents, and not less than any other selection keeps.
    every = torch.tensor(list(itertools.combinations(range(7), number)))
    selected = torch.nn.functional.one_hot(every, 7).sum(1).bool()
    masses = torch.where(selected, 1.0, 1 - marginals.unsqueeze(1)).prod(-1)
    torch.testing.assert_close(mass, masses.amax(1))


def test_batches_do_not_matter() -> None:
    for space in SPACES.values():
        toy, search = Toy(space), Preselection(random_affinity(space), 3, explore=0.0)
        whole = search.step(toy.batch())
        parts = [search.step(toy.batch(rows=rows)) for rows in (slice(0, 7), slice(7, 20))]
        assert torch.equal(whole.words, torch.cat([part.words for part in parts]))


def test_seeds_reproduce() -> None:
    space = StateSpace([2] * 20)
    batch, affinity = Toy(space).batch(), random_affinity(space)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(Preselection(affinity, 5, explore=0.4).propose(batch).words)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    before = torch.get_rng_state()
    first, second = (
        Preselection(affinity, 5, explore=0.4, generator=torch.Generator().manual_seed(3)).propose(batch).words for _ in range(2)
    )
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"affinity": 3}, TypeError, "affinity must be a function of a SearchBatch, such as .*; got int"),
        ({"explore": 1.5}, ValueError, r"explore must lie in \[0, 1\]; got 1.5"),
    ],
)
def test_bad_options(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Preselection(**{"affinity": Singletons(), "num_selected": 2, **options})


def test_bad_affinities() -> None:
    batch = Toy(StateSpace([2] * 4)).batch()
    with pytest.raises(ValueError, match=r"must return a tensor of shape \(20, 4\), .*; got \(20, 3\)"):
        Preselection(lambda batch: torch.zeros(20, 3), 2).propose(batch)
    with pytest.raises(ValueError, match=r"must return a tensor of shape \(20, 4\), .*; got list"):
        Preselection(lambda batch: [1.0], 2).propose(batch)
    with pytest.raises(ValueError, match="the affinity is NaN for 20 of 20 data points"):
        Preselection(lambda batch: torch.full((20, 4), math.nan), 2).propose(batch)


def test_of_few_latents_all_are_selected() -> None:
    for space, asked, there in ((StateSpace([2] * 4), 5, 4), (SPACES["mixture"], 7, 6)):
        batch = Toy(space).batch()
        for explore in (0.0, 1.0):
            search = Preselection(Singletons(), asked, explore=explore)
            assert (search.select(batch).sort(1).values == torch.arange(there)).all()
            assert search.propose(batch).find_duplicates().numel() == 0


class TestAffinities:
    @pytest.mark.parametrize("name", SPACES)
    def test_singletons(self, name: str) -> None:
        space = SPACES[name]
        toy = Toy(space)
        scores = Singletons()(toy.batch())
        for column, (latent, value) in enumerate(options(space)):
            values = [value if i == latent else 0 for i in range(space.num_latents)]
            expected = sum(toy.field[:, i, v] for i, v in enumerate(values))
            torch.testing.assert_close(scores[:, column], expected)

    def test_projection_and_cosine(self) -> None:
        y, weight = torch.randn(20, 5, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
        batch = dataclasses.replace(Toy(SPACES["binary"]).batch(), observations={"y": y})
        torch.testing.assert_close(Projection(lambda: weight)(batch), y @ weight)
        cosine = torch.nn.functional.cosine_similarity(y.unsqueeze(-1), weight, dim=1)
        torch.testing.assert_close(Cosine(lambda: weight)(batch), cosine * y.norm(dim=1, keepdim=True))

    def test_missing_entries(self) -> None:
        y, weight = torch.randn(20, 5, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
        seen = torch.rand(20, 5) < 0.6
        batch = dataclasses.replace(Toy(SPACES["binary"]).batch(), observations={"y": y.masked_fill(~seen, math.nan)})
        for affinity in (Projection(lambda: weight), Cosine(lambda: weight)):
            scores = affinity(batch)
            for n in range(20):
                part = weight[seen[n]]
                norm = part.norm(dim=0) if isinstance(affinity, Cosine) and seen[n].any() else 1.0
                torch.testing.assert_close(scores[n], y[n, seen[n]] @ part / norm)

    def test_an_element_without_length_scores_zero(self) -> None:
        batch = dataclasses.replace(Toy(SPACES["binary"]).batch(), observations={"y": torch.ones(20, 3)})
        assert (Cosine(lambda: torch.zeros(3, 8))(batch) == 0).all()

    def test_current_weights_and_sites(self) -> None:
        y, weight = torch.randn(20, 3), torch.zeros(3, 8, requires_grad=True)
        batch = dataclasses.replace(Toy(SPACES["binary"]).batch(), observations={"y": y, "count": torch.ones(20, 3, dtype=torch.int64)})
        affinity = Projection(lambda: weight, site="count")
        assert not affinity(batch).requires_grad
        with torch.no_grad():
            weight += 2.0
        torch.testing.assert_close(affinity(batch), torch.full((20, 8), 6.0))
        with pytest.raises(ValueError, match=r"Cosine needs the name of one observed site .*; the model has \['y', 'count'\]"):
            Cosine(lambda: weight)(batch)
        with pytest.raises(ValueError, match="Cosine found no observed site 'z'"):
            Cosine(lambda: weight, site="z")(batch)
        with pytest.raises(ValueError, match=r"got shapes \(20, 3\) and \(4, 8\)"):
            Projection(lambda: torch.zeros(4, 8), site="y")(batch)
        with pytest.raises(TypeError, match=r"weight must be a function that returns the current dictionary, such as .*; got Tensor"):
            Cosine(weight)


def sparse_data(num_data: int = 120) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    states = (torch.rand(num_data, 6, generator=generator) < 0.25).double()
    weight = 4 * torch.rand(12, 6, generator=generator, dtype=torch.float64)
    return states @ weight.mT + 0.5 * torch.randn(num_data, 12, generator=generator, dtype=torch.float64)


def run_em(
    find_search: Callable[[BinarySparseCoding], Preselection | ExhaustiveSearch], num_states: int, steps: int
) -> tuple[list[float], Tensor]:
    pyro.clear_param_store()
    y = sparse_data()
    model = BinarySparseCoding(12, 6, dtype=torch.float64).initialize(y, torch.Generator().manual_seed(2))
    svi = SVI(model, AutoTruncated(model, num_states), ClosedForm(model), Truncated_ELBO(find_search(model)))
    return [svi.step(y) for _ in range(steps)], model.weight.detach()


@pytest.mark.slow
def test_em_with_every_latent_selected_is_exact_em() -> None:
    losses, weight = run_em(lambda model: Preselection(Cosine(lambda: model.weight), 6), 64, 8)
    exact, exact_weight = run_em(lambda model: ExhaustiveSearch(), 64, 8)
    assert losses == pytest.approx(exact, rel=1e-9)
    torch.testing.assert_close(weight, exact_weight)


@pytest.mark.parametrize("make", [lambda model: Cosine(lambda: model.weight), lambda model: Singletons()], ids=["cosine", "singletons"])
def test_em_with_few_latents_selected_climbs(make: Callable) -> None:
    losses, _ = run_em(lambda model: Preselection(make(model), 3, max_active=2), 12, 15)
    assert all(after <= before + 1e-8 * abs(before) for before, after in itertools.pairwise(losses))
    assert losses[-1] < losses[0] - 100


def test_selected_classes_of_a_mixture() -> None:
    y = torch.cat([torch.randn(30, 2) + 4 * centre for centre in torch.randn(5, 2)])

    def model(y: Tensor) -> None:
        means = pyro.param("means", lambda: torch.randn(5, 2))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(5) / 5))
            pyro.sample("y", dist.Normal(means[z], 1.0).to_event(1), obs=y)

    for number, merge in ((5, True), (5, False), (2, True), (2, False)):
        pyro.set_rng_seed(0)
        pyro.clear_param_store()
        guide = AutoTruncated(model, num_states=number)
        elbo = Truncated_ELBO(Preselection(Singletons(), number, explore=0.0, merge=merge))
        elbo.loss_and_grads(model, guide, y)
        means = pyro.param("means").detach()
        log_joint = dist.Normal(means, 1.0).log_prob(y.unsqueeze(1)).sum(-1) - math.log(5)
        torch.testing.assert_close(guide.posterior(y).free_energy().float(), log_joint.topk(number, 1).values.logsumexp(1))


def test_a_search_that_replaces_populations_cannot_be_added():
    with pytest.raises(ValueError, match=r"Preselection\(merge=False\) replaces populations and cannot be added"):
        Preselection(Singletons(), 3, merge=False) + Preselection(Singletons(), 3)
