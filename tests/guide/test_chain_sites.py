"""A guide on a site of binary chains, against sums over all paths of the program."""

from __future__ import annotations

import itertools
import logging
import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, Truncated_ELBO, check_truncation, to_arviz
from pyro_truncated.distributions import BinaryChains, LinearSuperposition
from pyro_truncated.search import Search

DOUBLE = torch.float64
SWITCH = torch.tensor([[0.9, 0.1], [0.3, 0.7]], dtype=DOUBLE)


def program(form: str = "normal", num_chains: int = 2):
    """A program of sequences ``(N, T, 3)``."""
    first = torch.arange(3.0 * num_chains, dtype=DOUBLE).view(num_chains, 3).cos()

    def model(y: Tensor, batch_size: int | None = None) -> None:
        weight = pyro.param("weight", lambda: first.clone())
        switch = pyro.param("switch", lambda: SWITCH.repeat(num_chains, 1, 1), constraint=dist.constraints.simplex)
        initial = torch.full((num_chains,), 0.4, dtype=DOUBLE)
        with pyro.plate("sequences", len(y), subsample_size=batch_size) as index:
            rows = y[index]
            s = pyro.sample("s", BinaryChains(initial, switch, num_steps=y.shape[1]))
            scale = torch.tensor(0.7, dtype=DOUBLE)
            if form == "normal":
                pyro.sample("y", dist.Normal(s @ weight, scale).to_event(2), obs=rows)
            elif form == "vector":
                pyro.sample("y", dist.Normal(s @ weight, scale).to_event(1).to_event(1), obs=rows)
            elif form == "superposition":
                pyro.sample("y", LinearSuperposition(s, weight.mT, scale).to_event(1), obs=rows)
            elif form == "masked":
                pyro.sample("y", dist.Normal(s @ weight, scale).mask(rows > -0.5).to_event(2), obs=rows)
            elif form == "coupled":
                pyro.sample("y", dist.Normal((s + s.roll(1, -2)) @ weight, scale).to_event(2), obs=rows)

    return model


def evidence(model, y: Tensor, num_chains: int = 2) -> Tensor:
    """Log evidence of each sequence: the program's log joint, one path after the other."""
    num_steps, totals = y.shape[1], []
    for bits in itertools.product((0.0, 1.0), repeat=num_steps * num_chains):
        path = torch.tensor(bits, dtype=DOUBLE).view(num_steps, num_chains).expand(len(y), -1, -1)
        trace = poutine.trace(poutine.condition(model, {"s": path})).get_trace(y)
        trace.compute_log_prob()
        totals.append(trace.nodes["s"]["log_prob"] + trace.nodes["y"]["log_prob"])
    return torch.stack(totals).logsumexp(0)


