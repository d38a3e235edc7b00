"""Initialisation of guides of continuous latents at prior draws."""

from __future__ import annotations

from typing import Any

import torch
from pyro.infer.autoguide import init_to_feasible, init_to_sample
from torch import Tensor
from torch.distributions import biject_to, constraints

# Weight of equal shares in drawn shares: components with a tiny share get no data. At a tenth one of
# five mixtures of three clusters lost a cluster silently, at a half none of eleven.
_EQUAL = 0.5


def prior_draw(site: dict[str, Any]) -> Tensor:
    """Draws a latent from its prior, for ``init_loc_fn`` of Pyro's guides.

    Pyro's ``init_to_median(num_samples=1)`` draws numbers, but takes the same feasible point for all vectors. Its ``init_to_sample``
    may begin at the end of the support, which is infinitely far away in a guide's coordinates.

    Args:
        site: the latent's node in a trace of the model.

    Returns:
        The draw, of the shape of the latent. For simplices it is the mean of the draw and equal shares. A feasible point replaces draws
        that are not finite in unconstrained coordinates.
    """
    fn = site["fn"]
    drawn: Tensor = init_to_sample(site)
    support = fn.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if support is constraints.simplex:
        # In place: Pyro's draws carry a mark for its reparametrisations.
        drawn.mul_(1 - _EQUAL).add_(_EQUAL / drawn.shape[-1])
    if not fn.support.is_discrete and not bool(torch.isfinite(biject_to(fn.support).inv(drawn)).all()):
        return torch.as_tensor(init_to_feasible(site))
    return drawn
