r"""Spike-and-slab causes that superpose by maximum: Gibbs sampling over selected causes, and what an M-step needs of the draws.

The model of a data point given its coefficients :math:`s = b \odot z` is

.. math:: y_d \sim \mathcal N(\max(0, \max_h s_h W_{dh}), \lambda_d^{-1}), \qquad W \ge 0, \qquad
    b_h \sim \mathrm{Bernoulli}(\pi_h), \qquad z_h \sim \mathcal N(\mu_h, \tau_h^2).

Entries of ``y`` that are NaN are missing and contribute nothing. A coefficient of zero stands for a cause that is off.
"""

from __future__ import annotations

from torch import Tensor

from pyro_truncated.ops.backend import backend
from pyro_truncated.ops.checks import refuse
from pyro_truncated.ops.streams import Source, draw_seed, positions


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
    r"""Gibbs sampling of the coefficients of a few selected causes of every data point; all others are off.

    An update draws :math:`(b_h, z_h)` jointly from their exact conditional given the other causes: between the places where the cause
    starts to win another dimension it is Gaussian in :math:`z_h`. A sweep updates every selected cause once, in random order.

    Args:
        value: observations, ``(N, D)``; NaN where missing.
        weight: dictionary :math:`W \ge 0`, ``(D, H)``.
        precision: inverse noise variances :math:`\lambda`, ``(D,)``.
        log_odds: prior log odds of the indicators, ``(H,)``.
        slab_mean: :math:`\mu`, ``(H,)``.
        slab_deviation: :math:`\tau`, ``(H,)``.
        selected: selected causes, ``(N, K)`` int64, distinct within a row.
        coefficients: where the chains start, ``(N, H)``; those of causes that are not selected count as zero.
        burn_in: sweeps before the first one kept.
        sweeps: sweeps kept, at least one.
        rows: positions ``(N,)`` of the data points among all data, by which random numbers are keyed; default: ``0 .. N - 1``.
        generator: source of randomness; default: torch's global generator.

    Returns:
        The selected causes' coefficients after each sweep kept, ``(N, sweeps, K)``, and the mean over these sweeps of the exact
        conditional probabilities that they are on, ``(N, K)``; both float64.

    Raises:
        ValueError: if the shapes do not fit, an element is negative, or a number of sweeps is out of range.
    """
    _check(value, weight, selected)
    _check_chain(value, weight, selected, coefficients, burn_in, sweeps)
    keys = positions(rows, len(value), value.device), draw_seed(generator)
    value, weight, precision = (tensor.detach().double() for tensor in (value, weight, precision))
    start = coefficients.detach().double().gather(1, selected)
    prior = [parameter.detach().double()[selected] for parameter in (log_odds, slab_mean, slab_deviation)]
    kernels = backend("maximum_slabs", value)
    return kernels.gibbs(value, weight, precision, prior, selected, start, burn_in, sweeps, *keys)  # type: ignore[no-any-return]


def maximum_slab_statistics(value: Tensor, weight: Tensor, selected: Tensor, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""What the causes win under a dictionary, summed over the data points and averaged over draws of their coefficients.

    With :math:`A_{dh} = 1` where cause ``h`` attains a positive maximum in the observed dimension ``d``:
    :math:`\sum_n \langle A_{dh} s_h \rangle y_{nd}`, :math:`\sum_n \langle A_{dh} s_h^2 \rangle` and
    :math:`\sum_n \langle (y_{nd} - \max(0, \max_h s_h W_{dh}))^2 \rangle`.

    Args:
        value: observations, ``(N, D)``; NaN where missing.
        weight: dictionary :math:`W \ge 0`, ``(D, H)``.
        selected: selected causes, ``(N, K)``.
        draws: their coefficients, ``(N, S, K)``.

    Returns:
        ``(D, H)``, ``(D, H)`` and ``(D,)`` in float64.

    Raises:
        ValueError: if the shapes do not fit, or an element is negative.
    """
    _check(value, weight, selected)
    if draws.dim() != 3 or draws.shape[::2] != selected.shape:
        raise ValueError(f"draws must have shape (N, S, K) with (N, K) = {tuple(selected.shape)}; got {tuple(draws.shape)}")
    kernels = backend("maximum_slabs", value)
    products, squares, errors = kernels.statistics(value.detach().double(), selected, draws.detach().double(), weight.detach().double())
    num_draws = draws.shape[1]
    return products / num_draws, squares / num_draws, errors / num_draws


def _check(value: Tensor, weight: Tensor, selected: Tensor) -> None:
    if value.dim() != 2 or weight.dim() != 2 or value.shape[1] != weight.shape[0]:
        raise ValueError(f"value (N, D) and weight (D, H) must share D; got {tuple(value.shape)} and {tuple(weight.shape)}")
    if selected.dim() != 2 or len(selected) != len(value):
        raise ValueError(f"selected must have shape (N, K) with N = {len(value)}; got {tuple(selected.shape)}")
    refuse(((selected < 0) | (selected >= weight.shape[1])).any(), lambda: _complain_of_selected(selected, weight))
    refuse(~(weight >= 0).all(), _complain_of_weight)


def _complain_of_selected(selected: Tensor, weight: Tensor) -> None:
    raise ValueError(f"selected causes must lie in 0 .. {weight.shape[1] - 1}; got {int(selected.min())} .. {int(selected.max())}")


def _complain_of_weight() -> None:
    raise ValueError("weight must not be negative (nor NaN): a cause with negative entries would win at negative coefficients")


def _complain_of_repetition() -> None:
    raise ValueError("selected causes repeat within a data point")


def _check_chain(value: Tensor, weight: Tensor, selected: Tensor, coefficients: Tensor, burn_in: int, sweeps: int) -> None:
    ordered = selected.sort(1).values
    refuse((ordered[:, 1:] == ordered[:, :-1]).any(), _complain_of_repetition)
    if coefficients.shape != (len(value), weight.shape[1]):
        raise ValueError(f"coefficients must have shape (N, H) = {(len(value), weight.shape[1])}; got {tuple(coefficients.shape)}")
    if burn_in < 0 or sweeps < 1:
        raise ValueError(f"burn_in must not be negative and sweeps be at least 1; got {burn_in} and {sweeps}")
