"""Likelihoods of the steps of sequences with linear Gaussian observations.

Observations are a noisy sum of what active chains contribute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.distributions.linear import LinearSuperposition
from pyro_truncated.states.space import StateSpace


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
