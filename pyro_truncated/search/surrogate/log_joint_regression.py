"""Regression of log joints on states, with effects of each data point."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.search.surrogate.quadratic_functions import half_products

# Nats below the best score beyond which a state is impossible.
IMPOSSIBLE = 1e20
# The least deviation of a data point's own effects, in nats.
_MIN_DEVIATION_NATS = 1.0


class Effects(NamedTuple):
    """Shared effects: linear ones by features ``(H, Q)``, interactions ``(H, H)``."""

    linear: Tensor
    pairs: Tensor


@dataclasses.dataclass(frozen=True)
class ScoredBatch:
    """Scored states of data points, relative to the best one of each."""

    states: Tensor  # (n, M, H), zeros and ones
    log_joint: Tensor  # (n, M)
    features: Tensor  # of the data points, (n, Q)
    # Log joints known from elsewhere, (n, M), up to a constant of each data point: the regression is of the rest.
    baseline: Tensor | None = None

    def __post_init__(self) -> None:
        best, at = self.log_joint.max(1, keepdim=True)
        put = object.__setattr__
        put(self, "best", ops.gather_states(self.states, at))
        put(self, "gap", best - self.log_joint)
        put(self, "target", -self.gap if self.baseline is None else self.baseline.gather(1, at) - self.baseline - self.gap)
        put(self, "steps", self.states - self.best)
        # One nat at the best state, and 40 % of the gap below it, where a quadratic function fits less.
        put(self, "variance", 1.0 + (0.4 * self.gap).square())

    best: Tensor = dataclasses.field(init=False)  # state of each data point, (n, 1, H)
    gap: Tensor = dataclasses.field(init=False)  # how far the log joints lie below the best one, (n, M)
    target: Tensor = dataclasses.field(init=False)  # how far they lie above it, but for the baseline, (n, M)
    steps: Tensor = dataclasses.field(init=False)  # differences of the states from the best one
    variance: Tensor = dataclasses.field(init=False)  # of the scores about the quadratic function, (n, M)

    def median_flip_change(self) -> float | None:
        """The median change of a flip in nats, ``None`` if nothing compares."""
        flips = self.steps.abs().sum(-1)
        is_other = (flips > 0) & (self.gap < IMPOSSIBLE)
        return float((self.target[is_other].abs() / flips[is_other].sqrt()).median()) if bool(is_other.any()) else None

    def baseline_fits(self) -> bool:
        """Whether known log joints bring most possible states near their scores."""
        is_possible = self.log_joint > -IMPOSSIBLE
        nearer, farther = self.target.abs() < self.gap, self.target.abs() > self.gap
        return int((nearer & is_possible).sum()) >= int((farther & is_possible).sum())

    def predict(self, effects: Effects) -> Tensor:
        """Differences ``(n, M)`` from the best state by what all data points share."""
        linear = torch.einsum("nmh,nh->nm", self.steps, self.features @ effects.linear.mT)
        return linear + _energy(self.states, effects.pairs) - _energy(self.best, effects.pairs)

    def apply_adjoint(self, weight: Tensor) -> Effects:
        """The adjoint of :meth:`predict`, of weights ``(n, M)``."""
        linear = torch.einsum("nmh,nm->nh", self.steps, weight).mT @ self.features
        pairs = half_products(self.states, weight) - half_products(self.best, weight.sum(1, keepdim=True))
        return Effects(linear, pairs.fill_diagonal_(0.0))


class LogJointRegression:
    r"""Log joints as a quadratic function of binary states, with random effects.

    .. math:: \log p(s, y_n) \approx c_n + \sum_h s_h (\beta_h \cdot x_n + \delta_{nh}) + \sum_{h < k} J_{hk} s_h s_k + \epsilon,
        \qquad \delta_{nh} \sim \mathcal N(0, \tau_h^2), \qquad \epsilon \sim \mathcal N(0, 1 + (0.4 \, g)^2)

    with features :math:`x_n` of the data point and :math:`g` the distance of the score to the best one. In
    exponential families log joints are linear in sufficient statistics of the observation. So effects that are linear
    in principal components of the data lack little, and :math:`\delta_n` takes up the rest.

    Shared effects are estimated by generalised least squares with :math:`\delta` integrated out (conjugate gradients,
    from the last estimate on). Their ridge is that of a prior of deviation :math:`\sigma = 0.16 \, c`, where
    :math:`c` is the change of a flip in nats. A data point's own effects follow from their posterior, and
    :math:`\tau_h`, at first :math:`c / 2`, from its expected squares.

    These are multiplied by :math:`N / (N - d_h)`, since shared effects have been fitted to them. Here :math:`d_h = \sum_q
    \lambda_q / (\lambda_q + \tau_h^2 / \sigma^2)` are degrees of freedom for uncorrelated features with sums of
    squares :math:`\lambda_q`. Without the factor :math:`\tau` would be far too small for few data points.
    """

    def __init__(self, num_latents: int, num_features: int, device: torch.device | str | None = None) -> None:
        like = torch.zeros(num_latents, num_latents, dtype=torch.float64, device=device)
        self.effects = Effects(like.new_zeros(num_latents, num_features), like)
        # tau_h^2, and the change of log joints by a flip in nats, the largest of all medians so far; 0 at first.
        self.variance, self.change = torch.zeros_like(like[0]), 0.0

    def fit(self, samples: ScoredBatch, iterations: int = 8) -> None:
        r"""Steps towards the shared effects of these samples, and towards :math:`\tau`."""
        # Where no two scores show what a flip changes, 200 nats.
        change = max(samples.median_flip_change() or self.change or 200.0, _MIN_DEVIATION_NATS)
        # Own effects begin with half the deviation of a change, and never have more than four times that.
        if self.change == 0:
            self.variance = torch.full_like(self.variance, max(0.5 * change, _MIN_DEVIATION_NATS) ** 2)
        self.change = max(self.change, change)
        posterior = EffectsPosterior(samples, self)
        effects = list(self.effects)
        normal = self._normal(posterior, self.effects)
        residual = [value - image for value, image in zip(posterior.apply_adjoint(samples.target), normal, strict=True)]
        scale = self._diagonal(posterior)
        direction = ready = [r / s for r, s in zip(residual, scale, strict=True)]
        length = first = _dot(residual, ready)
        for _ in range(iterations):
            # Beyond it rounding would be divided by rounding.
            if not length > 1e-24 * first:
                break
            image = self._normal(posterior, Effects(*direction))
            step = length / _dot(direction, image)
            effects = [value + step * along for value, along in zip(effects, direction, strict=True)]
            residual = [value - step * along for value, along in zip(residual, image, strict=True)]
            ready = [r / s for r, s in zip(residual, scale, strict=True)]
            before, length = length, _dot(residual, ready)
            direction = [r + length / before * d for r, d in zip(ready, direction, strict=True)]
        self.effects = posterior.effects = Effects(*effects)
        squares = self._inflation(samples) * posterior.mean_squares()
        self.variance = (0.5 * (self.variance + squares)).clamp(min=_MIN_DEVIATION_NATS**2, max=(4.0 * self.change) ** 2)

    def state_dict(self) -> dict[str, Tensor]:
        """All that was learned."""
        effects = {"linear": self.effects.linear.clone(), "pairs": self.effects.pairs.clone()}
        return {**effects, "variance": self.variance.clone(), "change": torch.tensor(self.change, dtype=torch.float64)}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> LogJointRegression:
        """The regression that :meth:`state_dict` has described."""
        num_latents, num_features = state["linear"].shape
        regression = cls(num_latents, num_features, state["linear"].device)
        regression.effects = Effects(state["linear"].clone(), state["pairs"].clone())
        regression.variance, regression.change = state["variance"].clone(), float(state["change"])
        return regression

    def _ridge(self) -> float:
        """The inverse variance of shared effects: 0.16 changes of a flip."""
        return (0.16 * self.change) ** -2

    def _inflation(self, samples: ScoredBatch) -> Tensor:
        """Returns the factors ``(H,)`` for fitted shared effects."""
        number, squares = len(samples.features), samples.features.square().sum(0)
        degrees = (squares / (squares + (self.variance * self._ridge()).unsqueeze(1))).sum(1)
        return number / (number - degrees).clamp(min=1.0)

    def _normal(self, posterior: EffectsPosterior, effects: Effects) -> list[Tensor]:
        image = posterior.apply_adjoint(posterior.samples.predict(effects))
        return [value + self._ridge() * effect for value, effect in zip(image, effects, strict=True)]

    def _diagonal(self, posterior: EffectsPosterior) -> list[Tensor]:
        """The diagonal of the normal equations, of pairs roughly."""
        linear = posterior.information().mT @ posterior.samples.features.square()
        pairs = 2 * half_products(posterior.samples.states, posterior.samples.variance.reciprocal())
        # Data points' own effects leave a hundredth of the weight of pairs to shared ones, roughly.
        return [linear + self._ridge(), 0.01 * pairs + self._ridge()]


class EffectsPosterior:
    """Gaussian posterior of effects, whose own parts deviate at least by ``least``."""

    def __init__(self, samples: ScoredBatch, regression: LogJointRegression, least: Tensor | None = None) -> None:
        self.samples, self.effects = samples, regression.effects
        self.variance = regression.variance.expand(len(samples.states), -1)
        if least is not None:
            self.variance = self.variance.maximum(least.square().unsqueeze(1))
        covariance = torch.einsum("nmh,nh,nkh->nmk", samples.steps, self.variance, samples.steps) + torch.diag_embed(samples.variance)
        self._factor = torch.linalg.cholesky(covariance)

    def apply_adjoint(self, values: Tensor) -> Effects:
        """Maps residuals ``(n, M)`` to shared effects, own effects integrated out."""
        return self.samples.apply_adjoint(self._solve(values.unsqueeze(1)).squeeze(1))

    def information(self) -> Tensor:
        """Inverse variances ``(n, H)`` of linear effects, own effects integrated out."""
        information: Tensor = torch.linalg.solve_triangular(self._factor, self.samples.steps, upper=False).square().sum(1)
        return information

    def mean_squares(self) -> Tensor:
        """Expected squares of the data points' own effects, averaged over these, ``(H,)``."""
        variances = (self.variance * (1 - self.variance * self.information())).clamp(min=0.0)
        mean = self._own_effects((self.samples.target - self.samples.predict(self.effects)).unsqueeze(1)).squeeze(1)
        squares: Tensor = (mean.square() + variances).mean(0)
        return squares

    def draws(self, effects: Tensor, errors: Tensor) -> Tensor:
        """Linear effects drawn by standard normal ``(n, C, H)`` and ``(n, C, M)``."""
        prior = effects * self.variance.sqrt().unsqueeze(1)
        residual = (self.samples.target - self.samples.predict(self.effects)).unsqueeze(1)
        missing = residual - torch.einsum("nch,nmh->ncm", prior, self.samples.steps) - errors * self.samples.variance.sqrt().unsqueeze(1)
        return (self.samples.features @ self.effects.linear.mT).unsqueeze(1) + prior + self._own_effects(missing)

    def _own_effects(self, residuals: Tensor) -> Tensor:
        """Means ``(n, C, H)`` of the data points' own effects for residuals ``(n, C, M)``."""
        return self.variance.unsqueeze(1) * torch.einsum("nmh,ncm->nch", self.samples.steps, self._solve(residuals))

    def _solve(self, residuals: Tensor) -> Tensor:
        return torch.cholesky_solve(residuals.mT, self._factor).mT


def _energy(states: Tensor, pairs: Tensor) -> Tensor:
    return 0.5 * ((states @ pairs) * states).sum(-1)


def _dot(one: list[Tensor], other: list[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(one, other, strict=True)]).sum()
