"""Mixtures: of points, counts, regressions, experts, with outliers, labels for some, and an excess of zeros."""

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.nn import PyroModule, PyroSample
from pyro.ops.indexing import Vindex
from torch.nn.functional import pad

from tests.foreign import Foreign, foreign


@foreign
def gaussian_mixture() -> Foreign:
    """Pyro's tutorial "Gaussian Mixture Model": Dirichlet weights, one scale, locations in a plate."""

    def model(data):
        weights = pyro.sample("weights", dist.Dirichlet(0.5 * torch.ones(2)))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 2.0))
        with pyro.plate("components", 2):
            locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
        with pyro.plate("data", len(data)):
            assignment = pyro.sample("assignment", dist.Categorical(weights))
            pyro.sample("obs", dist.Normal(locs[assignment], scale), obs=data)

    return Foreign(model, (torch.tensor([0.0, 1.0, 10.0, 11.0, 12.0]),), new=(torch.tensor([0.5, 9.0]),))


@foreign
def dirichlet_process_mixture() -> Foreign:
    """Pyro's tutorial on Dirichlet processes: stick breaking at a truncation, here with four sticks."""

    def model(data):
        with pyro.plate("beta_plate", 3):
            beta = pyro.sample("beta", dist.Beta(1, 1.1))
        with pyro.plate("mu_plate", 4):
            mu = pyro.sample("mu", dist.MultivariateNormal(torch.zeros(2), 5 * torch.eye(2)))
        remaining = (1 - beta).cumprod(-1)
        weights = pad(beta, (0, 1), value=1) * pad(remaining, (1, 0), value=1)
        with pyro.plate("data", len(data)):
            z = pyro.sample("z", dist.Categorical(weights))
            pyro.sample("obs", dist.MultivariateNormal(mu[z], torch.eye(2)), obs=data)

    return Foreign(model, (torch.randn(6, 2),), new=(torch.randn(2, 2),))


@foreign
def poisson_mixture() -> Foreign:
    """A mixture of Poisson counts (sunspots in Pyro's tutorial, two states of neurons elsewhere)."""

    def model(y):
        weights = pyro.param("weights", torch.ones(3) / 3, constraint=constraints.simplex)
        rate = pyro.sample("rate", dist.Gamma(torch.tensor([1.0, 2.0, 5.0]), 0.5).to_event(1))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(weights))
            pyro.sample("y", dist.Poisson(rate[z]), obs=y)

    return Foreign(model, (torch.tensor([0.0, 3.0, 11.0, 1.0]),))


@foreign
def multinomial_mixture() -> Foreign:
    """Naive Bayes documents without labels (Stan User's Guide, clustering): a class, then a bag of words."""

    def model(counts):
        theta = pyro.sample("theta", dist.Dirichlet(torch.ones(2)))
        phi = pyro.sample("phi", dist.Dirichlet(torch.ones(2, 5)).to_event(1))
        with pyro.plate("data", len(counts)):
            z = pyro.sample("z", dist.Categorical(theta))
            pyro.sample("counts", dist.Multinomial(probs=Vindex(phi)[z], validate_args=False), obs=counts)

    return Foreign(model, (torch.tensor([[3.0, 1, 0, 0, 2], [0, 0, 4, 1, 1], [1, 1, 1, 1, 2]]),))


@foreign
def eyes() -> Foreign:
    """BUGS volume 2, "Eyes": peak sensitivities of monkeys' eyes from two normals, the second shifted by a positive step."""

    def model(y):
        p = pyro.sample("P", dist.Dirichlet(torch.ones(2)))
        theta = pyro.sample("theta", dist.HalfNormal(30.0))
        lowest = pyro.sample("lambda_1", dist.Normal(530.0, 30.0))
        sigma = pyro.sample("sigma", dist.LogNormal(1.0, 1.0))
        lam = torch.stack([lowest, lowest + theta], -1)
        with pyro.plate("data", len(y)):
            group = pyro.sample("T", dist.Categorical(p))
            pyro.sample("y", dist.Normal(lam[..., group], sigma), obs=y)

    return Foreign(model, (torch.tensor([529.0, 530.0, 532.0, 548.9, 550.0]),))


