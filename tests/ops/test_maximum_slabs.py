"""Spike-and-slab causes under a maximum: exact conditionals against grids, tails, Gibbs sampling against a two-dimensional grid."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.ops.compiled import maximum as compiled_maximum
from pyro_truncated.ops.compiled.compilation import njit
from pyro_truncated.ops.maximum import log_interval, maximum_segments, truncated_standard_normal
from pyro_truncated.ops.vectorised import maximum as vectorised_maximum
from pyro_truncated.ops.vectorised.maximum import log_likelihood

NUM_OBSERVED = 9
POINTS = [-math.inf, -60.0, -45.0, -36.0, -35.5, -31.0, -8.0, -1.0, -1e-9, 0.0, 1e-7, 0.3, 2.0, 7.0, 45.0, 45.3, math.inf]
INTERVALS = [(a, b) for i, a in enumerate(POINTS) for b in POINTS[i + 1 :]]


def draw_problem(kind: str, num_data: int = 12) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Data, offers of other causes, element, precision, slab mean and deviation."""
    value = 3 * torch.randn(num_data, NUM_OBSERVED).double()
    others = (2 * torch.rand(num_data, NUM_OBSERVED) - 0.5).clamp(min=0.0).double()
    element = 2 * torch.rand(num_data, NUM_OBSERVED).double()
    precision = 0.2 + torch.rand(NUM_OBSERVED).double()
    mean, deviation = torch.randn(num_data).double(), 0.3 + torch.rand(num_data).double()
    if kind == "missing":
        value[torch.rand(value.shape) < 0.3] = math.nan
        value[0] = math.nan
    if kind == "nothing to win":
        element[torch.rand(value.shape) < 0.5] = 0.0
        element[0] = 0.0
    if kind == "alone":
        others[:] = 0.0
    if kind == "equal thresholds":
        others, element = others.round(), element.round()
    if kind == "far":
        value, element, precision = 5 * value.abs(), 1 + element, 30 * precision
    return value, others, element, precision, mean, deviation


KINDS = ("competing", "missing", "nothing to win", "alone", "equal thresholds", "far")


def grid_log_density(problem: tuple[Tensor, ...], z: Tensor) -> Tensor:
    """The joint log density of data and slab, written down directly, on ``z (N, G)``."""
    value, others, element, precision, mean, deviation = problem
    total = torch.distributions.Normal(mean.unsqueeze(-1), deviation.unsqueeze(-1)).log_prob(z)
    for d in range(NUM_OBSERVED):
        centre = torch.maximum(others[:, d : d + 1], z * element[:, d : d + 1])
        seen = ~value[:, d : d + 1].isnan()
        normal = torch.distributions.Normal(centre, precision[d].rsqrt())
        total = total + torch.where(seen, normal.log_prob(value[:, d : d + 1].nan_to_num(0.0)), 0.0)
    return total


def grids(problem: tuple[Tensor, ...], size: int = 20_001) -> tuple[Tensor, Tensor]:
    """Where the posterior is above exp(-40) of its maximum, and the log density there."""
    mean, deviation = problem[4].unsqueeze(-1), problem[5].unsqueeze(-1)
    coarse = mean + deviation * torch.linspace(-60, 60, 20_001).double()
    log_density = grid_log_density(problem, coarse)
    is_far = log_density < log_density.amax(1, keepdim=True) - 40
    low, high = (coarse.masked_fill(is_far, sign * math.inf) for sign in (1, -1))
    low, high = low.amin(1, keepdim=True) - 0.01 * deviation, high.amax(1, keepdim=True) + 0.01 * deviation
    z = low + (high - low) * torch.linspace(0, 1, size).double()
    return z, grid_log_density(problem, z)


@functools.cache
def from_python(helper: Any) -> Callable[..., Any]:
    """A helper of compiled kernels, compiled so that Python can call it."""
    return njit(helper.py_func, cache=True)  # type: ignore[no-any-return]


