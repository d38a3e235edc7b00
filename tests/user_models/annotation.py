"""The model of Dawid & Skene (1979) for annotators of unequal skill, as in NumPyro's examples/annotation.py, in Pyro.

As there: a confusion matrix for every annotator in two nested plates, items in a plate at dimension -2 with the annotations nested in it
at -1, and ``Vindex`` with the annotators of the positions and the items' classes.
"""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import config_enumerate
from pyro.ops.indexing import Vindex

from tests.user_models import UserModel

NUM_CLASSES = 3


@config_enumerate
def model(positions, annotations, batch_size=None):
    num_items, num_positions = annotations.shape
    with pyro.plate("annotator", int(positions.max()) + 1, dim=-2), pyro.plate("class", NUM_CLASSES, dim=-1):
        beta = pyro.sample("beta", dist.Dirichlet(torch.ones(NUM_CLASSES)))
    pi = pyro.sample("pi", dist.Dirichlet(torch.ones(NUM_CLASSES)))
    with pyro.plate("item", num_items, subsample_size=batch_size, dim=-2) as index:
        c = pyro.sample("c", dist.Categorical(pi))
        with pyro.plate("position", num_positions, dim=-1):
            pyro.sample("y", dist.Categorical(Vindex(beta)[positions, c, :]), obs=annotations[index])


def item_plate(positions, annotations, batch_size=None):
    """Plate of the guide."""
    return pyro.plate("item", len(annotations), subsample_size=batch_size, dim=-2)


def make() -> UserModel:
    positions = torch.tensor([0, 0, 0, 1, 2, 3, 4])  # the first annotator saw each item three times
    annotations = torch.randint(NUM_CLASSES, (15, 1)).expand(-1, len(positions)).clone()
    noise = torch.rand(annotations.shape) < 0.3
    annotations[noise] = torch.randint(NUM_CLASSES, (int(noise.sum()),))
    return UserModel(model, (positions, annotations), ["c"], NUM_CLASSES, 2, batch={"batch_size": 5}, create_plates=item_plate)
