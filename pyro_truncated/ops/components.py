"""Sums, products and distances of data points and the components of mixtures."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pyro_truncated.ops.backend import are_differentiated, backend, use_backend
from pyro_truncated.ops.deferred_checks import cholesky, raise_if
from pyro_truncated.utils.arguments import check_count
from pyro_truncated.utils.budget import current_budget, rows_per_block


def component_sums(component: Tensor, weight: Tensor, rows: Tensor, number: int) -> Tensor:
    r""":math:`\sum_n r_{nk} x_n` for all components ``k``, in float64; differentiable in weights and rows.

    Example:
        >>> component_sums(torch.tensor([[1], [0], [1]]), torch.ones(3, 1), torch.tensor([[1.0], [2.0], [3.0]]), 2).tolist()
        [[2.0], [4.0]]

    Args:
        component: which components a data point has, integers from 0 to ``K - 1``, ``(N, S)``.
        weight: with which weights, ``(N, S)``.
        rows: ``(N, D)``.
        number: how many components ``K``.

    Returns:
        ``(K, D)``; the order of the sums does not depend on the number of threads.

    Raises:
        ValueError: if shapes do not fit, the number is below 1, or there are other components.
    """
    number = check_count("number", number)
    component = check_components(component, weight, rows, number)
    rows, total = rows.double(), rows.new_zeros(number, rows.shape[1], dtype=torch.float64)
    for own, share in zip(component.mT, weight.double().mT, strict=True):
        total.index_add_(0, own, share.unsqueeze(-1) * rows)
    return total


def check_components(component: Tensor, weight: Tensor, rows: Tensor, number: int) -> Tensor:
    """Checks components ``(N, S)``, weights and rows ``(N, D)``; returns 64-bit components."""
    if component.dim() != 2 or component.shape != weight.shape or rows.dim() != 2 or len(rows) != len(component):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (component, weight, rows))
        raise ValueError(f"component and weight must have shape (N, S) and rows (N, D); got {shapes}")
    component = as_integers(component)
    check_below(component, number)
    return component


def as_integers(component: Tensor) -> Tensor:
    """Components in 64 bits, as indices must be."""
    if component.is_floating_point() or component.is_complex() or component.dtype == torch.bool:
        raise ValueError(f"component must hold integers; got {component.dtype}")
    return component.long()


def check_below(component: Tensor, number: int) -> None:
    """Refuses components that are negative, or not below the number."""
    if component.numel():
        lowest, highest = component.aminmax()
        is_outside = (lowest < 0) | (highest >= number)
        raise_if(is_outside, lambda: f"component must be from 0 to {number - 1}; got {int(lowest)} to {int(highest)}")


# What a few temporaries of so many bytes hold stays in a processor's cache.
_CACHED = 2**22


@dataclasses.dataclass(frozen=True)
class GroupBlocks:
    """Entries sorted by group, in blocks of one group each.

    The last block of a group is filled up with other entries, whose results are dropped. On a device there are as many blocks as there can
    be, as counting them would wait.

    Example:
        >>> from pyro_truncated.ops.components import GroupBlocks
        >>> grouped = GroupBlocks.from_groups(torch.tensor([2, 0, 2]), 3)
        >>> grouped.group.tolist()
        [0, 2]
        >>> grouped.gather([grouped.group.unsqueeze(1).expand_as(grouped.entry)]).tolist()
        [2, 0, 2]
    """

    group: Tensor  # of every block, (B,)
    entry: Tensor  # which entries a block holds, (B, T)
    is_own: Tensor  # which of them belong to the block's group, (B, T)
    place: Tensor  # where in the flattened table of blocks every entry is, (E,)

    @classmethod
    def from_groups(cls, group: Tensor, num_groups: int) -> GroupBlocks:
        """The entries of the groups ``(E,)``, numbers below ``num_groups``."""
        size = group.new_zeros(num_groups).index_add_(0, group, torch.ones_like(group))
        order = group.argsort(stable=True)
        # Blocks this long keep a matrix busy; longer ones hold more padding.
        length = min(256, max(8, len(group) // (2 * max(1, num_groups))))
        count = (size + length - 1) // length
        last_block = count.cumsum(0)
        most = int(last_block[-1]) if group.is_cpu else min(len(group), len(group) // length + num_groups)
        block = torch.searchsorted(last_block, torch.arange(most, device=group.device), right=True).clamp_(max=num_groups - 1)
        first_block, first = last_block - count, size.cumsum(0) - size
        start = length * (torch.arange(len(block), device=group.device) - first_block[block])
        within = start.unsqueeze(1) + torch.arange(length, device=group.device)
        entry = order[(first[block].unsqueeze(1) + within).clamp_(max=max(0, len(group) - 1))]
        place = torch.empty_like(group)
        place[order] = torch.arange(len(group), device=group.device) + (length * first_block - first)[group[order]]
        return cls(block, entry, within < size[block].unsqueeze(1), place)

    def parts(self, bytes_per_entry: int) -> Iterator[GroupBlocks]:
        """Yields blocks whose entries stay in the cache and the memory budget."""
        per_block = bytes_per_entry * self.entry.shape[1]
        rows = rows_per_block(per_block)
        if self.entry.is_cpu:
            rows = min(rows, rows_per_block(per_block, _CACHED))
        for group, entry, is_own in zip(self.group.split(rows), self.entry.split(rows), self.is_own.split(rows), strict=True):
            yield GroupBlocks(group, entry, is_own, self.place)

    def gather(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the entries' values ``(E, ...)`` from parts ``(B, T, ...)``."""
        return torch.cat(list(values)).flatten(0, 1)[self.place]


