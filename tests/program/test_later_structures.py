"""Later calls with other switches, where populations hold whole states: right, or refused by name."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import TraceEnum_ELBO, config_enumerate
from torch import Tensor

from pyro_truncated import AutoTruncated, Truncated_ELBO, VectorizationWarning
from pyro_truncated.distributions import BinaryChains

Y = torch.tensor([0.5, 2.0], dtype=torch.float64)
DESIGN = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
ONES = torch.ones(2, dtype=torch.float64)


def branch(y: Tensor, *, on: bool = False) -> None:
    z = pyro.sample("z", dist.Categorical(torch.ones(3, dtype=y.dtype)))
    loc = z.to(y.dtype)
    if on and (z == 2).any():
        loc = loc + 0.5
    pyro.sample("y", dist.Normal(loc, 1.0), obs=y[0])


def reduction(y: Tensor, *, on: bool = False) -> None:
    s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.4, dtype=y.dtype)).to_event(1))
    total = s.sum(-1)
    pyro.sample("y", dist.Normal(total - total.max() if on else total, 1.0), obs=y[0])


def product(y: Tensor, *, on: bool = False) -> None:
    s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.4, dtype=y.dtype)).to_event(1))
    mean = DESIGN @ s if on else (DESIGN * s.unsqueeze(-2)).sum(-1)
    pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y[:1].expand(3))


def thinning(y: Tensor, *, on: bool = False) -> None:
    total = pyro.sample("total", dist.Binomial(3 * ONES[0], 0.5))
    part = pyro.sample("part", dist.Binomial(total if on else 3 * ONES[0], 0.5))
    pyro.sample("y", dist.Normal(part + 0.3 * total, 1.0), obs=y[0])


class Holder:
    """A program whose switch is an attribute."""

    def __init__(self) -> None:
        self.is_on = False

    def __call__(self, y: Tensor) -> None:
        branch(y, on=self.is_on)

    def of(self, y: Tensor) -> None:
        """The same as a method."""
        branch(y, on=self.is_on)


def evidence(model: Callable[..., Any], **kwargs: Any) -> float:
    """One run of the program for each state."""
    with poutine.block():
        latents = poutine.trace(model).get_trace(Y).stochastic_nodes
        shapes = {name: node["value"] for name, node in poutine.trace(model).get_trace(Y).nodes.items() if name in latents}
    count = sum(value.numel() for value in shapes.values())
    terms = []
    for levels in itertools.product(range(4), repeat=count):
        parts = torch.tensor(levels, dtype=Y.dtype).split([value.numel() for value in shapes.values()])
        values = {name: part.reshape(value.shape).to(value.dtype) for (name, value), part in zip(shapes.items(), parts, strict=True)}
        with pyro.validation_enabled(False):
            nodes = poutine.trace(poutine.condition(model, data=values)).get_trace(Y, **kwargs).nodes
            if all(bool(nodes[name]["fn"].support.check(value).all()) for name, value in values.items()):
                terms.append(sum(float(node["fn"].log_prob(node["value"]).sum()) for node in nodes.values() if node["type"] == "sample"))
    return math.log(sum(map(math.exp, terms)))


@pytest.mark.parametrize("model", [branch, reduction, product, thinning])
def test_what_a_switch_turns_on_is_scored_right(model: Callable[..., Any]) -> None:
    """Branches on values, reductions over states, products that do not vectorise, supports that depend on latents."""
    guide, elbo = AutoTruncated(model, num_states=64), Truncated_ELBO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VectorizationWarning)
        for is_on in (False, True, False):
            assert elbo.loss(model, guide, Y, on=is_on) == pytest.approx(-evidence(model, on=is_on), rel=1e-10)


@dataclasses.dataclass
class Options:
    """Switches in one argument."""

    is_on: bool


class Link(torch.nn.Module):
    """A function whose switch is an attribute."""

    def __init__(self, *, is_on: bool) -> None:
        super().__init__()
        self.is_on = is_on


@pytest.mark.parametrize("kind", [Options, Link])
def test_switches_that_an_argument_holds(kind: Callable[..., Any]) -> None:
    def model(y: Tensor, options: Any) -> None:
        branch(y, on=options.is_on)

    guide, elbo = AutoTruncated(model, num_states=3), Truncated_ELBO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VectorizationWarning)
        for is_on in (False, True):
            assert elbo.loss(model, guide, Y, kind(is_on=is_on)) == pytest.approx(-evidence(branch, on=is_on), rel=1e-10)


def test_values_that_python_reads_later_are_refused_where_nodes_have_sets() -> None:
    def model(y: Tensor, *, on: bool = False) -> None:
        a, b = (pyro.sample(name, dist.Categorical(torch.ones(9, dtype=y.dtype))) for name in ("a", "b"))
        pyro.sample("y", dist.Normal(a + (0.5 if on and (a > 7).any() else 0.0), 1.0), obs=y[0])
        pyro.sample("x", dist.Normal(b.to(y.dtype), 1.0), obs=y[1])

    guide, elbo = AutoTruncated(model, num_states=12), Truncated_ELBO()
    before = elbo.loss(model, guide, Y)
    assert guide.product is not None
    with pytest.raises(ValueError, match=r"another structure .* Python looks at values of \['a'\].*whole_states=True"):
        elbo.loss(model, guide, Y, on=True)
    assert elbo.loss(model, guide, Y) == before


def test_products_that_take_no_sets_later_are_refused() -> None:
    def model(y: Tensor, *, on: bool = False) -> None:
        for name in ("a", "b"):
            s = pyro.sample(name, dist.Bernoulli(torch.full((3,), 0.4, dtype=y.dtype)).to_event(1))
            total = s.reshape(-1, 3).sum(0).sum() if on else s.sum(-1)
            pyro.sample(f"y_{name}", dist.Normal(total, 1.0), obs=y[0])

    guide, elbo = AutoTruncated(model, num_states=8), Truncated_ELBO()
    before = elbo.loss(model, guide, Y)
    assert guide.product is not None
    with pytest.raises(ValueError, match="another structure"):
        elbo.loss(model, guide, Y, on=True)
    assert elbo.loss(model, guide, Y) == before


@pytest.mark.parametrize("kind", ["object", "method", "closure"])
def test_switches_that_the_program_holds(kind: str) -> None:
    holder = Holder()

    def closure(y: Tensor) -> None:
        branch(y, on=is_on)

    is_on = False
    model: Any = {"object": holder, "method": holder.of, "closure": closure}[kind]
    guide, elbo = AutoTruncated(model, num_states=3), Truncated_ELBO()
    assert elbo.loss(model, guide, Y) == pytest.approx(-evidence(branch, on=False), rel=1e-10)
    is_on = holder.is_on = True
    with pytest.warns(VectorizationWarning):
        assert elbo.loss(model, guide, Y) == pytest.approx(-evidence(branch, on=True), rel=1e-10)


def test_a_site_beyond_the_plate_is_refused_by_name() -> None:
    def model(y: Tensor, total: Tensor | None = None) -> None:
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.4 * ONES[0]))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)
        if total is not None:
            pyro.sample("total", dist.Normal(z.sum(-1), 0.5), obs=total)

    guide, elbo = AutoTruncated(model, num_states=2), Truncated_ELBO()
    before = elbo.loss(model, guide, Y)
    with pytest.raises(ValueError, match=r"another structure .* the sites \['total'\] depend on other .* new guide"):
        elbo.loss(model, guide, Y, ONES[0])
    assert elbo.loss(model, guide, Y) == before
    whole = AutoTruncated(model, num_states=4, vectorize=False)
    whole.setup(Y, ONES[0])
    terms = []
    for z in itertools.product((0.0, 1.0), repeat=2):
        states = torch.tensor(z, dtype=Y.dtype)
        log_likelihood = float(dist.Normal(states, 1.0).log_prob(Y).sum() + dist.Normal(states.sum(), 0.5).log_prob(ONES[0]))
        terms.append(0.4 ** sum(z) * 0.6 ** (2 - sum(z)) * math.exp(log_likelihood))
    assert elbo.loss(model, whole, Y, ONES[0]) == pytest.approx(-math.log(sum(terms)), rel=1e-10)


def test_wider_supports_are_refused_by_name() -> None:
    def model(y: Tensor, more: int = 0) -> None:
        total = pyro.sample("total", dist.Binomial(3 * ONES[0], 0.5))
        part = pyro.sample("part", dist.Binomial(total + more, 0.5))
        pyro.sample("y", dist.Normal(part, 1.0), obs=y[0])

    guide, elbo = AutoTruncated(model, num_states=64), Truncated_ELBO()
    elbo.loss(model, guide, Y)
    with pytest.raises(ValueError, match=r"'part'.* now has values in 0 \.\. 5, but 0 \.\. 3"):
        elbo.loss(model, guide, Y, 2)


def test_chains_that_depend_on_more_in_later_calls() -> None:
    """A second sequence of observations counts, also if the first call had it not."""

    def model(y: Tensor, other: Tensor | None = None) -> None:
        switch = torch.tensor([[0.8, 0.2], [0.3, 0.7]], dtype=y.dtype)
        with pyro.plate("sequences", 1):
            s = pyro.sample("s", BinaryChains(torch.full((2,), 0.4, dtype=y.dtype), switch.repeat(2, 1, 1), 2))
            pyro.sample("y", dist.Normal(s.sum(-1), 1.0).to_event(1), obs=y.unsqueeze(0))
            if other is not None:
                pyro.sample("other", dist.Normal(s[..., 0] - s[..., 1], 1.0).to_event(1), obs=other.unsqueeze(0))

    def exact(with_other: bool) -> float:
        switch, terms = [[0.8, 0.2], [0.3, 0.7]], []
        for path in itertools.product((0, 1), repeat=4):
            steps = [path[:2], path[2:]]
            log = math.log(math.prod((0.4 if a else 0.6) * switch[a][b] for a, b in zip(*steps, strict=True)))
            for t, (a, b) in enumerate(steps):
                means = [a + b] + [a - b] * with_other
                log += sum(float(dist.Normal(mean * ONES[0], 1.0).log_prob(Y[t])) for mean in means)
            terms.append(math.exp(log))
        return math.log(sum(terms))

    guide, elbo = AutoTruncated(model, num_states=4), Truncated_ELBO()
    assert elbo.loss(model, guide, Y) == pytest.approx(-exact(False), rel=1e-10)
    assert elbo.loss(model, guide, Y, Y) == pytest.approx(-exact(True), rel=1e-10)
    assert elbo.loss(model, guide, Y) == pytest.approx(-exact(False), rel=1e-10)


@pytest.mark.parametrize("num_values", [3, 12])
def test_minibatches_below_a_shared_latent_are_told(num_values: int) -> None:
    """Populations of whole states, and of sets; all members in place of a minibatch need no word."""
    uniform = torch.full((num_values,), 1.0 / num_values, dtype=Y.dtype)

    def model(y: Tensor, batch_size: int | None = None) -> None:
        k, other = (pyro.sample(name, dist.Categorical(uniform)) for name in ("k", "other"))
        with pyro.plate("data", len(y), subsample_size=batch_size) as index:
            pyro.sample("y", dist.Normal(k.to(y.dtype), 1.0), obs=y[index])
        pyro.sample("x", dist.Normal(other.to(y.dtype), 1.0), obs=y[0])

    guide, elbo = AutoTruncated(model, num_states=12), Truncated_ELBO()
    values = torch.arange(num_values, dtype=Y.dtype)
    log_probs = [dist.Normal(values, 1.0).log_prob(y) for y in Y]
    evidence = sum(float(terms.logsumexp(0)) - math.log(num_values) for terms in (log_probs[0] + log_probs[1], log_probs[0]))
    assert elbo.loss(model, guide, Y) == pytest.approx(-evidence, rel=1e-10)
    assert (guide.product is None) == (num_values == 3)
    for told in (guide, AutoTruncated(model, num_states=12)):
        with pytest.warns(UserWarning, match="site 'y' lies in the subsampled plate 'data' and depends on discrete latents outside"):
            elbo.loss(model, told, Y, 1)


@pytest.mark.parametrize("dtype", ["<f8", ">f8", "longdouble"])
def test_arguments_that_are_no_tensors_stay_as_they_are(dtype: str) -> None:
    """NumPy's numbers in any order of bytes and entries, and variables of a closure that have no value."""

    def model(y: np.ndarray, again: bool = False) -> None:
        if again:
            unset()
        mixture(torch.tensor(np.ascontiguousarray(y).astype("=f8")))

    def mixture(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(torch.full((), 0.4, dtype=y.dtype)))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    values = Y.numpy().astype(dtype)[::-1]
    values.flags.writeable = False
    expected = sum(math.log(sum(p * math.exp(float(dist.Normal(z, 1.0).log_prob(y))) for z, p in ((0.0, 0.6), (1.0, 0.4)))) for y in Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Truncated_ELBO().loss(model, AutoTruncated(model, num_states=2), values) == pytest.approx(-expected, rel=1e-10)
    if not values.size:
        unset = print


class Keeper:
    """A program that keeps what it has computed, and tensors of all kinds."""

    def __init__(self) -> None:
        ones = torch.ones(2)
        self.kept = [ones.to_sparse(), ones.to("meta"), ones.bfloat16(), ones + 1j, (ones + 1j).conj().imag]
        self.kept += [torch.nested.nested_tensor([ones, ones[:1]], layout=torch.jagged), torch.nn.parameter.UninitializedBuffer()]
        self.own, self.words = self, np.array(["a", None], dtype=object)

    def __call__(self, y: Tensor) -> None:
        """Which entries are computed by ``vmap``."""
        self.state = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.4, dtype=y.dtype)).to_event(1))
        self.first, self.mean = self.state[0], DESIGN @ self.state
        pyro.sample("y", dist.Normal(self.mean, 1.0).to_event(1), obs=y[:1].expand(3))


