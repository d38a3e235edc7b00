"""Structured programs: a registry of models whose factor graph has many nodes, and their brute force in one run of the model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer import SVI, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList
from pyro.optim import Adam
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.program.supports import get_support, possible_values, value_bounds
from tests.foreign.harness import difference, loss_and_gradients

# Largest number of joint states that the brute force takes, and states that nodes keep by default: all that these have.
_MAX_JOINT = 2**17
_FULL = 8


@dataclasses.dataclass(frozen=True)
class Structured:
    """A program with many nodes, and what is known of it.

    Attributes:
        model: the Pyro model.
        args: its arguments.
        full: a number of states at which all sets are full.
        truncated: a number of states at which the bound is within 0.05 nats after a moderate search, if there is one.
        max_count: upper bounds of count sites.
        part: the guide of continuous latents.
        nodes: the number of nodes, ``None`` where the graph may choose.
        reference: what the brute force runs, default the model.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    full: int = _FULL
    truncated: int | None = None
    max_count: Mapping[str, int] | None = None
    part: type = AutoDelta
    nodes: int | None = None
    reference: Callable[..., Any] | None = None


PROGRAMS: dict[str, Callable[[], Structured]] = {}


def structured(make: Callable[[], Structured]) -> Callable[[], Structured]:
    """Registers a function that makes a program; its docstring names the subject."""
    if make.__name__ in PROGRAMS:
        raise ValueError(f"two structured programs are called {make.__name__}")
    PROGRAMS[make.__name__] = make
    return make


@contextlib.contextmanager
def as_first_program(name: str) -> Iterator[Structured]:
    """The program of that name in float64, with an empty parameter store and a seed."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]), pyro.get_param_store().scope():
            pyro.set_rng_seed(sum(map(ord, name)))
            yield PROGRAMS[name]()
    finally:
        torch.set_default_dtype(dtype)


# --- brute force ---


@dataclasses.dataclass(frozen=True)
class Exact:
    """The log joints ``(T,)`` of all joint states of a program, without its scale, and the states ``(T, *batch, *event)`` by site.

    One-hot sites are given by their classes.
    """

    log_joint: Tensor
    outside: Tensor
    scale: float
    values: Mapping[str, Tensor]
    strides: Mapping[str, Tensor]
    booleans: frozenset[str]
    event_dims: Mapping[str, int]

    def evidence(self) -> Tensor:
        """The scaled log evidence."""
        return self.scale * self.log_joint.logsumexp(0) + self.outside

    def weights(self) -> Tensor:
        """The posterior ``(T,)``."""
        return self.log_joint.detach().softmax(0)

    def marginals(self, dims: tuple[int, ...]) -> dict[str, Tensor]:
        """Marginals by site, flat, with some plates in front."""
        found = {}
        for name, value in self.values.items():
            levels = value.double() if name in self.booleans else torch.nn.functional.one_hot(value.long()).double()
            mean = torch.tensordot(self.weights(), levels, 1)
            inner = self.event_dims[name] + (name not in self.booleans)
            places = [dim - inner for dim in dims]
            found[name] = mean.movedim(places, tuple(range(len(places)))) if places else mean
        return found

    def positions(self, states: Mapping[str, Tensor], dims: tuple[int, ...]) -> Tensor:
        """Which joint states some are, ``(B,)``, from values ``(B, N, *site shape)`` with some plates in front."""
        found: Tensor = torch.tensor(0)
        for name, stride in self.strides.items():
            places = [dim - self.event_dims[name] for dim in dims]
            stride = stride.movedim(places, tuple(range(len(places)))) if places else stride
            state = states[name].argmax(-1) if states[name][0].numel() > stride.numel() else states[name]
            levels = state.flatten(1).long() - int(self.values[name].min())
            found = found + (levels * stride.flatten()).sum(1)
        return found


class _Set(poutine.messenger.Messenger):
    """Gives sites their values."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.values and not msg["is_observed"]:
            msg["value"] = self.values[msg["name"]]


