r"""Superposition of active latents by maximum, for packed states.

With normal noise the mean is :math:`\bar y_d(s) = \max(0, \max_h s_h W_{dh})`. Means of an exponential family are :math:`m_d(s) = \max(b_d,
\max_h s_h W_{dh})` with a background :math:`b`; natural parameter and log partition function, which grow with the mean, are the largest,
too. With slabs the model of a data point given its coefficients :math:`s = b \odot z` is

.. math:: y_d \sim \mathcal N(\max(0, \max_h s_h W_{dh}), \lambda_d^{-1}), \qquad W \ge 0, \qquad
    b_h \sim \mathrm{Bernoulli}(\pi_h), \qquad z_h \sim \mathcal N(\mu_h, \tau_h^2).

Entries of ``y`` that are NaN are missing and contribute nothing. A coefficient of zero stands for a cause that is off.

With ``words (N, C, W)`` and their ``weights (N, C)``, functions take observations ``value (N, D)``, the dictionary ``weight (D, H)``, and
the inverse noise variances ``precision (D,)``. Results are float64. Shapes that do not fit raise ``ValueError``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend, gradient, save_with_context
from pyro_truncated.ops.deferred_checks import raise_if
from pyro_truncated.ops.packed_states import check_likelihood, check_weights
from pyro_truncated.ops.streams import Source, draw_seed, positions

_LOG_HALF = -math.log(2)


class Segments(NamedTuple):
    r"""An unnormalised density :math:`\exp(c_j + \beta_j z - \tfrac12 a_j z^2)` between the edges :math:`e_j` and :math:`e_{j+1}`."""

    edges: Tensor  # in ascending order, (*batch, J + 1), from minus to plus infinity
    constant: Tensor  # c, (*batch, J)
    linear: Tensor  # beta, (*batch, J)
    precision: Tensor  # a > 0, (*batch, J)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Standardised ends of every segment, ``(*batch, J)`` each."""
        loc, root = self.linear / self.precision, self.precision.sqrt()
        return (self.edges[..., :-1] - loc) * root, (self.edges[..., 1:] - loc) * root

    def log_masses(self) -> Tensor:
        """The log mass of every segment, ``(*batch, J)``."""
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
        """Draws ``(*batch)`` by inversion, with two uniform numbers each."""
        cumulative = self.log_masses().softmax(-1).cumsum(-1)
        last = self.precision.shape[-1] - 1
        segment = (first.unsqueeze(-1) * cumulative[..., -1:] >= cumulative).sum(-1, keepdim=True).clamp(max=last)
        lower, upper = (bound.gather(-1, segment).squeeze(-1) for bound in self.bounds)
        x = truncated_standard_normal(lower, upper, second)
        linear, precision = (part.gather(-1, segment).squeeze(-1) for part in (self.linear, self.precision))
        ends = (self.edges[..., :-1].gather(-1, segment).squeeze(-1), self.edges[..., 1:].gather(-1, segment).squeeze(-1))
        return (linear / precision + x / precision.sqrt()).clamp(*ends)


def maximum_segments(
    value: Tensor, others: Tensor, element: Tensor, precision: Tensor, slab_mean: Tensor, slab_deviation: Tensor
) -> Segments:
    r"""Joint density of data and one slab, :math:`\mathcal N(z; \mu, \tau^2) \prod_d \mathcal N(y_d; \max(m_d, z w_d), \lambda_d^{-1})`.

    The cause wins dimension ``d`` where :math:`z > m_d / w_d`, so between the sorted thresholds the density is Gaussian in ``z``. The total
    mass is the density of the data. :math:`y` (NaN where missing), :math:`m \ge 0`, :math:`w \ge 0` and :math:`\lambda` are ``(*batch,
    D)``, the slab's moments ``(*batch)``.
    """
    value, others, element, precision = torch.broadcast_tensors(value, others, element, precision)
    is_observed = ~value.isnan()
    value, precision = value.nan_to_num(0.0), precision * is_observed
    base = (0.5 * is_observed * (precision.masked_fill(~is_observed, 1.0).log() - math.log(2 * math.pi))).sum(-1)
    base = base - 0.5 * (precision * (value - others).square()).sum(-1)
    # A dimension that can never be won has its threshold at infinity.
    can_win = (element > 0) & is_observed
    threshold = torch.where(can_win, others / element.masked_fill(~can_win, 1.0), math.inf)
    threshold, order = threshold.sort(-1)

    def cumulative(terms: Tensor) -> Tensor:
        """Cumulative sums over the first 0, 1, ... entries that can win."""
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
    low, high, _ = _mirror(lower, upper)
    is_empty = ~(low < high)
    low, high = low.masked_fill(is_empty, -1.0), high.masked_fill(is_empty, 0.0)
    top = torch.special.log_ndtr(high)
    ratio = torch.special.log_ndtr(low) - top
    tail = top + torch.where(ratio > _LOG_HALF, (-torch.expm1(ratio)).log(), torch.log1p(-ratio.exp()))
    middle = torch.log1p(-(torch.special.ndtr(low) + torch.special.ndtr(-high)))
    width = (high - low).clamp(min=torch.finfo(low.dtype).tiny)
    narrow = _log_phi(0.5 * (low + high)) + width.log()
    result = torch.where(high > 0, middle, tail)
    # In narrow intervals differences cancel.
    result = torch.where(width * low.abs().clamp(min=1.0) < 1e-5, narrow, result)
    return result.masked_fill(is_empty, -math.inf)


