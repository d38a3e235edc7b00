"""What several processes do together beside steps: starting, learning, deciding, failing, and DistributedDataParallel."""

from __future__ import annotations

import os
import warnings
from typing import Any

import numba
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_truncated import (
    AutoTruncated,
    ClosedForm,
    EvolutionarySearch,
    LearnConfig,
    SpikeSlabGPLVM,
    Truncated_ELBO,
    best_start,
    distributed,
    learn,
)
from pyro_truncated.datasets import linear_bars
from pyro_truncated.distributed import OtherProcessError, UnsharedDataWarning
from pyro_truncated.gplvm import SASFunctionDecoder
from pyro_truncated.models import BinarySparseCoding


def data(number: int = 40) -> torch.Tensor:
    return linear_bars(number, 3, mean_active=2.0, generator=torch.Generator().manual_seed(0)).data.double()


def made(y: torch.Tensor, seed: int = 5) -> tuple[BinarySparseCoding, SVI]:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model = BinarySparseCoding(9, 6, dtype=torch.float64).initialize(y)
    elbo = Truncated_ELBO(EvolutionarySearch(parents=3, children=2, generations=2))
    return model, SVI(model, AutoTruncated(model, num_states=8), ClosedForm(model), elbo)


def starts_differently() -> list[float]:
    y = distributed.shard(data())
    _, svi = made(y, seed=distributed.rank())
    return [svi.step(y) for _ in range(4)]


def test_processes_with_other_seeds_start_as_the_first_does(crew):
    _, svi = made(data(), seed=0)
    expected = [svi.step(data()) for _ in range(4)]
    for found in crew.results(2, starts_differently):
        assert found == pytest.approx(expected, rel=1e-12)


def chosen_starts() -> tuple[list[float], torch.Tensor]:
    y = distributed.shard(data(60))
    model, _ = made(y)
    reached = best_start(model, y, EvolutionarySearch(3, 2), num_starts=2, num_data=20, steps=3, num_states=8)
    return reached, model.weight.detach()


def test_best_start_is_that_of_one_process(crew):
    expected, weight = chosen_starts()
    for reached, found in crew.results(3, chosen_starts):
        assert reached == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(found, weight, rtol=1e-10, atol=1e-10)


def learned(number: int) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    y = distributed.shard(data(number))
    model = BinarySparseCoding(9, 6, dtype=torch.float64)
    guide = learn(model, y, num_states=8, steps=4, restarts=2, config=LearnConfig(restart_steps=4, tolerance=1e9), progress=False)
    return guide.starts, model.weight.detach(), guide.marginals()["s"]


@pytest.mark.parametrize("number", [40, 1010])
def test_learn_is_that_of_one_process(number, crew):
    starts, weight, marginals = learned(number)
    found = crew.results(2, learned, number)
    for reached, own, _ in found:
        assert reached == pytest.approx(starts, rel=1e-12)
        torch.testing.assert_close(own, weight, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(torch.cat([own for *_, own in found]), marginals, rtol=1e-6, atol=1e-6)


def causes(y: torch.Tensor) -> None:
    weight = pyro.param("weight", lambda: torch.randn(6, 9, dtype=torch.float64))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((6,), 0.3, dtype=torch.float64)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight, 1.0).to_event(1), obs=y)


def causes_with_priors(y: torch.Tensor) -> None:
    weight = pyro.sample("weight", dist.Normal(torch.zeros(9, 3).double(), 1.0).to_event(2))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.3, dtype=torch.float64)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, 0.5).to_event(1), obs=y)


def learned_function(model: Any, first_seed: int) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Free energies of the restarts, the loss afterwards, and all parameters, from other seeds in every process."""
    pyro.clear_param_store()
    pyro.set_rng_seed(first_seed + distributed.rank())
    y = distributed.shard(data(60))
    config = LearnConfig(restart_steps=8, min_restarts=3)
    with warnings.catch_warnings(action="ignore"):
        guide = learn(model, y, num_states=8, steps=12, restarts=3, config=config, progress=False)
    pyro.set_rng_seed(7)
    loss = Truncated_ELBO().loss(model, guide, y)
    return guide.starts, loss, {name: value.detach().clone() for name, value in pyro.get_param_store().named_parameters()}


@pytest.mark.parametrize("model", [causes, causes_with_priors])
def test_functions_are_learned_alike_by_all_processes(model, crew):
    """Units of steps are measured by random states of a process's rows: one process ends nearly where two do."""
    starts, loss, _ = learned_function(model, 1)
    (reached, found, parameters), *others = crew.results(2, learned_function, model, 1)
    assert reached == pytest.approx(starts, rel=1e-10)
    assert found == pytest.approx(loss, rel=1e-2)
    for same, total, own in others:
        assert (same, total) == (reached, found)
        assert all(torch.equal(own[name], value) for name, value in parameters.items())


def impossible_data() -> Any:
    y = data()
    y[-1] = torch.inf
    y = distributed.shard(y)
    model = BinarySparseCoding(9, 6, dtype=torch.float64)
    svi = SVI(model, AutoTruncated(model, num_states=8), ClosedForm(model), Truncated_ELBO(EvolutionarySearch(3, 2)))
    return svi.step(y)