def compiled_log_odds(problem: tuple[Tensor, ...], prior: float) -> Tensor:
    """Log odds of the slab against the spike by the compiled kernel's own parts."""
    value, others, element, precision, mean, deviation = (tensor.numpy() for tensor in problem)
    terms, order, segments = np.empty((4, NUM_OBSERVED + 1)), np.empty(NUM_OBSERVED + 1, np.int64), np.empty((4, NUM_OBSERVED + 2))
    odds = []
    for n in range(len(value)):
        count = from_python(compiled_maximum._win_terms)(value[n], others[n], element[n], precision, terms)
        from_python(compiled_maximum._sort)(terms[0], count, order)
        from_python(compiled_maximum._masses)(terms, order, count, prior, mean[n], deviation[n] ** -2, segments)
        odds.append(np.logaddexp.reduce(segments[3, : count + 1]))
    return torch.tensor(odds)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_conditional_of_one_cause_is_that_of_a_fine_grid(kind: str) -> None:
    problem = draw_problem(kind)
    value, others, _, precision, *_ = problem
    z, log_density = grids(problem)
    weights = (log_density - log_density.amax(1, keepdim=True)).exp()
    mass = torch.trapezoid(weights, z)
    segments = maximum_segments(*problem)
    log_mass = segments.log_masses().logsumexp(-1)
    torch.testing.assert_close(log_mass, mass.log() + log_density.amax(1), rtol=0, atol=1e-6)
    torch.testing.assert_close(segments.mean(), torch.trapezoid(weights * z, z) / mass, rtol=0, atol=1e-6)
    torch.testing.assert_close(segments.log_density(z[:, ::1000].mT), log_density[:, ::1000].mT, rtol=1e-9, atol=1e-9)
    compiled = compiled_log_odds(problem, prior=-0.7)
    # The kernel leaves out what is negligible beside the spike.
    expected = log_mass - 0.7 - log_likelihood(value, others, precision)
    torch.testing.assert_close(compiled.sigmoid(), expected.sigmoid(), rtol=1e-9, atol=1e-14)
    likely = expected > -30
    assert likely.any()
    torch.testing.assert_close(compiled[likely], expected[likely], rtol=1e-9, atol=1e-9)


def log_mass_by_quadrature(lower: float, upper: float) -> float:
    near = min(max(0.0, lower), upper)
    a, b = max(lower, near - 40.0), min(upper, near + 40.0)
    points = [x for x in (near - 1 / (1 + abs(near)), near + 1 / (1 + abs(near))) if a < x < b]

    def density(x: float) -> float:
        # Relative to that at the point nearest to zero, so nothing underflows.
        return math.exp(0.5 * (near - x) * (near + x))

    integral, _ = integrate.quad(density, a, b, points=points or None, epsabs=0, epsrel=1e-12, limit=400)
    return math.log(integral) - 0.5 * near**2 - 0.5 * math.log(2 * math.pi)


def test_normal_masses_are_right_in_the_tails() -> None:
    expected = [log_mass_by_quadrature(lower, upper) for lower, upper in INTERVALS]
    dense = log_interval(*torch.tensor(INTERVALS, dtype=torch.float64).unbind(1)).tolist()
    compiled = [from_python(compiled_maximum.log_interval)(lower, upper) for lower, upper in INTERVALS]
    assert dense == pytest.approx(expected, rel=1e-11, abs=1e-9)
    assert compiled == pytest.approx(expected, rel=1e-11, abs=1e-9)


def test_empty_intervals_have_no_mass() -> None:
    for x in POINTS:
        assert log_interval(torch.tensor(x), torch.tensor(x)).item() == -math.inf
        assert from_python(compiled_maximum.log_interval)(x, x) == -math.inf


@pytest.mark.parametrize("implementation", ["cpu", "dense"])
def test_truncated_normal_inverts_the_distribution_function(implementation: str) -> None:
    quantiles = torch.tensor([1e-12, 1e-5, 0.1, 0.4999, 0.7, 1 - 1e-5], dtype=torch.float64)
    low, high = torch.tensor(INTERVALS, dtype=torch.float64).unsqueeze(1).expand(-1, len(quantiles), -1).unbind(-1)
    if implementation == "cpu":
        numbers = [[from_python(compiled_maximum.truncated_standard_normal)(a, b, u) for u in quantiles.tolist()] for a, b in INTERVALS]
        x = torch.tensor(numbers, dtype=torch.float64)
    else:
        x = truncated_standard_normal(low, high, quantiles)
    assert ((x >= low) & (x <= high)).all()
    below, above = log_interval(low, x), log_interval(x, high)
    share = torch.where(quantiles < 0.5, (below - log_interval(low, high)).exp(), 1 - (above - log_interval(low, high)).exp())
    # How far a quantile moves when x moves by a rounding error.
    density = (-0.5 * x.square() - 0.5 * math.log(2 * math.pi) - log_interval(low, high)).exp()
    slack = 1e-9 + 4e-16 * density * x.abs().clamp(min=1.0)
    assert ((share - quantiles).abs() <= slack).all()


def test_quantile_zero_is_finite() -> None:
    low, high = torch.tensor(INTERVALS, dtype=torch.float64).unbind(1)
    assert truncated_standard_normal(low, high, torch.zeros_like(low)).isfinite().all()
    assert all(math.isfinite(from_python(compiled_maximum.truncated_standard_normal)(lower, upper, 0.0)) for lower, upper in INTERVALS)


