"""Mixtures of normal distributions of patches, learned in rounds.

Each component has few directions and a place in the array. Each round learns from the array that the last one restored.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import pyro
import pyro.poutine as poutine
import torch
from torch import Tensor
from torch.nn import functional as F

from pyro_truncated.distributions import Component, ComponentLowRankNormal, ComponentNormal, component_products
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.ops import gather_states
from pyro_truncated.ops.components import k_means, nearest_centres
from pyro_truncated.restoration.windows import Patches
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.console import ProgressBar, progress_bar
from pyro_truncated.utils.devices import generator_device
from pyro_truncated.utils.parameter_store import spare_random_numbers


class PatchMixture(torch.nn.Module):
    r"""Patches of ``D`` entries as a mixture of ``K`` normal distributions.

    Each component also has a distribution of places in the array. It is a Pyro model.

    .. math:: z_n \sim \pi, \qquad x_n \sim \mathcal N(\mu_z, W_z W_z^\top), \qquad
        p_n \sim \mathcal N(m_z, v_z I)^\beta, \qquad y_n \sim \mathcal N(x_n, \sigma^2 I),

    where :math:`p_n` is the place of patch ``n``; its likelihood has the power :math:`\beta = 1/2`. The patches without noise :math:`x`
    are given for learning: the M-step takes their moments, and leaves out directions with a variance below 5 % of the noise's. The
    posterior of :math:`z` is that of the noisy patches.

    Example:
        >>> mixture = denoise(torch.randn(16, 16), side=4, num_components=3, progress=False).model
        >>> mixture.loc.shape
        torch.Size([3, 16])

    Args:
        num_observed: number of entries of a patch ``D``.
        num_components: number of components ``K``.
        num_dims: number of coordinates of a place ``P``.
        scale: standard deviation of the noise :math:`\sigma`.
        like: a tensor of the type and on the device that parameters shall have.

    Attributes:
        weights: mixing proportions :math:`\pi`, ``(K,)``.
        loc: means :math:`\mu`, ``(K, D)``.
        factor: directions :math:`W`, ``(K, D, R)``: orthogonal columns, the longest first, and zeros where a component has fewer.
        places: :math:`m`, ``(K, P)``.
        spreads: standard deviations :math:`\sqrt v`, ``(K,)``.
        scale: :math:`\sigma`, ``()``.

    References:
        Yu, Sapiro and Mallat, "Solving Inverse Problems With Piecewise Linear Estimators: From Gaussian Mixture Models to Structured
        Sparsity", IEEE Transactions on Image Processing 21, 2012. Tipping and Bishop, "Mixtures of probabilistic principal component
        analyzers", Neural Computation 11, 1999.
    """

    weights: Tensor
    loc: Tensor
    factor: Tensor
    places: Tensor
    spreads: Tensor
    scale: Tensor
    # Its moments are taken around the means as they are.
    statistics_depend_on_parameters = True

    def __init__(self, num_observed: int, num_components: int, num_dims: int, scale: float, like: Tensor) -> None:
        super().__init__()
        self.num_observed, self.num_components = num_observed, num_components
        self.register_buffer("weights", like.new_full((num_components,), 1 / num_components))
        self.register_buffer("loc", like.new_zeros(num_components, num_observed))
        self.register_buffer("factor", like.new_zeros(num_components, num_observed, 1))
        self.register_buffer("places", like.new_zeros(num_components, num_dims))
        self.register_buffer("spreads", like.new_ones(num_components))
        self.register_buffer("scale", like.new_tensor(scale))

    def forward(self, y: Tensor, x: Tensor, places: Tensor) -> None:
        """The model of noisy patches ``y (N, D)`` at places ``(N, P)``.

        Patches without noise ``x (N, D)`` are for learning only.
        """
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", Component(logits=self.weights.log()))
            pyro.sample("y", self.likelihood(z), obs=y)
            # Of a patch there are far more entries than coordinates of its place, but they overlap
            # with their neighbours'.
            with poutine.scale(scale=0.5):
                pyro.sample("place", ComponentNormal(z, self.places, self.spreads.unsqueeze(-1)), obs=places)

    def likelihood(self, z: Tensor) -> ComponentLowRankNormal:
        """The distribution of noisy patches of components ``z``."""
        return ComponentLowRankNormal(z, self.loc, self.factor, self.scale)

    @torch.no_grad()
    def sufficient_statistics(
        self, population: Population, y: Tensor, x: Tensor, places: Tensor, *, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        r"""Sums over the patches without noise that :meth:`maximize` needs, see :class:`~pyro_truncated.ClosedFormModel`.

        Returns:
            With responsibilities :math:`r_{nk}` of the three most probable components of each
            patch: ``counts`` are their sums ``(K,)``. ``sums`` ``(K, D)`` and ``products`` ``(K, D,
            D)`` are those of :math:`x_n - \mu_k`. ``places`` ``(K, P + 2)`` are those of :math:`(1,
            p_n, |p_n|^2)`.
        """
        components, weights = _shares(population, temperature)
        x, places = population.select_rows(x), population.select_rows(places).double()
        products = component_products(x, components, weights, self.num_components, self.loc)
        moments = torch.cat([torch.ones_like(places[:, :1]), places, places.square().sum(1, keepdim=True)], 1)
        of_places, sums = (self._sums(rows, components, weights) for rows in (moments, x))
        counts = of_places[:, 0].to(x)
        return {"counts": counts, "sums": sums - counts.unsqueeze(1) * self.loc, "products": products, "places": of_places}

    def _sums(self, rows: Tensor, components: Tensor, weights: Tensor) -> Tensor:
        total = rows.new_zeros(self.num_components, rows.shape[1])
        for component, weight in zip(components.mT, weights.to(rows).mT, strict=True):
            total.index_add_(0, component, weight.unsqueeze(1) * rows)
        return total

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        """Sets all parameters but the noise to the weighted moments.

        A component without data keeps its mean and is never taken.
        """
        counts = statistics["counts"]
        number = counts.clamp(min=torch.finfo(counts.dtype).tiny).unsqueeze(1)
        shift = statistics["sums"] / number
        covariance = statistics["products"] / number.unsqueeze(2)
        variances, directions = self._eigen(covariance.baddbmm_(shift.unsqueeze(2), shift.unsqueeze(1), alpha=-1.0))
        # Directions whose variance is below this part of the noise's are not worth their estimate.
        variances = torch.where(variances > 0.05 * self.scale.square(), variances, 0.0)
        rank = max(1, int((variances > 0).sum(1).max()))
        self.factor = (directions * variances.sqrt().unsqueeze(1))[..., self.num_observed - rank :].flip(-1)
        self.loc = self.loc + shift
        self.weights = counts / counts.sum()
        total = statistics["places"]
        moments = total[:, 1:] / total[:, :1].clamp(min=torch.finfo(counts.dtype).tiny)
        self.places = moments[:, :-1].to(counts)
        variance = (moments[:, -1] - moments[:, :-1].square().sum(1)).clamp(min=0.0) / (moments.shape[1] - 1)
        # Places within so many entries are the same.
        self.spreads = (variance + 2.0**2).sqrt().to(counts)

    def _eigen(self, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of covariances, which are overwritten."""
        diagonal = covariance.diagonal(dim1=1, dim2=2)
        # Without noise, covariances of few directions become tridiagonal with entries that underflow, of which LAPACK's divide and conquer
        # makes NaN. Where the noise is smaller, rounding takes its part.
        noise = self.scale.square() + torch.finfo(covariance.dtype).eps * diagonal.sum(1, keepdim=True).clamp(min=0.0)
        diagonal += noise
        values, vectors = torch.linalg.eigh(covariance)
        return values - noise, vectors

    @torch.no_grad()
    def posterior_means(self, population: Population, y: Tensor) -> tuple[Tensor, Tensor]:
        r"""Returns means and expected squared errors of :math:`x_n` given :math:`y_n`, both ``(N, D)``.

        Entries of ``y`` that are NaN are missing. The errors are the posterior variances: with means :math:`m_{nk}` and variances
        :math:`v_{nk}` given component :math:`k`, :math:`\sum_k r_{nk} (v_{nk} + (m_{nk} - \sum_l r_{nl} m_{nl})^2)`.
        """
        components, weights = _shares(population)
        y = population.select_rows(y)
        mean, error, share = torch.zeros_like(y), torch.zeros_like(y), y.new_zeros(len(y), 1)
        # One after the other: all of them together are several times the data.
        for component, weight in zip(components.mT, weights.unsqueeze(-1).unbind(1), strict=True):
            means, variances = self.likelihood(component).without_noise(y)
            share = share + weight
            step = means - mean
            mean.addcmul_(weight / share, step)
            error.addcmul_(weight, variances.addcmul(step, means - mean))
        return mean, error

    def reconstruct(self, population: Population, y: Tensor) -> Tensor:
        """Posterior means of the patches without noise, ``(N, D)``, see :meth:`posterior_means`."""
        return self.posterior_means(population, y)[0]


