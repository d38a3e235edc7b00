"""Calibration of the projected process: against sets of data that lack a point, and on targets that were not seen."""

from __future__ import annotations

import pytest
import torch
from pyro.contrib.gp import kernels

from pyro_truncated.gp import SubsetGPRegression
from pyro_truncated.gp.optimization import FitRecord
from pyro_truncated.gp.subset.alternation import held_out_rows
from pyro_truncated.gp.subset.objectives import Basis, FreeBasis, SparsePosterior
from tests.gp.subset.subset_reference import nystrom, problem_and_index

NOISE = 0.02


def predicted_without(K, index, Y):
    """Mean, variance and what is left unexplained at each data point, with neither its targets nor itself as an inducing input."""
    found = []
    for i in range(len(K)):
        others, members = torch.arange(len(K)) != i, index[index != i]
        approximate = nystrom(K, members)
        C = approximate + NOISE * torch.eye(len(K), dtype=K.dtype)
        weights = torch.linalg.solve(C[others][:, others], C[others, i])
        found.append((weights @ Y[others], C[i, i] - weights @ C[others, i], K[i, i] - approximate[i, i]))
    return tuple(torch.stack(part) for part in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("repeated", [False, True])
def test_share_has_the_highest_density_of_targets_that_were_not_seen(repeated):
    problem, index, K = problem_and_index(H=2, n=40, m=8)
    mean, variance, left = predicted_without(K, index, problem.targets)

    def log_density(share):
        scale = (variance + share * left).sqrt().unsqueeze(1)
        return float(torch.distributions.Normal(mean, scale).log_prob(problem.targets).sum())

    # A member that is there twice changes nothing.
    given = torch.cat([index, index[:1]]) if repeated else index
    posterior = SparsePosterior(Basis(problem.kernel, given), problem.targets, NOISE, "pp")
    best = max(log_density(0.0), *(log_density(10**e) for e in torch.linspace(-6, 3, 2000).tolist()))
    assert log_density(posterior.share) == pytest.approx(best, abs=1e-3)
    assert posterior.share != 1


def test_variances_are_those_of_the_free_energy_but_for_the_share():
    problem, index, K = problem_and_index(H=2, n=40, m=8)
    posterior, plain = (SparsePosterior(Basis(problem.kernel, index), problem.targets, NOISE, name) for name in ("pp", "vfe"))
    new = problem.kernel.inputs[:9] + 0.3
    cross = problem.kernel.cross(new, index)
    unexplained = problem.kernel.diag_new(new) - (cross @ torch.linalg.solve(K[index][:, index], cross.mT)).diagonal()
    difference = plain.marginals(new)[1] - posterior.marginals(new)[1]
    torch.testing.assert_close(difference, (1 - posterior.share) * unexplained, rtol=0, atol=1e-7)
    torch.testing.assert_close(posterior.marginals(new)[0], plain.marginals(new)[0])
    left = (K - nystrom(K, index)).diagonal()
    assert float(left[index].abs().max()) < 1e-9
    gained = posterior.leave_one_out()[1] - plain.leave_one_out()[1]
    torch.testing.assert_close(gained, posterior.share * left, rtol=0, atol=1e-9)


def test_inducing_inputs_that_are_no_data_points_are_not_left_out():
    problem, index, K = problem_and_index(n=40, m=8)
    free = SparsePosterior(FreeBasis(problem.kernel, problem.kernel.inputs[index]), problem.targets, NOISE, "pp")
    mean, variance = free.leave_one_out()
    others = nystrom(K, index) + NOISE * torch.eye(40, dtype=K.dtype)
    torch.testing.assert_close(mean, problem.targets - torch.linalg.solve(others, problem.targets) / others.inverse().diagonal()[:, None])
    left = (K - nystrom(K, index)).diagonal()
    torch.testing.assert_close(variance, 1 / others.inverse().diagonal() + free.share * left, rtol=0, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_intervals_hold_what_they_say_where_a_third_of_the_data_are_inducing_inputs(seed):
    # Of 2000 new targets; with all inducing inputs in their places while targets were left out, 95 % intervals held 0.66 to 0.75 of them.
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(2240, 3, generator=generator, dtype=torch.float64)
    wave = torch.sin(6 * x).sum(1) + torch.sin(12 * x[:, 0] * x[:, 1])
    y = wave / wave.std() + 0.1 * torch.randn(2240, generator=generator, dtype=torch.float64)
    kernel = kernels.Exponential(3, torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.4, dtype=torch.float64))
    model = SubsetGPRegression(x[:240], y[:240], kernel, num_inducing=80, objective="pp", generator=generator)
    model.fit(max_epochs=3)
    mean, variance = model.predict(x[240:])
    inside = float(((mean - y[240:]).abs() < 1.96 * variance.sqrt()).double().mean())
    assert 0.92 < inside < 0.99


def curves(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 4, generator=generator, dtype=torch.float64)
    wave = torch.sin(5 * x).sum(1) + torch.sin(9 * x[:, 0] * x[:, 1])
    return x, wave / wave.std() + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)


