"""Truncated_ELBO: search, then the exact free energy and its gradient."""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.infer import ELBO, TraceEnum_ELBO
from pyro.infer.elbo import ELBOModule
from pyro.poutine.util import site_is_subsample
from pyro.util import warn_if_nan
from torch import Tensor

from pyro_truncated.distributed import collectives
from pyro_truncated.distributed.shards import current_batch
from pyro_truncated.em.closed_form import ClosedForm, Statistics
from pyro_truncated.em.gibbs import GibbsModel
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.guide.batch import Batch
from pyro_truncated.guide.chain_batch import ChainBatch
from pyro_truncated.guide.given_states import warn_impossible
from pyro_truncated.guide.program import SearchRequest
from pyro_truncated.guide.store import PopulationStore
from pyro_truncated.ops import defer_checks, flush_checks, lazy_values
from pyro_truncated.program.call import Call, CheckedSites
from pyro_truncated.program.inspection import refuse_handlers_around
from pyro_truncated.program.probe import AllObservedError
from pyro_truncated.program.sites import log_density, sample_nodes
from pyro_truncated.program.subsampling import SparseSubsamples
from pyro_truncated.search.automatic import AutomaticSearch
from pyro_truncated.search.base import Search, check_search
from pyro_truncated.states.population import Population
from pyro_truncated.training.data_parallel import (
    broadcast_start,
    divide_loss,
    propagate_errors,
    refuse_local_draws,
    share_draws,
    total,
    total_loss_for_ddp,
)
from pyro_truncated.utils.annealing import Temperature, temperature_at
from pyro_truncated.utils.arguments import check_counts, check_kinds
from pyro_truncated.utils.budget import memory_budget, rows_per_block
from pyro_truncated.utils.console import ReprFromArguments
from pyro_truncated.utils.parameter_store import (
    PrefixStrippingModule,
    isolate,
    refuse_diverged_copies,
    refuse_shadowed_parameters,
    spare_random_numbers,
)
from pyro_truncated.utils.references import Reference


