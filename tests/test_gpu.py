"""The same results on a GPU as on the CPU; skipped where there is none."""

from __future__ import annotations

import dataclasses

import pyro
import pytest
import torch
from pyro.infer import SVI, Predictive, TraceEnum_ELBO

from pyro_truncated import (
    AutoTruncated,
    ClosedForm,
    EvolutionarySearch,
    ExhaustiveSearch,
    Population,
    SampledSearch,
    StateSpace,
    Truncated_ELBO,
)
from pyro_truncated.datasets import linear_bars, noisy_or_bars
from pyro_truncated.models import BinarySparseCoding, NoisyOr

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def bsc(device: str, missing: bool = False):
    bars = linear_bars(200, 4, mean_active=2.0, generator=torch.Generator().manual_seed(0))
    y = bars.data.double()
    if missing:
        y[torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.2] = torch.nan
    torch.manual_seed(2)
    model = BinarySparseCoding(16, 8, dtype=torch.float64)
    model.initialize(y, torch.Generator().manual_seed(3))
    return model.to(device), y.to(device)


def noisy_or(device: str, missing: bool = False):
    y = noisy_or_bars(200, 4, generator=torch.Generator().manual_seed(0)).data.double()
    if missing:
        y[torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.2] = torch.nan
    torch.manual_seed(2)
    model = NoisyOr(16, 8, dtype=torch.float64)
    model.initialize(y, torch.Generator().manual_seed(3))
    return model.to(device), y.to(device)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("make", [bsc, noisy_or])
def test_exact_em_takes_the_same_course(make, missing):
    courses = []
    for device in ("cpu", "cuda"):
        pyro.clear_param_store()
        model, y = make(device, missing)
        guide = AutoTruncated(model, num_states=256)
        svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
        courses.append([svi.step(y) for _ in range(10)])
    assert courses[0] == pytest.approx(courses[1], rel=1e-9)
    assert courses[1] == sorted(courses[1], reverse=True)


@pytest.mark.parametrize("make", [bsc, noisy_or])
def test_gradients_and_the_stock_elbo(make):
    found = []
    for device in ("cpu", "cuda"):
        pyro.clear_param_store()
        model, y = make(device)
        guide = AutoTruncated(model, num_states=256)
        loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, guide, y)
        grads = [p.grad.clone().cpu() for p in model.parameters()]
        stock = TraceEnum_ELBO(max_plate_nesting=1).loss(model, guide, y)
        assert stock == pytest.approx(loss, rel=1e-9)
        found.append((loss, grads))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("crossover", [False, True])
@pytest.mark.parametrize("mutation", ["randflips", "sparseflips"])
def test_search_improves_and_stays_distinct(crossover, mutation):
    model, y = bsc("cuda")
    guide = AutoTruncated(model, num_states=32)
    search = EvolutionarySearch(crossover=crossover, mutation=mutation) + SampledSearch(8)
    log_joint = guide.log_joint_of(y)
    values = [guide.search_(search, log_joint).free_energy().sum().item() for _ in range(5)]
    assert values == sorted(values)
    assert values[-1] > values[0]
    guide.population().assert_distinct()


def test_a_guide_moves_between_devices():
    model, y = bsc("cpu")
    guide = AutoTruncated(model, num_states=16)
    elbo = Truncated_ELBO(ExhaustiveSearch())
    loss = elbo.loss_and_grads(model, guide, y)
    model.cuda()
    with pytest.raises(ValueError, match=r"populations are on cpu, the model's states on cuda.*guide.to"):
        guide(y.cuda())
    guide.cuda()
    assert elbo.loss(model, guide, y.cuda()) == pytest.approx(loss, rel=1e-9)
    samples = Predictive(model, guide=guide, num_samples=3, parallel=True)(y.cuda())
    assert samples["s"].device.type == "cuda"
    state = {name: value.cpu() for name, value in guide.state_dict().items()}
    fresh = AutoTruncated(model, num_states=16)
    fresh.load_state_dict(state)
    fresh.cuda()
    assert elbo.loss(model, fresh, y.cuda()) == pytest.approx(loss, rel=1e-9)


def test_populations_agree():
    space = StateSpace([2] * 70)
    words = space.random((50, 40), 0.2)
    scores = torch.randn(50, 40, dtype=torch.float64)
    population = Population(space, words[:, :20], scores[:, :20])
    candidates = Population(space, words[:, 20:], scores[:, 20:])
    merged = population.merge(candidates)
    moved = [dataclasses.replace(p, words=p.words.cuda(), log_joint=p.log_joint.cuda()) for p in (population, candidates)]
    other = moved[0].merge(moved[1])
    torch.testing.assert_close(merged.log_joint.sort(1).values, other.log_joint.sort(1).values.cpu())
    torch.testing.assert_close(merged.marginals(), other.marginals().cpu())
