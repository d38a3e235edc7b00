"""One view of a latent space: its Gaussian process and kernel."""

from __future__ import annotations

import abc
import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.contrib.gp import kernels
from pyro.distributions import TorchDistribution
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.gp.cholesky import inducing_cholesky
from pyro_truncated.gp.data_kernels.protocol import check_kernel
from pyro_truncated.gp.kernels import LinearARD, evaluate, refuse_foreign_kernel
from pyro_truncated.gp.uncertain import Expectation, PsiStatistics, SpikeSlabInputs, psi_statistics
from pyro_truncated.gplvm.spike_slab.inducing_posterior import (
    InducingPosterior,
    Observations,
    collapsed_bound,
    divergence,
    expected_log_likelihood,
    predict,
)
from pyro_truncated.utils.arguments import check_count
from pyro_truncated.utils.budget import row_slices
from pyro_truncated.utils.constraints import as_signed
from pyro_truncated.utils.parameter_store import UniqueModule


class LabelLikelihood(abc.ABC):
    """A likelihood of labels with a quadratic bound.

    Example:
        >>> isinstance(BernoulliLabels(), LabelLikelihood), isinstance(CategoricalLabels(3), LabelLikelihood)
        (True, True)

    Attributes:
        noise: the variance that a precision of one stands for.
        uses_square: whether the best point asks for second moments.
    """

    noise: float = 1.0
    uses_square: bool = False

    def num_functions(self, num_observed: int) -> int:
        """Number of latent functions ``F`` of ``D`` columns of data."""
        return num_observed

    @abc.abstractmethod
    def check(self, y: Tensor, view: int) -> None:
        """Raises ``ValueError`` for data ``(N, D)`` outside the likelihood's support; NaN is missing."""

    @abc.abstractmethod
    def base(self, y: Tensor) -> Tensor:
        """The constant functions ``(F,)`` that fit data ``(N, D)`` best, regularised."""

    @abc.abstractmethod
    def best_point(self, first: Tensor, second: Tensor | None) -> Tensor:
        """The tightest point ``(N, F)`` of the bound by functions' moments ``(N, F)``."""

    @abc.abstractmethod
    def bound(self, y: Tensor, point: Tensor) -> Observations:
        """The quadratic bound of data ``(N, D)`` at a point ``(N, F)``."""

    def log_prob(self, y: Tensor, functions: Tensor) -> Tensor:
        """Log probabilities ``(...)`` of data ``(..., D)`` given functions ``(..., F)``."""
        log_prob: Tensor = self.distribution(functions).base_dist.log_prob(y.nan_to_num(0.0))
        return torch.where(y.isnan(), 0.0, log_prob).sum(-1)

    def response(self, loc: Tensor, variance: Tensor) -> Tensor:
        """Expected data (probabilities, rates) ``(N, F)`` under independent normal functions, by quadrature."""
        total = torch.zeros_like(loc)
        roots, weights = np.polynomial.hermite_e.hermegauss(32)
        for root, weight in zip(roots.tolist(), (weights / math.sqrt(2 * math.pi)).tolist(), strict=True):
            total += weight * self.distribution(loc + root * variance.sqrt()).mean
        return total

    @abc.abstractmethod
    def distribution(self, functions: Tensor) -> TorchDistribution:
        """The distribution of data ``(..., D)`` given functions ``(..., F)``."""

    def as_numbers(self, y: Tensor) -> Tensor:
        """Data as numbers ``(N, F)`` for principal components, NaN where missing."""
        return y


