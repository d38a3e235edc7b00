"""How often a training step on a device launches something there, and how often it waits: counted on a device that is pretended.

The numbers are upper limits. Whoever adds a look at a value to a step fails here, and is told the line.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import (
    AutoTruncated,
    ClosedForm,
    EvolutionarySearch,
    ExhaustiveSearch,
    GibbsEM,
    GibbsGuide,
    Preselection,
    SampledSearch,
    Truncated_ELBO,
    ops,
)
from pyro_truncated.models import (
    BinarySparseCoding,
    BinaryVAE,
    DiscreteSparseCoding,
    ExponentialFamilyMaximalCauses,
    GaussianMixture,
    MaximalCauses,
    MaxSpikeSlabSparseCoding,
    NoisyOr,
    OcclusiveComponents,
    PoissonMixture,
    SpikeSlabSparseCoding,
)
from pyro_truncated.scenes import PlacementMoves
from pyro_truncated.search import ConditionalSearch, Search, Singletons
from tests.pretended_device import DEVICE, PretendedDevice, here, there

N, D, H, S = 50, 16, 10, 24


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step.

    Attributes:
        model: its class.
        search: makes the search.
        launches: at most so many.
        syncs: at most so many.
        optimizer: makes the optimiser of a model.
        batch_size: of minibatches; none: all data.
        missing: whether entries of the data are missing.
        data: makes data of normal numbers.
        options: of the model.
        num_data: number of data points.
    """

    model: type
    search: Callable[[], Search]
    launches: int
    syncs: int = 2
    optimizer: Callable[[Any], Any] = ClosedForm
    batch_size: int | None = None
    missing: bool = False
    data: Callable[[Tensor], Tensor] = lambda y: y
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_data: int = N


def binary(y: Tensor) -> Tensor:
    return (y > 1).double()


def counts(y: Tensor) -> Tensor:
    return y.abs().floor()


def positive(y: Tensor) -> Tensor:
    return y.abs() + 0.1


def flips() -> Search:
    return EvolutionarySearch(3, 2, 2)


def crossover() -> Search:
    return EvolutionarySearch(4, generations=2, crossover=True)


def sparse_flips() -> Search:
    return EvolutionarySearch(4, 3, 2, mutation="sparseflips", target_activity=2.0)


def learned_sparse_flips() -> Search:
    return EvolutionarySearch(4, 3, 2, mutation="sparseflips", crossover=True)


CASES = {
    "flips": Case(BinarySparseCoding, flips, 383),
    "crossover": Case(BinarySparseCoding, crossover, 417),
    "sparse flips": Case(BinarySparseCoding, sparse_flips, 523),
    # How often latents are to be flipped decides how many random numbers there are.
    "learned sparse flips": Case(BinarySparseCoding, learned_sparse_flips, 566, syncs=3),
    "conditional": Case(BinarySparseCoding, lambda: ConditionalSearch(60), 489),
    "preselection": Case(BinarySparseCoding, lambda: Preselection(Singletons(), 5, explore=0.5), 381),
    "samples": Case(BinarySparseCoding, lambda: SampledSearch(12), 365),
    "missing entries": Case(BinarySparseCoding, flips, 450, missing=True),
    "incremental": Case(BinarySparseCoding, flips, 449, batch_size=45),
    "gradients": Case(BinarySparseCoding, flips, 447, optimizer=lambda model: Adam({"lr": 0.01}), batch_size=45),
    # How many latents are active, in the states of each generation and in those that are kept, is waited for.
    "slabs": Case(SpikeSlabSparseCoding, flips, 757, syncs=6),
    "slabs, entries missing": Case(SpikeSlabSparseCoding, flips, 802, syncs=6, missing=True),
    "slabs, crossover": Case(SpikeSlabSparseCoding, crossover, 791, syncs=6),
    # Eigenvalues of the candidates for the covariance, too.
    "slabs, full": Case(SpikeSlabSparseCoding, flips, 1114, syncs=8, options={"covariance": "full"}),
    "noisy-OR": Case(NoisyOr, flips, 401, syncs=1, data=binary),
    "noisy-OR, leak learned": Case(NoisyOr, flips, 419, syncs=1, data=binary, options={"leak": 0.05, "learn_leak": True}),
    "maxima": Case(MaximalCauses, flips, 519, data=torch.abs),
    "maxima, entries missing": Case(MaximalCauses, flips, 522, data=torch.abs, missing=True),
    "values": Case(DiscreteSparseCoding, flips, 543),
    "values, tied signs": Case(DiscreteSparseCoding, flips, 551, options={"tied_signs": True}),
    # Where a covariance has eigenvalues below the floor, these are waited for.
    "mixture, full": Case(GaussianMixture, flips, 675, options={"covariance": "full"}, num_data=400),
    "mixture, tied": Case(GaussianMixture, flips, 435, options={"covariance": "tied"}),
    "mixture, diagonal": Case(GaussianMixture, flips, 512, syncs=1, options={"covariance": "diag"}),
    "mixture, spherical": Case(GaussianMixture, flips, 512, syncs=1, options={"covariance": "spherical"}),
    # Eigenvalues are waited for.
    "mixture, low rank": Case(GaussianMixture, flips, 928, syncs=3, options={"covariance": "low-rank", "rank": 2}, num_data=400),
    "mixture, low rank, noise shared": Case(
        GaussianMixture, flips, 948, syncs=3, options={"covariance": "low-rank", "rank": 2, "shared_noise": True}, num_data=400
    ),
    "mixture, exhaustive": Case(GaussianMixture, ExhaustiveSearch, 307, syncs=1, options={"covariance": "diag"}),
    # Terms of large counts cancel: they are taken in float64.
    "counts, mixture": Case(PoissonMixture, flips, 356, syncs=1, data=counts),
    # Where a step of the dictionary has to be shortened, that is waited for.
    "counts, maxima": Case(ExponentialFamilyMaximalCauses, flips, 777, data=counts, options={"family": "poisson"}),
    "binary, maxima": Case(ExponentialFamilyMaximalCauses, flips, 740, data=binary, options={"family": "bernoulli"}),
    "waiting times, maxima": Case(ExponentialFamilyMaximalCauses, flips, 713, data=positive, options={"family": "exponential"}),
    "gamma, maxima": Case(ExponentialFamilyMaximalCauses, flips, 914, data=positive, options={"family": "gamma"}),
}


