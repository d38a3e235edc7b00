"""What users do first with data on a GPU: learn, look at posteriors, restore a picture, fit Gaussian processes. By night on the CPU, too.

`tests/test_gpu.py` checks that numbers are the same there; here it is that nothing on the way lies elsewhere, and that results are good.
"""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.gp.kernels import RBF
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from torch import Tensor

from pyro_truncated import (
    AutoTruncated,
    ClosedForm,
    GPSelect,
    SubsetGPRegression,
    Training,
    Truncated_ELBO,
    check_truncation,
    estimate_evidence,
    fit,
    learn,
    to_arviz,
)
from pyro_truncated.datasets import linear_bars
from pyro_truncated.gp import CountKernel, UniformSplits
from pyro_truncated.gplvm import Posterior, SASDecoder, SpikeSlabMRD
from pyro_truncated.gplvm import fit as fit_gplvm
from pyro_truncated.models import BinarySparseCoding, GaussianMixture
from pyro_truncated.multistart import DisagreeingStartsWarning
from pyro_truncated.restoration import denoise, inpaint
from pyro_truncated.search import NeighbourSearch, Search, SurrogateSearch
from tests.papers.experiments.every_model import MODELS, Images, number_found

pytestmark = pytest.mark.slow
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.nightly), pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def device(request: pytest.FixtureRequest) -> str:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    return request.param


def bars(num_data: int = 300) -> Tensor:
    return linear_bars(num_data, 4, mean_active=2.0, generator=torch.Generator().manual_seed(0)).data


@NO_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_learn_takes_the_shipped_models(name: str) -> None:
    pyro.clear_param_store()
    pyro.set_rng_seed(511)
    model, y, truth = MODELS[name](Images(511))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DisagreeingStartsWarning)
        guide = learn(model.cuda(), y.cuda(), progress=False)
    assert next(guide.buffers()).is_cuda
    found = number_found(model.cpu(), truth, guide.cpu())
    assert found >= 0.9 * truth.shape["Mixture" not in name and name != "GatedDecoder"]


@NO_GPU
@pytest.mark.gpu
def test_learn_takes_a_function() -> None:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    y = bars().cuda()

    def model(y: Tensor) -> None:
        weight = pyro.param("weight", lambda: y[:8].mT.clone())
        noise = pyro.param("noise", torch.tensor(5.0, device=y.device), constraint=dist.constraints.positive)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((8,), 0.2, device=y.device)).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT, noise).to_event(1), obs=y)

    guide = learn(model, y, progress=False)
    assert guide.marginals()["s"].is_cuda
    assert pyro.param("noise").item() < 2.5


@NO_GPU
@pytest.mark.gpu
def test_a_network_of_ones_own() -> None:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    generator = torch.Generator().manual_seed(1)
    s = (torch.rand(400, 5, generator=generator) < 0.3).float()
    y = ((2 * s @ torch.randn(5, 12, generator=generator)).tanh() @ torch.randn(12, 16, generator=generator) + 0.5).cuda()
    y = y + 0.3 * torch.randn(y.shape, generator=generator).cuda()
    network = torch.nn.Sequential(torch.nn.Linear(5, 12), torch.nn.Tanh(), torch.nn.Linear(12, 16)).cuda()

    def model(y: Tensor) -> None:
        decode = pyro.module("network", network)
        noise = pyro.param("noise", torch.tensor(1.0, device=y.device), constraint=dist.constraints.positive)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((5,), 0.3, device=y.device)).to_event(1))
            pyro.sample("y", dist.Normal(decode(s), noise).to_event(1), obs=y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DisagreeingStartsWarning)
        learn(model, y, progress=False)
    assert pyro.param("noise").item() < 0.8


def test_beside_an_autonormal(device: str) -> None:
    y = bars().to(device)

    def model(y: Tensor) -> None:
        noise = pyro.sample("noise", dist.LogNormal(torch.tensor(1.0, device=y.device), 1.0))
        weight = pyro.sample("weight", dist.Normal(torch.zeros(16, 8, device=y.device), 10.0).to_event(2))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((8,), 0.2, device=y.device)).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT, noise).to_event(1), obs=y)

    guide = AutoGuideList(model)
    guide.append(AutoNormal(pyro.poutine.block(model, hide=["s"]), init_scale=0.01))
    guide.append(AutoTruncated(model, num_states=16))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), Truncated_ELBO())
    losses = [svi.step(y) for _ in range(30)]
    assert losses[-1] < losses[0]
    assert all(map(math.isfinite, losses))


@pytest.mark.nightly
def test_the_posterior_is_looked_at(device: str) -> None:
    y = bars().to(device)
    model = BinarySparseCoding(16, 8).to(device)
    guide = learn(model, y, progress=False)
    idata = to_arviz(model, guide, y)
    assert idata.posterior["s"].shape[2:] == (300, 8)
    check_truncation(guide, y, warn=False)
    estimate_evidence(guide, y)
    new = guide.infer(y[:20] + 0.1)
    assert model.reconstruct(new.population(), y[:20]).device.type == device
    drawn = Predictive(pyro.poutine.uncondition(model), guide=guide, num_samples=3)(y)["y"]
    assert drawn.shape == (3, 300, 16)
    assert drawn.device.type == device


