"""Names in Pyro's store: two modules of a class do not share parameters, and parameters that another module's shadow are refused."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import threading

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.gp import kernels
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, AutoGuideList, AutoNormal
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.optim import Adam
from torch.distributions import constraints

from pyro_truncated import (
    AutoTruncated,
    ClosedForm,
    EvolutionarySearch,
    ExhaustiveSearch,
    GibbsEM,
    GibbsGuide,
    GPSelect,
    SASDecoder,
    SpikeSlabGPLVM,
    SpikeSlabMRD,
    Truncated_ELBO,
)
from pyro_truncated import models as ours
from pyro_truncated.datasets import linear_bars
from pyro_truncated.gp import PyroKernel, SubsetSparseGPRegression
from pyro_truncated.gplvm import Analytic_ELBO, SASFunctionDecoder
from pyro_truncated.training import fit, fit_restarts
from pyro_truncated.training.checkpoint import load_checkpoint, save_checkpoint
from pyro_truncated.utils.parameter_store import one_thread
from tests.utils.averages import average_of_steps


@pytest.fixture
def y(generator):
    return linear_bars(20, 3, mean_active=2.0, generator=generator).data


# --- ours: trained interleaved as if alone ---


def truncated(model, *args, num_states=4, **kwargs):
    guide = AutoTruncated(model, num_states=num_states, **kwargs)
    svi = SVI(model, guide, Adam({"lr": 0.05}), Truncated_ELBO(EvolutionarySearch(3, 2, 1)))
    return lambda: svi.step(*args)


def gated_decoder(y):
    model = ours.GatedDecoder(y[:5], (y[:5, :2] > 1).float(), torch.randn(5, 2, 1), width=4)
    return model, truncated(model, y[5:], num_states=3, conditional=model.pose_guide)


def through_methods(model, elbo, *args):
    svi = SVI(model.model, model.guide, Adam({"lr": 0.02}), elbo)
    return model, lambda: svi.step(*args)


def function_decoder(y):
    model = SASFunctionDecoder(20, 9, lambda f: dist.Normal(f, 1.0).to_event(1), 2, num_active=5)
    return through_methods(model, Trace_ELBO(), y)


def subset_regression(y):
    kernel = PyroKernel(kernels.RBF(9), y)
    return through_methods(SubsetSparseGPRegression(kernel, y[:, 0] + torch.randn(20), num_inducing=5), Trace_ELBO())


def initialized(kind):
    def make(y):
        model = kind().initialize(y)
        return model, truncated(model, y)

    return make


def max_slabs(y):
    model = ours.MaxSpikeSlabSparseCoding(9, 5).initialize(y)
    svi = SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(GPSelect(3)))
    return model, lambda: svi.step(y)


def scenes(y):
    model = ours.OcclusiveComponents(2, (3, 3), (1, 2), 1)
    return model, truncated(model, y.reshape(-1, 3, 3, 1))


MAKERS = {
    "BinarySparseCoding": initialized(lambda: ours.BinarySparseCoding(9, 5)),
    "SpikeSlabSparseCoding": initialized(lambda: ours.SpikeSlabSparseCoding(9, 5)),
    "MaximalCauses": initialized(lambda: ours.MaximalCauses(9, 5)),
    "DiscreteSparseCoding": initialized(lambda: ours.DiscreteSparseCoding(9, 5)),
    "GaussianMixture": initialized(lambda: ours.GaussianMixture(9, 5)),
    "BinaryVAE": initialized(lambda: ours.BinaryVAE(9, 5, (4,))),
    "NoisyOr": lambda y: initialized(lambda: ours.NoisyOr(9, 5))((y > 4).float()),
    "PoissonMixture": lambda y: initialized(lambda: ours.PoissonMixture(9, 5))(y.abs().round()),
    "MaxSpikeSlabSparseCoding": max_slabs,
    "OcclusiveComponents": scenes,
    "GatedDecoder": gated_decoder,
    "SpikeSlabGPLVM": lambda y: through_methods(SpikeSlabGPLVM(20, 9, 2, num_inducing=4), Analytic_ELBO(), [y.double()]),
    "SpikeSlabMRD": lambda y: through_methods(
        SpikeSlabMRD(20, [4, 5], 2, num_inducing=4), Analytic_ELBO(), [y[:, :4].double(), y[:, 4:].double()]
    ),
    "SASDecoder": lambda y: through_methods(SASDecoder(20, 9, 2, num_active=5), Trace_ELBO(), y),
    "SASFunctionDecoder": function_decoder,
    "SubsetSparseGPRegression": subset_regression,
}


class Run:
    """A model that is made and trained with random numbers of its own."""

    def __init__(self, name, y, seed):
        self.state = torch.Generator().manual_seed(seed).get_state()
        self.model, self.step = self.alone(lambda: MAKERS[name](y))

    def alone(self, function):
        torch.set_rng_state(self.state)
        result = function()
        self.state = torch.get_rng_state()
        return result

    def result(self):
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


@pytest.mark.nightly(keep=5)
@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_two_of_a_class_trained_in_turns_are_those_trained_apart(name, y):
    apart = []
    for seed in (1, 2):
        pyro.clear_param_store()
        run = Run(name, y, seed)
        losses = [run.alone(run.step) for _ in range(3)]
        apart.append((losses, run.result()))
    pyro.clear_param_store()
    runs = [Run(name, y, seed) for seed in (1, 2)]
    losses = [[run.alone(run.step) for run in runs] for _ in range(3)]
    for i, (expected, state) in enumerate(apart):
        assert [row[i] for row in losses] == expected
        found = runs[i].result()
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], value) for key, value in state.items())
    assert apart[0][0] != apart[1][0]


def test_models_of_two_classes_share_nothing_either(y):
    first = ours.BinarySparseCoding(9, 5).initialize(y)
    truncated(first, y)()
    second = ours.SpikeSlabSparseCoding(9, 7).initialize(y)
    before = second.weight.detach().clone()
    with torch.no_grad():
        AutoTruncated(second, num_states=4).posterior(y)
    assert torch.equal(second.weight, before)


def test_as_a_part_a_model_is_named_by_the_whole(y):
    class Whole(PyroModule):
        def __init__(self):
            super().__init__("whole")
            self.part = ours.BinarySparseCoding(9, 5)

        def forward(self, y):
            return self.part(y)

    truncated(Whole(), y)()
    assert set(pyro.get_param_store().keys()) == {f"whole.part.{name}" for name in ("weight", "scale", "prior", "bias")}


def test_names_of_sample_sites_do_not_depend_on_how_many_models_there_were(y):
    for _ in range(2):
        model = ours.BinaryVAE(9, 5, decoder=PyroModule[torch.nn.Linear](5, 9))
        model.scale = PyroSample(dist.LogNormal(torch.zeros(()), 1.0))
        model.decoder.bias = PyroSample(dist.Normal(torch.zeros(9), 1.0).to_event(1))
        trace = poutine.trace(model).get_trace(y)
        assert set(trace.nodes) >= {"scale", "decoder.bias", "s", "y"}
        fixed = poutine.condition(model, {"scale": torch.tensor(2.0)})
        assert float(poutine.trace(fixed).get_trace(y).nodes["scale"]["value"]) == 2.0
        drawn = Predictive(model, num_samples=3)(y)
        assert drawn["decoder.bias"].shape[0] == 3


def test_copies_and_pickled_models_train_on_alone(y):
    model = ours.BinarySparseCoding(9, 5).initialize(y)
    truncated(model, y)()
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        assert all(torch.equal(value, before[name]) for name, value in duplicate.state_dict().items())
        truncated(duplicate, y)()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not torch.equal(duplicate.weight, model.weight)


def test_state_dicts_know_nothing_of_names(y):
    first, second = (ours.BinarySparseCoding(9, 5).initialize(y) for _ in range(2))
    assert set(first.state_dict()) == {"weight_unconstrained", "scale_unconstrained", "prior_unconstrained", "bias_unconstrained", "center"}
    second.load_state_dict(first.state_dict())
    assert truncated(second, y, num_states=32)() == pytest.approx(truncated(first, y, num_states=32)())


# --- Pyro's store: saved, loaded, cleared ---


def test_parameters_read_from_a_file_are_those_of_a_new_model(y, tmp_path, caplog):
    model = ours.BinarySparseCoding(9, 5).initialize(y)
    truncated(model, y)()
    weight = model.weight.detach().clone()
    pyro.get_param_store().save(tmp_path / "store")
    pyro.clear_param_store()
    pyro.get_param_store().load(tmp_path / "store")
    fresh = ours.BinarySparseCoding(9, 5)
    with caplog.at_level(logging.WARNING, "pyro_truncated"):
        AutoTruncated(fresh, num_states=4).posterior(y)
    assert torch.equal(fresh.weight, weight)
    assert "takes over the parameters" in caplog.text
    # What belongs to a module now is nobody else's.
    another = ours.BinarySparseCoding(9, 5).initialize(y)
    before = another.weight.detach().clone()
    AutoTruncated(another, num_states=4).posterior(y)
    assert torch.equal(another.weight, before)


def test_parameters_read_from_a_file_of_another_size_stay_there(y, tmp_path):
    truncated(ours.BinarySparseCoding(9, 4).initialize(y), y)()
    pyro.get_param_store().save(tmp_path / "store")
    pyro.clear_param_store()
    pyro.get_param_store().load(tmp_path / "store")
    model = ours.BinarySparseCoding(9, 5).initialize(y)
    before = model.weight.detach().clone()
    AutoTruncated(model, num_states=4).posterior(y)
    assert torch.equal(model.weight, before)


def test_a_model_takes_back_its_own_parameters(y, tmp_path):
    model = ours.BinarySparseCoding(9, 5).initialize(y)
    step = truncated(model, y)
    step()
    weight = model.weight.detach().clone()
    pyro.get_param_store().save(tmp_path / "store")
    step()
    assert not torch.equal(model.weight, weight)
    pyro.get_param_store().load(tmp_path / "store")
    AutoTruncated(model, num_states=4).posterior(y)
    assert torch.equal(model.weight, weight)


@pytest.mark.parametrize("by", ["file", "state", "value"])
def test_a_new_optimiser_goes_on_from_parameters_that_were_put_back(y, by, tmp_path):
    model, store = ours.BinarySparseCoding(y.shape[1], 3).initialize(y), pyro.get_param_store()
    guide = AutoTruncated(model, num_states=8)

    def train():
        svi = SVI(model, guide, Adam({"lr": 0.05}), Truncated_ELBO())
        return svi, [svi.step(y) for _ in range(3)]

    train()
    store.save(tmp_path / "store")
    state, name = copy.deepcopy(store.get_state()), next(name for name in store if name.endswith("weight"))
    weight = store[name].detach().clone()
    train()
    svi = SVI(model, guide, Adam({"lr": 0.05}), Truncated_ELBO())
    if by == "file":
        store.load(tmp_path / "store")
    elif by == "state":
        store.set_state(state)
    else:
        store[name] = weight.clone()
    svi.step(y)
    assert float((model.weight.detach() - weight).abs().max()) == pytest.approx(0.05, rel=1e-3)  # the first step of Adam


def test_clearing_the_store_between_models_loses_nothing(y):
    first, second = (ours.BinarySparseCoding(9, 5).initialize(y) for _ in range(2))
    truncated(first, y)()
    weight = first.weight.detach().clone()
    pyro.clear_param_store()
    truncated(second, y)()
    pyro.clear_param_store()
    assert torch.equal(first.weight, weight)
    truncated(first, y)()


def test_restarts_keep_stores_of_their_own(y):
    def make(restart):
        pyro.set_rng_seed(restart)
        model = ours.BinarySparseCoding(9, 5).initialize(y)
        return SVI(model, AutoTruncated(model, num_states=4), Adam({"lr": 0.05}), Truncated_ELBO(EvolutionarySearch(3, 2, 1)))

    restarts = fit_restarts(make, y, restarts=3, steps=3)
    for training, store in zip(restarts.trainings, restarts.stores, strict=True):
        with pyro.get_param_store().scope(store):
            assert training.svi.evaluate_loss(y) <= -training.record["free_energy"][0]
    fit(restarts.training.svi, y, steps=1)


@pytest.mark.parametrize("through", ["module", "method", "closure"])
def test_checkpoints_restore_optimisers_under_other_names(y, tmp_path, through):
    def make():
        model = ours.SpikeSlabSparseCoding(9, 5).initialize(y, torch.Generator().manual_seed(0))

        def closure(y):
            return model(y)

        program = {"module": model, "method": model.with_slabs, "closure": closure}[through]
        conditional = model.conditional if through == "method" else None
        guide = AutoTruncated(program, num_states=4, conditional=conditional)
        return model, SVI(program, guide, Adam({"lr": 0.05}), Truncated_ELBO(EvolutionarySearch(3, 2, 1)))

    first, svi = make()
    svi.step(y)
    save_checkpoint(tmp_path / "run.pt", svi)
    expected = [svi.step(y) for _ in range(3)]
    weight = first.weight.detach().clone()
    pyro.clear_param_store()
    second, svi = make()
    assert second._pyro_name != first._pyro_name
    svi.evaluate_loss(y)
    load_checkpoint(tmp_path / "run.pt", svi)
    assert [svi.step(y) for _ in range(3)] == expected
    assert torch.equal(second.weight, weight)


# --- users' own modules ---


class Own(PyroModule):
    """A user's model: its parameters have the same names in every instance."""

    def __init__(self, loc=0.0, name=""):
        super().__init__(name)
        self.loc = PyroParam(torch.full((2, 9), float(loc)) + torch.arange(2.0).unsqueeze(-1))
        self.scale = PyroParam(torch.tensor(1.0), constraints.positive)

    def forward(self, y):
        loc, scale = self.loc, self.scale
        with pyro.plate("data", len(y)):
            k = pyro.sample("k", dist.Categorical(torch.ones(2) / 2))
            pyro.sample("y", dist.Normal(loc[k], scale).to_event(1), obs=y)


