"""Compiled intervals of the standard normal distribution, stable in the tails; in plain torch, :mod:`pyro_truncated.ops.piecewise`."""

import math

import numpy as np

from pyro_truncated.ops.compiled.compilation import njit

_ROOT_HALF = math.sqrt(0.5)
LOG_2PI = math.log(2 * math.pi)
_LOG_HALF = -math.log(2)
# Below this the complementary error function is on its way to underflow, and an asymptotic series is exact.
_FAR = -35.0
_NARROW = 1e-5
_NEWTON_STEPS = 8


@njit(cache=True, nogil=True)
def _log_ndtr(x):
    """Logarithm of the standard normal distribution function."""
    if x > _FAR:
        return math.log(0.5 * math.erfc(-_ROOT_HALF * x))
    if x == -np.inf:
        return -np.inf
    r = 1.0 / (x * x)
    return -0.5 * x * x - math.log(-x) - 0.5 * LOG_2PI + math.log1p(-r * (1.0 - r * (3.0 - r * (15.0 - 105.0 * r))))


@njit(cache=True, nogil=True)
def log_interval(lower, upper):
    """Logarithm of the standard normal mass between two numbers, the smaller one first."""
    low, high = (-upper, -lower) if lower + upper > 0.0 else (lower, upper)
    width = high - low
    if not width > 0.0:
        return -np.inf
    if width * max(1.0, -low) < _NARROW:
        middle = 0.5 * (low + high)
        return -0.5 * (middle * middle + LOG_2PI) + math.log(width)
    if high > 0.0:
        return math.log1p(-0.5 * (math.erfc(-_ROOT_HALF * low) + math.erfc(_ROOT_HALF * high)))
    if low > _FAR or (high > _FAR + 5.0):
        return math.log(0.5 * (math.erfc(-_ROOT_HALF * high) - math.erfc(-_ROOT_HALF * low)))
    top = _log_ndtr(high)
    return top + math.log(-math.expm1(_log_ndtr(low) - top))


@njit(cache=True, nogil=True)
def _inverse_log_ndtr(log_p):
    """Newton's method from the left of the root for probabilities up to one half; it never crosses, the function being concave."""
    x = -math.sqrt(-2.0 * log_p)
    for _ in range(_NEWTON_STEPS):
        value = _log_ndtr(x)
        step = (log_p - value) * math.exp(value + 0.5 * (x * x + LOG_2PI))
        x += step
        if step < 1e-12 * (1.0 - x):
            break
    return x


@njit(cache=True, nogil=True)
def _log_add(a, b):
    top = max(a, b)
    return top if top == -np.inf else top + math.log(math.exp(a - top) + math.exp(b - top))


@njit(cache=True, nogil=True)
def truncated_standard_normal(lower, upper, u):
    """The standard normal variate between two numbers at quantile ``u``, by inversion in the log domain."""
    is_flipped = lower + upper > 0.0
    low, high = (-upper, -lower) if is_flipped else (lower, upper)
    # Strictly between zero and one, whose quantiles may be infinite.
    u = min(max(1.0 - u if is_flipped else u, 2.0**-54), 1.0 - 2.0**-53)
    share = log_interval(low, high)
    below_x = _log_add(_log_ndtr(low), math.log(u) + share)
    if below_x < _LOG_HALF:
        x = _inverse_log_ndtr(below_x)
    else:
        x = -_inverse_log_ndtr(min(_log_add(_log_ndtr(-high), math.log1p(-u) + share), _LOG_HALF))
    x = min(max(x, low), high)
    return -x if is_flipped else x
