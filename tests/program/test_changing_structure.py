"""Calls after the first whose densities depend on other latents: right, or refused by name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.ops.indexing import Vindex
from torch import Tensor

from pyro_truncated import AutoTruncated, Truncated_ELBO

RATES = torch.tensor([[0.9, 0.1, 0.2], [0.1, 0.8, 0.3], [0.2, 0.3, 0.7]], dtype=torch.float64)
Y = torch.tensor([0.2, 3.0, 2.0], dtype=torch.float64)
Edges = Sequence[tuple[int, int]]


def labelled(y: Tensor, labels: Tensor | None = None) -> None:
    """Two classes of each data point, which only labels couple."""
    with pyro.plate("data", len(y)):
        z, w = (pyro.sample(name, dist.Categorical(torch.ones(9, dtype=y.dtype))) for name in ("z", "w"))
        pyro.sample("y", dist.Normal(z.to(y.dtype), 1.0), obs=y)
        pyro.sample("x", dist.Normal(w.to(y.dtype), 1.0), obs=y)
        if labels is not None:
            pyro.sample("label", dist.Bernoulli(logits=(z - w).to(y.dtype)), obs=labels)


def labelled_evidence(labels: Tensor | None) -> float:
    states = torch.tensor(list(itertools.product(range(9), repeat=2)), dtype=torch.float64)
    total = 0.0
    for n, y in enumerate(Y):
        log_joint = -2 * math.log(9) + dist.Normal(states, 1.0).log_prob(y).sum(-1)
        if labels is not None:
            log_joint = log_joint + dist.Bernoulli(logits=states[:, 0] - states[:, 1]).log_prob(labels[n])
        total += float(log_joint.logsumexp(0))
    return total


def block_model(edges: Edges) -> None:
    classes = [pyro.sample(f"z{i}", dist.Categorical(torch.ones(3, dtype=torch.float64))) for i in range(4)]
    for k, (i, j) in enumerate(edges):
        pyro.sample(f"edge{k}", dist.Bernoulli(Vindex(RATES)[classes[i], classes[j]]), obs=torch.tensor(1.0, dtype=torch.float64))


def block_model_of_tensors(edges: Tensor) -> None:
    block_model([(int(i), int(j)) for i, j in edges])


def block_evidence(edges: Edges) -> float:
    terms = (math.prod(float(RATES[z[i], z[j]]) for i, j in edges) for z in itertools.product(range(3), repeat=4))
    return math.log(sum(terms) / 81)


CHAIN, STAR = [(0, 1), (1, 2), (2, 3)], [(0, 1), (0, 2), (0, 3)]


def loss(guide: AutoTruncated, *args: object) -> float:
    return float(Truncated_ELBO().loss(guide.model, guide, *args))


def test_a_chain_that_is_switched_off_later_is_taken() -> None:
    """Its graph is part of the first one; the other way round it is refused."""
    stays = torch.eye(4, dtype=torch.float64) + 0.1
    y = torch.tensor([0.2, 3.0, 2.0, 1.0], dtype=torch.float64)

    def chain(y: Tensor, is_on: bool) -> None:
        z = torch.tensor(0)
        for t in range(4):
            probs = stays[z] if is_on and t else torch.ones(4, dtype=y.dtype)
            z = pyro.sample(f"z{t}", dist.Categorical(probs))
            pyro.sample(f"y{t}", dist.Normal(z.to(y.dtype), 1.0), obs=y[t])

    def evidence(is_on: bool) -> float:
        moves = stays / 1.4 if is_on else torch.full((4, 4), 0.25)
        paths = itertools.product(range(4), repeat=4)
        return math.log(
            sum(
                0.25
                * math.prod(float(moves[i, j]) for i, j in itertools.pairwise(z))
                * math.exp(float(dist.Normal(torch.tensor(z, dtype=y.dtype), 1.0).log_prob(y).sum()))
                for z in paths
            )
        )

    guide = AutoTruncated(chain, num_states=8)
    for is_on in (True, False, True):
        assert loss(guide, y, is_on) == pytest.approx(-evidence(is_on), rel=1e-10)
    assert guide.product is not None
    guide = AutoTruncated(chain, num_states=8)
    assert loss(guide, y, False) == pytest.approx(-evidence(False), rel=1e-10)
    with pytest.raises(ValueError, match="another structure"):
        loss(guide, y, True)


def test_a_site_that_couples_latents_later_is_refused_by_name() -> None:
    guide = AutoTruncated(labelled, num_states=64)
    assert loss(guide, Y) == pytest.approx(-labelled_evidence(None), rel=1e-10)
    with pytest.raises(ValueError, match=r"the sites \['label'\] depend on other discrete latents.*whole_states=True"):
        loss(guide, Y, torch.ones(3, dtype=torch.float64))
    assert loss(guide, Y) == pytest.approx(-labelled_evidence(None), rel=1e-10)


def test_sites_that_come_after_many_other_calls_are_refused_too() -> None:
    def model(y: Tensor, step: int) -> None:
        labelled(y, torch.ones(3, dtype=y.dtype) if step == 9 else None)

    guide = AutoTruncated(model, num_states=64)
    for step in range(9):
        assert loss(guide, Y, step) == pytest.approx(-labelled_evidence(None), rel=1e-10)
    with pytest.raises(ValueError, match=r"the sites \['label'\]"):
        loss(guide, Y, 9)


@pytest.mark.parametrize(("model", "cast"), [(block_model, list), (block_model_of_tensors, torch.tensor)], ids=["lists", "tensors"])
def test_other_edges_under_the_same_names_are_refused(model: Callable[..., None], cast: Callable[[Edges], Edges]) -> None:
    guide = AutoTruncated(model, num_states=64)
    assert loss(guide, cast(CHAIN)) == pytest.approx(-block_evidence(CHAIN), rel=1e-10)
    with pytest.raises(ValueError, match=r"another structure .* the sites \['edge1', 'edge2'\] depend on other"):
        loss(guide, cast(STAR))
    fewer = [(1, 2), (1, 2), (2, 3)]
    whole = AutoTruncated(model, num_states=81, whole_states=True)
    for edges in (CHAIN, STAR, fewer):
        assert loss(whole, cast(edges)) == pytest.approx(-block_evidence(edges), rel=1e-10)


def lagged(lag: int) -> None:
    """Each step depends on the one before, or on another earlier one."""
    steps: list[Tensor] = []
    for t, y in enumerate(Y.repeat(2)):
        steps.append(pyro.sample(f"z{t}", dist.Categorical(logits=RATES[steps[t - lag]] if t >= lag else RATES[0])))
        pyro.sample(f"y{t}", dist.Normal(steps[t].to(y.dtype), 1.0), obs=y)


class Settings:
    """What a program may be told of its steps."""

    def __init__(self) -> None:
        self.values, self.coupling = {"lag": 1}, [1.0, 0.0, 1.0]


class Lagged(torch.nn.Module):
    """A program with modules that hold a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.nn.ModuleList([LaggedSteps()])

    def forward(self) -> None:
        """Runs the first module."""
        self.steps[0]()


