"""Expectations of covariance matrices under uncertain spike-and-slab inputs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from pyro.contrib.gp import kernels
from torch import Tensor

from pyro_truncated.gp.kernels.evaluation import evaluate
from pyro_truncated.gp.kernels.linear_ard import LinearARD
from pyro_truncated.gp.uncertain.inputs import Expectation, SpikeSlabInputs, default_expectation
from pyro_truncated.ops.mixture_products import mixture_products
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.budget import rows_per_block


class PsiStatistics(NamedTuple):
    r"""Expected covariances of uncertain inputs :math:`\tilde x_n` and inducing inputs :math:`z_m`.

    Example:
        >>> inputs = SpikeSlabInputs(torch.randn(5, 2), torch.full((5, 2), 0.1))
        >>> kernel, inducing = pyro.contrib.gp.kernels.RBF(2), torch.randn(3, 2)
        >>> psi0, psi1, psi2 = psi_statistics(kernel, inputs, inducing)
        >>> psi0.detach()  # variances
        tensor([1., 1., 1., 1., 1.])

    Attributes:
        psi0: :math:`E[k(\tilde x_n, \tilde x_n)]`, ``(N,)``.
        psi1: :math:`E[k(\tilde x_n, z_m)]`, ``(N, M)``.
        psi2: :math:`E[k(\tilde x_n, z_m) k(\tilde x_n, z_{m'})]`, summed over the data points ``(M, M)``, or of each ``(N, M, M)``.
    """

    psi0: Tensor
    psi1: Tensor
    psi2: Tensor


@takes_arrays
def psi_statistics(
    kernel: kernels.Kernel,
    inputs: SpikeSlabInputs,
    inducing: Tensor,
    *,
    per_datum: bool = False,
    expectation: Expectation | None = None,
) -> PsiStatistics:
    r"""Psi statistics of a kernel under spike-and-slab inputs.

    They are differentiable in the kernel's parameters, the inputs and ``inducing``.

    Closed forms: RBF, :class:`~pyro_truncated.gp.LinearARD` (and Pyro's ``Linear``), ``Constant``
    and ``WhiteNoise``. Also sums and products of such kernels with numbers, constants, or each
    other where they act on different dimensions. For every other kernel the expectation is taken
    numerically, with the same nodes for all statistics, so that :math:`\Psi_2 - \Psi_1^\top \Psi_1`
    stays a covariance.

    A kernel is added by registering a function of its type with :data:`closed_form`.

    Example:
        >>> inputs = SpikeSlabInputs(torch.randn(5, 2), torch.full((5, 2), 0.1))
        >>> kernel, inducing = pyro.contrib.gp.kernels.RBF(2), torch.randn(3, 2)
        >>> psi_statistics(kernel, inputs, inducing, per_datum=True).psi2.shape
        torch.Size([5, 3, 3])

    Args:
        kernel: a kernel of :mod:`pyro.contrib.gp.kernels`.
        inputs: distributions of the inputs.
        inducing: inducing inputs ``(M, Q)``. They are not switched.
        per_datum: whether to keep the data points' ``psi2`` apart.
        expectation: how to take expectations without closed form. Default: quadrature in one or two dimensions, samples in more.

    Raises:
        ValueError: if the inducing inputs do not have the dimensions of the inputs.

    Reference:
        Dai, Hensman and Lawrence, "Spike and slab Gaussian process latent variable models" (2015), equations 17 to 21, with
        :math:`\ell_q^2` where (20) and (21) print :math:`\ell_q`.
    """
    if inducing.dim() != 2 or inducing.shape[1] != inputs.loc.shape[1]:
        raise ValueError(f"inducing inputs must have shape (M, {inputs.loc.shape[1]}); got {tuple(inducing.shape)}")
    found = closed_form(kernel, inputs, inducing, per_datum)
    if found is None:
        chosen = expectation or default_expectation(len(kernel.active_dims))
        found = _by_nodes(kernel, inputs, inducing, per_datum, chosen)
    return found


@functools.singledispatch
def closed_form(kernel: kernels.Kernel, inputs: SpikeSlabInputs, inducing: Tensor, per_datum: bool) -> PsiStatistics | None:
    """Psi statistics in closed form, dispatched on the type of the kernel.

    ``None`` where there is none.

    Example:
        >>> inputs = SpikeSlabInputs(torch.randn(5, 2), torch.full((5, 2), 0.1))
        >>> kernel, inducing = pyro.contrib.gp.kernels.RBF(2), torch.randn(3, 2)
        >>> closed_form(kernel, inputs, inducing, per_datum=False).psi2.shape
        torch.Size([3, 3])
        >>> closed_form(pyro.contrib.gp.kernels.Matern32(2), inputs, inducing, per_datum=False) is None
        True
    """
    del kernel, inputs, inducing, per_datum
    return None


@closed_form.register(kernels.RBF)
def _(kernel: kernels.RBF, inputs: SpikeSlabInputs, inducing: Tensor, per_datum: bool) -> PsiStatistics:
    inputs, inducing = inputs.select(kernel.active_dims), inducing[:, kernel.active_dims]
    amplitude, square = _value(kernel, "variance"), _value(kernel, "lengthscale").square().expand(inducing.shape[1])
    num_inducing = len(inducing)
    psi1 = amplitude * _bumps(inputs, inducing.mT, inducing.mT.square() / 2, torch.zeros_like(inducing.mT), square, 1, False)
    rows, columns = torch.tril_indices(num_inducing, num_inducing, device=inducing.device)
    first, second = inducing[rows].mT, inducing[columns].mT
    half_norm, apart = (first.square() + second.square()) / 2, (first - second).square() / (4 * square.unsqueeze(-1))
    pairs = amplitude.square() * _bumps(inputs, (first + second) / 2, half_norm, apart, square, 2, not per_datum)
    position = torch.zeros(num_inducing, num_inducing, dtype=torch.long, device=inducing.device)
    position[rows, columns] = position[columns, rows] = torch.arange(len(rows), device=inducing.device)
    return PsiStatistics(amplitude.expand(len(inputs)), psi1, pairs[..., position])


def _value(kernel: kernels.Kernel, name: str) -> Tensor:
    """Returns a parameter as the tensor that it is to a reader.

    Pyro's classes declare another type.
    """
    value: Tensor = getattr(kernel, name)
    return value


def _bumps(inputs: SpikeSlabInputs, point: Tensor, half_norm: Tensor, apart: Tensor, square: Tensor, order: int, summed: bool) -> Tensor:
    """Returns expected products of ``order`` squared exponentials over all dimensions.

    They are at inducing points around ``point (Q, P)``.
    """
    is_off = _switched_off(inputs)
    if bool(is_off.any()):
        # Where no data point moves the spikes alone are left, which no data point has a part in.
        spikes = torch.exp(-(half_norm / square.unsqueeze(-1))[is_off].sum(0))
        rest = (~is_off).nonzero().flatten()
        kept = _bumps(inputs.select(rest.tolist()), point[rest], half_norm[rest], apart[rest], square[rest], order, summed)
        return kept * spikes
    spread = order * inputs.variance + square
    slab = inputs.slab
    # A spike sees the inducing points from zero; a standard normal sees them as a slab of its own does.
    base = torch.exp(-half_norm / square.unsqueeze(-1))
    if inputs.prior_share is not None:
        share = inputs.prior_share.unsqueeze(-1)
        wide = (order + square).unsqueeze(-1)
        bump = (square.unsqueeze(-1) / wide).sqrt() * torch.exp(-apart - order * point.square() / (2 * wide))
        base = (1 - share) * base + share * bump
    height = slab * (square / spread).sqrt()
    rate = order / (2 * spread)
    return mixture_products(height, inputs.loc, rate, 1 - slab, point, apart, base, summed=summed)


def _switched_off(inputs: SpikeSlabInputs) -> Tensor:
    """Returns dimensions that are zero for all data points, ``(Q,)``.

    Only those without a derivative in the switches count.
    """
    probability, share = inputs.probability, inputs.prior_share
    if probability is None or probability.requires_grad or (share is not None and share.requires_grad):
        return torch.zeros(inputs.loc.shape[1], dtype=torch.bool, device=inputs.loc.device)
    is_off: Tensor = (probability == 0).expand_as(inputs.loc).all(0)
    return is_off if share is None else is_off & (share == 0)


def _linear(weight: Tensor, inputs: SpikeSlabInputs, inducing: Tensor, per_datum: bool) -> PsiStatistics:
    mean, second = inputs.moments()
    weighted = inducing * weight
    psi1 = mean @ weighted.mT
    spread = second - mean.square()
    if per_datum:
        psi2 = torch.einsum("mq,nq,kq->nmk", weighted, spread, weighted) + psi1.unsqueeze(-1) * psi1.unsqueeze(-2)
    else:
        psi2 = (weighted * spread.sum(0)) @ weighted.mT + psi1.mT @ psi1
    return PsiStatistics(second @ weight, psi1, psi2)


@closed_form.register(LinearARD)
@closed_form.register(kernels.Linear)
def _(kernel: LinearARD | kernels.Linear, inputs: SpikeSlabInputs, inducing: Tensor, per_datum: bool) -> PsiStatistics:
    weight = _value(kernel, "variance").expand(len(kernel.active_dims))
    return _linear(weight, inputs.select(kernel.active_dims), inducing[:, kernel.active_dims], per_datum)


def _constant(value: Tensor, inputs: SpikeSlabInputs, inducing: Tensor, per_datum: bool) -> PsiStatistics:
    num_data, num_inducing = len(inputs), len(inducing)
    psi1 = value.expand(num_data, num_inducing)
    psi2 = value.square() * (1 if per_datum else num_data)
    shape = ((num_data,) if per_datum else ()) + (num_inducing, num_inducing)
    return PsiStatistics(value.expand(num_data), psi1, psi2.expand(shape))


@closed_form.register(kernels.Constant)
def _(kernel: kernels.Constant, inputs: SpikeSlabInputs, inducing: Tensor, per_datum: bool) -> PsiStatistics:
    return _constant(_value(kernel, "variance"), inputs, inducing, per_datum)


@closed_form.register(kernels.WhiteNoise)
def _(kernel: kernels.WhiteNoise, inputs: SpikeSlabInputs, inducing: Tensor, per_datum: bool) -> PsiStatistics:
    nothing = _constant(torch.zeros_like(_value(kernel, "variance")), inputs, inducing, per_datum)
    return nothing._replace(psi0=_value(kernel, "variance").expand(len(inputs)))


@closed_form.register(kernels.Sum)
def _(kernel: kernels.Sum, inputs: SpikeSlabInputs, inducing: Tensor, per_datum: bool) -> PsiStatistics | None:
    parts = _parts(kernel, inputs, inducing, per_datum)
    if parts is None:
        return None
    a, b = parts
    # Independent dimensions: the expectation of a product is the product of expectations.
    cross = a.psi1.unsqueeze(-1) * b.psi1.unsqueeze(-2) if per_datum else a.psi1.mT @ b.psi1
    return PsiStatistics(a.psi0 + b.psi0, a.psi1 + b.psi1, a.psi2 + b.psi2 + cross + cross.mT)


@closed_form.register(kernels.Product)
def _(kernel: kernels.Product, inputs: SpikeSlabInputs, inducing: Tensor, per_datum: bool) -> PsiStatistics | None:
    blocks = [slice(None)] if per_datum else _row_blocks(inputs, len(inducing) ** 2 * 4)
    found = []
    for rows in blocks:
        parts = _parts(kernel, inputs.rows(rows), inducing, per_datum=True)
        if parts is None:
            return None
        a, b = parts
        psi2 = a.psi2 * b.psi2
        found.append(PsiStatistics(a.psi0 * b.psi0, a.psi1 * b.psi1, psi2 if per_datum else psi2.sum(0)))
    return _join(found, per_datum)


def _parts(
    kernel: kernels.Combination, inputs: SpikeSlabInputs, inducing: Tensor, per_datum: bool
) -> tuple[PsiStatistics, PsiStatistics] | None:
    """Returns statistics of a combination's parts, if independent and closed-form."""
    if not isinstance(kernel.kern1, kernels.Kernel):
        number = inputs.loc.new_tensor(kernel.kern1)
        a = closed_form(kernel.kern0, inputs, inducing, per_datum)
        return None if a is None else (a, _constant(number, inputs, inducing, per_datum))
    both = (kernel.kern0, kernel.kern1)
    is_constant = any(isinstance(part, kernels.Constant | kernels.WhiteNoise) for part in both)
    if not is_constant and set(both[0].active_dims) & set(both[1].active_dims):
        return None
    a, b = (closed_form(part, inputs, inducing, per_datum) for part in both)
    return None if a is None or b is None else (a, b)


def _by_nodes(
    kernel: kernels.Kernel, inputs: SpikeSlabInputs, inducing: Tensor, per_datum: bool, expectation: Expectation
) -> PsiStatistics:
    """Psi statistics as weighted sums over nodes, in blocks of data points."""
    num_dims = inputs.loc.shape[1]
    size = len(expectation.nodes(inputs.rows(slice(0, 1)).select(kernel.active_dims)).weights)
    found = []
    for rows in _row_blocks(inputs, 4 * size * (len(inducing) + num_dims)):
        part = inputs.rows(rows)
        nodes = expectation.nodes(part.select(kernel.active_dims), rows.start)
        points = nodes.points
        if len(kernel.active_dims) < num_dims:
            dims = torch.tensor(kernel.active_dims, device=points.device)
            points = points.new_zeros(*points.shape[:2], num_dims).index_copy(2, dims, points)
        flat = points.reshape(-1, num_dims)
        cross = evaluate(kernel, flat, inducing).reshape(*points.shape[:2], -1)
        weights = nodes.weights
        psi0 = (weights * evaluate(kernel, flat, diag=True).reshape(points.shape[:2])).sum(0)
        psi1 = torch.einsum("sn,snm->nm", weights, cross)
        psi2 = torch.einsum("snm,snk->nmk" if per_datum else "snm,snk->mk", weights.unsqueeze(-1) * cross, cross)
        found.append(PsiStatistics(psi0, psi1, psi2))
    return _join(found, per_datum)


def _row_blocks(inputs: SpikeSlabInputs, entries_per_row: int) -> list[slice]:
    rows = rows_per_block(16 * entries_per_row)
    return [slice(start, start + rows) for start in range(0, max(1, len(inputs)), rows)]


def _join(found: list[PsiStatistics], per_datum: bool) -> PsiStatistics:
    if len(found) == 1:
        return found[0]
    psi0, psi1, psi2 = zip(*found, strict=True)
    return PsiStatistics(torch.cat(psi0), torch.cat(psi1), torch.cat(psi2) if per_datum else torch.stack(psi2).sum(0))
