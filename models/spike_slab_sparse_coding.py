"""Spike-and-slab sparse coding: causes are off or normally distributed."""

from __future__ import annotations

from typing import Any, Self

import pyro
import torch
from pyro.nn import PyroParam, pyro_method
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import Population
from pyro_truncated.distributions import LinearSuperposition
from pyro_truncated.extend import global_positions, names_arguments, selected_rows, shard_sum, takes_arrays
from pyro_truncated.models.data_model import activation, count_data
from pyro_truncated.models.dictionary import LinearDictionary
from pyro_truncated.models.slab_priors import BY_NAME, INDEPENDENT, CorrelatedSlabs, IndependentSlabs, Likelihood
from pyro_truncated.models.superposed_causes import SparseCoding


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
        superposition: type[Likelihood] = self._slabs.superposition
        return superposition

    @property
    def statistics_are_additive(self) -> bool:
        """Whether a batch may be taken in parts.

        A step of the covariance is chosen where the data are at hand, for all of a batch at once.
        """
        return self.covariance == "diag"

    def _likelihood_parameters(self) -> tuple[Tensor | None, ...]:
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
        """Returns a copy with the latents of an index ``(H',)``.

        See :meth:`SparseCoding.with_latents`.
        """
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
        statistics: dict[str, Tensor] = self._slabs.statistics(likelihood, population, y, temperature, *shared)
        return statistics

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
        self.slab_scale = self._slabs.in_units(slab_scale, gain).to(self.slab_scale)
        for name in ("coefficients", "trials", "cross"):
            statistics[name] = statistics[name] * gain
        statistics["pairs"] = statistics["pairs"] * gain.unsqueeze(-1) * gain
        self._slabs.bring_into_units(statistics, gain)


def _gauge(old: Tensor, weight: Tensor, slab_mean: Tensor, *, tolerance: float = 1e-8) -> Tensor:
    """Factors ``(H,)``, with the slab mean's sign, that keep elements' norms."""
    old_norm, norm = old.norm(dim=0), weight.norm(dim=0)
    # An element that vanishes does so itself: the scale of its slab would soon be no number.
    ratio = torch.where((old_norm > 0) & (norm > tolerance * old_norm), norm / old_norm, 1.0)
    return torch.where(slab_mean < 0, -ratio, ratio)