class Truncated_ELBO(ReprFromArguments, ELBO):
    r"""Searches populations, then evaluates the free energy and its gradient.

    It is for :class:`~pyro_truncated.AutoTruncated` guides.

    .. math:: \mathcal F = \sum_n \log \sum_{s \in K_n} p(s, y_n), \qquad
              \nabla \mathcal F = \sum_n \sum_{s \in K_n} q_n(s) \nabla \log p(s, y_n).

    The loss is :math:`-\mathcal F`, scaled as Pyro scales subsampled plates. Calling ``loss`` (and ``SVI.evaluate_loss``) never changes
    populations. Both ``loss_and_grads`` (``SVI.step``) and ``differentiable_loss`` under enabled gradients search first.

    If the guide has other parts (continuous latents beside the discrete ones), the search scores states given draws of these. Loss and
    gradient are those of the stock :class:`~pyro.infer.TraceEnum_ELBO` for the same draws. Models that do not take many states at once
    (see ``vectorize`` of the guide) need reparametrised draws.

    On several processes (:func:`pyro_truncated.distributed.shard`) losses are those of all data, and every process must ask for them.
    Gradients are those of a process's own data, which :class:`~pyro_truncated.distributed.AllReduced` sums. Those of the module
    ``elbo(model, guide)`` are multiplied by the number of processes, because ``DistributedDataParallel`` takes their mean.

    Sites with ``infer={"of_parameters": True}`` are priors of parameters, such as those of covariances in a ``GaussianMixture``. They
    count in the loss of a trained guide, but not of one that :meth:`~pyro_truncated.AutoTruncated.infer` has made for new data.

    With a model that :class:`~pyro_truncated.ClosedForm` drives, no gradient is taken: the expected sufficient statistics are collected
    for its M-step.

    Example:
        >>> y = linear_bars(50, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=32)
        >>> elbo = Truncated_ELBO(EvolutionarySearch(crossover=True), temperature=cooling(4.0, 10))
        >>> svi = SVI(model, guide, Adam({"lr": 0.01}), elbo)
        >>> losses = [svi.step(y) for _ in range(10)]

    Args:
        search: proposes states; default: an :class:`~pyro_truncated.search.AutomaticSearch`. It scores all states of small spaces, and
            searches others by full conditionals or by flips. It logs its choice, which the ``repr`` of this object shows too.
        search_steps: search steps before each evaluation.
        search_every: evaluations per round of search (1: before each).
        temperature: :math:`\tau \ge 1`, a number or a function of the step ``t = 0, 1, ...``: the M-step or gradient uses :math:`q \propto
            p^{1/\tau}` (annealing). The loss reported is always that of :math:`\tau = 1`.
        **kwargs: what :class:`pyro.infer.ELBO` takes.

    Raises:
        TypeError: if ``search`` is no search, or the guide holds no ``AutoTruncated``.
        ValueError: for a step or particle count below 1, or a temperature below 1 or infinite.
    """

    def __init__(
        self, search: Search | None = None, *, search_steps: int = 1, search_every: int = 1, temperature: Temperature = 1.0, **kwargs: Any
    ) -> None:
        search = AutomaticSearch() if search is None else search
        check_search(search)
        search_steps, search_every = check_counts(search_steps=search_steps, search_every=search_every)
        check_counts(num_particles=kwargs.get("num_particles", 1))
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.search = search
        self.search_steps = search_steps
        self.search_every = search_every
        check_kinds(Truncated_ELBO.__init__, temperature=temperature)
        self.temperature = temperature
        self.num_evaluations = 0
        self._others = MixedGuides(**kwargs)
        # Of the populations that statistics were last collected of.
        self._revision: int | None = None
        self._known_guide: Reference[Any] = Reference()
        self._num_looks = 0

    def __call__(self, model: torch.nn.Module, guide: torch.nn.Module) -> ELBOModule:
        """Returns model and guide as a module that computes :meth:`differentiable_loss`.

        Populations belong to the data of one process, so ``DistributedDataParallel`` leaves these buffers alone.
        """
        module = _TruncatedModule(model, guide, self)
        stores = [(name, part) for name, part in module.named_modules() if isinstance(part, PopulationStore)]
        names = [f"{name}.{buffer}" for name, part in stores for buffer in part.STORED]
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        return module

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the free energy of the populations as they are; nothing changes."""
        call = Call(model, args, kwargs)
        if _stands_alone(call, guide):
            with suppress(AllObservedError), torch.no_grad(), isolate(), propagate_errors(guide, (args, kwargs)):
                batch = guide.make_batch(*args, **kwargs)
                return total([guide], _warn_if_infinite(_check_loss(-float(batch.mean_free_energy(self.num_particles))), guide))
            with explain_enumeration():
                return self._others.loss(model, guide, *args, **kwargs)
        with propagate_errors(guide, (args, kwargs)), self._prepare_shared_loss(call, guide):
            return total(self._others.parts(call, guide), _check_loss(self._others.loss(model, guide, *args, **kwargs)))

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Returns minus the free energy as a differentiable tensor.

        The module ``Truncated_ELBO(search)(model, guide)`` returns it when called.

        Populations are searched first if gradients are enabled (training), never under ``torch.no_grad()`` (validation).
        """
        call = Call(model, args, kwargs)
        if _stands_alone(call, guide):
            with suppress(AllObservedError), propagate_errors(guide, (args, kwargs)):
                batch = self._search_batch(call, guide) if torch.is_grad_enabled() else guide.make_batch(*args, **kwargs)
                loss = -batch.mean_free_energy(self.num_particles)
                warn_if_nan(loss, "loss")
                _warn_if_infinite(float(loss.detach()), guide)
                return total_loss_for_ddp([guide], loss)
            with explain_enumeration():
                return self._others.differentiable_loss(model, guide, *args, **kwargs)
        with propagate_errors(guide, (args, kwargs)), self._prepare_shared_loss(call, guide, searches=torch.is_grad_enabled()):
            return total_loss_for_ddp(self._others.parts(call, guide), self._others.differentiable_loss(model, guide, *args, **kwargs))

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Searches, returns minus the free energy and accumulates its gradient.

        Closed-form M-steps get statistics instead.
        """
        call = Call(model, args, kwargs)
        with propagate_errors(guide, (args, kwargs)), poutine.block(hide_fn=_substitutes):
            closed_form = ClosedForm.find(model)
            if closed_form is not None:
                return total([guide], _check_loss(self._closed_form_step(closed_form, call, guide)))
            if _stands_alone(call, guide):
                temperature = self._temperature()
                with suppress(AllObservedError):
                    return total([guide], _check_loss(self._search_batch(call, guide).backward_(temperature, self.num_particles)))
                with explain_enumeration():
                    return self._others.loss_and_grads(model, guide, *args, **kwargs)
            with self._prepare_shared_loss(call, guide, searches=True):
                return total(self._others.parts(call, guide), _check_loss(self._others.loss_and_grads(model, guide, *args, **kwargs)))

    def _search_batch(self, call: Call, guide: Any) -> Any:
        """Returns the batch of a single guide, after a search if due."""
        self._meet(call, guide)
        is_due = self._search_is_due()
        with defer_checks():
            with torch.enable_grad():
                batch = guide.make_batch(*call.args, **call.kwargs)
            return batch.after_search(self.search, self.search_steps) if is_due else batch

    def _closed_form_step(self, closed_form: ClosedForm, call: Call, guide: Any) -> float:
        if not _stands_alone(call, guide):
            raise NotImplementedError(
                "closed-form M-steps need a guide that is one AutoTruncated; use a gradient optimiser beside other guides"
            )
        if isinstance(closed_form.model, GibbsModel):
            raise TypeError(
                f"the M-step of {type(closed_form.model).__name__} takes Gibbs draws: use GibbsGuide(model) and GibbsEM(search), or a "
                "gradient optimiser"
            )
        self._meet(call, guide)
        temperature = self._temperature()
        with defer_checks():
            with torch.no_grad(), poutine.block():
                batch = guide.make_batch(*call.args, **call.kwargs)
            model = closed_form.model
            is_additive = getattr(model, "statistics_are_additive", True) or getattr(model, "statistics_span_processes", False)
            if batch.populations.is_part and not is_additive:
                raise NotImplementedError(
                    f"the M-step of {type(model).__name__} needs all data; got a shard: train the model in one process"
                )
            if not isinstance(batch, ChainBatch):
                return self._collect(closed_form, batch, temperature)
            if temperature != 1.0:
                raise NotImplementedError(f"temperature must be 1 for sites of chains, whose sets are not annealed; got {temperature}")
            return _collect_on_chains(closed_form, batch, self.search if self._search_is_due() else None, self.search_steps)

    @torch.no_grad()
    def _collect(self, closed_form: ClosedForm, batch: Batch, temperature: float) -> float:
        """Improves a batch's populations, collects statistics, returns the loss."""
        call, store, scorer = batch.scorer.call, batch.populations, batch.scorer
        with poutine.block(), memory_budget(scorer.memory_budget):
            # Another caller scored or searched: the sums do not hold the old contribution.
            is_stale = self._revision is not None and self._revision != store.revision and closed_form.visited is not None
            indices = _plate_indices(batch)
            previous = closed_form.previous(store.take(batch.indices if indices is batch.plate_indices else indices), indices)
            if previous is not None and callable(self.temperature):
                raise ValueError("incremental minibatches cannot follow a changing temperature; use ClosedForm(model, minibatch='online')")
            old = None if previous is None else _statistics(closed_form, previous, temperature, call)
            with defer_checks():
                population = batch.search_(self.search, self.search_steps) if self._search_is_due() else batch.rescore_()
                # A model that looks at its statistics brings it along.
                values = lazy_values(batch.scale * population.free_energy().sum() + batch.outside())
                new = _statistics(closed_form, population, temperature, call)
                (free_energy,) = values()
                flush_checks()
            self._revision = store.revision
            closed_form.collect(new, old, indices, scorer.full_size, scale=batch.data_per_row, is_part=store.is_part)
            if closed_form.visited is not None and indices is not None and _holds_anywhere(is_stale, store.is_part):
                positions = closed_form.visited.nonzero().squeeze(-1).to(store.words.device)
                closed_form.renew(_statistics(closed_form, store.population(positions), temperature, call), is_part=store.is_part)
            return -free_energy

    @contextmanager
    def _prepare_shared_loss(self, call: Call, guide: Any, *, searches: bool = False) -> Iterator[None]:
        """What surrounds the loss of a guide beside others."""
        self._num_looks -= not searches
        with (
            explain_enumeration(),
            share_draws(call, guide, self.num_evaluations if searches else self._num_looks),
            self._request_search(call, guide) if searches else nullcontext(),
            divide_loss(self._others.parts(call, guide)),
        ):
            yield

    def _request_search(self, call: Call, guide: Any) -> AbstractContextManager[Any]:
        """A context in which the truncated part searches at the loss's draws."""
        if self._temperature() != 1.0:
            hint = f"leave it out beside other guides; got {type(guide).__name__}"
            raise NotImplementedError(f"a temperature needs a guide that is one AutoTruncated; {hint}")
        with spare_random_numbers():
            is_new = self._known_guide.value is not guide
            if is_new:
                refuse_shadowed_parameters(call.model, guide)
            parts = self._others.parts(call, guide)
            if not parts:
                kind = type(guide).__name__
                raise TypeError(f"Truncated_ELBO needs a guide with an AutoTruncated part; got {kind}: use Pyro's own ELBOs for it")
            refuse_local_draws(parts, call.with_program(guide), is_new)
            self._meet(call, guide)
            self._others.prepare(call, guide)
        return SearchRequest(self.search, self.search_steps) if self._search_is_due() else nullcontext()

    def _meet(self, call: Call, guide: Any) -> None:
        """Prepares a guide before its first training step."""
        if self._known_guide.value is not guide:
            refuse_shadowed_parameters(call.model, guide, training=True)
            broadcast_start(call, guide, self)
            if isinstance(guide, AutoTruncated):
                guide.populations.seen.is_new = False
            self._known_guide = Reference(guide)

    def _temperature(self) -> float:
        return temperature_at(self.temperature, self.num_evaluations)

    def _search_is_due(self) -> bool:
        due = self.num_evaluations % self.search_every == 0
        self.num_evaluations += 1
        return due

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        return self._others._get_trace(model, guide, args, kwargs)


