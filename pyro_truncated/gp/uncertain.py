"""Uncertain spike-and-slab inputs, and expectations of covariance matrices under them."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
from pyro.contrib.gp import kernels
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.gp.kernels import LinearARD, evaluate
from pyro_truncated.ops.mixture_products import mixture_products
from pyro_truncated.utils.arguments import check_count, check_kinds
from pyro_truncated.utils.arrays import as_tensors, takes_arrays
from pyro_truncated.utils.budget import row_slices
from pyro_truncated.utils.constraints import check_entries, finite, nonnegative_finite


@dataclasses.dataclass(frozen=True)
class SpikeSlabInputs:
    r"""Independent inputs of a kernel, each a mixture.

    .. math:: \tilde x \sim g\,\mathcal N(\mu, s) + (1 - g) \left[ (1 - r_q)\,\delta_0 + r_q\,\mathcal N(0, 1) \right]

    The last part is what a view of a multi-view model sees of a dimension that other views have not informed about.

    Example:
        >>> inputs = SpikeSlabInputs(torch.zeros(5, 2), torch.ones(5, 2), probability=torch.tensor([1.0, 0.0]))

    Args:
        validate_args: whether to look at the numbers, too; a step of training, which has computed them itself, need not.

    Attributes:
        loc: means of the slabs :math:`\mu`, ``(N, Q)``.
        variance: variances of the slabs :math:`s`, ``(N, Q)``. Zero for inputs known exactly.
        probability: probabilities of the slabs :math:`g`, ``(Q,)`` or ``(N, Q)``. ``None`` for one.
        prior_share: share :math:`r` of the rest that follows the standard normal, ``(Q,)``. ``None`` for zero.

    Raises:
        TypeError: if one of them is no tensor.
        ValueError: if the shapes do not fit, or a number is out of range.
    """

    loc: Tensor
    variance: Tensor
    probability: Tensor | None = None
    prior_share: Tensor | None = None
    validate_args: dataclasses.InitVar[bool] = True

    def __post_init__(self, validate_args: bool) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, as_tensors(value))
        if validate_args:
            check_kinds(SpikeSlabInputs.__init__, **vars(self))
        if self.loc.dim() != 2 or self.variance.shape != self.loc.shape:
            raise ValueError(f"loc and variance must have the same shape (N, Q); got {tuple(self.loc.shape)}, {tuple(self.variance.shape)}")
        rest = self.loc.shape[1:]
        if self.probability is not None and self.probability.shape not in (rest, self.loc.shape):
            raise ValueError(
                f"probability must have shape (Q,) or (N, Q), loc's {tuple(self.loc.shape)}; got {tuple(self.probability.shape)}"
            )
        if self.prior_share is not None and self.prior_share.shape != rest:
            raise ValueError(f"prior_share must have shape {tuple(rest)}, one per dimension; got {tuple(self.prior_share.shape)}")
        if validate_args:
            check_entries(finite, loc=self.loc)
            check_entries(nonnegative_finite, variance=self.variance)
            shares = {"probability": self.probability, "prior_share": self.prior_share}
            check_entries(constraints.unit_interval, **{name: share for name, share in shares.items() if share is not None})

    def __len__(self) -> int:
        return self.loc.shape[0]

    @property
    def slab(self) -> Tensor:
        """Probabilities of the slabs, ``(N, Q)``."""
        return torch.ones_like(self.loc) if self.probability is None else self.probability.expand_as(self.loc)

    def select(self, dims: list[int]) -> SpikeSlabInputs:
        """The inputs restricted to some dimensions."""
        if dims == list(range(self.loc.shape[1])):
            return self
        probability, share = (None if p is None else p[..., dims] for p in (self.probability, self.prior_share))
        return SpikeSlabInputs(self.loc[:, dims], self.variance[:, dims], probability, share, validate_args=False)

    def rows(self, index: Tensor | slice) -> SpikeSlabInputs:
        """The inputs of some data points."""
        probability = self.probability
        if probability is not None and probability.dim() == 2:
            probability = probability[index]
        return SpikeSlabInputs(self.loc[index], self.variance[index], probability, self.prior_share, validate_args=False)

    def moments(self) -> tuple[Tensor, Tensor]:
        r"""Means :math:`g \mu` and second moments :math:`g(\mu^2 + s) + (1 - g) r`, each ``(N, Q)``."""
        slab = self.slab
        second = slab * (self.loc.square() + self.variance)
        if self.prior_share is not None:
            second = second + (1 - slab) * self.prior_share
        return slab * self.loc, second


@dataclasses.dataclass(frozen=True)
class Nodes:
    r"""Points and weights with :math:`E[f(\tilde x_n)] \approx \sum_s w_{sn} f(x_{sn})`."""

    points: Tensor  # (S, N, Q)
    weights: Tensor  # (S, N)


class Expectation(abc.ABC):
    """Expectations over uncertain inputs for kernels without a closed form.

    Example:
        >>> inputs = SpikeSlabInputs(torch.randn(5, 2), torch.full((5, 2), 0.1))
        >>> kernel, inducing = pyro.contrib.gp.kernels.RBF(2), torch.randn(3, 2)
        >>> exact = psi_statistics(kernel, inputs, inducing)
        >>> nodes = psi_statistics(kernel, inputs, inducing, expectation=Quadrature(20))
        >>> torch.allclose(exact.psi1, nodes.psi1, atol=1e-4)
        True
    """

    @abc.abstractmethod
    def nodes(self, inputs: SpikeSlabInputs, row: int = 0) -> Nodes:
        """Points and weights, differentiable in everything that describes the inputs.

        Args:
            inputs: distributions of the inputs.
            row: number of the first of them in the data set, which random numbers depend on.
        """


@dataclasses.dataclass(frozen=True)
class Quadrature(Expectation):
    """Gauss-Hermite quadrature on a tensor grid, for few dimensions.

    It is exact for polynomials of degree ``2 degree - 1`` in each dimension, with ``(degree + 1) ** Q`` points.

    Example:
        >>> inputs = SpikeSlabInputs(torch.randn(5, 2), torch.full((5, 2), 0.1))
        >>> kernel, inducing = pyro.contrib.gp.kernels.RBF(2), torch.randn(3, 2)
        >>> psi = psi_statistics(kernel, inputs, inducing, expectation=Quadrature(degree=10))

    Attributes:
        degree: nodes per Gaussian and dimension.
    """

    degree: int = 20

    def __post_init__(self) -> None:
        check_count("degree", self.degree)

    def nodes(self, inputs: SpikeSlabInputs, row: int = 0) -> Nodes:
        """The grid of every data point, ``(degree + 1) ** Q`` points."""
        del row
        roots, weights = np.polynomial.hermite_e.hermegauss(self.degree)
        t, w = (torch.from_numpy(v).to(inputs.loc).reshape(-1, 1, 1) for v in (roots, weights / math.sqrt(2 * math.pi)))
        slab = inputs.slab
        rest = 1 - slab
        points = [inputs.loc + inputs.variance.sqrt() * t, torch.zeros_like(inputs.loc).unsqueeze(0)]
        shares = [slab * w, rest.unsqueeze(0)]
        if inputs.prior_share is not None:
            points.append(t.expand(-1, *inputs.loc.shape))
            shares[1] = shares[1] * (1 - inputs.prior_share)
            shares.append(rest * inputs.prior_share * w)
        point, share = torch.cat(points), torch.cat(shares)
        grid = torch.tensor(list(itertools.product(range(len(point)), repeat=inputs.loc.shape[1])), device=point.device)
        dims = torch.arange(inputs.loc.shape[1], device=point.device)
        return Nodes(point[grid, :, dims].permute(0, 2, 1), share[grid, :, dims].prod(1))


@dataclasses.dataclass(frozen=True)
class Sampling(Expectation):
    r"""Randomised quasi Monte Carlo with the same random numbers every time.

    A deterministic optimiser can therefore use it. Slabs are reparametrised, :math:`x = \mu + \sqrt s\,\epsilon`. Switches are drawn, with
    a weight of one whose gradient is unbiased in the probabilities.

    Example:
        >>> inputs = SpikeSlabInputs(torch.randn(5, 2), torch.full((5, 2), 0.1))
        >>> kernel, inducing = pyro.contrib.gp.kernels.RBF(2), torch.randn(3, 2)
        >>> psi = psi_statistics(kernel, inputs, inducing, expectation=Sampling(32, seed=1))

    Attributes:
        num_samples: samples ``S`` per data point.
        seed: fixes the random numbers; data points get shifts of their own.
    """

    num_samples: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("num_samples", self.num_samples)
        check_count("seed", self.seed, least=0)

    def nodes(self, inputs: SpikeSlabInputs, row: int = 0) -> Nodes:
        """Samples of every data point, with weights of about ``1 / S``."""
        num_dims = inputs.loc.shape[1]
        sobol = torch.quasirandom.SobolEngine(3 * num_dims, scramble=True, seed=self.seed)
        uniform = sobol.draw(self.num_samples, dtype=torch.float64)
        generator = torch.Generator().manual_seed(self.seed)
        shift = torch.rand(row + len(inputs), 3 * num_dims, generator=generator, dtype=torch.float64)[row:]
        uniform = ((uniform.unsqueeze(1) + shift) % 1.0).clamp(1e-12, 1 - 1e-12).to(inputs.loc)
        smallest = torch.finfo(inputs.loc.dtype).eps
        normal = torch.special.ndtri(uniform[..., :num_dims].clamp(smallest, 1 - smallest))
        slab = inputs.slab
        is_slab = uniform[..., num_dims : 2 * num_dims] < slab.detach()
        weight = torch.where(is_slab, slab, 1 - slab)
        other = torch.zeros_like(normal)
        if inputs.prior_share is not None:
            is_prior = uniform[..., 2 * num_dims :] < inputs.prior_share.detach()
            share = torch.where(is_prior, inputs.prior_share, 1 - inputs.prior_share)
            weight = torch.where(is_slab, weight, weight * share)
            other = torch.where(is_prior, normal, other)
        points = torch.where(is_slab, inputs.loc + inputs.variance.sqrt() * normal, other)
        return Nodes(points, (weight / weight.detach()).prod(-1) / self.num_samples)


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

    Closed forms: RBF, :class:`~pyro_truncated.gp.LinearARD` (and Pyro's ``Linear``), ``Constant`` and ``WhiteNoise``. Also sums and
    products of such kernels with numbers, constants, or each other where they act on different dimensions. For every other kernel the
    expectation is taken numerically, with the same nodes for all statistics, so that :math:`\Psi_2 - \Psi_1^\top \Psi_1` stays a
    covariance. A kernel is added by registering a function of its type with :data:`closed_form`.

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
    statistics = closed_form(kernel, inputs, inducing, per_datum)
    if statistics is None:
        # A grid grows exponentially with the dimensions, samples do not.
        rule = expectation or (Quadrature() if len(kernel.active_dims) <= 2 else Sampling(256))
        statistics = _by_nodes(kernel, inputs, inducing, per_datum, rule)
    return statistics


@functools.singledispatch
def closed_form(kernel: kernels.Kernel, inputs: SpikeSlabInputs, inducing: Tensor, per_datum: bool) -> PsiStatistics | None:
    """Psi statistics in closed form by kernel type, or ``None``.

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
    return getattr(kernel, name)