class OwnNetwork(PyroModule):
    """A user's model with a network of torch's."""

    def __init__(self):
        super().__init__()
        self.network = torch.nn.Linear(1, 9)

    def forward(self, y):
        network = self.network
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((1,), 0.5)).to_event(1))
            pyro.sample("y", dist.Normal(network(s), 1.0).to_event(1), obs=y)


class OwnLinear(OwnNetwork):
    """The same with a network that is a ``PyroModule`` with torch's parameters."""

    def __init__(self):
        super().__init__()
        self.network = PyroModule[torch.nn.Linear](1, 9)


def exhaustive(model, y):
    svi = SVI(model, AutoTruncated(model, num_states=2), Adam({"lr": 0.05}), Truncated_ELBO(ExhaustiveSearch()))
    return lambda: svi.step(y)


@pytest.mark.parametrize("kind", [Own, OwnNetwork, OwnLinear])
@pytest.mark.parametrize("is_kept", [True, False])
def test_the_second_of_a_users_models_is_refused(y, kind, is_kept):
    first = kind()
    exhaustive(first, y)()
    if not is_kept:
        del first
    second = kind(2.0) if kind is Own else kind()
    before = {name: value.clone() for name, value in second.state_dict().items()}
    with pytest.raises(ValueError, match=r"holds other parameters \['.*clear_param_store\(\)"):
        exhaustive(second, y)()
    assert all(torch.equal(value, before[name]) for name, value in second.state_dict().items())
    with pytest.raises(ValueError, match="holds other parameters"):
        TraceEnum_ELBO(max_plate_nesting=1).loss(second, AutoTruncated(second, num_states=2), y)
    pyro.clear_param_store()
    exhaustive(second, y)()


