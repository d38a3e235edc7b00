"""Noisy-OR: active binary causes switch binary observations on."""

from __future__ import annotations

import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import Population
from pyro_truncated.distributions import NoisyOrSuperposition, or_missing
from pyro_truncated.extend import generator_device, names_arguments
from pyro_truncated.models.data_model import FLOOR, MIN_COUNT, random_rows
from pyro_truncated.models.superposed_causes import SuperposedCauses


class NoisyOr(SuperposedCauses):
    r"""Noisy-OR, :math:`s_h \sim \mathrm{Bernoulli}(\pi_h)`, :math:`p(y_d = 1 \mid s) = 1 - (1 - w_{0d}) \prod_h (1 - W_{dh} s_h)`.

    Entries of the data that are NaN are missing. The M-step adds hidden causes :math:`t_{dh} \sim \mathrm{Bernoulli}(W_{dh} s_h)`,
    :math:`y_d = \mathrm{OR}_h\, t_{dh}`. Their posterior is :math:`p(t_{dh} = 1 \mid y, s) = y_d s_h W_{dh} / p(y_d = 1 \mid s)`. This is
    exact EM, with minibatches an online EM.

    Example:
        >>> y = noisy_or_bars(100, 3).data
        >>> model = NoisyOr(9, 6).initialize(y)
        >>> svi = SVI(model, AutoTruncated(model, num_states=32), ClosedForm(model), Truncated_ELBO(EvolutionarySearch(4, 3)))
        >>> losses = [svi.step(y) for _ in range(5)]
        >>> losses[-1] < losses[0]
        True

    Args:
        num_observed: observed dimensions ``D``.
        num_latents: number of latents ``H``.
        leak: probability :math:`w_0` that a dimension is on without a cause.
        learn_leak: whether the M-step also updates the leak, then one per dimension.
        shared_prior: whether all latents share one :math:`\pi`.
        update: ``"exact"``, or ``"fixed_point"`` for the fixed-point equation of the weights
            (Guiraud, Drefs and Lücke 2018, Eqs. 12 and 13). The latter may lower the free energy,
            and its results are clipped to the unit interval.
        dtype: type of the parameters. Default: torch's.

    Attributes:
        weight: probabilities :math:`W`, ``(D, H)``, kept away from 0 and 1 by ``1e-6``.
        leak: leak :math:`w_0`, a scalar, or ``(D,)`` if learnt.
        prior: activation probability :math:`\pi`, ``(H,)`` or a scalar.

    Raises:
        ValueError: for an unknown update, or a leak that is not a probability below one.

    Reference:
        Guiraud, Drefs and Lücke, "Evolutionary Expectation Maximization", GECCO 2018.
    """

    statistics_depend_on_parameters = True

    superposition = NoisyOrSuperposition
    data_support = or_missing(constraints.boolean)

    weight: Tensor
    prior: Tensor
    leak: Tensor

    @names_arguments
    def __init__(
        self,
        num_observed: int,
        num_latents: int,
        *,
        leak: float = 1e-3,
        learn_leak: bool = False,
        shared_prior: bool = False,
        update: str = "exact",
        dtype: torch.dtype | None = None,
    ) -> None:
        if update not in ("exact", "fixed_point"):
            raise ValueError(f"update must be 'exact' or 'fixed_point'; got {update!r}")
        if not (0 < leak < 1 if learn_leak else 0 <= leak < 1):
            raise ValueError(f"leak must be a probability below one, and positive if it is learnt; got {leak}")
        support = constraints.unit_interval
        super().__init__(num_observed, num_latents, shared_prior=shared_prior, weight=support, dtype=dtype)
        self.learn_leak, self.update = learn_leak, update
        if learn_leak:
            self.leak = PyroParam(torch.full((num_observed,), leak, dtype=dtype), support)  # type: ignore[assignment]
        else:
            self.register_buffer("leak", torch.tensor(leak, dtype=dtype))

    def _likelihood_parameters(self) -> tuple[Tensor | None, ...]:
        return (self.leak,)

    def _start(self, y: Tensor, generator: torch.Generator | None) -> None:
        rows = random_rows(y, self.num_latents, generator)
        noise = torch.rand(rows.shape, generator=generator, device=generator_device(generator)).to(y.device)
        # Probabilities from 0.2 to 0.6, and a tenth more where a random row is one.
        self.weight = (0.2 + 0.4 * noise + 0.1 * rows).mT.to(self.weight).contiguous()
        self._start_prior()

    def _statistics(self, population: Population, y: Tensor, temperature: float) -> dict[str, Tensor]:
        r"""Those of :meth:`.NoisyOrSuperposition.statistics`.

        With ``update="fixed_point"`` also ``claims``, the sum of :math:`\langle s_h / p(y_d = 1 \mid s) \rangle` over the data points that
        have dimension ``d``.
        """
        likelihood = self.likelihood()
        statistics: dict[str, Tensor] = likelihood.statistics(population, y, temperature)
        if self.update == "fixed_point":
            everything_on = torch.where(y.isnan(), y, 1.0)
            statistics["claims"] = likelihood.statistics(population, everything_on, temperature)["causes"] / self.weight.double()
        return statistics

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Maximises the expected log joint of states and hidden causes.

        :math:`W_{dh}` is the expected number of causes :math:`t_{dh}` that are on, divided by the expected number of data points with
        latent ``h`` active and dimension ``d`` observed. The leak is the same for a latent that is always active. :math:`\pi = \frac1N
        \sum_n \langle s \rangle`, averaged over the latents if shared.
        """
        old, trials = self.weight.double(), statistics["trials"]
        weight = self._fixed_point(statistics) if self.update == "fixed_point" else statistics["causes"] / trials
        weight = torch.where(trials > MIN_COUNT, weight, old).clamp(FLOOR, 1 - FLOOR)
        self.weight = weight.to(self.weight)
        if self.learn_leak:
            observed = statistics["observed"]
            leak = torch.where(observed > 0, statistics["leak_causes"] / observed, self.leak.double())
            self.leak = leak.clamp(FLOOR, 1 - FLOOR).to(self.leak)
        self._maximize_prior(statistics)

    def _fixed_point(self, statistics: dict[str, Tensor]) -> Tensor:
        """The right-hand side of the fixed-point equation."""
        old = self.weight.double()
        blamed = statistics["claims"] - statistics["causes"] / old
        weight = 1 - (1 - old) * blamed / (statistics["claims"] - statistics["trials"])
        return torch.where(weight.isfinite(), weight, old)
