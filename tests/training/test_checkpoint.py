"""Checkpoints: a restored run goes on to the numbers of an uninterrupted one, and what does not fit is refused."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.nn import PyroModule, PyroParam
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, GibbsEM, GibbsGuide, GPSelect, Truncated_ELBO
from pyro_truncated import search as search_room
from pyro_truncated.datasets import linear_bars
from pyro_truncated.models import BinarySparseCoding, DiscreteSparseCoding, MaxSpikeSlabSparseCoding, SpikeSlabSparseCoding
from pyro_truncated.search import AutomaticSearch, ConditionalSearch, LearnedFlips, SampledSearch, Singletons
from pyro_truncated.training import checkpoint_file
from pyro_truncated.training.checkpoint import load_checkpoint, save_checkpoint
from pyro_truncated.training.fingerprint import describe
from pyro_truncated.utils.console import ReprFromArguments


def data_of(generator):
    return linear_bars(40, 3, mean_active=2.0, generator=generator).data


@pytest.fixture
def y(generator):
    return data_of(generator)


def plain(y, batch_size=None):
    weight = pyro.param("weight", lambda: y[:6].mT.clone())
    noise = pyro.param("noise", torch.tensor(5.0), constraint=dist.constraints.positive)
    with pyro.plate("data", len(y), subsample_size=batch_size) as index:
        s = pyro.sample("s", dist.Bernoulli(torch.full((6,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, noise).to_event(1), obs=y[index])


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


SEARCHES = {
    "GPSelect": lambda: GPSelect(3, refit_every=2, generator=own_generator()),
    "GPSelect in minibatches": lambda: GPSelect(3, refit_every=2, rank=6, pivots="targets") + EvolutionarySearch(2, 2),
    "GPSelect and Gibbs": lambda: GPSelect(3, refit_every=2, generator=own_generator()),
}


def fresh(kind: str, y: torch.Tensor) -> SVI:
    pyro.clear_param_store()
    pyro.set_rng_seed(7)
    own = own_generator() if kind == "own generator" else None
    search = SEARCHES.get(kind, lambda: EvolutionarySearch(parents=3, children=3, generator=own))()
    elbo = Truncated_ELBO(search, temperature=1.0 if kind == "incremental" else lambda step: 1 + 3 / (1 + step))
    if kind == "plain":
        return SVI(plain, AutoTruncated(plain, num_states=8), Adam({"lr": 0.1}), elbo)
    if kind == "GPSelect and Gibbs":
        gibbs = MaxSpikeSlabSparseCoding(9, 6).initialize(y)
        return SVI(gibbs, GibbsGuide(gibbs), ClosedForm(gibbs), GibbsEM(search))
    model = BinarySparseCoding(9, 6).initialize(y)
    minibatch = kind if kind == "incremental" else "online" if kind in MINIBATCHES else None
    optimiser = Adam({"lr": 0.05}) if kind == "gradient" else ClosedForm(model, minibatch=minibatch)
    return SVI(model, AutoTruncated(model, num_states=8), optimiser, elbo)


KINDS = ["closed form", "incremental", "online", "gradient", "plain", "own generator", *SEARCHES]
MINIBATCHES = ("incremental", "online", "gradient", "plain", "GPSelect in minibatches")


def train(svi: SVI, y: torch.Tensor, steps: int, kind: str) -> list[float]:
    batch = (10,) if kind in MINIBATCHES else ()
    return [svi.step(y, *batch) for _ in range(steps)]


@pytest.mark.nightly(keep=3)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_restored_run_equals_an_uninterrupted_one(kind, y, tmp_path):
    path = tmp_path / "folder" / "run.pt"
    svi = fresh(kind, y)
    expected = train(svi, y, 9, kind)
    state = {name: value.clone() for name, value in svi.guide.state_dict().items()}

    svi = fresh(kind, y)
    history = train(svi, y, 5, kind)
    save_checkpoint(path, svi, history=history, settings={"kind": kind})

    svi = fresh(kind, y)
    if kind == "plain":
        svi.evaluate_loss(y)
    torch.rand(11)
    history = load_checkpoint(path, svi, settings={"kind": kind})
    assert history + train(svi, y, 4, kind) == expected
    # Log joints of data points that were never in a minibatch are NaN.
    torch.testing.assert_close(dict(svi.guide.state_dict()), state, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_what_another_search_has_learned_is_left_alone_if_searches_may_differ(y, tmp_path):
    svi = fresh("GPSelect", y)
    train(svi, y, 3, "GPSelect")
    save_checkpoint(tmp_path / "run.pt", svi)
    other = fresh("closed form", y)
    load_checkpoint(tmp_path / "run.pt", other, may_differ=["search"])
    assert torch.equal(other.guide.words, svi.guide.words)


@pytest.mark.parametrize("make", [AutomaticSearch, ConditionalSearch, EvolutionarySearch, partial(SampledSearch, 4), partial(GPSelect, 2)])
def test_searches_keep_the_state_of_their_generators(make):
    generator = own_generator()
    search = make(generator=generator) + EvolutionarySearch(2, 2)
    state, expected = search.state_dict(), torch.rand(3, generator=generator)
    search.load_state_dict(state)
    assert torch.equal(torch.rand(3, generator=generator), expected)


STEPS_OF_ADAM = """
import sys, torch
from tests.training.test_checkpoint import fresh, data_of, train
from pyro_truncated.training.checkpoint import load_checkpoint, save_checkpoint

