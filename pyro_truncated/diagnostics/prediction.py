"""Does the model predict: cross-validation, predictive checks, calibration, restarts compared."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyro
import pyro.poutine as poutine
import torch
from scipy import stats
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from pyro_truncated.diagnostics.truncation.coverage import find_truncated_guide, plain, score_populations
from pyro_truncated.diagnostics.truncation.thresholds import ENUMERATED_LIMIT, PARETO_LIMIT, TruncationWarning
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.sites import sample_nodes
from pyro_truncated.search import EvolutionarySearch, ExhaustiveSearch
from pyro_truncated.utils import arviz_compat as compat
from pyro_truncated.utils.arguments import Renamed, check_count, check_counts, names_arguments
from pyro_truncated.utils.arrays import as_data
from pyro_truncated.utils.arviz_compat import get_dataset, group_names
from pyro_truncated.utils.constraints import first_invalid


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

    def match_rate(self, threshold: float = 0.9) -> Tensor:
        """Returns the share of the best restart's latents in each restart, ``(R,)``."""
        return (self.similarity >= threshold).double().mean(-1)

    shared = Renamed("match_rate")


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
    reference, other = as_data("reference", reference), as_data("other", other)
    if reference.dim() != 2 or reference.shape != other.shape:
        raise ValueError(f"reference and other must both have shape (L, F); got {tuple(reference.shape)} and {tuple(other.shape)}")
    for name, rows in (("reference", reference), ("other", other)):
        if not bool(rows.isfinite().all()):
            raise ValueError(f"reference and other must be finite; got {first_invalid(rows, rows.isfinite())} of {name}")
    table = _unit_rows(reference, centred) @ _unit_rows(other, centred).mT
    rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
    return torch.as_tensor(columns), table[torch.as_tensor(rows), torch.as_tensor(columns)]


def _unit_rows(features: Tensor, centred: bool) -> Tensor:
    features = plain(features).double()
    # Less than this of the longest row is rounding, in any unit.
    least = 1e-12 * features.norm(dim=-1).amax() if features.numel() else 0.0
    features = features - features.mean(-1, keepdim=True) if centred else features
    norm = features.norm(dim=-1, keepdim=True)
    return torch.where(norm > least, features / norm, 0.0)


@torch.no_grad()
def compare_restarts(
    guides: Sequence[Any], *args: Any, components: Sequence[Tensor] | None = None, stores: Sequence[Any] | None = None, **kwargs: Any
) -> RestartComparison:
    """Compares restarts of a model up to a permutation of the latents.

    Latents of restarts are matched to those of the best by the assignment of largest total similarity
    (``scipy.optimize.linear_sum_assignment``). Without it, convergence statistics such as R-hat make sense only for quantities that do not
    depend on the order of latents.

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
        raise ValueError("guides must hold at least one guide; got none")
    for name, entries in (("components", components), ("stores", stores)):
        if entries is not None and len(entries) != len(guides):
            raise ValueError(f"{name} must hold one entry per guide; got {len(entries)} for {len(guides)}")
    populations = []
    for position, guide in enumerate(guides):
        with contextlib.nullcontext() if stores is None else pyro.get_param_store().scope(stores[position]):
            populations.append(score_populations(guide, args, kwargs)[2])
    if len({population.space for population in populations}) > 1:
        numbers = [population.space.num_latents for population in populations]
        raise ValueError(f"all restarts must be fits of one model, with the same discrete latents; got {numbers} latents")
    activation = [plain(population.marginals()).double() for population in populations]
    free_energy = torch.stack([plain(population.free_energy()).sum() for population in populations])
    best = int(free_energy.argmax())
    features = (
        [values.mT for values in activation] if components is None else [plain(as_data("components", part)).mT for part in components]
    )
    matches = [match_latents(features[best], own, centred=components is None) for own in features]
    order, similarity = torch.stack([order for order, _ in matches]), torch.stack([similar for _, similar in matches])
    matched_activation = torch.stack([values[:, own] for values, own in zip(activation, order, strict=True)])
    return RestartComparison(free_energy, best, order, similarity, matched_activation)


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
        """Whether no statistic is rejected at a family-wise level (Bonferroni)."""
        p_values = self.p_values()
        return all(p_value >= level / len(p_values) for p_value in p_values.values())


@torch.no_grad()
def simulation_based_calibration(
    model: Callable[..., Any], *args: Any, num_simulations: int = 1, fit: Fit | None = None, num_draws: int = 50, **kwargs: Any
) -> Calibration:
    r"""Simulates data, infers their states, and ranks the truth in the posterior.

    Let :math:`(s, y) \sim p` and the posterior be exact. Then :math:`u = P(f(s') < f(s) \mid y) + v\, P(f(s') = f(s) \mid y)` with uniform
    :math:`v` is uniform on [0, 1] for every statistic :math:`f` (Talts et al. 2018). Statistics are the number of ``active`` latents, every
    latent, and the ``log_joint``, which notices what others miss (Modrak et al. 2023). A truncated posterior leaves out improbable states,
    so the truth comes out too improbable.

    All data points of a simulation count as simulations, with parameters held fixed. Global latents are compared by ranks among
    ``num_draws`` draws, once per simulation, and need a ``fit`` and many simulations.

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
    transforms: dict[str, list[Tensor]] = {}
    for _ in range(num_simulations):
        for name, values in _simulate(model, args, kwargs, fit or _fit_populations, num_draws).items():
            transforms.setdefault(name, []).append(values)
    return Calibration({name: plain(torch.cat(values)) for name, values in transforms.items()})


