"""Training of spike-and-slab models on all data at once."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from pyro.contrib.gp import kernels
from pyro.contrib.gp.kernels import Isotropy
from torch import Tensor

from pyro_truncated.gp.kernels import LinearARD
from pyro_truncated.gp.optimization import minimize
from pyro_truncated.gplvm.principal_components import principal_components
from pyro_truncated.gplvm.spike_slab.model import SpikeSlabMRD, Views
from pyro_truncated.gplvm.spike_slab.view import View
from pyro_truncated.utils.arguments import check_count, check_kinds, names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.devices import generator_device
from pyro_truncated.utils.parameter_store import load_snapshot, snapshot

Start = str | Tensor | Callable[[list[Tensor]], Tensor]
STARTS = ("pca", "random")


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
    if not bool((centred != 0).any()):
        raise ValueError(f"view {c} of y does not vary (its outputs are constant, or all missing): there is nothing to learn from it")
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
    raise ValueError(f"start must be one of {STARTS}, latent means (N, Q), or a function that makes them; got {start!r}")


def _start_view(view: View, loc: Tensor, variance: Tensor, generator: torch.Generator | None, *, noise_share: float = 0.01) -> None:
    if view.likelihood is None:
        view.noise = (noise_share * variance).to(view.noise)
    elif view.collapsed:
        view.point = view.center.double().expand_as(view.point).clone()
    # Functions of labels are log odds or the like, whatever the variance of the labels.
    _start_kernel(view.kernel, variance if view.likelihood is None else torch.ones_like(variance))
    if not isinstance(view.kernel, LinearARD):
        order = torch.randperm(len(loc), generator=generator, device=generator_device(generator))
        rows = loc[order[: len(view.inducing)].to(loc.device)]
        # Moved by a hundredth of the prior deviation, as equal inputs have no inverse.
        view.inducing = rows + 1e-2 * _randn(len(rows), rows.shape[1], rows, generator).to(rows)


def _start_kernel(kernel: kernels.Kernel, variance: Tensor) -> None:
    """Gives a single kernel, none of a user's, the variance of data."""
    value = getattr(kernel, "variance", None)
    if isinstance(value, Tensor):
        kernel.variance = (variance / value.numel()).to(value).expand(value.shape).clone()


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
    while steps > 0:
        value, count = _run_lbfgs(model, y, parameters, steps, size, tolerance)
        steps -= max(1, count)
        gain, bound = value - bound, value
        if not gain > tolerance * size:
            break
    return bound


def _run_lbfgs(model: SpikeSlabMRD, y: Views, parameters: Sequence[Tensor], steps: int, size: float, tolerance: float) -> tuple[float, int]:
    """Runs L-BFGS once; returns the bound and the number of iterations."""

    def loss() -> Tensor:
        value = -model.bound(y) / size
        value.backward()
        return value

    minimum = minimize(loss, parameters, max_iterations=steps, tolerance=tolerance / 10, gradient_tolerance=1e-8, memory=20)
    model.zero_grad()
    return -minimum.value * size, minimum.iterations


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
    stretched = [view.kernel for view in model.views if isinstance(view.kernel, Isotropy)]
    for kernel in stretched:
        _stretch(kernel, _STRETCH_FACTOR)
    try:
        yield
    finally:
        for kernel in stretched:
            _stretch(kernel, 1 / _STRETCH_FACTOR)


@torch.no_grad()
def _stretch(kernel: Isotropy, factor: float) -> None:
    lengthscale, variance = torch.as_tensor(kernel.lengthscale), torch.as_tensor(kernel.variance)
    kernel.lengthscale, kernel.variance = factor * lengthscale, factor**2 * variance  # type: ignore[assignment]


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
