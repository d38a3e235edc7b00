"""Combined flips: the best changes of the best state, in all combinations."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated.ops.combination import combine
from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.search.preselection import space_options
from pyro_truncated.states.population import Population, join
from pyro_truncated.utils.arguments import check_count, names_arguments


class CombinedFlips(Search):
    r"""Combines the best single flips of the best state.

    It is for many binary latents.

    With the best state :math:`s^*` of a population and its flips :math:`s^* \oplus e_h`, the :math:`H'` latents of largest

    .. math:: \log p(s^* \oplus e_h, y_n) - \log p(s^*, y_n)

    form the selection :math:`I_n`, and the proposals are :math:`\{s^* \oplus e_J : J \subseteq I_n\}`. The difference
    says how uncertain a latent is given all others, under any model. So latents that best explain the residual are
    tried, and those that hardly help are removed. The best proposal begins the next round. A round takes :math:`H +
    2^{H'}` scores per data point.

    :class:`EvolutionarySearch` and :class:`ConditionalSearch` rarely hit the few relevant ones of a thousand latents;
    where there are few latents they look around more widely. For sums of causes
    (:class:`~pyro_truncated.distributions.LinearSuperposition`) all flips of a state with ``k`` active latents take
    :math:`O(kH)`.

    Example:
        >>> y = linear_bars(20, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, CombinedFlips(4), steps=5)

    Args:
        num_selected: number of latents whose flips are combined, :math:`H'`; all of them where there are fewer.
        rounds: how often that is done in a step. Where data points are seen once or a few times, two do much more than one.

    Raises:
        ValueError: if a number is no positive integer; when searching, if a latent has more than two values.
    """

    binary_only = True

    @names_arguments
    def __init__(self, num_selected: int = 6, rounds: int = 2) -> None:
        self.num_selected, self.rounds = check_count("num_selected", num_selected), check_count("rounds", rounds)

    def max_proposals(self, num_states: int) -> int:
        """All combinations of all rounds."""
        return self.rounds << self.num_selected

    def propose(self, batch: SearchBatch) -> Population:
        """The best states with all combinations of their most promising flips, ``(N, rounds * 2**num_selected)``."""
        self.check_space(batch.space)
        found = [self._around(batch.population.mode(), batch)]
        while len(found) < self.rounds:
            found.append(self._around(found[-1].mode(), batch))
        return join(found)

    def _around(self, best: Tensor, batch: SearchBatch) -> Population:
        """Returns ``(N, W)`` states with all combinations of their best flips.

        The states themselves come first.
        """
        states, flips = best.unsqueeze(1), space_options(batch.space, best.device).words
        flip_gains = getattr(batch.score, "flip_gains", None)
        gains = None if flip_gains is None else flip_gains(best)
        if gains is None:
            # A few at a time, so that words of many latents need no more memory than those of other searches.
            gains = torch.cat([batch.score(states ^ some) for some in flips.split(256)], 1)
        chosen = gains.topk(min(self.num_selected, gains.shape[1]), 1).indices
        return batch.scored(combine(flips[chosen]) ^ states)