@foreign
def mixture_of_regressions() -> Foreign:
    """A mixture of linear regressions (Stan and PyMC forums; "switching regression"): every point follows one of two lines."""

    def model(x, y):
        with pyro.plate("lines", 2):
            slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
            intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
            sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with pyro.plate("data", len(x)):
            line = pyro.sample("line", dist.Bernoulli(0.4)).long()
            pyro.sample("y", dist.Normal(intercept[line] + slope[line] * x, sigma[line]), obs=y)

    return Foreign(model, (torch.randn(6), torch.randn(6)), new=(torch.randn(3), torch.randn(3)))


@foreign
def mixture_of_experts() -> Foreign:
    """A mixture of experts: the covariate decides by a softmax which expert answers (NumPyro and PyMC examples)."""

    def model(x, y):
        gate = pyro.sample("gate", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
        experts = pyro.sample("experts", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
        design = torch.stack([torch.ones_like(x), x], -1)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Categorical(logits=design @ gate.mT))
            mean = (Vindex(experts)[z] * design).sum(-1)
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    return Foreign(model, (torch.randn(5), torch.randn(5)))


@foreign
def outliers() -> Foreign:
    """PyMC's "robust regression with outlier detection" (after Hogg, Bovy and Lang): an indicator for every point."""

    def model(x, y, sigma):
        b = pyro.sample("b", dist.Normal(torch.zeros(2), 3.0).to_event(1))
        mean_out = pyro.sample("mean_out", dist.Normal(0.0, 10.0))
        sigma_out = pyro.sample("sigma_out", dist.HalfNormal(10.0))
        share = pyro.sample("share", dist.Uniform(0.0, 0.5))
        with pyro.plate("data", len(x)):
            is_outlier = pyro.sample("is_outlier", dist.Bernoulli(share))
            mean = is_outlier * mean_out + (1 - is_outlier) * (b[..., 0] + b[..., 1] * x)
            scale = is_outlier * (sigma_out + sigma) + (1 - is_outlier) * sigma
            pyro.sample("y", dist.Normal(mean, scale), obs=y)

    return Foreign(model, (torch.randn(7), torch.randn(7), 0.3 + torch.rand(7)))


@foreign
def contaminated_normal() -> Foreign:
    """A normal contaminated by a wide one, as a scale mixture (Tukey; robust measurement models in BUGS)."""

    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with pyro.plate("data", len(y)):
            wide = pyro.sample("wide", dist.Bernoulli(0.1))
            pyro.sample("y", dist.Normal(mu, torch.where(wide > 0, 10.0, 1.0)), obs=y)

    return Foreign(model, (torch.tensor([0.1, -0.3, 12.0, 0.5]),))


@foreign
def zero_inflated_poisson() -> Foreign:
    """Fishing trips (Stan, PyMC): a structural zero with probability psi, else a Poisson count; the indicator is sampled."""

    def model(x, y):
        psi = pyro.sample("psi", dist.Beta(1.0, 1.0))
        beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            fishes = pyro.sample("fishes", dist.Bernoulli(psi))
            rate = torch.exp(beta[..., 0] + beta[..., 1] * x)
            pyro.sample("y", dist.Poisson(fishes * rate + 1e-10), obs=y)

    return Foreign(model, (torch.randn(6), torch.tensor([0.0, 0.0, 3.0, 1.0, 0.0, 2.0])))


@foreign
def zero_inflated_negative_binomial() -> Foreign:
    """Zero-inflated negative binomial counts of single cells, with a point mass at zero chosen by the indicator."""

    def model(y):
        psi = pyro.param("psi", torch.tensor(0.3), constraint=constraints.unit_interval)
        logits = pyro.param("logits", torch.tensor(0.2))
        with pyro.plate("data", len(y)):
            dropout = pyro.sample("dropout", dist.Bernoulli(psi))
            pyro.factor("is_zero", torch.where((dropout > 0) & (y > 0), -torch.inf, 0.0))
            with pyro.poutine.mask(mask=dropout < 1):
                pyro.sample("y", dist.NegativeBinomial(2.5, logits=logits), obs=y)

    return Foreign(model, (torch.tensor([0.0, 4.0, 0.0, 1.0]),))


@foreign
def hurdle_with_misreport() -> Foreign:
    """A hurdle model (Stan User's Guide) in which some of those who crossed the hurdle report nothing."""

    def model(y):
        crossed_rate = pyro.sample("crossed_rate", dist.Beta(2.0, 2.0))
        hidden_rate = pyro.sample("hidden_rate", dist.Beta(1.0, 9.0))
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", len(y)):
            crossed = pyro.sample("crossed", dist.Bernoulli(crossed_rate))
            hides = pyro.sample("hides", dist.Bernoulli(crossed * hidden_rate))
            shown = crossed * (1 - hides)
            log_positive = dist.Poisson(rate).log_prob(y.clamp(min=1)) - torch.log(-torch.expm1(-rate))
            zero, never = torch.tensor(0.0), torch.tensor(-torch.inf)
            pyro.factor("y", torch.where(shown > 0, torch.where(y > 0, log_positive, never), torch.where(y > 0, never, zero)))

    return Foreign(model, (torch.tensor([0.0, 2.0, 1.0, 0.0]),))


@foreign
def one_hot_mixture() -> Foreign:
    """Galaxy velocities (Roeder): a mixture with one-hot indicators that pick locations and precisions by a product."""

    def model(y):
        locs = pyro.sample("locs", dist.Normal(torch.tensor([10.0, 20.0, 30.0]), 5.0).to_event(1))
        scales = pyro.sample("scales", dist.Gamma(2 * torch.ones(3), torch.ones(3)).to_event(1))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.OneHotCategorical(torch.tensor([0.1, 0.8, 0.1])))
            pyro.sample("y", dist.Normal((z * locs).sum(-1), (z * scales).sum(-1)), obs=y)

    return Foreign(model, (torch.tensor([9.2, 18.5, 20.8, 33.0]),))


