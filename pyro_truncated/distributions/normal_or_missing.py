"""Normal observations some of which may be missing."""

from __future__ import annotations

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.distributions.deferred_validation import defer_validation
from pyro_truncated.utils.constraints import or_missing

_Normal: Any = defer_validation(dist.Normal)
_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


class NormalOrMissing(_Normal):  # type: ignore[misc]
    r"""A normal distribution of entries that may be missing (NaN).

    Missing entries contribute nothing.

    .. math:: \log p(y) = [y \text{ is observed}] \, \log \mathcal N(y; \mu, \sigma^2).

    Shapes and parameters are those of :class:`~pyro.distributions.Normal`. Draws have no missing entries.

    Example:
        >>> NormalOrMissing(torch.zeros(2), 1.0).log_prob(torch.tensor([0.0, torch.nan]))
        tensor([-0.9189,  0.0000])

    Args:
        loc: means.
        scale: standard deviations.

    Raises:
        ValueError: for parameters of a normal distribution that are none, and values that are infinite.
    """

    support = or_missing(constraints.real)

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns log densities, with zero where the value is missing.

        Booleans count as zeros and ones.
        """
        if self._validate_args:
            self._validate_sample(value)
        value = value.to(self.loc.dtype) if value.dtype == torch.bool else value
        is_missing = value.isnan()
        # Zero in its place keeps NaN out of gradients, too.
        standardised = (value - self.loc).masked_fill(is_missing, 0.0) / self.scale
        log_density: Tensor = torch.sub(-_HALF_LOG_TWO_PI - self.scale.log(), standardised.square(), alpha=0.5)
        return log_density.masked_fill(is_missing, 0.0)
