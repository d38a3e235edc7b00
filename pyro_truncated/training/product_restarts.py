"""Random restarts of models with a set of states for each node.

Nodes are those of the factor graph of sequences, trees and hierarchies.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from pyro_truncated.training.convergence import finish
from pyro_truncated.training.learn_report import LearnReport, Restart
from pyro_truncated.training.model_parameters import copies, disturb, draw_start, draws_starts, forgetting_guides, put_back
from pyro_truncated.training.model_runs import Run, Settings
from pyro_truncated.utils.console import ProgressBar

# The most restarts where nobody says how many, and the number of steps of which a mean is compared.
_MAX_RESTARTS = 8
_MEAN_STEPS = 10


@dataclasses.dataclass(frozen=True)
class ProductRestarts:
    """What restarts have reached.

    Attributes:
        guide: the guide, trained from the best restart.
        energies: free energies per data point of all restarts.
        report: what was done.
    """

    guide: Any
    energies: list[float]
    report: LearnReport


def learn_on_product(
    model: Any,
    y: Any,
    settings: Settings,
    *,
    restarts: int | None,
    short_steps: int,
    steps: int,
    tolerance: float,
    generator: torch.Generator | None,
    bar: ProgressBar,
) -> ProductRestarts:
    """Trains the best of several short runs from random places.

    Short runs go on until two of the best agree.

    The first restart begins where the model is, others at its parameters with noise as large as these, or where the model draws a start.

    Args:
        model: the model.
        y: data.
        settings: what all runs have in common.
        restarts: how many, ``None`` until two agree, at most eight.
        short_steps: steps of each restart.
        steps: steps of the training from the best one.
        tolerance: largest difference of free energies per data point (nats) of restarts that agree.
        generator: source of randomness.
        bar: shows progress.
    """
    first = copies(model, y)
    found: list[tuple[float, dict[str, Any], dict[str, Any]]] = []
    for number in range(restarts or _MAX_RESTARTS):
        bar.set_description_str(f"restart {number + 1}")
        put_back(model, y, first)
        if draws_starts(model):
            draw_start(model, y, generator)
        elif number:
            disturb(model, y, first, generator)
        with forgetting_guides(model, y):
            run = Run(model, y, settings, 1.0)
            values = [run.step(y) for _ in range(short_steps)]
            run.end()
            beside = {name: value.clone() for name, value in run.beside.items()}
            found.append((math.fsum(values[-_MEAN_STEPS:]) / len(values[-_MEAN_STEPS:]), copies(model, y), beside))
        if restarts is None and _agree([reached for reached, _, _ in found], tolerance):
            break
    energies = [reached for reached, _, _ in found]
    best = max(found, key=lambda one: one[0] if math.isfinite(one[0]) else -math.inf)
    put_back(model, y, best[1])
    run = Run(model, y, settings if best[2] else settings.slowing(steps))
    run.take_over(best[2], y)
    bar.set_description_str("training")
    last = finish(run, y, steps, -math.inf, tolerance)
    doubts, reason = None, "two restarts agree"
    if not _agree(energies, tolerance):
        shown = ", ".join(f"{value:.2f}" for value in sorted(energies, reverse=True)[:3])
        doubts = f"no two of {len(energies)} restarts agree: their best free energies per data point are {shown}"
        reason = "all restarts are made"
    places = (
        ["draw_start"] * len(energies) if draws_starts(model) else ["parameters of the model", *["these with noise"] * (len(energies) - 1)]
    )
    made = tuple(Restart(place, short_steps, energy) for place, energy in zip(places, energies, strict=True))
    chosen = {"search": type(run.search).__name__, "num_states": settings.num_states, "tolerance": tolerance, "lr": settings.lr}
    report = LearnReport(made, {}, reason, doubts, last.steps, last.remaining, "gradients", chosen)
    return ProductRestarts(run.guide, energies, report)


def _agree(energies: list[float], tolerance: float) -> bool:
    """Whether the two best are equal up to the tolerance.

    The first two of two are not enough.
    """
    ranked = sorted((value for value in energies if math.isfinite(value)), reverse=True)
    return len(ranked) > 2 and ranked[0] - ranked[1] <= tolerance
