"""Joint predictions, correlated outputs, and regressions read back from files: against dense formulas."""

from __future__ import annotations

import math

import pytest
import torch

from pyro_truncated.gp import (
    CoregionalizedGPRegression,
    CountKernel,
    DataKernel,
    FunctionKernel,
    HistogramIntersectionKernel,
    IdentityKernel,
    MinMaxKernel,
    PrecomputedKernel,
    RestrictedKernel,
    SubsetGPRegression,
    SubsetPredictor,
    SumKernel,
    smooth_rbf,
    spectrum,
)
from tests.pretended_device import DEVICE, PretendedDevice, Pretender, here, there

DOUBLE = torch.float64


def curve(n=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(-2, 2, n, dtype=DOUBLE)[:, None]
    return x, torch.sin(3 * x[:, 0]) + 0.1 * torch.randn(n, generator=generator, dtype=DOUBLE)


WORDS, NEW = ["abba", "baab", "abab", "bbbb", "aaab"], ["abbb", "caba", "bb"]


def kernels_with_new_inputs():
    histograms, others = torch.rand(5, 4, dtype=DOUBLE), torch.rand(3, 4, dtype=DOUBLE)
    matrix = torch.randn(8, 8, dtype=DOUBLE)
    letters = FunctionKernel(lambda a, b: float(len(set(a) & set(b))), WORDS, variance=2.0)
    yield smooth_rbf(histograms), others
    yield PrecomputedKernel(matrix @ matrix.mT, torch.arange(5), 0.7), torch.tensor([5, 6, 7])
    yield HistogramIntersectionKernel(histograms, 0.3), others
    yield letters, NEW
    for normalization in ("inner", "cosine", "tanimoto"):
        yield CountKernel(spectrum(WORDS, 2), normalization, 1.5), spectrum(NEW, 2)
    yield MinMaxKernel(spectrum(WORDS, 1)), spectrum(NEW, 1)
    parts = [letters, CountKernel(spectrum(WORDS, 2))]
    yield SumKernel(parts, redundant_sum=True, identity=True), (NEW, spectrum(NEW, 2))
    yield RestrictedKernel(letters, torch.tensor([0, 2, 3])), NEW


def test_covariances_among_new_inputs_are_those_of_the_same_kernel():
    for kernel, new in kernels_with_new_inputs():
        found = kernel.among(new)
        torch.testing.assert_close(found.diagonal(), kernel.diag_new(new), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found, found.mT)
        assert float(torch.linalg.eigvalsh(found.detach()).min()) > -1e-9
    # Among training inputs given as new ones, they are those of the training inputs.
    for kernel, again in ((CountKernel(spectrum(WORDS, 2)), spectrum(WORDS, 2)), (FunctionKernel(_shared_letters, WORDS), WORDS)):
        torch.testing.assert_close(kernel.among(again), kernel.columns(torch.arange(5)))
    with pytest.raises(TypeError, match="among"):
        DataKernel.among(IdentityKernel(3), [1])


def _shared_letters(first, second):
    return float(len(set(first) & set(second)))


@pytest.mark.parametrize("num_inducing", [None, 12])
@pytest.mark.parametrize("objective", ["vfe", "pp"])
def test_joint_posterior_agrees_with_dense_formulas(num_inducing, objective):
    x, y = curve()
    model = SubsetGPRegression(smooth_rbf(x), torch.stack([y, 3 - 2 * y], 1), num_inducing=num_inducing, objective=objective)
    model.fit(max_epochs=3)
    new = torch.linspace(-3, 3, 7, dtype=DOUBLE)[:, None]
    with torch.no_grad():
        found, marginal = model.posterior(new, joint=True), model.posterior(new)
        mean, variance = model.predict(new, noiseless=True)
    assert found.batch_shape == (2,) and found.event_shape == marginal.event_shape == (7,)  # noqa: PT018
    torch.testing.assert_close(found.mean.mT, mean)
    torch.testing.assert_close(marginal.mean.mT, mean)
    torch.testing.assert_close(found.covariance_matrix.diagonal(dim1=-2, dim2=-1).mT, variance, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(marginal.variance.mT, variance, rtol=1e-6, atol=1e-9)
    with torch.no_grad():
        k, index = model.kernel, model.subset
        inducing, cross = k.columns(index, index), k.cross(new, index)
        columns = k.columns(index)
        prior, nystrom = k.among(new), cross @ torch.linalg.solve(inducing, cross.mT)
        precision = inducing + columns.mT @ columns / model.noise
        share = 1.0 if model.is_exact else model.posterior().share
        dense = share * (prior - nystrom) + cross @ torch.linalg.solve(precision, cross.mT)
        if model.is_exact:
            dense = prior - cross @ torch.linalg.solve(inducing + model.noise * torch.eye(len(inducing), dtype=DOUBLE), cross.mT)
    scaled = dense * model.target_scale.square()[:, None, None]
    torch.testing.assert_close(found.covariance_matrix, scaled, rtol=1e-4, atol=1e-5)
    noisy = model.posterior(new, joint=True, noiseless=False).covariance_matrix.detach()
    own = model.noise * model.target_scale.square()[:, None, None] * torch.eye(7, dtype=DOUBLE)
    torch.testing.assert_close(noisy, found.covariance_matrix + own, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_draws_are_differentiable_in_numeric_inputs():
    x, y = curve()
    for size in (None, 10):
        model = SubsetGPRegression(smooth_rbf(x), y, num_inducing=size)
        model.fit(max_epochs=3)
        new = torch.tensor([[0.3], [0.9]], dtype=DOUBLE, requires_grad=True)

        def draw(points, model=model):
            torch.manual_seed(0)
            return model.posterior(points, joint=True).rsample()

        assert torch.autograd.gradcheck(draw, (new,), atol=1e-4, rtol=1e-3)
        assert torch.autograd.gradcheck(lambda points, model=model: model.posterior(points).mean, (new,), atol=1e-4)


def test_draws_of_functions_that_are_known_without_noise():
    x, _ = curve()
    model = SubsetGPRegression(smooth_rbf(x), torch.sin(x[:, 0]))
    model.fit()
    new = torch.linspace(-2, 2, 30, dtype=DOUBLE)[:, None]
    draws = model.posterior(new, joint=True).rsample((20,))
    assert float((draws - torch.sin(new[:, 0])).detach().abs().max()) < 0.05


def correlated(n=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(-3, 3, n, dtype=DOUBLE)[:, None]
    f = torch.sin(2 * x[:, 0])
    noise = torch.tensor([0.05, 0.5, 0.1], dtype=DOUBLE)
    clean = torch.stack([f, 2 * f, 5 - f + 0.3 * x[:, 0]], 1)
    return x, clean, clean + noise * clean.std(0) * torch.randn(n, 3, generator=generator, dtype=DOUBLE)


def test_coregionalised_regression_agrees_with_dense_formulas():
    x, _, y = correlated(12)
    y[[1, 5, 7], [0, 2, 2]] = torch.nan
    model = CoregionalizedGPRegression(smooth_rbf(x), y, rank=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    B = (model.mixing @ model.mixing.mT + model.log_own.exp().diag()).detach()
    K = model.kernel.columns(torch.arange(12)).detach()
    seen = (~y.isnan()).flatten()
    full = torch.kron(K, B) + torch.kron(torch.eye(12, dtype=DOUBLE), model.noise.detach().diag())
    S, values = full[seen][:, seen], ((y - model.target_mean) / model.target_scale).flatten()[seen]
    torch.testing.assert_close(model.covariance().detach(), S)
    value = model.backward()
    density = torch.distributions.MultivariateNormal(torch.zeros(len(S), dtype=DOUBLE), S).log_prob(values)
    assert value == pytest.approx(-float(density) - len(S) / 2 * math.log(2 * math.pi), rel=1e-10)
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (-torch.distributions.MultivariateNormal(torch.zeros(len(S), dtype=DOUBLE), model.covariance()).log_prob(values)).backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    new = torch.tensor([[0.1], [2.5]], dtype=DOUBLE)
    with torch.no_grad():
        C = torch.kron(model.kernel.cross(new, torch.arange(12)), B)[:, seen]
        mean = (C @ torch.linalg.solve(S, values)).reshape(2, 3) * model.target_scale + model.target_mean
        scale = model.target_scale.repeat(2)
        spread = (torch.kron(model.kernel.among(new), B) - C @ torch.linalg.solve(S, C.mT)) * scale[:, None] * scale
        found, joint = model.predict(new, noiseless=True), model.posterior(new)
        noisy = model.predict(new)[1]
    torch.testing.assert_close(found[0], mean)
    torch.testing.assert_close(found[1].flatten(), spread.diagonal())
    torch.testing.assert_close(joint.mean.reshape(2, 3), mean)
    torch.testing.assert_close(joint.covariance_matrix, spread)
    torch.testing.assert_close(noisy - found[1], (model.noise * model.target_scale.square()).detach().expand(2, 3))


def test_outputs_help_each_other_and_have_noise_of_their_own():
    x, clean, y = correlated()
    y[20:45, 2] = torch.nan
    model = CoregionalizedGPRegression(smooth_rbf(x), y)
    model.fit()
    alone = SubsetGPRegression(smooth_rbf(x[~y[:, 2].isnan()]), y[~y[:, 2].isnan(), 2])
    alone.fit()
    gap = x[20:45]
    together, own = model.predict(gap)[0][:, 2], alone.predict(gap)[0]
    errors = [float((one - clean[20:45, 2]).square().mean()) for one in (together, own)]
    assert errors[0] < errors[1] / 4
    noise = (model.noise.sqrt() * model.target_scale / clean.std(0)).detach()
    # True values 0.05, 0.5, 0.1; sixty points know a deviation to a tenth of itself.
    torch.testing.assert_close(noise, torch.tensor([0.05, 0.5, 0.1], dtype=DOUBLE), rtol=0.5, atol=0)


def test_arrays_in_place_of_tensors():
    x, y = curve()
    by_tensors, by_arrays = SubsetGPRegression(smooth_rbf(x), y), SubsetGPRegression(smooth_rbf(x.numpy()), y.numpy())
    torch.testing.assert_close(by_arrays.predict(x.numpy()), by_tensors.predict(x))


def test_correlated_targets_of_no_inputs():
    x, _, y = correlated(12)
    assert CoregionalizedGPRegression(smooth_rbf(x), y).predict(x[:0])[1].shape == (0, y.shape[1])


def test_zeros_and_ones_are_correlated_targets():
    x, _, y = correlated(12)
    of_booleans, of_numbers = (CoregionalizedGPRegression(smooth_rbf(x), some) for some in (y > 0, (y > 0).double()))
    torch.testing.assert_close(of_booleans.predict(x), of_numbers.predict(x))


def test_coregionalised_regression_refuses_what_it_cannot_use():
    x, _, y = correlated(12)
    with pytest.raises(ValueError, match="every output"):
        CoregionalizedGPRegression(smooth_rbf(x), torch.cat([y, torch.full((12, 1), torch.nan)], 1))
    with pytest.raises(ValueError, match="shape"):
        CoregionalizedGPRegression(smooth_rbf(x), y[:, 0])
    with pytest.raises(ValueError, match="at most 5000"):
        CoregionalizedGPRegression(smooth_rbf(x), y.repeat(1, 200))


@pytest.mark.slow
def test_predictions_of_a_saved_regression_need_the_inducing_inputs_only(tmp_path):
    x, y = curve()
    new = torch.tensor([[0.1], [1.7]], dtype=DOUBLE)
    for free_inputs in (False, True):
        model = SubsetGPRegression(smooth_rbf(x), y, num_inducing=8)
        model.fit(max_epochs=2, free_inputs=free_inputs, free_input_evaluations=3)
        model.save(tmp_path / "model.pt")
        predictor = SubsetPredictor(tmp_path / "model.pt", smooth_rbf(x[model.subset]))
        for found, expected in zip(predictor.predict(new), model.predict(new), strict=True):
            torch.testing.assert_close(found, expected)
        with pytest.raises(ValueError, match="other inputs"):
            SubsetPredictor(tmp_path / "model.pt", smooth_rbf(x[:8]))
        with pytest.raises(ValueError, match="8 inducing inputs"):
            SubsetPredictor(tmp_path / "model.pt", smooth_rbf(x[:9]))
    exact = SubsetGPRegression(smooth_rbf(x), y)
    exact.fit()
    exact.save(tmp_path / "exact.pt")
    with pytest.raises(ValueError, match="no sparse regression"):
        SubsetPredictor(tmp_path / "exact.pt", smooth_rbf(x))


def test_a_state_of_correlated_outputs_is_refused_by_a_regression_on_other_data():
    x, _, y = correlated(12)
    model = CoregionalizedGPRegression(smooth_rbf(x), y)
    model.fit(max_iterations=10)
    missing = y.clone()
    missing[3, 1] = torch.nan
    for targets in (y.flip(0), 100 * y + 7, missing):
        with pytest.raises(ValueError, match="other targets"):
            CoregionalizedGPRegression(smooth_rbf(x), targets).load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="other inputs"):
        CoregionalizedGPRegression(smooth_rbf(x.square()), y).load_state_dict(model.state_dict())
    again = CoregionalizedGPRegression(smooth_rbf(x), y)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.predict(x), model.predict(x))
    assert again.objective_value == model.objective_value


def test_a_state_is_refused_by_a_regression_on_other_data(tmp_path):
    x, y = curve()
    model = SubsetGPRegression(smooth_rbf(x), y, num_inducing=8)
    model.fit(max_epochs=2)
    model.save(tmp_path / "model.pt")
    for targets in (y.flip(0), 100 * y + 7):
        with pytest.raises(ValueError, match="other targets"):
            SubsetGPRegression(smooth_rbf(x), targets, num_inducing=8).load(tmp_path / "model.pt")
    with pytest.raises(ValueError, match="other inputs"):
        SubsetGPRegression(smooth_rbf(x.square()), y, num_inducing=8).load(tmp_path / "model.pt")
    again = SubsetGPRegression(smooth_rbf(x), y, num_inducing=8).load(tmp_path / "model.pt")
    torch.testing.assert_close(again.predict(x)[0], model.predict(x)[0])


def fitted(tmp_path):
    """One regression of each kind, and predictions from a file."""
    x, y = curve()
    for objective, free_inputs in (("vfe", False), ("pp", True)):
        model = SubsetGPRegression(smooth_rbf(x), y, num_inducing=8, objective=objective)
        model.fit(max_epochs=2, free_inputs=free_inputs, free_input_evaluations=3)
        model.save(tmp_path / "model.pt")
        yield from (model, SubsetPredictor(tmp_path / "model.pt", smooth_rbf(x[model.subset])))
    for model in (SubsetGPRegression(smooth_rbf(x), y), CoregionalizedGPRegression(smooth_rbf(x), torch.stack([y, y.cos()], 1))):
        model.predict(x)
        yield model


def test_regressions_follow_to_a_device(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
    new = torch.tensor([[0.1], [1.7]], dtype=DOUBLE)
    for model in fitted(tmp_path):
        expected = model.predict(new)
        with PretendedDevice():
            found = model.to(DEVICE).predict(there(new))
            state = model.state_dict() if isinstance(model, SubsetGPRegression) else {}
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(here(one), other)
        if state and not model.is_exact:
            weights = state["_extra_state"]["predictor"]["mean_weights"]
            assert isinstance(weights, Pretender)
        assert all(isinstance(tensor, Pretender) for tensor in (*model.parameters(), *model.buffers()))


def test_other_types_than_float64_are_refused_before_anything_is_changed(tmp_path):
    new = torch.tensor([[0.1], [1.7]], dtype=DOUBLE)
    for model in fitted(tmp_path):
        expected = model.predict(new)
        for convert in (model.float, model.half, lambda model=model: model.to(torch.bfloat16)):
            with pytest.raises(TypeError, match=rf"{type(model).__name__} computes in float64 and does not convert to torch\."):
                convert()
        torch.testing.assert_close(model.double().predict(new), expected, rtol=0, atol=0)


def test_a_kept_state_is_not_changed_by_what_is_trained_from_it(tmp_path):
    x, y = curve()
    model, again = (SubsetGPRegression(smooth_rbf(x), y, num_inducing=8, objective="pp") for _ in range(2))
    model.fit(max_epochs=2, free_inputs=True, free_input_evaluations=3)
    state = model.state_dict()
    kept, expected = state["_extra_state"]["inducing_inputs"].clone(), model.predict(x)
    again.load_state_dict(state)
    torch.testing.assert_close(again.predict(x), expected)
    again.fit(free_inputs=True, free_input_evaluations=3)
    assert not torch.equal(again.inducing_inputs, kept)
    assert torch.equal(state["_extra_state"]["inducing_inputs"], kept)
    # What was read can be saved again.
    again.load_state_dict(state)
    again.save(tmp_path / "again.pt")
    torch.testing.assert_close(SubsetPredictor(tmp_path / "again.pt", smooth_rbf(x[again.subset])).predict(x)[0], expected[0])
    model.fit(free_inputs=True, free_input_evaluations=3)
    assert not torch.equal(model.inducing_inputs, kept)
    assert torch.equal(state["_extra_state"]["inducing_inputs"], kept)


@pytest.mark.parametrize("num_inducing", [8, None])
def test_a_posterior_first_used_in_inference_mode_is_differentiable_afterwards(num_inducing):
    x, y = curve()
    new = torch.tensor([[0.1], [1.7]], dtype=DOUBLE, requires_grad=True)
    model, other = (SubsetGPRegression(smooth_rbf(x), y, num_inducing=num_inducing) for _ in range(2))
    for one in (model, other):
        if num_inducing:
            one.index.copy_(torch.arange(0, 40, 5))
    with torch.inference_mode():
        model.predict(x)
    slopes = [torch.autograd.grad(one.posterior(new).mean.sum(), new)[0] for one in (model, other)]
    assert torch.equal(*slopes)
