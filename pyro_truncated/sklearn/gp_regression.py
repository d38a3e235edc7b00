"""Gaussian process regression on a subset of the training inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from pyro_truncated.gp.data_kernels import smooth_rbf
from pyro_truncated.gp.subset.regression import SubsetGPRegression
from pyro_truncated.sklearn.runs_apart import apart
from pyro_truncated.sklearn.validation import validated_data
from pyro_truncated.utils.counts import check_count


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
        kernel: ``"rbf"`` for squared exponentials with a length-scale per feature, or a function that makes a
            :class:`~pyro_truncated.gp.DataKernel` of the training inputs, a tensor ``(n_samples, n_features)``.
        n_inducing: number of inducing inputs, at most as many as there are data. Default: none, exact regression, for up to 5000 data;
            above so many as the objective gains by, at most 512.
        objective: ``"vfe"``, ``"pp"`` (smallest errors where inducing inputs are few for the data) or ``"fitc"``.
        polish: whether inducing inputs move freely afterwards.
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

    def __init__(
        self,
        kernel: str | Callable[[Any], Any] = "rbf",
        *,
        n_inducing: int | None = None,
        objective: str = "vfe",
        polish: bool = False,
        max_epochs: int = 100,
        random_state: Any = None,
    ) -> None:
        self.kernel = kernel
        self.n_inducing = n_inducing
        self.objective = objective
        self.polish = polish
        self.max_epochs = max_epochs
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Learns kernel, noise and inducing inputs.

        Args:
            X: inputs ``(n_samples, n_features)``.
            y: targets ``(n_samples,)`` or ``(n_samples, n_targets)``.
        """
        if self.kernel != "rbf" and not callable(self.kernel):
            raise ValueError(f'kernel must be "rbf" or a function that makes a data kernel of the training inputs; got {self.kernel!r}')
        X, y = validated_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2)
        number = None if self.n_inducing is None else min(check_count("n_inducing", self.n_inducing), len(X))
        inputs, targets = torch.from_numpy(np.array(X)), torch.from_numpy(np.array(y, dtype=np.float64))
        with apart(self.random_state):
            kernel = self.kernel(inputs) if callable(self.kernel) else smooth_rbf(inputs)
            regression = SubsetGPRegression(kernel, targets, num_inducing=number, objective=self.objective)
            regression.fit(max_epochs=self.max_epochs, polish=self.polish)
        self.regression_ = regression
        self.inducing_, self.objective_value_ = regression.subset.numpy(), regression.objective_value
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
        with apart(), torch.no_grad():
            mean, variance = self.regression_.predict(torch.from_numpy(np.array(X)))
        return (mean.numpy(), variance.sqrt().numpy()) if return_std else mean.numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
