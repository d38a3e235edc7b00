"""Maximal causes analysis: binary causes of which the strongest determines every observed dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.distributions import MaximumSuperposition
from pyro_truncated.models.binary_causes import check_data, rows_of, scored
from pyro_truncated.models.dictionary import NEVER_SEEN, WEIGHT_FLOOR, better_maximum_dictionary, data_scale
from pyro_truncated.models.sparse_coding import SparseCoding
from pyro_truncated.states import Population
from pyro_truncated.utils.arrays import takes_arrays


class MaximalCauses(SparseCoding):
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
        weight: dictionary :math:`W`, ``(D, H)``, at least ``1e-6`` of the data's root mean square.
        scale: noise standard deviation :math:`\sigma`, a scalar.
        prior: probability :math:`\pi` that a latent is active, a scalar or ``(H,)``.

    Reference:
        Lücke and Sahani, "Maximal Causes for Non-linear Component Extraction", JMLR 2008.
    """

    # Who wins is decided under the parameters at the time.
    statistics_depend_on_parameters = True
    # The step is chosen where the data are at hand, for all of a batch at once.
    statistics_are_additive = False

    superposition = MaximumSuperposition
    is_positive = True

    def __init__(self, num_observed: int, num_latents: int, *, shared_prior: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__(num_observed, num_latents, shared_prior=shared_prior, dtype=dtype)

    @torch.no_grad()
    @takes_arrays
    def sufficient_statistics(
        self, population: Population, y: Tensor, batch_size: int | None = None, num_data: int | None = None, *, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        r"""Sums over the population's data points that :meth:`maximize` needs, see :class:`~pyro_truncated.em.closed_form.ClosedFormModel`.

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
        active, _, wins, sums = ops.maximum_statistics(population.words, weights, rows, weight)

        def errors_of(weight: Tensor) -> Tensor:
            """Expected squared residuals under a dictionary, with the winners that it has."""
            return _errors(weight, *ops.maximum_statistics(population.words, weights, rows, weight)[2:], squares)

        before = _errors(weight, wins, sums, squares)
        observed = (~rows.isnan()).double().sum()
        floor = WEIGHT_FLOOR * data_scale(squares.sum(), observed)
        chosen, errors = better_maximum_dictionary(weight, sums, wins, before, squares, errors_of, floor)
        return {
            "num_data": active.new_tensor(len(rows)),
            "states": active.sum(0),
            "wins": wins,
            "claims": wins * chosen,
            "errors": errors.sum(),
            "squares": squares.sum(),
            "observed": observed,
        }

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Raises the expected log joint.

        :math:`W_{dh}` is the mean of the data that latent ``h`` wins in dimension ``d``, or on the way there (see
        :meth:`sufficient_statistics`); :math:`\sigma^2` is the mean expected squared residual of the observed entries, and
        :math:`\pi = \frac1N \sum_n \langle s \rangle`, averaged over the latents if shared. Entries that never win stay as they are.
        """
        wins = statistics["wins"]
        floor = WEIGHT_FLOOR * data_scale(statistics["squares"], statistics["observed"])
        weight = torch.where(wins > NEVER_SEEN, statistics["claims"] / wins, self.weight.double()).maximum(floor)
        self._set_dictionary(weight, statistics["errors"], statistics)

    @torch.no_grad()
    @takes_arrays
    def reconstruct(self, population: Population, y: Tensor) -> Tensor:
        """Posterior mean of the noise-free data, for denoising and in-painting.

        Args:
            population: truncated posteriors; its ``indices`` select the data points among ``y``. Those that have never been scored are
                scored first.
            y: all data, ``(N, D)``; missing entries (NaN) are filled in.

        Returns:
            ``(N, D)`` for the population's data points, in the type of the data.
        """
        rows = rows_of(check_data(y, self.num_observed), population)
        population = scored(self, population, y)
        return ops.maximum_statistics(population.words, population.weights(), rows, self.weight)[1].to(y.dtype)


def _errors(weight: Tensor, wins: Tensor, sums: Tensor, squares: Tensor) -> Tensor:
    """Expected squared residuals of every dimension, ``(D,)``: the square of a maximum is that of its winner's entry."""
    return squares + (weight * (weight * wins - 2 * sums)).sum(1)
