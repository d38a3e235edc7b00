"""One view of a latent space: its Gaussian process and kernel."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence

import pyro
import pyro.distributions as dist
import torch
from pyro.contrib.gp import kernels
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.gp.cholesky import inducing_cholesky
from pyro_truncated.gp.data_kernels.protocol import check_kernel
from pyro_truncated.gp.kernels import LinearARD, evaluate
from pyro_truncated.gp.uncertain import Expectation, PsiStatistics, SpikeSlabInputs, psi_statistics
from pyro_truncated.gplvm.spike_slab.inducing_posterior import (
    InducingPosterior,
    Observations,
    collapsed,
    divergence,
    expected_log_likelihood,
    predict,
)
from pyro_truncated.gplvm.spike_slab.label_likelihoods import BernoulliLabels, LabelLikelihood, PoissonCounts
from pyro_truncated.utils.budget import rows_per_block
from pyro_truncated.utils.parameter_store import UniqueModule

KernelSpec = str | kernels.Kernel | Callable[[], kernels.Kernel]


def make_kernel(kernel: KernelSpec, num_latents: int, like: Tensor) -> kernels.Kernel:
    r"""Returns a kernel of ``Q`` latents by name.

    ``"rbf"`` has one length-scale :math:`\sqrt Q` per latent, ``"linear"`` one weight per latent.

    Raises:
        ValueError: for an unknown name.
        TypeError: for anything but a name, a kernel or a function that makes one.
    """
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


@functools.singledispatch
def kernel_weights(kernel: kernels.Kernel, num_latents: int) -> Tensor:
    r"""Returns each latent's weight in a kernel, ``(Q,)``.

    It is a linear weight, :math:`1 / \ell^2` for length-scales, and one for other kernels.
    """
    del kernel
    return torch.ones(num_latents)


@kernel_weights.register(LinearARD)
@kernel_weights.register(kernels.Linear)
def _(kernel: kernels.Kernel, num_latents: int) -> Tensor:
    return _spread(kernel, kernel.variance, num_latents)


@kernel_weights.register(kernels.Isotropy)
def _(kernel: kernels.Kernel, num_latents: int) -> Tensor:
    return _spread(kernel, kernel.lengthscale.square().reciprocal(), num_latents)


def _spread(kernel: kernels.Kernel, weight: Tensor, num_latents: int) -> Tensor:
    """Weights of the kernel's active dimensions among all of them."""
    found = torch.zeros(num_latents, dtype=weight.dtype, device=weight.device)
    found[kernel.active_dims] = weight.detach().expand(len(kernel.active_dims))
    return found


LikelihoodSpec = str | LabelLikelihood | None


