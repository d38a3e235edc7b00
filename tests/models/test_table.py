"""What every model promises, checked row by row of the table in `configurations.py`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI, Predictive, TraceEnum_ELBO
from pyro.optim import Adam
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, ExhaustiveSearch, Population, Truncated_ELBO
from pyro_truncated import models as library
from tests.models.configurations import CLOSED_FORM, CONFIGURATIONS, D64, ELSEWHERE, WITH_MISSING, WITH_UNITS, Configuration, D

N = 20


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def trained_by_em(row: Configuration, y: Tensor, steps: int, dtype: torch.dtype = D64) -> list[float]:
    """Free energies of EM with exact posteriors, from the model's own start."""
    pyro.clear_param_store()
    model = row.make(dtype).initialize(y, generator())
    svi = SVI(model, AutoTruncated(model, row.space().size), ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    return [-svi.step(y) for _ in range(steps)]


def assert_never_falls(values: list[float]) -> None:
    for before, after in itertools.pairwise(values):
        assert after >= before - 1e-8 * abs(before), f"the free energy fell from {before} to {after}"


def one_em_step(row: Configuration, model: Any, y: Tensor) -> None:
    model.maximize(model.sufficient_statistics(row.population(model, y), y))


def test_no_model_is_left_out() -> None:
    known = {name.split("-")[0] for name in CONFIGURATIONS}
    assert known | ELSEWHERE == {name for name in library.__all__ if isinstance(getattr(library, name), type)}


class Reads(Messenger):
    """Effect handler that counts how often each parameter is read."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def _pyro_param(self, msg: Any) -> None:
        self.counts[msg["name"]] += 1


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_run_reads_every_parameter_once(name: str) -> None:
    row = CONFIGURATIONS[name]
    model, y = row.make(D64), row.generate(4)
    with Reads() as reads:
        model(y)
    # On few data points, messages to handlers are a good part of what a step costs.
    assert len(reads.counts) == len(list(model.parameters()))
    assert set(reads.counts.values()) == {1}


@pytest.mark.nightly(keep="values")
@pytest.mark.parametrize(("name", "with_missing"), WITH_MISSING)
def test_bound_and_gradients_of_all_states_are_those_of_the_evidence(name: str, with_missing: bool) -> None:
    row = CONFIGURATIONS[name]
    y, model = row.generate(N, with_missing=with_missing), row.make(D64)
    exact = row.log_joint(model, y).logsumexp(-1).sum()
    parameters = list(model.parameters())
    assert len(parameters) >= 2
    gradients = torch.autograd.grad(-exact, parameters)
    pyro.clear_param_store()
    guide = AutoTruncated(model, num_states=row.space().size)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, guide, y)
    assert loss == pytest.approx(-exact.item(), rel=1e-9)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-7, atol=1e-7)
    # Pyro's own ELBO agrees on model and guide.
    assert TraceEnum_ELBO(max_plate_nesting=1).loss(model, guide, y) == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("name", [name for name, missing in WITH_MISSING if missing])
def test_missing_entries_have_no_influence(name: str) -> None:
    row = CONFIGURATIONS[name]
    model, y = row.make(D64), row.generate(6)
    whole = row.log_joint(model, y).detach()
    y[1], y[3, :2] = torch.nan, torch.nan
    part = row.log_joint(model, y).detach()
    torch.testing.assert_close(part[[0, 2, 4, 5]], whole[[0, 2, 4, 5]])
    # Nothing is known of data point 1: the prior.
    torch.testing.assert_close(part[1].logsumexp(0), torch.zeros((), dtype=D64), rtol=0, atol=1e-12)
    assert part.isfinite().all()


@pytest.mark.nightly(keep=12)
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_gradient_steps_raise_the_evidence(name: str) -> None:
    row = CONFIGURATIONS[name]
    y, model = row.generate(N), row.make(D64)
    before = row.log_joint(model, y).logsumexp(-1).sum().item()
    pyro.clear_param_store()
    svi = SVI(model, AutoTruncated(model, num_states=row.space().size), Adam({"lr": 0.02}), Truncated_ELBO(ExhaustiveSearch()))
    for _ in range(8):
        svi.step(y)
    assert row.log_joint(model, y).logsumexp(-1).sum().item() > before


@pytest.mark.nightly(keep=12)
@pytest.mark.slow
@pytest.mark.parametrize("start", ["random", "data"])
@pytest.mark.parametrize(("name", "with_missing"), [(name, missing) for name, missing in WITH_MISSING if name in CLOSED_FORM])
def test_em_never_lowers_the_free_energy(name: str, with_missing: bool, start: str) -> None:
    row = CONFIGURATIONS[name]
    y, model = row.generate(N, with_missing=with_missing), row.make(D64)
    if start == "data":
        model.initialize(y)
    # All states, then the fixed halves of them that are best at first.
    for keep in (row.space().size, (row.space().size + 1) // 2):
        chosen = row.population(model, y).log_joint.topk(keep).indices
        values = []
        for _ in range(15):
            population = row.population(model, y, chosen)
            values.append(
                population.free_energy().sum().item() + (float(model.log_prior().detach()) if hasattr(model, "log_prior") else 0.0)
            )
            model.maximize(model.sufficient_statistics(population, y))
        assert_never_falls(values)


@pytest.mark.parametrize(("name", "with_missing"), [(name, missing) for name, missing in WITH_MISSING if name in CLOSED_FORM])
def test_the_m_step_is_stationary(name: str, with_missing: bool) -> None:
    row = CONFIGURATIONS[name]
    y, model = row.generate(3 * N, with_missing=with_missing), row.make(D64)
    population = row.population(model, y)
    model.maximize(model.sufficient_statistics(population, y))
    expected = (population.weights() * row.log_joint(model, y)).sum()
    assert row.stationary
    for gradient in torch.autograd.grad(expected, [getattr(model, f"{parameter}_unconstrained") for parameter in row.stationary]):
        assert gradient.abs().max() < 1e-8


# Where a step is chosen it is that of a whole batch; what it is made of adds up, see test_statistics.py of the distributions.
@pytest.mark.parametrize("name", [name for name in CLOSED_FORM if not CONFIGURATIONS[name].chooses_steps])
def test_statistics_add_up_and_follow_the_temperature(name: str) -> None:
    row = CONFIGURATIONS[name]
    model, y = row.make(D64), row.generate(N, with_missing=row.takes_missing)
    population = row.population(model, y)
    whole = model.sufficient_statistics(population, y, temperature=2.0)
    cooled = Population(population.space, population.words, population.log_joint / 2.0)
    parts = [model.sufficient_statistics(part, y) for part in cooled.split(12)]
    assert len(parts) == 2
    for key, value in whole.items():
        assert value.dtype == D64
        torch.testing.assert_close(parts[0][key] + parts[1][key], value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", CLOSED_FORM)
def test_statistics_are_those_of_the_data_points_of_the_population(name: str) -> None:
    row = CONFIGURATIONS[name]
    model, y, index = row.make(D64), row.generate(N), torch.tensor([7, 2, 11, 5])
    population = row.population(model, y[index])
    among_all = Population(population.space, population.words, population.log_joint, index)
    for key, value in model.sufficient_statistics(population, y[index]).items():
        torch.testing.assert_close(model.sufficient_statistics(among_all, y)[key], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CLOSED_FORM)
def test_float32_follows_float64(name: str) -> None:
    row = CONFIGURATIONS[name]
    double, single, y = row.make(D64), row.make(torch.float32), row.generate(3 * N)
    single.load_state_dict(double.state_dict())
    for model, data in ((double, y), (single, y.float())):
        one_em_step(row, model, data)
    for parameter, expected in double.state_dict().items():
        found = single.state_dict()[parameter]
        assert found.dtype == (torch.bool if expected.dtype == torch.bool else torch.float32) or parameter in (
            "center",
            "bulk",
            "spread",
            "pseudo",
        )
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_state_dict_holds_all_that_a_model_is(name: str) -> None:
    row = CONFIGURATIONS[name]
    y, model = row.generate(N), row.make(D64)
    model.initialize(y)
    fresh = row.make(D64)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(row.log_joint(fresh, y), row.log_joint(model, y), rtol=0, atol=0)


@pytest.mark.nightly(keep=12)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_generates_predicts_and_subsamples(name: str) -> None:
    row = CONFIGURATIONS[name]
    y, model = row.generate(N), row.make(D64)
    assert model(num_data=4).shape == (4, D)
    assert Predictive(model, num_samples=3)(num_data=4)["y"].shape == (3, 4, D)
    guide = AutoTruncated(model, num_states=3)
    guide.refresh_(y)
    draws = Predictive(model, guide=guide, num_samples=3)(y)[row.site]
    assert draws.shape == (3, N, len(row.cardinalities)) if row.site == "s" else (3, N)
    nodes = pyro.poutine.trace(model).get_trace(y, batch_size=8).nodes
    assert nodes["y"]["scale"] == N / 8
    assert nodes["y"]["value"].shape == (8, D)


@pytest.mark.nightly(keep=12)
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_one_data_point(name: str) -> None:
    row, search = CONFIGURATIONS[name], EvolutionarySearch(parents=2, children=2, generations=1)
    y, model = row.generate(4, torch.float32), row.make(torch.float32)
    model.initialize(y[:1])
    guide = AutoTruncated(model, 3)
    for optimizer in ([ClosedForm(model)] if row.is_closed_form else []) + [Adam({"lr": 0.01})]:
        svi = SVI(model, guide, optimizer, Truncated_ELBO(search))
        assert all(math.isfinite(svi.step(y[:1])) for _ in range(2))
        assert math.isfinite(svi.evaluate_loss(y[:1]))
        if row.is_closed_form and isinstance(optimizer, ClosedForm):
            optimizer.release()
    new = guide.infer(y[1:2], search, 1).population().free_energy()
    assert model(num_data=1).shape == (1, D)
    evidence = row.log_joint(model, y[1:2]).logsumexp(-1)
    assert new.shape == evidence.shape
    assert bool((new <= evidence + 1e-4 * (1 + evidence.abs())).all())
    # A batch of one.
    pyro.clear_param_store()
    model = row.make(torch.float32)
    svi = SVI(model, AutoTruncated(model, 3), Adam({"lr": 0.01}), Truncated_ELBO(search))
    assert all(math.isfinite(svi.step(y, 1)) for _ in range(3))


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e-12, 7e-6, 1e12])
@pytest.mark.parametrize("name", WITH_UNITS)
def test_free_energies_in_another_unit_differ_by_its_logarithm(name: str, unit: float) -> None:
    y = CONFIGURATIONS[name].generate(3 * N)
    own, other = (torch.tensor(trained_by_em(CONFIGURATIONS[name], data, 4), dtype=D64) for data in (y, unit * y))
    torch.testing.assert_close(other + y.numel() * math.log(unit), own, atol=1e-6, rtol=1e-9)


@pytest.mark.nightly(keep=8)
@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e-12, 1e12])
@pytest.mark.parametrize("name", WITH_UNITS)
def test_units_in_single_precision(name: str, unit: float) -> None:
    y = CONFIGURATIONS[name].generate(3 * N, torch.float32)
    own, other = (trained_by_em(CONFIGURATIONS[name], data, 6, torch.float32)[-1] for data in (y, unit * y))
    assert other + y.numel() * math.log(unit) == pytest.approx(own, abs=0.01 * y.numel())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_starts_are_reproducible_and_refuse_other_shapes(name: str) -> None:
    row = CONFIGURATIONS[name]
    y, model = row.generate(N, with_missing=row.takes_missing), row.make(D64)
    options = {} if name == "BinaryVAE" else {"generator": generator()}
    assert model.initialize(y, **options) is model
    if options:
        other = row.make(D64).initialize(y, generator())
        for key, value in model.state_dict().items():
            assert torch.equal(other.state_dict()[key], value), key
    with pytest.raises(ValueError, match=rf"y must have shape \(N, {D}\) with N > 0"):
        model.initialize(y[:, :3])
    with pytest.raises(ValueError, match=rf"y must have shape \(N, {D}\) with N > 0"):
        model.initialize(y[:0])


@pytest.mark.nightly(keep=10)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_arrays_are_taken_for_tensors(name: str) -> None:
    row = CONFIGURATIONS[name]
    y = row.generate(N)
    found = []
    for data in (y, y.numpy()):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model = row.make(D64)
        model.initialize(data)
        loss = Truncated_ELBO(ExhaustiveSearch()).loss(model, AutoTruncated(model, row.space().size), data)
        statistics = model.sufficient_statistics(row.population(model, y), data) if row.is_closed_form else {}
        found.append((loss, statistics))
    assert found[0][0] == found[1][0]
    for key, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][key], value, rtol=0, atol=0)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_impossible_data_are_refused_by_name(name: str) -> None:
    row = CONFIGURATIONS[name]
    y, model = row.generate(N), row.make(D64)
    y[2, 1] = row.bad
    with pytest.raises(ValueError, match=r"site 'y' observes .* at data point 2"):
        model.initialize(y)
    guide = AutoTruncated(model, num_states=3)
    with pytest.raises(ValueError, match=r"site 'y' observes .* at data point 2"):
        Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, guide, y)
