"""Nonlinear spike-and-slab sparse coding with superposition by maximum."""

from __future__ import annotations

import math
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroParam, pyro_method
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import GibbsDraws, Population
from pyro_truncated.distributions import MaximumSlabs, MaximumSuperposition, PiecewiseGaussian
from pyro_truncated.extend import names_arguments, selected_rows, shard_sum, takes_arrays
from pyro_truncated.models.data_model import MIN_COUNT, activation, cast_like, check_data, count_data
from pyro_truncated.models.dictionary import best_claims, best_slabs, dictionary_from_claims
from pyro_truncated.models.slab_priors import draw_moments
from pyro_truncated.models.superposed_causes import SparseCoding

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
        draws: tuple[Tensor, Tensor] = self.likelihood().draw_coefficients(
            check_data(y, self.num_observed), selected, coefficients, **slabs, **budget
        )
        return draws

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
        return likelihood + slabs + indicators  # type: ignore[no-any-return]

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
            """Expected squared residuals under other entries of the dictionary."""
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
        return mean.to(self.weight) if y is None else cast_like(mean, check_data(y, self.num_observed))


def _select_rows(y: Tensor, draws: GibbsDraws) -> Tensor:
    return y if draws.indices is None else y[draws.indices.to(y.device)]
