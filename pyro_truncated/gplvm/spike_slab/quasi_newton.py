"""Quasi-Newton steps on all data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_truncated.gp.optimization import minimize
from pyro_truncated.gplvm.spike_slab.bound import Views
from pyro_truncated.gplvm.spike_slab.model import SpikeSlabMRD
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.counts import check_count


@names_arguments
@takes_arrays
def maximize_bound(model: SpikeSlabMRD, y: Views, steps: int = 500, *, tolerance: float = 1e-5, fixed: Sequence[str] = ()) -> float:
    """Raises the bound in all parameters (but held switches) by L-BFGS with all data.

    A line search that fails ends a run of L-BFGS; the next one starts without memory of the curvature, until one of them gains nothing.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> initialize(model, y)
        >>> before, after = maximize_bound(model, y, steps=1), maximize_bound(model, y, steps=10)
        >>> after >= before
        True

    Args:
        model: the model.
        y: its data.
        steps: iterations at most.
        tolerance: gain per observed number below which it ends.
        fixed: parts of the names of parameters that stay as they are, such as ``"noise"``.

    Returns:
        The bound, never below that of the start.
    """
    steps = check_count("steps", steps, least=0)
    size = float(sum(v.numel() for v in model.check_data(y)))
    parameters = [p for name, p in model.named_parameters() if p.requires_grad and not any(part in name for part in fixed)]
    with torch.no_grad():
        if not any("point" in part for part in fixed):
            model.tighten(y)
        bound = float(model.bound(y))
    while steps > 0:
        reached, taken = _run_lbfgs(model, y, parameters, steps, size, tolerance)
        steps -= max(1, taken)
        gain, bound = reached - bound, reached
        if not gain > tolerance * size:
            break
    return bound


def _run_lbfgs(model: SpikeSlabMRD, y: Views, parameters: Sequence[Tensor], steps: int, size: float, tolerance: float) -> tuple[float, int]:
    """One run of L-BFGS: the bound, never below that of the start, and the number of iterations."""

    def loss() -> Tensor:
        value = -model.bound(y) / size
        value.backward()
        return value

    found = minimize(loss, parameters, max_iterations=steps, tolerance=tolerance / 10, gradient_tolerance=1e-8, memory=20)
    model.zero_grad()
    return -found.value * size, found.iterations
