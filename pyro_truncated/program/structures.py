"""Calls of a program whose structure differs from the first one's.

A switch among the arguments, for example, may let densities depend on other latents, or let Python code look at their values.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from pyro_truncated.program.call import Call
from pyro_truncated.program.chain_scorer import ChainScorer
from pyro_truncated.program.dependencies import Dependencies
from pyro_truncated.program.discovery import refuse_wider_support
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.product_scorer import NUM_TRIED, ProductScorer
from pyro_truncated.program.sites import density_nodes, is_subsampled

_NUMBERS = (bool, int, float, str, bytes, enum.Enum, np.generic)


class KnownStructures:
    """The calls of a program whose structure is known.

    Of arguments they are told apart by kinds: types, switches and whether numbers are zero; and by numbers: shapes, and integers.
    What a program holds itself counts, too.
    """

    def __init__(self) -> None:
        self._sites: set[str] = set()
        self._numbers: dict[Any, set[Any]] = {}

    def __contains__(self, run: tuple[Call, Mapping[str, Any]]) -> bool:
        call, nodes = run
        leaves = _leaves(call)
        known = self._numbers.get(_kinds(leaves), set())
        # Where several numbers have told nothing, such as numbers of steps, others will not either.
        return nodes.keys() <= self._sites and (len(known) >= NUM_TRIED or _numbers(leaves, nodes) in known)

    def add(self, call: Call, nodes: Mapping[str, Any]) -> None:
        """Notes that the structure of a call is known.

        Args:
            call: the program and its arguments.
            nodes: the sample sites of a run.
        """
        leaves = _leaves(call)
        self._numbers.setdefault(_kinds(leaves), set()).add(_numbers(leaves, nodes))
        self._sites |= nodes.keys()


def _kinds(leaves: Iterable[Any]) -> Any:
    # However many there are: lists may have any length.
    return tuple(dict.fromkeys(map(_kind, leaves)))


def _numbers(leaves: Iterable[Any], nodes: Mapping[str, Any]) -> Any:
    values = (node["value"] for node in nodes.values() if node["is_observed"] and isinstance(node["value"], Tensor))
    observed = {value.untyped_storage().data_ptr() for value in values if value.layout == torch.strided}
    return tuple(_number(leaf, observed) for leaf in leaves)


def refuse_other_structure(scorer: LogJoint | ProductScorer | ChainScorer, max_count: int | Mapping[str, int] | None) -> None:
    """Checks that densities and supports depend on no other latents.

    They may depend on those that they did depend on when the guide was set up.

    Args:
        scorer: of a call.
        max_count: largest value of counts, for all or by site name.

    Raises:
        ValueError: naming the sites.
    """
    layout = scorer.layout
    dependencies = Dependencies(scorer.call, max_count)
    if problem := _find_problem(scorer, dependencies):
        advice = ", or make the guide with AutoTruncated(..., whole_states=True)" if isinstance(scorer, ProductScorer) else ""
        raise ValueError(
            f"the model has another structure than when the guide was set up: {problem}. Make a new guide and first call "
            f"guide.setup(*args) with the arguments of the largest structure{advice}."
        )
    latents = set(layout.sites)
    conditional = latents & dependencies.conditional(latents) - set(scorer.observed_sites)
    for name in conditional:
        refuse_wider_support(scorer.nodes, layout.sites, name, layout.limits.get(name), dependencies)
    layout.dependents |= dependencies.dependents(latents)
    layout.read |= dependencies.read & latents
    layout.conditional_sites |= conditional
    layout.sites_to_check |= conditional
    if isinstance(scorer, ChainScorer):
        scorer.refuse_coupled_steps()


def _find_problem(scorer: LogJoint | ProductScorer | ChainScorer, dependencies: Dependencies) -> str:
    """What is not as it was in the first call, in words.

    It is empty if that is nothing.
    """
    read = sorted(dependencies.read & scorer.layout.sites.keys())
    if isinstance(scorer, ProductScorer) and read:
        return f"Python looks at values of {read}"
    if names := _crossing_sites(scorer, dependencies):
        return f"the sites {names} depend on other discrete latents"
    if isinstance(scorer, ProductScorer) and not scorer.takes_sets(share_sets=scorer.product.shares_sets):
        return "some of its densities depend on other discrete latents"
    return ""


def warn_of_shared_subsamples(scorer: LogJoint | ProductScorer | ChainScorer) -> None:
    """Warns of minibatches that have a latent in common.

    It lies outside of their plate. The log evidence of such a latent is not linear in the terms of the minibatch, which are scaled up.
    """
    layout = scorer.layout
    plates = {name: set(layout.plates) for name in layout.dependents}
    if isinstance(scorer, ProductScorer):
        own = [{plate for plate, _, _ in node.plates} for node in scorer.product.graph.nodes]
        plates = {name: set.intersection(*(own[number] for number in nodes)) for name, nodes in scorer.product.graph.factors.items()}
    for name in sorted(plates.keys() & scorer.nodes.keys()):
        for frame in scorer.nodes[name]["cond_indep_stack"]:
            if is_subsampled(frame) and frame.name not in plates[name]:
                warnings.warn(
                    f"site '{name}' lies in the subsampled plate '{frame.name}' and depends on discrete latents outside of it. The loss of "
                    f"a minibatch is no unbiased estimate of that of all data: evaluate it, or train, with all members of '{frame.name}'.",
                    UserWarning,
                    stacklevel=2,
                )
                return


def _crossing_sites(scorer: LogJoint | ProductScorer | ChainScorer, dependencies: Dependencies) -> list[str]:
    """Returns sites whose densities depend on other latents than they may.

    Where each node has a set, they are latents that the density did not depend on before, and else those of other data points.
    """
    nodes = density_nodes(scorer.nodes)
    latents = scorer.layout.sites.keys() - set(scorer.observed_sites)
    plates = {name: {frame.name for frame in node["cond_indep_stack"]} for name, node in nodes.items()}
    if not isinstance(scorer, ProductScorer):
        # Whole states need no graph. Where it is not known, only runs tell what couples data points.
        below = set() if dependencies.scopes is None else dependencies.dependents(latents)
        return sorted(name for name in below & nodes.keys() if not set(scorer.layout.plates) <= plates[name])
    if dependencies.scopes is None:
        return sorted(nodes.keys() - latents)
    graph = scorer.product.graph
    return sorted(
        {
            name
            for name in nodes
            for number, node in enumerate(graph.nodes)
            if latents & dependencies.scopes.get(name, frozenset()) & set(node.sites)
            and (number not in graph.factors.get(name, ()) or not {plate for plate, _, _ in node.plates} <= plates[name])
        }
    )


def _leaves(call: Call) -> list[Any]:
    """All arguments, and what the program and they hold."""
    leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
    seen: set[int] = set()
    return [*leaves, *(value for owner in [call.model, *leaves] for value in _held_values(owner, seen))]


def _kind(value: Any) -> Any:
    """A value's type, a switch, and whether a number is zero."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, (Tensor, np.ndarray)):
        # A look at values would wait for a device.
        is_number = value.ndim == 0 and (isinstance(value, np.ndarray) or value.device.type == "cpu")
        return value.ndim, _kind(value.item()) if is_number else str(value.dtype)
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return name, value != 0
    return (name, str(value)) if isinstance(value, (bool, enum.Enum)) else name