def truncated_standard_normal(lower: Tensor, upper: Tensor, uniform: Tensor) -> Tensor:
    """The truncated standard normal quantile at ``uniform``, in the log domain."""
    low, high, is_flipped = _mirror(lower, upper)
    share = log_interval(low, high)
    # Strictly between zero and one, whose quantiles may be infinite.
    uniform = torch.where(is_flipped, 1 - uniform, uniform).clamp(2.0**-54, 1 - 2.0**-53)
    below = torch.logaddexp(torch.special.log_ndtr(low), uniform.log() + share)
    above = torch.logaddexp(torch.special.log_ndtr(-high), torch.log1p(-uniform) + share)
    is_left = below < _LOG_HALF
    x = _inverse_log_ndtr(torch.where(is_left, below, above).clamp(max=_LOG_HALF))
    x = torch.where(is_left, x, -x)
    return torch.where(is_flipped, -x, x).clamp(lower, upper)


def _mirror(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mirrors intervals to reach further to the left; says which."""
    is_flipped = lower + upper > 0
    return torch.where(is_flipped, -upper, lower), torch.where(is_flipped, -lower, upper), is_flipped


def _inverse_log_ndtr(log_p: Tensor) -> Tensor:
    r"""Solves :math:`\log\Phi(x) = \log p` for :math:`p \le 1/2` by Newton's method."""
    log_p = log_p.clamp(min=-1e300)
    x = -(-2 * log_p).sqrt()
    for _ in range(8):
        value = torch.special.log_ndtr(x)
        x = x + (log_p - value) * (value - _log_phi(x)).exp()
    return x


def _log_phi(x: Tensor) -> Tensor:
    return -0.5 * x.square() - 0.5 * math.log(2 * math.pi)


def maximum_error(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
    r"""Weighted squared residuals :math:`\sum_d \lambda_d (y_{nd} - \bar y_d(s))^2` over the observed entries of each data point.

    On the CPU a state costs a comparison per active latent and observed dimension. Differentiable once in ``value``, ``weight`` and
    ``precision``; the first of several maxima takes the whole gradient. Negative entries of the dictionary never win. Returns sums ``(N,
    C)``.
    """
    check_likelihood(words, value, weight, precision)
    return _MaximumError.apply(words, value, weight, precision)  # type: ignore[no-untyped-call]


def maximum_statistics(words: Tensor, weights: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Sums over who attains the maximum, for M-step and gradient.

    With weights :math:`w_{nc}` and :math:`A_{dh}(s) = 1` where latent ``h`` is the first that attains :math:`\bar y_d(s) > 0`, else 0.
    Returns first moments :math:`\sum_c w_{nc} s`, ``(N, H)``; predictions :math:`\sum_c w_{nc} \bar y(s)`, ``(N, D)``, also of missing
    entries; wins :math:`\sum_{nc} w_{nc} A_{dh}(s)` and sums :math:`\sum_{nc} w_{nc}\, y_{nd} A_{dh}(s)` over the observed entries, ``(D,
    H)``.
    """
    check_weights(words, weights)
    check_likelihood(words, value, weight, weight[:, 0] if weight.dim() == 2 else weight)
    return _statistics(words, weights, value, weight)


def _statistics(words: Tensor, weights: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    active, prediction, wins, sums = backend("maximum", words).maximum_statistics(words, weights, value, weight)
    return active, prediction, wins[:, :-1], sums[:, :-1]


class _MaximumError(torch.autograd.Function):
    r"""Squared error of the maximum, :math:`\sum_d \lambda_d (y_{nd} - \max_h s_h W_{dh})^2`."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, value: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
        """Returns errors ``(N, C)``."""
        save_with_context(ctx, words, value, weight, precision)
        return backend("maximum", words).maximum_error(words, value, weight, precision)

    @staticmethod
    @gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        """Gradients; the first latent that attains a maximum takes all of it."""
        words, *inputs = ctx.saved_tensors
        value, weight, precision = (tensor.double() for tensor in inputs)
        _, prediction, wins, sums = _statistics(words, grad, value, weight)
        total = grad.double().sum(1, keepdim=True) * ~value.isnan()
        data = value.nan_to_num(0.0)
        # The square of a maximum is that of its winner's entry.
        errors = (total * data.square()).sum(0) + (weight * (weight * wins - 2 * sums)).sum(1)
        grad_value = 2 * precision * (total * data - prediction).masked_fill(value.isnan(), 0.0)
        return None, grad_value, 2 * precision.unsqueeze(-1) * (weight * wins - sums), errors


def maximum_score(words: Tensor, value: Tensor, natural: Tensor, partition: Tensor) -> Tensor:
    r"""Returns log densities :math:`\sum_d y_{nd}\, \eta_d(s) - A_d(s)` without the base measure.

    :math:`\eta_d(s)` and :math:`A_d(s)` are the largest natural parameter and log partition function of the active latents and the
    background, in the same order. On the CPU a state costs two comparisons per active latent and observed dimension. Differentiable once in
    all arguments but the words; of several that are largest the first takes the whole gradient, and the background before all latents.
    Parameters ``(D, H + 1)`` end with those of the background. Returns sums ``(N, C)``.
    """
    _check_score(words, value, natural, partition)
    return _MaximumScore.apply(words, value, natural, partition)  # type: ignore[no-untyped-call]


def maximum_wins(words: Tensor, weights: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""As :func:`maximum_statistics`, of a superposition by maximum above a background.

    ``weight (D, H + 1)`` are dictionary and background, or anything that grows with them, and so are wins and sums. Who is largest wins.
    """
    check_weights(words, weights)
    _check_score(words, value, weight, weight)
    weight, weights = weight.double(), weights.double()
    background = weight[:, -1:]
    active, above, wins, sums = backend("maximum", words).maximum_statistics(words, weights, value, weight[:, :-1] - background)
    return active, above + weights.sum(1, keepdim=True) * background.mT, wins, sums


class _MaximumScore(torch.autograd.Function):
    r"""Log densities :math:`\sum_d y_{nd}\, \eta_d(s) - A_d(s)` without the base measure."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, value: Tensor, natural: Tensor, partition: Tensor) -> Tensor:
        """Returns log densities ``(N, C)``."""
        save_with_context(ctx, words, value, natural, partition)
        return backend("maximum", words).maximum_score(words, value, natural, partition)

    @staticmethod
    @gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        r"""Gradients: :math:`\sum_c g_{nc} \eta_d`, sums of data, and minus the wins."""
        words, value, natural, _ = ctx.saved_tensors
        _, largest, wins, sums = maximum_wins(words, grad, value, natural)
        return None, largest.masked_fill(value.isnan(), 0.0), sums, -wins


def _check_score(words: Tensor, value: Tensor, natural: Tensor, partition: Tensor) -> None:
    if natural.dim() != 2 or natural.shape != partition.shape or natural.shape[1] < 2:
        shapes = f"{tuple(natural.shape)} and {tuple(partition.shape)}"
        raise ValueError(f"parameters of latents and background must both have shape (D, H + 1); got {shapes}")
    check_likelihood(words, value, natural[:, :-1], natural[:, -1])


def maximum_slab_gibbs(
    value: Tensor,
    weight: Tensor,
    precision: Tensor,
    log_odds: Tensor,
    slab_mean: Tensor,
    slab_deviation: Tensor,
    selected: Tensor,
    coefficients: Tensor,
    *,
    burn_in: int,
    sweeps: int,
    rows: Tensor | None = None,
    generator: Source = None,
) -> tuple[Tensor, Tensor]:
    r"""Draws coefficients of each data point's selected causes by Gibbs sampling.

    An update draws :math:`(b_h, z_h)` jointly from their exact conditional, which is Gaussian in :math:`z_h` between the thresholds at
    which the cause wins another dimension. A sweep updates every selected cause once, in random order. Arguments, their checks and results
    are those of :meth:`pyro_truncated.distributions.MaximumSuperposition.draw_coefficients`, of latents ``(H,)``.
    """
    _check_slabs(value, weight, selected)
    _check_chain(value, weight, selected, coefficients, burn_in, sweeps)
    keys = positions(rows, len(value), value.device), draw_seed(generator)
    value, weight, precision = (tensor.detach().double() for tensor in (value, weight, precision))
    start = coefficients.detach().double().gather(1, selected)
    prior = [parameter.detach().double()[selected] for parameter in (log_odds, slab_mean, slab_deviation)]
    kernels = backend("maximum", value)
    return kernels.slab_gibbs(value, weight, precision, prior, selected, start, burn_in, sweeps, *keys)


def maximum_slab_statistics(value: Tensor, weight: Tensor, selected: Tensor, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""What the causes win, summed over data, averaged over draws.

    With :math:`A_{dh} = 1` where cause ``h`` attains a positive maximum in the observed dimension ``d``: :math:`\sum_n \langle A_{dh} s_h
    \rangle y_{nd}`, :math:`\sum_n \langle A_{dh} s_h^2 \rangle` and :math:`\sum_n \langle (y_{nd} - \max(0, \max_h s_h W_{dh}))^2 \rangle`,
    ``(D, H)``, ``(D, H)`` and ``(D,)``, of ``selected (N, K)`` causes and ``draws (N, S, K)`` of their coefficients.
    """
    _check_slabs(value, weight, selected)
    if draws.dim() != 3 or draws.shape[::2] != selected.shape:
        raise ValueError(f"draws must have shape (N, S, K) with (N, K) = {tuple(selected.shape)}; got {tuple(draws.shape)}")
    kernels = backend("maximum", value)
    products, squares, errors = kernels.slab_statistics(
        value.detach().double(), selected, draws.detach().double(), weight.detach().double()
    )
    num_draws = draws.shape[1]
    return products / num_draws, squares / num_draws, errors / num_draws


def _check_slabs(value: Tensor, weight: Tensor, selected: Tensor) -> None:
    if value.dim() != 2 or weight.dim() != 2 or value.shape[1] != weight.shape[0]:
        raise ValueError(f"value (N, D) and weight (D, H) must share D; got {tuple(value.shape)} and {tuple(weight.shape)}")
    if selected.dim() != 2 or len(selected) != len(value):
        raise ValueError(f"selected must have shape (N, K) with N = {len(value)}; got {tuple(selected.shape)}")
    raise_if(
        ((selected < 0) | (selected >= weight.shape[1])).any(),
        lambda: f"selected causes must lie in 0 .. {weight.shape[1] - 1}; got {int(selected.min())} .. {int(selected.max())}",
    )
    raise_if(
        ~(weight >= 0).all(),
        lambda: f"weight must not be negative or NaN, as causes would win at negative coefficients; got {weight.min()}",
    )


def _check_chain(value: Tensor, weight: Tensor, selected: Tensor, coefficients: Tensor, burn_in: int, sweeps: int) -> None:
    ordered = selected.sort(1).values
    is_repeated = ordered[:, 1:] == ordered[:, :-1]
    raise_if(is_repeated.any(), lambda: f"selected must not hold a cause twice; got {selected[is_repeated.any(1)][0].tolist()}")
    if coefficients.shape != (len(value), weight.shape[1]):
        raise ValueError(f"coefficients must have shape (N, H) = {(len(value), weight.shape[1])}; got {tuple(coefficients.shape)}")
    if burn_in < 0 or sweeps < 1:
        raise ValueError(f"burn_in must not be negative and sweeps be at least 1; got {burn_in} and {sweeps}")


def max_superposition(states: Tensor, weight: Tensor) -> Tensor:
    """Largest term ``max(0, max_h s_h W_dh)`` of every dimension, ``(*batch, D)``, of states ``(*batch, H)``."""
    return (weight * states.unsqueeze(-2)).amax(-1).clamp(min=0.0)
