"""Regressions of expected observations on states, for all data points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_truncated.search.surrogate.quadratic_functions import QuadraticFunctions
from pyro_truncated.states.population import Moments
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.budget import row_slices


class MomentRegression:
    r"""Regresses means of observations on binary states, for all data points.

    The functions are quadratic, fitted by ridge regression on all scored states.

    .. math:: \mathbb E[y \mid s] \approx a + \sum_h s_h b_h + \sum_{h < k} s_h s_k c_{hk}

    A score shows one number of a state of one data point. The means are as many as the observed values, and are of
    all data points. So few scores tell how a model makes data. With :math:`v` the mean variances of the observations,

    .. math:: \log p(y_n \mid s) \approx \text{const} - \tfrac12 \sum_d (y_{nd} - \mathbb E[y_d \mid s])^2 / v_d

    is known for states that no one has scored. It is exact for normal noise that is the same everywhere, else an approximation. Means
    are divided by :math:`\sqrt v` and projected on their principal axes.
    """

    def __init__(self, num_latents: int, num_values: int, rank: int, device: torch.device | str | None = None) -> None:
        self.num_latents, self.rank = num_latents, rank
        self._one, self._other = torch.triu_indices(num_latents, num_latents, 1, device=device)
        size = 1 + num_latents + len(self._one)
        self._products = torch.zeros(size, size, dtype=torch.float64, device=device)
        self._sums, self._variances = self._products.new_zeros(size, num_values), self._products.new_zeros(num_values)
        self._axes, self._centre = self._products.new_zeros(0), self._products.new_zeros(0)
        self._effects: Tensor | None = None

    def fits(self, num_latents: int, num_values: int) -> bool:
        """Whether it is for so many latents and observed values."""
        return num_latents == self.num_latents and num_values == self._sums.shape[1]

    def take(self, moments: Moments, space: StateSpace) -> None:
        """Learns from states and the moments of the observations in them."""
        if not len(self._centre):
            self._centre = moments.mean.mean(0, dtype=torch.float64)
        size, num_values = self._sums.shape
        # Bytes of each row: of terms, and of observed values.
        for rows in row_slices(len(moments.words), 16 * size + 24 * num_values):
            # In single precision: of zeros and ones all products are exact.
            states = space.unpack(moments.words[rows]).float()
            terms = torch.cat([torch.ones_like(states[:, :1]), states, states[:, self._one] * states[:, self._other]], 1)
            self._products += terms.mT @ terms
            self._sums += terms.mT @ (moments.mean[rows] - self._centre).float()
            self._variances += moments.variance[rows].sum(0, dtype=torch.float64)
        if not len(self._axes):
            some = moments.mean[:: max(1, len(moments.mean) // 512)]  # about 512 rows are enough for axes
            self._axes = principal_axes((some - self._centre) / self.scale, self.rank)
        self._effects = None

    def fade(self) -> None:
        """What was learned so far counts half: parameters have changed."""
        for total in (self._products, self._sums, self._variances):
            total *= 0.5
        self._axes = self._axes.new_zeros(0)

    @property
    def scale(self) -> Tensor:
        """Deviations of the observed values, ``(D,)``."""
        return (self._variances / self._products[0, 0]).sqrt()

    def likelihoods(self, observations: Tensor) -> ApproximateLikelihoods:
        """Those of data points with these observations ``(n, D)``."""
        axes = self._axes / self.scale.unsqueeze(1)
        if self._effects is None:
            # In numbers of states that say something of an effect.
            ridge = torch.full_like(self._products[0], 0.5)
            ridge[: 1 + self.num_latents] = 0.05  # linear effects and the constant; of pairs a half
            factor = torch.linalg.cholesky(self._products + torch.diag(ridge))
            self._effects = torch.cholesky_solve(self._sums @ axes, factor)
        effects = self._effects
        linear, pairs = effects[1 : 1 + self.num_latents], effects.new_zeros(self.num_latents, self.num_latents, effects.shape[1])
        pairs[self._one, self._other] = pairs[self._other, self._one] = effects[1 + self.num_latents :]
        return ApproximateLikelihoods(((observations - self._centre) @ axes - effects[0]).float(), linear.float(), pairs.float())

    def state_dict(self) -> dict[str, Any]:
        """All that was learned."""
        totals = {"products": self._products, "sums": self._sums, "variances": self._variances, "axes": self._axes, "centre": self._centre}
        return {"num_latents": self.num_latents, "rank": self.rank, **{name: total.clone() for name, total in totals.items()}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MomentRegression:
        """The regression that :meth:`state_dict` has described."""
        regression = cls(state["num_latents"], state["sums"].shape[1], state["rank"], state["sums"].device)
        regression._products, regression._sums = state["products"].clone(), state["sums"].clone()
        regression._variances, regression._axes = state["variances"].clone(), state["axes"].clone()
        regression._centre = state["centre"].clone()
        return regression


class ApproximateLikelihoods(NamedTuple):
    r"""Log likelihoods :math:`-\frac12 |r_n - \sum_h s_h b_h - \sum_{h < k} s_h s_k c_{hk}|^2` of data points, in single precision."""

    observed: Tensor  # r, (n, R)
    linear: Tensor  # b, (H, R)
    pairs: Tensor  # c, (H, H, R), symmetric with zeros on the diagonal

    def __call__(self, states: Tensor) -> Tensor:
        """Log likelihoods ``(n, M)`` of states, up to a constant of each row."""
        values = torch.empty(states.shape[:2], dtype=torch.float64, device=states.device)
        for rows in row_slices(len(states), 8 * states.shape[1] * self.linear.numel()):
            some, here = states[rows].float(), self._replace(observed=self.observed[rows])
            values[rows] = -0.5 * here._residual(some, here._shift(some)).square().sum(-1)
        return values

    def second_order(self, states: Tensor, others: QuadraticFunctions) -> QuadraticFunctions:
        r"""Their second order about states ``(n, C, H)``, and other functions beside.

        With flips :math:`t = s - s_0`, derivatives :math:`d_h` of the mean by latents and residuals :math:`e` at :math:`s_0`,

        .. math:: \sum_h t_h d_h \cdot e + \sum_{h < k} t_h t_k (c_{hk} \cdot e - d_h \cdot d_k) - \tfrac12 \sum_h t_h^2 |d_h|^2,

        which is exact for one flip.
        """
        shift = self._shift(states)
        slope, residual = self.linear + shift, self._residual(states, shift)
        pairs = (residual.flatten(0, 1) @ self.pairs.flatten(0, 1).mT).view(slope.shape[:3] + slope.shape[2:3]) - slope @ slope.mT
        square = pairs.diagonal(dim1=-2, dim2=-1).clone()
        pairs.diagonal(dim1=-2, dim2=-1).zero_()
        linear = (slope @ residual.unsqueeze(-1)).squeeze(-1) + 0.5 * square * (1 - 2 * states) - (pairs @ states.unsqueeze(-1)).squeeze(-1)
        return QuadraticFunctions(linear + others.effects, pairs + others.pairs)

    def _shift(self, states: Tensor) -> Tensor:
        """Interactions ``(n, C, H, R)`` of latents with the active ones of states."""
        shift: Tensor = (states @ self.pairs.flatten(1)).unflatten(-1, self.pairs.shape[1:])
        return shift

    def _residual(self, states: Tensor, shift: Tensor) -> Tensor:
        among = torch.bmm(states.flatten(0, 1).unsqueeze(1), shift.flatten(0, 1)).view(*states.shape[:2], -1)
        return self.observed.unsqueeze(1) - states @ self.linear - 0.5 * among


def principal_axes(values: Tensor, rank: int) -> Tensor:
    """The first principal axes of values ``(M, D)``, ``(D, R)``."""
    some = values - values.mean(0)
    number = min(rank, *some.shape)
    if some.shape[1] <= len(some):
        axes: Tensor = torch.linalg.eigh(some.mT @ some).eigenvectors[:, -number:]
    else:
        axes = torch.linalg.qr(some.mT @ torch.linalg.eigh(some @ some.mT).eigenvectors[:, -number:]).Q
    return axes


class PrincipalComponents(NamedTuple):
    """The largest principal components of inputs, with mean square one."""

    centre: Tensor
    axes: Tensor

    @classmethod
    def fit(cls, inputs: Tensor, rank: int) -> PrincipalComponents:
        """Those of inputs ``(n, D)``."""
        centre = inputs.nanmean(0).nan_to_num(nan=0.0)
        deviations = torch.where(inputs.isnan(), centre, inputs) - centre
        components = cls(centre, principal_axes(deviations, min(rank, max(1, len(inputs) // 2))))
        scale = components(inputs)[:, :-1].square().mean().sqrt()
        return components._replace(axes=components.axes / torch.where(scale > 0, scale, 1.0))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Components of inputs ``(n, D)``, and a one, ``(n, Q)``."""
        deviations = torch.where(inputs.isnan(), self.centre, inputs) - self.centre
        return torch.cat([deviations @ self.axes, torch.ones_like(deviations[:, :1])], 1)
