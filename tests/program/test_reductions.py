"""Sums, maxima and questions over all states at once are found by their operations, whatever values show; and so are reads by Python."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceEnum_ELBO, config_enumerate
from torch import Tensor

from pyro_truncated import AutoTruncated, Truncated_ELBO, VectorizationWarning, check_truncation

NUM_LATENTS = 6
Score = Callable[[Tensor], Tensor]

FUNCTIONS: dict[str, Score] = {
    "any": lambda s: torch.where(s.bool().any(), 0.0, -50.0),
    "all": lambda s: torch.where((s == 0).all(), -50.0, 0.0),
    "sum": lambda s: torch.where(s.sum() > 0, 0.0, -50.0),
    "max": lambda s: -50.0 * (1 - s.max()),
    "count_nonzero": lambda s: -50.0 * (torch.count_nonzero(s) == 0),
    "norm": lambda s: -50.0 * (s.norm() == 0),
    "flattened": lambda s: -50.0 * (1 - s.reshape(-1).amax(0)),
    "where": lambda s: torch.tensor(-50.0 if len(torch.where(s > 0)[0]) == 0 else 0.0),
    "nonzero": lambda s: torch.tensor(-50.0 if s.nonzero().numel() == 0 else 0.0),
    "selected": lambda s: torch.tensor(-50.0 if s[s > 0].numel() == 0 else 0.0),
    "masked_select": lambda s: torch.tensor(-50.0 if len(s.masked_select(s > 0)) == 0 else 0.0),
    "unique": lambda s: torch.tensor(-50.0 if 1 not in torch.unique(s).tolist() else 0.0),
    "equal": lambda s: torch.tensor(-50.0 if torch.equal(s, torch.zeros(NUM_LATENTS)) else 0.0),
    "allclose": lambda s: torch.tensor(-50.0 if torch.allclose(s, torch.zeros(NUM_LATENTS)) else 0.0),
    "contains": lambda s: torch.tensor(0.0 if 1.0 in s else -50.0),
    "script": lambda s: _script(s),
    "vmap": lambda s: torch.vmap(lambda one: -50.0 * (one == 0).all())(s.reshape(1, -1))[0],
}


@torch.jit.script
def _script(states: Tensor) -> Tensor:
    return -50.0 * (states == 0).all()


def model(score: Score) -> None:
    """A set that may not be empty, and mostly is a priori."""
    s = pyro.sample("s", dist.Bernoulli(0.3 * torch.ones(NUM_LATENTS)).to_event(1))
    pyro.factor("not empty", score(s))
    pyro.factor("sparse", -3.0 * s.sum(-1))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("seed", [0, 1])
def test_functions_of_all_states_are_scored_one_state_at_a_time(name: str, seed: int) -> None:
    pyro.set_rng_seed(seed)
    terms = [
        math.prod(0.3 * math.exp(-3) if on else 0.7 for on in s) * (1 if any(s) else math.exp(-50))
        for s in itertools.product((0, 1), repeat=NUM_LATENTS)
    ]
    guide = AutoTruncated(model, num_states=2**NUM_LATENTS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loss = Truncated_ELBO().loss(model, guide, FUNCTIONS[name])
    assert loss == pytest.approx(-math.log(sum(terms)), rel=1e-5)
    assert any(issubclass(one.category, VectorizationWarning) for one in told)


def test_what_is_recorded_alone_may_reduce_all_states() -> None:
    def records(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(3)))
            pyro.sample("y", dist.Normal(z.to(y.dtype), 1.0), obs=y)
        pyro.deterministic("mean", z.float().mean())

    guide = AutoTruncated(records, num_states=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = Truncated_ELBO().loss(records, guide, torch.tensor([0.0, 1.0]))
    log_probs = dist.Normal(torch.arange(3.0), 1.0).log_prob(torch.tensor([[0.0], [1.0]]))
    assert loss == pytest.approx(-float((log_probs - math.log(3)).logsumexp(-1).sum()), rel=1e-5)


def test_recorded_totals_of_a_program_that_reads_values_keep_data_points_apart() -> None:
    def reads(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(torch.full((), 0.4, dtype=y.dtype)))
            loc = torch.tensor([2.0 if value else 0.5 for value in z.tolist()], dtype=y.dtype)
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y)
        pyro.deterministic("total", z.sum(-1))

    y = torch.linspace(0.0, 2.0, 20, dtype=torch.float64)
    guide = AutoTruncated(reads, num_states=2, vectorize=False)
    log_joint = dist.Normal(torch.tensor([0.5, 2.0]), 1.0).log_prob(y.unsqueeze(-1)) + torch.tensor([0.6, 0.4], dtype=y.dtype).log()
    assert Truncated_ELBO().loss(reads, guide, y) == pytest.approx(-float(log_joint.logsumexp(-1).sum()), rel=1e-10)
    assert guide.layout.plates == ("data",)


def test_rare_events_across_data_points_are_named() -> None:
    def household(y: Tensor) -> None:
        with pyro.plate("members", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            someone = (z.sum(-1, keepdim=True) > 0).to(y.dtype)
            pyro.sample("y", dist.Bernoulli(0.05 + 0.5 * z + 0.3 * someone), obs=y)

    guide = AutoTruncated(household, num_states=2)
    with pytest.warns(UserWarning, match="site 'y' of a data point depends on the states of other data points"):
        guide.setup(torch.zeros(10))
    report = check_truncation(guide, torch.zeros(10), warn=False)
    assert not report.is_trusted
    assert "Site 'y' of a data point depends on the states of other data points" in str(report)


@pytest.mark.parametrize("memory_budget", [2**20, 2**28])
@pytest.mark.parametrize("size", [None, 4])
def test_rows_that_read_one_other_row_are_named(memory_budget: int, size: int | None) -> None:
    """So they are where the least memory holds one state of each row, and where one entry of a vector is read."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(300, 200, generator=generator)
    for row, other in torch.randint(300, (4, 2), generator=generator).tolist():

        def pair(y: Tensor, row: int = row, other: int = other) -> None:
            prior = dist.Bernoulli(0.4) if size is None else dist.Bernoulli(torch.full((size,), 0.4)).to_event(1)
            with pyro.plate("data", len(y)):
                z = pyro.sample("z", prior)
                read = z if size is None else z[..., 2]
                shift = torch.zeros(len(y)).index_fill(0, torch.tensor(row), 0.8) * read[..., other].unsqueeze(-1)
                loc = (z if size is None else z.sum(-1)) + shift
                pyro.sample("y", dist.Normal(loc.unsqueeze(-1), 1.0).expand([*loc.shape, 200]).to_event(1), obs=y)

        with pytest.warns(UserWarning, match="site 'y' of a data point depends on the states of other data points"):
            AutoTruncated(pair, num_states=2, memory_budget=memory_budget).setup(y)


