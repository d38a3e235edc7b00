"""Programs whose sample sites change from run to run.

They depend on the values of latents, or on chance, and have no space of states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.poutine.util import site_is_subsample

from pyro_truncated.program.call import Call
from pyro_truncated.program.dependencies import Dependencies
from pyro_truncated.program.sites import latent_nodes, site_shapes
from pyro_truncated.utils.parameter_store import spare_random_numbers


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

    Only Python code that reads values can choose between sites. So the runs on other values of what it reads tell, and some more of the
    model as it is, always the same.
    """
    if sites := changing_sites(call, trace, dependencies.shapes):
        # Those that Python code has read; any, where nobody knows.
        known = dependencies.read or (trace.nodes.keys() if dependencies.scopes is None else set())
        names = [node["name"] for node in latent_nodes(trace)]
        raise ChangingSitesError(describe_changes(sites, [name for name in names if name in known - sites]))


def changing_sites(call: Call, trace: poutine.Trace, others: Collection[Mapping[str, Any]] = ()) -> set[str]:
    """Returns the sites that are not alike in all runs."""
    nodes: Mapping[str, Any] = trace.nodes
    # Of a plate that takes all its members the size may change, too.
    subsamples = {name: node["value"] for name, node in nodes.items() if site_is_subsample(node) and len(node["value"]) < node["fn"].size}
    runs = [own.items() for own in (site_shapes(trace), *others)]
    with torch.no_grad(), spare_random_numbers(), pyro.validation_enabled(False):
        # The first numbers drawn after these seeds lie on both sides of zero, and of a half.
        for seed in (3, 4, 5):
            torch.manual_seed(seed)
            # What the model raises for some values, the first use of the guide shall say.
            with contextlib.suppress(Exception):
                runs.append(site_shapes(call.run(subsamples)).items())
    return {name for name, _ in set().union(*runs) - set(runs[0]).intersection(*runs)}