class BernoulliLabels(LabelLikelihood):
    r"""Binary labels in {0, 1}: :math:`p(y = 1 \mid g) = 1 / (1 + e^{-g})`.

    The bound is that of Jaakkola and Jordan, "Bayesian parameter estimation via variational methods" (2000): :math:`w = \tanh(\xi/2) /
    2\xi`, tightest at :math:`\xi^2 = E g^2`.

    Example:
        >>> model = SpikeSlabMRD(20, [5, 1], 3, likelihood=["gaussian", BernoulliLabels()])  # the second view: zeros, ones, NaN
    """

    uses_square = True

    def check(self, y: Tensor, view: int) -> None:
        """Raises ``ValueError`` for data ``(N, D)`` outside the likelihood's support; NaN is missing."""
        if not bool(((y == 0) | (y == 1) | y.isnan()).all()):
            raise ValueError(f"view {view} has a Bernoulli likelihood: its data must be 0, 1, or NaN where missing; got {_range(y)}")

    def base(self, y: Tensor) -> Tensor:
        """Returns each column's log odds, with half a label added to either."""
        counts, ones = (~y.isnan()).sum(0), y.nansum(0)
        return ((ones + 0.5) / (counts - ones + 0.5)).log()

    def best_point(self, first: Tensor, second: Tensor | None) -> Tensor:
        """The root of the functions' second moments, ``(N, F)``."""
        assert second is not None
        return second.clamp(min=1e-12).sqrt()

    def bound(self, y: Tensor, point: Tensor) -> Observations:
        """The quadratic bound of data ``(N, D)`` at a point ``(N, F)``."""
        is_observed = ~y.isnan()
        xi = point.abs()
        # Of tanh(x / 2) / 2x the series around zero, where the quotient has no digits.
        weight = torch.where(xi < 1e-4, 0.25 - xi.square() / 48, (xi.clamp(min=1e-4) / 2).tanh() / (2 * xi.clamp(min=1e-4)))
        half = torch.where(is_observed, y, 0.5) - 0.5
        offset = half.square() / (2 * weight) + weight * xi.square() / 2 - xi / 2 - torch.nn.functional.softplus(-xi)
        return Observations(half / weight, weight * is_observed, (offset * is_observed).sum(1))

    def distribution(self, functions: Tensor) -> TorchDistribution:
        """The distribution of labels ``(..., F)``."""
        return dist.Bernoulli(logits=functions).to_event(1)


class _CurvatureBound(LabelLikelihood):
    r"""Likelihoods with a Taylor series of second order below them, as :math:`-\nabla^2 \log p(y \mid g) \preceq \mathrm{diag}(\kappa)`."""

    @abc.abstractmethod
    def slope(self, y: Tensor, point: Tensor) -> Tensor:
        """Derivative of the log probability of complete data at a point ``(N, F)``."""

    @abc.abstractmethod
    def curvature(self, y: Tensor) -> Tensor | None:
        r"""The bounds :math:`\kappa` ``(N, F)``; ``None`` where all are the inverse of :attr:`noise`."""

    def best_point(self, first: Tensor, second: Tensor | None) -> Tensor:
        """The point ``(N, F)`` at which the bound is tightest: the functions' means."""
        return first

    def bound(self, y: Tensor, point: Tensor) -> Observations:
        """The quadratic bound of data ``(N, D)`` at a point ``(N, F)``."""
        is_observed = ~y.isnan()
        complete = torch.where(is_observed, y, 0.0)
        slope, curvature = self.slope(complete, point), self.curvature(complete)
        observed = is_observed.to(point).expand_as(point)
        if curvature is None:
            step, gain = self.noise * slope, self.noise * slope.square() / 2
            weights = None if bool(is_observed.all()) else observed
        else:
            step, gain, weights = slope / curvature, slope.square() / (2 * curvature), curvature * observed
        return Observations(point + step, weights, self.log_prob(y, point) + (gain * observed).sum(1))


