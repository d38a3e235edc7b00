"""AutoTruncated: the exact posterior over discrete latents, renormalised on a small population of states per data point."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.ops.indexing import Vindex
from pyro.ops.provenance import get_provenance, track_provenance
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor

from pyro_truncated.guide.averaging import average_over_draws, average_stored
from pyro_truncated.guide.batch import Batch
from pyro_truncated.guide.given_states import Init
from pyro_truncated.guide.plates import (
    SharedPlates,
    model_plates,
    open_plates,
    recorded_subsamples,
    refuse_subsampled_latents,
    share_plates,
)
from pyro_truncated.guide.siblings import Siblings, refuse_subsampling, refuse_uncovered, with_subsamples
from pyro_truncated.guide.store import NOT_SET_UP, PopulationStore
from pyro_truncated.guide.truncated_posterior import TruncatedPosterior
from pyro_truncated.program import inspection
from pyro_truncated.program.call import Call
from pyro_truncated.program.candidate_runs import Conditional, Scoring
from pyro_truncated.program.dependencies import Dependencies
from pyro_truncated.program.inspection import ordinary_tensors
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.probe import AllObservedError
from pyro_truncated.program.sites import sample_nodes, trim
from pyro_truncated.program.subsampling import SparseSubsamples
from pyro_truncated.program.vectorization import check_choice, scoring_for
from pyro_truncated.search.base import Search
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.counts import check_count, naming_empty_plates
from pyro_truncated.utils.isolation import free_plate_dims, isolated, spare_random_numbers
from pyro_truncated.utils.representation import power_of_ten
from pyro_truncated.utils.shadowing import ShadowWatch, refuse_shadowed


class Searching(Messenger):
    """Effect handler under which an :class:`AutoTruncated` improves its populations when it runs, once."""

    def __init__(self, search: Search, steps: int) -> None:
        super().__init__()
        self.search, self.steps, self.done = search, steps, False


class AutoTruncated(AutoGuide):
    r"""Guide whose distribution over the discrete latents is the model's posterior, cut down to a population of states and renormalised.

    For a data point :math:`n` with population :math:`K_n` of ``num_states`` distinct states,

    .. math:: q_n(s) = \frac{p(s, y_n)}{\sum_{s' \in K_n} p(s', y_n)} \quad (s \in K_n), \qquad
              \mathcal F = \sum_n \log \sum_{s \in K_n} p(s, y_n) \le \log p(y).

    The discrete latent sites are found in the model: Bernoulli, categorical, one-hot and count sites, vector-valued or not, several of
    them at once (their posterior is joint), inside a data plate with or without subsampling, in plates nested in it, or outside all plates
    (then all of them form one state). The other latents are left to other guides in an :class:`~pyro.infer.autoguide.AutoGuideList` - give
    this guide the *whole* model, not a blocked one, because it scores states under it - or to ``conditional``.

    The guide samples one auxiliary index per data point, enumerated in parallel, and sets the sites to the indexed state, so the stock
    :class:`~pyro.infer.TraceEnum_ELBO` returns :math:`-\mathcal F`. It never improves its populations by itself: train with
    :class:`~pyro_truncated.Truncated_ELBO`, which searches, or call :meth:`search_`.

    Example::

        guide = AutoTruncated(model, num_states=64)
        svi = SVI(model, guide, Adam({"lr": 0.01}), Truncated_ELBO())
        svi.step(y)
        guide.marginals()["s"]  # posterior probability that each latent is on

    Args:
        model: a Pyro model; fast if it vectorises over a left-most dimension, as parallel enumeration asks for.
        num_states: states per data point, ``S``; all states there are if these are fewer, which makes inference exact. Memory is
            ``N * S * (8 * ceil(H / 64) + 4)`` bytes for ``H`` binary latents in float32.
        conditional: called as ``conditional(states, *args, **kwargs)`` inside the data plate, with the discrete sites' values by name;
            samples (with ``pyro.sample``) continuous latents given the states. With their exact conditional the fitness of a state is its
            collapsed log joint.
        init: initial states of all data points: a tensor ``(N, S, *site shape)`` for a single site, a dictionary of such tensors, a
            callable that returns one of these, or ``None`` for the zero state, single active latents and random sparse states.
        max_count: largest value of count sites, one number or by site name: needed where the support is infinite (Poisson) or depends on
            continuous latents or on very many discrete ones; overrides the distribution's own bound where it is smaller.
        vectorize: whether the states are scored together, in a new left-most dimension (``True``), or one after the other (``False``).
            ``None`` finds out on the first call, from a few states: a model that does not take many states at once (``X @ (s * beta)``,
            ``s[:, 0]``, ``if z == 1``) is scored by :func:`torch.func.vmap` where that is right, else one state after the other, with one
            :class:`~pyro_truncated.VectorizationWarning` that names the line.
        create_plates: as for every autoguide; needed only if the guide should subsample where the model does not.
        memory_budget: bytes that the temporaries of one operation may take, roughly.

    Attributes:
        populations: where the states of all data points are kept.
        num_draws: how many draws of the latents of other guides are averaged over, where there are any; 1 for a single one.

    Raises:
        ValueError: on the first call, if there is no discrete site, a count has no bound, or the initial states are misshapen or repeat.
        NotImplementedError: on the first call, if a discrete site lies in a sequential plate of which the model takes a subsample, or if
            sites are sampled for some states only.
    """

    num_draws: int = 50

    def __init__(
        self,
        model: Callable[..., Any],
        num_states: int = 64,
        *,
        conditional: Conditional | None = None,
        init: Init = None,
        max_count: int | Mapping[str, int] | None = None,
        vectorize: bool | None = None,
        create_plates: Callable[..., Any] | None = None,
        memory_budget: int = 2**28,
    ) -> None:
        for name, function in (("model", model), ("conditional", conditional or model)):
            if not callable(function):
                raise TypeError(f"{name} must be callable; got {function!r}")
        num_states = check_count("num_states", num_states)
        memory_budget = check_count("memory_budget (in bytes)", memory_budget, 2**20)
        check_choice(vectorize)
        super().__init__(model, create_plates=create_plates)  # type: ignore[no-untyped-call]
        self.populations = PopulationStore(num_states)
        self.max_count = max_count
        self.vectorize = vectorize
        self._scoring: Scoring = "together"
        self._is_enumerable = True
        self.memory_budget = memory_budget
        self._init = init
        # Neither may become a submodule: their parameters belong to the model or to other guides.
        self._conditional = (conditional,)
        self._layout: Layout | None = None
        self._last_call: Call | None = None
        # Guides of the list that this one was inferred from, see infer.
        self._inherited: Siblings | None = None

    # --- what the guide holds ---

    @property
    def layout(self) -> Layout:
        """The discrete sites and the data plates."""
        if self._layout is None:
            raise RuntimeError(NOT_SET_UP)
        return self._layout

    @property
    def space(self) -> StateSpace:
        """The space of one data point's states."""
        return self.layout.space

    @property
    def num_states(self) -> int:
        """States per data point, ``S``; from the first call on not more than there are in the space."""
        return self.populations.num_states

    @property
    def words(self) -> Tensor:
        """The packed states of all data points, ``(N, S, num_words)``."""
        return self.populations.words

    @property
    def log_joint(self) -> Tensor:
        """The log joints ``(N, S)`` of all data points, of when they were last scored; NaN if never."""
        return self.populations.log_joint

    @property
    def revision(self) -> int:
        """Counts the changes of the populations and their log joints."""
        return self.populations.revision

    @property
    def index_name(self) -> str:
        """Name of the auxiliary index site."""
        return "_".join([*self.layout.sites, "index"])

    def population(self, indices: Tensor | None = None) -> Population:
        """The stored populations of all or the given data points, with the log joints of when they were last scored."""
        return self.populations.population(indices)

    # --- set-up ---

    @property
    def model(self) -> Callable[..., Any]:
        """The model.

        Raises:
            RuntimeError: if pickling left it behind.
        """
        if self._model is None:
            raise RuntimeError(
                "pickling a guide leaves its model behind. Its populations can still be read, but to use it with a model make a new "
                "AutoTruncated(model, ...) and load the state_dict() of this one."
            )
        model: Callable[..., Any] = self._model[0]
        return model

    @property
    def conditional(self) -> Conditional | None:
        """The callable that samples continuous latents given the states."""
        return self._conditional[0]

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """Inspects the model and creates the initial populations; called by the first use of the guide."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        try:
            with ordinary_tensors():
                with spare_random_numbers(), free_plate_dims():
                    device = self._inspect(args, kwargs)
                self.populations.start_(self.layout, self._init, device)
        except BaseException:
            # The next call must not take this guide for one that is ready.
            self.prototype_trace, self._layout = None, None
            raise

    def _inspect(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
        """Finds the discrete sites and plates; returns the device that the states live on."""
        self._check_alone()
        refuse_shadowed(self.model, self.conditional)
        call = Call(self.model, args, kwargs)
        inspection.refuse_hidden_latents(call)
        with naming_empty_plates(), poutine.block(), torch.no_grad(), ShadowWatch():
            trace = call.trace()
        self._layout = Layout(
            trace,
            self.max_count,
            lambda names: inspection.dependents(call, names),
            Dependencies(call),
        )
        try:
            with torch.no_grad():
                # The prototype stays with the guide, which could not be copied if it held tensors with a graph behind them.
                super()._setup_prototype(*args, **kwargs)  # type: ignore[no-untyped-call]
        except NotImplementedError:
            # Sequential plates are no trouble to us: their sites are parts of a joint state.
            self._prototype_frames = {
                f.name: f for _, site in trace.iter_stochastic_nodes() for f in site["cond_indep_stack"] if f.vectorized
            }
        if not any(node["is_observed"] for node in trace.nodes.values() if node["type"] == "sample"):
            warnings.warn(
                "AutoTruncated sees no observed site: its posterior would be the prior. "
                "Give it the whole model, not poutine.block(model, ...).",
                stacklevel=2,
            )
        nodes = sample_nodes(trace) | (sample_nodes(self.prototype_trace) if self.prototype_trace is not None else {})
        device: torch.device = nodes[next(iter(self._layout.sites))]["value"].device
        for name in self._layout.sites:
            # The prototype stays with the guide: of the states, only their shape and type are needed.
            nodes[name]["value"] = nodes[name]["value"].new_zeros(()).expand(nodes[name]["value"].shape)
        with torch.no_grad():
            self._scoring, self._is_enumerable = scoring_for(
                self.vectorize, call, self._layout, conditional=self.conditional, memory_budget=self.memory_budget
            )
        return device

    def _check_alone(self) -> None:
        others = [part for part in self.master() if isinstance(part, AutoTruncated) and part is not self] if self.master is not None else []
        if others:
            raise ValueError(
                "an AutoGuideList can hold only one AutoTruncated: it takes all discrete sites of the model, as their posterior is joint"
            )

    def _update_master(self, master_ref: Callable[[], Any]) -> None:
        share_plates(master_ref(), self)
        old = self.master() if self.master is not None else None
        if old is not None and old.create_plates == self._plates_of_list:
            old.create_plates = None
        super()._update_master(master_ref)  # type: ignore[no-untyped-call]
        if master_ref().create_plates is None:
            master_ref().create_plates = self._plates_of_list

    def _plates_of_list(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The plates of a guide list: those that the model opens for these arguments, in place of some of the size of its first run.

        Raises:
            ValueError: if the model takes other data than those of the populations, or a guide in the list cannot follow a subsample.
        """
        guide_list = self.master()  # type: ignore[misc]
        share_plates(guide_list, self)
        found = model_plates(self.model, guide_list._prototype_frames, args, kwargs)
        if self._layout is not None:
            size = math.prod(found[name].size for name in self.layout.plates if name in found)
            if self.populations.is_filled and size != len(self.words) and not self._are_all_observed(args, kwargs):
                raise self._other_data(size)
            refuse_subsampled_latents(guide_list, {name: found[name] for name in self.layout.plates if name in found})
        return list(found.values())

    def _are_all_observed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the model observes all discrete sites with these arguments."""
        with spare_random_numbers(), torch.no_grad(), isolated():
            nodes = sample_nodes(poutine.trace(self.model).get_trace(*args, **kwargs))
        return all(name in nodes and nodes[name]["is_observed"] for name in self.layout.sites)

    def __getstate__(self) -> dict[str, Any]:
        # Autoguides are pickled without model and list, but the base class takes them from the living guide too.
        model, master = self._model, self.master
        try:
            state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        finally:
            self._model, self.master = model, master
        return {**state, "_conditional": (None,), "_init": None, "_last_call": None, "_inherited": None}

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        problem = _old_layout(state_dict, prefix)
        if problem is not None:
            error_msgs = args[-1]
            error_msgs.append(problem)
            return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def mismatch(self, state_dict: Mapping[str, Any], prefix: str = "") -> str | None:
        """Why what a state dict says of a guide does not fit this one; of one that has not seen its model, as far as can be told."""
        return _old_layout(state_dict, prefix) or self.populations.mismatch(state_dict, f"{prefix}populations.")

    def __deepcopy__(self, memo: dict[int, Any]) -> AutoTruncated:
        duplicate = self.__class__.__new__(self.__class__)
        memo[id(self)] = duplicate
        duplicate.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[no-untyped-call]
        duplicate._model, duplicate._conditional, duplicate._init = self._model, self._conditional, self._init
        duplicate._inherited = self._inherited
        return duplicate

    def _takes_arguments(self) -> bool:
        parameters = inspect.signature(self.model.forward if isinstance(self.model, torch.nn.Module) else self.model).parameters.values()
        if all(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters):
            # Handlers around a model hide what it takes.
            return len(parameters) > 0 and not bool(self.log_joint.isnan().any())
        return True

    def extra_repr(self) -> str:
        """What the guide holds; the search belongs to the ELBO."""
        if self._layout is None:
            return f"num_states={self.num_states}, not set up yet: call it, or svi.step, with the model's arguments"
        sites, plates, size = ", ".join(self.layout.sites), ", ".join(self.layout.plates), power_of_ten(self.space.size)
        data = f"{self.layout.num_data} data points in {plates}" if plates else "one state of all data (no data plate)"
        return f"sites: {sites}; {data}; {self.num_states} of {size} states each"

    # --- scoring and search ---

    @property
    def is_enumerable(self) -> bool:
        """Whether Pyro's own ELBOs can run the model on many states at once; otherwise they enumerate them one after the other."""
        return self._is_enumerable

    def batch_of(self, *args: Any, **kwargs: Any) -> Batch:
        """The populations of the data points that the model selects when called with these arguments, with a scorer of their states.

        Raises:
            ValueError: if the model's data plate differs in size from the guide's populations, its subsample is out of range, or the
                populations are on another device than the model.
            NotImplementedError: under ``torch.jit.trace``, which would freeze the states of today.
        """
        return self.batch(Call(self.model, args, kwargs), self._own_subsamples(args, kwargs))

    def log_joint_of(self, *args: Any, values: Mapping[str, Any] | None = None, **kwargs: Any) -> LogJoint:
        """A scorer of states for the data points that the model selects when called with these arguments.

        Args:
            *args: the model's positional arguments.
            values: other latents, and subsamples of plates, by name; default: as the model draws them.
            **kwargs: the model's keyword arguments.

        Raises:
            ValueError: see :meth:`batch_of`.
            NotImplementedError: see :meth:`batch_of`.
        """
        return self.batch(Call(self.model, args, kwargs), values).scorer

    def batch(self, call: Call, values: Mapping[str, Any] | None = None) -> Batch:
        """The batch of a call of the model, with other latents and subsamples of plates given by name; see :meth:`batch_of`."""
        if torch._C._get_tracing_state():
            raise NotImplementedError(
                "AutoTruncated cannot be traced by torch.jit: its states change while it trains. Use TraceEnum_ELBO, not JitTraceEnum_ELBO."
            )
        self.setup(*call.args, **call.kwargs)
        uncovered = [name for name in self.layout.other_latents if name not in (values or {})]
        if uncovered and self.conditional is None:
            warnings.warn(
                f"no guide covers the latents {uncovered}: they are drawn from the prior. Combine AutoTruncated with another guide in an "
                "AutoGuideList, or give it a conditional.",
                stacklevel=3,
            )
        scorer = LogJoint(
            call,
            self.layout,
            values=values,
            conditional=self.conditional,
            memory_budget=self.memory_budget,
            scoring=self._scoring,
        )
        if scorer.full_size != self.words.shape[0]:
            raise self._other_data(scorer.full_size)
        if scorer.device != self.words.device:
            raise ValueError(
                f"the populations are on {self.words.device}, the model's states on {scorer.device}; call guide.to({str(scorer.device)!r})"
            )
        batch = Batch.of(self.populations, scorer)
        self.populations.check_indices(batch.indices)
        self.populations.seen.compare(scorer, batch.indices)
        self._last_call = call
        return batch

    def _other_data(self, size: int) -> ValueError:
        return ValueError(
            f"the guide holds populations of {self.words.shape[0]} data points, but the model's data plate {list(self.layout.plates)} "
            f"now has {size}. For other data use guide.infer(new_data, search, steps). Minibatches that are passed as arguments need their "
            "positions in the data: pyro.plate(name, num_data, subsample=positions)."
        )

    def _own_subsamples(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Fresh subsamples of the plates that ``create_plates`` makes, by name; none without it."""
        if self.create_plates is None:
            return {}
        self.setup(*args, **kwargs)
        with poutine.block(), SparseSubsamples():
            return _indices_of(self._create_plates(*args, **kwargs))  # type: ignore[no-untyped-call]

    def search_(self, search: Search, log_joint: LogJoint, steps: int = 1) -> Population:
        """Improves the populations of a scorer's data points in place, see :meth:`Batch.search_`; returns them with their log joints."""
        return Batch.of(self.populations, log_joint).search_(search, steps)

    def rescored(self, log_joint: LogJoint) -> Population:
        """The stored populations of a scorer's data points with their log joints under it; stores nothing."""
        return Batch.of(self.populations, log_joint).rescored()

    def posterior(self, *args: Any, **kwargs: Any) -> Population:
        """The populations with log joints under the model as it is now, for the data points the model selects; stores nothing."""
        with torch.no_grad():
            return self.batch(Call(self.model, args, kwargs), self._values_from_trace(args, kwargs)).rescored()

    @torch.no_grad()
    def refresh_(self, *args: Any, **kwargs: Any) -> Population:
        """Scores the stored states anew under the model as it is now, for the data points the model selects; the states stay.

        Beside other guides what is stored are averages over :attr:`num_draws` draws of their latents.
        """
        self.setup(*args, **kwargs)
        call = Call(self.model, args, kwargs)
        averaged = average_over_draws(self, call)
        if averaged is not None:
            return self.populations.store_averages_(averaged)
        return self.batch(call, self.other_values(args, kwargs)).rescore_()

    def infer(
        self, data: Any, search: Search, steps: int = 10, *, num_states: int | None = None, init: Init = None, **kwargs: Any
    ) -> AutoTruncated:
        """Populations for unseen data under the model as it is; neither the model nor this guide changes.

        From an :class:`~pyro.infer.autoguide.AutoGuideList` the new guide takes along the guides before this one, as they are and share
        their parameters: it samples the model's other latents from them, as the list does, so that it stands for the whole trained guide
        in losses, ``Predictive``, ``check_truncation`` and ``to_arviz``. The search scores states given one draw of them. Of latents
        inside the data plate only guides that compute them from the model's arguments (amortised ones, functions for example) know
        anything.

        Example::

            new = guide_list[-1].infer(y_new, search)
            print(check_truncation(new, y_new))
            idata = to_arviz(model, new, y_new)

        Args:
            data: the model's positional arguments: one tensor, or a tuple of them. The model must take all data points at once.
            search: fills the populations.
            steps: number of search steps.
            num_states: states per data point; default: as in this guide.
            init: initial states, as for the constructor.
            **kwargs: the model's keyword arguments.

        Returns:
            A guide for these data alone, with the ``conditional`` and ``create_plates`` of this one.

        Raises:
            ValueError: if the model subsamples, if latents of the new data belong to a guide that has parameters for each data point it
                was trained on, or if no guide in the list covers a latent, so that it could only be drawn from the prior.
        """
        args = data if isinstance(data, tuple) else (data,)
        steps = check_count("steps", steps)
        guide = AutoTruncated(
            self.model,
            self.num_states if num_states is None else num_states,
            conditional=self.conditional,
            init=init,
            max_count=self.max_count,
            vectorize=self.vectorize,
            create_plates=self.create_plates,
            memory_budget=self.memory_budget,
        )
        with torch.no_grad(), poutine.block():
            guide.setup(*args, **kwargs)
            refuse_subsampling(guide)
            guide._inherited = self.siblings
            if guide._inherited is not None:
                guide._inherited.refuse_unknown(guide)
            values = guide.other_values(args, kwargs)
            refuse_uncovered(guide, values)
            guide.batch(Call(self.model, args, kwargs), values).search_(search, steps, is_new=True)
        return guide

    # --- the posterior as numbers ---

    def scored(self, indices: Tensor | None = None) -> TruncatedPosterior:
        """What can be read from the populations of all or the given data points, as of when they were last scored (in training, say).

        Beside guides of other latents (in an :class:`~pyro.infer.autoguide.AutoGuideList`) the posterior of the states is different for
        every draw that these make. What is read, here and by the methods below, is then the average over :attr:`num_draws` of them, under
        the model as it is now and the arguments it was last called with.

        Raises:
            RuntimeError: if some of them have never been scored.
        """
        population = self.population(indices)
        if bool(population.log_joint.isnan().any()):
            raise RuntimeError(
                "some of these populations have never been scored under the model; train first, or refresh them with "
                "guide.refresh_(*args) (with the model's arguments)"
            )
        averaged = average_stored(self, population, self._last_call)
        return TruncatedPosterior(averaged, self.layout, self.layout.full_sizes)

    def weights(self, indices: Tensor | None = None) -> Tensor:
        """Posterior weights of the states, ``(N, S)``, see :meth:`scored`."""
        return self.scored(indices).population.weights()

    def states(self, indices: Tensor | None = None) -> dict[str, Tensor]:
        """The populations as site values ``(N, S, *site shape)`` by site name, nested plates in front of the event."""
        return self.layout.split(self.population(indices).states())

    def marginals(self, indices: Tensor | None = None) -> dict[str, Tensor]:
        """Posterior marginals by site.

        The probability of 1, ``(N, *site shape)``, at Boolean sites; of each value, ``(N, *site shape, V)``, at others.
        """
        return self.scored(indices).marginals()

    def mode(self, indices: Tensor | None = None) -> dict[str, Tensor]:
        """The most probable joint state by site, ``(N, *site shape)``."""
        return self.scored(indices).mode()

    def expectation(self, f: Callable[[dict[str, Tensor]], Tensor], indices: Tensor | None = None) -> Tensor:
        """Posterior expectation ``(N, ...)`` of a function that maps site values ``(N, S, *site shape)`` to ``(N, S, ...)``."""
        return self.scored(indices).expectation(f, self.memory_budget)

    def sample_posterior(
        self, num_samples: int, indices: Tensor | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Independent draws from the truncated posterior by site, ``(num_samples, N, *site shape)``."""
        return self.scored(indices).sample(num_samples, generator)

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The most probable state, shaped as the model's sites: what stands in for the median of a discrete posterior.

        Without the arguments that the model takes, those of all data points as they were last scored (in training, say).
        """
        return self._given_medians(args, kwargs).median()

    def quantiles(self, quantiles: Sequence[float] | Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        r"""Quantiles of the marginal posterior of every latent.

        The ``q``-quantile is the smallest value :math:`v` of positive probability with :math:`P(s \le v) \ge q`. The other latents of the
        model have their medians, as in :meth:`median`. Classes are taken for the numbers they have. Without the arguments that the model
        takes, they are those of all data points as they were last scored.

        Args:
            quantiles: numbers from 0 to 1.
            *args: the model's positional arguments.
            **kwargs: the model's keyword arguments.

        Returns:
            By site, the quantiles in a new left-most dimension in front of the site's shape in the model.

        Raises:
            ValueError: if a number does not lie in 0 .. 1.
            NotImplementedError: for one-hot sites, whose values have no order.
        """
        return self._given_medians(args, kwargs).quantiles(quantiles)

    def _given_medians(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TruncatedPosterior:
        """The posterior given the medians of other latents.

        That of all data points as they were last scored, where the model's arguments are left out.
        """
        if self._layout is not None and not (args or kwargs) and self._takes_arguments():
            return self.scored()
        with torch.no_grad():
            batch = self.batch(Call(self.model, args, kwargs), self.other_values(args, kwargs, median=True))
            return TruncatedPosterior(batch.rescored(), self.layout, batch.scorer.sizes)

    # --- the guide as a Pyro program ---

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Samples the discrete sites (and what ``conditional`` samples); the same arguments as the model's."""
        self.setup(*args, **kwargs)
        values = self._recorded_values()
        # A guide around this one may have sampled the other latents already.
        inherits = self.master is None and self._inherited is not None and not values
        if inherits:
            values = self._run_inherited(args, kwargs)
        elif not values:
            subsamples = _indices_of(getattr(self.master(), "plates", {})) if self.master is not None else {}
            values = self.other_values(args, kwargs, subsamples=subsamples)
        with torch.no_grad():
            try:
                plates, log_joint = self._open_plates(values, args, kwargs, are_made=inherits)
            except AllObservedError:
                return self._sample_given_states(values, args, kwargs)
            population = self._searched(log_joint).without_impossible()
        hidden = log_joint.hidden_log_probs(population.words)
        with ExitStack() as stack:
            for name in self.layout.plates:
                _enter(stack, plates[name])
            states = self._sample_states(population, hidden, log_joint, plates)
            # The draws that the states were scored with go with them: outside of a trace they are not the ones the list has just made.
            result: dict[str, Tensor] = {name: values[name] for name in self.layout.other_latents if name in values} | states
            if self.conditional is not None:
                given = {name: log_joint.nodes[name]["value"] for name in log_joint.observed}
                result.update(self.conditional({**given, **states}, *args, **kwargs) or {})
        return result

    def _sample_given_states(self, values: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Where the model observes all discrete sites: nothing is left to sample but what ``conditional`` does."""
        result: dict[str, Tensor] = {name: values[name] for name in self.layout.other_latents if name in values}
        if self.conditional is None:
            return result
        in_list = self.master is not None or self.create_plates is not None
        with SharedPlates(), ExitStack() as stack:
            plates = self._create_plates(*args, **kwargs) if in_list else model_plates(self.model, self._prototype_frames, args, kwargs)  # type: ignore[no-untyped-call]
            for name in self.layout.plates:
                _enter(stack, plates[name])
            try:
                self.log_joint_of(*args, values={**values, **_indices_of(plates)}, **kwargs)
            except AllObservedError as observed:
                with torch.enable_grad():
                    result.update(self.conditional(observed.values, *args, **kwargs) or {})
        return result

    def _open_plates(
        self, values: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], are_made: bool = False
    ) -> tuple[dict[str, Any], LogJoint]:
        """The plates to sample in, from the guide list or ``create_plates``, else with the very subsamples that the model draws.

        So guide and model agree whatever the batch size, and a handler outside (a replay, say) still has the last word. A guide around
        this one that has the plates already decides.
        """
        if are_made:
            return self.plates, self.log_joint_of(*args, values={**values, **_indices_of(self.plates)}, **kwargs)
        if self.master is not None or self.create_plates is not None:
            with SharedPlates():
                created: dict[str, Any] = self._create_plates(*args, **kwargs)  # type: ignore[no-untyped-call]
            if self.master is not None:
                refuse_subsampled_latents(self.master(), {name: created[name] for name in self.layout.plates})
            return created, self.log_joint_of(*args, values={**values, **_indices_of(created)}, **kwargs)
        frames = {frame.name: frame for site in self.layout.sites.values() for frame in site.frames if frame.vectorized}
        opened = open_plates({name: frame.dim for name, frame in frames.items()})
        known = recorded_subsamples(frames) | _indices_of(opened)
        log_joint = self.log_joint_of(*args, values={**values, **known}, **kwargs)
        frames = {f.name: f for site in self.layout.sites for f in log_joint.nodes[site]["cond_indep_stack"] if f.vectorized}
        with SharedPlates():
            self.plates = {
                name: opened.get(name) or pyro.plate(name, frame.full_size or frame.size, subsample=log_joint.values[name], dim=frame.dim)
                for name, frame in frames.items()
            }
        if any(plate.indices is not log_joint.values[name] for name, plate in self.plates.items()):
            log_joint = self.log_joint_of(*args, values={**values, **_indices_of(self.plates)}, **kwargs)
        return self.plates, log_joint

    def _searched(self, log_joint: LogJoint) -> Population:
        """The populations with their log joints, improved first where an ELBO asks for it."""
        for handler in _PYRO_STACK:
            if isinstance(handler, Searching) and not handler.done:
                handler.done = True
                population = self.search_(handler.search, log_joint, handler.steps)
                if not log_joint.is_vectorized:
                    return population
        return self.rescored(log_joint)

    def _sample_states(
        self, population: Population, hidden: Mapping[str, Tensor], log_joint: LogJoint, plates: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        layout, words = self.layout, population.words
        logits = population.log_joint.log_softmax(-1)
        batch = layout.spread(log_joint.sizes)
        logits = logits.reshape(*self._spread_draws(logits.shape[:-2], batch, log_joint.depth), logits.shape[-1])
        # What does not take many states at once can be enumerated one by one, by Pyro's ELBOs too.
        enumerate_ = "parallel" if self.is_enumerable else "sequential"
        infer: Any = {"enumerate": enumerate_, "is_auxiliary": True, "truncated": {"guide": weakref.ref(self)}}
        # A scale that the model puts on its discrete sites, beyond that of subsampling, must weigh the guide's sites as well.
        with poutine.scale(scale=log_joint.scale_beyond_plates):
            index = pyro.sample(self.index_name, dist.Categorical(logits=logits), infer=infer)
            rows = torch.arange(len(words), device=words.device).reshape(batch)
            # Unpacking forgets that the states come from the index, which pictures of the guide should show.
            levels = track_provenance(self.space.unpack(words[rows, index]), get_provenance(index))
            values = layout.decode(levels, max(layout.depth, levels.dim() - 1), log_joint.dtypes)
            # The guide's density gives back what a mask takes away from the model's, see LogJoint.
            densities = {name: -Vindex(value.movedim(0, -1))[..., index] for name, value in hidden.items()}
            zero = logits.new_zeros(())
            latent = {name: value for name, value in values.items() if name not in log_joint.observed}
            return {name: self._sample_site(name, value, plates, densities.get(name, zero)) for name, value in latent.items()}

    def _spread_draws(self, draws: Sequence[int], batch: Sequence[int], depth: int) -> tuple[int, ...]:
        """Batch shape with the draws of other latents (vectorised particles) at the plates that they come from, else left-most."""
        if not draws:
            return tuple(batch)
        dims = [frame.dim for frame in inspection.plates_around(self._prototype_frames, self.index_name) if frame.size > 1]
        if len(dims) != len(draws):
            dims = list(range(-depth, -depth + len(draws)))
        shape = [1] * (max(-min(dims), len(batch)) - len(batch)) + list(batch)
        for dim, size in zip(sorted(dims), draws, strict=True):
            shape[dim] = size
        return tuple(shape)

    def _sample_site(self, name: str, value: Tensor, plates: Mapping[str, Any], log_density: Tensor) -> Tensor:
        site = self.layout.sites[name]
        with ExitStack() as stack:
            for frame in site.frames:
                if frame.vectorized and frame.name not in self.layout.plates:
                    _enter(stack, plates[frame.name])
            value = trim(value, site.event_dim, site.depth)
            shape = value.shape[: value.dim() - site.event_dim]
            # Given always: with integer values the default would bring a float32 density into a float64 model.
            log_density = log_density.expand(torch.broadcast_shapes(shape, log_density.shape))
            value = value.expand((*log_density.shape, *value.shape[len(shape) :]))
            stack.enter_context(self.layout.room_for(site, log_density.dim()))
            return pyro.sample(name, dist.Delta(value, log_density=log_density, event_dim=site.event_dim))

    @property
    def siblings(self) -> Siblings | None:
        """The guides beside this one, in its list or in that of the guide it was inferred from."""
        return self._inherited if self.master is None else Siblings.of(self)

    def _run_inherited(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Samples what the guides of the trained list sample, in plates of these data; returns the values of the other latents."""
        assert self._inherited is not None
        # A trace of its own, so that what functions sample can be read even where nobody records it.
        with poutine.trace():
            self.plates = model_plates(self.model, self._prototype_frames, args, kwargs)
            self._inherited.run(self.plates, args, kwargs)
            return self._recorded_values()

    def _recorded_values(self) -> dict[str, Any]:
        """Draws of the model's other latents in the traces that are being recorded, with the subsamples of plates that they are for."""
        names = self.layout.other_latents if self._layout is not None else []
        found = inspection.recorded_values(names, self._prototype_frames, self.layout.depth) if names else {}
        return found | recorded_subsamples(self._prototype_frames) if found else {}

    def _values_from_trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Draws of the model's other latents by the guides before this one, from the trace that is being recorded where there is one."""
        recorded = self._recorded_values() if self._layout is not None else {}
        return recorded or self.other_values(args, kwargs)

    def other_values(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], median: bool = False, subsamples: Mapping[str, Tensor] | None = None
    ) -> dict[str, Any]:
        """Draws (or medians) of the model's other latents, outside of any trace, with the subsamples of plates that they are for.

        The subsamples are those given, else those of the model.
        """
        siblings = self.siblings
        if siblings is None or not self.layout.other_latents:
            return {}
        with poutine.block(), SparseSubsamples():
            plates = with_subsamples(self._fresh_plates(siblings, args, kwargs), subsamples or {})
        found = siblings.draw(self.layout.other_latents, plates, args, kwargs, median)
        return found | _indices_of(plates) if found else {}

    def _fresh_plates(self, siblings: Siblings, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Plates for the siblings, as their list would make them now."""
        if self.master is None:
            return model_plates(self.model, self._prototype_frames, args, kwargs)
        guide_list = siblings.guide_list
        if guide_list.prototype_trace is None:
            guide_list._setup_prototype(*args, **kwargs)
        kept = getattr(guide_list, "plates", {})
        try:
            return dict(guide_list._create_plates(*args, **kwargs))
        finally:
            guide_list.plates = kept


def _enter(stack: ExitStack, plate: Any) -> None:
    """Opens a plate that is not open already."""
    if not any(handler is plate for handler in _PYRO_STACK):
        stack.enter_context(plate)


def _old_layout(state_dict: Mapping[str, Any], prefix: str) -> str | None:
    if f"{prefix}words" not in state_dict:
        return None
    return (
        f"'{prefix}words' is of an earlier version, which kept populations in the guide itself: rename 'words', 'log_joint' and "
        f"'cardinalities' to '{prefix}populations.words' and so on, or train anew"
    )


def _indices_of(plates: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plate.indices for name, plate in plates.items()}
