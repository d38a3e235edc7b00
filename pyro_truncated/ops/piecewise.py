"""Piecewise Gaussian densities between successive edges.

Masses, means and draws are stable in the tails.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_NARROW = 1e-5
_NEWTON_STEPS = 8
_LOG_HALF = -math.log(2)


class Segments(NamedTuple):
    r"""An unnormalised density :math:`\exp(c_j + \beta_j z - \tfrac12 a_j z^2)` between the edges :math:`e_j` and :math:`e_{j+1}`.

    Attributes:
        edges: the edges in ascending order, ``(*batch, J + 1)``, from minus to plus infinity.
        constant: :math:`c_j`, ``(*batch, J)``.
        linear: :math:`\beta_j`, ``(*batch, J)``.
        precision: :math:`a_j > 0`, ``(*batch, J)``.
    """

    edges: Tensor
    constant: Tensor
    linear: Tensor
    precision: Tensor

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Returns standardised ends of every segment, ``(*batch, J)`` each.

        They are in units of its Gaussian's deviation around its mean.
        """
        loc, root = self.linear / self.precision, self.precision.sqrt()
        return (self.edges[..., :-1] - loc) * root, (self.edges[..., 1:] - loc) * root

    def log_masses(self) -> Tensor:
        """Returns the log mass of every segment, ``(*batch, J)``.

        It is minus infinity where the segment is empty.
        """
        peak = self.constant + 0.5 * self.linear.square() / self.precision
        return peak + 0.5 * (2 * math.pi / self.precision).log() + log_interval(*self.bounds)

    def log_density(self, z: Tensor) -> Tensor:
        """The unnormalised log density at ``z (*batch)``."""
        inside = (z.unsqueeze(-1) > self.edges[..., 1:-1]).sum(-1, keepdim=True)
        shape = inside.shape[:-1]
        parts = (part.expand(*shape, part.shape[-1]).gather(-1, inside).squeeze(-1) for part in self[1:])
        constant, linear, precision = parts
        return constant + z * (linear - 0.5 * precision * z)

    def mean(self) -> Tensor:
        """Mean of the normalised density, ``(*batch)``."""
        lower, upper = self.bounds
        log_masses = self.log_masses()
        log_share = log_interval(lower, upper)
        slope = (_log_phi(lower) - log_share).exp() - (_log_phi(upper) - log_share).exp()
        means = (self.linear / self.precision + slope / self.precision.sqrt()).clamp(self.edges[..., :-1], self.edges[..., 1:])
        weights = log_masses.softmax(-1)
        return torch.where(weights > 0, weights * means, 0.0).sum(-1)

    def draw(self, first: Tensor, second: Tensor) -> Tensor:
        """Draws ``(*batch)`` by inversion.

        One uniform number ``(*batch)`` chooses the segment, another one the place in it.
        """
        cumulative = self.log_masses().softmax(-1).cumsum(-1)
        last = self.precision.shape[-1] - 1
        chosen = (first.unsqueeze(-1) * cumulative[..., -1:] >= cumulative).sum(-1, keepdim=True).clamp(max=last)
        lower, upper = (bound.gather(-1, chosen).squeeze(-1) for bound in self.bounds)
        x = truncated_standard_normal(lower, upper, second)
        linear, precision = (part.gather(-1, chosen).squeeze(-1) for part in (self.linear, self.precision))
        ends = (self.edges[..., :-1].gather(-1, chosen).squeeze(-1), self.edges[..., 1:].gather(-1, chosen).squeeze(-1))
        return (linear / precision + x / precision.sqrt()).clamp(*ends)


