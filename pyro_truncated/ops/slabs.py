r"""Linear superposition with spike-and-slab prior, the slabs integrated out.

The model of a data point given its binary indicators :math:`b` is

.. math:: y \sim \mathcal N(W (b \odot z), \Lambda^{-1}), \qquad z \sim \mathcal N(\mu, \Psi),

where slabs are independent, :math:`\Psi = \mathrm{diag}(\tau^2)`, or correlated. Entries of ``y`` that are NaN are missing and contribute
nothing. On the CPU a state with :math:`k` active latents costs :math:`O(k^3)`, whatever the number of dimensions; everything is taken in
float64.

With ``words (N, C, W)`` and their ``weights (N, C)``, functions take observations ``value (N, D)``, the dictionary ``weight (D, H)``, and
the inverse noise variances ``precision (D,)``. Slabs have means ``slab_mean (H,)``. Their ``spread`` are deviations ``(H,)`` of independent
ones, or a positive definite covariance ``(H, H)``. Shapes that do not fit raise ``ValueError``.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend, gradient, save_with_context
from pyro_truncated.ops.deferred_checks import cholesky
from pyro_truncated.ops.packed_states import check_likelihood, check_weights
from pyro_truncated.ops.quadratic import linear_energy
from pyro_truncated.utils.arguments import renames
from pyro_truncated.utils.budget import rows_per_block
from pyro_truncated.utils.constraints import without_missing


class SlabTerms(NamedTuple):
    """What kernels take of data, dictionary and slabs."""

    linear: Tensor  # products of data and dictionary over the noise variance, (N, H)
    elements: Tensor  # the dictionary over the noise deviation, (D, H)
    is_observed: Tensor | None  # (N, D); None where all entries are
    mean: Tensor  # of the slabs, (H,)
    spread: Tensor  # their standard deviations (H,), or their covariance (H, H)


def _terms(value: Tensor, weight: Tensor, precision: Tensor, slab_mean: Tensor, spread: Tensor) -> SlabTerms:
    rows, is_observed = without_missing(value)
    rows, weight, precision = rows.detach(), weight.detach().double(), precision.detach().double()
    linear, elements = rows @ (weight * precision.unsqueeze(-1)), weight * precision.sqrt().unsqueeze(-1)
    return SlabTerms(linear, elements, is_observed, slab_mean.double(), spread.double())


def noise_log_density(value: Tensor, precision: Tensor) -> Tensor:
    """Returns log densities ``(N, 1)`` of observed entries without active latents."""
    rows, is_observed = without_missing(value)
    precision = precision.double()
    normalizers = 0.5 * (precision.log() - math.log(2 * math.pi))
    normalizer = normalizers.sum() if is_observed is None else is_observed.double() @ normalizers
    return (normalizer - 0.5 * rows.square() @ precision).unsqueeze(-1)


def data_gradients(
    value: Tensor, weight: Tensor, precision: Tensor, grad: Tensor, first: Tensor, second: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in data, dictionary and precisions, from the moments of the coefficients.

    ``grad (N, C)`` are gradients in the log densities, ``first (N, H)`` and ``second`` moments weighted with them, ``(H, H)`` or ``(D, H,
    H)`` over the data points at which each dimension is observed.
    """
    is_observed = ~value.isnan()
    products = weight @ second if second.dim() == 2 else (second @ weight.unsqueeze(-1)).squeeze(-1)
    value, total = value.nan_to_num(0.0), grad.double().sum(1, keepdim=True) * is_observed
    prediction = first @ weight.mT * is_observed
    square_error = (total * value.square() - 2 * value * prediction).sum(0) + (products * weight).sum(1)
    return (
        precision * (prediction - total * value),
        precision.unsqueeze(-1) * (value.mT @ first - products),
        0.5 * (total.sum(0) / precision - square_error),
    )


@renames(slab_deviation="spread", slab_covariance="spread")
def slab_log_prob(
    words: Tensor, value: Tensor, weight: Tensor, precision: Tensor, slab_mean: Tensor, spread: Tensor, linear: Tensor | None = None
) -> Tensor:
    r"""Log density :math:`\log p(y_n \mid b)` with the slabs integrated out, under packed indicators.

    .. math:: \log p(y \mid b) = \log \mathcal N\bigl(y;\; W (b \odot \mu),\; \Lambda^{-1} + W (b b^\top \odot \Psi) W^\top\bigr).

    Differentiable once in all arguments but the words; the gradient in a covariance is symmetric. ``linear (N, H)`` are coefficients of a
    linear function of the state to add, such as prior logits. Returns log densities ``(N, C)``.
    """
    _check(words, value, weight, precision, slab_mean, spread)
    if linear is not None and linear.shape != (len(value), weight.shape[1]):
        raise ValueError(f"linear must have shape (N, H) = {(len(value), weight.shape[1])}; got {tuple(linear.shape)}")
    out: Tensor = _LogProb.apply(words, value, weight, precision, slab_mean, spread)  # type: ignore[no-untyped-call]
    return out if linear is None else out + linear_energy(words, linear.double())


