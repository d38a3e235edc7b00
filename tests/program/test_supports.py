"""Supports that depend on other latents: the space, and zero probability outside of it, against brute force written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import ClassVar

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.autoname import scope
from pyro.distributions import constraints
from pyro.infer import TraceEnum_ELBO
from torch import Tensor
from torch.distributions import constraints as torch_constraints

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO, VectorizationWarning, check_truncation
from pyro_truncated.program.call import Call
from pyro_truncated.program.dependencies import Dependencies

Y = torch.tensor([0.1, 1.2, 2.9, 4.2], dtype=torch.float64)
COUNTS = torch.tensor([0.0, 3.0, 2.0, 5.0], dtype=torch.float64)


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def rate() -> Tensor:
    return pyro.param("rate", lambda: torch.tensor(0.4), constraint=constraints.unit_interval)


def log_binomial(n: int, k: float, p: Tensor) -> Tensor:
    """Log probability of ``k`` of ``n``, ``-inf`` where impossible."""
    if not 0 <= k <= n:
        return torch.tensor(-math.inf)
    return math.log(math.comb(n, int(k))) + k * p.log() + (n - k) * (1 - p).log()


def log_normal(y: Tensor, loc: float) -> Tensor:
    return dist.Normal(loc, 0.3).log_prob(y)


# Each: the model, what enumerates it (log joints of the states of one data point), and its arguments.


def scalar_chain():
    a = pyro.sample("a", dist.Binomial(5, rate()))
    b = pyro.sample("b", dist.Binomial(a, rate()))
    pyro.sample("y", dist.Normal(b, 0.3), obs=Y[3])


def scalar_chain_terms(p: Tensor) -> list[dict[tuple, Tensor]]:
    return [
        {(a, b): log_binomial(5, a, p) + log_binomial(a, b, p) + log_normal(Y[3], b) for a in range(6) for b in range(a + 1)},
    ]


def plated_chain():
    with pyro.plate("data", 4):
        a = pyro.sample("a", dist.Binomial(5, rate()))
        b = pyro.sample("b", dist.Binomial(a, rate()))
        c = pyro.sample("c", dist.Binomial(a - b, rate()))
        pyro.sample("y", dist.Normal(b - c, 0.3), obs=Y)


def plated_chain_terms(p: Tensor) -> list[dict[tuple, Tensor]]:
    return [
        {
            (a, b, c): log_binomial(5, a, p) + log_binomial(a, b, p) + log_binomial(a - b, c, p) + log_normal(y, b - c)
            for a in range(6)
            for b in range(a + 1)
            for c in range(a - b + 1)
        }
        for y in Y
    ]


def mixture_of_counts():
    """An N-mixture: observations that a latent total may not allow, one of them masked."""
    seen = torch.tensor([True, True, True, False])
    with pyro.plate("data", 4):
        n = pyro.sample("n", dist.Poisson(3 * rate()))
        pyro.sample("y", dist.Binomial(n, rate()).mask(seen), obs=torch.where(seen, COUNTS, -7.0))


def mixture_of_counts_terms(p: Tensor) -> list[dict[tuple, Tensor]]:
    points = []
    for y, seen in zip(COUNTS.tolist(), (True, True, True, False), strict=True):
        prior = dist.Poisson(3 * p)
        points.append({(n,): prior.log_prob(torch.tensor(float(n))) + (log_binomial(n, y, p) if seen else 0.0) for n in range(10)})
    return points


def beta_binomial():
    """Totals that differ between data points, and a formula that is finite outside of the support."""
    total = torch.tensor([1.0, 4.0, 2.0, 3.0])
    with pyro.plate("data", 4):
        n = pyro.sample("n", dist.BetaBinomial(1.3 + rate(), 0.7, total))
        pyro.sample("y", dist.Normal(n, 0.3), obs=Y)


def beta_binomial_terms(p: Tensor) -> list[dict[tuple, Tensor]]:
    points = []
    for y, total in zip(Y, (1, 4, 2, 3), strict=True):
        prior = dist.BetaBinomial(1.3 + p, 0.7, total)
        points.append({(n,): prior.log_prob(torch.tensor(float(n))) + log_normal(y, n) for n in range(total + 1)})
    return points


def extended():
    """A distribution over the integers that reaches only some of them."""
    with pyro.plate("data", 4):
        n = pyro.sample("n", dist.ExtendedBinomial(4, rate()))
        pyro.sample("y", dist.Normal(n, 0.3), obs=Y)


def extended_terms(p: Tensor) -> list[dict[tuple, Tensor]]:
    return [{(n,): log_binomial(4, n, p) + log_normal(y, n) for n in range(7)} for y in Y]


def read_by_python():
    """A number of classes that Python reads from a latent."""
    k = pyro.sample("k", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
    z = pyro.sample("z", dist.Categorical(probs=torch.ones(int(k) + 1)))
    pyro.sample("y", dist.Normal(z + rate(), 0.3), obs=Y[1])


def nested_plates():
    """Members of an inner plate each with their own total."""
    with pyro.plate("data", 4, dim=-1):
        with pyro.plate("inner", 2, dim=-2):
            a = pyro.sample("a", dist.Binomial(torch.tensor([[1.0], [2.0]]), rate()))
            b = pyro.sample("b", dist.Binomial(a, rate()))
        pyro.sample("y", dist.Normal(b.sum(-2, keepdim=True), 0.3), obs=Y)


def nested_plates_terms(p: Tensor) -> list[dict[tuple, Tensor]]:
    def member(total: int) -> dict[tuple, Tensor]:
        return {(a, b): log_binomial(total, a, p) + log_binomial(a, b, p) for a in range(total + 1) for b in range(a + 1)}

    pairs = [(first, second) for first in member(1).items() for second in member(2).items()]
    return [{(a, c, b, d): left + right + log_normal(y, b + d) for ((a, b), left), ((c, d), right) in pairs} for y in Y]


CASES = (
    (scalar_chain, scalar_chain_terms, None, 36),
    (plated_chain, plated_chain_terms, None, 216),
    (mixture_of_counts, mixture_of_counts_terms, 9, 10),
    (beta_binomial, beta_binomial_terms, None, 5),
    (extended, extended_terms, {"n": 6}, 7),
    (nested_plates, nested_plates_terms, None, 36),
)
cases = pytest.mark.parametrize(("model", "terms", "max_count", "size"), CASES, ids=lambda value: getattr(value, "__name__", ""))


def truncated(model: Callable, num_states: int, max_count=None) -> AutoTruncated:
    return AutoTruncated(model, num_states, max_count=max_count)


@cases
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_gradient_and_marginals_equal_brute_force_whatever_the_seed(model, terms, max_count, size, seed):
    pyro.set_rng_seed(seed)
    p = torch.tensor(0.4, requires_grad=True)
    points = terms(p)
    joint = [torch.stack(list(point.values())) for point in points]
    exact = -sum(point.logsumexp(0) for point in joint)
    (expected,) = torch.autograd.grad(exact, p)
    guide = truncated(model, size, max_count)
    guide.setup()
    assert guide.space.size == size
    unconstrained = pyro.get_param_store()._params["rate"]
    for elbo in (Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=2), TraceEnum_ELBO(max_plate_nesting=2)):
        # Pyro validates masked values too.
        with pyro.validation_enabled(model is not mixture_of_counts):
            assert elbo.loss_and_grads(model, guide) == pytest.approx(exact.item(), rel=1e-12)
        assert unconstrained.grad.item() / (0.4 * 0.6) == pytest.approx(expected.item(), rel=1e-11)
        unconstrained.grad = None
    assert Truncated_ELBO(ExhaustiveSearch()).loss(model, guide) == pytest.approx(exact.item(), rel=1e-12)
    found = guide.population().value_probabilities()
    for row, (point, log_joint) in enumerate(zip(points, joint, strict=True)):
        weights = log_joint.detach().softmax(0)
        for latent in range(found.shape[1]):
            marginal = torch.zeros(found.shape[2])
            for state, weight in zip(point, weights, strict=True):
                marginal[state[latent]] += weight
            torch.testing.assert_close(found[row, latent], marginal, rtol=1e-10, atol=1e-12)


def test_scalar_sites_are_scored_one_state_after_the_other_too():
    exact = -torch.stack(list(scalar_chain_terms(torch.tensor(0.4))[0].values())).logsumexp(0)
    guide = AutoTruncated(scalar_chain, 36, vectorize=False)
    assert Truncated_ELBO().loss(scalar_chain, guide) == pytest.approx(exact.item(), rel=1e-12)


@pytest.mark.slow
def test_a_support_reaches_through_the_supports_of_others():
    def thrice():
        a = pyro.sample("a", dist.Binomial(2, rate()))
        b = pyro.sample("b", dist.Binomial(a, rate()))
        c = pyro.sample("c", dist.Binomial(b, rate()))
        pyro.sample("y", dist.Normal(c, 0.3), obs=Y[0])

    for seed in range(8):
        pyro.set_rng_seed(seed)
        found = AutoTruncated(thrice, 1)
        found.setup()
        assert found.space.cardinalities == (3, 3, 3)


@pytest.mark.parametrize("breaks", [False, True])
def test_plates_and_supports_of_a_model_that_is_hard_to_follow(breaks):
    y = torch.tensor([2.0, 0.0])

    def model(y):
        shift = pyro.sample("shift", dist.Delta(torch.tensor(0.1)))
        with pyro.plate("data", 2, dim=-1):
            with pyro.plate("inner", 2, dim=-2):
                z = pyro.sample("z", dist.Bernoulli(0.4))
            # torch's Geometric asks for new numbers in a shape that Pyro's provenance makes a tuple of.
            g = pyro.sample("g", dist.Geometric(logits=z.sum(-2, keepdim=True)))
            assert not (breaks and type(z).__name__ == "ProvenanceTensor")
            pyro.sample("b", dist.Binomial(g, 0.5), obs=torch.zeros(1, 2))
            pyro.sample("y", dist.Normal(g + shift, 1.0), obs=y)

    guide = AutoTruncated(model, 16, max_count=3)
    loss = Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=2).loss_and_grads(model, guide, y)
    assert guide.layout.plates == ("data",)
    number, counts = torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.arange(4.0)
    prior = dist.Bernoulli(0.4).log_prob(torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]])).sum(-1)
    joint = prior.unsqueeze(-1) + dist.Geometric(logits=number.unsqueeze(-1)).log_prob(counts) + counts * math.log(0.5)
    exact = (joint + dist.Normal(counts + 0.1, 1.0).log_prob(y[:, None, None])).flatten(1).logsumexp(1).sum()
    assert loss == pytest.approx(-exact.item(), rel=1e-12)


def test_a_number_of_classes_that_python_reads_reaches_the_largest():
    for seed in range(3):
        pyro.set_rng_seed(seed)
        found = AutoTruncated(read_by_python, 9)
        with pytest.warns(VectorizationWarning, match=r"int\(k\)"):
            found.setup()
        assert found.space.cardinalities == (3, 3)


@pytest.mark.slow
def test_a_smaller_population_stays_below_the_evidence_and_the_check_sees_the_gap():
    exact = -torch.stack(list(scalar_chain_terms(torch.tensor(0.4))[0].values())).logsumexp(0).item()
    guide = truncated(scalar_chain, 4)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(scalar_chain, guide)
    assert loss > exact
    assert "gap" in str(check_truncation(guide)).lower()


@pytest.mark.parametrize("limit", [3, {"b": 3}])
def test_max_count_overrides_any_count_site(limit):
    guide = truncated(scalar_chain, 6, limit)
    guide.setup()
    assert guide.space.cardinalities == ((4, 4) if limit == 3 else (6, 4))
    terms = scalar_chain_terms(torch.tensor(0.4))[0]
    kept = [value for (a, b), value in terms.items() if b <= 3 and (a <= 3 or limit != 3)]
    full = truncated(scalar_chain, guide.space.size, limit)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(scalar_chain, full)
    assert loss == pytest.approx(-torch.stack(kept).logsumexp(0).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        (dist.Poisson, [2.0]),
        (dist.NegativeBinomial, [3.0, 0.4]),
        (dist.Geometric, [0.4]),
        (dist.Binomial, [40.0, 0.1]),
        (dist.GammaPoisson, [2.0, 1.0]),
    ],
)
def test_max_count_of_every_count_distribution(family, parameters):
    prior = family(*(torch.tensor(value) for value in parameters))

    def model():
        n = pyro.sample("n", prior)
        pyro.sample("y", dist.Normal(n, 1.0), obs=Y[2])

    guide = truncated(model, 6, 5)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, guide)
    n = torch.arange(6.0)
    assert loss == pytest.approx(-(prior.log_prob(n) + dist.Normal(n, 1.0).log_prob(Y[2])).logsumexp(0).item(), rel=1e-12)


def continuous_total():
    x = pyro.sample("x", dist.Normal(3.0, 1.0))
    b = pyro.sample("b", dist.Binomial(x.abs().floor(), 0.5))
    pyro.sample("y", dist.Normal(b, 0.3), obs=Y[2])


def long_sum():
    a = pyro.sample("a", dist.Binomial(5, 0.5).expand([8]).to_event(1))
    b = pyro.sample("b", dist.Binomial(a.sum(-1), 0.5))
    pyro.sample("y", dist.Normal(b, 0.3), obs=Y[2])


@pytest.mark.parametrize("model", [continuous_total, long_sum])
def test_a_support_that_cannot_be_found_out_is_refused_with_the_cure(model):
    with pytest.raises(ValueError, match=r"support of discrete latent site 'b' \(Binomial\) depends on .*max_count=\{'b': 20\}"):
        truncated(model, 2).setup()
    guide = truncated(model, 2, {"b": 7})
    guide.setup()
    assert guide.space.cardinalities[-1] == 8


class Between(dist.TorchDistribution):
    """Uniform on the integers from one bound to another."""

    arg_constraints: ClassVar[dict] = {}

    def __init__(self, low, high):
        self.low, self.high = torch.broadcast_tensors(torch.as_tensor(low), torch.as_tensor(high))
        super().__init__(self.low.shape, validate_args=False)

    def expand(self, batch_shape, _instance=None):
        return Between(self.low.expand(batch_shape), self.high.expand(batch_shape))

    @property
    def support(self):
        return torch_constraints.integer_interval(self.low, self.high)

    def sample(self, sample_shape=()):
        return (self.low + torch.rand((*sample_shape, *self.batch_shape)) * (self.high - self.low + 1)).floor()

    def log_prob(self, value):
        # As formulas go: it does not say zero outside.
        return -(self.high - self.low + 1.0).log() + 0.0 * value


def shifting():
    a = pyro.sample("a", dist.Binomial(3, 0.5))
    b = pyro.sample("b", Between(a - 2, a + 1))
    pyro.sample("y", dist.Normal(b, 0.3), obs=Y[1])


def test_the_lower_bound_moves_too():
    guide = truncated(shifting, 28)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(shifting, guide)
    assert guide.layout.sites["b"].low == -2
    assert guide.space.cardinalities == (4, 7)
    half = torch.tensor(0.5)
    joint = [log_binomial(3, a, half) - math.log(4) + log_normal(Y[1], b) for a in range(4) for b in range(a - 2, a + 2)]
    assert loss == pytest.approx(-torch.stack(joint).logsumexp(0).item(), rel=1e-12)


@pytest.mark.slow
def test_many_joint_values_are_looked_at_together():
    def model():
        a = pyro.sample("a", dist.Binomial(9, 0.5).expand([3]).to_event(1))
        b = pyro.sample("b", dist.Binomial(a[..., 0] * a[..., 1] + a[..., 2], 0.5))
        pyro.sample("y", dist.Normal(b, 0.3), obs=Y[2])

    guide = truncated(model, 2)
    guide.setup()
    assert guide.space.cardinalities == (10, 10, 10, 91)


def test_supports_that_depend_on_nothing_are_not_checked_again():
    def model():
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Categorical(torch.ones(3)))
            n = pyro.sample("n", dist.Binomial(5, p * torch.tensor([0.1, 0.5, 0.9])[z]))
            pyro.sample("y", dist.Normal(n, 0.3), obs=Y)

    guide = truncated(model, 18)
    guide.setup()
    assert guide.space.cardinalities == (3, 6)
    assert not guide.layout.sites_to_check


def test_programs_that_cannot_be_followed_are_compared_over_runs(monkeypatch):
    def fail(*args, **kwargs):
        raise TypeError("no modes here")

    monkeypatch.setattr("pyro_truncated.program.dependencies.FollowLatents", fail)
    guide = truncated(scalar_chain, 36)
    exact = -torch.stack(list(scalar_chain_terms(torch.tensor(0.4))[0].values())).logsumexp(0).item()
    assert Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(scalar_chain, guide) == pytest.approx(exact, rel=1e-12)


def test_programs_that_make_tensors_of_a_shape_are_followed():
    """Torch's Geometric calls `new` with a shape: each of the three counts has a set of its own."""

    def model(y):
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.4))
            g = pyro.sample("g", dist.Geometric(0.3 + 0.4 * z.unsqueeze(-1).expand(*z.shape, 3)).to_event(1))
            pyro.sample("y", dist.Poisson(g + 0.5).to_event(1), obs=y)

    dependencies = Dependencies(Call(model, (COUNTS.unsqueeze(-1).expand(-1, 3),)))
    assert dependencies.scopes == {"z": frozenset(), "g": frozenset({"z"}), "y": frozenset({"g"})}


