"""Nonlinear superpositions: maximal causes analysis and noisy-OR."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import Population
from pyro_truncated.distributions import (
    BernoulliMaximum,
    ExponentialMaximum,
    FamilyMaximum,
    GammaMaximum,
    MaximumSuperposition,
    NoisyOrSuperposition,
    PoissonMaximum,
)
from pyro_truncated.extend import generator_device, names_arguments, shard_sum
from pyro_truncated.models.data_model import FLOOR, MIN_COUNT, random_rows
from pyro_truncated.models.dictionary import best_claims, dictionary_from_claims, weight_floor
from pyro_truncated.models.superposed_causes import SparseCoding, SuperposedCauses


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
            other = MaximumSuperposition(likelihood.states, weight, scale, validate_args=False)
            wins = other.wins(population.words, weights, rows[:, dimensions])
            return other.square_error({**wins, "squares": statistics["squares"][dimensions]})

        return best_claims(self.weight.double(), statistics, expected_errors, shard_sum(y))

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Raises the expected log joint.

        :math:`W_{dh}` is the mean of the data that latent ``h`` wins in dimension ``d``, or on the way there (see
        :meth:`sufficient_statistics`). The noise :math:`\sigma^2` is the mean expected squared residual of the observed entries. The prior
        is :math:`\pi = \frac1N \sum_n \langle s \rangle`, averaged over the latents if shared.
        """
        self._set_dictionary(dictionary_from_claims(self.weight.double(), statistics), statistics, statistics["errors"])


_Limits = Callable[[Tensor, Tensor | slice], Tensor]
_Losses = Callable[[Tensor, dict[str, Tensor]], Tensor]
_Errors = Callable[[Tensor, Tensor], Tensor]
_Total = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def means_above_background(means: Tensor) -> Tensor:
    """Means ``(D, H + 1)`` with hidden ones slightly above the background."""
    background = means[:, -1:]
    # Above what means are rounded to before they are compared, and far below what a free energy shows.
    return torch.cat([means[:, :-1].maximum(background * (1 + 1e-9)), background], -1)


def assign_to_background(sums: Tensor, is_left: Tensor) -> Tensor:
    """Sums ``(D, H + 1)`` with some causes' given to the background, the last."""
    claimed = (sums * is_left).sum(-1, keepdim=True)
    return torch.cat([sums.masked_fill(is_left, 0.0)[:, :-1], sums[:, -1:] + claimed], -1)


def return_to_background(
    means: Tensor,
    separate: dict[str, Tensor],
    claims: dict[str, Tensor],
    expected_losses: _Losses,
    expected_errors: _Errors,
    limit: _Limits,
    total: _Total,
) -> dict[str, Tensor]:
    r"""Returns claims with hidden causes that recover where this lowers losses.

    A mean below the background wins nothing, so that an average of what it wins leaves it there for ever. Data points that have the cause
    and nothing stronger belong to the cause as well. If their mean is above that of all data that the background explains, two means
    explain them better than the common one. In each dimension the cause that gains most is tried at its mean, and the background at that of
    the rest.

    ``means (D, H + 1)`` end with the background; ``separate`` has ``wins`` and ``won`` under :func:`means_above_background`, ``claims`` are
    those of :func:`~pyro_truncated.models.dictionary.best_claims`. ``limit`` keeps means within their limits.
    """
    is_hidden, parts = means_above_background(means) > means, {"wins": separate["wins"], "won": separate["won"], "errors": claims["errors"]}
    sums = dict(zip(parts, total(list(parts.values())), strict=True))
    background = {name: assign_to_background(sums[name], is_hidden)[:, -1:] for name in ("wins", "won")}
    common = limit(_per_win(background), slice(None))
    claims_per_win = limit(_per_win(sums), slice(None)).maximum(common)
    gains = (expected_losses(common, sums) - expected_losses(claims_per_win, sums)).masked_fill(~is_hidden, 0.0)
    most, first = gains.max(-1, keepdim=True)
    may_gain = most.squeeze(-1) > 0
    # On a device all dimensions are tried: to see which of them may gain would be to wait for it.
    where = may_gain.nonzero().squeeze(-1) if means.is_cpu else torch.arange(len(means), device=means.device)
    if not len(where):
        return claims
    is_left = is_hidden.scatter(-1, first, False)[where]
    background = {name: assign_to_background(sums[name][where], is_left) for name in ("wins", "won")}
    trial = limit(torch.where(background["wins"] > MIN_COUNT, _per_win(background), means[where]), where)
    wins, errors = assign_to_background(separate["wins"][where], is_left), expected_errors(trial, where)
    is_lower = may_gain[where] & (total([errors])[0] < sums["errors"][where])
    changed = {"wins": wins, "claims": wins * trial}
    updated = {name: torch.where(is_lower.unsqueeze(-1), value, claims[name][where]) for name, value in changed.items()}
    updated["errors"] = torch.where(is_lower, errors, claims["errors"][where])
    return {**claims, **{name: claims[name].index_copy(0, where, value) for name, value in updated.items()}}