class _TruncatedModule(PrefixStrippingModule, ELBOModule):
    """Model and guide as one module; loads states of wrappers too."""


def _stands_alone(call: Call, guide: Any) -> bool:
    """Whether the guide is one AutoTruncated of this very model, without handlers."""
    refuse_handlers_around()
    if not isinstance(guide, AutoTruncated):
        # Before the guides beside it run, which take what the store holds for their own.
        refuse_diverged_copies(call.model, guide)
        return False
    guide.setup(*call.args, **call.kwargs)
    return guide.companions is None and bool(call.model == guide.model)


def _substitutes(msg: Any) -> bool:
    """Whether a parameter has a given value (``poutine.substitute``), which SVI cannot train."""
    return msg["type"] == "param" and msg["value"] is not None and not hasattr(msg["value"], "unconstrained")


def _check_loss(loss: float) -> float:
    warn_if_nan(loss, "loss")  # type: ignore[call-overload]
    return loss


def _warn_if_infinite(loss: float, guide: AutoTruncated) -> float:
    if loss == math.inf:
        warn_impossible(list(guide.layout.sites))
    return loss


@torch.no_grad()
def _collect_on_chains(closed_form: ClosedForm, batch: ChainBatch, search: Search | None, search_steps: int) -> float:
    """Improves sets of sequences, collects statistics of their posterior, returns the loss."""
    call, scorer = batch.scorer.call, batch.scorer
    with poutine.block():
        # No search step scores the sets and keeps their log joints.
        posterior = batch.improve_(AutomaticSearch(), 0) if search is None else batch.improve_(search, search_steps)
        loss = -float(batch.free_energy() if batch.is_idle else scorer.scale * posterior.free_energy().sum() + batch.outside())
        new = closed_form.model.sufficient_statistics(posterior, *call.args, **call.kwargs)
    if batch.is_idle:
        new = {name: torch.zeros_like(value) for name, value in new.items()}
    closed_form.collect(new, None, _plate_indices(batch), scorer.full_size, scale=batch.data_per_row, is_part=batch.populations.is_part)
    return loss


