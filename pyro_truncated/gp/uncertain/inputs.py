"""Uncertain inputs with spike-and-slab distributions, and nodes to take expectations with."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math

import numpy as np
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.utils.arguments import check_count, check_kinds
from pyro_truncated.utils.arrays import as_tensors
from pyro_truncated.utils.constraints import check_entries, finite, nonnegative_finite


@dataclasses.dataclass(frozen=True)
class SpikeSlabInputs:
    r"""Independent inputs of a kernel, each a mixture.

    Its parts are a Gaussian, a point mass at zero and, where asked for, a standard normal.

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
        self._check_shapes()
        if validate_args:
            self._check_numbers()

    def _check_numbers(self) -> None:
        check_entries(finite, loc=self.loc)
        check_entries(nonnegative_finite, variance=self.variance)
        shares = {"probability": self.probability, "prior_share": self.prior_share}
        check_entries(constraints.unit_interval, **{name: share for name, share in shares.items() if share is not None})

    def _check_shapes(self) -> None:
        if self.loc.dim() != 2 or self.variance.shape != self.loc.shape:
            raise ValueError(f"loc and variance must have the same shape (N, Q); got {tuple(self.loc.shape)}, {tuple(self.variance.shape)}")
        rest = self.loc.shape[1:]
        if self.probability is not None and self.probability.shape not in (rest, self.loc.shape):
            raise ValueError(
                f"probability must have shape (Q,) or (N, Q), loc's {tuple(self.loc.shape)}; got {tuple(self.probability.shape)}"
            )
        if self.prior_share is not None and self.prior_share.shape != rest:
            raise ValueError(f"prior_share must have shape {tuple(rest)}, one per dimension; got {tuple(self.prior_share.shape)}")

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
    r"""Points and weights with :math:`E[f(\tilde x_n)] \approx \sum_s w_{sn} f(x_{sn})`.

    Attributes:
        points: ``(S, N, Q)``.
        weights: ``(S, N)``.
    """

    points: Tensor
    weights: Tensor


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
    """Gauss-Hermite quadrature on a tensor grid.

    It is exact for polynomials of degree ``2 degree - 1`` in each dimension.

    The grid has ``(degree + 1) ** Q`` points, so this is for few dimensions.

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
        """Returns the grid of every data point.

        It has ``S = (degree + 1) ** Q`` points, or ``(2 degree + 1) ** Q`` with standard normal
        parts.
        """
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

    A deterministic optimiser can therefore use it.

    The slabs are reparametrised, :math:`x = \mu + \sqrt s\,\epsilon`. Switches are drawn. The weight of
    a draw is its probability divided by the same probability without gradient. Its value is one, and
    its gradient gives an unbiased gradient in the probabilities.

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
        drawn = torch.where(is_slab, slab, 1 - slab)
        other = torch.zeros_like(normal)
        if inputs.prior_share is not None:
            is_prior = uniform[..., 2 * num_dims :] < inputs.prior_share.detach()
            share = torch.where(is_prior, inputs.prior_share, 1 - inputs.prior_share)
            drawn = torch.where(is_slab, drawn, drawn * share)
            other = torch.where(is_prior, normal, other)
        points = torch.where(is_slab, inputs.loc + inputs.variance.sqrt() * normal, other)
        return Nodes(points, (drawn / drawn.detach()).prod(-1) / self.num_samples)


def default_expectation(num_dims: int) -> Expectation:
    """Quadrature in up to two dimensions, samples in more."""
    return Quadrature() if num_dims <= 2 else Sampling(256)
