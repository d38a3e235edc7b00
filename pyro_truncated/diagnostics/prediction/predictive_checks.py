"""Are drawn data like the data? Leave-one-out transforms, and predictive p-values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pyro_truncated.diagnostics.prediction.cross_validation import likelihood_name
from pyro_truncated.utils import arviz_compat as compat
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arviz_compat import get_dataset, group_names

Statistic = Callable[[np.ndarray], float]


def _kurtosis(values: np.ndarray) -> float:
    deviation = values - values.mean()
    return float((deviation**4).mean() / max((deviation**2).mean() ** 2, 1e-300))


STATISTICS: dict[str, Statistic] = {"mean": np.mean, "standard deviation": np.std, "kurtosis": _kurtosis, "maximum": np.max}


@names_arguments
def loo_pit(idata: Any, *, name: str | None = None, seed: int = 0) -> np.ndarray:
    r"""Leave-one-out probability integral transforms, feature by feature.

    :math:`u_{nd} = P(\tilde y_{nd} < y_{nd} \mid y_{-n}) + v P(\tilde y_{nd} = y_{nd} \mid y_{-n})`
    with uniform :math:`v`. This serves counts and binary values too. :math:`\tilde y` are *new*
    data points (the group ``marginal_predictive``): repeated ones have seen :math:`y_n` through
    their states. (Where states are global, no data point has any, and ``posterior_predictive``
    serves.) The weights of the draws are those of PSIS-LOO on the marginal likelihood. If the model
    is right, the transforms of each feature are uniform on [0, 1]; those of different features
    depend on each other.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> idata = to_arviz(model, guide, y, num_samples=25)
        >>> with warnings.catch_warnings(action="ignore"):  # parameters are point estimates
        ...     loo_pit(idata).shape
        (20, 9)

    Args:
        idata: from :func:`~pyro_truncated.to_arviz`.
        name: observed site; needed if there are several.
        seed: of the uniform numbers.

    Returns:
        ``(N, features)``; NaN where the observation is missing (NaN).

    Raises:
        ValueError: if a group is missing or the site is not clear.
    """
    group = new_data_group(idata)
    if group is None:
        raise ValueError("the data have no group marginal_predictive; call to_arviz with num_predictive > 0")
    name = name or observed_name(idata, group)
    observed = get_dataset(idata, "observed_data")[name].values
    drawn = get_dataset(idata, group)[name].values
    drawn = drawn.reshape(-1, *drawn.shape[2:])
    likelihood = get_dataset(idata, "log_likelihood")[likelihood_name(idata)].values
    chains = len(likelihood)
    # The predictive draws go with the first draws of each chain.
    likelihood = likelihood[:, : len(drawn) // chains].reshape(len(drawn), -1)
    num_data = likelihood.shape[1]
    observed, drawn = observed.reshape(num_data, -1), drawn.reshape(len(drawn), num_data, -1)
    weights = np.exp(compat.smoothed_weights(-likelihood.T)).T[..., None]
    weights /= weights.sum(0)
    below, equal = (weights * (drawn < observed)).sum(0), (weights * (drawn == observed)).sum(0)
    # As a rank among the draws, so that a finite number of them does not spoil uniformity.
    count, uniform = len(drawn), np.random.default_rng(seed).random(observed.shape)
    ranks = (count * below + uniform * (count * equal + 1)) / (count + 1)
    return np.asarray(np.where(np.isnan(observed), np.nan, ranks))


def new_data_group(idata: Any) -> str | None:
    """Returns the group of draws for unseen data points, or ``None``."""
    # Where data points have no latents of their own, nothing has seen them but the parameters.
    return next((group for group in ("marginal_predictive", "posterior_predictive") if group in group_names(idata)), None)


def observed_name(idata: Any, group: str) -> str:
    """The observed site that a predictive group is about.

    Raises:
        ValueError: if there is none or more than one.
    """
    shared = [str(name) for name in get_dataset(idata, group).data_vars if name in get_dataset(idata, "observed_data")]
    if len(shared) != 1:
        raise ValueError(f"{group} holds the observed sites {shared}; choose one by name")
    return shared[0]


@names_arguments
def predictive_p_values(
    idata: Any, *, group: str = "posterior_predictive", name: str | None = None, statistics: Mapping[str, Statistic] | None = None
) -> dict[str, float]:
    r"""Returns predictive p-values :math:`P(T(\tilde y) \ge T(y))` of statistics.

    They are of the whole data set. Ties count half.

    Near 0 or 1 the model cannot reproduce the statistic. Those of ``posterior_predictive`` are conservative, because repeated data points
    have seen the data through their states; ``marginal_predictive`` is the sharper check.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> idata = to_arviz(model, guide, y, num_samples=25)
        >>> all(0 <= p <= 1 for p in predictive_p_values(idata).values())
        True

    Args:
        idata: from :func:`~pyro_truncated.to_arviz`.
        group: predictive group.
        name: observed site; needed if there are several.
        statistics: functions of the array of all observed values. Default: mean, standard deviation, kurtosis, maximum.

    Returns:
        P-values by statistic.
    """
    name = name or observed_name(idata, group)
    observed = get_dataset(idata, "observed_data")[name].values
    is_seen = ~np.isnan(observed) if np.issubdtype(observed.dtype, np.floating) else np.ones(observed.shape, dtype=bool)
    drawn = get_dataset(idata, group)[name].values
    drawn = drawn.reshape(-1, *drawn.shape[2:])
    result = {}
    for label, statistic in (statistics or STATISTICS).items():
        own, others = statistic(observed[is_seen]), np.array([statistic(values[is_seen]) for values in drawn])
        result[label] = float((others > own).mean() + 0.5 * (others == own).mean())
    return result
