"""Change points: one for all data, one for each series, several at once, with missing years."""

import pyro
import pyro.distributions as dist
import torch
from pyro.ops.indexing import Vindex

from tests.foreign import Foreign, foreign


@foreign
def coal_mining() -> Foreign:
    """Stan User's Guide, "change point models": disasters in British coal mines, one scalar change point for all years."""

    def model(disasters):
        years = len(disasters)
        early, late = pyro.sample("e", dist.Exponential(1.0)), pyro.sample("l", dist.Exponential(1.0))
        s = pyro.sample("s", dist.Categorical(torch.ones(years)))
        with pyro.plate("years", years) as year:
            rate = torch.where(year < s, early, late)
            pyro.sample("D", dist.Poisson(rate), obs=disasters)

    # Made here, in the precision of the tests: Pyro takes log y! in that of the counts.
    return Foreign(model, (torch.tensor([4.0, 5, 4, 3, 2, 1, 0, 2]),), plates=())


@foreign
def coal_mining_with_missing_years() -> Foreign:
    """PyMC's "disaster model": the same with two years unknown, imputed as latent counts (``obs_mask``).

    Rates are small, so that next to none of the counts exceed three.
    """

    def model(disasters, known):
        early, late = pyro.sample("early", dist.Exponential(4.0)), pyro.sample("late", dist.Exponential(4.0))
        switchpoint = pyro.sample("switchpoint", dist.Categorical(torch.ones(len(disasters))))
        with pyro.plate("years", len(disasters)) as year:
            rate = torch.where(year < switchpoint, early, late)
            pyro.sample("disasters", dist.Poisson(rate), obs=disasters, obs_mask=known)

    known = torch.tensor([True, True, False, True])
    return Foreign(model, (torch.tensor([1.0, 2.0, 0.0, 0.0]), known), plates=(), max_count={"disasters_unobserved": 3})


@foreign
def text_messages() -> Foreign:
    """Bayesian Methods for Hackers, chapter 1: the rate of text messages changes on an unknown day; no plate at all."""

    def model(counts):
        alpha = 1.0 / counts.mean()
        lam = pyro.sample("lambda", dist.Exponential(alpha).expand([2]).to_event(1))
        tau = pyro.sample("tau", dist.Categorical(torch.ones(len(counts))))
        index = (torch.arange(len(counts)) >= tau.unsqueeze(-1)).long()
        pyro.sample("counts", dist.Poisson(lam[..., index]).to_event(1), obs=counts)

    return Foreign(model, (torch.tensor([13.0, 24, 8, 24, 37, 49]),), plates=())


@foreign
def stagnant() -> Foreign:
    """BUGS volume 2, "Stagnant": two straight lines that meet at one of the design points."""

    def model(x, y):
        alpha = pyro.sample("alpha", dist.Normal(0.0, 2.0))
        beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        k = pyro.sample("k", dist.Categorical(torch.ones(len(x))))
        with pyro.plate("data", len(x)) as i:
            slope = torch.where(i <= k, beta[..., 0], beta[..., 1])
            pyro.sample("y", dist.Normal(alpha + slope * (x - x[k]), sigma), obs=y)

    return Foreign(model, (torch.linspace(-1, 1, 6), torch.randn(6)), plates=())


@foreign
def several_change_points() -> Foreign:
    """Several change points: an indicator before each step, and levels by the number of changes so far."""

    def model(y):
        levels = pyro.sample("levels", dist.Normal(0.0, 3.0).expand([y.shape[1]]).to_event(1))
        with pyro.plate("data", len(y)):
            changes = pyro.sample("changes", dist.Bernoulli(0.2).expand([y.shape[1] - 1]).to_event(1))
            segment = torch.nn.functional.pad(changes.cumsum(-1), (1, 0)).long()
            pyro.sample("y", dist.Normal(Vindex(levels)[..., segment], 1.0).to_event(1), obs=y)

    return Foreign(model, (torch.randn(3, 5),))


@foreign
def two_ordered_change_points() -> Foreign:
    """Two change points in order: the second one is drawn from what is left after the first (its support depends on it)."""

    def model(y):
        level = pyro.param("level", torch.tensor([0.0, 2.0, -1.0]))
        time = torch.arange(float(y.shape[1]))
        with pyro.plate("data", len(y)):
            first = pyro.sample("first", dist.Binomial(4, 0.5))
            gap = pyro.sample("gap", dist.Binomial(5 - first, 0.4))
            second = first + gap
            segment = (time > first.unsqueeze(-1)).long() + (time > second.unsqueeze(-1)).long()
            pyro.sample("y", dist.Normal(level[segment], 1.0).to_event(1), obs=y)

    return Foreign(model, (torch.randn(3, 6),))


@foreign
def change_point_per_series() -> Foreign:
    """A panel: every person changes on a day of their own, with levels of their own that are integrated by a guide."""

    def model(y):
        spread = pyro.sample("spread", dist.HalfNormal(2.0))
        time = torch.arange(y.shape[1])
        with pyro.plate("data", len(y)):
            before = pyro.sample("before", dist.Normal(0.0, spread))
            after = pyro.sample("after", dist.Normal(0.0, spread))
            tau = pyro.sample("tau", dist.Categorical(torch.ones(y.shape[1])))
            has_changed = time >= tau.unsqueeze(-1)
            mean = torch.where(has_changed, after.unsqueeze(-1), before.unsqueeze(-1))
            pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)

    return Foreign(model, (torch.randn(3, 5),), limits={"infer": "cannot know the latents"})
