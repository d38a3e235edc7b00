"""Training of spike-and-slab models, on all data at once or on minibatches."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from pyro.contrib.gp.kernels import Isotropy
from pyro.infer import ELBO
from torch import Tensor

from pyro_truncated.distributed import collectives
from pyro_truncated.distributed.collectives import agree
from pyro_truncated.distributed.shards import find_part, find_portion, propagate_shard_errors, shard_sum, synchronize_generator
from pyro_truncated.gp.kernels import LinearARD
from pyro_truncated.gp.optimization import minimize
from pyro_truncated.gplvm.principal_components import principal_components
from pyro_truncated.gplvm.spike_slab.inducing_posterior import InducingPosterior
from pyro_truncated.gplvm.spike_slab.model import SpikeSlabMRD, Views
from pyro_truncated.gplvm.spike_slab.view import View
from pyro_truncated.utils.arguments import check_count, check_kinds, check_learning_rate, names_arguments
from pyro_truncated.utils.arrays import takes_arrays, warn_about_noise_of_columns
from pyro_truncated.utils.devices import generator_device
from pyro_truncated.utils.parameter_store import load_snapshot, snapshot

Start = str | Tensor | Callable[[list[Tensor]], Tensor]


@names_arguments
@takes_arrays
@torch.no_grad()
def initialize(model: SpikeSlabMRD, y: Views, start: Start = "pca", generator: torch.Generator | None = None) -> None:
    """Sets all parameters to a starting point.

    Outputs are centred. Latent means are standardised principal components of all views side by side, each over its deviation and the root
    of its number of outputs, or draws from the prior. Inducing inputs are latent means of random data points. The noise starts at a
    hundredth of the variance of the data, kernels at that variance, switches at their prior odds.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> initialize(model, y, start="random", generator=torch.Generator().manual_seed(0))

    Args:
        model: the model.
        y: its data.
        start: ``"pca"``, ``"random"``, latent means ``(N, Q)``, or a function that makes them from the views (centred, complete).
        generator: source of randomness.

    Raises:
        ValueError: if the start is unknown or misshapen, or a view is constant.

    Warns:
        UserWarning: if one noise does not suit the columns of a view: units are unlike, or most do not vary.
    """
    views = model.check_data(y)
    complete = [_prepare(c, view, data) for c, (view, data) in enumerate(zip(model.views, views, strict=True))]
    loc = _latent_means(start, complete, model.num_latents, generator)
    if loc.shape != (model.num_data, model.num_latents) or not bool(loc.isfinite().all()):
        expected = model.num_data, model.num_latents
        raise ValueError(f"start must give finite latent means of shape {expected}; got {tuple(loc.shape)}")
    # Copies: training goes on in place, and the user's start must stay one for the next run.
    model.set_latents(loc, torch.full_like(loc, 0.3))
    model.logits = model.prior.logit()
    model.num_steps.zero_()
    for view, data in zip(model.views, complete, strict=True):
        _start_view(view, model.loc.detach(), data.square().mean(), generator)


def _prepare(c: int, view: View, y: Tensor) -> Tensor:
    """Centres a view; returns its data with zeros where missing."""
    numbers = y if view.likelihood is None else view.likelihood.as_numbers(y)
    mean = numbers.nanmean(0).nan_to_num()
    view.center = (mean if view.likelihood is None else view.likelihood.base(y)).to(view.center)
    centred = (numbers - mean).double().nan_to_num()
    if not bool((centred.square() != 0).any()):
        raise ValueError(
            f"view {c} of y does not vary (its outputs are constant, all missing, or so small that squares are zero): there is nothing to "
            "learn from it"
        )
    if view.likelihood is None:
        warn_about_noise_of_columns(f"view {c} of the data", mean, centred.square().sum(0) / (~y.isnan()).sum(0).clamp(min=1))
    return centred


def _latent_means(start: Start, views: list[Tensor], num_latents: int, generator: torch.Generator | None) -> Tensor:
    if isinstance(start, Tensor):
        return start
    if callable(start):
        return start(views)
    if start == "pca":
        return principal_components(torch.cat([v / (v.square().mean() * v.shape[1]).sqrt() for v in views], 1), num_latents, generator)
    if start == "random":
        return _randn(len(views[0]), num_latents, views[0], generator)
    raise ValueError(f"start must be one of ('pca', 'random'), latent means (N, Q), or a function that makes them; got {start!r}")


def _start_view(view: View, loc: Tensor, variance: Tensor, generator: torch.Generator | None, *, noise_share: float = 0.01) -> None:
    if view.likelihood is None:
        view.noise = (noise_share * variance).to(view.noise)
    elif view.collapsed:
        view.point = view.center.double().expand_as(view.point).clone()
    # Functions of labels are log odds or the like, whatever the variance of the labels.
    amplitude, kernel_variance = variance if view.likelihood is None else torch.ones_like(variance), getattr(view.kernel, "variance", None)
    if isinstance(kernel_variance, Tensor):  # of a sum or product of a user's there is none
        view.kernel.variance = (amplitude / kernel_variance.numel()).to(kernel_variance).expand(kernel_variance.shape).clone()
    if not isinstance(view.kernel, LinearARD):
        order = torch.randperm(len(loc), generator=generator, device=generator_device(generator))
        rows = loc[order[: len(view.inducing)].to(loc.device)]
        # Moved by a hundredth of the prior deviation, as equal inputs have no inverse.
        view.inducing = rows + 1e-2 * _randn(len(rows), rows.shape[1], rows, generator).to(rows)


def _randn(rows: int, columns: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = like.device if generator is None else generator.device
    return torch.randn(rows, columns, generator=generator, device=device, dtype=torch.float64).to(like.device)


@names_arguments
@takes_arrays
def maximize_bound(model: SpikeSlabMRD, y: Views, steps: int = 500, *, tolerance: float = 1e-5, fixed: Sequence[str] = ()) -> float:
    """Raises the bound by L-BFGS with all data, but for held switches.

    A line search that fails ends a run of L-BFGS. The next one starts without memory of the curvature, until one of them gains nothing.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> initialize(model, y)
        >>> before, after = maximize_bound(model, y, steps=1), maximize_bound(model, y, steps=10)
        >>> after >= before
        True

    Args:
        model: the model.
        y: its data.
        steps: iterations at most.
        tolerance: gain per observed number below which it ends.
        fixed: parts of the names of parameters that stay as they are.
            For example ``"noise"``.

    Returns:
        The bound, never below that of the start.
    """
    steps = check_count("steps", steps, least=0)
    check_kinds(maximize_bound, tolerance=tolerance)
    size = float(sum(v.numel() for v in model.check_data(y)))
    parameters = [p for name, p in model.named_parameters() if p.requires_grad and not any(part in name for part in fixed)]
    with torch.no_grad():
        if not any("point" in part for part in fixed):
            model.tighten(y)
        bound = float(model.bound(y))

    def loss() -> Tensor:
        value = -model.bound(y) / size
        value.backward()
        return value

    while steps > 0:
        minimum = minimize(loss, parameters, max_iterations=steps, tolerance=tolerance / 10, gradient_tolerance=1e-8, memory=20)
        model.zero_grad()
        steps -= max(1, minimum.iterations)
        value = -minimum.value * size
        gain, bound = value - bound, value
        if not gain > tolerance * size:
            break
    return bound


# Log odds of switches that are free again after they have been held on, and of moves.
NEARLY_ON = 3.0
_SURE_LOG_ODDS = 12.0


@names_arguments
@takes_arrays
def switch_log_odds(model: SpikeSlabMRD, y: Views) -> Tensor:
    r"""Returns optimal log odds of every switch, ``(C, Q)``, given the other posteriors.

    At a fixed posterior of the inducing variables, the expected log likelihood is linear in each :math:`\gamma_{cq}`, so that

    .. math:: \mathrm{logit}\,\gamma_{cq} = \mathrm{logit}\,\pi_{cq} + \partial E / \partial\gamma_{cq}
              - \textstyle\prod_{c' \ne c} (1 - \gamma_{c'q}) \sum_n \mathrm{KL}_{nq}

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> switch_log_odds(model, y).shape
        torch.Size([1, 3])
    """
    views = model.check_data(y)
    gamma = model.probability.detach().clone().requires_grad_()
    with torch.enable_grad(), model.fix_switches(gamma):
        terms = [view.data_term(model.inputs(c), data) for c, (view, data) in enumerate(zip(model.views, views, strict=True))]
        slope = torch.autograd.grad(torch.stack(terms).sum(), gamma)[0]
    with torch.no_grad():
        others = torch.stack([(1 - gamma)[torch.arange(len(gamma)) != c].prod(0) for c in range(len(gamma))])
        return model.prior.logit() + slope - others * model.latent_divergence()


@names_arguments
@takes_arrays
def update_switches(model: SpikeSlabMRD, y: Views) -> float:
    """Sets switches in turn to their optimal probabilities; returns the bound.

    The bound never falls. All at once is tried first, which mostly serves.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> bound = update_switches(model, y)
    """
    with torch.no_grad():
        before, start = float(model.bound(y)), model.logits.detach().clone()
        model.logits = switch_log_odds(model, y)
        after = float(model.bound(y))
        if after >= before:
            return after
        model.logits = start
        for c, q in itertools.product(range(model.num_views), range(model.num_latents)):
            updated = model.logits.detach().clone()
            updated[c, q] = switch_log_odds(model, y)[c, q]
            model.logits = updated
        return float(model.bound(y))


@names_arguments
@takes_arrays
def settle_switches(model: SpikeSlabMRD, y: Views) -> float:
    r"""Sets switches to their optima, undecided ones off; returns the bound.

    A dimension that a view's kernel has removed does not change the likelihood. The optimum of its switch is then the prior :math:`\pi`,
    :math:`-\log(1 - \pi)` nats above "off", though nothing is on. Such a switch, and one that is less probable than at first, is turned off
    for certain.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> bound = settle_switches(model, y)
    """
    update_switches(model, y)
    with torch.no_grad():
        # Evidence, in nats, that counts as none.
        silent = model.logits <= model.prior.logit() + 0.05
        model.logits = torch.where(silent, -_SURE_LOG_ODDS, model.logits)
        return float(model.bound(y))


@names_arguments
@takes_arrays
@torch.no_grad()
def switch_moves(model: SpikeSlabMRD, y: Views) -> float:
    """Tries every switch fully on and off; returns the bound.

    The inducing variables are adapted, and what raises the bound is kept.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> bound = switch_moves(model, y)
    """
    bound = float(model.bound(y))
    for c, q in itertools.product(range(model.num_views), range(model.num_latents)):
        now = model.logits.detach().clone()
        # A switch that is sure already is only tried the other way.
        for value in (v for v in (-_SURE_LOG_ODDS, _SURE_LOG_ODDS) if v * float(now[c, q]) < _SURE_LOG_ODDS**2):
            trial = now.clone()
            trial[c, q] = value
            model.logits = trial
            new_bound = float(model.bound(y))
            if new_bound > bound:
                bound, now = new_bound, trial
        model.logits = now
    return bound


@names_arguments
@takes_arrays
def remove_dimensions(model: SpikeSlabMRD, y: Views, steps: int = 40, *, patience: int = 2, tolerance: float = 1e-5) -> float:
    """Switches dimensions off in views, least relevant first; returns the bound.

    A switch stays off if the bound rises after latents, kernels and noise got some quasi-Newton iterations to replace the dimension. For
    curved data that is often better than a dimension for every bend. Switches are fully on or off meanwhile, and afterwards.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> bound = remove_dimensions(model, y, steps=3)

    Args:
        model: the model.
        y: its data.
        steps: iterations after each removal, and at first for the model that it is compared with.
        patience: removals in a row that may fail before it ends.
        tolerance: gain per observed number below which iterations end.
    """
    is_on, failed = model.probability.detach() > 0.5, 0
    required = torch.zeros_like(is_on)
    with model.fix_switches(is_on.double()):
        bound = maximize_bound(model, y, steps, tolerance=tolerance)
    while failed < patience and bool((is_on & ~required).any()):
        with model.fix_switches(1.0):
            relevance = model.relevance()
        share = torch.where(is_on & ~required, relevance / relevance.amax(1, keepdim=True), math.inf)
        before, trial = snapshot(model.state_dict().values()), is_on.clone()
        trial.view(-1)[share.argmin()] = False
        with model.fix_switches(trial.double()):
            new_bound = maximize_bound(model, y, steps, tolerance=tolerance)
        if new_bound > bound:
            bound, is_on, failed = new_bound, trial, 0
        else:
            load_snapshot(model.state_dict().values(), before)
            required, failed = required | (is_on & ~trial), failed + 1
    with torch.no_grad():
        model.logits = torch.where(is_on, _SURE_LOG_ODDS, -_SURE_LOG_ODDS).to(model.logits)
    return bound


# How much longer length-scales are at first, and how much more gain of the bound is asked of an iteration then.
_STRETCH_FACTOR = 3.0


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a training went.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> isinstance(result.bound, float), result.is_all_noise
        (True, False)

    Attributes:
        bound: the bound of the model as it is left, with switches at zero that nothing speaks for (:func:`settle_switches`).
        starts: the bound that each start reached, in order, before switches were settled.
        history: bounds after each phase of the best start.
        is_all_noise: whether the best start has ended with every dimension switched off in every view, its data explained as noise.
    """

    bound: float
    starts: list[float]
    history: list[float]
    is_all_noise: bool = False


