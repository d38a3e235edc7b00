"""Parameters moved a little, for a while.

Those that are zero or equal hide what densities depend on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_truncated.program.probe import Probe
from pyro_truncated.program.sites import sample_nodes
from pyro_truncated.utils.parameter_store import load_snapshot, snapshot, spare_random_numbers


@contextlib.contextmanager
def generic_parameters(scorer: Probe, names: Iterable[str], generator: torch.Generator) -> Iterator[None]:
    """Moves the parameters of some sites' densities a little, for a while."""
    names = list(names)
    with torch.enable_grad():
        log_probs = _log_probs(scorer, names)
    tensors = [leaf.data for leaf in _leaves(log_probs)]
    values = snapshot(tensors)
    try:
        for tensor, value in zip(tensors, values, strict=True):
            noise = torch.randn(value.shape, generator=generator).to(value)
            size = torch.where(value == 0, value.abs().mean().clamp(min=1e-3), value.abs())
            tensor.add_(0.1 * size * noise)
        try:
            moved = _log_probs(scorer, names)
        except Exception:  # whatever a program raises, as by an assertion
            moved = []
        # Some parameters, such as raw covariances, are none any more.
        if [bool(one.isnan().any()) for one in moved] != [bool(one.isnan().any()) for one in log_probs]:
            load_snapshot(tensors, values)
        yield
    finally:
        load_snapshot(tensors, values)


def _log_probs(scorer: Probe, names: Iterable[str]) -> list[Tensor]:
    with pyro.validation_enabled(False), spare_random_numbers():
        nodes = sample_nodes(scorer.run(scorer.values))
        return [
            node["fn"].log_prob(node["value"], *node["args"], **node["kwargs"]) for node in (nodes[name] for name in names if name in nodes)
        ]


def _leaves(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that tensors are computed from.

    Those are left out whose elements have no places of their own, as expanded ones.
    """
    leaves: dict[int, Tensor] = {}
    functions, seen = [tensor.grad_fn for tensor in tensors], set[Any]()
    while functions:
        function: Any = functions.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if (variable := getattr(function, "variable", None)) is not None:
            leaves[id(variable)] = variable
        functions += [after for after, _ in function.next_functions]
    dense = [leaf for leaf in leaves.values() if leaf.layout == torch.strided]
    return [leaf for leaf in dense if all(stride or size < 2 for size, stride in zip(leaf.shape, leaf.stride(), strict=True))]