@pytest.mark.filterwarnings("ignore::pyro_truncated.VectorizationWarning")
def test_what_a_program_keeps_is_no_matter() -> None:
    model = Keeper()
    guide, elbo = AutoTruncated(model, num_states=8), Truncated_ELBO()
    for _ in range(3):
        assert elbo.loss(model, guide, Y) == pytest.approx(-evidence(product, on=True), rel=1e-10)


@pytest.mark.parametrize("way", [lambda z: torch.as_tensor(2.0 * z.numpy()), torch.vmap(lambda z: 2.0 * z)], ids=["NumPy", "vmap"])
def test_sites_outside_of_plates_where_a_later_call_cannot_be_followed(way: Callable[[Tensor], Tensor]) -> None:
    def model(y: Tensor, way: Callable[[Tensor], Tensor]) -> None:
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(torch.full((), 0.4, dtype=y.dtype)))
            pyro.sample("y", dist.Normal(way(z), 1.0), obs=y)
        pyro.sample("w", dist.Normal(y.new_zeros(()), 1.0), obs=y[0])

    guide, elbo = AutoTruncated(model, num_states=2), Truncated_ELBO()
    first = elbo.loss(model, guide, Y, lambda z: 2.0 * z)
    assert elbo.loss(model, guide, Y, way) == pytest.approx(first, rel=1e-12)