@pytest.mark.nightly(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("form", ["normal", "vector", "superposition", "masked"])
def test_full_sets_are_exact(form: str) -> None:
    model, y = program(form), torch.randn(2, 4, 3, dtype=DOUBLE)
    guide = AutoTruncated(model, num_states=4)
    loss, exact = Truncated_ELBO().loss_and_grads(model, guide, y), -evidence(model, y).sum()
    assert loss == pytest.approx(float(exact.detach()), rel=1e-10)
    parameters = dict(pyro.get_param_store().named_parameters())
    actual = {name: parameter.grad.clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    exact.backward()
    assert actual.keys() == {"weight", "switch"}
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, parameters[name].grad, rtol=1e-8, atol=1e-10)


@pytest.mark.nightly
def test_sets_rise_and_train() -> None:
    torch.manual_seed(0)
    model, prior = program("normal", 5), BinaryChains(torch.full((5,), 0.4, dtype=DOUBLE), SWITCH.repeat(5, 1, 1), 20)
    states = prior.expand([3]).sample()
    y = states @ torch.arange(15.0, dtype=DOUBLE).view(5, 3).cos() + 0.3 * torch.randn(3, 20, 3, dtype=DOUBLE)
    guide = AutoTruncated(model, num_states=16)
    exact = AutoTruncated(model, num_states=32)
    elbo = Truncated_ELBO()
    bound, best = elbo.loss_and_grads(model, guide, y), elbo.loss_and_grads(model, exact, y)
    assert bound >= best - 1e-9
    for _ in range(3):
        before, bound = bound, elbo.loss_and_grads(model, guide, y)
        assert bound <= before + 1e-9
    assert bound - best < 1.0
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), Truncated_ELBO(EvolutionarySearch(4, 3)))
    losses = [svi.step(y) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert guide.marginals()["s"].shape == (3, 20, 5)
    assert guide.mode()["s"].shape == (3, 20, 5)
    assert guide.sample_posterior(6)["s"].shape == (6, 3, 20, 5)
    assert "3 sequences of 20 steps, 16 of 32 states of each step" in repr(guide)
    drawn = guide.sample_posterior(3000)["s"].mean(0)
    # Five standard deviations of 3000 draws.
    assert bool(((drawn - guide.marginals()["s"]).abs() < 2.5 / math.sqrt(3000)).all())
    new = guide.infer(y[:1] + 0.1)
    assert new.marginals()["s"].shape == (1, 20, 5)


@pytest.mark.slow
def test_stock_elbos_have_no_noise() -> None:
    model, y = program(), torch.randn(2, 6, 3, dtype=DOUBLE)
    guide = AutoTruncated(model, num_states=3)
    loss = Truncated_ELBO().loss_and_grads(model, guide, y)
    stock = [Trace_ELBO().loss(model, guide, y) for _ in range(10)]
    assert stock == pytest.approx([loss] * 10, rel=1e-9)


def test_minibatches_of_sequences_are_unbiased() -> None:
    model, y = program(), torch.randn(3, 4, 3, dtype=DOUBLE)
    guide, elbo = AutoTruncated(model, num_states=4), Truncated_ELBO()
    parts = [elbo.loss(model, AutoTruncated(model, num_states=4), y[n : n + 1]) for n in range(3)]
    whole = elbo.loss(model, guide, y)
    assert sum(parts) == pytest.approx(whole, rel=1e-9)
    losses = [elbo.loss(model, guide, y, 1) for _ in range(30)]
    assert {round(loss, 6) for loss in losses} <= {round(3 * part, 6) for part in parts}


@pytest.mark.slow
def test_beside_another_guide() -> None:
    y = torch.randn(2, 5, 3, dtype=DOUBLE)

    def model(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.LogNormal(torch.tensor(3.0, dtype=DOUBLE), 1.0))
        chains = BinaryChains(torch.full((2,), 0.4, dtype=DOUBLE), SWITCH.repeat(2, 1, 1), 5)
        with pyro.plate("sequences", 2):
            s = pyro.sample("s", chains)
            pyro.sample("y", dist.Normal(s.sum(-1, keepdim=True).expand(*s.shape[:-1], 3), scale).to_event(2), obs=y)

    guide = AutoGuideList(model)
    guide.append(AutoNormal(poutine.block(model, hide=["s"])))
    guide.append(AutoTruncated(model, num_states=4))
    svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.1, "lrd": 0.98}), Truncated_ELBO())
    for _ in range(80):
        svi.step(y)
    losses = [svi.evaluate_loss(y) for _ in range(200)]
    # The evidence by quadrature over the scale, and by all paths of both chains.
    paths = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=DOUBLE)] * 10).view(-1, 5, 2)
    prior = BinaryChains(torch.full((2,), 0.4, dtype=DOUBLE), SWITCH.repeat(2, 1, 1), 5).log_prob(paths)
    logs = torch.linspace(-1.5, 3.0, 200, dtype=DOUBLE)
    likelihood = dist.Normal(paths.sum(-1, keepdim=True), logs.exp().view(-1, 1, 1, 1))
    log_likelihood = sum((prior + likelihood.log_prob(one).sum((-1, -2))).logsumexp(-1) for one in y)
    step = math.log(float(logs[1] - logs[0]))
    evidence = float((log_likelihood + dist.Normal(3.0, 1.0).log_prob(logs) + step).logsumexp(0))
    # Losses differ by some 1.2 nats from draw to draw, so that their mean has an error of 0.1; a normal posterior loses little.
    assert -0.4 < sum(losses) / 200 + evidence < 0.6


