"""The same results elsewhere as from the compiled kernels: in plain torch on the CPU, as on any other device, and on a GPU
if there is one, there by fused kernels where Triton is installed.

Random numbers are the same everywhere, so searches propose the same states, and whole runs take the same course up to rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI, Predictive, TraceEnum_ELBO
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import (
    AutoTruncated,
    ClosedForm,
    EvolutionarySearch,
    ExhaustiveSearch,
    GibbsEM,
    GibbsGuide,
    GPSelect,
    Population,
    Preselection,
    SampledSearch,
    StateSpace,
    Truncated_ELBO,
    ops,
)
from pyro_truncated.models import BinarySparseCoding, MaxSpikeSlabSparseCoding, OcclusiveComponents
from pyro_truncated.scenes import PlacementMoves
from pyro_truncated.search import ConditionalSearch, Search, Singletons
from pyro_truncated.training.checkpoint import load_checkpoint, save_checkpoint
from tests.models.configurations import CLOSED_FORM, CONFIGURATIONS
from tests.pretended_device import DEVICE, PretendedDevice, there

N = 20


@dataclasses.dataclass(frozen=True)
class Place:
    """Where something is computed, and with which kernels on the CPU.

    Attributes:
        device: where parameters, data and populations are.
        kind: the kind of kernels.
        tolerance: relative, of what is computed in float64.
    """

    device: str
    kind: str
    tolerance: float = 0.0

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        return PretendedDevice() if self.is_pretended else ops.use_backend(self.kind)

    @property
    def is_pretended(self) -> bool:
        return self.device == DEVICE.type

    def brought(self, thing: Any) -> Any:
        """A tensor or a module, brought there."""
        return there(thing) if self.is_pretended else thing.to(self.device)


pytestmark = pytest.mark.slow
# Every other model by day.
MODELS = [pytest.param(name, marks=pytest.mark.nightly) if number % 2 else name for number, name in enumerate(CLOSED_FORM)]

HERE = Place("cpu", "compiled")
# They take several minutes; the shipped models are counted on such a device in every run (test_device_calls.py).
PRETENDED = pytest.mark.skipif("PRETENDED_DEVICE" not in os.environ, reason="set PRETENDED_DEVICE to run on a device that is pretended")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(
    params=[
        pytest.param(Place("cpu", "vectorised", 1e-12), id="cpu forced"),
        pytest.param(Place(DEVICE.type, "vectorised", 1e-12), id="pretended", marks=PRETENDED),
        pytest.param(Place("cuda", "compiled", 1e-9), id="cuda", marks=[pytest.mark.gpu, NO_GPU]),
    ]
)
def elsewhere(request: pytest.FixtureRequest) -> Place:
    return request.param


@pytest.fixture
def both(elsewhere: Place) -> tuple[Place, Place]:
    return HERE, elsewhere


@contextlib.contextmanager
def at(place: Place) -> Iterator[Callable[[Any], Any]]:
    """Computes at a place, from the same seed and without parameters; gives a function that brings things there."""
    pyro.clear_param_store()
    pyro.set_rng_seed(3)
    with place():
        yield place.brought


def bsc(dtype: torch.dtype = torch.float64, num_latents: int = 8, num_data: int = 60) -> tuple[BinarySparseCoding, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = 3 * torch.randn(num_data, 10, generator=generator, dtype=dtype)
    return BinarySparseCoding(10, num_latents, dtype=dtype).initialize(y, generator), y


def assert_same_course(courses: list[list[float]], place: Place, dtype: torch.dtype = torch.float64) -> None:
    assert courses[1] == pytest.approx(courses[0], rel=place.tolerance if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", MODELS)
def test_em_takes_the_same_course(name: str, dtype: torch.dtype, both: tuple[Place, Place]) -> None:
    row, courses = CONFIGURATIONS[name], []
    size = row.space().size
    for place in both:
        with at(place) as there:
            y = row.generate(N, dtype, with_missing=row.takes_missing)
            model = there(row.make(dtype).initialize(y, torch.Generator().manual_seed(1)))
            guide = AutoTruncated(model, max(2, size // 2))
            svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(2, 2, 1) + SampledSearch(2)))
            courses.append([svi.step(there(y)) for _ in range(4)])
    assert_same_course(courses, both[1], dtype)


@pytest.mark.parametrize("minibatch", ["incremental", "online"])
def test_minibatches_take_the_same_course(minibatch: str, both: tuple[Place, Place]) -> None:
    courses = []
    for place in both:
        with at(place) as there:
            model, y = map(there, bsc())
            svi = SVI(model, AutoTruncated(model, 12), ClosedForm(model, minibatch=minibatch), Truncated_ELBO(EvolutionarySearch(3, 2, 1)))
            courses.append([])
            for step in range(6):
                # Programs draw latents where their parameters are, on a GPU not from the generator that draws minibatches.
                torch.manual_seed(step)
                courses[-1].append(svi.step(y, 25))
    assert_same_course(courses, both[1])


@pytest.mark.parametrize("with_missing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_the_stock_elbo(name: str, with_missing: bool, both: tuple[Place, Place]) -> None:
    row, found = CONFIGURATIONS[name], []
    if with_missing and not row.takes_missing:
        pytest.skip("takes no missing entries")
    for place in both:
        with at(place) as there:
            y = row.generate(N, with_missing=with_missing)
            model, y = there(row.make(torch.float64)), there(y)
            guide = AutoTruncated(model, row.space().size)
            loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, guide, y)
            assert TraceEnum_ELBO(max_plate_nesting=1).loss(model, guide, y) == pytest.approx(loss, rel=1e-9)
            found.append((loss, [param.grad.cpu() for param in model.parameters()]))
    assert_same_course([[found[0][0]], [found[1][0]]], both[1])
    for here, there in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(there, here, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_training_by_adam_takes_the_same_course(dtype: torch.dtype, both: tuple[Place, Place]) -> None:
    courses = []
    for place in both:
        with at(place) as there:
            model, y = map(there, bsc(dtype))
            svi = SVI(model, AutoTruncated(model, 12), Adam({"lr": 0.02}), Truncated_ELBO(EvolutionarySearch(3, 2, 1)))
            courses.append([svi.step(y) for _ in range(6)])
    assert_same_course(courses, both[1], dtype)


SEARCHES: dict[str, Callable[[], Search]] = {
    "mutation": lambda: EvolutionarySearch(3, 2, 2),
    "crossover": lambda: EvolutionarySearch(4, generations=2, crossover=True),
    "sparse flips": lambda: EvolutionarySearch(4, 3, 2, mutation="sparseflips", overlapping=True),
    "conditional": lambda: ConditionalSearch(60),
    "preselection": lambda: Preselection(Singletons(), 5, explore=0.5),
    "replacing": lambda: Preselection(Singletons(), 6, merge=False),
    "GP-select": lambda: GPSelect(4, explore=0.5, refit_every=1, fit_steps=3),
    "samples": lambda: SampledSearch(12),
    "exhaustive": ExhaustiveSearch,
}


@pytest.mark.parametrize("name", SEARCHES)
def test_searches_find_the_same_states(name: str, both: tuple[Place, Place]) -> None:
    found = []
    for place in both:
        with at(place) as there:
            model, y = map(there, bsc(num_latents=10))
            guide, search = AutoTruncated(model, 32), SEARCHES[name]()
            log_joint, before = guide.make_scorer(y), guide.posterior(y).free_energy()
            for _ in range(3):
                population = guide.search_(search, log_joint)
                population.assert_distinct()
            assert population.free_energy().sum() > before.sum()
            found.append(population)
    assert torch.equal(found[1].words.cpu(), found[0].words)
    torch.testing.assert_close(found[1].log_joint.cpu(), found[0].log_joint, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("sizes", [[3, 5, 4], [2, 3, 1, 2, 9]])
def test_latents_of_several_values_are_searched_alike(sizes: list[int], both: tuple[Place, Place]) -> None:
    space, found = StateSpace(sizes), []
    table = torch.randn(7, space.size, dtype=torch.float64)
    weight = torch.randn(space.num_latents, dtype=torch.float64)
    for place in both:
        with at(place):
            weights = place.brought(weight)

            def model(y: Tensor, weights: Tensor = weights) -> None:
                with pyro.plate("data", len(y)):
                    values = [pyro.sample(f"s{i}", uniform(size, y.device)) for i, size in enumerate(sizes)]
                    pyro.sample("y", pyro.distributions.Normal(sum(w * s for w, s in zip(weights, values, strict=True)), 0.5), obs=y)

            guide, y = AutoTruncated(model, 9), place.brought(table[:, 0])
            log_joint = guide.make_scorer(y)
            for search in (ConditionalSearch(30), EvolutionarySearch(3, 3, 2, mutation="sparseflips"), SampledSearch(6)):
                guide.search_(search, log_joint)
            found.append(guide.words.cpu())
    assert torch.equal(*found)


def uniform(size: int, device: torch.device) -> pyro.distributions.Categorical:
    return pyro.distributions.Categorical(torch.ones(size, dtype=torch.float64, device=device) / size)


def test_gibbs_sampling_takes_the_same_course(both: tuple[Place, Place]) -> None:
    courses = []
    for place in both:
        with at(place) as there:
            model = MaxSpikeSlabSparseCoding(6, 4, dtype=torch.float64)
            y = 3 * torch.randn(15, 6, dtype=torch.float64)
            y[2, :3] = torch.nan
            model, y = there(model.initialize(y, torch.Generator().manual_seed(1))), there(y)
            svi = SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(Preselection(Singletons(), 3), sweeps=2, burn_in=1))
            courses.append([svi.step(y) for _ in range(3)])
    # Rounding errors of each draw go into the next.
    assert courses[1] == pytest.approx(courses[0], rel=1e-10)


@pytest.mark.parametrize("order", ["exclusive", "depth"])
def test_occluding_objects_take_the_same_course(order: str, both: tuple[Place, Place]) -> None:
    courses = []
    for place in both:
        with at(place) as there:
            model = OcclusiveComponents(2, (4, 4), (2, 2), 2, order=order, dtype=torch.float64)
            with torch.no_grad():
                y = model(num_data=12)
            pyro.clear_param_store()
            model, y = there(model.initialize(y, torch.Generator().manual_seed(1))), there(y)
            search = PlacementMoves(model.canvas.grid, 2, 4) + ConditionalSearch(40)
            svi = SVI(model, AutoTruncated(model, 8), ClosedForm(model), Truncated_ELBO(search))
            courses.append([svi.step(y) for _ in range(3)])
    assert_same_course(courses, both[1])


@pytest.mark.parametrize("back", [False, True])
def test_a_run_goes_on_elsewhere(back: bool, elsewhere: Place, tmp_path: Path) -> None:
    if elsewhere.is_pretended and not back:
        pytest.skip("torch loads nothing onto the device in whose name the pretended one goes")

    def run(place: Place, steps: int, load: bool = False, save: bool = False) -> list[float]:
        with at(place) as there:
            model, y = map(there, bsc())
            search = EvolutionarySearch(3, 2, 1, generator=torch.Generator().manual_seed(5)) + SampledSearch(4)
            svi = SVI(model, AutoTruncated(model, 12), ClosedForm(model, minibatch="incremental"), Truncated_ELBO(search))
            if load:
                load_checkpoint(tmp_path / "run.pt", svi)
            course = [svi.step(y) for _ in range(steps)]
            if save:
                save_checkpoint(tmp_path / "run.pt", svi)
            return course

    first, second = (elsewhere, HERE) if back else (HERE, elsewhere)
    through = run(HERE, 6)
    assert [*run(first, 3, save=True), *run(second, 3, load=True)] == pytest.approx(through, rel=elsewhere.tolerance)


@pytest.mark.gpu
@NO_GPU
def test_a_guide_moves_between_devices() -> None:
    model, y = bsc()
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


def test_populations_agree(elsewhere: Place) -> None:
    space = StateSpace([2] * 70)
    words = space.random((50, 40), 0.2)
    scores = torch.randn(50, 40, dtype=torch.float64)
    population, candidates = (Population(space, words[:, part], scores[:, part]) for part in (slice(20), slice(20, None)))
    merged = population.merge(candidates)
    with elsewhere():
        moved = [
            dataclasses.replace(p, words=elsewhere.brought(p.words), log_joint=elsewhere.brought(p.log_joint))
            for p in (population, candidates)
        ]
        other = moved[0].merge(moved[1])
        assert torch.equal(merged.words, other.words.cpu())
        torch.testing.assert_close(merged.marginals(), other.marginals().cpu())
