"""One order of data and kernel, and one meaning of noise, in all Gaussian processes."""

from __future__ import annotations

import pytest
import torch
from pyro.contrib.gp import kernels, likelihoods

from pyro_truncated.gp import (
    ActiveSet,
    CoregionalizedGPRegression,
    CountKernel,
    InducingSubset,
    LeaveOneOutRegression,
    PyroKernel,
    SubsetGPRegression,
    SubsetPredictor,
    SubsetSparseGPRegression,
    SubsetVariationalGP,
    smooth_rbf,
    spectrum,
)
from pyro_truncated.gp.active_sets import ProjectedSet, projected_statistics
from pyro_truncated.gplvm import CandidateLatents, SASDecoder

X = torch.linspace(0, 3, 12, dtype=torch.float64)[:, None]
Y = torch.cat([X.sin(), X.cos()], 1)
NEW = torch.tensor([[0.4], [5.0]], dtype=torch.float64)


def rbf():
    return kernels.RBF(1, X.new_ones(()), X.new_ones(1))


def fitted(model):
    model.fit(max_epochs=1)
    return model


def saved(folder):
    model = fitted(SubsetGPRegression(X, Y, rbf(), num_inducing=5))
    model.save(folder / "model.pt")
    return SubsetPredictor(folder / "model.pt", X[model.subset], rbf())


def decoder():
    return SASDecoder(12, 2, 1).double().initialize(Y).condition_(Y)


class OfCandidates:
    """Predictions at the posteriors of some data points."""

    def __init__(self):
        self.candidates = CandidateLatents(decoder(), Y)

    def predict(self, new, **options):
        return self.candidates.predict(torch.eye(12, dtype=torch.float64)[: len(new)], **options)


def projected():
    kernel = rbf()
    return ProjectedSet(kernel, torch.tensor(0.1), projected_statistics(kernel, X[::3], X, Y))


def loo():
    model = LeaveOneOutRegression(X, "rbf")
    model.fit(Y, 2)
    return model


class AsPyro:
    """A Pyro model's ``forward``, whose default is Pyro's."""

    def __init__(self):
        self.model = SubsetSparseGPRegression(X, Y.mT, rbf(), num_inducing=5, noise=0.2)

    def predict(self, new, noiseless=False):
        return self.model(new, noiseless=noiseless)


# What makes a process, and its noise in the unit of its predictions.
FAMILY = {
    "SubsetGPRegression": (lambda _: fitted(SubsetGPRegression(X, Y, rbf(), num_inducing=5)), lambda m: m.noise * m.target_scale**2),
    "exact SubsetGPRegression": (lambda _: SubsetGPRegression(X, Y, rbf(), noise=0.3), lambda m: 0.3 * m.target_scale**2),
    "SubsetPredictor": (saved, lambda m: m.log_noise.exp() * m.target_scale**2 + 1e-6 * m.target_scale**2),
    "InducingSubset": (lambda _: InducingSubset(X, Y, rbf(), num_inducing=5, noise=0.2), lambda _: torch.tensor(0.2).double()),
    "CoregionalizedGPRegression": (lambda _: CoregionalizedGPRegression(X, Y, rbf()), lambda m: m.noise * m.target_scale**2),
    "SubsetSparseGPRegression": (lambda _: AsPyro(), lambda _: torch.tensor(0.2).double()),
    "LeaveOneOutRegression": (lambda _: loo(), lambda m: m.unit**2 * m.noise),
    "ActiveSet": (lambda _: ActiveSet(X, Y, rbf(), torch.tensor(0.1)), lambda _: torch.tensor(0.1)),
    "ProjectedSet": (lambda _: projected(), lambda _: torch.tensor(0.1)),
    "SASDecoder": (lambda _: decoder(), lambda m: m.noise_variance.detach()),
    "CandidateLatents": (lambda _: OfCandidates(), lambda m: m.candidates.noise),
}


@pytest.mark.parametrize("name", FAMILY)
def test_predictions_hold_the_noise_unless_they_are_noiseless(name, tmp_path):
    make, noise = FAMILY[name]
    process = make(tmp_path)
    (mean, variance), (same, own) = process.predict(NEW), process.predict(NEW, noiseless=True)
    torch.testing.assert_close(mean, same, rtol=0, atol=0)
    torch.testing.assert_close((variance - own).detach().double(), noise(process).detach().double().expand_as(own), rtol=1e-5, atol=1e-9)


def test_a_subset_regression_is_called_as_it_predicts():
    model = SubsetGPRegression(X, Y, rbf(), noise=0.3)
    assert all(map(torch.equal, model(NEW), model.predict(NEW)))


def covariances(model):
    return model.kernel.columns(torch.arange(3)).detach()


@pytest.mark.parametrize("kernel", [rbf(), lambda x: PyroKernel(rbf(), x), None], ids=["Pyro", "function", "default"])
@pytest.mark.parametrize(
    "make",
    [
        SubsetGPRegression,
        CoregionalizedGPRegression,
        lambda *a: InducingSubset(*a, num_inducing=4, noise=0.1),
        lambda X, y, kernel: SubsetSparseGPRegression(X, y.mT, kernel, num_inducing=4),
        lambda X, y, kernel: SubsetVariationalGP(X, y.mT, kernel, likelihood=likelihoods.Gaussian(), num_inducing=4),
    ],
)
def test_inputs_targets_and_a_kernel_or_a_kernel_that_holds_the_inputs(make, kernel):
    bound = smooth_rbf(X) if kernel is None else PyroKernel(rbf(), X)
    expected = covariances(make(bound, Y, None))
    torch.testing.assert_close(covariances(make(X, Y, kernel)), expected)
    torch.testing.assert_close(covariances(make(X.numpy(), Y.numpy() if make is SubsetGPRegression else Y, kernel)), expected)


def test_whole_numbers_are_inputs_like_others():
    numbers = torch.arange(12)
    torch.testing.assert_close(covariances(SubsetGPRegression(numbers, Y)), covariances(SubsetGPRegression(numbers.double(), Y)))


def test_kernels_of_gpytorch_take_inputs():
    gpytorch = pytest.importorskip("gpytorch")
    kernel = gpytorch.kernels.RBFKernel().double()
    torch.testing.assert_close(covariances(SubsetGPRegression(X, Y, kernel)), kernel(X, X[:3]).to_dense().detach())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PyroKernel(rbf(), X), Y, rbf()), "leave kernel out"),
        ((X, Y, PyroKernel(rbf(), X)), "in the place of X"),
        ((X, Y, 3), "kernel must be a kernel"),
        ((["a", "b"], Y), "kernel is needed"),
        ((rbf(), Y), "no data yet"),
        ((1j * torch.arange(12), Y), "kernel is needed"),
    ],
)
def test_kernels_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        SubsetGPRegression(*arguments)


def test_strings_take_their_kernel():
    words = spectrum(["gattaca", "tacata", "catgat"], 2)
    model = SubsetGPRegression(words, Y[:3, 0], CountKernel)
    torch.testing.assert_close(covariances(model), CountKernel(words).columns(torch.arange(3)).detach())
