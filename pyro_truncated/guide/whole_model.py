"""An automatic guide of a whole model's discrete latents.

It stands alone or in a list with guides of the other latents.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, cast

import pyro.poutine as poutine
import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_truncated.distributions.chains import MarkovChains, run_by_steps, step_names
from pyro_truncated.guide.companion_guides import Companions, refuse_subsampled_latents, share_plates
from pyro_truncated.guide.plates import SharedPlates, model_plates, refuse_other_size
from pyro_truncated.guide.structure import (
    chains_by_steps,
    find_layout,
    find_product,
    first_run,
    note_whole_states,
    refuse_steps,
)
from pyro_truncated.program.call import Call
from pyro_truncated.program.candidate_runs import RUN_MODES, Conditional, RunMode
from pyro_truncated.program.chain_scorer import ChainLayout, ChainScorer, CoupledStepsError
from pyro_truncated.program.dependencies import Dependencies
from pyro_truncated.program.discovery import refuse_partial_plates
from pyro_truncated.program.inspection import ordinary_tensors
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.product_layout import ProductLayout
from pyro_truncated.program.product_scorer import ProductScorer
from pyro_truncated.program.sites import sample_nodes, unwrap
from pyro_truncated.program.structures import KnownStructures, refuse_other_structure, warn_of_shared_subsamples
from pyro_truncated.program.vectorization import run_mode_for
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import check_count, check_kinds
from pyro_truncated.utils.parameter_store import free_plate_dims, isolate, refuse_diverged_copies, spare_random_numbers


class WholeModelGuide(AutoGuide):
    """What a discrete guide knows of its model and companion guides.

    The guides beside it stand in the same list.

    It scores states; which states, and with what weights the guide samples them, is left to what is made of it.

    Attributes:
        whole_states: whether populations hold whole states even where the factor graph has several nodes.
        num_states: the states that are kept; one where nobody keeps any.
        is_enumerable: whether Pyro's ELBOs can run the model on many states. Otherwise they enumerate them one after the other.
        populations: where states are kept, if anywhere.
        num_draws: draws of other latents, or of a conditional that is not exact, that are averaged over.
        is_conditional_exact: whether log joints are the same for every draw of the conditional; ``None`` if nobody has looked.
    """

    whole_states: bool = True
    num_states: int = 1
    holds_whole_states: bool = False
    populations: Any
    num_draws: int = 50
    is_conditional_exact: bool | None = None

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        conditional: Conditional | None,
        max_count: int | Mapping[str, int] | None,
        vectorize: bool | None,
        create_plates: Callable[..., Any] | None,
        memory_budget: int | None,
    ) -> None:
        check_kinds(WholeModelGuide.__init__, model=model, conditional=conditional)
        memory_budget = None if memory_budget is None else check_count("memory_budget (in bytes)", memory_budget, 2**20)
        if vectorize is not None and not isinstance(vectorize, bool):
            raise TypeError(
                f"vectorize must be None (find out), True (score states together) or False (one after the other); got {vectorize!r}"
            )
        super().__init__(model, create_plates=create_plates)  # type: ignore[no-untyped-call]
        self.max_count = max_count
        self.vectorize = vectorize
        self.memory_budget = memory_budget
        # Must not become a submodule: its parameters belong to the model or to other guides.
        self._conditional = (conditional,)
        self._layout: Layout | None = None
        self._product: ProductLayout | ChainLayout | None = None
        self._run_mode: RunMode = "together"
        self._structures = KnownStructures()
        self._num_scorers = 0
        self.is_enumerable = True
        self._inherited_companions: Companions | None = None
        # In a tuple, as another guide is no part of this one.
        self._alike: tuple[WholeModelGuide, ...] = ()

    # --- the model ---

    @property
    def model(self) -> Callable[..., Any]:
        """The model."""
        if self._model is None:
            raise RuntimeError(
                "this guide was pickled, which leaves its model behind. Its populations can be read; to use it, load its state_dict() "
                "into a new AutoTruncated(model, ...)."
            )
        return self._model[0]

    @property
    def conditional(self) -> Conditional | None:
        """The callable that samples continuous latents given the states."""
        return self._conditional[0]

    @property
    def options(self) -> dict[str, Any]:
        """Returns constructor arguments of a guide for other data."""
        names = ("conditional", "max_count", "vectorize", "create_plates", "memory_budget")
        return {name: getattr(self, name) for name in names}

    @property
    def layout(self) -> Layout:
        """The discrete sites and the data plates."""
        if self._layout is None:
            raise RuntimeError("the guide has not seen the model yet; call it (or svi.step) once with the model's arguments")
        return self._layout

    @property
    def space(self) -> StateSpace:
        """The space of one data point's states."""
        return self.layout.space

    @property
    def discrete_sites(self) -> set[str]:
        """Names of the discrete sites, of whole chains and their steps."""
        return {*self.layout.sites, *(self._product.steps if isinstance(self._product, ProductLayout) else ())}

    @property
    def index_name(self) -> str:
        """Name of the auxiliary index site."""
        return self.name_index(self.layout.sites)

    @property
    def index_names(self) -> list[str]:
        """Returns names of all auxiliary index sites."""
        nodes = [self.layout.sites] if self._product is None else [own.sites for own in self._product.node_layouts]
        return [self.name_index(sites) for sites in nodes]

    def name_index(self, sites: Iterable[str]) -> str:
        """Returns a name for an index site that is not in use."""
        name = "_".join([*sites, "index"])
        while name in self.layout.names:
            name += "_"
        return name

    @property
    def frames(self) -> Mapping[str, Any]:
        """Returns the plates of the model's latents, from its first run."""
        return self._prototype_frames

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """Inspects the model; called by the first use of the guide."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)

    def set_up_like(self, other: WholeModelGuide) -> None:
        """Lets the set-up take what another guide has read."""
        self._alike = (other,)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        call = Call(self.model, args, kwargs)
        with ordinary_tensors(), spare_random_numbers(), free_plate_dims():
            self._refuse_another()
            for other in self._alike:
                # A copy: what the other guide meets later, this one must look at itself.
                self._structures = copy.deepcopy(other._structures)
                self._layout, self._product = other._layout, other._product
                self._run_mode, self.is_enumerable, self._alike = other._run_mode, other.is_enumerable, ()
                self._keep_prototype(cast("poutine.Trace", other.prototype_trace))
                return
            trace = first_run(call, self.conditional)
            self._structures = KnownStructures()
            call = dataclasses.replace(call, first=trace)
            self._structures.add(call, sample_nodes(trace))
            self._layout, dependencies = find_layout(call, trace, self.max_count, self.num_states)
            is_whole = self.whole_states or self.holds_whole_states or self.conditional is not None
            if not is_whole:
                self._find_sets(call, trace, dependencies)
            if not self.whole_states and self.conditional is not None:
                note_whole_states(trace, self._layout, dependencies, self.num_states)
            if self._product is None:
                refuse_partial_plates(self._layout.sites.values(), self._layout.plates)
            with torch.no_grad():
                if self._product is not None:
                    self._run_mode, self.is_enumerable = "together", False
                else:
                    scorer = self._whole_scorer(call)
                    warn_of_shared_subsamples(scorer)
                    self._run_mode, self.is_enumerable = run_mode_for(self.vectorize, scorer, self.num_states)
            self._keep_prototype(trace)

    def _find_sets(self, call: Call, trace: poutine.Trace, dependencies: Dependencies) -> None:
        """Finds the nodes of the factor graph, if any.

        Sites of chains beside other latents are taken step by step, where that serves. So is a single one whose steps are coupled.
        """
        assert self._layout is not None
        names, refusal = chains_by_steps(trace, self._layout, self.num_states), None
        if not names:
            try:
                self._product = find_product(call, trace, self._layout, dependencies, self.num_states)
            except CoupledStepsError as error:
                names, refusal = list(self._layout.sites), error
        if names and not refuse_steps(trace, names):
            steps = call.with_program(functools.partial(run_by_steps, call.model))
            stepwise = first_run(steps, None)
            steps = dataclasses.replace(steps, first=stepwise)
            layout, among_steps = find_layout(steps, stepwise, self.max_count, self.num_states)
            product = find_product(steps, stepwise, layout, among_steps, self.num_states)
            if isinstance(product, ProductLayout):
                product.steps = {name: step_names(name, unwrap(trace.nodes[name]["fn"])[0]) for name in names}
                self._layout, self._product = layout, product
                self._structures.add(steps, sample_nodes(stepwise))
                return
        if refusal is not None:
            raise refusal
        if names:
            self._product = find_product(call, trace, self._layout, dependencies, self.num_states)

    def _keep_prototype(self, trace: poutine.Trace) -> None:
        """Keeps the latents of a run, as Pyro's guides do."""
        for name in [name for name, node in trace.nodes.items() if self._prototype_hide_fn(node)]:
            trace.remove_node(name)
        self.prototype_trace = trace
        if self.master is not None:
            self.master()._check_prototype(trace)
        frames = [frame for _, site in trace.iter_stochastic_nodes() for frame in site["cond_indep_stack"]]
        self._prototype_frames = {frame.name: frame for frame in frames if frame.vectorized}
        # Of states shape and type are kept.
        every = sample_nodes(trace).items()
        nodes = [node for name, node in every if name in self.layout.sites or isinstance(unwrap(node["fn"])[0], MarkovChains)]
        for node in nodes:
            node["value"] = node["value"].new_zeros(()).expand(node["value"].shape)
        self._device: torch.device = nodes[0]["value"].device

    def _forget_model(self) -> None:
        """Forgets the model, so that the next call sets the guide up."""
        self.prototype_trace, self._layout, self._product = None, None, None

    @property
    def product(self) -> ProductLayout | ChainLayout | None:
        """The nodes of the model's factor graph if each has a set."""
        return self._product

    def _stored_sets(self) -> list[Tensor]:
        """The sets of all nodes, where each has one."""
        raise NotImplementedError

    def scorer(self, call: Call, values: Mapping[str, Any] | None = None) -> LogJoint | ProductScorer | ChainScorer:
        """Returns a scorer for the data points that a call selects."""
        if torch._C._get_tracing_state():
            raise NotImplementedError(
                "AutoTruncated cannot be traced by torch.jit: its states change while it trains. Use TraceEnum_ELBO, not JitTraceEnum_ELBO."
            )
        self.setup(*call.args, **call.kwargs)
        refuse_diverged_copies(call.model)
        if isinstance(self._product, ProductLayout) and self._product.steps:
            call = call.with_program(functools.partial(run_by_steps, call.model))
        names = [name for name in self.layout.other_latents if name not in (values or {})]
        if names and self.conditional is None:
            warnings.warn(
                f"no guide covers the latents {names}: they are drawn from the prior. Combine AutoTruncated with another guide in an "
                "AutoGuideList, or give it a conditional.",
                stacklevel=3,
            )
        scorer = self._scorer(call, values)
        self._look_at_entries(scorer)
        if (call, scorer.nodes) in self._structures:
            return scorer
        # Another scorer draws other random numbers, and one that has looked may not score as fast.
        before, values = self._run_state(), {**(values or {}), **scorer.subsamples}
        with spare_random_numbers():
            self._look_again(self._scorer(call, values))
            self._structures.add(call, scorer.nodes)
            return scorer if self._run_state() == before else self._scorer(call, values)

    def batch(self, call: Call, values: Mapping[str, Any] | None = None) -> Any:
        """Returns the populations of data points that a call selects."""
        raise NotImplementedError

    def _look_at_entries(self, scorer: LogJoint | ProductScorer | ChainScorer) -> None:
        """Looks whether entries depend on other latents, at calls 2, 4, 8 and so on."""
        # Parameters may be trained to values that show more than the first ones.
        if isinstance(scorer, ProductScorer) and scorer.product.graph.entries:
            self._num_scorers += 1
            if self._num_scorers > 1 and self._num_scorers.bit_count() == 1:
                with spare_random_numbers(), torch.no_grad():
                    scorer.refuse_other_entries(self._num_scorers)

    def _run_state(self) -> tuple[Any, ...]:
        """All that scorers of one guide differ by."""
        layout = self.layout
        sites = layout.dependents, layout.read, layout.conditional_sites, layout.sites_to_check
        return self._run_mode, self.is_enumerable, layout.is_linear, layout.takes_shared_states, sites

    def _scorer(self, call: Call, values: Mapping[str, Any] | None) -> LogJoint | ProductScorer | ChainScorer:
        if isinstance(self._product, ChainLayout):
            return ChainScorer(call, self._product, values)
        if self._product is not None:
            return ProductScorer.on_sets(call, self._product, values, self._stored_sets)
        return self._whole_scorer(call, values)

    def _whole_scorer(self, call: Call, values: Mapping[str, Any] | None = None) -> LogJoint:
        return LogJoint(
            call,
            self.layout,
            values=values,
            conditional=self.conditional,
            memory_budget=self.memory_budget,
            run_mode=self._run_mode,
        )

    def _look_again(self, scorer: LogJoint | ProductScorer | ChainScorer) -> None:
        """Reads the structure of a call that may have another one.

        What the model has not taken once, such as many states at once, it is not given again.
        """
        with ordinary_tensors(), spare_random_numbers(), torch.no_grad():
            refuse_other_structure(scorer, self.max_count)
            warn_of_shared_subsamples(scorer)
            if not isinstance(scorer, LogJoint):
                return
            layout = scorer.layout
            was_linear, took_shared = layout.is_linear, layout.takes_shared_states
            layout.is_linear = layout.takes_shared_states = False
            mode, is_enumerable = run_mode_for(self.vectorize, scorer, self.num_states)
            layout.is_linear &= was_linear
            layout.takes_shared_states &= took_shared
            self._run_mode = max(self._run_mode, mode, key=RUN_MODES.index)
            self.is_enumerable &= is_enumerable

    # --- the guides beside this one, and the plates that they share ---

    @property
    def companions(self) -> Companions | None:
        """The guides beside this one."""
        return self._inherited_companions if self.master is None else Companions.from_guide(self)

    def other_values(self, call: Call, *, median: bool = False, subsamples: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        """Draws (or medians) of other latents by the guides beside this one."""
        companions = self.companions
        if companions is None or not self.layout.other_latents:
            return {}
        return companions.values(self.layout.other_latents, call, median=median, subsamples=subsamples)

    def inherit(self, companions: Companions | None) -> None:
        """Adopts guides that were trained beside another one, on other data."""
        for name in self.layout.plates:
            frame = self.frames[name]
            if frame.size != (frame.full_size or frame.size):
                raise ValueError(
                    f"infer() needs all {frame.full_size} data points of plate '{name}' at once; the model subsampled {frame.size}. "
                    "Call it with arguments for which the model takes all of them."
                )
        if companions is not None:
            companions.refuse_unknown_latents(self.layout, self.prototype_trace)
            # The model has opened the plates of these data.
            self._inherited_companions = dataclasses.replace(companions, frames=self.frames)

    def created_plates(self, call: Call) -> dict[str, Any] | None:
        """Returns the plates of the guide list or of ``create_plates``."""
        if self.master is None and self.create_plates is None:
            return None
        with SharedPlates():
            plates: dict[str, Any] = self._create_plates(*call.args, **call.kwargs)  # type: ignore[no-untyped-call]
        if self.master is not None:
            refuse_subsampled_latents(self.master(), plates)
        return plates

    def _refuse_another(self) -> None:
        parts = [] if self.master is None else self.master()
        if any(isinstance(part, WholeModelGuide) and part is not self for part in parts):
            raise ValueError(
                "an AutoGuideList can hold only one AutoTruncated: it takes all discrete sites of the model, as their posterior is joint"
            )

    def _update_master(self, master_ref: Callable[[], Any]) -> None:
        share_plates(master_ref(), self)
        old = self.master() if self.master is not None else None
        if old is not None and old.create_plates == self._list_plates:
            old.create_plates = None
        super()._update_master(master_ref)  # type: ignore[no-untyped-call]
        if master_ref().create_plates is None:
            master_ref().create_plates = self._list_plates

    def _list_plates(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Returns the plates of a guide list for these arguments."""
        # The model opens them, as its first run may have had another size.
        guide_list, call = self.master(), Call(self.model, args, kwargs)  # type: ignore[misc]
        share_plates(guide_list, self)
        plates = model_plates(call, guide_list._prototype_frames)
        if self._layout is not None:
            size = math.prod(plates[name].size for name in self.layout.plates if name in plates)
            if size != self.layout.num_data:
                with spare_random_numbers(), torch.no_grad(), isolate():
                    nodes = sample_nodes(call.trace())
                # What is observed altogether has no populations.
                if not all(name in nodes and nodes[name]["is_observed"] for name in self.layout.sites):
                    refuse_other_size(self.layout.num_data, size, self.layout.plates)
            refuse_subsampled_latents(guide_list, plates)
        return list(plates.values())

    # --- copies ---

    def __getstate__(self) -> dict[str, Any]:
        # Autoguides are pickled without model and list, but the base class takes them from the living guide too.
        model, master = self._model, self.master
        try:
            state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        finally:
            self._model, self.master = model, master
        return {**state, "_conditional": (None,), "_inherited_companions": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        duplicate = self.__class__.__new__(self.__class__)
        memo[id(self)] = duplicate
        # What was read of the first run is never changed, and torch does not copy views of parameters that steps have changed since.
        memo[id(self.prototype_trace)] = self.prototype_trace
        duplicate.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[no-untyped-call]
        duplicate._model = self._model and (_find_copy(self.model, memo),)
        duplicate._conditional = (_find_copy(self.conditional, memo),)
        duplicate._inherited_companions = self._inherited_companions
        return duplicate


def _find_copy(program: Any, memo: dict[int, Any]) -> Any:
    """The copy of a program that was copied before, else itself."""
    if inspect.ismethod(program) and id(program.__self__) in memo:
        return types.MethodType(program.__func__, memo[id(program.__self__)])
    return memo.get(id(program), program)
