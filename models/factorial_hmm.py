"""Factorial hidden Markov model with linear Gaussian observations."""

from __future__ import annotations

from typing import Any, Self

import pyro
import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import Population
from pyro_truncated.distributions import BinaryChains, LinearSuperposition
from pyro_truncated.extend import UniqueModule, check_counts, generator_device, names_arguments, selected_rows, some_rows, takes_arrays
from pyro_truncated.models.data_model import FLOOR, MOST_ROWS, cast_like, check_real, first_rows
from pyro_truncated.models.dictionary import best_dictionary_and_offset, best_scale
from pyro_truncated.sequences import ChainPosterior, LinearGaussianSteps, ObservedSteps


def difference_dictionary(
    y: Tensor, num_latents: int, generator: torch.Generator | None, num_tries: int = 8, num_steps: int = 15
) -> tuple[Tensor, Tensor]:
    r"""Elements ``(D, M)`` of which few change between neighbouring steps, and noise.

    .. math:: y_t - y_{t-1} = \sum_m d_{tm} W_m + \mathrm{noise}, \qquad d_{tm} \in \{-1, 0, 1\}, \text{ mostly } 0.

    Directions come from k-means++ up to sign; pursuit of the code and least squares alternate. The best of several tries is taken.
    """
    rows = (y[:, 1:] - y[:, :-1]).double().flatten(0, 1)
    rows = rows[~rows.isnan().all(1)]
    if not len(rows):
        rows = y.double().flatten(0, 1)
    rows = first_rows(rows, generator)
    is_observed = (~rows.isnan()).double()
    rows = rows.nan_to_num()
    tries = [_ternary_code(rows, is_observed, num_latents, generator, num_steps) for _ in range(num_tries)]
    _, weight, variance = min(tries, key=lambda one: float(one[0]))
    return weight, (variance / 2).sqrt()


