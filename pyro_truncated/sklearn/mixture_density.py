"""Mixtures of which every data point looks at few components."""

from __future__ import annotations

import dataclasses
import math
import numbers
import warnings
from typing import Any, Self

import numpy as np
import pyro.poutine as poutine
import torch
from pyro.infer import SVI
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.preprocessing import OrdinalEncoder
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pyro_truncated.em.closed_form import ClosedForm
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.models import CategoricalMixture, GaussianMixture, PoissonMixture
from pyro_truncated.models.covariances import at_most
from pyro_truncated.multistart.multi_start import best_start
from pyro_truncated.search.exhaustive import ExhaustiveSearch
from pyro_truncated.sklearn.estimators import isolated_state, mixture_posteriors, validated_data
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.training.loop import fit
from pyro_truncated.utils.arguments import check_count, check_counts
from pyro_truncated.utils.arrays import check_units, find_package, holds_arrays

_FAMILIES = ("gaussian", "poisson", "categorical")
_COVARIANCE_TYPES = ("full", "diag", "spherical", "tied")


@dataclasses.dataclass(eq=False, repr=False)
class TruncatedMixture(DensityMixin, BaseEstimator):
    r"""Mixture with posteriors truncated to the ``n_states`` most probable components.

    .. math:: p(y) = \sum_k \pi_k\, p_k(y), \qquad q_n(k) \propto \pi_k\, p_k(y_n) \text{ for } k \in K_n, \; 0 \text{ elsewhere},

    with Gaussian or Poisson components (:class:`~pyro_truncated.models.GaussianMixture`, :class:`~pyro_truncated.models.PoissonMixture`).
    Categorical components are latent classes: of numbers or strings, of which every column has a few. With no more components than states
    the posterior is exact, and this is EM, from the best of several starts.

    Example::

        from sklearn.datasets import load_iris

        mixture = TruncatedMixture(3, max_iter=20, random_state=0).fit(load_iris().data)
        species = mixture.predict(load_iris().data)

    Args:
        n_components: number of components ``K``.
        family: ``"gaussian"``, ``"poisson"``, or ``"categorical"`` (binary columns, too).
        covariance_type: ``"full"``, ``"diag"``, ``"spherical"`` or ``"tied"``; of Gaussian components.
        n_states: components kept per data point.
        max_iter: maximum of training steps on all data after the best restart. A restart takes as
            many, but at most 12.
        n_init: number of starts, from clusters of random data points. Default: ten of up to ten components, two of more.
        tol: relative growth of the log density below which training ends.
        verbose: whether to show a progress bar.
        random_state: seed, ``RandomState``, or ``None`` for NumPy's global one.

    Attributes:
        model_: the fitted model, a Pyro program.
        weights_: mixing proportions, ``(n_components,)``.
        means_: means of Gaussian and Poisson components, ``(n_components, n_features)``.
        categories_: of categorical components: the values of each column, as scikit-learn's ``OrdinalEncoder`` has them, or as a
            categorical dtype of pandas declares them.
        probabilities_: of categorical components: a list of their probabilities, ``(n_components, n_categories)`` for each column.
        starts_: the log density per data point that each start reached, in nats.
        covariances_: of Gaussian components, shaped as scikit-learn's: ``(K, D, D)``, ``(K, D)``, ``(K,)`` or ``(D, D)``.
        precisions_: their inverses, of the same shape.
        lower_bound_: the log density per data point of the training data, in nats.
        converged_: whether training ended before ``max_iter`` steps.
        n_iter_: training steps taken.
        n_features_in_: number of features.
        feature_names_in_: their names, if the data had any.

    Raises:
        ValueError: for a parameter out of range, more components than data points, or data outside of what the family allows.
    """

    n_components: int = 8
    _: dataclasses.KW_ONLY
    family: str = "gaussian"
    covariance_type: str = "full"
    n_states: int = 64
    max_iter: int = 100
    n_init: int | None = None
    tol: float = 1e-6
    verbose: bool = False
    random_state: Any = None

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learns the components.

        Args:
            X: data ``(n_samples, n_features)``.
            y: ignored.

        Warns:
            UserWarning: if Gaussian components have the least variance in some direction, or a categorical column many values.
        """
        rows = self._rows(X, reset=True)
        if self.family == "gaussian":
            check_units("X", rows.double())
        # Second moments of data far from zero would lose their digits.
        center = rows.median(0).values if self.family == "gaussian" else rows.new_zeros(rows.shape[1])
        with isolated_state(self.random_state) as generator:
            model = self._make(rows)
            starts, steps = self._train(model, rows - center, generator)
        if self.family == "gaussian":
            model.loc = model.loc.detach() + center
            _warn_if_singular(model, rows.double())
        self.model_, self.starts_, self.n_iter_ = model, starts, steps
        self.converged_ = steps < self.max_iter
        return self

    def predict_proba(self, X: Any) -> Any:
        """Returns posterior probabilities of the components, ``(n_samples, n_components)``.

        They are zero for components that are not among ``n_states``.
        """
        return self._map_posteriors(X, lambda population: population.value_probabilities()[:, 0])

    def predict(self, X: Any) -> Any:
        """The most probable component of each data point, ``(n_samples,)``."""
        return self._map_posteriors(X, lambda population: population.space.unpack(population.mode())[:, 0].long())

    def fit_predict(self, X: Any, y: Any = None) -> Any:
        """:meth:`fit`, then :meth:`predict` of the same data."""
        return self.fit(X).predict(X)

    def score_samples(self, X: Any) -> Any:
        """Returns log densities of the data points in nats, ``(n_samples,)``.

        With more components than ``n_states`` they are lower bounds.
        """
        return self._map_posteriors(X, lambda population: population.free_energy())

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of :meth:`score_samples`: what to maximise in a grid search.

        Args:
            X: data ``(n_samples, n_features)``.
            y: ignored.
        """
        return float(np.mean(self.score_samples(X)))

    def bic(self, X: Any) -> float:
        r"""Bayesian information criterion, :math:`-2 \log p(X) + P \log N` with ``P`` free parameters; the lower the better."""
        scores = self.score_samples(X)
        return float(-2 * scores.sum() + self._num_parameters() * np.log(len(scores)))

    def aic(self, X: Any) -> float:
        r"""Akaike's information criterion, :math:`-2 \log p(X) + 2 P` with ``P`` free parameters; the lower the better."""
        return float(-2 * self.score_samples(X).sum() + 2 * self._num_parameters())

    def _num_parameters(self) -> int:
        components, features = len(self.weights_), self.n_features_in_
        if self.family == "categorical":
            return int(components - 1 + components * sum(number - 1 for number in self._numbers_of_values))
        of_covariances = {
            "full": components * features * (features + 1) // 2,
            "diag": components * features,
            "spherical": components,
            "tied": features * (features + 1) // 2,
        }
        spreads = 0 if self.family == "poisson" else of_covariances[self.covariance_type]
        return int(components - 1 + components * features + spreads)

    def sample(self, n_samples: int = 1) -> tuple[Any, Any]:
        """Draws new data.

        Args:
            n_samples: number of data points.

        Returns:
            Data ``(n_samples, n_features)``, and the components ``(n_samples,)`` they are from.
        """
        check_is_fitted(self)
        with isolated_state(self.random_state), torch.no_grad():
            nodes = poutine.trace(self.model_).get_trace(num_data=check_count("n_samples", n_samples)).nodes
        values = nodes["y"]["value"].numpy()
        return self._encoder.inverse_transform(values) if self.family == "categorical" else values, nodes["z"]["value"].numpy()

    @property
    def weights_(self) -> Any:
        """Mixing proportions, ``(n_components,)``; their sum is one."""
        return self.model_.weights.detach().numpy().copy()

    @property
    def means_(self) -> Any:
        """Means of the components, ``(n_components, n_features)``.

        Raises:
            AttributeError: for categorical components, which have none.
        """
        if self.family == "categorical":
            raise AttributeError("components of family='categorical' have no means_, but probabilities_")
        means = self.model_.rate if isinstance(self.model_, PoissonMixture) else self.model_.loc
        return means.detach().numpy().copy()

    @property
    def categories_(self) -> Any:
        """The values of each column of categorical data."""
        return self._encoder.categories_

    @property
    def probabilities_(self) -> Any:
        """Probabilities of the values of each column, ``(n_components, n_categories)`` each; of categorical components."""
        probs = self.model_.probs.detach().numpy()
        return [probs[:, d, : len(values)].copy() for d, values in enumerate(self.categories_)]

    @property
    def covariances_(self) -> Any:
        """Covariances of Gaussian components, shaped as scikit-learn's.

        Raises:
            AttributeError: for Poisson components, which have none.
        """
        if self.family != "gaussian":
            raise AttributeError(f"components of family={self.family!r} have no covariances_")
        scale = self.model_.scale.detach().double()
        dense = self.covariance_type in ("full", "tied")
        return (scale @ scale.mT if dense else scale.square()).numpy()

    @property
    def precisions_(self) -> Any:
        """Inverses of :attr:`covariances_`, of the same shape."""
        covariances = self.covariances_
        return np.linalg.inv(covariances) if self.covariance_type in ("full", "tied") else 1 / covariances

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = self.family == "poisson"
        return tags

    def _rows(self, X: Any, *, reset: bool) -> Tensor:
        if self.family not in _FAMILIES:
            raise ValueError(f"family must be one of {_FAMILIES}; got {self.family!r}")
        if self.covariance_type not in _COVARIANCE_TYPES:
            raise ValueError(f"covariance_type must be one of {_COVARIANCE_TYPES}; got {self.covariance_type!r}")
        if self.family == "categorical":
            return self._codes(X, reset=reset)
        data = validated_data(self, X, reset=reset, dtype=[np.float64, np.float32], ensure_min_samples=2 if reset else 1)
        if self.family == "poisson" and len(others := np.argwhere((data < 0) | (data != np.floor(data)))):
            row, column = others[0]
            place = f"{data[row, column]} in row {row}, column {column}"
            raise ValueError(f"X must hold counts (0, 1, 2, ...) for family='poisson'; got {place}")
        return torch.from_numpy(np.array(data))

    def _codes(self, X: Any, *, reset: bool) -> Tensor:
        """Positions of the values among the categories of their columns."""
        options = {"ensure_all_finite": False, "ensure_min_samples": 2 if reset else 1}
        table, dtypes = X, list[Any]()
        # Categories of pandas would become numbers, and numbers in lists strings.
        if find_package(X) == "pandas":
            table, dtypes = (X.astype(object), list(X.dtypes)) if X.ndim == 2 else (X.to_numpy(dtype=object), [])
        elif isinstance(X, (list, tuple)) and not holds_arrays(X):
            table = np.array(X, dtype=object)
        data = validated_data(self, table, reset=reset, dtype=None, **options).astype(object)
        if count := int(_null_mask(data).sum()) if data.dtype == object else 0:
            advice = "Give them a category of their own, such as 'missing', or leave these rows out"
            raise ValueError(f"X must be complete; got {count} missing entries. {advice}")
        if reset:
            self._encoder = _make_encoder(data, dtypes)
        codes = self._encoder.transform(data)
        if len(unseen := np.argwhere(codes < 0)):
            row, column = unseen[0]
            raise ValueError(
                f"X must hold values that fit has seen; got {data[row, column]!r} in row {row}, column {column}. Declare all values of a "
                "column before fit, by a categorical dtype of pandas."
            )
        if reset:
            self._numbers_of_values = [len(np.unique(column)) for column in codes.T]
            _warn_if_many(self._numbers_of_values, len(data))
        return torch.from_numpy(codes)

    def _make(self, rows: Tensor) -> Any:
        number = check_count("n_components", self.n_components)
        if number > len(rows):
            raise ValueError(f"n_components must be at most the number of data points, {len(rows)}; got {number}")
        if self.family == "poisson":
            return PoissonMixture(rows.shape[1], number, dtype=rows.dtype)
        if self.family == "categorical":
            most = max(2, *(len(values) for values in self.categories_))
            return CategoricalMixture(rows.shape[1], number, most, dtype=rows.dtype)
        # Without a prior of the covariances: the likelihood is what is promised.
        return GaussianMixture(rows.shape[1], number, covariance=self.covariance_type, pseudo_data=0, dtype=rows.dtype)

    def _train(self, model: Any, rows: Tensor, generator: torch.Generator) -> tuple[list[float], int]:
        """Runs EM from the best start; returns what starts reached, and steps."""
        starts = 10 if self.n_components <= 10 else 2
        n_init = starts if self.n_init is None else self.n_init
        max_iter, n_init, n_states = check_counts(max_iter=self.max_iter, n_init=n_init, n_states=self.n_states)
        tol: Any = self.tol
        if not isinstance(tol, numbers.Real) or not 0 <= float(tol) < math.inf:
            raise ValueError(f"tol must be a number of at least 0; got {tol!r}")
        search = ExhaustiveSearch()
        # Not annealed: at high temperatures all components are the same, and part where the likelihood is not highest.
        # Starts of 60 steps ended where those of 12 do, on five sets of data.
        options: dict[str, Any] = {"num_starts": n_init, "steps": min(max_iter, 12), "num_states": n_states}
        free_energy = best_start(model, rows, search, num_data=5000, generator=generator, **options)
        guide = AutoTruncated(model, n_states, vectorize=True)
        svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(search))
        # Exact EM never falls, and the growth in two steps says enough. The tolerance is that of five.
        patience, progress = 2 if self.n_components <= n_states else 5, None if self.verbose else False
        steps = fit(svi, rows, steps=max_iter, patience=patience, tolerance=float(tol) * patience / 5, progress=progress).steps
        if self.family == "categorical":
            # Values that only other columns have are not drawn. The least number instead of zero has a logarithm.
            sizes = torch.tensor([len(values) for values in self.categories_]).unsqueeze(-1)
            probs = model.probs.detach().where(torch.arange(model.num_values) < sizes, torch.finfo(rows.dtype).tiny)
            model.probs = probs / probs.sum(-1, keepdim=True)
        with torch.no_grad():
            self.lower_bound_ = float(guide.search_(search, guide.make_scorer(rows)).free_energy().mean())
        return free_energy, steps

    def _map_posteriors(self, X: Any, reader: Any) -> Any:
        check_is_fitted(self)
        rows = self._rows(X, reset=False).to(self.model_.weights.dtype)
        with isolated_state(), torch.no_grad():
            blocks = mixture_posteriors(self.model_, rows, check_count("n_states", self.n_states))
            return torch.cat([reader(population) for _, population in blocks]).numpy()