def test_models_that_start_at_the_same_numbers_are_not_trained_as_one(y):
    first, second = Own(), Own()
    steps = [exhaustive(model, y) for model in (first, second)]
    steps[0]()
    with pytest.raises(ValueError, match=r"holds other parameters \['loc', 'scale'\]"):
        steps[1]()


def test_the_cures_cure(y):
    first, second = Own(0.0, "first"), Own(2.0, "second")
    for model in (first, second):
        exhaustive(model, y)()
    third = Own(3.0)
    with pyro.get_param_store().scope() as state:
        step = exhaustive(third, y)
        step()
    fourth = Own(4.0)
    exhaustive(fourth, y)()
    with pyro.get_param_store().scope(state):
        step()


def module_function(network):
    def model(y):
        pyro.module("network", network)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((1,), 0.5)).to_event(1))
            pyro.sample("y", dist.Normal(network(s), 1.0).to_event(1), obs=y)

    return model


def test_a_network_that_a_function_registers_is_refused_too(y):
    exhaustive(module_function(torch.nn.Linear(1, 9)), y)()
    with pytest.raises(ValueError, match=r"holds other parameters \['network\$\$\$weight'\]"):
        exhaustive(module_function(torch.nn.Linear(1, 9)), y)()


def test_what_is_meant_is_not_refused(y, tmp_path):
    model = Own()
    step = exhaustive(model, y)
    step()
    # The same module under another guide, ELBO and optimiser, and in a function.
    exhaustive(model, y)()
    exhaustive(lambda y: model(y), y)()
    # Its own values loaded, moved and put back.
    model.load_state_dict(model.state_dict())
    step()
    store = pyro.get_param_store()
    state = copy.deepcopy(store.get_state())
    store.save(tmp_path / "store")
    step()
    store.set_state(state)
    exhaustive(model, y)()
    store.load(tmp_path / "store")
    exhaustive(model, y)()
    # A value set by hand.
    store["loc"] = torch.zeros(2, 9)
    exhaustive(model, y)()
    # Made anew after the store was cleared.
    pyro.clear_param_store()
    exhaustive(Own(2.0), y)()
    # Made anew, for parameters that are read from a file.
    pyro.clear_param_store()
    store.load(tmp_path / "store")
    loaded = Own(5.0)
    exhaustive(loaded, y)()
    assert float(loaded.loc.detach().max()) < 4


