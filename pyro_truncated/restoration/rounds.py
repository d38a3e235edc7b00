"""Rounds of restoration by mixtures: each learns from the array that the last one restored."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_truncated.restoration.patch_mixture import PatchMixture, Responsibilities, cosines, k_means
from pyro_truncated.restoration.windows import Patches
from pyro_truncated.utils.progress import ProgressBar, progress_bar

# Chosen on images that are not reported: tests/papers/results/restoration.md.
_ITERATIONS, _KEPT, _CANDIDATES, _NEAREST = 4, 3, 12, 32
_LLOYD_STEPS = 6
_THRESHOLD = 2.0
# How near in place patches of a first cluster are, in deviations of the noise per entry.
_NEARNESS = 0.08
_LEAST_ERROR = 0.01
_PATCHES_PER_COMPONENT = 150


def restored_by_mixtures(
    image: Tensor,
    filled: Tensor,
    noise: float,
    patches: Sequence[Patches],
    num_components: int | None,
    rounds: int,
    generator: torch.Generator | None,
    progress: bool | None,
) -> tuple[Tensor, float, PatchMixture]:
    """Rounds of mixtures of patches of several sides, whose arrays are averaged.

    Args:
        image: the damaged array; missing entries are NaN.
        filled: the same without missing entries.
        noise: standard deviation of the noise.
        patches: patches of the array, of one side or more.
        num_components: of each mixture; default: by the number of patches.
        rounds: number of rounds.
        generator: source of randomness.
        progress: whether to show a progress bar.

    Returns:
        The mean of the arrays of the last two rounds; the standard deviation of the noise that the last mixture asks for; and this mixture.
    """
    arrays = [torch.stack([_thresholded(filled, windows, noise) for windows in patches]).mean(0)]
    with progress_bar(progress, total=rounds * len(patches) * _ITERATIONS, desc="restoring") as bar:
        for number in range(rounds):
            found = []
            for windows in patches:
                per_component = _PATCHES_PER_COMPONENT if number == 0 else _PATCHES_PER_COMPONENT / 2
                wanted = min(num_components or math.ceil(len(windows) / per_component), len(windows))
                found.append(_restored_by_mixture(image, arrays[-1], windows, wanted, noise, generator, bar))
            arrays.append(torch.stack([array for array, _, _ in found]).mean(0))
            _, learned_noise, mixture = found[-1]
            if number == 0:
                # Half of the way: the first mixture is fitted to what is left of the noise, too.
                noise = 0.5 * (noise + learned_noise)
    return torch.stack(arrays[-2:] if rounds > 1 else arrays[-1:]).mean(0), learned_noise, mixture


def _thresholded(image: Tensor, patches: Patches, noise: float) -> Tensor:
    """A first estimate: in every patch, discrete cosines of less than twice the noise are dropped.

    Reference:
        Yu and Sapiro, "DCT image denoising: a simple and effective image denoising algorithm", Image Processing On Line 1, 2011.
    """
    windows = patches.extract(image)
    basis = cosines((*patches.size, *([] if patches.channels is None else [patches.channels])), windows)
    coefficients = windows @ basis.mT
    is_kept = coefficients.abs() > _THRESHOLD * noise
    is_kept[:, 0] = True
    return patches.assemble((coefficients * is_kept) @ basis, 1 / is_kept.sum(1))


def _restored_by_mixture(
    image: Tensor,
    estimate: Tensor,
    patches: Patches,
    num_components: int,
    noise: float,
    generator: torch.Generator | None,
    bar: ProgressBar,
) -> tuple[Tensor, float, PatchMixture]:
    """The mixture of the patches of an estimate, and what it makes of the patches of the image.

    Responsibilities are those of the noisy patches, where missing entries are taken from the estimate; the posterior means are those of
    the entries that are observed.

    Returns:
        The array, of which each entry is the mean of what the patches say, weighted by the inverse of their expected squared errors; the
        standard deviation of the noise that maximises the expected log joint; and the mixture.
    """
    y, x = patches.extract(image), patches.extract(estimate)
    filled = torch.where(y.isnan(), x, y)
    places = patches.places().to(x)
    clusters = k_means(torch.cat([x, _NEARNESS * noise * places], 1), num_components, _LLOYD_STEPS, _NEAREST, generator)
    mixture, posterior = _learned(filled, x, places, clusters, noise, bar)
    means, errors, seen_errors = mixture.posterior_means(y, posterior.most_probable(_KEPT))
    variance = ((y - means).square().nansum() + seen_errors.sum()) / (~y.isnan()).sum()
    return patches.assemble(means, 1 / (errors + _LEAST_ERROR * noise**2)), math.sqrt(variance), mixture


def _learned(
    y: Tensor, x: Tensor, places: Tensor, posterior: Responsibilities, noise: float, bar: ProgressBar
) -> tuple[PatchMixture, Responsibilities]:
    """EM in which patches without noise are taken to be known, among the nearest clusters, later among the most probable components."""
    number = int(posterior.components.max()) + 1
    kept, candidates = posterior.most_probable(1), posterior
    for _ in range(_ITERATIONS):
        mixture = PatchMixture.of(x, places, kept, number, noise)
        posterior = mixture.among(y, places, candidates)
        kept, candidates = posterior.most_probable(_KEPT), posterior.most_probable(_CANDIDATES)
        bar.update()
    return mixture, posterior