class CategoricalLabels(_CurvatureBound):
    r"""One label per data point, with :math:`p(y = k \mid g) \propto e^{g_k}`.

    Labels are class numbers from 0 on, and the view has one column. The Hessian of the log normaliser is at most half the identity
    (Böhning, "Multinomial logistic regression algorithm", 1992). So the view costs as much as a Gaussian one with as many outputs as
    classes.

    Example:
        >>> model = SpikeSlabMRD(20, [5, 1], 3, likelihood=["gaussian", CategoricalLabels(4)])  # the second view: classes 0 to 3, NaN

    Args:
        num_classes: number of classes, at least 2.

    Raises:
        ValueError: for fewer than two classes.
    """

    noise = 2.0

    def __init__(self, num_classes: int) -> None:
        self.num_classes = check_count("num_classes", num_classes, least=2)

    def num_functions(self, num_observed: int) -> int:
        """The number of classes.

        Raises:
            ValueError: if the view has more than one column.
        """
        if num_observed != 1:
            raise ValueError(f"a view of categorical labels has one column of class numbers; got num_observed={num_observed}")
        return self.num_classes

    def check(self, y: Tensor, view: int) -> None:
        """Raises ``ValueError`` for data ``(N, 1)`` outside the likelihood's support; NaN is missing."""
        observed = y[~y.isnan()]
        if not bool(((observed >= 0) & (observed < self.num_classes) & (observed == observed.round())).all()):
            raise ValueError(
                f"view {view} has categorical labels: its data must be class numbers 0 .. {self.num_classes - 1}, or NaN; got {_range(y)}"
            )

    def base(self, y: Tensor) -> Tensor:
        """Log frequencies of the classes, with a data point of each added."""
        observed = y[~y.isnan()].long()
        return ((torch.bincount(observed, minlength=self.num_classes) + 1.0) / (len(observed) + self.num_classes)).log().to(y)

    def slope(self, y: Tensor, point: Tensor) -> Tensor:
        """Derivative of the log probability of complete data at a point ``(N, F)``."""
        hot: Tensor = torch.nn.functional.one_hot(y[:, 0].long(), self.num_classes)
        return hot - point.softmax(-1)

    def curvature(self, y: Tensor) -> Tensor | None:
        """Returns ``None``: the curvature is one half everywhere."""
        return None

    def response(self, loc: Tensor, variance: Tensor) -> Tensor:
        """Expected class probabilities ``(N, F)`` by quasi Monte Carlo, always the same."""
        uniform = torch.quasirandom.SobolEngine(self.num_classes, scramble=True, seed=0).draw(512, dtype=torch.float64)
        normal = torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12)).to(loc)
        total = torch.zeros_like(loc)
        for draw in normal:
            total += (loc + variance.sqrt() * draw).softmax(-1)
        return total / len(normal)

    def distribution(self, functions: Tensor) -> TorchDistribution:
        """The distribution of class numbers ``(..., 1)``."""
        return dist.Categorical(logits=functions.unsqueeze(-2)).to_event(1)

    def as_numbers(self, y: Tensor) -> Tensor:
        """Returns one-hot labels, NaN where missing."""
        hot = torch.nn.functional.one_hot(y[:, 0].nan_to_num(0.0).long(), self.num_classes).to(y)
        return hot.masked_fill(y.isnan(), torch.nan)