path, steps, goes_on = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "on"
y = data_of(torch.Generator().manual_seed(0))
svi = fresh("gradient", y)
history = load_checkpoint(path, svi) if goes_on else []
save_checkpoint(path, svi, history=history + train(svi, y, steps, "gradient"))
"""


@pytest.mark.nightly
def test_adam_goes_on_in_another_process_to_the_very_same_bits(tmp_path):
    path = str(tmp_path / "run.pt")
    for steps, goes_on in ((4, "off"), (3, "on")):
        subprocess.run([sys.executable, "-c", STEPS_OF_ADAM, path, str(steps), goes_on], check=True, cwd=Path(__file__).parents[2])
    y = data_of(torch.Generator().manual_seed(0))
    svi = fresh("gradient", y)
    expected = train(svi, y, 8, "gradient")
    # A step more, in this process, shows that the moments that the other one has left are the same, too.
    other = fresh("gradient", y)
    assert load_checkpoint(path, other) + train(other, y, 1, "gradient") == expected
    assert torch.equal(other.model.weight, svi.model.weight)


def test_parameters_of_a_function_must_exist(y, tmp_path):
    svi = fresh("plain", y)
    svi.step(y)
    save_checkpoint(tmp_path / "run.pt", svi)
    with pytest.raises(KeyError, match=r"\['noise', 'weight'\] do not exist yet"):
        load_checkpoint(tmp_path / "run.pt", fresh("plain", y))


def test_other_settings_are_refused_and_nothing_changes(y, tmp_path):
    path = tmp_path / "run.pt"
    svi = fresh("closed form", y)
    svi.step(y)
    save_checkpoint(path, svi, settings={"H": 6, "seed": 0, "old": True})
    svi = fresh("closed form", y)
    before, state = svi.model.weight.clone(), torch.get_rng_state()
    with pytest.raises(
        ValueError, match="H: 6 in the checkpoint, 7 now; new: absent in the checkpoint, 1 now; old: True in the checkpoint, absent now"
    ):
        load_checkpoint(path, svi, settings={"H": 7, "seed": 0, "new": 1})
    assert torch.equal(svi.model.weight, before)
    assert torch.equal(torch.get_rng_state(), state)
    load_checkpoint(path, svi)
    assert not torch.equal(svi.model.weight, before)


class Own(PyroModule):
    """A user's model, whose parameters have the same names in every instance."""

    def __init__(self, y):
        super().__init__()
        self.weight = PyroParam(y[:6].mT.clone())

    def forward(self, y):
        weight = self.weight
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((6,), 0.3)).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT, 5.0).to_event(1), obs=y)


def test_parameters_of_an_earlier_model_in_the_store_are_refused(y, tmp_path):
    def own():
        model = Own(y)
        return SVI(model, AutoTruncated(model, num_states=8), Adam({"lr": 0.1}), Truncated_ELBO(EvolutionarySearch(3, 3)))

    svi = own()
    svi.step(y)
    save_checkpoint(tmp_path / "run.pt", svi)
    svi = own()
    weight = dict(svi.model.named_parameters())["weight_unconstrained"]
    before = weight.detach().clone()
    with pytest.raises(ValueError, match=r"holds other parameters \['weight'\] from an earlier model"):
        load_checkpoint(tmp_path / "run.pt", svi)
    assert torch.equal(weight, before)
    pyro.clear_param_store()
    load_checkpoint(tmp_path / "run.pt", svi)