def _per_win(sums: dict[str, Tensor]) -> Tensor:
    return sums["won"] / sums["wins"].clamp(min=MIN_COUNT)


_FAMILIES: dict[str, type[FamilyMaximum]] = {
    "poisson": PoissonMaximum,
    "bernoulli": BernoulliMaximum,
    "exponential": ExponentialMaximum,
    "gamma": GammaMaximum,
}


class ExponentialFamilyMaximalCauses(SuperposedCauses):
    r"""Maximal causes of observations from an exponential family.

    .. math:: s_h \sim \mathrm{Bernoulli}(\pi_h), \qquad m_d = \max(b_d, \max_h s_h W_{dh}), \qquad y_d \sim p(y_d;\; m_d),

    where :math:`m_d` is the mean of a Poisson, Bernoulli, exponential or gamma distribution, and the background :math:`b` that of a
    dimension without a cause. Entries of the data that are NaN are missing.

    The M-step of the dictionary averages the data that each cause wins. As the winners depend on the dictionary, the step is halved in
    dimensions where the expected log joint would fall. A mean below the background recovers where data of its cause ask for more. So with
    the full batch the free energy never decreases.

    Example:
        >>> y = torch.poisson(5 * linear_bars(50, 3, mean_active=2.0).data.clamp(min=0))
        >>> model = ExponentialFamilyMaximalCauses(9, 6, family="poisson").initialize(y)
        >>> svi = SVI(model, AutoTruncated(model, num_states=32), ClosedForm(model), Truncated_ELBO())
        >>> losses = [svi.step(y) for _ in range(3)]

    Args:
        num_observed: observed dimensions ``D``.
        num_latents: number of latents ``H``.
        family: ``"poisson"`` for counts, ``"bernoulli"`` for zeros and ones, ``"exponential"`` for numbers that are not negative,
            ``"gamma"`` for positive numbers, whose concentration is learned.
        shared_prior: whether all latents share one :math:`\pi`.
        dtype: type of the parameters. Default: torch's.

    Attributes:
        weight: means :math:`W`, ``(D, H)``, at least ``1e-6`` of the data's root mean square, and probabilities below ``1 - 1e-6``.
        background: means :math:`b` without a cause, ``(D,)``, within the same limits.
        prior: activation probability :math:`\pi`, a scalar or ``(H,)``.
        concentration: shape :math:`k` of gamma distributions, whose deviation is :math:`m / \sqrt k`, a scalar; other families have none.

    Raises:
        ValueError: if a size is no positive integer, or for an unknown family.

    Reference:
        Mousavi, Drefs, Hirschberger and Lücke, "Generic Unsupervised Optimization for a Latent Variable Model with Exponential Family
        Observables", JMLR 2023. The background and the concentration of gamma distributions are learned here, and steps are shortened.
    """

    statistics_depend_on_parameters = True
    statistics_are_additive = False
    statistics_span_processes = True

    weight: Tensor
    prior: Tensor
    background: Tensor
    concentration: Tensor

    def __init__(
        self,
        num_observed: int,
        num_latents: int,
        *,
        family: str = "poisson",
        shared_prior: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        if family not in _FAMILIES:
            raise ValueError(f"family must be one of {', '.join(map(repr, _FAMILIES))}; got {family!r}")
        self_constraint = constraints.unit_interval if family == "bernoulli" else constraints.positive
        super().__init__(num_observed, num_latents, shared_prior=shared_prior, weight=self_constraint, dtype=dtype)
        self.family, self.superposition = family, _FAMILIES[family]
        self.background = PyroParam(torch.full((num_observed,), 0.2, dtype=dtype), self_constraint)  # type: ignore[assignment]
        if family == "gamma":
            self.concentration = PyroParam(torch.ones((), dtype=dtype), constraints.positive)  # type: ignore[assignment]

    def _likelihood_parameters(self) -> tuple[Tensor | None, ...]:
        return (self.background, self.concentration) if self.family == "gamma" else (self.background,)

    def _start(self, y: Tensor, generator: torch.Generator | None) -> None:
        y = y.double()
        rows = random_rows(y, self.num_latents, generator)
        noise = torch.rand(rows.shape, generator=generator, device=generator_device(generator)).to(rows)
        mean = y.nanmean(0).nan_to_num(0.0)
        least = weight_floor({"squares": y.square().nansum(0), "observed": (~y.isnan()).sum(0)}).squeeze(-1)
        # The least entries at the start, relative to the mean.
        floor = 0.05 * mean.maximum(least)
        # Half of a random row and half of the mean, changed by up to a tenth.
        self.weight = self._within(0.5 * (rows + mean) * (0.9 + 0.2 * noise), floor).mT.to(self.weight).contiguous()
        self.background = self._within(0.5 * mean, floor).to(self.background)
        self._start_prior()
        if self.family == "gamma":
            self.concentration = torch.ones_like(self.concentration)

    def _statistics(self, population: Population, y: Tensor, temperature: float) -> dict[str, Tensor]:
        r"""Those of :meth:`.FamilyMaximum.statistics`, with ``claims`` in the place of ``won``.

        They are the wins times the means ``(D, H + 1)`` of causes and background that these data ask for. The step there is chosen here,
        where the data are at hand; and means below the background recover, one of a dimension at a time. Also ``errors``, the expected
        losses under them, ``(D,)``. For gamma distributions they are those of concentration one, and ``logs`` are the sums of the
        logarithms of the data.
        """
        rows, own = population.select_rows(y), dataclasses.replace(population, indices=None)
        means, states, weights = self._means(), self.weight.new_zeros(self.num_latents), population.weights(temperature)

        def make_likelihood(means: Tensor) -> Any:
            return self.superposition(states.to(means), means[:, :-1], means[:, -1], validate_args=False)

        def expected_losses(means: Tensor, sums: dict[str, Tensor]) -> Tensor:
            won, lost = _losses(likelihood, means, sums)
            return lost - won

        def expected_errors(means: Tensor, dimensions: Tensor | slice) -> Tensor:
            return expected_losses(means, make_likelihood(means).wins(population.words, weights, rows[:, dimensions])).sum(1)

        likelihood, raised = make_likelihood(means), means_above_background(means)
        apart = make_likelihood(raised).statistics(own, rows, temperature)
        statistics = {**apart, **{name: assign_to_background(apart[name], raised > means) for name in ("wins", "won")}}
        won, lost = _losses(likelihood, means, statistics)
        statistics |= {"errors": (lost - won).sum(1), "magnitude": (lost.abs() + won.abs()).sum(1)}
        total = shard_sum(y)
        names = ("won", "wins", "squares", "observed")
        won, wins, squares, observed = total([statistics[name] for name in names])
        floor = weight_floor({"squares": squares, "observed": observed})

        def within(means: Tensor, dimensions: Tensor | slice) -> Tensor:
            return self._within(means, floor[dimensions])

        statistics["won"] = statistics["wins"] * self._within(won / wins.clamp(min=MIN_COUNT), 0.0)
        claims: dict[str, Tensor] = best_claims(means, statistics, expected_errors, total)
        claims = return_to_background(means, apart, claims, expected_losses, expected_errors, within, total)
        if self.family == "gamma":
            # With weights as rounded as those of the losses, with which they nearly cancel.
            claims["logs"] = weights.double().sum(1) @ torch.where(rows.isnan(), 1.0, rows.double()).log()
        return claims

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Raises the expected log joint.

        :math:`W_{dh}` is the mean of the data that latent ``h`` wins in dimension ``d``, and :math:`b_d` that of the data that no latent
        wins, or on the way there. :math:`\pi = \frac1N \sum_n \langle s \rangle`, averaged over the latents if shared. The concentration of
        gamma distributions solves :math:`\log k - \psi(k) = \langle \log m + y / m - \log y \rangle - 1` over the observed entries.
        """
        means = self._within(dictionary_from_claims(self._means(), statistics), 0.0)
        self.weight, self.background = means[:, :-1].to(self.weight).contiguous(), means[:, -1].to(self.background).contiguous()
        self._maximize_prior(statistics)
        if self.family == "gamma":
            excess = (statistics["errors"] - statistics["logs"]).sum() / statistics["wins"].sum() - 1
            most = 1e6
            c = excess.double().clamp(min=0.5 / most)
            k = (3 - c + ((c - 3).square() + 24 * c).sqrt()) / (12 * c)
            # Eight steps of Newton's method in 1 / k.
            for _ in range(8):
                error = k.log() - torch.digamma(k) - c
                k = 1 / (1 / k + error / (k.square() * (1 / k - torch.polygamma(1, k))))
            self.concentration = k.clamp(max=most).to(self.concentration)

    def _means(self) -> Tensor:
        return torch.cat([self.weight.double(), self.background.double().unsqueeze(-1)], -1)

    def _within(self, means: Tensor, floor: Tensor | float) -> Tensor:
        """Means above a floor, and probabilities off one and zero."""
        means = means.clamp(min=floor)
        if self.family != "bernoulli":
            return means
        # An average of what is at the upper bound is there, too: a rounding error below it, 1 - m would differ in its tenth digit.
        most = 1 - FLOOR
        return torch.where(means > most - 1e-13, most, means.clamp(min=FLOOR))


def _losses(likelihood: Any, means: Tensor, statistics: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What every cause, and the background, explains, and what that costs, ``(D, H + 1)``."""
    return likelihood.natural(means) * statistics["won"], likelihood.partition(means) * statistics["wins"]


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
        weight = statistics["causes"] / trials
        if self.update == "fixed_point":
            # The right-hand side of the equation.
            claims = statistics["claims"]
            weight = 1 - (1 - old) * (claims - statistics["causes"] / old) / (claims - trials)
            weight = torch.where(weight.isfinite(), weight, old)
        weight = torch.where(trials > MIN_COUNT, weight, old).clamp(FLOOR, 1 - FLOOR)
        self.weight = weight.to(self.weight)
        if self.learn_leak:
            observed = statistics["observed"]
            leak = torch.where(observed > 0, statistics["leak_causes"] / observed, self.leak.double())
            self.leak = leak.clamp(FLOOR, 1 - FLOOR).to(self.leak)
        self._maximize_prior(statistics)