def _plate_indices(batch: Batch | ChainBatch) -> Tensor | None:
    """Positions of the data points, ``None`` for all of all processes."""
    indices, minibatch = batch.plate_indices, current_batch()
    if not batch.populations.is_part:
        return indices
    is_minibatch = _holds_anywhere(indices is not None, True) if minibatch is None else minibatch.scale > 1
    return torch.arange(batch.scorer.full_size) if indices is None and is_minibatch else indices


def _holds_anywhere(condition: bool, is_part: bool) -> bool:
    """Whether it holds in one of the processes that train together."""
    return bool(collectives.add([torch.tensor(float(condition))])[0]) if is_part else condition


def _statistics(closed_form: ClosedForm, population: Population, temperature: float, call: Call) -> Statistics:
    """Returns sufficient statistics, by blocks where they add up."""
    model = closed_form.model
    rows = len(population)
    if getattr(model, "statistics_are_additive", True):
        rows = rows_per_block(64 * population.num_states)
    total: Statistics = {}
    for block in population.split(rows):
        with defer_checks():
            part = model.sufficient_statistics(block, *call.args, temperature=temperature, **call.kwargs)
        total = {name: total[name] + value for name, value in part.items()} if total else part
    return total


_PYRO_SAYS = (
    "packing tensors",
    "max_plate_nesting",
    "nvalid log_prob shape",
    "Shape mismatch inside plate",
    "enumerat",
    "must match the size of",
)


