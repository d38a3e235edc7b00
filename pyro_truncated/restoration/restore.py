"""Noise taken off, and gaps filled in, from the damaged data alone."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.restoration.channels import (
    Channels,
    Noise,
    channel_axis,
    check_noise,
    noise_levels,
    per_channel,
    related_channels,
    root_mean_square,
    warn_if_table,
    warn_if_unlikely,
)
from pyro_truncated.restoration.large_holes import fill_large_holes
from pyro_truncated.restoration.noise import (
    as_floating,
    check_image,
    fill_missing,
    keep_digits,
    nearly_no_noise,
    outlying_entries,
)
from pyro_truncated.restoration.noise_checks import check_stabilised_counts, warn_about_noise
from pyro_truncated.restoration.nonlocal_groups import average_groups, average_low_rank_groups, predict_missing
from pyro_truncated.restoration.patch_mixture import expected_errors, find_consensus, run_rounds
from pyro_truncated.restoration.patch_model import (
    ModelOfPatches,
    allows_stacking,
    make_model,
    mixture_patch_sides,
    model_patch_side,
    posterior_means,
    side_for_model,
    start,
    train,
)
from pyro_truncated.restoration.patch_size_stacking import restore_with_stacked_sides
from pyro_truncated.restoration.photon_counts import estimate_gain, stabilise, unbiased_inverse
from pyro_truncated.restoration.windows import Patches
from pyro_truncated.utils.arguments import check_count, check_counts, names_arguments
from pyro_truncated.utils.arrays import ArrayResult, as_data
from pyro_truncated.utils.parameter_store import one_thread

# Of the last round, of which it is found out which of them suit the image.
_CANDIDATES = (4, 5, 6, 8, 10, 12)


@dataclasses.dataclass(frozen=True, eq=False)
class Restored(ArrayResult):
    """A restored array, and what it was made with.

    To NumPy, matplotlib, scikit-image and torch it is the array.

    Example:
        >>> restored = denoise(torch.randn(16, 16), progress=False)
        >>> restored.image.shape
        torch.Size([16, 16])

    Attributes:
        image: the restored array, in the shape and units of the damaged one.
        noise: the standard deviation of the noise that was learned, in the same units. Of channels with unlike noise it is the root of
            the mean of its squares. Of photon counts it is that of their transform.
        model: the model of patches that was asked for, or the mixture (:class:`.PatchMixture`) of
            the largest patches in the last round. Its patches have the mean of each channel
            subtracted and, with ``channel_noise``, are divided by it.
        guide: its guide, with the posteriors of all patches.
        patches: how patches and array belong together.
        free_energies: the free energy per patch after each pass through the data, of a model that was asked for.
        channel_noise: the standard deviation of the noise of each channel, ``(C,)``; ``None`` if one level was taken for all.
    """

    array_field = "image"

    image: Tensor
    noise: float
    model: Any
    guide: AutoTruncated
    patches: Patches
    free_energies: list[float]
    channel_noise: Tensor | None = None


class _Settings(NamedTuple):
    """What :func:`denoise` is told, but for noise and channels."""

    model: ModelOfPatches | None
    side: int | None
    stride: int
    num_components: int | None
    rounds: int
    training: dict[str, Any]
    generator: torch.Generator | None


@names_arguments
def denoise(
    image: Tensor,
    noise: Noise | str = None,
    *,
    model: ModelOfPatches | None = None,
    side: int | None = None,
    stride: int = 1,
    channels: Channels = None,
    num_components: int | None = None,
    rounds: int | None = None,
    passes: int = 20,
    num_states: int = 30,
    batch_size: int = 5000,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Restored:
    r"""Removes Gaussian noise from an image, a signal or a volume.

    By default the overlapping patches are a mixture of normal distributions, see
    :class:`.PatchMixture`, with posteriors truncated to the most probable components. In each round
    the mixture is learned from the array restored so far. Every entry becomes the weighted mean of
    the patches' posterior means. Missing entries (NaN, or masked) are filled in. Few that outweigh all others, as dead pixels, stay. All
    steps: :doc:`/explanation/restoration`.

    Every channel has its own noise and unit. Constant, unrelated or noise-free channels are restored apart;
    ``model`` and ``guide`` are then those of the largest group.

    Example::

        restored = denoise(photograph, noise=25)
        restored.image, restored.noise

        from pyro_truncated.models import SpikeSlabSparseCoding

        def patch_model(size):
            return SpikeSlabSparseCoding(size, 16, offset=False)

        restored = denoise(photograph, model=patch_model, side=4, passes=2, num_states=6)

    Args:
        image: the damaged array: ``(length)``, ``(height, width)``, ``(height, width, 3)``, ...
        noise: its standard deviation, one or one for each channel, or ``"poisson"``. Default: estimated.
        model: another model of patches with ``reconstruct(population, y)``, or a function of their size.
        side: side of a patch. Default: by model, noise and image.
        stride: distance of neighbouring patches. Above 1 faster and worse.
        channels: ``"first"``, ``"last"`` (or ``True``), ``False`` for none. Default: by the shape.
        num_components: components of each mixture. Default: by the number of patches.
        rounds: rounds of mixtures. Default: 3, or 8 where entries are missing.
        passes: passes of another model, fewer on convergence.
        num_states: states per patch of another model.
        batch_size: patches in its minibatches.
        generator: source of randomness. Default: torch's global one.
        progress: whether to show a progress bar. Default: in a terminal.

    Returns:
        The restored array with noise level and model.

    Raises:
        ValueError: for an invalid image, noise or patch size.
        TypeError: for a model that cannot reconstruct its data.

    Warns:
        VaryingNoiseWarning: if the noise follows the brightness or the place, or counts are no Poisson counts.
        UserWarning: of a table of columns in unlike units, salt and pepper, noise that neighbours share, and unlikely levels.
    """
    image = check_image(image)
    if rounds is None:
        rounds = 8 if bool(image.isnan().any()) else 3
    side = None if side is None else check_count("side", side)
    rounds, passes, num_states, batch_size = check_counts(rounds=rounds, passes=passes, num_states=num_states, batch_size=batch_size)
    if num_components is not None:
        (num_components,) = check_counts(num_components=num_components)
    training = {"passes": passes, "num_states": num_states, "batch_size": batch_size, "progress": progress}
    settings = _Settings(model, side, stride, num_components, rounds, training, generator)
    shape, image = image.shape, _without_axes_of_one(image, channels)
    axis = channel_axis(image, channels)
    if axis is None and channels is None and noise is None and image.dim() == 2:
        warn_if_table(image)
    whole, num_dims = image if axis is None else image.movedim(axis, -1), image.dim() - (axis is not None)
    # These say nothing of others, but would outweigh them in means and covariances.
    is_outlying, last = outlying_entries(whole, num_dims), whole
    if bool(is_outlying.any()):
        others = torch.where(is_outlying, math.nan, whole)
        last = others if bool(whole.isnan().any()) else fill_missing(others, num_dims)
    last = keep_digits(last, num_dims)
    if noise is not None and not isinstance(noise, str):
        noise = check_noise(noise, last, has_channels=axis is not None)
        warn_if_unlikely(noise, last, num_dims)
    shortest = min(last.shape if axis is None else last.shape[:-1])
    if side is not None and side > shortest:
        raise ValueError(f"side must be at most {shortest}, the shortest side of the image; got {side}")
    with one_thread:
        result = _restore(last, noise, settings, has_channels=axis is not None)
    restored = torch.where(is_outlying, whole, result.image)
    if not bool(restored.isfinite().all()):
        farthest = float(whole.nan_to_num(0.0).abs().max())
        raise ValueError(f"the image has entries so far from others, up to {farthest:g}, that squares lose these: make such entries NaN")
    return dataclasses.replace(result, image=(restored if axis is None else restored.movedim(-1, axis)).reshape(shape))


def _without_axes_of_one(image: Tensor, channels: Channels) -> Tensor:
    return torch.atleast_1d(image.squeeze()) if channels is None and image.dim() > 3 else image


def _restore(image: Tensor, noise: Noise | str, settings: _Settings, *, has_channels: bool) -> Restored:
    """Restores an array without channels, or with channels last."""
    num_dims = image.dim() - has_channels
    is_grey = has_channels and bool(torch.isclose(image, image[..., :1], 0, 0, equal_nan=True).all())
    if is_grey and settings.model is None and (not isinstance(noise, Tensor) or bool((noise == noise[0]).all())):
        one = _restore(image[..., 0], noise[0] if isinstance(noise, Tensor) else noise, settings, has_channels=False)
        own = one.channel_noise if one.channel_noise is None else one.channel_noise.expand(image.shape[-1])
        return dataclasses.replace(one, image=one.image.unsqueeze(-1).repeat_interleave(image.shape[-1], -1), channel_noise=own)
    if isinstance(noise, str):
        return _restore_counts(image, noise, settings, has_channels=has_channels)
    levels: Any = noise
    if noise is None:
        levels = noise_levels(image, num_dims)
        warn_about_noise(image, num_dims, levels)
    channels = image.shape[-1] if has_channels else None
    is_known = noise is not None
    groups = related_channels(image, num_dims, levels, is_noise_known=is_known) if has_channels and settings.model is None else []
    if groups and len(groups[0]) < image.shape[-1]:
        return _restore_apart(image, levels, groups, settings, is_noise_known=is_known)
    if not isinstance(levels, Tensor):
        return _restore_at_level(image, levels, channels, settings, is_noise_known=is_known)
    white = _restore_at_level(image / levels, 1.0, channels, settings, is_noise_known=is_known)
    own = white.noise * levels
    return dataclasses.replace(white, image=white.image * levels, noise=root_mean_square(own), channel_noise=own)


def _restore_apart(image: Tensor, levels: Any, groups: list[list[int]], settings: _Settings, *, is_noise_known: bool) -> Restored:
    """Restores groups of channels apart; what else is returned is the largest's."""
    levels = torch.as_tensor(levels).to(image).expand(image.shape[-1])
    restored, own, all_found = image.flatten(0, -2).nan_to_num(-math.inf).amax(0).expand_as(image).clone(), torch.zeros_like(levels), []
    for group in sorted(groups, key=len, reverse=True):
        unit = levels[group]
        part, channels = (image[..., group] / unit, len(group)) if len(group) > 1 else (image[..., group[0]] / unit, None)
        result = _restore_at_level(part, 1.0, channels, settings, is_noise_known=is_noise_known)
        restored[..., group], own[group] = result.image.reshape(image[..., group].shape) * unit, result.noise * unit
        all_found.append(result)
    return dataclasses.replace(all_found[0], image=restored, noise=root_mean_square(own), channel_noise=own)


