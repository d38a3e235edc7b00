"""Matrix-valued sites in fewer plates than the model has: Pyro's own ELBOs take them, though Pyro compares their shapes wrongly."""

from __future__ import annotations

import itertools
import math
import types
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import pyro.infer.enum
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO, check_truncation, to_arviz
from tests.program.pyro_patches import check_model_guide_match as reproduction

PATCH = Path(reproduction.__file__).with_suffix(".patch")
STATES = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4))).double()
Y = torch.tensor([[0.3, 1.2, 2.5, 0.1], [-0.4, 1.9, 3.3, 1.0], [0.2, 1.4, 2.2, 0.6]]).double()


def model(y):
    shift = pyro.sample("shift", dist.Normal(torch.tensor(0.0).double(), 1.0))
    with pyro.plate("data", 4, dim=-1):
        s = pyro.sample("s", dist.Bernoulli(torch.full((2, 2), 0.3).double()).to_event(2))
        with pyro.plate("rows", 3, dim=-2):
            pyro.sample("y", dist.Normal(shift + s.sum((-1, -2)), 0.5), obs=y)


def noisy(y):
    """A continuous matrix in fewer plates, too, whose distribution depends on the states."""
    with pyro.plate("data", 4, dim=-1):
        s = pyro.sample("s", dist.Bernoulli(torch.full((2, 2), 0.3).double()).to_event(2))
        z = pyro.sample("z", dist.Normal(s, 1.0).to_event(2))
        with pyro.plate("rows", 3, dim=-2), pyro.plate("columns", 1, dim=-3):
            pyro.sample("y", dist.Normal(z.sum((-1, -2)), 0.5), obs=y)


def beside(kind, program=model, name="shift"):
    guide = AutoGuideList(program)
    guide.append(kind(poutine.block(program, expose=[name])))
    guide.append(AutoTruncated(program, 16))
    return guide


def free_energy(shift, y=Y):
    """By enumeration, given the other latent."""
    prior = dist.Bernoulli(torch.tensor(0.3).double()).log_prob(STATES).sum(-1)
    likelihood = dist.Normal(shift + STATES.sum(-1)[:, None, None], 0.5).log_prob(y).sum(1)
    return float((prior[:, None] + likelihood).logsumexp(0).sum())


@pytest.mark.parametrize("elbo", [TraceEnum_ELBO, Truncated_ELBO])
def test_default_plate_nesting_suffices_beside_another_guide(elbo):
    guide = beside(AutoDelta)
    objective = elbo()
    loss = objective.loss_and_grads(model, guide, Y)
    shift = guide[0].median(Y)["shift"].detach()
    exact = free_energy(shift) + float(dist.Normal(0.0, 1.0).log_prob(shift))
    assert loss == pytest.approx(-exact, rel=1e-9)
    assert TraceEnum_ELBO(max_plate_nesting=3).loss(model, guide, Y) == pytest.approx(loss, rel=1e-9)


def test_default_plate_nesting_suffices_alone():
    given = poutine.condition(model, data={"shift": torch.tensor(0.3).double()})
    guide = AutoTruncated(given, 16)
    exact = -free_energy(0.3) - float(dist.Normal(0.0, 1.0).log_prob(torch.tensor(0.3)))
    assert Truncated_ELBO().loss(given, guide, Y) == pytest.approx(exact, rel=1e-6)
    assert TraceEnum_ELBO().loss(given, guide, Y) == pytest.approx(exact, rel=1e-6)


@pytest.mark.slow
def test_continuous_matrices_that_depend_on_states_have_room_too():
    torch.manual_seed(0)
    guide = beside(AutoNormal, noisy, "z")
    losses = []
    for elbo in (TraceEnum_ELBO(), TraceEnum_ELBO(max_plate_nesting=4), Truncated_ELBO()):
        pyro.set_rng_seed(3)
        elbo.loss(noisy, guide, Y)
        pyro.set_rng_seed(3)
        losses.append(elbo.loss(noisy, guide, Y))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-9)


