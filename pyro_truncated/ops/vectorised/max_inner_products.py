"""The largest of many linear functions in plain torch, for any device."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

_MAX_PRODUCTS = 2**22


def max_inner_products(features: Tensor, coefficients: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.max_inner_products.max_inner_products`."""
    found = [(some @ coefficients.mT).topk(number) for some in _blocks(features, len(coefficients))]
    return torch.cat([some.values for some in found]), torch.cat([some.indices for some in found])


def max_inner_products_in_groups(
    features: Tensor,
    coefficients: Tensor,
    group: Tensor,
    num_groups: int,
    probes: Tensor,
    number: int,
) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.max_inner_products.max_inner_products_in_groups`."""
    sizes = torch.bincount(group, minlength=num_groups).tolist()
    members, width, looked_at = group.argsort(stable=True), max(sizes), probes.shape[1]
    starts = torch.tensor([0, *itertools.accumulate(sizes)], device=probes.device)
    values, indices = [], []
    # Functions that are minus infinity come before places of the table that hold none.
    least = torch.finfo(features.dtype).min
    rows_of_blocks = _blocks(features, looked_at * width)
    for some, own in zip(rows_of_blocks, probes.split(max(1, len(rows_of_blocks[0]))), strict=True):
        order = own.flatten().argsort()
        table = features.new_full((len(order), width), -math.inf)
        times = torch.bincount(own.flatten(), minlength=num_groups).tolist()
        for those, rows, who in zip(order.split(times), (order // looked_at).split(times), members.split(sizes), strict=True):
            table[those, : len(who)] = (some[rows] @ coefficients[who].mT).clamp(min=least)
        best = table.view(len(some), looked_at * width).topk(number)
        values.append(torch.where(best.values > least, best.values, best.values.clamp(max=-math.inf)))
        indices.append(members[starts[own.gather(1, best.indices // width)] + best.indices % width])
    return torch.cat(values), torch.cat(indices)


def follow_neighbours(
    features: Tensor, coefficients: Tensor, neighbours: Tensor, value: Tensor, index: Tensor, depth: int, also: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`pyro_truncated.ops.max_inner_products.follow_neighbours`."""
    width = max(neighbours.shape[1], also.shape[1]) * features.shape[1]
    step = max(1, _MAX_PRODUCTS // max(1, width))
    blocks = zip(features.split(step), value.split(step), index.split(step), also.split(step), strict=True)
    parts = [_follow(some, coefficients, neighbours, best, position, depth, others) for some, best, position, others in blocks]
    return torch.cat([best for best, _ in parts]), torch.cat([position for _, position in parts])


def _follow(
    features: Tensor, coefficients: Tensor, neighbours: Tensor, best: Tensor, index: Tensor, depth: int, also: Tensor
) -> tuple[Tensor, Tensor]:
    best, index = _update_best(also, features, coefficients, best, index)
    done = torch.full_like(index, -1)
    for visit in range(index.shape[1]):
        is_open = (index[:, :depth, None] != done[:, None, :]).all(2)
        # Where none is left the best one is looked at again, which changes nothing.
        k = index.gather(1, is_open.to(torch.uint8).argmax(1, keepdim=True))
        done[:, visit] = torch.where(is_open.any(1), k[:, 0], -1)
        best, index = _update_best(neighbours[k[:, 0]], features, coefficients, best, index)
    return best, index


def _update_best(others: Tensor, features: Tensor, coefficients: Tensor, best: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The best ones among these and other functions ``(N, W)``."""
    products = (coefficients[others] * features.unsqueeze(1)).sum(2)
    is_there = (others[:, :, None] == index[:, None, :]).any(2)
    best, place = torch.cat([best, products.masked_fill(is_there, -math.inf)], 1).topk(best.shape[1])
    return best, torch.cat([index, others], 1).gather(1, place)


def _blocks(features: Tensor, width: int) -> tuple[Tensor, ...]:
    """Rows of so many results each, at a time."""
    blocks: tuple[Tensor, ...] = features.split(max(1, _MAX_PRODUCTS // width))
    return blocks