@names_arguments
@takes_arrays
def fit(
    model: SpikeSlabMRD,
    y: Views,
    *,
    start: Start = "pca",
    num_starts: int = 1,
    steps: int = 500,
    warm_up: int = 500,
    rounds: int = 4,
    removal_steps: int = 0,
    tolerance: float = 1e-5,
    generator: torch.Generator | None = None,
) -> Fit:
    r"""Trains a model on all data, from its starting point on.

    At first all switches are held on and length-scales long, so that latents find the directions of the data as in a linear model. Then
    switches at their optimum and quasi-Newton steps take turns; every switch is tried on and off. If asked for, whole dimensions are then
    removed where that raises the bound (:func:`remove_dimensions`). The model takes the best of several restarts by the bound. A switch
    that the data do not support is set exactly to zero (:func:`settle_switches`).

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = fit(model, y, steps=5, warm_up=5, rounds=1)

    Args:
        model: the model; holds the parameters of the best start afterwards.
        y: its data.
        start: see :func:`~pyro_truncated.gplvm.initialize`.
        num_starts: number of starts; more than one makes sense where a start is random, also through its inducing inputs.
        steps: quasi-Newton iterations of each round.
        warm_up: quasi-Newton iterations with all switches on.
        rounds: most rounds of switches and quasi-Newton steps.
        removal_steps: quasi-Newton iterations after each removal of a dimension that is tried; 0 tries none.
        tolerance: gain per observed number below which a phase ends.
        generator: source of randomness.

    Returns:
        The bounds reached.

    Raises:
        ValueError: if a count is out of range, or the data do not fit the model.
    """
    numbers = {"steps": steps, "warm_up": warm_up, "rounds": rounds, "removal_steps": removal_steps}
    steps, warm_up, rounds, removal_steps = (check_count(name, number, least=0) for name, number in numbers.items())
    num_starts = check_count("num_starts", num_starts)
    check_kinds(fit, tolerance=tolerance)
    bounds: list[float] = []
    best: tuple[list[Tensor], list[float]] | None = None
    # What initialisation leaves alone, length-scales for instance, is at every start what it was at the first.
    before = snapshot(model.state_dict().values())
    for _ in range(num_starts):
        load_snapshot(model.state_dict().values(), before)
        initialize(model, y, start, generator)
        history = _train(model, y, steps, warm_up, rounds, tolerance)
        if removal_steps:
            remove_dimensions(model, y, removal_steps, tolerance=tolerance)
            update_switches(model, y)
            history.append(maximize_bound(model, y, steps, tolerance=tolerance))
        bounds.append(history[-1])
        if best is None or bounds[-1] == max(bounds):
            best = snapshot(model.state_dict().values()), history
    assert best is not None
    load_snapshot(model.state_dict().values(), best[0])
    bound = settle_switches(model, y)
    is_all_noise = bool((model.probability < 0.5).all())
    return Fit(bound, bounds, best[1], is_all_noise)