def maximum_segments(
    value: Tensor, others: Tensor, element: Tensor, precision: Tensor, slab_mean: Tensor, slab_deviation: Tensor
) -> Segments:
    r"""Joint density of data and one slab, :math:`\mathcal N(z; \mu, \tau^2) \prod_d \mathcal N(y_d; \max(m_d, z w_d), \lambda_d^{-1})`.

    The cause wins dimension ``d`` where :math:`z > m_d / w_d`, so between the sorted thresholds the
    density is Gaussian in ``z``. The sums over the dimensions won are cumulative sums. Constants
    are all there: the total mass is the density of the data.

    Args:
        value: data :math:`y`, ``(*batch, D)``. NaN where missing.
        others: what the other causes offer :math:`m \ge 0`, ``(*batch, D)``.
        element: dictionary element :math:`w \ge 0` of the cause, ``(*batch, D)``.
        precision: inverse noise variances :math:`\lambda`, broadcastable to ``(*batch, D)``.
        slab_mean: mean :math:`\mu` of the slab, ``(*batch)``.
        slab_deviation: standard deviation :math:`\tau` of the slab, ``(*batch)``.
    """
    value, others, element, precision = torch.broadcast_tensors(value, others, element, precision)
    is_seen = ~value.isnan()
    value, precision = value.nan_to_num(0.0), precision * is_seen
    base = (0.5 * is_seen * (precision.masked_fill(~is_seen, 1.0).log() - math.log(2 * math.pi))).sum(-1)
    base = base - 0.5 * (precision * (value - others).square()).sum(-1)
    # A dimension that can never be won has its threshold at infinity.
    can_win = (element > 0) & is_seen
    threshold = torch.where(can_win, others / element.masked_fill(~can_win, 1.0), math.inf)
    threshold, order = threshold.sort(-1)

    def cumulative(terms: Tensor) -> Tensor:
        """Returns cumulative sums of terms in order of threshold.

        They are over the first 0, 1, ... entries of those that can win.
        """
        return torch.nn.functional.pad(torch.where(can_win, terms, 0.0).gather(-1, order).cumsum(-1), (1, 0))

    prior_precision = slab_deviation.square().reciprocal().unsqueeze(-1)
    prior_mean = slab_mean.unsqueeze(-1)
    prior = 0.5 * ((prior_precision / (2 * math.pi)).log() - prior_precision * prior_mean.square())
    constant = base.unsqueeze(-1) + prior - 0.5 * cumulative(precision * others * (2 * value - others))
    linear = prior_precision * prior_mean + cumulative(precision * element * value)
    a = prior_precision + cumulative(precision * element.square())
    edge = torch.full_like(threshold[..., :1], math.inf)
    return Segments(torch.cat([-edge, threshold, edge], -1), constant, linear, a)


def log_interval(lower: Tensor, upper: Tensor) -> Tensor:
    r"""Stable :math:`\log(\Phi(b) - \Phi(a))` for ``lower`` :math:`a` and ``upper`` :math:`b`; minus infinity unless :math:`a < b`."""
    low, high, _ = _to_the_left(lower, upper)
    is_empty = ~(low < high)
    low, high = low.masked_fill(is_empty, -1.0), high.masked_fill(is_empty, 0.0)
    top = torch.special.log_ndtr(high)
    ratio = torch.special.log_ndtr(low) - top
    tail = top + torch.where(ratio > _LOG_HALF, (-torch.expm1(ratio)).log(), torch.log1p(-ratio.exp()))
    middle = torch.log1p(-(torch.special.ndtr(low) + torch.special.ndtr(-high)))
    width = (high - low).clamp(min=torch.finfo(low.dtype).tiny)
    narrow = _log_phi(0.5 * (low + high)) + width.log()
    result = torch.where(high > 0, middle, tail)
    result = torch.where(width * low.abs().clamp(min=1.0) < _NARROW, narrow, result)
    return result.masked_fill(is_empty, -math.inf)


def truncated_standard_normal(lower: Tensor, upper: Tensor, uniform: Tensor) -> Tensor:
    """Returns a truncated standard normal quantile.

    It lies between ``lower`` and ``upper`` at ``uniform`` in [0, 1), by inversion in the log
    domain.
    """
    low, high, is_flipped = _to_the_left(lower, upper)
    share = log_interval(low, high)
    # Strictly between zero and one, whose quantiles may be infinite.
    uniform = torch.where(is_flipped, 1 - uniform, uniform).clamp(2.0**-54, 1 - 2.0**-53)
    below = torch.logaddexp(torch.special.log_ndtr(low), uniform.log() + share)
    above = torch.logaddexp(torch.special.log_ndtr(-high), torch.log1p(-uniform) + share)
    is_left = below < _LOG_HALF
    x = _inverse_log_ndtr(torch.where(is_left, below, above).clamp(max=_LOG_HALF))
    x = torch.where(is_left, x, -x)
    return torch.where(is_flipped, -x, x).clamp(lower, upper)


def _to_the_left(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mirrors intervals to reach further to the left.

    It also returns which were mirrored.
    """
    is_flipped = lower + upper > 0
    return torch.where(is_flipped, -upper, lower), torch.where(is_flipped, -lower, upper), is_flipped


def _inverse_log_ndtr(log_p: Tensor) -> Tensor:
    r"""Solves :math:`\log\Phi(x) = \log p` for :math:`p \le 1/2`.

    Newton's method from the left of the root; as :math:`\log\Phi` is concave it never crosses the root.
    """
    log_p = log_p.clamp(min=-1e300)
    x = -(-2 * log_p).sqrt()
    for _ in range(_NEWTON_STEPS):
        value = torch.special.log_ndtr(x)
        x = x + (log_p - value) * (value - _log_phi(x)).exp()
    return x


def _log_phi(x: Tensor) -> Tensor:
    return -0.5 * x.square() - 0.5 * math.log(2 * math.pi)