def _promote(value: Any, precision: torch.dtype) -> Any:
    """Real tensors in another precision; they keep the names of their dimensions."""
    if isinstance(value, ScoreParts):
        return ScoreParts(*(_promote(part, precision) for part in value))
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    promoted: Any = value.to(precision)
    promoted._pyro_dims = value._pyro_dims  # type: ignore[attr-defined]
    return promoted


class MixedGuides(TraceEnum_ELBO):
    """Pyro's enumerating ELBO of a guide with other parts, without search.

    For models that do not take many states at once it is computed from draws of the other parts, see :func:`free_energy_given_draws`.
    Densities have one precision, the highest of all: data are often double, as NumPy's and pandas', and priors single, and Pyro contracts
    only tensors of one type.
    """

    def __init__(self, **kwargs: Any) -> None:
        # Labels may leave nothing to enumerate.
        super().__init__(**{"strict_enumeration_warning": False, **kwargs})  # type: ignore[no-untyped-call]
        self._known_parts: Reference[tuple[Any, list[AutoTruncated]]] = Reference()

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """The loss; nothing changes."""
        with torch.no_grad():
            free_energy = self._mean_given_draws(Call(model, args, kwargs), guide)
        return float(super().loss(model, guide, *args, **kwargs) if free_energy is None else -free_energy)  # type: ignore[no-untyped-call]

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss as a tensor."""
        free_energy = self._mean_given_draws(Call(model, args, kwargs), guide)
        return super().differentiable_loss(model, guide, *args, **kwargs) if free_energy is None else -free_energy  # type: ignore[no-untyped-call]

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """The loss, whose gradient is accumulated."""
        call = Call(model, args, kwargs)
        part = self._find_slow_part(call, guide)
        if part is not None:
            with suppress(AllObservedError):
                return sum(self._backward(part, call.with_program(guide)) for _ in range(self.num_particles))
        return float(super().loss_and_grads(model, guide, *args, **kwargs))  # type: ignore[no-untyped-call]

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        traces = super()._get_trace(CheckedSites()(model), guide, args, kwargs)  # type: ignore[no-untyped-call]
        given, sampled = (trace.nodes for trace in traces)
        marks: list[Any] = [node["infer"].get("truncated") for node in sampled.values() if node["type"] == "sample"]
        sites = {name for mark in marks if mark is not None for name in mark["guide"]().layout.sites} & given.keys() & sampled.keys()
        if names := sorted(name for name in sites if given[name]["is_observed"]):
            raise ValueError(
                f"the model observes {names}, which the guide samples, as it was made of another model. Make a guide of this one, "
                "AutoTruncated(model, ...)."
            )
        packed = [site["packed"] for trace in traces for site in trace.nodes.values() if site["type"] == "sample"]
        precision = functools.reduce(torch.promote_types, (site["log_prob"].dtype for site in packed), torch.float16)
        for site in packed:
            if site["log_prob"].dtype != precision:
                site.update({name: _promote(value, precision) for name, value in site.items()})
        return traces

    def parts(self, call: Call, guide: Any) -> list[AutoTruncated]:
        """Runs a guide once; truncated parts announce themselves at their index sites."""
        known, parts = self._known_parts.value or (None, [])
        if known is not guide:
            with spare_random_numbers(), poutine.block(), torch.no_grad(), _silence_impossible():
                marks: list[Any] = [node["infer"].get("truncated") for node in sample_nodes(call.with_program(guide).trace()).values()]
            parts = list(dict.fromkeys(mark["guide"]() for mark in marks if mark is not None))
            self._known_parts = Reference((guide, parts))
        return parts

    def prepare(self, call: Call, guide: Any) -> None:
        """Lets Pyro's ELBO count plates before training."""
        if self._find_slow_part(call, guide) is None and self.max_plate_nesting == math.inf:
            # Pyro says how many plates it has counted.
            logger = logging.getLogger(ELBO.__module__)
            before, logger.disabled = logger.disabled, True
            try:
                with _silence_impossible():
                    self._guess_max_plate_nesting(call.model, guide, call.args, call.kwargs)  # type: ignore[no-untyped-call]
            finally:
                logger.disabled = before

    def _find_slow_part(self, call: Call, guide: Any) -> AutoTruncated | None:
        """A truncated part of this model that Pyro cannot enumerate, if any."""
        parts = self.parts(call, guide)
        return parts[0] if len(parts) == 1 and not parts[0].is_enumerable and bool(call.model == parts[0].model) else None

    def _mean_given_draws(self, call: Call, guide: Any) -> Tensor | None:
        """Such a guide's free energy averaged over draws, ``None`` for other guides."""
        part = self._find_slow_part(call, guide)
        if part is not None:
            with suppress(AllObservedError):
                draws = [free_energy_given_draws(part, call.with_program(guide)) for _ in range(self.num_particles)]
                return torch.stack(draws).mean()
        return None

    def _backward(self, part: AutoTruncated, guide: Call) -> float:
        loss = -free_energy_given_draws(part, guide) / self.num_particles
        if loss.requires_grad:
            loss.backward()
        return float(loss.detach())


