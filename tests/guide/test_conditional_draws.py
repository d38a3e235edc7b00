"""A conditional that is not exact: what is read are averages over its draws, against quadrature."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from torch import Tensor

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO

Y = torch.tensor([0.7, -0.4, 1.6])
GRID = torch.linspace(-9.0, 9.0, 9001, dtype=torch.float64)


def prior_of_state(x):
    return torch.where(x > 0, 0.8, 0.3)


def plated(y):
    with pyro.plate("data", len(y)):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        i = pyro.sample("i", dist.Bernoulli(prior_of_state(x)))
        pyro.sample("y", dist.Normal(x + i, 1.0), obs=y)


def roughly(states, y):
    pyro.sample("x", dist.Normal(0.4 * (y - states["i"]), 0.8))


def exact_evidence(y: Tensor) -> Tensor:
    """Log joints ``(2, N)`` of the two values, by quadrature."""
    x, p = GRID, prior_of_state(GRID).double()
    terms = [
        dist.Normal(0.0, 1.0).log_prob(x) + (p if i else 1 - p).log() + dist.Normal(x + i, 1.0).log_prob(y.double().unsqueeze(-1))
        for i in (0, 1)
    ]
    return torch.stack(terms).logsumexp(-1) + (GRID[1] - GRID[0]).log()


READINGS = {
    "after a loss": lambda guide, y: Truncated_ELBO().loss(plated, guide, y) and guide,
    "after a step": lambda guide, y: Truncated_ELBO().loss_and_grads(plated, guide, y) and guide,
    "after refresh_": lambda guide, y: guide.refresh_(y) and guide,
    "of infer": lambda guide, y: guide.infer(y, ExhaustiveSearch(), 1),
}


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("reading", READINGS)
def test_what_is_read_is_averaged_over_draws(reading):
    joint = exact_evidence(Y)
    guide = AutoTruncated(plated, 2, conditional=roughly)
    guide.num_draws = 100
    guide = READINGS[reading](guide, Y)
    guide.num_draws = 100
    # Up to 800 draws, whose weights vary by less than their mean: off by 0.03 in a sigma at most.
    torch.testing.assert_close(guide.marginals()["i"].double(), joint.softmax(0)[1], rtol=0.0, atol=0.08)
    torch.testing.assert_close(guide.posterior(Y).free_energy(), joint.logsumexp(0), rtol=0.0, atol=0.2)
    assert guide.mode()["i"].tolist() == joint.argmax(0).tolist()
    assert guide.is_conditional_exact is False


def test_an_exact_conditional_is_not_drawn_again():
    def model(y):
        with pyro.plate("data", len(y)):
            i = pyro.sample("i", dist.Bernoulli(0.3))
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x + i, 1.0), obs=y)

    runs = []

    def exactly(states, y):
        runs.append(0)
        pyro.sample("x", dist.Normal(0.5 * (y - states["i"]), 0.5**0.5))

    guide = AutoTruncated(model, 2, conditional=exactly)
    Truncated_ELBO().loss_and_grads(model, guide, Y)
    guide.marginals()
    runs.clear()
    found = guide.marginals()["i"]
    assert guide.is_conditional_exact
    assert not runs
    terms = torch.stack([dist.Normal(0.0, 2**0.5).log_prob(Y) + torch.tensor(0.7).log()])
    terms = torch.cat([terms, dist.Normal(1.0, 2**0.5).log_prob(Y).unsqueeze(0) + torch.tensor(0.3).log()])
    torch.testing.assert_close(found, terms.softmax(0)[1], rtol=1e-4, atol=1e-5)


def test_a_conditional_opens_no_data_plate():
    def opens(states, y):
        with pyro.plate("data", len(y)):
            roughly(states, y)

    with pytest.raises(ValueError, match="duplicate plate 'data'") as caught:
        Truncated_ELBO().loss(plated, AutoTruncated(plated, conditional=opens), Y)
    causes = [caught.value, caught.value.__cause__]
    assert any("runs inside of the data plates ['data']" in note for one in causes for note in getattr(one, "__notes__", []))


def switched(y, x=None, s=None):
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(0.3), obs=s)
        x = pyro.sample("x", dist.Normal(s, 1.0), obs=x)
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def exact(states, y, x=None, s=None):
    pyro.sample("x", dist.Normal((states["s"] + y) / 2, 0.5**0.5))


def log_evidence(y: Tensor, scale: float) -> Tensor:
    return torch.stack([dist.Normal(s, scale).log_prob(y) + torch.tensor(p).log() for s, p in ((0.0, 0.7), (1.0, 0.3))]).logsumexp(0).sum()


@pytest.mark.parametrize("name", ["z", "s", "y"])
def test_a_conditional_samples_latents_of_the_model_alone(name):
    """The density of another site would count, and the bound exceed the evidence."""

    def conditional(states, y):
        exact(states, y)
        pyro.sample(name, dist.Bernoulli(torch.full_like(y, 0.3)))

    guide = AutoTruncated(switched, 2, conditional=conditional)
    for evaluate in (Truncated_ELBO().loss, Truncated_ELBO().loss_and_grads):
        with pytest.raises(ValueError, match=rf"the conditional samples \['{name}'\], but the model's other latents are \['x'\]"):
            evaluate(switched, guide, Y)


def test_a_latent_that_a_conditional_leaves_out_is_named():
    guide = AutoTruncated(switched, 2, conditional=lambda states, y: None)
    with pytest.warns(UserWarning, match=r"the conditional does not sample the latents \['x'\]: they are drawn from the prior"):
        Truncated_ELBO().loss(switched, guide, Y)


@pytest.mark.parametrize(
    "elbo",
    [Truncated_ELBO(), TraceEnum_ELBO(max_plate_nesting=1, strict_enumeration_warning=False), Trace_ELBO()],
    ids=lambda elbo: type(elbo).__name__,
)
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.filterwarnings("ignore:s_index")  # Pyro's advice, which Trace_ELBO gives of the guide's index
def test_what_the_model_observes_in_a_call_it_does_not_take_from_a_conditional(elbo, wrap):
    guide = AutoTruncated(switched, 2, conditional=exact)
    program = (lambda *args: guide(*args)) if wrap else guide
    assert -elbo.loss(switched, program, Y) == pytest.approx(float(log_evidence(Y, 2**0.5)), abs=1e-4)
    x, s = torch.tensor([0.2, 1.0, -0.6]), torch.tensor([0.0, 1.0, 1.0])
    given_x = dist.Normal(x, 1.0).log_prob(Y).sum()
    assert -elbo.loss(switched, program, Y, x) == pytest.approx(float(log_evidence(x, 1.0) + given_x), abs=1e-4)
    both = dist.Bernoulli(0.3).log_prob(s) + dist.Normal(s, 1.0).log_prob(x)
    assert -elbo.loss(switched, program, Y, x, s) == pytest.approx(float(both.sum() + given_x), abs=1e-4)


SEEN = torch.tensor([True, False, True])


def masked_inside(y):
    with pyro.plate("data", len(y)), poutine.mask(mask=SEEN):
        x = pyro.sample("x", dist.Normal(pyro.sample("s", dist.Bernoulli(0.3)), 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def masked_distributions(y):
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(0.3).mask(SEEN))
        x = pyro.sample("x", dist.Normal(s, 1.0).mask(SEEN))
        pyro.sample("y", dist.Normal(x, 1.0).mask(SEEN), obs=y)


def scaled_exact(states, y):
    with poutine.scale(scale=0.5):
        exact(states, y)


CHANGED = {
    "mask": (poutine.mask(switched, mask=SEEN), exact, 1.0, SEEN),
    "mask inside": (masked_inside, exact, 1.0, SEEN),
    "masked distributions": (masked_distributions, exact, 1.0, SEEN),
    "scale": (poutine.scale(switched, scale=0.5), exact, 0.5, slice(None)),
    "scale of both": (poutine.scale(switched, scale=0.5), scaled_exact, 0.5, slice(None)),
    "both": (poutine.mask(poutine.scale(switched, scale=3.0), mask=SEEN), exact, 3.0, SEEN),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("vectorize", [None, False])
@pytest.mark.filterwarnings("ignore:s_index")
def test_a_conditional_is_masked_and_scaled_as_the_model_is(name, vectorize):
    """Its density would count in full beside one of the model that does not: the bound would exceed the evidence."""
    model, conditional, scale, rows = CHANGED[name]
    guide = AutoTruncated(model, 2, conditional=conditional, vectorize=vectorize)
    for elbo in (Truncated_ELBO(), TraceEnum_ELBO(max_plate_nesting=1), Trace_ELBO()):
        assert -elbo.loss(model, guide, Y) == pytest.approx(scale * float(log_evidence(Y[rows], 2**0.5)), abs=1e-4)


def test_a_mask_of_a_conditional_may_go_with_the_state():
    y = torch.tensor([0.3, 2.0, -1.0], dtype=torch.float64)

    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.3, dtype=torch.float64)))
            with poutine.mask(mask=s.bool()):
                z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=torch.float64), 2.0))
            pyro.sample("y", dist.Normal(s * z, 1.0), obs=y)

    def conditional(states, y):
        with poutine.mask(mask=states["s"].bool()):
            pyro.sample("z", dist.Normal(0.8 * y, 0.8**0.5))

    parts = [dist.Normal(0.0, deviation).log_prob(y) + math.log(p) for deviation, p in ((1.0, 0.7), (5.0**0.5, 0.3))]
    expected = -float(torch.stack(parts).logsumexp(0).sum())
    guide = AutoTruncated(model, 2, conditional=conditional)
    assert [Truncated_ELBO().loss(model, guide, y) for _ in range(3)] == pytest.approx([expected] * 3, rel=1e-6)

    def unmasked(states, y):
        pyro.sample("z", dist.Normal(0.8 * y, 0.8**0.5))

    with pytest.raises(ValueError, match=r"the model masks \['z'\] by its discrete latents: mask them in the conditional, too"):
        Truncated_ELBO().loss(model, AutoTruncated(model, 2, conditional=unmasked), y)


def test_an_auxiliary_site_of_a_conditional_is_no_noise(recwarn):
    def model(y):
        with pyro.plate("data", len(y)):
            i = pyro.sample("i", dist.Bernoulli(0.3))
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x + i, 1.0), obs=y)

    def shifted(states, y):
        noise = pyro.sample("noise", dist.Normal(0.0, 0.5**0.5), infer={"is_auxiliary": True})
        pyro.sample("x", dist.Delta(0.5 * (y - states["i"]) + noise))

    guide = AutoTruncated(model, 2, conditional=shifted)
    loss = Truncated_ELBO().loss(model, guide, Y)
    assert not [warning for warning in recwarn if "random numbers" in str(warning.message)]
    terms = torch.stack([dist.Normal(i, 2**0.5).log_prob(Y) + math.log(0.3 if i else 0.7) for i in (0.0, 1.0)])
    assert loss == pytest.approx(-float(terms.logsumexp(0).sum()), rel=1e-5)
