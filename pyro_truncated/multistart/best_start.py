"""Initialisation by the best of several short runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_truncated.distributed.shards import drawn_rows
from pyro_truncated.em.closed_form import restore_driver
from pyro_truncated.multistart.profile import check_one_array, profile_model
from pyro_truncated.multistart.trainer import Schedule, Trainer, train
from pyro_truncated.search.base import Search
from pyro_truncated.utils.annealing import Temperature
from pyro_truncated.utils.arguments import check_counts, check_kinds


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
    """Initialises a model by the best of several short EM runs.

    They use a random part of the data.

    EM converges to the local optimum that its initialisation leads to. Merged or split components show after few iterations on few data
    points, in a clearly lower free energy. So the choice costs a small share of the training. Processes that share the data draw the
    same part. Components of a mixture with ``split_and_merge`` move every ten steps, if one process has all data.

    Example:
        >>> y = linear_bars(50, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8)
        >>> reached = best_start(model, y, EvolutionarySearch(crossover=True), num_starts=3, steps=5, num_states=16)
        >>> len(reached)
        3

    Args:
        model: has ``initialize(y, generator)`` and closed-form M-steps; holds the parameters of the best run afterwards. A model with a
            Gibbs sampler, such as :class:`~pyro_truncated.models.MaxSpikeSlabSparseCoding`, is trained by
            :class:`~pyro_truncated.GibbsEM`.
        y: data, ``(N, D)``.
        search: fills the populations of the short runs. What it learns from the data in a run is forgotten after it.
        num_starts: number of starts.
        num_data: data points drawn for the short runs, without replacement; all if there are fewer.
        steps: EM iterations of a short run.
        num_states: states per data point in the short runs; all of them if the space has fewer. Has no meaning for Gibbs sampling.
        temperature: as in :class:`~pyro_truncated.Truncated_ELBO` or :class:`~pyro_truncated.GibbsEM`.
        generator: source of randomness of the part of the data and the initialisations.

    Returns:
        The free energy per data point that each start reached; with Gibbs sampling the mean log joint of data and draws.

    Raises:
        ValueError: if a count is below 1.
        TypeError: if the model lacks ``initialize`` or closed-form M-steps, or the search selects no latents for a Gibbs sampler.
    """
    check_kinds(best_start, model=model, temperature=temperature, generator=generator)
    num_starts, num_data, steps, num_states = check_counts(num_starts=num_starts, num_data=num_data, steps=steps, num_states=num_states)
    if not hasattr(model, "initialize"):
        raise TypeError(f"best_start needs a model with the method initialize; {type(model).__name__} has none")
    part = drawn_rows(check_one_array(y), num_data, generator)
    profile = profile_model(model, part, search, num_states=num_states, generator=generator)
    if profile.optimizer == "gradients":
        raise TypeError(f"best_start needs a model with closed-form M-steps (ClosedFormModel); {type(model).__name__} has none")
    energies: list[float] = []
    with restore_driver(model):
        for _ in range(num_starts):
            model.initialize(part, generator)
            energies.append(train(Trainer(profile, temperature), Schedule(steps, steps)).free_energy)
            if energies[-1] == max(energies):
                best = profile.parameters.snapshot()
        profile.parameters.load(best)
    search.forget()
    return energies
