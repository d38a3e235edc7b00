"""Calibration on simulated data, and restarts compared."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from scipy import stats
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from pyro_truncated.diagnostics.truncation.coverage import plain, scored_populations, truncated_part
from pyro_truncated.diagnostics.truncation.findings import ENUMERATED_LIMIT
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.sites import sample_nodes
from pyro_truncated.search import EvolutionarySearch, ExhaustiveSearch
from pyro_truncated.utils.arguments import check_counts, names_arguments


@dataclasses.dataclass(frozen=True)
class RestartComparison:
    """``R`` restarts, matched to the one of the highest free energy.

    Example:
        >>> y = linear_bars(30, 3, mean_active=2.0).data
        >>> models = [BinarySparseCoding(9, 6).initialize(y) for _ in range(2)]
        >>> guides = [AutoTruncated(model, num_states=64).infer(y, ExhaustiveSearch(), steps=1) for model in models]
        >>> comparison = compare_restarts(guides, y)

    Attributes:
        free_energy: sum over the data points, ``(R,)``.
        best: position of the best restart.
        order: ``order[r, l]`` is the latent of restart ``r`` that matches latent ``l`` of the best, ``(R, L)``.
        similarity: correlation (or cosine of components) of the matched pairs, ``(R, L)``.
        activation: activation probabilities with matched latents in the same place, ``(R, N, L)``.
    """

    free_energy: Tensor
    best: int
    order: Tensor
    similarity: Tensor
    activation: Tensor

    @property
    def spread(self) -> float:
        """Returns best minus worst free energy per data point, in nats."""
        return float(self.free_energy.max() - self.free_energy.min()) / self.activation.shape[1]

    def shared(self, threshold: float = 0.9) -> Tensor:
        """Returns the share of the best restart's latents in each restart, ``(R,)``."""
        return (self.similarity >= threshold).double().mean(-1)


@names_arguments
def match_latents(reference: Tensor, other: Tensor, *, centred: bool = True) -> tuple[Tensor, Tensor]:
    """Returns the permutation of ``other``'s rows most similar to ``reference``.

    Example:
        >>> rows = torch.randn(4, 9)
        >>> order, similarity = match_latents(rows, rows[[2, 0, 3, 1]])
        >>> order.tolist()
        [1, 3, 0, 2]

    Args:
        reference: one row of features per latent, ``(L, F)``.
        other: the same of another restart.
        centred: compare by correlation; otherwise by cosine.

    Returns:
        ``order (L,)``, so that ``other[order]`` matches ``reference``, and the similarities ``(L,)`` of the pairs; zero for rows that do
        not vary.

    Raises:
        ValueError: if the two differ in shape or are not finite.
    """
    if reference.dim() != 2 or reference.shape != other.shape:
        raise ValueError(f"reference and other must both have shape (L, F); got {tuple(reference.shape)} and {tuple(other.shape)}")
    if not bool(reference.isfinite().all() and other.isfinite().all()):
        raise ValueError("reference and other must be finite; got NaN or infinity")
    table = _unit_rows(reference, centred) @ _unit_rows(other, centred).mT
    rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
    return torch.as_tensor(columns), table[torch.as_tensor(rows), torch.as_tensor(columns)]


def _unit_rows(features: Tensor, centred: bool) -> Tensor:
    features = plain(features).double()
    features = features - features.mean(-1, keepdim=True) if centred else features
    norm = features.norm(dim=-1, keepdim=True)
    return torch.where(norm > 1e-12 * features.shape[-1] ** 0.5, features / norm, 0.0)


