"""Holds the guide on a random model against brute force."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer import TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.search import ConditionalSearch, Preselection, Search, Singletons
from tests.foreign import Foreign
from tests.foreign.enumeration import Enumeration
from tests.foreign.harness import brute_force, difference, loss_and_gradients, marginal_error
from tests.foreign.random_models import Program

SEARCHES: dict[str, Callable[[], Search]] = {
    "exhaustive": ExhaustiveSearch,
    "evolutionary": lambda: EvolutionarySearch(2, 2),
    "preselection": lambda: Preselection(Singletons(), 2, explore=0.3),
    "conditional": lambda: ConditionalSearch(8),
}
_PARTS = {part.__name__: part for part in (AutoDelta, AutoNormal)}
_SEED = 11


@dataclasses.dataclass(frozen=True)
class Finding:
    """Largest differences from brute force.

    Attributes:
        loss: of the loss with all states, with and without gradients, by ``Truncated_ELBO``.
        stock: of Pyro's ``TraceEnum_ELBO``, where it can enumerate the model.
        gradient: of the gradient in any parameter, of model or guide.
        marginals: of the posterior marginals.
        bound: of the loss with half of the states, found by a search, from the brute force over these very states.
        excess: by how much that bound exceeds the evidence.
        states: number of joint states.
    """

    loss: float
    stock: float
    gradient: float
    marginals: float
    bound: float
    excess: float
    states: int

    @property
    def worst(self) -> float:
        """The largest of them."""
        return max(self.loss, self.stock, self.gradient, self.marginals, self.bound, self.excess)


class Reference:
    """Brute force for the draws that a seed makes: of continuous latents by a guide, of data points by the model."""

    def __init__(self, program: Program, case: Foreign, guide: Any) -> None:
        self.program, self.case, self.guide = program, case, guide
        self.given, self.log_density = self._drawn()
        self._known: dict[tuple[int, ...], Enumeration] = {}

    def _drawn(self) -> tuple[dict[str, Tensor], Tensor]:
        """Values of the continuous latents for that seed, and their log density."""
        if isinstance(self.guide, AutoTruncated):
            return {}, torch.zeros(())
        pyro.set_rng_seed(_SEED)
        with poutine.block(hide_fn=lambda msg: msg["type"] != "param"):
            self.guide._create_plates()
            trace = poutine.trace(self.guide[0]).get_trace()
        return {"shift": trace.nodes["shift"]["value"]}, trace.log_prob_sum()

    def selection(self) -> Tensor | None:
        """The data points of the last run, or those that the model is given."""
        return self.program.seen[-1] if self.program.is_minibatch else self.case.indices

    def exact(self, selection: Tensor | None) -> Enumeration:
        """All states of these data points, differentiable."""
        selected = {"data": selection} if self.program.is_minibatch else {}
        key = tuple(selection.tolist()) if self.program.is_minibatch and selection is not None else ()
        if key not in self._known:
            self._known[key] = brute_force(self.case, self.given | selected)
        return self._known[key]

    def error(self, loss: float) -> float:
        """How far a loss is from that of all states, with the data points of the last run."""
        return abs(loss + float((self.exact(self.selection()).evidence() - self.log_density).detach()))

    def loss_and_grads(self, selection: Tensor | None) -> float:
        """The loss of all states, with gradients left behind."""
        objective = self.exact(selection).evidence() - self.log_density
        if objective.requires_grad:
            (-objective).backward(retain_graph=True)
        return -float(objective.detach())


@contextlib.contextmanager
def seeded(seed: int, dtype: torch.dtype) -> Iterator[None]:
    """A default precision, an empty parameter store and a seed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check(program: Program) -> Finding:
    """Loss, gradients and marginals with all states, and the bound of half of them after a search."""
    case, search = program.foreign(), SEARCHES[program.search]()
    guide, objective, stock = _guide(program, case), Truncated_ELBO(search), TraceEnum_ELBO()
    can_enumerate = program.style is None and program.vectorize is not False
    # The first call sets the guide up; that of an ELBO looks at the plates, and draws for that.
    objective.loss(case.model, guide)
    if can_enumerate and (program.is_minibatch or not isinstance(guide, AutoTruncated)):
        stock.loss(case.model, guide)
    reference = Reference(program, case, guide)
    loss, gradients = loss_and_gradients(lambda: _seeded(objective.loss_and_grads, case, guide))
    selection = reference.selection()
    # Averages over draws are those of no single one.
    is_comparable = program.part == "AutoDelta" or isinstance(guide, AutoTruncated)
    found = _part(guide).marginals(selection) if is_comparable else {}
    expected, expected_gradients = loss_and_gradients(lambda: reference.loss_and_grads(selection))
    exact = reference.exact(selection)
    error = max(abs(loss - expected), reference.error(_seeded(objective.loss, case, guide)))
    stock_error = reference.error(_seeded(stock.loss, case, guide)) if can_enumerate else 0.0
    differences = [difference(gradients.get(name), value) for name, value in expected_gradients.items()]
    marginals = [marginal_error(found[name], value) for name, value in exact.marginals().items() if found]
    bound, excess = _bound(case, reference, search)
    return Finding(error, stock_error, max([0.0, *differences]), max([0.0, *marginals]), bound, excess, len(exact.states))