def test_states_are_saved_and_loaded() -> None:
    model, y = program("normal", 4), torch.randn(2, 6, 3, dtype=DOUBLE)
    guide = AutoTruncated(model, num_states=6)
    Truncated_ELBO().loss_and_grads(model, guide, y)
    other = AutoTruncated(model, num_states=6)
    other.load_state_dict(guide.state_dict())
    assert Truncated_ELBO().loss(model, other, y) == pytest.approx(Truncated_ELBO().loss(model, guide, y), rel=1e-12)


@pytest.mark.slow
def test_the_check_says_what_the_sets_lack():
    pyro.set_rng_seed(0)
    weight = 2.0 * torch.randn(4, 3, dtype=torch.float64)
    switch = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64).repeat(4, 1, 1)
    first = torch.full((4,), 0.3, dtype=torch.float64)
    y = dist.Normal(BinaryChains(first, switch, num_steps=8).expand([2]).sample() @ weight, 1.0).sample()

    def model(y):
        with pyro.plate("sequences", len(y)):
            s = pyro.sample("s", BinaryChains(first, switch, num_steps=8))
            pyro.sample("y", dist.Normal(s @ weight, 1.0).to_event(2), obs=y)

    evidence = -Truncated_ELBO().loss(model, AutoTruncated(model, num_states=16), y)
    report = check_truncation(AutoTruncated(model, num_states=4).infer(y, steps=5), y, warn=False)
    torch.testing.assert_close(report.exact.sum(), torch.tensor(evidence, dtype=torch.float64))
    for lower, upper in itertools.pairwise([report.free_energy, report.searched, report.doubled, report.exact]):
        assert bool((lower <= upper + 1e-9).all())
    assert bool((report.free_energy <= report.certified).all())
    assert bool((report.certified <= report.exact + 1e-9).all())


@pytest.mark.filterwarnings("ignore:AutoTruncated sees no observed site")
def test_chains_without_observations_have_their_prior():
    def model(y):
        with pyro.plate("sequences", len(y)):
            pyro.sample("s", BinaryChains(torch.full((2,), 0.4, dtype=DOUBLE), SWITCH.repeat(2, 1, 1), num_steps=3))

    guide = AutoTruncated(model, num_states=4)
    y = torch.zeros(2, 3)
    assert Truncated_ELBO().loss(model, guide, y) == pytest.approx(0.0, abs=1e-10)
    torch.testing.assert_close(guide.marginals()["s"][:, 0], torch.full((2, 2), 0.4, dtype=DOUBLE))


def marginals(model, y: Tensor, num_chains: int) -> Tensor:
    """Probabilities that chains are on: sums over all paths of a program with one sequence ``(T, D)``."""
    weights, paths = [], torch.tensor(list(itertools.product((0.0, 1.0), repeat=len(y) * num_chains)), dtype=DOUBLE)
    for path in paths.view(-1, len(y), num_chains):
        trace = poutine.trace(poutine.condition(model, {"s": path})).get_trace(y)
        weights.append(trace.log_prob_sum().detach())
    return (torch.stack(weights).softmax(0) @ paths).view(len(y), num_chains)


OTHER_STEPS = ("a step of its own", "exchanged at a step", "a scale for each step")


