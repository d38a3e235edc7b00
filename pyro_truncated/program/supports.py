"""Which values lie in the supports of distributions."""

from __future__ import annotations

import math
from typing import Any

import pyro
import torch
from pyro.distributions import ExtendedBinomial
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from pyro.distributions.util import broadcast_shape
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Independent, MixtureSameFamily, constraints

from pyro_truncated.program.zero_probabilities import log_prob_with_zeros

HUGE = 2**62
# What a mixture reaches is what its components reach, each as far as it does.
MIXTURE: Any = type(MixtureSameFamily(Categorical(torch.ones(1)), Bernoulli(torch.ones(1))).support)
# All integers: the support of distributions that give probability zero to what they do not reach (ExtendedBinomial).
INTEGER: Any = ExtendedBinomial.support

Bounds = tuple[Tensor, Tensor]


def is_discrete(fn: Any) -> bool:
    """Whether a distribution is known to be one of integers."""
    support = get_support(fn)
    try:
        return support is not None and bool(support.is_discrete)
    except NotImplementedError:
        return False


def value_bounds(fn: Any) -> Bounds:
    """Returns lowest and highest values of a discrete distribution's entries."""
    support = elementwise(get_support(fn))
    if support is constraints.boolean:
        return torch.tensor(0), torch.tensor(1)
    if support is constraints.one_hot:
        return torch.tensor(0), torch.tensor(fn.event_shape[-1] - 1)
    low, high = (torch.as_tensor(getattr(support, *end)).long() for end in (("lower_bound", 0), ("upper_bound", HUGE)))
    while not isinstance(fn, MixtureSameFamily) and hasattr(fn, "base_dist"):
        fn = fn.base_dist
    if isinstance(fn, MixtureSameFamily):
        # What any component reaches.
        dim = -1 - len(fn.event_shape)
        low, high = (low.amin(dim) if low.dim() >= -dim else low), (high.amax(dim) if high.dim() >= -dim else high)
    return low, high


def elementwise(support: Any) -> Any:
    """The constraint of single entries."""
    while isinstance(support, (constraints.independent, MIXTURE)):
        support = support.base_constraint
    return support


def possible_values(fn: Any, value: Tensor) -> Tensor:
    """Whether values lie in a distribution's support, by batch entry."""
    if isinstance(fn, MaskedDistribution):
        return possible_values(fn.base_dist, value) | ~torch.as_tensor(fn._mask, device=value.device)
    if isinstance(fn, ExpandedDistribution):
        return possible_values(fn.base_dist, value)
    if isinstance(fn, Independent):
        entries = possible_values(fn.base_dist, value)
        entries = entries.expand(broadcast_shape(entries.shape, fn.base_dist.batch_shape))
        return entries.flatten(entries.dim() - fn.reinterpreted_batch_ndims).all(-1)
    check: Tensor = fn.support.check(value)
    # The support of a factor, which has no entries, is that of single entries.
    entry_dims = fn.event_dim - fn.support.event_dim
    return check.flatten(check.dim() - entry_dims).all(-1) if entry_dims > 0 else check


def log_prob_on_support(fn: Any, value: Tensor) -> Tensor:
    """Returns the log density of values that may lie outside."""
    possible = possible_values(fn, value)
    low = getattr(elementwise(get_support(fn)), "lower_bound", None)
    if low is not None:
        # A value that is possible, so that nothing infinite gets into gradients.
        inside = possible.reshape(possible.shape + (1,) * fn.event_dim)
        value = torch.where(inside, value, torch.as_tensor(low, device=value.device).to(value.dtype))
    with pyro.validation_enabled(False):  # Nothing is possible where a total has become negative.
        exact = log_prob_with_zeros(fn, value)
        log_prob: Tensor = fn.log_prob(value) if exact is None else exact
    return torch.where(possible, log_prob, -math.inf)


def get_support(fn: Any) -> Any:
    """The support of a distribution, ``None`` where it says nothing."""
    try:
        return fn.support
    except NotImplementedError:
        return None