@contextmanager
def _nearly_linear(model: SpikeSlabMRD) -> Iterator[None]:
    """A context with long length-scales and steep variances: functions hardly bend."""

    @torch.no_grad()
    def stretch(factor: float) -> None:
        for kernel in (view.kernel for view in model.views if isinstance(view.kernel, Isotropy)):
            lengthscale, variance = torch.as_tensor(kernel.lengthscale), torch.as_tensor(kernel.variance)
            kernel.lengthscale, kernel.variance = factor * lengthscale, factor**2 * variance  # type: ignore[assignment]

    stretch(_STRETCH_FACTOR)
    try:
        yield
    finally:
        stretch(1 / _STRETCH_FACTOR)


def _train(
    model: SpikeSlabMRD, y: Views, steps: int, warm_up: int, rounds: int, tolerance: float, *, first_factor: float = 30.0
) -> list[float]:
    """The phases of one start; returns the bound after each."""
    size = float(sum(v.numel() for v in model.check_data(y)))
    with model.fix_switches(1.0):
        # With the noise held low as well: else the easiest way up is often to call everything noise.
        with _nearly_linear(model):
            maximize_bound(model, y, warm_up, tolerance=first_factor * tolerance, fixed=("noise", "kernel"))
        maximize_bound(model, y, warm_up, tolerance=tolerance, fixed=("noise",))
        history = [maximize_bound(model, y, warm_up, tolerance=tolerance)]
    with torch.no_grad():
        model.logits = torch.full_like(model.logits, NEARLY_ON)
    for _ in range(rounds):
        update_switches(model, y)
        switch_moves(model, y)
        update_switches(model, y)
        history.append(maximize_bound(model, y, steps, tolerance=tolerance))
        if len(history) > 2 and history[-1] - history[-2] <= tolerance * size:
            break
    return history


