"""Sequences without the steps at which nothing was observed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from pyro_truncated.ops.binary_chains import Transitions, expected_transitions, safe_log

if TYPE_CHECKING:
    from pyro_truncated.sequences.chain_posterior import ChainPosterior


class ObservedSteps(NamedTuple):
    r"""Which steps of sequences hold an observation, and the gaps between.

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
        num_steps = is_observed.shape[1]
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
        """Returns the transitions between observed steps of chains.

        The chains have initial probabilities ``(M,)`` and transitions ``(M, 2, 2)``.
        """
        start = torch.stack([1 - initial, initial], -1).unsqueeze(-2)
        first = [(start @ _power(transition, gap)).expand_as(transition) for gap in self.first]
        tables = [*first, *(_power(transition, gap) for gap in self.gaps)]
        if not tables:
            tables = [transition]
        return Transitions(safe_log(torch.stack(tables)), self.kind)

    def expected_transitions(self, initial: Tensor, transition: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Returns expected first values and transitions of single steps.

        Their shapes are ``(M, 2)`` and ``(M, 2, 2)``.

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

    def marginals(self, posterior: ChainPosterior, initial: Tensor, transition: Tensor, lengths: Tensor, num_steps: int) -> Tensor:
        r"""Returns the probability that each chain is on, ``(N, T, M)``.

        Steps without observation are included.

        Chain by chain, between observed steps ``a`` and ``b`` it is
        :math:`\sum_{ij} q(s_a = i, s_b = j)\, p(s_t \mid s_a = i, s_b = j)`. Steps beyond the end of a sequence have zeros.

        Args:
            posterior: of the observed steps.
            initial: initial probabilities ``(M,)`` of the chains.
            transition: their transitions ``(M, 2, 2)``.
            lengths: number of steps of each sequence, ``(N,)``.
            num_steps: number of steps ``T``.
        """
        marginals = posterior.marginals()
        is_part = self.kind >= 0
        n, place = is_part.nonzero().unbind(1)
        out = marginals.new_zeros(len(marginals), num_steps, marginals.shape[-1])
        out[n, self.position[n, place]] = marginals[n, place]
        spans = torch.tensor([*(gap + 1 for gap in self.first), *self.gaps], device=out.device)
        has_gap = is_part & (spans[self.kind.clamp(min=0)] > 1) if len(spans) else is_part
        if not bool(has_gap.any()):
            return out
        # Transitions over gaps are told apart, so that what is expected of each one is known.
        n, place = has_gap.nonzero().unbind(1)
        own = self.transitions(initial, transition)
        kind = self.kind.clone()
        kind[n, place] = len(own.log_prob) + torch.arange(len(n), device=kind.device)
        tables = torch.cat([own.log_prob, own.log_prob[self.kind[n, place]]])
        pairs = expected_transitions(posterior.words, posterior.unary, Transitions(tables, kind), posterior.messages)[len(own.log_prob) :]
        span = spans[self.kind[n, place]]
        powers = _powers(transition, int(span.max()))
        start = torch.stack([1 - initial, initial], -1).unsqueeze(-2).expand_as(transition)
        # One row for each step inside of a gap, which begins with the value before it, or with the initial distribution.
        gap = torch.arange(len(n), device=n.device).repeat_interleave(span - 1)
        first = (span - 1).cumsum(0) - (span - 1)
        step = torch.arange(len(gap), device=n.device) - first[gap] + 1
        is_start = (place[gap] == 0).view(-1, 1, 1, 1)
        before = torch.where(is_start, start @ powers[step - 1], powers[step])
        through = before.unsqueeze(-1) * powers[span[gap] - step].unsqueeze(-3)
        share = through / through.sum(-2, keepdim=True).clamp(min=torch.finfo(through.dtype).tiny)
        on = (pairs[gap].unsqueeze(-2) * share)[..., 1, :].sum((-2, -1))
        out[n[gap], self.position[n, place][gap] - span[gap] + step] = on
        return out * (torch.arange(num_steps, device=out.device) < lengths.unsqueeze(1)).unsqueeze(-1)


def _powers(matrix: Tensor, largest: int) -> Tensor:
    """Powers from zero on, ``(largest + 1, M, 2, 2)``."""
    found = [torch.eye(2, dtype=matrix.dtype, device=matrix.device).expand_as(matrix)]
    for _ in range(largest):
        found.append(found[-1] @ matrix)
    return torch.stack(found)


def _power(matrix: Tensor, exponent: int) -> Tensor:
    return matrix if exponent == 1 else torch.linalg.matrix_power(matrix, exponent)