def data(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    y = case.data(3 * torch.randn(case.num_data, D, generator=generator, dtype=torch.float64))
    return torch.where(torch.rand(y.shape, generator=generator) < 0.1, torch.nan, y) if case.missing else y


def course(case: Case, move: Callable[[Any], Any], steps: int) -> tuple[list[float], Callable[[], float], AutoTruncated]:
    """Losses of some steps, the next step, and the guide."""
    pyro.clear_param_store()
    pyro.set_rng_seed(3)
    y = data(case)
    model = case.model(D, H, dtype=torch.float64, **case.options).initialize(y, torch.Generator().manual_seed(1))
    model, y = move(model), move(y)
    guide = AutoTruncated(model, S if "num_components" not in vars(model) else 4)
    svi = SVI(model, guide, case.optimizer(model), Truncated_ELBO(case.search()))

    number = itertools.count()

    def step() -> float:
        if case.batch_size is not None:
            # Programs draw latents on the device, from its own generator; minibatches are drawn from the one on the host.
            torch.manual_seed(next(number))
        return svi.step(y, case.batch_size)

    return [step() for _ in range(steps)], step, guide


@pytest.mark.nightly(keep=7)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_the_device_as_often_as_allowed(name: str) -> None:
    case = CASES[name]
    losses, last, guide = course(case, lambda thing: thing, 3)
    losses.append(last())
    with PretendedDevice() as device:
        found, step, moved = course(case, there, 3)
        device.forget()
        found.append(step())
        assert moved.words.device == DEVICE
        assert sum(device.syncs.values()) <= case.syncs, device.syncs
        assert sum(device.launches.values()) <= case.launches, device.launched_by.most_common(40)
    assert found == pytest.approx(losses, rel=1e-11)
    assert torch.equal(here(moved.words), guide.words)


Move = Callable[[Any], Any]


def network(move: Move) -> tuple[SVI, Tensor]:
    y = data(CASES["flips"])
    model, y = move(BinaryVAE(D, H, dtype=torch.float64).initialize(y)), move(y)
    return SVI(model, AutoTruncated(model, S), Adam({"lr": 0.01}), Truncated_ELBO(flips())), y


def sampler(move: Move) -> tuple[SVI, Tensor]:
    y = data(CASES["maxima"])
    model = MaxSpikeSlabSparseCoding(D, 6, dtype=torch.float64).initialize(y, torch.Generator().manual_seed(1))
    model, y = move(model), move(y)
    return SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(Preselection(Singletons(), 3), sweeps=1, burn_in=1, warm_up=2)), y