def test_a_copy_of_what_was_trained_is_trained_on(y):
    model = Own()
    exhaustive(model, y)()
    duplicate = copy.deepcopy(model)
    exhaustive(duplicate, y)()
    exhaustive(duplicate, y)()


def test_a_copy_that_was_left_behind_is_refused(y):
    model = Own()
    step = exhaustive(model, y)
    step()
    earlier = copy.deepcopy(model)
    step()
    with pytest.raises(ValueError, match=r"holds other parameters \['loc', 'scale'\]"):
        AutoTruncated(earlier, num_states=2).posterior(y)


# --- guides of Pyro's ---


def clusters(y, shift=0.0):
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    with pyro.plate("data", len(y)):
        k = pyro.sample("k", dist.Categorical(torch.ones(2) / 2))
        pyro.sample("y", dist.Normal(loc[k] + shift, 1.0), obs=y[:, 0])


def listed(model, continuous=AutoNormal):
    guide = AutoGuideList(model)
    guide.append(continuous(poutine.block(model, hide=["k"])))
    guide.append(AutoTruncated(model, num_states=2))
    return guide


@pytest.mark.parametrize("continuous", [AutoNormal, AutoDiagonalNormal])
def test_two_lists_of_the_same_names_are_not_trained_as_one(y, continuous):
    svi = SVI(clusters, listed(clusters, continuous), Adam({"lr": 0.1}), Truncated_ELBO(ExhaustiveSearch()))
    svi.step(y)
    before = {name: value.clone() for name, value in pyro.get_param_store().items()}
    for _ in range(2):
        with pytest.raises(ValueError, match=r"holds other parameters \['AutoGuideList\.0\.loc"):
            SVI(clusters, listed(clusters, continuous), Adam({"lr": 0.1}), Truncated_ELBO(ExhaustiveSearch())).step(y)
    assert all(torch.equal(value, before[name]) for name, value in pyro.get_param_store().items())
    svi.step(y)