@pytest.mark.slow
def test_what_users_do_with_such_models_works():
    guide = beside(AutoNormal)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Truncated_ELBO(ExhaustiveSearch()))
    for _ in range(3):
        assert math.isfinite(svi.step(Y))
    assert math.isfinite(TraceEnum_ELBO(num_particles=3, vectorize_particles=True).loss_and_grads(model, guide, Y))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It says that sites could be enumerated.
        assert math.isfinite(Trace_ELBO().loss(model, guide, Y))
    for parallel in (False, True):
        drawn = Predictive(model, guide=guide, num_samples=5, parallel=parallel)(Y)
        assert drawn["s"].shape[0] == 5
        assert drawn["s"].shape[-3:] == (4, 2, 2)
        assert Predictive(guide, num_samples=5, parallel=parallel)(Y)["s"].shape[-3:] == (4, 2, 2)
    assert guide(Y)["s"].shape == (4, 2, 2)
    assert to_arviz(model, guide, Y, num_samples=5, seed=1).posterior["s"].shape == (4, 5, 4, 2, 2)
    assert check_truncation(guide, Y).covered_mass.min() > 0.99


def test_a_nesting_without_room_is_named_with_its_cure():
    guide = beside(AutoDelta)
    guide(Y)
    with (
        pytest.warns(UserWarning, match=r"site 's' wrongly.*TraceEnum_ELBO\(max_plate_nesting=3\)"),
        pytest.raises(ValueError, match="Model and guide shapes disagree at site 's'"),
    ):
        TraceEnum_ELBO(max_plate_nesting=2).loss(model, guide, Y)


def test_no_room_is_made_where_none_is_needed():
    def vectors(y):
        with pyro.plate("data", 4, dim=-1):
            s = pyro.sample("s", dist.Bernoulli(torch.full((4,), 0.3).double()).to_event(1))
            with pyro.plate("rows", 3, dim=-2):
                pyro.sample("y", dist.Normal(s.sum(-1), 0.5), obs=y)

    guide = AutoTruncated(vectors, 16)
    trace = poutine.trace(guide).get_trace(Y)
    assert guide.layout.nesting == guide.layout.depth == 2
    assert {frame.name for node in trace.nodes.values() if node["type"] == "sample" for frame in node["cond_indep_stack"]} == {"data"}


# --- Pyro ---


def patched_check():
    """Pyro's comparison of model and guide with the patch; hunks are replaced where their lines stand."""
    source = Path(pyro.util.__file__).read_text()
    lines = [line for line in PATCH.read_text().splitlines(keepends=True) if not line.startswith(("---", "+++", "@@"))]
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    assert source.count(before) == 1
    module = types.ModuleType("patched")
    exec(compile(source.replace(before, after), "patched", "exec"), vars(module))
    return module.check_model_guide_match


def test_the_patch_for_pyro_mends_its_comparison(monkeypatch):
    data = torch.arange(12.0).reshape(3, 4) / 4
    with pytest.raises(ValueError, match="Model and guide shapes disagree at site 's'"):
        TraceEnum_ELBO().loss(reproduction.model, reproduction.guide, data)
    monkeypatch.setattr(pyro.infer.enum, "check_model_guide_match", patched_check())
    loss = TraceEnum_ELBO().loss(reproduction.model, reproduction.guide, data)
    assert loss == pytest.approx(-reproduction.log_evidence(data), rel=1e-6)


def test_the_patched_comparison_still_finds_shapes_that_disagree(monkeypatch):
    def smaller(y):
        with pyro.plate("data", 4, dim=-1):
            pyro.sample("s", dist.Bernoulli(torch.full((2, 3), 0.3)).to_event(2))

    monkeypatch.setattr(pyro.infer.enum, "check_model_guide_match", patched_check())
    with pytest.raises(ValueError, match="Model and guide shapes disagree at site 's'"):
        TraceEnum_ELBO(max_plate_nesting=2).loss(reproduction.model, smaller, torch.zeros(3, 4))
