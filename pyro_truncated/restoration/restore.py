"""Taking noise off images and signals, and filling in what is missing, from the damaged data alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.restoration.choice_of_sides import restored_with_chosen_sides
from pyro_truncated.restoration.first_guesses import checked, filled, floating, holds_channels, nearly_no_noise, noise_level
from pyro_truncated.restoration.low_rank_groups import with_low_rank_groups
from pyro_truncated.restoration.model_training import ModelOfPatches, made, posterior_means, start, train
from pyro_truncated.restoration.patch_sides import shows_which_sides, side_for_model, side_of, sides_of_mixtures
from pyro_truncated.restoration.rounds import agreed, expected_errors, learned_in_rounds
from pyro_truncated.restoration.similar_windows import with_groups
from pyro_truncated.restoration.stationary import predicted
from pyro_truncated.restoration.windows import Patches
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import as_tensors
from pyro_truncated.utils.counts import check_counts

# Of the last round, of which it is found out which of them suit the image.
_CANDIDATES = (4, 5, 6, 8, 10, 12)
_ROUNDS, _ROUNDS_IF_MISSING = 3, 8


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored array, and what it was made with.

    Example:
        >>> restored = denoise(torch.randn(16, 16), progress=False)
        >>> restored.image.shape
        torch.Size([16, 16])

    Attributes:
        image: the restored array, in the shape and units of the damaged one.
        noise: the standard deviation of the noise that was learned, in the same units.
        model: what was learned of the patches, which have the mean of the array taken off: the model that was asked for, or the mixture
            (:class:`.PatchMixture`) of the last round, of the largest patches.
        guide: its guide, with the posteriors of all patches.
        patches: how patches and array belong together.
        free_energies: the free energy per patch after each pass through the data, of a model that was asked for.
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
    model: ModelOfPatches | None = None,
    side: int | None = None,
    stride: int = 1,
    channels: bool | None = None,
    num_components: int | None = None,
    rounds: int | None = None,
    passes: int = 20,
    num_states: int = 30,
    batch_size: int = 5000,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Restored:
    r"""Takes Gaussian noise off an image, a signal or a volume.

    By default the overlapping patches are a mixture of normal distributions around places of the array, see :class:`.PatchMixture`, whose
    posterior is truncated to the most probable components. In each of a few rounds the mixture is learned from the patches of the array
    restored so far - at first from cosines that exceed the noise, or where entries are missing from what is predicted of them, see
    :func:`~pyro_truncated.restoration.stationary.predicted` - and the noisy patches become their posterior means. What the patches say of
    an entry that they cover is averaged, weighted by the inverse of its expected squared errors (where entries are missing, of those of the
    whole patches); with patches of several sides, so are the arrays that they give. Where entries are missing, so are those of the last two
    rounds, if the mixtures of the last one have no more components. Otherwise the patches of the last round agree on one array: twice,
    their mixtures are given 70 % of the restored and 30 % of the noisy array, as if half the noise were left. Of images a fifth, or less
    where mixtures are surer, is then what small windows say that are restored together with those most similar to them, whose errors are
    other ones than those of mixtures, see :func:`~pyro_truncated.restoration.similar_windows.with_groups`.

    Images without channels and missing entries, of 100 by 100 entries or more and with noise of .4 of the signal or less, are restored
    twice: from every second patch and with more noise first, by which it is found out what sides from 4 to 12 the patches of the last round
    shall have, and with what weights, see :func:`~pyro_truncated.restoration.choice_of_sides.weights_of_arrays`. The two also say what
    share of that which was taken off is not noise, and it is given back (between -.12 and .1: else the noise is another one), see
    :func:`~pyro_truncated.restoration.choice_of_sides.share_to_give_back`: if the noise is told, which should then be right to a percent
    or so, or if a fifth of the image is so flat that the noise can be read off there.

    Another model of patches is trained by truncated EM (by gradients, if it has no closed-form M-step) on the damaged array, at a
    temperature that falls during the first passes; every entry becomes the mean of the posterior means, from its ``reconstruct``, of the
    patches that cover it.

    Missing entries (NaN) are filled in; of images without noise two fifths of what is filled in is what groups of similar windows say, see
    :func:`~pyro_truncated.restoration.low_rank_groups.with_low_rank_groups`. Channels have noise of their own; if all are the same, one is
    restored, and repeated.

    Example::

        restored = denoise(photograph, noise=25)
        restored.image, restored.noise

        from pyro_truncated.models import SpikeSlabSparseCoding

        restored = denoise(photograph, model=lambda size: SpikeSlabSparseCoding(size, 16, offset=False), side=4, passes=2, num_states=6)

    Args:
        image: the damaged array: ``(length)``, ``(height, width)``, ``(height, width, 3)``, ...; a tensor or a NumPy array.
        noise: standard deviation of its noise, where learning starts, if it is known; default: estimated where there is no texture.
        model: another model of patches, or a function of the number of entries of a patch that makes one; it has
            ``reconstruct(population, y)``, as the models of sparse coding and :class:`.BinaryVAE` have.
        side: side of a patch; default: that of a model that is made already, else by noise, dimensions and what is missing, several for
            mixtures, in the last round by the image.
        stride: distance of neighbouring patches; above 1 faster and worse.
        channels: whether the last dimension holds channels; default: if it has 3 or 4 entries.
        num_components: components of each mixture; default: one for 120 patches, twice as many after the first round; with channels one for
            :math:`20 \sqrt D` patches of ``D`` entries, in the next two rounds two and four; where entries are missing and hardly any noise
            is told, .4 of the first number in two rounds, 1.2 in two, then three.
        rounds: rounds of mixtures; default: 3, or 8 where entries are missing.
        passes: passes of another model through all patches; fewer if the free energy stops growing.
        num_states: states per patch of another model.
        batch_size: patches in a minibatch of another model.
        generator: source of randomness of the start; default: torch's global one.
        progress: whether to show a progress bar; default: if the output is a terminal.

    Returns:
        The restored array with noise level and model.

    Raises:
        ValueError: for an array without dimensions or observed entries, with infinite or too large ones or smaller than a patch, a noise
            that is not positive, or a model of patches of another size.
        TypeError: for a model that cannot reconstruct its data.
    """
    image = checked(image)
    rounds = rounds if rounds is not None else _ROUNDS_IF_MISSING if bool(image.isnan().any()) else _ROUNDS
    rounds, passes, num_states, batch_size = check_counts(rounds=rounds, passes=passes, num_states=num_states, batch_size=batch_size)
    if num_components is not None:
        (num_components,) = check_counts(num_components=num_components)
    if noise is not None and not 0.0 < noise < math.inf:
        raise ValueError(f"noise must be a positive standard deviation; got {noise}")
    has_channels = holds_channels(image, channels)
    if has_channels and model is None and bool(torch.isclose(image, image[..., :1], 0, 0, equal_nan=True).all()):
        sizes: dict[str, Any] = {"side": side, "stride": stride, "num_components": num_components, "rounds": rounds}
        one = denoise(image[..., 0], noise, channels=False, generator=generator, progress=progress, **sizes)
        return dataclasses.replace(one, image=one.image.unsqueeze(-1).repeat_interleave(image.shape[-1], -1))
    shape = image.shape[:-1] if has_channels else image.shape
    level = noise if noise is not None else noise_level(image, len(shape))
    options: dict[str, Any] = {"stride": stride, "channels": image.shape[-1] if has_channels else None}
    if model is None:
        sides = [side] if side is not None else sides_of_mixtures(image, level, shape, has_channels)
        chooses = side is None and not has_channels and rounds > 1 and shows_which_sides(image, level)
        others = [candidate for candidate in _CANDIDATES if chooses and candidate >= stride]
        mixtures = {"num_components": num_components, "generator": generator, "progress": progress}
        usual, candidates = ([Patches(shape, one, **options) for one in wanted] for wanted in (sides, others))
        return _by_mixtures(image, level, usual, candidates, rounds, mixtures, is_known=noise is not None)
    patches = Patches(shape, side or side_of(model, shape, options["channels"]) or side_for_model(image, level, shape), **options)
    training = {"passes": passes, "num_states": num_states, "batch_size": batch_size, "progress": progress}
    return _by_model(made(model, patches.num_observed), image, level, patches, generator, training)


def _by_mixtures(
    image: Tensor,
    level: float,
    patches: list[Patches],
    candidates: list[Patches],
    rounds: int,
    options: dict[str, Any],
    *,
    is_known: bool,
) -> Restored:
    is_missing, brightness = bool(image.isnan().any()), image.nanmean()
    above = image - brightness
    first = predicted(above, len(patches[0].shape), level)
    if candidates:
        learned, restored = restored_with_chosen_sides(above, level, patches, candidates, rounds, is_known=is_known, **options)
    else:
        is_clean = is_missing and is_known and level <= 1.001 * nearly_no_noise(image, len(patches[0].shape))  # but for rounding
        learned, restored = learned_in_rounds(above, first, level, [patches] * rounds, is_clean=is_clean, **options)
        if not is_missing:
            restored = with_groups(above, agreed(above, learned), expected_errors(learned), level, patches[0].channels)
        if is_clean:
            restored = with_low_rank_groups(above, restored, level, patches[0].channels, patches[0].stride)
    last = learned[-1]
    return Restored(restored + brightness, last.noise, last.mixture, last.guide, last.patches, [])


def _by_model(
    model: Any, image: Tensor, level: float, patches: Patches, generator: torch.Generator | None, training: dict[str, Any]
) -> Restored:
    # Positive causes explain what is above the darkest entry.
    base = image[~image.isnan()].min() if getattr(model, "is_positive", False) else image.nanmean()
    y = patches.extract(image - base)
    model.to(y.device)
    start(model, patches.extract(filled(image, len(patches.shape)) - base), level, generator)
    training["batch_size"] = min(training["batch_size"], len(y))
    guide, free_energies = train(model, y, **training)
    restored = patches.assemble(posterior_means(model, guide, y)) + base
    scale = getattr(model, "scale", None)
    noise = float(scale.detach()) if isinstance(scale, Tensor) and scale.dim() == 0 else level
    return Restored(restored.to(image.dtype), noise, model, guide, patches, free_energies)


@names_arguments
def inpaint(image: Tensor, mask: Tensor | None = None, noise: float | None = 0.0, **options: Any) -> Restored:
    """Fills in the missing entries of an image, a signal or a volume, and keeps the others, up to noise that is taken off.

    As :func:`denoise`, with the likelihood of the observed entries only. Learning starts from what covariances near a place predict, see
    :func:`~pyro_truncated.restoration.stationary.predicted`. Of an array without noise, mixtures are told that what cannot be predicted
    from the rest of a patch is 4 % of the deviation or less, another model learns it; but the observed entries are kept.

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
        mask: which entries are observed, booleans in the shape of the array or of its pixels; default: those that are not NaN.
        noise: standard deviation of the noise on the observed entries, which is taken off and where training starts; ``None``: estimated
            and taken off; default: none, the observed entries are returned as they are.
        **options: as for :func:`denoise`.

    Raises:
        ValueError: for a mask of another shape, and what :func:`denoise` refuses.
    """
    image = checked(image) if mask is None else as_tensors(image)
    if mask is not None:
        mask = as_tensors(mask).bool()
        if mask.shape not in (image.shape, image.shape[:-1]):
            raise ValueError(f"mask must have the shape of the image {tuple(image.shape)} or of its pixels; got {tuple(mask.shape)}")
        mask = mask if mask.dim() == image.dim() else mask.unsqueeze(-1)
        image = checked(torch.where(mask, floating(image), math.nan))
    if noise != 0.0:
        return denoise(image, noise, **options)
    num_dims = image.dim() - holds_channels(image, options.get("channels"))
    restored = denoise(image, nearly_no_noise(image, num_dims) if options.get("model") is None else None, **options)
    return dataclasses.replace(restored, image=torch.where(image.isnan(), restored.image, image))
