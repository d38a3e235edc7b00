"""Observations given an active set that is held fixed, independent over data points."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.gp.active_sets.active_set import ActiveSet, conditional_log_prob
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.constraints import or_missing


class GivenActiveSet(TorchDistribution):
    r"""Observations given an active set that is held fixed: :math:`p(x_n \mid x_A, z_n)`, independent over data points.

    Use it where latents of single data points vary on their own, as under :class:`~pyro_truncated.AutoTruncated` or any parallel
    enumeration: given the active set every state of a data point has a density of its own. Entries that are NaN are missing.

    Example:
        >>> kernel, noise = pyro.contrib.gp.kernels.RBF(1), torch.tensor(0.1)
        >>> active = ActiveSet(torch.randn(8, 1), torch.randn(8, 3), kernel, noise)
        >>> candidates = torch.randn(5, 6, 1)  # latents of six data points in five states
        >>> GivenActiveSet(active, candidates).log_prob(torch.randn(6, 3)).shape
        torch.Size([5, 6])

    Args:
        active_set: the posterior given the active points.
        latents: ``(*batch, Q)``.
        loc: mean of the outputs, a scalar or ``(D,)``, if the active set holds deviations from it.
        validate_args: whether to check parameters and values.
    """

    arg_constraints = {"latents": constraints.independent(constraints.real, 1), "loc": constraints.real}  # noqa: RUF012
    support = constraints.independent(or_missing(constraints.real), 1)
    has_rsample = True

    @takes_arrays
    def __init__(self, active_set: ActiveSet, latents: Tensor, *, loc: Tensor | float = 0.0, validate_args: bool | None = None) -> None:
        self.active_set, self.latents = active_set, latents
        self.loc = torch.as_tensor(loc, dtype=latents.dtype, device=latents.device)
        deviation, variance = active_set.predict(latents)
        self._mean, self._variance = deviation + self.loc, variance
        super().__init__(latents.shape[:-1], deviation.shape[-1:], validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> GivenActiveSet:
        """The same distribution over a larger batch; the distribution itself if the shape is its own."""
        batch_shape = torch.Size(batch_shape)
        if batch_shape == self.batch_shape:
            return self
        new: GivenActiveSet = self._get_checked_instance(GivenActiveSet, _instance)  # type: ignore[no-untyped-call]
        new.active_set, new.loc = self.active_set, self.loc
        new.latents = self.latents.expand(batch_shape + self.latents.shape[-1:])
        new._mean = self._mean.expand(batch_shape + self._mean.shape[-1:])
        new._variance = self._variance.expand(batch_shape + self._variance.shape[-1:])
        super(GivenActiveSet, new).__init__(batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        """Predictive mean ``(*batch, D)``."""
        return self._mean

    @property
    def variance(self) -> Tensor:
        """Predictive variance of the observations ``(*batch, D)``."""
        return self._variance.expand(self.batch_shape + self.event_shape)

    @takes_arrays
    def log_prob(self, value: Tensor) -> Tensor:
        """Log densities ``(*batch,)`` of observations ``(*batch, D)`` over their observed entries."""
        if self._validate_args:
            self._validate_sample(value)
        return conditional_log_prob(value, self._mean, self._variance)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws observations, independent over data points and outputs."""
        shape = torch.Size(sample_shape) + self.batch_shape + self.event_shape
        return self._mean + self._variance.sqrt() * torch.randn(shape, dtype=self._mean.dtype, device=self._mean.device)