@torch.no_grad()
def compare_restarts(
    guides: Sequence[Any], *args: Any, components: Sequence[Tensor] | None = None, stores: Sequence[Any] | None = None, **kwargs: Any
) -> RestartComparison:
    """Compares restarts of a model up to a permutation of the latents.

    Latents of restarts are matched to those of the best by an optimal assignment
    (``scipy.optimize.linear_sum_assignment``). It maximises the sum of the similarities of all pairs. Without it,
    convergence statistics such as R-hat make sense only for quantities that do not depend on the order of latents.

    Example:
        >>> y = linear_bars(30, 3, mean_active=2.0).data
        >>> models = [BinarySparseCoding(9, 6).initialize(y) for _ in range(2)]
        >>> guides = [AutoTruncated(model, num_states=64).infer(y, ExhaustiveSearch(), steps=1) for model in models]
        >>> comparison = compare_restarts(guides, y, components=[model.weight.detach() for model in models])

    Args:
        guides: one fitted guide per restart; each knows its own model.
        *args: the model's arguments.
        components: what to match latents by, one dictionary ``(D, L)`` per restart (cosine). Default: their activation probabilities over
            the data points (correlation).
        stores: states of Pyro's parameter store, one per guide (``Restarts.stores``). They hold parameters of plain
            functions, and of modules whose names repeat.
        **kwargs: the model's keyword arguments.

    Returns:
        The restarts, matched.

    Raises:
        ValueError: if there are no guides, numbers differ, or the restarts differ in their latents.
    """
    if not guides:
        raise ValueError("guides must hold at least one guide")
    for name, given in (("components", components), ("stores", stores)):
        if given is not None and len(given) != len(guides):
            raise ValueError(f"{name} must hold one entry per guide; got {len(given)} for {len(guides)}")
    populations = []
    for position, guide in enumerate(guides):
        with contextlib.nullcontext() if stores is None else pyro.get_param_store().scope(stores[position]):
            populations.append(scored_populations(guide, args, kwargs)[2])
    if len({population.space for population in populations}) > 1:
        raise ValueError("the restarts differ in their discrete latents; only fits of one model can be matched")
    activation = [plain(population.marginals()).double() for population in populations]
    free_energy = torch.stack([plain(population.free_energy()).sum() for population in populations])
    best = int(free_energy.argmax())
    features = [values.mT for values in activation] if components is None else [plain(part).mT for part in components]
    matches = [match_latents(features[best], own, centred=components is None) for own in features]
    order, similarity = torch.stack([order for order, _ in matches]), torch.stack([similar for _, similar in matches])
    matched = torch.stack([values[:, own] for values, own in zip(activation, order, strict=True)])
    return RestartComparison(free_energy, best, order, similarity, matched)


Fit = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Probability integral transforms of the truth; uniform if posteriors are right.

    Example:
        >>> model = BinarySparseCoding(9, 6)
        >>> calibration: Calibration = simulation_based_calibration(model, torch.zeros(50, 9))

    Attributes:
        pit: by statistic, ``(num_simulations * N,)`` for states, ``(num_simulations,)`` for each entry of a global latent.
    """

    pit: Mapping[str, Tensor]

    def p_values(self) -> dict[str, float]:
        """Kolmogorov-Smirnov p-values by statistic, of the hypothesis that the posterior is right."""
        return {name: float(stats.kstest(values.numpy(), "uniform").pvalue) for name, values in self.pit.items()}

    def is_calibrated(self, level: float = 0.01) -> bool:
        """Whether no statistic is rejected at a family-wise level (Bonferroni).

        This bounds the rate of false alarms.
        """
        p_values = self.p_values()
        return all(p_value >= level / len(p_values) for p_value in p_values.values())


@torch.no_grad()
def simulation_based_calibration(
    model: Callable[..., Any], *args: Any, num_simulations: int = 1, fit: Fit | None = None, num_draws: int = 50, **kwargs: Any
) -> Calibration:
    r"""Simulates data, infers their states, and ranks the truth in the posterior.

    Let :math:`(s, y) \sim p` and the posterior be exact. Then :math:`u = P(f(s') < f(s) \mid y) + v\, P(f(s') = f(s) \mid y)` with uniform
    :math:`v` is uniform on [0, 1] for every statistic :math:`f` (Talts et al. 2018). States are discrete, hence the randomisation.
    Probabilities are those of the weights, so no draws of states are needed.

    Statistics are the number of ``active`` latents, every latent, and the ``log_joint``. The last may depend on the
    data and notices what others miss (Modrak et al. 2023). A truncated posterior leaves out improbable states, so the
    truth comes out too improbable.

    All data points of a simulation count as simulations, since their states and data are independent. Parameters are
    held fixed. So calibration is that of the states, and of the global latents if a guide covers them. Global latents
    are compared by ranks among ``num_draws`` draws, once per simulation, and need a ``fit`` and many simulations.

    Example:
        >>> model = BinarySparseCoding(9, 6)
        >>> calibration = simulation_based_calibration(model, torch.zeros(50, 9))

    Args:
        model: the Pyro model; observed values among the arguments are replaced by simulated ones.
        *args: the model's arguments, such that it does not subsample.
        num_simulations: data sets that are simulated.
        fit: called as ``fit(model, *args, **kwargs)`` with a model conditioned on simulated data; returns a guide fitted to it. Default:
            an ``AutoTruncated`` whose populations come from an exhaustive search (evolutionary where the space is large).
        num_draws: draws of other latents from the guide.
        **kwargs: the model's keyword arguments.

    Returns:
        The transforms.

    Raises:
        ValueError: if a count is below 1 or the model subsamples.
    """
    num_simulations, num_draws = check_counts(num_simulations=num_simulations, num_draws=num_draws)
    collected: dict[str, list[Tensor]] = {}
    for _ in range(num_simulations):
        for name, values in _simulate(model, args, kwargs, fit or fit_populations, num_draws).items():
            collected.setdefault(name, []).append(values)
    return Calibration({name: plain(torch.cat(values)) for name, values in collected.items()})


def fit_populations(
    model: Callable[..., Any],
    *args: Any,
    num_states: int = 64,
    steps: int = 30,
    max_count: int | Mapping[str, int] | None = None,
    **kwargs: Any,
) -> AutoTruncated:
    """Returns a guide with populations found under the present model.

    Counts without an upper end need ``max_count``.
    """
    probe = AutoTruncated(model, 1, max_count=max_count)
    probe.setup(*args, **kwargs)
    search = ExhaustiveSearch() if probe.space.size <= ENUMERATED_LIMIT else EvolutionarySearch(crossover=True)
    steps = 1 if isinstance(search, ExhaustiveSearch) else steps
    return AutoTruncated(model, min(num_states, probe.space.size), max_count=max_count).infer(args, search, steps, **kwargs)


def _simulate(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], fit: Fit, num_draws: int) -> dict[str, Tensor]:
    free = poutine.uncondition(model)
    with poutine.block():
        truth = sample_nodes(poutine.trace(free).get_trace(*args, **kwargs))
    data = {name: node["value"] for name, node in truth.items() if node["infer"].get("was_observed")}
    simulated = poutine.condition(free, data=data)
    with torch.enable_grad():
        guide = fit(simulated, *args, **kwargs)
    part = truncated_part(guide)
    others = {name: truth[name]["value"] for name in part.layout.other_latents}
    with poutine.block():
        scorer = part.log_joint_of(*args, values=others, **kwargs)
        if scorer.num_data != scorer.full_size:
            raise ValueError("simulation-based calibration needs all data points at once; the model subsampled some of them")
        states = {name: truth[name]["value"] for name in part.layout.sites}
        words = part.space.pack(part.layout.encode_values(states, part.layout.full_sizes)).unsqueeze(1)
        draws = [_draw_of_others(guide, args, kwargs) for _ in range(num_draws if others and part is not guide else 1)]
        transforms = _state_transforms(part, words, scorer.score(words).double(), args, kwargs, draws)
    return transforms | _global_transforms(scorer, others, draws)


def _draw_of_others(guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """One joint draw of the latents of the guide's other parts."""
    part = truncated_part(guide)
    if part is guide:
        return {}
    nodes = sample_nodes(poutine.trace(guide).get_trace(*args, **kwargs))
    return {name: nodes[name]["value"] for name in part.layout.other_latents if name in nodes}