def _bumps(inputs: SpikeSlabInputs, point: Tensor, half_norm: Tensor, decay: Tensor, square: Tensor, order: int, sum_rows: bool) -> Tensor:
    """Expected products of ``order`` squared exponentials around ``point (Q, P)``."""
    is_off = _find_zero_dimensions(inputs)
    if bool(is_off.any()):
        # Where no data point moves the spikes alone are left, which no data point has a part in.
        spikes = torch.exp(-(half_norm / square.unsqueeze(-1))[is_off].sum(0))
        rest = (~is_off).nonzero().flatten()
        factors = _bumps(inputs.select(rest.tolist()), point[rest], half_norm[rest], decay[rest], square[rest], order, sum_rows)
        return factors * spikes
    spread = order * inputs.variance + square
    slab = inputs.slab
    # A spike sees the inducing points from zero; a standard normal sees them as a slab of its own does.
    base = torch.exp(-half_norm / square.unsqueeze(-1))
    if inputs.prior_share is not None:
        share = inputs.prior_share.unsqueeze(-1)
        wide = (order + square).unsqueeze(-1)
        bump = (square.unsqueeze(-1) / wide).sqrt() * torch.exp(-decay - order * point.square() / (2 * wide))
        base = (1 - share) * base + share * bump
    height = slab * (square / spread).sqrt()
    rate = order / (2 * spread)
    return mixture_products(height, inputs.loc, rate, 1 - slab, point, decay, base, sum_rows=sum_rows)


