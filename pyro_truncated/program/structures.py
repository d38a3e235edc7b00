"""Calls of a program whose structure differs from the first one's.

A switch among the arguments, for example, may let densities depend on other latents, or let Python code look at their values.
"""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import math
import sys
import types
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from pyro_truncated.distributed.shards import find_memory_map
from pyro_truncated.program.call import Call
from pyro_truncated.program.chain_scorer import ChainScorer
from pyro_truncated.program.dependencies import Dependencies
from pyro_truncated.program.discovery import refuse_wider_support
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.product_scorer import NUM_TRIED, ProductScorer, other_structure
from pyro_truncated.program.sites import density_nodes, is_subsampled
from pyro_truncated.utils.parameter_store import Assign, read_variables

# Of programs so many values are looked at, and of arrays sixteen times as many entries.
_MOST_HELD = 4096
# These hold none of a user's switches.
_LIBRARIES = sys.stdlib_module_names - {"types", "argparse"} | {"torch", "pyro", "pyro_truncated", "numpy", "pandas", "scipy"}
# Hashes of large tensors, with the version that they are of.
_hashes_of_large: Any = WeakIdKeyDictionary()
_NUMBERS = (bool, int, float, str, bytes, enum.Enum, np.generic)


class KnownStructures:
    """The calls of a program whose structure is known.

    Of arguments they are told apart by kinds: types, switches and whether numbers are zero; and by numbers: shapes, integers, reals.
    What a program holds itself counts, too.
    """

    def __init__(self) -> None:
        self._sites: set[str] = set()
        self._numbers: dict[Any, set[Any]] = {}

    def __contains__(self, run: tuple[Call, Mapping[str, Any]]) -> bool:
        call, nodes = run
        leaves = _leaves(call)
        return nodes.keys() <= self._sites and _match_any(_numbers(leaves), self._numbers.get(_kinds(leaves), set()))

    def add(self, call: Call, nodes: Mapping[str, Any]) -> None:
        """Notes that the structure of a call is known."""
        leaves = _leaves(call)
        self._numbers.setdefault(_kinds(leaves), set()).add(_numbers(leaves))
        self._sites |= nodes.keys()


def _kinds(leaves: Iterable[Any]) -> Any:
    # However many there are: lists may have any length.
    return tuple(dict.fromkeys(map(_kind, leaves)))


def _match_any(numbers: tuple[Any, ...], known: Collection[tuple[Any, ...]]) -> bool:
    """Whether numbers are like some that are known.

    A place where several have told nothing, such as a number of steps, will not tell more. Of many calls one other number is enough, or
    columns that take few values, in ever new combinations, would be looked at for ever.
    """
    if numbers in known:
        return True
    alike = [others for others in known if len(others) == len(numbers)]
    if not alike:
        return len({len(others) for others in known}) >= NUM_TRIED
    enough = NUM_TRIED if len(alike) < 5 * NUM_TRIED else 2
    places = [place for place, values in enumerate(zip(*alike, strict=True)) if len(set(values)) < enough]
    return any(all(numbers[place] == others[place] for place in places) for others in alike)


