"""Structured programs by plates: occupancy, mixed membership, classes of two levels, uncoupled plates, loops over data points."""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.ops.indexing import Vindex

from tests.foreign.structured import Structured, structured

_SIMPLEX = dist.constraints.simplex
_UNIT = dist.constraints.unit_interval


@structured
def occupancy_of_species() -> Structured:
    """A flag per species (does it live in the region?) above a presence per site; visits detect what is present."""

    def model(detections):
        lives = pyro.param("lives", torch.tensor(0.6), _UNIT)
        present = pyro.param("present", torch.tensor(0.5), _UNIT)
        seen = pyro.param("seen", torch.tensor(0.3), _UNIT)
        num_species, num_sites = detections.shape
        with pyro.plate("species", num_species, dim=-2):
            w = pyro.sample("w", dist.Bernoulli(lives))
            with pyro.plate("sites", num_sites, dim=-1):
                z = pyro.sample("z", dist.Bernoulli(w * present))
                pyro.sample("y", dist.Binomial(3, z * seen), obs=detections)

    return Structured(model, (torch.tensor([[0.0, 1, 0], [0, 0, 0], [2, 0, 0]]),), full=2, nodes=2)


@structured
def occupancy_over_seasons() -> Structured:
    """Dynamic occupancy: sites are colonised and go extinct; a mask hides visits that did not happen."""

    def model(detections, visited):
        col, ext = pyro.param("col", torch.tensor(0.3), _UNIT), pyro.param("ext", torch.tensor(0.2), _UNIT)
        with pyro.plate("sites", len(detections)):
            z = torch.zeros(())
            for t in pyro.markov(range(detections.shape[1])):
                z = pyro.sample(f"z_{t}", dist.Bernoulli(z * (1 - ext) + (1 - z) * col))
                with poutine.mask(mask=visited[:, t]):
                    pyro.sample(f"y_{t}", dist.Binomial(2, 0.4 * z), obs=detections[:, t])

    visited = torch.tensor([[True, True, False, True], [False, True, True, True], [True, False, False, True]])
    return Structured(model, (torch.tensor([[0.0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 1]]), visited), full=2, nodes=4)


@structured
def mixed_membership() -> Structured:
    """Topics: a kind for each document says how its topics are mixed, a topic for each word, words inside of documents."""

    def model(words):
        topics = pyro.param("topics", lambda: torch.rand(3, 4).softmax(-1), _SIMPLEX)
        with pyro.plate("kinds", 2):
            theta = pyro.sample("theta", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("documents", len(words), dim=-2):
            kind = pyro.sample("kind", dist.Categorical(torch.tensor([0.4, 0.6])))
            with pyro.plate("words", words.shape[1], dim=-1):
                z = pyro.sample("z", dist.Categorical(Vindex(theta)[kind]))
                pyro.sample("word", dist.Categorical(Vindex(topics)[z]), obs=words)

    return Structured(model, (torch.randint(4, (2, 4)),), full=3, nodes=2)


@structured
def classes_of_two_levels() -> Structured:
    """A class for each school, and one for each pupil that depends on it."""

    def model(y):
        inner = pyro.param("inner", lambda: torch.rand(2, 3).softmax(-1), _SIMPLEX)
        loc = pyro.param("loc", torch.tensor([-1.0, 0.5, 2.0]))
        with pyro.plate("schools", len(y), dim=-2):
            school = pyro.sample("school", dist.Categorical(torch.tensor([0.4, 0.6])))
            with pyro.plate("pupils", y.shape[1], dim=-1):
                pupil = pyro.sample("pupil", dist.Categorical(Vindex(inner)[school]))
                pyro.sample("y", dist.Normal(loc[pupil], 0.8), obs=y)

    return Structured(model, (torch.randn(2, 4),), full=3, nodes=2)


@structured
def classes_of_three_levels() -> Structured:
    """District, school and pupil."""

    def model(y):
        keep = pyro.param("keep", torch.tensor(0.8), _UNIT)
        with pyro.plate("districts", 2, dim=-3):
            a = pyro.sample("a", dist.Bernoulli(0.5))
            with pyro.plate("schools", 2, dim=-2):
                b = pyro.sample("b", dist.Bernoulli(a * keep + (1 - a) * (1 - keep)))
                with pyro.plate("pupils", 2, dim=-1):
                    c = pyro.sample("c", dist.Bernoulli(b * keep + (1 - b) * (1 - keep)))
                    pyro.sample("y", dist.Normal(c, 0.7), obs=y)

    return Structured(model, (torch.randn(2, 2, 2),), full=2, nodes=3)


@structured
def two_uncoupled_plates() -> Structured:
    """Two mixtures in two plates that nothing couples."""

    def model(x, y):
        for name, data in (("x", x), ("y", y)):
            loc = pyro.param(f"loc_{name}", torch.tensor([-1.0, 0.3, 1.0]))
            with pyro.plate(f"{name}_data", len(data)):
                z = pyro.sample(f"z_{name}", dist.Categorical(torch.ones(3)))
                pyro.sample(name, dist.Normal(loc[z], 0.7), obs=data)

    return Structured(model, (torch.randn(4), torch.randn(5)), full=3, nodes=2)


@structured
def global_flag() -> Structured:
    """A flag outside of all plates above a plate of classes."""

    def model(y):
        shift = pyro.param("shift", torch.tensor(0.7))
        flag = pyro.sample("flag", dist.Bernoulli(0.3))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(logits=torch.stack([flag, -flag, 0.5 * flag], -1)))
            pyro.sample("y", dist.Normal(z + shift * flag, 0.8), obs=y)

    return Structured(model, (torch.randn(7) + 1,), full=3, nodes=2)


