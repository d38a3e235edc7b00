"""NumPy arrays are taken where tensors are."""

from __future__ import annotations

import contextlib
import warnings

import numpy as np
import pytest
import torch
import xarray
from pyro.contrib.gp import kernels
from pyro.infer import SVI

from pyro_truncated import (
    AutoTruncated,
    ClosedForm,
    EvolutionarySearch,
    SASDecoder,
    SpikeSlabGPLVM,
    Truncated_ELBO,
    best_start,
    gplvm,
    models,
)
from pyro_truncated.datasets import linear_bars
from pyro_truncated.gp import PyroKernel
from pyro_truncated.restoration import denoise
from pyro_truncated.sklearn import TruncatedMixture
from pyro_truncated.utils.arrays import as_data, as_tensors


@pytest.fixture
def y(generator):
    return linear_bars(20, 3, mean_active=2.0, generator=generator).data.double()


KINDS = [models.BinarySparseCoding, models.SpikeSlabSparseCoding, models.MaximalCauses, models.GaussianMixture, models.DiscreteSparseCoding]


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("kind", KINDS)
def test_training_on_an_array_is_training_on_a_tensor(kind, y):
    found = []
    for data in (y.float(), y.numpy()):
        torch.manual_seed(0)
        model = kind(9, 4).initialize(data)
        guide = AutoTruncated(model, num_states=4)
        svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(3, 2, 1)))
        losses = [svi.step(data) for _ in range(2)]
        found.append((losses, [value.clone() for value in model.parameters()], guide.infer(data, EvolutionarySearch(3, 2, 1)).words))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))
    assert torch.equal(found[0][2], found[1][2])
    assert found[1][1][0].dtype == torch.float32


def test_starts_take_arrays(y):
    states = (np.arange(4)[:, None] >> np.arange(4)) & 1
    model = models.BinarySparseCoding(9, 4)
    reached = best_start(model, y.numpy(), EvolutionarySearch(3, 2, 1), num_starts=1, steps=1, num_states=4)
    assert len(reached) == 1
    for init in (np.broadcast_to(states, (20, 4, 4)), {"s": np.broadcast_to(states, (20, 4, 4))}):
        guide = AutoTruncated(model, num_states=4, init=init)
        guide(y.numpy())
        assert torch.equal(guide.states()["s"][3], torch.from_numpy(states).to(guide.states()["s"]))


def test_decoders_and_latent_variable_models_take_arrays(y):
    decoder = SASDecoder(20, 9, 2, num_active=5).initialize(y.numpy())
    assert decoder.loc.dtype == torch.float32
    model = SpikeSlabGPLVM(20, 9, 2, num_inducing=4)
    assert torch.equal(model.bound([y.numpy()]), model.bound([y]))


@pytest.mark.slow
def test_functions_of_latent_variable_models_take_arrays(y):
    found = []
    for data, start in ((y, torch.ones(20, 2).cumsum(0)), (y.numpy(), np.ones((20, 2)).cumsum(0))):
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        model = gplvm.SpikeSlabGPLVM(20, 9, 2, num_inducing=4)
        views = [data]
        gplvm.fit(model=model, y=views, start=start, steps=2, warm_up=2, rounds=1, generator=generator)
        gplvm.maximize_bound(model, data, 1)
        gplvm.update_switches(model, views)
        gplvm.switch_log_odds(model, views)
        gplvm.settle_switches(model, views)
        gplvm.switch_moves(model, views)
        gplvm.remove_dimensions(model, views, 1)
        gplvm.natural_step(gplvm.explicit_copy(model, views), views)
        posterior = gplvm.Posterior(model, views)
        latents = posterior.infer({0: data[:5]}, steps=2)
        posterior.infer(data[:5], steps=1)
        posterior.distances(latents, (0, 0), start)
        found.append([model.loc.detach(), posterior.predict(start).mean, latents.loc, gplvm.principal_components(views, 2)])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)


def test_gated_decoder_is_made_from_arrays(y):
    switches, poses = torch.ones(20, 2), torch.linspace(-1, 1, 40).double().reshape(20, 2, 1)
    torch.manual_seed(0)
    expected = models.GatedDecoder(y, switches, poses, width=4)
    torch.manual_seed(0)
    model = models.GatedDecoder(y.numpy(), switches.numpy().astype(bool), poses.numpy(), width=4)
    assert all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))
    assert torch.equal(model.active_set().log_prob_terms(), expected.active_set().log_prob_terms())


