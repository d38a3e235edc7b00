"""M-steps that recover means hidden below the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_truncated.models.dictionary import NEVER_SEEN

# Above what means are rounded to before they are compared, and far below what a free energy shows.
_ABOVE = 1e-9

_Limits = Callable[[Tensor, Tensor | slice], Tensor]
_Losses = Callable[[Tensor, dict[str, Tensor]], Tensor]
_Errors = Callable[[Tensor, Tensor], Tensor]
_Total = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def raised_means(means: Tensor) -> Tensor:
    """Returns means ``(D, H + 1)`` with hidden ones slightly above the background.

    The background comes last.
    """
    background = means[:, -1:]
    return torch.cat([means[:, :-1].maximum(background * (1 + _ABOVE)), background], -1)


def assign_to_background(sums: Tensor, is_left: Tensor) -> Tensor:
    """Returns sums ``(D, H + 1)`` with some causes' given to the background.

    It comes last.
    """
    given = (sums * is_left).sum(-1, keepdim=True)
    return torch.cat([sums.masked_fill(is_left, 0.0)[:, :-1], sums[:, -1:] + given], -1)


def with_returns(
    means: Tensor,
    apart: dict[str, Tensor],
    claims: dict[str, Tensor],
    expected_losses: _Losses,
    expected_errors: _Errors,
    within: _Limits,
    total: _Total,
) -> dict[str, Tensor]:
    r"""Returns claims with recovered hidden causes.

    A cause recovers in the dimensions where this lowers the expected losses.

    A mean below the background wins nothing, so that an average of what it wins leaves it there for
    ever. To the likelihood it is the same as one at the background. Data points that have the cause
    and nothing stronger then belong to the cause as well. If their mean is above that of all data
    that the background explains, two means explain them better than the common one. This includes
    the data that it hides. In each dimension the cause that gains most is tried at its mean, and
    the background at that of the rest. One cause moves at a time, as causes that are on together
    would each ask for what is due to one of them. The others follow in later steps.

    Args:
        means: those of the causes and, last, of the background, ``(D, H + 1)`` in float64.
        apart: ``wins`` and what is ``won``, ``(D, H + 1)`` each, under :func:`raised_means`.
        claims: what :func:`~pyro_truncated.models.dictionary.best_claims` has returned for hidden causes that win nothing.
        expected_losses: expected losses ``(D, H + 1)`` of what is won at other means, which need not be those that win it.
        expected_errors: expected losses ``(K,)`` of dimensions ``(K,)`` under other means ``(K, H + 1)``.
        within: means ``(K, ...)`` of dimensions ``(K,)`` within their limits.
        total: sums over the data of all processes.

    Returns:
        The claims, with other ``wins``, ``claims`` and ``errors`` in those dimensions.
    """
    is_hidden, parts = raised_means(means) > means, {"wins": apart["wins"], "won": apart["won"], "errors": claims["errors"]}
    sums = dict(zip(parts, total(list(parts.values())), strict=True))
    left = {name: assign_to_background(sums[name], is_hidden)[:, -1:] for name in ("wins", "won")}
    common = within(_per_win(left), slice(None))
    asked = within(_per_win(sums), slice(None)).maximum(common)
    gains = (expected_losses(common, sums) - expected_losses(asked, sums)).masked_fill(~is_hidden, 0.0)
    most, first = gains.max(-1, keepdim=True)
    may_gain = most.squeeze(-1) > 0
    # On a device all dimensions are tried: to see which of them may gain would be to wait for it.
    where = may_gain.nonzero().squeeze(-1) if means.is_cpu else torch.arange(len(means), device=means.device)
    if not len(where):
        return claims
    is_left = is_hidden.scatter(-1, first, False)[where]
    left = {name: assign_to_background(sums[name][where], is_left) for name in ("wins", "won")}
    tried = within(torch.where(left["wins"] > NEVER_SEEN, _per_win(left), means[where]), where)
    wins, errors = assign_to_background(apart["wins"][where], is_left), expected_errors(tried, where)
    is_lower = may_gain[where] & (total([errors])[0] < sums["errors"][where])
    changed = {"wins": wins, "claims": wins * tried}
    taken = {name: torch.where(is_lower.unsqueeze(-1), value, claims[name][where]) for name, value in changed.items()}
    taken["errors"] = torch.where(is_lower, errors, claims["errors"][where])
    return {**claims, **{name: claims[name].index_copy(0, where, value) for name, value in taken.items()}}


def _per_win(sums: dict[str, Tensor]) -> Tensor:
    return sums["won"] / sums["wins"].clamp(min=NEVER_SEEN)
