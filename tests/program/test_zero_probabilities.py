"""States of prior probability zero are impossible: every distribution that torch clamps, against sums written by hand."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.distributions import LinearSuperposition, NoisyOrSuperposition
from pyro_truncated.models import BinarySparseCoding
from pyro_truncated.program.zero_probabilities import log_prob_with_zeros

INF = math.inf
Y = torch.tensor([0.3, 2.2, 3.1])


def zeros(*values):
    return torch.tensor(values, dtype=torch.float64)


def with_logits(fn):
    """The distribution once both of its parameters are computed."""
    assert fn.logits.shape == fn.probs.shape
    return fn


# Each: a distribution of counts 0, 1, 2, ..., and its probabilities.
SCALARS = {
    "Bernoulli(0)": (lambda: dist.Bernoulli(zeros(0.0)[0]), [1, 0]),
    "Bernoulli(1)": (lambda: dist.Bernoulli(zeros(1.0)[0]), [0, 1]),
    "Bernoulli(logits=-inf)": (lambda: dist.Bernoulli(logits=zeros(-INF)[0]), [1, 0]),
    "Bernoulli(logits=inf)": (lambda: dist.Bernoulli(logits=zeros(INF)[0]), [0, 1]),
    "Categorical": (lambda: dist.Categorical(zeros(0.25, 0.0, 0.75)), [0.25, 0, 0.75]),
    "Categorical of logits": (lambda: dist.Categorical(logits=zeros(0.25, 0.0, 0.75).log()), [0.25, 0, 0.75]),
    "Binomial(0)": (lambda: dist.Binomial(2, zeros(0.0)[0]), [1, 0, 0]),
    "Binomial(1)": (lambda: dist.Binomial(2, zeros(1.0)[0]), [0, 0, 1]),
    "Binomial(logits=inf)": (lambda: dist.Binomial(2, logits=zeros(INF)[0]), [0, 0, 1]),
    "Geometric(1)": (lambda: dist.Geometric(zeros(1.0)[0]), [1, 0, 0, 0]),
    "Geometric(logits=inf)": (lambda: dist.Geometric(logits=zeros(INF)[0]), [1, 0, 0, 0]),
    "NegativeBinomial(0)": (lambda: dist.NegativeBinomial(zeros(3.0)[0], zeros(0.0)[0]), [1, 0, 0, 0]),
    "NegativeBinomial(logits=-inf)": (lambda: dist.NegativeBinomial(zeros(3.0)[0], logits=zeros(-INF)[0]), [1, 0, 0, 0]),
    "Poisson(0)": (lambda: dist.Poisson(zeros(0.0)[0]), [1, 0, 0, 0]),
    "ZeroInflatedPoisson": (lambda: dist.ZeroInflatedPoisson(zeros(2.0)[0], gate=zeros(1.0)[0]), [1, 0, 0, 0]),
    "ZeroInflatedNegativeBinomial": (
        lambda: dist.ZeroInflatedNegativeBinomial(zeros(2.0)[0], probs=zeros(0.0)[0], gate=zeros(0.3)[0]),
        [1, 0, 0, 0],
    ),
    "MixtureSameFamily": (lambda: dist.MixtureSameFamily(dist.Categorical(zeros(1.0, 0.0)), dist.Bernoulli(zeros(0.0, 1.0))), [1, 0]),
    "Categorical with logits looked at": (lambda: with_logits(dist.Categorical(zeros(0.25, 0.0, 0.75))), [0.25, 0, 0.75]),
    "Bernoulli with probabilities looked at": (lambda: with_logits(dist.Bernoulli(logits=zeros(-200.0)[0])), [1, math.exp(-200)]),
    "masked": (lambda: dist.Bernoulli(zeros(0.0)[0]).mask(torch.tensor(True)), [1, 0]),
}


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.parametrize("is_plated", [False, True])
@pytest.mark.parametrize("vectorize", [True, False])
def test_posteriors_are_those_of_the_possible_states(name, is_plated, vectorize):
    make, probabilities = SCALARS[name]

    def model():
        if not is_plated:
            z = pyro.sample("z", make())
            pyro.sample("y", dist.Normal(z.double(), 0.5), obs=Y[0].double())
            return
        with pyro.plate("data", 3):
            z = pyro.sample("z", make())
            pyro.sample("y", dist.Normal(z.double(), 0.5), obs=Y.double())

    y = Y.double() if is_plated else Y[:1].double()
    values = torch.arange(len(probabilities), dtype=torch.float64)
    joint = zeros(*probabilities).log() + dist.Normal(values, 0.5).log_prob(y.unsqueeze(-1))
    guide = AutoTruncated(model, max_count=len(probabilities) - 1, vectorize=vectorize)
    loss = Truncated_ELBO().loss_and_grads(model, guide)
    torch.testing.assert_close(torch.tensor(-loss, dtype=torch.float64), joint.logsumexp(-1).sum())
    found = guide.marginals()["z"]
    expected = joint.softmax(-1)
    torch.testing.assert_close(found.double(), expected[..., 1] if found.dim() == 1 else expected[:, : found.shape[-1]])


@pytest.mark.parametrize(
    ("fn", "values", "expected"),
    [
        (lambda: dist.Bernoulli(zeros(0.0, 0.5, 1.0)).to_event(1), zeros(0, 1, 1), math.log(0.5)),
        (lambda: dist.Bernoulli(zeros(0.0, 0.5, 1.0)).to_event(1), zeros(1, 1, 1), -INF),
        (lambda: dist.Bernoulli(logits=zeros(-INF, 0.0, INF)).to_event(1), zeros(0, 1, 0), -INF),
        (lambda: dist.Bernoulli(zeros(0.0)).expand([4]).to_event(1), zeros(0, 0, 1, 0), -INF),
        (lambda: dist.Bernoulli(zeros(0.0, 0.5)).mask(torch.tensor([False, True])).to_event(1), zeros(1, 1), math.log(0.5)),
        (lambda: dist.Bernoulli(zeros(0.0)).mask(torch.tensor([True])).expand_by([1]).to_event(2), zeros(1), -INF),
        (lambda: dist.OneHotCategorical(zeros(0.25, 0.0, 0.75)), zeros(0, 1, 0), -INF),
        (lambda: dist.OneHotCategorical(zeros(0.25, 0.0, 0.75)), zeros(0, 0, 1), math.log(0.75)),
        (lambda: dist.Categorical(zeros(0.25, 0.0, 0.75)).expand([2]).to_event(1), zeros(0, 2), math.log(0.25 * 0.75)),
        (lambda: dist.ExtendedBinomial(torch.tensor(2), zeros(0.0)[0]), zeros(0)[0], 0.0),
        (lambda: dist.ExtendedBinomial(torch.tensor(-1), zeros(0.0)[0]), zeros(0)[0], -INF),
        (
            lambda: dist.MixtureSameFamily(dist.Categorical(zeros(0.0, 1.0)), dist.Bernoulli(zeros(1.0, 0.25))),
            zeros(1)[0],
            math.log(0.25),
        ),
        (
            lambda: dist.MaskedMixture(torch.tensor(True), dist.Bernoulli(zeros(0.5)[0]), dist.Bernoulli(zeros(0.0)[0])),
            zeros(1)[0],
            -INF,
        ),
    ],
)
def test_logarithms_are_exact_in_any_wrapper(fn, values, expected):
    with pyro.validation_enabled(False):
        found = log_prob_with_zeros(fn(), values)
    assert found is not None
    torch.testing.assert_close(found, torch.full_like(found, expected))


def test_whatever_else_is_left_to_the_distribution():
    for fn in (dist.Bernoulli(zeros(0.1, 0.9)), dist.Categorical(zeros(0.1, 0.9)), dist.Normal(0.0, 1.0), dist.Poisson(2.0)):
        assert log_prob_with_zeros(fn, zeros(1.0)[0]) is None

    class Own(dist.Bernoulli):
        def log_prob(self, value):
            return torch.zeros_like(value)

    assert log_prob_with_zeros(Own(zeros(0.0)), zeros(1.0)) is None
    # A probability of one that was computed from a large logit is not certain.
    fn = dist.Bernoulli(logits=torch.tensor(30.0))
    assert float(fn.probs) == 1.0
    assert log_prob_with_zeros(fn, torch.tensor(0.0)) is None


def off_by_another(q):
    """A latent whose probability is zero where another one is off."""
    with pyro.plate("data", len(Y)):
        a = pyro.sample("a", dist.Bernoulli(0.4))
        b = pyro.sample("b", dist.Bernoulli(a * q))
        pyro.sample("y", dist.Normal(a + 2 * b, 0.5), obs=Y)


class Tempered(dist.Independent):
    """A wrapper with a density of its own."""

    def log_prob(self, value):
        return 3 * super().log_prob(value)


@pytest.mark.parametrize("is_packed", [False, True])
def test_wrappers_with_a_density_of_their_own_keep_it(is_packed):
    """Against the sum over the states that torch, which clamps, gives a density."""
    probs, weight = zeros(0.2, 0.7, 0.0), zeros(1.0, 2.0, 4.0)
    y = Y.double()

    def model(y):
        with pyro.plate("data", 3):
            s = pyro.sample("s", Tempered(dist.Bernoulli(probs.expand(3, 3)), 1))
            fn = (
                LinearSuperposition(s, weight.unsqueeze(0), zeros(1.0))
                if is_packed
                else dist.Normal((s * weight).sum(-1, True), 1.0).to_event(1)
            )
            pyro.sample("y", fn, obs=y.unsqueeze(-1))

    states = torch.cartesian_prod(*[zeros(0.0, 1.0)] * 3)
    log_joint = 3 * dist.Bernoulli(probs).log_prob(states).sum(-1) + dist.Normal(states @ weight, 1.0).log_prob(y.unsqueeze(-1))
    expected = -log_joint.logsumexp(-1).sum()
    assert Truncated_ELBO().loss(model, AutoTruncated(model), y) == pytest.approx(float(expected), rel=1e-9)


def test_gradients_of_possible_states_are_finite():
    q = pyro.param("q", torch.tensor(0.3), constraint=constraints.unit_interval)
    guide = AutoTruncated(off_by_another)
    loss = Truncated_ELBO().loss_and_grads(off_by_another, guide, q)
    found = pyro.param("q").unconstrained().grad.clone()
    pyro.param("q").unconstrained().grad = None
    q = pyro.param("q")
    terms = [dist.Normal(mean, 0.5).log_prob(Y) for mean in (0.0, 1.0, 3.0)]
    expected = -torch.stack([math.log(0.6) + terms[0], (0.4 * (1 - q)).log() + terms[1], (0.4 * q).log() + terms[2]]).logsumexp(0).sum()
    expected.backward()
    torch.testing.assert_close(torch.tensor(loss), expected.detach())
    torch.testing.assert_close(found, pyro.param("q").unconstrained().grad)


def test_rates_of_zero_have_gradients():
    """Torch's own is NaN where rate and count are zero."""
    counts = torch.tensor([0.0, 3.0, 0.0])

    def model():
        rate = pyro.param("rate", torch.tensor(2.0))
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("y", dist.Poisson(z * rate), obs=counts)

    loss = Truncated_ELBO().loss_and_grads(model, AutoTruncated(model))
    rate = torch.tensor(2.0, requires_grad=True)
    joint = torch.stack([torch.where(counts == 0, 0.0, -INF), dist.Poisson(rate).log_prob(counts)]) + math.log(0.5)
    expected = -joint.logsumexp(0).sum()
    expected.backward()
    torch.testing.assert_close(torch.tensor(loss), expected.detach())
    torch.testing.assert_close(pyro.param("rate").unconstrained().grad, rate.grad)


