"""Maximal causes analysis: the strongest cause determines every observed dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated import Population
from pyro_truncated.distributions import MaximumSuperposition
from pyro_truncated.extend import names_arguments, shard_sum
from pyro_truncated.models.dictionary import best_claims, claimed_dictionary
from pyro_truncated.models.superposed_causes import SparseCoding


class MaximalCauses(SparseCoding):
    r"""Maximal causes: :math:`s_h \sim \mathrm{Bernoulli}(\pi_h)`, :math:`y_d \sim \mathcal N(\max_h s_h W_{dh}, \sigma^2)`, :math:`W > 0`.

    Entries of the data that are NaN are missing. The M-step of the dictionary averages the data that each cause wins. As the winners depend
    on the dictionary, the step is halved in dimensions where the expected log joint would fall. So with the full batch the free energy
    never decreases.

    Example:
        >>> y = linear_bars(50, 3, mean_active=2.0).data.clamp(min=0)
        >>> model = MaximalCauses(9, 6).initialize(y)
        >>> svi = SVI(model, AutoTruncated(model, num_states=32), ClosedForm(model), Truncated_ELBO())
        >>> losses = [svi.step(y) for _ in range(3)]

    Args:
        num_observed: observed dimensions ``D``.
        num_latents: number of latents ``H``.
        shared_prior: whether all latents share one :math:`\pi`.
        dtype: type of the parameters. Default: torch's.

    Attributes:
        weight: dictionary :math:`W`, ``(D, H)``, at least ``1e-6`` of the data's root mean square.
        scale: noise standard deviation :math:`\sigma`, a scalar.
        prior: activation probability :math:`\pi`, a scalar or ``(H,)``.

    Reference:
        Lücke and Sahani, "Maximal Causes for Non-linear Component Extraction", JMLR 2008.
    """

    # Who wins is decided under the parameters at the time.
    statistics_depend_on_parameters = True
    # The step is chosen where the data are at hand, for all of a batch at once.
    statistics_are_additive = False
    statistics_span_processes = True

    superposition = MaximumSuperposition
    is_positive = True

    @names_arguments
    def __init__(self, num_observed: int, num_latents: int, *, shared_prior: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__(num_observed, num_latents, shared_prior=shared_prior, dtype=dtype)

    def _statistics(self, population: Population, y: Tensor, temperature: float) -> dict[str, Tensor]:
        r"""Those of :meth:`.MaximumSuperposition.statistics`, with ``claims`` in the place of ``won``.

        They are the wins times the entry of the dictionary that these data ask for; the step there is chosen here, where the data are at
        hand. Also ``errors``, the expected squared residuals under that dictionary, ``(D,)``.
        """
        likelihood, scale = self.likelihood(), self.scale
        statistics = likelihood.statistics(population, y, temperature)
        statistics["errors"] = likelihood.square_error(statistics)
        rows, weights = population.select_rows(y), population.weights(temperature)

        def expected_errors(weight: Tensor, dimensions: Tensor | slice) -> Tensor:
            """Expected squared residuals under other entries of the dictionary."""
            other = MaximumSuperposition(likelihood.states, weight, scale, validate_args=False)
            wins = other.wins(population.words, weights, rows[:, dimensions])
            return other.square_error({**wins, "squares": statistics["squares"][dimensions]})

        claims: dict[str, Tensor] = best_claims(self.weight.double(), statistics, expected_errors, shard_sum(y))
        return claims

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Raises the expected log joint.

        :math:`W_{dh}` is the mean of the data that latent ``h`` wins in dimension ``d``, or on the way there (see
        :meth:`sufficient_statistics`). The noise :math:`\sigma^2` is the mean expected squared residual of the observed entries. The prior
        is :math:`\pi = \frac1N \sum_n \langle s \rangle`, averaged over the latents if shared.
        """
        self._set_dictionary(claimed_dictionary(self.weight.double(), statistics), statistics, statistics["errors"])