def test_other_files_are_refused(y, tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="not a checkpoint"):
        load_checkpoint(tmp_path / "other.pt", fresh("closed form", y))
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(ValueError, match=r"not a checkpoint .* there is no checksum at its end"):
        load_checkpoint(tmp_path / "text.pt", fresh("closed form", y))
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "missing.pt", fresh("closed form", y))


def test_interrupted_writing_leaves_the_last_checkpoint(y, tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    svi = fresh("closed form", y)
    svi.step(y)
    save_checkpoint(path, svi, history=[1])
    content = path.read_bytes()

    def breaks(content, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", breaks)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, svi, history=[1, 2])
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_checkpoints_of_other_models_are_refused_and_nothing_changes(y, tmp_path):
    svi = fresh("closed form", y)
    svi.step(y)
    save_checkpoint(tmp_path / "run.pt", svi)

    def other(num_latents, num_states, kind=BinarySparseCoding):
        pyro.clear_param_store()
        model = kind(9, num_latents).initialize(y)
        return SVI(model, AutoTruncated(model, num_states), ClosedForm(model), Truncated_ELBO(EvolutionarySearch(parents=2)))

    for sizes, message in (
        ((6, 5), "8 states per data point, this guide num_states=5"),
        ((4, 8), r"shape \(9, 6\), here \(9, 4\)"),
        ((6, 8, SpikeSlabSparseCoding), "slab_mean_?[a-z]* is only here"),
    ):
        svi = other(*sizes)
        svi.step(y)
        before = {name: value.clone() for part in (svi.model, svi.guide) for name, value in part.state_dict().items()}
        with pytest.raises(ValueError, match=f"another model or guide: .*{message}"):
            load_checkpoint(tmp_path / "run.pt", svi, may_differ=["model", "guide", "optimizer", "elbo", "search"])
        after = {name: value for part in (svi.model, svi.guide) for name, value in part.state_dict().items()}
        assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_checkpoint_of_the_old_layout_is_refused_by_name_and_nothing_changes(y, tmp_path):
    svi = fresh("closed form", y)
    svi.step(y)
    save_checkpoint(tmp_path / "run.pt", svi)
    content = checkpoint_file.read(tmp_path / "run.pt")
    guide = content["modules"]["guide"]
    # When populations were buffers of the guide itself.
    content["modules"]["guide"] = {name.removeprefix("populations."): value for name, value in guide.items()}
    checkpoint_file.write(tmp_path / "run.pt", content)
    before = {name: value.clone() for name, value in svi.guide.state_dict().items()}
    with pytest.raises(ValueError, match=r"run\.pt .*'words' is of an earlier version.*or train anew"):
        load_checkpoint(tmp_path / "run.pt", svi)
    assert all(torch.equal(value, before[name]) for name, value in svi.guide.state_dict().items())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SampledSearch(16, prior_share=0.25), SampledSearch(16, prior_share=1.0)),
        (LearnedFlips(4, kernel="linear"), LearnedFlips(4, kernel="rbf")),
        (GPSelect(4, rank=5), GPSelect(4, rank=6)),
        (EvolutionarySearch(), EvolutionarySearch(8, 7, 2)),
        (DiscreteSparseCoding(9, 6, values=(-1, 0, 1)), DiscreteSparseCoding(9, 6, values=(-2, 0, 2))),
    ],
    ids=lambda part: type(part).__name__,
)
def test_other_arguments_are_another_run(one, other):
    assert describe(one) != describe(other)
    assert describe(one) == describe(copy.deepcopy(one))


def test_searches_are_described_by_all_their_arguments():
    kinds = [kind for kind in vars(search_room).values() if isinstance(kind, type) and issubclass(kind, ReprFromArguments)]
    kinds = [kind for kind in kinds if not inspect.isabstract(kind)]
    assert len(kinds) > 10
    required = {"num_samples": 4, "num_selected": 4, "affinity": Singletons(), "searches": [SampledSearch(4)], "size": 2}
    for kind in kinds:
        parameters = inspect.signature(kind).parameters
        if not all(name in required or parameter.default is not parameter.empty for name, parameter in parameters.items()):
            continue
        made = kind(**{name: required[name] for name, parameter in parameters.items() if parameter.default is parameter.empty})
        assert parameters.keys() <= vars(made).keys(), kind
