"""Expected sufficient statistics are what gradients of the truncated free energy are made of (Fisher's identity)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_truncated import Population, StateSpace
from pyro_truncated.distributions import (
    CorrelatedSlabSuperposition,
    LinearSuperposition,
    MaximumSuperposition,
    NoisyOrSuperposition,
    SpikeSlabSuperposition,
)

N, D, H, S = 14, 5, 4, 7
D64 = torch.float64


def linear(p: dict[str, Tensor]) -> LinearSuperposition:
    return LinearSuperposition(torch.zeros(H, dtype=D64), p["weight"], p["scale"], p["bias"])


def maximum(p: dict[str, Tensor]) -> MaximumSuperposition:
    return MaximumSuperposition(torch.zeros(H, dtype=D64), p["weight"], p["scale"])


def noisy_or(p: dict[str, Tensor]) -> NoisyOrSuperposition:
    return NoisyOrSuperposition(torch.zeros(H, dtype=D64), p["weight"], p["leak"])


def spike_slab(p: dict[str, Tensor]) -> SpikeSlabSuperposition:
    return SpikeSlabSuperposition(torch.zeros(H, dtype=D64), p["weight"], p["scale"], p["slab_mean"], p["slab_scale"], p["bias"])


def correlated(p: dict[str, Tensor]) -> CorrelatedSlabSuperposition:
    slabs = p["slab_mean"], p["slab_scale_tril"]
    return CorrelatedSlabSuperposition(torch.zeros(H, dtype=D64), p["weight"], p["scale"], *slabs, p["bias"])


def linear_gradients(p: dict[str, Tensor], t: dict[str, Tensor]) -> dict[str, Tensor]:
    return mean_gradients(p, t) | {"scale": noise(linear(p), p, t)}


def mean_gradients(p: dict[str, Tensor], t: dict[str, Tensor]) -> dict[str, Tensor]:
    pairs = t["pairs"].expand(D, H, H)
    error = t["cross"] - p["bias"].unsqueeze(-1) * t["trials"] - (pairs @ p["weight"].unsqueeze(-1)).squeeze(-1)
    rest = t["sums"] - t["observed"] * p["bias"] - (p["weight"] * t["trials"]).sum(-1)
    return {"weight": error / p["scale"].square().unsqueeze(-1), "bias": rest / p["scale"].square()}


def noise(likelihood: Any, p: dict[str, Tensor], t: dict[str, Tensor]) -> Tensor:
    return likelihood.square_error(t) / p["scale"] ** 3 - t["observed"] / p["scale"]


def maximum_gradients(p: dict[str, Tensor], t: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"weight": (t["won"] - t["wins"] * p["weight"]) / p["scale"].square().unsqueeze(-1), "scale": noise(maximum(p), p, t)}


def noisy_or_gradients(p: dict[str, Tensor], t: dict[str, Tensor]) -> dict[str, Tensor]:
    weight, leak = p["weight"], p["leak"]
    return {
        "weight": (t["causes"] - weight * t["trials"]) / (weight * (1 - weight)),
        "leak": (t["leak_causes"] - leak * t["observed"]) / (leak * (1 - leak)),
    }


def spike_slab_gradients(p: dict[str, Tensor], t: dict[str, Tensor]) -> dict[str, Tensor]:
    mean, deviation, count, first = p["slab_mean"], p["slab_scale"], t["states"], t["coefficients"]
    spread = t["coefficient_squares"] - 2 * mean * first + count * mean.square()
    return {
        **mean_gradients(p, t),
        "scale": noise(spike_slab(p), p, t),
        "slab_mean": (first - count * mean) / deviation.square(),
        "slab_scale": spread / deviation**3 - count / deviation,
    }


def correlated_gradients(p: dict[str, Tensor], t: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        **mean_gradients(p, t),
        "scale": noise(correlated(p), p, t),
        "slab_mean": t["slab_slope"],
        "slab_scale_tril": (t["slab_curvature"] @ p["slab_scale_tril"]).tril(),
    }


CASES: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Tensor]]]] = {
    "linear": (linear, linear_gradients),
    "maximum": (maximum, maximum_gradients),
    "noisy-or": (noisy_or, noisy_or_gradients),
    "spike-slab": (spike_slab, spike_slab_gradients),
    "correlated-slabs": (correlated, correlated_gradients),
}


def problem(name: str, with_missing: bool) -> tuple[dict[str, Tensor], Tensor, Population]:
    """Parameters, all data, and the populations of some of them, with a state's prior of equal weight."""
    unit = name == "noisy-or"
    p = {
        "weight": 0.1 + 0.8 * torch.rand(D, H, dtype=D64) if unit else torch.randn(D, H, dtype=D64).abs(),
        "scale": 0.5 + torch.rand(D, dtype=D64),
        "bias": torch.randn(D, dtype=D64),
        "leak": 0.1 + 0.5 * torch.rand(D, dtype=D64),
        "slab_mean": torch.randn(H, dtype=D64),
        "slab_scale": 0.5 + torch.rand(H, dtype=D64),
        "slab_scale_tril": torch.randn(H, H, dtype=D64).tril(-1) + (0.5 + torch.rand(H, dtype=D64)).diag(),
    }
    y = (torch.rand(N, D) < 0.5).to(D64) if unit else 2 * torch.randn(N, D, dtype=D64)
    if with_missing:
        y[torch.rand(N, D) < 0.3] = torch.nan
        y[4] = torch.nan
    space, indices = StateSpace([2] * H), torch.randperm(N)[:9]
    words = torch.stack([space.enumerate()[torch.randperm(2**H)[:S]] for _ in indices])
    scores = CASES[name][0](p).packed_log_prob(words, y[indices])
    return p, y, Population(space, words, scores, indices)