# Parameters with a row per data point.
_LOCAL = ("loc", "scale")


@dataclasses.dataclass(frozen=True)
class Minibatch:
    """Data points of a minibatch."""

    positions: Tensor | slice  # where those of this process lie among the latents of all
    rows: Tensor | slice  # where they lie among its data
    scale: float  # number of all data points per one in the minibatch
    share: float = 1.0  # of this process in what belongs to no data point
    total: Callable[[Sequence[Tensor]], list[Tensor]] = list  # sums over processes


def draw_minibatch(model: Any, views: Sequence[Tensor], size: int, generator: torch.Generator | None) -> Minibatch:
    """A random minibatch, the same for any number of processes."""
    portion = find_part(views)
    index = torch.randperm(model.num_data, generator=generator, device=generator_device(generator))[:size].to(model.loc.device)
    scale = model.num_data / len(index)
    if portion is None:
        return Minibatch(index, index, scale)
    own = index[portion.holds(index)]
    return Minibatch(own, own - portion.first, scale, 1 / collectives.size(), shard_sum(views[0]))


def add_gradients(model: torch.nn.Module, batch: Minibatch) -> None:
    """Sums gradients over processes, except data points' parameters, in one message."""
    if batch.total is list:
        return
    shared = [p for name, p in model.named_parameters() if p.requires_grad and name.removesuffix("_unconstrained") not in _LOCAL]
    has_one = torch.tensor([p.grad is not None for p in shared], dtype=torch.float64)
    has_one, *gradients = batch.total([has_one, *(torch.zeros_like(p) if p.grad is None else p.grad for p in shared)])
    for parameter, gradient, is_known in zip(shared, gradients, has_one.bool().tolist(), strict=True):
        # Where there is none, the optimiser takes no step.
        parameter.grad = gradient if is_known else None


