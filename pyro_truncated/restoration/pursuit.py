"""Greedy states for dictionaries: matching pursuit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.counts import check_count


class Pursuit(Search):
    r"""Proposes the states on a greedy path.

    Each step adds the dictionary element that explains most of the residual of a data point.

    With elements :math:`w_h` of unit length and the residual :math:`r`, the next element is
    :math:`\arg\max_h |w_h^\top r|`, and :math:`r \leftarrow r - (w_h^\top r) w_h`. Source: Mallat
    and Zhang, "Matching pursuits with time-frequency dictionaries", IEEE Transactions on Signal
    Processing 41, 1993. Missing entries count as zero. For models of binary latents with a ``weight
    (D, H)``.

    Example:
        >>> y = torch.randn(20, 16)
        >>> model = SpikeSlabSparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, Pursuit(model), steps=1)

    Args:
        model: has the dictionary, ``weight``.
        length: number of states on a path.
    """

    @names_arguments
    def __init__(self, model: Any, length: int = 6) -> None:
        self.model = model
        self.length = check_count("length", length)

    def propose(self, batch: SearchBatch) -> Population:
        """The ``length`` states of the path of every data point."""
        directions = F.normalize(self.model.weight.detach(), dim=0)
        (y,) = batch.observations.values()
        words = self._path(y.nan_to_num(0.0).to(directions) @ directions, directions.mT @ directions, batch)
        return batch.scored(words)

    def _path(self, similarity: Tensor, gram: Tensor, batch: SearchBatch) -> Tensor:
        # States of single elements, as bits: a state with one element more is "or".
        single = batch.space.pack(torch.eye(len(gram), dtype=torch.uint8, device=gram.device))
        path = [single.new_zeros(len(similarity), single.shape[1])]
        for _ in range(self.length):
            best = similarity.abs().argmax(1)
            similarity = similarity - similarity.gather(1, best.unsqueeze(1)) * gram[best]
            path.append(path[-1] | single[best])
        return torch.stack(path[1:], 1)