def test_a_look_at_a_later_call_draws_nothing() -> None:
    """A resumed run draws what an uninterrupted one does."""

    def model(y: Tensor, step: int) -> None:
        with pyro.plate("data", len(y), subsample_size=1) as index:
            z = pyro.sample("z", dist.Bernoulli(torch.full((), 0.4, dtype=y.dtype)))
            pyro.sample("y", dist.Normal(z, 1.0 + 0.1 * step), obs=y[index])

    guide, other, elbo = AutoTruncated(model, num_states=2), AutoTruncated(model, num_states=2), Truncated_ELBO()
    guide.setup(Y, 1)
    other.setup(Y, 2)
    losses = []
    for one in (guide, other):
        pyro.set_rng_seed(0)
        losses.append([elbo.loss(model, one, Y, step) for step in (2, 2, 2)])
    assert losses[0] == losses[1]


def test_counts_that_list_their_values() -> None:
    class Listed(dist.Geometric):
        has_enumerate_support = True

    def model(y: Tensor) -> None:
        k = pyro.sample("k", Listed(torch.full((), 0.5, dtype=y.dtype)))
        pyro.sample("y", dist.Normal(k, 1.0), obs=y[0])

    terms = [0.5 ** (k + 1) * math.exp(float(dist.Normal(float(k), 1.0).log_prob(Y[0]))) for k in range(21)]
    loss = Truncated_ELBO().loss(model, AutoTruncated(model, max_count=20, num_states=21), Y)
    assert loss == pytest.approx(-math.log(sum(terms)), rel=1e-6)