def test_kernels_take_arrays(y):
    kernel, expected = (PyroKernel(kernels.RBF(9), data) for data in (y.float().numpy(), y.float()))
    assert torch.equal(kernel.columns(torch.arange(3)), expected.columns(torch.arange(3)))


def test_arrays_that_torch_cannot_share_are_copied():
    array = np.arange(6.0).reshape(2, 3)
    frozen = array.copy()
    frozen.flags.writeable = False
    for given in (frozen, array[::-1], array.astype(">f8"), array[:, ::-1]):
        assert torch.equal(as_tensors(given), torch.tensor(given.astype(float).tolist(), dtype=torch.float64))
    assert as_tensors(array, torch.zeros(1)).dtype == torch.float32
    assert as_tensors(np.arange(3), torch.zeros(1)).dtype == torch.int64
    assert as_tensors("text") == "text"


HIDDEN = np.array([[True, False], [False, False]])
UNDER = np.array([[-9999, 1], [2, 3]])


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "uint8", "object"])
@pytest.mark.parametrize("is_hard", [True, False])
def test_masked_entries_are_missing_whatever_the_type(dtype, is_hard):
    masked = np.ma.MaskedArray(UNDER.clip(0).astype(dtype), HIDDEN, hard_mask=is_hard)
    expected = torch.tensor([[torch.nan, 1.0], [2.0, 3.0]], dtype=torch.float64)
    for found in (as_data("y", masked), as_tensors(masked), as_data("y", list(masked))):
        torch.testing.assert_close(found.double(), expected, equal_nan=True)


def test_text_below_a_mask_is_missing():
    column = np.ma.MaskedArray(np.array(["n/a", 2.5], dtype=object), [True, False])
    torch.testing.assert_close(as_data("y", column), torch.tensor([torch.nan, 2.5], dtype=torch.float64), equal_nan=True)


def test_numbers_as_objects_are_numbers_in_xarray():
    table = xarray.DataArray(np.array([[1, None], [2.5, 3]], dtype=object))
    expected = torch.tensor([[1.0, torch.nan], [2.5, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(as_data("y", table), expected, equal_nan=True)


def test_complex_and_sparse_tensors_are_named():
    with pytest.raises(TypeError, match=r"image must hold real numbers; got torch.complex64"):
        denoise(torch.zeros(8, 8, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"image must be dense; got a tensor of layout torch.sparse_coo: call its to_dense\(\)"):
        denoise(torch.eye(8).to_sparse())
    with pytest.raises(TypeError, match="X must be dense"):
        TruncatedMixture(2).fit(torch.eye(8).to_sparse())


@pytest.mark.parametrize("as_given", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize(("scale", "offset"), [(1.0, 1e8), (1e-50, 0.0), (1e50, 0.0)])
def test_digits_that_the_type_of_a_model_loses_are_named(y, as_given, scale, offset):
    far = as_given(scale * y.numpy() + offset)
    with pytest.warns(UserWarning, match=r"lose precision in torch.float32, the model's dtype"), contextlib.suppress(ValueError):
        models.BinarySparseCoding(y.shape[1], 3, dtype=torch.float32).initialize(far)


def test_digits_that_are_kept_are_not_named(y):
    constant = np.where(np.arange(y.shape[1]) == 0, 0.1, y.numpy() + 1e3)
    with warnings.catch_warnings(action="error"):
        models.BinarySparseCoding(y.shape[1], 3, dtype=torch.float32).initialize(constant)
        models.BinarySparseCoding(y.shape[1], 3, dtype=torch.float64).initialize(y + 1e8)


@pytest.mark.parametrize(("rows", "reason"), [(np.zeros((4, 3), dtype=complex), "got complex128"), (np.full((4, 3), "a"), "array of <U1")])
def test_methods_name_arrays_that_are_no_real_numbers(rows, reason):
    decoder = SASDecoder(20, 3, num_active=5, batch_size=10)
    for call in (decoder.fit, decoder.infer):
        with pytest.raises(TypeError, match=f"^x must .*{reason}"):
            call(rows)
