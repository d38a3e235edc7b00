"""The Bayesian Gaussian process latent variable model whose latent dimensions are switched on and off."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.gp.uncertain.inputs import Expectation
from pyro_truncated.gplvm.spike_slab.model import SpikeSlabMRD
from pyro_truncated.gplvm.spike_slab.time_prior import TimePrior
from pyro_truncated.gplvm.spike_slab.view import LikelihoodSpec
from pyro_truncated.gplvm.spike_slab.view_kernels import KernelSpec
from pyro_truncated.utils.arguments import names_arguments


class SpikeSlabGPLVM(SpikeSlabMRD):
    r"""Gaussian process latent variable model with a switch for every latent dimension, shared by all data points.

    .. math:: b_q \sim \mathrm{Bernoulli}(\pi), \quad x_{nq} \sim \mathcal N(0, 1), \quad f_d \sim \mathcal{GP}(0, k), \quad
              y_{nd} \sim \mathcal N\left(f_d(b \circ x_n), \beta^{-1}\right)

    It is :class:`SpikeSlabMRD` with a single view; with all switches on it is the Bayesian GP-LVM. Data may be passed without a list.

    Example::

        model = SpikeSlabGPLVM(*y.shape, num_latents=5, kernel="linear")
        fit(model, y)
        model.probability                # of each dimension being in use, (1, Q)

    Args:
        num_data: number of data points ``N``.
        num_observed: number of outputs ``D``.
        num_latents: number of latent dimensions ``Q``.
        kernel: ``"rbf"``, ``"linear"``, a kernel of :mod:`pyro.contrib.gp.kernels`, or a function that makes one.
        num_inducing: inducing inputs ``M``; default: 50, at most ``N``.
        likelihood: ``"gaussian"``, ``"bernoulli"``, ``"poisson"`` or :class:`~pyro_truncated.gplvm.CategoricalLabels`.
        prior: prior probability :math:`\pi` of a switch, a number or ``(1, Q)``.
        collapsed: whether the inducing variables are integrated out at their optimal posterior, which takes all data at every step.
        expectation: how to take expectations of kernels without closed form.
        time_prior: Gaussian processes over time for the latents, see :class:`~pyro_truncated.gplvm.TimePrior`.
        dtype: floating point type of the parameters.

    Reference:
        Dai, Hensman and Lawrence, "Spike and slab Gaussian process latent variable models" (2015), section 3.
    """

    @names_arguments
    def __init__(
        self,
        num_data: int,
        num_observed: int,
        num_latents: int,
        *,
        kernel: KernelSpec = "rbf",
        num_inducing: int | None = None,
        likelihood: LikelihoodSpec = None,
        prior: float | Tensor = 0.1,
        collapsed: bool = True,
        expectation: Expectation | None = None,
        time_prior: TimePrior | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__(
            num_data,
            [num_observed],
            num_latents,
            kernel=kernel,
            num_inducing=num_inducing,
            likelihood=likelihood,
            prior=prior,
            collapsed=collapsed,
            expectation=expectation,
            time_prior=time_prior,
            dtype=dtype,
        )