def _number(value: Any, observed: set[int]) -> Any:
    """Shapes, and integers such as edges, but for observed ones."""
    if isinstance(value, Tensor):
        is_plain = value.layout == torch.strided and not value.is_nested and value.device.type == "cpu"
        has_edges = is_plain and not value.is_floating_point() and not value.is_complex()
        is_data = has_edges and value.untyped_storage().data_ptr() in observed
        return value.shape, _hash(value.detach().numpy()) if has_edges and not is_data else None
    if isinstance(value, np.ndarray):
        return value.shape, _hash(value) if value.dtype.kind in "biu" else None
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, (int, str, bytes)) else None


def _hash(integers: np.ndarray) -> int:
    return hash(integers.reshape(-1)[:: 1 + integers.size // 2**16].tobytes())


def _held_values(program: Any, seen: set[int], depth: int = 3) -> Iterator[Any]:
    """Values that a program reads beside its arguments.

    They are attributes, closures and globals, those of functions that it calls by these among them. Its arguments may be such programs.
    """
    if program is None or isinstance(program, (Tensor, np.ndarray, types.ModuleType, *_NUMBERS)) or id(program) in seen:
        return
    seen.add(id(program))
    if isinstance(program, functools.partial):
        held = [program.func, *pytree.tree_leaves((program.args, program.keywords))]
    elif inspect.isfunction(program):
        try:
            names = inspect.getclosurevars(program)
        except ValueError:  # a variable of the closure that has no value yet
            return
        held = [*names.nonlocals.values(), *names.globals.values()]
    else:
        held = list(getattr(program.__self__ if inspect.ismethod(program) else program, "__dict__", {}).values())
    for value in held:
        if value is None or isinstance(value, _NUMBERS):
            yield value
        elif depth and (isinstance(value, functools.partial) or inspect.isfunction(value) or inspect.ismethod(value)):
            yield from _held_values(value, seen, depth - 1)
