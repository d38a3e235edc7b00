"""One view of a latent space: the Gaussian process that maps latents to the outputs of this view."""

from __future__ import annotations

import copy
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
from pyro_truncated.gp.data_kernels.validity import check_kernel
from pyro_truncated.gp.kernels.evaluation import evaluate
from pyro_truncated.gp.kernels.linear_ard import LinearARD
from pyro_truncated.gp.uncertain.inputs import Expectation, SpikeSlabInputs
from pyro_truncated.gp.uncertain.psi_statistics import PsiStatistics, psi_statistics
from pyro_truncated.gplvm.spike_slab.inducing_posterior import (
    InducingPosterior,
    Observations,
    collapsed,
    divergence,
    expected_log_likelihood,
)
from pyro_truncated.utils.unique_names import UniqueModule

KernelSpec = str | kernels.Kernel | Callable[[], kernels.Kernel]


class View(UniqueModule):
    r"""Gaussian process from ``Q`` latents to the ``D`` outputs of one view, with inducing inputs and Gaussian noise.

    Args:
        num_observed: number of outputs ``D``.
        kernel: covariance function of the (switched) latents.
        inducing: inducing inputs to start from, ``(M, Q)``.
        collapsed: whether the inducing variables take their optimal posterior, which needs all data at every step; otherwise they have a
            Gaussian posterior of their own.
        trainable: whether the inducing inputs are optimised.
        expectation: how to take expectations of kernels without closed form.

    Attributes:
        kernel: the covariance function.
        inducing: inducing inputs, ``(M, Q)``.
        noise: noise variance.
        center: what is taken off the outputs, ``(D,)``; the data's mean after initialisation.
        mean: means of the whitened inducing variables, ``(M, D)``; only if not collapsed.
        scale_tril: Cholesky factor of their common covariance, ``(M, M)``; only if not collapsed.
    """

    noise: Tensor
    inducing: Tensor
    center: Tensor
    mean: Tensor
    scale_tril: Tensor

    def __init__(
        self,
        num_observed: int,
        kernel: kernels.Kernel,
        inducing: Tensor,
        *,
        collapsed: bool = True,
        trainable: bool = True,
        expectation: Expectation | None = None,
    ) -> None:
        super().__init__()
        self.num_observed, self.collapsed, self.expectation = num_observed, collapsed, expectation
        self.kernel = kernel
        self.noise = PyroParam(inducing.new_full((), 0.1), constraints.positive)  # type: ignore[assignment]
        if trainable:
            self.inducing = PyroParam(inducing, constraints.real)  # type: ignore[assignment]
        else:
            self.register_buffer("inducing", inducing)
        self.register_buffer("center", inducing.new_zeros(num_observed))
        if not collapsed:
            self.make_explicit()

    def make_explicit(self) -> None:
        """Gives the inducing variables a posterior of their own, at their prior to start from."""
        self.collapsed = False
        inducing = self.inducing.detach()
        mean, eye = inducing.new_zeros(len(inducing), self.num_observed), torch.eye(len(inducing)).to(inducing)
        self.mean = PyroParam(mean, constraints.real)  # type: ignore[assignment]
        self.scale_tril = PyroParam(eye, constraints.lower_cholesky)  # type: ignore[assignment]

    def cholesky(self) -> Tensor:
        r"""Factor :math:`L` of :math:`K_{uu}` in float64; a millionth of the mean variance on the diagonal makes it exist.

        The addition is noise on the inducing variables, which leaves the bound a bound.
        """
        return inducing_cholesky(evaluate(self.kernel, self.inducing).double())

    def observations(self, y: Tensor) -> Observations:
        """Outputs ``(N, D)`` less the centre."""
        return Observations.of(y - self.center)

    def statistics(self, inputs: SpikeSlabInputs, per_datum: bool = False) -> PsiStatistics:
        """Psi statistics in float64."""
        found = psi_statistics(self.kernel, inputs, self.inducing, per_datum=per_datum, expectation=self.expectation)
        return PsiStatistics(*(value.double() for value in found))

    def optimal(self, inputs: SpikeSlabInputs, y: Tensor) -> tuple[Tensor, InducingPosterior]:
        """The collapsed bound of all data, and the posterior of the inducing variables that attains it."""
        data = self.observations(y)
        return collapsed(self.statistics(inputs, data.observed is not None), self.cholesky(), data, self.noise.double())

    def explicit(self) -> InducingPosterior:
        """The Gaussian posterior of the inducing variables that is optimised along."""
        root = self.scale_tril.double()
        return InducingPosterior(self.cholesky(), self.mean.double(), root @ root.mT)

    def data_term(self, inputs: SpikeSlabInputs, y: Tensor, scale: float = 1.0) -> Tensor:
        """Expected log likelihood, scaled up from a minibatch, less the divergence of the inducing variables."""
        if self.collapsed:
            return self.optimal(inputs, y)[0]
        posterior = self.explicit()
        data = self.observations(y)
        expected = self.log_likelihood(inputs, data, posterior).sum()
        return scale * expected - divergence(posterior, self.scale_tril.double())

    def log_likelihood(self, inputs: SpikeSlabInputs, data: Observations, posterior: InducingPosterior, per_datum: bool = False) -> Tensor:
        """Expected log likelihood of data points; their sum where that is cheaper and nothing else is asked for."""
        psi = self.statistics(inputs, per_datum or data.observed is not None)
        return expected_log_likelihood(psi, posterior, data, self.noise.double())

    def observe(self, name: str, x: Tensor, whitened: Tensor, y: Tensor | None) -> Tensor:
        """Samples outputs ``(*, N, D)``, or conditions on those given, from switched latents ``(*, N, Q)`` and whitened inducing variables.

        Inside a Pyro program: the site is ``y_<name>``, and the variance that the inducing variables leave is the factor ``left_<name>``.
        """
        # Left of the data there may be dimensions of samples, which kernels do not know of.
        flat = x.reshape(-1, x.shape[-1])
        cross = torch.linalg.solve_triangular(self.cholesky(), evaluate(self.kernel, self.inducing, flat).double(), upper=False)
        cross = cross.mT.reshape(*x.shape[:-1], -1)
        mean = (whitened @ cross.unsqueeze(-1)).squeeze(-1)
        left = evaluate(self.kernel, flat, diag=True).double().reshape(x.shape[:-1]) - cross.square().sum(-1)
        noise = self.noise.double()
        if y is None:
            spread = (noise + left.clamp(min=0)).sqrt().unsqueeze(-1)
            return pyro.sample(f"y_{name}", dist.Normal(mean + self.center, spread).to_event(1))
        data = self.observations(y)
        seen = torch.ones_like(data.values) if data.observed is None else data.observed
        pyro.factor(f"left_{name}", -data.counts * left / (2 * noise))
        return pyro.sample(f"y_{name}", dist.Normal(mean, noise.sqrt()).mask(seen.bool()).to_event(1), obs=data.values)