@torch.no_grad()
def gather_latent_marginals(model: torch.nn.Module, views: Sequence[Tensor]) -> None:
    """Gives every process the latents of all data points."""
    portion = find_portion(views)
    assert portion is not None
    for name, parameter in model.named_parameters():
        if name.removesuffix("_unconstrained") in _LOCAL:
            parameter.copy_(torch.cat(collectives.gather(parameter[portion.first : portion.first + portion.size].detach().clone())))


_INDUCING = (".mean", ".scale_tril")


@names_arguments
@takes_arrays
def natural_step(model: SpikeSlabMRD, y: Views, index: Tensor | slice = slice(None), rate: float = 1.0) -> None:
    r"""Moves the inducing variables' posteriors along the natural gradient.

    Let :math:`\Lambda = S^{-1}` and :math:`\eta = \Lambda m` be those of the whitened inducing variables. Then :math:`\Lambda \leftarrow (1
    - \rho) \Lambda + \rho (I + \beta \bar\Psi_2)` and :math:`\eta \leftarrow (1 - \rho) \eta + \rho (\beta\Psi_1^\top Y)`, with sums scaled
    up to all data. With all data and :math:`\rho = 1` this is the optimum if nothing is missing.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> natural_step(explicit_copy(model, y), y)

    Args:
        model: a model with ``collapsed=False``.
        y: all data.
        index: the data points to use.
        rate: :math:`\rho`, above 0 and at most 1.

    Raises:
        ValueError: if the model is collapsed or the rate is out of range.

    Reference:
        Hensman, Fusi and Lawrence, "Gaussian processes for big data" (2013).
    """
    if model.collapsed:
        raise ValueError("the inducing variables of a collapsed model are at their optimum already; use collapsed=False")
    if not 0 < rate <= 1:
        raise ValueError(f"rate must lie in (0, 1]; got {rate}")
    views = model.check_data(y)
    _natural_step(model, Minibatch(index, index, model.num_data / len(views[0][index])), views, rate)


