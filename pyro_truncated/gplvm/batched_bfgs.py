"""Maxima of many functions of few variables at once, by quasi-Newton steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from pyro_truncated.utils.arguments import check_count

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
        """Returns gradient steps of the given length, without a curvature."""
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
        """Only some of the climbs."""
        return _Runs(*(getattr(self, field.name)[index] for field in dataclasses.fields(self)))

    def advance_(self, functions: Functions, tolerance: float) -> None:
        """One evaluation for each climb that is not done."""
        now = (~self.is_done).nonzero().squeeze(1)
        here = self.select(now)
        slope = (here.gradients * here.steps).sum(1)
        there = here.points + here.steps
        values, gradients = _with_gradients(functions, there, here.rows)
        # A step is taken if it gains this share of what the slope promises.
        is_better = values >= here.values + 1e-4 * slope
        fall = here.gradients - gradients
        scaled, curvatures = _curvatures(here, fall)
        curvatures = torch.where(is_better[:, None, None], curvatures, here.curvatures)
        new_gradients = torch.where(is_better[:, None], gradients, here.gradients)
        new_steps = (curvatures @ new_gradients.unsqueeze(-1)).squeeze(-1)
        new_steps = new_steps * (1.0 / new_steps.norm(dim=1, keepdim=True).clamp(min=1.0))
        # The maximum of the parabola through both values and the slope.
        shrink = (slope / (2 * (slope - (values - here.values)))).nan_to_num(0.5).clamp(0.1, 0.5)
        new_steps = torch.where(is_better[:, None], new_steps, shrink[:, None] * here.steps)
        new_values = torch.where(is_better, values, here.values)
        expected = (new_gradients * new_steps).sum(1)
        # Gains below so many units in the last place of a value are not seen.
        least = tolerance + 8 * torch.finfo(values.dtype).eps * new_values.abs()
        self.points[now] = torch.where(is_better[:, None], there, here.points)
        self.values[now], self.gradients[now], self.steps[now], self.curvatures[now] = new_values, new_gradients, new_steps, curvatures
        self.is_scaled[now] = torch.where(is_better, scaled, here.is_scaled)
        self.is_done[now] = ~(expected > least)


def _curvatures(here: _Runs, fall: Tensor) -> tuple[Tensor, Tensor]:
    """Updates inverse curvatures where functions bend down; tells whether they are scaled."""
    step, bend = here.steps, (here.steps * fall).sum(1)
    # Below this cosine the function bends by rounding only.
    bends = bend > 1e-10 * step.norm(dim=1) * fall.norm(dim=1)
    safe = torch.where(bends, bend, 1.0)
    scale = torch.where(here.is_scaled, 1.0, safe / fall.square().sum(1).clamp(min=torch.finfo(fall.dtype).tiny))
    H = here.curvatures * scale[:, None, None]
    Hy = (H @ fall.unsqueeze(-1)).squeeze(-1)
    outer = (1 + (fall * Hy).sum(1) / safe)[:, None, None] * step[:, :, None] * step[:, None, :]
    mixed = Hy[:, :, None] * step[:, None, :]
    updated = H + (outer - mixed - mixed.mT) / safe[:, None, None]
    return here.is_scaled | bends, torch.where(bends[:, None, None], updated, here.curvatures)


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
    evaluations, (num_starts, num, dim) = check_count("evaluations", evaluations, least=0), starts.shape
    if not num_starts:
        raise ValueError("starts must hold at least one start; got none")
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