def square_distances(rows: Tensor, row: Tensor, component: Tensor, loc: Tensor, whitening: Tensor) -> Tensor:
    r"""Square lengths :math:`|W_k^\top (x_n - \mu_k)|^2` of pairs ``row``, ``component (E,)``.

    Of data ``(N, D)``, means ``(K, D)`` and matrices :math:`W` ``(K, D, D)``; differentiable in all of them.

    Example:
        >>> from pyro_truncated.ops.components import square_distances
        >>> rows, means, whitening = torch.tensor([[3.0, 4.0]]), torch.zeros(2, 2), torch.stack([torch.eye(2), 2 * torch.eye(2)])
        >>> square_distances(rows, torch.tensor([0, 0]), torch.tensor([0, 1]), means, whitening)
        tensor([ 25., 100.])
    """
    # In more dimensions products of matrices are faster.
    with use_backend("vectorised") if are_differentiated(rows, loc, whitening) or rows.shape[1] > 32 else contextlib.nullcontext():
        distances: Tensor = backend("components", rows).square_distances(rows, row, component, loc, whitening)
    return distances


# What a few temporaries of so many bytes hold is near a processor.
_CACHED_ROWS = 2**23


HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


def kalman_gain(factor: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    r"""What densities :math:`\mathcal N(\mu_k, C_k)`, :math:`C_k = W_k W_k^\top + \sigma_k^2 I`, need of their covariances.

    Returns :math:`G_k = W_k (\sigma_k^2 I + W_k^\top W_k)^{-1}` ``(K, D, R)``, with which :math:`h = G_k^\top (y - \mu_k)` is the posterior
    mean of the directions' coefficients and :math:`C_k^{-1} = \sigma_k^{-2} (I - G_k W_k^\top)`; and :math:`\frac12 \log |C_k|`, ``(K,)``.
    """
    scaled = factor / scale[:, None, None]
    lower = cholesky(_identity(factor) + scaled.mT @ scaled)
    half_log_det = lower.diagonal(dim1=-2, dim2=-1).log().sum(-1) + factor.shape[1] * scale.log()
    return torch.cholesky_solve(scaled.mT, lower).mT / scale[:, None, None], half_log_det


def log_densities(rows: Tensor, row: Tensor, component: Tensor, loc: Tensor, factor: Tensor, scale: Tensor) -> Tensor:
    r"""Log densities :math:`\log \mathcal N(y_n; \mu_k, W_k W_k^\top + \sigma_k^2 I)` of pairs ``row``, ``component (E,)``.

    With :math:`d = y - \mu` and :math:`h` of :func:`kalman_gain` the squared distance is :math:`|d - W h|^2 / \sigma^2 + |h|^2`, least at
    :math:`h`. The difference of squares in Woodbury's identity has no digits where directions are a thousand times the noise.
    """
    size, rank = factor.shape[1:]
    gain, half_log_det = kalman_gain(factor, scale)
    constant, precision = -half_log_det - size * HALF_LOG_TWO_PI, scale**-2
    grouped, ranks = GroupBlocks.from_groups(component, len(loc)), _ranks(factor)
    # In place, where no gradient needs what is written over.
    subtract, add_product = Tensor.sub_, Tensor.baddbmm_
    if are_differentiated(rows, loc, factor, scale):
        subtract, add_product = Tensor.sub, Tensor.baddbmm
    parts = []
    for part in grouped.parts(rows.element_size() * (3 * size + 2 * rank)):
        group = part.group
        distance = subtract(rows[row[part.entry]], loc[group].unsqueeze(1))
        explained = distance @ _columns(gain, ranks, group)
        left = add_product(distance, explained, _columns(factor, ranks, group).mT, alpha=-1)
        energy = precision[group].unsqueeze(1) * left.square().sum(-1) + explained.square().sum(-1)
        parts.append(constant[group].unsqueeze(1) - 0.5 * energy)
    return grouped.gather(parts)


def posterior_means(rows: Tensor, row: Tensor, component: Tensor, loc: Tensor, factor: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    r"""Means and variances ``(E, D)`` of :math:`x \sim \mathcal N(\mu_k, W_k W_k^\top)` given :math:`y \sim \mathcal N(x, \sigma_k^2 I)`.

    Of pairs ``row``, ``component (E,)``; entries of ``rows (N, D)`` that are NaN are not observed.
    """
    if bool(rows.isnan().any()):
        arguments = rows, row, component, loc, factor, scale
        # What rounding may take of the identity that the square of directions, in units of the
        # noise, is added to.
        if bool((factor.square().sum((1, 2)) * torch.finfo(rows.dtype).eps > 0.1 * scale.square()).any()):
            # The identity would be lost beside the square of the directions.
            result = _observed_means(*(array.double() if array.is_floating_point() else array for array in arguments))
            return result[0].to(rows.dtype), result[1].to(rows.dtype)
        return _observed_means(*arguments)
    gain, _ = kalman_gain(factor, scale)
    variances = scale.square().unsqueeze(1) * (gain * factor).sum(2).clamp(min=0.0)
    grouped, ranks, means = GroupBlocks.from_groups(component, len(loc)), _ranks(factor), []
    for part in grouped.parts(rows.element_size() * (4 * rows.shape[1] + factor.shape[2])):
        center = loc[part.group].unsqueeze(1)
        explained = (rows[row[part.entry]] - center) @ _columns(gain, ranks, part.group)
        means.append(torch.baddbmm(center, explained, _columns(factor, ranks, part.group).mT))
    return grouped.gather(means), variances[component]


def _observed_means(rows: Tensor, row: Tensor, component: Tensor, loc: Tensor, factor: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same with missing entries, and a posterior covariance for every row."""
    number, size = (~rows.isnan()).sum(1)[row], rows.shape[1]
    # The smaller of two systems of equations: one for each direction, or one for each entry that is seen, which needs whole covariances.
    bytes_of_covariance = rows.element_size() * size**2
    rank = factor.shape[2] if (ranks := _ranks(factor)) is None else ranks.max()
    is_few = (number < rank) & (bytes_of_covariance <= current_budget())
    many, entries, parts = (~is_few).nonzero().squeeze(1), [], [(rows.new_empty(0, size), rows.new_empty(0, size))]
    length = rows_per_block(bytes_of_covariance)
    for first, own in zip(range(0, len(loc), length), factor.split(length), strict=True):
        few = (is_few & (component >= first) & (component < first + length)).nonzero().squeeze(1)
        if len(few):
            few = few[number[few].argsort()]
            entries.append(few)
            parts.append(_means_by_entries(rows[row[few]], component[few] - first, loc[first:], own, scale[first:], number[few]))
    if len(many):
        parts.append(_means_by_directions(rows, row[many], component[many], loc, factor, scale))
    place = torch.cat([*entries, many]).argsort()
    means, variances = (torch.cat(part)[place] for part in zip(*parts, strict=True))
    return means, variances


def _means_by_entries(rows: Tensor, component: Tensor, loc: Tensor, factor: Tensor, scale: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    r"""The same by :math:`C_{\cdot O} (C_{OO} + \sigma^2 I)^{-1}`, rows in order of observed entries."""
    covariance = factor @ factor.mT
    prior, parts = covariance.diagonal(dim1=1, dim2=2), []
    per_row = rows.element_size() * 4 * rows.shape[1] * max(1, int(number[-1]))
    length = min(rows_per_block(per_row), rows_per_block(per_row, _CACHED_ROWS)) if rows.is_cpu else rows_per_block(per_row)
    for values, group, numbers in zip(rows.split(length), component.split(length), number.split(length), strict=True):
        above = values - loc[group]
        # Rows that see less than the last one are filled up with entries that nothing depends on.
        place = above.isnan().to(torch.uint8).argsort(dim=1, stable=True)[:, : max(1, int(numbers[-1]))]
        is_observed = torch.arange(place.shape[1], device=place.device) < numbers.unsqueeze(1)
        cross = covariance[group.unsqueeze(1), place] * is_observed.unsqueeze(2)
        observed_cross = cross.gather(2, place.unsqueeze(1).expand(-1, place.shape[1], -1)) * is_observed.unsqueeze(1)
        lower = cholesky(observed_cross + torch.where(is_observed, scale[group].square().unsqueeze(1), 1.0).diag_embed())
        observed = torch.where(is_observed, above.gather(1, place), 0.0)
        solved = torch.linalg.solve_triangular(lower, torch.cat([cross, observed.unsqueeze(2)], 2), upper=False)
        root, white = solved[..., :-1], solved[..., -1:]
        parts.append((loc[group] + (root.mT @ white).squeeze(2), (prior[group] - root.square().sum(1)).clamp(min=0.0)))
    means, variances = (torch.cat(part) for part in zip(*parts, strict=True))
    return means, variances


def _means_by_directions(rows: Tensor, row: Tensor, component: Tensor, loc: Tensor, factor: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    r"""The same by :math:`(\sigma^2 I + W_O^\top W_O)^{-1}`."""
    size, rank = factor.shape[1:]
    grouped, ranks, parts = GroupBlocks.from_groups(component, len(loc)), _ranks(factor), []
    for part in grouped.parts(rows.element_size() * (3 * rank**2 + 4 * size)):
        center, noise = loc[part.group].unsqueeze(1), scale[part.group]
        basis = _columns(factor, ranks, part.group) / noise[:, None, None]
        above = (rows[row[part.entry]] - center) / noise[:, None, None]
        is_observed = (~above.isnan()).to(rows)
        pairs = (basis.unsqueeze(-1) * basis.unsqueeze(-2)).flatten(2)
        gram = (is_observed @ pairs).unflatten(-1, 2 * basis.shape[-1:])
        spread = torch.cholesky_inverse(cholesky(_identity(basis) + gram))
        mean = (spread @ (above.nan_to_num(0.0) @ basis).unsqueeze(-1)).squeeze(-1) @ basis.mT
        variances = spread.flatten(2) @ pairs.mT
        noise = noise[:, None, None]
        parts.append((center + noise * mean, noise**2 * variances))
    means, errors = (grouped.gather(list(part)) for part in zip(*parts, strict=True))
    return means, errors


def _ranks(factor: Tensor) -> Tensor | None:
    """Numbers of columns up to the last non-zero, ``None`` on devices."""
    if not factor.is_cpu:
        return None
    last: Tensor = ((factor.detach() != 0).any(1) * torch.arange(1, factor.shape[2] + 1)).amax(1)
    return last


def _columns(factor: Tensor, ranks: Tensor | None, group: Tensor) -> Tensor:
    """Drops columns that are zero in all of some groups' matrices."""
    return factor[group] if ranks is None else factor[group, :, : int(ranks[group].max())]


def component_products(rows: Tensor, component: Tensor, weight: Tensor, num_components: int, around: Tensor | None = None) -> Tensor:
    r"""Sums of squares and products, :math:`\sum_{n, s: k_{ns} = k} r_{ns} (x_n - c_k)(x_n - c_k)^\top`.

    Example:
        >>> rows = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
        >>> component_products(rows, torch.tensor([[1], [0]]), torch.ones(2, 1), 2)[1].tolist()
        [[1.0, 2.0], [2.0, 4.0]]

    Args:
        rows: data :math:`x`, ``(N, D)``.
        component: components :math:`k_{ns}`, ``(N, S)``.
        weight: responsibilities :math:`r`, ``(N, S)``, not negative.
        num_components: ``K``.
        around: centers :math:`c`, ``(K, D)``. Default: zero.

    Returns:
        ``(K, D, D)``, in the type of the rows.

    Raises:
        ValueError: if shapes do not fit, the number is below 1, there are other components, or a weight is negative or NaN.
    """
    num_components = check_count("num_components", num_components)
    component = check_components(component, weight, rows, num_components)
    size = rows.shape[1]
    if around is not None and around.shape != (num_components, size):
        raise ValueError(f"around must have shape {(num_components, size)}; got {tuple(around.shape)}")
    raise_if(~(weight >= 0).all(), lambda: f"weight must not be negative or NaN; got {weight.min()}")
    products = rows.new_zeros(num_components, size, size)
    root, states = weight.to(rows).sqrt().flatten(), component.shape[1]
    grouped = GroupBlocks.from_groups(component.flatten(), num_components)
    for part in grouped.parts(rows.element_size() * 4 * size):
        data = rows[part.entry // states]
        if around is not None:
            data = data - around[part.group].unsqueeze(1)
        data = data * (root[part.entry] * part.is_own).unsqueeze(-1)
        products.index_add_(0, part.group, data.mT @ data)
    return products


def _identity(basis: Tensor) -> Tensor:
    return torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)


def k_means(points: Tensor, start: Tensor, steps: int = 20) -> Tensor:
    """Centres ``(K, D)`` of points ``(N, D)`` by Lloyd's algorithm."""
    # Distances are differences of squares, which are smallest around the mean.
    mean = points.mean(0)
    points, centres = points - mean, start - mean
    for _ in range(steps):
        nearest = _nearest(points, centres, 1).squeeze(1)
        size = torch.bincount(nearest, minlength=len(centres)).to(points).unsqueeze(1)
        total = torch.zeros_like(centres).index_add_(0, nearest, points)
        new_centres = torch.where(size > 0, total / size.clamp(min=1), centres)
        if torch.equal(new_centres, centres):
            break
        centres = new_centres
    return centres + mean


def nearest_centres(points: Tensor, centres: Tensor, number: int = 1) -> Tensor:
    """The nearest centres of points ``(N, D)``, nearest first, ``(N, number)``."""
    mean = points.mean(0)
    return _nearest(points - mean, centres - mean, min(number, len(centres)))


def _nearest(points: Tensor, centres: Tensor, number: int) -> Tensor:
    power, bytes_per_row = 0.5 * centres.square().sum(1), 2 * len(centres) * points.element_size()
    rows = min(rows_per_block(bytes_per_row), rows_per_block(bytes_per_row, _CACHED_ROWS))
    distances = (torch.addmm(power, block, centres.mT, alpha=-1.0) for block in points.split(rows))
    return torch.cat([d.argmin(1, keepdim=True) if number == 1 else d.topk(number, 1, largest=False).indices for d in distances])