def _fit_populations(model: Callable[..., Any], *args: Any, **kwargs: Any) -> AutoTruncated:
    """A guide with populations found under the present model."""
    probe = AutoTruncated(model, 1)
    probe.setup(*args, **kwargs)
    guide = AutoTruncated(model, min(64, probe.space.size))
    if probe.space.size <= ENUMERATED_LIMIT:
        return guide.infer(args, ExhaustiveSearch(), 1, **kwargs)
    return guide.infer(args, EvolutionarySearch(crossover=True), 30, **kwargs)


def _simulate(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], fit: Fit, num_draws: int) -> dict[str, Tensor]:
    free = poutine.uncondition(model)
    with poutine.block():
        truth = sample_nodes(poutine.trace(free).get_trace(*args, **kwargs))
    data = {name: node["value"] for name, node in truth.items() if node["infer"].get("was_observed")}
    conditioned_model = poutine.condition(free, data=data)
    with torch.enable_grad():
        guide = fit(conditioned_model, *args, **kwargs)
    part = find_truncated_guide(guide)
    others = {name: truth[name]["value"] for name in part.layout.other_latents}
    with poutine.block():
        scorer = part.make_scorer(*args, values=others, **kwargs)
        if scorer.num_data != scorer.full_size:
            raise ValueError(f"calibration needs all {scorer.full_size} data points at once; got a subsample of {scorer.num_data}")
        states = {name: truth[name]["value"] for name in part.layout.sites}
        words = part.space.pack(part.layout.encode_values(states, part.layout.full_sizes)).unsqueeze(1)
        draws = [_draw_companions(guide, args, kwargs) for _ in range(num_draws if others and part is not guide else 1)]
        transforms = _state_transforms(part, words, scorer.score(words).double(), args, kwargs, draws)
    return transforms | _global_transforms(scorer, others, draws)