@renames(slab_deviation="spread", slab_covariance="spread")
def slab_moments(
    words: Tensor,
    weights: Tensor,
    value: Tensor,
    weight: Tensor,
    precision: Tensor,
    slab_mean: Tensor,
    spread: Tensor,
    per_datum: bool = False,
) -> tuple[Tensor, ...]:
    r"""Weighted posterior moments of the indicators and of the coefficients :math:`s = b \odot z`.

    Let :math:`\mathcal N(\mu_b + d, C)` be the posterior of the active slabs under state :math:`b`, with weights :math:`w_{nc}`, and
    :math:`\kappa_b = \mu_b + d`. Moments are :math:`\sum_c w_{nc}\, b`, :math:`\sum_c w_{nc}\, \kappa_b` and :math:`\sum_{(n)c} w_{nc}
    (C + \kappa_b \kappa_b^\top)`. Of correlated slabs with prior covariance :math:`\Psi_b` there are also the gradients of :math:`\log
    p(y \mid b)`, with zeros for latents that are off,

    .. math:: \frac{\partial}{\partial \mu_b} = \Psi_b^{-1} d, \qquad
        2 \frac{\partial}{\partial \Psi_b} = \Psi_b^{-1} (C + d d^\top - \Psi_b) \Psi_b^{-1}.

    Returns sums of the indicators ``(N, H)``, first moments ``(N, H)`` and second moments ``(H, H)``, or ``(N, H, H)`` with ``per_datum``.
    Of correlated slabs it also returns the sums over states and data of the two gradients, ``(H,)`` and ``(H, H)``.
    """
    check_weights(words, weights)
    _check(words, value, weight, precision, slab_mean, spread)
    kernels = backend("slabs", words)
    moments = kernels.moments if spread.dim() == 1 else kernels.correlated_moments
    return moments(words, weights, _terms(value, weight, precision, slab_mean, spread), per_datum)


@renames(slab_deviation="spread", slab_covariance="spread")
def slab_moments_by_dimension(
    words: Tensor, weights: Tensor, value: Tensor, weight: Tensor, precision: Tensor, slab_mean: Tensor, spread: Tensor
) -> tuple[Tensor, ...]:
    """Like :func:`slab_moments`, with second moments ``(D, H, H)`` over observed entries.

    Of independent slabs it also returns the diagonal ``(H,)`` of those over all data points.
    """
    num_latents = weight.shape[1]
    active, first, sums = [], [], []
    second = value.new_zeros(value.shape[1], num_latents**2, dtype=torch.float64)
    size = rows_per_block((16 if spread.dim() == 1 else 32) * num_latents**2)
    for rows in zip(words.split(size), weights.split(size), value.split(size), strict=True):
        on, mean, pairs, *others = slab_moments(*rows, weight, precision, slab_mean, spread, per_datum=True)
        active.append(on)
        first.append(mean)
        second.addmm_((~rows[2].isnan()).double().mT, pairs.flatten(1))
        sums.append(others or [pairs.diagonal(dim1=-2, dim2=-1).sum(0)])
    totals = [functools.reduce(torch.add, parts) for parts in zip(*sums, strict=True)]
    return torch.cat(active), torch.cat(first), second.unflatten(1, (num_latents, num_latents)), *totals


def expected_log_slab_prior(
    words: Tensor,
    weights: Tensor,
    value: Tensor,
    weight: Tensor,
    precision: Tensor,
    slab_mean: Tensor,
    slab_covariance: Tensor,
    means: Tensor,
    covariances: Tensor,
) -> Tensor:
    r"""Expected log density :math:`\sum_{nc} w_{nc} \langle \log \mathcal N(z_b; m_b, P_b) \rangle` of the active slabs under other priors.

    The posterior is that under the first five parameters, as in :func:`slab_moments`. Others are ``means (T, H)`` and ``covariances (T, H,
    H)``, positive definite. Returns ``(T,)``, without constants.
    """
    check_weights(words, weights)
    _check(words, value, weight, precision, slab_mean, slab_covariance)
    if slab_covariance.dim() != 2 or covariances.shape != (*means.shape, weight.shape[1]) or means.shape[1:] != weight.shape[1:]:
        raise ValueError(f"means (T, H) and covariances (T, H, H) do not fit; got {tuple(means.shape)} and {tuple(covariances.shape)}")
    terms = _terms(value, weight, precision, slab_mean, slab_covariance)
    return backend("slabs", words).expected_log_prior(words, weights, terms, means, covariances)