def _restore_counts(image: Tensor, noise: str, settings: _Settings, *, has_channels: bool) -> Restored:
    """Restores photon counts by Anscombe's transform and its exact unbiased inverse."""
    if noise != "poisson":
        raise ValueError(f"noise must be a positive standard deviation, one for each channel, or 'poisson'; got {noise!r}")
    gain = estimate_gain(image)
    stable = stabilise(image / gain)
    check_stabilised_counts(stable, image.dim() - has_channels, gain)
    result = _restore(stable, 1.0, settings, has_channels=has_channels)
    return dataclasses.replace(result, image=gain * unbiased_inverse(result.image))


def _restore_at_level(image: Tensor, level: float, channels: int | None, settings: _Settings, *, is_noise_known: bool) -> Restored:
    shape, model, side = image.shape if channels is None else image.shape[:-1], settings.model, settings.side
    options: dict[str, Any] = {"stride": settings.stride, "channels": channels}
    if model is None:
        sides = [side] if side is not None else mixture_patch_sides(image, level, shape, channels is not None)
        chooses = side is None and channels is None and settings.rounds > 1 and allows_stacking(image, level)
        others = [candidate for candidate in _CANDIDATES if chooses and candidate >= settings.stride]
        # A short axis makes patches flat, not small.
        usual, candidates = ([Patches(shape, [min(one, n) for n in shape], **options) for one in group] for group in (sides, others))
        return _by_mixtures(image, level, usual, candidates, settings, is_noise_known=is_noise_known)
    patches = Patches(shape, side or model_patch_side(model, shape, channels) or side_for_model(image, level, shape), **options)
    return _by_model(make_model(model, patches.num_observed), image, level, patches, settings)