def test_trees_are_refused_by_name():
    """Their entries are integers, most joint values of which are no tree."""

    def model():
        edges = pyro.sample("edges", dist.SpanningTree(torch.zeros(3)))
        pyro.sample("y", dist.Normal(edges[..., 0, 0].double(), 1.0), obs=torch.tensor(1.0))

    with pytest.raises(NotImplementedError, match=r"'edges' \(SpanningTree\) has a support that is no product"):
        AutoTruncated(model, max_count=2).setup()


def test_plates_that_a_handler_renames_are_refused_by_name():
    """Inside of a plate it may rename sites."""

    def model():
        with pyro.plate("data", 3), scope(prefix="inner"):
            z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.3)))
            pyro.sample("y", dist.Normal(z, 1.0), obs=torch.zeros(3))

    guide = AutoTruncated(model, num_states=2)
    evidence = 3 * math.log(0.7 + 0.3 * math.exp(-0.5)) - 1.5 * math.log(2 * math.pi)
    assert Truncated_ELBO().loss(model, guide) == pytest.approx(-evidence, rel=1e-6)
    with pytest.raises(NotImplementedError, match="'outer/inner/z' lies in the plate 'data', whose subsample has another name"):
        AutoTruncated(scope(model, prefix="outer"), num_states=2).setup()
