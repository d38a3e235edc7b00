"""Programs that sample other sites for other values of their latents are refused with one reason, whatever the seed."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer.autoguide import AutoGuideList, AutoNormal

from pyro_truncated import AutoTruncated, Truncated_ELBO

ONE = torch.tensor(1.0)


def as_many_as_a_category_says():
    k = pyro.sample("k", dist.Categorical(torch.ones(3)))
    total = 0.0
    for i in range(int(k) + 1):
        total = total + pyro.sample(f"z{i}", dist.Bernoulli(0.5))
    pyro.sample("y", dist.Normal(total, 1.0), obs=ONE)


def as_a_rare_value_says():
    k = pyro.sample("k", dist.Bernoulli(1e-4))
    if k:
        pyro.sample("z1", dist.Bernoulli(0.5))
    pyro.sample("y", dist.Normal(k, 1.0), obs=ONE)


def as_a_continuous_latent_says():
    k = pyro.sample("k", dist.Normal(0.0, 1.0))
    z = pyro.sample("z0", dist.Bernoulli(0.5))
    if k > 0:
        z = pyro.sample("z1", dist.Bernoulli(0.5))
    pyro.sample("y", dist.Normal(z, 1.0), obs=ONE)


def observed_elsewhere():
    k = pyro.sample("k", dist.Bernoulli(0.5))
    pyro.sample("z1" if k.item() else "z2", dist.Normal(0.0, 1.0), obs=ONE)


def observed_as_a_latent_says():
    k = pyro.sample("k", dist.Bernoulli(0.5))
    z = pyro.sample("z1", dist.Bernoulli(0.3), obs=ONE if k.item() else None)
    pyro.sample("y", dist.Normal(z + k, 1.0), obs=ONE)


def as_a_vector_says():
    k = pyro.sample("k", dist.Bernoulli(torch.full((3,), 0.1)).to_event(1))
    if k.all():
        pyro.sample("z1", dist.Bernoulli(0.5))
    pyro.sample("y", dist.Normal(k.sum(), 1.0), obs=ONE)


def as_a_plate_says():
    with pyro.plate("data", 3):
        k = pyro.sample("k", dist.Bernoulli(torch.full((3,), 0.01)))
        if k.sum() > 1:
            pyro.sample("z1", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(k, 1.0), obs=torch.ones(3))


def as_one_hot_says():
    k = pyro.sample("k", dist.OneHotCategorical(torch.ones(3)))
    if k.argmax() == 2:
        pyro.sample("z1", dist.Bernoulli(0.5))
    pyro.sample("y", dist.Normal(k[0], 1.0), obs=ONE)


@pytest.mark.parametrize(
    "model",
    [
        as_many_as_a_category_says,
        as_a_rare_value_says,
        as_a_continuous_latent_says,
        observed_elsewhere,
        observed_as_a_latent_says,
        as_a_vector_says,
        as_a_plate_says,
        as_one_hot_says,
    ],
)
def test_sites_that_change_are_refused_with_one_reason(model):
    for seed in range(5):
        pyro.set_rng_seed(seed)
        with pytest.raises(NotImplementedError, match=r"the sites \['z1'.*\] are sampled for some states of \['k'\] only, or in other"):
            AutoTruncated(model).setup()


@pytest.mark.parametrize("size", [lambda k: int(k) + 1, lambda k: 3 if k.item() else 2])
def test_sites_whose_plate_has_a_size_that_a_latent_says_are_refused_by_name(size):
    def model():
        k = pyro.sample("k", dist.Categorical(torch.ones(3)))
        with pyro.plate("members", size(k)):
            z = pyro.sample("z1", dist.Bernoulli(0.3))
        pyro.sample("y", dist.Normal(z.sum(-1), 1.0), obs=ONE)

    for seed in range(5):
        pyro.set_rng_seed(seed)
        with pytest.raises(NotImplementedError, match=r"the sites \['z1'\] are sampled for some states of \['k'\] only, or in other"):
            AutoTruncated(model).setup()


@pytest.mark.parametrize("threshold", [-1.3, 0.0, 0.3, 0.6])
def test_sites_that_change_by_chance_are_refused_by_name(threshold):
    def model():
        s = pyro.sample("s", dist.Bernoulli(0.5))
        if torch.randn(()) > threshold:
            pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(s, 1.0), obs=ONE)

    for seed in range(5):
        pyro.set_rng_seed(seed)
        with pytest.raises(NotImplementedError, match=r"the sites \['z'\] are sampled in some runs only"):
            Truncated_ELBO().loss(model, AutoTruncated(model))


def test_factors_beside_a_plate_that_change_by_chance_are_refused_by_name():
    def model():
        with pyro.plate("data", 3):
            s = pyro.sample("s", dist.Bernoulli(torch.full((2,), 0.3)).to_event(1))
            pyro.sample("y", dist.Normal(s.sum(-1), 1.0), obs=torch.zeros(3))
        if torch.rand(()) < 0.5:
            pyro.sample("extra", dist.Bernoulli(0.5))

    for seed in range(10):
        pyro.set_rng_seed(seed)
        with pytest.raises(NotImplementedError, match=r"the sites \['extra'\] are sampled in some runs only"):
            AutoTruncated(model).setup()


def test_observations_may_have_a_length_that_a_latent_says():
    def model():
        k = pyro.sample("k", dist.Bernoulli(0.5))
        data = torch.ones(int(k) + 1)
        pyro.sample("y", dist.Normal(torch.zeros(len(data)), 1.0).to_event(1), obs=data)

    log_prob = dist.Normal(0.0, 1.0).log_prob(ONE)
    expected = torch.stack([log_prob, 2 * log_prob]).logsumexp(0) - torch.tensor(2.0).log()
    torch.testing.assert_close(torch.tensor(-Truncated_ELBO().loss(model, AutoTruncated(model, vectorize=False))), expected)


def test_programs_that_only_look_at_their_latents_are_taken():
    def model():
        k = pyro.sample("k", dist.Categorical(torch.ones(3)))
        pyro.sample("y", dist.Normal(0.0 if int(k) == 2 else 1.0, 1.0), obs=ONE)

    guide = AutoTruncated(model, vectorize=False)
    loss = Truncated_ELBO().loss(model, guide)
    expected = torch.stack([dist.Normal(mean, 1.0).log_prob(ONE) for mean in (1.0, 1.0, 0.0)]).logsumexp(0) - torch.tensor(3.0).log()
    torch.testing.assert_close(torch.tensor(-loss), expected)


def test_sites_that_change_beside_another_guide_are_refused_when_they_do():
    """Pyro makes errors of a traced guide anew, of their message."""

    def model():
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        k = pyro.sample("k", dist.Bernoulli(0.3)) if w > -1.3 else 0.0
        s = pyro.sample("s", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(s + k + w, 1.0), obs=ONE)

    guide = AutoGuideList(model)
    guide.append(AutoNormal(poutine.block(model, expose=["w"])))
    guide.append(AutoTruncated(model))
    with pytest.raises(NotImplementedError, match=r"the sites \['k'\] are sampled for some states of \['w'\] only"):
        Truncated_ELBO(num_particles=50).loss(model, guide)