@torch.no_grad()
def _natural_step(model: SpikeSlabMRD, batch: Minibatch, views: list[Tensor], rate: float) -> None:
    for c, (view, outputs) in enumerate(zip(model.views, views, strict=True)):
        posterior, data = view.explicit(), outputs[batch.rows]
        with torch.enable_grad():
            mean, covariance = (v.detach().requires_grad_() for v in (posterior.mean, posterior.covariance))
            updated = InducingPosterior(posterior.cholesky.detach(), mean, covariance)
            expected = 0.0 * (mean.sum() + covariance.sum())
            if len(data):
                expected = expected + batch.scale * view.log_likelihood(model.inputs(c, batch.positions), data, updated).sum()
            by_mean, by_covariance = batch.total(torch.autograd.grad(expected, (mean, covariance)))
        # Twice the curvature of the expected log likelihood of one output: the precision that the data add.
        gain = -(by_covariance + by_covariance.mT) / view.num_functions
        precision = torch.cholesky_inverse(view.scale_tril.double())
        eta = precision @ posterior.mean
        precision = (1 - rate) * precision + rate * (torch.eye(len(gain), dtype=gain.dtype, device=gain.device) + gain)
        eta = (1 - rate) * eta + rate * (by_mean + gain @ posterior.mean)
        factor = torch.linalg.cholesky(precision)
        view.mean = torch.cholesky_solve(eta, factor).to(view.mean).contiguous()
        view.scale_tril = torch.linalg.cholesky(torch.cholesky_inverse(factor)).to(view.scale_tril)


