"""Training on all data at once: quasi-Newton steps, switches in closed form, births and deaths of dimensions, restarts."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pyro.contrib.gp.kernels import Isotropy
from torch import Tensor

from pyro_truncated.gplvm.spike_slab.bound import Views
from pyro_truncated.gplvm.spike_slab.initialization import Start, initialize
from pyro_truncated.gplvm.spike_slab.model import SpikeSlabMRD
from pyro_truncated.gplvm.spike_slab.quasi_newton import maximize_bound
from pyro_truncated.gplvm.spike_slab.switches import NEARLY_ON, remove_dimensions, restore, settle_switches, switch_moves, update_switches
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.counts import check_count

# How much longer length-scales are at first, and how much more gain of the bound is asked of an iteration then.
_STRETCH = 3.0
_ROUGHLY = 30.0


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a training went.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> isinstance(result.bound, float), result.is_all_noise
        (True, False)

    Attributes:
        bound: the bound of the model as it is left, with switches at zero that nothing speaks for (:func:`settle_switches`).
        starts: the bound that each start reached, in order, before switches were settled.
        history: bounds after each phase of the best start.
        is_all_noise: whether the best start has ended with every dimension switched off in every view, its data explained as noise.
    """

    bound: float
    starts: list[float]
    history: list[float]
    is_all_noise: bool = False


@names_arguments
@takes_arrays
def fit(
    model: SpikeSlabMRD,
    y: Views,
    *,
    start: Start = "pca",
    num_starts: int = 1,
    steps: int = 500,
    warm_up: int = 500,
    rounds: int = 4,
    removal_steps: int = 0,
    tolerance: float = 1e-5,
    generator: torch.Generator | None = None,
) -> Fit:
    r"""Trains a model on all data, from its starting point on.

    A start is trained in three phases. At first all switches are held on, because dimensions that are switched off early never learn what
    they would be good for; and length-scales are held long to begin with, so that latents find the directions of the data as in a linear
    model, from any start, before functions bend. Then switches at their optimum and quasi-Newton steps take turns; every switch is tried
    on and off. If asked for, whole dimensions are then removed where that raises the bound (:func:`remove_dimensions`). Last, the model
    takes what the best of several starts has reached, by the bound, and a switch that the data do not speak for is turned off for certain:
    it shows 0, not its prior probability, and costs :math:`-\log(1 - \pi)` nats of the bound (:func:`settle_switches`).

    Args:
        model: the model; holds the parameters of the best start afterwards.
        y: its data.
        start: see :func:`~pyro_truncated.gplvm.initialize`.
        num_starts: number of starts; more than one makes sense where a start is random, also through its inducing inputs.
        steps: quasi-Newton iterations of each round.
        warm_up: quasi-Newton iterations with all switches on.
        rounds: most rounds of switches and quasi-Newton steps.
        removal_steps: quasi-Newton iterations after each removal of a dimension that is tried; 0 tries none.
        tolerance: gain per observed number below which a phase ends.
        generator: source of randomness.

    Returns:
        The bounds reached.

    Raises:
        ValueError: if a count is out of range, or the data do not fit the model.
    """
    numbers = {"steps": steps, "warm_up": warm_up, "rounds": rounds, "removal_steps": removal_steps}
    steps, warm_up, rounds, removal_steps = (check_count(name, number, least=0) for name, number in numbers.items())
    num_starts = check_count("num_starts", num_starts)
    reached: list[float] = []
    best: tuple[dict[str, Tensor], list[float]] | None = None
    # What initialisation leaves alone, length-scales for instance, is at every start what it was at the first.
    before = copy.deepcopy(model.state_dict())
    for _ in range(num_starts):
        restore(model, before)
        initialize(model, y, start, generator)
        history = _train(model, y, steps, warm_up, rounds, tolerance)
        if removal_steps:
            remove_dimensions(model, y, removal_steps, tolerance=tolerance)
            update_switches(model, y)
            history.append(maximize_bound(model, y, steps, tolerance=tolerance))
        reached.append(history[-1])
        if best is None or reached[-1] == max(reached):
            best = copy.deepcopy(model.state_dict()), history
    assert best is not None
    restore(model, best[0])
    bound = settle_switches(model, y)
    is_all_noise = bool((model.probability < 0.5).all())
    return Fit(bound, reached, best[1], is_all_noise)


@contextmanager
def _nearly_linear(model: SpikeSlabMRD) -> Iterator[None]:
    """A context in which length-scales are so long that functions hardly bend, and variances such that they are as steep as before."""
    stretched = [view.kernel for view in model.views if isinstance(view.kernel, Isotropy)]
    for kernel in stretched:
        _stretch(kernel, _STRETCH)
    try:
        yield
    finally:
        for kernel in stretched:
            _stretch(kernel, 1 / _STRETCH)


@torch.no_grad()
def _stretch(kernel: Isotropy, factor: float) -> None:
    lengthscale, variance = torch.as_tensor(kernel.lengthscale), torch.as_tensor(kernel.variance)
    kernel.lengthscale, kernel.variance = factor * lengthscale, factor**2 * variance  # type: ignore[assignment]


def _train(model: SpikeSlabMRD, y: Views, steps: int, warm_up: int, rounds: int, tolerance: float) -> list[float]:
    """The phases of one start; returns the bound after each."""
    size = float(sum(v.numel() for v in model.check_data(y)))
    with model.holding(1.0):
        # With the noise held low as well: else the easiest way up is often to call everything noise.
        with _nearly_linear(model):
            maximize_bound(model, y, warm_up, tolerance=_ROUGHLY * tolerance, fixed=("noise", "kernel"))
        maximize_bound(model, y, warm_up, tolerance=tolerance, fixed=("noise",))
        history = [maximize_bound(model, y, warm_up, tolerance=tolerance)]
    with torch.no_grad():
        model.logits = torch.full_like(model.logits, NEARLY_ON)
    for _ in range(rounds):
        update_switches(model, y)
        switch_moves(model, y)
        update_switches(model, y)
        history.append(maximize_bound(model, y, steps, tolerance=tolerance))
        if len(history) > 2 and history[-1] - history[-2] <= tolerance * size:
            break
    return history
