"""Programs whose sample sites change from run to run.

They depend on the values of latents, or on chance, and have no space of states.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.program.call import Call
from pyro_truncated.program.dependencies import Dependencies
from pyro_truncated.program.sites import is_subsampled, sample_nodes
from pyro_truncated.program.supports import elementwise, value_bounds
from pyro_truncated.utils.parameter_store import spare_random_numbers

_MAX_JOINT_VALUES = 16


class ChangingSitesError(NotImplementedError):
    """A model samples other sites or shapes for some states."""


def describe_changes(sites: Collection[str], latents: Collection[str] = ()) -> str:
    """Returns which sites change with which latents, and what to write instead."""
    some = f"for some states of {list(latents)}" if latents else "in some runs"
    return (
        f"the sites {sorted(sites)} are sampled {some} only, or in other shapes. Sample the same sites for every state: mask observations "
        "that shall not count (poutine.mask), and let a latent that is not needed have no influence."
    )


def refuse_changing_sites(call: Call, trace: poutine.Trace, dependencies: Dependencies) -> None:
    """Checks that a model always samples the same sites.

    They, and their shapes, must be the same whatever the values of its latents.

    Only Python code that reads values can choose between sites. So the model is run for the joint
    values of the discrete latents that it reads, up to 16 of them. It is also run for some draws of
    all latents, always the same.
    """
    nodes = sample_nodes(trace)
    # Those that Python code has read; any, where nobody knows.
    known = dependencies.read or (nodes.keys() if dependencies.scopes is None else set())
    read = [name for name, node in nodes.items() if not node["is_observed"] and name in known]
    values = _joint_values([nodes[name] for name in read]) if read else ()
    if sites := changing_sites(call, trace, values, dependencies.traces):
        raise ChangingSitesError(describe_changes(sites, [name for name in read if name not in sites]))


def changing_sites(
    call: Call, trace: poutine.Trace, values: Collection[Mapping[str, Tensor]] = (), others: Collection[poutine.Trace] = ()
) -> set[str]:
    """Returns the sites that are not alike in all runs."""
    nodes: Mapping[str, Any] = trace.nodes
    # Of a plate that takes all its members the size may change, too.
    subsamples = {name: node["value"] for name, node in nodes.items() if site_is_subsample(node) and len(node["value"]) < node["fn"].size}
    runs = [_shapes(one).items() for one in (trace, *others)]
    with torch.no_grad(), spare_random_numbers(), pyro.validation_enabled(False):
        # The first numbers drawn after these seeds lie on both sides of zero, and of a half.
        for seed, latents in enumerate([{}, {}, {}, *values], 3):
            torch.manual_seed(seed)
            # What the model raises for some values, the first use of the guide shall say.
            with contextlib.suppress(Exception):
                runs.append(_shapes(call.run({**subsamples, **latents})).items())
    return {name for name, _ in set().union(*runs) - set(runs[0]).intersection(*runs)}


def _shapes(trace: poutine.Trace) -> dict[str, torch.Size | None]:
    """Returns the shapes of a run's latents; ``None`` for what it observes.

    Those in sequential plates of which it takes some members are left out.
    """
    return {
        name: None if node["is_observed"] else node["fn"].shape()
        for name, node in sample_nodes(trace).items()
        if not any(is_subsampled(frame) and not frame.vectorized for frame in node["cond_indep_stack"])
    }


def _joint_values(nodes: Collection[Any]) -> list[dict[str, Tensor]]:
    """Returns joint values of discrete latents.

    All entries of a site are alike; where there are too many, each value of each latent stands by itself.
    """
    choices = {node["name"]: list(_values(node)) for node in nodes if not node["is_observed"] and node["fn"].support.is_discrete}
    if math.prod(map(len, choices.values())) <= _MAX_JOINT_VALUES:
        return [dict(zip(choices, combination, strict=True)) for combination in itertools.product(*choices.values())]
    return [{name: value} for name, values in choices.items() for value in values]


def _values(node: Any) -> Iterator[Tensor]:
    """Values of a site; of counts the lowest."""
    (low, high), value = (int(bound.min()) for bound in value_bounds(node["fn"])), node["value"]
    for level in range(low, min(high, low + _MAX_JOINT_VALUES - 1) + 1):
        if elementwise(node["fn"].support) is constraints.one_hot:
            yield torch.nn.functional.one_hot(torch.tensor(level, device=value.device), value.shape[-1]).to(value).expand(value.shape)
        else:
            yield torch.full_like(value, level)
