"""Starting points: the best of several short runs on a part of the data."""

from __future__ import annotations

import copy
from typing import Any

import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated.elbo import Temperature, Truncated_ELBO
from pyro_truncated.em import ClosedForm
from pyro_truncated.guide import AutoTruncated
from pyro_truncated.inspection import spare_random_numbers
from pyro_truncated.search.base import Search


def best_start(
    model: Any,
    y: Tensor,
    search: Search,
    *,
    num_starts: int = 5,
    num_data: int = 1000,
    steps: int = 50,
    num_states: int = 64,
    temperature: Temperature = 1.0,
    generator: torch.Generator | None = None,
) -> list[float]:
    """Initialises a model from the best of several short EM runs on a random part of the data.

    EM finds the local optimum its start leads to. Whether two components have merged, or one is split in two, shows after few iterations
    on few data points, in a free energy that is clearly lower; so the choice between starts costs a small share of the training.

    Args:
        model: has ``initialize(y, generator)`` and closed-form M-steps; holds the parameters of the best run afterwards.
        y: data, ``(N, D)``.
        search: fills the populations of the short runs. What it learns from the data in a run is forgotten after it.
        num_starts: number of starts.
        num_data: data points drawn for the short runs, without replacement; all if there are fewer.
        steps: EM iterations of a short run.
        num_states: states per data point in the short runs; all of them if the space has fewer.
        temperature: as in :class:`~pyro_truncated.Truncated_ELBO`.
        generator: source of randomness of the part of the data and the initialisations.

    Returns:
        The free energy per data point that each start reached.

    Raises:
        ValueError: if a count is below 1.
        TypeError: if the model lacks ``initialize`` or closed-form M-steps.
    """
    for name, value in (("num_starts", num_starts), ("num_data", num_data), ("steps", steps), ("num_states", num_states)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    if not hasattr(model, "initialize"):
        raise TypeError(f"best_start needs a model with the method initialize; {type(model).__name__} has none")
    device = None if generator is None else generator.device
    part = y[torch.randperm(len(y), generator=generator, device=device)[:num_data].to(y.device)]
    num_states = min(num_states, _space_size(model, part))
    reached: list[float] = []
    driver = getattr(model, "closed_form", None)
    best = copy.deepcopy(model.state_dict())
    search.forget()
    for _ in range(num_starts):
        model.initialize(part, generator)
        guide = AutoTruncated(model, num_states=num_states)
        closed_form = ClosedForm(model)
        svi = SVI(model, guide, closed_form, Truncated_ELBO(search, temperature=temperature))
        for _ in range(steps):
            loss = svi.step(part)
        closed_form.release()
        search.forget()
        reached.append(-float(loss) / len(part))
        if reached[-1] == max(reached):
            best = copy.deepcopy(model.state_dict())
    _restore(model, best)
    model.closed_form = driver
    return reached


def _space_size(model: Any, y: Tensor) -> int:
    """Number of joint states of a data point."""
    guide = AutoTruncated(model, num_states=1)
    with spare_random_numbers():
        guide.setup(y)
    return guide.space.size


def _restore(model: Any, state: dict[str, Tensor]) -> None:
    """Puts values back in place, so that Pyro's parameter store and optimisers keep the tensors they know."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(state[name])
