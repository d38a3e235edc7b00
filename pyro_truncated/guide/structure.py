"""What a guide reads from its model on the first call.

It reads the discrete sites, the plates, and how states can be scored. If the model fails for parameters of an earlier one in Pyro's
store, it names them.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyro
import pyro.poutine as poutine
import torch

from pyro_truncated.distributed import collectives
from pyro_truncated.distributed.shards import Portion, find_portion
from pyro_truncated.distributions.chains import MarkovChains, keeps_step_density, step_names
from pyro_truncated.program.call import Call
from pyro_truncated.program.candidate_runs import Conditional
from pyro_truncated.program.chain_scorer import ChainLayout, ChainScorer
from pyro_truncated.program.changing_sites import refuse_changing_sites
from pyro_truncated.program.densities import count_entries
from pyro_truncated.program.dependencies import Dependencies
from pyro_truncated.program.discovery import refuse_partial_plates
from pyro_truncated.program.entries import Entries
from pyro_truncated.program.entry_search import MOST_ENTRIES, find_entries
from pyro_truncated.program.factor_graph import CLIQUE_LIMIT, DENSITY_LIMIT, FactorGraph, build_graph
from pyro_truncated.program.inspection import refuse_hidden_latents, warn_about_running_statistics
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.operations import BROADCASTS
from pyro_truncated.program.product_layout import ProductLayout
from pyro_truncated.program.product_scorer import ProductScorer
from pyro_truncated.program.sites import is_subsampled, sample_nodes, unwrap
from pyro_truncated.program.structures import warn_of_shared_subsamples
from pyro_truncated.utils.arguments import naming_empty_plates
from pyro_truncated.utils.arrays import is_array
from pyro_truncated.utils.console import note_once
from pyro_truncated.utils.parameter_store import ShadowWatch, empty_store, refuse_shadowed_parameters, spare_random_numbers


def first_run(call: Call, conditional: Conditional | None) -> poutine.Trace:
    """A trace of a model that a guide has not met before."""
    refuse_shadowed_parameters(call.model, conditional)
    with naming_earlier_parameters(call):
        refuse_hidden_latents(call)
        with naming_empty_plates(), naming_arrays(call), poutine.block(), torch.no_grad(), ShadowWatch(), warn_about_running_statistics():
            return call.trace()


def find_layout(
    call: Call, trace: poutine.Trace, max_count: int | Mapping[str, int] | None, num_states: int
) -> tuple[Layout, Dependencies]:
    """The discrete sites and data plates of a traced model."""
    dependencies = Dependencies(call, max_count)
    refuse_changing_sites(call, trace, dependencies)
    layout = Layout(trace, dependencies, max_count)
    # Where all states are kept the prior of what is masked adds up to one.
    layout.idle_sites = frozenset() if layout.space.size <= num_states else frozenset(layout.sites)
    layout.note_readers(dependencies)
    if not any(node["is_observed"] for node in trace.nodes.values() if node["type"] == "sample"):
        warnings.warn(
            "AutoTruncated sees no observed site: its posterior would be the prior. "
            "Give it the whole model, not poutine.block(model, ...).",
            stacklevel=2,
        )
    return layout, dependencies


def find_product(
    call: Call, trace: poutine.Trace, layout: Layout, dependencies: Dependencies, num_states: int
) -> ProductLayout | ChainLayout | None:
    """Returns the nodes of a factor graph, or a site of chains.

    ``None`` means that populations hold whole states.

    That is so where all whole states fit into a population, and of models that do not take many states at once. M-steps in closed form read
    whole states, too.
    """
    chains = ChainLayout.from_trace(trace, layout)
    if chains is not None:
        with spare_random_numbers(), torch.no_grad():
            steps = ChainScorer(call, chains)
            steps.refuse_coupled_steps()
            warn_of_shared_subsamples(steps)
        return chains
    if hasattr(call.model, "sufficient_statistics"):
        return None
    if names := chains_by_steps(trace, layout, num_states):
        reason = refuse_steps(trace, names) or "densities of a step depend on other steps, or all steps on the other discrete latents"
        note_once(f"the states of {names}, sites of chains, are whole paths, {num_states} of them: {reason}.")
    inner = [frame for site in layout.sites.values() for frame in site.frames if frame.name not in layout.plates]
    is_partial = any(is_subsampled(frame) and frame.vectorized for frame in inner)
    if dependencies.scopes is None and not layout.read and layout.space.size > num_states:
        note_once(
            "some densities depend on latents by code that torch does not show: populations hold whole states. For sets of states write it "
            "in plain torch."
        )
    if dependencies.scopes is None or layout.read or (layout.space.size <= num_states and not is_partial):
        return None
    graph = build_graph(trace, dependencies.scopes, layout.sites, num_states)
    split = _split_graph(call, trace, layout, dependencies, graph, num_states)
    product = None if split is None else _take_sets(call, layout, split, num_states)
    if product is not None:
        return product
    for sentence in graph.whole:
        note_once(sentence)
    if len(graph.nodes) == 1 or (product := _take_sets(call, layout, graph, num_states)) is not None:
        return product
    note_once(
        f"the model's factor graph has {len(graph.nodes)} nodes, but its densities on sets of states, in dimensions left of its plates, "
        "are others than on single states: populations hold whole states. Index shapes from the right (x.sum(-1, keepdim=True), x[..., 0], "
        "Vindex), compute within the members of plates, and draw random numbers by pyro.sample."
    )
    return None


def _split_graph(
    call: Call, trace: poutine.Trace, layout: Layout, dependencies: Dependencies, graph: FactorGraph, num_states: int
) -> FactorGraph | None:
    """Returns a graph in which parts of a site's entries are factors.

    It is ``None`` where that is no other graph, or one with large tables. Sites are those that join latents to nodes.
    """
    if not graph.coupling_sites or dependencies.scopes is None:
        return None
    with spare_random_numbers(), torch.no_grad():
        entries: dict[str, Entries] = {}
        for layout.broadcasts_parts in BROADCASTS[1:]:
            entries = entries or find_entries(ProductScorer(call, ProductLayout(graph, layout)), dependencies.scopes)
        layout.broadcasts_parts = ""
    if not entries:
        return None
    split = build_graph(trace, dependencies.scopes, layout.sites, num_states, entries)
    sizes = _set_sizes(layout, split, num_states)
    largest = max(sizes[node] * math.prod(sizes[other] for other in others) for node, others in enumerate(split.separators))
    finer, coarser = ((len(one.nodes), sum(node.num_members for node in one.nodes)) for one in (split, graph))
    # Densities of all entries on all states of their nodes, before they are split.
    entries_of = {name: {split.colours[node]: sizes[node] for node in split.factors[name]} for name in entries}
    nodes = sample_nodes(trace)
    most = max(count_entries(nodes[name]) * math.prod(own.values()) for name, own in entries_of.items())
    return split if finer > coarser and largest <= max(num_states**2, DENSITY_LIMIT) and most <= MOST_ENTRIES else None


def _set_sizes(layout: Layout, graph: FactorGraph, num_states: int) -> list[int]:
    """How many states the set of each node holds."""
    return [min(num_states, layout.part(node.sites, node.plate_names).space.size) for node in graph.nodes]


def _take_sets(call: Call, layout: Layout, graph: FactorGraph, num_states: int) -> ProductLayout | None:
    """Returns a set of states for each node."""
    # Where nodes that no density joins are added up, as for a recorded total, each needs a dimension of its own.
    apart = dataclasses.replace(graph, colours=tuple(range(len(graph.nodes))))
    for coloured in [graph, apart] if math.prod(_set_sizes(layout, graph, num_states)) <= CLIQUE_LIMIT else [graph]:
        product = ProductLayout(coloured, layout)
        for own in product.node_layouts:
            refuse_partial_plates(own.sites.values(), own.plates)
        exact = {name for own in product.node_layouts if own.space.size <= num_states for name in own.sites}
        with spare_random_numbers(), torch.no_grad():
            scorer = ProductScorer(call, product)
            for layout.broadcasts_parts in BROADCASTS:
                if scorer.takes_sets():
                    layout.idle_sites -= exact
                    # Where nodes are in no plate there is nothing to share.
                    product.shares_sets = any(own.dims for own in product.node_layouts)
                    product.shares_sets = product.shares_sets and scorer.takes_sets(is_reduction_known=True)
                    warn_of_shared_subsamples(scorer)
                    return product
            layout.broadcasts_parts = ""
    return None


def chains_by_steps(trace: poutine.Trace, layout: Layout, num_states: int) -> list[str]:
    """Sites of chains whose steps may be nodes of the graph.

    These are all but a single one of binary chains, which has messages of its own, and those of which all paths are kept.
    """
    if layout.space.size <= num_states or ChainLayout.from_trace(trace, layout) is not None:
        return []
    chains = {name: unwrap(trace.nodes[name]["fn"])[0] for name in layout.sites}
    return [name for name, fn in chains.items() if keeps_step_density(fn) and fn.num_steps > 1]


def refuse_steps(trace: poutine.Trace, names: Sequence[str]) -> str:
    """Why chains cannot be sampled step by step, in words."""
    if wrapped := [name for name in names if not isinstance(trace.nodes[name]["fn"], MarkovChains)]:
        return f"the distributions of {wrapped} have further event dimensions, not plates"
    steps = [step for name in names for step in step_names(name, unwrap(trace.nodes[name]["fn"])[0])]
    if taken := [step for step in steps if step in trace.nodes]:
        return f"the model has sites {taken} of its own, which are names of steps"
    return ""


def note_whole_states(trace: poutine.Trace, layout: Layout, dependencies: Dependencies, num_states: int) -> None:
    """Says where a conditional alone makes populations hold whole states."""
    if dependencies.scopes is None or layout.read or layout.space.size <= num_states:
        return
    number = len(build_graph(trace, dependencies.scopes, layout.sites, num_states).nodes)
    if number > 1:
        note_once(
            f"conditional= needs whole states: populations hold {num_states} of them, and no sets for each of the {number} nodes of the "
            "model's factor graph. For sets leave conditional= out, and sum the continuous latents out in the model."
        )


def plate_portion(layout: Layout, arguments: Any) -> Portion | None:
    """Returns which data points a call with shards has."""
    portion = find_portion(arguments)
    if portion is None or not portion.is_part:
        return portion
    if not layout.full_sizes or layout.full_sizes[0] != portion.size:
        places = {name: [frame.name for frame in site.frames] for name, site in layout.sites.items()}
        raise NotImplementedError(
            f"the rows of a shard must be the data points of the left-most plate that holds all discrete latents; got {portion.size} rows "
            f"for {list(layout.plates)} of sizes {list(layout.full_sizes)}. The latents lie in the plates {places}: open one for all, "
            "or train on all data in one process, without distributed.shard."
        )
    return portion.times(layout.num_data // portion.size)


def refuse_other_structure(product: ProductLayout | ChainLayout | None) -> None:
    """Refuses processes that read different nodes from their rows; all call it."""
    own = None if product is None else [(tuple(group.sites), group.space.cardinalities) for group in product.groups]
    if any(other != own for other in collectives.gather(own)):
        raise NotImplementedError(
            "the processes read different factor graphs from their rows of the data. "
            "Use AutoTruncated(..., whole_states=True), or train in one process, without distributed.shard."
        )


def takes_arguments(model: Callable[..., Any], *, otherwise: bool) -> bool:
    """Whether a model cannot be called without arguments."""
    parameters = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model).parameters.values()
    if all(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters):
        return len(parameters) > 0 and otherwise
    return True


@contextmanager
def naming_arrays(call: Call) -> Iterator[None]:
    """Adds to errors of a model which arguments are no tensors."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        named = {**{f"number {place}": value for place, value in enumerate(call.args, 1)}, **call.kwargs}
        arrays = {name: value for name, value in named.items() if is_array(value) or isinstance(value, (list, tuple))}
        # What the library refuses it has named itself.
        where = list(traceback.walk_tb(error.__traceback__))[-1][0].f_globals.get("__name__", "")
        if arrays and where.partition(".")[0] != "pyro_truncated":
            others = ", ".join(f"{name} (a {type(value).__name__})" for name, value in arrays.items())
            error.add_note(f"Of the model's arguments these are no tensors: {others}. Pyro needs torch.as_tensor of them.")
        raise


@contextmanager
def naming_earlier_parameters(call: Call) -> Iterator[None]:
    """Names earlier parameters if a model fails for their shapes."""
    try:
        yield
    except Exception as error:
        if others := _find_shape_mismatches(call):
            reason = str(error).partition("\n")[0]  # Pyro adds the shapes of all sites
            raise ValueError(
                f"the model fails ({reason}), as Pyro's parameter store holds parameters of an earlier model under the same names: "
                f"{', '.join(others)}. Call pyro.clear_param_store() before making the guide, or run each model under "
                '"with pyro.get_param_store().scope(state):".'
            ) from error
        raise


def _find_shape_mismatches(call: Call) -> list[str]:
    """Returns parameters whose shapes would differ with an empty store."""
    shapes = {name: value.shape for name, value in pyro.get_param_store().items()}
    if not shapes:
        return []
    try:
        with empty_store(), poutine.block(), torch.no_grad(), spare_random_numbers():
            call.trace()
            first_shapes = {name: value.shape for name, value in pyro.get_param_store().items()}
    except Exception:
        return []
    return [
        f"'{name}' of shape {tuple(shapes[name])} in the place of {tuple(shape)}"
        for name, shape in first_shapes.items()
        if shapes.get(name, shape) != shape
    ]