@pytest.mark.parametrize("search", ["composition", "rbf", "linear", "surrogate"])
def test_regressions_that_search(search: str, device: str) -> None:
    y = bars().to(device)
    model = BinarySparseCoding(16, 8).to(device).initialize(y)
    guide = AutoTruncated(model, num_states=16)
    made = SurrogateSearch(4) if search == "surrogate" else GPSelect(4, kernel=search)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(made))
    losses = [svi.step(y) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("search", [None, GPSelect(4), SurrogateSearch(4), NeighbourSearch(2)])
def test_a_run_goes_on_from_its_checkpoint(search: Search | None, device: str, tmp_path: Path) -> None:
    y, file = bars().to(device), tmp_path / "run.pt"

    def run(steps: int, checkpoint: Path | None = file) -> list[float]:
        pyro.set_rng_seed(0)
        own = copy.deepcopy(search)
        model = (GaussianMixture(16, 8) if isinstance(search, NeighbourSearch) else BinarySparseCoding(16, 8)).to(device)
        model.initialize(y, torch.Generator().manual_seed(0))
        svi = SVI(model, AutoTruncated(model, num_states=4), ClosedForm(model, minibatch="online"), Truncated_ELBO(own))
        training: Training = fit(svi, y, 100, steps=steps, checkpoint=checkpoint, progress=False)
        return training.record["free_energy"]

    through = run(6, None)
    run(3)
    assert run(6) == pytest.approx(through, rel=1e-6)


@pytest.mark.nightly
def test_a_picture_is_restored(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.meshgrid(torch.linspace(0, 12, 40), torch.linspace(0, 9, 40), indexing="ij")
    clean = 100 + 50 * rows.sin() + 40 * (columns + rows / 3).cos().sign()
    noisy = clean + 20 * torch.randn(clean.shape, generator=generator)
    restored = denoise(noisy.to(device), progress=False).image
    assert restored.device.type == device
    assert (restored.cpu() - clean).square().mean() < 0.5 * 400
    holed = torch.where(torch.rand(clean.shape, generator=generator) < 0.5, torch.nan, clean)
    filled = inpaint(holed.to(device), progress=False).image
    assert filled.device.type == device
    assert (filled.cpu() - clean).square().mean() < 0.3 * clean.var()


@pytest.mark.parametrize("kind", ["continuous", "counts", "exact"])
def test_sparse_regression(kind: str, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 5, (400, 3), generator=generator) if kind == "counts" else torch.rand(400, 3, generator=generator).double()
    f = x.double().sum(1).sin() if kind != "counts" else x.double().sum(1)
    y = f + 0.1 * torch.randn(400, generator=generator).double()
    options = {"kernel": CountKernel} if kind == "counts" else {}
    model = SubsetGPRegression(x[:300].to(device), y[:300].to(device), num_inducing=None if kind == "exact" else 60, **options)
    model.fit(max_epochs=10)
    mean, variance = model.predict(x[300:].to(device))
    assert mean.device.type == device
    assert variance.device.type == device
    assert (mean.cpu() - f[300:]).square().mean() < 0.2 * f.var()


def test_two_views(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    signals = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    views = [
        (signals[:, [0, end]] @ torch.randn(2, 12, generator=generator, dtype=torch.float64)
         + 0.1 * torch.randn(50, 12, generator=generator, dtype=torch.float64)).to(device)
        for end in (1, 2)
    ]  # fmt: skip
    model = SpikeSlabMRD(50, [12, 12], 4, kernel="linear").to(device)
    result = fit_gplvm(model, views, warm_up=50, steps=50, generator=torch.Generator().manual_seed(0))
    assert math.isfinite(result.bound)
    Posterior(model, views).group_dimensions()
    assert model.loc.device.type == device


def test_active_sets(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    latent = torch.rand(200, 2, generator=generator)
    x = (latent @ torch.randn(2, 20, generator=generator)).sin().to(device)
    decoder = SASDecoder(200, 20).to(device).initialize(x)
    svi = SVI(decoder.model, decoder.guide, pyro.optim.Adam(decoder.learning_rates(0.05, 0.02)), Trace_ELBO())
    splits = UniformSplits(200, 100, 40)
    for epoch in range(15):
        for split in splits.epoch(epoch):
            svi.step(x, split)
    decoder.relocate_(x)
    decoder.condition_(x)
    mean, _ = decoder.predict(decoder.infer(x[:10]))
    assert mean.device.type == device
    assert (mean - x[:10]).square().mean() < 0.2 * x.var()


def test_a_kernel_of_pyro(device: str) -> None:
    x = torch.linspace(0, 6, 100, device=device).double().unsqueeze(-1)
    model = SubsetGPRegression(x, x.squeeze(-1).sin(), RBF(1).to(device).double(), num_inducing=10)
    model.fit(max_epochs=5)
    assert (model.predict(x)[0] - x.squeeze(-1).sin()).abs().max() < 0.1