def test_draws_follow_the_density() -> None:
    problem = draw_problem("competing", num_data=6)
    z, log_density = grids(problem)
    cumulative = torch.cumulative_trapezoid((log_density - log_density.amax(1, keepdim=True)).exp(), z)
    cumulative = cumulative / cumulative[:, -1:]
    num_draws = 4000
    segments = maximum_segments(
        *(tensor.unsqueeze(1) if tensor.dim() == 2 else tensor for tensor in problem[:3]), problem[3], *_columns(problem)
    )
    segments = type(segments)(*(part.expand(-1, num_draws, -1) for part in segments))
    draws = segments.draw(*torch.rand(2, 6, num_draws).double()).sort(1).values
    position = torch.searchsorted(z[:, 1:].contiguous(), draws).clamp(max=cumulative.shape[1] - 1)
    distance = (cumulative.gather(1, position) - torch.linspace(0, 1, num_draws).double()).abs().amax()
    # Kolmogorov and Smirnov: exceeded with probability 6 * 2 exp(-2 * 2.8**2) = 2e-6 over all seeds.
    assert distance < 2.8 / math.sqrt(num_draws)


def _columns(problem: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    return problem[4].unsqueeze(1), problem[5].unsqueeze(1)


def two_causes() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A data point that two overlapping causes explain, each well on its own: value, weight, precision, log odds, mean, deviation."""
    weight = torch.tensor([[2.0, 0.3], [1.5, 1.4], [0.2, 2.1], [0.8, 0.9]]).double()
    value = torch.tensor([1.9, 1.6, 1.1, 0.9]).double()
    return (
        value,
        weight,
        torch.full((4,), 0.6).double(),
        torch.tensor([-0.8, -0.4]).double(),
        torch.ones(2).double(),
        torch.tensor([0.5, 0.7]).double(),
    )


def pattern_probabilities() -> Tensor:
    """Of the states 00, 10, 01, 11, by a two-dimensional grid."""
    value, weight, precision, log_odds, mean, deviation = two_causes()
    axes = [mean[h] + deviation[h] * torch.linspace(-9, 9, 1501).double() for h in range(2)]
    slabs = [torch.distributions.Normal(mean[h], deviation[h]).log_prob(axes[h]) for h in range(2)]
    offers = [(axes[h].unsqueeze(-1) * weight[:, h]).clamp(min=0.0) for h in range(2)]

    def likelihood(centre: Tensor) -> Tensor:
        return log_likelihood(value, centre, precision)

    both = (likelihood(torch.maximum(offers[0].unsqueeze(1), offers[1])) + slabs[0].unsqueeze(1) + slabs[1]).exp()
    masses = [
        likelihood(torch.zeros(4).double()).exp(),
        torch.trapezoid((likelihood(offers[0]) + slabs[0]).exp(), axes[0]) * log_odds[0].exp(),
        torch.trapezoid((likelihood(offers[1]) + slabs[1]).exp(), axes[1]) * log_odds[1].exp(),
        torch.trapezoid(torch.trapezoid(both, axes[1]), axes[0]) * log_odds.sum().exp(),
    ]
    return torch.stack(masses) / sum(masses)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["cpu", "dense"])
def test_gibbs_samples_the_joint_posterior_of_two_causes(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, weight, *parameters = two_causes()
    copies, burn_in, sweeps = (4000, 30, 60) if implementation == "cpu" else (500, 15, 25)
    selected = torch.stack([torch.randperm(2) for _ in range(copies)])
    values, start = value.expand(copies, -1), torch.zeros(copies, 2).double()
    if implementation == "cpu":
        draws, chances = ops.maximum_slab_gibbs(values, weight, *parameters, selected, start, burn_in=burn_in, sweeps=sweeps)
    else:
        precision, *others = parameters
        prior = [parameter[selected] for parameter in others]
        draws, chances = vectorised_maximum.slab_gibbs(
            values, weight, precision, prior, selected, start, burn_in, sweeps, torch.arange(copies), 5
        )
    is_on = torch.zeros(copies, sweeps, 2).scatter_(2, selected.unsqueeze(1).expand_as(draws), (draws != 0).float())
    patterns = torch.stack([(is_on == torch.tensor(state)).all(-1) for state in ([0, 0], [1, 0], [0, 1], [1, 1])], -1).double().mean(1)
    expected = pattern_probabilities()
    assert expected.min() > 0.02
    # Copies are independent: five standard errors on ten numbers are exceeded with probability 6e-6 over all seeds.
    assert ((patterns.mean(0) - expected).abs() < 5 * patterns.std(0) / math.sqrt(copies)).all()
    marginals = torch.zeros(copies, 2).double().scatter_(1, selected, chances)
    exact = torch.stack([expected[1] + expected[3], expected[2] + expected[3]])
    assert ((marginals.mean(0) - exact).abs() < 5 * marginals.std(0) / math.sqrt(copies)).all()
    # Averages of probabilities vary less than averages of bits.
    assert (marginals.var(0) < is_on.mean(1).var(0)).all()


@pytest.fixture(params=["cpu", "dense"])
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    return compiled_maximum if request.param == "cpu" else vectorised_maximum


@pytest.mark.slow
@pytest.mark.parametrize("with_missing", [False, True])
def test_statistics_are_their_definition(kernels: ModuleType, with_missing: bool) -> None:
    value, weight = torch.randn(5, 4).double(), torch.rand(4, 6).double()
    if with_missing:
        value[torch.rand(value.shape) < 0.3] = math.nan
    selected = torch.stack([torch.randperm(6)[:3] for _ in range(5)])
    draws = torch.randn(5, 2, 3).double() * (torch.rand(5, 2, 3) < 0.6)
    products, squares, errors = torch.zeros(4, 6).double(), torch.zeros(4, 6).double(), torch.zeros(4).double()
    for n in range(5):
        for s in range(2):
            for d in range(4):
                if value[n, d].isnan():
                    continue
                offers = torch.stack([draws[n, s, k] * weight[d, selected[n, k]] for k in range(3)])
                errors[d] += (value[n, d] - offers.max().clamp(min=0.0)) ** 2
                if offers.max() > 0:
                    k = int(offers.argmax())
                    products[d, selected[n, k]] += value[n, d] * draws[n, s, k]
                    squares[d, selected[n, k]] += draws[n, s, k] ** 2
    torch.testing.assert_close(kernels.slab_statistics(value, selected, draws, weight), (products, squares, errors), rtol=1e-12, atol=1e-12)
    means = ops.maximum_slab_statistics(value, weight, selected, draws)
    torch.testing.assert_close(means, (products / 2, squares / 2, errors / 2), rtol=1e-12, atol=1e-12)


def test_draws_depend_on_the_generator_only() -> None:
    value, weight, *parameters = two_causes()
    selected, start = torch.tensor([[0, 1]]).expand(50, -1), torch.zeros(50, 2)
    values = value.expand(50, -1)

    def run(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return ops.maximum_slab_gibbs(values, weight, *parameters, selected, start, burn_in=1, sweeps=2, generator=generator)

    before = torch.get_rng_state()
    torch.testing.assert_close(run(1), run(1), rtol=0, atol=0)
    assert not torch.equal(run(1)[0], run(2)[0])
    assert torch.equal(torch.get_rng_state(), before)
    # A data point's stream does not depend on how many others there are, only on its position.
    generator = torch.Generator().manual_seed(1)
    few = ops.maximum_slab_gibbs(values[:7], weight, *parameters, selected[:7], start[:7], burn_in=1, sweeps=2, generator=generator)
    assert torch.equal(few[0], run(1)[0][:7])


def test_bad_input_is_refused() -> None:
    value, weight, *parameters = two_causes()
    value, selected, start = value.unsqueeze(0), torch.tensor([[0, 1]]), torch.zeros(1, 2)

    def run(**changes: object) -> None:
        arguments = {"value": value, "weight": weight, "selected": selected, "coefficients": start, "burn_in": 0, "sweeps": 1, **changes}
        names = ("precision", "log_odds", "slab_mean", "slab_deviation")
        ops.maximum_slab_gibbs(**dict(zip(names, parameters, strict=True)), **arguments)

    run()
    for message, changes in {
        "must not be negative": {"weight": -weight},
        "must share D": {"value": value[:, :2]},
        "must not hold a cause twice": {"selected": torch.zeros(1, 2, dtype=torch.int64)},
        "must lie in 0 .. 1": {"selected": torch.tensor([[0, 2]])},
        "coefficients must have shape": {"coefficients": torch.zeros(1, 3)},
        "sweeps be at least 1": {"sweeps": 0},
        "selected must have shape": {"selected": torch.zeros(2, 2, dtype=torch.int64)},
    }.items():
        with pytest.raises(ValueError, match=message):
            run(**changes)
    with pytest.raises(ValueError, match="draws must have shape"):
        ops.maximum_slab_statistics(value, weight, selected, torch.zeros(1, 2))