def _find_zero_dimensions(inputs: SpikeSlabInputs) -> Tensor:
    """Dimensions ``(Q,)`` that are zero for all, without a derivative."""
    probability, share = inputs.probability, inputs.prior_share
    if probability is None or probability.requires_grad or (share is not None and share.requires_grad):
        return torch.zeros(inputs.loc.shape[1], dtype=torch.bool, device=inputs.loc.device)
    is_off: Tensor = (probability == 0).expand_as(inputs.loc).all(0)
    return is_off if share is None else is_off & (share == 0)


@closed_form.register(LinearARD)
@closed_form.register(kernels.Linear)
def _(kernel: LinearARD | kernels.Linear, inputs: SpikeSlabInputs, inducing: Tensor, per_datum: bool) -> PsiStatistics:
    weight = _value(kernel, "variance").expand(len(kernel.active_dims)).to(inputs.loc)
    mean, second = inputs.select(kernel.active_dims).moments()
    weighted = inducing[:, kernel.active_dims] * weight
    psi1 = mean @ weighted.mT
    spread = second - mean.square()
    if per_datum:
        psi2 = torch.einsum("mq,nq,kq->nmk", weighted, spread, weighted) + psi1.unsqueeze(-1) * psi1.unsqueeze(-2)
    else:
        psi2 = (weighted * spread.sum(0)) @ weighted.mT + psi1.mT @ psi1
    return PsiStatistics(second @ weight, psi1, psi2)


