"""What the log joints of states that were scored say about others: a quadratic function for each data point, most of which all share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# Deviation of a score from the quadratic function, in nats, and its share in how far the score lies below the best one.
_NOISE, _SHARE = 1.0, 0.4
# Deviation of a data point's own effects before anything is known, and the least that it can become.
_START, _LEAST = 100.0, 1.0
_RIDGE = 1e-3
# Share of the squared residual at which conjugate gradients have arrived; beyond it they would divide rounding by rounding.
_SOLVED = 1e-24


class Effects(NamedTuple):
    """What all data points share: how linear effects depend on features, ``(H, Q)``, and the interactions of pairs, ``(H, H)``."""

    linear: Tensor
    pairs: Tensor


@dataclasses.dataclass(frozen=True)
class Trials:
    """States of data points that have been scored; all is seen from the best one of each, whose log joint the function meets.

    Attributes:
        states: ``(n, M, H)``, zeros and ones.
        log_joint: their log joints ``(n, M)``.
        features: of the data points, ``(n, Q)``.
        best: the best state of each data point, ``(n, 1, H)``.
        gap: how far the log joints lie below its one, ``(n, M)``.
        steps: differences of the states from it.
        variance: of the scores about the quadratic function, ``(n, M)``.
    """

    states: Tensor
    log_joint: Tensor
    features: Tensor

    def __post_init__(self) -> None:
        best, at = self.log_joint.max(1, keepdim=True)
        put = object.__setattr__
        put(self, "best", self.states.gather(1, at.unsqueeze(-1).expand(-1, 1, self.states.shape[-1])))
        put(self, "gap", best - self.log_joint)
        put(self, "steps", self.states - self.best)
        put(self, "variance", _NOISE**2 + (_SHARE * self.gap).square())

    best: Tensor = dataclasses.field(init=False)
    gap: Tensor = dataclasses.field(init=False)
    steps: Tensor = dataclasses.field(init=False)
    variance: Tensor = dataclasses.field(init=False)

    def predicted(self, effects: Effects) -> Tensor:
        """Differences ``(n, M)`` from the best state by what all data points share."""
        linear = torch.einsum("nmh,nh->nm", self.steps, self.features @ effects.linear.mT)
        return linear + _energy(self.states, effects.pairs) - _energy(self.best, effects.pairs)

    def transposed(self, weight: Tensor) -> Effects:
        """The adjoint of :meth:`predicted`, of weights ``(n, M)``."""
        linear = torch.einsum("nmh,nm->nh", self.steps, weight).mT @ self.features
        pairs = _products(self.states, weight) - _products(self.best, weight.sum(1, keepdim=True))
        return Effects(linear, pairs.fill_diagonal_(0.0))


class LogJointRegression:
    r"""Log joints as a quadratic function of binary states, by a regression with random effects.

    .. math:: \log p(s, y_n) \approx c_n + \sum_h s_h (\beta_h \cdot x_n + \delta_{nh}) + \sum_{h < k} J_{hk} s_h s_k + \epsilon,
        \qquad \delta_{nh} \sim \mathcal N(0, \tau_h^2), \qquad \epsilon \sim \mathcal N(0, 1 + (0.4 \, g)^2)

    with features :math:`x_n` of the data point and :math:`g` how far the score lies below the best one of the data point. Of an exponential
    family log joints are linear in the sufficient statistics of the observation, so that effects which are linear in principal components
    of the data lack little; what they lack in a data point, :math:`\delta_n` takes up. Shared effects are estimated by generalised least
    squares with :math:`\delta` integrated out (conjugate gradients, from the last estimate on), a data point's own by their posterior, and
    :math:`\tau_h` from these.

    Args:
        num_latents: number of binary latents ``H``.
        num_features: number of features ``Q``.
        device: where the states live.

    Attributes:
        effects: the shared effects.
        variance: :math:`\tau_h^2`, ``(H,)``.
    """

    def __init__(self, num_latents: int, num_features: int, device: torch.device | str | None = None) -> None:
        like = torch.zeros(num_latents, num_latents, dtype=torch.float64, device=device)
        self.effects = Effects(like.new_zeros(num_latents, num_features), like)
        self.variance = torch.full_like(like[0], _START**2)

    def fit(self, trials: Trials, iterations: int = 24) -> None:
        r"""Takes so many steps towards the shared effects that these trials ask for, and one towards :math:`\tau`."""
        belief = Belief(trials, self)
        found = list(self.effects)
        residual = _less(belief.transposed(-trials.gap), self._normal(belief, self.effects))
        scale = self._diagonal(trials)
        direction = ready = [r / s for r, s in zip(residual, scale, strict=True)]
        length = first = _dot(residual, ready)
        for _ in range(iterations):
            if not length > _SOLVED * first:
                break
            image = self._normal(belief, Effects(*direction))
            step = length / _dot(direction, image)
            found = [value + step * along for value, along in zip(found, direction, strict=True)]
            residual = [value - step * along for value, along in zip(residual, image, strict=True)]
            ready = [r / s for r, s in zip(residual, scale, strict=True)]
            before, length = length, _dot(residual, ready)
            direction = [r + length / before * d for r, d in zip(ready, direction, strict=True)]
        self.effects = Effects(*found)
        squares = Belief(trials, self).mean_squares()
        self.variance = (0.5 * (self.variance + squares)).clamp(min=_LEAST**2)

    def state_dict(self) -> dict[str, Tensor]:
        """All that was learned."""
        return {"linear": self.effects.linear.clone(), "pairs": self.effects.pairs.clone(), "variance": self.variance.clone()}

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> LogJointRegression:
        """The regression that :meth:`state_dict` has described."""
        num_latents, num_features = state["linear"].shape
        regression = cls(num_latents, num_features, state["linear"].device)
        regression.effects = Effects(state["linear"].clone(), state["pairs"].clone())
        regression.variance = state["variance"].clone()
        return regression

    @staticmethod
    def _normal(belief: Belief, effects: Effects) -> list[Tensor]:
        image = belief.transposed(belief.trials.predicted(effects))
        return [value + _RIDGE * effect for value, effect in zip(image, effects, strict=True)]

    @staticmethod
    def _diagonal(trials: Trials) -> list[Tensor]:
        """Roughly the diagonal of the normal equations."""
        weight = trials.variance.reciprocal()
        linear = torch.einsum("nmh,nm->nh", trials.steps.square(), weight).mT @ trials.features.square()
        return [value / 10 + _RIDGE for value in (linear, 2 * _products(trials.states, weight))]


class Belief:
    """What is believed of the effects in the data points of some trials, given the shared ones: a Gaussian for each."""

    def __init__(self, trials: Trials, regression: LogJointRegression) -> None:
        self.trials, self.variance, self.effects = trials, regression.variance, regression.effects
        covariance = torch.einsum("nmh,h,nkh->nmk", trials.steps, self.variance, trials.steps) + torch.diag_embed(trials.variance)
        self._factor = torch.linalg.cholesky(covariance)

    def transposed(self, values: Tensor) -> Effects:
        """What residuals ``(n, M)`` ask of the shared effects, a data point's own integrated out."""
        return self.trials.transposed(self._solve(values.unsqueeze(1)).squeeze(1))

    def mean_squares(self) -> Tensor:
        """Expected squares of the data points' own effects, averaged over these, ``(H,)``."""
        half = torch.linalg.solve_triangular(self._factor, self.trials.steps * self.variance, upper=False)
        left = (self.variance - half.square().sum(1)).clamp(min=0.0)
        mean = self._own(-self.trials.gap.unsqueeze(1) - self.trials.predicted(self.effects).unsqueeze(1)).squeeze(1)
        squares: Tensor = (mean.square() + left).mean(0)
        return squares

    def draws(self, effects: Tensor, errors: Tensor) -> Tensor:
        """Linear effects ``(n, C, H)`` drawn from the belief.

        Args:
            effects: standard normal numbers, ``(n, C, H)``; with zeros for both, the mean.
            errors: standard normal numbers, ``(n, C, M)``.
        """
        prior = effects * self.variance.sqrt()
        residual = (-self.trials.gap - self.trials.predicted(self.effects)).unsqueeze(1)
        missing = residual - torch.einsum("nch,nmh->ncm", prior, self.trials.steps) - errors * self.trials.variance.sqrt().unsqueeze(1)
        return (self.trials.features @ self.effects.linear.mT).unsqueeze(1) + prior + self._own(missing)

    def _own(self, residuals: Tensor) -> Tensor:
        """Means ``(n, C, H)`` of the data points' own effects for residuals ``(n, C, M)``."""
        return self.variance * torch.einsum("nmh,ncm->nch", self.trials.steps, self._solve(residuals))

    def _solve(self, residuals: Tensor) -> Tensor:
        return torch.cholesky_solve(residuals.mT, self._factor).mT


def _energy(states: Tensor, pairs: Tensor) -> Tensor:
    return 0.5 * ((states @ pairs) * states).sum(-1)


def _products(states: Tensor, weight: Tensor) -> Tensor:
    """Half of the weighted sum ``(H, H)`` of products of latents."""
    flat = states.flatten(0, 1)
    products: Tensor = 0.5 * flat.mT @ (flat * weight.flatten().unsqueeze(-1))
    return products


def _less(one: Effects, other: list[Tensor]) -> list[Tensor]:
    return [a - b for a, b in zip(one, other, strict=True)]


def _dot(one: list[Tensor], other: list[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(one, other, strict=True)]).sum()