@pytest.mark.slow
def test_intervals_hold_what_they_say_where_inducing_inputs_have_moved():
    # Of 2000 new targets; with inputs moved by all of the data and calibrated on the same, 95 % intervals held 0.68 and 0.63 of them.
    # A single share, of 25 data points held out, is worth 0.90 to 0.97.
    inside = []
    for seed in (0, 1):
        x, y = curves(2250, seed)
        model = SubsetGPRegression(x[:250], y[:250], num_inducing=60, objective="pp", generator=torch.Generator().manual_seed(seed))
        model.fit(max_epochs=3, free_inputs=True, free_input_evaluations=60)
        mean, variance = model.predict(x[250:])
        inside.append(float(((mean - y[250:]).abs() < 1.96 * variance.sqrt()).double().mean()))
    assert 0.9 < sum(inside) / 2 < 0.98


def test_what_is_held_out_has_no_part_in_moving_inducing_inputs():
    x, y = curves(80, 0)
    found = []
    for change in (0.0, 1.0):
        model = SubsetGPRegression(x, y, num_inducing=8, objective="pp", generator=torch.Generator().manual_seed(3))
        model.fit(max_epochs=1)
        generator = torch.Generator().manual_seed(4)
        held_out = held_out_rows(80, model.subset, torch.Generator().manual_seed(4))
        model.targets[held_out] += change
        model.generator = generator
        model._optimize_inputs(5, FitRecord(model.history))
        torch.testing.assert_close(model.held_out, held_out)
        found.append([model.inducing_inputs.detach().clone(), model.log_noise.detach().clone(), torch.tensor(model.objective_value)])
    torch.testing.assert_close(found[0][:2], found[1][:2], rtol=0, atol=0)
    assert abs(float(found[0][2] - found[1][2])) > 0.01


def test_a_tenth_that_are_no_members_is_held_out():
    members = torch.arange(0, 100, 2)
    rows = held_out_rows(100, members, torch.Generator().manual_seed(0))
    assert len(rows.unique()) == 10
    assert not bool(torch.isin(rows, members).any())
    assert len(held_out_rows(30_000, members)) == 1000


@pytest.mark.slow
def test_held_out_points_alone_calibrate():
    problem, index, _ = problem_and_index(n=40, m=8)
    inputs, held_out = problem.kernel.inputs[index] + 0.01, torch.tensor([3, 11, 17, 30])
    posterior = SparsePosterior(FreeBasis(problem.kernel, inputs), problem.targets, NOISE, "pp", held_out)
    mean, variance = posterior.leave_one_out()
    bare = variance - posterior.share * posterior.residual

    def log_density(share):
        scale = (bare + share * posterior.residual)[held_out].sqrt().unsqueeze(1)
        return float(torch.distributions.Normal(mean[held_out], scale).log_prob(problem.targets[held_out]).sum())

    best = max(log_density(0.0), *(log_density(10**e) for e in torch.linspace(-6, 3, 2000).tolist()))
    assert log_density(posterior.share) == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("objective", ["vfe", "pp", "fitc"])
def test_regressions_with_free_inputs_are_read_back_as_they_were(objective, tmp_path):
    x, y = curves(80, 1)
    model = SubsetGPRegression(x, y, num_inducing=8, objective=objective)
    value = model.fit(max_epochs=1, free_inputs=True, free_input_evaluations=5)
    assert len(model.held_out) == (8 if objective == "pp" else 0)
    model.save(tmp_path / "model.pt")
    again = SubsetGPRegression(x, y, num_inducing=8, objective=objective).load(tmp_path / "model.pt")
    for one, other in zip(model.predict(x[:7]), again.predict(x[:7]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert again.objective_value == value == model.history[-1][2]
    model.fit(max_epochs=1)
    assert not len(model.held_out)
