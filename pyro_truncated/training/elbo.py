"""Truncated_ELBO: search for better states, then the exact free energy of the populations and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer import ELBO, TraceEnum_ELBO
from pyro.infer.elbo import ELBOModule
from pyro.util import warn_if_nan
from torch import Tensor

from pyro_truncated.em.closed_form import ClosedForm, Statistics
from pyro_truncated.guide.auto_truncated import AutoTruncated, Searching
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.probe import AllObservedError
from pyro_truncated.program.sites import sample_nodes
from pyro_truncated.program.subsampling import SparseSubsamples
from pyro_truncated.search.automatic import AutomaticSearch
from pyro_truncated.search.base import Search
from pyro_truncated.states.population import Population
from pyro_truncated.training.given_draws import free_energy_given_draws
from pyro_truncated.utils.counts import check_counts
from pyro_truncated.utils.isolation import spare_random_numbers
from pyro_truncated.utils.representation import Described
from pyro_truncated.utils.shadowing import refuse_shadowed

_NO_PART = "Truncated_ELBO needs a guide with an AutoTruncated part; for other guides use Pyro's own ELBOs"
_PYRO_SAYS = (
    "packing tensors",
    "max_plate_nesting",
    "nvalid log_prob shape",
    "Shape mismatch inside plate",
    "enumerat",
    "must match the size of",
)
Temperature = float | Callable[[int], float]


class Truncated_ELBO(Described, ELBO):
    r"""Searches the populations of :class:`~pyro_truncated.AutoTruncated` guides, then evaluates the free energy and its gradient.

    .. math:: \mathcal F = \sum_n \log \sum_{s \in K_n} p(s, y_n), \qquad
              \nabla \mathcal F = \sum_n \sum_{s \in K_n} q_n(s) \nabla \log p(s, y_n).

    The loss is :math:`-\mathcal F`, scaled as Pyro scales subsampled plates. ``loss`` (and ``SVI.evaluate_loss``) never changes
    populations; ``loss_and_grads`` (``SVI.step``) and ``differentiable_loss`` under enabled gradients search first. Where the guide has
    other parts (continuous latents beside the discrete ones), the search scores states given draws of these, and loss and gradient are
    those of the stock :class:`~pyro.infer.TraceEnum_ELBO` for the very same draws; for models that do not take many states at once (see
    ``vectorize`` of the guide) they are computed from these draws directly, which have to be reparametrised.

    With a model that :class:`~pyro_truncated.ClosedForm` drives, no gradient is taken: the expected sufficient statistics are collected
    for its M-step.

    Args:
        search: proposes states; default: an :class:`~pyro_truncated.search.AutomaticSearch`, which scores all states of small spaces and
            searches others by their full conditionals. It says in one line what it chose, and so does the ``repr`` of this object.
        search_steps: search steps before each evaluation.
        search_every: evaluations per round of search (1: before each).
        temperature: :math:`\tau \ge 1`, a number or a function of the step ``t = 0, 1, ...``: the M-step or gradient uses
            :math:`q \propto p^{1/\tau}` (annealing). The loss reported is always that of :math:`\tau = 1`.
        **kwargs: what :class:`pyro.infer.ELBO` takes.

    Raises:
        TypeError: if ``search`` is no search, or the guide holds no ``AutoTruncated``.
        ValueError: for a step count below 1 or a temperature below 1.
    """

    def __init__(
        self, search: Search | None = None, *, search_steps: int = 1, search_every: int = 1, temperature: Temperature = 1.0, **kwargs: Any
    ) -> None:
        search = AutomaticSearch() if search is None else search
        if not isinstance(search, Search):
            raise TypeError(f"search must be a pyro_truncated search, such as EvolutionarySearch(); got {type(search).__name__}")
        search_steps, search_every = check_counts(search_steps=search_steps, search_every=search_every)
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.search = search
        self.search_steps = search_steps
        self.search_every = search_every
        self.temperature = temperature
        self.num_evaluations = 0
        # Where labels leave nothing to enumerate, that is no mistake.
        self._stock = TraceEnum_ELBO(**{"strict_enumeration_warning": False, **kwargs})
        self._revision: int | None = None
        self._known_guide: Any = None
        self._known_parts: tuple[Any, list[AutoTruncated]] | None = None

    # --- what Pyro calls ---

    def __call__(self, model: torch.nn.Module, guide: torch.nn.Module) -> ELBOModule:
        """The module of model and guide: its parameters are theirs, and calling it returns :meth:`differentiable_loss`.

        Populations belong to the data of the process that found them: ``DistributedDataParallel`` leaves these buffers alone, whether it
        broadcasts others or not.
        """
        module = ELBOModule(model, guide, self)
        names = [f"{name}.{buffer}" for name, part in module.named_modules() if isinstance(part, AutoTruncated) for buffer in part.STORED]
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        return module

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the free energy of the populations as they are; nothing changes."""
        alone = _stands_alone(model, guide, args, kwargs)
        if alone:
            with suppress(AllObservedError):
                return self._loss_alone(guide, args, kwargs)
        with SparseSubsamples(), _explained():
            slow = None if alone else self._slow_part(model, guide, args, kwargs)
            if slow is not None:
                with suppress(AllObservedError), torch.no_grad():
                    return _checked(-float(self._mean_given_draws(slow, guide, args, kwargs)))
            return float(self._stock.loss(model, guide, *args, **kwargs))

    def _loss_alone(self, guide: AutoTruncated, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        with torch.no_grad(), poutine.block():
            first = guide.log_joint_of(*args, values=guide.subsamples(*args, **kwargs), **kwargs)
            draws = self._draws(first, guide, args, kwargs)
            free_energy = sum(self._free_energy(guide, log_joint) for log_joint in draws) / self._particles(guide)
        return _checked(-float(free_energy))

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Minus the free energy as a differentiable tensor: what the module ``Truncated_ELBO(search)(model, guide)`` returns when called.

        Populations are searched first if gradients are enabled (training), never under ``torch.no_grad()`` (validation).
        """
        alone = _stands_alone(model, guide, args, kwargs)
        if alone:
            with suppress(AllObservedError):
                return self._differentiable_loss_alone(model, guide, args, kwargs)
        searches = torch.is_grad_enabled() and not alone
        with SparseSubsamples(), _explained(), self._searching(model, guide, args, kwargs) if searches else nullcontext():
            slow = None if alone else self._slow_part(model, guide, args, kwargs)
            if slow is not None:
                with suppress(AllObservedError):
                    return -self._mean_given_draws(slow, guide, args, kwargs)
            return self._stock.differentiable_loss(model, guide, *args, **kwargs)  # type: ignore[no-any-return]

    def _differentiable_loss_alone(self, model: Any, guide: AutoTruncated, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        if torch.is_grad_enabled():
            self._meet(model, guide)
        first = self._searched(guide, args, kwargs, torch.is_grad_enabled() and self._search_is_due())
        loss = -torch.stack([self._free_energy(guide, log_joint) for log_joint in self._draws(first, guide, args, kwargs)]).mean()
        warn_if_nan(loss, "loss")
        return loss

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Searches, then returns minus the free energy and accumulates its gradient (or the statistics of a closed-form M-step)."""
        closed_form = ClosedForm.driving(model)
        alone = _stands_alone(model, guide, args, kwargs)
        if closed_form is not None:
            if not alone:
                raise NotImplementedError(
                    "closed-form M-steps need a guide that is one AutoTruncated; use a gradient optimiser beside other guides"
                )
            self._meet(model, guide)
            return _checked(self._closed_form_step(closed_form, guide, args, kwargs))
        if alone:
            with suppress(AllObservedError):
                return self._step_alone(model, guide, args, kwargs)
        with SparseSubsamples(), _explained(), nullcontext() if alone else self._searching(model, guide, args, kwargs):
            slow = None if alone else self._slow_part(model, guide, args, kwargs)
            if slow is not None:
                with suppress(AllObservedError):
                    return self._backward_given_draws(slow, guide, args, kwargs)
            return float(self._stock.loss_and_grads(model, guide, *args, **kwargs))

    def _step_alone(self, model: Any, guide: AutoTruncated, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        self._meet(model, guide)
        temperature = self._temperature()
        with torch.enable_grad():
            first = self._searched(guide, args, kwargs, self._search_is_due())
        particles = self._particles(guide)
        draws = self._draws(first, guide, args, kwargs)
        return _checked(sum(self._backward(guide, log_joint, temperature, particles) for log_joint in draws) / particles)

    # --- beside other guides, for models that Pyro cannot enumerate ---

    def _slow_part(self, model: Any, guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AutoTruncated | None:
        """The truncated part of a guide if it scores this very model, and Pyro cannot enumerate it in parallel."""
        parts = self._parts(guide, args, kwargs)
        return parts[0] if len(parts) == 1 and not parts[0].is_enumerable and bool(model == parts[0].model) else None

    def _parts(self, guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[AutoTruncated]:
        """The truncated parts of a guide, which is run once to find them."""
        if self._known_parts is None or self._known_parts[0] is not guide:
            with spare_random_numbers(), poutine.block(), torch.no_grad():
                self._known_parts = guide, _marked_parts(poutine.trace(guide).get_trace(*args, **kwargs))
        return self._known_parts[1]

    def _mean_given_draws(self, part: AutoTruncated, guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        draws = [free_energy_given_draws(part, guide, args, kwargs) for _ in range(self.num_particles)]
        return torch.stack(draws).mean()

    def _backward_given_draws(self, part: AutoTruncated, guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        total = 0.0
        for _ in range(self.num_particles):
            loss = -free_energy_given_draws(part, guide, args, kwargs) / self.num_particles
            if loss.requires_grad:
                loss.backward()
            total += float(loss.detach())
        return _checked(total)

    def _draws(self, first: LogJoint, guide: AutoTruncated, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[LogJoint]:
        """One scorer per particle, of the same data points, each with its own draws of other latents."""
        yield first
        for _ in range(self._particles(guide) - 1):
            with torch.set_grad_enabled(first.takes_gradients):
                log_joint = guide.log_joint_of(*args, values=first.subsamples, **kwargs)
            yield log_joint

    def _particles(self, guide: AutoTruncated) -> int:
        """Without other latents the free energy is exact, and one particle as good as many."""
        return self.num_particles if guide.layout.other_latents else 1

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        return self._stock._get_trace(model, guide, args, kwargs)

    # --- the E-step ---

    def _meet(self, model: Any, guide: Any) -> None:
        """Before a guide is trained for the first time, and once it has been set up."""
        if self._known_guide is not guide:
            refuse_shadowed(model, guide, training=True)
            self._known_guide = guide

    def _temperature(self) -> float:
        value = self.temperature(self.num_evaluations) if callable(self.temperature) else self.temperature
        if not value >= 1.0:
            raise ValueError(f"temperature must be at least 1; got {value}")
        return float(value)

    def _search_is_due(self) -> bool:
        due = self.num_evaluations % self.search_every == 0
        self.num_evaluations += 1
        return due

    def _searched(self, guide: AutoTruncated, args: tuple[Any, ...], kwargs: Mapping[str, Any], search: bool) -> LogJoint:
        """The scorer, of the same run of the model, for the search in a guide that stands alone (if one is due) and for the loss."""
        log_joint = guide.log_joint_of(*args, values=guide.subsamples(*args, **kwargs), **kwargs)
        if search:
            with poutine.block():
                guide.search_(self.search, log_joint, self.search_steps)
        return log_joint

    def _searching(self, model: Any, guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Lets the truncated part of a guide search when it next runs: for the very minibatch and draws of other latents the loss is of."""
        if self._temperature() != 1.0:
            raise NotImplementedError("a temperature needs a guide that is one AutoTruncated; beside other guides train without")
        with spare_random_numbers():
            if self._known_guide is not guide:
                refuse_shadowed(model, guide)
            if not self._parts(guide, args, kwargs):
                raise TypeError(_NO_PART)
            self._meet(model, guide)
            if self._slow_part(model, guide, args, kwargs) is None and self._stock.max_plate_nesting == math.inf:
                self._stock._guess_max_plate_nesting(model, guide, args, kwargs)
                with poutine.block(), torch.no_grad():
                    nodes = sample_nodes(poutine.trace(model).get_trace(*args, **kwargs))
                self._stock.max_plate_nesting = _room_for_events(nodes, self._stock.max_plate_nesting)
        return Searching(self.search, self.search_steps) if self._search_is_due() else nullcontext()

    # --- the free energy of a guide that stands alone ---

    def _free_energy(self, guide: AutoTruncated, log_joint: LogJoint) -> Tensor:
        population = guide.population_of(log_joint)
        blocks = [
            log_joint.score(population.words[rows], rows).double().logsumexp(-1).sum() for rows in log_joint.row_blocks(guide.num_states)
        ]
        return log_joint.scale * torch.stack(blocks).sum() + log_joint.outside()

    def _backward(self, guide: AutoTruncated, log_joint: LogJoint, temperature: float, particles: int) -> float:
        """One block of states at a time: the gradient is a weighted sum, so the graphs of all states need never exist together."""
        if guide.conditional is not None:
            return self._backward_whole(guide, log_joint, temperature, particles)
        population = guide.population_of(log_joint)
        blocks = list(log_joint.gradient_blocks(guide.num_states))
        # Weights need all states of a data point: where a block has them, it is scored once for weights and gradient.
        complete = all(states == slice(None) for _, states in blocks)
        with torch.no_grad():
            known = [] if complete else [guide.rescored(log_joint).log_joint]
        with torch.enable_grad():
            outside = log_joint.outside()
            if outside.requires_grad:
                (-outside / particles).backward(retain_graph=True)
            for rows, states in blocks:
                scores = log_joint.score(population.words[rows, states], rows)
                if complete:
                    known.append(scores.detach())
                weights = ((known[-1] / temperature).softmax(-1) * (log_joint.scale / particles))[:, states]
                # States of probability zero have weight zero but an infinite score.
                weighted = torch.where(weights > 0, weights * scores, 0.0)
                if weighted.requires_grad:
                    (-weighted.sum()).backward(retain_graph=True)
        population = guide.store_(torch.cat(known), log_joint.indices, population.words if log_joint.observed else None)
        return -float(log_joint.scale * population.free_energy().sum() + outside.detach())

    def _backward_whole(self, guide: AutoTruncated, log_joint: LogJoint, temperature: float, particles: int) -> float:
        """With a conditional, the draws that score the states must be the ones that are differentiated."""
        with torch.enable_grad():
            population = guide.population_of(log_joint)
            scores = log_joint.score(population.words)
            outside = log_joint.outside()
            objective = temperature * (scores / temperature).logsumexp(-1).sum() * log_joint.scale + outside
            if objective.requires_grad:
                (-objective / particles).backward()
        population = guide.store_(scores.detach(), log_joint.indices, population.words if log_joint.observed else None)
        return -float(log_joint.scale * population.free_energy().sum() + outside.detach())

    # --- closed form ---

    @torch.no_grad()
    def _closed_form_step(self, closed_form: ClosedForm, guide: AutoTruncated, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        temperature = self._temperature()
        with poutine.block():
            log_joint = guide.log_joint_of(*args, values=guide.subsamples(*args, **kwargs), **kwargs)
            if self._revision is not None and self._revision != guide.revision and closed_form.visited is not None:
                # Somebody else scored or searched: what will be subtracted must be what is in the sums.
                visited = closed_form.visited.nonzero().squeeze(-1).to(guide.words.device)
                closed_form.statistics = self._statistics(closed_form, guide.population(visited), temperature, args, kwargs)
            before = guide.population(log_joint.indices)
            previous = closed_form.previous(before, log_joint.full_size)
            if previous is not None and callable(self.temperature):
                raise ValueError("incremental minibatches cannot follow a changing temperature; use ClosedForm(model, minibatch='online')")
            old = None if previous is None else self._statistics(closed_form, previous, temperature, args, kwargs)
            if self.num_evaluations % self.search_every == 0:
                population = guide.search_(self.search, log_joint, self.search_steps)
            else:
                population = guide.store_(guide.rescored(log_joint).log_joint, log_joint.indices)
            self.num_evaluations += 1
            self._revision = guide.revision
            new = self._statistics(closed_form, population, temperature, args, kwargs)
            closed_form.collect(new, old, log_joint.indices, log_joint.full_size)
        return -float(log_joint.scale * population.free_energy().sum() + log_joint.outside())

    def _statistics(
        self, closed_form: ClosedForm, population: Population, temperature: float, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Statistics:
        """Sufficient statistics, taken over blocks of data points one after the other where they add up."""
        model = closed_form.model
        rows = len(population)
        if getattr(model, "statistics_are_additive", True):
            rows = max(1, 2**22 // population.num_states)
        total: Statistics = {}
        for block in population.split(rows):
            part = model.sufficient_statistics(block, *args, temperature=temperature, **kwargs)
            total = {name: total[name] + value for name, value in part.items()} if total else part
        return total


@contextmanager
def _explained() -> Iterator[None]:
    """Says what to do where Pyro's own ELBO cannot enumerate what is scored without trouble."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if isinstance(error, NotImplementedError) or not any(hint in str(error) for hint in _PYRO_SAYS):
            raise
        error.add_note(
            "Beside other guides Truncated_ELBO leaves the loss to Pyro's TraceEnum_ELBO, which enumerates the states in a dimension left "
            "of all plates. If max_plate_nesting does not count all plates (Truncated_ELBO(search, max_plate_nesting=...)), set it; if the "
            "model does not take such a dimension, AutoTruncated(model, ..., vectorize=False) scores one state after the other."
        )
        raise


def _room_for_events(nodes: Mapping[str, Any], nesting: int) -> int:
    """A plate nesting with which Pyro compares model and guide rightly: at least the one given.

    ``pyro.util.check_model_guide_match`` cuts the shape of a site, from ``len(shape) - max_plate_nesting - event_dim`` on, as soon as it is
    longer than ``max_plate_nesting``. Where the site lies in fewer plates than there are that start is negative, counts from the right, and
    the model's shape loses dimensions that the guide's, made longer by enumeration, keeps. The start should be ``max(0, ...)``.
    """
    sizes = [(len(node["fn"].batch_shape), node["fn"].event_dim) for node in nodes.values() if not node["is_observed"]]
    for depth, event_dim in sorted(sizes, key=sum):
        if depth < nesting < depth + event_dim:
            nesting = depth + event_dim
    return nesting


def truncated_parts(trace: poutine.Trace) -> list[AutoTruncated]:
    """The truncated guides that took part in a guide trace; they announce themselves at their index sites."""
    parts = _marked_parts(trace)
    if not parts:
        raise TypeError(_NO_PART)
    return parts


def _marked_parts(trace: poutine.Trace) -> list[AutoTruncated]:
    marks: list[Any] = [node["infer"].get("truncated") for node in sample_nodes(trace).values()]
    return [mark["guide"]() for mark in marks if mark is not None]


def _stands_alone(model: Any, guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the guide is one AutoTruncated outside of any list, of this very model (and not of one that a handler changes)."""
    if not isinstance(guide, AutoTruncated):
        return False
    guide.setup(*args, **kwargs)
    return guide._siblings is None and bool(model == guide.model)


def _checked(loss: float) -> float:
    warn_if_nan(loss, "loss")  # type: ignore[call-overload]
    return loss
