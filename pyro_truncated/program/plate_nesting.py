"""Plate nesting: how many plate dimensions Pyro must count.

It then compares the shapes of a model and its guide correctly.

``pyro.util.check_model_guide_match`` cuts the shape of a site that is longer than
``max_plate_nesting``, from ``len(shape) - max_plate_nesting - event_dim`` on. If the site lies in
fewer plates than there are and has an event of two dimensions or more, that start is negative and
counts from the right. The model's shape then loses dimensions that the guide's keeps, as
enumeration makes it longer. The two seem to disagree. The start should be ``max(0, ...)``. With a
larger ``max_plate_nesting`` nothing is cut wrongly.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pyro
from pyro.poutine.indep_messenger import IndepMessenger

from pyro_truncated.program.inspection import plates_around
from pyro_truncated.program.sites import DiscreteSite

_NAME = "room for events"
# To Pyro a plate of any size, which it does not expand sites to.
_ANY_SIZE = -1


def nesting_with_room(latents: Iterable[Any], depth: int) -> int:
    """Returns the least sufficient plate nesting, at least ``depth``.

    Pyro then compares given latent sites of a model with a guide correctly.
    """
    sizes = [(len(node["fn"].batch_shape), node["fn"].event_dim) for node in latents]
    for batch_dim, event_dim in sorted(sizes, key=sum):
        if batch_dim < depth < batch_dim + event_dim:
            depth = batch_dim + event_dim
    return depth


def room_for_events(site: DiscreteSite, nesting: int, batch_dim: int) -> AbstractContextManager[Any]:
    """Lets Pyro's ELBOs count enough plate dimensions.

    They take the left-most plate of a run without enumeration.

    Args:
        site: about to be sampled.
        nesting: the plate nesting that is needed, see :func:`nesting_with_room`.
        batch_dim: the value's batch dimensions, with that of enumeration.

    Returns:
        A plate at that dimension that leaves shapes alone, as long as no plate is there and nothing is enumerated.

    Warns:
        UserWarning: if an ELBO has been told to count fewer, so that it will find that shapes disagree.
    """
    taken = [-frame.dim for frame in plates_around((), site.name)]
    is_enumerated = batch_dim > max([site.depth, *taken])
    if is_enumerated and site.depth < batch_dim - 1 < site.depth + site.event_dim and pyro.settings.get("validate_infer"):
        warnings.warn(
            f"with max_plate_nesting={batch_dim - 1} Pyro cuts the shape of site '{site.name}' wrongly, and finds that model and guide "
            f"disagree. Pass max_plate_nesting={nesting} to the ELBO, or leave it to find the number by itself: "
            f"TraceEnum_ELBO(max_plate_nesting={nesting}).",
            stacklevel=2,
        )
    return nullcontext() if is_enumerated or nesting in taken else IndepMessenger(_NAME, _ANY_SIZE, dim=-nesting)