def _by_mixtures(
    image: Tensor,
    level: float,
    patches: list[Patches],
    candidates: list[Patches],
    settings: _Settings,
    *,
    is_noise_known: bool,
) -> Restored:
    rounds, progress = settings.rounds, settings.training["progress"]
    options: dict[str, Any] = {"num_components": settings.num_components, "generator": settings.generator, "progress": progress}
    is_missing, brightness = bool(image.isnan().any()), _per_channel_mean(image, patches[0])
    above = image - brightness
    first = predict_missing(above, len(patches[0].shape), level)
    if candidates:
        fits, restored = restore_with_stacked_sides(above, level, patches, candidates, rounds, is_noise_known=is_noise_known, **options)
    else:
        clean = torch.as_tensor(per_channel(nearly_no_noise, image, len(patches[0].shape)))
        is_clean = is_missing and is_noise_known and bool((level <= 1.001 * clean).all())  # but for rounding
        fits, restored = run_rounds(above, first, level, [patches] * rounds, is_clean=is_clean, **options)
        if not is_missing:
            restored = average_groups(above, find_consensus(above, fits), expected_errors(fits), level, patches[0].channels)
        if is_clean:
            restored = average_low_rank_groups(above, restored, level, patches[0].channels, patches[0].stride)
    last = fits[-1]
    return Restored(restored + brightness, last.noise, last.mixture, last.guide, last.patches, [])