def test_a_list_of_another_class_is_the_cure(y):
    class Second(AutoGuideList):
        pass

    SVI(clusters, listed(clusters), Adam({"lr": 0.1}), Truncated_ELBO(ExhaustiveSearch())).step(y)
    guide = Second(clusters)
    guide.append(AutoNormal(poutine.block(clusters, hide=["k"])))
    guide.append(AutoTruncated(clusters, num_states=2))
    SVI(clusters, guide, Adam({"lr": 0.1}), Truncated_ELBO(ExhaustiveSearch())).step(y)


def test_guides_of_other_latents_in_lists_do_not_disturb_each_other(y):
    for _ in range(2):
        model = ours.BinarySparseCoding(9, 5).initialize(y)
        model.scale = PyroSample(dist.LogNormal(torch.zeros(()), 1.0))
        pyro.clear_param_store()
        guide = AutoGuideList(model)
        guide.append(AutoNormal(poutine.block(model, hide=["s"])))
        guide.append(AutoTruncated(model, num_states=4))
        svi = SVI(model, guide, Adam({"lr": 0.05}), Truncated_ELBO(EvolutionarySearch(3, 2, 1)))
        svi.step(y)
        assert "AutoGuideList.0.locs.scale" in pyro.get_param_store()


def test_a_trained_guide_is_evaluated_and_trained_again(y):
    guide = listed(clusters)
    for _ in range(2):
        fit(SVI(clusters, guide, Adam({"lr": 0.1}), Truncated_ELBO(ExhaustiveSearch())), y, steps=2, progress=False)
    restored = listed(clusters)
    restored(y)
    restored.load_state_dict(guide.state_dict())
    found = []
    for one in (guide, restored):
        pyro.set_rng_seed(1)
        found.append(Truncated_ELBO(ExhaustiveSearch()).loss(clusters, one, y))
    assert found[1] == pytest.approx(found[0])


