"""Switches in closed form, and births and deaths of dimensions."""

from __future__ import annotations

import copy
import itertools
import math

import torch
from torch import Tensor

from pyro_truncated.gplvm.spike_slab.bound import Views
from pyro_truncated.gplvm.spike_slab.model import SpikeSlabMRD
from pyro_truncated.gplvm.spike_slab.quasi_newton import maximize_bound
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import takes_arrays

# Log odds of switches that are free again after they have been held on, and of moves.
NEARLY_ON = 3.0
_SURE = 12.0
# Evidence, in nats, that counts as none.
_SILENT = 0.05


@names_arguments
@takes_arrays
def switch_log_odds(model: SpikeSlabMRD, y: Views) -> Tensor:
    r"""Optimal log odds of every switch given the posteriors of the inducing variables and of the other switches, ``(C, Q)``.

    The expected log likelihood is linear in each :math:`\gamma_{cq}` at a fixed posterior of the inducing variables, so its derivative is
    the difference between "on" and "off":

    .. math:: \mathrm{logit}\,\gamma_{cq} = \mathrm{logit}\,\pi_{cq} + \partial E / \partial\gamma_{cq}
              - \textstyle\prod_{c' \ne c} (1 - \gamma_{c'q}) \sum_n \mathrm{KL}_{nq}

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> switch_log_odds(model, y).shape
        torch.Size([1, 3])
    """
    views = model.check_data(y)
    gamma = model.probability.detach().clone().requires_grad_()
    with torch.enable_grad(), model.holding(gamma):
        terms = [view.data_term(model.inputs(c), data) for c, (view, data) in enumerate(zip(model.views, views, strict=True))]
        slope = torch.autograd.grad(torch.stack(terms).sum(), gamma)[0]
    with torch.no_grad():
        others = torch.stack([(1 - gamma)[torch.arange(len(gamma)) != c].prod(0) for c in range(len(gamma))])
        return model.prior.logit() + slope - others * model.latent_divergence()


@names_arguments
@takes_arrays
def update_switches(model: SpikeSlabMRD, y: Views) -> float:
    """Sets every switch in turn to its optimal probability, which never lowers the bound; returns the bound.

    All at once is tried first, which mostly serves.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> bound = update_switches(model, y)
    """
    with torch.no_grad():
        before, start = float(model.bound(y)), model.logits.detach().clone()
        model.logits = switch_log_odds(model, y)
        after = float(model.bound(y))
        if after >= before:
            return after
        model.logits = start
        for c, q in itertools.product(range(model.num_views), range(model.num_latents)):
            updated = model.logits.detach().clone()
            updated[c, q] = switch_log_odds(model, y)[c, q]
            model.logits = updated
        return float(model.bound(y))


@names_arguments
@takes_arrays
def settle_switches(model: SpikeSlabMRD, y: Views) -> float:
    r"""Sets every switch to its optimum, and off where the data do not speak for "on"; returns the bound.

    A dimension that a view's kernel has removed does not change the likelihood: the optimum of its switch is then the prior :math:`\pi`,
    :math:`-\log(1 - \pi)` nats above "off", though nothing is on. Such a switch, and one that is less probable than at first, is turned
    off for certain.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> bound = settle_switches(model, y)
    """
    update_switches(model, y)
    with torch.no_grad():
        silent = model.logits <= model.prior.logit() + _SILENT
        model.logits = torch.where(silent, -_SURE, model.logits)
        return float(model.bound(y))


@names_arguments
@takes_arrays
@torch.no_grad()
def switch_moves(model: SpikeSlabMRD, y: Views) -> float:
    """Tries every switch fully on and fully off, with the inducing variables adapted, and keeps what raises the bound; returns the bound.

    Unlike :func:`update_switches`, which asks what a switch is worth to the functions as they are, a move lets the functions answer.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> bound = switch_moves(model, y)
    """
    bound = float(model.bound(y))
    for c, q in itertools.product(range(model.num_views), range(model.num_latents)):
        now = model.logits.detach().clone()
        # A switch that is sure already is only tried the other way.
        for value in (v for v in (-_SURE, _SURE) if v * float(now[c, q]) < _SURE**2):
            moved = now.clone()
            moved[c, q] = value
            model.logits = moved
            tried = float(model.bound(y))
            if tried > bound:
                bound, now = tried, moved
        model.logits = now
    return bound


@names_arguments
@takes_arrays
def remove_dimensions(model: SpikeSlabMRD, y: Views, steps: int = 40, *, patience: int = 2, tolerance: float = 1e-5) -> float:
    """Switches dimensions off in views, least relevant first, where the bound rises once everything else has adapted; returns the bound.

    :func:`switch_moves` sees what a removal is worth at once. Here latents, kernels and noise get some quasi-Newton iterations to take over
    what the dimension did, which for curved data is often better than a dimension for every bend. Switches are fully on or off meanwhile,
    and afterwards.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> bound = remove_dimensions(model, y, steps=3)

    Args:
        model: the model.
        y: its data.
        steps: iterations after each removal, and at first for the model that it is compared with.
        patience: removals in a row that may fail before it ends.
        tolerance: gain per observed number below which iterations end.
    """
    is_on, failed = model.probability.detach() > 0.5, 0
    kept = torch.zeros_like(is_on)
    with model.holding(is_on.double()):
        bound = maximize_bound(model, y, steps, tolerance=tolerance)
    while failed < patience and bool((is_on & ~kept).any()):
        with model.holding(1.0):
            relevance = model.relevance()
        share = torch.where(is_on & ~kept, relevance / relevance.amax(1, keepdim=True), math.inf)
        before, tried = copy.deepcopy(model.state_dict()), is_on.clone()
        tried.view(-1)[share.argmin()] = False
        with model.holding(tried.double()):
            reached = maximize_bound(model, y, steps, tolerance=tolerance)
        if reached > bound:
            bound, is_on, failed = reached, tried, 0
        else:
            restore(model, before)
            kept, failed = kept | (is_on & ~tried), failed + 1
    with torch.no_grad():
        model.logits = torch.where(is_on, _SURE, -_SURE).to(model.logits)
    return bound


@torch.no_grad()
def restore(model: SpikeSlabMRD, state: dict[str, Tensor]) -> None:
    """Gives a model, in place, the values of a ``state_dict()``."""
    for name, value in model.state_dict().items():
        value.copy_(state[name])