def test_what_follows_from_an_impossible_value_is_no_matter():
    scales = torch.tensor([1.0, math.nan, 2.0])

    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.5, 0.0, 0.5])))
            pyro.sample("y", dist.Normal(0.0, scales[z]), obs=Y)

    guide = AutoTruncated(model)
    with pyro.validation_enabled(False):
        loss = Truncated_ELBO().loss_and_grads(model, guide)
    expected = torch.stack([dist.Normal(0.0, scale).log_prob(Y) for scale in (1.0, 2.0)]).sub(math.log(2.0)).logsumexp(0).sum()
    torch.testing.assert_close(torch.tensor(-loss), expected)


@pytest.mark.parametrize("is_logits", [False, True])
@pytest.mark.parametrize("per_point", [False, True])
@pytest.mark.parametrize("family", ["linear", "noisy-or"])
def test_packed_states_keep_to_the_prior(family, per_point, is_logits, generator):
    weight = torch.rand(4, 5, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    prior = zeros(0.0, 0.3, 1.0, 0.6, 0.0).expand(6, 5) if per_point else zeros(0.0, 0.3, 1.0, 0.6, 0.0)
    if per_point:
        prior = torch.cat([prior[:3], prior[3:].flip(-1)])
    y = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    y = (y > 0).double() if family == "noisy-or" else y

    def likelihood(s):
        return NoisyOrSuperposition(s, weight, 0.1) if family == "noisy-or" else LinearSuperposition(s, weight, 0.7)

    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(logits=prior.logit()).to_event(1) if is_logits else dist.Bernoulli(prior).to_event(1))
            pyro.sample("y", likelihood(s), obs=y)

    guide = AutoTruncated(model, 32).infer(y, ExhaustiveSearch(), 1)
    assert guide.make_batch(y).scorer.packed_model is not None
    every = torch.cartesian_prod(*[zeros(0.0, 1.0)] * 5)
    prior_terms = torch.where(every.unsqueeze(1) == 1, prior, 1 - prior).log().sum(-1)
    joint = prior_terms + torch.stack([likelihood(state.expand(6, 5)).log_prob(y) for state in every])
    torch.testing.assert_close(guide.population().free_energy(), joint.logsumexp(0))
    torch.testing.assert_close(guide.marginals()["s"], torch.einsum("cn,ch->nh", joint.softmax(0), every))


def test_flips_into_the_impossible_are_not_proposed(generator):
    model = BinarySparseCoding(30, 100, offset=False)
    model.weight = torch.randn(30, 100, generator=generator)
    prior = torch.full((100,), 0.05)
    prior[50:] = 0.0
    model.prior = prior
    y = torch.randn(20, 30, generator=generator)
    guide = AutoTruncated(model, 16).infer(y, steps=5)
    assert float(guide.marginals()["s"][:, 50:].max()) == 0.0
    assert bool(guide.population().log_joint.amax(-1).isfinite().all())