def make_views(
    kernel: KernelSpec | Sequence[KernelSpec],
    num_observed: Sequence[int],
    latents: Tensor,
    num_inducing: int,
    collapsed: bool,
    expectation: Expectation | None,
) -> list[View]:
    """A view for each number of outputs, on latents ``(N, Q)``, with ``num_inducing`` inducing inputs, at most ``N``.

    Raises:
        ValueError: if there is neither one kernel nor one for each view.
    """
    if isinstance(kernel, Sequence) and not isinstance(kernel, str):
        specs: list[KernelSpec] = list(kernel)
    else:
        # Views have kernels of their own: one that is given for all of them is copied.
        specs = [kernel, *(copy.deepcopy(kernel) for _ in num_observed[1:])]
    if len(specs) != len(num_observed):
        raise ValueError(f"kernel must be one kernel or one for each of the {len(num_observed)} views; got {len(specs)}")
    views = []
    for outputs, spec in zip(num_observed, specs, strict=True):
        made = make_kernel(spec, latents.shape[1], latents)
        is_linear = isinstance(made, LinearARD)
        rows = latents.shape[1] if is_linear else min(num_inducing, len(latents))
        make = torch.eye if is_linear else torch.randn
        inducing = make(rows, latents.shape[1], dtype=latents.dtype)
        views.append(View(outputs, made, inducing, collapsed=collapsed, trainable=not is_linear, expectation=expectation))
    return views


def make_kernel(kernel: KernelSpec, num_latents: int, like: Tensor) -> kernels.Kernel:
    r"""A kernel of ``Q`` latents: ``"rbf"`` with one length-scale :math:`\sqrt Q` per latent, ``"linear"`` with one weight per latent.

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
    r"""What a kernel makes of each latent, ``(Q,)``: linear weights, :math:`1 / \ell^2` for length-scales, and one for other kernels."""
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