class LaggedSteps(torch.nn.Module):
    """Steps whose lag is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lag", torch.tensor(1))

    def forward(self) -> None:
        """The steps."""
        lagged(int(self.lag))


SETTINGS = Settings()


def lagged_by_a_dictionary() -> None:
    lagged(SETTINGS.values["lag"])


def lagged_by_a_float() -> None:
    lagged(1 if SETTINGS.coupling[2] else 2)


def change_settings() -> None:
    SETTINGS.values["lag"], SETTINGS.coupling[2] = 2, 0.0


@pytest.mark.parametrize("kind", ["module", "dictionary", "float"])
def test_edges_that_the_program_holds_anywhere_are_noticed(kind: str) -> None:
    module = Lagged()
    SETTINGS.__init__()
    model = {"module": module, "dictionary": lagged_by_a_dictionary, "float": lagged_by_a_float}[kind]
    guide = AutoTruncated(model, num_states=3)
    before = loss(guide)
    assert loss(guide) == before
    change_settings()
    module.steps[0].lag.fill_(2)
    with pytest.raises(ValueError, match=r"another structure .* the sites \['z2', 'z3', 'z4', 'z5'\] depend on other"):
        loss(guide)


def test_edges_by_weights_that_are_not_zero_are_noticed_after_many_other_calls() -> None:
    """Numbers that change in every call hide no others."""

    def model(weights: Tensor, step: int) -> None:
        del step
        block_model([(i, j) for i in range(4) for j in range(4) if weights[i, j] > 0])

    def weights(edges: Edges) -> Tensor:
        matrix = torch.zeros(4, 4, dtype=torch.float64)
        matrix[tuple(zip(*edges, strict=True))] = 1.0
        return matrix

    guide = AutoTruncated(model, num_states=3)
    for step in range(8):
        assert loss(guide, weights(CHAIN), step) == pytest.approx(-block_evidence(CHAIN), rel=1e-10)
    with pytest.raises(ValueError, match=r"another structure .* the sites \['edge1', 'edge2'\] depend on other"):
        loss(guide, weights(STAR), 8)


def thresholds(weights: Tensor) -> None:
    """Which weights are large tells which latents an observation depends on."""
    z = [pyro.sample(f"z{i}", dist.Categorical(torch.ones(3, dtype=Y.dtype))) for i in range(3)]
    for i in range(3):
        mean = z[i] + sum((z[j] for j in range(i) if weights[i, j] > 0.5), torch.tensor(0))
        pyro.sample(f"y{i}", dist.Normal(mean.to(Y.dtype), 1.0), obs=Y[i])


def large(*edges: tuple[int, int]) -> Tensor:
    """Weights that are large at some places."""
    weights = torch.full((3, 3), 0.1)
    weights[tuple(zip(*edges, strict=True))] = 0.9
    return weights


@pytest.mark.parametrize("before", [[(1, 2)], [(1, 0)]])
def test_edges_by_real_numbers_are_noticed(before: list[tuple[int, int]]) -> None:
    guide = AutoTruncated(thresholds, num_states=3)
    guide.setup(large(*before))
    with pytest.raises(ValueError, match=r"another structure .* the sites \['y2'\] depend on other"):
        loss(guide, large(*before, (2, 0)))


def test_edges_after_many_other_calls_are_refused_where_sets_have_no_room_for_them() -> None:
    def chain(weights: Tensor) -> None:
        z = [torch.tensor(0)]
        for i, y in enumerate(Y):
            z.append(pyro.sample(f"z{i}", dist.Categorical(logits=RATES[z[-1]])))
            mean = z[-1] + sum((z[j] for j in range(1, i + 1) if weights[i, j - 1] > 0.5), torch.tensor(0))
            pyro.sample(f"y{i}", dist.Normal(mean.to(Y.dtype), 1.0), obs=y)

    guide = AutoTruncated(chain, num_states=3)
    for number in range(5):
        loss(guide, large((0, 1)) - 0.01 * number)
    with pytest.raises(ValueError, match=r"another structure .* the sites \['y2'\] depend on other .*whole_states=True"):
        loss(guide, large((0, 1), (2, 1)) - 0.07)


def test_new_sites_that_depend_on_no_latent_are_taken() -> None:
    def model(y: Tensor, more: bool = False) -> None:
        labelled(y)
        if more:
            pyro.sample("more", dist.Normal(0.0, 1.0), obs=torch.tensor(1.0))

    guide = AutoTruncated(model, num_states=64)
    guide.setup(Y)
    expected = labelled_evidence(None) + float(dist.Normal(0.0, 1.0).log_prob(torch.tensor(1.0)))
    assert loss(guide, Y, True) == pytest.approx(-expected, rel=1e-8)


@pytest.mark.parametrize("records", ["deterministic", "return", "unused"])
def test_sums_of_latents_that_no_density_joins_keep_sets(records: str) -> None:
    def model(y: Tensor) -> Tensor:
        a = pyro.sample("a", dist.Categorical(torch.ones(10, dtype=y.dtype)))
        b = pyro.sample("b", dist.Categorical(torch.ones(12, dtype=y.dtype)))
        pyro.sample("x", dist.Normal(a.to(y.dtype), 1.0), obs=y)
        pyro.sample("y", dist.Normal(b.to(y.dtype), 1.0), obs=y)
        total = a + b
        return pyro.deterministic("total", total) if records == "deterministic" else total if records == "return" else a

    y = Y[1]
    guide = AutoTruncated(model, num_states=64)
    evidence = [(dist.Normal(torch.arange(n, dtype=y.dtype), 1.0).log_prob(y)).logsumexp(0) - math.log(n) for n in (10, 12)]
    assert loss(guide, y) == pytest.approx(-float(sum(evidence)), rel=1e-10)
    assert guide.product is not None