def most_probable(population: Population, number: int) -> Population:
    """Returns the ``number`` most probable states of every data point, best first."""
    log_joint, best = population.log_joint.topk(min(number, population.num_states), 1)
    return dataclasses.replace(population, words=gather_states(population.words, best), log_joint=log_joint)


def _shares(population: Population, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The components that a patch counts for, and their probabilities, ``(N, S)`` both."""
    probable = most_probable(population, 3)
    return probable.states(torch.int64)[..., 0], probable.weights(temperature)


# EM steps of a mixture. The numbers of this file were chosen on images that are not reported: tests/papers/results/restoration.md.
_ITERATIONS = 4
# Steps count as many numbers as they go through, which says nothing to anybody.
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"


class MixtureFit(NamedTuple):
    """What a mixture makes of an array, with expected squared errors."""

    patches: Patches
    array: Tensor
    errors: Tensor
    noise: float
    mixture: PatchMixture
    guide: AutoTruncated


def run_rounds(
    image: Tensor,
    complete: Tensor,
    noise: float,
    per_round: Sequence[Sequence[Patches]],
    num_components: int | None,
    generator: torch.Generator | None,
    progress: bool | None,
    desc: str = "restoring",
    *,
    is_clean: bool = False,
) -> tuple[list[MixtureFit], Tensor]:
    """Runs rounds of mixtures of patches of several sides.

    Each round but the first learns from the mean of the arrays of the previous one; ``complete`` is the damaged array without missing
    entries. If there is hardly any noise (``is_clean``) it stays as it is, and the first rounds, far from the missing entries, have few
    components. Else after the first round it is on half of the way to what that has found.

    Returns the results of the last round for each side, and the mean of the arrays of the last two rounds. Only the last array counts if
    there is one round or its mixtures have more components.
    """
    counts: list[int] = []
    is_missing = bool(image.isnan().any())
    means = [complete if is_missing else weighted_mean([_threshold_cosines(complete, windows, noise) for windows in per_round[0]])]
    numbers = sum(len(windows) * windows.num_observed for of_round in per_round for windows in of_round)
    with progress_bar(progress, total=_ITERATIONS * numbers, desc=desc, bar_format=_BAR) as bar:
        for number, of_round in enumerate(per_round):
            fits = []
            for windows in of_round:
                size = min(num_components or _num_components(windows, number, is_clean=is_clean), len(windows))
                fits.append(_fit_mixture(image, means[-1], windows, size, noise, generator, bar))
            means.append(weighted_mean([of_side.array for of_side in fits]))
            counts.append(fits[0].mixture.num_components)
            if number == 0 and not is_clean:
                # Half of the way: the first mixture is fitted to what is left of the noise, too.
                noise = 0.5 * (noise + fits[-1].noise)
    is_last_alone = len(counts) == 1 or counts[-1] > counts[-2]
    return fits, means[-1] if is_last_alone else weighted_mean(means[-2:])


def weighted_mean(arrays: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
    """Returns the mean of arrays with normalised weights; default: equal ones."""
    stacked = torch.stack(list(arrays))
    return stacked.mean(0) if weights is None else torch.tensordot(weights.to(stacked), stacked, 1)


def expected_errors(fits: Sequence[MixtureFit], weights: Tensor | None = None) -> Tensor:
    """The mean of the expected squared errors of arrays, see :func:`weighted_mean`."""
    return weighted_mean([fit.errors for fit in fits], weights)


def _num_components(patches: Patches, number: int, *, is_clean: bool) -> int:
    """Components of the mixture of a round."""
    # How many times as many the rounds have, the last number from there on.
    usual = (1.0, 2.0) if patches.channels is None else (1.0, 2.0, 4.0)
    growth = (0.4, 0.4, 1.2, 1.2, 3.0) if is_clean else usual
    # Of several channels in roots of the number of a patch's entries: more entries are more parameters of a component.
    first = len(patches) / (120 if patches.channels is None else 20 * math.sqrt(patches.num_observed))
    return math.ceil(growth[min(number, len(growth) - 1)] * first)


def _threshold_cosines(image: Tensor, patches: Patches, noise: float, *, threshold: float = 2.0) -> Tensor:
    """Returns a first estimate: discrete cosines below twice the noise are dropped.

    Reference:
        Yu and Sapiro, "DCT image denoising: a simple and effective image denoising algorithm", Image Processing On Line 1, 2011.
    """
    windows = patches.extract(image)
    basis = cosines((*patches.size, *([] if patches.channels is None else [patches.channels])), windows)
    coefficients = windows @ basis.mT
    is_kept = coefficients.abs() > threshold * noise
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
) -> MixtureFit:
    """Fits a mixture to patches of an estimate and applies it.

    Responsibilities are those of the noisy patches, with missing entries taken from the estimate.
    The posterior means use observed entries only. Each entry of the array is their mean over patches, weighted by the inverse of its
    expected squared errors; where entries are missing, by those of whole patches. The noise maximises the expected log joint.
    """
    y, x = patches.extract(image), patches.extract(estimate)
    filled, places = torch.where(y.isnan(), x, y), patches.places().to(x)
    # How near in place patches of a first cluster are, in deviations of the noise per entry.
    points = torch.cat([x, 0.08 * noise * places], 1)
    order = torch.randperm(len(points), generator=generator, device=generator_device(generator))[:num_components].to(points.device)
    # Lloyd's algorithm from random points, in six steps; then each patch has 32 candidates.
    nearest = nearest_centres(points, k_means(points, points[order], 6), 32)
    mixture = PatchMixture(x.shape[1], num_components, places.shape[1], noise, x)
    guide = _run_em(mixture, nearest, (filled, x, places), bar)
    population = guide.population()
    means, errors = mixture.posterior_means(population, y)
    variance = ((y - means).square() + errors).nanmean()
    array, expected = (_assemble(mixture, what, errors, y, patches) for what in (means, errors))
    return MixtureFit(patches, array, expected, math.sqrt(variance), mixture, guide)


def _assemble(mixture: PatchMixture, means: Tensor, errors: Tensor, y: Tensor, patches: Patches, *, least_error: float = 0.03) -> Tensor:
    if bool(y.isnan().any()):
        # What is expected of single entries that were not seen says less than what is expected of their patch.
        errors = errors.mean(1, keepdim=True)
    return patches.assemble(means, 1 / (errors + least_error * mixture.scale.square()))


def find_consensus(image: Tensor, fits: Sequence[MixtureFit], weights: Tensor | None = None, steps: int = 2) -> Tensor:
    """Makes all patches agree on one array, by half-quadratic splitting.

    In each step the mixtures are given a mean of the restored and the noisy array, with half the
    noise. The mean of their results, with ``weights`` of the sides, is the next restored array.

    Reference:
        Zoran and Weiss, "From learning models of natural image patches to whole image restoration", International Conference on Computer
        Vision, 2011.
    """
    estimate = weighted_mean([fit.array for fit in fits], weights)
    sharper = [copy.deepcopy(fit.mixture) for fit in fits]
    # Patches that agree have half the noise, and three tenths of the noisy array.
    for mixture in sharper:
        mixture.scale = 0.5 * mixture.scale
    for _ in range(steps):
        between = torch.lerp(estimate, image, 0.3)
        pairs = zip(fits, sharper, strict=True)
        estimate = weighted_mean([_apply_mixture(between, fit, mixture) for fit, mixture in pairs], weights)
    return estimate


def _apply_mixture(image: Tensor, fit: MixtureFit, mixture: PatchMixture) -> Tensor:
    y, places = fit.patches.extract(image), fit.patches.places().to(image)
    population = _guide(mixture, fit.guide.population().states(torch.int64)[..., 0]).refresh_(y, y, places)
    return _assemble(mixture, *mixture.posterior_means(population, y), y, fit.patches)


def _run_em(mixture: PatchMixture, nearest: Tensor, data: tuple[Tensor, Tensor, Tensor], bar: ProgressBar) -> AutoTruncated:
    """Runs EM on patches without noise, at first with the nearest clusters."""
    space = StateSpace([mixture.num_components])
    population = Population(space, space.pack(nearest[:, :1, None]), torch.zeros_like(nearest[:, :1], dtype=data[0].dtype))
    guide = _guide(mixture, nearest)
    for number in range(_ITERATIONS):
        mixture.maximize(mixture.sufficient_statistics(population, *data))
        with spare_random_numbers():
            population = guide.refresh_(*data)
        if number == 0:
            # The most probable components are each patch's candidates from then on.
            guide = _guide(mixture, most_probable(population, 12).states(torch.int64)[..., 0])
        bar.update(data[1].numel())
    return guide


def _guide(mixture: PatchMixture, components: Tensor) -> AutoTruncated:
    # The likelihood takes its candidates in blocks itself: the model is run once on all of them.
    return AutoTruncated(mixture, components.shape[1], init=components, vectorize=True, memory_budget=2**36)


def cosines(sizes: tuple[int, ...], like: Tensor) -> Tensor:
    """Returns the orthonormal discrete cosine transform of windows, ``(D, D)``."""
    basis = torch.ones(1, 1, dtype=torch.float64)
    for size in sizes:
        frequency = torch.arange(size, dtype=torch.float64).unsqueeze(1)
        rows = F.normalize((math.pi / size * frequency * (torch.arange(size, dtype=torch.float64) + 0.5)).cos(), dim=1)
        basis = torch.kron(basis, rows)
    return basis.to(like)
