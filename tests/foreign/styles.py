"""Ways to write a model: modules, networks, minibatches, keyword arguments, partial labels, reparametrisation, topics."""

import functools

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.distributions import constraints
from pyro.infer import config_enumerate
from pyro.infer.reparam import LocScaleReparam
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.ops.indexing import Vindex

from tests.foreign import Foreign, foreign


@foreign
def latent_dirichlet_allocation() -> Foreign:
    """Pyro's examples/lda.py: topics of words in documents, words in a plate nested in that of the documents."""

    def model(data, num_topics=2, num_words=4):
        with pyro.plate("topics", num_topics):
            weights = pyro.sample("topic_weights", dist.Gamma(1.0 / num_topics, 1.0))
            words = pyro.sample("topic_words", dist.Dirichlet(torch.ones(num_words) / num_words))
        with pyro.plate("documents", data.shape[1]):
            topics = pyro.sample("doc_topics", dist.Dirichlet(weights))
            with pyro.plate("words", data.shape[0]):
                z = pyro.sample("word_topics", dist.Categorical(topics), infer={"enumerate": "parallel"})
                pyro.sample("doc_words", dist.Categorical(words[z]), obs=data)

    return Foreign(model, (torch.randint(4, (3, 4)),), plates=("words", "documents"), limits={"infer": "cannot know the latents"})


@foreign
def topics_at_fixed_proportions() -> Foreign:
    """The same with the documents' proportions known and a mood for each document: words of a document hang together."""

    def model(data):
        words = pyro.sample("topic_words", dist.Dirichlet(torch.ones(2, 4)).to_event(1))
        with pyro.plate("documents", data.shape[1]):
            mood = pyro.sample("mood", dist.Categorical(torch.tensor([0.5, 0.5])))
            with pyro.plate("words", data.shape[0]):
                z = pyro.sample("z", dist.Categorical(torch.tensor([[0.8, 0.2], [0.3, 0.7]])[mood]))
                pyro.sample("w", dist.Categorical(Vindex(words)[z]), obs=data)

    return Foreign(model, (torch.randint(4, (3, 4)),), plates=("documents",))


@foreign
def presence_of_objects() -> Foreign:
    """After AIR (Eslami et al.; Pyro's tutorial): objects in slots, each there only if the one before is."""

    def model(images):
        templates = pyro.param("templates", torch.linspace(-1, 1, 15).reshape(3, 5))
        with pyro.plate("data", len(images)):
            present, mean = torch.tensor(1.0), torch.zeros(5)
            for slot in range(3):
                present = pyro.sample(f"present_{slot}", dist.Bernoulli(0.6 * present))
                mean = mean + present.unsqueeze(-1) * templates[slot]
            pyro.sample("image", dist.Normal(mean, 0.4).to_event(1), obs=images)

    return Foreign(model, (torch.randn(4, 5),), new=(torch.randn(2, 5),))


@foreign
def network_over_classes() -> Foreign:
    """After Pyro's semi-supervised VAE: a network of a class and codes, registered by ``pyro.module``."""

    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))

    def model(x):
        pyro.module("decoder", net)
        with pyro.plate("data", len(x)):
            y = pyro.sample("y", dist.OneHotCategorical(torch.ones(3)))
            code = pyro.sample("code", dist.Bernoulli(torch.full((2,), 0.5)).to_event(1))
            joined = torch.cat(torch.broadcast_tensors(y[..., :2], code), -1)
            pyro.sample("x", dist.Normal(net(torch.cat([joined, y[..., 2:].expand(*joined.shape[:-1], 1)], -1)), 0.5).to_event(1), obs=x)

    return Foreign(model, (torch.randn(4, 3),))


@foreign
def class_labels_as_keyword() -> Foreign:
    """A semi-supervised call: labels come as a keyword argument and are ``None`` without labels."""

    def model(x, *, labels=None, scale=1.0):
        loc = pyro.sample("loc", dist.Normal(torch.zeros(3), 2.0).to_event(1))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Categorical(torch.ones(3)), obs=labels)
            pyro.sample("x", dist.Normal(Vindex(loc)[..., z], scale), obs=x)

    return Foreign(model, (torch.randn(5),), {"scale": 0.5})


@foreign
def module_with_parameters() -> Foreign:
    """A ``PyroModule`` that owns parameters, priors and a submodule."""

    class Net(PyroModule):
        def __init__(self):
            super().__init__()
            self.linear = PyroModule[torch.nn.Linear](3, 2)
            self.linear.bias = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            self.noise = PyroParam(torch.tensor(0.7), constraint=constraints.positive)

        def forward(self, y):
            bias = self.linear.bias  # Sampled where it is first asked for: outside of the plate.
            with pyro.plate("data", len(y)):
                s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.3)).to_event(1))
                pyro.sample("y", dist.Normal(s @ self.linear.weight.mT + bias, self.noise).to_event(1), obs=y)

    return Foreign(Net(), (torch.randn(4, 2),))