@pytest.mark.parametrize("with_missing", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_statistics_are_the_gradient_of_the_free_energy(name: str, with_missing: bool) -> None:
    make, gradients_of = CASES[name]
    p, y, population = problem(name, with_missing)
    statistics = make(p).statistics(population, y)
    assert all(value.dtype == D64 for value in statistics.values())
    assert statistics["num_data"] == 9
    torch.testing.assert_close(statistics["observed"], (~y[population.indices].isnan()).to(D64).sum(0))
    with torch.no_grad():
        expected = gradients_of(p, statistics)
    parameters = {key: p[key].clone().requires_grad_() for key in expected}
    scores = make(p | parameters).packed_log_prob(population.words, y[population.indices])
    scores.logsumexp(-1).sum().backward()
    for key, parameter in parameters.items():
        gradient = parameter.grad.tril() if key.endswith("_tril") else parameter.grad
        torch.testing.assert_close(expected[key], gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_statistics_add_up_and_follow_the_temperature(name: str) -> None:
    p, y, population = problem(name, with_missing=True)
    likelihood = CASES[name][0](p)
    whole = likelihood.statistics(population, y, temperature=2.5)
    cooled = Population(population.space, population.words, population.log_joint / 2.5, population.indices)
    parts = [likelihood.statistics(part, y) for part in cooled.split(4)]
    for key, value in whole.items():
        torch.testing.assert_close(sum(part[key] for part in parts), value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_reconstructions_are_posterior_means(name: str) -> None:
    p, y, population = problem(name, with_missing=True)
    likelihood = CASES[name][0](p)
    states = population.states(D64)
    rows = y[population.indices].unsqueeze(1)
    if name in ("spike-slab", "correlated-slabs"):
        parameters = p["weight"], p["scale"], p["slab_mean"], p["slab_scale" if name == "spike-slab" else "slab_scale_tril"], p["bias"]
        slabs = type(likelihood)(states, *parameters).slab_posterior(rows).mean
        means = LinearSuperposition(states * slabs, p["weight"], p["scale"], p["bias"]).mean
    else:
        means = type(likelihood)(states, *_arguments(name, p)).mean
    expected = (population.weights().unsqueeze(-1) * means).sum(1)
    actual = likelihood.reconstruct(population, y)
    assert not actual.isnan().any()
    torch.testing.assert_close(actual, expected)


def _arguments(name: str, p: dict[str, Tensor]) -> tuple[Tensor, ...]:
    names = {"linear": ("weight", "scale", "bias"), "maximum": ("weight", "scale"), "noisy-or": ("weight", "leak")}[name]
    return tuple(p[key] for key in names)


@pytest.mark.parametrize("with_missing", [False, True])
def test_latents_of_several_values_count_with_their_levels(with_missing: bool) -> None:
    space, levels = StateSpace([3, 2, 4]), torch.tensor([0.0, -1.5, 2.0, 0.5], dtype=D64)
    y = torch.randn(6, D, dtype=D64)
    if with_missing:
        y[torch.rand(6, D) < 0.4] = torch.nan
    population = Population(space, space.enumerate().expand(6, -1, -1), torch.randn(6, space.size, dtype=D64))
    for given, number in ((levels, levels), (None, torch.arange(4, dtype=D64))):
        statistics = LinearSuperposition.statistics(population, y, levels=given)
        x, q = number[population.states(torch.int64)], population.weights()
        seen = (~y.isnan()).to(D64)
        torch.testing.assert_close(statistics["states"], torch.einsum("ns,nsh->h", q, x))
        torch.testing.assert_close(statistics["trials"], torch.einsum("nd,ns,nsh->dh", seen, q, x))
        torch.testing.assert_close(statistics["cross"], torch.einsum("nd,ns,nsh->dh", y.nan_to_num(0.0), q, x))
        torch.testing.assert_close(statistics["pairs"].expand(D, 3, 3), torch.einsum("nd,ns,nsh,nsk->dhk", seen, q, x, x))


def test_draws_have_the_statistics_of_their_coefficients() -> None:
    weight, y = torch.rand(D, H, dtype=D64), 2 * torch.randn(6, D, dtype=D64)
    y[0, 1] = torch.nan
    likelihood = MaximumSuperposition(torch.zeros(H, dtype=D64), weight, torch.tensor(0.7, dtype=D64))
    selected = torch.stack([torch.randperm(H)[:2] for _ in y])
    slabs = {"prior": torch.tensor(0.4), "slab_mean": torch.tensor(1.0), "slab_scale": torch.tensor(0.5)}
    drawn, chances = likelihood.draw_coefficients(y, selected, torch.zeros(6, H), burn_in=1, sweeps=3, **slabs)
    assert drawn.shape == (6, 3, 2)
    assert ((chances >= 0) & (chances <= 1)).all()
    statistics = likelihood.draw_statistics(selected, drawn, y)
    full = torch.zeros(6, 3, H, dtype=D64).scatter(2, selected.unsqueeze(1).expand(-1, 3, -1), drawn)
    free = weight.clone().requires_grad_()
    means = MaximumSuperposition(full, free, 0.7).mean
    errors = torch.where(y.isnan().unsqueeze(1), 0.0, y.unsqueeze(1).nan_to_num(0.0) - means).square().mean(1).sum(0)
    torch.testing.assert_close(statistics["errors"], errors.detach())
    torch.testing.assert_close(likelihood.square_error(statistics), errors.detach())
    (gradient,) = torch.autograd.grad(errors.sum(), free)
    torch.testing.assert_close(2 * (weight * statistics["wins"] - statistics["won"]), gradient)


@pytest.mark.parametrize("name", ["maximum", "noisy-or", "spike-slab", "correlated-slabs"])
def test_other_latents_are_refused(name: str) -> None:
    p, y, _ = problem(name, with_missing=False)
    for cardinalities in ([2] * (H - 1), [3] * H):
        space = StateSpace(cardinalities)
        other = Population(space, space.enumerate().expand(N, -1, -1), torch.zeros(N, space.size))
        with pytest.raises(ValueError, match=f"must hold states of {H} binary latents"):
            CASES[name][0](p).statistics(other, y)


@pytest.mark.parametrize("levels", [None, torch.tensor([0.0, 1.0])])
def test_what_is_constant_has_no_variance_under_weights_in_float32(levels: Tensor | None) -> None:
    # One latent of three is on in every state: their number has the variance 1' (A - t t' / N) 1 = 0.
    space = StateSpace([2] * 3)
    states = space.pack(torch.eye(3, dtype=torch.int64)).expand(50, 3, 1)
    population = Population(space, states, 3 * torch.randn(50, 3))
    statistics = LinearSuperposition.statistics(population, torch.zeros(50, 1), levels=levels)
    variance = statistics["pairs"].sum() - statistics["trials"].sum() ** 2 / 50
    assert abs(float(variance)) < 1e-11