def brute_force(case: Structured, given: Mapping[str, Tensor] | None = None) -> Exact:
    """All joint states of a program in one run, in a dimension left of all plates; differentiable in parameters and given values."""
    model = case.reference or case.model
    given = dict(given or {})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        first = _trace(model, case.args, given)
    latents = {
        name: node
        for name, node in first.nodes.items()
        if node["type"] == "sample" and not node["is_observed"] and not site_is_subsample(node) and name not in given
        if get_support(node["fn"]).is_discrete
    }
    frames = [frame for node in first.nodes.values() if node["type"] == "sample" for frame in node["cond_indep_stack"]]
    depth = max((-frame.dim for frame in frames if frame.vectorized), default=0)
    bounds = {name: _bounds(node, case.max_count or {}) for name, node in latents.items()}
    ends = [end for low, high in bounds.values() for end in zip(low.flatten().tolist(), high.flatten().tolist(), strict=True)]
    ranges = [torch.arange(low, high + 1) for low, high in ends]
    count = 1
    for own in ranges:
        count *= len(own)
    assert count <= _MAX_JOINT, f"{count} joint states are too many for the brute force"
    every = torch.cartesian_prod(*ranges).reshape(count, -1)
    sizes = torch.tensor([len(own) for own in ranges])
    steps = torch.cat([sizes[1:], torch.ones(1, dtype=torch.int64)]).flip(0).cumprod(0).flip(0)
    values, strides, start = {}, {}, 0
    for name, node in latents.items():
        size = bounds[name][0].numel()
        shape = bounds[name][0].shape
        levels = every[:, start : start + size].reshape(count, *shape)
        strides[name] = steps[start : start + size].reshape(shape)
        start += size
        values[name] = levels.to(node["value"].dtype)
    spread = {}
    for name, value in values.items():
        fn = latents[name]["fn"]
        if _is_one_hot(fn):
            value = torch.nn.functional.one_hot(value.long(), fn.event_shape[-1]).to(value.dtype)
        batch = value.dim() - 1 - len(fn.event_shape)
        spread[name] = value.reshape(count, *(1,) * (depth - batch), *value.shape[1:])
    trace = _trace(model, case.args, given | spread)
    scale = float(trace.nodes[next(iter(latents))]["scale"])
    inside, outside = torch.zeros(count), torch.zeros(())
    for name, node in trace.nodes.items():
        if node["type"] != "sample" or site_is_subsample(node):
            continue
        log_prob = torch.as_tensor(_log_prob(node))
        if node["mask"] is not None and name not in latents:
            log_prob = torch.where(torch.as_tensor(node["mask"]), log_prob, 0.0)
        if log_prob.dim() > depth and log_prob.shape[0] == count:
            inside = inside + node["scale"] / scale * log_prob.reshape(count, -1).sum(1)
        else:
            outside = outside + node["scale"] * log_prob.sum()
    booleans = frozenset(name for name, node in latents.items() if _is_boolean(node["fn"]))
    event_dims = {name: len(node["fn"].event_shape) - _is_one_hot(node["fn"]) for name, node in latents.items()}
    return Exact(inside, outside, scale, values, strides, booleans, event_dims)


def _trace(model: Any, args: Any, values: Mapping[str, Tensor]) -> Any:
    with pyro.validation_enabled(False), poutine.block(hide_fn=lambda msg: msg["type"] != "param"), _Set(values):
        return poutine.trace(model).get_trace(*args)


