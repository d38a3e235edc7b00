"""Trains a model of patches for restoration.

The model may be one of the library or of a user.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from pyro.infer import SVI
from pyro.optim import ClippedAdam
from torch import Tensor

from pyro_truncated.em.closed_form import ClosedForm, ClosedFormModel
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.restoration.pursuit import Pursuit
from pyro_truncated.search.base import Search
from pyro_truncated.search.evolutionary import EvolutionarySearch
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.utils.annealing import cooling
from pyro_truncated.utils.console import progress_bar
from pyro_truncated.utils.isolation import spare_random_numbers

_START_TEMPERATURE, _ANNEALED = 3.0, 0.25
_PATIENCE, _TOLERANCE = 3, 2e-4
_LEARNING_RATE = 0.01

ModelOfPatches = torch.nn.Module | Callable[[int], Any]


def make_model(model: ModelOfPatches, num_observed: int) -> Any:
    """Returns the model, or calls a factory with the number of entries.

    Raises:
        TypeError: if it cannot reconstruct data from populations.
        ValueError: if it is one of patches of another size.
    """
    result: Any = model if isinstance(model, torch.nn.Module) else model(num_observed)
    name, reconstruct = type(result).__name__, getattr(result, "reconstruct", None)
    if not callable(reconstruct) or list(inspect.signature(reconstruct).parameters)[:2] != ["population", "y"]:
        raise TypeError(f"model must have a method reconstruct(population, y), as the models of sparse coding have; got {name}")
    if hasattr(result, "gibbs"):
        raise TypeError(f"model must reconstruct from populations of states; {name} does so from draws of a GibbsGuide")
    if getattr(result, "num_observed", num_observed) != num_observed:
        raise ValueError(f"model must be one of patches of {num_observed} entries; {name} has num_observed={result.num_observed}")
    return result


@torch.no_grad()
def start(model: Any, filled: Tensor, noise: float, generator: torch.Generator | None) -> None:
    """Initialises elements by random patches where the model can.

    Few of them are active, and the noise begins a little above the expected one.
    """
    if hasattr(model, "initialize"):
        takes_generator = "generator" in inspect.signature(model.initialize).parameters
        model.initialize(filled, **({"generator": generator} if takes_generator else {}))
    if isinstance(getattr(model, "prior", None), Tensor):
        model.prior = torch.full_like(model.prior, min(0.5, 0.02 * max(1.0, 100 / model.num_latents)))
    if isinstance(getattr(model, "scale", None), Tensor) and model.scale.dim() == 0:
        model.scale = torch.full_like(model.scale, 1.1 * noise)


def train(model: Any, y: Tensor, passes: int, num_states: int, batch_size: int, progress: bool | None) -> tuple[AutoTruncated, list[float]]:
    """Trains by online EM where M-steps are closed-form, else by gradients.

    Both use minibatches, and the temperature falls at first.

    Returns:
        The trained guide, and the free energy per patch after each pass; there are fewer passes if it stops growing.
    """
    per_pass = max(1, round(len(y) / batch_size))
    guide = AutoTruncated(model, num_states=num_states)
    optimizer: Any = ClosedForm(model, minibatch="online") if isinstance(model, ClosedFormModel) else ClippedAdam({"lr": _LEARNING_RATE})
    elbo = Truncated_ELBO(_search(model), temperature=cooling(_START_TEMPERATURE, passes * per_pass, _ANNEALED))
    svi = SVI(model, guide, optimizer, elbo)
    free_energies: list[float] = []
    with progress_bar(progress, total=passes * per_pass, desc="restoring") as bar:
        for number in range(passes):
            total = 0.0
            for _ in range(per_pass):
                total -= svi.step(y, batch_size=batch_size if batch_size < len(y) else None) / len(y) / per_pass
                bar.update()
            free_energies.append(total)
            bar.set_postfix(free_energy=f"{total:.2f}")
            if number >= _ANNEALED * passes + 2 * _PATIENCE and _has_settled(free_energies, y.shape[1]):
                break
    return guide, free_energies


def _search(model: Any) -> Search:
    """Returns the search: greedy pursuit beside evolution where contributions add up.

    Other models use evolution alone.
    """
    evolution = EvolutionarySearch(5, 4, 1)
    return evolution if getattr(model, "is_positive", True) else Pursuit(model) + evolution


def _has_settled(free_energies: list[float], num_observed: int) -> bool:
    """Whether the last passes gained less than some 0.0001 nats per entry."""
    now, before = free_energies[-_PATIENCE:], free_energies[-2 * _PATIENCE : -_PATIENCE]
    return sum(now) - sum(before) < _TOLERANCE * _PATIENCE * num_observed


@torch.no_grad()
def posterior_means(model: Any, guide: AutoTruncated, y: Tensor) -> Tensor:
    """Posterior means of all patches under the model as it is now."""
    with spare_random_numbers():
        guide.refresh_(y)
    return torch.cat([model.reconstruct(block, y) for block in guide.population(torch.arange(len(y))).split(2**14)])