@contextmanager
def _silence_impossible() -> Iterator[None]:
    """Silences warnings of states that a search will replace."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"the loss is infinite|Encountered \+inf")
        yield


@contextmanager
def explain_enumeration() -> Iterator[None]:
    """Makes small subsamples cheap, and lets errors of enumeration say their reason."""
    try:
        with SparseSubsamples():
            yield
    except (ValueError, RuntimeError) as error:
        if isinstance(error, NotImplementedError) or not any(hint in str(error) for hint in _PYRO_SAYS):
            raise
        error.add_note(
            "Beside other guides the loss is that of Pyro's TraceEnum_ELBO, which enumerates states in a dimension left of all plates. "
            "Set Truncated_ELBO(search, max_plate_nesting=...), or AutoTruncated(model, ..., vectorize=False) if the model takes no such "
            "dimension."
        )
        raise


def free_energy_given_draws(part: AutoTruncated, guide: Call) -> Tensor:
    r"""Returns the differentiable free energy of a guide with other parts.

    It is that of one draw :math:`z` of the other parts.

    .. math:: \sum_n \log \sum_{s \in K_n} p(s, y_n, z_n \mid z) + \log p(z) - \log q(z), \qquad z \sim q

    with :math:`z_n` the draws inside the data plates and :math:`z` those outside. The enumerating ELBO computes the same for these
    draws; here the guide's own scores are used.
    """
    trace = guide.trace()
    own = {*part.layout.sites, *part.index_names}
    companions = {name: node for name, node in sample_nodes(trace).items() if name not in own}
    log_q = log_density(companions.values())
    for name, node in companions.items():
        fn = node["fn"]
        if not fn.has_rsample and torch.is_grad_enabled() and fn.log_prob(node["value"]).requires_grad:
            raise NotImplementedError(
                f"site '{name}' of the guide ({type(fn).__name__}) is not reparametrised, and has no gradient, as this model does not "
                "take many states at once. Use a reparametrised distribution (Normal, LogNormal, ...), "
                "or let the model vectorise."
            )
    subsamples = {name: node["value"] for name, node in trace.nodes.items() if site_is_subsample(node)}
    latents = {name: node["value"] for name, node in companions.items() if name in part.layout.other_latents}
    batch = part.batch(guide.with_program(part.model), {**latents, **subsamples})
    others = {name: node for name, node in batch.scorer.nodes.items() if name in latents}
    if observed := [name for name, node in others.items() if node["is_observed"]]:
        warnings.warn(f"the model observes {observed}, which the guide samples: its density counts, as in Pyro's ELBOs", stacklevel=2)
    beyond = [node for node in others.values() if not node["is_observed"] and not batch.scorer.is_inside(node)]
    return batch.free_energy() + batch.scorer.shared_density(beyond, batch.share) - log_q
