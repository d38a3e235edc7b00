"""The mixture of Pyro's tutorial "Gaussian Mixture Model" (tutorial/source/gmm.ipynb).

As there: Dirichlet weights, one LogNormal scale for all components, locations in a plate of their own, ``config_enumerate`` on the model.
Added: the data plate can be subsampled.
"""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import config_enumerate

from tests.user_models import UserModel

NUM_COMPONENTS = 3


@config_enumerate
def model(data, batch_size=None):
    weights = pyro.sample("weights", dist.Dirichlet(torch.full((NUM_COMPONENTS,), 0.5)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 2.0))
    with pyro.plate("components", NUM_COMPONENTS):
        locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(data), subsample_size=batch_size) as index:
        assignment = pyro.sample("assignment", dist.Categorical(weights))
        pyro.sample("obs", dist.Normal(locs[assignment], scale), obs=data[index])


def data_plate(data, batch_size=None):
    """Plate of the guide."""
    return pyro.plate("data", len(data), subsample_size=batch_size, dim=-1)


def make() -> UserModel:
    data = torch.cat([torch.randn(8) + centre for centre in (0.0, 5.0, 11.0)])
    return UserModel(model, (data,), ["assignment"], NUM_COMPONENTS, 1, batch={"batch_size": 6}, create_plates=data_plate)
