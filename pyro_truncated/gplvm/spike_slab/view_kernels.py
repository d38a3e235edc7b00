"""Kernels of latents: made by name, and what they make of each latent."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from pyro.contrib.gp import kernels
from torch import Tensor

from pyro_truncated.gp.data_kernels.validity import check_kernel
from pyro_truncated.gp.kernels.linear_ard import LinearARD

KernelSpec = str | kernels.Kernel | Callable[[], kernels.Kernel]


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
