"""A dictionary to start from: what changes between neighbouring steps of sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.extend import device_of

# Changes of a step that are explained at most.
_MAX_CHANGES = 4
# Nats that a change must explain, per change.
_COST_NATS = 3.0
# Share of the differences in which nothing is assumed to change.
_QUIET_SHARE = 0.2
_RIDGE = 1e-6
# Differences that are looked at, at most.
_MAX_ROWS = 20_000


def difference_dictionary(
    y: Tensor, num_latents: int, generator: torch.Generator | None, num_tries: int = 8, num_steps: int = 15
) -> tuple[Tensor, Tensor]:
    r"""Returns elements of which few change between neighbouring steps.

    They come from a sparse ternary code of the differences.

    .. math:: y_t - y_{t-1} = \sum_m d_{tm} W_m + \mathrm{noise}, \qquad d_{tm} \in \{-1, 0, 1\}, \text{ mostly } 0.

    Directions come from k-means++ up to sign; pursuit of the code and least squares alternate. The best of several tries is taken.

    Args:
        y: sequences ``(N, T, D)``. NaN where missing.
        num_latents: number of elements ``M``.
        generator: source of randomness.
        num_tries: how many tries.
        num_steps: alternations of each.

    Returns:
        Elements ``(D, M)`` and the standard deviation of the noise of one step.
    """
    rows = (y[:, 1:] - y[:, :-1]).double().flatten(0, 1)
    rows = rows[~rows.isnan().all(1)]
    if not len(rows):
        rows = y.double().flatten(0, 1)
    if len(rows) > _MAX_ROWS:
        order = torch.rand(len(rows), generator=generator, device=device_of(generator)).topk(_MAX_ROWS).indices
        rows = rows[order.to(rows.device)]
    is_seen = (~rows.isnan()).double()
    rows = rows.nan_to_num()
    tries = [_ternary_code(rows, is_seen, num_latents, generator, num_steps) for _ in range(num_tries)]
    _, weight, variance = min(tries, key=lambda one: float(one[0]))
    return weight, (variance / 2).sqrt()


def _ternary_code(
    rows: Tensor, is_seen: Tensor, num_latents: int, generator: torch.Generator | None, num_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Objective, elements and variance of what is left."""
    weight = _first_directions(rows, num_latents, generator)
    squares = rows.square().sum(1) / is_seen.sum(1)
    variance = squares.quantile(_QUIET_SHARE)
    objective = squares.sum()
    for _ in range(num_steps):
        code, left = _pursuit(rows, weight, 2 * _COST_NATS * variance)
        objective = left.square().sum() + 2 * _COST_NATS * variance * code.abs().sum()
        weight = _least_squares(rows, is_seen, code, weight)
        variance = left.square().sum() / is_seen.sum()
        unused = (code.abs().sum(0) == 0).nonzero().squeeze(1)
        if len(unused):
            weight[:, unused] = rows[_draw(left.square().sum(1), len(unused), generator)].mT
    return objective, weight, variance


def _first_directions(rows: Tensor, num_latents: int, generator: torch.Generator | None) -> Tensor:
    """Draws rows far from each other up to sign, ``(D, M)``.

    They are drawn by their squared distance, as k-means++ does.
    """
    distance = rows.square().sum(1)
    chosen = []
    for _ in range(num_latents):
        row = rows[_draw(distance, 1, generator)]
        chosen.append(row)
        distance = distance.minimum((rows - row).square().sum(1)).minimum((rows + row).square().sum(1))
    return torch.cat(chosen).mT.contiguous()


def _draw(power: Tensor, number: int, generator: torch.Generator | None) -> Tensor:
    power = power.to(device_of(generator)) + torch.finfo(power.dtype).tiny
    return torch.multinomial(power, number, replacement=len(power) < number, generator=generator)


def _pursuit(rows: Tensor, weight: Tensor, cost: Tensor) -> tuple[Tensor, Tensor]:
    """A greedy ternary code ``(R, M)`` and what it leaves over."""
    code, left = rows.new_zeros(len(rows), weight.shape[1]), rows
    for _ in range(_MAX_CHANGES):
        product = left @ weight
        gain = (2 * product.abs() - weight.square().sum(0) - cost).masked_fill(code != 0, -torch.inf)
        best, place = gain.max(1, keepdim=True)
        if not bool((best > 0).any()):
            break
        code.scatter_add_(1, place, product.gather(1, place).sign() * (best > 0))
        left = rows - code @ weight.mT
    return code, left


def _least_squares(rows: Tensor, is_seen: Tensor, code: Tensor, weight: Tensor) -> Tensor:
    """Returns the best elements of a code over the entries seen.

    Elements of unused places stay.
    """
    ridge = _RIDGE * torch.eye(code.shape[1], dtype=code.dtype, device=code.device)
    if bool(is_seen.all()):
        return weight + torch.linalg.solve(code.mT @ code + ridge, code.mT @ (rows - code @ weight.mT)).mT  # type: ignore[no-any-return]
    gram = (is_seen.mT @ (code.unsqueeze(2) * code.unsqueeze(1)).flatten(1)).unflatten(1, ridge.shape) + ridge
    gradient = ((rows - code @ weight.mT) * is_seen).mT @ code
    return weight + torch.linalg.solve(gram, gradient.unsqueeze(-1)).squeeze(-1)  # type: ignore[no-any-return]
