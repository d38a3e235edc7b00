"""Splits of a data set into minibatches with active sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from pyro.contrib.gp.kernels import Kernel
from torch import Tensor

from pyro_truncated.gp.kernels.evaluation import covariance, prior_variance
from pyro_truncated.gp.pivoted_cholesky import pivoted_cholesky
from pyro_truncated.utils.arguments import check_count, check_counts, names_arguments

Schedule = int | Callable[[int], int]
Choose = Callable[[Kernel, Tensor, int], Tensor]


def split_weights(batch_size: int, num_active: int, num_data: int, like: Tensor | None = None) -> Tensor:
    r"""Returns weights ``(B,)`` that correct a plate's scale ``N / B``.

    The first data points of the batch are the active set.

    They are :math:`B/N` for the active points, which then count once. For the rest they are
    :math:`(B/N)(N-|A|)/|R|`, so that it stands for all points that are not active.

    Args:
        batch_size: number of data points in the batch, ``B``.
        num_active: size of the active set.
        num_data: number of data points in all, ``N``.
        like: has the type and device of the weights.

    Raises:
        ValueError: if the sizes are impossible, or no remaining point stands for those outside the batch.
    """
    if not 0 <= num_active <= batch_size <= num_data:
        raise ValueError(f"sizes must satisfy 0 <= num_active <= batch <= num_data; got {num_active}, {batch_size}, {num_data}")
    if num_active == batch_size < num_data:
        raise ValueError(
            f"all {batch_size} points of the batch are active, and none stands for the other {num_data - batch_size} data points; "
            "make num_active smaller than the batch"
        )
    weights = torch.ones(batch_size) if like is None else torch.ones(batch_size, dtype=like.dtype, device=like.device)
    weights *= batch_size / num_data
    if num_active < batch_size:
        weights[num_active:] *= (num_data - num_active) / (batch_size - num_active)
    return weights


@dataclasses.dataclass(frozen=True)
class Split:
    """A minibatch, active set first.

    .. note:: Where a minibatch is all data in another order, Pyro's plate takes no subsample of parameters, as those of ``AutoNormal``, and
        they would belong to other data points: index what belongs to data points by ``indices`` yourself, or take smaller minibatches.

    Example:
        >>> split = Split(torch.tensor([4, 2, 7, 1]), 2)
        >>> split.active.tolist(), split.rest.tolist()
        ([4, 2], [7, 1])

    Attributes:
        indices: positions ``(B,)`` in the data set.
        num_active: how many of them, from the first on, are the active set.
    """

    indices: Tensor
    num_active: int

    @property
    def active(self) -> Tensor:
        """Positions of the active points."""
        return self.indices[: self.num_active]

    @property
    def rest(self) -> Tensor:
        """Positions of the other points."""
        return self.indices[self.num_active :]

    def weights(self, num_data: int, like: Tensor | None = None) -> Tensor:
        """Weights ``(B,)`` that correct the scale of a plate, see :func:`split_weights`."""
        return split_weights(len(self.indices), self.num_active, num_data, like)


class UniformSplits:
    """Uniformly random active sets, as in the paper.

    An epoch is a random partition of the data; the first points of a part are active.

    A last part too small to have points beside its active set is filled up with others. The estimate of the objective is unbiased, as
    the rest is drawn evenly from the other data points.

    Example:
        >>> splits = UniformSplits(1000, 200, 50)
        >>> [len(split.active) for split in splits.epoch(0)]
        [50, 50, 50, 50, 50]

    Args:
        num_data: number of data points ``N``.
        batch_size: data points per minibatch ``B``. The last one of an epoch may hold fewer.
        num_active: size of the active set, or a function of the epoch (0, 1, ...), such as :func:`growing`.
        generator: source of randomness.

    Raises:
        ValueError: if the sizes are impossible.
    """

    @names_arguments
    def __init__(self, num_data: int, batch_size: int, num_active: Schedule, generator: torch.Generator | None = None) -> None:
        num_data, batch_size = check_counts(num_data=num_data, batch_size=batch_size)
        if batch_size > num_data:
            raise ValueError(f"batch_size must lie in 1 .. {num_data}; got {batch_size}")
        self.num_data, self.batch_size, self.num_active, self.generator = num_data, batch_size, num_active, generator
        self._size(0)

    def _size(self, epoch: int) -> int:
        size = check_count("num_active", self.num_active(epoch) if callable(self.num_active) else self.num_active, least=0)
        split_weights(self.batch_size, size, self.num_data)
        return size

    def epoch(self, number: int = 0) -> Iterator[Split]:
        """Yields the minibatches of an epoch.

        Each data point is in one of them, or in two if the last had to be filled up.
        """
        order, size = torch.randperm(self.num_data, generator=self.generator), self._size(number)
        for part in order.split(self.batch_size):
            yield Split(part if len(part) > 2 * size else torch.cat([part, order[: self.batch_size - len(part)]]), size)


def pivots(kernel: Kernel, latents: Tensor, size: int) -> Tensor:
    """Returns positions ``(size,)`` of latents that explain most prior variance.

    They are chosen by greedy pivoted Cholesky in float64.

    Where fewer explain everything but rounding errors, the first of the others fill up.
    """

    def evaluate(X: Tensor, Z: Tensor | None = None, diag: bool = False) -> Tensor:
        """The kernel with distances in float64."""
        return prior_variance(kernel, X) if diag else covariance(kernel, X, X if Z is None else Z)

    with torch.no_grad():
        found = pivoted_cholesky(evaluate, latents.detach().double(), size).pivots
    others = torch.ones(len(latents), dtype=torch.bool, device=latents.device)
    others[found] = False
    return torch.cat([found, others.nonzero().squeeze(-1)[: size - len(found)]])


def least_variance(kernel: Kernel, latents: Tensor, size: int, noise: Tensor | float | None = None, num_targets: int = 500) -> Tensor:
    r"""Returns positions ``(size,)`` of latents that leave the least predictive variance.

    They are chosen greedily, by the mean over all latents.

    With :math:`E` the posterior covariance given the points chosen so far, the next one is the
    ``j`` of largest :math:`\sum_n E_{nj}^2 / (E_{jj} + \sigma^2)`. That is the decrease of the sum
    of variances by observing it. Unlike :func:`pivots`, which takes the point of largest variance,
    this prefers points with many neighbours to outliers. Cost :math:`O(|A| N T)`, memory :math:`O(N
    T)`.

    Args:
        kernel: the kernel.
        latents: candidates ``(N, Q)``.
        size: how many to choose.
        noise: noise variance of an observation. Default: a hundredth of the mean prior variance.
        num_targets: largest number ``T`` of the candidates, evenly spaced, over which variances are summed.

    Raises:
        ValueError: if there are fewer candidates than are to be chosen.
    """
    if not 0 < size <= len(latents):
        raise ValueError(f"size must lie in 1 .. {len(latents)}, the number of candidates; got {size}")
    with torch.no_grad():
        points = latents.detach().double()
        which = torch.arange(0, len(points), -(-len(points) // num_targets), device=points.device)
        prior = covariance(kernel, points[which], points).double()
        spread = prior_variance(kernel, points).double()
        noise = 1e-2 * spread.mean() if noise is None else noise
        spread = spread + noise
        # E is never formed: it is the prior less the outer products of these rows, and the sums of squares are updated with it.
        rows = points.new_empty(size, len(points))
        squares = prior.square().sum(0)
        chosen = torch.empty(size, dtype=torch.int64, device=points.device)
        free = torch.ones(len(points), dtype=torch.bool, device=points.device)
        for step in range(size):
            best = torch.where(free, squares / spread, -1.0).argmax()
            chosen[step], free[best] = best, False
            row = covariance(kernel, points[best].unsqueeze(0), points).squeeze(0).double() - rows[:step, best] @ rows[:step]
            row = row / spread[best].sqrt()
            column = row[which]
            projection = column @ prior - (rows[:step, which] @ column) @ rows[:step]
            squares = squares - 2 * row * projection + row.square() * column.square().sum()
            rows[step] = row
            spread = (spread - row.square()).clamp(min=float(noise))
    return chosen


@names_arguments
def growing(start: int, stop: int, epochs: int) -> Callable[[int], int]:
    """A size of the active set that grows linearly, then stays.

    It goes from ``start`` to ``stop`` within a number of epochs.

    Example:
        >>> size = growing(50, 200, 10)
        >>> size(0), size(10), size(20)
        (50, 200, 200)
    """
    start, stop, epochs = check_counts(start=start, stop=stop, epochs=epochs)
    if start > stop:
        raise ValueError(f"sizes must satisfy start <= stop; got {start} and {stop}")
    return lambda epoch: start + round((stop - start) * min(1.0, epoch / epochs))
