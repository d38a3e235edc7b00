"""Training in parts of the data, with an optimiser step for each.

Networks need many more steps than searches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.distributed.shards import total_rows
from pyro_truncated.em.closed_form import ClosedFormModel
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.training.model_parameters import is_a_network
from pyro_truncated.utils.parameter_store import spare_random_numbers

# Rows of a part; most parts, each of which has a guide.
_ROWS, _MOST = 150, 32
# Rounding error of equal log joints.
_EQUAL = 1e-3


class Parts:
    """A model's data in parts, each with a guide, trained in turn.

    Rows of a part lie as far apart as there are parts: data are often in some order.

    Args:
        y: all data.
        guide: that of all data, which says what the parts begin with, and gets what they have found.
        rows: the parts.
        guides: one for each of them.
        elbo: the loss, whose search and temperature are theirs.
    """

    def __init__(
        self, y: Tensor, guide: AutoTruncated, rows: Sequence[Tensor], guides: Sequence[AutoTruncated], elbo: Truncated_ELBO
    ) -> None:
        self._y, self._guide, self._rows, self._guides, self._elbo = y, guide, rows, guides, elbo
        self._elbos = [Truncated_ELBO(elbo.search, temperature=elbo.temperature) for _ in guides]
        self._have_begun = False

    @property
    def number(self) -> int:
        """How many they are."""
        return len(self._guides)

    def step(self, svi: SVI) -> float:
        """Passes over all parts; returns the summed loss before each step."""
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
        """Collects all states, with log joints under the present model."""
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
    """Returns every so many rows from one on, as a view."""
    return rows.as_subclass(Tensor)[first::number]


def parts_of(model: Any, y: Tensor, guide: Any, elbo: Any, guide_of: Callable[[], AutoTruncated]) -> Parts | None:
    """Returns the parts of a network's data, ``None`` for other models.

    Data points must share no latents, and lie in one process.

    Programs whose parts differ from all data are trained on all at once. They hold other data beside these rows, look at neighbours, or
    observe something of no data point, which would count once for each part.
    """
    if not isinstance(guide, AutoTruncated) or isinstance(model, ClosedFormModel):
        return None
    if guide.conditional is not None or guide.product is not None:
        return None
    number = min(_MOST, len(y) // _ROWS)
    is_whole = guide.layout.num_data == len(y) == total_rows(y) and getattr(y, "file", None) is None
    if number < 2 or not is_whole or not is_a_network(model, y):
        return None
    with spare_random_numbers(), poutine.block(), torch.no_grad():
        guide.populations.seed_()
        whole = guide.batch_of(y)
        words = whole.population().words[:, :1]
        scores = whole.scorer.score(words)
        if float(whole.outside().detach()) != 0.0:
            return None
        rows = [part_of(y, first, number).contiguous() for first in range(number)]
        guides = [_guide_of(guide, part, first, guide_of) for first, part in enumerate(rows)]
        for first, (part, own) in enumerate(zip(rows, guides, strict=True)):
            if own is None or not _are_as_among_all(own, part, part_of(words, first, number), part_of(scores, first, number)):
                return None
    return Parts(y, guide, rows, [own for own in guides if own is not None], elbo)


def _guide_of(guide: AutoTruncated, rows: Tensor, first: int, guide_of: Callable[[], AutoTruncated]) -> AutoTruncated | None:
    """Returns a guide of a part with its own random numbers.

    Its state space is that of all data.
    """
    assert guide.populations.seed is not None
    made = guide_of()
    made.populations.seed = ops.mix_bits(guide.populations.seed, first)
    try:
        made.setup(rows)
    except Exception:  # any error of a program that takes all rows only
        return None
    is_alike = made.layout.num_data == len(rows) and made.space.cardinalities == guide.space.cardinalities
    return made if is_alike and made.num_states == guide.num_states else None


def _are_as_among_all(guide: AutoTruncated, rows: Tensor, words: Tensor, scores: Tensor) -> bool:
    """Whether a part's states keep their log joints ``scores``."""
    own = guide.log_joint_of(rows).score(words)
    return own.shape == scores.shape and torch.allclose(own, scores, rtol=_EQUAL, atol=_EQUAL)