def _constant(value: Tensor, inputs: SpikeSlabInputs, inducing: Tensor, per_datum: bool) -> PsiStatistics:
    num_data, num_inducing, value = len(inputs), len(inducing), value.to(inputs.loc)
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
    blocks = [slice(None)] if per_datum else row_slices(max(1, len(inputs)), 64 * len(inducing) ** 2)
    products = []
    for rows in blocks:
        parts = _parts(kernel, inputs.rows(rows), inducing, per_datum=True)
        if parts is None:
            return None
        a, b = parts
        psi2 = a.psi2 * b.psi2
        products.append(PsiStatistics(a.psi0 * b.psi0, a.psi1 * b.psi1, psi2 if per_datum else psi2.sum(0)))
    return _join(products, per_datum)


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
    blocks = []
    for rows in row_slices(max(1, len(inputs)), 64 * size * (len(inducing) + num_dims)):
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
        blocks.append(PsiStatistics(psi0, psi1, psi2))
    return _join(blocks, per_datum)


def _join(blocks: list[PsiStatistics], per_datum: bool) -> PsiStatistics:
    if len(blocks) == 1:
        return blocks[0]
    psi0, psi1, psi2 = zip(*blocks, strict=True)
    return PsiStatistics(torch.cat(psi0), torch.cat(psi1), torch.cat(psi2) if per_datum else torch.stack(psi2).sum(0))