def line(y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(slope, 1.0), obs=y[:, 0])


@pytest.mark.parametrize("kind", [AutoNormal, AutoDiagonalNormal])
def test_fit_refuses_a_second_guide_of_pyros_before_its_first_step(y, kind):
    fit(SVI(line, kind(line), Adam({"lr": 0.1}), Trace_ELBO()), y, steps=2, progress=False)
    before = {name: value.clone() for name, value in pyro.get_param_store().items()}
    with pytest.raises(ValueError, match=rf"holds other parameters \['{kind.__name__}\..*loc"):
        fit(SVI(line, kind(line), Adam({"lr": 0.1}), Trace_ELBO()), y, steps=2, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in pyro.get_param_store().items())
    pyro.clear_param_store()
    fit(SVI(line, kind(line), Adam({"lr": 0.1}), Trace_ELBO()), y, steps=2, progress=False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_does_not_wait_for_a_thread_of_its_parent():
    is_held, is_done = threading.Event(), threading.Event()

    def hold():
        with one_thread:
            is_held.set()
            is_done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait(30)
    child = os.fork()
    if not child:
        os._exit(0 if one_thread.acquire(timeout=5) else 1)
    status = os.waitpid(child, 0)[1]
    assert not one_thread.acquire(blocking=False)
    is_done.set()
    thread.join()
    assert status == 0


def test_an_average_of_models_is_not_replaced_by_what_was_trained_last():
    class Model(PyroModule):
        def __init__(self):
            super().__init__()
            self.weight = PyroParam(torch.eye(3, 4))

        def forward(self, y):
            with pyro.plate("data", len(y)):
                s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.3)).to_event(1))
                pyro.sample("y", dist.Normal(s @ self.weight, 1.0).to_event(1), obs=y)

    model, y = Model(), torch.randn(20, 4)
    guide = AutoTruncated(model, num_states=8)
    module = Truncated_ELBO()(model, guide)
    average = average_of_steps(module, y, 4)
    weight = average.module.model.weight.detach().clone()
    for evaluate in (average, average.module.guide.refresh_):
        with pytest.raises(ValueError, match=r"Pyro's parameter store holds other parameters \['weight'\]"):
            evaluate(y)
    pyro.clear_param_store()
    loss = average(y).item()
    assert torch.equal(average.module.model.weight, weight)
    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3).unsqueeze(1)
    joint = dist.Bernoulli(0.3).log_prob(states).sum(-1) + dist.Normal(states @ weight, 1.0).log_prob(y).sum(-1)
    assert loss == pytest.approx(-float(joint.logsumexp(0).sum()), rel=1e-5)


def test_an_average_of_guides_beside_is_not_replaced_either():
    def model(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 3.0))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(0.3))
            pyro.sample("y", dist.Normal(loc + s, 1.0), obs=y)

    y, guide = torch.randn(20), AutoGuideList(model)
    guide.append(AutoNormal(poutine.block(model, hide=["s"])))
    guide.append(AutoTruncated(model))
    module = Truncated_ELBO()(model, guide)
    average = average_of_steps(module, y, 3)
    before = [value.detach().clone() for value in average.parameters()]
    with pytest.raises(ValueError, match="Pyro's parameter store holds other parameters"):
        average(y)
    assert all(torch.equal(value, old) for value, old in zip(average.parameters(), before, strict=True))
