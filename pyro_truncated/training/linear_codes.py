"""Warm starts of neural decoders by the codes of a linear model."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.distributed.shards import total_rows
from pyro_truncated.em.closed_form import ClosedFormModel
from pyro_truncated.em.gibbs_guide import GibbsModel
from pyro_truncated.search.automatic import is_of_many
from pyro_truncated.training.convergence import fixed, train
from pyro_truncated.training.decoders import observed_numbers
from pyro_truncated.training.exchanges import AsTheyAre
from pyro_truncated.training.linear_causes import LinearCauses
from pyro_truncated.training.model_parameters import draws_starts, forgetting_guides, is_a_network, layers_of, parameters_of, put_back
from pyro_truncated.training.model_runs import Run, Settings, num_posteriors, offer
from pyro_truncated.training.starts import Start
from pyro_truncated.utils.devices import device_of


def decoded_values(model: Any, y: Tensor, settings: Settings) -> Tensor | None:
    """Returns the real numbers ``(N, D)`` that a network decodes states into.

    They are in units of their deviation.

    ``None`` for other models: those with ``draw_start``, shared or continuous latents, several discrete sites, frozen networks,
    counts or missing values, and data in files or several processes.
    """
    if isinstance(model, (ClosedFormModel, GibbsModel)) or draws_starts(model) or not is_a_network(model, y):
        return None
    parameters = parameters_of(model, y)
    if not any(takes_gradients(model, parameters[name]) for name in layers_of(model, y) & parameters.keys()):
        return None
    guide = settings.guide_for(model, y)
    layout = guide.layout
    is_apart = num_posteriors(guide, y) == total_rows(y) == len(y) == layout.num_data and getattr(y, "file", None) is None
    if not is_apart or len(layout.sites) > 1 or layout.other_latents or not layout.space.is_binary or is_of_many(layout.space):
        return None
    found = observed_numbers(model, y, layout)
    if found is None or layout.space.num_latents < 2:
        return None
    value = found[1]["value"]
    value = value.detach().as_subclass(Tensor).flatten(1).float()
    value = value - value.mean(0)
    unit = value.std(correction=0)
    return value / unit if bool(unit > 0) else None


def likeliest_states(model: LinearCauses, values: Tensor, settings: Settings, found: Start) -> Tensor:
    """Returns a linear model's likeliest state of each data point, ``(N, H)``."""
    assert found.states is not None
    put_back(model, values, found.parameters)
    with forgetting_guides(model, values):
        run = Run(model, values, settings)
        offer(run, values, found.states)
        assert run.truncated is not None
        return run.truncated.space.unpack(run.truncated.population().mode())


def takes_gradients(model: Any, value: Tensor) -> bool:
    """Whether a parameter is learned.

    All of Pyro's store are, and of modules those that are not frozen.
    """
    return value.requires_grad or not isinstance(model, torch.nn.Module)


@torch.no_grad()
def shuffle(model: Any, y: Tensor, generator: torch.Generator | None) -> None:
    """Permutes the entries of learned parameters; frozen ones stay.

    Weights that are all equal get noise instead, since any order leaves them and their units equal.
    """
    for value in parameters_of(model, y).values():
        if not takes_gradients(model, value):
            continue
        order = torch.randperm(value.numel(), generator=generator, device=device_of(generator)).to(value.device)
        values = value.flatten()[order]
        if value.dim() > 1 and bool((values == values[0]).all()):
            noise = torch.randn(values.shape, generator=generator, dtype=values.dtype, device=device_of(generator)).to(values.device)
            values = values + (float(values[0].abs()) or 1 / math.sqrt(value.shape[-1])) * noise
        value.copy_(values.view_as(value))


def teach(model: Any, y: Tensor, settings: Settings, code: Tensor, steps: int) -> None:
    """Trains a network to decode fixed states ``(N, H)``, one per data point."""
    with forgetting_guides(model, y):
        run = Run(model, y, dataclasses.replace(settings, search=AsTheyAre(), num_states=1))
        assert run.truncated is not None
        words = run.truncated.space.pack(code.unsqueeze(1))
        run.truncated.populations.store_(run.scorer(y).score(words), None, words)
        train(run, y, fixed(steps))
