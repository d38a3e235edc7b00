"""The regression as a whole: against explicit Gaussian conditioning, and fits that do what a marginal likelihood says."""

from __future__ import annotations

import copy
import math
import warnings

import pyro
import pytest
import torch
from pyro.contrib.gp import kernels
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_truncated.gp import LeaveOneOutRegression, optimization
from pyro_truncated.gp.kernels import covariance_at
from pyro_truncated.gp.subset.leave_one_out import NOISE, Box

N, P = 30, 4
EXACT = {"rtol": 0, "atol": 1e-8}
FORMS: dict[str, dict] = {
    "exact": {},
    "low rank": {"rank": 8},
    "fitc": {"rank": 8, "fitc": True},
    "by targets": {"rank": 8, "pivots": "targets"},
}


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    x = 5 * torch.randn(N, 3) + 2
    targets = torch.stack([x[:, 0] > 2, x[:, 1] > 2, x[:, 0] * x[:, 1] > 4, torch.rand(N) > 0.5], 1)
    return x, targets.double()


def prior(regression: LeaveOneOutRegression, x: Tensor) -> tuple[Tensor, Tensor]:
    """Kernel matrix of the inputs that the approximation stands for (data first), and noise plus what FITC puts beside it."""
    points = regression.standardize(x)
    with torch.no_grad(), pyro.get_param_store().scope():
        full = regression.kernel(points)
    if regression.factorization is None:
        return full, regression.noise.expand(len(x))
    pivots = regression.factorization.pivots
    columns = full[:, pivots]
    low = columns @ torch.linalg.solve(full[pivots][:, pivots], columns.mT)
    extra = (full - low).diagonal() if regression.fitc else torch.zeros(len(x), dtype=torch.float64)
    return low, regression.noise + extra


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernel", ["linear", "rbf", "composition", kernels.Matern32(3)], ids=["linear", "rbf", "composition", "matern"])
class TestAgainstConditioning:
    def test_leave_one_out(self, form: str, kernel: str | kernels.Kernel, data: tuple[Tensor, Tensor]) -> None:
        x, targets = data
        regression = LeaveOneOutRegression(x, kernel, **FORMS[form])
        matrix, noise = prior(regression, x)
        mean, variance = regression.loo(targets)
        for n in range(N):
            others = [i for i in range(N) if i != n]
            weights = torch.linalg.solve(matrix[others][:, others] + noise[others].diag(), matrix[others, n])
            torch.testing.assert_close(mean[n], weights @ targets[others], **EXACT)
            torch.testing.assert_close(variance[n], matrix[n, n] + noise[n] - weights @ matrix[others, n], **EXACT)

    def test_some_rows(self, form: str, kernel: str | kernels.Kernel, data: tuple[Tensor, Tensor]) -> None:
        x, targets = data
        regression, rows = LeaveOneOutRegression(x, kernel, **FORMS[form]), torch.tensor([4, 2, 17])
        for some, every in zip(regression.loo(targets, rows), regression.loo(targets), strict=True):
            torch.testing.assert_close(some, every[rows], **EXACT)

    def test_new_inputs(self, form: str, kernel: str | kernels.Kernel, data: tuple[Tensor, Tensor]) -> None:
        x, targets = data
        new = 5 * torch.randn(6, 3) + 2
        regression = LeaveOneOutRegression(x, kernel, **FORMS[form])
        matrix, noise = prior(regression, torch.cat([x, new]))
        mean, variance = regression.predict(new, targets)
        weights = torch.linalg.solve(matrix[:N, :N] + noise[:N].diag(), matrix[:N, N:]).mT
        torch.testing.assert_close(mean, weights @ targets, **EXACT)
        expected = (matrix[N:, N:] - weights @ matrix[:N, N:]).diagonal() + noise[N:]
        torch.testing.assert_close(variance, expected, **EXACT)

    def test_log_likelihood(self, form: str, kernel: str | kernels.Kernel, data: tuple[Tensor, Tensor]) -> None:
        x, targets = data
        regression = LeaveOneOutRegression(x, kernel, **FORMS[form])
        matrix, noise = prior(regression, x)
        normal = MultivariateNormal(torch.zeros(N, dtype=torch.float64), matrix + noise.diag())
        torch.testing.assert_close(regression.log_likelihood(targets), normal.log_prob(targets.mT).sum(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
class TestFit:
    @pytest.mark.slow
    def test_climbs_and_stays_in_the_box(self, form: str, data: tuple[Tensor, Tensor]) -> None:
        x, targets = data
        regression = LeaveOneOutRegression(x, **FORMS[form])
        values = [regression.fit(targets, steps) for steps in (1, 3, 20)]
        assert values == sorted(values)
        assert values[0] < values[-1]
        bounds = Box(regression.kernel).bounds
        assert all(bounds[name][0] <= float(value) <= bounds[name][1] for name, value in regression.parameters.items())

    def test_returns_the_objective_and_takes_the_parameters(self, form: str, data: tuple[Tensor, Tensor]) -> None:
        x, targets = data
        regression = LeaveOneOutRegression(x, **FORMS[form])
        value = regression.fit(targets, 5)
        for name, parameter in regression.kernel.named_parameters():
            torch.testing.assert_close(parameter.detach(), regression.parameters[name])
        if form == "exact":
            assert value == pytest.approx(float(regression.log_likelihood(targets)) / targets.numel(), abs=1e-10)
        torch.testing.assert_close(regression.predict(x)[0], regression.predict(x, targets)[0])

    def test_gradients(self, form: str, data: tuple[Tensor, Tensor]) -> None:
        x, targets = data
        regression = LeaveOneOutRegression(x, **FORMS[form])
        names = list(regression.parameters)

        def evidence(*values: Tensor) -> Tensor:
            return regression._evidence(dict(zip(names, values, strict=True)), regression.inputs, targets, P)

        values = tuple(regression.parameters[name].clone().requires_grad_() for name in names)
        assert torch.autograd.gradcheck(evidence, values, eps=1e-5, atol=1e-4)

    @pytest.mark.slow
    def test_outputs_that_do_not_vary_say_nothing(self, form: str, data: tuple[Tensor, Tensor]) -> None:
        x, targets = data
        padded = torch.cat([targets, torch.zeros(N, 50, dtype=torch.float64)], 1)
        options = [FORMS[form] | ({"generator": torch.Generator().manual_seed(0)} if "pivots" in FORMS[form] else {}) for _ in range(2)]
        first, second = (LeaveOneOutRegression(x, **option) for option in options)
        assert first.fit(targets, 5) == second.fit(padded, 5)
        nothing = torch.zeros(N, 3, dtype=torch.float64)
        expected = first._evidence(first.parameters, first.inputs, nothing, 3).detach() / nothing.numel() - math.log(first.unit)
        assert first.fit(nothing, 5) == pytest.approx(float(expected), abs=1e-12)
        assert all(torch.equal(first.parameters[name], second.parameters[name]) for name in first.parameters)

    def test_many_outputs(self, form: str, data: tuple[Tensor, Tensor]) -> None:
        x, targets = data
        many = targets.repeat(1, 2 * N) * torch.linspace(0.5, 1.0, 2 * N * P, dtype=torch.float64)
        regression = LeaveOneOutRegression(x, **FORMS[form])
        before = {name: value.clone() for name, value in regression.parameters.items()}
        direct = regression._evidence(before, regression.inputs, many, many.shape[1]) / many.numel()
        assert regression.fit(many, 1) >= float(direct) - 1e-9
        if form == "exact":
            assert regression.fit(many, 3) == pytest.approx(float(regression.log_likelihood(many)) / many.numel(), abs=1e-9)


@pytest.mark.slow
def test_pivots_chosen_by_targets_explain_them_better() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 3, generator=generator, dtype=torch.float64)
    # Only a small part of the input space matters.
    targets = torch.stack([torch.exp(-3 * (x - centre).square().sum(1)) for centre in (-0.5, 0.0, 0.7)], 1)
    bounds, errors = {}, {}
    for pivots in ("variance", "targets"):
        low = LeaveOneOutRegression(x, "rbf", 12, pivots=pivots, generator=generator)
        bounds[pivots] = low.fit(targets, 20)
        errors[pivots] = float((low.loo(targets)[0] - targets).square().mean() / targets.var(0).mean())
        assert low.factorization is not None
        assert len(low.factorization.pivots.unique()) == 12
    exact = LeaveOneOutRegression(x, "rbf").fit(targets, 20)
    assert bounds["variance"] < bounds["targets"] < exact
    assert errors["targets"] < 0.5 * errors["variance"]


def test_titsias_bound_is_a_bound(data: tuple[Tensor, Tensor]) -> None:
    x, targets = data
    # Without a step, a fit returns the objective at the parameters that it starts from.
    exact = LeaveOneOutRegression(x).fit(targets, 0)
    bounds = [LeaveOneOutRegression(x, rank=rank).fit(targets, 0) for rank in (2, 5, 10, N)]
    assert bounds == sorted(bounds)
    assert bounds[-1] <= exact + 1e-6 / targets.numel()
    assert bounds[-1] == pytest.approx(exact, rel=1e-4)


def test_a_worse_optimum_is_refused(data: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    x, targets = data
    regression = LeaveOneOutRegression(x)
    regression.fit(targets, 20)
    before = {name: value.clone() for name, value in regression.parameters.items()}

    def spoil(self: torch.optim.LBFGS, closure: object) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.fill_(9.0)

    monkeypatch.setattr(optimization._LBFGS, "step", spoil)
    regression.fit(targets, 20)
    assert all(torch.equal(regression.parameters[name], before[name]) for name in before)


def test_the_fit_finds_the_noise_and_what_matters() -> None:
    x = torch.randn(150, 2)
    clean = torch.stack([(1.5 * x[:, 0] + phase).sin() for phase in (0.0, 0.7, 1.4, 2.1)], 1)
    targets = clean + 0.1 * torch.randn(clean.shape)
    regression = LeaveOneOutRegression(x)
    regression.fit(targets, 50)
    # Six hundred targets: the standard error of a variance estimate is 6 %, and 4.4 of them are a false alarm in 1e-5.
    assert regression.unit**2 * float(regression.noise) == pytest.approx(0.01, rel=0.26)
    mean, variance = regression.loo(targets)
    assert float((mean - clean).square().mean()) < 0.01
    assert float(((targets - mean).square().mean(1) / variance).mean()) == pytest.approx(1.0, abs=0.26)


def test_fit_on_some_rows(data: tuple[Tensor, Tensor]) -> None:
    x, targets = data
    rows = torch.arange(0, N, 2)
    regression = LeaveOneOutRegression(x)
    part = LeaveOneOutRegression(x)
    part.inputs = regression.inputs[rows]
    value = regression.fit(targets, 10, rows)
    assert value == pytest.approx(part.fit(targets[rows], 10), abs=1e-10)
    assert regression.loo(targets)[0].shape == targets.shape


def test_inputs_are_centred_and_scaled_by_one_number(data: tuple[Tensor, Tensor]) -> None:
    x, targets = data
    moved = LeaveOneOutRegression(100 * x + torch.tensor([1e3, 0.0, -50.0])).loo(targets)[0]
    torch.testing.assert_close(moved, LeaveOneOutRegression(x).loo(targets)[0], rtol=0, atol=1e-3)  # the inputs are float32
    standard = LeaveOneOutRegression(x).inputs
    torch.testing.assert_close(standard.mean(0), torch.zeros(3, dtype=torch.float64), **EXACT)
    assert float(standard.square().mean()) == pytest.approx(1.0)
    assert bool(LeaveOneOutRegression(torch.ones(5, 2)).loo(torch.rand(5, 2))[0].isfinite().all())


def test_pyro_does_not_notice(data: tuple[Tensor, Tensor]) -> None:
    x, targets = data
    pyro.param("variance", torch.tensor(3.0))
    with pyro.poutine.trace() as tracer:
        LeaveOneOutRegression(x, "linear").fit(targets, 3)
        LeaveOneOutRegression(x).fit(targets, 3)
    assert set(pyro.get_param_store().keys()) == {"variance"}
    assert pyro.param("variance").item() == 3.0
    assert not tracer.trace.nodes


def test_a_given_kernel_is_copied(data: tuple[Tensor, Tensor]) -> None:
    x, targets = data
    kernel = kernels.RationalQuadratic(3)
    LeaveOneOutRegression(x, kernel).fit(targets, 3)
    assert all(value.item() == 0.0 and value.dtype == torch.float32 for value in kernel.parameters())


def test_kernels_of_two_regressions_share_no_parameters() -> None:
    x = torch.tensor([[0.0], [1.0]]).double()
    first, second = (LeaveOneOutRegression(x, kernels.RBF(1, torch.tensor(variance))) for variance in (1.0, 4.0))
    pair = [first, second, copy.deepcopy(second)]
    assert [float(regression.kernel(x)[0, 0].detach()) for regression in pair] == pytest.approx([1.0, 4.0, 4.0])
    pair[2].load_state_dict({**second.state_dict(), **{name: value for name, value in first.state_dict().items() if "variance" in name}})
    assert [float(regression.kernel(x)[0, 0].detach()) for regression in pair] == pytest.approx([1.0, 4.0, 1.0])


def test_works_where_gradients_are_off(data: tuple[Tensor, Tensor]) -> None:
    x, targets = data
    with torch.no_grad():
        found = LeaveOneOutRegression(x).fit(targets, 5)
    assert found == LeaveOneOutRegression(x).fit(targets, 5)


def test_covariance_at_other_parameters(data: tuple[Tensor, Tensor]) -> None:
    regression = LeaveOneOutRegression(data[0], "linear")
    (name,) = [name for name in regression.parameters if name != NOISE]
    k = covariance_at(regression.kernel, {name: torch.tensor(2.0, dtype=torch.float64).log()})
    torch.testing.assert_close(k(regression.inputs), 2 * regression.inputs @ regression.inputs.mT)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"inputs": torch.zeros(3)}, ValueError, r"inputs must be finite and of shape \(N, D\).*got float64 of shape \(3,\)"),
        ({"inputs": torch.full((3, 2), torch.nan)}, ValueError, "inputs must be finite"),
        ({"kernel": "cubic"}, ValueError, "kernel must be one of 'linear', 'rbf', 'composition', or a kernel of .*; got 'cubic'"),
        ({"kernel": 3}, TypeError, "kernel must be a name or a kernel of pyro.contrib.gp.kernels; got int"),
        ({"noise": 0.0}, ValueError, "noise must be a positive variance; got 0.0"),
        ({"fitc": True}, ValueError, "fitc=True needs a rank"),
        ({"pivots": "best"}, ValueError, 'pivots must be "variance" or "targets"'),
        ({"pivots": "targets"}, ValueError, 'pivots="targets" needs a rank'),
    ],
)
def test_bad_options(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LeaveOneOutRegression(**{"inputs": torch.randn(5, 2), **options})


def test_bad_data(data: tuple[Tensor, Tensor]) -> None:
    x, targets = data
    regression = LeaveOneOutRegression(x)
    with pytest.raises(ValueError, match=r"targets must be finite and of shape \(30, P\), a row per input; got float64 of shape \(29, 4\)"):
        regression.loo(targets[1:])
    with pytest.raises(ValueError, match=r"new_inputs must have shape \(M, 3\); got \(4, 2\)"):
        regression.predict(torch.zeros(4, 2), targets)
    with pytest.raises(ValueError, match="there are no targets to predict from yet"):
        regression.predict(x)
    with pytest.raises(ValueError, match=r"an exact regression .* has no finite features"):
        regression.features(x)


def test_kernels_leave_the_parameter_store_as_it_is():
    """SVI asks the parameters that a step has read for their unconstrained values after a search has evaluated kernels."""
    weight = pyro.param("weight", torch.ones(2))
    kernel = kernels.RBF(3)
    covariance_at(kernel, {"variance_unconstrained": torch.zeros(()), "lengthscale_unconstrained": torch.zeros(())})(torch.randn(4, 3))
    assert weight.unconstrained() is weight
    assert list(pyro.get_param_store().keys()) == ["weight"]


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
def test_constant_outputs_in_any_units(unit):
    x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    varying = unit * torch.cat([x, x.sin() + 1], 1)
    constant = unit * torch.full((20, 2), 0.1, dtype=torch.float64)
    for targets in (varying, torch.cat([varying, constant], 1)):
        assert LeaveOneOutRegression(x, "rbf").fit(targets, 2) == LeaveOneOutRegression(x, "rbf").fit(varying, 2)
        assert math.isfinite(LeaveOneOutRegression(x, "rbf").fit(targets, 2))
    regression = LeaveOneOutRegression(x, "rbf")
    assert regression.fit(constant, 2) == pytest.approx(float(regression.log_likelihood(constant)) / constant.numel(), rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"rank": 5}, {"rank": 5, "pivots": "targets"}], ids=["exact", "variance", "targets"])