ACROSS: dict[str, Score] = {
    "all": lambda z: 3 * (z > 0).all() + z,
    "counts": lambda z: z + (z.unique(return_counts=True)[1].amax() > 50),
    "occurs": lambda z: z + (torch.bincount(z.flatten(), minlength=5) > 0)[(z + 1) % 5],
}


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore:There is a performance drop")
@pytest.mark.parametrize("name", ACROSS)
def test_rare_dependence_on_other_rows_is_named_where_states_are_scored_singly(name: str) -> None:
    """Of hundred rows with five values nearly all draws have every value."""

    def across(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(5)))
            pyro.sample("y", dist.Normal(ACROSS[name](z).to(y.dtype), 1.0), obs=y)

    with (
        pytest.warns(UserWarning, match="site 'y' of a data point depends on the states of other data points"),
        warnings.catch_warnings(action="ignore", category=VectorizationWarning),
    ):
        AutoTruncated(across, num_states=5).setup(torch.zeros(101))


def test_what_is_computed_once_for_each_distinct_value_depends_on_no_other_row() -> None:
    """How many distinct values there are is looked at, which is slow; that is all that is told."""
    loc, y = torch.tensor([-1.0, 0.5, 2.0, 3.0]), torch.linspace(-2, 4, 7)

    def looks_up(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(4)))
            distinct, position = z.unique(return_inverse=True)
            pyro.sample("y", dist.Normal(loc[distinct].exp()[position], 1.0), obs=y)

    guide = AutoTruncated(looks_up, num_states=4)
    log_joint = dist.Normal(loc.exp(), 1.0).log_prob(y.unsqueeze(-1)) - math.log(4)
    with pytest.warns(VectorizationWarning):
        loss = Truncated_ELBO().loss(looks_up, guide, y)
    assert loss == pytest.approx(-float(log_joint.logsumexp(-1).sum()), rel=1e-6)