def _guide(program: Program, case: Foreign) -> Any:
    truncated = AutoTruncated(case.model, 10**6, max_count=case.max_count, **case.options)
    if program.continuous in (None, "collapsed"):
        return truncated
    guide = AutoGuideList(case.model)
    guide.append(_PARTS[program.part](poutine.block(case.model, expose_fn=lambda msg: msg["name"].startswith("shift"))))
    guide.append(truncated)
    return guide


def _part(guide: Any) -> AutoTruncated:
    part = guide if isinstance(guide, AutoTruncated) else guide[-1]
    assert isinstance(part, AutoTruncated)
    return part


def _seeded(evaluate: Callable[..., float], case: Foreign, guide: Any) -> float:
    pyro.set_rng_seed(_SEED)
    return float(evaluate(case.model, guide))


def _bound(case: Foreign, reference: Reference, search: Search) -> tuple[float, float]:
    """How far the bound of half of the states is from the brute force over them, and above the evidence."""
    given = {name: value.detach() for name, value in reference.given.items()}
    # Conditioning keeps the densities of the continuous latents in the bound.
    model = poutine.condition(case.model, data=given) if given else case.model
    size = max(1, _part(reference.guide).words.shape[1] // 2)
    guide = AutoTruncated(model, size, max_count=case.max_count, whole_states=True, **case.options)
    objective = Truncated_ELBO(search)
    try:
        loss = float(objective.loss_and_grads(model, guide))
    except ValueError as error:
        if "probability zero" not in str(error):
            raise
        loss = math.inf
    with torch.no_grad():
        exact = reference.exact(reference.selection())
        bound = float(_evidence_of(exact, guide.states(reference.selection())))
        if loss == math.inf:
            # Refused: rightly, if some data point has no possible state among those that the search has found.
            return (0.0 if bound == -math.inf else math.inf), 0.0
        excess = max(0.0, -loss - float(exact.evidence()))
        # What a mask switches off has one value, and loses no mass of its prior.
        return (0.0 if guide.make_batch().scorer.idle else abs(-loss - bound) / max(1.0, abs(bound))), excess


def _evidence_of(exact: Enumeration, kept: Mapping[str, Tensor]) -> Tensor:
    """Scaled log evidence of some states of every data point, ``(N, S, *shape)`` by site."""
    tables = {name: torch.stack([state[name].value.flatten() for state in exact.states]).double() for name in kept}
    rows = [value.reshape(*value.shape[:2], 1, -1).double() == tables[name] for name, value in kept.items()]
    is_kept = functools.reduce(torch.logical_and, [row.all(-1) for row in rows]).any(1)
    log_joint = torch.where(is_kept.T, exact.log_joint, -math.inf)
    return exact.scale * log_joint.logsumexp(0).sum() + exact.outside
