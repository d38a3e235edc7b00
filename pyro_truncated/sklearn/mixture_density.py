"""Mixtures with many components, of which every data point looks at a few."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import pyro.poutine as poutine
import torch
from pyro.infer import SVI
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from pyro_truncated.em.closed_form import ClosedForm
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.models import GaussianMixture, PoissonMixture
from pyro_truncated.search.exhaustive import ExhaustiveSearch
from pyro_truncated.sklearn.posteriors import mixture_posteriors
from pyro_truncated.sklearn.runs_apart import apart
from pyro_truncated.training.best_start import best_start
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.training.loop import fit
from pyro_truncated.utils.counts import check_count, check_counts

_FAMILIES = ("gaussian", "poisson")
# Training steps of a start, and the most data points that it looks at.
_SHORT, _SOME_ROWS = 60, 5000
# Steps over which the growth of the log density is averaged.
_PATIENCE = 5


class TruncatedMixture(DensityMixin, BaseEstimator):
    r"""Mixture whose posteriors are renormalised on the ``n_states`` most probable components of each data point.

    .. math:: p(y) = \sum_k \pi_k\, p_k(y), \qquad q_n(k) \propto \pi_k\, p_k(y_n) \text{ for } k \in K_n, \; 0 \text{ elsewhere},

    with Gaussian or Poisson components (:class:`~pyro_truncated.models.GaussianMixture`, :class:`~pyro_truncated.models.PoissonMixture`).
    With no more components than states the posterior is exact, and this is EM, from the best of several starts.

    Example::

        from sklearn.datasets import load_iris

        mixture = TruncatedMixture(3, max_iter=20, random_state=0).fit(load_iris().data)
        species = mixture.predict(load_iris().data)

    Args:
        n_components: number of components ``K``.
        family: ``"gaussian"`` or ``"poisson"``.
        covariance_type: ``"full"``, ``"diag"``, ``"spherical"`` or ``"tied"``; of Gaussian components.
        n_states: components kept per data point.
        max_iter: most training steps on all data after the best start, which itself takes as many, but at most 60.
        n_init: number of starts, from random data points.
        tol: relative growth of the log density, averaged over five steps, below which training ends.
        verbose: whether to show a progress bar.
        random_state: seed, ``RandomState``, or ``None`` for NumPy's global one; the only source of randomness.

    Attributes:
        model_: the fitted model, a Pyro program.
        weights_: mixing proportions, ``(n_components,)``.
        means_: means of the components, ``(n_components, n_features)``.
        starts_: the log density per data point that each start reached, in nats.
        n_iter_: training steps taken.
        n_features_in_: number of features.
        feature_names_in_: their names, if the data had any.

    Raises:
        ValueError: for a parameter out of range, more components than data points, or data outside of what the family allows.
    """

    def __init__(
        self,
        n_components: int = 8,
        *,
        family: str = "gaussian",
        covariance_type: str = "full",
        n_states: int = 64,
        max_iter: int = 100,
        n_init: int = 10,
        tol: float = 1e-6,
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.family = family
        self.covariance_type = covariance_type
        self.n_states = n_states
        self.max_iter = max_iter
        self.n_init = n_init
        self.tol = tol
        self.verbose = verbose
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learns the components.

        Args:
            X: data ``(n_samples, n_features)``.
            y: ignored.
        """
        rows = self._rows(X, reset=True)
        with apart(self.random_state) as generator:
            model = self._make(rows)
            starts, steps = self._train(model, rows, generator)
        self.model_, self.starts_, self.n_iter_ = model, starts, steps
        return self

    def predict_proba(self, X: Any) -> Any:
        """Posterior probabilities of the components, ``(n_samples, n_components)``; zero of those that are not among ``n_states``."""
        return self._each(X, lambda population: population.value_probabilities()[:, 0])

    def predict(self, X: Any) -> Any:
        """The most probable component of each data point, ``(n_samples,)``."""
        return self._each(X, lambda population: population.space.unpack(population.mode())[:, 0])

    def fit_predict(self, X: Any, y: Any = None) -> Any:
        """:meth:`fit`, then :meth:`predict` of the same data."""
        return self.fit(X).predict(X)

    def score_samples(self, X: Any) -> Any:
        """Log densities of the data points, in nats, ``(n_samples,)``; lower bounds with more components than ``n_states``."""
        return self._each(X, lambda population: population.free_energy())

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of :meth:`score_samples`: what to maximise in a grid search.

        Args:
            X: data ``(n_samples, n_features)``.
            y: ignored.
        """
        return float(np.mean(self.score_samples(X)))

    def sample(self, n_samples: int = 1) -> tuple[Any, Any]:
        """Draws new data.

        Args:
            n_samples: number of data points.

        Returns:
            Data ``(n_samples, n_features)``, and the components ``(n_samples,)`` they are from.
        """
        check_is_fitted(self)
        with apart(self.random_state), torch.no_grad():
            nodes = poutine.trace(self.model_).get_trace(num_data=check_count("n_samples", n_samples)).nodes
        return nodes["y"]["value"].numpy(), nodes["z"]["value"].numpy()

    @property
    def weights_(self) -> Any:
        """Mixing proportions, ``(n_components,)``."""
        return self.model_.weights.detach().numpy().copy()

    @property
    def means_(self) -> Any:
        """Means of the components, ``(n_components, n_features)``."""
        means = self.model_.rate if isinstance(self.model_, PoissonMixture) else self.model_.loc
        return means.detach().numpy().copy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = self.family == "poisson"
        return tags

    def _rows(self, X: Any, *, reset: bool) -> Tensor:
        if self.family not in _FAMILIES:
            raise ValueError(f"family must be one of {_FAMILIES}; got {self.family!r}")
        data = validate_data(self, X, reset=reset, dtype=[np.float64, np.float32], ensure_min_samples=2 if reset else 1)
        return torch.from_numpy(np.array(data))

    def _make(self, rows: Tensor) -> Any:
        number = check_count("n_components", self.n_components)
        if number > len(rows):
            raise ValueError(f"n_components must be at most the number of data points, {len(rows)}; got {number}")
        if self.family == "poisson":
            return PoissonMixture(rows.shape[1], number, dtype=rows.dtype)
        # Without a prior of the covariances: the likelihood is what is promised.
        return GaussianMixture(rows.shape[1], number, covariance=self.covariance_type, pseudo_data=0, dtype=rows.dtype)

    def _train(self, model: Any, rows: Tensor, generator: torch.Generator) -> tuple[list[float], int]:
        """EM from the best of the starts; what each of them reached, and the steps from there."""
        counts = ("max_iter", "n_init", "n_states")
        max_iter, n_init, n_states = check_counts(**{name: getattr(self, name) for name in counts})
        search = ExhaustiveSearch()
        # Not annealed: at high temperatures all components are the same, and part where the likelihood is not highest.
        options: dict[str, Any] = {"num_starts": n_init, "steps": min(max_iter, _SHORT), "num_states": n_states}
        starts = best_start(model, rows, search, num_data=_SOME_ROWS, generator=generator, **options)
        svi = SVI(model, AutoTruncated(model, n_states), ClosedForm(model), Truncated_ELBO(search))
        progress = None if self.verbose else False
        return starts, fit(svi, rows, steps=max_iter, patience=_PATIENCE, tolerance=self.tol, progress=progress).steps

    def _each(self, X: Any, read: Any) -> Any:
        """What is read of the posteriors of all data points."""
        check_is_fitted(self)
        rows = self._rows(X, reset=False).to(self.model_.weights.dtype)
        with apart(), torch.no_grad():
            blocks = mixture_posteriors(self.model_, rows, check_count("n_states", self.n_states))
            return torch.cat([read(population) for _, population in blocks]).numpy()