def test_sums_over_events_as_long_as_the_data_cross_no_rows() -> None:
    """The numbers that a mask selects lie in one dimension, whichever dimensions it has."""

    def masks(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(torch.full((3,), 0.3)).to_event(1))
            tripled = torch.zeros_like(z)
            tripled[z > 0] = z[z > 0] * 3
            pyro.sample("y", dist.Normal(tripled.sum(-1), 1.0), obs=y)

    with pytest.warns(VectorizationWarning):
        AutoTruncated(masks, num_states=8).setup(torch.zeros(3))


def test_loops_of_torch_that_cannot_be_recorded_are_run() -> None:
    def loops(y: Tensor) -> None:
        start = torch.zeros(1), torch.zeros(1)
        _, loc = torch.while_loop(lambda i, a: i.sum() < 3, lambda i, a: (i + 1, a * 0.5 + 1), start)
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(3)))
            pyro.sample("y", dist.Normal(z + loc, 1.0), obs=y)

    y = torch.tensor([0.0, 2.0, 5.0])
    guide = AutoTruncated(loops, num_states=3)
    guide.setup(y)
    log_joint = dist.Normal(torch.arange(3) + 1.75, 1.0).log_prob(y.unsqueeze(-1)) - math.log(3)
    torch.testing.assert_close(guide.posterior(y).free_energy(), log_joint.logsumexp(-1).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_others", [0, 1])
@pytest.mark.parametrize("size", [4, 30, 200])
@pytest.mark.parametrize(("values", "threshold"), [(5, 2), (5, 3), (9, 4), (20, 10), (20, 15)])
def test_rows_that_ask_whether_another_value_is_large_are_named(size: int, values: int, threshold: int, num_others: int) -> None:
    def asks(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(values)))
            shift = torch.zeros(len(y)).index_fill(0, torch.tensor(2), 2.0) * (z[..., 1, None] > threshold)
            pyro.sample("y", dist.Normal(z + shift, 1.0), obs=y)
            for number in range(num_others):
                pyro.sample(f"s{number}", dist.Bernoulli(0.5))

    with pytest.warns(UserWarning, match="site 'y' of a data point depends on the states of other data points"):
        AutoTruncated(asks, num_states=2 * values).setup(torch.zeros(size))


def test_rows_found_by_their_values_are_apart() -> None:
    """Which values occur at all says nothing, where each is compared with the rows' own."""

    def loops(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(3)))
            loc = torch.zeros(z.shape)
            for value in z.unique():
                loc = torch.where(z == value, 2.0 * value, loc)
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y)

    y = torch.linspace(0.0, 4.0, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", VectorizationWarning)
        loss = Truncated_ELBO().loss(loops, AutoTruncated(loops, num_states=3), y)
    log_probs = dist.Normal(2 * torch.arange(3.0), 1.0).log_prob(y.unsqueeze(-1))
    assert loss == pytest.approx(-float((log_probs - math.log(3)).logsumexp(-1).sum()), rel=1e-5)


def test_first_calls_run_the_program_few_times() -> None:
    runs: list[int] = []

    class Counted(torch.nn.Module):
        def forward(self, y: Tensor) -> None:
            runs[0] += 1
            with pyro.plate("data", len(y)):
                z = pyro.sample("z", dist.Categorical(torch.ones(5)))
                pyro.sample("y", dist.Normal(z.to(y.dtype), 1.0), obs=y)

    for number in (100, 1000, 10000):
        runs[:] = [0]
        Truncated_ELBO().loss(model := Counted(), AutoTruncated(model, num_states=5), torch.randn(number))
        assert runs[0] <= 16


@pytest.mark.parametrize("num_states", [8, 64])
def test_chains_whose_steps_reduce_their_states_hold_whole_ones(num_states: int) -> None:
    def chain(y: Tensor) -> None:
        z = torch.zeros(3)
        for t in range(2):
            z = pyro.sample(f"z{t}", dist.Bernoulli(0.1 + 0.5 * z).to_event(1))
            pyro.factor(f"not empty{t}", torch.where(z.bool().any(), 0.0, -5.0))
            pyro.sample(f"y{t}", dist.Normal(z, 1.0).to_event(1), obs=y[t])

    def log_joint(path: Sequence[Sequence[int]]) -> float:
        total, before = 0.0, torch.zeros(3)
        for step in path:
            z = torch.tensor(step, dtype=torch.float32)
            total += float((dist.Bernoulli(0.1 + 0.5 * before).log_prob(z) + dist.Normal(z, 1.0).log_prob(torch.zeros(3))).sum())
            total, before = total - 5.0 * (not any(step)), z
        return total

    guide = AutoTruncated(chain, num_states=num_states)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VectorizationWarning)
        loss = Truncated_ELBO().loss(chain, guide, torch.zeros(2, 3))
    steps = list(itertools.product((0, 1), repeat=3))
    evidence = float(torch.tensor([log_joint(path) for path in itertools.product(steps, repeat=2)]).logsumexp(0))
    assert guide.product is None
    assert loss >= -evidence - 1e-4
    assert num_states < 64 or loss == pytest.approx(-evidence, rel=1e-5)