def _numbers(leaves: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(number for leaf in leaves for number in _numbers_of(leaf))


def refuse_other_structure(scorer: LogJoint | ProductScorer | ChainScorer, max_count: int | Mapping[str, int] | None) -> None:
    """Checks that densities and supports depend on no other latents."""
    layout = scorer.layout
    # A conditional may look at the minibatch that the model has kept: other runs take the same.
    call = scorer.call.with_program(Assign(scorer.subsamples)(scorer.call.model))
    dependencies = Dependencies(call, max_count)
    if problem := _find_problem(scorer, dependencies):
        raise ValueError(other_structure(problem, has_sets=isinstance(scorer, ProductScorer)))
    latents = set(layout.sites)
    conditional = latents & dependencies.conditional(latents) - set(scorer.observed_sites)
    for name in conditional:
        refuse_wider_support(scorer.nodes, layout.sites, name, layout.limits.get(name), dependencies)
    layout.dependents |= dependencies.dependents(latents)
    layout.read |= dependencies.read & latents
    layout.note_readers(dependencies)
    layout.conditional_sites |= conditional
    layout.sites_to_check |= conditional
    if isinstance(scorer, ChainScorer):
        scorer.refuse_coupled_steps()


def _find_problem(scorer: LogJoint | ProductScorer | ChainScorer, dependencies: Dependencies) -> str:
    """What is not as it was in the first call, in words."""
    read = sorted(dependencies.read & scorer.layout.sites.keys())
    if isinstance(scorer, ProductScorer) and read:
        return f"Python looks at values of {read}"
    if names := _crossing_sites(scorer, dependencies):
        return f"the sites {names} depend on other discrete latents"
    if isinstance(scorer, ProductScorer) and not scorer.takes_sets():
        return "some of its densities depend on other discrete latents"
    return ""


def warn_of_shared_subsamples(scorer: LogJoint | ProductScorer | ChainScorer) -> None:
    """Warns of minibatches that have a latent in common.

    It lies outside of their plate. The log evidence of such a latent is not linear in the terms of the minibatch, which are scaled up.
    """
    layout = scorer.layout
    plates = {name: set(layout.plates) for name in layout.dependents}
    if isinstance(scorer, ProductScorer):
        own = [node.plate_names for node in scorer.product.graph.nodes]
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
    for name, entries in graph.entries.items():
        plates[name] = plates.get(name, set()) | {plate for plate, _, _ in entries.plates}
    return sorted(
        {
            name
            for name in nodes
            for number, node in enumerate(graph.nodes)
            if latents & dependencies.scopes.get(name, frozenset()) & set(node.sites)
            and (number not in graph.factors.get(name, ()) or not node.plate_names <= plates[name])
        }
    )


def _leaves(call: Call) -> list[Any]:
    """All arguments, and what the program and they hold."""
    leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
    seen: set[int] = set()
    held = (value for owner in [call.model, *leaves] for value in _held_values(owner, seen))
    return [*leaves, *itertools.islice(held, _MOST_HELD)]


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


def _numbers_of(value: Any) -> Sequence[Any]:
    """Shapes, integers such as edges, and real numbers.

    Of these it is also told which are zero. A row of a table may say what is observed, and of which latent.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        if find_memory_map(value) is not None or (isinstance(value, Tensor) and not _lies_in_memory(value)):
            return (value.shape,)
        size = math.prod(value.shape)
        if size <= 16 * _MOST_HELD:
            return (value.shape, *_hashes(value))
        # Large tensors that were not written to since are not read again.
        stamp = (value._version, value.data_ptr()) if isinstance(value, Tensor) and not value.is_inference() else None
        if stamp is None or _hashes_of_large.get(value, (None,))[0] != stamp:
            # Without a copy of all entries, which may have been expanded or transposed. Of a table rows are taken, lest columns are missed.
            step: int = 1 + size // (16 * _MOST_HELD)
            places: Any = np.unravel_index(np.arange(0, size, step), value.shape)
            places = tuple(map(torch.from_numpy, places)) if isinstance(value, Tensor) else places
            hashes = _hashes(value[::step] if value.ndim == 2 and len(value) > value.shape[1] else value[places])
            if stamp is None:
                return (value.shape, *hashes)
            _hashes_of_large[value] = stamp, hashes
        return (value.shape, *_hashes_of_large[value][1])
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return value != 0, value
    return (value if isinstance(value, (int, str, bytes, enum.Enum)) else None,)


def _hashes(value: Tensor | np.ndarray) -> list[int]:
    """Hashes of entries, and of zeros, by column of a table."""
    if isinstance(value, Tensor):
        # NumPy knows no shorter ones.
        is_short = value.is_floating_point() and value.dtype.itemsize < 4
        value = (value.float() if is_short else value).detach().resolve_neg().numpy()
    parts = [value == 0, value] if value.dtype.kind == "f" else [value] if value.dtype.kind in "biu" else []
    # More rows than columns, of which each may say something else.
    is_table = value.ndim == 2 and len(value) > value.shape[1]
    return [hash(column.tobytes()) for part in parts for column in (part.T if is_table else [part])]


def _lies_in_memory(tensor: Tensor) -> bool:
    """Whether a tensor's entries lie in memory, to be read at once."""
    # Of shards, which may be files, only what a step needs is read.
    if (
        type(tensor) is not Tensor
        or is_lazy(tensor)
        or tensor.device.type != "cpu"
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_complex()
    ):
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        # Sparse tensors, and those inside of `vmap` or left behind by it, have no memory to be seen.
        return False
    return True


def _held_values(program: Any, seen: set[int], depth: int = 8) -> Iterator[Any]:
    """Values that a program reads beside its arguments.

    They are attributes, closures and globals, and what these hold in turn. Its arguments may be such programs.
    """
    if id(program) in seen:
        return
    seen.add(id(program))
    for value in _held(program):
        if value is None or isinstance(value, (Tensor, np.ndarray, *_NUMBERS)):
            # What is learned is no switch.
            if not isinstance(value, Tensor) or (_lies_in_memory(value) and not isinstance(value, torch.nn.Parameter)):
                yield value
        elif depth and _may_hold(value):
            yield from _held_values(value, seen, depth - 1)


def _held(program: Any) -> Iterable[Any]:
    """What a program, a container or an object holds."""
    if isinstance(program, dict):
        return itertools.chain(program.keys(), program.values())
    if isinstance(program, (tuple, list, set, frozenset)):
        return program
    if isinstance(program, functools.partial):
        return program.func, program.args, program.keywords
    if inspect.ismethod(program):
        return program.__self__, program.__func__
    if inspect.isfunction(program):
        return read_variables(program)
    if isinstance(program, torch.nn.Module) and _library(type(program)) == "torch":
        return program.training, *program.children()
    return getattr(program, "__dict__", {}).values()


def _may_hold(value: Any) -> bool:
    """Whether a value is a container, or of the user's own code."""
    if isinstance(value, (dict, tuple, list, set, frozenset)):
        return len(value) > 0
    if isinstance(value, (torch.nn.Module, functools.partial)) or inspect.ismethod(value):
        return True
    kind = value if inspect.isfunction(value) else type(value)
    return not isinstance(value, (type, types.ModuleType)) and _library(kind) not in _LIBRARIES


def _library(kind: Any) -> str:
    return (kind.__module__ or "").partition(".")[0]
