"""Variable projection: the M-step of networks whose last layer is linear."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated.states.population import Population
from pyro_truncated.utils.parameter_store import load_snapshot, snapshot

# Steps of L-BFGS after each new unit.
_REFIT_STEPS = 60
# Least mean square of weights, and of a unit's part that is new, for a single state.
_MIN_MEAN_SQUARE = 1e-4


class Decoder(NamedTuple):
    """A network whose last layer is linear."""

    network: torch.nn.Module  # maps states (M, H) to numbers (M, D), each by itself
    hidden: torch.nn.Linear  # computes the last hidden units, before their nonlinearity
    last: torch.nn.Linear


class Targets(NamedTuple):
    """What a network shall decode states into."""

    states: Tensor  # distinct ones, (M, H), in the type of the weights
    weights: Tensor  # how many data points have each, (M,) in float64
    means: Tensor  # what the network shall decode for these, (M, D) in float64
    rest: float  # the square error of the means themselves


def make_targets(population: Population, values: Tensor, dtype: torch.dtype) -> Targets:
    """Returns distinct states and the mean values ``(N, D)`` of each.

    Of more states than data points these are the commonest: otherwise the fit would be dearer than the steps.
    """
    weights = population.weights(dtype=torch.float64)
    words, place = population.words.flatten(0, 1).unique(dim=0, return_inverse=True)
    number = values.new_zeros(len(words)).index_add_(0, place, weights.flatten())
    often = number.topk(min(len(number), len(population))).indices
    # Expected data points of a state below which it does not count.
    often = often[number[often] > 1e-3]
    # By states: all values at once would be many times the data.
    place = place.new_full((len(words),), len(often)).index_copy_(0, often, torch.arange(len(often), device=often.device))[place]
    place, words, number = place.view(weights.shape), words[often], number[often]
    center = values.mean(0)
    values, sums = values - center, values.new_zeros(len(often) + 1, values.shape[1])
    for state in range(population.num_states):
        sums.index_add_(0, place[:, state], weights[:, state, None] * values)
    means, counted = sums[:-1] / number.unsqueeze(1), (weights * (place < len(often))).sum(1)
    rest = float(counted @ values.square().sum(1) - number @ means.square().sum(1))
    return Targets(population.space.unpack(words).to(dtype), number, means + center, max(rest, 0.0))


class FittedUnits:
    r"""Hidden units :math:`h(s)` of a network under their optimal last layer.

    .. math:: \min_\theta \min_{V, b} \sum_m w_m \|V h_\theta(s_m) + b - t_m\|^2
        + \sigma^2 (\|V\|^2 / v_V + \sum_i \|\theta_i\|^2 / v_i)

    with the noise :math:`\sigma^2` and the prior variance :math:`v`, the mean squares of the initial weights. Without the prior, few states
    under many units lead to large weights that cancel each other, and the next step of an optimiser destroys them. The offset :math:`b` has
    no prior, as data may lie far from zero. The inner minimum is in closed form. The gradient of the outer one is that of the parameters
    :math:`\theta` alone (variable projection). These are parameters that take gradients and change hidden units, not other heads.

    Reference:
        Golub and Pereyra, "The Differentiation of Pseudo-Inverses and Nonlinear Least Squares Problems Whose Variables Separate", SIAM
        Journal on Numerical Analysis 1973.
    """

    def __init__(self, decoder: Decoder, targets: Targets) -> None:
        self._network, self._hidden_layer, self._last_layer = decoder
        self._targets, self.evaluations = targets, 0  # of the network
        self._root = targets.weights.sqrt().unsqueeze(1)
        self._weighted_means = self._root * targets.means
        last = set(self._last_layer.parameters(recurse=False))
        self._incoming = list(self._hidden_layer.parameters(recurse=False))
        self.learned = self._used_parameters([value for value in self._network.parameters() if value.requires_grad and value not in last])
        noise = self.square_error() / (float(targets.weights.sum()) * targets.means.shape[1])
        self._last_decay, *self._decays = (
            noise / max(_mean_square(value), _MIN_MEAN_SQUARE) for value in (self._last_layer.weight, *self.learned)
        )

    @torch.no_grad()
    def square_error(self) -> float:
        """That of the data points, with the network as it is."""
        decoded = self._root * self._network(self._targets.states).double()
        return self._targets.rest + float((decoded - self._weighted_means).square().sum())

    def fit(self, steps: int) -> float:
        """Takes steps of L-BFGS; the square error and the penalties after them."""
        # Line searches take more evaluations than steps, as torch has it by default.
        most = int(1.25 * steps)
        optimizer = torch.optim.LBFGS(self.learned, max_iter=steps, max_eval=most, history_size=20, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = self._loss()
            value.backward()
            return value.detach()

        with torch.enable_grad():
            optimizer.step(loss)
        optimizer.zero_grad()
        with torch.no_grad():
            return float(self._loss())

    @torch.no_grad()
    def put_last_layer(self) -> None:
        """Gives the network the optimal last layer."""
        solution, _ = self._solve(self._design())
        self._last_layer.weight.copy_(solution[: self._last_layer.in_features].mT)
        if self._last_layer.bias is not None:
            self._last_layer.bias.copy_(solution[-1])

    @torch.no_grad()
    def deletion_loss(self) -> Tensor:
        """Returns the rise of the penalised error without each unit, ``(J,)``."""
        solution, moments = self._solve(self._design())
        rises: Tensor = solution.square().sum(1) / torch.linalg.inv(moments).diagonal()
        return rises[: self._last_layer.in_features]

    @torch.no_grad()
    def redraw(self, unit: int) -> None:
        """Redraws a unit to explain most of the error that others leave."""
        before = [value.clone() for value in self._incoming]
        size = math.sqrt(_mean_square(torch.cat([value.flatten() for value in before])))
        design = self._design()
        others = design[:, [column for column in range(design.shape[1]) if column != unit]]
        residual, basis = self._weighted_means - others @ self._solve(others)[0], torch.linalg.qr(others).Q
        best, gained = [value[unit] for value in before], 0.0
        # At least 256 candidates for a unit.
        for _ in range(-(-256 // self._hidden_layer.out_features)):
            # All units together are further candidates.
            for value in self._incoming:
                value.copy_(size * torch.randn(value.shape, dtype=value.dtype))
            gains = _gains(self._design()[:, : self._hidden_layer.out_features], basis, residual)
            first = int(gains.argmax())
            if float(gains[first]) > gained:
                best, gained = [value[first].clone() for value in self._incoming], float(gains[first])
        for value, old, own in zip(self._incoming, before, best, strict=True):
            value.copy_(old)
            value[unit] = own

    def _design(self) -> Tensor:
        """Weighted inputs ``(M, J + 1)`` of the last layer, ones for an offset."""
        self.evaluations += 1
        parts: list[Tensor] = []
        handle = self._last_layer.register_forward_pre_hook(
            lambda _, *given: parts.extend((*given[0], *given[1].values())), with_kwargs=True
        )
        try:
            self._network(self._targets.states)
        finally:
            handle.remove()
        columns = [parts[0].double()] + ([] if self._last_layer.bias is None else [torch.ones_like(self._root)])
        return self._root * torch.cat(columns, 1)

    def _solve(self, design: Tensor) -> tuple[Tensor, Tensor]:
        """The best last layer, ``(J + 1, D)``, and the matrix of its normal equations."""
        moments = design.mT @ design
        # Relative ridge for equal units without noise.
        least = 1e-12 * (1.0 + moments.diagonal().mean())
        moments.diagonal()[: design.shape[1] - (self._last_layer.bias is not None)].add_(self._last_decay + least)
        return torch.linalg.solve(moments, design.mT @ self._weighted_means), moments

    @torch.enable_grad()
    def _used_parameters(self, parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        hidden = self._design().sum()
        gradients = torch.autograd.grad(hidden, parameters, allow_unused=True) if parameters and hidden.requires_grad else ()
        return [value for value, gradient in zip(parameters, gradients, strict=False) if gradient is not None]

    def _loss(self) -> Tensor:
        design = self._design()
        solution, _ = self._solve(design.detach())
        weights = solution[: self._last_layer.in_features]
        error = (design @ solution - self._weighted_means).square().sum() + self._last_decay * weights.square().sum()
        penalties = [decay * value.double().square().sum() for decay, value in zip(self._decays, self.learned, strict=True)]
        return sum(penalties, self._targets.rest + error)


def fit_unit_by_unit(decoder: Decoder, targets: Targets) -> bool:
    """Fits a network to states and redraws its least useful units.

    It ends when no redrawn unit is better.

    A network as narrow as the one that made the data has many bad optima. Two of its units do what one should, and others are missing,
    which no gradient mends. Random numbers are torch's own. Says whether the square error has fallen; else the network is as it was.
    """
    before = snapshot(decoder.network.parameters())
    units = FittedUnits(decoder, targets)
    if not units.learned:
        return False
    error, work = units.square_error(), len(targets.states) * sum(value.numel() for value in before)
    # L-BFGS steps of the first fit.
    units.fit(200)
    units.put_last_layer()
    # Noise and weight sizes now belong to a network that fits.
    units = FittedUnits(decoder, targets)
    lowest, failed = units.fit(_REFIT_STEPS), 0
    # Evaluations of all fits, and their states times weights: 3 to 7 CPU seconds.
    while failed < decoder.last.in_features and units.evaluations < min(4000, 1e10 / work):
        best_parameters = snapshot(units.learned)
        units.redraw(int(units.deletion_loss().argsort()[failed]))
        new_error = units.fit(_REFIT_STEPS)
        # Relative gain in squared error that a new unit needs; for 25 numbers 0.01 nats.
        if new_error < (1 - 1e-3) * lowest:
            lowest, failed = new_error, 0
        else:
            load_snapshot(units.learned, best_parameters)
            failed += 1
    units.put_last_layer()
    has_fallen = units.square_error() < error
    if not has_fallen:
        load_snapshot(decoder.network.parameters(), before)
    return has_fallen


def _gains(columns: Tensor, basis: Tensor, residual: Tensor) -> Tensor:
    """Returns the error that each column removes beside a basis, ``(J,)``."""
    columns = columns - basis @ (basis.mT @ columns)
    return (columns.mT @ residual).square().sum(1) / columns.square().sum(0).clamp(min=_MIN_MEAN_SQUARE)


def _mean_square(value: Tensor) -> float:
    return float(value.detach().double().square().mean())