@names_arguments
@takes_arrays
def fit_minibatches(
    model: SpikeSlabMRD,
    y: Views,
    steps: int,
    *,
    batch_size: int = 256,
    learning_rate: float = 0.02,
    rate: float = 0.3,
    switches_from: float = 0.3,
    generator: torch.Generator | None = None,
    callback: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Trains a model on minibatches, from its current parameters.

    Every step draws data points without replacement. It takes a natural-gradient step for the inducing variables and an Adam step, whose
    rate falls to a tenth over the last half, for all other parameters. Switches are held on for a share of the steps.

    Data may be shared out to several processes (:func:`pyro_truncated.distributed.shard`), all of which have the model of all data,
    initialised alike. In the end all have all latents.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> bounds = fit_minibatches(explicit_copy(model, y), y, steps=3, batch_size=10)

    Args:
        model: a model with ``collapsed=False``, initialised.
        y: its data.
        steps: number of steps.
        batch_size: data points per step.
        learning_rate: of Adam.
        rate: of the natural gradient, at the start. It falls likewise.
        switches_from: share of the steps after which the switches are free.
        generator: source of randomness.
        callback: called with the number of each step and its bound.

    Returns:
        The estimates of the bound.

    Raises:
        ValueError: if the model is collapsed, or a number is out of range.
    """
    steps, batch_size = check_count("steps", steps, least=0), check_count("batch_size", batch_size)
    check_learning_rate(learning_rate)
    check_kinds(fit_minibatches, switches_from=switches_from)
    views = model.check_data(y, takes_shards=True)
    model.check_batch(batch_size)
    free_from, estimates = int(switches_from * steps), []
    with propagate_shard_errors(views):
        if find_part(views) is not None:
            model.load_state_dict(agree(model.state_dict()))
            synchronize_generator(generator)
        parameters = [p for name, p in model.named_parameters() if p.requires_grad and not any(part in name for part in _INDUCING)]
        optimizer = torch.optim.Adam(parameters, lr=learning_rate)
        for step in range(steps):
            decay = 0.1 ** max(0.0, 2 * step / steps - 1)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * decay
            batch = draw_minibatch(model, views, batch_size, generator)
            if step == free_from > 0:
                with torch.no_grad():
                    model.logits = torch.full_like(model.logits, NEARLY_ON)
            with model.fix_switches(1.0) if step < free_from else nullcontext():
                _natural_step(model, batch, views, rate * decay)
                model.zero_grad()
                outputs, latents = [data[batch.rows] for data in views], model.latents(batch.positions)
                bound = model.partial_bound(outputs, latents, batch.scale, batch.share)
            (-bound / model.num_data).backward()
            add_gradients(model, batch)
            optimizer.step()
            estimates.append(float(batch.total([bound.detach()])[0]))
            if callback is not None:
                callback(step, estimates[-1])
        if find_part(views) is not None:
            gather_latent_marginals(model, views)
    return estimates


@names_arguments
@takes_arrays
def explicit_copy(model: SpikeSlabMRD, y: Views) -> SpikeSlabMRD:
    """Returns a collapsed model with explicit inducing variables at their optimum.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> copy = explicit_copy(model, y)  # fit_minibatches trains it
    """
    duplicate = copy.deepcopy(model)
    duplicate.collapsed = False
    for view in duplicate.views:
        view.make_explicit()
    # Local bounds of labels follow the inducing variables, and those follow them: a few turns.
    for _ in range(1 if all(view.likelihood is None for view in duplicate.views) else 20):
        natural_step(duplicate, y)
    return duplicate


class Analytic_ELBO(ELBO):
    r"""Minus the closed-form bound of a model, as loss for ``SVI``.

    Model and guide must be the methods ``model`` and ``guide`` of one object with a method ``bound``, such as
    :class:`~pyro_truncated.gplvm.SpikeSlabGPLVM`. A stock :class:`~pyro.infer.Trace_ELBO` estimates the same number by sampling.

    Training steps on a :class:`~pyro_truncated.gplvm.SpikeSlabMRD` hold its switches: on for the first ``warm_up`` steps, then at their
    optimum in closed form every ``every`` steps (:func:`~pyro_truncated.gplvm.settle_switches`, and
    :func:`~pyro_truncated.gplvm.switch_moves` if collapsed).

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> initialize(model, y)
        >>> svi = SVI(model.model, model.guide, Adam({"lr": 0.01}), Analytic_ELBO(warm_up=2))
        >>> losses = [svi.step(y) for _ in range(3)]

    Args:
        warm_up: number of steps with all switches on. With 0 switches keep their first values.
        every: steps between updates of the switches. ``None`` leaves them to the gradient from the first step on.
    """

    @names_arguments
    def __init__(self, *, warm_up: int = 1000, every: int | None = 25) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.warm_up = check_count("warm_up", warm_up, least=0)
        self.every = None if every is None else check_count("every", every)

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Minus the bound.

        Raises:
            TypeError: if model and guide are not the methods of one object with a bound.
        """
        owner = _owner(model, guide)
        # Within the module's context reading a parameter announces it to SVI.
        with owner._pyro_context:
            return -owner.bound(*args, **kwargs)

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the bound as a number."""
        return float(self.differentiable_loss(model, guide, *args, **kwargs).detach())

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError("Analytic_ELBO draws nothing; use Trace_ELBO for traces")

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Returns minus the bound and adds its gradient to the parameters."""
        with self._switches(_owner(model, guide), *args, **kwargs):
            loss = self.differentiable_loss(model, guide, *args, **kwargs)
        loss.backward()
        return float(loss.detach())

    def _switches(self, owner: Any, y: Any, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        """Begins the next training step: a context that holds the switches."""
        if self.every is None or not isinstance(owner, SpikeSlabMRD):
            return contextlib.nullcontext()
        with owner._pyro_context:
            # Read, so that Pyro's store has it though no gradient reaches it.
            _ = owner.logits
        step = int(owner.num_steps)
        owner.num_steps += 1
        if step < self.warm_up:
            return owner.fix_switches(1.0)
        if step == self.warm_up > 0:
            with torch.no_grad():
                owner.logits = torch.full_like(owner.logits, NEARLY_ON)
        if (step - self.warm_up) % self.every == 0:
            if owner.collapsed:
                switch_moves(owner, y)
            settle_switches(owner, y)
        return owner.fix_switches(owner.probability.detach())


def _owner(model: Any, guide: Any) -> Any:
    owner: Any = getattr(guide, "__self__", guide)
    if owner is not getattr(model, "__self__", model) or not hasattr(owner, "bound"):
        raise TypeError("Analytic_ELBO needs the methods `model` and `guide` of one model that has a method `bound`; see SpikeSlabGPLVM")
    return owner
