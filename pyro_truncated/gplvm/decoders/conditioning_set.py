"""What a decoder keeps of its data to predict from latents."""

from __future__ import annotations

import dataclasses

import torch
from pyro.contrib.gp.kernels import Kernel
from torch import Tensor, nn

from pyro_truncated.distributed.shards import (
    gather_all_rows,
    own_rows,
    rows_at,
    shard_sum,
)
from pyro_truncated.gp.active_sets import (
    ActiveSet,
    Choose,
    NearestSet,
    ProjectedSet,
    ProjectedStatistics,
    projected_statistics,
    some_positions,
)
from pyro_truncated.utils.arguments import check_count

# Data points up to which all are kept by default.
_MAX_ROWS_KEPT = 2000

Posterior = ActiveSet | ProjectedSet | NearestSet


@dataclasses.dataclass(frozen=True)
class ConditioningSet:
    """Data points at their latents, or their sums for a projection."""

    latents: Tensor  # (M, Q)
    outputs: Tensor | None = None  # deviations from the mean, (M, D), or None for a projection
    gram: Tensor | None = None  # that of ProjectedStatistics, or None
    moment: Tensor | None = None
    num_neighbors: Tensor | None = None  # predict each latent from so many of the points, or None for all, a tensor
    examples: Tensor | None = None  # data points (A, ...) that an encoder which looks at an active set is shown, or None
    checksum: Tensor | None = None  # of the decoder's parameters at the time

    def posterior(self, kernel: Kernel, noise: Tensor) -> Posterior:
        """Returns the functions' posterior, in the noise's type and device."""
        latents = self.latents.to(noise)
        if self.num_neighbors is not None:
            assert self.outputs is not None
            return NearestSet(latents, self.outputs.to(noise), kernel, noise, int(self.num_neighbors))
        if self.outputs is not None:
            return ActiveSet(latents, self.outputs.to(noise), kernel, noise)
        assert self.gram is not None
        assert self.moment is not None
        statistics = ProjectedStatistics(latents, self.gram.to(noise.device), self.moment.to(noise.device))
        return ProjectedSet(kernel, noise, statistics)

    def state(self) -> dict[str, Tensor]:
        """The tensors by name, for ``state_dict()``."""
        tensors = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in tensors.items() if value is not None}


def checksum(module: nn.Module) -> Tensor:
    """Returns each parameter's sums of magnitudes and of squares, in float64."""
    values = [value.detach().double() for _, value in sorted(module.named_parameters())]
    return torch.stack([number for value in values for number in (value.abs().sum(), value.square().sum())]).cpu()


def select_conditioning_set(
    kernel: Kernel, latents: Tensor, outputs: Tensor, size: int | None, projected: bool | None, choose: Choose
) -> ConditioningSet:
    """Keeps data points as :meth:`pyro_truncated.gplvm.SASDecoder.condition_` says."""
    size = None if size is None else check_count("size", size)
    gaps = gather_all_rows(outputs.isnan().sum(-1), outputs)
    order = gaps.argsort(stable=True)
    complete = order[: int((gaps == 0).sum())]
    # In so many dimensions the closest data points predict better than a projection of all.
    if size is None and projected is None and len(complete) > _MAX_ROWS_KEPT and latents.shape[1] > 4:
        return neighbors_set(latents, outputs, 100)
    if projected is None:
        projected = size is None and len(complete) > _MAX_ROWS_KEPT
    if projected and not len(complete):
        raise ValueError("a projection takes complete data points, and every row of x has missing entries; leave projected out")
    if size is None:
        # Each pattern of missing entries costs a factorisation of its own.
        is_small = len(complete) == len(latents) <= _MAX_ROWS_KEPT
        size = len(latents) if is_small else max(min(len(complete), 1000), min(len(latents), 300))
    if not projected and len(complete) < size:
        rows = order[: min(size, len(order))]
    elif size < len(complete):
        # A choice takes time and memory for each of them: of very many, some are looked at.
        candidates = complete[some_positions(len(complete), max(20_000, size)).to(complete.device)]
        rows = candidates[choose(kernel, latents[candidates], size)]
    else:
        rows = complete
    if projected:
        own = outputs.isnan().sum(-1) == 0
        statistics = projected_statistics(kernel, latents[rows], own_rows(latents, outputs)[own], outputs[own])
        gram, moment = shard_sum(outputs)([statistics.gram, statistics.moment])
        return ConditioningSet(statistics.latents, gram=gram, moment=moment)
    return ConditioningSet(latents[rows], rows_at(outputs, rows))


def neighbors_set(latents: Tensor, outputs: Tensor, num: int) -> ConditioningSet:
    """Keeps all complete data points, for predictions from the closest ``num``."""
    complete = (gather_all_rows(outputs.isnan().sum(-1), outputs) == 0).nonzero().squeeze(-1)
    if not len(complete):
        raise ValueError("num_neighbors asks for the closest complete data points, and every row of x has missing entries")
    return ConditioningSet(latents[complete], rows_at(outputs, complete), num_neighbors=torch.tensor(num))
