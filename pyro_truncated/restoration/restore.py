"""Taking noise off images and signals, and filling in what is missing, with a dictionary learned from the damaged data alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from pyro.infer import SVI
from torch import Tensor
from torch.nn import functional as F

from pyro_truncated.em.closed_form import ClosedForm
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.models import SpikeSlabSparseCoding
from pyro_truncated.restoration.pursuit import Pursuit
from pyro_truncated.restoration.windows import Patches
from pyro_truncated.search.evolutionary import EvolutionarySearch
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.training.temperature import cooling
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import as_tensors
from pyro_truncated.utils.counts import check_counts
from pyro_truncated.utils.isolation import spare_random_numbers
from pyro_truncated.utils.progress import progress_bar

# Chosen on one photograph of 256 grey values with noise of deviation 15, 25 and 50: tests/papers/results/restoration.md.
_SIDES = ((0.4, 8), (0.8, 12), (math.inf, 16))
_LATENTS = 576
_START_TEMPERATURE, _ANNEALED = 3.0, 0.25
_PATIENCE, _TOLERANCE = 3, 2e-4


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored array, and what it was made with.

    Example:
        >>> restored = denoise(torch.randn(16, 16), side=4, num_latents=6, passes=1, num_states=6, progress=False)
        >>> restored.image.shape
        torch.Size([16, 16])

    Attributes:
        image: the restored array, in the shape and units of the damaged one.
        noise: the standard deviation of the noise that was learned, in the same units.
        model: the model of the patches, which have the mean of the array taken off.
        guide: its guide, with the posteriors of all patches.
        patches: how patches and array belong together.
        free_energies: the free energy per patch after each pass through the data.
    """

    image: Tensor
    noise: float
    model: Any
    guide: AutoTruncated
    patches: Patches
    free_energies: list[float]