@foreign
def semi_supervised_mixture() -> Foreign:
    """Stan User's Guide, semi-supervised naive Bayes: labels are known for some of the points (``obs_mask``)."""

    def model(y, labels, known):
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
        locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 5.0).to_event(1))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(weights), obs=labels, obs_mask=known)
            pyro.sample("y", dist.Normal(locs[z], 1.0), obs=y)

    return Foreign(model, (torch.randn(5), torch.tensor([0, 2, 1, 0, 0]), torch.tensor([True, False, True, False, False])))


@foreign
def student_mixture_module() -> Foreign:
    """A mixture of Student's t distributions as a ``PyroModule`` with ``PyroSample`` attributes."""

    class Mixture(PyroModule):
        def __init__(self):
            super().__init__()
            self.loc = PyroSample(dist.Normal(0.0, 3.0).expand([2]).to_event(1))
            self.df = PyroSample(dist.Gamma(2.0, 0.5))

        def forward(self, y):
            loc, df = self.loc, self.df
            with pyro.plate("data", len(y)):
                z = pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.6])))
                pyro.sample("y", dist.StudentT(df, Vindex(loc)[..., z], 1.0), obs=y)

    return Foreign(Mixture(), (torch.randn(5),))


@foreign
def sequential_mixture() -> Foreign:
    """Pyro's "SVI Part II" writes the data plate as a loop: all assignments then form one state."""

    def model(data):
        locs = pyro.param("locs", torch.tensor([-1.0, 1.0]))
        for i in pyro.plate("data", len(data)):
            z = pyro.sample(f"z_{i}", dist.Bernoulli(0.5))
            pyro.sample(f"obs_{i}", dist.Normal(locs[..., z.long()], 1.0), obs=data[i])

    return Foreign(model, (torch.randn(4),), plates=(), limits={"AutoGuideList": "AutoGuide does not support sequential pyro.plate"})


@foreign
def heaped_ages() -> Foreign:
    """Heaping: some people round their age to tens, so an age of forty may stand for any from 35 to 44."""

    def model(reported):
        loc = pyro.sample("loc", dist.Normal(40.0, 10.0))
        rounds_rate = pyro.sample("rounds_rate", dist.Beta(1.0, 1.0))
        with pyro.plate("data", len(reported)):
            rounds = pyro.sample("rounds", dist.Bernoulli(rounds_rate))
            half = torch.where(rounds > 0, 5.0, 0.5)
            prior = dist.Normal(loc, 12.0)
            log_mass = (prior.cdf(reported + half) - prior.cdf(reported - half)).log()
            impossible = (rounds > 0) & (reported % 10 != 0)
            pyro.factor("reported", torch.where(impossible, -torch.inf, log_mass))

    return Foreign(model, (torch.tensor([40.0, 37.0, 50.0, 42.0, 30.0]),))
