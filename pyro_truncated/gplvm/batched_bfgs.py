"""Maxima of many functions of few variables at once, by quasi-Newton steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

# Values ``(L,)`` of points ``(L, Q)``, of which each belongs to the function at its position ``(L,)``.
Functions = Callable[[Tensor, Tensor], Tensor]


@dataclasses.dataclass
class _Runs:
    """Batched BFGS runs: functions, points ``(L, Q)``, values, gradients, inverse curvatures."""

    rows: Tensor
    points: Tensor
    values: Tensor
    gradients: Tensor
    curvatures: Tensor
    steps: Tensor
    is_scaled: Tensor
    is_done: Tensor

    @classmethod
    def start(cls, functions: Functions, rows: Tensor, points: Tensor, length: float) -> Self:
        values, gradients = _with_gradients(functions, points, rows)
        identity = torch.eye(points.shape[1], dtype=points.dtype, device=points.device).expand(len(points), -1, -1).clone()
        steps = length * gradients / gradients.norm(dim=1, keepdim=True).clamp(min=torch.finfo(points.dtype).tiny)
        no = torch.zeros(len(points), dtype=torch.bool, device=points.device)
        return cls(rows, points, values, gradients, identity, steps, no, no.clone())

    def leaders(self, num: int) -> Tensor:
        """Positions of the highest climb of each of ``num`` functions."""
        values = self.values.reshape(len(self.values) // num, num)
        return values.argmax(0) * num + torch.arange(num, device=values.device)

    def select(self, index: Tensor) -> _Runs:
        return _Runs(*(getattr(self, field.name)[index] for field in dataclasses.fields(self)))

    def advance_(self, functions: Functions, tolerance: float) -> None:
        """One evaluation for each climb that is not done."""
        index = (~self.is_done).nonzero().squeeze(1)
        runs = self.select(index)
        slope = (runs.gradients * runs.steps).sum(1)
        points = runs.points + runs.steps
        values, gradients = _with_gradients(functions, points, runs.rows)
        # A step is taken if it gains this share of what the slope promises.
        is_better = values >= runs.values + 1e-4 * slope
        gradient_drop = runs.gradients - gradients
        scaled, curvatures = _curvatures(runs, gradient_drop)
        curvatures = torch.where(is_better[:, None, None], curvatures, runs.curvatures)
        new_gradients = torch.where(is_better[:, None], gradients, runs.gradients)
        new_steps = (curvatures @ new_gradients.unsqueeze(-1)).squeeze(-1)
        new_steps = new_steps * (1.0 / new_steps.norm(dim=1, keepdim=True).clamp(min=1.0))
        # The maximum of the parabola through both values and the slope.
        shrink = (slope / (2 * (slope - (values - runs.values)))).nan_to_num(0.5).clamp(0.1, 0.5)
        new_steps = torch.where(is_better[:, None], new_steps, shrink[:, None] * runs.steps)
        new_values = torch.where(is_better, values, runs.values)
        expected = (new_gradients * new_steps).sum(1)
        # Gains below so many units in the last place of a value are not seen.
        least = tolerance + 8 * torch.finfo(values.dtype).eps * new_values.abs()
        self.points[index] = torch.where(is_better[:, None], points, runs.points)
        self.values[index], self.gradients[index] = new_values, new_gradients
        self.steps[index], self.curvatures[index] = new_steps, curvatures
        self.is_scaled[index] = torch.where(is_better, scaled, runs.is_scaled)
        self.is_done[index] = ~(expected > least)


def _curvatures(runs: _Runs, gradient_drop: Tensor) -> tuple[Tensor, Tensor]:
    """Updates inverse curvatures where functions bend down; tells whether they are scaled."""
    step, bend = runs.steps, (runs.steps * gradient_drop).sum(1)
    # Below this cosine the function bends by rounding only.
    bends = bend > 1e-10 * step.norm(dim=1) * gradient_drop.norm(dim=1)
    safe = torch.where(bends, bend, 1.0)
    scale = torch.where(runs.is_scaled, 1.0, safe / gradient_drop.square().sum(1).clamp(min=torch.finfo(gradient_drop.dtype).tiny))
    H = runs.curvatures * scale[:, None, None]
    Hy = (H @ gradient_drop.unsqueeze(-1)).squeeze(-1)
    outer = (1 + (gradient_drop * Hy).sum(1) / safe)[:, None, None] * step[:, :, None] * step[:, None, :]
    mixed = Hy[:, :, None] * step[:, None, :]
    updated = H + (outer - mixed - mixed.mT) / safe[:, None, None]
    return runs.is_scaled | bends, torch.where(bends[:, None, None], updated, runs.curvatures)


def _with_gradients(functions: Functions, points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = points.detach().requires_grad_()
        values = functions(leaf, rows)
        (gradients,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), gradients


@torch.no_grad()
def maximize_batched(functions: Functions, starts: Tensor, evaluations: int, length: float, tolerance: float = 1e-3) -> Tensor:
    """Returns the best points ``(M, Q)`` of batched BFGS from several starts.

    There are starts ``(S, M, Q)`` and one function for each of the ``M``; ``functions`` gives values ``(L,)`` of points ``(L, Q)`` under
    those at positions ``(L,)``. All runs backtrack in one batch, from a first step of a ``length`` to a gain below ``tolerance``. After a
    few ``evaluations`` only the best run of each function continues. No result is below the best start.
    """
    num_starts, num, dim = starts.shape
    if not num:
        return starts[0]
    every = torch.arange(num, device=starts.device)
    runs = _Runs.start(functions, every.repeat(num_starts), starts.reshape(num_starts * num, dim).clone(), length)
    for done in range(evaluations):
        # Which start leads shows early.
        if done == min(6, evaluations - 1):
            runs = runs.select(runs.leaders(num))
        if bool(runs.is_done.all()):
            break
        runs.advance_(functions, tolerance)
    return runs.points[runs.leaders(num)]