def test_a_state_that_is_taken_back_gives_the_very_same_predictions(options) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, new = torch.randn(30, 3, generator=generator), torch.randn(4, 3, generator=generator)
    targets = torch.sigmoid(inputs[:, :2].double())
    fitted, fresh = (LeaveOneOutRegression(inputs, "rbf", generator=torch.Generator().manual_seed(1), **options) for _ in range(2))
    fitted.fit(targets, 5)
    fresh.load_state_dict(fitted.state_dict())
    for found, expected in zip(
        (*fresh.loo(targets), *fresh.predict(new, targets)), (*fitted.loo(targets), *fitted.predict(new, targets)), strict=True
    ):
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="of another kernel"):
        LeaveOneOutRegression(inputs, "linear").load_state_dict(fitted.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_targets_in_another_unit_give_the_same_fit(form: str, unit: float, data: tuple[Tensor, Tensor]) -> None:
    x, targets = data
    targets = targets + 0.1 * torch.linspace(0, 1, N, dtype=torch.float64).sin().unsqueeze(-1)
    own, other = (LeaveOneOutRegression(x, "rbf", generator=torch.Generator().manual_seed(1), **FORMS[form]) for _ in range(2))
    reached = own.fit(targets, 10)
    assert other.fit(unit * targets, 10) + math.log(unit) == pytest.approx(reached, abs=1e-6)
    shift = math.log(unit) * targets.numel()
    assert float(other.log_likelihood(unit * targets)) + shift == pytest.approx(float(own.log_likelihood(targets)), abs=1e-3)
    for predict in (lambda one, r: one.loo(r), lambda one, r: one.predict(x[:5] + 0.1, r)):
        (mean, variance), (other_mean, other_variance) = predict(own, targets), predict(other, unit * targets)
        torch.testing.assert_close(other_mean / unit, mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other_variance / unit**2, variance, rtol=1e-4, atol=1e-5)
    # The likelihood of a fit is that of the very Gaussian.
    if form == "exact":
        matrix, noise = prior(other, x)
        covariance = other.unit**2 * (matrix + noise.diag())
        exact = MultivariateNormal(torch.zeros(N, dtype=torch.float64), covariance).log_prob(unit * targets.mT).sum()
        assert float(other.log_likelihood(unit * targets)) == pytest.approx(float(exact), rel=1e-6)


@pytest.mark.parametrize(("unit", "offset"), [(20.0, 0.0), (1.0, 1e3)])
def test_units_that_hide_a_function_are_named(unit, offset):
    x = 4 * torch.rand(100, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 2
    y = ((2 * x[:, 0]).sin() + (2 * x[:, 1]).cos())[:, None]

    def error(inputs, targets):
        regression = LeaveOneOutRegression(inputs, "rbf")
        regression.fit(targets)
        return float((regression.loo(targets)[0] - targets).square().mean().sqrt())

    with warnings.catch_warnings(action="error"):
        assert error(x, y) < 0.1
    with pytest.warns(UserWarning, match="standardise them if their units are unlike" if offset == 0 else "subtract means from targets"):
        assert error(x * torch.tensor([1.0, unit]), y + offset) > 0.5
