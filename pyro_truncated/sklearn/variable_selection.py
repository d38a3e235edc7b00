"""Linear regression averaged over the most probable sets of predictors."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Self

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.search.base import Search
from pyro_truncated.search.evolutionary import EvolutionarySearch
from pyro_truncated.search.exhaustive import ExhaustiveSearch
from pyro_truncated.sklearn.estimators import SteepestAscent, isolated_state, validated_data
from pyro_truncated.utils.arguments import check_counts, check_kinds
from pyro_truncated.utils.arrays import check_units
from pyro_truncated.utils.budget import rows_per_block


class Coefficients(NamedTuple):
    """Posteriors of the coefficients of ``C`` regressions with at most ``k`` predictors."""

    positions: Tensor  # the predictors, (C, k). Where there are fewer, any others.
    is_used: Tensor  # which of them are used, (C, k)
    factor: Tensor  # Cholesky factors of the precisions in units of the noise's, (C, k, k); 1 on the diagonal where unused
    mean: Tensor  # means (C, k); 0 where unused
    rest: Tensor  # posterior sums of squares S, (C,)


@dataclasses.dataclass(frozen=True)
class LinearModels:
    r"""The regressions :math:`y \sim \mathcal N(\alpha + X_s \beta_s, \sigma^2 I)` on the predictors that :math:`s \in \{0, 1\}^p` selects.

    Priors of :math:`\alpha` and :math:`\log \sigma` are flat, and :math:`\beta_s \sim \mathcal N(0, \sigma^2 V_s)`. Either :math:`V_s = g
    (X_s^\top X_s)^{-1}` (Zellner) or :math:`V_s = (g / n) I` (independent). All but :math:`s` is integrated out:

    .. math:: \log p(y \mid s) = \log\Gamma\bigl(\tfrac{n-1}2\bigr) - \tfrac{n-1}2 \log \pi S_s - \tfrac12 \log n
        - \tfrac12 \log |I + V_s X_s^\top X_s|, \qquad S_s = y^\top y - y^\top X_s (X_s^\top X_s + V_s^{-1})^{-1} X_s^\top y.

    The number of predictors has a beta-binomial prior of mean ``size``: :math:`p(s) = B(1 + |s|, b + p - |s|) / B(1, b)` with
    :math:`b = (p - m) / m`.

    Reference: Liang, Paulo, Molina, Clyde and Berger, "Mixtures of g priors for Bayesian variable
        selection", JASA 2008. Ley and Steel, "On the effect of prior assumptions in Bayesian model
        averaging", Journal of Applied Econometrics 2009.
    """

    X: Tensor  # predictors (n, p), centred, of variance 1 (or 0)
    y: Tensor  # centred targets (n,)
    g: float  # variance of the coefficients, relative to least squares
    is_zellner: bool  # whether the prior is Zellner's
    size: float  # expected number of predictors m, between 0 and p
    precision: Tensor = dataclasses.field(init=False)  # of all coefficients in units of the noise's, (p, p)
    linear: Tensor = dataclasses.field(init=False)  # products of predictors with targets, (p,)

    def __post_init__(self) -> None:
        n, p = self.X.shape
        gram = self.X.mT @ self.X
        ridge = torch.eye(p, dtype=gram.dtype) * n
        # Share of a column's length that is added to Gram matrices, without which predictors that
        # repeat others have no inverse.
        precision = (1 + 1 / self.g) * (gram + 1e-9 * ridge) if self.is_zellner else gram + ridge / self.g
        object.__setattr__(self, "precision", precision)
        object.__setattr__(self, "linear", self.X.mT @ self.y)

    def log_joint(self, states: Tensor) -> Tensor:
        """``log p(s, y)`` of states ``(*batch, p)``, ``(*batch,)``."""
        flat = states.reshape(-1, states.shape[-1])
        return (self.log_prior(flat) + self.log_evidence(flat)).reshape(states.shape[:-1])

    def log_prior(self, states: Tensor) -> Tensor:
        """``log p(s)`` of states ``(C, p)``."""
        p = states.shape[-1]
        b, active = (p - self.size) / self.size, states.sum(-1).double()
        return torch.lgamma(1 + active) + torch.lgamma(b + p - active) - math.lgamma(1 + b + p) + math.log(b)

    def log_evidence(self, states: Tensor) -> Tensor:
        """``log p(y | s)`` of states ``(C, p)``."""
        n = len(self.y)
        coefficients = self.coefficients(states)
        if self.is_zellner:
            determinant = coefficients.is_used.sum(-1) * math.log1p(self.g)
        else:
            determinant = 2 * coefficients.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - coefficients.is_used.sum(-1) * math.log(
                n / self.g
            )
        return math.lgamma((n - 1) / 2) - (n - 1) / 2 * (math.pi * coefficients.rest).log() - math.log(n) / 2 - determinant / 2

    def coefficients(self, states: Tensor) -> Coefficients:
        """Posteriors of the coefficients of states ``(C, p)``."""
        most = max(1, int(states.sum(-1).max()))
        active = states.to(torch.uint8).topk(most)
        positions, is_used = active.indices, active.values.bool()
        both = is_used.unsqueeze(-1) & is_used.unsqueeze(-2)
        precision = torch.where(both, self.precision[positions.unsqueeze(-1), positions.unsqueeze(-2)], torch.eye(most).double())
        linear = self.linear[positions] * is_used
        factor = torch.linalg.cholesky(precision)
        mean = torch.cholesky_solve(linear.unsqueeze(-1), factor).squeeze(-1)
        total = self.y.square().sum()
        least = torch.finfo(total.dtype).eps * total if total > 0 else torch.finfo(total.dtype).tiny
        return Coefficients(positions, is_used, factor, mean, (total - (linear * mean).sum(-1)).clamp(min=float(least)))


_PRIORS = ("zellner", "independent")


@dataclasses.dataclass(eq=False, repr=False)
class SpikeSlabRegressor(RegressorMixin, BaseEstimator):
    r"""Linear regression with a spike-and-slab prior: a posterior over which predictors matter.

    .. math:: y \sim \mathcal N(\alpha + X_s \beta_s, \sigma^2 I), \qquad \beta_s \sim \mathcal N(0, \sigma^2 V_s), \qquad s \in \{0, 1\}^p

    Intercept, coefficients and noise are integrated out (:class:`.LinearModels`). What is left is a
    posterior over the :math:`2^p` sets of predictors. It is renormalised on the ``n_models`` most
    probable ones that a search finds, or on all if there are no more. Predictions are averages over
    these.

    Example::

        from sklearn.datasets import load_diabetes

        X, y = load_diabetes(return_X_y=True, as_frame=True)
        regressor = SpikeSlabRegressor(random_state=0).fit(X, y)
        dict(zip(X.columns, regressor.inclusion_probabilities_.round(2)))

    Args:
        prior: ``"zellner"``, :math:`V_s = g (X_s^\top X_s)^{-1}`, or ``"independent"``, :math:`V_s = (g / n)\,\mathrm{diag}(v)^{-1}`
            with the variances :math:`v` of the predictors. For predictors that are not correlated they are the same.
        g: how much wider than the likelihood the prior of the coefficients is. Default: :math:`\max(n, p^2)`, the benchmark of Fernández,
            Ley and Steel (2001).
        expected_model_size: mean number of predictors of a beta-binomial prior (Ley and Steel,
            2009). Default: half of them, for which every number is equally likely.
        n_models: sets to keep.
        max_iter: most search steps.
        random_state: seed, ``RandomState``, or ``None`` for NumPy's global one. The only source of randomness.

    Attributes:
        inclusion_probabilities_: posterior probability that each predictor matters, ``(n_features,)``.
        coef_: posterior mean coefficients, ``(n_features,)``.
        intercept_: posterior mean intercept.
        models_: the sets of predictors, Booleans ``(n_models, n_features)``, most probable first.
        model_probabilities_: their posterior probabilities, ``(n_models,)``.
        log_evidence_: lower bound of the log evidence, in nats, exact if all models are kept.
        n_iter_: search steps taken.
        n_features_in_: number of features.
        feature_names_in_: their names, if the data had any.

    Raises:
        ValueError: for a parameter out of range.
    """

    _: dataclasses.KW_ONLY
    prior: str = "zellner"
    g: float | None = None
    expected_model_size: float | None = None
    n_models: int = 200
    max_iter: int = 50
    random_state: Any = None

    def fit(self, X: Any, y: Any) -> Self:
        """Finds the most probable sets of predictors.

        Args:
            X: predictors ``(n_samples, n_features)``.
            y: targets ``(n_samples,)``.
        """
        n_models, max_iter = check_counts(n_models=self.n_models, max_iter=self.max_iter)
        X, y = validated_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        rows, targets = torch.from_numpy(np.array(X)), torch.from_numpy(np.array(y, dtype=np.float64))
        check_units("X", rows)
        check_units("y", targets)
        spread = rows.std(0, correction=0)
        self._scale = torch.where(spread > 0, spread, torch.ones_like(spread))
        self._center, self._mean = rows.mean(0), targets.mean()
        self._models = self._linear_models((rows - self._center) / self._scale, targets - self._mean)
        with isolated_state(self.random_state):
            population = self._search(n_models, max_iter)
        order = population.log_joint[0].argsort(descending=True, stable=True)
        states, weights = population.states()[0][order], population.weights()[0][order]
        posterior, shares = self._models.coefficients(states), weights.double().unsqueeze(-1)
        zeros = torch.zeros(states.shape, dtype=torch.float64)
        coefficients = (shares * zeros.scatter(1, posterior.positions, posterior.mean)).sum(0) / self._scale
        self.models_, self.model_probabilities_ = states.bool().numpy(), weights.double().numpy()
        self.inclusion_probabilities_ = (shares * states).sum(0).numpy()
        self.coef_ = coefficients.numpy()
        self.intercept_ = float(self._mean - self._center @ coefficients)
        self.log_evidence_, self.n_iter_ = float(population.free_energy()[0]), max_iter
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predictions averaged over the models.

        Args:
            X: predictors ``(n_samples, n_features)``.
            return_std: whether to return standard deviations, noise included, as well; infinite after a fit to fewer than four data.

        Returns:
            Means ``(n_samples,)``; or means and standard deviations.
        """
        check_is_fitted(self)
        X = validated_data(self, X, reset=False, dtype=np.float64)
        mean = X @ self.coef_ + self.intercept_
        return (mean, self._deviation(torch.from_numpy(np.array(X)), torch.from_numpy(mean))) if return_std else mean

    # --- fitting ---

    def _linear_models(self, X: Tensor, y: Tensor) -> LinearModels:
        n, p = X.shape
        if self.prior not in _PRIORS:
            raise ValueError(f"prior must be one of {_PRIORS}; got {self.prior!r}")
        check_kinds(SpikeSlabRegressor.__init__, g=self.g, expected_model_size=self.expected_model_size)
        g = float(max(n, p**2)) if self.g is None else self.g
        if not 0 < g < math.inf:
            raise ValueError(f"g must be a positive number; got {self.g!r}")
        size = p / 2 if self.expected_model_size is None else self.expected_model_size
        if not 0 < size < p:
            raise ValueError(f"expected_model_size must lie between 0 and the number of predictors, {p}; got {self.expected_model_size!r}")
        return LinearModels(X, y, g, self.prior == "zellner", float(size))

    def _program(self) -> None:
        num = self._models.X.shape[1]
        s = pyro.sample("s", dist.Bernoulli(torch.full((num,), 0.5, dtype=torch.float64)).to_event(1))
        pyro.factor("log joint", self._models.log_joint(s) + num * math.log(2.0))

    def _search(self, n_models: int, max_iter: int) -> Any:
        num = self._models.X.shape[1]
        guide = AutoTruncated(self._program, min(n_models, 2**num), vectorize=True)
        searches: list[tuple[Search, int]] = [(ExhaustiveSearch(), 1)]
        # Spaces of so many predictors are searched exhaustively.
        if num > 12:
            searches = [(SteepestAscent(), max_iter), (EvolutionarySearch(crossover=True) + SteepestAscent(2), max_iter)]
        log_joint = guide.make_scorer()
        for search, steps in searches:
            guide.search_(search, log_joint, steps)
        return guide.population()

    # --- predicting ---

    def _deviation(self, X: Tensor, mean: Tensor) -> Any:
        """The deviation of a mixture of Student's t distributions."""
        n = len(self._models.y)
        if n <= 3:
            return np.full(len(X), math.inf)
        coefficients = self._models.coefficients(torch.from_numpy(self.models_))
        weights = torch.from_numpy(self.model_probabilities_).unsqueeze(-1)
        scaled = (X - self._center) / self._scale
        variances = []
        for rows, center in zip(*(part.split(rows_per_block(32 * coefficients.positions.numel())) for part in (scaled, mean)), strict=True):
            columns = rows.mT[coefficients.positions] * coefficients.is_used.unsqueeze(-1)
            spread = torch.linalg.solve_triangular(coefficients.factor, columns, upper=False).square().sum(1)
            own = (coefficients.mean.unsqueeze(1) @ columns).squeeze(1) + self._mean
            variance = coefficients.rest.unsqueeze(-1) / (n - 3) * (1 + 1 / n + spread)
            variances.append((weights * (variance + (own - center).square())).sum(0))
        return torch.cat(variances).sqrt().numpy()
