"""Roles of a model's sites: latent, data, computed value, factor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_truncated.program.call import Call
from pyro_truncated.program.dependencies import Dependencies
from pyro_truncated.program.sites import family

Node = Mapping[str, Any]


def is_observed(node: Node) -> bool:
    """Whether the model observes a site, also if :class:`FreeData` undid it."""
    return bool(node["is_observed"] or node["infer"].get("was_observed"))


def is_factor(node: Node) -> bool:
    """Whether a site is a ``pyro.factor``: a density without a value."""
    return family(node["fn"]) == "Unit"


def is_computed(node: Node) -> bool:
    """Whether a site's value follows from others.

    These are ``pyro.deterministic``, an unobserved ``Delta``, a latent that a reparametrisation has replaced, and the
    completed values of a site with an ``obs_mask``. Data that have a ``Delta`` for their likelihood are none.
    """
    fn = node["fn"]
    if family(fn) != "Delta":
        return False
    if not is_observed(node) or node["infer"].get("_deterministic") or getattr(fn, "_mask", None) is False:
        return True
    # Some reparametrisations carry a density: they observe the very tensor that the point mass lies at.
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return torch.is_tensor(node["value"]) and node["value"].data_ptr() == fn.v.data_ptr()


def is_data(node: Node) -> bool:
    """Whether a site holds observations."""
    return is_observed(node) and not is_factor(node) and not is_computed(node)


def is_latent(node: Node) -> bool:
    """Whether a site is a random variable that is not observed."""
    return not is_observed(node) and not is_computed(node)


def site_plates(node: Node) -> frozenset[str]:
    """Names of the vectorised plates around a site."""
    return frozenset(frame.name for frame in node["cond_indep_stack"] if frame.vectorized)


def hidden_entries(node: Node) -> Tensor | None:
    """Returns where masks hide entries of a site, ``None`` if nowhere."""
    hidden: Tensor | None = None
    for mask in (node["mask"], getattr(node["fn"], "_mask", None)):
        if mask is not None:
            own = ~torch.as_tensor(mask, dtype=torch.bool)
            hidden = own if hidden is None else hidden | own.to(hidden.device)
    return hidden if hidden is not None and bool(hidden.any()) else None


class FreeData(Messenger):
    """Effect handler that draws data instead of observing them.

    Computed values and factors stay what they are.

    (``poutine.uncondition`` draws from the point mass of a ``pyro.deterministic``, in a shape that plates have expanded.)
    """

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] and is_data(msg):
            msg["is_observed"], msg["done"] = False, False
            msg["infer"]["was_observed"] = True
            msg["value"] = None


def leaves(
    model: Callable[..., Any], nodes: Mapping[str, Node], names: Collection[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> frozenset[str]:
    """Returns named latents on which only computed values depend.

    Missing entries of the data are an example.
    """
    if not names:
        return frozenset()
    dependencies = Dependencies(Call(model, args, kwargs))
    return frozenset(name for name in names if all(is_computed(nodes[site]) for site in dependencies.dependents({name}) if site in nodes))