def _draw_companions(guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """One joint draw of the latents of the guide's other parts."""
    part = find_truncated_guide(guide)
    if part is guide:
        return {}
    nodes = sample_nodes(poutine.trace(guide).get_trace(*args, **kwargs))
    return {name: nodes[name]["value"] for name in part.layout.other_latents if name in nodes}


def _state_transforms(
    part: AutoTruncated, words: Tensor, truth: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], draws: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Transforms ``(N,)`` of the states' statistics, averaged over other latents."""
    below: dict[str, Tensor] = {}
    equal: dict[str, Tensor] = {}
    true_levels = part.space.unpack(words, torch.int64)
    for draw in draws:
        population = part.rescore(part.make_scorer(*args, values=draw, **kwargs))
        weights, levels = population.weights().double(), population.states(torch.int64)
        statistics = {"active": ((levels != 0).sum(-1), (true_levels != 0).sum(-1)), "log_joint": (population.log_joint.double(), truth)}
        statistics |= {f"latent[{i}]": (levels[..., i], true_levels[..., i]) for i in range(part.space.num_latents)}
        for name, (values, true) in statistics.items():
            # The same state scores the same only up to rounding.
            tolerance = 1e-5 * (1 + true.abs()) if true.is_floating_point() else 0
            is_tie = (values - true).abs() <= tolerance
            below[name] = below.get(name, 0.0) + (weights * ((values < true) & ~is_tie)).sum(-1) / len(draws)
            equal[name] = equal.get(name, 0.0) + (weights * is_tie).sum(-1) / len(draws)
    return {name: below[name] + torch.rand_like(below[name]) * equal[name] for name in below}


def _global_transforms(scorer: LogJoint, others: Mapping[str, Tensor], draws: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Ranks ``(1,)`` of each entry of the global latents among draws."""
    result = {}
    for name, true in others.items():
        if scorer.is_inside(scorer.nodes[name]) or not all(name in draw for draw in draws):
            continue
        samples = torch.stack([draw[name].reshape(-1) for draw in draws]).double()
        rank = (samples < true.reshape(-1).double()).sum(0) + torch.rand(true.numel(), dtype=torch.float64)
        for position, value in enumerate(rank / (len(draws) + 1)):
            result[f"{name}[{position}]" if true.numel() > 1 else name] = value.reshape(1)
    return result


@dataclasses.dataclass(frozen=True)
class CrossValidation:
    """Leave-one-out cross-validation of one model.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> idata = to_arviz(model, guide, y, num_samples=25)
        >>> with warnings.catch_warnings(action="ignore", category=TruncationWarning):  # parameters are point estimates
        ...     result = cross_validate(idata)

    Attributes:
        elpd: expected log predictive density of the data, in nats.
        se: its standard error.
        p_loo: effective number of parameters.
        pointwise: the terms, one per data point.
        pareto_k: tail indices, one per data point. Zero for plug-in estimates.
        is_plug_in: whether parameters are point estimates. Then nothing was left out, and ``elpd`` is the log
            likelihood at parameters that have seen the data.
        conditional_on: names of latents of data points that are not summed out; what they know about the data biases
            the result.
        num_restarts: how many restarts with point estimates there were. The numbers are those of the one of highest ``elpd``.
    """

    elpd: float
    se: float
    p_loo: float
    pointwise: np.ndarray
    pareto_k: np.ndarray
    is_plug_in: bool
    conditional_on: str
    num_restarts: int = 1

    @property
    def caveats(self) -> list[str]:
        """What speaks against taking ``elpd`` at face value."""
        caveats = []
        if self.is_plug_in:
            caveats.append(
                "the parameters are point estimates, so the value is the log likelihood of training data, and favours large models. "
                "Compare on held-out data (guide.infer), or give the parameters priors and a guide"
            )
        if self.num_restarts > 1:
            caveats.append(f"it is that of the best of {self.num_restarts} restarts, whose point estimates are no draws from one posterior")
        if self.conditional_on:
            caveats.append(f"the latents {self.conditional_on} of data points are not summed out, which can be wrong by hundreds of nats")
        share = float((~(self.pareto_k <= PARETO_LIMIT)).mean())
        if share > 0:
            caveats.append(f"{share:.0%} of the tail indices exceed {PARETO_LIMIT}: leave these data points out in earnest")
        return caveats


def likelihood_name(idata: Any) -> str:
    """The variable of the group ``log_likelihood``."""
    if "log_likelihood" not in group_names(idata):
        raise ValueError(
            f"the data have no group log_likelihood, which to_arviz leaves out where it does not exist, only {group_names(idata)}"
        )
    names = list(get_dataset(idata, "log_likelihood").data_vars)
    if len(names) != 1:
        raise ValueError(f"log_likelihood holds the variables {names}; choose one with var_name")
    return str(names[0])


@names_arguments
def cross_validate(idata: Any, *, var_name: str | None = None) -> CrossValidation:
    r"""PSIS-LOO of the marginal likelihood :math:`\log\sum_{s \in K_n} p(y_n, s \mid \theta)` (Vehtari, Gelman and Gabry 2017).

    States of data points are summed out: conditioning on drawn states keeps what they know about it. With point estimates nothing can be
    left out, and the likelihood varies over the draws by rounding. Restarts are no draws from one posterior: the best one counts.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> idata = to_arviz(model, guide, y, num_samples=25)
        >>> with warnings.catch_warnings(action="ignore", category=TruncationWarning):  # parameters are point estimates
        ...     result = cross_validate(idata)

    Args:
        idata: from :func:`~pyro_truncated.to_arviz`.
        var_name: variable of ``log_likelihood``; needed if there are several.

    Returns:
        The estimate and its caveats.
    """
    name = var_name or likelihood_name(idata)
    data = get_dataset(idata, "log_likelihood")
    values = data[name].transpose("chain", "draw", ...).values.astype(float)
    # Of one guide all chains hold draws of the same posterior; restarts are one chain each.
    values = values.reshape(int(data.attrs.get("num_restarts", len(values))), -1, *values.shape[2:])
    values = values.reshape(*values.shape[:2], -1)
    conditional_on, is_plug_in = str(data.attrs.get("conditional_on", "")), bool(data.attrs.get("point_estimates_only", 0))
    # Ratios that do not vary need no importance sampling, and have no tail to be fitted.
    if (is_plug_in and not conditional_on) or np.ptp(values, axis=1).max() <= 1e-9 * np.abs(values).max():
        restarts = np.logaddexp.reduce(values, axis=1) - np.log(values.shape[1])
        pointwise = restarts[restarts.sum(1).argmax()]
        error = float(np.sqrt(len(pointwise) * pointwise.var()))
        return CrossValidation(float(pointwise.sum()), error, 0.0, pointwise, np.zeros(len(pointwise)), True, conditional_on, len(values))
    return CrossValidation(*compat.loo(idata, name), is_plug_in, conditional_on)


@names_arguments
def compare_models(idatas: Mapping[str, Any], *, var_names: Mapping[str, str] | None = None) -> Any:
    """Compares models by PSIS-LOO on the marginal likelihood of the same data.

    Problems of the comparison are reported too. Densities compare with densities and probabilities with probabilities. Adding uniform noise
    to binary data gives a lower bound of the log probability under the discretised model.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> idata = to_arviz(model, guide, y, num_samples=25)
        >>> smaller = BinarySparseCoding(9, 3).initialize(y)
        >>> other = to_arviz(smaller, AutoTruncated(smaller, 8).infer(y, ExhaustiveSearch(), steps=1), y, num_samples=25)
        >>> with warnings.catch_warnings(action="ignore"):  # parameters are point estimates
        ...     table = compare_models({"six": idata, "three": other})
        >>> sorted(table.index)
        ['six', 'three']

    Args:
        idatas: by model, from :func:`~pyro_truncated.to_arviz`, of the same data points in the same order.
        var_names: variables of ``log_likelihood`` by model. Needed where there are several.

    Returns:
        ``arviz.compare``'s table, best first, with two columns more. ``missing_nats`` is a lower bound on what each
        model's log likelihood lacks because of its populations (from the certificate). The other is ``plug_in``.

    Raises:
        ValueError: if there are fewer than two models, or they differ in the number of observations.

    Warns:
        TruncationWarning: naming the caveats of each model, and if more is missing than the models differ by.
    """
    if len(idatas) < 2:
        raise ValueError(f"idatas must hold at least two models; got {list(idatas)}")
    names = {model: (var_names or {}).get(model) or likelihood_name(idata) for model, idata in idatas.items()}
    results = {model: cross_validate(idata, var_name=names[model]) for model, idata in idatas.items()}
    sizes = {model: len(result.pointwise) for model, result in results.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"idatas must be of the same data; got {sizes} observations")
    table = compat.compare({model: _convert_for_arviz(idata, names[model], results[model]) for model, idata in idatas.items()}, names)
    table["missing_nats"] = [missing_nats(idatas[model]) for model in table.index]
    table["plug_in"] = [results[model].is_plug_in for model in table.index]
    every = dict.fromkeys(caveat for result in results.values() for caveat in result.caveats)
    caveats = [f"{', '.join(model for model in results if caveat in results[model].caveats)}: {caveat}." for caveat in every]
    best, second = (results[model] for model in table.index[:2])
    missing = np.fmax.reduce(table["missing_nats"].to_numpy())
    if missing > 0 and not missing <= abs(best.elpd - second.elpd):
        caveats.append(f"a model's likelihood lacks at least {missing:.1f} nats by truncation, more than the two best differ by.")
    if caveats:
        warnings.warn("read this comparison with care. " + " ".join(caveats), TruncationWarning, stacklevel=2)
    return table


def _convert_for_arviz(idata: Any, name: str, result: CrossValidation) -> Any:
    """Returns data for ArviZ, plug-in estimates as a chain of equal draws."""
    if not result.is_plug_in or result.conditional_on:
        return idata
    one = {group: get_dataset(idata, group).isel(chain=[0]) for group in ("posterior", "log_likelihood")}
    likelihood = one["log_likelihood"][name].transpose("chain", "draw", ...)
    terms = np.broadcast_to(result.pointwise.reshape(likelihood.shape[2:]), likelihood.shape)
    one["log_likelihood"] = one["log_likelihood"].assign({name: likelihood.copy(data=terms.copy())})
    return compat.make_idata(**one)


def missing_nats(idata: Any) -> float:
    r""":math:`-\sum_n \log c_n` of the best guide, which populations lack at least."""
    if "truncated_posterior" not in group_names(idata):
        return float("nan")
    data = get_dataset(idata, "truncated_posterior")
    if "support_mass_bound" not in data:
        return float("nan")
    bound = data["support_mass_bound"].values.reshape(data.sizes.get("chain", 1), -1)
    return float(-np.log(bound).sum(1).max())


Statistic = Callable[[np.ndarray], float]


def _kurtosis(values: np.ndarray) -> float:
    # Other powers than squares take thirty times as long.
    squares = np.square(values - values.mean())
    return float(np.square(squares).mean() / max(squares.mean() ** 2, 1e-300))


STATISTICS: dict[str, Statistic] = {"mean": np.mean, "standard deviation": np.std, "kurtosis": _kurtosis, "maximum": np.max}
# Of fewer values they are the same whatever these are, which says nothing.
_LEAST_VALUES = {"standard deviation": 2, "kurtosis": 4}


@names_arguments
def loo_pit(idata: Any, *, name: str | None = None, seed: int = 0) -> np.ndarray:
    r"""Leave-one-out probability integral transforms, feature by feature.

    :math:`u_{nd} = P(\tilde y_{nd} < y_{nd} \mid y_{-n}) + v P(\tilde y_{nd} = y_{nd} \mid y_{-n})` with uniform :math:`v`, for counts and
    binary values too. :math:`\tilde y` are *new* data points (the group ``marginal_predictive``): repeated ones have seen :math:`y_n`
    through their states. The weights of the draws are those of PSIS-LOO on the marginal likelihood. If the model is right, the transforms
    of each feature are uniform on [0, 1].

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> idata = to_arviz(model, guide, y, num_samples=25)
        >>> with warnings.catch_warnings(action="ignore"):  # parameters are point estimates
        ...     loo_pit(idata).shape
        (20, 9)

    Args:
        idata: from :func:`~pyro_truncated.to_arviz`.
        name: observed site; needed if there are several.
        seed: of the uniform numbers.

    Returns:
        ``(N, features)``; NaN where the observation is missing (NaN).

    Raises:
        ValueError: if a group is missing or the site is not clear.
    """
    seed = check_count("seed", seed, 0)
    group = new_data_group(idata)
    if group is None:
        raise ValueError("the data have no group marginal_predictive; call to_arviz with num_predictive > 0")
    name = name or observed_name(idata, group)
    observed = get_dataset(idata, "observed_data")[name].values
    samples = get_dataset(idata, group)[name].values
    samples = samples.reshape(-1, *samples.shape[2:])
    likelihood = get_dataset(idata, "log_likelihood")[likelihood_name(idata)].values
    chains = len(likelihood)
    # The predictive draws go with the first draws of each chain.
    likelihood = likelihood[:, : len(samples) // chains].reshape(len(samples), -1)
    num_data = likelihood.shape[1]
    observed, samples = observed.reshape(num_data, -1), samples.reshape(len(samples), num_data, -1)
    weights = np.exp(compat.pareto_smooth(-likelihood.T)[0]).T
    weights /= weights.sum(0)
    below, equal = (np.einsum("dn,dnf->nf", weights, is_counted) for is_counted in (samples < observed, samples == observed))
    # As a rank among the draws, so that a finite number of them does not spoil uniformity.
    count, uniform = len(samples), np.random.default_rng(seed).random(observed.shape)
    ranks = (count * below + uniform * (count * equal + 1)) / (count + 1)
    return np.asarray(np.where(np.isnan(observed), np.nan, ranks))


def new_data_group(idata: Any) -> str | None:
    """Returns the group of draws for unseen data points, or ``None``."""
    # Where data points have no latents of their own, nothing has seen them but the parameters.
    return next((group for group in ("marginal_predictive", "posterior_predictive") if group in group_names(idata)), None)


def observed_name(idata: Any, group: str) -> str:
    """The observed site that a predictive group is about."""
    shared = [str(name) for name in get_dataset(idata, group).data_vars if name in get_dataset(idata, "observed_data")]
    if len(shared) != 1:
        raise ValueError(f"{group} holds the observed sites {shared}; choose one by name")
    return shared[0]


@names_arguments
def predictive_p_values(
    idata: Any, *, group: str = "posterior_predictive", name: str | None = None, statistics: Mapping[str, Statistic] | None = None
) -> dict[str, float]:
    r"""Returns predictive p-values :math:`P(T(\tilde y) \ge T(y))`, with ties by half.

    Near 0 or 1 the model cannot reproduce the statistic. Of ``S`` draws p-values are at least :math:`\tfrac12 / (S + 1)`.

    Those of ``posterior_predictive`` are conservative, because repeated data points have seen the data; ``marginal_predictive`` is the
    sharper check.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> idata = to_arviz(model, guide, y, num_samples=25)
        >>> all(0 <= p <= 1 for p in predictive_p_values(idata).values())
        True

    Args:
        idata: from :func:`~pyro_truncated.to_arviz`.
        group: predictive group.
        name: observed site; needed if there are several.
        statistics: functions of the array of all observed values. Default: mean, standard deviation, kurtosis, maximum; of one value no
            deviation, of up to three no kurtosis.

    Returns:
        P-values by statistic.
    """
    name = name or observed_name(idata, group)
    observed = get_dataset(idata, "observed_data")[name].values
    is_observed = ~np.isnan(observed) if np.issubdtype(observed.dtype, np.floating) else np.ones(observed.shape, dtype=bool)
    samples = get_dataset(idata, group)[name].values
    samples = samples.reshape(-1, *samples.shape[2:])
    # Single precision has no squares of large numbers, nor of small ones.
    kind = float if np.issubdtype(observed.dtype, np.floating) else observed.dtype
    told = {label: one for label, one in STATISTICS.items() if is_observed.sum() >= _LEAST_VALUES.get(label, 1)}
    chosen, result = statistics or told, {}
    rows = (values[is_observed].astype(kind) for values in (observed, *samples))
    found = np.array([[statistic(row) for statistic in chosen.values()] for row in rows])
    for label, (own, *others) in zip(chosen, found.T, strict=True):
        result[label] = float((np.greater(others, own).sum() + 0.5 * (np.equal(others, own).sum() + 1)) / (len(others) + 1))
    return result
