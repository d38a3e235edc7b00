"""Log likelihoods of steps: linear Gaussian, and without unobserved steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.distributions.linear import LinearSuperposition
from pyro_truncated.ops.binary_chains import Transitions, expected_transitions, safe_log
from pyro_truncated.states.space import StateSpace

if TYPE_CHECKING:
    from pyro_truncated.sequences.chain_posterior import ChainPosterior


class ObservedSteps(NamedTuple):
    r"""Which steps of sequences hold an observation, and the gaps between.

    The posterior of a step without an observation is broad, so that a set of states would hold little of it. Chains that are
    independent a priori pass it by: their transition over ``k`` steps is :math:`A_m^k`. No mass is lost.

    Example:
        >>> steps = ObservedSteps.from_mask(torch.tensor([[True, False, False, True]]))
        >>> steps.position.tolist(), steps.first, steps.gaps
        ([[0, 3]], (0,), (3,))

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
    def from_mask(cls, is_observed: Tensor) -> Self:
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
    powers = [torch.eye(2, dtype=matrix.dtype, device=matrix.device).expand_as(matrix)]
    for _ in range(largest):
        powers.append(powers[-1] @ matrix)
    return torch.stack(powers)


def _power(matrix: Tensor, exponent: int) -> Tensor:
    return matrix if exponent == 1 else torch.linalg.matrix_power(matrix, exponent)


class LinearGaussianSteps:
    r"""Scores states of all steps under :math:`y_t \sim \mathcal N(W s_t + b, \mathrm{diag}(\sigma^2))`.

    Entries of the observations that are NaN are missing and contribute nothing.

    Example:
        >>> y, weight = torch.randn(2, 5, 3), torch.randn(3, 4)
        >>> score = LinearGaussianSteps(y, weight, torch.tensor(0.5))
        >>> score(torch.zeros(2, 5, 1, 1, dtype=torch.int64)).shape
        torch.Size([2, 5, 1])

    Args:
        y: observations ``(N, T, D)``.
        weight: what each chain contributes, ``(D, M)``.
        scale: standard deviation, a scalar or ``(D,)``.
        bias: offset ``(D,)``; default: zero.
    """

    def __init__(self, y: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        self.shape = y.shape[:2]
        self.weight, self.value = weight.detach().double(), y.detach().double().flatten(0, 1)
        bias = self.weight.new_zeros(len(weight)) if bias is None else bias.detach().double()
        self.fields = StateSpace([2] * weight.shape[1]).fields
        scale = scale.detach().double().expand(len(weight))
        zeros = self.weight.new_zeros(weight.shape[1])
        self._likelihood = LinearSuperposition(zeros, self.weight, scale, bias, validate_args=False)
        self.precision, self.residual = scale.pow(-2), self.value - bias
        self._is_complete = not bool(self.value.isnan().any())
        if self._is_complete:
            self._field = (self.residual * self.precision) @ self.weight
            self._gram = self.weight.mT @ (self.precision.unsqueeze(-1) * self.weight)

    @torch.no_grad()
    def __call__(self, words: Tensor) -> Tensor:
        """Log likelihoods ``(N, T, C)`` of states ``(N, T, C, W)``."""
        return self._likelihood.packed_log_prob(words.flatten(0, 1), self.value).unflatten(0, self.shape)  # type: ignore[no-any-return]

    @torch.no_grad()
    def flip_gains(self, words: Tensor, rows: slice) -> Tensor:
        r"""Returns how a flip of each chain changes the log likelihood.

        Args:
            words: states of some steps, ``(rows, S, W)``.
            rows: which steps, counted through all sequences.

        Returns:
            ``(rows, S, M)``.
        """
        states = ops.unpack(words, self.fields, torch.float64)
        if self._is_complete:
            field = self._field[rows].unsqueeze(1) - states @ self._gram
            return (1 - 2 * states).mul_(field).sub_(0.5 * self._gram.diagonal())
        value = self.residual[rows]
        precision = torch.where(value.isnan(), 0.0, self.precision)
        residual = (value.nan_to_num().unsqueeze(1) - states @ self.weight.mT) * precision.unsqueeze(1)
        curvature = precision @ self.weight.square()
        return (1 - 2 * states) * (residual @ self.weight) - 0.5 * curvature.unsqueeze(1)

    @torch.no_grad()
    def block_scores(self, words: Tensor, block: Tensor) -> Tensor:
        r"""Returns log likelihoods of all configurations of some chains.

        The other chains are given; a constant of each step is left out.

        Args:
            words: one state of each step, ``(N, T, W)``.
            block: the chains of each sequence, ``(N, k)``.

        Returns:
            ``(N, T, 2**k)``; bit ``i`` of a position is the value of ``block[i]``.
        """
        states = ops.unpack(words, self.fields, torch.float64)
        others = states.scatter(2, block.unsqueeze(1).expand(-1, states.shape[1], -1), 0.0)
        value = self.residual.unflatten(0, self.shape)
        precision = torch.where(value.isnan(), 0.0, self.precision)
        residual = value.nan_to_num() - others @ self.weight.mT
        configurations = torch.arange(2 ** block.shape[1], device=words.device)
        bits = (configurations >> torch.arange(block.shape[1], device=words.device).unsqueeze(-1) & 1).double()
        sums = self.weight.mT[block].mT @ bits
        # Without missing entries all steps have the same precision.
        penalty = (precision[:, :1] if self._is_complete else precision) @ sums.square()
        return torch.baddbmm(penalty, residual * precision, sums, beta=-0.5)
