"""Sequences without the steps at which nothing was observed."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from pyro_truncated.ops.binary_chains import Transitions, safe_log


class ObservedSteps(NamedTuple):
    r"""Which steps of sequences hold an observation, and how many steps lie between them.

    The posterior of a step without an observation is broad, so that a set of states would hold little of it. Chains that are
    independent a priori pass it by: their transition over ``k`` steps is :math:`A_m^k`. No mass is lost.

    Attributes:
        position: of the observed steps among all, ``(N, T')``; beyond the end those of the last step.
        kind: kind of the transition into each of them, ``(N, T')``, negative beyond the end.
        first: kinds ``0, 1, ...`` start a sequence after so many steps.
        gaps: the other kinds are transitions over so many steps.
    """

    position: Tensor
    kind: Tensor
    first: tuple[int, ...]
    gaps: tuple[int, ...]

    @classmethod
    def of(cls, is_observed: Tensor) -> Self:
        """Those of sequences in which steps ``(N, T)`` are observed."""
        num_data, num_steps = is_observed.shape
        counts = is_observed.sum(1)
        size = max(1, int(counts.max()))
        step = torch.arange(num_steps, device=is_observed.device)
        # Observed steps first, in order.
        position = torch.where(is_observed, step, num_steps + step).argsort(1)[:, :size]
        is_part = torch.arange(size, device=position.device) < counts.unsqueeze(1)
        before = torch.nn.functional.pad(position[:, :-1], (1, 0), value=0)
        gap = torch.where(is_part, position - before, 0)
        is_first = torch.zeros_like(is_part)
        is_first[:, 0] = True
        first, gaps = (gap[where & is_part].unique() for where in (is_first, ~is_first))
        kind = torch.where(is_first, torch.searchsorted(first, gap), len(first) + torch.searchsorted(gaps, gap))
        last = position.gather(1, (counts - 1).clamp(min=0).unsqueeze(1))
        position = torch.where(is_part, position, last)
        return cls(position, kind.masked_fill(~is_part, -1), tuple(first.tolist()), tuple(gaps.tolist()))

    def transitions(self, initial: Tensor, transition: Tensor) -> Transitions:
        """The transitions between observed steps of chains with initial probabilities ``(M,)`` and transitions ``(M, 2, 2)``."""
        start = torch.stack([1 - initial, initial], -1).unsqueeze(-2)
        first = [(start @ _power(transition, gap)).expand_as(transition) for gap in self.first]
        tables = [*first, *(_power(transition, gap) for gap in self.gaps)]
        if not tables:
            tables = [transition]
        return Transitions(safe_log(torch.stack(tables)), self.kind)

    def expected_transitions(self, initial: Tensor, transition: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Expected values at the first step ``(M, 2)``, and transitions of single steps ``(M, 2, 2)``.

        Args:
            initial: initial probabilities ``(M,)`` of the chains.
            transition: their transitions ``(M, 2, 2)``.
            counts: expected numbers ``(K, M, 2, 2)`` of the transitions between observed steps.
        """
        # Of a function of log transitions, such as the log joint of a path, the gradient is how often each one occurs.
        with torch.enable_grad():
            start, table = torch.stack([1 - initial, initial], -1).detach().double(), transition.detach().double()
            start, table = start.requires_grad_(), table.requires_grad_()
            first = [(start.unsqueeze(-2) @ _power(table, gap)).expand_as(table) for gap in self.first]
            tables = [*first, *(_power(table, gap) for gap in self.gaps)]
            if not tables:
                return torch.zeros_like(start), torch.zeros_like(table)
            terms = safe_log(torch.stack(tables))
            total = torch.where(counts > 0, counts * terms, 0.0).sum() + 0.0 * (start.sum() + table.sum())
            of_start, of_table = torch.autograd.grad(total, (start, table))
        return (start * of_start).detach(), (table * of_table).detach()


def _power(matrix: Tensor, exponent: int) -> Tensor:
    return matrix if exponent == 1 else torch.linalg.matrix_power(matrix, exponent)