def _bounds(node: Any, max_count: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    low, high = value_bounds(node["fn"])
    if node["name"] in max_count:
        high = torch.tensor(max_count[node["name"]])
    shape = node["fn"].batch_shape + node["fn"].event_shape
    shape = shape[: len(shape) - _is_one_hot(node["fn"])]
    return low.expand(shape), high.expand(shape)


def _is_one_hot(fn: Any) -> bool:
    return _support(fn) is torch.distributions.constraints.one_hot


def _is_boolean(fn: Any) -> bool:
    return _support(fn) is torch.distributions.constraints.boolean


def _support(fn: Any) -> Any:
    support = get_support(fn)
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support


@contextlib.contextmanager
def _unchecked(fn: Any) -> Iterator[None]:
    """States that others make impossible are no error."""
    part = fn
    while part is not None:
        part._validate_args = False
        part = getattr(part, "base_dist", None)
    yield


def _log_prob(node: Any) -> Tensor:
    fn, value = node["fn"], node["value"]
    with _unchecked(fn):
        log_prob: Tensor = fn.log_prob(value, *node["args"], **node["kwargs"])
    if get_support(fn) is not None and get_support(fn).is_discrete:
        return torch.where(possible_values(fn, value), log_prob, -torch.inf)
    return log_prob


# --- the guide beside it ---


@dataclasses.dataclass(frozen=True)
class Differences:
    """Largest differences from brute force at full sets, and what is missing at truncated ones.

    Attributes:
        loss: of ``Truncated_ELBO`` with and without gradients.
        stock: of the loss by Pyro's ``TraceEnum_ELBO`` with this guide.
        gradient: of the gradient in any parameter, relative where it is large.
        marginals: of the marginals of all sites.
        mode: nats by which the mode is less probable than the best state.
        draws: standard errors between the mean log joint of draws and its expectation.
        excess: nats by which a bound of 1, 2 or 3 states exceeds the evidence.
        gap: nats that are missing at ``truncated`` states after a search.
        nodes: number of nodes.
    """

    loss: float
    stock: float
    gradient: float
    marginals: float
    mode: float
    draws: float
    excess: float
    gap: float
    nodes: int

    @property
    def worst(self) -> float:
        """The largest difference of what is exact."""
        return max(self.loss, self.stock, self.gradient, self.marginals, self.mode, self.excess)


def guide_for(case: Structured, num_states: int) -> tuple[Any, AutoTruncated]:
    """The guide alone, or behind one for the continuous latents."""
    with poutine.block(), torch.random.fork_rng(devices=[]):
        trace = poutine.trace(case.model).get_trace(*case.args)
    names = [n["name"] for _, n in trace.iter_stochastic_nodes() if not site_is_subsample(n) and not get_support(n["fn"]).is_discrete]
    truncated = AutoTruncated(case.model, num_states, max_count=case.max_count)
    if not names:
        return truncated, truncated
    guide = AutoGuideList(case.model)
    guide.append(case.part(poutine.block(case.model, expose=names)))
    guide.append(truncated)
    return guide, truncated


def continuous_values(case: Structured, guide: Any) -> dict[str, Tensor]:
    """What the guide of the continuous latents draws, differentiable."""
    if isinstance(guide, AutoTruncated):
        return {}
    with poutine.block(hide_fn=lambda msg: msg["type"] != "param"):
        guide._create_plates(*case.args)
        values: dict[str, Tensor] = guide[0](*case.args)
    return values


def search() -> EvolutionarySearch:
    """A moderate search."""
    return EvolutionarySearch(2, 2)


def compare(case: Structured, *, draws: int = 2000) -> Differences:
    """Holds the guide on brute force."""
    guide, truncated = guide_for(case, case.full)
    objective = Truncated_ELBO(search())
    SVI(case.model, guide, Adam({"lr": 0.01}), objective).step(*case.args)
    assert truncated.product is not None, "the program keeps whole states"
    loss, gradients = loss_and_gradients(lambda: float(objective.loss_and_grads(case.model, guide, *case.args)))
    evaluated = float(objective.loss(case.model, guide, *case.args))
    # A joint state is drawn by messages: nothing is left for Pyro to enumerate.
    stock = float(TraceEnum_ELBO(strict_enumeration_warning=False).loss(case.model, guide, *case.args))
    exact: Exact

    def exactly() -> float:
        nonlocal exact
        exact = brute_force(case, continuous_values(case, guide))
        evidence = exact.evidence()
        if evidence.requires_grad:
            (-evidence).backward()
        return -float(evidence.detach())

    expected, expected_gradients = loss_and_gradients(exactly)
    dims = truncated.layout.dims
    marginals = truncated.marginals()
    errors = [float((marginals[name].flatten() - value.flatten()).abs().max()) for name, value in exact.marginals(dims).items()]
    return Differences(
        max(abs(loss - expected), abs(evaluated - expected)),
        abs(stock - expected),
        max([0.0, *(difference(gradients.get(name), value) for name, value in expected_gradients.items())]),
        max(errors),
        _mode_error(exact, truncated, dims),
        _draw_error(exact, truncated, dims, draws) if draws else 0.0,
        _excess(case, guide, expected),
        _gap(case, guide, expected),
        len(truncated.product.graph.nodes),
    )


def _mode_error(exact: Exact, truncated: AutoTruncated, dims: tuple[int, ...]) -> float:
    place = exact.positions({name: value.unsqueeze(0) for name, value in truncated.mode().items()}, dims)[0]
    return float((exact.log_joint.max() - exact.log_joint[place]).detach())


def _draw_error(exact: Exact, truncated: AutoTruncated, dims: tuple[int, ...], number: int) -> float:
    """The mean log joint of draws says whether they are drawn from the joint posterior, not only from the marginals."""
    drawn = truncated.sample_posterior(number)
    log_joint = exact.log_joint.detach()
    places = exact.positions(drawn, dims)
    weights = exact.weights()
    finite = weights > 0
    mean = float((weights[finite] * log_joint[finite]).sum())
    spread = float((weights[finite] * (log_joint[finite] - mean).square()).sum()) ** 0.5
    return abs(float(log_joint[places].mean()) - mean) / max(spread / number**0.5, 1e-9)


def _loss_of(case: Structured, guide: Any, num_states: int, steps: int) -> float:
    """The loss of a guide with other sets, given the same continuous latents."""
    given = {name: value.detach() for name, value in continuous_values(case, guide).items()}
    model = poutine.condition(case.model, data=given) if given else case.model
    smaller = AutoTruncated(model, num_states, max_count=case.max_count)
    objective = Truncated_ELBO(search())
    for _ in range(steps):
        loss = float(objective.loss_and_grads(model, smaller, *case.args))
    return loss


def _excess(case: Structured, guide: Any, expected: float) -> float:
    found = 0.0
    for num_states in (1, 2, 3):
        with contextlib.suppress(ValueError):  # no possible state among so few
            found = max(found, expected - _loss_of(case, guide, num_states, 2))
    return found


def _gap(case: Structured, guide: Any, expected: float) -> float:
    return 0.0 if case.truncated is None else _loss_of(case, guide, case.truncated, 20) - expected
