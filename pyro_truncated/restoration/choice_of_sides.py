"""Which sides of patches suit an image: weights of what is made of it with each, by their distance from data with noise of its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.restoration.rounds import Learned, learned_in_rounds
from pyro_truncated.restoration.windows import Patches
from pyro_truncated.utils.generators import device_of

# Chosen on images that are not reported: tests/papers/results/restoration.md.
_SHARE, _SPREAD = 0.5, 0.2


def learned_with_chosen_sides(
    image: Tensor,
    noise: float,
    patches: Sequence[Patches],
    candidates: Sequence[Patches],
    rounds: int,
    num_components: int | None,
    generator: torch.Generator | None,
    progress: bool | None,
) -> tuple[list[Learned], Tensor]:
    """Rounds of mixtures of which the last has the sides that suit the image, with their weights.

    Which these are is found out by the same rounds on the image with more noise, the first array of :func:`split`, of which the last has
    all candidates: it is the second array that says how near to the truth they come, see :func:`weights_of_arrays`.

    Args:
        image: the noisy array, without missing entries.
        noise: standard deviation of the noise.
        patches: patches of all rounds but the last.
        candidates: patches of several sides.
        rounds: number of rounds, two or more.
        num_components: of each mixture; default: by the number of patches and the round.
        generator: source of randomness.
        progress: whether to show a progress bar.

    Returns:
        What was learned in the last round with each side that has weight; and the weights, with sum one.
    """
    options: dict[str, Any] = {"num_components": num_components, "generator": generator, "progress": progress}
    usual = [patches] * (rounds - 1)
    noisier, held_out = split(image, noise, generator)
    # The arrays alone are kept: mixtures and populations of six sides take much more memory.
    tried = [of_side.array for of_side in learned_in_rounds(noisier, noisier, noise_of_first(noise), [*usual, candidates], **options)[0]]
    weights = weights_of_arrays(torch.stack(tried), held_out, noise)
    chosen = [windows for windows, weight in zip(candidates, weights.tolist(), strict=True) if weight > 0]
    learned, _ = learned_in_rounds(image, image, noise, [*usual, chosen], **options)
    return learned, weights[weights > 0]


def split(image: Tensor, noise: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    r"""Two arrays with independent noise: :math:`y + z / 2` and :math:`y - 2 z`, with normal numbers :math:`z` of the noise's deviation.

    The noise of the first is :math:`\sqrt{1.25}` times that of the array, and of the second :math:`\sqrt 5` times; they are independent as
    far as that which is told is the noise.

    Args:
        image: :math:`y`, without missing entries.
        noise: standard deviation of its noise.
        generator: source of randomness; default: torch's global one.

    References:
        Oliveira, Lei and Tibshirani, "Unbiased risk estimation in the normal means problem via coupled bootstrap techniques",
        arXiv:2111.09447, 2021. Rasines and Young, "Splitting strategies for post-selection inference", Biometrika 110, 2023.
    """
    # From a seed that is drawn: the image's own noise may come from the same seed, and so be the first numbers of the generator.
    own = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator, device=device_of(generator))))
    z = noise * torch.randn(image.shape, generator=own, dtype=image.dtype, device="cpu").to(image.device)
    return image + _SHARE * z, image - z / _SHARE


def noise_of_first(noise: float) -> float:
    """The standard deviation of the noise of the first array of :func:`split`."""
    return noise * math.sqrt(1 + _SHARE**2)


def weights_of_arrays(arrays: Tensor, held_out: Tensor, noise: float) -> Tensor:
    r"""The weights of restored arrays whose mean is near data that they were not made from: not negative, with sum one.

    .. math:: \arg\min_w \; \frac{1}{v} \Bigl\| y'' - \sum_s w_s x_s \Bigr\|^2 + \frac{1}{\tau^2} \sum_s (w_s - 1/S)^2,

    the most probable weights if they are normal around equal ones, with standard deviation :math:`\tau = 0.2`: the more entries there are,
    and the further the arrays lie apart, the more the data say. The squared distance is in expectation that from the truth and a constant.

    Args:
        arrays: :math:`x_s`, ``(S, *shape)``, made from the first array of :func:`split`; a few, as all subsets are tried.
        held_out: :math:`y''`, the second one, ``(*shape)``.
        noise: standard deviation of the noise of the image; that of :math:`y''` has the variance :math:`v`, five times its square.

    Returns:
        ``(S,)``, in double precision.
    """
    number = len(arrays)
    centre = arrays.double().mean(0)
    deviations = (arrays.double() - centre).flatten(1)
    shrinkage = (noise**2 * (1 + _SHARE**-2)) / _SPREAD**2
    quadratic = deviations @ deviations.mT + shrinkage * torch.eye(number, dtype=torch.float64, device=arrays.device)
    linear = deviations @ (held_out.double() - centre).flatten() + shrinkage / number
    supports = [list(chosen) for size in range(1, number + 1) for chosen in itertools.combinations(range(number), size)]
    possible = [weights for weights in (_on(support, quadratic, linear) for support in supports) if bool((weights >= 0).all())]
    return min(possible, key=lambda weights: float(weights @ quadratic @ weights - 2 * linear @ weights))


def _on(support: list[int], quadratic: Tensor, linear: Tensor) -> Tensor:
    """Where the quadratic function is least if these weights alone are not zero, with sum one."""
    inverse = torch.linalg.solve(quadratic[support][:, support], torch.stack([linear[support], torch.ones_like(linear[support])], 1))
    free, ones = inverse.unbind(1)
    weights = torch.zeros_like(linear)
    weights[support] = free + (1 - free.sum()) / ones.sum() * ones
    return weights
