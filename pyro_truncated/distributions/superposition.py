"""Base of superpositions: states, a dictionary, and parameters that broadcast."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.util import broadcast_shape
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import ops
from pyro_truncated.distributions.deferred_validation import validate_later
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.constraints import in_blocks, larger_batch

Statistics = dict[str, Tensor]


class Superposition(TorchDistribution):
    r"""Observations ``(D,)`` of a superposition of ``H`` latents.

    A subclass knows more than the density of an observation under its states:

    * :meth:`packed_log_prob` scores the packed states of a population. It is called if
      :attr:`has_packed_log_prob` is true and the model has no other latents than the binary ones.
    * :meth:`statistics` are the expected sufficient statistics of the parameters, summed over the
      data points. The gradient of the truncated free energy follows from them (Fisher's identity),
      and a closed-form M-step needs them.
    * :meth:`reconstruct` is the posterior mean of the data without noise.

    In all three the states that the distribution was built with play no role: any will do, such as ``torch.zeros(H)``.

    Example:
        >>> weight, y = torch.randn(4, 3), torch.randn(4)
        >>> likelihood = LinearSuperposition(torch.tensor([1.0, 0.0, 1.0]), weight, 0.5)  # one of its subclasses
        >>> torch.allclose(likelihood.mean, weight[:, 0] + weight[:, 2])
        True

    Args:
        states: states ``(*batch, H)``.
        weight: dictionary ``(D, H)``, or with batch dimensions in front.
        validate_args: whether to check parameters and values.
        **parameters: the others, by the names of its ``arg_constraints``. They are scalars,
            or tensors whose dimensions before the last are batch dimensions.

    Raises:
        ValueError: if states and weight disagree about the number of latents, or a parameter is invalid.
    """

    states: Tensor
    weight: Tensor
    _validate_sample = validate_later

    def __init__(self, states: Tensor, weight: Tensor, validate_args: bool | None = None, **parameters: Tensor | float) -> None:
        if weight.dim() < 2 or states.dim() < 1 or states.shape[-1] != weight.shape[-1]:
            raise ValueError(f"states (*batch, H) and weight (D, H) must share H; got {tuple(states.shape)} and {tuple(weight.shape)}")
        # Other parameters and densities take the type of the dictionary.
        weight = weight if weight.is_floating_point() or weight.is_complex() else weight.to(torch.get_default_dtype())
        self.states, self.weight = states, weight
        for name, value in parameters.items():
            if isinstance(value, Tensor) and value.is_complex():
                raise TypeError(f"{name} must hold real numbers; got {value.dtype}")
        tensors = {name: _tensor_like(value, weight) for name, value in parameters.items()}
        for name, tensor in tensors.items():
            if tensor.dim() and tensor.shape[-1] not in (1, *weight.shape[-2:]):
                raise ValueError(f"{name} must be a scalar or end in a dimension of size D or H; got {tuple(tensor.shape)}")
            setattr(self, name, tensor)
        own = weight.shape[:-2], *(tensor.shape[:-1] for tensor in tensors.values())
        self._is_plain = not any(own)
        shapes = {shape for shape in (states.shape[:-1], *own) if shape}
        # Mostly only the states have batch dimensions; to broadcast takes torch longer than all the rest.
        batch_shape = torch.Size(broadcast_shape(*shapes)) if len(shapes) > 1 else next(iter(shapes), torch.Size())
        is_deferred = ops.is_vectorised(weight) and (self._validate_args if validate_args is None else validate_args)
        super().__init__(batch_shape, weight.shape[-2:-1], validate_args=False if is_deferred else validate_args)
        if is_deferred:
            # Whether values are checked is asked again when they are there, unless it was said for this distribution.
            del self._validate_args
            if validate_args is not None:
                self._validate_args = validate_args
            self._check_parameters()

    def _check_parameters(self) -> None:
        """Checks all parameters at once, if possible with checks of other operations."""
        constrained = {name: constraint for name, constraint in self.arg_constraints.items() if not constraints.is_dependent(constraint)}
        valid = [constraint.check(getattr(self, name)).all() for name, constraint in constrained.items()]
        shapes = self.batch_shape, self.event_shape
        ops.raise_if(~torch.stack(valid).all(), lambda: super(Superposition, self).__init__(*shapes, validate_args=True))

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """Returns the distribution over a larger batch, or itself if shapes agree."""
        batch_shape = torch.Size(batch_shape)
        if batch_shape == self.batch_shape:
            return self
        return larger_batch(self, batch_shape, _instance, states=self.states.expand(*batch_shape, -1))

    @property
    def mean(self) -> Tensor:
        """Mean of the observations, ``(*batch, D)``."""
        return self._mean(self.states).expand(self.batch_shape + self.event_shape)

    @names_arguments
    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of observations ``(*batch, D)`` under the states, over their observed entries."""
        if self._validate_args:
            self._validate_sample(value)
        if not self._is_plain:
            return self._log_prob(self.states, value)
        batch_shape = torch.Size(broadcast_shape(self.batch_shape, value.shape[:-1]))
        return in_blocks(self._log_prob, self.states, value, batch_shape, self.numbers_per_state)

    @property
    def has_packed_log_prob(self) -> bool:
        """Whether :meth:`packed_log_prob` is available.

        The class must have it, and no parameter may have batch dimensions.
        """
        return self._is_plain and type(self).packed_log_prob is not Superposition.packed_log_prob

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        r"""Log density of observations under packed binary states, plus :math:`\sum_h s_h\,\mathrm{logit}_h`.

        The states the distribution was built with play no role. Differentiable once in the parameters and the logits.

        Args:
            words: packed states, ``(N, C, W)``.
            value: observations ``(N, D)``. NaN where missing.
            state_logits: coefficients of the states, ``(H,)`` or ``(N, H)``, such as prior log-odds.

        Returns:
            ``(N, C)``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not score packed states")

    def statistics(self, population: Population, value: Tensor, temperature: float = 1.0) -> Statistics:
        """Returns expected sufficient statistics of the parameters, in float64.

        They are summed over the population's data points.

        Args:
            population: truncated posteriors over the ``H`` latents; its ``indices`` select the data points among all data.
            value: all data, ``(N, D)``. NaN where missing.
            temperature: of the posteriors.

        Returns:
            Sums by name; all can be added over data points and scaled.

        Raises:
            ValueError: if the latents of the population are others.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sufficient statistics")

    def reconstruct(self, population: Population, value: Tensor) -> Tensor:
        r"""Posterior mean :math:`\sum_s q_n(s)\,\mathbb E[y \mid s]` of the data without noise, for denoising and in-painting.

        Args:
            population: truncated posteriors over the ``H`` latents.
            value: all data, ``(N, D)``.

        Returns:
            ``(N, D)`` for the population's data points, missing entries included.
        """
        check_binary(population, self.weight.shape[-1])
        population.select_rows(value)  # refuses other data than the population's
        return population.expectation(self._mean)

    @property
    def numbers_per_state(self) -> int:
        """Returns how many numbers scoring one state takes as intermediate results.

        That is the larger of ``H`` and ``D``, unless a subclass says otherwise.
        """
        return max(self.weight.shape[-2:])

    def _mean(self, states: Tensor) -> Tensor:
        """Mean of the observations under states ``(*batch, H)``."""
        raise NotImplementedError(f"{type(self).__name__} has no mean")

    def _log_prob(self, states: Tensor, value: Tensor) -> Tensor:
        """Returns the log density of observed entries under states, elementwise."""
        raise NotImplementedError(f"{type(self).__name__} has no density")


class GaussianSuperposition(Superposition):
    """A superposition with independent Gaussian noise of deviation ``scale``."""

    has_rsample = True

    scale: Tensor

    @property
    def variance(self) -> Tensor:
        r"""Variance :math:`\sigma^2`, ``(*batch, D)``."""
        return self.scale.square().expand(self.batch_shape + self.event_shape)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws observations, differentiable in the parameters."""
        mean = self.mean
        noise = torch.randn(torch.Size(sample_shape) + mean.shape, dtype=mean.dtype, device=mean.device)
        return mean + self.scale * noise

    def _precision(self) -> Tensor:
        return self.scale.double().reciprocal().square().expand(*self.scale.shape[:-1], *self.event_shape)

    def _log_normalizers(self) -> Tensor:
        """Those of the dimensions, ``(D,)``, or with batch dimensions in front."""
        terms = -self.scale.double().log() - 0.5 * math.log(2 * math.pi)
        return terms.expand(*self.scale.shape[:-1], *self.event_shape)

    def _log_normalizer(self, value: Tensor) -> Tensor:
        return (self._log_normalizers() * ~value.isnan()).sum(-1)


def _tensor_like(value: Tensor | float, like: Tensor) -> Tensor:
    """Returns a parameter in the dictionary's type and on its device."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device) if isinstance(value, Tensor) else like.new_full((), value)


def data_sums(rows: Tensor, is_observed: Tensor | None) -> Statistics:
    """Returns what all Gaussian likelihoods need of data ``(N, D)``, zero where missing.

    They are ``num_data``, a scalar; the number ``observed`` of entries, their ``sums`` and ``squares``, ``(D,)`` each, of the observed
    entries.
    """
    return {
        "num_data": rows.new_full((), len(rows)),
        "observed": counts(rows, is_observed),
        "sums": rows.sum(0),
        "squares": rows.square().sum(0),
    }


def counts(rows: Tensor, is_observed: Tensor | None) -> Tensor:
    """How many data points have each dimension, ``(D,)``; arguments as for :func:`data_sums`."""
    return rows.new_full(rows.shape[1:], len(rows)) if is_observed is None else is_observed.sum(0, dtype=rows.dtype)


def trials(active: Tensor, rows: Tensor, is_observed: Tensor | None) -> Tensor:
    """Returns sums ``(D, H)`` of expectations ``(N, H)`` over observed data points."""
    return active.sum(0).expand(rows.shape[1], -1) if is_observed is None else is_observed.to(rows.dtype).mT @ active


def check_binary(population: Population, num_latents: int) -> None:
    """Checks that a population has that many binary latents and no others."""
    space = population.space
    if space.num_latents != num_latents or not space.is_binary:
        raise ValueError(f"population must hold states of {num_latents} binary latents; got {space!r}")