@structured
def loop_over_data_points() -> Structured:
    """A mixture with Python's loop in place of a plate."""

    def model(y):
        loc = pyro.param("loc", torch.tensor([-1.0, 0.0, 1.0]))
        for i in range(len(y)):
            z = pyro.sample(f"z_{i}", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
            pyro.sample(f"y_{i}", dist.Normal(loc[z], 0.6), obs=y[i])

    return Structured(model, (torch.randn(8),), full=3, nodes=8)


@structured
def sequential_plate_of_pairs() -> Structured:
    """A sequential plate with two coupled sites in each pass."""

    def model(y):
        loc = pyro.param("loc", torch.tensor([-1.0, 1.0]))
        for i in pyro.plate("data", len(y)):
            a = pyro.sample(f"a_{i}", dist.Categorical(torch.tensor([0.4, 0.6])))
            b = pyro.sample(f"b_{i}", dist.Bernoulli(0.2 + 0.6 * a))
            pyro.sample(f"y_{i}", dist.Normal(loc[a] + b, 0.6), obs=y[i])

    return Structured(model, (torch.randn(6),), full=4)


@structured
def sites_beside_each_other() -> Structured:
    """Sites in one plate that share nothing: each is its own component."""

    def model(y):
        loc = pyro.param("loc", torch.tensor([-1.0, 0.0, 1.0]))
        with pyro.plate("data", len(y)):
            for k in range(3):
                z = pyro.sample(f"z_{k}", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
                pyro.sample(f"y_{k}", dist.Normal(loc[z], 0.6), obs=y[:, k])

    return Structured(model, (torch.randn(3, 3),), full=3, nodes=3)


@structured
def flag_with_normal_guide() -> Structured:
    """Robust regression with a global flag, coefficients under a delta guide, outliers in a plate."""

    def model(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        heavy = pyro.sample("heavy", dist.Bernoulli(0.5))
        with pyro.plate("data", len(y)):
            outlier = pyro.sample("outlier", dist.Bernoulli(0.1 + 0.3 * heavy))
            pyro.sample("y", dist.Normal(slope * x, 0.3 + 2 * outlier), obs=y)

    return Structured(model, (torch.randn(9), torch.randn(9)), full=2, nodes=2)


@structured
def latent_regression_per_group() -> Structured:
    """Continuous latents inside a plate between two levels of classes."""

    def model(y):
        with pyro.plate("groups", len(y), dim=-2):
            kind = pyro.sample("kind", dist.Bernoulli(0.5))
            mean = pyro.sample("mean", dist.Normal(kind, 1.0))
            with pyro.plate("members", y.shape[1], dim=-1):
                z = pyro.sample("z", dist.Bernoulli(0.2 + 0.5 * kind))
                pyro.sample("y", dist.Normal(mean + 2 * z, 0.7), obs=y)

    return Structured(model, (torch.randn(2, 4),), full=2, nodes=2)


@structured
def minibatch_of_outer_plate() -> Structured:
    """A given subsample of schools, each with all of its pupils, scaled."""

    def model(y, index):
        inner = pyro.param("inner", lambda: torch.rand(2, 3).softmax(-1), _SIMPLEX)
        loc = pyro.param("loc", torch.tensor([-1.0, 0.5, 2.0]))
        with pyro.plate("schools", len(y), dim=-2, subsample=index) as chosen:
            school = pyro.sample("school", dist.Categorical(torch.tensor([0.4, 0.6])))
            with pyro.plate("pupils", y.shape[1], dim=-1):
                pupil = pyro.sample("pupil", dist.Categorical(Vindex(inner)[school]))
                pyro.sample("y", dist.Normal(loc[pupil], 0.8), obs=y[chosen])

    return Structured(model, (torch.randn(5, 3), torch.tensor([3, 1])), full=3, nodes=2)


@structured
def scaled_chain() -> Structured:
    """A chain under ``poutine.scale``."""

    def model(y):
        keep = pyro.param("keep", torch.tensor(0.8), _UNIT)
        with poutine.scale(scale=0.4):
            z = torch.tensor(0.0)
            for t in range(len(y)):
                z = pyro.sample(f"z_{t}", dist.Bernoulli(z * keep + (1 - z) * (1 - keep)))
                pyro.sample(f"y_{t}", dist.Normal(z, 0.8), obs=y[t])

    return Structured(model, (torch.randn(5),), full=2, nodes=5)


@structured
def plate_opened_twice() -> Structured:
    """A plate object that is opened for the latents, and again for what depends on them."""

    def model(y):
        keep = pyro.param("keep", torch.tensor(0.7), _UNIT)
        data = pyro.plate("data", len(y))
        with data:
            a = pyro.sample("a", dist.Bernoulli(0.4))
        with data:
            b = pyro.sample("b", dist.Categorical(torch.stack([a * keep, 1 - a * keep, torch.ones_like(a)], -1)))
        with data:
            c = pyro.sample("c", dist.Categorical(logits=torch.stack([b * 0.1, b * 0.5, -b * keep], -1)))
            pyro.sample("y", dist.Normal(c.to(y.dtype), 0.7), obs=y)

    return Structured(model, (torch.randn(3),), full=3, nodes=3)


@structured
def one_hot_and_counts() -> Structured:
    """A one-hot class, a count with a bound above, and a switch."""

    def model(y):
        rate = pyro.param("rate", torch.tensor([0.5, 2.0, 1.0]), dist.constraints.positive)
        with pyro.plate("data", len(y)):
            kind = pyro.sample("kind", dist.OneHotCategorical(torch.tensor([0.2, 0.3, 0.5])))
            count = pyro.sample("count", dist.Poisson((kind * rate).sum(-1)))
            on = pyro.sample("on", dist.Bernoulli(0.5 / (1 + count)))
            pyro.sample("y", dist.Normal(count + on, 0.5), obs=y)

    return Structured(model, (torch.randn(2).abs() * 2,), full=6, truncated=5, nodes=3, max_count={"count": 5})


@structured
def seen_at_some_places() -> Structured:
    """Normal guide beside a hierarchy with missing observations."""

    def model(y):
        with pyro.plate("groups", len(y), dim=-2):
            kind = pyro.sample("kind", dist.Categorical(torch.ones(3)))
            with pyro.plate("members", y.shape[1], dim=-1):
                z = pyro.sample("z", dist.Bernoulli(0.2 + 0.3 * kind))
                known = ~y.isnan()
                pyro.sample("y", dist.Normal(2 * z, 0.7).mask(known), obs=torch.where(known, y, 0.0))

    y = torch.randn(2, 3)
    y[0, 1] = y[1, 2] = torch.nan
    return Structured(model, (y,), full=3, nodes=2)


@structured
def users_and_items() -> Structured:
    """A class for each user and each item: given all users' classes, those of the items are independent."""

    def model(ratings, seen):
        mean = pyro.param("mean", lambda: torch.randn(2, 3))
        users, items = pyro.plate("users", 3, dim=-2), pyro.plate("items", 3, dim=-1)
        with users:
            user = pyro.sample("user", dist.Bernoulli(0.4)).long()
        with items:
            item = pyro.sample("item", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
        with users, items, poutine.mask(mask=seen):
            pyro.sample("rating", dist.Normal(Vindex(mean)[user, item], 1.0), obs=ratings)

    return Structured(model, (torch.randn(3, 3), torch.rand(3, 3) < 0.7), full=8, truncated=7, nodes=2)


@structured
def three_crossed_plates() -> Structured:
    """Users rate items on occasions: given all users and occasions, items are independent."""

    def model(ratings):
        mean = pyro.param("mean", lambda: torch.randn(2, 2, 2))
        users, times, items = pyro.plate("users", 2, dim=-3), pyro.plate("times", 3, dim=-2), pyro.plate("items", 4, dim=-1)
        with users:
            user = pyro.sample("user", dist.Bernoulli(0.4)).long()
        with times:
            time = pyro.sample("time", dist.Bernoulli(0.5)).long()
        with items:
            item = pyro.sample("item", dist.Bernoulli(0.6)).long()
        with users, times, items:
            pyro.sample("rating", dist.Normal(Vindex(mean)[user, time, item], 1.0), obs=ratings)

    return Structured(model, (torch.randn(2, 3, 4),), full=8, nodes=3)


@structured
def chains_that_share_subjects() -> Structured:
    """A chain of states for each channel, and a class for each subject that moves all observations of it."""

    def model(y):
        effect = pyro.param("effect", torch.tensor(0.7))
        subjects, channels = pyro.plate("subjects", 2, dim=-2), pyro.plate("channels", 3, dim=-1)
        with subjects:
            subject = pyro.sample("subject", dist.Bernoulli(0.4))
        z = torch.zeros(())
        for t in range(len(y)):
            with channels:
                z = pyro.sample(f"z_{t}", dist.Bernoulli(0.2 + 0.5 * z))
            with subjects, channels:
                pyro.sample(f"y_{t}", dist.Normal(z - effect * subject, 1.0), obs=y[t])

    return Structured(model, (torch.randn(3, 2, 3),), full=4, nodes=4)
