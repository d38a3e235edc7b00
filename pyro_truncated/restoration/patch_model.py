"""Models of patches for restoration: sizes of the patches, training, greedy states.

The model may be one of the library or of a user.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from pyro.infer import SVI
from pyro.optim import ClippedAdam
from torch import Tensor
from torch.nn import functional as F

from pyro_truncated.em.closed_form import ClosedForm, ClosedFormModel
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.restoration.noise import deviation
from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.search.evolutionary import EvolutionarySearch
from pyro_truncated.states.population import Population
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.utils.annealing import cooling
from pyro_truncated.utils.arguments import check_count, names_arguments
from pyro_truncated.utils.console import progress_bar
from pyro_truncated.utils.parameter_store import spare_random_numbers


class Pursuit(Search):
    r"""Proposes the states on a greedy path.

    Each step adds the dictionary element that explains most of the residual of a data point.

    With elements :math:`w_h` of unit length and the residual :math:`r`, the next element is
    :math:`\arg\max_h |w_h^\top r|`, and :math:`r \leftarrow r - (w_h^\top r) w_h`. Source: Mallat
    and Zhang, "Matching pursuits with time-frequency dictionaries", IEEE Transactions on Signal
    Processing 41, 1993. Missing entries count as zero. For models of binary latents with a ``weight
    (D, H)`` and one observed site.

    Example:
        >>> y = torch.randn(20, 16)
        >>> model = SpikeSlabSparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, Pursuit(model), steps=1)

    Args:
        model: has the dictionary, ``weight``.
        length: number of states on a path.

    Raises:
        TypeError: if the model has no dictionary.
        ValueError: if the length is not positive; when searching, if data or latents are not those of the dictionary.
    """

    binary_only = True

    @names_arguments
    def __init__(self, model: Any, length: int = 6) -> None:
        if not isinstance(getattr(model, "weight", None), Tensor):
            raise TypeError(f"model must have a dictionary, weight (D, H); got {type(model).__name__}")
        self.model = model
        self.length = check_count("length", length)

    def propose(self, batch: SearchBatch) -> Population:
        """The ``length`` states of the path of every data point."""
        self.check_space(batch.space)
        directions = F.normalize(self.model.weight.detach(), dim=0)
        shapes = {name: tuple(value.shape) for name, value in batch.observations.items()}
        if [shape[1:] for shape in shapes.values()] != [directions.shape[:1]] or batch.space.num_latents != directions.shape[1]:
            raise ValueError(
                f"Pursuit by a dictionary {tuple(directions.shape)} is for one observed site (N, D) and H latents; got sites {shapes} and "
                f"{batch.space.num_latents} latents"
            )
        (y,) = batch.observations.values()
        similarity, gram = y.nan_to_num(0.0).to(directions) @ directions, directions.mT @ directions
        # States of single elements, as bits: a state with one element more is "or".
        single = batch.space.pack(torch.eye(len(gram), dtype=torch.uint8, device=gram.device))
        path = [single.new_zeros(len(similarity), single.shape[1])]
        for _ in range(self.length):
            best = similarity.abs().argmax(1)
            similarity = similarity - similarity.gather(1, best.unsqueeze(1)) * gram[best]
            path.append(path[-1] | single[best])
        return batch.evaluate(torch.stack(path[1:], 1))


ModelOfPatches = torch.nn.Module | Callable[[int], Any]


def make_model(model: ModelOfPatches, num_observed: int) -> Any:
    """Returns the model, or what its factory makes, if it fits patches."""
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
def start(model: Any, complete: Tensor, noise: float, generator: torch.Generator | None) -> None:
    """Initialises elements by random patches where the model can.

    Few of them are active, and the noise begins a little above the expected one.
    """
    if hasattr(model, "initialize"):
        takes_generator = "generator" in inspect.signature(model.initialize).parameters
        model.initialize(complete, **({"generator": generator} if takes_generator else {}))
    if isinstance(getattr(model, "prior", None), Tensor):
        # Two active latents; of more than a hundred a fiftieth.
        model.prior = torch.full_like(model.prior, min(0.5, 0.02 * max(1.0, 100 / model.num_latents)))
    if isinstance(getattr(model, "scale", None), Tensor) and model.scale.dim() == 0:
        # A little more than the noise, for what the model does not explain at first.
        model.scale = torch.full_like(model.scale, 1.1 * noise)


def train(model: Any, y: Tensor, passes: int, num_states: int, batch_size: int, progress: bool | None) -> tuple[AutoTruncated, list[float]]:
    """Trains by online EM where M-steps are closed-form, else by gradients.

    Both use minibatches, and the temperature falls in the first share of the passes. Returns the guide, and the free energy per patch after
    each pass until it stops growing: the last passes are compared with as many before.
    """
    annealed_share, patience = 0.25, 3
    per_pass = max(1, round(len(y) / batch_size))
    guide = AutoTruncated(model, num_states=num_states)
    optimizer: Any = ClosedForm(model, minibatch="online") if isinstance(model, ClosedFormModel) else ClippedAdam({"lr": 0.01})
    # Evolution, beside greedy pursuit where contributions add up.
    search: Search = EvolutionarySearch(5, 4, 1)
    search = search if getattr(model, "is_positive", True) else Pursuit(model) + search
    elbo = Truncated_ELBO(search, temperature=cooling(3.0, passes * per_pass, annealed_share))
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
            if number >= annealed_share * passes + 2 * patience:
                # The last passes gained less than 0.0002 nats per entry.
                now, before = free_energies[-patience:], free_energies[-2 * patience : -patience]
                if sum(now) - sum(before) < 2e-4 * patience * y.shape[1]:
                    break
    return guide, free_energies


@torch.no_grad()
def posterior_means(model: Any, guide: AutoTruncated, y: Tensor) -> Tensor:
    """Posterior means of all patches under the model as it is now."""
    with spare_random_numbers():
        guide.refresh_(y)
    return torch.cat([model.reconstruct(block, y) for block in guide.population(torch.arange(len(y))).split(2**14)])


def mixture_patch_sides(image: Tensor, noise: float, shape: torch.Size, has_channels: bool) -> list[int]:
    """Sides of patches for mixtures, of which axes may be shorter.

    They were chosen on images that are not reported: tests/papers/results/restoration.md.
    """
    sides: tuple[int, ...]
    if len(shape) != 2:
        sides = (32, 64) if len(shape) == 1 else (4, 5)
    elif (~(image.isnan().all(-1) if has_channels else image.isnan())).double().mean() < 1 / 3:
        # If of so few pixels anything is seen, windows have to be larger to show any stripes.
        sides = (5, 7) if has_channels else (6, 10)
    elif has_channels:
        # Where entries are missing two are as good as four, in a fourth of the time, as every window has a covariance of its own.
        sides = (4, 5) if bool(image.isnan().any()) else (4, 5, 6, 8)
    else:
        ratio = _ratio(image, noise)
        sides = (5, 6, 8) if ratio <= 0.4 else (6, 7, 8) if ratio <= 0.8 else (7, 8, 10)
    # Patches may be as long as a quarter of the longest axis, though other axes are shorter.
    most = max(min(shape), max(shape) // 4)
    return sorted({min(side, most) for side in sides})


def allows_stacking(image: Tensor, noise: float) -> bool:
    """Whether an image has some size, little noise and no missing entries."""
    is_large = image.dim() == 2 and min(image.shape) >= 100
    # Up to this ratio the last round of images of some size has sides that suit the image.
    return is_large and not bool(image.isnan().any()) and _ratio(image, noise) <= 0.4


def model_patch_side(model: ModelOfPatches, shape: torch.Size, channels: int | None) -> int | None:
    """Returns the side of a finished model's patches, ``None`` if none fits."""
    entries = getattr(model, "num_observed", None)
    if not isinstance(entries, int):
        return None
    side = round((entries / (channels or 1)) ** (1 / len(shape)))
    return side if 0 < side <= min(shape) and side ** len(shape) * (channels or 1) == entries else None


def side_for_model(image: Tensor, noise: float, shape: torch.Size) -> int:
    """Returns the side of a mixture's patches, which grows with the noise."""
    if len(shape) == 1:
        return min(64, len(image))
    ratio = _ratio(image, noise) if len(shape) == 2 else 0.0
    return min(8 if ratio <= 0.4 else 12 if ratio <= 0.8 else 16, *shape)


def _ratio(image: Tensor, noise: float) -> float:
    """Of the standard deviations of noise and signal."""
    # If all is noise the ratio is a million.
    return noise / math.sqrt(max(float(deviation(image)) ** 2 - noise**2, 1e-12 * noise**2))