@names_arguments
def denoise(
    image: Tensor,
    noise: float | None = None,
    *,
    side: int | None = None,
    num_latents: int = _LATENTS,
    stride: int = 1,
    channels: bool | None = None,
    passes: int = 20,
    num_states: int = 30,
    batch_size: int = 5000,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Restored:
    r"""Takes Gaussian noise off an image, a signal or a volume.

    All overlapping patches are modelled by spike-and-slab sparse coding, :math:`y_n = W (b_n \odot z_n) + \sigma \varepsilon`. Dictionary,
    prior and noise level are learned from the damaged array alone by online EM on minibatches of patches, from patches as the first
    elements, at a temperature that falls during the first passes. Every entry becomes the mean of the posterior means
    :math:`W \langle b_n \odot z_n \rangle` of the patches that cover it. Missing entries (NaN) are filled in.

    Example::

        restored = denoise(photograph, noise=25)
        restored.image, restored.noise

    Args:
        image: the damaged array: ``(length)``, ``(height, width)``, ``(height, width, 3)``, ...; a tensor or a NumPy array.
        noise: standard deviation of its noise, where training starts; default: estimated from the differences of neighbouring entries.
        side: side of a patch; default: 8, 12 or 16 by the ratio of noise and signal (``8`` for volumes, 64 entries for signals).
        num_latents: number of dictionary elements.
        stride: distance of neighbouring patches; above 1 faster and worse.
        channels: whether the last dimension holds channels; default: if it has 3 or 4 entries.
        passes: passes through all patches; fewer if the free energy stops growing.
        num_states: states per patch.
        batch_size: patches in a minibatch.
        generator: source of randomness of the first dictionary; default: torch's global one.
        progress: whether to show a progress bar; default: if the output is a terminal.

    Returns:
        The restored array with model, guide and noise level.

    Raises:
        ValueError: for an array without observed entries, with infinite ones or smaller than a patch, or a noise that is not positive.
    """
    image = _checked(image)
    num_latents, passes, num_states, batch_size = check_counts(
        num_latents=num_latents, passes=passes, num_states=num_states, batch_size=batch_size
    )
    if noise is not None and not 0.0 < noise < math.inf:
        raise ValueError(f"noise must be a positive standard deviation; got {noise}")
    has_channels = image.dim() > 1 and image.shape[-1] in (3, 4) if channels is None else channels
    shape = image.shape[:-1] if has_channels else image.shape
    level = noise if noise is not None else noise_level(image, len(shape))
    patches = Patches(shape, side or _side(image, level, len(shape)), stride, channels=image.shape[-1] if has_channels else None)
    brightness = image.nanmean()
    y = patches.extract(image - brightness)
    model = _first_model(y, patches.extract(filled(image, len(shape)) - brightness), num_latents, level, generator)
    guide, free_energies = _train(model, y, passes, num_states, min(batch_size, len(y)), progress)
    restored = patches.assemble(_posterior_means(model, guide, y)) + brightness
    return Restored(restored.to(image.dtype), model.scale.item(), model, guide, patches, free_energies)


@names_arguments
def inpaint(image: Tensor, mask: Tensor | None = None, noise: float | None = None, **options: Any) -> Restored:
    """Fills in the missing entries of an image, a signal or a volume, and keeps the others, up to noise that is taken off.

    As :func:`denoise`, with the likelihood of the observed entries only. First elements are patches of the array with the missing entries
    smoothed over.

    Example:
        >>> image = torch.randn(16, 16)
        >>> image[4:6, 4:6] = torch.nan
        >>> restored = inpaint(image, side=4, num_latents=6, passes=1, num_states=6, progress=False)
        >>> bool(restored.image.isfinite().all())
        True

    Args:
        image: the damaged array.
        mask: which entries are observed, booleans in the shape of the array or of its pixels; default: those that are not NaN.
        noise: standard deviation of the noise on the observed entries, where training starts; default: estimated.
        **options: as for :func:`denoise`.

    Raises:
        ValueError: for a mask of another shape, and what :func:`denoise` refuses.
    """
    image = _checked(image) if mask is None else as_tensors(image)
    if mask is not None:
        mask = as_tensors(mask).bool()
        if mask.shape not in (image.shape, image.shape[:-1]):
            raise ValueError(f"mask must have the shape of the image {tuple(image.shape)} or of its pixels; got {tuple(mask.shape)}")
        mask = mask if mask.dim() == image.dim() else mask.unsqueeze(-1)
        image = _checked(torch.where(mask, image.to(torch.get_default_dtype()), math.nan))
    return denoise(image, noise, **options)


# --- where training starts ---


def _checked(image: Any) -> Tensor:
    image = as_tensors(image)
    array: Tensor = image if image.is_floating_point() else image.to(torch.get_default_dtype())
    observed = ~array.isnan()
    if not bool(observed.any()):
        raise ValueError("the image has no observed entry: all are NaN")
    if not bool(array[observed].isfinite().all()):
        raise ValueError("the image has infinite entries; mark what is missing by NaN")
    return array


def noise_level(image: Tensor, num_dims: int) -> float:
    """A first guess of the noise: the median of the differences of neighbours, little affected by edges."""
    differences = torch.cat([image.diff(dim=dim).flatten() for dim in range(num_dims)]).abs()
    level = differences.nanmedian() / (0.6745 * 2**0.5)
    if bool(level.isnan()):
        # No two neighbours are observed.
        level = 0.1 * _deviation(image)
    return max(float(level), 1e-3 * float(_deviation(image)), torch.finfo(image.dtype).tiny)


def _deviation(image: Tensor) -> Tensor:
    return (image - image.nanmean()).square().nanmean().sqrt()


def _side(image: Tensor, noise: float, num_dims: int) -> int:
    if num_dims == 1:
        return min(64, len(image))
    signal = math.sqrt(max(float(_deviation(image)) ** 2 - noise**2, 1e-12 * noise**2))
    wanted = next(side for limit, side in _SIDES if noise / signal <= limit) if num_dims == 2 else 8
    side: int = min(wanted, *image.shape[:num_dims])
    return side


def filled(image: Tensor, num_dims: int) -> Tensor:
    """The image with missing entries replaced by the mean of their observed neighbours, from near to far."""
    missing = image.isnan()
    if not bool(missing.any()):
        return image
    value, known = image.nan_to_num(0.0), (~missing).to(image.dtype)
    while bool((known == 0).any()):
        total, share = (_neighbours(array, num_dims) for array in (value * known, known))
        value = torch.where(known > 0, value, total / share.clamp(min=1e-9))
        known = torch.where(known > 0, known, (share > 0).to(known.dtype))
    return value


def _neighbours(array: Tensor, num_dims: int) -> Tensor:
    """Sums over the windows of side three around every entry."""
    for dim in range(num_dims):
        moved = array.movedim(dim, -1)
        rows = F.pad(moved.reshape(-1, moved.shape[-1]), (1, 1))
        array = rows.unfold(-1, 3, 1).sum(-1).reshape(moved.shape).movedim(-1, dim)
    return array


def _first_model(y: Tensor, filled: Tensor, num_latents: int, noise: float, generator: torch.Generator | None) -> SpikeSlabSparseCoding:
    """Random patches as elements, few of them active, and a little more noise than is expected."""
    model = SpikeSlabSparseCoding(y.shape[1], num_latents, offset=False, dtype=y.dtype).to(y.device)
    model.initialize(filled, generator)
    with torch.no_grad():
        model.prior = torch.full_like(model.prior, min(0.5, 0.02 * max(1.0, 100 / num_latents)))
        model.scale = torch.full_like(model.scale, 1.1 * noise)
    return model


# --- training ---


def _train(
    model: SpikeSlabSparseCoding, y: Tensor, passes: int, num_states: int, batch_size: int, progress: bool | None
) -> tuple[AutoTruncated, list[float]]:
    per_pass = max(1, round(len(y) / batch_size))
    guide = AutoTruncated(model, num_states=num_states)
    temperature = cooling(_START_TEMPERATURE, passes * per_pass, _ANNEALED)
    elbo = Truncated_ELBO(Pursuit(model) + EvolutionarySearch(5, 4, 1), temperature=temperature)
    svi = SVI(model, guide, ClosedForm(model, minibatch="online"), elbo)
    free_energies: list[float] = []
    with progress_bar(progress, total=passes * per_pass, desc="restoring") as bar:
        for number in range(passes):
            total = 0.0
            for _ in range(per_pass):
                total -= svi.step(y, batch_size=batch_size if batch_size < len(y) else None) / len(y) / per_pass
                bar.update()
            free_energies.append(total)
            bar.set_postfix(free_energy=f"{total:.2f}", noise=f"{model.scale.item():.3g}")
            if number >= _ANNEALED * passes + 2 * _PATIENCE and _has_settled(free_energies, y.shape[1]):
                break
    return guide, free_energies


def _has_settled(free_energies: list[float], num_observed: int) -> bool:
    """Whether the last passes have gained less than a few ten thousandths of a nat per entry."""
    now, before = free_energies[-_PATIENCE:], free_energies[-2 * _PATIENCE : -_PATIENCE]
    return sum(now) - sum(before) < _TOLERANCE * _PATIENCE * num_observed


@torch.no_grad()
def _posterior_means(model: SpikeSlabSparseCoding, guide: AutoTruncated, y: Tensor) -> Tensor:
    """Posterior means of all patches under the model as it is now."""
    with spare_random_numbers():
        guide.refresh_(y)
    return torch.cat([model.reconstruct(block, y) for block in guide.population(torch.arange(len(y))).split(2**14)])
