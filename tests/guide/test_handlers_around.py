"""Handlers around a step: parameters that they substitute count everywhere, and what a run would not see is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Predictive
from pyro.infer.autoguide import AutoDelta, AutoGuideList
from pyro.optim import SGD

from pyro_truncated import AutoTruncated, Truncated_ELBO
from pyro_truncated.distributions import BinaryChains

Y = torch.tensor([0.3, 1.2, -0.5])
SWITCH = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.6, 0.2], [0.3, 0.3, 0.4]])


def mixture() -> None:
    weight = pyro.param("weight", torch.tensor(0.7))
    with pyro.plate("data", 3):
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.5, 0.3, 0.2])))
        s = pyro.sample("s", dist.Bernoulli(0.3))
        pyro.sample("y", dist.Normal(weight * z + 0.5 * s, 0.7), obs=Y)


def causes() -> None:
    weight = pyro.param("weight", torch.tensor(0.7))
    with pyro.plate("data", 3):
        s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(weight * s.sum(-1), 0.7), obs=Y)


def steps() -> None:
    weight, z = pyro.param("weight", torch.tensor(0.7)), torch.tensor(0)
    for t in range(3):
        z = pyro.sample(f"z_{t}", dist.Categorical(SWITCH[z]))
        pyro.sample(f"y_{t}", dist.Normal(weight * z, 0.7), obs=Y[t])


def chains() -> None:
    weight = pyro.param("weight", torch.tensor(0.7))
    s = pyro.sample("s", BinaryChains(torch.full((2,), 0.3), torch.tensor([[[0.8, 0.2], [0.3, 0.7]]] * 2), num_steps=3))
    pyro.sample("y", dist.Normal(weight * s.sum(-1), 0.7).to_event(1), obs=Y)


PROGRAMS = pytest.mark.parametrize("model", [mixture, causes, steps, chains], ids=lambda model: model.__name__)


def losses(model: Callable[[], None]) -> list[float]:
    """Minus the free energy of populations that hold nearly all states, as each door to it says."""
    pyro.set_rng_seed(0)
    guide, elbo = AutoTruncated(model, num_states=5), Truncated_ELBO()
    found = [elbo.loss_and_grads(model, guide), elbo.loss(model, guide), float(elbo.differentiable_loss(model, guide).detach())]
    with torch.no_grad():
        found.append(float(elbo.differentiable_loss(model, guide)))
    found.append(-float(guide.posterior().free_energy().sum()))
    return found


@PROGRAMS
def test_substituted_parameters_count_everywhere(model: Callable[[], None]) -> None:
    other = {"weight": torch.tensor(0.2)}
    expected = losses(poutine.substitute(model, data=other))
    pyro.clear_param_store()
    with poutine.substitute(data=other):
        found = losses(model)
    assert found == pytest.approx([expected[0]] * 5, abs=1e-5)
    assert found == pytest.approx(expected, abs=1e-5)
    pyro.clear_param_store()
    assert losses(model)[0] != pytest.approx(expected[0], abs=1e-2)


def test_the_evidence_is_that_of_substituted_parameters() -> None:
    with poutine.substitute(data={"weight": torch.tensor(0.2)}):
        loss = Truncated_ELBO().loss(steps, AutoTruncated(steps, num_states=3))
    total = []
    for path in itertools.product(range(3), repeat=3):
        prior = [SWITCH[before, now].log() for before, now in itertools.pairwise((0, *path))]
        total.append(sum(prior) + dist.Normal(0.2 * torch.tensor(path), 0.7).log_prob(Y).sum())
    assert loss == pytest.approx(-float(torch.stack(total).logsumexp(0)), abs=1e-5)


HANDLERS = {
    "condition": lambda: poutine.condition(data={"z": torch.tensor([0, 1, 1])}),
    "do": lambda: poutine.do(data={"z": torch.tensor([0, 1, 1])}),
    "lift": lambda: poutine.lift(prior=dist.Normal(0.0, 1.0)),
    "mask": lambda: poutine.mask(mask=torch.tensor([True, False, True])),
    "reparam": lambda: poutine.reparam(config={}),
    "scale": lambda: poutine.scale(scale=0.5),
    "uncondition": poutine.uncondition,
}


@pytest.mark.parametrize("name", HANDLERS)
def test_handlers_that_change_the_model_belong_to_the_model(name: str) -> None:
    guide, elbo = AutoTruncated(mixture, num_states=6), Truncated_ELBO()
    svi = SVI(mixture, guide, SGD({"lr": 0.1}), elbo)
    svi.step()
    calls = [svi.step, svi.evaluate_loss, guide.posterior, guide.refresh_, guide.median]
    calls += [lambda: elbo.differentiable_loss(mixture, guide), lambda: guide.infer(())]
    for call in calls:
        with (
            HANDLERS[name](),
            pytest.raises(NotImplementedError, match=rf"inside of `with poutine\.{name}\(.*make the guide of that model"),
        ):
            call()
    svi.step()


def test_handlers_of_the_model_scale_and_condition_it() -> None:
    """What the message says to do."""
    plain = Truncated_ELBO().loss(mixture, AutoTruncated(mixture, num_states=6))
    scaled = poutine.scale(mixture, scale=0.5)
    assert Truncated_ELBO().loss(scaled, AutoTruncated(scaled, num_states=6)) == pytest.approx(0.5 * plain, rel=1e-5)


def test_handlers_around_other_guides_are_refused_as_well() -> None:
    def model() -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Bernoulli(0.3))
            pyro.sample("y", dist.Normal(mean * z, 0.7), obs=Y)

    guide = AutoGuideList(model)
    guide.append(AutoDelta(poutine.block(model, hide=["z"])))
    guide.append(AutoTruncated(model))
    svi = SVI(model, guide, SGD({"lr": 0.1}), Truncated_ELBO())
    svi.step()
    with poutine.condition(data={"mean": torch.tensor(0.5)}), pytest.raises(NotImplementedError, match="make the guide of that model"):
        svi.step()


def test_a_program_that_is_traced_may_ask_a_guide_of_another_model():
    """``Predictive`` runs programs under a mask of its own."""
    guide = AutoTruncated(mixture, 6)
    guide()

    def outer() -> None:
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        with pyro.plate("features", 3):
            pyro.sample("t", dist.Normal(shift + guide.infer(()).marginals()["s"], 1.0))

    assert Predictive(outer, num_samples=4)()["t"].shape == (4, 3)