@foreign
def bound_method() -> Foreign:
    """A model that is a method of a plain object, as VAE classes write it."""

    class Tones:
        def __init__(self):
            self.rate = 0.3

        def model(self, y):
            loc = pyro.param("loc", torch.tensor([0.0, 1.0]))
            with pyro.plate("data", len(y)):
                z = pyro.sample("z", dist.Bernoulli(self.rate))
                pyro.sample("y", dist.Normal(loc[z.long()], 1.0), obs=y)

    return Foreign(Tones().model, (torch.randn(3),))


@foreign
def partial_application() -> Foreign:
    """A model with some arguments filled in by ``functools.partial``."""

    def model(components, y):
        loc = pyro.sample("loc", dist.Normal(torch.zeros(components), 3.0).to_event(1))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(components)))
            pyro.sample("y", dist.Normal(Vindex(loc)[..., z], 1.0), obs=y)

    return Foreign(functools.partial(model, 3), (torch.randn(4),))


@foreign
def enumerated_by_decoration() -> Foreign:
    """``config_enumerate`` on the model, in an expanded site without a plate of its own dimension."""

    @config_enumerate
    def model(y):
        p = pyro.param("p", torch.tensor([0.3, 0.7]), constraint=constraints.simplex)
        loc = pyro.param("loc", torch.tensor([-1.0, 1.0]))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(p.expand(len(y), 2)))
            pyro.sample("y", dist.Normal(Vindex(loc)[z], 1.0), obs=y)

    return Foreign(model, (torch.randn(4),))


@foreign
def reparametrised() -> Foreign:
    """A hierarchical mixture whose locations are decentred (``poutine.reparam``)."""

    def centred(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("components", 3):
            loc = pyro.sample("loc", dist.Normal(mean, 2.0))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(3)))
            pyro.sample("y", dist.Normal(Vindex(loc)[..., z], 0.5), obs=y)

    return Foreign(poutine.reparam(centred, config={"loc": LocScaleReparam(0.0)}), (torch.randn(5),))


@foreign
def tempered() -> Foreign:
    """The whole model under ``poutine.scale``, as in tempered posteriors and in annealing tutorials."""

    def model(y):
        loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.4, 0.6])))
            pyro.sample("y", dist.Normal(Vindex(loc)[..., z], 1.0), obs=y)

    return Foreign(poutine.scale(model, scale=0.25), (torch.randn(4),))


@foreign
def missing_entries_by_mask() -> Foreign:
    """Missing entries hidden by ``dist.mask``, as everybody does who has NaN in the data."""

    def model(y):
        seen = ~y.isnan()
        w = pyro.param("w", torch.linspace(-1, 1, 12).reshape(3, 4))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.4)).to_event(1))
            pyro.sample("y", dist.Normal(s @ w, 0.5).mask(seen).to_event(1), obs=y.nan_to_num())

    y = torch.randn(4, 4)
    y[0, 1] = y[2, 3] = float("nan")
    return Foreign(model, (y,))


@foreign
def deterministic_products() -> Foreign:
    """A product of switches and strengths kept as ``pyro.deterministic``, with two observed sites below it."""

    def model(y, total):
        strength = pyro.sample("strength", dist.LogNormal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.4)).to_event(1))
            used = pyro.deterministic("used", s * strength, event_dim=1)
            pyro.sample("y", dist.Normal(used, 0.5).to_event(1), obs=y)
            pyro.sample("total", dist.Normal(used.sum(-1), 0.2), obs=total)

    return Foreign(model, (torch.randn(4, 3), torch.randn(4)))


@foreign
def dependent_switches() -> Foreign:
    """Vector, categorical, scalar and count sites that depend on each other in one plate."""

    def model(y):
        with pyro.plate("data", len(y)):
            kind = pyro.sample("kind", dist.Categorical(torch.tensor([0.6, 0.4])))
            s = pyro.sample("s", dist.Bernoulli(torch.tensor([[0.2, 0.7], [0.9, 0.4]])[kind]).to_event(1))
            n = pyro.sample("n", dist.Poisson(1.0 + s.sum(-1)))
            pyro.sample("y", dist.Normal(n - kind, 1.0), obs=y)

    return Foreign(model, (torch.randn(3),), max_count={"n": 5})


@foreign
def first_column() -> Foreign:
    """``s[:, 0]``: dimensions counted from the left do not survive a new one in front."""

    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.4)).to_event(1))
            pyro.sample("y", dist.Normal(s[:, 0] - 2 * s[:, 1], 1.0), obs=y)

    return Foreign(model, (torch.randn(4),))
