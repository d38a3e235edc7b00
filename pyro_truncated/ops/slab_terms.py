"""What the front doors of linear likelihoods with slabs share: products of data and dictionary, and the gradients in them."""

from __future__ import annotations

import math

from torch import Tensor

from pyro_truncated.ops.quadratic import pair_energy
from pyro_truncated.utils.constraints import without_missing


def slab_terms(value: Tensor, weight: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Products of data and dictionary ``(N, H)``, the dictionary over the noise deviation, and what is observed (``None``: everything)."""
    rows, is_observed = without_missing(value)
    rows, weight, precision = rows.detach(), weight.detach().double(), precision.detach().double()
    return (rows * precision) @ weight, weight * precision.sqrt().unsqueeze(-1), is_observed


def log_density_of_noise(value: Tensor, precision: Tensor) -> Tensor:
    """Log densities ``(N, 1)`` of the observed entries under the state in which nothing is active."""
    rows, is_observed = without_missing(value)
    precision = precision.double()
    normalizers = 0.5 * (precision.log() - math.log(2 * math.pi))
    normalizer = normalizers.sum() if is_observed is None else is_observed.double() @ normalizers
    return (normalizer - 0.5 * rows.square() @ precision).unsqueeze(-1)


def linear_energy(words: Tensor, linear: Tensor, num_data: int, num_latents: int) -> Tensor:
    """Values ``(N, C)`` of a linear function of the states with coefficients ``linear (N, H)``, such as prior logits.

    Raises:
        ValueError: if the coefficients have another shape.
    """
    if linear.shape != (num_data, num_latents):
        raise ValueError(f"linear must have shape (N, H) = {(num_data, num_latents)}; got {tuple(linear.shape)}")
    return pair_energy(words, linear.double(), linear.new_zeros(num_latents, num_latents))


def data_gradients(
    value: Tensor, weight: Tensor, precision: Tensor, grad: Tensor, first: Tensor, second: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in data, dictionary and precisions, from the moments of the coefficients.

    Args:
        value: data ``(N, D)``; NaN where missing.
        weight: dictionary ``(D, H)``.
        precision: inverse noise variances ``(D,)``.
        grad: gradients in the log densities of the states, ``(N, C)``.
        first: sums of the first moments weighted with them, ``(N, H)``.
        second: second moments ``(H, H)``, or ``(D, H, H)`` over the data points at which each dimension is observed.
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