def _ternary_code(
    rows: Tensor, is_observed: Tensor, num_latents: int, generator: torch.Generator | None, num_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Objective, elements and variance of what is left."""
    weight = _first_directions(rows, num_latents, generator)
    squares = rows.square().sum(1) / is_observed.sum(1)
    # Share of the differences in which nothing is assumed to change.
    variance = squares.quantile(0.2)
    objective = squares.sum()
    for _ in range(num_steps):
        # A change must explain three nats.
        cost = 6.0 * variance
        code, residual = _pursuit(rows, weight, cost)
        objective = residual.square().sum() + cost * code.abs().sum()
        weight = _least_squares(rows, is_observed, code, weight)
        variance = residual.square().sum() / is_observed.sum()
        unused = (code.abs().sum(0) == 0).nonzero().squeeze(1)
        if len(unused):
            weight[:, unused] = rows[_draw(residual.square().sum(1), len(unused), generator)].mT
    return objective, weight, variance


def _first_directions(rows: Tensor, num_latents: int, generator: torch.Generator | None) -> Tensor:
    """Draws rows far from each other up to sign, ``(D, M)``, by k-means++."""
    distance = rows.square().sum(1)
    directions = []
    for _ in range(num_latents):
        row = rows[_draw(distance, 1, generator)]
        directions.append(row)
        distance = distance.minimum((rows - row).square().sum(1)).minimum((rows + row).square().sum(1))
    return torch.cat(directions).mT.contiguous()


def _draw(power: Tensor, number: int, generator: torch.Generator | None) -> Tensor:
    power = power.to(generator_device(generator)) + torch.finfo(power.dtype).tiny
    return torch.multinomial(power, number, replacement=len(power) < number, generator=generator)


def _pursuit(rows: Tensor, weight: Tensor, cost: Tensor) -> tuple[Tensor, Tensor]:
    """A greedy ternary code ``(R, M)`` and what it leaves over."""
    code, residual = rows.new_zeros(len(rows), weight.shape[1]), rows
    for _ in range(4):
        product = residual @ weight
        gain = (2 * product.abs() - weight.square().sum(0) - cost).masked_fill(code != 0, -torch.inf)
        best, place = gain.max(1, keepdim=True)
        if not bool((best > 0).any()):
            break
        code.scatter_add_(1, place, product.gather(1, place).sign() * (best > 0))
        residual = rows - code @ weight.mT
    return code, residual


def _least_squares(rows: Tensor, is_observed: Tensor, code: Tensor, weight: Tensor) -> Tensor:
    """The best elements of a code; unused ones stay."""
    # Unused elements would make the Gram matrix singular.
    ridge = 1e-6 * torch.eye(code.shape[1], dtype=code.dtype, device=code.device)
    if bool(is_observed.all()):
        return weight + torch.linalg.solve(code.mT @ code + ridge, code.mT @ (rows - code @ weight.mT)).mT
    gram = (is_observed.mT @ (code.unsqueeze(2) * code.unsqueeze(1)).flatten(1)).unflatten(1, ridge.shape) + ridge
    gradient = ((rows - code @ weight.mT) * is_observed).mT @ code
    return weight + torch.linalg.solve(gram, gradient.unsqueeze(-1)).squeeze(-1)


class FactorialHMM(UniqueModule):
    r"""Factorial hidden Markov model with binary causes and Gaussian noise.

    .. math:: s_{1m} \sim \mathrm{Bernoulli}(p_m), \quad s_{tm} \sim A_m(s_{t-1,m}, \cdot), \quad
        y_t \sim \mathcal N(W s_t + b, \sigma^2 I).

    Data are ``N`` sequences of up to ``T`` steps, ``(N, T, D)``. Entries that are NaN are missing; shorter sequences are filled with NaN.
    Causes are identified up to their order and to :math:`s \to 1 - s`, :math:`W \to -W`. Restarts of :func:`~pyro_truncated.learn` begin
    with differences of neighbouring steps, see :meth:`initialize`.

    Example:
        >>> y = torch.randn(2, 30, 6)
        >>> model = FactorialHMM(6, 3)
        >>> guide = learn(model, y, num_states=4, restarts=1, progress=False)
        >>> guide.marginals()["s"].shape
        torch.Size([2, 30, 3])

    Args:
        num_observed: observed dimensions ``D``.
        num_latents: number of binary causes ``M``.
        dtype: type of the parameters. Default: torch's.

    Attributes:
        weight: dictionary :math:`W`, ``(D, M)``.
        bias: offset :math:`b`, ``(D,)``.
        scale: noise standard deviation :math:`\sigma`, a scalar.
        initial: activation probability :math:`p` at the first step, ``(M,)``.
        transition: transition probabilities :math:`A`, ``(M, 2, 2)``.

    Reference:
        Ghahramani and Jordan, "Factorial Hidden Markov Models", Machine Learning 29, 1997.
    """

    weight: Tensor
    bias: Tensor
    scale: Tensor
    initial: Tensor
    transition: Tensor
    # Gaps without observation make the statistics depend on the transitions.
    statistics_depend_on_parameters = True
    has_informed_init = True

    @names_arguments
    def __init__(self, num_observed: int, num_latents: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_counts(num_observed=num_observed, num_latents=num_latents)
        self.num_observed, self.num_latents = num_observed, num_latents
        self.weight = PyroParam(torch.randn(num_observed, num_latents, dtype=dtype), constraints.real)  # type: ignore[assignment]
        self.bias = PyroParam(torch.zeros(num_observed, dtype=dtype), constraints.real)  # type: ignore[assignment]
        self.scale = PyroParam(torch.ones((), dtype=dtype), constraints.positive)  # type: ignore[assignment]
        self.initial = PyroParam(torch.full((num_latents,), 0.5, dtype=dtype), constraints.unit_interval)  # type: ignore[assignment]
        table = torch.full((num_latents, 2, 2), 0.5, dtype=dtype)
        self.transition = PyroParam(table, constraints.simplex)  # type: ignore[assignment]

    @takes_arrays
    def forward(self, y: Tensor | None = None, batch_size: int | None = None, num_steps: int | None = None) -> Tensor:
        """The model of sequences ``(N, T, D)``; without data one of ``num_steps``."""
        y = None if y is None else self._check(y)
        size, num_steps = (1, num_steps or 1) if y is None else y.shape[:2]
        initial, transition, weight, scale, bias = self.initial, self.transition, self.weight, self.scale, self.bias
        with pyro.plate("sequences", size, subsample_size=batch_size) as index:
            rows = selected_rows(y, index)
            lengths = None if rows is None else _lengths(rows)
            # Parameters satisfy their constraints by the way they are kept, to the digits of their type.
            states = pyro.sample("s", BinaryChains(initial, transition, num_steps, lengths, validate_args=False))
            likelihood: Any = LinearSuperposition(states, weight, scale, bias)
            return pyro.sample("y", likelihood.to_event(1), obs=rows)

    @names_arguments
    @torch.no_grad()
    @takes_arrays
    def initialize(self, y: Tensor, generator: torch.Generator | None = None) -> Self:
        """Starts from :func:`.difference_dictionary`, and learns without dynamics.

        Every step is then a sequence of its own. Transitions would lock in wrong paths early.

        Args:
            y: sequences ``(N, T, D)``.
            generator: source of randomness.
        """
        # Sequences may be short, with most steps beyond their ends.
        y = some_rows(self._check(y), max(1, 4 * MOST_ROWS // y.shape[1]), generator)
        weight, deviation = difference_dictionary(y, self.num_latents, generator)
        bias = y.double().flatten(0, 1).nanmean(0).nan_to_num() - 0.5 * weight.sum(1)
        half = weight.new_full((self.num_latents,), 0.5)
        self._set(weight, bias, deviation.clamp(min=1e-6), half, half.view(-1, 1, 1).expand(-1, 2, 2))
        rows = y.flatten(0, 1)
        rows = first_rows(rows[~rows.isnan().all(1)], generator).unsqueeze(1)
        if len(rows):
            observed, posterior = _find_observed_steps(rows), self.posterior(rows, num_states=8, steps=0)
            for step in range(30):
                posterior.rescore_(*self._terms(rows, observed)).improve_(1, first_forward=step % 2 == 0)
                self.maximize(self.sufficient_statistics(posterior, rows))
            self.transition = torch.stack([1 - self.initial, self.initial], -1).unsqueeze(1).expand(-1, 2, 2).contiguous()
        return self

    @torch.no_grad()
    @takes_arrays
    def posterior(self, y: Tensor, num_states: int = 32, steps: int = 20) -> ChainPosterior:
        """The truncated posterior of sequences at observed steps, under the present parameters.

        Args:
            y: sequences ``(N, T, D)``.
            num_states: states of each step.
            steps: sweeps, at most.
        """
        y = self._check(y)
        observed = _find_observed_steps(y)
        likelihood, transitions = self._terms(y, observed)
        return ChainPosterior(likelihood, transitions, num_states).improve_(steps)

    @torch.no_grad()
    @takes_arrays
    def sufficient_statistics(self, posterior: Any, y: Tensor, batch_size: int | None = None) -> dict[str, Tensor]:
        """Sums over all steps that :meth:`maximize` needs.

        Args:
            posterior: of the sequences, or of those at its ``indices``; one that :meth:`marginals` takes.
            y: sequences ``(N, T, D)``.
            batch_size: argument of the model; plays no role here.

        Returns:
            Those of :meth:`.LinearSuperposition.statistics`; expected values at the first step, ``first (M, 2)``, and expected
            ``transitions (M, 2, 2)``; and ``power``, the sum of squares about the mean.
        """
        if (each := getattr(posterior, "posteriors", None)) is not None:
            parts = [self.sufficient_statistics(one, y) for one in each]
            return {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
        y = self._check(y) if posterior.indices is None else self._check(y)[posterior.indices]
        observed = _find_steps_of(posterior, y)
        is_part = (observed.kind >= 0).flatten()
        population, rows = posterior.population(), _at(y, observed).flatten(0, 1)[is_part]
        part = Population(population.space, population.words[is_part], population.log_joint[is_part])
        statistics: dict[str, Tensor] = LinearSuperposition.statistics(part, rows.double())
        counts = posterior.expected_transitions()
        first, transitions = observed.expected_transitions(self.initial.double(), self.transition.double(), counts)
        num_observations = statistics["observed"].clamp(min=1.0)
        power = (statistics["squares"] - statistics["sums"].square() / num_observations).clamp(min=0.0).sum()
        return {**statistics, "first": first, "transitions": transitions, "power": power}

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Sets the parameters to the maximiser of the expected log joint.

        Dictionary and offset are those of :func:`.best_dictionary_and_offset`, and :math:`\sigma^2` is the mean expected squared residual.
        Transition probabilities are expected numbers of transitions over their row sums.
        """
        weight, bias = best_dictionary_and_offset(self.weight.double(), self.bias.double(), statistics)
        superposition = LinearSuperposition(weight.new_zeros(self.num_latents), weight, 1.0, bias, validate_args=False)
        scale = best_scale(superposition.square_error(statistics).sum(), statistics["power"], statistics["observed"].sum())
        # No transition becomes impossible.
        first, transitions = statistics["first"] + 1e-3, statistics["transitions"] + 1e-3
        initial, table = first[:, 1] / first.sum(-1), transitions / transitions.sum(-1, keepdim=True)
        self._set(weight, bias, scale, initial, table)

    @torch.no_grad()
    @takes_arrays
    def marginals(self, posterior: Any, y: Tensor) -> Tensor:
        """The probability that each cause is on at every step, ``(N, T, M)``.

        After the last observation of a sequence it is zero.

        Args:
            posterior: of the sequences, by :meth:`posterior` or ``guide.population()``.
            y: sequences ``(N, T, D)``.
        """
        y = self._check(y)
        parameters = self.initial.double(), self.transition.double(), _lengths(y), y.shape[1]
        # A guide beside others has a posterior for each of their draws.
        each = [_find_steps_of(one, y).marginals(one, *parameters) for one in getattr(posterior, "posteriors", [posterior])]
        return torch.stack(each).mean(0)

    @torch.no_grad()
    @takes_arrays
    def reconstruct(self, posterior: Any, y: Tensor) -> Tensor:
        """Posterior mean of the noise-free data ``(N, T, D)``; missing entries are filled in.

        Steps after the last observation are forecast. The posterior is one that :meth:`marginals` takes.
        """
        y, on = self._check(y), self.marginals(posterior, y)
        lengths, initial, transition = _lengths(y), self.initial.double(), self.transition.double()
        for step in range(int(lengths.min()), y.shape[1]):
            before = on[:, step - 1]
            ahead = (1 - before) * transition[:, 0, 1] + before * transition[:, 1, 1] if step else initial
            on[:, step] = torch.where((step < lengths).unsqueeze(-1), on[:, step], ahead)
        return (on @ self.weight.double().mT + self.bias.double()).to(self.weight.dtype)

    def _terms(self, y: Tensor, steps: ObservedSteps) -> tuple[LinearGaussianSteps, Any]:
        likelihood = LinearGaussianSteps(_at(y, steps), self.weight, self.scale, self.bias)
        return likelihood, steps.transitions(self.initial.double(), self.transition.double())

    def _set(self, weight: Tensor, bias: Tensor, scale: Tensor, initial: Tensor, transition: Tensor) -> None:
        self.weight, self.bias, self.scale = weight.to(self.weight), bias.to(self.bias), scale.to(self.scale)
        self.initial = initial.clamp(FLOOR, 1 - FLOOR).to(self.initial)
        transition = transition.clamp(min=FLOOR)
        self.transition = (transition / transition.sum(-1, keepdim=True)).to(self.transition).contiguous()

    def _check(self, y: Tensor) -> Tensor:
        check_real(y)
        if y.dim() != 3 or y.shape[2] != self.num_observed or not y.shape[0] * y.shape[1]:
            raise ValueError(f"y must have shape (N, T, {self.num_observed}), one row per sequence; got {tuple(y.shape)}")
        if bool(y.isinf().any()):
            raise ValueError("y must hold finite numbers, or NaN where an entry is missing; got infinity")
        return cast_like(y, y)


def _lengths(y: Tensor) -> Tensor:
    """The number of steps of each sequence, up to its last observation."""
    step = torch.arange(1, y.shape[1] + 1, device=y.device)
    return ((~y.isnan().all(-1)) * step).amax(1)


def _find_observed_steps(y: Tensor) -> ObservedSteps:
    return ObservedSteps.from_mask(~y.isnan().all(-1))


def _find_steps_of(posterior: ChainPosterior, y: Tensor) -> ObservedSteps:
    """The steps of a posterior: all before the end, or those observed."""
    step = torch.arange(y.shape[1], device=y.device).expand(y.shape[:2])
    kind = (step > 0).long().masked_fill(step >= _lengths(y).unsqueeze(1), -1)
    for steps in (ObservedSteps(step, kind, (0,), (1,)), _find_observed_steps(y)):
        if torch.equal(steps.kind, posterior.transitions.kind):
            return steps
    raise ValueError(f"posterior must be of the sequences y, {tuple(y.shape)}, with the same observed steps. Infer it again from y")


def _at(y: Tensor, steps: ObservedSteps) -> Tensor:
    """Observations at the observed steps, NaN beyond the end."""
    rows = y.gather(1, steps.position.unsqueeze(-1).expand(-1, -1, y.shape[2]))
    return rows.masked_fill((steps.kind < 0).unsqueeze(-1), torch.nan)