def _by_model(model: Any, image: Tensor, level: float, patches: Patches, settings: _Settings) -> Restored:
    # Positive causes explain what is above the darkest entry.
    base = _per_channel_mean(image, patches)
    if getattr(model, "is_positive", False):
        base = image.nan_to_num(math.inf).flatten(0, -1 if patches.channels is None else -2).amin(0)
    y = patches.extract(image - base)
    model.to(y.device)
    start(model, patches.extract(fill_missing(image, len(patches.shape)) - base), level, settings.generator)
    batch_size = min(settings.training["batch_size"], len(y))
    guide, free_energies = train(model, y, **{**settings.training, "batch_size": batch_size})
    restored = patches.assemble(posterior_means(model, guide, y)) + base
    scale = getattr(model, "scale", None)
    noise = float(scale.detach()) if isinstance(scale, Tensor) and scale.dim() == 0 else level
    return Restored(restored.to(image.dtype), noise, model, guide, patches, free_energies)


def _per_channel_mean(image: Tensor, patches: Patches) -> Tensor:
    return image.nanmean() if patches.channels is None else image.flatten(0, -2).nanmean(0)


def _check_mask(mask: Any) -> Tensor:
    """Returns which entries are observed, of booleans or two numbers."""
    values = as_data("mask", mask)
    if values.dtype == torch.bool:
        return values
    levels = values.unique()
    if bool(levels.isnan().any()):
        raise ValueError("mask must be True where entries are observed, or 0 and one other number; got NaN, or masked entries")
    if len(levels) > 2 or (len(levels) == 2 and bool((levels != 0).all())):
        least, most = float(levels.min()), float(levels.max())
        raise ValueError(
            f"mask must be True where entries are observed, or 0 and one other number; got {len(levels)} numbers from {least:g} "
            f"to {most:g}. Compare them, as by mask > {(least + most) / 2:g}."
        )
    return values.bool()


def _broadcast_mask(mask: Tensor, image: Tensor, channels: Channels) -> Tensor:
    array, seen = image.squeeze(), mask.squeeze()
    possible = {"first": (0,), "last": (-1,), "True": (-1,)}.get(str(channels), (-1, 0, 1))
    axes = [axis for axis in possible[: max(0, array.dim() - 1)] if array.select(axis, 0).shape == seen.shape]
    if seen.shape != array.shape and len(axes) != 1:
        which = ", along one axis: of this shape pixels lie along several" if axes else ""
        raise ValueError(f"mask must have the shape of the image {tuple(image.shape)} or of its pixels{which}; got {tuple(mask.shape)}")
    return (seen if seen.shape == array.shape else seen.unsqueeze(axes[0]).expand_as(array)).reshape(image.shape)


