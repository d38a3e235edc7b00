"""Gaussian processes: regression, and latent variable models as transformers."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, RegressorMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pyro_truncated.gp.subset.regression import SubsetGPRegression
from pyro_truncated.gplvm.decoders.sas_decoder import SASDecoder
from pyro_truncated.gplvm.spike_slab.fitting import fit
from pyro_truncated.gplvm.spike_slab.inference import Latents, Posterior
from pyro_truncated.gplvm.spike_slab.model import SpikeSlabGPLVM
from pyro_truncated.sklearn.estimators import ColumnUnits, isolated_state, validated_codes, validated_data
from pyro_truncated.utils.arguments import Renamed, check_count, check_counts, renames


@dataclasses.dataclass(eq=False, repr=False)
class SubsetGPRegressor(RegressorMixin, BaseEstimator):
    r"""Gaussian process regression with inducing inputs from the training inputs.

    See :class:`~pyro_truncated.SubsetGPRegression`.

    .. math:: y_n = f(x_n) + \varepsilon_n, \qquad f \sim \mathcal{GP}(m, k), \qquad \varepsilon_n \sim \mathcal N(0, \sigma^2)

    Kernel, noise and subset are learned from the data by one objective. Neither inputs nor targets need be standardised: length-scales
    start from the spread of the inputs, targets are standardised inside. Several targets share the kernel.

    Example::

        from sklearn.datasets import load_diabetes

        X, y = load_diabetes(return_X_y=True)
        regressor = SubsetGPRegressor(n_inducing=20, max_epochs=5, random_state=0).fit(X[:100], y[:100])
        mean, deviation = regressor.predict(X[100:], return_std=True)

    Args:
        kernel: ``"rbf"`` for squared exponentials with a length-scale per feature, a kernel of :mod:`pyro.contrib.gp.kernels`, or a
            function that makes a :class:`~pyro_truncated.gp.DataKernel` of the training inputs, a tensor ``(n_samples, n_features)``.
        n_inducing: number of inducing inputs, at most as many as there are data. Default: none, exact regression, for up to 5000 data;
            above so many as the objective gains by, at most 512.
        objective: ``"vfe"``, ``"pp"`` (smallest errors where inducing inputs are few for the data) or ``"fitc"``.
        free_inputs: whether to free inducing inputs from the data points afterwards, and optimise them.
        max_epochs: most alternations of subset and hyper-parameters.
        random_state: seed, ``RandomState``, or ``None`` for NumPy's global one. The only source of randomness.

    Attributes:
        regression_: the trained :class:`~pyro_truncated.SubsetGPRegression`.
        inducing_: positions of the inducing inputs among the training data.
        objective_value_: the objective, in nats of standardised targets; for exact regression it is the log evidence, negated.
        n_features_in_: number of features.
        feature_names_in_: their names, if the data had any.

    Raises:
        ValueError: for a parameter out of range.
    """

    kernel: str | Callable[[Any], Any] = "rbf"
    _: dataclasses.KW_ONLY
    n_inducing: int | None = None
    objective: str = "vfe"
    free_inputs: bool = False
    max_epochs: int = 100
    random_state: Any = None
    polish: ClassVar[Renamed] = Renamed("free_inputs")

    @renames(polish="free_inputs")
    def set_params(self, **params: Any) -> Self:
        """Sets parameters by name, as all estimators do."""
        return super().set_params(**params)

    def fit(self, X: Any, y: Any) -> Self:
        """Learns kernel, noise and inducing inputs.

        Args:
            X: inputs ``(n_samples, n_features)``.
            y: targets ``(n_samples,)`` or ``(n_samples, n_targets)``.
        """
        X, y = validated_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2)
        if self.kernel != "rbf" and not callable(self.kernel):
            raise ValueError(
                f'kernel must be "rbf", one of pyro.contrib.gp.kernels, as Matern52({X.shape[1]}), or what makes a DataKernel of '
                f"the inputs; got {self.kernel!r}"
            )
        number = None if self.n_inducing is None else min(check_count("n_inducing", self.n_inducing), len(X))
        inputs, targets = torch.from_numpy(np.array(X)), torch.from_numpy(np.array(y, dtype=np.float64))
        with isolated_state(self.random_state):
            kernel = copy.deepcopy(self.kernel) if callable(self.kernel) else None
            regression = SubsetGPRegression(inputs, targets, kernel, num_inducing=number, objective=self.objective)
            regression.fit(max_epochs=self.max_epochs, free_inputs=self.free_inputs, progress=False)
        self.regression_ = regression
        self.inducing_ = regression.subset.numpy()
        self.objective_value_ = regression.objective_value + 0.5 * len(targets) * int(regression.varies.sum()) * math.log(2 * math.pi)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predictive means of the targets.

        Args:
            X: inputs ``(n_samples, n_features)``.
            return_std: whether to return standard deviations, noise included, as well.

        Returns:
            Means, shaped as the targets; or means and standard deviations.
        """
        check_is_fitted(self)
        X = validated_data(self, X, reset=False, dtype=np.float64)
        with isolated_state(), torch.no_grad():
            mean, variance = self.regression_.predict(torch.from_numpy(np.array(X)))
        return (mean.numpy(), variance.sqrt().numpy()) if return_std else mean.numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