@pytest.mark.parametrize("function", ["first", "shifted", "all"])
@pytest.mark.parametrize("size", [2, 3])
def test_members_of_a_plate_that_depend_on_each_other_are_told_where_nodes_have_sets(function: str, size: int) -> None:
    """Sets of a chain take the members of its plate to be independent."""
    functions: dict[str, Score] = {
        "first": lambda z: z * z[..., :1],
        "shifted": lambda z: z.roll(1, -1),
        "all": lambda z: torch.where((z == 1).all(-1, keepdim=True), -50.0, z),
    }

    def chain(y: Tensor) -> None:
        z = torch.zeros(size)
        with pyro.plate("members", size):
            for t in range(3):
                z = pyro.sample(f"z{t}", dist.Bernoulli(0.2 + 0.5 * z))
                pyro.sample(f"y{t}", dist.Normal(functions[function](z), 1.0), obs=y[t])

    guide = AutoTruncated(chain, num_states=2)
    with pytest.warns(UserWarning, match="site 'y[0-2]' of a data point depends on the states of other data points"):
        guide.setup(torch.zeros(3, size))
    assert guide.product is None


def test_inner_plates_whose_members_depend_on_each_other_hold_whole_states() -> None:
    def groups(y: Tensor) -> None:
        with pyro.plate("groups", 2, dim=-2):
            flag = pyro.sample("flag", dist.Bernoulli(torch.full((), 0.4, dtype=y.dtype)))
            with pyro.plate("members", 3, dim=-1):
                z = pyro.sample("z", dist.Bernoulli(0.2 + 0.5 * flag))
                pyro.sample("y", dist.Normal(z * z[..., :1], 1.0), obs=y)

    y = torch.linspace(-1.0, 2.0, 6, dtype=torch.float64).reshape(2, 3)
    evidence = 0.0
    for row in y:
        terms = []
        for flag, *z in itertools.product((0, 1), repeat=4):
            prior = (0.4 if flag else 0.6) * math.prod((0.7 if on else 0.3) if flag else (0.2 if on else 0.8) for on in z)
            means = torch.tensor([on * z[0] for on in z], dtype=y.dtype)
            terms.append(prior * math.exp(float(dist.Normal(means, 1.0).log_prob(row).sum())))
        evidence += math.log(sum(terms))
    for num_states in (8, 16):
        guide = AutoTruncated(groups, num_states=num_states)
        loss = Truncated_ELBO().loss(groups, guide, y)
        assert guide.product is None
        assert loss >= -evidence - 1e-9
    assert loss == pytest.approx(-evidence, rel=1e-10)


def test_transforms_whose_inverse_is_known_are_no_circle():
    """They and their inverses hold each other."""
    prior = dist.LogNormal(0.0, 1.0)
    assert prior.transforms[0].inv.inv is prior.transforms[0]

    def model(y):
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.3))
            pyro.sample("y", dist.Normal(3 * z, 1.0), obs=y)
            pyro.sample("x", prior.expand([len(y)]), obs=y.exp())

    y = torch.tensor([0.3, 2.5])
    guide = AutoTruncated(model, 2)
    exact = TraceEnum_ELBO(max_plate_nesting=1).loss(config_enumerate(model), lambda y: None, y)
    assert Truncated_ELBO().loss(model, guide, y) == pytest.approx(exact, rel=1e-6)
