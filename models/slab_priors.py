"""Normal priors of slabs, independent or correlated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import GibbsDraws, Population
from pyro_truncated.distributions import CorrelatedSlabSuperposition, SpikeSlabSuperposition
from pyro_truncated.models.data_model import FLOOR, MIN_COUNT
from pyro_truncated.models.dictionary import best_slabs, cholesky

Statistics = dict[str, Tensor]
# Of what every process has computed from its data: the sums.
Total = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Likelihood = SpikeSlabSuperposition | CorrelatedSlabSuperposition

_INIT_VARIANCE = 0.5
# So many data points tell a good step from a bad one.
_TRIAL_ROWS = 250


class SlabPrior(Protocol):
    r"""What :class:`.SpikeSlabSparseCoding` asks of a kind of prior :math:`z \sim \mathcal N(\mu, \Psi)` of its slabs."""

    superposition: type[Likelihood]
    constraint: constraints.Constraint

    def first_scale(self, num_latents: int, dtype: torch.dtype | None = None) -> Tensor:
        """The scale to start from: slabs are independent, with variance 1/2."""

    def distribution(self, mean: Tensor, scale: Tensor) -> dist.TorchDistribution:
        """The prior itself, over vectors of slabs."""

    def statistics(
        self,
        likelihood: Likelihood,
        population: Population,
        y: Tensor,
        temperature: float,
        total: Total,
        positions: Tensor,
    ) -> Statistics:
        """The statistics of the likelihood, with what :meth:`best` needs.

        ``total`` sums over the data of all processes, ``positions (n,)`` are those of the population's data points among these.
        """

    def best(self, statistics: Statistics, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and scale, in float64, that the statistics ask for."""

    def in_units(self, scale: Tensor, gain: Tensor) -> Tensor:
        """The scale of slabs that are multiplied with gains ``(H,)``."""

    def bring_into_units(self, statistics: Statistics, gain: Tensor) -> None:
        """Changes what :meth:`best` needs to slabs that are multiplied with gains ``(H,)``."""

    def select_latents(self, scale: Tensor, index: Tensor) -> Tensor:
        """The scale of slabs ``(H',)`` copied by an index."""