@pytest.mark.parametrize("form", ["linear", "superposition", *OTHER_STEPS, "clamped", "scales of columns", "residuals"])
def test_one_sequence_without_a_plate(form: str) -> None:
    weight, scale = torch.arange(6.0, dtype=DOUBLE).view(2, 3).cos(), torch.tensor(0.7, dtype=DOUBLE)
    calls = []

    def model(y: Tensor) -> None:
        calls.append(1)
        s = pyro.sample("s", BinaryChains(torch.full((2,), 0.4, dtype=DOUBLE), SWITCH.repeat(2, 1, 1), num_steps=len(y)))
        mean, noise = 0.3 + s @ weight, scale
        if form == "superposition":
            pyro.sample("y", LinearSuperposition(s, weight.mT, scale, mean.new_full((3,), 0.3)).to_event(1), obs=y)
            return
        if form == "a step of its own":
            mean = mean + s[..., :1] * (torch.arange(len(y)) == 3).unsqueeze(1)
        elif form == "exchanged at a step":
            mean = mean + (s.flip(-1) - s) @ weight * (torch.arange(len(y)) == 2).unsqueeze(1)
        elif form == "clamped":
            mean = mean.clamp(max=0.6)
        elif form == "a scale for each step":
            noise = scale + torch.arange(len(y), dtype=DOUBLE).unsqueeze(1)
        elif form == "scales of columns":
            noise = scale + torch.arange(3, dtype=DOUBLE)
        seen = y - 0.5 * s[..., :1] if form == "residuals" else y
        pyro.sample("y", dist.Normal(mean, noise).to_event(2), obs=seen)

    y = torch.randn(4, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    guide = AutoTruncated(model, num_states=4)
    Truncated_ELBO().loss(model, guide, y)
    torch.testing.assert_close(guide.marginals()["s"].squeeze(0).to(DOUBLE), marginals(model, y, 2), rtol=1e-9, atol=1e-9)
    guide = AutoTruncated(model, num_states=3)
    Truncated_ELBO().loss(model, guide, y)
    calls.clear()
    Truncated_ELBO(search_steps=4).loss_and_grads(model, guide, y)
    # Kernels score states; otherwise the program is run for each block of candidates.
    assert (len(calls) < 20) == (form in ("linear", "superposition", "scales of columns"))


def chains(name: str, num_chains: int, num_steps: int, lengths: Tensor | None = None) -> Tensor:
    initial = torch.full((num_chains,), 0.4, dtype=DOUBLE)
    return pyro.sample(name, BinaryChains(initial, SWITCH.repeat(num_chains, 1, 1), num_steps, lengths))


def of_single_site(y: Tensor, lengths: Tensor | None = None) -> float:
    """The loss of a program with one site of all chains."""

    def model(y: Tensor) -> None:
        with pyro.plate("sequences", len(y)):
            mask = torch.ones(y.shape[:2], dtype=torch.bool) if lengths is None else torch.arange(y.shape[1]) < lengths.unsqueeze(-1)
            s = chains("s", y.shape[2], y.shape[1], lengths)
            pyro.sample("y", dist.Normal(s * weight(y.shape[2]), 0.7).mask(mask.unsqueeze(-1)).to_event(2), obs=y)

    return Truncated_ELBO().loss(model, AutoTruncated(model, 2 ** y.shape[2]), y)


def marginals_of_single_site(y: Tensor) -> Tensor:
    def model(y: Tensor) -> None:
        with pyro.plate("sequences", len(y)):
            pyro.sample("y", dist.Normal(chains("s", y.shape[2], y.shape[1]) * weight(y.shape[2]), 0.7).to_event(2), obs=y)

    guide = AutoTruncated(model, 2 ** y.shape[2])
    Truncated_ELBO().loss(model, guide, y)
    return guide.marginals()["s"]


def weight(num_chains: int) -> Tensor:
    return torch.arange(1.0, 1.0 + num_chains, dtype=DOUBLE)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("lengths", [None, torch.tensor([9, 3, 6])], ids=["one length", "lengths"])
def test_uncoupled_chains_that_are_sampled_step_by_step_have_sets_of_their_own(lengths):
    def model(y: Tensor, x: Tensor) -> None:
        with pyro.plate("sequences", len(y)):
            mask = torch.ones(y.shape[:2], dtype=torch.bool) if lengths is None else torch.arange(9) < lengths.unsqueeze(-1)
            a, b = chains("a", 3, y.shape[1], lengths), chains("b", 2, x.shape[1])
            pyro.sample("y", dist.Normal(a * weight(3), 0.7).mask(mask.unsqueeze(-1)).to_event(2), obs=y)
            pyro.sample("x", dist.Normal(b * weight(2), 0.7).to_event(2), obs=x)

    y, x = draw(3, 9, 3), draw(3, 5, 2)
    guide = AutoTruncated(model, 8)
    exact = of_single_site(y, lengths) + of_single_site(x)
    assert Truncated_ELBO().loss(model, guide, y, x) == pytest.approx(exact, rel=1e-12)
    assert SVI(model, guide, pyro.optim.Adam({}), Trace_ELBO()).evaluate_loss(y, x) == pytest.approx(exact, rel=1e-12)
    assert len(guide.product.graph.nodes) == 9 + 5
    drawn, marginals = guide.sample_posterior(4), guide.marginals()
    assert drawn["a"].shape == (4, 3, 9, 3)
    assert lengths is None or bool((drawn["a"][:, 1, 3:] == 0).all())
    torch.testing.assert_close(marginals["b"], marginals_of_single_site(x))


def test_coupled_chains_of_two_sites_equal_those_of_one():
    def model(y: Tensor) -> None:
        with pyro.plate("sequences", len(y)):
            s = torch.cat(torch.broadcast_tensors(chains("a", 1, y.shape[1]), chains("b", 1, y.shape[1])), -1)
            pyro.sample("y", dist.Normal((s * weight(2)).sum(-1, keepdim=True), 0.7).to_event(2), obs=y)

    def single(y: Tensor) -> None:
        with pyro.plate("sequences", len(y)):
            s = chains("s", 2, y.shape[1])
            pyro.sample("y", dist.Normal((s * weight(2)).sum(-1, keepdim=True), 0.7).to_event(2), obs=y)

    y = draw(2, 12, 1)
    losses = [Truncated_ELBO().loss(program, AutoTruncated(program, 4), y) for program in (model, single)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_flag_above_chains_has_a_set_beside_those_of_the_steps():
    def model(y: Tensor, flags: Tensor | None = None) -> None:
        with pyro.plate("sequences", len(y)):
            flag = pyro.sample("flag", dist.Bernoulli(torch.tensor(0.3, dtype=DOUBLE)), obs=flags)
            s = chains("s", 2, y.shape[1])
            pyro.sample("y", dist.Normal((1 + flag)[..., None, None] * s * weight(2), 0.7).to_event(2), obs=y)

    y = draw(1, 12, 2)
    guide = AutoTruncated(model, 4)
    loss = Truncated_ELBO().loss(model, guide, y)
    given = torch.tensor([-Truncated_ELBO().loss(model, AutoTruncated(model, 4), y, torch.full((1,), v).double()) for v in (0.0, 1.0)])
    assert loss == pytest.approx(-float(given.double().logsumexp(0)), rel=1e-6)
    assert float(guide.marginals()["flag"]) == pytest.approx(float(given.softmax(0)[1]), abs=1e-5)


def test_chains_that_are_observed_in_some_sequences_are_given_there():
    """Beside a flag, as semi-supervised programs have them."""
    states, y = (torch.rand(3, 8, 2, generator=torch.Generator().manual_seed(1)) < 0.5).double(), draw(3, 8, 2)

    def model(y: Tensor, states: Tensor | None = None) -> None:
        with pyro.plate("sequences", len(y)):
            flag = pyro.sample("flag", dist.Bernoulli(torch.full((len(y),), 0.3, dtype=DOUBLE)))
            s = pyro.sample("s", BinaryChains(torch.full((2,), 0.4, dtype=DOUBLE), SWITCH.repeat(2, 1, 1), 8), obs=states)
            pyro.sample("y", dist.Normal((1 + flag)[..., None, None] * s * weight(2), 0.7).to_event(2), obs=y)

    guide = AutoTruncated(model, 4)
    Truncated_ELBO().loss(model, guide, y)
    terms = [dist.Normal((1 + flag) * states * weight(2), 0.7).log_prob(y).sum((1, 2)) for flag in (0.0, 1.0)]
    prior = BinaryChains(torch.full((2,), 0.4, dtype=DOUBLE), SWITCH.repeat(2, 1, 1), 8).log_prob(states)
    exact = prior + torch.stack([terms[0] + math.log(0.7), terms[1] + math.log(0.3)]).logsumexp(0)
    assert Truncated_ELBO().loss(model, guide, y, states) == pytest.approx(-float(exact.sum()), rel=1e-6)


def test_densities_of_several_steps_have_sets_too():
    """An observation of each step depends on the one before, too: chains are then taken step by step."""
    y = draw(3, 4, 3)
    model = program("coupled")
    guide = AutoTruncated(model, 4)
    assert Truncated_ELBO().loss(model, guide, y) == pytest.approx(-evidence(model, y).sum().item(), rel=1e-9)
    assert guide.marginals()["s"].shape == guide.mode()["s"].shape == (3, 4, 2)
    assert guide.sample_posterior(5)["s"].shape == (5, 3, 4, 2)

    def summed(y: Tensor) -> None:
        with pyro.plate("sequences", 2):
            s = pyro.sample("s", BinaryChains(torch.full((2,), 0.4), torch.full((2, 2, 2), 0.5), 6))
            pyro.sample("y", dist.Normal(s.sum((-1, -2)), 1.0), obs=y)

    with pytest.raises(NotImplementedError, match="left-most dimension of its event"):
        AutoTruncated(summed, num_states=3)(torch.randn(2))
    assert AutoTruncated(summed, num_states=3, whole_states=True)(torch.randn(2))["s"].shape == (2, 6, 2)


@pytest.mark.parametrize("reason", ["mask", "name", "event"])
def test_chains_with_a_mask_have_steps_and_those_that_cannot_have_whole_paths(reason, caplog):
    """Beside a loop with sets, as those of the loop must not be mixed up with steps."""
    y, name = draw(3, 4, 1), "s_step_1" if reason == "name" else "flag"

    def model(y: Tensor) -> None:
        with pyro.plate("sequences", len(y)):
            fn = BinaryChains(torch.full((1,), 0.4, dtype=DOUBLE), SWITCH.repeat(1, 1, 1), 4)
            fn = fn.mask(torch.tensor([True, False, True])) if reason == "mask" else fn
            fn = fn.expand([len(y), 1]).to_event(1) if reason == "event" else fn
            s = pyro.sample("s", fn)
            s = s.squeeze(-3) if reason == "event" else s
            z = torch.tensor(0.0, dtype=DOUBLE)
            for t in range(4):
                own = name if t == 1 else f"z_{t}"
                z = pyro.sample(own, dist.Bernoulli(torch.where(z > 0, 0.8, 0.3).to(DOUBLE)))
                pyro.sample(f"x_{t}", dist.Normal(z, torch.ones((), dtype=DOUBLE)), obs=y[:, t, 0])
            pyro.sample("y", dist.Normal(s, torch.tensor(0.7, dtype=DOUBLE)).to_event(2), obs=y)

    caplog.set_level(logging.INFO)
    guide = AutoTruncated(model, num_states=16)
    loss = Truncated_ELBO().loss(model, guide, y)
    exact = Truncated_ELBO().loss(model, AutoTruncated(model, num_states=2**8), y)
    assert loss == pytest.approx(exact, rel=1e-6)
    assert guide.marginals()["s"].shape == guide.mode()["s"].shape == ((3, 1, 4, 1) if reason == "event" else (3, 4, 1))
    assert guide.product is not None
    assert bool(guide.product.steps) == (reason == "mask")
    assert {"mask": "", "name": "['s_step_1'] of its own", "event": "further event dimensions"}[reason] in caplog.text


def flagged(y: Tensor, batch_size: int | None = None) -> None:
    switch = pyro.param("switch", lambda: SWITCH.repeat(2, 1, 1), constraint=dist.constraints.simplex)
    with pyro.plate("sequences", len(y), subsample_size=batch_size) as rows:
        flag = pyro.sample("flag", dist.Bernoulli(torch.tensor(0.3, dtype=DOUBLE)))
        s = pyro.sample("s", BinaryChains(torch.full((2,), 0.4, dtype=DOUBLE), switch, y.shape[1]))
        pyro.sample("y", dist.Normal((1 + flag)[..., None, None] * s * weight(2), 0.7).to_event(2), obs=y[rows])


def test_a_guide_that_takes_chains_step_by_step_is_like_any_other():
    """Gradients, minibatches, new sequences, copies of the state, ArviZ and Pyro's own losses."""
    y, elbo = draw(4, 3, 2), Truncated_ELBO()
    guide = AutoTruncated(flagged, 4)
    loss = elbo.loss_and_grads(flagged, guide, y)
    gradient = pyro.get_param_store()._params["switch"].grad.clone()
    total = []
    for flag in (0.0, 1.0):
        given = poutine.condition(flagged, {"flag": torch.full((4,), flag, dtype=DOUBLE)})
        total.append(evidence(given, y) + math.log(0.3 if flag else 0.7))
    exact = -torch.stack(total).logsumexp(0)
    assert loss == pytest.approx(exact.sum().item(), rel=1e-6)
    expected = torch.autograd.grad(exact.sum(), pyro.get_param_store()._params["switch"])[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)
    assert Trace_ELBO().loss(flagged, guide, y) == pytest.approx(loss, rel=1e-9)
    assert elbo.loss(flagged, guide.infer(y[:2]), y[:2]) == pytest.approx(exact[:2].sum().item(), rel=1e-6)
    again = AutoTruncated(flagged, 4)
    again.load_state_dict(guide.state_dict())
    again.refresh_(y)
    torch.testing.assert_close(again.marginals(), guide.marginals())
    likelihood = to_arviz(flagged, guide, y, num_samples=2, num_chains=1, num_predictive=0)["log_likelihood"]["y"]
    torch.testing.assert_close(torch.as_tensor(likelihood.values[0, 0]), -exact.detach(), rtol=1e-6, atol=1e-6)
    minibatches = AutoTruncated(flagged, 4)
    losses = [elbo.loss(flagged, minibatches, y, 2) for _ in range(100)]
    # A mean over 100 draws of two of four terms: their false-alarm rate is below one in a million at five standard errors.
    standard_error = 4 * exact.std().item() / math.sqrt(3 * 100)
    assert sum(losses) / 100 == pytest.approx(loss, abs=5 * standard_error)


@pytest.mark.parametrize("lengths", [None, torch.tensor([4, 2])], ids=["one length", "lengths"])
def test_pairs_of_entries_equal_sums_over_all_paths(lengths):
    def model(y: Tensor) -> None:
        mask = torch.ones(2, 4, dtype=torch.bool) if lengths is None else torch.arange(4) < lengths.unsqueeze(-1)
        with pyro.plate("sequences", 2):
            s = chains("s", 2, 4, lengths)
            pyro.sample("y", dist.Normal(s * weight(2), 0.7).mask(mask.unsqueeze(-1)).to_event(2), obs=y)

    y, guide = draw(2, 4, 2), AutoTruncated(model, 4)
    Truncated_ELBO().loss(model, guide, y)
    log_joint, paths = [], torch.tensor(list(itertools.product((0.0, 1.0), repeat=8)), dtype=DOUBLE).view(-1, 4, 2)
    for path in paths:
        trace = poutine.trace(poutine.condition(model, {"s": path.expand(2, -1, -1)})).get_trace(y)
        trace.compute_log_prob()
        is_possible = torch.ones(2, dtype=torch.bool) if lengths is None else (path[lengths.min() :] == 0).all() | (lengths == 4)
        log_joint.append((trace.nodes["s"]["log_prob"] + trace.nodes["y"]["log_prob"]).masked_fill(~is_possible, -math.inf))
    posterior = torch.stack(log_joint, -1).softmax(-1)
    values = torch.stack([1 - paths, paths], -1)
    expected = torch.einsum("np,ptmv,pukw->ntmukvw", posterior, values, values)
    found = guide.pairwise_marginals("s", "s")
    assert found.shape == (2, 4, 2, 4, 2, 2, 2)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="second must be the name of the site of chains, 's'; got 'y'"):
        guide.pairwise_marginals("s", "y")


@pytest.mark.parametrize("form", ["normal", "masked"])
def test_a_search_of_ones_own_may_propose_nothing(form):
    class Nothing(Search):
        def propose(self, batch):
            return batch.evaluate(batch.population.words[:, :0])

    pyro.set_rng_seed(0)
    y, model = torch.randn(2, 5, 3, dtype=DOUBLE), program(form, num_chains=3)
    guide = AutoTruncated(model, num_states=4)
    losses = [Truncated_ELBO(Nothing()).loss_and_grads(model, guide, y) for _ in range(2)]
    assert losses[1] <= losses[0] < math.inf