def test_data_that_one_process_refuses_are_refused_by_all(crew):
    first, second = crew.run(2, impossible_data)
    assert isinstance(second, ValueError)
    assert isinstance(first, OtherProcessError)
    assert "process 1 failed with ValueError: site 'y' observes" in str(first)


# --- what is not shared ---


def test_what_needs_whole_data_refuses_shards_by_name():
    y = distributed.Shard.from_rows(data(10), distributed.Portion(0, 10, 20))
    decoder = SASFunctionDecoder(20, 9, lambda f: dist.Normal(f, 0.1).to_event(1), num_active=3, batch_size=6)
    with pytest.raises(NotImplementedError, match="the functions of a minibatch are drawn together"):
        decoder.initialize(y)
    with pytest.raises(NotImplementedError, match="SpikeSlabGPLVM takes shards of data in fit_minibatches only"):
        SpikeSlabGPLVM(10, 9, num_latents=2).bound(y)


def test_populations_of_other_rows_are_refused():
    states = []
    for first in (0, 10):
        _, svi = made(y := distributed.Shard.from_rows(data(10), distributed.Portion(first, 10, 20)))
        svi.guide.setup(y)
        states.append(svi.guide.state_dict())
        fresh = AutoTruncated(svi.model, num_states=8)
        fresh.load_state_dict(states[0])
        if first == 0:
            fresh.setup(y)
        else:
            with pytest.raises(ValueError, match=r"are those of data points 0 \.\. 9 of 20, here are 10 \.\. 19 of 20"):
                fresh.setup(y)
            with pytest.raises(RuntimeError, match=r"are those of data points 0 \.\. 9 of 20"):
                svi.guide.load_state_dict(states[0])


def with_local_parameters() -> tuple[list[float], torch.Tensor, torch.Tensor]:
    pyro.clear_param_store()
    pyro.set_rng_seed(3)
    y = distributed.shard(data(7))

    def model(y: torch.Tensor) -> None:
        weight = pyro.param("weight", lambda: torch.linspace(-1, 1, 27).reshape(9, 3).double())
        loudness = pyro.param("loudness", lambda: distributed.global_positions(y).double() / 7 + 0.5)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.3).double()).to_event(1))
            pyro.sample("y", dist.Normal(loudness.unsqueeze(-1) * (s @ weight.mT), 1.0).to_event(1), obs=y)

    driver = distributed.AllReduced(Adam({"lr": 0.05}), local=["loudness"])
    svi = SVI(model, AutoTruncated(model, num_states=4), driver, Truncated_ELBO(EvolutionarySearch(2, 2)))
    losses = [svi.step(y) for _ in range(3)]
    return losses, pyro.param("weight").detach(), pyro.param("loudness").detach()


def test_parameters_of_data_points_stay_with_their_process(crew):
    losses, weight, loudness = with_local_parameters()
    found = crew.results(2, with_local_parameters)
    for own, held, _ in found:
        assert own == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(held, weight, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([own for *_, own in found]), loudness, rtol=1e-10, atol=1e-10)


def test_a_script_that_shares_nothing_is_warned(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    _, svi = made(data())
    with pytest.warns(UnsharedDataWarning, match="one of 2 processes, each of which trains a model of its own"):
        svi.step(data())


# --- DistributedDataParallel ---


def by_gradients(is_parallel: bool) -> tuple[list[float], torch.Tensor]:
    pyro.clear_param_store()
    pyro.set_rng_seed(5)
    y = distributed.shard(data())
    with pyro.settings.context(module_local_params=True):
        model = BinarySparseCoding(9, 6, dtype=torch.float64, offset=False).initialize(y)
        guide = AutoTruncated(model, 8)
        guide.setup(y)
        module = Truncated_ELBO(EvolutionarySearch(3, 2))(model, guide)
        wrapped = torch.nn.parallel.DistributedDataParallel(module) if is_parallel else module
        optimiser = torch.optim.SGD(wrapped.parameters(), lr=1e-4)
        losses = []
        for _ in range(5):
            optimiser.zero_grad()
            loss = wrapped(y)
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
    return losses, model.weight.detach()


def test_data_parallel_takes_the_steps_of_one_process(crew):
    expected, weight = by_gradients(False)
    for number in (2, 3):
        for losses, found in crew.results(number, by_gradients, True):
            assert losses == pytest.approx(expected, rel=1e-12)
            torch.testing.assert_close(found, weight, rtol=1e-10, atol=1e-10)


# --- the launcher ---


def launched() -> tuple[str, int, str, int]:
    os.environ.update(RANK=str(distributed.rank()), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(distributed.rank()))
    threads = torch.get_num_threads()
    try:
        device = distributed.start()
        return device.type, torch.get_num_threads(), repr(torch.get_rng_state()[:40].tolist()), numba.get_num_threads()
    finally:
        torch.set_num_threads(threads)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]


def test_processes_take_their_share_of_the_machine_and_draw_alike(crew):
    first, second = crew.results(2, launched)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert first == second
    assert first[1] == share
    # Where the environment says how many threads numba has, that counts.
    assert "NUMBA_NUM_THREADS" in os.environ or first[3] <= share