class _LogProb(torch.autograd.Function):
    """The last input is the slabs' deviations ``(H,)`` or their covariance ``(H, H)``."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, *inputs: Tensor) -> Tensor:
        """Returns log densities ``(N, C)`` with the slabs integrated out."""
        save_with_context(ctx, words, *inputs)
        kernels, (value, _, precision, _, spread) = backend("slabs", words), inputs
        log_prob = kernels.log_prob if spread.dim() == 1 else kernels.correlated_log_prob
        energy: Tensor = log_prob(words, _terms(*inputs))
        return energy + noise_log_density(value, precision)

    @staticmethod
    @gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients, from the slabs' posterior moments."""
        # Fisher's identity: the gradient of the collapsed density is the posterior mean of that of the joint density with the slabs.
        words, *inputs = ctx.saved_tensors
        parameters = [tensor.double() for tensor in inputs]
        value, weight, precision, mean, spread = parameters
        moments = slab_moments_by_dimension if bool(value.isnan().any()) else slab_moments
        active, first, second, *others = moments(words, grad, *parameters)
        if spread.dim() == 2:
            slope, curvature = others[0], 0.5 * others[1]
        else:
            (squares,) = others or [second.diagonal()]
            sum_active, sum_first = active.sum(0), first.sum(0)
            deviations = squares - 2 * mean * sum_first + mean.square() * sum_active
            slope = (sum_first - mean * sum_active) / spread.square()
            curvature = (deviations - spread.square() * sum_active) / spread**3
        return None, *data_gradients(value, weight, precision, grad, first, second), slope, curvature


def _check(words: Tensor, value: Tensor, weight: Tensor, precision: Tensor, slab_mean: Tensor, spread: Tensor) -> None:
    check_likelihood(words, value, weight, precision)
    H = weight.shape[1]
    if slab_mean.shape != (H,) or spread.shape not in ((H,), (H, H)):
        shapes = f"{tuple(slab_mean.shape)} and {tuple(spread.shape)}"
        raise ValueError(f"slabs must have means of shape (H,) = {(H,)}, and deviations (H,) or a covariance (H, H); got {shapes}")


def collapse(states: Tensor, linear: Tensor, gram: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Integrates out slabs :math:`z = \mu + \tau \odot e` with standard normal :math:`e`.

    With :math:`t = b \odot \tau`, :math:`m = b \odot \mu` and the precision :math:`M = I + \mathrm{diag}(t)\, G\, \mathrm{diag}(t)` of the
    posterior :math:`\mathcal N(M^{-1} u, M^{-1})` of :math:`e`, where :math:`u = t \odot (a - G m)`, the log density is

    .. math:: m^\top a - \tfrac12 m^\top G m + \tfrac12 u^\top M^{-1} u - \tfrac12 \log |M|

    plus terms that do not depend on the state. Nothing is divided by the slabs' variances. Returns it ``(*batch)``, the Cholesky factor of
    :math:`M` ``(*batch, H, H)``, and :math:`M^{-1} u` ``(*batch, H)``.
    """
    amplitude, spread = states * mean, states * deviation
    field = linear - (gram @ amplitude.unsqueeze(-1)).squeeze(-1)
    return _integrate(amplitude, linear, field, spread.unsqueeze(-1) * gram * spread.unsqueeze(-2), spread * field)


def collapse_correlated_slabs(states: Tensor, linear: Tensor, gram: Tensor, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Does as :func:`collapse` for slabs :math:`z = \mu + T e`, ``root`` :math:`T` ``(*batch, H, H)``."""
    amplitude, spread = states * mean, states.unsqueeze(-1) * root
    field = linear - (gram @ amplitude.unsqueeze(-1)).squeeze(-1)
    return _integrate(amplitude, linear, field, spread.mT @ gram @ spread, (spread.mT @ field.unsqueeze(-1)).squeeze(-1))


def _integrate(amplitude: Tensor, linear: Tensor, field: Tensor, gram: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Does as :func:`collapse`, with the Gram matrix of standardised slabs."""
    factor = cholesky(torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device) + gram)
    solution = torch.cholesky_solve(target.unsqueeze(-1), factor).squeeze(-1)
    energy = 0.5 * (amplitude * (linear + field) + target * solution).sum(-1) - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return energy, factor, solution
