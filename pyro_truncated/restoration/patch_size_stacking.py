"""Stacks restorations with patches of several sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.restoration.nonlocal_groups import average_groups
from pyro_truncated.restoration.patch_mixture import MixtureFit, expected_errors, find_consensus, run_rounds
from pyro_truncated.restoration.windows import Patches
from pyro_truncated.utils.devices import generator_device

# Noise that is added to the first of two arrays, relative to that of the image. All numbers here were chosen on images that are not
# reported: tests/papers/results/restoration.md.
_ADDED_NOISE = 0.5


def restore_with_stacked_sides(
    image: Tensor,
    noise: float,
    patches: Sequence[Patches],
    candidates: Sequence[Patches],
    rounds: int,
    *,
    is_noise_known: bool,
    num_components: int | None,
    generator: torch.Generator | None,
    progress: bool | None,
) -> tuple[list[MixtureFit], Tensor]:
    """Runs rounds of mixtures; the last has sides that suit the image.

    The patches of the last round then agree on an array, which is averaged with similar windows.

    The sides are found by the same rounds on the image with more noise, the first array of
    :func:`split`. Their last round has all ``candidates``. The second array tells how near to the truth
    they come, see :func:`array_weights`. Every second patch along each dimension is enough for
    that; sides with weights below 0.05 are left out. If the noise is known, or estimated where the image is
    flat, over-smoothing is corrected, see :func:`oversmoothing_share` and :func:`plausible_share`.

    Returns what was learned in the last round with each side that has weight, and the restored array.
    """
    options: dict[str, Any] = {"num_components": num_components, "generator": generator, "progress": progress}
    noisier, held_out = split(image, noise, generator)
    usual, sparse = (
        [Patches(windows.shape, windows.size, min(2 * windows.stride, *windows.size)) for windows in of_round]
        for of_round in (patches, candidates)
    )
    noisy_fits, _ = run_rounds(noisier, noisier, first_noise(noise), [*[usual] * (rounds - 1), sparse], desc="choosing sides", **options)
    weights = array_weights(torch.stack([of_side.array for of_side in noisy_fits]), held_out, noise)
    # A side of less weight is not worth its time.
    index = (weights >= 0.05).nonzero().flatten().tolist()
    noisy_fits, best_sides = [noisy_fits[side] for side in index], [candidates[side] for side in index]
    weights = weights[index] / weights[index].sum()
    from_noisier = average_groups(
        noisier, find_consensus(noisier, noisy_fits, weights), expected_errors(noisy_fits, weights), first_noise(noise)
    )
    del noisy_fits  # their mixtures and populations take much memory
    fits, _ = run_rounds(image, image, noise, [*[patches] * (rounds - 1), best_sides], **options)
    restored = find_consensus(image, fits, weights)
    errors = expected_errors(fits, weights)
    level = noise if is_noise_known else noise_in_flat_places(image - restored, errors, noise)
    restored = average_groups(image, restored, errors, noise)
    if level is not None:
        share = oversmoothing_share(image, restored, noisier, from_noisier, level)
        restored = torch.lerp(restored, image, share if is_noise_known else plausible_share(share, errors, level))
    return fits, restored


def noise_in_flat_places(residual: Tensor, errors: Tensor, noise: float) -> float | None:
    r"""Estimates the noise in flat places.

    It is the root of the mean of :math:`(y - x)^2 + v` there. Those are where the expected squared error :math:`v` is below :math:`0.03
    \sigma^2`. An array that follows noise by :math:`d = v / \sigma^2` differs from the noisy one by :math:`\sigma^2 (1 - 2 d) + v =
    \sigma^2 - v`. The ``residual`` is :math:`y - x`. Returns ``None`` if less than a fifth of the array is flat.
    """
    # Flat is where the restored array is known to a fraction of the noise.
    is_flat = errors < 0.03 * noise**2
    if float(is_flat.double().mean()) < 0.2:
        return None
    return math.sqrt((residual.square() + errors)[is_flat].double().mean())


def oversmoothing_share(image: Tensor, estimate: Tensor, noisier: Tensor, from_noisier: Tensor, noise: float) -> float:
    r"""Returns the share of the noisy array that is added back.

    With known noise, it brings the restored array nearest to the truth. Negative shares take more off. Below -0.12 and above 0.1 the
    noise is not what it is said to be, and the share is zero. For a noisy array :math:`y`, restored as :math:`x`, and one :math:`y'` of
    more noise, restored as :math:`x'`, it is

    .. math:: a = 1 - \frac{N \sigma^2 (1 - d)}{|y - x|^2}, \qquad d = \frac{\langle y' - y, x' - x \rangle}{|y' - y|^2},

    where :math:`d` is by how much the restored array follows noise. The distance from the truth :math:`t` is least with
    :math:`a |y - x|^2 = \langle t - x, y - x \rangle`, and the expectation of that is :math:`|y - x|^2 - N \sigma^2 (1 - d)` by Stein's
    lemma.

    Reference:
        Ramani, Blu and Unser, "Monte-Carlo SURE", IEEE Transactions on Image Processing 17, 2008.
    """
    more, rest = (noisier - image).double(), (image - estimate).double()
    followed = (more * (from_noisier - estimate)).sum() / more.square().sum()
    share = float(1 - noise**2 * (1 - followed) / rest.square().mean())
    # With the right noise crops of photographs have from -0.102 to 0.071.
    return share if -0.12 < share < 0.1 else 0.0


def plausible_share(share: float, errors: Tensor, noise: float, most: float = 0.75) -> float:
    r"""Returns a share to add back, or zero if it is implausible.

    It is too large above :math:`0.75 v / \sigma^2` for the expected squared errors :math:`v`; larger shares lost on smooth drawings. What
    :func:`oversmoothing_share` finds is the squared error without the noise that is followed, as a part of about :math:`\sigma^2`. If that
    is more than can be expected, the noise of flat places, with which it was found, is too low.
    """
    return share if share <= most * float(errors.double().mean()) / noise**2 else 0.0


def split(image: Tensor, noise: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    r"""Returns two arrays with independent noise, if the given noise is right.

    They are :math:`y + z / 2` and :math:`y - 2 z`, with normal numbers :math:`z` of the noise's deviation. The noise of the first is
    :math:`\sqrt{1.25}` times that of the array, and of the second :math:`\sqrt 5` times.

    References:
        Oliveira, Lei and Tibshirani, "Unbiased risk estimation in the normal means problem via coupled bootstrap techniques",
        arXiv:2111.09447, 2021. Rasines and Young, "Splitting strategies for post-selection inference", Biometrika 110, 2023.
    """
    # From a seed that is drawn: the image's own noise may come from the same seed, and so be the first numbers of the generator.
    own = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator, device=generator_device(generator))))
    z = noise * torch.randn(image.shape, generator=own, dtype=image.dtype, device="cpu").to(image.device)
    return image + _ADDED_NOISE * z, image - z / _ADDED_NOISE


def first_noise(noise: float) -> float:
    """The standard deviation of the noise of the first array of :func:`split`."""
    return noise * math.sqrt(1 + _ADDED_NOISE**2)


def array_weights(arrays: Tensor, held_out: Tensor, noise: float) -> Tensor:
    r"""Returns stacking weights ``(S,)`` of restored arrays: not negative, with sum one.

    Their mean is near to data that the arrays were not made from.

    .. math:: \arg\min_w \; \frac{1}{v} \Bigl\| y'' - \sum_s w_s x_s \Bigr\|^2 + \frac{1}{\tau^2} \sum_s (w_s - 1/S)^2,

    the most probable weights under a normal prior around equal ones, with standard deviation :math:`\tau = 0.2`. ``arrays (S, *shape)``
    :math:`x_s` are made from the first array of :func:`split`, and :math:`y''` is the second one, whose variance :math:`v` is five times
    that of the image. The data count the more, the more entries there are and the further the arrays lie apart. The squared distance is
    in expectation that from the truth and a constant. All subsets are tried, so that there may be a few.

    Reference:
        Breiman, "Stacked regressions", Machine Learning 24, 1996.
    """
    number, shrinkage = len(arrays), noise**2 * (1 + _ADDED_NOISE**-2) / 0.2**2
    centre = arrays.double().mean(0)
    deviations = (arrays.double() - centre).flatten(1)
    quadratic = deviations @ deviations.mT + shrinkage * torch.eye(number, dtype=torch.float64, device=arrays.device)
    linear = deviations @ (held_out.double() - centre).flatten() + shrinkage / number
    supports = [list(subset) for size in range(1, number + 1) for subset in itertools.combinations(range(number), size)]
    possible = [
        weights for weights in (_minimize_on_support(support, quadratic, linear) for support in supports) if bool((weights >= 0).all())
    ]
    return min(possible, key=lambda weights: float(weights @ quadratic @ weights - 2 * linear @ weights))


def _minimize_on_support(support: list[int], quadratic: Tensor, linear: Tensor) -> Tensor:
    """Minimises the quadratic function over weights of these arrays alone."""
    inverse = torch.linalg.solve(quadratic[support][:, support], torch.stack([linear[support], torch.ones_like(linear[support])], 1))
    free, ones = inverse.unbind(1)
    weights = torch.zeros_like(linear)
    weights[support] = free + (1 - free.sum()) / ones.sum() * ones
    return weights