SubsetGPRegressor.__init__ = renames(polish="free_inputs")(SubsetGPRegressor.__init__)  # type: ignore[method-assign]


class _LatentSpace(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """What transformers to a latent space have in common.

    Data may be missing, and codes have a column per latent dimension.

    Their models have one noise for all features, so columns are standardised inside, and predictions brought back.
    """

    _units: ColumnUnits

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    @property
    def _n_features_out(self) -> int:
        return int(self.embedding_.shape[1])

    def _rows(self, X: Any, *, reset: bool) -> Tensor:
        least = 2 if reset else 1
        data = validated_data(self, X, reset=reset, dtype=np.float64, ensure_all_finite="allow-nan", ensure_min_samples=least)
        return torch.from_numpy(np.array(data))

    def _latents(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return torch.from_numpy(np.array(validated_codes(self, X, dtype=np.float64)))


@dataclasses.dataclass(eq=False, repr=False)
class SpikeSlabGPLVMTransformer(_LatentSpace):
    r"""Gaussian process latent variable model that learns the number of dimensions.

    .. math:: b_q \sim \mathrm{Bernoulli}(\pi), \quad x_{nq} \sim \mathcal N(0, 1), \quad f_d \sim \mathcal{GP}(0, k), \quad
              y_{nd} \sim \mathcal N(f_d(b \circ x_n), \beta^{-1})

    :class:`~pyro_truncated.SpikeSlabGPLVM`, trained by :func:`pyro_truncated.gplvm.fit` on all data at once. Entries that are NaN are
    missing; columns
    are standardised inside, as all features have one noise.

    Example::

        from sklearn.datasets import load_iris

        space = SpikeSlabGPLVMTransformer(3, n_inducing=10, max_iter=10, random_state=0)
        codes = space.fit_transform(load_iris().data[::5])
        space.relevance_

    Args:
        n_components: number of latent dimensions that may be used.
        kernel: ``"rbf"``, ``"linear"``, or a kernel of :mod:`pyro.contrib.gp.kernels` over ``n_components`` inputs.
        n_inducing: inducing inputs. Default: 50, at most as many as there are data.
        prior: prior probability that a dimension is used.
        max_iter: quasi-Newton iterations of each phase of training.
        n_init: number of starts: of these one from principal components, others random. The best one by the bound is kept.
        random_state: seed, ``RandomState``, or ``None`` for NumPy's global one. The only source of randomness.

    Attributes:
        model_: the fitted model, a Pyro program, of the standardised data.
        embedding_: latents of the training data, ``(n_samples, n_components)``. Zero in dimensions that are not used.
        relevance_: posterior probability that each dimension is used, ``(n_components,)``.
        bound_: lower bound of the log evidence, in nats.
        n_iter_: most iterations of a phase.
        n_features_in_: number of features.
        feature_names_in_: their names, if the data had any.

    Raises:
        ValueError: for a parameter out of range, or data that do not vary.
    """

    n_components: int = 5
    _: dataclasses.KW_ONLY
    kernel: Any = "rbf"
    n_inducing: int | None = None
    prior: float = 0.1
    max_iter: int = 200
    n_init: int = 1
    random_state: Any = None

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learns latents, switches and functions.

        Args:
            X: data ``(n_samples, n_features)``, NaN where missing.
            y: ignored.
        """
        number, steps, starts = check_counts(n_components=self.n_components, max_iter=self.max_iter, n_init=self.n_init)
        inducing = None if self.n_inducing is None else check_count("n_inducing", self.n_inducing)
        rows = self._rows(X, reset=True)
        units = ColumnUnits.from_rows(rows)
        own = units.standardise(rows)
        inducing = None if inducing is None else min(inducing, len(rows))
        with isolated_state(self.random_state) as generator:
            model = SpikeSlabGPLVM(len(rows), rows.shape[1], number, kernel=self.kernel, num_inducing=inducing, prior=self.prior)
            result = fit(model, own, num_starts=starts, steps=steps, warm_up=steps, generator=generator)
            self._posterior = Posterior(model, own)
        self.model_, self.n_iter_, self._units = model, steps, units
        self.bound_ = result.bound - float(units.log_volume(rows).sum())
        self.relevance_ = model.probability.detach()[0].numpy().copy()
        self.embedding_ = self._select_dimensions(model.loc.detach()).numpy()
        return self

    def transform(self, X: Any) -> Any:
        """Returns means of the latents, ``(n_samples, n_components)``.

        They are zero in dimensions that are not used.

        Args:
            X: data ``(n_samples, n_features)``, NaN where missing.
        """
        return self._select_dimensions(self._infer(X).loc).numpy()

    def inverse_transform(self, X: Any) -> Any:
        """Means of the data at latents.

        Args:
            X: latents ``(n_samples, n_components)``.

        Returns:
            Data ``(n_samples, n_features)``.
        """
        latents = self._latents(X)
        with isolated_state(), torch.no_grad():
            return self._units.to_original(self._posterior.predict(latents).mean).numpy()

    def score_samples(self, X: Any) -> Any:
        """Returns lower bounds of log densities given the training data.

        They are in nats, ``(n_samples,)``.
        """
        bound = self._infer(X).bound
        return (bound - self._units.log_volume(self._rows(X, reset=False))).numpy()

    def score(self, X: Any, y: Any = None) -> float:
        """Returns the mean of :meth:`score_samples`, in nats per data point."""
        return float(np.mean(self.score_samples(X)))

    def _infer(self, X: Any) -> Latents:
        check_is_fitted(self)
        rows = self._rows(X, reset=False)
        with isolated_state():
            return self._posterior.infer(self._units.standardise(rows), steps=1000, tolerance=1e-10)

    def _select_dimensions(self, loc: Tensor) -> Tensor:
        return torch.where(torch.from_numpy(self.relevance_) > 0.5, loc.double(), 0.0)


@dataclasses.dataclass(eq=False, repr=False)
class ActiveSetGPLVM(_LatentSpace):
    r"""Gaussian process latent variable model for many data.

    It trains on minibatches that condition on random active sets.

    .. math:: z_n \sim \mathcal N(0, I), \quad f_d \sim \mathcal{GP}(0, k), \quad y_{nd} \sim \mathcal N(f_d(z_n), \sigma^2)

    :class:`~pyro_truncated.SASDecoder` with the most probable latents, trained by its ``fit``. Entries that are NaN are missing; columns
    are standardised inside, as all features have one noise.

    Example::

        from sklearn.datasets import load_iris

        space = ActiveSetGPLVM(max_iter=20, random_state=0)
        plane = space.fit_transform(load_iris().data)

    Args:
        n_components: dimension of the latent space.
        n_active: size of the active sets. Default: 200, at most half of a minibatch.
        batch_size: size of the minibatches, at most as many as there are data.
        max_iter: passes over the data. Default: 60, and so many that there are 400 minibatches.
        learning_rate: of the latents at first, in units of the latent space.
        verbose: whether to show a progress bar.
        random_state: seed, ``RandomState``, or ``None`` for NumPy's global one. The only source of randomness.

    Attributes:
        decoder_: the fitted :class:`~pyro_truncated.SASDecoder`, of the standardised data.
        embedding_: latents of the training data, ``(n_samples, n_components)``, where training has left them.
        n_iter_: passes over the data made.
        n_features_in_: number of features.
        feature_names_in_: their names, if the data had any.

    Raises:
        ValueError: for a parameter out of range, or data that do not vary.

    Reference:
        Moreno-Muñoz, Feldager and Hauberg, "Revisiting Active Sets for Gaussian Process Decoders", 2022.
    """

    n_components: int = 2
    _: dataclasses.KW_ONLY
    n_active: int | None = None
    batch_size: int = 1000
    max_iter: int | None = None
    learning_rate: float = 0.03
    verbose: bool = False
    random_state: Any = None

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learns latents and functions.

        Args:
            X: data ``(n_samples, n_features)``, NaN where missing.
            y: ignored.
        """
        number, batch = check_counts(n_components=self.n_components, batch_size=self.batch_size)
        active = None if self.n_active is None else check_count("n_active", self.n_active)
        epochs = None if self.max_iter is None else check_count("max_iter", self.max_iter)
        rows = self._rows(X, reset=True)
        units = ColumnUnits.from_rows(rows)
        own = units.standardise(rows)
        batch = min(batch, len(rows))
        active = None if active is None else min(active, batch - 1)
        with isolated_state(self.random_state) as generator:
            decoder = SASDecoder(len(rows), rows.shape[1], number, num_active=active, batch_size=batch).double()
            decoder.fit(own, epochs=epochs, learning_rate=self.learning_rate, generator=generator, progress=self.verbose)
        self.decoder_, self.n_iter_, self._units = decoder, epochs or decoder.default_epochs, units
        self.embedding_ = decoder.latents(own).numpy()
        return self

    def transform(self, X: Any) -> Any:
        """The most probable latents of data points, ``(n_samples, n_components)``.

        Args:
            X: data ``(n_samples, n_features)``, NaN where missing.
        """
        check_is_fitted(self)
        rows = self._rows(X, reset=False)
        with isolated_state():
            return self.decoder_.infer(self._units.standardise(rows)).numpy()

    def inverse_transform(self, X: Any) -> Any:
        """Means of the data at latents.

        Args:
            X: latents ``(n_samples, n_components)``.

        Returns:
            Data ``(n_samples, n_features)``.
        """
        latents = self._latents(X)
        with isolated_state():
            return self._units.to_original(self.decoder_.predict(latents)[0]).numpy()