def scenes(move: Move, order: str) -> tuple[SVI, Tensor]:
    model = OcclusiveComponents(2, (4, 4), (2, 2), 2, order=order, dtype=torch.float64)
    with torch.no_grad():
        y = model(num_data=12)
    pyro.clear_param_store()
    model, y = move(model.initialize(y, torch.Generator().manual_seed(1))), move(y)
    return SVI(model, AutoTruncated(model, 8), ClosedForm(model), Truncated_ELBO(PlacementMoves(model.canvas.grid, 2, 4))), y


# What makes a run, and how often its steps may launch something.
OTHERS: dict[str, tuple[Callable[[Move], tuple[SVI, Tensor]], int]] = {
    "network": (network, 460),
    # Least entries of the dictionary are in the unit of each column: five operations, for the claims and for the M-step.
    "Gibbs sampling": (sampler, 4826),
    "scenes": (lambda move: scenes(move, "exclusive"), 910),
    "scenes with depth": (lambda move: scenes(move, "depth"), 1110),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_step_of_other_models_waits_twice(name: str) -> None:
    make, launches = OTHERS[name]

    def run(move: Move) -> tuple[Callable[[], float], Any]:
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        svi, y = make(move)
        return lambda: svi.step(y), svi.guide

    step, guide = run(lambda thing: thing)
    losses = [step() for _ in range(3)]
    with PretendedDevice() as device:
        step, moved = run(there)
        found = [step() for _ in range(2)]
        device.forget()
        found.append(step())
        assert sum(device.syncs.values()) <= 2, device.syncs
        assert sum(device.launches.values()) <= launches, device.launched_by.most_common(40)
    # Rounding errors of each draw of a sampler go into the next.
    assert found == pytest.approx(losses, rel=1e-10)
    states = "selected" if name == "Gibbs sampling" else "words"
    assert torch.equal(here(getattr(moved, states)), getattr(guide, states))


@pytest.mark.slow
def test_what_is_refused_is_refused_before_anything_is_kept() -> None:
    case = CASES["noisy-OR"]
    with PretendedDevice():
        _, step, guide = course(case, there, 2)
        before = [here(tensor).clone() for tensor in (guide.words, guide.log_joint, *guide.model.parameters())]
        with torch.no_grad():
            guide.model.leak.fill_(torch.nan)
        with pytest.raises(ValueError, match="leak"):
            step()
        for old, new in zip(before, (guide.words, guide.log_joint, *guide.model.parameters()), strict=True):
            torch.testing.assert_close(here(new), old, rtol=0, atol=0)


@pytest.mark.slow
def test_an_m_step_that_fails_leaves_the_parameters_as_they_were() -> None:
    y = data(CASES["flips"])
    with PretendedDevice():
        model = there(BinarySparseCoding(D, H, dtype=torch.float64).initialize(y, torch.Generator().manual_seed(1)))
        driver = ClosedForm(model)
        svi = SVI(model, AutoTruncated(model, S), driver, Truncated_ELBO(flips()))
        svi.step(there(y))
        assert driver.statistics is not None
        before = [here(parameter).clone() for parameter in model.parameters()]
        driver.collect({**driver.statistics, "pairs": -driver.statistics["pairs"]}, None, None, N)
        with pytest.raises(torch.linalg.LinAlgError), torch.no_grad():
            driver(model.parameters())
        for old, new in zip(before, model.parameters(), strict=True):
            torch.testing.assert_close(here(new.detach()), old, rtol=0, atol=0)


def test_several_checks_cost_one_look() -> None:
    with PretendedDevice() as device:
        value, done = there(torch.arange(3.0)), []

        def complain() -> None:
            raise ValueError("second")

        with ops.defer_checks():
            ops.raise_if((value > 5).any(), complain)
            ops.raise_if((value < 0).any(), complain)
            ops.on_success(lambda: done.append(1))
            assert not done
            assert ops.read_number(value.sum()) == 3.0
            assert done
        assert sum(device.syncs.values()) == 1

        def fail() -> None:
            with ops.defer_checks():
                ops.raise_if((value > 5).any(), complain)
                ops.raise_if((value > 1).any(), complain)
                ops.on_success(lambda: done.append(2))

        with pytest.raises(ValueError, match="second"):
            fail()
        assert done == [1]


def test_a_mixture_of_devices_is_an_error() -> None:
    with PretendedDevice(), pytest.raises(RuntimeError, match="different devices"):
        there(torch.ones(3)) + torch.ones(3)
