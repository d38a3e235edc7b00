"""Surrogate search: Thompson sampling from regressions, for expensive scores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.search.base import Search, SearchBatch, flat_observations, regression_inputs
from pyro_truncated.search.exhaustive import draw_by_weight
from pyro_truncated.states.population import Moments, Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import check_counts, check_kinds, names_arguments
from pyro_truncated.utils.budget import row_slices

# --- quadratic functions of binary states, and their greatest values ---


class QuadraticFunctions(NamedTuple):
    r"""Functions :math:`\sum_h s_h f_h + \sum_{h < k} s_h s_k J_{hk}`, ``C`` of each of ``n`` data points."""

    effects: Tensor  # f, (n, C, H)
    pairs: Tensor  # J, symmetric with zeros on the diagonal: (H, H) of all functions, or (n, C, H, H)

    def gains(self, states: Tensor) -> Tensor:
        """What flips of each latent alone add in states ``(n, C, H)``."""
        field = states @ self.pairs if self.pairs.dim() == 2 else (states.unsqueeze(-2) @ self.pairs).squeeze(-2)
        return (1 - 2 * states) * (self.effects + field)

    def ascend(self, states: Tensor) -> Tensor:
        """States after twelve flips that each raise the functions most."""
        for _ in range(12):
            gain, latent = self.gains(states).max(-1, keepdim=True)
            flip = torch.zeros_like(states).scatter_(-1, latent, (gain > 0).to(states))
            states = (states - flip).abs()
        return states

    def ascend_by_pairs(self, states: Tensor, steps: int = 2) -> Tensor:
        """Returns states after greedy flips of one or two latents."""
        size = states.shape[-1]
        latent = torch.arange(size, device=states.device)
        for _ in range(steps):
            gain, sign = self.gains(states), 1 - 2 * states
            both = self.pairs * sign.unsqueeze(-1) * sign.unsqueeze(-2) + gain.unsqueeze(-1) + gain.unsqueeze(-2)
            both.diagonal(dim1=-2, dim2=-1).copy_(gain)
            most, at = both.flatten(-2).max(-1, keepdim=True)
            is_flipped = ((latent == at // size) | (latent == at % size)) & (most > 0)
            states = (states - is_flipped.to(states)).abs()
        return states

    def best_new_states(self, optimum: Tensor, space: StateSpace, words: Tensor) -> Tensor:
        """Returns the best unscored state within two flips of ``(n, C, H)``.

        There is one for each of the functions. Scored are words ``(n, M, W)``.
        """
        # States are known by their words, or by one number made of these; each latent adds its own.
        latent_keys = _keys(space.pack(torch.eye(optimum.shape[-1], dtype=torch.int64, device=optimum.device)))
        known_keys, children = _keys(words).sort(1).values, []
        for at, (state, gain) in enumerate(zip(optimum.unbind(1), self.gains(optimum).unbind(1), strict=True)):
            near, sign = Neighbours.from_gains(gain), 1 - 2 * state
            values = near.sums(gain)
            values[:, 1 + gain.shape[1] :] += near.between(self.pairs if self.pairs.dim() == 2 else self.pairs[:, at]) * near.products(sign)
            keys = near.sums(sign.long() * latent_keys) + (state.long() * latent_keys).sum(-1, keepdim=True)
            place = torch.searchsorted(known_keys, keys).clamp(max=known_keys.shape[1] - 1)
            best = values.masked_fill(known_keys.gather(1, place) == keys, -math.inf).argmax(1, keepdim=True)
            children.append((state - near.flips(best).to(state)).abs())
            known_keys = torch.cat([known_keys, keys.gather(1, best)], 1).sort(1).values
        return torch.stack(children, 1)


class Neighbours(NamedTuple):
    """A state with its neighbours at one flip and some at two."""

    best: Tensor  # latents that alone would gain most, (n, B)
    one: Tensor  # which of these is flipped first in states two flips away
    other: Tensor  # which second
    num_latents: int  # number of all latents

    @classmethod
    def from_gains(cls, gain: Tensor) -> Neighbours:
        """Those of states whose flips gain this, ``(n, H)``."""
        best = gain.topk(min(40, gain.shape[1]), 1).indices
        one, other = torch.triu_indices(best.shape[1], best.shape[1], 1, device=gain.device)
        return cls(best, one, other, gain.shape[1])

    def sums(self, values: Tensor) -> Tensor:
        """Sums ``(n, 1 + H + len(one))`` over the flipped latents of values ``(n, H)``."""
        best = values.gather(1, self.best)
        return torch.cat([torch.zeros_like(values[:, :1]), values, best[:, self.one] + best[:, self.other]], 1)

    def products(self, values: Tensor) -> Tensor:
        """Returns products ``(n, len(one))`` of values of two flipped latents."""
        best = values.gather(1, self.best)
        return best[:, self.one] * best[:, self.other]

    def between(self, pairs: Tensor) -> Tensor:
        """Returns matrix entries ``(n, len(one))`` at two flipped latents."""
        row, column = self.best[:, self.one], self.best[:, self.other]
        return pairs[row, column] if pairs.dim() == 2 else pairs.flatten(1).gather(1, row * self.num_latents + column)

    def flips(self, index: Tensor) -> Tensor:
        """Which latents are flipped in the chosen ones ``(n, 1)``, booleans ``(n, H)``."""
        latent, pair = torch.arange(self.num_latents, device=index.device), index - 1 - self.num_latents
        one, other = (self.best.gather(1, which[pair.clamp(min=0)]) for which in (self.one, self.other))
        return torch.where(pair < 0, latent == index - 1, (latent == one) | (latent == other))


def _keys(words: Tensor) -> Tensor:
    """Hashes states by a sum over their words, and so over latents."""
    # Multiples of the golden ratio's bits (Knuth's multiplicative hashing).
    factors = torch.arange(words.shape[-1], device=words.device) * 0x9E3779B97F4A7C + 1
    return (words * factors).sum(-1)


def half_products(states: Tensor, weight: Tensor) -> Tensor:
    """Half of the weighted sum ``(H, H)`` of products of latents."""
    flat = states.flatten(0, 1)
    products: Tensor = 0.5 * flat.mT @ (flat * weight.flatten().unsqueeze(-1))
    return products


# --- means of the observations, regressed on states ---


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
        for name in ("products", "sums", "variances", "axes", "centre"):
            setattr(regression, f"_{name}", state[name].clone())
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


# --- log joints, regressed on states, with effects of each data point ---


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
        put(self, "best", self.states.gather(1, at.unsqueeze(-1).expand(-1, 1, self.states.shape[-1])))
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
        number, power = len(samples.features), samples.features.square().sum(0)
        degrees = (power / (power + (self.variance * self._ridge()).unsqueeze(1))).sum(1)
        # Shared effects have been fitted to them.
        squares = number / (number - degrees).clamp(min=1.0) * posterior.mean_squares()
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


# --- the search ---


# In the place of the log joints of states of probability zero, and of repetitions.
_LOWEST = -1e30


class SurrogateSearch(Search):
    """Scores the states that regressions on earlier scores think best.

    For binary latents of models whose scores are expensive. Where the model tells means of the observations, these are regressed on all
    scored states as a quadratic function shared by all data (:class:`.MomentRegression`). What log joints lack of the likelihood that
    follows is regressed on linear effects and pairwise interactions (:class:`.LogJointRegression`).

    Each child is the best unscored state near an optimum of effects drawn from their posterior (Thompson sampling).

    Log joints alone are regressed if the moments are not known, there are more than 64 latents, or the approximate likelihoods were wrong
    for most states.

    Moments are known of a model of plain Pyro with one data plate and no conditional, whose states are scored together. Its observations
    must be neither masked nor scaled, and have means and variances.

    The search's own work takes about 6 microseconds a score with 20 latents, 60 with 40, and 450 with 64. It pays where a score takes
    longer.

    Example:
        >>> y = linear_bars(40, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, SurrogateSearch(4), steps=5)

    Args:
        children: number of states proposed in a step.
        memory: number of scored states per data point that are regressed on (at least a population): the best half, and of the others the
            latest.
        rank: number of principal components, of the means of observations, or of the inputs that effects depend on.
        inputs: what effects depend on, a function that makes ``(n, D)`` of a :class:`~pyro_truncated.search.SearchBatch`. Default: the
            observations, flattened. Missing (NaN) entries are replaced by the mean of their column.
        generator: source of randomness. Default: torch's global generator.

    Attributes:
        MAX_LATENTS: number of latents above which log joints alone are regressed.

    Raises:
        ValueError: if an argument is out of range; when searching, if a latent has more than two values.
        NotImplementedError: when searching, for data shared out to several processes.

    Reference:
        Baptista and Poloczek, "Bayesian optimization of combinatorial structures", ICML 2018.
    """

    MAX_LATENTS: ClassVar[int] = 64
    binary_only = True

    @names_arguments
    def __init__(
        self,
        children: int = 8,
        *,
        memory: int = 96,
        rank: int = 64,
        inputs: Callable[[SearchBatch], Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.children, self.memory, self.rank = check_counts(children=children, memory=memory, rank=rank)
        check_kinds(SurrogateSearch.__init__, inputs=inputs, generator=generator)
        self.inputs = inputs
        self.generator = generator
        self.forget()

    def forget(self) -> None:
        """Forgets all scores, and what was learned from them."""
        self.regressions: dict[str, LogJointRegression] = {}
        self.expected: MomentRegression | None = None
        self._projection: PrincipalComponents | None = None
        self._states: ScoredStates | None = None
        self._surprise: Tensor | None = None
        self._has_new_data = self._is_misled = False

    @property
    def takes_moments(self) -> bool:
        """Whether moments help: few enough latents, and likelihoods not found wrong."""
        return not self._is_misled and all(len(known.variance) <= self.MAX_LATENTS for known in self.regressions.values())

    def propose(self, batch: SearchBatch) -> Population:
        """Proposes children ``(N, children)`` with the highest predicted log joints.

        The regression learns from the scores of all that are evaluated.

        Raises:
            NotImplementedError: if several processes share the data.
        """
        self.check_space(batch.space)
        if batch.is_spread:
            raise NotImplementedError("SurrogateSearch learns from the data of one process; got a shard: pass all data in one process")
        is_continued = self._states is not None and self._states.holds(batch)
        if not is_continued:
            self._surprise = None
        history = self._states = ScoredStates.from_batch(batch, self._states)
        memory = history.truncate(max(self.memory, batch.population.num_states))
        states, features = memory.states(), self._features(batch)
        samples, likelihoods = ScoredBatch(states, memory.log_joint, features), self._likelihoods(batch, is_continued)
        # Also where likelihoods are known: of other data they may not be.
        regression = self._update_regression("log joints", samples, batch)
        if likelihoods is not None:
            # Effects of the data are in the likelihoods: what is left are the same constants for all.
            residuals = ScoredBatch(states, memory.log_joint, features[:, -1:], likelihoods(states))
            self._is_misled |= self._may_learn(batch) and not residuals.baseline_fits()
            if self._is_misled:
                likelihoods = None
            else:
                samples, regression = residuals, self._update_regression("rest", residuals, batch)
        if likelihoods is None:
            self._surprise = None
        functions = QuadraticFunctions(
            self._draw_effects(EffectsPosterior(samples, regression, self._surprise), batch), regression.effects.pairs
        )
        start = batch.space.unpack(draw_by_weight(batch, self.children, self.generator)).double()
        if likelihoods is None:
            candidates = batch.evaluate(
                batch.space.pack(functions.best_new_states(functions.ascend(start), history.space, history.words).long())
            )
        else:
            # Half of the children start from another data point's best state.
            uniform = ops.uniform(shape=(self.children // 2,), **batch.draws(self.generator))
            others = samples.best[(uniform.double() * len(samples.best)).long(), 0]
            children = self._likely(likelihoods, functions, torch.cat([start[:, ::2], others], 1))
            words = batch.space.pack(children.long())
            if self.expected is None or not self._may_learn(batch):
                candidates = batch.evaluate(words)
            else:
                candidates, moments = batch.evaluate_with_moments(words)
                if moments is not None:
                    self.expected.take(moments, batch.space)
            self._surprise = _surprise(likelihoods, samples, children.double(), candidates.log_joint)
        self._states = history.with_more(candidates)
        return candidates

    def state_dict(self) -> dict[str, Any]:
        """The state of the generator, and what has been learned of data."""
        if self._projection is None:
            return super().state_dict()
        regressions = {name: regression.state_dict() for name, regression in self.regressions.items()}
        state: dict[str, Any] = {"regressions": regressions, "projection": list(self._projection)}
        state["is_of_new_data"], state["is_misled"] = self._has_new_data, self._is_misled
        if self.expected is not None:
            state["expected"] = self.expected.state_dict()
        return {**super().state_dict(), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where a search has been; scores are made anew."""
        self.forget()
        super().load_state_dict(state)
        if "projection" in state:
            self.regressions = {name: LogJointRegression.from_state(regression) for name, regression in state["regressions"].items()}
            self._projection = PrincipalComponents(*state["projection"])
            self._has_new_data, self._is_misled = bool(state["is_of_new_data"]), bool(state["is_misled"])
        if "expected" in state:
            self.expected = MomentRegression.from_state(state["expected"])

    def _features(self, batch: SearchBatch) -> Tensor:
        """Returns the first inputs' principal components and a one, ``(n, Q)``."""
        inputs = regression_inputs(batch, self.inputs)
        if self._projection is None or len(self._projection.centre) != inputs.shape[1] or (self._has_new_data and not batch.is_new):
            self.regressions, self.expected, self._has_new_data, self._is_misled = {}, None, batch.is_new, False
            self._projection = PrincipalComponents.fit(inputs, self.rank)
        return self._projection(inputs)

    def _may_learn(self, batch: SearchBatch) -> bool:
        return self._has_new_data or not batch.is_new

    def _update_regression(self, name: str, samples: ScoredBatch, batch: SearchBatch) -> LogJointRegression:
        """Returns the regression of log joints, updated by training data."""
        sizes, regression = (samples.states.shape[-1], samples.features.shape[1]), self.regressions.get(name)
        if regression is None or regression.effects.linear.shape != sizes:
            regression = LogJointRegression(*sizes, samples.states.device)
        if self._may_learn(batch):
            self.regressions[name] = regression
            regression.fit(samples)
        return regression

    def _likelihoods(self, batch: SearchBatch, is_continued: bool) -> ApproximateLikelihoods | None:
        """Returns approximate likelihoods, or ``None`` where moments do not help."""
        moments, num_latents = batch.moments, batch.space.num_latents
        if moments is None or self._is_misled or num_latents > self.MAX_LATENTS:
            return None
        observations = flat_observations(batch)
        num_values = observations.shape[1]
        if num_values != moments.mean.shape[-1]:
            return None
        if self.expected is None or not self.expected.fits(num_latents, num_values):
            if not self._may_learn(batch):
                return None
            self.expected = MomentRegression(num_latents, num_values, self.rank, observations.device)
        if self._may_learn(batch) and not is_continued:
            self.expected.fade()
            self.expected.take(moments, batch.space)
        return self.expected.likelihoods(observations)

    def _likely(self, likelihoods: ApproximateLikelihoods, others: QuadraticFunctions, start: Tensor) -> Tensor:
        """Returns the best unscored states near optima reached from a start."""
        assert self._states is not None
        # States whose second orders fit into the cache.
        children, number = [], max(1, 512 // self.children)
        for first in range(0, len(start), number):
            rows = slice(first, first + number)
            likelihood = likelihoods._replace(observed=likelihoods.observed[rows])
            states, rest = start[rows].float(), QuadraticFunctions(others.effects[rows].float(), others.pairs.float())
            for _ in range(3):
                states = likelihood.second_order(states, rest).ascend_by_pairs(states)
            children.append(likelihood.second_order(states, rest).best_new_states(states, self._states.space, self._states.words[rows]))
        return torch.cat(children)

    def _draw_effects(self, posterior: EffectsPosterior, batch: SearchBatch) -> Tensor:
        """Linear effects for each child, ``(n, children, H)``."""
        num_samples, num_latents = posterior.samples.states.shape[1:]
        uniform = ops.uniform(shape=(self.children, num_latents + num_samples), **batch.draws(self.generator))
        normal = torch.special.ndtri(uniform.double().clamp(min=1e-16))
        normal[:, 0] = 0.0
        # Some children are cautious; a posterior may be wrong.
        normal[:, 1:] *= torch.logspace(-1.0, 1.0, self.children - 1, base=2.0, dtype=normal.dtype, device=normal.device).view(1, -1, 1)
        assert self._states is not None
        # A data point gets stuck where the regression trusts itself.
        normal *= 1.0 + (self._states.num_since_best() >= 2 * self.children).to(normal).view(-1, 1, 1)
        return posterior.draws(normal[..., :num_latents], normal[..., num_latents:])


def _surprise(likelihoods: ApproximateLikelihoods, samples: ScoredBatch, children: Tensor, log_joint: Tensor) -> Tensor:
    """Root mean square errors ``(n,)`` of likelihoods, per root of flips.

    Impossible states are left out. No error counts more than the median change of a flip, since a constraint may cost anything.
    """
    most = dataclasses.replace(samples, baseline=None).median_flip_change() or 0.0
    expected = likelihoods(children) - likelihoods(samples.best)
    actual = log_joint.double().clamp(min=_LOWEST) - samples.log_joint.amax(1, keepdim=True)
    flips = (children - samples.best).abs().sum(-1).clamp(min=1)
    wrong = ((actual - expected).abs() / flips.sqrt()).clamp(max=most).masked_fill(actual < -IMPOSSIBLE, torch.nan)
    return wrong.square().nanmean(1).sqrt().nan_to_num(nan=0.0)


@dataclasses.dataclass(frozen=True)
class ScoredStates:
    """States ``(N, M, W)`` of data points with log joints ``(N, M)`` in float64."""

    space: StateSpace
    positions: Tensor
    words: Tensor
    log_joint: Tensor

    @classmethod
    def from_batch(cls, batch: SearchBatch, before: ScoredStates | None) -> ScoredStates:
        """Returns a batch's states, and earlier ones with unchanged log joints."""
        population = batch.population
        log_joint = population.log_joint.double().clamp(min=_LOWEST)
        if before is not None and before.holds(batch):
            return before.with_more(population)
        return cls(batch.space, batch.positions, population.words, log_joint)

    def holds(self, batch: SearchBatch) -> bool:
        """Whether the best are still in populations, with equal log joints.

        Populations may have better states, too, that others have found.
        """
        population = batch.population
        if self.space is not batch.space or not torch.equal(self.positions, batch.positions):
            return False
        best, at = self.log_joint.max(1, keepdim=True)
        is_there = (population.words == ops.gather_states(self.words, at)).all(-1)
        is_same = is_there & (population.log_joint.double().clamp(min=_LOWEST) == best)
        return bool(is_there.any()) and bool((is_same.any(1) | ~is_there.any(1)).all())

    def with_more(self, population: Population) -> ScoredStates:
        """Appends other states, without repetitions within a data point."""
        words = torch.cat([self.words, population.words], 1)
        is_new = ~ops.find_duplicates(words)
        log_joint = torch.cat([self.log_joint, population.log_joint.double().clamp(min=_LOWEST)], 1).masked_fill(~is_new, _LOWEST)
        size = max(1, int(is_new.sum(1).max()))
        order = is_new.long().sort(dim=1, descending=True, stable=True).indices[:, :size]
        return self._select(order, words, log_joint)

    def truncate(self, size: int) -> ScoredStates:
        """Keeps the best half, and the latest of the others."""
        number = self.log_joint.shape[1]
        if number <= size:
            return self
        age = torch.arange(number, device=self.log_joint.device).expand_as(self.log_joint)
        best = self.log_joint.topk(size - size // 2, 1).indices
        rank = age.masked_fill(self.log_joint <= _LOWEST, -1).scatter(1, best, number)
        return self._select(rank.topk(size, 1).indices.sort(1).values, self.words, self.log_joint)

    def num_since_best(self) -> Tensor:
        """How many states come after the best one, ``(N,)``, initial ones included."""
        return self.log_joint.shape[1] - 1 - self.log_joint.argmax(1)

    def _select(self, order: Tensor, words: Tensor, log_joint: Tensor) -> ScoredStates:
        return dataclasses.replace(self, words=ops.gather_states(words, order), log_joint=log_joint.gather(1, order))

    def states(self) -> Tensor:
        """The states' values, ``(N, M, L)`` in float64."""
        return self.space.unpack(self.words).double()