@pytest.mark.parametrize("num_steps", [3, 7])
def test_sequences_of_another_length_are_new_data(num_steps: int) -> None:
    def model(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            z = torch.zeros((), dtype=y.dtype)
            for t in range(y.shape[1]):
                z = pyro.sample(f"z_{t}", dist.Bernoulli(0.2 + 0.6 * z))
                pyro.sample(f"y_{t}", dist.Normal(z, 1.0), obs=y[:, t])

    guide, elbo = AutoTruncated(model, num_states=2), Truncated_ELBO()
    elbo.loss(model, guide, torch.ones(3, 5, dtype=torch.float64))
    y = torch.arange(3.0 * num_steps, dtype=torch.float64).view(3, num_steps).cos()
    with pytest.raises(ValueError, match=r"data of another shape take guide\.infer\(data\)"):
        elbo.loss(model, guide, y)
    exact = TraceEnum_ELBO(max_plate_nesting=1).loss(config_enumerate(model), lambda y: None, y)
    assert elbo.loss(model, guide.infer(y), y) == pytest.approx(exact, rel=1e-12)


def test_flags_in_ever_new_combinations_are_looked_at_for_a_while() -> None:
    """Of 4096 combinations of flags nearly each call has another one: a later call runs the program as often as one with known flags."""
    runs = 0

    def model(y: Tensor, flags: Tensor) -> None:
        nonlocal runs
        runs += 1
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(4, dtype=y.dtype)))
            pyro.sample("y", dist.Normal(z + flags.sum(-1), 1.0), obs=y)

    guide, elbo, generator = AutoTruncated(model, num_states=4), Truncated_ELBO(), torch.Generator().manual_seed(0)
    y, numbers = torch.randn(15, dtype=torch.float64, generator=generator), []
    for _ in range(60):
        flags = torch.randint(2, (12,), generator=generator).to(y).expand(15, 12)
        before = runs
        for _ in range(2):
            elbo.loss(model, guide, y, flags)
            numbers.append(runs - before)
            before = runs
    assert numbers[-40::2] == numbers[-39::2] == [numbers[-1]] * 20
