"""Passes over the data in parts, with a step of the optimiser for each: networks need many more steps than searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated.distributed.shards import total_rows
from pyro_truncated.em.closed_form import ClosedFormModel
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.training.model_parameters import is_a_network
from pyro_truncated.utils.isolation import spare_random_numbers

# Rows of a part, and the most parts: of very many data a step for so many of them is enough, and each has a guide of its own.
_ROWS, _MOST = 150, 64


class Parts:
    """The data of a model in parts, each with a guide of its own, for which an optimiser takes a step one after the other.

    Rows of a part lie as far apart as there are parts: data are often in some order.

    Args:
        y: all data.
        guide: that of all data, which says what the parts begin with, and gets what they have found.
        guides: one for each part.
        elbo: the loss, whose search and temperature are theirs.
    """

    def __init__(self, y: Tensor, guide: AutoTruncated, guides: Sequence[AutoTruncated], elbo: Truncated_ELBO) -> None:
        self._y, self._guide, self._guides, self._elbo = y, guide, guides, elbo
        self._elbos = [Truncated_ELBO(elbo.search, temperature=elbo.temperature) for _ in guides]
        self._rows = [part_of(y, first, len(guides)) for first in range(len(guides))]
        self._have_begun = False

    @property
    def number(self) -> int:
        """How many they are."""
        return len(self._guides)

    def step(self, svi: SVI) -> float:
        """A pass over all data with the model and the optimiser of an SVI; its loss, of each part before its own step."""
        if not self._have_begun:
            self._begin()
        loss = 0.0
        for rows, guide, elbo in zip(self._rows, self._guides, self._elbos, strict=True):
            elbo.search = self._elbo.search
            loss += float(SVI(svi.model, guide, svi.optim, elbo).step(rows))
        return loss

    @torch.no_grad()
    def _begin(self) -> None:
        self._have_begun, population = True, self._guide.population()
        for first, guide in enumerate(self._guides):
            words, log_joint = (part_of(value, first, self.number).clone() for value in (population.words, population.log_joint))
            guide.populations.store_(log_joint, None, words)

    @torch.no_grad()
    def give(self) -> None:
        """Puts what has been found together, with log joints under the model as it is."""
        if not self._have_begun:
            return
        population = self._guide.population()
        words, log_joint = population.words.clone(), population.log_joint.clone()
        for first, guide in enumerate(self._guides):
            found = guide.population()
            part_of(words, first, self.number).copy_(found.words)
            part_of(log_joint, first, self.number).copy_(found.log_joint)
        self._guide.populations.store_(log_joint, None, words)
        self._guide.refresh_(self._y)


def part_of(rows: Tensor, first: int, number: int) -> Tensor:
    """Every so many rows, from one on: a view of the same memory."""
    return rows.as_subclass(Tensor)[first::number]


def parts_of(model: Any, y: Tensor, guide: Any, elbo: Any, guide_of: Callable[[], AutoTruncated]) -> Parts | None:
    """What a network is trained in whose data points share no latents, if one process has all of them; ``None`` for all other models.

    Programs that do not take some of the rows of the data, as they hold others that belong to these, are trained on all at once.
    """
    if not isinstance(guide, AutoTruncated) or isinstance(model, ClosedFormModel) or guide.conditional is not None:
        return None
    number = min(_MOST, len(y) // _ROWS)
    is_whole = guide.layout.num_data == len(y) == total_rows(y)
    if number < 2 or elbo.search.learns or not is_whole or not is_a_network(model, y):
        return None
    guides = [guide_of() for _ in range(number)]
    for first, part in enumerate(guides):
        rows = part_of(y, first, number)
        try:
            with spare_random_numbers():
                part.setup(rows)
        except (ValueError, RuntimeError, IndexError):
            return None
        if part.layout.num_data != len(rows):
            return None
    return Parts(y, guide, guides, elbo)