def _make_encoder(data: Any, dtypes: list[Any]) -> OrdinalEncoder:
    """Returns positions of declared values, of 0 and 1, or of those found."""
    options = {"handle_unknown": "use_encoded_value", "unknown_value": -1}
    try:
        encoder = OrdinalEncoder(**options).fit(data)
    except TypeError as error:
        mixed = [d for d, column in enumerate(data.T) if len({isinstance(value, str) for value in column}) > 1]
        raise TypeError(f"columns of X must hold strings or numbers, not both, as columns {mixed} do: make all strings") from error
    found = encoder.categories_
    # Columns of a binary matrix may be constant.
    is_binary = all(set(values) <= {0, 1} for values in found)
    declared = {d: [False, True] if isinstance(column[0], bool) else [0, 1] for d, column in enumerate(data.T)} if is_binary else {}
    declared |= {d: list(dtype.categories) for d, dtype in enumerate(dtypes) if hasattr(dtype, "categories")}
    categories = [np.array(declared.get(d, values), dtype=object) for d, values in enumerate(found)]
    return OrdinalEncoder(categories=categories, **options).fit(data) if declared else encoder


def _warn_if_singular(model: GaussianMixture, rows: Tensor) -> None:
    low, high = rows.aminmax(dim=0)
    if model.covariance != "spherical" and (constant := (low == high).nonzero().flatten().tolist()):
        which, advice = f"columns {constant} of X do not vary", "Leave them out."
    else:
        variance, scale = at_most(rows.var(0, correction=0), model.bulk.square()), model.scale.detach().double()
        if model.covariance in ("full", "tied"):
            shares = torch.linalg.svdvals(scale / variance.sqrt().unsqueeze(-1)).square()
        else:
            shares = scale.square() / variance if model.covariance == "diag" else scale.square().unsqueeze(-1) / variance.mean()
        # The least is a millionth.
        is_least = (shares.amin(-1) < 2e-6).expand(len(model.weights))
        # A component of few outliers harms no other.
        if float(model.weights.detach()[is_least].sum()) < 0.05:
            return
        least = is_least.nonzero().flatten().tolist()
        which = f"components {least} have next to no variance in some direction, as columns are copies or their data points few"
        advice = "Leave copies out, or take fewer components or covariance_type='diag'."
    warnings.warn(
        f"{which}: densities have no bound there, scores and criteria say nothing, and other values are taken for impossible. {advice}",
        UserWarning,
        stacklevel=3,
    )


def _warn_if_many(numbers_of_values: list[int], num_rows: int) -> None:
    most = max(numbers_of_values)
    # More values than ten, and than half of the rows, are hardly categories.
    if most > max(10, 0.5 * num_rows):
        warnings.warn(
            f"column {numbers_of_values.index(most)} has {most} values in {num_rows} rows, and each is a category of its own for "
            "family='categorical': sort numbers into a few bins, or take family='gaussian'.",
            UserWarning,
            stacklevel=5,
        )


@np.vectorize
def _null_mask(value: Any) -> bool:
    """Whether a category is ``None``, NaN, or null of pandas."""
    return value is None or type(value).__name__ in ("NAType", "NaTType") or bool(value != value)
