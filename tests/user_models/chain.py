"""A chain A -> B -> C of Bernoulli variables with B hidden, as in Pyro's examples/toy_mixture_model_discrete_enumeration.py.

As there: Beta priors of conditional probabilities that are indexed with ``Vindex``, both ``config_enumerate`` and an annotation at the
hidden site, and observations in a dictionary beside an argument that the model does not use.
"""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import config_enumerate
from pyro.ops.indexing import Vindex

from tests.user_models import UserModel


@config_enumerate
def model(prior, obs, num_obs):
    p_a = pyro.sample("p_A", dist.Beta(1, 1))
    p_b = pyro.sample("p_B", dist.Beta(torch.ones(2), torch.ones(2)).to_event(1))
    p_c = pyro.sample("p_C", dist.Beta(torch.ones(2), torch.ones(2)).to_event(1))
    with pyro.plate("data_plate", num_obs):
        a = pyro.sample("A", dist.Bernoulli(p_a.expand(num_obs)), obs=obs["A"])
        b = pyro.sample("B", dist.Bernoulli(Vindex(p_b)[a.long()]), infer={"enumerate": "parallel"})
        pyro.sample("C", dist.Bernoulli(Vindex(p_c)[b.long()]), obs=obs["C"])


def make() -> UserModel:
    size = 20
    obs = {"A": torch.bernoulli(torch.full((size,), 0.4)), "C": torch.bernoulli(torch.full((size,), 0.7))}
    return UserModel(model, (None, obs, size), ["B"], 2, 1)