class View(UniqueModule):
    r"""Gaussian process from ``Q`` latents to a view's ``D`` outputs.

    It has inducing inputs, and Gaussian noise or labels.

    Args:
        num_observed: number of outputs ``D``.
        kernel: covariance function of the (switched) latents.
        inducing: inducing inputs to start from, ``(M, Q)``.
        num_data: number of data points ``N``.
        likelihood: that of labels or counts; ``None`` for Gaussian noise.
        collapsed: whether the inducing variables take their optimal posterior, which needs all data
            at every step. Otherwise they have a Gaussian posterior of their own.
        trainable: whether the inducing inputs are optimised.
        expectation: how to take expectations of kernels without closed form.

    Attributes:
        kernel: the covariance function.
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
        r"""Returns the factor :math:`L` of :math:`K_{uu}` in float64.

        A millionth of the mean variance is added to the diagonal.

        The addition is noise on the inducing variables, which leaves the bound a bound.
        """
        return inducing_cholesky(evaluate(self.kernel, self.inducing).double())

    def check_labels(self, y: Tensor, number: int) -> None:
        """Checks that the data ``(N, D)`` suit this view's likelihood.

        It raises ``ValueError``, with the view's ``number``.
        """
        if self.likelihood is not None:
            self.likelihood.check(y, number)

    def observations(self, y: Tensor, point: Tensor | None = None) -> Observations:
        """Returns centred outputs ``(N, D)``, or labels' pseudo-targets ``(N, F)``.

        The latter are those of the labels' bound at a point.
        """
        if self.likelihood is None:
            return Observations.of(y - self.center)
        assert point is not None
        found = self.likelihood.bound(y.double(), point.double())
        return Observations(found.values - self.center.double(), found.weights, found.offset)

    def statistics(self, inputs: SpikeSlabInputs, per_datum: bool = False) -> PsiStatistics:
        """Psi statistics in float64."""
        found = psi_statistics(self.kernel, inputs, self.inducing, per_datum=per_datum, expectation=self.expectation)
        return PsiStatistics(*(value.double() for value in found))

    def optimal(self, inputs: SpikeSlabInputs, y: Tensor) -> tuple[Tensor, InducingPosterior]:
        """Returns the collapsed bound of all data, and its optimal posterior."""
        point = None if self.likelihood is None else self.point
        is_seen = ~y.isnan().all(1)
        if bool(is_seen.any()) and not bool(is_seen.all()):
            # Data points without this view have no part in it.
            inputs, y, point = inputs.rows(is_seen), y[is_seen], None if point is None else point[is_seen]
        data = self.observations(y, point)
        return collapsed(self.statistics(inputs, data.weights is not None), self.cholesky(), data, self.noise.double())

    def explicit(self) -> InducingPosterior:
        """The Gaussian posterior of the inducing variables that is optimised along."""
        root = self.scale_tril.double()
        return InducingPosterior(self.cholesky(), self.mean.double(), root @ root.mT)

    def data_term(self, inputs: SpikeSlabInputs, y: Tensor, scale: float = 1.0, share: float = 1.0) -> Tensor:
        """Returns the expected log likelihood less the inducing variables' divergence.

        It is scaled up from a minibatch, with a share of the divergence.
        """
        if self.collapsed:
            return self.optimal(inputs, y)[0]
        posterior = self.explicit()
        # Of a minibatch of several processes, this one may have no data point.
        expected = self.log_likelihood(inputs, y, posterior).sum() if len(y) else posterior.mean.new_zeros(())
        return scale * expected - share * divergence(posterior, self.scale_tril.double())

    def log_likelihood(self, inputs: SpikeSlabInputs, y: Tensor, posterior: InducingPosterior, per_datum: bool = False) -> Tensor:
        """Returns the expected log likelihood of outputs, or their sum.

        The sum is returned where it is cheaper. For labels it is the tightest bound.
        """
        data = self.observations(y, None if self.likelihood is None else self.best_point(inputs, posterior))
        psi = self.statistics(inputs, per_datum or data.weights is not None)
        return expected_log_likelihood(psi, posterior, data, self.noise.double())

    @torch.no_grad()
    def best_point(self, inputs: SpikeSlabInputs, posterior: InducingPosterior) -> Tensor:
        """Returns the points ``(N, F)`` where labels' local bounds are tightest.

        By the envelope theorem, the gradient needs no derivative of the point.
        """
        assert self.likelihood is not None
        # A copy: what it remembers of itself must not be remembered without gradients.
        posterior = dataclasses.replace(posterior)
        if not self.likelihood.uses_square:
            return self.likelihood.best_point(self.statistics(inputs).psi1 @ posterior.weights + self.center, None)
        rows = rows_per_block(64 * len(self.inducing) ** 2)
        found = []
        for start in range(0, len(inputs), rows):
            psi = self.statistics(inputs.rows(slice(start, start + rows)), per_datum=True)
            moments = predict(psi, posterior, self.noise)
            first = moments.mean + self.center
            found.append(self.likelihood.best_point(first, first.square() + moments.variance))
        return torch.cat(found)

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
        """Conditions on outputs ``(N, D)`` at the site ``y_<name>``.

        The factor ``left_<name>`` is of the variance that ``u`` leaves.
        """
        mean, left = self._conditional(x, whitened)
        data, noise = self.observations(y, point), self.noise.double()
        pyro.factor(f"left_{name}", -data.counts * left / (2 * noise))
        if data.offset is not None:
            pyro.factor(f"y_{name}", data.offset - ((data.values - mean).square() * data.all_weights).sum(-1) / (2 * noise))
            return y
        return pyro.sample(f"y_{name}", dist.Normal(mean, noise.sqrt()).mask(data.all_weights.bool()).to_event(1), obs=data.values)

    def generate(self, name: str, x: Tensor, whitened: Tensor) -> Tensor:
        """Samples outputs ``(*, N, D)`` at the site ``y_<name>``.

        For labels it samples their functions at ``f_<name>``.
        """
        mean, left = self._conditional(x, whitened)
        left = left.clamp(min=0).unsqueeze(-1)
        if self.likelihood is None:
            return pyro.sample(f"y_{name}", dist.Normal(mean + self.center, (self.noise.double() + left).sqrt()).to_event(1))
        functions = pyro.sample(f"f_{name}", dist.Normal(mean + self.center, (left + 1e-12).sqrt()).to_event(1))
        return pyro.sample(f"y_{name}", self.likelihood.distribution(functions))

    def _conditional(self, x: Tensor, whitened: Tensor) -> tuple[Tensor, Tensor]:
        """Means ``(*, N, F)`` and variances ``(*, N)`` of the functions given the inducing variables."""
        # Left of the data there may be dimensions of samples, which kernels do not know of.
        flat = x.reshape(-1, x.shape[-1])
        cross = torch.linalg.solve_triangular(self.cholesky(), evaluate(self.kernel, self.inducing, flat).double(), upper=False)
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
    """Returns a view for each number of outputs, on latents ``(N, Q)``.

    Each has ``num_inducing`` inducing inputs, at most ``N``.

    Raises:
        ValueError: if there is neither one kernel nor one for each view, or likewise of likelihoods.
    """
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
        made = make_kernel(spec, latents.shape[1], latents)
        is_linear = isinstance(made, LinearARD)
        rows = latents.shape[1] if is_linear else min(num_inducing, len(latents))
        make = torch.eye if is_linear else torch.randn
        inducing = make(rows, latents.shape[1], dtype=latents.dtype)
        options = {"likelihood": labels, "collapsed": collapsed, "trainable": not is_linear, "expectation": expectation}
        views.append(View(outputs, made, inducing, len(latents), **options))  # type: ignore[arg-type]
    return views


def make_likelihood(spec: object) -> LabelLikelihood | None:
    """The likelihood of a view; ``None`` for Gaussian noise.

    Raises:
        ValueError: for an unknown name.
        TypeError: for anything but a name, a :class:`LabelLikelihood` or ``None``.
    """
    named = {"gaussian": None, "bernoulli": BernoulliLabels(), "poisson": PoissonCounts()}
    if spec is None or isinstance(spec, LabelLikelihood):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"likelihood must be a name, a LabelLikelihood such as CategoricalLabels(10), or None; got {spec!r}")
    if spec not in named:
        raise ValueError(f"likelihood must be one of {', '.join(named)}, or CategoricalLabels(num_classes); got {spec!r}")
    return named[spec]
