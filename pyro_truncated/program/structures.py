"""Calls of a program whose structure differs from the first one's.

A switch among the arguments, for example, may let densities depend on other latents, or let Python code look at their values.
"""

from __future__ import annotations

import enum
import functools
import inspect
import warnings
from collections.abc import Iterator, Mapping
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
    """The calls of a program whose structure is known."""

    def __init__(self) -> None:
        self._sites: set[str] = set()
        self._numbers: dict[Any, set[Any]] = {}

    def __contains__(self, run: tuple[Call, Mapping[str, Any]]) -> bool:
        call, nodes = run
        kinds, numbers = _structure_of(call, nodes)
        known = self._numbers.get(kinds, set())
        # Where several numbers have told nothing, such as numbers of steps, others will not either.
        return nodes.keys() <= self._sites and (numbers in known or len(known) >= NUM_TRIED)

    def add(self, call: Call, nodes: Mapping[str, Any]) -> None:
        """Notes that the structure of a call is known.

        Args:
            call: the program and its arguments.
            nodes: the sample sites of a run.
        """
        kinds, numbers = _structure_of(call, nodes)
        self._numbers.setdefault(kinds, set()).add(numbers)
        self._sites |= nodes.keys()


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
        return sorted(name for name in dependencies.dependents(latents) & nodes.keys() if not set(scorer.layout.plates) <= plates[name])
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


def _structure_of(call: Call, nodes: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns what of a call's arguments a structure may depend on.

    They are kinds: types, switches and whether numbers are zero; and numbers: shapes, and integers, those of tensors that are not
    observed, such as edges, among them. What a program holds itself counts, too.

    Args:
        call: the program and its arguments.
        nodes: the sample sites of a run.
    """
    observed: set[int] | None = None
    kinds: list[Any] = []
    numbers: list[Any] = []
    leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
    held = (value for owner in [call.model, *leaves] for value in _held_values(owner))
    for leaf in [*leaves, *held]:
        kind, number = _describe(leaf)
        kinds.append(kind)
        if isinstance(number, Tensor):
            if observed is None:
                tensors = (node["value"] for node in nodes.values() if node["is_observed"] and isinstance(node["value"], Tensor))
                observed = {value.untyped_storage().data_ptr() for value in tensors}
            has_edges = not (number.is_floating_point() or number.is_complex()) and number.untyped_storage().data_ptr() not in observed
            number = number.shape, hash(number.numpy(force=True).tobytes()) if has_edges else None
        numbers.append(number)
    return tuple(kinds), tuple(numbers)


def _describe(value: Any) -> tuple[Any, Any]:
    """Returns the kind of a value, and a tensor or integer."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.as_tensor(value)
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested and value.device.type != "meta":
        if value.numel() == 1 and not value.is_complex():
            kind, number = _describe(value.item())
            return (value.dim(), kind), number
        return value.dim(), value
    value = value.item() if isinstance(value, np.generic) else value
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, float):
        return (name, value != 0), None
    if isinstance(value, (bool, enum.Enum)):
        return (name, str(value)), None
    return name, value if isinstance(value, (int, str, bytes)) else None


def _held_values(program: Any, depth: int = 3) -> Iterator[Any]:
    """Values that a program reads beside its arguments.

    They are attributes, closures and globals, those of functions that it calls by these among them. Its arguments may be such programs.
    """
    if program is None or isinstance(program, (Tensor, np.ndarray, *_NUMBERS)):
        return
    if isinstance(program, functools.partial):
        held = [program.func, *pytree.tree_leaves((program.args, program.keywords))]
    elif inspect.isfunction(program):
        names = inspect.getclosurevars(program)
        held = [*names.nonlocals.values(), *names.globals.values()]
    else:
        held = list(getattr(program.__self__ if inspect.ismethod(program) else program, "__dict__", {}).values())
    for value in held:
        if value is None or isinstance(value, _NUMBERS):
            yield value
        elif depth and (isinstance(value, functools.partial) or inspect.isfunction(value) or inspect.ismethod(value)):
            yield from _held_values(value, depth - 1)
