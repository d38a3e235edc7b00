"""Rounds of restoration by mixtures.

Each round learns from the array that the last one restored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.ops.k_means import k_means, nearest_centres
from pyro_truncated.restoration.patch_mixture import PatchMixture, most_probable
from pyro_truncated.restoration.windows import Patches
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.console import ProgressBar, progress_bar
from pyro_truncated.utils.devices import device_of
from pyro_truncated.utils.isolation import spare_random_numbers

# Chosen on images that are not reported: tests/papers/results/restoration.md.
_ITERATIONS, _CANDIDATES, _NEAREST = 4, 12, 32
_LLOYD_STEPS = 6
_THRESHOLD = 2.0
# How near in place patches of a first cluster are, in deviations of the noise per entry.
_NEARNESS = 0.08
_LEAST_ERROR = 0.03
# Steps in which patches agree: how many, the share of the noisy array in what is cut, and the noise of that, as a part of the noise.
_AGREEMENTS, _SHARE, _PART = 2, 0.3, 0.5
# In the first round; of several channels in roots of the number of a patch's entries: more entries are more parameters of a component.
_PATCHES_PER_COMPONENT, _PATCHES_PER_ROOT = 120, 20
# How many times as many the rounds have, the last number from there on: of one channel and of several, and without noise.
_GROWTH, _GROWTH_OF_COLOURS = (1.0, 2.0), (1.0, 2.0, 4.0)
_GROWTH_IF_CLEAN = (0.4, 0.4, 1.2, 1.2, 3.0)
# The likelihood takes its candidates in blocks itself: the model is run once on all of them.
_BUDGET = 2**36
# Steps count as many numbers as they go through, which says nothing to anybody.
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"


class Learned(NamedTuple):
    """What a mixture makes of an array, with expected squared errors.

    That is the noise that it asks for, the mixture, and its guide.
    """

    patches: Patches
    array: Tensor
    errors: Tensor
    noise: float
    mixture: PatchMixture
    guide: AutoTruncated


def run_rounds(
    image: Tensor,
    filled: Tensor,
    noise: float,
    per_round: Sequence[Sequence[Patches]],
    num_components: int | None,
    generator: torch.Generator | None,
    progress: bool | None,
    desc: str = "restoring",
    *,
    is_clean: bool = False,
) -> tuple[list[Learned], Tensor]:
    """Runs rounds of mixtures of patches of several sides.

    Each round but the first learns from the mean of the arrays of the previous one.

    Args:
        image: the damaged array; missing entries are NaN.
        filled: the same without missing entries.
        noise: standard deviation of the noise.
        per_round: patches of the array, of one side or more in each round.
        num_components: of each mixture; default: by the number of patches and the round.
        generator: source of randomness.
        progress: whether to show a progress bar.
        desc: what it says.
        is_clean: whether there is hardly any noise. The noise then stays as it is, and the first
            rounds, far from the missing entries, have few components. Else after the first round it
            is on half of the way to what that has found.

    Returns:
        The results of the last round for each side, and the mean of the arrays of the last two
        rounds. Only the last array counts if there is one round or its mixtures have more
        components.
    """
    counts: list[int] = []
    is_missing = bool(image.isnan().any())
    means = [filled if is_missing else weighted_mean([_thresholded(filled, windows, noise) for windows in per_round[0]])]
    numbers = sum(len(windows) * windows.num_observed for of_round in per_round for windows in of_round)
    with progress_bar(progress, total=_ITERATIONS * numbers, desc=desc, bar_format=_BAR) as bar:
        for number, of_round in enumerate(per_round):
            learned = []
            for windows in of_round:
                wanted = min(num_components or _num_components(windows, number, is_clean=is_clean), len(windows))
                learned.append(_fit_mixture(image, means[-1], windows, wanted, noise, generator, bar))
            means.append(weighted_mean([of_side.array for of_side in learned]))
            counts.append(learned[0].mixture.num_components)
            if number == 0 and not is_clean:
                # Half of the way: the first mixture is fitted to what is left of the noise, too.
                noise = 0.5 * (noise + learned[-1].noise)
    is_last_alone = len(counts) == 1 or counts[-1] > counts[-2]
    return learned, means[-1] if is_last_alone else weighted_mean(means[-2:])


def weighted_mean(arrays: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
    """Returns the mean of arrays with normalised weights; default: equal ones."""
    stacked = torch.stack(list(arrays))
    return stacked.mean(0) if weights is None else torch.tensordot(weights.to(stacked), stacked, 1)


def expected_errors(learned: Sequence[Learned], weights: Tensor | None = None) -> Tensor:
    """The mean of the expected squared errors of arrays, see :func:`weighted_mean`."""
    return weighted_mean([of_side.errors for of_side in learned], weights)


def _num_components(patches: Patches, number: int, *, is_clean: bool) -> int:
    """Components of the mixture of a round."""
    usual = _GROWTH if patches.channels is None else _GROWTH_OF_COLOURS
    growth = _GROWTH_IF_CLEAN if is_clean else usual
    roots = _PATCHES_PER_ROOT * math.sqrt(patches.num_observed)
    first = len(patches) / (_PATCHES_PER_COMPONENT if patches.channels is None else roots)
    return math.ceil(growth[min(number, len(growth) - 1)] * first)


def _thresholded(image: Tensor, patches: Patches, noise: float) -> Tensor:
    """Returns a first estimate: discrete cosines below twice the noise are dropped.

    Reference:
        Yu and Sapiro, "DCT image denoising: a simple and effective image denoising algorithm", Image Processing On Line 1, 2011.
    """
    windows = patches.extract(image)
    basis = cosines((*patches.size, *([] if patches.channels is None else [patches.channels])), windows)
    coefficients = windows @ basis.mT
    is_kept = coefficients.abs() > _THRESHOLD * noise
    is_kept[:, 0] = True
    return patches.assemble((coefficients * is_kept) @ basis, 1 / is_kept.sum(1))


def _fit_mixture(
    image: Tensor,
    estimate: Tensor,
    patches: Patches,
    num_components: int,
    noise: float,
    generator: torch.Generator | None,
    bar: ProgressBar,
) -> Learned:
    """Fits a mixture to patches of an estimate and applies it.

    Responsibilities are those of the noisy patches, with missing entries taken from the estimate.
    The posterior means use observed entries only.

    Returns:
        The restored array, the mean of its expected squared errors, the noise, the mixture and its
        guide. Each entry is the mean over patches, weighted by the inverse of its expected squared
        errors. Where entries are missing, these are the errors of whole patches. The noise is the
        standard deviation that maximises the expected log joint.
    """
    y, x = patches.extract(image), patches.extract(estimate)
    filled, places = torch.where(y.isnan(), x, y), patches.places().to(x)
    nearest = _clusters(torch.cat([x, _NEARNESS * noise * places], 1), num_components, generator)
    mixture = PatchMixture(x.shape[1], num_components, places.shape[1], noise, x)
    guide = _learned(mixture, nearest, (filled, x, places), bar)
    population = guide.population()
    means, errors = mixture.posterior_means(population, y)
    variance = ((y - means).square() + errors).nanmean()
    array, expected = (_assembled(mixture, what, errors, y, patches) for what in (means, errors))
    return Learned(patches, array, expected, math.sqrt(variance), mixture, guide)


def _assembled(mixture: PatchMixture, means: Tensor, errors: Tensor, y: Tensor, patches: Patches) -> Tensor:
    if bool(y.isnan().any()):
        # What is expected of single entries that were not seen says less than what is expected of their patch.
        errors = errors.mean(1, keepdim=True)
    return patches.assemble(means, 1 / (errors + _LEAST_ERROR * mixture.scale.square()))


def find_consensus(image: Tensor, learned: Sequence[Learned], weights: Tensor | None = None) -> Tensor:
    """Makes all patches agree on one array, by half-quadratic splitting.

    The mixtures are given a mean of the restored and the noisy array, with half the noise. The mean
    of their results is the next restored array.

    Args:
        image: the noisy array.
        learned: what was learned with each side; the mean of the arrays is where the steps start.
        weights: of the sides, with sum one; default: equal ones.

    Reference:
        Zoran and Weiss, "From learning models of natural image patches to whole image restoration", International Conference on Computer
        Vision, 2011.
    """
    estimate = weighted_mean([of_side.array for of_side in learned], weights)
    sharper = [copy.deepcopy(of_side.mixture) for of_side in learned]
    for mixture in sharper:
        mixture.scale = _PART * mixture.scale
    for _ in range(_AGREEMENTS):
        between = torch.lerp(estimate, image, _SHARE)
        pairs = zip(learned, sharper, strict=True)
        estimate = weighted_mean([_apply_mixture(between, of_side, mixture) for of_side, mixture in pairs], weights)
    return estimate


def _apply_mixture(image: Tensor, learned: Learned, mixture: PatchMixture) -> Tensor:
    """Applies a mixture to another array, with its most probable components."""
    y, places = learned.patches.extract(image), learned.patches.places().to(image)
    population = _guide(mixture, learned.guide.population().states(torch.int64)[..., 0]).refresh_(y, y, places)
    return _assembled(mixture, *mixture.posterior_means(population, y), y, learned.patches)


def _clusters(points: Tensor, number: int, generator: torch.Generator | None) -> Tensor:
    """Returns each point's nearest clusters, by Lloyd's algorithm from random points."""
    chosen = torch.randperm(len(points), generator=generator, device=device_of(generator))[:number].to(points.device)
    return nearest_centres(points, k_means(points, points[chosen], _LLOYD_STEPS), _NEAREST)


def _learned(mixture: PatchMixture, nearest: Tensor, data: tuple[Tensor, Tensor, Tensor], bar: ProgressBar) -> AutoTruncated:
    """Runs EM in which patches without noise are observed.

    Components are first the nearest clusters, later the most probable ones.
    """
    space = StateSpace([mixture.num_components])
    population = Population(space, space.pack(nearest[:, :1, None]), torch.zeros_like(nearest[:, :1], dtype=data[0].dtype))
    guide = _guide(mixture, nearest)
    for number in range(_ITERATIONS):
        mixture.maximize(mixture.sufficient_statistics(population, *data))
        with spare_random_numbers():
            population = guide.refresh_(*data)
        if number == 0:
            guide = _guide(mixture, most_probable(population, _CANDIDATES).states(torch.int64)[..., 0])
        bar.update(data[1].numel())
    return guide


def _guide(mixture: PatchMixture, components: Tensor) -> AutoTruncated:
    return AutoTruncated(mixture, components.shape[1], init=components, vectorize=True, memory_budget=_BUDGET)


def cosines(sizes: tuple[int, ...], like: Tensor) -> Tensor:
    """Returns the orthonormal discrete cosine transform of windows, ``(D, D)``.

    The first row is the constant.
    """
    basis = torch.ones(1, 1, dtype=torch.float64)
    for size in sizes:
        frequency = torch.arange(size, dtype=torch.float64).unsqueeze(1)
        rows = F.normalize((math.pi / size * frequency * (torch.arange(size, dtype=torch.float64) + 0.5)).cos(), dim=1)
        basis = torch.kron(basis, rows)
    return basis.to(like)
