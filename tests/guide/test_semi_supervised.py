"""Sites that are observed in some calls and latent in others: what is observed is used, and nothing else is guessed."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta, AutoGuideList
from pyro.infer.autoguide.initialization import init_to_value
from pyro.optim import SGD, Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.testing import check_guide

D64 = torch.float64
Y = torch.tensor([0.1, 3.2, -0.4, 2.5, 3.9], dtype=D64)
LABELS = torch.tensor([0, 1, 0, 1, 1])
NOISE = torch.tensor(1.0, dtype=D64)


def loc_param() -> Tensor:
    return pyro.param("loc", torch.tensor([0.0, 2.0], dtype=D64))


def classes(y, z=None):
    loc = loc_param()
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.6], dtype=D64)), obs=z)
        pyro.sample("y", dist.Normal(loc[z], NOISE), obs=y)


def features(y, z=None, batch_size=None):
    """A class that some calls know and two bits that none knows."""
    loc = loc_param()
    with pyro.plate("data", len(y), subsample_size=batch_size) as index:
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.6], dtype=D64)), obs=None if z is None else z[index])
        b = pyro.sample("b", dist.Bernoulli(torch.tensor([0.3, 0.2], dtype=D64)).to_event(1))
        pyro.sample("y", dist.Normal(loc[z] + b @ torch.tensor([5.0, -2.0], dtype=D64), NOISE), obs=y[index])


def partly_known(y, z, known):
    loc = loc_param()
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.6], dtype=D64)), obs=z, obs_mask=known)
        pyro.sample("y", dist.Normal(loc[z], NOISE), obs=y)


def exact_loss(model, loc: Tensor, y: Tensor, known: Tensor, labels: Tensor) -> Tensor:
    prior = torch.tensor([0.4, 0.6], dtype=D64).log()
    if model is features:
        bits = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=D64)
        prior = prior.unsqueeze(-1) + dist.Bernoulli(torch.tensor([0.3, 0.2], dtype=D64)).log_prob(bits).sum(-1)
        mean = loc.unsqueeze(-1) + bits @ torch.tensor([5.0, -2.0], dtype=D64)
    else:
        prior, mean = prior.unsqueeze(-1), loc.unsqueeze(-1)
    joint = (prior + dist.Normal(mean, NOISE).log_prob(y.reshape(-1, 1, 1))).logsumexp(-1)
    chosen = joint.gather(1, labels.unsqueeze(-1)).squeeze(-1)
    return -torch.where(known, chosen, joint.logsumexp(-1)).sum()


def find_elbo(kind: str):
    if kind == "stock":
        return TraceEnum_ELBO(max_plate_nesting=1, strict_enumeration_warning=False)
    return Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["truncated", "stock"])
@pytest.mark.parametrize(("model", "num_states"), [(classes, 2), (features, 8)])
def test_alternating_calls_use_the_labels_they_have(model, num_states, kind):
    guide, elbo = AutoTruncated(model, num_states), find_elbo(kind)
    for labels in (None, LABELS, None, LABELS, 1 - LABELS, None):
        loc = pyro.get_param_store()["loc"].detach().clone() if "loc" in pyro.get_param_store() else loc_param().detach().clone()
        loc.requires_grad_()
        known = torch.full(Y.shape, labels is not None)
        expected = exact_loss(model, loc, Y, known, LABELS if labels is None else labels)
        expected.backward()
        parameter = pyro.get_param_store()["loc"]
        parameter.grad = None
        assert elbo.loss_and_grads(model, guide, Y, labels) == pytest.approx(expected.item(), rel=1e-12)
        assert torch.allclose(parameter.grad, loc.grad, rtol=1e-10, atol=1e-12)
        assert elbo.loss(model, guide, Y, labels) == pytest.approx(expected.item(), rel=1e-12)
        assert elbo.differentiable_loss(model, guide, Y, labels).item() == pytest.approx(expected.item(), rel=1e-12)
        parameter.data -= 0.05


def test_labelled_data_may_be_others_than_the_unlabelled():
    guide = AutoTruncated(classes, 2)
    svi = SVI(classes, guide, Adam({"lr": 0.1}), Truncated_ELBO(ExhaustiveSearch()))
    for _ in range(3):
        svi.step(Y)
        loc = pyro.get_param_store()["loc"].detach().clone()
        expected = exact_loss(classes, loc, Y[:2] + 1, torch.tensor([True, True]), LABELS[:2])
        assert svi.step(Y[:2] + 1, LABELS[:2]) == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.slow
def test_populations_that_hold_few_states_take_in_what_is_observed():
    guide = AutoTruncated(features, 3)
    elbo = Truncated_ELBO(EvolutionarySearch(parents=2, children=2), max_plate_nesting=1)
    for labels in (None, LABELS, 1 - LABELS, LABELS):
        for _ in range(5):
            loss = elbo.loss_and_grads(features, guide, Y, labels)
            guide.population().assert_distinct()
            known = torch.full(Y.shape, labels is not None)
            exact = exact_loss(features, loc_param().detach(), Y, known, LABELS if labels is None else labels)
            assert loss >= exact.item() - 1e-9
            assert elbo.loss(features, guide, Y, labels) == pytest.approx(loss, rel=1e-12)
        if labels is not None:
            on = guide.posterior(Y, labels).weights() > 0
            assert torch.equal(guide.states()["z"][on], labels.unsqueeze(-1).expand_as(on)[on])
            # Three of the four states that the labels leave.
            assert loss - exact.item() < 0.1


def test_minibatches_of_labels():
    guide = AutoTruncated(features, 8)
    elbo = Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1)
    elbo.loss_and_grads(features, guide, Y, None, 2)
    for _ in range(5):
        elbo.loss_and_grads(features, guide, Y, LABELS, 2)
    scored = ~guide.log_joint.isnan().any(-1)
    guide.refresh_(Y, LABELS)
    assert scored.any()
    check_guide(guide, Y, LABELS)


def test_labels_beside_other_guides():
    def model(y, z=None):
        loc = pyro.sample("loc", dist.Normal(torch.zeros(2, dtype=D64), 3.0).to_event(1))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.6], dtype=D64)), obs=z)
            pyro.sample("y", dist.Normal(loc[z], NOISE), obs=y)

    start = torch.tensor([0.5, 1.5], dtype=D64)
    guide = AutoGuideList(model)
    guide.append(AutoDelta(poutine.block(model, expose=["loc"]), init_loc_fn=init_to_value(values={"loc": start})))
    guide.append(AutoTruncated(model, 2))
    svi = SVI(model, guide, SGD({"lr": 0.0}), Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1))
    prior = float(dist.Normal(torch.zeros(2, dtype=D64), 3.0).log_prob(start).sum())
    for y, labels in ((Y, None), (Y, LABELS), (Y[:3], LABELS[:3]), (Y, None)):
        known = torch.full(y.shape, labels is not None)
        expected = float(exact_loss(classes, start, y, known, LABELS[: len(y)])) - prior
        assert svi.step(y, labels) == pytest.approx(expected, rel=1e-12)


def test_a_conditional_gets_the_labels():
    seen = []

    def model(y, z=None):
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.6], dtype=D64)), obs=z)
            x = pyro.sample("x", dist.Normal(3.0 * z.to(D64), NOISE))
            pyro.sample("y", dist.Normal(x, NOISE), obs=y)

    def conditional(states, y, z=None):
        seen.append(states["z"])
        # The exact conditional: a normal of half the variance around the middle.
        pyro.sample("x", dist.Normal((3.0 * states["z"].to(D64) + y) / 2, NOISE / 2**0.5))

    guide = AutoTruncated(model, 2, conditional=conditional)
    elbo = Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1)
    elbo.loss_and_grads(model, guide, Y)
    loss = elbo.loss_and_grads(model, guide, Y, LABELS)
    assert torch.equal(seen[-1], LABELS)
    evidence = dist.Normal(3.0 * LABELS.to(D64), NOISE * 2**0.5).log_prob(Y) + torch.tensor([0.4, 0.6], dtype=D64).log()[LABELS]
    assert loss == pytest.approx(-float(evidence.sum()), rel=1e-6)


def test_masked_observations_use_what_is_known():
    guide, elbo = AutoTruncated(partly_known, 2), find_elbo("truncated")
    for known in ([True, False, True, False, True], [False] * 5, [True] * 5, [False, True, True, True, False]):
        mask = torch.tensor(known)
        expected = exact_loss(classes, loc_param().detach(), Y, mask, LABELS)
        assert elbo.loss_and_grads(partly_known, guide, Y, LABELS, mask) == pytest.approx(expected.item(), rel=1e-12)


def test_latents_that_the_set_up_did_not_show_are_refused():
    guide = AutoTruncated(features, 4)
    elbo = Truncated_ELBO(ExhaustiveSearch())
    elbo.loss_and_grads(features, guide, Y, LABELS)
    with pytest.raises(ValueError, match=r"now has the latents \['z'\].*guide\.setup.*observes no latent.*poutine\.uncondition"):
        elbo.loss_and_grads(features, guide, Y)


def test_a_first_call_without_latents_is_refused_with_the_cure():
    guide = AutoTruncated(classes, 2)
    with pytest.raises(ValueError, match=r"no discrete latent site.*guide\.setup"):
        Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(classes, guide, Y, LABELS)
    guide.setup(Y)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(classes, guide, Y, LABELS)
    assert loss == pytest.approx(float(exact_loss(classes, loc_param().detach(), Y, torch.ones(5, dtype=torch.bool), LABELS)), rel=1e-12)


@pytest.mark.parametrize("num_states", [1, 2, 3])
def test_steps_of_a_chain_are_observed_in_some_calls_while_its_sets_are_searched(num_states):
    rates = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.5, 0.4, 0.1]], dtype=D64)

    def steps(labels):
        with pyro.plate("sequences", 2):
            z = torch.tensor(0)
            for t, (y, label) in enumerate(zip(Y, labels, strict=True)):
                known = None if label is None else torch.full((2,), label)
                z = pyro.sample(f"z{t}", dist.Categorical(rates[z]), obs=known)
                pyro.sample(f"y{t}", dist.Normal(z.to(D64), NOISE), obs=y)

    guide, elbo = AutoTruncated(steps, num_states), Truncated_ELBO(EvolutionarySearch(2, 2))
    for labels in ([None] * 5, [None, 1, None, None, 2], [2, None, None, 0, None], [1, 1, 1, 1, None]):
        enumeration = TraceEnum_ELBO(max_plate_nesting=1, strict_enumeration_warning=False)
        expected = enumeration.loss(config_enumerate(steps), lambda labels: None, labels)
        losses = [elbo.loss_and_grads(steps, guide, labels) for _ in range(3)]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] >= expected - 1e-9
        assert num_states < 3 or losses[-1] == pytest.approx(expected, rel=1e-9)
