"""Posteriors of the slabs of spike-and-slab causes that superpose by maximum."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.ops import raise_if
from pyro_truncated.ops.piecewise import Segments, maximum_segments
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.constraints import check_entries, finite, or_missing, positive_finite

_REFINEMENTS = 2


class PiecewiseGaussian(TorchDistribution):
    r"""Piecewise Gaussian density of a real number between successive edges.

    .. math:: p(z) \propto \exp(c_j + \beta_j z - \tfrac12 a_j z^2) \quad (e_j < z < e_{j+1}).

    Masses and draws are taken in the log domain, so they hold far out in the tails. All is float64.

    Example:
        >>> y, others, element = torch.tensor([2.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0])
        >>> slab = PiecewiseGaussian.of_maximum(y, others, element, torch.tensor(0.1), torch.tensor(0.0), torch.tensor(1.0))
        >>> abs(float(slab.mean) - 2.0 / 1.01) < 1e-4  # the normal posterior, where nothing else competes
        True

    Args:
        segments: edges and coefficients.
        validate_args: whether to check values.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 - the attribute is an instance attribute in torch
    support = constraints.real

    @names_arguments
    def __init__(self, segments: Segments, validate_args: bool | None = None) -> None:
        self.segments = segments
        super().__init__(segments.edges.shape[:-1], validate_args=validate_args)

    @classmethod
    def of_maximum(
        cls, value: Tensor, others: Tensor, element: Tensor, scale: Tensor, slab_mean: Tensor, slab_scale: Tensor
    ) -> PiecewiseGaussian:
        r"""The exact posterior of one slab where causes superpose by maximum.

        With :math:`z \sim \mathcal N(\mu, \tau^2)` and :math:`y_d \sim \mathcal N(\max(m_d, z w_d), \sigma_d^2)`, where :math:`m` is what
        the other causes offer, this is :math:`p(z \mid y, m)`; its :attr:`log_normalizer` is :math:`\log p(y \mid m)`, with ``z``
        integrated out.

        Args:
            value: data :math:`y`, ``(*batch, D)``. NaN where missing.
            others: :math:`m \ge 0`, ``(*batch, D)``.
            element: dictionary element :math:`w \ge 0`, ``(*batch, D)``.
            scale: standard deviation :math:`\sigma` of the noise, broadcastable to ``(*batch, D)``.
            slab_mean: :math:`\mu`, ``(*batch)``.
            slab_scale: :math:`\tau`, ``(*batch)``.

        Raises:
            ValueError: if an offer or an element is negative.
        """
        raise_if(~((others >= 0).all() & (element >= 0).all()), _complain_of_negative)
        value, others, element, scale, slab_mean, slab_scale = (
            tensor.double() for tensor in (value, others, element, scale, slab_mean, slab_scale)
        )
        return cls(maximum_segments(value, others, element, scale.square().reciprocal(), slab_mean, slab_scale))

    @property
    def log_normalizer(self) -> Tensor:
        """Logarithm of the integral of the density as given, ``(*batch)``."""
        return self.segments.log_masses().logsumexp(-1)

    @property
    def mean(self) -> Tensor:
        """Mean, ``(*batch)``."""
        return self.segments.mean()

    def expand(self, batch_shape: Any, _instance: Any = None) -> PiecewiseGaussian:
        """The same distribution over a larger batch."""
        new: PiecewiseGaussian = self._get_checked_instance(PiecewiseGaussian, _instance)  # type: ignore[no-untyped-call]
        shape = torch.Size(batch_shape)
        new.segments = Segments(*(part.expand(shape + part.shape[-1:]) for part in self.segments))
        super(PiecewiseGaussian, new).__init__(shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Exact draws by inversion, ``(*sample_shape, *batch)``."""
        shape = torch.Size(sample_shape) + self.batch_shape
        edges = self.segments.edges
        with torch.no_grad():
            first, second = torch.rand(2, *shape, dtype=edges.dtype, device=edges.device)
            return Segments(*(part.expand(shape + part.shape[-1:]) for part in self.segments)).draw(first, second)

    @names_arguments
    def log_prob(self, value: Tensor) -> Tensor:
        """Log density at ``value``."""
        if self._validate_args:
            self._validate_sample(value)
        return self.segments.log_density(value) - self.log_normalizer


class MaximumSlabs(TorchDistribution):
    r"""Proposes slabs of causes that superpose by maximum.

    The proposal is close to their posterior given data and indicators.

    The slabs are drawn in sequence. Each comes from its exact conditional given the data, the slabs
    already drawn and guesses :math:`\hat z` of those to come:

    .. math:: q(z \mid b, y) = \prod_h p(z_h \mid z_{<h}, \hat z_{>h}, b, y).

    The guesses start at the prior means and go through sweeps of conditional means. For states with at most one active cause, or causes
    that never compete, this is the exact posterior. Slabs of causes that are off have their prior.

    A proposal is not what is trained: its parameters are taken as constants, and draws pass no gradient.

    Example:
        >>> states, weight, y = torch.tensor([1.0, 0.0]), torch.eye(2), torch.tensor([2.0, 0.0])
        >>> slabs = MaximumSlabs(states, weight, torch.tensor(0.1), torch.tensor(1.0), torch.tensor(1.0), y)
        >>> slabs.sample().shape
        torch.Size([2])

    Args:
        states: indicators :math:`b`, ``(*batch, H)``, zeros and ones.
        weight: dictionary :math:`W \ge 0`, ``(D, H)``.
        scale: standard deviation of the noise, a scalar or ``(D,)``.
        slab_mean: means of the slabs, a scalar or ``(H,)``.
        slab_scale: standard deviations of the slabs, a scalar or ``(H,)``.
        value: data, ``(*batch, D)``. NaN where missing.
        validate_args: whether to check values.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 - the attribute is an instance attribute in torch
    support = constraints.real_vector

    @names_arguments
    def __init__(
        self,
        states: Tensor,
        weight: Tensor,
        scale: Tensor,
        slab_mean: Tensor,
        slab_scale: Tensor,
        value: Tensor,
        validate_args: bool | None = None,
    ) -> None:
        if validate_args is not False:
            check_entries(finite, states=states, weight=weight, slab_mean=slab_mean)
            check_entries(positive_finite, scale=scale, slab_scale=slab_scale)
            check_entries(or_missing(finite), value=value)
        batch_shape = torch.broadcast_shapes(states.shape[:-1], value.shape[:-1])
        num_latents = weight.shape[1]
        self.dtype = weight.dtype
        self.states = states.detach().double().expand(*batch_shape, num_latents)
        self.weight, self.scale = weight.detach().double(), scale.detach().double()
        self.slab_mean = slab_mean.detach().double().expand(num_latents)
        self.slab_scale = slab_scale.detach().double().expand(num_latents)
        self.value = value.double()
        super().__init__(batch_shape, torch.Size([num_latents]), validate_args=validate_args)
        self.guess = self._guess()

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws slabs, ``(*sample_shape, *batch, H)``."""
        shape = torch.Size(sample_shape) + self.batch_shape + self.event_shape
        slabs = self.guess.expand(shape).clone()
        for latent in range(shape[-1]):
            slabs[..., latent] = self._conditional(slabs, latent).sample()
        return slabs.to(self.dtype)

    @torch.no_grad()
    @names_arguments
    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of slabs ``(*batch, H)``."""
        slabs = self.guess.expand(torch.broadcast_shapes(value.shape, self.guess.shape)).clone()
        total = slabs.new_zeros(slabs.shape[:-1])
        for latent in range(slabs.shape[-1]):
            total += self._conditional(slabs, latent).log_prob(value[..., latent].double())
            slabs[..., latent] = value[..., latent]
        return total.to(self.dtype)

    @torch.no_grad()
    def _guess(self) -> Tensor:
        guess = self.slab_mean.expand(self.states.shape).clone()
        for _ in range(_REFINEMENTS):
            for latent in range(guess.shape[-1]):
                guess[..., latent] = self._conditional(guess, latent).mean
        return guess

    def _conditional(self, slabs: Tensor, latent: int) -> PiecewiseGaussian:
        offers = self.states * slabs
        offers[..., latent] = 0.0
        others = (offers.unsqueeze(-2) * self.weight).amax(-1).clamp(min=0.0)
        # A cause that is off wins nothing.
        element = self.states[..., latent, None] * self.weight[:, latent]
        mean, scale = self.slab_mean[latent], self.slab_scale[latent]
        return PiecewiseGaussian.of_maximum(self.value, others, element, self.scale, mean, scale)


def _complain_of_negative() -> None:
    raise ValueError("others and element must not be negative: the cause would win below a threshold instead of above it")
