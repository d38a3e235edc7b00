"""Maximal causes analysis: binary causes of which the strongest determines every observed dimension."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import packed
from pyro_truncated.distributions import MaximumSuperposition
from pyro_truncated.models.binary_causes import best_prior, check_data, check_sizes, first_prior, rows_of
from pyro_truncated.models.dictionary import best_scale, first_dictionary
from pyro_truncated.population import Population

_WEIGHT_FLOOR = 1e-6
_NEVER_WINS = 1e-10
_MAX_HALVINGS = 10
_ROUNDING = 1e-12


class MaximalCauses(PyroModule):
    r"""Maximal causes: :math:`s_h \sim \mathrm{Bernoulli}(\pi_h)`, :math:`y_d \sim \mathcal N(\max_h s_h W_{dh}, \sigma^2)`, :math:`W > 0`.

    Entries of the data that are NaN are missing: likelihood and M-step are those of the observed entries.

    The M-step of the dictionary averages the data that each cause wins. As the winners depend on the dictionary, that may lower the
    expected log joint; the step is then halved, in the dimensions concerned, until it does not. So with the full batch the free energy
    never decreases.

    Args:
        num_observed: number of observed dimensions ``D``.
        num_latents: number of latents ``H``.
        shared_prior: whether all latents share one :math:`\pi`.
        dtype: floating point type of the parameters; default: torch's.

    Attributes:
        weight: dictionary :math:`W`, ``(D, H)``, at least ``1e-6``.
        scale: noise standard deviation :math:`\sigma`, a scalar.
        prior: probability :math:`\pi` that a latent is active, a scalar or ``(H,)``.

    Reference:
        Lücke and Sahani, "Maximal Causes for Non-linear Component Extraction", JMLR 2008.
    """

    # Who wins is decided under the parameters at the time.
    statistics_depend_on_parameters = True
    # The step is chosen where the data are at hand, for all of a batch at once.
    statistics_are_additive = False

    weight: Tensor
    scale: Tensor
    prior: Tensor

    def __init__(self, num_observed: int, num_latents: int, *, shared_prior: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_sizes(num_observed=num_observed, num_latents=num_latents)
        self.num_observed, self.num_latents, self.shared_prior = num_observed, num_latents, shared_prior
        prior = first_prior(num_latents, shared_prior, dtype)
        weight = 0.5 + torch.rand(num_observed, num_latents, dtype=dtype)
        self.weight = PyroParam(weight, constraints.positive)  # type: ignore[assignment]
        self.scale = PyroParam(torch.ones((), dtype=dtype), constraints.positive)  # type: ignore[assignment]
        self.prior = PyroParam(prior, constraints.unit_interval)  # type: ignore[assignment]

    def forward(self, y: Tensor | None = None, batch_size: int | None = None, num_data: int | None = None) -> Tensor:
        """The model of data ``y (N, D)``; without data it generates ``num_data`` observations."""
        weight, scale, prior = self.weight, self.scale, self.prior
        size = len(y) if y is not None else num_data or 1
        with pyro.plate("data", size, subsample_size=batch_size) as index:
            states = pyro.sample("s", dist.Bernoulli(prior).expand([self.num_latents]).to_event(1))
            return pyro.sample("y", MaximumSuperposition(states, weight, scale), obs=None if y is None else y[index])

    @torch.no_grad()
    def initialize(self, y: Tensor, generator: torch.Generator | None = None) -> MaximalCauses:
        r"""Starts from the data: elements are magnitudes of random data points.

        The rest is :math:`\pi = 2 / H`, and the data's variance for :math:`\sigma^2`.

        Args:
            y: data ``(N, D)``.
            generator: source of randomness.

        Returns:
            The model itself.
        """
        weight, deviation = first_dictionary(check_data(y, self.num_observed), self.num_latents, generator)
        self.weight = weight.abs().clamp(min=_WEIGHT_FLOOR).to(self.weight).contiguous()
        self.scale = deviation.to(self.scale)
        self.prior = first_prior(self.num_latents, self.shared_prior, self.prior.dtype).to(self.prior)
        return self

    @torch.no_grad()
    def sufficient_statistics(
        self, population: Population, y: Tensor, batch_size: int | None = None, num_data: int | None = None, *, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        r"""Sums over the population's data points that :meth:`maximize` needs, see :class:`~pyro_truncated.em.ClosedFormModel`.

        The step of the dictionary is chosen here, where the data are at hand to compare it with shorter ones.

        Returns:
            ``num_data``; ``states``, the sum of :math:`\langle s \rangle`, ``(H,)``; ``wins``, how often each latent attains the maximum in
            each observed dimension, ``(D, H)``; ``claims``, the same times the entry of the dictionary that these data ask for; ``errors``,
            the expected squared residuals under that dictionary; ``squares``, the sum of the squared entries; ``observed``, the number of
            entries. All can be added and scaled.
        """
        rows = rows_of(check_data(y, self.num_observed), population)
        weights, weight = population.weights(temperature), self.weight.double()
        squares = rows.double().nan_to_num(0.0).square().sum(0)
        active, _, wins, sums = packed.maximum_statistics(population.words, weights, rows, weight)
        step = torch.where(wins > _NEVER_WINS, sums / wins, weight).clamp(min=_WEIGHT_FLOOR) - weight
        before = _errors(weight, wins, sums, squares)
        for _ in range(_MAX_HALVINGS):
            chosen = weight + step
            errors = _errors(chosen, *packed.maximum_statistics(population.words, weights, rows, chosen)[2:], squares)
            is_worse = errors > before + _ROUNDING * squares
            if not bool(is_worse.any()):
                break
            step = torch.where(is_worse.unsqueeze(-1), 0.5 * step, step)
        else:
            chosen, errors = torch.where(is_worse.unsqueeze(-1), weight, chosen), torch.where(is_worse, before, errors)
        return {
            "num_data": active.new_tensor(len(rows)),
            "states": active.sum(0),
            "wins": wins,
            "claims": wins * chosen,
            "errors": errors.sum(),
            "squares": squares.sum(),
            "observed": (~rows.isnan()).double().sum(),
        }

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Raises the expected log joint.

        :math:`W_{dh}` is the mean of the data that latent ``h`` wins in dimension ``d``, or on the way there (see
        :meth:`sufficient_statistics`); :math:`\sigma^2` is the mean expected squared residual of the observed entries, and
        :math:`\pi = \frac1N \sum_n \langle s \rangle`, averaged over the latents if shared. Entries that never win stay as they are.
        """
        wins = statistics["wins"]
        weight = torch.where(wins > _NEVER_WINS, statistics["claims"] / wins, self.weight.double())
        self.weight = weight.clamp(min=_WEIGHT_FLOOR).to(self.weight)
        self.scale = best_scale(statistics["errors"], statistics["squares"], statistics["observed"]).to(self.scale)
        self.prior = best_prior(statistics["states"], statistics["num_data"], self.shared_prior).to(self.prior)

    @torch.no_grad()
    def reconstruct(self, population: Population, y: Tensor) -> Tensor:
        """Posterior mean of the noise-free data, for denoising and in-painting.

        Args:
            population: truncated posteriors; its ``indices`` select the data points among ``y``.
            y: all data, ``(N, D)``; missing entries (NaN) are filled in.

        Returns:
            ``(N, D)`` for the population's data points, in the type of the data.
        """
        rows = rows_of(check_data(y, self.num_observed), population)
        return packed.maximum_statistics(population.words, population.weights(), rows, self.weight)[1].to(y.dtype)


def _errors(weight: Tensor, wins: Tensor, sums: Tensor, squares: Tensor) -> Tensor:
    """Expected squared residuals of every dimension, ``(D,)``: the square of a maximum is that of its winner's entry."""
    return squares + (weight * (weight * wins - 2 * sums)).sum(1)