def _warn_if_inverted(image: Tensor, mask: Tensor) -> None:
    """Warns if a mask hides more than half of the numbers."""
    hidden = float((as_floating(image).isfinite() & ~mask).double().mean())
    if hidden > 0.5:
        warnings.warn(
            f"mask marks what is observed, and hides {hidden:.0%} of the numbers. Of a mask that marks what is missing, as those of "
            "scikit-image and OpenCV, pass mask == 0; with NaN where so much is missing nothing warns.",
            UserWarning,
            stacklevel=4,
        )


@names_arguments
def inpaint(image: Tensor, mask: Tensor | None = None, noise: Noise | str = 0.0, **options: Any) -> Restored:
    """Fills in missing entries of an image, a signal or a volume.

    The others are kept, up to noise that is taken off. As :func:`denoise`, with the likelihood of the observed entries only. Learning
    starts from what covariances near a place predict, see :func:`~pyro_truncated.restoration.nonlocal_groups.predict_missing`.

    Large holes of images without noise are filled in twice. The second time, the same holes are
    also placed where the image is observed, see
    :func:`~pyro_truncated.restoration.large_holes.fill_large_holes`. Of an array without noise, mixtures
    assume that at most 4 % of the deviation cannot be predicted from the rest of a patch. Another
    model learns it; but the observed entries are kept.

    Example:
        >>> image = torch.randn(16, 16)
        >>> image[4:6, 4:6] = torch.nan
        >>> restored = inpaint(image, side=4, progress=False)
        >>> bool(restored.image.isfinite().all())
        True
        >>> torch.equal(restored.image[:4], image[:4])
        True

    Args:
        image: the damaged array.
        mask: which entries are observed, booleans in the shape of the array or of its pixels; default: those that are not NaN. Masks of
            scikit-image and OpenCV mark what is missing: pass ``mask == 0``.
        noise: standard deviation of the noise on the observed entries, which is taken off; one for each channel, or ``"poisson"``.
            ``None``: estimated and taken off. Default: none, the observed entries are returned as they are.
        **options: as for :func:`denoise`.

    Warns:
        UserWarning: if a mask hides more than half of the numbers, as one does that marks what is missing; if nothing is missing, and
            no noise is taken off.

    Raises:
        ValueError: for a mask of another shape, or of more than two numbers, and what :func:`denoise` refuses.
    """
    image = check_image(image) if mask is None else as_data("image", image).detach()
    if mask is not None:
        mask = _broadcast_mask(_check_mask(mask), image, options.get("channels"))
        _warn_if_inverted(image, mask)
        image = check_image(torch.where(mask, as_floating(image), math.nan))
    if noise is None or isinstance(noise, str) or bool(np.any(np.asarray(noise) != 0.0)):
        return denoise(image, noise, **options)
    if not bool(image.isnan().any()):
        warnings.warn(
            "nothing is missing, so nothing is filled in: NaN, or False in a mask, marks what is; other numbers, such as -9999, are data.",
            UserWarning,
            stacklevel=3,
        )
    shape, image = image.shape, _without_axes_of_one(image, options.get("channels"))
    axis = channel_axis(image, options.get("channels"))
    last = image if axis is None else image.movedim(axis, -1)
    whole, num_dims = last, last.dim() - (axis is not None)
    last = torch.where(outlying_entries(last, num_dims), math.nan, last)
    levels = per_channel(nearly_no_noise, last, num_dims) if options.get("model") is None else None
    options["channels"] = axis is not None
    restored = denoise(last, levels, **options)
    filled_in = restored.image
    if num_dims == 2 and options.get("model") is None:
        filled_in = fill_large_holes(last, filled_in, lambda other: denoise(other, levels, **options).image)
    filled_in = torch.where(whole.isnan(), filled_in, whole)
    return dataclasses.replace(restored, image=(filled_in if axis is None else filled_in.movedim(-1, axis)).reshape(shape))
