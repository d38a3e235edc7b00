"""Networks that decode states: their data in parts, and a refit to known states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyro.poutine as poutine
import torch
from pyro.infer import SVI
from torch import Tensor
from torch.distributions import constraints
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import is_parametrized

from pyro_truncated import ops
from pyro_truncated.distributed.shards import total_rows
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.multistart.profile import Profile
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.sites import is_masked
from pyro_truncated.states.population import Population
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.utils.parameter_store import load_snapshot, snapshot, spare_random_numbers

Call = tuple[torch.nn.Module, Any, Any]
# Rows of a part; most parts, each of which has a guide.
_ROWS_PER_PART, _MAX_PARTS = 150, 32
# Rounding error of equal log joints; of scaled and shifted outputs.
_SCORE_RTOL, _EQUAL = 1e-3, 1e-4
# L-BFGS: first steps, steps after each new unit, evaluations per step, history.
_FITTING, _REFITTING, _EVALUATIONS, _REMEMBERED = 200, 60, 1.25, 20
# Most evaluations of all fits, and their states times weights: 3 to 7 CPU seconds.
_MOST, _MOST_WORK = 4000, 1e10
# Least mean square of weights, and of a unit's part that is new, for a single state.
_LEAST = 1e-4


class Parts:
    """A model's data in parts, each with a guide, trained in turn.

    Rows of a part lie as far apart as there are parts: data are often in some order.

    Args:
        y: all data.
        guide: that of all data, which says what the parts begin with, and gets what they have found.
        rows: the parts.
        guides: one for each of them.
        elbo: the loss, whose search and temperature are theirs.
    """

    def __init__(
        self, y: Tensor, guide: AutoTruncated, rows: Sequence[Tensor], guides: Sequence[AutoTruncated], elbo: Truncated_ELBO
    ) -> None:
        self._y, self._guide, self._rows, self._guides, self._elbo = y, guide, rows, guides, elbo
        self._elbos = [Truncated_ELBO(elbo.search, temperature=elbo.temperature) for _ in guides]
        self.number, self._have_begun = len(guides), False

    def step(self, svi: SVI) -> float:
        """Passes over all parts; returns the summed loss before each step."""
        if not self._have_begun:
            population = self._guide.population()
            for first, guide in enumerate(self._guides):
                words, log_joint = (self._part(value, first).clone() for value in (population.words, population.log_joint))
                guide.populations.store_(log_joint, None, words)
            self._have_begun = True
        loss = 0.0
        for rows, guide, elbo in zip(self._rows, self._guides, self._elbos, strict=True):
            elbo.search = self._elbo.search
            loss += float(SVI(svi.model, guide, svi.optim, elbo).step(rows))
        return loss

    @torch.no_grad()
    def collect(self) -> None:
        """Collects all states, with log joints under the present model."""
        if not self._have_begun:
            return
        population = self._guide.population()
        words, log_joint = population.words.clone(), population.log_joint.clone()
        for first, guide in enumerate(self._guides):
            found = guide.population()
            self._part(words, first).copy_(found.words)
            self._part(log_joint, first).copy_(found.log_joint)
        self._guide.populations.store_(log_joint, None, words)
        self._guide.refresh_(self._y)

    def _part(self, rows: Tensor, first: int) -> Tensor:
        return rows[first :: self.number]


def split_data(profile: Profile, guide: Any, elbo: Any) -> Parts | None:
    """Returns the parts of a network's data, ``None`` for other models.

    Data points must share no latents, and lie in one process.

    Programs whose parts differ from all data are trained on all at once. They hold other data beside these rows, look at neighbours, or
    observe something of no data point, which would count once for each part.
    """
    y = profile.y
    if not profile.is_network or not profile.is_by_gradients or profile.has_companion or profile.is_conditional or profile.is_product:
        return None
    number = min(_MAX_PARTS, len(y) // _ROWS_PER_PART)
    is_whole = guide.layout.num_data == len(y) == total_rows(y) and getattr(y, "file", None) is None
    if number < 2 or not is_whole:
        return None
    with spare_random_numbers(), poutine.block(), torch.no_grad():
        guide.populations.seed_()
        whole = guide.make_batch(y)
        words = whole.population().words[:, :1]
        scores = whole.scorer.score(words)
        if float(whole.outside().detach()) != 0.0:
            return None
        parts, guides = [y.as_subclass(Tensor)[first::number].contiguous() for first in range(number)], []
        for first, rows in enumerate(parts):
            own = profile.make_guide()
            own.populations.seed = ops.mix_bits(guide.populations.seed, first)
            try:
                own.setup(rows)
            except Exception:  # any error of a program that takes all rows only
                return None
            is_alike = own.layout.num_data == len(rows) and own.space.cardinalities == guide.space.cardinalities
            if not is_alike or own.num_states != guide.num_states:
                return None
            guides.append(own)
        for first, (rows, own) in enumerate(zip(parts, guides, strict=True)):
            # The states of a part keep their log joints.
            expected, found = scores[first::number], own.make_scorer(rows).score(words[first::number])
            if found.shape != expected.shape or not torch.allclose(found, expected, rtol=_SCORE_RTOL, atol=_SCORE_RTOL):
                return None
    return Parts(y, guide, parts, guides, elbo)


def observed_numbers(model: Any, y: Tensor, layout: Layout) -> tuple[Any, dict[str, Any]] | None:
    """Returns a run's nodes and its only observed site, if real-valued.

    All its entries must count.
    """
    with spare_random_numbers(), poutine.block(), torch.no_grad():
        trace = poutine.trace(model).get_trace(y)
    observed = [trace.nodes[name] for name in trace.observation_nodes if name not in layout.sites]
    if len(observed) != 1:
        return None
    fn, mask, value = (observed[0][key] for key in ("fn", "mask", "value"))
    if not (mask is None or mask is True) or is_masked(fn) or not _is_real(fn):
        return None
    return (trace.nodes, observed[0]) if value.dim() > 1 and len(value) == len(y) and bool(value.isfinite().all()) else None


def fit_decoder(model: Any, y: Tensor, guide: AutoTruncated) -> bool:
    r"""Refits a neural decoder to the present posteriors, unit by unit.

    This is a part of the M-step. The likelihood is normal with one noise, :math:`y \sim \mathcal N(a + b f(s), \sigma^2)`. The network
    :math:`f` minimises :math:`\sum_{ns} q_n(s) \|y_n - a - b f(s)\|^2`. It is fitted to one mean for each distinct state, which is cheap
    beside steps on all data points.

    A program may use the weights elsewhere, as in a prior or a noise, which one run does not show. So the free energy is evaluated
    afterwards, and all weights are restored if it has fallen.

    Args:
        model: any model; those in which there is no such network stay as they are.
        y: its data, ``(N, ...)``.
        guide: its posteriors, with log joints under the model as it is.

    Returns:
        Whether the network has changed.
    """
    layout = guide.layout
    if len(layout.sites) > 1 or layout.other_latents or not layout.space.is_binary:
        return False
    calls: list[Call] = []
    handle = register_module_forward_hook(lambda module, arguments, result: calls.append((module, arguments, result)))
    try:
        found = observed_numbers(model, y, layout)
    finally:
        handle.remove()
    if found is None or not _has_one_scale(found[1]):
        return False
    nodes, observed = found
    (state,), mean, value = (nodes[name]["value"] for name in layout.sites), observed["fn"].mean, observed["value"]
    for position, (network, arguments, decoded) in enumerate(calls):
        if not _is_decoded(arguments, decoded, state, mean):
            continue
        decoder = _decoder_in(network, decoded, calls[:position])
        if decoder is None or not (unit := _output_scale(mean, decoded)) or not _are_apart(network, arguments[0], decoded):
            continue
        means = (value.as_subclass(Tensor).double() - (mean - unit * decoded).double().mean(0)) / unit
        before = snapshot(network.parameters())
        is_fitted = fit_unit_by_unit(decoder, make_targets(guide.population(), means, arguments[0].dtype))
        is_better = is_fitted and _free_energy(guide, y) >= float(guide.population().free_energy().sum())
        if is_fitted and not is_better:
            load_snapshot(network.parameters(), before)
        return is_better
    return False


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


def _free_energy(guide: AutoTruncated, y: Tensor) -> float:
    """Returns the free energy of all data with present states."""
    with spare_random_numbers(), poutine.block():
        return float(guide.posterior(y).free_energy().sum())


def _decoder_in(network: torch.nn.Module, decoded: Tensor, calls: list[Call]) -> Decoder | None:
    """Finds a network that ends in two learned linear layers.

    It is found by the calls of its parts.
    """
    own = set(network.modules())
    layers = [(part, result) for part, _, result in calls if part in own and isinstance(part, torch.nn.Linear)]
    if len(layers) < 2 or not torch.equal(layers[-1][1], decoded):
        return None
    (hidden, _), (last, _) = layers[-2:]
    are_learned = all(value.requires_grad for layer in (hidden, last) for value in layer.parameters(recurse=False)) and not any(
        is_parametrized(layer) for layer in (hidden, last)
    )
    fits = hidden.out_features == last.in_features and [part for part, _ in layers].count(last) == 1
    return Decoder(network, hidden, last) if are_learned and fits else None


def _is_decoded(arguments: Any, decoded: Any, state: Tensor, mean: Tensor) -> bool:
    """Whether a call decoded states alone into the observed means."""
    if len(arguments) != 1 or not isinstance(arguments[0], Tensor) or not isinstance(decoded, Tensor) or decoded.dim() != 2:
        return False
    given = arguments[0]
    return given.is_floating_point() and given.shape == state.shape and decoded.shape == mean.shape and torch.equal(given, state.to(given))


def _output_scale(mean: Tensor, decoded: Tensor) -> float:
    """Returns the factor ``b`` of means ``a + b f(s)``, else zero."""
    parts = decoded - decoded.mean(0), mean - mean.mean(0)
    square = float(parts[0].square().sum())
    unit = float((parts[0] * parts[1]).sum()) / square if square > 0 else 0.0
    return unit if float((parts[1] - unit * parts[0]).square().sum()) <= _EQUAL**2 * unit**2 * square else 0.0


@torch.no_grad()
def _are_apart(network: torch.nn.Module, states: Tensor, decoded: Tensor) -> bool:
    """Whether a network decodes each state alone and deterministically.

    Batch normalisation and dropout do not.
    """
    half = len(states) // 2
    with spare_random_numbers():
        return torch.allclose(network(states[:half]), decoded[:half], rtol=_EQUAL, atol=_EQUAL * float(decoded.abs().max()))


def _has_one_scale(site: dict[str, Any]) -> bool:
    """Whether data are normal about their means with one deviation."""
    base = site["fn"]
    while hasattr(base, "base_dist") and not isinstance(base, torch.distributions.TransformedDistribution):
        base = base.base_dist
    is_normal = isinstance(base, torch.distributions.Normal) and float(base.scale.min()) == float(base.scale.max())
    return is_normal and torch.as_tensor(site["scale"]).numel() == 1


def _is_real(fn: Any) -> bool:
    """Whether a distribution says that it is one of real numbers."""
    try:
        support = fn.support
    except NotImplementedError:
        return False
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support is constraints.real


class Decoder(NamedTuple):
    """A network whose last layer is linear.

    Attributes:
        network: maps states ``(M, H)`` to numbers ``(M, D)``, each by itself.
        hidden: the linear layer that computes the last hidden units, before their nonlinearity.
        last: the last layer.
    """

    network: torch.nn.Module
    hidden: torch.nn.Linear
    last: torch.nn.Linear


class Targets(NamedTuple):
    """What a network shall decode states into.

    Attributes:
        states: distinct ones, ``(M, H)``, in the type of the weights.
        weights: how many data points have each, ``(M,)`` in float64.
        means: of what the network shall decode for these, ``(M, D)`` in float64.
        rest: the square error of the means themselves.
    """

    states: Tensor
    weights: Tensor
    means: Tensor
    rest: float


class FittedUnits:
    r"""Hidden units :math:`h(s)` of a network under their optimal last layer.

    .. math:: \min_\theta \min_{V, b} \sum_m w_m \|V h_\theta(s_m) + b - t_m\|^2
        + \sigma^2 (\|V\|^2 / v_V + \sum_i \|\theta_i\|^2 / v_i)

    with the noise :math:`\sigma^2` and the prior variance :math:`v`, the mean squares of the initial weights. Without the prior, few states
    under many units lead to large weights that cancel each other, and the next step of an optimiser destroys them. The offset :math:`b` has
    no prior, as data may lie far from zero. The inner minimum is in closed form. The gradient of the outer one is that of the parameters
    :math:`\theta` alone (variable projection).

    Args:
        decoder: the network, changed in place.
        targets: what it shall decode.

    Attributes:
        learned: the parameters :math:`\theta`: those of the network that take gradients and change its hidden units. Other heads and
            uses elsewhere are excluded.
        evaluations: how often the network has been evaluated.

    Reference:
        Golub and Pereyra, "The Differentiation of Pseudo-Inverses and Nonlinear Least Squares Problems Whose Variables Separate", SIAM
        Journal on Numerical Analysis 1973.
    """

    def __init__(self, decoder: Decoder, targets: Targets) -> None:
        self._network, self._hidden_layer, self._last_layer = decoder
        self._targets, self.evaluations = targets, 0
        self._root = targets.weights.sqrt().unsqueeze(1)
        self._weighted_means = self._root * targets.means
        last = set(self._last_layer.parameters(recurse=False))
        self._incoming = list(self._hidden_layer.parameters(recurse=False))
        self.learned = self._used_parameters([value for value in self._network.parameters() if value.requires_grad and value not in last])
        noise = self.square_error() / (float(targets.weights.sum()) * targets.means.shape[1])
        self._last_decay, *self._decays = (noise / max(_mean_square(value), _LEAST) for value in (self._last_layer.weight, *self.learned))

    @torch.no_grad()
    def square_error(self) -> float:
        """That of the data points, with the network as it is."""
        decoded = self._root * self._network(self._targets.states).double()
        return self._targets.rest + float((decoded - self._weighted_means).square().sum())

    def fit(self, steps: int) -> float:
        """Takes steps of L-BFGS; the square error and the penalties after them."""
        most = int(_EVALUATIONS * steps)
        optimizer = torch.optim.LBFGS(self.learned, max_iter=steps, max_eval=most, history_size=_REMEMBERED, line_search_fn="strong_wolfe")

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
    def worth(self) -> Tensor:
        """Returns the rise of the penalised error without each unit, ``(J,)``."""
        solution, moments = self._solve(self._design())
        rises: Tensor = solution.square().sum(1) / torch.linalg.inv(moments).diagonal()
        return rises[: self._last_layer.in_features]

    @torch.no_grad()
    def redraw(self, unit: int) -> None:
        """Redraws a unit: the best of many random incoming weights.

        It explains most of the error that the other units leave.
        """
        before = [value.clone() for value in self._incoming]
        size = math.sqrt(_mean_square(torch.cat([value.flatten() for value in before])))
        design = self._design()
        others = design[:, [column for column in range(design.shape[1]) if column != unit]]
        left, basis = self._weighted_means - others @ self._solve(others)[0], torch.linalg.qr(others).Q
        best, gained = [value[unit] for value in before], 0.0
        # At least 256 candidates for a unit.
        for _ in range(-(-256 // self._hidden_layer.out_features)):
            # All units together are further candidates.
            for value in self._incoming:
                value.copy_(size * torch.randn(value.shape, dtype=value.dtype))
            gains = _gains(self._design()[:, : self._hidden_layer.out_features], basis, left)
            first = int(gains.argmax())
            if float(gains[first]) > gained:
                best, gained = [value[first].clone() for value in self._incoming], float(gains[first])
        for value, old, own in zip(self._incoming, before, best, strict=True):
            value.copy_(old)
            value[unit] = own

    def _design(self) -> Tensor:
        """Returns the weighted inputs of the last layer, ``(M, J + 1)``.

        They have a column of ones if there is an offset.
        """
        self.evaluations += 1
        seen: list[Tensor] = []
        handle = self._last_layer.register_forward_pre_hook(
            lambda _, *given: seen.extend((*given[0], *given[1].values())), with_kwargs=True
        )
        try:
            self._network(self._targets.states)
        finally:
            handle.remove()
        columns = [seen[0].double()] + ([] if self._last_layer.bias is None else [torch.ones_like(self._root)])
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
    which no gradient mends. Random numbers are torch's own.

    Args:
        decoder: the network, changed in place.
        targets: what it shall decode.

    Returns:
        Whether the square error has fallen; otherwise the network is as it was.
    """
    before = snapshot(decoder.network.parameters())
    units = FittedUnits(decoder, targets)
    if not units.learned:
        return False
    error, work = units.square_error(), len(targets.states) * sum(value.numel() for value in before)
    units.fit(_FITTING)
    units.put_last_layer()
    # Noise and weight sizes now belong to a network that fits.
    units = FittedUnits(decoder, targets)
    lowest, failed = units.fit(_REFITTING), 0
    while failed < decoder.last.in_features and units.evaluations < min(_MOST, _MOST_WORK / work):
        kept = snapshot(units.learned)
        units.redraw(int(units.worth().argsort()[failed]))
        reached = units.fit(_REFITTING)
        # Relative gain in squared error that a new unit needs; for 25 numbers 0.01 nats.
        if reached < (1 - 1e-3) * lowest:
            lowest, failed = reached, 0
        else:
            load_snapshot(units.learned, kept)
            failed += 1
    units.put_last_layer()
    has_fallen = units.square_error() < error
    if not has_fallen:
        load_snapshot(decoder.network.parameters(), before)
    return has_fallen


def _gains(columns: Tensor, basis: Tensor, left: Tensor) -> Tensor:
    """Returns the error that each column removes beside a basis, ``(J,)``."""
    columns = columns - basis @ (basis.mT @ columns)
    return (columns.mT @ left).square().sum(1) / columns.square().sum(0).clamp(min=_LEAST)


def _mean_square(value: Tensor) -> float:
    return float(value.detach().double().square().mean())
