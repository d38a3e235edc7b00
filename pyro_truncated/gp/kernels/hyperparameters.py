"""Kernels by name, and their parameters on a logarithmic box."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable

import torch
from pyro.contrib.gp import kernels
from torch import Tensor

from pyro_truncated.gp.optimization import minimize

Parameters = dict[str, Tensor]
NOISE = "noise"

_NOISE_BOX = (-7.0, 2.0)
_OTHER_HALF_WIDTH = 7.0
_EDGE = 1e-3
# Nats per target: of 20 000 targets, a fiftieth of a nat in all.
_NEGLIGIBLE_GAIN = 1e-6


def make_kernel(kernel: str | kernels.Kernel, inputs: Tensor) -> kernels.Kernel:
    r"""Returns a kernel in float64 by name, or a copy.

    Inputs ``(N, D)`` are standardised.

    ``"linear"`` is :math:`a\,x^\top x'`. ``"rbf"`` is :math:`r\,\exp(-\|x - x'\|^2 / 2\ell^2)`,
    where :math:`\ell` starts at the median distance of inputs over :math:`\sqrt 2`.
    ``"composition"`` is the sum of both and a constant. None of them holds the noise.

    Raises:
        ValueError: for an unknown name.
        TypeError: for anything but a name or a kernel.
    """
    if isinstance(kernel, kernels.Kernel):
        return copy.deepcopy(kernel).to(device=inputs.device, dtype=torch.float64)
    if not isinstance(kernel, str):
        raise TypeError(f"kernel must be a name or a kernel of pyro.contrib.gp.kernels; got {type(kernel).__name__}")
    dim = inputs.shape[1]
    one = torch.ones((), dtype=torch.float64, device=inputs.device)
    make: dict[str, Callable[[], kernels.Kernel]] = {
        "linear": lambda: kernels.Linear(dim, one / dim),
        "rbf": lambda: kernels.RBF(dim, one.clone(), _median_distance(inputs) / math.sqrt(2)),
        "composition": lambda: kernels.Sum(kernels.Sum(make["rbf"](), make["linear"]()), kernels.Constant(dim, one.clone())),
    }
    if kernel not in make:
        raise ValueError(f"kernel must be one of {', '.join(map(repr, make))}, or a kernel of pyro.contrib.gp.kernels; got {kernel!r}")
    return make[kernel]()


def parameters_of(kernel: kernels.Kernel, noise: Tensor) -> Parameters:
    """Returns unconstrained kernel parameters and the noise variance's logarithm.

    Parameters are logarithms where Pyro's transform is exp.
    """
    found = {name: value.detach().clone() for name, value in kernel.named_parameters()}
    return {**found, NOISE: noise.detach().log()}


class Box:
    r"""Bounds of every parameter, and the map to the box.

    The map from free values is :math:`\theta = l + (u - l)\,\mathrm{sigmoid}(z)`.

    On a flat marginal likelihood an unbounded optimiser runs off to amplitudes at which a covariance matrix has no digits left. The
    bounds suit standardised inputs and targets between 0 and 1; a kernel that is of no use ends at its lowest variance.

    Args:
        kernel: the kernel; parameters of an unknown kind are bounded around its present ones.
    """

    def __init__(self, kernel: kernels.Kernel) -> None:
        self.bounds = {NOISE: _NOISE_BOX}
        for prefix, module in kernel.named_modules():
            for name, value in module.named_parameters(recurse=False):
                self.bounds[f"{prefix}.{name}" if prefix else name] = _bounds(module, name, value)

    def free(self, parameters: Parameters) -> Parameters:
        """Returns free values of parameters; those on the boundary are moved inside."""
        found = {}
        for name, value in parameters.items():
            low, high = self.bounds[name]
            found[name] = ((value - low) / (high - low)).clamp(_EDGE, 1 - _EDGE).logit()
        return found

    def constrain(self, free: Parameters) -> Parameters:
        """Parameters in the box of free values."""
        return {name: self.bounds[name][0] + (self.bounds[name][1] - self.bounds[name][0]) * z.sigmoid() for name, z in free.items()}


def maximize(
    objective: Callable[[Parameters], Tensor], start: Parameters, box: Box, steps: int, tolerance: float = _NEGLIGIBLE_GAIN
) -> tuple[Parameters, float]:
    """Returns parameters in the box that raise an objective.

    They come from at most ``steps`` iterations of L-BFGS.

    They end early when an iteration gains less than ``tolerance``, as it soon does where a fit goes on from the one before.

    Returns:
        The parameters and their objective; those of the start if nothing better, or nothing finite, was found.
    """
    with torch.no_grad():
        before = float(objective(start))
    free = {name: value.detach().clone().requires_grad_() for name, value in box.free(start).items()}

    def loss() -> Tensor:
        value = -objective(box.constrain(free))
        value.backward()
        return value

    with torch.enable_grad():
        found = minimize(loss, list(free.values()), max_iterations=steps, tolerance=tolerance)
    if not -found.value > before:
        return start, before
    return {name: value.detach() for name, value in box.constrain(free).items()}, -found.value


def _median_distance(inputs: Tensor, most: int = 500) -> Tensor:
    """Returns the median distance of two inputs, 1 if all are equal.

    At most 500 evenly spaced inputs are used.
    """
    rows = inputs[:: max(1, len(inputs) // most)][:most]
    distances = torch.pdist(rows)
    median = distances.median() if len(distances) else distances.sum()
    return median if bool(median > 0) else torch.ones_like(median)


@functools.singledispatch
def _bounds(module: torch.nn.Module, name: str, value: Tensor) -> tuple[float, float]:
    """Returns bounds of one unconstrained parameter.

    By default they are the start divided and multiplied by e^7.
    """
    centre = value.detach()
    return float(centre.min()) - _OTHER_HALF_WIDTH, float(centre.max()) + _OTHER_HALF_WIDTH


@_bounds.register(kernels.Isotropy)
def _(module: kernels.Isotropy, name: str, value: Tensor) -> tuple[float, float]:
    return (math.log(0.3), math.log(60.0)) if name.startswith("lengthscale") else (-7.0, 4.0)


@_bounds.register(kernels.DotProduct)
def _(module: kernels.DotProduct, name: str, value: Tensor) -> tuple[float, float]:
    return -9.0, 3.0


@_bounds.register(kernels.Constant)
def _(module: kernels.Constant, name: str, value: Tensor) -> tuple[float, float]:
    return -7.0, 4.0