def _state_transforms(
    part: AutoTruncated, words: Tensor, truth: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], draws: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Returns transforms ``(N,)`` of statistics of the states.

    The posterior is the mixture over draws of the other latents.
    """
    below: dict[str, Tensor] = {}
    equal: dict[str, Tensor] = {}
    true_levels = part.space.unpack(words, torch.int64)
    for draw in draws:
        population = part.rescored(part.log_joint_of(*args, values=draw, **kwargs))
        weights, levels = population.weights().double(), population.states(torch.int64)
        statistics = {"active": ((levels != 0).sum(-1), (true_levels != 0).sum(-1)), "log_joint": (population.log_joint.double(), truth)}
        statistics |= {f"latent[{i}]": (levels[..., i], true_levels[..., i]) for i in range(part.space.num_latents)}
        for name, (values, true) in statistics.items():
            # The same state scores the same only up to rounding.
            tolerance = 1e-5 * (1 + true.abs()) if true.is_floating_point() else 0
            tied = (values - true).abs() <= tolerance
            below[name] = below.get(name, 0.0) + (weights * ((values < true) & ~tied)).sum(-1) / len(draws)
            equal[name] = equal.get(name, 0.0) + (weights * tied).sum(-1) / len(draws)
    return {name: below[name] + torch.rand_like(below[name]) * equal[name] for name in below}


def _global_transforms(scorer: LogJoint, others: Mapping[str, Tensor], draws: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns transforms ``(1,)`` of each entry of the global latents.

    They are ranks among the draws.
    """
    result = {}
    for name, true in others.items():
        if scorer.is_inside(scorer.nodes[name]) or not all(name in draw for draw in draws):
            continue
        drawn = torch.stack([draw[name].reshape(-1) for draw in draws]).double()
        rank = (drawn < true.reshape(-1).double()).sum(0) + torch.rand(true.numel(), dtype=torch.float64)
        for position, value in enumerate(rank / (len(draws) + 1)):
            result[f"{name}[{position}]" if true.numel() > 1 else name] = value.reshape(1)
    return result
