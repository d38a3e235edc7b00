"""Principal components, to start latents from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_truncated.distributed.shards import gather_all_rows, own_rows, shard_sum, total_rows
from pyro_truncated.utils.arguments import check_count, names_arguments
from pyro_truncated.utils.arrays import as_data, holds_arrays


@names_arguments
def principal_components(data: Tensor | Sequence[Tensor], num: int, generator: torch.Generator | None = None) -> Tensor:
    r"""Returns standardised leading principal components, to initialise latents.

    They are :math:`\sqrt N u_q` with the leading left singular vectors :math:`u_q` of the centred data, with arbitrary signs. Columns
    beyond the rank (singular values above 1e-7 of the largest, and above the rounding of the data) are filled with standard normal numbers.

    Example:
        >>> principal_components(torch.randn(20, 5), 2).shape
        torch.Size([20, 2])

    Args:
        data: complete data ``(N, D)``, or several views ``(N, D_c)`` of the same points, which are put side by side
            as they are. If all processes give a shard (:func:`pyro_truncated.distributed.shard`),
            the components are those of all data, at its rows.
        num: number of components.
        generator: source of the random columns, default torch's global one. It advances by ``num`` columns whatever the rank.

    Returns:
        ``(N, num)``, with type and device of the data.

    Raises:
        TypeError: if the data are not floating point.
        ValueError: if the data are empty, no matrix or not finite, or ``num`` is not positive.
    """
    joint = torch.cat([as_data("data", view) for view in data], 1) if holds_arrays(data) else as_data("data", data)
    number, total = total_rows(joint), shard_sum(joint)
    size = _finite_norm(joint, num)
    centred = joint.double() - total([joint.sum(0, dtype=torch.float64)])[0] / number
    rank = min(num, number, joint.shape[1])
    if joint.shape[1] <= number:
        _, vectors = torch.linalg.eigh(total([centred.mT @ centred])[0])
        scores = centred @ vectors.flip(1)[:, :rank]
    else:
        every = gather_all_rows(centred, joint)
        values, vectors = torch.linalg.eigh(every @ every.mT)
        scores = own_rows(vectors.flip(1)[:, :rank] * values.flip(0)[:rank].clamp(min=0).sqrt(), joint)
    scale = (total([scores.square().sum(0)])[0] / number).sqrt()
    rounding = 4 * torch.finfo(joint.dtype).eps * size / number**0.5
    # Singular values below this share of the largest are rounding: a Gram matrix keeps the square
    # root of the precision.
    useful = scale > torch.maximum(1e-7 * scale.max(), rounding)
    device = joint.device if generator is None else generator.device
    draws = torch.randn(number, num, generator=generator, dtype=torch.float64, device=device).to(joint.device)
    components = own_rows(draws, joint).clone()
    components[:, :rank] = torch.where(useful, scores / scale.clamp(min=1e-300), components[:, :rank])
    return components.to(joint.dtype)


def _finite_norm(data: Tensor, num: int) -> Tensor:
    """The Frobenius norm, which shows NaN and infinity without a copy."""
    if not data.is_floating_point():
        raise TypeError(f"data must be floating point; got {data.dtype}")
    size: Tensor = shard_sum(data)([torch.linalg.vector_norm(data, dtype=torch.float64).square()])[0].sqrt()
    if data.ndim != 2 or data.numel() == 0 or not bool(size.isfinite()):
        raise ValueError(f"data must be a finite matrix (N, D) that is not empty; got shape {tuple(data.shape)} and norm {float(size)}")
    check_count("num", num)
    return size