class PoissonCounts(_CurvatureBound, torch.nn.Module):
    r"""Counts: :math:`y \sim \mathrm{Poisson}(u \log(1 + e^g))`; the curvature is at most :math:`u/4 + 0.17 y`.

    The unit :math:`u` of each column is the mean of its data, at least one, once there are data. In the unit of single counts, the bound
    of large ones would be so loose that nothing is learned from them. Views keep copies with units of their own:
    ``model.views[c].likelihood``.

    Example:
        >>> model = SpikeSlabMRD(20, [5, 2], 3, likelihood=["gaussian", PoissonCounts()])  # the second view: counts, NaN

    Reference:
        Seeger and Bouchard, "Fast variational Bayesian inference for non-conjugate matrix factorization models" (2012).
    """

    unit: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("unit", torch.ones((), dtype=torch.float64))

    def check(self, y: Tensor, view: int) -> None:
        """Raises ``ValueError`` for data ``(N, D)`` outside the likelihood's support; NaN is missing."""
        observed = y[~y.isnan()]
        if not bool(((observed >= 0) & (observed == observed.round())).all()):
            raise ValueError(f"view {view} has a Poisson likelihood: its data must be counts, or NaN where missing; got {_range(y)}")

    def base(self, y: Tensor) -> Tensor:
        """Functions at which each column's rate is its mean, plus half."""
        mean = (y.double().nansum(0) + 0.5) / ((~y.isnan()).sum(0) + 1)
        self.unit = mean.clamp(min=1.0)
        rate = mean / self.unit
        return rate + (-torch.expm1(-rate)).log()

    def slope(self, y: Tensor, point: Tensor) -> Tensor:
        """Derivative of the log probability of complete data at a point ``(N, F)``."""
        return (y / _rate(point) - self.unit) * point.sigmoid()

    def curvature(self, y: Tensor) -> Tensor | None:
        """The bounds on the curvature ``(N, F)``."""
        return 0.25 * self.unit + 0.17 * y

    def distribution(self, functions: Tensor) -> TorchDistribution:
        """The distribution of counts ``(..., F)``."""
        return dist.Poisson(self.unit * _rate(functions)).to_event(1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Before there are data, one unit is that of all columns. States of earlier versions have none.
        self.unit = state_dict.setdefault(f"{prefix}unit", torch.ones_like(self.unit)).to(self.unit, copy=True)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _range(y: Tensor) -> str:
    observed = y[~y.isnan()]
    return f"numbers from {float(observed.min()):g} to {float(observed.max()):g}"


def _rate(functions: Tensor) -> Tensor:
    rate: Tensor = torch.nn.functional.softplus(functions)
    return rate.clamp(min=torch.finfo(rate.dtype).tiny)


KernelSpec = str | kernels.Kernel | Callable[[], kernels.Kernel]


def make_kernel(kernel: KernelSpec, num_latents: int, like: Tensor) -> kernels.Kernel:
    """Returns a kernel of ``Q`` latents by name."""
    refuse_foreign_kernel(kernel)
    if isinstance(kernel, kernels.Kernel):
        kernel = kernel.to(like)
        check_kernel(kernel, torch.randn(50, num_latents, generator=torch.Generator().manual_seed(0)).to(like))
        return kernel
    if callable(kernel):
        return make_kernel(kernel(), num_latents, like)
    if not isinstance(kernel, str):
        raise TypeError(f"kernel must be 'rbf', 'linear', a kernel of pyro.contrib.gp.kernels or a function that makes one; got {kernel!r}")
    if kernel == "rbf":
        return kernels.RBF(num_latents, like.new_ones(()), like.new_full((num_latents,), num_latents**0.5))
    if kernel == "linear":
        return LinearARD(num_latents, like.new_full((num_latents,), 1 / num_latents))
    raise ValueError(f"kernel must be 'rbf', 'linear' or a kernel of pyro.contrib.gp.kernels; got {kernel!r}")


def kernel_weights(kernel: kernels.Kernel, num_latents: int) -> Tensor:
    r"""Each latent's weight: linear, :math:`1 / \ell^2`, or one, ``(Q,)``."""
    if isinstance(kernel, LinearARD | kernels.Linear):
        weight = torch.as_tensor(kernel.variance)
    elif isinstance(kernel, kernels.Isotropy):
        weight = torch.as_tensor(kernel.lengthscale).square().reciprocal()
    else:
        return torch.ones(num_latents)
    weights = torch.zeros(num_latents, dtype=weight.dtype, device=weight.device)
    weights[kernel.active_dims] = weight.detach().expand(len(kernel.active_dims))
    return weights


LikelihoodSpec = str | LabelLikelihood | None


class View(UniqueModule):
    r"""Gaussian process from ``Q`` latents to a view's ``D`` outputs.

    Attributes:
        kernel: the covariance function of the (switched) latents.
        num_functions: number of latent functions ``F``: ``D``, or the number of classes.
        inducing: inducing inputs, ``(M, Q)``.
        noise: noise variance; of labels, that of the pseudo-targets of weight one.
        center: what is taken off the outputs, or off the functions of labels, ``(F,)``. The data's mean after initialisation.
        point: where the local bounds of labels touch, ``(N, F)``. Only if collapsed, else it follows from the posterior.
        mean: means of the whitened inducing variables, ``(M, F)``. Only if not collapsed.
        scale_tril: Cholesky factor of their common covariance, ``(M, M)``. Only if not collapsed.
    """

    noise: Tensor
    inducing: Tensor
    center: Tensor
    point: Tensor
    mean: Tensor
    scale_tril: Tensor

    def __init__(
        self,
        num_observed: int,
        kernel: kernels.Kernel,
        inducing: Tensor,
        num_data: int,
        *,
        likelihood: LabelLikelihood | None = None,
        collapsed: bool = True,
        trainable: bool = True,
        expectation: Expectation | None = None,
    ) -> None:
        super().__init__()
        self.num_observed, self.likelihood, self.collapsed, self.expectation = num_observed, likelihood, collapsed, expectation
        self.num_functions = num_observed if likelihood is None else likelihood.num_functions(num_observed)
        self.kernel = kernel
        if likelihood is None:
            self.noise = PyroParam(inducing.new_full((), 0.1), constraints.positive)  # type: ignore[assignment]
        else:
            self.register_buffer("noise", inducing.new_full((), likelihood.noise))
        if trainable:
            self.inducing = PyroParam(inducing, constraints.real)  # type: ignore[assignment]
        else:
            self.register_buffer("inducing", inducing)
        self.register_buffer("center", inducing.new_zeros(self.num_functions))
        if likelihood is not None and collapsed:
            self.point = PyroParam(inducing.new_zeros(num_data, self.num_functions).double(), constraints.real)  # type: ignore[assignment]
        if not collapsed:
            self.make_explicit()

    def make_explicit(self) -> None:
        """Gives the inducing variables an explicit posterior, initialised by their prior."""
        if self.collapsed and self.likelihood is not None:
            del self.point
        self.collapsed = False
        inducing = self.inducing.detach()
        mean, eye = inducing.new_zeros(len(inducing), self.num_functions), torch.eye(len(inducing)).to(inducing)
        self.mean = PyroParam(mean, constraints.real)  # type: ignore[assignment]
        self.scale_tril = PyroParam(eye, constraints.lower_cholesky)  # type: ignore[assignment]

    def cholesky(self) -> Tensor:
        """The factor of :math:`K_{uu}`, slightly raised, in float64."""
        return inducing_cholesky(evaluate(self.kernel, self.inducing.double()).double())

    def check_labels(self, y: Tensor, number: int) -> None:
        """Checks that the data ``(N, D)`` suit this view's likelihood."""
        if self.likelihood is not None:
            self.likelihood.check(as_signed(y), number)

    def observations(self, y: Tensor, point: Tensor | None = None) -> Observations:
        """Centred outputs ``(N, D)``, or pseudo-targets ``(N, F)`` of labels' bound."""
        if self.likelihood is None:
            return Observations.from_outputs(y - self.center)
        assert point is not None
        observations = self.likelihood.bound(y.double(), point.double())
        return Observations(observations.values - self.center.double(), observations.weights, observations.offset)

    def statistics(self, inputs: SpikeSlabInputs, per_datum: bool = False) -> PsiStatistics:
        """Psi statistics in float64: those of float32 are hardly positive definite."""
        double: dict[str, Any] = {name: value if value is None else value.double() for name, value in vars(inputs).items()}
        exact = SpikeSlabInputs(**double, validate_args=False)
        statistics = psi_statistics(self.kernel, exact, self.inducing.double(), per_datum=per_datum, expectation=self.expectation)
        return PsiStatistics(*(value.double() for value in statistics))

    def optimal(self, inputs: SpikeSlabInputs, y: Tensor) -> tuple[Tensor, InducingPosterior]:
        """Returns the collapsed bound of all data, and its optimal posterior."""
        point = None if self.likelihood is None else self.point
        is_observed = ~y.isnan().all(1)
        if bool(is_observed.any()) and not bool(is_observed.all()):
            # Data points without this view have no part in it.
            inputs, y, point = inputs.rows(is_observed), y[is_observed], None if point is None else point[is_observed]
        data = self.observations(y, point)
        return collapsed_bound(self.statistics(inputs, data.weights is not None), self.cholesky(), data, self.noise.double())

    def explicit(self) -> InducingPosterior:
        """The Gaussian posterior of the inducing variables that is optimised along."""
        root = self.scale_tril.double()
        return InducingPosterior(self.cholesky(), self.mean.double(), root @ root.mT)

    def data_term(self, inputs: SpikeSlabInputs, y: Tensor, scale: float = 1.0, share: float = 1.0) -> Tensor:
        """The scaled expected log likelihood less a share of the divergence."""
        if self.collapsed:
            return self.optimal(inputs, y)[0]
        posterior = self.explicit()
        # Of a minibatch of several processes, this one may have no data point.
        expected = self.log_likelihood(inputs, y, posterior).sum() if len(y) else posterior.mean.new_zeros(())
        return scale * expected - share * divergence(posterior, self.scale_tril.double())

    def log_likelihood(self, inputs: SpikeSlabInputs, y: Tensor, posterior: InducingPosterior, per_datum: bool = False) -> Tensor:
        """The expected log likelihood of outputs, or their sum where cheaper."""
        data = self.observations(y, None if self.likelihood is None else self.best_point(inputs, posterior))
        psi = self.statistics(inputs, per_datum or data.weights is not None)
        return expected_log_likelihood(psi, posterior, data, self.noise.double())

    @torch.no_grad()
    def best_point(self, inputs: SpikeSlabInputs, posterior: InducingPosterior) -> Tensor:
        """Points ``(N, F)`` where labels' bounds are tightest, without derivative."""
        assert self.likelihood is not None
        # A copy: what it remembers of itself must not be remembered without gradients.
        posterior = dataclasses.replace(posterior)
        if not self.likelihood.uses_square:
            return self.likelihood.best_point(self.statistics(inputs).psi1 @ posterior.weights + self.center, None)
        points = []
        for rows in row_slices(len(inputs), 64 * len(self.inducing) ** 2):
            psi = self.statistics(inputs.rows(rows), per_datum=True)
            moments = predict(psi, posterior, self.noise)
            first = moments.mean + self.center
            points.append(self.likelihood.best_point(first, first.square() + moments.variance))
        return torch.cat(points)

    def local_point(self, inputs: SpikeSlabInputs, index: Tensor | slice) -> Tensor | None:
        """Where the local bounds of some data points touch."""
        if self.likelihood is None:
            return None
        return self.point[index] if self.collapsed else self.best_point(inputs, self.explicit())

    @torch.no_grad()
    def tighten(self, inputs: SpikeSlabInputs, y: Tensor) -> None:
        """Optimises the labels' local bounds at the present posterior."""
        if self.likelihood is not None and self.collapsed:
            self.point = self.best_point(inputs, self.optimal(inputs, y)[1])

    # --- inside a Pyro program: switched latents x (*, N, Q), whitened inducing variables ---

    def observe(self, name: str, x: Tensor, whitened: Tensor, y: Tensor, point: Tensor | None) -> Tensor:
        """Conditions on outputs at ``y_<name>``, with the factor ``left_<name>``."""
        mean, variance = self._conditional(x, whitened)
        data, noise = self.observations(y, point), self.noise.double()
        pyro.factor(f"left_{name}", -data.counts * variance / (2 * noise))
        if data.offset is not None:
            pyro.factor(f"y_{name}", data.offset - ((data.values - mean).square() * data.all_weights).sum(-1) / (2 * noise))
            return y
        return pyro.sample(f"y_{name}", dist.Normal(mean, noise.sqrt()).mask(data.all_weights.bool()).to_event(1), obs=data.values)

    def generate(self, name: str, x: Tensor, whitened: Tensor) -> Tensor:
        """Samples outputs at ``y_<name>``, or labels' functions at ``f_<name>``."""
        mean, variance = self._conditional(x, whitened)
        variance = variance.clamp(min=0).unsqueeze(-1)
        if self.likelihood is None:
            return pyro.sample(f"y_{name}", dist.Normal(mean + self.center, (self.noise.double() + variance).sqrt()).to_event(1))
        functions = pyro.sample(f"f_{name}", dist.Normal(mean + self.center, (variance + 1e-12).sqrt()).to_event(1))
        return pyro.sample(f"y_{name}", self.likelihood.distribution(functions))

    def _conditional(self, x: Tensor, whitened: Tensor) -> tuple[Tensor, Tensor]:
        """Means ``(*, N, F)`` and variances ``(*, N)`` of the functions given the inducing variables."""
        # Left of the data there may be dimensions of samples, which kernels do not know of.
        flat = x.reshape(-1, x.shape[-1])
        cross = torch.linalg.solve_triangular(
            self.cholesky(), evaluate(self.kernel, self.inducing.double(), flat.double()).double(), upper=False
        )
        cross = cross.mT.reshape(*x.shape[:-1], -1)
        mean = (whitened @ cross.unsqueeze(-1)).squeeze(-1)
        return mean, evaluate(self.kernel, flat, diag=True).double().reshape(x.shape[:-1]) - cross.square().sum(-1)


def make_views(
    kernel: KernelSpec | Sequence[KernelSpec],
    likelihood: LikelihoodSpec | Sequence[LikelihoodSpec],
    num_observed: Sequence[int],
    latents: Tensor,
    num_inducing: int,
    collapsed: bool,
    expectation: Expectation | None,
) -> list[View]:
    """A view for each number of outputs, with at most ``num_inducing`` inputs."""
    if isinstance(kernel, Sequence) and not isinstance(kernel, str):
        specs: list[KernelSpec] = list(kernel)
    else:
        # Views have kernels of their own: one that is given for all of them is copied.
        specs = [kernel, *(copy.deepcopy(kernel) for _ in num_observed[1:])]
    if len(specs) != len(num_observed):
        raise ValueError(f"kernel must be one kernel or one for each of the {len(num_observed)} views; got {len(specs)}")
    is_one = likelihood is None or isinstance(likelihood, str | LabelLikelihood)
    likelihoods = [likelihood] * len(num_observed) if is_one else list(likelihood)  # type: ignore[arg-type]
    if len(likelihoods) != len(num_observed):
        raise ValueError(f"likelihood must be one or one for each of the {len(num_observed)} views; got {len(likelihoods)}")
    views = []
    for outputs, spec, labels in zip(num_observed, specs, map(make_likelihood, likelihoods), strict=True):
        own_kernel = make_kernel(spec, latents.shape[1], latents)
        is_linear = isinstance(own_kernel, LinearARD)
        rows = latents.shape[1] if is_linear else min(num_inducing, len(latents))
        make = torch.eye if is_linear else torch.randn
        inducing = make(rows, latents.shape[1], dtype=latents.dtype)
        options = {"likelihood": labels, "collapsed": collapsed, "trainable": not is_linear, "expectation": expectation}
        views.append(View(outputs, own_kernel, inducing, len(latents), **options))  # type: ignore[arg-type]
    return views


def make_likelihood(spec: object) -> LabelLikelihood | None:
    """The likelihood of a view; ``None`` for Gaussian noise."""
    named = {"gaussian": None, "bernoulli": BernoulliLabels(), "poisson": PoissonCounts()}
    if spec is None or isinstance(spec, LabelLikelihood):
        # Units of counts are those of one view.
        return copy.deepcopy(spec) if isinstance(spec, PoissonCounts) else spec
    if not isinstance(spec, str):
        raise TypeError(f"likelihood must be a name, a LabelLikelihood such as CategoricalLabels(10), or None; got {spec!r}")
    if spec not in named:
        raise ValueError(f"likelihood must be one of {', '.join(named)}, or CategoricalLabels(num_classes); got {spec!r}")
    return named[spec]
