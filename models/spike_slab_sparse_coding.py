"""Spike-and-slab sparse coding, with superposition by sum or by maximum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroParam, pyro_method
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import GibbsDraws, Population
from pyro_truncated.distributions import (
    CorrelatedSlabSuperposition,
    LinearSuperposition,
    MaximumSlabs,
    MaximumSuperposition,
    PiecewiseGaussian,
    SpikeSlabSuperposition,
)
from pyro_truncated.extend import global_positions, names_arguments, selected_rows, shard_sum, takes_arrays
from pyro_truncated.models.data_model import FLOOR, MIN_COUNT, activation, cast_like, check_data, count_data
from pyro_truncated.models.dictionary import LinearDictionary, best_claims, best_slabs, cholesky, dictionary_from_claims
from pyro_truncated.models.superposed_causes import SparseCoding

Statistics = dict[str, Tensor]
# Of what every process has computed from its data: the sums.
Total = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Likelihood = SpikeSlabSuperposition | CorrelatedSlabSuperposition


class IndependentSlabs:
    r"""Independent slabs, :math:`z_h \sim \mathcal N(\mu_h, \tau_h^2)`; the scale are the deviations :math:`\tau`, ``(H,)``."""

    superposition = SpikeSlabSuperposition
    constraint = constraints.positive

    def first_scale(self, num_latents: int, dtype: torch.dtype | None = None) -> Tensor:
        """The scale to start from: slabs are independent, with variance 1/2."""
        return torch.full((num_latents,), 0.5**0.5, dtype=dtype)

    def distribution(self, mean: Tensor, scale: Tensor) -> dist.TorchDistribution:
        """The prior itself, over vectors of slabs."""
        return dist.Normal(mean, scale).to_event(1)

    def statistics(
        self,
        likelihood: SpikeSlabSuperposition,
        population: Population,
        y: Tensor,
        temperature: float,
        total: Total,
        positions: Tensor,
    ) -> Statistics:
        """The statistics of the likelihood, with what :meth:`best` needs.

        ``total`` sums over the data of all processes, ``positions (n,)`` are those of the population's data points among these.
        """
        return likelihood.statistics(population, y, temperature)

    def best(self, statistics: Statistics, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and scale, in float64, that the statistics ask for."""
        sums = (statistics[name] for name in ("states", "coefficients", "coefficient_squares"))
        return best_slabs(*sums, mean, scale)

    def rescale(self, scale: Tensor, statistics: Statistics, gain: Tensor) -> Tensor:
        """The scale of slabs times gains ``(H,)``; changes what :meth:`best` needs."""
        statistics["coefficient_squares"] = statistics["coefficient_squares"] * gain.square()
        return scale * gain.abs()

    def select_latents(self, scale: Tensor, index: Tensor) -> Tensor:
        """The scale of slabs ``(H',)`` copied by an index."""
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
        """See :class:`IndependentSlabs`."""
        return INDEPENDENT.first_scale(num_latents, dtype).diag()

    def distribution(self, mean: Tensor, scale: Tensor) -> dist.TorchDistribution:
        """See :class:`IndependentSlabs`."""
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
        """See :class:`IndependentSlabs`; the step is chosen here, on the data."""
        statistics = likelihood.statistics(population, y, temperature)
        mean, root = likelihood.slab_mean.double(), likelihood.slab_scale_tril.double()
        names = ("slab_slope", "slab_curvature", "state_pairs", "num_data")
        sums = dict(zip(names, total([statistics[name] for name in names]), strict=True))
        prior = root @ root.mT
        means, covariances = _candidates(sums, mean, prior)
        covariances = _floor_covariances(covariances, means.square() + prior.diagonal())

        def best(means: Tensor, covariances: Tensor, population: Population) -> Tensor:
            gains = total([likelihood.expected_log_slab_prior(population, y, means, covariances, temperature)])[0]
            return gains.nan_to_num(-torch.inf).argmax(0, keepdim=True)

        (number,) = total([torch.tensor(len(population), device="cpu")])
        # 250 data points tell a good step from a bad one.
        stride = -(-int(number) // 250)
        if stride > 1 and len(means) > 1:
            # Few of the data points and states nominate a step, all decide whether it is taken in the place of that of EM.
            few = positions % stride == 0
            nominee = best(means, covariances, _part(population, few))
            first = torch.zeros_like(nominee)
            # The first one alone, if it is known to be the nominee.
            nominees = first if nominee.is_cpu and int(nominee) == 0 else torch.cat([first, nominee])
            means, covariances = means[nominees], covariances[nominees]
        index = best(means, covariances, population) if len(means) > 1 else [0]
        for name in names[:3]:
            del statistics[name]
        # Averages over batches of what each asks for are a covariance again.
        claims = {"slab_means": means[index][0], "slab_covariances": covariances[index][0]}
        return statistics | {name: statistics["num_data"] * claim for name, claim in claims.items()}

    def best(self, statistics: Statistics, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`IndependentSlabs`."""
        total = statistics["num_data"]
        return statistics["slab_means"] / total, _factor(statistics["slab_covariances"] / total)

    def rescale(self, scale: Tensor, statistics: Statistics, gain: Tensor) -> Tensor:
        """See :class:`IndependentSlabs`."""
        statistics["slab_means"] = statistics["slab_means"] * gain
        statistics["slab_covariances"] = statistics["slab_covariances"] * gain.unsqueeze(-1) * gain
        # A root whose rows change their signs; that with a positive diagonal has columns that change theirs, too.
        return gain.unsqueeze(-1) * scale * gain.sign()

    def select_latents(self, scale: Tensor, index: Tensor) -> Tensor:
        """See :class:`IndependentSlabs`; further copies of a latent are independent."""
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
    is_low: Any = slice(None)
    if relative.is_cpu:
        # Which may have an eigenvalue below the floor, by a factor.
        is_low = torch.linalg.cholesky_ex(relative - FLOOR * torch.eye(relative.shape[-1], dtype=relative.dtype))[1] != 0
    values, vectors = torch.linalg.eigh(relative[is_low])
    floored: Tensor = (vectors * values.clamp(min=FLOOR).unsqueeze(-2)) @ vectors.mT * outer[is_low]
    covariance = covariance.clone()
    covariance[is_low] = torch.where((values >= FLOOR).all(-1)[:, None, None], covariance[is_low], floored)
    return covariance


def _factor(covariance: Tensor) -> Tensor:
    return cholesky(0.5 * (covariance + covariance.mT))


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


class SpikeSlabSparseCoding(LinearDictionary, SparseCoding):
    r"""Linear spike-and-slab sparse coding.

    .. math:: b_h \sim \mathrm{Bernoulli}(\pi_h), \qquad z \sim \mathcal N(\mu, \Psi), \qquad
        y \sim \mathcal N(W (b \odot z) + a, \sigma^2 I),

    with independent slabs, :math:`\Psi = \mathrm{diag}(\tau^2)`, or any covariance. The site ``s`` are the indicators :math:`b`; the slabs
    :math:`z` are integrated out exactly. For a posterior over slabs too, use :meth:`with_slabs`, which has the site ``z``, and the exact
    conditional::

        guide = AutoTruncated(model.with_slabs, conditional=model.conditional)

    Entries of the data that are NaN are missing. Scaling a dictionary element and unscaling its slab changes nothing, so :meth:`maximize`
    keeps the norm of every element and makes slab means non-negative.

    Args:
        num_observed: observed dimensions ``D``.
        num_latents: number of latents ``H``.
        shared_prior: whether all latents share one :math:`\pi`.
        covariance: ``"diag"`` for independent slabs, ``"full"`` otherwise.
            Restarts of :func:`~pyro_truncated.learn` have independent slabs in any case, as
            correlated ones lead to worse optima.
        offset: whether an offset :math:`a` is learned, as the literature's models have none. Without it the data's background must be zero.
        ridge: strength of a prior of the dictionary, see :class:`.LinearDictionary`. With one the free energy may fall.
        dtype: type of the parameters. Default: torch's.

    Attributes:
        weight: dictionary :math:`W`, ``(D, H)``.
        scale: noise standard deviation :math:`\sigma`, a scalar.
        prior: activation probability :math:`\pi`, ``(H,)`` or a scalar.
        slab_mean: :math:`\mu`, ``(H,)``.
        slab_scale: standard deviations :math:`\tau`, ``(H,)``. If full, the lower Cholesky factor of :math:`\Psi`, ``(H, H)``.
        bias: offset :math:`a`, ``(D,)``, or ``None``.
        center: where moments are taken, ``(D,)``, see :class:`.LinearDictionary`.

    Raises:
        ValueError: if a size is no positive integer, for an unknown kind of covariance, or a negative ridge.

    Reference:
        Sheikh, Shelton and Lücke, "A Truncated EM Approach for Spike-and-Slab Sparse Coding", JMLR 2014. The M-step here takes the
        posterior mean of products where the published noise update takes products of posterior means, so it is exact.
    """

    # The slabs' posterior moments are those under the parameters at the time.
    statistics_depend_on_parameters = True
    statistics_span_processes = True

    latent_parameters = ("weight", "prior", "slab_mean")

    slab_mean: Tensor
    slab_scale: Tensor

    @names_arguments
    def __init__(
        self,
        num_observed: int,
        num_latents: int,
        *,
        shared_prior: bool = False,
        covariance: str = "diag",
        offset: bool = True,
        ridge: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        if covariance not in BY_NAME:
            raise ValueError(f"covariance must be one of {', '.join(map(repr, BY_NAME))}; got {covariance!r}")
        super().__init__(num_observed, num_latents, shared_prior=shared_prior, dtype=dtype)
        self.covariance = covariance
        self._make_offset(offset, dtype)
        self._set_ridge(ridge)
        self.slab_mean = PyroParam(torch.ones(num_latents, dtype=dtype), constraints.real)  # type: ignore[assignment]
        self.slab_scale = PyroParam(self._slabs.first_scale(num_latents, dtype), self._slabs.constraint)  # type: ignore[assignment]

    @property
    def _slabs(self) -> IndependentSlabs | CorrelatedSlabs:
        return BY_NAME[self.covariance]

    @property
    def superposition(self) -> type[Likelihood]:
        """The likelihood's class."""
        return self._slabs.superposition

    @property
    def statistics_are_additive(self) -> bool:
        """Whether a batch may be taken in parts.

        A step of the covariance is chosen where the data are at hand, for all of a batch at once.
        """
        return self.covariance == "diag"

    def _likelihood_parameters(self) -> tuple[Any, ...]:
        return self.scale, self.slab_mean, self.slab_scale, self.bias

    @pyro_method
    @takes_arrays
    def with_slabs(self, y: Tensor | None = None, batch_size: int | None = None, num_data: int | None = None) -> Tensor:
        """The same model with the slabs as a site ``z (H,)``."""
        weight, scale, prior, slab_mean, slab_scale = self.weight, self.scale, self.prior, self.slab_mean, self.slab_scale
        bias = self.bias
        size = count_data(y, num_data)
        with pyro.plate("data", size, subsample_size=batch_size) as index:
            states = pyro.sample("s", activation(prior, self.num_latents))
            slabs = pyro.sample("z", self._slabs.distribution(slab_mean, slab_scale))
            return pyro.sample("y", LinearSuperposition(states * slabs, weight, scale, bias), obs=selected_rows(y, index))

    @pyro_method
    @takes_arrays
    def conditional(
        self, states: dict[str, Tensor], y: Tensor, batch_size: int | None = None, num_data: int | None = None
    ) -> dict[str, Tensor]:
        """Samples the slabs ``z`` from their exact posterior given the indicators."""
        likelihood = self._slabs.superposition(states["s"], self.weight, *self._likelihood_parameters())
        return {"z": pyro.sample("z", likelihood.slab_posterior(pyro.subsample(y, event_dim=1)))}

    def _start(self, y: Tensor, generator: torch.Generator | None) -> None:
        super()._start(y, generator)
        self.slab_mean = torch.ones_like(self.slab_mean)
        self.slab_scale = self._slabs.first_scale(self.num_latents).to(self.slab_scale)

    def with_latents(self, index: Tensor) -> Self:
        """See :meth:`SparseCoding.with_latents`."""
        other: Self = super().with_latents(index)
        scale = self._slabs.select_latents(self.slab_scale.detach(), index)
        other.slab_scale = PyroParam(scale, self._slabs.constraint)  # type: ignore[assignment]
        return other

    def simplified(self) -> Self:
        """Returns a copy with independent slabs; the model itself if they are."""
        if self.covariance == "diag":
            return self
        other = self.with_latents(torch.arange(self.num_latents))
        other.covariance = "diag"
        other.slab_scale = PyroParam(self.slab_scale.detach().norm(dim=1), INDEPENDENT.constraint)  # type: ignore[assignment]
        return other

    @torch.no_grad()
    def load_simplified(self, other: Self) -> None:
        """Takes the parameters of a :meth:`simplified` model."""
        self.load_state_dict({name: value for name, value in other.state_dict().items() if "slab_scale" not in name}, strict=False)
        self.slab_scale = other.slab_scale.detach().diag()

    def _statistics(self, population: Population, y: Tensor, temperature: float) -> dict[str, Tensor]:
        r"""Those of :meth:`.SpikeSlabSuperposition.statistics`, with an offset above the ``center``.

        With a full covariance, ``slab_means`` and ``slab_covariances`` take the place of ``coefficient_squares``. They are the number of
        data points times the mean ``(H,)`` and the covariance ``(H, H)`` that these data ask for.
        """
        shared = shard_sum(y), global_positions(y, population.indices)
        population, y = self._above_center(population, y)
        states, slabs, bias = self.weight.new_zeros(self.num_latents), (self.slab_mean, self.slab_scale), self._bias_above_center()
        likelihood: Any = self._slabs.superposition(states, self.weight, self.scale, *slabs, bias, validate_args=False)
        return self._slabs.statistics(likelihood, population, y, temperature, *shared)

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Maximises the expected log joint of data, indicators and slabs.

        Sums are over the data points with :math:`y_{nd}` observed. Let :math:`A_d = \sum_n \langle s s^\top \rangle`, :math:`c_d = \sum_n
        y_{nd} \langle s \rangle` and :math:`n = \sum_n \langle b \rangle`. Then :math:`W_d = A_d^{-1} c_d`, and :math:`\sigma^2` is the
        mean expected squared residual of the observed entries. Element-wise, :math:`\pi = n / N`, :math:`\mu = \sum_n \langle s \rangle /
        n` and :math:`\tau^2 = \sum_n \langle s^2 \rangle / n - \mu^2`. For a full covariance see :class:`.CorrelatedSlabs`, with an offset
        :func:`.best_dictionary_and_offset`. Elements are then scaled to their old norm, slab means made non-negative, and the
        ``statistics`` brought to the same units.
        """
        old = self.weight.double()
        weight, errors = self._best_dictionary(statistics)
        slab_mean, slab_scale = self._slabs.best(statistics, self.slab_mean, self.slab_scale)
        gain = _gauge(old, weight, slab_mean)
        self._set_dictionary(weight / gain, statistics, errors)
        self.slab_mean = (slab_mean * gain).to(self.slab_mean)
        self.slab_scale = self._slabs.rescale(slab_scale, statistics, gain).to(self.slab_scale)
        for name in ("coefficients", "trials", "cross"):
            statistics[name] = statistics[name] * gain
        statistics["pairs"] = statistics["pairs"] * gain.unsqueeze(-1) * gain


def _gauge(old: Tensor, weight: Tensor, slab_mean: Tensor, *, tolerance: float = 1e-8) -> Tensor:
    """Factors ``(H,)``, with the slab mean's sign, that keep elements' norms."""
    old_norm, norm = old.norm(dim=0), weight.norm(dim=0)
    # An element that vanishes does so itself: the scale of its slab would soon be no number.
    ratio = torch.where((old_norm > 0) & (norm > tolerance * old_norm), norm / old_norm, 1.0)
    return torch.where(slab_mean < 0, -ratio, ratio)


_ROOT_OF_TAU = math.sqrt(2 * math.pi)


class MaxSpikeSlabSparseCoding(SparseCoding):
    r"""Spike-and-slab sparse coding in which causes superpose by maximum.

    .. math:: b_h \sim \mathrm{Bernoulli}(\pi_h), \qquad z_h \sim \mathcal N(\mu_h, \tau_h^2), \qquad
        y_d \sim \mathcal N(\max(0, \max_h b_h z_h W_{dh}), \sigma^2), \qquad W > 0.

    The elements are positive, so a cause with a negative slab is present but not seen. Every cause has a closed-form posterior given the
    others. Two ways to train:

    * by EM with Gibbs sampling over selected causes, as in the literature::

        guide = GibbsGuide(model)
        svi = SVI(model, guide, ClosedForm(model), GibbsEM(GPSelect(num_selected=5)))

    * by gradients, with a truncated posterior over the indicators and slabs from a sequential proposal::

        guide = AutoTruncated(model, num_states=32, conditional=model.conditional)
        svi = SVI(model, guide, Adam({"lr": 0.01}), Truncated_ELBO(EvolutionarySearch()))

    Entries of the data that are NaN are missing. :meth:`maximize` sets slab means to one: an element is what its cause adds to the data at
    mean strength.

    Args:
        num_observed: observed dimensions ``D``.
        num_latents: number of latents ``H``.
        shared_prior: whether all latents share one :math:`\pi`.
        shared_slab: likewise :math:`\mu` and :math:`\tau`.
        dtype: type of the parameters. Default: torch's.

    Attributes:
        weight: dictionary :math:`W`, ``(D, H)``, at least ``1e-6`` of the data's root mean square.
        scale: noise standard deviation :math:`\sigma`, a scalar.
        prior: activation probability :math:`\pi`, a scalar or ``(H,)``.
        slab_mean: :math:`\mu`, a scalar or ``(H,)``.
        slab_scale: :math:`\tau`, a scalar or ``(H,)``.
        unit: product of all factors by which :meth:`maximize` has rescaled coefficients so far, a scalar or ``(H,)``.

    Reference:
        Shelton, Sheikh, Bornschein, Sterne and Lücke, "Nonlinear Spike-and-Slab Sparse Coding for Interpretable Image Encoding", PLoS ONE
        2015. The M-step follows the gradient of the expected log joint. The published one weighs
        every data point by the inverse of how often a cause wins in it.
    """

    # Who wins is decided under the parameters at the time, and for all of a batch at once.
    statistics_depend_on_parameters = True
    statistics_are_additive = False

    superposition = MaximumSuperposition
    is_positive = True
    latent_parameters = ("weight", "prior", "slab_mean", "slab_scale")

    slab_mean: Tensor
    slab_scale: Tensor
    unit: Tensor

    @names_arguments
    def __init__(
        self,
        num_observed: int,
        num_latents: int,
        *,
        shared_prior: bool = True,
        shared_slab: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_observed, num_latents, shared_prior=shared_prior, dtype=dtype)
        self.shared_slab = shared_slab
        slab = torch.ones(() if shared_slab else (num_latents,), dtype=dtype)
        self.slab_mean = PyroParam(slab, constraints.real)  # type: ignore[assignment]
        self.slab_scale = PyroParam(0.5**0.5 * slab, constraints.positive)  # type: ignore[assignment]
        self.register_buffer("unit", torch.ones_like(slab, dtype=torch.float64))

    @takes_arrays
    def forward(self, y: Tensor | None = None, batch_size: int | None = None, num_data: int | None = None) -> Tensor:
        """The model of data ``y (N, D)``; without data it generates ``num_data`` observations."""
        size = count_data(y, num_data)
        self._warn_about_data(y)
        # Outside of the plate, where parameters that were given a prior are drawn.
        prior, slab_mean, slab_scale, weight, scale = self.prior, self.slab_mean, self.slab_scale, self.weight, self.scale
        with pyro.plate("data", size, subsample_size=batch_size) as index:
            states = pyro.sample("s", activation(prior, self.num_latents))
            slabs = pyro.sample("z", dist.Normal(slab_mean, slab_scale).expand([self.num_latents]).to_event(1))
            return pyro.sample("y", type(self).superposition(states * slabs, weight, scale), obs=selected_rows(y, index))

    @pyro_method
    @takes_arrays
    def conditional(
        self, states: dict[str, Tensor], y: Tensor, batch_size: int | None = None, num_data: int | None = None
    ) -> dict[str, Tensor]:
        """Proposes slabs ``z`` given the indicators, each exact given the others."""
        parameters = self.weight, self.scale, self.slab_mean, self.slab_scale
        return {"z": pyro.sample("z", MaximumSlabs(states["s"], *parameters, pyro.subsample(y, event_dim=1)))}

    def _start(self, y: Tensor, generator: torch.Generator | None) -> None:
        super()._start(y, generator)
        self.slab_mean = torch.ones_like(self.slab_mean)
        self.slab_scale = torch.full_like(self.slab_scale, 0.5**0.5)

    # --- the E-step: what a GibbsGuide asks for ---

    @torch.no_grad()
    @takes_arrays
    def gibbs(
        self,
        y: Tensor,
        selected: Tensor,
        coefficients: Tensor,
        *,
        burn_in: int,
        sweeps: int,
        temperature: float = 1.0,
        rows: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        r"""Draws coefficients :math:`s = b \odot z` of the selected latents, see :meth:`.MaximumSuperposition.draw_coefficients`.

        Args:
            y: data ``(n, D)``.
            selected: selected latents ``(n, K)``. All others are off.
            coefficients: where the chains start, ``(n, H)``.
            burn_in: sweeps before the first one kept.
            sweeps: sweeps kept.
            temperature: factor on the variance of the noise.
            rows: positions ``(n,)`` of the data points among all data, by which random numbers are keyed. Default: ``0 .. n - 1``.
            generator: source of randomness.

        Returns:
            Draws ``(n, sweeps, K)``, zero where a latent is off, and the probabilities ``(n, K)`` that the latents are on.
        """
        self._warn_about_data(y)
        slabs = {"prior": self.prior, "slab_mean": self.slab_mean, "slab_scale": self.slab_scale}
        budget: dict[str, Any] = {"burn_in": burn_in, "sweeps": sweeps, "temperature": temperature, "rows": rows, "generator": generator}
        return self.likelihood().draw_coefficients(check_data(y, self.num_observed), selected, coefficients, **slabs, **budget)

    @torch.no_grad()
    @takes_arrays
    def singletons(self, y: Tensor) -> Tensor:
        r"""Exact log joints of states with at most one active latent.

        Args:
            y: data ``(n, D)``.

        Returns:
            ``(n, 1 + H)`` in float64.
        """
        value = check_data(y, self.num_observed).double().unsqueeze(1)
        nothing = torch.zeros_like(value).nan_to_num(0.0)
        zero = MaximumSuperposition(nothing[..., :1], nothing.new_zeros(self.num_observed, 1), self.scale.double()).log_prob(value)
        slabs = (parameter.expand(self.num_latents) for parameter in (self.slab_mean, self.slab_scale))
        single = PiecewiseGaussian.from_maximum(value, nothing, self.weight.mT, self.scale, *slabs).log_normalizer
        prior = self.prior.double().expand(self.num_latents)
        return torch.cat([zero, single + prior.logit()], 1) + torch.log1p(-prior).sum()

    @torch.no_grad()
    def site_values(self, coefficients: Tensor) -> dict[str, Tensor]:
        """Values of the sites ``s`` and ``z`` for coefficients ``(*batch, H)``."""
        slabs = self.slab_mean + self.slab_scale * torch.randn(coefficients.shape, dtype=self.weight.dtype, device=coefficients.device)
        is_on = coefficients != 0
        return {"s": is_on.to(self.weight), "z": torch.where(is_on, coefficients.to(self.weight), slabs)}

    @torch.no_grad()
    @takes_arrays
    def expected_log_joint(self, draws: GibbsDraws, y: Tensor) -> Tensor:
        r"""The mean log joint of data, indicators and active slabs, summed.

        Indicators have the probabilities that the latents are on, not how often they were drawn.
        """
        rows = _select_rows(check_data(y, self.num_observed), draws)
        errors = self.likelihood().draw_statistics(draws.selected, draws.coefficients, rows)["errors"].sum()
        moments = draw_moments(draws, self.num_latents)
        parameters = self.scale, self.prior, self.slab_mean, self.slab_scale
        scale, prior, mean, deviation = (parameter.double() for parameter in parameters)
        observed = (~rows.isnan()).double().sum()
        likelihood = -observed * (scale * _ROOT_OF_TAU).log() - 0.5 * errors / scale.square()
        spread = moments["coefficient_squares"] - 2 * mean * moments["coefficients"] + mean.square() * moments["active"]
        slabs = (-moments["active"] * (deviation * _ROOT_OF_TAU).log() - 0.5 * spread / deviation.square()).sum()
        indicators = (moments["states"] * prior.logit()).sum() + len(rows) * torch.log1p(-prior).expand(self.num_latents).sum()
        return likelihood + slabs + indicators

    # --- the M-step ---

    @torch.no_grad()
    @takes_arrays
    def sufficient_statistics(
        self, draws: GibbsDraws, y: Tensor, batch_size: int | None = None, num_data: int | None = None
    ) -> dict[str, Tensor]:
        r"""Returns sums over data of means over draws, in float64.

        :meth:`maximize` needs them.

        The step of the dictionary is chosen here, where the data are at hand to compare it with shorter ones.

        Args:
            draws: draws of the coefficients; their ``indices`` select the data points among ``y``.
            y: all data, ``(N, D)``.
            batch_size: as in :meth:`forward`. Not used.
            num_data: as in :meth:`forward`. Not used.

        Returns:
            ``num_data``; ``states``, the sum of the activation probabilities, ``(H,)``. Then
            ``active``, ``coefficients`` and ``coefficient_squares``, the sums of :math:`\langle b
            \rangle`, :math:`\langle s \rangle` and :math:`\langle s^2 \rangle`, ``(H,)``. Those of
            :meth:`.MaximumSuperposition.draw_statistics`, with ``claims`` in the place of ``won``:
            the wins times the entry of the dictionary that these data ask for. The ``errors`` of
            that dictionary. All can be added and scaled.
        """
        rows = _select_rows(check_data(y, self.num_observed), draws)
        likelihood, scale = self.likelihood(), self.scale

        def expected_errors(weight: Tensor, dimensions: Tensor | slice) -> Tensor:
            other = MaximumSuperposition(likelihood.states, weight, scale, validate_args=False)
            return other.draw_statistics(draws.selected, draws.coefficients, rows[:, dimensions])["errors"]

        statistics = likelihood.draw_statistics(draws.selected, draws.coefficients, rows)
        return {**best_claims(self.weight.double(), statistics, expected_errors, shard_sum(y)), **draw_moments(draws, self.num_latents)}

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Raises the expected log joint of data, indicators and slabs.

        With averages :math:`\langle\cdot\rangle` over draws and :math:`A_{dh} = 1` where latent ``h`` attains the maximum in dimension
        ``d``: :math:`W_{dh} = \sum_n y_{nd} \langle A_{dh} s_h \rangle / \sum_n \langle A_{dh} s_h^2 \rangle`, or on the way there (see
        :meth:`sufficient_statistics`). :math:`\sigma^2` is the mean expected squared residual of the observed entries. :math:`\pi = \frac1N
        \sum_n \langle b \rangle`; :math:`\mu = \sum_n \langle s \rangle / n` and :math:`\tau^2 = \sum_n \langle s^2 \rangle / n - \mu^2`
        with :math:`n = \sum_n \langle b \rangle`, over the latents that share them. Positive slab means are then scaled to one, and the
        ``statistics`` to the same units.
        """
        sums = [statistics[name] for name in ("active", "coefficients", "coefficient_squares")]
        count, first, second = (value.sum() for value in sums) if self.shared_slab else sums
        slab_mean, slab_scale = best_slabs(count, first, second, self.slab_mean, self.slab_scale)
        gain = torch.where((count > MIN_COUNT) & (slab_mean > 0), slab_mean.reciprocal(), 1.0)
        self._set_dictionary(dictionary_from_claims(self.weight.double(), statistics, gain), statistics, statistics["errors"])
        self.slab_mean = (slab_mean * gain).to(self.slab_mean)
        self.slab_scale = (slab_scale * gain).to(self.slab_scale)
        self.unit = self.unit * gain
        for name, factor in (("coefficients", gain), ("coefficient_squares", gain**2), ("wins", gain**2), ("claims", gain)):
            statistics[name] = statistics[name] * factor

    @torch.no_grad()
    @takes_arrays
    def reconstruct(self, population: GibbsDraws | Population, y: Tensor | None = None) -> Tensor:
        r"""Posterior mean :math:`\langle \max(0, \max_h s_h W_h) \rangle` of the noise-free data, ``(n, D)`` as the draws.

        Args:
            population: draws of the coefficients, ``GibbsGuide.draws()``. The mean is over them.
            y: all data, ``(N, D)``, whose type the result has; given the draws they play no other role.

        Raises:
            TypeError: for a population of indicators: the mean over their slabs has no formula.
        """
        if not isinstance(population, GibbsDraws):
            kind = type(population).__name__
            raise TypeError(f"{type(self).__name__} reconstructs from draws of its slabs, GibbsGuide(model).draws(); got {kind}")
        mean = torch.zeros(len(population.selected), self.num_observed, dtype=torch.float64, device=population.selected.device)
        for coefficients in population.spread(self.num_latents).unbind(1):
            mean += self.likelihood(coefficients, self.weight.double()).mean
        mean = mean / population.coefficients.shape[1]
        return mean.to(self.weight) if y is None else cast_like(mean, _select_rows(check_data(y, self.num_observed), population))


def _select_rows(y: Tensor, draws: GibbsDraws) -> Tensor:
    if draws.indices is None and len(y) != len(draws.selected):
        raise ValueError(f"y must have a row for each of the draws' {len(draws.selected)} data points; got {len(y)} rows")
    return y if draws.indices is None else y[draws.indices.to(y.device)]