class IndependentSlabs:
    """Independent slabs; the scale are their standard deviations, ``(H,)``."""

    superposition = SpikeSlabSuperposition
    constraint = constraints.positive

    def first_scale(self, num_latents: int, dtype: torch.dtype | None = None) -> Tensor:
        """See :class:`SlabPrior`."""
        return torch.full((num_latents,), _INIT_VARIANCE**0.5, dtype=dtype)

    def distribution(self, mean: Tensor, scale: Tensor) -> dist.TorchDistribution:
        """See :class:`SlabPrior`."""
        prior: dist.TorchDistribution = dist.Normal(mean, scale).to_event(1)
        return prior

    def statistics(
        self,
        likelihood: SpikeSlabSuperposition,
        population: Population,
        y: Tensor,
        temperature: float,
        total: Total,
        positions: Tensor,
    ) -> Statistics:
        """See :class:`SlabPrior`."""
        return likelihood.statistics(population, y, temperature)

    def best(self, statistics: Statistics, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`SlabPrior`."""
        sums = (statistics[name] for name in ("states", "coefficients", "coefficient_squares"))
        slabs: tuple[Tensor, Tensor] = best_slabs(*sums, mean, scale)
        return slabs

    def in_units(self, scale: Tensor, gain: Tensor) -> Tensor:
        """See :class:`SlabPrior`."""
        return scale * gain.abs()

    def bring_into_units(self, statistics: Statistics, gain: Tensor) -> None:
        """See :class:`SlabPrior`."""
        statistics["coefficient_squares"] = statistics["coefficient_squares"] * gain.square()

    def select_latents(self, scale: Tensor, index: Tensor) -> Tensor:
        """See :class:`SlabPrior`."""
        return scale[index]


class CorrelatedSlabs:
    r"""Slabs with any covariance :math:`\Psi`; the scale is its Cholesky factor.

    Only the slabs of active latents count for a data point, so the maximiser has no formula. With the gradients :math:`g` and :math:`K / 2`
    of the free energy in mean and covariance, EM with the other slabs as latent variables would be

    .. math:: \mu + \Psi \frac{g}{N}, \qquad \Psi + \Psi \frac{K}{N} \Psi - \Psi \frac{g g^\top}{N^2} \Psi,

    which never loses, but is slow where latents are rarely active. The M-step takes that or a longer step, if that gains more. Entries may
    be divided by how often a latent is active, :math:`\sqrt{n_h n_i}` in the place of :math:`N`, or how often the two are, :math:`n_{hi}`.
    The outer products with :math:`\Psi` may be those with its diagonal. All end where the gradients vanish.
    """

    superposition = CorrelatedSlabSuperposition
    constraint = constraints.lower_cholesky

    def first_scale(self, num_latents: int, dtype: torch.dtype | None = None) -> Tensor:
        """See :class:`SlabPrior`."""
        return torch.full((num_latents,), _INIT_VARIANCE**0.5, dtype=dtype).diag()

    def distribution(self, mean: Tensor, scale: Tensor) -> dist.TorchDistribution:
        """See :class:`SlabPrior`."""
        return dist.MultivariateNormal(mean, scale_tril=scale)

    def statistics(
        self,
        likelihood: CorrelatedSlabSuperposition,
        population: Population,
        y: Tensor,
        temperature: float,
        total: Total,
        positions: Tensor,
    ) -> Statistics:
        """See :class:`SlabPrior`; the step is chosen here, on the data."""
        statistics = likelihood.statistics(population, y, temperature)
        mean, root = likelihood.slab_mean.double(), likelihood.slab_scale_tril.double()
        names = ("slab_slope", "slab_curvature", "state_pairs", "num_data")
        sums = dict(zip(names, total([statistics[name] for name in names]), strict=True))
        prior = root @ root.mT
        means, covariances = _candidates(sums, mean, prior)
        covariances = _floor_covariances(covariances, means.square() + prior.diagonal())

        def best(means: Tensor, covariances: Tensor, population: Population) -> Tensor:
            """Which gain most, ``(1,)``."""
            gains = total([likelihood.expected_log_slab_prior(population, y, means, covariances, temperature)])[0]
            return gains.nan_to_num(-torch.inf).argmax(0, keepdim=True)

        (number,) = total([torch.tensor(len(population), device="cpu")])
        if number > _TRIAL_ROWS and len(means) > 1:
            # Few of the data points and states nominate a step, all decide whether it is taken in the place of that of EM.
            few = positions % -(-int(number) // _TRIAL_ROWS) == 0
            nominees = _with_first(best(means, covariances, _part(population, few)))
            means, covariances = means[nominees], covariances[nominees]
        index = best(means, covariances, population) if len(means) > 1 else [0]
        for name in names[:3]:
            del statistics[name]
        # Averages over batches of what each asks for are a covariance again.
        claims = {"slab_means": means[index][0], "slab_covariances": covariances[index][0]}
        return statistics | {name: statistics["num_data"] * claim for name, claim in claims.items()}

    def best(self, statistics: Statistics, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`SlabPrior`."""
        total = statistics["num_data"]
        return statistics["slab_means"] / total, _factor(statistics["slab_covariances"] / total)

    def in_units(self, scale: Tensor, gain: Tensor) -> Tensor:
        """See :class:`SlabPrior`."""
        # A root whose rows change their signs; that with a positive diagonal has columns that change theirs, too.
        return gain.unsqueeze(-1) * scale * gain.sign()

    def bring_into_units(self, statistics: Statistics, gain: Tensor) -> None:
        """See :class:`SlabPrior`."""
        statistics["slab_means"] = statistics["slab_means"] * gain
        statistics["slab_covariances"] = statistics["slab_covariances"] * gain.unsqueeze(-1) * gain

    def select_latents(self, scale: Tensor, index: Tensor) -> Tensor:
        """See :class:`SlabPrior`; further copies of a latent are independent."""
        index = index.to(scale.device)
        covariance = (scale @ scale.mT)[index][:, index]
        is_first = (index.unsqueeze(-1) == index).int().argmax(-1) == torch.arange(len(index), device=index.device)
        keeps = is_first.unsqueeze(-1) & is_first | torch.eye(len(index), dtype=torch.bool, device=index.device)
        return _factor((covariance * keeps).double()).to(scale)


def _candidates(statistics: Statistics, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Candidate means ``(T, H)`` and covariances ``(T, H, H)``, those of EM first."""
    slope, curvature, pairs = statistics["slab_slope"], statistics["slab_curvature"], statistics["state_pairs"]
    counts, total, variance = pairs.diagonal(), statistics["num_data"], covariance.diagonal()
    often = counts.sqrt().unsqueeze(-1) * counts.sqrt()
    everywhere = total.expand_as(counts), total.expand_as(pairs)
    means, covariances = [], []
    for is_dense, (count, pair) in ((True, everywhere), (True, (counts, often)), (False, (counts, often)), (False, (counts, pairs))):
        ascent, bend = _per(slope, count), _per(curvature, pair)
        shift = covariance @ ascent if is_dense else variance * ascent
        means.append(mean + shift)
        step = covariance @ bend @ covariance if is_dense else variance.unsqueeze(-1) * bend * variance
        covariances.append(covariance + step - shift.unsqueeze(-1) * shift)
    return torch.stack(means), torch.stack(covariances)


def _with_first(number: Tensor) -> Tensor:
    """The first number and the given one, unless known to agree."""
    first = torch.zeros_like(number)
    return first if number.device.type == "cpu" and int(number) == 0 else torch.cat([first, number])


def _per(total: Tensor, count: Tensor) -> Tensor:
    """The quotient; zero where nothing is counted."""
    return torch.where(count > MIN_COUNT, total / count, 0.0)


def _part(population: Population, is_part: Tensor) -> Population:
    """The four likeliest states of the chosen data points ``(N,)``."""
    where = is_part.nonzero().squeeze(-1)
    indices = where if population.indices is None else population.indices[where]
    log_joint, states = population.log_joint[where].topk(min(4, population.num_states), sorted=False)
    words = population.words[where].gather(1, states.unsqueeze(-1).expand(-1, -1, population.words.shape[-1]))
    return Population(population.space, words, log_joint, indices)


def _floor_covariances(covariance: Tensor, power: Tensor) -> Tensor:
    """The nearest covariances with variances and eigenvalues above a floor."""
    deviation = covariance.diagonal(dim1=-2, dim2=-1).maximum(FLOOR * power).sqrt()
    outer = deviation.unsqueeze(-1) * deviation.unsqueeze(-2)
    relative = 0.5 * (covariance + covariance.mT) / outer
    is_low = _floor_mask(relative)
    values, vectors = torch.linalg.eigh(relative[is_low])
    floored: Tensor = (vectors * values.clamp(min=FLOOR).unsqueeze(-2)) @ vectors.mT * outer[is_low]
    covariance = covariance.clone()
    covariance[is_low] = torch.where((values >= FLOOR).all(-1)[:, None, None], covariance[is_low], floored)
    return covariance


def _floor_mask(relative: Tensor) -> Tensor | slice:
    """Which matrices may have an eigenvalue below the floor, by a factor."""
    if relative.device.type != "cpu":
        return slice(None)
    floor = FLOOR * torch.eye(relative.shape[-1], dtype=relative.dtype)
    info: Tensor = torch.linalg.cholesky_ex(relative - floor)[1]
    return info != 0


def _factor(covariance: Tensor) -> Tensor:
    return cholesky(0.5 * (covariance + covariance.mT))  # type: ignore[no-any-return]


INDEPENDENT, CORRELATED = IndependentSlabs(), CorrelatedSlabs()
BY_NAME: dict[str, IndependentSlabs | CorrelatedSlabs] = {"diag": INDEPENDENT, "full": CORRELATED}


def draw_moments(draws: GibbsDraws, num_latents: int) -> dict[str, Tensor]:
    """Sums of indicators' and coefficients' moments, ``(H,)`` in float64."""
    coefficients = draws.coefficients.double()
    moments = {
        "states": draws.probabilities.double(),
        "active": (coefficients != 0).double().mean(1),
        "coefficients": coefficients.mean(1),
        "coefficient_squares": coefficients.square().mean(1),
    }
    zero = coefficients.new_zeros(num_latents)
    selected = draws.selected.flatten()
    return {name: zero.scatter_add(0, selected, moment.flatten()) for name, moment in moments.items()}
